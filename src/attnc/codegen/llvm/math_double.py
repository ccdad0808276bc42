"""f64: exp, exp2, log and their kin in vectors; the rest by libm, one lane after the other."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from attnc.codegen.llvm import math_coefficients as table
from attnc.codegen.llvm.math_body import Body, Lanes
from attnc.codegen.llvm.math_exponential import scaled

ROUNDER = 1.5 * 2.0**52
LN2_HIGH = float.fromhex("0x1.62e42fefa2000p-1")
"""ln 2 to 40 bits, so that its product with an exponent is exact."""
LN2_LOW = float.fromhex("0x1.9ef35793c7673p-41")
ROOT_HALF = 0x3FE6A09E667F3BCD


def _exp_of(body: Body, r: Lanes) -> Lanes:
    """e^r for |r| <= ln 2 / 2."""
    return body.fma(r * r, body.polynomial(r, table.EXPM1_DOUBLE), r) + 1.0


def exp(body: Body, x: Lanes) -> Lanes:
    """e^x, within 1.2 ulp."""
    x = body.at_most(body.at_least(x, -746.0), 710.0)
    shifted = body.fma(x, math.log2(math.e), ROUNDER + 2046.0)
    n = shifted - (ROUNDER + 2046.0)
    r = body.fma(n, -LN2_LOW, body.fma(n, -LN2_HIGH, x))
    return scaled(_exp_of(body, r), shifted)


def exp2(body: Body, x: Lanes) -> Lanes:
    """2^x, within 1.3 ulp."""
    x = body.at_most(body.at_least(x, -1080.0), 1025.0)
    shifted = x + (ROUNDER + 2046.0)
    return scaled(_exp_of(body, (x - (shifted - (ROUNDER + 2046.0))) * math.log(2)), shifted)


def softmax_exp2(body: Body, x: Lanes) -> Lanes:
    """2^x for x <= 0 or NaN, within 1.3 ulp down to -1022; from -1022.5 on exactly +0, so that -inf gives +0; NaN stays NaN."""
    x = body.at_least(x, -1023.0)
    shifted = x + (ROUNDER + 1023.0)
    power = _exp_of(body, (x - (shifted - (ROUNDER + 1023.0))) * math.log(2))
    return power * (shifted.bits() << 52).floating()


def sigmoid(body: Body, x: Lanes) -> Lanes:
    """1/(1 + e^-x), within 2.5 ulp; very negative x give e^x, not 0."""
    small = exp(body, -body.absolute(x))
    return body.select(x.compare("olt", 0.0), small, body.constant(1.0, "double")) / (small + 1.0)


def log(body: Body, x: Lanes) -> Lanes:
    """The natural logarithm, within 1.2 ulp."""
    tiny = x.compare("olt", 2.0**-1022)
    bits = body.select(tiny, x * 2.0**54, x).bits() - ROOT_HALF
    f = ((bits & (2**52 - 1)) + ROOT_HALF).floating() - 1.0
    # The biased exponent as the low bits of 2^52: there is no conversion from i64 before AVX-512.
    biased = (bits + (1023 << 52)).unsigned_shift(52) | (1075 << 52)
    exponent = biased.floating() - (2.0**52 + 1023.0)
    exponent = exponent - body.select(tiny, 54.0, 0.0, "double")
    # ln(1 + f) = 2·atanh(s) = f - f²/2 + s·(f²/2 + R), with R = z·P(z) what 2·atanh(s) is beyond 2s.
    s = f / (f + 2.0)
    z = s * s
    half_square = f * f * 0.5
    rest = z * body.polynomial(z, table.LOG_DOUBLE)
    low = body.fma(exponent, LN2_LOW, s * (half_square + rest))
    result = body.fma(exponent, LN2_HIGH, f - (half_square - low))
    result = body.select(x.compare("olt", math.inf), result, x)
    result = body.select(x.compare("oeq", 0.0), body.constant(-math.inf, "double"), result)
    return body.select(x.compare("olt", 0.0), body.constant(math.nan, "double"), result)


def _libm(body: Body, *operands: Lanes, name: str) -> Lanes:
    parameters = ", ".join(["double"] * len(operands))
    # Not a builtin: LLVM would turn pow(10, x) into a call of exp10, which nobody has promised to link.
    body.declarations[f"declare double @{name}({parameters}) nobuiltin nounwind willreturn memory(none)"] = None

    def call(parts: list[str]) -> str:
        return body.function.emit(f"call double @{name}({', '.join('double ' + part for part in parts)})")

    return body.each_lane(operands, "double", call)


_LIBM_UNARY = ("expm1", "log2", "log10", "log1p", "tanh", "sin", "cos", "tan", "sinh", "cosh", "asin", "acos", "atan", "erf")
_LIBM_BINARY = ("atan2", "pow")
LIBM = {name: (name,) for name in (*_LIBM_UNARY, *_LIBM_BINARY)} | {"powf": ("pow",)}
"""The libm symbols of each function that calls some."""

UNARY: dict[str, Callable[..., Lanes]] = {
    **{f.__name__: f for f in (exp, exp2, softmax_exp2, sigmoid, log)},
    **{name: functools.partial(_libm, name=name) for name in _LIBM_UNARY},
}
BINARY: dict[str, Callable[..., Lanes]] = {name: functools.partial(_libm, name=name) for name in _LIBM_BINARY}
BINARY["powf"] = BINARY["pow"]
