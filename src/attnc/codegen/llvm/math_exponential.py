"""f32 exponentials and logarithms, and what is made of them.

The bounds in the docstrings hold over all of f32, with a fused multiply-add and without; tests/test_math.py reads them.
An ulp is the distance of the floats at the exact result. Zeros, infinities, NaN and subnormals are as in C's libm.
"""

from __future__ import annotations

import math

from attnc.codegen.llvm import math_coefficients as table
from attnc.codegen.llvm.math_body import Body, Lanes

ROUNDER = 1.5 * 2.0**23
"""Added to |x| < 2^22 it leaves round(x) in the low bits of the sum, in two's complement; subtracted again, round(x)."""

LOG2_E = math.log2(math.e)
LN2_HIGH = 0.693145751953125
"""ln 2 to 15 bits, so that its product with an exponent is exact."""
LN2_LOW = math.log(2) - LN2_HIGH
LOG10_2_HIGH = 0.301025390625
LOG10_2_LOW = math.log10(2) - LOG10_2_HIGH
INFINITY, NAN = math.inf, math.nan
SMALLEST_NORMAL = 2.0**-126


def softmax_exp2(body: Body, x: Lanes) -> Lanes:
    """2^x for x <= 0 or NaN, within 2.2 ulp (relative 1.6e-7) down to -126. At and below -126.5 it is exactly +0, so that -inf
    gives +0; NaN stays NaN. (From 0 to 127 it holds too.) Eleven instructions a vector: the inner loop of softmax.

    The bias of the exponent sits in the rounding constant, so the sum's low bits shifted up are the factor 2^n, and 0 for
    n = -127. An integer addition to the exponent of p would cost the same and lose a NaN with payload.
    (Subtracting from the constant, LLVM does not make a second, negated one for a register to hold.)
    """
    x = body.at_least(x, -127.0)
    shifted = x + (ROUNDER + 127.0)
    fraction = x + ((ROUNDER + 127.0) - shifted)
    return body.polynomial(fraction, (1.0, *table.SOFTMAX_EXP2)) * (shifted.bits() << 23).floating()


def scaled(value: Lanes, shifted: Lanes, less: int = 0) -> Lanes:
    """value·2^(n - less), where `shifted` is n + ROUNDER + 254 and |n| < 254 (in double, 2046 and its own rounder): in two
    factors, so that results beyond the largest power become inf, and subnormal ones are rounded once."""
    place = 52 if value.element == "double" else 23
    bits = shifted.bits() - less if less else shifted.bits()
    half = bits.unsigned_shift(1)
    return value * (half << place).floating() * ((bits - half) << place).floating()


def exp2(body: Body, x: Lanes) -> Lanes:
    """2^x, within 1.2 ulp."""
    x = body.at_most(body.at_least(x, -151.0), 129.0)
    shifted = x + (ROUNDER + 254.0)
    fraction = x + ((ROUNDER + 254.0) - shifted)
    return scaled(body.polynomial(fraction, (1.0, *table.EXP2)), shifted)


def _exp_parts(body: Body, x: Lanes, bias: float) -> tuple[Lanes, Lanes]:
    """(n + ROUNDER + bias, e^r - 1) for x = n·ln 2 + r, |r| <= ln 2 / 2."""
    shifted = body.fma(x, LOG2_E, ROUNDER + bias)
    n = shifted - (ROUNDER + bias)
    r = body.fma(n, -LN2_LOW, body.fma(n, -LN2_HIGH, x))
    return shifted, body.fma(r * r, body.polynomial(r, table.EXPM1), r)


def exp(body: Body, x: Lanes) -> Lanes:
    """e^x, within 1.2 ulp."""
    return _exp(body, x)


def _exp(body: Body, x: Lanes, less: int = 0) -> Lanes:
    """e^x / 2^less."""
    shifted, part = _exp_parts(body, body.at_most(body.at_least(x, -104.5), 89.5), 254.0)
    return scaled(part + 1.0, shifted, less)


def expm1(body: Body, x: Lanes) -> Lanes:
    """e^x - 1, within 1.8 ulp."""
    limited = body.at_most(body.at_least(x, -18.0), 88.9)
    shifted, part = _exp_parts(body, limited, 126.0)
    # Half of 2^n (for n = 128), and doubled after the sum; with n = 0 the part is all, and may be subnormal.
    half = (shifted.bits() << 23).floating()
    whole = body.fma(part, half, half - 0.5)
    result = body.select(body.absolute(x).compare("olt", 0.25), part, whole + whole)
    return body.copysign(result, x)


def sigmoid(body: Body, x: Lanes) -> Lanes:
    """1/(1 + e^-x), within 2.5 ulp; very negative x give e^x, not 0."""
    small = _exp(body, -body.absolute(x))
    return body.select(x.compare("olt", 0.0), small, body.constant(1.0, "float")) / (small + 1.0)


def _hyperbolic_parts(body: Body, x: Lanes) -> tuple[Lanes, Lanes]:
    """(e^|x| / 2, e^-|x| / 2)."""
    half = _exp(body, body.absolute(x), less=1)
    return half, 0.25 / half


