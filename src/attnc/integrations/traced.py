"""flex_attention where torch traces, transforms or records the call: it becomes the operator `attnc::attention`.

Runs in three ways: read by dynamo (then the mods are traced by it), under torch.func and tracing modes (then attnc captures the
mods itself), and under modes that only watch, such as the profiler or a FLOP counter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, _sliced_mask_mod_error, noop_mask

from attnc import checks, torch_op
from attnc.capture import block_mask as block_masks
from attnc.capture.block_mask import and_masks
from attnc.errors import ArgumentsError, DeviceError, DtypeError, SlicedBlockMaskError, UnsupportedTensorError
from attnc.program_text import Program, to_text
from attnc.runtime.attention import check_shapes


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None,
    block_mask: Any,
    scale: Any,
    enable_gqa: bool,
    return_lse: bool,
    kernel_options: Any,
    return_aux: Any,
    mask_mod: Callable[..., Any] | None,
) -> Any:
    """As `attnc.flex_attention`, whose arguments and results it has."""
    if kernel_options is not None:
        checks.check_kernel_options(kernel_options)
    want_lse, want_max = return_lse, False
    if return_aux is not None:
        if return_lse:
            raise ArgumentsError(
                "both return_lse and return_aux are given", remedy="pass return_aux=AuxRequest(lse=True) alone"
            )
        want_lse, want_max = return_aux.lse, return_aux.max_scores
    query, key, value = inputs(query, key, value)
    check_shapes(query.shape, key.shape, value.shape, enable_gqa)
    number, scale_tensor = scale_operands(scale)
    lists: list[Tensor] = []
    block_size, mask_full_blocks = None, False
    if block_mask is not None:
        own_mask_mod, lists, block_size = _block_lists(block_mask, query, key)
        if own_mask_mod is not None and mask_mod is not None:
            mask_mod, mask_full_blocks = and_masks(own_mask_mod, mask_mod), True
        elif own_mask_mod is not None:
            mask_mod = own_mask_mod
        else:
            mask_full_blocks = mask_mod is not None
    arguments = (query, key, value, score_mod, mask_mod, lists, block_size, mask_full_blocks, number, scale_tensor)
    if torch.compiler.is_dynamo_compiling():
        from attnc.integrations.torch_dynamo import flex_in_graph

        out, lse, max_scores = flex_in_graph(*arguments, want_lse, want_max)
    else:
        out, lse, max_scores = call_operator(*arguments, want_lse, want_max)
    if return_aux is not None:
        return out, AuxOutput(lse=lse if want_lse else None, max_scores=max_scores if want_max else None)
    return (out, lse) if return_lse else out


def call_operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    lists: list[Tensor],
    block_size: tuple[int, int] | None,
    mask_full_blocks: bool,
    scale: Any,
    scale_tensor: Tensor | None,
    want_lse: bool,
    want_max: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Capture the mods and call `attnc::attention`."""
    from attnc.integrations.graph_capture import capture_functions
    from attnc.integrations.operator import split_numbers

    score_dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    record, captures, numbers = capture_functions(score_mod, mask_mod, score_dtype)
    *split, places = split_numbers(record, numbers)
    text = to_text(Program(record, bool(want_lse), bool(want_max), block_size, mask_full_blocks, places))
    return torch_op.attention(query, key, value, list(captures), *split, lists, text, scale, scale_tensor)


def inputs(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three as autocast wants them. Raises `ArgumentsError`, `UnsupportedTensorError`, `DeviceError`, `DtypeError`."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise ArgumentsError(f"{name} is no tensor but {type(tensor).__name__}", remedy="pass torch tensors")
        if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized:
            raise UnsupportedTensorError(f"{name} has layout {tensor.layout}, or is nested or quantised")
        if tensor.device.type not in ("cpu", "meta"):
            raise DeviceError(f"{name} is on {tensor.device}: attnc runs on CPU only so far")
    if query.device != key.device or query.device != value.device:
        raise DeviceError(f"query, key and value are on {query.device}, {key.device} and {value.device}")
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = checks.autocast(query, dtype), checks.autocast(key, dtype), checks.autocast(value, dtype)
    if query.dtype != key.dtype or query.dtype != value.dtype or query.dtype not in checks.DTYPES:
        raise DtypeError(f"query, key and value have dtypes {query.dtype}, {key.dtype} and {value.dtype}")
    return query, key, value


def scale_operands(scale: Any) -> tuple[Any, Tensor | None]:
    """The operator's scale and scale_tensor. Raises `DtypeError`."""
    if not isinstance(scale, Tensor):
        if scale is None or isinstance(scale, (int, float, torch.SymInt, torch.SymFloat)):
            return scale, None
        return float(scale), None
    if scale.dim() != 0:
        raise DtypeError(f"scale is a tensor of shape {list(scale.shape)}", remedy="pass a number or a 0-d tensor")
    return None, scale


def _block_lists(
    block_mask: Any, query: Tensor, key: Tensor
) -> tuple[Callable[..., Any] | None, list[Tensor], tuple[int, int] | None]:
    """A BlockMask's mask_mod (None where it masks nothing), its lists, and its block size (None where the mask_mod says
    all)."""
    if not isinstance(block_mask, block_masks._TorchBlockMask):
        raise block_masks.no_block_mask(block_mask)
    mask_mod = block_mask.mask_mod
    if mask_mod is _sliced_mask_mod_error:
        raise SlicedBlockMaskError("the BlockMask was sliced, and so lost its mask_mod")
    if mask_mod is noop_mask:
        mask_mod = None
    batch, heads, queries, keys = query.shape[0], query.shape[1], query.shape[2], key.shape[2]
    if isinstance(block_mask, block_masks.BlockMask) and block_mask.is_lazy:
        block_masks._check(block_mask.shape, batch, heads, queries, keys)
        return mask_mod, [], None
    block_size = block_mask.BLOCK_SIZE
    if not (block_size[0] == block_size[1] == block_masks._UNBOUNDED):
        leading = (1, 1, *block_mask.kv_num_blocks.shape[:-1])[-2:]
        block_masks._check((*leading, *block_mask.seq_lengths), batch, heads, queries, keys)
    lists = [block_mask.kv_num_blocks, block_mask.kv_indices]
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        lists += [block_mask.full_kv_num_blocks, block_mask.full_kv_indices]
    return mask_mod, lists, (block_size[0], block_size[1])
