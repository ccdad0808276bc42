"""The record by which the runtime calls a kernel: its arguments as `runtime/abi.py` reads them."""

from __future__ import annotations

from typing import Any

from xdsl.dialects.builtin import ArrayAttr, MemRefType, StringAttr

from attnc.codegen.llvm.values import static_strides
from attnc.dialects import tile


def kernel_record(kernel: tile.KernelOp, thread_bytes: int) -> dict[str, Any]:
    """Name, scratch bytes a thread, and one entry an argument."""
    names = kernel.attributes.get("attnc.names")
    arguments = []
    for n, argument in enumerate(kernel.body.block.args):
        role = kernel.roles.data[n].data if kernel.roles is not None else ""
        name = argument.name_hint or f"argument{n}"
        if isinstance(names, ArrayAttr) and n < len(names.data) and isinstance(names.data[n], StringAttr):
            name = names.data[n].data  # type: ignore[union-attr]
        type_ = argument.type
        if isinstance(type_, MemRefType):
            arguments.append(
                {
                    "role": role,
                    "kind": "buffer",
                    "name": name,
                    "dtype": str(type_.element_type),
                    "rank": type_.get_num_dims(),
                    "strides": "x".join("?" if stride is None else str(stride) for stride in static_strides(type_)),
                    "sizes": "x".join("?" if size < 0 else str(size) for size in type_.get_shape()),
                }
            )
        else:
            arguments.append({"role": role, "kind": str(type_), "name": name})
    return {"name": kernel.sym_name.data, "thread_bytes": thread_bytes, "arguments": arguments}
