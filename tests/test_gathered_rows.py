"""Loops over gathered rows beside what else a score_mod reads: lanes made in a loop are made again after it, and a loop that
has one value a row passes on whether an index was out of range."""

from __future__ import annotations

import pytest
import torch

import attnc

MODS = {
    "product, then an element": lambda s, i, j, t: s + (t[i] * t[j]).sum(-1) + t[j, 2],
    "product, then another row": lambda s, i, j, t: s + (t[i] * t[j]).sum(-1) * t[j].sum(-1),
    "product, then a run of differences": lambda s, i, j, t: s + (t[i] * t[i - j]).sum(-1) * t[i - j, 0],
    "a row's product, then lanes": lambda s, i, j, t: s + t[i].prod(-1) + t[j].amax(-1),
    "a row's maximum times lanes": lambda s, i, j, t: s + t[i].amax(-1) * t[j].sum(-1),
}


@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "backward"])
def test_rows_and_elements(name: str, gradients: bool):
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, length, 16).requires_grad_(gradients) for length in (37, 53, 53)]
    table = torch.randn(53, 6).requires_grad_(gradients)
    wanted = [tensor.detach().double().requires_grad_(gradients) for tensor in (*inputs, table)]
    mod = MODS[name]
    out = attnc.flex_attention(inputs[0], inputs[1], inputs[2], lambda s, b, h, i, j: mod(s, i, j, table))
    query, key, value, rows = wanted
    scores = mod(query @ key.mT / 4, torch.arange(37)[:, None], torch.arange(53), rows)
    expected = scores.softmax(-1) @ value
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)
    if gradients:
        out.square().sum().backward()
        expected.square().sum().backward()
        for tensor, reference in zip((*inputs, table), wanted, strict=True):
            assert tensor.grad is not None and reference.grad is not None
            largest = float(reference.grad.abs().max())
            torch.testing.assert_close(tensor.grad.double(), reference.grad, atol=1e-5 * max(1.0, largest), rtol=0)


@pytest.mark.parametrize("name", ["product, then an element", "a row's maximum times lanes"])
def test_an_index_out_of_range_is_found(name: str):
    query = torch.randn(1, 1, 40, 16)
    table = torch.randn(30, 6)
    with pytest.raises(IndexError, match="index 30 is out of range for dim 0 of captured tensor 'table' with size 30"):
        attnc.flex_attention(query, query, query, lambda s, b, h, i, j: MODS[name](s, i, j, table))
