"""From exported torch programs to linalg: values against eager, shapes static and dynamic, and the form of what comes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim

from torch_graphs import check

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=GENERATOR).to(dtype)


def dynamic(name: str) -> Any:
    return Dim(name, min=3, max=512)


LAYOUT: dict[str, tuple[Any, tuple[int, ...]]] = {
    "view": (lambda x: x.view(2, 3, 2, 4), (2, 3, 8)),
    "view with -1": (lambda x: x.view(2, -1), (2, 3, 8)),
    "view across": (lambda x: x.reshape(4, 12), (2, 3, 8)),
    "view of units": (lambda x: x.view(1, 2, 1, 24, 1), (2, 3, 8)),
    "view to a scalar": (lambda x: x.view(()), (1, 1)),
    "view from a scalar": (lambda x: x.view(1, 1, 1), ()),
    "permute": (lambda x: x.permute(2, 0, 1), (2, 3, 8)),
    "transpose": (lambda x: x.transpose(-1, -2), (2, 3, 8)),
    "t": (lambda x: x.t(), (3, 8)),
    "mT": (lambda x: x.mT, (2, 3, 8)),
    "movedim": (lambda x: x.movedim(0, 2), (2, 3, 8)),
    "unsqueeze": (lambda x: x.unsqueeze(1).unsqueeze(-1), (2, 3)),
    "squeeze": (lambda x: x.squeeze(), (1, 3, 1, 8)),
    "squeeze dim": (lambda x: x.squeeze(0).squeeze(1), (1, 3, 1, 8)),
    "squeeze dims": (lambda x: x.squeeze((0, 2)), (1, 3, 1, 8)),
    "expand": (lambda x: x.expand(4, -1, 5, 8), (3, 1, 8)),
    "expand_as": (lambda x: x[:, :1].expand_as(x), (3, 5)),
    "broadcast_to": (lambda x: x.broadcast_to(2, 3, 8), (3, 8)),
    "flatten": (lambda x: x.flatten(1), (2, 3, 8)),
    "unflatten": (lambda x: x.unflatten(-1, (2, -1)), (2, 3, 8)),
    "slice": (lambda x: x[:, 1:-1, ::2], (2, 5, 8)),
    "slice beyond": (lambda x: x[:, 3:100], (2, 5)),
    "select": (lambda x: x[:, -1] + x[:, 0], (2, 5, 8)),
    "narrow": (lambda x: x.narrow(1, 2, 3), (2, 5, 8)),
    "split": (lambda x: torch.split(x, 3, -1), (2, 8)),
    "split sizes": (lambda x: torch.split(x, [1, 2, 5], -1)[::-1], (2, 8)),
    "chunk": (lambda x: x.chunk(3, -1), (2, 8)),
    "unbind": (lambda x: x.unbind(1), (2, 3, 4)),
    "cat": (lambda x: torch.cat([x, x[:, :1] * 2, x], 1), (2, 3, 4)),
    "stack": (lambda x: torch.stack([x, x + 1], 1), (2, 3)),
    "repeat": (lambda x: x.repeat(2, 1, 3), (2, 3)),
    "repeat_interleave": (lambda x: x.repeat_interleave(3, dim=1), (2, 4, 5)),
    "roll": (lambda x: x.roll(2, 1), (2, 5)),
    "roll flat": (lambda x: x.roll(3), (2, 5)),
    "diagonal": (lambda x: (x.diagonal(), x.diagonal(-1), x.diagonal(2)), (4, 5)),
    "diagonal of planes": (lambda x: x.diagonal(1, 2, 0) * 2, (3, 2, 4)),
    "flip": (lambda x: x.flip(0, 1), (2, 5)),
    "diagonal triangle": (lambda x: x.tril() + x.triu(1) * 2, (4, 5)),
    "contiguous": (lambda x: x.transpose(0, 1).contiguous().view(-1), (2, 5)),
    "packed heads": (lambda x: x.view(2, 3, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0), (2, 3, 24)),
    "pad": (lambda x: torch.nn.functional.pad(x, (1, 2, 0, 3), value=1.5), (2, 5)),
}


@pytest.mark.parametrize("name", LAYOUT)
def test_layout(name: str):
    function, shape = LAYOUT[name]
    check(function, (normal(*shape),), tolerance=0)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


ELEMENTWISE: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "arithmetic": (lambda x, y: (x * 2 + y) / (y.abs() + 1) - 3, (normal(3, 1, 4), normal(5, 1))),
    "half": (lambda x, y: x * y + 0.1, (normal(3, 4, dtype=torch.bfloat16), normal(4, dtype=torch.bfloat16))),
    "promotion": (lambda x, y: x + y, (normal(3, 4, dtype=torch.float16), normal(4))),
    "integers": (lambda x, y: (x // 3 % 5) * y - (x << 1), (torch.arange(-6, 6), torch.arange(12, dtype=torch.int32))),
    "bytes": (lambda x: x + 250, (torch.arange(12, dtype=torch.uint8),)),
    "comparison": (lambda x, y: (x > y) & ~(x == 0) | (y <= -1), (normal(3, 4), normal(4))),
    "where": (lambda x, y: torch.where(x > 0, y, -torch.inf), (normal(3, 4), normal(4))),
    "masked_fill": (lambda x: x.masked_fill(x < 0, torch.finfo(x.dtype).min), (normal(3, 4),)),
    "masked_fill tensor": (lambda x, y: x.masked_fill(x < 0, y), (normal(3, 4), torch.tensor(2.0))),
    "functions": (lambda x: torch.exp(x).log1p() + torch.tanh(x) * torch.sigmoid(x) + x.erf(), (normal(3, 4),)),
    "gelu": (lambda x: torch.nn.functional.gelu(x) + torch.nn.functional.silu(x), (normal(3, 4),)),
    "casts": (lambda x: x.to(torch.float16).to(torch.float64) + x.int() + x.bool(), (normal(3, 4) * 3,)),
    "rotary": (rotated, (normal(2, 3, 5, 8), normal(5, 8), normal(5, 8))),
    "clamp": (lambda x: x.clamp(-0.5, 0.5) + x.clamp(min=0.1), (normal(3, 4),)),
    "pow": (lambda x: x.pow(2) + x.abs().sqrt() + x**3, (normal(3, 4),)),
    "constants": (
        lambda x: (
            x + torch.arange(4) - torch.ones(3, 1) * torch.full((4,), 2.5) + torch.zeros_like(x) + torch.tensor([1.0, 2, 3, 4])
        ),
        (normal(3, 4),),
    ),
    "causal mask": (
        lambda x: torch.full_like(x, -torch.inf).triu(1) + torch.ones(4, 4, dtype=torch.bool).tril(),
        (normal(4, 4),),
    ),
    "arange mask": (lambda x: (torch.arange(4)[:, None] >= torch.arange(5)) * x, (normal(4, 5),)),
    "dropout": (
        lambda x: torch.nn.functional.dropout(x, 0.0) + torch.nn.functional.dropout(x, 0.5, training=False),
        (normal(3),),
    ),
    "0-d": (lambda x, y: x * y + 1, (torch.tensor(2.0), torch.tensor(3))),
    "numbers": (lambda x: x * (2**0.5) // 1 + True, (normal(3),)),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name: str):
    check(*ELEMENTWISE[name])


READS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "index": (lambda x, i: x[i], (normal(5, 4), torch.tensor([[0, -1], [2, 3]]))),
    "index two": (lambda x, i, j: x[i, :, j], (normal(5, 2, 4), torch.tensor([0, -1, 3]), torch.tensor([1, 2, -4]))),
    "index middle": (lambda x, i: x[:, i], (normal(2, 5, 4), torch.tensor([4, 0, 1]))),
    "embedding": (lambda w, i: torch.nn.functional.embedding(i, w), (normal(7, 4), torch.tensor([[0, 6], [2, 3]]))),
    "gather": (lambda x, i: x.gather(1, i), (normal(3, 5), torch.tensor([[0, 4], [2, 3], [1, 1]]))),
    "index_select": (lambda x, i: x.index_select(1, i), (normal(3, 5), torch.tensor([4, 0]))),
    "relative position": (
        lambda w, x: x + w[(torch.arange(4)[:, None] - torch.arange(4)).clamp(-2, 2) + 2].permute(2, 0, 1),
        (normal(5, 3), normal(2, 3, 4, 4)),
    ),
}


@pytest.mark.parametrize("name", READS)
def test_reads_by_index(name: str):
    check(*READS[name], tolerance=1)


REDUCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "sum": (lambda x: x.sum(-1), (normal(3, 4, 5),)),
    "sum keepdim": (lambda x: x.sum((0, 2), keepdim=True) + x.sum(), (normal(3, 4, 5),)),
    "sum of bools": (lambda x: (x > 0).sum(1), (normal(3, 4),)),
    "mean": (lambda x: x.mean(-1, keepdim=True) + x.mean(), (normal(3, 4),)),
    "mean of halves": (lambda x: x.mean(-1), (normal(3, 40, dtype=torch.bfloat16),)),
    "amax": (lambda x: x.amax(1) - x.amin(1), (normal(3, 4),)),
    "max.dim": (lambda x: x.max(1).values + x.min(1, keepdim=True).values, (normal(3, 4),)),
    "max.dim indices": (lambda x: x.max(1), (normal(3, 9),)),
    "any, all": (lambda x: (x > 1).any(1) ^ (x > -1).all(), (normal(3, 4),)),
    "norms": (
        lambda x, w: torch.nn.functional.layer_norm(x, (8,)) + torch.nn.functional.rms_norm(x, (8,), w),
        (normal(2, 3, 8, dtype=torch.bfloat16), normal(8, dtype=torch.bfloat16)),
    ),
    "softmax": (lambda x: x.softmax(-1), (normal(3, 4, 5),)),
    "softmax first dim": (lambda x: torch.softmax(x, 0), (normal(3, 4),)),
    "softmax of halves": (lambda x: x.softmax(-1), (normal(3, 4, dtype=torch.float16),)),
    "softmax upcast": (lambda x: torch.softmax(x, -1, dtype=torch.float32).to(x.dtype), (normal(3, 9, dtype=torch.bfloat16),)),
    "log_softmax": (lambda x: x.log_softmax(-1), (normal(3, 4),)),
    "logsumexp": (lambda x: torch.logsumexp(torch.cat([x, torch.full((1, 4), -torch.inf)]), (1,)), (normal(3, 4),)),
    "variance": (lambda x: x.var(-1) + x.var(-1, correction=0) + x.std(0, keepdim=True, correction=0)[0, 0], (normal(5, 4),)),
    "rms norm": (lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w, (normal(2, 3, 8), normal(8))),
    "layer norm": (lambda x, w: torch.nn.functional.layer_norm(x, (8,), w, w * 2), (normal(2, 3, 8), normal(8))),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str):
    check(*REDUCTIONS[name], tolerance=8)


PRODUCTS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "mm": (torch.mm, (normal(3, 4), normal(4, 5))),
    "bmm": (torch.bmm, (normal(2, 3, 4), normal(2, 4, 5))),
    "matmul": (torch.matmul, (normal(2, 3, 4, 5), normal(2, 3, 5, 6))),
    "matmul broadcast": (torch.matmul, (normal(2, 1, 4, 5), normal(3, 5, 6))),
    "matmul vectors": (lambda x, y: torch.matmul(x, y) + torch.matmul(y, y), (normal(3, 4), normal(4))),
    "transposed": (lambda x, y: x @ y.transpose(-1, -2), (normal(2, 3, 4), normal(2, 5, 4))),
    "halves": (lambda x, y: x @ y, (normal(3, 4, dtype=torch.bfloat16), normal(4, 5, dtype=torch.bfloat16))),
    "einsum": (lambda x, y: torch.einsum("bqhd,bkhd->bhqk", x, y), (normal(2, 3, 4, 5), normal(2, 6, 4, 5))),
    "baddbmm": (lambda z, x, y: torch.baddbmm(z, x, y, beta=0.5, alpha=0.3), (normal(3, 5), normal(2, 3, 4), normal(2, 4, 5))),
    "linear": (lambda x, w, b: torch.nn.functional.linear(x, w, b), (normal(2, 3, 4), normal(5, 4), normal(5))),
    "addmm": (torch.addmm, (normal(5), normal(3, 4), normal(4, 5))),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str):
    check(*PRODUCTS[name], tolerance=8)


S, T = dynamic("s"), dynamic("t")

DYNAMIC: dict[str, tuple[Any, Any, Any]] = {
    "heads": (
        lambda x: x.view(x.shape[0], x.shape[1], 4, -1).transpose(1, 2),
        lambda s, t: (normal(s, t, 8),), ({0: S, 1: T},)),
    "heads back": (
        lambda x: x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1), lambda s, t: (normal(s, 4, t, 2),), ({0: S, 2: T},)
    ),
    "merged batch": (lambda x: x.view(-1, x.shape[2], 8) * 2, lambda s, t: (normal(s, 3, t, 8),), ({0: S, 2: T},)),
    "broadcast": (lambda x, y: x[:, None] + y, lambda s, t: (normal(s, t), normal(t)), ({0: S, 1: T}, {0: T})),
    "causal": (
        lambda x: x.masked_fill(torch.arange(x.shape[0])[:, None] < torch.arange(x.shape[1]), -torch.inf),
        lambda s, t: (normal(s, t),), ({0: S, 1: T},),
    ),
    "tril": (lambda x: torch.ones(x.shape[0], x.shape[1]).tril() * x, lambda s, t: (normal(s, t),), ({0: S, 1: T},)),
    "slices": (lambda x: (x[:, 1:], x[:, -1:], x[:-1, :2], x[:, -1]), lambda s, t: (normal(s, t),), ({0: S, 1: T},)),
    "prefix": (lambda x, y: x[: y.shape[0]] + y, lambda s, t: (normal(600, 3), normal(t, 3)), ({}, {0: T})),
    "cat": (lambda x, y: torch.cat([x, y], 1), lambda s, t: (normal(2, s, 3), normal(2, t, 3)), ({1: S}, {1: T})),
    "expand": (
        lambda x: x[:, :, None].expand(-1, -1, 3, -1, -1).reshape(x.shape[0], -1, x.shape[2], 4),
        lambda s, t: (normal(s, 2, t, 4),), ({0: S, 2: T},),
    ),
    "softmax": (lambda x: x.softmax(-1).sum(0), lambda s, t: (normal(s, t),), ({0: S, 1: T},)),
    "mean": (lambda x: x.mean(1), lambda s, t: (normal(s, t),), ({0: S, 1: T},)),
    "numbers": (lambda x: (x * x.shape[0], x.shape[0] // 2 + x.shape[1] * 3), lambda s, t: (normal(s, t),), ({0: S, 1: T},)),
    "matmul": (lambda x, y: x @ y.mT, lambda s, t: (normal(2, s, 4), normal(2, t, 4)), ({1: S}, {1: T})),
    "index": (lambda x, i: x[i], lambda s, t: (normal(s, 3), torch.arange(t) % s), ({0: S}, {0: T})),
    "double": (lambda x: x.view(-1, 2).sum(-1), lambda s, t: (normal(2 * s),), ({0: 2 * S},)),
}  # fmt: skip


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_sizes(name: str):
    function, inputs, shapes = DYNAMIC[name]
    check(function, inputs(5, 7), shapes, [inputs(3, 4), inputs(7, 2)], tolerance=8)
