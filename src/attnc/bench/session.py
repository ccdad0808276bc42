"""A whole run: the machine, the suites, and everything that came out."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from attnc.bench import fresh, models
from attnc.bench.driver import Peers
from attnc.bench.fresh import Figure
from attnc.bench.pace import Pace
from attnc.bench.peers import FILES, load
from attnc.bench.run import Options, Result, run_row
from attnc.bench.suites import TIMED
from attnc.target import Target

Report = Callable[[str], None]
Shown = Callable[[str, Sequence[Result] | Sequence[Figure]], None]


@dataclass
class Session:
    """What was measured on which machine."""

    machine: dict[str, str]
    versions: dict[str, str]
    options: Options
    results: list[Result] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    interrupted: bool = False

    def to_json(self) -> dict[str, Any]:
        figures = [
            asdict(figure)
            | ({"median": figure.median} if figure.values else {})
            | {"met": figure.met, "reached": figure.reached}
            for figure in self.figures
        ]
        return {
            "machine": self.machine,
            "versions": self.versions,
            "options": asdict(self.options),
            "interrupted": self.interrupted,
            "rows": [result.to_json() for result in self.results],
            "figures": figures,
        }

    @property
    def limits(self) -> str:
        """The FMA peak over all rows, in words."""
        peaks = [result.fma for result in self.results if result.fma > 0]
        if not peaks:
            return ""
        return f"FMA peak {statistics.median(peaks):.0f} GF/s (of rows: {min(peaks):.0f} to {max(peaks):.0f})"

    @property
    def misses(self) -> list[str]:
        """What had to hold and did not."""
        rows = [f"{r.title} {r.case}: {v.text}" for r in self.results for v in r.verdicts if v.met is False]
        return rows + [f"{figure.title}: {figure.median:.3g} {figure.unit}" for figure in self.figures if figure.met is False]

    @property
    def unjudged(self) -> list[str]:
        """What should have been judged and was not, for want of a figure."""
        rows = [
            f"{r.title} {r.case}: {v.text}" for r in self.results for v in r.verdicts if v.met is None and v.reached is None
        ]
        return rows + [f"{f.title}: {f.status}" for f in self.figures if f.must is not None and not f.values]

    @property
    def wrong(self) -> list[str]:
        """Rows that attnc itself computed wrongly, or not at all."""
        return [f"{r.title} {r.case}: {t.status}" for r in self.results if (t := r.timings["attnc"]).status != "ok"]


def machine() -> dict[str, str]:
    """What machine this is, as far as speed depends on it."""
    target = Target.host()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": f"{model} ({target.cpu}), {os.cpu_count()} CPUs",
        "vectors": f"{target.registers} registers of {target.vector_bits} bits",
        "caches": f"L1 {target.l1_bytes >> 10} KiB, L2 {target.l2_bytes >> 10} KiB a core",
        "tile sizes": f"{len(target.tuned)} tuned, the others by the model" if target.tuned else "by the model of the machine",
        "memory": f"{memory:.0f} GiB",
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Versions of all that takes part; "not installed" where a peer is missing."""
    found = {"python": platform.python_version()}
    packages = {"attnc", "llvmlite", "numpy", "transformers", *(package for name in FILES for package in _packages(name))}
    for package in sorted(packages):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _packages(name: str) -> tuple[str, ...]:
    return load(name).PACKAGES


def run(
    suites: Sequence[str],
    options: Options,
    *,
    full: bool,
    quick: bool,
    only: str,
    report: Report,
    shown: Shown,
    seconds: float | None = None,
) -> Session:
    """Run suites one after the other. `only` keeps the rows whose title and case hold that text; `report` is told what is being
    done, `shown` each suite as soon as it is complete. Where `seconds` are given, rows take fewer turns to end in that time."""
    session = Session(machine(), versions(), options)
    pace = Pace(seconds, tuple(suites), full=full, quick=quick, only=only)
    try:
        _run(session, suites, pace, full, quick, only, report, shown)
    except KeyboardInterrupt:
        session.interrupted = True  # what was measured so far stands
    return session


def _run(
    session: Session, suites: Sequence[str], pace: Pace, full: bool, quick: bool, only: str, report: Report, shown: Shown
) -> None:
    options = session.options
    for suite in suites:
        if suite in TIMED:
            rows = pace.rows[suite]
            begin = len(session.results)
            try:
                with Peers() as peers:
                    for number, row in enumerate(rows, 1):
                        place = f"{suite} {number}/{len(rows)}, {row.title} {row.case}"
                        now = pace.options(row, options)
                        result = run_row(suite, row, peers, now, lambda text, place=place: report(f"{place}: {text}"))
                        session.results.append(result)
            finally:
                shown(suite, session.results[begin:])
            continue
        pace.suites.remove(suite)
        if suite == "compile":
            figures = fresh.compile_time(options.threads, 1 if quick else 5, options.peers, report)
        elif suite == "models":
            chosen = {"full": full, "quick": quick, "only": only, "peers": options.peers}
            figures = models.figures(options.threads, options.turns, options.budget, report, **chosen)
        else:
            length = 4096 if quick else fresh.MEMORY_LENGTH
            figures = fresh.peak_memory(options.threads, length, options.peers, report)
        if quick:
            for figure in figures:
                figure.must = figure.aim = None
        session.figures += figures
        shown(suite, figures)
