"""What interval analysis knows of bits, casts, comparisons and conditions."""

from __future__ import annotations

from dataclasses import replace

from xdsl.dialects import arith
from xdsl.ir import Operation

from attnc.analysis.intervals import Interval, IntervalAnalysis, Known, Rule, Score, Truth, unknown, width_of
from attnc.analysis.symbolic import Condition, Scalar

# -- bits ---------------------------------------------------------------------------------------------------------


def _prefix(s: IntervalAnalysis, x: Interval) -> tuple[Scalar, Scalar]:
    """(the bits that are 1 in all of x; a mask of those that may be either), by the bits that both ends begin with."""
    if x.bits is not None:
        return x.bits
    if x.exact:
        return x.lo, 0
    spread = s.a.bits("xori", x.lo, x.hi)
    for by in (1, 2, 4, 8, 16, 32):
        if by > 16 and s.a.range(spread)[0] >= 0 and s.a.range(spread)[1] < 2**32:
            break
        spread = s.a.bits("ori", spread, s.a.shift_right(spread, by, logical=True))
    return s.a.bits("andi", x.lo, s.a.bits("xori", spread, -1)), spread


def _bits(s: IntervalAnalysis, op: Operation) -> Known:
    type_ = op.results[0].type
    if width_of(type_) == 1:
        return {"arith.andi": both, "arith.ori": _or, "arith.xori": xor}[op.name](s, op)
    x, y, spread = s.operands(op)
    bits = s.a.bits
    # Of each operand: the bits known to be 1, and the bits that may be either.
    (ones, free), (ones_y, free_y) = _prefix(s, x), _prefix(s, y)
    if op.name == "arith.andi":
        value = bits("andi", ones, ones_y)
        loose = bits("andi", free, bits("ori", ones_y, free_y))
        loose = bits("ori", loose, bits("andi", free_y, bits("ori", ones, free)))
    elif op.name == "arith.ori":
        value = bits("ori", ones, ones_y)
        loose = bits("andi", free, bits("xori", ones_y, -1))
        loose = bits("ori", loose, bits("andi", free_y, bits("xori", ones, -1)))
    else:
        loose = bits("ori", free, free_y)
        value = bits("andi", bits("xori", ones, ones_y), bits("xori", loose, -1))
    sign_is_known = s.a.at_most(0, loose)
    result = s.if_sure(sign_is_known, type_, value, bits("ori", value, loose), spread)
    return replace(result, bits=(value, loose)) if sign_is_known is True else result


def _shift_left(s: IntervalAnalysis, op: Operation) -> Known:
    type_ = op.results[0].type
    x, by, spread = s.operands(op)
    width = width_of(type_)
    if width == 1 or not isinstance(by.lo, int) or by.lo != by.hi or not 0 <= by.lo < min(width or 0, 31):
        return unknown(type_)
    sure = s.small(type_, 2**31, x)
    factor = 1 << by.lo
    result = s.fit(type_, s.a.multiply(x.lo, factor), s.a.multiply(x.hi, factor), spread, sure)
    if x.bits is not None and result.hi is s.a.multiply(x.hi, factor):
        ones, free = x.bits
        return replace(result, bits=(s.a.multiply(ones, factor), s.a.multiply(free, factor)))
    return result


def _shift_right(s: IntervalAnalysis, op: Operation) -> Known:
    type_ = op.results[0].type
    if width_of(type_) == 1:
        return unknown(type_)
    x, by, spread = s.operands(op)
    width = width_of(type_)
    assert width is not None
    if not by.exact:
        return unknown(type_)
    sure = s.within(by, 0, width - 1)
    if op.name == "arith.shrui":
        sure = s.a.both(sure, s.a.at_most(0, x.lo))
    amount = s.a.minimum(s.a.maximum(by.lo, 0), width - 1)
    result = s.if_sure(sure, type_, s.a.shift_right(x.lo, amount), s.a.shift_right(x.hi, amount), spread)
    if sure is True and x.bits is not None:
        ones, free = x.bits
        return replace(result, bits=(s.a.shift_right(ones, amount), s.a.shift_right(free, amount)))
    return result


# -- casts --------------------------------------------------------------------------------------------------------


