"""The host function of an outlined module as a program of `runtime/graph.py`: views, numbers, calls of kernels.

    %t = linalg.transpose ins(%q) …            {"op": "transpose", "ins": [0], "outs": [3], "permutation": [0, 2, 1], …}
    %s = tensor.dim %q, %c1                    {"op": "size", "ins": [0], "outs": [4], "dim": 1}
    %r = func.call @attention_0(%t, …)         {"op": "call", "kernel": 0, "ins": [3, …], "outs": [9], …}

A kernel is kept as the text of its function: which strides are 1, and what else a variant fixes, is known when a layout is
planned.
"""

from __future__ import annotations

from typing import Any, cast

from xdsl.dialects import tensor
from xdsl.dialects.arith import ConstantOp
from xdsl.dialects.builtin import (
    DYNAMIC_INDEX,
    ArrayAttr,
    FloatAttr,
    IntegerAttr,
    IntegerType,
    ModuleOp,
    StringAttr,
    TensorType,
)
from xdsl.dialects.func import CallOp, FuncOp, ReturnOp
from xdsl.dialects.linalg import ops as linalg
from xdsl.ir import Attribute, Operation, SSAValue

from attnc.codegen.host_constants import constant_bytes
from attnc.codegen.host_kernels import kernel_entry
from attnc.dialects.resources import resources_of
from attnc.errors import LoweringError
from attnc.runtime.abi import DTYPES

SCALARS = {"f64", "f32", "f16", "bf16", "index", "i64", "i32", "i16", "i8", "i1"}
REMEDY = "attnc compiles attention with layout operations, elementwise operations and reductions around it"


def host_program(module: ModuleOp, name: str | None = None) -> tuple[dict[str, Any], list[bytes]]:
    """(the program of the module's public function, or of the one called `name`; the contents of its constants).

    Raises:
        LoweringError: there is no such function, or an operation in it is none that the host can do.
    """
    functions = {op.sym_name.data: op for op in module.ops if isinstance(op, FuncOp)}
    return _Host(public_function(module, name), functions, resources_of(module)).program()


def public_function(module: ModuleOp, name: str | None = None) -> FuncOp:
    """The function that a program is made of. Raises `LoweringError` where it is not clear which."""
    found = [
        op
        for op in module.ops
        if isinstance(op, FuncOp)
        and op.body.blocks
        and (op.sym_visibility is None or op.sym_visibility.data != "private")
        and "attnc.roles" not in op.attributes
    ]
    if name is not None:
        name = name.removeprefix("@")
        there = ", ".join(f"@{op.sym_name.data}" for op in found)
        found = [op for op in found if op.sym_name.data == name]
        if not found:
            raise LoweringError(
                f"the module has no public function @{name}",
                remedy=f"name one that it has: {there}" if there else "a program is one public func.func on tensors",
            )
    if not found:
        raise LoweringError("the module has no public function", remedy="a program is one public func.func on tensors")
    if len(found) > 1:
        names = ", ".join(f"@{op.sym_name.data}" for op in found)
        raise LoweringError(f"the module has several public functions: {names}", remedy="say which by its name")
    return found[0]


def short_type(type_: Attribute) -> str:
    """The name of a scalar type in a program."""
    if isinstance(type_, IntegerType) and type_.signedness.data.value != "signless":
        return str(type_).removeprefix("s").replace("ui", "u")
    return str(type_)


