"""`capture` is sound: what a mod would do now is what the record and the values that come back say, whatever changed."""

# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import threading
import types
import weakref
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnc.capture import capture as capture_module
from attnc.capture.capture import Captured, capture
from attnc.errors import UnsupportedModError
from record_interpreter import run_record

WINDOW = 5
TABLE = torch.arange(12.0)
SCALE: float = 0.5
FLAG = True


@pytest.fixture(autouse=True)
def forget():
    capture_module.clear()


@pytest.fixture
def traces(monkeypatch):
    """Counts traces."""
    counted = []

    def counting(*args):
        counted.append(args)
        return trace(*args)

    trace = capture_module.trace
    monkeypatch.setattr(capture_module, "trace", counting)
    return counted


def evaluate(mod, *, score=1.25, index=(1, 2, 7, 3), mask=False) -> torch.Tensor:
    """Captures `mod` and runs its record; must equal the mod itself. Returns the value."""
    arguments = [torch.tensor(i, dtype=torch.int32) for i in index]
    if mask:
        found = capture(None, mod)
        function = found.record.mask
    else:
        found = capture(mod)
        function = found.record.score
        arguments = [torch.tensor(score), *arguments]
    expected = torch.as_tensor(mod(*arguments))
    if not mask:
        expected = expected.float()
    got = arguments[0] if function is None else run_record(function, arguments, found.tensors, found.numbers)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    return got


def same_record(*mods) -> bool:
    return len({id(capture(mod).record) for mod in mods}) == 1


# -- tensors ----------------------------------------------------------------------------------------------------------


def test_rebinding_and_in_place_change(traces):
    bias = torch.arange(10.0)

    def mod(score, b, h, q, kv):
        return score + bias[q]

    assert evaluate(mod) == 8.25
    bias.mul_(2)
    assert evaluate(mod) == 15.25
    bias = torch.ones(30)
    assert evaluate(mod) == 2.25
    assert len(traces) == 1


def test_another_dtype_rank_or_stride_pattern_is_another_record(traces):
    bias = torch.arange(10.0)

    def mod(score, b, h, q, kv):
        return score + bias[q].sum()

    first = capture(mod).record
    bias = torch.arange(10.0, dtype=torch.float64)
    assert capture(mod).record is not first
    bias = torch.arange(20.0)[::2]
    assert capture(mod).record.captures[0].strides == "?"
    bias = torch.zeros(1).expand(10)
    assert capture(mod).record.captures[0].strides == "0"
    bias = torch.arange(10.0)
    assert capture(mod).record is first
    assert len(traces) == 4


def test_lengths_of_reduced_rows_are_compiled_in_and_others_are_not():
    rows = torch.ones(4, 3)

    def mod(score, b, h, q, kv):
        return score + rows[b].sum()

    first = capture(mod).record
    assert first.captures[0].type.shape == (None, 3)
    rows = torch.ones(9, 3)
    assert capture(mod).record is first
    rows = torch.ones(9, 5)
    assert capture(mod).record is not first
    assert evaluate(mod) == 6.25


def test_one_tensor_under_two_names_is_one_capture():
    a = torch.arange(10.0)
    b2 = a

    def mod(score, b, h, q, kv):
        return score + a[q] - b2[kv]

    assert len(capture(mod).tensors) == 1
    b2 = torch.zeros(10)
    assert len(capture(mod).tensors) == 2
    assert evaluate(mod) == 8.25
    b2 = a
    assert evaluate(mod) == 5.25


def test_unused_captures_are_dropped():
    a, unused = torch.arange(10.0), torch.zeros(3)

    def mod(score, b, h, q, kv):
        _ = unused[b] * 2
        return score + a[q]

    found = capture(mod)
    assert [c.name for c in found.record.captures] == ["a"]
    assert found.tensors[0] is a
    assert len(found.record.score.ops) == 2


