"""The `torch` dialect: what the user's mods asked of torch, one operation for each traced ATen call.

Names, types and operand order are torch-mlir's: `torch.aten.add.Tensor %self, %other, %alpha`, every argument of the ATen
schema in order, defaults written out; dtypes and other enumerations are `torch.constant.int`, absent options
`torch.constant.none`, lists `torch.prim.ListConstruct`. One operation is ours: `torch.attnc_flex_attention`, attention with
both mods, their captured tensors and numbers, and the block classes of a BlockMask. Its lse and max are in natural units.

Any name `torch.aten.*` (`torch.prim.*`, `torch.prims.*`, …) is an operation here; which ones compile is said by
transforms/convert_torch_to_linalg_ext.py (docs/operations.md), so that an unsupported one is refused there, by name, with the
user's line. torch-mlir's "raw" output is text of this dialect: `torch.hop_flex_attention` (lse and max in log2 units),
`torch.operator`, `torch.symbolic_int` and weights in `dense_resource` come from there.

    %0 = torch.aten.sub.Tensor %q, %kv, %int1 : !torch.vtensor<[],si32>, ... -> !torch.vtensor<[],si32>
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Self, cast

from xdsl.dialects.builtin import (
    AffineMapAttr,
    ArrayAttr,
    BFloat16Type,
    BoolAttr,
    DenseArrayBase,
    DenseIntOrFPElementsAttr,
    DenseResourceAttr,
    Float16Type,
    Float32Type,
    Float64Type,
    FloatAttr,
    IntAttr,
    IntegerAttr,
    IntegerType,
    NoneAttr,
    Signedness,
    StringAttr,
    SymbolRefAttr,
    UnitAttr,
    f64,
    i64,
)
from xdsl.ir import Attribute, Dialect, Operation, ParametrizedAttribute, SSAValue, TypeAttribute
from xdsl.irdl import (
    AttrSizedOperandSegments,
    IRDLOperation,
    attr_def,
    irdl_attr_definition,
    irdl_op_definition,
    operand_def,
    opt_attr_def,
    opt_operand_def,
    result_def,
    traits_def,
    var_operand_def,
    var_result_def,
)
from xdsl.parser import AttrParser, Parser
from xdsl.printer import Printer
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

si64 = IntegerType(64, Signedness.SIGNED)
si32 = IntegerType(32, Signedness.SIGNED)
si16 = IntegerType(16, Signedness.SIGNED)
si8 = IntegerType(8, Signedness.SIGNED)
ui8 = IntegerType(8, Signedness.UNSIGNED)
bool_ = IntegerType(1)

# torch's ScalarType codes, as `dtype` arguments carry them, and torch's own names of the dtypes.
SCALAR_TYPES: dict[int, Attribute] = {
    0: ui8,
    1: si8,
    2: si16,
    3: si32,
    4: si64,
    5: Float16Type(),
    6: Float32Type(),
    7: Float64Type(),
    11: bool_,
    15: BFloat16Type(),
}
_NAMES = ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "bool", "bfloat16")
DTYPES: dict[str, Attribute] = dict(zip(_NAMES, SCALAR_TYPES.values(), strict=True))
SCALAR_TYPE_CODES: dict[str, int] = dict(zip(_NAMES, SCALAR_TYPES, strict=True))


@irdl_attr_definition
class VTensorType(ParametrizedAttribute, TypeAttribute):
    """`!torch.vtensor<[2,?],f32>`: an immutable tensor; a size of -1 prints as `?`.

    `!torch.vtensor` alone, of any rank and dtype, stands in the type of a list of index tensors.
    """

    name = "torch.vtensor"
    sizes: ArrayAttr[IntAttr] | NoneAttr
    dtype: Attribute

    def __init__(self, sizes: Sequence[int] | None = None, dtype: Attribute | None = None):
        if sizes is None or dtype is None:
            super().__init__(NoneAttr(), NoneAttr())
        else:
            super().__init__(ArrayAttr([IntAttr(size) for size in sizes]), dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        if isinstance(self.sizes, NoneAttr):
            raise VerifyException("this !torch.vtensor has no known rank")
        return tuple(size.data for size in self.sizes)

    def print_parameters(self, printer: Printer) -> None:
        if isinstance(self.sizes, NoneAttr):
            return
        sizes = ",".join("?" if size < 0 else str(size) for size in self.shape)
        printer.print_string(f"<[{sizes}],")
        printer.print_attribute(self.dtype)
        printer.print_string(">")

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        def size() -> IntAttr:
            if parser.parse_optional_punctuation("?"):
                return IntAttr(-1)
            return IntAttr(parser.parse_integer(allow_boolean=False, allow_negative=False))

        if parser.parse_optional_punctuation("<") is None:
            return NoneAttr(), NoneAttr()
        sizes = parser.parse_comma_separated_list(parser.Delimiter.SQUARE, size)
        parser.parse_punctuation(",")
        dtype = parser.parse_type()
        parser.parse_punctuation(">")
        return ArrayAttr(sizes), dtype


@irdl_attr_definition
class IntType(ParametrizedAttribute, TypeAttribute):
    """`!torch.int`: a Python int, 64 bits."""

    name = "torch.int"


@irdl_attr_definition
class FloatType(ParametrizedAttribute, TypeAttribute):
    """`!torch.float`: a Python float, f64."""

    name = "torch.float"


@irdl_attr_definition
class BoolType(ParametrizedAttribute, TypeAttribute):
    """`!torch.bool`: a Python bool."""

    name = "torch.bool"


@irdl_attr_definition
class NoneType(ParametrizedAttribute, TypeAttribute):
    """`!torch.none`: the type of None, an argument that was not given."""

    name = "torch.none"


@irdl_attr_definition
class StrType(ParametrizedAttribute, TypeAttribute):
    """`!torch.str`: a Python string, as a `rounding_mode`."""

    name = "torch.str"


@irdl_attr_definition
class DeviceType(ParametrizedAttribute, TypeAttribute):
    """`!torch.Device`: a device, as an argument of what makes tensors."""

    name = "torch.Device"


_WORDS: dict[str, type[ParametrizedAttribute]] = {
    "int": IntType,
    "float": FloatType,
    "bool": BoolType,
    "none": NoneType,
    "str": StrType,
    "Device": DeviceType,
}


class _Container(ParametrizedAttribute, TypeAttribute):
    """A type around another; inside, torch-mlir writes `int`, `vtensor<...>` without `!torch.`, and so do we."""

    element: Attribute

    def print_parameters(self, printer: Printer) -> None:
        printer.print_string("<")
        if isinstance(self.element, ParametrizedAttribute) and self.element.name.startswith("torch."):
            printer.print_string(self.element.name.removeprefix("torch."))
            self.element.print_parameters(printer)
        else:
            printer.print_attribute(self.element)
        printer.print_string(">")

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        def element() -> Attribute:
            word = parser.parse_optional_keyword_in({**_WORDS, "vtensor": 0, "list": 0, "optional": 0})
            if word is None:
                return parser.parse_type()
            if word in _WORDS:
                return _WORDS[word]()
            nested = {"vtensor": VTensorType, "list": ListType, "optional": OptionalType}[word]
            return nested.new(nested.parse_parameters(parser))

        with parser.in_angle_brackets():
            return (element(),)


@irdl_attr_definition
class ListType(_Container):
    """`!torch.list<int>`."""

    name = "torch.list"
    element: Attribute


@irdl_attr_definition
class OptionalType(_Container):
    """`!torch.optional<vtensor<[],si32>>`, an entry of a list of index tensors."""

    name = "torch.optional"
    element: Attribute


_INT, _FLOAT, _BOOL, _NONE, _STR = IntType(), FloatType(), BoolType(), NoneType(), StrType()


@irdl_op_definition
class ConstantIntOp(IRDLOperation):
    """`torch.constant.int 1`"""

    name = "torch.constant.int"
    value = attr_def(IntegerAttr)
    result = result_def(IntType)
    traits = traits_def(Pure())

    def __init__(self, value: int):
        super().__init__(attributes={"value": IntegerAttr(value, i64)}, result_types=[_INT])

    def print(self, printer: Printer):
        printer.print_string(f" {self.value.value.data}")
        printer.print_op_attributes(self.attributes, reserved_attr_names=("value",))

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        return _with_attributes(cls(parser.parse_integer(allow_boolean=False)), parser)


@irdl_op_definition
class ConstantFloatOp(IRDLOperation):
    """`torch.constant.float 1.5`; NaN and infinities are written by their bits."""

    name = "torch.constant.float"
    value = attr_def(FloatAttr)
    result = result_def(FloatType)
    traits = traits_def(Pure())

    def __init__(self, value: float):
        super().__init__(attributes={"value": FloatAttr(value, f64)}, result_types=[_FLOAT])

    def print(self, printer: Printer):
        value = self.value.value.data
        bits = struct.unpack("<Q", struct.pack("<d", value))[0]
        text = repr(value) if math.isfinite(value) else f"0x{bits:016X}"
        if "e" in text and "." not in text:
            text = text.replace("e", ".0e")
        printer.print_string(f" {text}")
        printer.print_op_attributes(self.attributes, reserved_attr_names=("value",))

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        value = parser.parse_number(allow_boolean=False)
        if isinstance(value, int):
            value = struct.unpack("<d", struct.pack("<Q", value))[0]
        return _with_attributes(cls(value), parser)


@irdl_op_definition
class ConstantBoolOp(IRDLOperation):
    """`torch.constant.bool true`"""

    name = "torch.constant.bool"
    value = attr_def(IntegerAttr)
    result = result_def(BoolType)
    traits = traits_def(Pure())

    def __init__(self, value: bool):
        super().__init__(attributes={"value": BoolAttr.from_bool(value)}, result_types=[_BOOL])

    def print(self, printer: Printer):
        printer.print_string(" true" if self.value.value.data else " false")
        printer.print_op_attributes(self.attributes, reserved_attr_names=("value",))

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        return _with_attributes(cls(parser.parse_boolean()), parser)


@irdl_op_definition
class ConstantNoneOp(IRDLOperation):
    """`torch.constant.none`"""

    name = "torch.constant.none"
    result = result_def(NoneType)
    traits = traits_def(Pure())
    assembly_format = "attr-dict"

    def __init__(self):
        super().__init__(result_types=[_NONE])


@irdl_op_definition
class ConstantStrOp(IRDLOperation):
    """`torch.constant.str "floor"`"""

    name = "torch.constant.str"
    value = attr_def(StringAttr)
    result = result_def(StrType)
    traits = traits_def(Pure())
    assembly_format = "$value attr-dict"

    def __init__(self, value: str):
        super().__init__(attributes={"value": StringAttr(value)}, result_types=[_STR])


@irdl_op_definition
class ConstantDeviceOp(IRDLOperation):
    """`torch.constant.device "cpu"`"""

    name = "torch.constant.device"
    value = attr_def(StringAttr)
    result = result_def(DeviceType)
    traits = traits_def(Pure())
    assembly_format = "$value attr-dict"

    def __init__(self, value: str):
        super().__init__(attributes={"value": StringAttr(value)}, result_types=[DeviceType()])


@irdl_op_definition
class OperatorOp(IRDLOperation):
    """`torch.operator "torch.aten.sort.stable"(%x, %true) : (types) -> (types)`: an operator without a class of its own."""

    name = "torch.operator"
    operator = attr_def(StringAttr, attr_name="name")
    arguments = var_operand_def()
    results_ = var_result_def()
    traits = traits_def(Pure())

    def print(self, printer: Printer):
        printer.print_string(" ")
        printer.print_string_literal(self.operator.data)
        with printer.in_parens():
            printer.print_list(self.operands, printer.print_operand)
        printer.print_op_attributes(self.attributes, reserved_attr_names=("name",))
        printer.print_string(" : ")
        printer.print_operation_type(self)

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        name = parser.parse_str_literal()
        operands = parser.parse_comma_separated_list(parser.Delimiter.PAREN, parser.parse_unresolved_operand)
        attributes = parser.parse_optional_attr_dict()
        parser.parse_punctuation(":")
        types = parser.parse_function_type()
        arguments = parser.resolve_operands(operands, list(types.inputs), parser.pos)
        attributes["name"] = StringAttr(name)
        return cls.create(operands=arguments, result_types=list(types.outputs), attributes=attributes)


@irdl_op_definition
class SymbolicIntOp(IRDLOperation):
    """`torch.symbolic_int "s0" {max_val = 100, min_val = 3} : !torch.int`: a size that torch.export left open."""

    name = "torch.symbolic_int"
    symbol = attr_def(StringAttr, attr_name="symbol_name")
    min_val = attr_def(IntegerAttr)
    max_val = attr_def(IntegerAttr)
    result = result_def(IntType)
    traits = traits_def(Pure())

    def __init__(self, symbol: str, smallest: int, largest: int):
        bounds: dict[str, Attribute] = {"min_val": IntegerAttr(smallest, i64), "max_val": IntegerAttr(largest, i64)}
        super().__init__(attributes={"symbol_name": StringAttr(symbol), **bounds}, result_types=[_INT])

    def print(self, printer: Printer):
        printer.print_string(" ")
        printer.print_string_literal(self.symbol.data)
        bounds = f" {{min_val = {self.min_val.value.data}, max_val = {self.max_val.value.data}}}"
        printer.print_string(f"{bounds} : !torch.int")

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        name = parser.parse_str_literal()
        attributes = parser.parse_optional_attr_dict()
        parser.parse_punctuation(":")
        type_ = parser.parse_type()
        return cls.create(result_types=[type_], attributes={"symbol_name": StringAttr(name), **attributes})


@irdl_op_definition
class BindSymbolicShapeOp(IRDLOperation):
    """`torch.bind_symbolic_shape %x, [%s], affine_map<()[s0] -> (2, s0)> : !torch.vtensor<[2,?],f32>`: the sizes of %x."""

    name = "torch.bind_symbolic_shape"
    tensor = operand_def(VTensorType)
    symbols = var_operand_def(IntType)
    shape_expressions = attr_def(AffineMapAttr)

    def __init__(self, tensor: SSAValue, symbols: Sequence[SSAValue], expressions: AffineMapAttr):
        super().__init__(operands=[tensor, symbols], attributes={"shape_expressions": expressions})

    def print(self, printer: Printer):
        printer.print_string(" ")
        printer.print_operand(self.tensor)
        printer.print_string(", [")
        printer.print_list(self.symbols, printer.print_operand)
        printer.print_string("], ")
        printer.print_attribute(self.shape_expressions)
        printer.print_string(" : ")
        printer.print_attribute(self.tensor.type)

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        tensor = parser.parse_unresolved_operand()
        parser.parse_punctuation(",")
        symbols = parser.parse_comma_separated_list(parser.Delimiter.SQUARE, parser.parse_unresolved_operand)
        parser.parse_punctuation(",")
        expressions = parser.parse_attribute()
        attributes = parser.parse_optional_attr_dict()
        parser.parse_punctuation(":")
        type_ = parser.parse_type()
        operands = [parser.resolve_operand(tensor, type_), *parser.resolve_operands(symbols, [_INT] * len(symbols), parser.pos)]
        return cls.create(operands=operands, attributes={"shape_expressions": expressions, **attributes})


@irdl_op_definition
class LiteralOp(IRDLOperation):
    """`torch.vtensor.literal(dense<[1, 2]> : tensor<2xsi64>) : !torch.vtensor<[2],si64>`: a constant tensor; a large one is a
    `dense_resource<key>`, its bytes in the module's resources (dialects/resources.py)."""

    name = "torch.vtensor.literal"
    value = attr_def(DenseIntOrFPElementsAttr | DenseResourceAttr)
    result = result_def(VTensorType)
    traits = traits_def(Pure())
    assembly_format = "`(` $value `)` attr-dict `:` type($result)"

    def __init__(self, value: DenseIntOrFPElementsAttr | DenseResourceAttr, result_type: VTensorType):
        super().__init__(attributes={"value": value}, result_types=[result_type])


