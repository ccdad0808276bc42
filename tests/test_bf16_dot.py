"""bf16 dot products of the processor: the leaves against NumPy, whole kernels against the oracle, and when they are used."""

from __future__ import annotations

import ctypes
import itertools
import re
from dataclasses import replace

import numpy as np
import pytest

import attnc
from attnc.analysis.machine import register_tile
from attnc.codegen.llvm import leaves, leaves_pairs
from attnc.codegen.llvm.compile import to_assembly, to_object
from attnc.lowered import CompiledAttention
from attnc.runtime.objects import LoadedObjects
from attnc.target import Target
from foreign import AARCH64, AARCH64_BF16
from needs import needs_isa
from oracle import Problem, check
from test_assembly import AVX512, count, function_of, loops_of
from test_leaves import guarded, unaligned
from test_native import arguments_of
from zoo import ENTRIES, problem

TARGET = replace(AVX512, cpu="cooperlake", features=AVX512.features + ",+avx512bf16")
ROWS, VECTORS = register_tile(TARGET, 32)
COLUMNS = VECTORS * 16


def bits_of(values: np.ndarray) -> np.ndarray:
    """f32 to the bits of bf16, cut off."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def value_of(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.fixture(scope="module")
def library():
    names = leaves_pairs.symbols(TARGET)
    objects = LoadedObjects([to_object(leaves.pairs(TARGET), TARGET, optimise=False)], names)

    def call(name: str, *arguments: object) -> None:
        symbol = names[name == "pack"]
        types = [ctypes.c_void_p if isinstance(a, np.ndarray) else ctypes.c_int64 for a in arguments]
        function = ctypes.CFUNCTYPE(None, *types)(objects.addresses[symbol])
        function(*[a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments])

    return call


def panels_of(keys: np.ndarray) -> np.ndarray:
    """Bits [keys, depth] as words [panels, depth / 2, COLUMNS]."""
    count, depth = keys.shape
    padded = np.zeros((-(-count // COLUMNS) * COLUMNS, depth), np.uint16)
    padded[:count] = keys
    words = padded.view(np.uint32).reshape(-1, COLUMNS, depth // 2)
    return np.ascontiguousarray(words.transpose(0, 2, 1))


@needs_isa("avx512bf16")
@pytest.mark.parametrize("depth", [2, 18, 64, 128])
def test_products(library, depth: int):
    rng = np.random.default_rng(depth)
    for rows, keys in itertools.product([1, 3, 4, 5, 11, 12, 25], [32, 64]):
        padded = -(-rows // ROWS) * ROWS
        left = np.full((padded, depth + 6), 0x7FC0, np.uint16)
        left[:rows, :depth] = bits_of(rng.uniform(-1, 1, (rows, depth)))
        right = bits_of(rng.uniform(-1, 1, (keys, depth)))
        out = unaligned(np.full((padded, keys + 5), 7, np.float32))
        panels = unaligned(panels_of(right))
        arguments = (unaligned(left), (depth + 6) // 2, panels, panels[0].size, out, keys + 5)
        library("dot", *arguments, keys // COLUMNS, rows, depth // 2)
        expected = value_of(left[:rows, :depth]).astype(np.float64) @ value_of(right).astype(np.float64).T
        np.testing.assert_allclose(out[:rows, :keys], expected, rtol=0, atol=1e-7 * 4 * (depth + 4))
        assert (out[:, keys:] == 7).all()


@needs_isa("avx512bf16")
@pytest.mark.parametrize("columns", [2, 18, 64])
@pytest.mark.parametrize("strides", ["rows", "odd rows", "columns", "both"])
def test_packing(library, columns: int, strides: str):
    rng = np.random.default_rng(columns)
    for valid, more in itertools.product([0, 1, 15, 33, 70], [0, 1, 40]):
        by_row, by_column = {
            "rows": (columns + 2, 1),
            "odd rows": (columns + 1, 1),
            "columns": (1, valid + 2),
            "both": (2 * columns + 3, 2),
        }[strides]
        extent = max(1, (valid - 1) * by_row + (columns - 1) * by_column + 1) if valid else 1
        source = rng.integers(0, 1 << 16, extent, dtype=np.uint16)
        places = np.arange(valid)[:, None] * by_row + np.arange(columns)[None, :] * by_column
        padded = np.zeros((valid + more, columns), np.uint16)
        padded[:valid] = source[places] if valid else 0
        expected = panels_of(padded)
        size = (columns // 2) * COLUMNS
        destination = unaligned(np.full((expected.shape[0], size + 2), 7, np.uint32))
        library("pack", guarded(source), by_row, by_column, destination, size + 2, valid, valid + more, columns)
        np.testing.assert_array_equal(destination[:, :size].reshape(expected.shape), expected)
        assert (destination[:, size:] == 7).all()


def uses_pairs(p: Problem) -> bool:
    return "dot_rows.pairs" in attnc.lower(p.query, p.key, p.value, **arguments_of(p)).code.llvm


CASES = ["identity", "alibi_causal", "soft_cap", "document", "nan_bias_masked", "block_mask_full_and_partial"]


@needs_isa("avx512bf16")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", ["contiguous", "bshd"])
def test_kernels(name: str, layout: str):
    p = problem(name, ENTRIES[name].sizes.but(batch=2, heads=4, kv_heads=2, queries=137, keys=150), layout, "bf16")
    function = attnc.lower(p.query, p.key, p.value, **arguments_of(p)).compile()
    assert isinstance(function, CompiledAttention)
    assert uses_pairs(p)
    check(p, *function(p.query, p.key, p.value), name=name)


def on(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "host", staticmethod(lambda: target))


def test_where_they_are_used(monkeypatch: pytest.MonkeyPatch):
    sizes = ENTRIES["identity"].sizes.but(batch=1, heads=2, kv_heads=2, queries=40, keys=40, head_dim=64, value_dim=64)
    p = problem("identity", sizes, dtype="bf16")
    on(TARGET, monkeypatch)
    assert uses_pairs(p)
    monkeypatch.setenv("ATTNC_BF16_DOT", "off")
    assert not uses_pairs(p)
    monkeypatch.setenv("ATTNC_BF16_DOT", "on")
    assert uses_pairs(p)
    for dtype, head_dim in (("f32", 64), ("f16", 64), ("bf16", 17)):
        assert not uses_pairs(problem("identity", sizes.but(head_dim=head_dim), dtype=dtype))
    for other, pairs in ((AVX512, False), (AARCH64, False), (AARCH64_BF16, True)):
        on(other, monkeypatch)
        assert uses_pairs(p) == pairs


MACHINES = {"avx512": (TARGET, r"vdpbf16ps\s.*%zmm\d+", r"%[xy]mm"), "neon": (AARCH64_BF16, r"bfdot\s+v\d+\.4s", r"fmla")}


@pytest.mark.parametrize("machine", MACHINES)
def test_assembly(machine: str):
    """All accumulators in registers, two steps of depth in one instruction."""
    target, instruction, unwanted = MACHINES[machine]
    assembly = to_assembly(leaves.pairs(target), target, optimise=False)
    name = re.search(r'^"?(attnc\.product\.pairs\.\S+\.12)"?:', assembly, re.MULTILINE)
    assert name is not None
    (loop,) = [loop for loop in loops_of(function_of(assembly, name.group(1))) if re.search(instruction, loop)]
    assert count(instruction, loop) == 24
    assert not count(rf"vmov\S+\s+%zmm\d+, \S*\(|vfmadd|\bst[rp]\s|{unwanted}", loop)
