"""The part of a PARTIAL block that lives.

A classifier holds for every sub-range, so the block's ends may be asked about piece by piece, and pieces that are EMPTY left
out: on the diagonal of a causal mask a third of the block. Only columns are trimmed, at borders fixed by the block, so that
every sum keeps its order and its bits.
"""

from __future__ import annotations

from collections.abc import Callable

from xdsl.ir import Operation, SSAValue

from attnc.codegen.llvm.text import Function
from attnc.dialects import tile

PIECE = 64
"""Columns of a piece: whole panels at every vector width."""


def column_bounds(op: tile.ClassifyOp, position: SSAValue, count: int) -> tuple[int, int] | None:
    """Which arguments of the classification are the first and the last of a block of `count` positions: `position` itself, and
    that plus count - 1."""
    first_at = last_at = None
    for n, argument in enumerate(op.arguments):
        if argument is position:
            first_at = n
        elif _is_sum(argument, position, count - 1):
            last_at = n
    return None if first_at is None or last_at is None else (first_at, last_at)


def _is_sum(value: SSAValue, position: SSAValue, number: int) -> bool:
    op = value.owner
    if not isinstance(op, Operation) or op.name != "arith.addi" or position not in op.operands:
        return False
    other = op.operands[1] if op.operands[0] is position else op.operands[0]
    constant = other.owner
    if not isinstance(constant, Operation) or constant.name != "arith.constant":
        return False
    return getattr(getattr(constant.properties["value"], "value", None), "data", None) == number


def trimmed(f: Function, limit: str, classify: Callable[[str, str], str]) -> tuple[str, str]:
    """The columns [start, end) of a block of `limit` columns outside of which all pieces are EMPTY. `classify(first, last)`
    asks about the columns first..last of the block."""

    def dead(first: str, last: str) -> str:
        return f.emit(f"icmp eq i32 {classify(first, last)}, {tile.EMPTY}")

    def shorter(end: str) -> tuple[str, str]:
        piece = f.emit(f"and i64 {f.sub(end, 1)}, {-PIECE}")
        more = f.emit(f"icmp sgt i64 {piece}, 0")
        gone = f.when(more, lambda: [dead(piece, f.sub(end, 1))], lambda: ["false"], ["i1"])[0]
        return gone, piece

    end = f.repeat(limit, shorter, "trim.end")

    def later(start: str) -> tuple[str, str]:
        following = f.add(start, PIECE)
        more = f.emit(f"icmp slt i64 {following}, {end}")
        gone = f.when(more, lambda: [dead(start, f.sub(following, 1))], lambda: ["false"], ["i1"])[0]
        return gone, following

    return f.repeat("0", later, "trim.start"), end
