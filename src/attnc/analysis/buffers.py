"""The buffers that a kernel gets for a function's tensor arguments."""

from __future__ import annotations

from typing import cast

from xdsl.dialects.builtin import ArrayAttr, MemRefType, StridedLayoutAttr, StringAttr, TensorType
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute


def memref_of(type_: Attribute, strides: str) -> Attribute:
    """The buffer type of a tensor argument; `strides` has a field for each dim: a number, or ? for one known at run time."""
    if not isinstance(type_, TensorType):
        return type_
    if not type_.get_shape():
        return MemRefType(type_.element_type, [])
    known = [int(field) if field.isdigit() else None for field in strides.split("x")] if strides else [None] * len(type_.shape)
    return MemRefType(type_.element_type, type_.get_shape(), StridedLayoutAttr(known))


def argument_strings(function: FuncOp, attribute: str, default: str) -> list[str]:
    """One string for each argument, from a function's attribute."""
    found = function.attributes.get(attribute)
    if isinstance(found, ArrayAttr):
        return [cast(StringAttr, string).data for string in found]
    return [default] * len(function.body.block.args)
