"""`tensor[…]` in a mod: as aten.select, aten.slice, aten.unsqueeze and aten.index, never by reading an index.

torch's own indexing reads a 0-d integer tensor (`.item()`) and selects by it. Here 0-d indices go to `aten.index`, which means
the same; where 0-d and longer index tensors stand among slices, the 0-d ones are taken first, so that dims come out as torch's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnc.capture.locations import refuse
from attnc.capture.numbers import NumberProxy, concrete
from attnc.capture.symbolic import symbolic
from attnc.errors import CaptureIndexError, DataDependentModError, UnsupportedModError

if TYPE_CHECKING:
    from attnc.capture.trace import Tracer

_INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8)


def getitem(tracer: Tracer, tensor: Any, index: Any) -> torch.Tensor:
    """`tensor[index]`."""
    current = tracer.value(tensor).standin
    items = [_tensor_index(tracer, item) for item in (index if isinstance(index, tuple) else (index,))]
    items = _without_ellipsis(items, current.dim())
    aten = torch.ops.aten
    dim = 0
    tensors: dict[int, torch.Tensor] = {}
    for item in items:
        if item is None:
            current = aten.unsqueeze.default(current, dim)
            dim += 1
        elif isinstance(item, torch.Tensor):
            tensors[dim] = item
            dim += 1
        elif isinstance(item, slice):
            current = _slice(tracer, current, dim, item)
            dim += 1
        else:
            where = symbolic(tracer, item) if type(item) is NumberProxy else item
            current = aten.select.int(current, dim, where)
    if not tensors:
        return current
    scalars = {d: t for d, t in tensors.items() if t.dim() == 0}
    if len(scalars) < len(tensors) and scalars and len(tensors) < len(items):
        current = _index(current, scalars)
        tensors = {d - sum(s < d for s in scalars): t for d, t in tensors.items() if t.dim()}
    return _index(current, tensors)


def _index(current: torch.Tensor, tensors: dict[int, torch.Tensor]) -> torch.Tensor:
    return torch.ops.aten.index.Tensor(current, [tensors.get(dim) for dim in range(max(tensors) + 1)])


def _tensor_index(tracer: Tracer, item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        standin = tracer.value(item).standin
        if standin.dtype in (torch.bool, torch.uint8):
            raise refuse(
                DataDependentModError,
                "a mod selects elements by a bool tensor: the number of elements would depend on data",
                "torch.where(condition, a, b)",
            )
        if standin.dtype not in _INDEX_DTYPES:
            raise _not_an_integer(f"tensor of {standin.dtype}")
        return standin
    if isinstance(item, bool):
        raise refuse(UnsupportedModError, "a mod indexes a tensor with a bool", "index with integers")
    if isinstance(item, (list, range)):
        if any(isinstance(entry, torch.Tensor) for entry in item):
            raise refuse(UnsupportedModError, "a mod indexes with a list that holds tensors", "torch.stack([...])")
        return torch.tensor([concrete(entry) for entry in item])
    if isinstance(item, float) or (type(item) is NumberProxy and isinstance(item._value, float)):
        raise _not_an_integer("float")
    if item is None or item is Ellipsis or isinstance(item, slice) or type(item) is NumberProxy:
        return item
    if hasattr(item, "__array_interface__") or hasattr(item, "__array__"):
        return tracer.value(torch.as_tensor(item)).standin
    if not hasattr(item, "__index__"):
        raise _not_an_integer(type(item).__name__)
    return item.__index__()


def _not_an_integer(what: str) -> UnsupportedModError:
    return refuse(UnsupportedModError, f"a mod indexes a tensor with a {what}", "index with integers, e.g. x.to(torch.int32)")


def _without_ellipsis(items: list[Any], rank: int) -> list[Any]:
    used = sum(item is not None and item is not Ellipsis for item in items)
    if used > rank:
        raise refuse(CaptureIndexError, f"{used} indices of a tensor of {rank} dims", "give at most one index for each dim")
    for place, item in enumerate(items):
        if item is Ellipsis:
            return items[:place] + [slice(None)] * (rank - used) + [i for i in items[place + 1 :] if i is not Ellipsis]
    return items


def _slice(tracer: Tracer, current: torch.Tensor, dim: int, item: slice) -> torch.Tensor:
    bounds = [item.start, item.stop, item.step]
    if any(isinstance(bound, torch.Tensor) for bound in bounds):
        raise refuse(
            DataDependentModError,
            "a mod slices with a tensor as bound: the length would depend on data",
            "index with start + torch.arange(length)",
        )
    start, stop, step = map(concrete, bounds)
    if start in (None, 0) and stop is None and step in (None, 1):
        return current
    return torch.ops.aten.slice.Tensor(current, dim, start, stop, 1 if step is None else step)
