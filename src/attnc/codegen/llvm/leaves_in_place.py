"""Leaf routines for `tile.dot` with few rows: the right-hand side is read where it lies, and converted in registers.

Its rows are contiguous, so lanes run along the memory's columns in both products. `by transposed` (query times key) then sums
over lanes: each pair of a row and a key has a vector of partial sums, and a tree of shuffles puts as many pairs as there are
lanes into one vector. The plain product (weights times value) needs no such thing. Both keep a block of pairs in registers;
with few rows that is many keys, or many columns.
"""

from __future__ import annotations

from attnc.codegen.llvm.leaves_convert import SOURCE_BYTES, convert, stored_as
from attnc.codegen.llvm.leaves_dot import ROWS_PER_POINTER, SHORT, Shape
from attnc.codegen.llvm.text import Function, Value, float_constant, vector
from attnc.target import Target

LANE_BITS = 128
LINE_BYTES = 64
AHEAD_BYTES = 8 * 1024
"""How far ahead of what is read its later rows are asked for, into L2. Memory that is read once comes too late without: a row
is too short for the processor to see a stream in it, and where heads lie side by side the next row is on another page."""

PREFETCH = "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)\n"

OPERANDS = [
    ("ptr", "lhs"),
    ("i64", "lhs_stride"),
    ("ptr", "rhs"),
    ("i64", "rhs_stride"),
    ("ptr", "out"),
    ("i64", "out_stride"),
]


def accumulators(target: Target) -> int:
    """How many vectors of partial sums a block has: enough to hide a multiply-add's latency, and registers for the operands."""
    return 16 if target.registers >= 32 else 8


def heights(target: Target) -> list[int]:
    """How many rows a block may have, most first."""
    return [rows for rows in (8, 4, 2, 1) if 2 * rows <= accumulators(target)]


class _Leaf:
    """A function over all rows, in blocks, and what the blocks' functions share."""

    def __init__(self, name: str, source: str, element: str, target: Target):
        self.shape, self.source, self.target = Shape(element, target), source, target
        self.symbol = self.shape.symbol(f"{name}.{SHORT[source]}")
        self.stored = stored_as(source, target)
        self.type, self.element = self.shape.type, element

    def load(self, f: Function, pointer: Value) -> Value:
        """A vector of the right-hand side, converted."""
        loaded = f.load(vector(self.shape.width, self.stored), pointer, SOURCE_BYTES[self.source])
        return convert(f, self.source, self.element, self.shape.width, loaded, self.target)

    @staticmethod
    def ahead(f: Function, stride_bytes: Value, row_bytes: Value | int) -> Value:
        """The distance in bytes between a row of the right-hand side and that which is to be asked for."""
        rows = f.emit(f"udiv i64 {AHEAD_BYTES}, {row_bytes}")
        return f.emit(f"mul i64 {stride_bytes}, {rows}")

    @staticmethod
    def prefetch(f: Function, pointer: Value) -> None:
        f.do(f"call void @llvm.prefetch.p0(ptr {pointer}, i32 0, i32 2, i32 1)")

    def splat(self, f: Function, pointer: Value) -> Value:
        return f.splat(f.load(self.element, pointer, self.shape.bytes), self.shape.width, self.element)

    def vector_load(self, f: Function, pointer: Value) -> Value:
        return f.load(self.type, pointer, self.shape.bytes)

    def over_rows(self, arguments: list[tuple[str, str]], scaled: bool) -> str:
        """The function that callers see: row blocks, as high as what is left allows. A block may reach beyond `rows`."""
        f = Function(self.symbol, arguments)
        head, done = f.new_block("rows"), f.new_block("done")
        before = f.current_block
        f.branch(head)
        f.place(head)
        place = len(f.lines)
        f.lines.append("")
        row, incoming = "%row", [f"[ 0, %{before} ]"]
        left = f.emit(f"sub i64 %rows, {row}")
        for height in heights(self.target):
            yes, no = f.new_block(f"take{height}"), f.new_block("fewer")
            f.branch_if(f.emit(f"icmp sgt i64 {left}, {height * 5 // 8}"), yes, no)
            f.place(yes)
            moved = {
                "lhs": f.pointer("%lhs", f.emit(f"mul i64 {row}, %lhs_stride"), self.element),
                "out": f.pointer("%out", f.emit(f"mul i64 {row}, %out_stride"), self.element),
            }
            if scaled:
                here = f.pointer("%scale", row, self.element)
                moved["scale"] = f.emit(f"select i1 {f.emit('icmp eq ptr %scale, null')}, ptr null, ptr {here}")
            passed = ", ".join(f"{type_} {moved.get(name, '%' + name)}" for type_, name in arguments if name != "rows")
            f.do(f"call void @{self.symbol}.{height}({passed})")
            incoming.append(f"[ {f.add(row, height)}, %{f.current_block} ]")
            f.branch(head)
            f.place(no)
        f.branch(done)
        f.place(done)
        f.lines[place] = f"  {row} = phi i64 {', '.join(incoming)}"
        return f.finish()

    def pointers(self, f: Function, base: Value, stride_bytes: Value, count: int) -> list[Value]:
        """One pointer for three rows: an address reaches a stride and its double."""
        found = [base]
        if count > ROWS_PER_POINTER:
            triple = f.emit(f"mul i64 {stride_bytes}, {ROWS_PER_POINTER}")
            for _ in range(ROWS_PER_POINTER, count, ROWS_PER_POINTER):
                found.append(f.pointer(found[-1], triple))
        return found


