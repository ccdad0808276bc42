"""ATen operations that reduce a row: a short one is written out, a longer one becomes an `scf.for` that carries a scalar.

    %dot = scf.for %i = %c0 to %c64 step %c1 iter_args(%sum = %zero) -> (f32) {
      %a = tensor.extract %left[%q, %i]
      %b = tensor.extract %right[%k, %i]
      %ab = arith.mulf %a, %b
      %next = arith.addf %sum, %ab
      scf.yield %next
    }

Lengths must be known while compiling. Sums of half types are carried in f32, sums of ints in the result's int64, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from xdsl.ir import Attribute, SSAValue

from attnc.dialects.torch import VTensorType, si64
from attnc.transforms.convert_torch_to_linalg_ext_arithmetic import larger, smaller
from attnc.transforms.convert_torch_to_linalg_ext_region import i1
from attnc.transforms.convert_torch_to_linalg_ext_region import index as index_type
from attnc.transforms.convert_torch_to_linalg_ext_table import Unsupported, whole
from attnc.transforms.convert_torch_to_linalg_ext_tensors import broadcast, dim_of, make
from attnc.transforms.convert_torch_to_linalg_ext_values import (
    Number,
    Scalar,
    ScalarBuilder,
    Tensor,
    Value,
    is_float,
    signed,
    width,
)

# Rows up to this length are written out.
_WRITTEN_OUT = 4

Array: TypeAlias = Scalar | Tensor
# What an element becomes before it is combined; how two are combined.
_Element: TypeAlias = Callable[[SSAValue], SSAValue]
_Combine: TypeAlias = Callable[[SSAValue, SSAValue], SSAValue]
Row: TypeAlias = Callable[[list[SSAValue]], SSAValue]


def fold(
    r: ScalarBuilder,
    lengths: Sequence[int],
    init: SSAValue,
    element: Callable[[list[SSAValue]], SSAValue],
    combine: _Combine,
) -> SSAValue:
    """`combine` over all index tuples below `lengths`, from `init`, in order."""
    if not lengths:
        return combine(init, element([]))
    length, *inner = lengths
    if length <= _WRITTEN_OUT:
        total = init
        for number in range(length):
            first = r.constant(index_type, number)
            total = fold(r, inner, total, lambda rest, first=first: element([first, *rest]), combine)
        return total
    with r.loop(length, [init]) as loop:
        r.positions.add(loop.position)
        loop.finish([fold(r, inner, loop.carried[0], lambda rest: element([loop.position, *rest]), combine)])
    return loop.results[0]


def reduce(
    r: ScalarBuilder,
    source: Array,
    dims: Any,
    keepdim: Any,
    dtype: Attribute,
    init: SSAValue,
    prepare: _Element,
    combine: _Combine,
    after: _Element = lambda value: value,
) -> Value:
    """The reduction of `source` over `dims` (all, if None or empty); `after` is applied to each result."""

    def row(read: Row, lengths: Sequence[int]) -> SSAValue:
        return after(fold(r, lengths, init, lambda inner: prepare(read(inner)), combine))

    return reduce_rows(r, source, dims, keepdim, dtype, row)


def reduce_rows(
    r: ScalarBuilder,
    source: Array,
    dims: Any,
    keepdim: Any,
    dtype: Attribute,
    row: Callable[[Row, Sequence[int]], SSAValue],
) -> Value:
    """`row(read, lengths)` of each row of `source` along `dims`; `read` gives its element at indices below `lengths`."""
    rank = len(source.dims)
    if isinstance(dims, Number):
        dims = [dims]
    reduced = sorted({dim_of(dim, rank) for dim in dims}) if dims and rank else list(range(rank))
    kept = [d for d in range(rank) if d not in reduced]
    lengths = static_lengths(source, reduced)
    keep = isinstance(keepdim, Number) and bool(keepdim.constant)
    result_dims = [1 if d in reduced else source.dims[d] for d in range(rank)] if keep else [source.dims[d] for d in kept]

    def element(indices: tuple[SSAValue, ...]) -> SSAValue:
        outer = dict(zip(range(rank) if keep else kept, indices, strict=True))

        def read(inner: list[SSAValue]) -> SSAValue:
            position = {**outer, **dict(zip(reduced, inner, strict=True))}
            return source.at([position[d] for d in range(rank)])

        return row(read, lengths)

    return make(r, result_dims, dtype, element)


def static_lengths(source: Array, dims: Sequence[int]) -> list[int]:
    """The sizes of dims that are to be reduced."""
    lengths = []
    for d in dims:
        size = source.dims[d]
        if not isinstance(size, int):
            raise Unsupported("a reduction over a dimension whose length is only known at run time")
        lengths.append(size)
    return lengths


def computed(r: ScalarBuilder, source: Array, dtype: Attribute) -> _Element:
    """An element of `source`, as computed values of `dtype`."""
    return lambda value: r.extended(r.convert_value(value, source.dtype, dtype))


def carried_zero(r: ScalarBuilder, dtype: Attribute, value: int | float = 0) -> SSAValue:
    """`value` as what is carried while reducing to `dtype`."""
    return r.extended(r.number(dtype, value))


# -- sums and products ------------------------------------------------------------------------------------------------


@whole("Reductions", "sum")
def sum_all(r: ScalarBuilder, results: Sequence[VTensorType], source: Array, *_: Any) -> Value:
    return sum_dims(r, results, source, None)


@whole("Reductions", "sum.dim_IntList", "half types sum in f32, ints and bools in int64")
def sum_dims(r: ScalarBuilder, results: Sequence[VTensorType], source: Array, dims: Any, keepdim: Any = None, *_: Any) -> Value:
    dtype = results[0].dtype
    return reduce(
        r,
        source,
        dims,
        keepdim,
        dtype,
        carried_zero(r, dtype),
        computed(r, source, dtype),
        r.add,
        lambda total: r.rounded(total, dtype),
    )


@whole("Reductions", "mean")
def mean_all(r: ScalarBuilder, results: Sequence[VTensorType], source: Array, *_: Any) -> Value:
    return mean_dims(r, results, source, None)


@whole("Reductions", "mean.dim")
def mean_dims(
    r: ScalarBuilder, results: Sequence[VTensorType], source: Array, dims: Any, keepdim: Any = None, *_: Any
) -> Value:
    dtype = results[0].dtype
    rank = len(source.dims)
    reduced = {dim_of(dim, rank) for dim in dims} if dims else set(range(rank))
    count = 1
    for length in static_lengths(source, sorted(reduced)):
        count *= length

    def after(total: SSAValue) -> SSAValue:
        return r.rounded(r.divide(total, r.constant(total.type, float(count))), dtype)

    zero = carried_zero(r, dtype)
    return reduce(r, source, dims, keepdim, dtype, zero, computed(r, source, dtype), r.add, after)


@whole("Reductions", "prod")
def prod_all(r: ScalarBuilder, results: Sequence[VTensorType], source: Array, *_: Any) -> Value:
    return prod_dim(r, results, source, None)


@whole("Reductions", "prod.dim_int")
def prod_dim(r: ScalarBuilder, results: Sequence[VTensorType], source: Array, dim: Any, keepdim: Any = None, *_: Any) -> Value:
    dtype = results[0].dtype
    one = carried_zero(r, dtype, 1)
    prepare = computed(r, source, dtype)
    return reduce(r, source, dim, keepdim, dtype, one, prepare, r.multiply, lambda total: r.rounded(total, dtype))


@whole("Reductions", "count_nonzero count_nonzero.dim_IntList")
def count_nonzero(r: ScalarBuilder, results: Sequence[VTensorType], source: Array, dims: Any = None) -> Value:
    def prepare(value: SSAValue) -> SSAValue:
        return r.convert_value(r.convert_value(value, source.dtype, i1), i1, si64)

    return reduce(r, source, dims, None, si64, r.number(si64, 0), prepare, r.add)


# -- any, all ---------------------------------------------------------------------------------------------------------


@whole("Reductions", "any any.dim any.dims")
def any_(r: ScalarBuilder, results: Sequence[VTensorType], source: Array, dims: Any = None, keepdim: Any = None) -> Value:
    return _truth(r, results[0].dtype, source, dims, keepdim, False, r.either)


@whole("Reductions", "all all.dim all.dims")
def all_(r: ScalarBuilder, results: Sequence[VTensorType], source: Array, dims: Any = None, keepdim: Any = None) -> Value:
    return _truth(r, results[0].dtype, source, dims, keepdim, True, r.both)


def _truth(r: ScalarBuilder, dtype: Attribute, source: Array, dims: Any, keepdim: Any, start: bool, combine: _Combine) -> Value:
    """any and all; of uint8 tensors torch gives uint8."""
    return reduce(
        r,
        source,
        dims,
        keepdim,
        dtype,
        r.constant(i1, start),
        lambda value: r.convert_value(value, source.dtype, i1),
        lambda total, value: combine(value, total),
        lambda value: r.convert_value(value, i1, dtype),
    )


# -- minimum, maximum -------------------------------------------------------------------------------------------------


def _extreme(r: ScalarBuilder, dtype: Attribute, greatest: bool) -> SSAValue:
    """The value that any other is better than: the start of a maximum, or a minimum."""
    if is_float(dtype):
        value: int | float = float("-inf") if greatest else float("inf")
    elif not signed(dtype):
        value = 0 if greatest else (1 << width(dtype)) - 1
    else:
        value = -(1 << (width(dtype) - 1)) if greatest else (1 << (width(dtype) - 1)) - 1
    return carried_zero(r, dtype, value)


def _limit(r: ScalarBuilder, source: Array, dims: Any, keepdim: Any, greatest: bool, tie: str = "even") -> Value:
    dtype = source.dtype
    better = larger if greatest else smaller
    return reduce(
        r,
        source,
        dims,
        keepdim,
        dtype,
        _extreme(r, dtype, greatest),
        r.extended,
        lambda a, b: better(r, dtype, a, b, tie),
        lambda value: r.rounded(value, dtype),
    )


@whole("Reductions", "amax", "NaN where one is NaN")
def amax(r: ScalarBuilder, results: Sequence[VTensorType], source: Array, dims: Any = None, keepdim: Any = None) -> Value:
    return _limit(r, source, dims, keepdim, True)


@whole("Reductions", "amin", "NaN where one is NaN")
def amin(r: ScalarBuilder, results: Sequence[VTensorType], source: Array, dims: Any = None, keepdim: Any = None) -> Value:
    return _limit(r, source, dims, keepdim, False)


@whole("Reductions", "max")
def max_all(r: ScalarBuilder, results: Sequence[VTensorType], source: Array) -> Value:
    return _limit(r, source, None, None, True)


@whole("Reductions", "min")
def min_all(r: ScalarBuilder, results: Sequence[VTensorType], source: Array) -> Value:
    return _limit(r, source, None, None, False)


@whole("Reductions", "argmax")
def argmax(r: ScalarBuilder, results: Sequence[VTensorType], source: Array, dim: Any = None, keepdim: Any = None) -> Value:
    return _position(r, source, dim, keepdim, True)


@whole("Reductions", "argmin")
def argmin(r: ScalarBuilder, results: Sequence[VTensorType], source: Array, dim: Any = None, keepdim: Any = None) -> Value:
    return _position(r, source, dim, keepdim, False)


@whole("Reductions", "max.dim")
def max_dim(r: ScalarBuilder, results: Sequence[VTensorType], source: Array, dim: Any, keepdim: Any = None) -> tuple:
    return _limit(r, source, dim, keepdim, True, "first"), _position(r, source, dim, keepdim, True)


@whole("Reductions", "min.dim")
def min_dim(r: ScalarBuilder, results: Sequence[VTensorType], source: Array, dim: Any, keepdim: Any = None) -> tuple:
    return _limit(r, source, dim, keepdim, False, "first"), _position(r, source, dim, keepdim, False)


def _position(r: ScalarBuilder, source: Array, dim: Any, keepdim: Any, greatest: bool) -> Value:
    """Where the (first) maximum or minimum is; a NaN is both."""
    rank = len(source.dims)
    if rank == 0:
        return Scalar(r.number(si64, 0), si64)
    if dim is None and rank > 1:
        raise Unsupported("over all of a tensor with several dimensions; name the dim")
    d = 0 if dim is None else dim_of(dim, rank)
    (length,) = static_lengths(source, [d])
    dtype = source.dtype
    keep = isinstance(keepdim, Number) and bool(keepdim.constant)
    dims = [*source.dims[:d], *([1] if keep else []), *source.dims[d + 1 :]]

    def element(indices: tuple[SSAValue, ...]) -> SSAValue:
        before, after = indices[:d], indices[d + 1 :] if keep else indices[d:]
        zero = r.constant(index_type, 0)
        first = r.extended(source.at([*before, zero, *after]))
        with r.loop(length, [first, zero]) as loop:
            r.positions.add(loop.position)
            best, where = loop.carried
            value = r.extended(source.at([*before, loop.position, *after]))
            better = r.compare("gt" if greatest else "lt", value, best, not is_float(dtype) and not signed(dtype))
            if is_float(dtype):
                better = r.either(better, r.is_nan(value))
                better = r.both(better, r.invert(r.is_nan(best)))
            loop.finish([r.select(better, value, best), r.select(better, loop.position, where)])
        return r.from_index(loop.results[1], si64)

    return make(r, dims, si64, element)


# -- products of rows and matrices ------------------------------------------------------------------------------------


_Reader: TypeAlias = Callable[[SSAValue], SSAValue]


def _product(r: ScalarBuilder, dtype: Attribute, length: int, left: _Reader, right: _Reader) -> SSAValue:
    """The sum of products of two rows, as computed."""

    def element(position: list[SSAValue]) -> SSAValue:
        return r.multiply(r.extended(left(position[0])), r.extended(right(position[0])))

    return fold(r, [length], carried_zero(r, dtype), element, r.add)


@whole("Reductions", "dot vdot mv mm bmm matmul inner", "half types in f32")
def matmul(r: ScalarBuilder, results: Sequence[VTensorType], left: Tensor, right: Tensor) -> Value:
    """A product of vectors, matrices or batches of them, as torch.matmul takes them."""
    dtype = results[0].dtype
    return _matmul(r, results[0], left, right, lambda _, product: r.rounded(product, dtype))


@whole("Reductions", "addmm addmv baddbmm", "half types in f32")
def addmm(
    r: ScalarBuilder,
    results: Sequence[VTensorType],
    source: Array,
    left: Tensor,
    right: Tensor,
    beta: Any = None,
    alpha: Any = None,
) -> Value:
    dtype = results[0].dtype

    def after(indices: tuple[SSAValue, ...], product: SSAValue) -> SSAValue:
        if alpha is not None:
            product = r.multiply(product, r.lift(alpha, dtype))
        if isinstance(beta, Number) and beta.constant == 0:
            return r.rounded(product, dtype)
        own = r.extended(r.convert_value(source.at(broadcast(r, source.dims, indices)), source.dtype, dtype))
        if beta is not None:
            own = r.multiply(own, r.lift(beta, dtype))
        return r.rounded(r.add(own, product), dtype)

    return _matmul(r, results[0], left, right, after)


def _matmul(
    r: ScalarBuilder,
    result: VTensorType,
    left: Tensor,
    right: Tensor,
    after: Callable[[tuple[SSAValue, ...], SSAValue], SSAValue],
) -> Value:
    dtype = result.dtype
    if not is_float(dtype) and not signed(dtype):
        raise Unsupported("a matrix product of bytes or bools")
    a, b = len(left.dims), len(right.dims)
    length = left.dims[-1] if isinstance(left.dims[-1], int) else right.dims[max(b - 2, 0)]
    if not isinstance(length, int):
        raise Unsupported("a product over a dimension whose length is only known at run time")
    known = length
    rows, columns = (left.dims[-2:-1] if a > 1 else ()), (right.dims[-1:] if b > 1 else ())
    outer = result.shape[: len(result.shape) - len(rows) - len(columns)]

    def element(indices: tuple[SSAValue, ...]) -> SSAValue:
        batch = indices[: len(outer)]
        row = indices[len(outer) : len(outer) + len(rows)]
        column = indices[len(outer) + len(rows) :]
        product = _product(
            r,
            dtype,
            known,
            lambda i: left.at([*broadcast(r, left.dims[: max(a - 2, 0)], batch), *row, i]),
            lambda i: right.at([*broadcast(r, right.dims[: max(b - 2, 0)], batch), i, *column]),
        )
        return after(indices, product)

    return make(r, [*outer, *rows, *columns], dtype, element)