class _Host:
    """Translates one function."""

    def __init__(self, function: FuncOp, functions: dict[str, FuncOp], resources: dict[str, bytes]):
        self.function, self.functions, self.resources = function, functions, resources
        self.numbers: dict[SSAValue, int] = {}
        self.steps: list[dict[str, Any]] = []
        self.kernels: list[dict[str, Any]] = []
        self.kernel_numbers: dict[str, int] = {}
        self.blobs: list[bytes] = []

    def program(self) -> tuple[dict[str, Any], list[bytes]]:
        block = self.function.body.block
        if len(self.function.body.blocks) != 1:
            raise LoweringError(f"@{self.function.sym_name.data} has branches", remedy=REMEDY)
        arguments = [self._argument(n) for n in range(len(block.args))]
        last = block.last_op
        if not isinstance(last, ReturnOp):
            raise LoweringError(f"@{self.function.sym_name.data} does not end with func.return", remedy=REMEDY)
        for op in block.ops:
            if op is not last:
                self._operation(op)
        shaping = self._shaping()
        for n, entry in enumerate(arguments):
            entry["shapes"] = n in shaping
        types = [value.type for value in last.arguments]
        program = {
            "name": self.function.sym_name.data,
            "arguments": arguments,
            "steps": self.steps,
            "kernels": self.kernels,
            "results": [self.numbers[value] for value in last.arguments],
            "result_tensors": [isinstance(type_, TensorType) for type_ in types],
            "result_types": [short_type(t.element_type if isinstance(t, TensorType) else t) for t in types],
        }
        return program, self.blobs

    def _argument(self, n: int) -> dict[str, Any]:
        argument = self.function.body.block.args[n]
        self.numbers[argument] = len(self.numbers)
        names = self.function.attributes.get("attnc.names")
        name = argument.name_hint or f"argument {n}"
        if isinstance(names, ArrayAttr) and n < len(names):
            name = cast(StringAttr, names.data[n]).data
        type_ = argument.type
        if isinstance(type_, TensorType):
            if short_type(type_.element_type) not in DTYPES:
                raise LoweringError(
                    f"argument {name} is a tensor of {type_.element_type}", remedy=f"element types are {', '.join(DTYPES)}"
                )
            return {"kind": "buffer", "name": name, "dtype": short_type(type_.element_type), "sizes": list(type_.get_shape())}
        if str(type_) not in SCALARS:
            raise LoweringError(
                f"argument {name} is of type {type_}", remedy="arguments are tensors, f32, f64, i32, i64 or index"
            )
        return {"kind": str(type_), "name": name}

    def _shaping(self) -> set[int]:
        """The values that sizes and offsets are computed from."""
        waiting: list[int] = []
        producers: dict[int, dict[str, Any]] = {}
        for step in self.steps:
            for out in step["outs"]:
                producers[out] = step
            for name in ("sizes", "offsets", "strides", "indices", "dim"):
                entries = step.get(name, [])
                entries = entries if isinstance(entries, list) else [entries]
                waiting += [int(entry[1:]) for entry in entries if isinstance(entry, str)]
        found: set[int] = set()
        while waiting:
            value = waiting.pop()
            if value not in found:
                found.add(value)
                if value in producers and producers[value]["op"] == "number":
                    waiting += producers[value]["ins"]
        return found

    # -- operations ---------------------------------------------------------------------------------------------------

    def _operation(self, op: Operation) -> None:
        step = self._step(op)
        if step is None:
            return
        outs = []
        for result in op.results:
            self.numbers[result] = len(self.numbers)
            outs.append(self.numbers[result])
        step["outs"] = outs
        step["dtypes"] = [
            short_type(cast(TensorType, r.type).element_type) for r in op.results if isinstance(r.type, TensorType)
        ]
        place = op.attributes.get("attnc.loc")
        if isinstance(place, StringAttr):
            step["place"] = place.data
        self.steps.append(step)

    def _ins(self, *values: SSAValue) -> list[int]:
        return [self.numbers[value] for value in values]

    def _step(self, op: Operation) -> dict[str, Any] | None:
        if isinstance(op, ConstantOp):
            return self._constant(op)
        if isinstance(op, tensor.DimOp):
            return {"op": "size", "ins": self._ins(op.source), "dim": f"%{self.numbers[op.index]}"}
        if isinstance(op, tensor.EmptyOp):
            return {"op": "empty", "ins": [], "sizes": self._shape(op.tensor.type, op.dynamic_sizes)}
        if isinstance(op, linalg.TransposeOp):
            permutation = [int(p) for p in op.permutation.get_values()]
            return {"op": "transpose", "ins": self._ins(op.inputs[0]), "permutation": permutation}
        if isinstance(op, linalg.BroadcastOp):
            dimensions = [int(d) for d in op.dimensions.get_values()]
            return {"op": "broadcast", "ins": self._ins(op.input, op.init), "dimensions": dimensions}
        if isinstance(op, tensor.CollapseShapeOp):
            return {"op": "collapse", "ins": self._ins(op.src), "groups": _groups(op.reassociation)}
        if isinstance(op, tensor.ExpandShapeOp):
            sizes = self._shape(op.result.type, op.dynamic_output_shape)
            return {"op": "expand", "ins": self._ins(op.src), "groups": _groups(op.reassociation), "sizes": sizes}
        if isinstance(op, tensor.CastOp):
            return {"op": "cast", "ins": self._ins(op.source), "sizes": list(cast(TensorType, op.dest.type).get_shape())}
        if isinstance(op, tensor.ExtractSliceOp):
            return {"op": "slice", "ins": self._ins(op.source), **self._slice(op, op.result.type)}
        if isinstance(op, tensor.InsertSliceOp):
            return {"op": "insert", "ins": self._ins(op.source, op.dest), **self._slice(op, op.source.type)}
        if isinstance(op, tensor.ExtractOp):
            return {"op": "extract", "ins": self._ins(op.tensor), "indices": [f"%{self.numbers[i]}" for i in op.indices]}
        if isinstance(op, CallOp):
            return self._call(op)
        if op.name.startswith(("arith.", "math.")) and not any(isinstance(r.type, TensorType) for r in op.results):
            return self._number(op)
        raise refusal(op)

    def _number(self, op: Operation) -> dict[str, Any]:
        step: dict[str, Any] = {
            "op": "number",
            "name": op.name,
            "ins": self._ins(*op.operands),
            "type": short_type(op.results[0].type),
            "types": [short_type(operand.type) for operand in op.operands],
        }
        if "predicate" in op.properties:
            step["predicate"] = cast(IntegerAttr, op.properties["predicate"]).value.data
        return step

    def _constant(self, op: ConstantOp) -> dict[str, Any]:
        value = op.value
        if isinstance(value, IntegerAttr | FloatAttr):
            type_ = short_type(op.result.type)
            return {"op": "number", "name": "arith.constant", "ins": [], "value": value.value.data, "type": type_, "types": []}
        type_ = cast(TensorType, op.result.type)
        data, splat = constant_bytes(value, type_, self.resources)
        self.blobs.append(data)
        return {"op": "constant", "ins": [], "blob": len(self.blobs) - 1, "splat": splat, "sizes": list(type_.get_shape())}

    def _shape(self, type_: Attribute, dynamic) -> list[int | str]:
        values = iter(dynamic)
        return [size if size >= 0 else f"%{self.numbers[next(values)]}" for size in cast(TensorType, type_).get_shape()]

    def _slice(self, op: tensor.ExtractSliceOp | tensor.InsertSliceOp, inner: Attribute) -> dict[str, Any]:
        lists: dict[str, list[int | str]] = {}
        for name in ("offsets", "sizes", "strides"):
            dynamic = iter(getattr(op, name))
            known = getattr(op, f"static_{name}").get_values()
            lists[name] = [f"%{self.numbers[next(dynamic)]}" if entry == _DYNAMIC else int(entry) for entry in known]
        shape = cast(TensorType, inner).get_shape()
        return {**lists, "dropped": dropped_dims(lists["sizes"], shape)}

    def _call(self, op: CallOp) -> dict[str, Any]:
        name = op.callee.string_value()
        function = self.functions.get(name)
        if function is None or not function.body.blocks:
            raise LoweringError(f"func.call of @{name}, which the module does not define", remedy=REMEDY)
        if name not in self.kernel_numbers:
            self.kernel_numbers[name] = len(self.kernels)
            self.kernels.append(kernel_entry(function))
        entry = self.kernels[self.kernel_numbers[name]]
        operands = self._ins(*op.arguments)
        step: dict[str, Any] = {"op": "call", "what": entry["what"], "kernel": self.kernel_numbers[name], "ins": operands}
        if entry["kind"] == "loop":
            inits = entry["inits"]
            step["ins"], step["inits"] = operands[: len(operands) - inits], operands[len(operands) - inits :]
        return step


