"""The body of a `tile.grid` as a task: programs run strip by strip, loops over key blocks, cases by class.

    rows before the loop      (positions, the query tile, initial carries)
    for each key block        classify; for its class: stage right-hand operands, then for each strip of rows the segments
    rows after the loop       (normalise, store)

A loop may have rows of its own (backward attention: a task owns keys, and walks over the queries); see `row_space`.

If a product had a `where`, its result is checked after the loop; one that is not finite may be `0 * NaN` of a dead element, so
the task runs once more with the careful product. Finite results prove that nothing leaked. (What tasks share was added to by
then, and is not again.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from xdsl.dialects.builtin import MemRefType
from xdsl.ir import Operation, SSAValue

from attnc.analysis.machine import register_tile
from attnc.codegen.llvm import leaves
from attnc.codegen.llvm.extents import Columns
from attnc.codegen.llvm.in_place import InPlace, in_place
from attnc.codegen.llvm.operations import RegionEmitter
from attnc.codegen.llvm.program import Group, Program, build_program, columns_of, is_tile, right_hand_sources, straight_line
from attnc.codegen.llvm.rows import RowEmitter
from attnc.codegen.llvm.shared_sums import SharedSums
from attnc.codegen.llvm.staging import Panels, Staging, right_operand
from attnc.codegen.llvm.storage import Storage, element_of
from attnc.codegen.llvm.trim import STRIP_PIECE, column_bounds, row_bounds, trimmed
from attnc.codegen.llvm.values import BLOCK, Value, element_type, storage_bytes
from attnc.dialects import tile
from attnc.errors import LoweringError

if TYPE_CHECKING:
    from attnc.codegen.llvm.kernel import KernelEmitter


SMALL_TASK = 3
"""So many register tiles of rows are one strip."""


@dataclass
class RowSpace:
    """Rows that a program runs over: those of the task, or those of one round of a loop. `size` of them, `padded` to whole
    register tiles, `strip` at a time; `count` of them are there (an i64). `apart`: elements between the rows of tiles that all
    of them have in scratch, beyond the row itself, so that they do not all fall into the same sets of the cache."""

    size: int
    padded: int
    strip: int
    count: str = ""
    apart: int = 0


class BodyEmitter:
    """Emits one task, at the function's current position, for the grid coordinates in `region.values`."""

    def __init__(self, kernel: KernelEmitter, region: RegionEmitter, scratch: str, shared: str):
        self.kernel, self.region, self.f = kernel, region, region.f
        self.scratch = scratch
        self.staging = Staging(kernel, region, shared, scratch)
        self.register_rows, vectors = register_tile(kernel.target, kernel.bits)
        self.panel = vectors * kernel.width
        self.called: set[str] = set()
        self.declarations: set[str] = set()
        self.storages: dict[SSAValue, Storage] = {}
        self.careful = self.first_time = ""
        self.row_dim, self.task_rows = kernel.row_dimension()
        self.space = self.task_space = self._space(self.task_rows)
        self.shared_sums = SharedSums(kernel, region, shared)
        self.task_panels: dict[tuple[SSAValue, bool], Panels] = {}
        self.rows = RowEmitter(self)

    def _space(self, size: int) -> RowSpace:
        strip = self.register_rows
        padded = -(-size // strip) * strip
        # The rows of a small task go together: what they read in place is then read once.
        return RowSpace(size, padded, padded if padded <= SMALL_TASK * strip else strip)

    @property
    def row_count(self) -> str:
        """How many rows there are (an i64)."""
        return self.space.count

    # -- scratch ------------------------------------------------------------------------------------------------------
    def allocate(self, value: SSAValue, task: bool, wide: bool) -> Storage:
        """Room for a tile: all rows of the task, or those of one strip. A `wide` one has padded rows that products may
        write."""
        type_ = element_of(value)
        columns = columns_of(value)
        stride = -(-columns // self.panel) * self.panel if wide or columns > 1 else 1
        stride += self.space.apart if task and stride > 1 else 0
        rows = self.space.padded if task else self.space.strip
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
        self.declarations.add(f"declare void @{symbols.dot_rows}({operands}, i64, i64, i64, i64)")
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
        self.first_time = self.shared_sums.first_time = f.emit(f"xor i1 {self.careful}, true")
        self.space = self.task_space
        self.space.count = str(self.task_rows)
        if self.row_dim is not None:
            bound, start = self.kernel.grid.bounds[self.row_dim], block.args[self.row_dim]
            left = f.sub(region.scalar(bound), region.scalar(start))
            self.space.count = region.intrinsic("umin", "i64", False, [left, str(self.task_rows)])
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
        dots = [op for op in self.kernel.grid.walk() if isinstance(op, tile.DotOp) and op.transpose_lhs is None]
        elsewhere = {source for dot in dots if dot not in mine for source in right_hand_sources(dot, lambda value: value)}
        program = build_program(ops, [], alias, outside, elsewhere)
        if program.sums:
            raise LoweringError("a tile.dot with a transposed left operand belongs in a tile.for that has rows of its own")
        self._scalars(program)
        self._run(program, outside, (), None, True)

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
        rows = self._row_space(loop, list(programs.values()))
        self._task_panels(loop, list(programs.values()))

        def inside(i: str, _: list[str]) -> None:
            region.values[position] = Value(position.type, i)
            self.shared_sums.round = f.emit(f"udiv i64 {f.sub(i, region.scalar(loop.lower))}, {step}")
            left = f.sub(region.scalar(loop.upper), i)
            limited = region.intrinsic("umin", "i64", False, [left, str(step)])
            if rows is None:
                self._block(loop, programs, carried, Columns(position, step, "0", limited))
            else:
                rows.count = limited
                self.space = rows
                self._block(loop, programs, (), self._task_columns())
                self.space = self.task_space
            self.shared_sums.end_round(loop)

        f.loop(region.scalar(loop.lower), region.scalar(loop.upper), step, inside, hint="block")
        self._check(loop, programs, flag, again)

    def _row_space(self, loop: tile.ForOp, programs: list[Program]) -> RowSpace | None:
        """The rows of a loop that has its own: row operations use an Rx1 iota that counts from its position. Raises
        LoweringError if it carries what is no sum over them."""
        position, *carried = loop.body.block.args
        step = loop.step.value.data
        own = False
        for program in programs:
            used = [op for segment in program.segments if isinstance(segment, Group) for op in segment.ops]
            sources = [program.resolve(operand).owner for op in used for operand in op.operands if is_tile(operand)]
            iotas = [op for op in sources if isinstance(op, tile.IotaOp) and op.offset is position]
            # One position is a row and a column alike; then a loop that carries what is no sum is one over columns.
            rows = any(tile.shape_of(op.result) == (step, 1) for op in iotas) and (step > 1 or not carried)
            own |= rows or bool(program.sums)
        if not own:
            return None
        for program in programs:
            for n, output in enumerate(program.outputs):
                value = output
                while value.owner in program.sums:
                    value = program.resolve(value.owner.acc) if value.owner.acc is not None else value  # type: ignore
                if value is not carried[n]:
                    raise LoweringError("a tile.for with rows of its own carries sums over them: tile.dot transposed ... onto")
        space = self._space(step)
        space.apart = self.kernel.width
        return space

    def _task_columns(self) -> Columns | None:
        """The task's own positions, where they are the columns of a loop's tiles."""
        if self.row_dim is None:
            return None
        position = self.kernel.grid.body.block.args[self.row_dim]
        return Columns(position, self.task_rows, "0", self.task_space.count)

    def _task_panels(self, loop: tile.ForOp, programs: list[Program]) -> None:
        """Pack right-hand operands that are the same in every round."""
        for program in programs:
            for dot in program.dots:
                operand, key = right_operand(dot, program.resolve)
                outside = operand.load.parent is not loop.body.block and operand.load.parent is self.kernel.grid.body.block
                if outside and operand.lifetime != "grid" and (key, operand.transposed) not in self.task_panels:
                    self.task_panels[key, operand.transposed] = self.staging.panels(operand, key)

    def _carries(self, loop: tile.ForOp, carried: Sequence[SSAValue], programs: list[Program]) -> None:
        """Give each carried tile its place and its first value."""
        copies = []
        for n, (argument, init) in enumerate(zip(carried, loop.inits, strict=True)):
            wide = any(isinstance(program.outputs[n].owner, tile.DotOp) for program in programs)
            if argument not in self.storages:
                self.storages[argument] = self.allocate(argument, True, wide)
            copies.append((init, self.storages[argument]))
        self.rows.copy_all(copies)

    def _block(
        self,
        loop: tile.ForOp,
        programs: dict[str | None, Program],
        replaced: Sequence[SSAValue],
        columns: Columns | None,
    ) -> None:
        """One round of a loop: `replaced` are carried tiles whose rows are the programs' own."""
        f, region = self.f, self.region
        first = next(iter(programs.values()))
        if None in programs:
            self._scalars(first)
            self._run(first, set(), replaced, columns)
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
        bounds = None
        if columns is not None and programs["empty"].outputs == carried:
            bounds = column_bounds(classes[0], columns.position, columns.count)
        end = f.new_block("classified")
        blocks = [(f.new_block("class"), program, numbers) for program, numbers in ways.values()]
        targets = " ".join(f"i32 {n}, label %{label}" for label, _, numbers in blocks for n in numbers)
        f.do(f"switch i32 {label_of}, label %{end} [ {targets} ]")
        for label, program, numbers in blocks:
            f.place(label)
            here = columns
            if bounds is not None and columns is not None and tile.PARTIAL in numbers and tile.FULL not in numbers:
                here = self._trimmed(classes[0], bounds, columns)
            self._run(program, set(), replaced, here)
            f.branch(end)
        f.place(end)

    def _trimmed(self, op: tile.ClassifyOp, bounds: tuple[int, int], columns: Columns) -> Columns:
        """The columns that live for the task, and how those of a strip are found."""
        f, position = self.f, self.region.scalar(op.arguments[bounds[0]])
        first_row = self.kernel.grid.body.block.args[self.row_dim] if self.row_dim is not None else None
        rows = None
        if first_row is not None and self.space is self.task_space and self.task_rows > self.space.strip:
            rows = row_bounds(op, first_row, self.task_rows)

        def classify(first: str, last: str, more: Mapping[int, str]) -> str:
            return self._classify(op, {bounds[0]: f.add(position, first), bounds[1]: f.add(position, last), **more})

        start, stop = trimmed(f, columns.start, columns.stop, lambda first, last: classify(first, last, {}))

        def of_strip(first: str, count: str) -> tuple[str, str]:
            assert rows is not None and first_row is not None
            begin = f.add(self.region.scalar(first_row), first)
            ends = [begin, f.sub(f.add(begin, count), 1)]
            if rows[2] is not None:
                ends = [f.emit(f"udiv i64 {end}, {self.region.scalar(rows[2])}") for end in ends]
            more = dict(zip(rows[:2], ends, strict=True))
            return trimmed(f, start, stop, lambda first, last: classify(first, last, more), STRIP_PIECE)

        return replace(columns, start=start, stop=stop, of_strip=None if rows is None else of_strip)

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
            redo, go_on = f.new_block("careful"), f.new_block("finite")
            f.branch_if(f.both(leaked, self.first_time), redo, go_on)
            f.place(redo)
            f.store("i64", "1", flag, 8)
            f.branch(again)
            f.place(go_on)

    # -- programs -----------------------------------------------------------------------------------------------------
    def _run(
        self,
        program: Program,
        outside: set[SSAValue],
        replaced: Sequence[SSAValue],
        columns: Columns | None,
        task_level: bool = False,
    ) -> None:
        """Stage right-hand operands, then run every strip of rows through the segments."""
        if not program.has_rows and (task_level or not replaced or program.outputs == list(replaced)):
            return
        f = self.f
        panels: dict[tuple[SSAValue, bool], Panels | InPlace] = dict(self.task_panels)
        chosen: dict[tile.DotOp, Panels | InPlace] = {}
        for dot in program.dots:
            operand, key = right_operand(dot, program.resolve)
            place = key, operand.transposed
            if place not in panels:
                panels[place] = in_place(self.staging, dot, operand, key) or self.staging.panels(operand, key)
            chosen[dot] = panels[place]
        self.rows.begin(program, outside, replaced, columns, chosen, task_level)

        def strip(start: str, _: list[str]) -> None:
            left = f.sub(self.row_count, start)
            count = self.region.intrinsic("umin", "i64", False, [left, str(self.space.strip)])
            if columns is not None and columns.of_strip is not None and not program.sums:
                columns.start, columns.stop = columns.of_strip(start, count)
            self.rows.strip(start, count)

        f.loop("0", self.row_count, self.space.strip, strip, hint="strip")
        self.rows.sums()
