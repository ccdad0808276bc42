"""`capture`: both mods of a call as a record, and the tensors and numbers they use now.

A repeated call finds the plan of reads of an earlier trace (`plans.py`); any other call traces.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.overrides

from attnc.capture.plans import Entry, clear, code_of, intern, plans, promote, remember
from attnc.capture.record import Record
from attnc.capture.trace import trace


class Captured(NamedTuple):
    """What `capture` found.

    `record` is the key of the compiled code. `tensors` are the captured tensors of now and `numbers` the run-time numbers of
    now (ints and floats), in the record's order. `retraced` says why each call must trace, where it must.
    """

    record: Record
    tensors: tuple[torch.Tensor, ...]
    numbers: tuple[int | float, ...]
    retraced: str | None = None


NOTHING = Captured(Record(None, None), (), ())
"""What a call without mods has."""

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
        return NOTHING
    key = (code_of(score_mod), code_of(mask_mod), score_dtype, _get_default_dtype())
    if torch._C._len_torch_function_stack():
        key += _function_modes()
    entries = None if own_places else plans.get(key)
    if entries is not None:
        for entry in entries:
            found = entry.check(score_mod, mask_mod)
            if found is not None:
                if entry is not entries[0]:
                    promote(key, entry)
                tensors, numbers = found
                return Captured(entry.record, tensors, numbers)
    traced = trace(score_mod, mask_mod, score_dtype)
    if own_places:
        return Captured(traced.record, traced.tensors, traced.numbers, traced.retraced)
    record = intern(traced.record)
    if traced.check is not None:
        remember(key, Entry(traced.check, record))
    return Captured(record, traced.tensors, traced.numbers, traced.retraced)


def _function_modes() -> tuple:
    """The modes that see a mod's calls of torch beside ours: above all the default device."""
    modes = torch.overrides._get_current_function_mode_stack()
    return tuple(getattr(mode, "device", None) or type(mode) for mode in modes)


__all__ = ["Captured", "capture", "clear"]
