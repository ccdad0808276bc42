"""An attention taken apart, so that what its operands are made by can be looked through, and put together again.

The dims of its domain are atoms, its operands elements over them (`attnc.analysis.elements`), its region an expression. Looking
through a reshape may split an atom: then the attention is made anew over the finer dims. Otherwise its domain stays, and only
operands and maps are others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import cast

from xdsl.dialects import arith, tensor
from xdsl.dialects.builtin import AffineMapAttr, ArrayAttr, ModuleOp, TensorType
from xdsl.dialects.linalg import ops as linalg
from xdsl.ir import Block, BlockArgument, Operation, Region, SSAValue
from xdsl.ir.affine import AffineDimExpr, AffineMap
from xdsl.utils.exceptions import VerifyException

from attnc.analysis.axes import Atom, Axis, NoMatch, canonical_size, flat, split_axis
from attnc.analysis.elements import Apply, Element, Elements, Node, Outer, Position, Splat, groups_of, is_layout, maps_of
from attnc.analysis.roles import map_results
from attnc.dialects.building import Builder
from attnc.dialects.linalg_ext import AttentionLike, AttentionOp, IndexOp, OnlineAttentionOp, YieldOp
from attnc.transforms.convert_attention_to_online_attention import append_mask
from attnc.transforms.raise_attention_building import (
    Domain,
    build_attention,
    clear,
    erase_unused,
    insert_before,
    with_a_dim_each,
)
from attnc.transforms.raise_attention_region import RegionWriter

VIEW, TRANSPOSE, BROADCAST, RESHAPE = "view", "transpose", "broadcast", "reshape"
QUERY, KEY, VALUE = range(3)


def fold_each(module: ModuleOp, fold: Callable[[Folding], bool]) -> bool:
    """Runs `fold` on every attention of the module's functions until it finds nothing more; whether it found anything."""
    found = False
    for function in module.ops:
        for region in function.regions:
            for block in region.blocks:
                for op in list(block.ops):
                    current: AttentionLike | None = op if isinstance(op, AttentionOp | OnlineAttentionOp) else None
                    while current is not None:
                        current = _folded(current, fold)
                        found = found or current is not None
                if found:
                    erase_unused(block)
    return found


def _folded(op: AttentionLike, fold: Callable[[Folding], bool]) -> AttentionLike | None:
    try:
        folding = Folding(op)
        return folding.put_together() if fold(folding) else None
    except NoMatch:
        return None