@irdl_op_definition
class ListConstructOp(IRDLOperation):
    """`torch.prim.ListConstruct %a, %b : (!torch.int, !torch.int) -> !torch.list<int>`"""

    name = "torch.prim.ListConstruct"
    elements = var_operand_def()
    result = result_def(ListType)
    traits = traits_def(Pure())

    def __init__(self, elements: Sequence[SSAValue | Operation], element_type: Attribute):
        super().__init__(operands=[elements], result_types=[ListType(element_type)])

    def print(self, printer: Printer):
        if self.elements:
            printer.print_string(" ")
            printer.print_list(self.elements, printer.print_operand)
        printer.print_op_attributes(self.attributes)
        printer.print_string(" : (")
        printer.print_list(self.elements.types, printer.print_attribute)
        printer.print_string(") -> ")
        printer.print_attribute(self.result.type)

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        operands = parser.parse_optional_undelimited_comma_separated_list(
            parser.parse_optional_unresolved_operand, parser.parse_unresolved_operand
        )
        attributes = parser.parse_optional_attr_dict()
        parser.parse_punctuation(":")
        types = parser.parse_comma_separated_list(parser.Delimiter.PAREN, parser.parse_type)
        parser.parse_punctuation("->")
        result = parser.parse_type()
        elements = parser.resolve_operands(operands or [], types, parser.pos)
        return cls.create(operands=elements, result_types=[result], attributes=attributes)


