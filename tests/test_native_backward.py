"""The backward kernel of tests/tile/attention_backward.mlir in native code, against autograd in f64: shapes, strides, machines,
threads, and what must not leak from dead pairs."""

from __future__ import annotations

import platform
from dataclasses import replace

import numpy as np
import pytest
import torch

import attnc
from attnc.target import Target
from hand_written import attention_inputs, text
from needs import needs_isa
from test_native import MACHINES, restored_threads  # noqa: F401
from test_tile_interpreter import attention_gradients

NAMES = ("d_query", "d_key", "d_value", "d_slopes")


@pytest.fixture(scope="module")
def kernel():
    return attnc.from_text(text("attention_backward")).compile()


def problem(batch: int, heads: int, kv_heads: int, queries: int, keys: int, seed: int = 5):
    """The kernel's inputs, and the gradients in f64."""
    rng = np.random.default_rng(seed)
    query, key, value, slopes = attention_inputs(rng, batch, heads, kv_heads, queries, keys)
    d_out = rng.standard_normal(query.shape, np.float32)
    out, lse, *expected = attention_gradients(query, key, value, 0.125, slopes, d_out)
    return [query, key, value, 0.125, slopes, out.astype(np.float32), lse.astype(np.float32), d_out], expected


def gradients(kernel, inputs) -> list[np.ndarray]:
    """d_query, d_key, d_value, d_slopes. What is summed into starts at zero, what is stored as NaN."""
    query, key, value = inputs[:3]
    found = [
        np.zeros(query.shape, query.dtype),
        np.full_like(key, np.nan),
        np.full_like(value, np.nan),
        np.zeros(query.shape[1]),
    ]
    kernel(*inputs, *found)
    return found


def check(found, expected, sizes) -> None:
    for name, gradient, wanted in zip(NAMES, found, expected, strict=True):
        # A slope sums over all pairs what may cancel, times distances up to the number of queries.
        unit = 1e-5 if gradient.ndim == 4 else 1e-6 * sizes[0] * sizes[3] ** 2
        np.testing.assert_allclose(gradient, wanted, atol=unit * max(1, np.abs(wanted).max()), rtol=0, err_msg=name)


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1, 48, 64),
        (2, 2, 2, 130, 130),
        (2, 6, 2, 50, 129),
        (1, 2, 1, 65, 1),
        (1, 1, 1, 1, 1),
        (1, 4, 2, 300, 300),
        (2, 3, 1, 97, 400),
        (1, 5, 1, 260, 77),
    ],
    ids=str,
)
def test_against_autograd(kernel, sizes):
    inputs, expected = problem(*sizes)
    check(gradients(kernel, inputs), expected, sizes)


@pytest.mark.parametrize("sizes", [(0, 2, 2, 5, 7), (1, 2, 2, 0, 7), (1, 2, 1, 5, 0)], ids=str)
def test_nothing_to_do(kernel, sizes):
    rng = np.random.default_rng(1)
    batch, heads, kv_heads, queries, keys = sizes
    query, key, value, slopes = attention_inputs(rng, batch, heads, kv_heads, queries, keys)
    inputs = [query, key, value, 0.125, slopes, query, np.zeros(query.shape[:3], np.float32), query]
    for gradient in gradients(kernel, inputs):
        assert (gradient == 0).all()


def test_same_bits_for_any_number_of_threads(kernel, restored_threads):  # noqa: F811
    sizes = (2, 6, 2, 500, 700)
    inputs, expected = problem(*sizes)
    results = []
    for threads in (1, 2, 3, 8, 2):
        torch.set_num_threads(threads)
        results.append(gradients(kernel, inputs))
    check(results[0], expected, sizes)
    for others in results[1:]:
        for first, other in zip(results[0], others, strict=True):
            assert np.array_equal(first, other)


WITH_ISA = {"haswell": "avx2", "haswell-wide": "avx2", "skylake-avx512": "avx512bw"} if platform.machine() == "x86_64" else {}


@pytest.mark.parametrize(
    "machine", [pytest.param(m, marks=[needs_isa(WITH_ISA[m])] if m in WITH_ISA else []) for m in MACHINES]
)
def test_machines(machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Target, "host", staticmethod(lambda: replace(MACHINES[machine])))
    sizes = (1, 4, 2, 137, 150)
    inputs, expected = problem(*sizes)
    check(gradients(attnc.from_text(text("attention_backward")).compile(), inputs), expected, sizes)


def test_strides(kernel):
    sizes = (2, 4, 2, 70, 90)
    inputs, expected = problem(*sizes)
    moved = [a.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3) if getattr(a, "ndim", 0) == 4 else a for a in inputs]
    moved[6] = np.stack([inputs[6]] * 2, axis=1)[:, 1]
    check(gradients(kernel, moved), expected, sizes)
    inputs[7][:] = inputs[7][:, :1]
    _, _, *expected = attention_gradients(inputs[0], inputs[1], inputs[2], 0.125, inputs[4], inputs[7])
    inputs[7] = np.broadcast_to(inputs[7][:, :1], inputs[7].shape)
    check(gradients(kernel, inputs), expected, sizes)


def test_dead_pairs_do_not_leak(kernel):
    """Keys that no query sees, and queries that see no key: NaN and infinity there change nothing elsewhere."""
    sizes = (1, 2, 1, 150, 170)
    inputs, expected = problem(*sizes)
    query, key, value, _, _, out, lse, d_out = inputs
    key[:, :, 150:], value[:, :, 150:] = np.nan, np.inf
    found = gradients(kernel, inputs)
    check(found, expected, sizes)
    assert (found[1][:, :, 150:] == 0).all() and (found[2][:, :, 150:] == 0).all()
    # The first ten queries turn bad: keys from ten on do not see them.
    query[:, :, :10], d_out[:, :, :10], lse[:, :, :10], out[:, :, :10] = np.nan, np.inf, np.nan, np.nan
    found = gradients(kernel, inputs)
    for gradient, wanted in zip(found[:3], expected, strict=False):
        np.testing.assert_allclose(gradient[:, :, 10:], wanted[:, :, 10:], atol=1e-4, rtol=0)
    assert np.isnan(found[0][:, :, :10]).all() and np.isnan(found[1][:, :, :10]).all()
