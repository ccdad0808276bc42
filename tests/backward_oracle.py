"""The gradients of attention by torch's autograd, densely: in f64 (the oracle), or in the inputs' dtype as eager torch has
them.

The formula is that of oracle.py. A mod is only called on live pairs: what it would give for a dead one has no gradient, were
it NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from oracle import IndexByScalars, Problem, compare, modified


@dataclass(frozen=True)
class Gradients:
    """Of query, key, value, the scale and each captured tensor, for a loss of which `grad_out` and `grad_lse` are the
    gradients. The scale's comes in parts, [B, Hq], whose sum it is."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: Tensor
    captures: list[Tensor | None]

    def all(self) -> list[Tensor | None]:
        return [self.query, self.key, self.value, self.scale, *self.captures]


def oracle_gradients(problem: Problem, captures: Sequence[Tensor], grad_out: Tensor, grad_lse: Tensor | None) -> Gradients:
    """In f64. Captured tensors become f64 meanwhile; elements that are gathered from a half tensor keep their dtype, so that
    what is made of them is rounded as ever, and only their gradients are summed in f64."""
    with _widened(captures) as narrow:
        return _gradients(problem, captures, grad_out, grad_lse, torch.float64, narrow)


def eager_gradients(problem: Problem, captures: Sequence[Tensor], grad_out: Tensor, grad_lse: Tensor | None) -> Gradients:
    """In the inputs' own dtype: products in f32 (f64 for f64), the weights rounded, as eager flex_attention has them.

    For f64 this is the oracle's formula, so the sums are taken in another order: the head dims are turned round.
    """
    if problem.query.dtype != torch.float64:
        return _gradients(problem, captures, grad_out, grad_lse, problem.query.dtype, {})
    turned = [tensor.flip(-1) for tensor in (problem.query, problem.key, problem.value)]
    problem = replace(problem, query=turned[0], key=turned[1], value=turned[2])
    found = _gradients(problem, captures, grad_out.flip(-1), grad_lse, torch.float64, {})
    return replace(found, query=found.query.flip(-1), key=found.key.flip(-1), value=found.value.flip(-1))


@contextmanager
def _widened(captures: Sequence[Tensor]) -> Iterator[dict[int, torch.dtype]]:
    """Gives the half dtypes that tensors had, by their ids."""
    narrow = [tensor for tensor in captures if tensor.is_floating_point() and tensor.dtype != torch.float64]
    kept = [tensor.data for tensor in narrow]
    try:
        for tensor in narrow:
            tensor.data = tensor.data.double()
        yield {id(tensor): data.dtype for tensor, data in zip(narrow, kept, strict=True) if data.dtype != torch.float32}
    finally:
        for tensor, data in zip(narrow, kept, strict=True):
            tensor.data = data


class _Narrowing(IndexByScalars):
    """Elements of tensors that were widened are narrow again."""

    def __init__(self, narrow: dict[int, torch.dtype]):
        super().__init__()
        self.narrow = narrow

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        dtype = self.narrow.get(id(args[0])) if func is Tensor.__getitem__ else None
        return result if dtype is None else result.to(dtype)


def _gradients(
    problem: Problem,
    captures: Sequence[Tensor],
    grad_out: Tensor,
    grad_lse: Tensor | None,
    dtype: torch.dtype,
    narrow: dict[int, torch.dtype],
) -> Gradients:
    working = torch.float64 if dtype == torch.float64 else torch.float32
    query, key, value = (t.detach().to(dtype).requires_grad_() for t in (problem.query, problem.key, problem.value))
    scale = torch.full((*query.shape[:2], 1, 1), problem.scaling, dtype=working, requires_grad=True)
    floats = [tensor for tensor in captures if tensor.is_floating_point()]
    before = [tensor.requires_grad for tensor in floats]
    for tensor in floats:
        tensor.requires_grad_()
    try:
        out, lse = _attention(problem, query, key, value, scale, working, narrow)
        loss = (out.to(grad_out.dtype if dtype != torch.float64 else torch.float64) * grad_out.to(out.dtype)).sum()
        if grad_lse is not None:
            loss = loss + torch.where(lse == -torch.inf, 0, lse * grad_lse.to(lse.dtype)).sum()
        found = torch.autograd.grad(loss, [query, key, value, scale, *floats], allow_unused=True, materialize_grads=True)
    finally:
        for tensor, required in zip(floats, before, strict=True):
            tensor.requires_grad_(required)
    rest = iter(found[4:])
    of_captures = [next(rest) if tensor.is_floating_point() else None for tensor in captures]
    return Gradients(found[0], found[1], found[2], found[3], of_captures)


