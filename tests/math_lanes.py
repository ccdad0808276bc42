"""Functions of `codegen/llvm/math.py` over arrays, and their assembly."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import llvmlite.binding as llvm
import numpy as np

from attnc.codegen.llvm import math as vector_math
from attnc.codegen.llvm.math import MODERN, Machine

llvm.initialize_native_target()
llvm.initialize_native_asmprinter()

OLD = Machine.of("x86_64-unknown-linux-gnu", "+sse2")
TRIPLE = "x86_64-unknown-linux-gnu"
IS_X86 = llvm.get_default_triple().startswith("x86_64")
TYPES = {"float": np.float32, "double": np.float64, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64}
WIDTHS = (1, 4, 8, 16)
Array = np.ndarray


@functools.cache
def compiled(name: str, element: str, width: int, machine: Machine = MODERN) -> Callable[..., Array]:
    """The function over arrays, their length a multiple of the width. An old machine's code is compiled for an old CPU."""
    operands, result = vector_math.signature(name, element)
    symbol, text = vector_math.define(name, element, width, machine)

    def type_of(kind: str) -> str:
        return kind if width == 1 else f"<{width} x {kind}>"

    loads = "".join(
        f"  %p{k} = getelementptr {kind}, ptr %a{k}, i64 %i\n  %v{k} = load {type_of(kind)}, ptr %p{k}, align 1\n"
        for k, kind in enumerate(operands)
    )
    arguments = ", ".join(f"{type_of(kind)} %v{k}" for k, kind in enumerate(operands))
    parameters = "".join(f", ptr %a{k}" for k in range(len(operands)))
    ir = "\n".join(vector_math.declarations(name, element, width, machine))
    ir += f"""
{text}
define void @run(ptr %out, i64 %n{parameters}) {{
start:
  br label %head
head:
  %i = phi i64 [0, %start], [%next, %body]
  %more = icmp slt i64 %i, %n
  br i1 %more, label %body, label %end
body:
{loads}
  %r = call {type_of(result)} {symbol}({arguments})
  %p = getelementptr {result}, ptr %out, i64 %i
  store {type_of(result)} %r, ptr %p, align 1
  %next = add i64 %i, {width}
  br label %head
end:
  ret void
}}
"""
    module = llvm.parse_assembly(ir)
    module.verify()
    old = machine == OLD and IS_X86
    host = "" if old else llvm.get_host_cpu_features().flatten()
    cpu = "x86-64" if old else llvm.get_host_cpu_name()
    target = llvm.Target.from_default_triple().create_target_machine(cpu=cpu, features=host, opt=2, jit=True)
    optimise(module, target)
    engine = llvm.create_mcjit_compiler(module, target)
    engine.finalize_object()
    entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * len(operands))(
        engine.get_function_address("run")
    )

    def call(*inputs: Array) -> Array:
        inputs = tuple(np.ascontiguousarray(x) for x in inputs)
        size = inputs[0].size
        assert size % width == 0
        out = np.empty(size, np.uint8 if element == "u8" else TYPES[result])
        entry(out.ctypes.data, size, *[x.ctypes.data for x in inputs])
        return out

    call.engine = engine  # type: ignore[attr-defined]  # the code lives as long as its engine
    return call


def optimise(module, target) -> None:
    options = llvm.PipelineTuningOptions(speed_level=1)
    builder = llvm.create_pass_builder(target, options)
    builder.getModulePassManager().run(module, builder)


def assembly(name: str, element: str, width: int, cpu: str, machine: Machine) -> str:
    _, text = vector_math.define(name, element, width, machine)
    text = text.replace("define internal", "define").replace("alwaysinline", "")
    module = llvm.parse_assembly("\n".join(vector_math.declarations(name, element, width, machine)) + "\n" + text)
    features = "-prefer-256-bit" if cpu == "znver4" else ""
    target = llvm.Target.from_triple(TRIPLE).create_target_machine(cpu=cpu, features=features, opt=2)
    optimise(module, target)
    return target.emit_assembly(module)