@irdl_op_definition
class AtenOp(IRDLOperation):
    """The common shape of every `torch.aten.*` operation: `aten_op(name)` makes the class of one.

    `attnc.loc = "file.py:12"`, where present, is the user's line, for messages.
    """

    name = "torch.aten"
    arguments = var_operand_def()
    results_ = var_result_def()
    traits = traits_def(Pure())

    def print(self, printer: Printer):
        if self.operands:
            printer.print_string(" ")
            printer.print_list(self.operands, printer.print_operand)
        printer.print_op_attributes(self.attributes)
        printer.print_string(" :")
        if self.operands:
            printer.print_string(" ")
            printer.print_list([operand.type for operand in self.operands], printer.print_attribute)
        if self.results:
            printer.print_string(" -> ")
            printer.print_list([result.type for result in self.results], printer.print_attribute)

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        operands = parser.parse_optional_undelimited_comma_separated_list(
            parser.parse_optional_unresolved_operand, parser.parse_unresolved_operand
        )
        attributes = parser.parse_optional_attr_dict()
        parser.parse_punctuation(":")
        types = parser.parse_optional_undelimited_comma_separated_list(parser.parse_optional_type, parser.parse_type)
        results: list[Attribute] = []
        if parser.parse_optional_punctuation("->"):
            results += parser.parse_comma_separated_list(parser.Delimiter.NONE, parser.parse_type)
        arguments = parser.resolve_operands(operands or [], types or [], parser.pos)
        return cls.create(operands=arguments, result_types=results, attributes=attributes)


