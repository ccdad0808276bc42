"""Gradients through torch: eager, compiled, transformed by torch.func, checkpointed, in torch's own functions' place.

Values are tried on one mod here, against f64 autograd of the dense formula; every mod of the zoo is in test_backward_zoo.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention
from torch.utils.checkpoint import checkpoint

import attnc
from attnc import errors, flex_attention

GENERATOR = torch.Generator().manual_seed(0)
LENGTH = 6


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


Q, K, V, WEIGHTS = (normal(1, 2, LENGTH, 8) for _ in range(4))
BIAS = normal(2, 2 * LENGTH - 1)
MASK = normal(LENGTH, LENGTH)
INPUTS = (Q, K, V, BIAS)
BACKENDS = ("eager", "aot_eager", "inductor", "attnc")


def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return flex_attention(
        query,
        key,
        value,
        score_mod=lambda score, b, h, q, k: score * 1.5 + bias[h, q - k + LENGTH - 1],
        mask_mod=lambda b, h, q, k: q >= k,
    )


def dense(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    position = torch.arange(LENGTH)
    scores = query @ key.mT / 8**0.5 * 1.5 + bias[:, position[:, None] - position + LENGTH - 1]
    return scores.masked_fill(position[:, None] < position, -torch.inf).softmax(-1) @ value


def gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor] = INPUTS) -> list[Tensor | None]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    (function(*leaves) * WEIGHTS).sum().backward()
    return [leaf.grad for leaf in leaves]


def transformed(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """The same gradients by torch.func."""
    return torch.func.grad(lambda *leaves: (function(*leaves) * WEIGHTS).sum(), argnums=tuple(range(len(inputs))))(*inputs)


def close(found: Any, expected: Any) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


EXPECTED = gradients(dense)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# -- autograd ---------------------------------------------------------------------------------------------------------------
def test_eager():
    close(gradients(attention), EXPECTED)


def test_gradcheck():
    assert torch.autograd.gradcheck(attention, [tensor.clone().requires_grad_() for tensor in INPUTS])


@pytest.mark.parametrize("wanted", range(4))
def test_only_what_is_asked_for_has_a_gradient(wanted: int):
    leaves = [tensor.clone().requires_grad_(place == wanted) for place, tensor in enumerate(INPUTS)]
    (attention(*leaves) * WEIGHTS).sum().backward()
    assert [leaf.grad is not None for leaf in leaves] == [place == wanted for place in range(4)]
    close([leaves[wanted].grad], [EXPECTED[wanted]])


def test_gradients_accumulate_and_an_unused_capture_has_none():
    unused = torch.ones(3, requires_grad=True)
    leaves = [tensor.clone().requires_grad_() for tensor in INPUTS]

    def mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        _ = unused[h]
        return score * 1.5 + leaves[3][h, q - k + LENGTH - 1]

    for _ in range(2):
        (flex_attention(leaves[0], leaves[1], leaves[2], mod, mask_mod=lambda b, h, q, k: q >= k) * WEIGHTS).sum().backward()
    close([leaf.grad for leaf in leaves], [2 * grad for grad in EXPECTED if grad is not None])
    assert unused.grad is None


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_through_lse_and_out(weight: float):
    def ours(query: Tensor, key: Tensor) -> Tensor:
        out, lse = flex_attention(query, key, V, return_lse=True)
        return lse.square().sum() + weight * out.sin().sum()

    def theirs(query: Tensor, key: Tensor) -> Tensor:
        scores = query @ key.mT / 8**0.5
        return scores.logsumexp(-1).square().sum() + weight * (scores.softmax(-1) @ V).sin().sum()

    leaves = [Q.clone().requires_grad_(), K.clone().requires_grad_()]
    close(torch.autograd.grad(ours(*leaves), leaves), torch.func.grad(theirs, (0, 1))(Q, K))
    close(torch.func.grad(ours, (0, 1))(Q, K), torch.func.grad(theirs, (0, 1))(Q, K))


def test_through_lse_alone():
    query = Q.clone().requires_grad_()
    flex_attention(query, K, V, return_lse=True)[1].square().sum().backward()
    close([query.grad], [torch.func.grad(lambda q: (q @ K.mT / 8**0.5).logsumexp(-1).square().sum())(Q)])


def test_the_maximum_has_no_gradient_and_what_was_not_asked_is_none():
    query = Q.clone().requires_grad_()
    out, aux = flex_attention(query, K, V, return_aux=AuxRequest(max_scores=True))
    assert out.requires_grad and aux.lse is None and not aux.max_scores.requires_grad
    torch.testing.assert_close(aux.max_scores, (Q @ K.mT / 8**0.5).amax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_scale_that_is_a_tensor(dtype: torch.dtype):
    scale = torch.tensor(0.3, dtype=dtype, requires_grad=True)
    (flex_attention(Q, K, V, scale=scale) * WEIGHTS).sum().backward()
    expected = torch.func.grad(lambda s: (((Q @ K.mT) * s).softmax(-1) @ V * WEIGHTS).sum())(
        torch.tensor(0.3).to(dtype).double()
    )
    assert scale.grad is not None and scale.grad.dtype is dtype and scale.grad.dim() == 0
    torch.testing.assert_close(scale.grad, expected.to(dtype))


def test_a_parameter_of_a_module_that_is_the_mod():
    class Slopes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slopes = torch.nn.Parameter(torch.tensor([0.5, -0.25], dtype=torch.float64))

        def forward(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score + self.slopes[h] * (k - q)

    module = Slopes()
    (flex_attention(Q, K, V, module) * WEIGHTS).sum().backward()
    position = torch.arange(LENGTH)

    def theirs(slopes: Tensor) -> Tensor:
        return ((Q @ K.mT / 8**0.5 + slopes[:, None, None] * (position - position[:, None])).softmax(-1) @ V * WEIGHTS).sum()

    close([module.slopes.grad], [torch.func.grad(theirs)(module.slopes.detach())])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant: bool):
    close(gradients(lambda *leaves: checkpoint(attention, *leaves, use_reentrant=reentrant)), EXPECTED)


def test_autocast():
    leaves = [tensor.float().requires_grad_() for tensor in (Q, K, V)]
    with torch.autocast("cpu", torch.bfloat16):
        out = flex_attention(leaves[0], leaves[1], leaves[2])
    assert out.dtype is torch.bfloat16
    (out.float() * WEIGHTS.float()).sum().backward()
    expected = gradients(lambda q, k, v: (q @ k.mT / 8**0.5).softmax(-1) @ v, (Q, K, V))
    for leaf, grad in zip(leaves, expected, strict=True):
        assert leaf.grad is not None and leaf.grad.dtype is torch.float32 and grad is not None
        assert (leaf.grad.double() - grad).norm() < 0.02 * grad.norm()


# -- torch.compile ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled(backend: str):
    close(gradients(torch.compile(attention, backend=backend, fullgraph=True)), EXPECTED)


def test_compiled_with_dynamic_lengths_compiles_nothing_of_ours_again():
    def mean_and_lse(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        out, lse = flex_attention(query, key, value, lambda score, b, h, q, k: score + bias[q], return_lse=True)
        return out.sum() + lse.square().sum()

    def theirs(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        scores = query @ key.mT / 8**0.5 + bias[: query.shape[2], None]
        return (scores.softmax(-1) @ value).sum() + scores.logsumexp(-1).square().sum()

    compiled = torch.compile(mean_and_lse, backend="aot_eager", fullgraph=True, dynamic=True)
    counts = []
    for length in (5, 7, 11):
        leaves = [normal(1, 2, length, 8).requires_grad_() for _ in range(3)] + [normal(length).requires_grad_()]
        close(torch.autograd.grad(compiled(*leaves), leaves), torch.func.grad(theirs, (0, 1, 2, 3))(*leaves))
        counts.append(attnc.programs.compiled)
    assert counts[1] == counts[2]


def test_compiled_torch_func_grad():
    compiled = torch.compile(lambda q, k, v, bias: transformed(attention, q, k, v, bias), backend="aot_eager", fullgraph=True)
    close(compiled(*INPUTS), EXPECTED)


@pytest.mark.parametrize("reentrant", [True, False])
def test_compiled_checkpoint(reentrant: bool):
    compiled = torch.compile(lambda *leaves: checkpoint(attention, *leaves, use_reentrant=reentrant), backend="aot_eager")
    close(gradients(compiled), EXPECTED)


# -- torch.func -------------------------------------------------------------------------------------------------------------
def test_func_grad():
    close(transformed(attention, *INPUTS), EXPECTED)


def test_gradients_of_each_sample():
    queries = normal(3, *Q.shape)

    def of_one(function: Callable[..., Tensor], query: Tensor) -> tuple[Tensor, ...]:
        return torch.func.grad(lambda q, bias: (function(q, K, V, bias) * WEIGHTS).sum(), (0, 1))(query, BIAS)

    found = torch.func.vmap(lambda query: of_one(attention, query))(queries)
    close(found, [torch.stack(grads) for grads in zip(*(of_one(dense, query) for query in queries), strict=True)])


def test_gradient_of_a_mapped_call():
    def loss(function: Callable[..., Tensor], queries: Tensor, biases: Tensor) -> Tensor:
        mapped = torch.func.vmap(lambda query, bias: function(query, K, V, bias))(queries, biases)
        return mapped.square().sum()

    inputs = normal(3, *Q.shape), normal(3, *BIAS.shape)
    found = torch.func.grad(lambda queries, biases: loss(attention, queries, biases), (0, 1))(*inputs)
    close(found, torch.func.grad(lambda queries, biases: loss(dense, queries, biases), (0, 1))(*inputs))
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    loss(attention, leaves[0], leaves[1]).backward()
    close([leaf.grad for leaf in leaves], found)


def test_jacobian():
    found = torch.func.jacrev(lambda query: attention(query, K, V, BIAS)[0, 0])(Q)
    close([found], [torch.func.jacrev(lambda query: dense(query, K, V, BIAS)[0, 0])(Q)])


def second(query: Tensor) -> None:
    leaf = query.clone().requires_grad_()
    (grad,) = torch.autograd.grad(attention(leaf, K, V, BIAS).sum(), leaf, create_graph=True)
    grad.sum().backward()


def dual(query: Tensor) -> None:
    with torch.autograd.forward_ad.dual_level():
        attention(torch.autograd.forward_ad.make_dual(query, query), K, V, BIAS)


@pytest.mark.parametrize(
    "call",
    [
        second,
        dual,
        lambda query: torch.func.hessian(lambda leaf: attention(leaf, K, V, BIAS).sum())(query),
        lambda query: torch.func.jvp(lambda leaf: attention(leaf, K, V, BIAS), (query,), (query,)),
    ],
    ids=["twice", "forward mode", "hessian", "jvp"],
)
def test_derivatives_that_there_are_not_are_refused(call: Callable[[Tensor], None]):
    with pytest.raises(errors.GradientNotImplementedError, match="remedy"):
        call(Q)
    close(gradients(attention), EXPECTED)


# -- torch's own functions ----------------------------------------------------------------------------------------------------
def scaled(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def torchs(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, LENGTH, LENGTH, device="cpu")
    return torch_flex_attention(
        query, key, value, lambda score, b, h, q, k: score * 1.5 + bias[h, q - k + LENGTH - 1], block_mask=mask
    )


@pytest.fixture
def all_taken() -> Iterator[None]:
    """Torch's own kernels compute nothing."""
    attnc.stats(clear=True)
    yield
    found = attnc.stats()
    assert found.taken and not found.left, found


