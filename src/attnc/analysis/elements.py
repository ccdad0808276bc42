"""The elements of tensors as expressions over named dimensions.

An `Element` is a tensor at an axis for each of its dims. `peel` looks through what only lays out (transposes, broadcasts,
reshapes), `head` also through elementwise `linalg.generic`s; `reduction` says what a reducing one sums. Nothing is expanded
before it is asked for, and the same element of the same tensor is the same object.

    %1 = linalg.generic {maps = [(i, j) -> (j, i), (i, j) -> (i), id]} ins(%a, %b) { yield mulf(a, b) }
    Element(%1, (x, y))   head   Apply(mulf, Element(%a, (y, x)), Element(%b, (x,)))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

from xdsl.dialects import arith, tensor
from xdsl.dialects.builtin import AnyFloat, DenseIntOrFPElementsAttr, FloatAttr, TensorType
from xdsl.dialects.linalg import ops as linalg
from xdsl.dialects.linalg.attrs import IteratorType
from xdsl.ir import Attribute, BlockArgument, Operation, OpResult, SSAValue

from attnc.analysis.axes import Axis, NoMatch, flat_axes, fresh, split_axis
from attnc.analysis.roles import map_results


@dataclass(eq=False, slots=True)
class Element:
    """`value` at `axes`, one for each dim."""

    value: SSAValue
    axes: tuple[Axis, ...]

    @property
    def type(self) -> Attribute:
        return cast(TensorType, self.value.type).element_type


@dataclass(eq=False, slots=True)
class Position:
    """Where one stands along an axis, an `index`."""

    axis: Axis
    type: Attribute


@dataclass(eq=False, slots=True)
class Outer:
    """A scalar that is known before any element is."""

    value: SSAValue

    @property
    def type(self) -> Attribute:
        return self.value.type


@dataclass(eq=False, slots=True)
class Splat:
    """The one number of a constant tensor, or one that a rewriting needs."""

    attribute: Attribute
    type: Attribute


@dataclass(eq=False, slots=True)
class Apply:
    """A scalar operation (of arith or math, or a `tensor.extract`) on nodes."""

    op: Operation
    operands: tuple[Node, ...]

    @property
    def type(self) -> Attribute:
        return self.op.results[0].type


Node: TypeAlias = Element | Position | Outer | Splat | Apply

CASTS = ("arith.extf", "arith.truncf")
MAXIMA = ("arith.maximumf", "arith.maxnumf", "arith.maxf")


@dataclass(frozen=True, slots=True)
class Reduction:
    """`sum` or `max` of `body` over the axes `bound`, started from `init`."""

    kind: str
    bound: tuple[Axis, ...]
    body: Node
    init: Node
    op: linalg.GenericOp


class Elements:
    """The elements of one function's tensors."""

    def __init__(self):
        self._known: dict[tuple[object, ...], Node] = {}
        self._reductions: dict[tuple[object, ...], Reduction | None] = {}

    def at(self, value: SSAValue, axes: Sequence[Axis]) -> Element:
        """The element of `value` at `axes`."""
        flattened = flat_axes(axes)
        node = self._known.setdefault((value, flattened), Element(value, flattened))
        return cast(Element, node)

    # -- looking through --------------------------------------------------------------------------------------------------

    def peel(self, element: Element) -> Element:
        """The same element, of the tensor before transposes, broadcasts, reshapes and casts to other static sizes."""
        while (before := self.peel_once(element)) is not None:
            element = before
        return element

    def peel_once(self, element: Element) -> Element | None:
        """`peel` through one operation; None where there is nothing to look through."""
        owner, axes = element.value.owner, flat_axes(element.axes)
        if isinstance(owner, tensor.CastOp):
            return self.at(owner.source, axes)
        if isinstance(owner, tensor.ExpandShapeOp):
            return self.at(owner.src, [_joined(axes, group) for group in groups_of(owner)])
        if isinstance(owner, tensor.CollapseShapeOp):
            shape = cast(TensorType, owner.src.type).get_shape()
            before: list[Axis] = [()] * (len(shape) if not axes else 0)
            for axis, group in zip(axes, groups_of(owner), strict=True):
                sizes = [shape[dim] if shape[dim] >= 0 else (owner.src, dim) for dim in group]
                before += split_axis(axis, sizes)
            return self.at(owner.src, before)
        if isinstance(owner, linalg.GenericOp) and is_layout(owner):
            return self.at(owner.inputs[0], _operand_axes(owner, 0, _loops(owner, 0, axes)))
        return None

    def expand(self, element: Element) -> Node | None:
        """The element as an expression of others, one operation nearer to the function's arguments; None for a leaf."""
        if (peeled := self.peel_once(element)) is not None:
            return peeled
        owner, axes = element.value.owner, flat_axes(element.axes)
        key = ("expand", element.value, axes)
        if key in self._known:
            return self._known[key]
        node: Node | None = None
        if isinstance(owner, linalg.FillOp):
            node = Outer(owner.inputs[0])
        elif (
            isinstance(owner, arith.ConstantOp) and isinstance(owner.value, DenseIntOrFPElementsAttr) and owner.value.is_splat()
        ):
            node = Splat(owner.value.get_attrs()[0], element.type)
        elif isinstance(owner, linalg.GenericOp) and is_elementwise(owner):
            index = cast(OpResult, element.value).index
            loops = _loops(owner, index, axes)
            node = self._yielded(owner, index, loops)
        if node is not None:
            self._known[key] = node
        return node

    def head_once(self, node: Element) -> Node:
        """`expand`, or the node itself where it is a leaf."""
        return self.expand(node) or node

    def head(self, node: Node) -> Node:
        """The node with its outermost operation known: no Element but of a tensor that cannot be looked through."""
        while isinstance(node, Element) and (before := self.expand(node)) is not None:
            node = before
        return node

    def bare(self, node: Node) -> Node:
        """`head`, and without conversions between float types around it."""
        node = self.head(node)
        while isinstance(node, Apply) and node.op.name in CASTS:
            node = self.head(node.operands[0])
        return node

    # -- reductions -------------------------------------------------------------------------------------------------------

    def reduction(self, element: Element) -> Reduction | None:
        """What a reducing generic sums, or takes the maximum of, for this element. The bound axes are new."""
        owner, axes = element.value.owner, flat_axes(element.axes)
        if not isinstance(owner, linalg.GenericOp) or len(owner.results) != 1:
            return None
        key = (element.value, axes)
        if key not in self._reductions:
            self._reductions[key] = self._reduction(owner, axes)
        return self._reductions[key]

    def _reduction(self, op: linalg.GenericOp, axes: tuple[Axis, ...]) -> Reduction | None:
        reduced = [dim for dim, kind in enumerate(op.iterator_types) if kind.data == IteratorType.REDUCTION]
        step = reduction_step(op)
        if not reduced or step is None:
            return None
        kind, value = step
        loops = _loops(op, 0, axes)
        bound: list[Axis] = []
        for dim in reduced:
            loops[dim] = fresh(loop_size(op, dim))
            bound.append(loops[dim])
        body = self._scalar(op, value, loops, {})
        init = self.at(op.outputs[0], _operand_axes(op, len(op.inputs), loops))
        return Reduction(kind, tuple(bound), body, init, op)

    # -- bodies -----------------------------------------------------------------------------------------------------------

    def _yielded(self, op: linalg.GenericOp, index: int, loops: dict[int, Axis]) -> Node | None:
        last = op.body.block.last_op
        assert isinstance(last, linalg.YieldOp)
        try:
            return self._scalar(op, last.operands[index], loops, {})
        except NoMatch:
            return None

    def _scalar(self, op: linalg.GenericOp, value: SSAValue, loops: dict[int, Axis], known: dict[SSAValue, Node]) -> Node:
        if value in known:
            return known[value]
        owner = value.owner
        node: Node
        if isinstance(value, BlockArgument) and owner is op.body.block:
            operand = op.operands[value.index]
            if isinstance(operand.type, TensorType):
                node = self.at(operand, _operand_axes(op, value.index, loops))
            else:
                node = Outer(operand)
        elif isinstance(owner, Operation) and owner.parent is op.body.block:
            if isinstance(owner, linalg.IndexOp):
                node = Position(loops[owner.dim.value.data], value.type)
            elif isinstance(owner, arith.ConstantOp):
                node = Splat(owner.value, value.type)
            elif isinstance(owner, tensor.ExtractOp):
                node = Apply(owner, tuple(self._scalar(op, index, loops, known) for index in owner.indices))
            elif not owner.regions and len(owner.results) == 1 and owner.name.split(".")[0] in ("arith", "math"):
                node = Apply(owner, tuple(self._scalar(op, operand, loops, known) for operand in owner.operands))
            else:
                raise NoMatch(f"{owner.name} in a linalg.generic")
        else:
            node = Outer(value)
        known[value] = node
        return node


