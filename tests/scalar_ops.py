"""What `arith` and `math` operations mean, as NumPy functions: the scalar half of the tile interpreter.

Integers of n bits are NumPy's of n bits, `index` is int64, `i1` is bool. NumPy has no bf16: its values are float32, rounded
after each operation. With `exact`, every float is a float64 and nothing is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from xdsl.dialects import builtin
from xdsl.dialects.arith import CmpfOp, CmpiOp, ConstantOp
from xdsl.ir import Attribute, Operation

_INTEGERS = {1: np.bool_, 8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
_erf = np.vectorize(math.erf, otypes=[np.float64])


def numpy_type(type_: Attribute, exact: bool = False) -> type[np.generic]:
    """The NumPy type that holds values of an element type."""
    match type_:
        case builtin.IndexType():
            return np.int64
        case builtin.IntegerType():
            return _INTEGERS[type_.width.data]
        case builtin.Float64Type():
            return np.float64
        case builtin.Float32Type() | builtin.BFloat16Type():
            return np.float64 if exact else np.float32
        case builtin.Float16Type():
            return np.float64 if exact else np.float16
    raise TypeError(f"no NumPy type for {type_}")


def as_type(value: Any, type_: Attribute, exact: bool = False) -> np.ndarray:
    """`value` as elements of `type_`, rounded if it is a float (to nearest, ties to even)."""
    result = np.asarray(value).astype(numpy_type(type_, exact))
    if isinstance(type_, builtin.BFloat16Type) and not exact:
        bits = result.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        result = np.where(np.isnan(result), result, rounded.view(np.float32))
    return result


def _unsigned(value: np.ndarray) -> np.ndarray:
    return value if value.dtype == np.bool_ else value.view(f"u{value.dtype.itemsize}")


def _on_unsigned(function: Callable) -> Callable:
    return lambda a, b: function(_unsigned(a), _unsigned(b)).astype(a.dtype)


def _truncating_division(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    floor = a // b
    return floor + ((floor * b != a) & (floor < 0))


def _round_half_away(a: np.ndarray) -> np.ndarray:
    return np.copysign(np.floor(np.abs(a) + 0.5), a)


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of f64 with one rounding (but for double rounding in the last place): the product's error is kept."""

    def split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        high = x * 134217729.0
        high = high - (high - x)
        return high, x - high

    product = a * b
    (a1, a2), (b1, b2) = split(a), split(b)
    lost = a2 * b2 - (((product - a1 * b1) - a2 * b1) - a1 * b2)
    total = product + c
    back = total - product
    lost = lost + ((product - (total - back)) + (c - back))
    return np.where(np.isfinite(lost), total + lost, total)


BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "arith.addi": lambda a, b: a + b if a.dtype != np.bool_ else a ^ b,
    "arith.subi": lambda a, b: a - b if a.dtype != np.bool_ else a ^ b,
    "arith.muli": lambda a, b: a * b if a.dtype != np.bool_ else a & b,
    "arith.divui": _on_unsigned(np.floor_divide),
    "arith.remui": _on_unsigned(np.remainder),
    "arith.ceildivui": _on_unsigned(lambda a, b: -(-a.astype(np.int64) // b.astype(np.int64))),
    "arith.divsi": _truncating_division,
    "arith.floordivsi": np.floor_divide,
    "arith.ceildivsi": lambda a, b: -(-a // b),
    "arith.remsi": np.fmod,
    "arith.minsi": np.minimum,
    "arith.maxsi": np.maximum,
    "arith.minui": _on_unsigned(np.minimum),
    "arith.maxui": _on_unsigned(np.maximum),
    "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or,
    "arith.xori": np.bitwise_xor,
    "arith.shli": np.left_shift,
    "arith.shrsi": np.right_shift,
    "arith.shrui": _on_unsigned(np.right_shift),
    "arith.addf": np.add,
    "arith.subf": np.subtract,
    "arith.mulf": np.multiply,
    "arith.divf": np.divide,
    "arith.remf": np.fmod,
    "arith.maximumf": np.maximum,
    "arith.minimumf": np.minimum,
    "arith.maxnumf": np.fmax,
    "arith.minnumf": np.fmin,
    "math.powf": np.power,
    "math.atan2": np.arctan2,
    "math.copysign": np.copysign,
    "math.fpowi": lambda a, b: np.power(a, b.astype(a.dtype)),
    "math.ipowi": np.power,
}

UNARY: dict[str, Callable[[Any], Any]] = {
    "arith.negf": np.negative,
    "math.absf": np.abs,
    "math.absi": np.abs,
    "math.exp": np.exp,
    "math.exp2": np.exp2,
    "math.expm1": np.expm1,
    "math.log": np.log,
    "math.log2": np.log2,
    "math.log10": np.log10,
    "math.log1p": np.log1p,
    "math.sqrt": np.sqrt,
    "math.rsqrt": lambda a: 1 / np.sqrt(a),
    "math.cbrt": np.cbrt,
    "math.sin": np.sin,
    "math.cos": np.cos,
    "math.tan": np.tan,
    "math.asin": np.arcsin,
    "math.acos": np.arccos,
    "math.atan": np.arctan,
    "math.sinh": np.sinh,
    "math.cosh": np.cosh,
    "math.tanh": np.tanh,
    "math.asinh": np.arcsinh,
    "math.acosh": np.arccosh,
    "math.atanh": np.arctanh,
    "math.erf": lambda a: _erf(a).astype(a.dtype),
    "math.floor": np.floor,
    "math.ceil": np.ceil,
    "math.trunc": np.trunc,
    "math.round": _round_half_away,
    "math.roundeven": np.round,
}

CASTS = {f"arith.{name}" for name in ("index_cast", "extsi", "trunci", "sitofp", "fptosi", "fptoui", "extf", "truncf")}
UNSIGNED_CASTS = {f"arith.{name}" for name in ("index_castui", "extui", "uitofp")}

_CMPI = ["equal", "not_equal", "less", "less_equal", "greater", "greater_equal"]
_CMPF = ["equal", "greater", "greater_equal", "less", "less_equal", "not_equal"]


def _compare_integers(predicate: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if predicate >= 6:  # the unsigned four
        a, b, predicate = _unsigned(a), _unsigned(b), predicate - 4
    return getattr(np, _CMPI[predicate])(a, b)


def _compare_floats(predicate: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """0 false, 1–6 ordered, 7 ord, 8–13 unordered, 14 uno, 15 true."""
    unordered = np.isnan(a) | np.isnan(b)
    match predicate:
        case 0 | 15:
            return np.broadcast_to(predicate == 15, unordered.shape)
        case 7 | 14:
            return unordered if predicate == 14 else ~unordered
    result = getattr(np, _CMPF[(predicate - 1) % 7])(a, b)
    return result & ~unordered if predicate < 7 else result | unordered


def constant(op: ConstantOp, exact: bool) -> np.ndarray:
    """The value of an `arith.constant`."""
    assert isinstance(op.value, builtin.IntegerAttr | builtin.FloatAttr)
    return as_type(op.value.value.data, op.result.type, exact)


def evaluate(op: Operation, operands: list[np.ndarray], exact: bool) -> np.ndarray:
    """The result of one operation without regions, for all elements of its (broadcast) operands at once."""
    type_ = op.results[0].type
    with np.errstate(all="ignore"):
        match op:
            case ConstantOp():
                return constant(op, exact)
            case CmpiOp():
                return _compare_integers(op.predicate.value.data, *operands)
            case CmpfOp():
                return _compare_floats(op.predicate.value.data, *operands)
        if op.name == "arith.select":
            return np.where(*operands)
        if op.name == "math.fma":
            a, b, c = operands
            return as_type(_fused(*(operand.astype(np.float64) for operand in (a, b, c))), type_, exact)
        if op.name in BINARY:
            return as_type(BINARY[op.name](*operands), type_, exact)
        if op.name in UNARY:
            return as_type(UNARY[op.name](*operands), type_, exact)
        if op.name in CASTS:
            (value,) = operands
            if value.dtype == np.bool_ and op.name in ("arith.extsi", "arith.sitofp"):
                value = -value.astype(np.int8)
            if op.name == "arith.trunci" and numpy_type(type_) is np.bool_:
                value = value & 1
            return as_type(value, type_, exact)
        if op.name in UNSIGNED_CASTS:
            return as_type(_unsigned(operands[0]), type_, exact)
        if op.name == "arith.bitcast":
            assert not exact, "a bitcast has no meaning in exact arithmetic"
            return operands[0].view(numpy_type(type_))
    raise NotImplementedError(f"the tile interpreter does not know {op.name}")
