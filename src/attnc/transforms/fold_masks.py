"""Masks and biases that are cheap to compute are computed where they are used, in the region.

Before:

    %lower = linalg.generic { %i >= %j ? 0 : -inf }                      a mask made of positions
    %wide = linalg.generic ins(%lower) { yield %in }                     broadcast over batch and heads
    %r = "iree_linalg_ext.attention"(%q, %k, %v, %scale, %wide, %init) ({ ^bb0(%s): yield %s })

After:

    %r = "iree_linalg_ext.attention"(%q, %k, %v, %scale, %init) ({
    ^bb0(%s: f32):
      %i = iree_linalg_ext.index 2, %j = iree_linalg_ext.index 3
      %mask = arith.cmpi sge, %i, %j
      %masked = arith.select %mask, %s, %minus_infinity
      yield %masked })

A mask operand becomes part of the region; tensors that it or the region reads are looked through: transposes, broadcasts and
reshapes always, elementwise operations where they are cheap. A mask that is -inf somewhere ends as a select, whose blocks
can be classified.
"""

from __future__ import annotations

from xdsl.dialects.builtin import ModuleOp

from attnc.analysis.elements import Apply, Element, Node
from attnc.dialects.linalg_ext import AttentionOp, OnlineAttentionOp
from attnc.target import Target
from attnc.transforms.convert_attention_to_online_attention import convert_mask_operand
from attnc.transforms.fold_into_attention_operands import Folding, RegionNodes, fold_each
from attnc.transforms.raise_attention_region import RegionWriter, nowhere

NAME = "fold-masks"


def run(module: ModuleOp, target: Target) -> None:
    """Folds masks of every attention of the module."""
    fold_masks(module)


def fold_masks(module: ModuleOp) -> bool:
    """`run`; whether there were any."""
    found = False
    for op in list(module.walk()):
        if isinstance(op, AttentionOp | OnlineAttentionOp) and op.mask is not None:
            convert_mask_operand(op)
            found = True
    return fold_each(module, fold) or found


def fold(folding: Folding) -> bool:
    """Whether the region reads a tensor that can be looked through."""
    nodes = RegionNodes(folding)
    writer = RegionWriter(folding.build, folding.elements, nowhere, nowhere, pairs=folding.pairs)
    folding.rewrites_region = any(writer.may_expand(read) for read in _reads(nodes.of(nodes.last)))
    return folding.rewrites_region


def _reads(root: Node) -> list[Element]:
    found: list[Element] = []
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Element):
            found.append(node)
        elif isinstance(node, Apply):
            waiting.extend(node.operands)
    return found
