"""Leaf routines for products of bf16 in AMX tiles (x86: `tdpbf16ps`, 12 rows × 16 columns × 32 steps of depth at once).

Operands are those of `leaves_pairs`: words of two bf16 neighbours along the depth, panels of `[depth / 2][columns]` words. So a
panel's rows are the rows of a tile as they lie. Weights, which need more than the 8 bits of a bf16, enter as the sum of a high
and a low bf16: two products.

Of the eight tiles, four hold results (two panels of two vectors each, which hides the latency), one the left operand, one the
right, and two the same of what is left of a depth that is no multiple of 32. Tiles are configured at the start of a routine
and released at its end. Register tiles have the rows that they have on AVX-512 machines: both kinds of leaves serve a kernel.
"""

from __future__ import annotations

from collections.abc import Callable

from attnc.codegen.llvm.leaves_dot import OPERANDS, Shape
from attnc.codegen.llvm.leaves_pack import ARGUMENTS
from attnc.codegen.llvm.text import Function, Value, vector
from attnc.target import Target

RESULTS, LEFT, RIGHT, LEFT_REST, RIGHT_REST = (0, 1, 2, 3), 4, 5, 6, 7
STEP = 16
"""Words of depth in a tile."""
ROW_BYTES = 64

DECLARATIONS = """declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tilezero(i8)
declare void @llvm.x86.tileloadd64(i8, ptr, i64)
declare void @llvm.x86.tilestored64(i8, ptr, i64)
declare void @llvm.x86.tdpbf16ps(i8, i8, i8)
"""


class _Tiles:
    """A routine in the making: its function, and the tiles' configuration for its depth."""

    def __init__(self, name: str, arguments: list[tuple[str, str]], target: Target):
        self.shape = Shape("float", target)
        self.symbol = self.shape.symbol(f"{name}.amx")
        self.f = Function(self.symbol, arguments)
        self.vectors = self.shape.vectors

    def buffer(self, bytes_: int) -> Value:
        return self.f.emit(f"alloca [{bytes_} x i8], align 64")

    def configure(self, words: Value) -> tuple[Value, Value]:
        """Configure the tiles for a depth of so many words: (those of whole tiles, the rest)."""
        f, rows = self.f, self.shape.rows
        configuration = self.buffer(64)
        whole = f.emit(f"and i64 {words}, {-STEP}")
        rest = f.sub(words, whole)
        none = f.emit(f"icmp eq i64 {rest}, 0")
        f.store("<64 x i8>", "zeroinitializer", configuration, 64)
        f.store("i8", "1", configuration, 1)
        rest_rows = f.emit(f"select i1 {none}, i64 0, i64 {rows}")
        rest_bytes = f.emit(f"select i1 {none}, i64 0, i64 {ROW_BYTES}")
        sizes: list[tuple[Value | int, Value | int]] = [(rows, ROW_BYTES)] * 5
        sizes += [(STEP, ROW_BYTES), (rest_rows, f.mul(rest, 4)), (rest, rest_bytes)]
        for n, (high, wide) in enumerate(sizes):
            for value, type_, place in ((high, "i8", 48 + n), (wide, "i16", 16 + 2 * n)):
                value = str(value) if isinstance(value, int) else f.emit(f"trunc i64 {value} to {type_}")
                f.store(type_, value, f.pointer(configuration, place), 1)
        f.do(f"call void @llvm.x86.ldtilecfg(ptr {configuration})")
        return whole, rest

    def load(self, number: int, pointer: Value, stride: Value | int) -> None:
        self.f.do(f"call void @llvm.x86.tileloadd64(i8 {number}, ptr {pointer}, i64 {stride})")

    def products(
        self,
        words: Value,
        left: Callable[[Value, Value, Value | int], list[tuple[Value, Value | int]]],
        fresh: bool,
    ) -> None:
        """All rows times all panels. `left(row, word, count)` gives the left operand's tiles (address, stride in bytes) from
        `row` on, of `count` words from `word` on."""
        f, shape = self.f, self.shape
        whole, rest = self.configure(words)
        out_bytes, right_bytes = f.emit(f"mul i64 %out_stride, {shape.bytes}"), shape.columns * 4

        def panels(row: Value, first: Value, count: int) -> None:
            """`count` panels for the rows from `row` on."""
            results, rights = [], []
            out_row = f.pointer("%out", f.emit(f"mul i64 {row}, {out_bytes}"))
            for p in range(count):
                panel = f.add(first, p)
                at = f.pointer("%panels", f.emit(f"mul i64 {panel}, %panel_stride"), "float")
                out = f.pointer(out_row, f.emit(f"mul i64 {panel}, {shape.columns}"), "float")
                for v in range(self.vectors):
                    rights.append(f.pointer(at, v * shape.width, "float"))
                    results.append(f.pointer(out, v * shape.width, "float"))
            for n, result in enumerate(results):
                if fresh:
                    f.do(f"call void @llvm.x86.tilezero(i8 {n})")
                else:
                    self.load(n, result, out_bytes)

            def step(word: Value, count: Value | int, a: int, b: int) -> None:
                for address, stride in left(row, word, count):
                    self.load(a, address, stride)
                    for n, right in enumerate(rights):
                        self.load(b, f.pointer(right, f.mul(word, right_bytes)), right_bytes)
                        f.do(f"call void @llvm.x86.tdpbf16ps(i8 {n}, i8 {a}, i8 {b})")

            f.loop(0, whole, STEP, lambda word, _: step(word, STEP, LEFT, RIGHT), hint="depth")
            f.when(f.emit(f"icmp ne i64 {rest}, 0"), lambda: step(whole, rest, LEFT_REST, RIGHT_REST))
            for n, result in enumerate(results):
                f.do(f"call void @llvm.x86.tilestored64(i8 {n}, ptr {result}, i64 {out_bytes})")

        def row_loop(row: Value, _: list[Value]) -> None:
            together = len(RESULTS) // self.vectors
            even = f.emit(f"and i64 %panel_count, {-together}")
            f.loop(0, even, together, lambda p, _: panels(row, p, together), hint="panels")
            f.loop(even, "%panel_count", 1, lambda p, _: panels(row, p, 1), hint="panel")

        f.loop(0, "%rows", shape.rows, row_loop, hint="row")
        f.do("call void @llvm.x86.tilerelease()")

    def finish(self, declarations: str = "") -> tuple[str, str]:
        return self.symbol, f"{self.f.finish()}\n{DECLARATIONS}{declarations}"


