"""What a call's tensors must be, before anything is captured, compiled or run."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from attnc.errors import (
    ArgumentsError,
    DeviceError,
    DtypeError,
    GradientNotImplementedError,
    KernelOptionsError,
    UnsupportedTensorError,
    UnsupportedTransformError,
)

dispatch_keys = torch._C._dispatch_keys
functorch = torch._C._functorch  # type: ignore[attr-defined]
is_dynamo_compiling = torch.compiler.is_dynamo_compiling
peek_interpreter_stack = functorch.peek_interpreter_stack
len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack
is_grad_enabled = torch.is_grad_enabled
is_profiler_enabled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def _plain_keys() -> frozenset[int]:
    """Dispatch key sets of plain strided CPU tensors, made in and outside of inference mode.

    Whatever else a tensor may be (meta, CUDA, sparse, nested, quantised, lazily negated, wrapped by vmap, fake, a subclass with
    its own dispatch) shows in its keys.

    This module may be imported where torch traces or transforms (torch.export, vmap), and tensors made there are not plain:
    these are made in a thread of their own, which no mode or transform of the importing one reaches.
    """
    keys = set()

    def make() -> None:
        for inference in (False, True):
            with torch.inference_mode(inference):
                keys.add(dispatch_keys(torch.empty(0, device="cpu")).raw_repr())

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return frozenset(keys)


PLAIN_KEYS = _plain_keys()

DTYPES: dict[torch.dtype, str] = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float64: "f64",
}
"""Dtypes of query, key and value, and their MLIR names."""

_FLEX_OPTIONS = """
    num_warps num_stages BLOCK_M BLOCK_N BLOCK_M1 BLOCK_N1 BLOCK_M2 BLOCK_N2 PRESCALE_QK ROWS_GUARANTEED_SAFE
    BLOCKS_ARE_CONTIGUOUS WRITE_DQ FORCE_USE_FLEX_ATTENTION USE_TMA kpack matrix_instr_nonkdim waves_per_eu BACKEND
    FLOAT32_PRECISION GQA_SHARED_HEADS HAS_FULL_BLOCKS IS_DIVISIBLE QK_HEAD_DIM QK_HEAD_DIM_ROUNDED V_HEAD_DIM
    V_HEAD_DIM_ROUNDED SAFE_HEAD_DIM SAFE_N_BOUNDARY SKIP_MASK_SCORE SM_SCALE SPARSE_Q_BLOCK_SIZE SPARSE_KV_BLOCK_SIZE
    SPLIT_KV TILE_KV PARTITION_SIZE num_consumer_groups num_buffers_warp_spec
"""
KERNEL_OPTIONS = frozenset(prefix + name for prefix in ("", "fwd_", "bwd_") for name in _FLEX_OPTIONS.split())
"""The keys torch 2.13 knows in kernel_options (`FlexKernelOptions`, and what its lowerings read)."""


def is_plain(tensor: Tensor) -> bool:
    """Whether it is an ordinary strided CPU tensor whose memory holds its values."""
    return dispatch_keys(tensor).raw_repr() in PLAIN_KEYS


def plain_tensor(name: str, tensor: Any) -> Tensor:
    """`tensor` itself, or its values where it is only lazily negated. Meta and fake tensors pass. Raises the named error of
    whatever else it is: `ArgumentsError`, `DeviceError`, `UnsupportedTensorError`, `UnsupportedTransformError`."""
    if not isinstance(tensor, Tensor):
        raise ArgumentsError(f"{name} is {_with_article(tensor)}, not a torch tensor", remedy="pass torch tensors")
    if is_plain(tensor):
        return tensor
    kind = type(tensor).__name__
    if functorch.is_functorch_wrapped_tensor(tensor):
        raise UnsupportedTransformError(f"{name} is a tensor inside torch.func or vmap")
    if tensor.is_nested:
        raise UnsupportedTensorError(
            f"{name} is a nested tensor", remedy="pad it and mask the padding, or call once a sequence"
        )
    if kind == "DTensor":
        raise UnsupportedTensorError(f"{name} is a DTensor", remedy="pass tensor.to_local(), or tensor.full_tensor()")
    if tensor.layout is not torch.strided:
        raise UnsupportedTensorError(f"{name} has layout {tensor.layout}", remedy="pass tensor.to_dense()")
    if tensor.is_quantized:
        raise UnsupportedTensorError(f"{name} is quantised", remedy="pass tensor.dequantize()")
    if tensor.device.type == "meta" or is_fake(tensor):
        if tensor._has_symbolic_sizes_strides:
            raise UnsupportedTransformError(f"{name} has symbolic sizes: something traces this call")
        return tensor
    if tensor.device.type != "cpu":
        raise DeviceError(f"{name} is on {tensor.device}: attnc runs on CPU only so far")
    if "Python" in str(dispatch_keys(tensor)):
        raise UnsupportedTensorError(f"{name} is a {kind}, a tensor subclass of its own dispatch")
    if tensor.is_complex():
        raise DtypeError(f"{name} has dtype {tensor.dtype}")
    if tensor._is_zerotensor():
        raise UnsupportedTensorError(f"{name} is a zero tensor without memory", remedy="pass tensor.clone()")
    if tensor.is_neg():
        return tensor.resolve_neg()
    if tensor._has_symbolic_sizes_strides or not torch._C._has_storage(tensor):
        raise UnsupportedTensorError(f"{name} is a {kind} without plain memory")
    return tensor


def _with_article(value: Any) -> str:
    """`a numpy.ndarray`, `an int`: what a value is, in a sentence."""
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def is_fake(tensor: Tensor) -> bool:
    """Whether it is a FakeTensor: shape and dtype without values, as torch.export and torch.compile use them."""
    return hasattr(tensor, "fake_mode")


def same_device(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether all three hold values (False: none does, they are meta or fake). Raises `DeviceError` where they differ."""
    kinds = [is_plain(tensor) for tensor in (query, key, value)]
    if not query.device == key.device == value.device or len(set(kinds)) > 1:
        fake = [" (fake)" if is_fake(tensor) else "" for tensor in (query, key, value)]
        places = [f"{tensor.device}{note}" for tensor, note in zip((query, key, value), fake, strict=True)]
        raise DeviceError(f"query, key and value are on {places[0]}, {places[1]} and {places[2]}")
    return kinds[0]


