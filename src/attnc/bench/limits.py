"""The machine's own limits, by code that attnc's LLVM tools compile: FMA peak and read bandwidth.

Both take the threads of the row they limit, and the same team; the bandwidth is read over as many bytes as the row's key and
value have, allocated in the same way, again and again, so it is that of the cache where the row fits into one.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import time
from collections.abc import Callable

from attnc.codegen.llvm.compile import to_object
from attnc.codegen.llvm.text import Function, vector
from attnc.runtime import threads as teams
from attnc.runtime.objects import LoadedObjects
from attnc.target import Target

CHUNK = 64 << 10
"""Bytes that a thread reads at a time."""
PEAK_SECONDS = 0.01
_CONTEXT = struct.Struct("=4Q")
_SINK_OFFSET = 64


def fma_text(target: Target) -> tuple[str, int]:
    """A loop of independent fused multiply-adds, all in registers, and the floating-point operations of one round.

    context: [0] rounds, then at byte 64 a place for the sum, so that nothing is optimised away.
    """
    width = target.lanes(32)
    type_ = vector(width, "float")
    # Enough accumulators to hide the latency (4 cycles × 2 units), few enough to leave registers for the two factors.
    count = 24 if target.registers >= 32 else 12
    function = Function("peak", [("ptr", "context")])
    rounds = function.load("i64", "%context", 8)
    factor = function.splat("0x3FEFF00000000000", width, "float")  # just below 1: values stay near 1
    addend = function.splat("0x3F50000000000000", width, "float")

    def body(_: str, values: list[str]) -> list[str]:
        name = f"llvm.fma.v{width}f32"
        return [function.emit(f"call {type_} @{name}({type_} {value}, {type_} {factor}, {type_} {addend})") for value in values]

    # Each begins elsewhere: equal chains would be merged into one.
    starts = [function.splat(f"0x{struct.pack('>d', 1.0 + i / 64).hex().upper()}", width, "float") for i in range(count)]
    values = function.loop(0, rounds, 1, body, [(type_, start) for start in starts])
    total = functools.reduce(lambda a, b: function.emit(f"fadd {type_} {a}, {b}"), values)
    function.store(type_, total, function.pointer("%context", _SINK_OFFSET), 4)
    declaration = f"declare {type_} @llvm.fma.v{width}f32({type_}, {type_}, {type_})"
    return f"{declaration}\n\n{function.finish()}\n", 2 * count * width


def read_text(target: Target) -> str:
    """Reads a buffer once, in chunks that threads take from a counter.

    context: [0] buffer, [1] chunks, [2] next chunk, [3] bytes of a chunk (a multiple of 16 vectors), then a place for the sum.
    """
    width, count = target.lanes(32), 8
    type_, size = vector(width, "i32"), target.vector_bits // 8
    function = Function("read", [("ptr", "context")])
    base = function.load("ptr", "%context", 8)
    chunks = function.load("i64", function.pointer("%context", 8), 8)
    length = function.load("i64", function.pointer("%context", 24), 8)
    counter = function.pointer("%context", 16)
    head, inside, done = function.new_block("chunk"), function.new_block("inside"), function.new_block("done")
    function.branch(head)
    function.place(head)
    chunk = function.emit(f"atomicrmw add ptr {counter}, i64 1 monotonic")
    function.branch_if(function.emit(f"icmp ult i64 {chunk}, {chunks}"), inside, done)
    function.place(inside)
    start = function.pointer(base, function.mul(chunk, length))

    def body(offset: str, sums: list[str]) -> list[str]:
        loads = [function.load(type_, function.pointer(start, function.add(offset, i * size)), 4) for i in range(count)]
        return [function.emit(f"xor {type_} {a}, {b}") for a, b in zip(sums, loads, strict=True)]

    sums = function.loop(0, length, count * size, body, [(type_, "zeroinitializer")] * count)
    total = functools.reduce(lambda a, b: function.emit(f"xor {type_} {a}, {b}"), sums)
    function.store(type_, total, function.pointer("%context", _SINK_OFFSET), 4)
    function.branch(head)
    function.place(done)
    return function.finish() + "\n"


class _Native:
    """A compiled function of a context, run by a team of threads."""

    def __init__(self, name: str, text: str, target: Target, threads: int):
        self._objects = LoadedObjects([to_object(text, target)], [name])
        self._address = self._objects.addresses[name]
        self._call = teams.as_call(self._address)
        self._threads = threads
        self._buffer = (ctypes.c_char * 512)()
        address = ctypes.addressof(self._buffer)
        self._offset = -address % 64
        self._context = address + self._offset

    def __call__(self, *words: int) -> float:
        """Seconds of one run."""
        _CONTEXT.pack_into(self._buffer, self._offset, *words, *[0] * (4 - len(words)))
        begin = time.perf_counter()
        teams.team().run(self._address, self._call, self._context, self._threads, self._buffer)
        return time.perf_counter() - begin


def fma_peak(threads: int, target: Target | None = None) -> Callable[[], float]:
    """A function that measures GF/s of f32 for some 10 ms."""
    target = target or Target.host()
    text, flops = fma_text(target)
    run = _Native("peak", text, target, threads)
    rounds, seconds = 1000, 0.0
    while seconds < PEAK_SECONDS / 4:  # the best of a few: a busy machine must not look like a slow one
        rounds *= 2
        seconds = min(run(rounds) for _ in range(3))
    rounds = int(rounds * PEAK_SECONDS / seconds)
    return lambda: threads * rounds * flops / run(rounds) / 1e9


def read_bandwidth(size: int, threads: int, target: Target | None = None) -> Callable[[], float]:
    """A function that measures GB/s of reading `size` bytes (rounded to whole chunks) once."""
    import torch

    target = target or Target.host()
    chunk = min(CHUNK, max(1024, size // threads // 1024 * 1024))
    chunks = max(1, round(size / chunk))
    data = torch.ones(chunks * chunk // 4, dtype=torch.float32)  # as the row's own tensors are allocated
    run = _Native("read", read_text(target), target, threads)
    address = data.data_ptr()

    def measure(keep: object = data) -> float:
        return chunks * chunk / run(address, chunks, 0, chunk) / 1e9

    return measure
