"""Elementwise ATen operations that are float functions: powers, transcendentals, activations.

Each is computed in f32 (f64 for f64) by the formula torch's kernel uses, then rounded to the result's dtype.
"""

from __future__ import annotations

import math as python_math
from collections.abc import Callable
from typing import TypeAlias

from xdsl.dialects import arith, math
from xdsl.ir import Attribute, Operation, SSAValue

from attnc.transforms.convert_torch_to_linalg_ext_arithmetic import larger, smaller
from attnc.transforms.convert_torch_to_linalg_ext_region import bf16, f16, f64
from attnc.transforms.convert_torch_to_linalg_ext_table import Unsupported, elementwise
from attnc.transforms.convert_torch_to_linalg_ext_values import Number, Operand, ScalarBuilder, is_float, signed, width

_Formula: TypeAlias = Callable[[ScalarBuilder, SSAValue], SSAValue]


def unary(section: str, names: str, note: str = "") -> Callable[[_Formula], _Formula]:
    """Registers a formula of one computed float."""

    def register(formula: _Formula) -> _Formula:
        def build(r: ScalarBuilder, dtype: Attribute, x: Operand, *_: object) -> SSAValue:
            return r.rounded(formula(r, r.lift(x, dtype)), dtype)

        elementwise(section, names, note)(build)
        return formula

    return register


def _direct(op_type: type[Operation]) -> _Formula:
    return lambda r, x: r.math(op_type, x)


_FUNCTIONS: dict[str, type[Operation]] = {
    "exp": math.ExpOp,
    "exp2": math.Exp2Op,
    "expm1": math.ExpM1Op,
    "log": math.LogOp,
    "log2": math.Log2Op,
    "log10": math.Log10Op,
    "log1p": math.Log1pOp,
    "sqrt": math.SqrtOp,
    "rsqrt": math.RsqrtOp,
    "sin": math.SinOp,
    "cos": math.CosOp,
    "tan": math.TanOp,
    "asin": math.AsinOp,
    "acos": math.AcosOp,
    "atan": math.AtanOp,
    "sinh": math.SinhOp,
    "cosh": math.CoshOp,
    "tanh": math.TanhOp,
    "erf": math.ErfOp,
}
for _name, _op in _FUNCTIONS.items():
    unary("Functions", _name)(_direct(_op))

# -- rounding ---------------------------------------------------------------------------------------------------------


def _rounding(op_type: type[Operation]):
    def build(r: ScalarBuilder, dtype: Attribute, x: Operand) -> SSAValue:
        value = r.lift(x, dtype)
        return r.rounded(r.math(op_type, value), dtype) if is_float(dtype) else value

    return build


for _name, _op in (("floor", math.FloorOp), ("ceil", math.CeilOp), ("trunc", math.TruncOp)):
    elementwise("Rounding", _name)(_rounding(_op))
elementwise("Rounding", "round", "half to even")(_rounding(math.RoundEvenOp))


@elementwise("Rounding", "round.decimals")
def round_decimals(r: ScalarBuilder, dtype: Attribute, x: Operand, decimals: Operand) -> SSAValue:
    digits = _known_int(decimals, "decimals")
    value = r.lift(x, dtype)
    if not is_float(dtype):
        return value
    power = r.constant(value.type, 10.0 ** abs(digits))
    grow, shrink = (r.multiply, r.divide) if digits >= 0 else (r.divide, r.multiply)
    return r.rounded(shrink(r.math(math.RoundEvenOp, grow(value, power)), power), dtype)


@unary("Rounding", "frac")
def frac(r: ScalarBuilder, x: SSAValue) -> SSAValue:
    return r.subtract(x, r.math(math.TruncOp, x))


# -- powers -----------------------------------------------------------------------------------------------------------


def _known_int(x: Operand, what: str) -> int:
    if isinstance(x, Number) and x.constant is not None and x.constant == int(x.constant):
        return int(x.constant)
    raise Unsupported(f"{what} must be a number that is known while compiling")


@unary("Powers", "reciprocal")
def reciprocal(r: ScalarBuilder, x: SSAValue) -> SSAValue:
    return r.divide(r.constant(x.type, 1.0), x)


@elementwise("Powers", "square")
def square(r: ScalarBuilder, dtype: Attribute, x: Operand) -> SSAValue:
    value = r.lift(x, dtype)
    return r.rounded(r.multiply(value, value), dtype)


