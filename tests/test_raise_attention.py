"""raise-attention: the text that it makes, what it leaves alone, and that the result is what was written out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from xdsl.dialects.builtin import ModuleOp

from attention_text import parse
from filechecks import filecheck
from linalg_interpreter import run_function
from linalg_text import LinalgText, Value
from passes import run_passes


def names_of(module: ModuleOp) -> list[str]:
    """The operations of the functions' bodies, without those of regions."""
    return [op.name for function in module.ops for op in function.regions[0].block.ops]


def run_both(text: str, module: ModuleOp, arguments: Sequence[np.ndarray | float], tolerance: float = 2e-6) -> None:
    """The module computes what the text does."""
    wanted = run_function(parse(text), "main", arguments)
    found = run_function(module, "main", arguments)
    for result, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(result, expected, atol=tolerance, rtol=1e-5)


def normal(graph: LinalgText) -> list[np.ndarray]:
    types = {"f32": np.float32, "f16": np.float16, "f64": np.float64, "i1": np.bool_}
    rng = np.random.default_rng(0)
    return [rng.standard_normal(value.shape or ()).astype(types[value.element]) for value in graph.arguments]


def raised(graph: LinalgText, *results: Value, tolerance: float = 2e-6) -> ModuleOp:
    """The raised module: one attention, nothing left that sums, right numbers."""
    text = graph.text(*results)
    module = run_passes(text, "generalize-linalg", "raise-attention")
    names = names_of(module)
    attentions = [name for name in names if name.startswith("iree_linalg_ext.")]
    assert len(attentions) == 1, module
    assert "linalg.generic" not in names or len(results) > 1, module
    run_both(text, module, normal(graph), tolerance)
    return module


def qkv(graph: LinalgText, shape: Sequence[int] = (2, 3, 4, 8), element: str = "f32") -> tuple[Value, Value, Value]:
    query, key, value = (graph.argument(name, shape, element) for name in ("q", "k", "v"))
    return query, key, value


def exponentials(graph: LinalgText, q: Value, k: Value) -> tuple[Value, Value, Value]:
    """The scores' maximum, exp(score - maximum), and its sum."""
    scores = graph.einsum("bhqe,bhke->bhqk", q, k)
    top = graph.reduce("maximumf", "bhqk->bhq", scores, float("-inf"))
    body = "%d = arith.subf %a0, %a1 : f32\n      %r = math.exp %d : f32"
    weights = graph.elementwise("bhqk,bhq->bhqk", [scores, top], body)
    total = graph.reduce("addf", "bhqk->bhq", weights, 0.0)
    return top, weights, total


def test_scale_and_bias():
    graph = LinalgText()
    q, k, v = qkv(graph)
    bias = graph.argument("bias", (3, 4, 4))
    scores = graph.scaled(graph.einsum("bhqe,bhke->bhqk", q, k), 0.25)
    scores = graph.binary("addf", "bhqk,hqk->bhqk", scores, bias)
    module = raised(graph, graph.einsum("bhqk,bhke->bhqe", graph.softmax(scores), v))
    filecheck(
        module,
        """
        // CHECK: func.func @main(%q: tensor<2x3x4x8xf32>, %k: tensor<2x3x4x8xf32>, %v: tensor<2x3x4x8xf32>, %bias: tensor<3x4x4xf32>)
        // CHECK-NEXT: %scale = arith.constant 2.500000e-01 : f32
        // CHECK-NEXT: %init = tensor.empty() : tensor<2x3x4x8xf32>
        // CHECK-NEXT: "iree_linalg_ext.attention"(%q, %k, %v, %scale, %init) <{indexing_maps = [affine_map<(d0, d1, d2, d3, d4, d5) -> (d0, d1, d2, d4)>, affine_map<(d0, d1, d2, d3, d4, d5) -> (d0, d1, d3, d4)>, affine_map<(d0, d1, d2, d3, d4, d5) -> (d0, d1, d3, d5)>, affine_map<(d0, d1, d2, d3, d4, d5) -> ()>, affine_map<(d0, d1, d2, d3, d4, d5) -> (d0, d1, d2, d5)>]}> ({
        // CHECK-NEXT: ^bb0(%score: f32):
        // CHECK: %bias_value = tensor.extract %bias[
        // CHECK-NEXT: %[[X:.*]] = arith.addf %score, %bias_value : f32
        // CHECK-NEXT: "iree_linalg_ext.yield"(%[[X]])
        // CHECK-NOT: linalg.generic
        """,  # noqa: E501
    )


