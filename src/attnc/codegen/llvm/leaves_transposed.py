"""Leaf routines for a `tile.dot` whose left operand is read transposed: sums of outer products of rows.

The left operand is a block of rows in scratch of which a run of *columns* are the result's rows; the right one lies row after
row as well, in its natural layout. A step takes one row of each: so many neighbouring elements are broadcast, and multiplied by
two vectors. Like `leaves_dot`, without any packing: what is read here was computed, or copied to scratch, a moment ago.

The sum over a strip's rows begins at zero and is added to the accumulator as a whole: over thousands of rows, one after the
other onto a sum of all before, the roundings would add up to several times those of a blocked product.
"""

from __future__ import annotations

import functools

from attnc.codegen.llvm.leaves_dot import Shape
from attnc.codegen.llvm.text import Function, Value, vector
from attnc.target import Target

HEIGHTS = {12: (12, 8, 4), 6: (6, 2)}
"""For each height of the register tile: how many rows are done at once, of the tallest tiles that fit into what is left."""

OPERANDS = [
    ("ptr", "lhs"),
    ("i64", "lhs_stride"),
    ("ptr", "rhs"),
    ("i64", "rhs_stride"),
    ("ptr", "acc"),
    ("i64", "acc_stride"),
    ("i64", "depth"),
    ("i64", "rows"),
    ("i64", "panel_count"),
]


@functools.cache
def dot_transposed(element: str, target: Target) -> tuple[str, str]:
    """`void (ptr lhs, i64 lhs_stride, ptr rhs, i64 rhs_stride, ptr acc, i64 acc_stride, i64 depth, i64 rows, i64 panel_count)`

    acc[r, c] += Σ_{d < depth} lhs[d, r] · rhs[d, c] for r < rows, c < panel_count · NR. Strides are in elements; nothing needs
    alignment. No rows of `acc` are touched beyond `rows` rounded up to a multiple of the least of HEIGHTS.
    """
    shape = Shape(element, target)
    symbol = shape.symbol("dot_transposed")
    f = Function(symbol, OPERANDS)
    heights = HEIGHTS[shape.rows]
    head, entry = f.new_block("rows"), f.current_block
    f.branch(head)
    f.place(head)
    place = len(f.lines)
    f.lines.append("")
    row, incoming = "%row", [f"[ 0, %{entry} ]"]
    left = f.emit(f"sub i64 %rows, {row}")
    for rows in heights:
        yes, no = f.new_block(f"take{rows}"), f.new_block("fewer")
        f.branch_if(f.emit(f"icmp sge i64 {left}, {1 if rows == heights[-1] else rows}"), yes, no)
        f.place(yes)
        lhs = f.pointer("%lhs", row, element)
        acc = f.pointer("%acc", f.emit(f"mul i64 {row}, %acc_stride"), element)
        f.do(
            f"call void @{symbol}.{rows}(ptr {lhs}, i64 %lhs_stride, ptr %rhs, i64 %rhs_stride, ptr {acc}, i64 %acc_stride, "
            "i64 %depth, i64 %panel_count)"
        )
        incoming.append(f"[ {f.emit(f'add i64 {row}, {rows}')}, %{f.current_block} ]")
        f.branch(head)
        f.place(no)
    f.lines[place] = f"  {row} = phi i64 {', '.join(incoming)}"
    blocks = [_block(shape, f"{symbol}.{rows}", rows) for rows in heights]
    return symbol, "\n".join([f.finish(), *blocks, shape.declarations])


def _places(f: Function, shape: Shape, rows: int, corner: Value) -> list[Value]:
    """A pointer for each vector of a register tile, by rows."""
    result = []
    for r in range(rows):
        if r:
            corner = f.pointer(corner, "%acc_stride", shape.element)
        result += [f.pointer(corner, v * shape.width, shape.element) for v in range(shape.vectors)]
    return result


