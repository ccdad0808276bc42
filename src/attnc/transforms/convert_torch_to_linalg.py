"""A function of torch operations on tensors becomes one of linalg, tensor and iree_linalg_ext operations.

Before:

    func.func @main(%x: !torch.vtensor<[2,?,512],f16>, …) -> !torch.vtensor<[2,?,512],f16> {
      %0 = torch.aten.view %x, %sizes : … -> !torch.vtensor<[2,?,8,64],f16>
      %1 = torch.aten.transpose.int %0, %int1, %int2 : … -> !torch.vtensor<[2,8,?,64],f16>
      %2 = torch.aten.scaled_dot_product_attention %1, %k, %v, %none, %zero, %false, %none, %false : …

After:

    func.func @main(%x: tensor<2x?x512xf16>, …) -> tensor<2x?x512xf16> {
      %0 = tensor.expand_shape %x [[0], [1], [2, 3]] output_shape [2, %s, 8, 64]
      %1 = linalg.transpose ins(%0) outs(%init) permutation = [0, 2, 1, 3]
      %2 = "iree_linalg_ext.attention"(%1, %k, %v, %scale, %init_1) …

Signed and unsigned integers become signless, bool i1; `attnc.argument_dtypes` and `attnc.result_dtypes` keep torch's names.
`attnc.loc` on an operation is the user's line. Elementwise operations, reductions and products are `linalg.generic`s; see
convert_torch_to_linalg_{layout,slices,elementwise,reductions,products,attention}.py. What none of them knows is refused, by
name and place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xdsl.dialects import arith, func, tensor
from xdsl.dialects.builtin import (
    ArrayAttr,
    DenseIntOrFPElementsAttr,
    DenseResourceAttr,
    FunctionType,
    ModuleOp,
    StringAttr,
)
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.ir.affine import AffineBinaryOpExpr, AffineBinaryOpKind, AffineConstantExpr, AffineExpr, AffineSymExpr
from xdsl.utils.exceptions import VerifyException

from attnc.dialects.torch import (
    AtenOp,
    BindSymbolicShapeOp,
    BoolType,
    ConstantBoolOp,
    ConstantDeviceOp,
    ConstantFloatOp,
    ConstantIntOp,
    ConstantNoneOp,
    ConstantStrOp,
    FlexAttentionOp,
    FloatType,
    IntType,
    ListConstructOp,
    LiteralOp,
    SymbolicIntOp,
    VTensorType,
    si64,
)
from attnc.errors import UnsupportedGraphError, UnsupportedModError
from attnc.target import Target
from attnc.transforms import simplify_torch
from attnc.transforms.convert_torch_to_linalg_attention import SDPA, flex
from attnc.transforms.convert_torch_to_linalg_elementwise import converted, elementwise, recipe
from attnc.transforms.convert_torch_to_linalg_ext_mods import entry_of, place_of, tensor_type
from attnc.transforms.convert_torch_to_linalg_ext_region import f64, i1, i64
from attnc.transforms.convert_torch_to_linalg_ext_region import index as index_type
from attnc.transforms.convert_torch_to_linalg_ext_table import Unsupported
from attnc.transforms.convert_torch_to_linalg_ext_values import CARRIED, NAMES, Number
from attnc.transforms.convert_torch_to_linalg_graph import Array, Graph, GraphValue, Size
from attnc.transforms.convert_torch_to_linalg_layout import LAYOUT
from attnc.transforms.convert_torch_to_linalg_numbers import NUMBERS
from attnc.transforms.convert_torch_to_linalg_products import PRODUCTS
from attnc.transforms.convert_torch_to_linalg_reductions import REDUCTIONS
from attnc.transforms.convert_torch_to_linalg_slices import SLICES

NAME = "convert-torch-to-linalg"

# What a builder stumbles over where an operation's arguments are not those of its schema, as in text that was edited.
_MISFITS = (TypeError, AttributeError, LookupError, ValueError, ArithmeticError, AssertionError, VerifyException)


def run(module: ModuleOp, target: Target | None = None) -> None:
    """Converts every public function, and removes the mods. Raises `UnsupportedGraphError`, and what mods raise."""
    simplify_torch.run(module, target)
    functions = {op.sym_name.data: op for op in module.ops if isinstance(op, func.FuncOp)}
    for function in functions.values():
        private = function.sym_visibility is not None and function.sym_visibility.data == "private"
        if not private and function.body.blocks and _is_torch(function):
            _Function(function, functions).convert()
    for function in functions.values():
        if any(isinstance(type_, VTensorType) for type_ in function.function_type.inputs):
            function.detach()
            function.erase()


def _is_torch(function: func.FuncOp) -> bool:
    return any(isinstance(argument.type, VTensorType) for argument in function.body.block.args) or any(
        op.name.startswith("torch.") for op in function.body.block.ops
    )


class _Function:
    """One function on its way."""

    def __init__(self, function: func.FuncOp, functions: dict[str, func.FuncOp]):
        self.function = function
        self.functions = functions
        names = function.attributes.get("attnc.names")
        self.names = [str(name.data) for name in names if isinstance(name, StringAttr)] if isinstance(names, ArrayAttr) else []
        self.graph = Graph(Block())

    def convert(self) -> None:
        old, graph = self.function.body.block, self.graph
        for position, argument in enumerate(old.args):
            new = graph.block.insert_arg(_argument_type(argument.type), position)
            new.name_hint = argument.name_hint
        self._arguments(old)
        returned: list[SSAValue] = []
        for op in list(old.ops):
            if isinstance(op, func.ReturnOp):
                returned = [self._returned(operand, op) for operand in op.operands]
                continue
            graph.location = op.attributes.get("attnc.loc")
            try:
                self._convert(op)
            except UnsupportedGraphError:
                raise
            except Unsupported as reason:
                raise _unsupported(op, f"{_spoken(op)} cannot be compiled so: {reason}") from None
            except UnsupportedModError as error:
                if error.filename is None:
                    place = place_of(op)
                    error.filename, error.line = place.get("filename"), place.get("line")
                raise
            except _MISFITS as error:
                reason = (str(error).strip().splitlines() or [""])[0]
                message = f"{_spoken(op)} does not have arguments that fit ({type(error).__name__}: {reason})"
                raise _unsupported(op, message) from error
            for result in op.results:
                self._check(op, result, graph.values.get(result))
        graph.block.add_op(func.ReturnOp(*returned))
        dtypes = {"argument": [a.type for a in old.args], "result": list(self.function.function_type.outputs)}
        for which, types in dtypes.items():
            self.function.attributes[f"attnc.{which}_dtypes"] = ArrayAttr(StringAttr(_dtype_name(type_)) for type_ in types)
        inputs = [argument.type for argument in graph.block.args]
        self.function.properties["function_type"] = FunctionType.from_lists(inputs, [value.type for value in returned])
        body = self.function.detach_region(self.function.body)
        self.function.add_region(Region(graph.block))
        body.drop_all_references()
        _remove_dead(graph.block)

    def _check(self, op: Operation, result: SSAValue, value: GraphValue) -> None:
        """That what was built is what the text says it is."""
        if not isinstance(result.type, VTensorType) or not isinstance(value, Array):
            return
        declared, found = result.type.shape, [size.static for size in value.dims]
        fits = len(declared) == len(found) and all(
            size < 0 or known is None or size == known for size, known in zip(declared, found)
        )
        if not fits or CARRIED[result.type.dtype] != CARRIED[value.dtype]:
            found = ",".join("?" if size is None else str(size) for size in found)
            raise _unsupported(op, f"{_spoken(op)} is said to give {result.type}, but gives [{found}] of {NAMES[value.dtype]}")

    # -- arguments and results ----------------------------------------------------------------------------------------

    def _arguments(self, old: Block) -> None:
        """Sizes that bind_symbolic_shape says are the same are one."""
        graph = self.graph
        expressions: dict[SSAValue, tuple[Sequence[AffineExpr], Sequence[str]]] = {}
        for op in old.ops:
            if isinstance(op, BindSymbolicShapeOp):
                symbols = [s.owner.symbol.data for s in op.symbols if isinstance(s.owner, SymbolicIntOp)]
                expressions[op.tensor] = (op.shape_expressions.data.results, symbols)
        known: dict[str, Size] = {}
        for argument, new in zip(old.args, list(graph.block.args), strict=True):
            match argument.type:
                case VTensorType() as type_:
                    results, symbols = expressions.get(argument, ((), ()))
                    dims = []
                    for d, size in enumerate(type_.shape):
                        expression = results[d] if d < len(results) else None
                        dims.append(Size(size) if size >= 0 else self._dim(new, d, expression, symbols, known))
                    graph.values[argument] = graph.array(new, type_.dtype, dims)
                case IntType():
                    size = graph.atom(graph.r.index_of(new))
                    graph.values[argument] = graph.number_of(size)
                case FloatType() | BoolType():
                    graph.values[argument] = Number(f64 if isinstance(argument.type, FloatType) else i1, None, new)

    def _dim(
        self, source: SSAValue, d: int, expression: AffineExpr | None, symbols: Sequence[str], known: dict[str, Size]
    ) -> Size:
        if expression is not None and (size := self._evaluated(expression, symbols, known)) is not None:
            return size
        r = self.graph.r
        value = r.emit(tensor.DimOp, (source, r.constant(index_type, d)), index_type)
        size = self.graph.atom(value)
        factor, symbol = _multiple(expression) if expression is not None else (None, None)
        if symbol is not None and factor is not None:
            name = symbols[symbol]
            quotient = r.integer(arith.DivUIOp, value, r.constant(index_type, factor))
            known[name] = self.graph.atom(quotient)
            quotient.name_hint = name
            return known[name] * Size(factor)
        return size

    def _evaluated(self, expression: AffineExpr, symbols: Sequence[str], known: dict[str, Size]) -> Size | None:
        match expression:
            case AffineConstantExpr():
                return Size(expression.value)
            case AffineSymExpr():
                return known.get(symbols[expression.position])
            case AffineBinaryOpExpr():
                a, b = (self._evaluated(part, symbols, known) for part in (expression.lhs, expression.rhs))
                if a is None or b is None:
                    return None
                if expression.kind == AffineBinaryOpKind.Mul:
                    return a * b
                if expression.kind == AffineBinaryOpKind.Add:
                    return self.graph.sum([a, b])
        return None

    def _returned(self, operand: SSAValue, op: Operation) -> SSAValue:
        value, graph = self.graph.values[operand], self.graph
        graph.location = None
        if isinstance(value, Array) and isinstance(operand.type, VTensorType):
            return graph.cast_to(value, tensor_type(operand.type))
        if isinstance(value, Number):
            dtype = {IntType: si64, FloatType: f64, BoolType: i1}[type(operand.type)]
            return graph.r.convert(value, dtype)
        raise _unsupported(op, f"a result of type {operand.type} cannot be returned")

    # -- operations ---------------------------------------------------------------------------------------------------

    def _convert(self, op: Operation) -> None:
        values = self.graph.values
        match op:
            case ConstantIntOp():
                values[op.result] = Number(si64, op.value.value.data)
            case ConstantFloatOp():
                values[op.result] = Number(f64, op.value.value.data)
            case ConstantBoolOp():
                values[op.result] = Number(i1, bool(op.value.value.data))
            case ConstantNoneOp():
                values[op.result] = None
            case ConstantStrOp() | ConstantDeviceOp():
                values[op.result] = op.value.data
            case ListConstructOp():
                values[op.result] = [values[element] for element in op.elements]
            case SymbolicIntOp():
                values[op.result] = None
            case BindSymbolicShapeOp():
                pass
            case LiteralOp():
                values[op.result] = self._literal(op)
            case FlexAttentionOp():
                results = flex(self.graph, op, self.functions, self.names)
                values.update(zip(op.outputs, results, strict=True))
            case AtenOp():
                built = self._aten(op)
                if len(op.results) == 1:
                    built = [built[0] if isinstance(built, list) and isinstance(op.results[0].type, VTensorType) else built]
                assert isinstance(built, list)
                values.update(zip(op.results, built))
            case _:
                raise _unsupported(op, f"{_spoken(op)} is not supported in a compiled function")

    def _literal(self, op: LiteralOp) -> Array:
        type_ = op.result.type
        assert isinstance(type_, VTensorType)
        new_type = tensor_type(type_)
        value = op.value
        dims = [Size(size) for size in type_.shape]
        if isinstance(value, DenseResourceAttr):
            new: Attribute = DenseResourceAttr(value.resource_handle, new_type)
        else:
            elements = list(value.iter_values()) if len(value) else []
            if elements and all(element == elements[0] for element in elements):
                constant = elements[0]
                assert isinstance(constant, int | float)
                return self.graph.full(type_.dtype, dims, constant)
            new = DenseIntOrFPElementsAttr(new_type, value.data)  # pyright: ignore[reportArgumentType]
        constant_op = arith.ConstantOp.create(properties={"value": new}, result_types=[new_type])
        return self.graph.array(self.graph.add(constant_op), type_.dtype, dims)

    def _aten(self, op: AtenOp) -> GraphValue:
        graph = self.graph
        name = op.name.removeprefix("torch.aten.").removeprefix("torch.")
        missing = [operand for operand in op.operands if operand not in graph.values]
        assert not missing, f"{op.name} uses what was not converted"
        arguments = [graph.values[operand] for operand in op.operands]
        types = [result.type for result in op.results if isinstance(result.type, VTensorType)]
        for table in (NUMBERS, LAYOUT, SLICES, SDPA, REDUCTIONS, PRODUCTS):
            if name in table:
                return table[name](graph, types, *arguments)
        entry = entry_of(name, op)
        if entry is None or (not types and entry.kind != "number"):
            raise _unsupported(op, f"{_spoken(op)} is not supported in a compiled function")
        if entry.kind == "elementwise":
            return self._elementwise(name, entry.build, types[0].dtype, arguments)
        if entry.kind == "number":
            return entry.build(graph.r, *arguments)
        results: list[GraphValue] = []
        for which, result in enumerate(op.results):
            results.append(recipe(graph, entry, types, arguments, which) if result.uses else None)
        return results

    def _elementwise(self, name: str, build: Any, dtype: Attribute, arguments: Sequence[Any]) -> Array:
        casts = ("_to_copy", "to.dtype", "to.dtype_layout", "to.other", "type_as")
        if name in casts and isinstance(arguments[0], Array):
            return converted(self.graph, arguments[0], dtype)
        arrays = [argument for argument in arguments if isinstance(argument, Array)]
        if not arrays:
            raise Unsupported("it has no tensor")
        return elementwise(self.graph, build, dtype, arguments)


def _argument_type(type_: Attribute) -> Attribute:
    match type_:
        case VTensorType():
            return tensor_type(type_)
        case IntType():
            return i64
        case FloatType():
            return f64
        case BoolType():
            return i1
    raise UnsupportedGraphError(f"an argument of type {type_} is not supported")


def _dtype_name(type_: Attribute) -> str:
    if isinstance(type_, VTensorType):
        return NAMES[type_.dtype]
    return {IntType: "int", FloatType: "float", BoolType: "bool"}.get(type(type_), "")


def _multiple(expression: AffineExpr) -> tuple[int | None, int | None]:
    """(factor, symbol) of `factor * symbol`."""
    if isinstance(expression, AffineSymExpr):
        return 1, expression.position
    if isinstance(expression, AffineBinaryOpExpr) and expression.kind == AffineBinaryOpKind.Mul:
        parts = (expression.lhs, expression.rhs)
        factors = [part.value for part in parts if isinstance(part, AffineConstantExpr)]
        symbols = [part.position for part in parts if isinstance(part, AffineSymExpr)]
        if factors and symbols:
            return factors[0], symbols[0]
    return None, None


def _spoken(op: Operation) -> str:
    """The operation's name as torch users know it."""
    return op.name.removeprefix("torch.") if op.name.startswith("torch.aten.") else op.name


def _unsupported(op: Operation, message: str) -> UnsupportedGraphError:
    return UnsupportedGraphError(message, **place_of(op))


def _remove_dead(block: Block) -> None:
    for op in reversed(list(block.ops)):
        if op.results and not any(result.uses for result in op.results):
            op.detach()
            op.erase()
