"""`attention_backward`: only what is asked for, any strides, dead rows and NaN, BlockMasks, the same bits on any threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import attnc
from attnc import errors, pipeline, programs
from attnc.backward import attention_backward
from backward_interpreted import captured_call, forward, interpreted_gradients
from backward_oracle import check_gradients, oracle_gradients
from oracle import Problem
from test_backward_zoo import gradients

GENERATOR = torch.Generator().manual_seed(3)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR)


BIAS, SLOPES, GATE = randn(60, 70), randn(4), torch.tensor(0.7)


def score_mod(score, b, h, q, k):
    return torch.tanh(score * GATE) + SLOPES[h] * BIAS[q, k]


def causal(b, h, q, k):
    return q >= k


def small(**changes) -> Problem:
    return replace(Problem(randn(2, 4, 50, 16), randn(2, 2, 61, 16), randn(2, 2, 61, 24), score_mod, causal), **changes)


def compiled_of(lowered: attnc.Lowered) -> Any:
    return lowered.compile()


def test_interpreted_and_native_agree():
    """The emitter makes of the kernel what the tile dialect says."""
    p, grad_out, grad_lse = small(), randn(2, 4, 50, 24), randn(2, 4, 50)
    native, captures = gradients(p, grad_out, grad_lse)
    interpreted, _ = interpreted_gradients(p, grad_out, grad_lse)
    for actual, wanted in zip(native, interpreted, strict=True):
        assert actual is not None and wanted is not None
        assert (actual - wanted).abs().max() <= 2e-5 * max(1, wanted.abs().max().item())
    check_gradients("native", native, p, captures, grad_out, grad_lse)


@pytest.mark.parametrize("wanted", [[0], [1], [2], [3], [4], [0, 1, 2], [1, 2], [5, 6], [0, 6]])
def test_only_what_is_asked_for(wanted):
    p, grad_out = small(), randn(2, 4, 50, 24)
    everything, captures = gradients(p, grad_out)
    needs = [n in wanted for n in range(4 + len(captures))]
    found, _ = gradients(p, grad_out, needs=needs)
    for n, (actual, full) in enumerate(zip(found, everything, strict=True)):
        assert (actual is not None) == (n in wanted)
        if actual is not None and full is not None:
            assert (actual - full).abs().max() <= 1e-5 * max(1, full.abs().max().item())


def test_products_are_left_out():
    """The kernel for a bias alone has no product for query, key and value."""
    call = captured_call(small())
    counts = {}
    for name, needs in {"all": [True] * 7, "value": [n == 2 for n in range(7)], "bias": [n > 3 for n in range(7)]}.items():
        stages = pipeline.stages_text(_module(call, needs), attnc_target())
        counts[name] = stages["decompose-attention-backward"].count("tile.dot")
    assert counts == {"all": 5, "value": 2, "bias": 2}


def _module(call, needs):
    from attnc.capture.to_torch import to_torch

    return to_torch(call.record, call.signature, needs)


def attnc_target():
    from attnc.target import Target

    return Target.host()


@pytest.mark.parametrize("layout", ["expanded", "transposed", "last dim of stride 2", "sliced"])
def test_strides(layout):
    """Gradients and inputs of any strides; an expanded one's gradient is whole."""
    grad_out = {
        "expanded": lambda: randn(1, 1, 1, 1).expand(2, 4, 50, 24),
        "transposed": lambda: randn(2, 50, 4, 24).transpose(1, 2),
        "last dim of stride 2": lambda: randn(2, 4, 50, 48)[..., ::2],
        "sliced": lambda: randn(2, 4, 60, 30)[:, :, 5:55, 3:27],
    }[layout]()
    grad_lse = randn(50).expand(2, 4, 50)
    key = randn(2, 1, 61, 16).expand(2, 2, 61, 16) if layout == "expanded" else randn(2, 61, 2, 16).transpose(1, 2)
    query = randn(2, 4, 16, 50).mT if layout == "transposed" else randn(2, 50, 4, 16).transpose(1, 2)
    p = small(query=query, key=key, value=randn(1, 2, 61, 24))
    found, captures = gradients(p, grad_out, grad_lse)
    check_gradients(layout, found, p, captures, grad_out, grad_lse)
    assert found[0] is not None and found[0].stride() == (query.stride() if layout != "transposed" else found[0].stride())


