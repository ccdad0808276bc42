"""`tile.accumulate`: sums that several tasks share, with the same bits for any number of threads and no lock.

Tasks that may add to the same elements (they differ only in the `owners` dimensions of the grid) are a *class*; each has a
*rank* in it, in the order in which tasks are taken. They add straight into the buffer, one after the other:

    where different rounds of the loop add to different      a task waits, before it adds in round m, until the one before it in
    elements (dQ: the rows of a round)                       its class has passed round m: they follow each other down the rows
    elsewhere (a table of relative positions)                a task waits until the one before it is through

Who waits, waits for a task that was taken earlier, so somebody always runs. In the second case that would be one task at a
time, so the sum is kept in up to COPIES copies, as many as a budget allows, by the size of the buffer alone; rank modulo copies
is a part of the class then. At the end further tasks add up the copies in their order.

In shared memory: how many tasks are done; for every class and round how many tasks have passed it; the copies. All start at 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from xdsl.dialects.builtin import MemRefType
from xdsl.ir import Attribute, Operation, SSAValue

from attnc.codegen.llvm.access import LaneAccess
from attnc.codegen.llvm.operations import RegionEmitter
from attnc.codegen.llvm.text import float_constant
from attnc.codegen.llvm.values import Buffer, element_type, storage_bytes, storage_type
from attnc.dialects import tile
from attnc.errors import LoweringError

if TYPE_CHECKING:
    from attnc.codegen.llvm.kernel import KernelEmitter

COPIES = 16
COPY_BUDGET = 8 << 20
"""Bytes that the copies of one buffer may take."""
PIECE = 4096
"""Elements that a task at the end adds up."""


@dataclass(eq=False)
class Site:
    """One buffer that is summed into. All texts are scalars at the kernel's depth, but for the last three, which are the
    task's."""

    target: SSAValue
    owners: list[int]
    """The dimensions of the grid in which tasks that add to one element may differ, by any of the operations."""
    loop: tile.ForOp | None = None
    """The loop whose rounds are ordered one by one; None where tasks are ordered as wholes."""
    lag: str = "0"
    """How many rounds further the task before must be."""
    rounds: str = "0"
    classes: str = "1"
    copies: str = "1"
    elements: str = "0"
    flags: str = ""
    data: str = ""
    pieces: str = "0"
    place: str = ""
    rank: str = ""
    buffer: Buffer | None = None


