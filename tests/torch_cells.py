"""The rows of the table of torch's ways (test_torch_table.py): each a module that calls attnc, and its problem for the oracle.

`python tests/torch_cells.py DIRECTORY` loads every exported row that is saved there and runs it on the inputs beside it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

import attnc
from oracle import Problem

QUERIES, KEYS = 33, 40


class Row(nn.Module):
    """Calls attention on query [2, heads, queries, 16], key, value [2, kv_heads, keys, 16] and its own `extra` tensors."""

    heads, kv_heads = 2, 2
    fixed_lengths = False

    def inputs(self, queries: int = QUERIES, keys: int = KEYS, seed: int = 0) -> tuple[Tensor, ...]:
        """Fresh arguments of `forward`."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        query = normal(2, self.heads, queries, 16)
        key, value = (normal(2, self.kv_heads, keys, 16) for _ in range(2))
        return query, key, value, *self.extra(normal, queries, keys)

    def extra(self, normal: Any, queries: int, keys: int) -> tuple[Tensor, ...]:
        """Further arguments."""
        return ()

    def dims(self, queries: Any, keys: Any) -> tuple[dict[int, Any], ...]:
        """Which dims of the arguments are lengths, for torch.export."""
        return ({2: queries}, {2: keys}, {2: keys})

    def problem(self, query: Tensor, key: Tensor, value: Tensor, *extra: Tensor) -> Problem:
        """What the oracle is asked."""
        return Problem(query, key, value)


class Plain(Row):
    """flex_attention without mods."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attnc.flex_attention(query, key, value)


class CapturedTensor(Row):
    """A buffer and an argument are captured."""

    def __init__(self):
        super().__init__()
        self.register_buffer("slopes", torch.tensor([0.5, -0.25]))

    def extra(self, normal: Any, queries: int, keys: int) -> tuple[Tensor, ...]:
        return (normal(2, queries),)

    def dims(self, queries: Any, keys: Any) -> tuple[dict[int, Any], ...]:
        return (*super().dims(queries, keys), {1: queries})

    def score_mod(self, shift: Tensor) -> Any:
        return lambda score, b, h, q, k: score + self.slopes[h] * (k - q) + shift[b, q]  # type: ignore[index]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, shift: Tensor) -> Tensor:
        return attnc.flex_attention(query, key, value, self.score_mod(shift))

    def problem(self, query: Tensor, key: Tensor, value: Tensor, *extra: Tensor) -> Problem:
        return Problem(query, key, value, self.score_mod(*extra))


class CapturedNumber(Row):
    """An int and a float are captured."""

    def __init__(self, window: int = 7, factor: float = 0.3):
        super().__init__()
        self.window, self.factor = window, factor

    def mods(self) -> tuple[Any, Any]:
        window, factor = self.window, self.factor
        return (lambda score, b, h, q, k: score * factor, lambda b, h, q, k: (q + window // 2 - k).abs() <= window)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        score_mod, mask_mod = self.mods()
        return attnc.flex_attention(query, key, value, score_mod, mask_mod=mask_mod)

    def problem(self, query: Tensor, key: Tensor, value: Tensor, *extra: Tensor) -> Problem:
        score_mod, mask_mod = self.mods()
        return Problem(query, key, value, score_mod, mask_mod)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


class BlockMasked(Row):
    """torch's BlockMask, with lists of full blocks. It is made for fixed lengths."""

    fixed_lengths = True

    def __init__(self):
        super().__init__()
        self.block_mask = create_block_mask(causal, None, None, QUERIES, KEYS, device="cpu", BLOCK_SIZE=8)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attnc.flex_attention(query, key, value, block_mask=self.block_mask)

    def problem(self, query: Tensor, key: Tensor, value: Tensor, *extra: Tensor) -> Problem:
        return Problem(query, key, value, block_mask=self.block_mask)


class MaskMod(Row):
    """mask_mod without a BlockMask."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attnc.flex_attention(query, key, value, mask_mod=causal)

    def problem(self, query: Tensor, key: Tensor, value: Tensor, *extra: Tensor) -> Problem:
        return Problem(query, key, value, mask_mod=causal)


class GroupedHeads(Row):
    """Three query heads for each key/value head, and a mod that reads the head."""

    heads = 6

    def score_mod(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + h * 0.1 * (q - k)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attnc.flex_attention(query, key, value, self.score_mod, enable_gqa=True)

    def problem(self, query: Tensor, key: Tensor, value: Tensor, *extra: Tensor) -> Problem:
        return Problem(query, key, value, self.score_mod)


class Sdpa(Row):
    """scaled_dot_product_attention, causal with Sq != Skv."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attnc.scaled_dot_product_attention(query, key, value, is_causal=True)

    def problem(self, query: Tensor, key: Tensor, value: Tensor, *extra: Tensor) -> Problem:
        return Problem(query, key, value, mask_mod=causal)


class SdpaFloatMask(Row):
    """scaled_dot_product_attention with a float mask that broadcasts."""

    def extra(self, normal: Any, queries: int, keys: int) -> tuple[Tensor, ...]:
        mask = normal(2, 1, queries, keys)
        return (mask.masked_fill(mask > 1, -torch.inf),)

    def dims(self, queries: Any, keys: Any) -> tuple[dict[int, Any], ...]:
        return (*super().dims(queries, keys), {2: queries, 3: keys})

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return attnc.scaled_dot_product_attention(query, key, value, mask)

    def problem(self, query: Tensor, key: Tensor, value: Tensor, *extra: Tensor) -> Problem:
        (mask,) = extra
        return Problem(query, key, value, lambda score, b, h, q, k: score + mask[b, 0, q, k])


ROWS: dict[str, type[Row]] = {
    "flex plain": Plain,
    "flex captured tensor": CapturedTensor,
    "flex captured number": CapturedNumber,
    "flex BlockMask": BlockMasked,
    "mask_mod": MaskMod,
    "GQA": GroupedHeads,
    "sdpa": Sdpa,
    "sdpa float mask": SdpaFloatMask,
}


def with_dtype(problem: Problem, dtype: torch.dtype) -> Problem:
    """The problem with query, key and value cast."""
    return replace(problem, query=problem.query.to(dtype), key=problem.key.to(dtype), value=problem.value.to(dtype))


def main(directory: Path) -> None:
    for path in sorted(directory.glob("*.pt2")):
        program = torch.export.load(path)
        calls = torch.load(path.with_suffix(".inputs"))
        torch.save([program.module()(*inputs) for inputs in calls], path.with_suffix(".outputs"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
