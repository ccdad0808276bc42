"""Mods written by hypothesis: Python source over score, b, h, q, k, captured tensors and numbers, as a user would write it.

Kept away from what no two correct programs agree on: a comparison or a step of something rounded, a transcendental function of
a 16-bit value (its own last bit would show), an index out of range.
"""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable
from dataclasses import dataclass

import hypothesis.strategies as st
import torch
from torch import Tensor

# name -> (dtype, shape); values are drawn from the name's own seed.
TENSORS: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "single": (torch.float32, (11,)),
    "matrix": (torch.float32, (4, 13)),
    "scalar": (torch.float32, ()),
    "double": (torch.float64, (7,)),
    "half": (torch.float16, (9,)),
    "brain": (torch.bfloat16, (5, 6)),
    "counts": (torch.int32, (12,)),
    "table": (torch.int64, (3, 8)),
    "small": (torch.int8, (10,)),
    "flags": (torch.bool, (14,)),
}
NUMBERS: dict[str, int | float] = {"window": 9, "offset": -3, "factor": 0.375}
FUNCTIONS = (
    "torch.tanh({})", "torch.sin({})", "torch.cos({})", "torch.sigmoid({})", "{}.abs()", "torch.relu({})", "-{}",
    "torch.exp(-({}).abs())", "torch.log1p({}.abs())", "torch.sqrt({}.abs() + 0.5)", "torch.nn.functional.silu({})",
    "({}).clamp(-3, 2.5)", "torch.exp2(({}).clamp(max=2))", "torch.erf({})", "1 / (1.5 + ({}) * ({}))",
)  # fmt: skip


@dataclass(frozen=True)
class RandomMod:
    """One generated mod; its repr is its source."""

    source: str

    def __repr__(self) -> str:
        return "\n" + self.source

    def function(self, dtype: torch.dtype = torch.float32) -> Callable[..., Tensor]:
        """The mod, closed over its captures. Beside f64 inputs the f32 ones are f64: no two libraries agree on an f32 tanh."""
        name = f"<random mod {hash(self.source)}>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(keepends=True), name)
        scope: dict = {"torch": torch}
        exec(compile(self.source, name, "exec"), scope)
        return scope["make"](**{name: capture(name, dtype == torch.float64) for name in TENSORS}, **NUMBERS)


@functools.cache
def capture(name: str, wide: bool) -> Tensor:
    dtype, shape = TENSORS[name]
    if wide and dtype == torch.float32:
        dtype = torch.float64
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.6
    if not dtype.is_floating_point:
        return torch.randint(-20, 60, shape, generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def _source(arguments: str, expression: str) -> str:
    captures = ", ".join([*TENSORS, *NUMBERS])
    return f"def make({captures}):\n    def mod({arguments}):\n        return {expression}\n    return mod\n"


def score_mods() -> st.SearchStrategy[RandomMod]:
    """Score mods; what they add to the score is bounded, so that no softmax hangs on one rounding."""
    parts = st.tuples(wide_floats(3, True), st.sampled_from(["score + 4 * torch.tanh({} * 0.1)", "5 * torch.tanh(({}) * 0.2)"]))
    return parts.map(lambda part: RandomMod(_source("score, b, h, q, k", part[1].format(part[0]))))


def mask_mods() -> st.SearchStrategy[RandomMod]:
    return bools(2).map(lambda expression: RandomMod(_source("b, h, q, k", expression)))


@functools.cache
def _gather(names: tuple[str, ...], depth: int) -> st.SearchStrategy[str]:
    """An element of a capture, at an index brought into range; sometimes counted from the end."""

    def of(name: str) -> st.SearchStrategy[str]:
        shape = TENSORS[name][1]
        if not shape:
            return st.just(name)
        index = [
            st.tuples(integers(depth), st.booleans()).map(lambda t, n=n: f"({t[0]}) % {n}{f' - {n}' if t[1] else ''}")
            for n in shape
        ]
        return st.tuples(*index).map(lambda parts: f"{name}[{', '.join(parts)}]")

    return st.sampled_from(names).flatmap(of)


@functools.cache
def integers(depth: int) -> st.SearchStrategy[str]:
    leaf = st.sampled_from(["q", "k", "q", "k", "b", "h", "window", "offset"])
    if depth == 0:
        return leaf.filter(lambda name: name not in NUMBERS)  # a lone number is no tensor
    inner = integers(depth - 1)
    two = st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner | leaf).map(lambda t: f"({t[0]} {t[1]} {t[2]})")
    divided = st.tuples(inner, st.sampled_from(["//", "%"]), st.sampled_from([2, 3, 7, 16, -5, "window", "offset"]))
    return st.one_of(
        inner,
        two,
        divided.map(lambda t: f"(({t[0]}) {t[1]} {t[2]})"),
        inner.map(lambda x: f"({x}).abs()"),
        inner.map(lambda x: f"torch.clamp({x}, -4, 40)"),
        inner.map(lambda x: f"(({x}) >> 1)"),
        inner.map(lambda x: f"(({x}) & 21)"),
        st.tuples(bools(depth - 1), inner, inner).map(lambda t: f"torch.where({t[0]}, {t[1]}, {t[2]})"),
        _gather(("counts", "table"), depth - 1),
        _gather(("small",), depth - 1).map(lambda x: f"({x} - k)"),  # int8 alone is no index
    )


