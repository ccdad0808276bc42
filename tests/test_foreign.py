"""Whole kernels for NEON, run under qemu-user and held to the oracle. Reading beyond a buffer faults there."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

import attnc
import foreign
from attnc.errors import CaptureIndexError
from attnc.target import Target
from needs import needs_tool, tool
from oracle import Problem, check
from test_native import arguments_of
from zoo import ENTRIES, Sizes, problem

pytestmark = [needs_tool(foreign.EMULATOR), needs_tool(foreign.COMPILER)]

PROBLEMS = [
    ("identity", "f32"),
    ("identity", "bf16"),
    ("identity", "f64"),
    ("alibi_causal", "f32"),
    ("alibi_causal", "f16"),
    ("document", "f32"),
    ("soft_cap_causal", "bf16"),
    ("two_dtypes", "f16"),
    ("trigonometric", "f32"),
    ("nan_bias_masked", "f32"),
    ("block_mask_full_and_partial", "f32"),
]


def on_neon(p: Problem, directory: Path, monkeypatch: pytest.MonkeyPatch, target: Target = foreign.AARCH64):
    """(out, lse, max_scores) of the kernel for NEON."""
    with monkeypatch.context() as patch:
        patch.setattr(Target, "host", staticmethod(lambda: target))
        lowered = attnc.lower(p.query, p.key, p.value, **arguments_of(p))
        assert ("dot_rows.pairs" in lowered.code.llvm) == (target == foreign.AARCH64_BF16)
    return foreign.attention(lowered, target, directory)(p.query, p.key, p.value)


@pytest.mark.parametrize(("name", "dtype"), PROBLEMS)
def test_neon(name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes = ENTRIES[name].sizes.but(batch=1, heads=4, kv_heads=2, queries=101, keys=150)
    p = problem(name, sizes, "bshd", dtype)
    check(p, *on_neon(p, tmp_path, monkeypatch), name=name)


@pytest.mark.parametrize("name", ["identity", "soft_cap_causal", "block_mask_full_and_partial"])
def test_neon_with_bf16_dot_products(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes = ENTRIES[name].sizes.but(batch=1, heads=4, kv_heads=2, queries=101, keys=150)
    p = problem(name, sizes, "bshd", "bf16")
    check(p, *on_neon(p, tmp_path, monkeypatch, foreign.AARCH64_BF16), name=name)


@pytest.mark.parametrize(("name", "dtype"), [("identity", "f32"), ("alibi_causal", "bf16"), ("soft_cap", "f16")])
def test_neon_with_few_queries(name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The keys in chunks, and a second kernel that merges them."""
    sizes = ENTRIES[name].sizes.but(batch=1, heads=8, kv_heads=2, queries=2, keys=1100, head_dim=64, value_dim=64)
    p = problem(name, sizes, dtype=dtype)
    check(p, *on_neon(p, tmp_path, monkeypatch), name=name)


def test_an_index_out_of_range_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    table = torch.linspace(-1, 1, 50)
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 2, length, 16, generator=generator) for length in (45, 60))
    fine = Problem(query, key, key, lambda s, b, h, q, k: s + table[k - 50], lambda b, h, q, k: k < 50)
    check(fine, *on_neon(fine, tmp_path, monkeypatch))
    with pytest.raises(CaptureIndexError) as caught:
        on_neon(Problem(query, key, key, lambda s, b, h, q, k: s + table[k]), tmp_path, monkeypatch)
    assert (caught.value.tensor, caught.value.index, caught.value.position) == ("table", 50, (0, 0, 0, 50))


def test_the_program_is_one_for_neon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    p = problem("identity", Sizes(batch=1, heads=1, kv_heads=1, queries=9, keys=9))
    check(p, *on_neon(p, tmp_path, monkeypatch))
    program = next(path for path in tmp_path.iterdir() if path.name.startswith("attention") and not path.suffix[1:].isalpha())
    objdump = tool("aarch64-linux-gnu-objdump")
    assert objdump is not None, "it comes with the compiler"
    header = subprocess.run([objdump, "-f", program], capture_output=True, text=True, check=True).stdout
    assert "architecture: aarch64" in header
