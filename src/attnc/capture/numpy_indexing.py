"""`array[…]` in a NumPy mod, as aten.select, aten.slice, aten.unsqueeze and aten.index.

Where a longer index array stands among the indices, the scalar ones are broadcast with it, as NumPy does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.capture.locations import refuse
from attnc.capture.numbers import NumberProxy, concrete
from attnc.capture.numpy_dtypes import INDEX_DTYPES, INT32, INT64, name_of
from attnc.capture.numpy_values import TracedArray
from attnc.capture.record import NONE
from attnc.errors import CaptureIndexError, DataDependentModError, UnsupportedModError

if TYPE_CHECKING:
    from attnc.capture.numpy_trace import NumpyTracer


def getitem(t: NumpyTracer, array: TracedArray, index: Any) -> TracedArray:
    """`array[index]`."""
    if isinstance(index, str) and array.array is not None and array.dtype.fields and index in array.dtype.fields:
        return t.field(array.array, index)
    items = [_item(t, item) for item in (index if isinstance(index, tuple) else (index,))]
    items = _without_ellipsis(items, array.ndim)
    together = any(isinstance(item, TracedArray) and item.ndim for item in items)
    current, dim = array, 0
    places: dict[int, TracedArray] = {}
    for item in items:
        if item is None:
            current = _unsqueeze(t, current, dim)
            dim += 1
        elif isinstance(item, slice):
            current = _slice(t, current, dim, item)
            dim += 1
        elif isinstance(item, TracedArray):
            places[dim] = item
            dim += 1
        elif together:
            places[dim] = t.scalar(item, INT64)
            dim += 1
        else:
            current = _select(t, current, dim, item)
    return _index(t, current, places) if places else current


def _item(t: NumpyTracer, item: Any) -> Any:
    """One index: a traced value, an int (maybe a captured one), a slice, None or Ellipsis."""
    if item is None or item is Ellipsis or isinstance(item, slice):
        return item
    lifted = t.lift(item)
    if type(lifted) is bool or (isinstance(lifted, TracedArray) and lifted.dtype.name == "bool"):
        raise refuse(
            DataDependentModError,
            "a mod selects elements by a bool: the number of elements would depend on data",
            "np.where(condition, a, b)",
        )
    if isinstance(lifted, TracedArray):
        if name_of(lifted.dtype) not in INDEX_DTYPES:
            raise _not_an_integer(f"value of dtype {lifted.dtype.name}")
        if lifted.number is not None and not lifted.ndim:
            proxy = lifted.number
            return NumberProxy(proxy._plan, ("int({})", proxy._expression), int(proxy._value))
        return lifted if lifted.dtype.itemsize >= 4 else t.cast(lifted, INT32)
    if type(lifted) is int or (type(lifted) is NumberProxy and isinstance(lifted._value, int)):
        return lifted
    if hasattr(item, "__index__") and lifted is None:
        return item.__index__()
    raise _not_an_integer("float" if lifted is not None else type(item).__name__)


def _not_an_integer(what: str) -> UnsupportedModError:
    return refuse(UnsupportedModError, f"a mod indexes an array with a {what}", "index with integers, e.g. x.astype(np.int32)")


def _without_ellipsis(items: list[Any], rank: int) -> list[Any]:
    used = sum(item is not None and item is not Ellipsis for item in items)
    if used > rank:
        raise refuse(CaptureIndexError, f"{used} indices of an array of {rank} dims", "give at most one index for each dim")
    for place, item in enumerate(items):
        if item is Ellipsis:
            return items[:place] + [slice(None)] * (rank - used) + [i for i in items[place + 1 :] if i is not Ellipsis]
    return items


def _index(t: NumpyTracer, current: TracedArray, places: dict[int, TracedArray]) -> TracedArray:
    """aten.index: index arrays broadcast; where they are not side by side, their dims come first."""
    given = list(places.values())
    for value in given:
        t.fix(value)
    t.operand(current)
    try:
        rows = np.broadcast_shapes(*(value._shape for value in given))
    except ValueError:
        shapes = ", ".join(str(list(value._shape)) for value in given)
        message = f"index arrays of shapes {shapes} do not broadcast"
        raise refuse(CaptureIndexError, message, "give them lengths that are equal or 1") from None
    dims = sorted(places)
    kept = [dim for dim in range(current.ndim) if dim not in places]
    front = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0
    sizes, origins = current._shape, current._origins
    shape = (*(sizes[d] for d in kept[:front]), *rows, *(sizes[d] for d in kept[front:]))
    result_origins = (*(origins[d] for d in kept[:front]), *(None for _ in rows), *(origins[d] for d in kept[front:]))
    indices = [places.get(dim, NONE) for dim in range(dims[-1] + 1)]
    return t.view("aten.index.Tensor", (current, indices), current.dtype, shape, result_origins)


def _select(t: NumpyTracer, current: TracedArray, dim: int, place: Any) -> TracedArray:
    """aten.select: by a run-time number, or by a constant, which must lie within the length of now."""
    t.operand(current)
    size = current._shape[dim]
    number = place._value if type(place) is NumberProxy else place
    if not -size <= number < size:
        name = f" of {t.name_of(current.array)}" if current.array is not None else ""
        remedy = "keep the index in [-size, size); an index may wrap once"
        raise refuse(CaptureIndexError, f"index {number} is out of range for dim {dim}{name} with size {size}", remedy)
    shape = (*current._shape[:dim], *current._shape[dim + 1 :])
    origins = (*current._origins[:dim], *current._origins[dim + 1 :])
    return t.view("aten.select.int", (current, dim, place), current.dtype, shape, origins)


def _unsqueeze(t: NumpyTracer, current: TracedArray, dim: int) -> TracedArray:
    t.operand(current)
    shape = (*current._shape[:dim], 1, *current._shape[dim:])
    origins = (*current._origins[:dim], None, *current._origins[dim:])
    return t.view("aten.unsqueeze.default", (current, dim), current.dtype, shape, origins)


def _slice(t: NumpyTracer, current: TracedArray, dim: int, item: slice) -> TracedArray:
    """aten.slice: the sliced dim's length is compiled in."""
    bounds = [item.start, item.stop, item.step]
    if any(isinstance(bound, TracedArray) and bound.number is None for bound in bounds):
        raise refuse(
            DataDependentModError,
            "a mod slices with a traced value as bound: the length would depend on data",
            "index with start + np.arange(length)",
        )
    start, stop, step = (bound.__index__() if isinstance(bound, TracedArray) else concrete(bound) for bound in bounds)
    if start in (None, 0) and stop is None and step in (None, 1):
        return current
    t.operand(current)
    t.fix(current, [dim])
    size = current._shape[dim]
    low, high, stride = slice(start, stop, step).indices(size)
    count = len(range(low, high, stride))
    if stride < 0:  # the same elements in rising order, turned round
        low, high, stride = low + (count - 1) * stride, low + 1, -stride
    shape = (*current._shape[:dim], count, *current._shape[dim + 1 :])
    origins = (*current._origins[:dim], None, *current._origins[dim + 1 :])
    operands = (current, dim, low, max(high, low), stride)
    result = t.view("aten.slice.Tensor", operands, current.dtype, shape, origins)
    if step is not None and step < 0:
        t.fix(result)
        return t.emit("aten.flip.default", (result, [dim]), current.dtype, shape)
    return result
