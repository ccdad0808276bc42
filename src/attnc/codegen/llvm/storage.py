"""Where row tiles lie between loops: arrays in a thread's scratch."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects.builtin import TensorType
from xdsl.ir import Attribute, SSAValue

from attnc.codegen.llvm.operations import RegionEmitter
from attnc.codegen.llvm.text import splat_constant, vector
from attnc.codegen.llvm.values import Value, element_type, storage_bytes, storage_type


@dataclass
class Storage:
    """A tile in scratch: row r at `pointer + r * stride` elements. `task`: it holds all rows of a task, else those of one
    strip."""

    pointer: str
    stride: int
    type: Attribute
    task: bool

    @property
    def element(self) -> str:
        return storage_type(self.type)

    def row(self, region: RegionEmitter, strip_row: str, task_row: str) -> str:
        """The address of a row, given its number in the strip and in the task."""
        f = region.f
        row = task_row if self.task else strip_row
        offset = row if self.stride == 1 else f.emit(f"mul i64 {row}, {self.stride}")
        return f.pointer(self.pointer, offset, self.element)


def element_of(value: SSAValue) -> Attribute:
    """The element type of a tile."""
    assert isinstance(value.type, TensorType)
    return value.type.element_type


def read(region: RegionEmitter, storage: Storage, address: str, column: str | None) -> Value:
    """One element of a row (`column` None), or a vector of elements from `column` on."""
    f, width = region.f, region.width if column is not None else 1
    if column is not None:
        address = f.pointer(address, column, storage.element)
    text = f.load(vector(width, storage.element), address)
    if element_type(storage.type) == "i1":
        text = f.emit(f"icmp ne {vector(width, 'i8')} {text}, {splat_constant('0', width, 'i8')}")
    return Value(storage.type, text, column is not None)


def write(region: RegionEmitter, storage: Storage, address: str, column: str | None, value: Value) -> None:
    """The counterpart of `read`."""
    f, width = region.f, region.width if column is not None else 1
    text = region.text(value, column is not None)
    if element_type(storage.type) == "i1":
        text = f.emit(f"zext {vector(width, 'i1')} {text} to {vector(width, 'i8')}")
    if column is not None:
        address = f.pointer(address, column, storage.element)
    f.store(vector(width, storage.element), text, address)


__all__ = ["Storage", "element_of", "read", "storage_bytes", "write"]