_ATEN_OPS: dict[str, type[AtenOp]] = {}


def aten_op(name: str) -> type[AtenOp]:
    """The operation class of an ATen name without dialect, `"add.Tensor"` or `"exp"`.

    Build with `aten_op("exp").create(operands=[x], result_types=[type])`, which is three times as fast as a constructor.
    """
    return torch_op(f"aten.{name}")


def torch_op(name: str) -> type[AtenOp]:
    """The operation class of a name of the torch dialect that has no class of its own: `"prims.convert_element_type"`."""
    if name not in _ATEN_OPS:
        words = name.removeprefix("aten.").replace(".", "_").split("_")
        class_name = "".join(word.capitalize() for word in words) + "Op"
        _ATEN_OPS[name] = cast(type[AtenOp], type(class_name, (AtenOp,), {"name": f"torch.{name}"}))
    return _ATEN_OPS[name]


@irdl_op_definition
class FlexAttentionOp(IRDLOperation):
    """Attention with the user's mods; a superset of torch's higher-order op.

    `query`, `key`, `value` are `[B, H, S, E]`, `scale` is a `!torch.float`. `score_operands` and `mask_operands` follow the
    five (four) fixed arguments of `score_mod_fn` (`mask_mod_fn`). `blocks`, `[B, Hq, query blocks, key blocks]` of si8, says of
    each block of `block_size` (queries, keys) whether it is 0 not listed, 1 partial, 2 full. Results: out, then lse if
    `return_lse`, then max if `return_max`, both in natural units, f32 (f64 for f64); lse may be f64 beside any.
    """

    name = "torch.attnc_flex_attention"
    query = operand_def(VTensorType)
    key = operand_def(VTensorType)
    value = operand_def(VTensorType)
    scale = operand_def(FloatType)
    score_operands = var_operand_def()
    mask_operands = var_operand_def()
    blocks = opt_operand_def(VTensorType)
    outputs = var_result_def(VTensorType)
    score_mod_fn = opt_attr_def(SymbolRefAttr)
    mask_mod_fn = opt_attr_def(SymbolRefAttr)
    block_size = opt_attr_def(DenseArrayBase)
    return_lse = opt_attr_def(UnitAttr)
    return_max = opt_attr_def(UnitAttr)
    irdl_options = (AttrSizedOperandSegments(as_property=False),)
    traits = traits_def(Pure())

    def __init__(
        self,
        query: SSAValue,
        key: SSAValue,
        value: SSAValue,
        scale: SSAValue,
        *,
        score_mod: str | None = None,
        score_operands: Sequence[SSAValue] = (),
        mask_mod: str | None = None,
        mask_operands: Sequence[SSAValue] = (),
        blocks: SSAValue | None = None,
        block_size: tuple[int, int] | None = None,
        return_lse: bool = False,
        return_max: bool = False,
        wide_lse: bool = False,
    ):
        query_type, value_type = query.type, value.type
        if not isinstance(query_type, VTensorType) or not isinstance(value_type, VTensorType):
            raise VerifyException(f"{self.name}: query and value must be !torch.vtensor")
        attributes: dict[str, Attribute | None] = {
            "score_mod_fn": SymbolRefAttr(score_mod) if score_mod else None,
            "mask_mod_fn": SymbolRefAttr(mask_mod) if mask_mod else None,
            "block_size": DenseArrayBase.from_list(i64, list(block_size)) if block_size else None,
            "return_lse": UnitAttr() if return_lse else None,
            "return_max": UnitAttr() if return_max else None,
        }
        statistics = f64 if isinstance(query_type.dtype, Float64Type) else Float32Type()
        rows = query_type.shape[:-1]
        results: list[Attribute] = [VTensorType([*rows, value_type.shape[-1]], query_type.dtype)]
        results += [VTensorType(rows, f64 if wide_lse else statistics)] * return_lse + [
            VTensorType(rows, statistics)
        ] * return_max
        super().__init__(
            operands=[query, key, value, scale, list(score_operands), list(mask_operands), blocks],
            attributes=attributes,
            result_types=[results],
        )

    def verify_(self):
        expected = 1 + (self.return_lse is not None) + (self.return_max is not None)
        if len(self.outputs) != expected:
            raise VerifyException(f"{self.name}: expected {expected} results (out, lse, max as asked), got {len(self.outputs)}")
        if (self.blocks is None) != (self.block_size is None):
            raise VerifyException(f"{self.name}: blocks and block_size come together")
        if self.block_size is not None:
            sizes = block_sizes(self)
            if len(sizes) != 2 or any(size < 1 for size in sizes):
                raise VerifyException(f"{self.name}: block_size is two positive numbers, (queries, keys); got {sizes}")
        for mod, operands, what in (
            (self.score_mod_fn, self.score_operands, "score"),
            (self.mask_mod_fn, self.mask_operands, "mask"),
        ):
            if mod is None and operands:
                raise VerifyException(f"{self.name}: {what} operands without {what}_mod_fn")


def block_sizes(op: FlexAttentionOp) -> tuple[int, ...]:
    """(queries, keys) of a block of the BlockMask."""
    return (
        ()
        if op.block_size is None
        else tuple(int(size) for size in cast(DenseArrayBase[IntegerType], op.block_size).get_values())
    )


def _with_attributes(op, parser: Parser):
    op.attributes |= parser.parse_optional_attr_dict()
    return op


Torch = Dialect(
    "torch",
    [
        ConstantIntOp,
        ConstantFloatOp,
        ConstantBoolOp,
        ConstantNoneOp,
        ConstantStrOp,
        ConstantDeviceOp,
        OperatorOp,
        SymbolicIntOp,
        BindSymbolicShapeOp,
        LiteralOp,
        ListConstructOp,
        FlexAttentionOp,
    ],
    [VTensorType, IntType, FloatType, BoolType, NoneType, StrType, DeviceType, ListType, OptionalType],
)