def test_dead_rows_and_masked_nan():
    """What is masked has no gradient and lends none, NaN or not."""
    p = small(mask_mod=lambda b, h, q, k: (q % 5 != 0) & (k < 40) & (k != 7))
    grad_out, grad_lse = randn(2, 4, 50, 24), randn(2, 4, 50)
    expected, captures = gradients(p, grad_out, grad_lse)
    check_gradients("clean", expected, p, captures, grad_out, grad_lse)
    key, value = p.key.clone(), p.value.clone()
    for tensor in (key, value):
        tensor[:, :, 40:], tensor[:, :, 7] = torch.nan, torch.inf
    dirty = grad_out.clone()
    dirty[:, :, ::5] = torch.nan
    found, _ = gradients(replace(p, key=key, value=value), dirty, grad_lse)
    for name, actual, wanted in zip(("query", "key", "value"), found, expected, strict=False):
        assert actual is not None and wanted is not None
        assert actual.isfinite().all(), name
        assert (actual - wanted).abs().max() <= 1e-6 * max(1, wanted.abs().max().item()), name
    query, key, value = (tensor for tensor in found[:3] if tensor is not None)
    assert (query[:, :, ::5] == 0).all() and (key[:, :, 40:] == 0).all() and (value[:, :, 7] == 0).all()


@pytest.mark.parametrize("listed_only", [False, True])
def test_block_mask(listed_only):
    block_mask = create_block_mask(causal, None, None, 50, 61, device="cpu", BLOCK_SIZE=16)
    if listed_only:
        block_mask.kv_num_blocks.clamp_(max=0)
    p = small(score_mod=lambda s, b, h, q, k: torch.tanh(s) + SLOPES[h] * BIAS[q, k], mask_mod=None, block_mask=block_mask)
    grad_out = randn(2, 4, 50, 24)
    found, captures = gradients(p, grad_out)
    check_gradients("block mask", found, p, captures, grad_out)


def test_numbers_compile_nothing_new():
    def of(window: int, factor: float) -> Problem:
        return small(score_mod=lambda s, b, h, q, k: s * factor + BIAS[q, k], mask_mod=lambda b, h, q, k: q - k <= window)

    grad_out = randn(2, 4, 50, 24)
    gradients(of(5, 0.5), grad_out)
    before = programs.compiled
    p = of(9, 1.25)
    found, captures = gradients(p, grad_out)
    assert programs.compiled == before
    check_gradients("numbers", found, p, captures, grad_out)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_bits_do_not_depend_on_threads(threads):
    query, key, value = randn(1, 4, 700, 32), randn(1, 2, 700, 32), randn(1, 2, 700, 32)
    table = randn(4, 1400)

    def relative(score, b, h, q, k):
        return score + table[h, q - k + 700] * GATE + SLOPES[h]

    p, grad_out = Problem(query, key, value, relative, causal), randn(1, 4, 700, 32)
    results = []
    for count in (1, 2, 3, 8, 2):
        threads(count)
        results.append(gradients(p, grad_out)[0])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True) if a is not None and b is not None)


def test_captures_that_changed_are_found():
    table = randn(80)
    p = small(score_mod=lambda s, b, h, q, k: s + table[k])
    call = captured_call(p)
    out, lse = forward(call)
    with pytest.raises(errors.CaptureIndexError, match="was not in the forward pass"):
        attention_backward(
            *(call.query, call.key, call.value, out, lse, randn(2, 4, 50, 24), None, [randn(20)], [], None, call.scale),
            *(call.record, call.signature, [True] * 5),
        )


