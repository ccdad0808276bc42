"""convert-torch-to-linalg-ext: what it writes, before and after."""

# ruff: noqa: E501
from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import pytest
import torch

from attention_text import parse
from attnc.capture.capture import capture
from attnc.capture.to_torch import to_torch
from attnc.errors import UnsupportedOpError
from attnc.runtime.signature import Signature
from attnc.target import Target
from attnc.transforms import convert_torch_to_linalg_ext
from filechecks import filecheck

TARGET = Target("x86_64-unknown-linux-gnu", "", "", 512, 32)
FIXED = "%b: !torch.vtensor<[],si32>, %h: !torch.vtensor<[],si32>, %q: !torch.vtensor<[],si32>, %kv: !torch.vtensor<[],si32>"


def after(score_mod=None, mask_mod=None, dtype: str = "f32", **options) -> str:
    record = capture(score_mod, mask_mod, score_dtype=torch.float64 if dtype == "f64" else torch.float32).record
    module = to_torch(record, Signature(dtype, 64, 32, **options))
    convert_torch_to_linalg_ext.run(module, TARGET)
    module.verify()
    return str(module)


def after_text(body: str, arguments: str = "", result: str = "%0", type_: str = "!torch.vtensor<[],f32>") -> str:
    """The region of a score mod given as text; `arguments` are captures and numbers, `%name: type`."""
    names = ", ".join(part.split(":")[0].strip() for part in arguments.split(", %") if part)
    names = ", ".join(f"%{name.strip().lstrip('%')}" for name in names.split(", ") if name)
    types = [part.partition(":")[2].strip() for part in arguments.replace(", %", "\0%").split("\0") if part]
    query = "!torch.vtensor<[?,?,?,64],f32>"
    comma = ", " if arguments else ""
    module = parse(f"""
func.func private @score_mod(%score: !torch.vtensor<[],f32>, {FIXED}{comma}{arguments}) -> {type_} {{
  {body}
  func.return {result} : {type_}
}}
func.func @attention(%query: {query}, %key: {query}, %value: {query}, %scale: !torch.float{comma}{arguments}) -> {query} {{
  %out = "torch.attnc_flex_attention"(%query, %key, %value, %scale{comma}{names}) {{score_mod_fn = @score_mod,
    operandSegmentSizes = array<i32: 1, 1, 1, 1, {len(types)}, 0, 0>}} : ({", ".join([query] * 3 + ["!torch.float", *types])}) -> {query}
  func.return %out : {query}
}}""")
    convert_torch_to_linalg_ext.run(module, TARGET)
    module.verify()
    return str(module)


