"""What is known of code before it runs: what does a function name, is a foreign call harmless?"""

from __future__ import annotations

import dis
import functools
import types

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
def names_of(code: types.CodeType) -> frozenset[str]:
    """All names of attributes and globals in a function's code and in the functions within it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_of(constant)
    return frozenset(names)


@functools.lru_cache(maxsize=4096)
def not_rebuildable(code: types.CodeType, pure: frozenset[str] = PURE_MODULES) -> str | None:
    """Why a copy of this code with other globals would not do what the original does. It may import the `pure` modules."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME" and str(instruction.argval).partition(".")[0] not in pure:
            return f"imports {instruction.argval}"
        if instruction.opname == "LOAD_BUILD_CLASS":
            return "defines a class"
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return next((reason for reason in (not_rebuildable(constant, pure) for constant in inner) if reason is not None), None)
