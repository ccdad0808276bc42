"""`capture_numpy`: both mods of a call, NumPy code, as a record, and the arrays and numbers they use now."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnc.capture.numpy_trace import trace
from attnc.capture.plans import Entry, code_of, intern, plans, promote, remember
from attnc.capture.record import Record

NOTHING = Record(None, None), (), ()


def capture_numpy(
    score_mod: Any, mask_mod: Any, score_dtype: np.dtype
) -> tuple[Record, tuple[np.ndarray, ...], tuple[int | float, ...]]:
    """Traces `score_mod` and `mask_mod` (either may be None), or finds that an earlier trace still holds.

    Returns the record, the key of the compiled code, with the captured arrays and the run-time numbers of now in the record's
    order. `score_dtype` is float32, or float64 for float64 inputs. Raises `UnsupportedModError` (and the classes that derive
    from it), `ModSignatureError`, `UnsupportedTensorError`, and whatever the mod raises.
    """
    if score_mod is None and mask_mod is None:
        return NOTHING
    key = ("numpy", code_of(score_mod), code_of(mask_mod), score_dtype)
    entries = plans.get(key)
    if entries is not None:
        for entry in entries:
            found = entry.check(score_mod, mask_mod)
            if found is not None:
                if entry is not entries[0]:
                    promote(key, entry)
                arrays, numbers = found
                return entry.record, arrays, numbers
    traced = trace(score_mod, mask_mod, score_dtype)
    record = intern(traced.record)
    if traced.check is not None:
        remember(key, Entry(traced.check, record))
    return record, traced.tensors, traced.numbers
