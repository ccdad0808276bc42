"""What follows an online_attention: elementwise ends go into its function, initial values that count are merged after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from xdsl.dialects.builtin import AffineMapAttr, FloatAttr, TensorType
from xdsl.dialects.linalg import ops as linalg
from xdsl.dialects.linalg.attrs import IteratorTypeAttr
from xdsl.ir import Block, Operation, OpResult, Region, SSAValue
from xdsl.ir.affine import AffineDimExpr, AffineMap

from attnc.analysis.attention import constant_of
from attnc.analysis.roles import map_results
from attnc.dialects.building import Builder
from attnc.dialects.linalg_ext import AttentionLike, OnlineAttentionOp
from attnc.transforms import tensor_views as views

if TYPE_CHECKING:
    from attnc.transforms.outline_attention import _Outlining

NEUTRAL = (0.0, float("-inf"), 0.0)
"""Initial values of accumulator, maximum and sum that change nothing."""


@dataclass
class FunctionResult:
    """A result of the function: `inside` it, what it is for the caller (`outside`), which dimension of the attention each of
    its dimensions is, and the caller's operation that computed it (None for the attention itself)."""

    inside: SSAValue
    outside: SSAValue
    picked: tuple[int | None, ...]
    source: Operation | None = None


def filled_with(value: SSAValue) -> float | None:
    """The number that a tensor is filled with, if it is."""
    if isinstance(value.owner, linalg.FillOp):
        return constant_of(value.owner.inputs[0])
    owner = value.owner
    if isinstance(owner, Operation) and owner.name == "arith.constant":
        attribute = owner.properties["value"]
        if getattr(attribute, "is_splat", lambda: False)():
            return cast(FloatAttr, attribute.get_attrs()[0]).value.data  # pyright: ignore
    return None


def is_neutral(op: OnlineAttentionOp) -> bool:
    """Whether its initial values change nothing."""
    return all(filled_with(init) == neutral for init, neutral in zip(op.inits, NEUTRAL, strict=True))


def absorbed_results(outlining: _Outlining, inner: Builder, attention: AttentionLike) -> list[FunctionResult]:
    """The results that the caller needs: where elementwise operations on the attention's results alone follow, theirs."""
    op = outlining.op
    count = len(op.inits)
    own = [
        FunctionResult(inside, outside, map_results(map_))
        for inside, outside, map_ in zip(attention.results, op.results, op.maps[-count:], strict=True)
    ]
    known = {result.outside: result for result in own}
    continues = isinstance(op, OnlineAttentionOp) and not is_neutral(op)
    ends = [] if continues else _absorb(outlining, inner, known)
    taken = {result.source for result in ends}
    needed = [result for result in own if any(use.operation not in taken for use in result.outside.uses)]
    if continues and own[1] not in needed:
        needed.append(own[1])  # what is merged is relative to the maximum
    outlining.absorbed = [result.source for result in ends if result.source is not None]
    for end in list(ends):
        if all(use.operation in taken for use in end.outside.uses):
            ends.remove(end)  # an intermediate step of another one
    return [*ends, *needed] or own[:1]


def _absorb(outlining: _Outlining, inner: Builder, known: dict[SSAValue, FunctionResult]) -> list[FunctionResult]:
    found: list[FunctionResult] = []
    block = outlining.op.parent
    assert block is not None
    for op in block.ops:
        if not isinstance(op, linalg.GenericOp) or len(op.results) != 1 or not op.inputs:
            continue
        if all(input_ in known for input_ in op.inputs) and (result := _inside(outlining, inner, op, known)) is not None:
            found.append(result)
            known[op.results[0]] = result
    return found


