"""The zoo's mods as NumPy code, on the same captures: what `attnc.numpy.attention` is tried on.

Without the entries that are a BlockMask: that is torch's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from oracle import Problem
from zoo import ENTRIES, Sizes, problem
from zoo_numpy.entry import Grid, NumpyMods, array, tensor
from zoo_numpy.masks import MASKS
from zoo_numpy.scores import SCORES

BUILDERS = {**MASKS, **SCORES}
WITHOUT = {name for name in ENTRIES if name.startswith("block_")} - {"block_diffusion"}
"""Entries of the zoo that need a BlockMask."""


@dataclass(frozen=True)
class NumpyProblem:
    """One call of `attnc.numpy.attention`; `judged` is the same one for the oracle, `torch` the zoo's own entry."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    mods: NumpyMods
    scale: float | None
    judged: Problem
    torch: Problem


def numpy_problem(
    name: str, sizes: Sizes | None = None, layout: str = "contiguous", dtype: str = "f32", seed: int = 0
) -> NumpyProblem:
    """An entry of the zoo in NumPy's form, on the zoo's inputs."""
    theirs = problem(name, sizes, layout, dtype, seed)
    sizes = sizes or ENTRIES[name].sizes
    if dtype == "f64":
        sizes = sizes.but(wide=torch.float64)
    mods = BUILDERS[name](sizes, torch.Generator().manual_seed(seed))
    score_mod, mask_mod = (mod and Grid(mod, mods.by_scalars) for mod in (mods.score_mod, mods.mask_mod))
    judged = Problem(theirs.query, theirs.key, theirs.value, score_mod, mask_mod, scale=theirs.scale)  # type: ignore[arg-type]
    query, key, value = (array(tensor) for tensor in (theirs.query, theirs.key, theirs.value))
    return NumpyProblem(query, key, value, mods, theirs.scale, judged, theirs)


__all__ = ["BUILDERS", "MASKS", "SCORES", "WITHOUT", "Grid", "NumpyMods", "NumpyProblem", "array", "numpy_problem", "tensor"]
