# ruff: noqa: E501 - IR is long
"""The passes of the backward road: what they make of small modules."""

from __future__ import annotations

import pytest
from xdsl.utils.exceptions import VerifyException

from attention_text import ALIBI_CAUSAL, TARGET, attention_text, parse
from attnc import pipeline
from attnc.errors import LoweringError, PassOrderError
from filechecks import filecheck
from passes import run_passes

SLOPES = [("slopes", "tensor<?xf32>", "capture")]
PASSES = pipeline.BACKWARD_STAGES[1:]


def text(region: str = ALIBI_CAUSAL, captures=SLOPES, gradients=(0, 1, 2, 4), **options) -> str:
    """A module at the stage before differentiate-attention; `gradients` are numbers of arguments."""
    wanted = f"attnc.gradients = array<i64: {', '.join(map(str, gradients))}>, attnc.roles"
    return attention_text(region, captures, **options).replace("attnc.roles", wanted, 1)


def after(last: str, *arguments, **options):
    return run_passes(text(*arguments, **options), *PASSES[: PASSES.index(last) + 1])


def test_differentiate_attention():
    filecheck(
        after("differentiate-attention"),
        """
        // CHECK:      func.func @attention_backward(%query: tensor<?x?x?x8xf32>, %key: {{.*}}, %value: {{.*}}, %scale: f32, %slopes: tensor<?xf32>, %out: tensor<?x?x?x8xf32>, %lse: tensor<?x?x?xf64>, %d_out: tensor<?x?x?x8xf32>, %d_lse: tensor<?x?x?xf32>) -> (tensor<?x?x?x8xf32>, tensor<?x?x?x8xf32>, tensor<?x?x?x8xf32>, tensor<?xf64>) attributes {attnc.roles = ["query", "key", "value", "scale", "capture", "out", "lse", "d_out", "d_lse"]
        // CHECK:        %d_query, %d_key, %d_value, %d_slopes = "attnc.attention_backward"(%q5, %key, %value, %scale, %out_5d, %lse_5d, %d_out_5d, %d_lse_5d, %slopes)
        // CHECK-SAME:   gradients = ["query", "key", "value"]
        // CHECK:        ^bb0(%score: f32):
        // CHECK:          %x = arith.select %mask, %biased, %minus_infinity : f32
        // CHECK-NEXT:     "iree_linalg_ext.yield"(%x)
        // CHECK:        ^bb0(%score_1: f32, %d_modified: f32, %live: i1):
        // CHECK-NOT:      arith.cmpi
        // CHECK:          %[[SHARE:.*]] = arith.mulf %d_modified, %{{.*}} : f32
        // CHECK-NEXT:     %[[MASKED:.*]] = arith.select %live, %[[SHARE]], %zero
        // CHECK-NEXT:     "attnc.accumulate"(%[[MASKED]], %slopes, %{{.*}}) : (f32, tensor<?xf32>, index)
        // CHECK-NEXT:     "attnc.yield"(%d_modified) : (f32) -> ()
        // CHECK:        %[[D_QUERY:.*]] = tensor.collapse_shape %d_query
        // CHECK-NEXT:   func.return %[[D_QUERY]], %d_key, %d_value, %d_slopes
        """,
    )


def test_a_captured_tensor_alone():
    """Nobody asks for the gradient of the score: the derivative yields nothing."""
    filecheck(
        after("differentiate-attention", gradients=[4]),
        """
        // CHECK: %d_slopes = "attnc.attention_backward"
        // CHECK: "attnc.accumulate"
        // CHECK: "attnc.yield"() : () -> ()
        // CHECK: func.return %d_slopes : tensor<?xf64>
        """,
    )


def test_online_attention_is_differentiated_too():
    one = after("differentiate-attention", outputs=("out", "lse"))
    other = after("differentiate-attention")
    assert str(one).count("attnc.attention_backward") == str(other).count("attnc.attention_backward") == 1
    assert "online_attention" not in str(one)


