# ruff: noqa: E501 - IR is long
"""`convert-attention-to-online-attention`: IR before → after, and IREE reads it."""

from __future__ import annotations

import subprocess

import pytest

from attention_text import ALIBI_CAUSAL, attention_text
from filechecks import filecheck
from needs import needs_tool, tool
from passes import run_passes

NAME = "convert-attention-to-online-attention"
ALIBI = attention_text(ALIBI_CAUSAL, [("slopes", "tensor<?xf32>", "capture")], head_dim=64)


def test_alibi_causal():
    filecheck(
        run_passes(ALIBI, NAME),
        """
        // CHECK:      func.func @attention(%query: tensor<?x?x?x64xf32>, {{.*}}, %slopes: tensor<?xf32>)
        // CHECK:      [[ACC:%.*]] = linalg.fill ins(%{{zero.*}} : f32) {{.*}} -> tensor<?x?x?x?x64xf32>
        // CHECK:      [[MAX:%.*]] = linalg.fill ins(%{{minus_infinity.*}} : f32) {{.*}} -> tensor<?x?x?x?xf32>
        // CHECK:      [[SUM:%.*]] = linalg.fill ins(%{{zero.*}} : f32) {{.*}} -> tensor<?x?x?x?xf32>
        // CHECK-NEXT: %acc, %max, %sum = "iree_linalg_ext.online_attention"(%q5, %key, %value, %scale, [[ACC]], [[MAX]], [[SUM]])
        // CHECK-SAME: (d0, d1, d2, d3, d6)>, affine_map<{{.*}} -> (d0, d1, d2, d3)>, affine_map<{{.*}} -> (d0, d1, d2, d3)>]
        // CHECK:        %slope = tensor.extract %slopes[%h] {attnc.checked = "kept"
        // CHECK:        "iree_linalg_ext.yield"(%x) : (f32) -> ()
        // CHECK:      %result = linalg.generic {{.*}} ins(%acc, %sum : {{.*}}) outs(%init : tensor<?x?x?x?x64xf32>)
        // CHECK:        [[NONE:%.*]] = arith.cmpf oeq, [[L:%.*]], %zero
        // CHECK-NEXT:   [[QUOTIENT:%.*]] = arith.divf [[A:%.*]], [[L]] : f32
        // CHECK-NEXT:   [[RESULT:%.*]] = arith.select [[NONE]], %zero{{.*}}, [[QUOTIENT]] : f32
        // CHECK-NEXT:   linalg.yield [[RESULT]] : f32
        // CHECK-NOT:  iree_linalg_ext.attention
        """,
    )


def test_halves_accumulate_in_f32():
    filecheck(
        run_passes(attention_text("", element="bf16"), NAME),
        """
        // CHECK:      online_attention{{.*}}
        // CHECK:      }) : (tensor<?x?x?x?x8xbf16>, {{.*}}, f32, tensor<?x?x?x?x8xf32>, tensor<?x?x?x?xf32>, tensor<?x?x?x?xf32>)
        // CHECK:      arith.truncf %normalised : f32 to bf16
        // CHECK:      -> tensor<?x?x?x?x8xbf16>
        """,
    )


def test_online_attention_is_left_alone():
    text = attention_text("", outputs=("out", "lse"))
    assert str(run_passes(text, NAME)) == str(run_passes(text))


@pytest.mark.parametrize(
    ("element", "lines"),
    [
        ("i8", ["%mask_1 = tensor.extract", "%kept = arith.cmpi ne", "%masked = arith.select %kept, %score"]),
        ("i1", ["%mask_1 = tensor.extract", "%masked = arith.select %mask_1, %score"]),
        ("f32", ["%mask_1 = tensor.extract", "%biased = arith.addf %score, %mask_1"]),
        ("f16", ["%mask_1 = tensor.extract", "arith.extf", "%biased = arith.addf %score"]),
    ],
)
def test_a_mask_operand_becomes_the_end_of_the_region(element: str, lines: list[str]):
    text = attention_text("", [("mask", f"tensor<?x?x{element}>", "capture")])
    domain = "affine_map<(b, hkv, g, q, k, e, n) -> "
    text = text.replace("%scale, %init)", "%scale, %mask, %init)")
    text = text.replace(f"{domain}()>, ", f"{domain}()>, {domain}(q, k)>, ")
    text = text.replace("f32, tensor<?x?x?x?x8xf32>) -> ", f"f32, tensor<?x?x{element}>, tensor<?x?x?x?x8xf32>) -> ")
    filecheck(
        run_passes(text, NAME),
        '// CHECK: online_attention"(%q5, %key, %value, %scale, %acc_init, %max_init, %sum_init)\n'
        + "\n".join(f"// CHECK: {line}" for line in lines),
    )


@needs_tool("iree-opt")
def test_iree_reads_the_result():
    program = tool("iree-opt")
    assert program is not None
    for text in (ALIBI, attention_text("", element="f16", outputs=("out", "lse", "max"))):
        module = str(run_passes(text, NAME))
        result = subprocess.run([program, "-"], input=module, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert "iree_linalg_ext.online_attention" in result.stdout
