"""What was wrong once: each test is the smallest call that showed it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

import attnc
from attnc import errors
from oracle import Problem, check

GENERATOR = torch.Generator().manual_seed(5)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


def right(problem: Problem) -> None:
    """Compiled, `problem` gives what the oracle gives."""
    out, aux = attnc.flex_attention(
        problem.query,
        problem.key,
        problem.value,
        problem.score_mod,
        problem.block_mask,
        problem.scale,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True, max_scores=True),
        mask_mod=problem.mask_mod,
    )
    check(problem, out, aux.lse, aux.max_scores)


QKV = normal(1, 2, 9, 8), normal(1, 2, 300, 8), normal(1, 2, 300, 8)
BIAS = normal(300)
LONG_BIAS = normal(40000)
INT8 = torch.tensor(100, dtype=torch.int8)

WRAPPING: dict[str, Callable] = {
    "int8": lambda s, b, h, q, k: s + BIAS[(k + 3).to(torch.int8).to(torch.int64)],
    "int8 by way of int32": lambda s, b, h, q, k: s + BIAS[(k + 3).to(torch.int8).to(torch.int32)],
    "int8 sum": lambda s, b, h, q, k: s + BIAS[(k.to(torch.int8) + INT8).to(torch.int32)],
    "int8 reversed": lambda s, b, h, q, k: s + BIAS[(INT8 - k.to(torch.int8)).to(torch.int32)],
    "int8 widened, then moved": lambda s, b, h, q, k: s + BIAS[(k + 3).to(torch.int8).to(torch.int32) + 140],
    "int8 widened, then a value": lambda s, b, h, q, k: s + ((k + 3).to(torch.int8).to(torch.int32) + 1) * 0.01,
    "int8 to int16 to int32": lambda s, b, h, q, k: s + BIAS[(k + 3).to(torch.int8).to(torch.int16).to(torch.int32)],
    "int16": lambda s, b, h, q, k: s + LONG_BIAS[(k + 32747).to(torch.int16).to(torch.int32)],
    "int32 to int64": lambda s, b, h, q, k: s + ((k + 2147483500).to(torch.int64) + 1).sign() * 0.1,
}


@pytest.mark.parametrize("name", WRAPPING)
def test_lanes_that_wrap_around_in_a_narrow_type_are_no_run(name: str):
    right(Problem(*QKV, score_mod=WRAPPING[name]))


def test_an_index_that_wraps_around_in_64_bits_is_out_of_range():
    with pytest.raises(errors.CaptureIndexError, match="index 9223372036854775700 .* k=0"):
        attnc.flex_attention(*QKV, lambda s, b, h, q, k: s + BIAS[k.to(torch.int64) + 9223372036854775700])
    with pytest.raises(errors.CaptureIndexError, match="index 9223372036854775807 .* k=3"):
        attnc.flex_attention(
            *QKV, lambda s, b, h, q, k: s + BIAS[k.to(torch.int64) + 9223372036854775804], mask_mod=lambda b, h, q, k: k >= 3
        )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_the_least_integer_by_minus_one(dtype: torch.dtype):
    least, minus_one = torch.tensor(torch.iinfo(dtype).min, dtype=dtype), torch.tensor(-1, dtype=dtype)

    def quotient(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ((least + k * 0) // (minus_one + q * 0) == least) * 1.0

    def rest(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ((least + k * 0) % (minus_one + q * 0)) * 1.0

    for mod, wanted in ((quotient, 1.0), (rest, 0.0)):
        _, aux = attnc.flex_attention(*QKV, mod, return_aux=AuxRequest(max_scores=True))
        assert (aux.max_scores == wanted).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operation", [torch.remainder, torch.fmod])
def test_a_number_is_rounded_to_the_half_type_that_it_divides(dtype: torch.dtype, operation: Callable):
    table = normal(200, dtype=dtype)
    query = torch.zeros(1, 1, 200, 1)
    one = torch.zeros(1, 1, 1, 1)
    _, aux = attnc.flex_attention(
        query, one, one, lambda s, b, h, q, k: operation(table[q], 0.3).float(), return_aux=AuxRequest(max_scores=True)
    )
    assert torch.equal(aux.max_scores.flatten(), torch.stack([operation(x, 0.3) for x in table]).float())
