"""Runs the backward program of mods by the interpreter of the tile dialect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnc import flex, pipeline
from attnc.capture.to_torch import to_torch
from attnc.dialects import tile
from attnc.runtime.attention_backward import ROW_SUM
from attnc.target import Target
from oracle import Problem
from tile_interpreter import run


def to_array(tensor: Tensor) -> np.ndarray:
    """bf16 as float32."""
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def captured_call(problem: Problem) -> flex.Call:
    """The call of `flex_attention` on a problem, checked and captured."""
    return flex.checked_call(
        problem.query, problem.key, problem.value, problem.score_mod, problem.block_mask, problem.scale, True, True,
        None, None, problem.mask_mod,
    )  # fmt: skip


def forward(call: flex.Call) -> tuple[Tensor, Tensor]:
    """out, and lse in f64."""
    call.signature = replace(call.signature, return_lse=True, wide_lse=True)
    call.layout.program = None, None  # that of another signature
    out, lse, _ = flex.run(call)
    call.layout.program = None, None
    assert lse is not None
    return out, lse


def backward_module(call: flex.Call, needs: Sequence[bool], target: Target | None = None):
    """The lowered backward program of a call."""
    return pipeline.lower(to_torch(call.record, call.signature, needs), target or Target.host())


def interpreted_gradients(
    problem: Problem,
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
    needs: Sequence[bool] | None = None,
    exact: bool = False,
    out_lse: tuple[Tensor, Tensor] | None = None,
) -> tuple[list[Tensor | None], list[Tensor]]:
    """(gradients of query, key, value, scale and captures, None where `needs` is False; the captures)."""
    call = captured_call(problem)
    captures = list(call.captures)
    wanted = [True] * 4 + [t.is_floating_point() for t in captures] if needs is None else list(needs)
    module = backward_module(call, wanted)
    out, lse = forward(call) if out_lse is None else out_lse
    batch = call.query.shape[0]
    given: list[Any] = []
    for tensor in (call.query, call.key, call.value):
        given.append(to_array(tensor.expand(batch, -1, -1, -1)))
    given.append(call.scale)
    given += [to_array(tensor) for tensor in captures]
    given += call.numbers
    if call.blocks is not None:
        given.append(to_array(call.blocks))
    given += [to_array(out), to_array(lse.double()), to_array(grad_out)]
    given.append(to_array(torch.zeros(lse.shape) if grad_lse is None else grad_lse))
    wide = np.float64 if exact or call.query.dtype == torch.float64 else np.float32
    results: list[np.ndarray | None] = []
    for needed, tensor in zip(wanted, [call.query, call.key, call.value, None, *captures], strict=True):
        if not needed:
            results.append(None)
            continue
        shape = (1,) if tensor is None or tensor.dim() == 0 else tuple(tensor.shape)
        if len(results) < 3:
            shape = (batch, *shape[1:])
        results.append(np.zeros(shape, wide if len(results) < 3 else np.float64))
    roles = next(op.roles for op in module.ops if isinstance(op, tile.KernelOp)) or ()
    row_sums = [np.zeros(lse.shape) for role in roles if role.data == ROW_SUM]
    run(module, *given, *(result for result in results if result is not None), *row_sums, exact=exact)
    tensors: list[Tensor | None] = []
    for result, tensor in zip(results, [call.query, call.key, call.value, torch.zeros(()), *captures], strict=True):
        if result is None:
            tensors.append(None)
            continue
        found = torch.from_numpy(result)
        if tensor is call.key or (tensor is call.value and tensor.shape[0] != batch):
            found = found.sum(0, keepdim=True) if tensor.shape[0] != batch else found
        tensors.append(found.reshape(tensor.shape))
    return tensors, captures
