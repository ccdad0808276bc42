"""What of a call's query, key and value is compiled in."""

from __future__ import annotations

from dataclasses import dataclass

UNIT = "?x?x?x1"
ANY = "?x?x?x?"


@dataclass(frozen=True)
class Signature:
    """The compile-time part of a call, mods and captures aside (their record holds that). A part of every cache key.

    `dtype` is MLIR's name (`f64`, `f32`, `f16`, `bf16`), `head_dim` E and `value_dim` Ev. Of the strides only whether the last
    one is 1 is fixed (`UNIT` or `ANY`), so that other layouts compile nothing. `block_size` is (Q_BLOCK_SIZE, KV_BLOCK_SIZE)
    where a BlockMask's lists are passed, else None. `few_queries`: the program for few query rows and many keys, which shares
    the keys of one head among tasks (`attnc.runtime.attention.few_queries` says when). `wide_lse`: lse is f64 beside any
    dtype, as the backward pass wants it: what it computes is exp(score - lse).
    """

    dtype: str
    head_dim: int
    value_dim: int
    query_strides: str = UNIT
    key_strides: str = UNIT
    value_strides: str = UNIT
    return_lse: bool = False
    return_max: bool = False
    block_size: tuple[int, int] | None = None
    few_queries: bool = False
    wide_lse: bool = False
