"""The roofline: every row's rate over its arithmetic intensity, under what the machine allows. Needs matplotlib."""

from __future__ import annotations

import importlib
import importlib.util
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnc.bench.peers import TITLES
from attnc.bench.run import Result

COLOURS = {
    "attnc": "#d62728",
    "sdpa": "#1f77b4",
    "flex": "#9467bd",
    "compiled": "#8c564b",
    "onnxruntime": "#2ca02c",
    "openvino": "#ff7f0e",
    "iree": "#17becf",
}


def refusal(file: Path) -> str | None:
    """Why no plot can be drawn into `file`, if so: asked before anything is measured."""
    if file.suffix not in (".svg", ".png", ".pdf"):
        return f"{file} does not end in .svg, .png or .pdf"
    if importlib.util.find_spec("matplotlib") is None:
        return "the plot needs matplotlib, which is not installed: make bench-peers installs it"
    return None


def draw(results: Sequence[Result], file: Path) -> None:
    """Write the roofline of all timed rows to an SVG, PNG or PDF file."""
    timed = [result for result in results if result.timings["attnc"].times and result.fma > 0 and result.read > 0]
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "attnc"  # the same picture is the same file
    figure, axes = importlib.import_module("matplotlib.pyplot").subplots(figsize=(10, 6.5))
    for name, colour in COLOURS.items():
        points = [_point(result, name) for result in timed if name in result.timings and result.timings[name].times]
        if points:
            size, order = (42, 3) if name == "attnc" else (20, 2)
            axes.scatter(*zip(*points, strict=True), s=size, color=colour, zorder=order, label=TITLES[name], alpha=0.85)
    if timed:
        _roof(axes, timed)
    axes.set(xscale="log", yscale="log", xlabel="arithmetic intensity: operations a byte of inputs and output")
    axes.set_ylabel("GF/s over live pairs")
    axes.grid(alpha=0.25, which="both")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def _point(result: Result, name: str) -> tuple[float, float]:
    return _intensity(result), result.flops / result.timings[name].median / 1e9


def _intensity(result: Result) -> float:
    share = result.pairs / (result.case.queries * result.case.keys)
    return result.case.intensity * share


def _roof(axes: Any, timed: Sequence[Result]) -> None:
    """The FMA peak, and the bandwidth of the largest row: the smaller ones may sit in a cache, above it."""
    peak = statistics.median(result.fma for result in timed)
    largest = max(timed, key=lambda result: result.case.cache_bytes)
    low, high = (pick(_intensity(result) for result in timed) for pick in (min, max))
    ends = [low / 2, peak / largest.read, max(high * 2, peak / largest.read * 2)]
    axes.plot(ends, [min(peak, x * largest.read) for x in ends], color="black", linewidth=1.2)
    axes.annotate(f"FMA peak {peak:.0f} GF/s", (ends[2], peak), ha="right", va="bottom")
    axes.annotate(f"{largest.read:.0f} GB/s", (ends[0], ends[0] * largest.read), ha="left", va="bottom")
