"""`capture`: both mods of a call as a record, and the tensors and numbers they use now.

A repeated call checks the plan of reads of an earlier trace (`reads.py`) and gets the same record object back; any other
call traces. Equal records are one object, so a kernel cache may look them up by identity. No cache here holds a tensor.
"""

from __future__ import annotations

import functools
import threading
import types
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
import torch.overrides

from attnc.capture.reads import LazyCheck
from attnc.capture.record import Record
from attnc.capture.trace import trace

PLANS_PER_CODE = 64
CODES = 1024
RECORDS = 4096


class Captured(NamedTuple):
    """What `capture` found.

    `record` is the key of the compiled code. `tensors` are the captured tensors of now and `numbers` the run-time numbers of
    now (ints and floats), in the record's order. `retraced` says why each call must trace, where it must.
    """

    record: Record
    tensors: tuple[torch.Tensor, ...]
    numbers: tuple[int | float, ...]
    retraced: str | None = None


class _Entry(NamedTuple):
    check: LazyCheck
    record: Record


_NOTHING = Captured(Record(None, None), (), ())
_plans: OrderedDict[tuple, tuple[_Entry, ...]] = OrderedDict()
_records: OrderedDict[Record, Record] = OrderedDict()
_lock = threading.Lock()
_get_default_dtype = torch.get_default_dtype


def capture(
    score_mod: Any, mask_mod: Any = None, *, score_dtype: torch.dtype = torch.float32, own_places: bool = False
) -> Captured:
    """Traces `score_mod` and `mask_mod` (either may be None), or finds that an earlier trace still holds.

    `score_dtype` is the score's: float32, or float64 for float64 inputs. A record names the files and lines of the mods that
    were traced first of all equal ones; with `own_places` it is traced afresh, and names those of these mods. Raises
    `UnsupportedModError` (and the classes that derive from it), `ModSignatureError`, `DeviceError`, `UnsupportedTensorError`,
    and whatever the mod raises.
    """
    if score_mod is None and mask_mod is None:
        return _NOTHING
    key = (_code_of(score_mod), _code_of(mask_mod), score_dtype, _get_default_dtype())
    if torch._C._len_torch_function_stack():
        key += _function_modes()
    entries = None if own_places else _plans.get(key)
    if entries is not None:
        for entry in entries:
            found = entry.check(score_mod, mask_mod)
            if found is not None:
                if entry is not entries[0]:
                    _promote(key, entry)
                tensors, numbers = found
                return Captured(entry.record, tensors, numbers)
    traced = trace(score_mod, mask_mod, score_dtype)
    if own_places:
        return Captured(traced.record, traced.tensors, traced.numbers, traced.retraced)
    record = _intern(traced.record)
    if traced.check is not None:
        _remember(key, _Entry(traced.check, record))
    return Captured(record, traced.tensors, traced.numbers, traced.retraced)


def clear() -> None:
    """Forgets all plans and records."""
    with _lock:
        _plans.clear()
        _records.clear()


def _code_of(mod: Any) -> Any:
    """What a mod that is made anew for every call has in common with its predecessor."""
    kind = type(mod)
    if kind is types.FunctionType:
        return mod.__code__
    if kind is types.MethodType:
        return _code_of(mod.__func__)
    if kind is functools.partial:
        return "partial", _code_of(mod.func)
    return kind


def _function_modes() -> tuple:
    """The modes that see a mod's calls of torch beside ours: above all the default device."""
    modes = torch.overrides._get_current_function_mode_stack()
    return tuple(getattr(mode, "device", None) or type(mode) for mode in modes)


def _intern(record: Record) -> Record:
    with _lock:
        known = _records.setdefault(record, record)
        _records.move_to_end(known)
        if len(_records) > RECORDS:
            _records.popitem(last=False)
        return known


def _remember(key: tuple, entry: _Entry) -> None:
    with _lock:
        _plans[key] = (entry, *_plans.get(key, ())[: PLANS_PER_CODE - 1])
        _plans.move_to_end(key)
        if len(_plans) > CODES:
            _plans.popitem(last=False)


def _promote(key: tuple, entry: _Entry) -> None:
    """The plan that held last is tried first."""
    with _lock:
        entries = _plans.get(key, ())
        _plans[key] = (entry, *(other for other in entries if other is not entry))
