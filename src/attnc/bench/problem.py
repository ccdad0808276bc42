"""A case as torch tensors and mods, and its reference: the dense formula in f64 on sampled query rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnc.bench.case import Case

Mod = Callable[..., Tensor]
DTYPES = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
SOFT_CAP = 20.0
REFERENCE_WORK = 2e9
"""Multiply-adds that a reference may cost: beyond it, a sample of the query rows stands for all."""


@dataclass
class Problem:
    """query [B, Hq, Sq, D], key and value [B, Hkv, Skv, D] of random numbers, and the mods, which broadcast over tensors of
    indices too. The same case gives the same numbers in every process."""

    case: Case
    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: Mod | None
    mask_mod: Mod | None


def make(case: Case) -> Problem:
    """The tensors and mods of a case."""
    generator = torch.Generator().manual_seed(1)
    dtype = DTYPES[case.dtype]

    def random(heads: int, length: int) -> Tensor:
        if case.layout == "bshd":
            return torch.randn(case.batch, length, heads, case.dim, generator=generator).to(dtype).permute(0, 2, 1, 3)
        return torch.randn(case.batch, heads, length, case.dim, generator=generator).to(dtype)

    query = random(case.heads, case.queries)
    key, value = random(case.kv_heads, case.keys), random(case.kv_heads, case.keys)
    return Problem(case, query, key, value, score_mod(case, generator), mask_mod(case, generator))


def score_mod(case: Case, generator: torch.Generator) -> Mod | None:
    if case.mod == "alibi":
        slopes = torch.exp2(-8.0 * torch.arange(1, case.heads + 1) / case.heads)
        return lambda score, b, h, q, k: score + slopes[h] * (k - q)
    if case.mod == "relative_bias":
        bias = torch.randn(case.heads, case.queries + case.keys, generator=generator)
        queries = case.queries
        return lambda score, b, h, q, k: score + bias[h, k - q + queries]
    if case.mod == "soft_cap":
        return lambda score, b, h, q, k: SOFT_CAP * torch.tanh(score / SOFT_CAP)
    return None


def mask_mod(case: Case, generator: torch.Generator) -> Mod | None:
    size = case.size
    if case.mask == "causal":
        return lambda b, h, q, k: q >= k
    if case.mask == "documents":  # of uneven lengths
        cuts = torch.randperm(case.keys - 1, generator=generator)[: size - 1].sort().values
        document = torch.bucketize(torch.arange(case.keys), cuts).to(torch.int32)
        return lambda b, h, q, k: document[q] == document[k]
    if case.mask == "window":
        return lambda b, h, q, k: (q >= k) & (q - k < size)
    if case.mask == "prefix":
        return lambda b, h, q, k: (k < size) | (q >= k)
    if case.mask == "neighbourhood":
        side = math.isqrt(case.keys)
        return lambda b, h, q, k: ((q // side - k // side).abs() <= size) & ((q % side - k % side).abs() <= size)
    return None


def positions(case: Case, rows: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """b, h, q, k as int32 tensors that broadcast to [B, H, rows, Skv]."""
    rows = torch.arange(case.queries) if rows is None else rows
    b = torch.arange(case.batch).view(-1, 1, 1, 1)
    h = torch.arange(case.heads).view(1, -1, 1, 1)
    return b.int(), h.int(), rows.view(1, 1, -1, 1).int(), torch.arange(case.keys).view(1, 1, 1, -1).int()


def dense_mask(problem: Problem, rows: Tensor | None = None) -> Tensor | None:
    """The mask as booleans [1, 1, rows, Skv]; none of the masks here depends on batch or head."""
    if problem.mask_mod is None:
        return None
    b, h, q, k = positions(problem.case, rows)
    return problem.mask_mod(b[:1], h[:, :1], q, k)


def dense_bias(problem: Problem) -> Tensor | None:
    """What the mods add to scores, as [1, H or 1, Sq, Skv] of the query's dtype; None for plain attention.

    Raises `ValueError` for a mod that is no sum.
    """
    case = problem.case
    if case.mod not in ("", "alibi", "relative_bias"):
        raise ValueError(f"{case.mod} cannot be added to scores")
    mask = dense_mask(problem)
    if problem.score_mod is None:
        return mask
    b, h, q, k = positions(case)
    bias = problem.score_mod(torch.zeros(()), b[:1], h, q, k)
    bias = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    return bias.to(problem.query.dtype)


def live_pairs(problem: Problem) -> int:
    """How many (query, key) pairs the mask keeps, for one head."""
    if problem.mask_mod is None:
        return problem.case.queries * problem.case.keys
    chunks = torch.arange(problem.case.queries).split(512)
    masks = (dense_mask(problem, rows) for rows in chunks)
    return sum(int(mask.sum()) for mask in masks if mask is not None)


@dataclass
class Reference:
    """Sampled query rows, their exact results [B, Hq, rows, D] in f64, the error that torch's eager formula makes on them in
    the case's own dtype, and the bound on errors that follows."""

    rows: Tensor
    out: Tensor
    eager_error: float
    bound: float
    live: int


def reference(problem: Problem) -> Reference:
    """The dense formula in f64, and what an honest implementation may differ from it."""
    case = problem.case
    a_row = 2 * case.batch * case.heads * case.keys * case.dim
    count = max(2, min(case.queries, int(REFERENCE_WORK / a_row)))
    if count < case.queries:
        picked = torch.randperm(case.queries, generator=torch.Generator().manual_seed(2))[:count]
        picked[0], picked[1] = 0, case.queries - 1
        rows = picked.unique()
    else:
        rows = torch.arange(case.queries)
    out = _formula(problem, rows, torch.float64)
    eager_error = float((_formula(problem, rows, problem.query.dtype).double() - out).abs().max())
    epsilon = torch.finfo(problem.query.dtype).eps
    bound = 1.5 * eager_error + 4 * epsilon * max(1.0, float(out.abs().max()))
    return Reference(rows, out, eager_error, bound, live_pairs(problem))


def _formula(problem: Problem, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """softmax(mods(QKᵀ/√D))V with all rounding to `dtype`, for the given query rows."""
    case = problem.case
    group = case.heads // case.kv_heads
    b, h, q, k = positions(case, rows)
    mask = dense_mask(problem, rows)
    out = torch.empty(case.batch, case.heads, len(rows), case.dim, dtype=dtype)
    for batch in range(case.batch):
        for kv_head in range(case.kv_heads):
            key, value = problem.key[batch, kv_head].to(dtype), problem.value[batch, kv_head].to(dtype)
            heads = slice(kv_head * group, (kv_head + 1) * group)
            scores = (problem.query[batch, heads][:, rows].to(dtype) @ key.T) / math.sqrt(case.dim)
            if problem.score_mod is not None:
                mod = functools.partial(problem.score_mod, scores[None])
                scores = mod(b[batch : batch + 1], h[:, heads], q, k)[0].to(dtype)
            if mask is not None:
                scores = scores.masked_fill(~mask[0], -torch.inf)
            out[batch, heads] = torch.softmax(scores, -1) @ value
    return out


def error_of(out: Any, expected: Reference, problem: Problem) -> float:
    """The largest difference of a result [B, Hq, Sq, D] from the reference; infinite where it is not even like it."""
    case = problem.case
    if not isinstance(out, Tensor) or out.shape != (case.batch, case.heads, case.queries, case.dim):
        return math.inf
    if not bool(torch.isfinite(out).all()):
        return math.inf
    return float((out[:, :, expected.rows].double() - expected.out).abs().max())
