"""ATen operations that join small tensors or make new ones: recipes that choose between values or compute them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xdsl.dialects import arith
from xdsl.dialects.builtin import IntegerType
from xdsl.ir import SSAValue

from attnc.dialects.torch import VTensorType
from attnc.transforms.convert_torch_to_linalg_ext_region import index as index_type
from attnc.transforms.convert_torch_to_linalg_ext_table import Unsupported, whole
from attnc.transforms.convert_torch_to_linalg_ext_tensors import dim_of, int_of, make, number_of, or_fault, position_of, wrapped
from attnc.transforms.convert_torch_to_linalg_ext_values import Number, Operand, Scalar, ScalarBuilder, Tensor, Value

# How many elements a chain of selects may choose from.
_LONGEST_CHOICE = 64

# -- joining ----------------------------------------------------------------------------------------------------------


def choose(r: ScalarBuilder, position: SSAValue, options: Sequence[Callable[[], SSAValue]]) -> SSAValue:
    """`options[position]`, of which all are computed unless the position is known."""
    if (known := r.literal(position)) is not None:
        return options[int(known)]()
    if len(options) > _LONGEST_CHOICE:
        raise Unsupported(f"an index into {len(options)} computed values; at most {_LONGEST_CHOICE}")
    result = options[-1]()
    for number in range(len(options) - 2, -1, -1):
        here = r.compare("eq", position, r.constant(index_type, number))
        result = r.select(here, options[number](), result)
    return result


@whole("Joining", "stack", "of small tensors")
def stack(r: ScalarBuilder, results: Sequence[VTensorType], sources: list, dim: Number | None = None) -> Value:
    d = 0 if dim is None else dim_of(dim, len(results[0].shape))
    dtype = results[0].dtype
    inner = sources[0].dims

    def element(indices: tuple[SSAValue, ...]) -> SSAValue:
        rest = [*indices[:d], *indices[d + 1 :]]
        options = [lambda s=s: r.convert_value(s.at(rest), s.dtype, dtype) for s in sources]
        return choose(r, wrapped(r, len(sources), indices[d]), options)

    return make(r, [*inner[:d], len(sources), *inner[d:]], dtype, element)


@whole("Joining", "cat", "of small tensors")
def cat(r: ScalarBuilder, results: Sequence[VTensorType], sources: list, dim: Number | None = None) -> Value:
    d = 0 if dim is None else dim_of(dim, len(results[0].shape))
    dtype = results[0].dtype
    lengths = [source.dims[d] for source in sources]
    if not all(isinstance(length, int) for length in lengths):
        raise Unsupported("cat of tensors with a length that is only known at run time")
    total = sum(lengths)

    def element(indices: tuple[SSAValue, ...]) -> SSAValue:
        position = wrapped(r, total, indices[d])
        known = r.literal(position)
        result: SSAValue | None = None
        start = total
        for source, length in zip(reversed(sources), reversed(lengths)):
            start -= length
            if not length:
                continue
            if known is not None:
                if not start <= known < start + length:
                    continue
                inner = r.constant(index_type, int(known) - start)
            else:
                # Where another source is chosen, this one must still be read in range.
                inner = r.subtract(position, r.constant(index_type, start))
                inner = r.integer(arith.MinSIOp, inner, r.constant(index_type, length - 1))
                inner = r.integer(arith.MaxSIOp, inner, r.constant(index_type, 0))
                r.positions.add(inner)
                inner = or_fault(r, total, indices[d], inner)
            value = r.convert_value(source.at([*indices[:d], inner, *indices[d + 1 :]]), source.dtype, dtype)
            if result is None:
                result = value
            else:
                beyond = r.compare("ge", position, r.constant(index_type, start + length))
                result = r.select(beyond, result, value)
        assert result is not None
        return result

    return make(r, [*sources[0].dims[:d], total, *sources[0].dims[d + 1 :]], dtype, element)


# -- making -----------------------------------------------------------------------------------------------------------


def constant_tensor(r: ScalarBuilder, result: VTensorType, value: Operand) -> Scalar | Tensor:
    """A tensor of one value."""
    return make(r, result.shape, result.dtype, lambda _: r.convert(value, result.dtype))


@whole("Making", "full new_full full_like")
def full(r: ScalarBuilder, results: Sequence[VTensorType], first: Any, second: Any, third: Any = None, *_: Any) -> Value:
    # full(size, value, …), full_like(self, value, …), new_full(self, size, value, …)
    value = third if isinstance(second, list) else second
    return constant_tensor(r, results[0], value)


@whole(
    "Making", "zeros zeros_like new_zeros zero empty_like new_empty empty.memory_format empty_strided", "empty ones are zeros"
)
def zeros(r: ScalarBuilder, results: Sequence[VTensorType], *_: Any) -> Value:
    return constant_tensor(r, results[0], Number(IntegerType(1), 0))


@whole("Making", "ones ones_like new_ones")
def ones(r: ScalarBuilder, results: Sequence[VTensorType], *_: Any) -> Value:
    return constant_tensor(r, results[0], Number(IntegerType(1), 1))


@whole("Making", "scalar_tensor")
def scalar_tensor(r: ScalarBuilder, results: Sequence[VTensorType], value: Operand, *_: Any) -> Value:
    return constant_tensor(r, results[0], value)


@whole("Making", "fill.Scalar fill.Tensor")
def fill(r: ScalarBuilder, results: Sequence[VTensorType], source: Value, value: Operand) -> Value:
    return constant_tensor(r, results[0], value)


@whole("Making", "arange arange.start arange.start_step")
def arange(r: ScalarBuilder, results: Sequence[VTensorType], *arguments: Any) -> Value:
    # The numbers come first: end; start, end; start, end, step. dtype, layout, device and pin_memory follow.
    numbers = arguments[:-4] if len(arguments) > 4 else arguments
    dtype = results[0].dtype
    start = numbers[0] if len(numbers) > 1 else Number(IntegerType(1), 0)
    step = numbers[2] if len(numbers) > 2 else Number(IntegerType(1), 1)

    def element(indices: tuple[SSAValue, ...]) -> SSAValue:
        position = r.from_index(wrapped(r, results[0].shape[0], indices[0]), dtype)
        scaled = r.multiply(r.extended(position), r.lift(step, dtype))
        return r.rounded(r.add(scaled, r.lift(start, dtype)), dtype)

    return make(r, results[0].shape, dtype, element)


@whole("Making", "linspace", "of known bounds")
def linspace(r: ScalarBuilder, results: Sequence[VTensorType], start: Any, end: Any, steps: Any, *_: Any) -> Value:
    dtype, count = results[0].dtype, int_of(steps, "the number of steps")
    low, high = (number_of(bound, "a bound of linspace") for bound in (start, end))
    step = (high - low) / max(count - 1, 1)
    # As torch: the first half counted from the start, the second from the end.
    values = [low + step * i if i < count / 2 else high - step * (count - 1 - i) for i in range(count)]
    return literal(r, VTensorType([count], dtype), values)


@whole("Making", "eye eye.m")
def eye(r: ScalarBuilder, results: Sequence[VTensorType], *_: Any) -> Value:
    dtype, shape = results[0].dtype, results[0].shape

    def element(indices: tuple[SSAValue, ...]) -> SSAValue:
        row, column = (wrapped(r, size, position) for size, position in zip(shape, indices, strict=True))
        return r.select(r.compare("eq", row, column), r.number(dtype, 1), r.number(dtype, 0))

    return make(r, shape, dtype, element)


@whole("Making", "tril")
def tril(r: ScalarBuilder, results: Sequence[VTensorType], source: Tensor, diagonal: Any = None) -> Value:
    return _triangle(r, source, diagonal, "le")


@whole("Making", "triu")
def triu(r: ScalarBuilder, results: Sequence[VTensorType], source: Tensor, diagonal: Any = None) -> Value:
    return _triangle(r, source, diagonal, "ge")


def _triangle(r: ScalarBuilder, source: Tensor, diagonal: Any, relation: str) -> Value:
    offset = Number(IntegerType(1), 0) if diagonal is None else diagonal

    def element(indices: tuple[SSAValue, ...]) -> SSAValue:
        row, column = (wrapped(r, dim, i) for dim, i in zip(source.dims[-2:], indices[-2:], strict=True))
        kept = r.compare(relation, r.subtract(column, row), position_of(r, offset))
        return r.select(kept, source.at(indices), r.number(source.dtype, 0))

    return make(r, source.dims, source.dtype, element)


def literal(r: ScalarBuilder, type_: VTensorType, values: Sequence[int | float]) -> Scalar | Tensor:
    """A constant tensor of few elements, in row-major order."""
    if len(values) > _LONGEST_CHOICE:
        raise Unsupported(f"a constant tensor of {len(values)} elements made in a mod; capture it")

    def element(indices: tuple[SSAValue, ...]) -> SSAValue:
        options = [lambda v=v: r.number(type_.dtype, v) for v in values]
        linear = r.constant(index_type, 0)
        for size, position in zip(type_.shape, indices, strict=True):
            linear = r.add(r.multiply(linear, r.constant(index_type, size)), wrapped(r, size, position))
        return choose(r, linear, options)

    return make(r, type_.shape, type_.dtype, element)
