"""The road of one program, from what was captured to native code: one straight line of named stages.

    torch                                    what the user wrote: mods as functions, attention as one operation
    convert-torch-to-linalg-ext              the mods inlined into the region of `iree_linalg_ext.attention`
    convert-attention-to-online-attention    running maximum and sum appear
    classify-blocks                          `@classify`: what is known of a block before it is computed
    select-tile-sizes                        rows and keys of a block, for this machine
    tile-attention                           loops: tasks of rows, blocks of keys
    split-reduction                          few queries: chunks of the keys are tasks, and a second kernel merges them
    decompose-attention                      the `tile` dialect alone
    (emit)                                   LLVM text, object code

`attnc.flex_attention`, `attnc.lower` and `attnc opt` all run these functions. Between stages nothing travels beside the module:
its text, read back, continues at the stage that `attnc.stage` names.
"""

from __future__ import annotations

import functools
import importlib
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from attnc import knobs
from attnc.errors import (
    AttncError,
    CaptureIndexError,
    KnobError,
    ModDivisionError,
    PassOrderError,
    UnknownPassError,
)
from attnc.runtime.whole_imports import COMPILER, import_whole
from attnc.target import Target

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

    from attnc.runtime.signature import Signature

import_whole(COMPILER)  # before any stage: this module is the door to all of them

SOURCE = "torch"
"""The stage before the first pass."""

STAGES: tuple[str, ...] = (
    "convert-torch-to-linalg-ext",
    "convert-attention-to-online-attention",
    "classify-blocks",
    "select-tile-sizes",
    "tile-attention",
    "split-reduction",
    "decompose-attention",
)
"""The passes in their order. Each is the module `attnc.transforms.<name>` with a function `run(module, target)`."""

BACKWARD_STAGES: tuple[str, ...] = (
    "convert-torch-to-linalg-ext",
    "differentiate-attention",
    "classify-blocks",
    "select-backward-tile-sizes",
    "tile-attention-backward",
    "decompose-attention-backward",
)
"""The passes of a module that wants gradients: one of whose functions says so by `attnc.gradients`."""

GRAPH_STAGES: tuple[str, ...] = (
    "simplify-torch",
    "convert-torch-to-linalg",
    "generalize-linalg",
    "raise-attention",
    "fold-into-attention",
    "outline-attention",
    "fuse-elementwise",
    "outline-loops",
)
"""The passes of a whole program, in their order (`graph_pipeline.py` runs them): what stands around attention is taken in, or
becomes kernels of its own. Their end is a host function, of views and calls, beside functions that take the road of STAGES."""

FOLDS = ("slices", "masks", "scale", "casts", "transposes", "broadcasts", "reshapes", "consumers", "unit-dims")
SIDE_PASSES: tuple[str, ...] = (*(f"fold-{kind}" for kind in FOLDS), "split-concatenations", "attention-to-linalg")
"""Passes that are no step on a road: they may run at any time, and leave the module's stage as it is."""

ATTRIBUTE = "attnc.stage"
Observer = Callable[[str, "ModuleOp"], None]


def all_passes() -> tuple[str, ...]:
    """The passes of all roads, by name."""
    return tuple(dict.fromkeys((*GRAPH_STAGES, *STAGES, *BACKWARD_STAGES, *SIDE_PASSES)))


def pass_module(name: str) -> ModuleType:
    """The module of a pass, by the pass's name. Raises `UnknownPassError`."""
    if name not in all_passes():
        raise UnknownPassError(f"there is no pass '{name}'", remedy=f"the passes are {', '.join(all_passes())}")
    return importlib.import_module("attnc.transforms." + name.replace("-", "_"))


def run_pass(module: ModuleOp, name: str, target: Target) -> None:
    """Run one pass in place, verify its result, and note it as the module's stage.

    Raises `UnknownPassError`, and `PassOrderError` where the module is past the pass or not yet at the one before it.
    """
    from xdsl.dialects.builtin import StringAttr

    run = pass_module(name).run
    if name not in SIDE_PASSES:
        _check_order(module, name)
    run(module, target)
    if name not in SIDE_PASSES:
        module.attributes[ATTRIBUTE] = StringAttr(name)
    module.verify()


def _check_order(module: ModuleOp, name: str) -> None:
    if name in GRAPH_STAGES:
        _check_graph_order(module, name)
        return
    order = (SOURCE, *road_of(module))
    first, last = _possible_stages(module)
    if name not in order:
        kind = "backward" if order[1:] == BACKWARD_STAGES else "forward"
        raise PassOrderError(f"pass {name} is not on the road of a {kind} module", remedy=f"its passes: {', '.join(order[1:])}")
    place = order.index(name)
    if place <= order.index(first):
        raise PassOrderError(f"pass {name} has been run: this module is at {first}")
    if place > order.index(last) + 1:
        before = ", ".join(order[order.index(last) + 1 : place])
        message = f"pass {name} needs a module at stage {order[place - 1]}; this one is at {last}"
        raise PassOrderError(message, remedy=f"passes before it: {before}")


