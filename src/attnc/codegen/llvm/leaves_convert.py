"""Elements as they lie in memory, converted to the type that leaves compute in."""

from __future__ import annotations

from attnc.codegen.llvm.text import Function, Value, float_constant, splat_constant, vector
from attnc.target import Target

SOURCE_BYTES = {"float": 4, "double": 8, "half": 2, "bfloat": 2}


def has_half_conversion(target: Target) -> bool:
    """Whether `fpext half` is an instruction; elsewhere it would be a call to a runtime library we do not link."""
    return target.triple.startswith("aarch64") or "+f16c" in target.features or "+avx512f" in target.features


def stored_as(source: str, target: Target) -> str:
    """The LLVM type an element is loaded as: 16 bits where its conversion is done by integer arithmetic."""
    return "i16" if source == "bfloat" or (source == "half" and not has_half_conversion(target)) else source


def convert(f: Function, source: str, element: str, width: int, value: Value, target: Target) -> Value:
    """`width` elements as loaded, converted to `element`; exact."""
    stored = stored_as(source, target)
    if source == element:
        return value
    if stored == "i16":
        value = _widen_bfloat(f, value, width) if source == "bfloat" else _widen_half(f, value, width)
        if element == "float":
            return value
        stored = "float"
    return f.emit(f"fpext {vector(width, stored)} {value} to {vector(width, element)}")


def _widen_bfloat(f: Function, value: Value, width: int) -> Value:
    words = vector(width, "i32")
    wide = f.emit(f"zext {vector(width, 'i16')} {value} to {words}")
    shifted = f.emit(f"shl {words} {wide}, {splat_constant('16', width, 'i32')}")
    return f.emit(f"bitcast {words} {shifted} to {vector(width, 'float')}")


def _widen_half(f: Function, value: Value, width: int) -> Value:
    """f16 bits to f32 by integer arithmetic: rebias the exponent; subnormals are converted as integers."""
    words, floats = vector(width, "i32"), vector(width, "float")

    def constant(n: int) -> Value:
        return splat_constant(str(n), width, "i32")

    wide = f.emit(f"zext {vector(width, 'i16')} {value} to {words}")
    sign = f.emit(f"shl {words} {f.emit(f'and {words} {wide}, {constant(0x8000)}')}, {constant(16)}")
    magnitude = f.emit(f"and {words} {wide}, {constant(0x7FFF)}")
    shifted = f.emit(f"shl {words} {magnitude}, {constant(13)}")
    normal = f.emit(f"add {words} {shifted}, {constant(112 << 23)}")
    special = f.emit(f"add {words} {shifted}, {constant(224 << 23)}")
    counted = f.emit(f"sitofp {words} {magnitude} to {floats}")
    tiny = splat_constant(float_constant(2.0**-24, "float"), width, "float")
    subnormal = f.emit(f"bitcast {floats} {f.emit(f'fmul {floats} {counted}, {tiny}')} to {words}")
    condition = vector(width, "i1")
    is_special = f.emit(f"icmp uge {words} {magnitude}, {constant(0x7C00)}")
    is_small = f.emit(f"icmp ult {words} {magnitude}, {constant(0x0400)}")
    result = f.emit(f"select {condition} {is_special}, {words} {special}, {words} {normal}")
    result = f.emit(f"select {condition} {is_small}, {words} {subnormal}, {words} {result}")
    return f.emit(f"bitcast {words} {f.emit(f'or {words} {result}, {sign}')} to {floats}")
