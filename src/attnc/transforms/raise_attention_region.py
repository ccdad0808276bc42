"""Scalar expressions over named dims, written out as the region of an attention.

Floats of 16 bits are computed in f32. What does not depend on the scores is rounded to its own type after each operation, as
torch rounds it; the scores themselves are not, but where a 16-bit score meets an addend (f16 swallows a score that -65504 is
added to, and models rely on it). Producers that are cheap are computed in the region; other tensors are read.

A score that a select or an additive mask makes -inf is one that the region's last `select(mask, score, -inf)` makes -inf:

    select(c, -inf, x) * 2 + y        becomes   select(not c, x * 2 + y, -inf)
    x + select(c, 0, -inf)            becomes   select(c, x, -inf)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import cast

from xdsl.dialects import arith, tensor
from xdsl.dialects.builtin import AnyFloat, FloatAttr, IndexType, IntegerAttr, IntegerType, bf16, f16, f32, i1
from xdsl.dialects.linalg import ops as linalg
from xdsl.ir import Attribute, SSAValue

from attnc.analysis.axes import Atom, Axis, NoMatch, flat
from attnc.analysis.elements import (
    CASTS,
    Apply,
    Element,
    Elements,
    Node,
    Outer,
    Position,
    Splat,
    constant,
    is_float,
    minus_infinity,
)
from attnc.analysis.live_keys import BEYOND_ALL_SCORES
from attnc.dialects.building import FLOAT_PREDICATES, PREDICATES, Builder

HALVES = (f16, bf16)
# What one operation costs for each score, in units of an addition.
_QUICK = ("absf", "absi", "floor", "ceil", "trunc", "roundeven", "copysign")
COSTS = {f"math.{name}": 1 for name in _QUICK}
COSTS |= {"arith.divf": 4, "arith.divsi": 16, "arith.floordivsi": 16, "arith.remsi": 16, "tensor.extract": 16}
CHEAP, CHEAP_ON_ALL_PAIRS = 2, 16
_INVERSE = {"eq": "ne", "slt": "sge", "sle": "sgt", "ult": "uge", "ule": "ugt"}
_INVERSE |= {b: a for a, b in _INVERSE.items()}
_FLOAT_INVERSE = {"oeq": "une", "olt": "uge", "ole": "ugt", "ogt": "ule", "oge": "ult", "one": "ueq", "ord": "uno"}
_FLOAT_INVERSE |= {b: a for a, b in _FLOAT_INVERSE.items()}


class RegionWriter:
    """Writes nodes as operations of a block.

    `position(atom)` gives the `index` of an atom, `size(atom)` its extent; `depends(value)` says whether a tensor is computed
    from the scores, `pairs(axes)` whether something over those axes is over rows and keys both; `read(element)` may give the
    value of an element that need not be extracted.
    """

    def __init__(
        self,
        build: Builder,
        elements: Elements,
        position: Callable[[Atom], SSAValue],
        size: Callable[[Atom], SSAValue],
        depends: Callable[[SSAValue], bool] = lambda _: False,
        pairs: Callable[[Iterable[Axis]], bool] = lambda _: False,
        read: Callable[[Element], SSAValue | None] = lambda _: None,
    ):
        self.build = build
        self.elements = elements
        self.position = position
        self.size = size
        self.depends = depends
        self.pairs = pairs
        self.read = read
        self.argument: SSAValue | None = None
        self.least_is_dead = False
        """Whether a select's number beyond all scores is as good as -inf (`attnc.analysis.live_keys`)."""
        self._on_scores: dict[int, tuple[Node, bool]] = {}
        self.written: dict[int, SSAValue] = {}
        self.kept: dict[int, tuple[Node, ...]] = {}  # keeps nodes alive while their ids are keys
        self.linear: dict[Axis, SSAValue] = {}

    def known(self, node: Node, value: SSAValue) -> None:
        """`node` is `value`."""
        self.kept[id(node)] = (node,)
        self.written[id(node)] = value

    # -- scores -----------------------------------------------------------------------------------------------------------

    def score(self, node: Node, score: Node, argument: SSAValue, dead: Sequence[tuple[Node, bool]] = ()) -> SSAValue:
        """The score that enters the softmax: `node`, in which `score` is the block's argument; -inf where one of `dead` is true
        (or, with True beside it, is not)."""
        self.argument = argument
        self.known(score, argument)
        value, conditions = self._masked(node)
        if value.type != argument.type:
            value = convert_float(self.build, value, argument.type)
        conditions += [self.condition(condition, not negated) for condition, negated in dead]
        return self._select(value, conditions)

    def _select(self, value: SSAValue, conditions: list[SSAValue]) -> SSAValue:
        if not conditions:
            return value
        mask = conditions[0]
        for other in conditions[1:]:
            if other is not mask:
                mask = self.build.binary("andi", mask, other, "mask")
        return self.build.select(mask, value, self.build.constant(-inf, value.type, "minus_infinity"), "masked")

    def _masked(self, node: Node) -> tuple[SSAValue, list[SSAValue]]:
        """A score, and the conditions under which it is one and not -inf."""
        if not self.on_scores(node):
            return self.write(node), []
        node = self.elements.head(node)
        if id(node) in self.written or not isinstance(node, Apply):
            return self.write(node), []
        name, operands = node.op.name, node.operands
        if name in CASTS:
            value, conditions = self._masked(operands[0])
            return convert_float(self.build, value, self.lifted(node.type)), conditions
        if name == "arith.select":
            condition, yes, no = operands
            for dead, other, negated in ((no, yes, False), (yes, no, True)):
                if self._is_dead(dead):
                    value, conditions = self._masked(other)
                    return convert_float(self.build, value, self.lifted(node.type)), [
                        *conditions,
                        self.condition(condition, negated),
                    ]
        if name == "arith.addf":
            for place in (0, 1):
                if not self.on_scores(operands[1 - place]):
                    value, conditions = self._masked(operands[place])
                    return self._add(node, value, operands[1 - place], conditions)
        if name in ("arith.mulf", "arith.divf"):
            for place in (0, 1) if name == "arith.mulf" else (0,):
                factor = constant(self.elements.bare(operands[1 - place]))
                if isinstance(factor, float) and 0 < factor < inf:
                    value, conditions = self._masked(operands[place])
                    values = [value, value]
                    values[1 - place] = convert_float(self.build, self.write(operands[1 - place]), value.type)
                    return self._apply(node, values), conditions
        return self.write(node), []

    def _add(self, node: Apply, value: SSAValue, addend: Node, conditions: list[SSAValue]) -> tuple[SSAValue, list[SSAValue]]:
        """A score plus `addend`, in which 0 and -inf that a select chooses between are a mask."""
        rest, more = self._additive_mask(addend)
        if rest is not None:
            other = convert_float(self.build, self.write(rest), value.type)
            value = self.build.binary("addf", value, other)
            if node.type == f16:
                value = self._round(value, f16)
        return value, [*conditions, *more]

    def _is_dead(self, node: Node) -> bool:
        bare = self.elements.bare(node) if self.may_expand(node) else node
        number = constant(bare)
        return minus_infinity(bare) or (self.least_is_dead and isinstance(number, float) and number <= BEYOND_ALL_SCORES)

    def _additive_mask(self, node: Node) -> tuple[Node | None, list[SSAValue]]:
        bare = self.elements.bare(node) if self.may_expand(node) else node
        if isinstance(bare, Apply) and bare.op.name == "arith.select":
            condition, yes, no = bare.operands
            for dead, other, negated in ((no, yes, False), (yes, no, True)):
                if self._is_dead(dead):
                    rest, more = self._additive_mask(other)
                    return rest, [self.condition(condition, negated), *more]
        elif isinstance(bare, Apply) and bare.op.name == "arith.addf":
            (left, on_left), (right, on_right) = (self._additive_mask(operand) for operand in bare.operands)
            if on_left or on_right:
                rest = bare if left and right and not (on_left or on_right) else None
                if rest is None and left is not None and right is not None:
                    rest = Apply(bare.op, (left, right))
                return rest or left or right, on_left + on_right
        elif constant(bare) == 0:
            return None, []
        return node, []

    # -- conditions -------------------------------------------------------------------------------------------------------

    def condition(self, node: Node, negated: bool = False) -> SSAValue:
        """An i1, or its negation, which is moved inwards to comparisons."""
        head = self.elements.head(node) if self.may_expand(node) else node
        if isinstance(head, Apply) and (chosen := self._chosen_truth(head)) is not None:
            return self.condition(chosen[0], negated != chosen[1])
        if not negated:
            return self.write(head)
        if isinstance(head, Apply):
            name, operands = head.op.name, head.operands
            if name in ("arith.andi", "arith.ori"):
                left, right = (self.condition(operand, True) for operand in operands)
                return self.build.binary("ori" if name == "arith.andi" else "andi", left, right)
            if isinstance(head.op, arith.CmpiOp):
                predicate = _INVERSE[PREDICATES[head.op.predicate.value.data]]
                return self.build.compare(predicate, self.write(operands[0]), self.write(operands[1]))
            if isinstance(head.op, arith.CmpfOp):
                predicate = _FLOAT_INVERSE.get(FLOAT_PREDICATES[head.op.predicate.value.data])
                if predicate is not None:
                    return self.build.compare_floats(predicate, self.write(operands[0]), self.write(operands[1]))
        return self.build.binary("xori", self.write(head), self.build.constant(1, i1, "true"))

    def _chosen_truth(self, node: Apply) -> tuple[Node, bool] | None:
        """For select(c, true, false), and the other way round, c and whether it is negated; for xor with true likewise."""
        if node.op.name == "arith.xori" and node.type == i1:
            for place in (0, 1):
                if constant(self.elements.head(node.operands[1 - place])) in (1, -1):
                    return node.operands[place], True
        if node.op.name == "arith.select" and node.type == i1:
            yes, no = (constant(self.elements.head(operand)) for operand in node.operands[1:])
            if yes is not None and no is not None and bool(yes) != bool(no):
                return node.operands[0], not yes
        return None

    # -- values -----------------------------------------------------------------------------------------------------------

    def lifted(self, type_: Attribute) -> Attribute:
        """The type in which values of `type_` are computed."""
        return f32 if type_ in HALVES else type_

    def write(self, node: Node) -> SSAValue:
        """The value of a node, of its lifted type."""
        if isinstance(node, Element) and self.may_expand(node):
            node = self.elements.head_once(node)
            if isinstance(node, Element):
                return self.write(node)
        known = self.written.get(id(node))
        if known is None:
            known = self.written[id(node)] = self._write(node)
            self.kept[id(node)] = (node,)
        return known

    def _write(self, node: Node) -> SSAValue:
        if isinstance(node, Splat):
            return self._constant(node.attribute, node.type)
        if isinstance(node, Outer):
            owner = node.value.owner
            return self._constant(owner.value, node.type) if isinstance(owner, arith.ConstantOp) else self._lift(node.value)
        if isinstance(node, Position):
            return self.linear_position(node.axis)
        if isinstance(node, Element):
            return self._read(node)
        if isinstance(node.op, tensor.ExtractOp):
            indices = [self.write(operand) for operand in node.operands]
            op = tensor.ExtractOp(node.op.tensor, indices, node.type)
            op.attributes |= node.op.attributes
            return self._lift(self.build.add(op, node.op.result.name_hint))
        if self._chosen_truth(node) is not None:
            return self.condition(node)
        values = [self.write(operand) for operand in node.operands]
        value = self._apply(node, values)
        if node.type in HALVES and not self.on_scores(node):
            value = self._round(value, node.type)
        return value

    def _apply(self, node: Apply, values: list[SSAValue]) -> SSAValue:
        """The operation of a node on other operands, computed in lifted types."""
        op, type_ = node.op, self.lifted(node.type)
        if op.name in CASTS:
            return convert_float(self.build, values[0], type_)
        if op.name == "arith.bitcast" and any(operand.type in HALVES for operand in (*op.operands, *op.results)):
            raise NoMatch("the bits of a 16-bit float")
        new = type(op).create(
            operands=values, result_types=[type_], properties=dict(op.properties), attributes=dict(op.attributes)
        )
        return self.build.add(new, op.results[0].name_hint)

    def on_scores(self, node: Node) -> bool:
        """Whether a node is computed from the scores."""
        if self.argument is not None and self.written.get(id(node)) is self.argument:
            return True
        if isinstance(node, Element):
            return self.depends(node.value)
        if not isinstance(node, Apply):
            return False
        known = self._on_scores.get(id(node))
        if known is None:
            gathers = isinstance(node.op, tensor.ExtractOp) and self.depends(node.op.tensor)
            known = node, gathers or any(self.on_scores(operand) for operand in node.operands)
            self._on_scores[id(node)] = known
        return known[1]

    def may_expand(self, node: Node) -> bool:
        """Whether to compute an element rather than to read it."""
        if not isinstance(node, Element):
            return True
        try:
            if self.elements.expand(node) is None:
                return False
        except NoMatch:
            return False
        op = node.value.owner
        if self.depends(node.value) or not isinstance(op, linalg.GenericOp) or self.elements.peel_once(node) is not None:
            return True
        limit = CHEAP_ON_ALL_PAIRS if self.pairs(node.axes) or not is_float(node.type) else CHEAP
        return _cost(op) <= limit

    def _read(self, node: Element) -> SSAValue:
        if self.depends(node.value):
            raise NoMatch("a tensor computed from the scores otherwise than elementwise")
        if (value := self.read(node)) is not None:
            return self._lift(value)
        indices = [self.linear_position(axis) for axis in node.axes]
        hint = node.value.name_hint
        value = self.build.add(tensor.ExtractOp(node.value, indices, node.type), f"{hint}_value" if hint else None)
        return self._lift(value)

    def linear_position(self, axis: Axis) -> SSAValue:
        """The position along an axis."""
        axis = flat(axis)
        if axis not in self.linear:
            value: SSAValue | None = None
            for atom in axis:
                if value is not None:
                    value = self.build.binary("muli", value, self.size(atom))
                    value = self.build.binary("addi", value, self.position(atom))
                else:
                    value = self.position(atom)
            self.linear[axis] = value if value is not None else self.build.constant(0)
        return self.linear[axis]

    def _constant(self, attribute: Attribute, type_: Attribute) -> SSAValue:
        if isinstance(attribute, IntegerAttr) and isinstance(type_, IntegerType | IndexType):
            return self.build.constant(attribute.value.data, type_)
        if isinstance(attribute, FloatAttr):
            return self.build.constant(attribute.value.data, self.lifted(type_))
        raise NoMatch("a constant that is no number")

    def _lift(self, value: SSAValue) -> SSAValue:
        return convert_float(self.build, value, self.lifted(value.type))

    def _round(self, value: SSAValue, type_: Attribute) -> SSAValue:
        return convert_float(self.build, convert_float(self.build, value, type_), value.type)


def convert_float(build: Builder, value: SSAValue, type_: Attribute) -> SSAValue:
    """A float as one of another type; anything else as it is."""
    if value.type == type_ or not is_float(value.type):
        return value
    wider = cast(AnyFloat, type_).bitwidth > cast(AnyFloat, value.type).bitwidth
    return build.cast("extf" if wider else "truncf", value, type_)


def is_scalar(elements: Elements, node: Node) -> bool:
    """Whether a node is one number, for whatever dims."""
    node = elements.head(node)
    if isinstance(node, Apply):
        return all(is_scalar(elements, operand) for operand in node.operands)
    if isinstance(node, Element):
        return not any(atom.size != 1 for axis in node.axes for atom in flat(axis))
    return not isinstance(node, Position)


def nowhere(atom: Atom) -> SSAValue:
    """The position, or size, of an atom where none is expected. Raises NoMatch."""
    raise NoMatch("a scalar that has dims")


def _cost(op: linalg.GenericOp) -> int:
    total = 0
    for inner in op.body.block.ops:
        if not isinstance(inner, arith.ConstantOp | linalg.YieldOp | linalg.IndexOp) and inner.name not in CASTS:
            total += COSTS.get(inner.name, 40 if inner.name.startswith("math.") else 1)
    return total
