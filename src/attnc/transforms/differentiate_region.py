"""The derivative of an attention's region: reverse mode over scalar operations.

Before, the region with its mask left out (where it is false there is nothing to differentiate):

    ^bb0(%score: f32):
      %slope = tensor.extract %slopes[%h]
      %bias = arith.mulf %slope, %distance
      %modified = arith.addf %score, %bias

After:

    ^bb0(%score: f32, %d_modified: f32, %live: i1):
      %d_slope = arith.mulf %d_modified, %distance
      "attnc.accumulate"(select(%live, %d_slope, 0), %slopes, %h)
      "attnc.yield"(%d_modified)

`%d_modified` is 0 for a pair that is not live; what is computed from it may be anything there, and is made 0.

What the derivative needs of the region's own values is computed again. A sum over a row (`scf.for`) becomes a loop that hands
the sum's adjoint to each of its terms; a loop that is no sum and no maximum is run backwards, and what it carried is computed
anew at each turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xdsl.dialects import arith, scf, tensor
from xdsl.dialects.builtin import i1
from xdsl.ir import Block, Operation, Region, SSAValue

from attnc.analysis.attention import final_select
from attnc.dialects.attention_backward import AccumulateOp, DerivativeYieldOp
from attnc.dialects.linalg_ext import YieldOp
from attnc.errors import LoweringError
from attnc.transforms.convert_torch_to_linalg_ext_region import RegionBuilder
from attnc.transforms.differentiate_rules import FLAT, RULES, mark_of
from attnc.transforms.differentiate_tape import Tape, computed_type, is_float, length_of, yielded


def derivative_of(source: Block, score_wanted: bool, captures: Sequence[SSAValue]) -> Region:
    """The derivative of the region `source` by its score (if wanted) and by what it reads of `captures`.

    Raises `LoweringError` where an operation on the way has no derivative.
    """
    score = source.args[0]
    block = Block(arg_types=[score.type, score.type, i1])
    for argument, hint in zip(block.args, ("score", "d_modified", "live"), strict=True):
        argument.name_hint = hint
    new_score, d, live = block.args
    r = RegionBuilder(block)
    select = final_select(source)
    last = source.last_op
    assert isinstance(last, YieldOp)
    modified = select.lhs if select is not None else last.value
    active = _active(source, {score} if score_wanted else set(), set(captures))
    tape = Tape(r, {score: new_score})
    ops = [op for op in source.ops if op is not last and op is not select]
    tape.repeat(ops)
    reverse = _Reverse(tape, active, set(captures), live, score, d)
    reverse.add(modified, d)
    reverse.run(ops)
    results: list[SSAValue] = []
    if score_wanted:
        found = reverse.adjoints.get(score)
        zero = r.constant(score.type, 0.0)
        results.append(zero if found is None else found if found is d else r.select(live, found, zero))
        if results[0] is not d:
            results[0].name_hint = "d_score"
    block.add_op(DerivativeYieldOp(results))
    r.finish()
    return Region(block)


def _active(block: Block, active: set[SSAValue], captures: set[SSAValue]) -> set[SSAValue]:
    """The float values that depend on `active` or on elements of `captures`, in loops too."""
    for op in block.ops:
        if isinstance(op, scf.ForOp):
            _active_in_loop(op, active, captures)
        elif isinstance(op, tensor.ExtractOp):
            if op.tensor in captures and is_float(op.result):
                active.add(op.result)
        elif op.results and is_float(op.results[0]) and any(operand in active for operand in op.operands):
            active.add(op.results[0])
    return active


def _active_in_loop(op: scf.ForOp, active: set[SSAValue], captures: set[SSAValue]) -> None:
    carried = op.body.block.args[1:]
    active |= {inner for inner, init in zip(carried, op.iter_args, strict=True) if init in active}
    while True:  # what is carried may become active by what is yielded
        _active(op.body.block, active, captures)
        found = {inner for inner, value in zip(carried, yielded(op.body.block), strict=True) if value in active} - active
        if not found:
            break
        active |= found
    active |= {result for result, inner in zip(op.results, carried, strict=True) if inner in active}


class _Reverse:
    """Walks operations backwards. `adjoints` are keyed by the old region's values."""

    def __init__(
        self, tape: Tape, active: set[SSAValue], captures: set[SSAValue], live: SSAValue, score: SSAValue, seed: SSAValue
    ):
        """`seed` is the adjoint that all comes of; it is 0 where the pair is not live."""
        self.tape = tape
        self.active = active
        self.captures = captures
        self.live = live
        self.score = score
        self.seed = seed
        self.adjoints: dict[SSAValue, SSAValue] = {}

    def add(self, old: SSAValue, share: SSAValue) -> None:
        """Adds to the adjoint of an old value, if that is active."""
        if old not in self.active:
            return
        share = self.tape.converted(share, computed_type(old.type))
        known = self.adjoints.get(old)
        self.adjoints[old] = share if known is None else self.tape.sum(known, share)

    def run(self, ops: Iterable[Operation]) -> None:
        """Hands adjoints down through `ops`, last first."""
        for op in reversed(list(ops)):
            if isinstance(op, scf.ForOp):
                if any(result in self.adjoints for result in op.results):
                    self._loop(op)
            elif op.results and (d := self.adjoints.get(op.results[0])) is not None:
                self._operation(op, d)

    def _operation(self, op: Operation, d: SSAValue) -> None:
        if isinstance(op, tensor.ExtractOp):
            self._accumulate(op, d)
            return
        if op.name in FLAT or mark_of(op) == "none":
            return
        rule = RULES.get(op.name)
        if rule is None:
            raise LoweringError(f"{op.name} has no derivative", remedy="write the mod without it, or detach what it works on")
        for operand, share in rule(self.tape, op, d):
            self.add(operand, share)

    def _accumulate(self, op: tensor.ExtractOp, d: SSAValue) -> None:
        r = self.tape.r
        zero = r.constant(self.score.type, 0.0)
        share = self.tape.converted(d, self.score.type)
        if share is not self.seed:
            share = r.select(self.live, share, zero)
        if share.name_hint is None and op.tensor.name_hint is not None:
            share.name_hint = f"d_{op.tensor.name_hint}"
        r.block.add_op(AccumulateOp(share, op.tensor, [self.tape.raw(index) for index in op.indices]))

    # -- loops --------------------------------------------------------------------------------------------------------

    def _loop(self, op: scf.ForOp) -> None:
        carried = [
            (number, argument)
            for number, argument in enumerate(op.body.block.args[1:])
            if is_float(argument) and argument in self.active
        ]
        wanted = {number: self.adjoints[op.results[number]] for number, _ in carried if op.results[number] in self.adjoints}
        terms = {number: _term(op, number) for number, _ in carried}
        simple = all(term is not None for term in terms.values())
        if simple:
            self._terms(op, wanted, {number: term for number, term in terms.items() if term is not None})
        else:
            self._backwards(op, wanted, [number for number, _ in carried])

    def _outer(self, op: scf.ForOp) -> list[SSAValue]:
        """Active values from outside that a loop's body uses."""
        own = {result for inner in op.body.block.walk() for result in inner.results} | set(op.body.block.args)
        own |= {argument for inner in op.body.block.walk() for region in inner.regions for argument in region.block.args}
        found: dict[SSAValue, None] = {}
        for inner in op.body.block.walk():
            found.update((operand, None) for operand in inner.operands if operand in self.active and operand not in own)
        return list(found)

    def _inside(self, op: scf.ForOp) -> _Reverse:
        tape = Tape(self.tape.r, dict(self.tape.values), self.tape.chosen)
        return _Reverse(tape, self.active, self.captures, self.live, self.score, self.seed)

    def _terms(self, op: scf.ForOp, wanted: dict[int, SSAValue], terms: dict[int, tuple[Operation, SSAValue]]) -> None:
        """A loop whose turns do not depend on each other: sums, maxima."""
        tape, r = self.tape, self.tape.r
        for number, d in wanted.items():
            if isinstance(terms[number][0], arith.AddfOp):
                self.add(op.iter_args[number], d)
        shares = {
            number: self._extreme_share(op, number, d, *terms[number])
            for number, d in wanted.items()
            if not isinstance(terms[number][0], arith.AddfOp)
        }
        firsts = [number for number in shares if mark_of(terms[number][0]) == "first"]
        outer = self._outer(op)
        inits = [r.constant(computed_type(value.type), 0.0) for value in outer] + [r.constant(i1, False) for _ in firsts]
        with r.loop(length_of(op), inits) as loop:
            inside = self._inside(op)
            inside.tape.values[op.body.block.args[0]] = loop.position
            body = [inner for inner in op.body.block.ops if inner is not op.body.block.last_op]
            skipped = {terms[number][0] for number in terms}
            inside.tape.repeat(inner for inner in body if inner not in skipped)
            taken = dict(zip(firsts, loop.carried[len(outer) :], strict=True))
            for number, d in wanted.items():
                term = terms[number][1]
                if number in shares:
                    tie = r.compare("eq", inside.tape.value(term), tape.value(op.results[number]))
                    if number in taken:
                        before = taken[number]
                        taken[number] = r.either(before, tie)
                        tie = r.both(tie, r.invert(before))
                    inside.add(term, inside.tape.where(tie, shares[number]))
                else:
                    inside.add(term, d)
            inside.run(inner for inner in body if inner not in skipped)
            sums = [
                r.add(sum_, inside.adjoints[value]) if value in inside.adjoints else sum_
                for sum_, value in zip(loop.carried, outer, strict=False)
            ]
            loop.finish([*sums, *(taken[number] for number in firsts)])
        for value, total in zip(outer, loop.results, strict=False):
            self.add(value, total)

    def _extreme_share(self, op: scf.ForOp, number: int, d: SSAValue, join: Operation, term: SSAValue) -> SSAValue:
        """What each term that is equal to a row's maximum gets of its adjoint."""
        tape, r = self.tape, self.tape.r
        if mark_of(join) == "first":
            return d
        zero, one = tape.constant(d, 0.0), tape.constant(d, 1.0)
        with r.loop(length_of(op), [zero]) as loop:
            inside = self._inside(op)
            inside.tape.values[op.body.block.args[0]] = loop.position
            inside.tape.repeat(inner for inner in op.body.block.ops if inner is not op.body.block.last_op and inner is not join)
            tie = r.compare("eq", inside.tape.value(term), tape.value(op.results[number]))
            loop.finish([r.add(loop.carried[0], r.select(tie, one, zero))])
        return tape.over(d, loop.results[0])

    def _backwards(self, op: scf.ForOp, wanted: dict[int, SSAValue], carried: list[int]) -> None:
        """Any other loop, from its last turn to its first. What was carried into a turn is found by running the turns before
        it."""
        r = self.tape.r
        length = length_of(op)
        block = op.body.block
        index = block.args[0].type
        outer = self._outer(op)
        zeros = [r.constant(computed_type(value.type), 0.0) for value in outer]
        starts = [wanted.get(number, r.constant(computed_type(op.results[number].type), 0.0)) for number in carried]
        with r.loop(length, [*zeros, *starts]) as loop:
            turn = r.subtract(r.constant(index, length - 1), loop.position)
            before = self._carried_at(op, turn)
            inside = self._inside(op)
            inside.tape.values[block.args[0]] = turn
            inside.tape.values.update(zip(block.args[1:], before, strict=True))
            body = [inner for inner in block.ops if inner is not block.last_op]
            inside.tape.repeat(body)
            for number, d in zip(carried, loop.carried[len(outer) :], strict=True):
                inside.add(yielded(block)[number], d)
            inside.run(body)
            sums = [
                r.add(sum_, inside.adjoints[value]) if value in inside.adjoints else sum_
                for sum_, value in zip(loop.carried, outer, strict=False)
            ]
            handed = [
                inside.adjoints.get(block.args[1 + number], r.constant(computed_type(op.results[number].type), 0.0))
                for number in carried
            ]
            loop.finish([*sums, *handed])
        for value, total in zip(outer, loop.results, strict=False):
            self.add(value, total)
        for number, total in zip(carried, loop.results[len(outer) :], strict=True):
            self.add(op.iter_args[number], total)

    def _carried_at(self, op: scf.ForOp, turn: SSAValue) -> Sequence[SSAValue]:
        """What a loop carries into one of its turns."""
        tape, r = self.tape, self.tape.r
        block = op.body.block
        with r.loop(length_of(op), [tape.raw(init) for init in op.iter_args]) as loop:
            inside = Tape(r, dict(tape.values), tape.chosen)
            inside.values[block.args[0]] = loop.position
            inside.values.update(zip(block.args[1:], loop.carried, strict=True))
            inside.repeat(inner for inner in block.ops if inner is not block.last_op)
            earlier = r.compare("lt", loop.position, turn)
            new = [inside.raw(value) for value in yielded(block)]
            loop.finish([r.select(earlier, value, old) for value, old in zip(new, loop.carried, strict=True)])
        return loop.results


def _term(op: scf.ForOp, number: int) -> tuple[Operation, SSAValue] | None:
    """(the operation, x) where a loop's turns carry `carried + x`, or max or min of the two, and use it for nothing else."""
    block = op.body.block
    argument, result = block.args[1 + number], yielded(block)[number]
    owner = result.owner
    if not isinstance(owner, arith.AddfOp | arith.MaximumfOp | arith.MinimumfOp) or owner.parent is not block:
        return None
    if len(list(argument.uses)) != 1 or len(list(result.uses)) != 1 or argument not in owner.operands:
        return None
    a, b = owner.operands
    term = b if a is argument else a
    return None if term is argument else (owner, term)
