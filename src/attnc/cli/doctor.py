"""`attnc doctor`: what attnc sees of this machine, what it makes of it, and whether it works here."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from attnc.target import Target


@click.command()
def doctor() -> None:
    """Show the CPU, threads, versions, tile sizes, knobs and the disk cache, as attnc sees them; then test itself for a second.

    Exits with 1 where the self-test fails.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console()

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, text in facts():
        table.add_row(name, text)
    console.print(table, highlight=False)
    failed = False
    for line, works in self_test():
        failed |= not works
        console.print(line, highlight=False, markup=False)
    if failed:
        sys.exit(1)


def facts() -> list[tuple[str, str]]:
    """(name, text) of all that is worth telling."""
    import importlib.metadata

    from attnc import knobs
    from attnc.cli.cache import readable
    from attnc.errors import KnobError
    from attnc.runtime import threads
    from attnc.runtime.cache import DiskCache, cache_directory
    from attnc.target import Target

    lines = [("python", f"{platform.python_version()} on {platform.platform()}")]
    for package in ("attnc", "llvmlite", "xdsl", "numpy", "torch"):
        try:
            lines.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            lines.append((package, "not installed"))
    try:
        import llvmlite.binding as llvm

        lines.append(("LLVM", ".".join(map(str, llvm.llvm_version_info))))
        target = Target.host()
        lines.append(("CPU", f"{cpu_name()} ({target.cpu}), {target.triple}"))
        lines.append(("vectors", f"{target.registers} registers of {target.vector_bits} bits"))
        lines.append(("caches", f"L1 {readable(target.l1_bytes)}, L2 {readable(target.l2_bytes)} a core"))
        on = [name[1:] for name in target.features.split(",") if name.startswith("+")]
        notable = ("avx2", "fma", "avx512f", "avx512bf16", "avx512fp16", "amx-tile", "amx-bf16", "neon", "bf16", "sve")
        lines.append(("features", ", ".join(name for name in notable if name in on) or "none that matter"))
        lines += tile_model(target)
    except KnobError as error:
        lines.append(("CPU", f"invalid: {error.message}"))
    except (ImportError, RuntimeError, ValueError) as error:
        lines.append(("LLVM", f"does not work: {error}"))
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401 - its OpenMP threads are what is asked about
    kinds = {"openmp": "torch's own OpenMP threads", "plain": "attnc's own threads"}
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    pool = kinds.get(threads.team().name, threads.team().name)
    try:
        lines.append(("threads", f"{threads.thread_count()} on {allowed} of {os.cpu_count()} CPUs, {pool}"))
    except KnobError as error:
        lines.append(("threads", f"invalid: {error.message}"))
    try:
        disk = DiskCache(cache_directory(), knobs.cache_size())
        entries = disk.entries()
        state = "on" if knobs.cache() else "off"
        size = readable(sum(entry.size for entry in entries))
        lines.append(("disk cache", f"{state}, {disk.directory}, {len(entries)} entries, {size} of {readable(disk.limit)}"))
    except KnobError as error:
        lines.append(("disk cache", f"invalid: {error.message}"))
    for knob in knobs.KNOBS:
        try:
            value = knob()
        except KnobError as error:
            value = f"invalid: {error.message}"
        text = "" if value == knob.default or value is None else f" (now {value})"
        lines.append((knob.name, knob.help + text))
    lines.append(("bench peers", ", ".join(bench_peers())))
    lines.append(("command", " ".join([sys.executable, "-m", "attnc.cli"])))
    return lines


def cpu_name() -> str:
    """The CPU as it calls itself."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith(("model name", "Model")):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def tile_model(target: Target) -> list[tuple[str, str]]:
    """What the model of the machine chooses for the usual head dims: (name, text)."""
    from attnc.analysis.machine import few_query_tile_sizes, has_amx, has_bf16_dot, register_tile, stored_tile, tile_sizes

    lines = []
    for dtype, bits in (("f32, f16, bf16", 32), ("f64", 64)):
        rows, vectors = register_tile(target, bits)
        lines.append((f"tiles of {dtype}", f"{rows} rows × {vectors} vectors in registers"))
        for dim in (64, 128, 256):
            rows, keys = tile_sizes(target, dim, dim, bits)
            few_rows, few_keys, chunk = few_query_tile_sizes(target, dim, dim, bits)
            many = " (tuned)" if stored_tile(target, dim, dim, bits) else ""
            few = " (tuned)" if stored_tile(target, dim, dim, bits, few_queries=True) else ""
            text = f"{rows} queries × {keys} keys{many}; few queries: {few_rows} × {few_keys} in chunks of {chunk} keys{few}"
            lines.append((f"   head dim {dim}", text))
    how = "in AMX tiles" if has_amx(target) else "by the CPU's dot products" if has_bf16_dot(target) else "in f32"
    lines.append(("bf16 products", how))
    return lines


def bench_peers() -> Iterator[str]:
    """The packages that `attnc bench` can compare with, and their versions."""
    import importlib.metadata

    for package in ("onnxruntime", "openvino", "iree-base-compiler", "iree-base-runtime"):
        try:
            yield f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{package} is not installed"


def self_test(seconds: float = 1.0) -> Iterator[tuple[str, bool]]:
    """(line, whether it works) of small cases held against f64, until the time is up; the first is always run."""
    try:
        import torch
    except ImportError:
        yield "self-test: not run, torch is not installed", True
        return
    from attnc.bench import problem
    from attnc.bench.case import Case
    from attnc.flex import flex_attention

    cases = (
        Case(1, 4, 130, 64),
        Case(1, 4, 130, 64, mod="alibi", mask="causal"),
        Case(1, 8, 1, 64, "bf16", keys=700, kv_heads=2),
        Case(1, 2, 130, 96, "f16", mod="soft_cap", mask="documents", size=4, layout="bshd"),
        Case(1, 2, 70, 64, "f64", mod="relative_bias", mask="window", size=30),
    )
    begin = time.perf_counter()
    tested = 0
    with torch.inference_mode():
        for case in cases:
            if tested and time.perf_counter() - begin > seconds:
                break
            posed = problem.make(case)
            expected = problem.reference(posed)
            try:
                out = flex_attention(
                    posed.query, posed.key, posed.value, posed.score_mod, None, None, True, mask_mod=posed.mask_mod
                )
            except Exception as error:
                yield f"self-test: {case} FAILED: {type(error).__name__}: {error}", False
                return
            error = problem.error_of(out, expected, posed)
            if not error <= expected.bound:
                yield f"self-test: {case} is WRONG: off by {error:.2g}, allowed {expected.bound:.2g}", False
                return
            tested += 1
    rest = "; the time was up for the others" if tested < len(cases) else ""
    yield f"self-test: {tested} of {len(cases)} cases run, all right, {time.perf_counter() - begin:.1f} s{rest}", True
