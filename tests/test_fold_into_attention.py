"""The folds into attention: each alone on text, then chains of them to the end, with the numbers of the unfolded module."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from xdsl.dialects.builtin import ModuleOp

from attention_text import parse
from attnc.transforms.fold_into_attention import FOLDS, PASSES
from filechecks import filecheck
from linalg_text import LinalgText, Value
from passes import run_passes
from test_raise_attention import names_of, normal, run_both

RAISED = ("generalize-linalg", "raise-attention")


def attention(graph: LinalgText, q: Value, k: Value, v: Value, mask: Value | None = None) -> Value:
    """softmax(q·kᵀ + mask)·v, of 4-D tensors."""
    element = q.element
    scores = graph.einsum("bhqe,bhke->bhqk", q, k)
    if mask is not None:
        scores = graph.binary("addf", f"bhqk,{'bhqk'[-len(mask.shape or ()) :]}->bhqk", scores, mask)
    out = graph.einsum("bhqk,bhke->bhqe", graph.softmax(scores), v)
    return graph.cast(out, element) if element != "f32" else out


def folded(graph: LinalgText, result: Value, *passes: str, tolerance: float = 2e-6) -> ModuleOp:
    text = graph.text(result)
    module = run_passes(text, *RAISED, *passes)
    run_both(text, module, normal(graph), tolerance)
    return module


def three(graph: LinalgText, shape: Sequence[int], element: str = "f32") -> list[Value]:
    return [graph.argument(name, shape, element) for name in ("q", "k", "v")]


def test_transposes():
    graph = LinalgText()
    q, k, v = (graph.transpose(x, (0, 2, 1, 3)) for x in three(graph, (2, 5, 3, 8)))
    k = graph.transpose(graph.transpose(k, (0, 1, 3, 2)), (0, 1, 3, 2))
    module = folded(graph, attention(graph, q, k, v), "fold-transposes")
    filecheck(
        module,
        """
        // CHECK-NOT: linalg.generic
        // CHECK: "iree_linalg_ext.attention"(%q, %k, %v, %scale, %init) <{indexing_maps = [affine_map<(d0, d1, d2, d3, d4, d5) -> (d0, d2, d1, d4)>, affine_map<(d0, d1, d2, d3, d4, d5) -> (d0, d3, d1, d4)>, affine_map<(d0, d1, d2, d3, d4, d5) -> (d0, d3, d1, d5)>
        // CHECK-NOT: linalg.generic
        """,  # noqa: E501
    )


def test_transposes_of_merged_dims():
    """Heads are split after the transpose: the view moves to the argument."""
    graph = LinalgText()
    q, k, v = (graph.expand(graph.transpose(x, (0, 2, 1)), [[0], [1, 2], [3]], (2, 3, 8, 5)) for x in three(graph, (2, 5, 24)))
    q, k, v = (graph.transpose(x, (0, 1, 3, 2)) for x in (q, k, v))
    module = folded(graph, attention(graph, q, k, v), "fold-transposes")
    filecheck(
        module,
        """
        // CHECK: tensor.expand_shape %q {{.*}} output_shape [2, 5, 3, 8]
        // CHECK-NOT: linalg.generic
        // CHECK: iree_linalg_ext.attention
        """,
    )


def test_broadcasts():
    """Keys with a batch of 1 and heads shared by all queries' heads."""
    graph = LinalgText()
    q = graph.argument("q", (2, 3, 4, 8))
    k, v = graph.argument("k", (3, 5, 8)), graph.argument("v", (2, 5, 8))
    k, v = graph.broadcast(k, (2, 3, 5, 8), (0,)), graph.broadcast(v, (2, 3, 5, 8), (1,))
    module = folded(graph, attention(graph, q, k, v), "fold-broadcasts")
    filecheck(
        module,
        """
        // CHECK-NOT: linalg.generic
        // CHECK: "iree_linalg_ext.attention"(%q, %k, %v, %scale, %init) <{indexing_maps = [affine_map<(d0, d1, d2, d3, d4, d5) -> (d0, d1, d2, d4)>, affine_map<(d0, d1, d2, d3, d4, d5) -> (d1, d3, d4)>, affine_map<(d0, d1, d2, d3, d4, d5) -> (d0, d3, d5)>
        """,  # noqa: E501
    )


