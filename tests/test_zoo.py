"""The whole zoo through `attnc.flex_attention`, against the oracle: a covering choice of shapes, layouts and dtypes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest

import attnc
from oracle import Problem, check
from zoo import DTYPES, ENTRIES, LAYOUTS, SHAPES, Sizes, problem


def run(p: Problem, name: str) -> None:
    out, aux = attnc.flex_attention(
        p.query,
        p.key,
        p.value,
        p.score_mod,
        p.block_mask,
        p.scale,
        p.query.shape[1] != p.key.shape[1],
        return_aux=AuxRequest(lse=True, max_scores=True),
        mask_mod=p.mask_mod,
    )
    check(p, out, aux.lse, aux.max_scores, name)


# Each mod in each dtype, the layouts and group ratios going round, so that neighbours in the list differ in all of them.
_LAYOUTS = itertools.cycle(LAYOUTS)
_GROUPS = itertools.cycle([(4, 4), (4, 2), (6, 2), (4, 1), (6, 1)])
MODS = [(name, dtype, next(_LAYOUTS), *next(_GROUPS)) for name in ENTRIES for dtype in DTYPES]


@pytest.mark.parametrize(("name", "dtype", "layout", "heads", "kv_heads"), MODS)
def test_mod(name, dtype, layout, heads, kv_heads):
    sizes = ENTRIES[name].sizes.but(heads=heads, kv_heads=kv_heads)
    run(problem(name, sizes, layout, dtype, seed=heads), name)


@pytest.mark.parametrize("name", ENTRIES)
def test_mod_as_entered(name):
    run(problem(name), name)


_ENTRIES = itertools.cycle(["identity", "causal", "alibi_causal", "sliding_window", "soft_cap"])
_DTYPES = itertools.cycle(DTYPES)
SHAPE_CASES = [
    (sizes, name, dtype) for sizes in SHAPES for name, dtype in (("alibi_causal", "f32"), (next(_ENTRIES), next(_DTYPES)))
]


@pytest.mark.parametrize(("sizes", "name", "dtype"), SHAPE_CASES, ids=str)
def test_shape(sizes: Sizes, name: str, dtype: str):
    run(problem(name, sizes, dtype=dtype), name)


LAYOUT_CASES = list(itertools.product(LAYOUTS, DTYPES, ((1, 70, 90), (3, 257, 130), (2, 1, 300), (4, 3, 200))))


@pytest.mark.parametrize(("layout", "dtype", "ratio_and_lengths"), LAYOUT_CASES, ids=str)
def test_layout(layout: str, dtype: str, ratio_and_lengths: tuple[int, int, int]):
    ratio, queries, keys = ratio_and_lengths
    sizes = Sizes(heads=2 * ratio, kv_heads=2, queries=queries, keys=keys, head_dim=40, value_dim=24)
    run(problem("causal_with_tensor_offset", sizes, layout, dtype, seed=queries), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_out_keeps_the_order_of_query(layout: str):
    """`out` is dense with a unit last dim, its other dims in the stride order of query; lse and max are contiguous."""
    p = problem("identity", layout=layout)
    out, aux = attnc.flex_attention(p.query, p.key, p.value, return_aux=AuxRequest(lse=True, max_scores=True))
    assert out.stride(-1) == 1
    assert aux.lse.is_contiguous() and aux.max_scores.is_contiguous()
    order = sorted(range(3), key=lambda dim: -p.query.stride(dim))
    assert out.permute(*order, 3).is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_dead_keys_and_live_nan(dtype: str):
    """Garbage in dead keys leaks nowhere; NaN and inf in live ones go where the formula takes them."""
    p = problem("causal", Sizes(queries=150, keys=150, head_dim=24, value_dim=24), dtype=dtype)
    p.key[0, :, 60:], p.value[0, :, 60:] = torch.nan, torch.nan
    p.value[1, 0, 100, 3], p.value[1, 1, 90, 4], p.query[1, 2, 7, 0] = torch.inf, -torch.inf, torch.nan
    run(p, "causal")
