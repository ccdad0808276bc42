"""Right-hand operands of products, packed into panels: by whichever thread needs one first, once for everybody.

A `tile.stage ... for grid` owns a slot for each block of the buffer it reads (each batch, head and block of keys). A slot
has a flag in shared memory: 0 untouched, 1 being packed, 2 ready. Who finds 0 packs; who finds 1 waits. So there are no
packing tasks to order, and blocks that no query looks at are never read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from xdsl.dialects.builtin import BFloat16Type, IndexType, MemRefType, TensorType
from xdsl.ir import SSAValue

from attnc.analysis.machine import register_tile
from attnc.codegen.llvm import leaves, leaves_pairs
from attnc.codegen.llvm.operations import RegionEmitter
from attnc.codegen.llvm.program import right_hand_sources
from attnc.codegen.llvm.values import Buffer, element_type, storage_type
from attnc.dialects import tile
from attnc.errors import LoweringError

if TYPE_CHECKING:
    from attnc.codegen.llvm.kernel import KernelEmitter


@dataclass
class Operand:
    """A right-hand side: `buffer[indices]`, rows × columns, of which index `row_dim` runs with the rows from `row_offset` and
    index `column_dim` with the columns; all others are scalars."""

    load: tile.LoadOp
    lifetime: str
    rows: int
    columns: int
    transposed: bool
    scalars: list[tuple[int, SSAValue]]
    row_dim: int | None
    row_offset: SSAValue | None
    column_dim: int | None
    column_offset: SSAValue | None
    pairs: bool = False
    """Staged as bf16: words of two columns (`leaves_pairs`)."""

    @property
    def depth(self) -> int:
        """How many rows of a panel a transposed operand makes."""
        return self.columns // 2 if self.pairs else self.columns


@dataclass
class Slots:
    """Where a shared operand's blocks lie: byte offsets into shared memory, at the kernel's depth."""

    flags: str
    data: str
    bytes_each: str
    panel_stride: str
    capacity: str


@dataclass
class Panels:
    """A packed operand as the products read it."""

    pointer: str
    stride: str


def right_operand(dot: tile.DotOp, resolve) -> tuple[Operand, SSAValue]:
    """What a product's right-hand side is made from, and the value that stands for it (its key)."""
    value = key = resolve(dot.rhs)
    lifetime = "none"
    for source in right_hand_sources(dot, resolve):
        if isinstance(source, tile.StageOp):
            lifetime = source.lifetime.data
        value = source.results[0]
    load = value.owner
    if not isinstance(load, tile.LoadOp):
        raise LoweringError("the right-hand operand of tile.dot must be a tile.load, staged or not")
    rows, columns = tile.shape_of(load.result)
    types = [cast(TensorType, side.type).element_type for side in (dot.lhs, dot.rhs)]
    pairs = all(isinstance(type_, BFloat16Type) for type_ in types)
    operand = Operand(load, lifetime, rows, columns, dot.transpose_rhs is not None, [], None, None, None, None, pairs)
    if pairs and (columns % 2 or not operand.transposed):
        raise LoweringError("a right-hand operand in bf16 must be read transposed, and have an even number of columns")
    for d, index in enumerate(load.indices):
        index = resolve(index)
        if isinstance(index.type, IndexType):
            operand.scalars.append((d, index))
            continue
        iota = index.owner
        if not isinstance(iota, tile.IotaOp):
            raise LoweringError("the indices of a right-hand operand must be scalars and tile.iota")
        r, c = tile.shape_of(index)
        if r > 1:
            operand.row_dim, operand.row_offset = d, iota.offset
        elif c > 1:
            operand.column_dim, operand.column_offset = d, iota.offset
        else:
            operand.scalars.append((d, iota.offset))
    return operand, key


def source_type(buffer: Buffer) -> str:
    """The element type of a buffer by the name that leaf routines have for it."""
    return "bfloat" if isinstance(buffer.element, BFloat16Type) else element_type(buffer.element)


