"""scaled_dot_product_attention where torch traces, transforms or records the call: the operator `attnc::attention`, whose
program text is one of a few that are made when this module is imported."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnc import scaled_dot_product, torch_op
from attnc.integrations import traced
from attnc.program_text import Program, to_text
from attnc.runtime.attention import check_shapes

TEXTS = {
    (kind, double): to_text(Program(scaled_dot_product.record(kind, double)))
    for kind in scaled_dot_product.KINDS
    for double in (False, True)
}


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: Any,
    enable_gqa: bool,
) -> Tensor:
    """As `attnc.scaled_dot_product_attention`, whose arguments and result it has."""
    kind, mask, numbers = scaled_dot_product.mask_kind(query, key, attn_mask, dropout_p, is_causal)
    query, key, value = traced.inputs(query, key, value)
    plain = query.dim() == key.dim() == value.dim() == 4
    shape = query.shape
    if not plain or not (query.shape[:2] == key.shape[:2] == value.shape[:2]):
        query, key, value, shape = scaled_dot_product.four_dims(query, key, value, enable_gqa)
    check_shapes(query.shape, key.shape, value.shape, True)
    captures = [] if mask is None else [scaled_dot_product.expanded_mask(mask, shape, key.shape[2])]
    number, scale_tensor = traced.scale_operands(scale)
    text = TEXTS[kind, query.dtype is torch.float64]
    out = torch_op.attention(query, key, value, captures, numbers or None, None, None, [], text, number, scale_tensor)[0]
    return out if plain else out.reshape(*shape[:-1], out.shape[-1])
