"""The user's line that runs now, for the record and for refusals."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from attnc.capture.record import Location
from attnc.errors import UnsupportedModError

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


def refuse(kind: type[UnsupportedModError], message: str, remedy: str | None = None) -> UnsupportedModError:
    """The error `kind` at the user's current line."""
    return kind(message, remedy=remedy, **where())
