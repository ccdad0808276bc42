# ruff: noqa: E501 - IR is long
"""What simplify-torch leaves of torch-mlir's text."""

from __future__ import annotations

from filechecks import filecheck
from passes import run_passes

TEXT = """
module {
  func.func private @sdpa_score0(%arg0: !torch.vtensor<[],f32>, %arg1: !torch.vtensor<[],si32>, %arg2: !torch.vtensor<[],si32>, %arg3: !torch.vtensor<[],si32>, %arg4: !torch.vtensor<[],si32>) -> !torch.vtensor<[],f32> {
    return %arg0 : !torch.vtensor<[],f32>
  }
  func.func private @unused(%arg0: !torch.vtensor<[],si32>) -> !torch.vtensor<[],si32> {
    return %arg0 : !torch.vtensor<[],si32>
  }
  func.func @main(%arg0: !torch.vtensor<[1,2,?,8],f32>) -> (!torch.vtensor<[1,2,?,8],f32>, !torch.vtensor<[1,2,?],f32>) {
    %s0 = torch.symbolic_int "s0" {min_val = 2, max_val = 64} : !torch.int
    torch.bind_symbolic_shape %arg0, [%s0], affine_map<()[s0] -> (1, 2, s0, 8)> : !torch.vtensor<[1,2,?,8],f32>
    %int2 = torch.constant.int 2
    %0 = torch.aten.size.int %arg0, %int2 : !torch.vtensor<[1,2,?,8],f32>, !torch.int -> !torch.int
    %int0 = torch.constant.int 0
    %int2_0 = torch.constant.int 2
    %none = torch.constant.none
    %cpu = torch.constant.device "cpu"
    %false = torch.constant.bool false
    %1 = torch.aten.arange.start_step %int0, %0, %int2_0, %none, %int0, %cpu, %false : !torch.int, !torch.int, !torch.int, !torch.none, !torch.int, !torch.Device, !torch.bool -> !torch.vtensor<[?],si64>
    torch.aten._assert_tensor_metadata %1, %none, %none, %int0, %cpu, %int0 : !torch.vtensor<[?],si64>, !torch.none, !torch.none, !torch.int, !torch.Device, !torch.int
    %2:2 = torch.operator "torch.aten.sort.stable"(%1, %false, %int0, %false) : (!torch.vtensor<[?],si64>, !torch.bool, !torch.int, !torch.bool) -> (!torch.vtensor<[?],si64>, !torch.vtensor<[?],si64>)
    %float = torch.constant.float 2.500000e-01
    %true = torch.constant.bool true
    %output, %logsumexp, %max_scores = torch.hop_flex_attention %arg0, %arg0, %arg0, %float, %true, %false {score_mod_fn = @sdpa_score0} : !torch.vtensor<[1,2,?,8],f32>, !torch.vtensor<[1,2,?,8],f32>, !torch.vtensor<[1,2,?,8],f32>, !torch.float, !torch.bool, !torch.bool -> !torch.vtensor<[1,2,?,8],f32>, !torch.vtensor<[1,2,?],f32>, !torch.vtensor<[1,2,?],f32>
    %float6.931470e-01 = torch.constant.float 0.69314718055994529
    %3 = torch.aten.mul.Scalar %logsumexp, %float6.931470e-01 : !torch.vtensor<[1,2,?],f32>, !torch.float -> !torch.vtensor<[1,2,?],f32>
    %int2_1 = torch.constant.int 2
    %int2_2 = torch.constant.int 2
    %4 = torch.prim.ListConstruct %int2_1, %int2_2 : (!torch.int, !torch.int) -> !torch.list<int>
    return %output, %3 : !torch.vtensor<[1,2,?,8],f32>, !torch.vtensor<[1,2,?],f32>
  }
}
"""


def test_torch_mlirs_text_becomes_what_has_a_part_in_the_results():
    module = run_passes(TEXT, "simplify-torch")
    filecheck(
        module,
        """
// CHECK: func.func private @sdpa_score0
// CHECK-NOT: @unused
// CHECK: func.func @main
// CHECK-NEXT: %s0 = torch.symbolic_int "s0" {min_val = 2, max_val = 64} : !torch.int
// CHECK-NEXT: torch.bind_symbolic_shape %arg0, [%s0], affine_map<()[s0] -> (1, 2, s0, 8)>
// CHECK-NEXT: [[SCALE:%.*]] = torch.constant.float 0.25
// CHECK-NEXT: [[OUT:%.*]], [[LSE:%.*]] = "torch.attnc_flex_attention"(%arg0, %arg0, %arg0, [[SCALE]])
// CHECK-SAME: score_mod_fn = @sdpa_score0, return_lse
// CHECK-NEXT: [[LOG2E:%.*]] = torch.constant.float 1.44269
// CHECK-NEXT: [[LOG2:%.*]] = torch.aten.mul.Scalar [[LSE]], [[LOG2E]]
// CHECK-NEXT: [[LN2:%.*]] = torch.constant.float 0.69314
// CHECK-NEXT: [[NATURAL:%.*]] = torch.aten.mul.Scalar [[LOG2]], [[LN2]]
// CHECK-NEXT: func.return [[OUT]], [[NATURAL]]
""",
    )


def test_numbers_are_written_once():
    text = """
func.func @main(%x: !torch.vtensor<[?,4],f32>) -> !torch.vtensor<[?,2,2],f32> {
  %a = torch.constant.int 0
  %b = torch.constant.int 0
  %two = torch.constant.int 2
  %again = torch.constant.int 2
  %n = torch.aten.size.int %x, %a : !torch.vtensor<[?,4],f32>, !torch.int -> !torch.int
  %m = torch.aten.size.int %x, %b : !torch.vtensor<[?,4],f32>, !torch.int -> !torch.int
  %sizes = torch.prim.ListConstruct %n, %two, %again : (!torch.int, !torch.int, !torch.int) -> !torch.list<int>
  %others = torch.prim.ListConstruct %m, %again, %two : (!torch.int, !torch.int, !torch.int) -> !torch.list<int>
  %y = torch.aten.view %x, %sizes : !torch.vtensor<[?,4],f32>, !torch.list<int> -> !torch.vtensor<[?,2,2],f32>
  %z = torch.aten.view %x, %others : !torch.vtensor<[?,4],f32>, !torch.list<int> -> !torch.vtensor<[?,2,2],f32>
  %one = torch.constant.int 1
  %sum = torch.aten.add.Tensor %y, %z, %one : !torch.vtensor<[?,2,2],f32>, !torch.vtensor<[?,2,2],f32>, !torch.int -> !torch.vtensor<[?,2,2],f32>
  return %sum : !torch.vtensor<[?,2,2],f32>
}
"""
    names = [op.name for op in run_passes(text, "simplify-torch").walk()]
    assert names.count("torch.constant.int") == 3 and names.count("torch.aten.size.int") == 1
    assert names.count("torch.prim.ListConstruct") == 1 and names.count("torch.aten.view") == 2
