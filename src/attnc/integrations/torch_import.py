"""The operator is known to torch as soon as attnc and torch are both imported, in whichever order.

A loaded graph (`torch.export.load`) or a script then finds `torch.ops.attnc.attention` after a mere `import attnc`, which
still does not import torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

OPERATOR = "attnc.torch_op"


def register_with_torch() -> None:
    """Register the operator now if torch is imported, else right after its import."""
    if "torch" in sys.modules:
        importlib.import_module(OPERATOR)
    else:
        sys.meta_path.insert(0, _AfterTorch())


class _AfterTorch(MetaPathFinder):
    """Sees the import of torch, once, and lets the operator be registered at its end."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            importlib.import_module(OPERATOR)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
