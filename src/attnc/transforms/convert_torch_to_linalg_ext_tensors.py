"""ATen operations that index or view tensors: each gives the recipe of one element.

Nothing here makes a tensor in memory. A row of a captured tensor, `bias[q]`, is a recipe that reads `bias[q, i]` when somebody
asks for element i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from xdsl.dialects import arith
from xdsl.dialects.builtin import IntegerType
from xdsl.ir import Attribute, SSAValue

from attnc.dialects.torch import VTensorType, ui8
from attnc.transforms.convert_torch_to_linalg_ext_region import index as index_type
from attnc.transforms.convert_torch_to_linalg_ext_table import Unsupported, whole
from attnc.transforms.convert_torch_to_linalg_ext_values import (
    NAMES,
    Dim,
    Number,
    Operand,
    Scalar,
    ScalarBuilder,
    Tensor,
    Value,
    is_float,
)

Indices = Sequence[SSAValue]


def make(
    r: ScalarBuilder, dims: Sequence[Dim], dtype: Attribute, element: Callable[[tuple[SSAValue, ...]], SSAValue]
) -> Scalar | Tensor:
    """A tensor by its recipe; one without dimensions is computed at once."""
    return Tensor(r, dims, dtype, element) if dims else Scalar(element(()), dtype)


def int_of(value: Any, what: str) -> int:
    """A whole number that must be known while compiling, as a dim is."""
    return int(number_of(value, what))


def number_of(value: Any, what: str) -> int | float:
    """A number that must be known while compiling."""
    if isinstance(value, Number) and value.constant is not None:
        return value.constant
    raise Unsupported(f"{what} must be a number that is known while compiling")


def dim_of(value: Any, rank: int) -> int:
    """A dim, counted from the front."""
    dim = int_of(value, "dim")
    return dim + rank if dim < 0 else dim


def position_of(r: ScalarBuilder, value: Operand) -> SSAValue:
    """An index as torch takes it: an `index`, raw."""
    if isinstance(value, Number):
        return r.constant(index_type, int(value.constant)) if value.constant is not None else r.index_of(r.value_of(value))
    return r.index_of(value.value)


def broadcast(r: ScalarBuilder, dims: Sequence[Dim], indices: Indices) -> list[SSAValue]:
    """The part of `indices` that an operand of `dims` sees: the last ones, 0 where it has size 1."""
    own = indices[len(indices) - len(dims) :]
    zero: SSAValue | None = None
    result = []
    for dim, position in zip(dims, own, strict=True):
        if dim == 1:
            zero = zero or r.constant(index_type, 0)
            position = zero
        result.append(position)
    return result


def size_value(r: ScalarBuilder, dim: Dim) -> SSAValue:
    """A dimension's size as an `index`."""
    if isinstance(dim, int):
        return r.constant(index_type, dim)
    if dim is None:
        raise Unsupported("a size that is only known at run time is needed here")
    return r.size(*dim)


def wrapped(r: ScalarBuilder, dim: Dim, position: SSAValue) -> SSAValue:
    """A raw index made non-negative: `i + n` where i is negative."""
    known = r.literal(position)
    if r.is_position(position) or (known is not None and known >= 0):
        return position
    negative = r.compare("lt", position, r.constant(index_type, 0))
    return r.select(negative, r.add(position, size_value(r, dim)), position)


# -- indexing ---------------------------------------------------------------------------------------------------------


def _check_index(entry: Value) -> None:
    if isinstance(entry, Scalar | Tensor) and (is_float(entry.dtype) or entry.dtype in (ui8, IntegerType(1))):
        raise Unsupported(f"indexing by a {NAMES[entry.dtype]} tensor is a data-dependent selection; use torch.where")


