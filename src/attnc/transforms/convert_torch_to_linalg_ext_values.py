"""What stands for a torch value while a mod is being converted, and torch's conversions between dtypes.

A dtype is the element attribute of a `!torch.vtensor`; a value of it is *carried* as MLIR's signless type of its width (bool as
i1, ui8 as i8) and *computed* in f32 for the half types, in its own type otherwise. `convert` casts as torch casts; `lift` gives
the value to compute with; `rounded` brings a computed value back to its dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from xdsl.dialects import arith
from xdsl.dialects.builtin import IntegerType, Signedness
from xdsl.ir import Attribute, Block, SSAValue

from attnc.dialects.torch import si8, si16, si32, si64, ui8
from attnc.transforms.convert_torch_to_linalg_ext_region import (
    FLOATS,
    HALVES,
    RegionBuilder,
    bf16,
    f16,
    f32,
    f64,
    i1,
    i8,
    i16,
    i32,
    i64,
)

CARRIED: dict[Attribute, Attribute] = {
    f64: f64,
    f32: f32,
    f16: f16,
    bf16: bf16,
    si64: i64,
    si32: i32,
    si16: i16,
    si8: i8,
    ui8: i8,
    i1: i1,
}
NAMES: dict[Attribute, str] = {
    f64: "float64",
    f32: "float32",
    f16: "float16",
    bf16: "bfloat16",
    si64: "int64",
    si32: "int32",
    si16: "int16",
    si8: "int8",
    ui8: "uint8",
    i1: "bool",
}

# A dimension's size: a number, or (tensor, position) where it is known at run time, or None where nobody needs it.
Dim: TypeAlias = "int | tuple[SSAValue, int] | None"


@dataclass(slots=True, eq=False)
class Scalar:
    """One element. `of_tensor`: an element of a tensor with dimensions, which outranks a 0-d one in promotion."""

    value: SSAValue
    dtype: Attribute
    of_tensor: bool = False

    dims: tuple[Dim, ...] = ()

    def at(self, indices: Sequence[SSAValue]) -> SSAValue:
        return self.value


@dataclass(slots=True, eq=False)
class Number:
    """A Python number, known now (`constant`) or at run time (`value`).

    Its dtype, si64, f64 or i1, weighs little in promotion.
    """

    dtype: Attribute
    constant: int | float | None = None
    value: SSAValue | None = None


class Tensor:
    """A tensor with dimensions, whose elements are computed when asked for; `at` is asked with one `index` for each dimension.

    An index is in range or, where it stems from the user, a raw torch index, which may be negative.
    """

    __slots__ = ("_element", "_known", "_region", "checks", "dims", "dtype")

    def __init__(
        self,
        region: ScalarBuilder,
        dims: Sequence[Dim],
        dtype: Attribute,
        element: Callable[[tuple[SSAValue, ...]], SSAValue],
        checks: bool = False,
    ):
        """`checks`: each of its indices is checked where the element is read."""
        self.checks = checks
        self.dims = tuple(dims)
        self.dtype = dtype
        self._region = region
        self._element = element
        self._known: dict[tuple[SSAValue, ...], SSAValue] = {}

    def at(self, indices: Sequence[SSAValue]) -> SSAValue:
        """The element at `indices`, in the carried type."""
        key = tuple(indices)
        known = self._known.get(key)
        if known is None or not self._region.visible(known):
            known = self._known[key] = self._element(key)
        return known


Value: TypeAlias = "Scalar | Number | Tensor | list | str | None"
Operand: TypeAlias = Scalar | Number


def is_float(dtype: Attribute) -> bool:
    return dtype in FLOATS


def is_unsigned(dtype: Attribute) -> bool:
    """Whether values of the dtype compare and widen as unsigned: uint8, and bool, whose True is greater than False."""
    return dtype in (ui8, i1)


def width(dtype: Attribute) -> int:
    """Bits of an integer dtype; bool has 1."""
    assert isinstance(dtype, IntegerType)
    return dtype.width.data


def promote(a: Attribute, b: Attribute) -> Attribute:
    """torch's common dtype of two tensors of the same rank category."""
    if a == b:
        return a
    if is_float(a) or is_float(b):
        if not (is_float(a) and is_float(b)):
            return a if is_float(a) else b
        if f64 in (a, b):
            return f64
        return f32
    if i1 in (a, b):
        return b if a == i1 else a
    if ui8 in (a, b):
        other = b if a == ui8 else a
        return si16 if other == si8 else other
    return a if width(a) > width(b) else b


def common_dtype(operands: Sequence[Operand]) -> Attribute:
    """torch's result_type: tensors with dimensions outrank 0-d ones, these outrank Python numbers, within a category."""
    tiers: list[Attribute | None] = [None, None, None]
    for operand in operands:
        if isinstance(operand, Number):
            tier, dtype = 2, f32 if operand.dtype == f64 else operand.dtype
        else:
            tier, dtype = (0 if operand.of_tensor else 1), operand.dtype
        known = tiers[tier]
        tiers[tier] = dtype if known is None else promote(known, dtype)

    def combine(higher: Attribute | None, lower: Attribute | None) -> Attribute | None:
        if higher is None or lower is None:
            return lower if higher is None else higher
        if is_float(higher):
            return higher
        if higher == i1 or is_float(lower):
            return promote(higher, lower)
        return higher

    result = combine(tiers[0], combine(tiers[1], tiers[2]))
    assert result is not None
    return result


