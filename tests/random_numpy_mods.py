"""NumPy mods written by hypothesis: Python source over score, b, h, q, k, captured arrays and numbers, as a user writes it.

Kept away from what no two correct programs agree on: a comparison or a step of something rounded, an index out of range.
"""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import ml_dtypes
import numpy as np

# name -> (dtype, shape); values are drawn from the name's own seed.
ARRAYS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "single": (np.float32, (11,)),
    "matrix": (np.float32, (4, 13)),
    "scalar": (np.float32, ()),
    "double": (np.float64, (7,)),
    "half": (np.float16, (9,)),
    "brain": (ml_dtypes.bfloat16, (5, 6)),
    "counts": (np.int32, (12,)),
    "table": (np.int64, (3, 8)),
    "small": (np.int8, (10,)),
    "bytes": (np.uint8, (6,)),
    "flags": (np.bool_, (14,)),
}
NUMBERS: dict[str, Any] = {
    "window": 9, "offset": -3, "factor": 0.375, "strong": np.int64(5), "narrow": np.int16(-7), "single_number": np.float32(0.3),
}  # fmt: skip
FUNCTIONS = (
    "np.tanh({})", "np.sin({})", "np.cos({})", "1 / (1 + np.exp(-{}))", "np.abs({})", "np.maximum({}, 0)", "-{}",
    "np.exp(-np.abs({}))", "np.log1p(abs({}))", "np.sqrt(abs({}) + 0.5)", "{}.clip(-3, 2.5)", "np.exp2(np.minimum({}, 2))",
    "1 / (1.5 + np.square({}))", "np.arctan({})", "np.float32({})", "{}.astype(np.float64)", "np.fmin({}, 1.25)",
    "np.hypot({}, 0.5)", "np.copysign({}, -1)", "np.clip({}, None, 1)",
)  # fmt: skip


@dataclass(frozen=True)
class RandomMod:
    """One generated mod; its repr is its source."""

    source: str

    def __repr__(self) -> str:
        return "\n" + self.source

    def function(self, wide: bool = False) -> Callable[..., Any]:
        """The mod, closed over its captures. Beside float64 inputs the float32 ones are `wide`."""
        name = f"<random mod {hash(self.source)}>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(keepends=True), name)
        scope: dict = {"np": np}
        exec(compile(self.source, name, "exec"), scope)
        return scope["make"](**{name: capture(name, wide) for name in ARRAYS}, **NUMBERS)


@functools.cache
def capture(name: str, wide: bool) -> np.ndarray:
    dtype, shape = ARRAYS[name]
    if wide and dtype is np.float32:
        dtype = np.float64
    generator = np.random.default_rng(sum(map(ord, name)))
    if dtype is np.bool_:
        return generator.random(shape) < 0.6
    if issubclass(dtype, np.integer):
        low = 0 if dtype is np.uint8 else -20
        return generator.integers(low, 60, shape).astype(dtype)
    return np.asarray(generator.standard_normal(shape)).astype(dtype)


def _source(arguments: str, expression: str) -> str:
    captures = ", ".join([*ARRAYS, *NUMBERS])
    return f"def make({captures}):\n    def mod({arguments}):\n        return {expression}\n    return mod\n"


def score_mods() -> st.SearchStrategy[RandomMod]:
    """Score mods; what they add to the score is bounded, so that no softmax hangs on one rounding."""
    forms = ["score + 4 * np.tanh({} * 0.1)", "5 * np.tanh(({}) * 0.2)"]
    parts = st.tuples(floats(3, True), st.sampled_from(forms))
    return parts.map(lambda part: RandomMod(_source("score, b, h, q, k", part[1].format(part[0]))))


def mask_mods() -> st.SearchStrategy[RandomMod]:
    return bools(2).map(lambda expression: RandomMod(_source("b, h, q, k", expression)))


@functools.cache
def _gather(names: tuple[str, ...], depth: int) -> st.SearchStrategy[str]:
    """An element of a capture, at an index brought into range; sometimes counted from the end."""

    def of(name: str) -> st.SearchStrategy[str]:
        shape = ARRAYS[name][1]
        if not shape:
            return st.just(name)
        index = [
            st.tuples(integers(depth), st.booleans()).map(lambda t, n=n: f"({t[0]}) % {n}{f' - {n}' if t[1] else ''}")
            for n in shape
        ]
        spelling = st.sampled_from(["{}[{}]", "{}[{}]", "np.take({}, {})"] if len(shape) == 1 else ["{}[{}]"])
        return st.tuples(spelling, *index).map(lambda parts: parts[0].format(name, ", ".join(parts[1:])))

    return st.sampled_from(names).flatmap(of)


