"""Interprets a mod, a function of `torch` operations, into scalar operations of an attention's region.

%0 = torch.aten.sub.Tensor %kv, %q, %int1 : …, … -> !torch.vtensor<[],si32>    =>    %0 = arith.subi %kv, %q : i32
%1 = torch.aten.index.Tensor %bias, %list : …                                   =>    %1 = tensor.extract %bias[%q, %kv]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from xdsl.dialects import func
from xdsl.dialects.builtin import DYNAMIC_INDEX, DenseResourceAttr, StringAttr, TensorType
from xdsl.ir import Block, Operation, SSAValue

from attnc.dialects.torch import (
    AtenOp,
    BoolType,
    ConstantBoolOp,
    ConstantDeviceOp,
    ConstantFloatOp,
    ConstantIntOp,
    ConstantNoneOp,
    ConstantStrOp,
    FloatType,
    IntType,
    ListConstructOp,
    LiteralOp,
    VTensorType,
    si64,
)
from attnc.errors import UnsupportedModError, UnsupportedOpError
from attnc.transforms import (
    convert_torch_to_linalg_ext_functions,
    convert_torch_to_linalg_ext_logic,
    convert_torch_to_linalg_ext_moves,
    convert_torch_to_linalg_ext_norms,
    convert_torch_to_linalg_ext_numbers,
)
from attnc.transforms.convert_torch_to_linalg_ext_making import literal
from attnc.transforms.convert_torch_to_linalg_ext_region import f64, i1
from attnc.transforms.convert_torch_to_linalg_ext_region import index as index_type
from attnc.transforms.convert_torch_to_linalg_ext_table import OPERATIONS, Entry, Unsupported
from attnc.transforms.convert_torch_to_linalg_ext_tensors import broadcast, broadcast_dims
from attnc.transforms.convert_torch_to_linalg_ext_values import (
    CARRIED,
    Number,
    Operand,
    Scalar,
    ScalarBuilder,
    Tensor,
    Value,
)

# Importing the modules fills the table.
_ = (
    convert_torch_to_linalg_ext_functions,
    convert_torch_to_linalg_ext_logic,
    convert_torch_to_linalg_ext_moves,
    convert_torch_to_linalg_ext_norms,
    convert_torch_to_linalg_ext_numbers,
)


def interpret(r: ScalarBuilder, mod: func.FuncOp, arguments: Sequence[Value]) -> Scalar:
    """Builds `mod(*arguments)` and returns its 0-d result."""
    block = mod.body.block
    if len(block.args) != len(arguments):
        name = mod.sym_name.data
        raise UnsupportedModError(f"@{name} takes {len(block.args)} arguments, the attention gives it {len(arguments)}")
    values: dict[SSAValue, Value] = dict(zip(block.args, arguments))
    needed = _needed(block)
    for op in block.ops:
        if isinstance(op, func.ReturnOp):
            result = values[op.operands[0]]
            if isinstance(result, Number):
                return Scalar(r.value_of(result), result.dtype)
            if isinstance(result, Tensor) and all(dim == 1 for dim in result.dims):
                # A mod that keeps dimensions of size 1 means its one element.
                zero = r.constant(index_type, 0)
                return Scalar(result.at([zero] * len(result.dims)), result.dtype)
            if not isinstance(result, Scalar):
                raise UnsupportedModError(f"@{mod.sym_name.data} must return one element, not a tensor with dimensions")
            return result
        if op in needed:
            _convert(r, op, values)
    raise UnsupportedModError(f"@{mod.sym_name.data} does not end in func.return")


def captured(r: ScalarBuilder, argument: SSAValue, type_: VTensorType, name: str) -> Scalar | Tensor:
    """A captured tensor: `argument` is the kernel's tensor, `type_` its torch type."""
    carried = CARRIED[type_.dtype]
    if not type_.shape:
        return Scalar(r.extract(argument, (), carried, r.checked, name), type_.dtype)
    dims = [size if size >= 0 else (argument, position) for position, size in enumerate(type_.shape)]
    return Tensor(r, dims, type_.dtype, lambda i: r.extract(argument, i, carried, r.checked, name), True)


def _needed(block: Block) -> set[Operation]:
    """The operations that the result depends on."""
    needed: set[Operation] = set()
    wanted = set(block.last_op.operands) if block.last_op is not None else set()
    for op in reversed(list(block.ops)):
        if any(result in wanted for result in op.results):
            needed.add(op)
            wanted.update(op.operands)
    return needed