def _exact_power(r: ScalarBuilder, dtype: Attribute, x: SSAValue, exponent: float) -> SSAValue | None:
    """The exponents that torch computes without pow, with its roundings; None for others."""
    # float16 goes through C's pow in float; bfloat16 rounds each product.
    if exponent in (2.0, 3.0, -2.0):
        square_ = r.multiply(x, x)
        if dtype == bf16:
            square_ = r.extended(r.rounded(square_, dtype))
        return {2.0: lambda: square_, 3.0: lambda: r.multiply(square_, x), -2.0: lambda: reciprocal(r, square_)}[exponent]()
    if exponent == 1.0:
        return x
    if exponent == -1.0:
        return reciprocal(r, x)
    if exponent in (0.5, -0.5) and dtype != f16:
        root = r.math(math.SqrtOp, x)
        return root if exponent > 0 else reciprocal(r, root)
    return None


@elementwise("Powers", "pow.Tensor_Scalar")
def pow_scalar(r: ScalarBuilder, dtype: Attribute, x: Operand, exponent: Operand) -> SSAValue:
    known = exponent.constant if isinstance(exponent, Number) else None
    if known == 0:
        return r.number(dtype, 1)
    if not is_float(dtype):
        return _integer_power(r, dtype, r.convert(x, dtype), exponent)
    value = r.lift(x, dtype)
    if known is not None and (result := _exact_power(r, dtype, value, float(known))) is not None:
        return r.rounded(result, dtype)
    return r.rounded(r.math(math.PowFOp, value, r.lift(exponent, dtype)), dtype)


@elementwise("Powers", "pow.Scalar pow.Tensor_Tensor")
def pow_tensor(r: ScalarBuilder, dtype: Attribute, base: Operand, exponent: Operand) -> SSAValue:
    if not is_float(dtype):
        return _integer_power(r, dtype, r.convert(base, dtype), exponent)
    if isinstance(base, Number) and base.constant == 1:
        return r.number(dtype, 1.0)
    power = r.lift(exponent, dtype)
    if isinstance(base, Number) and base.constant == 2:
        return r.rounded(r.math(math.Exp2Op, power), dtype)
    return r.rounded(r.math(math.PowFOp, r.lift_rounded(base, dtype), power), dtype)


def _integer_power(r: ScalarBuilder, dtype: Attribute, base: SSAValue, exponent: Operand) -> SSAValue:
    """Squaring and multiplying; a negative exponent gives 1 for base 1, ±1 for base -1, else 0."""
    one = r.constant(base.type, 1)
    if isinstance(exponent, Number) and exponent.constant is not None and exponent.constant >= 0:
        power, square_, result = int(exponent.constant), base, one
        while power:
            if power & 1:
                result = r.multiply(result, square_)
            if power := power >> 1:
                square_ = r.multiply(square_, square_)
        return result
    zero = r.constant(base.type, 0)
    power = r.convert(exponent, dtype)
    # torch reads the exponent as unsigned where it is not negative: one turn for each bit of the dtype.
    with r.loop(width(dtype), [one, base, power]) as loop:
        result, square_, rest = loop.carried
        odd = r.compare("ne", r.both(rest, one), zero)
        grown = r.select(odd, r.multiply(result, square_), result)
        loop.finish([grown, r.multiply(square_, square_), r.integer(arith.ShRUIOp, rest, one)])
    result = loop.results[0]
    if not signed(dtype):
        return result
    minus_one = r.constant(base.type, -1)
    odd = r.compare("ne", r.both(power, one), zero)
    inverse = r.select(r.compare("eq", base, minus_one), r.select(odd, minus_one, one), zero)
    inverse = r.select(r.compare("eq", base, one), one, inverse)
    return r.select(r.compare("lt", power, zero), inverse, result)


# -- more functions ---------------------------------------------------------------------------------------------------


@elementwise("Functions", "atan2")
def atan2(r: ScalarBuilder, dtype: Attribute, a: Operand, b: Operand) -> SSAValue:
    return r.rounded(r.math(math.Atan2Op, r.lift(a, dtype), r.lift(b, dtype)), dtype)