class Staging:
    """Packs right-hand operands, into shared slots or into a thread's own scratch."""

    def __init__(self, kernel: KernelEmitter, region: RegionEmitter, shared: str = "null", scratch: str = "null"):
        self.kernel, self.region, self.shared, self.scratch = kernel, region, shared, scratch
        self.slots: dict[SSAValue, Slots] = {}
        self.element = kernel.element
        self.bytes = kernel.bits // 8
        _, vectors = register_tile(kernel.target, kernel.bits)
        self.panel = vectors * kernel.width
        self.own: dict[tuple[SSAValue, bool], int] = {}

    # -- layout -------------------------------------------------------------------------------------------------------
    def layout(self, region: RegionEmitter, offset: str = "0") -> tuple[str, str]:
        """Lay out the shared slots, after `offset` bytes that must be zero; (bytes that must be zero, all bytes). The same in
        `plan` and in `work`."""
        f = region.f
        operands: dict[SSAValue, Operand] = {}
        for op in self.kernel.kernel.walk():
            if isinstance(op, tile.DotOp) and op.transpose_lhs is None:
                operand, key = right_operand(op, lambda value: value)
                if operand.lifetime == "grid":
                    operands.setdefault(key, operand)
        with f.at_entry():
            counts = {}
            for key, operand in operands.items():
                counts[key] = self._slot_count(region, operand)
                self.slots[key] = Slots(offset, "", "", "", "")
                offset = f.add(offset, f.mul(counts[key], 4))
            zero_bytes = offset = f.round_up(offset, 64)
            for key, operand in operands.items():
                slots = self.slots[key]
                slots.data = offset
                slots.capacity, slots.panel_stride, slots.bytes_each = self._slot_shape(region, operand)
                offset = f.add(offset, f.mul(counts[key], slots.bytes_each))
        return zero_bytes, offset

    def _extents(self, region: RegionEmitter, operand: Operand) -> list[str]:
        """How many slots in each direction: the scalar indices', then the blocks of rows and of columns."""
        f = region.f
        sizes = region.buffers[operand.load.buffer].sizes
        extents = [sizes[d] for d, _ in operand.scalars]
        for d, step in ((operand.row_dim, operand.rows), (operand.column_dim, operand.columns)):
            if d is not None:
                extents.append(f.ceil_div(sizes[d], step))
        return extents

    def _slot_count(self, region: RegionEmitter, operand: Operand) -> str:
        count = "1"
        for extent in self._extents(region, operand):
            count = region.f.mul(count, extent)
        return count

    def _slot_shape(self, region: RegionEmitter, operand: Operand) -> tuple[str, str, str]:
        """(rows a slot holds, panel stride in elements, bytes). A buffer with fewer rows than a block has small slots."""
        f = region.f
        capacity = str(operand.rows)
        if operand.row_dim is not None:
            size = region.buffers[operand.load.buffer].sizes[operand.row_dim]
            capacity = region.intrinsic("umin", "i64", False, [size, str(operand.rows)])
        if operand.transposed:
            stride = str(operand.depth * self.panel)
            panels = f.ceil_div(capacity, self.panel)
        else:
            stride = f.mul(capacity, self.panel)
            panels = str(-(-operand.columns // self.panel))
        elements = f.mul(panels, stride)
        rounded = f.round_up(f.mul(elements, self.bytes), 64)
        return capacity, stride, rounded

    # -- use ----------------------------------------------------------------------------------------------------------
    def panels(self, operand: Operand, key: SSAValue) -> Panels:
        """The operand, packed."""
        region, f = self.region, self.region.f
        if operand.lifetime != "grid":
            return self._own_panels(operand, key)
        slots = self.slots[key]
        slot = "0"
        positions = [region.scalar(value) for _, value in operand.scalars]
        for offset, step in ((operand.row_offset, operand.rows), (operand.column_offset, operand.columns)):
            if offset is not None:
                positions.append(f.emit(f"udiv i64 {region.scalar(offset)}, {step}"))
        for position, extent in zip(positions, self._extents(region, operand), strict=True):
            slot = f.add(f.mul(slot, extent), position)
        flag = f.pointer(self.shared, f.add(slots.flags, f.mul(slot, 4)))
        data = f.pointer(self.shared, f.add(slots.data, f.mul(slot, slots.bytes_each)))
        self._acquire(flag, lambda: self._pack(operand, data, slots.panel_stride, slots.capacity, slots.bytes_each))
        return Panels(data, slots.panel_stride)

    def _acquire(self, flag: str, pack: Callable[[], None]) -> None:
        """Return when the flag is 2, packing if nobody has begun."""
        f = self.region.f
        claim, packing, waiting, look, end = (f.new_block(h) for h in ("claim", "pack", "wait", "look", "packed"))
        first = f.emit(f"load atomic i32, ptr {flag} acquire, align 4")
        f.branch_if(f.emit(f"icmp eq i32 {first}, 2"), end, claim)
        f.place(claim)
        pair = f.emit(f"cmpxchg ptr {flag}, i32 0, i32 1 acquire monotonic, align 4")
        f.branch_if(f.emit(f"extractvalue {{ i32, i1 }} {pair}, 1"), packing, waiting)
        f.place(packing)
        pack()
        f.do(f"store atomic i32 2, ptr {flag} release, align 4")
        f.branch(end)
        f.place(waiting)
        f.branch(look)
        f.place(look)
        if self.kernel.target.triple.startswith(("x86_64", "i686")):
            self.region.declarations.add("declare void @llvm.x86.sse2.pause()")
            f.do("call void @llvm.x86.sse2.pause()")
        now = f.emit(f"load atomic i32, ptr {flag} acquire, align 4")
        f.branch_if(f.emit(f"icmp eq i32 {now}, 2"), end, look)
        f.place(end)

    def _own_panels(self, operand: Operand, key: SSAValue) -> Panels:
        """Pack into this thread's scratch, afresh each time."""
        rows = operand.rows
        if operand.transposed:
            stride = operand.depth * self.panel
            elements = -(-rows // self.panel) * stride
        else:
            stride = rows * self.panel
            elements = -(-operand.columns // self.panel) * stride
        place = key, operand.transposed
        if place not in self.own:
            self.own[place] = self.kernel.reserve(elements * self.bytes)
        pointer = self.region.f.pointer(self.scratch, self.own[place])
        self._pack(operand, pointer, str(stride), str(rows), str(elements * self.bytes))
        return Panels(pointer, str(stride))

    def _pack(self, operand: Operand, destination: str, panel_stride: str, capacity: str, size: str) -> None:
        """Copy and convert what lies inside the buffer; the rest of the block is zero. `size`: the destination's bytes."""
        region, f = self.region, self.region.f
        buffer = region.buffers[operand.load.buffer]
        assert isinstance(operand.load.buffer.type, MemRefType) and isinstance(operand.load.result.type, TensorType)
        offset, valid, row_stride = self.corner(operand, capacity)
        column_stride = "0"
        columns = str(operand.columns)
        if operand.column_dim is not None and operand.column_offset is not None:
            first = region.scalar(operand.column_offset)
            column_stride = buffer.strides[operand.column_dim]
            offset = f.add(offset, f.mul(first, column_stride))
            if not (first == "0" and buffer.sizes[operand.column_dim] == columns):
                if operand.pairs:
                    raise LoweringError("a right-hand operand in bf16 must have all its columns in one block")
                left = region.intrinsic("smin", "i64", False, [f.sub(buffer.sizes[operand.column_dim], first), columns])
                columns = region.intrinsic("smax", "i64", False, [left, "0"])
                self._clear_if(f.emit(f"icmp ne i64 {columns}, {operand.columns}"), destination, size)
        stored, source = storage_type(buffer.element), source_type(buffer)
        symbols, _ = leaves.define(source, self.element, self.kernel.target)
        symbol = symbols.pack_rhs_transposed if operand.transposed else symbols.pack_rhs
        self.kernel.pack_sources.add(source)
        if operand.pairs:
            symbol = leaves_pairs.symbols(self.kernel.target)[1]
        region.declarations.add(f"declare void @{symbol}(ptr, i64, i64, ptr, i64, i64, i64, i64)")
        pointer = f.pointer(buffer.pointer, offset, stored)
        f.do(
            f"call void @{symbol}(ptr {pointer}, i64 {row_stride}, i64 {column_stride}, ptr {destination}, i64 {panel_stride}, "
            f"i64 {valid}, i64 {capacity}, i64 {columns})"
        )

    def corner(self, operand: Operand, capacity: str) -> tuple[str, str, str]:
        """Where the operand begins in its buffer, how many of its rows (`capacity` at most) lie inside, and their stride."""
        region, f = self.region, self.region.f
        buffer = region.buffers[operand.load.buffer]
        valid, offset, inside = str(operand.rows), "0", "true"
        for d, value in operand.scalars:
            position = region.scalar(value)
            inside = f.both(inside, f.emit(f"icmp ult i64 {position}, {buffer.sizes[d]}"))
            offset = f.add(offset, f.mul(position, buffer.strides[d]))
        row_stride = "0"
        if operand.row_dim is not None and operand.row_offset is not None:
            first = region.scalar(operand.row_offset)
            left = f.sub(buffer.sizes[operand.row_dim], first)
            left = region.intrinsic("smin", "i64", False, [left, capacity])
            valid = region.intrinsic("smax", "i64", False, [left, "0"])
            row_stride = buffer.strides[operand.row_dim]
            offset = f.add(offset, f.mul(first, row_stride))
        if inside != "true":
            valid = f.emit(f"select i1 {inside}, i64 {valid}, i64 0")
        return offset, valid, row_stride

    def _clear_if(self, ragged: str, destination: str, size: str) -> None:
        self.region.declarations.add("declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)")
        clear = f"call void @llvm.memset.p0.i64(ptr {destination}, i8 0, i64 {size}, i1 false)"
        self.region.f.when(ragged, lambda: self.region.f.do(clear))
