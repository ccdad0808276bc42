"""torch's own `flex_attention` on attnc: its higher-order operator, called with FX graphs for mods.

    out, lse, max = flex_attention(query, key, value, score_graph, (block lists, sizes, mask_graph), scale, options, captures,
    captures)

`attention` computes what that operator does, statistics in log2 units included; `enable_torch_flex()` puts it in its place.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import noop_mask

from attnc import checks, torch_op
from attnc.capture.block_mask import _UNBOUNDED
from attnc.errors import AttncError
from attnc.integrations import torch_gradients
from attnc.integrations.graph_capture import GraphOperands, Operands, capture_functions, capture_graphs, operands_of
from attnc.integrations.operator import compile_for, split_numbers
from attnc.integrations.stats import FLEX, count_left, count_taken
from attnc.integrations.switch import Enabled, Switch
from attnc.integrations.torch_sdpa import reason_to_leave
from attnc.integrations.traced import inputs
from attnc.program_text import Program, to_text
from attnc.runtime.attention import check_shapes

FUNCTION = "flex_attention"
LN_2 = math.log(2.0)


def enable_torch_flex() -> Enabled:
    """Let torch's own `torch.nn.attention.flex_attention.flex_attention` on CPU tensors run attnc, eager and under
    torch.compile.

        with attnc.enable_torch_flex():
            flex_attention(query, key, value, score_mod, block_mask)

    It holds for the whole process while at least one such block, or object until its `close()`, is open. Gradients, which torch
    refuses on the CPU, are had, too. What attnc refuses runs torch's own, and `attnc.stats()` counts it with the reason. Graphs
    that torch.compile has traced before stay as they are.
    """
    return _switch.on()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any],
    block_mask: tuple[Any, ...],
    scale: Any,
    kernel_options: dict[str, Any],
    score_captures: Sequence[Any] = (),
    mask_captures: Sequence[Any] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """What torch's operator returns: out, and lse and max_scores in log2 units (undefined where not asked). Raises classes of
    `attnc.errors`."""
    query, key, value = inputs(query, key, value)
    check_shapes(query.shape, key.shape, value.shape, True)
    score_dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    record, captures, numbers = _captured(score_mod, block_mask[-1], score_captures, mask_captures, score_dtype)
    *split, places = split_numbers(record, numbers)
    lists, block_size = block_lists(block_mask)
    want_lse = bool(kernel_options.get("OUTPUT_LOGSUMEXP", True))
    want_max = bool(kernel_options.get("OUTPUT_MAX", True))
    program = Program(record, want_lse, want_max, block_size, tensor_numbers=places)
    if not checks.is_plain(query):
        compile_for(query, key, value, captures, program)  # in a graph a refusal would come too late
    number, scale_tensor = (None, scale) if isinstance(scale, Tensor) else (scale, None)
    out, lse, max_scores = torch_op.attention(
        query, key, value, list(captures), *split, lists, to_text(program), number, scale_tensor
    )
    empty = functools.partial(query.new_empty, query.shape[:3], dtype=score_dtype)
    return out, lse / LN_2 if want_lse else empty(), max_scores / LN_2 if want_max else empty()


def block_lists(block_mask: Sequence[Any]) -> tuple[list[Tensor], tuple[int, int] | None]:
    """The lists of `BlockMask.as_tuple()` and its block size; ([], None) for torch's BlockMask that stands for none."""
    # The number of entries grows from release to release: sizes are counted from the end.
    query_block, key_block = int(block_mask[-3]), int(block_mask[-2])
    if query_block == key_block == _UNBOUNDED:
        return [], None
    lists = [block_mask[2], block_mask[3]]
    if block_mask[4] is not None and block_mask[5] is not None:
        lists += [block_mask[4], block_mask[5]]
    return lists, (query_block, key_block)


# -- mods -------------------------------------------------------------------------------------------------------------------
_found: OrderedDict[Any, tuple[Any, GraphOperands]] = OrderedDict()
_KEPT = 512


def _captured(
    score: Any, mask: Any, score_captures: Sequence[Any], mask_captures: Sequence[Any], score_dtype: torch.dtype
) -> Operands:
    if not isinstance(score, GraphModule) or not isinstance(mask, GraphModule):
        mask = None if mask is noop_mask else mask
        return capture_functions(_with(score, score_captures), mask and _with(mask, mask_captures), score_dtype)
    operands = [*score_captures, *mask_captures]
    key = id(score), id(mask), len(score_captures), score_dtype, *map(_kind, operands)
    if None in key:  # symbolic: the capture may have to guard
        return operands_of(capture_graphs(score, score_captures, mask, mask_captures, score_dtype), operands)
    known = _found.get(key)
    if known is None or known[0][0]() is not score or known[0][1]() is not mask:
        found = capture_graphs(score, score_captures, mask, mask_captures, score_dtype)
        known = _found[key] = (weakref.ref(score), weakref.ref(mask)), found
        while len(_found) > _KEPT:
            _found.popitem(last=False)
    return operands_of(known[1], operands)