def test_a_batch_that_only_the_value_would_keep_stays_broadcast():
    graph = LinalgText()
    q, k = graph.argument("q", (3, 4, 8)), graph.argument("k", (3, 5, 8))
    v = graph.argument("v", (2, 3, 5, 8))
    q, k = graph.broadcast(q, (2, 3, 4, 8), (0,)), graph.broadcast(k, (2, 3, 5, 8), (0,))
    module = folded(graph, attention(graph, q, k, v), "fold-broadcasts")
    assert names_of(module).count("linalg.generic") == 1


def test_reshapes():
    graph = LinalgText()
    q, k, v = (graph.collapse(x, [[0, 1], [2], [3]]) for x in three(graph, (2, 3, 4, 8)))
    scores = graph.einsum("bqe,bke->bqk", q, k)
    result = graph.einsum("bqk,bke->bqe", graph.softmax(scores), v)
    module = folded(graph, result, "fold-reshapes")
    filecheck(
        module,
        """
        // CHECK: %[[R:.*]] = "iree_linalg_ext.attention"(%q, %k, %v,
        // CHECK: tensor.collapse_shape %[[R]] [[0 : i64, 1 : i64], [2 : i64], [3 : i64]]
        """,
    )


def test_repeated_heads_are_shared():
    """repeat_kv: a broadcast, then a merging reshape; query heads become (kv head, group)."""
    graph = LinalgText()
    q, k, v = graph.argument("q", (2, 6, 4, 8)), graph.argument("k", (2, 2, 5, 8)), graph.argument("v", (2, 2, 5, 8))
    k, v = (graph.collapse(graph.broadcast(x, (2, 2, 3, 5, 8), (2,)), [[0], [1, 2], [3], [4]]) for x in (k, v))
    module = folded(graph, attention(graph, q, k, v), "fold-reshapes", "fold-broadcasts")
    filecheck(
        module,
        """
        // CHECK: %[[Q:.*]] = tensor.expand_shape %q {{.*}} output_shape [2, 2, 3, 4, 8]
        // CHECK: "iree_linalg_ext.attention"(%[[Q]], %k, %v, %scale, %init) <{indexing_maps = [affine_map<(d0, d1, d2, d3, d4, d5, d6) -> (d0, d1, d2, d3, d5)>, affine_map<(d0, d1, d2, d3, d4, d5, d6) -> (d0, d1, d4, d5)>, affine_map<(d0, d1, d2, d3, d4, d5, d6) -> (d0, d1, d4, d6)>
        """,  # noqa: E501
    )


def test_unit_dims():
    graph = LinalgText()
    q, k, v = (graph.expand(x, [[0, 1], [2], [3]], (1, 3, 4, 8)) for x in three(graph, (3, 4, 8)))
    result = graph.collapse(attention(graph, q, k, v), [[0, 1], [2], [3]])
    module = folded(graph, result, "fold-unit-dims")
    filecheck(
        module,
        """
        // CHECK-NOT: expand_shape
        // CHECK: %out = "iree_linalg_ext.attention"(%q, %k, %v, %scale, %init)
        // CHECK-NOT: collapse_shape
        // CHECK: func.return %out : tensor<3x4x8xf32>
        """,
    )


def test_casts():
    graph = LinalgText()
    q, k, v = three(graph, (2, 3, 4, 8), "f16")
    result = attention(graph, graph.cast(q, "f32"), graph.cast(k, "f32"), graph.cast(v, "f32"))
    module = folded(graph, graph.cast(result, "f16"), "fold-casts", tolerance=1e-3)
    filecheck(
        module,
        """
        // CHECK-NOT: linalg.generic
        // CHECK: %init = tensor.empty() : tensor<2x3x4x8xf16>
        // CHECK: "iree_linalg_ext.attention"(%q, %k, %v, %scale, %init)
        // CHECK: ^bb0(%score: f32)
        // CHECK-NOT: linalg.generic
        """,
    )


