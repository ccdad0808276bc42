"""Query, key and value that were widened from a 16-bit float are read as they were, and a result that is rounded is written so.

Before:

    %q32 = linalg.generic ins(%q) { extf %in : f16 to f32 }             likewise %k32, %v32
    %r32 = "iree_linalg_ext.attention"(%q32, %k32, %v32, %scale, %init32) : … -> tensor<…xf32>
    %r = linalg.generic ins(%r32) { truncf %in : f32 to f16 }

After:

    %r = "iree_linalg_ext.attention"(%q, %k, %v, %scale, %init) : … -> tensor<…xf16>

Products sum in f32 in both. It takes all three operands, of one narrow type.
"""

from __future__ import annotations

from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.linalg import ops as linalg
from xdsl.ir import SSAValue

from attnc.analysis.axes import Axis, NoMatch
from attnc.analysis.elements import Apply, Element
from attnc.dialects.linalg_ext import AttentionOp
from attnc.target import Target
from attnc.transforms.fold_into_attention_operands import Folding, axes_after, fold_each, only_user
from attnc.transforms.raise_attention_region import HALVES

NAME = "fold-casts"


def run(module: ModuleOp, target: Target) -> None:
    """Folds the casts of operands and result of every attention of the module."""
    fold_each(module, fold)


def fold(folding: Folding) -> bool:
    """Looks through the operands' widening, and through the result's rounding; whether there was either."""
    found = [_fold_operands(folding), _fold_result(folding)]
    return any(found)


def _fold_operands(folding: Folding) -> bool:
    narrow = [_narrow(folding, element) for element in folding.operands]
    types = {element.type for element in narrow if element is not None}
    if None in narrow or len(types) != 1 or all(new is old for new, old in zip(narrow, folding.operands, strict=True)):
        return False
    folding.operands = [element for element in narrow if element is not None]
    return True


def _narrow(folding: Folding, element: Element) -> Element | None:
    """The element of a 16-bit tensor that it is, if it is."""
    if element.type in HALVES:
        return element
    elements = folding.elements
    try:
        node = elements.expand(elements.peel(element))
    except NoMatch:
        return None
    if isinstance(node, Apply) and node.op.name == "arith.extf" and isinstance(node.operands[0], Element):
        before = node.operands[0]
        return before if before.type in HALVES else None
    return None


def _fold_result(folding: Folding) -> bool:
    """Follows the result through what rearranges it to where it is rounded."""
    if not isinstance(folding.op, AttentionOp):
        return False
    value, axes = folding.result, folding.out
    while (user := only_user(value)) is not None:
        if isinstance(user, linalg.GenericOp) and _rounds(folding, user, value, axes):
            folding.result, folding.out, folding.changed_out = user.results[0], axes, True
            return True
        try:
            axes = axes_after(user, value, axes)
        except NoMatch:
            return False
        if axes is None:
            return False
        value = user.results[0]
    return False


def _rounds(folding: Folding, user: linalg.GenericOp, value: SSAValue, axes: tuple[Axis, ...]) -> bool:
    """Whether a generic rounds each element of `value`, where it stands, to the operands' type."""
    if len(user.results) != 1 or len(user.inputs) != 1:
        return False
    elements = folding.elements
    try:
        node = elements.expand(elements.at(user.results[0], axes))
    except NoMatch:
        return False
    if not isinstance(node, Apply) or node.op.name != "arith.truncf" or node.operands[0] is not elements.at(value, axes):
        return False
    return all(operand.type == node.type for operand in folding.operands)
