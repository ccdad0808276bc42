"""A kernel's function for one layout: strides, head dims and the number of queries that a plan has found are written into it.

Before:

    func.func private @attention(%query: tensor<?x?x?x?xf32>, …) attributes {attnc.strides = ["?x?x?x?", …]}

After, for keys that lie transposed, and head dims of 64:

    func.func private @attention(%query: tensor<?x?x?x64xf32>, …) attributes {attnc.strides = ["?x?x?x1", "?x?x1x?", …]}

This is no pass of its own: the runtime asks for it when it meets a layout (`runtime/graph_attention.py`).
"""

from __future__ import annotations

from typing import Any, cast

from xdsl.dialects import tensor
from xdsl.dialects.builtin import (
    ArrayAttr,
    DenseArrayBase,
    FunctionType,
    ModuleOp,
    StringAttr,
    TensorType,
    UnitAttr,
    i64,
)
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue
from xdsl.rewriter import Rewriter

from attnc.transforms.select_tile_sizes import FEW_QUERIES
from attnc.transforms.tile_attention import STRIDED_OUT


def specialize(module: ModuleOp, variant: dict[str, Any]) -> None:
    """Writes a variant into the module's one function."""
    function = next(op for op in module.ops if isinstance(op, FuncOp))
    function.attributes["attnc.strides"] = ArrayAttr([StringAttr(strides) for strides in variant["strides"]])
    if variant["strided_out"]:
        function.attributes[STRIDED_OUT] = UnitAttr()
    if variant["few_queries"]:
        function.attributes[FEW_QUERIES] = UnitAttr()
    head_dim, value_dim = variant["head_dims"]
    block = function.body.block
    query, key, value = block.args[:3]
    queries = {query, key, *(use.operation.results[0] for use in query.uses if isinstance(use.operation, tensor.ExpandShapeOp))}
    wide = {value, *_wide_values(function)}
    for operands, size in ((queries, head_dim), (wide, value_dim)):
        for operand in operands:
            _set_last(operand, size)
    types = ([argument.type for argument in block.args], [value.type for value in cast(Operation, block.last_op).operands])
    function.properties["function_type"] = FunctionType.from_lists(*types)


def _wide_values(function: FuncOp) -> list[SSAValue]:
    """Tensors whose last dimension is that of the values: of rank 5 but for the query, and what becomes of them."""
    found: list[SSAValue] = []
    for op in function.body.block.ops:
        if isinstance(op, tensor.ExpandShapeOp):
            continue
        for result in op.results:
            if not isinstance(result.type, TensorType):
                continue
            rank = len(result.type.shape)
            if rank == 5 or (isinstance(op, tensor.CollapseShapeOp) and rank == 4):
                found.append(result)
    return found


def _set_last(value: SSAValue, size: int) -> None:
    """Makes a tensor's last dimension static."""
    type_ = cast(TensorType, value.type)
    shape = type_.get_shape()
    if shape[-1] == size:
        return
    owner = value.owner
    new = TensorType(type_.element_type, [*shape[:-1], size])
    Rewriter.replace_value_with_new_type(value, new)
    if isinstance(owner, tensor.EmptyOp):
        owner.operands = list(owner.operands)[:-1]
    elif isinstance(owner, tensor.ExpandShapeOp):
        known = list(owner.static_output_shape.get_values())
        owner.properties["static_output_shape"] = DenseArrayBase.from_list(i64, [*known[:-1], size])
        owner.operands = list(owner.operands)[:-1]