def _check_graph_order(module: ModuleOp, name: str) -> None:
    """Passes of a whole program may be left out, but not run backwards."""
    stage = graph_stage_of(module)
    if stage is not None and GRAPH_STAGES.index(name) <= GRAPH_STAGES.index(stage):
        raise PassOrderError(f"pass {name} comes before {stage}, at which this module is")
    if stage is None and module.attributes.get(ATTRIBUTE) is not None and stage_of(module) in STAGES[1:]:
        raise PassOrderError(f"pass {name} is one of whole programs; this module is at {stage_of(module)}")


def graph_stage_of(module: ModuleOp) -> str | None:
    """The last pass of whole programs that a module says it has been through."""
    from xdsl.dialects.builtin import StringAttr

    named = module.attributes.get(ATTRIBUTE)
    return named.data if isinstance(named, StringAttr) and named.data in GRAPH_STAGES else None


def road_of(module: ModuleOp) -> tuple[str, ...]:
    """The passes of a module in their order: `STAGES`, or `BACKWARD_STAGES` where gradients are wanted of it."""
    from xdsl.dialects.builtin import StringAttr

    named = module.attributes.get(ATTRIBUTE)
    if isinstance(named, StringAttr) and (named.data in BACKWARD_STAGES) != (named.data in STAGES):
        return BACKWARD_STAGES if named.data in BACKWARD_STAGES else STAGES
    for op in module.walk():
        if op.name == "attnc.attention_backward" or "attnc.gradients" in op.attributes:
            return BACKWARD_STAGES
        if op.name == "tile.kernel" and '"d_out"' in str(op.attributes.get("roles")):
            return BACKWARD_STAGES
    return STAGES


def stage_of(module: ModuleOp) -> str:
    """The last stage a module has been through. A module that does not say is known by its operations."""
    return _possible_stages(module)[0]


def _possible_stages(module: ModuleOp) -> tuple[str, str]:
    """The first and the last stage at which a module may be: one and the same where it says so."""
    from xdsl.dialects.builtin import StringAttr

    named = module.attributes.get(ATTRIBUTE)
    if isinstance(named, StringAttr):
        if named.data not in (SOURCE, *all_passes()):
            stages = ", ".join((SOURCE, *all_passes()))
            raise UnknownPassError(f'{ATTRIBUTE} = "{named.data}" is no stage', remedy=f"the stages are {stages}")
        return named.data, named.data
    names = {op.name for op in module.walk()}
    if "torch.attnc_flex_attention" in names:
        return SOURCE, SOURCE
    if "attnc.attention_backward" in names:
        tiled = "tile.kernel" in names
        first, last = "differentiate-attention", "select-backward-tile-sizes"
        return ("tile-attention-backward", "tile-attention-backward") if tiled else (first, last)
    if "tile.kernel" in names:
        tiled = "iree_linalg_ext.online_attention" in names
        last = road_of(module)[-1]
        return ("tile-attention", "split-reduction") if tiled else (last, last)
    if "iree_linalg_ext.attention" in names:
        return STAGES[0], STAGES[0]
    if "iree_linalg_ext.online_attention" in names:
        return STAGES[0], "select-tile-sizes"  # what the passes between give is optional
    return SOURCE, STAGES[-1]  # nothing that a pass would change


def lower(module: ModuleOp, target: Target, observe: Observer | None = None) -> ModuleOp:
    """Run all passes that follow the module's stage, in place. `observe(stage, module)` sees it first as it came, then after
    each pass."""
    stage = stage_of(module)
    if observe is not None:
        observe(stage, module)
    road = road_of(module)
    remaining = road if stage == SOURCE else road[road.index(stage) + 1 :]
    for name in remaining:
        run_pass(module, name, target)
        if observe is not None:
            observe(name, module)
    return module


# -- code -----------------------------------------------------------------------------------------------------------------
@dataclass
class Code:
    """What emission gives for a module's kernels: LLVM text of their own, those of the leaf routines they call, and the record
    by which the runtime launches them."""

    llvm: str
    leaves: list[str]
    record: dict[str, Any] = field(default_factory=dict)


def emit(module: ModuleOp, target: Target) -> Code:
    """LLVM text for the kernels of a module at its last stage. Reads nothing but the module."""
    from attnc.codegen.llvm.module import emit_module

    return Code(*emit_module(module, target))


def to_objects(code: Code, target: Target) -> list[bytes]:
    """Object bytes of the kernels and of their leaf routines. The latter are compiled once for a set of element types."""
    from attnc.codegen.llvm.compile import to_object

    return [to_object(code.llvm, target), *(_leaf_object(text, target) for text in code.leaves)]


