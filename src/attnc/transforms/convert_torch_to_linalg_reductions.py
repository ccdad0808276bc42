"""ATen reductions, norms and softmax: `linalg.generic`s with reduction dims.

    %1 = torch.aten._softmax %0, -1, false : [B,S,K] bf16 -> [B,S,K] bf16
=>
    %max = linalg.generic … ["parallel", "parallel", "reduction"] ins(%0) outs(%lowest) { extf, maximumf }
    %exp = linalg.generic … ins(%0, %max) { extf, subf, math.exp }
    %sum = linalg.generic … ["parallel", "parallel", "reduction"] ins(%exp) outs(%zero) { addf }
    %1   = linalg.generic … ins(%exp, %sum) { divf, truncf }

Half types are computed in f32, as torch's own kernels do on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xdsl.dialects import arith, math
from xdsl.ir import Attribute, SSAValue
from xdsl.ir.affine import AffineMap

from attnc.dialects.torch import VTensorType, si64
from attnc.transforms.convert_torch_to_linalg_elementwise import converted, elementwise
from attnc.transforms.convert_torch_to_linalg_ext_arithmetic import larger, smaller
from attnc.transforms.convert_torch_to_linalg_ext_region import f64, i1
from attnc.transforms.convert_torch_to_linalg_ext_table import Unsupported
from attnc.transforms.convert_torch_to_linalg_ext_tensors import dim_of
from attnc.transforms.convert_torch_to_linalg_ext_values import (
    CARRIED,
    Number,
    Scalar,
    ScalarBuilder,
    is_float,
    signed,
    width,
)
from attnc.transforms.convert_torch_to_linalg_graph import (
    ONE,
    Array,
    Graph,
    computed_type,
    dims_map,
    product,
    scalar_of,
)
from attnc.transforms.convert_torch_to_linalg_layout import reshaped

Types = Sequence[VTensorType]
_Combine = Callable[[ScalarBuilder, SSAValue, SSAValue], SSAValue]
_Prepare = Callable[[ScalarBuilder, SSAValue], SSAValue]


def dims_of(dims: Any, rank: int) -> list[int]:
    """The dims to reduce, ascending; all where none are named."""
    if isinstance(dims, Number):
        dims = [dims]
    return sorted({dim_of(d, rank) for d in dims}) if dims and rank else list(range(rank))


def _keeps(keepdim: Any) -> bool:
    return isinstance(keepdim, Number) and bool(keepdim.constant)


def reduced(
    graph: Graph,
    x: Array,
    dims: Sequence[int],
    dtype: Attribute,
    start: int | float | bool,
    combine: _Combine,
    prepare: _Prepare = lambda r, value: value,
) -> Array:
    """`combine` over `dims`, from `start`; carried, and given, as computed values of `dtype` (f32 for the half types)."""
    carried = computed_type(dtype) if is_float(dtype) else dtype
    kept = [d for d in range(x.rank) if d not in dims]
    sizes = [x.dims[d] for d in kept]
    init = graph.filled(sizes, CARRIED[carried], graph.r.number(carried, start))

    def body(r: ScalarBuilder, elements: Sequence[SSAValue]) -> SSAValue:
        scalar = scalar_of(r, x, elements[0])
        return combine(r, elements[-1], prepare(r, r.convert(scalar, carried)))

    value = graph.generic([x.value], [AffineMap.identity(x.rank)], init, dims_map(x.rank, kept), body, dims)
    return graph.array(value, carried, sizes)


def kept_dims(graph: Graph, result: Array, x: Array, dims: Sequence[int], keep: bool) -> Array:
    """The result of a reduction with its dims back, of size 1."""
    return reshaped(graph, result, [ONE if d in dims else x.dims[d] for d in range(x.rank)]) if keep else result


def _finished(graph: Graph, result: Array, x: Array, dims: Sequence[int], keepdim: Any, dtype: Attribute) -> Array:
    return kept_dims(graph, converted(graph, result, dtype), x, dims, _keeps(keepdim))


def _add(r: ScalarBuilder, total: SSAValue, value: SSAValue) -> SSAValue:
    return r.add(total, value)


def total_of(graph: Graph, types: Types, x: Array, dims: Any = None, keepdim: Any = None, *rest: Any) -> Array:
    """sum"""
    over = dims_of(dims, x.rank)
    dtype = types[0].dtype
    return _finished(graph, reduced(graph, x, over, dtype, 0, _add), x, over, keepdim, dtype)


def total_of_all(graph: Graph, types: Types, x: Array, *rest: Any) -> Array:
    return total_of(graph, types, x)


def mean(graph: Graph, types: Types, x: Array, dims: Any = None, keepdim: Any = None, *rest: Any) -> Array:
    over = dims_of(dims, x.rank)
    dtype = types[0].dtype
    result = divided(graph, reduced(graph, x, over, dtype, 0, _add), x, over, 0)
    return _finished(graph, result, x, over, keepdim, dtype)


def mean_of_all(graph: Graph, types: Types, x: Array, *rest: Any) -> Array:
    return mean(graph, types, x)


def divided(graph: Graph, total: Array, x: Array, dims: Sequence[int], less: float) -> Array:
    """`total / (count - less)`, for the number of elements along `dims`."""
    count = graph.number_of(product([x.dims[d] for d in dims]))

    def body(r: ScalarBuilder, dtype: Attribute, value: Scalar) -> SSAValue:
        divisor = r.convert(count, dtype)
        if less:
            divisor = r.subtract(divisor, r.constant(divisor.type, less))
            divisor = r.floating(arith.MaximumfOp, divisor, r.constant(divisor.type, 0.0))
        return r.divide(value.value, divisor)

    return elementwise(graph, body, total.dtype, [total])


def _extreme(dtype: Attribute, greatest: bool) -> int | float:
    if is_float(dtype):
        return float("-inf") if greatest else float("inf")
    if dtype == i1:
        return not greatest
    if not signed(dtype):
        return 0 if greatest else (1 << width(dtype)) - 1
    return -(1 << (width(dtype) - 1)) if greatest else (1 << (width(dtype) - 1)) - 1


def _limit(graph: Graph, types: Types, x: Array, dims: Any, keepdim: Any, greatest: bool) -> Array:
    over = dims_of(dims, x.rank)
    better = larger if greatest else smaller
    result = reduced(
        graph, x, over, x.dtype, _extreme(x.dtype, greatest), lambda r, total, value: better(r, x.dtype, total, value)
    )
    return _finished(graph, result, x, over, keepdim, x.dtype)


def amax(graph: Graph, types: Types, x: Array, dims: Any = None, keepdim: Any = None) -> Array:
    return _limit(graph, types, x, dims, keepdim, True)


def amin(graph: Graph, types: Types, x: Array, dims: Any = None, keepdim: Any = None) -> Array:
    return _limit(graph, types, x, dims, keepdim, False)


def _truth(graph: Graph, types: Types, x: Array, dims: Any, keepdim: Any, start: bool, combine: _Combine) -> Array:
    over = dims_of(dims, x.rank)
    return _finished(graph, reduced(graph, x, over, i1, start, combine), x, over, keepdim, types[0].dtype)


def any_of(graph: Graph, types: Types, x: Array, dims: Any = None, keepdim: Any = None) -> Array:
    return _truth(graph, types, x, dims, keepdim, False, lambda r, total, value: r.either(total, value))


def all_of(graph: Graph, types: Types, x: Array, dims: Any = None, keepdim: Any = None) -> Array:
    return _truth(graph, types, x, dims, keepdim, True, lambda r, total, value: r.both(total, value))


def moments(graph: Graph, x: Array, dims: Sequence[int], dtype: Attribute, less: float) -> tuple[Array, Array]:
    """Variance and mean, computed, with the reduced dims kept at size 1."""
    average = kept_dims(graph, divided(graph, reduced(graph, x, dims, dtype, 0, _add), x, dims, 0), x, dims, True)

    def squared(r: ScalarBuilder, target: Attribute, value: Scalar, middle: Scalar) -> SSAValue:
        distance = r.subtract(r.convert(value, target), middle.value)
        return r.multiply(distance, distance)

    squares = elementwise(graph, squared, average.dtype, [x, average])
    variance = divided(graph, reduced(graph, squares, dims, squares.dtype, 0, _add), x, dims, less)
    return kept_dims(graph, variance, x, dims, True), average


def variance(graph: Graph, types: Types, x: Array, dims: Any = None, correction: Any = None, keepdim: Any = None) -> Array:
    return variance_and_mean(graph, types, x, dims, correction, keepdim)[0]


def deviation(graph: Graph, types: Types, x: Array, dims: Any = None, correction: Any = None, keepdim: Any = None) -> Array:
    over = dims_of(dims, x.rank)
    result, _ = moments(graph, x, over, types[0].dtype, _correction(correction))
    root = elementwise(graph, lambda r, dtype, value: r.math(math.SqrtOp, value.value), result.dtype, [result])
    return _dropped(graph, converted(graph, root, types[0].dtype), x, over, keepdim)


def variance_and_mean(
    graph: Graph, types: Types, x: Array, dims: Any = None, correction: Any = None, keepdim: Any = None
) -> list[Array]:
    over = dims_of(dims, x.rank)
    both = moments(graph, x, over, types[0].dtype, _correction(correction))
    return [_dropped(graph, converted(graph, result, types[0].dtype), x, over, keepdim) for result in both]


def _flagged(build: Callable[..., Any]) -> Callable[..., Any]:
    """var.dim(x, dims, unbiased, keepdim), var(x, unbiased): the correction is a flag."""

    def unbiased(graph: Graph, types: Types, x: Array, *rest: Any) -> Any:
        dims, flag, keepdim = (None, *rest, None)[:3] if len(rest) < 2 else (*rest, None)[:3]
        return build(graph, types, x, dims, flag if flag is not None else Number(si64, 1), keepdim)

    return unbiased


def layer_norm(
    graph: Graph, types: Types, x: Array, shape: Any, weight: Array | None = None, bias: Array | None = None, *rest: Any
) -> Any:
    """layer_norm and native_layer_norm: the latter's mean and reciprocal deviation as well"""
    over = list(range(x.rank - len(shape), x.rank))
    epsilon = rest[0] if rest else Number(f64, 1e-5)
    variance_, average = moments(graph, x, over, x.dtype, 0)

    def reciprocal(r: ScalarBuilder, dtype: Attribute, value: Scalar) -> SSAValue:
        return r.math(math.RsqrtOp, r.add(value.value, r.convert(epsilon, dtype)))

    inverse = elementwise(graph, reciprocal, variance_.dtype, [variance_])
    extra = [y for y in (weight, bias) if y is not None]

    def body(r: ScalarBuilder, dtype: Attribute, value: Scalar, middle: Scalar, factor: Scalar, *more: Scalar) -> SSAValue:
        scales = iter(more)
        result = r.multiply(r.subtract(r.convert(value, inverse.dtype), middle.value), factor.value)
        if weight is not None:
            result = r.multiply(result, r.convert(next(scales), inverse.dtype))
        if bias is not None:
            result = r.add(result, r.convert(next(scales), inverse.dtype))
        return r.rounded(result, dtype)

    out = elementwise(graph, body, types[0].dtype, [x, average, inverse, *extra])
    return [out, *(converted(graph, y, type_.dtype) for y, type_ in zip((average, inverse), types[1:]))]


