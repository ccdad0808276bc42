"""What interval analysis knows of sums, products, quotients and remainders of integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xdsl.dialects import arith
from xdsl.ir import Attribute, Operation

from attnc.analysis.interval_logic import both, xor
from attnc.analysis.intervals import Interval, IntervalAnalysis, Known, Rule, unknown, width_of
from attnc.analysis.symbolic import Condition, Scalar

_DIVISIONS = {"arith.floordivsi": "floordivsi", "arith.divsi": "divsi", "arith.ceildivsi": "ceildivsi"}
_UNSIGNED = {"arith.divui": "divsi", "arith.ceildivui": "ceildivsi"}


def _add(s: IntervalAnalysis, op: Operation) -> Known:
    type_ = op.results[0].type
    if width_of(type_) == 1:
        return xor(s, op)
    x, y, spread = s.operands(op)
    sure = s.small(type_, 2**62 - 1, x, y)
    return s.fit(type_, s.a.add(x.lo, y.lo), s.a.add(x.hi, y.hi), spread, sure)


def _subtract(s: IntervalAnalysis, op: Operation) -> Known:
    type_ = op.results[0].type
    if width_of(type_) == 1:
        return xor(s, op)
    if (modulo := _floor_modulo(s, op)) is not None:
        return modulo
    if op.operands[0] is op.operands[1]:
        return Interval(0, 0)
    x, y, spread = s.operands(op)
    sure = s.small(type_, 2**62 - 1, x, y)
    return s.fit(type_, s.a.subtract(x.lo, y.hi), s.a.subtract(x.hi, y.lo), spread, sure)


def _floor_modulo(s: IntervalAnalysis, op: Operation) -> Known | None:
    """`x - floordiv(x, d) * d`, the `%` of Python."""
    x, product = op.operands
    if not isinstance(product.owner, arith.MuliOp):
        return None
    for quotient, d in (product.owner.operands, reversed(product.owner.operands)):
        owner = quotient.owner
        if isinstance(owner, arith.FloorDivSIOp) and owner.lhs is x and owner.rhs is d:
            return _modulo(s, op.results[0].type, s.interval(x), s.interval(d), "floordivsi")
    return None


def _multiply(s: IntervalAnalysis, op: Operation) -> Known:
    type_ = op.results[0].type
    if width_of(type_) == 1:
        return both(s, op)
    x, y, spread = s.operands(op)
    sure = s.small(type_, 2**31, x, y)
    if y.exact and not x.exact:
        x, y = y, x
    lo, hi = _corners(s, [x.lo, x.hi], [y.lo, y.hi], s.a.multiply)
    return s.fit(type_, lo, hi, spread, sure)


def _corners(
    s: IntervalAnalysis, xs: Sequence[Scalar], ys: Sequence[Scalar], function: Callable[[Scalar, Scalar], Scalar]
) -> tuple[Scalar, Scalar]:
    """Least and greatest of a function that is monotonous in either argument, by its signs where these are known."""
    if function == s.a.multiply and min(s.a.range(xs[0])[0], s.a.range(ys[0])[0]) >= 0:
        return function(xs[0], ys[0]), function(xs[1], ys[1])
    values = [function(x, y) for x in dict.fromkeys(xs) for y in dict.fromkeys(ys)]
    lo = hi = values[0]
    for value in values[1:]:
        lo, hi = s.a.minimum(lo, value), s.a.maximum(hi, value)
    return lo, hi


def _divide(s: IntervalAnalysis, op: Operation) -> Known:
    type_ = op.results[0].type
    x, d, spread = s.operands(op)
    sure = s.a.at_most(1, d.lo)
    name = _DIVISIONS.get(op.name)
    if name is None:  # unsigned
        name = _UNSIGNED[op.name]
        sure = s.a.both(sure, s.a.at_most(0, x.lo))
    if s.a.range(x.lo)[0] >= 0:
        lo, hi = s.a.divide(name, x.lo, d.hi), s.a.divide(name, x.hi, d.lo)
    else:
        lo, hi = _corners(s, [x.lo, x.hi], [d.lo, d.hi], lambda n, m: s.a.divide(name, n, m))
    return s.if_sure(sure, type_, lo, hi, spread)


def _remainder(s: IntervalAnalysis, op: Operation) -> Known:
    x, d, _ = s.operands(op)
    return _modulo(s, op.results[0].type, x, d, "divsi" if op.name == "arith.remsi" else "unsigned")


def _modulo(s: IntervalAnalysis, type_: Attribute, x: Interval, d: Interval, rounding: str) -> Interval:
    """x mod d: exact inside one period of one positive divisor, else in [0, d - 1] (or (-d, d), by the sign of x)."""
    a = s.a
    spread = x.spread | d.spread
    sure = a.both(a.at_most(1, d.lo), s.small(type_, 2**62, x, d))
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
    return s.if_sure(sure, type_, lo, hi, spread)


def _minimum(s: IntervalAnalysis, op: Operation) -> Known:
    return _extreme(s, op, s.a.minimum)


def _maximum(s: IntervalAnalysis, op: Operation) -> Known:
    return _extreme(s, op, s.a.maximum)


def _extreme(s: IntervalAnalysis, op: Operation, function: Callable[[Scalar, Scalar], Scalar]) -> Known:
    if width_of(op.results[0].type) == 1:
        return unknown(op.results[0].type)
    x, y, spread = s.operands(op)
    sure: Condition = True
    if op.name.endswith("ui"):
        sure = s.a.both(s.a.at_most(0, x.lo), s.a.at_most(0, y.lo))
    return s.if_sure(sure, op.results[0].type, function(x.lo, y.lo), function(x.hi, y.hi), spread)


def _absolute(s: IntervalAnalysis, op: Operation) -> Known:
    x = s.interval(op.operands[0])
    type_ = op.results[0].type
    sure = s.small(type_, 2**62, x)
    negated = s.a.subtract(0, x.lo), s.a.subtract(0, x.hi)
    lo = s.a.maximum(s.a.maximum(x.lo, negated[1]), 0)
    return s.fit(type_, lo, s.a.maximum(x.hi, negated[0]), x.spread, sure)


ARITHMETIC: dict[str, Rule] = {
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
}
