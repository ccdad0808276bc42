"""What a program keeps of each kernel: the text of its function, and what a plan must know of it."""

from __future__ import annotations

from typing import Any, cast

from xdsl.dialects.builtin import ArrayAttr, StringAttr, TensorType
from xdsl.dialects.func import FuncOp

from attnc.codegen.host_loops import loop_entry
from attnc.codegen.host_text import module_text

ATTENTION_STAGE = "convert-torch-to-linalg-ext"


def kernel_entry(function: FuncOp) -> dict[str, Any]:
    """The JSON of one kernel."""
    if "attnc.roles" in function.attributes:
        return _attention(function)
    return loop_entry(function)


def _attention(function: FuncOp) -> dict[str, Any]:
    results = [cast(TensorType, type_) for type_ in function.function_type.outputs]
    roles = [cast(StringAttr, role).data for role in cast(ArrayAttr, function.attributes["attnc.results"])]
    return {
        "kind": "attention",
        "what": "attention",
        "text": module_text(function, "attention", ATTENTION_STAGE),
        "roles": roles,
        "wide": [len(type_.shape) == 4 for type_ in results],
    }
