"""scaled_dot_product_attention against the oracle and torch's own, and `attnc.sdpa()`, which puts it in torch's place."""

from __future__ import annotations

import inspect
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import attnc
import oracle
from attnc import errors, programs
from oracle import Problem

GENERATOR = torch.Generator().manual_seed(0)
sdpa: Any = attnc.scaled_dot_product_attention  # called with wrong types on purpose
torch_sdpa = F.scaled_dot_product_attention


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


def inputs(*lead: int, queries: int = 20, keys: int = 24, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return (normal(*lead, queries, 16, dtype=dtype), normal(*lead, keys, 16, dtype=dtype), normal(*lead, keys, 8, dtype=dtype))


def mask_problem(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **others: Any) -> Problem:
    """The oracle's problem for 4-D inputs and a mask of any broadcastable shape."""
    if mask is None:
        return Problem(query, key, value, **others)
    whole = mask.expand(*query.shape[:3], key.shape[2])
    if mask.dtype == torch.bool:
        return Problem(query, key, value, mask_mod=lambda b, h, q, k: whole[b, h, q, k], **others)
    return Problem(query, key, value, lambda s, b, h, q, k: s + whole[b, h, q, k], **others)


def test_signature():
    assert list(inspect.signature(sdpa).parameters) == [
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
    ]  # fmt: skip


MASK_SHAPES = [
    (20, 24),
    (1, 24),
    (20, 1),
    (1, 1),
    (24,),
    (3, 1, 24),
    (1, 1, 20, 24),
    (2, 1, 1, 24),
    (2, 3, 20, 24),
    (1, 3, 20, 1),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_every_shape(kind: str, dtype: torch.dtype):
    query, key, value = inputs(2, 3, dtype=dtype)
    compiled = []
    for shape in MASK_SHAPES:
        values = normal(*shape)
        mask = values > -0.5 if kind == "bool" else values.masked_fill(values > 1, -torch.inf).to(dtype)
        out = sdpa(query, key, value, mask)
        oracle.check(mask_problem(query, key, value, mask), out, name=str(shape))
        compiled.append(programs.compiled)
    assert compiled[-1] - compiled[0] <= 1, "a mask's shape compiles nothing; only whether its last dim is one may"


def test_masks_of_every_layout():
    query, key, value = inputs(2, 3)
    for mask in (normal(24, 20).t(), normal(20, 48)[:, ::2], normal(2, 20, 3, 24).transpose(1, 2), normal(20, 25)[:, 1:]):
        oracle.check(mask_problem(query, key, value, mask), sdpa(query, key, value, mask))


def test_float_mask_of_f32_beside_low_precision():
    query, key, value = inputs(2, 3, dtype=torch.bfloat16)
    mask = normal(20, 24)
    oracle.check(mask_problem(query, key, value, mask), sdpa(query, key, value, mask))


@pytest.mark.parametrize("lengths", [(20, 24), (24, 20), (20, 20), (1, 24), (24, 1)])
def test_causal_masks(lengths: tuple[int, int]):
    queries, keys = lengths
    query, key, value = inputs(2, 3, queries=queries, keys=keys)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lower_right = causal_lower_right(queries, keys)
    upper = Problem(query, key, value, mask_mod=lambda b, h, q, k: q >= k)
    lower = Problem(query, key, value, mask_mod=lambda b, h, q, k: q + (keys - queries) >= k)
    oracle.check(upper, sdpa(query, key, value, is_causal=True))
    oracle.check(upper, sdpa(query, key, value, causal_upper_left(queries, keys)))
    oracle.check(lower, sdpa(query, key, value, lower_right))
    assert torch.allclose(sdpa(query, key, value, is_causal=True), torch_sdpa(query, key, value, is_causal=True), atol=1e-5)


def test_other_lengths_and_offsets_compile_nothing():
    compiled = []
    for queries, keys in ((70, 80), (90, 100), (75, 71)):
        query, key, value = inputs(2, 3, queries=queries, keys=keys)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sdpa(query, key, value, causal_lower_right(queries, keys))
        sdpa(query, key, value, normal(queries, keys))
        compiled.append(programs.compiled)
    assert len(set(compiled)) == 1


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 3, 4), (2, 1, 3, 2)])
def test_ranks(lead: tuple[int, ...]):
    query, key, value = inputs(*lead)
    masks = [None, normal(20, 24) > 0, normal(*lead, 20, 24), normal(*(1 for _ in lead), 20, 1)]
    for mask in masks:
        out, expected = sdpa(query, key, value, mask), torch_sdpa(query, key, value, mask)
        assert out.shape == expected.shape and torch.allclose(out, expected, atol=1e-5)
    assert torch.allclose(sdpa(query, key, value, is_causal=True), torch_sdpa(query, key, value, is_causal=True), atol=1e-5)


