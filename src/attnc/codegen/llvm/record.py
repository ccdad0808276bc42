"""The record by which the runtime calls a module's kernels: their arguments as `runtime/abi.py` reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xdsl.dialects.builtin import ArrayAttr, MemRefType, StringAttr
from xdsl.ir import SSAValue

from attnc.codegen.llvm.values import static_strides
from attnc.dialects import tile
from attnc.errors import LoweringError

SCRATCH = "attnc.scratch"


def module_record(kernels: Sequence[tile.KernelOp], thread_bytes: Sequence[int]) -> dict[str, Any]:
    """Name, scratch bytes a thread, and one entry an argument.

    Where there are several kernels, or memory that passes from one to the next: the kernels in their order, and how much of
    that memory there is (`attnc.scratch`). Those arguments are the launcher's own matter, and not listed with the others.
    """
    first = kernels[0]
    rules = _strings(first, SCRATCH) or [""] * len(first.body.block.args)
    public = [_argument(first, n) for n, rule in enumerate(rules) if not rule]
    names = [kernel.sym_name.data for kernel in kernels]
    record: dict[str, Any] = {"name": names[0], "thread_bytes": max(thread_bytes), "arguments": public}
    if len(kernels) == 1 and len(public) == len(rules):
        return record
    if any(rules[: len(public)]):
        raise LoweringError(f"{SCRATCH}: memory between kernels comes last among their arguments")
    record["name"] = names[0].rpartition("_")[0] or names[0]
    record["kernels"] = [{"name": name, "thread_bytes": size} for name, size in zip(names, thread_bytes, strict=True)]
    record["scratch"] = [
        {"dtype": _argument(first, n)["dtype"], "sizes": [_size(field, public) for field in rules[n].split()]}
        for n in range(len(public), len(rules))
    ]
    return record


def _size(field: str, arguments: list[dict[str, Any]]) -> list[int]:
    """`64` as [64]; `key.2/1024` as [word, divisor]: the word among the arguments that holds that size, rounded up."""
    if field.isdigit():
        return [int(field)]
    place, _, divisor = field.partition("/")
    role, _, dim = place.partition(".")
    word = 0
    for argument in arguments:
        if argument["role"] == role and argument["kind"] == "buffer":
            return [word + 1 + int(dim), int(divisor or 1)]
        word += 1 + 2 * argument["rank"] if argument["kind"] == "buffer" else 1
    raise LoweringError(f"{SCRATCH}: no argument has the role of '{field}'")


def argument_words(kernel: tile.KernelOp) -> int:
    """How many words a kernel's arguments are."""
    types = [argument.type for argument in kernel.body.block.args]
    return sum(1 + 2 * type_.get_num_dims() if isinstance(type_, MemRefType) else 1 for type_ in types)


def _strings(kernel: tile.KernelOp, name: str) -> list[str]:
    attribute = kernel.attributes.get(name)
    return [string.data for string in attribute if isinstance(string, StringAttr)] if isinstance(attribute, ArrayAttr) else []


def _argument(kernel: tile.KernelOp, n: int) -> dict[str, Any]:
    argument: SSAValue = kernel.body.block.args[n]
    names = _strings(kernel, "attnc.names")
    name = names[n] if n < len(names) else argument.name_hint or f"argument{n}"
    role = kernel.roles.data[n].data if kernel.roles is not None else ""
    type_ = argument.type
    if not isinstance(type_, MemRefType):
        return {"role": role, "kind": str(type_), "name": name}
    return {
        "role": role,
        "kind": "buffer",
        "name": name,
        "dtype": str(type_.element_type),
        "rank": type_.get_num_dims(),
        "strides": "x".join("?" if stride is None else str(stride) for stride in static_strides(type_)),
        "sizes": "x".join("?" if size < 0 else str(size) for size in type_.get_shape()),
    }
