"""The zoo through `attnc.numpy.attention`: against the oracle, and against the torch front end where the record is the same."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

import attnc
import attnc.numpy
from attnc.capture.capture import capture
from attnc.capture.numpy_capture import capture_numpy
from attnc.errors import UnsupportedModError
from oracle import check
from record_interpreter import run_record
from zoo import ENTRIES, LAYOUTS
from zoo_numpy import BUILDERS, WITHOUT, NumpyProblem, array, numpy_problem, tensor


def run(p: NumpyProblem, name: str) -> None:
    mods = p.mods
    out, lse = attnc.numpy.attention(p.query, p.key, p.value, mods.score_mod, mods.mask_mod, p.scale, return_lse=True)
    assert type(out) is np.ndarray and out.dtype == p.query.dtype
    check(p.judged, tensor(out), tensor(lse), name=name)
    wide = torch.float64 if p.torch.query.dtype is torch.float64 else torch.float32
    ours = capture_numpy(mods.score_mod, mods.mask_mod, array(torch.empty(0, dtype=wide)).dtype)[0]
    if ours == capture(p.torch.score_mod, p.torch.mask_mod, score_dtype=wide).record:
        compared.add(name)
        theirs = attnc.flex_attention(
            p.torch.query, p.torch.key, p.torch.value, p.torch.score_mod, scale=p.scale, enable_gqa=True,
            return_lse=True, mask_mod=p.torch.mask_mod,
        )  # fmt: skip
        for mine, other in zip((out, lse), theirs, strict=True):
            np.testing.assert_array_equal(mine.view(np.uint8), array(other).view(np.uint8))


compared: set[str] = set()
ROW_BY_ROW = ("vision_cross", "top_k_blocks", "latent_rotary", "euclidean", "sandwich")
TRANSCENDENTAL = ("power", "alibi_computed", "soft_cap", "soft_cap_causal", "sandwich", "trigonometric", "log_masked")
TRANSCENDENTAL += ("sigmoid_gate", "silu_gate", "latent_rotary", "euclidean")
"""Mods whose last bit two libraries need not agree on: functions and sums."""
_LAYOUTS = itertools.cycle(LAYOUTS)
_GROUPS = itertools.cycle([(4, 4), (4, 2), (6, 2), (4, 1), (6, 1)])
_DTYPES = itertools.cycle(["f16", "f64", "bf16"])
CASES = [(name, dtype, next(_LAYOUTS), *next(_GROUPS)) for name in BUILDERS for dtype in ("f32", next(_DTYPES))]


def test_the_zoo_is_whole():
    assert set(BUILDERS) == set(ENTRIES) - WITHOUT


@pytest.mark.parametrize(("name", "dtype", "layout", "heads", "kv_heads"), CASES)
def test_mod(name, dtype, layout, heads, kv_heads):
    sizes = ENTRIES[name].sizes.but(heads=heads, kv_heads=kv_heads)
    if name in ROW_BY_ROW:
        sizes = sizes.but(queries=37, keys=70)
    run(numpy_problem(name, sizes, layout, dtype, seed=heads), name)


POSITIONS = 12


@pytest.mark.parametrize("name", BUILDERS)
def test_record_does_what_the_mod_does(name):
    """A record, run by torch's own operations, gives bit for bit what the mod gives on NumPy's scalars."""
    p = numpy_problem(name)
    mods = p.mods
    record, arrays, numbers = capture_numpy(mods.score_mod, mods.mask_mod, np.dtype(np.float32))
    assert capture_numpy(mods.score_mod, mods.mask_mod, np.dtype(np.float32))[0] is record
    generator = random.Random(0)
    limits = (p.query.shape[0], p.query.shape[1], p.query.shape[2], p.key.shape[2])
    for _ in range(POSITIONS):
        places = [np.int32(generator.randrange(limit)) for limit in limits]
        score = np.float32(generator.gauss(0, 1))
        for mod, function, arguments in (
            (mods.score_mod, record.score, [score, *places]),
            (mods.mask_mod, record.mask, places),
        ):
            if mod is None or function is None:
                continue
            with np.errstate(all="ignore"):
                wanted = np.asarray(mod(*arguments))
            if function is record.score:
                wanted = wanted.astype(np.float32)
            tensors = [torch.tensor(value) for value in arguments]
            got = run_record(function, tensors, [tensor(values) for values in arrays], numbers).numpy()
            assert got.dtype == wanted.dtype and got.shape == wanted.shape
            if name in TRANSCENDENTAL:
                np.testing.assert_allclose(got, wanted, rtol=1e-6)
            else:
                np.testing.assert_array_equal(got, wanted)


def test_a_function_of_torch_in_a_numpy_mod():
    p = numpy_problem("identity")
    with pytest.raises(UnsupportedModError, match="a NumPy mod calls torch's tanh") as caught:
        attnc.numpy.attention(p.query, p.key, p.value, lambda s, b, h, q, k: torch.tanh(s))
    assert caught.value.filename == __file__ and "attnc.flex_attention" in (caught.value.remedy or "")
