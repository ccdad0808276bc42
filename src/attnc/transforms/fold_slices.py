"""Slices come before transposes and casts, so that these are folded and the slice is a view of what was given.

Before:

    %t = linalg.generic {maps = [(a, b, s, h, e) -> (b, s, a, h, e) …]} ins(%qkv) { yield %in }      a permute
    %q = tensor.extract_slice %t[0, 0, 0, 0, 0] [1, 2, 9, 8, 64] [1, 1, 1, 1, 1]      of packed query, key, value

After:

    %s = tensor.extract_slice %qkv[0, 0, 0, 0, 0] [2, 9, 1, 8, 64] [1, 1, 1, 1, 1]
    %q = linalg.generic {maps = [(a, b, s, h, e) -> (b, s, a, h, e) …]} ins(%s) { yield %in }

It is done for slices that an attention reads, and only if everything that reads the transpose is a slice.
"""

from __future__ import annotations

from typing import cast

from xdsl.dialects import tensor
from xdsl.dialects.builtin import DYNAMIC_INDEX, ModuleOp, TensorType
from xdsl.dialects.linalg import ops as linalg
from xdsl.ir import Operation, SSAValue

from attnc.analysis.elements import CASTS, has_simple_maps, maps_of
from attnc.dialects.linalg_ext import AttentionOp, OnlineAttentionOp
from attnc.target import Target
from attnc.transforms.raise_attention_building import erase_unused

NAME = "fold-slices"


def run(module: ModuleOp, target: Target) -> None:
    """Moves the slices that attentions of the module read."""
    fold_slices(module)


def fold_slices(module: ModuleOp) -> bool:
    """`run`; whether there were any."""
    found = False
    for op in list(module.walk()):
        if isinstance(op, AttentionOp | OnlineAttentionOp):
            for slice_ in _slices_before(op):
                while (moved := _moved(slice_)) is not None:
                    slice_, found = moved, True
            if found and op.parent is not None:
                erase_unused(op.parent)
    return found


def _slices_before(op: Operation) -> list[tensor.ExtractSliceOp]:
    """The slices that are read by an operation, through generics and reshapes."""
    found: list[tensor.ExtractSliceOp] = []
    seen: set[SSAValue] = set()
    waiting = list(op.operands)
    while waiting:
        value = waiting.pop()
        owner = value.owner
        if value in seen or not isinstance(owner, Operation) or not isinstance(value.type, TensorType):
            continue
        seen.add(value)
        if isinstance(owner, tensor.ExtractSliceOp):
            found.append(owner)
        elif isinstance(owner, linalg.GenericOp | tensor.ExpandShapeOp | tensor.CollapseShapeOp | tensor.CastOp):
            waiting.extend(owner.operands)
    return found


def _moved(slice_: tensor.ExtractSliceOp) -> tensor.ExtractSliceOp | None:
    """The slice of what the sliced generic reads, in the place of the slice of its result."""
    generic = slice_.source.owner
    if not isinstance(generic, linalg.GenericOp) or not _rearranges(generic):
        return None
    if not all(isinstance(use.operation, tensor.ExtractSliceOp) for use in slice_.source.uses):
        return None
    kept = cast(TensorType, slice_.result.type).get_shape()
    if len(kept) != len(cast(TensorType, slice_.source.type).get_shape()):
        return None
    source, target = maps_of(generic)
    places = [target.index(dim) for dim in source]  # for each dim of the input that of the result
    offsets, sizes, strides = (_mixed(slice_, name) for name in ("offsets", "sizes", "strides"))
    input_ = generic.inputs[0]
    type_ = TensorType(cast(TensorType, input_.type).element_type, [kept[place] for place in places])
    placed = [[part[place] for place in places] for part in (offsets, sizes, strides)]
    before = tensor.ExtractSliceOp(input_, placed[0], placed[1], placed[2], type_)
    before.result.name_hint = slice_.result.name_hint
    dynamic = [size for size, known in zip(sizes, kept, strict=True) if known < 0]
    empty = tensor.EmptyOp([size for size in dynamic if isinstance(size, SSAValue)], slice_.result.type)
    after = linalg.GenericOp(
        [before.result],
        [empty.tensor],
        generic.body.clone(),
        generic.indexing_maps,
        generic.iterator_types,
        [empty.tensor.type],
    )
    assert slice_.parent is not None
    slice_.parent.insert_ops_before([before, empty, after], slice_)
    after.results[0].name_hint = slice_.result.name_hint
    slice_.result.replace_all_uses_with(after.results[0])
    slice_.detach()
    slice_.erase()
    return before


def _rearranges(generic: linalg.GenericOp) -> bool:
    """Whether it transposes, or casts, its only input, every dim of which is one of the result."""
    if len(generic.inputs) != 1 or len(generic.results) != 1 or not isinstance(generic.inputs[0].type, TensorType):
        return False
    inner = list(generic.body.block.ops)
    if not has_simple_maps(generic) or any(op.name not in CASTS for op in inner[:-1]) or generic.body.block.args[1].uses:
        return False
    source, target = maps_of(generic)
    return None not in source and sorted(map(str, source)) == sorted(map(str, target)) and None not in target


def _mixed(slice_: tensor.ExtractSliceOp, name: str) -> list[SSAValue | int]:
    """Offsets, sizes or strides: a number, or a value."""
    dynamic = iter(getattr(slice_, name))
    static = getattr(slice_, f"static_{name}").get_values()
    return [next(dynamic) if number == DYNAMIC_INDEX else int(number) for number in static]