def _inside(
    outlining: _Outlining, inner: Builder, op: linalg.GenericOp, known: dict[SSAValue, FunctionResult]
) -> FunctionResult | None:
    """The same elementwise operation on the function's values, if it is one: each of its dimensions is one of the
    attention's."""
    if any(iterator.data.value != "parallel" for iterator in op.iterator_types):
        return None
    body = op.body.block
    last = body.last_op
    assert last is not None
    local: set[SSAValue] = set(body.args)
    for each in body.ops:
        local.update(each.results)
    if body.args[-1].uses or any(not each.name.startswith(("arith.", "math.", "linalg.yield")) for each in body.ops):
        return None
    if any(operand not in local and constant_of(operand) is None for each in body.ops for operand in each.operands):
        return None
    dims: dict[int, int] = {}
    maps = [attribute.data for attribute in op.indexing_maps]
    try:
        picked = [map_results(map_) for map_ in maps]
    except ValueError:
        return None
    for input_, own in zip(op.inputs, picked, strict=False):
        for mine, theirs in zip(own, known[input_].picked, strict=True):
            if mine is not None and theirs is not None and dims.setdefault(mine, theirs) != theirs:
                return None
            if (mine is None) != (theirs is None):
                return None
    if any(dim is not None and dim not in dims for dim in picked[-1]) or len(set(dims.values())) != len(dims):
        return None
    inputs = [known[input_].inside for input_ in op.inputs]
    rank = max(len(cast(TensorType, input_.type).shape) for input_ in inputs)
    result_dims = {dims[dim] for dim in picked[-1] if dim is not None}
    if result_dims != ({*outlining.op.roles.row, *outlining.op.roles.n} if rank == 5 else set(outlining.op.roles.row)):
        return None
    type_ = cast(TensorType, op.results[0].type)
    columns = cast(TensorType, next(i.type for i in inputs if len(cast(TensorType, i.type).shape) == rank)).get_shape()[-1]
    sizes: list[views.Size] = [*outlining.row_sizes, columns][:rank] if rank == 5 else list(outlining.row_sizes)
    if rank == 5 and columns < 0:
        return None
    init = views.empty(inner, sizes, type_.element_type)
    block = Block(arg_types=[cast(TensorType, value.type).element_type for value in (*inputs, init)])
    mapper: dict[SSAValue, SSAValue] = dict(zip(body.args, block.args, strict=True))
    for each in body.ops:
        for operand in each.operands:
            if operand not in mapper and operand not in local:
                mapper[operand] = inner.constant(cast(float, constant_of(operand)), operand.type)
        block.add_op(each.clone(mapper))
    identity = AffineMap.identity(rank)
    rows = AffineMap(rank, 0, tuple(AffineDimExpr(dim) for dim in range(4)))
    new_maps = [identity if len(cast(TensorType, value.type).shape) == rank else rows for value in (*inputs, init)]
    generic = linalg.GenericOp(
        inputs,
        [init],
        Region(block),
        [AffineMapAttr(map_) for map_ in new_maps],
        [IteratorTypeAttr.parallel()] * rank,
        [init.type],
    )
    inner.insert(generic, op.results[0].name_hint)
    outside = tuple(dims[dim] if dim is not None else None for dim in picked[-1])
    return FunctionResult(generic.results[0], op.results[0], outside, op)


def merge_initial_values(
    outlining: _Outlining, op: OnlineAttentionOp, replaced: list[tuple[OpResult | SSAValue, SSAValue]]
) -> list[tuple[SSAValue, SSAValue]]:
    """The caller's values for the attention's results, initial values that count included:

    max' = max(max0, max);  acc' = acc0 · exp(max0 - max') + acc · exp(max - max');  sum' likewise.
    """
    if is_neutral(op):
        return list(replaced)
    fresh = dict(replaced)
    build = outlining.build
    max_ = fresh.get(op.max_result)
    assert max_ is not None, "the maximum is a result wherever initial values count"
    max_map = op.maps[-2]
    merged: list[tuple[SSAValue, SSAValue]] = []
    for old, value in replaced:
        position = list(op.results).index(cast(OpResult, old))
        merged.append((old, _merge(build, op, position, value, max_, max_map)))
    return merged


def _merge(
    build: Builder, op: OnlineAttentionOp, position: int, value: SSAValue, max_: SSAValue, max_map: AffineMap
) -> SSAValue:
    init = op.inits[position]
    type_ = cast(TensorType, init.type)
    element = type_.element_type
    own = map_results(op.maps[-3 + position])
    dims = [dim for dim in own if dim is not None]
    rank = len(own)
    identity = AffineMapAttr(AffineMap.identity(rank))
    places = [dims.index(dim) if dim in dims else None for dim in map_results(max_map)]
    row = AffineMapAttr(AffineMap(rank, 0, tuple(AffineDimExpr(own.index(dims[p])) for p in places if p is not None)))
    inputs = [init, value, op.max, max_]
    block = Block(arg_types=[cast(TensorType, v.type).element_type for v in (*inputs, init)])
    inner = Builder(block)
    old, new, old_max, new_max, _ = block.args
    top = inner.binary("maximumf", old_max, new_max, "top")
    result: SSAValue = top
    if position != 1:
        lowest = inner.constant(float("-inf"), top.type)
        dead = inner.compare_floats("oeq", top, lowest, "dead")
        anchor = inner.select(dead, inner.constant(0.0, top.type), top, "anchor")
        parts = []
        for x, m in ((old, old_max), (new, new_max)):
            factor = inner.unary_math("exp", inner.binary("subf", m, anchor, "below"), "factor")
            parts.append(inner.binary("mulf", x, factor, "rescaled"))
        result = inner.binary("addf", parts[0], parts[1], "merged")
    inner.insert(linalg.YieldOp(result))
    out = views.empty(build, views.sizes_of(init, build), element)
    generic = linalg.GenericOp(
        inputs, [out], Region(block), [identity, identity, row, row, identity], [IteratorTypeAttr.parallel()] * rank, [type_]
    )
    return build.add(generic, value.name_hint)