def _extend(s: IntervalAnalysis, op: Operation) -> Known:
    source = s.known(op.operands[0])
    type_ = op.results[0].type
    if isinstance(source, Truth):
        one = 1 if op.name == "arith.extui" else -1
        ever, always = s.a.choose(source.ever, one, 0), s.a.choose(source.always, one, 0)
        return Interval(always, ever, source.spread) if one == 1 else Interval(ever, always, source.spread)
    assert isinstance(source, Interval)
    lo, hi = source.lo, source.hi
    width = width_of(op.operands[0].type)
    if op.name in ("arith.extui", "arith.index_castui") and width is not None and width < 64:
        nonnegative = s.a.at_most(0, lo)
        lo = s.a.choose(nonnegative, lo, 0)
        hi = s.a.choose(nonnegative, hi, (1 << width) - 1)
    result = s.fit(type_, lo, hi, source.spread)
    return replace(result, bits=source.bits) if result.lo is source.lo and result.hi is source.hi else result


def _truncate(s: IntervalAnalysis, op: Operation) -> Known:
    type_ = op.results[0].type
    x = s.interval(op.operands[0])
    if width_of(type_) == 1:
        small = s.within(x, 0, 1)
        always = s.a.both(small, s.a.equal(x.lo, 1))
        never = s.a.both(small, s.a.equal(x.hi, 0))
        return Truth(s.a.negate(never), always, x.spread)
    return s.fit(type_, x.lo, x.hi, x.spread)


def _index_cast(s: IntervalAnalysis, op: Operation) -> Known:
    if isinstance(s.known(op.operands[0]), Truth):
        return unknown(op.results[0].type)
    return _extend(s, op)


# -- truth --------------------------------------------------------------------------------------------------------


def both(s: IntervalAnalysis, op: Operation) -> Known:
    x, y = s.truth(op.operands[0]), s.truth(op.operands[1])
    return Truth(s.a.both(x.ever, y.ever), s.a.both(x.always, y.always), x.spread | y.spread)


def _or(s: IntervalAnalysis, op: Operation) -> Known:
    x, y = s.truth(op.operands[0]), s.truth(op.operands[1])
    return Truth(s.a.either(x.ever, y.ever), s.a.either(x.always, y.always), x.spread | y.spread)


def xor(s: IntervalAnalysis, op: Operation) -> Known:
    return _differ(s, s.truth(op.operands[0]), s.truth(op.operands[1]))


def _differ(s: IntervalAnalysis, x: Truth, y: Truth) -> Truth:
    a = s.a
    always = a.either(a.both(x.always, a.negate(y.ever)), a.both(y.always, a.negate(x.ever)))
    never = a.either(a.both(x.always, y.always), a.both(a.negate(x.ever), a.negate(y.ever)))
    return Truth(a.negate(never), always, x.spread | y.spread)


def _not(s: IntervalAnalysis, x: Truth) -> Truth:
    return Truth(s.a.negate(x.always), s.a.negate(x.ever), x.spread)


def _compare(s: IntervalAnalysis, op: Operation) -> Known:
    assert isinstance(op, arith.CmpiOp)
    predicate = op.predicate.value.data
    if width_of(op.lhs.type) == 1:
        return _compare_truths(s, predicate, s.truth(op.lhs), s.truth(op.rhs))
    x, y, spread = s.operands(op)
    a = s.a
    if predicate in (0, 1):
        touch = a.both(a.at_most(x.lo, y.hi), a.at_most(y.lo, x.hi))
        same = a.both(a.equal(x.lo, y.hi), a.equal(x.hi, y.lo))
        equal = Truth(touch, same, spread)
        return equal if predicate == 0 else _not(s, equal)
    sure: Condition = True
    if predicate >= 6:
        sure = a.both(a.at_most(0, x.lo), a.at_most(0, y.lo))
        predicate -= 4
    # 2 slt, 3 sle, 4 sgt, 5 sge: all of them by <=, perhaps of exchanged operands, perhaps negated.
    if predicate in (4, 3):  # x > y is not (x <= y)
        at_most = Truth(a.at_most(x.lo, y.hi), a.at_most(x.hi, y.lo), spread)
    else:  # x < y is not (y <= x)
        at_most = Truth(a.at_most(y.lo, x.hi), a.at_most(y.hi, x.lo), spread)
    truth = at_most if predicate in (3, 5) else _not(s, at_most)
    return Truth(a.either(a.negate(sure), truth.ever), a.both(sure, truth.always), spread)


def _compare_truths(s: IntervalAnalysis, predicate: int, x: Truth, y: Truth) -> Truth:
    a = s.a
    if predicate in (0, 1):
        differ = _differ(s, x, y)
        return differ if predicate == 1 else _not(s, differ)
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


def _select(s: IntervalAnalysis, op: Operation) -> Known:
    condition, yes, no = op.operands
    c, x, y = s.truth(condition), s.known(yes), s.known(no)
    a = s.a
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


def _same_score(s: IntervalAnalysis, op: Operation) -> Known:
    known = s.known(op.operands[0])
    assert isinstance(known, Score)
    return known


LOGIC: dict[str, Rule] = {
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
