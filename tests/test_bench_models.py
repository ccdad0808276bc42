"""The bench suite `models` measures what it says. No clock is judged."""

from __future__ import annotations

import math

import pytest

from attnc.bench import models, report
from attnc.bench.models import ModelCase


@pytest.mark.parametrize(("kind", "dtype"), [("prefill", "f32"), ("decode", "bf16")])
def test_a_measurement(kind: str, dtype: str):
    found = models.measure(kind, 40, dtype, models.IMPLEMENTATIONS, 3, 0.0, models.TINY)
    assert list(found) == ["attnc", "sdpa", "eager"]
    for one in found.values():
        assert len(one["whole"]) == len(one["attention"]) == 3
        assert all(0 < attention < whole for attention, whole in zip(one["attention"], one["whole"], strict=True))
        assert one["difference"] <= models.TOLERANCE[dtype]
    assert found["sdpa"]["difference"] == 0
    assert found["attnc"]["difference"] > 0, "it should not be sdpa that ran"


def test_a_decoding_step_leaves_the_cache_as_it_was():
    model = models.make_model("f32", models.TINY)
    step = models.make_step(model, "decode", 40)
    import torch

    with torch.inference_mode():
        assert step().equal(step())


def answer(**changed: float) -> dict:
    one = {"whole": [0.2, 0.1, 0.3], "attention": [0.02, 0.01, 0.03], "bytes": 1 << 20, "difference": 0.0, **changed}
    return {"attnc": one, "sdpa": {**one, "attention": [0.08, 0.09, 0.1]}}


def test_figures():
    case = ModelCase("prefill", 100, "f32", faster=4.0)
    whole, attention, speed, memory, *_ = models.of_case(case, answer(), ("attnc", "sdpa"))
    assert whole.median == 0.2 and speed.median == pytest.approx(500) and memory.values == [1 << 20]
    assert attention.must == pytest.approx(0.09 / 4) and attention.met
    assert report.figure_cells(speed)[2] == "500 tokens/s (333–1e+03)"
    wrong = models.of_case(case, answer(difference=math.inf), ("attnc", "sdpa"))
    assert all(not figure.values and figure.status.startswith("WRONG") for figure in wrong[:4])
    assert {figure.status for figure in models.of_case(case, "FAILED: out of memory", ("sdpa",))} == {"FAILED: out of memory"}


def test_the_cases_are_those_of_the_targets():
    demanded = {(case.kind, case.length, case.dtype): case.faster for case in models.cases() if case.faster}
    assert demanded[("decode", 8192, "f32")] == 4.0 and demanded[("decode", 8192, "bf16")] == 10.0
    assert demanded[("prefill", 4096, "f32")] == 1.2


def test_only_what_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(models, "measured", lambda case, names, *_, **__: asked.append((str(case), names)) or "not now")
    models.figures(1, 3, 0.1, lambda text: None, full=True, only="prefill f32", peers=("sdpa",))
    assert [names for _, names in asked] == [["attnc", "sdpa"]] * 3
    asked.clear()
    models.figures(1, 3, 0.1, lambda text: None, full=True, only="16384 tokens")
    assert [names for _, names in asked] == [["attnc", "sdpa"]] * 2
