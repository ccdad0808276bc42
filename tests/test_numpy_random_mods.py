"""NumPy mods that nobody thought of: records against NumPy's own scalars, `attnc.numpy.attention` against the oracle."""

from __future__ import annotations

import random

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnc.numpy
from attnc.capture.numpy_capture import capture_numpy
from oracle import Problem, check
from random_numpy_mods import RandomMod, mask_mods, score_mods
from record_interpreter import run_record
from zoo import DTYPES, Sizes
from zoo.layouts import contiguous
from zoo_numpy import Grid, array, tensor

SIZES = st.sampled_from(
    [
        Sizes(batch=2, heads=4, kv_heads=2, queries=37, keys=53, head_dim=16, value_dim=16),
        Sizes(batch=1, heads=2, kv_heads=2, queries=130, keys=129, head_dim=16, value_dim=16),
        Sizes(batch=3, heads=3, kv_heads=1, queries=5, keys=280, head_dim=16, value_dim=16),
    ]
)
FLOAT32 = np.dtype(np.float32)


def on_scalars(score_mod: RandomMod | None, mask_mod: RandomMod | None) -> None:
    """The record, run by torch's own operations, gives what the mod gives on NumPy's scalars."""
    mods = [mod and mod.function() for mod in (score_mod, mask_mod)]
    record, arrays, numbers = capture_numpy(mods[0], mods[1], FLOAT32)
    numbers = [number.item() if isinstance(number, np.generic) else number for number in numbers]
    generator = random.Random(0)
    for mod, function in zip(mods, (record.score, record.mask), strict=True):
        if mod is None or function is None:
            continue
        for _ in range(6):
            arguments: list = [np.int32(generator.randrange(limit)) for limit in (3, 4, 130, 280)]
            if function is record.score:
                arguments.insert(0, np.float32(generator.gauss(0, 1)))
            with np.errstate(all="ignore"):
                wanted = np.asarray(mod(*arguments))
            tensors = [torch.tensor(value) for value in arguments]
            got = run_record(function, tensors, [tensor(values) for values in arrays], numbers).numpy()
            if function is record.mask:
                assert got == wanted
            else:
                np.testing.assert_allclose(got, wanted.astype(np.float32), rtol=2e-5, atol=2e-5)


@settings(max_examples=150)
@given(score_mods())
def test_record_of_a_score_mod(score_mod: RandomMod):
    on_scalars(score_mod, None)


@settings(max_examples=150)
@given(mask_mods())
def test_record_of_a_mask_mod(mask_mod: RandomMod):
    on_scalars(None, mask_mod)


def run(sizes: Sizes, dtype: str, score_mod: RandomMod | None, mask_mod: RandomMod | None) -> None:
    query, key, value = contiguous(sizes, torch.Generator().manual_seed(7), DTYPES[dtype])
    functions = [mod and mod.function(dtype == "f64") for mod in (score_mod, mask_mod)]
    arrays = array(query), array(key), array(value)
    out, lse = attnc.numpy.attention(*arrays, score_mod=functions[0], mask_mod=functions[1], return_lse=True)
    p = Problem(query, key, value, *(function and Grid(function) for function in functions))  # type: ignore[arg-type]
    check(p, tensor(out), tensor(lse))


@settings(max_examples=25)
@given(SIZES, st.sampled_from(sorted(DTYPES)), score_mods(), mask_mods())
def test_both(sizes: Sizes, dtype: str, score_mod: RandomMod, mask_mod: RandomMod):
    run(sizes, dtype, score_mod, mask_mod)
