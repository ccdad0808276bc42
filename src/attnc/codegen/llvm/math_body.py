"""A small language for the bodies of `math`: lanes with operators, written out as LLVM text.

    body.polynomial(x, table) * x + 1.0     # x is Lanes; numbers become splat constants

No fast-math flags are ever written: a fused multiply-add is asked for by name (`fma`), and what is not asked for stays
as it is, since (x + M) - M and the tests for NaN depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attnc.codegen.llvm.text import Function, float_constant, vector

FLOATS = ("half", "float", "double")
BITS = {"half": 16, "float": 32, "double": 64}
PURE = "nounwind willreturn memory(none)"


@dataclass(frozen=True)
class Machine:
    """What the bodies need to know of the CPU: whether it rounds to integers and converts f16 in vectors (else by bit
    arithmetic, where LLVM would call a library for each lane), and whether a maximum that hands NaN on is one instruction (on
    x86 that is a compare and a select in the right order)."""

    rounds: bool = True
    halves: bool = True
    maximum: bool = False

    @staticmethod
    def of(triple: str, features: str) -> Machine:
        """The machine of an LLVM triple and feature list (`+avx2,+f16c,…`)."""
        if not triple.startswith(("x86", "amd64", "i386", "i686")):
            return Machine(maximum=triple.startswith(("aarch64", "arm64")))
        have = {feature[1:] for feature in features.split(",") if feature.startswith("+")}
        return Machine(
            rounds=bool(have & {"sse4.1", "sse4.2", "avx", "avx2", "avx512f"}),
            halves=bool(have & {"f16c", "avx512f"}),
        )


@dataclass(frozen=True)
class Lanes:
    """A value of `body.width` lanes of `element`."""

    body: Body
    name: str
    element: str

    @property
    def type(self) -> str:
        return self.body.type(self.element)

    @property
    def is_float(self) -> bool:
        return self.element in FLOATS

    def _binary(self, opcode: str, left: Lanes | float, right: Lanes | float) -> Lanes:
        a, b = self.body.value(left, self.element), self.body.value(right, self.element)
        return self.body.emit(f"{opcode} {self.type} {a.name}, {b.name}", self.element)

    def __add__(self, other: Lanes | float) -> Lanes:
        return self._binary("fadd" if self.is_float else "add", self, other)

    def __sub__(self, other: Lanes | float) -> Lanes:
        return self._binary("fsub" if self.is_float else "sub", self, other)

    def __rsub__(self, other: Lanes | float) -> Lanes:
        return self._binary("fsub" if self.is_float else "sub", other, self)

    def __mul__(self, other: Lanes | float) -> Lanes:
        return self._binary("fmul" if self.is_float else "mul", self, other)

    def __truediv__(self, other: Lanes | float) -> Lanes:
        return self._binary("fdiv", self, other)

    def __rtruediv__(self, other: Lanes | float) -> Lanes:
        return self._binary("fdiv", other, self)

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Lanes:
        return self.body.emit(f"fneg {self.type} {self.name}", self.element) if self.is_float else 0 - self

    def __and__(self, other: Lanes | int) -> Lanes:
        return self._binary("and", self, other)

    def __or__(self, other: Lanes | int) -> Lanes:
        return self._binary("or", self, other)

    def __xor__(self, other: Lanes | int) -> Lanes:
        return self._binary("xor", self, other)

    def __lshift__(self, other: Lanes | int) -> Lanes:
        return self._binary("shl", self, other)

    def __rshift__(self, other: Lanes | int) -> Lanes:
        """The arithmetic shift; `unsigned_shift` is the other."""
        return self._binary("ashr", self, other)

    def unsigned_shift(self, other: Lanes | int) -> Lanes:
        return self._binary("lshr", self, other)

    def binary(self, opcode: str, other: Lanes | float) -> Lanes:
        """Any LLVM instruction of two operands of this type."""
        return self._binary(opcode, self, other)

    def compare(self, predicate: str, other: Lanes | float) -> Lanes:
        """`fcmp` or `icmp`, as the element asks."""
        b = self.body.value(other, self.element)
        opcode = "fcmp" if self.is_float else "icmp"
        return self.body.emit(f"{opcode} {predicate} {self.type} {self.name}, {b.name}", "i1")

    def convert(self, opcode: str, element: str) -> Lanes:
        """`fpext`, `sitofp`, `trunc`, … to `element`."""
        return self.body.emit(f"{opcode} {self.type} {self.name} to {self.body.type(element)}", element)

    def bits(self) -> Lanes:
        """The representation of a float, as an integer of its width."""
        return self.convert("bitcast", f"i{BITS[self.element]}")

    def floating(self) -> Lanes:
        """The float an integer represents, of its width."""
        return self.convert("bitcast", {"i16": "half", "i32": "float", "i64": "double"}[self.element])


class Body:
    """A function in the making: `arguments` are its parameters' elements, reached as `self.arguments`."""

    def __init__(self, symbol: str, width: int, arguments: Sequence[tuple[str, str]], result: str, machine: Machine):
        self.width = width
        self.machine = machine
        self.declarations: dict[str, None] = {}
        self.function = Function(
            symbol,
            [(vector(width, element), name) for name, element in arguments],
            vector(width, result),
            linkage="internal",
            attributes="alwaysinline nounwind",
        )
        self.arguments = [Lanes(self, f"%{name}", element) for name, element in arguments]

    def type(self, element: str) -> str:
        return vector(self.width, element)

    def emit(self, instruction: str, element: str) -> Lanes:
        return Lanes(self, self.function.emit(instruction), element)

    def constant(self, value: float, element: str) -> Lanes:
        text = float_constant(value, element) if element in FLOATS else str(int(value))
        if element == "i1":
            text = "true" if value else "false"
        return Lanes(self, text if self.width == 1 else f"splat ({element} {text})", element)

    def value(self, value: Lanes | float, element: str) -> Lanes:
        return value if isinstance(value, Lanes) else self.constant(value, element)

    def intrinsic(self, name: str, operands: Sequence[Lanes], result: str = "", suffixes: Sequence[str] = ()) -> Lanes:
        """A call of `@llvm.<name>.<vector suffix of the first operand's type>`."""
        short = {"half": "f16", "float": "f32", "double": "f64"}
        element = operands[0].element
        suffix = ("" if self.width == 1 else f"v{self.width}") + short.get(element, element)
        result = result or element
        symbol = f"@llvm.{name}.{suffix}"
        types = ", ".join(operand.type for operand in operands)
        self.declarations[f"declare {self.type(result)} {symbol}({types})"] = None
        arguments = ", ".join(f"{operand.type} {operand.name}" for operand in operands)
        return self.emit(f"call {self.type(result)} {symbol}({arguments})", result)

    def fma(self, a: Lanes, b: Lanes | float, c: Lanes | float) -> Lanes:
        """a·b + c, with one rounding where the CPU has the instruction."""
        return self.intrinsic("fmuladd", [a, self.value(b, a.element), self.value(c, a.element)])

    def polynomial(self, x: Lanes, coefficients: Sequence[float]) -> Lanes:
        """Horner's rule, lowest power first."""
        result = self.constant(coefficients[-1], x.element)
        for coefficient in reversed(coefficients[:-1]):
            result = self.fma(result, x, coefficient)
        return result

    def select(self, condition: Lanes, yes: Lanes | float, no: Lanes | float, element: str = "") -> Lanes:
        given = yes if isinstance(yes, Lanes) else no
        element = given.element if isinstance(given, Lanes) else element
        a, b = self.value(yes, element), self.value(no, element)
        return self.emit(f"select {condition.type} {condition.name}, {a.type} {a.name}, {b.type} {b.name}", element)

    def at_least(self, x: Lanes, low: float) -> Lanes:
        """The larger of x and a constant; a NaN stays (one `vmaxps`)."""
        limit = self.constant(low, x.element)
        if self.machine.maximum:
            return self.intrinsic("maximum", [limit, x])
        return self.select(limit.compare("ogt", x), limit, x)

    def at_most(self, x: Lanes, high: float) -> Lanes:
        """The smaller of x and a constant; a NaN stays."""
        limit = self.constant(high, x.element)
        if self.machine.maximum:
            return self.intrinsic("minimum", [limit, x])
        return self.select(limit.compare("olt", x), limit, x)

    def absolute(self, x: Lanes) -> Lanes:
        return self.intrinsic("fabs", [x])

    def copysign(self, magnitude: Lanes, sign: Lanes) -> Lanes:
        return self.intrinsic("copysign", [magnitude, sign])

    def round(self, x: Lanes, how: str) -> Lanes:
        """`how`: floor, ceil, trunc or roundeven."""
        if self.machine.rounds:
            return self.intrinsic(how, [x])
        # Adding and taking away 2^23 (2^52) rounds the magnitude to an integer, and larger ones are integers already.
        magnitude = self.absolute(x)
        shift = 2.0**23 if x.element == "float" else 2.0**52
        integer = (magnitude + shift) - shift
        if how == "trunc":
            integer = integer - self.select(integer.compare("ogt", magnitude), 1.0, 0.0, x.element)
        integer = self.copysign(integer, x)
        if how in ("floor", "ceil"):
            too_far = integer.compare("ogt" if how == "floor" else "olt", x)
            step = self.select(too_far, 1.0 if how == "floor" else -1.0, 0.0, x.element)
            integer = self.copysign(integer - step, x)
        return self.select(magnitude.compare("olt", shift), integer, x)

    def any(self, condition: Lanes) -> str:
        """Whether the condition holds in some lane, as a scalar i1."""
        if self.width == 1:
            return condition.name
        mask = self.function.emit(f"bitcast {condition.type} {condition.name} to i{self.width}")
        return self.function.emit(f"icmp ne i{self.width} {mask}, 0")

    def rarely(self, condition: Lanes, usual: Sequence[Lanes], rare: Callable[[], Sequence[Lanes]]) -> list[Lanes]:
        """`usual`, but in lanes with `condition` the values of `rare()`, computed only if there is such a lane."""

        def then() -> list[str]:
            return [self.select(condition, a, b).name for a, b in zip(rare(), usual, strict=True)]

        names = self.function.when(self.any(condition), then, lambda: [v.name for v in usual], [v.type for v in usual])
        return [Lanes(self, name, value.element) for name, value in zip(names, usual, strict=True)]

    def each_lane(self, operands: Sequence[Lanes], result: str, scalar: Callable[[list[str]], str]) -> Lanes:
        """`scalar` (names of one lane's operands → name of its result) for one lane after the other."""
        if self.width == 1:
            return Lanes(self, scalar([operand.name for operand in operands]), result)
        type_, whole = self.type(result), "poison"
        for lane in range(self.width):
            parts = [self.function.emit(f"extractelement {v.type} {v.name}, i64 {lane}") for v in operands]
            whole = self.function.emit(f"insertelement {type_} {whole}, {result} {scalar(parts)}, i64 {lane}")
        return Lanes(self, whole, result)
