"""Builds a region of scalar `arith` and `math` operations, short as it goes.

An operation that was built before is not built again, constants fold and stand at the head of the region, and an operation
inside a loop that does not depend on it is placed before the loop. What is left unused in the end, `finish` removes.
"""

from __future__ import annotations

import math as python_math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from xdsl.dialects import arith, scf, tensor
from xdsl.dialects.builtin import (
    BFloat16Type,
    BoolAttr,
    Float16Type,
    Float32Type,
    Float64Type,
    FloatAttr,
    IndexType,
    IntegerAttr,
    IntegerType,
    StringAttr,
)
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue

from attnc.dialects.building import acts

i1, i8, i16, i32, i64 = (IntegerType(width) for width in (1, 8, 16, 32, 64))
f16, bf16, f32, f64 = Float16Type(), BFloat16Type(), Float32Type(), Float64Type()
index = IndexType()
FLOATS = (f16, bf16, f32, f64)
HALVES = (f16, bf16)

_INTEGER_FOLDS: dict[type[Operation], Callable[[int, int], int | None]] = {
    arith.AddiOp: lambda a, b: a + b,
    arith.SubiOp: lambda a, b: a - b,
    arith.MuliOp: lambda a, b: a * b,
    arith.FloorDivSIOp: lambda a, b: a // b if b else None,
    arith.AndIOp: lambda a, b: a & b,
    arith.OrIOp: lambda a, b: a | b,
    arith.XOrIOp: lambda a, b: a ^ b,
    arith.MinSIOp: min,
    arith.MaxSIOp: max,
}
_FLOAT_FOLDS: dict[type[Operation], Callable[[float, float], float]] = {
    arith.AddfOp: lambda a, b: a + b,
    arith.SubfOp: lambda a, b: a - b,
    arith.MulfOp: lambda a, b: a * b,
}
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
_CMPI = {p: i for i, p in enumerate(("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge"))}
_CMPF = {
    p: i
    for i, p in enumerate(
        ("false", "oeq", "ogt", "oge", "olt", "ole", "one", "ord", "ueq", "ugt", "uge", "ult", "ule", "une", "uno", "true")
    )
}
_PREDICATES = [IntegerAttr(i, i64) for i in range(16)]
_FLOAT_PROPERTIES: dict[str, Attribute] = {"fastmath": arith.FastMathFlagsAttr("none")}
_INTEGER_PROPERTIES: dict[str, Attribute] = {"overflowFlags": arith.IntegerOverflowAttr("none")}
_WITH_OVERFLOW_FLAGS = (arith.AddiOp, arith.SubiOp, arith.MuliOp, arith.ShLIOp)
_NONE: dict[str, Attribute] = {}
_FLOAT_HINTS = {0.0: "zero", 1.0: "one", python_math.inf: "infinity", -python_math.inf: "minus_infinity"}


def round_to(value: float, type_: Attribute) -> float:
    """`value` as a float of `type_` holds it; to a half type by way of f32, as torch does."""
    if type_ == f64 or value != value or python_math.isinf(value):
        return value
    try:
        value = struct.unpack("<f", struct.pack("<f", value))[0]
        if type_ == f16:
            return struct.unpack("<e", struct.pack("<e", value))[0]
    except OverflowError:
        return python_math.copysign(python_math.inf, value)
    if type_ == bf16:
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        return struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