def causal(graph: LinalgText, queries: int, keys: int, sign: str = "sge") -> Value:
    body = f"""%i = linalg.index 0 : index
      %j = linalg.index 1 : index
      %qi = arith.index_cast %i : index to i64
      %kj = arith.index_cast %j : index to i64
      %r = arith.cmpi {sign}, %qi, %kj : i64"""
    return graph.elementwise("->qk", [], body, "i1", (queries, keys))


def test_causal_masks_become_index_arithmetic():
    """masked_fill(~tril, -inf): a select with the mask on the wrong side, and a negation."""
    graph = LinalgText()
    q, k, v = qkv(graph)
    mask = causal(graph, 4, 4, "slt")
    scores = graph.einsum("bhqe,bhke->bhqk", q, k)
    low = graph.number(float("-inf"))
    scores = graph.elementwise("bhqk,qk->bhqk", [scores, mask], f"%r = arith.select %a1, {low.name}, %a0 : f32")
    scores = graph.scaled(scores, 8.0, "divf")
    module = raised(graph, graph.einsum("bhqk,bhke->bhqe", graph.softmax(scores), v))
    filecheck(
        module,
        """
        // CHECK: %scale = arith.constant 1.000000e+00 : f32
        // CHECK: %[[M:.*]] = arith.cmpi sge
        // CHECK: %[[X:.*]] = arith.divf %score
        // CHECK-NEXT: %minus_infinity = arith.constant 0xff800000 : f32
        // CHECK-NEXT: %masked = arith.select %[[M]], %[[X]], %minus_infinity : f32
        // CHECK-NEXT: "iree_linalg_ext.yield"(%masked)
        """,
    )


def test_additive_masks_of_minus_infinity_become_a_select():
    graph = LinalgText()
    q, k, v = qkv(graph)
    mask = causal(graph, 4, 4)
    low, zero = graph.number(float("-inf")), graph.number(0.0)
    additive = graph.elementwise("qk->qk", [mask], f"%r = arith.select %a0, {zero.name}, {low.name} : f32", "f32", (4, 4))
    scores = graph.binary("addf", "bhqk,qk->bhqk", graph.einsum("bhqe,bhke->bhqk", q, k), additive)
    module = raised(graph, graph.einsum("bhqk,bhke->bhqe", graph.softmax(scores), v))
    filecheck(module, "// CHECK: %[[M:.*]] = arith.cmpi sge\n// CHECK: %masked = arith.select %[[M]], %score, %minus_infinity")


def test_finite_masks_stay_finite():
    """-1e30 instead of -inf: a row that is masked out altogether averages the values."""
    graph = LinalgText()
    q, k, v = qkv(graph)
    mask = graph.argument("mask", (4, 4), "i1")
    low = graph.number(-3.4028234663852886e38)
    scores = graph.elementwise(
        "bhqk,qk->bhqk", [graph.einsum("bhqe,bhke->bhqk", q, k), mask], f"%r = arith.select %a1, {low.name}, %a0 : f32"
    )
    text = graph.text(graph.einsum("bhqk,bhke->bhqe", graph.softmax(scores), v))
    module = run_passes(text, "generalize-linalg", "raise-attention")
    filecheck(module, "// CHECK: arith.select %mask_value, %{{.*}}, %score\n// CHECK-NOT: 0xff800000")
    arguments = [*normal(graph)[:3], np.array([[True] * 4, [False] * 4, [True, False] * 2, [True] * 3 + [False]])]
    run_both(text, module, arguments)


@pytest.mark.parametrize("divided", ["before", "after", "log"])
@pytest.mark.parametrize("lessened", [True, False])
def test_softmax_by_hand(divided: str, lessened: bool):
    """exp and sum written out, with or without the maximum, divided before or after the second product, or by a logarithm."""
    graph = LinalgText()
    q, k, v = qkv(graph)
    scores = graph.scaled(graph.einsum("bhqe,bhke->bhqk", q, k), 0.25)
    if lessened:
        top = graph.reduce("maximumf", "bhqk->bhq", scores, float("-inf"))
        scores = graph.binary("subf", "bhqk,bhq->bhqk", scores, top)
    weights = graph.elementwise("bhqk->bhqk", [scores], "%r = math.exp %a0 : f32")
    total = graph.reduce("addf", "bhqk->bhq", weights, 0.0)
    if divided == "log":
        log = graph.elementwise("bhq->bhq", [total], "%r = math.log %a0 : f32")
        body = "%d = arith.subf %a0, %a1 : f32\n      %r = math.exp %d : f32"
        weights = graph.elementwise("bhqk,bhq->bhqk", [scores, log], body)
    elif divided == "before":
        weights = graph.binary("divf", "bhqk,bhq->bhqk", weights, total)
    out = graph.einsum("bhqk,bhke->bhqe", weights, v)
    if divided == "after":
        out = graph.binary("divf", "bhqe,bhq->bhqe", out, total)
    raised(graph, out)