def test_a_sum_over_a_row_becomes_a_loop_of_shares():
    region = """
    %zero_sum = arith.constant 0.0 : f32
    %start = arith.constant 0 : index
    %end = arith.constant 16 : index
    %step = arith.constant 1 : index
    %sum = scf.for %i = %start to %end step %step iter_args(%total = %zero_sum) -> (f32) {
      %a = tensor.extract %rope[%k, %i] {attnc.checked = "kept", attnc.name = "rope"} : tensor<?x16xf32>
      %square = arith.mulf %a, %a : f32
      %next = arith.addf %total, %square : f32
      scf.yield %next : f32
    }
    %x = arith.addf %score, %sum : f32
    """
    filecheck(
        after("differentiate-attention", region, [("rope", "tensor<?x16xf32>", "capture")]),
        """
        // CHECK:      %d_modified: f32, %live: i1
        // CHECK:      scf.for %[[I:.*]] = %{{.*}} to %{{.*}} step %{{.*}} {
        // CHECK-NEXT:   %[[A:.*]] = tensor.extract %rope[%{{.*}}, %[[I]]]
        // CHECK-NEXT:   %[[D:.*]] = arith.mulf %d_modified, %[[A]] : f32
        // CHECK-NEXT:   %[[TWICE:.*]] = arith.addf %[[D]], %[[D]] : f32
        // CHECK-NEXT:   arith.select %live, %[[TWICE]]
        // CHECK-NEXT:   "attnc.accumulate"(%{{.*}}, %rope, %{{.*}}, %[[I]])
        // CHECK-NEXT: }
        """,
    )


def test_tile_attention_backward():
    filecheck(
        after("tile-attention-backward"),
        """
        // CHECK: func.func private @classify(%b: index, {{.*}}, %slopes: memref<?xf32, strided<[?]>>, %keys: index, %queries: index) -> i32 {
        // CHECK:   %q1_inside = arith.minsi %q1, %last_query
        // CHECK:   %k1_inside = arith.minsi %k1, %last_key
        // CHECK: tile.kernel @attention_backward({{.*}}, %d_query: memref<?x?x?x8xf32, strided<[?, ?, ?, 1]>>, %d_key: {{.*}}, %d_value: {{.*}}, %d_slopes: memref<?xf64, strided<[1]>>) roles ["query", "key", "value", "scale", "capture", "out", "lse", "d_out", "d_lse", "d_query", "d_key", "d_value", "d_capture"]
        // CHECK:   tile.grid (%b, %kv_head, %k0) to (%batch, %kv_heads, %keys) step (1, 1, {{[0-9]+}}) {
        // CHECK:     %key_tile = tile.load %key[%b, %kv_head, %k_row, %e]
        // CHECK:     %d_key_tile, %d_value_tile = tile.for %m0 = %c0 to %rows step 48 carry(%d_key_old = %d_key0, %d_value_old = %d_value0)
        // CHECK:       %class = tile.classify @classify(%b, %h0, %h1, %q0, %q1, %k0, %k1, %slopes, %keys, %queries)
        // CHECK-NEXT:  tile.case %class -> {{.*}} empty {
        // CHECK-NEXT:    tile.yield %d_key_old, %d_value_old
        // CHECK:         %lse_tile = tile.load %lse[%b, %h, %q] : {{.*}} -> tensor<{{[0-9]+}}x1xf64>
        // CHECK:         %d_query_part, %d_key_new, %d_value_new = "attnc.attention_backward"
        // CHECK:           %row_inside = arith.cmpi slt, %qi, %queries : index
        // CHECK:           tile.gather %slopes[%hi] where %live name "slopes"
        // CHECK:           "attnc.accumulate"(%{{.*}}, %d_slopes, %{{.*}}) : (f32, memref<?xf64, strided<[1]>>, index)
        // CHECK:         tile.accumulate %d_query_part into %d_query[%b, %h, %q, %e] owners [2 : i64]
        // CHECK:     tile.store %d_key_tile, %d_key[%b, %kv_head, %k_row, %e]
        // CHECK:     tile.store %d_value_tile, %d_value[%b, %kv_head, %k_row, %e]
        """,
    )


