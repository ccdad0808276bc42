"""torch.compile: functions that call attnc, what they recompile and refuse; the backend "attnc" for models that call
torch's."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch.nn.attention import flex_attention as torch_module
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask
from torch.utils.checkpoint import checkpoint

import attnc
import oracle
from attnc import errors, flex_attention, programs
from needs import needs_tool
from zoo import ENTRIES, problem

torch_flex: Any = torch_module.flex_attention
leaves_of: Any = torch.utils._pytree.tree_leaves  # type: ignore[attr-defined]
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


Q, K, V = normal(2, 2, 20, 16), normal(2, 2, 30, 16), normal(2, 2, 30, 16)
BIAS = normal(30, 20)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    attnc.stats(clear=True)
    yield
    torch._dynamo.reset()


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


# -- attnc's own functions
# ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ENTRIES)
def test_the_zoo_in_one_graph(name: str):
    p = problem(name)

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flex_attention(query, key, value, p.score_mod, p.block_mask, p.scale, enable_gqa=True, mask_mod=p.mask_mod)

    oracle.check(p, torch.compile(function, backend="aot_eager", fullgraph=True)(p.query, p.key, p.value))


class Slopes:
    """A callable object with a tensor and a number."""

    def __init__(self):
        self.slopes, self.shift = normal(2), 4

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score * self.slopes[h] + self.shift


SLOPES = Slopes()
LISTS = create_block_mask(causal, 2, 2, 20, 30, device="cpu", BLOCK_SIZE=(8, 4))
LOWER_RIGHT = causal_lower_right(20, 30)
WAYS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "statistics": (lambda q: flex_attention(q, K, V, return_aux=AuxRequest(lse=True, max_scores=True)), (Q,)),
    "lse": (lambda q: flex_attention(q, K, V, return_lse=True), (Q,)),
    "scale": (lambda q: flex_attention(q, K, V, scale=0.3), (Q,)),
    "scale as an argument": (lambda q, scale: flex_attention(q, K, V, scale=scale), (Q, 0.3)),
    "scale as a tensor": (lambda q, scale: flex_attention(q, K, V, scale=scale), (Q, torch.tensor(0.3))),
    "attnc's BlockMask": (
        lambda q: flex_attention(q, K, V, block_mask=attnc.create_block_mask(causal, None, None, q.shape[2], 30)),
        (Q,),
    ),
    "BlockMask and mask_mod": (
        lambda q: flex_attention(q, K, V, block_mask=LISTS, mask_mod=lambda b, h, i, j: (i + j) % 3 != 0),
        (Q,),
    ),
    "object": (lambda q, mod=SLOPES: flex_attention(q, K, V, mod), (Q,)),
    "partial": (
        lambda q, t: flex_attention(q, K, V, functools.partial(lambda t, s, b, h, i, j: s + t[j, i], t)),
        (Q, BIAS),
    ),
    "a capture's size": (
        lambda q, t: flex_attention(q, K, V, lambda s, b, h, i, j: s + t[i - j + t.shape[0] // 2] / t.shape[0]),
        (Q, normal(64)),
    ),
    "a gathered row": (lambda q, t: flex_attention(q, K, V, lambda s, b, h, i, j: s + (t[i] * t[j]).sum()), (Q, normal(30, 3))),
    "a capture computed in the graph": (
        lambda q, t: (lambda u: flex_attention(q, K, V, lambda s, b, h, i, j: s + u[i]))(t.cumsum(0)),
        (Q, normal(20)),
    ),
    "a transposed capture": (lambda q, t: flex_attention(q, K, V, lambda s, b, h, i, j: s + t.t()[i, j]), (Q, BIAS)),
    "f64": (lambda q, t: flex_attention(q, K.double(), V.double(), lambda s, b, h, i, j: s * t[j, i]), (Q.double(), BIAS)),
    "bf16": (lambda q, mod=SLOPES: flex_attention(q, K.bfloat16(), V.bfloat16(), mod), (Q.bfloat16(),)),
    "query transposed": (
        lambda q: flex_attention(q.transpose(1, 2), K, V).transpose(1, 2).reshape(2, 20, 32),
        (normal(2, 20, 2, 16),),
    ),
    "lengths in the mask": (
        lambda q, k: flex_attention(q, k, k, mask_mod=lambda b, h, i, j: i + (k.shape[2] - q.shape[2]) >= j),
        (Q, K),
    ),
    "sdpa 5-D": (
        lambda q, m: attnc.scaled_dot_product_attention(q, q, q, m),
        (normal(2, 3, 2, 20, 16), normal(2, 1, 1, 20, 20) > 0),
    ),
    "sdpa CausalBias": (lambda q: attnc.scaled_dot_product_attention(q, K, V, LOWER_RIGHT), (Q,)),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", WAYS)
def test_ways_of_calling(name: str, dynamic: bool):
    function, arguments = WAYS[name]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    torch.manual_seed(0)
    actual, expected = compiled(*arguments), function(*arguments)
    for one, other in zip(leaves_of(actual), leaves_of(expected), strict=True):
        if one is not None:
            assert one.dtype == other.dtype and one.stride() == other.stride()
            assert torch.allclose(one, other, atol=1e-5)


def test_numbers_and_values_that_change_compile_nothing():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    table = normal(2)

    def function(q: Tensor, window: int) -> Tensor:
        return flex_attention(q, K, V, lambda s, b, h, i, j: s * table[h], mask_mod=lambda b, h, i, j: (i - j).abs() <= window)

    compiled = torch.compile(function, backend=counter, fullgraph=True)
    counts = []
    for window in (7, 3, 0, 1, 12):
        table.copy_(normal(2))
        assert torch.allclose(compiled(Q, window), function(Q, window), atol=1e-6)
        counts.append((counter.frame_count, programs.compiled))
    assert len(set(counts)) == 1, f"a captured value or number made something compile again: {counts}"


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_tool("g++"))])
def test_floats_compile_at_most_as_torchs_flex(backend: str):
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)

    def function(q: Tensor, factor: float, scale: float) -> Tensor:
        return flex_attention(q, K, V, lambda s, b, h, i, j: s * (factor / 2) + factor, scale=scale)

    compiled = torch.compile(function, backend=counter, fullgraph=True)
    counts = []
    for factor in (0.5, 0.25, 2.0, 3.5):
        out = compiled(Q, factor, factor + 1)
        counts.append((counter.frame_count, programs.compiled))
        assert torch.allclose(out, function(Q, factor, factor + 1), atol=1e-5)
    assert len({kernels for _, kernels in counts}) <= 2  # the eager call compiles its own, of fewer numbers
    assert counts[1][0] == counts[-1][0], f"a float made dynamo compile again and again: {counts}"


def test_lengths_are_dynamic_after_the_first_change():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k: flex_attention(q, k, k, mask_mod=causal), backend=counter, fullgraph=True)
    kernels = []
    for queries, keys in ((20, 30), (33, 41), (50, 64), (21, 90)):
        q, k = normal(2, 2, queries, 16), normal(2, 2, keys, 16)
        assert torch.allclose(compiled(q, k), flex_attention(q, k, k, mask_mod=causal), atol=1e-6)
        kernels.append(programs.compiled)
    assert counter.frame_count == 2 and len(set(kernels)) == 1


def test_what_is_refused_raises_its_own_error_or_says_it_in_the_break():
    def random(q: Tensor) -> Tensor:
        return flex_attention(q + 1, K, V, lambda s, b, h, i, j: s + torch.rand(()))

    with pytest.raises(Unsupported, match=r"aten\.rand"):
        torch.compile(random, backend="eager", fullgraph=True)(Q)
    torch._dynamo.reset()
    with pytest.raises(errors.RandomModError):
        torch.compile(random, backend="eager")(Q)
    torch._dynamo.reset()


def test_an_index_out_of_range_is_found_in_a_graph():
    compiled = torch.compile(lambda q, t: flex_attention(q, K, V, lambda s, b, h, i, j: s + t[i]), backend="aot_eager")
    with pytest.raises(errors.CaptureIndexError, match="t"):
        compiled(Q, normal(19))


# -- the backend
# ----------------------------------------------------------------------------------------------------------------
def taken() -> dict[str, int]:
    return {function: count for (_, function), count in attnc.stats().taken.items()}


def left() -> str:
    return " ".join(reason for _, _, reason in attnc.stats().left)


def both(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Calls both of torch's functions."""
    first = torch_flex(query * 2, key, value, lambda s, b, h, q, k: s * 0.5 + bias[k, q], block_mask=None)
    second = F.scaled_dot_product_attention(first, key, value, bias.t() > -1)
    return (first + second).transpose(1, 2).reshape(query.shape[0], -1, 32) + 1


