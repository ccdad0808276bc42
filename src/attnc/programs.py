"""Compiled programs: in this process, else on disk, else compiled now.

A program is known by the trace record of its mods and the signature of the call. A warm process finds it on disk and imports
nothing of the compiler.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from attnc.errors import CompileError
from attnc.runtime.abi import KernelRecord
from attnc.runtime.attention import Attention
from attnc.runtime.attention_backward import AttentionBackward
from attnc.runtime.cache import Entry, disk_cache, make_key
from attnc.runtime.signature import Signature
from attnc.runtime.whole_imports import interrupts_as_such

Loaded = TypeVar("Loaded")

KEPT = 512
"""Programs kept in a process."""

compiled = 0
"""How many programs this process has compiled (not found in a cache): tests count with it."""

on_forget: list[Callable[[], None]] = []
"""What else is to be dropped by `forget`: caches of those who hold programs."""

_programs: OrderedDict[Hashable, Any] = OrderedDict()
_compiling = threading.RLock()
"""One thread compiles at a time: Python and LLVM hold a lock of their own meanwhile, so nothing is lost, and threads that meet
the same new mod compile it once. A fork waits for it: its child could not go on with what another thread began, be it the
import of the compiler's modules."""


def program(record: Any, signature: Signature) -> Attention:
    """The program of a trace `record` (hashable, its `repr` says all) and `signature`. Raises what compiling raises."""
    found = _programs.get((record, signature))
    return found if found is not None else _found_or_made((record, signature), lambda: _load_or_compile(record, signature))


def backward_program(record: Any, signature: Signature, needs: Sequence[bool]) -> AttentionBackward:
    """The program of the gradients of `program(record, signature)`. `needs` says of query, key, value, scale and each
    captured tensor whether its gradient is wanted; some are, and only captures of floats. Raises what compiling raises."""
    signature = replace(signature, return_lse=False, return_max=False, few_queries=False, wide_lse=False)
    key = (record, signature, tuple(needs))
    found = _programs.get(key)
    return found if found is not None else _found_or_made(key, lambda: _load_or_compile_backward(*key))


def _found_or_made(key: Hashable, make: Callable[[], Any]) -> Any:
    with _compiling:
        found = _programs.get(key)
        if found is None:
            found = _programs[key] = make()
            while len(_programs) > KEPT:
                _programs.popitem(last=False)
    return found


def forget() -> None:
    """Drop all programs of this process (what is on disk stays), so that knobs that compile are read again."""
    with _compiling:
        _programs.clear()
        for hook in on_forget:
            hook()


def _load_or_compile(record: Any, signature: Signature) -> Attention:
    def compile_now() -> tuple[list[bytes], dict[str, Any]]:
        from attnc import pipeline

        return pipeline.compile_attention(record, signature)

    def load(kernel: KernelRecord, objects: Sequence[bytes]) -> Attention:
        attention = Attention(kernel, objects)
        attention.kernel.load()
        return attention

    return cached((record_text(record), signature), compile_now, load)


def _load_or_compile_backward(record: Any, signature: Signature, needs: tuple[bool, ...]) -> AttentionBackward:
    def compile_now() -> tuple[list[bytes], dict[str, Any]]:
        from attnc import pipeline

        return pipeline.compile_attention(record, signature, needs)

    def load(kernel: KernelRecord, objects: Sequence[bytes]) -> AttentionBackward:
        backward = AttentionBackward(kernel, objects)
        backward.kernel.load()
        return backward

    return cached(("backward", record_text(record), signature, needs), compile_now, load)


def record_text(record: Any) -> str:
    """All of a trace record that decides its code; where in the user's files it was written does not."""
    functions = [
        function and (function.arguments, [(op.name, op.operands, op.type) for op in function.ops], function.result)
        for function in (record.score, record.mask)
    ]
    return repr((functions, record.captures, record.numbers))


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Python's garbage collector off: importing and compiling make so many objects that it would look through all of torch's,
    70 ms each time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_collector_paused()
@interrupts_as_such()
def cached(
    parts: Hashable,
    compile_now: Callable[[], tuple[list[bytes], dict[str, Any]]],
    load: Callable[[KernelRecord, Sequence[bytes]], Loaded],
) -> Loaded:
    """`load` of the record and objects kept on disk under `parts`, else of those that `compile_now` makes and that are kept."""
    global compiled
    from attnc.target import Target

    disk = disk_cache()
    key = make_key(Target.host(), parts) if disk is not None else ""
    if disk is not None and (entry := disk.get(key)) is not None:
        try:
            return load(KernelRecord.from_json(entry.record), entry.blobs)
        except CompileError:
            disk.remove(key)  # whole by its checksum, and yet of no use
    objects, data = compile_now()
    compiled += 1
    record = KernelRecord.from_json(data)
    loaded = load(record, objects)
    if disk is not None:
        disk.put(key, Entry(record.to_json(), tuple(objects)))
    return loaded


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_compiling.acquire, after_in_parent=_compiling.release, after_in_child=_compiling.release)
