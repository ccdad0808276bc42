"""What a machine's registers and caches say about the sizes of tiles. Pure functions of the target record and of shapes."""

from __future__ import annotations

from attnc.runtime.tuning_file import TunedTile
from attnc.target import Target

MIN_KEYS, MAX_KEYS = 64, 512
TASK_ROWS = 96
FEW_ROWS = 16
"""What counts as few query rows; a task then has them all."""
BLOCKS_IN_CHUNK, CHUNK_KEYS = 8, 1024


def register_tile(target: Target, element_bits: int) -> tuple[int, int]:
    """(rows, vectors): how much of a product's result is kept in registers, as rows of so many vector registers.

    Two vectors a row hide the latency of a fused multiply-add; rows fill the register file, but for the right-hand side's
    vectors and one broadcast.
    """
    return (12, 2) if target.registers >= 32 else (6, 2)


def has_bf16_dot(target: Target) -> bool:
    """Whether the machine multiplies pairs of bf16 and sums them in f32 in one instruction, at the rate of its f32 ones: x86
    with AVX-512, or an Arm CPU whose `bfdot` does."""
    if target.triple.startswith(("aarch64", "arm64")):
        return "+bf16" in target.features.split(",") and target.vector_bits == 128
    return "+avx512bf16" in target.features.split(",") and target.vector_bits == 512


def has_amx(target: Target) -> bool:
    """Whether bf16 is multiplied in AMX tiles. `Target.host` says so only where that is wanted and permitted."""
    return has_bf16_dot(target) and {"+amx-tile", "+amx-bf16"} <= set(target.features.split(","))


def stored_tile(
    target: Target, head_dim: int, value_dim: int, element_bits: int, few_queries: bool = False
) -> TunedTile | None:
    """What `attnc bench --tune` stored for these sizes on this machine; None where the model below decides."""
    shape = (head_dim, value_dim, element_bits, few_queries)
    return next((tile for tile in target.tuned if tile.shape == shape), None)


def tile_sizes(target: Target, head_dim: int, value_dim: int, element_bits: int = 32) -> tuple[int, int]:
    """(rows of a task, keys of a block) of attention, for a staged element of `element_bits` bits.

    A block's keys and values take half of L2, and the scores of one strip (the rows of a register tile) half of L1. Keys are a
    power of two between 64 and 512. A task is about 96 rows: enough to use a block well, few enough to share the work evenly.
    """
    tuned = stored_tile(target, head_dim, value_dim, element_bits)
    if tuned is not None:
        return tuned.rows, tuned.keys
    strip, _ = register_tile(target, element_bits)
    element_bytes = element_bits // 8
    fit_l2 = target.l2_bytes // 2 // (element_bytes * (head_dim + value_dim))
    fit_l1 = target.l1_bytes // 2 // (element_bytes * strip)
    keys = max(MIN_KEYS, min(MAX_KEYS, fit_l1, fit_l2))
    return strip * max(1, round(TASK_ROWS / strip)), 1 << (keys.bit_length() - 1)


def few_query_tile_sizes(target: Target, head_dim: int, value_dim: int, element_bits: int = 32) -> tuple[int, int, int]:
    """(rows of a task, keys of a block, keys of a chunk) of attention with few queries, whose keys are shared among tasks.

    A task is one chunk of the keys for all rows. A block's keys and values are used once, so they need only stay in L2 for as
    long as they take to read: a quarter of it. A chunk is some blocks, so that its partial results cost little beside it, but
    no more than lets caches of some thousand keys occupy all cores.
    """
    tuned = stored_tile(target, head_dim, value_dim, element_bits, few_queries=True)
    if tuned is not None:
        return tuned.rows, tuned.keys, tuned.chunk or tuned.keys * BLOCKS_IN_CHUNK
    strip, _ = register_tile(target, element_bits)
    keys = max(MIN_KEYS, min(MAX_KEYS, target.l2_bytes // 4 // (element_bits // 8 * (head_dim + value_dim))))
    keys = 1 << (keys.bit_length() - 1)
    return strip * -(-FEW_ROWS // strip), keys, min(CHUNK_KEYS, keys * BLOCKS_IN_CHUNK)
