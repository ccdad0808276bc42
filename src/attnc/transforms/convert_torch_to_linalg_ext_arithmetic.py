"""Elementwise ATen arithmetic on any dtype, minimum and maximum.

What torch does with ints and NaN is kept: `//` and `%` floor, ints wrap, minimum and maximum hand NaN on.
"""

from __future__ import annotations

from xdsl.dialects import arith, math
from xdsl.ir import Attribute, SSAValue

from attnc.transforms.convert_torch_to_linalg_ext_region import f32, f64, i1
from attnc.transforms.convert_torch_to_linalg_ext_table import elementwise
from attnc.transforms.convert_torch_to_linalg_ext_values import (
    Number,
    Operand,
    ScalarBuilder,
    is_float,
    signed,
)

# -- arithmetic -------------------------------------------------------------------------------------------------------


def scaled(r: ScalarBuilder, dtype: Attribute, x: Operand, alpha: Operand) -> SSAValue:
    """`alpha * x`, ready to compute with."""
    value = r.lift_rounded(x, dtype)
    if isinstance(alpha, Number) and alpha.constant == 1:
        return value
    return r.multiply(value, r.lift_rounded(alpha, dtype))


_ONE = Number(f64, 1)


@elementwise("Arithmetic", "add.Tensor add.Scalar")
def add(r: ScalarBuilder, dtype: Attribute, a: Operand, b: Operand, alpha: Operand = _ONE) -> SSAValue:
    if dtype == i1:
        return r.either(r.convert(a, dtype), r.convert(b, dtype))
    return r.rounded(r.add(r.lift_rounded(a, dtype), scaled(r, dtype, b, alpha)), dtype)


@elementwise("Arithmetic", "sub.Tensor sub.Scalar")
def sub(r: ScalarBuilder, dtype: Attribute, a: Operand, b: Operand, alpha: Operand = _ONE) -> SSAValue:
    return r.rounded(r.subtract(r.lift_rounded(a, dtype), scaled(r, dtype, b, alpha)), dtype)


@elementwise("Arithmetic", "rsub.Tensor rsub.Scalar")
def rsub(r: ScalarBuilder, dtype: Attribute, a: Operand, b: Operand, alpha: Operand = _ONE) -> SSAValue:
    return r.rounded(r.subtract(r.lift_rounded(b, dtype), scaled(r, dtype, a, alpha)), dtype)


@elementwise("Arithmetic", "mul.Tensor mul.Scalar")
def mul(r: ScalarBuilder, dtype: Attribute, a: Operand, b: Operand) -> SSAValue:
    if dtype == i1:
        return r.both(r.convert(a, dtype), r.convert(b, dtype))
    return r.rounded(r.multiply(r.lift(a, dtype), r.lift(b, dtype)), dtype)


@elementwise("Arithmetic", "div.Tensor div.Scalar")
def div(r: ScalarBuilder, dtype: Attribute, a: Operand, b: Operand) -> SSAValue:
    return r.rounded(r.divide(r.lift(a, dtype), r.lift(b, dtype)), dtype)


@elementwise("Arithmetic", "div.Tensor_mode div.Scalar_mode", 'rounding_mode None, "floor", "trunc"')
def div_mode(r: ScalarBuilder, dtype: Attribute, a: Operand, b: Operand, mode: str | None) -> SSAValue:
    if mode is None:
        return div(r, dtype, a, b)
    if mode == "floor":
        return floor_divide(r, dtype, a, b)
    if is_float(dtype):
        quotient = r.rounded(r.divide(r.lift(a, dtype), r.lift(b, dtype)), dtype)
        return r.rounded(r.math(math.TruncOp, r.extended(quotient)), dtype)
    division = arith.DivSIOp if signed(dtype) else arith.DivUIOp
    return r.integer(division, r.convert(a, dtype), r.convert(b, dtype))


