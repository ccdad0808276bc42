"""A compiled kernel that can be called: plan → scratch → context → work → fault.

The object of kernel NAME exports
- `NAME.plan(args, result)`: result is four words: the number of tasks, the bytes of memory shared by all threads, how many
  leading bytes of it must be zero, and an estimate of the work in floating-point operations;
- `NAME.work(context)`: run by every thread until all tasks are done. context is eight words: args, shared memory, the threads'
  scratch, bytes of scratch a thread, next task, next thread slot, number of tasks, fault.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

from attnc.errors import ArgumentsError
from attnc.runtime import threads
from attnc.runtime.abi import KernelRecord
from attnc.runtime.arena import Block, scratch
from attnc.runtime.objects import LoadedObjects
from attnc.runtime.objects import lock as objects_lock

ONE_THREAD_FLOPS = 1_500_000
"""Below about this much work one thread is faster than a parallel region."""

ALIGNMENT = 64
SMALL_SCRATCH = 256 * 1024
"""Scratch up to this size stays with a frame, so that small calls do not ask the arena."""

_PLAN = struct.Struct("=4q")
_CONTEXT = struct.Struct("=8Q")
_PLAN_CALL = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)  # keeps the GIL: it takes nanoseconds


class _Frame:
    """Memory of one call in flight: the argument words, plan's result and the context, and small scratch."""

    __slots__ = ("args", "buffer", "context", "context_offset", "result", "result_offset", "scratch")

    def __init__(self, words: int):
        self.buffer = (ctypes.c_char * (8 * (words + 4 + 8)))()
        self.args = ctypes.addressof(self.buffer)
        self.result_offset = 8 * words
        self.result = self.args + self.result_offset
        self.context_offset = self.result_offset + 32
        self.context = self.args + self.context_offset
        self.scratch: Block | None = None


class Kernel:
    """A compiled kernel. Loads its objects at the first launch; safe to call from many threads at once."""

    def __init__(self, record: KernelRecord, objects: Sequence[bytes]):
        self.record = record
        self.objects: Sequence[bytes] = tuple(objects)
        self._pack = struct.Struct(record.format).pack_into
        self._words = record.words
        self._thread_bytes = -(-record.thread_bytes // ALIGNMENT) * ALIGNMENT
        self._frames: list[_Frame] = []
        self._loaded: LoadedObjects | None = None

    def load(self) -> None:
        """Link the objects into this process, if that is not yet done. Raises `CompileError`."""
        with objects_lock:
            if self._loaded is not None:
                return
            name = self.record.name
            loaded = LoadedObjects(self.objects, (f"{name}.plan", f"{name}.work"))
            self._plan = _PLAN_CALL(loaded.addresses[f"{name}.plan"])
            self._work_address = loaded.addresses[f"{name}.work"]
            self._work = threads.as_call(self._work_address)
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
        try:
            self._pack(frame.buffer, 0, *words)
        except struct.error as error:
            raise ArgumentsError(f"an argument of kernel {self.record.name} does not fit in 64 bits: {error}") from error
        self._plan(frame.args, frame.result)
        tasks, shared, zero, flops = _PLAN.unpack_from(frame.buffer, frame.result_offset)
        if tasks <= 0:
            self._frames.append(frame)
            return 0
        count = 1
        if flops >= ONE_THREAD_FLOPS and tasks > 1:
            count = min(threads.thread_count(), tasks)
        shared = -(-shared // ALIGNMENT) * ALIGNMENT
        size = shared + count * self._thread_bytes
        block = frame.scratch
        if block is None or block.size < size:
            block = scratch.take(size)
            if block.size <= SMALL_SCRATCH:
                frame.scratch = block
        address = block.address
        if zero:
            ctypes.memset(address, 0, zero)
        _CONTEXT.pack_into(
            frame.buffer, frame.context_offset, frame.args, address, address + shared, self._thread_bytes, 0, 0, tasks, 0
        )
        if count == 1:
            self._work(frame.context)
        else:
            threads.team().run(self._work_address, self._work, frame.context, count, (frame, block, self._loaded, keep))
        fault = _CONTEXT.unpack_from(frame.buffer, frame.context_offset)[7]
        if block is not frame.scratch:
            scratch.give(block)
        self._frames.append(frame)
        return fault