def sinh(body: Body, x: Lanes) -> Lanes:
    """The hyperbolic sine, within 1.8 ulp."""
    big, small = _hyperbolic_parts(body, x)
    square = x * x
    near = body.fma(x * square, body.polynomial(square, table.SINH), x)
    return body.select(body.absolute(x).compare("olt", 1.0), near, body.copysign(big - small, x))


def cosh(body: Body, x: Lanes) -> Lanes:
    """The hyperbolic cosine, within 1.8 ulp."""
    big, small = _hyperbolic_parts(body, x)
    return big + small


def _exp2m1(body: Body, y: Lanes) -> Lanes:
    """2^y - 1 for -126 <= y <= 0, precise near 0 too."""
    shifted = y + (ROUNDER + 127.0)
    fraction = y + ((ROUNDER + 127.0) - shifted)
    power = (shifted.bits() << 23).floating()
    return body.fma(fraction * body.polynomial(fraction, table.EXP2), power, power - 1.0)


def tanh(body: Body, x: Lanes) -> Lanes:
    """The hyperbolic tangent, within 3.5 ulp."""
    # t / (t + 2) with t = e^(-2|x|) - 1. (A ratio of polynomials in x² takes a third less, and errs by 5 ulp.)
    t = _exp2m1(body, body.at_most(body.absolute(x), 10.0) * (-2 * LOG2_E))
    return body.copysign(t / (t + 2.0), x)


def erf(body: Body, x: Lanes) -> Lanes:
    """The error function, within 2.6 ulp."""
    # 1 - erf |x| = 2^-(|x|·P(|x|))
    magnitude = body.at_most(body.absolute(x), 3.95)
    y = magnitude * body.polynomial(magnitude, table.ERF)
    return body.copysign(_exp2m1(body, y), x)


def _split(body: Body, x: Lanes) -> tuple[Lanes, Lanes]:
    """(n, f) with x = 2^n·(1 + f), 1 + f between √½ and √2; n an i32. For positive normal x."""
    root = 0x3F3504F3
    bits = x.bits() - root
    return bits >> 23, ((bits & 0x7FFFFF) + root).floating() - 1.0


def _log1p_parts(body: Body, f: Lanes, coefficients: tuple[float, ...]) -> tuple[Lanes, Lanes]:
    """(f, low) with log(1 + f) = f·first + low."""
    _, second, *rest = coefficients
    return f, f * body.fma(f, body.polynomial(f, rest), second)


def _finish_log(body: Body, x: Lanes, result: Lanes, zero_at: float = 0.0) -> Lanes:
    """The special values of a logarithm whose argument vanishes at x = zero_at."""
    result = body.select(x.compare("olt", INFINITY), result, x)
    result = body.select(x.compare("oeq", zero_at), body.constant(-INFINITY, "float"), result)
    return body.select(x.compare("olt", zero_at), body.constant(NAN, "float"), result)


def _logarithm(body: Body, x: Lanes, coefficients: tuple[float, ...], high: float, low: float) -> Lanes:
    """log x = n·(high + low) + f·first + …"""
    tiny = x.compare("olt", SMALLEST_NORMAL)
    n, f = _split(body, body.select(tiny, x * 2.0**23, x))
    exponent = n.convert("sitofp", "float") - body.select(tiny, 23.0, 0.0, "float")
    f, rest = _log1p_parts(body, f, coefficients)
    rest = body.fma(exponent, low, rest) if low else rest
    result = body.fma(exponent, high, body.fma(f, coefficients[0], rest))
    return _finish_log(body, x, result)


def log(body: Body, x: Lanes) -> Lanes:
    """The natural logarithm, within 1.2 ulp."""
    return _logarithm(body, x, table.LOG, LN2_HIGH, LN2_LOW)


def log2(body: Body, x: Lanes) -> Lanes:
    """The logarithm to base 2, within 2.0 ulp (1.2 with a fused multiply-add)."""
    return _logarithm(body, x, table.LOG2, 1.0, 0.0)


def log10(body: Body, x: Lanes) -> Lanes:
    """The logarithm to base 10, within 2.0 ulp (1.2 with a fused multiply-add)."""
    return _logarithm(body, x, table.LOG10, LOG10_2_HIGH, LOG10_2_LOW)


def log1p(body: Body, x: Lanes) -> Lanes:
    """log(1 + x), within 1.6 ulp."""
    n, from_sum = _split(body, x + 1.0)
    # 1 + x has lost low bits of x; 2^-n·x + (2^-n - 1) has not. From 2^24 on they do not matter.
    down = ((127 - n) << 23).floating()
    f = body.select(n.compare("sgt", 23), from_sum, body.fma(down, x, down - 1.0))
    exponent = n.convert("sitofp", "float")
    f, rest = _log1p_parts(body, f, table.LOG)
    result = body.fma(exponent, LN2_HIGH, body.fma(exponent, LN2_LOW, rest) + f)
    result = body.select(x.compare("oeq", 0.0), x, result)
    return _finish_log(body, x, result, -1.0)


FUNCTIONS = (softmax_exp2, exp2, exp, expm1, sigmoid, sinh, cosh, tanh, erf, log, log2, log10, log1p)
