"""NumPy arrays as a kernel sees them: strides in elements, and whether one may take another's place."""

from __future__ import annotations

import numpy as np

from attnc.capture.reads import stride_pattern


def is_whole(array: np.ndarray) -> bool:
    """Whether its elements lie at multiples of their own size, as a kernel reads them."""
    size = array.dtype.itemsize
    return array.flags.aligned and not any(stride % size for stride in array.strides)


def whole(array: np.ndarray) -> np.ndarray:
    """The array, or a copy whose elements a kernel can read in place."""
    return array if is_whole(array) else np.array(array, order="C")


def element_strides(array: np.ndarray) -> tuple[int, ...]:
    """Strides in elements; those of the copy that is made of an array whose elements a kernel cannot read in place."""
    size = array.dtype.itemsize
    strides = array.strides if is_whole(array) else np.empty(array.shape, array.dtype).strides
    return tuple(stride // size for stride in strides)


class ArrayCheck:
    """Whether an array may take the place of the one a mod was traced with: dtype, rank, stride pattern, fixed lengths."""

    __slots__ = ("_class", "_dtype", "_last", "_pattern", "_sizes")

    def __init__(self, array: np.ndarray, pattern: str, sizes: tuple[int | None, ...]):
        self._class = type(array)
        self._dtype = array.dtype
        self._pattern = pattern
        self._sizes = sizes
        self._last = (array.shape, array.strides, array.flags.aligned)

    def __call__(self, array: np.ndarray) -> bool:
        dtype = array.dtype
        if type(array) is not self._class or not (dtype is self._dtype or dtype == self._dtype):
            return False
        sizes = array.shape
        now = sizes, array.strides, array.flags.aligned
        if now == self._last:
            return True
        if len(sizes) != len(self._sizes) or stride_pattern(sizes, element_strides(array)) != self._pattern:
            return False
        if any(fixed is not None and fixed != size for fixed, size in zip(self._sizes, sizes, strict=True)):
            return False
        self._last = now
        return True
