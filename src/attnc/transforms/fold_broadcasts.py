"""Broadcasts of query, key and value become dims that their indexing maps lack.

Before:

    %wide = linalg.generic {maps = [(b, h, g, k, e) -> (b, h, k, e) …]} ins(%k) { yield %in }      repeat_kv, expand
    %r = "iree_linalg_ext.attention"(%q, %wide, …) <{indexing_maps = […, (b, h, g, m, k, e, n) -> (b, h, g, k, e), …]}>

After:

    %r = "iree_linalg_ext.attention"(%q, %k, …) <{indexing_maps = […, (b, h, g, m, k, e, n) -> (b, h, k, e), …]}>

So heads that were repeated are shared again, and keys with a batch of 1 are read for each query's batch. A broadcast stays
where without it a batch dim would be a column of the value: one that neither query nor key has besides.
"""

from __future__ import annotations

from xdsl.dialects.builtin import ModuleOp

from attnc.target import Target
from attnc.transforms.fold_into_attention_operands import BROADCAST, Folding, fold_each

NAME = "fold-broadcasts"


def run(module: ModuleOp, target: Target) -> None:
    """Folds the broadcasts of every attention of the module."""
    fold_each(module, fold)


def fold(folding: Folding) -> bool:
    """Looks through the operands' broadcasts; whether there were any."""
    return folding.peel({BROADCAST})
