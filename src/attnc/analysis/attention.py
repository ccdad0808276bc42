"""The form of attention that kernels are made for: what its operands, dimensions and its region's last step are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from xdsl.dialects import tensor
from xdsl.dialects.arith import (
    AddiOp,
    CmpiOp,
    ConstantOp,
    DivSIOp,
    DivUIOp,
    FloorDivSIOp,
    MuliOp,
    RemSIOp,
    RemUIOp,
    SelectOp,
)
from xdsl.dialects.builtin import ArrayAttr, FloatAttr, IntegerAttr, StringAttr
from xdsl.dialects.func import FuncOp
from xdsl.ir import Block, BlockArgument, Operation, SSAValue

from attnc.analysis.roles import map_dims
from attnc.dialects.attention_backward import AttentionBackwardOp
from attnc.dialects.linalg_ext import IndexOp, OnlineAttentionOp, YieldOp
from attnc.errors import LoweringError

BATCH, KV_HEAD, GROUP, QUERY, KEY, HEAD_DIM, VALUE_DIM = range(7)
CHECKED, NAME = "attnc.checked", "attnc.name"


@dataclass(frozen=True)
class Attention:
    """An `online_attention`, or the derivative of one, over (b, hkv, g, q, k, e, n) of a function's own arguments.

    `group` is the number of query heads that share a key/value head, as the query's expand_shape has it.
    """

    function: FuncOp
    op: OnlineAttentionOp | AttentionBackwardOp
    query: BlockArgument
    key: BlockArgument
    value: BlockArgument
    group: SSAValue | int

    def argument_with_role(self, role: str) -> BlockArgument | None:
        """The first argument of the function that `attnc.roles` gives that role."""
        roles = self.function.attributes.get("attnc.roles")
        if isinstance(roles, ArrayAttr):
            for argument, name in zip(self.function.body.block.args, roles, strict=True):
                if isinstance(name, StringAttr) and name.data == role:
                    return argument
        return None

    def is_head(self, op: Operation) -> bool:
        """Whether `op` computes the query head, `hkv * group + g`."""
        return isinstance(op, AddiOp) and (self._is_head_sum(op.lhs, op.rhs) or self._is_head_sum(op.rhs, op.lhs))

    def _is_head_sum(self, product: SSAValue, g: SSAValue) -> bool:
        if not isinstance(product.owner, MuliOp) or not _is_index(g, GROUP):
            return False
        lhs, rhs = product.owner.lhs, product.owner.rhs
        return (_is_index(lhs, KV_HEAD) and self._is_group(rhs)) or (_is_index(rhs, KV_HEAD) and self._is_group(lhs))

    def _is_group(self, value: SSAValue) -> bool:
        return value is self.group or (isinstance(self.group, int) and constant_of(value) == self.group)


def _is_index(value: SSAValue, dim: int) -> bool:
    return isinstance(value.owner, IndexOp) and value.owner.dimension == dim


def constant_of(value: SSAValue) -> int | float | None:
    """The number that an `arith.constant` holds, or None."""
    if isinstance(value.owner, ConstantOp) and isinstance(value.owner.value, IntegerAttr | FloatAttr):
        return value.owner.value.value.data
    return None


def match_attention(function: FuncOp, op: OnlineAttentionOp | AttentionBackwardOp) -> Attention:
    """`op` as an Attention.

    Raises:
        LoweringError: it is over other dimensions, or not over the function's arguments.
    """
    remedy = "kernels are made for query (b, hkv, g, q, e), key (b, hkv, k, e), value (b, hkv, k, n) so far"
    row = (BATCH, KV_HEAD, GROUP, QUERY)
    out = (*row, VALUE_DIM)
    expected = [(*row, HEAD_DIM), (BATCH, KV_HEAD, KEY, HEAD_DIM), (BATCH, KV_HEAD, KEY, VALUE_DIM), (), out, row]
    expected += [row] if isinstance(op, OnlineAttentionOp) else [out, row]
    if [map_dims(map_) for map_ in op.maps][: len(expected)] != expected:
        raise LoweringError(f"{op.name}: no kernel for this iteration domain: {op.indexing_maps}", remedy=remedy)
    expand = op.query.owner
    if not isinstance(expand, tensor.ExpandShapeOp) or not isinstance(expand.src, BlockArgument):
        raise LoweringError(f"{op.name}: the query must be an argument with its heads expanded to (hkv, g)", remedy=remedy)
    if not isinstance(op.key, BlockArgument) or not isinstance(op.value, BlockArgument):
        raise LoweringError(f"{op.name}: key and value must be arguments of the function", remedy=remedy)
    static = list(expand.static_output_shape.get_values())
    group: SSAValue | int = static[GROUP]
    if static[GROUP] < 0:
        group = expand.dynamic_output_shape[sum(size < 0 for size in static[:GROUP])]
    return Attention(function, op, expand.src, op.key, op.value, group)


def final_select(block: Block) -> SelectOp | None:
    """The `select(mask, score, -inf)` that an attention's region ends with, if it does."""
    last = block.last_op
    assert isinstance(last, YieldOp)
    select = last.value.owner
    if isinstance(select, SelectOp) and select.parent is block and constant_of(select.rhs) == -inf:
        return select
    return None


def is_unmasked(op: OnlineAttentionOp | AttentionBackwardOp) -> bool:
    """Whether the region neither masks at its end nor reads anything by an index that must be checked."""
    if final_select(op.region.block) is not None:
        return False
    return not any(CHECKED in inner.attributes for inner in op.region.walk())


def block_class(attention: Attention) -> SSAValue | None:
    """Where the region reads its pair's class from the lists of a BlockMask: 0 not listed, 1 partial, 2 full."""
    blocks = attention.argument_with_role("blocks")
    if blocks is not None:
        for use in blocks.uses:
            if isinstance(use.operation, tensor.ExtractOp):
                return use.operation.result
    return None


def compared_with_one(value: SSAValue) -> CmpiOp | None:
    """The use of `value` as `value == 1`."""
    for use in value.uses:
        op = use.operation
        if isinstance(op, CmpiOp) and op.predicate.value.data == 0 and 1 in (constant_of(op.lhs), constant_of(op.rhs)):
            return op
    return None


_DIVISIONS = (FloorDivSIOp, DivSIOp, RemSIOp, DivUIOp, RemUIOp)


def is_division(op: Operation) -> bool:
    """Whether it divides integers by what may be zero. Such divisions are checked as gathers are: those of the mask on all
    pairs, others on the pairs that the mask keeps, and on all if the divisor is that of a whole row."""
    return isinstance(op, _DIVISIONS) and not isinstance(op.rhs.owner, ConstantOp)


def divides_by_key(op: Operation, block: Block) -> bool:
    """Whether the divisor of a division in the region `block` is another from key to key."""
    return any(
        isinstance(inner, IndexOp) and inner.dimension == KEY
        for owner in slice_of([op.operands[1]], block)
        for inner in owner.walk()
    )


def slice_of(roots: Iterable[SSAValue], block: Block) -> set[Operation]:
    """The operations of `block` that `roots` are computed from; operations with regions stand for all in them."""
    found: set[Operation] = set()
    waiting = list(roots)
    while waiting:
        owner = waiting.pop().owner
        while isinstance(owner, Operation) and owner.parent is not block:
            owner = owner.parent_op()
        if isinstance(owner, Operation) and owner not in found:
            found.add(owner)
            for inner in owner.walk():
                waiting.extend(inner.operands)
    return found
