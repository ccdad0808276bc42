"""Attention as models write it out: one function a form, with what it is called on.

Each takes tensors as they come from projections (or already split into heads), and returns what goes into the output
projection. They are after the models they are named for, in their shapes and in the order of their operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

B, H, S, E = 2, 4, 7, 8
D = H * E


@dataclass(frozen=True)
class Form:
    """A way to write attention, and a function that makes its inputs."""

    name: str
    function: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]]
    elementwise: int = 0
    """How many elementwise operations stay outside of the attention (rotary embedding, gates, head masks …), at most."""


FORMS: list[Form] = []


def form(inputs: Callable[[], tuple[Any, ...]], elementwise: int = 0) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        FORMS.append(Form(function.__name__, function, inputs, elementwise))
        return function

    return register


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) * 7 + len(shape))).to(dtype)


def different(count: int, *shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(count + len(shape))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for _ in range(count))


def projected(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """(B, S, H·E) three times."""
    return different(3, B, S, D, dtype=dtype)


def in_heads(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """(B, H, S, E) three times."""
    return different(3, B, H, S, E, dtype=dtype)


def padding() -> Tensor:
    """1 where there is a token: the second sequence is shorter."""
    mask = torch.ones(B, S, dtype=torch.int64)
    mask[1, -3:] = 0
    return mask


def split(x: Tensor) -> Tensor:
    return x.view(x.shape[0], x.shape[1], H, E).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], D)


def lower(device_of: Tensor, n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool, device=device_of.device).tril()


@form(lambda: (*projected(), padding()))
def bert(q, k, v, mask):
    extended = (1.0 - mask[:, None, None, :].to(q.dtype)) * torch.finfo(q.dtype).min
    scores = torch.matmul(split(q), split(k).transpose(-1, -2)) / math.sqrt(E)
    probabilities = functional.softmax(scores + extended, dim=-1)
    context = torch.matmul(probabilities, split(v)).permute(0, 2, 1, 3).contiguous()
    return context.view(q.shape)


@form(lambda: (*projected(), padding(), torch.tensor([1.0, 0.0, 1.0, 1.0])), elementwise=1)
def bert_with_a_head_mask(q, k, v, mask, heads):
    extended = (1.0 - mask[:, None, None, :].to(q.dtype)) * -10000.0
    scores = torch.matmul(split(q), split(k).transpose(-1, -2)) / math.sqrt(E) + extended
    probabilities = functional.dropout(scores.softmax(-1), p=0.0) * heads[None, :, None, None]
    return merged(torch.matmul(probabilities, split(v)))


@form(lambda: (normal(B, S, 3 * D), torch.ones(S, S, dtype=torch.bool).tril().view(1, 1, S, S)))
def gpt2(packed, bias):
    q, k, v = packed.split(D, dim=2)
    weights = torch.matmul(split(q), split(k).transpose(-1, -2))
    weights = weights / torch.full([], E**0.5, dtype=weights.dtype)
    lowest = torch.full([], torch.finfo(weights.dtype).min, dtype=weights.dtype)
    weights = torch.where(bias[:, :, :S, :S], weights, lowest)
    weights = functional.softmax(weights, dim=-1).type(v.dtype)
    return merged(torch.matmul(weights, split(v)))


@form(lambda: (normal(B, S, 3 * D),))
def gpt2_by_arithmetic(packed):
    """The first GPT-2: a mask of ones and zeros, w · b - 1e4 · (1 - b)."""
    q, k, v = (split(x) for x in packed.split(D, dim=2))
    b = torch.tril(torch.ones(S, S)).view(1, 1, S, S)
    w = torch.matmul(q, k.permute(0, 1, 3, 2)) * (1.0 / math.sqrt(E))
    w = w * b - 1e4 * (1 - b)
    return merged(torch.matmul(functional.softmax(w, dim=-1), v))


@form(lambda: (*projected(), different(1, 1, H, S, S)[0]))
def t5(q, k, v, position_bias):
    """No scale; a relative bias; the softmax in f32."""
    scores = torch.matmul(split(q), split(k).transpose(3, 2))
    scores += position_bias
    weights = functional.softmax(scores.float(), dim=-1).type_as(scores)
    return torch.matmul(weights, split(v)).transpose(1, 2).contiguous().view(B, -1, D)


@form(lambda: (*projected(torch.bfloat16), normal(1, H, S, S, dtype=torch.bfloat16)))
def t5_in_bf16(q, k, v, position_bias):
    return t5(q, k, v, position_bias)


@form(lambda: (normal(B, S, 3 * D),))
def vit(packed):
    """timm: qkv in one, permuted so that a slice is each."""
    qkv = packed.reshape(B, S, 3, H, E).permute(2, 0, 3, 1, 4)
    q, k, v = qkv.unbind(0)
    weights = (q * E**-0.5) @ k.transpose(-2, -1)
    x = weights.softmax(dim=-1) @ v
    return x.transpose(1, 2).reshape(B, S, D)


@form(projected)
def clip(q, k, v):
    """Heads merged into the batch, a causal mask added at 4-D in between."""

    def shape(x):
        return x.view(B, S, H, E).transpose(1, 2).contiguous().view(B * H, -1, E)

    mask = torch.full((S, S), float("-inf")).triu(1)[None, None]
    weights = torch.bmm(shape(q * E**-0.5), shape(k).transpose(1, 2))
    weights = (weights.view(B, H, S, S) + mask).view(B * H, S, S)
    out = torch.bmm(functional.softmax(weights, dim=-1), shape(v))
    return out.view(B, H, S, E).transpose(1, 2).reshape(B, S, D)


@form(lambda: (normal(B, H, S, E), *different(2, B, 2, S, E), normal(S, E), normal(S, E)), elementwise=8)
def llama(q, k, v, cos, sin):
    """Rotary embedding, repeated heads, a causal mask of finfo.min, the softmax in f32."""

    def rotate(x):
        return torch.cat((-x[..., E // 2 :], x[..., : E // 2]), dim=-1)

    def repeat(x):
        return x[:, :, None, :, :].expand(B, 2, 2, S, E).reshape(B, H, S, E)

    q, k = q * cos + rotate(q) * sin, k * cos + rotate(k) * sin
    mask = torch.full((S, S), torch.finfo(q.dtype).min).triu(1)[None, None]
    weights = torch.matmul(q, repeat(k).transpose(2, 3)) * (E**-0.5)
    weights = functional.softmax(weights + mask, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, repeat(v)).transpose(1, 2).contiguous().reshape(B, S, -1)


@form(lambda: (normal(B, S, D), *different(2, B, 5, D)))
def sdxl_unet(q, k, v):
    """Cross-attention by baddbmm onto nothing, heads in the batch."""

    def heads(x):
        return x.reshape(B, x.shape[1], H, E).permute(0, 2, 1, 3).reshape(B * H, x.shape[1], E)

    q, k, v = heads(q), heads(k), heads(v)
    scores = torch.baddbmm(torch.zeros(B * H, S, 5), q, k.transpose(-1, -2), beta=0, alpha=E**-0.5)
    out = torch.bmm(scores.softmax(dim=-1), v)
    return out.reshape(B, H, S, E).permute(0, 2, 1, 3).reshape(B, S, D)


@form(lambda: (*projected(torch.float16), torch.tensor(0.3)))
def sdxl_with_a_scale_of_run_time(q, k, v, scale):
    q, k, v = split(q), split(k), split(v)
    weights = ((q @ k.transpose(-1, -2)).float() * scale).softmax(-1).to(q.dtype)
    return merged(weights @ v)


@form(projected)
def whisper(q, k, v):
    """The fourth root of the scale on both sides; keys are transposed when they are made."""
    scale = E**-0.25
    q = q.view(B, S, H, E).permute(0, 2, 1, 3) * scale
    k = k.view(B, S, H, E).permute(0, 2, 3, 1) * scale
    v = v.view(B, S, H, E).permute(0, 2, 1, 3)
    mask = torch.empty(S, S).fill_(-math.inf).triu_(1)
    weights = functional.softmax((q @ k + mask).float(), dim=-1).to(q.dtype)
    return (weights @ v).permute(0, 2, 1, 3).flatten(start_dim=2)


@form(lambda: (normal(B, S, H, 3, E), padding()), elementwise=5)
def bloom(fused, mask):
    """baddbmm onto alibi, packed by heads, a causal mask filled with finfo.min."""
    q, k, v = fused[..., 0, :], fused[..., 1, :], fused[..., 2, :]
    q = q.transpose(1, 2).reshape(B * H, S, E)
    k = k.permute(0, 2, 3, 1).reshape(B * H, E, S)
    v = v.transpose(1, 2).reshape(B * H, S, E)
    slopes = torch.pow(2.0, -torch.arange(1, H + 1) * 8.0 / H)
    positions = torch.arange(S)[None, None, :].expand(B, 1, S)
    alibi = (slopes[..., None] * positions).reshape(B * H, 1, S)
    scores = alibi.baddbmm(q, k, beta=1.0, alpha=1.0 / math.sqrt(E)).view(B, H, S, S)
    hidden = (~lower(q, S))[None, None] | (mask == 0)[:, None, None, :]
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype).view(B * H, S, S)
    context = torch.bmm(weights, v).view(B, H, S, E)
    return context.permute(0, 2, 1, 3).reshape(B, S, D)


@form(in_heads)
def gpt_j(q, k, v):
    """Products in f32, the scale after the mask."""
    q, k = q.to(torch.float32), k.to(torch.float32)
    weights = torch.matmul(q, k.transpose(-1, -2))
    weights = torch.where(lower(q, S), weights, torch.finfo(weights.dtype).min)
    weights = weights / torch.tensor(E**0.5)
    return torch.matmul(functional.softmax(weights, dim=-1).to(v.dtype), v).permute(0, 2, 1, 3)


@form(in_heads)
def gpt_neox(q, k, v):
    """A buffer that is scaled into by baddbmm, heads in the batch in between."""
    scores = torch.zeros(B * H, S, S, dtype=q.dtype)
    scores = torch.baddbmm(scores, q.view(B * H, S, E), k.view(B * H, S, E).transpose(1, 2), beta=1.0, alpha=E**-0.5)
    scores = scores.view(B, H, S, S)
    scores = torch.where(lower(q, S).view(1, 1, S, S), scores, torch.tensor(torch.finfo(scores.dtype).min))
    return torch.matmul(functional.softmax(scores, dim=-1), v).permute(0, 2, 1, 3).contiguous().view(B, S, D)


@form(lambda: (normal(B, S, (H + 2) * E), padding()))
def falcon(fused, mask):
    """Many queries share one head of keys and values; a boolean mask as floats."""
    q, k, v = fused.view(B, S, H + 2, E).split([H, 1, 1], dim=2)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    allowed = lower(q, S)[None, None] & (mask[:, None, None, :] != 0)
    additive = torch.zeros(B, 1, S, S).masked_fill(~allowed, -1e9)
    scores = q @ k.transpose(-1, -2) / math.sqrt(E)
    return merged(torch.softmax(scores + additive, dim=-1) @ v)


@form(lambda: (*projected(), padding()))
def opt(q, k, v, mask):
    """The scale on the projection, heads in the batch, clamped to finfo.min after the mask."""

    def shape(x):
        return x.view(B, S, H, E).transpose(1, 2).contiguous().view(B * H, -1, E)

    lowest = torch.finfo(q.dtype).min
    hidden = ~lower(q, S)[None, None] | (mask == 0)[:, None, None, :]
    additive = torch.zeros(B, 1, S, S).masked_fill(hidden, lowest)
    weights = torch.bmm(shape(q * E**-0.5), shape(k).transpose(1, 2)).view(B, H, S, S) + additive
    weights = torch.max(weights, torch.tensor(lowest)).view(B * H, S, S)
    out = torch.bmm(functional.softmax(weights, dim=-1), shape(v)).view(B, H, S, E)
    return out.transpose(1, 2).reshape(B, S, D)


@form(lambda: (*projected(), padding()))
def distilbert(q, k, v, mask):
    q = split(q) / math.sqrt(E)
    scores = torch.matmul(q, split(k).transpose(2, 3))
    hidden = (mask == 0).view(B, 1, 1, S).expand_as(scores)
    weights = scores.masked_fill(hidden, torch.tensor(torch.finfo(scores.dtype).min)).softmax(-1)
    return torch.matmul(weights, split(v)).transpose(1, 2).contiguous().view(B, -1, D)


@form(lambda: (normal(B, S, 3 * D),), elementwise=4)
def mpt(packed):
    """Keys made transposed, alibi from positions, a causal mask of the least number."""
    q, k, v = packed.chunk(3, dim=2)
    q = q.reshape(B, S, H, E).transpose(1, 2)
    k = k.reshape(B, S, H, E).permute(0, 2, 3, 1)
    v = v.reshape(B, S, H, E).transpose(1, 2)
    slopes = 1.0 / torch.pow(2, torch.arange(1, H + 1) * (8.0 / H)).view(1, H, 1, 1)
    bias = torch.arange(1 - S, 1, dtype=torch.int32).view(1, 1, 1, S) * slopes
    scores = q.matmul(k) * (1 / math.sqrt(E)) + bias
    scores = scores.masked_fill(~lower(q, S).view(1, 1, S, S), torch.finfo(q.dtype).min)
    return torch.softmax(scores, dim=-1).matmul(v).transpose(1, 2).flatten(2)


@form(lambda: (*projected(), padding()))
def bigbird_dense(q, k, v, mask):
    """An additive mask of -10000 made from the outer product of two paddings."""
    pairs = mask[:, None, :, None] * mask[:, None, None, :]
    scores = torch.matmul(split(q), split(k).transpose(-1, -2)) * (1 / math.sqrt(E))
    scores = scores + (1.0 - pairs.to(scores.dtype)) * -10000.0
    return merged(torch.matmul(torch.softmax(scores, dim=-1), split(v)))


@form(lambda: (*different(3, B, 2 * 3, D), *different(1, B * H, 6, 2), normal(B * H, 6, 3)))
def sam(q, k, v, relative_height, relative_width):
    """Keys on a grid: decomposed relative biases are added over its two dims."""

    def heads(x):
        return x.view(B, 6, H, E).permute(0, 2, 1, 3).reshape(B * H, 6, E)

    weights = (heads(q) * E**-0.5) @ heads(k).transpose(-2, -1)
    weights = weights.view(B * H, 6, 2, 3) + relative_height[:, :, :, None] + relative_width[:, :, None, :]
    weights = torch.nn.functional.softmax(weights.view(B * H, 6, 6), dtype=torch.float32, dim=-1).to(q.dtype)
    out = (weights @ heads(v)).reshape(B, H, 6, E)
    return out.permute(0, 2, 1, 3).reshape(B, 2, 3, -1)


@form(lambda: (normal(2 * B, S, 3 * D), normal(H, S, S), different(1, B, S, S)[0]))
def swin(packed, relative_bias, mask):
    """Windows in the batch; their masks repeat: the batch is split and merged around the mask."""
    q, k, v = packed.reshape(2 * B, S, 3, H, E).permute(2, 0, 3, 1, 4).unbind(0)
    weights = (q * E**-0.5) @ k.transpose(-2, -1) + relative_bias.unsqueeze(0)
    weights = weights.view(2, B, H, S, S) + mask.unsqueeze(1).unsqueeze(0)
    weights = weights.view(-1, H, S, S).softmax(-1)
    return (weights @ v).transpose(1, 2).reshape(2 * B, S, D)


@form(lambda: (*in_heads(), torch.tensor([0.1, 0.5, 1.0, 2.0]).view(H, 1, 1), normal(H, S, S)), elementwise=1)
def swin_v2(q, k, v, logit_scale, bias):
    """A scale for each head, which stays in the region."""
    weights = q @ k.transpose(-2, -1) * logit_scale + 16 * bias.unsqueeze(0).tanh()
    return (functional.softmax(weights, dim=-1) @ v).transpose(1, 2)


@form(lambda: (*projected(), padding()))
def albert(q, k, v, mask):
    q, k, v = (x.view(B, S, H, E).permute(0, 2, 1, 3) for x in (q, k, v))
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(E)
    scores = scores + (1.0 - mask[:, None, None, :].float()) * torch.finfo(torch.float32).min
    return torch.matmul(functional.softmax(scores, dim=-1), v).transpose(2, 1).flatten(2)


@form(lambda: (*projected(torch.float16), padding()))
def xlm_r_in_f16(q, k, v, mask):
    """finfo.min of f16: a score that it is added to is rounded away."""
    extended = (1.0 - mask[:, None, None, :].to(q.dtype)) * torch.finfo(q.dtype).min
    scores = torch.matmul(split(q), split(k).transpose(-1, -2)) / math.sqrt(E) + extended
    return merged(torch.matmul(functional.softmax(scores, dim=-1), split(v)))


@form(lambda: (*projected(), padding()))
def electra_relative(q, k, v, mask):
    """Keys, then a mask by where of -inf."""
    scores = torch.matmul(split(q), split(k).transpose(-1, -2)) / math.sqrt(E)
    scores = torch.where(mask[:, None, None, :] > 0, scores, float("-inf"))
    return merged(torch.matmul(functional.softmax(scores, dim=-1), split(v)))


@form(lambda: (*projected(), *different(2, B * H, S, S), padding()))
def deberta(q, k, v, c2p, p2c, mask):
    """Additive content-to-position and position-to-content scores; probabilities that are masked are set to 0 once more."""

    def heads(x):
        return x.view(B, S, H, E).permute(0, 2, 1, 3).contiguous().view(-1, S, E)

    scale = math.sqrt(E * 3)
    scores = torch.bmm(heads(q), heads(k).transpose(-1, -2) / scale)
    scores = (scores + c2p / scale + p2c / scale).view(-1, H, S, S)
    hidden = ~(mask[:, None, None, :] * mask[:, None, :, None]).bool()
    weights = torch.softmax(scores.masked_fill(hidden, torch.finfo(q.dtype).min), -1).masked_fill(hidden, 0)
    out = torch.bmm(weights.view(-1, S, S), heads(v))
    return out.view(-1, H, S, E).permute(0, 2, 1, 3).contiguous().view(B, S, D)


@form(lambda: (normal(B, H, S, E), *different(2, B, S, E)))
def palm(q, k, v):
    """Multi-query by einsum: keys and values have no heads."""
    similarity = torch.einsum("b h i d, b j d -> b h i j", q * E**-0.5, k)
    similarity = similarity.masked_fill(~lower(q, S), -torch.finfo(q.dtype).max)
    out = torch.einsum("b h i j, b j d -> b h i d", similarity.softmax(dim=-1), v)
    return merged(out)


@form(lambda: (*different(3, B, S, H, E), padding()))
def mesh_einsum(q, k, v, mask):
    """Heads third: (B, S, H, E) throughout."""
    logits = torch.einsum("bqhe,bkhe->bhqk", q, k) / math.sqrt(E)
    logits = logits + torch.where(mask[:, None, None, :].bool(), 0.0, -1e10)
    return torch.einsum("bhqk,bkhe->bqhe", torch.softmax(logits, -1), v).reshape(B, S, D)


@form(in_heads)
def softmax_by_hand(q, k, v):
    scores = q @ k.mT / math.sqrt(E)
    scores = scores - scores.amax(-1, keepdim=True)
    weights = scores.exp()
    return (weights / weights.sum(-1, keepdim=True)) @ v


@form(in_heads)
def softmax_divided_at_the_end(q, k, v):
    weights = torch.exp(q @ k.mT / math.sqrt(E))
    return (weights @ v) / weights.sum(-1, keepdim=True)


@form(in_heads)
def softmax_by_log(q, k, v):
    scores = q @ k.mT / math.sqrt(E)
    return torch.exp(functional.log_softmax(scores, dim=-1)) @ v


@form(in_heads)
def softmax_by_logsumexp(q, k, v):
    scores = q @ k.mT / math.sqrt(E)
    return torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True)) @ v


@form(in_heads)
def keys_times_queries(q, k, v):
    """K·Qᵀ, softmax over the keys, which come first, and a transposed second product."""
    scores = torch.matmul(k, q.transpose(-1, -2)) / math.sqrt(E)
    weights = torch.softmax(scores, dim=-2)
    return torch.matmul(v.transpose(-1, -2), weights).transpose(-1, -2)


@form(in_heads)
def gemma_2(q, k, v):
    """A soft cap, a sliding window and a causal mask."""
    weights = torch.matmul(q, k.transpose(2, 3)) * 0.25
    weights = torch.tanh(weights / 5.0) * 5.0
    i, j = torch.arange(S)[:, None], torch.arange(S)[None, :]
    weights = weights.masked_fill((j > i) | (i - j >= 3), float("-inf"))
    return torch.matmul(functional.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype), v).transpose(1, 2)


@form(in_heads, elementwise=3)
def log_sum_exp_beside_it(q, k, v):
    """Both the result and the log-sum-exp of its rows."""
    scores = q @ k.mT / math.sqrt(E)
    return scores.softmax(-1) @ v, torch.logsumexp(scores, -1)


@form(lambda: (normal(B, S, D), *different(2, B, S, D)))
def perceiver_3d(q, k, v):
    """One head: 3-D from end to end."""
    return torch.bmm(torch.softmax(torch.bmm(q, k.mT) / math.sqrt(D), -1), v)


@form(lambda: (normal(S, E), *different(2, 5, E)))
def matrices(q, k, v):
    """No batch at all."""
    return torch.softmax(q @ k.T * E**-0.5, dim=-1) @ v


@form(lambda: (normal(B, 1, D), *different(2, B, S, D)))
def one_query(q, k, v):
    """A step of decoding."""
    q, k, v = (x.view(B, -1, H, E).transpose(1, 2) for x in (q, k, v))
    return (torch.softmax(q @ k.mT / math.sqrt(E), -1) @ v).transpose(1, 2).reshape(B, 1, D)


@form(lambda: (*in_heads(torch.float64), torch.ones(S, S, dtype=torch.bool).tril()))
def double_precision(q, k, v, mask):
    scores = (q @ k.mT).mul(E**-0.5).masked_fill(mask.logical_not(), -torch.inf)
    return scores.softmax(-1) @ v


@form(lambda: (normal(B, S, H, E), *different(2, B, 3, 5, H, E)))
def blocks_of_keys(q, k, v):
    """Keys in blocks that are never joined: softmax over two dims at once, flattened for it."""
    scores = torch.einsum("bqhe,btkhe->bhqtk", q, k) * E**-0.5
    weights = scores.flatten(-2).softmax(-1).view(B, H, S, 3, 5)
    return torch.einsum("bhqtk,btkhe->bqhe", weights, v)


def rows() -> Tensor:
    """True where there is a query: the second sequence ends early."""
    return padding() != 0


@form(lambda: (*in_heads(), lower(torch.empty(0), S) & (torch.arange(S)[:, None] != 2)), elementwise=2)
def rows_without_keys_by_nan_to_num(q, k, v, mask):
    """A row that is masked out altogether is NaN, and then 0."""
    scores = (q @ k.mT / math.sqrt(E)).masked_fill(~mask, -torch.inf)
    return torch.nan_to_num(scores.softmax(-1)) @ v


@form(lambda: (*in_heads(torch.bfloat16), padding()), elementwise=3)
def nan_to_num_of_the_weights_in_bf16(q, k, v, mask):
    scores = (q @ k.mT * 0.3).masked_fill((mask == 0)[:, None, None, :], -torch.inf)
    return merged(scores.float().softmax(-1).to(q.dtype).nan_to_num(0.0) @ v)


@form(in_heads, elementwise=2)
def zeros_where_the_weights_are_nan(q, k, v):
    weights = (q @ k.mT).masked_fill(~lower(q, S).tril(-1), -torch.inf).softmax(-1)
    return torch.where(weights.isnan(), 0.0, weights) @ v


@form(lambda: (*projected(), rows()))
def weights_masked_by_query(q, k, v, rows):
    """Rows without a token are set to 0 after the softmax."""
    weights = (split(q) @ split(k).mT / math.sqrt(E)).softmax(-1)
    return merged(weights.masked_fill(~rows[:, None, :, None], 0) @ split(v))


@form(lambda: (*projected(), rows()), elementwise=1)
def weights_masked_by_key(q, k, v, kept):
    """Keys that the softmax counts, but the second product does not."""
    weights = (split(q) @ split(k).mT / math.sqrt(E)).softmax(-1)
    return torch.where(kept[:, None, None, :], weights, 0) @ split(v)


@form(lambda: (*in_heads(torch.float16), padding()), elementwise=2)
def weights_multiplied_by_query(q, k, v, rows):
    weights = (q @ k.mT / math.sqrt(E)).masked_fill(~lower(q, S), -torch.inf).softmax(-1)
    return (weights * rows[:, None, :, None].to(q.dtype)) @ v


@form(lambda: (normal(B, H, S, E), *different(2, B, 2, S, E), different(1, H)[0]), elementwise=4)
def gpt_oss(q, k, v, sinks):
    """A column of sinks takes part in the softmax, and is cut off again."""
    k, v = (x[:, :, None].expand(B, 2, 2, S, E).reshape(B, H, S, E) for x in (k, v))
    weights = torch.matmul(q, k.transpose(2, 3)) * E**-0.5
    weights = weights + torch.full((S, S), torch.finfo(q.dtype).min).triu(1)
    sinks = sinks.reshape(1, -1, 1, 1).expand(B, -1, S, -1)
    combined = torch.cat([weights, sinks], dim=-1)
    combined = combined - combined.max(dim=-1, keepdim=True).values
    probabilities = functional.softmax(combined, dim=-1, dtype=combined.dtype)
    return torch.matmul(probabilities[..., :-1], v).transpose(1, 2).contiguous()


@form(lambda: (*in_heads(torch.bfloat16), normal(H, dtype=torch.bfloat16)), elementwise=4)
def gpt_oss_in_bf16(q, k, v, sinks):
    weights = (q @ k.mT * E**-0.5).masked_fill(~lower(q, S) | (torch.arange(S)[:, None] == 3), -torch.inf)
    combined = torch.cat([weights, sinks.reshape(1, -1, 1, 1).expand(B, -1, S, -1)], dim=-1)
    combined = combined - combined.max(dim=-1, keepdim=True).values
    return functional.softmax(combined, dim=-1)[..., :-1].to(v.dtype) @ v


@form(lambda: (*in_heads(torch.float64), normal(H, dtype=torch.float64)), elementwise=4)
def sinks_before_the_keys(q, k, v, sinks):
    scores = q @ k.mT * E**-0.5
    top = torch.maximum(scores.amax(-1, keepdim=True), sinks[:, None, None])
    weights = torch.exp(scores - top)
    return weights / (weights.sum(-1, keepdim=True) + torch.exp(sinks[:, None, None] - top)) @ v


@form(in_heads, elementwise=4)
def softmax_plus_one(q, k, v):
    """A sink of score 0."""
    weights = torch.exp(q @ k.mT / math.sqrt(E))
    return (weights @ v) / (1 + weights.sum(-1, keepdim=True))


def clip_of_any_size(q, k, v):
    batch, length, _ = q.shape

    def shape(x):
        return x.view(batch, length, H, E).transpose(1, 2).contiguous().view(batch * H, -1, E)

    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    weights = torch.bmm(shape(q * E**-0.5), shape(k).transpose(1, 2))
    weights = (weights.view(batch, H, length, length) + mask).view(batch * H, length, length)
    out = torch.bmm(functional.softmax(weights, dim=-1), shape(v))
    return out.view(batch, H, length, E).transpose(1, 2).reshape(batch, length, D)


def llama_of_any_size(q, k, v):
    batch, _, length, _ = q.shape

    def repeat(x):
        return x[:, :, None].expand(batch, 2, 2, length, E).reshape(batch, H, length, E)

    mask = torch.full((length, length), torch.finfo(q.dtype).min).triu(1)[None, None]
    weights = torch.matmul(q, repeat(k).transpose(2, 3)) * E**-0.5 + mask
    weights = functional.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, repeat(v)).transpose(1, 2).contiguous().reshape(batch, length, -1)


def vit_of_any_size(packed):
    batch, length, _ = packed.shape
    q, k, v = packed.reshape(batch, length, 3, H, E).permute(2, 0, 3, 1, 4).unbind(0)
    weights = ((q * E**-0.5) @ k.transpose(-2, -1)).softmax(dim=-1)
    return (weights @ v).transpose(1, 2).reshape(batch, length, D)


def gpt_oss_of_any_size(q, k, v, sinks):
    batch, _, length, _ = q.shape
    weights = torch.matmul(q, k.transpose(2, 3)) * E**-0.5
    weights = weights + torch.full((length, length), float("-inf")).triu(1)
    combined = torch.cat([weights, sinks.reshape(1, -1, 1, 1).expand(batch, -1, length, -1)], dim=-1)
    combined = combined - combined.max(dim=-1, keepdim=True).values
    return torch.matmul(combined.softmax(-1)[..., :-1], v)


OPEN_FORMS = [
    next(form for form in FORMS if form.name == "bert"),
    Form("clip_of_any_size", clip_of_any_size, projected),
    Form("llama_of_any_size", llama_of_any_size, lambda: (normal(B, H, S, E), *different(2, B, 2, S, E))),
    Form("gpt_oss_of_any_size", gpt_oss_of_any_size, lambda: (*in_heads(), normal(H)), 2),
    Form("vit_of_any_size", vit_of_any_size, lambda: (normal(B, S, 3 * D),)),
]
"""Forms whose sizes may be open."""
