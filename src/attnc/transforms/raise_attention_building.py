"""Makes an attention over the atoms of its operands' axes.

An operand whose dim is a product of several atoms is expanded (a view); the result is written with one dim for each atom and
collapsed (a view of a fresh tensor).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import cast

from xdsl.dialects import tensor
from xdsl.dialects.builtin import DYNAMIC_INDEX, AffineMapAttr, ArrayAttr, IntegerAttr, TensorType, i64
from xdsl.dialects.linalg import ops as linalg
from xdsl.dialects.linalg.attrs import IteratorTypeAttr
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.ir.affine import AffineConstantExpr, AffineDimExpr, AffineExpr, AffineMap

from attnc.analysis.axes import Atom, Axis, NoMatch, flat
from attnc.analysis.elements import Element, Elements
from attnc.dialects.building import Builder
from attnc.dialects.linalg_ext import AttentionOp, IndexOp, YieldOp

PURE = ("linalg.", "tensor.", "arith.", "math.", "iree_linalg_ext.")
"""Beginnings of the names of operations on values, without effects."""


class Domain:
    """The iteration domain of an attention: batch dims, rows, keys, head dims, value columns, in this order.

    Dims of size 1 are interchangeable, so those that query, key, value and output have are paired anew: first what an attention
    cannot be without (keys, head dims), then batch dims, then what any two operands share. A unit dim without a partner is
    dropped by a collapse_shape, and the output gets it back by an expand_shape.
    """

    def __init__(self, build: Builder, query: Element, key: Element, value: Element, out: Sequence[Axis]):
        """Raises NoMatch where the operands' dims are not those of an attention."""
        self.build = build
        parts = (query.axes, key.axes, value.axes, out)
        axes = [[tuple(atom for atom in flat(axis) if atom.size != 1) for axis in part] for part in parts]
        q, k, v, o = (_atoms(part) for part in axes)
        if any(len(set(atoms)) != len(atoms) for atoms in (q, k, v, o)):
            raise NoMatch("a diagonal")
        if not any(atom in k and atom in v and atom not in o and atom not in q for atom in k):
            _pair([axes[1], axes[2]], last=True)
        if not any(atom in k and atom not in o for atom in q):
            _pair([axes[0], axes[1]], last=True)
        while _pair(axes):
            pass
        for first, second in ((0, 3), (1, 2), (2, 3), (0, 1)):
            while _pair([axes[first], axes[second]]):
                pass
        self.axes = axes
        q, k, v, o = (_atoms(part) for part in axes)
        batch = [atom for atom in o if (atom in q and atom in v) or atom in k]
        rows = [atom for atom in o if atom in q and atom not in batch]
        self.columns = columns = [atom for atom in o if atom in v and atom not in batch]
        self.keys = [atom for atom in k if atom not in o and atom not in q]
        heads = [atom for atom in q if atom not in o]
        self.rows = [*batch, *rows]
        self.atoms = [*self.rows, *self.keys, *heads, *columns]
        everything = {*q, *k, *v, *o}
        if len(set(self.atoms)) != len(self.atoms) or set(self.atoms) != everything or not heads or not self.keys:
            raise NoMatch("dims that belong to neither query, key nor value")
        if not set(self.keys) <= set(v) or not set(heads) <= set(k) or set(heads) & set(v):
            raise NoMatch("the products do not sum over head dims and keys")
        if set(o) != {*self.rows, *columns}:
            raise NoMatch("the output has dims that nothing else has")
        self._sizes: dict[Atom, SSAValue] = {}

    def size(self, atom: Atom) -> SSAValue:
        """The extent of an atom as an `index`."""
        if isinstance(atom.size, int):
            return self.build.constant(atom.size)
        if isinstance(atom.size, SSAValue):
            return atom.size
        if atom not in self._sizes:
            source, position = atom.size
            self._sizes[atom] = self.build.add(tensor.DimOp(source, self.build.constant(position)), "size")
        return self._sizes[atom]

    def map(self, axes: Sequence[Axis]) -> AffineMap:
        """The indexing map of a tensor with a dim for each atom."""
        return AffineMap(len(self.atoms), 0, tuple(AffineDimExpr(self.atoms.index(atom)) for atom in _atoms(axes)))

    def operand(self, value: SSAValue, axes: Sequence[Axis]) -> SSAValue:
        """A tensor over `axes` with a dim for each atom: itself, or collapsed and expanded."""
        return with_a_dim_each(self.build, value, axes, self.size)

    def result(self, value: SSAValue, axes: Sequence[Axis], wanted: TensorType) -> SSAValue:
        """What has a dim for each atom as a tensor over `axes`, of type `wanted`."""
        if any(len(axis) > 1 for axis in axes):
            value = collapsed(self.build, value, [len(axis) for axis in axes if axis])
        if any(not axis for axis in axes):
            dims = iter(cast(TensorType, value.type).get_shape())
            shape = [next(dims) if axis else 1 for axis in axes]
            flags = without_units([len(axis) > 0 for axis in axes])
            groups, start = [], 0
            for length in flags:
                group = range(start, start + length)
                groups.append([self._known(shape[dim], axes[dim]) for dim in group])
                start += length
            value = expanded(self.build, value, groups)
        if value.type != wanted:
            value = self.build.add(tensor.CastOp(value, wanted))
        return value

    def _known(self, size: int, axis: Axis) -> int | SSAValue:
        if size >= 0:
            return size
        value: SSAValue | None = None
        for atom in axis:
            value = self.size(atom) if value is None else self.build.binary("muli", value, self.size(atom))
        assert value is not None
        return value

    def empty(self, axes: Sequence[Axis], element: Attribute, shape: Sequence[int], hint: str | None = None) -> SSAValue:
        """An uninitialised tensor with a dim for each atom; `shape` is that of the tensor with a dim for each axis."""
        dims: list[int | SSAValue] = []
        for axis, size in zip(axes, shape, strict=True):
            dims += _sizes_of(axis, size, self.size) if axis else []
        sizes = [dim for dim in dims if not isinstance(dim, int)]
        type_ = TensorType(element, [dim if isinstance(dim, int) else DYNAMIC_INDEX for dim in dims])
        return self.build.add(tensor.EmptyOp(sizes, type_), hint)