def rms_norm(graph: Graph, types: Types, x: Array, shape: Any, weight: Array | None = None, epsilon: Any = None) -> Array:
    over = list(range(x.rank - len(shape), x.rank))
    carried = computed_type(x.dtype)
    squares = elementwise(graph, lambda r, dtype, v: _square(r, r.convert(v, dtype)), carried, [x])
    average = divided(graph, reduced(graph, squares, over, carried, 0, _add), x, over, 0)
    average = kept_dims(graph, average, x, over, True)

    def body(r: ScalarBuilder, dtype: Attribute, value: Scalar, mean_: Scalar, *more: Scalar) -> SSAValue:
        small = r.constant(mean_.value.type, _EPSILON[str(x.dtype)]) if epsilon is None else r.convert(epsilon, carried)
        factor = r.math(math.RsqrtOp, r.add(mean_.value, small))
        result = r.multiply(r.convert(value, carried), factor)
        for scale in more:
            result = r.multiply(result, r.convert(scale, carried))
        return r.rounded(result, dtype)

    return elementwise(graph, body, types[0].dtype, [x, average, *([weight] if weight is not None else [])])


_EPSILON = {"f64": 2.0**-52, "f32": 2.0**-23, "f16": 2.0**-23, "bf16": 2.0**-23}


