"""Merged dims of query, key and value are taken apart: each part is a dim of the domain.

Before:

    %k3 = tensor.collapse_shape %k4 [[0, 1], [2], [3]] : tensor<2x8x?x64xf32> into tensor<16x?x64xf32>
    %r = "iree_linalg_ext.attention"(%q3, %k3, …) <{indexing_maps = […, (b, m, k, e, n) -> (b, k, e), …]}>

After:

    %q4 = tensor.expand_shape %q3 [[0, 1], [2], [3]] output_shape [2, 8, …]                        a view
    %r4 = "iree_linalg_ext.attention"(%q4, %k4, …) <{indexing_maps = […, (b, h, m, k, e, n) -> (b, h, k, e), …]}>
    %r = tensor.collapse_shape %r4 [[0, 1], [2], [3]]                                               a view

Taking apart is always a view, merging is not; and other folds get at what stands before the merging. Where sizes that are only
known at run time do not tell how the other operands are made of the parts, the reshape stays.
"""

from __future__ import annotations

from xdsl.dialects.builtin import ModuleOp

from attnc.target import Target
from attnc.transforms.fold_into_attention_operands import RESHAPE, Folding, fold_each

NAME = "fold-reshapes"


def run(module: ModuleOp, target: Target) -> None:
    """Folds the merging reshapes of every attention of the module."""
    fold_each(module, fold)


def fold(folding: Folding) -> bool:
    """Looks through the operands' merging reshapes, and through views that undo one another; whether there were any."""
    found = [folding.peel({RESHAPE}), folding.drop_views()]
    return any(found)
