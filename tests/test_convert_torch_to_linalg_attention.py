"""Attention in exported programs and in torch-mlir's text, up to linalg: values against eager, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import attnc
from attnc.dialects.torch import FlexAttentionOp
from attnc.errors import AttncError, UnsupportedGraphError
from linalg_interpreter import run_function, to_numpy
from oracle import Problem, oracle
from torch_graphs import check, exported, interpreted, to_linalg

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=GENERATOR).to(dtype)


def heads(
    batch: int = 2, heads: int = 4, kv_heads: int = 4, queries: int = 5, keys: int = 7, dim: int = 8
) -> tuple[Tensor, ...]:
    return normal(batch, heads, queries, dim), normal(batch, kv_heads, keys, dim), normal(batch, kv_heads, keys, dim + 2)


def bools(*shape: int) -> Tensor:
    mask = torch.rand(shape, generator=GENERATOR) > 0.4
    mask[..., 0] = True
    return mask


SDPA: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "plain": (lambda q, k, v: scaled_dot_product_attention(q, k, v), heads()),
    "causal": (lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), heads()),
    "scale": (lambda q, k, v: scaled_dot_product_attention(q, k, v, scale=0.3), heads()),
    "bool mask": (lambda q, k, v, m: scaled_dot_product_attention(q, k, v, m), (*heads(), bools(5, 7))),
    "batch mask": (lambda q, k, v, m: scaled_dot_product_attention(q, k, v, m), (*heads(), bools(2, 1, 1, 7))),
    "float mask": (lambda q, k, v, m: scaled_dot_product_attention(q, k, v, m), (*heads(), normal(1, 4, 5, 7))),
    "grouped": (lambda q, k, v: scaled_dot_product_attention(q, k, v, enable_gqa=True), heads(kv_heads=2)),
    "grouped, masked": (
        lambda q, k, v, m: scaled_dot_product_attention(q, k, v, m, enable_gqa=True), (*heads(kv_heads=2), bools(2, 4, 5, 7))
    ),
    "grouped, mask for all heads": (
        lambda q, k, v, m: scaled_dot_product_attention(q, k, v, m, enable_gqa=True), (*heads(kv_heads=2), bools(2, 1, 5, 7))
    ),
    "three dims": (lambda q, k, v: scaled_dot_product_attention(q, k, v), (normal(3, 5, 8), normal(3, 7, 8), normal(3, 7, 4))),
    "five dims": (lambda q, k, v: scaled_dot_product_attention(q[None], k[None], v[None]), heads()),
    "two dims": (lambda q, k, v: scaled_dot_product_attention(q, k, v), (normal(5, 8), normal(7, 8), normal(7, 4))),
    "around": (
        lambda x: scaled_dot_product_attention(*x.view(2, 5, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind()).mT.flatten(2),
        (normal(2, 5, 96),),
    ),
    "for cpu": (
        lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v), (*heads()[:2], normal(2, 4, 7, 8))
    ),
    "for cpu, causal": (
        lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=True)[0],
        (normal(2, 4, 7, 8), normal(2, 4, 7, 8), normal(2, 4, 7, 8)),
    ),
    "math": (lambda q, k, v: torch.ops.aten._scaled_dot_product_attention_math(q, k, v)[0], heads()),
}  # fmt: skip


@pytest.mark.parametrize("name", SDPA)
def test_scaled_dot_product_attention(name: str):
    module = check(*SDPA[name], tolerance=16)
    names = [op.name for op in module.walk() if op.name.startswith("iree_linalg_ext.") and op.name.endswith("attention")]
    assert len(names) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype):
    inputs = tuple(x.to(dtype) for x in heads())
    check(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), inputs, tolerance=16)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


class Flex(nn.Module):
    """flex_attention on packed inputs, with a captured buffer and lse."""

    def __init__(self, block_mask: Any = None, lse: bool = False, in_graph: bool = False):
        super().__init__()
        self.register_buffer("slopes", normal(4))
        self.block_mask, self.lse, self.in_graph = block_mask, lse, in_graph

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return torch.tanh(s / 2) * 2 + self.slopes[h] * (k - q)  # type: ignore[index]

        mask = self.block_mask
        if self.in_graph:
            mask = create_block_mask(causal, None, None, query.shape[2], key.shape[2], device="cpu", BLOCK_SIZE=4)
        return flex_attention(query, key, value, score, mask, enable_gqa=True, return_lse=self.lse)


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("mask", ["none", "lists", "in graph"])
def test_flex_attention(mask: str, lse: bool):
    blocks = create_block_mask(causal, None, None, 9, 10, device="cpu", BLOCK_SIZE=4) if mask == "lists" else None
    model = Flex(blocks, lse, mask == "in graph")
    check(model, heads(kv_heads=2, queries=9, keys=10), tolerance=16)


class MadeInside(nn.Module):
    """A BlockMask made in the graph, of one mask function; maybe applied with another."""

    def __init__(self, mask: Any, batch: int | None = None, heads: int | None = None, other: Any = None):
        super().__init__()
        self.mask, self.shape, self.other = mask, (batch, heads), other

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        lengths = query.shape[2], key.shape[2]
        blocks = create_block_mask(self.mask, *self.shape, *lengths, device="cpu", BLOCK_SIZE=4)
        if self.other is not None:
            blocks.mask_mod = self.other
        return flex_attention(query, key, value, block_mask=blocks)


MADE_INSIDE: dict[str, tuple[MadeInside, bool]] = {  # whether the lists follow from the mask
    "window": (MadeInside(lambda b, h, q, k: (q // 2 >= k // 2) & (q - k < 3)), True),
    "and_masks": (MadeInside(and_masks(causal, lambda b, h, q, k: q - k < 3)), True),
    "by head": (MadeInside(lambda b, h, q, k: (q >= k) | (h == 1), 2, 4), True),
    "by head, made for all alike": (MadeInside(lambda b, h, q, k: (q >= k) | (h == 1)), False),
    "swapped": (MadeInside(causal, other=lambda b, h, q, k: k >= q), False),
    "another number": (MadeInside(lambda b, h, q, k: q - k < 3, other=lambda b, h, q, k: q - k < 4), False),
}


@pytest.mark.parametrize("name", MADE_INSIDE)
def test_lists_that_follow_from_the_mask_are_not_made(name: str):
    """Where they do not, they are honoured, as torch's compiled kernels do: torch's eager formula ignores them."""
    model, redundant = MADE_INSIDE[name]
    inputs = heads(queries=9, keys=10)
    program = exported(model, inputs)
    (attention,) = [op for op in program.module.walk() if isinstance(op, FlexAttentionOp)]
    assert (attention.blocks is None) == redundant
    (found,) = interpreted(program, to_linalg(str(program.module)), inputs)
    blocks = create_block_mask(model.mask, *model.shape, 9, 10, device="cpu", BLOCK_SIZE=4)
    blocks.mask_mod = model.other or model.mask
    query, key, value = inputs
    wanted = oracle(Problem(query, key, value, block_mask=blocks)).out
    np.testing.assert_allclose(found, wanted.numpy(), atol=1e-5)


def test_flex_attention_of_open_lengths():
    lengths = Dim("s", min=3, max=100), Dim("t", min=3, max=100)
    shapes = ({2: lengths[0]}, {2: lengths[1]}, {2: lengths[1]})
    check(Flex(lse=True), heads(), shapes, [heads(queries=9, keys=4)], tolerance=16)


class Attnc(nn.Module):
    """attnc's own flex_attention, with a captured tensor and number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", normal(4))
        self.window = 3

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        window, slopes = self.window, self.slopes
        return attnc.flex_attention(
            query,
            key,
            value,
            lambda s, b, h, q, k: s + slopes[h] * (k - q),  # type: ignore[index]
            mask_mod=lambda b, h, q, k: (q - k).abs() <= window,
            return_lse=True,
        )


