"""What rearranges the result of an attention becomes the result's own indexing map.

Before:

    %r = "iree_linalg_ext.attention"(…) : … -> tensor<2x8x?x64xf32>
    %t = linalg.generic {maps = [(b, m, h, n) -> (b, h, m, n) …]} ins(%r) { yield %in }                a transpose
    %o = tensor.collapse_shape %t [[0], [1], [2, 3]]

After:

    %t = "iree_linalg_ext.attention"(…) <{indexing_maps = […, (b, h, m, k, e, n) -> (b, m, h, n)]}>
    %o = tensor.collapse_shape %t [[0], [1], [2, 3]]

so it is written straight into its final layout; likewise the results of elementwise operations that end an attention: the
division after an online_attention, and what becomes of single rows. A reshape that takes merged dims apart becomes dims of the
domain where a transpose follows; one that merges dims at the end stays, for it is a view of what was just written. The result
must have no other use.
"""

from __future__ import annotations

from typing import cast

from xdsl.dialects import tensor
from xdsl.dialects.builtin import AffineMapAttr, ModuleOp, TensorType
from xdsl.dialects.linalg import ops as linalg
from xdsl.ir import Block, Operation
from xdsl.ir.affine import AffineDimExpr, AffineMap

from attnc.analysis.axes import Atom, Axis, NoMatch, flat
from attnc.analysis.elements import is_elementwise, is_layout, maps_of
from attnc.dialects.building import Builder
from attnc.dialects.linalg_ext import AttentionOp, OnlineAttentionOp
from attnc.target import Target
from attnc.transforms.fold_into_attention_operands import Folding, axes_after, fold_each, only_user
from attnc.transforms.raise_attention_building import collapsed, erase_unused, insert_before

NAME = "fold-consumers"


def run(module: ModuleOp, target: Target) -> None:
    """Folds what rearranges the result of every attention of the module."""
    fold_consumers(module)


def fold_consumers(module: ModuleOp) -> bool:
    """`run`; whether there was anything."""
    found = fold_each(module, fold)
    for op in list(module.walk()):
        if isinstance(op, AttentionOp | OnlineAttentionOp):
            ends = _users(op)
            ends += [user for first in ends if isinstance(first, linalg.GenericOp) for user in _users(first)]
            for end in ends:
                if isinstance(end, linalg.GenericOp) and end.parent is not None and len(end.results) == 1 and _fold_end(end):
                    erase_unused(end.parent)
                    found = True
    return found


def _users(op: Operation) -> list[Operation]:
    return list(dict.fromkeys(use.operation for result in op.results for use in result.uses))


def _fold_end(end: linalg.GenericOp) -> bool:
    """Lets an elementwise operation that ends an attention write its result as it is rearranged after it."""
    if not is_elementwise(end) or is_layout(end) or None in maps_of(end)[-1] or end.body.block.args[-1].uses:
        return False
    value = end.results[0]
    shape = cast(TensorType, value.type).get_shape()
    loops = maps_of(end)[-1]
    dims: list[Axis] = [(Atom(size if size >= 0 else (end.outputs[0], place)),) for place, size in enumerate(shape)]
    axes: tuple[Axis, ...] | None = tuple(dims)
    last: tuple[Operation, tuple[Axis, ...]] | None = None
    try:
        while axes is not None and (user := only_user(value)) is not None and user.results:
            axes = axes_after(user, value, axes)
            value = user.results[0]
            if axes is not None and isinstance(user, linalg.GenericOp):
                last = user, axes
    except NoMatch:
        pass
    if last is None or any(axis[0].parts is not None for axis in dims):
        return False
    user, axes = last
    order = [dims.index((atom,)) for axis in axes for atom in flat(axis)]
    if sorted(order) != list(range(len(dims))) or any(not axis for axis in axes):
        return False  # a unit dim came or went
    build = Builder(Block())
    type_ = cast(TensorType, end.results[0].type)
    sizes = [build.add(tensor.DimOp(end.outputs[0], build.constant(place)), "size") for place in order if shape[place] < 0]
    init = build.add(tensor.EmptyOp(sizes, TensorType(type_.element_type, [shape[place] for place in order])))
    out = AffineMap(len(end.iterator_types), 0, tuple(AffineDimExpr(cast(int, loops[place])) for place in order))
    maps = [*list(end.indexing_maps)[:-1], AffineMapAttr(out)]
    new = linalg.GenericOp(end.inputs, [init], end.body.clone(), maps, end.iterator_types, [init.type])
    result = build.insert(new, end.results[0].name_hint).results[0]
    wanted = cast(TensorType, user.results[0].type)
    if any(len(axis) > 1 for axis in axes):
        result = collapsed(build, result, [len(axis) for axis in axes])
    if result.type != wanted:
        result = build.add(tensor.CastOp(result, wanted))
    insert_before(build.block, end)
    user.results[0].replace_all_uses_with(result)
    return True


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