@pytest.mark.parametrize("kind", ["closure", "object", "module", "partial", "refused"])
def test_nothing_holds_a_tensor_after_the_call(kind):
    """Not even until the garbage collector comes round."""

    def make(bias):
        match kind:
            case "object":
                return Alibi(bias, 3)
            case "module":
                module = Module()
                module.table = bias
                return module.score_mod
            case "partial":
                return functools.partial(lambda bias, score, b, h, q, kv: score + bias[q], bias)
            case "refused":
                return lambda score, b, h, q, kv: score + bias[q].item()
        return lambda score, b, h, q, kv: score + (lambda x: bias[x])(q)

    gc.collect()
    gc.disable()
    try:
        bias = torch.arange(10.0)
        for _ in range(3):
            try:
                capture(make(bias))
            except UnsupportedModError:
                assert kind == "refused"
        reference = weakref.ref(bias)
        del bias
        assert reference() is None
    finally:
        gc.enable()


def test_score_and_mask_share_captures_and_numbers():
    table, window = torch.arange(10.0), 4

    def score_mod(score, b, h, q, kv):
        return score + table[q] * window

    def mask_mod(b, h, q, kv):
        return (q - kv < window) & (table[kv] > 0)

    found = capture(score_mod, mask_mod)
    assert len(found.tensors) == 1 and found.numbers == (4,)
    window = 6
    again = capture(score_mod, mask_mod)
    assert again.record is found.record and again.numbers == (6,)


def test_mods_made_anew_share_their_plan(traces):
    def make(bias, window):
        return lambda score, b, h, q, kv: torch.where(q - kv < window, score + bias[q], 0.0)

    for length in range(8, 13):
        assert evaluate(make(torch.arange(float(length)), length))
    assert len(traces) == 1


# -- where values come from -------------------------------------------------------------------------------------------


def test_globals(monkeypatch, traces):
    def mod(score, b, h, q, kv):
        return (score + TABLE[q] + WINDOW) * SCALE if FLAG else score

    assert evaluate(mod) == (1.25 + 7 + 5) * 0.5
    monkeypatch.setitem(globals(), "WINDOW", 9)
    monkeypatch.setitem(globals(), "TABLE", torch.zeros(8))
    assert evaluate(mod) == (1.25 + 9) * 0.5
    assert len(traces) == 1
    monkeypatch.setitem(globals(), "FLAG", False)
    assert evaluate(mod) == 1.25
    assert len(traces) == 2


def test_a_global_that_comes_to_hide_a_builtin(monkeypatch):
    def mod(score, b, h, q, kv):
        return score * max(2, WINDOW)

    assert evaluate(mod) == 1.25 * 5
    monkeypatch.setitem(globals(), "max", min)
    assert evaluate(mod) == 2.5


def test_default_arguments():
    def mod(score, b, h, q, kv, window=3, *, table=TABLE):
        return score + table[q] + window

    assert evaluate(mod) == 11.25
    mod.__defaults__ = (4,)
    assert evaluate(mod) == 12.25
    mod.__kwdefaults__ = {"table": torch.zeros(8)}
    assert evaluate(mod) == 5.25


def test_partial():
    def base(table, score, b, h, q, kv, *, window):
        return score + table[q] + window

    mods = [functools.partial(base, torch.full((8,), float(i)), window=i) for i in range(3)]
    assert [evaluate(mod).item() for mod in mods] == [1.25, 3.25, 5.25]
    assert same_record(*mods)
    assert [c.name for c in capture(mods[0]).record.captures] == ["table"]


class Alibi:
    step = 2

    def __init__(self, slopes, window):
        self.slopes = slopes
        self.window = window
        self.unread = object()

    @property
    def double(self):
        return self.window * 2

    @staticmethod
    def distance(q, kv):
        return q - kv

    def bias(self, h):
        return self.slopes[h]

    def __call__(self, score, b, h, q, kv):
        return score + self.bias(h) * self.distance(q, kv) + self.double + self.step


def test_callable_object(traces):
    mod = Alibi(torch.arange(4.0), 3)
    assert evaluate(mod) == 1.25 + 2 * 4 + 6 + 2
    mod.window = 5
    mod.slopes = torch.zeros(4)
    mod.unread = 3
    assert evaluate(mod) == 1.25 + 10 + 2
    mod.step = 7
    assert evaluate(mod) == 1.25 + 10 + 7
    assert evaluate(Alibi(torch.ones(9), 1)) == 1.25 + 4 + 2 + 2
    assert len(traces) == 1
    assert {c.name for c in capture(mod).record.captures} == {"self.slopes"}


