"""The derivative of each scalar operation: a table from an operation's name to a rule.

A rule gets the adjoint `d` of the operation's result and gives pairs (operand, its share of the adjoint). Subgradients are
torch's: an `attnc.derivative` on the operation says which, where torch has several for one formula:

    first, second   a maximum or minimum of two equal numbers: all of the adjoint is the first's (clamp) or the second's (relu)
    even            a chain of them: equal parts for all that are equal to the result (amax)
    none            no adjoint passes
    zero_at_zero    of a square root: 0 at 0 (norms)
    from_right      of abs and copysign: at 0 the derivative from the positive side (fmod, asinh)

Without one, both sides of a maximum get half of it, abs has the derivative 0 at 0, and operations that round or compare have
none.
"""

from __future__ import annotations

import math as python_math
from collections.abc import Callable, Iterator
from typing import TypeAlias

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Operation, SSAValue

from attnc.analysis.attention import constant_of
from attnc.transforms.differentiate_tape import Tape

Share: TypeAlias = tuple[SSAValue, SSAValue]
Rule: TypeAlias = Callable[[Tape, Operation, SSAValue], Iterator[Share]]

RULES: dict[str, Rule] = {}
MARK = "attnc.derivative"

FLAT = {f"math.{name}" for name in ("floor", "ceil", "trunc", "round", "roundeven")}
"""Float functions that are constant in pieces."""


def mark_of(op: Operation) -> str:
    """What `attnc.derivative` says of an operation, or ""."""
    mark = op.attributes.get(MARK)
    return mark.data if isinstance(mark, StringAttr) else ""


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


# -- arithmetic -------------------------------------------------------------------------------------------------------


