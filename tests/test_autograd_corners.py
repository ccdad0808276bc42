"""Gradients where there is nothing to differentiate, or what is there must not matter: dead rows and keys, NaN, empty lengths,
odd strides; held against f64 autograd of the dense formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attnc
from attnc import create_block_mask, flex_attention

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64).to(dtype)


def dense(query: Tensor, key: Tensor, value: Tensor, live: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """out and lse; `live` is [Sq, Skv], or more. Dead pairs get no gradient, dead queries give 0 and -inf."""
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.expand(query.shape[0], -1, -1, -1).repeat_interleave(group, 1) for tensor in (key, value))
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    some = live.any(-1)
    scores = scores.masked_fill(~live, -1e300)
    weights = scores.softmax(-1).masked_fill(~live, 0.0) * some[..., None]
    return weights @ value, torch.where(some, scores.logsumexp(-1), -torch.inf)


def compare(
    tensors: tuple[Tensor, ...],
    live: Tensor,
    *,
    mask_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    weights: Tensor | None = None,
    tolerance: float = 1e-10,
) -> None:
    """Gradients of a weighted sum of out and of the living lse."""
    made = weights if weights is not None else normal(*tensors[0].shape[:3], tensors[2].shape[3])
    found, expected = [], []
    for results, right in ((found, False), (expected, True)):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        if right:
            out, lse = dense(leaves[0], leaves[1], leaves[2], live)
        else:
            out, lse = flex_attention(
                leaves[0], leaves[1], leaves[2], None, block_mask, enable_gqa=True, return_lse=True, mask_mod=mask_mod
            )
        loss = (out * made).sum() + torch.where(lse == -torch.inf, 0.0, lse).sin().sum()
        results += torch.autograd.grad(loss, leaves)
    for mine, theirs, leaf in zip(found, expected, tensors, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
        assert mine.stride() == torch.empty_like(leaf).stride()


def test_queries_without_a_live_key():
    live = (torch.arange(20) % 3 != 0)[:, None].expand(20, 30)
    compare((normal(1, 2, 20, 16), normal(1, 2, 30, 16), normal(1, 2, 30, 8)), live, mask_mod=lambda b, h, q, k: q % 3 != 0)
    nothing = torch.zeros(20, 30, dtype=torch.bool)
    tensors = (normal(1, 2, 20, 16), normal(1, 2, 30, 16), normal(1, 2, 30, 8))
    compare(tensors, nothing, mask_mod=lambda b, h, q, k: q < 0)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_dead_keys_hold_anything(poison: float, dtype: torch.dtype):
    query, key, value = normal(1, 2, 70, 16, dtype=dtype), normal(1, 2, 90, 16, dtype=dtype), normal(1, 2, 90, 8, dtype=dtype)
    dead = torch.zeros(90, dtype=torch.bool)
    dead[[3, 40, 41, 64, 89]] = True
    clean = [query, key.masked_fill(dead[:, None], 0.0), value.masked_fill(dead[:, None], 0.0)]
    dirty = [query, key.masked_fill(dead[:, None], poison), value.masked_fill(dead[:, None], poison)]
    results = []
    for tensors in (clean, dirty):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        out = flex_attention(leaves[0], leaves[1], leaves[2], mask_mod=lambda b, h, q, k: ~dead[k])
        results.append(torch.autograd.grad(out.square().sum(), leaves))
    for mine, theirs in zip(*results, strict=True):
        assert torch.isfinite(mine).all()
        torch.testing.assert_close(mine, theirs)


def test_a_dead_query_holds_anything():
    query, key, value = normal(1, 1, 70, 16), normal(1, 1, 90, 16), normal(1, 1, 90, 16)
    query[:, :, 5] = math.nan
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    out = flex_attention(leaves[0], leaves[1], leaves[2], mask_mod=lambda b, h, q, k: q != 5)
    grads = torch.autograd.grad(out.square().sum(), leaves)
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert (grads[0][:, :, 5] == 0).all()


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_lengths_of_nothing(queries: int, keys: int):
    bias = torch.ones(3, requires_grad=True)
    scale = torch.tensor(0.5, requires_grad=True)
    leaves = [torch.randn(2, 3, n, 8, requires_grad=True) for n in (queries, keys, keys)]
    out, lse = flex_attention(
        leaves[0], leaves[1], leaves[2], lambda score, b, h, q, k: score + bias[h], scale=scale, return_lse=True
    )
    grads = torch.autograd.grad(out.sum() + lse.exp().sum(), [*leaves, bias, scale])
    assert [grad.shape for grad in grads] == [leaf.shape for leaf in (*leaves, bias, scale)]
    assert all((grad == 0).all() for grad in grads)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "BSHD": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "BHDS": lambda x: x.mT.contiguous().mT,
    "expanded heads": lambda x: x[:, :1].expand(-1, x.shape[1], -1, -1),
    "expanded batch": lambda x: x[:1].expand(x.shape[0], -1, -1, -1),
    "expanded head dim": lambda x: x[..., :1].expand(-1, -1, -1, x.shape[3]),
    "every second": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    "offset": lambda x: torch.cat([x, x])[x.shape[0] :],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", ["query", "key", "value", "grad"])
def test_layouts(layout: str, place: str):
    tensors = {"query": normal(2, 4, 33, 16), "key": normal(2, 4, 40, 16), "value": normal(2, 4, 40, 16)}
    weights = normal(2, 4, 33, 16)
    if place == "grad":
        weights = LAYOUTS[layout](weights)
    else:
        tensors[place] = LAYOUTS[layout](tensors[place])
    live = torch.arange(33)[:, None] + 7 >= torch.arange(40)
    inputs = tensors["query"], tensors["key"], tensors["value"]
    compare(inputs, live, mask_mod=lambda b, h, q, k: q + 7 >= k, weights=weights)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (6, 1), (8, 8), (3, 1)])
def test_grouped_heads_and_a_batch_of_one(heads: int, kv_heads: int):
    live = torch.ones(50, 130, dtype=torch.bool)
    compare((normal(2, heads, 50, 24), normal(2, kv_heads, 130, 24), normal(2, kv_heads, 130, 17)), live)
    compare((normal(3, heads, 20, 24), normal(1, kv_heads, 30, 24), normal(1, kv_heads, 30, 17)), live[:20, :30])


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 300), (300, 1), (127, 129), (128, 256), (257, 511)])
def test_lengths(queries: int, keys: int):
    live = torch.arange(queries)[:, None] + keys - queries >= torch.arange(keys)
    offset = keys - queries
    tensors = normal(1, 2, queries, 16), normal(1, 2, keys, 16), normal(1, 2, keys, 16)
    compare(tensors, live, mask_mod=lambda b, h, q, k: q + offset >= k)


@pytest.mark.parametrize("dim", [1, 7, 17, 94, 128, 200])
def test_head_dims(dim: int):
    live = torch.ones(40, 70, dtype=torch.bool)
    compare((normal(1, 1, 40, dim), normal(1, 1, 70, dim), normal(1, 1, 70, max(1, dim - 5))), live)


def test_the_lists_of_a_block_mask():
    from torch.nn.attention.flex_attention import create_block_mask as torchs

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q - k).abs() < 40

    position = torch.arange(200)
    live = (position[:, None] - position).abs() < 40
    for made in (
        torchs(mask, None, None, 200, 200, device="cpu", BLOCK_SIZE=64),
        create_block_mask(mask, None, None, 200, 200),
    ):
        compare((normal(1, 2, 200, 16), normal(1, 2, 200, 16), normal(1, 2, 200, 16)), live, block_mask=made)


def test_the_same_bits_with_any_number_of_threads():
    bias = torch.randn(600, requires_grad=True)
    leaves = [torch.randn(2, 4, 300, 32, requires_grad=True) for _ in range(3)]
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            out = flex_attention(leaves[0], leaves[1], leaves[2], lambda score, b, h, q, k: score + bias[q - k + 299])
            results.append(torch.autograd.grad(out.sin().sum(), [*leaves, bias]))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(results[0], other, strict=True))


def test_a_change_of_values_in_place_is_noticed():
    query = torch.randn(1, 1, 8, 8, requires_grad=True)
    bias = torch.zeros(8)
    out = flex_attention(query, query, query, lambda score, b, h, q, k: score + bias[k])
    bias += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_lengths_and_numbers_compile_nothing_new():
    slope = torch.tensor(0.5, requires_grad=True)
    counts = []
    for length, window in ((40, 5), (60, 9), (257, 100)):
        query, key, value = (torch.randn(1, 2, length, 16, requires_grad=True) for _ in range(3))
        out = flex_attention(
            query, key, value, lambda s, b, h, q, k: s + slope * (k - q), mask_mod=lambda b, h, q, k, w=window: q - k < w
        )
        out.sum().backward()
        counts.append(attnc.programs.compiled)
    assert counts[1] == counts[2]
