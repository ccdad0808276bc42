"""What rearranges the result of an attention becomes the result's own indexing map.

Before:

    %r = "iree_linalg_ext.attention"(…) : … -> tensor<2x8x?x64xf32>
    %t = linalg.generic {maps = [(b, m, h, n) -> (b, h, m, n) …]} ins(%r) { yield %in }                a transpose
    %o = tensor.collapse_shape %t [[0], [1], [2, 3]]

After:

    %t = "iree_linalg_ext.attention"(…) <{indexing_maps = […, (b, h, m, k, e, n) -> (b, m, h, n)]}>
    %o = tensor.collapse_shape %t [[0], [1], [2, 3]]

so it is written straight into its final layout. A reshape that takes merged dims apart becomes dims of the domain where a
transpose follows; one that merges dims at the end stays, for it is a view of what was just written. The result must have no
other use.
"""

from __future__ import annotations

from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.linalg import ops as linalg

from attnc.analysis.axes import NoMatch
from attnc.dialects.linalg_ext import AttentionOp
from attnc.target import Target
from attnc.transforms.fold_into_attention_operands import Folding, axes_after, fold_each, only_user

NAME = "fold-consumers"


def run(module: ModuleOp, target: Target) -> None:
    """Folds what rearranges the result of every attention of the module."""
    fold_each(module, fold)


def fold(folding: Folding) -> bool:
    """Follows the result to its last transpose, through reshapes; whether there is one."""
    if not isinstance(folding.op, AttentionOp):
        return False
    value, axes = folding.result, folding.out
    found = False
    while (user := only_user(value)) is not None:
        try:
            axes = axes_after(user, value, axes)
        except NoMatch:
            break
        if axes is None:
            break
        value = user.results[0]
        if isinstance(user, linalg.GenericOp):
            folding.result, folding.out, folding.changed_out = value, tuple(axes), True
            found = True
    return found
