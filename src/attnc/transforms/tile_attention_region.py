"""The region of attention as it stands in a kernel: positions come from tiles, captures are gathered, keys have an end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from xdsl.dialects import tensor
from xdsl.dialects.arith import ConstantOp, SelectOp
from xdsl.dialects.builtin import IntegerAttr, StringAttr, i1
from xdsl.ir import Block, BlockArgument, Operation, Region, SSAValue
from xdsl.rewriter import Rewriter

from attnc.analysis.attention import (
    BATCH,
    CHECKED,
    GROUP,
    KEY,
    KV_HEAD,
    NAME,
    QUERY,
    Attention,
    block_class,
    compared_with_one,
    divides_by_key,
    final_select,
    is_division,
    slice_of,
)
from attnc.dialects import tile
from attnc.dialects.attention_backward import AccumulateOp, DerivativeYieldOp
from attnc.dialects.building import Builder, erase_dead
from attnc.dialects.linalg_ext import IndexOp, YieldOp
from attnc.errors import LoweringError


@dataclass
class Positions:
    """Where a task stands: scalars for batch and key/value head, a tile of one column for query head and query."""

    batch: SSAValue
    kv_head: SSAValue
    head: SSAValue
    query: SSAValue
    ratio: SSAValue


def tile_region(
    attention: Attention,
    positions: Positions,
    key: SSAValue,
    keys: SSAValue,
    prelude: Builder,
    outer: Callable[[SSAValue], SSAValue],
    queries: SSAValue | None = None,
) -> Region:
    """A copy of the region for tiles.

    Before:

        %q = index 3, %k = index 4
        %slope = tensor.extract %slopes[%h] {attnc.checked = "kept"}
        …
        %x = select(%mask, %modified, -inf)

    After:

        %row = index 0, %column = index 1
        %qi = tensor.extract %q[%row, 0], %ki = tensor.extract %k[0, %column]
        %inside = %ki < %keys
        … what the mask needs …
        %live = %mask and %inside
        %slope = tile.gather %slopes[%h] where %live
        …
        %x = select(%live, %modified, -inf)

    A gather is checked where the mask keeps the pair ("kept"), everywhere ("all"), or where a BlockMask lists the block as
    partial ("listed"); it never counts beyond the keys (nor beyond `queries`, where those are given). Neither does a zero
    divisor: where it does not count, it becomes 1.
    """
    return _TileRegion(attention, attention.op.region.block, positions, key, prelude, outer).build(keys, queries)


def tile_derivative(
    attention: Attention,
    derivative: Block,
    positions: Positions,
    key: SSAValue,
    prelude: Builder,
    outer: Callable[[SSAValue], SSAValue],
    gradients: dict[SSAValue, SSAValue],
) -> Region:
    """A copy of a derivative for tiles: as `tile_region`, but every gather counts where the pair is live, and what is
    accumulated goes to `gradients`: the buffer of each captured tensor's gradient."""
    return _TileRegion(attention, derivative, positions, key, prelude, outer).build_derivative(gradients)


