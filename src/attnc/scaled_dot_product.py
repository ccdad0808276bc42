"""`scaled_dot_product_attention`: torch's function, on attnc's road.

Masks are mods that are compiled once for each kind, whatever their shape: none, causal, causal with an offset, a bool or a
float `attn_mask`. The mask tensor is broadcast by stride 0 and gathered inside the kernel; it is never copied or converted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from attnc.errors import AttentionMaskError, DropoutError, ShapeError, TorchMissingError

try:
    import torch
    from torch import Tensor
except ImportError as error:
    raise TorchMissingError("attnc.scaled_dot_product_attention needs torch, which is not installed") from error

from attnc import checks, flex, layouts
from attnc.capture.capture import NOTHING, capture
from attnc.capture.record import Record
from attnc.checks import DTYPES, is_dynamo_compiling, is_watched
from attnc.integrations.operator import check_operands
from attnc.program_text import with_strides

PLAIN, CAUSAL, OFFSET, BOOL = "plain", "causal", "offset", "bool"
"""Kinds of masks; a float mask's kind is its dtype's name."""

KINDS = (PLAIN, CAUSAL, OFFSET, BOOL, *DTYPES.values())


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale · query keyᵀ + mask) value, as `torch.nn.functional.scaled_dot_product_attention`, compiled for the CPU.

    Arguments:
        query: [..., Hq, Sq, E] with any number of batch dims (also [N, Sq, E] and [Sq, E]), of f64, f32, f16 or bf16, any
            strides.
        key, value: [..., Hkv, Skv, E] and [..., Hkv, Skv, Ev] of the same dtype; batch dims broadcast.
        attn_mask: bool (True: may attend) or float (added to the scaled scores), of any shape that broadcasts to
            [..., Hq, Sq, Skv]; or a `torch.nn.attention.bias.CausalBias`.
        dropout_p: 0.0.
        is_causal: query q sees the keys k <= q (upper-left, as torch, also where Sq != Skv).
        scale: a number or a 0-d tensor; 1/√E where None.
        enable_gqa: lets Hq be a multiple of Hkv.

    Returns [..., Hq, Sq, Ev] in query's dtype and order of strides; 0 where all keys are masked.

    Differentiable in query, key, value, a float attn_mask and a scale that is a tensor.

    Raises classes of `attnc.errors`: DropoutError, AttentionMaskError, ShapeError, DtypeError, DeviceError, …
    """
    if type(query) is Tensor and attn_mask is None and dropout_p == 0.0 and not is_dynamo_compiling():
        mods = record(CAUSAL, query.dtype is torch.float64) if is_causal else NOTHING.record
        found = layouts.repeat(query, key, value, mods, scale, enable_gqa)
        if found is not None:
            return found
    if is_watched():
        from attnc.integrations import traced_sdpa

        return traced_sdpa.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    query, key, value = (
        checks.plain_tensor("query", query),
        checks.plain_tensor("key", key),
        checks.plain_tensor("value", value),
    )
    kind, mask, numbers = mask_kind(query, key, attn_mask, dropout_p, is_causal)
    plain = query.dim() == key.dim() == value.dim() == 4
    shape = query.shape
    heads = key.shape[:2] if enable_gqa else query.shape[:2]
    if not plain or not (query.shape[0] == key.shape[0] and key.shape[:2] == value.shape[:2] == heads):
        query, key, value, shape = four_dims(query, key, value, enable_gqa)
    call = flex.checked_call(query, key, value, None, None, scale, enable_gqa, False, None, None, None)
    if kind != PLAIN and call.has_values:
        captures = [] if mask is None else [expanded_mask(checks.plain_tensor("attn_mask", mask), shape, key.shape[2])]
        found = record(kind, query.dtype is torch.float64)
        call.record = check_operands(found, captures, call.query.dtype) if captures else found
        call.captures, call.numbers = captures, numbers
        if captures and checks.may_differentiate() and checks.wants_gradient([("attn_mask", captures[0])]):
            flex.make_differentiable(call)
    out = flex.results(call)[0]
    return out if plain else out.reshape(*shape[:-1], out.shape[-1])


def mask_kind(
    query: Tensor, key: Tensor, attn_mask: Any, dropout_p: float, is_causal: bool
) -> tuple[str, Tensor | None, list[int]]:
    """The kind of mask, its tensor, and its numbers. Raises `DropoutError`, `AttentionMaskError`."""
    if dropout_p != 0.0:
        raise DropoutError(f"scaled_dot_product_attention with dropout_p={dropout_p!r}")
    if attn_mask is None:
        return (CAUSAL if is_causal else PLAIN), None, []
    if is_causal:
        raise AttentionMaskError("attn_mask is given with is_causal=True", remedy="put the causal mask into attn_mask")
    if type(attn_mask).__name__ == "CausalBias":
        return _causal_bias(query, key, attn_mask)
    if not isinstance(attn_mask, Tensor):
        raise AttentionMaskError(f"attn_mask is a {type(attn_mask).__name__}, not a torch tensor")
    if attn_mask.dtype is torch.bool:
        return BOOL, attn_mask, []
    if attn_mask.dtype not in DTYPES:
        integer = not attn_mask.is_floating_point() and not attn_mask.is_complex()
        remedy = "attn_mask.bool(), where nonzero means: may attend" if integer else None
        raise AttentionMaskError(f"attn_mask has dtype {attn_mask.dtype}, not bool or float", remedy=remedy)
    return DTYPES[attn_mask.dtype], attn_mask, []


