"""The body of a `tile.grid` as a task: programs run strip by strip, loops over key blocks, cases by class.

    rows before the loop      (positions, the query tile, initial carries)
    for each key block        classify; for its class: stage right-hand operands, then for each strip of rows the segments
    rows after the loop       (normalise, store)

If a product had a `where`, its result is checked after the loop; one that is not finite may be `0 * NaN` of a dead element, so
the task runs once more with the careful product. Finite results prove that nothing leaked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from xdsl.dialects.builtin import MemRefType
from xdsl.ir import Operation, SSAValue

from attnc.analysis.machine import register_tile
from attnc.codegen.llvm import leaves
from attnc.codegen.llvm.in_place import in_place
from attnc.codegen.llvm.operations import RegionEmitter
from attnc.codegen.llvm.program import Program, build_program, columns_of, is_tile, straight_line
from attnc.codegen.llvm.rows import RowEmitter
from attnc.codegen.llvm.staging import Staging, right_operand
from attnc.codegen.llvm.storage import Storage, element_of
from attnc.codegen.llvm.trim import column_bounds, trimmed
from attnc.codegen.llvm.values import BLOCK, Value, element_type, storage_bytes
from attnc.dialects import tile
from attnc.errors import LoweringError

if TYPE_CHECKING:
    from attnc.codegen.llvm.kernel import KernelEmitter


SMALL_TASK = 3
"""So many register tiles of rows are one strip."""


class BodyEmitter:
    """Emits one task, at the function's current position, for the grid coordinates in `region.values`."""

    def __init__(self, kernel: KernelEmitter, region: RegionEmitter, scratch: str, shared: str):
        self.kernel, self.region, self.f = kernel, region, region.f
        self.scratch = scratch
        self.staging = Staging(kernel, region, shared, scratch)
        strip, vectors = register_tile(kernel.target, kernel.bits)
        self.panel = vectors * kernel.width
        self.called: set[str] = set()
        self.declarations: set[str] = set()
        self.storages: dict[SSAValue, Storage] = {}
        self.careful = ""
        self.row_dim, self.task_rows = kernel.row_dimension()
        self.padded_rows = -(-self.task_rows // strip) * strip
        # The rows of a small task go together: what they read in place is then read once.
        self.strip_rows = self.padded_rows if self.padded_rows <= SMALL_TASK * strip else strip
        self.rows = RowEmitter(self)

    # -- scratch ------------------------------------------------------------------------------------------------------
    def allocate(self, value: SSAValue, task: bool, wide: bool) -> Storage:
        """Room for a tile: all rows of the task, or those of one strip. A `wide` one has padded rows that products may
        write."""
        type_ = element_of(value)
        columns = columns_of(value)
        stride = -(-columns // self.panel) * self.panel if wide or columns > 1 else 1
        rows = self.padded_rows if task else self.strip_rows
        offset = self.kernel.reserve((rows * stride + self.panel) * storage_bytes(type_))
        with self.f.at_entry():
            pointer = self.f.pointer(self.scratch, offset)
        return Storage(pointer, stride, type_, task)

    def leaf_symbols(self) -> leaves.Leaves:
        """The leaf routines that products call, declared."""
        element = self.kernel.element
        operands = "ptr, i64, ptr, i64, ptr, i64"
        symbols, _ = leaves.define(element, element, self.kernel.target)
        self.kernel.uses_products = True
        self.declarations.add(f"declare void @{symbols.dot_rows}({operands}, i64, i64, i64)")
        self.declarations.add(f"declare void @{symbols.dot_accumulate}({operands}, ptr, i64, i64, i64)")
        self.declarations.add(f"declare void @{symbols.dot_accumulate_careful}({operands}, ptr, i64, i64, i64, ptr, i64)")
        self.declarations.add(f"declare i32 @{symbols.finite}(ptr, i64, i64, i64)")
        return symbols

    # -- the task -----------------------------------------------------------------------------------------------------
    def emit_task(self) -> None:
        f, region = self.f, self.region
        block = self.kernel.grid.body.block
        flag = f.pointer(self.scratch, self.kernel.reserve(8))
        f.store("i64", "0", flag, 8)
        again = f.new_block("task.again")
        f.branch(again)
        f.place(again)
        self.careful = f.emit(f"icmp ne i64 {f.load('i64', flag, 8)}, 0")
        self.row_count = str(self.task_rows)
        if self.row_dim is not None:
            bound, start = self.kernel.grid.bounds[self.row_dim], block.args[self.row_dim]
            left = f.sub(region.scalar(bound), region.scalar(start))
            self.row_count = region.intrinsic("umin", "i64", False, [left, str(self.task_rows)])
        ops, _, alias = straight_line(block, None)
        parts: list[list[Operation] | tile.ForOp] = [[]]
        for op in ops:
            if isinstance(op, tile.ForOp):
                parts += [op, []]
            else:
                assert isinstance(parts[-1], list)
                parts[-1].append(op)
        for part in parts:
            if isinstance(part, tile.ForOp):
                self._loop(part, flag, again)
            else:
                self._straight(part, alias)

    def _straight(self, ops: list[Operation], alias: dict[SSAValue, SSAValue]) -> None:
        """Operations of the task outside any loop."""
        mine = set(ops)
        outside: set[SSAValue] = {
            result
            for op in ops
            for result in op.results
            if is_tile(result) and any(not self._within(use.operation, mine) for use in result.uses)
        }
        program = build_program(ops, [], alias, outside)
        self._scalars(program)
        self._run(program, outside, None)

    @staticmethod
    def _within(op: Operation, ops: set[Operation]) -> bool:
        current: Operation | None = op
        while current is not None:
            if current in ops:
                return True
            current = current.parent_op()
        return False

    def _scalars(self, program: Program) -> None:
        for op in program.scalars:
            self.region.emit(op)
            for result in op.results:
                self.region.depths[result] = BLOCK

    # -- loops --------------------------------------------------------------------------------------------------------
    def _loop(self, loop: tile.ForOp, flag: str, again: str) -> None:
        f, region = self.f, self.region
        block = loop.body.block
        position, *carried = block.args
        labels = tile.CLASS_NAMES if any(isinstance(op, tile.CaseOp) for op in block.ops) else (None,)
        programs: dict[str | None, Program] = {}
        for label in labels:
            ops, yielded, alias = straight_line(block, label)
            programs[label] = build_program(ops, yielded, alias, set())
        self._carries(loop, carried, list(programs.values()))
        for result, argument in zip(loop.results, carried, strict=True):
            self.storages[result] = self.storages[argument]
        region.depths[position] = BLOCK
        step = loop.step.value.data

        def inside(i: str, _: list[str]) -> None:
            region.values[position] = Value(position.type, i)
            left = f.sub(region.scalar(loop.upper), i)
            limited = region.intrinsic("umin", "i64", False, [left, str(step)])
            self._block(loop, programs, limited)

        f.loop(region.scalar(loop.lower), region.scalar(loop.upper), step, inside, hint="block")
        self._check(loop, programs, flag, again)

    def _carries(self, loop: tile.ForOp, carried: Sequence[SSAValue], programs: list[Program]) -> None:
        """Give each carried tile its place and its first value."""
        copies = []
        for n, (argument, init) in enumerate(zip(carried, loop.inits, strict=True)):
            wide = any(isinstance(program.outputs[n].owner, tile.DotOp) for program in programs)
            if argument not in self.storages:
                self.storages[argument] = self.allocate(argument, True, wide)
            copies.append((init, self.storages[argument]))
        self.rows.copy_all(copies)

    def _block(self, loop: tile.ForOp, programs: dict[str | None, Program], limited: str) -> None:
        f, region = self.f, self.region
        first = next(iter(programs.values()))
        if None in programs:
            self._scalars(first)
            self._run(first, set(), (loop, "0", limited))
            return
        # Scalars of all ways are written before the choice: they are cheap and have no effects.
        done: set[Operation] = set()
        for program in programs.values():
            for op in program.scalars:
                if op not in done:
                    done.add(op)
                    region.emit(op)
                    for result in op.results:
                        region.depths[result] = BLOCK
        classes = [op for op in loop.body.block.walk() if isinstance(op, tile.ClassifyOp)]
        if len({op.result for op in classes}) != 1:
            raise LoweringError("the body of a tile.for must classify its block exactly once")
        label_of = self._classify(classes[0])
        carried = list(loop.body.block.args[1:])
        ways: dict[object, tuple[Program, list[int]]] = {}
        for number, name in enumerate(tile.CLASS_NAMES):
            program = programs[name]
            if program.has_rows or program.outputs != carried:
                ways.setdefault(program.key, (program, []))[1].append(number)
        bounds = column_bounds(classes[0], loop) if programs["empty"].outputs == carried else None
        end = f.new_block("classified")
        blocks = [(f.new_block("class"), program, numbers) for program, numbers in ways.values()]
        targets = " ".join(f"i32 {n}, label %{label}" for label, _, numbers in blocks for n in numbers)
        f.do(f"switch i32 {label_of}, label %{end} [ {targets} ]")
        for label, program, numbers in blocks:
            f.place(label)
            start, stop = "0", limited
            if bounds is not None and tile.PARTIAL in numbers and tile.FULL not in numbers:
                start, stop = self._trimmed(classes[0], bounds, limited)
            self._run(program, set(), (loop, start, stop))
            f.branch(end)
        f.place(end)

    def _trimmed(self, op: tile.ClassifyOp, bounds: tuple[int, int], limit: str) -> tuple[str, str]:
        position = self.region.scalar(op.arguments[bounds[0]])

        def classify(first: str, last: str) -> str:
            return self._classify(op, {bounds[0]: self.f.add(position, first), bounds[1]: self.f.add(position, last)})

        return trimmed(self.f, limit, classify)

    def _classify(self, op: tile.ClassifyOp, instead: Mapping[int, str] | None = None) -> str:
        """Call the classifier, with other values `instead` of some arguments; buffers go as pointer, sizes, strides."""
        region, name = self.region, op.classifier.string_value()
        self.called.add(name)
        arguments: list[str] = []
        for n, operand in enumerate(op.arguments):
            if instead is not None and n in instead:
                arguments.append(f"i64 {instead[n]}")
            elif isinstance(operand.type, MemRefType):
                buffer = region.buffers[operand]
                arguments.append(f"ptr {buffer.pointer}")
                arguments += [f"i64 {text}" for text in (*buffer.sizes, *buffer.strides)]
            else:
                arguments.append(f"{element_type(operand.type)} {region.scalar(operand)}")
        return self.f.emit(f"call i32 @{name}({', '.join(arguments)})")

    def _check(self, loop: tile.ForOp, programs: dict[str | None, Program], flag: str, again: str) -> None:
        """After the loop: if a product with `where` is not finite, run the task again with care."""
        f = self.f
        checked = {
            n
            for program in programs.values()
            for n, output in enumerate(program.outputs)
            if isinstance(output.owner, tile.DotOp) and output.owner.live is not None
        }
        for n in sorted(checked):
            storage = self.storages[loop.body.block.args[1 + n]]
            columns = columns_of(loop.results[n])
            matrix = f"ptr {storage.pointer}, i64 {storage.stride}, i64 {self.row_count}, i64 {columns}"
            finite = f.emit(f"call i32 @{self.leaf_symbols().finite}({matrix})")
            leaked = f.emit(f"icmp eq i32 {finite}, 0")
            first_time = f.emit(f"xor i1 {self.careful}, true")
            redo, go_on = f.new_block("careful"), f.new_block("finite")
            f.branch_if(f.both(leaked, first_time), redo, go_on)
            f.place(redo)
            f.store("i64", "1", flag, 8)
            f.branch(again)
            f.place(go_on)

    # -- programs -----------------------------------------------------------------------------------------------------
    def _run(self, program: Program, outside: set[SSAValue], loop: tuple[tile.ForOp, str, str] | None) -> None:
        """Stage right-hand operands, then run every strip of rows through the segments."""
        if not program.has_rows and (loop is None or program.outputs == list(loop[0].body.block.args[1:])):
            return
        f = self.f
        panels = {}
        for dot in program.dots:
            operand, key = right_operand(dot, program.resolve)
            if key not in panels:
                panels[key] = in_place(self.staging, dot, operand, key) or self.staging.panels(operand, key)
        self.rows.begin(program, outside, loop, {dot: panels[program.resolve(dot.rhs)] for dot in program.dots})

        def strip(start: str, _: list[str]) -> None:
            left = f.sub(self.row_count, start)
            count = self.region.intrinsic("umin", "i64", False, [left, str(self.strip_rows)])
            self.rows.strip(start, count)

        f.loop("0", self.row_count, self.strip_rows, strip, hint="strip")