@functools.cache
def bools(depth: int) -> st.SearchStrategy[str]:
    compared = st.tuples(
        integers(max(depth - 1, 0)), st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), integers(max(depth - 1, 0))
    )
    simple = st.one_of(
        compared.map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.just("(q >= k)"),
        st.just("((q - k).abs() < window)"),
        _gather(("flags",), max(depth - 1, 0)),
        _gather(("single", "half"), max(depth - 1, 0)).map(lambda x: f"({x} > 0.25)"),
    )
    if depth == 0:
        return simple
    inner = bools(depth - 1)
    return st.one_of(
        simple,
        st.tuples(inner, st.sampled_from(["&", "|", "^"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        inner.map(lambda x: f"(~{x})"),
        st.tuples(inner, inner, inner).map(lambda t: f"torch.where({t[0]}, {t[1]}, {t[2]})"),
    )


@functools.cache
def narrow_floats(depth: int) -> st.SearchStrategy[str]:
    """Expressions of 16-bit captures: only operations that are rounded correctly everywhere."""
    gather = _gather(("half", "brain"), depth)
    return st.one_of(
        gather,
        st.tuples(gather, st.sampled_from(["+", "-", "*"]), integers(depth)).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        gather.map(lambda x: f"({x} * factor)"),
        gather.map(lambda x: f"({x} / 4)"),
    )


@functools.cache
def wide_floats(depth: int, scored: bool) -> st.SearchStrategy[str]:
    """Expressions of f32 or f64 (or of the score)."""
    leaves = ["scalar", "score", "score"] if scored else ["scalar"]
    leaf = st.sampled_from(leaves) | _gather(("single", "matrix", "double"), 1)
    if depth == 0:
        return leaf
    inner = wide_floats(depth - 1, scored)
    small = max(depth - 2, 0)

    def apply(t: tuple[str, str]) -> str:
        return t[0].replace("{}", f"({t[1]})")

    return st.one_of(
        leaf,
        st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(inner, st.sampled_from(["+", "-"]), narrow_floats(small)).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(inner, st.sampled_from(["* 0.5", "/ 3", "+ factor", "* window", "- 2", "+ True"])).map(
            lambda t: f"({t[0]} {t[1]})"
        ),
        st.tuples(integers(small), inner).map(lambda t: f"(({t[0]}) * 0.125 + {t[1]})"),
        st.tuples(inner, integers(small)).map(lambda t: f"({t[0]} + 0.25 * ({t[1]}))"),
        st.tuples(bools(small), inner, inner).map(lambda t: f"torch.where({t[0]}, {t[1]}, {t[2]})"),
        st.tuples(st.sampled_from(FUNCTIONS), inner).map(apply),
    )
