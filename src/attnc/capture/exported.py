"""A `torch.export.ExportedProgram` as a module of stage "torch": one function of ATen operations on tensors.

    func.func @forward(%p_weight: !torch.vtensor<[64],f32>, %x: !torch.vtensor<[2,?,512],f32>) -> !torch.vtensor<[2,?,512],f32>
        attributes {attnc.parameters = ["p_weight", ""], attnc.names = ["p_weight", "x"]} {
      %s0 = torch.symbolic_int "s0" {min_val = 3, max_val = 100} : !torch.int
      torch.bind_symbolic_shape %x, [%s0], affine_map<()[s0] -> (2, s0, 512)>
      %0 = torch.aten.size.int %x, %int1
      %1 = torch.aten.view %x, %list {attnc.loc = "model.py:12"} : …

Parameters, buffers and constants that the program uses come first among the arguments; `attnc.parameters` names them, "" is an
argument of the user's. Sizes left open by `dynamic_shapes` are `?`. Only what the results need is written down. torch's flex
HOP is `torch.attnc_flex_attention`, with its mods as private functions (exported_attention.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils import _pytree as pytree
from xdsl.dialects import func
from xdsl.dialects.builtin import ArrayAttr, FunctionType, ModuleOp, StringAttr
from xdsl.ir import Attribute, Block, Region, SSAValue

from attnc.capture.exported_nodes import GraphWriter, is_known, needed_nodes, type_of
from attnc.capture.exported_shapes import bind_shapes
from attnc.dialects.torch import DTYPES, VTensorType
from attnc.errors import ArgumentsError, UnsupportedGraphError


@dataclass(frozen=True)
class Exported:
    """An exported program: its module, and how a call's arguments and results map to the function's.

    `parameters` holds the tensors of the leading arguments, in their order. `inputs` are the positions, among the user's
    flattened arguments, of the function's other arguments; `constants` what the program was specialised on. `results` are, for
    each flattened result, its number among the function's results, or a constant; `result_dtypes` torch's names of the former's
    dtypes, "" for numbers.
    """

    module: ModuleOp
    parameters: dict[str, Tensor]
    inputs: tuple[int, ...]
    constants: dict[int, Any]
    results: tuple[tuple[str, Any], ...]
    in_spec: Any = None
    out_spec: Any = None
    result_dtypes: tuple[str, ...] = ()

    def flatten(self, *arguments: Any, **keywords: Any) -> list[Any]:
        """The function's own arguments (parameters not among them) of a call. Raises `ArgumentsError`."""
        flat, spec = pytree.tree_flatten((arguments, keywords))
        if self.in_spec is not None and spec != self.in_spec:
            raise _otherwise(spec, self.in_spec)
        for position, constant in self.constants.items():
            if flat[position] != constant:
                raise ArgumentsError(f"argument {position} is {flat[position]!r}; the program was exported for {constant!r}")
        return [_signed(flat[position]) for position in self.inputs]

    def held(self, inputs: Sequence[Any] = ()) -> list[Any]:
        """The parameters as the function takes them: arrays where all tensors among `inputs` are arrays."""
        tensors = [_signed(tensor) for tensor in self.parameters.values()]
        arrays = any(hasattr(value, "shape") for value in inputs) and not any(isinstance(value, Tensor) for value in inputs)
        return [tensor.numpy() for tensor in tensors] if arrays else tensors

    def unflatten(self, results: Sequence[Any]) -> Any:
        """What the program returns, from the function's results."""
        named = [_unsigned(value, dtype) for value, dtype in zip(results, self.result_dtypes, strict=True)]
        flat = [named[value] if kind == "result" else value for kind, value in self.results]
        return pytree.tree_unflatten(flat, self.out_spec) if self.out_spec is not None else tuple(flat)