def test_a_method_that_is_replaced():
    mod = Alibi(torch.arange(4.0), 3)
    evaluate(mod)
    mod.bias = lambda h: 10.0
    assert evaluate(mod) == 1.25 + 40 + 6 + 2


def test_bound_method_of_another_object(traces):
    one, two = Alibi(torch.ones(4), 3), Alibi(torch.zeros(4), 4)
    assert evaluate(one.__call__) != evaluate(two.__call__)
    assert len(traces) == 1


class Child(Alibi):
    def bias(self, h):
        return super().bias(h) + 1


def test_super():
    assert evaluate(Child(torch.arange(4.0), 3)) == 1.25 + 3 * 4 + 6 + 2


class Slotted:
    __slots__ = ("table",)

    def __init__(self, table):
        self.table = table

    def __call__(self, score, b, h, q, kv):
        return score + self.table[q]


def test_slots(traces):
    assert evaluate(Slotted(torch.ones(8))) == 2.25
    assert evaluate(Slotted(torch.zeros(8))) == 1.25
    assert len(traces) == 1


@dataclass(frozen=True)
class Config:
    window: int
    table: torch.Tensor


def test_attribute_chains(traces):
    class Holder:
        config: Config

    def mod(score, b, h, q, kv):
        return torch.where(q < Holder_.config.window, score, score + Holder_.config.table[q])

    Holder_ = Holder()
    Holder_.config = Config(5, torch.ones(8))
    assert evaluate(mod) == 2.25
    Holder_.config = Config(50, torch.ones(8))
    assert evaluate(mod) == 1.25
    assert len(traces) == 1


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.arange(8.0))
        self.table: torch.Tensor = torch.nn.Buffer(torch.ones(8))
        self.inner: Any = torch.nn.ModuleList([torch.nn.Embedding(8, 1)])
        self.window = 3

    def score_mod(self, score, b, h, q, kv):
        return score + self.bias[q] + self.table[kv] * self.window + self.inner[0].weight[q, 0]

    def forward(self, score, b, h, q, kv):
        return self.score_mod(score, b, h, q, kv)


def test_module_method_and_module_itself(traces):
    module = Module()
    with torch.no_grad():
        module.inner[0].weight.zero_()
    evaluate(module.score_mod)
    module.window = 4
    module.bias.data = torch.zeros(8)
    assert evaluate(module.score_mod) == 1.25 + 4
    module.table = torch.zeros(8)
    assert evaluate(module.score_mod) == 1.25
    assert len(traces) == 1
    assert evaluate(module) == 1.25
    module.window = 1
    assert evaluate(module) == 1.25
    assert {c.name for c in capture(module.score_mod).record.captures} >= {"self.bias", "self.table"}


def test_nested_functions_and_helpers(traces):
    table = torch.arange(9.0)

    def helper(x):
        def inner(y):
            return table[y] + WINDOW

        return inner(x) * 2

    def mod(score, b, h, q, kv):
        scaled = [helper(i) for i in (q, kv)]
        return score + scaled[0] - scaled[1]

    assert evaluate(mod) == 9.25
    table = torch.zeros(9)
    assert evaluate(mod) == 1.25
    assert len(traces) == 1


def test_lambdas_in_lists_and_closures_over_loops(traces):
    masks: list[Any] = [lambda b, h, q, kv, w=w: q - kv < w for w in (9, 2, 8)]

    def mod(b, h, q, kv):
        keep = q >= kv
        for mask in masks:
            keep = keep & mask(b, h, q, kv)
        return keep

    assert not evaluate(mod, mask=True)
    masks[1] = lambda b, h, q, kv: q - kv < 5
    assert evaluate(mod, mask=True)
    masks.append(lambda b, h, q, kv: q < kv)
    assert not evaluate(mod, mask=True)
    assert len(traces) == 3


