"""A compiled attention kernel, its arguments by role."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from attnc.errors import CompileError, ShapeError
from attnc.runtime.abi import KernelRecord
from attnc.runtime.launch import Kernel, Repeated

ORDER = ("query", "key", "value", "scale", "capture", "number", "blocks", "out", "lse", "max", "group")
"""Roles in the order in which kernels take them."""

LAST_POSITION = 2**31 - 1
"""Positions are int32 scalars in mods."""

GROUP_ROWS = 64
"""With fewer query rows than this, the query heads of one key/value head share a task's rows."""

FEW_ROWS, MANY_KEYS = 16, 32
"""At most so many query rows for one key/value head, and at least so many keys, are work for the program of few queries."""

LONE_ROWS, LONE_KEYS, LONE_HEADS = 64, 1024, 4
"""The same where there are so few key/value heads, of all batches, that tasks of rows would leave most cores idle."""


class Attention:
    """A kernel whose arguments have roles: query, key, value, scale, then captures, numbers and a BlockMask's classes, the
    results, and last the group (how many query heads of one key/value head share a task's rows)."""

    def __init__(self, record: KernelRecord, objects: Sequence[bytes]):
        """Raises `CompileError` where the record is not that of attention."""
        roles = [argument.role for argument in record.arguments]
        if [role for role in roles if role not in ORDER] or sorted(roles, key=ORDER.index) != roles:
            raise CompileError(f"kernel {record.name} has arguments of roles {roles}, which is not the order of attention")
        if any(roles.count(role) != 1 for role in ("query", "key", "value", "scale", "out")):
            raise CompileError(f"kernel {record.name} lacks one of query, key, value, scale, out: {roles}")
        self.record = record
        self.kernel = Kernel(record, objects)
        self.launch = self.kernel.launch
        self.captures = [record.arguments[i] for i in record.indices("capture")]
        self.numbers = [record.arguments[i] for i in record.indices("number")]
        self.blocks = [record.arguments[i] for i in record.indices("blocks")]
        self.has_lse = "lse" in roles
        self.has_max = "max" in roles
        self.has_group = "group" in roles
        starts = list(itertools.accumulate((argument.words for argument in record.arguments), initial=0))
        self.addresses = [starts[place] for place in record.indices("query", "key", "value", "out", "lse", "max")]
        """The places of these buffers' addresses among the words."""
        self.scale = starts[roles.index("scale")]

    def repeated(self, words: Sequence[int | float]) -> Repeated:
        """Launches on tensors of the sizes in `words`: on the addresses of query, key, value and the results, and the scale."""
        return Repeated(self.kernel, words, self.addresses, [self.scale])


def group_of(heads: int, kv_heads: int, queries: int) -> int:
    """The group argument: the whole ratio of heads where queries are few, else 1."""
    return heads // kv_heads if kv_heads and queries < GROUP_ROWS else 1


def few_queries(batch: int, heads: int, kv_heads: int, queries: int, keys: int) -> bool:
    """Whether a call is one for the program of few queries, which shares the keys of one head among tasks. That is a matter of
    sizes alone."""
    rows = queries * heads // kv_heads if kv_heads else 0
    if rows <= FEW_ROWS:
        return keys >= MANY_KEYS
    return rows <= LONE_ROWS and keys >= LONE_KEYS and batch * kv_heads <= LONE_HEADS


