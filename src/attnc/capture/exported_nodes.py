"""The nodes of an exported graph as operations of the `torch` dialect, one for each, in torch-mlir's spelling."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.ir import Attribute, Block, Operation, SSAValue

from attnc.dialects.torch import (
    DTYPES,
    SCALAR_TYPE_CODES,
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
    ListType,
    OptionalType,
    VTensorType,
    aten_op,
    torch_op,
)
from attnc.errors import UnsupportedGraphError

_PYTHON: dict[Any, str] = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.floordiv: "floordiv",
    operator.mod: "remainder",
    operator.neg: "neg",
    operator.truediv: "truediv",
    operator.pow: "pow",
    torch.sym_max: "sym_max",
    torch.sym_min: "sym_min",
}


def is_known(target: Any) -> bool:
    """Whether a call of something that is no ATen operation can be written down."""
    return target in _PYTHON or target is operator.getitem or target is torch.ops.higher_order.flex_attention


_TORCH_DIRECTORY = os.path.dirname(torch.__file__)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def type_of_value(value: Any) -> Attribute:
    """The dialect's type of a node's example value."""
    match value:
        case Tensor():
            name = str(value.dtype).removeprefix("torch.")
            if name not in DTYPES:
                raise UnsupportedGraphError(f"a tensor of dtype {name}")
            return VTensorType([size if isinstance(size, int) else -1 for size in value.shape], DTYPES[name])
        case bool() | torch.SymBool():
            return BoolType()
        case int() | torch.SymInt():
            return IntType()
        case float() | torch.SymFloat():
            return FloatType()
    raise UnsupportedGraphError(f"a value of type {type(value).__name__}")


def type_of(node: fx.Node) -> Attribute:
    return type_of_value(node.meta["val"])


def needed_nodes(output: fx.Node) -> set[fx.Node]:
    """The nodes that the results depend on."""
    needed: set[fx.Node] = set()
    stack = list(output.all_input_nodes)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    return needed


def place_in_source(node: fx.Node) -> str | None:
    """`file.py:12`, the innermost frame of the user's own code, or of torch's where there is no such."""
    trace = node.meta.get("stack_trace") or ""
    every = [(name, line) for name, line in _FRAME.findall(trace) if not name.startswith("<")]
    frames = [frame for frame in every if not frame[0].startswith(_TORCH_DIRECTORY)] or every
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else None


class GraphWriter:
    """Appends the operations of one graph to a block; `values` maps its nodes to what stands for them."""

    def __init__(
        self,
        block: Block,
        values: dict[fx.Node, Any],
        module: ModuleOp,
        owner: fx.GraphModule,
        read_program: Callable[[str], Any] | None = None,
    ):
        self.block = block
        self.values = values
        self.module = module
        self.owner = owner
        self.read_program = read_program
        self._constants: dict[Any, SSAValue] = {}
        self._place: str | None = None

    # -- building -----------------------------------------------------------------------------------------------------

    def add(self, op: Operation) -> SSAValue:
        self.block.add_op(op)
        return op.results[0]

    def placed(self, op: Operation) -> Operation:
        """Appends an operation that stands for the node at hand."""
        if self._place is not None:
            op.attributes["attnc.loc"] = StringAttr(self._place)
        self.block.add_op(op)
        return op

    def aten(self, name: str, operands: Sequence[SSAValue], types: Sequence[Attribute]) -> Operation:
        return self.placed(aten_op(name).create(operands=list(operands), result_types=list(types)))

    def constant(self, value: Any) -> SSAValue:
        """A Python constant, once a function."""
        key = (type(value), repr(value))
        if key not in self._constants:
            match value:
                case None:
                    op: Operation = ConstantNoneOp()
                case bool():
                    op = ConstantBoolOp(value)
                case int():
                    op = ConstantIntOp(value)
                case float():
                    op = ConstantFloatOp(value)
                case str():
                    op = ConstantStrOp(value)
                case torch.device():
                    op = ConstantDeviceOp(str(value))
                case torch.dtype():
                    op = ConstantIntOp(SCALAR_TYPE_CODES[str(value).removeprefix("torch.")])
                case torch.layout() | torch.memory_format():
                    op = ConstantIntOp(1 if value == torch.preserve_format else 0)
                case _:
                    raise UnsupportedGraphError(f"a constant of type {type(value).__name__}")
            result = op.results[0]
            if value is None or isinstance(value, bool) or (isinstance(value, int) and value >= 0):
                result.name_hint = (
                    "none" if value is None else f"int{value}" if not isinstance(value, bool) else str(value).lower()
                )
            first = self.block.first_op
            if first is None:
                self.block.add_op(op)
            else:
                self.block.insert_op_before(op, first)
            self._constants[key] = result
        return self._constants[key]

    def operand(self, value: Any, kind: str = "") -> SSAValue:
        """An argument of a schema; `kind` is its type there."""
        if isinstance(value, fx.Node):
            return self.values[value]
        if isinstance(value, list | tuple):
            elements = [self.operand(item, kind) for item in value]
            return self.add(ListConstructOp(elements, _element_type([element.type for element in elements])))
        if kind.startswith("float") and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        return self.constant(value)

    # -- nodes --------------------------------------------------------------------------------------------------------

    def write(self, node: fx.Node) -> None:
        """Appends what a node does. Raises `UnsupportedGraphError`, with the user's place."""
        self._place = place_in_source(node) or (self._place if node.target is torch.ops.higher_order.flex_attention else None)
        try:
            self._write(node)
        except UnsupportedGraphError as error:
            if error.filename is None and self._place is not None:
                name, _, line = self._place.rpartition(":")
                error.filename, error.line = name, int(line)
            raise

    def _write(self, node: fx.Node) -> None:
        from attnc.capture import exported_attention

        target = node.target
        if node.op == "get_attr":
            held = self.owner
            for part in str(target).split("."):
                held = getattr(held, part)
            self.values[node] = held
        elif target is operator.getitem:
            source, position = node.args
            assert isinstance(source, fx.Node) and isinstance(position, int)
            self.values[node] = self.values[source][position]
            if isinstance(self.values[node], SSAValue):
                self.values[node].name_hint = node.name
        elif target is torch.ops.higher_order.flex_attention:
            self.values[node] = exported_attention.flex(self, node)
        elif str(target).startswith("attnc.attention"):
            self.values[node] = exported_attention.operator(self, node)
        elif isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims"):
            self._overload(node, target)
        elif target in _PYTHON:
            self._python(node)
        else:
            raise UnsupportedGraphError(f"{_spoken(target)} is not supported in a compiled function")

    def _overload(self, node: fx.Node, target: Any) -> None:
        schema = target._schema
        operands = []
        for position, argument in enumerate(schema.arguments):
            if position < len(node.args):
                value = node.args[position]
            elif argument.name in node.kwargs:
                value = node.kwargs[argument.name]
            else:
                value = argument.default_value
            operands.append(self.operand(value, str(argument.type).replace("Optional[", "").lower()))
        name = schema.name.removeprefix("aten::").replace("::", ".") + (
            f".{schema.overload_name}" if schema.overload_name else ""
        )
        kind = aten_op(name) if target.namespace == "aten" else torch_op(name)
        value = node.meta.get("val")
        if isinstance(value, list) and len(schema.returns) == 1:  # Tensor[]
            listed = ListType(VTensorType())
            whole = self.placed(kind.create(operands=operands, result_types=[listed]))
            types = [type_of_value(item) for item in value]
            self.values[node] = list(
                self.placed(torch_op("prim.ListUnpack").create(operands=whole.results, result_types=types)).results
            )
        elif isinstance(value, list | tuple):
            types = [type_of_value(item if item is not None else 0) for item in value]
            self.values[node] = list(self.placed(kind.create(operands=operands, result_types=types)).results)
        else:
            result = self.placed(kind.create(operands=operands, result_types=[type_of_value(value)])).results[0]
            result.name_hint = node.name
            self.values[node] = result

    def _python(self, node: fx.Node) -> None:
        """Arithmetic on sizes and other Python numbers."""
        result = type_of(node)
        variant = "int" if isinstance(result, IntType) else "float"
        name = f"{_PYTHON[node.target]}.{variant}"
        self.values[node] = self.aten(name, [self.operand(value) for value in node.args], [result]).results[0]


def _element_type(types: Sequence[Attribute]) -> Attribute:
    """What a list's elements are: all one type, else tensors some of which are None."""
    if not types:
        return IntType()
    if all(isinstance(type_, VTensorType) for type_ in types):
        return VTensorType()
    if all(type_ == types[0] for type_ in types):
        return types[0]
    return OptionalType(VTensorType())


def _spoken(target: Any) -> str:
    name = getattr(target, "__name__", None)
    module = getattr(target, "__module__", "")
    return (
        str(target)
        if name is None or not isinstance(name, str)
        else f"{module}.{name}"
        if callable(target) and module
        else name
    )