def test_alibi_causal():
    slopes = torch.rand(8)
    text = after(lambda score, b, h, q, kv: score + slopes[h] * (kv - q), lambda b, h, q, kv: q >= kv)
    filecheck(
        text,
        """
// CHECK: builtin.module attributes {attnc.stage = "torch"} {
// CHECK-NOT: @score_mod
// CHECK: func.func @attention(%query: tensor<?x?x?x64xf32>, %key: tensor<?x?x?x64xf32>, %value: tensor<?x?x?x32xf32>, %scale: f32, %slopes: tensor<?xf32>) -> tensor<?x?x?x32xf32> attributes {attnc.roles = ["query", "key", "value", "scale", "capture"], attnc.strides = ["?x?x?x1", "?x?x?x1", "?x?x?x1", "", "1"], attnc.names = ["query", "key", "value", "scale", "slopes"]} {
// CHECK: %group = arith.divui %heads, %kv_heads : index
// CHECK-NEXT: %query_5d = tensor.expand_shape %query {{.*}} output_shape [%batch, %kv_heads, %group, %queries, 64]
// CHECK-NEXT: %init = tensor.empty(%batch, %kv_heads, %group, %queries) : tensor<?x?x?x?x32xf32>
// CHECK-NEXT: %out_5d = "iree_linalg_ext.attention"(%query_5d, %key, %value, %scale, %init)
// CHECK-NEXT: ^bb0(%score: f32):
// CHECK-NEXT: %minus_infinity = arith.constant 0xff800000 : f32
// CHECK-NEXT: %hkv = "iree_linalg_ext.index"() <{dim = 1 : i64}> : () -> index
// CHECK-NEXT: %{{[0-9]+}} = arith.muli %hkv, %group : index
// CHECK-NEXT: %g = "iree_linalg_ext.index"() <{dim = 2 : i64}> : () -> index
// CHECK-NEXT: %h = arith.addi %{{[0-9]+}}, %g : index
// CHECK-NEXT: %q = "iree_linalg_ext.index"() <{dim = 3 : i64}> : () -> index
// CHECK-NEXT: %q_i32 = arith.index_cast %q : index to i32
// CHECK-NEXT: %k = "iree_linalg_ext.index"() <{dim = 4 : i64}> : () -> index
// CHECK-NEXT: %k_i32 = arith.index_cast %k : index to i32
// CHECK-NEXT: %slopes_value = tensor.extract %slopes[%h] {attnc.checked = "kept", attnc.name = "slopes"} : tensor<?xf32>
// CHECK-NEXT: %[[d:[0-9]+]] = arith.subi %k_i32, %q_i32 : i32
// CHECK-NEXT: %[[f:[0-9]+]] = arith.sitofp %[[d]] : i32 to f32
// CHECK-NEXT: %[[bias:[0-9]+]] = arith.mulf %slopes_value, %[[f]] : f32
// CHECK-NEXT: %modified = arith.addf %score, %[[bias]] : f32
// CHECK-NEXT: %mask = arith.cmpi sge, %q_i32, %k_i32 : i32
// CHECK-NEXT: %masked = arith.select %mask, %modified, %minus_infinity : f32
// CHECK-NEXT: "iree_linalg_ext.yield"(%masked) : (f32) -> ()
// CHECK: %out = tensor.collapse_shape %out_5d
// CHECK-NEXT: func.return %out : tensor<?x?x?x32xf32>
""",
    )


def test_identity():
    filecheck(
        after(),
        """
// CHECK: ^bb0(%score: f32):
// CHECK-NEXT: "iree_linalg_ext.yield"(%score) : (f32) -> ()
""",
    )


def test_lse_and_max_need_online_attention():
    filecheck(
        after(dtype="bf16", return_lse=True, return_max=True),
        """
// CHECK: -> (tensor<?x?x?x32xbf16>, tensor<?x?x?xf32>, tensor<?x?x?xf32>)
// CHECK: %acc_init = linalg.fill ins(%zero : f32)
// CHECK: %max_init = linalg.fill ins(%minus_infinity : f32)
// CHECK: %sum_init = linalg.fill ins(%zero : f32)
// CHECK: %acc, %max, %sum = "iree_linalg_ext.online_attention"(%query_5d, %key, %value, %scale, %acc_init, %max_init, %sum_init)
// CHECK: %out_5d = linalg.generic {{.*}} ins(%acc, %sum : tensor<?x?x?x?x32xf32>, tensor<?x?x?x?xf32>)
// CHECK: arith.cmpf oeq
// CHECK-NEXT: arith.divf
// CHECK-NEXT: arith.select
// CHECK-NEXT: arith.truncf %{{[0-9]+}} : f32 to bf16
// CHECK: %lse_5d = linalg.generic {{.*}} ins(%max, %sum
// CHECK: math.log
// CHECK-NEXT: arith.addf
// CHECK: func.return %out, %lse, %max_{{[0-9]}}
""",
    )


def test_f64_scores():
    filecheck(
        after(lambda score, b, h, q, kv: score * 0.1, dtype="f64", return_max=True),
        """
// CHECK: %scale: f64
// CHECK: ^bb0(%score: f64):
// CHECK-NEXT: %cst = arith.constant 1.000000e-01 : f64
// CHECK-NEXT: arith.mulf %score, %cst : f64
""",
    )