def _places(f: Function, pointers: list[Value], strides: list[Value | int], count: int) -> list[Value]:
    return [f.pointer(pointers[n // ROWS_PER_POINTER], strides[n % ROWS_PER_POINTER]) for n in range(count)]


def _multiples(f: Function, stride: str, size: int) -> tuple[Value, list[Value | int]]:
    """A stride in bytes, and the multiples of it that three rows need."""
    once = f.emit(f"mul i64 {stride}, {size}")
    return once, [0, once, f.emit(f"shl i64 {once}, 1")]


# -- rows times keys ------------------------------------------------------------------------------------------------------
def dot_in_place(source: str, element: str, depth: int, target: Target) -> tuple[str, str]:
    """`void (ptr lhs, i64 lhs_stride, ptr rhs, i64 rhs_stride, ptr out, i64 out_stride, i64 valid, i64 columns, i64 rows)`

    out[r, c] = Σ_{d < depth} lhs[r, d] · rhs[c, d] for c < valid; 0 for valid ≤ c < columns. `depth` is a multiple of the
    vector's lanes. Strides are in elements, `rhs` is of `source`; nothing needs alignment. Whole blocks of rows (`heights`) may
    be read and written.
    """
    leaf = _Leaf(f"dot_in_place.{depth}", source, element, target)
    arguments = [*OPERANDS, ("i64", "valid"), ("i64", "columns"), ("i64", "rows")]
    blocks = [_dot_block(leaf, height, accumulators(target) // height, depth) for height in heights(target)]
    reduce = f"declare {element} @llvm.vector.reduce.fadd.v{leaf.shape.width}f{leaf.shape.bits}({element}, {leaf.type})"
    texts = [leaf.over_rows(arguments, False), *blocks, PREFETCH, leaf.shape.declarations, reduce]
    return leaf.symbol, "\n".join(texts) + "\n"


def _dot_block(leaf: _Leaf, rows: int, keys: int, depth: int) -> str:
    shape, element = leaf.shape, leaf.element
    arguments = [*OPERANDS, ("i64", "valid"), ("i64", "columns")]
    f = Function(f"{leaf.symbol}.{rows}", arguments, linkage="internal")
    left_stride, left_steps = _multiples(f, "%lhs_stride", shape.bytes)
    right_stride = f.emit(f"mul i64 %rhs_stride, {SOURCE_BYTES[leaf.source]}")
    lefts = leaf.pointers(f, "%lhs", left_stride, rows)
    ahead = leaf.ahead(f, right_stride, depth * SOURCE_BYTES[leaf.source])

    def left_vectors(pointers: list[Value]) -> list[Value]:
        """The next vector of each row."""
        return [leaf.vector_load(f, place) for place in _places(f, pointers, left_steps, rows)]

    def multiply_add(left: list[Value], right_here: Value, values: list[Value], count: int) -> list[Value]:
        """`values` and the products of a vector of each row with that of each key."""
        places = [right_here, f.pointer(right_here, right_stride)][:count]
        right = [leaf.load(f, place) for place in places]
        for place in places:
            leaf.prefetch(f, f.pointer(place, ahead))
        return [shape.multiply_add(f, left[r], right[c], values[r * count + c]) for r in range(rows) for c in range(count)]

    # Rows that fit into the registers beside the sums are loaded once for all keys.
    held: list[list[Value]] = []
    if rows * depth <= accumulators(leaf.target) * shape.width:
        offsets = range(0, depth, shape.width)
        held = [left_vectors([f.pointer(pointer, offset, element) for pointer in lefts]) for offset in offsets]

    def sums(first: Value, count: int) -> list[Value]:
        """Vectors of partial sums of each row with `count` keys from `first` on, row by row."""
        start = f.pointer("%rhs", f.mul(first, right_stride))
        zeros = [shape.zero] * (rows * count)
        if held:
            values = zeros
            for n, left in enumerate(held):
                values = multiply_add(left, f.pointer(start, n * shape.width, leaf.stored), values, count)
            return values

        def step(_: Value, carried: list[Value]) -> list[Value]:
            values, (*left_here, right_here) = carried[: rows * count], carried[rows * count :]
            values = multiply_add(left_vectors(left_here), right_here, values, count)
            moved = [f.pointer(pointer, shape.width, element) for pointer in left_here]
            return [*values, *moved, f.pointer(right_here, shape.width, leaf.stored)]

        carried = [(leaf.type, zero) for zero in zeros] + [("ptr", pointer) for pointer in (*lefts, start)]
        return f.loop(0, depth, shape.width, step, carried, "depth")[: rows * count]

    def out(r: int, column: Value) -> Value:
        row = f.pointer("%out", f.mul("%out_stride", r), element)
        return f.pointer(row, column, element)

    def whole(first: Value, _: list[Value]) -> None:
        # Two keys side by side make good use of a row's vector; more would hide from the processor that it reads a stream.
        values: list[Value] = [""] * (rows * keys)
        for key in range(0, keys, 2):
            pair = sums(f.add(first, key), 2)
            for r in range(rows):
                values[r * keys + key : r * keys + key + 2] = pair[2 * r : 2 * r + 2]
        width = shape.width
        reduced = [_lane_sums(f, shape, values[n : n + width]) for n in range(0, rows * keys, width)]
        for r in range(rows):
            for c in range(0, keys, width):
                n = r * keys + c
                if keys >= width:
                    f.store(leaf.type, reduced[n // width], out(r, f.add(first, c)), shape.bytes)
                else:
                    lanes = ", ".join(f"i32 {lane}" for lane in range(n % width, n % width + keys))
                    part = f.emit(
                        f"shufflevector {leaf.type} {reduced[n // width]}, {leaf.type} poison, <{keys} x i32> <{lanes}>"
                    )
                    f.store(vector(keys, element), part, out(r, first), shape.bytes)

    def single(first: Value, _: list[Value]) -> None:
        for r, value in enumerate(sums(first, 1)):
            zero = float_constant(-0.0, element)
            name = f"@llvm.vector.reduce.fadd.v{shape.width}f{shape.bits}"
            total = f.emit(f"call reassoc {element} {name}({element} {zero}, {leaf.type} {value})")
            f.store(element, total, out(r, first), shape.bytes)

    def nothing(column: Value, _: list[Value]) -> None:
        for r in range(rows):
            f.store(element, float_constant(0.0, element), out(r, column), shape.bytes)

    end = f.emit(f"and i64 %valid, {-keys}")
    f.loop(0, end, keys, whole, hint="keys")
    f.loop(end, "%valid", 1, single, hint="key")
    f.loop("%valid", "%columns", 1, nothing, hint="beyond")
    return f.finish()


def _lane_sums(f: Function, shape: Shape, values: list[Value]) -> Value:
    """As many vectors as there are lanes: lane i of the result is the sum of vector i's lanes.

    First within the parts of a vector that x86 shuffles cheaply (128 bits), then across them; each step halves the vectors.
    """
    width, inner = shape.width, min(shape.width, LANE_BITS // shape.bits)
    parts = width // inner

    def add(a: Value, b: Value, low: list[int], high: list[int]) -> Value:
        def pick(order: list[int]) -> Value:
            lanes = ", ".join(f"i32 {lane}" for lane in order)
            return f.emit(f"shufflevector {shape.type} {a}, {shape.type} {b}, <{width} x i32> <{lanes}>")

        return f.emit(f"fadd {shape.type} {pick(low)}, {pick(high)}")

    def pairs(low: list[int], high: list[int]) -> None:
        values[:] = [add(a, b, low, high) for a, b in zip(values[::2], values[1::2], strict=True)]

    values = list(values)
    unit = 1
    while unit < inner:
        # Runs of `unit` elements of both in turn: those of each part's lower half, and those of its upper.
        orders: list[list[int]] = []
        for half in (0, inner // 2):
            order: list[int] = []
            for part in range(0, width, inner):
                for run in range(part + half, part + half + inner // 2, unit):
                    order += [*range(run, run + unit), *range(width + run, width + run + unit)]
            orders.append(order)
        pairs(*orders)
        unit *= 2
    if parts == 2:
        pairs(_parts(inner, [0, 2]), _parts(inner, [1, 3]))
    elif parts == 4:
        pairs(_parts(inner, [0, 1, 4, 5]), _parts(inner, [2, 3, 6, 7]))
        pairs(_parts(inner, [0, 2, 4, 6]), _parts(inner, [1, 3, 5, 7]))
    return values[0]


def _parts(inner: int, order: list[int]) -> list[int]:
    """Lanes of whole parts, in this order."""
    return [part * inner + lane for part in order for lane in range(inner)]


# -- rows times values ----------------------------------------------------------------------------------------------------
def accumulate_in_place(source: str, element: str, columns: int, target: Target) -> tuple[str, str]:
    """`void (ptr lhs, i64 lhs_stride, ptr rhs, i64 rhs_stride, ptr out, i64 out_stride, ptr scale, i64 depth, i64 rows)`

    out[r, c] = scale[r] · out[r, c] + Σ_{d < depth} lhs[r, d] · rhs[d, c] for c < `columns`, a multiple of the vector's lanes;
    a null `scale` is 1. All else as in `dot_in_place`.
    """
    leaf = _Leaf(f"accumulate_in_place.{columns}", source, element, target)
    arguments = [*OPERANDS, ("ptr", "scale"), ("i64", "depth"), ("i64", "rows")]
    vectors = columns // leaf.shape.width
    blocks = [_accumulate_block(leaf, height, _shares(vectors, accumulators(target) // height)) for height in heights(target)]
    return leaf.symbol, "\n".join([leaf.over_rows(arguments, True), *blocks, PREFETCH, leaf.shape.declarations]) + "\n"


def _shares(vectors: int, most: int) -> list[int]:
    """So many vectors in groups of at most `most`, as even as can be."""
    groups = -(-vectors // most)
    return [vectors // groups + (n < vectors % groups) for n in range(groups)]


def _accumulate_block(leaf: _Leaf, rows: int, groups: list[int]) -> str:
    shape, element = leaf.shape, leaf.element
    arguments = [*OPERANDS, ("ptr", "scale"), ("i64", "depth")]
    f = Function(f"{leaf.symbol}.{rows}", arguments, linkage="internal")
    left_stride, left_steps = _multiples(f, "%lhs_stride", shape.bytes)
    right_stride = f.emit(f"mul i64 %rhs_stride, {SOURCE_BYTES[leaf.source]}")
    lefts = leaf.pointers(f, "%lhs", left_stride, rows)
    unscaled = f.emit("icmp eq ptr %scale, null")
    ahead = leaf.ahead(f, right_stride, sum(groups) * shape.width * SOURCE_BYTES[leaf.source])

    def group(offset: int, vectors: int) -> None:
        places: list[Value] = []
        for r in range(rows):
            row = f.pointer("%out", f.mul("%out_stride", r), element)
            places += [f.pointer(row, offset + v * shape.width, element) for v in range(vectors)]

        def plain() -> list[Value]:
            return [leaf.vector_load(f, place) for place in places]

        def scaled() -> list[Value]:
            result: list[Value] = []
            for n, value in enumerate(plain()):
                if n % vectors == 0:
                    factor = leaf.splat(f, f.pointer("%scale", n // vectors, element))
                result.append(f.emit(f"fmul {leaf.type} {value}, {factor}"))
            return result

        initial = f.when(unscaled, plain, scaled, [leaf.type] * len(places))

        def step(_: Value, carried: list[Value]) -> list[Value]:
            values, (*left_here, right_here) = carried[: len(places)], carried[len(places) :]
            right = [leaf.load(f, f.pointer(right_here, v * shape.width, leaf.stored)) for v in range(vectors)]
            later = f.pointer(right_here, ahead)
            for v in range(0, vectors, max(1, LINE_BYTES // (shape.width * SOURCE_BYTES[leaf.source]))):
                leaf.prefetch(f, f.pointer(later, v * shape.width, leaf.stored))
            result: list[Value] = []
            for r, place in enumerate(_places(f, left_here, left_steps, rows)):
                left = leaf.splat(f, place)
                result += [shape.multiply_add(f, left, right[v], values[r * vectors + v]) for v in range(vectors)]
            moved = [f.pointer(pointer, 1, element) for pointer in left_here]
            return [*result, *moved, f.pointer(right_here, right_stride)]

        start = f.pointer("%rhs", offset, leaf.stored)
        carried = [(leaf.type, value) for value in initial] + [("ptr", pointer) for pointer in (*lefts, start)]
        final = f.loop(0, "%depth", 1, step, carried, "depth")
        for place, value in zip(places, final, strict=False):
            f.store(leaf.type, value, place, shape.bytes)

    offset = 0
    for vectors in groups:
        group(offset, vectors)
        offset += vectors * shape.width
    return f.finish()
