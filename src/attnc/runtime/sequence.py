"""A program of several kernels: run one after the other on one list of arguments, with memory that passes between them.

Its record has two entries more than that of one kernel:

    "kernels": [{"name": "attention_split", "thread_bytes": 65536}, {"name": "attention_merge", "thread_bytes": 4096}],
    "scratch": [{"dtype": "f32", "sizes": [[1], [2, 1], [19, 1024], [64]]}, ...]

The buffers of "scratch" follow the arguments; they are dense. A size is a number ([64]), or the word at a place among the
arguments over a divisor, rounded up ([19, 1024]).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from attnc.errors import ArgumentsError, CompileError
from attnc.runtime import threads
from attnc.runtime.abi import KernelRecord
from attnc.runtime.arena import Block, scratch
from attnc.runtime.launch import ALIGNMENT, ONE_THREAD_FLOPS, SMALL_SCRATCH, Kernel
from attnc.runtime.objects import LoadedObjects
from attnc.runtime.objects import lock as objects_lock

BYTES = {"f64": 8, "f32": 4, "i64": 8, "i32": 4, "f16": 2, "bf16": 2, "i8": 1}

LAYOUTS_KEPT = 1024

_WORD = struct.Struct("=Q")
_PLAN = struct.Struct("=4q")
_CONTEXT = struct.Struct("=8Q")
_PLAN_CALL = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


class _Frame:
    """Memory of one call in flight: the argument words, plan's result and the context, and small scratch."""

    __slots__ = ("address", "buffer", "memory")

    def __init__(self, words: int):
        self.buffer = (ctypes.c_char * (8 * (words + 4 + 8)))()
        self.address = ctypes.addressof(self.buffer)
        self.memory: Block | None = None


def kernel_of(record: KernelRecord, objects: Sequence[bytes]) -> Kernel | KernelSequence:
    """What launches the program of a record. Raises `CompileError` where the record is damaged."""
    return KernelSequence(record, objects) if "kernels" in record.extra else Kernel(record, objects)


