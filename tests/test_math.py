"""The elementary functions: accuracy over all of f32, special values, integer division, conversions, and code without calls.

Bounds are read from the functions' docstrings ("within 1.2 ulp"), so that these cannot promise more than is tested.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable

import numpy as np
import pytest

from attnc.codegen.llvm import math as vector_math
from attnc.codegen.llvm import math_convert, math_double, math_exponential, math_trigonometric
from attnc.codegen.llvm.math import MODERN, Machine
from math_lanes import IS_X86, OLD, TYPES, WIDTHS, Array, assembly, compiled
from needs import PREFIX

# -- accuracy ---------------------------------------------------------------------------------------------------------
SPECIAL = np.array(
    [0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 2, 0.5, -0.5, 3, -3, 1e-45, -1e-45, 1.1754944e-38, 3.4028235e38, -3.4028235e38]
    + [88.72283, 88.72284, 89, -87.33655, -103.97208, -104, 127.99999, 128, -126, -126.5, -127, -149, -149.5, -150, 0.25]
    + [9.010913, 9.02, 3.92, 3.95, 4, 10, 0.35, 1.0000001, 0.9999999, 8388607.5, 8388609, 16777216, 16777218, -16777216, 0.1]
    + [2.0**31, -(2.0**31), 2.0**63, 1e10],
    np.float32,
)
NANS = np.array([0x7F800001, 0xFFFFFFFF, 0xFFC00000, 0x7FC00001], np.uint32).view(np.float32)


@functools.cache
def samples() -> Array:
    """Float bit patterns, evenly over all of them, and more where functions have their shape."""
    random = np.random.default_rng(0)
    count = 2**23
    step = 2**32 // count
    bits = (np.arange(count, dtype=np.uint64) * step + random.integers(0, step, count, dtype=np.uint64)).astype(np.uint32)
    parts = [np.resize(np.concatenate([SPECIAL, NANS]), 64), bits.view(np.float32)]
    parts += [random.uniform(-limit, limit, 2**18).astype(np.float32) for limit in (1, 2, 10, 100, 150, 1e5)]
    return np.concatenate(parts)


def ulps(got: Array, exact: Array) -> Array:
    """Errors in units of the last place of the exact result; inf where NaN, a sign of zero or an infinity is wrong."""
    single = got.dtype == np.float32
    digits, smallest, top = (23, -126, 128) if single else (52, -1022, 1024)
    nearest = exact.astype(got.dtype)
    wide = np.float64 if single else np.longdouble
    # Past the largest float, infinity counts as the next power of two.
    end = np.ldexp(wide(1), top)
    a = np.where(np.isinf(got), np.copysign(end, got), got)
    b = np.where(np.isinf(exact), np.copysign(end, exact), np.clip(exact, -end, end))
    _, exponent = np.frexp(b)
    error = np.abs(a - b) / np.ldexp(wide(1), np.maximum(exponent - 1, smallest) - digits)
    nan = np.isnan(exact)
    error[nan] = 0
    error[np.isnan(got) != nan] = np.inf
    error[(np.signbit(got) != np.signbit(nearest)) & ~nan & (nearest == 0) & (got == 0)] = np.inf
    return error


def bound(function: Callable) -> float:
    found = re.search(r"(\d\.\d+) ulp", function.__doc__ or "")
    assert found, f"{function.__name__} does not state its bound"
    return float(found[1])


def erf(x: Array) -> Array:
    return np.fromiter(map(math.erf, x.tolist()), np.float64, x.size)


def sigmoid(x: Array) -> Array:
    small = np.exp(-np.abs(x))
    return np.where(x < 0, small, 1) / (1 + small)


EXACT: dict[str, Callable[..., Array]] = {
    "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "atan2": np.arctan2, "pow": np.power, "erf": erf,
    "sigmoid": sigmoid, "rsqrt": lambda x: 1 / np.sqrt(x), "softmax_exp2": np.exp2,
    "exp2": np.exp2, "exp": np.exp, "expm1": np.expm1, "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh,
    "log": np.log, "log2": np.log2, "log10": np.log10, "log1p": np.log1p, "sin": np.sin, "cos": np.cos, "tan": np.tan,
    "sqrt": np.sqrt,
}  # fmt: skip
SINGLE = {
    f.__name__: f for f in (*math_exponential.FUNCTIONS, *math_trigonometric.UNARY, math_convert.sqrt, math_convert.rsqrt)
}


def check(function: Callable, name: str, inputs: tuple[Array, ...], got: Array, exact: Array) -> None:
    error = ulps(got, exact)
    worst = int(np.argmax(error))
    assert error[worst] <= bound(function), f"{name}{tuple(x[worst] for x in inputs)} = {got[worst]!r}, not {exact[worst]!r}"


@pytest.mark.parametrize("machine", [MODERN, OLD], ids=["modern", "old"])
@pytest.mark.parametrize("name", sorted(SINGLE))
def test_accuracy_over_all_floats(name: str, machine: Machine) -> None:
    x = samples()
    if name == "erf" or machine == OLD:
        x = x[: x.size // 16 // 16 * 16] if name != "erf" else np.resize(np.concatenate([SPECIAL, x[::17]]), 2**18)
        x = np.concatenate([x, samples()[-(2**19) :: 4]])
    if name == "softmax_exp2":
        x = x[~(x > 0)]
        x = x[: x.size // 16 * 16]
    with np.errstate(all="ignore"):
        exact = EXACT[name](x.astype(np.float64))
        got = compiled(name, "float", 16, machine)(x)
        if name == "softmax_exp2":
            assert not got[x <= -126.5].view(np.uint32).any(), "exactly +0 from -126.5 on"
            assert (got[x < -126] <= 2.0**-126).all()
            x, got, exact = (v[~(x < -126)] for v in (x, got, exact))
        check(SINGLE[name], name, (x,), got, exact)


@pytest.mark.parametrize("machine", [MODERN, OLD], ids=["modern", "old"])
@pytest.mark.parametrize("name", ["atan2", "pow"])
def test_accuracy_of_two_arguments(name: str, machine: Machine) -> None:
    random = np.random.default_rng(1)
    count = 2**18
    special = np.concatenate([SPECIAL, [5, -7, 1 / 3]]).astype(np.float32)
    any_two = random.integers(0, 2**32, (2, count), dtype=np.uint64).astype(np.uint32).view(np.float32)
    near_one = [1 + random.normal(size=count) * 1e-5, random.normal(size=count) * 3e6]
    whole = [random.integers(-100, 100, count), random.integers(-12, 13, count)]
    positive = [np.exp(random.uniform(-20, 20, count)), random.uniform(-30, 30, count)]
    pairs = [*map(np.ravel, np.meshgrid(special, special))], any_two, near_one, whole, positive, random.normal(size=(2, count))
    with np.errstate(all="ignore"):
        x, y = (np.concatenate([pair[k] for pair in pairs]).astype(np.float32) for k in (0, 1))
        x, y = (np.resize(v, x.size // 16 * 16 + 16) for v in (x, y))
        got, exact = compiled(name, "float", 16, machine)(x, y), EXACT[name](x.astype(np.float64), y.astype(np.float64))
        check(getattr(math_trigonometric, name), name, (x, y), got, exact)
        if name == "pow":
            assert np.array_equal(compiled(name, "float", 16, machine)(x, np.full_like(x, 2)), x * x, equal_nan=True)


DOUBLE = {
    f.__name__: f for f in (math_double.exp, math_double.exp2, math_double.softmax_exp2, math_double.log, math_double.sigmoid)
}


@pytest.mark.parametrize("machine", [MODERN, OLD], ids=["modern", "old"])
@pytest.mark.parametrize("name", sorted(DOUBLE))
def test_accuracy_of_double(name: str, machine: Machine) -> None:
    random = np.random.default_rng(2)
    bits = random.integers(0, 2**64, 2**17, dtype=np.uint64).view(np.float64)
    special = [
        0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        1,
        5e-324,
        709.78,
        709.79,
        -745.13,
        -745.14,
        1023.99,
        1024,
        -1074,
        -1075.1,
        -1076,
    ]
    parts = [np.array(special), bits, *(random.uniform(-limit, limit, 2**16) for limit in (1, 10, 750, 1100))]
    x = np.concatenate([*parts, 1 + random.uniform(-0.4, 0.5, 2**16)])
    if name == "softmax_exp2":
        x = x[~(x > 0)]
    x = np.resize(x, x.size // 16 * 16)
    with np.errstate(all="ignore"):
        got, exact = compiled(name, "double", 8, machine)(x), EXACT[name](x.astype(np.longdouble))
        if name == "softmax_exp2":
            assert not got[x <= -1022.5].view(np.uint64).any(), "exactly +0 from -1022.5 on"
            x, got, exact = (v[~(x < -1022)] for v in (x, got, exact))
        check(DOUBLE[name], name, (x,), got, exact)


@pytest.mark.parametrize("name", sorted(math_double.LIBM))
def test_double_by_libm(name: str) -> None:
    x, y = np.random.default_rng(3).uniform(0.01, 0.99, (2, 64))
    operands = (x, y)[: len(vector_math.signature(name, "double")[0])]
    exact = EXACT["pow" if name == "powf" else name](*operands)
    np.testing.assert_allclose(compiled(name, "double", 4)(*operands), exact, rtol=1e-15)
    assert vector_math.libm_symbols(name, "double") == ("pow" if name == "powf" else name,)
    assert vector_math.libm_symbols(name, "float") == ()


@pytest.mark.parametrize("name", [*vector_math.UNARY, *vector_math.BINARY])
@pytest.mark.parametrize("element", ["float", "double"])
def test_every_width_gives_the_same(name: str, element: str) -> None:
    random = np.random.default_rng(4)
    x, y = (random.uniform(-3, 3, 4096 - SPECIAL.size) for _ in range(2))
    x, y = np.concatenate([SPECIAL, x]).astype(TYPES[element]), np.concatenate([SPECIAL[::-1], y]).astype(TYPES[element])
    if name == "softmax_exp2":
        x = np.minimum(x, TYPES[element](0))
    operands = (x, y)[: len(vector_math.signature(name, element)[0])]
    wide = compiled(name, element, 16)(*operands)
    for width in (1, 4, 8):
        assert np.array_equal(compiled(name, element, width)(*operands), wide, equal_nan=True), width


# -- exact operations -------------------------------------------------------------------------------------------------
def half_away(x: Array) -> Array:
    whole = np.trunc(x)
    return np.copysign(whole + np.where(np.abs(x - whole) >= 0.5, np.copysign(1, x), 0).astype(x.dtype), x)


@pytest.mark.parametrize("machine", [MODERN, OLD], ids=["modern", "old"])
@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("floor", np.floor),
        ("ceil", np.ceil),
        ("trunc", np.trunc),
        ("roundeven", np.rint),
        ("round", half_away),
        ("absf", np.abs),
    ],
)
def test_rounding(name: str, exact: Callable, machine: Machine) -> None:
    halves = np.arange(-64, 64, dtype=np.float32) / 4
    near = [np.nextafter(halves, np.float32(np.inf)), np.nextafter(halves, np.float32(-np.inf))]
    x = np.concatenate([halves, *near, samples()[: 2**16]])
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(compiled(name, "float", 8, machine)(x), exact(x))
        assert np.array_equal(np.signbit(compiled(name, "float", 8, machine)(x)), np.signbit(exact(x)))
        x = np.concatenate([x.astype(np.float64), np.random.default_rng(5).uniform(-1e16, 1e16, 1024)])
        np.testing.assert_array_equal(compiled(name, "double", 8, machine)(x), exact(x))


def test_selections() -> None:
    x, y = (v.ravel() for v in np.meshgrid(SPECIAL, SPECIAL[:48]))
    number = ~np.isnan(x)
    for name, exact in (("maximum", np.maximum), ("minimum", np.minimum), ("fmax", np.fmax), ("fmin", np.fmin)):
        np.testing.assert_array_equal(compiled(name, "float", 16)(x, y), exact(x, y), err_msg=name)
    for name, exact in (("maximum_keeping_second", np.maximum), ("minimum_keeping_second", np.minimum)):
        np.testing.assert_array_equal(compiled(name, "float", 16)(x, y)[number], exact(x, y)[number], err_msg=name)
    np.testing.assert_array_equal(compiled("copysign", "float", 16)(x, y), np.copysign(x, y))


@pytest.mark.parametrize("element", ["float", "double"])
@pytest.mark.parametrize("result", ["i8", "i16", "i32", "i64"])
def test_fptosi(element: str, result: str) -> None:
    x = np.concatenate([SPECIAL, np.random.default_rng(6).uniform(-3e9, 3e9, 4096 - SPECIAL.size)]).astype(TYPES[element])
    wide = np.int64 if result == "i64" else np.int32
    info = np.iinfo(wide)
    fits = np.abs(x) < 2.0 ** (info.bits - 1)
    exact = np.where(fits, np.where(fits, x, 0).astype(wide), info.min).astype(TYPES[result])
    for width in WIDTHS:
        np.testing.assert_array_equal(compiled(f"fptosi.{result}", element, width)(x), exact)


def test_bfloat16() -> None:
    narrow = np.arange(2**16, dtype=np.uint32)
    wide = (narrow << 16).view(np.float32)
    for width in WIDTHS:
        got = compiled("bf16_to_f32", "i16", width)(narrow.astype(np.uint16).view(np.int16))
        assert np.array_equal(got.view(np.uint32), wide.view(np.uint32))
        back = compiled("f32_to_bf16", "float", width)(wide).view(np.uint16)
        quiet = np.where(np.isnan(wide), narrow | 0x40, narrow)
        assert np.array_equal(back, quiet)
    x = samples()[: 2**20]
    finite = np.isfinite(x)
    # Of the two neighbours the nearer, of equally near ones the even; past the largest lies 2^128.
    low = (x.view(np.uint32) >> 16).astype(np.uint16)
    below, above = ((n.astype(np.uint32) << 16).view(np.float32)[finite].astype(np.float64) for n in (low, low + 1))
    above = np.where(np.isinf(above), np.copysign(2.0**128, below), above)
    rest, step = np.abs(x[finite] - below), np.abs(above - below)
    up = (2 * rest > step) | ((2 * rest == step) & (low[finite] & 1 == 1))
    got = compiled("f32_to_bf16", "float", 16)(x).view(np.uint16)
    assert np.array_equal(got[finite], low[finite] + up)
    assert np.isnan((got[np.isnan(x)].astype(np.uint32) << 16).view(np.float32)).all()


@pytest.mark.parametrize("machine", [MODERN, OLD], ids=["modern", "old"])
def test_half(machine: Machine) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    for width in WIDTHS:
        got = compiled("f16_to_f32", "i16", width, machine)(bits.view(np.int16))
        np.testing.assert_array_equal(got, bits.view(np.float16).astype(np.float32))
        np.testing.assert_array_equal(np.signbit(got), np.signbit(bits.view(np.float16)))
        x = samples()[: 2**18]
        with np.errstate(over="ignore"):
            exact = x.astype(np.float16)
        got = compiled("f32_to_f16", "float", width, machine)(x).view(np.float16)
        np.testing.assert_array_equal(got, exact)
        np.testing.assert_array_equal(np.signbit(got)[~np.isnan(x)], np.signbit(exact)[~np.isnan(x)])
    # What lies between two halves, and just beside the middle: ties to even.
    middle = bits[:0x7BFF].view(np.float16).astype(np.float64) + np.diff(bits[:0x7C00].view(np.float16).astype(np.float64)) / 2
    for x in (
        np.nextafter(middle.astype(np.float32), np.float32(s)) if s else middle.astype(np.float32) for s in (0, np.inf, -np.inf)
    ):
        np.testing.assert_array_equal(compiled("f32_to_f16", "float", 1, machine)(x).view(np.float16), x.astype(np.float16))


# -- integer division -------------------------------------------------------------------------------------------------
def division(a: Array, b: Array, name: str) -> Array:
    """In Python's integers; by zero, 0."""
    bits = a.dtype.itemsize * 8
    results = []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        if y == 0:
            results.append(0)
        elif name.startswith("floor"):
            results.append(x // y if name == "floordiv" else x % y)
        else:
            quotient = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
            results.append(quotient if name == "truncdiv" else x - quotient * y)
    return np.array([r % 2**bits for r in results], np.uint64).astype(f"u{a.dtype.itemsize}").view(a.dtype)


@pytest.mark.parametrize("machine", [MODERN, OLD], ids=["modern", "old"])
@pytest.mark.parametrize("element", ["i8", "u8", "i16", "i32", "i64"])
@pytest.mark.parametrize("name", ["floordiv", "floormod", "truncdiv", "truncrem"])
def test_integer_division(name: str, element: str, machine: Machine) -> None:
    dtype = np.dtype(np.uint8 if element == "u8" else TYPES[element])
    info = np.iinfo(dtype)
    random = np.random.default_rng(7)
    if dtype.itemsize == 1:
        a, b = (v.ravel() for v in np.meshgrid(np.arange(info.min, info.max + 1), np.arange(info.min, info.max + 1)))
    else:
        edges = [
            info.min,
            info.min + 1,
            info.max,
            info.max - 1,
            0,
            1,
            -1,
            2,
            -2,
            3,
            -3,
            7,
            641,
            65536 % info.max,
            info.max // 2,
        ]
        a, b = (v.ravel() for v in np.meshgrid(edges, edges))
        near = random.integers(-1000, 1000, 4000), random.integers(-20, 20, 4000)
        far = random.integers(info.min, info.max, 4000), random.integers(info.min, info.max, 4000)
        exact = far[1] // 7 * 7, np.full(4000, 7)
        a, b = (np.concatenate([u, *v]) for u, v in zip((a, b), zip(near, far, exact, strict=True), strict=True))
    a, b = (np.resize(v, a.size // 16 * 16 + 16).astype(dtype) for v in (a, b))
    exact = division(a, b, name)
    for width in WIDTHS:
        np.testing.assert_array_equal(compiled(name, element, width, machine)(a, b), exact)


# -- code -------------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(not IS_X86, reason=f"{PREFIX}x86")
@pytest.mark.parametrize("cpu", ["haswell", "znver4", "x86-64"])
def test_vector_code_calls_nothing(cpu: str) -> None:
    machine = OLD if cpu == "x86-64" else MODERN
    names = [
        *vector_math.UNARY,
        *vector_math.BINARY,
        "fptosi.i8",
        "fptosi.i16",
        "fptosi.i32",
        "fptosi.i64",
        "f32_to_bf16",
        "f32_to_f16",
    ]
    cases = [(name, "float") for name in names] + [(name, "double") for name in ("exp", "exp2", "log", "floor", "sqrt")]
    cases += [("bf16_to_f32", "i16"), ("f16_to_f32", "i16")]
    cases += [(name, e) for name in ("floordiv", "floormod", "truncdiv", "truncrem") for e in ("i8", "u8", "i16", "i32")]
    for name, element in cases:
        for width in WIDTHS:
            text = assembly(name, element, width, cpu, machine)
            assert not re.search(r"\bcall|\bi?div[bwlq]", text), (name, element, width)


@pytest.mark.skipif(not IS_X86, reason=f"{PREFIX}x86")
@pytest.mark.parametrize(("cpu", "width", "register"), [("haswell", 8, "ymm"), ("znver4", 16, "zmm")])
def test_the_inner_loop_of_softmax_is_eleven_instructions(cpu: str, width: int, register: str) -> None:
    text = assembly("softmax_exp2", "float", width, cpu, MODERN)
    lines = [line for line in text.splitlines() if register in line and "broadcast" not in line and "mov" not in line]
    assert len(lines) == 11, text


def test_unknown_functions_are_refused() -> None:
    for name, element in (("gamma", "float"), ("tanh", "i32"), ("floordiv", "float"), ("bf16_to_f32", "float")):
        with pytest.raises(KeyError):
            vector_math.define(name, element, 4)