def _square(r: ScalarBuilder, value: SSAValue) -> SSAValue:
    return r.multiply(value, value)


def _correction(correction: Any) -> float:
    if correction is None:
        return 1.0
    if isinstance(correction, Number) and correction.constant is not None:
        return float(correction.constant)
    raise Unsupported("a correction that is only known at run time")


def _dropped(graph: Graph, result: Array, x: Array, dims: Sequence[int], keepdim: Any) -> Array:
    return result if _keeps(keepdim) else reshaped(graph, result, [x.dims[d] for d in range(x.rank) if d not in dims])


# -- softmax ----------------------------------------------------------------------------------------------------------


def softmax(graph: Graph, types: Types, x: Array, dim: Any, *rest: Any) -> Array:
    """_softmax, softmax.int"""
    weight, total, _ = _weights(graph, _in_dtype(graph, x, rest), dim, False)
    return _quotient(graph, types, weight, total, False)


def safe_softmax(graph: Graph, types: Types, x: Array, dim: Any, *rest: Any) -> Array:
    """_safe_softmax: a row of -inf alone gives 0."""
    weight, total, _ = _weights(graph, _in_dtype(graph, x, rest), dim, True)
    return _quotient(graph, types, weight, total, True)


def _quotient(graph: Graph, types: Types, weight: Array, total: Array, safe: bool) -> Array:
    def body(r: ScalarBuilder, dtype: Attribute, w: Scalar, t: Scalar) -> SSAValue:
        result = r.divide(w.value, t.value)
        if safe:
            zero = r.constant(result.type, 0.0)
            result = r.select(r.compare("eq", t.value, zero), zero, result)
        return r.rounded(result, dtype)

    return elementwise(graph, body, types[0].dtype, [weight, total])


