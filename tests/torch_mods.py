"""Writes a Python function over tensors as a `func.func` of the `torch` dialect, through torch's own `make_fx`.

Slow (it imports dynamo) and plain: the tests of the dialect and of its conversion do not depend on the product's capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from xdsl.dialects import func
from xdsl.dialects.builtin import DenseIntOrFPElementsAttr, TensorType
from xdsl.ir import Block, Region, SSAValue

from attnc.dialects.torch import (
    DTYPES,
    SCALAR_TYPE_CODES,
    ConstantBoolOp,
    ConstantFloatOp,
    ConstantIntOp,
    ConstantNoneOp,
    ConstantStrOp,
    FloatType,
    IntType,
    ListConstructOp,
    LiteralOp,
    OptionalType,
    VTensorType,
    aten_op,
)


def dtype_of(dtype: torch.dtype):
    """The element attribute of a torch dtype."""
    return DTYPES[str(dtype).removeprefix("torch.")]


def type_of(tensor: torch.Tensor) -> VTensorType:
    return VTensorType(list(tensor.shape), dtype_of(tensor.dtype))


class _Writer:
    def __init__(self, graph: torch.fx.GraphModule, arguments: Sequence[SSAValue], block: Block):
        self.graph = graph
        self.block = block
        self.values: dict[torch.fx.Node, SSAValue] = {}
        self.arguments = iter(arguments)

    def add(self, op) -> SSAValue:
        self.block.add_op(op)
        return op.results[0]

    def operand(self, value: Any, type_: str = "") -> SSAValue:
        match value:
            case torch.fx.Node():
                return self.values[value]
            case bool():
                return self.add(ConstantBoolOp(value))
            case int():
                return self.add(ConstantIntOp(value))
            case float():
                return self.add(ConstantFloatOp(value))
            case str():
                return self.add(ConstantStrOp(value))
            case torch.dtype():
                return self.add(ConstantIntOp(SCALAR_TYPE_CODES[str(value).removeprefix("torch.")]))
            case list() | tuple():
                elements = [self.operand(element) for element in value]
                ints = all(isinstance(element.type, IntType) for element in elements)
                return self.add(ListConstructOp(elements, IntType() if ints else OptionalType(VTensorType())))
            case _:  # None, and devices, layouts, memory formats, which mean nothing here
                return self.add(ConstantNoneOp())

    def node(self, node: torch.fx.Node) -> None:
        match node.op:
            case "placeholder":
                self.values[node] = next(self.arguments)
            case "get_attr":
                tensor = getattr(self.graph, str(node.target))
                type_: Any = TensorType(dtype_of(tensor.dtype), list(tensor.shape))
                data = DenseIntOrFPElementsAttr.from_list(type_, tensor.flatten().tolist())
                self.values[node] = self.add(LiteralOp(data, type_of(tensor)))
            case "call_function" if "getitem" in str(node.target):
                source = self.values[node.args[0]]  # type: ignore[index]
                self.values[node] = source.owner.results[node.args[1]]  # type: ignore[union-attr, index]
            case "call_function":
                self._call(node)
            case "output":
                self.block.add_op(func.ReturnOp(self.values[node.args[0]]))  # type: ignore[index]

    def _call(self, node: torch.fx.Node) -> None:
        schema = node.target._schema  # type: ignore[union-attr]
        operands = []
        for position, argument in enumerate(schema.arguments):
            if position < len(node.args) and not argument.kwarg_only:
                value = node.args[position]
            else:
                value = node.kwargs.get(argument.name, argument.default_value)
            operands.append(self.operand(value))
        base = schema.name.removeprefix("aten::")
        base = base[:-1] if base.endswith("_") and not base.endswith("__") else base  # in place, of a value nobody else has
        name = base + (f".{schema.overload_name}" if schema.overload_name else "")
        result = node.meta["val"]
        results = [type_of(tensor) for tensor in (result if isinstance(result, tuple | list) else [result])]
        op = aten_op(name).create(operands=operands, result_types=results)
        self.values[node] = self.add(op)


def trace(function: Callable, samples: Sequence[torch.Tensor], name: str = "mod", dynamic: Sequence[int] = ()) -> func.FuncOp:
    """`function` as a `func.func` of arguments like `samples`; those whose position is in `dynamic` get unknown sizes."""
    graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*samples)
    graph.graph.eliminate_dead_code()
    types = [
        VTensorType([-1] * sample.dim(), dtype_of(sample.dtype)) if position in dynamic else type_of(sample)
        for position, sample in enumerate(samples)
    ]
    block = Block(arg_types=types)
    writer = _Writer(graph, block.args, block)
    for node in graph.graph.nodes:
        writer.node(node)
    last = block.last_op
    assert last is not None
    return func.FuncOp(name, (types, [operand.type for operand in last.operands]), Region(block), "private")


__all__ = ["FloatType", "dtype_of", "trace", "type_of"]