def constant(node: Node) -> int | float | None:
    """The number that a node is, where it is known."""
    attribute: Attribute | None = None
    if isinstance(node, Splat):
        attribute = node.attribute
    elif isinstance(node, Outer) and isinstance(node.value.owner, arith.ConstantOp):
        attribute = node.value.owner.value
    data = getattr(getattr(attribute, "value", None), "data", None)
    return data if isinstance(data, int | float) else None


def is_float(type_: Attribute) -> bool:
    """Whether a scalar of this type is a float."""
    return isinstance(type_, AnyFloat)


# -- linalg.generic -------------------------------------------------------------------------------------------------------


def groups_of(op: tensor.ExpandShapeOp | tensor.CollapseShapeOp) -> list[list[int]]:
    """The reassociation as numbers."""
    return [[int(dim.value.data) for dim in group.data] for group in op.reassociation.data]


def maps_of(op: linalg.GenericOp) -> list[tuple[int | None, ...]]:
    """For each operand the loops that its dims follow; None for the position 0. Raises NoMatch for other maps."""
    try:
        return [map_results(attribute.data) for attribute in op.indexing_maps]
    except ValueError as error:
        raise NoMatch(str(error)) from None


def has_simple_maps(op: linalg.GenericOp) -> bool:
    """Whether each operand follows loops by a projected permutation."""
    try:
        maps_of(op)
    except NoMatch:
        return False
    return True


