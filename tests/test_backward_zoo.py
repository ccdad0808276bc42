"""The gradients of the whole zoo, by `attention_backward`, against f64 autograd of the dense formula."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from attnc.backward import attention_backward
from backward_interpreted import captured_call, forward
from backward_oracle import check_gradients, eager_gradients, oracle_gradients
from oracle import Problem
from zoo import ENTRIES, LAYOUTS, SHAPES, Sizes, problem


def gradients(p: Problem, grad_out, grad_lse=None, needs=None):
    """(gradients, captures) of a problem; all that there are, or those needed."""
    call = captured_call(p)
    out, lse = forward(call)
    captures = list(call.captures)
    wanted = [True] * (4 + len(captures)) if needs is None else needs
    found = attention_backward(
        *(call.query, call.key, call.value, out, lse, grad_out, grad_lse, captures, call.numbers, call.blocks, call.scale),
        *(call.record, call.signature, wanted),
    )
    return found, captures


def run(p: Problem, name: str, with_lse: bool) -> None:
    shape = (*p.query.shape[:3], p.value.shape[3])
    generator = torch.Generator().manual_seed(len(name))
    grad_out = torch.randn(shape, generator=generator).to(p.query.dtype)
    grad_lse = torch.randn(shape[:3], generator=generator) if with_lse else None
    found, captures = gradients(p, grad_out, grad_lse)
    check_gradients(name, found, p, captures, grad_out, grad_lse)


# Each mod in f32, every third in another dtype too, the layouts and group ratios going round.
_LAYOUTS = itertools.cycle(LAYOUTS)
_GROUPS = itertools.cycle([(2, 2), (2, 1), (3, 1)])
_OTHERS = itertools.cycle([("bf16",), (), (), ("f16",), (), (), ("f64",), (), ()])
CASES = [(name, dtype, next(_LAYOUTS), *next(_GROUPS)) for name in ENTRIES for dtype in ("f32", *next(_OTHERS))]


@pytest.mark.parametrize(("name", "dtype", "layout", "heads", "kv_heads"), CASES)
def test_mod(name, dtype, layout, heads, kv_heads):
    sizes = ENTRIES[name].sizes.but(batch=1, heads=heads, kv_heads=kv_heads, head_dim=16, value_dim=16)
    run(problem(name, sizes, layout, dtype, seed=heads), name, dtype == "f32")


_ENTRIES = itertools.cycle(["identity", "causal", "alibi_causal", "sliding_window", "soft_cap"])
SHAPE_CASES = [(next(_ENTRIES), s) for s in SHAPES if min(s.queries, s.keys) > 2 and s.queries * s.keys * s.heads <= 1 << 18]


@pytest.mark.parametrize(("name", "sizes"), SHAPE_CASES, ids=str)
def test_shape(name, sizes):
    run(problem(name, sizes, "contiguous", "f32"), name, True)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (2, 300), (300, 2), (5, 1)])
def test_few_live_keys(queries, keys):
    """Where a query has one live key, its weight is 1 whatever the score: what is left are roundings of d_out · value."""
    sizes = Sizes(batch=1, heads=2, kv_heads=2, queries=queries, keys=keys)
    p = problem("causal", sizes)
    grad_out = torch.randn(p.query.shape, generator=torch.Generator().manual_seed(queries))
    found, captures = gradients(p, grad_out)
    exact = oracle_gradients(p, captures, grad_out, None)
    unit = 1e-6 * (grad_out.norm(dim=-1).max() * p.value.norm(dim=-1).max()).item()
    for actual, wanted, size in zip(found[:3], exact.all(), (p.key, p.query, grad_out), strict=False):
        assert actual is not None and wanted is not None
        assert (actual - wanted).abs().max() <= unit * size.abs().max()


@pytest.mark.parametrize(("queries", "keys"), [(0, 16), (16, 0), (0, 0)])
def test_empty(queries, keys):
    bias = torch.randn(4)
    p = Problem(torch.randn(2, 4, queries, 8), torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 12))
    p = replace(p, score_mod=lambda score, b, h, q, k: score + bias[h])
    found, _ = gradients(p, torch.randn(2, 4, queries, 12), torch.randn(2, 4, queries))
    shapes = [tuple(tensor.shape) for tensor in (p.query, p.key, p.value, torch.zeros(()), bias)]
    assert [tuple(tensor.shape) for tensor in found if tensor is not None] == shapes
    assert all((tensor == 0).all() for tensor in found if tensor is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_sums_over_rows_are_as_precise_as_eagers(dtype):
    """Σ d_score · (k - q): what rounding (of out to a half, too) leaves of a row's Σ d_score, which is 0, must not be
    multiplied by the distance."""
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    errors = []
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        query, key, value, grad_out = (torch.randn(1, 4, 300, 64, generator=generator).to(dtype) for _ in range(4))
        p = Problem(query, key, value, lambda score, b, h, q, k: score + slopes[h] * (k - q))
        found, captures = gradients(p, grad_out, needs=[False] * 4 + [True])
        exact, plain = (of(p, captures, grad_out, None).captures[0] for of in (oracle_gradients, eager_gradients))
        computed = found[4]
        assert exact is not None and plain is not None and computed is not None
        errors.append([(of - exact).square().mean() for of in (computed, plain)])
    ours, eagers = torch.tensor(errors).mean(dim=0).sqrt()
    assert ours <= eagers


def test_one_live_key_leaves_nothing_to_the_scale():
    query, key, value, grad_out = (torch.randn(1, 2, n, 32, generator=torch.Generator().manual_seed(n)) for n in (50, 1, 1, 50))
    found, _ = gradients(Problem(query, key, value), grad_out)
    assert found[3] is not None and found[3].abs() <= 1e-9
