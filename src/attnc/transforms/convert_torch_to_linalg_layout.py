"""ATen operations that rearrange a tensor: views, permutations, repetitions.

%1 = torch.aten.view %0, [2, s, 8, 64] : [2,?,512] -> [2,?,8,64]      =>  tensor.expand_shape [[0], [1], [2, 3]]
%2 = torch.aten.transpose.int %1, 1, 2                                =>  linalg.transpose permutation = [0, 2, 1, 3]
%3 = torch.aten.expand %2, [2, 8, s, 64]                              =>  linalg.generic that reads (d0, 0, d2, d3)
%4 = torch.aten.slice.Tensor %3, 3, 0, 32, 1                          =>  tensor.extract_slice
%5 = torch.aten.cat [%4, %4], 3                                       =>  tensor.insert_slice into tensor.empty
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xdsl.dialects import arith, linalg
from xdsl.dialects.builtin import DenseArrayBase

from attnc.dialects.torch import VTensorType, si64
from attnc.transforms.convert_torch_to_linalg_elementwise import broadcast_to, converted
from attnc.transforms.convert_torch_to_linalg_ext_region import i64
from attnc.transforms.convert_torch_to_linalg_ext_table import Unsupported
from attnc.transforms.convert_torch_to_linalg_ext_tensors import dim_of
from attnc.transforms.convert_torch_to_linalg_ext_values import CARRIED, Number
from attnc.transforms.convert_torch_to_linalg_graph import ONE, Array, Graph, Size, product

_END = 1 << 62  # torch's "to the end" of a slice, and anything near it
Types = Sequence[VTensorType]

# -- views ------------------------------------------------------------------------------------------------------------


def reshaped(graph: Graph, x: Array, dims: Sequence[Size]) -> Array:
    """`x` with the sizes `dims`, whose product is that of its own."""
    dims = tuple(dims)
    if dims == x.dims:
        return x
    before, after = product(x.dims).static, product(dims).static
    if before is not None and after is not None and before != after:
        raise Unsupported(f"a view of {before} elements as {after}")
    if x.constant is not None:
        return graph.full(x.dtype, dims, x.constant)
    groups = _groups(x.dims, dims)
    if not x.dims:  # xDSL knows no expand_shape of a 0-d tensor
        return broadcast_to(graph, x, dims)
    if not dims:
        return graph.collapse(x, [])
    if groups is None:  # nothing is known to fit but the whole
        groups = [(list(range(x.rank)), list(range(len(dims))))]
    if any(len(old) > 1 for old, _ in groups):
        x = graph.collapse(x, [old for old, _ in groups])
    if any(len(new) > 1 for _, new in groups):
        x = graph.expand(x, [new for _, new in groups], dims)
    return x


def _groups(old: Sequence[Size], new: Sequence[Size]) -> list[tuple[list[int], list[int]]] | None:
    """Neighbouring dims of both sides with the same product, as few a group as can be; None where no such split is known."""
    wide_old = [d for d, size in enumerate(old) if size != ONE]
    wide_new = [d for d, size in enumerate(new) if size != ONE]
    groups: list[tuple[list[int], list[int]]] = []
    while wide_old or wide_new:
        sizes = [
            (a, total - a) for total in range(2, len(wide_old) + len(wide_new) + 1) for a in range(1, total)
            if a <= len(wide_old) and total - a <= len(wide_new)
        ]  # fmt: skip
        for a, b in sizes:
            if product([old[d] for d in wide_old[:a]]) == product([new[d] for d in wide_new[:b]]):
                break
        else:
            return None
        groups.append((wide_old[:a], wide_new[:b]))
        wide_old, wide_new = wide_old[a:], wide_new[b:]
    if not groups:
        return [(list(range(len(old))), list(range(len(new))))]
    return _with_units(groups, len(old), len(new))


def _with_units(groups: list[tuple[list[int], list[int]]], old: int, new: int) -> list[tuple[list[int], list[int]]]:
    """The groups with the dims of size 1 as well: in pairs where both sides have one, else beside a neighbour."""
    result: list[tuple[list[int], list[int]]] = []
    next_old = next_new = 0
    for position, (a, b) in enumerate([*groups, ([old], [new])]):
        units_old, units_new = list(range(next_old, a[0])), list(range(next_new, b[0]))
        while units_old and units_new:
            result.append(([units_old.pop(0)], [units_new.pop(0)]))
        next_old, next_new = a[-1] + 1, b[-1] + 1
        a, b = list(range(a[0], a[-1] + 1)), list(range(b[0], b[-1] + 1))
        if position == len(groups):
            result[-1] = (result[-1][0] + units_old, result[-1][1] + units_new)
        else:
            result.append((units_old + a, units_new + b))
    return result


def view(graph: Graph, types: Types, x: Array, sizes: Any, *rest: Any) -> Array:
    """view, reshape, …: sizes may hold one -1."""
    return reshaped(graph, x, inferred(graph, x, [graph.size_of(size) for size in sizes]))


def inferred(graph: Graph, x: Array, dims: list[Size]) -> list[Size]:
    """The sizes with -1 replaced by what is left."""
    unknown = Size(-1)
    if unknown not in dims:
        return dims
    place = dims.index(unknown)
    whole, known = product(x.dims), product([*dims[:place], *dims[place + 1 :]])
    left = whole.divided(known)
    if left is None:
        left = graph.atom(graph.r.integer(arith.DivUIOp, graph.index(whole), graph.index(known)))
    return [*dims[:place], left, *dims[place + 1 :]]


def view_as(graph: Graph, types: Types, x: Array, other: Array) -> Array:
    return reshaped(graph, x, other.dims)


def flatten(graph: Graph, types: Types, x: Array, start: Any = None, end: Any = None) -> Array:
    first, last = (dim_of(d, max(x.rank, 1)) if d is not None else default for d, default in ((start, 0), (end, x.rank - 1)))
    if not x.rank:
        return reshaped(graph, x, [ONE])
    return reshaped(graph, x, [*x.dims[:first], product(x.dims[first : last + 1]), *x.dims[last + 1 :]])


def unflatten(graph: Graph, types: Types, x: Array, dim: Any, sizes: Any, *rest: Any) -> Array:
    d = dim_of(dim, x.rank)
    part = Array(x.value, x.dtype, (x.dims[d],))
    return reshaped(graph, x, [*x.dims[:d], *inferred(graph, part, [graph.size_of(s) for s in sizes]), *x.dims[d + 1 :]])


def unsqueeze(graph: Graph, types: Types, x: Array, dim: Any) -> Array:
    d = dim_of(dim, x.rank + 1)
    return reshaped_exactly(graph, x, [*x.dims[:d], ONE, *x.dims[d:]], d)


def reshaped_exactly(graph: Graph, x: Array, dims: Sequence[Size], new: int) -> Array:
    """`x` with one more dim, number `new`, of size 1: beside the dim before it, whatever sizes are about."""
    if x.constant is not None or not x.rank:
        return reshaped(graph, x, dims)
    old = max(new - 1, 0)
    groups = [[d if d <= old else d + 1] for d in range(x.rank)]
    groups[old] = [old, old + 1]
    return graph.expand(x, groups, dims)


def squeeze(graph: Graph, types: Types, x: Array, which: Any = None) -> Array:
    chosen = [which] if isinstance(which, Number) else which
    dims = range(x.rank) if chosen is None else [dim_of(d, max(x.rank, 1)) for d in chosen]
    gone = {d for d in dims if x.rank and x.dims[d] == ONE}
    kept = [d for d in range(x.rank) if d not in gone]
    if not gone:
        return x
    if not kept or x.constant is not None:
        return reshaped(graph, x, [x.dims[d] for d in kept])
    groups: list[list[int]] = []
    for position, d in enumerate(kept):
        end = kept[position + 1] if position + 1 < len(kept) else x.rank
        groups.append(list(range(0 if position == 0 else d, end)))
    return graph.collapse(x, groups)


def permuted(graph: Graph, x: Array, order: Sequence[int]) -> Array:
    """Dim i of the result is dim `order[i]` of `x`."""
    if list(order) == list(range(x.rank)):
        return x
    dims = [x.dims[d] for d in order]
    if x.constant is not None:
        return graph.full(x.dtype, dims, x.constant)
    init = graph.empty(dims, CARRIED[x.dtype])
    op = linalg.TransposeOp(x.value, init, DenseArrayBase.from_list(i64, list(order)))
    return graph.array(graph.add(op), x.dtype, dims)


def permute(graph: Graph, types: Types, x: Array, *arguments: Any) -> Array:
    """permute, transpose.int, t, numpy_T, mT"""
    order = list(range(x.rank))
    if len(arguments) == 1:
        order = [dim_of(d, x.rank) for d in arguments[0]]
    elif len(arguments) == 2 and x.rank:
        a, b = (dim_of(d, x.rank) for d in arguments)
        order[a], order[b] = order[b], order[a]
    elif not arguments:
        order.reverse()
    return permuted(graph, x, order)


def matrix_transpose(graph: Graph, types: Types, x: Array) -> Array:
    return permuted(graph, x, [*range(x.rank - 2), x.rank - 1, x.rank - 2])


def movedim(graph: Graph, types: Types, x: Array, source: Any, destination: Any) -> Array:
    moved = [dim_of(d, x.rank) for d in (source if isinstance(source, list) else [source])]
    places = [dim_of(d, x.rank) for d in (destination if isinstance(destination, list) else [destination])]
    at = dict(zip(places, moved, strict=True))
    rest = iter(d for d in range(x.rank) if d not in moved)
    return permuted(graph, x, [at[d] if d in at else next(rest) for d in range(x.rank)])


# -- repetition -------------------------------------------------------------------------------------------------------


def expand(graph: Graph, types: Types, x: Array, sizes: Any, *rest: Any) -> Array:
    wanted = list(sizes.dims) if isinstance(sizes, Array) else [graph.size_of(size) for size in sizes]
    first = len(wanted) - x.rank
    dims = [x.dims[d - first] if d >= first and (size == Size(-1) or x.dims[d - first] != ONE) else size
            for d, size in enumerate(wanted)]  # fmt: skip
    if tuple(dims) == x.dims:
        return x
    own = (ONE,) * first + x.dims
    return reshaped(graph, x, dims) if tuple(dims) == own else broadcast_to(graph, x, dims)


def repeat(graph: Graph, types: Types, x: Array, times: Any) -> Array:
    counts = [graph.size_of(count) for count in times]
    own = [ONE] * (len(counts) - x.rank) + list(x.dims)
    apart = [size for pair in zip([ONE] * len(own), own, strict=True) for size in pair]
    wide = [size for pair in zip(counts, own, strict=True) for size in pair]
    if all(count == ONE for count in counts):
        return reshaped(graph, x, own)
    spread = broadcast_to(graph, _split(graph, reshaped(graph, x, own), apart), wide)
    return _merged_pairs(graph, spread)


def _split(graph: Graph, x: Array, apart: Sequence[Size]) -> Array:
    if x.constant is not None or not x.rank:
        return reshaped(graph, x, apart)
    return graph.expand(x, [[2 * d, 2 * d + 1] for d in range(x.rank)], apart)


def _merged_pairs(graph: Graph, x: Array) -> Array:
    dims = [x.dims[d] * x.dims[d + 1] for d in range(0, x.rank, 2)]
    if x.constant is not None:
        return graph.full(x.dtype, dims, x.constant)
    return graph.collapse(x, [[d, d + 1] for d in range(0, x.rank, 2)])


def repeat_interleave(graph: Graph, types: Types, x: Array, times: Any, dim: Any = None, *rest: Any) -> Array:
    if dim is None:
        x = flatten(graph, types, x)
    d = 0 if dim is None else dim_of(dim, x.rank)
    count = graph.size_of(times)
    apart = unsqueeze(graph, types, x, Number(si64, d + 1))
    wide = broadcast_to(graph, apart, [*x.dims[: d + 1], count, *x.dims[d + 1 :]])
    if wide.constant is not None:
        return graph.full(x.dtype, [*x.dims[:d], x.dims[d] * count, *x.dims[d + 1 :]], wide.constant)
    return graph.collapse(wide, [[k] for k in range(d)] + [[d, d + 1]] + [[k + 1] for k in range(d + 1, x.rank)])


def same(graph: Graph, types: Types, x: Array, *rest: Any) -> Array:
    """clone, contiguous, detach, …: tensors are values here."""
    return converted(graph, x, types[0].dtype)


_NAMES: dict[Callable[..., Any], str] = {
    view: "view reshape _unsafe_view _reshape_alias",
    view_as: "view_as reshape_as",
    flatten: "flatten.using_ints",
    unflatten: "unflatten.int",
    unsqueeze: "unsqueeze",
    squeeze: "squeeze squeeze.dim squeeze.dims",
    permute: "permute transpose.int t numpy_T swapaxes swapdims",
    matrix_transpose: "mT matrix_H",
    movedim: "movedim.int movedim.intlist moveaxis.int moveaxis.intlist",
    expand: "expand expand_as broadcast_to",
    repeat: "repeat tile",
    repeat_interleave: "repeat_interleave.self_int",
    same: "clone contiguous alias detach lift lift_fresh lift_fresh_copy positive to.device _to_copy.same",
}
LAYOUT: dict[str, Callable[..., Any]] = {name: build for build, names in _NAMES.items() for name in names.split()}
