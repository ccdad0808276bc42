"""The one xDSL context of the project: every dialect that a stage's text may hold, each loaded when first met."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from xdsl.context import Context
from xdsl.dialect_interfaces.op_asm import OpAsmDialectInterface
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
    """A context in which every `torch.*` is an operation: the class of one that has none is made when its name is met."""

    def get_optional_op(self, name: str, *, dialect_stack: Sequence[str] = ()) -> type[Operation] | None:
        known = None if name.startswith("torch.aten.") else super().get_optional_op(name, dialect_stack=dialect_stack)
        if known is None and name.startswith("torch."):
            from attnc.dialects.torch import torch_op

            return torch_op(name.removeprefix("torch."))
        return known


def _loader(module: str, attribute: str) -> Callable[[], Dialect]:
    return lambda: getattr(importlib.import_module(module), attribute)


def build_context() -> AttncContext:
    """A fresh context for parsing any stage's text."""
    context = AttncContext()
    # Each context has its own store of resources: Builtin's own one lives as long as the process.
    context.load_dialect(Dialect("builtin", list(Builtin.operations), list(Builtin.attributes), [OpAsmDialectInterface()]))
    for name, (module, attribute) in _DIALECTS.items():
        context.register_dialect(name, _loader(module, attribute))
    return context


def parsed_resources(context: Context) -> dict[str, str]:
    """What a text's `dialect_resources` section gave for the keys that it uses, as it was written: "0x…"."""
    interface = context.get_dialect("builtin").get_interface(OpAsmDialectInterface)
    assert interface is not None
    return {key: value for key, value in interface._blob_storage.items() if value}