class KernelSequence:
    """Compiled kernels that make one program; a drop-in for `Kernel`."""

    def __init__(self, record: KernelRecord, objects: Sequence[bytes]):
        """Raises `CompileError` where the record does not say what memory passes between the kernels."""
        self.record = record
        self.objects: Sequence[bytes] = tuple(objects)
        try:
            kernels: list[dict[str, Any]] = record.extra["kernels"]
            self._names = [str(kernel["name"]) for kernel in kernels]
            self._thread_bytes = [-(-int(kernel["thread_bytes"]) // ALIGNMENT) * ALIGNMENT for kernel in kernels]
            self._parts = [
                (BYTES[part["dtype"]], [(size[0], size[1] if len(size) > 1 else 0) for size in part["sizes"]])
                for part in record.extra.get("scratch", ())
            ]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CompileError(f"the record of {record.name} is damaged: {type(error).__name__}: {error}") from error
        words = "".join("q" + "q" * (2 * len(sizes)) for _, sizes in self._parts)
        layout = struct.Struct(record.format + words)
        self._pack = layout.pack_into
        self._sizes = itemgetter(*sorted({place for _, rule in self._parts for place, divisor in rule if divisor} or {0}))
        self._layouts: dict[Any, tuple[list[int], int, list[tuple[int, int]]]] = {}
        self._result = layout.size
        self._context = layout.size + 32
        self._words = layout.size // 8
        self._frames: list[_Frame] = []
        self._loaded: LoadedObjects | None = None

    def load(self) -> None:
        """Link the objects into this process, if that is not yet done. Raises `CompileError`."""
        with objects_lock:
            if self._loaded is not None:
                return
            symbols = [f"{name}.{function}" for name in self._names for function in ("plan", "work")]
            loaded = LoadedObjects(self.objects, symbols)
            plans = [_PLAN_CALL(loaded.addresses[f"{name}.plan"]) for name in self._names]
            works = [loaded.addresses[f"{name}.work"] for name in self._names]
            calls = [threads.as_call(address) for address in works]
            self._stages = list(zip(plans, works, calls, self._thread_bytes, strict=True))
            self._loaded = loaded

    def part_words(self, words: Sequence[int | float]) -> tuple[list[int], int]:
        """The words of the buffers between kernels, their addresses counted from 0, and how many bytes they are together."""
        found: list[int] = []
        end = 0
        for item, rule in self._parts:
            sizes = [-(-int(words[place]) // divisor) if divisor else place for place, divisor in rule]
            strides, step = [], 1
            for size in reversed(sizes):
                strides.append(step)
                step *= size
            found += (end, *sizes, *reversed(strides))
            end += -(-step * item // ALIGNMENT) * ALIGNMENT
        return found, end

    def launch(self, words: Sequence[int | float], keep: object = None) -> int:
        """Run on the argument `words` and return the fault word, as `Kernel.launch` does."""
        if self._loaded is None:
            self.load()
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = _Frame(self._words)
        sizes = self._sizes(words)
        known = self._layouts.get(sizes)
        if known is None:
            known = self._remember(sizes, words)
        parts, parts_bytes, addresses = known
        try:
            self._pack(frame.buffer, 0, *words, *parts)
        except struct.error as error:
            raise ArgumentsError(f"an argument of kernel {self.record.name} does not fit in 64 bits: {error}") from error
        # The kernels' plans read sizes alone, so the buffers between kernels get their places after that.
        plans = []
        size = 0
        for plan, _, _, thread_bytes in self._stages:
            plan(frame.address, frame.address + self._result)
            tasks, shared, zero, flops = _PLAN.unpack_from(frame.buffer, self._result)
            count = 1 if flops < ONE_THREAD_FLOPS else max(1, min(threads.thread_count(), tasks))
            shared = -(-shared // ALIGNMENT) * ALIGNMENT
            size = max(size, shared + count * thread_bytes)
            plans.append((tasks, shared, zero, count))
        block = frame.memory
        if block is None or block.size < parts_bytes + size:
            block = scratch.take(parts_bytes + size)
            if block.size <= SMALL_SCRATCH:
                frame.memory = block
        for offset, start in addresses:
            _WORD.pack_into(frame.buffer, offset, block.address + start)
        fault = self._run(frame, block, block.address + parts_bytes, plans, keep)
        if block is not frame.memory:
            scratch.give(block)
        self._frames.append(frame)
        return fault

    def _remember(self, sizes: Any, words: Sequence[int | float]) -> tuple[list[int], int, list[tuple[int, int]]]:
        """The buffers' words for these sizes, their bytes, and (offset among the words, place in their memory) of addresses."""
        parts, size = self.part_words(words)
        addresses, place = [], 0
        for _, rule in self._parts:
            addresses.append((8 * (self.record.words + place), parts[place]))
            place += 1 + 2 * len(rule)
        if len(self._layouts) >= LAYOUTS_KEPT:
            self._layouts.clear()
        found = self._layouts[sizes] = parts, size, addresses
        return found

    def _run(self, frame: _Frame, block: Block, free: int, plans: Sequence[tuple[int, int, int, int]], keep: object) -> int:
        """Each kernel on its team; memory from `free` on is theirs in turn."""
        context = frame.address + self._context
        for (_, address, call, thread_bytes), (tasks, shared, zero, count) in zip(self._stages, plans, strict=True):
            if tasks <= 0:
                continue
            if zero:
                ctypes.memset(free, 0, zero)
            _CONTEXT.pack_into(frame.buffer, self._context, frame.address, free, free + shared, thread_bytes, 0, 0, tasks, 0)
            if count == 1:
                call(context)
            else:
                threads.team().run(address, call, context, count, (frame, block, self._loaded, keep))
            fault = _CONTEXT.unpack_from(frame.buffer, self._context)[7]
            if fault:
                return fault
        return 0