@whole("Indexing", "index.Tensor index.Tensor_hacked_twin _unsafe_index.Tensor", "any mix of index tensors and slices")
def index_tensor(r: ScalarBuilder, results: Sequence[VTensorType], source: Tensor, entries: list) -> Value:
    rank = len(source.dims)
    entries = [*entries, *[None] * (rank - len(entries))]
    for entry in entries:
        _check_index(entry)
    advanced = [d for d, entry in enumerate(entries) if entry is not None]
    if not advanced:
        return source
    # torch puts the index tensors' dimensions where the first one stood, in front if they are not neighbours.
    index_dims = broadcast_dims([entries[d].dims for d in advanced])
    adjacent = advanced == list(range(advanced[0], advanced[-1] + 1))
    front = advanced[0] if adjacent else 0
    sliced = [d for d in range(rank) if entries[d] is None]
    before, after = sliced[:front], sliced[front:]
    dims = [*(source.dims[d] for d in before), *index_dims, *(source.dims[d] for d in after)]

    def element(indices: tuple[SSAValue, ...]) -> SSAValue:
        chosen = indices[len(before) : len(before) + len(index_dims)]
        rest = dict(zip([*before, *after], [*indices[: len(before)], *indices[len(before) + len(index_dims) :]], strict=True))
        raw = {d: r.index_of(entries[d].at(broadcast(r, entries[d].dims, chosen))) for d in advanced}
        loose = [] if source.checks else [d for d in advanced if isinstance(source.dims[d], int)]
        for d in loose:
            # A recipe may not look at this index: it reads nothing along a dim of size 1, or along one that was expanded.
            # Then another read has to fault.
            for other in advanced:
                raw[other] = or_fault(r, source.dims[d], raw[d], raw[other])
        return source.at([rest[d] if entry is None else raw[d] for d, entry in enumerate(entries)])

    return make(r, dims, source.dtype, element)


def broadcast_dims(shapes: Sequence[Sequence[Dim]]) -> tuple[Dim, ...]:
    """The dims of what comes out where operands of these dims meet."""
    rank = max((len(shape) for shape in shapes), default=0)
    result: list[Dim] = [1] * rank
    for shape in shapes:
        for offset, dim in enumerate(shape, rank - len(shape)):
            if result[offset] == 1 or (not isinstance(result[offset], int) and isinstance(dim, int) and dim != 1):
                result[offset] = dim
    return tuple(result)


@whole("Indexing", "select.int")
def select_int(r: ScalarBuilder, results: Sequence[VTensorType], source: Tensor, dim: Number, position: Operand) -> Value:
    d = dim_of(dim, len(source.dims))
    chosen = position_of(r, position)
    dims = [*source.dims[:d], *source.dims[d + 1 :]]
    return make(r, dims, source.dtype, lambda i: source.at([*i[:d], chosen, *i[d:]]))


@whole("Indexing", "slice.Tensor")
def slice_tensor(
    r: ScalarBuilder,
    results: Sequence[VTensorType],
    source: Tensor,
    dim: Number,
    start: Number | None = None,
    end: Number | None = None,
    step: Number | None = None,
) -> Value:
    d = dim_of(dim, len(source.dims))
    size = source.dims[d]
    stride = 1 if step is None else int_of(step, "the step of a slice")
    first, last = (None if bound is None else int_of(bound, "a bound of a slice") for bound in (start, end))
    first = first or 0
    if isinstance(size, int):
        first, last, _ = slice(first, last, stride).indices(size)
        length: Dim = len(range(first, last, stride))
    elif last is None or last > 1 << 40:
        length = size if first == 0 and stride == 1 else None
    else:
        raise Unsupported("a slice with an end, of a dimension whose length is only known at run time")
    if first == 0 and stride == 1 and length == size:
        return source
    if first < 0:
        raise Unsupported("a slice from the end, of a dimension whose length is only known at run time")

    def element(indices: tuple[SSAValue, ...]) -> SSAValue:
        if not r.is_position(indices[d]) and r.literal(indices[d]) is None and not isinstance(length, int):
            raise Unsupported("an index into a slice whose length is only known at run time")
        position = wrapped(r, length, indices[d])
        moved = r.add(r.multiply(position, r.constant(index_type, stride)), r.constant(index_type, first))
        return source.at([*indices[:d], or_fault(r, length, indices[d], moved), *indices[d + 1 :]])

    return make(r, [*source.dims[:d], length, *source.dims[d + 1 :]], source.dtype, element)


