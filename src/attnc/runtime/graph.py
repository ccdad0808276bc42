"""A whole program: called on torch tensors or numpy arrays, it plans each layout of its inputs once and then replays launches.

    {"name": "main",
     "arguments": [{"kind": "buffer", "name": "q", "dtype": "f32", "sizes": [2, -1, 64]}, {"kind": "f32", "name": "scale"}],
     "steps": [{"op": "transpose", "ins": [0], "outs": [3], "dtypes": ["f32"], "permutation": [0, 2, 1]}, …],
     "kernels": [{"kind": "attention", "text": "func.func …", …}, …],
     "results": [7], "result_types": ["f32"]}

Kernels are found when a plan first needs them: in this process, on disk, or compiled by what the caller of `GraphProgram`
provides. A warm process imports nothing of the compiler.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attnc.errors import (
    ArgumentsError,
    AttncError,
    CompileError,
    DtypeError,
    GradientNotImplementedError,
    ShapeError,
)
from attnc.runtime.abi import DTYPES, Argument
from attnc.runtime.arena import scratch
from attnc.runtime.arrays import describe, scalar_word
from attnc.runtime.graph_numbers import compute, fitted
from attnc.runtime.graph_plan import Compute, Launch, Plan, Planner, Read
from attnc.runtime.launch import Kernel

PLANS_KEPT = 256
SCALAR_KINDS = {"f16": "f32", "bf16": "f32", "i16": "i64", "i8": "i64", "i1": "i64"}
"""Scalar types that only the program knows: kernels get what it makes of them."""

_READERS = {
    "f64": "d",
    "f32": "f",
    "f16": "e",
    "i64": "q",
    "i32": "i",
    "i16": "h",
    "i8": "b",
    "u8": "B",
    "i1": "?",
    "index": "q",
}


@dataclass(frozen=True)
class Variant:
    """A kernel compiled for one kind of layout."""

    launchable: Kernel
    kernel: dict[str, Any]
    variant: dict[str, Any]


class GraphProgram:
    """A program and its plans.

    `build(kernel, variant)` gives a launchable kernel; `locate(kernel, variant, words)` the error of one that reported a
    fault, `settle(argument, value)` a torch tensor whose memory holds its values. `blobs` are the contents of the program's
    constant tensors.
    """

    def __init__(
        self,
        program: dict[str, Any],
        blobs: Sequence[bytes],
        build: Callable[[dict[str, Any], dict[str, Any]], Kernel],
        locate: Callable[[dict[str, Any], dict[str, Any], Sequence[int | float]], AttncError],
        settle: Callable[[Argument, Any], Any],
    ):
        """Raises `CompileError` where `program` is none."""
        try:
            self.name = str(program["name"])
            self.arguments = tuple(_argument(entry) for entry in program["arguments"])
            self._shaping = [bool(entry.get("shapes")) for entry in program["arguments"]]
            self.kernels: list[dict[str, Any]] = program["kernels"]
            self._result_types: list[str] = program["result_types"]
        except (KeyError, TypeError, ValueError) as error:
            raise CompileError(f"the program is damaged: {type(error).__name__}: {error}") from error
        self.program = program
        self._build, self._locate, self._settle = build, locate, settle
        self._blobs = [ctypes.create_string_buffer(blob, len(blob)) for blob in blobs]
        self._constants = [ctypes.addressof(blob) for blob in self._blobs]
        self._plans: dict[Any, Plan] = {}
        self._variants: dict[str, Variant] = {}
        self._lock = threading.Lock()
        self._pointer = [argument.kind == "buffer" for argument in self.arguments]
        self._seen: list[dict[Any, tuple[Any, Any]]] = [{} for _ in self.arguments]
        self._kinds = [str(entry["kind"]) for entry in program["arguments"]]
        self._expected = [DTYPES.get(argument.dtype, "") for argument in self.arguments]

    # -- kernels ------------------------------------------------------------------------------------------------------

    def find(self, kernel: dict[str, Any], variant: dict[str, Any]) -> Variant:
        """A variant of a kernel, built if it is new."""
        name = f"{kernel['text']}{sorted(variant.items())!r}"
        if name not in self._variants:
            self._variants[name] = Variant(self._build(kernel, variant), kernel, variant)
        return self._variants[name]

    @property
    def variants(self) -> list[Variant]:
        """All that were built so far."""
        return list(self._variants.values())

    def plan(self, layouts: Sequence[Any]) -> Plan:
        """The plan for inputs of these layouts: (sizes, strides) of each tensor, the number of each scalar that decides sizes,
        None for other scalars."""
        key = tuple(layouts)
        found = self._plans.get(key)
        if found is None:
            with self._lock:
                if len(self._plans) >= PLANS_KEPT:
                    self._plans.clear()
                found = self._plans[key] = Planner(self.program, layouts, self.find).plan()
        return found

    @property
    def temporary_bytes(self) -> int:
        """Memory between kernels that the last layout planned needs."""
        return list(self._plans.values())[-1].temporary_bytes if self._plans else 0

    # -- calls --------------------------------------------------------------------------------------------------------

    def __call__(self, *values: Any) -> Any:
        """Run on tensors and numbers in the order of `arguments`. One result is returned itself, several as a tuple; they are
        torch tensors if any input is one, else numpy arrays.

        Raises `ArgumentsError`, `DtypeError`, `ShapeError`, `DeviceError`, `CaptureIndexError`, all by the argument's name.
        """
        if len(values) != len(self.arguments):
            wanted = ", ".join(argument.describe() for argument in self.arguments)
            raise ArgumentsError(
                f"{self.name} takes {len(self.arguments)} arguments, not {len(values)}", remedy=f"it takes ({wanted})"
            )
        layouts: list[Any] = []
        addresses: list[int] = []
        numbers: dict[int, int | float] = {}
        kept: list[Any] = []
        model = None
        for n, value in enumerate(values):
            if self._pointer[n]:
                is_torch = hasattr(value, "data_ptr")
                if is_torch:
                    value = self._settle(self.arguments[n], value)
                layout = self._seen[n].get((value.dtype, value.shape, value.stride())) if is_torch else None
                if layout is not None and value.is_cpu and not value.requires_grad:
                    addresses.append(value.data_ptr())
                    kept.append(value)
                else:
                    value, address, layout = self._tensor(n, value)
                    addresses.append(address)
                    kept.append(value)
                layouts.append(layout)
                if model is None or is_torch:
                    model = value
            else:
                number = fitted(scalar_word(self.arguments[n], value), self._kinds[n])
                addresses.append(0)
                numbers[n] = number
                layouts.append(number if self._shaping[n] else None)
        plan = self.plan(layouts)
        if hasattr(model, "data_ptr"):
            torch = sys.modules["torch"]
            results = [torch.empty(sizes, dtype=getattr(torch, DTYPES[dtype])) for sizes, dtype in plan.results]
            places = [result.data_ptr() for result in results]
        else:
            results = [_empty(model, sizes, dtype) for sizes, dtype in plan.results]
            places = [result.__array_interface__["data"][0] for result in results]
        block = scratch.take(plan.temporary_bytes) if plan.temporary_bytes else None
        start = block.address if block is not None else 0
        bases = {"argument": addresses, "result": places, "constant": self._constants, "temporary": [start]}
        numbers.update(plan.known)
        keep = (values, kept, results, block, self._blobs)
        for action in plan.actions:
            if isinstance(action, Launch):
                words = action.words.copy()
                for place, buffer, offset in action.addresses:
                    words[place] = bases[buffer.kind][buffer.number] + buffer.offset + offset
                for place, number in action.numbers:
                    words[place] = numbers[number]
                found = action.kernel
                if found.launchable.launch(words, keep):
                    raise self._locate(found.kernel, found.variant, words)
            elif isinstance(action, Compute):
                numbers[action.out] = compute(action.step, [numbers[value] for value in action.step["ins"]])
            elif isinstance(action, Read):
                place = bases[action.buffer.kind][action.buffer.number] + action.buffer.offset
                numbers[action.out] = _read(place + action.bytes, action.dtype)
        if block is not None:
            scratch.give(block)
        for n, value in enumerate(self.program["results"]):
            if not self.program["result_tensors"][n]:
                results[n] = numbers[value]
        return results[0] if len(results) == 1 else tuple(results)

    def _tensor(self, n: int, value: Any) -> tuple[Any, int, tuple[Any, Any]]:
        """A tensor argument, checked: itself (or a copy, where it runs backwards), its address and its layout."""
        argument = self.arguments[n]
        if any(stride < 0 for stride in getattr(value, "strides", ())):
            value = value.copy()
        address, dtype, sizes, strides = describe(value, argument)
        if dtype != self._expected[n]:
            raise DtypeError(f"{argument.describe()}: got {dtype}", remedy=f"convert it to {self._expected[n]}")
        if len(sizes) != argument.rank:
            raise ShapeError(f"{argument.describe()}: got {len(sizes)} dimensions, shape {list(sizes)}", remedy=_RANK)
        for dim, (size, fixed) in enumerate(zip(sizes, argument.fixed_sizes, strict=True)):
            if fixed is not None and size != fixed:
                raise ShapeError(f"{argument.describe()}: dim {dim} has {size} elements, not {fixed}", remedy=_FIXED)
        if getattr(value, "requires_grad", False):
            import torch

            if torch.is_grad_enabled():
                raise GradientNotImplementedError(
                    f"{argument.describe()} requires grad, and a compiled program has no backward",
                    remedy="call it under torch.no_grad(), or detach() the tensor; attnc.flex_attention and "
                    'torch.compile(model, backend="attnc") train',
                )
        layout = (tuple(sizes), tuple(strides))
        if hasattr(value, "data_ptr"):
            if len(self._seen[n]) >= PLANS_KEPT:
                self._seen[n].clear()
            self._seen[n][value.dtype, value.shape, value.stride()] = layout
        return value, address, layout


_RANK = "pass a tensor of the rank that the program was written for"
_FIXED = "the program says that size itself: pass such a tensor, or leave the dimension dynamic"


def numpy_dtype(dtype: str) -> Any:
    """The numpy dtype of an MLIR element type. Raises `DtypeError` where numpy needs ml_dtypes for it."""
    import numpy

    if dtype != "bf16":
        return numpy.dtype(DTYPES[dtype])
    try:
        import ml_dtypes
    except ImportError:
        raise DtypeError(
            "numpy has no bfloat16 of its own", remedy="pip install ml_dtypes, or call the program on torch tensors"
        ) from None
    return numpy.dtype(ml_dtypes.bfloat16)


def _empty(model: Any, sizes: tuple[int, ...], dtype: str) -> Any:
    """A new numpy array, in `model`'s own kind of bfloat16 if it is that."""
    import numpy

    own = getattr(model, "dtype", None)
    return numpy.empty(sizes, own if dtype == "bf16" and getattr(own, "name", "") == "bfloat16" else numpy_dtype(dtype))


def _argument(entry: dict[str, Any]) -> Argument:
    if entry["kind"] != "buffer":
        kind = str(entry["kind"])
        return Argument("", SCALAR_KINDS.get(kind, kind), str(entry["name"]))
    sizes = [int(size) for size in entry["sizes"]]
    text = "x".join("?" if size < 0 else str(size) for size in sizes)
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"element type {entry['dtype']!r}")
    return Argument("", "buffer", str(entry["name"]), str(entry["dtype"]), len(sizes), "", text)


def _read(address: int, dtype: str) -> int | float:
    if dtype == "bf16":
        (bits,) = struct.unpack("<H", ctypes.string_at(address, 2))
        return struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    form = "<" + _READERS[dtype]
    return struct.unpack(form, ctypes.string_at(address, struct.calcsize(form)))[0]
