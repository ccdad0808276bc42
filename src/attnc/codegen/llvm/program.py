"""What one block of a `tile` body does, as a straight list of row operations.

The body of a `tile.for` chooses by class; a class picks one way through the `tile.case` operations, and that way is a straight
line. So a block becomes, for each class, a `Program`: scalar operations, right-hand operands to stage, then row operations
to run on one strip of rows after another, in `Segment`s that end at each `tile.dot`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from xdsl.dialects.builtin import TensorType
from xdsl.ir import Block, Operation, SSAValue

from attnc.dialects import tile
from attnc.errors import LoweringError

Resolve = Callable[[SSAValue], SSAValue]
Users = dict[SSAValue, list[Operation]]


def is_tile(value: SSAValue) -> bool:
    return isinstance(value.type, TensorType)


def columns_of(value: SSAValue) -> int:
    return tile.shape_of(value)[1]


@dataclass
class Group:
    """Row operations between two products, done row by row. `phase[op]` orders them: a lane operation that needs a row's
    maximum comes in a later phase, in another loop over the row's columns."""

    ops: list[Operation] = field(default_factory=list)
    phase: dict[Operation, int] = field(default_factory=dict)

    @property
    def phases(self) -> int:
        return max(self.phase.values(), default=-1) + 1


@dataclass
class Program:
    """A straight line of operations on row tiles."""

    scalars: list[Operation]
    segments: list[Group | tile.DotOp]
    outputs: list[SSAValue]
    alias: dict[SSAValue, SSAValue]
    users: dict[SSAValue, list[Operation]]
    careful: set[Operation]
    """Operations whose results only the careful product wants (`where`)."""
    absorbed: dict[tile.DotOp, tuple[SSAValue, SSAValue]]
    """`dot onto (carried * rescale)`: the product scales while it loads; (what is scaled, the rows' factors)."""

    def resolve(self, value: SSAValue) -> SSAValue:
        """What a value is on this way through the cases."""
        while value in self.alias:
            value = self.alias[value]
        return value

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for two classes that take the same way."""
        ops: list[object] = []
        for segment in self.segments:
            ops.extend([id(segment)] if isinstance(segment, tile.DotOp) else [id(op) for op in segment.ops])
        return (*ops, *(id(output) for output in self.outputs))

    @property
    def has_rows(self) -> bool:
        return bool(self.segments)

    @property
    def dots(self) -> list[tile.DotOp]:
        return [segment for segment in self.segments if isinstance(segment, tile.DotOp)]


def straight_line(block: Block, label: str | None) -> tuple[list[Operation], list[SSAValue], dict[SSAValue, SSAValue]]:
    """The operations of a block if every case goes the way of `label`; what its terminator yields; what case results stand
    for."""
    alias: dict[SSAValue, SSAValue] = {}

    def walk(inner: Block) -> tuple[list[Operation], list[SSAValue]]:
        ops: list[Operation] = []
        for op in inner.ops:
            if isinstance(op, tile.YieldOp):
                return ops, list(op.values)
            if isinstance(op, tile.CaseOp):
                if label is None:
                    raise LoweringError("tile.case outside the body of a tile.for")
                taken, yielded = walk(op.region_for(label).block)
                ops.extend(taken)
                alias.update(zip(op.results, yielded, strict=True))
            else:
                ops.append(op)
        return ops, []

    ops, yielded = walk(block)
    return ops, yielded, alias


def build_program(
    ops: Sequence[Operation], outputs: Sequence[SSAValue], alias: dict[SSAValue, SSAValue], outside: set[SSAValue]
) -> Program:
    """Sort a straight line into scalars, right-hand operands and segments. `outside` are values that others use later."""

    def resolve(value: SSAValue) -> SSAValue:
        while value in alias:
            value = alias[value]
        return value

    users: dict[SSAValue, list[Operation]] = {}
    for op in ops:
        for operand in op.operands:
            users.setdefault(resolve(operand), []).append(op)
    outputs = [resolve(output) for output in outputs]
    wanted = set(outputs) | outside
    right = _right_hand(ops, resolve, users, wanted)
    careful = _careful_only(ops, resolve, users, wanted)
    absorbed: dict[tile.DotOp, tuple[SSAValue, SSAValue]] = {}
    absorbed_maps: set[Operation] = set()
    for op in ops:
        if isinstance(op, tile.DotOp) and op.acc is not None:
            product = _rescaled(resolve(op.acc), users, wanted)
            if product is not None:
                absorbed[op] = (resolve(product[1]), resolve(product[2]))
                absorbed_maps.add(product[0])

    scalars: list[Operation] = []
    segments: list[Group | tile.DotOp] = []
    group = Group()
    available: dict[SSAValue, int] = {}
    for op in ops:
        if op in right or op in absorbed_maps or isinstance(op, tile.ClassifyOp):
            continue
        if isinstance(op, tile.DotOp):
            if op.transpose_lhs is not None:
                raise LoweringError("tile.dot with a transposed left operand is not emitted for CPUs so far")
            if group.ops:
                segments.append(group)
                group, available = Group(), {}
            segments.append(op)
            continue
        if isinstance(op, tile.AccumulateOp):
            raise LoweringError("tile.accumulate (gradients) is not emitted for CPUs so far")
        tiles = [operand for operand in op.operands if is_tile(operand)]
        if not tiles and not any(is_tile(result) for result in op.results):
            scalars.append(op)
            continue
        if isinstance(op, tile.IotaOp | tile.FillOp):
            continue
        phase = max((available.get(resolve(operand), 0) for operand in tiles), default=0)
        group.ops.append(op)
        group.phase[op] = phase
        for result in op.results:
            available[result] = phase + 1 if isinstance(op, tile.ReduceOp) else phase
    if group.ops:
        segments.append(group)
    return Program(scalars, segments, outputs, alias, users, careful, absorbed)


def _right_hand(ops, resolve, users, wanted) -> set[Operation]:
    """Loads and stages that only feed the right-hand side of products: they are packed, not computed row by row."""
    found: set[Operation] = set()
    for op in ops:
        if not isinstance(op, tile.DotOp):
            continue
        value = resolve(op.rhs)
        while isinstance(source := value.owner, tile.StageOp | tile.LoadOp) and source in ops:
            found.add(source)
            if isinstance(source, tile.LoadOp):
                break
            value = resolve(source.tile)
    for op in list(found):
        for result in op.results:
            others = [
                user
                for user in users.get(result, [])
                if user not in found and not (isinstance(user, tile.DotOp) and resolve(user.rhs) is result)
            ]
            if others or result in wanted:
                raise LoweringError(f"{op.name}: a right-hand operand of tile.dot must have no other use")
    return found


def _careful_only(ops, resolve, users, wanted) -> set[Operation]:
    found: set[Operation] = set()
    for op in ops:
        if isinstance(op, tile.DotOp) and op.live is not None:
            value = resolve(op.live)
            source = value.owner
            if (
                isinstance(source, tile.MapOp)
                and value not in wanted
                and all(isinstance(u, tile.DotOp) and u.live is not None and resolve(u.live) is value for u in users[value])
            ):
                found.add(source)
    return found


def _rescaled(value: SSAValue, users: Users, wanted: set[SSAValue]) -> tuple[Operation, SSAValue, SSAValue] | None:
    """`value` = wide * row factor, used once: (the map, wide, factor)."""
    source = value.owner
    if not isinstance(source, tile.MapOp) or value in wanted or len(users.get(value, [])) != 1 or len(source.inputs) != 2:
        return None
    body = list(source.body.block.ops)
    if len(body) != 2 or body[0].name != "arith.mulf" or body[1].operands[0] is not body[0].results[0]:
        return None
    if set(body[0].operands) != set(source.body.block.args):
        return None
    wide, factor = source.inputs
    if columns_of(factor) != 1:
        wide, factor = factor, wide
    if columns_of(factor) != 1 or tile.shape_of(wide) != tile.shape_of(value):
        return None
    return source, wide, factor
