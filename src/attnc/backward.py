"""The gradients of one call of attention, on torch tensors: what autograd calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnc import programs
from attnc.errors import CaptureIndexError, UnsupportedTensorError
from attnc.runtime.attention import output_strides
from attnc.runtime.attention_backward import AttentionBackward
from attnc.runtime.signature import Signature

if TYPE_CHECKING:
    from attnc.capture.record import Record


def attention_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    captures: Sequence[Tensor],
    numbers: Sequence[int | float],
    blocks: Tensor | None,
    scale: float,
    record: Record,
    signature: Signature,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of query, key, value, scale and captured tensors, as far as `needs` asks for them.

    Arguments:
        query, key, value: [B, Hq, Sq, E], [B or 1, Hkv, Skv, E], [B or 1, Hkv, Skv, Ev] as the forward pass had them, for which
            `signature` was made.
        out, lse: what the forward pass gave: [B, Hq, Sq, Ev] in query's dtype, natural [B, Hq, Sq] in f64
            (`Signature.wide_lse`), or in f32 with less accuracy where scores are large.
        grad_out, grad_lse: their gradients, of any strides; None is 0.
        captures, numbers, blocks, scale, record: the captured mods of the call, and a BlockMask's classes [B, Hq, …].
        needs: one bool for each of query, key, value, scale and the captures. Tensors of ints and bools have no gradient.

    Returns one entry for each of `needs`: dense, in the dtype of what it is the gradient of (the scale's: 0-d f64) and of its
    whole shape, stride-0 dims included, with the strides of `torch.empty_like`. None where it is not needed.

    Raises `CaptureIndexError` where captured tensors have changed since the forward pass, so that an index is out of range;
    what compiling raises.
    """
    wanted = tuple(bool(needed) and (n < 4 or captures[n - 4].is_floating_point()) for n, needed in enumerate(needs))
    if not any(wanted):
        return [None] * len(wanted)

    def program() -> AttentionBackward:
        return programs.backward_program(record, signature, wanted)

    return run(program, query, key, value, out, lse, grad_out, grad_lse, captures, numbers, blocks, scale, wanted)


def run(
    program: Callable[[], AttentionBackward],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    captures: Sequence[Tensor],
    numbers: Sequence[int | float],
    blocks: Tensor | None,
    scale: float,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients that `program`, which is asked for where there is something to compute, is made for."""
    sources = [query, key, value, None, *captures]
    batch, heads, queries, _ = query.shape
    if (grad_out is None and grad_lse is None) or not batch * heads * queries * key.shape[2]:
        return [_nothing(source) if needed else None for source, needed in zip(sources, wanted, strict=True)]
    statistics = torch.float64 if query.dtype is torch.float64 else torch.float32
    query_, key_, value_ = (tensor.detach() for tensor in (query, key, value))
    key_, value_ = (tensor if tensor.shape[0] == batch else tensor.expand(batch, -1, -1, -1) for tensor in (key_, value_))
    if grad_out is None:
        grad_out = query.new_zeros(()).expand(out.shape)
    if grad_lse is None:
        grad_lse = lse.new_zeros(()).expand(lse.shape)
    read = [
        _unit(out.detach(), query.dtype),
        lse.detach().double().contiguous(),
        _unit(grad_out, query.dtype),
        grad_lse.to(statistics),
    ]

    words: list[int | float] = []
    for tensor in (query_, key_, value_):
        words += _words(tensor)
    words.append(scale)
    for tensor in captures:
        words += _words(tensor)
    words += numbers
    if blocks is not None:
        words += _words(blocks)
    for tensor in read:
        words += _words(tensor)
    results: list[Tensor | None] = []
    for n, needed in enumerate(wanted):
        result = _buffer(n, (query_, key_, value_), statistics, captures) if needed else None
        if result is not None:
            words += _words(result)
        results.append(result)
    compiled = program()
    row_sums = torch.zeros((compiled.row_sums, *lse.shape), dtype=torch.float64)
    for tensor in row_sums:
        words += _words(tensor)
    if compiled.launch(words, (query_, key_, value_, captures, blocks, read, results, row_sums)):
        raise CaptureIndexError("an index into a captured tensor is out of range, which it was not in the forward pass")
    return [result if result is None else _finished(result, source) for result, source in zip(results, sources, strict=True)]


def _unit(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """With a last dim of stride 1."""
    tensor = tensor.to(dtype)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _words(tensor: Tensor) -> tuple[int, ...]:
    address = tensor.data_ptr()
    if not address and tensor.numel():
        raise UnsupportedTensorError("the memory of a tensor that the gradient needs was freed (its storage has 0 bytes)")
    return (address, *tensor.shape, *tensor.stride())


def _buffer(n: int, inputs: tuple[Tensor, Tensor, Tensor], statistics: torch.dtype, captures: Sequence[Tensor]) -> Tensor:
    """What the kernel writes the gradient of `needs[n]` into. Sums of many tasks start at 0."""
    if n == 0:
        query = inputs[0]
        strides = output_strides(query.shape, query.stride())
        return torch.empty_strided(query.shape, strides, dtype=statistics).zero_()
    if n < 3:
        source = inputs[n]
        return torch.empty_strided(source.shape, output_strides(source.shape, source.stride()), dtype=source.dtype)
    shape = captures[n - 4].shape if n > 3 else ()
    return torch.zeros(shape or (1,), dtype=torch.float64)


def _finished(result: Tensor, source: Tensor | None) -> Tensor:
    if source is None:
        return result.reshape(())
    if result.dim() == 4 and source.dim() == 4 and result.shape[0] != source.shape[0]:
        result = result.sum(dim=0, keepdim=True)  # a batch of 1 that the query's batch shares
    result = result.reshape(source.shape)
    dense = torch.empty_like(source)
    if result.dtype is source.dtype and result.stride() == dense.stride():
        return result
    return dense.copy_(result)


def _nothing(source: Tensor | None) -> Tensor:
    if source is None:
        return torch.zeros((), dtype=torch.float64)
    return torch.zeros_like(source)
