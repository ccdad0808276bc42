"""Which tensors and dtypes a mod may use."""

from __future__ import annotations

import torch
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]

from attnc.capture.locations import where
from attnc.capture.record import Literal
from attnc.errors import DeviceError, UnsupportedModError, UnsupportedTensorError, UnsupportedTransformError

DTYPES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}

_PLAIN_TORCH_FUNCTIONS = (torch.Tensor.__torch_function__, torch._C._disabled_torch_function_impl)


def check_capture(tensor: torch.Tensor) -> None:
    """Refuses a captured tensor that is no plain strided CPU tensor of a dtype that is served."""
    with torch._C.DisableTorchFunction():
        kind = type(tensor)
        place = where()
        if _functorch.is_functorch_wrapped_tensor(tensor):
            raise UnsupportedTransformError("a mod captures a tensor of torch.func (vmap, grad, …)", **place)
        if torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python):
            raise UnsupportedTensorError(f"a mod captures a {kind.__name__}, a tensor subclass without plain memory", **place)
        if kind.__torch_function__ not in _PLAIN_TORCH_FUNCTIONS:
            raise UnsupportedTensorError(
                f"a mod captures a {kind.__name__}, a tensor subclass with its own __torch_function__", **place
            )
        if tensor.is_nested:
            raise UnsupportedTensorError("a mod captures a nested tensor", **place)
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise UnsupportedTensorError(f"a mod captures a tensor of layout {tensor.layout}", **place)
        if tensor.device.type != "cpu":
            raise DeviceError(f"a mod captures a tensor on {tensor.device}; attnc runs on the CPU only so far", **place)
        if tensor.dtype not in DTYPES or tensor.is_neg():
            raise UnsupportedTensorError(
                f"a mod captures a tensor of {tensor.dtype}", remedy="convert it to a real float, int or bool dtype", **place
            )


def dtype_literal(dtype: torch.dtype) -> Literal:
    if dtype not in DTYPES:
        raise UnsupportedModError(f"a mod computes in {dtype}", remedy=f"use one of {', '.join(DTYPES.values())}", **where())
    return Literal("dtype", DTYPES[dtype])


def dtype_name(tensor: torch.Tensor) -> str:
    return dtype_literal(tensor.dtype).text
