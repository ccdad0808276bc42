"""`attnc.numpy.attention` on arrays of every kind. Runs without torch, too (test_numpy_alone.py)."""

from __future__ import annotations

import ctypes
import mmap
import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import attnc.numpy
from attnc.errors import ArgumentsError, DtypeError, ShapeError, UnsupportedTensorError

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


# -- query, key and value -------------------------------------------------------------------------------------------------

EPS = {"float64": 2**-52, "float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7}


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize(("shape", "kv_shape"), [((2, 6, 37, 24), (1, 2, 70, 24)), ((1, 8, 1, 64), (1, 1, 300, 64))])
def test_dtypes_and_grouped_heads(dtype, shape, kv_shape):
    element = np.dtype(getattr(ml_dtypes, dtype, dtype))
    query, key, value = (normal(*size).astype(element) for size in (shape, kv_shape, (*kv_shape[:3], 17)))
    out, lse = attnc.numpy.attention(query, key, value, mask_mod=lambda b, h, q, k: k % 5 != h, scale=0.25, return_lse=True)
    assert out.dtype == element and out.shape == (*shape[:3], 17)
    assert lse.dtype == (np.float64 if dtype == "float64" else np.float32)
    exact, exact_lse = dense(query * np.float64(0.25 * shape[3] ** 0.5), key, value, None, lambda b, h, q, k: k % 5 != h)
    np.testing.assert_allclose(out.astype(np.float64), exact, rtol=0, atol=16 * EPS[dtype])
    np.testing.assert_allclose(lse, exact_lse, rtol=0, atol=64 * EPS["float32" if dtype != "float64" else dtype])


@pytest.mark.parametrize("shapes", [((2, 3, 0, 8), (2, 3, 5, 8)), ((2, 3, 4, 8), (2, 3, 0, 8)), ((0, 3, 4, 8), (1, 3, 5, 8))])
def test_empty(shapes):
    query, key = (normal(*shape) for shape in shapes)
    out, lse = attnc.numpy.attention(query, key, key, causal_score, return_lse=True)
    assert out.shape == query.shape and not out.any()
    assert lse.shape == query.shape[:3] and np.isneginf(lse).all()
    assert attnc.numpy.attention(query, key, key).shape == query.shape


def causal_score(score, b, h, q, k):
    return np.where(q >= k, score, -np.inf)


def record_array(values: np.ndarray, packed: bool) -> np.ndarray:
    """The field of a structured array: its elements are apart by no multiple of their size (or by one, and aligned)."""
    fields: Any = {"names": ["a", "x"], "formats": ["u1", values.dtype], "offsets": [0, 1 if packed else 4]}
    whole = np.zeros(values.shape, np.dtype(fields))
    whole["x"] = values
    return whole["x"]


@pytest.mark.parametrize("packed", [True, False])
def test_uneven_strides_and_alignment(packed):
    query, key, value = (normal(1, 2, 20, 8) for _ in range(3))

    def call(change):
        return attnc.numpy.attention(change(query), change(key), change(value), alibi, causal)

    shifted = []

    def shift(array):
        shifted.append(np.frombuffer(b"x" + array.tobytes(), np.float32, offset=1).reshape(array.shape))
        return shifted[-1]

    expected = call(np.ascontiguousarray)
    np.testing.assert_allclose(call(lambda array: record_array(array, packed)), expected, atol=1e-6)
    np.testing.assert_array_equal(call(shift), expected)
    for array in shifted:
        assert not array.flags.aligned and not array.flags.writeable


def test_memory_maps_and_broadcast_heads(tmp_path):
    mapped = np.memmap(tmp_path / "array", np.float32, "w+", shape=(1, 1, 20, 8))
    mapped[:] = normal(1, 1, 20, 8)
    heads = np.broadcast_to(np.asarray(mapped), (1, 4, 20, 8))
    query = normal(1, 4, 20, 8)
    bias = np.memmap(tmp_path / "bias", np.float32, "w+", shape=(20,))
    out = attnc.numpy.attention(query, mapped, heads[:, :1], lambda score, b, h, q, k: score + bias[k])
    np.testing.assert_allclose(out, attnc.numpy.attention(query, heads, heads), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda x: x.astype(">f4"), DtypeError, "foreign byte order"),
        (lambda x: x.astype(np.float128), DtypeError, "float128"),
        (lambda x: x.astype(np.int32), DtypeError, "int32"),
        (lambda x: x.astype(np.complex64), DtypeError, "complex64"),
        (lambda x: x.astype(object), DtypeError, "object"),
        (lambda x: np.ma.masked_array(x), UnsupportedTensorError, "subclass of numpy.ndarray"),
        (lambda x: np.rec.array(x), UnsupportedTensorError, "subclass of numpy.ndarray"),
        (lambda x: x.tolist(), ArgumentsError, "pass NumPy arrays"),
        (lambda x: None, ArgumentsError, "None, not a NumPy array"),
        (lambda x: x[0], ShapeError, "3 dimensions"),
    ],
)
def test_other_arrays_are_refused(change, error, words):
    array = change(normal(1, 2, 5, 8))
    with pytest.raises(error, match=words):
        attnc.numpy.attention(array, array, array)


