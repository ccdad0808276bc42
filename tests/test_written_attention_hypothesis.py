"""Attention composed freely of the variations that models have: every composition ends as one operation, with right numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

import attnc
from test_written_attention import assert_accurate, assert_one_attention, in_double, raised
from torch_graphs import exported, interpreted, to_linalg
from written_attention import Form

BATCH, QUERIES, KEYS, SIZE = 2, 5, 7, 8


@dataclass(frozen=True)
class Composition:
    """One way to write attention. Its fields are the choices, in the order in which they take effect."""

    dtype: torch.dtype
    heads: int
    shared: int  # query heads for each head of keys and values
    layout: str  # of the inputs: "heads" (b, h, s, e), "packed" (b, s, h·e), "rows" (b, s, h, e)
    merged: bool  # heads in the batch for the products
    product: str
    scale_on: str
    upcast: bool
    cap: bool
    masks: tuple[str, ...]
    softmax: str
    out: str

    def inputs(self) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(len(repr(self)))
        kv_heads = self.heads // self.shared

        def make(heads: int, length: int) -> Tensor:
            shape = {
                "heads": (BATCH, heads, length, SIZE),
                "packed": (BATCH, length, heads * SIZE),
                "rows": (BATCH, length, heads, SIZE),
            }[self.layout]
            return torch.randn(shape, generator=generator).to(self.dtype)

        query, key, value = make(self.heads, QUERIES), make(kv_heads, KEYS), make(kv_heads, KEYS)
        bias = torch.randn(1, self.heads, QUERIES, KEYS, generator=generator).to(self.dtype)
        padding = torch.ones(BATCH, KEYS, dtype=torch.int64)
        padding[1, -2:] = 0
        return query, key, value, bias, padding

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, padding: Tensor) -> Tensor:
        q, k, v = (
            self.split(query, self.heads),
            self.split(key, self.heads // self.shared),
            self.split(value, self.heads // self.shared),
        )
        if self.shared > 1:
            k, v = (x.repeat_interleave(self.shared, dim=1) for x in (k, v))
        factor = 1 / math.sqrt(SIZE)
        if self.scale_on == "query":
            q = q * factor
        elif self.scale_on == "key":
            k = k / math.sqrt(SIZE)
        elif self.scale_on == "both":
            q, k = q * SIZE**-0.25, k * SIZE**-0.25
        if self.merged:
            q, k, v = (x.reshape(BATCH * self.heads, -1, SIZE) for x in (q, k, v))
        scores = self.multiplied(q, k)
        if self.merged:
            scores = scores.view(BATCH, self.heads, QUERIES, KEYS)
        if self.scale_on == "scores":
            scores = scores / math.sqrt(SIZE)
        if self.upcast:
            scores = scores.float() if scores.dtype != torch.float64 else scores
        if self.cap:
            scores = 4.0 * torch.tanh(scores / 4.0)
        for mask in self.masks:
            scores = self.masked(scores, mask, bias, padding)
        weights = self.normalised(scores)
        if self.merged:
            weights = weights.view(BATCH * self.heads, QUERIES, KEYS)
        out = self.summed(weights, v, scores)
        if self.merged:
            out = out.view(BATCH, self.heads, QUERIES, SIZE)
        if self.out == "heads":
            return out
        out = out.transpose(1, 2)
        return out if self.out == "rows" else out.reshape(BATCH, QUERIES, self.heads * SIZE)

    def split(self, x: Tensor, heads: int) -> Tensor:
        if self.layout == "packed":
            return x.view(BATCH, -1, heads, SIZE).transpose(1, 2)
        return x.permute(0, 2, 1, 3) if self.layout == "rows" else x

    def multiplied(self, q: Tensor, k: Tensor) -> Tensor:
        dims = "b" if self.merged else "bh"
        match self.product:
            case "matmul":
                return q @ k.transpose(-1, -2)
            case "einsum":
                return torch.einsum(f"{dims}qe,{dims}ke->{dims}qk", q, k)
            case "reversed":
                return (k @ q.mT).mT
            case _:
                zeros = torch.zeros(q.numel() // (q.shape[-1] * q.shape[-2]), QUERIES, KEYS, dtype=q.dtype)
                q3, k3 = q.reshape(-1, QUERIES, SIZE), k.reshape(-1, KEYS, SIZE)
                return torch.baddbmm(zeros, q3, k3.mT, beta=0).view(*q.shape[:-1], KEYS)

    def masked(self, scores: Tensor, mask: str, bias: Tensor, padding: Tensor) -> Tensor:
        least = torch.finfo(scores.dtype).min
        ends = torch.arange(QUERIES)[:, None] + KEYS - QUERIES
        later = torch.arange(KEYS)[None, :] > ends
        hidden = (padding == 0)[:, None, None, :]
        match mask:
            case "bias":
                return scores + bias
            case "causal fill":
                return scores.masked_fill(later, float("-inf"))
            case "causal where":
                return torch.where(~later, scores, least)
            case "causal add":
                return scores + torch.zeros(QUERIES, KEYS, dtype=scores.dtype).masked_fill(later, float("-inf"))
            case "causal triu":
                return scores + torch.full((QUERIES, KEYS), least, dtype=scores.dtype).triu(1 + KEYS - QUERIES)
            case "padding fill":
                return scores.masked_fill(hidden, least)
            case "padding add":
                return scores + (1.0 - padding[:, None, None, :].to(scores.dtype)) * -10000.0
            case "padding where":
                return torch.where(hidden, float("-inf"), scores)
            case _:
                return scores - 0.5 * (torch.arange(KEYS) - ends).abs()

    def normalised(self, scores: Tensor) -> Tensor:
        match self.softmax:
            case "softmax":
                return scores.softmax(-1)
            case "float":
                return functional.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
            case "by hand":
                weights = torch.exp(scores - scores.amax(-1, keepdim=True))
                return weights / weights.sum(-1, keepdim=True)
            case "logsumexp":
                return torch.exp(scores - scores.logsumexp(-1, keepdim=True))
            case _:
                return torch.exp(scores - scores.amax(-1, keepdim=True))

    def summed(self, weights: Tensor, v: Tensor, scores: Tensor) -> Tensor:
        if self.softmax == "divided after":
            total = torch.exp(scores - scores.amax(-1, keepdim=True)).sum(-1, keepdim=True)
            total = total.view(*weights.shape[:-1], 1)
            return ((weights.to(v.dtype) @ v).to(total.dtype) / total).to(v.dtype)
        return weights.to(v.dtype) @ v


MASKS = (
    *("bias", "causal fill", "causal where", "causal add", "causal triu"),
    *("padding fill", "padding add", "padding where", "distance"),
)


@st.composite
def compositions(draw: st.DrawFn) -> Composition:
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64]))
    halves = dtype in (torch.float16, torch.bfloat16)
    softmax = ["softmax", "float", "by hand", "logsumexp", "divided after"]
    upcast = draw(st.booleans())
    if halves and not upcast:
        softmax = ["softmax", "float"]  # what is divided by hand in 16 bits is no match for f32, whoever computes it
    return Composition(
        dtype=dtype,
        heads=4,
        shared=draw(st.sampled_from([1, 2, 4])),
        layout=draw(st.sampled_from(["heads", "packed", "rows"])),
        merged=draw(st.booleans()),
        product=draw(st.sampled_from(["matmul", "einsum", "reversed", "baddbmm"])),
        scale_on=draw(st.sampled_from(["query", "key", "both", "scores", "nothing"])),
        upcast=upcast,
        cap=draw(st.booleans()),
        masks=tuple(draw(st.lists(st.sampled_from(MASKS), max_size=2, unique=True))),
        softmax=draw(st.sampled_from(softmax)),
        out=draw(st.sampled_from(["heads", "rows", "packed"])),
    )


SLOW = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=[Phase.generate])


@SLOW
@given(composition=compositions())
def test_every_composition_ends_as_one_attention(composition: Composition):
    inputs = composition.inputs()
    program = exported(composition, inputs)
    module = raised(to_linalg(str(program.module)))
    assert_one_attention(module, 0)
    (found,) = interpreted(program, module, inputs)
    form = Form("composition", composition, composition.inputs)
    assert_accurate(found, composition(*inputs), in_double(form, inputs)[0])


@pytest.mark.parametrize("seed", range(3))
def test_some_natively(seed: int):
    composition = Composition(
        dtype=[torch.float32, torch.float16, torch.bfloat16][seed],
        heads=4,
        shared=[2, 1, 4][seed],
        layout=["packed", "rows", "heads"][seed],
        merged=seed == 1,
        product=["einsum", "baddbmm", "reversed"][seed],
        scale_on=["both", "query", "scores"][seed],
        upcast=seed == 2,
        cap=seed == 0,
        masks=[("bias", "causal fill"), ("padding fill", "causal triu"), ("distance", "causal add")][seed],
        softmax=["logsumexp", "float", "divided after"][seed],
        out=["packed", "rows", "heads"][seed],
    )
    inputs = composition.inputs()
    program = exported(composition, inputs)
    found = attnc.compile(str(program.module))(*program.parameters.values(), *program.flatten(*inputs))
    assert_accurate(found, composition(*inputs), in_double(Form("", composition, composition.inputs), inputs)[0])
