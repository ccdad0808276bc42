"""Row reductions: a vector of partial results while lanes run, then one value by halves, always in the same order."""

from __future__ import annotations

from xdsl.dialects.builtin import TensorType

from attnc.codegen.llvm.operations import RegionEmitter
from attnc.codegen.llvm.text import float_constant, splat_constant, vector
from attnc.codegen.llvm.values import element_type
from attnc.dialects import tile


def _element(op: tile.ReduceOp) -> str:
    assert isinstance(op.result.type, TensorType)
    return element_type(op.result.type.element_type)


def neutral(op: tile.ReduceOp, width: int) -> str:
    """What changes nothing: -inf for the maximum, -0 for the sum; of integers the least, and 0."""
    element = _element(op)
    if element[0] == "i":
        value = "0" if op.kind.data == "add" else str(-(2 ** (int(element[1:]) - 1)))
    else:
        value = float_constant(-0.0 if op.kind.data == "add" else float("-inf"), element)
    return splat_constant(value, width, element)


def combine(region: RegionEmitter, op: tile.ReduceOp, a: str, b: str, width: int) -> str:
    """Two partial results as one."""
    element = _element(op)
    type_ = vector(width, element)
    f = region.f
    if element[0] == "i":
        if op.kind.data == "add":
            return f.emit(f"add {type_} {a}, {b}")
        less = f.emit(f"icmp slt {type_} {a}, {b}")
        return f.emit(f"select {vector(width, 'i1')} {less}, {type_} {b}, {type_} {a}")
    if op.kind.data == "add":
        return f.emit(f"fadd {type_} {a}, {b}")
    if region.machine.maximum:
        short = {"float": "f32", "double": "f64"}[element]
        symbol = f"@llvm.{'maximum' if op.kind.data == 'max' else 'maxnum'}.{short if width == 1 else f'v{width}{short}'}"
        region.declarations.add(f"declare {type_} {symbol}({type_}, {type_})")
        return f.emit(f"call {type_} {symbol}({type_} {a}, {type_} {b})")
    # One machine maximum: of a NaN and a number it is `a`, which starts as a number, ...
    greater = f.emit(f"fcmp ogt {type_} {b}, {a}")
    larger = f.emit(f"select {vector(width, 'i1')} {greater}, {type_} {b}, {type_} {a}")
    if op.kind.data == "maxnum":
        return larger
    # ... so "max" puts a NaN in `b` in by hand.
    strange = f.emit(f"fcmp uno {type_} {b}, {b}")
    return f.emit(f"select {vector(width, 'i1')} {strange}, {type_} {b}, {type_} {larger}")


def step(region: RegionEmitter, op: tile.ReduceOp, carried: str, value: str) -> str:
    """A vector of elements into the vector of partial results."""
    return combine(region, op, carried, value, region.width)


def horizontal(region: RegionEmitter, op: tile.ReduceOp, value: str) -> str:
    """The lanes of a vector as one value, by halves."""
    f, width, element = region.f, region.width, _element(op)
    while width > 1:
        half = width // 2
        type_ = vector(width, element)
        low = ", ".join(f"i32 {n}" for n in range(half))
        high = ", ".join(f"i32 {n}" for n in range(half, width))
        if half == 1:
            a, b = (f.emit(f"extractelement {type_} {value}, i64 {n}") for n in (0, 1))
        else:
            a = f.emit(f"shufflevector {type_} {value}, {type_} poison, <{half} x i32> <{low}>")
            b = f.emit(f"shufflevector {type_} {value}, {type_} poison, <{half} x i32> <{high}>")
        value = combine(region, op, a, b, half)
        width = half
    return value
