# ruff: noqa: E501 - IR is long
"""`split-reduction`: two kernels for few queries, and what they compute, by the interpreter."""

from __future__ import annotations

import numpy as np
import pytest

from attention_text import ALIBI_CAUSAL, attention_text
from attnc.errors import LoweringError
from filechecks import filecheck
from hand_written import attention
from passes import passes_until, run_passes
from tile_interpreter import run

SLOPES = [("slopes", "tensor<?xf32>", "capture")]
PASSES = passes_until("split-reduction")


def text(**options) -> str:
    """Attention with ALiBi and a causal mask, marked as one of few queries."""
    return attention_text(ALIBI_CAUSAL, SLOPES, **options).replace("attributes {", "attributes {attnc.few_queries, ")


def test_two_kernels():
    filecheck(
        run_passes(text(head_dim=64, outputs=("out", "lse")), *PASSES),
        """
        // CHECK:      tile.kernel @attention_split(%query: {{.*}}, %out: {{.*}}, %lse: {{.*}}, %group: index, %partial_acc: memref<?x?x?x?x64xf32, strided<[?, ?, ?, ?, 1]>>, %partial_max: memref<?x?x?x?xf32, strided<[?, ?, ?, 1]>>, %partial_sum: memref<?x?x?x?xf32, strided<[?, ?, ?, 1]>>) roles ["query", {{.*}}, "group", "partial_acc", "partial_max", "partial_sum"]
        // CHECK-SAME:   attnc.scratch = ["", {{.*}}, "query.0 query.1 query.2 key.2/1024 64", "query.0 query.1 query.2 key.2/1024", "query.0 query.1 query.2 key.2/1024"]
        // CHECK:        tile.grid (%b, %hg, %m0, %s0) to (%batch, %groups, %rows, %keys) step (1, 1, 24, 1024) descending {
        // CHECK:          %next_chunk = arith.addi %s0, %c1024 : index
        // CHECK-NEXT:     %chunk_end = arith.minui %next_chunk, %keys : index
        // CHECK-NEXT:     %chunk = arith.divui %s0, %c1024 : index
        // CHECK-NEXT:     %max, %sum, %acc = tile.for %k0 = %s0 to %chunk_end step 256 carry(
        // CHECK:            "iree_linalg_ext.online_attention"
        // CHECK:            }) {attnc.staging = "none", attnc.max_beside_sum} :
        // CHECK:          tile.store %acc, %partial_acc[%b, %h, %q, %chunk, %e]
        // CHECK-NEXT:     tile.store %max, %partial_max[%b, %h, %q, %chunk]
        // CHECK-NEXT:     tile.store %sum, %partial_sum[%b, %h, %q, %chunk]
        // CHECK-NEXT:     tile.yield
        // CHECK:      tile.kernel @attention_merge(%query: {{.*}}, %partial_sum: memref<?x?x?x?xf32, strided<[?, ?, ?, 1]>>)
        // CHECK:        %last_chunk = arith.addi %keys, %c1023 : index
        // CHECK:        %chunks = arith.divui %last_chunk, %c1024 : index
        // CHECK:        tile.grid (%b, %hg, %m0) to (%batch, %groups, %rows) step (1, 1, 24) descending {
        // CHECK-NOT:      tile.load %query
        // CHECK:          %max, %sum, %acc = tile.for %chunk = {{.*}} to %chunks step 1 carry(%max_old = %max0, %sum_old = %sum0, %acc_old = %acc0)
        // CHECK-NEXT:       %[[ACC:.*]] = tile.load %partial_acc[%b, %h, %q, %chunk, %e]
        // CHECK:            %max_new = tile.map
        // CHECK:            %anchor = tile.map
        // CHECK:            %keep = tile.map
        // CHECK:            %take = tile.map
        // CHECK:            tile.yield %max_new, %sum_new, %acc_new
        // CHECK:          tile.store %result, %out[%b, %h, %q, %e]
        // CHECK:          tile.store %lse_rows, %lse[%b, %h, %q]
        """,
    )


def test_without_a_chunk_nothing_happens():
    before = run_passes(attention_text(ALIBI_CAUSAL, SLOPES), *PASSES[:-1])
    assert str(run_passes(str(before), PASSES[-1])) == str(before)


def test_the_loop_must_be_that_of_attention():
    before = str(run_passes(text(), *PASSES[:-1]))
    with pytest.raises(LoweringError, match="store of the attention's output"):
        run_passes(before.replace('"scale", "capture", "out"', '"scale", "capture", "result"'), PASSES[-1])


@pytest.mark.parametrize("exact", [False, True], ids=["f32", "exact"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "keys"), [(2, 2, 1, 1), (4, 1, 3, 300), (6, 2, 5, 2047), (8, 1, 2, 2049)]
)
def test_interpreted(heads, kv_heads, queries, keys, exact, monkeypatch):
    monkeypatch.setenv("ATTNC_TILE_CHUNK", "256")
    module = run_passes(text(head_dim=8, outputs=("out", "lse")), *passes_until("decompose-attention"))
    rng = np.random.default_rng(keys)
    query = rng.standard_normal((2, heads, queries, 8), np.float32)
    key, value = (rng.standard_normal((2, kv_heads, keys, 8), np.float32) for _ in range(2))
    slopes = np.float32(2.0) ** -np.arange(1, heads + 1, dtype=np.float32)
    key[:, :, queries:], value[:, :, queries:] = np.nan, np.inf  # masked: never to be seen
    out, lse = np.full_like(query, np.nan), np.full(query.shape[:3], np.nan, np.float32)
    group = heads // kv_heads
    run(module, query, key, value, 0.3, slopes, out, lse, group, exact=exact, shuffle=keys)
    length = min(queries, keys)
    expected, expected_lse = attention(query, key[:, :, :length], value[:, :, :length], 0.3, slopes)
    np.testing.assert_allclose(out, expected, atol=3e-6, rtol=0)
    np.testing.assert_allclose(lse, expected_lse, atol=5e-6, rtol=0)
