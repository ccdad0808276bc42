"""A short way to append operations to a block.

Operations are made by `create`, which is three times as fast as their constructors; `verify` still sees them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import FloatAttr, IndexType, IntegerAttr, IntegerType, i1, i64
from xdsl.ir import Attribute, Block, Operation, SSAValue

INDEX = IndexType()
PREDICATES = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")
FLOAT_PREDICATES = (
    *("false", "oeq", "ogt", "oge", "olt", "ole", "one", "ord"),
    *("ueq", "ugt", "uge", "ult", "ule", "une", "uno", "true"),
)
_NO_OVERFLOW = arith.IntegerOverflowAttr("none")
_NO_FASTMATH = arith.FastMathFlagsAttr("none")
_OVERFLOWING = {"addi", "subi", "muli", "shli"}
_OPS: dict[str, type[Operation]] = {op.name: op for dialect in (arith.Arith, math.Math) for op in dialect.operations}
OpT = TypeVar("OpT", bound=Operation)


class Builder:
    """Appends to `block`; values get `hint` as their printed name."""

    def __init__(self, block: Block):
        self.block = block
        self.constants: dict[Attribute, SSAValue] = {}

    def insert(self, op: OpT, *hints: str | None) -> OpT:
        """Appends `op`, its results named by `hints`."""
        for result, hint in zip(op.results, hints, strict=False):
            result.name_hint = hint
        self.block.add_op(op)
        return op

    def add(self, op: Operation, hint: str | None = None) -> SSAValue:
        """Appends `op` and returns its only result."""
        self.block.add_op(op)
        result = op.results[0]
        result.name_hint = hint
        return result

    def constant(self, value: float, type_: Attribute = INDEX, hint: str | None = None) -> SSAValue:
        """`arith.constant`, once a block."""
        attribute = IntegerAttr(value, type_) if isinstance(type_, IndexType | IntegerType) else FloatAttr(value, type_)  # pyright: ignore
        if (known := self.constants.get(attribute)) is None:
            op = arith.ConstantOp.create(properties={"value": attribute}, result_types=[type_])
            if hint is None and isinstance(type_, IndexType):
                hint = f"c{value}" if value >= 0 else f"minus_{-value}"
            known = self.constants[attribute] = self.add(op, hint)
        return known

    def binary(self, name: str, lhs: SSAValue, rhs: SSAValue, hint: str | None = None) -> SSAValue:
        """`arith.<name>` of two operands and one result of the same type."""
        properties: dict[str, Attribute] = {}
        if name in _OVERFLOWING:
            properties["overflowFlags"] = _NO_OVERFLOW
        elif name.endswith("f"):
            properties["fastmath"] = _NO_FASTMATH
        op = _OPS["arith." + name].create(operands=[lhs, rhs], result_types=[lhs.type], properties=properties)
        return self.add(op, hint)

    def unary_math(self, name: str, operand: SSAValue, hint: str | None = None) -> SSAValue:
        """`math.<name>` of a float."""
        op = _OPS["math." + name].create(operands=[operand], result_types=[operand.type], properties={"fastmath": _NO_FASTMATH})
        return self.add(op, hint)

    def cast(self, name: str, operand: SSAValue, type_: Attribute, hint: str | None = None) -> SSAValue:
        """`arith.<name>` to another type."""
        return self.add(_OPS["arith." + name].create(operands=[operand], result_types=[type_]), hint)

    def compare(self, predicate: str, lhs: SSAValue, rhs: SSAValue, hint: str | None = None) -> SSAValue:
        """`arith.cmpi`."""
        number = IntegerAttr(PREDICATES.index(predicate), i64)
        op = arith.CmpiOp.create(operands=[lhs, rhs], result_types=[i1], properties={"predicate": number})
        return self.add(op, hint)

    def compare_floats(self, predicate: str, lhs: SSAValue, rhs: SSAValue, hint: str | None = None) -> SSAValue:
        """`arith.cmpf`."""
        properties = {"predicate": IntegerAttr(FLOAT_PREDICATES.index(predicate), i64), "fastmath": _NO_FASTMATH}
        return self.add(arith.CmpfOp.create(operands=[lhs, rhs], result_types=[i1], properties=properties), hint)

    def select(self, condition: SSAValue, yes: SSAValue, no: SSAValue, hint: str | None = None) -> SSAValue:
        """`arith.select`."""
        return self.add(arith.SelectOp.create(operands=[condition, yes, no], result_types=[yes.type]), hint)


def acts(op: Operation) -> bool:
    """Whether an operation with regions does something beside giving its results: one in it has none, and ends no block."""
    inner = (nested for region in op.regions for block in region.blocks for nested in block.walk())
    return any(not nested.results and nested is not cast(Block, nested.parent).last_op for nested in inner)


def erase_dead(block: Block, keep: Sequence[str] = ()) -> None:
    """Erases the operations of a block whose results nobody uses, last first; those without results, or named in `keep`,
    stay."""
    for op in reversed(list(block.ops)):
        if op.results and op.name not in keep and not any(result.uses for result in op.results) and not acts(op):
            op.detach()
            op.erase(safe_erase=False)
