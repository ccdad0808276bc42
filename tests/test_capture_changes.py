"""Hypothesis changes what a mod captured, between calls, in every way it can; the record must follow."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.capture import capture as capture_module
from attnc.capture.capture import capture
from record_interpreter import run_record


class World:
    """What the mods below capture."""

    def __init__(self):
        self.number: Any = 3
        self.items: list[Any] = [1, 0.5, torch.ones(8)]
        self.table: dict[str, Any] = {"a": torch.arange(8.0), "b": 2}
        self.inner = types.SimpleNamespace(deep=types.SimpleNamespace(value=4))
        self.function: Any = lambda x: x + 1
        self.pair: Any = (1, (2.0, True))


settings_module: Any = types.ModuleType("settings_module")
settings_module.level = 1

MODS = {
    "number": lambda w, x: x * w.number,
    "compared": lambda w, x: x + 1 if w.number > 2 else x - w.number,
    "halved": lambda w, x: x + w.number // 2 + w.number % 3,
    "items": lambda w, x: sum((item if isinstance(item, (int, float)) else item[2] for item in w.items), x),
    "first": lambda w, x: x + w.items[0],
    "length": lambda w, x: x * len(w.items),
    "dict": lambda w, x: x + w.table["a"][3] * w.table["b"],
    "keys": lambda w, x: x + len([key for key in w.table if key != "b"]),
    "deep": lambda w, x: x - w.inner.deep.value,
    "function": lambda w, x: w.function(x),
    "pair": lambda w, x: x * w.pair[0] + (w.pair[1][0] if w.pair[1][1] else 7),
    "module": lambda w, x: x + settings_module.level,
    "missing": lambda w, x: x + getattr(w, "extra", 10),
    "same": lambda w, x: x + w.items[2][1] - w.table["a"][1],
}

NUMBERS = st.one_of(st.integers(-3, 6), st.sampled_from([0.5, -2.0, 0.0, -0.0, float("inf")]), st.booleans())
TENSORS = st.sampled_from(
    [
        torch.arange(8.0),
        torch.full((9,), 2.0),
        torch.arange(8),
        torch.ones(1).expand(8),
        torch.arange(16.0)[::2],
        torch.arange(8.0).bfloat16(),
        torch.ones(8, dtype=torch.bool),
    ]
)


def _plus(x: Any) -> Any:
    return x + 1


def _twice(x: Any) -> Any:
    return x * 2


def _plus_three(x: Any, k: int = 3) -> Any:
    return x + k


FUNCTIONS: Any = st.sampled_from([_plus, _twice, torch.neg, _plus_three, abs])


def _set(attribute):
    return lambda world, value: setattr(world, attribute, value)


CHANGES = st.one_of(
    st.tuples(st.just(_set("number")), NUMBERS),
    st.tuples(st.just(_set("extra")), NUMBERS),
    st.tuples(st.just(_set("function")), FUNCTIONS),
    st.tuples(st.just(_set("pair")), st.tuples(NUMBERS, st.tuples(NUMBERS, st.booleans()))),
    st.tuples(st.just(lambda world, value: world.items.append(value)), NUMBERS),
    st.tuples(st.just(lambda world, value: world.items.__setitem__(0, value)), NUMBERS),
    st.tuples(st.just(lambda world, value: world.items.__setitem__(2, value)), TENSORS),
    st.tuples(st.just(lambda world, value: world.table.__setitem__("a", value)), TENSORS),
    st.tuples(st.just(lambda world, value: world.items.__setitem__(2, world.table["a"])), st.none()),
    st.tuples(st.just(lambda world, value: world.table["a"].copy_(world.table["a"] * 0 + 1)), st.none()),
    st.tuples(st.just(lambda world, value: world.table.__setitem__("b", value)), NUMBERS),
    st.tuples(st.just(lambda world, value: world.table.__setitem__("c", value)), NUMBERS),
    st.tuples(st.just(lambda world, value: setattr(world.inner.deep, "value", value)), NUMBERS),
    st.tuples(st.just(lambda world, value: setattr(world.inner, "deep", types.SimpleNamespace(value=value))), NUMBERS),
    st.tuples(st.just(lambda world, value: setattr(settings_module, "level", value)), NUMBERS),
)


@settings(max_examples=150)
@given(st.lists(st.sampled_from(sorted(MODS)), min_size=1, max_size=3), st.lists(CHANGES, max_size=6))
def test_the_record_follows_every_change(names, changes):
    capture_module.clear()
    world = World()
    mods = [MODS[name] for name in names]

    def mod(score, b, h, q, kv):
        x = score
        for part in mods:
            x = part(world, x)
        return x

    arguments = [torch.tensor(1.25), *(torch.tensor(i, dtype=torch.int32) for i in (0, 1, 5, 2))]
    for change, value in [(lambda world, value: None, None), *changes]:
        try:
            change(world, value)
        except RuntimeError:
            continue  # an expanded tensor is not written to
        try:
            expected = mod(*arguments).float()
        except Exception as error:  # as torch: no subtraction of bools
            with pytest.raises(type(error)):
                capture(mod)
            continue
        for _ in range(2):
            found = capture(mod)
            assert found.retraced is None, found.retraced
            function = found.record.score
            got = arguments[0] if function is None else run_record(function, arguments, found.tensors, found.numbers)
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
