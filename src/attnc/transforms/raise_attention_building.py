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
from xdsl.ir.affine import AffineConstantExpr, AffineDimExpr, AffineMap

from attnc.analysis.axes import Atom, Axis, NoMatch, flat
from attnc.analysis.elements import Element
from attnc.dialects.building import Builder
from attnc.dialects.linalg_ext import AttentionOp, IndexOp, YieldOp


class Domain:
    """The iteration domain of an attention: batch dims, rows, keys, head dims, value columns, in this order."""

    def __init__(self, build: Builder, query: Element, key: Element, value: Element, out: Sequence[Axis]):
        """Raises NoMatch where the operands' dims are not those of an attention."""
        self.build = build
        q, k, v, o = (_atoms(axes) for axes in (query.axes, key.axes, value.axes, out))
        if any(len(set(atoms)) != len(atoms) for atoms in (q, k, v, o)):
            raise NoMatch("a diagonal")
        batch = [atom for atom in o if (atom in q and atom in v) or atom in k]
        rows = [atom for atom in o if atom in q and atom not in batch]
        columns = [atom for atom in o if atom in v and atom not in batch]
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
        """The indexing map of a tensor with a dim for each atom, and for each unit axis."""
        results = []
        for axis in axes:
            results += [AffineDimExpr(self.atoms.index(atom)) for atom in flat(axis)] or [AffineConstantExpr(0)]
        return AffineMap(len(self.atoms), 0, tuple(results))

    def operand(self, element: Element) -> SSAValue:
        """The tensor of an element with a dim for each atom: itself, or expanded."""
        type_ = cast(TensorType, element.value.type)
        axes = [flat(axis) for axis in element.axes]
        if all(len(axis) <= 1 for axis in axes):
            return element.value
        return expanded(self.build, element.value, [self._dims(axis, size) for axis, size in zip(axes, type_.get_shape())])

    def _dims(self, axis: Axis, size: int) -> list[int | SSAValue]:
        if len(axis) <= 1:
            return [size if size >= 0 or not axis else self.size(axis[0])]
        return [atom.size if isinstance(atom.size, int) else self.size(atom) for atom in axis]

    def empty(self, axes: Sequence[Axis], element: Attribute, shape: Sequence[int], hint: str | None = None) -> SSAValue:
        """An uninitialised tensor with a dim for each atom; `shape` is that of the tensor with a dim for each axis."""
        dims: list[int | SSAValue] = []
        for axis, size in zip(axes, shape, strict=True):
            dims += self._dims(flat(axis), size)
        sizes = [dim for dim in dims if not isinstance(dim, int)]
        type_ = TensorType(element, [dim if isinstance(dim, int) else -1 for dim in dims])
        return self.build.add(tensor.EmptyOp(sizes, type_), hint)


def expanded(build: Builder, value: SSAValue, dims: Sequence[Sequence[int | SSAValue]]) -> SSAValue:
    """`tensor.expand_shape` of each dim to the sizes listed for it."""
    type_ = cast(TensorType, value.type)
    sizes = [size for group in dims for size in group]
    static = [size if isinstance(size, int) else -1 for size in sizes]
    dynamic = [size for size in sizes if not isinstance(size, int)]
    result = TensorType(type_.element_type, static)
    op = tensor.ExpandShapeOp(
        value, dynamic, reassociation(map(len, dims)), [s if s >= 0 else DYNAMIC_INDEX for s in static], result
    )
    return build.add(op, value.name_hint)


def collapsed(build: Builder, value: SSAValue, lengths: Sequence[int], wanted: TensorType) -> SSAValue:
    """The value with each group of dims joined, as a tensor of type `wanted`; itself where there is nothing to join."""
    type_ = cast(TensorType, value.type)
    if any(length != 1 for length in lengths):
        shape, start = [], 0
        for length in lengths:
            sizes = type_.get_shape()[start : start + length]
            shape.append(prod(sizes) if all(size >= 0 for size in sizes) else -1)
            start += length
        joined = TensorType(type_.element_type, shape)
        op = tensor.CollapseShapeOp.create(
            operands=[value], result_types=[joined], properties={"reassociation": reassociation(lengths)}
        )
        value = build.add(op)
    if value.type != wanted:
        value = build.add(tensor.CastOp(value, wanted))
    return value


def reassociation(lengths: Sequence[int] | map[int]) -> ArrayAttr[ArrayAttr[IntegerAttr]]:
    """Groups of so many dims each."""
    groups, start = [], 0
    for length in lengths:
        groups.append(ArrayAttr([IntegerAttr(dim, i64) for dim in range(start, start + length)]))
        start += length
    return ArrayAttr(groups)


def build_attention(
    domain: Domain,
    operands: tuple[Element, Element, Element],
    scale: SSAValue,
    out: Sequence[Axis],
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
    values = [domain.operand(element) for element in operands]
    init = domain.empty(out, out_type.element_type, out_type.get_shape(), "init")
    maps = [*(domain.map(element.axes) for element in operands), AffineMap(len(domain.atoms), 0, ()), domain.map(out)]
    query, key, value = values
    op = AttentionOp(query, key, value, scale, init, maps, Region(block))
    build.insert(op, "out")
    return op, collapsed(build, op.result, [max(1, len(flat(axis))) for axis in out], out_type)


def row_tensor(
    domain: Domain,
    sources: Sequence[tuple[SSAValue, Sequence[Atom]]],
    axes: Sequence[Axis],
    wanted: TensorType,
    compute: Callable[[Builder, Sequence[SSAValue]], SSAValue],
    hint: str | None = None,
) -> SSAValue:
    """A tensor over `axes` computed elementwise from tensors that have a dim for each of their atoms."""
    init = domain.empty(axes, wanted.element_type, wanted.get_shape())
    loops: dict[Atom, int] = {}
    rank = 0
    for axis in axes:
        for atom in flat(axis):
            loops[atom] = rank
            rank += 1
        rank += not flat(axis)
    block = Block(arg_types=[*(cast(TensorType, value.type).element_type for value, _ in sources), wanted.element_type])
    body = Builder(block)
    body.insert(linalg.YieldOp(compute(body, block.args[: len(sources)])))
    maps = [AffineMap(rank, 0, tuple(AffineDimExpr(loops[atom]) for atom in atoms)) for _, atoms in sources]
    op = linalg.GenericOp(
        [value for value, _ in sources],
        [init],
        Region(block),
        [AffineMapAttr(map_) for map_ in (*maps, AffineMap.identity(rank))],
        [IteratorTypeAttr.parallel()] * rank,
        [init.type],
    )
    result = domain.build.insert(op, hint).results[0]
    return collapsed(domain.build, result, [max(1, len(flat(axis))) for axis in axes], wanted)


def insert_before(block: Block, anchor: Operation) -> None:
    """Moves the operations of a scratch block before `anchor`."""
    assert anchor.parent is not None
    for op in list(block.ops):
        op.detach()
        anchor.parent.insert_op_before(op, anchor)


def _atoms(axes: Sequence[Axis]) -> list[Atom]:
    return [atom for axis in axes for atom in flat(axis)]
