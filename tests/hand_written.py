"""The kernels of tests/tile: inputs for each, and what NumPy makes of them in f64. KERNELS are no softmax attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent / "tile"
Case = tuple[list, np.ndarray, np.ndarray]  # arguments of the kernel, the output among them, and the expected output


def text(name: str) -> str:
    """The MLIR of a kernel written by hand."""
    return (HERE / f"{name}.mlir").read_text()


def retention(rng: np.random.Generator, queries: int, keys: int) -> Case:
    query, key = (rng.standard_normal((2, 3, length, 32), np.float32) for length in (queries, keys))
    value = rng.standard_normal((2, 3, keys, 48), np.float32)
    decay = np.array([0.9, 0.97, 1.0], np.float32)
    out = np.full((2, 3, queries, 48), np.nan, np.float32)
    distance = np.arange(queries)[:, None] - np.arange(keys)
    weights = np.where(distance >= 0, decay.astype(float)[:, None, None] ** np.maximum(distance, 0), 0)
    expected = weights * (query.astype(float) @ key.astype(float).swapaxes(-1, -2)) @ value.astype(float)
    return [query, key, value, decay, out], out, expected


def relu_row_sums(rng: np.random.Generator, queries: int, keys: int) -> Case:
    query, key = rng.standard_normal((queries, 24)), rng.standard_normal((keys, 24))
    out = np.full(queries, np.nan)
    return [query, key, out], out, np.maximum(query @ key.T, 0).sum(axis=1)


def chained_dots(rng: np.random.Generator, queries: int, keys: int) -> Case:
    query = rng.standard_normal((queries, 40)).astype(np.float16)
    key, value = (rng.standard_normal((keys, 40)).astype(np.float16) for _ in range(2))
    weight = rng.standard_normal((40, 16)).astype(np.float16)
    out = np.full((queries, 16), np.nan, np.float16)
    scale = 0.125 / keys
    expected = query.astype(float) @ key.astype(float).T @ value.astype(float) @ weight.astype(float) * scale
    return [query, key, value, weight, scale, out], out, expected


def rms_product(rng: np.random.Generator, rows: int, columns: int) -> Case:
    x, gain = rng.standard_normal((rows, 96), np.float32), rng.standard_normal(96, np.float32)
    weight = rng.standard_normal((96, columns), np.float32)
    out = np.full((rows, columns), np.nan, np.float32)
    wide = x.astype(float)
    normal = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * gain
    return [x, gain, weight, 1e-5, out], out, normal @ weight.astype(float)


def matmul_gelu(rng: np.random.Generator, rows: int, shared: int) -> Case:
    a, b = rng.standard_normal((rows, shared), np.float32), rng.standard_normal((shared, 77), np.float32)
    bias = rng.standard_normal(77, np.float32)
    out = np.full((rows, 77), np.nan, np.float32)
    x = a.astype(float) @ b.astype(float) + bias
    return [a, b, bias, out], out, x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


KERNELS: dict[str, Callable[[np.random.Generator, int, int], Case]] = {
    "retention": retention,
    "relu_row_sums": relu_row_sums,
    "chained_dots": chained_dots,
    "rms_product": rms_product,
    "matmul_gelu": matmul_gelu,
}
SIZES = [(1, 1), (36, 80), (50, 131), (131, 50), (200, 257)]


def tolerance(out: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference allowed: a few roundings of sums whose terms are about as large as the result."""
    return 60 * float(np.finfo(out.dtype).eps) * max(1.0, float(np.abs(expected).max()))


def attention(query: np.ndarray, key: np.ndarray, value: np.ndarray, scale: float, slopes: np.ndarray):
    """Causal attention with ALiBi, dense, in f64: (out, lse)."""
    query, key, value = (array.astype(np.float64) for array in (query, key, value))
    ratio = query.shape[1] // key.shape[1]
    key, value = np.repeat(key, ratio, axis=1), np.repeat(value, ratio, axis=1)
    q, k = np.arange(query.shape[2])[:, None], np.arange(key.shape[2])[None, :]
    scores = scale * query @ key.swapaxes(-1, -2) + slopes.astype(np.float64)[:, None, None] * (k - q)
    scores = np.where(q >= k, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / total @ value, (top + np.log(total))[..., 0]


def attention_inputs(rng: np.random.Generator, batch: int, heads: int, kv_heads: int, queries: int, keys: int):
    """Query, key, value and slopes for the attention kernels, whose head dim is 64."""
    query = rng.standard_normal((batch, heads, queries, 64), np.float32)
    key, value = (rng.standard_normal((batch, kv_heads, keys, 64), np.float32) for _ in range(2))
    slopes = 2.0 ** -(np.arange(heads, dtype=np.float32) + 1)
    return query, key, value, slopes
