"""Results as tables: for the terminal, and as Markdown for bench/RESULTS.md."""

from __future__ import annotations

import math
from collections.abc import Sequence

import rich.box
from rich.console import Console
from rich.table import Table

from attnc.bench.fresh import Figure
from attnc.bench.peers import TITLES
from attnc.bench.run import Result, Timing, Verdict
from attnc.bench.session import Session
from attnc.bench.suites import SUITES

HEADER = ("row", "attnc", "rate", "limit", "beside it (× attnc's time)", "bounds")
FIGURE_HEADER = ("figure", "library", "median (min–max)", "bounds")
INTRODUCTION = """Written by `{command}`: each library in a process of its own with {threads} threads, turn by turn.
Times are medians with (min–max); a ratio is a contender's time over attnc's. The limit is the FMA peak or, where queries are
few, the lower of the read bandwidth and what 0.6 of the FMA peak lets through, both measured between the turns of the row."""


def time_of(timing: Timing) -> str:
    """Median (min–max), or why there is none."""
    return _spread(timing.times, "s") if timing.times else timing.status


def _spread(values: Sequence[float], unit: str) -> str:
    if not values:
        return ""
    ordered = sorted(values)
    middle = ordered[len(ordered) // 2] if len(ordered) % 2 else sum(ordered[len(ordered) // 2 - 1 :][:2]) / 2
    factor, unit = _scale(middle, unit)
    if len(values) == 1:
        return f"{middle * factor:.4g} {unit}"
    return f"{middle * factor:.4g} {unit} ({ordered[0] * factor:.3g}–{ordered[-1] * factor:.3g})"


def _scale(value: float, unit: str) -> tuple[float, str]:
    """(factor, unit) that make `value` readable."""
    if unit == "B":
        return 1 / (1 << 20), "MiB"
    if unit != "s":
        return 1.0, unit
    return (1e6, "µs") if value < 1e-3 else (1e3, "ms") if value < 1 else (1.0, "s")


def cells(result: Result) -> tuple[str, ...]:
    """A row of the table; lines within a cell are separated by line feeds."""
    name = f"{result.title}\n{result.case}" + ("\n(disturbed)" if result.disturbed else "")
    own = result.timings["attnc"]
    rate = limit = ""
    if own.times:
        unit = "GB/s" if result.by_bytes else "GF/s"
        rate, limit = f"{result.rate():.4g} {unit}", f"{100 * result.rate() / result.limit:.0f} % of {result.limit:.3g}"
    return name, time_of(own), rate, limit, "\n".join(_beside(result)), "\n".join(map(_verdict, result.verdicts))


def _beside(result: Result) -> list[str]:
    """Each other contender with its time over attnc's."""
    own = result.timings["attnc"].median
    lines = []
    for label, timing in result.timings.items():
        if label == "attnc":
            continue
        ratio = f" {timing.median / own:.2f} ×" if timing.times and not math.isnan(own) else ""
        first = f", first call {timing.first:.1f} s" if label == "compiled" and timing.times else ""
        lines.append(f"{TITLES.get(label, label)}{ratio}: {time_of(timing)}{first}")
    return lines


def _verdict(verdict: Verdict | Figure) -> str:
    """MISSED where a must does not hold, "short" of an aim, "?" where there was nothing to compare with."""
    if verdict.met is None and verdict.reached is None:
        word = "?"
    else:
        word = "MISSED" if verdict.met is False else "short of the aim" if verdict.reached is False else "ok"
    return f"{word}: {verdict.text}" if isinstance(verdict, Verdict) else word


def figure_cells(figure: Figure) -> tuple[str, ...]:
    wants = []
    for word, bound in (("must", figure.must), ("aim", figure.aim)):
        if bound is not None:
            factor, unit = _scale(bound, figure.unit)
            wants.append(f"{word} ≤ {bound * factor:.3g} {unit}")
    bounds = f"{_verdict(figure)} ({', '.join(wants)})" if wants else ""
    value = _spread(figure.values, figure.unit) if figure.values else figure.status
    return figure.title, TITLES[figure.peer], value, bounds


def table(suite: str, results: Sequence[Result] | Sequence[Figure]) -> Table:
    """One suite as a table for the terminal."""
    is_figures = any(isinstance(result, Figure) for result in results)
    shown = Table(*(FIGURE_HEADER if is_figures else HEADER), title=suite, box=rich.box.SIMPLE, title_style="bold")
    for result in results:
        shown.add_row(*(figure_cells(result) if isinstance(result, Figure) else cells(result)))
    return shown


def console() -> Console:
    """The terminal, or 170 columns where there is none."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(width=170, highlight=False)


def summary(session: Session) -> list[str]:
    """What to know at a glance."""
    disturbed = [f"{result.title} {result.case}" for result in session.results if result.disturbed]
    lines = ["INTERRUPTED: this is not all"] if session.interrupted else []
    lines += [session.limits] if session.limits else []
    lines += [f"WRONG: {text}" for text in session.wrong]
    lines += [f"MISSED: {text}" for text in session.misses]
    lines += [f"not judged: {text}" for text in session.unjudged]
    if disturbed:
        lines.append(
            f"{len(disturbed)} rows were disturbed (solo and interleaved times differ by over 5 %): " + "; ".join(disturbed)
        )
    return lines


def markdown(session: Session, command: str) -> str:
    """The whole session as a page."""
    introduction = INTRODUCTION.format(command=command, threads=session.options.threads)
    parts = ["# attnc beside its peers", "", introduction, ""]
    parts += _rows_of_markdown(("machine", ""), list(session.machine.items()))
    parts += _rows_of_markdown(("package", "version"), list(session.versions.items()))
    if lines := summary(session):
        parts += [f"- {line}" for line in lines] + [""]
    for suite in SUITES:
        results = [result for result in session.results if result.suite == suite]
        figures = [figure for figure in session.figures if figure.suite == suite]
        if results:
            parts += [f"## {suite}", ""] + _rows_of_markdown(HEADER, [cells(result) for result in results])
        if figures:
            parts += [f"## {suite}", ""] + _rows_of_markdown(FIGURE_HEADER, [figure_cells(figure) for figure in figures])
    return "\n".join(parts).rstrip() + "\n"


def _rows_of_markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(header)} |", "|" + " --- |" * len(header)]
    lines += [f"| {' | '.join(cell.replace('|', '/').replace(chr(10), '<br>') for cell in row)} |" for row in rows]
    return [*lines, ""]
