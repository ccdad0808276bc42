"""Are two expressions over named dims the same, for a choice of the dims that one of them sums over?"""

from __future__ import annotations

from collections.abc import Iterable

from xdsl.dialects.tensor import ExtractOp

from attnc.analysis.axes import Atom, Axis, flat
from attnc.analysis.elements import Apply, Element, Elements, Node, Outer, Position, Splat, constant


class Comparison:
    """Compares expressions, float conversions aside; the axes `bound` of the second may stand for any of the first."""

    def __init__(self, elements: Elements, bound: Iterable[Axis]):
        self.elements = elements
        self.bound = tuple(bound)
        self.bindings: dict[Atom, Axis] = {}
        self.known: set[tuple[int, int]] = set()

    def same(self, first: Node, second: Node) -> bool:
        first, second = self.elements.bare(first), self.elements.bare(second)
        pair = (id(first), id(second))
        if pair in self.known:
            return True
        if not self._same(first, second):
            return False
        self.known.add(pair)
        return True

    def _same(self, first: Node, second: Node) -> bool:
        if isinstance(first, Element) and isinstance(second, Element):
            return first.value is second.value and all(map(self.same_axis, first.axes, second.axes))
        if isinstance(first, Apply) and isinstance(second, Apply):
            a, b = first.op, second.op
            if a is not b and (a.name != b.name or a.properties != b.properties or first.type != second.type):
                return False
            if isinstance(a, ExtractOp) and isinstance(b, ExtractOp) and a.tensor is not b.tensor:
                return False
            return len(first.operands) == len(second.operands) and all(map(self.same, first.operands, second.operands))
        if isinstance(first, Position) and isinstance(second, Position):
            return self.same_axis(first.axis, second.axis)
        if isinstance(first, Splat) and isinstance(second, Splat):
            return first.attribute == second.attribute
        if isinstance(first, Outer) and isinstance(second, Outer) and first.value is second.value:
            return True
        return constant(first) is not None and constant(first) == constant(second)

    def same_axis(self, first: Axis, second: Axis) -> bool:
        first, second = flat(first), flat(second)
        free = {atom for axis in self.bound for atom in flat(axis)}
        if len(second) == 1 and second[0] in free and second[0] not in self.bindings:
            self.bindings[second[0]] = first
            return True
        if len(first) == len(second) > 1:
            return all(self.same_axis((a,), (b,)) for a, b in zip(first, second, strict=True))
        return flat(atom for b in second for atom in self.bindings.get(b, (b,))) == first

    def binds_all(self, keys: Iterable[Axis]) -> bool:
        """Whether the bound axes stand for exactly these."""
        free = [atom for axis in self.bound for atom in flat(axis)]
        if not all(atom in self.bindings for atom in free):
            return False
        bound = [atom for atom in free for atom in flat(self.bindings[atom])]
        wanted = {atom for axis in keys for atom in flat(axis)}
        return len(bound) == len(set(bound)) and set(bound) == wanted