def test_casts_of_two_operands_stay():
    graph = LinalgText()
    q, k = (graph.argument(name, (2, 3, 4, 8), "f16") for name in "qk")
    v = graph.argument("v", (2, 3, 4, 8))
    module = folded(graph, attention(graph, graph.cast(q, "f32"), graph.cast(k, "f32"), v), "fold-casts", tolerance=1e-3)
    assert names_of(module).count("linalg.generic") == 2


def test_scale():
    """On both operands, once a number of run time."""
    graph = LinalgText()
    q, k, v = three(graph, (2, 3, 4, 8))
    c = graph.argument("c", None)
    module = folded(graph, attention(graph, graph.scaled(q, 0.5), graph.scaled(k, c), v), "fold-scale")
    filecheck(
        module,
        """
        // CHECK-NOT: linalg.generic
        // CHECK: %[[S:.*]] = arith.mulf %{{.*}}, %c
        // CHECK: "iree_linalg_ext.attention"(%q, %k, %v, %[[S]]
        """,
    )


def test_scaled_halves_are_not_rounded():
    graph = LinalgText()
    q, k, v = three(graph, (2, 3, 4, 8), "f16")
    module = folded(graph, attention(graph, graph.scaled(q, 0.125), k, v), "fold-scale", tolerance=2e-3)
    filecheck(module, '// CHECK: %scale{{.*}} = arith.constant 1.250000e-01 : f32\n// CHECK: iree_linalg_ext.attention"(%q,')


def test_slices_come_before_transposes():
    """Packed query, key and value: permute(2, 0, 3, 1, 4), then [0], [1], [2]."""
    graph = LinalgText()
    packed = graph.argument("packed", (2, 5, 3, 4, 8))
    t = graph.transpose(packed, (2, 0, 3, 1, 4))

    def part(place: int) -> Value:
        name = graph.new()
        graph.lines.append(
            f"{name} = tensor.extract_slice {t.name}[{place}, 0, 0, 0, 0] [1, 2, 4, 5, 8] [1, 1, 1, 1, 1] "
            f": {t.type} to tensor<1x2x4x5x8xf32>"
        )
        return graph.collapse(Value(name, (1, 2, 4, 5, 8)), [[0, 1], [2], [3], [4]])

    result = attention(graph, part(0), part(1), part(2))
    module = folded(graph, result, "fold-slices")
    filecheck(
        module,
        """
        // CHECK: tensor.extract_slice %packed[0, 0, 0, 0, 0] [2, 5, 1, 4, 8] [1, 1, 1, 1, 1]
        // CHECK: tensor.extract_slice %packed[0, 0, 1, 0, 0]
        // CHECK: tensor.extract_slice %packed[0, 0, 2, 0, 0]
        // CHECK: iree_linalg_ext.attention
        """,
    )
    module = folded(graph, result, "fold-into-attention")
    assert "linalg.generic" not in names_of(module)


def test_consumers():
    graph = LinalgText()
    q, k, v = three(graph, (2, 3, 4, 8))
    result = graph.collapse(graph.transpose(attention(graph, q, k, v), (0, 2, 1, 3)), [[0], [1], [2, 3]])
    module = folded(graph, result, "fold-consumers")
    filecheck(
        module,
        """
        // CHECK: %init = tensor.empty() : tensor<2x4x3x8xf32>
        // CHECK: "iree_linalg_ext.attention"(%q, %k, %v, %scale, %init) <{indexing_maps = [{{.*}}, affine_map<(d0, d1, d2, d3, d4, d5) -> (d0, d2, d1, d5)>]}>
        // CHECK-NOT: linalg.generic
        // CHECK: tensor.collapse_shape
        // CHECK-NEXT: func.return
        """,  # noqa: E501
    )


