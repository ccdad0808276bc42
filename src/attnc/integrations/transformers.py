"""`attn_implementation="attnc"` for the models of Hugging Face transformers. Importing this module registers it:

    import attnc.integrations.transformers

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="attnc")
    model.set_attn_implementation("attnc")  # or later

The mask side is in `transformers_masks.py`, the attention side in `transformers_attention.py`. A model that does not ask
`AttentionInterface` for its attention would ignore the name, or fail far from here: it is refused where it is made.
"""

from __future__ import annotations

import functools
from typing import Any

from attnc.errors import TransformersMissingError, UnsupportedModelError

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
except ImportError as error:
    raise TransformersMissingError("attnc.integrations.transformers needs transformers 5, which is not installed") from error

from attnc.integrations.transformers_attention import attention_forward
from attnc.integrations.transformers_masks import ModelMask, model_mask

NAME = "attnc"


def register() -> None:
    """Register "attnc" with transformers' two interfaces, and let models that bypass them be refused. Again: no effect."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, model_mask)
    _guard("get_correct_attn_implementation")
    _guard("set_attn_implementation")


def check_model(model: type[PreTrainedModel]) -> None:
    """Raises `UnsupportedModelError` for models that do not go through `AttentionInterface` (Bloom, Falcon, MPT)."""
    if not model._can_set_attn_implementation():
        raise UnsupportedModelError(
            f"{model.__name__} computes its attention itself, and not through transformers' AttentionInterface"
        )


def _guard(name: str) -> None:
    """Before `PreTrainedModel.<name>(self, requested, …)`, with "attnc" requested, look at the model."""
    original = getattr(PreTrainedModel, name)
    if hasattr(original, "_attnc_guarded"):
        return

    @functools.wraps(original)
    def guarded(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if NAME in args or NAME in kwargs.values():
            check_model(type(self))
        return original(self, *args, **kwargs)

    guarded._attnc_guarded = True  # type: ignore[attr-defined]
    setattr(PreTrainedModel, name, guarded)


register()

__all__ = ["NAME", "ModelMask", "attention_forward", "check_model", "model_mask", "register"]
