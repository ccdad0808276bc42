"""Chooses how many keys make a task of the backward pass and how many query rows a block, for the target.

Before:

    %d_query, %d_key, … = "attnc.attention_backward"(…)

After:

    %d_query, %d_key, … = "attnc.attention_backward"(…) {attnc.tile = {rows = 48 : i64, keys = 64 : i64}}

Sizes follow from the target record, the head dims and whether the region makes any pair dead; the knobs
ATTNC_TILE_ROWS and ATTNC_TILE_KEYS override them. An operation that has sizes keeps them.
"""

from __future__ import annotations

import math
from typing import cast

from xdsl.dialects.arith import ConstantOp
from xdsl.dialects.builtin import AnyFloat, DictionaryAttr, FloatAttr, IntegerAttr, ModuleOp, TensorType, i64
from xdsl.ir import SSAValue

from attnc import knobs
from attnc.analysis.machine import register_tile
from attnc.dialects.attention_backward import AttentionBackwardOp
from attnc.target import Target
from attnc.transforms.select_tile_sizes import ATTRIBUTE

NAME = "select-backward-tile-sizes"

ROWS, MASKED_ROWS = 96, 48
"""About so many query rows in a block, without and with a mask. The gradients of key and value are rounded once a block, which
is all that tells the sizes apart where every block is full; at the edge of a mask more rows are more dead pairs."""
KEYS = (256, 192, 128, 96, 64, 48, 32)
"""What a task may have of keys: whole panels of every machine, and whole register tiles."""


def run(module: ModuleOp, target: Target) -> None:
    """Gives every attention_backward of the module its tile sizes."""
    for op in module.walk():
        if isinstance(op, AttentionBackwardOp) and ATTRIBUTE not in op.attributes:
            bits = cast(AnyFloat, op.region.block.args[0].type).bitwidth
            about = MASKED_ROWS if _masks(op) else ROWS
            rows, keys = backward_tile_sizes(target, _columns(op.query), _columns(op.value), bits, about)
            sizes = {"rows": knobs.tile_rows() or rows, "keys": knobs.tile_keys() or keys}
            op.attributes[ATTRIBUTE] = DictionaryAttr({name: IntegerAttr(size, i64) for name, size in sizes.items()})


def backward_tile_sizes(target: Target, head_dim: int, value_dim: int, element_bits: int, about: int) -> tuple[int, int]:
    """(rows of a block, of which there may be `about` so many, keys of a task).

    A task's keys and values, packed, the keys once more as they are, and both gradients take six tenths of L2. More keys mean
    fewer times that the rows of the queries are read, and that their gradient is.
    """
    strip, _ = register_tile(target, element_bits)
    fit = target.l2_bytes * 6 // 10 * 2 // (element_bits // 8 * 5 * (head_dim + value_dim))
    return strip * max(1, round(about / strip)), next((keys for keys in KEYS if keys <= fit), KEYS[-1])


def _masks(op: AttentionBackwardOp) -> bool:
    """Whether the mods name -inf."""
    read = (operand.owner for inner in op.region.walk() for operand in inner.operands)
    constants = (owner.value for owner in read if isinstance(owner, ConstantOp))
    return any(isinstance(value, FloatAttr) and value.value.data == -math.inf for value in constants)


def _columns(operand: SSAValue) -> int:
    """The last dimension; 64 stands in where it is dynamic."""
    size = cast(TensorType, operand.type).get_shape()[-1]
    return size if size > 0 else 64
