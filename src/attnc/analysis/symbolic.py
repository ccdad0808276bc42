"""Integer arithmetic that is written down as `arith` operations on `index`, and folds what is known already.

A scalar is a Python int, or an SSA value with a range that it surely lies in; a condition is a bool, or an SSA value. What
folds by numbers or by ranges emits nothing, and nothing is emitted twice.
"""

from __future__ import annotations

from typing import TypeAlias

from xdsl.dialects.builtin import i1
from xdsl.ir import SSAValue

from attnc.dialects.building import Builder

Scalar: TypeAlias = "int | SSAValue"
Condition: TypeAlias = "bool | SSAValue"
Range: TypeAlias = tuple[int, int]

MIN, MAX = -(2**63), 2**63 - 1


def _clamp(value: int) -> int:
    return min(max(value, MIN), MAX)


class Arithmetic:
    """Emits into `build`. Sums and products must stay inside 64 bits wherever their value is used: callers see to that."""

    def __init__(self, build: Builder):
        self.build = build
        self.ranges: dict[SSAValue, Range] = {}
        self.known: dict[tuple[object, ...], SSAValue] = {}
        self.both_of: dict[SSAValue, tuple[Condition, Condition]] = {}
        self.either_of: dict[SSAValue, tuple[Condition, Condition]] = {}
        self.inverse: dict[SSAValue, SSAValue] = {}

    # -- scalars ------------------------------------------------------------------------------------------------------

    def range(self, x: Scalar) -> Range:
        """What `x` surely lies in."""
        return (x, x) if isinstance(x, int) else self.ranges.get(x, (MIN, MAX))

    def value(self, x: Scalar) -> SSAValue:
        """`x` as an SSA value of type index."""
        return self.build.constant(x) if isinstance(x, int) else x

    def assume(self, x: SSAValue, low: int, high: int) -> SSAValue:
        """`x`, of which it is known from elsewhere that it lies in [low, high]."""
        self.ranges[x] = (low, high)
        return x

    def _emit(self, name: str, a: Scalar, b: Scalar, range_: Range) -> Scalar:
        low, high = _clamp(range_[0]), _clamp(range_[1])
        if low == high:
            return low
        key = (name, a, b)
        if (known := self.known.get(key)) is None:
            known = self.known[key] = self.build.binary(name, self.value(a), self.value(b))
            self.ranges[known] = (low, high)
        return known

    def add(self, a: Scalar, b: Scalar) -> Scalar:
        if a == 0 or b == 0:
            return b if a == 0 else a
        (a0, a1), (b0, b1) = self.range(a), self.range(b)
        return self._emit("addi", a, b, (a0 + b0, a1 + b1))

    def subtract(self, a: Scalar, b: Scalar) -> Scalar:
        if b == 0:
            return a
        if a is b:
            return 0
        (a0, a1), (b0, b1) = self.range(a), self.range(b)
        return self._emit("subi", a, b, (a0 - b1, a1 - b0))

    def multiply(self, a: Scalar, b: Scalar) -> Scalar:
        if a == 1 or b == 1:
            return b if a == 1 else a
        corners = [x * y for x in self.range(a) for y in self.range(b)]
        return self._emit("muli", a, b, (min(corners), max(corners)))

    def divide(self, name: str, a: Scalar, d: Scalar) -> Scalar:
        """`floordivsi`, `divsi` or `ceildivsi` by a divisor that is positive wherever the result is used."""
        if isinstance(d, int):
            d = max(d, 1)
        if d == 1:
            return a
        if isinstance(a, int) and isinstance(d, int):
            return divide_integers(name, a, d)
        (a0, a1), (d0, d1) = self.range(a), self.range(d)
        corners = [divide_integers(name, x, y) for x in (a0, a1) for y in (max(d0, 1), max(d1, 1))]
        return self._emit(name, a, self.maximum(d, 1), (min(corners), max(corners)))

    def minimum(self, a: Scalar, b: Scalar) -> Scalar:
        (a0, a1), (b0, b1) = self.range(a), self.range(b)
        if a is b or a1 <= b0:
            return a
        if b1 <= a0:
            return b
        return self._emit("minsi", a, b, (min(a0, b0), min(a1, b1)))

    def maximum(self, a: Scalar, b: Scalar) -> Scalar:
        (a0, a1), (b0, b1) = self.range(a), self.range(b)
        if a is b or a0 >= b1:
            return a
        if b0 >= a1:
            return b
        return self._emit("maxsi", a, b, (max(a0, b0), max(a1, b1)))

    def bits(self, name: str, a: Scalar, b: Scalar) -> Scalar:
        """`andi`, `ori` or `xori`."""
        if isinstance(a, int) and isinstance(b, int):
            return a & b if name == "andi" else a | b if name == "ori" else a ^ b
        if a == 0 or (a == -1 and name == "andi"):
            a, b = b, a
        if b == 0:
            return 0 if name == "andi" else a
        if b == -1 and name == "andi":
            return a
        (a0, a1), (b0, b1) = self.range(a), self.range(b)
        if a0 >= 0 and b0 >= 0:
            top = min(a1, b1) if name == "andi" else (1 << max(a1, b1).bit_length()) - 1
            return self._emit(name, a, b, (0, top))
        if name == "andi" and max(a0, b0) >= 0:
            return self._emit(name, a, b, (0, a1 if a0 >= 0 else b1))
        return self._emit(name, a, b, (MIN, MAX))

    def shift_right(self, a: Scalar, by: Scalar, logical: bool = False) -> Scalar:
        """`a >> by` for 0 <= by < 64; `logical` fills with zeros."""
        if by == 0:
            return a
        a0, a1 = self.range(a)
        if isinstance(a, int) and isinstance(by, int) and (a >= 0 or not logical):
            return a >> by
        if logical and a0 < 0:
            return self._emit("shrui", a, by, (MIN, MAX))
        return self._emit("shrui" if logical else "shrsi", a, by, (min(a0, 0), max(a1, 0)))

    def choose(self, condition: Condition, yes: Scalar, no: Scalar, range_: Range | None = None) -> Scalar:
        """`yes` where `condition`, else `no`; `range_` where more is known than both ranges say."""
        if isinstance(condition, bool):
            return yes if condition else no
        if yes is no or (isinstance(yes, int) and yes == no):
            return yes
        key = ("select", condition, yes, no)
        if (known := self.known.get(key)) is None:
            known = self.known[key] = self.build.select(condition, self.value(yes), self.value(no))
            (y0, y1), (n0, n1) = self.range(yes), self.range(no)
            self.ranges[known] = range_ or (min(y0, n0), max(y1, n1))
        return known

    # -- conditions ---------------------------------------------------------------------------------------------------

    def condition(self, c: Condition) -> SSAValue:
        """`c` as an SSA value of type i1."""
        return self.build.constant(-1 if c else 0, i1, "true" if c else "false") if isinstance(c, bool) else c

    def compare(self, predicate: str, a: Scalar, b: Scalar) -> Condition:
        """`sle` or `eq`."""
        (a0, a1), (b0, b1) = self.range(a), self.range(b)
        if a is b:
            return True
        if predicate == "sle":
            if a1 <= b0:
                return True
            if a0 > b1:
                return False
        else:
            if a1 < b0 or b1 < a0:
                return False
            if a0 == a1 == b0 == b1:
                return True
        key = (predicate, a, b)
        if (known := self.known.get(key)) is None:
            known = self.known[key] = self.build.compare(predicate, self.value(a), self.value(b))
        return known

    def at_most(self, a: Scalar, b: Scalar) -> Condition:
        """`a <= b`."""
        return self.compare("sle", a, b)

    def equal(self, a: Scalar, b: Scalar) -> Condition:
        """`a == b`."""
        return self.compare("eq", a, b)

    def both(self, a: Condition, b: Condition) -> Condition:
        """`a and b`."""
        if isinstance(a, bool):
            return b if a else False
        if isinstance(b, bool):
            return a if b else False
        if a is b or any(b is part for part in self.both_of.get(a, ())):
            return a
        if any(a is part for part in self.both_of.get(b, ())):
            return b
        if any(b is part for part in self.either_of.get(a, ())):
            return b
        if any(a is part for part in self.either_of.get(b, ())):
            return a
        key = ("andi", *sorted((a, b), key=id))
        if (known := self.known.get(key)) is None:
            known = self.known[key] = self.build.binary("andi", a, b)
            self.both_of[known] = (a, b)
        return known

    def either(self, a: Condition, b: Condition) -> Condition:
        """`a or b`."""
        if isinstance(a, bool):
            return True if a else b
        if isinstance(b, bool):
            return True if b else a
        if a is b or any(b is part for part in self.either_of.get(a, ())):
            return a
        if any(a is part for part in self.either_of.get(b, ())):
            return b
        if any(b is part for part in self.both_of.get(a, ())):
            return b
        if any(a is part for part in self.both_of.get(b, ())):
            return a
        key = ("ori", *sorted((a, b), key=id))
        if (known := self.known.get(key)) is None:
            known = self.known[key] = self.build.binary("ori", a, b)
            self.either_of[known] = (a, b)
        return known

    def negate(self, a: Condition) -> Condition:
        """`not a`."""
        if isinstance(a, bool):
            return not a
        if (known := self.inverse.get(a)) is None:
            known = self.inverse[a] = self.build.binary("xori", a, self.condition(True))
            self.inverse[known] = a
        return known


def divide_integers(name: str, a: int, d: int) -> int:
    """What `floordivsi`, `divsi` and `ceildivsi` make of Python integers."""
    if name == "floordivsi":
        return a // d
    if name == "ceildivsi":
        return -(-a // d)
    return abs(a) // abs(d) * (1 if (a < 0) == (d < 0) else -1)
