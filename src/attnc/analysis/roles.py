"""What each dimension of an attention's iteration domain is for, found from the indexing maps alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from xdsl.ir.affine import AffineConstantExpr, AffineDimExpr, AffineMap

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


def map_results(map_: AffineMap) -> tuple[int | None, ...]:
    """For each result of a projected permutation the dim it picks, or None for a constant 0 (a dimension of size 1).

    Raises ValueError where `map_` is anything else (a sum, another constant, a dim used twice, symbols).
    """
    results = tuple(e.position if isinstance(e, AffineDimExpr) else None for e in map_.results)
    dims = [dim for dim in results if dim is not None]
    zeros = all(e == AffineConstantExpr(0) for e in map_.results if not isinstance(e, AffineDimExpr))
    if not zeros or len(set(dims)) != len(dims) or map_.num_symbols:
        raise ValueError(f"{map_} is not a projected permutation")
    return results


def map_dims(map_: AffineMap) -> Dims:
    """The dims that a projected permutation picks, in its order. Raises ValueError as `map_results`."""
    return tuple(dim for dim in map_results(map_) if dim is not None)


def roles_of(query: Iterable[int], key: Iterable[int], value: Iterable[int], out: Iterable[int]) -> Roles:
    """The roles, from the dims that each operand's map picks."""
    q, k, v, o = set(query), set(key), set(value), set(out)
    batch = (q & v) | (k & o)
    k1 = (q & k) - batch
    k2 = k - batch - k1
    m = q - batch - k1
    n = v - batch - k2
    return Roles(*(tuple(sorted(dims)) for dims in (batch, m, k1, k2, n)))
