"""`torch.func.vmap` of the operator: the mapped dimension becomes part of the batch.

Of N mapped calls of batch B one call of batch N·B is made. The mods go on seeing their own batch index, and of a captured
tensor that is mapped, too, their own slice:

    score_mod(score, b, h, q, kv)  reads bias[h]        before
    score_mod(score, b % B, h, q, kv)  reads bias[b // B][h]        after, where bias has the mapped dimension in front
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnc import torch_op
from attnc.capture.record import (
    Argument,
    Captured,
    CaptureType,
    Function,
    ListOf,
    Number,
    NumberType,
    Op,
    Operand,
    Record,
    Result,
)
from attnc.capture.record import TensorType as Type
from attnc.program_text import from_text, to_text

BATCH = {"score": 1, "mask": 0}  # which argument of a mod is the batch index


def batched(
    info: Any,
    in_dims: tuple[Any, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captures: Sequence[Tensor],
    ints: Sequence[Any] | None,
    floats: Sequence[Any] | None,
    float_tensors: Sequence[Tensor] | None,
    block_lists: Sequence[Tensor],
    program: str,
    scale: Any,
    scale_tensor: Tensor | None,
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int | None, int | None, int | None]]:
    """Results with the mapped dimension in front, and where it is. `in_dims` says where the operands have it."""
    count = info.batch_size
    numbers_mapped = any(dim is not None for dim in in_dims[6] or ())
    if numbers_mapped or (scale_tensor is not None and in_dims[10] is not None):
        operands = (query, key, value, captures, ints, floats, float_tensors, block_lists, program, scale, scale_tensor)
        return _one_by_one(count, in_dims, operands)
    read = from_text(program)
    batch = query.shape[0] if in_dims[0] is None else query.movedim(in_dims[0], 0).shape[1]
    folded = [_fold(tensor, dim, count, batch) for tensor, dim in zip((query, key, value), in_dims, strict=False)]
    mapped = tuple(dim is not None for dim in in_dims[3])
    captures = [tensor if dim is None else tensor.movedim(dim, 0) for tensor, dim in zip(captures, in_dims[3], strict=True)]
    if read.record.score is not None or read.record.mask is not None:
        record = with_mapped_captures(read.record, mapped)
        ints = [*(ints or ()), batch]
        program = to_text(replace(read, record=record))
    lists = _fold_lists(block_lists, in_dims[7], count, batch)
    out, lse, max_scores = torch_op.attention(
        *folded, captures, ints, floats, float_tensors, lists, program, scale, scale_tensor
    )
    results, dims = [], []
    for tensor, asked in ((out, True), (lse, read.return_lse), (max_scores, read.return_max)):
        results.append(tensor.unflatten(0, (count, batch)) if asked else tensor)
        dims.append(0 if asked else None)
    return tuple(results), tuple(dims)  # type: ignore[return-value]


def _fold(tensor: Tensor, dim: int | None, count: int, batch: int) -> Tensor:
    """[N, B, …] as [N·B, …]; what serves all calls stays as it is."""
    if dim is None:
        return (
            tensor if tensor.shape[0] == 1 and batch * count > 1 and tensor.shape[0] != batch else _repeat(tensor, count, batch)
        )
    tensor = tensor.movedim(dim, 0)
    if tensor.shape[1] != batch:
        tensor = tensor.expand(-1, batch, *(-1,) * (tensor.dim() - 2))
    return tensor.flatten(0, 1)


def _repeat(tensor: Tensor, count: int, batch: int) -> Tensor:
    return tensor.expand(count, batch, *tensor.shape[1:]).flatten(0, 1)


def _fold_lists(lists: Sequence[Tensor], dims: Sequence[int | None], count: int, batch: int) -> list[Tensor]:
    """A BlockMask's lists with the mapped dimension in their batch, where one of them is mapped, or has a batch of its own."""
    ranks = (3, 4, 3, 4)
    whole = []
    for tensor, dim, rank in zip(lists, dims, ranks, strict=False):
        tensor = tensor[None] if dim is None else tensor.movedim(dim, 0)
        while tensor.dim() < rank + 1:
            tensor = tensor.unsqueeze(1)
        whole.append(tensor)
    if all(tensor.shape[:2] == (1, 1) for tensor in whole):
        return [tensor[0] for tensor in whole]
    return [tensor.expand(count, batch, *tensor.shape[2:]).flatten(0, 1) for tensor in whole]