@unary("Functions", "asinh")
def asinh(r: ScalarBuilder, x: SSAValue) -> SSAValue:
    one = r.constant(x.type, 1.0)
    a = r.marked(math.AbsFOp, (x,), "from_right")
    root = r.math(math.SqrtOp, r.add(r.multiply(a, a), one))
    small = r.math(math.Log1pOp, r.add(a, r.divide(r.multiply(a, a), r.add(one, root))))
    return r.marked(math.CopySignOp, (_unless_huge(r, a, small), x), "from_right")


@unary("Functions", "acosh")
def acosh(r: ScalarBuilder, x: SSAValue) -> SSAValue:
    t = r.subtract(x, r.constant(x.type, 1.0))
    root = r.multiply(r.math(math.SqrtOp, t), r.math(math.SqrtOp, r.add(t, r.constant(x.type, 2.0))))
    return _unless_huge(r, x, r.math(math.Log1pOp, r.add(t, root)))


def _unless_huge(r: ScalarBuilder, x: SSAValue, formula: SSAValue) -> SSAValue:
    """Above 2^28 both inverse hyperbolic functions are log(2 x), and their formulas overflow."""
    huge = r.compare("gt", x, r.constant(x.type, float(1 << 28)))
    return r.select(huge, r.add(r.math(math.LogOp, x), r.constant(x.type, python_math.log(2.0))), formula)


@unary("Functions", "atanh")
def atanh(r: ScalarBuilder, x: SSAValue) -> SSAValue:
    difference = r.subtract(r.math(math.Log1pOp, x), r.math(math.Log1pOp, r.negate(x)))
    return r.multiply(r.constant(x.type, 0.5), difference)


@unary("Functions", "deg2rad")
def deg2rad(r: ScalarBuilder, x: SSAValue) -> SSAValue:
    return r.multiply(x, r.constant(x.type, python_math.pi / 180.0))


@unary("Functions", "rad2deg")
def rad2deg(r: ScalarBuilder, x: SSAValue) -> SSAValue:
    return r.multiply(x, r.constant(x.type, 180.0 / python_math.pi))


@unary("Functions", "sinc")
def sinc(r: ScalarBuilder, x: SSAValue) -> SSAValue:
    product = r.multiply(x, r.constant(x.type, python_math.pi))
    ratio = r.divide(r.math(math.SinOp, product), product)
    return r.select(r.compare("eq", x, r.constant(x.type, 0.0)), r.constant(x.type, 1.0), ratio)


@elementwise("Functions", "xlogy.Tensor xlogy.Scalar xlogy.Scalar_Self xlogy.Scalar_Other")
def xlogy(r: ScalarBuilder, dtype: Attribute, a: Operand, b: Operand) -> SSAValue:
    x, y = r.lift(a, dtype), r.lift(b, dtype)
    zero = r.constant(x.type, 0.0)
    product = r.multiply(x, r.math(math.LogOp, y))
    # Elsewhere the product is 0 by itself, and its derivative by x is log y, as torch has it.
    finite = r.both(r.compare("gt", y, zero), r.compare("lt", y, r.constant(y.type, float("inf"))))
    result = r.select(r.both(r.compare("eq", x, zero), r.invert(finite)), zero, product)
    return r.rounded(r.select(r.is_nan(y), y, result), dtype)


@elementwise("Functions", "logaddexp")
def logaddexp(r: ScalarBuilder, dtype: Attribute, a: Operand, b: Operand) -> SSAValue:
    x, y = r.lift(a, dtype), r.lift(b, dtype)
    top = larger(r, dtype, x, y)
    distance = r.math(math.AbsFOp, r.subtract(x, y))
    result = r.add(top, r.math(math.Log1pOp, r.math(math.ExpOp, r.negate(distance))))
    infinite = r.compare("eq", r.math(math.AbsFOp, x), r.constant(x.type, float("inf")))
    return r.rounded(r.select(r.both(infinite, r.compare("eq", x, y)), x, result), dtype)


@elementwise("Functions", "hypot")
def hypot(r: ScalarBuilder, dtype: Attribute, a: Operand, b: Operand) -> SSAValue:
    x, y = (r.math(math.AbsFOp, r.lift(operand, dtype)) for operand in (a, b))
    top, low = larger(r, dtype, x, y), smaller(r, dtype, x, y)
    zero, one, infinity = (r.constant(x.type, c) for c in (0.0, 1.0, float("inf")))
    ratio = r.divide(low, top)
    result = r.multiply(top, r.math(math.SqrtOp, r.add(one, r.multiply(ratio, ratio))))
    result = r.select(r.compare("eq", top, zero), zero, result)
    infinite = r.either(r.compare("eq", x, infinity), r.compare("eq", y, infinity))
    return r.rounded(r.select(infinite, infinity, result), dtype)


