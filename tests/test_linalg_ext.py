# ruff: noqa: E501 - IR is long
"""`iree_linalg_ext`: dimension roles, what the verifiers refuse, the texts that are read, and IREE as a witness."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from xdsl.dialects.builtin import ModuleOp
from xdsl.utils.exceptions import VerifyException

from attention_text import ALIBI_CAUSAL, attention_text, parse
from attnc.analysis.roles import Roles, map_dims, map_results, roles_of
from attnc.dialects.linalg_ext import AttentionOp, OnlineAttentionOp
from needs import needs_tool, tool

MAPS = "affine_map<(b, m, k, e, n) -> (b, m, e)>, affine_map<(b, m, k, e, n) -> (b, k, e)>, affine_map<(b, m, k, e, n) -> (b, k, n)>, affine_map<(b, m, k, e, n) -> ()>"
OUT = "affine_map<(b, m, k, e, n) -> (b, m, n)>"
ROW = "affine_map<(b, m, k, e, n) -> (b, m)>"
MASK = "affine_map<(b, m, k, e, n) -> (m, k)>"
TYPES = "tensor<2x?x8xf32>, tensor<2x?x8xf32>, tensor<2x?x4xf32>, f32"
REGION = '^bb0(%s: f32):\n %i = "iree_linalg_ext.index"() <{dim = 1 : i64}> : () -> index\n "iree_linalg_ext.yield"(%s) : (f32) -> ()'


def function(body: str, mask: str = "tensor<?x?xi8>", element: str = "f32") -> str:
    return f"""builtin.module {{
  func.func @f(%q: tensor<2x?x8xf32>, %k: tensor<2x?x8xf32>, %v: tensor<2x?x4xf32>, %scale: f32, %mask: {mask}, %o: tensor<2x?x4x{element}>, %m: tensor<2x?xf32>, %l: tensor<2x?xf32>) -> tensor<2x?x4x{element}> {{
    {body}
    func.return %r : tensor<2x?x4x{element}>
  }}
}}"""


def attention(
    maps: str = f"{MAPS}, {OUT}",
    operands: str = "%q, %k, %v, %scale, %o",
    types: str = f"{TYPES}, tensor<2x?x4xf32>",
    region: str = REGION,
) -> str:
    return f'%r = "iree_linalg_ext.attention"({operands}) <{{indexing_maps = [{maps}]}}> ({{\n{region}\n}}) : ({types}) -> tensor<2x?x4xf32>'


ONLINE = f"""%r, %m1, %l1 = "iree_linalg_ext.online_attention"(%q, %k, %v, %scale, %o, %m, %l) <{{indexing_maps = [{MAPS}, {OUT}, {ROW}, {ROW}]}}> ({{
{REGION}
}}) : ({TYPES}, tensor<2x?x4xf32>, tensor<2x?xf32>, tensor<2x?xf32>) -> (tensor<2x?x4xf32>, tensor<2x?xf32>, tensor<2x?xf32>)"""
MASKED = attention(f"{MAPS}, {MASK}, {OUT}", "%q, %k, %v, %scale, %mask, %o", f"{TYPES}, tensor<?x?xi8>, tensor<2x?x4xf32>")
MASKED_ONLINE = (
    ONLINE.replace("%scale, %o", "%scale, %mask, %o")
    .replace(OUT, f"{MASK}, {OUT}")
    .replace("f32, tensor<2x?x4xf32>", "f32, tensor<?x?xi8>, tensor<2x?x4xf32>", 1)
)


def first(module: ModuleOp) -> AttentionOp | OnlineAttentionOp:
    return next(op for op in module.walk() if isinstance(op, AttentionOp | OnlineAttentionOp))


def test_roles():
    """One kv head serves several query heads; the maps say so."""
    op = first(parse(attention_text(ALIBI_CAUSAL, [("slopes", "tensor<?xf32>", "capture")])))
    assert op.roles == Roles(batch=(0, 1), m=(2, 3), k1=(5,), k2=(4,), n=(6,))
    assert op.roles.score == (0, 1, 2, 3, 4)
    assert op.roles.row == (0, 1, 2, 3)


def test_roles_of_any_number_of_dims():
    # query (b, m1, m2, e1, e2), key (k1, e2, k2, e1), value (b, k2, k1, n1, n2), out (b, m1, n1, m2, n2)
    assert roles_of((0, 1, 2, 3, 4), (5, 4, 6, 3), (0, 6, 5, 7, 8), (0, 1, 7, 2, 8)) == Roles(
        (0,), (1, 2), (3, 4), (5, 6), (7, 8)
    )


def test_maps_are_projected_permutations():
    op = first(parse(function(attention())))
    assert map_dims(op.maps[1]) == (0, 2, 3)
    unit = first(parse(function(ONLINE))).maps[-1]
    assert map_results(unit) == (0, 1)


@pytest.mark.parametrize(("body", "mask"), [(attention(), False), (ONLINE, False), (MASKED, True), (MASKED_ONLINE, True)])
def test_the_number_of_operands_says_whether_there_is_a_mask(body, mask):
    module = parse(function(body))
    assert (first(module).mask is not None) == mask
    assert str(parse(str(module))) == str(module)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (attention(f"{MAPS}"), "5 operands, but 4 indexing maps"),
        (attention(f"{MAPS}, affine_map<(b, m, k, e, n) -> (b, m floordiv 2, n)>"), "not a projected permutation"),
        (attention(f"{MAPS}, affine_map<(b, m, k, e, n) -> (b, m, m)>"), "not a projected permutation"),
        (attention(f"{MAPS}, affine_map<(b, m, k, e) -> (b, m, e)>"), "one iteration domain"),
        (attention(f"{MAPS}, affine_map<(b, m, k, e, n) -> (b, m)>"), "rank 3, its indexing map 2"),
        (attention(f"{MAPS}, affine_map<(b, m, k, e, n) -> (b, m, e)>"), "is 8 in one place and 4 in operand 4"),
        (attention(f"{MAPS}, affine_map<(b, m, k, e, n) -> (b, k, n)>"), "must share the keys"),
        (attention(region='^bb0(%s: f32, %t: f32):\n "iree_linalg_ext.yield"(%s) : (f32) -> ()'), "takes one argument"),
        (attention(region='^bb0(%s: i32):\n "iree_linalg_ext.yield"(%s) : (i32) -> ()'), "takes one argument"),
        (attention(region='^bb0(%s: f32):\n "iree_linalg_ext.yield"(%mask) : (tensor<?x?xi8>) -> ()'), "must yield one f32"),
        (attention(region=REGION.replace("dim = 1", "dim = 5")), "no dimension 5"),
        (ONLINE.replace(f"{ROW}, {ROW}", f"{ROW}, affine_map<(b, m, k, e, n) -> (b, k)>"), "max and sum must be over"),
        (MASKED.replace(MASK, "affine_map<(b, m, k, e, n) -> (m, e)>"), "mask may only be over"),
        ('%r = tensor.cast %o : tensor<2x?x4xf32> to tensor<2x?x4xf32>\n%i = "iree_linalg_ext.index"() <{dim = 0 : i64}> : () -> index', "no attention's region"),
    ],
)  # fmt: skip
def test_verifiers_refuse(body, message):
    with pytest.raises(VerifyException, match=message):
        parse(function(body))


@pytest.mark.parametrize("maps", ["<{{indexing_maps = [{}]}}>", "<indexing_maps = [{}]>", "{{indexing_maps = [{}]}}"])
def test_custom_forms_are_read(maps):
    custom = f"""%r = iree_linalg_ext.attention {maps.format(f"{MAPS}, {OUT}")} ins(%q, %k, %v, %scale : {TYPES}) outs(%o : tensor<2x?x4xf32>) {{
    ^bb0(%s: f32):
      %i = iree_linalg_ext.index 1 : index
      iree_linalg_ext.yield %s : f32
    }} -> tensor<2x?x4xf32>"""
    online = custom.replace("%r =", "%x:3 =").replace("iree_linalg_ext.attention", "iree_linalg_ext.online_attention")
    online = online.replace(OUT, f"{OUT}, {ROW}, {ROW}").replace(
        "outs(%o : tensor<2x?x4xf32>)", "outs(%o, %m, %l : tensor<2x?x4xf32>, tensor<2x?xf32>, tensor<2x?xf32>)"
    )
    online = online.replace("-> tensor<2x?x4xf32>", "-> tensor<2x?x4xf32>, tensor<2x?xf32>, tensor<2x?xf32>\n")
    assert str(parse(function(custom))) == str(parse(function(attention())))
    module = parse(function(f"{online}\n%r = tensor.cast %x#0 : tensor<2x?x4xf32> to tensor<2x?x4xf32>"))
    assert isinstance(first(module), OnlineAttentionOp)


@needs_tool("iree-opt")
@pytest.mark.parametrize("body", [attention(), ONLINE, MASKED, MASKED_ONLINE])
def test_iree_reads_what_we_print(body, tmp_path: Path):
    """And we read what IREE prints, in both of its forms."""
    program = tool("iree-opt")
    assert program is not None
    ours = str(parse(function(body)))
    for options in ([], ["--mlir-print-op-generic"]):
        result = subprocess.run([program, "-", *options], input=ours, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert first(parse(result.stdout)).name == first(parse(ours)).name
