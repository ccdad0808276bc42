"""What one measurement computes, as plain data that travels to the processes under measurement."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

BYTES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2}
MODS = ("", "alibi", "relative_bias", "soft_cap")
MASKS = ("", "causal", "documents", "window", "prefix", "neighbourhood")


@dataclass(frozen=True)
class Case:
    """Attention of query [batch, heads, queries, dim] over key and value [batch, kv_heads, keys, dim].

    `size` is the mask's number: documents, the window's length, the prefix's length, or the neighbourhood's radius in a square
    image. `layout` "bshd" stores [batch, length, heads, dim] and permutes. `train`: forward and backward, with the gradients of
    query, key, value and what the mod captures.
    """

    batch: int
    heads: int
    queries: int
    dim: int
    dtype: str = "f32"
    keys: int = 0
    kv_heads: int = 0
    mod: str = ""
    mask: str = ""
    size: int = 0
    layout: str = "bhsd"
    train: bool = False

    def __post_init__(self) -> None:
        if self.mod not in MODS or self.mask not in MASKS or self.dtype not in BYTES or self.layout not in ("bhsd", "bshd"):
            raise ValueError(f"no such case: {self}")
        object.__setattr__(self, "keys", self.keys or self.queries)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)

    @property
    def flops(self) -> int:
        """Floating-point operations of the products over all pairs."""
        return self.pair_flops * self.batch * self.heads * self.queries * self.keys

    @property
    def pair_flops(self) -> int:
        """Those of one pair: two products forward, five backward."""
        return (14 if self.train else 4) * self.dim

    @property
    def cache_bytes(self) -> int:
        """Bytes of key and value."""
        return 2 * self.batch * self.kv_heads * self.keys * self.dim * BYTES[self.dtype]

    @property
    def score_bytes(self) -> int:
        """Bytes of all scores in f32: what a peer that stores them needs at least."""
        return 4 * self.batch * self.heads * self.queries * self.keys

    @property
    def intensity(self) -> float:
        """Floating-point operations a byte that must move: query, key, value and out, once each."""
        moved = 2 * self.batch * self.heads * self.queries * self.dim * BYTES[self.dtype] + self.cache_bytes
        return self.flops / moved

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        length = f"{self.queries}" if self.queries == self.keys else f"{self.queries}→{self.keys}"
        kind = " ".join(filter(None, (self.mod, self.mask, str(self.size or ""))))
        layout = " BSHD" if self.layout == "bshd" else " forward + backward" if self.train else ""
        return f"{self.batch}×{heads}×{length}×{self.dim} {self.dtype} {kind}".strip() + layout


def shrunk(case: Case) -> Case:
    """A case of the same kind that takes milliseconds: short lengths, few heads."""
    ratio = case.heads // case.kv_heads
    kv_heads = min(case.kv_heads, 2)
    return dataclasses.replace(
        case,
        batch=min(case.batch, 2),
        heads=kv_heads * ratio,
        kv_heads=kv_heads,
        queries=min(case.queries, 256),
        keys=min(case.keys, 256),
        size=min(case.size, 64) if case.mask in ("window", "prefix") else case.size,
    )
