"""A trace record as the module of stage "torch": the mods as functions of ATen operations, attention as one operation.

builtin.module attributes {attnc.stage = "torch"} {
  func.func private @score_mod(%score, %b, %h, %q, %kv, <captures and numbers that it reads>) { … }
  func.func private @mask_mod(%b, %h, %q, %kv, <captures and numbers that it reads>) { … }
  func.func @attention(%query, %key, %value, %scale, <captures>, <numbers>, [%blocks]) attributes {
    attnc.roles = […], attnc.strides = […], attnc.names = […], [attnc.few_queries], [attnc.gradients = array<i64: …>]} {
    %out = "torch.attnc_flex_attention"(…)
  }
}
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from xdsl.dialects import func
from xdsl.dialects.builtin import (
    ArrayAttr,
    DenseArrayBase,
    DenseIntOrFPElementsAttr,
    FunctionType,
    ModuleOp,
    StringAttr,
    TensorType,
    UnitAttr,
    i64,
)
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue

from attnc.capture.record import (
    MASK_ARGUMENTS,
    SCORE_ARGUMENTS,
    Argument,
    Captured,
    Function,
    ListOf,
    Literal,
    Number,
    Op,
    Operand,
    Record,
    Result,
)
from attnc.capture.record import TensorType as RecordType
from attnc.dialects.torch import (
    DTYPES,
    SCALAR_TYPE_CODES,
    ConstantBoolOp,
    ConstantFloatOp,
    ConstantIntOp,
    ConstantNoneOp,
    ConstantStrOp,
    FlexAttentionOp,
    FloatType,
    IntType,
    ListConstructOp,
    LiteralOp,
    OptionalType,
    VTensorType,
    aten_op,
    si8,
)
from attnc.runtime.signature import Signature

_ELEMENTS = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_BLOCK_STRIDES = "?x?x?x1"


def to_torch(record: Record, signature: Signature, needs: Sequence[bool] = ()) -> ModuleOp:
    """The module of stage "torch" for `record`, called on tensors of `signature`. `needs` says which of query, key, value,
    scale and the captured tensors want a gradient: if any do, the module goes the backward road."""
    functions: list[Operation] = []
    if record.score is not None:
        functions.append(mod_function(record, record.score, "score_mod", SCORE_ARGUMENTS))
    if record.mask is not None:
        functions.append(mod_function(record, record.mask, "mask_mod", MASK_ARGUMENTS))
    functions.append(_attention(record, signature))
    if any(needs):
        wanted = [number for number, needed in enumerate(needs) if needed]
        functions[-1].attributes["attnc.gradients"] = DenseArrayBase.from_list(i64, wanted)
    return ModuleOp(functions, {"attnc.stage": StringAttr("torch")})


def _vtensor(type_: RecordType) -> VTensorType:
    return VTensorType([-1 if size is None else size for size in type_.shape], DTYPES[type_.dtype])


def _operand_types(record: Record, function: Function) -> tuple[list[Attribute], list[str]]:
    """The captures and numbers that a mod reads: their types and names."""
    types: list[Attribute] = [_vtensor(record.captures[index].type) for index in function.captures]
    types += [_number(record, index) for index in function.numbers]
    names = [record.captures[index].name for index in function.captures]
    return types, names + [record.numbers[index].name for index in function.numbers]


def _number(record: Record, index: int) -> Attribute:
    return IntType() if record.numbers[index].kind == "int" else FloatType()


def _hint(name: str) -> str:
    """A name as an SSA name may be spelt: `self.bias` becomes `bias`, `window // 2` becomes `window_2`."""
    word = re.sub(r"\W+", "_", name.removeprefix("self.")).strip("_")
    return word if word and not word[0].isdigit() else f"v{word}"


def mod_function(record: Record, function: Function, name: str, names: Sequence[str]) -> func.FuncOp:
    """A mod as a private function; captures and numbers that it reads follow its fixed arguments."""
    types: list[Attribute] = [_vtensor(type_) for type_ in function.arguments]
    operand_types, operand_names = _operand_types(record, function)
    block = Block(arg_types=types + operand_types)
    for argument, hint in zip(block.args, [*names, *operand_names], strict=True):
        argument.name_hint = _hint(hint)
    operands = block.args[len(types) :]
    writer = _Writer(
        block,
        captures=dict(zip(function.captures, operands, strict=False)),
        numbers=dict(zip(function.numbers, operands[len(function.captures) :], strict=True)),
    )
    for op in function.ops:
        writer.op(op)
    result = writer.operand(function.result)
    block.add_op(func.ReturnOp(result))
    inputs = [argument.type for argument in block.args]
    return func.FuncOp(name, FunctionType.from_lists(inputs, [result.type]), Region(block), "private")


class _Writer:
    """Appends the operations of one mod to its block."""

    def __init__(self, block: Block, captures: dict[int, SSAValue], numbers: dict[int, SSAValue]):
        self.block = block
        self.captures = captures
        self.numbers = numbers
        self.results: list[SSAValue] = []
        self.literals: dict[Literal, SSAValue] = {}

    def op(self, op: Op) -> None:
        if op.name == "attnc.literal":
            (elements,) = op.operands
            assert isinstance(elements, ListOf)
            self.results.append(self._add(_literal(op.type, [item.value for item in elements.items])))  # type: ignore[union-attr]
            return
        operands = [self.operand(operand) for operand in op.operands]
        name = op.name.removeprefix("aten.").removesuffix(".default")
        new = aten_op(name).create(operands=operands, result_types=[_vtensor(op.type)])
        if op.location is not None:
            new.attributes["attnc.loc"] = StringAttr(str(op.location))
        self.results.append(self._add(new))

    def _add(self, op: Operation) -> SSAValue:
        self.block.add_op(op)
        return op.results[0]

    def operand(self, operand: Operand) -> SSAValue:
        match operand:
            case Argument(index):
                return self.block.args[index]
            case Captured(index):
                return self.captures[index]
            case Number(index):
                return self.numbers[index]
            case Result(op):
                return self.results[op]
            case ListOf(items):
                elements = [self.operand(item) for item in items]
                return self._add(ListConstructOp(elements, _element_type([element.type for element in elements])))
            case Literal():
                if operand not in self.literals:
                    self.literals[operand] = self._literal(operand)
                return self.literals[operand]
        raise AssertionError(operand)

    def _literal(self, literal: Literal) -> SSAValue:
        """A constant; a dtype is the int that torch numbers it by."""
        value = SCALAR_TYPE_CODES[literal.text] if literal.kind == "dtype" else literal.value
        match value:
            case None:
                op: Operation = ConstantNoneOp()
            case bool():
                op = ConstantBoolOp(value)
            case int():
                op = ConstantIntOp(value)
            case float():
                op = ConstantFloatOp(value)
            case _:
                op = ConstantStrOp(value)
        result = self._add(op)
        if literal.kind in ("none", "bool") or (literal.kind == "int" and int(literal.text) >= 0):
            result.name_hint = {"none": "none", "bool": literal.text.lower()}.get(literal.kind, f"int{literal.text}")
        return result


def _element_type(types: Sequence[Attribute]) -> Attribute:
    """What a list's elements are: all one type, else index tensors some of which are None."""
    if not types:
        return IntType()
    if all(type_ == types[0] for type_ in types) and not isinstance(types[0], VTensorType):
        return types[0]
    if all(isinstance(type_, VTensorType) for type_ in types):
        return types[0] if all(type_ == types[0] for type_ in types) else VTensorType()
    return OptionalType(VTensorType())


