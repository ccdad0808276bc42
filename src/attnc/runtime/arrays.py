"""Arrays as kernel arguments: numpy arrays and torch tensors (found by what they offer: torch is not imported)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnc.errors import ArgumentsError, DeviceError, DtypeError, ShapeError
from attnc.runtime.abi import DTYPES, Argument, KernelRecord


def argument_words(record: KernelRecord, values: Sequence[Any]) -> list[int | float]:
    """The words of a call on `values` in the record's order, outputs included.

    Buffers are numpy arrays or CPU torch tensors of the record's dtype, rank, and fixed sizes and strides, scalars are Python
    numbers. Raises `ArgumentsError`, `DtypeError`, `ShapeError`, `DeviceError` where they are not.
    """
    if len(values) != len(record.arguments):
        wanted = ", ".join(argument.describe() for argument in record.arguments)
        raise ArgumentsError(
            f"kernel {record.name} takes {len(record.arguments)} arguments, not {len(values)}", remedy=f"it takes ({wanted})"
        )
    words: list[int | float] = []
    for argument, value in zip(record.arguments, values, strict=True):
        if argument.kind == "buffer":
            words += buffer_words(argument, value)
        else:
            words.append(scalar_word(argument, value))
    return words


def scalar_word(argument: Argument, value: Any) -> int | float:
    """A Python (or numpy, or 0-d) number as the word of a scalar argument."""
    try:
        if argument.kind in ("f64", "f32"):
            return float(value)
        number = int(value)
        if number != value:
            raise ValueError("not whole")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ArgumentsError(f"{argument.describe()}: {value!r} is no such number") from error
    if not -(1 << 63) <= number < 1 << 63:
        raise ArgumentsError(f"{argument.describe()}: {value!r} does not fit in 64 bits")
    return number


def buffer_words(argument: Argument, array: Any, shape: Sequence[int] | None = None) -> list[int]:
    """Pointer, sizes and strides of an array; with `shape` it is broadcast to that (by stride 0)."""
    address, dtype, sizes, strides = describe(array, argument)
    if dtype != DTYPES[argument.dtype]:
        raise DtypeError(f"{argument.describe()}: got {dtype}", remedy=f"convert it to {DTYPES[argument.dtype]}")
    if shape is not None and tuple(sizes) != tuple(shape):
        sizes, strides = _broadcast(argument, sizes, strides, shape)
    if len(sizes) != argument.rank:
        raise ShapeError(
            f"{argument.describe()}: got {len(sizes)} dimensions",
            remedy=f"it takes {argument.rank} dimensions, as the kernel was compiled for",
        )
    for dim, (size, fixed) in enumerate(zip(sizes, argument.fixed_sizes, strict=True)):
        if fixed is not None and size != fixed:
            raise ShapeError(
                f"{argument.describe()}: dim {dim} has {size} elements, not {fixed}",
                remedy="the kernel was compiled for that length: lower it anew for another one",
            )
    for dim, (size, stride, fixed) in enumerate(zip(sizes, strides, argument.fixed_strides, strict=True)):
        if fixed is not None and stride != fixed and size > 1 and 0 not in sizes:
            raise ShapeError(
                f"{argument.describe()}: dim {dim} has stride {stride}, not {fixed}",
                remedy="the kernel was compiled for that stride: pass a contiguous copy, or lower it anew for this layout",
            )
    return [address, *sizes, *strides]


def describe(array: Any, argument: Argument) -> tuple[int, str, tuple[int, ...], tuple[int, ...]]:
    """(address, dtype's name, sizes, strides in elements) of a numpy array or torch tensor."""
    if hasattr(array, "data_ptr") and hasattr(array, "stride"):
        if getattr(array, "device", None) is None or array.device.type != "cpu":
            raise DeviceError(f"{argument.describe()}: the tensor is on {array.device}")
        return array.data_ptr(), str(array.dtype).removeprefix("torch."), tuple(array.shape), tuple(array.stride())
    interface = getattr(array, "__array_interface__", None)
    if interface is None:
        raise ArgumentsError(f"{argument.describe()}: {type(array).__name__} is neither a numpy array nor a torch tensor")
    if argument.role in ("out", "lse", "max") and not array.flags.writeable:
        raise ArgumentsError(f"{argument.describe()}: the array is read-only")
    size = array.dtype.itemsize
    if any(stride % size for stride in array.strides) or not array.dtype.isnative:
        raise ArgumentsError(
            f"{argument.describe()}: the array's strides are no whole elements or its bytes are swapped",
            remedy="pass numpy.ascontiguousarray(array) in native byte order",
        )
    return interface["data"][0], array.dtype.name, array.shape, tuple(stride // size for stride in array.strides)


def empty_like(model: Any, argument: Argument, shape: Sequence[int], strides: Sequence[int] | None) -> Any:
    """A new array for a result: of `argument`'s dtype, dense in the order of `strides` (row-major where None), a torch tensor
    if `model` is one, else a numpy array."""
    dtype = DTYPES[argument.dtype]
    if hasattr(model, "data_ptr"):
        import torch

        element = getattr(torch, dtype)
        if strides is None:
            return torch.empty(tuple(shape), dtype=element, device="cpu")
        return torch.empty_strided(tuple(shape), tuple(strides), dtype=element, device="cpu")
    import numpy

    element = model.dtype if model.dtype.name == dtype else numpy.dtype(dtype)
    if strides is None:
        return numpy.empty(shape, element)
    order = sorted(range(len(shape)), key=lambda dim: (-strides[dim], dim))
    dense = numpy.empty([shape[dim] for dim in order], element)
    return dense.transpose([order.index(dim) for dim in range(len(shape))])


def fitting(argument: Argument, array: Any) -> Any:
    """`array`, or a contiguous copy of it where its last stride is not the one the kernel was compiled for."""
    fixed = argument.fixed_strides
    _, _, sizes, strides = describe(array, argument)
    if not fixed or fixed[-1] != 1 or not strides or strides[-1] == 1 or sizes[-1] < 2:
        return array
    if hasattr(array, "data_ptr"):
        return array.contiguous()
    import numpy

    return numpy.ascontiguousarray(array)


def _broadcast(
    argument: Argument, sizes: Sequence[int], strides: Sequence[int], shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    missing = len(shape) - len(sizes)
    if missing < 0 or any(size not in (1, wanted) for size, wanted in zip(sizes, shape[missing:], strict=True)):
        raise ShapeError(f"{argument.describe()}: shape {tuple(sizes)} does not broadcast to {tuple(shape)}")
    kept = tuple(stride if size == wanted else 0 for size, stride, wanted in zip(sizes, strides, shape[missing:], strict=True))
    return tuple(shape), (0,) * missing + kept
