"""Models of transformers with tiny random configurations: one entry an architecture, and inputs that exercise its attention.

Nothing is downloaded. Weights are drawn so that attention matters: at transformers' own scale (0.02) all scores are alike, and
a wrong mask would hardly show in the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

import attnc.integrations.transformers  # noqa: F401 - registers "attnc"

VOCABULARY = 61
BATCH, LENGTH = 2, 21
# Tied, the last token's own embedding would decide the next one: a model that only repeats itself.
COMMON = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
DECODER = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
ENCODER = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 4,
}


def tokens(length: int = LENGTH, seed: int = 0) -> Tensor:
    """Random tokens [B, length], none of them special."""
    return torch.randint(3, VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(seed))


def padding(side: str, length: int = LENGTH) -> Tensor:
    """An attention mask [B, length] that leaves some places of the first sequence out."""
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[0, {"none": slice(0), "left": slice(7), "right": slice(length - 5, length)}[side]] = 0
    return mask


def _text(side: str) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"input_ids": tokens(), "attention_mask": padding(side)}


def _seq2seq() -> dict[str, Tensor]:
    return {"input_ids": tokens(), "attention_mask": padding("right"), "decoder_input_ids": tokens(13, seed=1)}


def _speech() -> dict[str, Tensor]:
    return {"input_features": _normal(BATCH, 8, 48), "decoder_input_ids": tokens(13, seed=1)}


def _image() -> dict[str, Tensor]:
    return {"pixel_values": _normal(BATCH, 3, 24, 24)}


def _clip() -> dict[str, Tensor]:
    return {**_image(), **_text("right")()}


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


@dataclass(frozen=True)
class Entry:
    """A model class of transformers, its configuration, and what it is called with."""

    model: str
    config: str
    options: dict[str, Any]
    inputs: Callable[[], dict[str, Tensor]]
    peer: str = "sdpa"
    nested: dict[str, str] = field(default_factory=dict)

    def make(
        self, implementation: str = "attnc", dtype: torch.dtype = torch.float32, experts: str = "eager", **options: Any
    ) -> Any:
        """The model, its weights always the same."""
        options = {**self.options, **options}
        for name, config in self.nested.items():
            options[name] = getattr(transformers, config)(**options[name]).to_dict()
        config = getattr(transformers, self.config)(**options)
        torch.manual_seed(7)
        model = getattr(transformers, self.model)._from_config(
            config,
            attn_implementation=implementation,
            experts_implementation=experts,  # eager takes f64 too
        )
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    embedding = "embed" in name or "wte" in name or "shared" in name
                    scale = 0.3 if embedding else 1.5 / parameter[0].numel() ** 0.5
                    parameter.normal_(0.0, scale, generator=generator)
                elif "norm" not in name and "ln" not in name:
                    parameter.normal_(0.0, 0.3, generator=generator)
        return model.eval().to(dtype)

    @property
    def generates(self) -> bool:
        """Whether it is a decoder alone, which continues a text."""
        return self.model.endswith("CausalLM") or self.model.endswith("LMHeadModel")


def _decoder(name: str, **options: Any) -> Entry:
    # eager makes NaN in f64 of queries that see no key, which left padding has.
    peer = options.pop("peer", "sdpa")
    inputs = _text("left" if peer == "sdpa" else "right")
    return Entry(f"{name}ForCausalLM", f"{name}Config", {**DECODER, **options}, inputs, peer)


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

MODELS: dict[str, Entry] = {
    "llama": _decoder("Llama"),
    "mistral": _decoder("Mistral", sliding_window=6),
    "mixtral": _decoder("Mixtral", sliding_window=None, **EXPERTS),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _decoder("Qwen3", use_sliding_window=True, max_window_layers=1, sliding_window=6),
    "gemma2": _decoder("Gemma2", peer="eager", query_pre_attn_scalar=8, attn_logit_softcapping=2.0, **SLIDING),
    "gemma3": Entry("Gemma3ForCausalLM", "Gemma3TextConfig", {**DECODER, "query_pre_attn_scalar": 8, **SLIDING}, _text("left")),
    "phi3": _decoder("Phi3", num_key_value_heads=4),
    "gpt_oss": _decoder("GptOss", peer="eager", **SLIDING, **EXPERTS),
    "llama4": Entry(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**DECODER, "intermediate_size_mlp": 48, "attention_chunk_size": 6, "no_rope_layers": [1, 0], **EXPERTS},
        _text("left"),
    ),
    "gpt2": Entry(
        "GPT2LMHeadModel", "GPT2Config", {**COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}, _text("left")
    ),
    "opt": Entry(
        "OPTForCausalLM",
        "OPTConfig",
        {
            **COMMON,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 32,
        },
        _text("left"),
    ),
    "bert": Entry("BertForMaskedLM", "BertConfig", ENCODER, _text("right")),
    "modernbert": Entry(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**ENCODER, "global_attn_every_n_layers": 2, "local_attention": 6, "cls_token_id": 1, "sep_token_id": 2},
        _text("right"),
    ),
    "t5": Entry(
        "T5ForConditionalGeneration",
        "T5Config",
        {**COMMON, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 1},
        _seq2seq,
    ),
    "whisper": Entry(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **COMMON,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "num_mel_bins": 8,
            "max_source_positions": 24,
            "max_target_positions": 64,
            "decoder_start_token_id": 1,
        },
        _speech,
    ),
    "vit": Entry("ViTForImageClassification", "ViTConfig", {**VISION, "num_labels": 7}, _image),
    "clip": Entry(
        "CLIPModel",
        "CLIPConfig",
        {"text_config": ENCODER, "vision_config": VISION, "projection_dim": 16},
        _clip,
        nested={"text_config": "CLIPTextConfig", "vision_config": "CLIPVisionConfig"},
    ),
}