def with_a_dim_each(build: Builder, value: SSAValue, axes: Sequence[Axis], extent: Callable[[Atom], SSAValue]) -> SSAValue:
    """A tensor over `axes` with a dim for each atom: itself, or collapsed (unit axes) and expanded (axes of several atoms)."""
    shape = cast(TensorType, value.type).get_shape()
    if any(not axis for axis in axes):
        value = collapsed(build, value, without_units([len(axis) > 0 for axis in axes]))
    kept = [(axis, size) for axis, size in zip(axes, shape, strict=True) if axis]
    if any(len(axis) > 1 for axis, _ in kept):
        value = expanded(build, value, [_sizes_of(axis, size, extent) for axis, size in kept])
    return value


def _sizes_of(axis: Axis, size: int, extent: Callable[[Atom], SSAValue]) -> list[int | SSAValue]:
    """The sizes of an axis's atoms; `size` is that of the dim that it is."""
    if len(axis) == 1:
        return [size if size >= 0 else extent(axis[0])]
    return [atom.size if isinstance(atom.size, int) else extent(atom) for atom in axis]


def _pair(parts: list[list[Axis]], last: bool = False) -> bool:
    """Makes a unit axis of each of `parts` the same new dim, if each has one."""
    places = []
    for axes in parts:
        units = [place for place, axis in enumerate(axes) if not axis]
        if not units:
            return False
        places.append(units[-1 if last else 0])
    unit = Atom(1)
    for axes, place in zip(parts, places, strict=True):
        axes[place] = (unit,)
    return True


def without_units(kept: Sequence[bool]) -> list[int]:
    """Lengths of groups of dims that have one kept dim each."""
    lengths: list[int] = []
    waiting = 0
    for keep in kept:
        waiting += 1
        if keep:
            lengths.append(waiting)
            waiting = 0
    if lengths:
        lengths[-1] += waiting
    return lengths


def expanded(build: Builder, value: SSAValue, dims: Sequence[Sequence[int | SSAValue]]) -> SSAValue:
    """`tensor.expand_shape` of each dim to the sizes listed for it."""
    type_ = cast(TensorType, value.type)
    sizes = [size for group in dims for size in group]
    static = [size if isinstance(size, int) else DYNAMIC_INDEX for size in sizes]
    dynamic = [size for size in sizes if not isinstance(size, int)]
    result = TensorType(type_.element_type, static)
    op = tensor.ExpandShapeOp(value, dynamic, reassociation(map(len, dims)), static, result)
    return build.add(op, value.name_hint)


