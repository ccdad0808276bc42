"""Loads and stores of a loop's operands: runs of lanes, broadcasts and strided lanes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from xdsl.dialects.builtin import IndexType
from xdsl.ir import Attribute

from attnc.codegen.llvm.scalar import RegionValues
from attnc.codegen.llvm.text import Function, splat_constant, vector
from attnc.codegen.llvm.values import Value, element_type, storage_type

_SHORT = {"float": "f32", "double": "f64", "half": "f16"}


@dataclass
class Operand:
    """A tensor of a loop: where the loop stands in it, and its strides (elements) along the loop's dimensions."""

    type: Attribute
    pointer: str
    strides: list[str]

    @property
    def stored(self) -> str:
        return storage_type(self.type)

    def moved(self, f: Function, at: Mapping[int, str]) -> Operand:
        """At other places along some dimensions."""
        offset = "0"
        for d, index in at.items():
            offset = f.add(offset, f.mul(index, self.strides[d]))
        return Operand(self.type, f.pointer(self.pointer, offset, self.stored), self.strides)

    def load(self, e: RegionValues, inner: int | None, j: str | None, live: str | None) -> Value:
        """The elements from `j` on along dimension `inner`; one element for all lanes where its stride is 0."""
        f, stored = e.f, self.stored
        stride = self.strides[inner] if inner is not None and j is not None else "0"
        if stride == "0" or e.width == 1:
            pointer = self.pointer if stride == "0" else f.pointer(self.pointer, f.mul(str(j), stride), stored)
            return Value(self.type, _from_memory(e, self.type, f.load(stored, pointer), 1), False)
        type_ = vector(e.width, stored)
        zero = "zeroinitializer"
        if stride == "1":
            pointer = f.pointer(self.pointer, str(j), stored)
            if live is None:
                text = f.load(type_, pointer)
            else:
                name = f"llvm.masked.load.v{e.width}{_SHORT.get(stored, stored)}.p0"
                e.declarations.add(f"declare {type_} @{name}(ptr, i32, <{e.width} x i1>, {type_})")
                text = f.emit(f"call {type_} @{name}(ptr {pointer}, i32 1, <{e.width} x i1> {live}, {type_} {zero})")
        else:
            mask = live or splat_constant("true", e.width, "i1")
            name = f"llvm.masked.gather.v{e.width}{_SHORT.get(stored, stored)}.v{e.width}p0"
            e.declarations.add(f"declare {type_} @{name}(<{e.width} x ptr>, i32, <{e.width} x i1>, {type_})")
            pointers = self._lanes(e, str(j), stride)
            text = f.emit(f"call {type_} @{name}(<{e.width} x ptr> {pointers}, i32 1, <{e.width} x i1> {mask}, {type_} {zero})")
        return Value(self.type, _from_memory(e, self.type, text, e.width), True)

    def store(self, e: RegionValues, inner: int | None, j: str | None, live: str | None, value: Value) -> None:
        """Writes the elements from `j` on along dimension `inner`; a single one where there is no such."""
        f, stored = e.f, self.stored
        stride = self.strides[inner] if inner is not None and j is not None else None
        if stride is None or e.width == 1:
            pointer = self.pointer if stride is None else f.pointer(self.pointer, f.mul(str(j), stride), stored)
            f.store(stored, _to_memory(e, self.type, e.text(value, False), 1), pointer)
            return
        type_ = vector(e.width, stored)
        text = _to_memory(e, self.type, e.text(value, True), e.width)
        if stride == "1":
            pointer = f.pointer(self.pointer, str(j), stored)
            if live is None:
                f.store(type_, text, pointer)
                return
            name = f"llvm.masked.store.v{e.width}{_SHORT.get(stored, stored)}.p0"
            e.declarations.add(f"declare void @{name}({type_}, ptr, i32, <{e.width} x i1>)")
            f.do(f"call void @{name}({type_} {text}, ptr {pointer}, i32 1, <{e.width} x i1> {live})")
            return
        mask = live or splat_constant("true", e.width, "i1")
        name = f"llvm.masked.scatter.v{e.width}{_SHORT.get(stored, stored)}.v{e.width}p0"
        e.declarations.add(f"declare void @{name}({type_}, <{e.width} x ptr>, i32, <{e.width} x i1>)")
        pointers = self._lanes(e, str(j), stride)
        f.do(f"call void @{name}({type_} {text}, <{e.width} x ptr> {pointers}, i32 1, <{e.width} x i1> {mask})")

    def _lanes(self, e: RegionValues, j: str, stride: str) -> str:
        """The addresses of lanes that are `stride` elements apart."""
        f, width = e.f, e.width
        lanes = e.text(Value(IndexType(), None, True, base=j, step=1), True)
        type_ = vector(width, "i64")
        offsets = f.emit(f"mul {type_} {lanes}, {f.splat(stride, width, 'i64')}")
        return f.emit(f"getelementptr {self.stored}, ptr {self.pointer}, {type_} {offsets}")


def _from_memory(e: RegionValues, type_: Attribute, text: str, width: int) -> str:
    """A bool is a byte in memory."""
    if element_type(type_) != "i1":
        return text
    return e.f.emit(f"icmp ne {vector(width, 'i8')} {text}, {splat_constant('0', width, 'i8')}")


def _to_memory(e: RegionValues, type_: Attribute, text: str, width: int) -> str:
    if element_type(type_) != "i1":
        return text
    return e.f.emit(f"zext {vector(width, 'i1')} {text} to {vector(width, 'i8')}")
