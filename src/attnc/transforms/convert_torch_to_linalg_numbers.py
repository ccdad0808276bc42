"""ATen operations on Python numbers and sizes, and the few that turn tensors into numbers or lists into values.

%s = torch.aten.size.int %x, %int1 : !torch.vtensor<[2,?,512],f16>, !torch.int -> !torch.int
%n = torch.aten.mul.int %s, %int8                                                               =>  a `Size`, 8 * s
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xdsl.dialects import linalg, tensor
from xdsl.dialects.builtin import IntegerAttr
from xdsl.ir import Attribute, SSAValue
from xdsl.ir.affine import AffineMap

from attnc.dialects.torch import SCALAR_TYPES, VTensorType, si64
from attnc.transforms.convert_torch_to_linalg_elementwise import converted
from attnc.transforms.convert_torch_to_linalg_ext_region import f64, i1, i64
from attnc.transforms.convert_torch_to_linalg_ext_region import index as index_type
from attnc.transforms.convert_torch_to_linalg_ext_table import OPERATIONS, Unsupported
from attnc.transforms.convert_torch_to_linalg_ext_tensors import dim_of, int_of
from attnc.transforms.convert_torch_to_linalg_ext_values import CARRIED, Number, ScalarBuilder, is_float
from attnc.transforms.convert_torch_to_linalg_graph import ONE, Array, Graph, Size, product

Types = Sequence[VTensorType]


def size_of_dim(graph: Graph, types: Types, x: Array, dim: Any = None) -> Any:
    if dim is None:
        return [graph.number_of(size) for size in x.dims]
    return graph.number_of(x.dims[dim_of(dim, x.rank)])


def number_of_elements(graph: Graph, types: Types, x: Array) -> Number:
    return graph.number_of(product(x.dims))


def multiplied(graph: Graph, types: Types, a: Number, b: Number) -> Number:
    return graph.number_of(graph.size_of(a) * graph.size_of(b))


def floor_divided(graph: Graph, types: Types, a: Number, b: Number) -> Number:
    size, divisor = graph.size_of(a), graph.size_of(b)
    if size.static is not None and divisor.static is not None:
        return Number(si64, size.static // divisor.static)
    if (quotient := size.divided(divisor)) is not None:
        return graph.number_of(quotient)
    return graph.number_of(graph.size_of(OPERATIONS["floordiv.int"].build(graph.r, a, b)))


def _plain(name: str) -> Callable[..., Number]:
    def build(graph: Graph, types: Types, *arguments: Number) -> Number:
        result = OPERATIONS[name].build(graph.r, *arguments)
        return graph.number_of(graph.size_of(result)) if result.constant is None else result

    return build


def added(graph: Graph, types: Types, a: Number, b: Number, *rest: Any) -> Number:
    if graph.size_of(a).static == 0:
        return b
    if graph.size_of(b).static == 0:
        return a
    return graph.number_of(graph.sum([graph.size_of(a), graph.size_of(b)]))


def item(graph: Graph, types: Types, x: Array) -> Number:
    """A 0-d tensor's element as a Python number."""
    if product(x.dims) != ONE:
        raise Unsupported("the number of a tensor of several elements")
    if x.constant is not None:
        return Number(f64 if is_float(x.dtype) else si64, x.constant)
    zero = [graph.index(Size(0))] * x.rank
    value = graph.add(tensor.ExtractOp(x.value, zero, CARRIED[x.dtype]))
    dtype = f64 if is_float(x.dtype) else i1 if x.dtype == i1 else si64
    return Number(dtype, None, graph.r.convert_value(value, x.dtype, dtype))


def to_tensor(graph: Graph, types: Types, number: Number, *rest: Any) -> Array:
    """A Python number as a 0-d tensor."""
    dtype = types[0].dtype
    if number.constant is not None:
        return graph.full(dtype, (), number.constant)
    return graph.array(graph.filled((), CARRIED[dtype], graph.r.convert(number, dtype)), dtype, ())


def full(graph: Graph, types: Types, *arguments: Any) -> Array:
    """full(size, value, …), full_like(self, value, …), new_full(self, size, value, …)"""
    like = isinstance(arguments[0], Array)
    sized = [argument for argument in arguments[:2] if isinstance(argument, list)]
    first: Any = arguments[0]
    dims = [graph.size_of(size) for size in sized[0]] if sized else list(first.dims)
    value = arguments[2] if like and sized else arguments[1]
    return _of(graph, types, dims, value)


def _of(graph: Graph, types: Types, dims: Sequence[Size], value: Any) -> Array:
    dtype = types[0].dtype
    if isinstance(value, Array):  # fill.Tensor
        if value.constant is None:
            raise Unsupported("a fill by a tensor; use torch.where or expand")
        return graph.full(dtype, dims, value.constant)
    if value.constant is not None:
        return graph.full(dtype, dims, value.constant)
    return graph.array(graph.filled(dims, CARRIED[dtype], graph.r.convert(value, dtype)), dtype, dims)


