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
from dataclasses import replace
from pathlib import Path

from attnc import pipeline
from attnc.lowered import CompiledAttention, Lowered
from attnc.runtime.abi import KernelRecord
from attnc.runtime.attention import Attention
from attnc.target import Target

EMULATOR, COMPILER = "qemu-aarch64", "aarch64-linux-gnu-gcc"
AARCH64 = Target("aarch64-unknown-linux-gnu", "generic", "+neon", 128, 32)
AARCH64_BF16 = replace(AARCH64, features="+neon,+bf16")
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
    kernel = compiled.kernel

    def run(words: Sequence[int | float], keep: object = None) -> int:
        return launch(program, record, words, kernel.part_words(words))

    compiled.launch = run
    host = Target.host()
    return CompiledAttention(compiled, lowered.defaults, lambda words: pipeline.locate(lowered.module, host, words))


def build(record: KernelRecord, objects: Sequence[bytes], directory: Path) -> Path:
    """A static program of the driver and the objects."""
    names = []
    for n, data in enumerate(objects):
        names.append(directory / f"{n}.o")
        names[-1].write_bytes(data)
    program = directory / f"{record.name}.{next(_numbers)}"
    kernels = record.extra.get("kernels", [{"name": record.name, "thread_bytes": record.thread_bytes}])
    table = " ".join(f'K({n}, "{kernel["name"]}", {kernel["thread_bytes"]})' for n, kernel in enumerate(kernels))
    options = ["-O1", "-Wall", "-Werror", "-static", "-pthread", f"-DKERNELS={table}"]
    subprocess.run([COMPILER, *options, "-o", program, DRIVER, *names, "-lm"], check=True)
    return program


def launch(program: Path, record: KernelRecord, words: Sequence[int | float], parts: Sequence[int]) -> int:
    """Run on argument words that point into this process, and `parts`, those of the memory between kernels: buffers go by file,
    and results come back. The fault word."""
    packed = struct.pack(record.format, *words) + struct.pack(f"={len(parts)}q", *parts)
    buffers: list[tuple[str, int, int]] = []  # role, address, bytes
    job: list[bytes] = []
    at = 0

    def add(role: str, item: int, rank: int, given: Sequence[int | float]) -> None:
        """A buffer whose words are the first of `given`."""
        nonlocal at
        address, *rest = (int(word) for word in given[: 1 + 2 * rank])
        sizes, strides = rest[:rank], rest[rank:]
        size = item * (sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True)) + 1) if all(sizes) else 0
        buffers.append((role, address, size))
        job.append(struct.pack("=2q", at, size))
        job.append(b"\x7f" * size if role == "between" else ctypes.string_at(address, size) if size else b"")
        at += 1 + 2 * rank

    for argument in record.arguments:
        if argument.kind == "buffer":
            add(argument.role, BYTES[argument.dtype], argument.rank, words[at:])
        else:
            at += 1
    for part in record.extra.get("scratch", ()):
        add("between", BYTES[part["dtype"]], len(part["sizes"]), parts[at - record.words :])
    head = struct.pack("=3q", record.words + len(parts), len(buffers), THREADS)
    asked, answered = program.with_suffix(".job"), program.with_suffix(".result")
    asked.write_bytes(b"".join([head, packed, *job]))
    done = subprocess.run([EMULATOR, program, asked, answered], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{program.name} under {EMULATOR}: exit {done.returncode} {done.stderr}"
    answer, at = answered.read_bytes(), 8
    for role, address, size in buffers:
        if role in ("out", "lse", "max"):
            ctypes.memmove(address, answer[at : at + size], size)
        at += size
    return int.from_bytes(answer[:8], "little")
