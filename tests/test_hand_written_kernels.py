"""`tile` is a language for blocks, not for one kernel: five that are no softmax attention, interpreted and compiled."""

from __future__ import annotations

import numpy as np
import pytest

from hand_written import KERNELS, SIZES, text, tolerance
from tile_interpreter import parse, run

CASES = [(name, *sizes) for name in KERNELS for sizes in SIZES]


def check(out, expected):
    np.testing.assert_allclose(out.astype(float), expected, rtol=0, atol=tolerance(out, expected))


@pytest.mark.parametrize("name", [*KERNELS, "attention_forward", "attention_backward"])
def test_text_is_stable(name):
    printed = str(parse(text(name)))
    assert str(parse(printed)) == printed


@pytest.mark.parametrize(("name", "rows", "columns"), CASES)
def test_interpreted(name, rows, columns):
    arguments, out, expected = KERNELS[name](np.random.default_rng(rows), rows, columns)
    run(text(name), *arguments, shuffle=columns)
    check(out, expected)
