"""`attnc doctor`: what attnc sees of this machine."""

from __future__ import annotations

import contextlib
import os
import platform
import sys

import click


@click.command()
def doctor() -> None:
    """Show the CPU, threads, versions, knobs and the disk cache, as attnc sees them."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, text in facts():
        table.add_row(name, text)
    Console().print(table, highlight=False)


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
        lines.append(("CPU", f"{target.cpu}, {target.triple}"))
        lines.append(("vectors", f"{target.registers} registers of {target.vector_bits} bits"))
        lines.append(("caches", f"L1 {readable(target.l1_bytes)}, L2 {readable(target.l2_bytes)} a core"))
        on = [name[1:] for name in target.features.split(",") if name.startswith("+")]
        notable = ("avx2", "fma", "avx512f", "avx512bf16", "avx512fp16", "amx-tile", "amx-bf16", "neon", "sve")
        lines.append(("features", ", ".join(name for name in notable if name in on) or "none that matter"))
    except (ImportError, RuntimeError, ValueError) as error:
        lines.append(("LLVM", f"does not work: {error}"))
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401 - its OpenMP threads are what is asked about
    kinds = {"openmp": "torch's own OpenMP threads", "plain": "attnc's own threads"}
    lines.append(("threads", f"{threads.thread_count()} of {os.cpu_count()} CPUs, {kinds[threads.team().name]}"))
    disk = DiskCache(cache_directory(), knobs.cache_size())
    entries = disk.entries()
    state = "on" if knobs.cache() else "off"
    size = readable(sum(entry.size for entry in entries))
    lines.append(("disk cache", f"{state}, {disk.directory}, {len(entries)} entries, {size} of {readable(disk.limit)}"))
    for knob in knobs.KNOBS:
        try:
            value = knob()
        except KnobError as error:
            value = f"invalid: {error.message}"
        text = "" if value == knob.default or value is None else f" (now {value})"
        lines.append((knob.name, knob.help + text))
    lines.append(("command", " ".join([sys.executable, "-m", "attnc.cli"])))
    return lines
