"""What was wrong once: each test is the smallest call that showed it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

import attnc
from attnc import errors, programs
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
    with pytest.raises(errors.CaptureIndexError, match=r"index 9223372036854775700 .* k=0"):
        attnc.flex_attention(*QKV, lambda s, b, h, q, k: s + BIAS[k.to(torch.int64) + 9223372036854775700])
    with pytest.raises(errors.CaptureIndexError, match=r"index 9223372036854775807 .* k=3"):
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


# -- where a view or a made tensor stands between an index and what is read ------------------------------------------------
HEADS = normal(3)
ROW = normal(24)

OUTSIDE_OF_A_VIEW: dict[str, Callable] = {
    "a column": lambda h, k: HEADS.view(3, 1)[h, k],
    "a new dim": lambda h, k: ROW[None][h, k],
    "expanded": lambda h, k: ROW.expand(2, 24)[h, k],
    "expanded, from the end": lambda h, k: ROW.expand(2, 24)[h - 3, k],
    "flipped": lambda h, k: ROW.flip(0)[k + 1],
    "joined": lambda h, k: torch.cat([ROW[:2], ROW[:5]])[k],
    "stacked": lambda h, k: torch.stack([ROW, ROW])[h, k],
    "computed": lambda h, k: (HEADS[:, None] * 2)[h, k],
}


@pytest.mark.parametrize("name", OUTSIDE_OF_A_VIEW)
def test_an_index_outside_of_a_view_faults(name: str):
    q, k, v = normal(1, 3, 5, 8), normal(1, 3, 24, 8), normal(1, 3, 24, 8)
    with pytest.raises(errors.CaptureIndexError):
        attnc.flex_attention(q, k, v, lambda s, b, h, i, j: s + OUTSIDE_OF_A_VIEW[name](h, j))


# -- division by zero ------------------------------------------------------------------------------------------------------
BYTES = torch.ones(300, dtype=torch.uint8)
BYTES[77] = 0


def fails_at(position: str | None, score_mod: Callable | None, mask_mod: Callable | None = None) -> None:
    if position is None:
        attnc.flex_attention(*QKV, score_mod, mask_mod=mask_mod)
        return
    with pytest.raises(ZeroDivisionError, match=position + "\n"):
        attnc.flex_attention(*QKV, score_mod, mask_mod=mask_mod)


def test_a_division_beyond_the_keys_is_none():
    fails_at(None, lambda s, b, h, q, k: s + q // (k - 300))
    fails_at(None, lambda s, b, h, q, k: s + q % (k - 300))


def test_divisions_of_a_score_count_where_the_mask_keeps():
    fails_at("q=0, k=250", lambda s, b, h, q, k: s + q // (k - 250))
    fails_at(None, lambda s, b, h, q, k: s + q // (k - 250), lambda b, h, q, k: k < 250)
    fails_at("q=4, k=0", lambda s, b, h, q, k: s + k // (q - 4), lambda b, h, q, k: k > 250)


def test_divisions_of_a_mask_count_everywhere():
    fails_at("q=0, k=250", None, lambda b, h, q, k: (k < 7) & (q // (k - 250) < 9))
    fails_at("q=3, k=0", None, lambda b, h, q, k: (q > 7) & (k // (q - 3) < 9))


def test_bytes_divided_by_zero():
    fails_at("q=0, k=77", lambda s, b, h, q, k: s + q.to(torch.uint8) % BYTES[k])
    fails_at("q=0, k=77", lambda s, b, h, q, k: s + q.to(torch.uint8) // BYTES[k])


# -- tiles -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows, keys", [(7, 13), (3, 100), (1, 1)])
def test_a_block_of_keys_need_not_be_whole_vectors(rows: int, keys: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ATTNC_TILE_ROWS", str(rows))
    monkeypatch.setenv("ATTNC_TILE_KEYS", str(keys))
    programs.forget()
    try:
        right(Problem(*QKV))
        right(Problem(*QKV, score_mod=lambda s, b, h, q, k: s + BIAS[k], mask_mod=lambda b, h, q, k: k <= 40 * q))
    finally:
        programs.forget()


# -- sizes and memory ------------------------------------------------------------------------------------------------------
def spread(*shape: int) -> Tensor:
    """One element, seen everywhere."""
    return torch.zeros(1).as_strided(shape, (0, 0, 0, 1))


@pytest.mark.parametrize(
    "batch, heads, queries, keys", [(1, 1, 1, 2**31), (1, 1, 2**31, 1), (1, 2**31, 1, 1), (2**31, 1, 1, 1)]
)
def test_positions_beyond_32_bits_are_refused(batch: int, heads: int, queries: int, keys: int):
    key = spread(batch, heads, keys, 1)
    with pytest.raises(errors.ShapeError, match="=2147483648 is beyond 2147483647"):
        attnc.flex_attention(spread(batch, heads, queries, 1), key, key)


def test_tensors_whose_memory_was_freed_are_refused():
    query, key, value = (normal(1, 1, 4, 8) for _ in range(3))
    table = normal(4)
    for freed in (table, query, key, value):
        freed.untyped_storage().resize_(0)
        with pytest.raises(errors.UnsupportedTensorError, match="was freed"):
            attnc.flex_attention(query, key, value, lambda s, b, h, q, k: s + table[k])


# -- edited text -----------------------------------------------------------------------------------------------------------
def stages() -> dict[str, str]:
    return attnc.lower(*QKV, lambda s, b, h, q, k: (s + BIAS[k]) * 2).stages


def test_a_value_used_before_it_is_defined_has_its_place():
    lines = stages()["torch"].splitlines()
    first = next(n for n, line in enumerate(lines) if "torch.aten.mul" in line)
    swapped = [*lines[: first - 1], lines[first], lines[first - 1], *lines[first + 1 :]]
    with pytest.raises(errors.IRSyntaxError, match="where it is not defined yet") as raised:
        attnc.from_text("\n".join(swapped), "edited.mlir")
    assert f"edited.mlir:{first}:" in str(raised.value)


def test_what_a_pass_stumbles_over_in_edited_text_is_an_error_of_ours():
    text = stages()["convert-torch-to-linalg-ext"]
    assert text.count("dim = 4 : i64") == 1
    with pytest.raises(errors.AttncError):
        attnc.from_text(text.replace("dim = 4 : i64", "dim = 1000000 : i64"))


def test_a_string_that_does_not_end_is_found_at_once():
    text = stages()["torch"]
    with pytest.raises(errors.IRSyntaxError, match=":1:42: error: this string does not end"):
        attnc.from_text(text.replace('"torch"', '"torch' + "a" * 200, 1))


ROWS, SQUARE = normal(300, 4), normal(4, 4)
IN_PLACE: dict[str, Callable] = {
    "vector by matrix": lambda s, b, h, q, k: s + ROWS[q] @ SQUARE @ ROWS[k],
    "linear": lambda s, b, h, q, k: s + torch.nn.functional.linear(ROWS[k], SQUARE).sum(),
    "squeeze_ and unsqueeze_": lambda s, b, h, q, k: s + (ROWS[k] * 2).unsqueeze_(1).squeeze_()[1],
    "t_, then a write": lambda s, b, h, q, k: s + (SQUARE * ROWS[k]).t_().mul_(2)[1].sum(),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_shapes_that_change_in_place(name: str):
    right(Problem(*QKV, score_mod=IN_PLACE[name]))