def test_and_masks_of_different_masks_share_their_code_only():
    from attnc.capture.block_mask import and_masks, or_masks

    def causal(b, h, q, kv):
        return q >= kv

    def window(w):
        return lambda b, h, q, kv: q - kv < w

    assert evaluate(and_masks(causal, window(5)), mask=True)
    assert not evaluate(and_masks(causal, window(4)), mask=True)
    assert not evaluate(and_masks(window(4), causal), mask=True)
    assert evaluate(or_masks(window(4), causal), mask=True)


def test_dicts_by_key():
    tables = {"a": torch.zeros(8), "b": torch.ones(8)}
    which = "a"

    def mod(score, b, h, q, kv):
        return score + tables[which][q]

    assert evaluate(mod) == 1.25
    which = "b"
    assert evaluate(mod) == 2.25
    tables["b"] = torch.full((8,), 3.0)
    assert evaluate(mod) == 4.25


def test_lru_caches():
    @functools.lru_cache
    def table(length):
        return torch.arange(float(length))

    @functools.lru_cache
    def distance(q, kv):
        return q - kv

    def mod(score, b, h, q, kv):
        return score + table(8)[q] + distance(q, kv)

    assert evaluate(mod) == 1.25 + 7 + 4
    table(8).zero_()
    assert evaluate(mod) == 1.25 + 4
    table.cache_clear()
    assert evaluate(mod) == 1.25 + 7 + 4


def test_what_cannot_be_listed_is_traced_each_time(traces):
    class Settings:
        window = 3

    def mod(score, b, h, q, kv):
        return score + Settings.window

    assert evaluate(mod) == 4.25
    Settings.window = 4
    assert evaluate(mod) == 5.25
    found = capture(mod)
    assert found.retraced and "Settings" in found.retraced
    assert len(traces) == 3
    assert capture(mod).record is found.record


def test_assigned_globals_and_attributes_still_happen():
    class Counter:
        calls = 0

        def __call__(self, score, b, h, q, kv):
            self.calls += 1
            return score * self.calls

    mod = Counter()
    first = capture(mod)
    second = capture(mod)
    assert mod.calls == 2 and first.retraced
    assert (first.numbers, second.numbers) == ((1,), (2,))


def test_modules_of_the_user(traces):
    settings: Any = types.ModuleType("settings")
    settings.window, settings.table = 3, torch.ones(8)

    def mod(score, b, h, q, kv):
        return score + settings.window * settings.table[q]

    assert evaluate(mod) == 4.25
    settings.window, settings.table = 4, torch.zeros(8)
    assert evaluate(mod) == 1.25
    assert len(traces) == 1


def test_assigned_outer_variables_and_globals_are_refused():
    count = 0

    def outer(score, b, h, q, kv):
        nonlocal count
        count += 1
        return score

    def outermost(score, b, h, q, kv):
        global WINDOW
        WINDOW = q
        return score

    def own(score, b, h, q, kv):
        total = 0

        def add(x):
            nonlocal total
            total = total + x

        add(q)
        add(kv)
        return score + total

    for mod in (outer, outermost):
        with pytest.raises(UnsupportedModError, match="assigns"):
            capture(mod)
    assert count == 0 and WINDOW == 5
    assert evaluate(own) == 11.25


def test_a_cached_property_is_made_outside_of_the_trace(traces):
    class Lazy:
        @functools.cached_property
        def table(self):
            return torch.arange(8.0) + 1

        def __call__(self, score, b, h, q, kv):
            return score + self.table[q]

    mod = Lazy()
    assert evaluate(mod) == 9.25
    assert torch.equal(mod.table, torch.arange(8.0) + 1)
    assert evaluate(mod) == 9.25
    assert len(traces) == 1


def test_python_attributes_of_tensors():
    table: Any = torch.ones(8)
    table.shift = 2

    def mod(score, b, h, q, kv):
        return score + table[q] + table.shift

    assert evaluate(mod) == 4.25
    table.shift = 5
    assert evaluate(mod) == 7.25


def test_decorated_mods(traces):
    def twice(mod):
        @functools.wraps(mod)
        def wrapped(*args):
            return mod(*args) * 2

        return wrapped

    table = torch.ones(8)

    @twice
    @torch.no_grad()
    def mod(score, b, h, q, kv):
        return score + table[q]

    assert evaluate(mod) == 4.5
    table = torch.zeros(8)
    assert evaluate(mod) == 2.5
    assert len(traces) == 1