def dot_rows_amx(target: Target) -> tuple[str, str]:
    """`dot_rows_pairs` (see `leaves_pairs`) in tiles: strides and depth count words of two bf16."""
    tiles = _Tiles("dot_rows", [*OPERANDS, ("i64", "panel_count"), ("i64", "rows"), ("i64", "depth")], target)
    f = tiles.f
    left_bytes = f.emit("shl i64 %lhs_stride, 2")

    def left(row: Value, word: Value, _: Value | int) -> list[tuple[Value, Value | int]]:
        return [(f.pointer(f.pointer("%lhs", f.mul(row, left_bytes)), f.mul(word, 4)), left_bytes)]

    tiles.products("%depth", left, fresh=True)
    return tiles.finish()


def dot_accumulate_amx(target: Target) -> tuple[str, str]:
    """`dot_accumulate` (see `leaves_dot`) of weights in f32, and a right operand in bf16 packed by `pack_rows_in_pairs`.

    `panel_stride` counts words, `depth` weights. A weight is the sum of two bf16, so it keeps 16 bits. What lies in a row
    beyond `depth` is not looked at.
    """
    sizes = [("ptr", "scale"), ("i64", "depth"), ("i64", "rows"), ("i64", "panel_count")]
    tiles = _Tiles("dot_accumulate", [*OPERANDS, *sizes], target)
    f, shape = tiles.f, tiles.shape
    width, type_, narrow = shape.width, shape.type, vector(shape.width, "bfloat")
    mask = vector(width, "i1")
    parts = [tiles.buffer(shape.rows * ROW_BYTES) for _ in ("high", "low")]
    lanes = f"<{', '.join(f'i64 {n}' for n in range(width))}>"

    def scale_row(row: Value, _: list[Value]) -> None:
        factor = f.splat(f.load("float", f.pointer("%scale", row, "float"), 4), width, "float")
        start = f.pointer("%out", f.emit(f"mul i64 {row}, %out_stride"), "float")

        def scale(column: Value, _: list[Value]) -> None:
            place = f.pointer(start, column, "float")
            f.store(type_, f.emit(f"fmul {type_} {f.load(type_, place, 4)}, {factor}"), place, 4)

        f.loop(0, f.emit(f"mul i64 %panel_count, {shape.columns}"), width, scale, hint="scale")

    def left(row: Value, word: Value, _: Value | int) -> list[tuple[Value, Value | int]]:
        """The weights' high and low parts, and zeros beyond the depth."""
        start = f.mul(word, 2)
        left = f.sub("%depth", start)

        def convert(r: Value, _: list[Value]) -> None:
            source = f.pointer("%lhs", f.emit(f"mul i64 {f.add(row, r)}, %lhs_stride"), "float")
            source = f.pointer(source, start, "float")
            for part in range(0, 2 * STEP, width):
                rest = f.splat(f.sub(left, part), width, "i64")
                live = f.emit(f"icmp sgt {vector(width, 'i64')} {rest}, {lanes}")
                weights = f.emit(
                    f"call {type_} @llvm.masked.load.v{width}f32.p0(ptr {f.pointer(source, part, 'float')}, i32 4, "
                    f"{mask} {live}, {type_} zeroinitializer)"
                )
                high = f.emit(f"fptrunc {type_} {weights} to {narrow}")
                low = f.emit(f"fsub {type_} {weights}, {f.emit(f'fpext {narrow} {high} to {type_}')}")
                low = f.emit(f"fptrunc {type_} {low} to {narrow}")
                for buffer, value in zip(parts, (high, low), strict=True):
                    place = f.pointer(f.pointer(buffer, f.mul(r, ROW_BYTES)), part, "bfloat")
                    f.store(narrow, value, place, 2)

        f.loop(0, shape.rows, 1, convert, hint="convert")
        return [(buffer, ROW_BYTES) for buffer in parts]

    f.when(f.emit("icmp ne ptr %scale, null"), lambda: f.loop(0, "%rows", 1, scale_row, hint="row") and None)
    tiles.products(f.ceil_div("%depth", 2), left, fresh=False)
    return tiles.finish(f"declare {type_} @llvm.masked.load.v{width}f32.p0(ptr, i32, {mask}, {type_})\n")