def _literal(type_: RecordType, elements: Sequence) -> LiteralOp:
    result = _vtensor(type_)
    data = DenseIntOrFPElementsAttr.from_list(TensorType(result.dtype, list(result.shape)), elements)  # pyright: ignore
    return LiteralOp(data, result)


def _attention(record: Record, signature: Signature) -> func.FuncOp:
    element = DTYPES[_ELEMENTS[signature.dtype]]
    tensors: list[tuple[str, str, Attribute, str]] = [
        ("query", "query", VTensorType([-1, -1, -1, signature.head_dim], element), signature.query_strides),
        ("key", "key", VTensorType([-1, -1, -1, signature.head_dim], element), signature.key_strides),
        ("value", "value", VTensorType([-1, -1, -1, signature.value_dim], element), signature.value_strides),
        ("scale", "scale", FloatType(), ""),
    ]
    tensors += [("capture", c.name, _vtensor(c.type), c.strides) for c in record.captures]
    tensors += [("number", n.name, _number(record, index), "") for index, n in enumerate(record.numbers)]
    if signature.block_size is not None:
        tensors.append(("blocks", "blocks", VTensorType([-1] * 4, si8), _BLOCK_STRIDES))
    block = Block(arg_types=[type_ for _, _, type_, _ in tensors])
    for argument, (_, name, _, _) in zip(block.args, tensors, strict=True):
        argument.name_hint = _hint(name)
    query, key, value, scale, *operands = block.args
    numbers = operands[len(record.captures) :]

    def read_by(function: Function | None) -> Sequence[SSAValue]:
        if function is None:
            return []
        return [operands[index] for index in function.captures] + [numbers[index] for index in function.numbers]

    attention = FlexAttentionOp(
        query,
        key,
        value,
        scale,
        score_mod="score_mod" if record.score is not None else None,
        score_operands=read_by(record.score),
        mask_mod="mask_mod" if record.mask is not None else None,
        mask_operands=read_by(record.mask),
        blocks=operands[-1] if signature.block_size is not None else None,
        block_size=signature.block_size,
        return_lse=signature.return_lse,
        return_max=signature.return_max,
        wide_lse=signature.wide_lse,
    )
    block.add_op(attention)
    hints = ["out", *["lse"] * signature.return_lse, *["max"] * signature.return_max]
    for result, hint in zip(attention.outputs, hints, strict=True):
        result.name_hint = hint
    block.add_op(func.ReturnOp(*attention.outputs))
    types = FunctionType.from_lists([a.type for a in block.args], [o.type for o in attention.outputs])
    function = func.FuncOp("attention", types, Region(block))
    for name, column in (("roles", 0), ("strides", 3), ("names", 1)):
        function.attributes[f"attnc.{name}"] = ArrayAttr(StringAttr(str(row[column])) for row in tensors)
    if signature.few_queries:
        function.attributes["attnc.few_queries"] = UnitAttr()
    return function
