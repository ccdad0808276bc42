"""Which tensors and dtypes a mod may use."""

from __future__ import annotations

import torch
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]

from attnc.capture.locations import where
from attnc.capture.reads import stride_pattern
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
        if tensor.is_quantized:
            raise UnsupportedTensorError("a mod captures a quantised tensor", remedy="pass tensor.dequantize()", **place)
        if tensor.layout is not torch.strided:
            raise UnsupportedTensorError(f"a mod captures a tensor of layout {tensor.layout}", **place)
        if tensor.device.type != "cpu":
            raise DeviceError(f"a mod captures a tensor on {tensor.device}; attnc runs on the CPU only so far", **place)
        if tensor.is_neg():
            raise UnsupportedTensorError(
                "a mod captures a tensor that is only lazily negated", remedy="pass tensor.resolve_neg()", **place
            )
        if tensor.dtype not in DTYPES:
            raise UnsupportedTensorError(
                f"a mod captures a tensor of {tensor.dtype}", remedy="convert it to a real float, int or bool dtype", **place
            )


def dtype_literal(dtype: torch.dtype) -> Literal:
    if dtype not in DTYPES:
        raise UnsupportedModError(f"a mod computes in {dtype}", remedy=f"use one of {', '.join(DTYPES.values())}", **where())
    return Literal("dtype", DTYPES[dtype])


def dtype_name(tensor: torch.Tensor) -> str:
    return dtype_literal(tensor.dtype).text


class TensorCheck:
    """Whether a tensor may take the place of the one a mod was traced with: dtype, rank, stride pattern, fixed lengths."""

    __slots__ = ("_class", "_dtype", "_last", "_pattern", "_sizes", "_strides")

    def __init__(self, tensor: torch.Tensor, pattern: str, sizes: tuple[int | None, ...], exact_strides: bool = False):
        self._class = type(tensor)
        self._dtype = tensor.dtype
        self._pattern = pattern
        self._sizes = sizes
        self._strides = tensor.stride() if exact_strides else None
        self._last: tuple[tuple[int, ...], tuple[int, ...]] = (tuple(tensor.shape), tensor.stride())

    def __call__(self, tensor: torch.Tensor) -> bool:
        kind = type(tensor)
        if (kind is not self._class and kind not in _PLAIN) or tensor.dtype is not self._dtype or not tensor.is_cpu:
            return False
        sizes, strides = tensor.shape, tensor.stride()
        last_sizes, last_strides = self._last
        if sizes == last_sizes and strides == last_strides:
            return True
        if len(sizes) != len(self._sizes) or stride_pattern(sizes, strides) != self._pattern:
            return False
        if any(fixed is not None and fixed != size for fixed, size in zip(self._sizes, sizes, strict=True)):
            return False
        if self._strides is not None and self._strides != strides:
            return False
        self._last = tuple(sizes), strides
        return True


_PLAIN = (torch.Tensor, torch.nn.Parameter)