@elementwise("Arithmetic", "floor_divide floor_divide.Scalar", "rounds down, also for negative numbers")
def floor_divide(r: ScalarBuilder, dtype: Attribute, a: Operand, b: Operand) -> SSAValue:
    if is_float(dtype):
        # By a Python number, torch divides half types in f32; by a tensor, it rounds every step.
        steps = f32 if isinstance(b, Number) and dtype != f64 else dtype
        return r.rounded(_floor_quotient(r, steps, r.lift(a, dtype), r.lift(b, dtype)), dtype)
    return integer_floor_divide(r, dtype, r.convert(a, dtype), r.convert(b, dtype))


def integer_floor_divide(r: ScalarBuilder, dtype: Attribute, a: SSAValue, b: SSAValue) -> SSAValue:
    """`a // b` of carried integers."""
    return r.integer(arith.FloorDivSIOp if signed(dtype) else arith.DivUIOp, a, b)


@elementwise(
    "Arithmetic",
    "remainder.Tensor remainder.Scalar remainder.Scalar_Tensor",
    "has the sign of the divisor; of floats exact where the quotient is below 2^53",
)
def remainder(r: ScalarBuilder, dtype: Attribute, a: Operand, b: Operand) -> SSAValue:
    if not is_float(dtype):
        return integer_remainder(r, dtype, r.convert(a, dtype), r.convert(b, dtype))
    x, y = r.lift(a, dtype), r.lift_rounded(b, dtype)
    rest, wrong = _float_rest(r, x, y)
    return r.rounded(r.select(wrong, r.add(rest, y), rest), dtype)


def integer_remainder(r: ScalarBuilder, dtype: Attribute, a: SSAValue, b: SSAValue) -> SSAValue:
    """`a % b` of carried integers, as `a - a // b * b`, so that interval analysis finds the floor division in it."""
    if not signed(dtype):
        return r.integer(arith.RemUIOp, a, b)
    return r.subtract(a, r.multiply(r.integer(arith.FloorDivSIOp, a, b), b))


@elementwise(
    "Arithmetic",
    "fmod.Tensor fmod.Scalar",
    "has the sign of the dividend; of floats exact where the quotient is below 2^53",
)
def fmod(r: ScalarBuilder, dtype: Attribute, a: Operand, b: Operand) -> SSAValue:
    if is_float(dtype):
        return r.rounded(float_fmod(r, r.lift(a, dtype), r.lift_rounded(b, dtype)), dtype)
    return r.integer(arith.RemSIOp if signed(dtype) else arith.RemUIOp, r.convert(a, dtype), r.convert(b, dtype))


def float_fmod(r: ScalarBuilder, a: SSAValue, b: SSAValue) -> SSAValue:
    """C's fmod, in f64: the fused rest of a quotient that is at most one too large is exact, and so is its correction."""
    wide = a.type == f32
    x, y = (r.cast(arith.ExtFOp, v, f64) for v in (a, b)) if wide else (a, b)
    divisor = r.marked(math.AbsFOp, (y,), "from_right")
    size = r.marked(math.AbsFOp, (x,), "from_right")
    quotient = r.math(math.TruncOp, r.divide(size, divisor))
    rest = r.math(math.FmaOp, r.negate(quotient), divisor, size)
    rest = r.select(r.compare("lt", rest, r.constant(f64, 0.0)), r.add(rest, divisor), rest)
    rest = r.select(r.compare("lt", size, divisor), size, rest)
    rest = r.marked(math.CopySignOp, (rest, x), "from_right")
    return r.cast(arith.TruncFOp, rest, f32) if wide else rest


def _float_rest(r: ScalarBuilder, a: SSAValue, b: SSAValue) -> tuple[SSAValue, SSAValue]:
    """fmod(a, b), and whether it is not 0 and of the other sign than b, so that floor division differs."""
    zero = r.constant(a.type, 0.0)
    rest = float_fmod(r, a, b)
    differs = r.integer(arith.XOrIOp, r.compare("lt", b, zero), r.compare("lt", rest, zero))
    return rest, r.both(r.compare("ne", rest, zero), differs)