def _causal_bias(query: Tensor, key: Tensor, bias: Any) -> tuple[str, Tensor | None, list[int]]:
    """torch's `causal_upper_left` and `causal_lower_right`."""
    queries, keys = query.shape[-2], key.shape[-2]
    if (bias.seq_len_q, bias.seq_len_kv) != (queries, keys):
        raise AttentionMaskError(
            f"the CausalBias was made for {bias.seq_len_q} queries and {bias.seq_len_kv} keys, "
            f"the call has {queries} and {keys}"
        )
    if bias.variant.name == "UPPER_LEFT" or queries == keys:
        return CAUSAL, None, []
    return OFFSET, None, [keys - queries]


def four_dims(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor, Sequence[int]]:
    """The three as [B, H, S, E], batch dims (and heads, without `enable_gqa`) broadcast as torch does, and query's shape with
    these batch dims. Raises `ShapeError`."""
    ranks = (query.dim(), key.dim(), value.dim())
    if min(ranks) < 2:
        raise ShapeError(
            f"query, key and value have {ranks[0]}, {ranks[1]} and {ranks[2]} dimensions", remedy="two or more are needed"
        )
    rank = max(ranks)
    query, key, value = (tensor.reshape(*(1,) * (rank - tensor.dim()), *tensor.shape) for tensor in (query, key, value))
    batch = broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    if rank == 2:
        heads, kv_heads = (), ()
    elif enable_gqa:
        heads, kv_heads = query.shape[-3:-2], broadcast_shapes(key.shape[-3:-2], value.shape[-3:-2])
    else:
        heads = kv_heads = broadcast_shapes(
            query.shape[-3:-2], key.shape[-3:-2], value.shape[-3:-2], remedy=_grouped(query.shape, key.shape, value.shape)
        )
    shape = (*batch, *heads, *query.shape[-2:])
    if rank == 3 and not enable_gqa:  # [N, S, E]: N batches of one head
        batch, heads, kv_heads = heads, (1,), (1,)
    elif rank == 2:
        heads = kv_heads = (1,)
    leading = ((batch, heads), (batch, kv_heads), (batch, kv_heads))
    tensors = []
    for tensor, (outer, inner) in zip((query, key, value), leading, strict=True):
        if rank == 3 and not enable_gqa:
            tensor = tensor.unsqueeze(1)
        elif rank == 2:
            tensor = tensor.unsqueeze(0)
        tensor = tensor.expand(*outer, *inner, *tensor.shape[-2:])
        tensors.append(tensor.unsqueeze(0) if tensor.dim() == 3 else tensor.flatten(0, -4))
    return tensors[0], tensors[1], tensors[2], shape


def _grouped(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> str | None:
    """The remedy where heads differ as grouped heads do."""
    grouped = len(query) > 3 and key[-3] == value[-3] and query[-3] % max(key[-3], 1) == 0
    return "enable_gqa=True lets several query heads share a key/value head" if grouped else None


def broadcast_shapes(*shapes: Sequence[int], remedy: str | None = None) -> tuple[int, ...]:
    """As torch.broadcast_shapes, for shapes of one length. Raises `ShapeError`."""
    result = []
    for sizes in zip(*shapes, strict=True):
        size = next((size for size in sizes if size != 1), 1)
        if any(other not in (1, size) for other in sizes):
            raise ShapeError(
                f"{'query, key' if len(shapes) > 2 else 'key'} and value have batch dims (or heads) that do not broadcast: "
                f"{', '.join(str(list(shape)) for shape in shapes)}",
                remedy=remedy,
            )
        result.append(size)
    return tuple(result)


def expanded_mask(mask: Tensor, shape: Sequence[int], keys: int) -> Tensor:
    """The mask as [B, Hq, Sq, Skv], by stride 0 where it is broadcast. Raises `AttentionMaskError`."""
    target = (*shape[:-1], keys)
    missing = len(target) - mask.dim()
    fits = missing >= 0
    for dim, size in enumerate(mask.shape):
        fits = fits and (size == 1 or size == target[missing + dim])
    if not fits:
        raise AttentionMaskError(f"attn_mask has shape {list(mask.shape)}, which does not broadcast to {list(target)}")
    mask = mask.expand(target)
    if len(target) == 4:
        return mask
    if len(target) == 3:
        return mask.unsqueeze(1)
    return mask[None, None] if len(target) == 2 else mask.flatten(0, -4)


# -- mods -------------------------------------------------------------------------------------------------------------------
@functools.cache
def record(kind: str, double: bool) -> Record:
    """The record of a kind of mask, for scores of f64 or f32. Of the mask's strides only the last is compiled in, if it is
    1."""
    from attnc.integrations.graph_capture import plain_torch

    if kind == PLAIN:
        return NOTHING.record
    with plain_torch():
        score_mod, mask_mod = _mods(kind)
        found = capture(score_mod, mask_mod, score_dtype=torch.float64 if double else torch.float32).record
    return with_strides(found, ("?x?x?x1",)) if found.captures else found


def _mods(kind: str) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    if kind == CAUSAL:
        return None, lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    if kind == OFFSET:
        offset = 1
        return None, lambda b, h, q_idx, kv_idx: q_idx + offset >= kv_idx
    dtype = torch.bool if kind == BOOL else next(dtype for dtype, name in DTYPES.items() if name == kind)
    attn_mask = torch.zeros((), dtype=dtype, device="cpu").expand(2, 2, 2, 2)
    if kind == BOOL:
        return None, lambda b, h, q_idx, kv_idx: attn_mask[b, h, q_idx, kv_idx]
    return lambda score, b, h, q_idx, kv_idx: score + attn_mask[b, h, q_idx, kv_idx], None
