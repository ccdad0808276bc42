# ruff: noqa: E501 - IR is long
"""The form of what convert-torch-to-linalg writes."""

from __future__ import annotations

import pytest

from attnc.errors import UnsupportedGraphError
from filechecks import filecheck
from passes import run_passes


def body(operations: str, arguments: str, result: str, returned: str = "%r") -> str:
    return f"func.func @main({arguments}) -> {result} {{\n{operations}\n  return {returned} : {result}\n}}"


def test_views_of_open_sizes_split_and_merge_dims():
    text = body(
        """
  %n = torch.constant.int 1
  %s = torch.aten.size.int %x, %n : !torch.vtensor<[2,?,512],f16>, !torch.int -> !torch.int
  %two = torch.constant.int 2
  %heads = torch.constant.int 8
  %rest = torch.constant.int -1
  %list = torch.prim.ListConstruct %two, %s, %heads, %rest : (!torch.int, !torch.int, !torch.int, !torch.int) -> !torch.list<int>
  %v = torch.aten.view %x, %list : !torch.vtensor<[2,?,512],f16>, !torch.list<int> -> !torch.vtensor<[2,?,8,64],f16>
  %t = torch.aten.transpose.int %v, %n, %two {attnc.loc = "model.py:3"} : !torch.vtensor<[2,?,8,64],f16>, !torch.int, !torch.int -> !torch.vtensor<[2,8,?,64],f16>
  %merged = torch.aten.mul.int %two, %heads : !torch.int, !torch.int -> !torch.int
  %list2 = torch.prim.ListConstruct %merged, %s, %rest : (!torch.int, !torch.int, !torch.int) -> !torch.list<int>
  %r = torch.aten.reshape %t, %list2 : !torch.vtensor<[2,8,?,64],f16>, !torch.list<int> -> !torch.vtensor<[16,?,64],f16>""",
        "%x: !torch.vtensor<[2,?,512],f16>",
        "!torch.vtensor<[16,?,64],f16>",
    )
    filecheck(
        run_passes(text, "convert-torch-to-linalg"),
        """
// CHECK: func.func @main(%x: tensor<2x?x512xf16>) -> tensor<16x?x64xf16> attributes {attnc.argument_dtypes = ["float16"], attnc.result_dtypes = ["float16"]}
// CHECK: [[N:%.*]] = tensor.dim %x
// CHECK: [[V:%.*]] = tensor.expand_shape %x {{\\[\\[0 : i64\\], \\[1 : i64\\], \\[2 : i64, 3 : i64\\]\\]}} output_shape [2, [[N]], 8, 64]
// CHECK: [[T:%.*]] = linalg.transpose ins([[V]]
// CHECK-SAME: permutation = [0, 2, 1, 3]
// CHECK: [[R:%.*]] = tensor.collapse_shape [[T]]
// CHECK: func.return [[R]] : tensor<16x?x64xf16>
""",
    )


def test_an_elementwise_operation_reads_broadcast_operands_by_maps():
    text = body(
        """
  %r = torch.aten.mul.Tensor %x, %y : !torch.vtensor<[?,1,64],f16>, !torch.vtensor<[5,64],f32> -> !torch.vtensor<[?,5,64],f32>""",
        "%x: !torch.vtensor<[?,1,64],f16>, %y: !torch.vtensor<[5,64],f32>",
        "!torch.vtensor<[?,5,64],f32>",
    )
    filecheck(
        run_passes(text, "convert-torch-to-linalg"),
        """
// CHECK: linalg.generic {indexing_maps = [affine_map<(d0, d1, d2) -> (d0, 0, d2)>, affine_map<(d0, d1, d2) -> (d1, d2)>, affine_map<(d0, d1, d2) -> (d0, d1, d2)>], iterator_types = ["parallel", "parallel", "parallel"]} ins(%x, %y
// CHECK: [[X:%.*]] = arith.extf %in : f16 to f32
// CHECK: [[P:%.*]] = arith.mulf [[X]], %in_1 : f32
// CHECK: linalg.yield [[P]] : f32
""",
    )