def pack_rows_in_pairs(target: Target) -> tuple[str, str]:
    """`void (ptr source, i64 row_stride, i64 column_stride, ptr destination, i64 panel_stride,
              i64 valid, i64 rows, i64 columns)`

    Of bf16: destination[c / NR, r / 2, c % NR] is the word of source[r, c] and source[r + 1, c] for even r < rows; zeros for
    rows from `valid` on and for the columns that fill the last panel. `panel_stride` counts words. Fast where `column_stride`
    is 1.
    """
    shape = Shape("float", target)
    symbol = shape.symbol("pack_rows_in_pairs")
    f = Function(symbol, ARGUMENTS)
    width, narrow, words = shape.width, vector(shape.width, "i16"), vector(shape.width, "i32")
    padded = f.mul(f.ceil_div("%columns", shape.columns), shape.columns)
    unit = f.emit("icmp eq i64 %column_stride, 1")

    def pair_loop(pair: Value, _: list[Value]) -> None:
        rows = [f.mul(pair, 2), f.add(f.mul(pair, 2), 1)]
        sources = [f.pointer("%source", f.emit(f"mul i64 {row}, %row_stride"), "i16") for row in rows]
        alive = [f.emit(f"icmp slt i64 {row}, %valid") for row in rows]

        def column_loop(column: Value, _: list[Value]) -> None:
            there = f.emit(f"icmp sle i64 {f.add(column, width)}, %columns")
            fast = f.emit(f"and i1 {unit}, {there}")

            def half(source: Value, live: Value) -> Value:
                def whole() -> list[Value]:
                    return [f.load(narrow, f.pointer(source, column, "i16"), 2)]

                def single() -> list[Value]:
                    value = "zeroinitializer"
                    for lane in range(width):
                        place = f.add(column, lane)

                        def one(place: Value = place) -> list[Value]:
                            return [f.load("i16", f.pointer(source, f.emit(f"mul i64 {place}, %column_stride"), "i16"), 2)]

                        inside = f.emit(f"icmp slt i64 {place}, %columns")
                        (element,) = f.when(inside, one, lambda: ["0"], ["i16"])
                        value = f.emit(f"insertelement {narrow} {value}, i16 {element}, i64 {lane}")
                    return [value]

                def read() -> list[Value]:
                    return f.when(fast, whole, single, [narrow])

                return f.when(live, read, lambda: ["zeroinitializer"], [narrow])[0]

            low, high = (half(source, live) for source, live in zip(sources, alive, strict=True))
            low, high = (f.emit(f"zext {narrow} {value} to {words}") for value in (low, high))
            sixteen = f"<{', '.join(['i32 16'] * width)}>"
            word = f.emit(f"or {words} {low}, {f.emit(f'shl {words} {high}, {sixteen}')}")
            panel = f.emit(f"mul i64 {f.emit(f'udiv i64 {column}, {shape.columns}')}, %panel_stride")
            place = f.add(panel, f.emit(f"urem i64 {column}, {shape.columns}"))
            place = f.add(place, f.mul(pair, shape.columns))
            f.store(words, word, f.pointer("%destination", place, "i32"), 4)

        f.loop(0, padded, width, column_loop, hint="column")

    f.loop(0, f.ceil_div("%rows", 2), 1, pair_loop, hint="pair")
    return symbol, f.finish() + "\n"
