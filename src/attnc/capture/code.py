"""What is known of code before it runs: does a function write outside of itself, is a foreign call harmless?"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator

# Modules whose functions depend on their arguments alone; torch's own state (default dtype, autocast) is in the key.
PURE_MODULES = frozenset({"torch", "math", "cmath", "operator", "_operator", "itertools", "functools", "_functools", "typing"})
_PURE_BUILTIN_MODULES = PURE_MODULES | {"builtins"}

IMPURE_BUILTINS = frozenset(
    {"open", "input", "globals", "locals", "vars", "eval", "exec", "compile", "__import__", "dir", "id", "hash", "super"}
    | {"setattr", "delattr", "breakpoint", "memoryview"}
)


def is_trusted_function(function: types.FunctionType) -> bool:
    """A function of torch itself that closes over nothing: it reads only its arguments."""
    return function.__closure__ is None and (function.__module__ or "").partition(".")[0] in PURE_MODULES


def is_pure_builtin(value: object) -> bool:
    """A C function that reads only its arguments."""
    if not isinstance(value, types.BuiltinFunctionType):
        return isinstance(value, (types.MethodDescriptorType, types.WrapperDescriptorType)) or _is_ufunc(value)
    owner = value.__self__
    if owner is None or isinstance(owner, types.ModuleType):
        module = value.__module__ or ""
        name = value.__name__
        return module.partition(".")[0] in _PURE_BUILTIN_MODULES and name not in IMPURE_BUILTINS
    return isinstance(owner, type) and owner.__module__.partition(".")[0] == "torch"


def _is_ufunc(value: object) -> bool:
    kind = type(value)
    return kind.__module__ == "numpy" and kind.__name__ == "ufunc"


@functools.lru_cache(maxsize=4096)
def writes_outside(code: types.CodeType) -> str | None:
    """Why a rebuilt copy of this code would not do what the original does: it writes to globals or outer variables."""
    return next((reason for _, reason in _writes(code)), None)


def _writes(code: types.CodeType) -> Iterator[tuple[str | None, str]]:
    """The outer variable that is written, if it is one, and the reason in words."""
    for instruction in dis.get_instructions(code):
        name, argument = instruction.opname, instruction.argval
        if name in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            yield None, f"assigns the global {argument}"
        elif name in ("STORE_DEREF", "DELETE_DEREF") and argument in code.co_freevars:
            yield argument, f"assigns the outer variable {argument}"
        elif name == "IMPORT_NAME" and str(argument).partition(".")[0] not in PURE_MODULES:
            yield None, f"imports {argument}"
        elif name == "LOAD_BUILD_CLASS":
            yield None, "defines a class"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            # A nested function may assign this function's own variables.
            yield from ((variable, reason) for variable, reason in _writes(constant) if variable not in code.co_cellvars)
