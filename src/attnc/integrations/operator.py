"""What the operator `attnc::attention` does: on CPU tensors, and on fake ones."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnc import checks, flex, programs
from attnc.capture.block_mask import PARTIAL, build_classes
from attnc.capture.reads import stride_pattern
from attnc.capture.record import CaptureType, Record
from attnc.errors import ArgumentsError, BlockMaskError, DtypeError, ShapeError
from attnc.integrations.graph_capture import hint
from attnc.layouts import layout_of
from attnc.program_text import Program, from_text, with_strides
from attnc.runtime.attention import check_shapes


def run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captures: Sequence[Tensor],
    ints: Sequence[int] | None,
    floats: Sequence[float] | None,
    float_tensors: Sequence[Tensor] | None,
    block_lists: Sequence[Tensor],
    program: str,
    scale: int | float | None,
    scale_tensor: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, Hq, Sq, Ev], lse and max_scores [B, Hq, Sq] (or [0] where not asked). Raises classes of `attnc.errors`."""
    read = from_text(program)
    call = _call(query, key, value, captures, ints, floats, float_tensors, block_lists, read, scale, scale_tensor)
    out, lse, max_scores = flex.run(call)
    return out, query.new_empty(0) if lse is None else lse, query.new_empty(0) if max_scores is None else max_scores


def run_backward(saved: tuple[Any, ...], operands: tuple[Any, ...], needs: Sequence[bool]) -> Sequence[Tensor | None]:
    """The gradients of query, key, value, scale and each capture, or None where `needs` does not ask for it.

    `saved` is grad_out, grad_lse (or None), query, key, value, out, lse; `operands` are those of `run` from captures on. Raises
    classes of `attnc.errors`.
    """
    from attnc.integrations.autograd import gradients

    grad_out, grad_lse, *tensors = saved
    query, key, value, *_ = tensors
    captures, ints, floats, float_tensors, block_lists, program, scale, scale_tensor = operands
    read = from_text(program)
    call = _call(query, key, value, captures, ints, floats, float_tensors, block_lists, read, scale, scale_tensor)
    return gradients(call, grad_out, grad_lse, tensors, scale_tensor, captures, needs)


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captures: Sequence[Tensor],
    ints: Sequence[int] | None,
    floats: Sequence[float] | None,
    float_tensors: Sequence[Tensor] | None,
    block_lists: Sequence[Tensor],
    read: Program,
    scale: int | float | None,
    scale_tensor: Tensor | None,
) -> flex.Call:
    """The operator's operands as a checked call."""
    element = query.dtype
    if not (key.dtype is element and value.dtype is element and element in checks.DTYPES):
        raise DtypeError(f"query, key and value have dtypes {query.dtype}, {key.dtype} and {value.dtype}")
    call = flex.Call()
    call.has_values = True
    call.query, call.key, call.value = query, key, value
    call.layout, call.signature = layout_of(query, key, value, True, read.return_lse, read.return_max, wide_lse=read.wide_lse)
    call.scale = checks.scale_value(scale if scale_tensor is None else scale_tensor, call.signature.head_dim)
    call.record = check_operands(read.record, captures, element)
    call.captures = captures
    call.numbers = join_numbers(read, ints or (), floats or (), float_tensors or ())
    call.blocks = None
    if read.block_size is not None:
        call.blocks = _classes(block_lists, read, query.shape, key.shape[2])
        call.signature = flex._with_block_size(call.signature, read.block_size)
    return call


class Numbers(NamedTuple):
    """A record's numbers as the operator takes them, and the places of those that are tensors."""

    ints: list[Any] | None
    floats: list[Any] | None
    float_tensors: list[Tensor] | None
    places: tuple[int, ...]


def split_numbers(record: Record, numbers: Sequence[Any], examples: Sequence[Any] | None = None) -> Numbers:
    """A record's numbers (ints and floats, symbolic ones, and 0-d f64 tensors for floats) as the operator's operands. Where the
    numbers are proxies, `examples` are what they stand for."""
    tensors = tuple(place for place, number in enumerate(examples or numbers) if isinstance(number, Tensor))
    kinds = ["tensor" if place in tensors else type_.kind for place, type_ in enumerate(record.numbers)]

    def of(wanted: str) -> list[Any] | None:
        return [number for kind, number in zip(kinds, numbers, strict=True) if kind == wanted] or None

    return Numbers(of("int"), of("float"), of("tensor"), tensors)


def join_numbers(
    program: Program, ints: Sequence[int], floats: Sequence[float], tensors: Sequence[Tensor]
) -> list[int | float]:
    """The operator's numbers in the order of the record. Raises `ArgumentsError`."""
    places = program.tensor_numbers
    kinds = ["tensor" if place in places else type_.kind for place, type_ in enumerate(program.record.numbers)]
    given = {"int": len(ints), "float": len(floats), "tensor": len(tensors)}
    wanted = {kind: kinds.count(kind) for kind in given}
    if given != wanted:
        raise ArgumentsError(
            f"attnc::attention got {given['int']} ints, {given['float']} floats and {given['tensor']} floats as tensors",
            remedy=f"its program takes {wanted['int']}, {wanted['float']} and {wanted['tensor']}",
        )
    remaining = {"int": iter(ints), "float": map(float, floats), "tensor": (float(tensor.item()) for tensor in tensors)}
    return [next(remaining[kind]) for kind in kinds]


def compile_for(query: Tensor, key: Tensor, value: Tensor, captures: Sequence[Tensor], program: Program) -> None:
    """Compile what the operator would run on tensors like these (fake ones, of symbolic sizes maybe): raises what it
    refuses."""
    like = [
        torch.empty_strided([hint(size) for size in tensor.shape], [hint(step) for step in tensor.stride()], device="meta")
        for tensor in (query, key, value)
    ]
    like = [tensor.to(query.dtype) for tensor in like]
    _, signature = layout_of(like[0], like[1], like[2], True, program.return_lse, program.return_max)
    if program.block_size is not None:
        signature = flex._with_block_size(signature, program.block_size)
    patterns = tuple(
        capture.strides or stride_pattern([hint(size) for size in tensor.shape], [hint(step) for step in tensor.stride()])
        for capture, tensor in zip(program.record.captures, captures, strict=True)
    )
    programs.program(with_strides(program.record, patterns), signature)


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
    empty = query.new_empty(0)
    return (
        query.new_empty_strided(shape, out_strides(shape, query.stride())),
        query.new_empty(shape[:3], dtype=torch.float64 if read.wide_lse else statistics) if read.return_lse else empty,
        query.new_empty(shape[:3], dtype=statistics) if read.return_max else empty,
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
