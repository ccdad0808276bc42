"""Tile sizes that tuning found to be faster on a machine than what the model of it says: a small file in the cache directory.

    {"<machine>": [{"head_dim": 64, "value_dim": 64, "element_bits": 32, "few_queries": false, "rows": 96, "keys": 512,
                    "chunk": 0}]}

A machine is known by its whole record (`Target.machine`), and what is stored for it becomes part of that record and so of every
cache key. Clearing the cache leaves the file; `write(machine, ())` empties it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attnc.errors import TuningError
from attnc.runtime.cache import disk_cache

NAME = "tuning.json"
LARGEST = 1 << 16


@dataclass(frozen=True, order=True)
class TunedTile:
    """Tile sizes for one class of shapes: head dims E and Ev, the bits of an element as it is computed with (32, or 64), and
    whether it is the program of few queries. `chunk` is that program's alone, else 0."""

    head_dim: int
    value_dim: int
    element_bits: int
    few_queries: bool
    rows: int
    keys: int
    chunk: int = 0

    @property
    def shape(self) -> tuple[int, int, int, bool]:
        return self.head_dim, self.value_dim, self.element_bits, self.few_queries

    @property
    def is_valid(self) -> bool:
        sizes = (self.head_dim, self.value_dim, self.rows, self.keys)
        return all(0 < size <= LARGEST for size in sizes) and 0 <= self.chunk <= LARGEST and self.keys % 16 == 0


def read(machine: str) -> tuple[TunedTile, ...]:
    """What is stored for `machine`, in a fixed order; nothing where there is no file, no cache, or what is there makes no
    sense."""
    disk = disk_cache()
    path = disk.file(NAME) if disk is not None else None
    if path is None:
        return ()
    try:
        status = path.stat()
    except OSError:
        return ()
    return _read(path, machine, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=4)
def _read(path: Path, machine: str, changed: int, size: int) -> tuple[TunedTile, ...]:
    del changed, size  # with them another file is another key
    found = []
    for entry in _load(path).get(machine, ()):
        with contextlib.suppress(AttributeError, KeyError, OverflowError, TypeError, ValueError):
            numbers = {name: int(value) for name, value in entry.items()}
            tile = TunedTile(**{**numbers, "few_queries": bool(numbers["few_queries"])})
            if tile.is_valid:
                found.append(tile)
    return tuple(sorted(found))


def write(machine: str, tiles: Sequence[TunedTile]) -> Path:
    """Store `tiles` for `machine`, in place of all that was; other machines' stay. Raises `TuningError` where the cache is off
    or cannot be written."""
    disk = disk_cache()
    path = disk.file(NAME, create=True) if disk is not None else None
    if path is None:
        raise TuningError("there is no cache directory to store tile sizes in")
    everything = {**_load(path), machine: [asdict(tile) for tile in sorted(tiles)]}
    name = ""
    try:
        handle, name = tempfile.mkstemp(prefix="new-", suffix=".tmp", dir=path.parent)
        with open(handle, "w") as file:
            json.dump(everything, file, indent=1)
        os.replace(name, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise TuningError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def _load(path: Path) -> dict[str, Any]:
    """The file's contents; empty where it is missing or damaged."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return {str(k): v for k, v in data.items() if isinstance(v, list)} if isinstance(data, dict) else {}
