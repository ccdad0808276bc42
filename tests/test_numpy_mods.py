"""What mods of `attnc.numpy.attention` may do, capture and change, and what is refused. Runs without torch, too."""

from __future__ import annotations

import functools
import math
import threading
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import attnc.numpy
from attnc import programs
from attnc.capture import numpy_capture
from attnc.errors import (
    AttncError,
    CaptureIndexError,
    DataDependentModError,
    InPlaceModError,
    ModDivisionError,
    ModSignatureError,
    RandomModError,
    UnsupportedModError,
    UnsupportedOpError,
    UnsupportedTensorError,
)

RNG = np.random.default_rng(1)
QUERY, KEY, VALUE = (RNG.standard_normal((2, 2, 9, 8)).astype(np.float32) for _ in range(3))
PLACES = [(b, h, q, k) for b in range(2) for h in range(2) for q in range(9) for k in range(9)]


def modified(score_mod, mask_mod=None) -> np.ndarray:
    """The result, with the mods called on NumPy's own scalars, one place after the other."""
    scores = (QUERY @ KEY.swapaxes(-1, -2)).astype(np.float64) / np.sqrt(8)
    for place in PLACES:
        indices = [np.int32(index) for index in place]
        if mask_mod is not None and not mask_mod(*indices):
            scores[place] = -np.inf
        elif score_mod is not None:
            scores[place] = np.float32(score_mod(np.float32(scores[place]), *indices))
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(top == -np.inf, 0, top))
    total = weights.sum(axis=-1, keepdims=True)
    return weights @ VALUE / np.where(total == 0, 1, total)


def holds(score_mod=None, mask_mod=None) -> None:
    out = attnc.numpy.attention(QUERY, KEY, VALUE, score_mod, mask_mod)
    np.testing.assert_allclose(out, modified(score_mod, mask_mod), rtol=0, atol=2e-5)


@pytest.fixture
def traces(monkeypatch):
    """Counts traces."""
    counted = []
    trace = numpy_capture.trace

    def counting(*args):
        counted.append(args)
        return trace(*args)

    monkeypatch.setattr(numpy_capture, "trace", counting)
    return counted


# -- what mods do ---------------------------------------------------------------------------------------------------------

table = RNG.standard_normal(64).astype(np.float32)
square = RNG.standard_normal((8, 8)).astype(np.float32)
whole = RNG.integers(0, 9, 9)
flags = RNG.random(9) < 0.7
zero_dims, count = np.array(0.5), np.array(3)
structured = np.zeros(9, np.dtype([("a", "f4"), ("b", "i8")]))
structured["a"], structured["b"] = RNG.standard_normal(9), RNG.integers(0, 5, 9)
bfloats: Any = RNG.standard_normal(9).astype(ml_dtypes.bfloat16)
bytes_ = RNG.integers(0, 255, 9).astype(np.uint8)
number, real, strong, narrow = 3, 0.25, np.int64(2), np.float16(1.5)