def collapsed(build: Builder, value: SSAValue, lengths: Sequence[int]) -> SSAValue:
    """The value with each group of dims joined."""
    type_ = cast(TensorType, value.type)
    shape, start = [], 0
    for length in lengths:
        sizes = type_.get_shape()[start : start + length]
        shape.append(prod(sizes) if all(size >= 0 for size in sizes) else DYNAMIC_INDEX)
        start += length
    op = tensor.CollapseShapeOp.create(
        operands=[value],
        result_types=[TensorType(type_.element_type, shape)],
        properties={"reassociation": reassociation(lengths)},
    )
    return build.add(op, value.name_hint)


def reassociation(lengths: Sequence[int] | map[int]) -> ArrayAttr[ArrayAttr[IntegerAttr]]:
    """Groups of so many dims each."""
    groups, start = [], 0
    for length in lengths:
        groups.append(ArrayAttr([IntegerAttr(dim, i64) for dim in range(start, start + length)]))
        start += length
    return ArrayAttr(groups)


def build_attention(
    domain: Domain,
    operands: tuple[SSAValue, SSAValue, SSAValue],
    scale: SSAValue,
    out_type: TensorType,
    write: Callable[[Builder, SSAValue, Callable[[Atom], SSAValue]], SSAValue],
) -> tuple[AttentionOp, SSAValue]:
    """Appends the attention; gives it and its result as a tensor of `out_type`.

    `write(build, score, position)` writes the region and returns what it yields; `scale` has the score's type.
    """
    build = domain.build
    block = Block(arg_types=[scale.type])
    block.args[0].name_hint = "score"
    region = Builder(block)
    positions: dict[Atom, SSAValue] = {}

    def position(atom: Atom) -> SSAValue:
        if atom not in positions:
            if atom not in domain.atoms:
                raise NoMatch("the scores have a dim that neither query nor key has")
            op = IndexOp(domain.atoms.index(atom))
            block.insert_op_before(op, block.first_op) if block.first_op is not None else block.add_op(op)
            positions[atom] = op.result
        return positions[atom]

    region.insert(YieldOp(write(region, block.args[0], position)))
    query, key, value = (domain.operand(tensor_, axes) for tensor_, axes in zip(operands, domain.axes, strict=False))
    init = domain.empty(domain.axes[3], out_type.element_type, out_type.get_shape(), "init")
    scalar = AffineMap(len(domain.atoms), 0, ())
    maps = [*map(domain.map, domain.axes[:3]), scalar, domain.map(domain.axes[3])]
    op = AttentionOp(query, key, value, scale, init, maps, Region(block))
    build.insert(op, "out")
    return op, domain.result(op.result, domain.axes[3], out_type)


def row_tensor(
    domain: Domain,
    sources: Sequence[tuple[SSAValue, Sequence[Atom]]],
    axes: Sequence[Axis],
    wanted: TensorType,
    compute: Callable[[Builder, Sequence[SSAValue], Callable[[Element], SSAValue | None]], SSAValue],
    hint: str | None = None,
) -> SSAValue:
    """A tensor over `axes` computed elementwise from tensors that have a dim for each of their atoms: `compute(body, args,
    read)`, where `read` gives elements of other tensors."""
    axes = [flat(axis) for axis in axes]
    init = domain.empty(axes, wanted.element_type, wanted.get_shape())
    loops = {atom: place for place, atom in enumerate(_atoms(axes))}
    rank = len(loops)
    block = Block(arg_types=[*(cast(TensorType, value.type).element_type for value, _ in sources), wanted.element_type])
    inputs = list(sources)

    def read(element: Element) -> SSAValue | None:
        axes = [flat(axis) for axis in element.axes]
        if not all(atom in loops or atom.size == 1 for axis in axes for atom in axis):
            return None
        inputs.append((domain.operand(element.value, axes), _atoms(axes)))
        return block.insert_arg(element.type, len(inputs) - 1)

    def position(atom: Atom) -> AffineExpr:
        return AffineDimExpr(loops[atom]) if atom in loops else AffineConstantExpr(0)

    body = Builder(block)
    body.insert(linalg.YieldOp(compute(body, list(block.args[: len(sources)]), read)))
    maps = [AffineMap(rank, 0, tuple(map(position, atoms))) for _, atoms in inputs]
    op = linalg.GenericOp(
        [value for value, _ in inputs],
        [init],
        Region(block),
        [AffineMapAttr(map_) for map_ in (*maps, AffineMap.identity(rank))],
        [IteratorTypeAttr.parallel()] * rank,
        [init.type],
    )
    return domain.result(domain.build.insert(op, hint).results[0], axes, wanted)