def _otherwise(given: Any, wanted: Any) -> ArgumentsError:
    """The error of a call whose arguments are not those that the program was exported for."""
    (had, _), (need, _) = (spec.children() for spec in (given, wanted))
    remedy = f"it was exported for {_written(wanted)}"
    if had.num_children != need.num_children:
        count = need.num_children
        what = "argument" if count == 1 else "arguments"
        return ArgumentsError(f"the program takes {count} {what} by position, not {had.num_children}", remedy=remedy)
    return ArgumentsError(
        f"the arguments are nested otherwise than when the program was exported: {_written(given)}", remedy=remedy
    )


def _written(spec: Any) -> str:
    """`(_, {'mask': _}, scale=_)`, for the arguments of a call."""

    def inner(spec: Any) -> str:
        if spec.is_leaf():
            return "_"
        parts = [inner(child) for child in spec.children()]
        if spec.type is dict:
            return "{" + ", ".join(f"{key!r}: {part}" for key, part in zip(spec.context, parts, strict=True)) + "}"
        if spec.type in (tuple, list):
            text = ", ".join(parts)
            return f"({text}{',' * (len(parts) == 1)})" if spec.type is tuple else f"[{text}]"
        return f"{spec.type.__name__}({', '.join(parts)})" if spec.type is not None else "None"

    positional, named = spec.children()
    words = [inner(child) for child in positional.children()]
    words += [f"{key}={inner(child)}" for key, child in zip(named.context, named.children(), strict=True)]
    return f"({', '.join(words)})"


def _signed(value: Any) -> Any:
    """uint8 as int8: a compiled function knows bytes by what is done to them."""
    if isinstance(value, Tensor):
        return value.view(torch.int8) if value.dtype == torch.uint8 else value
    return value.view("int8") if str(getattr(value, "dtype", "")) == "uint8" else value


def _unsigned(value: Any, dtype: str) -> Any:
    if dtype != "uint8":
        return value
    return value.view(torch.uint8) if isinstance(value, Tensor) else value.view("uint8")


def export_module(
    model: torch.nn.Module, example_inputs: Sequence[Any], dynamic_shapes: Any = None, keywords: Mapping[str, Any] | None = None
) -> ExportedProgram:
    """`torch.export` of a module in the mode it is in. `dynamic_shapes` as torch.export takes it."""
    arguments = tuple(example_inputs) if isinstance(example_inputs, list | tuple) else (example_inputs,)
    with torch.no_grad():
        return torch.export.export(model, arguments, dict(keywords or {}), dynamic_shapes=dynamic_shapes)


