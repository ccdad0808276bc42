"""ATen operations that move a tensor's elements within it, or take a line of them: each gives the recipe of one element."""

from __future__ import annotations

import math
from collections.abc import Sequence

from xdsl.dialects import arith
from xdsl.ir import SSAValue

from attnc.dialects.torch import VTensorType
from attnc.transforms.convert_torch_to_linalg_ext_region import index as index_type
from attnc.transforms.convert_torch_to_linalg_ext_table import Unsupported, whole
from attnc.transforms.convert_torch_to_linalg_ext_tensors import (
    dim_of,
    int_of,
    make,
    or_fault,
    size_value,
    unravelled,
    wrapped,
)
from attnc.transforms.convert_torch_to_linalg_ext_values import Number, Scalar, ScalarBuilder, Tensor, Value


@whole("Views", "flip")
def flip(r: ScalarBuilder, results: Sequence[VTensorType], source: Scalar | Tensor, which: list) -> Value:
    dims = {dim_of(entry, len(source.dims)) for entry in which}

    def element(indices: tuple[SSAValue, ...]) -> SSAValue:
        one = r.constant(index_type, 1)
        turned = list(indices)
        for d in dims:
            size = source.dims[d]
            last = r.subtract(size_value(r, size), one)
            turned[d] = or_fault(r, size, indices[d], r.subtract(last, wrapped(r, size, indices[d])))
        return source.at(turned)

    return make(r, source.dims, source.dtype, element)


@whole("Views", "roll", "of known lengths")
def roll(
    r: ScalarBuilder, results: Sequence[VTensorType], source: Scalar | Tensor, shifts: list, which: list | None = None
) -> Value:
    if not which:
        return _rolled_flat(r, source, int_of(shifts[0], "a shift"))
    moved = {dim_of(dim, len(source.dims)): int_of(shift, "a shift") for dim, shift in zip(which, shifts, strict=True)}

    def element(indices: tuple[SSAValue, ...]) -> SSAValue:
        result = list(indices)
        for d, shift in moved.items():
            size = source.dims[d]
            if not isinstance(size, int) or not size:
                raise Unsupported("a roll along a dimension whose length is only known at run time")
            start = r.constant(index_type, -shift % size)
            turned = r.integer(arith.RemUIOp, r.add(wrapped(r, size, indices[d]), start), r.constant(index_type, size))
            result[d] = or_fault(r, size, indices[d], turned)
        return source.at(result)

    return make(r, source.dims, source.dtype, element)


def _rolled_flat(r: ScalarBuilder, source: Scalar | Tensor, shift: int) -> Value:
    """Without dims, the elements in row-major order are rolled."""
    sizes = [size for size in source.dims if isinstance(size, int)]
    total = math.prod(sizes)
    if len(sizes) != len(source.dims):
        raise Unsupported("a roll of a flattened tensor with a size that is only known at run time")
    if not sizes or not total:
        return source

    def element(indices: tuple[SSAValue, ...]) -> SSAValue:
        linear = r.constant(index_type, 0)
        for size, position in zip(sizes, indices, strict=True):
            linear = r.add(r.multiply(linear, r.constant(index_type, size)), wrapped(r, size, position))
        start = r.constant(index_type, -shift % total)
        linear = r.integer(arith.RemUIOp, r.add(linear, start), r.constant(index_type, total))
        r.positions.add(linear)
        moved = unravelled(r, sizes, linear)
        for size, position in zip(sizes, indices, strict=True):
            moved[0] = or_fault(r, size, position, moved[0])
        return source.at(moved)

    return make(r, sizes, source.dtype, element)


@whole("Views", "diagonal", "of known lengths")
def diagonal(
    r: ScalarBuilder,
    results: Sequence[VTensorType],
    source: Tensor,
    offset: Number | None = None,
    first: Number | None = None,
    second: Number | None = None,
) -> Value:
    rank = len(source.dims)
    row = 0 if first is None else dim_of(first, rank)
    column = 1 if second is None else dim_of(second, rank)
    above = 0 if offset is None else int_of(offset, "the diagonal")
    rows, columns = source.dims[row], source.dims[column]
    if not isinstance(rows, int) or not isinstance(columns, int):
        raise Unsupported("a diagonal along a dimension whose length is only known at run time")
    length = max(min(rows + min(above, 0), columns - max(above, 0)), 0)
    others = [d for d in range(rank) if d not in (row, column)]

    def element(indices: tuple[SSAValue, ...]) -> SSAValue:
        places = dict(zip(others, indices[:-1], strict=True))
        along = wrapped(r, length, indices[-1])
        for d, start in ((row, max(-above, 0)), (column, max(above, 0))):
            moved = r.add(along, r.constant(index_type, start))
            if r.is_position(along):
                r.positions.add(moved)
            places[d] = or_fault(r, length, indices[-1], moved)
        return source.at([places[d] for d in range(rank)])

    return make(r, [*(source.dims[d] for d in others), length], source.dtype, element)
