"""Weights that are divided by more than their own sum: attention with sinks.

    exp(s - t) / (Σ exp(s - t) + x)        =   softmax(s) · share,    share = S / (S + x),    S = Σ exp(s - t)

The shift t is the maximum of the scores and x's own score, in whichever way it is written; it may be made of anything that is
the same for all keys. The maximum of scores that were lessened by such a term is that of the scores, less the term.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attnc.analysis.comparison import Comparison
from attnc.analysis.elements import Apply, Element, Node, Reduction

if TYPE_CHECKING:
    from attnc.analysis.softmax import Search


@dataclass
class Sink:
    """`term` is added to the sum of exp(score - shift)."""

    term: Node
    shift: list[Node] = field(default_factory=list)
    maxima: list[Element] = field(default_factory=list)
    lessened: list[tuple[Element, list[Node]]] = field(default_factory=list)  # maxima of score - terms


def apart(search: Search, divisor: Node) -> tuple[Element | None, Sink | None]:
    """A divisor as a sum over the keys, and what is added to it."""
    if isinstance(divisor, Element):
        return divisor, None
    if isinstance(divisor, Apply) and divisor.op.name == "arith.addf":
        sides = [search.elements.bare(operand) for operand in divisor.operands]
        for total, term in (sides, sides[::-1]):
            reduction = search.elements.reduction(total) if isinstance(total, Element) else None
            if isinstance(total, Element) and reduction is not None and reduction.kind == "add" and not search.over_keys(term):
                return total, Sink(term)
    return None, None


def lessened_maximum(search: Search, node: Element, reduction: Reduction, scores: Node, maxima: list[Element]) -> bool:
    """Whether it is the maximum over the keys of the scores less terms that are the same for all keys: then the sink knows."""
    assert search.sink is not None
    for other, terms in search.shifts_of_sum(reduction.body, reduction):
        comparison = Comparison(search.elements, reduction.bound)
        if terms and comparison.same(scores, other) and comparison.binds_all(search.keys):
            if all(search.is_shift(term, scores, maxima) for term in terms):
                if all(known is not node for known, _ in search.sink.lessened):
                    search.sink.lessened.append((node, terms))
                return True
    return False
