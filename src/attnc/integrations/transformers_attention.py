"""The attention side of `attn_implementation="attnc"`: what a layer calls, as transformers' `AttentionInterface` has it.

A layer's call is query, key, value and a handful of things that change the scores. They become one score_mod and one mask_mod,

    score = softcap · tanh(score / softcap)       softcap                 (Gemma 2)
    score = score + position_bias[b, h, q, kv]    position_bias           (T5)
    score = score + attention_mask[b, h, q, kv]   a float mask
    allowed = attention_mask[b, h, q, kv]         a bool mask
    allowed = mask_mod(b, h, q, kv)               a BlockMask             (transformers_masks.py)
    allowed = q >= kv                             no mask, a causal module, Sq > 1

and attention sinks, scores whose value row is 0, are a factor of the output: exp(lse) / (exp(lse) + exp(sink)).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.utils.output_capturing import _active_collector

from attnc import flex, layouts
from attnc.capture.block_mask import _TorchBlockMask
from attnc.capture.capture import NOTHING
from attnc.checks import is_dynamo_compiling, is_watched
from attnc.errors import ArgumentsError, AttentionMaskError, AttentionWeightsError, DropoutError, UnsupportedModelError
from attnc.integrations.transformers_masks import ModelMask
from attnc.scaled_dot_product import CAUSAL, PLAIN, expanded_mask, record


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool | None = None,
    block_indices: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer.

    Arguments:
        module: the layer. Its `is_causal` (True where it has none) holds where `attention_mask` and `is_causal` are None; a
            single query always attends to all keys.
        query, key, value: [B, Hq, Sq, E], [B, Hkv, Skv, E], [B, Hkv, Skv, Ev], of one dtype of f64, f32, f16, bf16.
        attention_mask: a BlockMask (as `model_mask` makes it); a tensor that broadcasts to [B, Hq, Sq, Skv], bool or float
            (added to the scores), whose last dim may be longer; or None.
        scaling: 1/√E where None.
        softcap: scores become softcap · tanh(score / softcap).
        s_aux: [Hq], attention sinks: a further score of each head, whose value row is 0.
        sinks: [B, Hq, Sq, 1], the same of each query.
        position_bias: added to the scores; broadcasts to [B, Hq, Sq, Skv], its last dim may be longer.

    Returns out [B, Sq, Hq, Ev], contiguous, and None: there are no attention weights.

    Raises `DropoutError`, `AttentionWeightsError`, `UnsupportedModelError`, `AttentionMaskError`, and what
    `attnc.flex_attention` raises.
    """
    if dropout:
        raise DropoutError(
            f"{type(module).__name__} asks for an attention dropout of {dropout}",
            remedy="call model.eval(), or set the attention dropout in the model's config to 0.0",
        )
    if output_attentions or "attentions" in (_active_collector.get() or ()):
        raise AttentionWeightsError(f"{type(module).__name__} is asked for its attention weights (output_attentions=True)")
    if block_indices is not None:
        raise UnsupportedModelError(f"{type(module).__name__} chooses blocks of keys (block_indices)")
    sink = s_aux.view(-1, 1) if s_aux is not None else sinks.squeeze(-1) if sinks is not None else None
    causal = attention_mask is None and query.shape[2] > 1
    if causal:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    plain = not is_dynamo_compiling() and attention_mask is None and position_bias is None
    if plain and softcap is None and sink is None:
        mods = record(CAUSAL, query.dtype is torch.float64) if causal else NOTHING.record
        out = layouts.repeat(query, key, value, mods, scaling, True, out_by_rows=True)
        if out is not None:
            return out, None
    if is_watched():
        return _through_operator(query, key, value, attention_mask, causal, scaling, softcap, sink, position_bias), None
    call = flex.checked_call(query, key, value, None, None, scaling, True, sink is not None, None, None, None, out_by_rows=True)
    if call.has_values:
        score_dtype = torch.float64 if call.query.dtype is torch.float64 else torch.float32
        if type(attention_mask) is ModelMask and position_bias is None and attention_mask.is_lazy:
            attention_mask.check(query, key)
            score_mod = None if softcap is None else _capped(softcap)
            call.record, call.captures, call.numbers, _retraced = attention_mask.captured(softcap, score_mod, score_dtype)
        elif attention_mask is None and position_bias is None and softcap is None:
            call.record = record(CAUSAL if causal else PLAIN, score_dtype is torch.float64)
            call.captures = call.numbers = ()
        else:
            block_mask, mask = _kinds(attention_mask)
            score_mod, mask_mod = _mods(query, key, mask, causal, softcap, position_bias)
            flex._capture(call, score_mod, block_mask, mask_mod)
    out, lse, _max_scores = flex.results(call)
    if sink is not None:
        assert lse is not None
        share = torch.sigmoid(lse - sink).unsqueeze(-1)
        out = out * share.to(out.dtype) if out.requires_grad or share.requires_grad else out.mul_(share)
    return out.transpose(1, 2), None