def test_consumers_that_take_merged_dims_apart():
    """(B·H) products, whose result is viewed as (B, H), transposed and merged to (S, H·E)."""
    graph = LinalgText()
    q, k, v = three(graph, (6, 4, 8))
    out = graph.einsum("bqk,bke->bqe", graph.softmax(graph.einsum("bqe,bke->bqk", q, k)), v)
    out = graph.transpose(graph.expand(out, [[0, 1], [2], [3]], (2, 3, 4, 8)), (0, 2, 1, 3))
    module = folded(graph, graph.collapse(out, [[0], [1], [2, 3]]), "fold-consumers")
    assert names_of(module).count("tensor.expand_shape") == 3 and "linalg.generic" not in names_of(module)


def test_a_result_that_is_used_twice_keeps_its_layout():
    graph = LinalgText()
    q, k, v = three(graph, (2, 3, 4, 8))
    out = attention(graph, q, k, v)
    text = graph.text(graph.transpose(out, (0, 2, 1, 3)), out)
    module = run_passes(text, *RAISED, "fold-consumers")
    assert names_of(module).count("linalg.generic") == 1
    run_both(text, module, normal(graph))


MASKED = """builtin.module {{
  func.func @main(%q: tensor<2x3x4x8xf32>, %k: tensor<2x3x4x8xf32>, %v: tensor<2x3x4x8xf32>, %pad: tensor<2x4xi64>) -> tensor<2x3x4x8xf32> {{
    %scale = arith.constant 0.5 : f32
    %low = arith.constant {low} : f32
    %zero = arith.constant 0.0 : f32
    %none = arith.constant 0 : i64
    %e = tensor.empty() : tensor<2x4x4xf32>
    %mask = linalg.generic {{indexing_maps = [affine_map<(b, i, j) -> (b, j)>, affine_map<(b, i, j) -> (b, i, j)>], iterator_types = ["parallel", "parallel", "parallel"]}} ins(%pad : tensor<2x4xi64>) outs(%e : tensor<2x4x4xf32>) {{
    ^bb0(%p: i64, %o: f32):
      %i = linalg.index 1 : index
      %j = linalg.index 2 : index
      %lower = arith.cmpi sge, %i, %j : index
      %real = arith.cmpi ne, %p, %none : i64
      %kept = arith.andi %lower, %real : i1
      %r = arith.select %kept, %zero, %low : f32
      linalg.yield %r : f32
    }} -> tensor<2x4x4xf32>
    %e4 = tensor.empty() : tensor<2x3x4x4xf32>
    %wide = linalg.broadcast ins(%mask : tensor<2x4x4xf32>) outs(%e4 : tensor<2x3x4x4xf32>) dimensions = [1]
    %init = tensor.empty() : tensor<2x3x4x8xf32>
    %r = "iree_linalg_ext.attention"(%q, %k, %v, %scale, %wide, %init) <{{indexing_maps = [affine_map<(b, h, m, k, e, n) -> (b, h, m, e)>, affine_map<(b, h, m, k, e, n) -> (b, h, k, e)>, affine_map<(b, h, m, k, e, n) -> (b, h, k, n)>, affine_map<(b, h, m, k, e, n) -> ()>, affine_map<(b, h, m, k, e, n) -> (b, h, m, k)>, affine_map<(b, h, m, k, e, n) -> (b, h, m, n)>]}}> ({{
    ^bb0(%s: f32):
      "iree_linalg_ext.yield"(%s) : (f32) -> ()
    }}) : (tensor<2x3x4x8xf32>, tensor<2x3x4x8xf32>, tensor<2x3x4x8xf32>, f32, tensor<2x3x4x4xf32>, tensor<2x3x4x8xf32>) -> tensor<2x3x4x8xf32>
    func.return %r : tensor<2x3x4x8xf32>
  }}
}}"""  # noqa: E501


