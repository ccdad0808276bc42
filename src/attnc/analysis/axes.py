"""Axes of tensors as products of atomic dimensions, so that reshapes cost nothing to look through.

An `Axis` is a tuple of `Atom`s, the slowest first; a dimension of size 1 is the empty axis. Merging dims joins axes, splitting
a dim splits an axis, and where one atom has to be split, it is so everywhere at once: `flat` reads an axis in the atoms of now.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeAlias, cast

from xdsl.dialects import arith, tensor
from xdsl.dialects.builtin import IntegerAttr, TensorType
from xdsl.dialects.linalg import ops as linalg
from xdsl.ir import Operation, OpResult, SSAValue

Size: TypeAlias = "int | SSAValue | tuple[SSAValue, int]"
"""A size: known, an `index` value, or the dimension of a tensor."""


class NoMatch(Exception):
    """What is looked at cannot be understood in the way that is tried; the IR stays as it is."""


class Atom:
    """A dimension that is not a product of others, as far as is known."""

    __slots__ = ("parts", "size")

    def __init__(self, size: Size):
        self.size = canonical_size(size)
        self.parts: tuple[Atom, ...] | None = None

    def split(self, parts: tuple[Atom, ...]) -> None:
        """From now on this is the product of `parts`."""
        assert self.parts is None and len(parts) > 1
        self.parts = parts


Axis: TypeAlias = tuple[Atom, ...]


def fresh(size: Size) -> Axis:
    """The axis of a new dimension."""
    return () if canonical_size(size) == 1 else (Atom(size),)


def flat(axis: Iterable[Atom]) -> Axis:
    """An axis in atoms that are not split."""
    found: list[Atom] = []
    for atom in axis:
        found.extend((atom,) if atom.parts is None else flat(atom.parts))
    return tuple(found)


def flat_axes(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """`flat` of each."""
    return tuple(flat(axis) for axis in axes)


def split_axis(axis: Axis, sizes: Sequence[Size]) -> list[Axis]:
    """The axis as a product of one axis for each of `sizes`, slowest first; atoms are split as it takes.

    Raises NoMatch where the sizes do not tell how.
    """
    wanted = [canonical_size(size) for size in sizes]
    atoms = [atom for atom in flat(axis) if atom.size != 1]
    units = [atom for atom in flat(axis) if atom.size == 1]
    found: list[Axis] = [()] * len(wanted)
    for place, unit in zip((place for place, size in enumerate(wanted) if size == 1), units, strict=False):
        found[place] = (unit,)
    places = [place for place, size in enumerate(wanted) if size != 1]
    for place, part in zip(places, _distribute(atoms, [wanted[place] for place in places]), strict=True):
        found[place] = part
    return [flat(part) for part in found]


def _distribute(atoms: list[Atom], wanted: list[Size]) -> list[Axis]:
    """One non-empty axis for each wanted size."""
    if not wanted:
        if atoms:
            raise NoMatch("an axis of another size")
        return []
    if len(wanted) == 1:
        return [tuple(atoms)]
    if not atoms:
        raise NoMatch("an axis of size 1 cannot be split")
    if len(atoms) == 1:
        parts = tuple(Atom(size) for size in wanted)
        atoms[0].split(parts)
        return [(part,) for part in parts]
    for end in (0, -1):  # equal at an end: take it off
        if size_key(atoms[end].size) == size_key(wanted[end]):
            rest = _distribute(atoms[1:] if end == 0 else atoms[:-1], wanted[1:] if end == 0 else wanted[:-1])
            own: list[Axis] = [(atoms[end],)]
            return own + rest if end == 0 else rest + own
    for end in (0, -1):  # one divides the other at an end: split the greater
        atom, size = atoms[end], wanted[end]
        if not isinstance(size, int) or not isinstance(atom.size, int):
            continue
        if size < atom.size and atom.size % size == 0:
            parts = (Atom(size), Atom(atom.size // size))
            atom.split(parts if end == 0 else parts[::-1])
            return _distribute(list(flat(atoms)), wanted)
        if size > atom.size and size % atom.size == 0:
            left = size // atom.size
            if end == 0:
                first, *rest = _distribute(atoms[1:], [left, *wanted[1:]])
                return [(atom, *first), *rest]
            *rest, last = _distribute(atoms[:-1], [*wanted[:-1], left])
            return [*rest, (*last, atom)]
    if len(atoms) == len(wanted) and sum(not isinstance(size, int) for size in wanted) == 1:
        if all(isinstance(atom.size, int) == isinstance(size, int) for atom, size in zip(atoms, wanted, strict=True)):
            return [(atom,) for atom in atoms]  # all others were equal, or the loop above had taken them
    raise NoMatch("the sizes of a reshape do not tell which dims it joins")


# -- sizes ----------------------------------------------------------------------------------------------------------------


def canonical_size(size: Size) -> Size:
    """The same size: a number where it is known, else told by the value or the tensor that it stems from."""
    if isinstance(size, int):
        return size
    if isinstance(size, SSAValue):
        key = _value_key(size)
        if isinstance(key, int):
            return key
        owner = size.owner
        if isinstance(owner, tensor.DimOp) and isinstance(position := _value_key(owner.index), int):
            return canonical_size((owner.source, position))
        return size
    before = _before(*size)
    return canonical_size(before) if before is not None else size


def size_key(size: Size) -> Hashable:
    """Equal for sizes that are surely equal; an int where the size is known."""
    if isinstance(size, int):
        return size
    if isinstance(size, SSAValue):
        return _value_key(size)
    return _dim_key(*size)


def _value_key(value: SSAValue) -> Hashable:
    owner = value.owner
    if isinstance(owner, arith.ConstantOp) and isinstance(owner.value, IntegerAttr):
        return owner.value.value.data
    if isinstance(owner, tensor.DimOp):
        position = _value_key(owner.index)
        if isinstance(position, int):
            return _dim_key(owner.source, position)
    if isinstance(owner, Operation) and owner.name.startswith("arith.") and len(owner.results) == 1:
        keys = tuple(_value_key(operand) for operand in owner.operands)
        if owner.name == "arith.index_cast":
            return keys[0]
        if owner.name == "arith.muli":
            return _product(keys)
        if owner.name == "arith.addi":
            return _sum(keys)
        if owner.name == "arith.maxsi" and keys[1] == 0 and isinstance(keys[0], tuple) and keys[0][0] == "dim":
            return keys[0]
        return (owner.name, *keys)
    return value


def _sum(keys: Iterable[Hashable]) -> Hashable:
    number, rest = 0, []
    for key in keys:
        if isinstance(key, int):
            number += key
        elif isinstance(key, tuple) and key and key[0] == "sum":
            number += key[1]
            rest.extend(key[2:])
        else:
            rest.append(key)
    if not rest:
        return number
    if number == 0 and len(rest) == 1:
        return rest[0]
    return ("sum", number, *sorted(rest, key=hash))


def _product(keys: Iterable[Hashable]) -> Hashable:
    number, rest = 1, []
    for key in keys:
        if isinstance(key, int):
            number *= key
        elif isinstance(key, tuple) and key and key[0] == "product":
            number *= key[1]
            rest.extend(key[2:])
        else:
            rest.append(key)
    if not rest or number == 0:
        return number
    if number == 1 and len(rest) == 1:
        return rest[0]
    return ("product", number, *sorted(rest, key=hash))


def _dim_key(value: SSAValue, position: int) -> Hashable:
    before = _before(value, position)
    if before is not None:
        return size_key(before)
    owner = value.owner
    if isinstance(owner, tensor.CollapseShapeOp):
        group = [int(dim.value.data) for dim in owner.reassociation.data[position].data]
        return _product(_dim_key(owner.src, dim) for dim in group)
    return ("dim", value, position)


def _before(value: SSAValue, position: int) -> Size | None:
    """The size of a tensor's dim as its producer has it, if that has it from elsewhere."""
    shape = cast(TensorType, value.type).get_shape()
    if shape[position] >= 0:
        return shape[position]
    owner = value.owner
    if isinstance(owner, tensor.ExpandShapeOp):
        static = owner.static_output_shape.get_values()
        return owner.dynamic_output_shape[sum(size < 0 for size in static[:position])] if static[position] < 0 else None
    if isinstance(owner, tensor.CollapseShapeOp):
        group = owner.reassociation.data[position].data
        return (owner.src, int(group[0].value.data)) if len(group) == 1 else None
    if isinstance(owner, tensor.EmptyOp):
        return owner.dynamic_sizes[sum(size < 0 for size in shape[:position])]
    if isinstance(owner, tensor.CastOp):
        return owner.source, position
    if isinstance(owner, tensor.ExtractSliceOp):
        static = owner.static_sizes.get_values()
        if len(static) == len(shape) and static[position] < 0:
            return owner.sizes[sum(size < 0 for size in static[:position])]
        return None
    if isinstance(owner, linalg.GenericOp | linalg.FillOp) and isinstance(value, OpResult):
        return owner.outputs[value.index], position
    if isinstance(owner, Operation) and owner.name.startswith("iree_linalg_ext.") and isinstance(value, OpResult):
        inits = getattr(owner, "inits", ())
        return (inits[value.index], position) if value.index < len(inits) else None
    return None
