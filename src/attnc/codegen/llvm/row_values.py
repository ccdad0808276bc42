"""The values of tiles in the present row: in registers, in scratch, or made from where the row is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xdsl.dialects.builtin import IndexType
from xdsl.ir import SSAValue

from attnc.codegen.llvm.program import Program, columns_of
from attnc.codegen.llvm.storage import Storage, read, write
from attnc.codegen.llvm.values import Value
from attnc.dialects import tile
from attnc.errors import LoweringError

if TYPE_CHECKING:
    from attnc.codegen.llvm.body import BodyEmitter


class RowValues:
    """What is at hand in a row of a strip: `local` values of one column, `values` lanes from the present column on."""

    program: Program
    start: str
    count: str

    def __init__(self, body: BodyEmitter):
        self.body, self.region, self.f = body, body.region, body.f
        self.width = body.kernel.width
        self.storages = body.storages
        self.values: dict[SSAValue, Value] = {}

    def copy_all(self, copies: Sequence[tuple[SSAValue, Storage]]) -> None:
        """First values into carried tiles, for all rows of the task."""
        self.program = Program([], [], [], {}, {}, set(), {})
        self.values = {}
        self.start, self.count = "0", self.body.row_count
        if copies:
            self.copy_rows(copies)

    def copy_rows(self, copies: Sequence[tuple[SSAValue, Storage]]) -> None:
        f, region = self.f, self.region

        def row(r: str, _: list[str]) -> None:
            self._enter_row(r)
            for value, storage in copies:
                address = storage.row(region, self.row, self.task_row)
                if columns_of(value) == 1:
                    write(region, storage, address, None, self._row_value(value))
                    continue

                def lanes(
                    j: str, _: list[str], value: SSAValue = value, storage: Storage = storage, address: str = address
                ) -> None:
                    write(region, storage, address, j, self._lane_value(value, j))

                f.loop("0", str(-(-columns_of(value) // self.width) * self.width), self.width, lanes, hint="copy")

        f.loop("0", self.count, 1, row, hint="row")

    def _enter_row(self, r: str) -> None:
        self.row = r
        self.task_row = r if self.start == "0" else self.f.add(self.start, r)
        self.local: dict[SSAValue, Value] = {}
        self.addresses: dict[SSAValue, str] = {}

    # -- values -------------------------------------------------------------------------------------------------------
    def _row_value(self, value: SSAValue) -> Value:
        """A tile's value in the present row, if it has one column."""
        value = self.program.resolve(value)
        if value in self.local:
            return self.local[value]
        source = value.owner
        if isinstance(source, tile.FillOp):
            return self.region.values[source.value]
        if isinstance(source, tile.IotaOp):
            base = self.region.scalar(source.offset)
            rows, _ = tile.shape_of(value)
            text = base if rows == 1 else self.f.add(base, self.task_row)
            found = Value(IndexType(), text)
        else:
            found = read(self.region, self.storage(value), self._address(value), None)
        self.local[value] = found
        return found

    def _lane_value(self, value: SSAValue, j: str) -> Value:
        """A tile's values in the present row from column `j` on."""
        value = self.program.resolve(value)
        if columns_of(value) == 1:
            return self._row_value(value)
        if value in self.values:
            return self.values[value]
        source = value.owner
        if isinstance(source, tile.FillOp):
            return self.region.values[source.value]
        if isinstance(source, tile.IotaOp):
            base = self.f.add(self.region.scalar(source.offset), j)
            return Value(IndexType(), None, True, base=base, step=1)
        return read(self.region, self.storage(value), self._address(value), j)

    def storage(self, value: SSAValue) -> Storage:
        if value not in self.storages:
            raise LoweringError(
                f"tile dialect: the value of '{getattr(value.owner, 'name', 'block argument')}' is used where it is not at hand"
            )
        return self.storages[value]

    def _address(self, value: SSAValue) -> str:
        """The address of the present row of a stored tile."""
        if value not in self.addresses:
            self.addresses[value] = self.storage(value).row(self.region, self.row, self.task_row)
        return self.addresses[value]
