"""The bytes of a constant tensor."""

from __future__ import annotations

import struct
from typing import cast

from xdsl.dialects.builtin import (
    BFloat16Type,
    DenseIntOrFPElementsAttr,
    DenseResourceAttr,
    IntegerType,
    TensorType,
)
from xdsl.ir import Attribute

from attnc.errors import LoweringError

_FORMATS = {"f64": "d", "f32": "f", "f16": "e", "index": "q", "i64": "q", "i32": "i", "i16": "h", "i8": "b", "i1": "?"}


def constant_bytes(value: Attribute, type_: TensorType) -> tuple[bytes, bool]:
    """(bytes, whether they are one element for all). Raises `LoweringError` for constants that are not written out."""
    if isinstance(value, DenseResourceAttr):
        raise LoweringError(f"the contents of {value} are not in the text", remedy="print the module with its resources")
    if not isinstance(value, DenseIntOrFPElementsAttr):
        raise LoweringError(f"a constant of kind {value.name} is not compiled")
    splat = value.is_splat()
    numbers = list(value.get_values())[: 1 if splat else None]
    element = type_.element_type
    if isinstance(element, BFloat16Type):
        words = struct.pack(f"<{len(numbers)}f", *cast(list[float], numbers))
        halves = struct.unpack(f"<{len(numbers)}I", words)
        return struct.pack(f"<{len(numbers)}H", *(_rounded(bits) for bits in halves)), splat
    name = f"i{element.width.data}" if isinstance(element, IntegerType) else str(element)
    if name not in _FORMATS:
        raise LoweringError(f"a constant tensor of {element} is not compiled")
    if isinstance(element, IntegerType) and element.width.data > 1:
        bits = element.width.data
        numbers = [int(n) - (1 << bits) if int(n) >> (bits - 1) == 1 else int(n) for n in numbers]
    return struct.pack(f"<{len(numbers)}{_FORMATS[name]}", *numbers), splat


def _rounded(bits: int) -> int:
    """f32 bits to those of the nearest bf16."""
    if (bits & 0x7F800000) == 0x7F800000:
        return bits >> 16
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
