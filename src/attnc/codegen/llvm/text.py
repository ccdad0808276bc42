"""A writer of LLVM text: values get names, loops get their blocks, and nothing is checked before LLVM reads it.

llvmlite's own builder and its printing cost more time than optimising the result (KERNELS: 70 ms against 30 ms), and a text
template would hide the structure; so: a function, `emit` for a value, `do` for an effect, and structured control flow.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

Value = str
"""An LLVM operand without its type: `%12`, `0`, `0x7FF0000000000000`."""


def float_constant(value: float, type_: str) -> Value:
    """A constant of `half`, `float` or `double`, bit for bit. LLVM writes `float` in the hexadecimal form of a double."""
    if type_ == "half":
        return f"0xH{struct.unpack('<H', struct.pack('<e', value))[0]:04X}"
    if type_ == "float":
        value = struct.unpack("<f", struct.pack("<f", value))[0] if abs(value) < 3.5e38 or value != value else value
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


def vector(width: int, element: str) -> str:
    """The type of `width` lanes of `element`; the element itself where there is one lane."""
    return element if width == 1 else f"<{width} x {element}>"


def splat_constant(value: Value, width: int, element: str) -> Value:
    """A constant with the same scalar constant in each lane."""
    return value if width == 1 else "<" + ", ".join([f"{element} {value}"] * width) + ">"


def _both(a: Value | int, b: Value | int) -> bool:
    return all(isinstance(x, int) or x.lstrip("-").isdigit() for x in (a, b))


class Function:
    """One function in the making. Arguments are reached by `%name`."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[tuple[str, str]],
        result: str = "void",
        linkage: str = "",
        attributes: str = "nounwind",
    ):
        self.name = name
        self.arguments = list(arguments)
        self.result = result
        self.header = (
            f"define {linkage + ' ' if linkage else ''}{result} @{name}("
            + ", ".join(f"{type_} %{argument}" for type_, argument in arguments)
            + f") {attributes} {{"
        )
        self.preamble: list[str] = ["entry:"]
        self.lines: list[str] = ["start:"]
        self._values = 0
        self._blocks = 0
        self.current_block = "start"

    # -- straight code ------------------------------------------------------------------------------------------------
    def emit(self, instruction: str) -> Value:
        """Append `%.n = instruction` and return `%.n`."""
        name = f"%.{self._values}"
        self._values += 1
        self.lines.append(f"  {name} = {instruction}")
        return name

    def do(self, instruction: str) -> None:
        """Append an instruction without a result."""
        self.lines.append("  " + instruction)

    def splat(self, value: Value, width: int, element: str) -> Value:
        """The scalar `value` in each of `width` lanes."""
        if width == 1:
            return value
        type_ = vector(width, element)
        first = self.emit(f"insertelement {type_} poison, {element} {value}, i64 0")
        return self.emit(f"shufflevector {type_} {first}, {type_} poison, <{width} x i32> zeroinitializer")

    # -- i64 arithmetic: what is known when writing is not written ---------------------------------------------------------
    def add(self, a: Value | int, b: Value | int) -> Value:
        """a + b."""
        if _both(a, b):
            return str(int(a) + int(b))
        if str(b) == "0":
            return str(a)
        return str(b) if str(a) == "0" else self.emit(f"add i64 {a}, {b}")

    def sub(self, a: Value | int, b: Value | int) -> Value:
        """a - b."""
        if _both(a, b):
            return str(int(a) - int(b))
        return str(a) if str(b) == "0" else self.emit(f"sub i64 {a}, {b}")

    def mul(self, a: Value | int, b: Value | int) -> Value:
        """a * b."""
        if _both(a, b):
            return str(int(a) * int(b))
        if "0" in (str(a), str(b)):
            return "0"
        if str(b) == "1":
            return str(a)
        return str(b) if str(a) == "1" else self.emit(f"mul i64 {a}, {b}")

    def ceil_div(self, a: Value | int, step: int) -> Value:
        """a / step, rounded up, for a >= 0."""
        if _both(a, step):
            return str(-(-int(a) // step))
        return str(a) if step == 1 else self.emit(f"udiv i64 {self.add(a, step - 1)}, {step}")

    def round_up(self, a: Value | int, step: int) -> Value:
        """The next multiple of `step`, a power of two."""
        if _both(a, step):
            return str(-(-int(a) // step) * step)
        return self.emit(f"and i64 {self.add(a, step - 1)}, {-step}")

    def both(self, a: Value, b: Value) -> Value:
        """a and b, of i1."""
        if "true" in (a, b):
            return a if b == "true" else b
        return self.emit(f"and i1 {a}, {b}")

    def pointer(self, base: Value, offset: Value | int, element: str = "i8") -> Value:
        """`base` moved by `offset` elements (an i64)."""
        if offset in (0, "0"):
            return base
        return self.emit(f"getelementptr inbounds {element}, ptr {base}, i64 {offset}")

    def load(self, type_: str, pointer: Value, align: int = 1, suffix: str = "") -> Value:
        return self.emit(f"load {type_}, ptr {pointer}, align {align}{suffix}")

    def store(self, type_: str, value: Value, pointer: Value, align: int = 1, suffix: str = "") -> None:
        self.do(f"store {type_} {value}, ptr {pointer}, align {align}{suffix}")

    @contextmanager
    def at_entry(self) -> Iterator[None]:
        """Straight code written inside goes to the function's entry, whatever is being written now: for values that depend on
        arguments alone, and are used in loops."""
        body, self.lines = self.lines, self.preamble
        try:
            yield
        finally:
            self.preamble, self.lines = self.lines, body

    # -- control flow -------------------------------------------------------------------------------------------------
    def new_block(self, hint: str = "b") -> str:
        """A fresh label, not yet placed."""
        self._blocks += 1
        return f"{hint}.{self._blocks}"

    def place(self, label: str) -> None:
        """Start the block `label` here."""
        self.lines.append(f"{label}:")
        self.current_block = label

    def branch(self, label: str) -> None:
        self.do(f"br label %{label}")

    def branch_if(self, condition: Value, then: str, otherwise: str) -> None:
        self.do(f"br i1 {condition}, label %{then}, label %{otherwise}")

    def loop(
        self,
        lower: Value | int,
        upper: Value | int,
        step: Value | int,
        body: Callable[[Value, list[Value]], Sequence[Value] | None],
        carried: Sequence[tuple[str, Value]] = (),
        hint: str = "loop",
    ) -> list[Value]:
        """`for i in range(lower, upper, step)` over i64, at least zero times. `carried` are (type, initial value); `body(i,
        values)` returns their next values. The result are the values after the last round."""
        head, inside, done = self.new_block(hint), self.new_block(hint + ".body"), self.new_block(hint + ".end")
        before = self.current_block
        self.branch(head)
        self.place(head)
        position, following = f"%{head}.i", f"%{head}.next"
        names = [f"%{head}.c{n}" for n in range(len(carried))]
        # The phi nodes need the loop's last block and values, known after the body: keep their place.
        place = len(self.lines)
        self.lines.append("")
        more = self.emit(f"icmp slt i64 {position}, {upper}")
        self.branch_if(more, inside, done)
        self.place(inside)
        following_values = list(body(position, names) or ())
        assert len(following_values) == len(carried), "a loop body must return what it carries"
        last = self.current_block
        self.do(f"{following} = add nsw i64 {position}, {step}")
        self.branch(head)
        phis = [f"  {position} = phi i64 [ {lower}, %{before} ], [ {following}, %{last} ]"]
        for name, (type_, initial), value in zip(names, carried, following_values, strict=True):
            phis.append(f"  {name} = phi {type_} [ {initial}, %{before} ], [ {value}, %{last} ]")
        self.lines[place] = "\n".join(phis)
        self.place(done)
        return names

    def repeat(self, initial: Value, step: Callable[[Value], tuple[Value, Value]], hint: str = "repeat") -> Value:
        """`while True: go_on, following = step(value); if not go_on: break; value = following` over i64; the last `value`."""
        head, done = self.new_block(hint), self.new_block(hint + ".end")
        before = self.current_block
        self.branch(head)
        self.place(head)
        value = f"%{head}.value"
        place = len(self.lines)
        self.lines.append("")
        go_on, following = step(value)
        self.lines[place] = f"  {value} = phi i64 [ {initial}, %{before} ], [ {following}, %{self.current_block} ]"
        self.branch_if(go_on, head, done)
        self.place(done)
        return value

    def when(
        self,
        condition: Value,
        then: Callable[[], Sequence[Value] | None],
        otherwise: Callable[[], Sequence[Value] | None] | None = None,
        types: Sequence[str] = (),
    ) -> list[Value]:
        """`if condition: then() else: otherwise()`; both return values of `types`, which are joined."""
        yes, no, end = self.new_block("then"), self.new_block("else"), self.new_block("join")
        self.branch_if(condition, yes, no)
        self.place(yes)
        values_yes = list(then() or ())
        from_yes = self.current_block
        self.branch(end)
        self.place(no)
        values_no = list((otherwise() if otherwise else None) or ())
        from_no = self.current_block
        self.branch(end)
        self.place(end)
        return [
            self.emit(f"phi {type_} [ {a}, %{from_yes} ], [ {b}, %{from_no} ]")
            for type_, a, b in zip(types, values_yes, values_no, strict=True)
        ]

    def finish(self, value: Value | None = None) -> str:
        """Return from the function, and its whole text."""
        self.do("ret void" if value is None else f"ret {self.result} {value}")
        return "\n".join([self.header, *self.preamble, "  br label %start", *self.lines, "}"])
