"""generalize-linalg: what each named operation becomes, and that it computes the same."""

from __future__ import annotations

import numpy as np
import pytest

from attention_text import parse
from filechecks import filecheck
from linalg_interpreter import run_function
from passes import run_passes

NAMED = """builtin.module {
  func.func @main(%a: tensor<2x3x4xf32>, %b: tensor<2x4x5xf32>, %c: tensor<2x3x5xf32>, %x: tensor<5xf32>) -> (tensor<2x3x5xf32>, tensor<5x3x2xf32>, tensor<3x2xf32>, tensor<2x3x5xf32>) {
    %init = tensor.empty() : tensor<2x3x5xf32>
    %0 = linalg.batch_matmul ins(%a, %b : tensor<2x3x4xf32>, tensor<2x4x5xf32>) outs(%c : tensor<2x3x5xf32>) -> tensor<2x3x5xf32>
    %1 = linalg.softmax dimension(1) ins(%0 : tensor<2x3x5xf32>) outs(%init : tensor<2x3x5xf32>) -> tensor<2x3x5xf32>
    %e2 = tensor.empty() : tensor<5x3x2xf32>
    %2 = linalg.transpose ins(%1 : tensor<2x3x5xf32>) outs(%e2 : tensor<5x3x2xf32>) permutation = [2, 1, 0]
    %zero = arith.constant 0.0 : f32
    %e3 = tensor.empty() : tensor<3x2xf32>
    %f3 = linalg.fill ins(%zero : f32) outs(%e3 : tensor<3x2xf32>) -> tensor<3x2xf32>
    %3 = linalg.reduce ins(%2 : tensor<5x3x2xf32>) outs(%f3 : tensor<3x2xf32>) dimensions = [0] (%in: f32, %out: f32) {
      %sum = arith.addf %in, %out : f32
      linalg.yield %sum : f32
    }
    %4 = linalg.broadcast ins(%x : tensor<5xf32>) outs(%init : tensor<2x3x5xf32>) dimensions = [0, 1]
    %5 = linalg.mul ins(%4, %1 : tensor<2x3x5xf32>, tensor<2x3x5xf32>) outs(%init : tensor<2x3x5xf32>) -> tensor<2x3x5xf32>
    %6 = linalg.exp ins(%5 : tensor<2x3x5xf32>) outs(%init : tensor<2x3x5xf32>) -> tensor<2x3x5xf32>
    %7 = linalg.map { arith.subf } ins(%6, %4 : tensor<2x3x5xf32>, tensor<2x3x5xf32>) outs(%init : tensor<2x3x5xf32>)
    func.return %0, %2, %3, %7 : tensor<2x3x5xf32>, tensor<5x3x2xf32>, tensor<3x2xf32>, tensor<2x3x5xf32>
  }
}"""  # noqa: E501


def test_every_named_operation_becomes_a_generic():
    module = run_passes(NAMED, "generalize-linalg")
    names = {op.name for op in module.walk() if op.name.startswith("linalg.")}
    assert names == {"linalg.generic", "linalg.yield", "linalg.fill"}
    filecheck(
        module,
        """
        // CHECK: indexing_maps = [affine_map<(d0, d1, d2, d3) -> (d0, d1, d3)>, affine_map<(d0, d1, d2, d3) -> (d0, d3, d2)>, affine_map<(d0, d1, d2, d3) -> (d0, d1, d2)>], iterator_types = ["parallel", "parallel", "parallel", "reduction"]} ins(%a, %b
        // CHECK: arith.mulf
        // CHECK-NEXT: arith.addf
        // CHECK: iterator_types = ["parallel", "reduction", "parallel"]
        // CHECK: arith.maximumf
        // CHECK: arith.subf
        // CHECK-NEXT: math.exp
        // CHECK: arith.addf
        // CHECK: arith.divf
        // CHECK: affine_map<(d0, d1, d2) -> (d2, d1, d0)>, affine_map<(d0, d1, d2) -> (d0, d1, d2)>], iterator_types = ["parallel", "parallel", "parallel"]}
        // CHECK: affine_map<(d0, d1, d2) -> (d2)>, affine_map<(d0, d1, d2) -> (d0, d1, d2)>], iterator_types = ["parallel", "parallel", "parallel"]} ins(%x
        """,  # noqa: E501
    )