class Folding:
    """One attention. `operands` are query, key and value; `out` are the result's axes, `result` what stands for it."""

    def __init__(self, op: AttentionLike):
        self.op = op
        self.elements = Elements()
        self.dims: list[Axis] = []
        for operand, position in op.extents:
            shape = cast(TensorType, operand.type).get_shape()
            self.dims.append((Atom(shape[position] if shape[position] >= 0 else (operand, position)),))
        self.operands = [self._element(place) for place in range(3)]
        self.scale: SSAValue = op.scale
        self.build = Builder(Block())
        """Operations that go before the attention."""
        self.result: SSAValue = op.results[0]
        self.out = self._axes(len(op.operands) - len(op.inits))
        self.changed_out = False
        self.rewrites_region = False
        self.changes_domain = False

    def _axes(self, place: int) -> tuple[Axis, ...]:
        return tuple(() if dim is None else self.dims[dim] for dim in map_results(self.op.maps[place]))

    def _element(self, place: int) -> Element:
        return self.elements.at(self.op.operands[place], self._axes(place))

    def scale_node(self) -> Node:
        """The scale of now."""
        return Outer(self.scale)

    # -- looking through --------------------------------------------------------------------------------------------------

    def peel(self, kinds: Collection[str]) -> bool:
        """Looks through producers of the given kinds, and through views to reach one; whether there were any."""
        found = False
        for place in range(3):
            before = self.operands[place]
            after = self.deepest(before, kinds)
            if after is None:
                continue
            self.operands[place] = after
            try:
                columns = set(self.domain(Builder(Block())).columns)
            except NoMatch:
                columns = set(flat(atom for axis in self.dims for atom in axis))
            if columns - {atom for dim in self.op.roles.n for atom in flat(self.dims[dim])}:
                self.operands[place] = before  # a batch dim that only the value has left would become its columns
            else:
                found = True
        return found

    def drop_views(self) -> bool:
        """Looks through views that undo one another, so that an operand is a tensor with a dim for each of its dims."""
        found = False
        for place, element in enumerate(self.operands):
            while step_kind(element.value) == VIEW:
                try:
                    before = self.elements.peel_once(element)
                except NoMatch:
                    break
                if before is None:
                    break
                element = before
                if all(len(flat(axis)) == 1 for axis in element.axes):
                    self.operands[place], found = element, True
        return found

    def deepest(self, element: Element, kinds: Collection[str]) -> Element | None:
        """The element behind the last producer of one of the kinds; None if there is none."""
        found: Element | None = None
        while (kind := step_kind(element.value)) is not None and (kind in kinds or kind == VIEW):
            try:
                before = self.elements.peel_once(element)
            except NoMatch:
                break
            if before is None:
                break
            element = before
            found = element if kind in kinds else found
        return found

    # -- putting together -------------------------------------------------------------------------------------------------

    def domain(self, build: Builder) -> Domain:
        """The domain that the operands have now."""
        query, key, value = (self.elements.at(element.value, element.axes) for element in self.operands)
        return Domain(build, query, key, value, self.out)

    def put_together(self) -> AttentionLike:
        """Replaces the attention by one with the operands, the scale and the result of now. Raises NoMatch if it cannot."""
        scratch = self.build.block
        try:
            new, value = (None if self.changes_domain else self._in_place()) or self._anew()
        except NoMatch:
            clear(scratch)
            raise
        anchor = self.op
        insert_before(scratch, anchor)
        for old, replacement in ((self.result, value), *zip(self.op.results[1:], new.results[1:], strict=True)):
            if old is not replacement:
                replacement.name_hint = old.name_hint
                old.replace_all_uses_with(replacement)
        if not any(result.uses for result in anchor.results):
            anchor.detach()
            anchor.erase()
        return new

    def _in_place(self) -> tuple[AttentionLike, SSAValue] | None:
        """The same domain with other operands and maps."""
        op, build = self.op, self.build
        atoms = [axis[0] for axis in self.dims]
        if any(atom.parts is not None for atom in atoms):
            return None
        axes = [[flat(axis) for axis in element.axes] for element in self.operands] + [[flat(axis) for axis in self.out]]
        if any(len(axis) != 1 for axis in axes[3]):
            return None
        maps = [AffineMap(len(atoms), 0, tuple(AffineDimExpr(atoms.index(a)) for axis in part for a in axis)) for part in axes]
        attributes = list(op.indexing_maps)
        attributes[:3] = map(AffineMapAttr, maps[:3])
        inits = list(op.inits)
        if self.changed_out:
            type_ = cast(TensorType, self.result.type)
            sizes = [self._size(axis[0]) for axis, size in zip(axes[3], type_.get_shape(), strict=True) if size < 0]
            inits = [build.add(tensor.EmptyOp(sizes, type_), "init")]
            attributes[-1] = AffineMapAttr(maps[3])
        values = [
            with_a_dim_each(build, element.value, part, self._size) for element, part in zip(self.operands, axes, strict=False)
        ]
        mask = [op.mask] if op.mask is not None else []
        region = Region(Block(arg_types=[self.op.region.block.args[0].type]))
        self._write_region(region.block, lambda atom: atoms.index(atom), self._size)
        new = type(op).create(
            operands=[*values, self.scale, *mask, *inits],
            properties={"indexing_maps": ArrayAttr(attributes)},
            attributes=dict(op.attributes),
            regions=[region],
            result_types=[init.type for init in inits],
        )
        try:
            new.verify(verify_nested_ops=False)
        except VerifyException:
            new.erase(safe_erase=False)
            return None
        build.insert(new, *(result.name_hint for result in op.results))
        return new, new.results[0]

    def _size(self, atom: Atom) -> SSAValue:
        if isinstance(atom.size, int):
            return self.build.constant(atom.size)
        if isinstance(atom.size, SSAValue):
            return atom.size
        return self.build.add(tensor.DimOp(atom.size[0], self.build.constant(atom.size[1])), "size")

    def _anew(self) -> tuple[AttentionLike, SSAValue]:
        """Another domain."""
        if not isinstance(self.op, AttentionOp):
            raise NoMatch("a running attention over other dims")
        if self.op.mask is not None:
            append_mask(self.op)
        domain = self.domain(self.build)

        def region(build: Builder, argument: SSAValue, position: Callable[[Atom], SSAValue]) -> SSAValue:
            return self._written(build, argument, position, domain.size)

        query, key, value = (element.value for element in self.operands)
        scale = self.scale
        return build_attention(domain, (query, key, value), scale, cast(TensorType, self.result.type), region)

    # -- the region -------------------------------------------------------------------------------------------------------

    def _write_region(self, block: Block, dim: Callable[[Atom], int], size: Callable[[Atom], SSAValue]) -> None:
        positions: dict[Atom, SSAValue] = {}
        build = Builder(block)

        def position(atom: Atom) -> SSAValue:
            if atom not in positions:
                positions[atom] = build.add(IndexOp(dim(atom)), None)
            return positions[atom]

        block.args[0].name_hint = "score"
        build.insert(YieldOp(self._written(build, block.args[0], position, size)))

    def _written(
        self, build: Builder, argument: SSAValue, position: Callable[[Atom], SSAValue], size: Callable[[Atom], SSAValue]
    ) -> SSAValue:
        """The region's operations over the dims of now, appended; what they yield."""
        writer = RegionWriter(build, self.elements, position, size, pairs=self.pairs)
        if self.rewrites_region:
            nodes = RegionNodes(self)
            return writer.score(nodes.of(nodes.last), nodes.score, argument)
        block = self.op.region.block
        values: dict[SSAValue, SSAValue] = {block.args[0]: argument}
        for op in block.ops:
            if isinstance(op, IndexOp):
                values[op.result] = writer.linear_position(self.dims[op.dimension])
            elif not isinstance(op, YieldOp):
                copy = op.clone(values)
                _replace_indices(copy, self, writer)
                build.block.add_op(copy)
                for old, new in zip(op.results, copy.results, strict=True):
                    new.name_hint = old.name_hint
        last = block.last_op
        assert isinstance(last, YieldOp)
        return values.get(last.value, last.value)

    def pairs(self, axes: Iterable[Axis]) -> bool:
        roles = self.op.roles
        keys = {atom for dim in roles.k2 for atom in flat(self.dims[dim])}
        rows = {atom for dim in roles.row for atom in flat(self.dims[dim])}
        atoms = {atom for axis in axes for atom in flat(axis)}
        return bool(atoms & keys) and bool(atoms & rows)