@dataclass
class SharedSums:
    """All shared sums of a kernel, in one function (`plan` or `work`)."""

    kernel: KernelEmitter
    region: RegionEmitter
    shared: str = "null"
    sites: list[Site] = field(default_factory=list)
    site_of: dict[Operation, Site] = field(default_factory=dict)
    first_time: str = "true"
    round: str = "0"
    """The present round of the loop at hand."""

    # -- layout -------------------------------------------------------------------------------------------------------
    def layout(self) -> str:
        """Lay out shared memory; how many bytes, all of which must be zero. The same in `plan` and in `work`."""
        region, f = self.region, self.region.f
        offset = "64"
        with f.at_entry():
            for target, ops in accumulations(self.kernel.grid).items():
                site = Site(target, sorted({owner.value.data for op in ops for owner in op.owners}))
                self.sites.append(site)
                self.site_of.update(dict.fromkeys(ops, site))
                loop, lag = ordered_rounds(ops)
                if loop is not None and loop.lower in region.values and loop.upper in region.values:
                    step = loop.step.value.data
                    site.loop = loop
                    site.rounds = f.ceil_div(f.sub(region.scalar(loop.upper), region.scalar(loop.lower)), step)
                    if lag is not None:
                        site.lag = f.ceil_div(f.sub(region.scalar(lag), 1), step)
                for d in range(len(self.kernel.grid.bounds)):
                    if d not in site.owners:
                        site.classes = f.mul(site.classes, self.kernel.count(region, d))
                if site.loop is None and site.owners:
                    self._choose_copies(site)
                    site.classes = f.mul(site.classes, site.copies)
                site.flags = offset
                flags = f.mul(site.classes, f.mul(f.add(site.rounds, 1), 4))
                offset = f.round_up(f.add(offset, flags), 64)
            for site in self.sites:
                if site.copies != "1":
                    site.data = offset
                    bytes_ = f.mul(f.mul(site.copies, site.elements), storage_bytes(_element(site.target)))
                    kept = f.emit(f"select i1 {f.emit(f'icmp sgt i64 {site.copies}, 1')}, i64 {bytes_}, i64 0")
                    offset = f.round_up(f.add(offset, kept), 64)
        return offset if self.sites else "0"

    def _choose_copies(self, site: Site) -> None:
        region, f = self.region, self.region.f
        site.elements = "1"
        for size in region.buffers[site.target].sizes:
            site.elements = f.mul(site.elements, size)
        bytes_ = f.mul(region.intrinsic("smax", "i64", False, [site.elements, "1"]), storage_bytes(_element(site.target)))
        fit = region.intrinsic("umin", "i64", False, [f.emit(f"udiv i64 {COPY_BUDGET}, {bytes_}"), str(COPIES)])
        # No more than there are tasks in a class.
        tasks = "1"
        for d in site.owners:
            tasks = f.mul(tasks, self.kernel.count(region, d))
        fit = region.intrinsic("umin", "i64", False, [fit, tasks])
        site.copies = region.intrinsic("umax", "i64", False, [fit, "1"])
        many = f.emit(f"icmp sgt i64 {site.copies}, 1")
        site.pieces = f.emit(f"select i1 {many}, i64 {f.ceil_div(site.elements, PIECE)}, i64 0")

    def pieces(self) -> str:
        """How many tasks at the end add up copies."""
        total = "0"
        with self.region.f.at_entry():
            for site in self.sites:
                total = self.region.f.add(total, site.pieces)
        return total

    # -- in a task ----------------------------------------------------------------------------------------------------
    def begin(self, places: Sequence[str], counts: Sequence[str], order: Sequence[int]) -> None:
        """Which class a task is in, and its rank there; `places` are its grid coordinates in steps, `order` the dimensions from
        the one that changes least as tasks are taken."""
        f, region = self.region.f, self.region
        for site in self.sites:
            group, rank, last = "0", "0", "0"
            for d in order:
                if d in site.owners:
                    rank = f.add(f.mul(rank, counts[d]), places[d])
                    last = f.add(f.mul(last, counts[d]), f.sub(counts[d], 1))
                else:
                    group = f.add(f.mul(group, counts[d]), places[d])
            if self.kernel.grid.descending is not None:
                rank = f.sub(last, rank)
            site.buffer = region.buffers[site.target]
            if site.copies != "1":
                copy = f.emit(f"urem i64 {rank}, {site.copies}")
                rank = f.emit(f"udiv i64 {rank}, {site.copies}")
                group = f.add(f.mul(group, site.copies), copy)
                site.buffer = self._copy(site, copy)
            site.rank = rank
            flags = f.mul(f.mul(group, f.add(site.rounds, 1)), 4)
            site.place = f.pointer(self.shared, f.add(site.flags, flags))

    def _copy(self, site: Site, copy: str) -> Buffer:
        """A copy of the buffer, dense; the buffer itself if there is but one."""
        f, buffer = self.region.f, self.region.buffers[site.target]
        many = f.emit(f"icmp sgt i64 {site.copies}, 1")
        start = f.pointer(f.pointer(self.shared, site.data), f.mul(copy, site.elements), storage_type(buffer.element))
        pointer = f.emit(f"select i1 {many}, ptr {start}, ptr {buffer.pointer}")
        strides, dense = [], "1"
        for size, stride in reversed(list(zip(buffer.sizes, buffer.strides, strict=True))):
            strides.insert(0, stride if stride == dense else f.emit(f"select i1 {many}, i64 {dense}, i64 {stride}"))
            dense = f.mul(dense, size)
        unit = [stride == "1" for stride in strides]
        return Buffer(buffer.type, pointer, buffer.sizes, strides, unit)

    def access(self, op: tile.AccumulateOp, rows: Sequence[str | None], lanes: Mapping[int, SSAValue]) -> LaneAccess:
        """How the present row reaches its elements."""
        f, buffer = self.region.f, self.site_of[op].buffer
        assert buffer is not None
        if op.wrapped is not None:
            wrapped: list[str | None] = []
            for row, size in zip(rows, buffer.sizes, strict=True):
                if row is not None:
                    negative = f.emit(f"icmp slt i64 {row}, 0")
                    row = f.add(row, f.emit(f"select i1 {negative}, i64 {size}, i64 0"))
                wrapped.append(row)
            rows = wrapped
        access = LaneAccess(self.region, buffer, rows, lanes)
        access.wrapped = op.wrapped is not None
        return access

    # -- turns --------------------------------------------------------------------------------------------------------
    def wait(self, ops: Sequence[Operation]) -> None:
        """Before the sums among `ops` are added to: until it is this task's turn."""
        sites = [self.site_of[op] for op in ops if isinstance(op, tile.AccumulateOp)]
        sites = [site for n, site in enumerate(sites) if site.owners and site not in sites[:n]]

        def all_of_them() -> None:
            for site in sites:
                self._wait(site, self.round if site.loop is not None else "0")

        if sites:
            self.region.f.when(self.first_time, all_of_them)

    def _wait(self, site: Site, position: str) -> None:
        f = self.region.f
        if site.lag != "0":
            position = self.region.intrinsic("umin", "i64", False, [f.add(position, site.lag), site.rounds])
        self._until(f.pointer(site.place, position, "i32"), f.emit(f"trunc i64 {site.rank} to i32"))

    def _until(self, flag: str, value: str) -> None:
        """Return when what lies at `flag` is at least `value`."""
        f = self.region.f
        look, again, end = f.new_block("turn"), f.new_block("wait"), f.new_block("go")
        f.branch(look)
        f.place(look)
        now = f.emit(f"load atomic i32, ptr {flag} acquire, align 4")
        f.branch_if(f.emit(f"icmp uge i32 {now}, {value}"), end, again)
        f.place(again)
        if self.kernel.target.triple.startswith(("x86_64", "i686")):
            self.region.declarations.add("declare void @llvm.x86.sse2.pause()")
            f.do("call void @llvm.x86.sse2.pause()")
        f.branch(look)
        f.place(end)

    def _pass(self, site: Site, position: str) -> None:
        f = self.region.f
        self._wait(site, position)
        following = f.emit(f"add i32 {f.emit(f'trunc i64 {site.rank} to i32')}, 1")
        f.do(f"store atomic i32 {following}, ptr {f.pointer(site.place, position, 'i32')} release, align 4")

    def end_round(self, loop: tile.ForOp) -> None:
        """This task is through with a round of a loop, whether it had anything to add or not."""
        sites = [site for site in self.sites if site.loop is loop and site.owners]

        def all_of_them() -> None:
            for site in sites:
                self._pass(site, self.round)

        if sites:
            self.region.f.when(self.first_time, all_of_them)

    def end_task(self) -> None:
        """This task is through with everything."""
        f = self.region.f
        for site in self.sites:
            if site.owners:
                self._pass(site, site.rounds)
        if any(site.copies != "1" for site in self.sites):
            f.emit(f"atomicrmw add ptr {self.shared}, i32 1 release, align 4")

    # -- the tasks at the end ---------------------------------------------------------------------------------------------
    def merge(self, number: str, tasks: str) -> None:
        """Add up a piece of the copies, after all `tasks` are done. The pieces are those of all sites, one after the other."""
        f = self.region.f
        self._until(self.shared, f.emit(f"trunc i64 {tasks} to i32"))
        for site in self.sites:
            if site.copies == "1":
                continue
            here = f.both(f.emit(f"icmp sge i64 {number}, 0"), f.emit(f"icmp slt i64 {number}, {site.pieces}"))

            def piece(site: Site = site, number: str = number) -> None:
                self._merge_piece(site, number)

            f.when(here, piece)
            number = f.sub(number, site.pieces)

    def _merge_piece(self, site: Site, number: str) -> None:
        f, region = self.region.f, self.region
        buffer = region.buffers[site.target]
        stored = storage_type(buffer.element)
        start = f.mul(number, PIECE)
        end = region.intrinsic("umin", "i64", False, [f.add(start, PIECE), site.elements])

        def element(i: str, _: list[str]) -> None:
            first = f.pointer(f.pointer(self.shared, site.data), i, stored)

            def add(c: str, carried: list[str]) -> list[str]:
                value = f.load(stored, f.pointer(first, f.mul(c, site.elements), stored))
                return [f.emit(f"fadd {stored} {carried[0]}, {value}")]

            zero = float_constant(0.0, stored)
            (total,) = f.loop("0", site.copies, 1, add, [(stored, zero)], hint="copy")
            offset, rest = "0", i
            for d in reversed(range(len(buffer.sizes))):
                place = f.emit(f"urem i64 {rest}, {buffer.sizes[d]}") if d else rest
                rest = f.emit(f"udiv i64 {rest}, {buffer.sizes[d]}") if d else rest
                offset = f.add(offset, f.mul(place, buffer.strides[d]))
            at = f.pointer(buffer.pointer, offset, stored)
            f.store(stored, f.emit(f"fadd {stored} {f.load(stored, at)}, {total}"), at)

        f.loop(start, end, 1, element, hint="element")


