"""What a model hands to `attn_implementation="attnc"`: masks, layouts, positions, and what is refused."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    create_causal_mask,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

import attnc
from attnc import errors, flex
from attnc.integrations.transformers import ModelMask, attention_forward, model_mask
from transformers_models import MODELS, padding, tokens

CAUSAL = types.SimpleNamespace(is_causal=True, num_key_value_groups=2)
WHOLE = types.SimpleNamespace(is_causal=False, num_key_value_groups=2)


def inputs(queries: int, keys: int, dtype: torch.dtype = torch.float64, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """query [batch, 4, queries, 8], key and value [batch, 2, keys, 8], as a model's projections lie in memory."""
    torch.manual_seed(3)
    shapes = ((queries, 4), (keys, 2), (keys, 2))
    query, key, value = (torch.randn(batch, length, heads, 8, dtype=dtype).transpose(1, 2) for length, heads in shapes)
    return query, key, value


# -- masks ------------------------------------------------------------------------------------------------------------------
FUNCTIONS = {
    "causal": (causal_mask_function, None),
    "sliding": (sliding_window_causal_mask_function(6), 6),
    "chunked": (chunked_causal_mask_function(5, torch.tensor([3, 0])), 5),
    "whole": (bidirectional_mask_function, None),
    "near": (sliding_window_bidirectional_mask_function(4), 4),
}
POSITIONS: dict[str, dict[str, Any]] = {
    "prefill": {"q_length": 21, "kv_length": 21},
    "static prefill": {"q_length": 21, "kv_length": 32},
    "token": {"q_length": 1, "kv_length": 21, "q_offset": 20},
    "static token": {"q_length": 1, "kv_length": 32, "q_offset": torch.tensor(20)},
    "first static token": {"q_length": 1, "kv_length": 32, "q_offset": 0},
    "piece": {"q_length": 4, "kv_length": 21, "q_offset": 17},
    "sliding token": {"q_length": 1, "kv_length": 6, "q_offset": 20, "kv_offset": 15},
    "sliding piece": {"q_length": 4, "kv_length": 9, "q_offset": 17, "kv_offset": 12},
}