def test_scaled_dot_product_attention_and_its_mask(all_taken: None):
    expected = gradients(scaled, (Q, K, V, MASK))
    close(gradients(attnc.scaled_dot_product_attention, (Q, K, V, MASK)), expected)
    close(transformed(attnc.scaled_dot_product_attention, Q, K, V, MASK), expected)
    with attnc.sdpa():
        close(gradients(scaled, (Q, K, V, MASK)), expected)
        close(gradients(torch.compile(scaled, backend="aot_eager", fullgraph=True), (Q, K, V, MASK)), expected)
    close(gradients(torch.compile(scaled, backend="attnc", fullgraph=True), (Q, K, V, MASK)), expected)


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager", "inductor"])
def test_torchs_flex_attention(backend: str | None, all_taken: None):
    function = torchs if backend is None else torch.compile(torchs, backend=backend)
    with attnc.enable_torch_flex():
        close(gradients(function), EXPECTED)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="does not support backward on CPU"):
        gradients(torchs)


@pytest.mark.parametrize("rest", ["inductor", "eager"])
def test_a_model_is_trained_by_the_backend(rest: str, all_taken: None):
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(8, 24)
            self.bias = torch.nn.Parameter(torch.zeros(2, 2 * LENGTH - 1))

        def forward(self, x: Tensor) -> Tensor:
            query, key, value = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
            out = torch_flex_attention(query, key, value, lambda score, b, h, q, k: score + self.bias[h, q - k + LENGTH - 1])
            return (out + F.scaled_dot_product_attention(query, key, value, is_causal=True)).transpose(1, 2).flatten(2)

    def train(run: Callable[[Tensor], Tensor], model: Model) -> list[float]:
        optimiser = torch.optim.SGD(model.parameters(), 0.5)
        x, losses = torch.linspace(-1, 1, 2 * LENGTH * 8).reshape(2, LENGTH, 8), []
        for _ in range(4):
            loss = (run(x) - x.flip(-1)).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        return losses

    torch.manual_seed(0)
    model, same = Model(), Model()
    same.load_state_dict(model.state_dict())
    with attnc.enable_torch_flex():
        eager = train(same, same)
    compiled = train(torch.compile(model, backend="attnc", fullgraph=True, options={"rest": rest}), model)
    assert compiled == pytest.approx(eager, rel=1e-5) and compiled[-1] < compiled[0]
    assert model.bias.abs().sum() > 0
