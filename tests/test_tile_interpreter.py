"""Kernels written by hand in the `tile` dialect mean what they should, by the interpreter."""

from __future__ import annotations

import numpy as np
import pytest

from hand_written import attention, attention_inputs, text
from tile_interpreter import run


@pytest.mark.parametrize("exact", [False, True], ids=["f32", "exact"])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "queries", "keys", "group"),
    [(1, 2, 2, 48, 128, 1), (2, 2, 1, 131, 200, 1), (1, 6, 2, 50, 257, 3), (1, 1, 1, 1, 1, 1), (1, 4, 4, 129, 129, 1)],
)
def test_attention_forward(batch, heads, kv_heads, queries, keys, group, exact):
    query, key, value, slopes = attention_inputs(np.random.default_rng(0), batch, heads, kv_heads, queries, keys)
    out, lse = np.full_like(query, np.nan), np.full(query.shape[:3], np.nan, np.float32)
    run(text("attention_forward"), query, key, value, 0.125, slopes, out, lse, group, exact=exact, shuffle=queries)
    expected_out, expected_lse = attention(query, key, value, 0.125, slopes)
    np.testing.assert_allclose(out, expected_out, atol=2e-6, rtol=0)
    np.testing.assert_allclose(lse, expected_lse, atol=4e-6, rtol=0)


def test_attention_forward_strides():
    query, key, value, slopes = attention_inputs(np.random.default_rng(1), 2, 2, 2, 70, 70)
    packed = np.stack([query, key, value], axis=2).transpose(0, 3, 1, 2, 4).copy()  # (b, s, h, 3, e): all permuted
    query, key, value = (packed[:, :, :, i].transpose(0, 2, 1, 3) for i in range(3))
    out = np.full((2, 70, 2, 64), np.nan, np.float32).transpose(0, 2, 1, 3)
    lse = np.empty((2, 2, 70), np.float32)
    run(text("attention_forward"), query, key, value, 0.125, slopes, out, lse, 1)
    np.testing.assert_allclose(out, attention(query, key, value, 0.125, slopes)[0], atol=2e-6, rtol=0)


def test_dead_keys_do_not_leak():
    query, key, value, slopes = attention_inputs(np.random.default_rng(2), 1, 1, 1, 70, 90)
    expected, _ = attention(query, key, value, 0.125, slopes)
    key[:, :, 60:], value[:, :, 60:] = np.nan, np.inf
    out, lse = np.empty_like(query), np.empty((1, 1, 70), np.float32)
    run(text("attention_forward"), query, key, value, 0.125, slopes, out, lse, 1)
    np.testing.assert_allclose(out[:, :, :60], expected[:, :, :60], atol=2e-6, rtol=0)
    assert not np.isfinite(out[:, :, 60:]).any()


def test_a_gather_out_of_range_is_a_fault():
    query, key, value, slopes = attention_inputs(np.random.default_rng(3), 1, 2, 2, 10, 10)
    unproven = text("attention_forward").replace(" proven", "")
    with pytest.raises(IndexError, match="slopes"):
        run(unproven, query, key, value, 0.125, slopes[:1], np.empty_like(query), np.empty((1, 2, 10), np.float32), 1)


def attention_gradients(query, key, value, scale, slopes, d_out):
    """(out, lse, dQ, dK, dV, dslopes) of causal attention with ALiBi by torch's autograd in f64, dead queries at 0."""
    import torch

    leaves = [torch.from_numpy(array.copy()).double().requires_grad_() for array in (query, key, value, slopes)]
    q_, k_, v_, slopes_ = leaves
    ratio = query.shape[1] // key.shape[1]
    k_, v_ = (t.repeat_interleave(ratio, dim=1) for t in (k_, v_))
    q, k = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])
    scores = scale * q_ @ k_.mT + slopes_[:, None, None] * (k - q)
    scores = scores.masked_fill(q < k, -torch.inf)
    out = scores.softmax(dim=-1) @ v_
    gradients = torch.autograd.grad(out, leaves, torch.from_numpy(d_out).double())
    return tuple(t.detach().numpy() for t in (out, scores.logsumexp(dim=-1), *gradients))


@pytest.mark.parametrize("exact", [False, True], ids=["f32", "exact"])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "queries", "keys"),
    [(1, 1, 1, 48, 64), (2, 2, 2, 130, 130), (2, 6, 2, 50, 129), (1, 2, 1, 65, 1)],
)
def test_attention_backward(batch, heads, kv_heads, queries, keys, exact):
    rng = np.random.default_rng(5)
    query, key, value, slopes = attention_inputs(rng, batch, heads, kv_heads, queries, keys)
    d_out = rng.standard_normal(query.shape, np.float32)
    out, lse, *expected = attention_gradients(query, key, value, 0.125, slopes, d_out)
    gradients = [np.zeros_like(query), np.full_like(key, np.nan), np.full_like(value, np.nan), np.zeros(heads)]
    saved = [out.astype(np.float32), lse.astype(np.float32), d_out]
    run(text("attention_backward"), query, key, value, 0.125, slopes, *saved, *gradients, exact=exact, shuffle=keys)
    for gradient, wanted in zip(gradients, expected, strict=True):
        # A slope sums over all pairs what may cancel, times distances up to the number of queries.
        unit = 1e-5 if gradient.ndim == 4 else 1e-6 * batch * queries**2
        np.testing.assert_allclose(gradient, wanted, atol=unit * max(1, np.abs(wanted).max()), rtol=0)
