"""AMX leaves: their instructions as plain functions against NumPy, and in assembly as what they are. No machine at hand has run
the instructions themselves, so a knob keeps them off."""

from __future__ import annotations

import ctypes
import itertools
import re
from dataclasses import replace

import numpy as np
import pytest

import attnc
import plain_tiles
from attnc import target as target_module
from attnc.analysis.machine import has_amx, register_tile
from attnc.codegen.llvm import leaves, leaves_amx, leaves_pairs
from attnc.codegen.llvm.compile import to_assembly, to_object
from attnc.runtime.objects import LoadedObjects
from attnc.target import Target
from needs import needs_isa
from test_assembly import AVX512, count
from test_bf16_dot import TARGET, bits_of, panels_of, value_of
from test_leaves import guarded, unaligned

AMX = replace(AVX512, cpu="sapphirerapids", features=TARGET.features + ",+amx-tile,+amx-bf16")
ROWS, VECTORS = register_tile(AMX, 32)
COLUMNS = VECTORS * 16
LEAVES = (leaves_amx.dot_rows_amx, leaves_amx.dot_accumulate_amx, leaves_amx.pack_rows_in_pairs)


@pytest.fixture(scope="module")
def library():
    """The leaves with plain functions, compiled for a machine with AVX-512 alone."""
    made = [leaf(AMX) for leaf in LEAVES]
    names = [symbol for symbol, _ in made]
    text = plain_tiles.replaced(leaves.join([text for _, text in made]))
    objects = LoadedObjects([to_object(text, TARGET, optimise=False)], names)

    def call(number: int, *arguments: object) -> None:
        types = [ctypes.c_void_p if a is None or isinstance(a, np.ndarray) else ctypes.c_int64 for a in arguments]
        function = ctypes.CFUNCTYPE(None, *types)(objects.addresses[names[number]])
        function(*[a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments])

    return call