def test_decompose_attention_backward():
    filecheck(
        after("decompose-attention-backward"),
        """
        // CHECK:      %key_staged = tile.stage %key_tile as rhs for task
        // CHECK:      tile.for
        // CHECK:      %scores = tile.dot %query_tile by transposed %key_staged
        // CHECK:      %modified = tile.case %class
        // CHECK:      %live_pairs = tile.map
        // CHECK:      %weights = tile.map
        // CHECK:      %d_value_new = tile.dot transposed %weights by %d_out_tile onto %d_value_old where %live_pairs
        // CHECK:      %d_weights = tile.dot %d_out_tile by transposed %value_staged
        // CHECK:      %delta = tile.reduce add %out_products
        // CHECK:      %d_modified = tile.map
        // CHECK:      %d_slopes_rows = tile.reduce add %d_slopes_pairs
        // CHECK-NEXT: tile.accumulate %d_slopes_rows into %d_slopes[%h] owners [0 : i64, 2 : i64]
        // CHECK:      %[[REST:.*]] = tile.reduce add %d_modified :
        // CHECK-NEXT: tile.accumulate %[[REST]] into %row_rest[%b, %h, %q] owners [2 : i64]
        // CHECK:      %d_key_new = tile.dot transposed %d_scores by %query_tile onto %d_key_old where %live_pairs
        // CHECK-NEXT: %d_query_part = tile.dot %d_scores by %key_tile where %live_pairs
        // CHECK-NOT:  attnc.attention_backward
        """,
    )


BY_DISTANCE = """
%distance = arith.subi %q, %k : index
%one = tensor.extract %table[%h, %distance] {attnc.checked = "kept", attnc.name = "table"} : tensor<?x?xf32>
%x = arith.addf %score, %one : f32
"""


def test_an_index_that_is_computed():
    """A negative index counts from the end; tasks of other heads add to other elements."""
    filecheck(
        after("decompose-attention-backward", BY_DISTANCE, [("table", "tensor<?x?xf32>", "capture")]),
        """
        // CHECK:      %[[INDEX:.*]] = tile.map ({{.*}}) -> tensor<96x{{[0-9][0-9]+}}xindex> {
        // CHECK:        arith.cmpi slt
        // CHECK-NEXT:   arith.addi %{{.*}}, %d_table_size
        // CHECK:      %d_table_pairs = tile.map
        // CHECK:      tile.accumulate %d_table_pairs into %d_table[%h, %[[INDEX]]] owners [0 : i64, 2 : i64]
        """,
    )


@pytest.mark.parametrize(
    ("gradients", "products"), [([0, 1, 2, 3, 4], 5), ([0], 3), ([1], 3), ([2], 2), ([3], 2), ([4], 2), ([1, 2], 4)]
)
def test_products_that_nobody_wants(gradients, products):
    module = str(after("decompose-attention-backward", gradients=gradients))
    assert module.count("tile.dot") == products


