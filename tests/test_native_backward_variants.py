"""Variants of the backward kernel in native code: captured tensors with gradients, the gradient of lse, element types, block
sizes, and memory that ends where the tensors do."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attnc
from backward_kernels import CAPTURES, Bias, autograd, in_f64, narrow, sized, slopes_bias, with_capture, with_lse_gradient
from hand_written import text
from test_guard_pages import guarded
from test_native import restored_threads  # noqa: F401
from test_native_backward import check as check_gradients
from test_native_backward import gradients, problem
from test_tile_interpreter import attention_gradients
from tile_interpreter import run as interpret


@functools.cache
def compiled(kernel: str) -> Any:
    return attnc.from_text(kernel).compile()


def case(bias: Bias, table: tuple[int, ...], sizes: tuple[int, ...], sum_type: str = "f64", d_lse: Tensor | None = None):
    """(arguments without the results, results to write into, expected gradients)."""
    batch, heads, kv_heads, queries, keys = sizes
    torch.manual_seed(queries)
    query, d_out = (torch.randn(batch, heads, queries, 64) for _ in range(2))
    key, value = (torch.randn(batch, kv_heads, keys, 64) for _ in range(2))
    values = torch.randn(table)
    out, lse, *expected = autograd(bias, query, key, value, values, d_out, d_lse)
    sums = torch.zeros(table, dtype=torch.float64 if sum_type == "f64" else torch.float32)
    results = [torch.zeros_like(query), torch.full_like(key, torch.nan), torch.full_like(value, torch.nan), sums]
    return [query, key, value, 0.125, values, out.float(), lse.float(), d_out], results, expected


def capture_case(name: str, sizes: tuple[int, int, int, int, int]):
    capture = CAPTURES[name]
    batch, heads, _, queries, keys = sizes
    return case(capture.bias, capture.shape(batch, heads, queries, keys), sizes, capture.sum_type)


def check(results: list[Tensor], expected: list[Tensor], what: str) -> None:
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result.double(), wanted, atol=1e-5 * max(1.0, float(wanted.abs().max())), rtol=0, msg=what)


@pytest.mark.parametrize("name", CAPTURES)
@pytest.mark.parametrize("sizes", [(2, 4, 2, 150, 170), (1, 5, 1, 65, 40), (3, 1, 1, 1, 1)], ids=str)
def test_captured_gradients(name, sizes):
    inputs, results, expected = capture_case(name, sizes)
    compiled(with_capture(name))(*inputs, *results)
    check(results, expected, name)


@pytest.mark.parametrize("name", CAPTURES)
def test_captured_gradients_interpreted(name):
    inputs, results, expected = capture_case(name, (2, 2, 1, 50, 60))
    interpret(with_capture(name), *(a.numpy() if isinstance(a, Tensor) else a for a in (*inputs, *results)), shuffle=3)
    check(results, expected, name)


@pytest.mark.parametrize("name", CAPTURES)
def test_same_bits_for_any_number_of_threads(name, restored_threads):  # noqa: F811
    found = []
    for threads in (1, 2, 5, 2):
        torch.set_num_threads(threads)
        inputs, results, _ = capture_case(name, (2, 6, 2, 260, 390))
        compiled(with_capture(name))(*inputs, *results)
        found.append(results)
    for others in found[1:]:
        assert all(torch.equal(first, other) for first, other in zip(found[0], others, strict=True))


@pytest.mark.parametrize("sizes", [(2, 4, 2, 150, 170), (1, 1, 1, 3, 200)], ids=str)
def test_gradient_of_lse(sizes):
    d_lse = torch.randn(sizes[0], sizes[1], sizes[3])
    inputs, results, expected = case(slopes_bias, (sizes[1],), sizes, d_lse=d_lse)
    compiled(with_lse_gradient(text("attention_backward")))(*inputs, *results, d_lse)
    check(results[:3], expected[:3], "lse")
    torch.testing.assert_close(results[3], expected[3], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("blocks", [(12, 32), (36, 64), (50, 100), (96, 192), (240, 24)], ids=str)
def test_blocks(blocks):
    sizes = (1, 4, 2, 210, 230)
    inputs, expected = problem(*sizes)
    check_gradients(gradients(compiled(sized(text("attention_backward"), *blocks)), inputs), expected, sizes)


def test_f64():
    sizes = (1, 4, 2, 100, 130)
    inputs, _ = problem(*sizes)
    wide = [array.astype(np.float64) if isinstance(array, np.ndarray) else array for array in inputs]
    out, lse, *expected = attention_gradients(wide[0], wide[1], wide[2], 0.125, wide[4], wide[7])
    wide[5:7] = out, lse
    for gradient, wanted in zip(gradients(compiled(in_f64(text("attention_backward"))), wide), expected, strict=True):
        np.testing.assert_allclose(gradient, wanted, atol=1e-11 * max(1, np.abs(wanted).max()), rtol=0)


@pytest.mark.parametrize("element", ["bf16", "f16"])
@pytest.mark.parametrize("sizes", [(1, 4, 2, 100, 130), (2, 1, 1, 49, 97)], ids=str)
def test_half_precision(element, sizes):
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[element]
    inputs, results, _ = case(slopes_bias, (sizes[1],), sizes)
    half = [a.to(dtype) if isinstance(a, Tensor) and a.ndim == 4 else a for a in inputs]
    query, key, value, _, slopes, _, _, d_out = half
    out, lse, *_ = autograd(slopes_bias, query, key, value, slopes, d_out)
    half[5:7] = out.to(dtype), lse.float()
    results[1:3] = results[1].to(dtype), results[2].to(dtype)
    compiled(narrow(text("attention_backward"), element))(*half, *results)
    # By the formula, for `out` comes in rounded, and with it the rows' sums of out times d_out.
    q, k, v, t, o, g = (tensor.double() for tensor in (query, key, value, slopes, half[5], d_out))
    ratio = sizes[1] // sizes[2]
    k, v = (tensor.repeat_interleave(ratio, 1) for tensor in (k, v))
    distance = torch.arange(sizes[4]) - torch.arange(sizes[3])[:, None]
    scores = (0.125 * q @ k.mT + t[:, None, None] * distance).masked_fill(distance > 0, -torch.inf)
    weights = (scores - lse[..., None]).exp()
    d_scores = weights * (g @ v.mT - (o * g).sum(-1, keepdim=True))
    shared = (sizes[0], sizes[2], ratio, sizes[4], 64)
    wanted = [0.125 * d_scores @ k, (0.125 * d_scores.mT @ q).view(shared).sum(2), (weights.mT @ g).view(shared).sum(2)]
    check(results[:1], wanted[:1], element)
    for result, right in zip(results[1:3], wanted[1:], strict=True):
        torch.testing.assert_close(result.double(), right, atol=torch.finfo(dtype).eps * float(right.abs().max()), rtol=0)
    d_slopes = (d_scores * distance).sum((0, 2, 3))
    torch.testing.assert_close(results[3], d_slopes, atol=1e-6 * sizes[3] ** 2 * float(d_slopes.abs().max()), rtol=0)


@pytest.mark.parametrize("name", ["relative", "scattered", "by query and key", "by key"])
@pytest.mark.parametrize("at_end", [True, False])
def test_nothing_outside_is_touched(name, at_end):
    """Every tensor lies against a page that may not be touched."""
    for sizes in [(1, 2, 1, 53, 117), (2, 2, 2, 97, 33)]:
        inputs, results, expected = capture_case(name, sizes)
        kept = [guarded(a, at_end) if isinstance(a, Tensor) else a for a in (*inputs, *results)]
        compiled(with_capture(name))(*kept)
        check(kept[-4:], expected, name)
