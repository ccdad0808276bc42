# ruff: noqa: E501 - IR is long
"""`tile-attention`: the kernel around attention on tiles."""

from __future__ import annotations

import pytest

from attention_text import ALIBI_CAUSAL, CAUSAL, attention_text
from attnc.errors import LoweringError
from filechecks import filecheck
from passes import passes_until, run_passes

SLOPES = [("slopes", "tensor<?xf32>", "capture")]
PASSES = passes_until("tile-attention")


def test_alibi_causal():
    filecheck(
        run_passes(attention_text(ALIBI_CAUSAL, SLOPES, head_dim=64, outputs=("out", "lse")), *PASSES),
        """
        // CHECK:      func.func private @classify(%b: index, %h0: index, %h1: index, %q0: index, %q1: index, %k0: index, %k1: index, %slopes: memref<?xf32, strided<[?]>>, %keys: index) -> i32 {
        // CHECK:        %k1_inside = arith.minsi %k1, %last_key : index
        // CHECK:        arith.cmpi sle, %k1_inside, %q0 : index
        // CHECK:        %reaches_end = arith.cmpi sge, %k1, %keys : index
        // CHECK:        %beyond = arith.cmpi sge, %k0, %keys : index
        // CHECK:      tile.kernel @attention(%query: memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>, {{.*}}, %scale: f32, %slopes: memref<?xf32, strided<[?]>>, %out: memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>, %lse: memref<?x?x?xf32, strided<[?, ?, 1]>>, %group: index) roles ["query", "key", "value", "scale", "capture", "out", "lse", "group"]
        // CHECK:        tile.grid (%b, %hg, %m0) to (%batch, %groups, %rows) step (1, 1, 96) descending {
        // CHECK-NEXT:     %h0 = arith.muli %hg, %group : index
        // CHECK-NEXT:     %kv_head = arith.divui %h0, %ratio : index
        // CHECK-NEXT:     %row = tile.iota %m0 : tensor<96x1xindex>
        // CHECK-NEXT:     %q = tile.map (%r = %row)
        // CHECK:          %h = tile.map (%r{{.*}} = %row)
        // CHECK:          %query_tile = tile.load %query[%b, %h, %q, %e]
        // CHECK:          %max, %sum, %acc = tile.for %k0 = %c0 to %keys step 256 carry(%max_old = %max0, %sum_old = %sum0, %acc_old = %acc0)
        // CHECK-NEXT:       %k1 = arith.addi %k0, %c255 : index
        // CHECK-NEXT:       %class = tile.classify @classify(%b, %h0, %h1, %q0, %q1, %k0, %k1, %slopes, %keys)
        // CHECK-NEXT:       tile.case %class -> (tensor<96x1xf32>, tensor<96x1xf32>, tensor<96x64xf32>) empty {
        // CHECK-NEXT:         tile.yield %max_old, %sum_old, %acc_old
        // CHECK-NEXT:       } full, partial {
        // CHECK:              %key_tile = tile.load %key[%b, %kv_head, %k_row, %e]
        // CHECK:              %value_tile = tile.load %value[%b, %kv_head, %k_row, %e]
        // CHECK:              %acc_new, %max_new, %sum_new = "iree_linalg_ext.online_attention"(%query_tile, %key_tile, %value_tile, %scale, %acc_old, %max_old, %sum_old)
        // CHECK-SAME:         affine_map<(d0, d1, d2, d3) -> (d0, d2)>, affine_map<(d0, d1, d2, d3) -> (d1, d2)>
        // CHECK:                %[[ROW:.*]] = "iree_linalg_ext.index"() <{dim = 0 : i64}>
        // CHECK-NEXT:           %[[COLUMN:.*]] = "iree_linalg_ext.index"() <{dim = 1 : i64}>
        // CHECK-NEXT:           %ki = tensor.extract %k[%c0, %[[COLUMN]]] : tensor<1x256xindex>
        // CHECK-NEXT:           %inside = arith.cmpi slt, %ki, %keys : index
        // CHECK-NEXT:           %qi = tensor.extract %q[%[[ROW]], %c0] : tensor<96x1xindex>
        // CHECK:                %mask = arith.cmpi sge
        // CHECK-NEXT:           %live = arith.andi %mask, %inside : i1
        // CHECK:                %hi = tensor.extract %h[%[[ROW]], %c0] : tensor<96x1xindex>
        // CHECK-NEXT:           %slope = tile.gather %slopes[%hi] where %live name "slopes"
        // CHECK:                arith.select %live, %biased, %minus_infinity : f32
        // CHECK:              tile.yield %max_new, %sum_new, %acc_new
        // CHECK:          %result = tile.map (%a = %acc, %l = %sum) -> tensor<96x64xf32>
        // CHECK:          tile.store %result, %out[%b, %h, %q, %e]
        // CHECK:          %lse_rows = tile.map (%m = %max, %l{{.*}} = %sum) -> tensor<96x1xf32>
        // CHECK-NEXT:       %log = math.log
        // CHECK:          tile.store %lse_rows, %lse[%b, %h, %q]
        // CHECK-NOT:  func.func @attention
        """,
    )


