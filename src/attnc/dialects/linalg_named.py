"""The `linalg` dialect: xDSL's, and the named operations that text of attention holds besides.

Products (`linalg.batch_matmul`, `linalg.matvec`, …) take two tensors and add to a third, `linalg.map` computes element by
element, `linalg.softmax` normalises along one dimension. Custom and generic forms are read; maps and softmax are printed in
the generic form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self, cast

from xdsl.dialects import linalg as xdsl_linalg
from xdsl.dialects.builtin import AffineMapAttr, AnyFloat, ArrayAttr, IntegerAttr, IntegerType, TensorType, i64
from xdsl.dialects.linalg.abstract_ops import NamedOperation
from xdsl.dialects.linalg.attrs import IteratorTypeAttr
from xdsl.dialects.linalg.ops import YieldOp
from xdsl.ir import Attribute, Block, Dialect, Operation, Region, SSAValue
from xdsl.ir.affine import AffineDimExpr, AffineMap
from xdsl.irdl import (
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    opt_prop_def,
    prop_def,
    region_def,
    result_def,
    traits_def,
    var_operand_def,
    var_result_def,
)
from xdsl.parser import Parser
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

from attnc.dialects.building import Builder

# For each product the dims of its two operands and of its result; those that the result lacks are summed.
PRODUCTS = {
    "matmul": ("ik", "kj", "ij"),
    "batch_matmul": ("bik", "bkj", "bij"),
    "batch_matmul_transpose_a": ("bki", "bkj", "bij"),
    "batch_matmul_transpose_b": ("bik", "bjk", "bij"),
    "matmul_transpose_a": ("ki", "kj", "ij"),
    "matmul_transpose_b": ("ik", "jk", "ij"),
    "batch_matvec": ("bik", "bk", "bi"),
    "batch_vecmat": ("bk", "bkj", "bj"),
    "matvec": ("ik", "k", "i"),
    "vecmat": ("k", "kj", "j"),
    "dot": ("k", "k", ""),
}


class Product(NamedOperation):
    """A named product of two tensors, added to a third. `indexing_maps` may say otherwise what it sums."""

    indexing_maps = opt_prop_def(ArrayAttr[AffineMapAttr])
    PRINT_ATTRS_IN_FRONT: ClassVar[bool] = True

    def get_default_indexing_maps(self) -> Sequence[AffineMap]:
        if self.indexing_maps is not None:
            return tuple(map_.data for map_ in self.indexing_maps)
        dims = PRODUCTS[self.name.removeprefix("linalg.")]
        loops = "".join(dict.fromkeys(dims[2] + dims[0] + dims[1]))
        return tuple(AffineMap(len(loops), 0, tuple(AffineDimExpr(loops.index(dim)) for dim in part)) for part in dims)

    def get_iterator_types(self) -> ArrayAttr[IteratorTypeAttr]:
        *_, out = self.get_default_indexing_maps()
        parallel = {result.position for result in out.results if isinstance(result, AffineDimExpr)}
        kinds = (IteratorTypeAttr.parallel, IteratorTypeAttr.reduction)
        return ArrayAttr([kinds[dim not in parallel]() for dim in range(out.num_dims)])

    @classmethod
    def get_hidden_region(cls, inputs: Sequence[SSAValue], outputs: Sequence[SSAValue]) -> Region:
        block = Block(arg_types=cls.body_arg_types((*inputs, *outputs)))
        block.add_op(YieldOp(accumulated(Builder(block), block.args)))
        return Region(block)


def accumulated(build: Builder, args: Sequence[SSAValue]) -> SSAValue:
    """A product's body: `out + left * right`, the factors brought to the type of `out` first."""
    left, right, out = args
    kind = "i" if isinstance(out.type, IntegerType) else "f"
    product = build.binary(f"mul{kind}", _converted(build, left, out.type), _converted(build, right, out.type))
    return build.binary(f"add{kind}", out, product)


def _converted(build: Builder, value: SSAValue, type_: Attribute) -> SSAValue:
    if value.type == type_:
        return value
    if isinstance(type_, IntegerType):
        return build.cast("extsi", value, type_)
    if isinstance(value.type, IntegerType):
        return build.cast("sitofp", value, type_)
    wider = cast(AnyFloat, type_).bitwidth > cast(AnyFloat, value.type).bitwidth
    return build.cast("extf" if wider else "truncf", value, type_)


