"""ATen norms and softmax of a row: reductions of two steps."""

from __future__ import annotations

import math as python_math
from collections.abc import Callable, Sequence
from typing import Any

from xdsl.dialects import math
from xdsl.ir import Attribute, SSAValue

from attnc.dialects.torch import VTensorType
from attnc.transforms.convert_torch_to_linalg_ext_arithmetic import larger, smaller
from attnc.transforms.convert_torch_to_linalg_ext_reductions import (
    Array,
    Row,
    carried_zero,
    computed,
    fold,
    reduce,
    reduce_rows,
    static_lengths,
)
from attnc.transforms.convert_torch_to_linalg_ext_region import f32
from attnc.transforms.convert_torch_to_linalg_ext_table import Unsupported, whole
from attnc.transforms.convert_torch_to_linalg_ext_tensors import dim_of, make
from attnc.transforms.convert_torch_to_linalg_ext_values import Number, ScalarBuilder, Value


@whole("Reductions", "linalg_vector_norm", "ord 0, 1, 2, inf, -inf and other known numbers")
def vector_norm(
    r: ScalarBuilder,
    results: Sequence[VTensorType],
    source: Array,
    ord_: Any = None,
    dims: Any = None,
    keepdim: Any = None,
    *_: Any,
) -> Value:
    order = 2.0 if ord_ is None else ord_.constant
    if order is None:
        raise Unsupported("a norm whose order is only known at run time")
    return _norm(r, results[0].dtype, source, float(order), dims, keepdim)


@whole("Reductions", "norm.Scalar norm.ScalarOpt_dim")
def norm(
    r: ScalarBuilder, results: Sequence[VTensorType], source: Array, p: Any = None, dims: Any = None, keepdim: Any = None
) -> Value:
    return vector_norm(r, results, source, p, dims, keepdim)


def _norm(r: ScalarBuilder, dtype: Attribute, source: Array, order: float, dims: Any, keepdim: Any) -> Value:
    to_computed = computed(r, source, dtype)
    zero = carried_zero(r, dtype)

    def magnitude(value: SSAValue) -> SSAValue:
        return r.math(math.AbsFOp, to_computed(value))

    def done(value: SSAValue) -> SSAValue:
        return r.rounded(value, dtype)

    if order == float("inf"):
        return reduce(r, source, dims, keepdim, dtype, zero, magnitude, lambda a, b: larger(r, f32, a, b, "even"), done)
    if order == float("-inf"):
        start = carried_zero(r, dtype, float("inf"))
        return reduce(r, source, dims, keepdim, dtype, start, magnitude, lambda a, b: smaller(r, f32, a, b, "even"), done)
    if order == 0:
        one = r.constant(zero.type, 1.0)

        def counted(value: SSAValue) -> SSAValue:
            return r.select(r.compare("ne", to_computed(value), zero), one, zero)

        return reduce(r, source, dims, keepdim, dtype, zero, counted, r.add, done)
    if order == 1:
        return reduce(r, source, dims, keepdim, dtype, zero, magnitude, r.add, done)
    if order == 2:

        def squared(value: SSAValue) -> SSAValue:
            x = to_computed(value)
            return r.multiply(x, x)

        root = lambda total: done(r.marked(math.SqrtOp, (total,), "zero_at_zero"))  # noqa: E731
        return reduce(r, source, dims, keepdim, dtype, zero, squared, r.add, root)
    exponent, inverse = r.constant(zero.type, order), r.constant(zero.type, 1.0 / order)
    return reduce(
        r,
        source,
        dims,
        keepdim,
        dtype,
        zero,
        lambda value: r.math(math.PowFOp, magnitude(value), exponent),
        r.add,
        lambda total: done(r.math(math.PowFOp, total, inverse)),
    )


@whole("Reductions", "_softmax softmax.int")
def softmax(r: ScalarBuilder, results: Sequence[VTensorType], source: Array, dim: Number, *_: Any) -> Value:
    return _softmax(r, results[0].dtype, source, dim, False)


@whole("Reductions", "_log_softmax log_softmax.int")
def log_softmax(r: ScalarBuilder, results: Sequence[VTensorType], source: Array, dim: Number, *_: Any) -> Value:
    return _softmax(r, results[0].dtype, source, dim, True)


