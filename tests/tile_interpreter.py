"""An interpreter of the `tile` dialect in NumPy: what a kernel means, without any of how it is compiled.

    run(text, query, key, value, 0.125, slopes, out, lse, 1)      writes into out and lse

A task at a time, in any order; inside a task each tile is a whole NumPy array. Floats have the precision the IR gives them,
or are all float64 with `exact=True`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from xdsl.dialects import func, scf
from xdsl.dialects.builtin import ArrayAttr, MemRefType, ModuleOp, StringAttr, TensorType
from xdsl.ir import Attribute, Block, Operation, SSAValue
from xdsl.parser import Parser

from attnc.dialects import tile
from attnc.dialects.context import build_context
from scalar_ops import as_type, evaluate, numpy_type

Values = dict[SSAValue, Any]


def parse(text: str) -> ModuleOp:
    """The module of a text that may hold any dialect of the project."""
    module = Parser(build_context(), text).parse_module()
    module.verify()
    return module


def run(module: ModuleOp | str, *arguments: Any, kernel: str | None = None, exact: bool = False, shuffle: int = 0) -> None:
    """Runs the kernels (or the one named) in their order on NumPy arrays and numbers, in the order of the kernels' arguments.

    Those arguments that `attnc.scratch` gives the sizes of are left out: they are memory that passes from kernel to kernel.
    Outputs are arrays among them and are written in place. bf16 buffers are float32 arrays. Tasks run in an order that depends
    on the seed `shuffle`.

    Raises:
        IndexError: a `tile.gather` that is live, but out of range.
    """
    if isinstance(module, str):
        module = parse(module)
    chosen = [op for op in module.ops if isinstance(op, tile.KernelOp) and kernel in (None, op.sym_name.data)]
    arguments = (*arguments, *_between(chosen[0], arguments, exact))
    for op in chosen:
        Interpreter(module, exact, shuffle).kernel(op, arguments)


def _between(kernel: tile.KernelOp, arguments: Sequence[Any], exact: bool) -> list[np.ndarray]:
    """Memory between kernels, full of NaN; `key.2/1024` is how many times 1024 goes into the third size of
    the argument `key`, rounded up."""
    rules = kernel.attributes.get("attnc.scratch")
    if not isinstance(rules, ArrayAttr) or kernel.roles is None:
        return []
    roles = [role.data for role in kernel.roles]

    def size(field: str) -> int:
        if field.isdigit():
            return int(field)
        place, _, divisor = field.partition("/")
        role, _, dim = place.partition(".")
        return -(-arguments[roles.index(role)].shape[int(dim)] // int(divisor or 1))

    found = []
    for parameter, rule in zip(kernel.body.block.args, rules, strict=True):
        if isinstance(rule, StringAttr) and rule.data:
            assert isinstance(parameter.type, MemRefType)
            element = numpy_type(parameter.type.element_type, exact)
            found.append(np.full([size(field) for field in rule.data.split()], np.nan, element))
    return found


class Interpreter:
    """Evaluates operations; `values` maps what is in scope to arrays: () for scalars, (R, C) for tiles."""

    def __init__(self, module: ModuleOp, exact: bool, shuffle: int):
        self.functions = {op.sym_name.data: op for op in module.ops if isinstance(op, func.FuncOp)}
        self.exact = exact
        self.random = random.Random(shuffle)
        # (step, elements that are left) of the grid's dimensions and the loops around: what lies beyond them is padding.
        self.extents: list[tuple[int, int]] = []

    def kernel(self, op: tile.KernelOp, arguments: Sequence[Any]) -> None:
        block = op.body.block
        values: Values = {}
        for parameter, argument in zip(block.args, arguments, strict=True):
            if isinstance(parameter.type, MemRefType):
                assert isinstance(argument, np.ndarray) and argument.ndim == parameter.type.get_num_dims(), parameter
                values[parameter] = argument
            else:
                values[parameter] = as_type(argument, parameter.type, self.exact)
        self.block(block, values)

    def block(self, block: Block, values: Values) -> list[Any]:
        """Runs a block, and returns what its terminator hands out."""
        for op in block.ops:
            if op is block.last_op and not op.results:
                return [values[operand] for operand in op.operands]
            self.operation(op, values)
        return []

    def operation(self, op: Operation, values: Values) -> None:
        handler = getattr(self, "_" + op.name.replace(".", "_"), None)
        if handler is not None:
            results = handler(op, values)
        else:
            results = evaluate(op, [values[operand] for operand in op.operands], self.exact)
        if len(op.results) == 1 and not isinstance(results, list):
            results = [results]
        for result, value in zip(op.results, results or [], strict=True):
            values[result] = value

    # -- control ------------------------------------------------------------------------------------------------------

    def _tile_grid(self, op: tile.GridOp, values: Values) -> None:
        bounds = [int(values[bound]) for bound in op.bounds]
        steps = [int(step) for step in cast(Any, op.steps).get_values()]
        tasks = list(itertools.product(*(range(0, bound, step) for bound, step in zip(bounds, steps, strict=True))))
        self.random.shuffle(tasks)
        for task in tasks:
            inside = dict(values)
            for argument, position in zip(op.body.block.args, task, strict=True):
                inside[argument] = np.int64(position)
            self.extents = [(step, bound - at) for step, bound, at in zip(steps, bounds, task, strict=True) if step > 1]
            self.block(op.body.block, inside)

    def _tile_for(self, op: tile.ForOp, values: Values) -> list[Any]:
        lower, upper, step = int(values[op.lower]), int(values[op.upper]), int(op.step.value.data)
        carried = [values[init] for init in op.inits]
        for position in range(lower, upper, step):
            inside = dict(values)
            inside |= zip(op.body.block.args, [np.int64(position), *carried], strict=True)
            self.extents.append((step, upper - position))
            carried = self.block(op.body.block, inside)
            self.extents.pop()
        return carried

    def _scf_for(self, op: scf.ForOp, values: Values) -> list[Any]:
        carried = [values[init] for init in op.iter_args]
        for position in range(int(values[op.lb]), int(values[op.ub]), int(values[op.step])):
            inside = dict(values)
            index = as_type(position, op.body.block.args[0].type)
            inside |= zip(op.body.block.args, [index, *carried], strict=True)
            carried = self.block(op.body.block, inside)
        return carried

    def _tile_classify(self, op: tile.ClassifyOp, values: Values) -> Any:
        function = self.functions[op.classifier.root_reference.data]
        block = function.body.block
        inside: Values = dict(zip(block.args, [values[argument] for argument in op.arguments], strict=True))
        return self.block(block, inside)[0]

    def _tile_case(self, op: tile.CaseOp, values: Values) -> list[Any]:
        region = op.region_for(tile.CLASS_NAMES[int(values[op.selector])])
        return self.block(region.block, dict(values))

    # -- buffers ------------------------------------------------------------------------------------------------------

    def _tile_dim(self, op: tile.DimOp, values: Values) -> Any:
        return np.int64(values[op.buffer].shape[op.dimension.value.data])

    def _access(self, buffer: np.ndarray, indices: Sequence[SSAValue], values: Values, wrapped: bool = False):
        """Index arrays clamped into the buffer, and where they lay inside it; negative ones from the end if `wrapped`."""
        arrays = np.broadcast_arrays(*(values[index] for index in indices))
        if wrapped:
            arrays = [np.where(array < 0, array + size, array) for array, size in zip(arrays, buffer.shape, strict=True)]
        shape = arrays[0].shape if arrays[0].ndim == 2 else (1, 1)
        arrays = [np.broadcast_to(array, shape) for array in arrays]
        inside = np.ones(shape, bool)
        for array, size in zip(arrays, buffer.shape, strict=True):
            inside &= (array >= 0) & (array < size)
        clamped = tuple(np.where(inside, array, 0) for array in arrays)
        return clamped, inside

    def _tile_load(self, op: tile.LoadOp, values: Values) -> Any:
        buffer = values[op.buffer]
        indices, inside = self._access(buffer, op.indices, values)
        if not inside.any():
            element = numpy_type(_element(op.result), self.exact)
            return np.zeros(inside.shape, element)
        return as_type(np.where(inside, buffer[indices], 0), _element(op.result), self.exact)

    def _tile_store(self, op: tile.StoreOp, values: Values) -> None:
        buffer = values[op.buffer]
        indices, inside = self._access(buffer, op.indices, values)
        buffer[tuple(index[inside] for index in indices)] = np.broadcast_to(values[op.tile], inside.shape)[inside]

    def _tile_accumulate(self, op: tile.AccumulateOp, values: Values) -> None:
        buffer = values[op.buffer]
        if not op.indices:
            buffer[()] += values[op.tile].sum()
            return
        indices, inside = self._access(buffer, op.indices, values, op.wrapped is not None)
        tiles, inside = np.broadcast_arrays(values[op.tile], inside)
        indices = tuple(np.broadcast_to(index, inside.shape)[inside] for index in indices)
        np.add.at(buffer, indices, tiles[inside])

    def _tile_gather(self, op: tile.GatherOp, values: Values) -> Any:
        buffer = values[op.buffer]
        assert isinstance(op.buffer.type, MemRefType)
        if not op.indices:
            return as_type(buffer[()], op.buffer.type.element_type, self.exact)
        indices = np.broadcast_arrays(*(np.asarray(values[index]) for index in op.indices))
        live = np.asarray(True if op.live is None else values[op.live])
        wrapped = []
        for dim, (index, size) in enumerate(zip(indices, buffer.shape, strict=True)):
            index = np.where(index < 0, index + size, index)
            wrong, inside = np.broadcast_arrays((index < 0) | (index >= size), live)
            if (wrong & inside & self._not_padding(wrong.shape)).any():
                name = op.label.data if op.label is not None else "buffer"
                raise IndexError(f"index out of range in dim {dim} of {name!r}, size {size}")
            wrapped.append(np.clip(index, 0, max(size - 1, 0)))
        if 0 in buffer.shape:
            return np.zeros(indices[0].shape, numpy_type(op.buffer.type.element_type, self.exact))
        return as_type(buffer[tuple(wrapped)], op.buffer.type.element_type, self.exact)

    def _not_padding(self, shape: tuple[int, ...]) -> np.ndarray:
        """Rows and columns of a tile that lie inside the bounds of the grid and of the loops around."""
        if len(shape) != 2:
            return np.ones((), bool)
        sides = []
        for size in shape:
            left = [left for step, left in self.extents if step == size]
            sides.append(np.arange(size) < (left[-1] if left else size))
        return sides[0][:, None] & sides[1][None, :]

    def _tile_range(self, op: tile.RangeOp, values: Values) -> list[Any]:
        buffer = values[op.buffer]
        box = tuple(
            slice(max(int(values[lower]), 0), max(int(values[upper]) + 1, 0))
            for lower, upper in zip(op.lower, op.upper, strict=True)
        )
        part = buffer[box].astype(np.int64)
        limits = np.iinfo(np.int64)
        return [np.int64(part.min(initial=limits.max)), np.int64(part.max(initial=limits.min))]

    # -- tiles --------------------------------------------------------------------------------------------------------

    def _tile_iota(self, op: tile.IotaOp, values: Values) -> Any:
        shape = tile.shape_of(op.result)
        return (values[op.offset] + np.arange(max(shape), dtype=np.int64)).reshape(shape)

    def _tile_fill(self, op: tile.FillOp, values: Values) -> Any:
        return np.full(tile.shape_of(op.result), values[op.value])

    def _tile_stage(self, op: tile.StageOp, values: Values) -> Any:
        return as_type(values[op.tile], _element(op.result), self.exact)

    def _tile_map(self, op: tile.MapOp, values: Values) -> Any:
        inside = dict(values)
        inside |= zip(op.body.block.args, [values[value] for value in op.inputs], strict=True)
        (result,) = self.block(op.body.block, inside)
        return np.broadcast_to(result, tile.shape_of(op.result))

    def _tile_reduce(self, op: tile.ReduceOp, values: Values) -> Any:
        array = values[op.tile]
        if op.kind.data == "maxnum":
            return np.fmax.reduce(array, axis=1, keepdims=True, initial=-np.inf).astype(array.dtype)
        if op.kind.data == "max":
            return array.max(axis=1, keepdims=True)
        return array.sum(axis=1, keepdims=True, dtype=array.dtype)

    def _tile_dot(self, op: tile.DotOp, values: Values) -> Any:
        lhs, rhs = values[op.lhs], values[op.rhs]
        live = np.ones(lhs.shape, bool) if op.live is None else np.broadcast_to(values[op.live], lhs.shape)
        if op.transpose_lhs is not None:
            lhs, live = lhs.T, live.T
        if op.transpose_rhs is not None:
            rhs = rhs.T
        element = numpy_type(_element(op.result), self.exact)
        lhs, rhs = lhs.astype(element), rhs.astype(element)
        with np.errstate(all="ignore"):
            if live.all() or np.isfinite(rhs).all():
                product = np.where(live, lhs, 0) @ rhs
            else:
                product = np.where(live[:, :, None], lhs[:, :, None] * rhs[None], 0).sum(axis=1)
        if op.acc is not None:
            product = product + values[op.acc]
        return as_type(product, _element(op.result), self.exact)


def _element(value: SSAValue) -> Attribute:
    assert isinstance(value.type, TensorType)
    return value.type.element_type
