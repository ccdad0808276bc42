"""Attention becomes a running sum: maximum and sum appear, and the division at the end.

Before:

    %r = "iree_linalg_ext.attention"(%q, %k, %v, %scale, %init) <{indexing_maps = [#q, #k, #v, #s, #o]}> ({region})

After:

    %acc0 = linalg.fill 0, %max0 = linalg.fill -inf, %sum0 = linalg.fill 0
    %acc, %max, %sum = "iree_linalg_ext.online_attention"(%q, %k, %v, %scale, %acc0, %max0, %sum0)
        <{indexing_maps = [#q, #k, #v, #s, #o, #row, #row]}> ({region})
    %r = linalg.generic ins(%acc, %sum) outs(%init) { sum == 0 ? 0 : acc / sum, rounded to the type of %init }

The accumulators have the type of the region's score: f32, or f64. A mask operand becomes the end of the region:
integers as `select(mask != 0, score, -inf)`, floats as `score + mask`.
"""

from __future__ import annotations

from typing import cast

from xdsl.dialects import tensor
from xdsl.dialects.arith import ConstantOp
from xdsl.dialects.builtin import AffineMapAttr, AnyFloat, FloatAttr, IntegerType, ModuleOp, TensorType
from xdsl.dialects.linalg import ops as linalg
from xdsl.dialects.linalg.attrs import IteratorTypeAttr
from xdsl.ir import Block, Operation, Region, SSAValue
from xdsl.ir.affine import AffineDimExpr, AffineMap
from xdsl.rewriter import InsertPoint, Rewriter

from attnc.analysis.roles import map_dims, map_results
from attnc.dialects.building import Builder
from attnc.dialects.linalg_ext import AttentionOp, IndexOp, OnlineAttentionOp, YieldOp
from attnc.target import Target

NAME = "convert-attention-to-online-attention"


def run(module: ModuleOp, target: Target) -> None:
    """Rewrites every `iree_linalg_ext.attention` of the module."""
    for op in list(module.walk()):
        if isinstance(op, AttentionOp):
            convert(op)
        elif isinstance(op, OnlineAttentionOp) and op.mask is not None:
            convert_mask_operand(op)


def convert(op: AttentionOp) -> OnlineAttentionOp:
    """Rewrites one attention; its users get the finalising generic's result."""
    element = op.region.block.args[0].type
    init_type = cast(TensorType, op.init.type)
    maps = list(op.indexing_maps)
    if op.mask is not None:
        append_mask(op)
        maps.pop(4)
    block = Block()
    build = Builder(block)
    zero = build.constant(0.0, element, "zero")
    minus_infinity = build.constant(float("-inf"), element, "minus_infinity")

    out_dims = map_dims(op.maps[-1])
    row_dims = tuple(dim for dim in out_dims if dim in op.roles.row)
    extents = op.extents
    shape = dict(zip(out_dims, init_type.get_shape(), strict=True))
    sizes: dict[int, SSAValue] = {}
    for dim in out_dims:
        if shape[dim] < 0:
            sizes[dim] = _size_of(*extents[dim], build)

    def filled(dims: tuple[int, ...], value: SSAValue, hint: str) -> SSAValue:
        type_ = TensorType(element, [shape[dim] for dim in dims])
        empty = build.add(tensor.EmptyOp([sizes[dim] for dim in dims if dim in sizes], type_), f"{hint}_empty")
        return build.add(linalg.FillOp([value], [empty]), hint)

    acc = filled(out_dims, zero, "acc_init")
    max_ = filled(row_dims, minus_infinity, "max_init")
    sum_ = filled(row_dims, zero, "sum_init")
    num_dims = op.maps[0].num_dims
    row_map = AffineMapAttr(AffineMap(num_dims, 0, tuple(AffineDimExpr(dim) for dim in row_dims)))
    region = op.region
    op.detach_region(region)
    online = OnlineAttentionOp.create(
        operands=[op.query, op.key, op.value, op.scale, acc, max_, sum_],
        properties={"indexing_maps": type(op.indexing_maps)([*maps, row_map, row_map])},
        attributes=dict(op.attributes),
        regions=[region],
        result_types=[acc.type, max_.type, sum_.type],
    )
    build.insert(online, "acc", "max", "sum")
    out = build.insert(_normalise(online, op.init, out_dims, row_dims), op.result.name_hint)
    Rewriter.insert_op(_take(block), InsertPoint.before(op))
    op.result.replace_all_uses_with(out.results[0])
    op.detach()
    op.drop_all_references()
    return online


