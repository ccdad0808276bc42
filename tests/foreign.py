"""Kernels for a machine that is not at hand: cross-compiled, linked with a small driver, and run by an emulator.

`attention(lowered, target, directory)` is a `CompiledAttention` like that of `Lowered.compile()`, but each call is a process of
`qemu-aarch64`. The driver's source is `driver.c`, beside this file.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

from attnc import pipeline
from attnc.lowered import CompiledAttention, Lowered
from attnc.runtime.abi import KernelRecord
from attnc.runtime.attention import Attention
from attnc.target import Target

EMULATOR, COMPILER = "qemu-aarch64", "aarch64-linux-gnu-gcc"
AARCH64 = Target("aarch64-unknown-linux-gnu", "generic", "+neon", 128, 32)
THREADS = 2
BYTES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "i1": 1}
DRIVER = Path(__file__).with_name("driver.c")
_numbers = itertools.count()


def attention(lowered: Lowered, target: Target, directory: Path) -> CompiledAttention:
    """What `lowered` says, built for `target` in `directory` and run by the emulator. A fault is located on this machine."""
    objects = pipeline.to_objects(lowered.code, target)
    record = KernelRecord.from_json(lowered.code.record)
    program = build(record, objects, directory)
    compiled = Attention(record, objects)
    compiled.launch = lambda words, keep=None: launch(program, record, words)
    host = Target.host()
    return CompiledAttention(compiled, lowered.defaults, lambda words: pipeline.locate(lowered.module, host, words))


def build(record: KernelRecord, objects: Sequence[bytes], directory: Path) -> Path:
    """A static program of the driver and the objects."""
    names = []
    for n, data in enumerate(objects):
        names.append(directory / f"{n}.o")
        names[-1].write_bytes(data)
    program = directory / f"{record.name}.{next(_numbers)}"
    name = f'-DKERNEL="{record.name}"'
    subprocess.run([COMPILER, "-O1", "-Wall", "-static", "-pthread", name, "-o", program, DRIVER, *names, "-lm"], check=True)
    return program


def launch(program: Path, record: KernelRecord, words: Sequence[int | float]) -> int:
    """Run on argument words that point into this process: buffers go by file, and results come back. The fault word."""
    packed = struct.pack(record.format, *words)
    places, job, at = [], [], 0
    for argument in record.arguments:
        if argument.kind != "buffer":
            at += 1
            continue
        address, *rest = (int(word) for word in words[at : at + 1 + 2 * argument.rank])
        sizes, strides = rest[: argument.rank], rest[argument.rank :]
        extent = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1
        size = BYTES[argument.dtype] * (extent if all(sizes) else 0)
        places.append((argument, address, size))
        job += [struct.pack("=2q", at, size), ctypes.string_at(address, size) if size else b""]
        at += 1 + 2 * argument.rank
    thread_bytes = -(-record.thread_bytes // 64) * 64
    head = struct.pack("=4q", record.words, len(places), thread_bytes, THREADS)
    asked, answered = program.with_suffix(".job"), program.with_suffix(".result")
    asked.write_bytes(b"".join([head, packed, *job]))
    done = subprocess.run([EMULATOR, program, asked, answered], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{program.name} under {EMULATOR}: exit {done.returncode} {done.stderr}"
    answer, at = answered.read_bytes(), 40
    for argument, address, size in places:
        if argument.role in ("out", "lse", "max"):
            ctypes.memmove(address, answer[at : at + size], size)
        at += size
    return struct.unpack_from("=5q", answer)[4]
