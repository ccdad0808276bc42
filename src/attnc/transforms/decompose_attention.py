"""Attention on tiles becomes two products and what stands between them: only the `tile` dialect is left.

Before, in the body of a `tile.for` over blocks of keys:

    %acc_new, %max_new, %sum_new = "iree_linalg_ext.online_attention"(%query_tile, %key_tile, %value_tile, %scale, %acc_old, …)
      ({ …; %x = select(%live, %modified, -inf); yield %x })

After:

    %scores = tile.dot %query_staged by transposed %key_staged
    %modified = tile.case %class empty, full { the region without its last select, all gathers proven }
                                 partial { the whole region }
    %block_max = tile.reduce max %modified,   %max_new = max(%max_old, %block_max)
    %anchor = %max_new, or 0 where that is -inf
    %rescale = exp2((%max_old - %anchor) · log2 e)
    %weights = exp2((%modified - %anchor) · log2 e),   %live_keys = %modified != -inf
    %sum_new = %sum_old · %rescale + (tile.reduce add %weights)
    %acc_new = tile.dot %weights by %value_staged onto %acc_old · %rescale where %live_keys

Operands are staged in the type of the scores: halves are converted there. (On a machine that multiplies pairs of bf16, query
and key stay in bf16.) They serve the whole grid; with `attnc.staging = "none"` keys and values are not staged, but read where
they lie.
Where the region leaves the score alone (a mask apart), no scaled scores are written: the query takes the scale's sign, maxima
are those of products until after the loop, and weights are `exp2((%modified - %anchor) · (|scale| · log2 e))`. The scale
itself never goes into the query, which it could make overflow, or all NaN where it is infinite.
"""

from __future__ import annotations

import math
from typing import cast

from xdsl.dialects import tensor
from xdsl.dialects.builtin import (
    BFloat16Type,
    DenseArrayBase,
    Float32Type,
    FloatAttr,
    ModuleOp,
    StringAttr,
    TensorType,
    UnitAttr,
    i1,
    i32,
)
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from attnc import knobs
from attnc.analysis.attention import constant_of, final_select
from attnc.analysis.machine import has_bf16_dot
from attnc.dialects import tile
from attnc.dialects.building import INDEX, Builder, erase_dead
from attnc.dialects.linalg_ext import IndexOp, OnlineAttentionOp, YieldOp
from attnc.errors import LoweringError
from attnc.target import Target
from attnc.transforms.split_reduction import MAX_BESIDE_SUM, STAGING

NAME = "decompose-attention"
LOG2E = math.log2(math.e)


def run(module: ModuleOp, target: Target) -> None:
    """Decomposes every tiled online_attention of the module.

    Raises:
        LoweringError: an online_attention stands outside a `tile.kernel`.
    """
    for op in list(module.walk()):
        if isinstance(op, OnlineAttentionOp):
            if not isinstance(op.parent_op(), tile.CaseOp | tile.ForOp | tile.GridOp):
                raise LoweringError(f"{op.name} is not tiled: run tile-attention first")
            Decomposition(op, target).run()


