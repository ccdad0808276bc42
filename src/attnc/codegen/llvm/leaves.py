"""Leaf routines: what a compiled kernel calls that depends on no mod and on no size, only on element types and the machine.

All of a kernel's leaves are one object, cached by content and shared by every kernel of the same element types. Each
function here and in `leaves_dot` and `leaves_pack` is pure, (element types, target) → (symbol, LLVM text).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from attnc.codegen.llvm.leaves_dot import dot_accumulate_careful, finite, products
from attnc.codegen.llvm.leaves_pack import pack_rhs, pack_rhs_transposed
from attnc.codegen.llvm.leaves_pairs import dot_rows_pairs, pack_pairs
from attnc.target import Target

ELEMENTS = {"f16": "half", "bf16": "bfloat", "f32": "float", "f64": "double"}
"""The names of LLVM for the element types that sources may have."""


@dataclass(frozen=True)
class Leaves:
    """The symbols of the leaf routines; their signatures stand where each is defined."""

    dot_rows: str
    dot_accumulate: str
    dot_accumulate_careful: str
    pack_rhs_transposed: str
    pack_rhs: str
    finite: str


@functools.cache
def define(source: str, element: str, target: Target) -> tuple[Leaves, str]:
    """All leaves for operands of `source` ("float", "double", "half", "bfloat"), computing in `element` ("float", "double")."""
    (dot, accumulate), text = products(element, target)
    careful, careful_text = dot_accumulate_careful(element, target)
    (transposed, pack), pack_text = packs(source, element, target)
    check, check_text = finite(element, target)
    leaves = Leaves(dot, accumulate, careful, transposed, pack, check)
    return leaves, join([text, careful_text, pack_text, check_text])


@functools.cache
def packs(source: str, element: str, target: Target) -> tuple[tuple[str, str], str]:
    """The symbols of `pack_rhs_transposed` and `pack_rhs`, and one text that defines both: what a second source type adds."""
    transposed, transposed_text = pack_rhs_transposed(source, element, target)
    pack, pack_text = pack_rhs(source, element, target)
    return (transposed, pack), join([transposed_text, pack_text])


@functools.cache
def pairs(target: Target) -> str:
    """What a product of bf16 pairs adds to the leaves for "bfloat" and "float" (`leaves_pairs` has the symbols)."""
    return join([dot_rows_pairs(target)[1], pack_pairs(target)[1], packs("float", "float", target)[1]])


def join(texts: list[str]) -> str:
    """One module of several texts: LLVM refuses a second declaration, and one of what the module itself defines."""
    declarations: dict[str, str] = {}
    defined: set[str] = set()
    rest: list[str] = []
    for line in "\n".join(texts).split("\n"):
        symbol = line[line.find("@") : line.find("(")]
        if line.startswith("declare "):
            declarations[symbol] = line
            continue
        if line.startswith("define "):
            defined.add(symbol)
        rest.append(line)
    return "\n".join([*rest, *(line for symbol, line in declarations.items() if symbol not in defined), ""])