@pytest.mark.parametrize("scale", [0.5, np.float32(0.5), np.array(0.5), 1, None])
def test_scales(scale):
    query = normal(1, 1, 4, 4)
    np.testing.assert_allclose(
        attnc.numpy.attention(query, query, query, scale=scale),
        dense(query * (1 if scale is None else 2 * float(scale)), query, query)[0],
        atol=1e-5,
    )


def test_other_scales_are_refused():
    query = normal(1, 1, 4, 4)
    scales: list[Any] = [np.ones(3), "1", 1j]
    for scale in scales:
        with pytest.raises(DtypeError, match="scale is"):
            attnc.numpy.attention(query, query, query, scale=scale)


# -- memory -----------------------------------------------------------------------------------------------------------------

libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(array: np.ndarray, generator: random.Random) -> np.ndarray:
    """A copy turned round, stretched and permuted as by chance, against a page that may not be touched."""
    order = generator.sample(range(array.ndim), array.ndim) if generator.random() < 0.6 else list(range(array.ndim))
    steps = [generator.choice([1, 1, -1, 2, -2, -3]) for _ in order]
    sizes = [(array.shape[dim] - 1) * abs(step) + 1 for dim, step in zip(order, steps, strict=True)]
    size = int(np.prod(sizes)) * array.itemsize
    body = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, body + 2 * mmap.PAGESIZE)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    offset = mmap.PAGESIZE + (body - size if generator.random() < 0.6 else 0)
    flat = np.frombuffer(memory, np.uint8, count=size, offset=offset)
    flat[:] = 0x7F  # what lies between the elements is garbage
    stretched = flat.view(array.dtype).reshape(sizes)[tuple(slice(None, None, step) for step in steps)]
    result = stretched.transpose([order.index(dim) for dim in range(array.ndim)])
    result[...] = array
    for address in (first, first + mmap.PAGESIZE + body):
        assert libc.mprotect(address, mmap.PAGESIZE, 0) == 0
    return result


@pytest.mark.parametrize("seed", range(24))
def test_nothing_outside_is_touched(seed):
    r = random.Random(seed)
    dtype = np.dtype((np.float32, np.float16, ml_dtypes.bfloat16, np.float64)[seed % 4])
    batch, kv_heads, group = r.choice([1, 2]), r.choice([1, 2]), r.choice([1, 1, 3])
    head_dim, value_dim = r.choice([1, 3, 8, 17, 64]), r.choice([1, 13, 33, 64])
    queries, keys = r.choice([1, 2, 7, 17, 65, 129]), r.choice([1, 3, 15, 17, 65, 257])
    query = normal(batch, kv_heads * group, queries, head_dim).astype(dtype)
    key, value = (normal(batch, kv_heads, keys, width).astype(dtype) for width in (head_dim, value_dim))
    bias, relative = normal(queries, keys), normal(queries + keys)
    table = RNG.integers(0, keys, keys)

    def run(make):
        by_both, by_distance, jumps = map(make, (bias, relative, table))
        score_mods = [
            lambda s, b, h, q, k: s + by_both[q, k],
            lambda s, b, h, q, k: s + by_distance[q - k],
            lambda s, b, h, q, k: s + by_both[q, jumps[k]] + by_distance[-k - 1],
        ]
        mask_mods = [None, lambda b, h, q, k: (jumps[k] > 2) | (k == q), lambda b, h, q, k: q >= k]
        mods = score_mods[seed % 3], mask_mods[seed // 3 % 3]
        return attnc.numpy.attention(make(query), make(key), make(value), *mods, return_lse=True)

    plain, apart = run(np.ascontiguousarray), run(lambda array: guarded(array, r))
    for one, other in zip(plain, apart, strict=True):
        atol = 64 * EPS[dtype.name]
        np.testing.assert_allclose(one.astype(np.float64), other.astype(np.float64), rtol=0, atol=atol)
