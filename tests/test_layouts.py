"""The short road of calls that are made again: it is taken, gives the same bits, and leaves to the long road what is its."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functionalize, grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import attnc
from attnc import flex, layouts, programs
from attnc.errors import ArgumentsError, DeviceError, DtypeError, ShapeError, UnsupportedTensorError
from attnc.integrations.transformers_attention import attention_forward

MODULE = SimpleNamespace(is_causal=True)
SHAPE = (2, 4, 5, 16)


def by_transformers(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention_forward(MODULE, query, key, value, None)[0].transpose(1, 2)  # type: ignore[arg-type]


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attnc.scaled_dot_product_attention(query, key, value, is_causal=True)


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attnc.scaled_dot_product_attention(query, key, value)


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "flex": attnc.flex_attention,
    "sdpa": plain,
    "causal": causal,
    "transformers": by_transformers,
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    programs.forget()
    yield
    programs.forget()


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return CALLS[request.param]


def inputs(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    query, key, value = (torch.randn(SHAPE).to(dtype) for _ in range(3))
    return query, key, value


def known(call: Callable[[Tensor, Tensor, Tensor], Tensor], dtype: torch.dtype = torch.float32) -> None:
    """Make a call of these sizes a known one."""
    for _ in range(3):
        call(*inputs(dtype))


@pytest.fixture
def long_road(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An entry for each call that took the long road from now on."""
    taken: list[str] = []
    usual = flex.checked_call

    def checked_call(*arguments, **options):
        taken.append("")
        return usual(*arguments, **options)

    monkeypatch.setattr(flex, "checked_call", checked_call)
    return taken


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_third_call_takes_the_short_road_to_the_same_bits(call, dtype: torch.dtype, long_road: list[str]):
    first = [call(*inputs(dtype, seed=seed)) for seed in range(3)]
    assert len(long_road) == 2
    again = [call(*inputs(dtype, seed=seed)) for seed in range(3)]
    assert len(long_road) == 2
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride() and one.dtype is other.dtype


def test_mods_are_told_apart(long_road: list[str]):
    query, key, value = inputs()
    for _ in range(3):
        assert not torch.equal(plain(query, key, value), causal(query, key, value))
    shifted = attnc.flex_attention(query, key, value, lambda score, b, h, i, j: score + 3.0 * j)
    known(attnc.flex_attention)
    assert not torch.equal(shifted, attnc.flex_attention(query, key, value))
    assert torch.equal(plain(query, key, value), attnc.flex_attention(query, key, value))


@pytest.mark.parametrize("scale", [0.75, 2, torch.tensor(0.3)])
def test_scales(scale):
    query, key, value = inputs()
    expected = attnc.flex_attention(query, key, value, scale=scale)
    known(attnc.flex_attention)
    assert torch.equal(attnc.flex_attention(query, key, value, scale=scale), expected)
    assert not torch.equal(attnc.flex_attention(query, key, value), expected)


def test_other_threads_and_other_numbers_of_threads(call, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 8, 512, 64) for _ in range(3))
    expected = call(query, key, value)
    found: list[bool] = []

    def work() -> None:
        for _ in range(20):
            found.append(torch.equal(call(query, key, value), expected))

    for count in ("1", "3", "2"):
        monkeypatch.setenv("ATTNC_THREADS", count)
        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert len(found) == 240 and all(found)


def test_gradients_come_after_a_call_without(call):
    known(call)
    tensors = [tensor.requires_grad_() for tensor in inputs()]
    out = call(*tensors)
    out.sum().backward()
    assert all(tensor.grad is not None and tensor.grad.abs().sum() > 0 for tensor in tensors)
    with torch.no_grad():
        assert not call(*tensors).requires_grad
    with torch.inference_mode():
        assert torch.equal(call(*tensors), out)


def test_values_that_a_tensor_does_not_hold_itself(call):
    query, key, value = inputs()
    expected = call(query, -key, value)
    known(call)
    assert torch.equal(call(query, torch.ops.aten._neg_view(key), value), expected)


def test_autocast(call):
    known(call)
    with torch.autocast("cpu", torch.bfloat16):
        assert call(*inputs()).dtype is torch.bfloat16
    assert call(*inputs()).dtype is torch.float32


