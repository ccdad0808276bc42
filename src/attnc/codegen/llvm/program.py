"""What one block of a `tile` body does, as a straight list of row operations.

The body of a `tile.for` chooses by class; a class picks one way through the `tile.case` operations, and that way is a straight
line. So a block becomes, for each class, a `Program`: scalar operations, right-hand operands to stage, then row operations
to run on one strip of rows after another, in `Segment`s that end at each `tile.dot`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
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
    lives: set[tile.MapOp]
    """Maps that say where a product has a `where`: done afresh, from what they need, when a careful product is."""
    absorbed: dict[tile.DotOp, tuple[SSAValue, SSAValue]]
    """`dot onto (carried * rescale)`: the product scales while it loads; (what is scaled, the rows' factors)."""
    sums: list[tile.DotOp] = field(default_factory=list)
    """Products whose left operand is read transposed: over all rows, after all strips."""

    def resolve(self, value: SSAValue) -> SSAValue:
        """What a value is on this way through the cases."""
        while value in self.alias:
            value = self.alias[value]
        return value

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for two classes that take the same way."""
        ops: list[object] = [id(dot) for dot in self.sums]
        for segment in self.segments:
            ops.extend([id(segment)] if isinstance(segment, tile.DotOp) else [id(op) for op in segment.ops])
        return (*ops, *(id(output) for output in self.outputs))

    @property
    def has_rows(self) -> bool:
        return bool(self.segments or self.sums)

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
    ops: Sequence[Operation],
    outputs: Sequence[SSAValue],
    alias: dict[SSAValue, SSAValue],
    outside: set[SSAValue],
    elsewhere: Container[Operation] = (),
) -> Program:
    """Sort a straight line into scalars, right-hand operands and segments. `outside` are values that others use later;
    `elsewhere` are loads and stages that feed the right-hand sides of products of inner loops."""

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
    lives = {op for dot in _dots(ops) if dot.live is not None and isinstance(op := resolve(dot.live).owner, tile.MapOp)}
    unwanted = {op for op in lives if not _has_other_use(op.results[0], resolve, users, wanted)}
    absorbed: dict[tile.DotOp, tuple[SSAValue, SSAValue]] = {}
    absorbed_maps: set[Operation] = set()
    for op in _dots(ops):
        product = _rescaled(resolve(op.acc), users, wanted) if op.acc is not None and op.transpose_lhs is None else None
        if product is not None:
            absorbed[op] = (resolve(product[1]), resolve(product[2]))
            absorbed_maps.add(product[0])

    scalars: list[Operation] = []
    groups: dict[int, Group] = {}
    products: dict[int, list[tile.DotOp]] = {}
    sums: list[tile.DotOp] = []
    made: dict[SSAValue, int] = {}
    """The number of the group that makes a value, or of the first group that can use it."""
    available: dict[SSAValue, int] = {}
    for op in ops:
        if op in right or op in elsewhere or op in absorbed_maps or op in unwanted:
            continue
        tiles = [resolve(operand) for operand in op.operands if is_tile(operand)]
        if not tiles and not any(is_tile(result) for result in op.results):
            if not isinstance(op, tile.ClassifyOp):
                scalars.append(op)
            continue
        if isinstance(op, tile.IotaOp | tile.FillOp):
            continue
        if isinstance(op, tile.DotOp) and op.transpose_lhs is not None:
            sums.append(op)
            continue
        number = max((made.get(value, 0) for value in tiles), default=0)
        if isinstance(op, tile.DotOp):
            if op in absorbed:
                number = max([number, *(made.get(value, 0) for value in absorbed[op])])
            products.setdefault(number, []).append(op)
            made[op.result] = number + 1
            continue
        group = groups.setdefault(number, Group())
        phase = max((available.get(value, 0) for value in tiles if made.get(value) == number), default=0)
        group.ops.append(op)
        group.phase[op] = phase
        for result in op.results:
            made[result] = number
            available[result] = phase + 1 if isinstance(op, tile.ReduceOp) else phase
    segments: list[Group | tile.DotOp] = []
    for number in range(max([*groups, *products], default=-1) + 1):
        segments += [groups[number]] if number in groups else []
        segments += products.get(number, [])
    _check_sums(sums, resolve, users)
    return Program(scalars, segments, outputs, alias, users, lives, absorbed, sums)


def _dots(ops: Sequence[Operation]) -> list[tile.DotOp]:
    return [op for op in ops if isinstance(op, tile.DotOp)]


def _check_sums(sums: list[tile.DotOp], resolve: Resolve, users: Users) -> None:
    """What sums over all rows is there only after all strips."""
    for dot in sums:
        for user in users.get(dot.result, []):
            if not isinstance(user, tile.DotOp) or user not in sums or user.acc is None or resolve(user.acc) is not dot.result:
                raise LoweringError(
                    "a tile.dot with a transposed left operand may only be yielded or added onto by another one"
                )


def _right_hand(ops: Sequence[Operation], resolve: Resolve, users: Users, wanted: set[SSAValue]) -> set[Operation]:
    """Loads and stages that only feed the right-hand side of products: they are packed, not computed row by row."""
    found: set[Operation] = set()
    for op in _dots(ops):
        if op.transpose_lhs is None:
            found |= {source for source in right_hand_sources(op, resolve) if source in ops}
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


def right_hand_sources(dot: tile.DotOp, resolve: Resolve) -> list[Operation]:
    """The stage, the map that widens, and the load that a product's right-hand side comes from."""
    found: list[Operation] = []
    value = resolve(dot.rhs)
    while isinstance(source := value.owner, tile.StageOp | tile.LoadOp | tile.MapOp):
        if isinstance(source, tile.MapOp) and not widens(source):
            break
        found.append(source)
        if isinstance(source, tile.LoadOp):
            break
        value = resolve(source.tile if isinstance(source, tile.StageOp) else source.inputs[0])
    return found


def widens(op: tile.MapOp) -> bool:
    """Whether a map only puts its one input's elements into a wider type."""
    body = list(op.body.block.ops)
    return len(op.inputs) == 1 and len(body) == 2 and body[0].name == "arith.extf" and body[1].operands[0].owner is body[0]


def _has_other_use(value: SSAValue, resolve: Resolve, users: Users, wanted: set[SSAValue]) -> bool:
    """Whether anything but the `where` of products wants a value."""
    if value in wanted:
        return True
    return any(
        not isinstance(user, tile.DotOp)
        or any(resolve(operand) is value for operand in (user.lhs, user.rhs))
        or (user.acc is not None and resolve(user.acc) is value)
        for user in users.get(value, [])
    )


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
