"""Finds what a mask makes of whole blocks: a function beside the kernel says EMPTY, FULL or PARTIAL, from bounds alone.

Before:

    func.func @attention(…, %slopes: tensor<?xf32>) {
      … "iree_linalg_ext.online_attention"(…) ({
        %slope = tensor.extract %slopes[%h] {attnc.checked = "kept"}
        %causal = arith.cmpi sge, %q32, %k32
        %x = arith.select %causal, %biased, %minus_infinity
        yield %x })

After:

    func.func private @classify(%b, %h0, %h1, %q0, %q1, %k0, %k1: index, %slopes: memref<?xf32, …>) -> i32 {
      %ever = %k0 <= %q1,  %always = %k1 <= %q0,  %in_range = %h1 < tile.dim %slopes, 0
      return !%ever ? EMPTY : %always and %in_range ? FULL : PARTIAL }
    func.func @attention(…) {
      … online_attention {attnc.classifier = @classify, attnc.classifier_arguments = [4]}

Bounds are inclusive. EMPTY: every score of the block is -inf. FULL: the mask drops no pair of it. Either is said only where
every index that would be checked in the block is surely in range, and EMPTY only where no divisor can be 0. It holds for every
sub-range of the bounds. Positions and lengths are below 2^31. An attention without a mask and without checked gathers gets no
classifier.
"""

from __future__ import annotations

from typing import cast

from xdsl.dialects import arith, tensor
from xdsl.dialects.builtin import DenseArrayBase, IntegerType, ModuleOp, StringAttr, SymbolRefAttr, TensorType, i32, i64
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, BlockArgument, Operation, Region, SSAValue

from attnc.analysis.attention import (
    BATCH,
    CHECKED,
    KEY,
    QUERY,
    Attention,
    block_class,
    compared_with_one,
    divides_by_key,
    final_select,
    is_division,
    is_unmasked,
    match_attention,
    slice_of,
)
from attnc.analysis.buffers import argument_strings, memref_of
from attnc.analysis.interval_arithmetic import ARITHMETIC
from attnc.analysis.interval_logic import LOGIC
from attnc.analysis.intervals import Interval, IntervalAnalysis, Known, Score, Truth, unknown, width_of
from attnc.analysis.symbolic import Arithmetic, Condition, Scalar
from attnc.dialects import tile
from attnc.dialects.attention_backward import AttentionBackwardOp
from attnc.dialects.building import INDEX, Builder, erase_dead
from attnc.dialects.linalg_ext import IndexOp, OnlineAttentionOp, YieldOp
from attnc.target import Target

NAME = "classify-blocks"
BOUNDS = ("b", "h0", "h1", "q0", "q1", "k0", "k1")
LAST_POSITION = 2**31 - 1


def run(module: ModuleOp, target: Target) -> None:
    """Gives every online_attention of the module that has something to classify its classifier."""
    for function in list(module.ops):
        if not isinstance(function, FuncOp) or not function.body.blocks:
            continue
        for op in function.body.block.ops:
            if (
                isinstance(op, OnlineAttentionOp | AttentionBackwardOp)
                and "attnc.classifier" not in op.attributes
                and not is_unmasked(op)
            ):
                names = {other.sym_name.data for other in module.ops if isinstance(other, FuncOp)}
                name = "classify" if "classify" not in names else f"{function.sym_name.data}_classify"
                classifier, arguments = _Classifier(match_attention(function, op)).function(name)
                module.body.block.insert_op_before(classifier, function)
                op.attributes["attnc.classifier"] = SymbolRefAttr(name)
                op.attributes["attnc.classifier_arguments"] = DenseArrayBase.from_list(i64, arguments)