def test_without_gradients_there_is_nothing():
    p = small(score_mod=None)
    assert gradients(p, randn(2, 4, 50, 24), needs=[False] * 4) == ([None] * 4, [])
    found, _ = gradients(p, None)
    assert all((tensor == 0).all() for tensor in found if tensor is not None)


def test_integer_captures_have_none():
    numbers = torch.randint(0, 50, (61,), generator=GENERATOR)
    p = small(score_mod=lambda s, b, h, q, k: s + BIAS[numbers[k] % 50, 3] * (numbers[k] > 7))
    grad_out = randn(2, 4, 50, 24)
    found, captures = gradients(p, grad_out)
    kinds = [tensor.is_floating_point() for tensor in captures]
    assert [tensor is not None for tensor in found[4:]] == kinds and sorted(kinds) == [False, True]
    check_gradients("integers", found, p, captures, grad_out)


def test_lower_shows_and_compiles_it():
    p = small()
    lowered = attnc.lower(p.query, p.key, p.value, score_mod, enable_gqa=True, mask_mod=causal, backward=True)
    assert list(lowered.stages) == ["torch", *pipeline.BACKWARD_STAGES]
    for name, text in lowered.stages.items():
        assert f'attnc.stage = "{name}"' in text
    out, lse = attnc.flex_attention(p.query, p.key, p.value, score_mod, enable_gqa=True, mask_mod=causal, return_lse=True)
    grad_out = randn(2, 4, 50, 24)
    found = compiled_of(lowered)(p.query, p.key, p.value, out, lse, grad_out)
    exact = oracle_gradients(p, [GATE, SLOPES, BIAS], grad_out, None)
    for actual, wanted in zip(found[:3], exact.all(), strict=False):
        assert wanted is not None and (actual - wanted).abs().max() < 1e-5
    captures = [GATE, SLOPES, BIAS]
    for stage in ("differentiate-attention", "tile-attention-backward", "decompose-attention-backward"):
        again = compiled_of(attnc.from_text(lowered.stages[stage]))
        order = [next(t for t in captures if t.dim() == argument.rank) for argument in again._backward.captures]
        same = again(p.query, p.key, p.value, out, lse, grad_out, captures=order)
        assert all(torch.equal(a, b) for a, b in zip(found, same, strict=True))


def test_an_edited_derivative_is_what_runs():
    p = small(score_mod=lambda s, b, h, q, k: s * 3.0)
    lowered = attnc.lower(p.query, p.key, p.value, p.score_mod, enable_gqa=True, backward=True)
    text = lowered.stages["differentiate-attention"]
    before, _, after = text.partition("d_modified: f32")
    edited = compiled_of(
        attnc.from_text(before + "d_modified: f32" + after.replace("arith.constant 3.0", "arith.constant 6.0", 1))
    )
    out, lse = attnc.flex_attention(p.query, p.key, p.value, p.score_mod, enable_gqa=True, return_lse=True)
    grad_out = randn(2, 4, 50, 24)
    plain, twice = (compiled(p.query, p.key, p.value, out, lse, grad_out) for compiled in (compiled_of(lowered), edited))
    assert (twice[0] - 2 * plain[0]).abs().max() < 1e-5 and torch.equal(twice[2], plain[2])


def test_a_row_without_live_keys_keeps_no_sums():
    """What rounding leaves of a row is taken out of a slope's, a gate's and the scale's gradient; nothing of a row without live
    keys, whatever the gradient of its lse."""
    slopes, gate = randn(6), torch.tensor(0.5)
    p = Problem(
        *(randn(2, 6, 130, 32), randn(2, 2, 130, 32), randn(2, 2, 130, 32)),
        lambda score, b, h, q, k: gate * score + slopes[h] * (k - q),
        lambda b, h, q, k: (q >= k) & (q != 0),
    )
    grad_out, grad_lse = randn(2, 6, 130, 32), randn(2, 6, 130)
    grad_lse[:, :, 0] = torch.nan
    found, captures = gradients(p, grad_out, grad_lse)
    grad_lse[:, :, 0] = 0
    check_gradients("row sums", found, p, captures, grad_out, grad_lse)
