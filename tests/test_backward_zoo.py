"""The gradients of the whole zoo, by `attention_backward`, against f64 autograd of the dense formula."""

from __future__ import annotations

import itertools

import pytest
import torch

from attnc.backward import attention_backward
from backward_interpreted import captured_call, forward
from backward_oracle import check_gradients
from oracle import Problem
from zoo import DTYPES, ENTRIES, LAYOUTS, SHAPES, problem

GENERATOR = torch.Generator().manual_seed(11)


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
    grad_out = torch.randn(shape, generator=GENERATOR).to(p.query.dtype)
    grad_lse = torch.randn(shape[:3], generator=GENERATOR) if with_lse else None
    found, captures = gradients(p, grad_out, grad_lse)
    check_gradients(name, found, p, captures, grad_out, grad_lse)


# Each mod in f32 and one other dtype, the layouts and group ratios going round.
_LAYOUTS = itertools.cycle(LAYOUTS)
_GROUPS = itertools.cycle([(2, 2), (2, 1), (3, 1)])
_OTHERS = itertools.cycle([name for name in DTYPES if name != "f32"])
CASES = [(name, dtype, next(_LAYOUTS), *next(_GROUPS)) for name in ENTRIES for dtype in ("f32", next(_OTHERS))]


@pytest.mark.parametrize(("name", "dtype", "layout", "heads", "kv_heads"), CASES)
def test_mod(name, dtype, layout, heads, kv_heads):
    sizes = ENTRIES[name].sizes.but(batch=2 if dtype == "f32" else 1, heads=heads, kv_heads=kv_heads, head_dim=16, value_dim=16)
    run(problem(name, sizes, layout, dtype, seed=heads), name, dtype == "f32")


_ENTRIES = itertools.cycle(["identity", "causal", "alibi_causal", "sliding_window", "soft_cap"])
SHAPE_CASES = [(next(_ENTRIES), sizes) for sizes in SHAPES if sizes.queries * sizes.keys * sizes.heads <= 1 << 18]


@pytest.mark.parametrize(("name", "sizes"), SHAPE_CASES, ids=str)
def test_shape(name, sizes):
    run(problem(name, sizes, "contiguous", "f32"), name, True)
