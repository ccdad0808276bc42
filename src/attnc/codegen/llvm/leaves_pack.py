"""Leaf routines for `tile.stage … as rhs`: rows in memory become panels that `dot_rows` and `dot_accumulate` read.

Packing absorbs strides, the conversion to the accumulation type, and tails: what lies beyond the valid rows or columns is zero.
"""

from __future__ import annotations

from attnc.codegen.llvm.leaves_convert import SOURCE_BYTES, convert, stored_as
from attnc.codegen.llvm.leaves_dot import SHORT, Shape
from attnc.codegen.llvm.text import Function, Value, vector
from attnc.target import Target

LANE_BITS = 128
"""The part of a vector within which x86 shuffles cheaply."""


def _join(f: Function, parts: list[Value], width: int, element: str) -> Value:
    """Vectors of `width` lanes (a power of two of them) behind each other in one."""
    while len(parts) > 1:
        mask = ", ".join(f"i32 {n}" for n in range(2 * width))
        parts = [
            f.emit(f"shufflevector <{width} x {element}> {a}, <{width} x {element}> {b}, <{2 * width} x i32> <{mask}>")
            for a, b in zip(parts[::2], parts[1::2], strict=True)
        ]
        width *= 2
    return parts[0]


def _transpose_lanes(f: Function, rows: list[Value], shape: Shape) -> list[Value]:
    """Transposes the square in each lane of 128 bits: element j of a lane of row i becomes element i of result j."""
    inner, width = len(rows), shape.width

    def interleave(a: Value, b: Value, part: int, unit: int) -> Value:
        """Within each lane, runs of `unit` elements of the low (`part` 0) or high half of `a` and `b` in turn."""
        picks: list[int] = []
        for lane in range(0, width, inner):
            for run in range(0, inner // 2, unit):
                start = lane + part * inner // 2 + run
                picks += [start + n for n in range(unit)] + [width + start + n for n in range(unit)]
        mask = ", ".join(f"i32 {pick}" for pick in picks)
        return f.emit(f"shufflevector {shape.type} {a}, {shape.type} {b}, <{width} x i32> <{mask}>")

    if inner == 2:
        return [interleave(rows[0], rows[1], part, 1) for part in range(2)]
    first = [interleave(rows[0], rows[1], part, 1) for part in range(2)]
    second = [interleave(rows[2], rows[3], part, 1) for part in range(2)]
    return [interleave(first[j // 2], second[j // 2], j % 2, 2) for j in range(4)]


ARGUMENTS = [
    ("ptr", "source"),
    ("i64", "row_stride"),
    ("i64", "column_stride"),
    ("ptr", "destination"),
    ("i64", "panel_stride"),
    ("i64", "valid"),
    ("i64", "rows"),
    ("i64", "columns"),
]


TRANSPOSED = "pack_rhs_transposed"


class _Packer:
    """What the two directions of packing share."""

    def __init__(self, name: str, source: str, element: str, target: Target):
        self.shape = Shape(element, target)
        self.source, self.target = source, target
        self.stored = stored_as(source, target)
        self.symbol = self.shape.symbol(f"{name}.{SHORT[source]}")
        self.f = Function(self.symbol, ARGUMENTS)

    def at(self, base: Value, row: Value, column: Value) -> Value:
        """The place of (row, column) of the source."""
        offset = self.f.emit(f"mul i64 {row}, %row_stride")
        offset = self.f.emit(f"add i64 {offset}, {self.f.emit(f'mul i64 {column}, %column_stride')}")
        return self.f.pointer(base, offset, self.stored)

    def load(self, pointer: Value, width: int) -> Value:
        value = self.f.load(vector(width, self.stored), pointer, SOURCE_BYTES[self.source])
        return self.convert(value, width)

    def convert(self, value: Value, width: int) -> Value:
        return convert(self.f, self.source, self.shape.element, width, value, self.target)

    def store(self, value: Value, pointer: Value, width: int) -> None:
        self.f.store(vector(width, self.shape.element), value, pointer, self.shape.bytes)

    def whole_panels(self, count: Value) -> Value:
        """`count` rounded up to a multiple of a panel's width."""
        panels = self.f.emit(f"udiv i64 {self.f.emit(f'add i64 {count}, {self.shape.columns - 1}')}, {self.shape.columns}")
        return self.f.emit(f"mul i64 {panels}, {self.shape.columns}")

    def minimum(self, a: Value, b: Value) -> Value:
        return self.f.emit(f"select i1 {self.f.emit(f'icmp slt i64 {a}, {b}')}, i64 {a}, i64 {b}")


def pack_rhs_transposed(source: str, element: str, target: Target) -> tuple[str, str]:
    """`void (ptr source, i64 row_stride, i64 column_stride, ptr destination, i64 panel_stride,
              i64 valid, i64 rows, i64 columns)`

    destination[r / NR, c, r % NR] = source[r, c] for r < valid, c < columns; 0 for valid ≤ r < rows rounded up to NR, the width
    of a panel. Strides are in elements, those of the source of elements of `source` ("float", "double", "half", "bfloat");
    nothing needs alignment. Fast where either stride of the source is 1.
    """
    p = _Packer(TRANSPOSED, source, element, target)
    f, shape = p.f, p.shape
    width, inner = shape.width, LANE_BITS // shape.bits
    unit_columns = f.emit("icmp eq i64 %column_stride, 1")
    wide_enough = f.emit(f"icmp sge i64 %columns, {inner}")
    blockwise = f.emit(f"and i1 {unit_columns}, {wide_enough}")
    unit_rows = f.emit("icmp eq i64 %row_stride, 1")
    last = f.emit(f"sub i64 %columns, {inner}")
    padded = p.whole_panels("%rows")

    def group_loop(row: Value, _: list[Value]) -> None:
        """`width` rows: half of a panel's width."""
        panel = f.emit(f"udiv i64 {row}, {shape.columns}")
        within = f.emit(f"urem i64 {row}, {shape.columns}")
        place = f.emit(f"add i64 {f.emit(f'mul i64 {panel}, %panel_stride')}, {within}")
        destination = f.pointer("%destination", place, element)
        corner = p.at("%source", row, "0")
        beyond = f.emit(f"add i64 {row}, {width}")
        whole = f.emit(f"icmp sle i64 {beyond}, %valid")

        def column_place(column: Value) -> Value:
            return f.pointer(destination, f.emit(f"mul i64 {column}, {shape.columns}"), element)

        def block(position: Value, _: list[Value]) -> None:
            # The last block overlaps the one before rather than reach beyond the row.
            column = p.minimum(position, last)
            at = p.at(corner, "0", column)
            parts: list[Value] = []
            for r in range(width):
                if r:
                    at = p.at(at, "1", "0")
                parts.append(f.load(vector(inner, p.stored), at, SOURCE_BYTES[source]))
            joined = [p.convert(_join(f, parts[i::inner], inner, p.stored), width) for i in range(inner)]
            to = column_place(column)
            for n, value in enumerate(_transpose_lanes(f, joined, shape)):
                p.store(value, f.pointer(to, n * shape.columns, element), width)

        def copy(column: Value, _: list[Value]) -> None:
            p.store(p.load(p.at(corner, "0", column), width), column_place(column), width)

        def general() -> None:
            f.loop(0, "%columns", 1, lambda column, _: p.store(shape.zero, column_place(column), width), hint="zero")

            def row_loop(r: Value, _: list[Value]) -> None:
                lane = f.emit(f"sub i64 {r}, {row}")

                def element_loop(column: Value, _: list[Value]) -> None:
                    p.store(p.load(p.at("%source", r, column), 1), f.pointer(column_place(column), lane, element), 1)

                f.loop(0, "%columns", 1, element_loop, hint="element")

            f.loop(row, p.minimum(beyond, "%valid"), 1, row_loop, hint="row")

        def not_blockwise() -> None:
            by_rows = f.emit(f"and i1 {whole}, {unit_rows}")
            f.when(by_rows, lambda: f.loop(0, "%columns", 1, copy, hint="copy") and None, general)

        f.when(
            f.emit(f"and i1 {whole}, {blockwise}"),
            lambda: f.loop(0, "%columns", inner, block, hint="block") and None,
            not_blockwise,
        )

    f.loop(0, padded, width, group_loop, hint="group")
    return p.symbol, f.finish()


def pack_rhs(source: str, element: str, target: Target) -> tuple[str, str]:
    """`void (ptr source, i64 row_stride, i64 column_stride, ptr destination, i64 panel_stride,
              i64 valid, i64 rows, i64 columns)`

    destination[c / NR, r, c % NR] = source[r, c] for r < valid, c < columns; 0 for valid ≤ r < rows, and for the columns that
    fill the last panel. Strides, alignment and speed as in `pack_rhs_transposed`, whose code it needs beside it.
    """
    p = _Packer("pack_rhs", source, element, target)
    f, shape = p.f, p.shape
    width = shape.width
    transposed = p.shape.symbol(f"{TRANSPOSED}.{SHORT[source]}")
    whole = f.emit(f"and i64 %columns, {-width}")
    padded = p.whole_panels("%columns")

    def place(row: Value, column: Value) -> Value:
        panel = f.emit(f"udiv i64 {column}, {shape.columns}")
        within = f.emit(f"urem i64 {column}, {shape.columns}")
        offset = f.emit(f"add i64 {f.emit(f'mul i64 {panel}, %panel_stride')}, {within}")
        offset = f.emit(f"add i64 {offset}, {f.emit(f'mul i64 {row}, {shape.columns}')}")
        return f.pointer("%destination", offset, element)

    def zero(row: Value, lower: Value | int) -> None:
        f.loop(lower, padded, width, lambda column, _: p.store(shape.zero, place(row, column), width), hint="zero")

    def by_rows() -> None:
        def row_loop(row: Value, _: list[Value]) -> None:
            corner = p.at("%source", row, "0")

            def copy(lanes: int):
                return lambda column, _: p.store(p.load(f.pointer(corner, column, p.stored), lanes), place(row, column), lanes)

            f.loop(0, whole, width, copy(width), hint="vector")
            zero(row, whole)
            f.loop(whole, "%columns", 1, copy(1), hint="scalar")

        f.loop(0, "%valid", 1, row_loop, hint="row")

    def by_columns() -> None:
        """The transposed source, packed transposed."""
        f.do(
            f"call void @{transposed}(ptr %source, i64 %column_stride, i64 %row_stride, ptr %destination, i64 %panel_stride, "
            "i64 %columns, i64 %columns, i64 %valid)"
        )

    f.when(f.emit("icmp eq i64 %column_stride, 1"), by_rows, by_columns)
    f.loop("%valid", "%rows", 1, lambda row, _: zero(row, 0), hint="beyond")
    declaration = f"declare void @{transposed}({', '.join(type_ for type_, _ in ARGUMENTS)})"
    return p.symbol, f.finish() + "\n" + declaration + "\n"
