"""Interval analysis of a region's scalars over a block of queries and keys, written down as IR.

For each value of the region it gives what holds for every (b, h, q, k) of a block whose bounds are run-time values:

* an integer lies in an `Interval`, whose ends are scalars of the emitted code;
* an i1 is a `Truth`: `ever` is false only if it is false throughout, `always` is true only if it is true throughout;
* a float is a `Score`, of which only `dead` is known: true only if it is -inf throughout.

An integer whose bounds leave its own type may be anything; so may what is made from floats, or by a division whose divisor may
be 0 or negative. `%` is exact where its operand stays inside one period.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

from xdsl.dialects import scf
from xdsl.dialects.builtin import IndexType, IntegerType
from xdsl.ir import Attribute, Block, Operation, SSAValue

from attnc.analysis.attention import constant_of
from attnc.analysis.symbolic import MIN, Arithmetic, Condition, Scalar

_NOWHERE: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Interval:
    """lo <= x <= hi. `spread` names the positions (h, q, k) that x varies with.

    `bits`, where known: (the bits that are 1 in every x, a mask of those that may be either).
    """

    lo: Scalar
    hi: Scalar
    spread: frozenset[str] = _NOWHERE
    bits: tuple[Scalar, Scalar] | None = None

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
Rule: TypeAlias = "Callable[[IntervalAnalysis, Operation], Known]"
ANYTHING = frozenset("hqk")


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

    `rules` say what is known of an operation's result by what is known of its operands, `read` answers for positions and
    gathers, `outer` for values from outside the region; either may return None.
    """

    def __init__(
        self,
        arithmetic: Arithmetic,
        rules: Mapping[str, Rule],
        read: Callable[[Operation], Known | None],
        outer: Callable[[SSAValue], Known | None] | None = None,
    ):
        self.a = arithmetic
        self.rules = rules
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
            rule = self.rules.get(op.name)
            known = rule(self, op) if rule is not None else None
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

    def if_sure(self, sure: Condition, type_: Attribute, lo: Scalar, hi: Scalar, spread: frozenset[str]) -> Interval:
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

    def fit(self, type_: Attribute, lo: Scalar, hi: Scalar, spread: frozenset[str], sure: Condition = True) -> Interval:
        """[lo, hi] where it lies inside the type and `sure`, else anything."""
        width = width_of(type_)
        assert width is not None
        if width < 64:
            inside = self.within(Interval(lo, hi), -(1 << (width - 1)), (1 << (width - 1)) - 1)
            sure = self.a.both(sure, inside)
        return self.if_sure(sure, type_, lo, hi, spread)

    def small(self, type_: Attribute, limit: int, *operands: Interval) -> Condition:
        """Whether arithmetic on the bounds stays in 64 bits. That of narrower types always does."""
        sure: Condition = True
        if width_of(type_) == 64:
            for x in operands:
                sure = self.a.both(sure, self.within(x, -limit, limit))
        return sure

    def operands(self, op: Operation) -> tuple[Interval, Interval, frozenset[str]]:
        x, y = self.interval(op.operands[0]), self.interval(op.operands[1])
        return x, y, x.spread | y.spread

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