def _convert(r: ScalarBuilder, op: Operation, values: dict[SSAValue, Value]) -> None:
    match op:
        case ConstantIntOp():
            value: Value = Number(si64, op.value.value.data)
        case ConstantFloatOp():
            value = Number(f64, op.value.value.data)
        case ConstantBoolOp():
            value = Number(i1, bool(op.value.value.data))
        case ConstantNoneOp():
            value = None
        case ConstantStrOp() | ConstantDeviceOp():
            value = op.value.data
        case ListConstructOp():
            value = [values[element] for element in op.elements]
        case LiteralOp():
            assert isinstance(op.result.type, VTensorType)
            if isinstance(op.value, DenseResourceAttr):
                raise UnsupportedOpError("a mod cannot hold a constant tensor in a resource; capture it", **place_of(op))
            try:
                value = literal(r, op.result.type, [cast(float, element) for element in op.value.get_values()])
            except Unsupported as reason:
                raise UnsupportedOpError(f"a mod cannot use {reason}", **place_of(op)) from None
        case AtenOp():
            _convert_aten(r, op, values)
            return
        case _:
            raise UnsupportedOpError(f"a mod cannot use {op.name}", **place_of(op))
    values[op.results[0]] = value


def _convert_aten(r: ScalarBuilder, op: AtenOp, values: dict[SSAValue, Value]) -> None:
    name = op.name.removeprefix("torch.").removeprefix("aten.")
    arguments = [values[operand] for operand in op.operands]
    entry = entry_of(name, op)
    if entry is None:
        raise UnsupportedOpError(f"a mod cannot use aten.{name}: attnc does not know it", **place_of(op))
    try:
        if entry.kind == "elementwise":
            type_ = op.results[0].type
            assert isinstance(type_, VTensorType)
            values[op.results[0]] = _elementwise(r, entry.build, type_, arguments)
        elif entry.kind == "number":
            values[op.results[0]] = entry.build(r, *arguments)
        else:
            built = entry.build(r, [result.type for result in op.results], *arguments)
            built = built if isinstance(built, tuple) else (built,)
            values.update(zip(op.results, built))
    except Unsupported as reason:
        raise UnsupportedOpError(f"a mod cannot use aten.{name} so: {reason}", **place_of(op)) from None


def entry_of(name: str, op: AtenOp) -> Entry | None:
    """The table's entry; of Python numbers, a name without its overload will do."""
    entry = OPERATIONS.get(name)
    if entry is not None and entry.kind == "elementwise" and not isinstance(op.results[0].type, VTensorType):
        entry = OPERATIONS.get(f"{name.partition('.')[0]}.Scalar_Scalar")
    if entry is None and isinstance(op.results[0].type, IntType | FloatType | BoolType):
        entry = OPERATIONS.get(f"{name.partition('.')[0]}.Scalar_Scalar")
    return entry


def _elementwise(
    r: ScalarBuilder, build: Callable[..., SSAValue], type_: VTensorType, arguments: Sequence[Value]
) -> Scalar | Tensor:
    dtype = type_.dtype
    if not any(isinstance(argument, Tensor) for argument in arguments):
        return Scalar(build(r, dtype, *arguments), dtype)
    shapes = [argument.dims for argument in arguments if isinstance(argument, Scalar | Tensor)]
    dims = [size if size >= 0 else dim for size, dim in zip(type_.shape, broadcast_dims(shapes), strict=True)]

    def element(indices: tuple[SSAValue, ...]) -> SSAValue:
        scalars: list[Value | Operand] = []
        for argument in arguments:
            if isinstance(argument, Tensor):
                value = argument.at(broadcast(r, argument.dims, indices))
                scalars.append(Scalar(value, argument.dtype, of_tensor=True))
            else:
                scalars.append(argument)
        return build(r, dtype, *scalars)

    return Tensor(r, dims, dtype, element)


def place_of(op: Operation) -> dict:
    """The user's file and line, where capture noted them."""
    place = op.attributes.get("attnc.loc")
    if not isinstance(place, StringAttr):
        return {}
    filename, _, line = place.data.rpartition(":")
    return {"filename": filename, "line": int(line)} if filename and line.isdigit() else {}


def tensor_type(type_: VTensorType) -> TensorType:
    """The builtin tensor type of a captured tensor."""
    return TensorType(CARRIED[type_.dtype], [size if size >= 0 else DYNAMIC_INDEX for size in type_.shape])
