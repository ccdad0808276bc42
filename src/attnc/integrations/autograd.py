"""Gradients of attention: the `torch.autograd.Function` around a call, eager or in a graph.

    flex_attention(query, …)          a tensor of the call requires grad
      Attention.apply                 forward: the call itself, with lse in f64; backward: AttentionBackward
        AttentionBackward.apply       the backward kernel; to differentiate it again is a named error

Two kinds of calls come here. An eager one (`Direct`) runs the kernels at once. One that something traces or transforms
(`Operator`) calls `attnc::attention` and `attnc::attention_backward`, so that graphs hold operators; vmap folds them into the
batch, torch.func.grad and AOTAutograd differentiate through the same Function.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from attnc.errors import GradientNotImplementedError
from attnc.program_text import KEPT, Program, from_text, to_text


@dataclass(frozen=True, eq=False)
class Direct:
    """An eager call: `call` is a `flex.Call`, whose kernels are run at once. Its tensors are its captures."""

    call: Any

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scale: Tensor | None, tensors: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        from attnc import flex

        out, lse, max_scores = flex.run(self.call)
        assert lse is not None
        return out, lse, query.new_empty(0) if max_scores is None else max_scores

    def captures(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return tensors

    def backward(
        self,
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
        saved: Sequence[Tensor],
        scale: Tensor | None,
        tensors: Sequence[Tensor],
        needs: Sequence[bool],
    ) -> Sequence[Tensor | None]:
        return gradients(self.call, grad_out, grad_lse, saved, scale, tensors, needs)


@dataclass(frozen=True, eq=False)
class Operator:
    """A call of `attnc::attention`: `tensors` are its captures, then its floats that are tensors, then its block lists."""

    captured: int
    float_tensors: int
    ints: Sequence[Any] | None
    floats: Sequence[Any] | None
    program: str
    scale: Any

    def _split(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor] | None, list[Tensor]]:
        middle = self.captured + self.float_tensors
        return list(tensors[: self.captured]), list(tensors[self.captured : middle]) or None, list(tensors[middle:])

    def captures(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return tensors[: self.captured]

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scale: Tensor | None, tensors: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        from attnc import torch_op

        captures, float_tensors, lists = self._split(tensors)
        return torch_op.attention(
            query, key, value, captures, self.ints, self.floats, float_tensors, lists, self.program, self.scale, scale
        )

    def backward(
        self,
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
        saved: Sequence[Tensor],
        scale: Tensor | None,
        tensors: Sequence[Tensor],
        needs: Sequence[bool],
    ) -> Sequence[Tensor | None]:
        from attnc import torch_op

        out = saved[3]
        captures, float_tensors, lists = self._split(tensors)
        grads = torch_op.attention_backward(
            torch.zeros_like(out) if grad_out is None else grad_out,
            grad_lse,
            *saved,
            captures,
            self.ints,
            self.floats,
            float_tensors,
            lists,
            self.program,
            list(needs),
            self.scale,
            scale,
        )
        *first, of_captures = grads
        return [grad if need else None for grad, need in zip((*first, *of_captures), needs, strict=True)]


@dataclass(frozen=True, eq=False)
class Wanted:
    """Which gradients of a call are needed: of query, key, value, scale and each capture. (One object, for torch.func looks
    into tuples.)"""

    call: Direct | Operator
    needs: tuple[bool, ...]


class Attention(torch.autograd.Function):
    """(out, lse, max_scores) of a call; `max_scores` has no gradient, as torch's has none."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        call: Direct | Operator, query: Tensor, key: Tensor, value: Tensor, scale: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return call.forward(query, key, value, scale, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        call, query, key, value, scale, *tensors = inputs
        out, lse, max_scores = output
        ctx.mark_non_differentiable(max_scores)
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(query, key, value, out, lse, scale, *tensors)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: Any) -> tuple[Any, ...]:  # type: ignore[override]
        query, key, value, out, lse, scale, *tensors = ctx.saved_tensors
        _, *wanted = ctx.needs_input_grad
        captured = len(ctx.call.captures(tensors))
        needs = tuple(wanted[: 4 + captured])
        if (grad_out is None and grad_lse is None) or not any(needs):
            return (None,) * (5 + len(tensors))
        grads = iter(
            AttentionBackward.apply(Wanted(ctx.call, needs), grad_out, grad_lse, query, key, value, out, lse, scale, *tensors)
        )
        of_inputs = [next(grads) if need else None for need in needs]
        return None, *of_inputs, *(None,) * (len(tensors) - captured)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise GradientNotImplementedError("attention carries a forward-mode tangent, and attnc has reverse mode only")


