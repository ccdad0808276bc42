"""What an entry of the zoo is in NumPy's form, and how the oracle calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from zoo.entry import Generator, Sizes


@dataclass(frozen=True)
class NumpyMods:
    """What is passed to `attnc.numpy.attention`.

    `by_scalars`: rows are gathered, so the oracle calls the mods on scalars one by one; others are called once on grids of
    positions, which NumPy's broadcasting makes the same.
    """

    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    by_scalars: bool = False


Build = Callable[[Sizes, Generator], NumpyMods]


def array(tensor: Tensor) -> np.ndarray:
    """A torch tensor's memory as a NumPy array."""
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def tensor(values: np.ndarray) -> Tensor:
    """A NumPy array's memory as a torch tensor."""
    if values.dtype.name == "bfloat16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


class Grid:
    """A NumPy mod as the oracle calls it: on scores [H, q, k] (or none), b, heads [H], queries [q] and keys [k]."""

    def __init__(self, mod: Callable[..., Any], by_scalars: bool = False):
        self.mod = mod
        self.by_scalars = by_scalars

    def over_grids(self, *arguments: Tensor) -> Tensor:
        *scores, b, heads, queries, keys = (argument.numpy() for argument in arguments)
        shape = len(heads), len(queries), len(keys)
        places = heads[:, None, None], queries[None, :, None], keys[None, None, :]
        with np.errstate(all="ignore"):
            if not self.by_scalars:
                result = self.mod(*scores, b, *places)
                return torch.from_numpy(np.array(np.broadcast_to(result, shape)))
            batch = b[()]
            results = [
                self.mod(*(score[place] for score in scores), batch, heads[place[0]], queries[place[1]], keys[place[2]])
                for place in np.ndindex(shape)
            ]
        return torch.from_numpy(np.array(results).reshape(shape))


def enter(register: dict[str, Build]) -> Callable[[Build], Build]:
    """A decorator that puts a builder into a register under its own name."""

    def decorate(build: Build) -> Build:
        register[build.__name__] = build
        return build

    return decorate
