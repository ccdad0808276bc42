"""The bytes of a constant tensor."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import cast

from xdsl.dialects.builtin import (
    AnyFloat,
    BFloat16Type,
    DenseIntOrFPElementsAttr,
    DenseResourceAttr,
    IntegerType,
    TensorType,
)
from xdsl.ir import Attribute

from attnc.errors import LoweringError

_FORMATS = {"f64": "d", "f32": "f", "f16": "e", "index": "q", "i64": "q", "i32": "i", "i16": "h", "i8": "b", "i1": "?"}


def constant_bytes(value: Attribute, type_: TensorType, resources: Mapping[str, bytes]) -> tuple[bytes, bool]:
    """(bytes, whether they are one element for all). Raises `LoweringError` for constants that are not written out."""
    if isinstance(value, DenseResourceAttr):
        return _resource(value.resource_handle.data, type_, resources), False
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


def _resource(key: str, type_: TensorType, resources: Mapping[str, bytes]) -> bytes:
    """The contents of a `dense_resource`: elements of whole bytes, in row-major order."""
    if key not in resources:
        raise LoweringError(
            f"the contents of the resource {key} are not in the text", remedy="print the module with its resources"
        )
    element = type_.element_type
    bits = element.width.data if isinstance(element, IntegerType) else element.bitwidth if isinstance(element, AnyFloat) else 64
    wanted = math.prod(type_.get_shape()) * max(bits // 8, 1)
    if len(resources[key]) != wanted:
        raise LoweringError(f"the resource {key} has {len(resources[key])} bytes; {type_} has {wanted}", remedy="print it anew")
    return resources[key]


def _rounded(bits: int) -> int:
    """f32 bits to those of the nearest bf16."""
    if (bits & 0x7F800000) == 0x7F800000:
        return bits >> 16
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
