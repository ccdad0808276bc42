"""Tuning: the search with a fake timer, the stored file, and that the target record, kernels and cache keys follow it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import attnc
from attnc import tuning
from attnc.analysis.machine import few_query_tile_sizes, tile_sizes
from attnc.errors import DtypeError, TuningError
from attnc.lowered import CompiledAttention
from attnc.runtime import tuning_file
from attnc.runtime.cache import make_key
from attnc.runtime.tuning_file import TunedTile
from attnc.target import Target
from oracle import check
from zoo import Sizes, problem

SHAPE = tuning.ShapeClass(64, 64)
BARE = Target("x86_64-unknown-linux-gnu", "haswell", "", 256, 16)
TILE = TunedTile(16, 16, 32, False, 24, 48)


def test_candidates_begin_with_the_model():
    for target in (BARE, replace(BARE, vector_bits=512, registers=32)):
        for shape in (SHAPE, tuning.ShapeClass(128, 96, "f64"), tuning.ShapeClass(128, 128, "bf16", few_queries=True)):
            tiles = tuning.candidates(target, shape)
            sizes = target, shape.head_dim, shape.value_dim, shape.element_bits
            if shape.few_queries:
                assert (tiles[0].rows, tiles[0].keys, tiles[0].chunk) == few_query_tile_sizes(*sizes)
            else:
                assert (tiles[0].rows, tiles[0].keys) == tile_sizes(*sizes)
            assert len(set(tiles)) == len(tiles) > 8
            assert all(tile.is_valid and tile.chunk % tile.keys == 0 for tile in tiles)


def test_candidates_do_not_depend_on_what_is_stored():
    stored = replace(BARE, tuned=(TunedTile(64, 64, 32, False, 24, 48),))
    assert tuning.candidates(stored, SHAPE) == tuning.candidates(BARE, SHAPE)


class Timer:
    """A clock that knows how long each tile takes; every third measurement is disturbed."""

    def __init__(self, seconds):
        self.seconds, self.calls = seconds, []

    def __call__(self, tile: TunedTile) -> float:
        self.calls.append(tile)
        return self.seconds(tile) * (3 if len(self.calls) % 3 == 0 else 1)


def test_search_finds_the_fastest():
    tiles = tuning.candidates(BARE, SHAPE)
    wanted = next(tile for tile in tiles if (tile.rows, tile.keys) == (144, 128))
    timer = Timer(lambda tile: 1 + abs(tile.rows - 144) / 100 + abs(tile.keys - 128) / 500)
    lines: list[str] = []
    assert tuning.search(tiles, timer, rounds=9, report=lines.append) == wanted
    assert len(lines) == len(tiles) and sum("the model's" in line for line in lines) == 1
    assert len(timer.calls) - 2 * 19 < 9 * len(tiles)  # slow ones dropped out
    assert timer.calls.count(tiles[0]) == 9 + 19  # the model's did not, and met the best one in a duel


def test_search_keeps_the_model_unless_others_are_clearly_faster():
    tiles = tuning.candidates(BARE, SHAPE)
    assert tuning.search(tiles, lambda tile: 1.0 if tile is tiles[0] else 0.98) is None
    assert tuning.search(tiles, lambda tile: 1.0 if tile is tiles[0] else 0.9) == tiles[1]


def test_luck_does_not_win_the_duel():
    tiles = tuning.candidates(BARE, SHAPE)
    calls = iter(range(10**6))
    assert tuning.search(tiles, lambda tile: 0.8 if tile is tiles[3] and next(calls) < tuning.ROUNDS else 1.0) is None


def test_stored_sizes_belong_to_the_target_record(cache_directory: Path, monkeypatch: pytest.MonkeyPatch):
    before = Target.host()
    assert before.tuned == ()
    keys = {make_key(before)}
    path = tuning.store([TILE, TunedTile(64, 64, 32, True, 12, 64, 512)])
    assert Path(path) == cache_directory / tuning_file.NAME
    host = Target.host()
    assert host.machine == before.machine
    assert tile_sizes(host, 16, 16) == (24, 48) and tile_sizes(host, 16, 16, 64) == tile_sizes(before, 16, 16, 64)
    assert few_query_tile_sizes(host, 64, 64) == (12, 64, 512) and tile_sizes(host, 64, 64) == tile_sizes(before, 64, 64)
    keys.add(make_key(host))
    tuning.store([replace(TILE, rows=36)])  # in place of the first, beside the second
    assert tile_sizes(Target.host(), 16, 16) == (36, 48) and len(Target.host().tuned) == 2
    keys.add(make_key(Target.host()))
    assert len(keys) == 3
    monkeypatch.setenv("ATTNC_THREADS", "7")
    assert make_key(Target.host()) in keys
    tuning.forget()
    assert Target.host() == before


def test_kernels_use_stored_sizes_and_knobs_override_them(cache_directory: Path, monkeypatch: pytest.MonkeyPatch):
    tuning.store([TILE])
    p = problem("alibi_causal", Sizes(heads=2, kv_heads=2, queries=70, keys=130, head_dim=16, value_dim=16))
    lowered = attnc.lower(p.query, p.key, p.value, p.score_mod, mask_mod=p.mask_mod)
    assert "attnc.tile = {rows = 24 : i64, keys = 48 : i64}" in lowered.stages["select-tile-sizes"]
    function = lowered.compile()
    assert isinstance(function, CompiledAttention)
    check(p, function(p.query, p.key, p.value))
    monkeypatch.setenv("ATTNC_TILE_KEYS", "64")
    lowered = attnc.lower(p.query, p.key, p.value, p.score_mod, mask_mod=p.mask_mod)
    assert "attnc.tile = {rows = 24 : i64, keys = 64 : i64}" in lowered.stages["select-tile-sizes"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "[{}]",
        '{"MACHINE": 3}',
        '{"MACHINE": [3, {}, {"rows": 1}]}',
        '{"MACHINE": [{"head_dim": 16, "value_dim": 16, "element_bits": 32, "few_queries": false, "rows": 0, "keys": 64}]}',
        '{"MACHINE": [{"head_dim": 16, "value_dim": 16, "element_bits": 32, "few_queries": false, "rows": 9, "keys": 17}]}',
        '{"MACHINE": [{"head_dim": 16, "value_dim": 16, "element_bits": 32, "few_queries": 0, "rows": 9, "keys": 1e99}]}',
    ],
)
def test_a_damaged_file_says_nothing(content: str, cache_directory: Path):
    cache_directory.mkdir(mode=0o700)
    (cache_directory / tuning_file.NAME).write_text(content.replace("MACHINE", Target.host().machine))
    assert Target.host().tuned == ()
    tuning.store([TILE])
    assert Target.host().tuned == (TILE,)


def test_other_machines_keep_theirs(cache_directory: Path):
    tuning_file.write("another", [TILE])
    assert Target.host().tuned == ()
    tuning.store([replace(TILE, rows=48)])
    assert tuning_file.read("another") == (TILE,)
    assert set(json.loads((cache_directory / tuning_file.NAME).read_text())) == {"another", Target.host().machine}


def test_without_a_cache_nothing_is_stored(cache_directory: Path, monkeypatch: pytest.MonkeyPatch):
    tuning.store([TILE])
    monkeypatch.setenv("ATTNC_CACHE", "off")
    assert Target.host().tuned == ()
    with pytest.raises(TuningError, match="no cache directory"):
        tuning.store([TILE])


def test_what_cannot_be_tuned(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(DtypeError):
        tuning.tune(tuning.ShapeClass(64, 64, "f8"))
    monkeypatch.setenv("ATTNC_TILE_ROWS", "96")
    with pytest.raises(TuningError, match="ATTNC_TILE_ROWS"):
        tuning.tune(SHAPE)


def test_a_trial_runs_the_sizes_it_is_asked_for(cache_directory: Path):
    trial = tuning.Trial(Target.host(), tuning.ShapeClass(16, 24))
    for tile in (TunedTile(16, 24, 32, False, 24, 64), TunedTile(16, 24, 32, False, 96, 256)):
        assert trial.measure(tile) > 0 and trial.measure(tile) > 0
    assert len(trial.compiled) == 2
