"""`flex_attention`: torch's signature, compiled for the CPU.

A call goes: check the tensors → find the layout (by sizes and strides, remembered) → capture the mods → find the program
(remembered, else on disk, else compiled) → allocate the results → launch. A call without mods that has been made before, on
other tensors of the same sizes, finds all of that done (`layouts.repeat`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attnc import programs
from attnc.errors import ArgumentsError, DtypeError, TorchMissingError, UnsupportedTensorError

try:
    import torch
    from torch import Tensor
except ImportError as error:
    raise TorchMissingError("attnc.flex_attention needs torch, which is not installed") from error

from attnc import checks, layouts
from attnc.capture import environment, modes
from attnc.capture.block_mask import PARTIAL, and_masks, read_block_mask
from attnc.capture.capture import NOTHING, capture
from attnc.checks import DTYPES, PLAIN_KEYS, dispatch_keys, in_forward_mode, is_dynamo_compiling, is_watched, may_differentiate
from attnc.layouts import CPU, layout_of
from attnc.runtime.attention import Layout
from attnc.runtime.signature import Signature

is_autocast_enabled = torch.is_autocast_enabled
TRACING = (environment, modes)
"""What tracing a mod needs, imported now: a process that forks while another thread is in the middle of an import has a child
that cannot import it any more."""

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxRequest, FlexKernelOptions

    from attnc.capture.record import Record


class Call:
    """One call, checked and captured: everything but its program and its results."""

    __slots__ = (
        "blocks",
        "captures",
        "differentiable",
        "has_values",
        "key",
        "layout",
        "numbers",
        "out_by_rows",
        "query",
        "record",
        "scale",
        "scale_tensor",
        "signature",
        "value",
    )

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    scale_tensor: Tensor | None
    """The scale where its gradient may be wanted."""
    layout: Layout
    signature: Signature
    record: Record
    captures: Sequence[Tensor]
    numbers: Sequence[int | float]
    blocks: Tensor | None
    out_by_rows: bool
    """Whether out is [B, Sq, Hq, Ev] in memory."""
    differentiable: bool
    """Whether a gradient may be wanted: then lse is among the results."""
    has_values: bool
    """Whether there is something to compute: False for meta and fake tensors, whose mods are not looked at."""


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: FlexKernelOptions | dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    mask_mod: Callable[..., Any] | None = None,
) -> Any:
    """Attention with your own score and mask, as `torch.nn.attention.flex_attention.flex_attention`, compiled for the CPU.

        s[b,h,q,k] = score_mod(scale * query[b,h,q] · key[b,h//G,k], b, h, q, k), -inf where not mask_mod(b, h, q, k)
        out[b,h,q] = sum_k softmax_k(s) * value[b,h//G,k];  0 where all keys are masked

    Arguments:
        query: [B, Hq, Sq, E], of dtype f64, f32, f16 or bf16 and any strides.
        key, value: [B, Hkv, Skv, E] and [B, Hkv, Skv, Ev] of the same dtype; B may be 1; G = Hq / Hkv.
        score_mod: (score, b, h, q_idx, kv_idx) -> score. The score is f32 (f64 for f64), the indices are int32 scalars.
        block_mask: a BlockMask of torch or of attnc. Only its listed blocks are computed.
        scale: a number or a 0-d tensor; 1/√E where None.
        enable_gqa: lets Hq be a multiple of Hkv.
        return_lse: also return the natural logarithm of the sum of exponentials, [B, Hq, Sq], f32 (f64 for f64).
        kernel_options: torch's keys are accepted and have no effect.
        return_aux: `AuxRequest(lse=…, max_scores=…)`: return `(out, AuxOutput)`.
        mask_mod: (b, h, q_idx, kv_idx) -> bool; needs no BlockMask. With both, both must hold.

    Returns out [B, Hq, Sq, Ev] in query's dtype and order of strides; `(out, lse)` or `(out, AuxOutput)` if asked.

    Differentiable in query, key, value, in a scale that is a tensor and in captured tensors, also through lse.

    Raises a class of `attnc.errors` before anything runs: ShapeError, DtypeError, DeviceError, UnsupportedModError,
    BlockMaskError, …; CaptureIndexError where a mod indexes a captured tensor out of range.
    """
    plain = not is_dynamo_compiling() and score_mod is None and mask_mod is None and block_mask is None
    if plain and not return_lse and return_aux is None and kernel_options is None:
        found = layouts.repeat(query, key, value, NOTHING.record, scale, enable_gqa)
        if found is not None:
            return found
    if is_watched():
        from attnc.integrations import traced

        return traced.flex_attention(
            query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux, mask_mod
        )
    call = checked_call(
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux, mask_mod
    )
    out, lse, max_scores = results(call)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        want_lse, want_max = requested(return_aux, return_lse)
        return out, AuxOutput(lse=lse if want_lse else None, max_scores=max_scores if want_max else None)
    return (out, lse) if return_lse else out


def requested(return_aux: Any, return_lse: bool) -> tuple[bool, bool]:
    """(lse, max_scores) of an AuxRequest. Raises `ArgumentsError`."""
    if return_lse:
        raise ArgumentsError("both return_lse and return_aux are given", remedy="pass return_aux=AuxRequest(lse=True) alone")
    try:
        return bool(return_aux.lse), bool(return_aux.max_scores)
    except AttributeError:
        raise ArgumentsError(
            f"return_aux is {return_aux!r}", remedy="pass torch.nn.attention.flex_attention.AuxRequest(lse=…, max_scores=…)"
        ) from None


def checked_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None,
    block_mask: Any,
    scale: float | Tensor | None,
    enable_gqa: bool,
    return_lse: bool,
    kernel_options: Any,
    return_aux: Any,
    mask_mod: Callable[..., Any] | None,
    own_places: bool = False,
    out_by_rows: bool = False,
) -> Call:
    """Check the arguments of `flex_attention`, which nothing watches, and capture its mods (`own_places`: see `capture`).
    With `out_by_rows` out's memory is [B, Sq, Hq, Ev], whatever the order of query's strides. Raises classes of
    `attnc.errors`."""
    if kernel_options is not None:
        checks.check_kernel_options(kernel_options)
    want_lse, want_max = (return_lse, False) if return_aux is None else requested(return_aux, return_lse)
    call = Call()
    call.has_values = True
    if not (
        isinstance(query, Tensor)
        and isinstance(key, Tensor)
        and isinstance(value, Tensor)
        and dispatch_keys(query).raw_repr() in PLAIN_KEYS
        and dispatch_keys(key).raw_repr() in PLAIN_KEYS
        and dispatch_keys(value).raw_repr() in PLAIN_KEYS
    ):
        query = checks.plain_tensor("query", query)
        key = checks.plain_tensor("key", key)
        value = checks.plain_tensor("value", value)
        call.has_values = checks.same_device(query, key, value)
    if is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (checks.autocast(tensor, dtype) for tensor in (query, key, value))
    element = query.dtype
    if not (key.dtype is element and value.dtype is element and element in DTYPES):
        raise DtypeError(f"query, key and value have dtypes {query.dtype}, {key.dtype} and {value.dtype}")
    call.query, call.key, call.value = query, key, value
    call.differentiable, call.scale_tensor, call.out_by_rows = False, None, out_by_rows
    if may_differentiate() and (query.requires_grad or key.requires_grad or value.requires_grad or in_forward_mode()):
        call.differentiable = checks.wants_gradient((("query", query), ("key", key), ("value", value)))
    if isinstance(scale, Tensor) and scale.requires_grad and checks.wants_gradient([("scale", scale)]):
        call.differentiable, call.scale_tensor = True, scale
    call.layout, call.signature = layout_of(query, key, value, bool(enable_gqa), bool(want_lse), want_max, out_by_rows)
    if call.differentiable:
        make_differentiable(call)
    call.scale = checks.scale_value(scale, call.signature.head_dim)
    call.blocks = None
    if call.has_values:
        _capture(call, score_mod, block_mask, mask_mod, own_places)
    return call


def _capture(call: Call, score_mod: Any, block_mask: Any, mask_mod: Any, own_places: bool = False) -> None:
    """Capture the mods and a BlockMask's lists into `call`."""
    if block_mask is not None:
        mask_mod = _read_block_mask(call, block_mask, mask_mod)
    score_dtype = torch.float64 if call.query.dtype is torch.float64 else torch.float32
    call.record, call.captures, call.numbers, _ = capture(score_mod, mask_mod, score_dtype=score_dtype, own_places=own_places)
    if call.captures and may_differentiate():
        names = (f"captured tensor '{type_.name}'" for type_ in call.record.captures)
        if checks.wants_gradient(list(zip(names, call.captures, strict=True))):
            make_differentiable(call)


def make_differentiable(call: Call) -> None:
    """Let the call give what its backward pass needs: an lse in f64."""
    call.differentiable = True
    before = call.signature
    if not before.wide_lse:
        call.layout, call.signature = layout_of(
            call.query, call.key, call.value, True, True, before.return_max, call.out_by_rows, True
        )
        if before.block_size is not None:
            call.signature = _with_block_size(call.signature, before.block_size)


def _read_block_mask(call: Call, block_mask: Any, mask_mod: Any) -> Any:
    """Put a BlockMask's block classes into `call`; returns the mask_mod that is left to apply."""
    batch, heads, queries, _ = call.query.shape
    own_mask_mod, classes, block_size = read_block_mask(block_mask, batch, heads, queries, call.key.shape[2])
    if classes is not None:
        if mask_mod is not None:
            classes = classes.clamp(max=PARTIAL)  # in full blocks, too, the other mask_mod has its say
        call.blocks = classes.expand(batch, heads, -1, -1)
        call.signature = _with_block_size(call.signature, block_size)
    if own_mask_mod is None or mask_mod is None:
        return own_mask_mod or mask_mod
    return and_masks(own_mask_mod, mask_mod)


@functools.lru_cache(maxsize=1024)
def _with_block_size(signature: Signature, block_size: tuple[int, int]) -> Signature:
    return replace(signature, block_size=block_size)


def results(call: Call) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`run`, and the backward pass recorded where a gradient may be wanted: then there always is an lse."""
    if call.differentiable and call.has_values:
        from attnc.integrations import autograd

        return autograd.run(call)
    return run(call)


def run(call: Call) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Run a checked call: (out, lse or None, max_scores or None). Compiles if need be. Raises `CaptureIndexError`."""
    query, layout, signature = call.query, call.layout, call.signature
    dtype = query.dtype
    stats = torch.float64 if dtype is torch.float64 else torch.float32
    if not call.has_values:
        return (
            query.new_empty_strided(layout.out_shape, layout.out_strides),
            query.new_empty(layout.lse_shape, dtype=torch.float64 if signature.wide_lse else stats)
            if signature.return_lse
            else None,
            query.new_empty(layout.lse_shape, dtype=stats) if signature.return_max else None,
        )
    out = torch.empty_strided(layout.out_shape, layout.out_strides, dtype=dtype, device=CPU)
    lse_dtype = torch.float64 if signature.wide_lse else stats
    lse = torch.empty(layout.lse_shape, dtype=lse_dtype, device=CPU) if signature.return_lse else None
    max_scores = torch.empty(layout.lse_shape, dtype=stats, device=CPU) if signature.return_max else None
    if layout.without_rows:
        return out, lse, max_scores
    if layout.without_keys:
        out.zero_()
        for statistics in (lse, max_scores):
            if statistics is not None:
                statistics.fill_(-torch.inf)
        return out, lse, max_scores
    addresses = query.data_ptr(), call.key.data_ptr(), call.value.data_ptr()
    if not all(addresses):
        raise UnsupportedTensorError("the memory of query, key or value was freed (their storage has 0 bytes)")
    record = call.record
    made = [tensor for tensor in (out, lse, max_scores) if tensor is not None]
    known_record, repeated = layout.repeated
    if known_record is record and repeated is not None and call.blocks is None:
        addresses = *addresses, *(tensor.data_ptr() for tensor in made)
        if not repeated.launch(addresses, (call.scale,), (call, made)):
            return out, lse, max_scores
    known_record, attention = layout.program
    again = known_record is record and call.blocks is None
    if not again:
        attention = programs.program(record, signature)
        if call.blocks is None:
            layout.program = record, attention  # equal records are one object
    words = [addresses[0], *layout.query, addresses[1], *layout.key, addresses[2], *layout.value, call.scale]
    for tensor in call.captures:
        address = tensor.data_ptr()
        if not address and tensor.numel():
            raise UnsupportedTensorError("the memory of a captured tensor was freed (its storage has 0 bytes)")
        words += (address, *tensor.shape, *tensor.stride())
    words += call.numbers
    if call.blocks is not None:
        words += (call.blocks.data_ptr(), *call.blocks.shape, *call.blocks.stride())
    words += (out.data_ptr(), *layout.out)
    for statistics in (lse, max_scores):
        if statistics is not None:
            words += (statistics.data_ptr(), *layout.lse)
    words.append(layout.group)
    if again and not call.captures and not call.numbers:
        layout.repeated = record, attention.repeated(words)
    if attention.launch(words, (call, out, lse, max_scores)):
        from attnc import pipeline

        raise pipeline.locate_attention(record, signature, words)
    return out, lse, max_scores
