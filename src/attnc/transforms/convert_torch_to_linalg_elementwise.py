"""ATen operations that give each element of their result by itself: as `linalg.generic`s.

Elementwise ones, broadcasting, with the scalar builders of mods (convert_torch_to_linalg_ext_table.py):

    %2 = torch.aten.mul.Tensor %0, %1 : !torch.vtensor<[?,64],f16>, !torch.vtensor<[64],f32> -> !torch.vtensor<[?,64],f32>
=>
    %2 = linalg.generic {indexing_maps = [(d0, d1) -> (d0, d1), (d0, d1) -> (d1), (d0, d1) -> (d0, d1)]} ins(%0, %1) {
    ^bb0(%in: f16, %in_1: f32, %out: f32): extf, mulf, yield }

Everything else that has a recipe there (index, gather, embedding, arange, tril, flip, …): the recipe of one element is built at
`linalg.index` positions. Where it reads a tensor at distinct positions that tensor is an operand with a map, else it is read by
`tensor.extract`, with `attnc.checked` where the index is the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from xdsl.dialects import linalg, tensor
from xdsl.dialects.builtin import IntegerAttr
from xdsl.ir import Attribute, Block, SSAValue
from xdsl.ir.affine import AffineMap

from attnc.dialects.torch import VTensorType
from attnc.transforms.convert_torch_to_linalg_ext_mods import captured
from attnc.transforms.convert_torch_to_linalg_ext_region import i64
from attnc.transforms.convert_torch_to_linalg_ext_region import index as index_type
from attnc.transforms.convert_torch_to_linalg_ext_table import Entry, Unsupported
from attnc.transforms.convert_torch_to_linalg_ext_values import CARRIED, Number, Scalar, ScalarBuilder, Tensor, Value
from attnc.transforms.convert_torch_to_linalg_graph import (
    Array,
    Graph,
    Size,
    broadcast_map,
    broadcast_sizes,
    dims_map,
    scalar_of,
)


def elementwise(graph: Graph, build: Callable[..., SSAValue], dtype: Attribute, arguments: Sequence[Any]) -> Array:
    """`build(r, dtype, *scalars)` for each element of the broadcast of the tensors among `arguments`."""
    arrays = [argument for argument in arguments if isinstance(argument, Array)]
    dims = broadcast_sizes([x.dims for x in arrays])
    read = [x for x in dict.fromkeys(arrays) if x.constant is None]

    def body(r: ScalarBuilder, elements: Sequence[SSAValue]) -> SSAValue:
        element_of = dict(zip(read, elements))
        scalars = [scalar_of(r, a, element_of.get(a)) if isinstance(a, Array) else a for a in arguments]
        return build(r, dtype, *scalars)

    maps = [broadcast_map(x.dims, dims) for x in read]
    init = graph.empty(dims, CARRIED[dtype])
    value = graph.generic([x.value for x in read], maps, init, AffineMap.identity(len(dims)), body)
    return graph.array(value, dtype, dims)


def converted(graph: Graph, x: Array, dtype: Attribute) -> Array:
    """`x.to(dtype)`"""
    if x.dtype == dtype:
        return x
    if x.constant is not None:
        return graph.full(dtype, x.dims, x.constant)
    return elementwise(graph, lambda r, target, element: r.convert(element, target), dtype, [x])


def broadcast_to(graph: Graph, x: Array, dims: Sequence[Size]) -> Array:
    """`x` repeated along dims of size 1 or new ones."""
    if x.constant is not None:
        return graph.full(x.dtype, dims, x.constant)
    init = graph.empty(dims, CARRIED[x.dtype])
    maps = [broadcast_map(x.dims, dims)]
    value = graph.generic([x.value], maps, init, AffineMap.identity(len(dims)), lambda r, elements: elements[0])
    return graph.array(value, x.dtype, dims)


# -- recipes ----------------------------------------------------------------------------------------------------------


def recipe(graph: Graph, entry: Entry, types: Sequence[VTensorType], arguments: Sequence[Any], which: int = 0) -> Array:
    """Result number `which` of a builder of kind tensor, each element computed at its position."""
    type_ = types[which]
    scratch = ScalarBuilder(Block(), graph.r.size)  # built once to learn the sizes
    sizes = _dims(_built(entry, types, arguments, scratch)[which])
    scratch.finish()
    dims = [_size(graph, dim, declared) for dim, declared in zip(sizes, type_.shape, strict=True)]
    block = Block(arg_types=[CARRIED[type_.dtype]])
    block.args[0].name_hint = "out"
    r = ScalarBuilder(block, graph.r.size)
    r.checked = "all"
    result = _built(entry, types, arguments, r)[which]
    if isinstance(result, Number):
        element = r.convert(result, type_.dtype)
    else:
        assert isinstance(result, Scalar | Tensor)
        positions = [_position(r, d) for d in range(len(dims))]
        element = r.convert_value(result.at(positions if result.dims else []), result.dtype, type_.dtype)
    block.add_op(linalg.YieldOp(element))
    r.finish()
    inputs, maps = _operands(graph, r, block, len(dims))
    r.finish()
    init = graph.empty(dims, CARRIED[type_.dtype])
    return graph.array(graph.structured(inputs, maps, init, AffineMap.identity(len(dims)), block), type_.dtype, dims)


def _built(entry: Entry, types: Sequence[VTensorType], arguments: Sequence[Any], r: ScalarBuilder) -> Sequence[Value]:
    built = entry.build(r, types, *(_seen(r, argument) for argument in arguments))
    return built if isinstance(built, tuple) else (built,)


def _seen(r: ScalarBuilder, argument: Any) -> Any:
    """What a builder sees of an argument."""
    if isinstance(argument, list):
        return [_seen(r, item) for item in argument]
    if not isinstance(argument, Array):
        return argument
    sizes = [-1 if size.static is None else size.static for size in argument.dims]
    if argument.constant is not None:
        constant = r.number(argument.dtype, argument.constant)
        dims = [size if size >= 0 else (argument.value, d) for d, size in enumerate(sizes)]
        return Tensor(r, dims, argument.dtype, lambda _: constant) if dims else Scalar(constant, argument.dtype)
    name = argument.value.name_hint or "tensor"
    return captured(r, argument.value, VTensorType(sizes, argument.dtype), name)


def _dims(value: Value) -> Sequence[Any]:
    return value.dims if isinstance(value, Scalar | Tensor) else ()


def _size(graph: Graph, dim: Any, declared: int) -> Size:
    if isinstance(dim, int) and dim >= 0:
        return Size(dim)
    if isinstance(dim, tuple):
        return graph.dim(*dim)
    if declared >= 0:
        return Size(declared)
    raise Unsupported("a size of the result is only known at run time")


def _position(r: ScalarBuilder, dim: int) -> SSAValue:
    value = r.emit(linalg.IndexOp, (), index_type, {"dim": IntegerAttr(dim, i64)})
    value.name_hint = f"i{dim}"
    r.positions.add(value)
    return value


def _operands(graph: Graph, r: ScalarBuilder, block: Block, rank: int) -> tuple[list[SSAValue], list[AffineMap]]:
    """Makes block arguments of what the body reads at its own positions; the operands for them, and their maps."""
    reads: dict[tuple[SSAValue, AffineMap], list[tensor.ExtractOp]] = {}
    for op in block.walk():
        if not isinstance(op, tensor.ExtractOp):
            continue
        picked = [_picked(r, index, graph.dim(op.tensor, d)) for d, index in enumerate(op.indices)]
        chosen = [dim for dim in picked if dim is not None]
        if -1 not in chosen and len(set(chosen)) == len(chosen):
            reads.setdefault((op.tensor, dims_map(rank, picked)), []).append(op)
        elif all(r.is_position(index) or dim is None for index, dim in zip(op.indices, picked, strict=True)):
            op.attributes.pop("attnc.checked", None)
            op.attributes.pop("attnc.name", None)
    for position, ops in enumerate(reads.values()):
        argument = block.insert_arg(ops[0].result.type, position)
        argument.name_hint = "in"
        for op in ops:
            op.result.replace_all_uses_with(argument)
            op.detach()
            op.erase()
    return [source for source, _ in reads], [map_ for _, map_ in reads]


def _picked(r: ScalarBuilder, index: SSAValue, size: Size) -> int | None:
    """The domain's dim that an index is, None for 0 along a dim of size 1, -1 for anything else."""
    owner = index.owner
    if isinstance(owner, linalg.IndexOp):
        return cast(linalg.IndexOp, owner).dim.value.data
    return None if r.literal(index) == 0 and size == Size(1) else -1
