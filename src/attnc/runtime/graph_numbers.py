"""Arithmetic on a program's scalars: sizes when a call is planned, other numbers in the call."""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Sequence
from typing import Any

from attnc.errors import LoweringError


def _floor(a: int, b: int) -> int:
    return a // b if b else 0


def _truncated(a: int, b: int) -> int:
    return int(math.copysign(1, a) * math.copysign(1, b)) * (abs(a) // abs(b)) if b else 0


def _remainder(a: int, b: int) -> int:
    return a - b * _truncated(a, b) if b else 0


def _divided(a: float, b: float) -> float:
    if b == 0:
        return math.nan if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1, b)
    return a / b


def _maximum(a: float, b: float) -> float:
    return a if a != a else b if b != b else max(a, b)


def _minimum(a: float, b: float) -> float:
    return a if a != a else b if b != b else min(a, b)


def _quiet(function: Callable[..., float], otherwise: float = math.nan) -> Callable[..., float]:
    def call(*operands: float) -> float:
        try:
            return function(*operands)
        except ValueError:
            return otherwise
        except OverflowError:
            return math.inf

    return call


_INTEGERS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
_OPERATIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("arith.addi", "arith.addf"), operator.add),
    **dict.fromkeys(("arith.subi", "arith.subf"), operator.sub),
    **dict.fromkeys(("arith.muli", "arith.mulf"), operator.mul),
    **dict.fromkeys(("arith.divui",), _floor),
    "arith.divsi": _truncated,
    "arith.floordivsi": _floor,
    "arith.ceildivsi": lambda a, b: -(-a // b) if b else 0,
    "arith.ceildivui": lambda a, b: -(-a // b) if b else 0,
    "arith.remsi": _remainder,
    "arith.remui": lambda a, b: a % b if b else 0,
    "arith.divf": _divided,
    "arith.negf": operator.neg,
    **dict.fromkeys(("arith.maxsi", "arith.maxui"), max),
    **dict.fromkeys(("arith.minsi", "arith.minui"), min),
    **dict.fromkeys(("arith.maximumf", "arith.maxnumf"), _maximum),
    **dict.fromkeys(("arith.minimumf", "arith.minnumf"), _minimum),
    "arith.andi": operator.and_,
    "arith.ori": operator.or_,
    "arith.xori": operator.xor,
    "arith.select": lambda c, a, b: a if c else b,
    **dict.fromkeys(("arith.sitofp", "arith.uitofp", "arith.extf", "arith.truncf"), float),
    **dict.fromkeys(("arith.index_cast", "arith.index_castui", "arith.extsi", "arith.trunci"), int),
    "arith.extui": int,
    "arith.fptosi": _quiet(int, 0),
    "math.sqrt": _quiet(math.sqrt),
    "math.rsqrt": lambda a: _divided(1.0, _quiet(math.sqrt)(a)),
    "math.exp": _quiet(math.exp),
    "math.exp2": _quiet(lambda a: 2.0**a),
    "math.log": lambda a: -math.inf if a == 0 else _quiet(math.log)(a),
    "math.log2": lambda a: -math.inf if a == 0 else _quiet(math.log2)(a),
    "math.tanh": math.tanh,
    "math.absf": abs,
    "math.floor": _quiet(math.floor),
    "math.ceil": _quiet(math.ceil),
    "math.powf": _quiet(math.pow),
}
_UNSIGNED = {"arith.divui", "arith.remui", "arith.extui", "arith.maxui", "arith.minui", "arith.uitofp", "arith.index_castui"}


def compute(step: dict[str, Any], operands: Sequence[Any]) -> Any:
    """The value of a "number" step. `step` has the operation's "name", its result's "type", and for comparisons a "predicate".

    Raises `LoweringError` for an operation that is not known.
    """
    name = step["name"]
    if name == "arith.constant":
        return fitted(step["value"], step["type"])
    if name == "arith.cmpi":
        return _compare_integers(step, *operands)
    if name == "arith.cmpf":
        a, b = operands
        ordered, unordered = step["predicate"] & 7, step["predicate"] >= 8
        if a != a or b != b:
            return int(unordered)
        truth = (False, a == b, a > b, a >= b, a < b, a <= b, a != b, True)
        return int(truth[ordered])
    if name not in _OPERATIONS:
        raise LoweringError(f"{name} on scalars outside of tensors is not compiled")
    if name in _UNSIGNED:
        operands = [value % (1 << _bits(type_)) for value, type_ in zip(operands, step["types"], strict=True)]
    return fitted(_OPERATIONS[name](*operands), step["type"])


def known_operation(name: str) -> bool:
    """Whether `compute` knows an operation."""
    return name in _OPERATIONS or name in ("arith.constant", "arith.cmpi", "arith.cmpf")


def _compare_integers(step: dict[str, Any], a: int, b: int) -> int:
    predicate = step["predicate"]
    if predicate >= 6:
        bits = _bits(step["types"][0])
        a, b = a % (1 << bits), b % (1 << bits)
        predicate -= 4
    return int(_INTEGERS[predicate](a, b))


def _bits(type_: str) -> int:
    return 64 if type_ == "index" else int(type_.lstrip("siu"))


def fitted(value: Any, type_: str) -> Any:
    """`value` as the type holds it: wrapped, or rounded."""
    if type_ == "i1":
        return int(value) & 1
    if type_ == "index" or type_.startswith(("i", "si")):
        bits = _bits(type_)
        wrapped = int(value) % (1 << bits)
        return wrapped - (1 << bits) if wrapped >> (bits - 1) else wrapped
    value = float(value)
    if type_ == "f32":
        return _rounded(value, "<f")
    if type_ == "f16":
        return _rounded(value, "<e")
    if type_ == "bf16":
        return _bf16(value)
    return value


def _rounded(value: float, form: str) -> float:
    try:
        return struct.unpack(form, struct.pack(form, value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def _bf16(value: float) -> float:
    if value != value or math.isinf(value):
        return value
    bits = struct.unpack("<I", struct.pack("<f", _rounded(value, "<f")))[0]
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", bits))[0]