def _not_negative(r: ScalarBuilder, value: SSAValue) -> SSAValue:
    """An index of an operation that does not take negative ones: these become a position that no tensor has."""
    position = r.index_of(value)
    known = r.literal(position)
    if r.is_position(position) or (known is not None and known >= 0):
        return position
    negative = r.compare("lt", position, r.constant(index_type, 0))
    return r.select(negative, r.constant(index_type, 1 << 62), position)


def or_fault(r: ScalarBuilder, dim: Dim, raw: SSAValue, moved: SSAValue) -> SSAValue:
    """`moved`, or a position that no tensor has where the raw index is out of the view's range, so that the read faults."""
    known = r.literal(raw)
    if r.is_position(raw) or (known is not None and isinstance(dim, int) and -dim <= known < dim):
        return moved
    size = size_value(r, dim)
    low = r.compare("ge", raw, r.subtract(r.constant(index_type, 0), size))
    inside = r.both(low, r.compare("lt", raw, size))
    return r.select(inside, moved, r.constant(index_type, 1 << 62))


@whole("Indexing", "index_select")
def index_select(
    r: ScalarBuilder, results: Sequence[VTensorType], source: Tensor, dim: Number, chosen: Scalar | Tensor
) -> Value:
    _check_index(chosen)
    d = dim_of(dim, len(source.dims))
    dims = [*source.dims[:d], *(chosen.dims or (1,)), *source.dims[d + 1 :]]

    def element(indices: tuple[SSAValue, ...]) -> SSAValue:
        position = chosen.at([indices[d]] if chosen.dims else [])
        return source.at([*indices[:d], _not_negative(r, position), *indices[d + 1 :]])

    return make(r, dims, source.dtype, element)


@whole("Indexing", "gather")
def gather(
    r: ScalarBuilder, results: Sequence[VTensorType], source: Tensor, dim: Number, chosen: Scalar | Tensor, *_: Value
) -> Value:
    _check_index(chosen)
    d = dim_of(dim, len(source.dims))

    def element(indices: tuple[SSAValue, ...]) -> SSAValue:
        position = _not_negative(r, chosen.at(indices))
        padded = indices or (r.constant(index_type, 0),)
        return source.at([*padded[:d], position, *padded[d + 1 :]])

    return make(r, chosen.dims, source.dtype, element)


@whole("Indexing", "take")
def take(r: ScalarBuilder, results: Sequence[VTensorType], source: Tensor, chosen: Scalar | Tensor) -> Value:
    _check_index(chosen)
    if len(source.dims) != 1:
        raise Unsupported("take from a tensor that is not 1-D")
    return make(r, chosen.dims, source.dtype, lambda i: source.at([r.index_of(chosen.at(i))]))


@whole("Indexing", "embedding")
def embedding(r: ScalarBuilder, results: Sequence[VTensorType], weight: Tensor, chosen: Scalar | Tensor, *_: Value) -> Value:
    _check_index(chosen)
    dims = [*chosen.dims, weight.dims[1]]
    return make(r, dims, weight.dtype, lambda i: weight.at([_not_negative(r, chosen.at(i[:-1])), i[-1]]))


# -- views ------------------------------------------------------------------------------------------------------------


@whole("Views", "unsqueeze")
def unsqueeze(r: ScalarBuilder, results: Sequence[VTensorType], source: Scalar | Tensor, dim: Number) -> Value:
    d = dim_of(dim, len(source.dims) + 1)
    return make(r, [*source.dims[:d], 1, *source.dims[d:]], source.dtype, lambda i: source.at([*i[:d], *i[d + 1 :]]))


@whole("Views", "squeeze squeeze.dim squeeze.dims")
def squeeze(r: ScalarBuilder, results: Sequence[VTensorType], source: Scalar | Tensor, which: Any = None) -> Value:
    rank = len(source.dims)
    chosen = [which] if isinstance(which, Number) else which
    candidates = range(rank) if chosen is None else [dim_of(entry, rank) for entry in chosen]
    dropped = {d for d in candidates if rank and source.dims[d] == 1}
    kept = [d for d in range(rank) if d not in dropped]

    def element(indices: tuple[SSAValue, ...]) -> SSAValue:
        at = dict(zip(kept, indices, strict=True))
        return source.at([at[d] if d in at else r.constant(index_type, 0) for d in range(rank)])

    return make(r, [source.dims[d] for d in kept], source.dtype, element) if dropped else source


