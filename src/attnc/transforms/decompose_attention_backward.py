"""The derivative of attention on tiles becomes five products and what stands between them: only the `tile` dialect is left.

Before, in the body of a `tile.for` over blocks of query rows:

    %d_query_part, %d_key_new, %d_value_new = "attnc.attention_backward"(%query_tile, %key_tile, %value_tile, %scale,
    %out_tile, …)

After:

    %scores = tile.dot %query_tile by transposed %key_staged
    %modified = the region, as in the forward pass;   %live_pairs = %modified != -inf
    %weights = exp2((%modified - %lse_tile) · log2 e)
    %d_value_new = tile.dot transposed %weights by %d_out_tile onto %d_value_old where %live_pairs
    %d_weights = tile.dot %d_out_tile by transposed %value_staged
    %delta = (tile.reduce add %out_tile · %d_out_tile) - %d_lse_tile
    %d_modified = %weights · (%d_weights - %delta), 0 where not live
    … for each tensor that the mods read, its share: a map, a sum over the row, a tile.accumulate …
    … for sums over whole rows, what rounding leaves of them: see decompose_attention_rests.py …
    %d_scores = scale · the derivative
    %d_key_new = tile.dot transposed %d_scores by %query_tile onto %d_key_old where %live_pairs
    %d_query_part = tile.dot %d_scores by %key_tile where %live_pairs

Products whose results nobody wants are left out. Halves are converted where they are loaded. A query without a live key has
lse = -inf, and all its pairs are dead. Where there are sums over whole rows, another kernel follows this one.
"""

from __future__ import annotations

import math
from typing import cast

from xdsl.dialects.builtin import ModuleOp, TensorType, UnitAttr, i1
from xdsl.ir import Block, Operation, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from attnc.dialects import tile
from attnc.dialects.attention_backward import AttentionBackwardOp
from attnc.dialects.building import Builder
from attnc.errors import LoweringError
from attnc.target import Target
from attnc.transforms.decompose_attention import LOG2E, Decomposition, map_tile
from attnc.transforms.decompose_attention_derivative import Derivative
from attnc.transforms.decompose_attention_rests import MOST, Rests, RowSum

NAME = "decompose-attention-backward"


def run(module: ModuleOp, target: Target) -> None:
    """Decomposes every tiled attention_backward of the module.

    Raises:
        LoweringError: one stands outside a `tile.kernel`.
    """
    for op in list(module.walk()):
        if isinstance(op, AttentionBackwardOp):
            if not isinstance(op.parent_op(), tile.CaseOp | tile.ForOp | tile.GridOp):
                raise LoweringError(f"{op.name} is not tiled: run tile-attention-backward first")
            _BackwardDecomposition(op).run()


