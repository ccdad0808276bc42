"""`tile.load` and `tile.store` in a row: the row's part of the address is a scalar, lanes run along one index.

Where lanes run with step 1 along a dimension of stride 1, a load is a vector load; else a gather. What lies outside the
buffer is not touched: it reads as zero and is not written. Adding to elements is the same: a vector of neighbours at once, else
one after the other, as several lanes may want one element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from xdsl.ir import SSAValue

from attnc.codegen.llvm.gather import is_run
from attnc.codegen.llvm.operations import RegionEmitter
from attnc.codegen.llvm.text import splat_constant, vector
from attnc.codegen.llvm.values import Buffer, Value, element_type, storage_type


class LaneAccess:
    """Access to a buffer in one row. `rows[d]` is the scalar index of dimension d, None where it varies with the lane
    (`lanes`)."""

    def __init__(self, region: RegionEmitter, buffer: Buffer, rows: Sequence[str | None], lanes: Mapping[int, SSAValue]):
        self.region, self.f, self.buffer, self.lanes = region, region.f, buffer, lanes
        self.wrapped = False
        self.stored = storage_type(buffer.element)
        f = self.f
        self.inside, offset = "true", "0"
        for d, row in enumerate(rows):
            if row is None:
                continue
            within = f.emit(f"icmp ult i64 {row}, {buffer.sizes[d]}")
            self.inside = within if self.inside == "true" else f.both(self.inside, within)
            part = row if buffer.unit[d] else f.mul(row, buffer.strides[d])
            offset = part if offset == "0" else f.add(offset, part)
        # Outside, the address would be wild; nothing is read there, but keep it tame.
        offset = offset if self.inside == "true" else f.emit(f"select i1 {self.inside}, i64 {offset}, i64 0")
        self.pointer = f.pointer(buffer.pointer, offset, self.stored)

    # -- one element --------------------------------------------------------------------------------------------------
    def load_scalar(self) -> Value:
        zero = "zeroinitializer" if self.stored in ("float", "double", "half") else "0"
        zero = "0.0" if self.stored in ("float", "double") else ("0xH0000" if self.stored == "half" else zero)

        def take() -> list[str]:
            return [self.f.load(self.stored, self.pointer)]

        text = self.f.when(self.inside, take, lambda: [zero], [self.stored])[0]
        if element_type(self.buffer.element) == "i1":
            text = self.f.emit(f"icmp ne i8 {text}, 0")
        return Value(self.buffer.element, text)

    def store_scalar(self, value: Value) -> None:
        text = self._as_stored(value, False)
        self.f.when(self.inside, lambda: self.f.store(self.stored, text, self.pointer))

    def add_scalar(self, value: Value) -> None:
        """Add to one element."""
        text = self._converted(value)
        self.f.when(self.inside, lambda: self._add_at(self.pointer, text))

    def _add_at(self, pointer: str, text: str) -> None:
        f = self.f
        f.store(self.stored, f.emit(f"fadd {self.stored} {f.load(self.stored, pointer)}, {text}"), pointer)

    def _converted(self, value: Value) -> str:
        """What is added, in the buffer's type."""
        if value.type != self.buffer.element:
            value = self.region.convert_float(value, self.buffer.element)
        return self.region.text(value, value.lane)

    # -- lanes --------------------------------------------------------------------------------------------------------
    def _run(self, indices: Mapping[int, Value]) -> tuple[int, str] | None:
        """The dimension along which lanes are neighbours in memory, if so, and the first lane's index."""
        if len(indices) == 1:
            ((d, index),) = indices.items()
            if index.base is not None and index.step == 1 and self.buffer.unit[d]:
                return d, index.base
        return None

    def _run_at(self, d: int, base: str) -> tuple[str, str]:
        """The address of a run of lanes along dimension `d`, and whether all of it lies in the buffer."""
        f, size = self.f, self.buffer.sizes[d]
        first = f.emit(f"icmp ult i64 {base}, {size}")
        pointer = f.pointer(self.pointer, f.emit(f"select i1 {first}, i64 {base}, i64 0"), self.stored)
        last = f.emit(f"icmp sle i64 {f.add(base, self.region.width)}, {size}")
        return pointer, f.both(f.both(last, first), self.inside)

    def _mask(self, indices: Mapping[int, Value], j: str, extent: str) -> str:
        """Which lanes exist: those before `extent` whose indices lie in the buffer, if the row does."""
        region, f, width = self.region, self.f, self.region.width
        mask = f.splat(self.inside, width, "i1")
        if not extent.isdigit() or int(extent) % width:
            mask = f.emit(f"and {vector(width, 'i1')} {mask}, {region.lanes_below(j, extent)}")
        for d, index in indices.items():
            text = region.text(index, True)
            size = f.splat(self.buffer.sizes[d], width, "i64")
            within = f.emit(f"icmp ult {vector(width, 'i64')} {text}, {size}")
            mask = f.emit(f"and {vector(width, 'i1')} {mask}, {within}")
        return mask

    def load(self, indices: Mapping[int, Value], j: str, extent: str) -> Value:
        """A vector of elements from column `j` on; zero where there is none."""
        f, region, width = self.f, self.region, self.region.width
        type_ = vector(width, self.stored)
        zero = "zeroinitializer" if width > 1 else ("0" if self.stored[0] == "i" else "0.0")
        mask = self._mask(indices, j, extent)
        run = self._run(indices)
        if run is not None:
            pointer, whole = self._run_at(*run)

            def some() -> list[str]:
                return [self._masked_load(type_, pointer, mask, zero)]

            text = f.when(whole, lambda: [f.load(type_, pointer)], some, [type_])[0]
        else:
            pointers = self._pointers(indices)
            name = f"llvm.masked.gather.{self._mangled()}.v{width}p0"
            region.declarations.add(f"declare {type_} @{name}(<{width} x ptr>, i32, <{width} x i1>, {type_})")
            text = f.emit(f"call {type_} @{name}(<{width} x ptr> {pointers}, i32 1, <{width} x i1> {mask}, {type_} {zero})")
        if element_type(self.buffer.element) == "i1":
            text = f.emit(f"icmp ne {type_} {text}, {splat_constant('0', width, 'i8')}")
        return Value(self.buffer.element, text, True)

    def store(self, value: Value, indices: Mapping[int, Value], j: str, extent: str) -> None:
        """Write a vector of elements from column `j` on."""
        f, region, width = self.f, self.region, self.region.width
        type_ = vector(width, self.stored)
        text = self._as_stored(value, True)
        mask = self._mask(indices, j, extent)
        run = self._run(indices)
        if run is not None:
            pointer, inside = self._run_at(*run)
            whole = f.both(inside, f.emit(f"icmp sle i64 {f.add(j, width)}, {extent}"))

            def some() -> None:
                name = f"llvm.masked.store.{self._mangled()}.p0"
                region.declarations.add(f"declare void @{name}({type_}, ptr, i32, <{width} x i1>)")
                f.do(f"call void @{name}({type_} {text}, ptr {pointer}, i32 1, <{width} x i1> {mask})")

            f.when(whole, lambda: f.store(type_, text, pointer), some)
            return
        pointers = self._pointers(indices)
        name = f"llvm.masked.scatter.{self._mangled()}.v{width}p0"
        region.declarations.add(f"declare void @{name}({type_}, <{width} x ptr>, i32, <{width} x i1>)")
        f.do(f"call void @{name}({type_} {text}, <{width} x ptr> {pointers}, i32 1, <{width} x i1> {mask})")

    def add(self, value: Value, indices: Mapping[int, Value], j: str, extent: str) -> None:
        """Add a vector of elements, those from column `j` on."""
        f, region, width = self.f, self.region, self.region.width
        text = self._converted(value)
        type_ = vector(width, self.stored)
        if len(indices) == 1 and width > 1:
            ((d, index),) = indices.items()
            if index.base is not None and index.step in (1, -1) and self.buffer.unit[d]:
                last = f.add(index.base, index.step * (width - 1))
                low, high = (index.base, last) if index.step == 1 else (last, index.base)
                if self.wrapped:
                    negative = f.emit(f"icmp slt i64 {high}, 0")
                    move = f.emit(f"select i1 {negative}, i64 {self.buffer.sizes[d]}, i64 0")
                    low, high = f.add(low, move), f.add(high, move)
                inside = f.both(f.emit(f"icmp sge i64 {low}, 0"), f.emit(f"icmp slt i64 {high}, {self.buffer.sizes[d]}"))
                inside = f.both(f.both(inside, self.inside), f.emit(f"icmp sle i64 {f.add(j, width)}, {extent}"))
                for narrow in index.widened():
                    inside = f.both(inside, is_run(region, narrow))

                def run() -> None:
                    lanes = text
                    if index.step == -1:
                        order = ", ".join(f"i32 {width - 1 - lane}" for lane in range(width))
                        lanes = f.emit(f"shufflevector {type_} {text}, {type_} poison, <{width} x i32> <{order}>")
                    pointer = f.pointer(self.pointer, low, self.stored)
                    f.store(type_, f.emit(f"fadd {type_} {f.load(type_, pointer)}, {lanes}"), pointer)

                f.when(inside, run, lambda: self._add_lanes(text, indices, j, extent))
                return
        self._add_lanes(text, indices, j, extent)

    def _add_lanes(self, text: str, indices: Mapping[int, Value], j: str, extent: str) -> None:
        """One lane after the other, by way of memory."""
        f, region, width = self.f, self.region, self.region.width
        words, flags = vector(width, "i64"), vector(width, "i1")
        mask, total = region.lanes_below(j, extent), None
        mask = f.emit(f"and {flags} {mask}, {f.splat(self.inside, width, 'i1')}")
        for d, index in indices.items():
            lanes, size = region.text(index, True), f.splat(self.buffer.sizes[d], width, "i64")
            if self.wrapped:
                negative = f.emit(f"icmp slt {words} {lanes}, {splat_constant('0', width, 'i64')}")
                move = f.emit(f"select {flags} {negative}, {words} {size}, {words} {splat_constant('0', width, 'i64')}")
                lanes = f.emit(f"add {words} {lanes}, {move}")
            mask = f.emit(f"and {flags} {mask}, {f.emit(f'icmp ult {words} {lanes}, {size}')}")
            part = lanes
            if not self.buffer.unit[d]:
                part = f.emit(f"mul {words} {lanes}, {f.splat(self.buffer.strides[d], width, 'i64')}")
            total = part if total is None else f.emit(f"add {words} {total}, {part}")
        nowhere = splat_constant(str(-(2**63)), width, "i64")
        offsets = f.emit(f"select {flags} {mask}, {words} {total}, {words} {nowhere}")
        with f.at_entry():
            places = f.emit(f"alloca [{width} x i64], align 64")
            values = f.emit(f"alloca [{width} x {self.stored}], align 64")
        f.store(words, offsets, places, 8)
        f.store(vector(width, self.stored), text, values, 4)

        def lane(n: str, _: list[str]) -> None:
            offset = f.load("i64", f.pointer(places, n, "i64"), 8)
            here = f.emit(f"icmp ne i64 {offset}, {-(2**63)}")

            def add() -> None:
                self._add_at(
                    f.pointer(self.pointer, offset, self.stored), f.load(self.stored, f.pointer(values, n, self.stored))
                )

            f.when(here, add)

        f.loop("0", str(width), 1, lane, hint="add")

    def _pointers(self, indices: Mapping[int, Value]) -> str:
        f, region, width = self.f, self.region, self.region.width
        total = None
        for d, index in indices.items():
            text = region.text(index, True)
            stride = f.splat(self.buffer.strides[d], width, "i64")
            part = f.emit(f"mul {vector(width, 'i64')} {text}, {stride}")
            total = part if total is None else f.emit(f"add {vector(width, 'i64')} {total}, {part}")
        return f.emit(f"getelementptr {self.stored}, ptr {self.pointer}, {vector(width, 'i64')} {total}")

    def _masked_load(self, type_: str, pointer: str, mask: str, zero: str) -> str:
        width = self.region.width
        name = f"llvm.masked.load.{self._mangled()}.p0"
        self.region.declarations.add(f"declare {type_} @{name}(ptr, i32, <{width} x i1>, {type_})")
        return self.f.emit(f"call {type_} @{name}(ptr {pointer}, i32 1, <{width} x i1> {mask}, {type_} {zero})")

    def _mangled(self) -> str:
        short = {"float": "f32", "double": "f64", "half": "f16"}.get(self.stored, self.stored)
        return f"v{self.region.width}{short}"

    def _as_stored(self, value: Value, lane: bool) -> str:
        text = self.region.text(value, lane)
        if element_type(self.buffer.element) == "i1":
            width = self.region.width if lane else 1
            text = self.f.emit(f"zext {vector(width, 'i1')} {text} to {vector(width, 'i8')}")
        return text
