"""Attention in exported graphs: torch's flex HOP and the operator `attnc::attention`, as `torch.attnc_flex_attention`.

    %out, %lse, %max = flex_attention(q, k, v, score_graph, block_mask_tuple, scale, options, score_captures, mask_captures)
=>
    func.func private @score_mod0(%score, %b, %h, %q, %kv, <captures>) …
    %out, %natural = "torch.attnc_flex_attention"(%q, %k, %v, %scale, <captures>, [%blocks]) {score_mod_fn = @score_mod0, …}
    %lse = torch.aten.mul.Scalar %natural, %log2e              # the HOP's lse and max are in log2 units

A BlockMask's lists become one tensor of block classes, by ATen operations in the graph. Where the graph itself made the lists
from a table of blocks, as create_block_mask does, the classes are taken from that table, or, where they follow from the mask
function (exported_block_mask.py), are not needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx
from xdsl.dialects import func
from xdsl.dialects.builtin import FunctionType
from xdsl.ir import Block, Region, SSAValue

from attnc.capture.exported_block_mask import is_redundant, table_of
from attnc.capture.exported_nodes import GraphWriter, needed_nodes, type_of
from attnc.capture.record import MASK_ARGUMENTS, SCORE_ARGUMENTS
from attnc.dialects.torch import FlexAttentionOp, FloatType, VTensorType, bool_, si8, si64, torch_op
from attnc.errors import UnsupportedGraphError

_UNBOUNDED = 1 << 30  # the block size of torch's BlockMask for no mask at all


def flex(writer: GraphWriter, node: fx.Node) -> list[SSAValue]:
    """The three results of torch's flex HOP."""
    query, key, value, score_graph, block_mask, scale, _, score_captures, mask_captures = node.args
    assert isinstance(block_mask, tuple | list) and isinstance(score_captures, tuple | list)
    assert isinstance(mask_captures, tuple | list)
    *_, query_block, key_block, mask_graph = block_mask
    score = _mod(writer, score_graph, "score_mod", SCORE_ARGUMENTS)
    mask = _mod(writer, mask_graph, "mask_mod", MASK_ARGUMENTS)
    blocks = None
    if not (query_block == key_block == _UNBOUNDED):
        lists = block_mask[2:6]
        mask_module = writer.values[cast(fx.Node, mask_graph)]
        if not is_redundant(lists, (int(cast(int, query_block)), int(cast(int, key_block))), mask_module):
            blocks = _classes(writer, *lists)
    wanted = [user.args[1] for user in node.users]
    return _attention(
        writer,
        [writer.operand(x) for x in (query, key, value)],
        writer.operand(scale, "float") if scale is not None else None,
        (score, [writer.operand(x) for x in score_captures]),
        (mask, [writer.operand(x) for x in mask_captures]),
        (blocks, (query_block, key_block)) if blocks is not None else None,
        (1 in wanted, 2 in wanted),
        log2=True,
    )


def _attention(
    writer: GraphWriter,
    tensors: Sequence[SSAValue],
    scale: SSAValue | None,
    score: tuple[str | None, Sequence[SSAValue]],
    mask: tuple[str | None, Sequence[SSAValue]],
    blocks: tuple[SSAValue, Any] | None,
    wanted: tuple[bool, bool],
    log2: bool,
) -> list[SSAValue]:
    """out, lse, max; what is not wanted is out again, which nobody looks at."""
    query = tensors[0].type
    assert isinstance(query, VTensorType)
    if scale is None:
        scale = writer.constant(1.0 / math.sqrt(query.shape[-1]))
    if not isinstance(scale.type, FloatType):
        raise UnsupportedGraphError("a scale that is no float")
    query_value, key, value = tensors
    op = FlexAttentionOp(
        query_value,
        key,
        value,
        scale,
        score_mod=score[0],
        score_operands=score[1],
        mask_mod=mask[0],
        mask_operands=mask[1],
        blocks=blocks[0] if blocks is not None else None,
        block_size=blocks[1] if blocks is not None else None,
        return_lse=wanted[0],
        return_max=wanted[1],
    )
    writer.placed(op)
    out, *rest = op.outputs
    out.name_hint = "attention"
    if log2:
        scaled = [writer.constant(math.log2(math.e))] if rest else []
        rest = [writer.aten("mul.Scalar", [x, scaled[0]], [x.type]).results[0] for x in rest]
    statistics = iter(rest)
    return [out, *(next(statistics) if asked else out for asked in wanted)]


def _mod(writer: GraphWriter, graph_node: Any, name: str, arguments: Sequence[str]) -> str:
    """Adds a mod's function to the module; its name there."""
    mod = writer.values[graph_node]
    assert isinstance(mod, fx.GraphModule)
    taken = {op.sym_name.data for op in writer.module.ops if isinstance(op, func.FuncOp)}
    name = next(f"{name}{number}" for number in range(len(taken) + 1) if f"{name}{number}" not in taken)
    placeholders = [node for node in mod.graph.nodes if node.op == "placeholder"]
    block = Block(arg_types=[type_of(node) for node in placeholders])
    for position, (node, argument) in enumerate(zip(placeholders, block.args, strict=True)):
        argument.name_hint = arguments[position] if position < len(arguments) else node.name
    inner = GraphWriter(block, dict(zip(placeholders, block.args, strict=True)), writer.module, mod)
    output = next(node for node in mod.graph.nodes if node.op == "output")
    needed = needed_nodes(output)
    for node in mod.graph.nodes:
        if node.op in ("call_function", "get_attr") and node in needed:
            inner.write(node)
    (returned,) = output.args
    if isinstance(returned, tuple | list):
        (returned,) = returned
    result = inner.operand(returned)
    block.add_op(func.ReturnOp(result))
    types = FunctionType.from_lists([argument.type for argument in block.args], [result.type])
    writer.module.body.block.add_op(func.FuncOp(name, types, Region(block), "private"))
    return name


