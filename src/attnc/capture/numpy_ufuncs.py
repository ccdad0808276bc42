"""NumPy's ufuncs as ATen operations: one builder for each, all in one table.

A builder gets operands that are traced values, or Python numbers (weak: they take the dtype of the others), and the dtypes of
the loop that NumPy would run: each input's, then the result's.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.capture.locations import refuse
from attnc.capture.numbers import NumberProxy, concrete, current
from attnc.capture.numpy_dtypes import (
    BOOL,
    FLOAT32,
    FLOAT64,
    INT64,
    in_range,
    is_float,
    is_half,
    name_of,
    out_of_bounds,
    promoted,
    rounded,
)
from attnc.capture.numpy_values import TracedArray
from attnc.errors import UnsupportedModError

if TYPE_CHECKING:
    from attnc.capture.numpy_trace import NumpyTracer

Builder = Callable[["NumpyTracer", Sequence[Any], Sequence[np.dtype]], Any]
BUILDERS: dict[np.ufunc, Builder] = {}


def broadcast(tracer: NumpyTracer, values: Sequence[Any]) -> tuple[int, ...]:
    """The common shape of operands; the lengths of rows are compiled in."""
    arrays = [value for value in values if isinstance(value, TracedArray)]
    for value in arrays:
        tracer.fix(value)
    return np.broadcast_shapes(*(value._shape for value in arrays))


def weak(tracer: NumpyTracer, number: Any, dtype: np.dtype) -> Any:
    """A Python number as it enters a computation in `dtype`. Raises `OverflowError` where NumPy does."""
    value = current(number)
    if dtype.kind in "iu":
        fits = in_range(value, dtype)
        if type(number) is NumberProxy and dtype != INT64:
            limits = np.iinfo(dtype)
            tracer.plan.guard((f"({limits.min} <= {{}} <= {limits.max})", number._expression), fits)
        if not fits:
            raise out_of_bounds(value, dtype)
        return number
    if type(number) is NumberProxy:
        return number
    if is_half(dtype):
        return rounded(value, dtype)
    return float(value) if type(value) is int and abs(value) >= 1 << 63 else number


def whole(tracer: NumpyTracer, value: Any, dtype: np.dtype) -> TracedArray:
    """An operand as a traced value of `dtype`."""
    if isinstance(value, TracedArray):
        return tracer.cast(value, dtype)
    return tracer.scalar(weak(tracer, value, dtype), dtype)


def pair(tracer: NumpyTracer, a: Any, b: Any, dtype: np.dtype) -> tuple[Any, Any]:
    """Two operands of a computation in `dtype`, one of them maybe a number: converted where ATen would not do the same."""
    if isinstance(a, TracedArray) and isinstance(b, TracedArray):
        same_class = bool(a._shape) == bool(b._shape)
        if a.dtype != b.dtype and same_class and promoted(name_of(a.dtype), name_of(b.dtype)) == dtype.name:
            return a, b
        return tracer.cast(a, dtype), tracer.cast(b, dtype)
    if isinstance(a, TracedArray):
        return tracer.cast(a, dtype), weak(tracer, b, dtype)
    return weak(tracer, a, dtype), tracer.cast(b, dtype)


def _is_run_time_half(number: Any, dtype: np.dtype) -> bool:
    return type(number) is NumberProxy and is_half(dtype)


def _register(*ufuncs: np.ufunc) -> Callable[[Builder], Builder]:
    def register(builder: Builder) -> Builder:
        for ufunc in ufuncs:
            BUILDERS[ufunc] = builder
        return builder

    return register


def _binary(base: str, tensor: str = "Tensor", scalar: str = "Scalar", *, swapped: str | None = None, alpha: bool = False):
    """`aten.base`, by a number where one operand is one; `swapped` is the operation with its operands exchanged."""

    def build(t: NumpyTracer, values: Sequence[Any], loop: Sequence[np.dtype]) -> TracedArray:
        a, b = values
        dtype, result = loop[0], loop[-1]
        shape = broadcast(t, values)
        a, b = pair(t, a, b, dtype)
        rest = (1,) if alpha else ()
        name = base
        if not isinstance(a, TracedArray) and swapped is not None:
            a, b, name = b, a, swapped
        for number in (a, b):
            if not isinstance(number, TracedArray) and (number is a or not scalar or _is_run_time_half(number, dtype)):
                a, b = whole(t, a, dtype), whole(t, b, dtype)
        overload = tensor if isinstance(b, TracedArray) else scalar
        if name == "rsub" and overload == tensor:
            a, b, name = b, a, "sub"
        return t.emit(f"aten.{name}.{overload}", (a, b, *rest), result, shape)

    return build


BUILDERS[np.add] = _binary("add", swapped="add", alpha=True)
BUILDERS[np.subtract] = _binary("sub", swapped="rsub", alpha=True)
BUILDERS[np.multiply] = _binary("mul", swapped="mul")
BUILDERS[np.true_divide] = _binary("div")
_COMPARISONS = {"eq": (np.equal, "eq"), "ne": (np.not_equal, "ne"), "lt": (np.less, "gt"), "le": (np.less_equal, "ge")}
_COMPARISONS |= {"gt": (np.greater, "lt"), "ge": (np.greater_equal, "le")}


def _comparison(base: str, flipped: str) -> Builder:
    plain = _binary(base, swapped=flipped)

    def build(t: NumpyTracer, values: Sequence[Any], loop: Sequence[np.dtype]) -> TracedArray:
        dtype = loop[0]
        numbers = [value for value in values if not isinstance(value, TracedArray)]
        if numbers and dtype.kind in "iu" and not in_range(current(numbers[0]), dtype):
            # NumPy compares Python's ints as they are, of whatever size.
            if type(numbers[0]) is NumberProxy or in_range(numbers[0], INT64):
                loop = (INT64, INT64, loop[-1])
            else:
                with_zero = [0 if isinstance(value, TracedArray) else value for value in values]
                answer = getattr(operator, base)(*with_zero)
                shape = broadcast(t, values)
                return t.emit("aten.full.default", (list(shape), answer, BOOL, None, None, None), BOOL, shape)
        return plain(t, values, loop)

    return build


for _base, (_ufunc, _flipped) in _COMPARISONS.items():
    BUILDERS[_ufunc] = _comparison(_base, _flipped)
for _base, _ufunc in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
    BUILDERS[_ufunc] = _binary(f"bitwise_{_base}", swapped=f"bitwise_{_base}")
BUILDERS[np.left_shift] = _binary("__lshift__")
BUILDERS[np.right_shift] = _binary("__rshift__")
for _base, _ufunc in (("maximum", np.maximum), ("minimum", np.minimum), ("fmax", np.fmax), ("fmin", np.fmin)):
    BUILDERS[_ufunc] = _binary(_base, "default", "")
for _base, _ufunc in (("atan2", np.arctan2), ("hypot", np.hypot), ("logaddexp", np.logaddexp)):
    BUILDERS[_ufunc] = _binary(_base, "default", "")
BUILDERS[np.copysign] = _binary("copysign")
BUILDERS[np.heaviside] = _binary("heaviside", "default", "")


def _in_float32(build: Builder) -> Builder:
    """Half types are computed in float32 and rounded once, as NumPy does."""

    def wrapped(t: NumpyTracer, values: Sequence[Any], loop: Sequence[np.dtype]) -> Any:
        if not is_half(loop[0]):
            return build(t, values, loop)
        half = loop[-1]
        wide = [whole(t, value, half) for value in values]
        result = build(t, [t.cast(value, FLOAT32) for value in wide], [FLOAT32] * len(loop))
        return t.cast(result, half)

    return wrapped


BUILDERS[np.floor_divide] = _in_float32(_binary("floor_divide", "default", "Scalar"))
BUILDERS[np.remainder] = _in_float32(_binary("remainder"))
BUILDERS[np.fmod] = _in_float32(_binary("fmod"))


@_register(np.divmod)
def _divmod(t: NumpyTracer, values: Sequence[Any], loop: Sequence[np.dtype]) -> Any:
    loop = [*loop[:2], loop[-1]]
    return BUILDERS[np.floor_divide](t, values, loop), BUILDERS[np.remainder](t, values, loop)


@_register(np.power)
@_in_float32
def _power(t: NumpyTracer, values: Sequence[Any], loop: Sequence[np.dtype]) -> TracedArray:
    base, exponent = values
    dtype = loop[0]
    shape = broadcast(t, values)
    if type(exponent) in (int, float, NumberProxy):
        exponent = concrete(exponent)
        if dtype.kind in "iu":
            if exponent < 0:
                raise ValueError("Integers to negative integer powers are not allowed.")
            weak(t, exponent, dtype)
        return t.emit("aten.pow.Tensor_Scalar", (t.cast(base, dtype), exponent), dtype, shape)
    if not isinstance(base, TracedArray):
        return t.emit("aten.pow.Scalar", (weak(t, base, dtype), t.cast(exponent, dtype)), dtype, shape)
    return t.emit("aten.pow.Tensor_Tensor", (t.cast(base, dtype), t.cast(exponent, dtype)), dtype, shape)


@_register(np.float_power)
def _float_power(t: NumpyTracer, values: Sequence[Any], loop: Sequence[np.dtype]) -> TracedArray:
    return _power(t, values, [FLOAT64] * 3)


def _logical(base: str) -> Builder:
    def build(t: NumpyTracer, values: Sequence[Any], loop: Sequence[np.dtype]) -> TracedArray:
        shape = broadcast(t, values)
        operands = [value if isinstance(value, TracedArray) else t.array(value) for value in values]
        return t.emit(f"aten.logical_{base}.default", operands, BOOL, shape)

    return build


for _base in ("and", "or", "xor", "not"):
    BUILDERS[getattr(np, f"logical_{_base}")] = _logical(_base)


def _unary(base: str, *, of_ints: bool = True) -> Builder:
    """`aten.base`; `of_ints`: of ints it is not just the int itself."""

    def build(t: NumpyTracer, values: Sequence[Any], loop: Sequence[np.dtype]) -> TracedArray:
        shape = broadcast(t, values)
        x = t.cast(values[0], loop[0])
        if not of_ints and not is_float(loop[0]):
            return x
        return t.emit(f"aten.{base}.default", (x,), loop[-1], shape)

    return build


_UNARY = "exp exp2 expm1 log log2 log10 log1p sqrt sin cos tan sinh cosh tanh isnan isinf isfinite sign deg2rad rad2deg"
for _base in _UNARY.split():
    BUILDERS[getattr(np, _base)] = _unary(_base)
for _base in ("sin", "cos", "tan", "sinh", "cosh", "tanh"):
    BUILDERS[getattr(np, f"arc{_base}")] = _unary(f"a{_base}")
for _base in ("floor", "ceil", "trunc"):
    BUILDERS[getattr(np, _base)] = _unary(_base, of_ints=False)
BUILDERS |= {
    np.negative: _unary("neg"),
    np.absolute: _unary("abs"),
    np.fabs: _unary("abs"),
    np.invert: _unary("bitwise_not"),
    np.rint: _unary("round"),
    np.radians: BUILDERS[np.deg2rad],
    np.degrees: BUILDERS[np.rad2deg],
}


@_register(np.positive, np.conjugate)
def _positive(t: NumpyTracer, values: Sequence[Any], loop: Sequence[np.dtype]) -> TracedArray:
    return t.cast(values[0], loop[-1])


@_register(np.square)
def _square(t: NumpyTracer, values: Sequence[Any], loop: Sequence[np.dtype]) -> TracedArray:
    x = t.cast(values[0], loop[0])
    return t.emit("aten.mul.Tensor", (x, x), loop[-1], broadcast(t, values))


@_register(np.reciprocal)
def _reciprocal(t: NumpyTracer, values: Sequence[Any], loop: Sequence[np.dtype]) -> TracedArray:
    if not is_float(loop[0]):
        raise refuse(UnsupportedModError, "a mod calls np.reciprocal on an int", "1 / x, or 1 // x")
    return _unary("reciprocal")(t, values, loop)


@_register(np.cbrt)
def _cbrt(t: NumpyTracer, values: Sequence[Any], loop: Sequence[np.dtype]) -> TracedArray:
    x = t.cast(values[0], FLOAT64)
    shape = broadcast(t, values)
    size = t.emit("aten.abs.default", (x,), FLOAT64, shape)
    root = t.emit("aten.pow.Tensor_Scalar", (size, 1 / 3), FLOAT64, shape)
    return t.cast(t.emit("aten.copysign.Tensor", (root, x), FLOAT64, shape), loop[-1])


@_register(np.logaddexp2)
def _logaddexp2(t: NumpyTracer, values: Sequence[Any], loop: Sequence[np.dtype]) -> TracedArray:
    shape, dtype = broadcast(t, values), loop[-1]
    ln2 = math.log(2)
    scaled = [t.emit("aten.mul.Scalar", (whole(t, value, dtype), ln2), dtype, broadcast(t, [value])) for value in values]
    return t.emit("aten.div.Scalar", (t.emit("aten.logaddexp.default", scaled, dtype, shape), ln2), dtype, shape)


@_register(np.signbit)
def _signbit(t: NumpyTracer, values: Sequence[Any], loop: Sequence[np.dtype]) -> TracedArray:
    shape = broadcast(t, values)
    one = t.scalar(1.0, loop[0])
    signed = t.emit("aten.copysign.Tensor", (one, t.cast(values[0], loop[0])), loop[0], shape)
    return t.emit("aten.lt.Scalar", (signed, 0), BOOL, shape)


@_register(np.matmul, *([np.vecdot] if hasattr(np, "vecdot") else []))
def _matmul(t: NumpyTracer, values: Sequence[Any], loop: Sequence[np.dtype]) -> TracedArray:
    for value in values:
        t.fix(value)
    shape = np.matmul(*(np.broadcast_to(np.int8(0), value._shape) for value in values)).shape
    a, b = (t.cast(value, loop[0]) for value in values)
    name = {(1, 1): "dot", (2, 1): "mv", (2, 2): "mm"}.get((a.ndim, b.ndim), "matmul")
    return t.emit(f"aten.{name}.default", (a, b), loop[-1], shape)