def batched_backward(info: Any, in_dims: tuple[Any, ...], *operands: Any) -> Any:
    """The backward operator, one call for each: its gradients of captured tensors are those of each call alone."""
    grads = [
        torch_op.attention_backward(*(_pick(operand, dim, index) for operand, dim in zip(operands, in_dims, strict=True)))
        for index in range(info.batch_size)
    ]
    *first, captures = zip(*grads, strict=True)
    of_captures = [torch.stack(each) for each in zip(*captures, strict=True)]
    return (*map(torch.stack, first), of_captures), (0, 0, 0, 0, [0] * len(of_captures))


def _one_by_one(count: int, in_dims: tuple[Any, ...], operands: tuple[Any, ...]) -> Any:
    """One call for each: a scale that is mapped cannot be part of the batch."""
    calls = [
        torch_op.attention(*(_pick(operand, dim, index) for operand, dim in zip(operands, in_dims, strict=True)))
        for index in range(count)
    ]
    return tuple(torch.stack(results) for results in zip(*calls, strict=True)), (0, 0, 0)


def _pick(operand: Any, dim: Any, index: int) -> Any:
    """What the call of this index sees of an operand."""
    if isinstance(operand, (list, tuple)):
        return [_pick(item, inner, index) for item, inner in zip(operand, dim or [None] * len(operand), strict=True)]
    return operand if dim is None else operand.select(dim, index)


# -- records ----------------------------------------------------------------------------------------------------------------
def with_mapped_captures(record: Record, mapped: tuple[bool, ...]) -> Record:
    """The record for a batch of N·B: the number of B is appended to its numbers; captures that are `mapped` have a dimension
    more, in front, that b // B indexes."""
    captures = tuple(
        CaptureType(c.name, Type(c.type.dtype, (None, *c.type.shape)), "") if is_mapped else c
        for c, is_mapped in zip(record.captures, mapped, strict=True)
    )
    numbers = (*record.numbers, NumberType("batch", "int"))
    place = Number(len(record.numbers))
    return Record(
        record.score and _mapped(record, record.score, BATCH["score"], place, mapped),
        record.mask and _mapped(record, record.mask, BATCH["mask"], place, mapped),
        captures,
        numbers,
    )


def _mapped(record: Record, function: Function, batch: int, place: Number, mapped: tuple[bool, ...]) -> Function:
    slices = [index for index in function.captures if mapped[index]]
    ops = [Op("aten.remainder.Scalar", (Argument(batch), place), Type("int32"))]
    if slices:
        ops.append(Op("aten.floor_divide.Scalar", (Argument(batch), place), Type("int32")))
    found: dict[int, Result] = {}
    for index in slices:
        found[index] = Result(len(ops))
        ops.append(Op("aten.index.Tensor", (Captured(index), ListOf((Result(1),))), record.captures[index].type))
    shift = len(ops)

    def renamed(operand: Operand) -> Operand:
        match operand:
            case Argument(index) if index == batch:
                return Result(0)
            case Captured(index) if index in found:
                return found[index]
            case Result(op):
                return Result(op + shift)
            case ListOf(items):
                return ListOf(tuple(map(renamed, items)))
        return operand

    ops += [replace(op, operands=tuple(map(renamed, op.operands))) for op in function.ops]
    return Function(function.arguments, tuple(ops), renamed(function.result))
