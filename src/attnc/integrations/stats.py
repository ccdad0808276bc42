"""What attnc took over from torch's own attention, what it left to torch, and why."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

BACKEND, SDPA, FLEX = 'backend="attnc"', "sdpa()", "enable_torch_flex()"
REASONS_KEPT = 1000


@dataclass(frozen=True)
class Stats:
    """Counts since the process began, or since `stats(clear=True)`.

    `taken`: by (way, function), e.g. `('backend="attnc"', "flex_attention")`; `left`: by (way, function, reason). The ways are
    `backend="attnc"` and compiled uses of `enable_torch_flex()`, which count the calls in a graph, once for each graph that is
    compiled, and `sdpa()` and eager uses of `enable_torch_flex()`, which count calls.
    """

    taken: dict[tuple[str, str], int] = field(default_factory=dict)
    left: dict[tuple[str, str, str], int] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{count:6} taken over  {function} under {way}" for (way, function), count in sorted(self.taken.items())]
        for (way, function, reason), count in sorted(self.left.items()):
            lines.append(f"{count:6} left to torch  {function} under {way}: {reason}")
        return "\n".join(lines) or "nothing yet"


_taken: Counter[tuple[str, str]] = Counter()
_left: Counter[tuple[str, str, str]] = Counter()
_lock = threading.Lock()


def stats(*, clear: bool = False) -> Stats:
    """What was taken over, what was left to torch, and why; with `clear` counting begins anew."""
    with _lock:
        found = Stats(dict(_taken), dict(_left))
        if clear:
            _taken.clear()
            _left.clear()
    return found


def count_taken(way: str, function: str) -> None:
    """One more that attnc computes."""
    with _lock:
        _taken[way, function] += 1


def count_left(way: str, function: str, reason: str) -> None:
    """One more that stays torch's."""
    with _lock:
        if len(_left) < REASONS_KEPT or (way, function, reason) in _left:
            _left[way, function, reason] += 1
        else:
            _left[way, function, "other reasons"] += 1
