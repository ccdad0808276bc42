"""Where a fault is: `NAME.locate(args, result)`, compiled only when a kernel has reported one.

It walks the same grid, one row and one column at a time, and evaluates those maps that can fault, from the same operations
as the kernel. The first fault in order of (grid coordinates, row, column) is written to `result`, i64[8 + grid dimensions]:

    [0] 1 if found   [1] which cause (an index into the causes returned with the text)   [2] dimension   [3] index   [4] size
    [5] row of the task   [6] position in the loop   [8...] grid coordinates

Scores are not computed here: an index that depends on a score's value is evaluated as if that were 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects.builtin import IndexType, ModuleOp, TensorType
from xdsl.ir import Operation, SSAValue

from attnc.codegen.llvm.kernel import KernelEmitter, load_arguments
from attnc.codegen.llvm.operations import RegionEmitter
from attnc.codegen.llvm.program import straight_line
from attnc.codegen.llvm.scalar import Cause, Fault, may_fault
from attnc.codegen.llvm.text import Function, float_constant
from attnc.codegen.llvm.values import Value, element_type
from attnc.dialects import tile
from attnc.target import Target

RESULT_WORDS = 16


@dataclass
class Locator:
    """The locator's text and what its causes are: a buffer's name, or None for a division."""

    text: str
    causes: list[str | None]


class _FirstFault(Fault):
    """Returns from the locator at the first fault."""

    def __init__(self, emit: _LocatorEmitter):
        super().__init__()
        self.emit = emit

    def note(self, e: RegionEmitter, outside: str, lane: bool, live: Value | None, cause: Cause) -> None:
        if live is not None:
            outside = e.f.both(outside, e.text(live, lane))
        found, go_on = e.f.new_block("found"), e.f.new_block("on")
        e.f.branch_if(outside, found, go_on)
        e.f.place(found)
        self.emit.write(cause)
        e.f.do("ret void")
        e.f.place(go_on)


class _LocatorEmitter:
    def __init__(self, kernel: tile.KernelOp, module: ModuleOp, target: Target):
        self.kernel = KernelEmitter(kernel, module, target)
        self.f = Function(f"{self.kernel.name}.locate", [("ptr", "args"), ("ptr", "result")])
        self.region = RegionEmitter(self.f, 1, target)
        self.causes: list[str | None] = []
        self.coordinates: list[str] = []
        self.row = self.position = "0"
        self.row_dim, self.rows = self.kernel.row_dimension()

    def emit(self) -> Locator:
        load_arguments(self.region, "%args", self.kernel.kernel.body.block)
        self.kernel.emit_kernel_scalars(self.region)
        grid = self.kernel.grid
        self._grid(grid, 0)
        text = self.f.finish()
        whole = "\n\n".join([text, *self.region.functions.values(), *sorted(self.region.declarations)])
        return Locator(whole + "\n", self.causes)

    def _grid(self, grid: tile.GridOp, n: int) -> None:
        steps = grid.step_values
        if n == len(steps):
            self._task(grid)
            return
        argument = grid.body.block.args[n]

        def inside(i: str, _: list[str]) -> None:
            self.region.values[argument] = Value(IndexType(), i)
            self.coordinates = [*self.coordinates[:n], i]
            if n == self.row_dim:
                self._rows(grid)
            else:
                self._grid(grid, n + 1)

        self.f.loop("0", self.region.scalar(grid.bounds[n]), steps[n], inside, hint="grid")

    def _rows(self, grid: tile.GridOp) -> None:
        """Each row by itself: what the grid counts inside of it (chunks of keys) comes after the row in the order of faults."""
        row_dim = self.row_dim
        assert row_dim is not None
        left = self.f.sub(self.region.scalar(grid.bounds[row_dim]), self.region.scalar(grid.body.block.args[row_dim]))
        count = self.region.intrinsic("umin", "i64", False, [left, str(self.rows)])

        def row(r: str, _: list[str]) -> None:
            self.row = r
            self._grid(grid, row_dim + 1)

        self.f.loop("0", count, 1, row, hint="row")

    def _task(self, grid: tile.GridOp) -> None:
        ops, _, alias = straight_line(grid.body.block, None)
        self._scalars(ops)
        self.position = "0"
        for op in ops:
            if isinstance(op, tile.ForOp):
                self._loop(op)
            elif _faulty(op):
                self._columns(op, alias, str(tile.shape_of(op.results[0])[1]))

    def _loop(self, loop: tile.ForOp) -> None:
        has_cases = any(isinstance(op, tile.CaseOp) for op in loop.body.block.ops)
        ops, _, alias = straight_line(loop.body.block, "partial" if has_cases else None)
        if not any(_faulty(op) for op in ops):
            return
        step = loop.step.value.data

        def inside(i: str, _: list[str]) -> None:
            self.region.values[loop.body.block.args[0]] = Value(IndexType(), i)
            self.position = i
            self._scalars(ops)
            left = self.f.sub(self.region.scalar(loop.upper), i)
            limit = self.region.intrinsic("umin", "i64", False, [left, str(step)])
            for op in ops:
                if _faulty(op):
                    columns = tile.shape_of(op.results[0])[1]
                    self._columns(op, alias, limit if columns == step else str(columns))

        self.f.loop(self.region.scalar(loop.lower), self.region.scalar(loop.upper), step, inside, hint="block")

    def _scalars(self, ops: list[Operation]) -> None:
        for op in ops:
            tiles = any(isinstance(value.type, TensorType) for value in (*op.operands, *op.results))
            if not tiles and not op.regions and not isinstance(op, tile.ClassifyOp):
                self.region.emit(op)

    def _columns(self, op: Operation, alias: dict[SSAValue, SSAValue], count: str) -> None:
        assert isinstance(op, tile.MapOp)
        start = self.position

        def column(j: str, _: list[str]) -> None:
            self.position = self.f.add(start, j)
            self.region.fault = _FirstFault(self)
            self._value(op.result, alias, j, {})
            self.region.fault = None

        self.f.loop("0", count, 1, column, hint="column")
        self.position = start

    def _value(self, value: SSAValue, alias: dict[SSAValue, SSAValue], j: str, known: dict[SSAValue, Value]) -> Value:
        """A tile's value in the present row and column."""
        while value in alias:
            value = alias[value]
        if value in known:
            return known[value]
        op = value.owner
        assert isinstance(value.type, TensorType)
        if isinstance(op, tile.IotaOp):
            rows, columns = tile.shape_of(value)
            moved = self.row if rows > 1 else (j if columns > 1 else "0")
            found = Value(IndexType(), self.f.add(self.region.scalar(op.offset), moved))
        elif isinstance(op, tile.FillOp):
            found = self.region.values[op.value]
        elif isinstance(op, tile.MapOp):
            for argument, given in zip(op.body.block.args, op.inputs, strict=True):
                self.region.values[argument] = self._value(given, alias, j, known)
            for inner in op.body.block.ops:
                if isinstance(inner, tile.YieldOp):
                    break
                self.region.emit(inner)
            last = op.body.block.last_op
            assert last is not None
            found = self.region.values[last.operands[0]]
        else:
            element = element_type(value.type.element_type)
            zero = "0" if element[0] == "i" else float_constant(0.0, element)
            found = Value(value.type.element_type, "false" if element == "i1" else zero)
        known[value] = found
        return found

    def write(self, cause: Cause) -> None:
        name = None if cause.buffer is None else (cause.buffer.label.data if cause.buffer.label else "capture")
        self.causes.append(name)
        fields = ["1", str(len(self.causes) - 1), str(cause.dim), cause.index, cause.size, self.row, self.position, "0"]
        for n, text in enumerate([*fields, *self.coordinates]):
            self.f.store("i64", text, self.f.pointer("%result", n, "i64"), 8)


def _faulty(op: Operation) -> bool:
    return isinstance(op, tile.MapOp) and any(may_fault(inner) for inner in op.body.walk())


def locator(kernel: tile.KernelOp, module: ModuleOp, target: Target) -> Locator:
    """The locator of a kernel that has reported a fault."""
    return _LocatorEmitter(kernel, module, target).emit()
