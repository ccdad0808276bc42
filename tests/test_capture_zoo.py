"""Every mod of the zoo is captured, and its record says what the mod does: both are run on scalars and compared."""

from __future__ import annotations

import pytest
import torch

from attnc.capture.block_mask import read_block_mask
from attnc.capture.capture import capture
from attnc.capture.to_torch import to_torch
from attnc.mlir_text import parse_module
from attnc.runtime.signature import Signature
from record_interpreter import run_record
from zoo import ENTRIES, problem

POSITIONS = 12


def _mods(p):
    if p.block_mask is None:
        return p.score_mod, p.mask_mod
    sizes = p.query.shape[0], p.query.shape[1], p.query.shape[2], p.key.shape[2]
    return p.score_mod, read_block_mask(p.block_mask, *sizes).mask_mod or p.mask_mod


@pytest.mark.parametrize("name", ENTRIES)
def test_record_does_what_the_mod_does(name):
    p = problem(name)
    score_mod, mask_mod = _mods(p)
    captured = capture(score_mod, mask_mod)
    record = captured.record
    assert captured.retraced is None, captured.retraced
    again = capture(score_mod, mask_mod)
    assert again.record is record
    assert all(a is b for a, b in zip(again.tensors, captured.tensors, strict=True))
    generator = torch.Generator().manual_seed(0)
    limits = (p.query.shape[0], p.query.shape[1], p.query.shape[2], p.key.shape[2])
    for _ in range(POSITIONS):
        index = [torch.randint(limit, (), generator=generator).int() for limit in limits]
        score = torch.randn((), generator=generator)
        for mod, function, arguments in (
            (score_mod, record.score, [score, *index]),
            (mask_mod, record.mask, index),
        ):
            if mod is None or function is None:
                continue
            expected = torch.as_tensor(mod(*arguments))
            if function is record.score:
                expected = expected.float()
            got = run_record(function, arguments, captured.tensors, captured.numbers)
            assert got.dtype is expected.dtype and got.shape == expected.shape
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ENTRIES)
def test_torch_stage(name):
    """The module of stage "torch" verifies, and its text reads back as itself."""
    p = problem(name)
    module = to_torch(capture(*_mods(p)).record, Signature("f32", 64, 64))
    module.verify()
    text = str(parse_module(str(module)))  # names of values may lose a number on the way, once
    assert str(parse_module(text)) == text
