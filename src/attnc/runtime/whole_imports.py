"""Libraries that must be imported in one piece.

Ctrl-C may come at any moment, also in the middle of the first compile's imports. What xDSL or LLVM's binding had begun to
register by then stays behind, and they cannot be imported again in that process: every later compile would fail. So signals
wait until these imports are done.
"""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

COMPILER = (
    "xdsl.dialects.affine",
    "xdsl.dialects.arith",
    "xdsl.dialects.func",
    "xdsl.dialects.linalg",
    "xdsl.dialects.math",
    "xdsl.dialects.memref",
    "xdsl.dialects.scf",
    "xdsl.dialects.tensor",
    "xdsl.parser",
    "xdsl.pattern_rewriter",
    "llvmlite.ir",
)
LLVM = ("llvmlite.binding",)

_whole: set[Sequence[str]] = set()


def import_whole(names: Sequence[str]) -> None:
    """Import the modules `names`, which no interrupt can break off. Free when it was done before."""
    if names not in _whole:
        with _signals_wait():
            for name in names:
                importlib.import_module(name)
            _whole.add(names)


@contextmanager
def interrupts_as_such() -> Iterator[None]:
    """A Ctrl-C that comes while a class is being made leaves Python as a RuntimeError (of `__set_name__`) that it caused: here
    it becomes itself again. Also a decorator."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise error.__cause__ from None
        raise


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Signals whose handlers are Python functions are handled when the context ends. Python runs such handlers in its main
    thread alone: in others there is nothing to hold back."""
    came: list[int] = []
    handlers: dict[int, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    handlers[number] = handler  # before it is replaced: the next line may be the last that runs
                    signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)
