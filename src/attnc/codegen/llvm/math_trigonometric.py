"""f32 trigonometric functions and their inverses, and pow. Bounds as in math_exponential.py."""

from __future__ import annotations

import math

from attnc.codegen.llvm import math_coefficients as table
from attnc.codegen.llvm.math_body import Body, Lanes

ROUNDER_DOUBLE = 1.5 * 2.0**52
HALF_PI_HIGH = float.fromhex("0x1.921fb54p+0")
"""π/2 to 29 bits: its product with an integer below 2^24 is exact."""
HALF_PI_LOW = float.fromhex("0x1.10b4611a62633p-30")
LARGE = 2.0**24
TWO_OVER_PI = 0x517CC1B727220A94FE13ABE8FA9A6EE06DB14ACC9E21C820FF28B1D5
"""floor(2/π·2^223): the bits of 2/π in 7 words, the first bit being the one before the point."""


def _words(body: Body, position: Lanes) -> list[Lanes]:
    """Three i32 words of the bits of 2/π that start at `position` (0 to 127, the 0th being the one before the point)."""
    bits = [(TWO_OVER_PI >> (192 - 32 * i)) & 0xFFFFFFFF for i in range(7)]
    word, shift = position.unsigned_shift(5), position & 31
    selected = []
    for k in range(4):
        value = body.constant(bits[k], "i32")
        for j in (1, 2, 3):
            value = body.select(word.compare("uge", j), bits[j + k], value)
        selected.append(value)
    return [body.intrinsic("fshl", [selected[k], selected[k + 1], shift]) for k in range(3)]


def _reduce_large(body: Body, x: Lanes) -> tuple[Lanes, Lanes]:
    """(r, quadrant) for |x| >= 2^24: multiplied by the 96 bits of 2/π that matter for the exponent (Payne and Hanek)."""
    bits = x.bits()
    exponent = (bits.unsigned_shift(23) & 0xFF) - 150
    mantissa = ((bits & 0x7FFFFF) | 0x800000).convert("zext", "i64")
    high, middle, low = (word.convert("zext", "i64") for word in _words(body, exponent - 1))
    # Fixed point: two bits of integer, 62 of fraction, everything above lost.
    product = (mantissa * high << 32) + mantissa * middle + (mantissa * low).unsigned_shift(32)
    quadrant = (product + (1 << 61)).unsigned_shift(62).convert("trunc", "i32")
    fraction = (product << 2).convert("sitofp", "double") * (math.pi / 2 * 2.0**-64)
    negative = x.compare("olt", 0.0)
    r = fraction.convert("fptrunc", "float")
    r = body.select(negative, -r, r)
    quadrant = body.select(negative, 0 - quadrant, quadrant)
    return r + (x - x), quadrant


def _reduce(body: Body, x: Lanes) -> tuple[Lanes, Lanes]:
    """(r, quadrant): x = quadrant·π/2 + r modulo 2π, |r| <= π/4; NaN for inf."""
    wide = x.convert("fpext", "double")
    shifted = body.fma(wide, 2 / math.pi, ROUNDER_DOUBLE)
    n = shifted - ROUNDER_DOUBLE
    r = body.fma(n, -HALF_PI_LOW, body.fma(n, -HALF_PI_HIGH, wide)).convert("fptrunc", "float")
    quadrant = shifted.bits().convert("trunc", "i32")
    large = body.absolute(x).compare("uge", LARGE)
    r, quadrant = body.rarely(large, [r, quadrant], lambda: _reduce_large(body, x))
    return r, quadrant


def _sine_and_cosine(body: Body, r: Lanes) -> tuple[Lanes, Lanes]:
    """Both for |r| <= π/4."""
    square = r * r
    sine = body.fma(r * square, body.polynomial(square, table.SIN), r)
    cosine = body.fma(square, body.fma(square, body.polynomial(square, table.COS), -0.5), 1.0)
    return sine, cosine


def _with_quadrant(body: Body, x: Lanes, shift: int) -> Lanes:
    r, quadrant = _reduce(body, x)
    sine, cosine = _sine_and_cosine(body, r)
    quadrant = quadrant + shift if shift else quadrant
    result = body.select((quadrant & 1).compare("eq", 0), sine, cosine)
    return (result.bits() ^ ((quadrant & 2) << 30)).floating()


def sin(body: Body, x: Lanes) -> Lanes:
    """The sine, within 1.8 ulp for x of any size."""
    # -0 would lose its sign in the reduction.
    return body.select(x.compare("oeq", 0.0), x, _with_quadrant(body, x, 0))


def cos(body: Body, x: Lanes) -> Lanes:
    """The cosine, within 1.8 ulp for x of any size."""
    return _with_quadrant(body, x, 1)


def tan(body: Body, x: Lanes) -> Lanes:
    """The tangent, within 3.6 ulp for x of any size."""
    r, quadrant = _reduce(body, x)
    sine, cosine = _sine_and_cosine(body, r)
    even = (quadrant & 1).compare("eq", 0)
    result = body.select(even, sine, -cosine) / body.select(even, cosine, sine)
    return body.select(x.compare("oeq", 0.0), x, result)


def _asin_part(body: Body, x: Lanes, square: Lanes) -> Lanes:
    """asin x for |x| <= 1/2."""
    return body.fma(x * square, body.polynomial(square, table.ASIN), x)


