"""The torch dialect: its text, both forms, and what it refuses."""

# ruff: noqa: E501
from __future__ import annotations

import io

import pytest
from xdsl.parser import Parser
from xdsl.printer import Printer
from xdsl.utils.exceptions import ParseError, VerifyException

from attnc.dialects.context import build_context
from attnc.dialects.torch import AtenOp, ConstantFloatOp, FlexAttentionOp, ListType, OptionalType, VTensorType, aten_op, si32
from filechecks import filecheck

MODS = """
func.func private @mod(%score: !torch.vtensor<[],f32>, %q: !torch.vtensor<[],si32>, %bias: !torch.vtensor<[?,7],bf16>, %n: !torch.int) -> !torch.vtensor<[],f32> {
  %one = torch.constant.int 1
  %minus = torch.constant.int -3
  %half = torch.constant.float 0.5
  %tiny = torch.constant.float 1.0e-300
  %infinity = torch.constant.float 0x7FF0000000000000
  %true = torch.constant.bool true
  %none = torch.constant.none
  %mode = torch.constant.str "floor"
  %table = torch.vtensor.literal(dense<[1, 2]> : tensor<2xsi64>) : !torch.vtensor<[2],si64>
  %dims = torch.prim.ListConstruct %one, %minus : (!torch.int, !torch.int) -> !torch.list<int>
  %empty = torch.prim.ListConstruct : () -> !torch.list<int>
  %indices = torch.prim.ListConstruct %q, %none : (!torch.vtensor<[],si32>, !torch.none) -> !torch.list<optional<vtensor>>
  %row = torch.aten.index.Tensor %bias, %indices {attnc.loc = "user.py:12"} : !torch.vtensor<[?,7],bf16>, !torch.list<optional<vtensor>> -> !torch.vtensor<[7],bf16>
  %best, %where = torch.aten.max.dim %row, %minus, %true : !torch.vtensor<[7],bf16>, !torch.int, !torch.bool -> !torch.vtensor<[1],bf16>, !torch.vtensor<[1],si64>
  %sum = torch.aten.add.Tensor %score, %half, %one : !torch.vtensor<[],f32>, !torch.float, !torch.int -> !torch.vtensor<[],f32>
  func.return %sum : !torch.vtensor<[],f32>
}
"""


def parse(text: str):
    module = Parser(build_context(), text).parse_module()
    module.verify()
    return module


def generic(module) -> str:
    text = io.StringIO()
    Printer(text, print_generic_format=True).print_op(module)
    return text.getvalue()


def test_text_reads_back():
    module = parse(MODS)
    text = str(module)
    assert str(parse(text)) == text
    assert str(parse(generic(module))) == text
    filecheck(
        text,
        """
// CHECK: torch.constant.float 1.0e-300
// CHECK-NEXT: torch.constant.float 0x7FF0000000000000
// CHECK-NEXT: torch.constant.bool true
// CHECK-NEXT: torch.constant.none
// CHECK-NEXT: torch.constant.str "floor"
// CHECK-NEXT: torch.vtensor.literal(dense<[1, 2]> : tensor<2xsi64>) : !torch.vtensor<[2],si64>
// CHECK-NEXT: torch.prim.ListConstruct %one, %minus : (!torch.int, !torch.int) -> !torch.list<int>
// CHECK-NEXT: torch.prim.ListConstruct : () -> !torch.list<int>
// CHECK: torch.aten.index.Tensor %bias, %indices {attnc.loc = "user.py:12"} : !torch.vtensor<[?,7],bf16>, {{.*}} -> !torch.vtensor<[7],bf16>
// CHECK-NEXT: %best, %where = torch.aten.max.dim {{.*}} -> !torch.vtensor<[1],bf16>, !torch.vtensor<[1],si64>
""",
    )


def test_every_float_constant_reads_back():
    for value in (0.1, -0.0, 1e300, 5e-324, 1e16, 123456789.0, -2.5e-7, float("inf"), float("-inf"), float("nan")):
        op = ConstantFloatOp(value)
        (again,) = parse(f"%0 = {str(op).split(' = ')[1]}").ops
        assert str(again) == str(op)


def test_types_inside_of_lists():
    nested = ListType(OptionalType(VTensorType([2, -1], si32)))
    assert str(nested) == "!torch.list<optional<vtensor<[2,?],si32>>>"
    assert Parser(build_context(), str(nested)).parse_type() == nested


def test_any_aten_name_is_an_operation():
    first, second = aten_op("some_new.overload"), aten_op("some_new.overload")
    assert first is second and issubclass(first, AtenOp)
    (op,) = parse('%0 = "torch.aten.never_heard_of"() : () -> !torch.int').ops
    assert isinstance(op, AtenOp)
    (op,) = parse('%0 = "torch.prims.never_heard_of"() : () -> !torch.int').ops
    assert isinstance(op, AtenOp)
    with pytest.raises(ParseError, match="not registered"):
        parse('%0 = "flame.operator"() : () -> !torch.int')


ATTENTION = """
func.func @attention(%q: !torch.vtensor<[?,?,?,64],f16>, %s: !torch.float, %c: !torch.vtensor<[?,?,?,?],si8>) {{
  {results} = "torch.attnc_flex_attention"(%q, %q, %q, %s{operands}) {{{attributes}, operandSegmentSizes = array<i32: 1, 1, 1, 1, {segments}>}} : (!torch.vtensor<[?,?,?,64],f16>, !torch.vtensor<[?,?,?,64],f16>, !torch.vtensor<[?,?,?,64],f16>, !torch.float{types}) -> ({result_types})
  func.return
}}
"""
OUT = "!torch.vtensor<[?,?,?,64],f16>"
STATISTIC = "!torch.vtensor<[?,?,?],f32>"


def attention(
    attributes: str,
    results: str = "%o",
    result_types: str = OUT,
    segments: str = "0, 0, 0",
    operands: str = "",
    types: str = "",
) -> str:
    return ATTENTION.format(
        attributes=attributes, results=results, result_types=result_types, segments=segments, operands=operands, types=types
    )


def test_attention():
    text = attention("return_lse, return_max", "%o, %l, %m", f"{OUT}, {STATISTIC}, {STATISTIC}")
    (op,) = (op for op in parse(text).walk() if isinstance(op, FlexAttentionOp))
    built = FlexAttentionOp(op.query, op.key, op.value, op.scale, return_lse=True, return_max=True)
    built.verify()
    assert [str(output.type) for output in built.outputs] == [OUT, STATISTIC, STATISTIC]


@pytest.mark.parametrize(
    "text,words",
    [
        (attention("return_lse"), "expected 2 results"),
        (attention("block_size = array<i64: 128, 128>"), "come together"),
        (attention("block_size = array<i64: 128, 0>", segments="0, 0, 1", operands=", %c", types=", !torch.vtensor<[?,?,?,?],si8>"), "positive"),
        (attention("return_lse", segments="1, 0, 0", operands=", %c", types=", !torch.vtensor<[?,?,?,?],si8>", results="%o, %l",
                   result_types=f"{OUT}, {STATISTIC}"), "score operands without"),
    ],
)  # fmt: skip
def test_attention_refuses(text: str, words: str):
    with pytest.raises(VerifyException, match=words):
        parse(text)