def from_exported(program: ExportedProgram, read_program: Callable[[str], Any] | None = None) -> Exported:
    """The module of stage "torch" of an exported program.

    `read_program` reads the text of an `attnc::attention` (attnc.program_text.from_text). Raises `UnsupportedGraphError` where
    the program writes to its inputs or buffers, or calls what is no ATen operation.
    """
    if not _is_plain(program.graph_module):
        program = program.run_decompositions({})
    signature = program.graph_signature
    _check_outputs(signature)
    graph = program.graph
    output = next(node for node in graph.nodes if node.op == "output")
    needed = needed_nodes(output)
    kinds = {spec.arg.name: spec for spec in signature.input_specs}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]

    user_nodes = [node for node in placeholders if kinds[node.name].kind == InputKind.USER_INPUT]
    constants: dict[int, Any] = {}
    inputs: list[tuple[int, fx.Node]] = []
    for position, node in enumerate(user_nodes):
        argument = kinds[node.name].arg
        if isinstance(argument, ConstantArgument):
            constants[position] = argument.value
        elif isinstance(node.meta.get("val"), Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
            inputs.append((position, node))
        else:
            constants[position] = node.meta.get("val")
    parameters: list[tuple[fx.Node, Tensor]] = []
    for node in placeholders:
        spec = kinds[node.name]
        if spec.kind == InputKind.USER_INPUT or node not in needed:
            continue
        parameters.append((node, _held(program, spec)))

    nodes = [node for node, _ in parameters] + [node for _, node in inputs]
    block = Block(arg_types=[type_of(node) for node in nodes])
    values: dict[fx.Node, SSAValue] = {}
    for node, argument in zip(nodes, block.args, strict=True):
        argument.name_hint = node.name
        values[node] = argument
    bind_shapes(block, [(argument, node.meta["val"]) for node, argument in values.items()], program.range_constraints)
    module = ModuleOp([], {"attnc.stage": StringAttr("torch")})
    writer = GraphWriter(block, values, module, program.graph_module, read_program)
    for node in graph.nodes:
        if node.op in ("call_function", "get_attr") and node in needed:
            writer.write(node)
    returned, results = _results(output, signature, writer)
    block.add_op(func.ReturnOp(*returned))
    types = FunctionType.from_lists([a.type for a in block.args], [value.type for value in returned])
    function = func.FuncOp("forward", types, Region(block))
    held = len(parameters)
    function.attributes["attnc.parameters"] = _strings(node.name if i < held else "" for i, node in enumerate(nodes))
    function.attributes["attnc.names"] = _strings(_name(kinds[node.name], node) for node in nodes)
    module.body.block.add_op(function)
    return Exported(
        module,
        {node.name: tensor for node, tensor in parameters},
        tuple(position for position, _ in inputs),
        constants,
        results,
        program.call_spec.in_spec,
        program.call_spec.out_spec,
        tuple(_dtype_name(value.type) for value in returned),
    )


def _is_plain(module: fx.GraphModule) -> bool:
    """Whether every node of the graph, and of its subgraphs, is one that GraphWriter knows the like of, and writes nothing in
    place. torch's own clean-up of the others takes half a second."""
    for node in module.graph.nodes:
        if node.op == "get_attr" and isinstance(held := getattr(module, str(node.target), None), fx.GraphModule):
            if not _is_plain(held):
                return False
        if node.op != "call_function":
            continue
        if isinstance(node.target, torch._ops.OpOverload):
            if node.target._schema.is_mutable:
                return False
        elif not is_known(node.target):
            return False
    return True


def _strings(texts: Any) -> ArrayAttr:
    return ArrayAttr(StringAttr(text) for text in texts)


def _dtype_name(type_: Attribute) -> str:
    names = {dtype: name for name, dtype in DTYPES.items()}
    return names[type_.dtype] if isinstance(type_, VTensorType) else ""


def _name(spec: Any, node: fx.Node) -> str:
    """A parameter's own name, `layers.0.weight`; an argument's."""
    return spec.target if spec.target is not None else node.name


def _check_outputs(signature: Any) -> None:
    for spec in signature.output_specs:
        if spec.kind != OutputKind.USER_OUTPUT:
            what = spec.target or spec.arg.name
            raise UnsupportedGraphError(
                f"the program writes to {what} ({spec.kind.name.lower()})",
                remedy="return the new value instead of writing it in place",
            )


def _held(program: ExportedProgram, spec: Any) -> Tensor:
    """The tensor of a parameter, buffer or constant."""
    if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and spec.target in program.state_dict:
        return program.state_dict[spec.target].detach()
    held = program.constants.get(spec.target)
    if not isinstance(held, Tensor):
        raise UnsupportedGraphError(f"{spec.target} is {type(held).__name__}, not a tensor")
    return held.detach()


def _results(output: fx.Node, signature: Any, writer: GraphWriter) -> tuple[list[SSAValue], tuple[tuple[str, Any], ...]]:
    returned: list[SSAValue] = []
    results: list[tuple[str, Any]] = []
    (outputs,) = output.args
    assert isinstance(outputs, list | tuple)
    for value in outputs:
        if isinstance(value, fx.Node):
            results.append(("result", len(returned)))
            returned.append(writer.values[value])
        else:
            results.append(("constant", value))
    return returned, tuple(results)
