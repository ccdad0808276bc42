"""A compiled kernel that can be called: plan → memory → context → work → fault.

A kernel is one native kernel or several, run one after the other on one list of arguments, with memory that passes between
them. The object of native kernel NAME exports
- `NAME.plan(args, result)`: result is four words: the number of tasks, the bytes of memory shared by all threads, how many
  leading bytes of it must be zero, and an estimate of the work in floating-point operations. It reads sizes alone;
- `NAME.work(context)`: run by every thread until all tasks are done. context is eight words: args, shared memory, the threads'
  scratch, bytes of scratch a thread, next task, next thread slot, number of tasks, fault.

The record of several has two entries more than that of one:

    "kernels": [{"name": "attention_split", "thread_bytes": 65536}, {"name": "attention_merge", "thread_bytes": 4096}],
    "scratch": [{"dtype": "f32", "sizes": [[1], [2, 1], [19, 1024], [64]]}, ...]

The buffers of "scratch" follow the arguments; they are dense. A size is a number ([64]), or the word at a place among the
arguments over a divisor, rounded up ([19, 1024]).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

from attnc.errors import ArgumentsError, CompileError
from attnc.runtime import threads
from attnc.runtime.abi import KernelRecord
from attnc.runtime.arena import Block, scratch
from attnc.runtime.objects import LoadedObjects
from attnc.runtime.objects import lock as objects_lock

ONE_THREAD_FLOPS = 1_500_000
"""Below about this much work one thread is faster than a parallel region."""

ALIGNMENT = 64
SMALL_SCRATCH = 1 << 20
"""Memory up to this size stays with a kernel, so that small calls do not ask the arena."""

BYTES = {"f64": 8, "f32": 4, "i64": 8, "i32": 4, "f16": 2, "bf16": 2, "i8": 1}

SIZES_KEPT = 1024

_PLAN = struct.Struct("=4q")
_PLAN_CALL = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)  # keeps the GIL: it takes nanoseconds


class _Frame:
    """Memory of one call in flight: the words of all arguments, plan's result, the context. `words` and `numbers` are views of
    the same words, as integers and as doubles."""

    __slots__ = ("address", "buffer", "numbers", "words")

    def __init__(self, words: int):
        self.buffer = (ctypes.c_char * (8 * (words + 4 + 8)))()
        self.address = ctypes.addressof(self.buffer)
        bytes_ = memoryview(self.buffer).cast("B")
        self.words = bytes_.cast("Q")
        self.numbers = bytes_.cast("d")


@dataclass(frozen=True)
class _Parts:
    """The buffers between native kernels, for certain sizes."""

    words: list[int]
    """Their words, with addresses counted from 0."""
    bytes: int
    """How many they are together."""
    places: list[tuple[int, int]]
    """(place among all words, address counted from 0) of each."""


class _Stage(NamedTuple):
    """A native kernel with its plan for certain sizes."""

    address: int
    call: threads.Call
    thread_bytes: int
    tasks: int
    shared: int
    zero: int
    count: int
    """How many threads run it."""


class _Schedule(NamedTuple):
    """The stages of a call, and the bytes of memory that each has in turn."""

    stages: list[_Stage]
    bytes: int


class Kernel:
    """A compiled kernel. Loads its objects at the first launch; safe to call from many threads at once."""

    def __init__(self, record: KernelRecord, objects: Sequence[bytes]):
        """Raises `CompileError` where the record does not say what memory passes between its native kernels."""
        self.record = record
        self.objects: Sequence[bytes] = tuple(objects)
        try:
            kernels = record.extra.get("kernels", [{"name": record.name, "thread_bytes": record.thread_bytes}])
            self._names = [str(kernel["name"]) for kernel in kernels]
            self._thread_bytes = [_aligned(int(kernel["thread_bytes"])) for kernel in kernels]
            self._rules = [
                (BYTES[part["dtype"]], [(size[0], size[1] if len(size) > 1 else 0) for size in part["sizes"]])
                for part in record.extra.get("scratch", ())
            ]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CompileError(f"the record of {record.name} is damaged: {type(error).__name__}: {error}") from error
        layout = struct.Struct(record.format + "".join("Q" + "q" * (2 * len(sizes)) for _, sizes in self._rules))
        self._pack = layout.pack_into
        self._words = layout.size // 8
        self._context = self._words + 4
        self._sizes = itemgetter(*sorted({place for _, rule in self._rules for place, divisor in rule if divisor} or {0}))
        self._parts: dict[Any, _Parts] = {}
        self._frames: list[_Frame] = []
        self._blocks: list[Block] = []
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
            self._natives = list(zip(plans, works, calls, self._thread_bytes, strict=True))
            self._loaded = loaded

    def launch(self, words: Sequence[int | float], keep: object = None) -> int:
        """Run on the argument `words` (`record.format` tells their kinds) and return the fault word, 0 where all went well.

        That the memory which the words point to has the sizes they claim is the caller's responsibility; `keep` is what
        keeps it alive, even where Ctrl-C ends this function while threads still run.
        """
        if self._loaded is None:
            self.load()
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = _Frame(self._words)
        parts = self._fill(frame, words)
        fault = self._run(frame, parts, self._schedule(frame, threads.thread_count()), keep)
        self._frames.append(frame)
        return fault

    def part_words(self, words: Sequence[int | float]) -> list[int]:
        """The words of the buffers between native kernels, their addresses counted from 0."""
        return self._parts_for(words).words

    def _parts_for(self, words: Sequence[int | float]) -> _Parts:
        if not self._rules:
            return _NO_PARTS
        sizes = self._sizes(words)
        found = self._parts.get(sizes)
        if found is None:
            part_words: list[int] = []
            places: list[tuple[int, int]] = []
            end = 0
            for item, rule in self._rules:
                dims = [-(-int(words[place]) // divisor) if divisor else place for place, divisor in rule]
                strides, step = [], 1
                for size in reversed(dims):
                    strides.append(step)
                    step *= size
                places.append((self.record.words + len(part_words), end))
                part_words += (end, *dims, *reversed(strides))
                end += _aligned(step * item)
            if len(self._parts) >= SIZES_KEPT:
                self._parts.clear()
            found = self._parts[sizes] = _Parts(part_words, end, places)
        return found

    def _fill(self, frame: _Frame, words: Sequence[int | float]) -> _Parts:
        """Put all words into a frame, but the addresses of the buffers between native kernels."""
        parts = self._parts_for(words)
        try:
            self._pack(frame.buffer, 0, *words, *parts.words)
        except struct.error as error:
            raise ArgumentsError(f"an argument of kernel {self.record.name} does not fit in 64 bits: {error}") from error
        return parts

    def _schedule(self, frame: _Frame, most: int) -> _Schedule:
        """Ask the plans about a frame's sizes, with at most so many threads."""
        stages: list[_Stage] = []
        size = 0
        for plan, address, call, thread_bytes in self._natives:
            plan(frame.address, frame.address + 8 * self._words)
            tasks, shared, zero, flops = _PLAN.unpack_from(frame.buffer, 8 * self._words)
            if tasks > 0:
                count = 1 if flops < ONE_THREAD_FLOPS else min(most, tasks)
                shared = _aligned(shared)
                size = max(size, shared + count * thread_bytes)
                stages.append(_Stage(address, call, thread_bytes, tasks, shared, zero, count))
        return _Schedule(stages, size)

    def _run(self, frame: _Frame, parts: _Parts, schedule: _Schedule, keep: object) -> int:
        """Each native kernel on its team, one after the other."""
        stages, size = schedule
        size += parts.bytes
        try:
            block = self._blocks.pop()
        except IndexError:
            block = None
        if block is None or block.size < size:
            block = scratch.take(size)
        words, base = frame.words, block.address
        for place, start in parts.places:
            words[place] = base + start
        base += parts.bytes
        first = self._context
        context = frame.address + 8 * first
        words[first], words[first + 1] = frame.address, base
        fault = 0
        for address, call, thread_bytes, tasks, shared, zero, count in stages:
            if zero:
                ctypes.memset(base, 0, zero)
            words[first + 2], words[first + 3], words[first + 4] = base + shared, thread_bytes, 0
            words[first + 5], words[first + 6], words[first + 7] = 0, tasks, 0
            if count == 1:
                call(context)
            else:
                threads.team().run(address, call, context, count, (frame, block, self._loaded, keep))
            fault = words[first + 7]
            if fault:
                break
        if block.size <= SMALL_SCRATCH:
            self._blocks.append(block)
        else:
            scratch.give(block)
        return fault


