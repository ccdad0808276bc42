"""The user's line that runs now, for the record and for refusals."""

from __future__ import annotations

import functools
import sys
import types
from pathlib import Path
from typing import Any, TypeVar

from attnc.capture.record import Location
from attnc.errors import AttncError, ModSignatureError

E = TypeVar("E", bound=AttncError)

_HERE = str(Path(__file__).parent)
_TRACERS = frozenset(str(Path(__file__).with_name(name)) for name in ("trace.py", "numpy_trace.py"))


def user_location() -> Location | None:
    """The innermost line of the running mod that is the user's own code."""
    libraries = (_HERE, *_libraries("torch" in sys.modules, "numpy" in sys.modules))
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file in _TRACERS and frame.f_code.co_name == "run":
            return None  # the tracer itself: the mod's frames are all within
        if not file.startswith(libraries) and not file.startswith("<attnc"):
            return Location(file, frame.f_lineno)
        frame = frame.f_back
    return None


@functools.cache
def _libraries(with_torch: bool, with_numpy: bool) -> tuple[str, ...]:
    """Where the code of torch and NumPy lies, as far as they are imported: it is no user's."""
    modules = [sys.modules.get(name) for name in ("torch", "numpy")]
    return tuple(str(Path(module.__file__).parent) for module in modules if module is not None and module.__file__)


def where() -> dict[str, Any]:
    location = user_location()
    return {} if location is None else {"filename": location.file, "line": location.line}


def definition(mod: Any) -> dict[str, Any]:
    """Where a mod is defined, as an error's `filename` and `line`; nothing where it is no Python code."""
    while isinstance(mod, functools.partial):
        mod = mod.func
    if not isinstance(mod, (types.FunctionType, types.MethodType)):
        mod = getattr(type(mod), "__call__", None)  # noqa: B004 - its code is wanted
    code = getattr(mod, "__code__", None)
    return {} if code is None else {"filename": code.co_filename, "line": code.co_firstlineno}


def no_callable(name: str, mod: Any) -> ModSignatureError:
    """The error where `mod` is no function; of a tensor or array it says how a function reads it."""
    return ModSignatureError(f"{name} is a {type(mod).__name__}, no callable", remedy=reading(name, mod))


def reading(name: str, tensor: Any) -> str | None:
    """The argument that reads a tensor or array of 2 to 4 dims as a mask, or a bias; None for anything else."""
    indices = {2: "q, k", 3: "h, q, k", 4: "b, h, q, k"}.get(getattr(tensor, "ndim", 0))
    if indices is None:
        return None
    if name == "score_mod":
        return f"read it in a function: score_mod=lambda score, b, h, q, k: score + bias[{indices}]"
    return f"read it in a function: mask_mod=lambda b, h, q, k: mask[{indices}]"


def refuse(kind: type[E], message: str, remedy: str | None = None) -> E:
    """The error `kind` at the user's current line."""
    return kind(message, remedy=remedy, **where())
