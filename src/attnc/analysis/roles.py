"""What each dimension of an attention's iteration domain is for, found from the indexing maps alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from xdsl.ir.affine import AffineDimExpr, AffineMap

Dims: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Roles:
    """The dimensions of each role, ascending.

    `batch` dims are shared by query or key with what they meet; `m` are the query's rows, `k1` the dims that the first product
    sums over (the head dim), `k2` the keys, `n` the columns of the value. `k1` and `k2` are the reductions.
    """

    batch: Dims
    m: Dims
    k1: Dims
    k2: Dims
    n: Dims

    @property
    def score(self) -> Dims:
        """The dims of a score, in the order of its own map."""
        return self.batch + self.m + self.k2

    @property
    def row(self) -> Dims:
        """The dims of a row's maximum and sum, in the order of their map."""
        return self.batch + self.m


def map_dims(map_: AffineMap) -> Dims:
    """The dims that a projected permutation picks, in its order.

    Raises ValueError where `map_` is anything else (a sum, a constant, a dim used twice, symbols).
    """
    dims = tuple(e.position for e in map_.results if isinstance(e, AffineDimExpr))
    if len(dims) != len(map_.results) or len(set(dims)) != len(dims) or map_.num_symbols:
        raise ValueError(f"{map_} is not a projected permutation")
    return dims


def roles_of(query: Iterable[int], key: Iterable[int], value: Iterable[int], out: Iterable[int]) -> Roles:
    """The roles, from the dims that each operand's map picks."""
    q, k, v, o = set(query), set(key), set(value), set(out)
    batch = (q & v) | (k & o)
    k1 = (q & k) - batch
    k2 = k - batch - k1
    m = q - batch - k1
    n = v - batch - k2
    return Roles(*(tuple(sorted(dims)) for dims in (batch, m, k1, k2, n)))
