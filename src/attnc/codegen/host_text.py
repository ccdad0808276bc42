"""One kernel's function as a text of its own."""

from __future__ import annotations

from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.dialects.func import FuncOp


def module_text(function: FuncOp, name: str, stage: str) -> str:
    """A module of this function alone, under another name: equal kernels of different programs have equal texts."""
    copy = function.clone()
    copy.properties["sym_name"] = StringAttr(name)
    return str(ModuleOp([copy], {"attnc.stage": StringAttr(stage)}))
