"""Leaf routines against NumPy: every count of rows, odd sizes, run-time strides, unaligned memory, narrow and wide machines."""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import platform
from dataclasses import replace

import numpy as np
import pytest

from attnc.analysis.machine import register_tile
from attnc.codegen.llvm import leaves
from attnc.codegen.llvm.leaves_dot import BITS
from attnc.runtime.objects import LoadedObjects
from attnc.target import Target

X86 = platform.machine() in ("x86_64", "AMD64")
HASWELL = "+avx,+avx2,+fma,+f16c"


def machines() -> dict[str, Target]:
    """The machine at hand, and narrower ones that it can run."""
    host = Target.host()
    result = {"host": host}
    if X86:
        generic = replace(host, cpu="x86-64", features="", vector_bits=128, registers=16)
        result["sse2"] = generic
        result["sse2-as-512"] = replace(generic, vector_bits=512, registers=32)
        if host.vector_bits >= 256:
            result["avx2"] = replace(host, cpu="haswell", features=HASWELL, vector_bits=256, registers=16)
    return result


MACHINES = machines()
SIZES = [1, 17, 24, 64, 94, 96, 121, 128, 256]
TYPES = [
    ("float", "float"),
    ("half", "float"),
    ("bfloat", "float"),
    ("double", "double"),
    ("half", "double"),
    ("bfloat", "double"),
]


def compile_object(text: str, target: Target) -> bytes:
    """LLVM's code generator alone."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.features, opt=2, reloc="pic", codemodel="default"
    )
    module = llvm.parse_assembly(text)
    module.verify()
    return machine.emit_object(module)


class Library:
    """The leaves of one configuration as Python callables."""

    def __init__(self, source: str, element: str, target: Target):
        self.symbols, text = leaves.define(source, element, target)
        names = vars(self.symbols)
        self.objects = LoadedObjects([compile_object(text, target)], names.values())
        self.rows, vectors = register_tile(target, BITS[element])
        self.columns = vectors * target.lanes(BITS[element])
        self.dtype = np.dtype(np.float32 if element == "float" else np.float64)

    def call(self, name: str, *arguments: object) -> int:
        address = self.objects.addresses[getattr(self.symbols, name)]
        types = [ctypes.c_void_p if a is None or isinstance(a, np.ndarray) else ctypes.c_int64 for a in arguments]
        function = ctypes.CFUNCTYPE(ctypes.c_int32, *types)(address)
        return function(*[a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments])


library = functools.cache(lambda source, element, machine: Library(source, element, MACHINES[machine]))


def panels_of(matrix: np.ndarray, columns: int) -> np.ndarray:
    """[depth, n] as [ceil(n / columns), depth, columns], zero padded."""
    depth, n = matrix.shape
    count = -(-n // columns)
    padded = np.zeros((depth, count * columns), matrix.dtype)
    padded[:, :n] = matrix
    return np.ascontiguousarray(padded.reshape(depth, count, columns).transpose(1, 0, 2))


def unaligned(array: np.ndarray) -> np.ndarray:
    """A copy whose first element lies at an odd multiple of the element's size."""
    room = np.empty(array.size + 64, array.dtype)
    start = 1 + (-room.ctypes.data // array.itemsize) % (64 // array.itemsize)
    result = room[start : start + array.size].reshape(array.shape)
    result[...] = array
    assert not array.size or result.ctypes.data % 64 == array.itemsize
    return result


@functools.cache
def guarded_pages() -> tuple[np.ndarray, int]:
    """Memory whose last page must not be touched, and how many bytes come before it."""
    size = 1 << 20
    pages = mmap.mmap(-1, size + mmap.PAGESIZE)
    array = np.frombuffer(pages, np.uint8)
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(array.ctypes.data + size), mmap.PAGESIZE, 0) == 0
    return array, size


def guarded(array: np.ndarray) -> np.ndarray:
    """A copy behind whose end reading faults."""
    pages, size = guarded_pages()
    result = pages[size - array.nbytes : size].view(array.dtype).reshape(array.shape)
    result[...] = array
    return result