def test_the_operator_of_attnc():
    check(Attnc(), heads(), tolerance=16)


def test_dropout_is_refused_by_name_and_place():
    class Model(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    with pytest.raises(UnsupportedGraphError, match=r"aten\.scaled_dot_product_attention.*dropout") as caught:
        to_linalg(str(exported(Model(), heads()).module))
    assert caught.value.filename == __file__ and caught.value.line == Model.forward.__code__.co_firstlineno + 1


@pytest.mark.parametrize(
    "function, message",
    [
        (lambda x: x.sort()[0], "aten.sort"),
        (lambda x: torch.fft.fft(x).real, "complex64|_fft"),
        (lambda x: x.cumsum(0), "aten.cumsum"),
        (lambda x: x[x > 0.5], "aten.index.Tensor"),
    ],
)
def test_what_is_not_compiled_is_named(function: Any, message: str):
    with pytest.raises(AttncError, match=message) as caught:
        to_linalg(str(exported(function, (normal(3, 4),)).module))
    assert caught.value.remedy


# -- torch-mlir's text --------------------------------------------------------------------------------------------------


class Raw(nn.Module):
    """flex_attention with a weight around it; its score and mask functions capture nothing."""

    def __init__(self, masked: bool = True):
        super().__init__()
        self.register_buffer("weight", normal(32))
        self.masked = masked

    def forward(self, x: Tensor, key: Tensor, value: Tensor) -> Any:
        batch, length, _ = x.shape
        query = x.view(batch, length, 4, 8).transpose(1, 2)

        def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return torch.tanh(s / 2) * 2 + (k - q) * 0.25

        blocks = (
            create_block_mask(causal, None, None, length, key.shape[2], device="cpu", BLOCK_SIZE=4) if self.masked else None
        )
        out, lse = flex_attention(query, key, value, score, blocks, enable_gqa=True, return_lse=True)
        return out.transpose(1, 2).reshape(batch, length, -1) * self.weight, lse  # type: ignore[operator]


def raw_text(model: nn.Module, inputs: tuple[Any, ...], dynamic_shapes: Any = None) -> str:
    """What torch-mlir makes of a model."""
    from torch_mlir import fx  # pyright: ignore[reportMissingImports]

    return str(fx.export_and_import(model, *inputs, output_type="raw", dynamic_shapes=dynamic_shapes))


@pytest.mark.parametrize("masked", [True, False])
def test_text_of_torch_mlir(masked: bool):
    model = Raw(masked)
    inputs = (normal(2, 9, 32), normal(2, 2, 10, 8), normal(2, 2, 10, 8))
    text = raw_text(model, inputs)
    assert text.count("\n") > 60 and "dense_resource" in text
    module = to_linalg(text)
    assert sum(1 for _ in module.walk()) < 120, "the BlockMask's making is not removed"
    results = run_function(module, "main", [to_numpy(x) for x in inputs])
    for result, wanted in zip(results, model(*inputs), strict=True):
        np.testing.assert_allclose(result, wanted.numpy(), atol=2e-5)


def test_text_of_torch_mlir_with_open_lengths():
    model = Raw(masked=False)
    length = Dim("s", min=3, max=100)
    inputs = (normal(2, 9, 32), normal(2, 2, 10, 8), normal(2, 2, 10, 8))
    module = to_linalg(raw_text(model, inputs, ({1: length}, None, None)))
    other = (normal(2, 5, 32), *inputs[1:])
    for call in (inputs, other):
        for result, wanted in zip(run_function(module, "main", [to_numpy(x) for x in call]), model(*call), strict=True):
            np.testing.assert_allclose(result, wanted.numpy(), atol=2e-5)


LOST = """
func.func private @sdpa_score0(%s: !torch.vtensor<[],f32>, %b: !torch.vtensor<[],si32>, %h: !torch.vtensor<[],si32>, %q: !torch.vtensor<[],si32>, %k: !torch.vtensor<[],si32>, %bias: !torch.vtensor<[4],f32>) -> !torch.vtensor<[],f32> {
  return %s : !torch.vtensor<[],f32>
}
func.func @main(%q: !torch.vtensor<[1,2,4,8],f32>) -> !torch.vtensor<[1,2,4,8],f32> {
  %scale = torch.constant.float 5.000000e-01
  %false = torch.constant.bool false
  %o, %l, %m = torch.hop_flex_attention %q, %q, %q, %scale, %false, %false {score_mod_fn = @sdpa_score0} : !torch.vtensor<[1,2,4,8],f32>, !torch.vtensor<[1,2,4,8],f32>, !torch.vtensor<[1,2,4,8],f32>, !torch.float, !torch.bool, !torch.bool -> !torch.vtensor<[1,2,4,8],f32>, !torch.vtensor<[1,2,4],f32>, !torch.vtensor<[1,2,4],f32>
  return %o : !torch.vtensor<[1,2,4,8],f32>
}
"""  # noqa: E501


def test_lost_captures_are_refused_by_name():
    with pytest.raises(UnsupportedGraphError, match="@sdpa_score0 takes 6 arguments"):
        to_linalg(LOST)
