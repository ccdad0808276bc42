"""A module's kernels as one LLVM text. There is one, or a few to be run one after the other on one list of arguments."""

from __future__ import annotations

from typing import Any

from xdsl.dialects.builtin import ModuleOp

from attnc.codegen.llvm.kernel import Emitted, KernelEmitter
from attnc.codegen.llvm.record import module_record
from attnc.dialects.tile import KernelOp
from attnc.errors import LoweringError
from attnc.target import Target


def kernels_of(module: ModuleOp) -> list[KernelOp]:
    """The kernels of a module in their order.

    Raises:
        LoweringError: there is none, or they differ in their arguments.
    """
    kernels = [op for op in module.body.block.ops if isinstance(op, KernelOp)]
    if not kernels:
        raise LoweringError("expected a tile.kernel in the module, found none")
    for kernel in kernels[1:]:
        types = [argument.type for argument in kernel.body.block.args]
        if types != [argument.type for argument in kernels[0].body.block.args] or kernel.roles != kernels[0].roles:
            raise LoweringError("the kernels of a module must have the same arguments: they are run one after the other")
    return kernels


def emit_module(module: ModuleOp, target: Target) -> tuple[str, list[str], dict[str, Any]]:
    """LLVM text of all kernels, those of the leaf routines they call, and the record by which they are launched."""
    kernels = kernels_of(module)
    emitted = [KernelEmitter(kernel, module, target).emit() for kernel in kernels]
    leaves: dict[str, str] = {}
    for each in emitted:
        if any(leaves.get(name, text) != text for name, text in each.leaves.items()):
            raise LoweringError("the kernels of a module must stage operands of one element type")
        leaves |= each.leaves
    record = module_record(kernels, [each.thread_bytes for each in emitted])
    return _text(emitted), list(leaves.values()), record


def _text(emitted: list[Emitted]) -> str:
    """Each function once, then what else they call."""
    functions = [function for each in emitted for function in each.functions]
    definitions: dict[str, str] = {}
    for each in emitted:
        definitions |= each.definitions
    functions += definitions.values()
    defined = {_symbol(line) for text in functions for line in text.splitlines() if line.startswith("define")}
    declarations = sorted({line for each in emitted for line in each.declarations if _symbol(line) not in defined})
    return "\n\n".join([*functions, *declarations]) + "\n"


def _symbol(line: str) -> str:
    return line.split("(")[0].split("@")[-1]