# -- activations ------------------------------------------------------------------------------------------------------


def _sigmoid(r: ScalarBuilder, x: SSAValue) -> SSAValue:
    one = r.constant(x.type, 1.0)
    return r.divide(one, r.add(one, r.math(math.ExpOp, r.negate(x))))


unary("Activations", "sigmoid")(_sigmoid)


@unary("Activations", "silu")
def silu(r: ScalarBuilder, x: SSAValue) -> SSAValue:
    return r.divide(x, r.add(r.constant(x.type, 1.0), r.math(math.ExpOp, r.negate(x))))


@elementwise("Activations", "gelu", 'approximate "none" and "tanh"')
def gelu(r: ScalarBuilder, dtype: Attribute, operand: Operand, approximate: str | None = None) -> SSAValue:
    x = r.lift(operand, dtype)
    half, one = r.constant(x.type, 0.5), r.constant(x.type, 1.0)
    if approximate == "tanh":
        cube = r.multiply(r.multiply(x, x), x)
        inner = r.add(x, r.multiply(r.constant(x.type, 0.044715), cube))
        inner = r.multiply(r.constant(x.type, python_math.sqrt(2.0 / python_math.pi)), inner)
        result = r.multiply(r.multiply(half, x), r.add(one, r.math(math.TanhOp, inner)))
    else:
        erf = r.math(math.ErfOp, r.multiply(x, r.constant(x.type, python_math.sqrt(0.5))))
        result = r.multiply(r.multiply(x, half), r.add(one, erf))
    return r.rounded(result, dtype)


@elementwise("Activations", "relu")
def relu(r: ScalarBuilder, dtype: Attribute, x: Operand) -> SSAValue:
    value = r.lift(x, dtype)
    return r.rounded(larger(r, dtype, value, r.constant(value.type, 0), "second"), dtype)


@elementwise("Activations", "hardtanh")
def hardtanh(
    r: ScalarBuilder, dtype: Attribute, x: Operand, low: Operand | None = None, high: Operand | None = None
) -> SSAValue:
    value = r.lift(x, dtype)
    floor = r.constant(value.type, -1) if low is None else r.lift_rounded(low, dtype)
    ceiling = r.constant(value.type, 1) if high is None else r.lift_rounded(high, dtype)
    return r.rounded(smaller(r, dtype, larger(r, dtype, value, floor, "second"), ceiling, "second"), dtype)


@unary("Activations", "relu6")
def relu6(r: ScalarBuilder, x: SSAValue) -> SSAValue:
    return _between(r, x, 0.0, 6.0)


def _between(r: ScalarBuilder, x: SSAValue, low: float, high: float) -> SSAValue:
    """min(max(x, low), high), whose derivative is 0 at both ends."""
    floor = larger(r, x.type, x, r.constant(x.type, low), "second")
    return smaller(r, x.type, floor, r.constant(x.type, high), "second")


@elementwise("Activations", "leaky_relu")
def leaky_relu(r: ScalarBuilder, dtype: Attribute, x: Operand, slope: Operand) -> SSAValue:
    value = r.lift(x, dtype)
    positive = r.compare("gt", value, r.constant(value.type, 0.0))
    return r.rounded(r.select(positive, value, r.multiply(value, r.lift(slope, dtype))), dtype)


@elementwise("Activations", "_prelu_kernel")
def prelu(r: ScalarBuilder, dtype: Attribute, x: Operand, weight: Operand) -> SSAValue:
    return leaky_relu(r, dtype, x, weight)


@elementwise("Activations", "hardshrink")
def hardshrink(r: ScalarBuilder, dtype: Attribute, x: Operand, limit: Operand) -> SSAValue:
    value, bound = r.lift(x, dtype), r.lift_rounded(limit, dtype)
    inside = r.compare("le", r.math(math.AbsFOp, value), bound)
    return r.rounded(r.select(inside, r.constant(value.type, 0.0), value), dtype)