def test_heads_merged_into_the_batch_between_the_products():
    """3-D products, a 4-D mask and softmax, and a product of merged heads again."""
    graph = LinalgText()
    q, k, v = (graph.argument(name, (6, 4, 8)) for name in "qkv")
    mask = graph.argument("mask", (2, 1, 1, 4))
    scores = graph.expand(graph.einsum("bqe,bke->bqk", q, k), [[0, 1], [2], [3]], (2, 3, 4, 4))
    weights = graph.softmax(graph.binary("addf", "bhqk,b11k->bhqk", scores, mask))
    out = graph.einsum("bqk,bke->bqe", graph.collapse(weights, [[0, 1], [2], [3]]), v)
    module = raised(graph, out)
    filecheck(
        module,
        """
        // CHECK: tensor.expand_shape %q {{.*}} output_shape [2, 3, 4, 8]
        // CHECK: "iree_linalg_ext.attention"
        // CHECK: tensor.extract %mask[
        // CHECK: tensor.collapse_shape
        """,
    )


def test_transposed_products_and_two_key_dims():
    """K·Qᵀ, softmax over its first dims, keys on a grid."""
    graph = LinalgText()
    q, k, v = graph.argument("q", (2, 5, 8)), graph.argument("k", (2, 3, 4, 8)), graph.argument("v", (2, 3, 4, 6))
    scores = graph.einsum("bxye,bqe->bxyq", k, q)
    top = graph.reduce("maximumf", "bxyq->bq", scores, float("-inf"))
    body = "%d = arith.subf %a0, %a1 : f32\n      %r = math.exp %d : f32"
    weights = graph.elementwise("bxyq,bq->bxyq", [scores, top], body)
    total = graph.reduce("addf", "bxyq->bq", weights, 0.0)
    weights = graph.binary("divf", "bxyq,bq->bxyq", weights, total)
    raised(graph, graph.einsum("bxyn,bxyq->bqn", v, weights))


def test_halves_with_softmax_in_f32():
    graph = LinalgText()
    q, k, v = qkv(graph, element="f16")
    scores = graph.cast(graph.scaled(graph.cast(graph.einsum("bhqe,bhke->bhqk", q, k), "f16"), 0.25), "f32")
    weights = graph.cast(graph.softmax(scores), "f16")
    raised(graph, graph.einsum("bhqk,bhke->bhqe", weights, v), tolerance=2e-3)


def test_a_scale_of_run_time():
    graph = LinalgText()
    q, k, v = qkv(graph)
    scale = graph.argument("c", None)
    scores = graph.scaled(graph.scaled(graph.einsum("bhqe,bhke->bhqk", q, k), scale), 0.5)
    module = raised(graph, graph.einsum("bhqk,bhke->bhqe", graph.softmax(scores), v))
    filecheck(module, "// CHECK: arith.mulf\n// CHECK: iree_linalg_ext.attention\n// CHECK-NOT: arith.mulf")


def test_a_soft_cap_sees_natural_scores():
    graph = LinalgText()
    q, k, v = qkv(graph)
    scores = graph.scaled(graph.einsum("bhqe,bhke->bhqk", q, k), 0.25)
    scores = graph.scaled(graph.elementwise("bhqk->bhqk", [graph.scaled(scores, 5.0, "divf")], "%r = math.tanh %a0 : f32"), 5.0)
    module = raised(graph, graph.einsum("bhqk,bhke->bhqe", graph.softmax(scores), v))
    filecheck(module, "// CHECK: %scale = arith.constant 5.000000e-02\n// CHECK: math.tanh %score\n// CHECK: arith.mulf")


