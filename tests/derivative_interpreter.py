"""Runs the derivative of an attention's region in NumPy, for all its (b, h, q, k) at once, in f64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue

from attnc import flex
from attnc.capture.to_torch import to_torch
from attnc.dialects.attention_backward import AccumulateOp, AttentionBackwardOp
from attnc.target import Target
from attnc.transforms import convert_torch_to_linalg_ext, differentiate_attention
from oracle import IndexByScalars
from region_interpreter import RegionInterpreter
from scalar_ops import evaluate

TARGET = Target("x86_64-unknown-linux-gnu", "", "", 512, 32)


class DerivativeInterpreter(RegionInterpreter):
    """`gradients` holds an array of zeros for each captured tensor."""

    gradients: dict[SSAValue, np.ndarray]
    shape: tuple[int, ...]

    def _run(self, op: Operation) -> None:
        if not isinstance(op, AccumulateOp):
            super()._run(op)
            return
        value = np.broadcast_to(self.values[op.value], self.shape)
        target = self.gradients[op.target]
        indices = [np.broadcast_to(self.values[index], self.shape) for index in op.indices]
        wrapped = [np.where(index < 0, index + size, index) for index, size in zip(indices, target.shape, strict=True)]
        if wrapped:
            np.add.at(target, tuple(wrapped), value)
        else:
            target += value.sum()


def differentiated(
    score_mod: Callable[..., Tensor], captured: Sequence[Tensor]
) -> tuple[AttentionBackwardOp, list[Tensor], Sequence[int | float]]:
    """The derivative of a score mod that sees f64 scores, by the score and all captured floats; and what it captured, tensors
    and numbers."""
    query = torch.zeros(1, 1, 1, 8, dtype=torch.float64)
    call = flex.checked_call(query, query, query, score_mod, None, None, False, False, None, None, None)
    captures = list(call.captures)
    assert {id(tensor) for tensor in captures} <= {id(tensor) for tensor in captured}
    needs = [True, True, True, False, *(tensor.is_floating_point() for tensor in captures)]
    module = to_torch(call.record, call.signature, needs)
    convert_torch_to_linalg_ext.run(module, TARGET)
    differentiate_attention.run(module, TARGET)
    module.verify()
    (op,) = (op for op in module.walk() if isinstance(op, AttentionBackwardOp))
    return op, captures, call.numbers


def derivative(
    score_mod: Callable[..., Tensor], captured: Sequence[Tensor], scores: Tensor, d_modified: Tensor
) -> tuple[Tensor, list[Tensor | None]]:
    """(the gradient of `scores` [q, k], those of the `captured` tensors) of `score_mod` at one batch and head, by its
    derivative."""
    op, captures, numbers = differentiated(score_mod, captured)
    function = op.parent_op()
    assert isinstance(function, FuncOp)
    arguments = function.body.block.args
    shape = (1, 1, 1, *scores.shape)
    outside: dict[SSAValue, Any] = {}
    gradients: dict[SSAValue, np.ndarray] = {}
    for argument, tensor in zip(arguments[4:], captures, strict=False):
        outside[argument] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy()
        gradients[argument] = np.zeros(tensor.shape)
    outside |= {argument: np.asarray(number) for argument, number in zip(arguments[4 + len(captures) :], numbers, strict=False)}
    for other in function.body.block.ops:  # the group of heads is 1
        if other.name == "tensor.dim":
            outside[other.results[0]] = np.asarray(1)
        elif other.name.startswith("arith."):
            outside[other.results[0]] = evaluate(other, [outside[operand] for operand in other.operands], False)
    block = op.derivative.block
    given = scores.numpy().reshape(shape), d_modified.numpy().reshape(shape), np.ones(shape, bool)
    outside |= zip(block.args, given, strict=True)
    positions = {dim: np.arange(size).reshape([-1 if d == dim else 1 for d in range(5)]) for dim, size in enumerate(shape)}
    interpreter = DerivativeInterpreter(outside, positions)
    interpreter.gradients, interpreter.shape = gradients, shape
    (found_score,) = interpreter.run(block)
    d_score = torch.from_numpy(np.broadcast_to(found_score, shape).reshape(scores.shape).copy())
    found = {id(tensor): gradients[argument] for argument, tensor in zip(arguments[4:], captures, strict=False)}
    return d_score, [torch.from_numpy(found[id(tensor)]) if id(tensor) in found else None for tensor in captured]


def autograd(
    score_mod: Callable[..., Tensor], captured: Sequence[Tensor], scores: Tensor, d_modified: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The same by torch's autograd."""
    leaf = scores.clone().requires_grad_()
    floats = [tensor for tensor in captured if tensor.is_floating_point()]
    for tensor in floats:
        tensor.requires_grad_()
    try:
        places = [torch.zeros(scores.numel(), dtype=torch.int32)] * 2
        places += [place.int() for place in torch.ones_like(scores).nonzero(as_tuple=True)]

        def call(*arguments: Tensor) -> Tensor:
            with IndexByScalars():
                return score_mod(*arguments)

        result = torch.vmap(call)(leaf.flatten(), *places).double()
        found = torch.autograd.grad(result, [leaf, *floats], d_modified.flatten(), allow_unused=True, materialize_grads=True)
    finally:
        for tensor in floats:
            tensor.requires_grad_(False)
    return found[0], list(found[1:])
