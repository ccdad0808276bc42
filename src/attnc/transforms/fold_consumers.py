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

from typing import cast

from xdsl.dialects import tensor
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.dialects.linalg import ops as linalg
from xdsl.ir import Operation, SSAValue

from attnc.analysis.axes import Axis, NoMatch, split_axis
from attnc.analysis.elements import groups_of, is_layout, maps_of
from attnc.dialects.linalg_ext import AttentionOp
from attnc.target import Target
from attnc.transforms.fold_into_attention_operands import TRANSPOSE, Folding, fold_each, step_kind

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
    while (user := _only_user(value)) is not None:
        try:
            axes = _axes_after(user, value, axes)
        except NoMatch:
            break
        if axes is None:
            break
        value = user.results[0]
        if isinstance(user, linalg.GenericOp):
            folding.result, folding.out, folding.changed_out = value, tuple(axes), True
            found = True
    return found


def _only_user(value: SSAValue) -> Operation | None:
    uses = list(value.uses)
    return uses[0].operation if len(uses) == 1 else None


def _axes_after(user: Operation, value: SSAValue, axes: tuple[Axis, ...]) -> tuple[Axis, ...] | None:
    """The axes of what a user makes of a tensor over `axes`; None for what is no rearrangement."""
    if isinstance(user, tensor.ExpandShapeOp):
        shape = cast(TensorType, user.result.type).get_shape()
        result: list[Axis] = []
        for axis, group in zip(axes, groups_of(user), strict=True):
            result += split_axis(axis, [shape[dim] if shape[dim] >= 0 else (user.result, dim) for dim in group])
        return tuple(result)
    if isinstance(user, tensor.CollapseShapeOp):
        return tuple(tuple(atom for dim in group for atom in axes[dim]) for group in groups_of(user))
    if isinstance(user, tensor.CastOp):
        return axes
    if isinstance(user, linalg.GenericOp) and is_layout(user) and user.inputs[0] is value:
        if step_kind(user.results[0]) == TRANSPOSE:
            source, target = maps_of(user)
            loops = {dim: axis for dim, axis in zip(source, axes, strict=True) if dim is not None}
            return tuple(loops.get(dim, ()) if dim is not None else () for dim in target)
    return None
