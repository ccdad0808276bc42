"""`attnc.compile`: a whole program, made of attention, layout operations and elementwise operations, as native code."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnc import programs
from attnc.errors import ArgumentsError, AttncError, CaptureIndexError, ModDivisionError, ShapeError, TorchMissingError
from attnc.runtime.abi import Argument
from attnc.runtime.cache import Entry, disk_cache, make_key
from attnc.runtime.graph import GraphProgram
from attnc.runtime.launch import Kernel
from attnc.runtime.whole_imports import COMPILER, import_whole, interrupts_as_such
from attnc.target import Target

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

    from attnc.capture.exported import Exported

SAMPLE_SIZE = 40
"""What a dynamic size is taken to be where kernels are compiled before a call has said it."""


@interrupts_as_such()
def compile(
    program: Any, example_inputs: Any = None, *, dynamic_shapes: Any = None, function: str | None = None
) -> CompiledProgram:
    """A callable of `program`: a `torch.export.ExportedProgram`, an `nn.Module` with `example_inputs` (and `dynamic_shapes`, as
    torch.export takes them), or MLIR text. `example_inputs` are a tuple or list; a single tensor is one input.

    Text is a module with one public function on tensors (or the one called `function`), with `iree_linalg_ext.attention`
    and linalg, tensor and arith operations around it, or in the torch dialect. The result is called on torch tensors or numpy
    arrays, and returns the like. Sizes that the program leaves open may differ from call to call.

    Raises:
        IRSyntaxError: text that is no valid module, with the place.
        LoweringError, UnsupportedGraphError: an operation that is not compiled, by its name and the place in the source.
    """
    if isinstance(program, str):
        compiled = CompiledProgram(_from_text(program, "<text>", function))
        compiled.prepare(example_inputs)
        return compiled
    exported, inputs = _exported(program, example_inputs, dynamic_shapes)
    compiled = CompiledProgram(_from_module(exported.module, None), exported)
    compiled.prepare(inputs)
    return compiled


@interrupts_as_such()
def from_mlir(text: str, filename: str = "<text>", function: str | None = None) -> CompiledProgram:
    """The program of MLIR text; `filename` is named in errors. Kernels are compiled when they are first needed."""
    return CompiledProgram(_from_text(text, filename, function))


def _exported(program: Any, example_inputs: Any, dynamic_shapes: Any) -> tuple[Exported, Any]:
    """An exported program, or a module that is exported now, as a module of stage "torch"."""
    torch = sys.modules.get("torch")
    known = torch is not None and isinstance(program, torch.export.ExportedProgram | torch.nn.Module)
    if torch is None or not known:
        remedy = "pass an ExportedProgram, an nn.Module with example inputs, or MLIR text"
        if isinstance(program, Path):
            remedy = "pass the text itself, path.read_text(), or torch.export.load(path)"
        elif callable(program):
            remedy = "make it the forward of an nn.Module, and pass that with example inputs"
        raise ArgumentsError(f"attnc.compile cannot compile a {type(program).__name__}", remedy=remedy)
    import_whole(COMPILER)
    from attnc.capture.exported import export_module, from_exported
    from attnc.program_text import from_text as read_program

    inputs = example_inputs
    if isinstance(program, torch.nn.Module):
        if example_inputs is None:
            raise ArgumentsError("an nn.Module is compiled for example inputs", remedy="attnc.compile(module, (x, …))")
        inputs = example_inputs if isinstance(example_inputs, list | tuple) else (example_inputs,)
        program = export_module(program, inputs, dynamic_shapes)
    elif inputs is None and program.example_inputs is not None:
        inputs, keywords = program.example_inputs
        inputs = None if keywords else inputs
    return from_exported(program, read_program), inputs


@interrupts_as_such()
def text_of_exported_file(path: str) -> str:
    """What torch.export.save wrote, as MLIR text in the torch dialect. Raises `ArgumentsError` where it is no such file."""
    try:
        import torch
    except ImportError as error:
        raise TorchMissingError("an exported program is read through torch, which is not installed") from error
    import_whole(COMPILER)
    from attnc.mlir_text import print_module

    log = logging.getLogger("torch.export")  # which would write a traceback beside the error
    disabled, log.disabled = log.disabled, True
    try:
        program = torch.export.load(path)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ArgumentsError(f"no exported program: {reason}", remedy="torch.export.save writes one") from error
    finally:
        log.disabled = disabled
    return print_module(_exported(program, None, None)[0].module)


class CompiledProgram:
    """A program that can be called on torch tensors or numpy arrays: MLIR's in the order of `arguments`, torch's as the module
    was called that it was exported from (its parameters are kept here)."""

    def __init__(self, graph: GraphProgram, exported: Exported | None = None):
        self._graph = graph
        self._exported = exported
        self._held = exported.held() if exported is not None else []
        self._flat_inputs, self._one_result = _plainness(exported) if exported is not None else (None, False)

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """What it takes: names, dtypes and sizes (None where a size is open)."""
        return self._graph.arguments[len(self._held) :]

    @property
    def parameters(self) -> dict[str, Any]:
        """The tensors that a torch program holds, by name: what is written to them in place is seen by later calls."""
        return {} if self._exported is None else self._exported.parameters

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels it runs, by kind: "attention", or "loop" for elementwise operations and reductions."""
        return tuple(kernel["kind"] for kernel in self._graph.kernels)

    @property
    def temporary_bytes(self) -> int:
        """Memory between kernels that the last layout planned needs, besides what kernels pack for themselves."""
        return self._graph.temporary_bytes

    @property
    def variants(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """(kernel, variant) of every kernel that was compiled or loaded so far."""
        return [(found.kernel, found.variant) for found in self._graph.variants]

    def __repr__(self) -> str:
        inner = ", ".join(argument.describe() for argument in self.arguments)
        return f"CompiledProgram({self._graph.name}({inner}))"

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Run. Raises `ArgumentsError`, `DtypeError`, `ShapeError` by the argument's name."""
        if self._exported is None:
            if keywords:
                raise ArgumentsError(f"{self._graph.name} takes no arguments by name")
            return self._graph(*arguments)
        plain = len(arguments) == self._flat_inputs and not keywords and all(hasattr(value, "dtype") for value in arguments)
        inputs = list(arguments) if plain else self._exported.flatten(*arguments, **keywords)
        results = self._graph(*self._exported.held(inputs), *inputs)
        if self._one_result:
            return results
        return self._exported.unflatten(results if isinstance(results, tuple) else (results,))

    def prepare(self, example_inputs: Sequence[Any] | None = None) -> None:
        """Compile what a call on such inputs needs; without them, what inputs in row-major order are likely to need."""
        from attnc.runtime.graph_plan import dense_strides

        if self._exported is not None and example_inputs is not None:
            example_inputs = [*self._held, *self._exported.flatten(*example_inputs)]
        layouts: list[Any] = []
        for n, argument in enumerate(self._graph.arguments):
            if argument.kind != "buffer":
                layouts.append(0 if self._graph.program["arguments"][n]["shapes"] else None)
                continue
            if example_inputs is not None and n < len(example_inputs) and hasattr(example_inputs[n], "shape"):
                sizes = tuple(int(size) for size in example_inputs[n].shape)
            else:
                sizes = tuple(SAMPLE_SIZE if size is None else size for size in argument.fixed_sizes)
            layouts.append((sizes, dense_strides(sizes)))
        try:
            self._graph.plan(layouts)
        except CaptureIndexError:
            pass  # an index that depends on a number, which is 0 here
        except ShapeError:
            entries = self._graph.program["arguments"]
            if all(
                None not in argument.fixed_sizes if argument.kind == "buffer" else not entry["shapes"]
                for argument, entry in zip(self._graph.arguments, entries, strict=True)
            ):
                raise  # no call can be right


def _plainness(exported: Exported) -> tuple[int | None, bool]:
    """(how many tensors the program takes, if it takes nothing but tensors side by side; whether it returns one tensor)."""
    from torch.utils import _pytree as pytree

    count = len(exported.inputs)
    plain = not exported.constants and exported.in_spec == pytree.tree_flatten(((0,) * count, {}))[1]
    single = exported.out_spec == pytree.tree_flatten(0)[1] and exported.results == (("result", 0),)
    return (count if plain else None), single


def _from_text(text: str, filename: str, function: str | None) -> GraphProgram:
    def make() -> tuple[dict[str, Any], list[bytes]]:
        from attnc import graph_pipeline
        from attnc.lowered import refusing
        from attnc.mlir_text import parse_module

        module = parse_module(text, filename)
        with refusing("this module cannot be compiled"):
            return graph_pipeline.graph_program(module, Target.host(), function)

    return _loaded(("program", text, function), make)


def _from_module(module: ModuleOp, function: str | None) -> GraphProgram:
    from attnc import graph_pipeline
    from attnc.lowered import refusing
    from attnc.mlir_text import print_module

    def make() -> tuple[dict[str, Any], list[bytes]]:
        with refusing("this program cannot be compiled"):
            return graph_pipeline.graph_program(module, Target.host(), function)

    return _loaded(("program", print_module(module), function), make)


def _loaded(parts: tuple[Any, ...], make) -> GraphProgram:
    """The program kept on disk under `parts`, else the one that `make` gives, which is kept."""
    disk = disk_cache()
    key = make_key(Target.host(), parts) if disk is not None else ""
    entry = disk.get(key) if disk is not None else None
    if entry is None:
        program, blobs = make()
        entry = Entry(program, tuple(blobs))
        if disk is not None:
            disk.put(key, entry)
    return GraphProgram(entry.record, entry.blobs, _build, _locate, _settle)


def _build(kernel: dict[str, Any], variant: dict[str, Any]) -> Kernel:
    def compile_now() -> tuple[list[bytes], dict[str, Any]]:
        from attnc import graph_pipeline
        from attnc.lowered import refusing

        with refusing("a kernel of this program cannot be compiled"):
            return graph_pipeline.compile_graph_kernel(kernel, variant)

    def load(record, objects):
        loaded = Kernel(record, objects)
        loaded.load()
        return loaded

    return programs.cached(("graph", kernel["text"], sorted(variant.items())), compile_now, load)


def _settle(argument: Argument, value: Any) -> Any:
    """A torch tensor, or its values where it is only lazily negated. Raises the named error of one that has no plain memory."""
    checks = _checks()
    return value if checks.is_plain(value) else checks.plain_tensor(argument.describe(), value)


@cache
def _checks() -> Any:
    """attnc.checks, which imports torch."""
    from attnc import checks

    return checks


def _locate(kernel: dict[str, Any], variant: dict[str, Any], words: Sequence[int | float]) -> AttncError:
    from attnc import graph_pipeline

    if kernel["kind"] != "attention":
        names = dict.fromkeys(re.findall(r'attnc\.name = "([^"]*)"', kernel["text"]))
        what = " or ".join(f"'{name}'" for name in names) or "a tensor"
        divides = re.search(r"arith\.(floordiv|ceildiv|div|rem)[su]i", kernel["text"]) is not None
        if divides and "tensor.extract" not in kernel["text"]:
            return ModDivisionError("integer division by zero")
        return CaptureIndexError(f"an index into {what} is out of range" + (", or a divisor is zero" if divides else ""))
    return graph_pipeline.locate_in_graph(kernel, variant, words)
