"""The one xDSL context of the project: every dialect that a stage's text may hold, each loaded when first met."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from xdsl.context import Context
from xdsl.dialects.builtin import Builtin
from xdsl.ir import Dialect, Operation

# Dialect name -> module and attribute that hold it.
_DIALECTS = {
    "func": ("xdsl.dialects.func", "Func"),
    "arith": ("xdsl.dialects.arith", "Arith"),
    "math": ("xdsl.dialects.math", "Math"),
    "scf": ("xdsl.dialects.scf", "Scf"),
    "tensor": ("xdsl.dialects.tensor", "Tensor"),
    "linalg": ("attnc.dialects.linalg_named", "Linalg"),
    "memref": ("xdsl.dialects.memref", "MemRef"),
    "affine": ("xdsl.dialects.affine", "Affine"),
    "torch": ("attnc.dialects.torch", "Torch"),
    "iree_linalg_ext": ("attnc.dialects.linalg_ext", "LinalgExt"),
    "attnc": ("attnc.dialects.attention_backward", "AttncDialect"),
    "tile": ("attnc.dialects.tile", "Tile"),
}


class AttncContext(Context):
    """A context in which every `torch.aten.*` is an operation: its class is made when its name is met."""

    def get_optional_op(self, name: str, *, dialect_stack: Sequence[str] = ()) -> type[Operation] | None:
        if name.startswith("torch.aten."):
            from attnc.dialects.torch import aten_op

            return aten_op(name.removeprefix("torch.aten."))
        return super().get_optional_op(name, dialect_stack=dialect_stack)


def _loader(module: str, attribute: str) -> Callable[[], Dialect]:
    return lambda: getattr(importlib.import_module(module), attribute)


def build_context() -> AttncContext:
    """A fresh context for parsing any stage's text."""
    context = AttncContext()
    context.load_dialect(Builtin)
    for name, (module, attribute) in _DIALECTS.items():
        context.register_dialect(name, _loader(module, attribute))
    return context
