"""Does every row keep a key, whatever its position? Then a mask of a number beyond all scores is one of -inf.

    select(k > q, -3.4e38, score)          row q keeps key 0, so the weight of a masked key is exp(-3.4e38 - max) = 0

A row without such a key would average all values, which -inf does not. It is proven for key 0, or for the key with the row's
own position, by intervals over `coefficient · q + [lo, hi]`. Anything that is read from a tensor may hold such a number as
well, and proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from xdsl.dialects import arith

from attnc.analysis.axes import Atom, Axis, flat, size_key
from attnc.analysis.elements import CASTS, Apply, Elements, Node, Outer, Position, Splat, constant, minus_infinity
from attnc.dialects.building import PREDICATES

BEYOND_ALL_SCORES = -1e30
LAST_POSITION = 2**31 - 1


@dataclass(frozen=True)
class _Value:
    """`coefficient · q + x` for an x from lo to hi, where q is the row's position."""

    coefficient: int
    lo: int
    hi: int


def every_row_keeps_a_key(elements: Elements, scores: Node, product: Node, rows: Iterable[Atom], keys: Iterable[Atom]) -> bool:
    """Whether `scores`, computed from the product `product`, masks in each row all keys but at least one, and is not lessened
    otherwise."""
    rows, keys = list(rows), list(keys)
    for query in rows:
        own = len(keys) == 1 and size_key(query.size) == size_key(keys[0].size)
        for key in (_Value(0, 0, 0), _Value(1, 0, 0)) if own else (_Value(0, 0, 0),):
            if _Proof(elements, product, query, keys, key).is_live(scores):
                return True
    return False


@dataclass
class _Proof:
    """For all positions of `query`, at the key `key`."""

    elements: Elements
    product: Node
    query: Atom
    keys: list[Atom]
    key: _Value

    def is_live(self, node: Node) -> bool:
        """Whether a score is the product times a positive number, or a function of it, and not masked."""
        node = self.elements.head(node)
        if node is self.elements.head(self.product):
            return True
        if not isinstance(node, Apply):
            return False
        name, operands = node.op.name, node.operands
        if name in CASTS or name == "math.tanh":
            return self.is_live(operands[0])
        if name == "arith.select":
            for branch in (1, 2):
                if self.is_low(operands[3 - branch]):
                    return self.truth(operands[0]) is (branch == 1) and self.is_live(operands[branch])
            return False
        if name in ("arith.mulf", "arith.divf"):
            factor = constant(self.elements.bare(operands[1]))
            return isinstance(factor, float) and 0 < factor < 1e10 and self.is_live(operands[0])
        if name == "arith.addf":
            return any(self.is_live(operands[place]) and self.adds_nothing(operands[1 - place]) for place in (0, 1))
        return False

    def is_low(self, node: Node) -> bool:
        """Whether it is a number that masks."""
        bare = self.elements.bare(node)
        number = constant(bare)
        return minus_infinity(bare) or (isinstance(number, float) and number <= BEYOND_ALL_SCORES)

    def adds_nothing(self, node: Node) -> bool:
        """Whether an addend is, at this key, a moderate number."""
        bare = self.elements.bare(node)
        number = constant(bare)
        if number is not None:
            return abs(number) < 1e10
        if isinstance(bare, Apply) and bare.op.name == "arith.select":
            truth = self.truth(bare.operands[0])
            return truth is not None and self.adds_nothing(bare.operands[1 if truth else 2])
        if isinstance(bare, Apply) and bare.op.name == "arith.addf":
            return all(self.adds_nothing(operand) for operand in bare.operands)
        return False

    def truth(self, node: Node) -> bool | None:
        """A condition, if it is the same for all rows."""
        value = self.value(node)
        if value is None or value.coefficient or value.lo != value.hi:
            return None
        return bool(value.lo & 1)

    def value(self, node: Node) -> _Value | None:
        """An integer, or a condition (0 or 1)."""
        node = self.elements.head(node)
        if isinstance(node, Position):
            return self.position(flat(node.axis))
        if isinstance(node, Splat | Outer):
            number = constant(node)
            return _Value(0, number, number) if isinstance(number, int) else None
        if not isinstance(node, Apply):
            return None
        name = node.op.name
        if name in ("arith.index_cast", "arith.extui", "arith.extsi", "arith.trunci"):
            return self.value(node.operands[0])
        if name == "arith.select":
            truth = self.truth(node.operands[0])
            return None if truth is None else self.value(node.operands[1 if truth else 2])
        if name in ("arith.andi", "arith.ori", "arith.xori"):
            return self.logic(name, node.operands)
        values = [self.value(operand) for operand in node.operands]
        a, b = values if len(values) == 2 else (None, None)
        if a is None or b is None:
            return None
        if isinstance(node.op, arith.CmpiOp):
            return self.compared(PREDICATES[node.op.predicate.value.data], a, b)
        if name == "arith.addi":
            return _Value(a.coefficient + b.coefficient, a.lo + b.lo, a.hi + b.hi)
        if name == "arith.subi":
            return _Value(a.coefficient - b.coefficient, a.lo - b.hi, a.hi - b.lo)
        return None

    def position(self, axis: Axis) -> _Value:
        """The position along an axis."""
        if axis == (self.query,):
            return _Value(1, 0, 0)
        if axis and all(atom in self.keys for atom in axis):
            return self.key  # the first of several dims of keys, or of one
        return _Value(0, 0, LAST_POSITION if axis else 0)

    def logic(self, name: str, operands: Iterable[Node]) -> _Value | None:
        truths = [self.truth(operand) for operand in operands]
        if name == "arith.xori":
            known = None if None in truths else truths[0] is not truths[1]
        else:
            decisive = name == "arith.ori"
            known = decisive if decisive in truths else None if None in truths else not decisive
        return None if known is None else _Value(0, int(known), int(known))

    def compared(self, predicate: str, a: _Value, b: _Value) -> _Value | None:
        spread = (a.coefficient - b.coefficient) * LAST_POSITION
        lo, hi = a.lo - b.hi + min(spread, 0), a.hi - b.lo + max(spread, 0)
        always = {
            "slt": (hi < 0, lo >= 0),
            "sle": (hi <= 0, lo > 0),
            "sgt": (lo > 0, hi <= 0),
            "sge": (lo >= 0, hi < 0),
            "eq": (lo == hi == 0, lo > 0 or hi < 0),
            "ne": (lo > 0 or hi < 0, lo == hi == 0),
        }.get(predicate, (False, False))
        if not any(always):
            return None
        return _Value(0, int(always[0]), int(always[0]))