@pytest.mark.parametrize("rest", ["eager", pytest.param("inductor", marks=needs_tool("g++"))])
def test_backend_takes_both_over(rest: str):
    with torch.no_grad():
        compiled = torch.compile(both, backend="attnc", fullgraph=True, options={"rest": rest})
        out = compiled(Q, K, V, BIAS)
    assert torch.allclose(out, both(Q, K, V, BIAS), atol=1e-5)
    assert taken() == {"flex_attention": 1, "scaled_dot_product_attention": 1} and not left()
    assert "taken over" in str(attnc.stats())


def test_backend_lengths_are_dynamic():
    counts = []
    with torch.no_grad():
        compiled = torch.compile(both, backend="attnc", fullgraph=True, dynamic=True, options={"rest": "eager"})
        for queries, keys in ((20, 30), (33, 47), (64, 51)):
            q, k, v, bias = normal(2, 2, queries, 16), normal(2, 2, keys, 16), normal(2, 2, keys, 16), normal(keys, queries)
            assert torch.allclose(compiled(q, k, v, bias), both(q, k, v, bias), atol=1e-5)
            counts.append((programs.compiled, taken()["flex_attention"]))
    assert len(set(counts)) == 1


def with_statistics(query: Tensor) -> Tensor:
    out, aux = torch_flex(query, K, V, return_aux=AuxRequest(lse=True))
    return torch.cat([out, aux.lse[..., None]], -1)


