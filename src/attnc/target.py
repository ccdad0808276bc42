"""What the compiler knows of the machine it compiles for."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from attnc import knobs
from attnc.runtime import tuning_file
from attnc.runtime.tuning_file import TunedTile
from attnc.runtime.whole_imports import LLVM, import_whole

ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18
"""Numbers of Linux on x86-64: the system call, the request, and the state that is asked for."""


@dataclass(frozen=True)
class Target:
    """A machine: part of every cache key, and all that tile sizes may depend on (never the number of threads).

    `vector_bits` is the width of one vector register (128, 256 or 512) and `registers` how many there are; cache sizes are
    bytes a core. `features` is LLVM's comma-separated list. `tuned` are tile sizes that tuning found on this machine.
    """

    triple: str
    cpu: str
    features: str
    vector_bits: int
    registers: int
    l1_bytes: int = 32 * 1024
    l2_bytes: int = 512 * 1024
    tuned: tuple[TunedTile, ...] = ()

    def lanes(self, bits: int) -> int:
        """How many elements of `bits` bits one vector register holds."""
        return self.vector_bits // bits

    @property
    def machine(self) -> str:
        """All of the record but what was tuned, as one word."""
        fields = (self.triple, self.cpu, self.features, self.vector_bits, self.registers, self.l1_bytes, self.l2_bytes)
        return f"{self.cpu}-{self.vector_bits}-{hashlib.sha256(repr(fields).encode()).hexdigest()[:16]}"

    @staticmethod
    def host() -> Target:
        """The machine we run on, with the tile sizes stored for it; `ATTNC_VECTOR_BITS` may narrow or widen its vectors (LLVM
        legalises what the CPU lacks)."""
        target = _host(knobs.vector_bits(), knobs.amx())
        tuned = tuning_file.read(target.machine)
        return replace(target, tuned=tuned) if tuned else target


@functools.cache
def _host(vector_bits: int | None, amx: bool) -> Target:
    import_whole(LLVM)
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    bits, registers = 128, 16
    if features.get("avx512f") and features.get("avx512vl") and features.get("avx512bw") and features.get("avx512dq"):
        bits, registers = 512, 32
    elif features.get("avx2") and features.get("fma"):
        bits = 256
    elif features.get("neon"):
        registers = 32
    target = Target(
        triple=llvm.get_default_triple(),
        cpu=llvm.get_host_cpu_name(),
        features=features.flatten(),
        vector_bits=bits,
        registers=registers,
        l1_bytes=_cache_bytes(1, 32 * 1024),
        l2_bytes=_cache_bytes(2, 512 * 1024),
    )
    if vector_bits is not None:
        target = replace(target, vector_bits=vector_bits, registers=32 if vector_bits == 512 else 16)
    return with_permitted_tiles(target, amx)


def with_permitted_tiles(target: Target, wanted: bool) -> Target:
    """`target` without the features of AMX, unless they are `wanted` and the kernel permits them to this process."""
    names = target.features.split(",")
    if "+amx-tile" not in names or (wanted and _tiles_permitted()):
        return target
    return replace(target, features=",".join("-" + name[1:] if name.startswith("+amx") else name for name in names))


def _tiles_permitted() -> bool:
    """Ask Linux for AMX tiles, which every process has to do before it uses them: their state is large."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(*(ctypes.c_long(word) for word in (ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA))) == 0


def _cache_bytes(level: int, default: int) -> int:
    """The size of a core's data cache by the Linux kernel's word, or `default`."""
    for entry in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            if int((entry / "level").read_text()) == level and (entry / "type").read_text().strip() != "Instruction":
                text = (entry / "size").read_text().strip()
                return int(text.rstrip("KM")) * {"K": 1024, "M": 1024 * 1024}.get(text[-1], 1)
        except (OSError, ValueError):
            continue
    return default
