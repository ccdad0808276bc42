"""Views of tensors as operations: dimensions dropped, added, reordered, merged and split. None of them moves data by itself."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeAlias, cast

from xdsl.dialects import tensor
from xdsl.dialects.builtin import (
    DYNAMIC_INDEX,
    ArrayAttr,
    DenseArrayBase,
    IntegerAttr,
    TensorType,
    i64,
)
from xdsl.dialects.linalg import ops as linalg
from xdsl.ir import SSAValue

from attnc.dialects.building import Builder

Size: TypeAlias = "int | SSAValue"
"""The size of a dimension: known, or a value of type index."""


def static(sizes: Sequence[Size]) -> list[int]:
    """Sizes as a type has them."""
    return [size if isinstance(size, int) else DYNAMIC_INDEX for size in sizes]


def tensor_type(sizes: Sequence[Size], element) -> TensorType:
    """The tensor type of `sizes`."""
    return TensorType(element, static(sizes))


def sizes_of(value: SSAValue, build: Builder) -> list[Size]:
    """The sizes of a tensor; those that its type does not say as `tensor.dim`."""
    shape = cast(TensorType, value.type).get_shape()
    return [size if size >= 0 else build.add(tensor.DimOp(value, build.constant(d)), "size") for d, size in enumerate(shape)]


def empty(build: Builder, sizes: Sequence[Size], element, hint: str = "empty") -> SSAValue:
    """`tensor.empty`."""
    dynamic = [size for size in sizes if not isinstance(size, int)]
    return build.add(tensor.EmptyOp(dynamic, tensor_type(sizes, element)), hint)


def transpose(build: Builder, value: SSAValue, permutation: Sequence[int], sizes: Sequence[Size]) -> SSAValue:
    """Dimension n of the result is dimension permutation[n] of `value`, whose sizes are `sizes`."""
    if list(permutation) == list(range(len(permutation))):
        return value
    element = cast(TensorType, value.type).element_type
    init = empty(build, [sizes[p] for p in permutation], element)
    return build.add(linalg.TransposeOp(value, init, DenseArrayBase.from_list(i64, list(permutation))), value.name_hint)


def broadcast(build: Builder, value: SSAValue, added: Sequence[Size], sizes: Sequence[Size]) -> SSAValue:
    """New leading dimensions of the sizes `added`, along which nothing changes."""
    if not added:
        return value
    init = empty(build, [*added, *sizes], cast(TensorType, value.type).element_type)
    dimensions = DenseArrayBase.from_list(i64, list(range(len(added))))
    return build.add(linalg.BroadcastOp(value, init, dimensions), value.name_hint)


def _groups(groups: Sequence[Sequence[int]]) -> ArrayAttr[ArrayAttr[IntegerAttr]]:
    return ArrayAttr([ArrayAttr([IntegerAttr(d, i64) for d in group]) for group in groups])


def collapse(build: Builder, value: SSAValue, groups: Sequence[Sequence[int]], sizes: Sequence[Size]) -> SSAValue:
    """Merges each group of neighbouring dimensions into one."""
    if all(len(group) == 1 for group in groups):
        return value
    merged: list[int] = []
    for group in groups:
        known = static([sizes[d] for d in group])
        merged.append(DYNAMIC_INDEX if DYNAMIC_INDEX in known else prod(known))
    type_ = TensorType(cast(TensorType, value.type).element_type, merged)
    op = tensor.CollapseShapeOp.create(operands=[value], result_types=[type_], properties={"reassociation": _groups(groups)})
    return build.add(op, value.name_hint)


def expand(build: Builder, value: SSAValue, groups: Sequence[Sequence[int]], sizes: Sequence[Size]) -> SSAValue:
    """Splits dimension n of `value` into the dimensions groups[n] of the result, whose sizes are `sizes`."""
    if len(groups) == len(sizes):
        return value
    dynamic = [size for size in sizes if not isinstance(size, int)]
    type_ = tensor_type(sizes, cast(TensorType, value.type).element_type)
    op = tensor.ExpandShapeOp(value, dynamic, _groups(groups), static(sizes), type_)
    return build.add(op, value.name_hint)


def drop_units(build: Builder, value: SSAValue, units: Sequence[bool], sizes: Sequence[Size]) -> SSAValue:
    """Without the dimensions of size 1 that `units` marks."""
    if not any(units):
        return value
    if all(units):
        return build.add(
            tensor.CollapseShapeOp.create(
                operands=[value],
                result_types=[TensorType(cast(TensorType, value.type).element_type, [])],
                properties={"reassociation": ArrayAttr([])},
            ),
            value.name_hint,
        )
    return collapse(build, value, _with_units(units), sizes)


def add_units(build: Builder, value: SSAValue, units: Sequence[bool], sizes: Sequence[Size]) -> SSAValue:
    """With a dimension of size 1 wherever `units` says so; `sizes` are those of the result."""
    if not any(units):
        return value
    if all(units):
        type_ = tensor_type(sizes, cast(TensorType, value.type).element_type)
        return build.add(tensor.ExpandShapeOp(value, [], ArrayAttr([]), static(sizes), type_), value.name_hint)
    return expand(build, value, _with_units(units), sizes)


def _with_units(units: Sequence[bool]) -> list[list[int]]:
    """Each unit dimension joins the dimension before it, the first ones the one after them."""
    groups: list[list[int]] = []
    waiting: list[int] = []
    for d, unit in enumerate(units):
        if not unit:
            groups.append([*waiting, d])
            waiting = []
        elif groups:
            groups[-1].append(d)
        else:
            waiting.append(d)
    return groups


def cast_to(build: Builder, value: SSAValue, type_: TensorType) -> SSAValue:
    """The same tensor, its type saying more or less of its sizes."""
    return value if value.type == type_ else build.add(tensor.CastOp(value, type_), value.name_hint)