class _Classifier:
    """Writes the classifier of one attention."""

    def __init__(self, attention: Attention):
        self.attention = attention
        self.source = attention.op.region.block
        self.block = Block(arg_types=[INDEX] * len(BOUNDS))
        for argument, hint in zip(self.block.args, BOUNDS, strict=True):
            argument.name_hint = hint
        self.build = Builder(self.block)
        self.a = Arithmetic(self.build)
        b, h0, h1, q0, q1, k0, k1 = (self.a.assume(argument, 0, LAST_POSITION) for argument in self.block.args)
        self.positions = {
            BATCH: Interval(b, b),
            QUERY: Interval(q0, q1, frozenset("q")),
            KEY: Interval(k0, k1, frozenset("k")),
        }
        self.heads = Interval(h0, h1, frozenset("h"))
        self.arguments: dict[BlockArgument, BlockArgument] = {}
        self.proofs: dict[Operation, tuple[str, Condition]] = {}
        self.scans: dict[tuple[object, ...], tuple[Scalar, Scalar]] = {}
        self.sizes: dict[tuple[SSAValue, int], Scalar] = {}
        self.analysis = IntervalAnalysis(self.a, ARITHMETIC | LOGIC, self._read, self._outer)

    def function(self, name: str) -> tuple[FuncOp, list[int]]:
        """The classifier, and which of the attention's function's arguments it takes after the bounds."""
        analysis, a = self.analysis, self.a
        select = final_select(self.source)
        last = self.source.last_op
        assert isinstance(last, YieldOp)
        class_ = block_class(self.attention)
        partial = compared_with_one(class_) if class_ is not None else None
        conditions, chain = _dead_chain(last.value)
        gathers = [op for op in self.source.ops if any(CHECKED in inner.attributes for inner in op.walk())]
        roots = [*conditions, *(operand for op in gathers for operand in op.operands)]
        if partial is not None:
            roots.append(partial.result)
        wanted = slice_of(roots, self.source) | chain | set(gathers)
        wanted |= slice_of((operand for op in gathers for inner in op.walk() for operand in inner.operands), self.source)
        divisions = [op for op in self.source.ops if is_division(op)]
        wanted |= slice_of((op.operands[1] for op in divisions), self.source)
        analysis.block(self.source, wanted)

        listed: Condition = True
        if partial is not None:
            listed = analysis.truth(partial.result).ever
        proven: dict[str, Condition] = {"kept": True, "all": True, "listed": True}
        for checked, proof in self.proofs.values():
            proven[checked] = a.both(proven[checked], proof)
        masks_proven = a.both(proven["all"], a.either(a.negate(listed), proven["listed"]))
        everything_proven = a.both(masks_proven, proven["kept"])
        dead = cast(Score, analysis.known(last.value)).dead
        full: Condition = everything_proven
        in_mask = slice_of([select.cond], self.source) if select is not None else set()
        # A zero divisor is found where pairs are computed, as they are in FULL blocks.
        for op in divisions:
            divisor = analysis.interval(op.operands[1])
            proof = a.either(a.at_most(1, divisor.lo), a.at_most(divisor.hi, -1))
            everything_proven = a.both(everything_proven, proof)
            if op in in_mask or not divides_by_key(op, self.source):
                masks_proven = a.both(masks_proven, proof)
        empty = a.both(dead, everything_proven)
        if select is not None:
            mask = analysis.truth(select.cond)
            empty = a.either(empty, a.both(a.negate(mask.ever), masks_proven))
            full = a.both(full, mask.always)
        return self._finish(name, empty, full)

    def _finish(self, name: str, empty: Condition, full: Condition) -> tuple[FuncOp, list[int]]:
        build, a = self.build, self.a
        classes = [
            build.constant(number, i32, hint) for number, hint in zip((0, 1, 2), ("empty", "full", "partial"), strict=True)
        ]
        kept = build.select(a.condition(full), classes[tile.FULL], classes[tile.PARTIAL], "kept")
        class_ = build.select(a.condition(empty), classes[tile.EMPTY], kept, "class")
        build.insert(ReturnOp(class_))
        erase_dead(self.block)
        unused = [old for old, new in self.arguments.items() if not new.uses]
        for old in unused:
            self.block.erase_arg(self.arguments.pop(old))
        taken = sorted(self.arguments, key=lambda old: self.arguments[old].index)
        type_ = ([argument.type for argument in self.block.args], [i32])
        return FuncOp(name, type_, Region(self.block), visibility="private"), [old.index for old in taken]

    # -- what the region reads ----------------------------------------------------------------------------------------

    def _argument(self, old: BlockArgument) -> BlockArgument:
        """The classifier's argument for one of the function's."""
        if old not in self.arguments:
            function = self.attention.function
            strides = argument_strings(function, "attnc.strides", "")[old.index]
            new = self.block.insert_arg(memref_of(old.type, strides), len(self.block.args))
            new.name_hint = old.name_hint
            self.arguments[old] = new
        return self.arguments[old]

    def _outer(self, value: SSAValue) -> Known | None:
        """A number that the function is given; what the function computes from such numbers."""
        owner = value.owner
        if isinstance(owner, Operation):
            if owner.parent is self.attention.function.body.block and owner.name.startswith("arith.") and not owner.regions:
                self.analysis.operation(owner)
                return self.analysis.of.get(value)
            return None
        if not isinstance(value, BlockArgument) or owner is not self.attention.function.body.block:
            return None
        width = width_of(value.type)
        if width is None or width == 1:
            return None
        new: SSAValue = self._argument(value)
        if isinstance(value.type, IntegerType):
            new = self.a.assume(self.build.cast("index_cast", new, INDEX), -(1 << (width - 1)), (1 << (width - 1)) - 1)
        known = self.analysis.of[value] = Interval(new, new)
        return known

    def _read(self, op: Operation) -> Known | None:
        if isinstance(op, IndexOp):
            return self.positions.get(op.dimension, Interval(0, LAST_POSITION, frozenset("h")))
        if self.attention.is_head(op):
            return self.heads
        if isinstance(op, tensor.ExtractOp):
            return self._gather(op)
        return None

    def _size(self, buffer: BlockArgument, dimension: int) -> Scalar:
        shape = cast(TensorType, buffer.type).get_shape()
        if shape[dimension] >= 0:
            return shape[dimension]
        key = (buffer, dimension)
        if key not in self.sizes:
            size = self.build.add(tile.DimOp(self._argument(buffer), dimension), "size")
            self.sizes[key] = self.a.assume(size, 0, 2**62)
        return self.sizes[key]

    def _gather(self, op: tensor.ExtractOp) -> Known:
        """What a captured tensor holds in the range of its indices, and whether these are in range."""
        a = self.a
        buffer = op.tensor
        if not isinstance(buffer, BlockArgument) or buffer.owner is not self.attention.function.body.block:
            return unknown(op.result.type)
        indices = [self.analysis.interval(index) for index in op.indices]
        checked = op.attributes.get(CHECKED)
        if isinstance(checked, StringAttr):
            proof: Condition = True
            for dimension, index in enumerate(indices):
                size = self._size(buffer, dimension)
                inside = a.both(a.at_most(a.subtract(0, size), index.lo), a.at_most(index.hi, a.subtract(size, 1)))
                proof = a.both(proof, inside)
            self.proofs[op] = (checked.data, proof)
        if width_of(op.result.type) is None:
            return Score()
        lists = buffer is self.attention.argument_with_role("blocks")
        wide = [n for n, index in enumerate(indices) if not index.exact and index.spread & {"q", "k"}]
        endless = any(isinstance(index.lo, int) and index.lo < -LAST_POSITION for index in indices)
        if (len(wide) > 1 and not lists) or endless:
            return unknown(op.result.type)
        return self._range(op, buffer, indices)

    def _range(self, op: tensor.ExtractOp, buffer: BlockArgument, indices: list[Interval]) -> Known:
        """The least and greatest element in a box; a negative index wraps once, which splits its range in two."""
        a = self.a
        lower: list[Scalar] = []
        upper: list[Scalar] = []
        split: int | None = None
        for dimension, index in enumerate(indices):
            lo, hi = index.lo, index.hi
            if a.range(lo)[0] < 0:
                size = self._size(buffer, dimension)
                if index.exact:
                    lo = hi = a.choose(a.at_most(0, lo), lo, a.add(lo, size))
                elif split is not None:
                    return unknown(op.result.type)
                else:
                    split = dimension
            lower.append(lo)
            upper.append(hi)
        if split is None:
            least, greatest = self._scan(buffer, lower, upper)
        else:
            lo, hi, size = lower[split], upper[split], self._size(buffer, split)
            lower[split] = a.maximum(lo, 0)
            least, greatest = self._scan(buffer, lower, upper)
            lower[split], upper[split] = a.add(lo, size), a.add(a.minimum(hi, -1), size)
            wrapped = self._scan(buffer, lower, upper)
            least, greatest = a.minimum(least, wrapped[0]), a.maximum(greatest, wrapped[1])
        if all(index.exact for index in indices):
            greatest = least
        spread = frozenset[str]().union(*(index.spread for index in indices))
        if width_of(op.result.type) == 1:
            return Truth(a.at_most(1, greatest), a.at_most(1, least), spread)
        return Interval(least, greatest, spread)

    def _scan(self, buffer: BlockArgument, lower: list[Scalar], upper: list[Scalar]) -> tuple[Scalar, Scalar]:
        a = self.a
        key = (buffer, *lower, *upper)
        if key in self.scans:
            return self.scans[key]
        bounds = [[a.value(x) for x in bound] for bound in (lower, upper)]
        range_ = self.build.insert(tile.RangeOp(self._argument(buffer), *bounds))
        width = width_of(cast(TensorType, buffer.type).element_type)
        assert width is not None
        limits = (0, 1) if width == 1 else (-(1 << (width - 1)), (1 << (width - 1)) - 1)
        hints = ("least", "greatest")
        least, greatest = (
            a.assume(self.build.cast("index_cast", result, INDEX, hint), *limits)
            for result, hint in zip(range_.results, hints, strict=True)
        )
        self.scans[key] = least, greatest
        return least, greatest


def _dead_chain(value: SSAValue) -> tuple[list[SSAValue], set[Operation]]:
    """The selects (and float casts) through which a score may be -inf, and the conditions of the selects."""
    conditions: list[SSAValue] = []
    chain: set[Operation] = set()
    waiting = [value]
    while waiting:
        owner = waiting.pop().owner
        if isinstance(owner, arith.SelectOp) and owner not in chain:
            chain.add(owner)
            conditions.append(owner.cond)
            waiting += [owner.lhs, owner.rhs]
        elif isinstance(owner, arith.ExtFOp | arith.TruncFOp):
            chain.add(owner)
            waiting.append(owner.operands[0])
    return conditions, chain
