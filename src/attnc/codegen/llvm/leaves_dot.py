"""Leaf routines for `tile.dot`: a strip of rows times panels, with a block of accumulators in registers.

The left operand is row-major; the right one is packed in panels of `columns` = vectors · lanes columns, `[depth][columns]`
each. Both products of attention are the same loop, so one internal function serves both and their sizes are run-time numbers: a
machine compiles it once for an element type. It comes out of LLVM's code generator as it should without any IR pass.
"""

from __future__ import annotations

from attnc.analysis.machine import register_tile
from attnc.codegen.llvm.text import Function, Value, float_constant, splat_constant, vector
from attnc.target import Target

BITS = {"float": 32, "double": 64}
SHORT = {"float": "f32", "double": "f64", "half": "f16", "bfloat": "bf16"}
ROWS_PER_POINTER = 3

EXACT_COLUMNS, CHUNKED_COLUMNS = 16, 1024
"""A product with up to so many columns is summed in f64; in chunks of the depth, each a chain of its own. There torch
multiplies more precisely than by one chain over the depth. (With more columns chunks would cost 2 % of the attention.)"""

CHUNKS = ((64, 32), (128, 64))
"""(depth up to, products of a chunk); greater depths have chunks as the first."""

VARIANTS = {12: ((12, 8), (4, 0)), 8: ((8, 4), (4, 0)), 6: ((6, 2), (2, 0)), 4: ((4, 0),), 2: ((2, 0),)}
"""For each height of the register tile: (rows, the count of rows left above which this many are done at once). Few, for
each costs three milliseconds of compile time."""


class Shape:
    """The register tile for one element type: `rows` × `vectors` vectors of `width` lanes."""

    chunked = True

    def __init__(self, element: str, target: Target):
        self.element = element
        self.bits = BITS[element]
        self.bytes = self.bits // 8
        self.width = target.lanes(self.bits)
        self.rows, self.vectors = register_tile(target, self.bits)
        self.columns = self.width * self.vectors
        self.type = vector(self.width, element)
        self.zero = splat_constant(float_constant(0.0, element), self.width, element)
        self.fmuladd = f"@llvm.fmuladd.{f'v{self.width}' if self.width > 1 else ''}f{self.bits}"
        self.declarations = f"declare {self.type} {self.fmuladd}({', '.join([self.type] * 3)})\n"

    @property
    def flags(self) -> list[tuple[str, str]]:
        """What a product's functions are told: not to begin with what is there already; how many products make a chain."""
        return [("i1", "fresh"), ("i64", "chunk")] if self.chunked else []

    def symbol(self, name: str) -> str:
        return f"attnc.{name}.{SHORT[self.element]}.{self.rows}x{self.columns}"

    def load(self, f: Function, pointer: Value) -> Value:
        """A vector of operands or results."""
        return f.load(self.type, pointer, self.bytes)

    def splat(self, f: Function, pointer: Value) -> Value:
        """One operand in every lane."""
        return f.splat(f.load(self.element, pointer, self.bytes), self.width, self.element)

    def store(self, f: Function, value: Value, pointer: Value) -> None:
        f.store(self.type, value, pointer, self.bytes)

    def multiply_add(self, f: Function, a: Value, b: Value, c: Value) -> Value:
        """a · b + c, fused where the machine can."""
        return f.emit(f"call {self.type} {self.fmuladd}({self.type} {a}, {self.type} {b}, {self.type} {c})")


class ExactShape(Shape):
    """A register tile of f64 sums of products of f32: operands are widened, results rounded once."""

    chunked = False

    def __init__(self, target: Target):
        super().__init__("float", target)
        self.rows = 4 if target.registers >= 32 else 2
        self.type = vector(self.width, "double")
        self.zero = splat_constant(float_constant(0.0, "double"), self.width, "double")
        self.fmuladd = f"@llvm.fmuladd.v{self.width}f64"
        self.declarations = f"declare {self.type} {self.fmuladd}({', '.join([self.type] * 3)})\n"

    def symbol(self, name: str) -> str:
        return super().symbol(f"{name}.exact")

    def load(self, f: Function, pointer: Value) -> Value:
        narrow = vector(self.width, "float")
        return f.emit(f"fpext {narrow} {f.load(narrow, pointer, self.bytes)} to {self.type}")

    def splat(self, f: Function, pointer: Value) -> Value:
        wide = f.emit(f"fpext float {f.load('float', pointer, self.bytes)} to double")
        return f.splat(wide, self.width, "double")

    def store(self, f: Function, value: Value, pointer: Value) -> None:
        narrow = vector(self.width, "float")
        f.store(narrow, f.emit(f"fptrunc {self.type} {value} to {narrow}"), pointer, self.bytes)


