"""`decompose-attention`: the tile dialect alone, and what the whole road computes, by the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import tile_interpreter
from attention_text import ALIBI_CAUSAL, CAUSAL, attention_text, reference
from attnc.errors import LoweringError
from filechecks import filecheck
from passes import passes_until, run_passes
from scalar_ops import as_type

PASSES = passes_until("decompose-attention")
SLOPES = [("slopes", "tensor<?xf32>", "capture")]
NAMES = ("out", "lse", "max")


def test_alibi_causal():
    filecheck(
        run_passes(attention_text(ALIBI_CAUSAL, SLOPES, head_dim=64), *PASSES),
        """
        // CHECK:      %query_tile = tile.load %query
        // CHECK-NEXT: %query_staged = tile.stage %query_tile as lhs for task : tensor<96x64xf32> -> tensor<96x64xf32>
        // CHECK:      %class = tile.classify @classify
        // CHECK:      } full, partial {
        // CHECK:        %key_staged = tile.stage %key_tile as rhs for grid
        // CHECK-NEXT:   %scores = tile.dot %query_staged by transposed %key_staged
        // CHECK-NEXT:   %modified = tile.case %class -> (tensor<96x256xf32>) empty, full {
        // CHECK-NEXT:     %x = tile.map (%s = %scores, %ki = %k, %qi = %q, %hi = %h) -> tensor<96x256xf32> {
        // CHECK-NEXT:       %natural = arith.mulf %s, %scale : f32
        // CHECK:            %slope = tile.gather %slopes[%hi] proven name "slopes"
        // CHECK-NOT:        arith.select
        // CHECK:            tile.yield %biased
        // CHECK:          } partial {
        // CHECK-NEXT:     tile.map
        // CHECK:            %live = arith.andi %mask, %inside : i1
        // CHECK:            tile.gather %slopes[%hi{{.*}}] where %live name "slopes"
        // CHECK:            %masked = arith.select %live
        // CHECK:        %block_max = tile.reduce maxnum %modified
        // CHECK-NEXT:   %max_new = tile.map (%a = %max_old, %c = %block_max)
        // CHECK:        %anchor = tile.map (%m{{.*}} = %max_new)
        // CHECK-NEXT:     %dead = arith.cmpf oeq, [[M:%.*]], %minus_infinity
        // CHECK-NEXT:     arith.select %dead, %zero, [[M]]
        // CHECK:        %rescale = tile.map (%a{{.*}} = %max_old, %m{{.*}} = %anchor)
        // CHECK:          arith.mulf %difference, %log2e
        // CHECK-NEXT:     math.exp2
        // CHECK:        %live_keys = tile.map
        // CHECK-NEXT:     arith.cmpf une, %x{{.*}}, %minus_infinity
        // CHECK:        %weights = tile.map
        // CHECK:        %block_sum = tile.reduce add %weights
        // CHECK:        %sum_new = tile.map
        // CHECK:        %acc_rescaled = tile.map
        // CHECK:        %value_tile = tile.load %value
        // CHECK-NEXT:   %value_staged = tile.stage %value_tile as rhs for grid
        // CHECK-NEXT:   %acc_new = tile.dot %weights by %value_staged onto %acc_rescaled where %live_keys
        // CHECK-NEXT:   tile.yield %max_new, %sum_new, %acc_new
        // CHECK-NOT:  iree_linalg_ext
        // CHECK-NOT:  tensor.extract
        """,
    )


def test_plain_scores_are_scaled_in_the_exponent():
    filecheck(
        run_passes(attention_text(CAUSAL, outputs=("out", "lse", "max")), *PASSES),
        """
        // CHECK:      %sign = arith.select %usual
        // CHECK:      %scale_sign = arith.mulf %sign
        // CHECK-NEXT: %scale_magnitude = arith.mulf %size
        // CHECK-NEXT: %scale_log2e = arith.mulf %scale_magnitude, %log2e
        // CHECK:      %query_signed = tile.map (%x = %query_tile)
        // CHECK-NEXT:   arith.mulf %x, %scale_sign
        // CHECK:      %query_staged = tile.stage %query_signed as lhs for task
        // CHECK:      %modified = tile.case %class -> (tensor<96x256xf32>) empty, full {
        // CHECK-NEXT:   tile.yield %scores
        // CHECK-NEXT: } partial {
        // CHECK-NEXT:   tile.map
        // CHECK-NOT:    arith.mulf
        // CHECK:        arith.select %live, %s, %minus_infinity
        // CHECK:      %anchor = tile.map (%m{{.*}} = %max_new)
        // CHECK-NEXT:   [[N:%.*]] = arith.mulf %m{{.*}}, %scale_magnitude
        // CHECK-NEXT:   arith.cmpf oeq, [[N]], %minus_infinity
        // CHECK:      %weights = tile.map
        // CHECK-NEXT:   [[D:%.*]] = arith.subf
        // CHECK-NEXT:   [[E:%.*]] = arith.mulf [[D]], %scale_log2e
        // CHECK-NEXT:   math.exp2 [[E]]
        // CHECK:      %max_natural = tile.map (%m{{.*}} = %max{{.*}})
        // CHECK-NEXT:   arith.mulf %m{{.*}}, %scale_magnitude
        // CHECK:      tile.map (%m{{.*}} = %max_natural, %l{{.*}} = %sum)
        // CHECK:      tile.store %max_natural, %max[%b, %h, %q]
        """,
    )


def test_halves_are_staged_in_f32():
    filecheck(
        run_passes(attention_text(ALIBI_CAUSAL, SLOPES, element="bf16"), *PASSES),
        """
        // CHECK:      %query_tile = tile.load {{.*}} -> tensor<96x8xbf16>
        // CHECK-NEXT: %query_wide = tile.map (%x = %query_tile) -> tensor<96x8xf32>
        // CHECK-NEXT:   arith.extf %x : bf16 to f32
        // CHECK:      %key_staged = tile.stage %key_tile as rhs for grid : tensor<256x8xbf16> -> tensor<256x8xf32>
        // CHECK:      %value_staged = tile.stage %value_tile as rhs for grid : tensor<256x8xbf16> -> tensor<256x8xf32>
        // CHECK:      arith.truncf {{.*}} : f32 to bf16
        """,
    )


def test_only_what_is_tiled_is_decomposed():
    with pytest.raises(LoweringError, match="run tile-attention first"):
        run_passes(attention_text(""), PASSES[0], "decompose-attention")


# -- what it computes -------------------------------------------------------------------------------------------------


def attend(
    region: str,
    captures: Sequence[tuple[str, str, str]] = (),
    values: Sequence[Any] = (),
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    *,
    shape: tuple[int, int, int, int, int] = (2, 4, 2, 130, 300),
    head_dim: int = 8,
    value_dim: int = 8,
    element: str = "f32",
    group: int = 1,
    scale: float = 0.3,
    change: Callable[[np.ndarray, np.ndarray, np.ndarray], None] | None = None,
    tolerance: float = 3e-6,
) -> None:
    """Lowers, runs by the interpreter, and compares out, lse and max with the dense formula."""
    module = run_passes(attention_text(region, captures, element, head_dim, value_dim, NAMES), *PASSES)
    batch, heads, kv_heads, queries, keys = shape
    random = np.random.default_rng(0)
    storage = {"f64": np.float64, "f16": np.float16}.get(element, np.float32)
    shapes = (batch, heads, queries, head_dim), (batch, kv_heads, keys, head_dim), (batch, kv_heads, keys, value_dim)
    inputs = [random.standard_normal(shape).astype(storage) for shape in shapes]
    if element == "bf16":
        from xdsl.dialects.builtin import bf16

        inputs = [as_type(x, bf16) for x in inputs]
    if change is not None:
        change(*inputs)
    row = np.float64 if element == "f64" else np.float32
    results = [np.full((batch, heads, queries, value_dim), 7, storage)]
    results += [np.full((batch, heads, queries), 7, row) for _ in range(2)]
    with np.errstate(all="ignore"):
        tile_interpreter.run(module, *inputs, scale, *values, *results, group)
    for name, result, expected in zip(
        NAMES, results, reference(inputs[0], inputs[1], inputs[2], scale, score_mod, mask_mod), strict=True
    ):
        loose = {"f16": 2e-3, "bf16": 1e-2, "f64": 1e-13}.get(element, tolerance)
        np.testing.assert_allclose(result.astype(np.float64), expected, rtol=loose, atol=loose, err_msg=name)


SLOPE_VALUES = np.array([0.1, 0.2, 0.3, 0.4], np.float32)


def alibi(s, b, h, q, k):
    return s + SLOPE_VALUES[h].astype(np.float64) * (k - q)


def causal(b, h, q, k):
    return q >= k


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("element", ["f32", "f64", "f16", "bf16"])
def test_alibi_causal_is_right(group, element):
    region = ALIBI_CAUSAL
    if element == "f64":
        region = region.replace(
            "%x = arith.select %mask, %biased, %minus_infinity : f32",
            "%x = arith.select %mask, %biased64, %minus_infinity : f64",
        )
        region = region.replace(
            "%biased = arith.addf %score, %bias : f32",
            "%bias64 = arith.extf %bias : f32 to f64\n%biased64 = arith.addf %score, %bias64 : f64",
        )
    if element == "f64":
        attend(region, SLOPES, [np.zeros(4, np.float32)], None, causal, group=group, element=element)
    else:
        attend(region, SLOPES, [SLOPE_VALUES], alibi, causal, group=group, element=element, tolerance=1e-5)


@pytest.mark.parametrize("element", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("scale", [0.3, 0.0, -0.7])
def test_plain_attention_is_right(element, scale):
    attend("", element=element, scale=scale, group=2)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 1), (1, 2, 1, 97, 255), (3, 6, 2, 96, 256), (2, 3, 3, 5, 257), (1, 4, 1, 200, 64), (1, 2, 2, 50, 0)]
)  # fmt: skip
def test_shapes(shape):
    attend(CAUSAL, mask_mod=causal, shape=shape, value_dim=5)
    attend("", shape=shape, group=shape[1] // shape[2], head_dim=3)


def test_rows_without_a_live_key_give_zero():
    attend(CAUSAL.replace("sge", "slt"), mask_mod=lambda b, h, q, k: q < k, shape=(1, 2, 2, 310, 300))
    attend(CAUSAL.replace("%k32", "%minus").replace("%mask", "%minus = arith.constant 100000 : i32\n%mask", 1),
           mask_mod=lambda b, h, q, k: (q >= 100000) & (k >= 0))  # fmt: skip


def test_dead_keys_have_no_influence():
    """NaN and infinity beyond the diagonal, in keys and values."""

    def change(query, key, value):
        key[:, :, 140:], value[:, :, 140:] = np.nan, np.inf

    attend(CAUSAL, mask_mod=causal, change=change)
    attend(ALIBI_CAUSAL, SLOPES, [SLOPE_VALUES], alibi, causal, change=change, tolerance=1e-5)


def test_live_nan_and_infinity_show_where_the_formula_has_them():
    def change(query, key, value):
        value[0, 0, 7, 3], value[1, 1, 9, 2] = np.nan, -np.inf
        query[0, 1, 20] = np.nan
        key[1, 0, 290] = np.nan

    attend("", change=change)
    attend(CAUSAL, mask_mod=causal, change=change)


def test_score_mods_see_natural_units():
    region = """
    %cap = arith.constant 2.0 : f32
    %ratio_ = arith.divf %score, %cap : f32
    %tanh = math.tanh %ratio_ : f32
    %x = arith.mulf %tanh, %cap : f32
    """
    attend(region, score_mod=lambda s, b, h, q, k: 2 * np.tanh(s / 2), scale=1.5)


def test_numbers_are_arguments():
    region = """
    %w = arith.trunci %window : i64 to i32
    %distance = arith.subi %q32, %k32 : i32
    %mask = arith.cmpi sle, %distance, %w : i32
    %x = arith.select %mask, %score, %minus_infinity : f32
    """
    for window in (0, 20, -5):
        attend(region, [("window", "i64", "number")], [window], mask_mod=lambda b, h, q, k: q - k <= window)


def test_gathers_in_loops():
    """The dot product of captured rows."""
    region = """
    %c0_i = arith.constant 0 : index
    %c1_i = arith.constant 1 : index
    %c4_i = arith.constant 4 : index
    %sum = scf.for %i = %c0_i to %c4_i step %c1_i iter_args(%a = %zero) -> (f32) {
      %left = tensor.extract %rows[%q, %i] {attnc.checked = "kept", attnc.name = "rows"} : tensor<?x4xf32>
      %right = tensor.extract %rows[%k, %i] {attnc.checked = "kept", attnc.name = "rows"} : tensor<?x4xf32>
      %product = arith.mulf %left, %right : f32
      %next = arith.addf %a, %product : f32
      scf.yield %next : f32
    }
    %biased = arith.addf %score, %sum : f32
    %mask = arith.cmpi sge, %q32, %k32 : i32
    %x = arith.select %mask, %biased, %minus_infinity : f32
    """
    rows = np.random.default_rng(1).standard_normal((300, 4)).astype(np.float32)
    exact = rows.astype(np.float64)
    capture = [("rows", "tensor<?x4xf32>", "capture")]
    attend(region, capture, [rows], lambda s, b, h, q, k: s + (exact[q] * exact[k]).sum(-1), causal, tolerance=1e-5)
    with pytest.raises(IndexError, match="size 250"):  # keys up to 299, but only causal pairs count
        attend(region, capture, [rows[:250]], shape=(1, 1, 1, 270, 300))
    attend(region, capture, [rows[:130]], lambda s, b, h, q, k: s + (exact[q] * exact[k]).sum(-1), causal, tolerance=1e-5)


def test_indices_out_of_range_are_found():
    region = """
    %flag = tensor.extract %flags[%k] {attnc.checked = "all", attnc.name = "flags"} : tensor<?xi1>
    %near = arith.cmpi sge, %q32, %k32 : i32
    %mask = arith.andi %flag, %near : i1
    %x = arith.select %mask, %score, %minus_infinity : f32
    """
    capture = [("flags", "tensor<?xi1>", "capture")]
    flags = np.arange(300) % 3 > 0
    attend(region, capture, [flags], mask_mod=lambda b, h, q, k: flags[k] & (q >= k))
    with pytest.raises(IndexError, match="'flags', size 299"):
        attend(region, capture, [flags[:299]])


def test_block_lists():
    """Blocks of 32 queries by 64 keys; the mask's own part applies in those of class 1."""
    lists = np.random.default_rng(2).integers(0, 3, (2, 4, 5, 5)).astype(np.int8)
    region = """
    %c32_i = arith.constant 32 : index
    %c64_i = arith.constant 64 : index
    %one = arith.constant 1 : i8
    %two = arith.constant 2 : i8
    %qb = arith.divui %q, %c32_i : index
    %kb = arith.divui %k, %c64_i : index
    %class = tensor.extract %blocks[%b, %h, %qb, %kb] : tensor<?x?x?x?xi8>
    %full = arith.cmpi eq, %class, %two : i8
    %listed = arith.cmpi eq, %class, %one : i8
    %near = arith.cmpi sge, %q32, %k32 : i32
    %partial = arith.andi %listed, %near : i1
    %mask = arith.ori %full, %partial : i1
    %x = arith.select %mask, %score, %minus_infinity : f32
    """

    def mask(b, h, q, k):
        class_ = lists[b, h, q // 32, k // 64]
        return (class_ == 2) | ((class_ == 1) & (q >= k))

    for group in (1, 2):
        attend(region, [("blocks", "tensor<?x?x?x?xi8>", "blocks")], [lists], mask_mod=mask, group=group)


def test_an_edit_of_the_region_changes_the_result():
    region = "%x = arith.addf %score, %score : f32"
    attend(region, score_mod=lambda s, b, h, q, k: s + s)
    attend(region.replace("addf", "mulf"), score_mod=lambda s, b, h, q, k: s * s, tolerance=1e-5)
