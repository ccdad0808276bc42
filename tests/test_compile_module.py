"""attnc.compile of exported programs: attention with what models have around it, against eager."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attnc

SDPA = F.scaled_dot_product_attention


class Written(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any], **buffers: Tensor):
        super().__init__()
        self.function = function
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)

    def forward(self, *arguments: Tensor) -> Any:
        return self.function(*arguments, **dict(self.named_buffers()))


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def check(function: Callable[..., Any], *inputs: Tensor, kernels: int | None = None, **buffers: Tensor) -> Any:
    """Compiled and eager on the same inputs; eager in f64 says what is right."""
    module = Written(function, **buffers)
    compiled = attnc.compile(module, inputs)
    if kernels is not None:
        assert len(compiled.kernels) == kernels, compiled.kernels
    results, plain = compiled(*inputs), module(*inputs)
    wide = Written(function, **{name: lifted(tensor) for name, tensor in buffers.items()})(*map(lifted, inputs))
    pairs = [(results, plain, wide)] if isinstance(plain, Tensor) else list(zip(results, plain, wide, strict=True))
    for result, eager, right in pairs:
        assert result.shape == eager.shape and result.dtype == eager.dtype and result.is_contiguous()
        if not result.dtype.is_floating_point:
            assert torch.equal(result, eager)
            continue
        error, allowed = ((x.double() - right.double()).abs().max().item() for x in (result, eager))
        allowed = 1.5 * allowed + 4 * torch.finfo(result.dtype).eps * max(1.0, right.abs().max().item())
        assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"
    return compiled


def lifted(x: Tensor) -> Tensor:
    return x.double() if x.dtype.is_floating_point else x


def heads(x: Tensor, count: int) -> Tensor:
    return x.view(x.shape[0], x.shape[1], count, -1).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def rotate(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def rotary(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q, k = (x * cos + rotate(x) * sin for x in (q, k))
    return SDPA(q, k, v, is_causal=True)


def gated(x: Tensor, gate: Tensor) -> Tensor:
    q, k, v = (heads(part, 4) for part in x.chunk(3, dim=-1))
    return merged(SDPA(q, k, v)) * torch.sigmoid(gate)


def cross(q: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
    k, v = kv[0], kv[1]
    bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
    return SDPA(q, k, v, attn_mask=bias[:, None, None, :])


def cached(q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    k, v = torch.cat((past_k, k), dim=2), torch.cat((past_v, v), dim=2)
    return SDPA(q, k, v), k, v


def normalised(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    q, k = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight for x in (q, k))
    return SDPA(q, k, v)


def statistics(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    o = SDPA(q, k, v)
    return o.sum((1, 3)), o.amax(-1), o.mean(), (o > 0).sum(-1), o.float().softmax(-2).to(o.dtype)


def qkv(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, seed=1), randn(*shape, dtype=dtype, seed=2)


def test_rotary_embedding():
    check(rotary, *qkv(2, 4, 33, 16), cos=torch.rand(33, 16), sin=torch.rand(33, 16))


def test_packed_and_gated():
    check(gated, randn(2, 35, 192), randn(2, 35, 64))


def test_a_mask_with_the_least_number():
    mask = torch.arange(40)[None] < torch.tensor([[40], [17]])
    check(cross, randn(2, 3, 20, 16), randn(2, 2, 3, 40, 16), mask)


def test_a_cache_is_appended_to():
    check(cached, *qkv(2, 3, 5, 16), randn(2, 3, 40, 16), randn(2, 3, 40, 16, seed=3))


def test_normalised_queries_and_keys():
    check(normalised, *qkv(2, 3, 33, 16), weight=torch.rand(16))


def test_reductions_after_attention():
    check(statistics, *qkv(2, 3, 33, 16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types(dtype: torch.dtype):
    def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return merged(SDPA(q * 0.5, k, v) + q)

    check(scaled, *qkv(2, 3, 33, 16, dtype=dtype))


def test_a_permuted_output_is_written_where_it_belongs():
    def permuted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return merged(SDPA(heads(q, 4), heads(k, 4), heads(v, 4)))

    compiled = check(permuted, *qkv(2, 50, 64), kernels=1)
    assert compiled.temporary_bytes == 0


def test_two_layers_of_attention():
    def layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = SDPA(q, k, v)
        return SDPA(x, x + k, torch.tanh(x), is_causal=True)

    check(layers, *qkv(2, 3, 33, 16))


def test_dynamic_sizes_compile_nothing_new():
    from attnc import programs

    class Model(nn.Module):
        def forward(self, x: Tensor, gate: Tensor) -> Tensor:
            return gated(x, gate)

    batch, length = torch.export.Dim("batch", min=2, max=16), torch.export.Dim("length", min=2, max=512)
    shapes = ({0: batch, 1: length}, {0: batch, 1: length})
    compiled = attnc.compile(Model(), (randn(3, 70, 192), randn(3, 70, 64)), dynamic_shapes=shapes)
    before = programs.compiled
    for sizes in ((2, 64), (5, 100), (4, 33)):
        x, gate = randn(*sizes, 192), randn(*sizes, 64)
        assert torch.allclose(compiled(x, gate), gated(x, gate), atol=1e-5)
    assert programs.compiled == before
    with pytest.raises(attnc.AttncError, match="gate"):
        compiled(randn(2, 64, 192), randn(2, 64, 65))


def test_numpy_arrays_give_numpy_arrays():
    compiled = attnc.compile(Written(lambda q, k, v: torch.relu(SDPA(q, k, v))), qkv(1, 2, 20, 16))
    inputs = qkv(1, 2, 20, 16)
    out = compiled(*(x.numpy() for x in inputs))
    assert not isinstance(out, Tensor) and torch.allclose(torch.from_numpy(out), compiled(*inputs))


def test_nested_arguments_and_results():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(randn(16))

        def forward(self, qkv: dict[str, Tensor], bias: Tensor | None = None) -> dict[str, Any]:
            out = SDPA(qkv["q"] * self.weight, qkv["k"], qkv["v"], attn_mask=bias)
            return {"out": out, "parts": [out.sum(-1), qkv["q"]]}

    q, k, v = qkv(1, 2, 20, 16)
    model = Model()
    compiled = attnc.compile(model, ({"q": q, "k": k, "v": v}, randn(20, 20)))
    result, wanted = (f({"q": q, "k": k, "v": v}, randn(20, 20)) for f in (compiled, model))
    assert torch.allclose(result["out"], wanted["out"], atol=1e-5)
    assert torch.allclose(result["parts"][0], wanted["parts"][0], atol=1e-5) and torch.equal(result["parts"][1], q)


def test_what_is_not_supported_is_refused_by_name_and_place():
    with pytest.raises(attnc.AttncError, match=r"product.*test_compile_module\.py:\d+") as caught:
        attnc.compile(Written(lambda x, y: SDPA(x @ y, x, x)), (randn(1, 2, 16, 16), randn(16, 16)))
    assert "remedy" in str(caught.value)
    with pytest.raises(attnc.AttncError, match="sort"):
        attnc.compile(Written(lambda x: SDPA(x, x, torch.sort(x).values)), (randn(1, 2, 16, 16),))
    with pytest.raises(attnc.AttncError, match="example inputs"):
        attnc.compile(nn.Identity())
    with pytest.raises(attnc.AttncError, match="cannot compile a int"):
        attnc.compile(3)
    with pytest.raises(attnc.AttncError, match="make it the forward of an nn"):
        attnc.compile(torch.relu, (randn(3),))
    with pytest.raises(attnc.AttncError, match="read_text"):
        attnc.compile(Path("program.mlir"))
    for name, remedy in (("a/program.mlir", "read_text"), ("program.pt2", "torch.export.load")):
        with pytest.raises(attnc.errors.IRSyntaxError, match=f"a file's name(?s:.*){remedy}"):
            attnc.compile(name)
        with pytest.raises(attnc.errors.IRSyntaxError, match="a file's name"):
            attnc.from_text(name)


def test_one_example_input_needs_no_tuple():
    x = randn(2, 3)
    assert torch.equal(attnc.compile(nn.ReLU(), x)(x), x.relu())


WARM = """
import sys, numpy, attnc
text = open(sys.argv[1]).read()
x = numpy.ones((2, 20, 16), numpy.float32)
attnc.compile(text)(x, x, x)
print(sorted(name for name in ("xdsl", "torch") if name in sys.modules))
"""


def test_a_warm_start_imports_no_compiler(tmp_path: Path):
    from attention_modules import AttentionModule

    sizes = {"b": 2, "m": 20, "k": 20, "e": 16, "n": 16}
    file = tmp_path / "m.mlir"
    file.write_text(AttentionModule(sizes, "bme", "bke", "bkn", "bmn").text())
    environment = {**os.environ, "ATTNC_CACHE_DIR": str(tmp_path / "cache")}
    runs = [
        subprocess.run([sys.executable, "-c", WARM, str(file)], capture_output=True, text=True, env=environment, check=True)
        for _ in range(2)
    ]
    assert [run.stdout.strip() for run in runs] == ["['xdsl']", "[]"]


def relative(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    places = torch.arange(q.shape[2])
    bias = table[torch.clamp(places[None] - places[:, None], -8, 8) + 8].permute(2, 0, 1)
    return torch.softmax(q @ k.mT + bias, -1) @ v


def test_a_table_of_relative_positions():
    check(relative, *qkv(2, 4, 30, 16), randn(17, 4))


def test_what_follows_attention_element_by_element_is_its_end():
    def ended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.relu(SDPA(q, k, v) * 2).transpose(1, 2)

    check(ended, *qkv(2, 3, 33, 16), kernels=1)


def test_an_index_out_of_range_is_named():
    from torch.nn.attention.flex_attention import flex_attention

    def gathered(q: Tensor, k: Tensor, v: Tensor, table: Tensor, offset: Tensor) -> Tensor:
        def score(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return s + table[q_idx + offset]

        return flex_attention(q, k, v, score_mod=score)  # type: ignore[return-value]

    inputs = (*qkv(1, 2, 20, 16), randn(20), torch.tensor(0))
    compiled = attnc.compile(Written(gathered), inputs)
    assert torch.allclose(compiled(*inputs), gathered(*inputs), atol=1e-5)
    with pytest.raises(IndexError, match=r"index 20 is out of range .* at b=0, h=0, q=17"):
        compiled(*inputs[:4], torch.tensor(3))


class Sum(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def test_tensors_that_are_not_what_their_memory_holds():
    compiled = attnc.compile(Sum(), (torch.randn(3, 4), torch.randn(3, 4)))
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    torch.testing.assert_close(compiled(x, y), x + y)
    negated = torch._neg_view(x)  # type: ignore[attr-defined]  # the same dtype, sizes and strides
    torch.testing.assert_close(compiled(negated, y), y - x)
    with pytest.raises(attnc.errors.UnsupportedTensorError, match="sparse"):
        compiled(x.to_sparse(), y)
    with pytest.raises(attnc.errors.UnsupportedTransformError):
        torch.vmap(lambda each: compiled(each, y))(torch.stack([x, x]))


class TrianglesOfAnySize(nn.Module):
    def forward(self, x, y):
        n, m = x.shape[0], y.shape[0]
        return torch.ones(n, m).tril(m - n) * x[:, None]


def test_a_triangle_whose_diagonal_is_a_size():
    n, m = torch.export.Dim("n", min=2, max=64), torch.export.Dim("m", min=2, max=64)
    module = TrianglesOfAnySize()
    compiled = attnc.compile(module, (torch.randn(4), torch.randn(6)), dynamic_shapes=({0: n}, {0: m}))
    for rows, columns in ((3, 7), (7, 3), (5, 5)):
        x, y = torch.randn(rows), torch.randn(columns)
        assert torch.equal(compiled(x, y), module(x, y))


class ProductAlone(nn.Module):
    def forward(self, x, y):
        return torch.sigmoid(x @ y.mT)


class WeightsAreReturned(nn.Module):
    def forward(self, x, y):
        weights = (x @ y.mT).softmax(-1)
        return weights @ y, weights


class WeightsAlone(nn.Module):
    def forward(self, x, y):
        return (x @ y.mT).softmax(-1)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (ProductAlone(), "no softmax follows it"),
        (WeightsAlone(), "is not multiplied by a value"),
        (WeightsAreReturned(), "its scores or weights are used elsewhere as well"),
    ],
)
def test_a_product_is_refused_with_the_reason(module: nn.Module, why: str):
    with pytest.raises(attnc.errors.LoweringError, match=why):
        attnc.compile(module, (torch.randn(4, 8), torch.randn(4, 8)))


def test_a_compiled_program_has_no_gradients_and_says_what_has():
    compiled = attnc.compile(TrianglesOfAnySize(), (torch.randn(4), torch.randn(6)))
    with pytest.raises(attnc.errors.GradientNotImplementedError, match="no_grad"):
        compiled(torch.randn(4).requires_grad_(), torch.randn(6))
