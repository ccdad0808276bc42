"""Scratch memory for kernels: checked out by a call, given back after it, a bounded amount kept for the next one.

Fresh pages cost about as much as packing does, so blocks are kept; they come from anonymous private mappings, which are
page-aligned, cost nothing until touched, and belong to one process after a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading

from attnc import knobs

HUGE_PAGE = 2 << 20
SMALLEST = 4096


class Block:
    """`size` bytes at `address` (page-aligned). The memory lives as long as this object."""

    __slots__ = ("_hold", "address", "size")

    def __init__(self, size: int):
        self.size = size
        if hasattr(mmap, "MAP_PRIVATE"):
            mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if size >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without huge pages
                    mapping.madvise(mmap.MADV_HUGEPAGE)
        else:
            mapping = mmap.mmap(-1, size)
        self._hold = ctypes.c_char.from_buffer(mapping)
        self.address = ctypes.addressof(self._hold)


class Arena:
    """Blocks at rest, by size; at most `limit` bytes of them (None: by `ATTNC_SCRATCH_SIZE`). Safe for many threads."""

    def __init__(self, limit: int | None = None):
        self._limit = limit
        self._lock = threading.Lock()
        self._idle: dict[int, list[Block]] = {}
        self._idle_bytes = 0

    @property
    def idle_bytes(self) -> int:
        """How many bytes are kept."""
        return self._idle_bytes

    def take(self, size: int) -> Block:
        """A block of at least `size` bytes, contents undefined. Raises `MemoryError` where the system has none."""
        size = size_class(size)
        with self._lock:
            blocks = self._idle.get(size)
            if blocks:
                self._idle_bytes -= size
                return blocks.pop()
        try:
            return Block(size)
        except (OSError, ValueError, OverflowError):
            self.clear()
        try:
            return Block(size)
        except (OSError, ValueError, OverflowError) as error:
            raise MemoryError(f"attnc needs {size} bytes of scratch memory for this call") from error

    def give(self, block: Block) -> None:
        """Return a block; beyond the limit the largest idle ones are freed first."""
        limit = knobs.scratch_size() if self._limit is None else self._limit
        if block.size > limit:
            return
        with self._lock:
            self._idle.setdefault(block.size, []).append(block)
            self._idle_bytes += block.size
            while self._idle_bytes > limit:
                largest = max(size for size, blocks in self._idle.items() if blocks)
                self._idle[largest].pop(0)
                self._idle_bytes -= largest

    def clear(self) -> None:
        """Free all idle blocks."""
        with self._lock:
            self._idle.clear()
            self._idle_bytes = 0

    def _after_fork_in_child(self) -> None:
        # Another thread of the parent may have held the lock.
        self._lock = threading.Lock()
        self._idle = {}
        self._idle_bytes = 0


def size_class(size: int) -> int:
    """`size` rounded up to four steps an octave, so that calls of like sizes share blocks."""
    if size <= SMALLEST:
        return SMALLEST
    step = max(SMALLEST, 1 << ((size - 1).bit_length() - 3))
    return -(-size // step) * step


scratch = Arena()
"""The process's own arena."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=scratch._after_fork_in_child)
