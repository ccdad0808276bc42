"""The part of a PARTIAL block that lives.

A classifier holds for every sub-range, so the block's ends may be asked about piece by piece, and pieces that are EMPTY left
out: on the diagonal of a causal mask a third of the block. First for all rows of the task, then more finely for each strip of
rows; a strip without a live piece keeps one. Columns are trimmed at borders fixed by the block, so that every sum keeps its
order and its bits.
"""

from __future__ import annotations

from collections.abc import Callable

from xdsl.ir import Operation, SSAValue

from attnc.codegen.llvm.text import Function
from attnc.dialects import tile

PIECE, STRIP_PIECE = 64, 32
"""Columns of a piece for a task and for a strip: whole panels at every vector width."""


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


def row_bounds(op: tile.ClassifyOp, first: SSAValue, rows: int) -> tuple[int, int, SSAValue | None] | None:
    """Which arguments of the classification are the first and the last row of a task that begins at row `first`, and what both
    are divided by (None: nothing): `first`, and the lesser of `first` + `rows` - 1 and the last row there is."""
    first_at = last_at = None
    for n, argument in enumerate(op.arguments):
        value, divisor = _operands(argument, "arith.divui") or (argument, None)
        if value is first:
            first_at = n, divisor
        elif any(_is_sum(side, first, rows - 1) for side in _operands(value, "arith.minui") or ()):
            last_at = n, divisor
    if first_at is None or last_at is None or first_at[1] is not last_at[1]:
        return None
    return first_at[0], last_at[0], first_at[1]


def _operands(value: SSAValue, name: str) -> tuple[SSAValue, ...] | None:
    """What `value` is computed from, if that is by the operation `name`."""
    op = value.owner
    return tuple(op.operands) if isinstance(op, Operation) and op.name == name else None


def trimmed(f: Function, first: str, limit: str, classify: Callable[[str, str], str], piece: int = PIECE) -> tuple[str, str]:
    """Of the columns [first, limit) of a block, those [start, end) outside of which all pieces are EMPTY, one at least.
    `classify(first, last)` asks about the columns first..last of the block."""

    def dead(first: str, last: str) -> str:
        return f.emit(f"icmp eq i32 {classify(first, last)}, {tile.EMPTY}")

    def shorter(end: str) -> tuple[str, str]:
        last = f.emit(f"and i64 {f.sub(end, 1)}, {-piece}")
        more = f.emit(f"icmp sgt i64 {last}, {first}")
        gone = f.when(more, lambda: [dead(last, f.sub(end, 1))], lambda: ["false"], ["i1"])[0]
        return gone, last

    end = f.repeat(limit, shorter, "trim.end")

    def later(start: str) -> tuple[str, str]:
        following = f.add(start, piece)
        more = f.emit(f"icmp slt i64 {following}, {end}")
        gone = f.when(more, lambda: [dead(start, f.sub(following, 1))], lambda: ["false"], ["i1"])[0]
        return gone, following

    return f.repeat(first, later, "trim.start"), end
