"""`torch.tensor(…)` inside a mod: a constant, or a captured number made a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnc.capture.locations import refuse
from attnc.capture.numbers import NumberProxy, concrete
from attnc.capture.record import ListOf, Literal
from attnc.capture.suspend import without_dispatch_modes
from attnc.capture.symbolic import symbolic
from attnc.capture.tensors import dtype_literal
from attnc.errors import DataDependentModError, UnsupportedModError

if TYPE_CHECKING:
    from attnc.capture.trace import Tracer

LARGEST_CONSTANT = 4096


def constant_tensor(tracer: Tracer, func, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    """The call `torch.tensor(data, …)` or `torch.as_tensor(data, …)` where data is no tensor."""
    data = args[0]
    if type(data) is NumberProxy:
        dtype = kwargs.get("dtype") or (args[1] if len(args) > 1 else None)
        if dtype is None:
            dtype = torch.int64 if isinstance(data._value, int) else torch.get_default_dtype()
        return torch.ops.aten.scalar_tensor.default(symbolic(tracer, data), dtype=dtype)
    leaves = list(_leaves(data))
    if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise refuse(DataDependentModError, "a mod makes a tensor of a list that holds tensors", "torch.stack([...])")
    if not isinstance(data, (list, tuple)) and type(data) not in (int, float, bool):
        with without_dispatch_modes():
            real = func(*args, **kwargs)  # a numpy array: memory that may change, so it is captured
        return tracer.value(real).standin
    with without_dispatch_modes():
        real = func(_concrete(data), *args[1:], **{key: concrete(value) for key, value in kwargs.items()})
        if real.device.type != "cpu":
            raise refuse(UnsupportedModError, f"a mod makes a tensor on {real.device}", 'make it with device="cpu"')
        return literal(tracer, real)


def literal(tracer: Tracer, real: torch.Tensor) -> torch.Tensor:
    """A small tensor of known data, as an operation without operands."""
    if real.numel() > LARGEST_CONSTANT:
        raise refuse(
            UnsupportedModError,
            f"a mod makes a constant tensor of {real.numel()} elements",
            "make it once, outside of the mod, and capture it",
        )
    elements = ListOf(tuple(Literal.of(element) for element in real.flatten().tolist()))
    dtype_literal(real.dtype)
    return tracer.emit("attnc.literal", (elements,), torch.zeros(real.shape, dtype=real.dtype, device="cpu"))


def _leaves(data: Any):
    if isinstance(data, (list, tuple)):
        for item in data:
            yield from _leaves(item)
    else:
        yield data


def _concrete(data: Any) -> Any:
    return type(data)(map(_concrete, data)) if type(data) in (list, tuple) else concrete(data)
