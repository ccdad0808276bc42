"""What the operator `attnc::attention` does: on CPU tensors, and on fake ones."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnc import checks, flex
from attnc.capture.block_mask import PARTIAL, build_classes
from attnc.capture.reads import stride_pattern
from attnc.capture.record import CaptureType, Record
from attnc.errors import ArgumentsError, BlockMaskError, DtypeError, ShapeError
from attnc.program_text import Program, from_text, with_strides
from attnc.runtime.attention import check_shapes


def run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captures: Sequence[Tensor],
    ints: Sequence[int] | None,
    floats: Sequence[float] | None,
    block_lists: Sequence[Tensor],
    program: str,
    scale: int | float | None,
    scale_tensor: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, Hq, Sq, Ev], lse and max_scores [B, Hq, Sq] (or [0] where not asked). Raises classes of `attnc.errors`."""
    read = from_text(program)
    element = query.dtype
    if not (key.dtype is element and value.dtype is element and element in checks.DTYPES):
        raise DtypeError(f"query, key and value have dtypes {query.dtype}, {key.dtype} and {value.dtype}")
    call = flex.Call()
    call.has_values = True
    call.query, call.key, call.value = query, key, value
    call.layout, call.signature = flex._layout(query, key, value, True, read.return_lse, read.return_max)
    call.scale = checks.scale_value(scale if scale_tensor is None else scale_tensor, call.signature.head_dim)
    call.record = check_operands(read.record, captures, element)
    call.captures = captures
    call.numbers = join_numbers(read.record, ints or (), floats or ())
    call.blocks = None
    if read.block_size is not None:
        call.blocks = _classes(block_lists, read, query.shape, key.shape[2])
        call.signature = flex._with_block_size(call.signature, read.block_size)
    out, lse, max_scores = flex.run(call)
    return out, query.new_empty(0) if lse is None else lse, query.new_empty(0) if max_scores is None else max_scores


def split_numbers(record: Record, numbers: Sequence[Any]) -> tuple[list[Any] | None, list[Any] | None]:
    """A record's numbers as the operator's ints and floats."""
    kinds = [type_.kind for type_ in record.numbers]
    ints = [number for kind, number in zip(kinds, numbers, strict=True) if kind == "int"]
    floats = [number for kind, number in zip(kinds, numbers, strict=True) if kind == "float"]
    return ints or None, floats or None


def join_numbers(record: Record, ints: Sequence[int], floats: Sequence[float]) -> list[int | float]:
    """The operator's ints and floats in the order of the record. Raises `ArgumentsError`."""
    kinds = [type_.kind for type_ in record.numbers]
    if kinds.count("int") != len(ints) or kinds.count("float") != len(floats):
        raise ArgumentsError(
            f"attnc::attention got {len(ints)} ints and {len(floats)} floats",
            remedy=f"its program takes {kinds.count('int')} and {kinds.count('float')}",
        )
    remaining = {"int": iter(ints), "float": map(float, floats)}
    return [next(remaining[kind]) for kind in kinds]


def check_operands(record: Record, captures: Sequence[Tensor], element: torch.dtype) -> Record:
    """The record for the strides of these captured tensors. Raises where operands and program do not fit: a graph was changed
    by hand, or a tensor has another dtype or fixed length than it was traced with."""
    if len(captures) != len(record.captures):
        raise ArgumentsError(
            f"attnc::attention got {len(captures)} captured tensors", remedy=f"its program takes {len(record.captures)}"
        )
    if record.score is not None and (record.score.arguments[0].dtype == "float64") != (element is torch.float64):
        raise DtypeError(
            f"the score_mod was traced on {record.score.arguments[0].dtype} scores, and query is {element}",
            remedy="trace the model with inputs of the dtype that it is to run with",
        )
    if not captures:
        return record
    for capture, tensor in zip(record.captures, captures, strict=True):
        _check_capture(capture, tensor)
    return with_strides(record, tuple(map(_strides, record.captures, captures)))