def _floor_quotient(r: ScalarBuilder, dtype: Attribute, a: SSAValue, b: SSAValue) -> SSAValue:
    """torch's float floor division, exact where a / b would round up to the next integer; half types round each step."""

    def step(value: SSAValue) -> SSAValue:
        return r.extended(r.rounded(value, dtype))

    rest, wrong = _float_rest(r, a, b)
    zero, one, half = (r.constant(a.type, c) for c in (0.0, 1.0, 0.5))
    quotient = step(r.divide(step(r.subtract(a, rest)), b))
    quotient = r.select(wrong, step(r.subtract(quotient, one)), quotient)
    floor = r.math(math.FloorOp, quotient)
    rounds_up = r.compare("gt", step(r.subtract(quotient, floor)), half)
    floor = r.select(rounds_up, step(r.add(floor, one)), floor)
    plain = r.divide(a, b)
    result = r.select(r.compare("eq", quotient, zero), r.math(math.CopySignOp, zero, plain), floor)
    return r.select(r.compare("eq", b, zero), plain, result)


@elementwise("Arithmetic", "neg")
def neg(r: ScalarBuilder, dtype: Attribute, x: Operand) -> SSAValue:
    return r.rounded(r.negate(r.lift(x, dtype)), dtype)


@elementwise("Arithmetic", "abs")
def absolute(r: ScalarBuilder, dtype: Attribute, x: Operand) -> SSAValue:
    value = r.lift(x, dtype)
    if is_float(dtype):
        return r.rounded(r.math(math.AbsFOp, value), dtype)
    return r.emit(math.AbsIOp, (value,), value.type) if signed(dtype) else value


@elementwise("Arithmetic", "sign sgn")
def sign(r: ScalarBuilder, dtype: Attribute, x: Operand) -> SSAValue:
    if dtype == i1:
        return r.convert(x, dtype)
    value = r.lift(x, dtype)
    zero, one, minus_one = (r.constant(value.type, c) for c in (0, 1, -1))
    if dtype != i1 and not is_float(dtype) and not signed(dtype):
        return r.select(r.compare("ne", value, zero), one, zero)
    negative = r.select(r.compare("lt", value, zero), minus_one, zero)
    return r.rounded(r.select(r.compare("gt", value, zero), one, negative), dtype)


@elementwise("Arithmetic", "positive clone alias contiguous lift_fresh lift_fresh_copy lift")
def same(r: ScalarBuilder, dtype: Attribute, x: Operand, *_: object) -> SSAValue:
    return r.convert(x, dtype)


@elementwise("Arithmetic", "detach", "has no gradient")
def detach(r: ScalarBuilder, dtype: Attribute, x: Operand) -> SSAValue:
    value = r.convert(x, dtype)
    if not is_float(dtype) or r.literal(value) is not None:
        return value
    wide = r.extended(value)
    return r.rounded(r.marked(arith.MulfOp, (wide, r.constant(wide.type, 1.0)), "none"), dtype)


@elementwise("Arithmetic", "addcmul")
def addcmul(r: ScalarBuilder, dtype: Attribute, x: Operand, a: Operand, b: Operand, value: Operand = _ONE) -> SSAValue:
    product = r.multiply(scaled(r, dtype, a, value), r.lift(b, dtype))
    return r.rounded(r.add(r.lift(x, dtype), product), dtype)


@elementwise("Arithmetic", "addcdiv")
def addcdiv(r: ScalarBuilder, dtype: Attribute, x: Operand, a: Operand, b: Operand, value: Operand = _ONE) -> SSAValue:
    quotient = r.divide(scaled(r, dtype, a, value), r.lift(b, dtype))
    return r.rounded(r.add(r.lift(x, dtype), quotient), dtype)


@elementwise("Arithmetic", "lerp.Scalar lerp.Tensor")
def lerp(r: ScalarBuilder, dtype: Attribute, a: Operand, b: Operand, weight: Operand) -> SSAValue:
    start, end, w = r.lift(a, dtype), r.lift(b, dtype), r.lift(weight, dtype)
    one, half = r.constant(w.type, 1.0), r.constant(w.type, 0.5)
    difference = r.subtract(end, start)
    near = r.add(start, r.multiply(w, difference))
    far = r.subtract(end, r.multiply(difference, r.subtract(one, w)))
    return r.rounded(r.select(r.compare("lt", r.math(math.AbsFOp, w), half), near, far), dtype)