BACKEND_CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "statistics": lambda q: with_statistics(q),
    "BlockMask": lambda q: torch_flex(q, K, V, block_mask=LISTS),
    "scale and GQA": lambda q: torch_flex(q.repeat_interleave(2, 1), K, V, scale=0.2, enable_gqa=True),
    "captured number": lambda q, shift=3: torch_flex(q, K, V, lambda s, b, h, i, j: s + (i - j) * shift),
    "bf16": lambda q: torch_flex(q.bfloat16(), K.bfloat16(), V.bfloat16()).float(),
    "sdpa strides": lambda q: F.scaled_dot_product_attention(q, K, V).transpose(1, 2).reshape(2, 20, 32),
    "sdpa view": lambda q: F.scaled_dot_product_attention(q.mT.contiguous().mT, K, V).view(2, 2, -1),
    "sdpa causal": lambda q: F.scaled_dot_product_attention(q, K, V, is_causal=True, scale=0.1),
    "sdpa 3-D": lambda q: F.scaled_dot_product_attention(q[0], K[0], V[0]),
    "sdpa aten": lambda q: torch.ops.aten.scaled_dot_product_attention(q, K, V),
    "inside checkpoint": lambda q: checkpoint(lambda x: F.scaled_dot_product_attention(x, K, V), q, use_reentrant=False),
}


@pytest.mark.parametrize("name", BACKEND_CASES)
def test_backend_cases(name: str):
    function = BACKEND_CASES[name]
    with torch.no_grad():
        expected = function(Q)
        out = torch.compile(function, backend="attnc", fullgraph=True, options={"rest": "eager"})(Q)
    assert out.stride() == expected.stride() and out.dtype == expected.dtype
    assert torch.allclose(out, expected, atol=2e-2 if name == "bf16" else 1e-5)
    assert sum(taken().values()) == 1 and not left()