@elementwise("Activations", "softshrink")
def softshrink(r: ScalarBuilder, dtype: Attribute, x: Operand, limit: Operand) -> SSAValue:
    value, bound = r.lift(x, dtype), r.lift_rounded(limit, dtype)
    below, above = r.compare("lt", value, r.negate(bound)), r.compare("gt", value, bound)
    rest = r.select(below, r.add(value, bound), r.multiply(value, r.constant(value.type, 0.0)))
    return r.rounded(r.select(above, r.subtract(value, bound), rest), dtype)


@elementwise("Activations", "elu")
def elu(
    r: ScalarBuilder,
    dtype: Attribute,
    x: Operand,
    alpha: Operand = Number(f64, 1.0),  # noqa: B008
    scale: Operand = Number(f64, 1.0),  # noqa: B008
    input_scale: Operand = Number(f64, 1.0),  # noqa: B008
) -> SSAValue:
    value = r.lift(x, dtype)
    negative = r.math(math.ExpM1Op, r.multiply(value, r.lift(input_scale, dtype)))
    negative = r.multiply(negative, r.multiply(r.lift(alpha, dtype), r.lift(scale, dtype)))
    below = r.compare("le", value, r.constant(value.type, 0.0))
    return r.rounded(r.select(below, negative, r.multiply(value, r.lift(scale, dtype))), dtype)


@elementwise("Activations", "celu")
def celu(r: ScalarBuilder, dtype: Attribute, x: Operand, alpha: Operand) -> SSAValue:
    value, a = r.lift(x, dtype), r.lift(alpha, dtype)
    negative = r.multiply(r.math(math.ExpM1Op, r.divide(value, a)), a)
    return r.rounded(r.select(r.compare("lt", value, r.constant(value.type, 0.0)), negative, value), dtype)


@elementwise("Activations", "softplus")
def softplus(r: ScalarBuilder, dtype: Attribute, x: Operand, beta: Operand, limit: Operand) -> SSAValue:
    value, b = r.lift(x, dtype), r.lift(beta, dtype)
    product = r.multiply(value, b)
    soft = r.divide(r.math(math.Log1pOp, r.math(math.ExpOp, product)), b)
    return r.rounded(r.select(r.compare("gt", product, r.lift(limit, dtype)), value, soft), dtype)


def _hard_gate(r: ScalarBuilder, x: SSAValue) -> SSAValue:
    """min(max(x + 3, 0), 6)"""
    return _between(r, r.add(x, r.constant(x.type, 3.0)), 0.0, 6.0)


@unary("Activations", "hardsigmoid")
def hardsigmoid(r: ScalarBuilder, x: SSAValue) -> SSAValue:
    return r.divide(_hard_gate(r, x), r.constant(x.type, 6.0))


@unary("Activations", "hardswish")
def hardswish(r: ScalarBuilder, x: SSAValue) -> SSAValue:
    return r.divide(r.multiply(x, _hard_gate(r, x)), r.constant(x.type, 6.0))


@unary("Activations", "mish")
def mish(r: ScalarBuilder, x: SSAValue) -> SSAValue:
    return r.multiply(x, r.math(math.TanhOp, r.math(math.Log1pOp, r.math(math.ExpOp, x))))


@unary("Activations", "log_sigmoid log_sigmoid_forward")
def log_sigmoid(r: ScalarBuilder, x: SSAValue) -> SSAValue:
    below = smaller(r, x.type, x, r.constant(x.type, 0.0))
    return r.subtract(below, r.math(math.Log1pOp, r.math(math.ExpOp, r.negate(r.math(math.AbsFOp, x)))))


@unary("Activations", "softsign")
def softsign(r: ScalarBuilder, x: SSAValue) -> SSAValue:
    return r.divide(x, r.add(r.math(math.AbsFOp, x), r.constant(x.type, 1.0)))


@elementwise("Activations", "logit")
def logit(r: ScalarBuilder, dtype: Attribute, x: Operand, eps: Operand | None = None) -> SSAValue:
    value = r.lift(x, dtype)
    one = r.constant(value.type, 1.0)
    if eps is not None:
        margin = r.lift(eps, dtype)
        value = smaller(r, dtype, larger(r, dtype, value, margin, "first"), r.subtract(one, margin), "first")
    return r.rounded(r.math(math.LogOp, r.divide(value, r.subtract(one, value))), dtype)
