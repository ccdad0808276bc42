"""Cases that train: forward and backward of one call, and the gradients that f64 autograd of the dense formula gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnc.bench import problem as problems
from attnc.bench.case import Case
from attnc.bench.peers import Prepared
from attnc.bench.problem import Problem, dense_mask, positions


@dataclass
class Training(Problem):
    """A problem whose tensors are leaves, `bias` (what the mod captures, or None) among them, and the gradient of out."""

    grad_out: Tensor
    bias: Tensor | None

    @property
    def leaves(self) -> list[Tensor]:
        return [self.query, self.key, self.value] + ([] if self.bias is None else [self.bias])


def make(case: Case) -> Training:
    """The tensors and mods of a case, of the same numbers in every process."""
    posed = problems.make(case)
    generator = torch.Generator().manual_seed(3)
    grad_out = torch.randn(case.batch, case.heads, case.queries, case.dim, generator=generator).to(posed.query.dtype)
    bias = None
    if case.mod == "alibi":
        bias = torch.exp2(-8.0 * torch.arange(1, case.heads + 1) / case.heads)
    elif case.mod == "relative_bias":
        bias = torch.randn(case.heads, case.queries + case.keys, generator=generator)
    elif case.mod:
        raise ValueError(f"{case.mod} has nothing to learn")
    for leaf in (posed.query, posed.key, posed.value, *([] if bias is None else [bias])):
        leaf.requires_grad_()
    return Training(case, posed.query, posed.key, posed.value, _mod(case, bias), posed.mask_mod, grad_out, bias)


def _mod(case: Case, bias: Tensor | None) -> problems.Mod | None:
    if bias is None:
        return None
    if case.mod == "alibi":
        return lambda score, b, h, q, k: score + bias[h] * (k - q)
    return lambda score, b, h, q, k: score + bias[h, k - q + case.queries]


def trained(problem: Problem, call: Callable[[], Tensor]) -> Prepared:
    """`call`, which gives out, and its backward pass; the result is (out, the leaves' gradients)."""
    assert isinstance(problem, Training)
    leaves, grad_out = problem.leaves, problem.grad_out

    def step() -> tuple[Tensor, ...]:
        with torch.enable_grad():
            out = call()
            return (out, *torch.autograd.grad(out, leaves, grad_out))

    return Prepared(step)


# -- what is right ------------------------------------------------------------------------------------------------------------
@dataclass
class Reference:
    """out and the leaves' gradients in f64; `bounds` on the error of each, as a share of its largest value; the number of live
    pairs of a head."""

    exact: list[Tensor]
    bounds: list[float]
    live: int

    @property
    def bound(self) -> float:
        """Errors are given as multiples of what is allowed."""
        return 1.0

    @property
    def eager_error(self) -> float:
        return max(self.bounds)


def reference(problem: Training) -> Reference:
    """The formula in f64, and what an honest implementation may differ from it."""
    exact = _formula(problem, torch.float64)
    eager = _formula(problem, problem.query.dtype)
    epsilon = torch.finfo(problem.query.dtype).eps
    bounds = [
        1.5 * float((ours.double() - right).abs().max()) + 4 * epsilon * max(1.0, float(right.abs().max()))
        for ours, right in zip(eager, exact, strict=True)
    ]
    return Reference(exact, bounds, problems.live_pairs(problem))


def _formula(problem: Training, dtype: torch.dtype) -> list[Tensor]:
    """out and the gradients by autograd of the dense formula in `dtype`, head by head."""
    case = problem.case
    mask = dense_mask(problem)
    b, h, q, k = positions(case)
    out = torch.empty(case.batch, case.heads, case.queries, case.dim, dtype=dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    bias = None if problem.bias is None else problem.bias.detach().to(wide)
    of_bias = None if bias is None else torch.zeros_like(bias)
    grads = [torch.zeros(tensor.shape, dtype=dtype) for tensor in (problem.query, problem.key, problem.value)]
    with torch.enable_grad():
        for batch in range(case.batch):
            for head in range(case.heads):
                places = [(batch, head), (batch, head // (case.heads // case.kv_heads))]
                tensors = (problem.query[places[0]], problem.key[places[1]], problem.value[places[1]])
                leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
                query, key, value = leaves
                scores = (query @ key.T) / math.sqrt(case.dim)
                if bias is not None:
                    learnt = bias.clone().requires_grad_()
                    mod = _mod(case, learnt)
                    assert mod is not None
                    leaves.append(learnt)
                    scores = mod(scores, b[batch, 0], h[0, head], q[0, 0], k[0, 0]).to(dtype)
                if mask is not None:
                    scores = scores.masked_fill(~mask[0, 0], -torch.inf)
                result = torch.softmax(scores, -1) @ value
                found = torch.autograd.grad(result, leaves, problem.grad_out[batch, head].to(dtype))
                out[batch, head] = result.detach()
                grads[0][places[0]] = found[0]
                grads[1][places[1]] += found[1]
                grads[2][places[1]] += found[2]
                if of_bias is not None:
                    of_bias += found[3]
    return [out, *grads] + ([] if of_bias is None else [of_bias])


def error_of(results: Any, expected: Reference, problem: Training) -> float:
    """The largest error of out and the gradients, as a multiple of what is allowed; infinite where they are not even like
    them."""
    if not isinstance(results, tuple) or len(results) != len(expected.exact):
        return math.inf
    worst = 0.0
    for found, right, bound in zip(results, expected.exact, expected.bounds, strict=True):
        if found.shape != right.shape or not bool(torch.isfinite(found).all()):
            return math.inf
        worst = max(worst, float((found.double() - right).abs().max()) / bound)
    return worst
