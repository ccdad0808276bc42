"""Which dimension of an attention goes to which place of the canonical domain (b, hkv, g, q, k, e, n)."""

from __future__ import annotations

from dataclasses import dataclass

from attnc.analysis.roles import Dims, map_dims
from attnc.dialects.linalg_ext import AttentionLike, IndexOp


@dataclass(frozen=True)
class Places:
    """The dimensions of the domain at each place, outermost first; more than one are merged there."""

    b: Dims
    hkv: Dims
    g: Dims
    q: Dims
    k: Dims
    e: Dims
    n: Dims

    @property
    def heads(self) -> Dims:
        """Query heads: those of the keys, and within each its group."""
        return self.hkv + self.g

    @property
    def score_groups(self) -> tuple[Dims, ...]:
        """The places that a score has."""
        return (self.b, self.hkv, self.g, self.q, self.k)


def assign_places(op: AttentionLike) -> Places:
    """The places of an attention's dimensions.

    Rows that lie side by side in query and output, and whose positions nobody asks for one by one, are merged to be q. Other
    rows but the last dimension are the group g, which shares keys; where a query's head dims and group do not lie side by
    side, the group becomes batch instead, with keys and values broadcast along it, so that no copy is made.
    """
    roles = op.roles
    query, out = map_dims(op.maps[0]), map_dims(op.maps[-len(op.inits)])
    asked = {inner.dimension for inner in op.region.walk() if isinstance(inner, IndexOp)}
    batch, rows = roles.batch, _in_order(roles.m, query)
    b, hkv = batch[:-1], batch[-1:]
    if len(rows) > 1 and not asked & set(rows) and _adjacent(rows, query) and _adjacent(rows, out):
        g: Dims = ()
        q = rows
    else:
        g, q = rows[:-1], rows[-1:]
    if g and not b and hkv and not _adjacent(hkv + g, query):
        b, g = g, ()
    return Places(b, hkv, g, q, _in_order(roles.k2, map_dims(op.maps[1])), _in_order(roles.k1, query), roles.n)


def _in_order(dims: Dims, operand: Dims) -> Dims:
    """`dims` as an operand has them, one after the other."""
    return tuple(sorted(dims, key=operand.index))


def _adjacent(dims: Dims, operand: Dims) -> bool:
    """Whether `dims` follow each other, in their order, in an operand."""
    if not set(dims) <= set(operand):
        return False
    first = operand.index(dims[0])
    return operand[first : first + len(dims)] == dims
