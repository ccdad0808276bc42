"""Finds softmax(Q·Kᵀ)·V in the elements of a function's tensors, however it is written.

A result is attention if it is a sum over keys of (weight · value), where weight is exp(x) divided by the sum over the same keys
of exp(x), before the sum or after it, and x may be lessened by any shift that is the same for all keys and made of x's maximum;
and if x is computed, element by element, from a sum of products of a query and a key. `find` says so in an `Attention`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeGuard

from xdsl.dialects.linalg import ops as linalg
from xdsl.dialects.tensor import ExtractOp
from xdsl.ir import OpResult

from attnc.analysis.axes import Atom, Axis, NoMatch, flat, flat_axes, fresh
from attnc.analysis.comparison import Comparison
from attnc.analysis.elements import CASTS, Apply, Element, Elements, Node, Outer, Position, Reduction, Splat, constant
from attnc.analysis.softmax_sink import Sink, apart, lessened_maximum
from attnc.analysis.softmax_zeros import Zeros, guarded_from_nan

MANY_FACTORS = 100


@dataclass
class Attention:
    """`out` is the result, over `axes`; `scores` enter the softmax, computed from the product `product` of query and key."""

    elements: Elements
    out: OpResult
    axes: tuple[Axis, ...]
    query: Element
    key: Element
    value: Element
    keys: tuple[Atom, ...]
    scores: Node
    product: Element
    factors: list[Node]  # scalars inside the product's own body
    weight_factors: list[Node] = field(default_factory=list)  # what the weights are multiplied by after the softmax
    row_factors: list[Node] = field(default_factory=list)  # those that values have no dims for, the same for all keys
    zeros: Zeros = field(default_factory=Zeros)  # weights that are set to 0 after the softmax
    sink: Sink | None = None  # what the weights are divided by besides their sum
    rows: list[RowValue] = field(default_factory=list)


@dataclass
class RowValue:
    """A tensor that holds something of each row: the scores' maximum, or the sum of exp(score - shift).

    `shift` are the terms of the shift, `maxima` the elements in it that are the scores' maximum.
    """

    element: Element
    kind: str  # "max", "sum", or what is none of the two
    shift: list[Node] = field(default_factory=list)
    maxima: list[Element] = field(default_factory=list)


def find(result: OpResult) -> tuple[Search, Attention] | None:
    """The attention that a tensor is, or None; and what looked for it, which knows more tensors of its rows."""
    op = result.owner
    if not isinstance(op, linalg.GenericOp):
        return None
    search = Search(result)
    try:
        attention = search.found()
    except NoMatch:
        return None
    return None if attention is None else (search, attention)


class Search:
    def __init__(self, result: OpResult):
        self.elements = Elements()
        self.out = result
        shape = result.type.get_shape()  # pyright: ignore[reportAttributeAccessIssue]
        self.axes = tuple(fresh(size if size >= 0 else (result, dim)) for dim, size in enumerate(shape))
        self.keys: tuple[Axis, ...] = ()
        self.zeroed: list[tuple[Node, bool]] = []
        self.nan_is_zero = False
        self.sink: Sink | None = None  # of the softmax that is being looked at
        self.factors = 0
        self.known_atoms: dict[int, tuple[Node, set[Atom]]] = {}

    def found(self) -> Attention | None:
        elements, root = self.elements, self.elements.at(self.out, self.axes)
        divisors: list[Node] = []
        summed = root
        if (reduction := elements.reduction(root)) is None:
            numerators, divisors = self.quotient(root)
            if len(numerators) != 1 or len(divisors) != 1 or not isinstance(numerators[0], Element):
                return None
            summed = numerators[0]
            reduction = elements.reduction(summed)
        sides = two_factors(reduction)
        if reduction is None or sides is None or sides[1]:
            return None
        self.keys = reduction.bound
        left, right = sides[0]
        for weight, value in ((left, right), (right, left)):
            attention = self.weighted(weight, value, divisors)
            if attention is not None:
                return attention
        return None

    def weighted(self, weight: Element, value: Element, divisors: list[Node]) -> Attention | None:
        """The attention, if `weight` is a softmax over the keys, or becomes one by the divisors."""
        elements = self.elements
        self.zeroed, self.nan_is_zero = [], False
        numerators, own = self.quotient(weight)
        outer, divisors = divisors, [*divisors, *own]
        exponentials = [node for node in numerators if _is_exponential(node)]
        if len(exponentials) != 1 or len(divisors) > 1:
            return None
        if self.nan_is_zero and outer:
            return None  # exp(score - max) is NaN for single keys; only divided by the sum is it so for all of a row
        exponential = exponentials[0]
        factors = [node for node in numerators if node is not exponential and constant(node) != 1]
        for scores, terms in self.shifts(exponential.operands[0]):
            maxima: list[Element] = []
            logs = [term for term in terms if isinstance(term, Apply) and term.op.name == "math.log"]
            sums = [*divisors, *(elements.bare(log.operands[0]) for log in logs)]
            if len(sums) != 1:
                continue
            total, self.sink = apart(self, sums[0])
            if total is None:
                continue
            shift = [term for term in terms if term not in logs]
            if all(self.is_shift(term, scores, maxima) for term in shift):
                if not self.is_sum(total, scores, shift):
                    continue
                if self.nan_is_zero and (self.sink is not None or shift != maxima):
                    continue
                attention = self.scored(scores, value)
                zeros = None if attention is None else Zeros.explained(self, scores, value, total)
                if attention is not None and zeros is not None:
                    attention.zeros = zeros
                    for factor in factors:
                        of_rows = not self.over_keys(factor) and not self.atoms(factor) <= _dims(value)
                        (attention.row_factors if of_rows else attention.weight_factors).append(factor)
                    attention.rows = [RowValue(element, "max") for element in maxima]
                    attention.rows.append(RowValue(total, "sum", shift, maxima))
                    if self.sink is not None:
                        self.sink.shift, self.sink.maxima, attention.sink = shift, maxima, self.sink
                        attention.rows += [RowValue(element, "lessened maximum") for element, _ in self.sink.lessened]
                    return attention
        return None

    def row_value(self, attention: Attention, result: OpResult) -> RowValue | None:
        """What a reducing generic knows of the attention's rows, if it reduces its scores, or weights, over the keys."""
        elements = self.elements
        shape = result.type.get_shape()  # pyright: ignore[reportAttributeAccessIssue]
        axes = tuple(fresh(size if size >= 0 else (result, dim)) for dim, size in enumerate(shape))
        reduction = elements.reduction(elements.at(result, axes))
        if reduction is None:
            return None
        if reduction.kind == "max":
            comparison = Comparison(elements, (*reduction.bound, *axes))
            if _starts_low(elements, reduction) and comparison.same(attention.scores, reduction.body):
                return self._bound_row(attention, comparison, reduction, result, axes, [], [])
            return None
        body = elements.bare(reduction.body)
        if constant(elements.bare(reduction.init)) != 0 or not isinstance(body, Apply) or body.op.name != "math.exp":
            return None
        own, self.keys = self.keys, reduction.bound
        try:
            for scores, terms in self.shifts(body.operands[0]):
                maxima: list[Element] = []
                comparison = Comparison(elements, (*reduction.bound, *axes))
                if all(self.is_shift(term, scores, maxima) for term in terms) and comparison.same(attention.scores, scores):
                    return self._bound_row(attention, comparison, reduction, result, axes, terms, maxima)
        finally:
            self.keys = own
        return None

    def _bound_row(
        self,
        attention: Attention,
        comparison: Comparison,
        reduction: Reduction,
        result: OpResult,
        axes: tuple[Axis, ...],
        shift: list[Node],
        maxima: list[Element],
    ) -> RowValue | None:
        free = [atom for axis in axes for atom in flat(axis)]
        keys = {atom for axis in reduction.bound for atom in flat(axis)}
        if not all(atom in comparison.bindings for atom in (*free, *keys)):
            return None
        found = [atom for atom in keys for atom in flat(comparison.bindings[atom])]
        if len(found) != len(set(found)) or set(found) != set(flat(attention.keys)):
            return None
        bound = [tuple(atom for part in flat(axis) for atom in comparison.bindings[part]) for axis in axes]
        return RowValue(self.elements.at(result, bound), reduction.kind.replace("add", "sum"), shift, maxima)

    # -- parts of a softmax -----------------------------------------------------------------------------------------------

    def quotient(self, node: Node) -> tuple[list[Node], list[Node]]:
        """Numerators and denominators, without conversions between float types."""
        self.factors += 1
        if self.factors > MANY_FACTORS:
            raise NoMatch("a product of so many factors is no softmax")
        node = self.elements.bare(node)
        if isinstance(node, Apply) and node.op.name in ("arith.mulf", "arith.divf"):
            above, below = self.quotient(node.operands[0])
            others = self.quotient(node.operands[1])
            if node.op.name == "arith.divf":
                others = others[::-1]
            return above + others[0], below + others[1]
        if (guarded := guarded_from_nan(self.elements, node)) is not None:
            above, below = self.quotient(guarded)
            if below and all(constant(factor) == 1 for factor in above if not _is_exponential(factor)):
                self.nan_is_zero = True
                return above, below
            return [node], []
        if isinstance(node, Apply) and node.op.name == "arith.select":
            for branch, negated in ((1, False), (2, True)):
                if constant(self.elements.bare(node.operands[branch])) == 0:
                    self.zeroed.append((node.operands[0], negated))
                    return self.quotient(node.operands[3 - branch])
        return [node], []

    def shifts(self, argument: Node) -> list[tuple[Node, list[Node]]]:
        """Ways to read `argument` as scores minus terms that are the same for all keys, most terms first."""
        elements = self.elements
        ways: list[tuple[Node, list[Node]]] = [(argument, [])]
        node, terms = elements.bare(argument), list[Node]()
        while isinstance(node, Apply) and node.op.name == "arith.subf":
            left, right = node.operands
            if self.over_keys(right):
                break
            terms = [*terms, *self.summands(right)]
            ways.append((left, terms))
            node = elements.bare(left)
        return ways[::-1]

    def summands(self, node: Node) -> list[Node]:
        bare = self.elements.bare(node)
        if isinstance(bare, Apply) and bare.op.name == "arith.addf":
            return self.summands(bare.operands[0]) + self.summands(bare.operands[1])
        return [bare]

    def is_shift(self, node: Node, scores: Node, maxima: list[Element]) -> bool:
        """Whether a term is computed from the scores' maximum over the keys and constants alone."""
        node = self.elements.bare(node)
        if isinstance(node, Splat) or (isinstance(node, Outer) and constant(node) is not None):
            return True
        if isinstance(node, Apply):
            if isinstance(node.op, ExtractOp):
                return False
            return all(self.is_shift(operand, scores, maxima) for operand in node.operands)
        if not isinstance(node, Element):
            return False
        reduction = self.elements.reduction(node)
        of_scores = reduction is not None and reduction.kind == "max" and _starts_low(self.elements, reduction)
        if reduction is None or not of_scores or not self.same_over_keys(scores, reduction):
            if self.sink is None or self.over_keys(node):
                return False
            return not of_scores or reduction is None or lessened_maximum(self, node, reduction, scores, maxima)
        if node not in maxima:
            maxima.append(node)
        return True

    def is_sum(self, node: Element, scores: Node, shift: list[Node]) -> bool:
        """Whether it is the sum over the keys of exp(scores - shift)."""
        reduction = self.elements.reduction(node)
        if reduction is None or reduction.kind != "add" or constant(self.elements.bare(reduction.init)) != 0:
            return False
        body = self.elements.bare(reduction.body)
        if not isinstance(body, Apply) or body.op.name != "math.exp":
            return False
        for other_scores, terms in self.shifts_of_sum(body.operands[0], reduction):
            if len(terms) != len(shift):
                continue
            comparison = Comparison(self.elements, reduction.bound)
            if comparison.same(scores, other_scores) and all(
                any(comparison.same(own, term) for own in shift) for term in terms
            ):
                return comparison.binds_all(self.keys)
        return False

    def shifts_of_sum(self, argument: Node, reduction: Reduction) -> list[tuple[Node, list[Node]]]:
        """`shifts`, for the keys of another sum."""
        own, self.keys = self.keys, reduction.bound
        try:
            return self.shifts(argument)
        finally:
            self.keys = own

    def same_over_keys(self, scores: Node, reduction: Reduction) -> bool:
        comparison = Comparison(self.elements, reduction.bound)
        return comparison.same(scores, reduction.body) and comparison.binds_all(self.keys)

    def over_keys(self, node: Node) -> bool:
        """Whether a node is another from key to key."""
        keys = {atom for axis in self.keys for atom in flat(axis)}
        return bool(keys & self.atoms(node))

    def atoms(self, node: Node) -> set[Atom]:
        """The dims that a node changes along, as far as it can be looked through."""
        node = self.elements.head(node)
        if isinstance(node, Apply):
            if id(node) not in self.known_atoms:
                self.known_atoms[id(node)] = node, {atom for operand in node.operands for atom in self.atoms(operand)}
            return {part for atom in self.known_atoms[id(node)][1] for part in flat((atom,))}
        if isinstance(node, Element):
            return {atom for axis in node.axes for atom in flat(axis)}
        return set(flat(node.axis)) if isinstance(node, Position) else set()

    # -- the scores -------------------------------------------------------------------------------------------------------

    def scored(self, scores: Node, value: Element) -> Attention | None:
        """The attention whose scores are computed from a product of query and key."""
        for product in self.leaves(scores):
            sides = two_factors(self.elements.reduction(product))
            if sides is None:
                continue
            (left, right), factors = sides
            keys = {atom for axis in self.keys for atom in flat(axis)}
            for query, key in ((left, right), (right, left)):
                if not keys & _dims(query) and keys <= _dims(key):
                    return Attention(
                        self.elements,
                        self.out,
                        flat_axes(self.axes),
                        query,
                        key,
                        value,
                        tuple(atom for axis in self.keys for atom in flat(axis)),
                        scores,
                        product,
                        factors,
                    )
        return None

    def leaves(self, node: Node) -> list[Element]:
        """The elements that a node is computed from and that cannot be looked through."""
        found: list[Element] = []
        seen: set[int] = set()

        def visit(node: Node) -> None:
            node = self.elements.head(node)
            if id(node) in seen:
                return
            seen.add(id(node))
            if isinstance(node, Element):
                found.append(node)
            elif isinstance(node, Apply):
                for operand in node.operands:
                    visit(operand)

        visit(node)
        return found