def test_block_mask():
    """Full blocks skip the mask, partial ones apply it; its gathers are checked where a block is listed as partial."""
    documents = torch.zeros(10, dtype=torch.int64)
    filecheck(
        after(None, lambda b, h, q, kv: documents[q] == documents[kv], block_size=(64, 128)),
        """
// CHECK: %blocks: tensor<?x?x?x?xi8>
// CHECK: tensor.extract %documents[%q] {attnc.checked = "listed", attnc.name = "documents"}
// CHECK: arith.divui %q, %c64 : index
// CHECK: arith.divui %k, %c128 : index
// CHECK: %class = tensor.extract %blocks[%b, %h, %{{[0-9]+}}, %{{[0-9]+}}] : tensor<?x?x?x?xi8>
// CHECK-NEXT: %full = arith.cmpi eq, %class, %c2_i8 : i8
// CHECK-NEXT: %partial = arith.cmpi eq, %class, %c1_i8 : i8
// CHECK-NEXT: %[[partly:[0-9]+]] = arith.andi %partial
// CHECK-NEXT: %mask = arith.ori %full, %[[partly]] : i1
// CHECK-NEXT: arith.select %mask, %score, %minus_infinity : f32
""",
    )


def test_block_list_without_a_mask():
    filecheck(
        after(block_size=(128, 128)),
        """
// CHECK: %class = tensor.extract %blocks
// CHECK-NEXT: %mask = arith.cmpi ne, %class, %c0_i8 : i8
""",
    )


def test_a_gather_of_both_mods_is_checked_on_all_pairs():
    lengths = torch.zeros(3)
    text = after(lambda score, b, h, q, kv: score + lengths[b], lambda b, h, q, kv: kv < lengths[b])
    assert text.count("tensor.extract") == 1
    assert 'attnc.checked = "all"' in text


def test_numbers_are_arguments():
    window, factor = 37, 0.5
    filecheck(
        after(lambda score, b, h, q, kv: score * factor, lambda b, h, q, kv: q - kv <= window),
        """
// CHECK: %factor: f64, %window: i64
// CHECK: arith.truncf %factor : f64 to f32
// CHECK: arith.trunci %window : i64 to i32
""",
    )


def test_half_types_round_after_every_operation():
    scales = torch.ones(9, dtype=torch.bfloat16)
    filecheck(
        after(lambda score, b, h, q, kv: score + (q - kv) * scales[h] * 2),
        """
// CHECK: %[[i:[0-9]+]] = arith.sitofp %{{[0-9]+}} : i32 to f32
// CHECK-NEXT: %[[r:[0-9]+]] = arith.truncf %[[i]] : f32 to bf16
// CHECK: arith.extf %[[r]] : bf16 to f32
// CHECK: arith.mulf
// CHECK-NEXT: arith.truncf
// CHECK: arith.mulf
// CHECK-NEXT: arith.truncf
// CHECK-NEXT: arith.extf
// CHECK-NEXT: %modified = arith.addf %score
""",
    )


def test_reduced_row():
    left, right = torch.rand(20, 16), torch.rand(20, 16)
    filecheck(
        after(lambda score, b, h, q, kv: score + torch.dot(left[q], right[kv])),
        """
// CHECK: %left: tensor<?x16xf32>, %right: tensor<?x16xf32>
// CHECK: %[[dot:[0-9]+]] = scf.for %i = %c0_1 to %c16 step %c1_1 iter_args(%[[sum:[0-9]+]] = %zero) -> (f32) {
// CHECK-NEXT: %left_value = tensor.extract %left[%q, %i]
// CHECK-NEXT: %right_value = tensor.extract %right[%k, %i]
// CHECK-NEXT: %[[p:[0-9]+]] = arith.mulf %left_value, %right_value : f32
// CHECK-NEXT: %[[n:[0-9]+]] = arith.addf %[[sum]], %[[p]] : f32
// CHECK-NEXT: scf.yield %[[n]] : f32
""",
    )