OPERANDS = [
    ("ptr", "lhs"),
    ("i64", "lhs_stride"),
    ("ptr", "panels"),
    ("i64", "panel_stride"),
    ("ptr", "out"),
    ("i64", "out_stride"),
]


def products(element: str, target: Target) -> tuple[tuple[str, str], str]:
    """The symbols of `dot_rows` and `dot_accumulate`, and one text that defines both.

    Strides are in elements; nothing needs alignment. `rows` is any number ≥ 1; whole register tiles may be read and written, so
    scratch (and `scale`) has a multiple of `register_tile` rows. With NR columns a panel:

    `void dot_rows(ptr lhs, i64 lhs_stride, ptr panels, i64 panel_stride, ptr out, i64 out_stride,
                   i64 panel_count, i64 rows, i64 depth, i64 columns)`
        out[r, p·NR + c] = Σ_{d < depth} lhs[r, d] · panels[p, d, c]; `columns` are those of the whole matrix: where they are
        few, sums are more precise

    `void dot_accumulate(ptr lhs, i64 lhs_stride, ptr panels, i64 panel_stride, ptr acc, i64 acc_stride,
                         ptr scale, i64 depth, i64 rows, i64 panel_count)`
        acc[r, p·NR + c] = scale[r] · acc[r, p·NR + c] + Σ_{d < depth} lhs[r, d] · panels[p, d, c]; a null `scale` is 1
    """
    shape = Shape(element, target)
    product, dot, accumulate = shape.symbol("product"), shape.symbol("dot_rows"), shape.symbol("dot_accumulate")
    operands = "ptr %lhs, i64 %lhs_stride, ptr %panels, i64 %panel_stride, ptr %out, i64 %out_stride"
    texts = product_functions(shape, product)
    first = Function(dot, [*OPERANDS, ("i64", "panel_count"), ("i64", "rows"), ("i64", "depth"), ("i64", "columns")])
    sizes = "ptr null, i64 %depth, i64 %rows, i64 %panel_count"

    def in_chunks() -> None:
        (least, shorter), (most, longer) = CHUNKS
        middle = first.emit(
            f"and i1 {first.emit(f'icmp sgt i64 %depth, {least}')}, {first.emit(f'icmp sle i64 %depth, {most}')}"
        )
        chunk = first.emit(f"select i1 {middle}, i64 {longer}, i64 {shorter}")
        chunk = first.emit(f"select i1 {first.emit(f'icmp sle i64 %columns, {CHUNKED_COLUMNS}')}, i64 {chunk}, i64 %depth")
        first.do(f"call void @{product}({operands}, {sizes}, i1 true, i64 {chunk})")

    if element == "float":
        exact = ExactShape(target)
        symbol = exact.symbol("product")
        texts += product_functions(exact, symbol)
        few = first.emit(f"icmp sle i64 %columns, {EXACT_COLUMNS}")
        first.when(few, lambda: first.do(f"call void @{symbol}({operands}, {sizes})"), in_chunks)
    else:
        in_chunks()
    second = Function(accumulate, [*OPERANDS, ("ptr", "scale"), ("i64", "depth"), ("i64", "rows"), ("i64", "panel_count")])
    second.do(f"call void @{product}({operands}, ptr %scale, i64 %depth, i64 %rows, i64 %panel_count, i1 false, i64 %depth)")
    return (dot, accumulate), "\n".join([first.finish(), second.finish(), *texts])