def test_log_sum_exp_comes_from_the_running_sums():
    graph = LinalgText()
    q, k, v = qkv(graph)
    top, weights, total = exponentials(graph, q, k)
    out = graph.einsum("bhqk,bhke->bhqe", graph.binary("divf", "bhqk,bhq->bhqk", weights, total), v)
    lse = graph.elementwise("bhq,bhq->bhq", [top, total], "%l = math.log %a1 : f32\n      %r = arith.addf %a0, %l : f32")
    module = raised(graph, out, lse)
    filecheck(module, "// CHECK: iree_linalg_ext.online_attention\n// CHECK-NOT: reduction")


def left_alone(graph: LinalgText, *results: Value) -> None:
    text = graph.text(*results)
    module = run_passes(text, "generalize-linalg", "raise-attention")
    assert not any(name.startswith("iree_linalg_ext.") for name in names_of(module))
    run_both(text, module, normal(graph))


def test_weights_that_are_asked_for_are_left():
    graph = LinalgText()
    q, k, v = qkv(graph)
    weights = graph.softmax(graph.einsum("bhqe,bhke->bhqk", q, k))
    left_alone(graph, graph.einsum("bhqk,bhke->bhqe", weights, v), weights)


def test_a_softmax_over_the_queries_is_left():
    graph = LinalgText()
    q, k, v = qkv(graph)
    weights = graph.softmax(graph.einsum("bhqe,bhke->bhkq", q, k))
    left_alone(graph, graph.einsum("bhkq,bhke->bhqe", weights, v))


def test_a_sum_of_other_scores_is_left():
    graph = LinalgText()
    q, k, v = qkv(graph)
    scores = graph.einsum("bhqe,bhke->bhqk", q, k)
    weights = graph.elementwise("bhqk->bhqk", [scores], "%r = math.exp %a0 : f32")
    others = graph.elementwise("bhqk->bhqk", [graph.scaled(scores, 2.0)], "%r = math.exp %a0 : f32")
    total = graph.reduce("addf", "bhqk->bhq", others, 0.0)
    left_alone(graph, graph.einsum("bhqk,bhke->bhqe", graph.binary("divf", "bhqk,bhq->bhqk", weights, total), v))


def test_a_sigmoid_is_left():
    graph = LinalgText()
    q, k, v = qkv(graph)
    body = """%n = arith.negf %a0 : f32
      %e = math.exp %n : f32
      %one = arith.constant 1.0 : f32
      %d = arith.addf %one, %e : f32
      %r = arith.divf %one, %d : f32"""
    weights = graph.elementwise("bhqk->bhqk", [graph.einsum("bhqe,bhke->bhqk", q, k)], body)
    left_alone(graph, graph.einsum("bhqk,bhke->bhqe", weights, v))


@pytest.mark.parametrize(
    ("queries", "keys", "kept", "dead"),
    [
        (4, 4, "%ge = arith.cmpi sge, %i, %j : index", True),  # key 0
        (4, 6, "%ge = arith.cmpi sge, %i, %j : index", True),
        (4, 4, "%ge = arith.cmpi sgt, %i, %j : index", False),  # the first row has none
        (4, 4, "%ge = arith.cmpi eq, %i, %j : index", True),  # the row's own
        (6, 4, "%ge = arith.cmpi eq, %i, %j : index", False),  # which not every row has
    ],
)
def test_a_mask_of_the_least_number_is_dead_where_every_row_keeps_a_key(queries: int, keys: int, kept: str, dead: bool):
    """-3e38 is -inf only if no row can be masked out altogether; whether or not, the numbers are those that were written."""
    graph = LinalgText()
    q = graph.argument("q", (2, queries, 8))
    k, v = (graph.argument(name, (2, keys, 8)) for name in "kv")
    body = f"%i = linalg.index 0 : index\n      %j = linalg.index 1 : index\n      {kept}\n"
    low, zero = graph.number(-3.1234e38), graph.number(0.0)
    body += f"      %r = arith.select %ge, {zero.name}, {low.name} : f32"
    mask = graph.elementwise("->qk", [], body, "f32", (queries, keys))
    scores = graph.binary("addf", "bqk,qk->bqk", graph.einsum("bqe,bke->bqk", q, k), mask)
    module = raised(graph, graph.einsum("bqk,bke->bqe", graph.softmax(scores), v))
    filecheck(module, f"// CHECK{'' if dead else '-NOT'}: %minus_infinity")


