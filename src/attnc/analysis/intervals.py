"""Interval analysis of a region's scalars over a block of queries and keys, written down as IR.

For each value of the region it gives what holds for every (b, h, q, k) of a block whose bounds are run-time values:

* an integer lies in an `Interval`, whose ends are scalars of the emitted code;
* an i1 is a `Truth`: `ever` is false only if it is false throughout, `always` is true only if it is true throughout;
* a float is a `Score`, of which only `dead` is known: true only if it is -inf throughout.

An integer whose bounds leave its own type may be anything; so may what is made from floats, or by a division whose divisor may
be 0 or negative. `%` is exact where its operand stays inside one period.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar, TypeAlias

from xdsl.dialects import arith, scf
from xdsl.dialects.builtin import IndexType, IntegerType
from xdsl.ir import Attribute, Block, Operation, SSAValue

from attnc.analysis.attention import constant_of
from attnc.analysis.symbolic import MIN, Arithmetic, Condition, Scalar

_NOWHERE: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Interval:
    """lo <= x <= hi. `spread` names the positions (h, q, k) that x varies with."""

    lo: Scalar
    hi: Scalar
    spread: frozenset[str] = _NOWHERE

    @property
    def exact(self) -> bool:
        """Whether x is surely one value."""
        return self.lo is self.hi or (isinstance(self.lo, int) and self.lo == self.hi)


@dataclass(frozen=True)
class Truth:
    """`ever`: may be true somewhere. `always`: is true everywhere."""

    ever: Condition
    always: Condition
    spread: frozenset[str] = _NOWHERE


@dataclass(frozen=True)
class Score:
    """A float. `dead`: is -inf everywhere."""

    dead: Condition = False


Known: TypeAlias = Interval | Truth | Score
ANYTHING = frozenset("hqk")
_DIVISIONS = {"arith.floordivsi": "floordivsi", "arith.divsi": "divsi", "arith.ceildivsi": "ceildivsi"}
_UNSIGNED = {"arith.divui": "divsi", "arith.ceildivui": "ceildivsi"}


def width_of(type_: Attribute) -> int | None:
    """Bits of an integer type, 64 for index, None for others."""
    if isinstance(type_, IndexType):
        return 64
    return type_.width.data if isinstance(type_, IntegerType) else None


def unknown(type_: Attribute) -> Known:
    """Any value of a type."""
    width = width_of(type_)
    if width is None:
        return Score()
    if width == 1:
        return Truth(True, False, ANYTHING)
    return Interval(-(1 << (width - 1)), (1 << (width - 1)) - 1, ANYTHING)


class IntervalAnalysis:
    """Goes through operations in order; `of` holds what is known of each value.

    `read` answers for operations that this class does not know (positions, gathers), `outer` for values from outside the
    region; either may return None.
    """

    def __init__(
        self,
        arithmetic: Arithmetic,
        read: Callable[[Operation], Known | None],
        outer: Callable[[SSAValue], Known | None] | None = None,
    ):
        self.a = arithmetic
        self.read = read
        self.outer = outer
        self.of: dict[SSAValue, Known] = {}

    def block(self, block: Block, wanted: set[Operation]) -> None:
        """Analyses those operations of a block that are wanted."""
        for op in block.ops:
            if op in wanted:
                self.operation(op)

    def operation(self, op: Operation) -> None:
        """Notes what is known of the results of `op`."""
        if op.results and constant_of(op.results[0]) is not None:
            return
        known = self.read(op)
        if known is None:
            if isinstance(op, scf.ForOp):
                self._loop(op)
                return
            handler = self.HANDLERS.get(op.name)
            known = handler(self, op) if handler is not None else None
        for n, result in enumerate(op.results):
            self.of[result] = known if known is not None and n == 0 else unknown(result.type)

    def known(self, value: SSAValue) -> Known:
        """What is known of `value`."""
        if (known := self.of.get(value)) is None and self.outer is not None:
            known = self.outer(value)
        if known is not None:
            return known
        constant = constant_of(value)
        width = width_of(value.type)
        if constant is None:
            return unknown(value.type)
        if width is None:
            return Score(constant == -inf)
        if width == 1:
            return Truth(bool(constant), bool(constant))
        return Interval(int(constant), int(constant))

    def interval(self, value: SSAValue) -> Interval:
        known = self.known(value)
        assert isinstance(known, Interval), value
        return known

    def truth(self, value: SSAValue) -> Truth:
        known = self.known(value)
        assert isinstance(known, Truth), value
        return known

    # -- staying inside types -----------------------------------------------------------------------------------------

    def within(self, x: Interval, low: int, high: int) -> Condition:
        """Whether low <= x <= high."""
        return self.a.both(self.a.at_most(low, x.lo), self.a.at_most(x.hi, high))

    def _if(self, sure: Condition, type_: Attribute, lo: Scalar, hi: Scalar, spread: frozenset[str]) -> Interval:
        """[lo, hi] if `sure`, else anything of the type. `lo` and `hi` matter only where `sure`."""
        width = width_of(type_)
        assert width is not None
        least, greatest = -(1 << (width - 1)), (1 << (width - 1)) - 1
        if sure is True:
            return Interval(lo, hi, spread)
        lo1, hi0 = self.a.range(lo)[1], self.a.range(hi)[0]
        lo = self.a.choose(sure, lo, least, (least, max(least, min(lo1, greatest))))
        hi = self.a.choose(sure, hi, greatest, (min(greatest, max(hi0, least)), greatest))
        return Interval(lo, hi, spread)

    def _fit(self, type_: Attribute, lo: Scalar, hi: Scalar, spread: frozenset[str], sure: Condition = True) -> Interval:
        """[lo, hi] where it lies inside the type and `sure`, else anything."""
        width = width_of(type_)
        assert width is not None
        if width < 64:
            inside = self.within(Interval(lo, hi), -(1 << (width - 1)), (1 << (width - 1)) - 1)
            sure = self.a.both(sure, inside)
        return self._if(sure, type_, lo, hi, spread)

    def _small(self, type_: Attribute, limit: int, *operands: Interval) -> Condition:
        """Whether arithmetic on the bounds stays in 64 bits. That of narrower types always does."""
        sure: Condition = True
        if width_of(type_) == 64:
            for x in operands:
                sure = self.a.both(sure, self.within(x, -limit, limit))
        return sure

    # -- arithmetic ---------------------------------------------------------------------------------------------------

    def _operands(self, op: Operation) -> tuple[Interval, Interval, frozenset[str]]:
        x, y = self.interval(op.operands[0]), self.interval(op.operands[1])
        return x, y, x.spread | y.spread

    def _add(self, op: Operation) -> Known:
        type_ = op.results[0].type
        if width_of(type_) == 1:
            return self._xor_truth(op)
        x, y, spread = self._operands(op)
        sure = self._small(type_, 2**62 - 1, x, y)
        return self._fit(type_, self.a.add(x.lo, y.lo), self.a.add(x.hi, y.hi), spread, sure)

    def _subtract(self, op: Operation) -> Known:
        type_ = op.results[0].type
        if width_of(type_) == 1:
            return self._xor_truth(op)
        if (modulo := self._floor_modulo(op)) is not None:
            return modulo
        if op.operands[0] is op.operands[1]:
            return Interval(0, 0)
        x, y, spread = self._operands(op)
        sure = self._small(type_, 2**62 - 1, x, y)
        return self._fit(type_, self.a.subtract(x.lo, y.hi), self.a.subtract(x.hi, y.lo), spread, sure)

    def _floor_modulo(self, op: Operation) -> Known | None:
        """`x - floordiv(x, d) * d`, the `%` of Python."""
        x, product = op.operands
        if not isinstance(product.owner, arith.MuliOp):
            return None
        for quotient, d in (product.owner.operands, reversed(product.owner.operands)):
            owner = quotient.owner
            if isinstance(owner, arith.FloorDivSIOp) and owner.lhs is x and owner.rhs is d:
                return self._modulo(op.results[0].type, self.interval(x), self.interval(d), "floordivsi")
        return None

    def _multiply(self, op: Operation) -> Known:
        type_ = op.results[0].type
        if width_of(type_) == 1:
            return self._and(op)
        x, y, spread = self._operands(op)
        sure = self._small(type_, 2**31, x, y)
        if y.exact and not x.exact:
            x, y = y, x
        lo, hi = self._corners([x.lo, x.hi], [y.lo, y.hi], self.a.multiply)
        return self._fit(type_, lo, hi, spread, sure)

    def _corners(
        self, xs: Sequence[Scalar], ys: Sequence[Scalar], function: Callable[[Scalar, Scalar], Scalar]
    ) -> tuple[Scalar, Scalar]:
        """Least and greatest of a function that is monotonous in either argument, by its signs where these are known."""
        if function == self.a.multiply and min(self.a.range(xs[0])[0], self.a.range(ys[0])[0]) >= 0:
            return function(xs[0], ys[0]), function(xs[1], ys[1])
        values = [function(x, y) for x in dict.fromkeys(xs) for y in dict.fromkeys(ys)]
        lo = hi = values[0]
        for value in values[1:]:
            lo, hi = self.a.minimum(lo, value), self.a.maximum(hi, value)
        return lo, hi

    def _divide(self, op: Operation) -> Known:
        type_ = op.results[0].type
        x, d, spread = self._operands(op)
        sure = self.a.at_most(1, d.lo)
        name = _DIVISIONS.get(op.name)
        if name is None:  # unsigned
            name = _UNSIGNED[op.name]
            sure = self.a.both(sure, self.a.at_most(0, x.lo))
        if self.a.range(x.lo)[0] >= 0:
            lo, hi = self.a.divide(name, x.lo, d.hi), self.a.divide(name, x.hi, d.lo)
        else:
            lo, hi = self._corners([x.lo, x.hi], [d.lo, d.hi], lambda n, m: self.a.divide(name, n, m))
        return self._if(sure, type_, lo, hi, spread)

    def _remainder(self, op: Operation) -> Known:
        x, d, _ = self._operands(op)
        return self._modulo(op.results[0].type, x, d, "divsi" if op.name == "arith.remsi" else "unsigned")

    def _modulo(self, type_: Attribute, x: Interval, d: Interval, rounding: str) -> Interval:
        """x mod d: exact inside one period of one positive divisor, else in [0, d - 1] (or (-d, d), by the sign of x)."""
        a = self.a
        spread = x.spread | d.spread
        sure = a.both(a.at_most(1, d.lo), self._small(type_, 2**62, x, d))
        last = a.subtract(a.maximum(d.hi, 1), 1)
        nonnegative = a.at_most(0, x.lo)
        lo: Scalar = 0
        hi: Scalar = last
        if rounding != "floordivsi":
            hi = a.minimum(last, a.maximum(x.hi, 0))
            if rounding == "unsigned":
                sure = a.both(sure, nonnegative)
            else:
                lo = a.choose(nonnegative, 0, a.subtract(0, last))
        if d.exact:
            period = a.divide("floordivsi", x.lo, d.lo)
            same = a.equal(period, a.divide("floordivsi", x.hi, d.lo))
            if rounding == "divsi":
                same = a.both(same, nonnegative)
            start = a.multiply(period, d.lo)
            limit = max(0, a.range(last)[1])
            range_ = (-limit if rounding == "divsi" else 0, limit)
            lo = a.choose(same, a.subtract(x.lo, start), lo, range_)
            hi = a.choose(same, a.subtract(x.hi, start), hi, range_)
        return self._if(sure, type_, lo, hi, spread)

    def _minimum(self, op: Operation) -> Known:
        return self._extreme(op, self.a.minimum)

    def _maximum(self, op: Operation) -> Known:
        return self._extreme(op, self.a.maximum)

    def _extreme(self, op: Operation, function: Callable[[Scalar, Scalar], Scalar]) -> Known:
        if width_of(op.results[0].type) == 1:
            return unknown(op.results[0].type)
        x, y, spread = self._operands(op)
        sure: Condition = True
        if op.name.endswith("ui"):
            sure = self.a.both(self.a.at_most(0, x.lo), self.a.at_most(0, y.lo))
        return self._if(sure, op.results[0].type, function(x.lo, y.lo), function(x.hi, y.hi), spread)

    def _absolute(self, op: Operation) -> Known:
        x = self.interval(op.operands[0])
        type_ = op.results[0].type
        sure = self._small(type_, 2**62, x)
        negated = self.a.subtract(0, x.lo), self.a.subtract(0, x.hi)
        lo = self.a.maximum(self.a.maximum(x.lo, negated[1]), 0)
        return self._fit(type_, lo, self.a.maximum(x.hi, negated[0]), x.spread, sure)

    # -- bits ---------------------------------------------------------------------------------------------------------

    def _prefix(self, x: Interval) -> tuple[Scalar, Scalar]:
        """(bits that all of x share, with zeros below; mask of the bits that may differ)."""
        if x.exact:
            return x.lo, 0
        spread = self.a.bits("xori", x.lo, x.hi)
        for by in (1, 2, 4, 8, 16, 32):
            if by > 16 and self.a.range(spread)[0] >= 0 and self.a.range(spread)[1] < 2**32:
                break
            spread = self.a.bits("ori", spread, self.a.shift_right(spread, by, logical=True))
        return self.a.bits("andi", x.lo, self.a.bits("xori", spread, -1)), spread

    def _bits(self, op: Operation) -> Known:
        type_ = op.results[0].type
        if width_of(type_) == 1:
            return {"arith.andi": self._and, "arith.ori": self._or, "arith.xori": self._xor_truth}[op.name](op)
        x, y, spread = self._operands(op)
        bits = self.a.bits
        (v, s), (w, t) = self._prefix(x), self._prefix(y)
        if op.name == "arith.andi":
            value = bits("andi", v, w)
            loose = bits("ori", bits("andi", s, bits("ori", w, t)), bits("andi", t, bits("ori", v, s)))
        elif op.name == "arith.ori":
            value = bits("ori", v, w)
            loose = bits("ori", bits("andi", s, bits("xori", w, -1)), bits("andi", t, bits("xori", v, -1)))
        else:
            loose = bits("ori", s, t)
            value = bits("andi", bits("xori", v, w), bits("xori", loose, -1))
        sign_is_known = self.a.at_most(0, loose)
        return self._if(sign_is_known, type_, value, bits("ori", value, loose), spread)

    def _shift_left(self, op: Operation) -> Known:
        type_ = op.results[0].type
        x, by, spread = self._operands(op)
        width = width_of(type_)
        if width == 1 or not isinstance(by.lo, int) or by.lo != by.hi or not 0 <= by.lo < min(width or 0, 31):
            return unknown(type_)
        sure = self._small(type_, 2**31, x)
        factor = 1 << by.lo
        return self._fit(type_, self.a.multiply(x.lo, factor), self.a.multiply(x.hi, factor), spread, sure)

    def _shift_right(self, op: Operation) -> Known:
        type_ = op.results[0].type
        if width_of(type_) == 1:
            return unknown(type_)
        x, by, spread = self._operands(op)
        width = width_of(type_)
        assert width is not None
        if not by.exact:
            return unknown(type_)
        sure = self.within(by, 0, width - 1)
        if op.name == "arith.shrui":
            sure = self.a.both(sure, self.a.at_most(0, x.lo))
        amount = self.a.minimum(self.a.maximum(by.lo, 0), width - 1)
        return self._if(sure, type_, self.a.shift_right(x.lo, amount), self.a.shift_right(x.hi, amount), spread)

    # -- casts --------------------------------------------------------------------------------------------------------

    def _extend(self, op: Operation) -> Known:
        source = self.known(op.operands[0])
        type_ = op.results[0].type
        if isinstance(source, Truth):
            one = 1 if op.name == "arith.extui" else -1
            ever, always = self.a.choose(source.ever, one, 0), self.a.choose(source.always, one, 0)
            return Interval(always, ever, source.spread) if one == 1 else Interval(ever, always, source.spread)
        assert isinstance(source, Interval)
        lo, hi = source.lo, source.hi
        width = width_of(op.operands[0].type)
        if op.name in ("arith.extui", "arith.index_castui") and width is not None and width < 64:
            nonnegative = self.a.at_most(0, lo)
            lo = self.a.choose(nonnegative, lo, 0)
            hi = self.a.choose(nonnegative, hi, (1 << width) - 1)
        return self._fit(type_, lo, hi, source.spread)

    def _truncate(self, op: Operation) -> Known:
        type_ = op.results[0].type
        x = self.interval(op.operands[0])
        if width_of(type_) == 1:
            small = self.within(x, 0, 1)
            always = self.a.both(small, self.a.equal(x.lo, 1))
            never = self.a.both(small, self.a.equal(x.hi, 0))
            return Truth(self.a.negate(never), always, x.spread)
        return self._fit(type_, x.lo, x.hi, x.spread)

    def _index_cast(self, op: Operation) -> Known:
        if isinstance(self.known(op.operands[0]), Truth):
            return unknown(op.results[0].type)
        return self._extend(op)

    # -- truth --------------------------------------------------------------------------------------------------------

    def _and(self, op: Operation) -> Known:
        x, y = self.truth(op.operands[0]), self.truth(op.operands[1])
        return Truth(self.a.both(x.ever, y.ever), self.a.both(x.always, y.always), x.spread | y.spread)

    def _or(self, op: Operation) -> Known:
        x, y = self.truth(op.operands[0]), self.truth(op.operands[1])
        return Truth(self.a.either(x.ever, y.ever), self.a.either(x.always, y.always), x.spread | y.spread)

    def _xor_truth(self, op: Operation) -> Known:
        return self._differ(self.truth(op.operands[0]), self.truth(op.operands[1]))

    def _differ(self, x: Truth, y: Truth) -> Truth:
        a = self.a
        always = a.either(a.both(x.always, a.negate(y.ever)), a.both(y.always, a.negate(x.ever)))
        never = a.either(a.both(x.always, y.always), a.both(a.negate(x.ever), a.negate(y.ever)))
        return Truth(a.negate(never), always, x.spread | y.spread)

    def _not(self, x: Truth) -> Truth:
        return Truth(self.a.negate(x.always), self.a.negate(x.ever), x.spread)

    def _compare(self, op: Operation) -> Known:
        assert isinstance(op, arith.CmpiOp)
        predicate = op.predicate.value.data
        if width_of(op.lhs.type) == 1:
            return self._compare_truths(predicate, self.truth(op.lhs), self.truth(op.rhs))
        x, y, spread = self._operands(op)
        a = self.a
        if predicate in (0, 1):
            touch = a.both(a.at_most(x.lo, y.hi), a.at_most(y.lo, x.hi))
            same = a.both(a.equal(x.lo, y.hi), a.equal(x.hi, y.lo))
            equal = Truth(touch, same, spread)
            return equal if predicate == 0 else self._not(equal)
        sure: Condition = True
        if predicate >= 6:
            sure = a.both(a.at_most(0, x.lo), a.at_most(0, y.lo))
            predicate -= 4
        # 2 slt, 3 sle, 4 sgt, 5 sge: all of them by <=, perhaps of exchanged operands, perhaps negated.
        if predicate in (4, 3):  # x > y is not (x <= y)
            at_most = Truth(a.at_most(x.lo, y.hi), a.at_most(x.hi, y.lo), spread)
        else:  # x < y is not (y <= x)
            at_most = Truth(a.at_most(y.lo, x.hi), a.at_most(y.hi, x.lo), spread)
        truth = at_most if predicate in (3, 5) else self._not(at_most)
        return Truth(a.either(a.negate(sure), truth.ever), a.both(sure, truth.always), spread)

    def _compare_truths(self, predicate: int, x: Truth, y: Truth) -> Truth:
        a = self.a
        if predicate in (0, 1):
            differ = self._differ(x, y)
            return differ if predicate == 1 else self._not(differ)
        if predicate < 6:  # as signed numbers true is -1
            x, y = y, x
            predicate += 4
        if predicate in (8, 9):  # x > y is y < x
            x, y = y, x
            predicate -= 2
        spread = x.spread | y.spread
        if predicate == 6:  # x < y: not x and y
            return Truth(a.both(a.negate(x.always), y.ever), a.both(a.negate(x.ever), y.always), spread)
        return Truth(a.either(a.negate(x.always), y.ever), a.either(a.negate(x.ever), y.always), spread)

    def _select(self, op: Operation) -> Known:
        condition, yes, no = op.operands
        c, x, y = self.truth(condition), self.known(yes), self.known(no)
        a = self.a
        if isinstance(x, Score) and isinstance(y, Score):
            return Score(a.both(a.either(a.negate(c.ever), x.dead), a.either(c.always, y.dead)))
        if isinstance(x, Truth) and isinstance(y, Truth):
            ever = a.either(a.both(c.ever, x.ever), a.both(a.negate(c.always), y.ever))
            always = a.both(a.either(a.negate(c.ever), x.always), a.either(c.always, y.always))
            return Truth(ever, always, c.spread | x.spread | y.spread)
        assert isinstance(x, Interval) and isinstance(y, Interval)
        lo = a.choose(c.always, x.lo, a.choose(c.ever, a.minimum(x.lo, y.lo), y.lo))
        hi = a.choose(c.always, x.hi, a.choose(c.ever, a.maximum(x.hi, y.hi), y.hi))
        return Interval(lo, hi, c.spread | x.spread | y.spread)

    def _same_score(self, op: Operation) -> Known:
        known = self.known(op.operands[0])
        assert isinstance(known, Score)
        return known

    # -- loops --------------------------------------------------------------------------------------------------------

    def _loop(self, op: scf.ForOp) -> None:
        """A loop over scalars. What it carries is known where another turn leaves that unchanged, else unknown."""
        position, *carried = op.body.block.args
        lower, upper, step = (self.interval(bound) for bound in (op.lb, op.ub, op.step))
        last = self.a.subtract(upper.hi, 1) if self.a.range(upper.hi)[0] > MIN else upper.hi
        at = unknown(position.type)
        if isinstance(step.lo, int) and step.lo > 0:
            at = Interval(lower.lo, last, lower.spread | upper.spread | step.spread)
        turns: list[list[Known]] = [[self.known(init) for init in op.iter_args]]
        for _ in range(2):
            self.of[position] = at
            self.of |= zip(carried, turns[-1], strict=True)
            self.block(op.body.block, set(op.body.block.ops))
            final = op.body.block.last_op
            assert final is not None
            turns.append([self._join(old, self.known(new)) for old, new in zip(turns[-1], final.operands, strict=True)])
        settled = [new == old for old, new in zip(turns[-2], turns[-1], strict=True)]
        if all(settled):
            for result, known in zip(op.results, turns[-1], strict=True):
                self.of[result] = known
            return
        self.of |= zip(carried, [unknown(argument.type) for argument in carried], strict=True)
        self.of[position] = at
        self.block(op.body.block, set(op.body.block.ops))
        for result in op.results:
            self.of[result] = unknown(result.type)

    def _join(self, x: Known, y: Known) -> Known:
        """What holds if either does."""
        a = self.a
        if isinstance(x, Truth) and isinstance(y, Truth):
            return Truth(a.either(x.ever, y.ever), a.both(x.always, y.always), x.spread | y.spread)
        if isinstance(x, Interval) and isinstance(y, Interval):
            return Interval(a.minimum(x.lo, y.lo), a.maximum(x.hi, y.hi), x.spread | y.spread)
        return Score()

    HANDLERS: ClassVar[dict[str, Callable[[IntervalAnalysis, Operation], Known]]] = {
        "arith.addi": _add,
        "arith.subi": _subtract,
        "arith.muli": _multiply,
        **dict.fromkeys((*_DIVISIONS, *_UNSIGNED), _divide),
        "arith.remsi": _remainder,
        "arith.remui": _remainder,
        "arith.minsi": _minimum,
        "arith.minui": _minimum,
        "arith.maxsi": _maximum,
        "arith.maxui": _maximum,
        "math.absi": _absolute,
        "arith.andi": _bits,
        "arith.ori": _bits,
        "arith.xori": _bits,
        "arith.shli": _shift_left,
        "arith.shrsi": _shift_right,
        "arith.shrui": _shift_right,
        "arith.extsi": _extend,
        "arith.extui": _extend,
        "arith.trunci": _truncate,
        "arith.index_cast": _index_cast,
        "arith.index_castui": _index_cast,
        "arith.cmpi": _compare,
        "arith.select": _select,
        "arith.extf": _same_score,
        "arith.truncf": _same_score,
    }
