"""What a machine's registers and caches say about the sizes of tiles. Pure functions of the target record and of shapes."""

from __future__ import annotations

from attnc.target import Target

MIN_KEYS, MAX_KEYS = 64, 512
TASK_ROWS = 96


def register_tile(target: Target, element_bits: int) -> tuple[int, int]:
    """(rows, vectors): how much of a product's result is kept in registers, as rows of so many vector registers.

    Two vectors a row hide the latency of a fused multiply-add; rows fill the register file, but for the right-hand side's
    vectors and one broadcast.
    """
    return (12, 2) if target.registers >= 32 else (6, 2)


def tile_sizes(target: Target, head_dim: int, value_dim: int, element_bits: int = 32) -> tuple[int, int]:
    """(rows of a task, keys of a block) of attention, for a staged element of `element_bits` bits.

    A block's keys and values take half of L2, and the scores of one strip (the rows of a register tile) half of L1. Keys are a
    power of two between 64 and 512. A task is about 96 rows: enough to use a block well, few enough to share the work evenly.
    """
    strip, _ = register_tile(target, element_bits)
    element_bytes = element_bits // 8
    fit_l2 = target.l2_bytes // 2 // (element_bytes * (head_dim + value_dim))
    fit_l1 = target.l1_bytes // 2 // (element_bytes * strip)
    keys = max(MIN_KEYS, min(MAX_KEYS, fit_l1, fit_l2))
    return strip * max(1, round(TASK_ROWS / strip)), 1 << (keys.bit_length() - 1)