class Decomposition:
    """Takes one tiled online_attention apart."""

    def __init__(self, op: OnlineAttentionOp, target: Target):
        self.op = op
        self.pairs = _multiplies_pairs(op, target)
        self.score = op.region.block.args[0].type
        self.rows, self.columns = tile.shape_of(op.query)[0], tile.shape_of(op.key)[0]
        self.row_type = tile.tile_type(self.rows, 1, self.score)
        self.score_type = tile.tile_type(self.rows, self.columns, self.score)
        staging = op.attributes.get(STAGING)
        self.staging = staging.data if isinstance(staging, StringAttr) else "grid"
        select = final_select(op.region.block)
        yielded = cast(YieldOp, op.region.block.last_op).value
        modified = select.lhs if select is not None else yielded
        self.loop_result = _after_loop(op.max_result)
        self.plain = modified is op.region.block.args[0] and self.loop_result is not None

    def run(self) -> None:
        op = self.op
        self._stage_query()
        block = Block()
        build = self.build = Builder(block)
        key = self._stage(build, op.key, "key_staged")
        dot = tile.DotOp(self.query, key, self.score_type, transpose_rhs=True)
        scores = build.add(dot, "scores")
        modified = self._modified(scores)
        zero = self._outside(0.0, "zero")
        minus_infinity = self._outside(-math.inf, "minus_infinity")
        factor, magnitude = self.factor, self.magnitude

        def natural(m: Builder, score: SSAValue) -> SSAValue:
            return score if magnitude is None else m.binary("mulf", score, magnitude, "natural")

        row, wide = self.row_type, self.score_type

        block_max = build.add(tile.ReduceOp(self._maximum(), modified), "block_max")
        max_new = self._map(row, "max_new", {"a": op.max, "c": block_max}, lambda m, a, c: m.binary("maximumf", a, c, "m"))

        def anchor_of(m: Builder, value: SSAValue) -> SSAValue:
            return m.select(m.compare_floats("oeq", natural(m, value), minus_infinity, "dead"), zero, value, "a")

        anchor = self._map(row, "anchor", {"m": max_new}, anchor_of)

        def power(hint: str):
            def body(m: Builder, value: SSAValue, base: SSAValue) -> SSAValue:
                exponent = m.binary("mulf", m.binary("subf", value, base, "difference"), factor, "exponent")
                result = m.unary_math("exp2", exponent, hint)
                cast(Operation, result.owner).attributes[tile.NONPOSITIVE] = UnitAttr()
                return result

            return body

        rescale = self._map(row, "rescale", {"a": op.max, "m": anchor}, power("factor"))
        live_type = tile.tile_type(self.rows, self.columns, i1)
        live = self._map(
            live_type,
            "live_keys",
            {"x": modified},
            lambda m, x: m.compare_floats("une", natural(m, x), minus_infinity, "alive"),
        )
        weights = self._map(wide, "weights", {"x": modified, "m": anchor}, power("p"))
        block_sum = build.add(tile.ReduceOp("add", weights), "block_sum")

        def total(m: Builder, old: SSAValue, factor: SSAValue, new: SSAValue) -> SSAValue:
            return m.binary("addf", m.binary("mulf", old, factor, "rescaled"), new, "total")

        sum_new = self._map(row, "sum_new", {"l": op.sum, "a": rescale, "s": block_sum}, total)
        acc_type = cast(TensorType, op.acc.type)
        acc_rescaled = self._map(
            acc_type, "acc_rescaled", {"o": op.acc, "a": rescale}, lambda m, o, a: m.binary("mulf", o, a, "rescaled")
        )
        self._move_load(op.value)
        value = self._stage(build, op.value, "value_staged")
        acc_new = build.add(tile.DotOp(weights, value, acc_type, acc_rescaled, live), "acc_new")
        if magnitude is not None:
            self._natural_maximum(magnitude)
        for result, new in zip(op.results, (acc_new, max_new, sum_new), strict=True):
            result.replace_all_uses_with(new)
        ops = list(block.ops)
        for inner in ops:
            inner.detach()
        Rewriter.insert_op(ops, InsertPoint.before(op))
        Rewriter.erase_op(op)

    # -- operands -----------------------------------------------------------------------------------------------------

    def _stage_query(self) -> None:
        """The query, in the type of the scores, staged where it is loaded; with the scale's sign where scores are plain."""
        query = self.op.query
        assert isinstance(query.owner, Operation)
        block = Block()
        build = Builder(block)
        element = cast(TensorType, query.type).element_type
        type_ = cast(TensorType, query.type) if self.pairs else tile.tile_type(*tile.shape_of(query), self.score)
        halves = element != self.score
        sign = self.magnitude = None
        self.factor = self._outside(LOG2E, "log2e")
        if self.plain:
            sign, self.magnitude, self.factor = self._parts_of_scale(build, self.factor)
        if sign is not None or (halves and not self.pairs):

            def body(m: Builder, x: SSAValue) -> SSAValue:
                x = m.cast("extf", x, self.score, "wide") if halves else x
                x = m.binary("mulf", x, sign, "signed") if sign is not None else x
                return m.cast("truncf", x, element, "narrow") if self.pairs else x

            query = map_tile(build, type_, "query_signed" if sign is not None else "query_wide", {"x": query}, body)
        self.query = build.add(tile.StageOp(query, "lhs", "task", type_), "query_staged")
        ops = list(block.ops)
        for op in ops:
            op.detach()
        Rewriter.insert_op(ops, InsertPoint.after(cast(Operation, self.op.query.owner)))

    def _parts_of_scale(self, build: Builder, log2e: SSAValue) -> tuple[SSAValue, SSAValue, SSAValue]:
        """(sign, magnitude > 0, magnitude · log2 e): the scale is the first times the second. One of 0 or NaN is all in the
        sign, so that -inf stays -inf; of a huge one the sign takes a part, which leaves room for log2 e."""
        scale, zero, one, minus_one = (self.op.scale, *(build.constant(value, self.score) for value in (0.0, 1.0, -1.0)))
        usual = build.compare_floats("one", scale, zero, "usual")
        negative = build.compare_floats("olt", scale, zero, "negative")
        sign = build.select(usual, build.select(negative, minus_one, one), scale, "sign")
        size = build.select(usual, build.unary_math("absf", scale), one, "size")
        huge = build.compare_floats("oge", size, build.constant(1e37, self.score), "huge")
        more, less = (build.select(huge, build.constant(part, self.score), one) for part in (16.0, 0.0625))
        sign, magnitude = build.binary("mulf", sign, more, "scale_sign"), build.binary("mulf", size, less, "scale_magnitude")
        return sign, magnitude, build.binary("mulf", magnitude, log2e, "scale_log2e")

    def _stage(self, build: Builder, operand: SSAValue, hint: str) -> SSAValue:
        pairs = self.pairs and operand is self.op.key
        type_ = cast(TensorType, operand.type) if pairs else tile.tile_type(*tile.shape_of(operand), self.score)
        if self.staging == "none":
            return operand
        return build.add(tile.StageOp(operand, "rhs", self.staging, type_), hint)

    def _move_load(self, value: SSAValue) -> None:
        """Values are loaded where they are wanted, after the weights."""
        load = value.owner
        if isinstance(load, tile.LoadOp) and load.parent is self.op.parent and len(list(value.uses)) == 1:
            load.detach()
            self.build.insert(load, value.name_hint)

    def _outside(self, value: float, hint: str) -> SSAValue:
        """A constant of the score's type at the head of the kernel, once."""
        kernel = self.op.parent_op()
        while kernel is not None and not isinstance(kernel, tile.KernelOp):
            kernel = kernel.parent_op()
        assert kernel is not None
        block = kernel.body.block
        for op in block.ops:
            if isinstance(op, tile.GridOp):
                new = Block()
                result = Builder(new).constant(value, self.score, hint)
                assert isinstance(result.owner, Operation)
                result.owner.detach()
                block.insert_op_before(result.owner, op)
                return result
            if (
                op.name == "arith.constant"
                and op.results[0].type == self.score
                and constant_of(op.results[0]) == _rounded(value, self.score)
            ):
                return op.results[0]
        raise LoweringError("tile.kernel without tile.grid")

    # -- the region ---------------------------------------------------------------------------------------------------

    def _modified(self, scores: SSAValue) -> SSAValue:
        """The scores that enter the softmax."""
        parent = self.op.parent_op()
        region = self.op.parent_region()
        labels = list(tile.CLASS_NAMES)
        if isinstance(parent, tile.CaseOp):
            labels = next(
                [name.data for name in group] for group, case in zip(parent.labels, parent.cases, strict=True) if case is region
            )
        if not isinstance(parent, tile.CaseOp) or "full" not in labels:
            return self._region(self.build, scores, full=False)
        if "partial" not in labels:
            return self._region(self.build, scores, full=True)
        cases: list[tuple[list[str], Region]] = []
        for names, full in ((["empty", "full"], True), (["partial"], False)):
            block = Block()
            build = Builder(block)
            build.insert(tile.YieldOp([self._region(build, scores, full)]))
            cases.append((names, Region(block)))
        return self.build.add(tile.CaseOp(parent.selector, [self.score_type], cases), "modified")

    def _region(self, build: Builder, scores: SSAValue, full: bool) -> SSAValue:
        """The region as a map; where `full`, the mask holds for every pair and every gather is in range."""
        source = self.op.region.block
        select = final_select(source)
        yielded = cast(YieldOp, source.last_op).value
        if full and select is not None:
            yielded = select.lhs
        if self.plain and yielded is source.args[0]:
            return scores
        block = Block(arg_types=[self.score])
        inputs = [scores]
        block.args[0].name_hint = "s"
        body = Builder(block)
        score = block.args[0]
        if not self.plain:
            score = body.binary("mulf", score, self.op.scale, "natural")
        mapper: dict[SSAValue, SSAValue] = {source.args[0]: score}
        for op in source.ops:
            if isinstance(op, IndexOp | tensor.ExtractOp):
                if isinstance(op, tensor.ExtractOp):
                    tile_ = op.tensor
                elif any(not isinstance(use.operation, tensor.ExtractOp) for use in op.result.uses):
                    tile_ = self._iota(build, op)
                else:
                    continue
                if tile_ not in inputs:
                    inputs.append(tile_)
                    block.insert_arg(op.result.type, len(block.args)).name_hint = op.result.name_hint
                mapper[op.result] = block.args[inputs.index(tile_)]
            elif op is not source.last_op and not (full and op is select):
                copy = op.clone(mapper)
                block.add_op(copy)
                if full:
                    prove(copy)
        body.insert(tile.YieldOp([mapper.get(yielded, yielded)]))
        erase_dead(block)
        used = [n for n, argument in enumerate(block.args) if n == 0 or argument.uses]
        for argument in reversed(block.args):
            if argument.index not in used:
                block.erase_arg(argument)
        inputs = [inputs[n] for n in used]
        return build.add(tile.MapOp(inputs, self.score_type, Region(block)), "x")

    def _iota(self, build: Builder, op: IndexOp) -> SSAValue:
        shapes = {0: (self.rows, 1), 1: (1, self.columns)}
        if op.dimension not in shapes:
            raise LoweringError(f"the region asks for its position in dimension {op.dimension}, which is summed over")
        return build.add(tile.IotaOp(build.constant(0), tile.tile_type(*shapes[op.dimension], INDEX)))

    def _map(self, type_: TensorType, hint: str, inputs: dict[str, SSAValue], body) -> SSAValue:
        return map_tile(self.build, type_, hint, inputs, body)

    def _maximum(self) -> str:
        """The reduction of the row maximum. A NaN score makes its weight NaN, and so the sum: who reads the maximum together
        with the sum learns of it there, and "maxnum" is one instruction where "max" is three. Not so who reads it alone."""
        sum_result = _after_loop(self.op.sum_result)
        beside = self.loop_result is not None and sum_result is not None and tile.read_beside(self.loop_result, sum_result)
        return "maxnum" if beside or MAX_BESIDE_SUM in self.op.attributes else "max"

    # -- after the loop -----------------------------------------------------------------------------------------------

    def _natural_maximum(self, magnitude: SSAValue) -> None:
        """Gives those who read the maximum after the loop natural units."""
        result = self.loop_result
        assert result is not None and isinstance(result.owner, Operation)
        if not result.uses:
            return
        block = Block()
        natural = map_tile(
            Builder(block), self.row_type, "max_natural", {"m": result}, lambda m, x: m.binary("mulf", x, magnitude, "natural")
        )
        op = cast(Operation, natural.owner)
        op.detach()
        result.replace_uses_with_if(natural, lambda use: use.operation is not op)
        Rewriter.insert_op([op], InsertPoint.after(result.owner))