class ScalarBuilder(RegionBuilder):
    """A region builder that knows torch's dtypes."""

    def __init__(self, block: Block, size: Callable[[SSAValue, int], SSAValue]):
        super().__init__(block)
        # The size of a dimension of a tensor argument, as an `index` from outside the region.
        self.size = size
        # Indices that are in range by construction, as a loop's.
        self.positions: set[SSAValue] = set()
        # On which pairs the gathers of the mod at hand are checked: see `RegionBuilder.extract`.
        self.checked = "kept"

    def is_position(self, value: SSAValue) -> bool:
        """Whether an index is in range by construction."""
        return value in self.positions

    def from_index(self, value: SSAValue, dtype: Attribute) -> SSAValue:
        """An `index` as a value of a dtype."""
        if is_float(dtype):
            return self.convert_value(self.from_index(value, si64), si64, dtype)
        if dtype == i1:
            return self.compare("ne", value, self.constant(value.type, 0))
        return self.cast(arith.IndexCastOp, value, CARRIED[dtype])

    def number(self, dtype: Attribute, value: int | float) -> SSAValue:
        """A constant of a torch dtype, in the carried type."""
        if isinstance(value, float) and not is_float(dtype):
            value = (value != 0) if dtype == i1 else int(value) if math.isfinite(value) else 0
        return self.constant(CARRIED[dtype], value)

    def value_of(self, x: Operand) -> SSAValue:
        """The operand as it is carried."""
        if isinstance(x, Number) and x.value is None:
            assert x.constant is not None
            return self.number(x.dtype, x.constant)
        assert x.value is not None
        return x.value

    def convert(self, x: Operand, dtype: Attribute) -> SSAValue:
        """`x.to(dtype)`, in the carried type."""
        if isinstance(x, Number) and x.constant is not None:
            return self.number(dtype, x.constant)
        return self.convert_value(self.value_of(x), x.dtype, dtype)

    def lift(self, x: Operand, dtype: Attribute) -> SSAValue:
        """`x.to(dtype)` to compute with. A Python number is not rounded to a half type: torch's kernels take it in f32."""
        if dtype not in HALVES:
            return self.convert(x, dtype)
        if isinstance(x, Number) or x.dtype == i1 or (isinstance(x.dtype, IntegerType) and width(x.dtype) == 8):
            return self.convert(x, f32)  # bytes are exact in both half types
        return self.extended(self.convert(x, dtype))

    def lift_rounded(self, x: Operand, dtype: Attribute) -> SSAValue:
        """`lift`, but a Python number is rounded to the dtype as well."""
        if dtype in HALVES and isinstance(x, Number):
            return self.extended(self.convert(x, dtype))
        return self.lift(x, dtype)

    def extended(self, value: SSAValue) -> SSAValue:
        """A half as f32; other values as they are."""
        return self.cast(arith.ExtFOp, value, f32) if value.type in HALVES else value

    def rounded(self, value: SSAValue, dtype: Attribute) -> SSAValue:
        """A computed value, rounded to its dtype."""
        if dtype not in HALVES:
            return value
        owner = value.owner
        if isinstance(owner, arith.ExtFOp) and owner.input.type == dtype:
            return owner.input
        return self.cast(arith.TruncFOp, value, dtype)

    def truth(self, x: Operand) -> SSAValue:
        """`x != 0` as i1."""
        return self.convert(x, i1)

    def convert_value(self, value: SSAValue, source: Attribute, target: Attribute) -> SSAValue:
        """torch's cast between two dtypes."""
        if source == target:
            return value
        if is_float(source):
            return self._from_float(value, source, target)
        if target == i1:
            return self.compare("ne", value, self.constant(value.type, 0))
        if is_float(target):
            computed = f32 if target in HALVES else target
            op_type = arith.UIToFPOp if is_unsigned(source) else arith.SIToFPOp
            return self.rounded(self.cast(op_type, value, computed), target)
        carried = CARRIED[target]
        if width(source) == width(target):
            return value
        if width(source) > width(target):
            return self.cast(arith.TruncIOp, value, carried)
        return self.cast(arith.ExtUIOp if is_unsigned(source) else arith.ExtSIOp, value, carried)

    def _from_float(self, value: SSAValue, source: Attribute, target: Attribute) -> SSAValue:
        if is_float(target):
            value = self.extended(value)
            if target == f64:
                return self.cast(arith.ExtFOp, value, f64)
            if source == f64:
                value = self.cast(arith.TruncFOp, value, f32)
            return self.rounded(value, target)
        value = self.extended(value)
        if target == i1:
            return self.compare("ne", value, self.constant(value.type, 0.0))
        if width(target) >= 32:
            return self.cast(arith.FPToSIOp, value, CARRIED[target])
        return self.cast(arith.TruncIOp, self.cast(arith.FPToSIOp, value, i32), CARRIED[target])


def signed(dtype: Attribute) -> bool:
    return isinstance(dtype, IntegerType) and dtype.signedness.data == Signedness.SIGNED
