"""ATen calls that only choose elements: they propagate where each dim comes from, so that its length may stay unknown.

Also the calls with several results, written as operations with one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from attnc.capture.locations import refuse
from attnc.capture.numbers import concrete
from attnc.capture.record import NONE, ListOf, Literal
from attnc.capture.symbolic import proxy_of
from attnc.errors import CaptureIndexError, UnsupportedOpError

if TYPE_CHECKING:
    from attnc.capture.trace import Origin, Tracer, Value


def _zeros(shape, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=like.dtype, device="cpu").expand(shape)


def _emit(tracer: Tracer, name: str, value: Value, operands: list[Any], shape, origins: tuple[Origin, ...]) -> torch.Tensor:
    value.shared = True
    literals = [Literal.of(o) if o is None or isinstance(o, (int, bool)) else o for o in operands]
    result = _zeros(shape, value.standin)
    return tracer.emit(name, (value.operand, *literals), result, origins, shared=True)


def _broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """torch.broadcast_shapes, which imports sympy."""
    rank = max(map(len, shapes))
    columns = zip(*((1,) * (rank - len(shape)) + shape for shape in shapes), strict=True)
    sizes = []
    for column in columns:
        longer = {size for size in column if size != 1}
        if len(longer) > 1:
            raise refuse(
                CaptureIndexError,
                f"index tensors of shapes {', '.join(str(list(shape)) for shape in shapes)} do not broadcast",
                "give them lengths that are equal or 1",
            )
        sizes.append(longer.pop() if longer else 1)
    return tuple(sizes)


def _dim(dim: int, rank: int) -> int:
    if not -rank <= dim < rank:
        raise refuse(CaptureIndexError, f"dim {dim} of a tensor of {rank} dims", f"give a dim in [{-rank}, {rank})")
    return dim % rank


def index(tracer: Tracer, tensor: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor:
    """aten.index.Tensor: index tensors broadcast; where they are not side by side, their dims come first."""
    value = tracer.value(tensor)
    rank = value.standin.dim()
    given = [i for i in indices if i is not None]
    rows = _broadcast([tuple(tracer.value(i).standin.shape) for i in given])
    for i in given:
        tracer.fix(tracer.value(i))
    places = [dim for dim, i in enumerate(indices) if i is not None]
    kept = [dim for dim in range(rank) if dim not in places]
    adjacent = places == list(range(places[0], places[0] + len(places)))
    front = places[0] if adjacent else 0
    sizes, origins = value.standin.shape, value.origins
    shape = [*(sizes[d] for d in kept[:front]), *rows, *(sizes[d] for d in kept[front:])]
    result_origins = (*(origins[d] for d in kept[:front]), *(None for _ in rows), *(origins[d] for d in kept[front:]))
    items = ListOf(tuple(NONE if i is None else tracer.value(i).operand for i in indices))
    return tracer.emit("aten.index.Tensor", (value.operand, items), _zeros(shape, value.standin), result_origins)


def select(tracer: Tracer, tensor: torch.Tensor, dim: int, place: Any) -> torch.Tensor:
    """aten.select.int: by a run-time number, or by a constant, which must lie within the length of now."""
    value = tracer.value(tensor)
    sizes = value.standin.shape
    dim = _dim(concrete(dim), len(sizes))
    proxy = proxy_of(place)
    size = sizes[dim]
    number = place if proxy is None else proxy._value
    if not -size <= number < size:
        raise refuse(CaptureIndexError, f"index {number} is out of range for dim {dim} with size {size}")
    operand = Literal.of(place) if proxy is None else tracer.number(proxy)
    shape = (*sizes[:dim], *sizes[dim + 1 :])
    origins = (*value.origins[:dim], *value.origins[dim + 1 :])
    return _emit(tracer, "aten.select.int", value, [dim, operand], shape, origins)


def slice_(tracer: Tracer, tensor: torch.Tensor, dim: int, start: Any, end: Any, step: Any) -> torch.Tensor:
    """aten.slice.Tensor: the sliced dim's length is compiled in."""
    value = tracer.value(tensor)
    dim = _dim(dim, value.standin.dim())
    start, end, step = (concrete(proxy_of(bound)) if proxy_of(bound) is not None else bound for bound in (start, end, step))
    result = torch.ops.aten.slice.Tensor(value.standin, dim, start, end, step)
    if result.shape == value.standin.shape and step == 1:
        origins = value.origins
    else:
        tracer.fix(value, [dim])
        origins = (*value.origins[:dim], None, *value.origins[dim + 1 :])
    size = value.standin.shape[dim]
    low = 0 if start is None else min(max(start + size if start < 0 else start, 0), size)
    high = size if end is None else min(max(end + size if end < 0 else end, low), size)
    if origins is value.origins:
        if low == 0 and high == size and (start is None or start == 0) and (end is None or end >= 1 << 62):
            return _alias(tracer, value)
        tracer.fix(value, [dim])
    return _emit(tracer, "aten.slice.Tensor", value, [dim, low, high, step], result.shape, origins)


