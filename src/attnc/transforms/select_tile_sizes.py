"""Chooses how many query rows make a task and how many keys a block, for the target.

Before:

    %acc, %max, %sum = "iree_linalg_ext.online_attention"(…)

After:

    %acc, %max, %sum = "iree_linalg_ext.online_attention"(…) {attnc.tile = {rows = 96 : i64, keys = 256 : i64}}

Sizes follow from the target record and the head dims alone; the knobs ATTNC_TILE_ROWS and ATTNC_TILE_KEYS override them. An
operation that has sizes keeps them.
"""

from __future__ import annotations

from typing import cast

from xdsl.dialects.builtin import AnyFloat, DictionaryAttr, IntegerAttr, ModuleOp, TensorType, i64
from xdsl.ir import SSAValue

from attnc import knobs
from attnc.analysis.machine import tile_sizes
from attnc.dialects.linalg_ext import OnlineAttentionOp
from attnc.target import Target

NAME = "select-tile-sizes"
ATTRIBUTE = "attnc.tile"


def run(module: ModuleOp, target: Target) -> None:
    """Gives every online_attention of the module its tile sizes."""
    for op in module.walk():
        if isinstance(op, OnlineAttentionOp) and ATTRIBUTE not in op.attributes:
            rows, keys = tile_sizes(target, _columns(op.query), _columns(op.value), _score_bits(op))
            sizes = {"rows": knobs.tile_rows() or rows, "keys": knobs.tile_keys() or keys}
            op.attributes[ATTRIBUTE] = DictionaryAttr({name: IntegerAttr(size, i64) for name, size in sizes.items()})


def _columns(operand: SSAValue) -> int:
    """The last dimension; 64 stands in where it is dynamic."""
    size = cast(TensorType, operand.type).get_shape()[-1]
    return size if size > 0 else 64


def _score_bits(op: OnlineAttentionOp) -> int:
    return cast(AnyFloat, op.region.block.args[0].type).bitwidth