SCORES = {
    "operators": lambda s, b, h, q, k: +s * 2 - 1 / (abs(s) + 1) + (q - k) ** 2 % 3 - (-k // 2) + (q << 1 | 1 & k ^ 3) + ~h,
    "divmod": lambda s, b, h, q, k: s + divmod(q, 4)[1] * divmod(7, k + 1)[0],
    "float floor": lambda s, b, h, q, k: s // 0.5 + s % 0.75 + np.fmod(s, -0.3),
    "pow": lambda s, b, h, q, k: pow(s, 2) + s**3 + 2**h + 0.5**q + np.float_power(abs(s), 0.3) + np.power(q, 2),
    "functions": lambda s, b, h, q, k: (
        np.tanh(s) + np.exp(-abs(s)) + np.log(s * s + 1)
        + np.sqrt(np.abs(s)) + np.sin(q) + np.cos(s)
    ),
    "more functions": lambda s, b, h, q, k: (
        np.log1p(abs(s)) + np.expm1(s) + np.exp2(s)
        + np.arctan2(s, k + 1) + np.hypot(s, q) + np.cbrt(s)
    ),
    "roundings": lambda s, b, h, q, k: (
        np.floor(s) + np.ceil(s) * np.trunc(s) + np.rint(s * 3)
        + np.round(s, 1) + round(s, 2) + np.sign(s)
    ),
    "bounds": lambda s, b, h, q, k: (
        np.clip(s, -1, number) + np.minimum(s, 0.5)
        + np.maximum(q, k) + np.fmax(s, np.nan) + s.clip(max=1)
    ),
    "where": lambda s, b, h, q, k: np.where(q > k, s, np.where(h == 0, 0.0, -1)) + np.select([s < 0, q > 3], [s * 2, k], 0.5),
    "tests": lambda s, b, h, q, k: np.where(np.isfinite(s / (q - k)) & ~np.isnan(s) | np.signbit(s), s, 0),
    "logic": lambda s, b, h, q, k: (
        s * np.logical_or(q > k, np.logical_not(np.logical_xor(h, b)))
        + np.logical_and.reduce([q > 1, k > 1])
    ),
    "comparisons of other sizes": lambda s, b, h, q, k: s * (q < 2**40) + (q != 2**70) + (k > -(2**33)),
    "half": lambda s, b, h, q, k: np.float16(s) * 0.1 + np.float16(s) // 0.3 + s.astype("f2") ** 2,
    "bfloat16": lambda s, b, h, q, k: bfloats[q] * 3 + bfloats[q] * bfloats[k] + s,
    "conversions": lambda s, b, h, q, k: (
        s.astype(np.float64) + np.float32(q) * np.int8(k)
        + s.astype(bool) + q.astype(s.dtype) + np.float64(1)
    ),
    "small ints": lambda s, b, h, q, k: s + np.sqrt(q.astype(np.int8) + 1) + np.exp(-q.astype(np.int16)) + bytes_[q] // 7,
    "gathers": lambda s, b, h, q, k: s + table[q - k] + square[q % 8, k % 8] + square[h][k % 8] + table[whole[q]] * flags[k],
    "views": lambda s, b, h, q, k: (
        s + table[::-2][q] + square.T[q % 8, 1] + square[1:4, k % 8].sum()
        + square[..., 2][h] + table[None, q][0]
    ),
    "rows": lambda s, b, h, q, k: (
        s + (square[q % 8] * square[k % 8]).sum()
        + np.dot(square[h], square[k % 8]) + square[q % 8] @ square[h]
    ),
    "reductions": lambda s, b, h, q, k: (
        s + square[h].max() - np.min(square[q % 8])
        + square[h].mean() + np.linalg.norm(square[h] - square[2])
    ),
    "more reductions": lambda s, b, h, q, k: (
        s + np.std(square[h]) + square[q % 8].argmax()
        + np.prod(square[h, :2]) + whole[:3].sum()
    ),
    "any": lambda s, b, h, q, k: s * np.any(whole[:4] == k) + np.all(square[h] > -9) + np.count_nonzero(whole == q),
    "index arrays": lambda s, b, h, q, k: s + square[[0, 2], q % 8].sum() + square[:, [1, 3]][k % 8, 0] + np.take(table, q + 1),
    "axes": lambda s, b, h, q, k: s + square.sum(axis=0)[q % 8] + square[:3].max(axis=1)[h] + np.stack([s, s * 2])[h],
    "joined": lambda s, b, h, q, k: s + np.concatenate([table[:2], table[5:6]])[h] + np.array([[1.0, 2.0], [3.0, q]])[h, b],
    "made": lambda s, b, h, q, k: (
        s + np.array([0.5, 1.5])[h] + np.arange(9)[k] * 0.1
        + np.linspace(0, 1, 9, dtype=np.float32)[q]
    ),
    "unpacked": lambda s, b, h, q, k: (
        s + sum(table[:3]) + [x * 2 for x in square[h, :2]][1]
        + len(table) + table.shape[0] * 0.01
    ),
    "numbers": lambda s, b, h, q, k: s * number + real - strong + narrow * s + np.sqrt(number) + max(number, 2) + zero_dims,
    "numbers as values": lambda s, b, h, q, k: (
        s * (2 if number > 2 else 3)
        + sum(table[i] for i in range(strong)) + table[strong] + s**number
    ),
    "a 0-d array as a value": lambda s, b, h, q, k: s * zero_dims + sum(table[i] for i in range(count)) * count,
    "structured": lambda s, b, h, q, k: s + structured["a"][q] * structured["b"][k],
    "constants": lambda s, b, h, q, k: (
        np.where(q < k, -np.inf, s) + np.pi * np.finfo(np.float32).eps
        + (0 if s is None else 1)
    ),
    "sorted": lambda s, b, h, q, k: (
        s + np.searchsorted(np.array([1, 3, 3, 7]), q, side="right")
        + np.searchsorted(np.array([1, 3]), k)
    ),
    "kinds": lambda s, b, h, q, k: s * (2 if isinstance(s, np.floating) and isinstance(table, np.ndarray) else 7),
    "a number": lambda s, b, h, q, k: 1.5,
    "a NumPy number": lambda s, b, h, q, k: np.int64(number),
}  # fmt: skip
MASKS = {
    "causal": lambda b, h, q, k: q >= k,
    "reduced": lambda b, h, q, k: functools.reduce(np.logical_and, [q >= k, q - k < number + 2, flags[k]]),
    "a bool": lambda b, h, q, k: True,
    "a NumPy bool": lambda b, h, q, k: np.bool_(False),
    "flags": lambda b, h, q, k: flags[q] | flags[k] & (k % (h + 1) == b),
    "xor": lambda b, h, q, k: (q > 2) ^ True,
    "three": lambda b, h, q, k: np.any([q > k, k < 2, flags[q]]),
}


@pytest.mark.parametrize("name", SCORES)
def test_score_mod(name):
    with np.errstate(all="ignore"):
        holds(SCORES[name])


@pytest.mark.parametrize("name", MASKS)
def test_mask_mod(name):
    holds(None, MASKS[name])


def test_numpy_may_be_imported_inside():
    def score_mod(s, b, h, q, k):
        import numpy as np
        from numpy import float32, tanh

        return tanh(s) + np.exp(-abs(float32(q)))

    holds(score_mod)


# -- captures -------------------------------------------------------------------------------------------------------------


@dataclass
class Bias:
    table: np.ndarray
    factor: Any

    def __call__(self, s, b, h, q, k):
        return s + self.at(q - k) * self.factor

    def at(self, distance):
        return self.table[distance]


def test_objects_partials_containers_and_defaults():
    holds(Bias(table, 2))
    holds(Bias(table, 0.5).__call__)
    holds(functools.partial(lambda scale, s, b, h, q, k, *, bias: s * scale + bias[q], 2, bias=table))
    tables = {"near": table, "far": [square, (table, 3)]}
    holds(lambda s, b, h, q, k, near=tables["near"]: s + near[q] + tables["far"][0][h, b] * tables["far"][1][1])


def test_what_changes_is_seen_and_compiles_nothing(traces):
    bias, factor, strong_factor, offset = RNG.standard_normal(20).astype(np.float32), 2, np.float64(0.5), 0

    def score_mod(s, b, h, q, k):
        return s + bias[q - k + offset] * factor * strong_factor

    holds(score_mod)
    compiled = programs.compiled
    bias *= 2
    holds(score_mod)
    bias = RNG.standard_normal(33).astype(np.float32)
    factor, strong_factor, offset = -3, np.float64(0.1), 9
    holds(score_mod)
    assert len(traces) == 1 and programs.compiled == compiled
    bias = bias[::-1]
    holds(score_mod)
    assert len(traces) == 2 and programs.compiled == compiled + 1
    bias = RNG.standard_normal(40).astype(np.float32)[::-2]
    holds(score_mod)
    factor = 1.5
    holds(score_mod)
    bias = bias.astype(np.float64)
    holds(score_mod)
    assert len(traces) == 4


def test_values_that_python_looks_at_are_guards(traces):
    count, limit = np.int64(2), 3

    def score_mod(s, b, h, q, k):
        return s + sum(table[i] for i in range(count)) if limit > 2 else s - limit

    holds(score_mod)
    limit = 4
    holds(score_mod)
    assert len(traces) == 1
    count = np.int64(3)
    holds(score_mod)
    limit = 1
    holds(score_mod)
    assert len(traces) == 3


def test_the_content_of_an_array_without_dims_is_a_guard(traces):
    count = np.array(2)

    def score_mod(s, b, h, q, k):
        return s + sum(table[i] for i in range(count)) * count

    holds(score_mod)
    holds(score_mod)
    assert len(traces) == 1
    count[...] = 3
    holds(score_mod)
    assert len(traces) == 2


def test_a_number_beyond_its_dtype_is_numpys_error():
    limit = 5

    def mask_mod(b, h, q, k):
        return q < limit

    holds(None, mask_mod)
    limit = 2**40
    holds(None, mask_mod)

    def score_mod(s, b, h, q, k):
        return s + (q + limit)

    with pytest.raises(OverflowError, match="out of bounds for int32"):
        attnc.numpy.attention(QUERY, KEY, VALUE, score_mod)
    limit = 7
    holds(score_mod)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[::-1],
        lambda x: np.broadcast_to(x[:1], x.shape),
        lambda x: np.frombuffer(b"x" + x.tobytes(), np.float32, offset=1),
        lambda x: np.asfortranarray(np.stack([x, x]))[1],
        lambda x: x.astype(np.float16),
    ],
)
def test_captures_of_any_strides(change):
    bias = change(table)
    bias.flags.writeable = False
    holds(lambda s, b, h, q, k: s + bias[q - k] + bias[q])