def test_what_rounding_leaves_of_a_row_is_taken_out():
    """By a kernel of its own, for sums over whole rows: captured tensors that are indexed by rows, and the scale."""
    filecheck(
        after("decompose-attention-backward", gradients=[3, 4]),
        """
        // CHECK: tile.kernel @attention_backward({{.*}}, %row_rest: memref<?x?x?xf64, strided<[?, ?, 1]>>, %row_share: {{.*}}, %row_share_1: {{.*}}) roles [{{.*}} "row_sum", "row_sum", "row_sum"]
        // CHECK:      %[[OF_SLOPES:.*]] = tile.reduce add %d_slopes_weights
        // CHECK:      %[[OF_SCALE:.*]] = tile.reduce add %d_scale_weights_pairs
        // CHECK:      %[[REST:.*]] = tile.reduce add %d_modified :
        // CHECK-NEXT: tile.accumulate %[[REST]] into %row_rest[%b, %h, %q] owners [2 : i64]
        // CHECK-NEXT: tile.accumulate %[[OF_SLOPES]] into %row_share[%b, %h, %q] owners [2 : i64]
        // CHECK-NEXT: tile.accumulate %[[OF_SCALE]] into %row_share_1[%b, %h, %q] owners [2 : i64]
        // CHECK: tile.kernel @attention_backward_rests(
        // CHECK:      tile.grid (%b, %kv_head, %k0) to (%batch, %kv_heads, %c1) step (1, 1, 1) {
        // CHECK:        tile.for %m0 = %c0 to %rows step 48 carry() -> () {
        // CHECK-NOT:      tile.dot
        // CHECK:          %rest = tile.load %row_rest[%b, %h, %q]
        // CHECK:          %share = tile.load %row_share[%b, %h, %q]
        // CHECK:          %taken_out = tile.map
        // CHECK:          tile.accumulate %taken_out into %d_slopes[%h] owners [0 : i64, 2 : i64]
        // CHECK:          tile.accumulate %{{.*}} into %d_scale[%c0] owners [0 : i64, 1 : i64, 2 : i64]
        """,
    )


def test_more_rows_without_a_mask():
    region = "%x = arith.addf %score, %score : f32"
    filecheck(after("select-backward-tile-sizes", region, [], gradients=(0, 1, 2)), "// CHECK: rows = 96 : i64")


def test_halves_are_widened():
    filecheck(
        after("decompose-attention-backward", element="bf16"),
        """
        // CHECK: %key_wide = tile.map (%x = %key_tile) -> tensor<{{[0-9]+}}x8xf32>
        // CHECK: %d_out_wide = tile.map
        // CHECK: tile.accumulate %d_query_part into %d_query{{.*}} : tensor<48x8xf32>
        // CHECK: arith.truncf
        // CHECK: tile.store %d_key_tile{{.*}}, %d_key{{.*}} : tensor<{{[0-9]+}}x8xbf16>
        """,
    )


def test_passes_in_order():
    module = parse(text())
    with pytest.raises(PassOrderError, match="not on the road of a backward module"):
        pipeline.run_pass(module, "convert-attention-to-online-attention", TARGET)
    with pytest.raises(PassOrderError, match="needs a module at stage tile-attention-backward"):
        pipeline.run_pass(module, "decompose-attention-backward", TARGET)
    for name in PASSES:
        pipeline.run_pass(module, name, TARGET)
    assert pipeline.stage_of(module) == PASSES[-1]


def test_no_derivative():
    region = """
    %three = arith.constant 3 : i32
    %x = "math.fpowi"(%score, %three) <{fastmath = #arith.fastmath<none>}> : (f32, i32) -> f32
    """
    with pytest.raises(LoweringError, match=r"math.fpowi has no derivative"):
        after("differentiate-attention", region, [], gradients=[0])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('gradients = ["query", "key", "value"]', 'gradients = ["key", "query", "value"]', "in this order"),
        ('gradients = ["query", "key", "value"]', 'gradients = ["query", "key"]', "but 11 indexing maps"),
        ('"attnc.yield"(%d_modified) : (f32) -> ()', '"attnc.yield"() : () -> ()', "need the score's"),
        ("%d_modified: f32, %live: i1", "%d_modified: f32, %live: i1, %more: i1", "the derivative takes"),
    ],
)
def test_what_is_no_derivative_of_attention(old, new, message):
    printed = str(after("differentiate-attention"))
    assert old in printed
    with pytest.raises(VerifyException, match=message):
        parse(printed.replace(old, new))
