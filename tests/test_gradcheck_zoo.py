"""torch's gradcheck, by finite differences in f64, of every score mod of the zoo: query, key, value and what it captures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnc import flex_attention
from backward_interpreted import captured_call
from zoo import ENTRIES, SCORES, problem

AT_ZERO = ("euclidean",)
"""Mods that take the square root of the distance from a point to itself, whose derivative is torch's inf · 0: only query, key
and value are differentiated."""


@pytest.mark.parametrize("name", SCORES)
def test_gradcheck(name: str):
    sizes = ENTRIES[name].sizes.but(batch=1, heads=2, kv_heads=1, queries=5, keys=7, head_dim=4, value_dim=3)
    p = problem(name, sizes, dtype="f64")
    captures = [tensor for tensor in captured_call(p).captures if tensor.dtype is torch.float64]
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (p.query, p.key, p.value)]
    if name not in AT_ZERO:
        leaves += [tensor.requires_grad_() for tensor in captures]

    def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        out, lse = flex_attention(
            query, key, value, p.score_mod, p.block_mask, p.scale, True, return_lse=True, mask_mod=p.mask_mod
        )
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    assert torch.autograd.gradcheck(attention, leaves, fast_mode=len(captures) > 0)
