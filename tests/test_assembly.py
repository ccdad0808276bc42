"""What the generator makes of a machine that may not be at hand: registers and instructions, read in the assembly."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import attnc
from attnc.codegen.llvm import leaves
from attnc.codegen.llvm.compile import to_assembly
from attnc.target import Target
from foreign import AARCH64

HASWELL = "+sse4.1,+sse4.2,+avx,+avx2,+fma,+f16c"
AVX512 = Target("x86_64-unknown-linux-gnu", "skylake-avx512", HASWELL + ",+avx512f,+avx512vl,+avx512bw,+avx512dq", 512, 32)
AVX2 = Target("x86_64-unknown-linux-gnu", "haswell", HASWELL, 256, 16)
SSE2 = Target("x86_64-unknown-linux-gnu", "x86-64", "", 128, 16)
NEON = AARCH64
MACHINES = {"avx512": AVX512, "avx2": AVX2, "sse2": SSE2, "neon": NEON}
WIDE_ON_AVX2 = replace(AVX2, vector_bits=512, registers=32)


def leaf_assembly(target: Target, source: str, element: str) -> str:
    return to_assembly(leaves.define(source, element, target)[1], target, optimise=False)


def kernel_assembly(target: Target, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> str:
    """ALiBi and causal."""
    monkeypatch.setattr(Target, "host", staticmethod(lambda: target))
    slopes = torch.ones(2)
    query = torch.zeros(1, 2, 64, 64, dtype=dtype)
    lowered = attnc.lower(
        *(query, query, query, lambda s, b, h, q, k: s + slopes[h] * (k - q)), mask_mod=lambda b, h, q, k: q >= k
    )
    return to_assembly(lowered.code.llvm, target)


def function_of(assembly: str, name: str) -> str:
    found = re.search(rf'^"?{re.escape(name)}"?:.*?^\.Lfunc_end', assembly, re.DOTALL | re.MULTILINE)
    assert found is not None, name
    return found.group(0)


def loops_of(text: str) -> list[str]:
    """The blocks that end in a jump to their own beginning."""
    blocks = re.split(r"^(?=\.LBB)", text, flags=re.MULTILINE)
    names = [block.split(":")[0] for block in blocks]
    return [block for name, block in zip(names, blocks) if re.search(rf"\s{re.escape(name)}$", block, re.MULTILINE)]


def inner_product(target: Target, element: str) -> str:
    """The loop over depth for a whole register tile."""
    rows = {"float": {16: 6, 32: 12}, "double": {16: 6, 32: 12}}[element][target.registers]
    assembly = leaf_assembly(target, element, element)
    name = re.search(rf'^"?(attnc\.product\.\S+\.{rows})"?:', assembly, re.MULTILINE)
    assert name is not None
    (loop,) = [loop for loop in loops_of(function_of(assembly, name.group(1))) if re.search(r"fmla|fmadd|mulp", loop)]
    return loop


def count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


class TestProducts:
    """Every accumulator in a register: no spills, one load a vector of the panel, one broadcast a row."""

    @pytest.mark.parametrize(("element", "suffix"), [("float", "ps"), ("double", "pd")])
    def test_avx512(self, element: str, suffix: str):
        loop = inner_product(AVX512, element)
        assert count(rf"vfmadd231{suffix}\s+%zmm\d+, %zmm\d+, %zmm\d+", loop) == 24
        assert count(r"vbroadcasts[sd]\s.*, %zmm", loop) == 12
        assert count(r"vmovup[sd]\s.*, %zmm", loop) == 2
        assert not count(r"vmov\S+\s+%zmm\d+, \S*\(", loop) and not count(r"%[xy]mm", loop)

    @pytest.mark.parametrize(("element", "suffix"), [("float", "ps"), ("double", "pd")])
    def test_avx2(self, element: str, suffix: str):
        loop = inner_product(AVX2, element)
        assert count(rf"vfmadd231{suffix}\s+%ymm\d+, %ymm\d+, %ymm\d+", loop) == 12
        assert count(r"vbroadcasts[sd]\s.*, %ymm", loop) == 6
        assert count(r"vmovup[sd]\s.*, %ymm", loop) == 2
        assert not count(r"vmov\S+\s+%ymm\d+, \S*\(", loop)

    @pytest.mark.parametrize(("element", "lanes"), [("float", "4s"), ("double", "2d")])
    def test_neon(self, element: str, lanes: str):
        loop = inner_product(NEON, element)
        assert count(rf"fmla\s+v\d+\.{lanes}, v\d+\.{lanes}, v\d+\.\w+", loop) == 24
        by_element = count(rf"fmla\s+v\d+\.{lanes}, v\d+\.{lanes}, v\d+\.[sd]\[", loop)
        broadcasts = count(rf"ld1r\s+{{ v\d+\.{lanes} }}", loop)
        assert 2 * broadcasts + by_element == 24
        assert count(r"ldp\s+q\d+, q\d+", loop) == 1
        assert not count(r"\bst[rp]\s|\[sp", loop)

    @pytest.mark.parametrize("element", ["float", "double"])
    def test_sse2(self, element: str):
        loop = inner_product(SSE2, element)
        assert count(r"mulp[sd]\s", loop) == count(r"addp[sd]\s", loop) == 12
        assert not count(r"%[yz]mm|\(%rsp\)", loop)

    def test_wide_vectors_on_a_narrow_machine_are_parts(self):
        assembly = leaf_assembly(WIDE_ON_AVX2, "float", "float")
        assert "%ymm" in assembly and "%zmm" not in assembly


class TestConversions:
    """f16 and bf16 become f32 in vectors, without a call."""

    @pytest.mark.parametrize(
        ("machine", "source", "pattern"),
        [
            ("avx512", "half", r"vcvtph2ps\s.*%zmm"),
            ("avx512", "bfloat", r"vpslld\s+\$16, .*%zmm"),
            ("avx2", "half", r"vcvtph2ps\s.*%ymm"),
            ("avx2", "bfloat", r"vpslld\s+\$16, .*%ymm"),
            ("neon", "half", r"fcvtl\s+v\d+\.4s, v\d+\.4h"),
            ("neon", "bfloat", r"shll2?\s+v\d+\.4s, v\d+\.[48]h, #16"),
            ("sse2", "half", r"mulps"),
            ("sse2", "bfloat", r"punpcklwd"),
        ],
    )
    def test_packing(self, machine: str, source: str, pattern: str):
        assembly = leaf_assembly(MACHINES[machine], source, "float")
        assert re.search(pattern, assembly)
        assert not [name for name in calls_of(assembly) if not name.startswith("attnc.")]


def calls_of(assembly: str) -> set[str]:
    return {name.strip('"').split("@")[0] for name in re.findall(r"^\s+(?:callq?|bl)\s+(\S+)", assembly, re.MULTILINE)}


KERNELS = {
    # machine: what must be there; what must not
    "avx512": (
        [
            r"vmaxps\s+%zmm\d+, %zmm\d+, %zmm\d+",  # the row maximum, and the clamp before exp2
            r"vfmadd213ps\s.*%zmm\d+, %zmm\d+, %zmm\d+",  # the polynomial
            r"vpslld\s+\$23, %zmm",  # its power of two
            r"vpcmp\S+\s.*%zmm\d+, %k\d",  # the mask is a mask register
            r"vaddps\s.*%zmm\d+ {%k\d}",  # and selects without a blend
            r"vcvtdq2ps\s.*%zmm",
        ],
        r"vgather",
    ),
    "avx2": (
        [r"vmaxps\s+%ymm\d+, %ymm\d+, %ymm\d+", r"vfmadd213ps\s.*%ymm", r"vpslld\s+\$23, %ymm", r"vblendvps\s.*%ymm"],
        r"%zmm|vgather",
    ),
    "neon": (
        [
            r"fmax(nm)?\s+v\d+\.4s, v\d+\.4s, v\d+\.4s",
            r"fmla\s+v\d+\.4s",
            r"shl\s+v\d+\.4s, v\d+\.4s, #23",
            r"(bif|bit|bsl)\s+v\d+\.16b",
            r"scvtf\s+v\d+\.4s",
        ],
        r"fcmgt\s+v\d+\.4s",  # no maximum by comparing
    ),
    "sse2": ([r"maxps\s+%xmm", r"mulps\s.*%xmm", r"pslld\s+\$23, %xmm"], r"%[yz]mm|\sv\w+ps"),
}


@pytest.mark.parametrize("machine", KERNELS)
def test_kernels(machine: str, monkeypatch: pytest.MonkeyPatch):
    wanted, unwanted = KERNELS[machine]
    assembly = kernel_assembly(MACHINES[machine], torch.float32, monkeypatch)
    for pattern in wanted:
        assert re.search(pattern, assembly), pattern
    found = re.search(unwanted, assembly)
    assert found is None, found
    assert all(name.startswith(("attnc.", "classify")) for name in calls_of(assembly))


@pytest.mark.parametrize("machine", MACHINES)
def test_loops_over_lanes_do_not_spill(machine: str, monkeypatch: pytest.MonkeyPatch):
    """No loop of a softmax stores a vector on the stack."""
    assembly = kernel_assembly(MACHINES[machine], torch.float32, monkeypatch)
    vector = r"\bv?mov[au]p[sd]\s+%[xyz]mm\d+, \S*\(%rsp\)|\bst[rp]\s+q\d+, .*\[sp"
    loops = [loop for loop in loops_of(function_of(assembly, "attention.work")) if re.search(r"fmla|fmadd|mulps", loop)]
    assert loops
    for loop in loops:
        assert not re.search(vector, loop), loop


ROUNDINGS = {
    "avx512": {torch.float64: r"vmaxpd\s.*%zmm", torch.float16: r"vcvtps2ph\s.*%zmm"},
    "avx2": {torch.float64: r"vmaxpd\s.*%ymm", torch.float16: r"vcvtps2ph\s.*%ymm"},
    "neon": {torch.float64: r"fmax\S*\s+v\d+\.2d", torch.float16: r"fcvtn\s+v"},
}


@pytest.mark.parametrize("machine", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_types_call_nothing(machine: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """exp2 of doubles is inline as well; a result is rounded to f16 and bf16 in vectors."""
    assembly = kernel_assembly(MACHINES[machine], dtype, monkeypatch)
    assert all(name.startswith(("attnc.", "classify")) for name in calls_of(assembly))
    wanted = ROUNDINGS[machine].get(dtype)
    assert wanted is None or re.search(wanted, assembly)