def converted_tensor(build: Builder, elements: Elements, element: Element, type_: Attribute) -> Element:
    """The element of the same tensor in a wider float type."""
    return elementwise_tensor(build, elements, element, lambda body, args, _: body.cast("extf", args[0], type_), type_)


def elementwise_tensor(
    build: Builder,
    elements: Elements,
    element: Element,
    compute: Callable[[Builder, Sequence[SSAValue], Callable[[Element], SSAValue | None]], SSAValue],
    type_: Attribute | None = None,
) -> Element:
    """The element of a new tensor, in the layout of `element`'s: `compute(body, args, read)` of each of its elements, and of
    other tensors over its dims, which `read` gives."""
    before = cast(TensorType, element.value.type)
    shape = before.get_shape()
    sizes = [build.add(tensor.DimOp(element.value, build.constant(dim)), "size") for dim, size in enumerate(shape) if size < 0]
    init = build.add(tensor.EmptyOp(sizes, TensorType(type_ or before.element_type, shape)))
    block = Block(arg_types=[before.element_type, type_ or before.element_type])
    inputs, maps = [element.value], [AffineMap.identity(len(shape))]
    loops = {flat(axis)[0]: dim for dim, axis in enumerate(element.axes) if len(flat(axis)) == 1}

    def read(other: Element) -> SSAValue | None:
        axes = [flat(axis) for axis in other.axes]
        if any(len(axis) > 1 or (axis and axis[0] not in loops) for axis in axes):
            return None
        results = tuple(AffineDimExpr(loops[axis[0]]) if axis else AffineConstantExpr(0) for axis in axes)
        inputs.append(other.value)
        maps.append(AffineMap(len(shape), 0, results))
        return block.insert_arg(other.type, len(inputs) - 1)

    body = Builder(block)
    body.insert(linalg.YieldOp(compute(body, [block.args[0]], read)))
    kinds = [IteratorTypeAttr.parallel()] * len(shape)
    attributes = [AffineMapAttr(map_) for map_ in (*maps, maps[0])]
    op = linalg.GenericOp(inputs, [init], Region(block), attributes, kinds, [init.type])
    return elements.at(build.insert(op, element.value.name_hint).results[0], element.axes)


def erase_unused(block: Block) -> None:
    """Erases operations of the dialects of this stage whose results nobody uses, last first."""
    for op in reversed(list(block.ops)):
        if op.results and op.name.startswith(PURE) and not any(result.uses for result in op.results):
            op.detach()
            op.erase(safe_erase=False)


def clear(block: Block) -> None:
    """Erases the operations of a scratch block."""
    for op in reversed(list(block.ops)):
        op.detach()
        op.erase(safe_erase=False)


def insert_before(block: Block, anchor: Operation) -> None:
    """Moves the operations of a scratch block before `anchor`."""
    assert anchor.parent is not None
    for op in list(block.ops):
        op.detach()
        anchor.parent.insert_op_before(op, anchor)


def sort(block: Block) -> None:
    """Operations come after what they use, and else stay in their order."""
    placed: set[Operation] = set()
    order: list[Operation] = []

    def place(op: Operation) -> None:
        if op in placed:
            return
        placed.add(op)
        for inner in op.walk():
            for operand in inner.operands:
                if isinstance(operand.owner, Operation) and operand.owner.parent is block:
                    place(operand.owner)
        order.append(op)

    for op in list(block.ops):
        place(op)
    for op in order:
        op.detach()
    block.add_ops(order)


def _atoms(axes: Sequence[Axis]) -> list[Atom]:
    return [atom for axis in axes for atom in flat(axis)]
