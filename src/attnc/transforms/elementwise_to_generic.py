"""Operations on whole tensors as linalg.generic: arith and math on tensors, linalg.copy, linalg.fill, linalg.reduce."""

from __future__ import annotations

from typing import cast

from xdsl.dialects.arith import ConstantOp
from xdsl.dialects.builtin import AffineMapAttr, DenseIntOrFPElementsAttr, TensorType
from xdsl.dialects.linalg import ops as linalg
from xdsl.dialects.linalg.attrs import IteratorTypeAttr
from xdsl.ir import Block, Operation, Region, SSAValue, Use
from xdsl.ir.affine import AffineDimExpr, AffineMap
from xdsl.rewriter import InsertPoint, Rewriter

from attnc.dialects.building import Builder
from attnc.dialects.linalg_ext import OnlineAttentionOp
from attnc.transforms import tensor_views as views


def to_generic(op: Operation) -> None:
    """Replaces `op`, if it is such an operation."""
    if isinstance(op, linalg.CopyOp):
        _replace(op, list(op.inputs), op.outputs[0], None)
    elif isinstance(op, linalg.ReduceOp):
        _reduce(op)
    elif isinstance(op, linalg.FillOp):
        _fill(op)
    elif (
        op.name.startswith(("arith.", "math."))
        and not isinstance(op, ConstantOp)
        and len(op.results) == 1
        and isinstance(op.results[0].type, TensorType)
    ):
        _elementwise(op)


def _elementwise(op: Operation) -> None:
    block = Block()
    build = Builder(block)
    type_ = cast(TensorType, op.results[0].type)
    model = next(operand for operand in op.operands if isinstance(operand.type, TensorType))
    init = views.empty(build, views.sizes_of(model, build), type_.element_type)
    if init.type != type_:
        init = views.cast_to(build, init, type_)
    Rewriter.insert_op(_take(block), InsertPoint.before(op))
    _replace(op, list(op.operands), init, op)


def _take(block: Block) -> list[Operation]:
    ops = list(block.ops)
    for op in ops:
        op.detach()
    return ops


def _replace(op: Operation, inputs: list[SSAValue], init: SSAValue, scalar: Operation | None) -> None:
    """A generic over the whole of `init`, whose body is `scalar` on elements (or the element itself)."""
    type_ = cast(TensorType, init.type)
    tensors = [value for value in inputs if isinstance(value.type, TensorType)]
    elements = [cast(TensorType, value.type).element_type for value in (*tensors, init)]
    block = Block(arg_types=elements)
    own = iter(block.args)
    arguments = [next(own) if isinstance(value.type, TensorType) else value for value in inputs]
    result: SSAValue = arguments[0]
    if scalar is not None:
        copy = type(scalar).create(
            operands=arguments,
            result_types=[type_.element_type],
            properties=dict(scalar.properties),
            attributes=dict(scalar.attributes),
        )
        block.add_op(copy)
        result = copy.results[0]
    block.add_op(linalg.YieldOp(result))
    rank = len(type_.shape)
    identity = AffineMapAttr(AffineMap.identity(rank))
    generic = linalg.GenericOp(
        tensors,
        [init],
        Region(block),
        [identity] * (len(tensors) + 1),
        [IteratorTypeAttr.parallel()] * rank,
        [op.results[0].type],
    )
    generic.attributes.update({k: v for k, v in op.attributes.items() if k.startswith("attnc.")})
    Rewriter.insert_op(generic, InsertPoint.before(op))
    generic.results[0].name_hint = op.results[0].name_hint
    op.results[0].replace_all_uses_with(generic.results[0])
    Rewriter.erase_op(op)


def _fill(op: linalg.FillOp) -> None:
    """A filled tensor of known sizes is a constant, of other sizes an elementwise operation, unless it begins a reduction."""
    scalar = op.inputs[0].owner
    type_ = cast(TensorType, op.results[0].type)
    if all(_begins(use) for use in op.results[0].uses):
        return
    if isinstance(scalar, ConstantOp) and all(size >= 0 for size in type_.get_shape()):
        dense = DenseIntOrFPElementsAttr.from_list(type_, [scalar.value.value.data])  # pyright: ignore
        constant = ConstantOp(dense)
        Rewriter.insert_op(constant, InsertPoint.before(op))
        op.results[0].replace_all_uses_with(constant.result)
        Rewriter.erase_op(op)
    else:
        _replace(op, list(op.inputs), op.outputs[0], None)


def _begins(use: Use) -> bool:
    """Whether a tensor is what a reduction or an online_attention begins with."""
    user = use.operation
    if isinstance(user, linalg.GenericOp):
        return use.index >= len(user.inputs)
    return isinstance(user, OnlineAttentionOp) or (isinstance(user, linalg.ReduceOp) and use.index > 0)


def _reduce(op: linalg.ReduceOp) -> None:
    """The reduction as a generic: its region gets the element first, then what is combined so far."""
    reduced = {int(d) for d in op.dimensions.get_values()}
    rank = len(cast(TensorType, op.input.type).shape)
    kept = tuple(AffineDimExpr(d) for d in range(rank) if d not in reduced)
    maps = [AffineMapAttr(AffineMap.identity(rank)), AffineMapAttr(AffineMap(rank, 0, kept))]
    iterators = [IteratorTypeAttr.reduction() if d in reduced else IteratorTypeAttr.parallel() for d in range(rank)]
    region = op.region
    op.detach_region(region)
    generic = linalg.GenericOp([op.input], [op.init], region, maps, iterators, [op.init.type])
    Rewriter.insert_op(generic, InsertPoint.before(op))
    for old, new in zip(op.result, generic.results, strict=True):
        new.name_hint = old.name_hint
        old.replace_all_uses_with(new)
    Rewriter.erase_op(op)
