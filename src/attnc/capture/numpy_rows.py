"""NumPy's functions of rows: reductions, products, joining and reshaping of gathered rows and small arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.capture.locations import refuse
from attnc.capture.numbers import concrete
from attnc.capture.numpy_dtypes import BOOL, FLOAT32, FLOAT64, INT64, is_float, is_half
from attnc.capture.numpy_functions import common_dtype, handles, operand
from attnc.capture.numpy_ufuncs import BUILDERS, whole
from attnc.capture.numpy_values import TracedArray
from attnc.errors import UnsupportedOpError

if TYPE_CHECKING:
    from attnc.capture.numpy_trace import NumpyTracer


# -- reductions -----------------------------------------------------------------------------------------------------------


def _axes(x: TracedArray, axis: Any) -> list[int] | None:
    """The dims that are reduced, None for all."""
    if axis is None:
        return None
    axes = [concrete(one) for one in (axis if isinstance(axis, tuple) else (axis,))]
    for one in axes:
        if not -x.ndim <= one < x.ndim:
            raise np.exceptions.AxisError(one, x.ndim)
    return [one % x.ndim for one in axes]


def _reduced(x: TracedArray, axes: list[int] | None, keepdims: bool) -> tuple[int, ...]:
    gone = range(x.ndim) if axes is None else axes
    return tuple(1 if dim in gone else size for dim, size in enumerate(x._shape) if keepdims or dim not in gone)


def _reduce(
    t: NumpyTracer, name: str, x: TracedArray, axis: Any, keepdims: Any, dtype: np.dtype, rest: Sequence[Any] = ()
) -> TracedArray:
    """`aten.name` of all elements, or of dims."""
    t.fix(x)
    axes, keep = _axes(x, axis), bool(concrete(keepdims))
    shape = _reduced(x, axes, keep)
    if axes is None and not keep:
        return t.emit(f"aten.{name}.default", (x, *rest), dtype, shape)
    dims = list(range(x.ndim)) if axes is None else axes
    overload = {"sum": "dim_IntList", "mean": "dim", "any": "dims", "all": "dims"}[name]
    return t.emit(f"aten.{name}.{overload}", (x, dims, keep, *rest), dtype, shape)


def _whole(t: NumpyTracer, x: Any) -> TracedArray:
    """An operand of a reduction; a list becomes an array."""
    return t.array(x)


@handles(np.sum)
def sum_(t: NumpyTracer, x: Any, axis: Any = None, dtype: Any = None, keepdims: Any = False) -> Any:
    """`np.sum`: ints and bools in int64, half types in float32 and rounded once."""
    x = _whole(t, x)
    if dtype is not None:
        x = t.cast(x, np.dtype(dtype))
    elif x.dtype.name == "uint8":
        raise refuse(UnsupportedOpError, "a mod sums uint8, which NumPy does in uint64", "x.astype(np.int64).sum()")
    result = x.dtype if is_float(x.dtype) else INT64
    if not x.ndim:
        return t.cast(x, result)
    return _reduce(t, "sum", x, axis, keepdims, result, (None,))


@handles(np.mean)
def mean(t: NumpyTracer, x: Any, axis: Any = None, dtype: Any = None, keepdims: Any = False) -> Any:
    """`np.mean`: of ints in float64."""
    x = _whole(t, x)
    x = t.cast(x, np.dtype(dtype) if dtype is not None else x.dtype if is_float(x.dtype) else FLOAT64)
    return _reduce(t, "mean", x, axis, keepdims, x.dtype, (None,)) if x.ndim else x


@handles(np.prod)
def prod(t: NumpyTracer, x: Any, axis: Any = None, dtype: Any = None, keepdims: Any = False) -> Any:
    """`np.prod`: ints and bools in int64."""
    x = _whole(t, x)
    x = t.cast(x, np.dtype(dtype) if dtype is not None else x.dtype if is_float(x.dtype) else INT64)
    if not x.ndim:
        return x
    t.fix(x)
    axes, keep = _axes(x, axis), bool(concrete(keepdims))
    if axes is None and not keep:
        return t.emit("aten.prod.default", (x, None), x.dtype)
    if axes is None or len(axes) != 1:
        raise refuse(UnsupportedOpError, "a mod calls np.prod over several dims", "np.prod over one dim after the other")
    return t.emit("aten.prod.dim_int", (x, axes[0], keep, None), x.dtype, _reduced(x, axes, keep))


def _truth(name: str):
    def handler(t: NumpyTracer, x: Any, axis: Any = None, keepdims: Any = False) -> Any:
        x = t.cast(_whole(t, x), BOOL)
        return _reduce(t, name, x, axis, keepdims, BOOL) if x.ndim else x

    return handler


handles(np.any)(_truth("any"))
handles(np.all)(_truth("all"))


def _extremum(name: str):
    def handler(t: NumpyTracer, x: Any, axis: Any = None, keepdims: Any = False) -> Any:
        x = _whole(t, x)
        if not x.ndim:
            return x
        t.fix(x)
        axes, keep = _axes(x, axis), bool(concrete(keepdims))
        if axes is None and not keep:
            return t.emit(f"aten.{name}.default", (x,), x.dtype)
        dims = list(range(x.ndim)) if axes is None else axes
        return t.emit(f"aten.a{name}.default", (x, dims, keep), x.dtype, _reduced(x, axes, keep))

    return handler


handles(np.max, np.amax)(_extremum("max"))
handles(np.min, np.amin)(_extremum("min"))


def _place(name: str):
    def handler(t: NumpyTracer, x: Any, axis: Any = None, keepdims: Any = False) -> Any:
        x, axis = _whole(t, x), concrete(axis)
        t.fix(x)
        axes = _axes(x, axis)
        keep = bool(concrete(keepdims))
        return t.emit(f"aten.{name}.default", (x, axis, keep), INT64, _reduced(x, axes, keep))

    return handler


handles(np.argmax)(_place("argmax"))
handles(np.argmin)(_place("argmin"))


@handles(np.count_nonzero)
def count_nonzero(t: NumpyTracer, x: Any, axis: Any = None, keepdims: Any = False) -> Any:
    """`np.count_nonzero`."""
    return sum_(t, t.cast(_whole(t, x), BOOL), axis, None, keepdims)


@handles(np.searchsorted)
def searchsorted(t: NumpyTracer, row: Any, x: Any, side: Any = "left") -> Any:
    """`np.searchsorted` in a sorted row: how many of its elements come before `x`."""
    row, x = t.array(row), t.array(x)
    if row.ndim != 1 or x.ndim:
        raise refuse(UnsupportedOpError, "a mod calls np.searchsorted on other than a row and a scalar", "one scalar at a time")
    return sum_(t, row < x if side == "left" else row <= x)


@handles(np.var)
def var(t: NumpyTracer, x: Any, axis: Any = None, dtype: Any = None, ddof: Any = 0, keepdims: Any = False) -> Any:
    """`np.var`: the mean of the squared distances from the mean; half types in float32."""
    x = _whole(t, x)
    result = np.dtype(dtype) if dtype is not None else x.dtype if is_float(x.dtype) else FLOAT64
    x = t.cast(x, FLOAT32 if is_half(result) else result)
    t.fix(x)
    axes = _axes(x, axis)
    count = math.prod(x._shape if axes is None else [x._shape[dim] for dim in axes])
    distance = x - mean(t, x, axis, None, True)
    return t.cast(sum_(t, distance * distance, axis, None, keepdims) / (count - concrete(ddof)), result)


@handles(np.std)
def std(t: NumpyTracer, x: Any, axis: Any = None, dtype: Any = None, ddof: Any = 0, keepdims: Any = False) -> Any:
    """`np.std`."""
    return np.sqrt(var(t, x, axis, dtype, ddof, keepdims))


@handles(np.linalg.norm)
def norm(t: NumpyTracer, x: Any, ord: Any = None, axis: Any = None, keepdims: Any = False) -> Any:
    """`np.linalg.norm` of a vector, of order 2."""
    x = _whole(t, x)
    if concrete(ord) not in (None, 2) or (axis is None and x.ndim > 1 and ord is not None):
        raise refuse(UnsupportedOpError, f"a mod calls np.linalg.norm of order {ord}", "np.sum, np.max … of np.abs(x)")
    x = x if is_float(x.dtype) else t.cast(x, FLOAT64)
    return np.sqrt(sum_(t, x * x, axis, None, keepdims))


# -- products -------------------------------------------------------------------------------------------------------------


@handles(np.dot, np.inner, np.vdot)
def dot(t: NumpyTracer, a: Any, b: Any) -> Any:
    """`np.dot` of rows, and of a matrix and a row."""
    a, b = operand(t, a), operand(t, b)
    if not isinstance(a, TracedArray) or not isinstance(b, TracedArray) or not a.ndim or not b.ndim:
        return np.multiply(a, b)
    if a.ndim > 2 or b.ndim > 2:
        raise refuse(UnsupportedOpError, "a mod multiplies arrays of more than two dims", "gather rows, then np.dot")
    dtype = common_dtype([a, b])
    return BUILDERS[np.matmul](t, [a, b], [dtype] * 3)


# -- joining and reshaping --------------------------------------------------------------------------------------------------


@handles(np.stack)
def stack(t: NumpyTracer, arrays: Sequence[Any], axis: Any = 0, dtype: Any = None) -> TracedArray:
    """`np.stack` of small arrays."""
    items = [operand(t, item) for item in arrays]
    result = np.dtype(dtype) if dtype is not None else common_dtype(items)
    values = [whole(t, item, result) for item in items]
    for value in values:
        t.fix(value)
    if len({value._shape for value in values}) > 1:
        raise ValueError("all input arrays must have the same shape")
    rank = values[0].ndim + 1
    axis = concrete(axis) % rank
    shape = list(values[0]._shape)
    shape.insert(axis, len(values))
    return t.emit("aten.stack.default", (values, axis), result, tuple(shape))


@handles(np.concatenate)
def concatenate(t: NumpyTracer, arrays: Sequence[Any], axis: Any = 0) -> TracedArray:
    """`np.concatenate` of small arrays."""
    items = [t.array(item) for item in arrays]
    result = common_dtype(items)
    values = [t.cast(item, result) for item in items]
    for value in values:
        t.fix(value)
    shape = np.concatenate([np.broadcast_to(np.int8(0), value._shape) for value in values], concrete(axis)).shape
    return t.emit("aten.cat.default", (values, concrete(axis) % values[0].ndim), result, shape)


@handles(np.expand_dims)
def expand_dims(t: NumpyTracer, x: Any, axis: Any) -> TracedArray:
    """`np.expand_dims` by one dim."""
    x = t.array(x)
    axis = concrete(axis) % (x.ndim + 1)
    return x[(slice(None),) * axis + (None,)]


@handles(np.transpose)
def transpose(t: NumpyTracer, x: Any, *axes: Any) -> TracedArray:
    """`np.transpose`."""
    x = t.array(x)
    if len(axes) == 1 and (axes[0] is None or isinstance(axes[0], (tuple, list))):
        axes = tuple(axes[0] or ())
    order = [concrete(axis) % x.ndim for axis in axes] or list(range(x.ndim))[::-1]
    if sorted(order) != list(range(x.ndim)):
        raise ValueError("axes don't match array")
    t.operand(x)
    shape, origins = tuple(x._shape[dim] for dim in order), tuple(x._origins[dim] for dim in order)
    return t.view("aten.permute.default", (x, order), x.dtype, shape, origins)


@handles(np.swapaxes)
def swapaxes(t: NumpyTracer, x: Any, axis1: Any, axis2: Any) -> TracedArray:
    """`np.swapaxes`."""
    x = t.array(x)
    order = list(range(x.ndim))
    one, other = concrete(axis1) % x.ndim, concrete(axis2) % x.ndim
    order[one], order[other] = order[other], order[one]
    return transpose(t, x, order)


@handles(np.reshape)
def reshape(t: NumpyTracer, x: Any, *shape: Any, order: Any = "C", copy: Any = None) -> TracedArray:
    """`np.reshape` of a small array."""
    x = t.array(x)
    t.fix(x)
    wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    sizes = np.empty(x._shape, np.int8).reshape([concrete(size) for size in wanted]).shape
    return t.emit("aten.reshape.default", (x, list(sizes)), x.dtype, sizes)


@handles(np.ravel)
def ravel(t: NumpyTracer, x: Any, order: Any = "C") -> TracedArray:
    """`np.ravel` of a small array."""
    return reshape(t, x, -1)


@handles(np.squeeze)
def squeeze(t: NumpyTracer, x: Any, axis: Any = None) -> TracedArray:
    """`np.squeeze`."""
    x = t.array(x)
    t.fix(x)
    shape = np.squeeze(np.empty(x._shape, np.int8), axis).shape
    return reshape(t, x, shape)


@handles(np.flip)
def flip(t: NumpyTracer, x: Any, axis: Any = None) -> TracedArray:
    """`np.flip`."""
    x = t.array(x)
    t.fix(x)
    axes = _axes(x, axis)
    return t.emit("aten.flip.default", (x, list(range(x.ndim)) if axes is None else axes), x.dtype, x._shape)


@handles(np.take)
def take(t: NumpyTracer, x: Any, indices: Any, axis: Any = None, mode: Any = "raise") -> Any:
    """`np.take`."""
    if mode != "raise":
        raise refuse(UnsupportedOpError, f"a mod calls np.take with mode={mode!r}", "np.clip or % on the index")
    x, axis = t.array(x), concrete(axis)
    if axis is None:
        if x.ndim != 1:
            x = ravel(t, x)
        axis = 0
    return x[(slice(None),) * (axis % x.ndim) + (indices,)]
