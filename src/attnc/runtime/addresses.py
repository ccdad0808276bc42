"""The address of a NumPy array's memory, in a tenth of a microsecond.

`array.ctypes.data` and `array.__array_interface__` take ten times as long. The first field of an array object after Python's
own header is the pointer to its data; that is part of NumPy's binary interface. Where a trial says otherwise, the slow way is
taken.
"""

from __future__ import annotations

import ctypes
from typing import Any

_HEADER = object.__basicsize__
_read = ctypes.c_size_t.from_address


def _quick(array: Any) -> int:
    return _read(id(array) + _HEADER).value


def _slow(array: Any) -> int:
    return array.__array_interface__["data"][0]


def _is_right() -> bool:
    import numpy

    base = numpy.zeros((3, 4, 5), numpy.float32)
    base.setflags(write=False)
    trials = (base, base[1:, ::2, ::-1], base[1, 2, 3:], numpy.zeros(0), numpy.array(1.5), base.T)
    return all(_quick(array) == _slow(array) for array in trials)


def address_of():
    """The function that gives the address of the first element of a `numpy.ndarray`."""
    import sys

    return _quick if sys.implementation.name == "cpython" and _is_right() else _slow