def test_what_watches_sees_the_call(call):
    known(call)
    with torch.profiler.profile() as profile:
        call(*inputs())
    assert any(event.name == "attnc::attention" for event in profile.events() or ())
    graph = make_fx(lambda *tensors: call(*tensors))(*inputs())
    assert any("attnc.attention" in str(node.target) for node in graph.graph.nodes)


def test_transforms(call):
    query, key, value = inputs()
    known(call)
    batched = vmap(call)(*(torch.stack([tensor, tensor + 1]) for tensor in (query, key, value)))
    for n in range(2):
        torch.testing.assert_close(batched[n], call(query + n, key + n, value + n))
    # Tensors that the transform does not see are ordinary ones.
    inside = vmap(lambda number: call(query, key, value) * number)(torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(inside[1], 2 * call(query, key, value))
    slope = grad(lambda tensor: call(tensor, key, value).sum())(query)
    assert slope.shape == query.shape and slope.abs().sum() > 0
    torch.testing.assert_close(functionalize(call)(query, key, value), call(query, key, value))
    left: list[Tensor] = []
    vmap(lambda tensor: left.append(tensor) or tensor)(query[None])
    with pytest.raises(Exception, match=r"torch\.func|vmap"):
        call(left[0], key, value)


def test_forward_mode_is_refused_as_ever(call):
    query, key, value = inputs()
    known(call)
    with pytest.raises(Exception, match=r"forward|tangent|jvp"):
        jvp(lambda tensor: call(tensor, key, value), (query,), (query,))


def test_torch_compile_and_fake_tensors(call):
    known(call)
    expected = call(*inputs())
    torch._dynamo.reset()
    whole = call is not by_transformers  # transformers asks a ContextVar, which torch.compile cannot trace
    torch.testing.assert_close(torch.compile(call, backend="aot_eager", fullgraph=whole)(*inputs()), expected)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = call(*(mode.from_tensor(tensor) for tensor in inputs()))
    assert type(fake).__name__ == "FakeTensor" and fake.shape == expected.shape


def test_errors_are_those_of_the_first_call(call):
    query, key, value = inputs()
    known(call)
    with pytest.raises(DtypeError):
        call(query, key.double(), value)
    if call is not by_transformers:
        with pytest.raises(ArgumentsError, match="query is a list"):
            call([1.0], key, value)
    with pytest.raises(DeviceError):
        call(query, key.to("meta"), value)
    with pytest.raises(UnsupportedTensorError, match="layout"):
        call(query, key.to_sparse(), value)
    with pytest.raises(UnsupportedTensorError, match="layout"):
        call(query, key.to_mkldnn(), value)
    with pytest.raises(UnsupportedTensorError, match="zero tensor"):
        call(query, torch.ops.aten._efficientzerotensor(SHAPE), value)
    if call is not by_transformers:
        with pytest.raises(UnsupportedTensorError, match="nested"):
            call(torch.nested.nested_tensor([query[0], query[0]]), key, value)
    freed = key.clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedTensorError, match="freed"):
        call(query, freed, value)


def test_grouped_heads_need_to_be_allowed():
    query, key, value = torch.randn(1, 8, 3, 16), torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16)
    for _ in range(3):
        attnc.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        attnc.flex_attention(query, key, value, enable_gqa=True)
    for call in (plain, attnc.flex_attention):
        with pytest.raises(ShapeError, match="enable_gqa"):
            call(query, key, value)
    allowed = attnc.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    assert torch.equal(attnc.flex_attention(query, key, value, enable_gqa=[1]), allowed)  # type: ignore[arg-type]


def test_parameters_are_no_obstacle(call):
    query, key, value = inputs()
    known(call)
    with torch.no_grad():
        assert torch.equal(call(torch.nn.Parameter(query), key, value), call(query, key, value))


def test_layouts_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layouts, "KEPT", 8)
    for queries in range(1, 30):
        query, key = torch.randn(1, 1, queries, 16), torch.randn(1, 1, 7, 16)
        for _ in range(3):
            torch.testing.assert_close(plain(query, key, key), F.scaled_dot_product_attention(query, key, key))
        assert len(layouts._layouts) <= 8
