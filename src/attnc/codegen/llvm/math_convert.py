"""Conversions, rounding to integers, and the selections among floats: all exact, or rounded once to nearest even."""

from __future__ import annotations

import math

from attnc.codegen.llvm.math_body import Body, Lanes


def bf16_to_f32(body: Body, x: Lanes) -> Lanes:
    """i16 lanes holding bfloat16 → float, exact."""
    return (x.convert("zext", "i32") << 16).floating()


def f32_to_bf16(body: Body, x: Lanes) -> Lanes:
    """float → i16 lanes holding bfloat16, to nearest even; a NaN stays one and is made quiet."""
    bits = x.bits()
    rounded = bits + (bits.unsigned_shift(16) & 1) + 0x7FFF
    result = body.select(x.compare("uno", x), bits | 0x400000, rounded)
    return result.unsigned_shift(16).convert("trunc", "i16")


def f16_to_f32(body: Body, x: Lanes) -> Lanes:
    """i16 lanes holding IEEE half → float, exact; a NaN is made quiet."""
    if body.machine.halves:
        return x.floating().convert("fpext", "float")
    bits = x.convert("zext", "i32")
    magnitude = bits & 0x7FFF
    # Normal numbers: the exponent's bias grows by 112, once more for inf and NaN. Subnormal ones: an integer times 2^-24.
    special = body.select(magnitude.compare("ugt", 0x7BFF), 112 << 23, 0, "i32")
    quiet = body.select(magnitude.compare("ugt", 0x7C00), 0x400000, 0, "i32")
    normal = (magnitude << 13) + special + (112 << 23) | quiet
    subnormal = magnitude.convert("sitofp", "float") * 2.0**-24
    result = body.select(magnitude.compare("ult", 0x0400), subnormal.bits(), normal)
    return (result | ((bits & 0x8000) << 16)).floating()


def f32_to_f16(body: Body, x: Lanes) -> Lanes:
    """float → i16 lanes holding IEEE half, to nearest even, subnormal results included; a NaN stays one and is made quiet."""
    if body.machine.halves:
        return x.convert("fptrunc", "half").bits()
    magnitude = body.absolute(x)
    bits = magnitude.bits()
    rounded = (bits - (112 << 23) + 0xFFF + (bits.unsigned_shift(13) & 1)).unsigned_shift(13)
    # Below 2^-14, the sum with 1/2 has the result in its low bits.
    subnormal = (magnitude + 0.5).bits() - 0x3F000000
    result = body.select(magnitude.compare("olt", 2.0**-14), subnormal, rounded)
    result = body.select(magnitude.compare("oge", 65520.0), 0x7C00, result)
    nan = bits.unsigned_shift(13) & 0x3FF | 0x7E00
    result = body.select(magnitude.compare("uno", magnitude), nan, result)
    return (result | (x.bits().unsigned_shift(16) & 0x8000)).convert("trunc", "i16")


def floor(body: Body, x: Lanes) -> Lanes:
    """The largest integer that is not above x."""
    return body.round(x, "floor")


def ceil(body: Body, x: Lanes) -> Lanes:
    """The least integer that is not below x."""
    return body.round(x, "ceil")


def trunc(body: Body, x: Lanes) -> Lanes:
    """x without its fraction."""
    return body.round(x, "trunc")


def roundeven(body: Body, x: Lanes) -> Lanes:
    """The nearest integer, halves to even (torch.round)."""
    return body.round(x, "roundeven")


def round(body: Body, x: Lanes) -> Lanes:
    """The nearest integer, halves away from zero."""
    just_below_half = math.nextafter(0.5, 0.0) if x.element == "double" else 0.5 - 2.0**-25
    return body.round(x + body.copysign(body.constant(just_below_half, x.element), x), "trunc")


def maximum(body: Body, x: Lanes, y: Lanes) -> Lanes:
    """The larger; NaN if one of them is (torch.maximum)."""
    if body.machine.maximum:
        return body.intrinsic("maximum", [x, y])
    return body.select(x.compare("uno", x), x, maximum_keeping_second(body, x, y))


def minimum(body: Body, x: Lanes, y: Lanes) -> Lanes:
    """The smaller; NaN if one of them is (torch.minimum)."""
    if body.machine.maximum:
        return body.intrinsic("minimum", [x, y])
    return body.select(x.compare("uno", x), x, minimum_keeping_second(body, x, y))


def fmax(body: Body, x: Lanes, y: Lanes) -> Lanes:
    """The larger; a NaN loses against a number (torch.fmax)."""
    return body.select(y.compare("uno", y), x, maximum_keeping_second(body, x, y))


def fmin(body: Body, x: Lanes, y: Lanes) -> Lanes:
    """The smaller; a NaN loses against a number (torch.fmin)."""
    return body.select(y.compare("uno", y), x, minimum_keeping_second(body, x, y))


def maximum_keeping_second(body: Body, x: Lanes, y: Lanes) -> Lanes:
    """x > y ? x : y, one instruction on x86: a NaN y stays, a NaN x loses. For x that is never NaN (a constant)."""
    return body.select(x.compare("ogt", y), x, y)


def minimum_keeping_second(body: Body, x: Lanes, y: Lanes) -> Lanes:
    """x < y ? x : y, one instruction on x86: a NaN y stays, a NaN x loses. For x that is never NaN (a constant)."""
    return body.select(x.compare("olt", y), x, y)


def absf(body: Body, x: Lanes) -> Lanes:
    """The magnitude."""
    return body.absolute(x)


def copysign(body: Body, x: Lanes, y: Lanes) -> Lanes:
    """The magnitude of x with the sign of y."""
    return body.copysign(x, y)


def sqrt(body: Body, x: Lanes) -> Lanes:
    """The square root, correctly rounded (0.5 ulp); NaN below zero."""
    return body.intrinsic("sqrt", [x])


def rsqrt(body: Body, x: Lanes) -> Lanes:
    """1/√x, within 1.6 ulp; inf at 0 (-inf at -0)."""
    return 1.0 / body.intrinsic("sqrt", [x])


def fptosi(body: Body, x: Lanes, result: str) -> Lanes:
    """Towards zero, as `tensor.to(dtype)` on x86: what does not fit, and NaN, gives the least integer (of i32 for narrower
    results, which then keep its low bits: 0). Never poison, and no other value on other CPUs."""
    wide = "i64" if result == "i64" else "i32"
    bits = int(wide[1:])
    limit = 2.0 ** (bits - 1)
    fits = body.absolute(x).compare("olt", limit)
    integer = body.select(fits, x, 0.0).convert("fptosi", wide)
    integer = body.select(fits, integer, -(2 ** (bits - 1)))
    return integer if result == wide else integer.convert("trunc", result)


UNARY = (floor, ceil, trunc, roundeven, round, absf, sqrt, rsqrt)
BINARY = (maximum, minimum, fmax, fmin, maximum_keeping_second, minimum_keeping_second, copysign)
