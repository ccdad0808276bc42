"""Elementwise ATen operations on any dtype: comparison, logic, bits, selection, conversion.

What torch does with ints, bools and NaN is kept: `ne` is true of NaN, operands meet in their common dtype, shifts by more than
the width empty the value.
"""

from __future__ import annotations

from xdsl.dialects import arith, math
from xdsl.ir import Attribute, SSAValue

from attnc.transforms.convert_torch_to_linalg_ext_region import i1
from attnc.transforms.convert_torch_to_linalg_ext_table import elementwise
from attnc.transforms.convert_torch_to_linalg_ext_values import (
    Operand,
    ScalarBuilder,
    common_dtype,
    is_float,
    is_unsigned,
    signed,
    width,
)

# -- comparison and logic ---------------------------------------------------------------------------------------------


def _comparison(relation: str):
    def build(r: ScalarBuilder, dtype: Attribute, a: Operand, b: Operand) -> SSAValue:
        common = common_dtype((a, b))
        left, right = r.lift_rounded(a, common), r.lift_rounded(b, common)
        return r.compare(relation, left, right, is_unsigned(common))

    return build


for _relation in ("eq", "ne", "lt", "le", "gt", "ge"):
    _names = f"{_relation}.Tensor {_relation}.Scalar"
    elementwise("Comparison and logic", _names, "in the operands' common dtype")(_comparison(_relation))


@elementwise("Comparison and logic", "logical_and")
def logical_and(r: ScalarBuilder, dtype: Attribute, a: Operand, b: Operand) -> SSAValue:
    return r.both(r.truth(a), r.truth(b))


@elementwise("Comparison and logic", "logical_or")
def logical_or(r: ScalarBuilder, dtype: Attribute, a: Operand, b: Operand) -> SSAValue:
    return r.either(r.truth(a), r.truth(b))


@elementwise("Comparison and logic", "logical_xor")
def logical_xor(r: ScalarBuilder, dtype: Attribute, a: Operand, b: Operand) -> SSAValue:
    return r.integer(arith.XOrIOp, r.truth(a), r.truth(b))


@elementwise("Comparison and logic", "logical_not")
def logical_not(r: ScalarBuilder, dtype: Attribute, a: Operand) -> SSAValue:
    return r.invert(r.truth(a))


@elementwise("Comparison and logic", "isnan")
def isnan(r: ScalarBuilder, dtype: Attribute, x: Operand) -> SSAValue:
    return r.is_nan(r.lift(x, x.dtype)) if is_float(x.dtype) else r.constant(i1, False)


@elementwise("Comparison and logic", "isinf")
def isinf(r: ScalarBuilder, dtype: Attribute, x: Operand) -> SSAValue:
    if not is_float(x.dtype):
        return r.constant(i1, False)
    value = r.lift(x, x.dtype)
    return r.compare("eq", r.math(math.AbsFOp, value), r.constant(value.type, float("inf")))


@elementwise("Comparison and logic", "isfinite")
def isfinite(r: ScalarBuilder, dtype: Attribute, x: Operand) -> SSAValue:
    if not is_float(x.dtype):
        return r.constant(i1, True)
    value = r.lift(x, x.dtype)
    return r.compare("lt", r.math(math.AbsFOp, value), r.constant(value.type, float("inf")))


@elementwise("Comparison and logic", "isposinf")
def isposinf(r: ScalarBuilder, dtype: Attribute, x: Operand) -> SSAValue:
    if not is_float(x.dtype):
        return r.constant(i1, False)
    value = r.lift(x, x.dtype)
    return r.compare("eq", value, r.constant(value.type, float("inf")))


@elementwise("Comparison and logic", "isneginf")
def isneginf(r: ScalarBuilder, dtype: Attribute, x: Operand) -> SSAValue:
    if not is_float(x.dtype):
        return r.constant(i1, False)
    value = r.lift(x, x.dtype)
    return r.compare("eq", value, r.constant(value.type, float("-inf")))


# -- bits -------------------------------------------------------------------------------------------------------------


def _bitwise(op_type: type[arith.SignlessIntegerBinaryOperation]):
    def build(r: ScalarBuilder, dtype: Attribute, a: Operand, b: Operand) -> SSAValue:
        return r.integer(op_type, r.convert(a, dtype), r.convert(b, dtype))

    return build


for _name, _op in (("and", arith.AndIOp), ("or", arith.OrIOp), ("xor", arith.XOrIOp)):
    _long, _short = f"bitwise_{_name}", f"__{_name}__"
    _names = f"{_long}.Tensor {_long}.Scalar {_long}.Scalar_Tensor {_short}.Tensor {_short}.Scalar"
    elementwise("Bits", _names)(_bitwise(_op))


@elementwise("Bits", "bitwise_not")
def bitwise_not(r: ScalarBuilder, dtype: Attribute, x: Operand) -> SSAValue:
    return r.invert(r.convert(x, dtype))


def _shift_names(side: str) -> str:
    long, short = f"bitwise_{side}_shift", f"__{side[0]}shift__"
    return f"{long}.Tensor {long}.Tensor_Scalar {long}.Scalar_Tensor {short}.Scalar {short}.Tensor"