class Repeated:
    """Launches of a kernel whose words are the same each time but for a few: calls on other tensors of the same sizes. Saves
    packing the words and asking the plans, half of what a launch costs."""

    def __init__(self, kernel: Kernel, words: Sequence[int | float], addresses: Sequence[int], numbers: Sequence[int]):
        kernel.load()
        self._kernel, self._words = kernel, tuple(words)
        self._addresses, self._numbers = tuple(addresses), tuple(numbers)
        frame = _Frame(kernel._words)
        self._parts = kernel._fill(frame, words)
        self._most = threads.thread_count()
        self._schedule = kernel._schedule(frame, self._most)
        self._frames = [frame]

    def launch(self, addresses: Sequence[int], numbers: Sequence[float], keep: object = None) -> int:
        """As `Kernel.launch` with these words at their places."""
        kernel = self._kernel
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = _Frame(kernel._words)
            kernel._fill(frame, self._words)
        words, doubles = frame.words, frame.numbers
        for place, address in zip(self._addresses, addresses):
            words[place] = address
        for place, number in zip(self._numbers, numbers):
            doubles[place] = number
        most = threads.thread_count()
        if most != self._most:
            self._schedule, self._most = kernel._schedule(frame, most), most
        fault = kernel._run(frame, self._parts, self._schedule, keep)
        self._frames.append(frame)
        return fault


_NO_PARTS = _Parts([], 0, [])


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
