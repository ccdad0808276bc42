"""Native object bytes into this process: linked by LLVM's LLJIT, reached by address."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import itertools
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from attnc.errors import CompileError

_MATH = """
    acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh erf erfc exp exp10 exp2 expm1 fabs floor fma fmax fmin
    fmod frexp hypot ldexp lgamma log log10 log1p log2 logb modf nearbyint pow remainder rint round roundeven sin sincos sinh
    sqrt tan tanh tgamma trunc
"""
LIBRARY_FUNCTIONS = ("memcpy", "memmove", "memset", "memcmp") + tuple(
    name + suffix for suffix in ("", "f") for name in _MATH.split()
)
"""What compiled code may call of the C library: LLVM turns intrinsics into these. They are imported by address, since a search
of the process finds them only where some library happens to be loaded globally."""

lock = threading.RLock()
"""Held while an object is linked, and around a fork: no child inherits a half-linked one."""

_names = itertools.count()


class LoadedObjects:
    """Objects linked together; `addresses` of the exported symbols stay valid as long as this lives."""

    def __init__(self, objects: Sequence[bytes], exports: Iterable[str]):
        """Raises `CompileError` where an object is damaged or a symbol is missing."""
        import llvmlite.binding as llvm

        exports = list(exports)
        builder = llvm.JITLibraryBuilder()
        for data in objects:
            if data[:4] not in _MAGICS:
                raise CompileError("a compiled object is damaged: it is no object file of this machine")
            builder.add_object_img(data)
        for name, address in _library_addresses().items():
            builder.import_symbol(name, address)
        for name in exports:
            builder.export_symbol(name)
        with lock:
            try:
                self._compiler = _compiler()  # must not go before what it linked
                self._tracker = builder.link(self._compiler, f"attnc.{next(_names)}")
            except RuntimeError as error:
                raise CompileError(f"LLVM cannot link a compiled object: {error}") from error
        self.addresses = {name: self._tracker[name] for name in exports}
        if missing := [name for name, address in self.addresses.items() if not address]:
            raise CompileError(f"a compiled object lacks {', '.join(missing)}")


_MAGICS = (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\x64\x86\x00\x00", b"\x64\xaa\x00\x00")  # ELF, Mach-O, COFF


@functools.cache
def _compiler():
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.create_lljit_compiler()


# A fork waits until no other thread is inside LLVM: the child would wait for that thread's locks for ever.
_held_for_fork: list[Any] = []


def _before_fork() -> None:
    ffi = sys.modules.get("llvmlite.binding.ffi")
    llvms_own = getattr(getattr(getattr(ffi, "lib", None), "_lock", None), "_lock", None)
    for held in (lock, llvms_own):
        if held is not None:
            held.acquire()
            _held_for_fork.append(held)


def _after_fork() -> None:
    while _held_for_fork:
        _held_for_fork.pop().release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


@functools.cache
def _library_addresses() -> dict[str, int]:
    libraries = [ctypes.CDLL(None)]
    for name in ("libm.so.6", ctypes.util.find_library("m") if not _is_loaded("libm.so.6") else None):
        try:
            if name:
                libraries.append(ctypes.CDLL(name))
        except OSError:
            continue
    addresses = {}
    for name in LIBRARY_FUNCTIONS:
        for library in libraries:
            try:
                addresses[name] = ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
                break
            except AttributeError:
                continue
    return addresses


def _is_loaded(name: str) -> bool:
    # find_library may start a compiler or ldconfig: only where the usual name does not serve.
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
