"""ATen operations that take tensors apart and put them together: slices, splits, concatenation, padding.

%4 = torch.aten.slice.Tensor %3, 3, 0, 32, 1        =>  tensor.extract_slice %3[0, 0, 0, 0] [2, 8, %s, 32] [1, 1, 1, 1]
%5 = torch.aten.cat [%4, %4], 3                     =>  tensor.insert_slice into tensor.empty
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xdsl.dialects import arith, tensor
from xdsl.dialects.builtin import DYNAMIC_INDEX, DenseArrayBase
from xdsl.ir import Operation, SSAValue

from attnc.dialects.torch import VTensorType, si64
from attnc.transforms.convert_torch_to_linalg_elementwise import converted
from attnc.transforms.convert_torch_to_linalg_ext_region import i64
from attnc.transforms.convert_torch_to_linalg_ext_region import index as index_type
from attnc.transforms.convert_torch_to_linalg_ext_table import Unsupported
from attnc.transforms.convert_torch_to_linalg_ext_tensors import dim_of, int_of
from attnc.transforms.convert_torch_to_linalg_ext_values import CARRIED, Number
from attnc.transforms.convert_torch_to_linalg_graph import ONE, Array, Graph, Size
from attnc.transforms.convert_torch_to_linalg_layout import squeeze, unsqueeze

_END = 1 << 62  # torch's "to the end" of a slice, and anything near it
Types = Sequence[VTensorType]

# -- slices -----------------------------------------------------------------------------------------------------------


def sliced(graph: Graph, x: Array, dim: int, start: Size, length: Size, step: int = 1) -> Array:
    """Elements start, start + step, … along a dim, `length` of them, which are there."""
    dims = [*x.dims[:dim], length, *x.dims[dim + 1 :]]
    if dims[dim] == x.dims[dim] and step == 1:
        return x
    if x.constant is not None:
        return graph.full(x.dtype, dims, x.constant)
    zero = Size(0)
    offsets = [start if d == dim else zero for d in range(x.rank)]
    op = tensor.ExtractSliceOp(
        x.value,
        [_static_or_index(graph, size) for size in offsets],
        [_static_or_index(graph, size) for size in dims],
        [step if d == dim else 1 for d in range(x.rank)],
        graph.type_of(CARRIED[x.dtype], dims),
    )
    return graph.array(graph.add(op), x.dtype, dims)


def _static_or_index(graph: Graph, size: Size) -> SSAValue | int:
    return graph.index(size) if size.static is None else size.static


def slice_tensor(
    graph: Graph, types: Types, x: Array, dim: Any = None, start: Any = None, end: Any = None, step: Any = None
) -> Array:
    d = 0 if dim is None else dim_of(dim, x.rank)
    stride = 1 if step is None else int_of(step, "the step of a slice")
    size = x.dims[d]
    bounds = [_bound(graph, start, Size(0)), _bound(graph, end, size)]
    known = [bound.static for bound in bounds]
    if size.static is not None and None not in known:
        first, last, _ = slice(known[0], known[1], stride).indices(size.static)
        return sliced(graph, x, d, Size(first), Size(len(range(first, last, stride))), stride)
    declared = types[0].shape[d]
    if bounds[0] == Size(0) and declared >= 0 and stride == 1:  # torch.export has proven that so many are there
        return sliced(graph, x, d, Size(0), Size(declared))
    first, last = (bound if bound == size else _clamped(graph, bound, size) for bound in bounds)
    length = Size(declared) if declared >= 0 else _distance(graph, first, last, stride)
    return sliced(graph, x, d, first, length, stride)


def _bound(graph: Graph, bound: Any, default: Size) -> Size:
    if bound is None:
        return default
    size = graph.size_of(bound, "a bound of a slice")
    return default if size.static is not None and size.static >= _END else size


def _clamped(graph: Graph, bound: Size, size: Size) -> Size:
    """A bound as a position between 0 and `size`."""
    if bound == Size(0):
        return bound
    r, n = graph.r, graph.index(size)
    value = r.constant(index_type, bound.static) if bound.static is not None else graph.index(bound)
    zero = r.constant(index_type, 0)
    if bound.static is None:
        value = r.select(r.compare("lt", value, zero), r.add(value, n), value)
    elif bound.static < 0:
        value = r.add(value, n)
    if bound.static is None or bound.static < 0:
        value = r.integer(arith.MaxSIOp, value, zero)
    if bound.static is None or bound.static > 0:
        value = r.integer(arith.MinSIOp, value, n)
    return graph.atom(value)


def _distance(graph: Graph, first: Size, last: Size, stride: int) -> Size:
    if first == Size(0) and stride == 1:
        return last
    r = graph.r
    length = r.subtract(graph.index(last), graph.index(first))
    if stride != 1:
        length = r.integer(arith.DivUIOp, r.add(length, r.constant(index_type, stride - 1)), r.constant(index_type, stride))
    return graph.atom(r.integer(arith.MaxSIOp, length, r.constant(index_type, 0)))


def select(graph: Graph, types: Types, x: Array, dim: Any, position: Any) -> Array:
    d = dim_of(dim, x.rank)
    place = graph.size_of(position, "an index")
    if place.static is None:
        n = graph.index(x.dims[d])
        value = graph.index(place)
        negative = graph.r.compare("lt", value, graph.r.constant(index_type, 0))
        place = graph.atom(graph.r.select(negative, graph.r.add(value, n), value))
    elif place.static < 0:
        place = graph.sum([x.dims[d], place]) if x.dims[d].static is not None else graph.atom(
            graph.r.add(graph.index(x.dims[d]), graph.r.constant(index_type, place.static))
        )  # fmt: skip
    row = sliced(graph, x, d, place, ONE)
    return squeeze(graph, types, row, Number(si64, d))


def narrow(graph: Graph, types: Types, x: Array, dim: Any, start: Any, length: Any) -> Array:
    d = dim_of(dim, x.rank)
    first = graph.size_of(start)
    if first.static is not None and first.static < 0:
        first = graph.sum([x.dims[d], first])
    return sliced(graph, x, d, first, graph.size_of(length))


def split_with_sizes(graph: Graph, types: Types, x: Array, sizes: Any, dim: Any = None) -> list[Array]:
    d = 0 if dim is None else dim_of(dim, x.rank)
    start, parts = Size(0), []
    for length in (graph.size_of(size) for size in sizes):
        parts.append(sliced(graph, x, d, start, length))
        start = length if start == Size(0) else graph.sum([start, length])
    return parts


def split(graph: Graph, types: Types, x: Array, size: Any, dim: Any = None) -> list[Array]:
    if isinstance(size, list):
        return split_with_sizes(graph, types, x, size, dim)
    d = 0 if dim is None else dim_of(dim, x.rank)
    whole = x.dims[d].static
    if whole is None:
        raise Unsupported("a split along a dimension whose length is only known at run time")
    step = max(int_of(size, "the length of a part"), 1)
    return [sliced(graph, x, d, Size(k), Size(min(step, whole - k))) for k in range(0, max(whole, 1), step)]


def chunk(graph: Graph, types: Types, x: Array, count: Any, dim: Any = None) -> list[Array]:
    d = 0 if dim is None else dim_of(dim, x.rank)
    whole, parts = x.dims[d], int_of(count, "the number of parts")
    if whole.static is None:
        part = whole.divided(Size(parts))
        if part is None:
            raise Unsupported("a split along a dimension whose length is only known at run time")
        return split_with_sizes(graph, types, x, [graph.number_of(part)] * parts, dim)
    return split(graph, types, x, Number(si64, -(-whole.static // parts)), dim)


def unbind(graph: Graph, types: Types, x: Array, dim: Any = None) -> list[Array]:
    d = 0 if dim is None else dim_of(dim, x.rank)
    count = x.dims[d].static
    if count is None:
        raise Unsupported("unbind along a dimension whose length is only known at run time")
    return [squeeze(graph, types, sliced(graph, x, d, Size(k), ONE), Number(si64, d)) for k in range(count)]


# -- joins ------------------------------------------------------------------------------------------------------------


def cat(graph: Graph, types: Types, parts: Any, dim: Any = None) -> Array:
    dtype, rank = types[0].dtype, len(types[0].shape)
    d = 0 if dim is None else dim_of(dim, rank)
    arrays = [converted(graph, part, dtype) for part in parts if part.rank == rank]
    if len(arrays) == 1:
        return arrays[0]
    total = graph.sum([x.dims[d] for x in arrays])
    dims = [*arrays[0].dims[:d], total, *arrays[0].dims[d + 1 :]]
    result = graph.empty(dims, CARRIED[dtype])
    start = Size(0)
    for x in arrays:
        offsets = [_static_or_index(graph, start) if k == d else 0 for k in range(rank)]
        result = graph.add(_insert(graph, x, result, offsets))
        start = x.dims[d] if start == Size(0) else graph.sum([start, x.dims[d]])
    return graph.array(result, dtype, dims)


def _insert(graph: Graph, x: Array, into: SSAValue, offsets: Sequence[SSAValue | int]) -> Operation:
    def parts(values: Sequence[SSAValue | int]) -> tuple[list[int], list[SSAValue]]:
        static = [DYNAMIC_INDEX if isinstance(value, SSAValue) else value for value in values]
        return static, [value for value in values if isinstance(value, SSAValue)]

    static_offsets, dynamic_offsets = parts(offsets)
    static_sizes, dynamic_sizes = parts([_static_or_index(graph, size) for size in x.dims])
    return tensor.InsertSliceOp.build(
        operands=[x.value, into, dynamic_offsets, dynamic_sizes, []],
        properties={
            "static_offsets": DenseArrayBase.from_list(i64, static_offsets),
            "static_sizes": DenseArrayBase.from_list(i64, static_sizes),
            "static_strides": DenseArrayBase.from_list(i64, [1] * x.rank),
        },
        result_types=[into.type],
    )


def stack(graph: Graph, types: Types, parts: Any, dim: Any = None) -> Array:
    d = 0 if dim is None else dim_of(dim, len(types[0].shape))
    return cat(graph, types, [unsqueeze(graph, types, part, Number(si64, d)) for part in parts], Number(si64, d))


def pad(graph: Graph, types: Types, x: Array, sizes: Any, *rest: Any) -> Array:
    """constant_pad_nd(x, sizes, value), pad(x, sizes, mode, value): sizes before and after, from the last dim on"""
    mode, value = (rest[0], rest[1:]) if rest and isinstance(rest[0], str) else ("constant", rest)
    if mode != "constant":
        raise Unsupported(f"padding by {mode}")
    counts = [graph.size_of(size) for size in sizes]
    before = [Size(0)] * x.rank
    dims = list(x.dims)
    for place, d in enumerate(range(x.rank - 1, x.rank - 1 - len(counts) // 2, -1)):
        low, high = counts[2 * place], counts[2 * place + 1]
        if any(count.static is not None and count.static < 0 for count in (low, high)):
            raise Unsupported("negative padding")
        before[d] = low
        dims[d] = graph.sum([size for size in (low, x.dims[d], high) if size != Size(0)] or [Size(0)])
    fill = value[0] if value and value[0] is not None else Number(si64, 0)
    element = graph.r.convert(fill, x.dtype)
    result = graph.filled(dims, CARRIED[x.dtype], element)
    offsets = [_static_or_index(graph, size) for size in before]
    return graph.array(graph.add(_insert(graph, x, result, offsets)), x.dtype, dims)


_NAMES: dict[Callable[..., Any], str] = {
    slice_tensor: "slice.Tensor",
    select: "select.int",
    narrow: "narrow",
    split_with_sizes: "split_with_sizes split.sizes",
    split: "split.Tensor",
    chunk: "chunk",
    unbind: "unbind.int",
    cat: "cat concat concatenate",
    stack: "stack",
    pad: "constant_pad_nd pad",
}
SLICES: dict[str, Callable[..., Any]] = {name: build for build, names in _NAMES.items() for name in names.split()}
