"""The associative operations by which a reduction's lanes are combined."""

from __future__ import annotations

import math

from xdsl.dialects.builtin import Float16Type, IntegerType
from xdsl.ir import Attribute

from attnc.codegen.llvm.operations import RegionEmitter
from attnc.codegen.llvm.scalar import extend_float, truncate_float
from attnc.codegen.llvm.text import float_constant, splat_constant, vector
from attnc.codegen.llvm.values import Value, element_type

FLOATS = {
    "arith.addf": 0.0,
    "arith.mulf": 1.0,
    "arith.maximumf": -math.inf,
    "arith.minimumf": math.inf,
    "arith.maxnumf": -math.inf,
    "arith.minnumf": math.inf,
}
"""Float operations and their neutral elements. (maxnum and minnum of no number at all are NaN in MLIR; an infinity here.)"""

INTEGERS = (
    "arith.addi",
    "arith.muli",
    "arith.maxsi",
    "arith.minsi",
    "arith.maxui",
    "arith.minui",
    "arith.andi",
    "arith.ori",
    "arith.xori",
)
COMBINERS = (*FLOATS, *INTEGERS)


def neutral(kind: str, type_: Attribute, width: int) -> str:
    """The neutral element, in every lane."""
    element = element_type(type_)
    if kind in FLOATS:
        if element == "i16":  # bf16 is carried as its bits
            text = {0.0: "0", 1.0: "16256", -math.inf: "-128", math.inf: "32640"}[FLOATS[kind]]
        else:
            text = float_constant(FLOATS[kind], element)
        return splat_constant(text, width, element)
    bits = type_.width.data if isinstance(type_, IntegerType) else 64
    number = {
        "arith.muli": 1,
        "arith.maxsi": -(1 << (bits - 1)),
        "arith.minsi": (1 << (bits - 1)) - 1,
        "arith.minui": -1,
        "arith.andi": -1,
    }.get(kind, 0)
    if element == "i1":
        return splat_constant("true" if number else "false", width, element)
    return splat_constant(str(number), width, element)


def horizontal(e: RegionEmitter, kind: str, type_: Attribute, text: str, start: Value) -> Value:
    """All lanes of `text` and the initial value, combined in a fixed order: halves with halves."""
    element, width = element_type(type_), e.width
    lanes = width
    while lanes > 1:
        half = lanes // 2
        low, high = (
            e.f.emit(
                f"shufflevector {vector(lanes, element)} {text}, {vector(lanes, element)} poison, "
                f"<{half} x i32> <{', '.join(f'i32 {i}' for i in range(first, first + half))}>"
            )
            for first in (0, half)
        )
        if half == 1:
            low, high = (e.f.emit(f"extractelement <1 x {element}> {value}, i64 0") for value in (low, high))
        text = combine(e, kind, type_, low, high, half)
        lanes = half
    return Value(type_, combine(e, kind, type_, e.text(start, False), text, 1))


def combine(e: RegionEmitter, kind: str, type_: Attribute, a: str, b: str, width: int) -> str:
    """`kind` of two values of `width` lanes."""
    element = element_type(type_)
    before, e.width = e.width, width
    try:
        if kind in FLOATS and (element == "i16" or isinstance(type_, Float16Type)):
            wide = [extend_float(e, type_, text, width > 1, "float") for text in (a, b)]
            found = _combined(e, kind, "float", wide[0], wide[1], width)
            return truncate_float(e, "float", found, width > 1, type_)
        return _combined(e, kind, element, a, b, width)
    finally:
        e.width = before


def _combined(e: RegionEmitter, kind: str, element: str, a: str, b: str, width: int) -> str:
    type_ = vector(width, element)
    name = kind.removeprefix("arith.")
    simple = {"addf": "fadd", "mulf": "fmul", "addi": "add", "muli": "mul", "andi": "and", "ori": "or", "xori": "xor"}
    if name in simple:
        return e.f.emit(f"{simple[name]} {type_} {a}, {b}")
    named = {"maximumf": "maximum", "minimumf": "minimum", "maxnumf": "fmax", "minnumf": "fmin"}
    if name in named:
        return e.call(named[name], element, width > 1, [a, b])
    return e.intrinsic({"maxsi": "smax", "minsi": "smin", "maxui": "umax", "minui": "umin"}[name], element, width > 1, [a, b])
