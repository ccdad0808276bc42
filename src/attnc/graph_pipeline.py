"""The road of a whole program: the passes of `pipeline.GRAPH_STAGES`, a host program, a kernel for each layout it meets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attnc.errors import AttncError, LoweringError
from attnc.pipeline import GRAPH_STAGES, Observer, compile_module, emit, graph_stage_of, locate, lower, run_pass
from attnc.target import Target

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp


def lower_graph(module: ModuleOp, target: Target, observe: Observer | None = None) -> ModuleOp:
    """Run the passes of a whole program that follow the module's stage, in place."""
    stage = graph_stage_of(module)
    if observe is not None:
        observe(stage or "source", module)
    for name in GRAPH_STAGES[GRAPH_STAGES.index(stage) + 1 if stage else 0 :]:
        run_pass(module, name, target)
        if observe is not None:
            observe(name, module)
    return module


def graph_program(module: ModuleOp, target: Target, function: str | None = None) -> tuple[dict[str, Any], list[bytes]]:
    """A module of any stage before tiling as a whole program: (JSON of `runtime/graph.py`, the contents of its constants)."""
    from attnc.codegen.host import host_program

    return host_program(lower_graph(module, target), function)


def compile_graph_kernel(kernel: dict[str, Any], variant: dict[str, Any]) -> tuple[list[bytes], dict[str, Any]]:
    """The objects and the record of a whole program's kernel for one layout."""
    if kernel["kind"] == "loop":
        return _compile_loop(kernel, variant, Target.host())
    return compile_module(_graph_kernel(kernel, variant), Target.host())


def _compile_loop(kernel: dict[str, Any], variant: dict[str, Any], target: Target) -> tuple[list[bytes], dict[str, Any]]:
    from attnc.codegen.llvm.compile import to_object

    text, record = _emit_loop(kernel, variant, target)
    return [to_object(text, target)], record


def _emit_loop(kernel: dict[str, Any], variant: dict[str, Any], target: Target) -> tuple[str, dict[str, Any]]:
    from xdsl.dialects.func import FuncOp

    from attnc.codegen.llvm.loops import emit_loop
    from attnc.mlir_text import parse_module

    module = parse_module(kernel["text"])
    function = next(op for op in module.ops if isinstance(op, FuncOp))
    return emit_loop(function, variant, target)


def graph_kernel_code(kernel: dict[str, Any], variant: dict[str, Any], assembly: bool) -> str:
    """The LLVM text, or the assembly, of a whole program's kernel for one layout (without the leaf routines it calls)."""
    from attnc.codegen.llvm.compile import to_assembly

    target = Target.host()
    if kernel["kind"] == "loop":
        text = _emit_loop(kernel, variant, target)[0]
    else:
        text = emit(lower(_graph_kernel(kernel, variant), target), target).llvm
    return to_assembly(text, target) if assembly else text


def locate_in_graph(kernel: dict[str, Any], variant: dict[str, Any], words: Sequence[int | float]) -> AttncError:
    """`locate` for a whole program's kernel."""
    target = Target.host()
    return locate(lower(_graph_kernel(kernel, variant), target), target, words)


def _graph_kernel(kernel: dict[str, Any], variant: dict[str, Any]) -> ModuleOp:
    from attnc.mlir_text import parse_module
    from attnc.transforms.specialize_attention import specialize

    module = parse_module(kernel["text"])
    specialize(module, variant)
    return module


def for_iree(module: ModuleOp) -> None:
    """Makes of a module, in place, one that iree-compile takes: attention that IREE 3.13 computes otherwise than it means is
    written out, attributes of ours are dropped.

    Raises `LoweringError` where the module has operations of our own dialects.
    """
    from attnc.transforms.attention_to_linalg import write_out_for_iree

    for op in module.walk():
        if op.name.startswith(("tile.", "torch.", "attnc.")):
            raise LoweringError(
                f"{op.name} is no operation that IREE knows", remedy="run no passes of tiling before --emit-iree"
            )
    write_out_for_iree(module)
    for op in module.walk():
        for name in [name for name in op.attributes if name.startswith("attnc.")]:
            del op.attributes[name]
    module.verify()