def rows(kind: str, last: int) -> Tensor | None:
    """An attention mask [2, last] of this kind."""
    mask = torch.ones(2, last, dtype=torch.bool)
    if kind == "left":
        mask[0, :3] = False
    elif kind == "right":
        mask[1, -2:] = False
    elif kind == "holes":
        mask[0, 1:2] = mask[0, last // 2] = mask[1, -2:-1] = False
    return None if kind == "none" else mask


@pytest.mark.parametrize("kind", ["none", "ones", "left", "right", "holes"])
@pytest.mark.parametrize("where", POSITIONS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_masks_are_those_of_sdpa(function: str, where: str, kind: str):
    mask_function, local_size = FUNCTIONS[function]
    place: dict[str, Any] = POSITIONS[where]
    causal = function in ("causal", "sliding", "chunked")
    last = int(place.get("q_offset", 0)) + place["q_length"] if causal else place.get("kv_offset", 0) + place["kv_length"]
    skip = place["kv_length"] != 32 or place["q_length"] > 1  # transformers does not allow it for a static cache's token
    arguments: dict[str, Any] = {"batch_size": 2, "mask_function": mask_function, "local_size": local_size, **place}
    arguments |= {"attention_mask": rows(kind, last)}
    arguments |= {"allow_is_causal_skip": causal and skip, "allow_is_bidirectional_skip": not causal}
    module = CAUSAL if causal else WHOLE
    query, key, value = inputs(place["q_length"], place["kv_length"])
    dense = sdpa_mask(**arguments)
    expected, _ = sdpa_attention_forward(module, query, key, value, dense, scaling=0.7)  # type: ignore[arg-type]
    actual, weights = attention_forward(module, query, key, value, model_mask(**arguments), scaling=0.7)  # type: ignore[arg-type]
    assert weights is None and actual.shape == expected.shape
    if dense is not None:  # what sees no key is 0 here
        expected = torch.where(dense.any(-1).transpose(1, 2)[..., None], expected, 0.0)
    assert torch.allclose(actual, expected, rtol=0, atol=1e-13)


def test_masks_with_functions_of_the_user():
    """`or_mask_function`, `and_mask_function`, and tokens of an image, which see each other."""
    model = MODELS["llama"].make(dtype=torch.float64)
    images = torch.full((2, 21), -1)
    images[0, 4:9] = 0
    images[1, 10:15] = 1
    own = {
        "or_mask_function": lambda b, h, q, k: (q < 5) & (k < 5),
        "and_mask_function": lambda b, h, q, k: (q - k) % 3 != 1,
        "block_sequence_ids": images,
    }
    for options in ({name: function} for name, function in own.items()):
        found = {}
        for implementation in ("attnc", "sdpa"):
            model.set_attn_implementation(implementation)
            embeds = torch.zeros(2, 21, 32, dtype=torch.float64)
            mask = create_causal_mask(model.config, embeds, padding("right"), None, **options)
            assert isinstance(mask, ModelMask if implementation == "attnc" else Tensor)
            with torch.no_grad():
                found[implementation] = model(tokens(), attention_mask=mask).logits
        assert torch.allclose(found["attnc"], found["sdpa"], rtol=0, atol=1e-9), options


class Largest(TorchDispatchMode):
    """The most elements that an operation gave."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.numel())
        return out


def test_a_mask_is_never_built():
    """At 40,000 positions a mask of queries × keys would be 1.6 GB; what is made is of one row's size."""
    length, queries = 40_000, 300
    row = torch.ones(1, length, dtype=torch.bool)
    row[0, 1:5] = False
    with Largest() as largest:
        whole = model_mask(1, length, length, attention_mask=row)
        mask = model_mask(1, queries, length, q_offset=length - queries, attention_mask=row)
    assert largest.elements <= length
    assert isinstance(whole, ModelMask) and whole.shape == (1, 1, length, length)
    assert isinstance(mask, ModelMask)
    query, _, _ = inputs(queries, 1, torch.float32, batch=1)
    _, key, value = inputs(1, length, torch.float32, batch=1)
    attention_forward(CAUSAL, query, key, value, mask)  # type: ignore[arg-type]
    assert mask.is_lazy and "kv_num_blocks" not in mask.__dict__


def test_a_mask_is_captured_once_for_all_layers(monkeypatch: pytest.MonkeyPatch):
    from attnc.integrations import transformers_masks

    captured = []
    capture = transformers_masks.capture
    monkeypatch.setattr(transformers_masks, "capture", lambda *mods, **options: captured.append(1) or capture(*mods, **options))
    model = MODELS["gemma3"].make(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
    with torch.no_grad():
        model(tokens(), attention_mask=padding("left"))
    assert len(captured) == 2


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64, torch.float32])
@pytest.mark.parametrize("shape", [(2, 1, 9, 13), (2, 4, 9, 13), (1, 1, 9, 13), (2, 1, 9, 20), (9, 13)])
def test_masks_that_are_tensors(shape: tuple[int, ...], dtype: torch.dtype):
    query, key, value = inputs(9, 13)
    mask = torch.randn(shape) > -0.5
    if dtype is not torch.bool:
        mask = torch.where(mask, torch.randn(shape), torch.finfo(torch.float32).min).to(dtype)
    actual, _ = attention_forward(CAUSAL, query, key, value, mask)  # type: ignore[arg-type]
    dense = mask[..., :13] if dtype is torch.bool else mask[..., :13].double()
    expected, _ = sdpa_attention_forward(CAUSAL, query, key, value, dense)  # type: ignore[arg-type]
    assert torch.allclose(actual, expected, rtol=0, atol=1e-13)


def test_a_block_mask_of_torch():
    query, key, value = inputs(9, 13)
    mask = create_block_mask(lambda b, h, q, k: q + 4 >= k, None, None, 9, 13, device="cpu")
    actual, _ = attention_forward(CAUSAL, query, key, value, mask)  # type: ignore[arg-type]
    causal = torch.ones(9, 13, dtype=torch.bool).tril(4)[None, None]
    expected, _ = sdpa_attention_forward(CAUSAL, query, key, value, causal)  # type: ignore[arg-type]
    assert torch.allclose(actual, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("keyword", [None, True, False])
def test_causal_without_a_mask(length: int, own: bool, keyword: bool | None):
    module = CAUSAL if own else WHOLE
    query, key, value = inputs(length, 13)
    actual, _ = attention_forward(module, query, key, value, None, is_causal=keyword)  # type: ignore[arg-type]
    expected, _ = sdpa_attention_forward(module, query, key, value, None, is_causal=keyword)  # type: ignore[arg-type]
    assert torch.allclose(actual, expected, rtol=0, atol=1e-13)


# -- scores -----------------------------------------------------------------------------------------------------------------
def dense_scores(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.repeat_interleave(2, 1).mT / 8**0.5


@pytest.mark.parametrize("masked", ["none", "lazy", "tensor"])
@pytest.mark.parametrize("extra", ["softcap", "bias", "softcap bias", "sinks", "sinks of each query", "all"])
def test_scores(extra: str, masked: str):
    query, key, value = inputs(9, 9)
    allowed = torch.ones(9, 9, dtype=torch.bool).tril()
    scores = dense_scores(query, key)
    options: dict[str, Any] = {}
    if "softcap" in extra or extra == "all":
        options["softcap"] = 0.8
        scores = 0.8 * torch.tanh(scores / 0.8)
    if "bias" in extra or extra == "all":
        options["position_bias"] = torch.randn(1, 4, 9, 9)
        scores = scores + options["position_bias"].double()
    scores = scores.masked_fill(~allowed, -torch.inf)
    if extra in ("sinks", "all"):
        options["s_aux"] = torch.randn(4)
        scores = torch.cat((scores, options["s_aux"].double().view(1, 4, 1, 1).expand(2, 4, 9, 1)), -1)
    elif "sinks" in extra:
        options["sinks"] = torch.randn(2, 4, 9, 1)
        scores = torch.cat((scores, options["sinks"].double()), -1)
    expected = (scores.softmax(-1)[..., :9] @ value.repeat_interleave(2, 1)).transpose(1, 2)
    mask = {"none": None, "lazy": model_mask(2, 9, 9, allow_is_causal_skip=False), "tensor": allowed[None, None]}[masked]
    actual, _ = attention_forward(CAUSAL, query, key, value, mask, **options)  # type: ignore[arg-type]
    assert torch.allclose(actual, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("queries", [1, 9])
def test_the_output_needs_no_copy(queries: int, contiguous: bool, monkeypatch: pytest.MonkeyPatch):
    query, key, value = inputs(queries, 9, torch.bfloat16)
    if contiguous:
        query = query.contiguous()
    written = []
    run = flex.run
    monkeypatch.setattr(flex, "run", lambda call: written.append(run(call)) or written[0])
    out, _ = attention_forward(CAUSAL, query, key, value, None, s_aux=torch.randn(4))  # type: ignore[arg-type]
    assert out.shape == (2, queries, 4, 8) and out.is_contiguous() and out.dtype is torch.bfloat16
    assert out.data_ptr() == written[0][0].data_ptr()


def test_packed_sequences():
    """Positions that begin anew part the sequences of a row, without an attention mask."""
    for name in ("llama", "gemma3"):
        model = MODELS[name].make(dtype=torch.float64)
        ids = tokens(20)
        positions = torch.cat([torch.arange(n) for n in (7, 9, 4)])[None]
        with torch.no_grad():
            packed = model(ids, position_ids=positions, use_cache=False).logits
            apart = torch.cat([model(ids[:, a:b], use_cache=False).logits for a, b in ((0, 7), (7, 16), (16, 20))], 1)
            model.set_attn_implementation("sdpa")
            theirs = model(ids, position_ids=positions, use_cache=False).logits
        for other in (apart, theirs):
            assert (packed - other).abs().max() < 1e-6 * other.abs().max()


def test_parts_of_a_model_may_differ():
    entry = MODELS["clip"]
    model = entry.make({"text_config": "attnc", "vision_config": "sdpa"})  # type: ignore[arg-type]
    assert model.text_model.config._attn_implementation == "attnc"
    assert model.vision_model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        mixed = model(**entry.inputs()).logits_per_image
        assert torch.allclose(mixed, entry.make("sdpa")(**entry.inputs()).logits_per_image, atol=1e-5)


# -- documents and examples -------------------------------------------------------------------------------------------------
ROOT = Path(__file__).parent.parent


def test_the_example_of_the_docs_runs():
    source = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "transformers.md").read_text(), re.MULTILINE | re.DOTALL)
    scope: dict[str, Any] = {}
    exec(compile(source[0], "transformers.md", "exec"), scope)
    assert scope["model"].config._attn_implementation == "attnc" and scope["tokens"].shape[0] == 2


def test_the_docs_name_the_architectures_of_the_table():
    text = (ROOT / "docs" / "transformers.md").read_text()
    listed = " ".join(text.split("where sdpa cannot do it):")[1].split(".\n")[0].split())
    names = {name.strip().lower().replace(" ", "").replace("-", "") for name in listed.split(",")}
    assert names == {name.replace("_", "") for name in MODELS}


def test_the_example_runs(capsys: pytest.CaptureFixture[str]):
    runpy.run_path(str(ROOT / "examples" / "llama_cpu.py"))["main"](quick=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "float32: 12 of 12 new tokens are the same in both sequences"
    assert sum("times as fast" in line for line in lines) == 4


def test_without_transformers():
    code = "import sys; sys.modules['transformers'] = None; import attnc.integrations.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "TransformersMissingError" in done.stderr and "attnc[transformers]" in done.stderr


# -- what is refused --------------------------------------------------------------------------------------------------------
def test_dropout():
    model = MODELS["llama"].make(attention_dropout=0.1).train()
    with torch.no_grad(), pytest.raises(errors.DropoutError, match=r"LlamaAttention .* 0\.1"):
        model(tokens())
    model.eval()
    with torch.no_grad():
        model(tokens())


@pytest.mark.parametrize("name", ["llama", "bert", "whisper", "t5", "vit", "clip", "gpt2"])
def test_attention_weights(name: str):
    entry = MODELS[name]
    with torch.no_grad(), pytest.raises(errors.AttentionWeightsError, match="eager"):
        entry.make()(**entry.inputs(), output_attentions=True)


def test_attention_weights_by_configuration():
    model = MODELS["llama"].make("eager")
    model.config.output_attentions = True
    model.set_attn_implementation("attnc")
    with torch.no_grad(), pytest.raises(errors.AttentionWeightsError):
        model(tokens())


BYPASS: dict[str, dict[str, Any]] = {
    "BloomConfig": {"hidden_size": 32, "n_layer": 1, "n_head": 2},
    "FalconConfig": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    "MptConfig": {"d_model": 32, "n_layers": 1, "n_heads": 2},
}


@pytest.mark.parametrize("name", BYPASS)
def test_models_that_bypass_the_interface(name: str):
    config = getattr(transformers, name)(vocab_size=61, **BYPASS[name])
    with pytest.raises(errors.UnsupportedModelError, match=r"computes its attention itself(.|\n)*eager"):
        AutoModelForCausalLM.from_config(config, attn_implementation="attnc")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with pytest.raises(errors.UnsupportedModelError):
        model.set_attn_implementation("attnc")
    with pytest.raises(errors.UnsupportedModelError):
        model.set_attn_implementation(attn_implementation="attnc")
    with torch.no_grad():
        model(tokens())


def test_what_the_remedy_says_works_for_falcon():
    config = transformers.FalconConfig(vocab_size=61, **BYPASS["FalconConfig"])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    attnc.stats(clear=True)
    with torch.no_grad():
        expected = model(tokens()).logits
        with attnc.sdpa():
            actual = model(tokens()).logits
    assert "1 taken over" in str(attnc.stats())
    assert torch.allclose(actual, expected, atol=1e-5)


def test_a_mask_is_no_tensor():
    mask = model_mask(1, 9, 9, allow_is_causal_skip=False)
    assert mask is not None and mask.dim() == 4
    for use in (lambda: mask + torch.zeros(9, 9), lambda: mask[:, :, :, :3], lambda: torch.zeros(9, 9) + mask):
        with pytest.raises(errors.UnsupportedModelError, match="no tensor"):
            use()


def test_masks_that_do_not_fit():
    query, key, value = inputs(9, 13)
    for mask, error in (
        (model_mask(2, 9, 9, allow_is_causal_skip=False), errors.BlockMaskError),
        (torch.ones(2, 1, 9, 12, dtype=torch.bool), errors.AttentionMaskError),
        (torch.ones(2, 1, 9, 13, dtype=torch.int64), errors.AttentionMaskError),
        ("causal", errors.ArgumentsError),
    ):
        with pytest.raises(error):
            attention_forward(CAUSAL, query, key, value, mask)  # type: ignore[arg-type]
    with pytest.raises(errors.AttentionMaskError, match="position_bias"):
        attention_forward(CAUSAL, query, key, value, None, position_bias=torch.zeros(1, 3, 9, 13))  # type: ignore[arg-type]
    with pytest.raises(errors.UnsupportedModelError, match="block_indices"):
        attention_forward(nn.Identity(), query, key, value, None, block_indices=torch.zeros(1))
