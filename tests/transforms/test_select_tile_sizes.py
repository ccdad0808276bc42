"""`select-tile-sizes`: sizes follow from the machine and the head dims, and knobs override them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attention_text import TARGET, attention_text
from attnc.analysis.machine import register_tile, tile_sizes
from filechecks import filecheck
from passes import run_passes

NAMES = ("convert-attention-to-online-attention", "select-tile-sizes")
AVX2 = replace(TARGET, vector_bits=256, registers=16, l2_bytes=512 * 1024)


def test_sizes_become_an_attribute():
    text = attention_text("", head_dim=64)
    filecheck(
        run_passes(text, *NAMES), "// CHECK: }) {attnc.tile = {rows = 96 : i64, keys = 256 : i64}} : (tensor<?x?x?x?x64xf32>"
    )
    filecheck(run_passes(text, *NAMES, target=AVX2), "// CHECK: }) {attnc.tile = {rows = 96 : i64, keys = 512 : i64}}")


def test_few_queries_have_chunks_of_keys(monkeypatch: pytest.MonkeyPatch):
    text = attention_text("", head_dim=64).replace("attributes {", "attributes {attnc.few_queries, ")
    filecheck(run_passes(text, *NAMES), "// CHECK: {attnc.tile = {rows = 24 : i64, keys = 256 : i64, chunk = 1024 : i64}}")
    filecheck(run_passes(text, *NAMES, target=AVX2), "// CHECK: {attnc.tile = {rows = 18 : i64, keys = 256 : i64, chunk = 1024")
    monkeypatch.setenv("ATTNC_TILE_CHUNK", "300")
    filecheck(run_passes(text, *NAMES), "// CHECK: {attnc.tile = {rows = 24 : i64, keys = 256 : i64, chunk = 512 : i64}}")


def test_sizes_that_are_there_stay():
    text = str(run_passes(attention_text(""), NAMES[0]))
    text = text.replace("}) : (", "}) {attnc.tile = {rows = 12 : i64, keys = 64 : i64}} : (")
    filecheck(run_passes(text, NAMES[1]), "// CHECK: {attnc.tile = {rows = 12 : i64, keys = 64 : i64}}")


def test_knobs_override(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ATTNC_TILE_ROWS", "24")
    monkeypatch.setenv("ATTNC_TILE_KEYS", "128")
    filecheck(run_passes(attention_text(""), *NAMES), "// CHECK: {attnc.tile = {rows = 24 : i64, keys = 128 : i64}}")


@pytest.mark.parametrize("target", [TARGET, AVX2, replace(TARGET, vector_bits=128), replace(AVX2, vector_bits=128)])
@pytest.mark.parametrize("head_dim", [1, 17, 64, 128, 256, 1024])
@pytest.mark.parametrize("bits", [32, 64])
def test_sizes_fit_the_machine(target, head_dim, bits):
    rows, keys = tile_sizes(target, head_dim, head_dim, bits)
    strip, vectors = register_tile(target, bits)
    assert rows % strip == 0 and 48 <= rows <= 144
    assert 64 <= keys <= 512 and keys & (keys - 1) == 0
    assert keys % (vectors * target.lanes(bits)) == 0
    assert keys == 64 or strip * keys * bits // 8 <= target.l1_bytes // 2
    assert keys == 64 or keys * 2 * head_dim * bits // 8 <= target.l2_bytes // 2