@pytest.mark.parametrize("low", ["0xFF800000", "-3.0e38"])
def test_masks(low: str):
    """A mask operand that is made of positions and a padding mask: computed in the region, as a select if it is -inf."""
    text = MASKED.format(low=low)
    module = run_passes(text, "generalize-linalg", "fold-masks")
    assert "linalg.generic" not in names_of(module)
    select = "arith.select %kept, %s{{.*}}, %minus_infinity" if low == "0xFF800000" else "arith.select %kept, %"
    filecheck(
        module,
        f"""
        // CHECK: ^bb0(%score: f32)
        // CHECK: %lower = arith.cmpi sge
        // CHECK: tensor.extract %pad[
        // CHECK: %kept = arith.andi %lower, %real
        // CHECK: {select.replace("%s{{", "%score{{")}
        """,
    )
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 3, 4, 8)).astype(np.float32) for _ in range(3))
    run_both(text, module, [q, k, v, np.array([[1, 1, 0, 1], [1, 1, 1, 0]])])


Maker = Callable[[LinalgText], Value]


def packed_heads(graph: LinalgText) -> Value:
    """f16 from a projection, K transposed once more, softmax in f32, back to (S, H·E): SDXL's self-attention."""
    q, k, v = three(graph, (2, 5, 24), "f16")
    q, k, v = (graph.transpose(graph.expand(x, [[0], [1], [2, 3]], (2, 5, 3, 8)), (0, 2, 1, 3)) for x in (q, k, v))
    scores = graph.cast(graph.einsum("bhqe,bhek->bhqk", q, graph.transpose(k, (0, 1, 3, 2))), "f16")
    weights = graph.cast(graph.softmax(graph.cast(graph.scaled(scores, 0.25), "f32")), "f16")
    out = graph.cast(graph.einsum("bhqk,bhke->bhqe", weights, v), "f16")
    return graph.collapse(graph.transpose(out, (0, 2, 1, 3)), [[0], [1], [2, 3]])


def grouped_heads(graph: LinalgText) -> Value:
    q, k, v = graph.argument("q", (2, 6, 5, 8)), graph.argument("k", (2, 5, 2, 8)), graph.argument("v", (2, 5, 2, 8))
    mask = graph.argument("mask", (5, 5))

    def repeated(x: Value) -> Value:
        wide = graph.broadcast(graph.transpose(x, (0, 2, 1, 3)), (2, 2, 3, 5, 8), (2,))
        return graph.collapse(wide, [[0], [1, 2], [3], [4]])

    return graph.transpose(attention(graph, graph.scaled(q, 0.3), repeated(k), repeated(v), mask), (0, 2, 1, 3))


def two_key_dims(graph: LinalgText) -> Value:
    """Keys on a grid of 2 × 3, flattened after a transpose: two dims of keys."""
    q = graph.argument("q", (2, 3, 4, 8))
    k, v = (
        graph.collapse(graph.transpose(graph.argument(name, (2, 2, 3, 3, 8)), (0, 3, 1, 2, 4)), [[0], [1], [2, 3], [4]])
        for name in "kv"
    )
    return attention(graph, q, k, v)


@pytest.mark.parametrize("make", [packed_heads, grouped_heads, two_key_dims])
def test_chains(make: Maker):
    """Nothing is left but the attention and views."""
    graph = LinalgText()
    module = folded(graph, make(graph), "fold-into-attention", tolerance=2e-3 if make is packed_heads else 2e-6)
    views = {"tensor.expand_shape", "tensor.collapse_shape", "tensor.empty", "arith.constant", "func.return"}
    assert set(names_of(module)) - views == {"iree_linalg_ext.attention"}
    assert names_of(module).count("iree_linalg_ext.attention") == 1


def test_the_passes_are_there():
    assert PASSES == ("generalize-linalg", "raise-attention", "fold-into-attention")
    assert set(FOLDS) == {
        *("fold-slices", "fold-masks", "fold-scale", "fold-casts", "fold-transposes"),
        *("fold-broadcasts", "fold-reshapes", "fold-consumers", "fold-unit-dims"),
    }
    parse(str(run_passes(MASKED.format(low="0xFF800000"), *PASSES)))
