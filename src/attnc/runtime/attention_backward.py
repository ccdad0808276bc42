"""A compiled backward pass of attention, its arguments by role."""

from __future__ import annotations

from collections.abc import Sequence

from attnc.errors import CompileError
from attnc.runtime.abi import KernelRecord
from attnc.runtime.launch import Kernel

READ = ("query", "key", "value", "scale", "capture", "number", "blocks", "out", "lse", "d_out", "d_lse")
WRITTEN = ("d_query", "d_key", "d_value", "d_scale", "d_capture")
"""Roles in the order in which kernels take them: what is read, then the gradients, as far as they are wanted."""

ROW_SUM = "row_sum"
"""What the kernels keep for each row of queries meanwhile, f64 [B, Hq, Sq], zero before a launch; the last arguments."""

SUMS = ("d_query", "d_scale", "d_capture")
"""Gradients that are sums of many tasks: their buffers must be zero before a launch. The others are overwritten."""


class AttentionBackward:
    """A program whose arguments have roles: what the forward pass read and gave, the gradients of that, then gradients.

    All buffers are of rank 4 ([B, H, S, D]; key and value and their gradients broadcast to the query's batch), but lse,
    d_lse and row sums (3), captured tensors, and d_scale and the gradients of 0-d captures, which have one element.
    `launch(words, keep)` runs it on the words of `record.arguments`, as `Kernel.launch`.
    """

    def __init__(self, record: KernelRecord, objects: Sequence[bytes]):
        """Raises `CompileError` where the record is not that of a backward pass."""
        order = (*READ, *WRITTEN, ROW_SUM)
        roles = [argument.role for argument in record.arguments]
        if [role for role in roles if role not in order] or sorted(roles, key=order.index) != roles:
            raise CompileError(
                f"kernel {record.name} has arguments of roles {roles}, which is not the order of a backward pass"
            )
        missing = [role for role in ("query", "key", "value", "scale", "out", "lse", "d_out") if roles.count(role) != 1]
        if missing:
            raise CompileError(f"kernel {record.name} lacks {', '.join(missing)}: {roles}")
        self.record = record
        self.kernel = Kernel(record, objects)
        self.launch = self.kernel.launch
        self.captures = [record.arguments[i] for i in record.indices("capture")]
        self.numbers = [record.arguments[i] for i in record.indices("number")]
        self.blocks = [record.arguments[i] for i in record.indices("blocks")]
        self.gradients = [record.arguments[i] for i in record.indices(*WRITTEN)]
        self.row_sums = len(record.indices(ROW_SUM))

    def wanted(self) -> list[bool]:
        """Of query, key, value, scale and each captured tensor, whether the program gives its gradient."""
        roles = {argument.role for argument in self.gradients}
        names = [argument.name for argument in self.gradients if argument.role == "d_capture"]
        found = [f"d_{name}" in roles for name in ("query", "key", "value", "scale")]
        for capture in self.captures:
            here = bool(names) and names[0] == f"d_{capture.name}"
            found.append(here)
            if here:
                names.pop(0)
        return found
