"""ATen norms and softmax of a row: reductions of two steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xdsl.dialects import math
from xdsl.ir import Attribute, SSAValue

from attnc.dialects.torch import VTensorType
from attnc.transforms.convert_torch_to_linalg_ext_arithmetic import larger, smaller
from attnc.transforms.convert_torch_to_linalg_ext_reductions import Array, carried_zero, computed, fold, reduce, static_lengths
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
        return reduce(r, source, dims, keepdim, dtype, zero, magnitude, lambda a, b: larger(r, f32, a, b), done)
    if order == float("-inf"):
        start = carried_zero(r, dtype, float("inf"))
        return reduce(r, source, dims, keepdim, dtype, start, magnitude, lambda a, b: smaller(r, f32, a, b), done)
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

        root = lambda total: done(r.math(math.SqrtOp, total))  # noqa: E731
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
    raise Unsupported("write torch.log(torch.exp(x).sum(dim))")


def _softmax(r: ScalarBuilder, dtype: Attribute, source: Array, dim: Number, logarithm: bool) -> Value:
    d = dim_of(dim, len(source.dims))
    (length,) = static_lengths(source, [d])
    to_computed = computed(r, source, dtype)

    def element(indices: tuple[SSAValue, ...]) -> SSAValue:
        def read(position: SSAValue) -> SSAValue:
            return to_computed(source.at([*indices[:d], position, *indices[d + 1 :]]))

        low = carried_zero(r, dtype, float("-inf"))
        top = fold(r, [length], low, lambda i: read(i[0]), lambda a, b: larger(r, f32, a, b))
        zero = carried_zero(r, dtype)
        total = fold(r, [length], zero, lambda i: r.math(math.ExpOp, r.subtract(read(i[0]), top)), r.add)
        distance = r.subtract(read(indices[d]), top)
        if logarithm:
            return r.rounded(r.subtract(distance, r.math(math.LogOp, total)), dtype)
        return r.rounded(r.divide(r.math(math.ExpOp, distance), total), dtype)

    return make(r, source.dims, dtype, element)