@pytest.mark.parametrize(
    "leads", [((2, 3), (1, 3)), ((2, 3), (2, 1)), ((1, 1), (2, 3)), ((2, 1, 3), (1, 4, 3)), ((3,), (1,)), ((2, 3), (3,))]
)
def test_batch_dims_broadcast(leads: tuple[tuple[int, ...], tuple[int, ...]]):
    query, key, value = normal(*leads[0], 20, 16), normal(*leads[1], 24, 16), normal(*leads[1], 24, 16)
    out, expected = sdpa(query, key, value), torch_sdpa(query, key, value)
    assert out.shape == expected.shape and torch.allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("lead", [(1, 3), (2, 1), (1, 1), (3,), ()])
def test_values_broadcast_by_themselves(lead: tuple[int, ...]):
    query, key, value = normal(2, 3, 20, 16), normal(2, 3, 24, 16), normal(*lead, 24, 16)
    out, expected = sdpa(query, key, value), torch_sdpa(query, key, value)
    assert out.shape == expected.shape and torch.allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_grouped_heads(lead: tuple[int, ...]):
    query, key, value = normal(*lead, 6, 20, 16), normal(*lead, 2, 24, 16), normal(*lead, 2, 24, 16)
    out = sdpa(query, key, value, is_causal=True, enable_gqa=True)
    repeated = key.repeat_interleave(3, -3), value.repeat_interleave(3, -3)
    assert torch.allclose(out, torch_sdpa(query, *repeated, is_causal=True), atol=1e-5)


def test_scale_autocast_meta_and_nothing():
    query, key, value = inputs(2, 3)
    assert torch.allclose(sdpa(query, key, value, scale=0.1), torch_sdpa(query, key, value, scale=0.1), atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sdpa(query, key, value).dtype == torch.bfloat16
    meta = sdpa(query.to("meta"), key.to("meta"), value.to("meta"), normal(20, 24).to("meta"))
    assert meta.device.type == "meta" and meta.shape == (2, 3, 20, 8)
    assert sdpa(query[:, :, :0], key, value).shape == (2, 3, 0, 8)
    assert (sdpa(query, key[:, :, :0], value[:, :, :0], normal(20, 1)[:, :0]) == 0).all()
    assert (sdpa(query, key, value, torch.zeros(24, dtype=torch.bool)) == 0).all()


Q, K, V = inputs(2, 3)
REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception]]] = {
    "dropout": ((Q, K, V), {"dropout_p": 0.5}, errors.DropoutError),
    "dropout below 0": ((Q, K, V), {"dropout_p": -0.5}, errors.DropoutError),
    "mask and causal": ((Q, K, V, normal(20, 24)), {"is_causal": True}, errors.AttentionMaskError),
    "bias and causal": ((Q, K, V, causal_upper_left(20, 24)), {"is_causal": True}, errors.AttentionMaskError),
    "bias of other lengths": ((Q, K, V, causal_upper_left(20, 25)), {}, errors.AttentionMaskError),
    "mask shape": ((Q, K, V, normal(20, 23)), {}, errors.AttentionMaskError),
    "mask rank": ((Q, K, V, normal(1, 1, 1, 20, 24)), {}, errors.AttentionMaskError),
    "mask dtype": ((Q, K, V, torch.ones(20, 24, dtype=torch.int32)), {}, errors.AttentionMaskError),
    "a list as a mask": ((Q, K, V, [[True] * 24] * 20), {}, errors.AttentionMaskError),
    "dtypes": ((Q, K.double(), V), {}, errors.DtypeError),
    "vectors": ((Q[0, 0, 0], K, V), {}, errors.ShapeError),
    "batch": ((Q, normal(3, 3, 24, 16), normal(3, 3, 24, 8)), {}, errors.ShapeError),
    "heads": ((normal(2, 6, 20, 16), K, V), {}, errors.ShapeError),
    "heads of keys and values": ((normal(2, 6, 20, 16), K, V[:, :2]), {"enable_gqa": True}, errors.ShapeError),
    "lengths": ((Q, K, V[:, :, 1:]), {}, errors.ShapeError),
    "nested": ((torch.nested.nested_tensor([Q[0], Q[1]]), K, V), {}, errors.AttncError),
    "sparse": ((Q, K, V, normal(20, 24).to_sparse()), {}, errors.UnsupportedTensorError),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str):
    arguments, keywords, kind = REFUSED[name]
    with pytest.raises(kind, match="remedy"):
        sdpa(*arguments, **keywords)


