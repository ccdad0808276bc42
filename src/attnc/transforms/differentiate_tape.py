"""What a derivative is written with: a region's values once more, and adjoints.

An adjoint that a `select` has set to 0, since its branch was not taken, stays 0 whatever it is multiplied by: where(x > 0,
log(x), 0) has the derivative 0 at 0. Adjoints of half types are f32.
"""

from __future__ import annotations

from collections.abc import Iterable

from xdsl.dialects import arith, math, scf, tensor
from xdsl.dialects.builtin import FloatAttr, IntegerAttr, StringAttr
from xdsl.ir import Attribute, Block, Operation, SSAValue

from attnc.analysis.attention import CHECKED, NAME, constant_of
from attnc.errors import LoweringError
from attnc.transforms.convert_torch_to_linalg_ext_region import FLOATS, HALVES, RegionBuilder, f32


def computed_type(type_: Attribute) -> Attribute:
    """What an adjoint of a value of that type is."""
    return f32 if type_ in HALVES else type_


class Tape:
    """`values` are the new region's values for the old one's; what is not among them comes from outside of both."""

    def __init__(self, r: RegionBuilder, values: dict[SSAValue, SSAValue], chosen: set[SSAValue] | None = None):
        self.r = r
        self.values = values
        # Adjoints that are 0 where a branch was not taken.
        self.chosen: set[SSAValue] = set() if chosen is None else chosen

    def raw(self, old: SSAValue) -> SSAValue:
        """The new value for an old one."""
        return self.values.get(old, old)

    def value(self, old: SSAValue) -> SSAValue:
        """The new value for an old one, halves as f32."""
        new = self.raw(old)
        return self.r.cast(arith.ExtFOp, new, f32) if new.type in HALVES else new

    def constant(self, like: SSAValue, number: float) -> SSAValue:
        """A constant of the type of `like`."""
        return self.r.constant(like.type, number)

    # -- adjoints -----------------------------------------------------------------------------------------------------

    def _kept(self, d: SSAValue, result: SSAValue) -> SSAValue:
        if d in self.chosen:
            self.chosen.add(result)
        return result

    def _unless_zero(self, d: SSAValue, result: SSAValue) -> SSAValue:
        if d not in self.chosen:
            return result
        zero = self.constant(d, 0.0)
        return self._kept(d, self.r.select(self.r.compare("eq", d, zero), zero, result))

    def times(self, d: SSAValue, factor: SSAValue) -> SSAValue:
        """`d * factor`."""
        if self.r.literal(factor) is not None:
            return self._kept(d, self.r.multiply(d, factor))
        return self._unless_zero(d, self.r.multiply(d, factor))

    def over(self, d: SSAValue, divisor: SSAValue) -> SSAValue:
        """`d / divisor`."""
        return self._unless_zero(d, self.r.divide(d, divisor))

    def negative(self, d: SSAValue) -> SSAValue:
        return self._kept(d, self.r.negate(d))

    def where(self, condition: SSAValue, d: SSAValue) -> SSAValue:
        """`d` where `condition`, else 0."""
        result = self.r.select(condition, d, self.constant(d, 0.0))
        self.chosen.add(result)
        return result

    def unless(self, condition: SSAValue, d: SSAValue) -> SSAValue:
        """0 where `condition`, else `d`."""
        result = self.r.select(condition, self.constant(d, 0.0), d)
        self.chosen.add(result)
        return result

    def converted(self, d: SSAValue, type_: Attribute) -> SSAValue:
        """An adjoint in another float type."""
        if d.type == type_:
            return d
        wider = type_ not in HALVES and type_ != f32
        return self._kept(d, self.r.cast(arith.ExtFOp if wider else arith.TruncFOp, d, type_))

    def sum(self, a: SSAValue, b: SSAValue) -> SSAValue:
        """Two adjoints of one value."""
        result = self.r.add(a, b)
        if a in self.chosen and b in self.chosen:
            self.chosen.add(result)
        return result

    def sigmoid(self, x: SSAValue) -> SSAValue:
        """`1 / (1 + exp(-x))`."""
        one = self.constant(x, 1.0)
        return self.r.divide(one, self.r.add(one, self.r.math(math.ExpOp, self.r.negate(x))))

    # -- the region once more -----------------------------------------------------------------------------------------

    def repeat(self, ops: Iterable[Operation]) -> None:
        """Builds operations of the old region where the builder stands."""
        for op in ops:
            if isinstance(op, arith.ConstantOp) and isinstance(op.value, IntegerAttr | FloatAttr):
                self.values[op.result] = self.r.constant(op.result.type, op.value.value.data)
            elif isinstance(op, scf.ForOp):
                self._repeat_loop(op)
            elif isinstance(op, tensor.ExtractOp):
                self.values[op.result] = self._extract(op)
            elif op.results:
                operands = [self.raw(operand) for operand in op.operands]
                result = self.r.emit(type(op), operands, op.results[0].type, op.properties)
                if result.name_hint is None:
                    result.name_hint = op.results[0].name_hint
                self.values[op.results[0]] = result

    def _extract(self, op: tensor.ExtractOp) -> SSAValue:
        source, *indices = (self.raw(operand) for operand in op.operands)
        checked, name = op.attributes.get(CHECKED), op.attributes.get(NAME)
        if isinstance(checked, StringAttr):
            label = name.data if isinstance(name, StringAttr) else ""
            return self.r.extract(source, indices, op.result.type, checked.data, label)
        return self.r.emit(tensor.ExtractOp, [source, *indices], op.result.type)

    def _repeat_loop(self, op: scf.ForOp) -> None:
        with self.r.loop(length_of(op), [self.raw(init) for init in op.iter_args]) as loop:
            self.values[op.body.block.args[0]] = loop.position
            self.values.update(zip(op.body.block.args[1:], loop.carried, strict=True))
            self.repeat(op.body.block.ops)
            loop.finish([self.raw(value) for value in yielded(op.body.block)])
        self.values.update(zip(op.results, loop.results, strict=True))


def yielded(block: Block) -> list[SSAValue]:
    """What a block's terminator hands out."""
    last = block.last_op
    assert last is not None
    return list(last.operands)


def length_of(loop: scf.ForOp) -> int:
    """How many turns a loop over a row takes. Raises `LoweringError` where that is not known, or it does not start at 0."""
    bounds = [constant_of(bound) for bound in (loop.lb, loop.ub, loop.step)]
    if bounds[0] != 0 or bounds[2] != 1 or not isinstance(bounds[1], int):
        raise LoweringError("scf.for: only loops over 0 … N in steps of 1, for a known N, have a derivative")
    return bounds[1]


def is_float(value: SSAValue) -> bool:
    return value.type in FLOATS