def _add_to(f: Function, shape: Shape, values: list[Value], places: list[Value]) -> None:
    """Add vectors to what lies in memory."""
    for value, place in zip(values, places, strict=True):
        before = f.load(shape.type, place, shape.bytes)
        f.store(shape.type, f.emit(f"fadd {shape.type} {before}, {value}"), place, shape.bytes)


def _block(shape: Shape, symbol: str, rows: int) -> str:
    """`rows` rows of the result, panel after panel."""
    f = Function(symbol, [operand for operand in OPERANDS if operand[1] != "rows"], linkage="internal")
    element, type_ = shape.element, shape.type

    def panel_loop(p: Value, _: list[Value]) -> None:
        offset = f.emit(f"mul i64 {p}, {shape.columns}")
        corner, right_corner = f.pointer("%acc", offset, element), f.pointer("%rhs", offset, element)
        count = rows * shape.vectors

        def depth_loop(_: Value, carried: list[Value]) -> list[Value]:
            lhs, rhs = carried[count:]
            right = [f.load(type_, f.pointer(rhs, v * shape.width, element), shape.bytes) for v in range(shape.vectors)]
            result = []
            for r in range(rows):
                left = f.splat(f.load(element, f.pointer(lhs, r, element), shape.bytes), shape.width, element)
                for v in range(shape.vectors):
                    result.append(shape.multiply_add(f, left, right[v], carried[r * shape.vectors + v]))
            return [*result, f.pointer(lhs, "%lhs_stride", element), f.pointer(rhs, "%rhs_stride", element)]

        carried = [(type_, shape.zero)] * count + [("ptr", "%lhs"), ("ptr", right_corner)]
        values = f.loop(0, "%depth", 1, depth_loop, carried, "depth")[:count]
        _add_to(f, shape, values, _places(f, shape, rows, corner))

    f.loop(0, "%panel_count", 1, panel_loop, hint="panel")
    return f.finish()


@functools.cache
def dot_transposed_careful(element: str, target: Target) -> tuple[str, str]:
    """`void (..., ptr live, i64 live_stride)`: `dot_transposed` where (d, r) takes part only if the byte live[d, r] is not
    zero, whatever the operands hold. For the rare task whose result was not finite, so small rather than fast."""
    shape = Shape(element, target)
    symbol = shape.symbol("dot_transposed_careful")
    f = Function(symbol, [*OPERANDS, ("ptr", "live"), ("i64", "live_stride")])
    type_ = shape.type

    def row_loop(r: Value, _: list[Value]) -> None:
        row = f.pointer("%acc", f.emit(f"mul i64 {r}, %acc_stride"), element)

        def panel_loop(p: Value, _: list[Value]) -> None:
            offset = f.emit(f"mul i64 {p}, {shape.columns}")
            places = _places(f, shape, 1, f.pointer(row, offset, element))
            corner = f.pointer("%rhs", offset, element)

            def depth_loop(d: Value, values: list[Value]) -> list[Value]:
                flag = f.pointer("%live", f.add(f.emit(f"mul i64 {d}, %live_stride"), r))
                alive = f.emit(f"icmp ne i8 {f.load('i8', flag)}, 0")

                def add() -> list[Value]:
                    at = f.pointer("%lhs", f.add(f.emit(f"mul i64 {d}, %lhs_stride"), r), element)
                    left = f.splat(f.load(element, at, shape.bytes), shape.width, element)
                    right = f.pointer(corner, f.emit(f"mul i64 {d}, %rhs_stride"), element)
                    rights = [
                        f.load(type_, f.pointer(right, v * shape.width, element), shape.bytes) for v in range(len(places))
                    ]
                    return [shape.multiply_add(f, left, b, c) for b, c in zip(rights, values, strict=True)]

                return f.when(alive, add, lambda: values, [vector(shape.width, element)] * len(places))

            values = f.loop(0, "%depth", 1, depth_loop, [(type_, shape.zero)] * len(places), "depth")
            _add_to(f, shape, values, places)

        f.loop(0, "%panel_count", 1, panel_loop, hint="panel")

    f.loop(0, "%rows", 1, row_loop, hint="row")
    return symbol, f.finish() + "\n" + shape.declarations