def _through_operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    causal: bool,
    scaling: float | None,
    softcap: float | None,
    sink: Tensor | None,
    position_bias: Tensor | None,
) -> Tensor:
    """The same where something traces or transforms the call: `attnc.flex_attention` knows what to do then."""
    block_mask, mask = _kinds(attention_mask)
    score_mod, mask_mod = _mods(query, key, mask, causal, softcap, position_bias)
    if type(block_mask) is ModelMask and block_mask.is_lazy:
        block_mask, mask_mod = None, block_mask.mask_mod
    found = flex.flex_attention(
        query, key, value, score_mod, block_mask, scaling, True, sink is not None, None, mask_mod=mask_mod
    )
    if sink is None:
        return found.transpose(1, 2).contiguous()
    out, lse = found
    return (out * torch.sigmoid(lse - sink).unsqueeze(-1).to(out.dtype)).transpose(1, 2).contiguous()


def _kinds(attention_mask: Any) -> tuple[Any, Tensor | None]:
    """(BlockMask or None, tensor or None). Raises `ArgumentsError` for what is neither."""
    if attention_mask is None or isinstance(attention_mask, Tensor):
        return None, attention_mask
    if isinstance(attention_mask, _TorchBlockMask):
        return attention_mask, None
    raise ArgumentsError(f"attention_mask is {type(attention_mask).__name__}", remedy="pass a tensor, a BlockMask, or None")


# -- mods -------------------------------------------------------------------------------------------------------------------
def _mods(
    query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, softcap: float | None, position_bias: Tensor | None
) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """score_mod and mask_mod of a call."""
    mask_mod: Callable[..., Any] | None = _causal if causal else None
    score_mod = None if softcap is None else _capped(softcap)
    if position_bias is not None:
        score_mod = _biased(score_mod, _expanded("position_bias", position_bias, query, key))
    if mask is not None:
        bias = _expanded("attention_mask", mask, query, key)
        if mask.dtype is torch.bool:
            mask_mod = _listed(bias)
        elif mask.is_floating_point():
            score_mod = _biased(score_mod, bias)
        else:
            raise AttentionMaskError(f"attention_mask has dtype {mask.dtype}")
    return score_mod, mask_mod


def _expanded(name: str, tensor: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """As [B, Hq, Sq, Skv], by stride 0 where it is broadcast; keys beyond Skv are cut off."""
    keys = key.shape[2]
    if tensor.dim() == 4 and tensor.shape[-1] > keys:
        tensor = tensor[..., :keys]
    try:
        return expanded_mask(tensor, query.shape, keys)
    except AttentionMaskError as error:
        raise AttentionMaskError(error.message.replace("attn_mask", name), remedy=error.remedy) from None


def _causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def _listed(mask: Tensor) -> Callable[..., Any]:
    def mask_mod(b, h, q_idx, kv_idx):
        return mask[b, h, q_idx, kv_idx]

    return mask_mod


def _capped(softcap: float) -> Callable[..., Any]:
    def score_mod(score, b, h, q_idx, kv_idx):
        return softcap * torch.tanh(score / softcap)

    return score_mod


def _biased(inner: Callable[..., Any] | None, bias: Tensor) -> Callable[..., Any]:
    def score_mod(score, b, h, q_idx, kv_idx):
        if inner is not None:
            score = inner(score, b, h, q_idx, kv_idx)
        return score + bias[b, h, q_idx, kv_idx]

    return score_mod