def _element(buffer: SSAValue) -> Attribute:
    assert isinstance(buffer.type, MemRefType)
    if element_type(buffer.type.element_type) not in ("float", "double"):
        raise LoweringError(f"tile.accumulate: a sum is kept in f32 or f64, not {buffer.type.element_type}")
    return buffer.type.element_type


def accumulations(grid: tile.GridOp) -> dict[SSAValue, list[tile.AccumulateOp]]:
    """The shared sums of a kernel, by the buffer."""
    found: dict[SSAValue, list[tile.AccumulateOp]] = {}
    for op in grid.body.walk():
        if isinstance(op, tile.AccumulateOp):
            found.setdefault(op.buffer, []).append(op)
    return found


def loop_of(op: Operation) -> tile.ForOp | None:
    """The loop around an operation."""
    parent = op.parent_op()
    while parent is not None and not isinstance(parent, tile.ForOp):
        parent = parent.parent_op()
    return parent


def ordered_rounds(ops: Sequence[tile.AccumulateOp]) -> tuple[tile.ForOp | None, SSAValue | None]:
    """The loop in whose rounds all of `ops`, sums into one buffer, add to different elements; and a number s, if rounds must
    be about s rows apart for that. That is so where all have, in the same dimension of the buffer, the position of the row in
    the loop, or its quotient by s; with the remainder in another dimension, no two rows share an element."""
    loop = loop_of(ops[0])
    if loop is None or any(loop_of(op) is not loop for op in ops):
        return None, None
    known = [{d: part for d, index in enumerate(op.indices) if (part := _part(index, loop)) is not None} for op in ops]
    shared = {d: part for d, part in known[0].items() if all(other.get(d) == part for other in known)}
    divisors = [divisor for kind, divisor in shared.values() if kind == "quotient"]
    if any(kind == "position" for kind, _ in shared.values()):
        return loop, None
    for divisor in divisors:
        return loop, None if ("remainder", divisor) in shared.values() else divisor
    return None, None


def _part(index: SSAValue, loop: tile.ForOp) -> tuple[str, SSAValue | None] | None:
    """What an index says of the row's position in a loop: all of it, or its quotient or remainder by a number."""
    if _counts_rows(index, loop):
        return "position", None
    source = index.owner
    if not isinstance(source, tile.MapOp) or len(source.inputs) != 1 or not _counts_rows(source.inputs[0], loop):
        return None
    inner = {operation.name: operation for operation in source.body.block.ops}
    argument = source.body.block.args[0]
    for name, kind in (("arith.divui", "quotient"), ("arith.remui", "remainder")):
        if name in inner and inner[name].operands[0] is argument and set(inner) <= {name, "arith.addi", "tile.yield"}:
            return kind, inner[name].operands[1]
    return None


def _counts_rows(value: SSAValue, loop: tile.ForOp) -> bool:
    source = value.owner
    return (
        isinstance(source, tile.IotaOp)
        and source.offset is loop.body.block.args[0]
        and tile.shape_of(value) == (loop.step.value.data, 1)
    )
