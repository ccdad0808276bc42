"""The oracle itself: against torch's own eager flex_attention, on the whole zoo, and where torch has no say, against values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex

from oracle import Problem, check, eager, oracle
from zoo import DTYPES, ENTRIES, LAYOUTS, SHAPES, problem

# torch's eager kernel ignores the lists of a BlockMask and applies its mask_mod everywhere; ours are its compiled kernel's.
LISTS = {name for name in ENTRIES if "block_list" in name or "block_mask" in name}


def torch_result(p: Problem):
    block_mask = None
    if p.mask_mod is not None:
        # Only the mask_mod of it is looked at by the eager kernel.
        ones = torch.ones(1, 1, 1, dtype=torch.int32)
        lengths = (p.query.shape[2], p.key.shape[2])
        block_mask = torch_flex.BlockMask.from_kv_blocks(
            ones, ones[..., None] * 0, BLOCK_SIZE=max(*lengths, 1), mask_mod=p.mask_mod, seq_lengths=lengths
        )
    out, aux = torch_flex.flex_attention(
        p.query,
        p.key,
        p.value,
        score_mod=p.score_mod,
        block_mask=block_mask,
        scale=p.scale,
        enable_gqa=p.query.shape[1] != p.key.shape[1],
        return_aux=torch_flex.AuxRequest(lse=True),  # no max_scores on the CPU,
    )
    assert aux.lse is not None
    return out, aux.lse


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.parametrize("name", sorted(set(ENTRIES) - LISTS))
def test_zoo_against_torch(name):
    p = problem(name)
    exact, plain = oracle(p), eager(p)
    out, lse = torch_result(p)
    check(p, plain.out, plain.lse, plain.max_scores)
    torch.testing.assert_close(out.double(), exact.out, atol=2e-5, rtol=2e-5)
    live = exact.lse != -torch.inf
    torch.testing.assert_close(lse.double()[live], exact.lse[live], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", sorted(LISTS))
def test_block_lists(name):
    """The same as a mask_mod that looks the lists up, pair by pair."""
    p = problem(name)
    mask = p.block_mask
    size_q, size_k = mask.BLOCK_SIZE
    scores = torch.zeros(p.query.shape[0], p.query.shape[1], p.query.shape[2], p.key.shape[2], dtype=torch.bool)
    pairs = [(mask.kv_num_blocks, mask.kv_indices, mask.mask_mod), (mask.full_kv_num_blocks, mask.full_kv_indices, None)]
    for b, h in torch.cartesian_prod(*map(torch.arange, scores.shape[:2])):
        for numbers, indices, mod in pairs:
            if numbers is None:
                continue
            numbers, indices = (t.expand(*scores.shape[:2], *t.shape[2:])[b, h] for t in (numbers, indices))
            for row, number in enumerate(numbers):
                for column in indices[row, :number]:
                    q = torch.arange(row * size_q, min((row + 1) * size_q, scores.shape[2]))
                    k = torch.arange(int(column) * size_k, min((int(column) + 1) * size_k, scores.shape[3]))
                    live = True if mod is None else mod(b, h, q[:, None], k[None, :])
                    scores[b, h, q[:, None], k[None, :]] = live
    plain = replace(p, block_mask=None, mask_mod=lambda b, h, q, k: scores[b, h, q, k])
    torch.testing.assert_close(oracle(p).out, oracle(plain).out, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_dtypes(layout, dtype):
    p = problem("alibi_causal", ENTRIES["alibi_causal"].sizes.but(queries=70, keys=90), layout, dtype)
    plain = eager(p)
    check(p, plain.out, plain.lse, plain.max_scores)


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_shapes_against_torch(sizes):
    p = problem("alibi_causal", sizes)
    exact = oracle(p)
    assert exact.out.shape == (*p.query.shape[:3], p.value.shape[-1])
    if 0 not in exact.out.shape and p.key.shape[2]:
        kv = [t.expand(sizes.batch, -1, -1, -1) for t in (p.key, p.value)]
        out, lse = torch_result(replace(p, key=kv[0], value=kv[1]))
        torch.testing.assert_close(out.double(), exact.out, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(lse.double(), exact.lse, atol=2e-5, rtol=2e-5)


def test_extended_precision_sees_f64_rounding():
    p = problem("identity", dtype="f64")
    error = (eager(p).out - oracle(p).out).abs().max().item()
    assert 0 < error < 1e-13


def test_dead_keys_have_no_influence():
    p = problem("causal")
    clean = oracle(p)
    p.key[:, :, 100:], p.value[:, :, 100:] = torch.nan, torch.inf
    dirty = oracle(p)
    torch.testing.assert_close(dirty.out[:, :, :100], clean.out[:, :, :100], atol=0, rtol=0)
    assert dirty.out[:, :, 100:].isnan().all()


def test_infinite_values():
    """Weights 1/2, 1/2, 0 (dead) over +inf, 1 and NaN give +inf."""
    query, key = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 3, 2)
    value = torch.tensor([torch.inf, 1.0, torch.nan]).view(1, 1, 3, 1)
    p = Problem(query, key, value, mask_mod=lambda b, h, q, k: k < 2)
    assert oracle(p).out.item() == torch.inf
    with pytest.raises(AssertionError, match="not as in the oracle"):
        check(p, torch.full((1, 1, 1, 1), torch.nan))


def test_known_values():
    """The values that IREE's end-to-end files hold."""
    x = torch.arange(1, 13).view(1, 1, 3, 4) / 10
    plain = oracle(Problem(x, x, x, scale=0.5))
    torch.testing.assert_close(plain.out[0, 0, :, 0], torch.tensor([0.5530, 0.6328, 0.7011]).double(), atol=1e-4, rtol=0)
    causal = oracle(Problem(x, x, x, scale=0.5, mask_mod=lambda b, h, q, k: q >= k))
    torch.testing.assert_close(causal.out[0, 0, :, 0], torch.tensor([0.1, 0.3509, 0.7011]).double(), atol=1e-4, rtol=0)


def test_check_refuses_what_is_wrong():
    p = problem("alibi")
    good = eager(p).out
    check(p, good)
    with pytest.raises(AssertionError, match="error"):
        check(p, good + 1e-4)