def test_iterating_a_row():
    row = torch.arange(4.0)

    def mod(score, b, h, q, kv):
        for element in row:
            score = score + element
        return score

    assert evaluate(mod) == 7.25


def test_numpy_is_read_afresh():
    array = numpy.arange(8.0)

    def mod(score, b, h, q, kv):
        return score + torch.from_numpy(array)[q] + array[3] + numpy.sqrt(WINDOW) * 0 + numpy.pi

    before = evaluate(mod)
    array[3:] = 1
    assert evaluate(mod) < before


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_numbers_are_arguments_of_either_type(traces):
    def make(a, b2):
        return lambda score, b, h, q, kv: (score * a + b2) / (a + 1) + (q // b2) % 3 - kv * (b2 // 2)

    values = {evaluate(make(a, n)).item() for a in (0.5, 2.0) for n in (2, 3, 5)}
    assert len(values) == 5 and len(traces) == 1
    evaluate(make(2, 3))
    assert len(traces) == 2


@pytest.mark.parametrize("value", [True, False, None, "x"])
def test_bools_and_the_like_are_guards(value):
    def make(value):
        return lambda score, b, h, q, kv: score if value else score + 1

    assert evaluate(make(value)) == (1.25 if value else 2.25)
    assert capture(make(0)).record is not capture(make(True)).record or not value


def test_bool_is_no_int():
    def make(value):
        return lambda score, b, h, q, kv: q * value + score

    assert evaluate(make(1)) == 8.25
    assert evaluate(make(True)) == 8.25
    assert evaluate(make(False)) == 1.25
    assert evaluate(make(1.0)) == 8.25


def test_inspected_numbers_are_guards(traces):
    def make(n):
        def mod(score, b, h, q, kv):
            if n > 3:
                score = score + n
            for _ in range(n):
                score = score + 1
            return score

        return mod

    assert [evaluate(make(n)).item() for n in (2, 5, 2, 5)] == [3.25, 11.25, 3.25, 11.25]
    assert len(traces) == 2


def test_a_comparison_guards_its_outcome_alone(traces):
    def make(n):
        return lambda score, b, h, q, kv: score + n if n > 3 else score - n

    assert [evaluate(make(n)).item() for n in (4, 5, 6, 1, 2)] == [5.25, 6.25, 7.25, 0.25, -0.75]
    assert len(traces) == 2


def test_exponents_indices_and_text_are_values():
    table, names = torch.arange(24.0).reshape(4, 6), {1: 10, 2: 20}

    def make(n):
        return lambda score, b, h, q, kv: score**n + table[n, kv] + names[n] + len(f"{n:03d}") + (1, 2, 3)[n]

    for n in (1, 2, 1):
        evaluate(make(n))


def test_a_number_as_an_index_is_an_argument(traces):
    table = torch.arange(24.0).reshape(4, 6)

    def make(n):
        return lambda score, b, h, q, kv: score + table[n][kv] + table[n, n]

    for n in (0, 1, 3, -1):
        evaluate(make(n))
    assert len(traces) == 1


def test_number_types_of_torch_promotion():
    half = torch.ones(8, dtype=torch.bfloat16)

    def make(i, f):
        def mod(score, b, h, q, kv):
            return (
                (q * i).to(torch.float32) + (q * f) + half[q] * f * i + torch.where(q > i, f, i) + torch.maximum(q * 1.0, q * f)
            )

        return mod

    evaluate(make(3, 0.1))
    torch.set_default_dtype(torch.float64)
    try:
        evaluate(make(3, 0.1))
    finally:
        torch.set_default_dtype(torch.float32)


def test_shapes_are_numbers_or_guards(traces):
    table = torch.arange(12.0)

    def mod(score, b, h, q, kv):
        return score + table[(q - kv + table.shape[0] // 2) % table.size(0)]

    evaluate(mod)
    table = torch.arange(20.0)
    evaluate(mod)
    assert len(traces) == 1

    def lengths(score, b, h, q, kv):
        return score + sum(table[i] for i in range(len(table)))

    table = torch.ones(3)
    assert evaluate(lengths) == 4.25
    table = torch.ones(5)
    assert evaluate(lengths) == 6.25


def test_division_by_a_number_that_becomes_zero():
    def make(n):
        return lambda score, b, h, q, kv: score + q // n + (8 // n if n else 0)

    evaluate(make(2))
    capture(make(0))


# -- state of the process ---------------------------------------------------------------------------------------------


def test_other_modes_see_nothing_and_change_nothing():
    class Watch(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Watch.seen += 1
            return func(*args, **(kwargs or {}))

    def mod(score, b, h, q, kv):
        return score + TABLE[q] + torch.arange(4)[b]

    plain = capture(mod).record
    capture_module.clear()
    with Watch():
        assert capture(mod).record == plain
    assert Watch.seen == 0
    with torch.device("meta"), pytest.raises(UnsupportedModError):
        capture(mod)
    with torch.device("cpu"):
        assert capture(mod).record == plain
        assert capture(mod).record == plain
    assert capture(mod).record == plain


def test_very_large_numbers():
    def make(n):
        return lambda score, b, h, q, kv: score + n // (1 << 62)

    assert evaluate(make(1 << 62)) == 2.25
    assert evaluate(make(1 << 64)) == 5.25


def test_autocast_inference_mode_and_grad_mode_leave_no_mark():
    weight = torch.randn(6, 6, requires_grad=True)

    def mod(score, b, h, q, kv):
        return score + (weight[0] @ weight[kv]).float() + weight[1].dot(weight[2])

    plain = capture(mod).record
    capture_module.clear()
    with torch.autocast("cpu", torch.bfloat16):
        assert capture(mod).record == plain
        assert torch.is_autocast_enabled("cpu")
    capture_module.clear()
    with torch.inference_mode():
        assert capture(mod).record == plain
        assert torch.is_inference_mode_enabled()
    capture_module.clear()
    with torch.no_grad():
        assert capture(mod).record == plain
    assert "bfloat16" not in str(plain)


def test_default_dtype_is_part_of_the_key():
    def mod(score, b, h, q, kv):
        return score + q * 0.5

    first = capture(mod).record
    torch.set_default_dtype(torch.float64)
    try:
        assert "float64" in str(capture(mod).record)
    finally:
        torch.set_default_dtype(torch.float32)
    assert capture(mod).record is first


def test_score_dtype():
    def mod(score, b, h, q, kv):
        return score * 2

    record = capture(mod, score_dtype=torch.float64).record
    assert record.score.arguments[0].dtype == "float64"
    assert record is not capture(mod).record


def test_eight_threads():
    def make(n, table):
        return lambda score, b, h, q, kv: score + table[q] * n if n < 12 else score - table[q]

    failures = []

    def work(start):
        try:
            for i in range(60):
                n = (start * 7 + i) % 24
                table = torch.full((8,), float(n))
                found = capture(make(n, table))
                arguments = [torch.tensor(1.0), *(torch.tensor(x, dtype=torch.int32) for x in (1, 2, 7, 3))]
                got = run_record(found.record.score, arguments, found.tensors, found.numbers)
                assert got == 1 + n * n if n < 12 else got == 1 - n
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_nothing_to_capture():
    assert capture(None) == capture(None, None)
    assert capture(lambda score, b, h, q, kv: score).record.score is None
    assert isinstance(capture(None), Captured)


def test_neither_dynamo_nor_sympy_is_imported():
    program = """
import sys, torch
from attnc.capture.capture import capture
from attnc.capture.block_mask import create_block_mask, read_block_mask, and_masks
table, window = torch.zeros(4, 8), 3
def score_mod(score, b, h, q, kv):
    return torch.where(q < window, score + table[h, kv] + table[h].sum(), 0.0) ** 2
def mask_mod(b, h, q, kv):
    return (q >= kv) & (table[b, torch.arange(4)] == 0).any()
capture(score_mod, and_masks(mask_mod, mask_mod))
read_block_mask(create_block_mask(mask_mod, None, None, 64, 64), 1, 1, 64, 64)
assert "torch._dynamo" not in sys.modules and "sympy" not in sys.modules and "xdsl" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
