"""What MLIR asks of linalg and tensor operations and xDSL does not: asked of text that is read, so faults have their place."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import cast

from xdsl.dialects import linalg, tensor
from xdsl.dialects.builtin import DYNAMIC_INDEX, ArrayAttr, IntegerAttr, TensorType
from xdsl.ir import Operation
from xdsl.ir.affine import AffineDimExpr


def problem_of(op: Operation) -> str | None:
    """What is wrong with an operation, if anything is."""
    check = _CHECKS.get(type(op))
    return check(op) if check is not None else None


def _shape(value) -> tuple[int, ...] | None:
    return value.type.get_shape() if isinstance(value.type, TensorType) else None


def _generic(op: linalg.GenericOp) -> str | None:
    operands = [*op.inputs, *op.outputs]
    maps = [attribute.data for attribute in op.indexing_maps]
    loops = len(op.iterator_types)
    if len(maps) != len(operands):
        return f"{len(operands)} operands, but {len(maps)} indexing maps"
    if not op.outputs:
        return "it has no output"
    sizes: dict[int, int] = {}
    for n, (operand, map_) in enumerate(zip(operands, maps, strict=True)):
        if map_.num_dims != loops:
            return f"indexing map {n} has {map_.num_dims} dimensions, there are {loops} iterator types"
        shape = _shape(operand)
        if shape is None:
            if n >= len(op.inputs) or map_.results:
                return f"operand {n} is no tensor"
            continue
        if len(map_.results) != len(shape):
            return f"operand {n} has rank {len(shape)}, its indexing map {len(map_.results)} results"
        for size, result in zip(shape, map_.results, strict=True):
            if size >= 0 and isinstance(result, AffineDimExpr) and sizes.setdefault(result.position, size) != size:
                return f"dimension d{result.position} is {sizes[result.position]} in one place and {size} in operand {n}"
    if {dim for map_ in maps for dim in map_.used_dims()} != set(range(loops)):
        return "a dimension is used by no operand"
    elements = [operand.type.element_type if isinstance(operand.type, TensorType) else operand.type for operand in operands]
    if [argument.type for argument in op.body.block.args] != elements:
        return "the body's arguments must be the operands' elements"
    last = op.body.block.last_op
    if not isinstance(last, linalg.YieldOp) or [value.type for value in last.operands] != elements[len(op.inputs) :]:
        return "the body must yield one element for each output"
    if [result.type for result in op.results] != [output.type for output in op.outputs]:
        return "the results must have the types of the outputs"
    return None


def _index(op: linalg.IndexOp) -> str | None:
    parent = op.parent_op()
    while parent is not None and not isinstance(parent, linalg.GenericOp):
        parent = parent.parent_op()
    if parent is not None and not 0 <= op.dim.value.data < len(parent.iterator_types):
        return f"there is no dimension {op.dim.value.data}"
    return None


def _fill(op: linalg.FillOp) -> str | None:
    if len(op.inputs) != 1 or len(op.outputs) != 1:
        return "it takes one value and one output"
    type_ = op.outputs[0].type
    if isinstance(type_, TensorType) and op.inputs[0].type != type_.element_type:
        return f"a value of type {op.inputs[0].type} cannot fill {type_}"
    return None


def _transpose(op: linalg.TransposeOp) -> str | None:
    permutation = [int(p) for p in op.permutation.get_values()]
    return None if sorted(permutation) == list(range(len(permutation))) else f"{permutation} is no permutation"


def _broadcast(op: linalg.BroadcastOp) -> str | None:
    dimensions = [int(d) for d in op.dimensions.get_values()]
    return None if len(set(dimensions)) == len(dimensions) else f"a dimension is added twice: {dimensions}"


def _extract(op: tensor.ExtractOp) -> str | None:
    shape = _shape(op.tensor)
    if shape is not None and len(op.indices) != len(shape):
        return f"{len(op.indices)} indices into a tensor of rank {len(shape)}"
    return None


def _reshape(op: tensor.CollapseShapeOp | tensor.ExpandShapeOp) -> str | None:
    small, large = (op.result, op.src) if isinstance(op, tensor.CollapseShapeOp) else (op.src, op.result)
    merged, whole = _shape(small), _shape(large)
    assert merged is not None and whole is not None
    groups = [[index.value.data for index in group] for group in cast("ArrayAttr[ArrayAttr[IntegerAttr]]", op.reassociation)]
    if [d for group in groups for d in group] != list(range(len(whole))) and (groups or any(size != 1 for size in whole)):
        return "the reassociation must list every dimension in order"
    if len(groups) != len(merged):
        return f"{len(groups)} groups of dimensions for a tensor of rank {len(merged)}"
    for size, group in zip(merged, groups, strict=True):
        parts = [whole[d] for d in group]
        if size >= 0 and all(part >= 0 for part in parts) and prod(parts) != size:
            return f"a dimension of {size} elements is {' × '.join(map(str, parts))}"
    return None


def _slice(op: tensor.ExtractSliceOp | tensor.InsertSliceOp) -> str | None:
    inner, outer = (op.result, op.source) if isinstance(op, tensor.ExtractSliceOp) else (op.source, op.dest)
    whole, part = _shape(outer), _shape(inner)
    assert whole is not None and part is not None
    lists = [[int(x) for x in values.get_values()] for values in (op.static_offsets, op.static_sizes, op.static_strides)]
    if any(len(values) != len(whole) for values in lists):
        return f"offsets, sizes and strides must be {len(whole)} each"
    for limit, offset, size, stride in zip(whole, *lists, strict=True):
        known = DYNAMIC_INDEX not in (limit, offset, size, stride)
        if known and size > 0 and not (offset >= 0 and 0 <= offset + (size - 1) * stride < limit):
            return f"the slice reaches beyond a dimension of {limit} elements"
    place = 0
    for size in lists[1]:
        left = size if size != DYNAMIC_INDEX else -1
        if place < len(part) and (part[place] == left or (part[place] < 0 and left < 0)):
            place += 1
        elif left != 1:
            return "the slice's type does not have its sizes"
    return None if place == len(part) else "the slice's type does not have its sizes"


def _empty(op: tensor.EmptyOp) -> str | None:
    dynamic = sum(size < 0 for size in _shape(op.tensor) or ())
    return None if dynamic == len(op.dynamic_sizes) else f"{len(op.dynamic_sizes)} sizes for {dynamic} dynamic dimensions"


_CHECKS: dict[type[Operation], Callable[..., str | None]] = {
    linalg.GenericOp: _generic,
    linalg.IndexOp: _index,
    linalg.FillOp: _fill,
    linalg.TransposeOp: _transpose,
    linalg.BroadcastOp: _broadcast,
    tensor.ExtractOp: _extract,
    tensor.CollapseShapeOp: _reshape,
    tensor.ExpandShapeOp: _reshape,
    tensor.ExtractSliceOp: _slice,
    tensor.InsertSliceOp: _slice,
    tensor.EmptyOp: _empty,
}
