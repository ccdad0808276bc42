"""The zoo: mods, shapes, layouts and dtypes that every part of attnc is tried on."""

from __future__ import annotations

from dataclasses import replace

import torch

from oracle import Problem
from zoo.entry import Entry, Mods, Sizes
from zoo.layouts import LAYOUTS
from zoo.masks import MASKS
from zoo.scores import SCORES
from zoo.shapes import SHAPES

DTYPES = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
ENTRIES: dict[str, Entry] = {**MASKS, **SCORES}

__all__ = ["DTYPES", "ENTRIES", "LAYOUTS", "MASKS", "SCORES", "SHAPES", "Entry", "Mods", "Sizes", "problem"]


def problem(entry: str, sizes: Sizes | None = None, layout: str = "contiguous", dtype: str = "f32", seed: int = 0) -> Problem:
    """An entry of the zoo with inputs: all from one seed."""
    sizes = sizes or ENTRIES[entry].sizes
    if dtype == "f64":
        sizes = sizes.but(wide=torch.float64)
    mods = ENTRIES[entry].mods(sizes, seed)
    inputs = LAYOUTS[layout](sizes, torch.Generator().manual_seed(seed + 1), DTYPES[dtype])
    if mods.prepare is not None:
        inputs = mods.prepare(*inputs)
    result = Problem(*inputs, score_mod=mods.score_mod, mask_mod=mods.mask_mod, block_mask=mods.block_mask)
    return replace(result, scale=0.3) if entry == "times_two" else result
