"""A dim of size 1 that query, key and value were all given is taken back.

Before:

    %q4 = tensor.expand_shape %q [[0, 1], [2], [3]] … : tensor<8x?x64xf32> into tensor<1x8x?x64xf32>      unsqueeze, likewise %k4, %v4
    %r = "iree_linalg_ext.attention"(%q4, %k4, %v4, …) : … -> tensor<1x8x?x64xf32>

After:

    %r3 = "iree_linalg_ext.attention"(%q, %k, %v, …) : … -> tensor<8x?x64xf32>
    %r = tensor.expand_shape %r3 [[0, 1], [2], [3]] … : tensor<8x?x64xf32> into tensor<1x8x?x64xf32>

and a collapse_shape that takes the dim from the result again leaves `%r3` itself.
"""  # noqa: E501

from __future__ import annotations

from xdsl.dialects import tensor
from xdsl.dialects.builtin import ModuleOp

from attnc.target import Target
from attnc.transforms.fold_into_attention_operands import VIEW, Folding, fold_each, step_kind

NAME = "fold-unit-dims"


def run(module: ModuleOp, target: Target) -> None:
    """Folds the unit dims of every attention of the module."""
    fold_unit_dims(module)


def fold_unit_dims(module: ModuleOp) -> bool:
    """`run`; whether there were any."""
    found = fold_each(module, fold)
    for op in list(module.walk()):
        if isinstance(op, tensor.CollapseShapeOp) and isinstance(op.src.owner, tensor.ExpandShapeOp):
            if op.src.owner.src.type == op.result.type and op.reassociation == op.src.owner.reassociation:
                op.result.replace_all_uses_with(op.src.owner.src)
                for dead in (op, op.src.owner):
                    if not dead.results[0].uses:
                        dead.detach()
                        dead.erase()
    return found


def fold(folding: Folding) -> bool:
    """Looks through an expand_shape of each operand that only adds dims of size 1; whether all had one."""
    added = []
    for element in folding.operands:
        owner = element.value.owner
        if not isinstance(owner, tensor.ExpandShapeOp) or step_kind(element.value) != VIEW or not _only_units(owner):
            return False
        added.append(folding.elements.peel_once(element))
    folding.operands, folding.changes_domain = added, True
    return True


def _only_units(op: tensor.ExpandShapeOp) -> bool:
    groups = [[int(dim.value.data) for dim in group.data] for group in op.reassociation.data]
    shape = op.result.type.get_shape()
    return all(sum(shape[dim] != 1 for dim in group) <= 1 for group in groups)
