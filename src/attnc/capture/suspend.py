"""Stepping out of torch's modes for a while.

torch's own `_disable_current_modes` imports sympy and more on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """No dispatch mode is active inside."""
    modes = [torch._C._pop_torch_dispatch_stack(None) for _ in range(torch._C._len_torch_dispatch_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_dispatch_stack(mode)


@contextmanager
def without_modes(kind: type[TorchFunctionMode]) -> Iterator[None]:
    """Neither a dispatch mode nor the topmost function mode, if it is of `kind`, is active inside."""
    length = torch._C._len_torch_function_stack()
    mine = length > 0 and isinstance(torch._C._get_function_stack_at(length - 1), kind)
    mode = torch._C._pop_torch_function_stack() if mine else None
    try:
        with without_dispatch_modes():
            yield
    finally:
        if mode is not None:
            torch._C._push_on_torch_function_stack(mode)
