"""IREE's attention operation as native code: modules that people work on, run, and compared with the dense formula.

Each of them is computed wrongly, or not at all, by IREE 3.13 on CPUs: causal masks by position, head dims above 128, a soft cap
that must see natural units, rows without a live key.

    python examples/from_iree.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

import attnc

TEMPLATE = """
func.func @main(%query: tensor<{B}x{M}x{E}xf32>, %key: tensor<{B}x{K}x{E}xf32>, %value: tensor<{B}x{K}x{N}xf32>)
    -> tensor<{B}x{N}x{M}xf32> {{
  %scale = arith.constant 0.125 : f32
  %minus_infinity = arith.constant 0xFF800000 : f32
  %init = tensor.empty() : tensor<{B}x{M}x{N}xf32>
  %out = iree_linalg_ext.attention {{indexing_maps = [
      affine_map<(b, m, k, e, n) -> (b, m, e)>, affine_map<(b, m, k, e, n) -> (b, k, e)>,
      affine_map<(b, m, k, e, n) -> (b, k, n)>, affine_map<(b, m, k, e, n) -> ()>, affine_map<(b, m, k, e, n) -> (b, m, n)>]}}
      ins(%query, %key, %value, %scale : tensor<{B}x{M}x{E}xf32>, tensor<{B}x{K}x{E}xf32>, tensor<{B}x{K}x{N}xf32>, f32)
      outs(%init : tensor<{B}x{M}x{N}xf32>) {{
    ^bb0(%score: f32):
{region}
    }} -> tensor<{B}x{M}x{N}xf32>
  %empty = tensor.empty() : tensor<{B}x{N}x{M}xf32>
  %result = linalg.transpose ins(%out : tensor<{B}x{M}x{N}xf32>) outs(%empty : tensor<{B}x{N}x{M}xf32>) permutation = [0, 2, 1]
  return %result : tensor<{B}x{N}x{M}xf32>
}}
"""

PLAIN = """
      iree_linalg_ext.yield %score : f32"""
CAUSAL = """
      %row = iree_linalg_ext.index 1 : index
      %column = iree_linalg_ext.index 2 : index
      %live = arith.cmpi sge, %row, %column : index
      %masked = arith.select %live, %score, %minus_infinity : f32
      iree_linalg_ext.yield %masked : f32"""
SOFT_CAP = """
      %cap = arith.constant 2.0 : f32
      %part = arith.divf %score, %cap : f32
      %bent = math.tanh %part : f32
      %capped = arith.mulf %bent, %cap : f32
      iree_linalg_ext.yield %capped : f32"""
LATE_KEYS = """
      %row = iree_linalg_ext.index 1 : index
      %column = iree_linalg_ext.index 2 : index
      %late = arith.constant 100 : index
      %first = arith.addi %column, %late : index
      %live = arith.cmpi sge, %row, %first : index
      %masked = arith.select %live, %score, %minus_infinity : f32
      iree_linalg_ext.yield %masked : f32"""

Scores = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
CASES: dict[str, tuple[dict[str, int], str, Scores]] = {
    "plain, output transposed": ({}, PLAIN, lambda s, q, k: s),
    "causal by position": ({}, CAUSAL, lambda s, q, k: np.where(q >= k, s, -np.inf)),
    "soft cap": ({}, SOFT_CAP, lambda s, q, k: 2 * np.tanh(s / 2)),
    "head dim 256": ({"E": 256, "N": 192}, PLAIN, lambda s, q, k: s),
    "100 rows without a live key": ({}, LATE_KEYS, lambda s, q, k: np.where(q >= k + 100, s, -np.inf)),
}


def dense(query: np.ndarray, key: np.ndarray, value: np.ndarray, scores: Scores) -> np.ndarray:
    """The formula in f64; a row without a live key is 0."""
    s = np.einsum("bme,bke->bmk", query.astype(float), key) * 0.125
    s = scores(s, np.arange(query.shape[1])[:, None], np.arange(key.shape[1]))
    top = s.max(axis=-1, keepdims=True)
    weights = np.exp(s - np.where(top == -np.inf, 0, top))
    total = weights.sum(axis=-1, keepdims=True)
    return np.einsum("bmk,bkn->bnm", weights / np.where(total == 0, 1, total), value)


def main() -> None:
    rng = np.random.default_rng(0)
    for name, (more, region, scores) in CASES.items():
        sizes = {"B": 8, "M": 512, "K": 512, "E": 64, "N": 64, **more}
        text = TEMPLATE.format(**sizes, region=region.strip("\n"))
        query, key, value = (
            rng.standard_normal((sizes["B"], sizes[rows], sizes[columns]), np.float32)
            for rows, columns in (("M", "E"), ("K", "E"), ("K", "N"))
        )
        begin = time.perf_counter()
        program = attnc.compile(text)
        compiled = time.perf_counter()
        out = program(query, key, value)
        again = time.perf_counter()
        out = program(query, key, value)
        end = time.perf_counter()
        error = np.abs(out - dense(query, key, value, scores)).max()
        took = f"compiled in {compiled - begin:5.2f} s, runs in {(end - again) * 1e3:5.1f} ms"
        print(f"{name:30} largest error {error:.1e}   {took}   kernels: {', '.join(program.kernels)}")
    print("\nThe last program: a function for the attention kernel, and a host function, which only knows views and calls:\n")
    from attnc import graph_pipeline
    from attnc.mlir_text import parse_module
    from attnc.target import Target

    print(graph_pipeline.lower_graph(parse_module(text), Target.host()))


if __name__ == "__main__":
    main()