def _replace_indices(op: Operation, folding: Folding, writer: RegionWriter) -> None:
    """`iree_linalg_ext.index` inside of a loop of the region."""
    for inner in op.walk():
        if isinstance(inner, IndexOp):
            value = writer.linear_position(folding.dims[inner.dimension])
            inner.result.replace_all_uses_with(value)
            inner.detach()
            inner.erase()


def step_kind(value: SSAValue) -> str | None:
    """What the producer of a tensor does to its layout: nothing but another shape, or one of the kinds; None for all others."""
    owner = value.owner
    if isinstance(owner, tensor.CastOp | tensor.ExpandShapeOp):
        return VIEW
    if isinstance(owner, tensor.CollapseShapeOp):
        shape = cast(TensorType, owner.src.type).get_shape()
        wide = [sum(canonical_size(_size_of(owner.src, dim, shape)) != 1 for dim in group) for group in groups_of(owner)]
        return RESHAPE if any(count > 1 for count in wide) else VIEW
    if isinstance(owner, linalg.GenericOp) and is_layout(owner):
        source, target = maps_of(owner)
        return TRANSPOSE if {d for d in source if d is not None} >= _wide_loops(owner, target) else BROADCAST
    return None


def _size_of(value: SSAValue, dim: int, shape: Sequence[int]) -> int | tuple[SSAValue, int]:
    return shape[dim] if shape[dim] >= 0 else (value, dim)