def _product(name: str) -> type[Operation]:
    parts = "".join(part.capitalize() for part in name.split("_"))
    return irdl_op_definition(type(f"{parts}Op", (Product,), {"name": f"linalg.{name}", "__doc__": Product.__doc__}))


@irdl_op_definition
class MapOp(IRDLOperation):
    """`linalg.map`: a body for each element of the inputs, which have the shape of the result."""

    name = "linalg.map"
    arguments = var_operand_def(TensorType)
    res = var_result_def(TensorType)
    body = region_def("single_block")

    @property
    def inputs(self) -> Sequence[SSAValue]:
        return self.arguments[:-1]

    @property
    def init(self) -> SSAValue:
        return self.arguments[-1]

    def verify_(self):
        shapes = {argument.type.get_shape() for argument in self.arguments if isinstance(argument.type, TensorType)}
        if len(self.arguments) < 1 or len(self.res) != 1 or len(shapes) != 1:
            raise VerifyException("linalg.map: inputs, init and result are tensors of one shape")
        last = self.body.block.last_op
        if len(self.body.block.args) not in (len(self.arguments) - 1, len(self.arguments)):
            raise VerifyException("linalg.map: the body takes an element of each input, and of the init")
        if not isinstance(last, YieldOp) or len(last.operands) != 1:
            raise VerifyException("linalg.map: the body ends with linalg.yield of one element")

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        """`{ op } ins(…) outs(…)`, or `ins(…) outs(…) (%a: f32, …) { body }`."""
        short: str | None = None
        if parser.parse_optional_punctuation("{"):
            short = parser.parse_identifier()
            parser.parse_punctuation("}")
        operands = _operands(parser, "ins") if parser.parse_optional_keyword("ins") else []
        parser.parse_keyword("outs")
        operands += _operands(parser, "outs")
        if short is None:
            arguments = parser.parse_comma_separated_list(parser.Delimiter.PAREN, parser.parse_argument)
            region = parser.parse_region(arguments)
        else:
            elements = [operand.type.element_type for operand in operands if isinstance(operand.type, TensorType)]
            block = Block(arg_types=elements)
            op = parser.ctx.get_op(short)(*block.args[:-1])
            block.add_op(op)
            block.add_op(YieldOp(op.results[0]))
            region = Region(block)
        return cls.create(operands=operands, result_types=[operands[-1].type], regions=[region])


@irdl_op_definition
class SoftmaxOp(IRDLOperation):
    """`linalg.softmax dimension(d) ins(%x) outs(%init)`: exp(x - max) / sum along one dimension."""

    name = "linalg.softmax"
    input = operand_def(TensorType)
    output = operand_def(TensorType)
    result = result_def(TensorType)
    dimension = prop_def(IntegerAttr)
    traits = traits_def(Pure())

    def verify_(self):
        rank = len(self.input.type.get_shape())  # pyright: ignore[reportAttributeAccessIssue]
        if not 0 <= self.dimension.value.data < rank:
            raise VerifyException(f"linalg.softmax: the input has no dimension {self.dimension.value.data}")
        if self.output.type != self.result.type:
            raise VerifyException("linalg.softmax: the result has the type of the init")

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        parser.parse_keyword("dimension")
        with parser.in_parens():
            dimension = parser.parse_integer()
        parser.parse_keyword("ins")
        operands = _operands(parser, "ins")
        parser.parse_keyword("outs")
        operands += _operands(parser, "outs")
        parser.parse_punctuation("->")
        properties: dict[str, Attribute] = {"dimension": IntegerAttr(dimension, i64)}
        return cls.create(operands=operands, result_types=[parser.parse_type()], properties=properties)


def _operands(parser: Parser, keyword: str) -> list[SSAValue]:
    with parser.in_parens():
        position = parser.pos
        names = parser.parse_comma_separated_list(parser.Delimiter.NONE, parser.parse_unresolved_operand)
        parser.parse_punctuation(":")
        types = parser.parse_comma_separated_list(parser.Delimiter.NONE, parser.parse_type)
        return list(parser.resolve_operands(names, types, position))


__all__ = ["Linalg", "MapOp", "Product", "SoftmaxOp", "accumulated"]

Linalg = Dialect(
    "linalg",
    [*(op for op in xdsl_linalg.Linalg.operations if op.name != "linalg.matmul"), *map(_product, PRODUCTS), MapOp, SoftmaxOp],
    list(xdsl_linalg.Linalg.attributes),
)
