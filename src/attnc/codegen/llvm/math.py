"""Elementary functions on vectors, as LLVM functions to be inlined: `define` gives the text, `declarations` what it calls.

    symbol, text = define("tanh", "float", 16)      # "@attnc.tanh.v16float", "define internal <16 x float> @attnc.tanh…"

`element` is that of the operands. A call is then `call <16 x float> @attnc.tanh.v16float(<16 x float> %x)`; a width of 1 means
scalars. Functions of `float` are straight vector code without calls; those of `double` call libm lane by lane, apart
from exp, exp2, log and what needs no approximation. Regions in f16 and bf16 compute in float and convert.

| names | elements | operands → result |
|---|---|---|
| `UNARY` | float, double | T → T |
| `BINARY` (`powf` is another name of `pow`) | float, double | T, T → T |
| `softmax_exp2` | float, double | T → T, for x <= 0 or NaN: at and below -127 (-1022) it is exactly 0 |
| `floordiv`, `floormod`, `truncdiv`, `truncrem` | i8, i16, i32, i64, u8 | T, T → T (u8: LLVM's i8, unsigned) |
| `fptosi.i8`, `.i16`, `.i32`, `.i64` | float, double | T → integer |
| `bf16_to_f32`, `f16_to_f32` | i16 | i16 → float (the bits of the narrow number) |
| `f32_to_bf16`, `f32_to_f16` | float | float → i16 |
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from attnc.codegen.llvm import math_convert, math_double, math_exponential, math_integer, math_trigonometric
from attnc.codegen.llvm.math_body import Body, Lanes, Machine

__all__ = ["BINARY", "MODERN", "UNARY", "Machine", "declarations", "define", "libm_symbols", "signature"]

Builder = Callable[..., Lanes]


def _named(*functions: Builder) -> dict[str, Builder]:
    return {function.__name__: function for function in functions}


_UNARY = {
    "float": _named(*math_exponential.FUNCTIONS, *math_trigonometric.UNARY, *math_convert.UNARY),
    "double": math_double.UNARY | _named(*math_convert.UNARY),
}
_BINARY = {
    "float": _named(*math_trigonometric.BINARY, *math_convert.BINARY) | {"powf": math_trigonometric.pow},
    "double": math_double.BINARY | _named(*math_convert.BINARY),
}
_CONVERSIONS: dict[str, tuple[Builder, str, str]] = {
    "bf16_to_f32": (math_convert.bf16_to_f32, "i16", "float"),
    "f16_to_f32": (math_convert.f16_to_f32, "i16", "float"),
    "f32_to_bf16": (math_convert.f32_to_bf16, "float", "i16"),
    "f32_to_f16": (math_convert.f32_to_f16, "float", "i16"),
}

MODERN = Machine()
"""A CPU that rounds and converts f16 in vectors: x86 with AVX2 and F16C, or NEON."""
UNARY = tuple(sorted(_UNARY["float"]))
"""Functions of one float."""
BINARY = tuple(sorted(_BINARY["float"]))
"""Functions of two floats."""


def signature(name: str, element: str) -> tuple[tuple[str, ...], str]:
    """The elements of the operands and of the result. Raises KeyError for a function that does not exist."""
    if name in math_integer.NAMES and element in ("i8", "i16", "i32", "i64", "u8"):
        narrow = "i8" if element == "u8" else element
        return (narrow, narrow), narrow
    if name in _CONVERSIONS and element == _CONVERSIONS[name][1]:
        return (element,), _CONVERSIONS[name][2]
    if element in ("float", "double"):
        if name in UNARY:
            return (element,), element
        if name in BINARY:
            return (element, element), element
        if name.startswith("fptosi.") and name.removeprefix("fptosi.") in ("i8", "i16", "i32", "i64"):
            return (element,), name.removeprefix("fptosi.")
    raise KeyError(f"no function {name} of {element}")


@functools.cache
def _body(name: str, element: str, width: int, machine: Machine) -> tuple[str, str, tuple[str, ...]]:
    operands, result = signature(name, element)
    symbol = f"attnc.{name}.{element}" if width == 1 else f"attnc.{name}.v{width}{element}"
    body = Body(symbol, width, list(zip("xy", operands, strict=False)), result, machine)
    value = _build(body, name, element, body.arguments)
    text = body.function.finish(value.name)
    return f"@{symbol}", text, tuple(body.declarations)


def _build(body: Body, name: str, element: str, arguments: list[Lanes]) -> Lanes:
    if name in math_integer.NAMES:
        return math_integer.divide(body, *arguments, name=name, signed=element != "u8")
    if name in _CONVERSIONS:
        return _CONVERSIONS[name][0](body, *arguments)
    if name.startswith("fptosi."):
        return math_convert.fptosi(body, *arguments, result=name.removeprefix("fptosi."))
    return (_UNARY if len(arguments) == 1 else _BINARY)[element][name](body, *arguments)


def define(name: str, element: str, width: int, machine: Machine = MODERN) -> tuple[str, str]:
    """(symbol, text of the internal, always inlined function) of `width` lanes. Raises KeyError for an unknown function."""
    symbol, text, _ = _body(name, element, width, machine)
    return symbol, text


def declarations(name: str, element: str, width: int, machine: Machine = MODERN) -> tuple[str, ...]:
    """The `declare` lines the text needs; other functions may need the same ones, so write each once."""
    return _body(name, element, width, machine)[2]


def libm_symbols(name: str, element: str) -> tuple[str, ...]:
    """The external functions of libm the text calls."""
    return math_double.LIBM.get(name, ()) if element == "double" else ()