def _alias(tracer: Tracer, value: Value) -> torch.Tensor:
    value.shared = True
    result = value.standin.view(value.standin.shape)
    tracer.define(result, value.operand, value.origins, shared=True)
    return result


def unsqueeze(tracer: Tracer, tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """aten.unsqueeze."""
    value = tracer.value(tensor)
    dim = _dim(dim, value.standin.dim() + 1)
    shape = (*value.standin.shape[:dim], 1, *value.standin.shape[dim:])
    return _emit(tracer, "aten.unsqueeze.default", value, [dim], shape, (*value.origins[:dim], None, *value.origins[dim:]))


def permute(tracer: Tracer, tensor: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """aten.permute."""
    value = tracer.value(tensor)
    rank = value.standin.dim()
    order = [_dim(dim, rank) for dim in dims]
    if sorted(order) != list(range(rank)):
        raise RuntimeError(f"permute(dims): {list(dims)} is no permutation of {rank} dims")
    shape = [value.standin.shape[d] for d in order]
    origins = tuple(value.origins[d] for d in order)
    operand = ListOf(tuple(Literal.of(d) for d in order))
    return _emit(tracer, "aten.permute.default", value, [operand], shape, origins)


def transpose(tracer: Tracer, tensor: torch.Tensor, first: int, second: int) -> torch.Tensor:
    """aten.transpose.int, as a permute."""
    rank = tracer.value(tensor).standin.dim()
    order = list(range(rank))
    if rank:
        first, second = _dim(first, rank), _dim(second, rank)
        order[first], order[second] = order[second], order[first]
    return permute(tracer, tensor, order)


def _t(tracer: Tracer, tensor: torch.Tensor) -> torch.Tensor:
    rank = tracer.value(tensor).standin.dim()
    return permute(tracer, tensor, list(range(rank))[::-1])


def unbind(tracer: Tracer, tensor: torch.Tensor, dim: int = 0) -> list[torch.Tensor]:
    """aten.unbind.int, as selects."""
    value = tracer.value(tensor)
    dim = _dim(dim, value.standin.dim())
    tracer.fix(value, [dim])
    return [select(tracer, tensor, dim, place) for place in range(value.standin.shape[dim])]


def split(tracer: Tracer, tensor: torch.Tensor, size: int, dim: int = 0) -> list[torch.Tensor]:
    """aten.split.Tensor, as slices."""
    value = tracer.value(tensor)
    dim = _dim(dim, value.standin.dim())
    length = value.standin.shape[dim]
    size = concrete(proxy_of(size)) if proxy_of(size) is not None else size
    return _split(tracer, tensor, [min(size, length - at) for at in range(0, length, size)], dim)


def _split(tracer: Tracer, tensor: torch.Tensor, sizes: list[int], dim: int = 0) -> list[torch.Tensor]:
    value = tracer.value(tensor)
    dim = _dim(dim, value.standin.dim())
    tracer.fix(value, [dim])
    if sum(sizes) != value.standin.shape[dim]:
        raise RuntimeError(f"split_with_sizes: {sizes} do not sum to {value.standin.shape[dim]}")
    at, parts = 0, []
    for size in sizes:
        parts.append(slice_(tracer, tensor, dim, at, at + size, 1))
        at += size
    return parts


def _extremum(name: str) -> Callable:
    def handler(tracer: Tracer, tensor: torch.Tensor, dim: int, keepdim: bool = False):
        value = tracer.value(tensor)
        if not value.standin.dim():
            raise refuse(UnsupportedOpError, f"a mod calls aten.{name}.dim on a scalar", f"torch.{name}imum of two tensors")
        tracer.fix(value)
        like = torch.ops.aten.amax.default(value.standin, [dim], keepdim)
        dims, keep = ListOf((Literal.of(dim),)), Literal.of(keepdim)
        best = tracer.emit(f"aten.a{name}.default", (value.operand, dims, keep), like)
        where = torch.zeros(like.shape, dtype=torch.int64, device="cpu")
        arg = tracer.emit(f"aten.arg{name}.default", (value.operand, Literal.of(dim), keep), where)
        return best, arg

    return handler


def _log_sigmoid(tracer: Tracer, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """aten.log_sigmoid_forward, whose second result serves the backward pass alone."""
    value = tracer.value(tensor)
    tracer.fix(value)
    result = tracer.emit("aten.log_sigmoid.default", (value.operand,), torch.zeros_like(value.standin))
    return result, result


HANDLERS: dict[str, Callable[..., Any]] = {
    "aten.index.Tensor": index,
    "aten.select.int": select,
    "aten.slice.Tensor": slice_,
    "aten.unsqueeze.default": unsqueeze,
    "aten.permute.default": permute,
    "aten.transpose.int": transpose,
    "aten.t.default": _t,
    "aten.numpy_T.default": _t,
    "aten.unbind.int": unbind,
    "aten.split.Tensor": split,
    "aten.split_with_sizes.default": _split,
    "aten.log_sigmoid_forward.default": _log_sigmoid,
    "aten.max.dim": _extremum("max"),
    "aten.min.dim": _extremum("min"),
}
