"""The first figures, that every later one is held against: attnc beside torch, in a few minutes.

    python bench/first_figures.py [--rounds 15]

A small selection of what `attnc bench` measures, in the same way, with bounds of its own; exits with 1 where one is missed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from attnc.bench import fresh, report
from attnc.bench.case import Case
from attnc.bench.driver import Peers
from attnc.bench.run import Options, run_row
from attnc.bench.suites import Bound, Row

MAIN = Case(1, 8, 2048, 64)
LONG = Case(1, 8, 4096, 64)
ROWS = (
    Row("dense", MAIN, ("sdpa",), (Bound("slower", "sdpa", 1.4),)),
    Row("causal", replace(LONG, mask="causal"), ("sdpa",), (Bound("slower", "own dense", 0.65),), (("own dense", LONG, 0),)),
    Row("ALiBi", replace(MAIN, mod="alibi"), ("flex",), (Bound("slower", "own dense", 1.5),), (("own dense", MAIN, 0),)),
    Row("soft cap", replace(MAIN, mod="soft_cap"), ("flex",), (Bound("slower", "own dense", 1.5),), (("own dense", MAIN, 0),)),
    Row("steady call", Case(1, 1, 16, 16), ("sdpa",), (Bound("seconds", "", 40e-6),)),
)
FIRST_CALLS = (1.0, 0.2, 0.35)
"""Bounds in seconds: first call with an empty cache, with a warm one, each further mod."""


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15, help="turns that each contender takes")
    options = Options(torch.get_num_threads(), parser.parse_args().rounds)

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    with Peers() as peers:
        results = [run_row("first figures", row, peers, options, say) for row in ROWS]
    figures = fresh.compile_time(options.threads, 5, ("flex",), say)
    for figure, bound in zip(figures, FIRST_CALLS, strict=False):
        figure.must, figure.aim = bound, None
    out = report.console()
    out.print(report.table("first figures", results))
    out.print(report.table("first calls", figures))
    missed = [verdict for result in results for verdict in result.verdicts if verdict.met is not True]
    missed += [figure for figure in figures if figure.must is not None and figure.met is not True]
    if missed:
        raise SystemExit(f"{len(missed)} figures missed their bound")


if __name__ == "__main__":
    main()