def test_floor_division_and_remainder():
    filecheck(
        after(None, lambda b, h, q, kv: (q // 7 == kv // 7) & (q % 3 == 0)),
        """
// CHECK: arith.floordivsi %q_i32, %c7_i32 : i32
// CHECK: %[[d:[0-9]+]] = arith.floordivsi %q_i32, %c3_i32 : i32
// CHECK-NEXT: %[[m:[0-9]+]] = arith.muli %[[d]], %c3_i32 : i32
// CHECK-NEXT: arith.subi %q_i32, %[[m]] : i32
""",
    )


def test_what_nothing_uses_is_gone():
    table = torch.rand(4)

    def score_mod(score, b, h, q, kv):
        unused = table[b] * 2  # noqa: F841
        return score + (h - h) * 0

    text = after(score_mod)
    assert "tensor.extract" not in text
    assert "dim = 0 : i64" not in text


def test_repeated_expressions_are_built_once():
    text = after(lambda score, b, h, q, kv: torch.where(q - kv > 3, score + (q - kv), score - (q - kv)))
    assert text.count("arith.subi") == 1
    assert text.count("arith.sitofp") == 1


def test_numbers_computed_in_text():
    filecheck(
        after_text(
            """%two = torch.constant.int 2
  %w = torch.aten.mul.int %window, %two : !torch.int, !torch.int -> !torch.int
  %r = torch.aten.div.int %w, %window : !torch.int, !torch.int -> !torch.float
  %0 = torch.aten.mul.Scalar %score, %r : !torch.vtensor<[],f32>, !torch.float -> !torch.vtensor<[],f32>""",
            "%window: !torch.int",
        ),
        """
// CHECK: %[[w:[0-9]+]] = arith.muli %window, %c2_i64 : i64
// CHECK: arith.divf %{{[0-9]+}}, %{{[0-9]+}} : f64
""",
    )


def test_unsupported_operations_are_named_with_the_users_line():
    name = __file__
    body = f"""%n = torch.constant.none
  %0 = torch.aten.lgamma %score {{attnc.loc = "{name}:1"}} : !torch.vtensor<[],f32> -> !torch.vtensor<[],f32>"""
    with pytest.raises(UnsupportedOpError, match=r"aten\.lgamma") as caught:
        after_text(body)
    assert caught.value.filename == name and caught.value.line == 1
    assert "what it writes, before and after" in str(caught.value)


def test_index_by_a_mask_is_refused():
    body = """%m = torch.aten.gt.Scalar %q, %n : !torch.vtensor<[],si32>, !torch.int -> !torch.vtensor<[],i1>
  %l = torch.prim.ListConstruct %m : (!torch.vtensor<[],i1>) -> !torch.list<vtensor>
  %0 = torch.aten.index.Tensor %t, %l : !torch.vtensor<[?],f32>, !torch.list<vtensor> -> !torch.vtensor<[],f32>"""
    with pytest.raises(UnsupportedOpError, match=r"torch\.where"):
        after_text(body, "%t: !torch.vtensor<[?],f32>, %n: !torch.int")


def test_pass_is_quick():
    slopes = torch.rand(8)
    record = capture(lambda score, b, h, q, kv: score + slopes[h] * (kv - q), lambda b, h, q, kv: q >= kv).record
    times = []
    for _ in range(5):
        module = to_torch(record, Signature("f32", 64, 64))
        start = time.perf_counter()
        convert_torch_to_linalg_ext.run(module, TARGET)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.015


def test_documentation_is_the_table():
    path = Path(__file__).parent.parent / "tools" / "write_operations.py"
    spec = importlib.util.spec_from_file_location("write_operations", path)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.PATH.read_text() == tool.text(), "run tools/write_operations.py"
