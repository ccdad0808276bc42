"""What the emitters know of a value: its type, its text, how deep it is; and of a buffer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from xdsl.dialects.builtin import (
    BFloat16Type,
    Float16Type,
    Float32Type,
    Float64Type,
    IndexType,
    IntegerType,
    MemRefType,
    StridedLayoutAttr,
)
from xdsl.ir import Attribute

from attnc.errors import LoweringError

(
    CONTEXT_ARGS,
    CONTEXT_SHARED,
    CONTEXT_SCRATCH,
    CONTEXT_STRIDE,
    CONTEXT_TASK,
    CONTEXT_SLOT,
    CONTEXT_TASKS,
    CONTEXT_FAULT,
) = range(8)
"""The words of the context that a kernel's `work` is called with."""

KERNEL, BLOCK, ROW, LANE = range(4)
"""Depths: what a value depends on at the most."""


def element_type(type_: Attribute) -> str:
    """The LLVM type that holds a scalar. bf16 is carried as its 16 bits, index as i64."""
    if isinstance(type_, Float32Type):
        return "float"
    if isinstance(type_, Float64Type):
        return "double"
    if isinstance(type_, Float16Type):
        return "half"
    if isinstance(type_, BFloat16Type):
        return "i16"
    if isinstance(type_, IndexType):
        return "i64"
    if isinstance(type_, IntegerType):
        return f"i{type_.width.data}"
    raise LoweringError(f"a value of type {type_} cannot be emitted")


def storage_type(type_: Attribute) -> str:
    """The LLVM type of an element in memory: as `element_type`, but a bool is a byte."""
    element = element_type(type_)
    return "i8" if element == "i1" else element


def storage_bytes(type_: Attribute) -> int:
    """The size of an element in memory."""
    return {"float": 4, "double": 8, "half": 2}.get(storage_type(type_)) or int(storage_type(type_)[1:]) // 8


@dataclass
class Value:
    """A region's value: `text` is a scalar, or, if `lane`, a vector of the emitter's width.

    An integer lane value may have `base` (the scalar of the vector's first lane) and `step` instead of a text. Where a narrower
    value was widened on the way to it, that holds only if the narrower lanes do not wrap around in their own type: then the
    value has `sources`, and `lanes` writes its vector from their texts."""

    type: Attribute
    text: str | None
    lane: bool = False
    base: str | None = None
    step: int = 0
    constant: int | float | None = None
    sources: tuple[Value, ...] = ()
    lanes: Callable[[list[str]], str] | None = None

    @property
    def element(self) -> str:
        return element_type(self.type)

    @property
    def bits(self) -> int:
        """The width of an integer."""
        return int(self.element[1:])

    def origins(self) -> list[Value]:
        """The values that this one's lanes are computed from, itself included, each once."""
        found: dict[int, Value] = {}
        waiting: list[Value] = [self]
        while waiting:
            value = waiting.pop()
            if id(value) not in found:
                found[id(value)] = value
                waiting += value.sources
        return list(found.values())

    def widened(self) -> list[Value]:
        """Those among its origins whose lanes may wrap around unnoticed."""
        pairs = ((value, source) for value in self.origins() for source in value.sources)
        return list({id(source): source for value, source in pairs if source.lane and source.bits < value.bits}.values())


@dataclass
class Buffer:
    """A kernel argument in memory: pointer, sizes and strides in elements as scalars at the kernel's depth. `unit[d]`: the
    stride of dimension d is known to be 1."""

    type: MemRefType
    pointer: str
    sizes: list[str]
    strides: list[str]
    unit: list[bool] = field(default_factory=list)

    @property
    def element(self) -> Attribute:
        return self.type.element_type


def static_strides(type_: MemRefType) -> list[int | None]:
    """The strides that a memref's layout fixes; None where they are run-time values."""
    if isinstance(type_.layout, StridedLayoutAttr):
        return [getattr(stride, "data", None) for stride in type_.layout.strides]
    rank = type_.get_num_dims()
    return [None] * (rank - 1) + [1] * min(rank, 1)