@whole("Views", "permute numpy_T t transpose.int")
def permute(r: ScalarBuilder, results: Sequence[VTensorType], source: Scalar | Tensor, *arguments: Any) -> Value:
    rank = len(source.dims)
    if len(arguments) == 1:
        order = [dim_of(entry, rank) for entry in arguments[0]]
    elif len(arguments) == 2:
        order = list(range(rank))
        a, b = (dim_of(entry, max(rank, 1)) for entry in arguments)
        if rank:
            order[a], order[b] = order[b], order[a]
    else:
        order = list(reversed(range(rank)))

    def element(indices: tuple[SSAValue, ...]) -> SSAValue:
        at = dict(zip(order, indices, strict=True))
        return source.at([at[d] for d in range(rank)])

    return make(r, [source.dims[d] for d in order], source.dtype, element)


@whole("Views", "expand expand_as broadcast_to")
def expand(r: ScalarBuilder, results: Sequence[VTensorType], source: Scalar | Tensor, *_: Any) -> Value:
    shape = results[0].shape
    own = [1] * (len(shape) - len(source.dims)) + list(source.dims)
    dims = [had if size < 0 or had == size else size for had, size in zip(own, shape, strict=True)]
    return make(r, dims, source.dtype, lambda i: source.at(broadcast(r, source.dims, i)))


@whole("Views", "view reshape _unsafe_view flatten.using_ints unflatten.int view_as _reshape_alias", "of small tensors")
def view(r: ScalarBuilder, results: Sequence[VTensorType], source: Scalar | Tensor, *_: Any) -> Value:
    return reshaped(r, source, results[0].shape)


def reshaped(r: ScalarBuilder, source: Scalar | Tensor, shape: Sequence[int]) -> Scalar | Tensor:
    """`source` with another shape, of which one size may be -1."""
    old = [d for d in range(len(source.dims)) if source.dims[d] != 1]
    new = [d for d in range(len(shape)) if shape[d] != 1]
    known = [size for size in source.dims if isinstance(size, int)]
    if len(old) == len(new) and all(
        shape[b] in (source.dims[a], -1) or not isinstance(source.dims[a], int) for a, b in zip(old, new)
    ):
        # Only dims of size 1 come and go.
        to_old = dict(zip(old, new, strict=True))
        dims: list[Dim] = [1] * len(shape)
        for a, b in to_old.items():
            dims[b] = source.dims[a]

        def same(indices: tuple[SSAValue, ...]) -> SSAValue:
            return source.at(
                [indices[to_old[d]] if d in to_old else r.constant(index_type, 0) for d in range(len(source.dims))]
            )

        return make(r, dims, source.dtype, same)
    if len(known) != len(source.dims):
        raise Unsupported("a view of a tensor with a size that is only known at run time")
    sizes = list(shape)
    if -1 in sizes:
        sizes[sizes.index(-1)] = math.prod(known) // -math.prod(sizes) if math.prod(sizes) else 0

    def element(indices: tuple[SSAValue, ...]) -> SSAValue:
        linear = r.constant(index_type, 0)
        for size, position in zip(sizes, indices, strict=True):
            linear = r.add(r.multiply(linear, r.constant(index_type, size)), wrapped(r, size, position))
        r.positions.add(linear)
        return source.at(unravelled(r, known, linear))

    return make(r, sizes, source.dtype, element)


def unravelled(r: ScalarBuilder, sizes: Sequence[int], linear: SSAValue) -> list[SSAValue]:
    """The indices into a tensor of `sizes` whose row-major position is `linear`."""
    result: list[SSAValue] = []
    for size in reversed(sizes[1:]):
        divisor = r.constant(index_type, size)
        known = r.literal(linear)
        if known is not None and size:
            rest, linear = r.constant(index_type, known % size), r.constant(index_type, known // size)
        else:
            rest, linear = r.integer(arith.RemUIOp, linear, divisor), r.integer(arith.DivUIOp, linear, divisor)
        r.positions.update((rest, linear))
        result.append(rest)
    return [linear, *reversed(result)] if sizes else []