@rule("arith.addf")
def _add(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    yield op.operands[0], d
    yield op.operands[1], d


@rule("arith.subf")
def _subtract(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    yield op.operands[0], d
    yield op.operands[1], t.negative(d)


@rule("arith.negf")
def _negate(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    yield op.operands[0], t.negative(d)


@rule("arith.mulf")
def _multiply(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    a, b = op.operands
    yield a, t.times(d, t.value(b))
    yield b, t.times(d, t.value(a))


@rule("math.fma")
def _fused(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    a, b, c = op.operands
    yield a, t.times(d, t.value(b))
    yield b, t.times(d, t.value(a))
    yield c, d


@rule("arith.divf")
def _divide(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    a, b = op.operands
    x = _sigmoid_argument(b)
    if x is not None:
        # a / (1 + exp(-x)): by parts, exp(-x) would meet 0 where it overflows.
        gate = t.sigmoid(t.value(x))
        yield a, t.times(d, gate)
        yield x, t.times(d, t.r.multiply(t.value(op.results[0]), t.r.subtract(t.constant(gate, 1.0), gate)))
        return
    yield a, t.over(d, t.value(b))
    yield b, t.negative(t.times(d, t.r.divide(t.value(op.results[0]), t.value(b))))


def _sigmoid_argument(divisor: SSAValue) -> SSAValue | None:
    """x of `1 + exp(-x)`, or None."""
    if not isinstance(divisor.owner, arith.AddfOp):
        return None
    for one, power in (divisor.owner.operands, reversed(divisor.owner.operands)):
        if (
            constant_of(one) == 1
            and isinstance(power.owner, math.ExpOp)
            and isinstance(power.owner.operand.owner, arith.NegfOp)
        ):
            return power.owner.operand.owner.operand
    return None


@rule("arith.remf")
def _remainder(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    a, b = op.operands
    yield a, d
    yield b, t.negative(t.times(d, t.r.math(math.TruncOp, t.r.divide(t.value(a), t.value(b)))))


@rule("arith.extf", "arith.truncf")
def _convert(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    yield op.operands[0], d


@rule("arith.select")
def _select(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    condition, yes, no = op.operands
    chosen = t.value(condition)
    yield yes, t.where(chosen, d)
    yield no, t.unless(chosen, d)


# -- minimum, maximum, sign -------------------------------------------------------------------------------------------


@rule("arith.maximumf", "arith.minimumf")
def _extreme(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    a, b = op.operands
    if mark_of(op) == "even":
        yield from _even(t, op, d)
        return
    x, y = t.value(a), t.value(b)
    better, worse = ("gt", "lt") if op.name == "arith.maximumf" else ("lt", "gt")
    match mark_of(op):
        case "first":
            loses = t.r.compare(worse, x, y)
            yield a, t.unless(loses, d)
            yield b, t.where(loses, d)
        case "second":
            wins = t.r.compare(better, x, y)
            yield a, t.where(wins, d)
            yield b, t.unless(wins, d)
        case _:
            half = t.times(d, t.constant(d, 0.5))
            shared = t.r.select(t.r.compare("eq", x, y), half, d)
            yield a, t.unless(t.r.compare(worse, x, y), shared)
            yield b, t.unless(t.r.compare(better, x, y), shared)


def _even(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    """All numbers of a chain of maxima that are equal to the result share its adjoint evenly."""
    leaves: list[SSAValue] = []
    waiting = list(op.operands)
    while waiting:
        value = waiting.pop()
        owner = value.owner
        if isinstance(owner, Operation) and owner.name == op.name and mark_of(owner) == "even" and len(list(value.uses)) == 1:
            waiting += owner.operands
        else:
            leaves.append(value)
    result = t.value(op.results[0])
    zero, one = t.constant(d, 0.0), t.constant(d, 1.0)
    ties = [t.r.compare("eq", t.value(leaf), result) for leaf in leaves]
    count = zero
    for tie in ties:
        count = t.r.add(count, t.r.select(tie, one, zero))
    share = t.over(d, count)
    for leaf, tie in zip(leaves, ties, strict=True):
        yield leaf, t.where(tie, share)


@rule("arith.maxnumf", "arith.minnumf")
def _number_extreme(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    a, b = op.operands
    x, y = t.value(a), t.value(b)
    wins = t.r.either(t.r.compare("ge" if op.name == "arith.maxnumf" else "le", x, y), t.r.is_nan(y))
    yield a, t.where(wins, d)
    yield b, t.unless(wins, d)


@rule("math.absf")
def _absolute(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    x = t.value(op.operands[0])
    if mark_of(op) == "from_right":
        yield op.operands[0], t.r.multiply(d, t.r.math(math.CopySignOp, t.constant(d, 1.0), x))
        return
    zero = t.constant(x, 0.0)
    negative = t.r.select(t.r.compare("lt", x, zero), t.negative(d), zero)
    yield op.operands[0], t.r.select(t.r.compare("gt", x, zero), d, negative)


@rule("math.copysign")
def _copy_sign(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    a, b = op.operands
    x, one = t.value(a), t.constant(d, 1.0)
    signs = t.r.multiply(t.r.math(math.CopySignOp, one, x), t.r.math(math.CopySignOp, one, t.value(b)))
    share = t.times(d, signs)
    yield a, share if mark_of(op) == "from_right" else t.unless(t.r.compare("eq", x, t.constant(x, 0.0)), share)


# -- powers and logarithms --------------------------------------------------------------------------------------------


@rule("math.sqrt")
def _square_root(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    root = t.value(op.results[0])
    share = t.over(d, t.r.multiply(root, t.constant(root, 2.0)))
    if mark_of(op) == "zero_at_zero":
        share = t.unless(t.r.compare("eq", root, t.constant(root, 0.0)), share)
    yield op.operands[0], share


@rule("math.rsqrt")
def _reciprocal_root(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    y = t.value(op.results[0])
    cube = t.r.multiply(t.r.multiply(y, y), y)
    yield op.operands[0], t.times(d, t.r.multiply(cube, t.constant(y, -0.5)))


@rule("math.cbrt")
def _cube_root(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    y = t.value(op.results[0])
    yield op.operands[0], t.over(d, t.r.multiply(t.r.multiply(y, y), t.constant(y, 3.0)))


@rule("math.powf")
def _power(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    a, b = op.operands
    x, c = t.value(a), t.value(b)
    zero, one = t.constant(x, 0.0), t.constant(x, 1.0)
    slope = t.r.multiply(c, t.r.math(math.PowFOp, x, t.r.subtract(c, one)))
    yield a, t.times(d, t.r.select(t.r.compare("eq", c, zero), zero, slope))
    slope = t.r.multiply(t.value(op.results[0]), t.r.math(math.LogOp, x))
    flat = t.r.both(t.r.compare("eq", x, zero), t.r.compare("ge", c, zero))
    yield b, t.times(d, t.r.select(flat, zero, slope))


@rule("math.exp")
def _exp(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    yield op.operands[0], t.times(d, t.value(op.results[0]))


@rule("math.exp2")
def _exp2(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    y = t.value(op.results[0])
    yield op.operands[0], t.times(d, t.r.multiply(y, t.constant(y, python_math.log(2.0))))


@rule("math.expm1")
def _expm1(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    y = t.value(op.results[0])
    yield op.operands[0], t.times(d, t.r.add(y, t.constant(y, 1.0)))


def _logarithm(base: float | None) -> Rule:
    def of_base(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
        x = t.value(op.operands[0])
        yield op.operands[0], t.over(d, x if base is None else t.r.multiply(x, t.constant(x, python_math.log(base))))

    return of_base


rule("math.log")(_logarithm(None))
rule("math.log2")(_logarithm(2.0))
rule("math.log10")(_logarithm(10.0))


@rule("math.log1p")
def _log1p(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    (a,) = op.operands
    if isinstance(a.owner, math.ExpOp):
        # log(1 + exp(u)): by parts, exp(u) would meet 0 where it overflows.
        yield a.owner.operand, t.times(d, t.sigmoid(t.value(a.owner.operand)))
        return
    x = t.value(a)
    yield a, t.over(d, t.r.add(x, t.constant(x, 1.0)))


# -- trigonometry, hyperbolic functions, erf --------------------------------------------------------------------------


@rule("math.sin")
def _sin(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    yield op.operands[0], t.times(d, t.r.math(math.CosOp, t.value(op.operands[0])))


@rule("math.cos")
def _cos(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    yield op.operands[0], t.negative(t.times(d, t.r.math(math.SinOp, t.value(op.operands[0]))))


@rule("math.tan")
def _tan(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    y = t.value(op.results[0])
    yield op.operands[0], t.times(d, t.r.add(t.r.multiply(y, y), t.constant(y, 1.0)))


def _one_minus_square(t: Tape, x: SSAValue) -> SSAValue:
    return t.r.subtract(t.constant(x, 1.0), t.r.multiply(x, x))


@rule("math.asin")
def _asin(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    yield op.operands[0], t.times(d, t.r.math(math.RsqrtOp, _one_minus_square(t, t.value(op.operands[0]))))


@rule("math.acos")
def _acos(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    yield op.operands[0], t.negative(t.times(d, t.r.math(math.RsqrtOp, _one_minus_square(t, t.value(op.operands[0])))))


@rule("math.atan")
def _atan(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    x = t.value(op.operands[0])
    yield op.operands[0], t.over(d, t.r.add(t.r.multiply(x, x), t.constant(x, 1.0)))


@rule("math.atan2")
def _atan2(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    a, b = op.operands
    y, x = t.value(a), t.value(b)
    square = t.r.add(t.r.multiply(y, y), t.r.multiply(x, x))
    zero = t.constant(square, 0.0)
    origin = t.r.compare("eq", square, zero)
    yield a, t.times(d, t.r.select(origin, zero, t.r.divide(x, square)))
    yield b, t.negative(t.times(d, t.r.select(origin, zero, t.r.divide(y, square))))


@rule("math.sinh")
def _sinh(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    yield op.operands[0], t.times(d, t.r.math(math.CoshOp, t.value(op.operands[0])))


@rule("math.cosh")
def _cosh(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    yield op.operands[0], t.times(d, t.r.math(math.SinhOp, t.value(op.operands[0])))


@rule("math.tanh")
def _tanh(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    yield op.operands[0], t.times(d, _one_minus_square(t, t.value(op.results[0])))


@rule("math.asinh")
def _asinh(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    x = t.value(op.operands[0])
    yield op.operands[0], t.times(d, t.r.math(math.RsqrtOp, t.r.add(t.r.multiply(x, x), t.constant(x, 1.0))))


@rule("math.acosh")
def _acosh(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    x = t.value(op.operands[0])
    yield op.operands[0], t.times(d, t.r.math(math.RsqrtOp, t.r.subtract(t.r.multiply(x, x), t.constant(x, 1.0))))


@rule("math.atanh")
def _atanh(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    yield op.operands[0], t.over(d, _one_minus_square(t, t.value(op.operands[0])))


@rule("math.erf")
def _erf(t: Tape, op: Operation, d: SSAValue) -> Iterator[Share]:
    x = t.value(op.operands[0])
    bell = t.r.math(math.ExpOp, t.r.negate(t.r.multiply(x, x)))
    yield op.operands[0], t.times(d, t.r.multiply(bell, t.constant(x, 2.0 / python_math.sqrt(python_math.pi))))