def test_backend_leaves_what_attnc_does_not_do_and_says_so():
    dropout = torch.compile(
        lambda q: F.scaled_dot_product_attention(q, K, V, dropout_p=0.5), backend="attnc", options={"rest": "eager"}
    )
    dropout(Q)

    def random(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + BIAS.cumsum(0)[k, q]

    flex = torch.compile(lambda q: torch_flex(q, K, V, random), backend="attnc", options={"rest": "eager"})
    assert torch.allclose(flex(Q), torch_flex(Q, K, V, lambda s, b, h, q, k: s + BIAS.cumsum(0)[k, q]), atol=1e-5)
    assert not taken()
    for words in ("DropoutError", "aten.cumsum"):
        assert words in left(), left()


def test_backend_options():
    cases: list[dict[str, Any]] = [{"options": {"rest": "triton"}}, {"options": {"reset": "eager"}}, {"mode": "max-autotune"}]
    for keywords in cases:
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"has no option|rest='triton'"):
            torch.compile(lambda q: q + 1, backend="attnc", **keywords)(Q)
    assert "attnc" in torch._dynamo.list_backends()


def test_backend_without_a_cpp_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("attnc.integrations.torch_compile.has_cpp_compiler", lambda: False)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", None)
    with torch.no_grad():
        out = torch.compile(both, backend="attnc", fullgraph=True)(Q, K, V, BIAS)
    assert torch.allclose(out, both(Q, K, V, BIAS), atol=1e-5)


def test_the_example(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    path = Path(__file__).parent.parent / "examples" / "torch_compile_model.py"
    spec = importlib.util.spec_from_file_location("torch_compile_model", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "torch_compile_model", example)
    spec.loader.exec_module(example)
    example.main(lengths=(100, 150, 210), rest="eager")
    assert capsys.readouterr().out.count("kernels compiled by attnc: 0") == 2


# -- torch's own flex_attention
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=needs_tool("g++"))])
def test_torch_flex_compiled(backend: str):
    def function(q: Tensor) -> Tensor:
        return torch_flex(q, K, V, lambda s, b, h, i, j: s + BIAS[j, i], block_mask=LISTS)

    expected = function(Q)
    # A graph from torch's disk cache is not traced, nor counted.
    uncached = torch.compiler.config.patch(force_disable_caches=True)  # type: ignore[attr-defined]
    with attnc.enable_torch_flex(), torch.no_grad(), uncached:
        out = torch.compile(function, backend=backend, fullgraph=True)(Q)
    assert torch.allclose(out, expected, atol=1e-5) and taken() == {"flex_attention": 1} and not left()


def test_torch_flex_eager():
    def function(q: Tensor, k: Tensor, shift: int) -> Any:
        return torch_flex(q, k, k, lambda s, b, h, i, j: s + i * shift, return_lse=True)

    cases = [(normal(2, 2, 20 + n, 16), normal(2, 2, 30 + n, 16), n) for n in range(3)]
    expected = [function(*case) for case in cases]
    with attnc.enable_torch_flex():
        kernels = []
        for case, (out, lse) in zip(cases, expected, strict=True):
            ours = function(*case)
            assert torch.allclose(ours[0], out, atol=1e-5) and torch.allclose(ours[1], lse, atol=1e-5)
            kernels.append(programs.compiled)
    assert taken() == {"flex_attention": 3} and kernels[1] == kernels[2]
    function(*cases[0])
    assert taken() == {"flex_attention": 3}


def test_torch_flex_leaves_what_attnc_does_not_do():
    def function() -> Tensor:
        return torch_flex(Q, K, V, lambda s, b, h, i, j: s + BIAS.cumsum(0)[j, i])

    expected = function()
    with attnc.enable_torch_flex():
        torch._dynamo.reset()
        assert torch.allclose(function(), expected, atol=1e-5)
    assert not taken() and "cumsum" in left()


def test_a_mod_that_reads_its_score_is_refused_by_name_in_a_whole_graph():
    query = torch.randn(1, 2, 8, 8)

    def call(x: torch.Tensor) -> torch.Tensor:
        return attnc.flex_attention(x, x, x, lambda s, b, h, q, k: s * s.item())

    with pytest.raises(Exception, match=r"a mod reads a tensor's data: \.item\(\)"):
        torch.compile(call, backend="eager", fullgraph=True)(query)