def _kind(operand: Any) -> Any:
    """What of an operand the capture may depend on; None where that is not known yet."""
    if isinstance(operand, Tensor):
        return (operand.dtype, tuple(operand.shape)) if checks.is_plain(operand) else None
    return operand if isinstance(operand, (int, float)) else None


def _with(mod: Callable[..., Any], captures: Sequence[Any]) -> Callable[..., Any]:
    if not captures:
        return mod
    values = tuple(captures)
    return lambda *scalars: mod(*scalars, *values)


# -- in the place of torch's ------------------------------------------------------------------------------------------------
_hop = torch.ops.higher_order.flex_attention
_proxy_key: Any = None
_proxy_original: Any = None
_autograd_original: Any = None


def _with_gradients(*arguments: Any) -> Any:
    """The operator above autograd: attnc's own backward pass is recorded, where a gradient is wanted."""
    tensors = [*arguments[:3], *(item for captures in arguments[7:8] for item in captures if isinstance(item, Tensor))]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        taken = _take(arguments)
        if taken is not None:
            return taken
    return _autograd_original(*arguments)


def _on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any,
    block_mask: tuple[Any, ...],
    scale: Any,
    kernel_options: dict[str, Any],
    score_captures: tuple[Any, ...] = (),
    mask_captures: tuple[Any, ...] = (),
) -> Any:
    """The operator's kernel for CPU tensors."""
    arguments = query, key, value, score_mod, block_mask, scale, kernel_options, score_captures, mask_captures
    taken = _take(arguments)
    if taken is not None:
        return taken
    return _hop.py_kernels[DispatchKey.CompositeExplicitAutograd](*arguments)


def _in_graph(mode: Any, *arguments: Any) -> Any:
    """The operator while a graph is traced (torch.compile behind dynamo, make_fx): the plain operator goes into it."""
    query, score_mod, block_mask = arguments[0], arguments[3], arguments[4]
    score_dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    score = _traced(score_mod, [query.new_zeros((), dtype=score_dtype), *_positions(query)], arguments[7:8])
    mask = _traced(block_mask[-1], _positions(query), arguments[8:9])
    with mode:
        taken = _take((*arguments[:3], score, (*block_mask[:-1], mask), *arguments[5:]))
    return _proxy_original(mode, *arguments) if taken is None else taken


def _positions(query: Tensor) -> list[Tensor]:
    return [query.new_zeros((), dtype=torch.int32) for _ in range(4)]


def _traced(mod: Callable[..., Any], scalars: list[Tensor], captures: Sequence[Sequence[Any]]) -> GraphModule:
    """A mod that functionalization has wrapped, as an FX graph."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch._higher_order_ops.utils import reenter_make_fx

    with TransformGetItemToIndex():
        return reenter_make_fx(mod)(*scalars, *(captures[0] if captures else ()))


def _take(arguments: tuple[Any, ...]) -> Any:
    try:
        reason = reason_to_leave()
        if reason is None:
            result = attention(*arguments)
            count_taken(FLEX, FUNCTION)
            return result
    except AttncError as error:
        reason = f"{type(error).__name__}: {error.message}"
    count_left(FLEX, FUNCTION, reason)
    return None


def _install() -> None:
    global _proxy_key, _proxy_original, _autograd_original
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

    _hop.py_impl(DispatchKey.CPU)(_on_cpu)
    _proxy_key, _proxy_original = ProxyTorchDispatchMode, _hop.python_key_table[ProxyTorchDispatchMode]
    _hop.python_key_table[ProxyTorchDispatchMode] = _in_graph
    _autograd_original = _hop.py_kernels[DispatchKey.Autograd]
    _hop.py_kernels[DispatchKey.Autograd] = _with_gradients
    _hop._dispatch_cache.clear()
    torch_gradients.allow(_always)


def _remove() -> None:
    _hop.py_kernels.pop(DispatchKey.CPU)
    _hop.python_key_table[_proxy_key] = _proxy_original
    _hop.py_kernels[DispatchKey.Autograd] = _autograd_original
    _hop._dispatch_cache.clear()
    torch_gradients.disallow(_always)


def _always() -> bool:
    return True


_switch = Switch("flex", _install, _remove)