def log_softmax(graph: Graph, types: Types, x: Array, dim: Any, *rest: Any) -> Array:
    x = _in_dtype(graph, x, rest)
    _, total, top = _weights(graph, x, dim, False)

    def body(r: ScalarBuilder, dtype: Attribute, value: Scalar, m: Scalar, t: Scalar) -> SSAValue:
        distance = r.subtract(r.convert(value, top.dtype), m.value)
        return r.rounded(r.subtract(distance, r.math(math.LogOp, t.value)), dtype)

    return elementwise(graph, body, types[0].dtype, [x, top, total])


def logsumexp(graph: Graph, types: Types, x: Array, dims: Any, keepdim: Any = None) -> Array:
    over = dims_of(dims, x.rank)
    _, total, top = _weights(graph, x, [Number(si64, d) for d in over], True)

    def body(r: ScalarBuilder, dtype: Attribute, m: Scalar, t: Scalar) -> SSAValue:
        return r.rounded(r.add(_anchor(r, m.value), r.math(math.LogOp, t.value)), dtype)

    return _dropped(graph, elementwise(graph, body, types[0].dtype, [top, total]), x, over, keepdim)


def _in_dtype(graph: Graph, x: Array, rest: Sequence[Any]) -> Array:
    """softmax.int's own dtype argument: the input is cast first."""
    from attnc.dialects.torch import SCALAR_TYPES

    given = rest[0] if rest else None
    if isinstance(given, Number) and given.dtype != i1 and given.constant is not None:
        return converted(graph, x, SCALAR_TYPES[int(given.constant)])
    return x


def _anchor(r: ScalarBuilder, top: SSAValue) -> SSAValue:
    """The maximum, or 0 where it is infinite, so that no infinities are subtracted."""
    infinite = r.compare("eq", r.math(math.AbsFOp, top), r.constant(top.type, float("inf")))
    return r.select(infinite, r.constant(top.type, 0.0), top)


def _weights(graph: Graph, x: Array, dims: Any, anchored: bool) -> tuple[Array, Array, Array]:
    """exp(x - max), the sum of that, and max: computed values, the latter two with `dims` kept at size 1."""
    over = dims_of(dims, x.rank)
    best = lambda r, total, value: larger(r, computed_type(x.dtype), total, value)  # noqa: E731
    top = kept_dims(graph, reduced(graph, x, over, x.dtype, float("-inf"), best), x, over, True)

    def weight_of(r: ScalarBuilder, dtype: Attribute, value: Scalar, m: Scalar) -> SSAValue:
        anchor = _anchor(r, m.value) if anchored else m.value
        return r.math(math.ExpOp, r.subtract(r.convert(value, dtype), anchor))

    weight = elementwise(graph, weight_of, top.dtype, [x, top])
    total = kept_dims(graph, reduced(graph, weight, over, weight.dtype, 0.0, _add), x, over, True)
    return weight, total, top


_NAMES: dict[Callable[..., Any], str] = {
    total_of: "sum.dim_IntList",
    total_of_all: "sum",
    mean: "mean.dim",
    mean_of_all: "mean",
    amax: "amax max",
    amin: "amin min",
    any_of: "any any.dim any.dims",
    all_of: "all all.dim all.dims",
    variance: "var.correction",
    deviation: "std.correction",
    variance_and_mean: "var_mean.correction",
    _flagged(variance): "var.dim var",
    _flagged(deviation): "std.dim std",
    layer_norm: "layer_norm native_layer_norm",
    rms_norm: "rms_norm",
    softmax: "_softmax softmax.int",
    safe_softmax: "_safe_softmax",
    log_softmax: "_log_softmax log_softmax.int",
    logsumexp: "logsumexp",
}
REDUCTIONS: dict[str, Callable[..., Any]] = {name: build for build, names in _NAMES.items() for name in names.split()}