def asin(body: Body, x: Lanes) -> Lanes:
    """The inverse sine, within 2.5 ulp; NaN outside [-1, 1]."""
    magnitude = body.absolute(x)
    near = magnitude.compare("olt", 0.5)
    half = body.fma(magnitude, -0.5, 0.5)
    part = _asin_part(
        body,
        body.select(near, magnitude, body.intrinsic("sqrt", [half])),
        body.select(near, magnitude * magnitude, half),
    )
    return body.copysign(body.select(near, part, body.fma(part, -2.0, math.pi / 2)), x)


def acos(body: Body, x: Lanes) -> Lanes:
    """The inverse cosine, within 1.6 ulp; NaN outside [-1, 1]."""
    magnitude = body.absolute(x)
    near = magnitude.compare("olt", 0.5)
    half = body.fma(magnitude, -0.5, 0.5)
    part = _asin_part(
        body,
        body.select(near, x, body.intrinsic("sqrt", [half])),
        body.select(near, x * x, half),
    )
    doubled = part + part
    # π/2 = high + low: the low part keeps the middle of the range within its bound.
    high, low = 1.5707963705062866, -4.371139000186241e-08
    far = body.select(x.compare("olt", 0.0), (2 * high - doubled) + 2 * low, doubled)
    return body.select(near, high - (part - low), far)


def _atan_part(body: Body, t: Lanes) -> Lanes:
    """atan t for 0 <= t <= 1."""
    square = t * t
    return body.fma(t * square, body.polynomial(square, table.ATAN), t)


def atan(body: Body, x: Lanes) -> Lanes:
    """The inverse tangent, within 2.2 ulp."""
    magnitude = body.absolute(x)
    far = magnitude.compare("ogt", 1.0)
    part = _atan_part(body, body.select(far, 1.0 / magnitude, magnitude))
    return body.copysign(body.select(far, math.pi / 2 - part, part), x)


def atan2(body: Body, y: Lanes, x: Lanes) -> Lanes:
    """The angle of the point (x, y), within 2.2 ulp, with the special cases of C."""
    up, right = body.absolute(y), body.absolute(x)
    steep = up.compare("ogt", right)
    above, below = body.select(steep, right, up), body.select(steep, up, right)
    t = above / below
    # 0/0 and inf/inf lie on an axis or a diagonal.
    t = body.select(above.compare("oeq", below), body.select(above.compare("oeq", 0.0), 0.0, 1.0, "float"), t)
    part = _atan_part(body, t)
    part = body.select(steep, math.pi / 2 - part, part)
    part = body.select(x.bits().compare("slt", 0), math.pi - part, part)
    # The two NaN cases: a comparison with NaN chose one operand, and t has it unless both differ.
    part = body.select(up.compare("uno", right), up + right, part)
    return body.copysign(part, y)


def pow(body: Body, x: Lanes, y: Lanes) -> Lanes:
    """x to the power y, within 0.51 ulp (computed in f64, rounded once; squares are x·x), with the special cases of C."""
    magnitude = body.absolute(x)
    tiny = magnitude.compare("olt", 2.0**-126)
    bits = body.select(tiny, magnitude * 2.0**23, magnitude).bits() - 0x3F3504F3
    n = (bits >> 23) - body.select(tiny, 23, 0, "i32")
    m = ((bits & 0x7FFFFF) + 0x3F3504F3).floating().convert("fpext", "double")
    # ln m = 2·atanh(s), relative error below 2^-45: times y it still leaves 2^-36.
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    log = body.fma(s * square, body.polynomial(square, table.POW_LOG), s + s)
    wide = y.convert("fpext", "double")
    exponent = body.fma(log, math.log2(math.e), n.convert("sitofp", "double")) * wide
    # Past these ends the result is 0 or inf in f32 all the same.
    exponent = body.at_most(body.at_least(exponent, -160.0), 140.0)
    shifted = exponent + (ROUNDER_DOUBLE + 1023.0)
    r = (exponent - (shifted - (ROUNDER_DOUBLE + 1023.0))) * math.log(2)
    power = body.fma(r * r, body.polynomial(r, table.POW_EXP), r + 1.0)
    result = (power * (shifted.bits() << 52).floating()).convert("fptrunc", "float")
    # Special bases: log's shape does not know 0 and inf.
    falling = y.compare("olt", 0.0)
    zero, infinite = magnitude.compare("oeq", 0.0), magnitude.compare("oeq", math.inf)
    vanishing = body.select(falling, infinite, zero)
    result = body.select(zero | infinite, body.select(vanishing, 0.0, math.inf, "float"), result)
    # 1 to any power, and anything to the power 0, is 1; |x| = 1 to the power ±inf too.
    endless = body.absolute(y).compare("oeq", math.inf)
    unit = magnitude.compare("oeq", 1.0)
    # The sign of a negative base: NaN unless y is an integer, as all large floats are.
    integer = body.round(y, "trunc").compare("oeq", y)
    half = y * 0.5
    odd = integer & body.round(half, "trunc").compare("one", half)
    negative = x.bits().compare("slt", 0)
    result = body.select(negative & odd, -result, result)
    nan = x.compare("olt", 0.0) & y.compare("ord", y)
    nan = body.select(integer | infinite, body.constant(0, "i1"), nan)
    result = body.select(nan, body.constant(math.nan, "float"), result)
    result = body.select(x.compare("uno", y), x + y, result)
    one = x.compare("oeq", 1.0) | y.compare("oeq", 0.0) | (unit & endless)
    result = body.select(one, body.constant(1.0, "float"), result)
    return body.select(y.compare("oeq", 2.0), x * x, result)


UNARY = (sin, cos, tan, asin, acos, atan)
BINARY = (atan2, pow)