@needs_isa("avx512bf16")
@pytest.mark.parametrize("depth", [2, 18, 32, 64, 80, 128])
def test_products(library, depth: int):
    rng = np.random.default_rng(depth)
    for rows, panel_count in itertools.product([1, 12, 25], [1, 2, 3]):
        keys, padded = panel_count * COLUMNS, -(-rows // ROWS) * ROWS
        left = np.full((padded, depth + 6), 0x7FC0, np.uint16)
        left[:rows, :depth] = bits_of(rng.uniform(-1, 1, (rows, depth)))
        right = bits_of(rng.uniform(-1, 1, (keys, depth)))
        out = unaligned(np.full((padded, keys + 5), 7, np.float32))
        panels = unaligned(panels_of(right))
        library(0, unaligned(left), (depth + 6) // 2, panels, panels[0].size, out, keys + 5, panel_count, rows, depth // 2)
        expected = value_of(left[:rows, :depth]).astype(np.float64) @ value_of(right).astype(np.float64).T
        np.testing.assert_allclose(out[:rows, :keys], expected, rtol=0, atol=1e-7 * 4 * (depth + 4))
        assert (out[:, keys:] == 7).all()


def pairs_of_rows(values: np.ndarray) -> np.ndarray:
    """Bits [depth, columns] as words [panels, depth / 2, COLUMNS]."""
    depth, columns = values.shape
    padded = np.zeros((depth + depth % 2, -(-columns // COLUMNS) * COLUMNS), np.uint16)
    padded[:depth, :columns] = values
    words = padded[::2].astype(np.uint32) | (padded[1::2].astype(np.uint32) << 16)
    return np.ascontiguousarray(words.reshape(words.shape[0], -1, COLUMNS).transpose(1, 0, 2))


@needs_isa("avx512bf16")
@pytest.mark.parametrize("depth", [1, 2, 31, 32, 64, 77, 256])
@pytest.mark.parametrize("scaled", [False, True])
def test_weights_keep_sixteen_bits(library, depth: int, scaled: bool):
    rng = np.random.default_rng(depth)
    for rows, columns in itertools.product([1, 12, 13], [17, 64, 96]):
        padded = -(-rows // ROWS) * ROWS
        left = np.full((padded, depth + 3), np.nan, np.float32)
        left[:rows, :depth] = rng.uniform(0, 1, (rows, depth))
        right = bits_of(rng.uniform(-1, 1, (depth, columns)))
        panels = unaligned(pairs_of_rows(right))
        width = panels.shape[0] * COLUMNS
        acc = unaligned(rng.uniform(-1, 1, (padded, width + 1)).astype(np.float32))
        before, scale = acc.astype(np.float64), rng.uniform(0, 1, padded).astype(np.float32)
        operands = (guarded(left), depth + 3, panels, panels[0].size, acc, width + 1)
        library(1, *operands, scale if scaled else None, depth, rows, panels.shape[0])
        factor = scale[:rows, None].astype(np.float64) if scaled else 1.0
        expected = factor * before[:rows, :columns] + left[:rows, :depth].astype(np.float64) @ value_of(right)
        # Each weight is off by at most 2^-17 of itself, where one bf16 would be off by 2^-9.
        allowed = 2.0**-17 * (left[:rows, :depth] @ np.abs(value_of(right))) + 1e-7 * 4 * (depth + 4)
        assert (np.abs(acc[:rows, :columns] - expected) <= allowed).all()
        assert (acc[:, width:] == before[:, width:]).all()


@needs_isa("avx512bf16")
@pytest.mark.parametrize("columns", [1, 16, 40, 64])
@pytest.mark.parametrize("unit", [True, False])
def test_packing(library, columns: int, unit: bool):
    rng = np.random.default_rng(columns)
    for valid, rows in ((0, 4), (7, 7), (8, 8), (5, 12)):
        by_row, by_column = (columns + 1, 1) if unit else (1, valid + 2)
        extent = (valid - 1) * by_row + (columns - 1) * by_column + 1 if valid else 1
        source = rng.integers(0, 1 << 16, extent, dtype=np.uint16)
        padded = np.zeros((rows, columns), np.uint16)
        if valid:
            padded[:valid] = source[np.arange(valid)[:, None] * by_row + np.arange(columns)[None, :] * by_column]
        expected = pairs_of_rows(padded)
        size = expected[0].size
        destination = unaligned(np.full((expected.shape[0], size + 2), 7, np.uint32))
        library(2, guarded(source), by_row, by_column, destination, size + 2, valid, rows, columns)
        np.testing.assert_array_equal(destination[:, :size].reshape(expected.shape), expected)
        assert (destination[:, size:] == 7).all()


def test_assembly():
    """Four results, a step of depth: one tile of the left operand, four of the right, four products."""
    for leaf, tiles in ((leaves_amx.dot_rows_amx, 1), (leaves_amx.dot_accumulate_amx, 2)):
        assembly = to_assembly(leaf(AMX)[1], AMX, optimise=False)
        for pattern in (r"ldtilecfg", r"tilestored\s+%tmm3", r"tilerelease"):
            assert re.search(pattern, assembly), pattern
        # For two panels and for one, with whole tiles and with the rest.
        assert count(r"tdpbf16ps\s+%tmm[57], %tmm[46], %tmm[0-3]", assembly) == tiles * 2 * (4 + 2)
        assert count(r"tileloadd\s.*%tmm[46]", assembly) == tiles * 4
        assert not re.search(r"^\s+call", assembly, re.MULTILINE)


def test_where_they_are_used(monkeypatch: pytest.MonkeyPatch):
    """The knob and the kernel's permission decide; a machine without both has no AMX as far as attnc is concerned."""
    assert has_amx(AMX) and not has_amx(TARGET)
    assert ".amx." in leaves_pairs.symbols(AMX)[0] and ".amx." not in leaves_pairs.symbols(TARGET)[0]
    asked = []

    def permitted() -> bool:
        asked.append(True)
        return len(asked) > 1

    monkeypatch.setattr(target_module, "_tiles_permitted", permitted)
    assert not has_amx(target_module.with_permitted_tiles(AMX, wanted=False)) and not asked
    assert not has_amx(target_module.with_permitted_tiles(AMX, wanted=True)) and len(asked) == 1
    assert has_amx(target_module.with_permitted_tiles(AMX, wanted=True))
    assert target_module.with_permitted_tiles(TARGET, wanted=True) == TARGET and len(asked) == 2


def test_kernels_call_them(monkeypatch: pytest.MonkeyPatch):
    import torch

    query = torch.zeros(1, 2, 40, 64, dtype=torch.bfloat16)
    monkeypatch.setattr(Target, "host", staticmethod(lambda: AMX))
    lowered = attnc.lower(query, query, query)
    assert "dot_rows.amx" in lowered.code.llvm
    assert any("tdpbf16ps" in text for text in lowered.code.leaves)
