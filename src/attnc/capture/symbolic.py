"""How a captured number travels through torch's own code: as `torch.SymInt` or `torch.SymFloat` around a small node.

torch carries symbolic scalars through composite operations to the dispatcher, where the tracer finds the number again; where
C++ needs the value itself, it asks the node, and the value becomes a guard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnc.capture.numbers import NumberProxy, concrete

if TYPE_CHECKING:
    from attnc.capture.trace import Tracer


class NumberNode:
    """The part of torch's SymNode protocol that the dispatcher uses."""

    def __init__(self, proxy: NumberProxy):
        self.proxy = proxy

    def is_int(self) -> bool:
        return isinstance(self.proxy._value, int)

    def is_float(self) -> bool:
        return isinstance(self.proxy._value, float)

    def is_bool(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def is_constant(self) -> bool:
        return False

    def is_nested_int(self) -> bool:
        return False

    def maybe_as_int(self) -> None:
        return None

    def maybe_as_float(self) -> None:
        return None

    def has_hint(self) -> bool:
        return False

    def guard_int(self, file: str, line: int) -> int:
        return concrete(self.proxy)

    def guard_float(self, file: str, line: int) -> float:
        return float(concrete(self.proxy))

    def int_(self) -> int:
        return concrete(self.proxy)

    def str(self) -> str:
        return repr(self.proxy._value)

    _graph_repr = str


def symbolic(tracer: Tracer, proxy: NumberProxy) -> torch.SymInt | torch.SymFloat:
    """The proxy as torch takes it for a scalar."""
    node = NumberNode(proxy)
    return torch.SymInt(node) if node.is_int() else torch.SymFloat(node)


def proxy_of(value: object) -> NumberProxy | None:
    """The proxy inside a symbolic scalar of ours."""
    if isinstance(value, (torch.SymInt, torch.SymFloat)) and isinstance(value.node, NumberNode):
        return value.node.proxy
    return None
