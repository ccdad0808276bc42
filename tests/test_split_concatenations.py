"""split-concatenations: what is reduced with one more column, and cut off again; and what stays joined."""

from __future__ import annotations

import numpy as np

from attention_text import parse
from filechecks import filecheck
from linalg_interpreter import run_function
from passes import run_passes

HEAD = """
func.func @main(%a: tensor<3x4xf32>, %b: tensor<3x1xf32>) -> RESULT {
  %minus_infinity = arith.constant 0xff800000 : f32
  %e = tensor.empty() : tensor<3x5xf32>
  %e4 = tensor.empty() : tensor<3x4xf32>
  %e1 = tensor.empty() : tensor<3xf32>
  %first = tensor.insert_slice %a into %e[0, 0] [3, 4] [1, 1] : tensor<3x4xf32> into tensor<3x5xf32>
  %c = tensor.insert_slice %b into %first[0, 4] [3, 1] [1, 1] : tensor<3x1xf32> into tensor<3x5xf32>
  %low = linalg.fill ins(%minus_infinity : f32) outs(%e1 : tensor<3xf32>) -> tensor<3xf32>
  %m = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i)>],
      iterator_types = ["parallel", "reduction"]} ins(%c : tensor<3x5xf32>) outs(%low : tensor<3xf32>) {
  ^bb0(%x: f32, %y: f32):
    %z = arith.maximumf %y, %x : f32
    linalg.yield %z : f32
  } -> tensor<3xf32>
  %s = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i)>, affine_map<(i, j) -> (i, j)>],
      iterator_types = ["parallel", "parallel"]} ins(%c, %m : tensor<3x5xf32>, tensor<3xf32>) outs(%e : tensor<3x5xf32>) {
  ^bb0(%x: f32, %y: f32, %z: f32):
    %i = linalg.index 0 : index
    %n = arith.index_cast %i : index to i32
    %f = arith.sitofp %n : i32 to f32
    %d = arith.subf %x, %y : f32
    %r = arith.addf %d, %f : f32
    linalg.yield %r : f32
  } -> tensor<3x5xf32>
"""


def both(text: str) -> str:
    rng = np.random.default_rng(0)
    arguments = [rng.standard_normal((3, 4)).astype(np.float32), rng.standard_normal((3, 1)).astype(np.float32)]
    module = run_passes(text, "split-concatenations")
    wanted = run_function(parse(text), "main", arguments)
    for result, expected in zip(run_function(module, "main", arguments), wanted, strict=True):
        np.testing.assert_array_equal(result, expected)
    return str(module)


def test_the_column_is_never_joined():
    text = HEAD.replace("RESULT", "(tensor<3x4xf32>, tensor<3xf32>)")
    text += """
  %w = tensor.extract_slice %s[0, 0] [3, 4] [1, 1] : tensor<3x5xf32> to tensor<3x4xf32>
  func.return %w, %m : tensor<3x4xf32>, tensor<3xf32>
}"""
    module = both(text)
    filecheck(module, "// CHECK-NOT: slice\n// CHECK: reduction\n// CHECK-NOT: reduction\n// CHECK-NOT: slice")


def test_the_column_may_be_what_is_kept():
    text = HEAD.replace("RESULT", "tensor<3x1xf32>")
    text += """
  %w = tensor.extract_slice %s[0, 4] [3, 1] [1, 1] : tensor<3x5xf32> to tensor<3x1xf32>
  func.return %w : tensor<3x1xf32>
}"""
    assert "slice" not in both(text)


def test_a_slice_of_another_size_is_left():
    text = HEAD.replace("RESULT", "tensor<3x3xf32>")
    text += """
  %w = tensor.extract_slice %s[0, 0] [3, 3] [1, 1] : tensor<3x5xf32> to tensor<3x3xf32>
  func.return %w : tensor<3x3xf32>
}"""
    assert both(text).count("insert_slice") == 2


def test_a_joined_tensor_that_is_returned_is_left():
    text = HEAD.replace("RESULT", "(tensor<3x4xf32>, tensor<3x5xf32>)")
    text += """
  %w = tensor.extract_slice %s[0, 0] [3, 4] [1, 1] : tensor<3x5xf32> to tensor<3x4xf32>
  func.return %w, %c : tensor<3x4xf32>, tensor<3x5xf32>
}"""
    assert both(text).count("insert_slice") == 2