_DYNAMIC = DYNAMIC_INDEX


def _groups(reassociation: ArrayAttr) -> list[list[int]]:
    return [[index.value.data for index in group] for group in cast("ArrayAttr[ArrayAttr[IntegerAttr]]", reassociation)]


def dropped_dims(sizes: list[int | str], shape: tuple[int, ...]) -> list[int]:
    """The dimensions of size 1 that a rank-reducing slice leaves out."""
    dropped: list[int] = []
    place = 0
    for d, size in enumerate(sizes):
        left = len(sizes) - d
        if size == 1 and left > len(shape) - place and (place == len(shape) or shape[place] != 1 or left > len(shape) - place):
            if place < len(shape) and shape[place] == 1 and _must_keep(sizes[d + 1 :], shape[place:]):
                place += 1
                continue
            dropped.append(d)
        else:
            place += 1
    return dropped


def _must_keep(sizes: list[int | str], shape: tuple[int, ...]) -> bool:
    """Whether the remaining sizes alone cannot be reduced to `shape`."""
    place = 0
    for size in sizes:
        if place < len(shape) and (isinstance(size, str) or shape[place] == size or shape[place] < 0):
            place += 1
        elif size != 1:
            return True
    return place < len(shape)


def refusal(op: Operation) -> LoweringError:
    """The error for an operation that is left over, by its name and the user's place."""
    place = op.attributes.get("attnc.loc")
    where = f" at {place.data}" if isinstance(place, StringAttr) else ""
    if op.name == "linalg.generic" or op.name in ("linalg.matmul", "linalg.batch_matmul"):
        return LoweringError(
            f"a product of matrices outside attention ({op.name}){where} is not compiled",
            remedy="compile the attention by itself, with the products before and after it left to torch",
        )
    return LoweringError(f"{op.name}{where} is not compiled", remedy=REMEDY)
