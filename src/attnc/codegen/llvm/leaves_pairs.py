"""Leaf routines for a `tile.dot` of bf16 operands with the processor's own dot product of pairs (x86: `vdpbf16ps`; Arm:
`bfdot`).

Two neighbours along the depth are one 32-bit word, so everything is as in `leaves_dot` with half the depth: a word of the left
row is broadcast, a panel is `[depth / 2][columns]` words, and a multiply-add takes two steps. Products of bf16 are exact in f32
and are summed there; only numbers below the normal range of f32 are flushed to zero (and Arm may round sums to odd).
"""

from __future__ import annotations

from attnc.analysis.machine import has_amx
from attnc.codegen.llvm.leaves_amx import dot_rows_amx
from attnc.codegen.llvm.leaves_dot import OPERANDS, Shape, product_functions
from attnc.codegen.llvm.leaves_pack import ARGUMENTS, TRANSPOSED
from attnc.codegen.llvm.text import Function, Value
from attnc.target import Target


class PairShape(Shape):
    """The register tile of f32 results, whose operands are words of two bf16."""

    chunked = False

    def __init__(self, target: Target):
        super().__init__("float", target)
        self.pairs = f"<{2 * self.width} x bfloat>"
        arm = target.triple.startswith(("aarch64", "arm64"))
        self.intrinsic = "@llvm.aarch64.neon.bfdot.v4f32.v8bf16" if arm else f"@llvm.x86.avx512bf16.dpbf16ps.{self.width * 32}"
        self.declarations = f"declare {self.type} {self.intrinsic}({self.type}, {self.pairs}, {self.pairs})\n"

    def symbol(self, name: str) -> str:
        return super().symbol(f"{name}.pairs")

    def multiply_add(self, f: Function, a: Value, b: Value, c: Value) -> Value:
        a, b = (f.emit(f"bitcast {self.type} {value} to {self.pairs}") for value in (a, b))
        return f.emit(f"call {self.type} {self.intrinsic}({self.type} {c}, {self.pairs} {a}, {self.pairs} {b})")


def symbols(target: Target) -> tuple[str, str]:
    """The names of `dot_rows` and `pack_rhs_transposed` for pairs."""
    shape = PairShape(target)
    dot = dot_rows_amx(target)[0] if has_amx(target) else shape.symbol("dot_rows")
    return dot, shape.symbol(TRANSPOSED)


def dot_rows_pairs(target: Target) -> tuple[str, str]:
    """`dot_rows` (see `leaves_dot`) of pairs: strides and depth count words of two bf16. In AMX tiles where there are some."""
    if has_amx(target):
        return dot_rows_amx(target)
    shape = PairShape(target)
    symbol, product = shape.symbol("dot_rows"), shape.symbol("product")
    f = Function(symbol, [*OPERANDS, ("i64", "panel_count"), ("i64", "rows"), ("i64", "depth")])
    operands = ", ".join(f"{type_} %{name}" for type_, name in OPERANDS)
    f.do(f"call void @{product}({operands}, ptr null, i64 %depth, i64 %rows, i64 %panel_count)")
    return symbol, "\n".join([f.finish(), *product_functions(shape, product)])


def pack_pairs(target: Target) -> tuple[str, str]:
    """`pack_rhs_transposed` (see `leaves_pack`) of bf16 into pairs: source strides and `columns`, an even number, count bf16;
    `panel_stride` counts words. Fast where the pairs are words of the source already. Needs the leaf for f32 beside it."""
    shape = PairShape(target)
    symbol = shape.symbol(TRANSPOSED)
    words = Shape("float", target).symbol(f"{TRANSPOSED}.f32")
    f = Function(symbol, ARGUMENTS)
    depth = f.emit("ashr i64 %columns, 1")
    odd = f.emit("and i64 %row_stride, 1")
    whole = f.emit(f"and i1 {f.emit('icmp eq i64 %column_stride, 1')}, {f.emit(f'icmp eq i64 {odd}, 0')}")

    def fast() -> None:
        stride = f.emit("ashr i64 %row_stride, 1")
        f.do(
            f"call void @{words}(ptr %source, i64 {stride}, i64 1, ptr %destination, i64 %panel_stride, i64 %valid, i64 %rows, "
            f"i64 {depth})"
        )

    def slow() -> None:
        def row_loop(row: Value, _: list[Value]) -> None:
            panel = f.emit(f"mul i64 {f.emit(f'udiv i64 {row}, {shape.columns}')}, %panel_stride")
            place = f.emit(f"add i64 {panel}, {f.emit(f'urem i64 {row}, {shape.columns}')}")
            to = f.pointer("%destination", place, "i32")
            start = f.emit(f"mul i64 {row}, %row_stride")
            real = f.emit(f"icmp slt i64 {row}, %valid")

            def pair_loop(pair: Value, _: list[Value]) -> None:
                def load() -> list[Value]:
                    halves = []
                    for column in (f.emit(f"shl i64 {pair}, 1"), f.emit(f"or i64 {f.emit(f'shl i64 {pair}, 1')}, 1")):
                        offset = f.emit(f"add i64 {start}, {f.emit(f'mul i64 {column}, %column_stride')}")
                        halves.append(f.emit(f"zext i16 {f.load('i16', f.pointer('%source', offset, 'i16'), 2)} to i32"))
                    return [f.emit(f"or i32 {halves[0]}, {f.emit(f'shl i32 {halves[1]}, 16')}")]

                (word,) = f.when(real, load, lambda: ["0"], ["i32"])
                f.store("i32", word, f.pointer(to, f.emit(f"mul i64 {pair}, {shape.columns}"), "i32"), 4)

            f.loop(0, depth, 1, pair_loop, hint="pair")

        panels = f.ceil_div("%rows", shape.columns)
        f.loop(0, f.mul(panels, shape.columns), 1, row_loop, hint="row")

    f.when(whole, fast, slow)
    declaration = f"declare void @{words}({', '.join(type_ for type_, _ in ARGUMENTS)})"
    return symbol, f.finish() + "\n" + declaration + "\n"
