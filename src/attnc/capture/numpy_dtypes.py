"""dtypes of NumPy in a trace: which there are, what NumPy promotes to, and where torch's promotion says the same.

A record is written in ATen operations, whose operands torch promotes by rules of its own. NumPy's rules (those of NumPy 2,
whatever the values: Python numbers are weak, all else is strong) are asked of NumPy itself; where torch's would give another
dtype, the trace converts the operands first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnc.capture.locations import where
from attnc.capture.record import Literal
from attnc.errors import UnsupportedModError, UnsupportedTensorError

NAMES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
"""The dtypes that mods may compute in and captured arrays may have."""

BOOL, INT32, INT64, FLOAT32, FLOAT64 = map(np.dtype, ("bool", "int32", "int64", "float32", "float64"))
INDEX_DTYPES = ("int64", "int32", "int16", "int8", "uint8")

_WIDTHS = {name: np.dtype(name).itemsize for name in NAMES if name != "bfloat16"} | {"bfloat16": 2}


def name_of(dtype: np.dtype) -> str:
    """The name of a dtype that mods may compute in. Raises `UnsupportedModError` for others."""
    if dtype.name not in NAMES or not dtype.isnative:
        raise UnsupportedModError(
            f"a mod computes in {shown(dtype)}", remedy=f"convert to one of {', '.join(NAMES)} with .astype(…)", **where()
        )
    return dtype.name


def shown(dtype: np.dtype) -> str:
    """A dtype in a message: its name, and its byte order where that is foreign."""
    if dtype.isnative:
        return dtype.name
    return f"{dtype.name} of foreign byte order ({dtype.str})"


def literal_of(dtype: np.dtype) -> Literal:
    return Literal("dtype", name_of(dtype))


def is_float(dtype: np.dtype) -> bool:
    return "float" in dtype.name


def is_half(dtype: np.dtype) -> bool:
    return dtype.name in ("float16", "bfloat16")


def check_array(array: np.ndarray) -> None:
    """Refuse a captured array that mods cannot read: `UnsupportedTensorError`."""
    kind, dtype = type(array), array.dtype
    if kind is not np.ndarray and kind is not np.memmap:
        raise UnsupportedTensorError(
            f"a mod captures a {kind.__name__}, a subclass of numpy.ndarray with rules of its own",
            remedy="capture numpy.asarray(…) of it" + (", and its mask as a second array" if hasattr(array, "mask") else ""),
            **where(),
        )
    if not dtype.isnative:
        remedy = "capture array.astype(array.dtype.newbyteorder('='))"
    elif dtype.name not in NAMES:
        remedy = f"convert it to one of {', '.join(NAMES)} with .astype(…)"
    else:
        return
    raise UnsupportedTensorError(f"a mod captures an array of dtype {shown(dtype)}", remedy=remedy, **where())


def promoted(one: str, other: str) -> str:
    """torch's promotion of two tensors, both with dims or both without."""
    if one == other:
        return one
    floats = [name for name in (one, other) if "float" in name]
    if floats:
        wider = max(floats, key=lambda name: _WIDTHS[name])
        return "float32" if len(floats) == 2 and _WIDTHS[one] == _WIDTHS[other] else wider
    if "bool" in (one, other):
        return other if one == "bool" else one
    if "uint8" in (one, other):
        signed = other if one == "uint8" else one
        return "int16" if signed == "int8" else signed
    return max(one, other, key=lambda name: _WIDTHS[name])


def rounded(value: float, dtype: np.dtype) -> float:
    """A Python number as NumPy rounds it on the way into a computation in `dtype`."""
    with np.errstate(all="ignore"):
        return float(np.asarray(value).astype(dtype))


def in_range(value: int, dtype: np.dtype) -> bool:
    """Whether a Python int fits in an integer dtype."""
    limits = np.iinfo(dtype)
    return bool(limits.min <= value <= limits.max)


def out_of_bounds(value: Any, dtype: np.dtype) -> OverflowError:
    """NumPy's own error."""
    return OverflowError(f"Python integer {value} out of bounds for {dtype.name}")
