"""A run that has to end in time: how much of what is left each row may take."""

from __future__ import annotations

import time
from dataclasses import replace

from attnc.bench.run import Options
from attnc.bench.suites import TIMED, Row, rows_of

ROW_SECONDS = 4.0
"""What a row takes beside its turns: its reference, and making its contenders ready."""
COMPILED_SECONDS = 20.0
"""What the first call of `torch.compile` takes."""
SUITE_SECONDS = {"compile": 90.0, "memory": 30.0}
"""What the suites take that have no turns; others about as long as the first."""
PASSES = 1.7
"""Turns are preceded by some alone, pauses lie between them, and disturbed rows are run once more."""
LEAST_SECONDS = 0.1


class Pace:
    """`seconds` for `suites`, or as long as it takes (None)."""

    def __init__(self, seconds: float | None, suites: tuple[str, ...], *, full: bool, quick: bool, only: str = ""):
        self.end = None if seconds is None else time.monotonic() + seconds
        rows = {suite: rows_of(suite, full=full, quick=quick) for suite in suites if suite in TIMED}
        self.rows = {suite: [row for row in found if only in f"{row.title} {row.case}"] for suite, found in rows.items()}
        self.suites = [suite for suite in suites if suite not in TIMED]
        self.waiting = [row for found in self.rows.values() for row in found]

    def options(self, row: Row, options: Options) -> Options:
        """The options for `row`, which is next: of the time that is left, its share by what each row has to do."""
        self.waiting.remove(row)
        if self.end is None:
            return options
        rows = [row, *self.waiting]
        fixed = sum(SUITE_SECONDS.get(suite, SUITE_SECONDS["compile"]) for suite in self.suites)
        fixed += sum(ROW_SECONDS + COMPILED_SECONDS * ("compiled" in other.peers) for other in rows)
        left = self.end - time.monotonic() - fixed
        share = left / (PASSES * sum(contenders(other, options) for other in rows))
        return replace(options, budget=max(LEAST_SECONDS, min(options.budget, share)), again=share > LEAST_SECONDS)


def contenders(row: Row, options: Options) -> int:
    """How many take turns in a row: attnc itself, its companions, the peers that are wanted, and two limits of the machine."""
    return 3 + len(row.companions) + len([peer for peer in row.peers if options.peers is None or peer in options.peers])
