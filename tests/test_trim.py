"""Strips of a PARTIAL block compute only the columns that live for them, and none where all are dead."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import attnc
from oracle import Problem, check

DOCUMENTS = torch.tensor([0] * 30 + [1] * 5 + [2] * 170 + [3] * 12 + [4] * 400)
DOCUMENTS = torch.cat([DOCUMENTS, torch.full((1000 - len(DOCUMENTS),), 5)])
WIDTHS = torch.tensor([3, 200, 40, 0])

MASKS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "window": lambda b, h, q, k: (q >= k) & (q - k < 70),
    "narrow": lambda b, h, q, k: (q - k).abs() < 1,
    "apart": lambda b, h, q, k: (k - q > 290) | (k < 10),
    "documents": lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k],
    "by head": lambda b, h, q, k: (q - k).abs() < WIDTHS[h],
    "few rows": lambda b, h, q, k: (q > 290) & (k < 40),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_masks(name: str, kv_heads: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, length, 64, generator=generator).to(dtype)
        for heads, length in ((4, 301), (kv_heads, 530), (kv_heads, 530))
    )
    out, lse = attnc.flex_attention(query, key, value, enable_gqa=True, return_lse=True, mask_mod=MASKS[name])
    check(Problem(query, key, value, None, MASKS[name]), out, lse, name=name)


def test_strips_are_asked_about():
    """Beside the block and its pieces for the whole task, the classifier is asked about a strip's rows."""
    query = torch.zeros(1, 2, 300, 64)
    text = attnc.lower(query, query, query, mask_mod=MASKS["window"]).code.llvm
    work = text[text.index("@attention.work") :]
    strips = work[work.index("strip") :]
    assert len(re.findall(r"call i32 @classify", strips)) >= 3
    few = torch.zeros(1, 2, 4, 64)
    text = attnc.lower(few, query, query, mask_mod=MASKS["window"]).code.llvm
    assert text.count("trim.start.") <= work.count("trim.start.")