def test_it_computes_the_same():
    rng = np.random.default_rng(0)
    arguments = [rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3, 4), (2, 4, 5), (2, 3, 5), (5,))]
    before = run_function(
        parse(
            NAMED.replace("linalg.map { arith.subf }", "linalg.sub").replace(
                "outs(%init : tensor<2x3x5xf32>)\n    func", "outs(%init : tensor<2x3x5xf32>) -> tensor<2x3x5xf32>\n    func"
            )
        ),
        "main",
        arguments,
    )
    after = run_function(run_passes(NAMED, "generalize-linalg"), "main", arguments)
    for result, wanted in zip(after, before, strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "left", "right", "out", "einsum"),
    [
        ("matmul", "3x4", "4x5", "3x5", "ik,kj->ij"),
        ("matmul_transpose_a", "4x3", "4x5", "3x5", "ki,kj->ij"),
        ("matmul_transpose_b", "3x4", "5x4", "3x5", "ik,jk->ij"),
        ("batch_matmul_transpose_a", "2x4x3", "2x4x5", "2x3x5", "bki,bkj->bij"),
        ("batch_matmul_transpose_b", "2x3x4", "2x5x4", "2x3x5", "bik,bjk->bij"),
        ("batch_matvec", "2x3x4", "2x4", "2x3", "bik,bk->bi"),
        ("batch_vecmat", "2x4", "2x4x5", "2x5", "bk,bkj->bj"),
        ("matvec", "3x4", "4", "3", "ik,k->i"),
        ("vecmat", "4", "4x5", "5", "k,kj->j"),
    ],
)
def test_products(name: str, left: str, right: str, out: str, einsum: str):
    """Halves are widened; the third operand is added to."""
    text = f"""func.func @main(%a: tensor<{left}xf16>, %b: tensor<{right}xf16>, %c: tensor<{out}xf32>) -> tensor<{out}xf32> {{
      %0 = linalg.{name} ins(%a, %b : tensor<{left}xf16>, tensor<{right}xf16>) outs(%c : tensor<{out}xf32>) -> tensor<{out}xf32>
      func.return %0 : tensor<{out}xf32>
    }}"""
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal([int(n) for n in shape.split("x")]) for shape in (left, right, out))
    a, b, c = a.astype(np.float16), b.astype(np.float16), c.astype(np.float32)
    (result,) = run_function(run_passes(text, "generalize-linalg"), "main", [a, b, c])
    np.testing.assert_allclose(result, c + np.einsum(einsum, a.astype(np.float32), b.astype(np.float32)), rtol=1e-5, atol=1e-6)


def test_text_of_iree_opt_is_read():
    """The generic form, in which products bring their body and their maps along."""
    text = """"builtin.module"() ({
      "func.func"() <{function_type = (tensor<2x4xf32>, tensor<4xf32>, tensor<2xf32>) -> tensor<2xf32>, sym_name = "main"}> ({
      ^bb0(%a: tensor<2x4xf32>, %b: tensor<4xf32>, %c: tensor<2xf32>):
        %0 = "linalg.matvec"(%a, %b, %c) <{operandSegmentSizes = array<i32: 2, 1>}> ({
        ^bb0(%l: f32, %r: f32, %o: f32):
          %1 = "arith.mulf"(%l, %r) <{fastmath = #arith.fastmath<none>}> : (f32, f32) -> f32
          %2 = "arith.addf"(%o, %1) <{fastmath = #arith.fastmath<none>}> : (f32, f32) -> f32
          "linalg.yield"(%2) : (f32) -> ()
        }) {linalg.memoized_indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d1)>, affine_map<(d0, d1) -> (d0)>]} : (tensor<2x4xf32>, tensor<4xf32>, tensor<2xf32>) -> tensor<2xf32>
        %3 = "linalg.softmax"(%0, %c) <{dimension = 0 : i64}> : (tensor<2xf32>, tensor<2xf32>) -> tensor<2xf32>
        %4 = "linalg.map"(%3, %0, %c) ({
        ^bb0(%l: f32, %r: f32):
          %1 = "arith.mulf"(%l, %r) <{fastmath = #arith.fastmath<none>}> : (f32, f32) -> f32
          "linalg.yield"(%1) : (f32) -> ()
        }) : (tensor<2xf32>, tensor<2xf32>, tensor<2xf32>) -> tensor<2xf32>
        "func.return"(%4) : (tensor<2xf32>) -> ()
      }) : () -> ()
    }) : () -> ()"""  # noqa: E501
    module = run_passes(text, "generalize-linalg")
    a, b, c = (
        np.array([[1, 2, 3, 4], [0, 1, 0, 1]], np.float32),
        np.array([0.1, 0.2, 0.3, 0.4], np.float32),
        np.zeros(2, np.float32),
    )
    (result,) = run_function(module, "main", [a, b, c])
    weights = np.exp(a @ b) / np.exp(a @ b).sum()
    np.testing.assert_allclose(result, weights * (a @ b), rtol=1e-5)