def output_strides(shape: Sequence[int], query_strides: Sequence[int]) -> tuple[int, ...]:
    """Strides of the output: dense, the last dim unit, its other dims in the order of query's strides (as torch does)."""
    strides = [0] * len(shape)
    last = len(shape) - 1
    strides[last] = 1
    step = max(shape[last], 1)
    # Of equal strides the inner dimension comes first.
    for dim in sorted(range(last), key=lambda dim: (abs(query_strides[dim]), -dim)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


class Layout:
    """What follows from the sizes and strides of query, key and value: made once for each combination of them.

    `query`, `key`, `value`, `out`, `lse` are the words of each buffer after its pointer: sizes, then strides. Key and value
    are broadcast to query's batch.
    """

    __slots__ = (
        "group",
        "key",
        "lse",
        "lse_shape",
        "memory",
        "out",
        "out_shape",
        "out_strides",
        "program",
        "query",
        "repeated",
        "value",
        "without_keys",
        "without_rows",
    )

    def __init__(
        self,
        query: tuple[Sequence[int], Sequence[int]],
        key: tuple[Sequence[int], Sequence[int]],
        value: tuple[Sequence[int], Sequence[int]],
        enable_gqa: bool = True,
        out_by_rows: bool = False,
    ):
        """Each of `query`, `key`, `value` is (sizes, strides); with `out_by_rows` out is [B, Sq, Hq, Ev] in memory. Raises
        `ShapeError` where they are no attention together."""
        check_shapes(query[0], key[0], value[0], enable_gqa)
        check_positions(query[0], key[0])
        batch, heads, queries, _ = query[0]
        self.out_shape = (batch, heads, queries, value[0][3])
        self.out_strides = output_strides(self.out_shape, (3, 1, 2, 0) if out_by_rows else query[1])
        self.memory: tuple[Sequence[int], Sequence[int]] = (self.out_shape, self.out_strides)
        """The sizes and strides to allocate: of out, or of [B, Sq, Hq, Ev] where that is what the caller wants."""
        if out_by_rows:
            shape = (batch, queries, heads, value[0][3])
            self.memory = (shape, output_strides(shape, (3, 2, 1, 0)))
        self.lse_shape = (batch, heads, queries)
        lse_strides = (max(heads, 1) * max(queries, 1), max(queries, 1), 1)
        self.query = (*query[0], *query[1])
        self.key = _broadcast_batch(key, batch)
        self.value = _broadcast_batch(value, batch)
        self.out = (*self.out_shape, *self.out_strides)
        self.lse = (*self.lse_shape, *lse_strides)
        self.program: tuple[Any, Any] = (None, None)  # the last trace record it was run with, and its program
        self.repeated: tuple[Any, Repeated | None] = (
            None,
            None,
        )  # the last one without captures that came twice, and its launches
        self.group = group_of(heads, key[0][1], queries)
        self.without_rows = batch * heads * queries == 0
        self.without_keys = key[0][2] == 0


def _broadcast_batch(buffer: tuple[Sequence[int], Sequence[int]], batch: int) -> tuple[int, ...]:
    sizes, strides = buffer
    if sizes[0] == batch:
        return (*sizes, *strides)
    return (batch, *sizes[1:], 0, *strides[1:])


def check_positions(query: Sequence[int], key: Sequence[int]) -> None:
    """Raise `ShapeError` unless each position fits in 32 bits, as the mods see it."""
    sizes = {"batch size B": query[0], "number of heads Hq": query[1], "length Sq": query[2], "length Skv": key[2]}
    for what, size in sizes.items():
        if size > LAST_POSITION:
            raise ShapeError(f"the {what}={size} is beyond {LAST_POSITION}, the largest position that a mod can see")


def check_shapes(query: Sequence[int], key: Sequence[int], value: Sequence[int], enable_gqa: bool = True) -> None:
    """Raise `ShapeError` unless query [B, Hq, Sq, E], key [B, Hkv, Skv, E] and value [B, Hkv, Skv, Ev] fit together.

    B of key and of value may be 1; Hkv divides Hq, and is equal to it without `enable_gqa`.
    """
    for name, shape in (("query", query), ("key", key), ("value", value)):
        if len(shape) != 4:
            raise ShapeError(f"{name} has {len(shape)} dimensions, shape {list(shape)}, instead of 4")
    if query[3] != key[3]:
        raise ShapeError(f"query and key differ in their head dim: E={query[3]} and E={key[3]}")
    if query[3] < 1 or value[3] < 1:
        raise ShapeError(f"head dims are at least 1: got E={query[3]} and Ev={value[3]}")
    if key[1] != value[1]:
        raise ShapeError(f"key and value differ in their number of heads: {key[1]} and {value[1]}")
    if key[2] != value[2]:
        raise ShapeError(f"key and value differ in length: Skv={key[2]} and {value[2]}")
    if query[1] != key[1] and not enable_gqa:
        raise ShapeError(
            f"query and key/value differ in their number of heads: Hq={query[1]} and Hkv={key[1]}",
            remedy="enable_gqa=True lets several query heads share a key/value head",
        )
    if query[1] != key[1] and (key[1] == 0 or query[1] % key[1]):
        raise ShapeError(f"the number of query heads is no multiple of that of key/value heads: Hq={query[1]}, Hkv={key[1]}")
    for name, shape in (("key", key), ("value", value)):
        if shape[0] not in (1, query[0]):
            raise ShapeError(f"query and {name} differ in batch size: {query[0]} and {shape[0]}")
