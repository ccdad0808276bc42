"""Leaf routines that read the right-hand side where it lies, against NumPy: rows, keys, strides, narrow machines."""

from __future__ import annotations

import ctypes
import functools
import itertools

import numpy as np
import pytest

from attnc.codegen.llvm import leaves
from attnc.codegen.llvm.leaves_in_place import accumulate_in_place, dot_in_place, heights
from attnc.runtime.objects import LoadedObjects
from attnc.target import Target
from test_leaves import MACHINES, TYPES, close, compile_object, guarded, unaligned

ROWS = [1, 2, 3, 5, 7, 8, 16]


class Library:
    """Both leaves of one configuration, for a right-hand side of so many columns, as Python callables."""

    def __init__(self, source: str, element: str, columns: int, target: Target):
        self.dot, dot_text = dot_in_place(source, element, columns, target)
        self.accumulate, accumulate_text = accumulate_in_place(source, element, columns, target)
        text = leaves.join([dot_text, accumulate_text])
        self.objects = LoadedObjects([compile_object(text, target)], [self.dot, self.accumulate])
        self.highest = heights(target)[0]
        self.dtype = np.dtype(np.float32 if element == "float" else np.float64)

    def call(self, symbol: str, *arguments: object) -> None:
        types = [ctypes.c_void_p if a is None or isinstance(a, np.ndarray) else ctypes.c_int64 for a in arguments]
        function = ctypes.CFUNCTYPE(None, *types)(self.objects.addresses[symbol])
        function(*[a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments])


library = functools.cache(lambda source, element, columns, machine: Library(source, element, columns, MACHINES[machine]))


def stored(rng: np.random.Generator, shape: tuple[int, int], source: str, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Elements as they lie in memory, and their values."""
    values = rng.uniform(-1, 1, shape).astype(np.float32)
    if source == "half":
        return values.astype(np.float16), values.astype(np.float16).astype(dtype)
    if source == "bfloat":
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(dtype)
    return values.astype(dtype), values.astype(dtype)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("source", "element"), TYPES)
class TestInPlace:
    @pytest.mark.parametrize("depth", [16, 48, 128])
    def test_dot(self, machine: str, source: str, element: str, depth: int):
        lib = library(source, element, depth, machine)
        rng = np.random.default_rng(depth)
        for rows, (valid, columns) in itertools.product(ROWS, [(0, 16), (1, 16), (15, 16), (16, 16), (67, 80)]):
            padded = -(-rows // lib.highest) * lib.highest
            lhs = np.full((padded, depth + 3), np.nan, lib.dtype)
            lhs[:rows, :depth] = rng.uniform(-1, 1, (rows, depth))
            memory, values = stored(rng, (valid, depth + 5), source, lib.dtype)
            # The last row ends where memory ends.
            end = memory.size - 5 if valid else 0
            rhs = guarded(memory.reshape(-1)[:end])
            out = unaligned(np.full((padded, columns + 1), 7.0, lib.dtype))
            lib.call(lib.dot, unaligned(lhs), depth + 3, rhs, depth + 5, out, columns + 1, valid, columns, rows)
            expected = np.zeros((rows, columns))
            expected[:, :valid] = lhs[:rows, :depth].astype(np.float64) @ values[:, :depth].T.astype(np.float64)
            close(out[:rows, :columns], expected, depth)
            assert (out[:, columns:] == 7).all()

    @pytest.mark.parametrize("columns", [16, 64, 80, 256])
    def test_accumulate(self, machine: str, source: str, element: str, columns: int):
        lib = library(source, element, columns, machine)
        rng = np.random.default_rng(columns)
        for rows, depth, scaled in itertools.product(ROWS, [0, 1, 37], [False, True]):
            padded = -(-rows // lib.highest) * lib.highest
            lhs = np.full((padded, depth + 3), np.nan, lib.dtype)
            lhs[:rows, :depth] = rng.uniform(-1, 1, (rows, depth))
            memory, values = stored(rng, (depth, columns + 5), source, lib.dtype)
            rhs = guarded(memory.reshape(-1)[: memory.size - 5 if depth else 0])
            acc = unaligned(rng.uniform(-1, 1, (padded, columns + 1)).astype(lib.dtype))
            scale = rng.uniform(0, 1, padded).astype(lib.dtype)
            before = acc.astype(np.float64)
            lib.call(
                lib.accumulate,
                *(unaligned(lhs), depth + 3, rhs, columns + 5, acc, columns + 1, scale if scaled else None, depth, rows),
            )
            factor = scale[:rows, None].astype(np.float64) if scaled else 1.0
            product = lhs[:rows, :depth].astype(np.float64) @ values[:, :columns].astype(np.float64)
            close(acc[:rows, :columns], factor * before[:rows, :columns] + product, depth)
            assert (acc[:, columns:] == before[:, columns:]).all()