# -- minimum, maximum -------------------------------------------------------------------------------------------------


def larger(r: ScalarBuilder, dtype: Attribute, a: SSAValue, b: SSAValue, tie: str = "") -> SSAValue:
    """max, NaN if one is. `tie`: who has the gradient where both are equal, the "first", the "second", all of a chain of them
    ("even") or nobody at all, ever ("none"); "" is half for each."""
    if is_float(dtype) and tie:
        return r.marked(arith.MaximumfOp, (a, b), tie)
    if is_float(dtype):
        return r.floating(arith.MaximumfOp, a, b)
    if dtype == i1:
        return r.either(a, b)
    return r.integer(arith.MaxSIOp if signed(dtype) else arith.MaxUIOp, a, b)


def smaller(r: ScalarBuilder, dtype: Attribute, a: SSAValue, b: SSAValue, tie: str = "") -> SSAValue:
    """min, NaN if one is; `tie` as in `larger`."""
    if is_float(dtype) and tie:
        return r.marked(arith.MinimumfOp, (a, b), tie)
    if is_float(dtype):
        return r.floating(arith.MinimumfOp, a, b)
    if dtype == i1:
        return r.both(a, b)
    return r.integer(arith.MinSIOp if signed(dtype) else arith.MinUIOp, a, b)


@elementwise("Minimum and maximum", "maximum max.other", "NaN where one is NaN")
def maximum(r: ScalarBuilder, dtype: Attribute, a: Operand, b: Operand) -> SSAValue:
    return r.rounded(larger(r, dtype, r.lift(a, dtype), r.lift(b, dtype)), dtype)


@elementwise("Minimum and maximum", "minimum min.other", "NaN where one is NaN")
def minimum(r: ScalarBuilder, dtype: Attribute, a: Operand, b: Operand) -> SSAValue:
    return r.rounded(smaller(r, dtype, r.lift(a, dtype), r.lift(b, dtype)), dtype)


@elementwise("Minimum and maximum", "fmax", "the number where one is NaN")
def fmax(r: ScalarBuilder, dtype: Attribute, a: Operand, b: Operand) -> SSAValue:
    if not is_float(dtype):
        return maximum(r, dtype, a, b)
    return r.rounded(r.floating(arith.MaxnumfOp, r.lift(a, dtype), r.lift(b, dtype)), dtype)


@elementwise("Minimum and maximum", "fmin", "the number where one is NaN")
def fmin(r: ScalarBuilder, dtype: Attribute, a: Operand, b: Operand) -> SSAValue:
    if not is_float(dtype):
        return minimum(r, dtype, a, b)
    return r.rounded(r.floating(arith.MinnumfOp, r.lift(a, dtype), r.lift(b, dtype)), dtype)


@elementwise("Minimum and maximum", "clamp clamp.Tensor")
def clamp(r: ScalarBuilder, dtype: Attribute, x: Operand, low: Operand | None = None, high: Operand | None = None) -> SSAValue:
    value = r.lift(x, dtype)
    if low is not None:
        value = larger(r, dtype, value, r.lift_rounded(low, dtype), "first")
    if high is not None:
        value = smaller(r, dtype, value, r.lift_rounded(high, dtype), "first")
    return r.rounded(value, dtype)


@elementwise("Minimum and maximum", "clamp_min clamp_min.Tensor")
def clamp_min(r: ScalarBuilder, dtype: Attribute, x: Operand, low: Operand) -> SSAValue:
    return clamp(r, dtype, x, low)


@elementwise("Minimum and maximum", "clamp_max clamp_max.Tensor")
def clamp_max(r: ScalarBuilder, dtype: Attribute, x: Operand, high: Operand) -> SSAValue:
    return clamp(r, dtype, x, None, high)