def test_masked_attention_reads_a_mask_for_all_heads_at_0():
    text = body(
        """
  %zero = torch.constant.float 0.0
  %false = torch.constant.bool false
  %none = torch.constant.none
  %r = torch.aten.scaled_dot_product_attention %q, %k, %k, %m, %zero, %false, %none, %false : !torch.vtensor<[2,4,?,8],f32>, !torch.vtensor<[2,4,?,8],f32>, !torch.vtensor<[2,4,?,8],f32>, !torch.vtensor<[2,1,?,?],i1>, !torch.float, !torch.bool, !torch.none, !torch.bool -> !torch.vtensor<[2,4,?,8],f32>""",
        "%q: !torch.vtensor<[2,4,?,8],f32>, %k: !torch.vtensor<[2,4,?,8],f32>, %m: !torch.vtensor<[2,1,?,?],i1>",
        "!torch.vtensor<[2,4,?,8],f32>",
    )
    filecheck(
        run_passes(text, "convert-torch-to-linalg"),
        """
// CHECK: "iree_linalg_ext.attention"(%q, %k, %k, {{%.*}}, %m, {{%.*}}) <{indexing_maps = [affine_map<(d0, d1, d2, d3, d4, d5) -> (d0, d1, d2, d4)>, affine_map<(d0, d1, d2, d3, d4, d5) -> (d0, d1, d3, d4)>, affine_map<(d0, d1, d2, d3, d4, d5) -> (d0, d1, d3, d5)>, affine_map<(d0, d1, d2, d3, d4, d5) -> ()>, affine_map<(d0, d1, d2, d3, d4, d5) -> (d0, 0, d2, d3)>, affine_map<(d0, d1, d2, d3, d4, d5) -> (d0, d1, d2, d5)>]}>
""",
    )


def test_a_product_is_summed_in_f32():
    text = body(
        """
  %r = torch.aten.matmul %x, %y : !torch.vtensor<[3,4],bf16>, !torch.vtensor<[4,5],bf16> -> !torch.vtensor<[3,5],bf16>""",
        "%x: !torch.vtensor<[3,4],bf16>, %y: !torch.vtensor<[4,5],bf16>",
        "!torch.vtensor<[3,5],bf16>",
    )
    filecheck(
        run_passes(text, "convert-torch-to-linalg"),
        """
// CHECK: linalg.generic {indexing_maps = [affine_map<(d0, d1, d2) -> (d0, d2)>, affine_map<(d0, d1, d2) -> (d2, d1)>, affine_map<(d0, d1, d2) -> (d0, d1)>], iterator_types = ["parallel", "parallel", "reduction"]}
// CHECK: [[A:%.*]] = arith.extf %in : bf16 to f32
// CHECK: [[B:%.*]] = arith.extf %in_1 : bf16 to f32
// CHECK: [[P:%.*]] = arith.mulf [[A]], [[B]] : f32
// CHECK: [[S:%.*]] = arith.addf %out, [[P]] : f32
// CHECK: linalg.yield [[S]] : f32
// CHECK: arith.truncf {{%.*}} : f32 to bf16
""",
    )


def test_an_index_tensor_is_a_checked_read():
    text = body(
        """
  %none = torch.constant.none
  %list = torch.prim.ListConstruct %none, %i : (!torch.none, !torch.vtensor<[3],si64>) -> !torch.list<optional<vtensor>>
  %r = torch.aten.index.Tensor %x, %list : !torch.vtensor<[2,7],f32>, !torch.list<optional<vtensor>> -> !torch.vtensor<[2,3],f32>""",
        "%x: !torch.vtensor<[2,7],f32>, %i: !torch.vtensor<[3],si64>",
        "!torch.vtensor<[2,3],f32>",
    )
    filecheck(
        run_passes(text, "convert-torch-to-linalg"),
        """
// CHECK: linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d1)>, affine_map<(d0, d1) -> (d0, d1)>]{{.*}} ins(%i
// CHECK: [[I:%.*]] = arith.index_cast %in : i64 to index
// CHECK: tensor.extract %x[%i0, [[I]]] {attnc.checked = "all", attnc.name = "x"} : tensor<2x7xf32>
""",
    )


@pytest.mark.parametrize("operation", ["torch.aten.sort", "torch.prims.fft_c2c", "torch.made_up.operation"])
def test_what_is_not_known_is_named_with_its_place(operation: str):
    text = body(
        f"""
  %r = {operation} %x {{attnc.loc = "model.py:12"}} : !torch.vtensor<[3],f32> -> !torch.vtensor<[3],f32>""",
        "%x: !torch.vtensor<[3],f32>",
        "!torch.vtensor<[3],f32>",
    )
    with pytest.raises(UnsupportedGraphError, match=operation.removeprefix("torch.")) as caught:
        run_passes(text, "convert-torch-to-linalg")
    assert (caught.value.filename, caught.value.line) == ("model.py", 12)