# -- indices ----------------------------------------------------------------------------------------------------------------


def test_index_out_of_range():
    bias = table[:9]

    def call(*mods):
        attnc.numpy.attention(QUERY, KEY, VALUE, *mods)

    with pytest.raises(CaptureIndexError, match=r"index 9 .* array 'bias' with size 9, at b=0, h=0, q=1, k=0"):
        call(lambda s, b, h, q, k: s + bias[q + 8 - k])
    with pytest.raises(CaptureIndexError, match=r"np\.clip"):
        call(lambda s, b, h, q, k: s + bias[q * 2])
    holds(lambda s, b, h, q, k: s + bias[q + 8 - k], lambda b, h, q, k: q <= k)  # checked where the mask keeps the pair
    with pytest.raises(CaptureIndexError, match=r"index -10 .* at b=0, h=0, q=0, k=0"):
        call(None, lambda b, h, q, k: bias[q - 10] > 0)
    with pytest.raises(CaptureIndexError, match="index 9 is out of range for dim 0 of captured array 'bias'"):
        call(lambda s, b, h, q, k: s + bias[9])
    with pytest.raises(ModDivisionError, match="at b=0, h=0, q=0, k=3"):
        call(lambda s, b, h, q, k: s + q // (k - 3))


# -- refusals -----------------------------------------------------------------------------------------------------------------

numbers_of_python = [1.0, 2.0, 3.0]
foreign = table.astype(">f4")
masked = np.ma.masked_array(table, table > 0)
objects = np.array([1, None], object)
unsigned = np.arange(9, dtype=np.uint32)
generator = np.random.default_rng()


class Tensor:
    """An array of another library."""

    def __array__(self, dtype=None, copy=None):
        return table


tensor: Any = Tensor()


def writes(s, b, h, q, k):
    table[0] = 1
    return s


def adds_in_place(s, b, h, q, k):
    global table
    table += 1
    return s


REFUSED: dict[str, tuple[Any, type[AttncError], str]] = {
    "if": (lambda s, b, h, q, k: s if q > k else 0, DataDependentModError, r"np\.where\(condition, a, b\) instead of `if`"),
    "and": (lambda s, b, h, q, k: s * (q > k and k > 1), DataDependentModError, r"& \| ~ instead of `and` `or` `not`"),
    "chained": (lambda s, b, h, q, k: s * (0 <= q - k < 3), DataDependentModError, r"\(a <= x\) & \(x < b\)"),
    "min": (lambda s, b, h, q, k: min(s, 1.0), DataDependentModError, "np.minimum"),
    "math": (lambda s, b, h, q, k: math.exp(s), DataDependentModError, "np.exp instead of math.exp"),
    "int": (lambda s, b, h, q, k: s * int(q), DataDependentModError, r"astype\(np.int32\)"),
    "list": (lambda s, b, h, q, k: s * numbers_of_python[h], DataDependentModError, r"np.asarray\(list\)"),
    "item": (lambda s, b, h, q, k: s * table[0].item(), DataDependentModError, r"\.item\(\)"),
    "in": (lambda s, b, h, q, k: s * (q in whole), DataDependentModError, r"np\.any\(row == value\)"),
    "bool index": (lambda s, b, h, q, k: s + table[q > k], DataDependentModError, "selects elements by a bool"),
    "slice": (lambda s, b, h, q, k: s + table[q : q + 2].sum(), DataDependentModError, "np.arange"),
    "float index": (lambda s, b, h, q, k: s + table[q / 2], UnsupportedModError, "float64"),
    "np.random": (lambda s, b, h, q, k: s + np.random.rand(), RandomModError, "before the call"),  # noqa: NPY002
    "generator": (lambda s, b, h, q, k: s + generator.random(), RandomModError, "generator"),
    "cumsum": (lambda s, b, h, q, k: s + np.cumsum(table[:4])[h], UnsupportedOpError, "np.cumsum"),
    "long constant": (lambda s, b, h, q, k: s + np.linspace(0, 1, 99)[q], UnsupportedModError, "capture it"),
    "method": (lambda s, b, h, q, k: s + table.cumsum()[h], UnsupportedModError, r"\.cumsum"),
    "accumulate": (lambda s, b, h, q, k: s + np.add.accumulate(table[:4])[h], UnsupportedOpError, "np.add.accumulate"),
    "out": (lambda s, b, h, q, k: np.add(s, 1, out=table[:1]), InPlaceModError, "out="),
    "writes": (writes, InPlaceModError, "writes into an array"),
    "adds in place": (adds_in_place, InPlaceModError, "captured array in place"),
    "complex": (lambda s, b, h, q, k: s * 1j, UnsupportedModError, "complex"),
    "uint32": (lambda s, b, h, q, k: s + np.uint32(q), UnsupportedModError, "computes in uint32"),
    "foreign bytes": (lambda s, b, h, q, k: s + foreign[q], UnsupportedTensorError, "foreign byte order"),
    "masked": (lambda s, b, h, q, k: s + masked[q], UnsupportedTensorError, "MaskedArray"),
    "objects": (lambda s, b, h, q, k: s + objects[h], UnsupportedTensorError, "dtype object"),
    "unsigned": (lambda s, b, h, q, k: s + unsigned[q], UnsupportedTensorError, "uint32"),
    "a tensor": (lambda s, b, h, q, k: s + tensor[q], UnsupportedTensorError, "capture numpy.asarray"),
    "returns None": (lambda s, b, h, q, k: None, ModSignatureError, "NoneType"),
    "returns a row": (lambda s, b, h, q, k: square[h], ModSignatureError, "not a scalar"),
    "generates": (lambda s, b, h, q, k: (yield s), ModSignatureError, "generator"),
    "arguments": (lambda s, b, h: s, ModSignatureError, "takes 3 arguments, not 5"),
    "a mask": (lambda b, h, q, k: q > k, ModSignatureError, "pass it as mask_mod="),
    "no callable": (3, ModSignatureError, "no callable"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    mod, error, words = REFUSED[name]
    with pytest.raises(error, match=words) as caught:
        attnc.numpy.attention(QUERY, KEY, VALUE, mod)
    if name != "no callable":
        assert caught.value.filename == __file__


def test_a_mask_is_bool():
    for mask_mod in (lambda b, h, q, k: q - k, lambda b, h, q, k: 1):
        with pytest.raises(ModSignatureError, match="compare: return x != 0"):
            attnc.numpy.attention(QUERY, KEY, VALUE, None, mask_mod)


def test_numpys_own_errors_are_numpys_own():
    with pytest.raises(TypeError, match="boolean subtract"):
        attnc.numpy.attention(QUERY, KEY, VALUE, lambda s, b, h, q, k: s * ((q > k) - (k > q)))
    with pytest.raises(ValueError, match="negative integer powers"):
        attnc.numpy.attention(QUERY, KEY, VALUE, lambda s, b, h, q, k: s + q**-1)


# -- threads ------------------------------------------------------------------------------------------------------------------


def test_the_same_bits_on_every_number_of_threads(monkeypatch):
    query, key = (RNG.standard_normal((1, 4, n, 32)).astype(np.float32) for n in (300, 700))
    results = []
    for count in ("1", "2", "5"):
        monkeypatch.setenv("ATTNC_THREADS", count)
        results.append(
            attnc.numpy.attention(query, key, key, SCORES["gathers"] and (lambda s, b, h, q, k: s + table[(q - k) % 64]))
        )
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_many_threads_at_once():
    failures = []

    def work(seed: int) -> None:
        bias = np.random.default_rng(seed).standard_normal(9).astype(np.float32)
        for _ in range(5):
            try:
                holds(lambda s, b, h, q, k: s + bias[q] * seed)
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