def close(actual: np.ndarray, expected: np.ndarray, depth: int) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=np.finfo(actual.dtype).eps * 4 * (depth + 4))


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("element", ["float", "double"])
class TestProducts:
    def operands(self, lib: Library, rows: int, depth: int, n: int):
        rng = np.random.default_rng(rows * 1000 + depth)
        padded = -(-rows // lib.rows) * lib.rows
        lhs = np.full((padded, depth + 3), np.nan, lib.dtype)
        lhs[:rows, :depth] = rng.uniform(-1, 1, (rows, depth))
        lhs[:rows, depth:] = np.nan
        rhs = rng.uniform(-1, 1, (depth, n)).astype(lib.dtype)
        return unaligned(lhs), rhs, unaligned(panels_of(rhs, lib.columns)), padded

    @pytest.mark.parametrize("depth", SIZES)
    def test_dot_rows(self, machine: str, element: str, depth: int):
        lib = library("float" if element == "float" else "double", element, machine)
        for rows in [*range(1, lib.rows + 1), 2 * lib.rows + 1]:
            for count, columns in ((1, 1), (1, 17), (3, 1024), (3, 1025)):
                n = count * lib.columns
                lhs, rhs, panels, padded = self.operands(lib, rows, depth, n)
                out = unaligned(np.full((padded, n + 5), 7.0, lib.dtype))
                lib.call("dot_rows", lhs, depth + 3, panels, panels[0].size, out, n + 5, count, rows, depth, columns)
                expected = lhs[:rows, :depth].astype(np.float64) @ rhs.astype(np.float64)
                close(out[:rows, :n], expected, depth)
                assert (out[:, n:] == 7).all()

    @pytest.mark.parametrize("n", SIZES)
    def test_dot_accumulate(self, machine: str, element: str, n: int):
        lib = library("float" if element == "float" else "double", element, machine)
        rng = np.random.default_rng(n)
        for rows, depth in itertools.product([*range(1, lib.rows + 1)], [0, 1, 2, 7, 64]):
            lhs, rhs, panels, padded = self.operands(lib, rows, depth, n)
            width = panels.shape[0] * lib.columns
            for scaled in (False, True):
                acc = unaligned(rng.uniform(-1, 1, (padded, width + 1)).astype(lib.dtype))
                scale = rng.uniform(0, 1, padded).astype(lib.dtype)
                before = acc.astype(np.float64)
                lib.call(
                    "dot_accumulate",
                    *(lhs, depth + 3, panels, depth * lib.columns, acc, width + 1),
                    *(scale if scaled else None, depth, rows, panels.shape[0]),
                )
                factor = scale[:rows, None].astype(np.float64) if scaled else 1.0
                expected = factor * before[:rows, :n] + lhs[:rows, :depth].astype(np.float64) @ rhs.astype(np.float64)
                close(acc[:rows, :n], expected, depth)
                assert (acc[:, width:] == before[:, width:]).all()

    def test_a_dead_key_has_no_influence(self, machine: str, element: str):
        lib = library("float" if element == "float" else "double", element, machine)
        rng = np.random.default_rng(0)
        for rows, depth, n in itertools.product([1, 5, lib.rows, 3 * lib.rows], [1, 9], [1, 17, 64]):
            lhs, rhs, _, padded = self.operands(lib, rows, depth, n)
            live = rng.integers(0, 2, (rows, depth + 2)).astype(np.int8) * 3
            rhs[0] = np.nan
            rhs[-1] = np.inf
            live[:, 0] = 0
            live[: rows - 1, depth - 1] = 0
            panels = panels_of(rhs, lib.columns)
            width = panels.shape[0] * lib.columns
            for scaled in (False, True):
                acc = rng.uniform(-1, 1, (padded, width)).astype(lib.dtype)
                scale = rng.uniform(0, 1, padded).astype(lib.dtype)
                factor = scale[:rows, None].astype(np.float64) if scaled else 1.0
                expected = factor * acc[:rows, :n].astype(np.float64)
                for r, k in zip(*np.nonzero(live[:, :depth]), strict=True):
                    expected[r] += lhs[r, k].astype(np.float64) * rhs[k]
                lib.call(
                    "dot_accumulate_careful",
                    *(lhs, depth + 3, panels, depth * lib.columns, acc, width),
                    *(scale if scaled else None, depth, rows, panels.shape[0], live, depth + 2),
                )
                close(acc[:rows, :n], expected, depth)

    def test_finite(self, machine: str, element: str):
        lib = library("float" if element == "float" else "double", element, machine)
        for rows, n in itertools.product([1, 3], SIZES):
            acc = unaligned(np.full((rows + 1, n + 2), np.nan, lib.dtype))
            acc[:rows, :n] = np.finfo(lib.dtype).max
            assert lib.call("finite", acc, n + 2, rows, n) == 1
            for bad in (np.nan, np.inf, -np.inf):
                for r, c in {(0, 0), (rows - 1, n - 1), (rows - 1, n // 2)}:
                    acc[r, c] = bad
                    assert lib.call("finite", acc, n + 2, rows, n) == 0
                    acc[r, c] = -np.finfo(lib.dtype).tiny
            assert lib.call("finite", acc, n + 2, rows, n) == 1
        assert lib.call("finite", acc, 1, 0, 64) == 1


def source_array(
    rng: np.random.Generator, shape: tuple[int, int], source: str, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Random elements as stored, and their values; infinities, NaN and subnormals among them."""
    if source == "half":
        stored = rng.integers(0, 1 << 16, shape, dtype=np.uint16).view(np.float16)
        return stored, stored.astype(dtype)
    if source == "bfloat":
        stored = rng.integers(0, 1 << 16, shape, dtype=np.uint16)
        stored[(stored & 0x7FFF) > 0x7F80] = 0x7FC0  # quiet NaNs, or NumPy warns
        return stored, (stored.astype(np.uint32) << 16).view(np.float32).astype(dtype)
    stored = rng.standard_normal(shape).astype(dtype)
    return stored, stored


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("source", "element"), TYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("transposed", [True, False])
def test_pack(machine: str, source: str, element: str, size: int, transposed: bool):
    lib = library(source, element, machine)
    rng = np.random.default_rng(size)
    for valid, more in itertools.product([0, 1, 15, 16, 33, 70], [0, 1, 40]):
        for layout in ("rows", "columns", "strided"):
            row_stride, column_stride = {"rows": (size + 1, 1), "columns": (1, valid + 2), "strided": (2 * size + 3, 2)}[layout]
            extent = max(1, (valid - 1) * row_stride + (size - 1) * column_stride + 1) if valid else 1
            stored, values = source_array(rng, (1, extent), source, lib.dtype)
            places = np.arange(valid)[:, None] * row_stride + np.arange(size)[None, :] * column_stride
            matrix = values[0][places] if valid else np.zeros((0, size), lib.dtype)
            rows = valid + more
            padded = np.zeros((rows, size), lib.dtype)
            padded[:valid] = matrix
            if transposed:
                expected = panels_of(padded.T, lib.columns)
            else:
                expected = panels_of(padded, lib.columns)
            destination = unaligned(np.full((expected.shape[0], expected[0].size + 2 if expected.size else 2), 7, lib.dtype))
            lib.call(
                "pack_rhs_transposed" if transposed else "pack_rhs",
                *(guarded(stored), row_stride, column_stride, destination, destination.shape[1], valid, rows, size),
            )
            np.testing.assert_array_equal(destination[:, :-2].reshape(expected.shape), expected)
            assert (destination[:, -2:] == 7).all()


@pytest.mark.parametrize("source", ["float", "bfloat", "half"])
def test_other_architectures_compile(source: str):
    target = Target("aarch64-unknown-linux-gnu", "generic", "+neon", 128, 32)
    symbols, text = leaves.define(source, "float", target)
    assert symbols.dot_rows == "attnc.dot_rows.f32.12x8"
    assert compile_object(f'target triple = "{target.triple}"\n{text}', target)[:4] == b"\x7fELF"
