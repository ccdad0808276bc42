"""LLVM text to object bytes.

The text comes unrolled and in SSA form, so a handful of passes is enough; LLVM holds one lock for the whole process, so
nothing here is worth doing in threads.
"""

from __future__ import annotations

import llvmlite.binding as llvm

from attnc.errors import CompileError
from attnc.target import Target


def _machine(target: Target) -> llvm.TargetMachine:
    if target.triple.split("-")[0] == llvm.get_default_triple().split("-")[0]:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
    else:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.features, opt=2, reloc="pic", codemodel="default", jit=False
    )


def parse(text: str, target: Target, optimise: bool) -> llvm.ModuleRef:
    """Read and verify LLVM text, and optimise it lightly."""
    try:
        module = llvm.parse_assembly(f'target triple = "{target.triple}"\n\n{text}')
        module.verify()
    except RuntimeError as error:
        raise CompileError(f"LLVM refuses what attnc emitted: {error}") from error
    if optimise:
        machine = _machine(target)
        module.data_layout = str(machine.target_data)
        builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=1))
        passes = llvm.create_new_module_pass_manager()
        passes.add_always_inliner_pass()
        passes.add_instruction_combine_pass()
        passes.add_new_gvn_pass()
        passes.add_simplify_cfg_pass()
        passes.add_loop_rotate_pass()
        passes.add_instruction_combine_pass()
        passes.add_dead_code_elimination_pass()
        passes.run(module, builder)
    return module


def to_object(text: str, target: Target, optimise: bool = True) -> bytes:
    """Compile LLVM text to the bytes of an object file for `target`."""
    return _machine(target).emit_object(parse(text, target, optimise))


def to_assembly(text: str, target: Target, optimise: bool = True) -> str:
    """The assembly of what `to_object` gives."""
    return _machine(target).emit_assembly(parse(text, target, optimise))