def product_functions(shape: Shape, symbol: str) -> list[str]:
    """The function over all rows, in blocks of as many as fit what is left, the functions of the blocks, and a row of ones."""
    element, ones = shape.element, f"{symbol}.ones"
    constant = splat_constant(float_constant(1.0, element), shape.rows, element)[1:-1]
    f = Function(
        symbol,
        [*OPERANDS, ("ptr", "scale"), ("i64", "depth"), ("i64", "rows"), ("i64", "panel_count"), *shape.flags],
        linkage="internal",
    )
    passed = "".join(f", {type_} %{name}" for type_, name in shape.flags)
    variants = VARIANTS[shape.rows]
    unscaled = f.emit("icmp eq ptr %scale, null")

    def take(rows: int, row: Value) -> Value:
        lhs = f.pointer("%lhs", f.emit(f"mul i64 {row}, %lhs_stride"), shape.element)
        out = f.pointer("%out", f.emit(f"mul i64 {row}, %out_stride"), shape.element)
        scale = f.emit(f"select i1 {unscaled}, ptr @{ones}, ptr {f.pointer('%scale', row, shape.element)}")
        f.do(
            f"call void @{symbol}.{rows}(ptr {lhs}, i64 %lhs_stride, ptr %panels, i64 %panel_stride, "
            f"ptr {out}, i64 %out_stride, ptr {scale}, i64 %depth, i64 %panel_count{passed})"
        )
        return f.emit(f"add i64 {row}, {rows}")

    head, entry = f.new_block("rows"), f.current_block
    f.branch(head)
    f.place(head)
    place = len(f.lines)
    f.lines.append("")
    row, incoming = "%row", [f"[ 0, %{entry} ]"]
    left = f.emit(f"sub i64 %rows, {row}")
    for rows, above in variants:
        yes, no = f.new_block(f"take{rows}"), f.new_block("fewer")
        f.branch_if(f.emit(f"icmp sgt i64 {left}, {above}"), yes, no)
        f.place(yes)
        incoming.append(f"[ {take(rows, row)}, %{f.current_block} ]")
        f.branch(head)
        f.place(no)
    f.lines[place] = f"  {row} = phi i64 {', '.join(incoming)}"
    blocks = [_block(shape, f"{symbol}.{rows}", rows) for rows, _ in variants]
    return [f"@{ones} = internal constant [{shape.rows} x {element}] [{constant}]", f.finish(), *blocks, shape.declarations]


