"""Every environment variable of attnc, typed, in one table.

A knob is read when it is called: `knobs.threads()`. A value that does not parse raises `KnobError`. Those marked `compiles`
change the code that is compiled and so belong to every cache key (`compile_key`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from attnc.errors import KnobError

T = TypeVar("T")


_environment: dict[Any, Any] | None = getattr(os.environ, "_data", None)
"""The table behind `os.environ`. At every call it is asked for a name that is mostly not in it, where `os.environ.get` encodes
the name, raises an exception and catches it."""


@dataclass(frozen=True)
class Knob(Generic[T]):
    """One environment variable: `parse` turns its text into a value, `default` stands where it is unset or empty."""

    name: str
    parse: Callable[[str], T]
    default: T
    help: str
    compiles: bool = False
    _key: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_key", os.environ.encodekey(self.name))

    def __call__(self) -> T:
        if _environment is not None and self._key not in _environment:
            return self.default
        text = os.environ.get(self.name, "")
        if not text:
            return self.default
        try:
            return self.parse(text)
        except (ValueError, RuntimeError) as error:
            raise KnobError(f"{self.name}={text!r}: {error}", remedy=f"{self.name}: {self.help}") from None


def _switch(text: str) -> bool:
    word = text.strip().lower()
    if word in ("on", "1", "true", "yes"):
        return True
    if word in ("off", "0", "false", "no"):
        return False
    raise ValueError("neither on nor off")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("not a whole number") from None


def _bytes(text: str) -> int:
    """`512M`, `2G`, `65536`: a number of bytes."""
    word = text.strip().upper().removesuffix("B").removesuffix("I")
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}.get(word[-1:], 0)
    try:
        size = int(float(word[:-1] if factor else word) * (factor or 1))
    except (ValueError, OverflowError):
        raise ValueError("not a number of bytes") from None
    if size < 0:
        raise ValueError("negative")
    return size


def _positive(text: str) -> int:
    number = _whole(text)
    if number < 1:
        raise ValueError("less than 1")
    if number >= 1 << 31:
        raise ValueError("more than 2147483647")
    return number


def _vector_bits(text: str) -> int:
    bits = _whole(text)
    if bits not in (128, 256, 512):
        raise ValueError("neither 128, 256 nor 512")
    return bits


def _path(text: str) -> Path:
    return Path(text).expanduser()


cache: Knob[bool] = Knob("ATTNC_CACHE", _switch, True, "on or off: the disk cache of compiled kernels")
cache_dir: Knob[Path | None] = Knob("ATTNC_CACHE_DIR", _path, None, "directory of the disk cache")
cache_size: Knob[int] = Knob("ATTNC_CACHE_SIZE", _bytes, 512 << 20, "bound of the disk cache in bytes; K, M, G may follow")
threads: Knob[int | None] = Knob("ATTNC_THREADS", _positive, None, "number of threads; unset: torch's number, or one a CPU")
scratch_size: Knob[int] = Knob("ATTNC_SCRATCH_SIZE", _bytes, 256 << 20, "bytes of idle scratch memory kept for the next call")
tile_rows: Knob[int | None] = Knob("ATTNC_TILE_ROWS", _positive, None, "query rows of a task; unset: by the target", True)
tile_keys: Knob[int | None] = Knob("ATTNC_TILE_KEYS", _positive, None, "keys of a block; unset: by the target", True)
tile_chunk: Knob[int | None] = Knob("ATTNC_TILE_CHUNK", _positive, None, "keys of a chunk; unset: by the target", True)
vector_bits: Knob[int | None] = Knob("ATTNC_VECTOR_BITS", _vector_bits, None, "128, 256 or 512; unset: the CPU's own", True)
bf16_dot: Knob[bool | None] = Knob(
    "ATTNC_BF16_DOT", _switch, None, "on or off: bf16 dot products where the CPU has them; unset: by the target", True
)
amx: Knob[bool] = Knob(
    "ATTNC_AMX", _switch, False, "on or off: AMX tiles for bf16 where CPU and kernel permit them; not yet run on hardware", True
)
dump_ir: Knob[Path | None] = Knob("ATTNC_DUMP_IR", _path, None, "directory that each stage's text is written to")

KNOBS: tuple[Knob, ...] = (
    cache,
    cache_dir,
    cache_size,
    threads,
    scratch_size,
    tile_rows,
    tile_keys,
    tile_chunk,
    vector_bits,
    bf16_dot,
    amx,
    dump_ir,
)


def compile_key() -> tuple[tuple[str, object], ...]:
    """The knobs that change compiled code, by name: a part of every cache key."""
    return tuple((knob.name, knob()) for knob in KNOBS if knob.compiles)