@whole("Reductions", "logsumexp")
def logsumexp(r: ScalarBuilder, results: Sequence[VTensorType], source: Array, dims: Any, keepdim: Any = None) -> Value:
    dtype = results[0].dtype
    to_computed = computed(r, source, dtype)
    zero, low = carried_zero(r, dtype), carried_zero(r, dtype, float("-inf"))
    infinity = r.constant(zero.type, float("inf"))

    def row(read: Row, lengths: Sequence[int]) -> SSAValue:
        top = fold(r, lengths, low, lambda i: to_computed(read(i)), lambda a, b: larger(r, f32, a, b, "none"))
        infinite = r.compare("eq", r.math(math.AbsFOp, top), infinity)
        anchor = r.select(infinite, zero, top)
        total = fold(r, lengths, zero, lambda i: r.math(math.ExpOp, r.subtract(to_computed(read(i)), anchor)), r.add)
        return r.rounded(r.add(r.math(math.LogOp, total), anchor), dtype)

    return reduce_rows(r, source, dims, keepdim, dtype, row)


@whole("Reductions", "var.correction")
def variance(
    r: ScalarBuilder,
    results: Sequence[VTensorType],
    source: Array,
    dims: Any = None,
    correction: Any = None,
    keepdim: Any = None,
) -> Value:
    return _variance(r, results[0].dtype, source, dims, correction, keepdim, lambda value: value)


@whole("Reductions", "std.correction")
def deviation(
    r: ScalarBuilder,
    results: Sequence[VTensorType],
    source: Array,
    dims: Any = None,
    correction: Any = None,
    keepdim: Any = None,
) -> Value:
    return _variance(
        r, results[0].dtype, source, dims, correction, keepdim, lambda value: r.marked(math.SqrtOp, (value,), "zero_at_zero")
    )


def _variance(
    r: ScalarBuilder,
    dtype: Attribute,
    source: Array,
    dims: Any,
    correction: Any,
    keepdim: Any,
    after: Callable[[SSAValue], SSAValue],
) -> Value:
    less = 1.0 if correction is None else correction.constant
    if less is None:
        raise Unsupported("a correction that is only known at run time")
    to_computed = computed(r, source, dtype)
    zero = carried_zero(r, dtype)

    def row(read: Row, lengths: Sequence[int]) -> SSAValue:
        count = python_math.prod(lengths)
        total = fold(r, lengths, zero, lambda i: to_computed(read(i)), r.add)
        mean = r.divide(total, r.constant(zero.type, float(count)))

        def squared(i: list[SSAValue]) -> SSAValue:
            distance = r.subtract(to_computed(read(i)), mean)
            return r.multiply(distance, distance)

        squares = fold(r, lengths, zero, squared, r.add)
        return r.rounded(after(r.divide(squares, r.constant(zero.type, max(count - less, 0.0)))), dtype)

    return reduce_rows(r, source, dims, keepdim, dtype, row)


def _softmax(r: ScalarBuilder, dtype: Attribute, source: Array, dim: Number, logarithm: bool) -> Value:
    d = dim_of(dim, len(source.dims))
    (length,) = static_lengths(source, [d])
    to_computed = computed(r, source, dtype)
    rows = [*source.dims[:d], *source.dims[d + 1 :]]

    def read(row: Sequence[SSAValue], position: SSAValue) -> SSAValue:
        return to_computed(source.at([*row[:d], position, *row[d:]]))

    def largest(row: tuple[SSAValue, ...]) -> SSAValue:
        low = carried_zero(r, dtype, float("-inf"))
        return fold(r, [length], low, lambda i: read(row, i[0]), lambda a, b: larger(r, f32, a, b, "none"))

    def total_of(row: tuple[SSAValue, ...]) -> SSAValue:
        def weight(i: list[SSAValue]) -> SSAValue:
            return r.math(math.ExpOp, r.subtract(read(row, i[0]), top.at(row)))

        return fold(r, [length], carried_zero(r, dtype), weight, r.add)

    # One maximum and one sum a row, whichever of its elements are asked for.
    top = make(r, rows, dtype, largest)
    total = make(r, rows, dtype, total_of)

    def element(indices: tuple[SSAValue, ...]) -> SSAValue:
        row = [*indices[:d], *indices[d + 1 :]]
        distance = r.subtract(read(row, indices[d]), top.at(row))
        if logarithm:
            return r.rounded(r.subtract(distance, r.math(math.LogOp, total.at(row))), dtype)
        return r.rounded(r.divide(r.math(math.ExpOp, distance), total.at(row)), dtype)

    return make(r, source.dims, dtype, element)
