"""How precise scores are where little hides an error: large scores, the rule of `oracle` over many seeds; and what is finite
or not at the ends of the range of f32."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

import attnc
from oracle import Problem, check

SEEDS = 25


def dense(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return torch.softmax(query @ key.mT * scale, -1) @ value


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("keys", [2, 7, 8, 9, 16, 17, 40, 100, 600])
def test_large_scores(keys: int, head_dim: int):
    """With a scale of 1 scores reach 30: one chain of sums over the head dim would break the rule for every fourth seed."""
    eps = torch.finfo(torch.float32).eps
    for seed in range(SEEDS):
        generator = torch.Generator().manual_seed(seed)
        query, key, value = (torch.randn(1, 2, n, head_dim, generator=generator) for n in (33, keys, keys))
        expected = dense(query.double(), key.double(), value.double(), 1.0)
        allowed = 1.5 * (dense(query, key, value, 1.0) - expected).abs().max() + 4 * eps * max(1.0, expected.abs().max())
        error = (attnc.flex_attention(query, key, value, scale=1.0) - expected).abs().max()
        assert error <= allowed, (seed, error, allowed)


SCALES = [0.0, -0.0, 1e-30, 0.3, -0.7, 4.0, 1e38, 3e38, -3e38, math.inf, -math.inf, math.nan]


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


@pytest.mark.parametrize("masked", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("queries", [3, 40])
@pytest.mark.parametrize("scale", SCALES)
def test_scales(scale: float, queries: int, masked: bool):
    """Of one sign, so that an infinite scale makes a whole row infinite, or dead; with rows of zeros between."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, n, 16, generator=generator).abs() for n in (queries, 50, 50))
    query[:, :, 1::3] *= -1
    query[:, :, 2::5] = 0
    if 1 < abs(scale) < math.inf:
        query *= 4 / abs(scale)  # scores of usual size
    problem = Problem(query, key, value, None, causal if masked else None, scale=scale)
    out, aux = attnc.flex_attention(
        query,
        key,
        value,
        scale=scale,
        return_aux=AuxRequest(lse=True, max_scores=True),
        mask_mod=causal if masked else None,
    )
    check(problem, out, aux.lse, aux.max_scores, name=f"scale {scale}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries", [3, 40])
def test_the_largest_queries(queries: int, dtype: torch.dtype):
    """A query near the largest float must not overflow before it meets its small key."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, n, 16, generator=generator) for n in (queries, 50, 50))
    query, key, value = (x.to(dtype) for x in (query.clamp(-1, 1) * 3.3e38, key * 2e-38, value))
    key[key.abs() < 1.2e-38] = 0  # (bf16 dot products take subnormal numbers for zeros)
    out = attnc.flex_attention(query, key, value, scale=1.0)
    assert out.isfinite().all()
    check(Problem(query, key, value, None, None, scale=1.0), out)
