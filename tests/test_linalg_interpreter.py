"""The interpreter of the linalg stage, the judge of the passes on graphs, is itself tried: on values worked out elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from attention_text import ALIBI_CAUSAL, CAUSAL, attention_text, parse
from linalg_interpreter import run_function

RNG = np.random.default_rng(0)


def normal(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def dense(query: np.ndarray, key: np.ndarray, value: np.ndarray, scale: float, bias: np.ndarray | float = 0.0) -> tuple:
    group = query.shape[1] // key.shape[1]
    key, value = (np.repeat(x.astype(np.float64), group, axis=1) for x in (key, value))
    score = np.einsum("bhqe,bhke->bhqk", query.astype(np.float64), key) * scale + bias
    top = score.max(-1, keepdims=True)
    weight = np.exp(score - np.where(np.isinf(top), 0, top))
    total = weight.sum(-1, keepdims=True)
    out = np.einsum("bhqk,bhkn->bhqn", np.where(total == 0, 0, weight / np.where(total == 0, 1, total)), value)
    return out, (top + np.log(total))[..., 0], top[..., 0]


def causal(queries: int, keys: int) -> np.ndarray:
    return np.where(np.arange(queries)[:, None] >= np.arange(keys), 0.0, -np.inf)


@pytest.mark.parametrize("outputs", [("out",), ("out", "lse", "max")])
def test_attention_with_a_region(outputs: tuple[str, ...]):
    module = parse(attention_text(ALIBI_CAUSAL, [("slopes", "tensor<?xf32>", "capture")], outputs=outputs))
    query, key, value, slopes = normal(2, 4, 5, 8), normal(2, 2, 7, 8), normal(2, 2, 7, 8), normal(4)
    results = run_function(module, "attention", [query, key, value, 0.3, slopes])
    distance = np.arange(7) - np.arange(5)[:, None]
    expected = dense(query, key, value, 0.3, slopes[None, :, None, None] * distance + causal(5, 7))
    for result, wanted in zip(results, expected, strict=False):
        np.testing.assert_allclose(result, wanted, atol=2e-6)


@pytest.mark.filterwarnings("ignore:divide by zero")
def test_dead_keys_and_rows():
    region = CAUSAL.replace("sge, %q32, %k32", "sgt, %q32, %k32")  # the first query has no key
    module = parse(attention_text(region, outputs=("out", "lse", "max")))
    query, key, value = normal(1, 1, 4, 8), normal(1, 1, 4, 8), normal(1, 1, 4, 8)
    value[0, 0, 3] = np.nan  # no query sees the last key
    key[0, 0, 3] = np.inf
    out, lse, top = run_function(module, "attention", [query, key, value, 1.0])
    assert (out[0, 0, 0] == 0).all() and lse[0, 0, 0] == top[0, 0, 0] == -np.inf
    assert np.isfinite(out).all()


@pytest.mark.parametrize("causal_region, rows", [(False, (0.5530, 0.6328, 0.7011)), (True, (0.1, 0.3509, 0.7011))])
def test_the_values_of_a_known_file(causal_region: bool, rows: tuple[float, ...]):
    module = parse(attention_text(CAUSAL if causal_region else "", head_dim=4))
    x = (np.arange(12).reshape(1, 1, 3, 4) * 0.1 + 0.1).astype(np.float32)
    (out,) = run_function(module, "attention", [x, x, x, 0.5])
    np.testing.assert_allclose(out[0, 0], np.array(rows)[:, None] + np.arange(4) * 0.1, atol=1e-4)


DOMAIN = """
func.func @main(%q: tensor<3x2x5xf16>, %k: tensor<2x5x4x7xf16>, %v: tensor<6x7x2x4xf16>, %m: tensor<3x7x4xi8>) -> tensor<6x3x2xf16> {
  %scale = arith.constant 0.5 : f32
  %init = tensor.empty() : tensor<6x3x2xf16>
  %r = "iree_linalg_ext.attention"(%q, %k, %v, %scale, %m, %init) <{indexing_maps = [
    affine_map<(m, b, e, k0, k1, n) -> (m, b, e)>, affine_map<(m, b, e, k0, k1, n) -> (b, e, k0, k1)>,
    affine_map<(m, b, e, k0, k1, n) -> (n, k1, b, k0)>, affine_map<(m, b, e, k0, k1, n) -> ()>,
    affine_map<(m, b, e, k0, k1, n) -> (m, k1, k0)>, affine_map<(m, b, e, k0, k1, n) -> (n, m, b)>]}> ({
  ^bb0(%s: f32):
    "iree_linalg_ext.yield"(%s) : (f32) -> ()
  }) : (tensor<3x2x5xf16>, tensor<2x5x4x7xf16>, tensor<6x7x2x4xf16>, f32, tensor<3x7x4xi8>, tensor<6x3x2xf16>) -> tensor<6x3x2xf16>
  func.return %r : tensor<6x3x2xf16>
}
"""  # noqa: E501


def test_any_domain_and_a_mask():
    q, k, v = normal(3, 2, 5, dtype=np.float16), normal(2, 5, 4, 7, dtype=np.float16), normal(6, 7, 2, 4, dtype=np.float16)
    mask = RNG.integers(0, 2, (3, 7, 4), dtype=np.int8)
    (out,) = run_function(parse(DOMAIN), "main", [q, k, v, mask])
    flat_k = k.transpose(0, 2, 3, 1).reshape(1, 2, 28, 5)
    flat_v = v.transpose(2, 3, 1, 0).reshape(1, 2, 28, 6)
    bias = np.where(mask.transpose(0, 2, 1).reshape(3, 28) == 0, -np.inf, 0.0)
    expected, _, _ = dense(q.transpose(1, 0, 2)[None], flat_k, flat_v, 0.5, bias)
    np.testing.assert_allclose(out.transpose(2, 1, 0), expected[0], atol=2e-3)


GRAPH = """
#id = affine_map<(i, j) -> (i, j)>
#row = affine_map<(i, j) -> (i)>
#unit = affine_map<(i, j) -> (i, 0)>
func.func @main(%x: tensor<?x4xf32>, %table: tensor<9xf32>) -> (tensor<?xf32>, tensor<4x?xf32>, tensor<?x2x2xf32>, tensor<?x6xf32>) {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %x, %c0 : tensor<?x4xf32>
  %zero = arith.constant 0.0 : f32
  %e = tensor.empty(%n) : tensor<?xf32>
  %f = linalg.fill ins(%zero : f32) outs(%e : tensor<?xf32>) -> tensor<?xf32>
  %sum = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "reduction"]}
      ins(%x : tensor<?x4xf32>) outs(%f : tensor<?xf32>) {
  ^bb0(%a: f32, %o: f32):
    %s = arith.addf %a, %o : f32
    linalg.yield %s : f32
  } -> tensor<?xf32>
  %column = tensor.expand_shape %sum [[0, 1]] output_shape [%n, 1] : tensor<?xf32> into tensor<?x1xf32>
  %y0 = tensor.empty(%n) : tensor<?x4xf32>
  %y = linalg.generic {indexing_maps = [#id, #unit, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x, %column : tensor<?x4xf32>, tensor<?x1xf32>) outs(%y0 : tensor<?x4xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %i = linalg.index 0 : index
    %j = linalg.index 1 : index
    %ij = arith.addi %i, %j : index
    %t = tensor.extract %table[%ij] : tensor<9xf32>
    %d = arith.divf %a, %b : f32
    %s = arith.addf %d, %t : f32
    linalg.yield %s : f32
  } -> tensor<?x4xf32>
  %t0 = tensor.empty(%n) : tensor<4x?xf32>
  %t = linalg.transpose ins(%y : tensor<?x4xf32>) outs(%t0 : tensor<4x?xf32>) permutation = [1, 0]
  %split = tensor.expand_shape %y [[0], [1, 2]] output_shape [%n, 2, 2] : tensor<?x4xf32> into tensor<?x2x2xf32>
  %part = tensor.extract_slice %y[0, 1] [%n, 2] [1, 2] : tensor<?x4xf32> to tensor<?x2xf32>
  %c0e = tensor.empty(%n) : tensor<?x6xf32>
  %c1e = tensor.insert_slice %y into %c0e[0, 0] [%n, 4] [1, 1] : tensor<?x4xf32> into tensor<?x6xf32>
  %c2e = tensor.insert_slice %part into %c1e[0, 4] [%n, 2] [1, 1] : tensor<?x2xf32> into tensor<?x6xf32>
  func.return %sum, %t, %split, %c2e : tensor<?xf32>, tensor<4x?xf32>, tensor<?x2x2xf32>, tensor<?x6xf32>
}
"""  # noqa: E501


def test_generics_and_tensor_operations():
    x, table = normal(5, 4), normal(9)
    total, transposed, split, joined = run_function(parse(GRAPH), "main", [x, table])
    np.testing.assert_allclose(total, x.sum(1), rtol=1e-5)
    y = x / total[:, None] + table[np.arange(5)[:, None] + np.arange(4)]
    np.testing.assert_allclose(transposed, y.T, rtol=1e-6)
    np.testing.assert_allclose(split, y.reshape(5, 2, 2), rtol=1e-6)
    np.testing.assert_allclose(joined, np.concatenate([y, y[:, 1::2]], 1), rtol=1e-6)
