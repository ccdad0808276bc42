"""Integer division by a run-time divisor, in vectors and without a trap.

A zero divisor gives 0: the caller raises the fault. The least integer by -1 is the least integer again, rest 0: in 8 and 16
bits torch computes it in wider integers and cuts the result, in 32 and 64 bits it lets the processor trap.
"""

from __future__ import annotations

from attnc.codegen.llvm.math_body import Body, Lanes

# The narrowest float whose quotients decide the integer ones: a/b, if no integer, is 1/|b| or more away from one, and that
# must not be lost in rounding |a/b|.
EXACT_FLOAT = {8: "float", 16: "float", 32: "double"}


def _safe(body: Body, a: Lanes, b: Lanes, bits: int, signed: bool) -> tuple[Lanes, Lanes]:
    """The operands, or others that give the result where a division would trap."""
    zero = b.compare("eq", 0)
    one = zero
    if signed and bits >= 32:
        one = zero | (a.compare("eq", -(2 ** (bits - 1))) & b.compare("eq", -1))
    return body.select(zero, 0, a), body.select(one, 1, b)


def _divide_wide(body: Body, a: Lanes, b: Lanes, floor: bool, remainder: bool) -> Lanes:
    """64 bits: lane by lane."""
    emit = body.function.emit

    def one(operands: list[str]) -> str:
        x, y = operands
        quotient, rest = emit(f"sdiv i64 {x}, {y}"), emit(f"srem i64 {x}, {y}")
        if not floor:
            return rest if remainder else quotient
        other_sign = emit(f"icmp slt i64 {emit(f'xor i64 {rest}, {y}')}, 0")
        fix = emit(f"and i1 {emit(f'icmp ne i64 {rest}, 0')}, {other_sign}")
        if remainder:
            return emit(f"add i64 {rest}, {emit(f'select i1 {fix}, i64 {y}, i64 0')}")
        return emit(f"sub i64 {quotient}, {emit(f'zext i1 {fix} to i64')}")

    return body.each_lane([a, b], "i64", one)


def divide(body: Body, a: Lanes, b: Lanes, name: str, signed: bool) -> Lanes:
    """`name`: floordiv, floormod (the sign of the divisor), truncdiv, truncrem (the sign of the dividend)."""
    element = a.element
    bits = int(element[1:])
    floor, remainder = name.startswith("floor"), name in ("floormod", "truncrem")
    a, b = _safe(body, a, b, bits, signed)
    if bits == 64:
        return _divide_wide(body, a, b, floor, remainder)
    if bits < 32:
        wider = "sext" if signed else "zext"
        wide_a, wide_b = a.convert(wider, "i32"), b.convert(wider, "i32")
    else:
        wide_a, wide_b = a, b
    number = EXACT_FLOAT[bits]
    quotient = wide_a.convert("sitofp", number) / wide_b.convert("sitofp", number)
    integer = (body.round(quotient, "floor") if floor else quotient).convert("fptosi", "i32")
    result = wide_a - integer * wide_b if remainder else integer
    return result if bits == 32 else result.convert("trunc", element)


NAMES = ("floordiv", "floormod", "truncdiv", "truncrem")
