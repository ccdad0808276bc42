"""`generate()` under `attn_implementation="attnc"`: the same tokens as sdpa or eager, and nothing compiled for a token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from attnc import programs
from transformers_models import MODELS, Entry, padding, tokens

DECODERS = [name for name, entry in MODELS.items() if entry.generates]
SLIDING = ["mistral", "qwen3", "gemma3", "gpt_oss", "llama4"]


def generate(model: Any, implementation: str, new: int = 14, **options: Any) -> tuple[Tensor, Tensor]:
    """(tokens, scores [new, B, vocabulary]) of greedy generation."""
    model.set_attn_implementation(implementation)
    options = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new, **options}
    found = model.generate(**options, return_dict_in_generate=True, output_scores=True)
    return found.sequences, torch.stack(found.scores)


def check(model: Any, entry: Entry, **options: Any) -> None:
    """Both implementations choose the same tokens, and each choice is clear."""
    ours, our_scores = generate(model, "attnc", **options)
    theirs, their_scores = generate(model, entry.peer, **options)
    best = their_scores.masked_fill(their_scores.isinf(), -1e9).topk(2, dim=-1).values
    margin = (best[..., 0] - best[..., 1]).min()
    error = (our_scores - their_scores).nan_to_num(0.0).abs().max()
    assert margin > 20 * error, "the seed makes a choice that rounding decides: take another"
    assert ours.equal(theirs)
    assert ours[:, -14:].unique().numel() > 2, "it only repeats itself"


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_a_padded_batch(name: str, cache: str):
    """Left padding; local layers' caches slide: 21 + 14 tokens, windows and chunks of 6."""
    entry = MODELS[name]
    options = {"cache_implementation": "static"} if cache == "static" else {}
    check(entry.make(), entry, input_ids=tokens(), attention_mask=padding("left"), **options)


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_encoder_and_decoder(name: str):
    entry = MODELS[name]
    inputs = entry.inputs()
    inputs["decoder_input_ids"] = inputs["decoder_input_ids"][:, :3]
    check(entry.make(), entry, **inputs)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_half_precision(name: str):
    entry = MODELS[name]
    model = entry.make(dtype=torch.bfloat16)
    ours, our_scores = generate(model, "attnc", input_ids=tokens())
    theirs, their_scores = generate(model, "sdpa", input_ids=tokens())
    assert ours[:, :22].equal(theirs[:, :22])
    assert (our_scores[0] - their_scores[0]).abs().nan_to_num(0.0).max() < 0.05 * their_scores[0].nan_to_num(0.0).abs().max()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", *SLIDING])
def test_a_token_compiles_nothing(name: str, cache: str):
    """Offsets, lengths and padding are run-time arguments: after a first text, no other compiles anything."""
    model = MODELS[name].make()
    options = {"cache_implementation": "static"} if cache == "static" else {}
    compiled = 0
    for seed, (length, new) in enumerate(((30, 8), (37, 11), (33, 23))):
        ids = tokens(length, seed)
        generate(model, "attnc", new, input_ids=ids, attention_mask=padding("left", length), **options)
        if seed:
            assert programs.compiled == compiled
        compiled = programs.compiled


@pytest.mark.parametrize("name", ["llama", *SLIDING])
def test_a_text_in_several_pieces(name: str):
    """A prefilled cache, then several tokens at once: queries begin at an offset."""
    entry = MODELS[name]
    model = entry.make(dtype=torch.float64)
    ids = tokens(30)
    pieces = {}
    with torch.no_grad():
        for implementation in ("attnc", entry.peer):
            model.set_attn_implementation(implementation)
            cache = DynamicCache(config=model.config)
            parts = [model(ids[:, a:b], cache=cache).logits for a, b in ((0, 11), (11, 14), (14, 15), (15, 30))]
            pieces[implementation] = torch.cat(parts, 1)
        model.set_attn_implementation("attnc")
        whole = model(ids).logits
    for other in (pieces[entry.peer], whole):
        assert (pieces["attnc"] - other).abs().max() < 1e-10 * other.abs().max()


def test_beams():
    entry = MODELS["llama"]
    model = entry.make()
    found = []
    for implementation in ("attnc", "sdpa"):
        model.set_attn_implementation(implementation)
        found.append(model.generate(tokens(), attention_mask=padding("left"), num_beams=3, max_new_tokens=8, do_sample=False))
    assert found[0].equal(found[1])