class RegionBuilder:
    """Appends scalar operations to `block`, each only once."""

    def __init__(self, block: Block):
        self._blocks = [block]
        self._depths: dict[SSAValue, int] = {}
        self._built: dict[tuple, SSAValue] = {}
        self._literals: dict[SSAValue, int | float] = {}
        self._last_constant: Operation | None = None

    @property
    def block(self) -> Block:
        """The block that dependent operations go to now: the region's, or an open loop's body."""
        return self._blocks[-1]

    def literal(self, value: SSAValue) -> int | float | None:
        """The number that a constant made here holds (True and False for i1), None for other values."""
        return self._literals.get(value)

    def visible(self, value: SSAValue) -> bool:
        """Whether `value` may be used where the builder stands: a closed loop's values may not."""
        depth = self._depths.get(value, 0)
        return depth < len(self._blocks) and (depth == 0 or self._owner(value) is self._blocks[depth])

    @staticmethod
    def _owner(value: SSAValue) -> Block | None:
        owner = value.owner
        return owner if isinstance(owner, Block) else owner.parent

    def constant(self, type_: Attribute, value: int | float) -> SSAValue:
        """A constant of a float, integer (wrapped to its width) or index type."""
        attribute: Attribute
        if type_ in FLOATS:
            value = round_to(float(value), type_)
            key = (type_, struct.pack("<d", value))
            attribute = FloatAttr(value, type_)  # pyright: ignore[reportArgumentType, reportCallIssue]
            hint = _FLOAT_HINTS.get(value, "cst")
        elif type_ == i1:
            value = bool(value)
            key = (type_, value)
            attribute = BoolAttr.from_bool(value)
            hint = "true" if value else "false"
        else:
            value = int(value)
            if isinstance(type_, IntegerType):
                half = 1 << (type_.width.data - 1)
                value = (value + half) % (2 * half) - half
            key = (type_, value)
            attribute = IntegerAttr(value, type_)  # pyright: ignore[reportArgumentType, reportCallIssue]
            hint = f"c{value}" if value >= 0 else f"cm{-value}"
            if isinstance(type_, IntegerType):
                hint += f"_i{type_.width.data}"
        if (known := self._built.get(key)) is not None:
            return known
        op = arith.ConstantOp.create(result_types=[type_], properties={"value": attribute})
        block = self._blocks[0]
        if self._last_constant is not None:
            block.insert_ops_after([op], self._last_constant)
        elif (first := block.first_op) is not None:
            block.insert_ops_before([op], first)
        else:
            block.add_op(op)
        self._last_constant = op
        result = op.results[0]
        result.name_hint = hint
        self._built[key] = result
        self._literals[result] = value
        return result

    def emit(
        self,
        op_type: type[Operation],
        operands: Sequence[SSAValue],
        result_type: Attribute,
        properties: dict[str, Attribute] = _NONE,
    ) -> SSAValue:
        """A pure operation of one result, in the outermost block where its operands are at hand."""
        key = (op_type, *operands, result_type, *properties.values())
        if (known := self._built.get(key)) is not None and self.visible(known):
            return known
        op = op_type.create(operands=operands, result_types=[result_type], properties=dict(properties))
        depth = max((self._depths.get(operand, 0) for operand in operands), default=0)
        self._blocks[depth].add_op(op)
        result = op.results[0]
        if depth:
            self._depths[result] = depth
        self._built[key] = result
        return result

    def integer(self, op_type: type[Operation], a: SSAValue, b: SSAValue) -> SSAValue:
        """An integer operation of two operands of one type, with the foldings that need no thought."""
        left, right = self._literals.get(a), self._literals.get(b)
        fold = _INTEGER_FOLDS.get(op_type)
        if fold is not None and left is not None and right is not None:
            folded = fold(int(left), int(right))
            if folded is not None:
                return self.constant(a.type, folded)
        if right == 0 and op_type in (arith.AddiOp, arith.SubiOp, arith.OrIOp, arith.XOrIOp, arith.ShLIOp, arith.ShRSIOp):
            return a
        if left == 0 and op_type in (arith.AddiOp, arith.OrIOp):
            return b
        if a.type != i1 and op_type in (arith.MuliOp, arith.FloorDivSIOp, arith.DivUIOp):
            if right == 1:
                return a
            if left == 1 and op_type is arith.MuliOp:
                return b
        if a.type == i1 and op_type is arith.AndIOp:
            if right is True or left is False or a is b:
                return a
            if left is True or right is False:
                return b
        if a.type == i1 and op_type is arith.OrIOp and a is b:
            return a
        properties = _INTEGER_PROPERTIES if op_type in _WITH_OVERFLOW_FLAGS else _NONE
        return self.emit(op_type, (a, b), a.type, properties)

    def floating(self, op_type: type[Operation], a: SSAValue, b: SSAValue) -> SSAValue:
        """A float operation of two operands; only exact identities fold."""
        left, right = self._literals.get(a), self._literals.get(b)
        fold = _FLOAT_FOLDS.get(op_type)
        if fold is not None and left is not None and right is not None:
            return self.constant(a.type, fold(left, right))
        if right == 1 and op_type in (arith.MulfOp, arith.DivfOp):
            return a
        if left == 1 and op_type is arith.MulfOp:
            return b
        return self.emit(op_type, (a, b), a.type, _FLOAT_PROPERTIES)

    def add(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.floating(arith.AddfOp, a, b) if a.type in FLOATS else self.integer(arith.AddiOp, a, b)

    def subtract(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.floating(arith.SubfOp, a, b) if a.type in FLOATS else self.integer(arith.SubiOp, a, b)

    def multiply(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.floating(arith.MulfOp, a, b) if a.type in FLOATS else self.integer(arith.MuliOp, a, b)

    def divide(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.floating(arith.DivfOp, a, b)

    def negate(self, a: SSAValue) -> SSAValue:
        if (known := self._literals.get(a)) is not None:
            return self.constant(a.type, -known)
        if a.type in FLOATS:
            return self.emit(arith.NegfOp, (a,), a.type, _FLOAT_PROPERTIES)
        return self.integer(arith.SubiOp, self.constant(a.type, 0), a)

    def both(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.integer(arith.AndIOp, a, b)

    def either(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.integer(arith.OrIOp, a, b)

    def invert(self, a: SSAValue) -> SSAValue:
        """All bits of an integer flipped; for i1, not."""
        return self.integer(arith.XOrIOp, a, self.constant(a.type, -1))

    def math(self, op_type: type[Operation], *operands: SSAValue) -> SSAValue:
        """A `math` operation on floats."""
        return self.emit(op_type, operands, operands[0].type, _FLOAT_PROPERTIES)

    def marked(self, op_type: type[Operation], operands: Sequence[SSAValue], mark: str) -> SSAValue:
        """A float operation with an `attnc.derivative`: which subgradient it has at its kinks (see differentiate-attention)."""
        value = self.emit(op_type, operands, operands[0].type, {**_FLOAT_PROPERTIES, "": StringAttr(mark)})
        assert isinstance(value.owner, Operation)
        value.owner.properties = dict(_FLOAT_PROPERTIES)
        value.owner.attributes["attnc.derivative"] = StringAttr(mark)
        return value

    def compare(self, relation: str, a: SSAValue, b: SSAValue, unsigned: bool = False) -> SSAValue:
        """`relation` is eq, ne, lt, le, gt or ge; on floats false where one is NaN, but for ne, as in torch."""
        left, right = self._literals.get(a), self._literals.get(b)
        if left is not None and right is not None and not unsigned:
            return self.constant(i1, _COMPARISONS[relation](left, right))
        if a.type in FLOATS:
            predicate = _PREDICATES[_CMPF["une" if relation == "ne" else "o" + relation]]
            return self.emit(arith.CmpfOp, (a, b), i1, {"predicate": predicate, **_FLOAT_PROPERTIES})
        if relation not in ("eq", "ne"):
            relation = ("u" if unsigned else "s") + relation
        return self.emit(arith.CmpiOp, (a, b), i1, {"predicate": _PREDICATES[_CMPI[relation]]})

    def is_nan(self, a: SSAValue) -> SSAValue:
        predicate = _PREDICATES[_CMPF["uno"]]
        return self.emit(arith.CmpfOp, (a, a), i1, {"predicate": predicate, **_FLOAT_PROPERTIES})

    def select(self, condition: SSAValue, a: SSAValue, b: SSAValue) -> SSAValue:
        known = self._literals.get(condition)
        if known is not None:
            return a if known else b
        return a if a is b else self.emit(arith.SelectOp, (condition, a, b), a.type)

    def cast(self, op_type: type[Operation], value: SSAValue, type_: Attribute) -> SSAValue:
        """A conversion by one operation of `arith`; of a constant, the converted constant where that is plain."""
        if (known := self._literals.get(value)) is not None and op_type not in (arith.FPToSIOp, arith.ExtUIOp):
            if op_type is not arith.UIToFPOp or value.type == i1:
                return self.constant(type_, known)
        if op_type is arith.ExtUIOp and value.type == i1 and known is not None:
            return self.constant(type_, int(known))
        return self.emit(op_type, (value,), type_)

    def index_of(self, value: SSAValue) -> SSAValue:
        """A signed integer as an `index`; of a position that was cast from one, that very index."""
        if value.type == index:
            return value
        owner = value.owner
        if isinstance(owner, arith.IndexCastOp) and owner.input.type == index:
            return owner.input
        return self.cast(arith.IndexCastOp, value, index)

    def extract(self, source: SSAValue, indices: Sequence[SSAValue], element: Attribute, checked: str, name: str) -> SSAValue:
        """`source[indices]` by raw torch indices, checked on the pairs that are "kept", on "all", or on those "listed"."""
        key = (tensor.ExtractOp, source, *indices)
        for mode in ("kept", "all", "listed"):
            known = self._built.get((*key, mode))
            if known is None or not self.visible(known):
                continue
            if mode == checked or mode == "all":
                return known
            if checked == "all":
                assert isinstance(known.owner, Operation)
                known.owner.attributes["attnc.checked"] = StringAttr("all")
                self._built[(*key, "all")] = known
                return known
        value = self.emit(tensor.ExtractOp, (source, *indices), element, {"": StringAttr(checked)})
        assert isinstance(value.owner, Operation)
        value.owner.properties = {}
        if name.isidentifier() and value.name_hint is None:
            value.name_hint = f"{name}_value"
        if indices:
            value.owner.attributes |= {"attnc.checked": StringAttr(checked), "attnc.name": StringAttr(name)}
        self._built[(*key, checked)] = value
        return value

    @contextmanager
    def loop(self, length: int, inits: Sequence[SSAValue]) -> Iterator[_Loop]:
        """An `scf.for` over `range(length)`: the body is built inside the `with`, which must end by `loop.finish(values)`."""
        bounds = [self.constant(index, bound) for bound in (0, length, 1)]
        body = Block(arg_types=[index, *(init.type for init in inits)])
        body.args[0].name_hint = "i"
        self._blocks.append(body)
        for argument in body.args:
            self._depths[argument] = len(self._blocks) - 1
        loop = _Loop(body.args[0], body.args[1:])
        try:
            yield loop
        finally:
            self._blocks.pop()
        body.add_op(scf.YieldOp.create(operands=loop.yielded))
        op = scf.ForOp.create(operands=[*bounds, *inits], result_types=[init.type for init in inits], regions=[Region(body)])
        # Before the loops that it does not depend on, as any other operation.
        level = len(self._blocks)
        used = {self._depths.get(operand, 0) for inner in op.walk() for operand in inner.operands}
        depth = max((depth for depth in used if depth < level), default=0)
        if any(not inner.results and inner.name != scf.YieldOp.name for inner in body.walk()):
            depth = level - 1  # it does something at every turn
        self._blocks[depth].add_op(op)
        if depth:
            for result in op.results:
                self._depths[result] = depth
        loop.results = op.results

    def finish(self) -> None:
        """Removes what nothing uses."""
        _remove_unused(self._blocks[0])


class _Loop:
    """An open loop: where it is, what it carries, and afterwards its results."""

    def __init__(self, position: SSAValue, carried: Sequence[SSAValue]):
        self.position = position
        self.carried = carried
        self.yielded: Sequence[SSAValue] = ()
        self.results: Sequence[SSAValue] = ()

    def finish(self, values: Sequence[SSAValue]) -> None:
        self.yielded = values


def _remove_unused(block: Block) -> None:
    op = block.last_op
    while op is not None:
        previous = op.prev_op
        if op.results and not any(result.first_use for result in op.results) and not acts(op):
            op.detach()
            op.erase()
        elif op.regions:
            for inner in op.regions[0].blocks:
                _remove_unused(inner)
        op = previous
