"""`loss.backward()` under `attn_implementation="attnc"`: the gradients of each architecture are those of sdpa or eager."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from transformers_models import MODELS, Entry, padding, tokens


def gradients(entry: Entry, model) -> dict[str, Tensor]:
    """The gradients of some loss of a model's outputs, by the weights' names."""
    inputs = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in entry.inputs().items()}
    if entry.generates:  # queries without a key, which left padding has, and a chunk of padding alone, are NaN in eager
        inputs["attention_mask"] = padding("none" if "Llama4" in entry.model else "right")
    outputs = model(**inputs)
    found = outputs.logits if "logits" in outputs else outputs.logits_per_image
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=found.dtype)
    model.zero_grad()
    (found * weights).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_backward(name: str):
    entry = MODELS[name]
    model = entry.make("attnc", torch.float64)
    ours = gradients(entry, model)
    model.set_attn_implementation(entry.peer)
    theirs = gradients(entry, model)
    assert ours.keys() == theirs.keys() and len(ours) > 10
    largest = max(grad.abs().max() for grad in theirs.values())
    tolerance = 1e-5 if name == "gemma2" else 1e-12  # eager takes the softmax in f32
    for weight, grad in theirs.items():
        assert grad.isfinite().all()
        assert (ours[weight] - grad).abs().max() <= tolerance * largest, weight


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_training_step(name: str):
    """In training mode, with checkpoints, in f32: the loss falls as it does with the peer."""
    entry = MODELS[name]
    losses = {}
    for implementation in ("attnc", entry.peer):
        model = entry.make(implementation).train()
        model.gradient_checkpointing_enable()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        losses[implementation] = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(tokens(), labels=tokens(), use_cache=False).loss
            loss.backward()
            optimizer.step()
            losses[implementation].append(loss.item())
    assert losses["attnc"][-1] < losses["attnc"][0] - 0.01
    assert losses["attnc"] == pytest.approx(losses[entry.peer], rel=1e-4)


def test_only_sinks_are_trained():
    """What is frozen needs no backward pass of attention; the sinks' gradient comes of lse alone."""
    found = {}
    for implementation in ("attnc", "eager"):
        model = MODELS["gpt_oss"].make(implementation, torch.float64).requires_grad_(False)
        sinks = model.model.layers[-1].self_attn.sinks.requires_grad_()
        model(tokens()).logits.square().sum().backward()
        found[implementation] = sinks.grad
    assert torch.allclose(found["attnc"], found["eager"], rtol=1e-9)
