"""attnc.lower and attnc.from_text: the text of any stage is the program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import attnc
from attnc import errors, pipeline

GENERATOR = torch.Generator().manual_seed(0)
QUERY, KEY, VALUE = (torch.randn(2, 4, 37, 16, generator=GENERATOR) for _ in range(3))
SLOPES = torch.rand(4, generator=GENERATOR)
STAGES = ("torch", *pipeline.STAGES)


def compiled_of(lowered: attnc.Lowered) -> Any:
    return lowered.compile()


def alibi(score, b, h, q, k):
    return score + SLOPES[h] * (k - q)


def causal(b, h, q, k):
    return q >= k


def expected(slope_sign: float = 1.0, offset: int = 0) -> torch.Tensor:
    """f64; `offset` moves the causal diagonal, `slope_sign` scales the slopes."""
    q, k = torch.arange(37)[:, None], torch.arange(37)
    scores = QUERY.double() @ KEY.double().transpose(-1, -2) / 4
    scores = scores + slope_sign * SLOPES.double()[:, None, None] * (k - q)
    return torch.softmax(scores.masked_fill(q + offset < k, -torch.inf), -1) @ VALUE.double()


@pytest.fixture(scope="module")
def lowered() -> attnc.Lowered:
    return attnc.lower(QUERY, KEY, VALUE, alibi, mask_mod=causal)


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (actual.double() - wanted).abs().max().item() < 1e-5


def test_stages_in_order(lowered: attnc.Lowered):
    assert tuple(lowered.stages) == STAGES
    for name, text in lowered.stages.items():
        assert f'attnc.stage = "{name}"' in text
    assert "@attention.work" in lowered.llvm_ir and len(lowered.assembly) > 1000


def test_what_is_printed_of_it_is_short(lowered: attnc.Lowered):
    assert repr(lowered) == "Lowered(torch → … → decompose-attention)"
    assert repr(attnc.from_text(lowered.stages[STAGES[-1]])) == "Lowered(decompose-attention)"
    assert repr(compiled_of(lowered)).startswith("CompiledAttention(query: f32[?, ?, ?, 16], key: f32[?, ?, ?, 16], ")


def test_empty_text():
    for text in ("", " \n"):
        with pytest.raises(errors.IRSyntaxError, match="the text is empty"):
            attnc.from_text(text)


def test_lower_is_what_flex_attention_runs(lowered: attnc.Lowered):
    out = attnc.flex_attention(QUERY, KEY, VALUE, alibi, mask_mod=causal)
    close(out, expected())
    assert torch.equal(compiled_of(lowered)(QUERY, KEY, VALUE), out)


@pytest.mark.parametrize("stage", STAGES)
def test_every_stages_text_is_the_program(lowered: attnc.Lowered, stage: str):
    again = attnc.from_text(lowered.stages[stage])
    assert next(iter(again.stages)) == stage
    assert list(again.stages.items())[-1] == list(lowered.stages.items())[-1]
    assert again.llvm_ir == lowered.llvm_ir
    out = compiled_of(again)(QUERY, KEY, VALUE, captures=[SLOPES])
    assert torch.equal(out, compiled_of(lowered)(QUERY, KEY, VALUE))


@pytest.mark.parametrize("stage", STAGES)
def test_an_edit_at_any_stage_changes_the_result(lowered: attnc.Lowered, stage: str):
    text = lowered.stages[stage]
    if stage == "torch":
        edited, count = re.subn(r"torch\.aten\.add\.Tensor\b", "torch.aten.sub.Tensor", text)
    else:
        edited, count = edit_bias(text)
    assert count
    out = compiled_of(attnc.from_text(edited))(QUERY, KEY, VALUE, captures=[SLOPES])
    close(out, expected(slope_sign=-1.0))


def edit_bias(text: str) -> tuple[str, int]:
    """Turn the addition that follows the read of the slopes into a subtraction, wherever it stands."""
    lines, count, since = text.split("\n"), 0, None
    for number, line in enumerate(lines):
        if "slopes" in line.lower() and ("extract" in line or "gather" in line):
            since = number
        elif since is not None and "arith.addf" in line:
            lines[number] = line.replace("arith.addf", "arith.subf")
            count, since = count + 1, None
    return "\n".join(lines), count


def test_numpy_in_numpy_out(lowered: attnc.Lowered):
    compiled = compiled_of(lowered)
    arrays = [tensor.numpy() for tensor in (QUERY, KEY, VALUE)]
    out = compiled(*arrays, captures=[SLOPES.numpy()])
    assert isinstance(out, np.ndarray) and out.dtype == np.float32
    np.testing.assert_array_equal(out, compiled(QUERY, KEY, VALUE).numpy())
    swapped = [array.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3) for array in arrays]
    out = compiled(*swapped)
    assert out.strides == swapped[0].strides
    reversed_keys = compiled(
        arrays[0], arrays[1][..., ::-1], arrays[2], scale=0.0
    )  # a copy is made where the layout asks for it
    np.testing.assert_allclose(reversed_keys, compiled(arrays[0], arrays[1], arrays[2], scale=0.0))


def test_defaults_are_those_of_the_lowering():
    window = 5

    def mod(score, b, h, q, k):
        return score + SLOPES[h] * window

    lowered = attnc.lower(QUERY, KEY, VALUE, mod, scale=0.5, return_lse=True)
    compiled = compiled_of(lowered)
    out, lse = compiled(QUERY, KEY, VALUE)
    theirs, their_lse = attnc.flex_attention(QUERY, KEY, VALUE, mod, scale=0.5, return_lse=True)
    assert torch.equal(out, theirs) and torch.equal(lse, their_lse)
    _, moved = compiled(QUERY, KEY, VALUE, 0.5, [SLOPES], [15])
    close(moved - lse, 10 * SLOPES.double()[:, None].expand(2, 4, 37))
    from_text = compiled_of(attnc.from_text(lowered.stages["torch"]))
    out, _ = from_text(QUERY, KEY, VALUE, captures=[SLOPES], numbers=[5])
    assert torch.equal(out, attnc.flex_attention(QUERY, KEY, VALUE, mod))
    with pytest.raises(errors.ArgumentsError, match="numbers"):
        from_text(QUERY, KEY, VALUE, captures=[SLOPES])


def test_block_lists():
    mask = create_block_mask(causal, None, None, 37, 37, device="cpu", BLOCK_SIZE=16)
    lowered = attnc.lower(QUERY, KEY, VALUE, alibi, mask)
    compiled = compiled_of(lowered)
    close(compiled(QUERY, KEY, VALUE), expected())
    classes = torch.tensor([[2, 0, 0], [0, 2, 0], [0, 0, 2]], dtype=torch.int8)[None, None]
    q, k = torch.arange(37)[:, None] // 16, torch.arange(37) // 16
    scores = QUERY.double() @ KEY.double().transpose(-1, -2) / 4
    scores = scores + SLOPES.double()[:, None, None] * (torch.arange(37) - torch.arange(37)[:, None])
    diagonal = torch.softmax(scores.masked_fill(q != k, -torch.inf), -1) @ VALUE.double()
    close(compiled(QUERY, KEY, VALUE, block_lists=[classes]), diagonal)


@pytest.mark.parametrize(
    "arguments, kind",
    [
        ((QUERY[0], KEY, VALUE), errors.ShapeError),
        ((QUERY[..., :8], KEY[..., :8], VALUE), errors.ShapeError),
        ((QUERY, KEY, VALUE[:, :, 1:]), errors.ShapeError),
        ((QUERY.double(), KEY.double(), VALUE.double()), errors.DtypeError),
        ((QUERY, KEY, VALUE, "scale"), errors.ArgumentsError),
        ((QUERY, KEY, VALUE, None, [SLOPES, SLOPES]), errors.ArgumentsError),
        ((QUERY, KEY, VALUE, None, [SLOPES[None]]), errors.ShapeError),
        ((QUERY, KEY, VALUE, None, [SLOPES[:2]]), errors.CaptureIndexError),
        ((QUERY, KEY, VALUE, None, [SLOPES.double()]), errors.DtypeError),
        ((QUERY, KEY, VALUE, None, (), [1]), errors.ArgumentsError),
        (([1], KEY, VALUE), errors.ArgumentsError),
        ((QUERY.to("meta"), KEY, VALUE), errors.DeviceError),
        ((QUERY.numpy().byteswap().view(">f4"), KEY, VALUE), errors.ArgumentsError),
    ],
)
def test_compiled_attention_refuses(lowered: attnc.Lowered, arguments: tuple, kind: type[Exception]):
    compiled = compiled_of(lowered)
    with pytest.raises(kind) as caught:
        compiled(*arguments)
    assert type(caught.value) is kind


def test_a_kernel_without_roles():
    text = (Path(__file__).parent / "tile" / "relu_row_sums.mlir").read_text()
    compiled = compiled_of(attnc.from_text(text))
    if hasattr(compiled, "_attention"):  # it has roles: take them away
        compiled = compiled_of(attnc.from_text(re.sub(r"\) roles \[[^\]]*\]", ")", text)))
    with pytest.raises(errors.ArgumentsError, match="takes"):
        compiled()
    with pytest.raises(errors.AttncError):
        compiled(*["x"] * len(compiled.arguments))


def test_bad_text_names_its_place(lowered: attnc.Lowered):
    text = lowered.stages["tile-attention"].replace("tile.grid", "tile.grill", 1)
    with pytest.raises(errors.IRSyntaxError, match=r"edit\.mlir:\d+:\d+: error: .*tile\.grill"):
        attnc.from_text(text, "edit.mlir")
    with pytest.raises(errors.UnknownPassError):
        attnc.from_text('builtin.module attributes {attnc.stage = "tile"} {}')
    with pytest.raises(errors.LoweringError):
        attnc.from_text("builtin.module {}").compile()


def test_places_are_those_of_the_mods_that_are_lowered():
    query = torch.randn(1, 1, 8, 8)

    def first(score, b, h, q, k):
        return score * 3.25

    def second(score, b, h, q, k):
        return score * 3.25

    attnc.flex_attention(query, query, query, first)
    line = second.__code__.co_firstlineno + 1
    assert f"test_lowered.py:{line}" in attnc.lower(query, query, query, second).stages["torch"]
