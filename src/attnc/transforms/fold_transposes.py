"""Transposes of query, key and value become permuted indexing maps.

Before:

    %kt = linalg.generic {maps = [(b, k, h, e) -> (b, h, k, e) …]} ins(%k) { yield %in }      a permute
    %r = "iree_linalg_ext.attention"(%q, %kt, …) <{indexing_maps = [(b, h, m, k, e, n) -> …, (…) -> (b, h, k, e), …]}>

After:

    %r = "iree_linalg_ext.attention"(%q, %k, …) <{indexing_maps = [(b, h, m, k, e, n) -> …, (…) -> (b, k, h, e), …]}>

Views between the two are looked through: a transpose of merged dims is one of the dims that they are merged from. Run
generalize-linalg first, which makes `linalg.transpose` a generic.
"""

from __future__ import annotations

from xdsl.dialects.builtin import ModuleOp

from attnc.target import Target
from attnc.transforms.fold_into_attention_operands import TRANSPOSE, Folding, fold_each

NAME = "fold-transposes"


def run(module: ModuleOp, target: Target) -> None:
    """Folds the transposes of every attention of the module."""
    fold_each(module, fold)


def fold(folding: Folding) -> bool:
    """Looks through the operands' transposes; whether there were any."""
    return folding.peel({TRANSPOSE})