def _multiplies_pairs(op: OnlineAttentionOp, target: Target) -> bool:
    """Whether the first product takes query and key as they are, in bf16. (The second one's weights need more bits.)"""
    both = (cast(TensorType, operand.type) for operand in (op.query, op.key))
    wanted = knobs.bf16_dot() is not False and has_bf16_dot(target) and STAGING not in op.attributes
    return wanted and tile.shape_of(op.query)[1] % 2 == 0 and all(isinstance(t.element_type, BFloat16Type) for t in both)


def map_tile(build: Builder, type_: TensorType, hint: str, inputs: dict[str, SSAValue], body) -> SSAValue:
    """A `tile.map`; `body` gets a builder and the elements of `inputs`, whose keys name them, and returns the result."""
    block = Block(arg_types=[cast(TensorType, value.type).element_type for value in inputs.values()])
    for argument, name in zip(block.args, inputs, strict=True):
        argument.name_hint = name
    inner = Builder(block)
    inner.insert(tile.YieldOp.create(operands=[body(inner, *block.args)]))
    op = tile.MapOp.create(operands=list(inputs.values()), result_types=[type_], regions=[Region(block)])
    return build.add(op, hint)


def prove(op: Operation) -> None:
    """Marks the gathers in `op` as proven."""
    for inner in op.walk():
        if isinstance(inner, tile.GatherOp) and inner.live is not None:
            inner.operands = [operand for operand in inner.operands if operand is not inner.live]
            inner.attributes["proven"] = UnitAttr()
            sizes = [1, len(inner.operands) - 1, 0]
            inner.attributes["operandSegmentSizes"] = DenseArrayBase.from_list(i32, sizes)


def _after_loop(value: SSAValue) -> SSAValue | None:
    """The result of the `tile.for` that `value` ends up as, by way of yields, or None where it takes another way."""
    while True:
        uses = list(value.uses)
        if len(uses) != 1 or not isinstance(uses[0].operation, tile.YieldOp):
            return None
        parent = uses[0].operation.parent_op()
        if parent is None or not isinstance(parent, tile.CaseOp | tile.ForOp):
            return None
        value = parent.results[uses[0].index]
        if isinstance(parent, tile.ForOp):
            return value


def _rounded(value: float, type_: Attribute) -> float:
    return FloatAttr(value, cast(Float32Type, type_)).value.data