def _strides(capture: CaptureType, tensor: Tensor) -> str:
    """The stride pattern that is compiled in: the tensor's own where the record leaves it open (an empty text), else the
    record's, as far as it holds for this tensor."""
    own = stride_pattern(tensor.shape, tensor.stride())
    if not capture.strides:
        return own
    pairs = zip(capture.strides.split("x"), own.split("x"), strict=True)
    return "x".join(wanted if wanted == found else "?" for wanted, found in pairs)


def _check_capture(capture: CaptureType, tensor: Tensor) -> None:
    if str(tensor.dtype) != f"torch.{capture.type.dtype}":
        raise DtypeError(
            f"captured tensor '{capture.name}' is {tensor.dtype}, and was traced as {capture.type.dtype}",
            remedy=f"convert it to {capture.type.dtype}, or trace the model anew",
        )
    fixed = capture.type.shape
    sizes = tuple(tensor.shape)
    if len(sizes) != len(fixed) or any(want is not None and want != size for want, size in zip(fixed, sizes, strict=True)):
        shape = ["?" if size is None else size for size in fixed]
        raise ShapeError(
            f"captured tensor '{capture.name}' has shape {list(sizes)}, and was traced with {shape}",
            remedy="the length of a row that a mod reduces is compiled in: trace the model anew for another one",
        )


def _classes(lists: Sequence[Tensor], program: Program, query: Sequence[int], keys: int) -> Tensor:
    """The block classes int8 [B, Hq, query blocks, key blocks] of a BlockMask's lists."""
    assert program.block_size is not None
    if len(lists) not in (2, 4):
        raise ArgumentsError(
            f"attnc::attention got {len(lists)} block lists", remedy="a BlockMask has two, or four with full blocks"
        )
    batch, heads, queries, _ = query
    rows, columns = -(-queries // program.block_size[0]), -(-keys // program.block_size[1])
    classes = build_classes(*([*lists, None, None][:4]), rows, columns)  # type: ignore[arg-type]
    if program.mask_full_blocks:
        classes = classes.clamp(max=PARTIAL)
    if classes.shape[0] not in (1, batch) or classes.shape[1] not in (1, heads):
        raise BlockMaskError(
            f"the BlockMask was made for batch {classes.shape[0]} and {classes.shape[1]} heads, "
            f"the call has {batch} and {heads}"
        )
    return classes.expand(batch, heads, -1, -1)


def fake(query: Tensor, key: Tensor, value: Tensor, program: str) -> tuple[Tensor, Tensor, Tensor]:
    """Results without values, of the shapes, dtypes and strides that `run` gives; sizes may be symbolic."""
    read = from_text(program)
    check_shapes(query.shape, key.shape, value.shape)
    shape = (*query.shape[:3], value.shape[3])
    statistics = torch.float64 if query.dtype is torch.float64 else torch.float32
    return (
        query.new_empty_strided(shape, out_strides(shape, query.stride())),
        query.new_empty(shape[:3], dtype=statistics) if read.return_lse else query.new_empty(0),
        query.new_empty(shape[:3], dtype=statistics) if read.return_max else query.new_empty(0),
    )


def out_strides(shape: Sequence[Any], query_strides: Sequence[Any]) -> tuple[Any, ...]:
    """As `runtime.attention.output_strides`, for sizes that may be symbolic."""
    last = len(shape) - 1
    strides: list[Any] = [1] * len(shape)
    step = _at_least_one(shape[last])

    def first(left: int, right: int) -> int:
        if query_strides[left] == query_strides[right]:
            return right - left  # of equal strides the inner dimension comes first
        return -1 if query_strides[left] < query_strides[right] else 1

    for dim in sorted(range(last), key=functools.cmp_to_key(first)):
        strides[dim] = step
        step = step * _at_least_one(shape[dim])
    return tuple(strides)


def _at_least_one(size: Any) -> Any:
    return torch.sym_max(size, 1) if isinstance(size, torch.SymInt) else max(size, 1)