def is_watched() -> bool:
    """Whether something traces, transforms or records what torch calls (torch.compile, torch.func, a dispatch mode, the
    profiler): then attention has to be the operator `attnc::attention`. Otherwise it need not pay for that."""
    return (
        is_dynamo_compiling()
        or peek_interpreter_stack() is not None
        or len_torch_dispatch_stack() != 0
        or is_profiler_enabled()
    )


def check_modes() -> None:
    """Refuse what cannot be done while torch.compile, make_fx or torch.func trace. Raises `UnsupportedTransformError`."""
    if is_dynamo_compiling():
        raise UnsupportedTransformError("attnc is called inside a torch.compile region")
    if peek_interpreter_stack() is not None:
        raise UnsupportedTransformError("attnc.flex_attention is called inside a torch.func transform (vmap, grad, jvp …)")
    if len_torch_dispatch_stack():
        kinds = torch._C._TorchDispatchModeKey
        for kind in (kinds.PROXY, kinds.FUNCTIONAL):
            if torch._C._get_dispatch_mode(kind) is not None:
                raise UnsupportedTransformError(
                    "attnc.flex_attention is called while torch traces a graph (make_fx, torch.export)"
                )


def may_differentiate() -> bool:
    """Whether gradients or tangents could be asked of this call."""
    return is_grad_enabled() or in_forward_mode()


def in_forward_mode() -> bool:
    """Whether a forward-mode level is open."""
    return forward_ad._current_level >= 0


def wants_gradient(tensors: Iterable[tuple[str, Tensor]]) -> bool:
    """Whether a gradient of one of these may be asked for. Raises `GradientNotImplementedError` for a forward-mode tangent."""
    if in_forward_mode():
        tensors = list(tensors)
        for name, tensor in tensors:
            if forward_ad.unpack_dual(tensor).tangent is not None:
                raise GradientNotImplementedError(f"{name} carries a forward-mode tangent, and attnc has reverse mode only")
    return is_grad_enabled() and any(tensor.requires_grad for _, tensor in tensors)


def scale_value(scale: Any, head_dim: int) -> float:
    """The scale as a number: `scale`, or 1/√E where it is None. Raises `DtypeError` where it is no real number."""
    if scale is None:
        return head_dim**-0.5
    if type(scale) is float:
        return scale
    if isinstance(scale, Tensor):
        if scale.dim() != 0:
            raise DtypeError(f"scale is a tensor of shape {list(scale.shape)}", remedy="pass a number or a 0-d tensor")
        scale = plain_tensor("scale", scale)
        if not is_plain(scale):
            raise DeviceError("scale is a tensor without a value (meta or fake)", remedy="pass a number or a 0-d CPU tensor")
        return float(scale.detach().item())
    try:
        return float(scale)
    except (TypeError, ValueError, OverflowError) as error:
        raise DtypeError(f"scale is {scale!r}", remedy="pass a number or a 0-d tensor") from error


def check_kernel_options(options: Any) -> None:
    """torch's keys are accepted and have no effect. Raises `KernelOptionsError` for any other."""
    if not isinstance(options, Mapping):
        raise KernelOptionsError(f"kernel_options is {type(options).__name__}", remedy="pass a dict of torch's kernel options")
    for key in options:
        if key not in KERNEL_OPTIONS:
            raise KernelOptionsError.unknown(key, KERNEL_OPTIONS)


def autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As torch's autocast casts attention's inputs: floating point but f64."""
    if tensor.is_floating_point() and tensor.dtype not in (torch.float64, dtype):
        return tensor.to(dtype)
    return tensor
