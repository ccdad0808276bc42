"""torch.func: vmap over inputs, captures and both, nested; what has no rule is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import attnc
from attnc import errors, flex_attention, programs

GENERATOR = torch.Generator().manual_seed(0)
N = 3


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


Q, K, V = normal(N, 2, 2, 20, 16), normal(2, 2, 24, 16), normal(2, 2, 24, 16)
BIAS, TABLE, WINDOW = normal(N, 2, 20, 24), normal(2, 4), 7
BLOCKS = create_block_mask(lambda b, h, q, k: (q >= k) | (b == 1), 2, None, 20, 24, device="cpu", BLOCK_SIZE=8)


def biased(bias: Tensor) -> Callable[..., Tensor]:
    return lambda score, b, h, q, k: score + bias[h, q, k]


CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], Any]] = {
    "query": (lambda q: flex_attention(q, K, V), (Q,), 0),
    "key and value": (lambda k, v: flex_attention(Q[0], k, v), (normal(N, 2, 2, 24, 16), normal(N, 2, 2, 24, 8)), 0),
    "value alone": (lambda v: flex_attention(Q[0], K, v), (normal(N, 2, 2, 24, 8),), 0),
    "another dim": (lambda q: flex_attention(q, K, V), (normal(2, 2, 20, N, 16),), 3),
    "capture alone": (lambda bias: flex_attention(Q[0], K, V, biased(bias)), (BIAS,), 0),
    "query and capture": (lambda q, bias: flex_attention(q, K, V, biased(bias)), (Q, BIAS), 0),
    "different dims": (lambda q, bias: flex_attention(q, K, V, biased(bias)), (Q, BIAS.movedim(0, 2)), (0, 2)),
    "0-d capture": (lambda x: flex_attention(Q[0], K, V, lambda s, b, h, q, k: s * x), (normal(N),), 0),
    "both kinds of capture": (
        lambda bias: flex_attention(Q[0], K, V, lambda s, b, h, q, k: s + bias[h][q][k] + TABLE[b, h]),
        (BIAS,),
        0,
    ),
    "batch index": (
        lambda q: flex_attention(
            q, K, V, lambda s, b, h, i, j: s + TABLE[b, h], mask_mod=lambda b, h, i, j: (i >= j) | (b == 0)
        ),
        (Q,),
        0,
    ),
    "numbers": (
        lambda q: flex_attention(q, K, V, mask_mod=lambda b, h, i, j: (i - j).abs() < WINDOW),
        (Q,),
        0,
    ),
    "one batch of keys": (lambda q: flex_attention(q, K[:1], V[:1], biased(BIAS[0])), (Q,), 0),
    "mapped keys of batch one": (lambda k: flex_attention(Q[0], k, V), (normal(N, 1, 2, 24, 16),), 0),
    "BlockMask": (lambda q: flex_attention(q, K, V, block_mask=BLOCKS), (Q,), 0),
    "scale": (lambda q, scale: flex_attention(q, K, V, scale=scale), (Q, torch.tensor([0.1, 0.2, 0.3])), 0),
    "sdpa mask": (lambda q, bias: attnc.scaled_dot_product_attention(q, K, V, bias), (Q, BIAS), 0),
    "sdpa 3-D": (lambda q: attnc.scaled_dot_product_attention(q, K[0], V[0], is_causal=True), (Q[:, 0],), 0),
}


@pytest.mark.parametrize("name", CASES)
def test_vmap(name: str):
    function, arguments, dims = CASES[name]
    places = dims if isinstance(dims, tuple) else (dims,) * len(arguments)
    out = torch.vmap(function, in_dims=dims)(*arguments)
    for index in range(N):
        expected = function(*(tensor.select(dim, index) for tensor, dim in zip(arguments, places, strict=True)))
        assert out[index].shape == expected.shape and (out[index] - expected).abs().max() < 1e-5


def test_statistics_and_out_dims():
    def function(q: Tensor) -> tuple[Tensor, Tensor]:
        return flex_attention(q, K, V, biased(BIAS[0]), return_lse=True)

    out, lse = torch.vmap(function, out_dims=(1, 2))(Q)
    for index in range(N):
        expected = function(Q[index])
        assert torch.allclose(out[:, index], expected[0], atol=1e-5) and torch.allclose(
            lse[:, :, index], expected[1], atol=1e-5
        )


def test_nested():
    function = torch.vmap(lambda q, bias: flex_attention(q, K, V, biased(bias)), in_dims=(0, None))
    out = torch.vmap(function, in_dims=(None, 0))(Q, BIAS)
    for i in range(N):
        for j in range(N):
            assert (out[i, j] - flex_attention(Q[j], K, V, biased(BIAS[i]))).abs().max() < 1e-5


def test_another_count_compiles_nothing():
    function = torch.vmap(lambda q, bias: flex_attention(q, K, V, biased(bias)))
    function(Q, BIAS)
    before = programs.compiled
    function(Q[:2], BIAS[:2])
    function(Q[:1], BIAS[1:2])
    assert programs.compiled == before


def test_compiled_vmap():
    torch._dynamo.reset()
    function = torch.vmap(lambda q, bias: flex_attention(q, K, V, biased(bias)))
    assert torch.allclose(torch.compile(function, backend="aot_eager", fullgraph=True)(Q, BIAS), function(Q, BIAS), atol=1e-6)


def test_an_index_out_of_range_is_still_found():
    with pytest.raises(errors.CaptureIndexError):
        torch.vmap(lambda q, bias: flex_attention(q, K, V, biased(bias)))(Q, BIAS[:, :, 1:])


def test_forward_mode_is_refused():
    with pytest.raises(errors.AttncError):
        torch.func.jvp(lambda q: flex_attention(q, K, V), (Q[0],), (Q[0],))
