"""`attention`: the same compiled kernels on NumPy arrays, with mods that are NumPy code; no torch needed.

A call goes the way of `attnc.flex_attention`: check the arrays → find the layout (by sizes and strides, remembered) → capture
the mods → find the program (remembered, else on disk, else compiled) → allocate the results → launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attnc import programs
from attnc.capture import numpy_environment
from attnc.capture.numpy_arrays import whole
from attnc.capture.numpy_capture import capture_numpy
from attnc.capture.numpy_dtypes import shown
from attnc.errors import ArgumentsError, CaptureIndexError, DtypeError, UnsupportedTensorError
from attnc.runtime.addresses import address_of
from attnc.runtime.attention import Layout, few_queries
from attnc.runtime.signature import ANY, UNIT, Signature

DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}
"""Dtypes of query, key and value, and their MLIR names."""

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
TRACING = numpy_environment
"""What tracing a mod needs, imported now: a process that forks while another thread is in the middle of an import has a child
that cannot import it any more."""

Array = np.ndarray
_address = address_of()


def attention(
    query: Array,
    key: Array,
    value: Array,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention with your own score and mask, on NumPy arrays.

        s[b,h,q,k] = score_mod(scale * query[b,h,q] · key[b,h//G,k], b, h, q, k), -inf where not mask_mod(b, h, q, k)
        out[b,h,q] = sum_k softmax_k(s) * value[b,h//G,k];  0 where all keys are masked

    Arguments:
        query: [B, Hq, Sq, E], of dtype float64, float32, float16 or ml_dtypes.bfloat16 and any strides, negative ones too.
        key, value: [B, Hkv, Skv, E] and [B, Hkv, Skv, Ev] of the same dtype; B may be 1; Hkv divides Hq, G = Hq / Hkv.
        score_mod: (score, b, h, q_idx, kv_idx) -> score. The score is float32 (float64 for float64), the indices are int32.
        mask_mod: (b, h, q_idx, kv_idx) -> bool.
        scale: a number; 1/√E where None.
        return_lse: also return the natural logarithm of the sum of exponentials, [B, Hq, Sq], float32 (float64 for float64).

    A mod is Python code over NumPy scalars: operators, NumPy's functions, and indexing of captured arrays. It is called once,
    on stand-ins that record what is done to them; each operation has the dtype that NumPy 2 gives it.

    Returns out [B, Hq, Sq, Ev], a new array in query's dtype and order of strides, or `(out, lse)`.

    Raises a class of `attnc.errors` before anything runs: ShapeError, DtypeError, UnsupportedTensorError, UnsupportedModError,
    …; CaptureIndexError where a mod indexes a captured array out of range.
    """
    if type(query) is not Array or type(key) is not Array or type(value) is not Array:
        query, key, value = _plain("query", query), _plain("key", key), _plain("value", value)
    element = query.dtype
    if key.dtype is not element or value.dtype is not element:
        _check_dtypes(query, key, value)
    known = query.shape, key.shape, value.shape, query.strides, key.strides, value.strides, element, bool(return_lse)
    found = _layouts.get(known)
    if found is None:
        found = _new_layout(known, query, key, value)
    layout, signature, order, stats, size = found
    addresses = _address(query), _address(key), _address(value)
    if size == 0 or (addresses[0] | addresses[1] | addresses[2]) % size:
        query, key, value = whole(query), whole(key), whole(value)
        return attention(query, key, value, score_mod, mask_mod, scale, return_lse)
    record, captures, numbers = capture_numpy(score_mod, mask_mod, FLOAT64 if element is FLOAT64 else FLOAT32)
    out = np.empty(layout.out_shape, element) if order is None else _in_order(layout.out_shape, order, element)
    lse = np.empty(layout.lse_shape, stats) if return_lse else None
    if layout.without_rows:
        return (out, lse) if return_lse else out
    if layout.without_keys:
        out.fill(0)
        if lse is None:
            return out
        lse.fill(-np.inf)
        return out, lse
    known_record, program = layout.program
    if known_record is not record:
        program = programs.program(record, signature)
        layout.program = record, program  # equal records are one object
    factor = scale if type(scale) is float else _scale(scale, signature.head_dim)
    words = [addresses[0], *layout.query, addresses[1], *layout.key, addresses[2], *layout.value, factor]
    if captures:
        captures = [whole(array) for array in captures]
        for array in captures:
            size = array.itemsize
            words += (_address(array), *array.shape, *[stride // size for stride in array.strides])
    words += numbers
    words += (_address(out), *layout.out)
    if lse is not None:
        words += (_address(lse), *layout.lse)
    words.append(layout.group)
    if program.launch(words, (query, key, value, captures, out, lse)):
        raise _fault(record, signature, words)
    return out if lse is None else (out, lse)


Found = tuple[Layout, Signature, "tuple[int, ...] | None", np.dtype, int]
_layouts: dict[Any, Found] = {}
_LAYOUTS_KEPT = 4096
programs.on_forget.append(_layouts.clear)


def _new_layout(known: Any, query: Array, key: Array, value: Array) -> Found:
    """The layout of arrays of these sizes and strides, the signature, the order of out's dims (None: as they are), the dtype of
    lse, and the bytes of an element (0 where the strides are no whole elements)."""
    element = query.dtype
    if element.name not in DTYPES or not element.isnative:
        raise DtypeError(f"query, key and value have dtype {shown(element)}")
    size = element.itemsize
    arrays = query, key, value
    uneven = any(stride % size for array in arrays for stride in array.strides)
    strides = [tuple(stride // size for stride in array.strides) for array in arrays]
    layout = Layout((query.shape, strides[0]), (key.shape, strides[1]), (value.shape, strides[2]))
    batch, heads, queries, head_dim = query.shape
    signature = Signature(
        DTYPES[element.name],
        head_dim,
        value.shape[3],
        *(UNIT if steps[-1] == 1 else ANY for steps in strides),
        return_lse=known[-1],
        few_queries=few_queries(batch, heads, key.shape[1], queries, key.shape[2]),
    )
    order = sorted(range(4), key=lambda dim: (-layout.out_strides[dim], dim))
    stats = FLOAT64 if element == FLOAT64 else FLOAT32
    found = layout, signature, None if order == [0, 1, 2, 3] else tuple(order), stats, 0 if uneven else size
    if len(_layouts) >= _LAYOUTS_KEPT:
        _layouts.clear()
    _layouts[known] = found
    return found


def _in_order(shape: tuple[int, ...], order: tuple[int, ...], dtype: np.dtype) -> Array:
    """A new array whose dims lie in memory in this order."""
    return np.empty([shape[dim] for dim in order], dtype).transpose([order.index(dim) for dim in range(len(order))])


def _plain(name: str, array: Any) -> Array:
    """`array` as NumPy's own class. Raises `ArgumentsError`, `UnsupportedTensorError`."""
    kind = type(array)
    if kind is Array:
        return array
    if kind is np.memmap:
        return array.view(Array)
    label = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(array, Array):
        raise UnsupportedTensorError(
            f"{name} is a {label}, a subclass of numpy.ndarray with rules of its own",
            remedy="pass numpy.asarray(…) of it, and a mask by mask_mod=",
        )
    remedy = "attnc.flex_attention takes torch tensors" if label.startswith("torch.") else "pass NumPy arrays: numpy.asarray(…)"
    raise ArgumentsError(f"{name} is {'None' if array is None else label}, not a NumPy array", remedy=remedy)


def _check_dtypes(query: Array, key: Array, value: Array) -> None:
    if not (query.dtype == key.dtype == value.dtype):
        raise DtypeError(f"query, key and value have dtypes {shown(query.dtype)}, {shown(key.dtype)} and {shown(value.dtype)}")


def _scale(scale: Any, head_dim: int) -> float:
    """The scale as a number: `scale`, or 1/√E where it is None. Raises `DtypeError` where it is no real number."""
    if scale is None:
        return head_dim**-0.5
    try:
        if getattr(scale, "ndim", 0) or isinstance(scale, (str, bytes)):
            raise TypeError("no number")
        return float(scale)
    except (TypeError, ValueError, OverflowError) as error:
        raise DtypeError(f"scale is {scale!r}", remedy="pass a number") from error


def _fault(record: Any, signature: Signature, words: list) -> Exception:
    """The error for a kernel that found an index out of range, or a zero divisor."""
    from attnc import pipeline

    error = pipeline.locate_attention(record, signature, words)
    if isinstance(error, CaptureIndexError):
        error.message = error.message.replace("captured tensor", "captured array")
        error.remedy = "keep the index in [-size, size), e.g. with np.clip(index, 0, size - 1); an index may wrap once"
    elif "division" in str(error):
        error.remedy = "guard the divisor, e.g. np.where(n == 0, 1, n)"
    return error