# -- BlockMask --------------------------------------------------------------------------------------------------------


def _classes(writer: GraphWriter, num: Any, indices: Any, full_num: Any, full_indices: Any) -> SSAValue:
    """The class of each block [B, H, query blocks, key blocks]: 0 not listed, 1 partial, 2 full."""
    partial = _listed(writer, num, indices)
    if full_num is None or full_indices is None:
        return _cast(writer, partial)
    full = _listed(writer, full_num, full_indices)
    type_ = partial.type
    assert isinstance(type_, VTensorType)
    two = writer.aten("mul.Scalar", [_cast(writer, full), writer.constant(2)], [VTensorType(type_.shape, si8)]).results[0]
    summed = [_cast(writer, partial), two, writer.constant(1)]
    return writer.aten("add.Tensor", summed, [VTensorType(type_.shape, si8)]).results[0]


def _cast(writer: GraphWriter, table: SSAValue) -> SSAValue:
    assert isinstance(table.type, VTensorType)
    op = torch_op("prims.convert_element_type").create(
        operands=[table, writer.constant(torch.int8)], result_types=[VTensorType(table.type.shape, si8)]
    )
    return writer.placed(op).results[0]


def _listed(writer: GraphWriter, num: fx.Node, indices: fx.Node) -> SSAValue:
    """Whether a block is among the first `num` of its row's `indices`, as a table of integers or bools."""
    table = table_of(num, indices)
    if table is not None:
        return writer.values[table]
    # any over j of (j < num) & (indices[j] == column)
    shape = list(type_of(indices).shape)  # type: ignore[union-attr]  # pyright: ignore[reportAttributeAccessIssue]
    count, columns = shape[-1], shape[-1]
    if count < 0:
        raise UnsupportedGraphError("a BlockMask whose lists have a length that is only known at run time")
    none = writer.constant(None)
    positions = writer.aten("arange", [writer.constant(count), none, none, none, none], [VTensorType([count], si64)]).results[0]
    minus_one = writer.constant(-1)
    element = type_of(num).dtype  # type: ignore[union-attr]  # pyright: ignore[reportAttributeAccessIssue]
    counted = writer.aten("unsqueeze", [writer.values[num], minus_one], [VTensorType([*shape[:-1], 1], element)]).results[0]
    present = writer.aten("lt.Tensor", [positions, counted], [VTensorType(shape, bool_)]).results[0]
    wide = writer.aten("unsqueeze", [present, minus_one], [VTensorType([*shape, 1], bool_)]).results[0]
    element = type_of(indices).dtype  # type: ignore[union-attr]  # pyright: ignore[reportAttributeAccessIssue]
    columns_of = writer.aten("unsqueeze", [writer.values[indices], minus_one], [VTensorType([*shape, 1], element)]).results[0]
    here = writer.aten("eq.Tensor", [columns_of, positions], [VTensorType([*shape, columns], bool_)]).results[0]
    both = writer.aten("bitwise_and.Tensor", [here, wide], [VTensorType([*shape, columns], bool_)]).results[0]
    arguments = [both, writer.constant(-2), writer.constant(False)]
    return writer.aten("any.dim", arguments, [VTensorType([*shape[:-1], columns], bool_)]).results[0]


# -- attnc::attention -------------------------------------------------------------------------------------------------


def operator(writer: GraphWriter, node: fx.Node) -> list[SSAValue]:
    """The three results of `attnc::attention`, in natural units."""
    from attnc.capture.to_torch import mod_function

    given: dict[str, Any]
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]  # pyright: ignore
    given = {**dict(zip(names, node.args)), **node.kwargs}
    if writer.read_program is None:
        raise UnsupportedGraphError("attnc::attention cannot be read here")
    program = writer.read_program(str(given["program"]))
    if program.block_size is not None or program.tensor_numbers or given.get("scale_tensor") is not None:
        raise UnsupportedGraphError("attnc::attention with a BlockMask, or with numbers or a scale that are tensors")
    record = program.record
    captures = [writer.operand(x) for x in given["captures"]]
    ints, floats = iter(given.get("ints") or ()), iter(given.get("floats") or ())
    numbers = [
        writer.operand(next(ints)) if number.kind == "int" else writer.operand(next(floats), "float")
        for number in record.numbers
    ]
    mods: list[tuple[str | None, Sequence[SSAValue]]] = []
    taken = {op.sym_name.data for op in writer.module.ops if isinstance(op, func.FuncOp)}
    for function, name, arguments in ((record.score, "score_mod", SCORE_ARGUMENTS), (record.mask, "mask_mod", MASK_ARGUMENTS)):
        if function is None:
            mods.append((None, []))
            continue
        name = next(f"{name}{number}" for number in range(len(taken) + 1) if f"{name}{number}" not in taken)
        writer.module.body.block.add_op(mod_function(record, function, name, arguments))
        mods.append((name, [captures[i] for i in function.captures] + [numbers[i] for i in function.numbers]))
    tensors = [writer.operand(given[name]) for name in ("query", "key", "value")]
    scale = given.get("scale")
    wanted = (program.return_lse, program.return_max)
    value = writer.operand(float(scale) if isinstance(scale, int) else scale) if scale is not None else None
    return _attention(writer, tensors, value, mods[0], mods[1], None, wanted, log2=False)
