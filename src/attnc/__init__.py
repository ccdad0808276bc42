"""attnc: a compiler for attention. `flex_attention` with your own score and mask mods, as one native kernel."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from attnc.integrations.torch_import import register_with_torch

if TYPE_CHECKING:
    from attnc.capture.block_mask import BlockMask as BlockMask
    from attnc.capture.block_mask import and_masks as and_masks
    from attnc.capture.block_mask import create_block_mask as create_block_mask
    from attnc.capture.block_mask import or_masks as or_masks
    from attnc.compile_program import compile as compile
    from attnc.errors import AttncError as AttncError
    from attnc.flex import flex_attention as flex_attention
    from attnc.integrations.stats import stats as stats
    from attnc.integrations.torch_flex import enable_torch_flex as enable_torch_flex
    from attnc.integrations.torch_sdpa import sdpa as sdpa
    from attnc.lowered import Lowered as Lowered
    from attnc.lowered import from_text as from_text
    from attnc.lowered import lower as lower
    from attnc.scaled_dot_product import scaled_dot_product_attention as scaled_dot_product_attention

__version__ = "0.1.0"

# Public name -> its module, which is imported when the name is first asked for: `import attnc` needs neither torch nor xdsl.
_PUBLIC = {
    "flex_attention": "attnc.flex",
    "scaled_dot_product_attention": "attnc.scaled_dot_product",
    "sdpa": "attnc.integrations.torch_sdpa",
    "enable_torch_flex": "attnc.integrations.torch_flex",
    "stats": "attnc.integrations.stats",
    "compile": "attnc.compile_program",
    "lower": "attnc.lowered",
    "from_text": "attnc.lowered",
    "Lowered": "attnc.lowered",
    "BlockMask": "attnc.capture.block_mask",
    "create_block_mask": "attnc.capture.block_mask",
    "and_masks": "attnc.capture.block_mask",
    "or_masks": "attnc.capture.block_mask",
    "AttncError": "attnc.errors",
}

__all__ = [
    "AttncError",
    "BlockMask",
    "Lowered",
    "__version__",
    "and_masks",
    "compile",
    "create_block_mask",
    "enable_torch_flex",
    "flex_attention",
    "from_text",
    "lower",
    "or_masks",
    "scaled_dot_product_attention",
    "sdpa",
    "stats",
]


def __getattr__(name: str) -> Any:
    if name == "numpy":  # the front end for NumPy's arrays, a module
        return importlib.import_module("attnc.numpy")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'attnc' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


register_with_torch()
