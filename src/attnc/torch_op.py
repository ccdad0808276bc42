"""The one operator torch sees: `torch.ops.attnc.attention`, and its backward.

Whatever traces, transforms or records a call (torch.compile, torch.export, vmap, FakeTensor and other modes, the profiler)
meets this operator; an eager call without any of these goes straight to the runtime. The mods travel as `program`, a
self-contained text (`program_text.py`); the tensors and numbers that they capture, a BlockMask's lists and the scale are
operands.

Importing this module registers the operator, and imports nothing of attnc: loading a graph that holds it is cheap. A process
that has imported attnc and torch, in whichever order, has it (`integrations/torch_import.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

LIBRARY = torch.library.Library("attnc", "DEF")
# The results' strides follow from the query's, so a compiler that moves tensors about must hand over those it was told of.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

# ints and floats: the captured numbers, in the program's order (torch.export can save neither mixed nor empty lists of
# numbers, so None stands for none). float_tensors: floats as 0-d f64 tensors, as torch.compile has them once they change.
# scale: a number; scale_tensor: a 0-d tensor, in its place; neither: 1/√E. block_lists: kv_num_blocks, kv_indices, and those
# of the full blocks where there are such. lse and max_scores have no elements where the program does not ask for them.
LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor[] captures, Scalar[]? ints, Scalar[]? floats, "
    "Tensor[]? float_tensors, Tensor[] block_lists, str program, Scalar? scale=None, Tensor? scale_tensor=None) "
    "-> (Tensor out, Tensor lse, Tensor max_scores)",
    tags=_TAGS,
)
# `needs` says which of query, key, value, scale_tensor and each capture want a gradient; those that do not get one without
# elements. max_scores has no gradient.
LIBRARY.define(
    "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
    "Tensor out, Tensor lse, Tensor[] captures, Scalar[]? ints, Scalar[]? floats, Tensor[]? float_tensors, "
    "Tensor[] block_lists, str program, bool[] needs, Scalar? scale=None, Tensor? scale_tensor=None) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_scale, Tensor[] grad_captures)",
    tags=_TAGS,
)

attention = torch.ops.attnc.attention.default
attention_backward = torch.ops.attnc.attention_backward.default


def _attention_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captures: Sequence[Tensor],
    ints: Sequence[int] | None,
    floats: Sequence[float] | None,
    float_tensors: Sequence[Tensor] | None,
    block_lists: Sequence[Tensor],
    program: str,
    scale: int | float | None = None,
    scale_tensor: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    from attnc.integrations.operator import run

    return run(query, key, value, captures, ints, floats, float_tensors, block_lists, program, scale, scale_tensor)


def _attention_fake(
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
) -> tuple[Tensor, Tensor, Tensor]:
    from attnc.integrations.operator import fake

    return fake(query, key, value, program)


def _attention_autograd(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Records the backward pass where a gradient is wanted."""
    arguments = query, key, value, captures, ints, floats, float_tensors, block_lists, program, scale, scale_tensor
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        from attnc.checks import wants_gradient

        tensors = [("query", query), ("key", key), ("value", value), *(("a captured tensor", each) for each in captures)]
        if wants_gradient(tensors if scale_tensor is None else [*tensors, ("scale", scale_tensor)]):
            from attnc.integrations import autograd

            return autograd.recorded(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return attention(*arguments)


def _attention_vmap(keyset: Any, *arguments: Any, **keywords: Any) -> Any:
    from attnc.integrations.vmap import batched

    return _mapped(batched, attention, arguments, keywords)


def _backward_vmap(keyset: Any, *arguments: Any, **keywords: Any) -> Any:
    from attnc.integrations.vmap import batched_backward

    return _mapped(batched_backward, attention_backward, arguments, keywords)


def _mapped(rule: Any, operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    from torch._functorch.autograd_function import custom_function_call_vmap_helper
    from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_current_functorch_interpreter

    interpreter = retrieve_current_functorch_interpreter()
    assert isinstance(interpreter, VmapInterpreter)
    names = [argument.name for argument in operator._schema.arguments]
    arguments += tuple(keywords.get(name) for name in names[len(arguments) :])
    return custom_function_call_vmap_helper(interpreter, rule, operator, *arguments)


def _backward_cpu(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    captures: Sequence[Tensor],
    ints: Sequence[int] | None,
    floats: Sequence[float] | None,
    float_tensors: Sequence[Tensor] | None,
    block_lists: Sequence[Tensor],
    program: str,
    needs: Sequence[bool],
    scale: int | float | None = None,
    scale_tensor: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    from attnc.integrations.operator import run_backward

    grads = run_backward(
        (grad_out, grad_lse, query, key, value, out, lse),
        (captures, ints, floats, float_tensors, block_lists, program, scale, scale_tensor),
        needs,
    )
    first = [query.new_empty(0) if grad is None else grad for grad in grads]
    return first[0], first[1], first[2], first[3], first[4:]


def _backward_autograd(*arguments: Any, **keywords: Any) -> Any:
    """A gradient has no gradient: that is refused rather than lost."""
    from torch.utils._pytree import tree_any

    if torch.is_grad_enabled() and tree_any(lambda x: isinstance(x, Tensor) and x.requires_grad, (arguments, keywords)):
        from attnc.integrations.autograd import refuse_second_derivative

        refuse_second_derivative()
    with torch._C._AutoDispatchBelowAutograd():
        return attention_backward(*arguments, **keywords)


def _backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    captures: Sequence[Tensor],
    ints: Sequence[Any] | None,
    floats: Sequence[Any] | None,
    float_tensors: Sequence[Tensor] | None,
    block_lists: Sequence[Tensor],
    program: str,
    needs: Sequence[bool],
    scale: Any = None,
    scale_tensor: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    def gradient(tensor: Tensor | None, needed: bool) -> Tensor:
        return torch.empty_like(tensor) if needed and tensor is not None else query.new_empty(0)

    first = [gradient(*pair) for pair in zip((query, key, value, scale_tensor), needs, strict=False)]
    return first[0], first[1], first[2], first[3], [gradient(*pair) for pair in zip(captures, needs[4:], strict=True)]


LIBRARY.impl("attention", _attention_cpu, "CPU")
LIBRARY.impl("attention", _attention_autograd, "Autograd")
LIBRARY.impl("attention", _attention_vmap, "FuncTorchBatched", with_keyset=True)
LIBRARY._register_fake("attention", _attention_fake)
LIBRARY.impl("attention_backward", _backward_cpu, "CPU")
LIBRARY.impl("attention_backward", _backward_autograd, "Autograd")
LIBRARY.impl("attention_backward", _backward_vmap, "FuncTorchBatched", with_keyset=True)
LIBRARY._register_fake("attention_backward", _backward_fake)


@register_flop_formula(torch.ops.attnc.attention)
def attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Floating-point operations of the two products, whatever a mask leaves out (as torch counts its own attention)."""
    batch, heads, queries, head_dim = query
    return 2 * batch * heads * queries * key[2] * (head_dim + value[3])


@register_flop_formula(torch.ops.attnc.attention_backward)
def attention_backward_flops(
    grad_out: Sequence[int], grad_lse: Any, query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    """Floating-point operations of the five products, whatever a mask leaves out."""
    batch, heads, queries, head_dim = query
    return 2 * batch * heads * queries * key[2] * (3 * head_dim + 2 * value[3])