class _BackwardDecomposition(Decomposition):
    """Takes one tiled attention_backward apart."""

    op: AttentionBackwardOp

    def __init__(self, op: AttentionBackwardOp):
        self.op = op
        self.score = op.region.block.args[0].type
        self.rows, self.columns = tile.shape_of(op.query)[0], tile.shape_of(op.key)[0]
        self.row_type = tile.tile_type(self.rows, 1, self.score)
        self.score_type = tile.tile_type(self.rows, self.columns, self.score)
        self.plain = False
        self.rests: Rests | None = None

    def run(self) -> None:
        op = self.op
        block = Block()
        build = self.build = Builder(block)
        zero = self._outside(0.0, "zero")
        minus_infinity = self._outside(-math.inf, "minus_infinity")
        log2e = self._outside(LOG2E, "log2e")
        wanted = set(op.wanted)
        inside = bool(op.captures) or wanted != {"value"}  # something is wanted of the scores
        new: dict[str, SSAValue] = {}
        carried = dict(zip([name for name in ("key", "value") if name in wanted], op.carried, strict=True))

        query, d_out = self._wide(op.query, "query_wide"), self._wide(op.d_out, "d_out_wide")
        key_staged = self._stage_key(op.key, "key_staged")
        scores = build.add(tile.DotOp(query, key_staged, self.score_type, transpose_rhs=True), "scores")
        modified = self._modified(scores)
        live = self._map(
            tile.tile_type(self.rows, self.columns, i1),
            "live_pairs",
            {"x": modified},
            lambda m, x: m.compare_floats("une", x, minus_infinity, "alive"),
        )

        weights = self._weights(modified, zero, minus_infinity, log2e)
        if "value" in wanted:
            new["value"] = self._onto(weights, d_out, carried["value"], live, "d_value_new")
        if inside:
            d_modified = self._d_modified(d_out, weights, live, zero)
            self._derivative(scores, weights, d_modified, live, query, carried, new)
        for name, result in zip(op.wanted, op.results, strict=True):
            result.replace_all_uses_with(new[name])
        ops = list(block.ops)
        for inner in ops:
            inner.detach()
        Rewriter.insert_op(ops, InsertPoint.before(op))
        Rewriter.erase_op(op)
        if self.rests is not None:
            self.rests.add_kernel()

    # -- operands -----------------------------------------------------------------------------------------------------

    def _wide(self, value: SSAValue, hint: str, build: Builder | None = None) -> SSAValue:
        """A tile in the type of the scores."""
        type_ = tile.tile_type(*tile.shape_of(value), self.score)
        if value.type == type_:
            return value
        return map_tile(build or self.build, type_, hint, {"x": value}, lambda m, x: m.cast("extf", x, self.score, "wide"))

    def _at_load(self, value: SSAValue, op: Operation, hint: str) -> SSAValue:
        """Puts an operation behind that which makes `value`."""
        assert isinstance(value.owner, Operation)
        op.results[0].name_hint = hint
        Rewriter.insert_op([op], InsertPoint.after(value.owner))
        return op.results[0]

    def _stage_key(self, value: SSAValue, hint: str) -> SSAValue:
        """A tile of the task's, packed to be read transposed."""
        type_ = tile.tile_type(*tile.shape_of(value), self.score)
        return self._at_load(value, tile.StageOp(value, "rhs", "task", type_), hint)

    def _wide_at_load(self, value: SSAValue, hint: str) -> SSAValue:
        block = Block()
        wide = self._wide(value, hint, Builder(block))
        if wide is value:
            return value
        assert isinstance(wide.owner, Operation)
        wide.owner.detach()
        return self._at_load(value, wide.owner, hint)

    def _onto(self, left: SSAValue, right: SSAValue, old: SSAValue, live: SSAValue, hint: str) -> SSAValue:
        type_ = cast(TensorType, old.type)
        return self.build.add(tile.DotOp(left, right, type_, old, live, transpose_lhs=True), hint)

    # -- between the products -----------------------------------------------------------------------------------------

    def _weights(self, modified: SSAValue, zero: SSAValue, minus_infinity: SSAValue, log2e: SSAValue) -> SSAValue:
        """exp(modified - lse). lse is f64: of a large one, f32 would lose what weights are made of."""
        lse = self.op.lse
        wide = cast(TensorType, lse.type).element_type

        def anchor_of(m: Builder, value: SSAValue) -> SSAValue:
            narrow = value if wide == self.score else m.cast("truncf", value, self.score, "narrow")
            return m.select(m.compare_floats("oeq", narrow, minus_infinity, "dead"), zero, narrow, "a")

        def rest_of(m: Builder, value: SSAValue, anchor: SSAValue) -> SSAValue:
            difference = m.cast("truncf", m.binary("subf", value, m.cast("extf", anchor, wide)), self.score, "difference")
            dead = m.compare_floats("oeq", difference, minus_infinity, "dead")
            return m.select(dead, zero, difference, "rest")

        inputs = {"x": modified, "a": self._map(self.row_type, "anchor", {"l": lse}, anchor_of)}
        if wide != self.score:
            inputs["r"] = self._map(self.row_type, "lse_rest", {"l": lse, "a": inputs["a"]}, rest_of)

        def weight_of(m: Builder, x: SSAValue, anchor: SSAValue, rest: SSAValue | None = None) -> SSAValue:
            difference = m.binary("subf", x, anchor, "difference")
            if rest is not None:
                difference = m.binary("subf", difference, rest, "difference")
            weight = m.unary_math("exp2", m.binary("mulf", difference, log2e, "exponent"), "p")
            cast(Operation, weight.owner).attributes[tile.NONPOSITIVE] = UnitAttr()  # it is at most 1, but for roundings
            return weight

        return self._map(self.score_type, "weights", inputs, weight_of)

    def _d_modified(self, d_out: SSAValue, weights: SSAValue, live: SSAValue, zero: SSAValue) -> SSAValue:
        op, build = self.op, self.build
        value_staged = self._stage_key(op.value, "value_staged")
        d_weights = build.add(tile.DotOp(d_out, value_staged, self.score_type, transpose_rhs=True), "d_weights")
        out = self._wide(op.out, "out_wide")
        type_ = cast(TensorType, out.type)
        products = self._map(type_, "out_products", {"o": out, "d": d_out}, lambda m, o, d: m.binary("mulf", o, d, "product"))
        delta = build.add(tile.ReduceOp("add", products), "delta")
        if op.d_lse is not None:
            inputs = {"t": delta, "g": op.d_lse}
            delta = self._map(self.row_type, "delta_lse", inputs, lambda m, t, g: m.binary("subf", t, g, "rest"))

        def adjoint(m: Builder, p: SSAValue, d: SSAValue, t: SSAValue, alive: SSAValue) -> SSAValue:
            return m.select(alive, m.binary("mulf", p, m.binary("subf", d, t, "difference"), "product"), zero, "x")

        inputs = {"p": weights, "d": d_weights, "t": delta, "alive": live}
        return self._map(self.score_type, "d_modified", inputs, adjoint)

    def _derivative(
        self,
        scores: SSAValue,
        weights: SSAValue,
        d_modified: SSAValue,
        live: SSAValue,
        query: SSAValue,
        carried: dict[str, SSAValue],
        new: dict[str, SSAValue],
    ) -> None:
        op, build = self.op, self.build
        derivative = Derivative(op, build, scores, d_modified, live)
        derivative.accumulate()
        sums = derivative.of_weights(weights) if len(derivative.row_sums) <= MOST else []
        if "scale" in op.wanted:
            sums.append(self._scale_of_weights(derivative, scores, weights))
        if sums:
            self.rests = Rests(derivative.kernel, op.lse, op.d_lse, sums)
            self.rests.keep(build, d_modified)
        if not {"query", "key", "scale"} & set(op.wanted):
            return
        if "scale" in op.wanted:
            natural = derivative.d_score(None, "d_natural")
            new["scale"] = self._scale_part(natural, scores, "d_scale")
            d_scores = self._map(
                self.score_type, "d_scores", {"d": natural}, lambda m, d: m.binary("mulf", d, op.scale, "scaled")
            )
        else:
            d_scores = derivative.d_score(op.scale, "d_scores")
        if "key" in op.wanted:
            new["key"] = self._onto(d_scores, query, carried["key"], live, "d_key_new")
        if "query" in op.wanted:
            key = self._wide_at_load(op.key, "key_wide")
            type_ = tile.tile_type(self.rows, tile.shape_of(key)[1], self.score)
            new["query"] = build.add(tile.DotOp(d_scores, key, type_, live=live), "d_query_part")

    def _scale_part(self, natural: SSAValue, scores: SSAValue, hint: str) -> SSAValue:
        inputs = {"d": natural, "s": scores}
        pairs = self._map(self.score_type, f"{hint}_pairs", inputs, lambda m, d, s: m.binary("mulf", d, s, "share"))
        return self.build.add(tile.ReduceOp("add", pairs), f"{hint}_part")

    def _scale_of_weights(self, derivative: Derivative, scores: SSAValue, weights: SSAValue) -> RowSum:
        """The scale's sum as one over whole rows."""
        with derivative.at(weights):
            natural = derivative.d_score(None, "d_natural_weights")
        part = self.op.results[self.op.wanted.index("scale")]
        (use,) = part.uses
        assert isinstance(use.operation, tile.AccumulateOp)
        sum_ = use.operation
        owners = [owner.value.data for owner in sum_.owners]
        return RowSum(self._scale_part(natural, scores, "d_scale_weights"), sum_.buffer, list(sum_.indices), owners)
