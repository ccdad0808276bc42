"""The table of ATen operations that a mod may use; docs/operations.md is printed from it.

Three kinds of entry:

* elementwise: `build(region, dtype, *arguments)` gives one element of the result, in the carried type of `dtype`. Tensor
  arguments arrive as `Scalar`, Python numbers as `Number`, the rest as None, str or list. Broadcasting is not its matter.
* tensor: `build(region, result_types, *arguments)` gives a value (or a tuple of them) from whole values.
* number: `build(region, *arguments)` gives a `Number` from `Number`s: Python arithmetic on captured numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

_Build = TypeVar("_Build", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry:
    """How an operation is built, and what the documentation says of it."""

    kind: str
    build: Callable[..., Any]
    section: str
    note: str = ""


OPERATIONS: dict[str, Entry] = {}


def _place(build: Callable[..., Any]) -> tuple[str, str]:
    return build.__module__, build.__qualname__


def _register(kind: str, section: str, names: str, note: str) -> Callable[[_Build], _Build]:
    def register(build: _Build) -> _Build:
        for name in names.split():
            known = OPERATIONS.get(name)  # after an interrupted import the same builder comes again
            assert known is None or _place(known.build) == _place(build), name
            OPERATIONS[name] = Entry(kind, build, section, note)
        return build

    return register


def elementwise(section: str, names: str, note: str = "") -> Callable[[_Build], _Build]:
    """Registers one builder for several names, separated by blanks."""
    return _register("elementwise", section, names, note)


def whole(section: str, names: str, note: str = "") -> Callable[[_Build], _Build]:
    """Registers a builder of kind tensor."""
    return _register("tensor", section, names, note)


def number(section: str, names: str, note: str = "") -> Callable[[_Build], _Build]:
    """Registers a builder of kind number."""
    return _register("number", section, names, note)


class Unsupported(Exception):
    """Raised by a builder: why these arguments do not compile. The pass adds the operation and the user's line."""