def _block(shape: Shape, symbol: str, rows: int) -> str:
    """`rows` rows times every panel.

    The loop over depth is not unrolled: a step is long enough (it gained under 2 %), and LLVM would pair the broadcasts of two
    steps and run out of registers.
    """
    f = Function(
        symbol,
        [*OPERANDS, ("ptr", "scale"), ("i64", "depth"), ("i64", "panel_count"), *shape.flags],
        linkage="internal",
    )
    element, type_, vectors = shape.element, shape.type, shape.vectors
    stride = f.emit(f"mul i64 %lhs_stride, {shape.bytes}")
    pointers = ["%lhs"]
    if rows > ROWS_PER_POINTER:
        triple = f.emit(f"mul i64 {stride}, {ROWS_PER_POINTER}")
        for _ in range(ROWS_PER_POINTER, rows, ROWS_PER_POINTER):
            pointers.append(f.pointer(pointers[-1], triple))

    def places(corner: Value) -> list[Value]:
        """A pointer for each vector of the block, by rows."""
        result = []
        for r in range(rows):
            if r:
                corner = f.pointer(corner, "%out_stride", element)
            result += [f.pointer(corner, v * shape.width, element) for v in range(vectors)]
        return result

    if shape.chunked:
        # Without any depth one chain of nothing, which scales what is there.
        upper, chunk = (f.emit(f"select i1 {f.emit(f'icmp sgt i64 {n}, 1')}, i64 {n}, i64 1") for n in ("%depth", "%chunk"))

    def panel_loop(p: Value, _: list[Value]) -> None:
        panel = f.pointer("%panels", f.emit(f"mul i64 {p}, %panel_stride"), element)
        corner = f.pointer("%out", f.emit(f"mul i64 {p}, {shape.columns}"), element)
        count = rows * vectors
        targets = places(corner)

        def put(values: list[Value]) -> None:
            for value, place in zip(values, targets, strict=True):
                shape.store(f, value, place)

        def add(values: list[Value]) -> None:
            for value, place in zip(values, targets, strict=True):
                shape.store(f, f.emit(f"fadd {type_} {shape.load(f, place)}, {value}"), place)

        def add_to_scaled(values: list[Value]) -> None:
            for n, (value, place) in enumerate(zip(values, targets, strict=True)):
                if n % vectors == 0:
                    factor = shape.splat(f, f.pointer("%scale", n // vectors, element))
                shape.store(f, shape.multiply_add(f, shape.load(f, place), factor, value), place)

        def chain(start: Value | int, end: Value) -> list[Value]:
            """The sums of the products from `start` to `end`. They begin at zero: a chain on top of what thousands of products
            before gave would round as often on that scale."""
            here = [f.pointer(pointer, start, element) for pointer in pointers]

            def depth_loop(_: Value, carried: list[Value]) -> list[Value]:
                *here, at = carried[count:]
                values = _step(f, shape, rows, here, stride, at, carried[:count])
                return [*values, *(f.pointer(pointer, 1, element) for pointer in here), f.pointer(at, shape.columns, element)]

            at = f.pointer(panel, f.mul(start, shape.columns), element)
            carried = [(type_, shape.zero)] * count + [("ptr", pointer) for pointer in (*here, at)]
            return f.loop(start, end, 1, depth_loop, carried, "depth")[:count]

        def chunk_loop(start: Value, _: list[Value]) -> None:
            onto = f.emit(f"icmp ne i64 {start}, 0")
            values = chain(start, _smaller(f, f.add(start, chunk), "%depth"))
            f.when(onto, lambda: add(values), lambda: f.when("%fresh", lambda: put(values), lambda: add_to_scaled(values)))

        if shape.chunked:
            f.loop(0, upper, chunk, chunk_loop, hint="chunk")
        else:
            put(chain(0, "%depth"))

    f.loop(0, "%panel_count", 1, panel_loop, hint="panel")
    return f.finish()


def _smaller(f: Function, a: Value, b: Value) -> Value:
    return f.emit(f"select i1 {f.emit(f'icmp slt i64 {a}, {b}')}, i64 {a}, i64 {b}")


def _step(
    f: Function, shape: Shape, rows: int, lhs: list[Value], stride: Value, panel: Value, accumulators: list[Value]
) -> list[Value]:
    """One column of the left rows times one row of the panel, added to the accumulators.

    One pointer serves three rows (an x86 address reaches a stride and its double): a pointer a row would need twelve of the
    sixteen general registers.
    """
    element, vectors, result = shape.element, shape.vectors, list(accumulators)
    right = [shape.load(f, f.pointer(panel, v * shape.width, element)) for v in range(vectors)]
    offsets = [0, stride, f.emit(f"shl i64 {stride}, 1")]
    for r in range(rows):
        pointer = f.pointer(lhs[r // ROWS_PER_POINTER], offsets[r % ROWS_PER_POINTER])
        left = shape.splat(f, pointer)
        for v in range(vectors):
            n = r * vectors + v
            result[n] = shape.multiply_add(f, left, right[v], result[n])
    return result


def dot_accumulate_careful(element: str, target: Target) -> tuple[str, str]:
    """`void (ptr lhs, i64 lhs_stride, ptr panels, i64 panel_stride, ptr acc, i64 acc_stride,
              ptr scale, i64 depth, i64 rows, i64 panel_count, ptr live, i64 live_stride)`

    `dot_accumulate` where (r, d) takes part only if the byte live[r, d] is not zero, whatever the operands hold. For the rare
    block whose result was not finite, so small rather than fast.
    """
    shape = Shape(element, target)
    symbol = shape.symbol("dot_accumulate_careful")
    f = Function(
        symbol,
        [
            *OPERANDS,
            ("ptr", "scale"),
            ("i64", "depth"),
            ("i64", "rows"),
            ("i64", "panel_count"),
            ("ptr", "live"),
            ("i64", "live_stride"),
        ],
    )
    type_, one = shape.type, float_constant(1.0, element)
    unscaled = f.emit("icmp eq ptr %scale, null")

    def row_loop(r: Value, _: list[Value]) -> None:
        lhs = f.pointer("%lhs", f.emit(f"mul i64 {r}, %lhs_stride"), element)
        out = f.pointer("%out", f.emit(f"mul i64 {r}, %out_stride"), element)
        live = f.pointer("%live", f.emit(f"mul i64 {r}, %live_stride"))
        (factor,) = f.when(
            unscaled, lambda: [one], lambda: [f.load(element, f.pointer("%scale", r, element), shape.bytes)], [element]
        )
        factor = f.splat(factor, shape.width, element)

        def panel_loop(p: Value, _: list[Value]) -> None:
            panel = f.pointer("%panels", f.emit(f"mul i64 {p}, %panel_stride"), element)
            corner = f.pointer(out, f.emit(f"mul i64 {p}, {shape.columns}"), element)
            places = [f.pointer(corner, v * shape.width, element) for v in range(shape.vectors)]
            initial = [f.emit(f"fmul {type_} {f.load(type_, place, shape.bytes)}, {factor}") for place in places]

            def depth_loop(d: Value, values: list[Value]) -> list[Value]:
                def add() -> list[Value]:
                    left = f.splat(f.load(element, f.pointer(lhs, d, element), shape.bytes), shape.width, element)
                    at = f.pointer(panel, f.emit(f"mul i64 {d}, {shape.columns}"), element)
                    return [
                        shape.multiply_add(f, left, f.load(type_, f.pointer(at, v * shape.width, element), shape.bytes), value)
                        for v, value in enumerate(values)
                    ]

                alive = f.emit(f"icmp ne i8 {f.load('i8', f.pointer(live, d))}, 0")
                return f.when(alive, add, lambda: values, [type_] * shape.vectors)

            values = f.loop(0, "%depth", 1, depth_loop, [(type_, value) for value in initial], "depth")
            for value, place in zip(values, places, strict=True):
                f.store(type_, value, place, shape.bytes)

        f.loop(0, "%panel_count", 1, panel_loop, hint="panel")

    f.loop(0, "%rows", 1, row_loop, hint="row")
    return symbol, f.finish() + "\n" + shape.declarations


def finite(element: str, target: Target) -> tuple[str, str]:
    """`i32 (ptr acc, i64 stride, i64 rows, i64 columns)`: 1 if acc[r, c] is finite for all r < rows, c < columns, else 0."""
    shape = Shape(element, target)
    symbol = shape.symbol("finite")
    f = Function(symbol, [("ptr", "acc"), ("i64", "stride"), ("i64", "rows"), ("i64", "columns")], result="i32")
    type_, zero = shape.type, float_constant(0.0, element)
    whole = f.emit(f"and i64 %columns, {-shape.width}")

    # x · 0 is zero for a finite x and NaN otherwise, and a NaN stays in the sum.
    def row_loop(r: Value, sums: list[Value]) -> list[Value]:
        row = f.pointer("%acc", f.emit(f"mul i64 {r}, %stride"), element)

        def vectors(c: Value, sums: list[Value]) -> list[Value]:
            value = f.load(type_, f.pointer(row, c, element), shape.bytes)
            return [f.emit(f"fadd {type_} {sums[0]}, {f.emit(f'fmul {type_} {value}, {shape.zero}')}")]

        def scalars(c: Value, sums: list[Value]) -> list[Value]:
            value = f.load(element, f.pointer(row, c, element), shape.bytes)
            return [f.emit(f"fadd {element} {sums[0]}, {f.emit(f'fmul {element} {value}, {zero}')}")]

        wide = f.loop(0, whole, shape.width, vectors, [(type_, sums[0])], "column")
        narrow = f.loop(whole, "%columns", 1, scalars, [(element, sums[1])], "rest")
        return [*wide, *narrow]

    wide, narrow = f.loop(0, "%rows", 1, row_loop, [(type_, shape.zero), (element, zero)], "row")
    good = f.emit(f"fcmp ord {type_} {wide}, {shape.zero}")
    bits = f.emit(f"bitcast <{shape.width} x i1> {good} to i{shape.width}")
    all_good = f.emit(f"icmp eq i{shape.width} {bits}, -1")
    rest_good = f.emit(f"fcmp ord {element} {narrow}, {zero}")
    result = f.emit(f"zext i1 {f.emit(f'and i1 {all_good}, {rest_good}')} to i32")
    return symbol, f.finish(result)
