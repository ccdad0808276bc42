"""Python arithmetic on captured numbers: `window * 2` with `window` an argument of the kernel.

ints are 64 bits, `/` gives a float, `//` and `%` floor.
"""

from __future__ import annotations

from collections.abc import Callable

from xdsl.dialects import math
from xdsl.ir import SSAValue

from attnc.dialects.torch import si64
from attnc.transforms.convert_torch_to_linalg_ext_arithmetic import integer_floor_divide, integer_remainder
from attnc.transforms.convert_torch_to_linalg_ext_region import f64, i1
from attnc.transforms.convert_torch_to_linalg_ext_table import Unsupported, number
from attnc.transforms.convert_torch_to_linalg_ext_values import Number, ScalarBuilder

_SECTION = "Arithmetic on Python numbers"
_Emit = Callable[[ScalarBuilder, SSAValue, SSAValue], SSAValue]


def _wider(a: Number, b: Number):
    return f64 if f64 in (a.dtype, b.dtype) else si64


def _binary(names: str, emit: _Emit) -> None:
    @number(_SECTION, names)
    def build(r: ScalarBuilder, a: Number, b: Number, *_: object) -> Number:
        dtype = _wider(a, b)
        return of(r, emit(r, r.convert(a, dtype), r.convert(b, dtype)), dtype)


def of(r: ScalarBuilder, value: SSAValue, dtype) -> Number:
    """A number that was computed; known if its operands were."""
    known = r.literal(value)
    return Number(dtype, known) if known is not None else Number(dtype, None, value)


_VARIANTS = "int float int_float float_int Scalar_Scalar"


def _names(name: str) -> str:
    return " ".join([f"{name}.{variant}" for variant in _VARIANTS.split()])


_binary(_names("add") + " add", lambda r, a, b: r.add(a, b))
_binary(_names("sub") + " sub", lambda r, a, b: r.subtract(a, b))
_binary(_names("mul") + " mul", lambda r, a, b: r.multiply(a, b))


@number(_SECTION, "div div.int div.float truediv.int truediv.float truediv.Scalar_Scalar")
def divide(r: ScalarBuilder, a: Number, b: Number) -> Number:
    return of(r, r.divide(r.convert(a, f64), r.convert(b, f64)), f64)


@number(_SECTION, "floordiv.int floordiv.float floordiv.Scalar_Scalar")
def floor_divide(r: ScalarBuilder, a: Number, b: Number) -> Number:
    dtype = _wider(a, b)
    x, y = r.convert(a, dtype), r.convert(b, dtype)
    if dtype == f64:
        return of(r, r.math(math.FloorOp, r.divide(x, y)), dtype)
    return of(r, integer_floor_divide(r, dtype, x, y), dtype)


@number(_SECTION, "remainder.int remainder.float remainder.Scalar_Scalar")
def remainder(r: ScalarBuilder, a: Number, b: Number) -> Number:
    dtype = _wider(a, b)
    if dtype == f64:
        raise Unsupported("% of captured floats; compute it before the call")
    return of(r, integer_remainder(r, dtype, r.convert(a, dtype), r.convert(b, dtype)), dtype)


@number(_SECTION, "neg.int neg.float neg.Scalar")
def negate(r: ScalarBuilder, a: Number) -> Number:
    dtype = f64 if a.dtype == f64 else si64
    return of(r, r.negate(r.convert(a, dtype)), dtype)


@number(_SECTION, "abs.int abs.float abs.Scalar")
def absolute(r: ScalarBuilder, a: Number) -> Number:
    dtype = f64 if a.dtype == f64 else si64
    value = r.convert(a, dtype)
    if dtype == f64:
        return of(r, r.math(math.AbsFOp, value), dtype)
    return of(r, r.emit(math.AbsIOp, (value,), value.type), dtype)


@number(_SECTION, "pow.int pow.float pow.int_float pow.float_int pow.Scalar_Scalar")
def power(r: ScalarBuilder, a: Number, b: Number) -> Number:
    if a.constant is not None and b.constant is not None:
        result = a.constant**b.constant
        return Number(f64 if isinstance(result, float) else si64, result)
    if _wider(a, b) != f64:
        raise Unsupported("** of captured ints; compute it before the call")
    return of(r, r.math(math.PowFOp, r.convert(a, f64), r.convert(b, f64)), f64)


@number(_SECTION, "sqrt.int sqrt.float sqrt.Scalar")
def square_root(r: ScalarBuilder, a: Number) -> Number:
    return of(r, r.math(math.SqrtOp, r.convert(a, f64)), f64)


@number(_SECTION, "Float.Scalar Float.int")
def to_float(r: ScalarBuilder, a: Number) -> Number:
    return of(r, r.convert(a, f64), f64)


@number(_SECTION, "Int.Scalar Int.float Int.bool")
def to_int(r: ScalarBuilder, a: Number) -> Number:
    if a.constant is not None:
        return Number(si64, int(a.constant))
    return of(r, r.convert(a, si64), si64)


@number(_SECTION, "Bool.int Bool.float")
def to_bool(r: ScalarBuilder, a: Number) -> Number:
    return of(r, r.convert(a, i1), i1)


@number(_SECTION, "prim_max.int prim_max.float")
def larger(r: ScalarBuilder, a: Number, b: Number) -> Number:
    dtype = _wider(a, b)
    x, y = r.convert(a, dtype), r.convert(b, dtype)
    return of(r, r.select(r.compare("lt", x, y), y, x), dtype)


@number(_SECTION, "prim_min.int prim_min.float")
def smaller(r: ScalarBuilder, a: Number, b: Number) -> Number:
    dtype = _wider(a, b)
    x, y = r.convert(a, dtype), r.convert(b, dtype)
    return of(r, r.select(r.compare("lt", y, x), y, x), dtype)
