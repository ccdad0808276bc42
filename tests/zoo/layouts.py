"""Query, key and value in every memory layout that torch makes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zoo.entry import Sizes

Inputs = tuple[Tensor, Tensor, Tensor]
Layout = Callable[[Sizes, torch.Generator, torch.dtype], Inputs]


def _shapes(s: Sizes) -> list[tuple[int, int, int, int]]:
    kv_batch = s.batch if s.kv_batch is None else s.kv_batch
    return [
        (s.batch, s.heads, s.queries, s.head_dim),
        (kv_batch, s.kv_heads, s.keys, s.head_dim),
        (kv_batch, s.kv_heads, s.keys, s.value_dim),
    ]


def _each(s: Sizes, make: Callable[[tuple[int, int, int, int]], Tensor]) -> Inputs:
    query, key, value = (make(shape) for shape in _shapes(s))
    return query, key, value


def contiguous(s: Sizes, g: torch.Generator, dtype: torch.dtype) -> Inputs:
    return _each(s, lambda shape: torch.randn(shape, generator=g).to(dtype))


def bshd(s: Sizes, g: torch.Generator, dtype: torch.dtype) -> Inputs:
    """Permuted from [B, S, H, D]."""
    return _each(s, lambda n: torch.randn(n[0], n[2], n[1], n[3], generator=g).to(dtype).transpose(1, 2))


def bhds(s: Sizes, g: torch.Generator, dtype: torch.dtype) -> Inputs:
    """Permuted from [B, H, D, S]: the last dim is far apart."""
    return _each(s, lambda n: torch.randn(n[0], n[1], n[3], n[2], generator=g).to(dtype).transpose(2, 3))


def packed_qkv(s: Sizes, g: torch.Generator, dtype: torch.dtype) -> Inputs:
    """Slices of one projection [B, S, (Hq + 2 Hkv) * D]; of one with both lengths in it where they differ."""
    dim, heads = max(s.head_dim, s.value_dim), s.heads + 2 * s.kv_heads
    whole = torch.randn(s.batch, max(s.queries, s.keys), heads * dim, generator=g).to(dtype)
    parts = whole.unflatten(-1, (heads, dim)).split([s.heads, s.kv_heads, s.kv_heads], dim=2)
    query, key, value = (part.transpose(1, 2) for part in parts)
    kv_batch = s.batch if s.kv_batch is None else s.kv_batch
    return (
        query[:, :, : s.queries, : s.head_dim],
        key[:kv_batch, :, : s.keys, : s.head_dim],
        value[:kv_batch, :, : s.keys, : s.value_dim],
    )


def expanded_heads(s: Sizes, g: torch.Generator, dtype: torch.dtype) -> Inputs:
    """One head of keys and values, expanded with stride 0."""
    query, key, value = contiguous(s.but(kv_heads=1), g, dtype)
    return query, key.expand(-1, s.kv_heads, -1, -1), value.expand(-1, s.kv_heads, -1, -1)


def last_dim_stride_2(s: Sizes, g: torch.Generator, dtype: torch.dtype) -> Inputs:
    return _each(s, lambda n: torch.randn(*n[:3], 2 * n[3], generator=g).to(dtype)[..., ::2])


def storage_offset(s: Sizes, g: torch.Generator, dtype: torch.dtype) -> Inputs:
    """Starts one element, two rows and three heads into a larger tensor: nothing is aligned."""
    return _each(s, lambda n: torch.randn(n[0], n[1] + 3, n[2] + 2, n[3] + 1, generator=g).to(dtype)[:, 3:, 2:, 1:])


LAYOUTS: dict[str, Layout] = {
    f.__name__: f for f in (contiguous, bshd, bhds, packed_qkv, expanded_heads, last_dim_stride_2, storage_offset)
}