def test_without_a_classifier_the_end_of_the_keys_is_all_that_is_known():
    passes = [name for name in PASSES if name != "classify-blocks"]
    for region, class_ in (("", 1), (CAUSAL, 2)):
        filecheck(
            run_passes(attention_text(region), *passes),
            f"""
            // CHECK:      @classify(%b: index, {{{{.*}}}}, %k1: index, %keys: index) -> i32
            // CHECK:      %every = arith.constant {class_} : i32
            // CHECK:      %reaches_end = arith.cmpi sge, %k1, %keys : index
            // CHECK:      tile.grid {{{{.*}}}} step (1, 1, 96) {{
            """,
        )


def test_gathers_are_checked_where_torch_would():
    region = """
    %c32_i = arith.constant 32 : index
    %one = arith.constant 1 : i8
    %two = arith.constant 2 : i8
    %plain = tensor.extract %always[%k] {attnc.checked = "all", attnc.name = "always"} : tensor<?xf32>
    %score_1 = arith.addf %score, %plain : f32
    %bias = tensor.extract %bias_row[%k] {attnc.checked = "kept", attnc.name = "bias_row"} : tensor<?xf32>
    %score_2 = arith.addf %score_1, %bias : f32
    %flag = tensor.extract %flags[%k] {attnc.checked = "listed", attnc.name = "flags"} : tensor<?xi1>
    %qb = arith.divui %q, %c32_i : index
    %kb = arith.divui %k, %c32_i : index
    %class = tensor.extract %blocks[%b, %h, %qb, %kb] : tensor<?x?x?x?xi8>
    %full = arith.cmpi eq, %class, %two : i8
    %listed = arith.cmpi eq, %class, %one : i8
    %partial = arith.andi %listed, %flag : i1
    %mask = arith.ori %full, %partial : i1
    %x = arith.select %mask, %score_2, %minus_infinity : f32
    """
    captures = [
        ("always", "tensor<?xf32>", "capture"),
        ("bias_row", "tensor<?xf32>", "capture"),
        ("flags", "tensor<?xi1>", "capture"),
        ("blocks", "tensor<?x?x?x?xi8>", "blocks"),
    ]
    filecheck(
        run_passes(attention_text(region, captures), *PASSES),
        """
        // CHECK:      %class = tile.classify
        // CHECK:      %inside = arith.cmpi slt
        // CHECK:      [[CLASS:%.*]] = tile.gather %blocks[%b, %hi, %qb, %kb] where %inside
        // CHECK:      %listed = arith.cmpi eq, [[CLASS]]
        // CHECK:      %listed_inside = arith.andi %listed, %inside : i1
        // CHECK:      tile.gather %flags[%ki] where %listed_inside name "flags"
        // CHECK:      %live = arith.andi %mask, %inside : i1
        // CHECK:      tile.gather %always[%ki] where %inside name "always"
        // CHECK:      tile.gather %bias_row[%ki] where %live name "bias_row"
        """,
    )


def test_kv_head_and_group_by_themselves():
    """A text that asks for hkv or g alone gets them; hkv * group + g is the head."""
    region = """
    %g32 = arith.index_cast %g : index to i32
    %gf = arith.sitofp %g32 : i32 to f32
    %x = arith.addf %score, %gf : f32
    """
    filecheck(
        run_passes(attention_text(region), *PASSES),
        """
        // CHECK:      %hi = tensor.extract %h[
        // CHECK:      %first_head = arith.muli %kv_head, %{{ratio|group}}
        // CHECK:      %g_{{.*}} = arith.subi %hi, %first_head : index
        """,
    )


def test_what_has_no_kernel_is_refused_by_name():
    text = attention_text("")
    with pytest.raises(LoweringError, match="run select-tile-sizes first"):
        run_passes(text, PASSES[0], "tile-attention")
    with pytest.raises(LoweringError, match="must be static"):
        dynamic = text.replace("x8xf32>", "x?xf32>").replace("%queries, 8]", "%queries, %c2]")
        dynamic = dynamic.replace("%group, %queries) : tensor<?x?x?x?x?xf32>", "%group, %queries, %c2) : tensor<?x?x?x?x?xf32>")
        run_passes(dynamic, *PASSES)
    with pytest.raises(LoweringError, match="no kernel for this iteration domain"):
        permuted = text.replace("(b, hkv, k, e)", "(b, k, hkv, e)")
        run_passes(permuted, *PASSES)