def _filled_with(number: int) -> Callable[..., Array]:
    def build(graph: Graph, types: Types, first: Any, second: Any = None, *rest: Any) -> Array:
        """zeros(size, …), zeros_like(self, …), new_zeros(self, size, …)"""
        listed = first if isinstance(first, list) else second if isinstance(second, list) else None
        own: Sequence[Size] = first.dims if isinstance(first, Array) else ()
        dims = [graph.size_of(size) for size in listed] if listed is not None else own
        return _of(graph, types, dims, Number(si64, number))

    return build


def filled(graph: Graph, types: Types, x: Array, value: Any) -> Array:
    return _of(graph, types, x.dims, value)


def arange(graph: Graph, types: Types, *arguments: Any) -> Array:
    """arange: end; start, end; start, end, step; then dtype, layout, device, pin_memory."""
    numbers: Sequence[Any] = arguments[:-4] if len(arguments) > 4 else arguments
    dtype = types[0].dtype
    start, end = (numbers[0], numbers[1]) if len(numbers) > 1 else (Number(si64, 0), *numbers)
    step = numbers[2] if len(numbers) > 2 else Number(si64, 1)
    if types[0].shape[0] >= 0:
        length = Size(types[0].shape[0])
    elif step.constant == 1 and start.constant == 0:
        length = graph.size_of(end)
    elif step.constant == 1 and not is_float(start.dtype) and not is_float(end.dtype):
        length = graph.size_of(OPERATIONS["sub.int"].build(graph.r, end, start))
    else:
        raise Unsupported("a range of run-time length with a step other than 1")
    return positions(graph, dtype, length, start, step)


def positions(graph: Graph, dtype: Attribute, length: Size, start: Number, step: Number) -> Array:
    """start, start + step, … as a tensor."""

    def body(r: ScalarBuilder, elements: Sequence[SSAValue]) -> SSAValue:
        place = r.emit(linalg.IndexOp, (), index_type, {"dim": IntegerAttr(0, i64)})
        value = r.extended(r.from_index(place, dtype))
        if step.constant != 1:
            value = r.multiply(value, r.lift(step, dtype))
        if start.constant != 0:
            value = r.add(value, r.lift(start, dtype))
        return r.rounded(value, dtype)

    init = graph.empty([length], CARRIED[dtype])
    return graph.array(graph.generic([], [], init, AffineMap.identity(1), body), dtype, [length])


def cast(graph: Graph, types: Types, x: Array, *rest: Any) -> Array:
    """prims.convert_element_type"""
    return converted(graph, x, types[0].dtype)


def dropout(graph: Graph, types: Types, x: Array, p: Any = None, train: Any = None, *rest: Any) -> Array:
    """dropout that drops nothing"""
    off = isinstance(train, Number) and train.constant is not None and not train.constant
    if not off and not (isinstance(p, Number) and p.constant == 0):
        raise Unsupported("dropout; export the model in eval mode")
    return x


def native_dropout(graph: Graph, types: Types, x: Array, p: Any = None, train: Any = None) -> list[Array]:
    return [dropout(graph, types, x, p, train), graph.full(i1, x.dims, True)]


def list_item(graph: Graph, types: Types, values: list, position: Any) -> Any:
    return values[int_of(position, "an index into a list")]


def unpacked(graph: Graph, types: Types, values: list) -> list:
    return list(values)


def dtype_of(graph: Graph, types: Types, x: Array) -> Number:
    codes = {dtype: code for code, dtype in SCALAR_TYPES.items()}
    return Number(si64, codes[x.dtype])


_NAMES: dict[Callable[..., Any], str] = {
    size_of_dim: "size.int sym_size.int size",
    number_of_elements: "numel sym_numel",
    multiplied: "mul.int",
    floor_divided: "floordiv.int",
    added: "add.int",
    item: "item Int.Tensor Float.Tensor Bool.Tensor _local_scalar_dense",
    to_tensor: "prim.NumToTensor.Scalar scalar_tensor tensor.int tensor.float tensor.bool",
    full: "full new_full full_like",
    _filled_with(0): "zeros zeros_like new_zeros empty.memory_format empty_like new_empty empty_strided new_empty_strided",
    _filled_with(1): "ones ones_like new_ones",
    filled: "fill.Scalar fill.Tensor",
    arange: "arange arange.start arange.start_step",
    cast: "prims.convert_element_type to.prim_dtype",
    dropout: "dropout feature_dropout alpha_dropout",
    native_dropout: "native_dropout",
    list_item: "__getitem__.t",
    unpacked: "prim.ListUnpack prim.TupleUnpack",
    dtype_of: "prim.dtype",
    **{_plain(f"{name}.int"): f"{name}.int" for name in ("sub", "remainder", "neg")},
    **{_plain(f"prim_{which}.int"): f"prim.{which}.int sym_{which}" for which in ("max", "min")},
}
NUMBERS: dict[str, Callable[..., Any]] = {name: build for build, names in _NAMES.items() for name in names.split()}
