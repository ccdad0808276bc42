"""Row operations: loops over a strip's rows, in each row loops over its lanes, products between them.

A group of row operations is one loop over rows. Within a row, its phases follow each other; in a phase the values of the row
come first, as scalars, then one loop over the columns for all lane operations of equal width, which ends in the phase's
reductions:

    for each row                        phase 0   lanes: score mod, mask        -> row maximum
                                        phase 1   row:   new maximum, rescale
                                                  lanes: exp2                   -> row sum
                                        phase 2   row:   new sum

A lane value lives in registers within its loop; it goes to scratch only if another loop, or a product, wants it.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import IndexType
from xdsl.ir import Operation, SSAValue

from attnc.codegen.llvm.access import LaneAccess
from attnc.codegen.llvm.extents import Columns, Extents
from attnc.codegen.llvm.in_place import InPlace
from attnc.codegen.llvm.placement import Placement
from attnc.codegen.llvm.products import emit_dot, emit_sum
from attnc.codegen.llvm.program import Group, Program, columns_of, is_tile
from attnc.codegen.llvm.reductions import horizontal, neutral, step
from attnc.codegen.llvm.row_values import RowValues
from attnc.codegen.llvm.scalar import Fault, may_fault
from attnc.codegen.llvm.staging import Panels
from attnc.codegen.llvm.storage import Storage, element_of, write
from attnc.codegen.llvm.text import vector
from attnc.codegen.llvm.values import BLOCK, CONTEXT_FAULT, KERNEL, LANE, ROW, Value, element_type
from attnc.dialects import tile
from attnc.errors import LoweringError


def may_fault_in(op: Operation) -> bool:
    return isinstance(op, tile.MapOp) and any(may_fault(inner) for inner in op.body.walk())


class RowEmitter(RowValues):
    """Emits the strips of one program after another; `begin` a program, then `strip` where a strip's code belongs."""

    # -- a program ----------------------------------------------------------------------------------------------------
    def begin(
        self,
        program: Program,
        outside: set[SSAValue],
        carried: Sequence[SSAValue],
        columns: Columns | None,
        panels: dict[tile.DotOp, Panels | InPlace],
        task_level: bool,
    ) -> None:
        """Prepare to emit a program: where its values live, and all that does not depend on the row. `carried` are the tiles
        of a loop that its outputs replace row by row."""
        self.program, self.panels, self.carried = program, panels, list(carried)
        self.extents = Extents(program, columns)
        self.placement = Placement(program, self.storages, self.body.allocate, outside, self.carried, task_level)
        self.values = {}
        for segment in program.segments:
            if isinstance(segment, Group):
                for op in segment.ops:
                    if isinstance(op, tile.MapOp):
                        self._prepare(op)
        for op in program.lives:
            if isinstance(op, tile.MapOp):
                self._prepare(op)

    def _prepare(self, op: tile.MapOp) -> None:
        """Depths of a map's values; its operations above the rows are written here, before the strips."""
        for argument, value in zip(op.body.block.args, op.inputs, strict=True):
            value = self.program.resolve(value)
            source = value.owner
            if isinstance(source, tile.FillOp):
                self.region.depths[argument] = self.region.depth(source.value)
                self.region.values[argument] = self.region.values[source.value]
            else:
                self.region.depths[argument] = LANE if columns_of(value) > 1 else ROW
        self.region.assign_depths(op.body.block)
        self.region.fault = None
        self.region.emit_block(op.body.block, (KERNEL, BLOCK))

    # -- a strip ------------------------------------------------------------------------------------------------------
    def strip(self, start: str, count: str) -> None:
        """`count` rows from row `start` on, through all segments; then carries take their new values."""
        self.start, self.count = start, count
        program = self.program
        for segment in program.segments:
            if isinstance(segment, Group):
                self._group(segment)
            else:
                emit_dot(self, segment, self.panels[segment])
        if any(dot.live is not None for dot in program.sums):
            self.f.when(self.body.careful, lambda: self._lives_of_sums())
        copies = []
        for argument, output in zip(self.carried, program.outputs, strict=False):
            if output is not argument and self.storages.get(output) is not self.storages[argument]:
                copies.append((output, self.storages[argument]))
        if copies:
            self.copy_rows(copies)

    def _lives_of_sums(self) -> None:
        done: set[SSAValue] = set()
        for dot in self.program.sums:
            if dot.live is not None and (value := self.program.resolve(dot.live)) not in done:
                done.add(value)
                self.live(dot)

    def live(self, dot: tile.DotOp) -> Storage:
        """The flags of a product's `where`, made in the present strip."""
        assert dot.live is not None
        value = self.program.resolve(dot.live)
        op = value.owner
        if op not in self.program.lives:
            return self.storage(value)
        assert isinstance(op, tile.MapOp)
        if may_fault_in(op):
            raise LoweringError("tile.dot: what says `where` may not read captured buffers")
        storage, before = self.placement.live(dot), self.storages.get(value)
        self.storages[value] = storage

        def row(r: str, _: list[str]) -> None:
            self._enter_row(r)
            self.values = {}
            self._lane_loop(columns_of(value), self.extents.start(value), self.extents.extent(value), [op])

        self.f.loop("0", self.count, 1, row, hint="live")
        # Nobody else has to keep them.
        del self.storages[value]
        if before is not None:
            self.storages[value] = before
        return storage

    def sums(self) -> None:
        """After all strips: the products that sum over the rows."""
        for dot in self.program.sums:
            emit_sum(self, dot)

    # -- groups -------------------------------------------------------------------------------------------------------
    def _group(self, group: Group) -> None:
        f, region = self.f, self.region
        for op in group.ops:
            self.placement.place(op, group)
        faulty = any(may_fault_in(op) for op in group.ops)
        self.body.shared_sums.wait(group.ops)

        def row(r: str, _: list[str]) -> None:
            self._enter_row(r)
            self.values = {}
            region.fault = Fault() if faulty else None
            if region.fault is not None:
                region.fault.text = "zeroinitializer" if self.width > 1 else "false"
            for phase in range(group.phases):
                self._phase([op for op in group.ops if group.phase[op] == phase])
            if region.fault is not None:
                self._report(region.fault)

        f.loop("0", self.count, 1, row, hint="row")
        region.fault = None

    def _phase(self, ops: Sequence[Operation]) -> None:
        """First what has one value a row, then loops over the columns."""
        lanes: dict[tuple[int, str, str], list[Operation]] = {}
        for op in ops:
            columns, shown = self._columns(op)
            if columns == 1:
                self._row_op(op)
            else:
                lanes.setdefault((columns, self.extents.start(shown), self.extents.extent(shown)), []).append(op)
        for (columns, start, extent), together in lanes.items():
            self._lane_loop(columns, start, extent, together)

    def _columns(self, op: Operation) -> tuple[int, SSAValue]:
        """The width an operation works at, and the value that has it."""
        if isinstance(op, tile.AccumulateOp):
            shown = max((value for value in (op.tile, *op.indices) if is_tile(value)), key=columns_of)
        else:
            shown = op.operands[0] if isinstance(op, tile.StoreOp | tile.ReduceOp) else op.results[0]
        return columns_of(shown), shown

    # -- one value a row ----------------------------------------------------------------------------------------------
    def _row_op(self, op: Operation) -> None:
        region = self.region
        if isinstance(op, tile.MapOp):
            for argument, value in zip(op.body.block.args, op.inputs, strict=True):
                region.values[argument] = self._row_value(value)
            region.emit_block(op.body.block, (ROW,))
            last = op.body.block.last_op
            assert last is not None
            self._have(op.result, region.values[last.operands[0]])
        elif isinstance(op, tile.ReduceOp):
            self._have(op.result, self._row_value(op.tile))
        elif isinstance(op, tile.StageOp):
            self._have(op.result, self._convert(self._row_value(op.tile), op))
        elif isinstance(op, tile.LoadOp):
            self._have(op.result, self._access(op).load_scalar())
        elif isinstance(op, tile.StoreOp):
            self._access(op).store_scalar(self._row_value(op.tile))
        elif isinstance(op, tile.AccumulateOp):
            value = self._row_value(op.tile)
            access = self._access(op)
            self.f.when(self.body.first_time, lambda: access.add_scalar(value))
        else:
            raise LoweringError(f"{op.name} is not emitted for CPUs here")

    def _have(self, result: SSAValue, value: Value) -> None:
        self.local[result] = value
        if result in self.storages:
            write(self.region, self.storages[result], self._address(result), None, value)

    def _access(self, op: tile.LoadOp | tile.StoreOp | tile.AccumulateOp) -> LaneAccess:
        """How an operation reaches its elements in the present row."""
        rows: list[str | None] = []
        lanes: dict[int, SSAValue] = {}
        for d, index in enumerate(op.indices):
            if isinstance(index.type, IndexType):
                rows.append(self.region.scalar(index))
            elif columns_of(index) == 1:
                rows.append(self._row_value(index).text)
            else:
                rows.append(None)
                lanes[d] = index
        if isinstance(op, tile.AccumulateOp):
            return self.body.shared_sums.access(op, rows, lanes)
        return LaneAccess(self.region, self.region.buffers[op.buffer], rows, lanes)

    def _convert(self, value: Value, op: tile.StageOp) -> Value:
        """A staged element in the type of the stage's result."""
        source, to = element_of(op.tile), element_of(op.result)
        if source == to:
            return value
        return self.region.convert_float(value, to)

    # -- lanes --------------------------------------------------------------------------------------------------------
    def _lane_loop(self, columns: int, start: str, extent: str, ops: Sequence[Operation]) -> None:
        f, region, width = self.f, self.region, self.width
        accesses: dict[Operation, LaneAccess] = {}
        for op in ops:
            if isinstance(op, tile.MapOp):
                for argument, value in zip(op.body.block.args, op.inputs, strict=True):
                    if columns_of(value) == 1:
                        region.values[argument] = self._row_value(value)
                region.emit_block(op.body.block, (ROW,))
            elif isinstance(op, tile.LoadOp | tile.StoreOp | tile.AccumulateOp):
                accesses[op] = self._access(op)
            for value in (*op.operands, *op.results):
                if is_tile(value) and self.program.resolve(value) in self.storages:
                    self._address(self.program.resolve(value))
                elif is_tile(value) and columns_of(value) == 1 and not isinstance(op, tile.ReduceOp):
                    self._row_value(value)
        reductions = [op for op in ops if isinstance(op, tile.ReduceOp)]
        carried = [(vector(width, element_type(element_of(op.tile))), neutral(op, width)) for op in reductions]
        fault = region.fault if any(may_fault_in(op) for op in ops) else None
        if fault is not None:
            carried.append((vector(width, "i1"), str(fault.text)))
        before = dict(self.local)

        def inside(j: str, now: list[str]) -> list[str]:
            self.values = {}
            if fault is not None:
                fault.text = now[-1]
            following = []
            for op in ops:
                if isinstance(op, tile.ReduceOp):
                    following.append(self._reduce(op, j, extent, now[len(following)]))
                else:
                    self._lane_op(op, j, extent, accesses)
            return following + ([str(fault.text)] if fault is not None else [])

        end = extent
        if not extent.isdigit():
            end = f.round_up(extent, width)
        elif columns % width:
            end = str(-(-columns // width) * width)
        final = f.loop(start, end, width, inside, carried, hint="lane")
        # What was read inside the loop is not at hand after it.
        self.local, self.values = before, {}
        if fault is not None:
            fault.text = final[-1]
        for op, text in zip(reductions, final, strict=False):
            self._have(op.result, Value(element_of(op.result), horizontal(region, op, text)))

    def _lane_op(self, op: Operation, j: str, extent: str, accesses: dict[Operation, LaneAccess]) -> None:
        region = self.region
        if isinstance(op, tile.StoreOp):
            indices = {d: self._lane_value(index, j) for d, index in accesses[op].lanes.items()}
            accesses[op].store(self._lane_value(op.tile, j), indices, j, extent)
            return
        if isinstance(op, tile.AccumulateOp):
            self._accumulate(op, j, extent, accesses[op])
            return
        if isinstance(op, tile.MapOp):
            for argument, value in zip(op.body.block.args, op.inputs, strict=True):
                if columns_of(value) > 1:
                    region.values[argument] = self._lane_value(value, j)
            region.emit_block(op.body.block, (LANE,))
            last = op.body.block.last_op
            assert last is not None
            value = region.values[last.operands[0]]
        elif isinstance(op, tile.LoadOp):
            indices = {d: self._lane_value(index, j) for d, index in accesses[op].lanes.items()}
            value = accesses[op].load(indices, j, extent)
        elif isinstance(op, tile.StageOp):
            value = self._convert(self._lane_value(op.tile, j), op)
        else:
            raise LoweringError(f"{op.name} is not emitted for CPUs here")
        result = op.results[0]
        self.values[result] = value
        if result in self.storages:
            write(region, self.storages[result], self._address(result), j, value)

    def _accumulate(self, op: tile.AccumulateOp, j: str, extent: str, access: LaneAccess) -> None:
        if not access.lanes:
            raise LoweringError("tile.accumulate: no index varies along the row, so sum the row first (tile.reduce add)")
        indices = {d: self._lane_value(index, j) for d, index in access.lanes.items()}
        value = self._lane_value(op.tile, j)
        value = Value(value.type, self.region.text(value, True), True)
        for index in indices.values():
            if index.base is None:
                self.region.text(index, True)

        def add() -> None:
            # Lanes are computed afresh here: this side may not define what comes after it uses.
            texts = [(origin, origin.text) for index in indices.values() for origin in index.origins()]
            access.add(value, indices, j, extent)
            for origin, text in texts:
                origin.text = text

        self.f.when(self.body.first_time, add)

    def _reduce(self, op: tile.ReduceOp, j: str, extent: str, carried: str) -> str:
        text = self.region.text(self._lane_value(op.tile, j), True)
        columns = int(extent) if extent.isdigit() else columns_of(op.tile)
        if columns % self.width:  # (Lanes beyond the end of the keys, but in whole vectors of the block, are for the region.)
            text = self.region.mask_tail(text, element_of(op.tile), j, extent, neutral(op, self.width))
        return step(self.region, op, carried, text)

    def _report(self, fault: Fault) -> None:
        """Tell the launcher that an index was out of range."""
        f = self.f
        found = str(fault.text)
        if found == "zeroinitializer" or found == "false":
            return
        if self.width > 1:
            self.region.declarations.add(f"declare i1 @llvm.vector.reduce.or.v{self.width}i1(<{self.width} x i1>)")
            found = f.emit(f"call i1 @llvm.vector.reduce.or.v{self.width}i1(<{self.width} x i1> {found})")

        def tell() -> None:
            f.do(f"store atomic i64 1, ptr {f.pointer('%context', CONTEXT_FAULT, 'i64')} monotonic, align 8")

        f.when(found, tell)
