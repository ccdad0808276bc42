"""Rows into results: each contender checked against f64, then all of them timed turn by turn."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from attnc.bench import peers as libraries
from attnc.bench.case import BYTES, Case
from attnc.bench.driver import Contender, Peer, PeerFailed, Peers, interleave
from attnc.bench.suites import Bound, Row

PEER_ALLOWANCE = 4.0
"""A peer may err so many times as much as is allowed to attnc: it shall be right, not exact."""


@dataclass
class Timing:
    """What one contender did in a row. `status` is "ok", or says why there are no times, which are seconds."""

    label: str
    status: str = "ok"
    times: list[float] = field(default_factory=list)
    alone: float = 0.0
    first: float = 0.0
    error: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.times) if self.times else math.nan


@dataclass
class Verdict:
    """A bound and what came out; `met` and `reached` are None where there is no such demand, or nothing to hold against it."""

    text: str
    value: float
    met: bool | None
    reached: bool | None


@dataclass
class Result:
    """A row that was run. `fma` is GF/s, `read` GB/s, both of this very row; `pairs` are live (query, key) pairs a head."""

    suite: str
    title: str
    case: Case
    timings: dict[str, Timing]
    pairs: int
    fma: float
    read: float
    by_bytes: bool
    disturbed: bool
    verdicts: list[Verdict] = field(default_factory=list)

    def rate(self, name: str = "attnc") -> float:
        """GF/s over live pairs, or GB/s of key and value."""
        seconds = self.timings[name].median
        return (self.case.cache_bytes if self.by_bytes else self.flops) / seconds / 1e9

    @property
    def flops(self) -> float:
        return float(self.case.pair_flops) * self.case.batch * self.case.heads * self.pairs

    @property
    def limit(self) -> float:
        """What the machine allows, in the unit of `rate`: the FMA peak, or for few queries bandwidth or arithmetic."""
        if not self.by_bytes:
            return self.fma
        queries = self.case.queries * self.case.heads / self.case.kv_heads
        return min(self.read, 0.6 * self.fma * BYTES[self.case.dtype] / (2 * queries))

    def to_json(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        for timing in data["timings"].values():
            times = timing["times"]
            timing |= {"median": statistics.median(times), "min": min(times), "max": max(times)} if times else {}
        ok = self.timings["attnc"].status == "ok"
        return data | {"rate": self.rate() if ok else None, "limit": self.limit, "unit": "GB/s" if self.by_bytes else "GF/s"}


@dataclass
class Options:
    """How to run: threads of every contender, turns of each, seconds a contender may take in a row, which peers (None: all),
    and whether a row that something disturbed is run once more."""

    threads: int
    turns: int = 11
    budget: float = 1.5
    peers: tuple[str, ...] | None = None
    again: bool = True


def run_row(suite: str, row: Row, peers: Peers, options: Options, report: Callable[[str], None]) -> Result:
    """Prepare, check, time and judge one row. Peers that cannot, or are wrong, are named and left out."""
    reference, file = peers.get("reference", options.threads), peers.directory / "reference.pt"
    timings: dict[str, Timing] = {}
    contenders: dict[str, Contender] = {}
    pairs: dict[Case, int] = {}
    wanted = [name for name in row.peers if options.peers is None or name in options.peers]
    entries = [("attnc", "attnc", row.case, 0)]
    entries += [(label, "attnc", case, threads) for label, case, threads in row.companions]
    entries += [(name, name, row.case, 0) for name in wanted]
    posed = None
    for label, name, case, threads in sorted(entries, key=lambda entry: entry[2] != row.case):
        if posed != case:
            report(f"reference of {case}")
            pairs[case] = reference.order("reference", case=case.to_json(), file=str(file))["live"]
            posed = case
        report(f"{libraries.TITLES.get(label, label)} is made ready")
        peer = peers.get(name, threads or options.threads)
        timings[label] = timing = Timing(label)
        allow = 1.0 if name == "attnc" else PEER_ALLOWANCE
        timing.status = _prepare(timing, peer, label, case, str(file), allow)
        if timing.status == "ok":
            contenders[label] = Contender(libraries.TITLES.get(label, label), peer, label)
    fma, read = _limits(row.case, peers, options)
    disturbed = False
    if "attnc" in contenders:
        for _ in range(1 + options.again):  # once more where something else used the machine
            interleave([*contenders.values(), fma, read], options.turns, options.budget, report)
            disturbed = not all(contender.steady for contender in contenders.values())
            if not disturbed:
                break
    for label, contender in contenders.items():
        timings[label].times, timings[label].alone = contender.times, contender.alone
        contender.peer.order("drop", key=contender.key)
    _share_of_pairs(timings, row, pairs)
    ordered = {label: timings[label] for label, *_ in entries}
    peak, bandwidth = (limit.median if limit.times else math.nan for limit in (fma, read))
    result = Result(suite, row.title, row.case, ordered, pairs[row.case], peak, bandwidth, row.by_bytes, disturbed)
    if result.timings["attnc"].times:
        result.verdicts = [judge(bound, result, wanted) for bound in row.bounds]
    return result


def _prepare(timing: Timing, peer: Peer, key: str, case: Case, file: str, allow: float) -> str:
    """Prepare and check a contender: "ok", or why not."""
    try:
        about = peer.order("about")
        if about["missing"]:
            return f"{about['missing']} is not installed"
        answer = peer.order("prepare", key=key, case=case.to_json())
        if "unsupported" in answer:
            return answer["unsupported"]
        timing.first = answer["first"]
        check = peer.order("check", key=key, file=file, allow=allow)
    except PeerFailed as error:
        return f"FAILED: {error}"
    timing.error = check["error"]
    if not check["error"] <= check["bound"]:
        peer.order("drop", key=key)
        return f"WRONG: off by {check['error']:.2g}, allowed {check['bound']:.2g}"
    return "ok"


def _limits(case: Case, peers: Peers, options: Options) -> tuple[Contender, Contender]:
    """The FMA peak and the read bandwidth, as contenders."""
    peer = peers.get("limits", options.threads)
    for key in ("fma", "read"):
        peer.order("drop", key=key)
        peer.order("prepare", key=key, case=case.to_json())
    return Contender("FMA peak", peer, "fma"), Contender("read bandwidth", peer, "read")


def _share_of_pairs(timings: dict[str, Timing], row: Row, pairs: dict[Case, int]) -> None:
    """A companion "a pair's share of …" is scaled to the live pairs of the row itself."""
    for label, case, _ in row.companions:
        if "a pair's share" in label:
            factor = pairs[row.case] / pairs[case]
            timings[label].times = [seconds * factor for seconds in timings[label].times]
            timings[label].alone *= factor


def judge(bound: Bound, result: Result, peers: list[str]) -> Verdict:
    """Hold a bound against a result."""
    own, at_most = result.timings["attnc"].median, bound.kind in ("slower", "seconds")
    if bound.kind in ("faster", "slower"):
        other = result.timings.get(bound.against)
        beside = other.median if other else math.nan
        value = own / beside if at_most else beside / own
        against = libraries.TITLES.get(bound.against, bound.against)
    elif bound.kind == "best":
        times = {name: result.timings[name].median for name in peers if result.timings[name].times}
        best = min(times, key=lambda name: times[name], default="")
        value = times[best] / own if best else math.nan
        against = f"the best peer ({libraries.TITLES[best]})" if best else "the best peer"
    elif bound.kind == "seconds":
        value, against = own, ""
    else:
        value = result.rate() / (result.fma if bound.kind == "peak" else result.limit)
        against = "FMA peak" if bound.kind == "peak" else "the limit"
    sign = "≤" if at_most else "≥"

    def holds(x: float | None) -> bool | None:
        return None if x is None or math.isnan(value) else (value <= x if at_most else value >= x)

    wants = [f"{word} {sign} {x:g}" for word, x in (("must", bound.must), ("aim", bound.aim)) if x is not None]
    if bound.kind == "seconds":
        text = f"{value:.3g} s"
    elif bound.kind in ("faster", "best", "slower"):
        text = f"{value:.2f} × the {'time' if at_most else 'speed'} of {against}"
    else:
        text = f"{value:.2f} × {against}"
    return Verdict(f"{text} ({', '.join(wants)})", value, holds(bound.must), holds(bound.aim))
