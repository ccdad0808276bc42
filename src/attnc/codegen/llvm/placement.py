"""Which values of a program need room in scratch, and whose room may be taken over."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xdsl.ir import Operation, SSAValue

from attnc.codegen.llvm.program import Group, Program, columns_of
from attnc.codegen.llvm.storage import Storage, element_of
from attnc.codegen.llvm.values import storage_bytes
from attnc.dialects import tile


class Placement:
    """Places for the values of one program. `storages` is the whole task's; `outside` are values that later programs read;
    `carried` the carried tiles of the loop around (none outside of loops, where places hold all rows of the task). In a loop,
    places hold the rows of a strip, but for what the sums over all rows read."""

    def __init__(
        self,
        program: Program,
        storages: dict[SSAValue, Storage],
        allocate: Callable[[SSAValue, bool, bool], Storage],
        outside: set[SSAValue],
        carried: Sequence[SSAValue],
        task_level: bool,
    ):
        self.program, self.storages, self.allocate = program, storages, allocate
        self.outside, self.carried, self.task_level = outside, list(carried), task_level
        self.flags: dict[SSAValue, Storage] = {}
        self.all_rows = {program.resolve(operand) for dot in program.sums for operand in (dot.lhs, dot.rhs)}

    def place(self, op: Operation, group: Group) -> None:
        """Room in scratch for an operation's result, where other loops or products want it."""
        if not op.results or isinstance(op, tile.StoreOp):
            return
        result = op.results[0]
        users = self.program.users.get(result, [])
        wide = any(isinstance(user, tile.DotOp) and self._is_matrix(user, result) for user in users)
        needed = result in self.outside or result in self.program.outputs or wide
        for user in users:
            same = user in group.phase
            later = not same or group.phase[user] > group.phase[op]
            needed |= user in self.program.lives or (not same if columns_of(result) == 1 else later)
        for dot, (_, factor) in self.program.absorbed.items():
            needed |= factor is result and dot is not None
        if not needed or result in self.storages:
            return
        reused = self._reusable(op, group)
        self.storages[result] = reused or self.allocate(result, self.task_level or result in self.all_rows, wide)

    def live(self, dot: tile.DotOp) -> Storage:
        """Where to write the flags of a product's `where`."""
        assert dot.live is not None
        value = self.program.resolve(dot.live)
        if value not in self.flags:
            all_rows = any(other.live is not None and self.program.resolve(other.live) is value for other in self.program.sums)
            self.flags[value] = self.allocate(value, self.task_level or all_rows, True)
        return self.flags[value]

    def _is_matrix(self, dot: tile.DotOp, value: SSAValue) -> bool:
        resolve = self.program.resolve
        if dot.live is not None and resolve(dot.live) is value and value.owner not in self.program.lives:
            return True
        if dot.transpose_lhs is not None and resolve(dot.rhs) is value:
            return True
        return any(operand is not None and resolve(operand) is value for operand in (dot.lhs, dot.acc))

    def _reusable(self, op: Operation, group: Group) -> Storage | None:
        """The place of an input that nobody reads after this operation has."""
        result = op.results[0]
        if self.task_level or not isinstance(op, tile.MapOp) or columns_of(result) == 1 or result in self.all_rows:
            return None
        for value in op.inputs:
            value = self.program.resolve(value)
            storage = self.storages.get(value)
            if storage is None or storage.task or columns_of(value) != columns_of(result) or value in self.program.outputs:
                continue
            if storage_bytes(element_of(value)) != storage_bytes(element_of(result)):
                continue
            others = [user for user in self.program.users[value] if user is not op]
            if all(self._finished(user, op, group) for user in others):
                return Storage(storage.pointer, storage.stride, element_of(result), False)
        return None

    def _finished(self, user: Operation, op: Operation, group: Group) -> bool:
        if user in self.program.lives:
            return False  # done again whenever a careful product is
        if user not in group.phase:
            # Earlier segments have run; later ones have not.
            return any(
                (isinstance(segment, Group) and user in segment.phase) or segment is user
                for segment in self.program.segments[: self.program.segments.index(group)]
            )
        if group.phase[user] != group.phase[op]:
            return group.phase[user] < group.phase[op]
        return group.ops.index(user) < group.ops.index(op)

    def accumulator(self, dot: tile.DotOp) -> tuple[Storage, SSAValue | None]:
        """Where a product goes: onto its accumulator's own place if nobody else reads that; else somewhere of its own, where
        the accumulator must be copied to first (the second result)."""
        program, resolve = self.program, self.program.resolve
        if dot.acc is None:
            if dot.result not in self.storages:
                self.storages[dot.result] = self.allocate(dot.result, self.task_level, True)
            return self.storages[dot.result], None
        base = program.absorbed[dot][0] if dot in program.absorbed else resolve(dot.acc)
        readers = program.users.get(base, [])
        alone = len(readers) == 1 and base not in self.outside
        if alone and base in self.carried:
            place = self.carried.index(base)
            if program.outputs[place] is dot.result:
                self.storages[dot.result] = self.storages[base]
                return self.storages[base], None
        elif alone and base in self.storages and base not in program.outputs and not self.storages[base].task:
            self.storages[dot.result] = self.storages[base]
            return self.storages[base], None
        if dot.result not in self.storages or self.storages[dot.result] is self.storages.get(base):
            self.storages[dot.result] = self.allocate(dot.result, self.task_level, True)
        return self.storages[dot.result], base
