"""`attnc.numpy.attention`: arrays of every kind, and what a call costs and imports."""

from __future__ import annotations

import numpy as np
import pytest

import attnc.numpy
from attnc.errors import ArgumentsError, CaptureIndexError, DtypeError, ShapeError, UnsupportedTensorError

RNG = np.random.default_rng(0)


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def dense(query, key, value, score_mod=None, mask_mod=None):
    """The formula in float64."""
    query, key, value = (array.astype(np.float64) for array in (query, key, value))
    group = query.shape[1] // key.shape[1]
    key, value = (np.repeat(array, group, axis=1) for array in (key, value))
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    places = [place.astype(np.int32) for place in np.ogrid[tuple(slice(size) for size in scores.shape)]]
    if score_mod is not None:
        scores = score_mod(scores, *places)
    if mask_mod is not None:
        scores = np.where(mask_mod(*places), scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(top == -np.inf, 0, top))
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return weights @ value / np.where(total == 0, 1, total), (top + np.log(total))[..., 0]


slopes = np.exp2(-np.arange(1.0, 5)).astype(np.float32)


def alibi(score, b, h, q, k):
    return score + slopes[h] * (k - q)


def causal(b, h, q, k):
    return q >= k


VIEWS = {
    "queries turned round": lambda x: x[:, :, ::-1],
    "head dim turned round": lambda x: x[..., ::-1],
    "batch and heads turned round": lambda x: x[::-1, ::-1],
    "every other": lambda x: np.repeat(np.repeat(x, 2, axis=2), 3, axis=3)[:, :, ::-2, ::-3],
    "Fortran": np.asfortranarray,
    "BSHD turned round": lambda x: x.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)[:, :, ::-1],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("queries", [1, 33, 140])
def test_strides(view, queries):
    query, key, value = (VIEWS[view](normal(2, 4, n, 16)) for n in (queries, 150, 150))
    out, lse = attnc.numpy.attention(query, key, value, alibi, causal, return_lse=True)
    exact, exact_lse = dense(query, key, value, alibi, causal)
    np.testing.assert_allclose(out, exact, rtol=0, atol=5e-5)
    np.testing.assert_allclose(lse, exact_lse, rtol=0, atol=5e-5)
    assert out.strides[-1] == 4 and lse.flags.c_contiguous
    assert np.argsort(out.strides[:3]).tolist() == np.argsort(np.abs(query.strides[:3])).tolist()


def test_errors():
    query = normal(1, 2, 5, 8)
    with pytest.raises(ShapeError):
        attnc.numpy.attention(query, normal(1, 2, 5, 9), query)
    with pytest.raises(DtypeError, match="float32, float64 and float32"):
        attnc.numpy.attention(query, query.astype(np.float64), query)
    with pytest.raises(ArgumentsError, match="query is list"):
        attnc.numpy.attention(query.tolist(), query, query)
    with pytest.raises(UnsupportedTensorError, match="MaskedArray"):
        attnc.numpy.attention(np.ma.masked_array(query), query, query)
    bias = normal(4)
    with pytest.raises(CaptureIndexError, match=r"index 4 .* array 'bias' with size 4, at b=0, h=0, q=0, k=4"):
        attnc.numpy.attention(query, query, query, lambda score, b, h, q, k: score + bias[k])
