"""Mods that nobody thought of, through `attnc.flex_attention` and against the oracle."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import AuxRequest

import attnc
from oracle import Problem, check
from random_mods import RandomMod, mask_mods, score_mods
from zoo import DTYPES, Sizes
from zoo.layouts import contiguous

SIZES = st.sampled_from(
    [
        Sizes(batch=2, heads=4, kv_heads=2, queries=37, keys=53, head_dim=16, value_dim=16),
        Sizes(batch=1, heads=2, kv_heads=2, queries=130, keys=129, head_dim=16, value_dim=16),
        Sizes(batch=3, heads=3, kv_heads=1, queries=5, keys=280, head_dim=16, value_dim=16),
    ]
)


def run(sizes: Sizes, dtype: str, score_mod: RandomMod | None, mask_mod: RandomMod | None) -> None:
    inputs = contiguous(sizes, torch.Generator().manual_seed(7), DTYPES[dtype])
    functions = [mod and mod.function(DTYPES[dtype]) for mod in (score_mod, mask_mod)]
    p = Problem(*inputs, score_mod=functions[0], mask_mod=functions[1])
    out, aux = attnc.flex_attention(
        *inputs,
        score_mod=p.score_mod,
        mask_mod=p.mask_mod,
        enable_gqa=sizes.heads != sizes.kv_heads,
        return_aux=AuxRequest(lse=True, max_scores=True),
    )
    check(p, out, aux.lse, aux.max_scores)


@settings(max_examples=50)
@given(SIZES, score_mods())
def test_score_mod(sizes: Sizes, score_mod: RandomMod):
    run(sizes, "f32", score_mod, None)


@settings(max_examples=50)
@given(SIZES, mask_mods())
def test_mask_mod(sizes: Sizes, mask_mod: RandomMod):
    run(sizes, "f32", None, mask_mod)


@settings(max_examples=30)
@given(SIZES, st.sampled_from(sorted(DTYPES)), score_mods(), mask_mods())
def test_both(sizes: Sizes, dtype: str, score_mod: RandomMod, mask_mod: RandomMod):
    run(sizes, dtype, score_mod, mask_mod)
