"""All folds into attention operations, again and again until nothing is left to fold.

    generalize-linalg, raise-attention  →  fold-slices, fold-masks, fold-scale, fold-casts, fold-transposes, fold-broadcasts,
                                           fold-reshapes, fold-consumers, fold-unit-dims

Each fold looks through one kind of producer, or consumer, of an attention; one may uncover what another folds: heads that
are repeated (a broadcast, then a merging reshape) after a transpose, a cast between two of them. See each pass for before
and after.
"""

from __future__ import annotations

from collections.abc import Callable

from xdsl.dialects.builtin import ModuleOp

from attnc.target import Target
from attnc.transforms import (
    fold_broadcasts,
    fold_casts,
    fold_consumers,
    fold_masks,
    fold_reshapes,
    fold_scale,
    fold_slices,
    fold_transposes,
    fold_unit_dims,
)
from attnc.transforms.fold_into_attention_operands import fold_each

NAME = "fold-into-attention"

FOLDS: dict[str, Callable[[ModuleOp], bool]] = {
    fold_slices.NAME: fold_slices.fold_slices,
    fold_masks.NAME: fold_masks.fold_masks,
    **{
        pass_.NAME: lambda module, fold=pass_.fold: fold_each(module, fold)
        for pass_ in (fold_scale, fold_casts, fold_transposes, fold_broadcasts, fold_reshapes)
    },
    fold_consumers.NAME: fold_consumers.fold_consumers,
    fold_unit_dims.NAME: fold_unit_dims.fold_unit_dims,
}
"""The folds in their order; each says whether it found anything."""

PASSES = ("generalize-linalg", "raise-attention", NAME)
"""What a module of the linalg stage goes through before its attentions become kernels."""


def run(module: ModuleOp, target: Target) -> None:
    """Folds what can be folded into every attention of the module."""
    found = True
    while found:
        found = sum(fold(module) for fold in FOLDS.values()) > 0
