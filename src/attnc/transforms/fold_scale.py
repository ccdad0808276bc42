"""A factor of query or key becomes a factor of the scale.

Before:

    %scaled = linalg.generic ins(%q) { yield %in * %c }     %c: a constant, a number of run time, an element of a 0-d tensor
    %r = "iree_linalg_ext.attention"(%scaled, %k, %v, %scale, …)

After:

    %product = arith.mulf %scale, %c
    %r = "iree_linalg_ext.attention"(%q, %k, %v, %product, …)

Quotients likewise. 16-bit queries lose the rounding that the multiplication meant: scales are applied to scores.
"""

from __future__ import annotations

from typing import cast

from xdsl.dialects.builtin import AnyFloat, ModuleOp

from attnc.analysis.axes import NoMatch
from attnc.analysis.elements import CASTS, Apply, Element, Node, constant
from attnc.target import Target
from attnc.transforms.fold_into_attention_operands import KEY, QUERY, Folding, fold_each
from attnc.transforms.raise_attention_building import converted_tensor
from attnc.transforms.raise_attention_region import RegionWriter, convert_float, is_scalar, nowhere

NAME = "fold-scale"


def run(module: ModuleOp, target: Target) -> None:
    """Folds the factors of query and key of every attention of the module."""
    fold_each(module, fold)


def fold(folding: Folding) -> bool:
    """Looks through the multiplications of query and key by scalars; whether there were any."""
    found = [_fold_operand(folding, place) for place in (QUERY, KEY)]
    return any(found)


def _fold_operand(folding: Folding, place: int) -> bool:
    elements, element = folding.elements, folding.operands[place]
    try:
        node = elements.expand(elements.peel(element))
    except NoMatch:
        return False
    factors: list[tuple[Node, bool]] = []
    while isinstance(node, Apply) and node.op.name in (*CASTS, "arith.mulf", "arith.divf", "arith.negf"):
        if node.op.name in CASTS:
            node = node.operands[0]
            continue
        if node.op.name == "arith.negf":
            return False
        places = (0, 1) if node.op.name == "arith.mulf" else (0,)
        factor = next((node.operands[1 - p] for p in places if is_scalar(elements, node.operands[1 - p])), None)
        if factor is None:
            return False
        factors.append((factor, node.op.name == "arith.divf"))
        node = node.operands[0] if factor is node.operands[1] else node.operands[1]
    if not factors or not isinstance(node, Element):
        return False
    score = folding.op.region.block.args[0].type
    if cast(AnyFloat, node.type).bitwidth < cast(AnyFloat, element.type).bitwidth:
        node = converted_tensor(folding.build, elements, node, element.type)
    elif node.type != element.type:
        return False
    folding.operands[place] = node
    for factor, divides in factors:
        writer = RegionWriter(folding.build, elements, nowhere, nowhere)
        known, scale = constant(elements.bare(factor)), constant(folding.scale_node())
        if known is not None and scale is not None and not (divides and known == 0):
            number = scale / known if divides else scale * known
            folding.scale = folding.build.constant(number, score, "scale")
        else:
            value = convert_float(folding.build, writer.write(elements.head(factor)), score)
            folding.scale = folding.build.binary("divf" if divides else "mulf", folding.scale, value, "scale")
    return True
