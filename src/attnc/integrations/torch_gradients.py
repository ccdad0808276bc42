"""torch's front end of flex_attention refuses gradients on the CPU before any kernel or backend is asked. While attnc stands
behind it, it lets them pass; for whatever else it says no to, it still does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as front_end

_original = front_end._validate_device
_permissions: list[Callable[[], bool]] = []


def allow(permission: Callable[[], bool]) -> None:
    """Let gradients on the CPU pass where `permission()` says so, until `disallow`."""
    _permissions.append(permission)
    front_end._validate_device = _validate_device


def disallow(permission: Callable[[], bool]) -> None:
    """Undo one `allow`. After the last one torch's own function is back."""
    _permissions.remove(permission)
    if not _permissions:
        front_end._validate_device = _original


@torch._dynamo.assume_constant_result  # type: ignore[attr-defined]
def _is_allowed() -> bool:
    """Asked while the call runs, or while dynamo traces it."""
    return any(permission() for permission in _permissions)


def _validate_device(query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.device.type != "cpu" or not _is_allowed():
        _original(query, key, value)


def traced_for(backend: Any) -> bool:
    """Whether dynamo is tracing, and hands its graph to `backend`."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        compiler: Any = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:  # nothing is traced
        return False
    while compiler is not None and compiler is not backend:
        compiler = getattr(compiler, "compiler_fn", None)
    return compiler is backend
