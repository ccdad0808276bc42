"""The first figures: attnc beside torch, in the same run.

    python bench/first_figures.py [--rounds 15]

Each peer lives in a process of its own, driven turn by turn over a pipe (bench/peer.py); all get the threads that torch takes.
A row gives medians with (min to max), and the ratio of the medians with its bound. A peer's time beside the others is held
against its time alone: where they differ by over 5 %, something else used the machine, and the row is marked.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import rich.box
from rich.console import Console
from rich.table import Table

PEER = str(Path(__file__).parent / "peer.py")
Shape = tuple[int, int, int, int]
Row = tuple[str, Shape]  # what is run, and (batch, heads, length, head dim)
MAIN: Shape = (1, 8, 2048, 64)
LONG: Shape = (1, 8, 4096, 64)
TINY: Shape = (1, 1, 16, 16)


class Peer:
    """A process that runs one library."""

    def __init__(self, library: str, environment: dict[str, str]):
        self.library = library
        self.process = subprocess.Popen(
            [sys.executable, PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def order(self, **what: object):
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process of {self.library} ended")
        return json.loads(answer)["seconds"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def interleave(runs: list[tuple[Peer, Row]], rounds: int, repeats: int) -> tuple[list[list[float]], bool]:
    """Seconds of each run, turn by turn, and whether they agree with the time of each alone.

    The same peer may appear twice, with two rows: it then prepares anew at each turn.
    """
    peers = [peer for peer, _ in runs]
    shared = len(set(map(id, peers))) < len(peers)
    alone, together = [], [[] for _ in runs]
    for peer, (kind, shape) in runs:
        peer.order(prepare=[peer.library, kind, shape])
        peer.order(run=repeats)  # warm
        alone.append(statistics.median(statistics.median(peer.order(run=repeats)) for _ in range(max(3, rounds // 3))))
    for _ in range(rounds):
        for times, (peer, (kind, shape)) in zip(together, runs, strict=True):
            if shared:
                peer.order(prepare=[peer.library, kind, shape])
            time.sleep(0.003)  # until the neighbour's idle threads have stopped spinning
            times.append(statistics.median(peer.order(run=repeats)))
    steady = all(abs(statistics.median(t) / a - 1) <= 0.05 for t, a in zip(together, alone, strict=True))
    return together, steady


def spread(seconds: list[float]) -> str:
    """Median (min to max), in a unit that fits."""
    middle = statistics.median(seconds)
    unit, factor = ("µs", 1e6) if middle < 1e-3 else ("ms", 1e3) if middle < 1 else ("s", 1)
    return f"{middle * factor:.4g} {unit} ({min(seconds) * factor:.4g} to {max(seconds) * factor:.4g})"


def first_calls(library: str, number: int, environment: dict[str, str]) -> list[float]:
    """Seconds of the first calls in a fresh process."""
    command = [sys.executable, "-W", "ignore", PEER, "first", library, str(number)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15, help="turns that each peer takes")
    rounds = parser.parse_args().rounds
    table = Table("figure", "attnc", "beside it", "ratio or time", "bound", box=rich.box.SIMPLE)
    misses = 0

    def row(
        name: str, ours: list[float], label: str, theirs: list[float], bound: float | None, *, ratio: bool, steady: bool = True
    ):
        nonlocal misses
        value = statistics.median(ours) / statistics.median(theirs) if ratio else statistics.median(ours)
        shown = f"{value:.2f} ×" if ratio else spread([value]).split(" (")[0]
        verdict = ""
        if bound is not None:
            missed = value > bound
            misses += missed
            verdict = f"≤ {bound:g} ×" if ratio else "≤ " + spread([bound]).split(" (")[0]
            verdict += " MISSED" if missed else " ok"
        beside = f"{label} {spread(theirs)}" if theirs else ""
        table.add_row(name + ("" if steady else " (disturbed)"), spread(ours), beside, shown, verdict)

    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "ATTNC_CACHE_DIR": cache}
        attnc, sdpa, flex = (Peer(library, environment) for library in ("attnc", "sdpa", "flex"))

        def compare(name: str, ours: Row, label: str, beside: tuple[Peer, Row], bound: float | None, repeats: int = 3) -> None:
            (own, other), steady = interleave([(attnc, ours), beside], rounds, repeats)
            row(name, own, label, other, bound, ratio=True, steady=steady)

        dense = (attnc, ("dense", MAIN))
        compare("dense f32 1×8×2048×64", ("dense", MAIN), "SDPA", (sdpa, ("dense", MAIN)), 1.4)
        compare("causal f32 1×8×4096×64", ("causal", LONG), "own dense", (attnc, ("dense", LONG)), 0.65)
        compare("   the same", ("causal", LONG), "SDPA", (sdpa, ("causal", LONG)), None)
        for kind, title in (("alibi", "ALiBi"), ("soft_cap", "soft cap")):
            compare(f"{title} f32 1×8×2048×64", (kind, MAIN), "own dense", dense, 1.5)
            compare("   the same", (kind, MAIN), "flex eager", (flex, (kind, MAIN)), None, repeats=1)
        (own, other), steady = interleave([(attnc, ("dense", TINY)), (sdpa, ("dense", TINY))], rounds, 2000)
        row("steady call 1×1×16×16", own, "SDPA", other, 40e-6, ratio=False, steady=steady)
        for peer in (attnc, sdpa, flex):
            peer.close()

    cold, further, warm, theirs = [], [], [], []
    for _ in range(5):
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "ATTNC_CACHE_DIR": cache}
            first, *others = first_calls("attnc", 5, environment)
            cold.append(first)
            further += others
            warm += first_calls("attnc", 1, environment)
    theirs += first_calls("flex", 1, dict(os.environ))
    row("first call, empty cache", cold, "flex eager", theirs, 1.0, ratio=False)
    row("each further mod", further, "", [], 0.35, ratio=False)
    row("first call, second process", warm, "", [], 0.2, ratio=False)
    Console(width=140).print(table)
    if misses:
        raise SystemExit(f"{misses} figures missed their bound")


if __name__ == "__main__":
    main()