def _wide_loops(op: linalg.GenericOp, target: Sequence[int | None]) -> set[int]:
    shape = cast(TensorType, op.results[0].type).get_shape()
    return {dim for dim, size in zip(target, shape, strict=True) if dim is not None and size != 1}


def only_user(value: SSAValue) -> Operation | None:
    """The operation that uses a value, if there is but one use."""
    uses = list(value.uses)
    return uses[0].operation if len(uses) == 1 else None


def axes_after(user: Operation, value: SSAValue, axes: tuple[Axis, ...]) -> tuple[Axis, ...] | None:
    """The axes of what a user makes of a tensor over `axes`; None for what is no rearrangement."""
    if isinstance(user, tensor.ExpandShapeOp):
        shape = cast(TensorType, user.result.type).get_shape()
        result: list[Axis] = []
        for axis, group in zip(axes, groups_of(user), strict=True):
            result += split_axis(axis, [shape[dim] if shape[dim] >= 0 else (user.result, dim) for dim in group])
        return tuple(result)
    if isinstance(user, tensor.CollapseShapeOp):
        return tuple(tuple(atom for dim in group for atom in axes[dim]) for group in groups_of(user))
    if isinstance(user, tensor.CastOp):
        return axes
    if isinstance(user, linalg.GenericOp) and is_layout(user) and user.inputs[0] is value:
        if step_kind(user.results[0]) == TRANSPOSE:
            source, target = maps_of(user)
            loops = {dim: axis for dim, axis in zip(source, axes, strict=True) if dim is not None}
            return tuple(loops.get(dim, ()) if dim is not None else () for dim in target)
    return None


class RegionNodes:
    """A region's operations as nodes: positions along the domain's dims, elements of captured tensors."""

    def __init__(self, folding: Folding):
        """Raises NoMatch where it has loops."""
        self.folding = folding
        self.block = folding.op.region.block
        self.score = Outer(self.block.args[0])
        self.known: dict[SSAValue, Node] = {self.block.args[0]: self.score}
        last = self.block.last_op
        assert isinstance(last, YieldOp)
        self.last = last.value
        if any(op.regions for op in self.block.ops):
            raise NoMatch("a loop in the region")

    def of(self, value: SSAValue) -> Node:
        """The node of a value."""
        if value not in self.known:
            self.known[value] = self._of(value)
        return self.known[value]

    def _of(self, value: SSAValue) -> Node:
        owner = value.owner
        if isinstance(owner, arith.ConstantOp):
            return Splat(owner.value, value.type)
        if isinstance(value, BlockArgument) or not isinstance(owner, Operation) or owner.parent is not self.block:
            return Outer(value)
        if isinstance(owner, IndexOp):
            return Position(self.folding.dims[owner.dimension], value.type)
        if isinstance(owner, tensor.ExtractOp):
            return self._read(owner)
        return Apply(owner, tuple(self.of(operand) for operand in owner.operands))

    def _read(self, op: tensor.ExtractOp) -> Node:
        """An element, where each index is the position along one dim of the domain, of that dim's size."""
        indices = [self.of(index) for index in op.indices]
        shape = cast(TensorType, op.tensor.type).get_shape()
        axes: list[Axis] = []
        for index, size in zip(indices, shape, strict=True):
            if isinstance(index, Position) and (size < 0 or all(atom.size == size for atom in index.axis)):
                axes.append(index.axis)
            elif size == 1 and isinstance(index, Splat):
                axes.append(())
        if len(axes) == len(indices) and "attnc.checked" not in op.attributes:
            return self.folding.elements.at(op.tensor, axes)
        return Apply(op, tuple(indices))