def _shift_amount(r: ScalarBuilder, dtype: Attribute, amount: SSAValue) -> tuple[SSAValue, SSAValue | None]:
    """The amount, and whether it is one that a machine shifts by (None: known to be)."""
    bits = width(dtype)
    known = r.literal(amount)
    if known is not None and 0 <= known < bits:
        return amount, None
    return amount, r.compare("lt", amount, r.constant(amount.type, bits), unsigned=True)


@elementwise("Bits", _shift_names("left"))
def left_shift(r: ScalarBuilder, dtype: Attribute, a: Operand, b: Operand) -> SSAValue:
    value = r.convert(a, dtype)
    amount, sane = _shift_amount(r, dtype, r.convert(b, dtype))
    zero = r.constant(value.type, 0)
    if sane is None:
        return r.integer(arith.ShLIOp, value, amount)
    return r.select(sane, r.integer(arith.ShLIOp, value, r.select(sane, amount, zero)), zero)


@elementwise("Bits", _shift_names("right"))
def right_shift(r: ScalarBuilder, dtype: Attribute, a: Operand, b: Operand) -> SSAValue:
    value = r.convert(a, dtype)
    amount, sane = _shift_amount(r, dtype, r.convert(b, dtype))
    shift = arith.ShRSIOp if signed(dtype) else arith.ShRUIOp
    if sane is None:
        return r.integer(shift, value, amount)
    last = r.constant(value.type, width(dtype) - 1)
    if signed(dtype):
        return r.integer(shift, value, r.select(sane, amount, last))
    zero = r.constant(value.type, 0)
    return r.select(sane, r.integer(shift, value, r.select(sane, amount, zero)), zero)


# -- selection and conversion -----------------------------------------------------------------------------------------


@elementwise("Selection and conversion", "where.self where.ScalarSelf where.ScalarOther where.Scalar")
def where(r: ScalarBuilder, dtype: Attribute, condition: Operand, a: Operand, b: Operand) -> SSAValue:
    return r.select(r.truth(condition), r.convert(a, dtype), r.convert(b, dtype))


@elementwise("Selection and conversion", "masked_fill.Scalar masked_fill.Tensor")
def masked_fill(r: ScalarBuilder, dtype: Attribute, x: Operand, mask: Operand, value: Operand) -> SSAValue:
    return r.select(r.truth(mask), r.convert(value, dtype), r.convert(x, dtype))


@elementwise(
    "Selection and conversion",
    "_to_copy to.dtype to.dtype_layout to.other to.device type_as _autocast_to_reduced_precision _autocast_to_full_precision "
    "prims.convert_element_type",
    "float to int cuts the fraction off",
)
def to_dtype(r: ScalarBuilder, dtype: Attribute, x: Operand, *_: object) -> SSAValue:
    return r.convert(x, dtype)


@elementwise("Selection and conversion", "nan_to_num")
def nan_to_num(r: ScalarBuilder, dtype: Attribute, x: Operand, *replacements: Operand | None) -> SSAValue:
    if not is_float(dtype):
        return r.convert(x, dtype)
    value = r.lift(x, dtype)
    largest = {"f64": 1.7976931348623157e308, "f32": 3.4028234663852886e38, "f16": 65504.0, "bf16": 3.3895313892515355e38}
    limit = largest[str(dtype)]
    nan, top, bottom = (
        r.constant(value.type, default) if given is None else r.lift_rounded(given, dtype)
        for given, default in zip((*replacements, None, None, None)[:3], (0.0, limit, -limit), strict=True)
    )
    infinity = float("inf")
    result = r.select(r.compare("eq", value, r.constant(value.type, infinity)), top, value)
    result = r.select(r.compare("eq", value, r.constant(value.type, -infinity)), bottom, result)
    return r.rounded(r.select(r.is_nan(value), nan, result), dtype)


@elementwise("Selection and conversion", "copysign.Tensor copysign.Scalar")
def copysign(r: ScalarBuilder, dtype: Attribute, a: Operand, b: Operand) -> SSAValue:
    return r.rounded(r.math(math.CopySignOp, r.lift(a, dtype), r.lift(b, dtype)), dtype)


@elementwise("Selection and conversion", "heaviside")
def heaviside(r: ScalarBuilder, dtype: Attribute, x: Operand, at_zero: Operand) -> SSAValue:
    value, middle = r.lift(x, dtype), r.lift(at_zero, dtype)
    zero, one = (r.constant(value.type, c) for c in (0, 1))
    step = r.select(r.compare("gt", value, zero, is_unsigned(dtype)), one, zero)
    return r.rounded(r.select(r.compare("eq", value, zero), middle, step), dtype)


@elementwise("Selection and conversion", "threshold")
def threshold(r: ScalarBuilder, dtype: Attribute, x: Operand, limit: Operand, value: Operand) -> SSAValue:
    kept = r.lift(x, dtype)
    below = r.compare("le", kept, r.lift(limit, dtype), is_unsigned(dtype))
    return r.rounded(r.select(below, r.lift(value, dtype), kept), dtype)