def _is_exponential(node: Node) -> TypeGuard[Apply]:
    return isinstance(node, Apply) and node.op.name == "math.exp"


def two_factors(reduction: Reduction | None) -> tuple[tuple[Element, Element], list[Node]] | None:
    """The two tensors whose product a sum sums, and the scalars that it is multiplied by in the sum."""
    if reduction is None or reduction.kind != "add" or constant(_filled(reduction.init)) != 0:
        return None
    above, below = _factors(reduction.body)
    tensors = [node for node in above if isinstance(node, Element)]
    scalars: list[Node] = [node for node in above if not isinstance(node, Element)]
    if below or len(tensors) != 2 or not all(isinstance(node, Outer | Splat) for node in scalars):
        return None
    return (tensors[0], tensors[1]), scalars


def _factors(node: Node) -> tuple[list[Node], list[Node]]:
    while isinstance(node, Apply) and node.op.name in CASTS:
        node = node.operands[0]
    if isinstance(node, Apply) and node.op.name in ("arith.mulf", "arith.divf"):
        above, below = _factors(node.operands[0])
        others = _factors(node.operands[1])
        if node.op.name == "arith.divf":
            others = others[::-1]
        return above + others[0], below + others[1]
    return [node], []


def _filled(node: Node) -> Node:
    if isinstance(node, Element) and isinstance(node.value.owner, linalg.FillOp):
        return Outer(node.value.owner.inputs[0])
    return node


def _starts_low(elements: Elements, reduction: Reduction) -> bool:
    """Whether a maximum starts from -inf, or from the least finite number of its type."""
    start = constant(elements.bare(reduction.init))
    return start is not None and start <= -65504.0


def _dims(element: Element) -> set[Atom]:
    return {atom for axis in element.axes for atom in flat(axis)}