@functools.lru_cache(maxsize=32)
def _leaf_object(text: str, target: Target) -> bytes:
    """The leaf routines' object: from this process, else from disk, else compiled."""
    from attnc.codegen.llvm.compile import to_object
    from attnc.runtime.cache import Entry, disk_cache, make_key

    disk = disk_cache()
    key = make_key(target, "leaves", text) if disk is not None else ""
    if disk is not None and (entry := disk.get(key)) is not None and len(entry.blobs) == 1:
        return entry.blobs[0]
    compiled = to_object(text, target, optimise=False)
    if disk is not None:
        disk.put(key, Entry({"name": "leaves"}, (compiled,)))
    return compiled


def compile_module(module: ModuleOp, target: Target, observe: Observer | None = None) -> tuple[list[bytes], dict[str, Any]]:
    """A module of any stage, lowered in place and compiled: (objects, the kernel's record)."""
    code = emit(lower(module, target, observe), target)
    return to_objects(code, target), code.record


def compile_attention(record: Any, signature: Signature, needs: Sequence[bool] = ()) -> tuple[list[bytes], dict[str, Any]]:
    """The objects and the record for captured mods and the signature of a call: of the gradients that are needed, if any
    are."""
    from attnc.capture.to_torch import to_torch

    return compile_module(to_torch(record, signature, needs), Target.host(), _dumper())


def _dumper() -> Observer | None:
    """Writes each stage's text into the directory that ATTNC_DUMP_IR names, if it does: `000-0-torch.mlir`, … in order."""
    directory = knobs.dump_ir()
    if directory is None:
        return None
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _no_dumps(error) from None
    number = len(list(directory.glob("*-0-torch.mlir")))

    def write(stage: str, module: ModuleOp) -> None:
        place = (SOURCE, *road_of(module)).index(stage)
        try:
            (directory / f"{number:03}-{place}-{stage}.mlir").write_text(str(module) + "\n")
        except OSError as error:
            raise _no_dumps(error) from None

    return write


def _no_dumps(error: OSError) -> KnobError:
    name = knobs.dump_ir.name
    return KnobError(f"{name}={os.environ.get(name)!r}: {error}", remedy=f"{name}: {knobs.dump_ir.help}")


# -- faults ---------------------------------------------------------------------------------------------------------------
def locate(module: ModuleOp, target: Target, words: Sequence[int | float]) -> AttncError:
    """The error for a kernel that reported a fault when run on `words`: where it happened first. `module` is at its last
    stage."""
    import ctypes

    from attnc.codegen.llvm.compile import to_object
    from attnc.codegen.llvm.locate import RESULT_WORDS, locator
    from attnc.codegen.llvm.module import kernels_of
    from attnc.codegen.llvm.record import argument_words, module_record
    from attnc.runtime.abi import KernelRecord
    from attnc.runtime.objects import LoadedObjects

    kernel, *_ = kernels = kernels_of(module)  # the first one evaluates the mods
    record = KernelRecord.from_json(module_record(kernels, [0] * len(kernels)))
    values = list(words)
    place = 0
    for argument in record.arguments:
        if argument.role == "group":
            values[place] = 1  # one query head a task: tasks then follow each other in the order of (b, h, q)
        place += 1 + 2 * argument.rank if argument.kind == "buffer" else 1
    packed = bytearray(8 * argument_words(kernel))  # memory between kernels, which is not in the record, is empty here
    struct.pack_into(record.format, packed, 0, *values)
    result = (ctypes.c_int64 * RESULT_WORDS)()
    found = locator(kernel, module, target)
    name = f"{kernel.sym_name.data}.locate"
    loaded = LoadedObjects([to_object(found.text, target)], [name])
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(loaded.addresses[name])
    function(ctypes.addressof(ctypes.c_char.from_buffer(packed)), ctypes.addressof(result))
    if not result[0]:
        return CaptureIndexError("an index into a captured tensor is out of range (it depends on the score)")
    cause, dim, index, size, row, position, _ = result[1:8]
    batch, head, query = result[8], result[9], result[10] + row
    label = found.causes[cause]
    if label is None:
        return ModDivisionError(f"integer division by zero at b={batch}, h={head}, q={query}, k={position}")
    return CaptureIndexError.at(tensor=label, dim=dim, size=size, index=index, position=(batch, head, query, position))


def locate_attention(record: Any, signature: Signature, words: Sequence[int | float]) -> AttncError:
    """`locate` for captured mods and the signature of a call."""
    from attnc.capture.to_torch import to_torch

    target = Target.host()
    return locate(lower(to_torch(record, signature), target), target, words)


def stages_text(module: ModuleOp, target: Target) -> dict[str, str]:
    """Lower a module in place; the text of each stage, in order."""
    texts: dict[str, str] = {}
    lower(module, target, lambda name, current: texts.__setitem__(name, str(current) + "\n"))
    return texts
