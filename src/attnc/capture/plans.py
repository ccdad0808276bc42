"""What earlier traces found, whichever library the mods use: plans of reads by the mods' code, and records by equality.

A repeated call checks the plan of reads of an earlier trace (`reads.py`) and gets the same record object back; any other
call traces. Equal records are one object, so a kernel cache may look them up by identity. No cache here holds a tensor.
"""

from __future__ import annotations

import functools
import threading
import types
from collections import OrderedDict
from typing import Any, NamedTuple

from attnc.capture.reads import LazyCheck
from attnc.capture.record import Record

PLANS_PER_CODE = 64
CODES = 1024
RECORDS = 4096


class Entry(NamedTuple):
    """A trace that may hold again."""

    check: LazyCheck
    record: Record


plans: OrderedDict[tuple, tuple[Entry, ...]] = OrderedDict()
_records: OrderedDict[Record, Record] = OrderedDict()
_lock = threading.Lock()


def clear() -> None:
    """Forgets all plans and records."""
    with _lock:
        plans.clear()
        _records.clear()


def code_of(mod: Any) -> Any:
    """What a mod that is made anew for every call has in common with its predecessor."""
    kind = type(mod)
    if kind is types.FunctionType:
        return mod.__code__
    if kind is types.MethodType:
        return code_of(mod.__func__)
    if kind is functools.partial:
        return "partial", code_of(mod.func)
    return kind


def intern(record: Record) -> Record:
    """The one object of all records that are equal to this one."""
    with _lock:
        known = _records.setdefault(record, record)
        _records.move_to_end(known)
        if len(_records) > RECORDS:
            _records.popitem(last=False)
        return known


def remember(key: tuple, entry: Entry) -> None:
    """Keeps a plan, tried first of its key."""
    with _lock:
        plans[key] = (entry, *plans.get(key, ())[: PLANS_PER_CODE - 1])
        plans.move_to_end(key)
        if len(plans) > CODES:
            plans.popitem(last=False)


def promote(key: tuple, entry: Entry) -> None:
    """The plan that held last is tried first."""
    with _lock:
        entries = plans.get(key, ())
        plans[key] = (entry, *(other for other in entries if other is not entry))