def is_elementwise(op: linalg.GenericOp) -> bool:
    """Parallel loops only, and results that every loop has a place in (but for loops of size 1)."""
    if any(kind.data != IteratorType.PARALLEL for kind in op.iterator_types) or not has_simple_maps(op):
        return False
    loops = {dim for dim in range(len(op.iterator_types)) if loop_size(op, dim) != 1}
    return bool(op.results) and all(loops <= set(map_) for map_ in maps_of(op)[len(op.inputs) :])


def is_layout(op: linalg.GenericOp) -> bool:
    """Whether its result is its one input, transposed or broadcast."""
    if len(op.results) != 1 or len(op.inputs) != 1 or not isinstance(op.inputs[0].type, TensorType):
        return False
    last = op.body.block.last_op
    return isinstance(last, linalg.YieldOp) and last.operands[0] is op.body.block.args[0] and is_elementwise(op)


def loop_size(op: linalg.GenericOp, dim: int) -> int | tuple[SSAValue, int]:
    """The extent of a loop: a number where any operand knows it."""
    found: tuple[SSAValue, int] | None = None
    for operand, map_ in zip(op.operands, maps_of(op), strict=True):
        for position, loop in enumerate(map_):
            if loop == dim:
                size = cast(TensorType, operand.type).get_shape()[position]
                if size >= 0:
                    return size
                found = found or (operand, position)
    if found is None:
        raise NoMatch("a loop that no operand follows")
    return found


def reduction_step(op: linalg.GenericOp) -> tuple[str, SSAValue] | None:
    """("add" | "max", what is combined into the result in each step), for a generic that reduces."""
    if len(op.results) != 1 or not has_simple_maps(op):
        return None
    last = op.body.block.last_op
    carried = op.body.block.args[-1]
    if not isinstance(last, linalg.YieldOp):
        return None
    combine = last.operands[0].owner
    if not isinstance(combine, Operation) or len(combine.operands) != 2 or carried not in combine.operands:
        return None
    kind = "add" if combine.name == "arith.addf" else "max" if combine.name in MAXIMA else None
    value = combine.operands[1] if combine.operands[0] is carried else combine.operands[0]
    if kind is None or len(list(carried.uses)) != 1:
        return None
    return kind, value


def _loops(op: linalg.GenericOp, result: int, axes: Sequence[Axis]) -> dict[int, Axis]:
    """The axis of each parallel loop, from those of a result."""
    followed = maps_of(op)[len(op.inputs) + result]
    loops = {dim: axis for dim, axis in zip(followed, axes, strict=True) if dim is not None}
    for dim in range(len(op.iterator_types)):
        if dim not in loops and op.iterator_types.data[dim].data == IteratorType.PARALLEL:
            loops[dim] = ()
    return loops


def _operand_axes(op: linalg.GenericOp, operand: int, loops: dict[int, Axis]) -> list[Axis]:
    shape = cast(TensorType, op.operands[operand].type).get_shape()
    dims = maps_of(op)[operand]
    axes = [() if dim is None else loops[dim] for dim in dims]
    return [axis if size != 1 or all(atom.size == 1 for atom in axis) else () for axis, size in zip(axes, shape, strict=True)]


def _joined(axes: Sequence[Axis], group: Sequence[int]) -> Axis:
    return tuple(atom for dim in group for atom in axes[dim])


def minus_infinity(node: Node) -> bool:
    """Whether it is the constant -inf."""
    return constant(node) == float("-inf") and isinstance(node.type, AnyFloat)


def zero(type_: Attribute) -> Splat:
    """The float 0."""
    return Splat(FloatAttr(0.0, cast(AnyFloat, type_)), type_)