class _TileRegion:
    def __init__(
        self,
        attention: Attention,
        source: Block,
        positions: Positions,
        key: SSAValue,
        prelude: Builder,
        outer: Callable[[SSAValue], SSAValue],
    ):
        self.attention = attention
        self.positions, self.key = positions, key
        self.prelude, self.outer = prelude, outer
        self.source = source
        self.block = Block(arg_types=[argument.type for argument in source.args])
        self.build_ = Builder(self.block)
        self.mapper: dict[SSAValue, SSAValue] = dict(zip(source.args, self.block.args, strict=True))
        for old, new in self.mapper.items():
            new.name_hint = old.name_hint
        self.block.args[0].name_hint = "score"
        self.read: dict[SSAValue, SSAValue] = {}
        self.at: dict[int, SSAValue] = {}
        self.row = self.build_.add(IndexOp(0), "row")
        self.column = self.build_.add(IndexOp(1), "column")

    def build_derivative(self, gradients: dict[SSAValue, SSAValue]) -> Region:
        last = self.source.last_op
        assert isinstance(last, DerivativeYieldOp)
        live = self.block.args[2]
        self.inside = live
        self.live = {"kept": live, "all": live, "listed": live}
        self._copy({op for op in self.source.ops if op is not last})
        into = {self._value(capture): gradient for capture, gradient in gradients.items()}
        for op in list(self.block.walk()):
            if isinstance(op, AccumulateOp):
                indices = list(op.indices) or [self.prelude.constant(0)]
                Rewriter.replace_op(op, AccumulateOp(op.value, into[op.target], indices), [])
        self.build_.insert(DerivativeYieldOp([self._value(value) for value in last.values]))
        erase_dead(self.block)
        return Region(self.block)

    def build(self, keys: SSAValue, queries: SSAValue | None) -> Region:
        build = self.build_
        select = final_select(self.source)
        last = self.source.last_op
        assert isinstance(last, YieldOp)
        self.inside = build.compare("slt", self._position(KEY), keys, "inside")
        if queries is not None:
            row_inside = build.compare("slt", self._position(QUERY), queries, "row_inside")
            self.inside = build.binary("andi", self.inside, row_inside, "pair_inside")
        self.live = {"kept": self.inside, "all": self.inside, "listed": self.inside}

        class_ = block_class(self.attention)
        if class_ is not None:
            listed = compared_with_one(class_)
            roots = [class_] if listed is None else [listed.result]
            self._copy(slice_of(roots, self.source))
            if listed is None:
                one = self.prelude.constant(1, class_.type)
                listed_here = build.compare("eq", self.mapper[class_], one, "listed")
            else:
                listed_here = self.mapper[listed.result]
            self.live["listed"] = build.binary("andi", listed_here, self.inside, "listed_inside")
        if select is not None:
            self._copy(slice_of([select.cond], self.source))
            self.live["kept"] = self._and(self._value(select.cond), self.inside)
        everything = {op for op in self.source.ops if op is not last and op is not select}
        self._copy(everything)
        score = self._value(select.lhs if select is not None else last.value)
        minus_infinity = self.prelude.constant(float("-inf"), score.type, "minus_infinity")
        build.insert(YieldOp(build.select(self.live["kept"], score, minus_infinity, "masked")))
        erase_dead(self.block)
        return Region(self.block)

    def _and(self, mask: SSAValue, inside: SSAValue) -> SSAValue:
        constant = mask.owner.value if isinstance(mask.owner, ConstantOp) else None
        if constant == IntegerAttr(1, i1) or constant == IntegerAttr(-1, i1):
            return inside
        return self.build_.binary("andi", mask, inside, "live")

    def _value(self, value: SSAValue) -> SSAValue:
        known = self.mapper.get(value)
        if known is None:
            known = self.mapper[value] = self.outer(value)
        return known

    def _copy(self, ops: set[Operation]) -> None:
        """Copies those of `ops` that are not yet there, in their order."""
        for op in self.source.ops:
            if op in ops and not (op.results and op.results[0] in self.mapper):
                self._copy_one(op)

    def _copy_one(self, op: Operation) -> None:
        if isinstance(op, IndexOp):
            self.mapper[op.result] = self._position(op.dimension)
            return
        if self.attention.is_head(op):
            self.mapper[op.results[0]] = self._read(self.positions.head, "hi")
            return
        for inner in op.walk():
            if isinstance(inner, IndexOp):
                self._position(inner.dimension)
            for operand in inner.operands:
                if self._is_outside(operand):
                    self._value(operand)
        if isinstance(op, tensor.ExtractOp):
            self.mapper[op.result] = self._gather(op, self.mapper, self.block)
            return
        by_key = [is_division(inner) and divides_by_key(inner, self.source) for inner in op.walk()]
        copy = op.clone(self.mapper)
        self.block.add_op(copy)
        for inner in [inner for inner, divides in zip(copy.walk(), by_key, strict=True) if divides]:
            divisor = inner.operands[1]
            one = self.prelude.constant(1, divisor.type)
            counted = SelectOp(self.live["kept"], divisor, one)
            assert inner.parent is not None
            inner.parent.insert_op_before(counted, inner)
            inner.operands[1] = counted.result
        for inner in list(copy.walk()):
            if isinstance(inner, tensor.ExtractOp):
                assert inner.parent is not None
                inner.result.replace_all_uses_with(self._gather(inner, {}, inner.parent))
                Rewriter.erase_op(inner)
            elif isinstance(inner, IndexOp):
                inner.result.replace_all_uses_with(self._position(inner.dimension))
                Rewriter.erase_op(inner)

    def _is_outside(self, value: SSAValue) -> bool:
        block = value.owner if isinstance(value, BlockArgument) else cast(Operation, value.owner).parent
        while block is not None and block is not self.source:
            block = block.parent_block()
        return block is None

    def _position(self, dimension: int) -> SSAValue:
        known = self.at.get(dimension)
        if known is None:
            known = self.at[dimension] = self._find_position(dimension)
        return known

    def _find_position(self, dimension: int) -> SSAValue:
        positions = self.positions
        if dimension == BATCH:
            return positions.batch
        if dimension == KV_HEAD:
            return positions.kv_head
        if dimension == QUERY:
            return self._read(positions.query, "qi")
        if dimension == KEY:
            return self._read(self.key, "ki")
        if dimension == GROUP:
            head = self._read(positions.head, "hi")
            first = self.build_.binary("muli", positions.kv_head, positions.ratio, "first_head")
            return self.build_.binary("subi", head, first, "g")
        raise LoweringError(f"the region asks for its position in dimension {dimension}, which is summed over")

    def _read(self, source: SSAValue, hint: str) -> SSAValue:
        """A row's or a column's element of a tile."""
        if source not in self.read:
            zero = self.prelude.constant(0)
            indices = [zero, self.column] if source is self.key else [self.row, zero]
            element = source.type.element_type  # pyright: ignore[reportAttributeAccessIssue]
            self.read[source] = self.build_.add(tensor.ExtractOp(source, indices, element), hint)
        return self.read[source]

    def _gather(self, op: tensor.ExtractOp, mapper: dict[SSAValue, SSAValue], block: Block) -> SSAValue:
        """The gather for an extract whose operands `mapper` translates: before `op` if it is in `block`, else at its end."""
        checked, name = op.attributes.get(CHECKED), op.attributes.get(NAME)
        live = self.live[checked.data] if isinstance(checked, StringAttr) else self.inside
        buffer, *indices = (mapper.get(operand, operand) for operand in op.operands)
        gather = tile.GatherOp(buffer, indices, live, name.data if isinstance(name, StringAttr) else None)
        gather.result.name_hint = op.result.name_hint
        if op.parent is block:
            block.insert_op_before(gather, op)
        else:
            block.add_op(gather)
        return gather.result
