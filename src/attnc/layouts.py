"""What is remembered of calls by their tensors' sizes, strides and dtype, and a short road for calls that are made again.

The layers of a decoding step are such calls. Between them the model's weights pass through the caches, so that a call finds
neither its code nor its data there, and each function on its road costs some times what it costs in a loop. The long road
(`flex.checked_call`, `flex.run`) leaves the launch of a call that it has seen twice with the layout; whatever is not an
ordinary call without gradients, mods' captures or statistics takes the long road again, which has the error messages, too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.autograd.profiler as profiler
from torch import Tensor

from attnc import programs
from attnc.capture.record import Record
from attnc.checks import DTYPES, len_torch_dispatch_stack
from attnc.runtime.attention import Layout, few_queries
from attnc.runtime.signature import ANY, UNIT, Signature

CPU = torch.device("cpu")
KEPT = 4096

empty_strided = torch.empty_strided
is_any_autocast_enabled = torch._C._is_any_autocast_enabled
is_grad_enabled = torch.is_grad_enabled

_layouts: dict[Any, tuple[Layout, Signature]] = {}
programs.on_forget.append(_layouts.clear)


def layout_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    enable_gqa: bool,
    want_lse: bool,
    want_max: bool,
    out_by_rows: bool = False,
    wide_lse: bool = False,
) -> tuple[Layout, Signature]:
    """The layout and the signature (without a BlockMask) of these tensors' sizes and strides, remembered."""
    known = _key(query, key, value, enable_gqa, want_lse, want_max, out_by_rows, wide_lse)
    found = _layouts.get(known)
    if found is None:
        sizes, strides, *_ = known
        buffers = [(tuple(size), stride) for size, stride in zip(sizes, strides, strict=True)]
        layout = Layout(*buffers, enable_gqa=enable_gqa, out_by_rows=out_by_rows)
        signature = Signature(
            DTYPES[query.dtype],
            sizes[0][3],
            sizes[2][3],
            *(UNIT if stride[-1] == 1 else ANY for stride in strides),
            return_lse=want_lse,
            return_max=want_max,
            few_queries=few_queries(sizes[0][0], sizes[0][1], sizes[1][1], sizes[0][2], sizes[1][2]),
            wide_lse=wide_lse,
        )
        found = layout, signature
        if len(_layouts) >= KEPT:
            _layouts.clear()
        _layouts[known] = found
    return found


def _key(query: Tensor, key: Tensor, value: Tensor, *options: bool) -> tuple[Any, ...]:
    return (
        (query.shape, key.shape, value.shape),
        (query.stride(), key.stride(), value.stride()),
        query.dtype,
        *options,
    )


def repeat(
    query: Tensor, key: Tensor, value: Tensor, record: Record, scale: Any, enable_gqa: bool, out_by_rows: bool = False
) -> Tensor | None:
    """Out of a call that has been made before, if nothing watches it; None: take the long road. Not for torch.compile to trace.

    `record` says what its mods do. With `out_by_rows` out is [B, Sq, Hq, Ev], contiguous.
    """
    if (
        type(query) is not Tensor
        or type(key) is not Tensor
        or type(value) is not Tensor
        or len_torch_dispatch_stack()
        or profiler._is_profiler_enabled
        or is_any_autocast_enabled()
        or forward_ad._current_level >= 0
    ):
        return None
    try:  # A sparse tensor has no strides; one of torch.func's, or that it left behind, has no address (or that of 0).
        if is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            return None
        found = _layouts.get(_key(query, key, value, bool(enable_gqa), False, False, out_by_rows, False))
        if found is None:
            return None
        layout = found[0]
        known, launches = layout.repeated
        if (
            known is not record
            or launches is None
            or not (query.is_cpu and key.is_cpu and value.is_cpu)
            or not (key.dtype is query.dtype and value.dtype is query.dtype)
            or (query.is_neg() or key.is_neg() or value.is_neg())
        ):
            return None
        addresses = query.data_ptr(), key.data_ptr(), value.data_ptr()
    except RuntimeError:
        return None
    if scale is None:
        scale = query.shape[3] ** -0.5
    if type(scale) is not float or not all(addresses):
        return None
    out = empty_strided(*layout.memory, dtype=query.dtype, device=CPU)
    if launches.launch((*addresses, out.data_ptr()), (scale,), (query, key, value, out)):
        return None  # the long road finds what is wrong
    return out
