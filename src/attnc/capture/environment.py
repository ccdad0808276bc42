"""The outside world of a mod that is torch code: `Environment`.

Tensors stay as they are: the tracer's modes find them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from attnc.capture.reads import Node
from attnc.capture.suspend import without_modes
from attnc.capture.trace import Tracer
from attnc.capture.wrapping import ATOMS, CLASSES, KEYS, NOT_OWN, Wrapping


class Environment(Wrapping):
    """The outside world of one trace of torch code."""

    atoms = (*ATOMS, torch.device, torch.layout, torch.memory_format)
    classes = (*CLASSES, torch.Tensor, torch.nn.Parameter, torch.Size, torch.nn.Module)
    keys = (*KEYS, torch.dtype)
    tracer: Tracer

    def own(self, value: Any, kind: type, node: Node) -> Any:
        if isinstance(value, torch.Tensor):
            self.plan.require(f"isinstance({node.variable}, {self.plan.constant(torch.Tensor)})")
            self.tracer.saw(value, node)
            return value
        if isinstance(value, torch.dtype):
            return self._same(value, node)
        return NOT_OWN

    def is_constant(self, value: Any, kind: type) -> bool:
        return kind.__module__.partition(".")[0] == "torch" and not isinstance(value, torch.nn.Module)

    def _is_harmless_class(self, value: type) -> bool:
        return super()._is_harmless_class(value) or value.__module__.startswith("torch")

    def is_array(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def is_computed(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and self.tracer.is_computed(value)

    def finds_attributes(self, getattr_hook: Any) -> bool:
        return getattr_hook is torch.nn.Module.__getattr__

    def untraced(self) -> AbstractContextManager:
        from attnc.capture.modes import FunctionMode

        return without_modes(FunctionMode)

    def finish(self) -> None:
        super().finish()
        for tensor in self.tracer.seen():
            if not self._names.isdisjoint(getattr(tensor, "__dict__", ())):
                self.plan.give_up("the mod reads a Python attribute of a tensor")