def test_what_newcomers_forget_is_the_remedy():
    query = normal(1, 6, 8, 16)
    with pytest.raises(errors.ShapeError, match=r"\[6\], \[3\], \[3\](?s:.*)enable_gqa=True"):
        sdpa(query, query[:, :3], query[:, :3])
    with pytest.raises(errors.AttentionMaskError, match=r"int64, not bool or float(?s:.*)attn_mask\.bool\(\)"):
        sdpa(query, query, query, torch.ones(8, 8, dtype=torch.int64))


# -- in torch's place
# -----------------------------------------------------------------------------------------------------------
@pytest.fixture(autouse=True)
def torchs_own_afterwards():
    attnc.stats(clear=True)
    yield
    operator = torch.ops.aten.scaled_dot_product_attention.default
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CPU")
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "AutogradCPU")
    attnc.stats(clear=True)


def taken() -> int:
    return sum(attnc.stats().taken.values())


def test_torchs_function_runs_attnc():
    expected = torch_sdpa(Q, K, V, is_causal=True)
    with attnc.sdpa():
        out = torch_sdpa(Q, K, V, is_causal=True)
        torch_sdpa(Q[0], K[0], V[0], normal(20, 24) > 0)
        torch_sdpa(normal(2, 6, 20, 16), K, V, enable_gqa=True)
        with torch.inference_mode():
            torch_sdpa(Q, K, V)
        module = torch.nn.MultiheadAttention(32, 2, batch_first=True).eval()
        with torch.no_grad():
            module.train()(normal(1, 5, 32), *(normal(1, 5, 32) for _ in range(2)), need_weights=False)
    assert torch.equal(out, sdpa(Q, K, V, is_causal=True)) and torch.allclose(out, expected, atol=1e-5)
    assert taken() == 5 and not attnc.stats().left
    assert torch.equal(torch_sdpa(Q, K, V, is_causal=True), expected) and taken() == 5


def test_what_is_refused_stays_torchs_and_is_counted():
    with attnc.sdpa():
        torch_sdpa(Q, K, V, dropout_p=0.5)
        with pytest.raises(RuntimeError):
            torch_sdpa(Q, K, V, normal(20, 24), is_causal=True)
        with torch.autograd.forward_ad.dual_level():
            torch_sdpa(torch.autograd.forward_ad.make_dual(Q, Q), K, V)
    left = attnc.stats().left
    assert taken() == 0 and sum(left.values()) == 3
    reasons = " ".join(reason for _, _, reason in left)
    for word in ("DropoutError", "AttentionMaskError", "forward-mode"):
        assert word in reasons
    assert "left to torch" in str(attnc.stats())


def test_nested_and_concurrent_uses_are_counted():
    with attnc.sdpa():
        inner = attnc.sdpa()
        inner.close()
        inner.close()  # twice does nothing
        torch_sdpa(Q, K, V)
    torch_sdpa(Q, K, V)
    assert taken() == 1
    ready, done = threading.Barrier(4), threading.Event()

    def user() -> None:
        for _ in range(50):
            with attnc.sdpa():
                torch_sdpa(Q, K, V)
        ready.wait()
        done.set()

    threads = [threading.Thread(target=user) for _ in range(3)]
    for thread in threads:
        thread.start()
    ready.wait()
    for thread in threads:
        thread.join()
    assert taken() == 151


def test_a_failure_inside_restores_torchs_own():
    with pytest.raises(KeyError), attnc.sdpa():
        raise KeyError
    torch_sdpa(Q, K, V)
    assert taken() == 0


def test_compiled_under_it():
    torch._dynamo.reset()
    with attnc.sdpa(), torch.no_grad():
        out = torch.compile(lambda q: torch_sdpa(q, K, V) * 2, backend="aot_eager", fullgraph=True)(Q)
    assert not attnc.stats().left
    assert torch.allclose(out, torch_sdpa(Q, K, V) * 2, atol=1e-5) and taken() == 1
    torch._dynamo.reset()


def test_vmap_under_it_is_torchs():
    with attnc.sdpa():
        out = torch.vmap(lambda q: torch_sdpa(q, K, V))(Q[None])
    assert torch.allclose(out[0], torch_sdpa(Q, K, V), atol=1e-5)
