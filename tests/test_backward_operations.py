"""The derivative of every operation that a score mod may use, against torch's autograd, on edge values and at kinks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor

from attnc.capture.capture import capture
from attnc.transforms.convert_torch_to_linalg_ext_mods import interpret
from attnc.transforms.convert_torch_to_linalg_ext_table import OPERATIONS
from derivative_interpreter import autograd, derivative
from random_mods import TENSORS, RandomMod, score_mods
from random_mods import capture as capture_of

assert interpret  # the import fills the table

EDGES = torch.tensor(
    [0.0, 0.5, -0.5, 1.0, -1.0, 1.5, 2.0, -2.0, 3.0, -3.0, 6.0, 0.1, -0.3, 20.5, -20.5, 90.0, -100.0, 750.0, -750.0, 1e-3, 1e5],
    dtype=torch.float64,
)
INSIDE = torch.tensor([0.0, 0.5, -0.5, 0.1, -0.3, 0.999, -0.75, 0.25], dtype=torch.float64)
POSITIVE = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 0.1, 20.5, 300.0, 1e-3, 1e5], dtype=torch.float64)
ABOVE_ONE = torch.tensor([1.5, 2.0, 3.0, 20.5, 1e9, 1.001], dtype=torch.float64)

UNARY: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "neg": (torch.neg, EDGES),
    "abs": (torch.abs, EDGES),
    "sign": (torch.sign, EDGES),
    "sgn": (torch.sgn, EDGES),
    "square": (torch.square, EDGES),
    "reciprocal": (torch.reciprocal, POSITIVE),
    "clone": (torch.clone, EDGES),
    "detach": (lambda x: x.detach() * x, EDGES),
    "exp": (torch.exp, EDGES[:-3]),
    "exp2": (torch.exp2, EDGES),
    "expm1": (torch.expm1, EDGES[:-3]),
    "log": (torch.log, POSITIVE),
    "log2": (torch.log2, POSITIVE),
    "log10": (torch.log10, POSITIVE),
    "log1p": (torch.log1p, POSITIVE),
    "sqrt": (torch.sqrt, POSITIVE),
    "rsqrt": (torch.rsqrt, POSITIVE),
    "sin": (torch.sin, EDGES),
    "cos": (torch.cos, EDGES),
    "tan": (torch.tan, EDGES),
    "asin": (torch.asin, INSIDE),
    "acos": (torch.acos, INSIDE),
    "atan": (torch.atan, EDGES),
    "sinh": (torch.sinh, EDGES[:-4]),
    "cosh": (torch.cosh, EDGES[:-4]),
    "tanh": (torch.tanh, EDGES),
    "asinh": (torch.asinh, EDGES),
    "acosh": (torch.acosh, ABOVE_ONE),
    "atanh": (torch.atanh, INSIDE),
    "erf": (torch.erf, EDGES),
    "deg2rad": (torch.deg2rad, EDGES),
    "rad2deg": (torch.rad2deg, EDGES),
    "sinc": (torch.sinc, EDGES),
    "floor": (torch.floor, EDGES),
    "ceil": (torch.ceil, EDGES),
    "trunc": (torch.trunc, EDGES),
    "round": (torch.round, EDGES),
    "round.decimals": (lambda x: torch.round(x, decimals=1), EDGES),
    "frac": (torch.frac, EDGES),
    "sigmoid": (torch.sigmoid, EDGES),
    "silu": (F.silu, EDGES),
    "gelu": (F.gelu, EDGES),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), EDGES),
    "relu": (F.relu, EDGES),
    "hardtanh": (F.hardtanh, EDGES),
    "relu6": (F.relu6, EDGES),
    "leaky_relu": (F.leaky_relu, EDGES),
    "hardshrink": (F.hardshrink, EDGES),
    "softshrink": (F.softshrink, EDGES),
    "elu": (F.elu, EDGES),
    "selu": (F.selu, EDGES),
    "celu": (lambda x: F.celu(x, 1.5), EDGES),
    "softplus": (lambda x: F.softplus(x, 2.0, 15.0), EDGES),
    "hardsigmoid": (F.hardsigmoid, EDGES),
    "hardswish": (F.hardswish, EDGES),
    "mish": (F.mish, EDGES),
    "log_sigmoid": (F.logsigmoid, EDGES),
    "softsign": (F.softsign, EDGES),
    "logit": (torch.logit, torch.tensor([0.1, 0.5, 0.9, 1e-3], dtype=torch.float64)),
    "logit eps": (lambda x: torch.logit(x, eps=0.1), torch.tensor([0.05, 0.1, 0.5, 0.9, 0.99], dtype=torch.float64)),
    "clamp": (lambda x: x.clamp(-0.5, 1.5), EDGES),
    "clamp_min": (lambda x: x.clamp_min(1.0), EDGES),
    "clamp_max": (lambda x: x.clamp_max(1.0), EDGES),
    "threshold": (lambda x: F.threshold(x, 0.5, 7.0), EDGES),
    "nan_to_num": (torch.nan_to_num, EDGES),
    "pow 2": (lambda x: x**2, EDGES),
    "pow 3": (lambda x: x**3, EDGES),
    "pow 0": (lambda x: x**0 * x, EDGES),
    "pow 1": (lambda x: x**1, EDGES),
    "pow 2.5": (lambda x: x**2.5, torch.cat([POSITIVE, torch.zeros(1, dtype=torch.float64)])),
    "pow 4": (lambda x: x**4, EDGES),
    "pow -1": (lambda x: x**-1, POSITIVE),
    "pow -2": (lambda x: x**-2, POSITIVE),
    "pow 0.5": (lambda x: x**0.5, POSITIVE),
    "pow -0.5": (lambda x: x**-0.5, POSITIVE),
    "pow of 2": (lambda x: 2.0**x, EDGES[:-4]),
    "pow of 3": (lambda x: 3.0**x, EDGES[:-4]),
    "rsub": (lambda x: 1.0 - x, EDGES),
    "lerp": (lambda x: torch.lerp(x, 2 * x, 0.3), EDGES),
    "to f32": (lambda x: x.float() * 2, EDGES),
    "where": (lambda x: torch.where(x > 0, x * 3, x * x), EDGES),
    "masked_fill": (lambda x: (x * x).masked_fill(x > 1, 0.5), EDGES),
    "_softmax": (lambda x: torch.stack([x, 2 * x, -x]).softmax(0)[1], EDGES[:-4]),
    "_log_softmax": (lambda x: torch.stack([x, 2 * x, -x]).log_softmax(0)[2], EDGES[:-4]),
    "logsumexp": (lambda x: torch.stack([x, 2 * x, -x]).logsumexp(0), EDGES[:-4]),
    "mean": (lambda x: torch.stack([x, x * x, x * 3]).mean(), EDGES),
    "stack": (lambda x: (torch.stack([x, x * x])[None] * 2).sum(), EDGES),
    "var": (lambda x: torch.stack([x, x * x, x * 3]).var(), EDGES),
    "std": (lambda x: torch.stack([x, x * x, x * 3]).std(), EDGES),
    "prod": (lambda x: torch.stack([x, x - 1, x * 3]).prod(), EDGES),
    "norm": (lambda x: torch.linalg.vector_norm(torch.stack([x, x * x])), EDGES),
    "norm 1": (lambda x: torch.linalg.vector_norm(torch.stack([x, x * x]), 1), EDGES),
    "norm 3": (lambda x: torch.linalg.vector_norm(torch.stack([x, x * x, x]), 3), POSITIVE),
    "norm inf": (lambda x: torch.linalg.vector_norm(torch.stack([x, -x, x / 2]), float("inf")), EDGES),
    "amax": (lambda x: torch.stack([x, x * x, x]).amax(), EDGES),
    "amin": (lambda x: torch.stack([x, x * x, x]).amin(), EDGES),
    "max.dim": (lambda x: torch.stack([x, x * 3.0 + 0.1, x + 0.7]).max(0)[0], EDGES),
    "min.dim": (lambda x: torch.stack([x, x * 3.0 + 0.1, x + 0.7]).min(0)[0], EDGES),
}  # fmt: skip

BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: torch.add(x, y, alpha=2.5),
    "sub": lambda x, y: torch.sub(x, y, alpha=2.5),
    "rsub": lambda x, y: torch.rsub(x, y, alpha=1.5),
    "mul": torch.mul,
    "div": torch.div,
    "div floor": lambda x, y: torch.div(x, y, rounding_mode="floor") * x,
    "div trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc") * y,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "clamp.Tensor": lambda x, y: x.clamp(y, y + 1),
    "clamp_min.Tensor": lambda x, y: x.clamp_min(y),
    "clamp_max.Tensor": lambda x, y: x.clamp_max(y),
    "copysign": torch.copysign,
    "atan2": torch.atan2,
    "logaddexp": torch.logaddexp,
    "hypot": torch.hypot,
    "xlogy": lambda x, y: torch.xlogy(x, y.abs() + 0.5),
    "pow": lambda x, y: torch.pow(x.abs().clamp(0, 4), (y / 16).clamp(-3, 3)),
    "addcmul": lambda x, y: torch.addcmul(x, y, x, value=0.5),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, x.abs() + 1, value=0.5),
    "lerp.Tensor": lambda x, y: torch.lerp(x, y, y * 0.1),
    "_prelu_kernel": lambda x, y: F.prelu(x[None], y[None])[0],
    "where": lambda x, y: torch.where(x > y, x * y, y - x),
    "where guarded": lambda x, y: torch.where(x > 0, x, 1.0).log() * y,
    "comparison": lambda x, y: (x > y) * x + (x == y) * y,
    "dot": lambda x, y: torch.dot(torch.stack([x, y, x]), torch.stack([y, y * y, x])),
    "matmul": lambda x, y: (torch.stack([x, y])[None] @ torch.stack([y, x])[:, None])[0, 0],
    "cat": lambda x, y: torch.cat([x[None], y[None] * x]).sum(),
}


def compare(what: str, actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    """Where autograd gives a number, it is the same; where it gives NaN, a branch not taken may have given 0 instead."""
    known = ~expected.isnan()
    same = torch.where(expected.isinf(), actual == expected, True)
    assert same.all(), f"{what}: {actual[~same]} for {expected[~same]}"
    finite = expected.isfinite()
    error = torch.where(finite, (actual - expected).abs() / expected.abs().clamp_min(1), 0)
    assert known.any() or expected.numel() == 0, f"{what}: nothing to compare"
    wrong = ~(error <= tolerance)
    assert not wrong.any(), f"{what}: {actual[wrong]} for {expected[wrong]}, first at {wrong.nonzero()[:3].tolist()}"


def check(mod: Callable[..., Tensor], captured: list[Tensor], scores: Tensor, tolerance: float = 1e-9) -> None:
    d_modified = torch.linspace(0.5, 1.5, scores.numel(), dtype=torch.float64).reshape(scores.shape)
    d_score, of_captures = derivative(mod, captured, scores, d_modified)
    exact_score, exact_captures = autograd(mod, captured, scores, d_modified)
    compare("score", d_score, exact_score, tolerance)
    floats = [found for found, tensor in zip(of_captures, captured, strict=True) if tensor.is_floating_point()]
    for found, exact in zip(floats, exact_captures, strict=True):
        assert found is not None
        compare("captured", found, exact)


@pytest.mark.parametrize("name", UNARY)
def test_unary(name):
    function, values = UNARY[name]
    # torch multiplies by a sixth that is rounded to f32.
    check(lambda score, b, h, q, k: function(score), [], values[:, None], 1e-7 if name == "hardsigmoid" else 1e-9)


def combinations(values: Tensor) -> tuple[Tensor, Tensor]:
    return values[:, None].expand(-1, len(values)), values


@pytest.mark.parametrize("name", BINARY)
def test_binary(name):
    scores, table = combinations(EDGES[:14])
    if name in ("div", "div floor", "div trunc", "remainder", "fmod"):
        # A zero divisor has no derivative, and torch's quotients are rounded up to the next integer.
        table = torch.where(table * 8 % 1 == 0, table, 0.625).where(table != 0, 0.75)
    function = BINARY[name]
    check(lambda score, b, h, q, k: function(score, table[k]), [table], scores.contiguous())


SMALL = torch.tensor([0.3, -0.7, 1.0, 2.0, 0.0, -1.5], dtype=torch.float64)
ROWS = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
COLUMNS = torch.randn(6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TIES = torch.tensor([[1.0, 2.0, 2.0, 0.5, 2.0, 1.0]] * 3 + [[0.0, 0.0, 0.0, 0.0, 0.0, 0.0]] * 2, dtype=torch.float64)
NUMBERS = torch.tensor([2, 0, 1, -1, 3], dtype=torch.int64)

READING: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "one": (lambda s, b, h, q, k: s * ROWS[q, k], [ROWS]),
    "negative index": (lambda s, b, h, q, k: s + ROWS[q - k, -1] * s, [ROWS]),
    "twice": (lambda s, b, h, q, k: ROWS[q, 0] * ROWS[k, 1] + s, [ROWS]),
    "through another": (lambda s, b, h, q, k: s + ROWS[NUMBERS[k], 2] ** 2, [ROWS, NUMBERS]),
    "dot": (lambda s, b, h, q, k: s + torch.dot(ROWS[q], COLUMNS[k]), [ROWS, COLUMNS]),
    "dot and tanh": (lambda s, b, h, q, k: torch.tanh(s * torch.dot(ROWS[q], COLUMNS[k])), [ROWS, COLUMNS]),
    "sum of functions": (lambda s, b, h, q, k: (torch.sin(ROWS[q] * s) + COLUMNS[k]).sum(), [ROWS, COLUMNS]),
    "sum of squares": (lambda s, b, h, q, k: s - ((ROWS[q] - COLUMNS[k]) ** 2).sum().sqrt(), [ROWS, COLUMNS]),
    "norm": (lambda s, b, h, q, k: s - torch.linalg.vector_norm(ROWS[q] - ROWS[k]), [ROWS]),
    "norm inf": (lambda s, b, h, q, k: s * torch.linalg.vector_norm(TIES[q], float("inf")), [TIES]),
    "mean": (lambda s, b, h, q, k: s * (ROWS[q] * s).mean(), [ROWS]),
    "variance": (lambda s, b, h, q, k: s * (ROWS[q] * s).var(), [ROWS]),
    "deviation": (lambda s, b, h, q, k: s * ROWS[q].std(correction=0) * TIES[k].std(), [ROWS, TIES]),
    "product": (lambda s, b, h, q, k: s * (ROWS[q] + COLUMNS[k]).prod(), [ROWS, COLUMNS]),
    "product of zeros": (lambda s, b, h, q, k: s * (TIES[q] * COLUMNS[k]).prod(), [TIES, COLUMNS]),
    "amax": (lambda s, b, h, q, k: s * TIES[q].amax() + (ROWS[q] * s).amax(), [TIES, ROWS]),
    "amin": (lambda s, b, h, q, k: s * TIES[q].amin(), [TIES]),
    "max": (lambda s, b, h, q, k: s * COLUMNS[q].max() * ROWS[k].min(), [COLUMNS, ROWS]),
    "max.dim": (lambda s, b, h, q, k: s * ROWS[q].max(0)[0] + ROWS[k].min(dim=0).values, [ROWS]),
    "argmax": (lambda s, b, h, q, k: s * ROWS[q, ROWS[q].argmax()], [ROWS]),
    "softmax": (lambda s, b, h, q, k: s * (ROWS[q] * s).softmax(0)[3], [ROWS]),
    "log_softmax": (lambda s, b, h, q, k: s + ROWS[q].log_softmax(0)[k], [ROWS]),
    "logsumexp": (lambda s, b, h, q, k: (ROWS[q] + s).logsumexp(0), [ROWS]),
    "matrix": (lambda s, b, h, q, k: s + torch.dot(COLUMNS @ ROWS[q], COLUMNS[k]), [ROWS, COLUMNS]),
    "mv": (lambda s, b, h, q, k: s + (COLUMNS @ ROWS[q])[k], [ROWS, COLUMNS]),
    "addmv": (
        lambda s, b, h, q, k: s + torch.addmv(ROWS[q], COLUMNS, COLUMNS[k], beta=0.5, alpha=2.0)[1],
        [ROWS, COLUMNS],
    ),
    "embedding": (lambda s, b, h, q, k: s * F.embedding(NUMBERS[0], COLUMNS).sum(), [COLUMNS, NUMBERS]),
    "slice": (lambda s, b, h, q, k: s * ROWS[q, 1:4].sum() + COLUMNS[1:][k - 1, 0], [ROWS, COLUMNS]),
    "flip, roll": (lambda s, b, h, q, k: s * ROWS[q].flip(0)[k] + ROWS[q].roll(2, 0)[k], [ROWS]),
    "diagonal, roll": (lambda s, b, h, q, k: s * COLUMNS.diagonal()[k % 3] + COLUMNS.roll(3)[k % 3, 1], [COLUMNS]),
}  # fmt: skip


@pytest.mark.parametrize("name", READING)
def test_captured(name):
    mod, captured = READING[name]
    scores = SMALL[None, :] * torch.tensor([1.0, -0.5, 2.0, 0.25, 1.5], dtype=torch.float64)[:, None]
    check(
        mod, captured, scores[:, :5] if name in ("twice", "norm", "max", "max.dim", "deviation", "through another") else scores
    )


def test_what_torch_does_not_differentiate():
    """Floor division and heaviside are steps: no gradient passes."""
    half, ones = torch.tensor(0.5, dtype=torch.float64), torch.ones_like(EDGES)[:, None]
    for mod in (lambda s, b, h, q, k: s // 0.75 + 2 * s, lambda s, b, h, q, k: torch.heaviside(s, half.detach()) + 2 * s):
        d_score, _ = derivative(mod, [half], EDGES[:, None], ones)
        assert (d_score == 2).all()


@settings(max_examples=40, deadline=None)
@given(score_mods())
def test_random_mods(score_mod: RandomMod):
    mod = score_mod.function(torch.float64)
    captured = [capture_of(name, True) for name in TENSORS]
    scores = torch.linspace(-3, 3, 5 * 7, dtype=torch.float64).reshape(5, 7) ** 3 / 9
    d_modified = torch.linspace(0.5, 1.5, 35, dtype=torch.float64).reshape(5, 7)
    d_score, of_captures = derivative(mod, captured, scores, d_modified)
    exact_score, exact_captures = autograd(mod, captured, scores, d_modified)
    compare("score", d_score, exact_score)
    floats = [(found, tensor) for found, tensor in zip(of_captures, captured, strict=True) if tensor.is_floating_point()]
    for (found, tensor), exact in zip(floats, exact_captures, strict=True):
        if found is not None and tensor.dtype == torch.float64:  # torch rounds the gradients of halves
            compare("captured", found, exact)


# Tables of what is not computed with floats; and names of what another name tries, for it is built by the same code.
SKIPPED_SECTIONS = {"Arithmetic on Python numbers", "Bits", "Comparison and logic", "Making", "Views", "Indexing", "Joining"}
SAME = {
    *("clone", "alias", "contiguous", "lift", "lift_fresh", "lift_fresh_copy", "positive"),
    *("_to_copy", "prims", "type_as", "_autocast_to_full_precision", "_autocast_to_reduced_precision"),
    *("all", "any", "argmin", "count_nonzero"),
    *("bmm", "matmul", "inner", "vdot", "addmm", "baddbmm", "norm", "softmax", "log_softmax", "log_sigmoid_forward"),
    *("floor_divide", "heaviside", "relu6", "softsign", "square"),
}


def test_operations_are_all_tried():
    """Each operation of the table that computes with floats is in one of the mods above."""
    tried: set[str] = set()
    mods: list[Callable[..., Tensor]] = [lambda s, b, h, q, k, f=function: f(s) for function, _ in UNARY.values()]
    mods += [lambda s, b, h, q, k, f=function: f(s, EDGES[k]) for function in BINARY.values()]
    mods += [mod for mod, _ in READING.values()]
    for mod in mods:
        score = capture(mod, None, score_dtype=torch.float64).record.score
        tried |= {op.name.removeprefix("aten.").split(".")[0] for op in (score.ops if score is not None else ())}
    wanted = {name.split(".")[0] for name, entry in OPERATIONS.items() if entry.section not in SKIPPED_SECTIONS}
    assert wanted - tried <= SAME, sorted(wanted - tried - SAME)
