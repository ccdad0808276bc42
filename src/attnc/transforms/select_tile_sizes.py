"""Chooses how many query rows make a task and how many keys a block, for the target.

Before:

    %acc, %max, %sum = "iree_linalg_ext.online_attention"(…)

After:

    %acc, %max, %sum = "iree_linalg_ext.online_attention"(…) {attnc.tile = {rows = 96 : i64, keys = 256 : i64}}

A function with `attnc.few_queries` gets a third size, `chunk`: so many keys (a multiple of `keys`) make a task, and
split-reduction parts the loop over keys there.

Sizes follow from the target record and the head dims alone; the knobs ATTNC_TILE_ROWS, ATTNC_TILE_KEYS and
ATTNC_TILE_CHUNK override them. An operation that has sizes keeps them.
"""

from __future__ import annotations

from typing import cast

from xdsl.dialects.builtin import AnyFloat, DictionaryAttr, IntegerAttr, ModuleOp, TensorType, i64
from xdsl.ir import SSAValue

from attnc import knobs
from attnc.analysis.machine import few_query_tile_sizes, tile_sizes
from attnc.dialects.linalg_ext import OnlineAttentionOp
from attnc.target import Target

NAME = "select-tile-sizes"
ATTRIBUTE = "attnc.tile"
FEW_QUERIES = "attnc.few_queries"


def run(module: ModuleOp, target: Target) -> None:
    """Gives every online_attention of the module its tile sizes."""
    for op in module.walk():
        if isinstance(op, OnlineAttentionOp) and ATTRIBUTE not in op.attributes:
            sizes = _few_query_sizes(op, target) if _has_few_queries(op) else _sizes(op, target)
            op.attributes[ATTRIBUTE] = DictionaryAttr({name: IntegerAttr(size, i64) for name, size in sizes.items()})


def _sizes(op: OnlineAttentionOp, target: Target) -> dict[str, int]:
    rows, keys = tile_sizes(target, _columns(op.query), _columns(op.value), _score_bits(op))
    return {"rows": knobs.tile_rows() or rows, "keys": knobs.tile_keys() or keys}


def _few_query_sizes(op: OnlineAttentionOp, target: Target) -> dict[str, int]:
    rows, keys, chunk = few_query_tile_sizes(target, _columns(op.query), _columns(op.value), _score_bits(op))
    keys = knobs.tile_keys() or keys
    chunk = knobs.tile_chunk() or chunk
    return {"rows": knobs.tile_rows() or rows, "keys": keys, "chunk": -(-chunk // keys) * keys}


def _has_few_queries(op: OnlineAttentionOp) -> bool:
    function = op.parent_op()
    return function is not None and FEW_QUERIES in function.attributes


def _columns(operand: SSAValue) -> int:
    """The last dimension; 64 stands in where it is dynamic."""
    size = cast(TensorType, operand.type).get_shape()[-1]
    return size if size > 0 else 64


def _score_bits(op: OnlineAttentionOp) -> int:
    return cast(AnyFloat, op.region.block.args[0].type).bitwidth
