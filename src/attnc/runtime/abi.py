"""The record of a compiled kernel, and how its arguments become an array of 8-byte words.

    {"name": "attention", "thread_bytes": 65536, "arguments": [
        {"role": "query", "kind": "buffer", "name": "query", "dtype": "f32", "rank": 4,
         "strides": "?x?x?x1", "sizes": "?x?x?x64"},
        {"role": "scale", "kind": "f32", "name": "scale"}, ...]}

A buffer of rank r is a pointer, r sizes and r strides (in elements); `index`, `i64` and `i32` are one word; `f64` and `f32` are
the bits of a double. Role "" marks an argument of a kernel that is not attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from attnc.errors import CompileError

INPUT_ROLES = ("query", "key", "value", "scale", "capture", "number", "blocks", "group")
OUTPUT_ROLES = ("out", "lse", "max")
KINDS = {"f64": "d", "f32": "d", "i64": "q", "i32": "q", "index": "q"}
"""Kinds of scalar arguments and the format of their word."""

DTYPES = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "u8": "uint8",
    "i1": "bool",
}
"""Element types of buffers, by their names in torch (and, bfloat16 aside, in numpy)."""

ALIASES = {
    **{f"si{bits}": f"i{bits}" for bits in (8, 16, 32, 64)},
    **{f"ui{bits}": f"u{bits}" for bits in (8, 16, 32, 64)},
    "bool": "i1",
}


@dataclass(frozen=True)
class Argument:
    """One argument of a kernel: what it is (`role`, `kind`), what it is called, and for a buffer its element type, rank and
    which strides and sizes are fixed (`"?x?x?x1"`: a number is the stride or size, `?` any; "" fixes none)."""

    role: str
    kind: str
    name: str = ""
    dtype: str = ""
    rank: int = 0
    strides: str = ""
    sizes: str = ""

    @property
    def format(self) -> str:
        """Its words as `struct` writes them."""
        return "Q" + "q" * (2 * self.rank) if self.kind == "buffer" else KINDS[self.kind]

    @property
    def words(self) -> int:
        """How many they are."""
        return 1 + 2 * self.rank if self.kind == "buffer" else 1

    @property
    def fixed_strides(self) -> tuple[int | None, ...]:
        """One entry a dim: the stride it must have, or None."""
        return _fields(self.strides, self.rank)

    @property
    def fixed_sizes(self) -> tuple[int | None, ...]:
        """One entry a dim: the size it must have, or None."""
        return _fields(self.sizes, self.rank)

    def describe(self) -> str:
        """`query: f32[?, ?, ?, 64]`, for messages."""
        sizes = ", ".join("?" if size is None else str(size) for size in self.fixed_sizes)
        type_ = f"{self.dtype}[{sizes}]" if self.kind == "buffer" else self.kind
        return f"{self.name or self.role or 'argument'}: {type_}"


@dataclass(frozen=True)
class KernelRecord:
    """What a launcher must know of a kernel. `thread_bytes` is the scratch each thread needs; `extra` all else the compiler
    left (the launcher hands it on unread)."""

    name: str
    arguments: tuple[Argument, ...]
    thread_bytes: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def format(self) -> str:
        """All arguments' words as `struct` writes them."""
        return "=" + "".join(argument.format for argument in self.arguments)

    @property
    def words(self) -> int:
        return sum(argument.words for argument in self.arguments)

    def indices(self, *roles: str) -> tuple[int, ...]:
        """Positions of the arguments with one of these roles."""
        return tuple(i for i, argument in enumerate(self.arguments) if argument.role in roles)

    def to_json(self) -> dict[str, Any]:
        return {
            **self.extra,
            "name": self.name,
            "thread_bytes": self.thread_bytes,
            "arguments": [asdict(argument) for argument in self.arguments],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> KernelRecord:
        """Raises `CompileError` where `data` is no such record."""
        try:
            rest = dict(data)
            arguments = tuple(_argument(entry) for entry in rest.pop("arguments"))
            return KernelRecord(str(rest.pop("name")), arguments, int(rest.pop("thread_bytes", 0)), rest)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CompileError(f"the kernel's record is damaged: {type(error).__name__}: {error}") from error


def _fields(text: str, rank: int) -> tuple[int | None, ...]:
    if not rank:
        return ()
    return tuple(None if field == "?" else int(field) for field in (text.split("x") if text else ["?"] * rank))


def _argument(entry: Mapping[str, Any]) -> Argument:
    kind, dtype, rank = str(entry["kind"]), str(entry.get("dtype") or ""), int(entry.get("rank") or 0)
    dtype = ALIASES.get(dtype, dtype)
    if kind == "buffer":
        if dtype not in DTYPES:
            raise ValueError(f"element type {dtype!r}")
        strides, sizes = str(entry.get("strides") or ""), str(entry.get("sizes") or "")
        for text in (strides, sizes):
            if len(_fields(text, rank)) != rank:
                raise ValueError(f"strides or sizes {text!r} of a buffer of rank {rank}")
        return Argument(str(entry.get("role") or ""), kind, str(entry.get("name") or ""), dtype, rank, strides, sizes)
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r}")
    return Argument(str(entry.get("role") or ""), kind, str(entry.get("name") or ""))
