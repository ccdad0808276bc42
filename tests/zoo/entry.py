"""What an entry of the zoo is, and the register of them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

Generator = torch.Generator
Prepare = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call. `kv_batch` is 1 or `batch`, `heads` a multiple of `kv_heads`.

    `wide` is the dtype of captures that a mod takes a transcendental function or a sum of: f64 beside f64 inputs, for the last
    bit of such an f32 is no two libraries' same.
    """

    batch: int = 2
    heads: int = 4
    kv_heads: int = 4
    queries: int = 129
    keys: int = 129
    head_dim: int = 32
    value_dim: int = 32
    kv_batch: int | None = None
    wide: torch.dtype = torch.float32

    def but(self, **changes: Any) -> Sizes:
        return replace(self, **changes)

    def __str__(self) -> str:
        batch = f"{self.batch}" if self.kv_batch is None else f"{self.batch}over{self.kv_batch}"
        return f"b{batch}-h{self.heads}over{self.kv_heads}-s{self.queries}x{self.keys}-d{self.head_dim}x{self.value_dim}"


@dataclass(frozen=True)
class Mods:
    """What is passed to flex_attention. `prepare` changes query, key and value where a mod needs values of a certain kind."""

    score_mod: Callable[..., Tensor] | None = None
    mask_mod: Callable[..., Tensor] | None = None
    block_mask: BlockMask | None = None
    prepare: Prepare | None = None


Build = Callable[[Sizes, Generator], Mods]


@dataclass(frozen=True)
class Entry:
    """A mod (or a pair), built for given sizes with captures drawn from a generator."""

    name: str
    build: Build
    sizes: Sizes = field(default_factory=Sizes)

    def mods(self, sizes: Sizes | None = None, seed: int = 0) -> Mods:
        return self.build(sizes or self.sizes, torch.Generator().manual_seed(seed))


def enter(register: dict[str, Entry], **sizes: Any) -> Callable[[Build], Build]:
    """A decorator that puts a builder into a register under its own name, with default sizes."""

    def decorate(build: Build) -> Build:
        name = build.__name__
        assert name not in register, name
        register[name] = Entry(name, build, Sizes(**sizes))
        return build

    return decorate


def randn(generator: Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def randint(generator: Generator, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(high, shape, generator=generator).to(dtype)