def _take(block: Block) -> list[Operation]:
    ops = list(block.ops)
    for op in ops:
        op.detach()
    return ops


def _size_of(operand: SSAValue, position: int, build: Builder) -> SSAValue:
    """The size of a dimension: the value its producer already has, or a `tensor.dim`."""
    if isinstance(operand.owner, tensor.ExpandShapeOp):
        static = operand.owner.static_output_shape.get_values()
        if static[position] < 0:
            return operand.owner.dynamic_output_shape[sum(size < 0 for size in static[:position])]
    return build.add(tensor.DimOp(operand, build.constant(position)), "size")


def _normalise(
    online: OnlineAttentionOp, init: SSAValue, out_dims: tuple[int, ...], row_dims: tuple[int, ...]
) -> linalg.GenericOp:
    """`out = acc / sum`; a row without a live key, whose sum is 0, gives 0."""
    type_ = cast(TensorType, init.type)
    element = online.region.block.args[0].type
    block = Block(arg_types=[element, element, type_.element_type])
    acc, sum_, _ = block.args
    acc.name_hint, sum_.name_hint = "acc", "sum"
    build = Builder(block)
    zero = build.constant(0.0, element, "zero")
    none = build.compare_floats("oeq", sum_, zero, "none")
    quotient = build.binary("divf", acc, sum_, "quotient")
    result = build.select(none, zero, quotient, "normalised")
    if type_.element_type != element:
        result = build.cast("truncf", result, type_.element_type, "rounded")
    build.insert(linalg.YieldOp(result))
    rank = len(out_dims)
    identity = AffineMapAttr(AffineMap.identity(rank))
    rows = AffineMapAttr(AffineMap(rank, 0, tuple(AffineDimExpr(out_dims.index(dim)) for dim in row_dims)))
    return linalg.GenericOp(
        [online.acc_result, online.sum_result],
        [init],
        Region(block),
        [identity, rows, identity],
        [IteratorTypeAttr.parallel()] * rank,
        [type_],
    )


def convert_mask_operand(op: AttentionOp | OnlineAttentionOp) -> None:
    """Rewrites an attention with a mask operand to one whose region ends with it."""
    append_mask(op)
    maps = list(op.indexing_maps)
    maps.pop(4)
    region = op.region
    op.detach_region(region)
    new = type(op).create(
        operands=[operand for place, operand in enumerate(op.operands) if place != 4],
        properties={"indexing_maps": type(op.indexing_maps)(maps)},
        attributes=dict(op.attributes),
        regions=[region],
        result_types=op.result_types,
    )
    for result, old in zip(new.results, op.results, strict=True):
        result.name_hint = old.name_hint
    Rewriter.replace_op(op, new)


def append_mask(op: AttentionOp | OnlineAttentionOp) -> None:
    """Lets the mask operand act at the end of the region instead."""
    assert op.mask is not None
    mask_type = cast(TensorType, op.mask.type)
    last = op.region.block.last_op
    assert isinstance(last, YieldOp)
    score = last.value
    block = Block()
    build = Builder(block)
    indices = [build.constant(0) if dim is None else build.add(IndexOp(dim), f"i{dim}") for dim in map_results(op.maps[4])]
    element = build.add(tensor.ExtractOp(op.mask, indices, mask_type.element_type), "mask")
    if isinstance(element.type, IntegerType):
        if element.type.width.data != 1:
            element = build.compare("ne", element, build.constant(0, element.type), "kept")
        minus_infinity = ConstantOp(FloatAttr(float("-inf"), cast(AnyFloat, score.type)))
        result = build.select(element, score, build.add(minus_infinity, "minus_infinity"), "masked")
    else:
        if element.type != score.type:
            wider = cast(AnyFloat, element.type).bitwidth < cast(AnyFloat, score.type).bitwidth
            element = build.cast("extf" if wider else "truncf", element, score.type)
        result = build.binary("addf", score, element, "biased")
    Rewriter.insert_op(_take(block), InsertPoint.before(last))
    last.operands[0] = result
