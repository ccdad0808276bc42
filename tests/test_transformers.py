"""`attn_implementation="attnc"`: the logits of each architecture are those of sdpa or eager."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnc import flex
from transformers_models import MODELS, Entry

EPS = torch.finfo(torch.float32).eps


def logits(entry: Entry, model, dtype: torch.dtype) -> Tensor:
    """What a model makes of the entry's inputs, without padded places."""
    inputs = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in entry.inputs().items()}
    with torch.no_grad():
        outputs = model(**inputs)
    found = outputs.logits if "logits" in outputs else outputs.logits_per_image
    if found.dim() == 3 and "decoder_input_ids" not in inputs:
        found = found[inputs["attention_mask"].bool()]
    return found


@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, monkeypatch: pytest.MonkeyPatch):
    entry = MODELS[name]
    calls = []
    run = flex.run
    monkeypatch.setattr(flex, "run", lambda call: calls.append(call) or run(call))

    def ours_and_theirs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        model = entry.make("attnc", dtype)
        ours = logits(entry, model, dtype)
        assert calls and {call.query.dtype for call in calls} == {dtype}
        calls.clear()
        model.set_attn_implementation(entry.peer)
        theirs = logits(entry, model, dtype)
        assert not calls
        return ours, theirs

    exact, reference = ours_and_theirs(torch.float64)
    # eager takes the softmax of f64 scores in f32, but for sdpa and GPT-OSS
    tolerance = 1e-5 if name == "gemma2" else 1e-11
    largest = reference.abs().max()
    assert (exact - reference).abs().max() <= tolerance * largest
    ours, theirs = ours_and_theirs(torch.float32)
    error, allowed = ((found.double() - exact).abs().max() for found in (ours, theirs))
    assert error <= 1.5 * allowed + 4 * EPS * max(1.0, largest)