class AttentionBackward(torch.autograd.Function):
    """Those gradients of query, key, value, scale and each capture that are needed."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        wanted: Wanted,
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        saved = query, key, value, out, lse
        grads = wanted.call.backward(grad_out, grad_lse, saved, scale, tensors, wanted.needs)
        return tuple(grad for grad in grads if grad is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_second_derivative()

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise GradientNotImplementedError("a gradient of attention carries a forward-mode tangent")


def gradients(
    call: Any,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    saved: Sequence[Tensor],
    scale: Tensor | None,
    captures: Sequence[Tensor],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Those of a `flex.Call`, by the kernels; that of the scale is in its own dtype. `saved`: query, key, value, out, lse."""
    from attnc.backward import attention_backward

    options = call.numbers, call.blocks, call.scale, call.record, call.signature
    grads = attention_backward(*saved, grad_out, grad_lse, captures, *options, tuple(needs))  # type: ignore[call-arg]
    if scale is not None and (grad := grads[3]) is not None:
        grads[3] = grad.to(scale.dtype)
    return grads


def refuse_second_derivative() -> NoReturn:
    """Raises `GradientNotImplementedError`."""
    raise GradientNotImplementedError(
        "the gradient of attention is differentiated again, and attnc has first derivatives only",
        remedy="call backward() without create_graph=True, or use torch's dense attention for second derivatives",
    )


def run(call: Any) -> tuple[Tensor, Tensor, Tensor]:
    """An eager call (`flex.Call`) whose results keep the graph: (out, lse, max_scores, the latter maybe without elements)."""
    out, lse, max_scores = Attention.apply(Direct(call), call.query, call.key, call.value, call.scale_tensor, *call.captures)
    return out, lse if call.query.dtype is torch.float64 else lse.float(), max_scores


_SingleLevel = type(
    "AttentionSingleLevel",
    (torch.autograd.function._SingleLevelFunction,),
    {name: staticmethod(getattr(Attention, name)) for name in ("forward", "setup_context", "backward", "jvp")},
)
"""`Attention` for the operator's own autograd kernel inside torch.func: the transform has been dealt with already."""


def recorded(*operands: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`attention`, called by the operator's kernel for autograd."""
    if torch._C._functorch.peek_interpreter_stack() is None:  # type: ignore[attr-defined]
        return attention(*operands)
    from torch._functorch.autograd_function import enable_single_level_autograd_function  # type: ignore[attr-defined]

    with enable_single_level_autograd_function():
        return attention(*operands, function=_SingleLevel)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captures: Sequence[Tensor],
    ints: Sequence[Any] | None,
    floats: Sequence[Any] | None,
    float_tensors: Sequence[Tensor] | None,
    block_lists: Sequence[Tensor],
    program: str,
    scale: Any = None,
    scale_tensor: Tensor | None = None,
    *,
    function: Any = Attention,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attnc::attention`, differentiable: the same arguments, the same results."""
    read = from_text(program)
    call = Operator(len(captures), len(float_tensors or ()), ints, floats, trained(read), scale)
    tensors = (*captures, *(float_tensors or ()), *block_lists)
    out, lse, max_scores = function.apply(call, query, key, value, scale_tensor, *tensors)
    if not read.return_lse:
        lse = query.new_empty(0)
    elif query.dtype is not torch.float64:
        lse = lse.float()
    return out, lse, max_scores


@functools.lru_cache(maxsize=KEPT)
def trained(program: Program) -> str:
    """The text of a program whose lse is a result, in f64: the backward pass needs it so."""
    return to_text(replace(program, return_lse=True, wide_lse=True))
