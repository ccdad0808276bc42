"""`attnc doctor`: its self-test can fail, and the tile model's choices are those of the target."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnc import flex
from attnc.cli.doctor import facts, self_test, tile_model
from attnc.runtime.tuning_file import TunedTile
from attnc.target import Target


def test_the_self_test_runs_all_cases_when_it_has_time():
    ((line, works),) = self_test(seconds=1e9)
    assert works and "5 of 5 cases" in line


def test_the_self_test_ends_when_its_time_is_up():
    ((line, works),) = self_test(seconds=0.0)
    assert works and "1 of 5 cases" in line


def _zeros(query: torch.Tensor, *rest: object, **more: object) -> torch.Tensor:
    return torch.zeros_like(query)


def _raises(*rest: object, **more: object) -> torch.Tensor:
    raise RuntimeError("no memory")


@pytest.mark.parametrize("broken, words", [(_zeros, "is WRONG: off by"), (_raises, "FAILED: RuntimeError: no memory")])
def test_the_self_test_can_fail(monkeypatch: pytest.MonkeyPatch, broken, words: str):
    monkeypatch.setattr(flex, "flex_attention", broken)
    ((line, works),) = self_test()
    assert not works and words in line


def test_the_tile_model_tells_what_was_tuned():
    target = Target("x86_64-unknown-linux-gnu", "znver3", "+avx2,+fma", 256, 16)
    plain = dict(tile_model(target))
    assert plain["tiles of f32, f16, bf16"].startswith("6 rows × 2 vectors") and "tuned" not in str(plain)
    tuned = tile_model(replace(target, tuned=(TunedTile(64, 64, 32, False, 48, 512),)))
    assert tuned[1] == ("   head dim 64", tuned[1][1]) and tuned[1][1].startswith("48 queries × 512 keys (tuned);")


@pytest.mark.parametrize(
    "knob, value, words",
    [
        ("ATTNC_THREADS", "foo", "not a whole number"),
        ("ATTNC_CACHE_SIZE", "much", "not a number of bytes"),
        ("ATTNC_VECTOR_BITS", "x", "not a whole number"),
        ("ATTNC_CACHE", "maybe", "neither on nor off"),
    ],
)
def test_a_bad_knob_is_shown(monkeypatch: pytest.MonkeyPatch, knob: str, value: str, words: str):
    monkeypatch.setenv(knob, value)
    shown = facts()
    assert f"invalid: {knob}={value!r}: {words}" in next(text for name, text in shown if name == knob)
    assert shown[-1][0] == "command"
