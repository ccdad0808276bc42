"""Weights that are set to 0 after a softmax: where that is an attention still, and what to do about them.

    select(mask, softmax(s), 0)         the scores are masked by the same: dead keys
                                        the mask is the same for all keys: dead rows
                                        the mask is the same for all rows: the values are 0 there
    nan_to_num(softmax(s))              rows that are 0 where their sum is NaN

A weight is NaN where its row's sum is, and so are all weights of that row then: for exp(score - max) is at most 1, or NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from attnc.analysis.axes import flat
from attnc.analysis.comparison import Comparison
from attnc.analysis.elements import Apply, Element, Elements, Node, constant
from attnc.dialects.building import FLOAT_PREDICATES

if TYPE_CHECKING:
    from attnc.analysis.softmax import Search

Condition = tuple[Node, bool]
"""Something is 0 where this node is true (or, with True beside it, is not)."""


@dataclass
class Zeros:
    """Which weights are 0 by what is done to them after the softmax."""

    dead: list[Condition] = field(default_factory=list)  # keys that the scores mask as well
    rows: list[Condition] = field(default_factory=list)  # whole rows
    values: list[Condition] = field(default_factory=list)  # keys, in all rows alike, that the sum of the weights counts
    nan: bool = False  # rows in which the weights were NaN

    @staticmethod
    def explained(search: Search, scores: Node, value: Element, total: Element) -> Zeros | None:
        """The zeros that the search met; None where they change the weights otherwise."""
        zeros = Zeros(nan=search.nan_is_zero)
        for condition, negated in search.zeroed:
            bare = search.elements.head(condition)
            of_row = not search.over_keys(bare)
            if of_row and isinstance(bare, Apply) and bare.op.name == "arith.cmpf" and not negated:
                zero = 0 in [constant(search.elements.head(x)) for x in bare.operands]
                if zero and search.leaves(bare) == [total]:
                    continue  # a row without keys
            if is_masked(search.elements, scores, condition, negated):
                zeros.dead.append((condition, negated))
            elif of_row:
                zeros.rows.append((condition, negated))
            elif search.atoms(bare) <= {atom for axis in value.axes for atom in flat(axis)}:
                zeros.values.append((condition, negated))
            else:
                return None
        return zeros


def is_masked(elements: Elements, scores: Node, condition: Node, negated: bool) -> bool:
    """Whether a select in the scores replaces, or lessens, by a number beyond all scores where the condition is true."""
    condition, negated = without_not(elements, condition, negated)
    found = False
    seen: set[int] = set()

    def visit(node: Node) -> None:
        nonlocal found
        node = elements.head(node)
        if found or id(node) in seen or not isinstance(node, Apply):
            return
        seen.add(id(node))
        if node.op.name == "arith.select":
            for branch, when_false in ((1, False), (2, True)):
                low = constant(elements.bare(node.operands[branch]))
                if isinstance(low, float) and low <= -1e4:
                    other, flipped = without_not(elements, node.operands[0], when_false)
                    found = found or (flipped == negated and Comparison(elements, ()).same(condition, other))
        for operand in node.operands:
            visit(operand)

    visit(scores)
    return found


def without_not(elements: Elements, node: Node, negated: bool) -> Condition:
    """A condition without negations around it."""
    node = elements.head(node)
    while isinstance(node, Apply):
        if node.op.name == "arith.xori" and constant(elements.head(node.operands[1])) in (1, -1):
            negated = not negated
        elif node.op.name != "arith.select" or [constant(elements.head(x)) for x in node.operands[1:]] != [1, 0]:
            break
        node = elements.head(node.operands[0])
    return node, negated


def guarded_from_nan(elements: Elements, node: Node) -> Node | None:
    """x, where a node is x but 0 where x is NaN, and whatever else where it is infinite."""
    node = elements.bare(node)
    if not isinstance(node, Apply) or node.op.name != "arith.select":
        return None
    condition, negated = without_not(elements, node.operands[0], False)
    tested = _compared(elements, condition, ("ord", "oeq") if negated else ("uno", "une"))
    zero, other = node.operands[1:]
    if tested is None:
        tested = _compared(elements, condition, ("uno", "une") if negated else ("ord", "oeq"))
        zero, other = other, zero
    if tested is None or tested[0] is not tested[1] or constant(elements.bare(zero)) != 0:
        return None
    other = elements.bare(other)
    while other is not tested[0]:  # x, but something else where it is infinite
        if not isinstance(other, Apply) or other.op.name != "arith.select":
            return None
        compared = _compared(elements, other.operands[0], ("oeq",))
        if compared is None or compared[0] is not tested[0] or constant(compared[1]) not in (inf, -inf):
            return None
        other = elements.bare(other.operands[2])
    return other


def _compared(elements: Elements, node: Node, predicates: tuple[str, ...]) -> tuple[Node, Node] | None:
    """What a node compares by one of the predicates."""
    node = elements.head(node)
    if isinstance(node, Apply) and node.op.name == "arith.cmpf":
        predicate = FLOAT_PREDICATES[node.op.predicate.value.data]  # pyright: ignore[reportAttributeAccessIssue]
        if predicate in predicates:
            left, right = (elements.bare(operand) for operand in node.operands)
            return left, right
    return None
