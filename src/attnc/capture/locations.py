"""The user's line that runs now, for the record and for refusals."""

from __future__ import annotations

import functools
import sys
import types
from pathlib import Path
from typing import Any, TypeVar

import torch

from attnc.capture.record import Location
from attnc.errors import AttncError

E = TypeVar("E", bound=AttncError)

_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_TRACE = str(Path(__file__).with_name("trace.py"))


def user_location() -> Location | None:
    """The innermost line of the running mod that is the user's own code."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file == _TRACE and frame.f_code.co_name == "run":
            return None  # the tracer itself: the mod's frames are all within
        if not file.startswith((_HERE, _TORCH)) and not file.startswith("<attnc"):
            return Location(file, frame.f_lineno)
        frame = frame.f_back
    return None


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


def refuse(kind: type[E], message: str, remedy: str | None = None) -> E:
    """The error `kind` at the user's current line."""
    return kind(message, remedy=remedy, **where())