def _attention(
    problem: Problem,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: Tensor,
    working: torch.dtype,
    narrow: dict[int, torch.dtype],
) -> tuple[Tensor, Tensor]:
    batch, heads, queries, _ = query.shape
    head_of = torch.arange(heads) // (heads // key.shape[1])
    wide_key, wide_value = (tensor.expand(batch, -1, -1, -1)[:, head_of] for tensor in (key, value))
    natural = (query.to(working) @ wide_key.to(working).mT) * scale
    with torch.no_grad():
        scores = torch.stack([modified(problem, natural[b], b, slice(0, queries)) for b in range(batch)])
        live = scores != -torch.inf
    if problem.score_mod is None:
        x = natural[live]
    else:
        places = [place.int() for place in live.nonzero(as_tuple=True)]

        def call(*arguments: Tensor) -> Tensor:
            with _Narrowing(narrow):
                return problem.score_mod(*arguments)  # pyright: ignore[reportOptionalCall]

        chosen = natural[live]
        x = torch.vmap(call)(chosen, *places).to(working) if len(chosen) else chosen
    scores = torch.full_like(natural, -torch.inf).masked_scatter(live, x)
    top = scores.detach().amax(dim=-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0, top)
    weights = (scores - top).exp()
    total = weights.sum(dim=-1, keepdim=True)
    dead = total == 0
    total = torch.where(dead, 1, total)
    out = (weights / total).to(query.dtype) @ wide_value
    lse = torch.where(dead, -torch.inf, top + total.log())[..., 0]
    return torch.where(dead, 0, out), lse


def check_gradients(
    name: str,
    actual: Sequence[Tensor | None],
    problem: Problem,
    captures: Sequence[Tensor],
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
) -> None:
    """Raises AssertionError where a gradient (of query, key, value, scale, captures; None is not looked at) breaks the rule of
    oracle.check. A captured tensor's own dtype counts, if that is narrower."""
    exact = oracle_gradients(problem, captures, grad_out, grad_lse)
    plain = eager_gradients(problem, captures, grad_out, grad_lse)
    names = ["query", "key", "value", "scale", *(f"capture {n}" for n in range(len(captures)))]
    for n, (what, found, wanted, simple) in enumerate(zip(names, actual, exact.all(), plain.all(), strict=True)):
        if found is None or wanted is None or simple is None:
            continue
        dtype = problem.query.dtype
        if what == "scale":
            _check_sum(f"{name}: {what}", found, wanted, simple, dtype)
            continue
        if n > 3 and torch.finfo(captures[n - 4].dtype).eps > torch.finfo(dtype).eps:
            dtype = captures[n - 4].dtype
        compare(f"{name}: {what}", found, wanted, simple, dtype)


def _check_sum(what: str, actual: Tensor, exact: Tensor, plain: Tensor, dtype: torch.dtype) -> None:
    """A sum of parts, each of which the rule allows an error. (By itself, one number may be exact by chance.)"""
    largest, eager_error = exact.abs().max().item(), (plain.double() - exact).abs().max().item()
    allowed = exact.numel() * (1.5 * eager_error + 4 * torch.finfo(dtype).eps * max(1.0, largest))
    error = abs(actual.item() - exact.sum().item())
    assert error <= allowed, f"{what}: error {error:.3g}, allowed {allowed:.3g}"
