"""AMX instructions as plain LLVM functions of equal meaning, for machines without them."""

from __future__ import annotations

from attnc.codegen.llvm.leaves_amx import DECLARATIONS
from attnc.codegen.llvm.text import Function, Value

TILE_BYTES = 1024


def replaced(text: str) -> str:
    """`text` with its AMX intrinsics replaced by calls of functions that it then has beside it."""
    for line in DECLARATIONS.splitlines():
        text = text.replace(line + "\n", "")
    functions = (_configure, _release, _zero, _load, _store, _product)
    memory = f"@plain.tiles = internal global [{8 * TILE_BYTES} x i8] zeroinitializer, align 64\n"
    memory += "@plain.configuration = internal global [64 x i8] zeroinitializer, align 64\n"
    return text.replace("@llvm.x86.", "@plain.") + "\n" + memory + "\n".join(function() for function in functions) + "\n"


def _tile(f: Function, number: Value) -> tuple[Value, Value, Value]:
    """(address, rows, bytes a row) of a tile."""
    n = f.emit(f"zext i8 {number} to i64")
    rows = f.emit(f"zext i8 {f.load('i8', f.pointer('@plain.configuration', f.add(n, 48)), 1)} to i64")
    place = f.pointer("@plain.configuration", f.add(f.mul(n, 2), 16))
    return f.pointer("@plain.tiles", f.mul(n, TILE_BYTES)), rows, f.emit(f"zext i16 {f.load('i16', place, 1)} to i64")


def _configure() -> str:
    f = Function("plain.ldtilecfg", [("ptr", "from")], linkage="internal")
    f.store("<64 x i8>", f.load("<64 x i8>", "%from", 1), "@plain.configuration", 1)
    return f.finish()


def _release() -> str:
    f = Function("plain.tilerelease", [], linkage="internal")
    f.store("<64 x i8>", "zeroinitializer", "@plain.configuration", 1)
    return f.finish()


def _zero() -> str:
    f = Function("plain.tilezero", [("i8", "t")], linkage="internal")
    tile, *_ = _tile(f, "%t")
    f.loop(0, TILE_BYTES, 64, lambda n, _: f.store("<64 x i8>", "zeroinitializer", f.pointer(tile, n), 1))
    return f.finish()


def _copy(name: str, store: bool) -> str:
    f = Function(name, [("i8", "t"), ("ptr", "at"), ("i64", "stride")], linkage="internal")
    tile, rows, wide = _tile(f, "%t")

    def row(r: Value, _: list[Value]) -> None:
        def byte(c: Value, _: list[Value]) -> None:
            inside = f.pointer(f.pointer(tile, f.mul(r, 64)), c)
            outside = f.pointer(f.pointer("%at", f.emit(f"mul i64 {r}, %stride")), c)
            source, to = (inside, outside) if store else (outside, inside)
            f.store("i8", f.load("i8", source, 1), to, 1)

        f.loop(0, wide, 1, byte)

    f.loop(0, rows, 1, row)
    return f.finish()


def _load() -> str:
    return _copy("plain.tileloadd64", store=False)


def _store() -> str:
    return _copy("plain.tilestored64", store=True)


def _product() -> str:
    f = Function("plain.tdpbf16ps", [("i8", "c"), ("i8", "a"), ("i8", "b")], linkage="internal")
    (result, rows, wide), (left, _, deep), (right, *_) = (_tile(f, f"%{name}") for name in "cab")

    def wide_of(pointer: Value) -> Value:
        bits = f.emit(f"zext i16 {f.load('i16', pointer, 2)} to i32")
        return f.emit(f"bitcast i32 {f.emit(f'shl i32 {bits}, 16')} to float")

    def row(m: Value, _: list[Value]) -> None:
        def column(n: Value, _: list[Value]) -> None:
            place = f.pointer(f.pointer(result, f.mul(m, 64)), n)

            def depth(k: Value, sums: list[Value]) -> list[Value]:
                total = sums[0]
                for half in (0, 2):
                    a = f.pointer(f.pointer(left, f.mul(m, 64)), f.add(k, half))
                    b = f.pointer(f.pointer(right, f.mul(k, 16)), f.add(n, half))
                    product = f.emit(f"fmul float {wide_of(a)}, {wide_of(b)}")
                    total = f.emit(f"fadd float {total}, {product}")
                return [total]

            (total,) = f.loop(0, deep, 4, depth, [("float", f.load("float", place, 4))])
            f.store("float", total, place, 4)

        f.loop(0, wide, 4, column)

    f.loop(0, rows, 1, row)
    return f.finish()