def test_two_masks_of_the_least_number_stay_finite():
    """A row may lose by the second what the first leaves it: all its masked keys count alike then."""
    graph = LinalgText()
    q, k, v = qkv(graph)
    mask = causal(graph, 4, 4)
    padding = graph.argument("padding", (2, 4), "i1")
    low = graph.number(-3.4028234663852886e38)
    body = f"%c = arith.andi %a1, %a2 : i1\n      %r = arith.select %c, %a0, {low.name} : f32"
    scores = graph.einsum("bhqe,bhke->bhqk", q, k)
    scores = graph.elementwise("bhqk,qk,bk->bhqk", [scores, mask, padding], body)
    text = graph.text(graph.einsum("bhqk,bhke->bhqe", graph.softmax(scores), v))
    module = run_passes(text, "generalize-linalg", "raise-attention")
    filecheck(module, "// CHECK-NOT: %minus_infinity")
    run_both(text, module, [*normal(graph)[:3], np.array([[False, False, True, True], [True] * 4])])


def test_long_products_are_no_burden():
    """x·x, squared again thirty times: what is looked through must not grow with it."""
    graph = LinalgText()
    x = graph.argument("x", (4, 4))
    for _ in range(30):
        x = graph.binary("mulf", "ab,ab->ab", x, x)
    module = run_passes(graph.text(x), "generalize-linalg", "raise-attention")
    assert names_of(module).count("linalg.generic") == 30


def test_weights_that_are_zero_in_single_rows_are_dead_there():
    graph = LinalgText()
    q, k, v = qkv(graph)
    rows = graph.argument("rows", (2, 4), "i1")
    weights = graph.softmax(graph.einsum("bhqe,bhke->bhqk", q, k))
    zero = graph.number(0.0)
    weights = graph.elementwise("bhqk,bq->bhqk", [weights, rows], f"%r = arith.select %a1, %a0, {zero.name} : f32")
    module = raised(graph, graph.einsum("bhqk,bhke->bhqe", weights, v))
    filecheck(module, "// CHECK: %masked = arith.select %rows_value, %score, %minus_infinity")


def test_weights_that_are_zero_in_pairs_are_left():
    """The sum of the weights counts them: no attention has it so."""
    graph = LinalgText()
    q, k, v = qkv(graph)
    pairs = graph.argument("pairs", (2, 4, 4), "i1")
    weights = graph.softmax(graph.einsum("bhqe,bhke->bhqk", q, k))
    zero = graph.number(0.0)
    weights = graph.elementwise("bhqk,bqk->bhqk", [weights, pairs], f"%r = arith.select %a1, %a0, {zero.name} : f32")
    left_alone(graph, graph.einsum("bhqk,bhke->bhqe", weights, v))


def test_dead_rows_beside_their_log_sum_exp_are_left():
    """The mask of rows is not in the sum that is asked for."""
    graph = LinalgText()
    q, k, v = qkv(graph)
    rows = graph.argument("rows", (2, 4), "i1")
    _top, weights, total = exponentials(graph, q, k)
    zero = graph.number(0.0)
    body = f"%w = arith.divf %a0, %a1 : f32\n      %r = arith.select %a2, %w, {zero.name} : f32"
    weights = graph.elementwise("bhqk,bhq,bq->bhqk", [weights, total, rows], body)
    left_alone(graph, graph.einsum("bhqk,bhke->bhqe", weights, v), total)


def test_a_number_for_nan_other_than_zero_is_left():
    graph = LinalgText()
    q, k, v = qkv(graph)
    weights = graph.softmax(graph.einsum("bhqe,bhke->bhqk", q, k))
    one = graph.number(1.0)
    body = f"%n = arith.cmpf uno, %a0, %a0 : f32\n      %r = arith.select %n, {one.name}, %a0 : f32"
    left_alone(graph, graph.einsum("bhqk,bhke->bhqe", graph.elementwise("bhqk->bhqk", [weights], body), v))


def test_nan_to_num_before_the_division_is_left():
    """exp(score - max) is NaN for one key alone, where the score is; the sum leaves it out then."""
    graph = LinalgText()
    q, k, v = qkv(graph)
    _top, weights, total = exponentials(graph, q, k)
    zero = graph.number(0.0)
    body = f"%n = arith.cmpf uno, %a0, %a0 : f32\n      %r = arith.select %n, {zero.name}, %a0 : f32"
    weights = graph.elementwise("bhqk->bhqk", [weights], body)
    left_alone(graph, graph.einsum("bhqk,bhke->bhqe", graph.binary("divf", "bhqk,bhq->bhqk", weights, total), v))