@functools.cache
def integers(depth: int) -> st.SearchStrategy[str]:
    leaf = st.sampled_from(["q", "k", "q", "k", "b", "h", "window", "offset", "strong", "narrow"])
    if depth == 0:
        return leaf.filter(lambda name: name not in NUMBERS)
    inner = integers(depth - 1)
    two = st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner | leaf).map(lambda t: f"({t[0]} {t[1]} {t[2]})")
    divisors = [2, 3, 7, 16, -5, "window", "offset", "strong", "narrow"]
    divided = st.tuples(inner, st.sampled_from(["//", "%"]), st.sampled_from(divisors))
    return st.one_of(
        inner,
        two,
        divided.map(lambda t: f"(({t[0]}) {t[1]} {t[2]})"),
        inner.map(lambda x: f"abs({x})"),
        inner.map(lambda x: f"np.clip({x}, -4, 40)"),
        inner.map(lambda x: f"(({x}) >> 1)"),
        inner.map(lambda x: f"(({x}) & 21)"),
        inner.map(lambda x: f"({x}).astype(np.int64)"),
        inner.map(lambda x: f"divmod({x}, 5)[1]"),
        st.tuples(inner, inner).map(lambda t: f"np.maximum({t[0]}, {t[1]})"),
        st.tuples(bools(depth - 1), inner, inner).map(lambda t: f"np.where({t[0]}, {t[1]}, {t[2]})"),
        bools(depth - 1).map(lambda x: f"(3 * {x} + q)"),
        _gather(("counts", "table", "small"), depth - 1),
        _gather(("bytes",), depth - 1).map(lambda x: f"({x} + q)"),  # uint8 alone may not fall below 0
    )


@functools.cache
def bools(depth: int) -> st.SearchStrategy[str]:
    side = integers(max(depth - 1, 0))
    compared = st.tuples(side, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), side)
    simple = st.one_of(
        compared.map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.just("(q >= k)"),
        st.just("(abs(q - k) < window)"),
        st.just("(3 < q)"),
        _gather(("flags",), max(depth - 1, 0)),
        _gather(("single", "half"), max(depth - 1, 0)).map(lambda x: f"({x} > 0.25)"),
    )
    if depth == 0:
        return simple
    inner = bools(depth - 1)
    return st.one_of(
        simple,
        st.tuples(inner, st.sampled_from(["&", "|", "^"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(inner, st.sampled_from(["and", "or", "xor"]), inner).map(lambda t: f"np.logical_{t[1]}({t[0]}, {t[2]})"),
        inner.map(lambda x: f"(~{x})"),
        st.tuples(inner, inner, inner).map(lambda t: f"np.where({t[0]}, {t[1]}, {t[2]})"),
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
        gather.map(lambda x: f"({x} + 0.1)"),
        gather.map(lambda x: f"({x} * 3)"),
    )


@functools.cache
def floats(depth: int, scored: bool) -> st.SearchStrategy[str]:
    """Expressions of float32 or float64 (or of the score)."""
    leaves = ["scalar", "score", "score"] if scored else ["scalar"]
    leaf = st.sampled_from(leaves) | _gather(("single", "matrix", "double"), 1)
    if depth == 0:
        return leaf
    inner = floats(depth - 1, scored)
    small = max(depth - 2, 0)
    changes = ["* 0.5", "/ 3", "+ factor", "* window", "- 2", "+ True", "* strong", "+ single_number", "* np.sqrt(window)"]
    return st.one_of(
        leaf,
        st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(inner, st.sampled_from(["+", "-"]), narrow_floats(small)).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(inner, st.sampled_from(changes)).map(lambda t: f"({t[0]} {t[1]})"),
        st.tuples(integers(small), inner).map(lambda t: f"(({t[0]}) * 0.125 + {t[1]})"),
        st.tuples(inner, integers(small)).map(lambda t: f"({t[0]} + 0.25 * ({t[1]}))"),
        st.tuples(bools(small), inner, inner).map(lambda t: f"np.where({t[0]}, {t[1]}, {t[2]})"),
        st.tuples(st.sampled_from(FUNCTIONS), inner).map(lambda t: t[0].replace("{}", f"({t[1]})")),
    )
