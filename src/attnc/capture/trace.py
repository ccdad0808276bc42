"""Tracing a mod: run it once on stand-ins and write down each ATen call.

The mod's own scalars and everything computed from them are real 0-d CPU tensors of zeros, so that torch itself decides every
dtype and shape; a captured tensor is stood in for by a zero expanded with stride 0 to its sizes. `modes.py` brings each call
here, `dispatch.py` writes it down. Nothing of this imports torch._dynamo, and grad mode is left as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from attnc.capture.locations import no_callable
from attnc.capture.numbers import NumberProxy
from attnc.capture.reads import Node, stride_pattern
from attnc.capture.record import (
    MASK_ARGUMENTS,
    SCORE_ARGUMENTS,
    Argument,
    Captured,
    CaptureType,
    Literal,
    Operand,
    TensorType,
)
from attnc.capture.recorder import Origin, Recorder, Trace, Traced, with_places
from attnc.capture.suspend import without_dispatch_modes
from attnc.capture.tensors import DTYPES, TensorCheck, check_capture, dtype_literal, dtype_name
from attnc.errors import ModSignatureError


class Value:
    """What a tensor means while a mod is traced."""

    __slots__ = ("operand", "origins", "shared", "standin")

    def __init__(self, operand: Operand, origins: tuple[Origin, ...], standin: torch.Tensor, shared: bool = False):
        self.operand = operand
        self.origins = origins
        self.standin = standin
        self.shared = shared  # it is a view, or has one: not to be written in place


class _Capture:
    __slots__ = ("exact_strides", "node", "pattern", "tensor")

    def __init__(self, tensor: torch.Tensor, node: Node | None):
        self.tensor = tensor
        self.node = node
        self.exact_strides = False
        self.pattern = stride_pattern(tensor.shape, tensor.stride())


class Tracer(Recorder):
    """One trace of up to two mods of torch operations."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[int, Value] = {}
        self._keep: list[torch.Tensor] = []  # ids stay unique while their tensors live
        self._sizes: dict[tuple[int, int], NumberProxy] = {}

    def dtype_of(self, tensor: torch.Tensor) -> str:
        return DTYPES[tensor.dtype]

    def check_of(self, capture: _Capture, type_: CaptureType) -> TensorCheck:
        return TensorCheck(capture.tensor, type_.strides, type_.type.shape, capture.exact_strides)

    # -- what tensors mean --------------------------------------------------------------------------------------------

    def saw(self, tensor: torch.Tensor, node: Node) -> None:
        """The mod can reach `tensor` by the read `node`."""
        self._keep.append(tensor)
        self._nodes.setdefault(id(tensor), []).append(node)

    def seen(self) -> list[torch.Tensor]:
        """The tensors that the mod can reach and those it computed."""
        return self._keep

    def value(self, tensor: torch.Tensor) -> Value:
        """What `tensor` means; one that is not known is captured."""
        value = self._values.get(id(tensor))
        if value is None:
            value = self._capture(tensor)
        return value

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` was captured, can be reached by a read, or was computed by the mod."""
        return id(tensor) in self._values or id(tensor) in self._nodes

    def is_computed(self, tensor: torch.Tensor) -> bool:
        value = self._values.get(id(tensor))
        return value is not None and not isinstance(value.operand, Captured)

    def define(self, tensor: torch.Tensor, operand: Operand, origins: tuple[Origin, ...], shared: bool = False) -> Value:
        self._keep.append(tensor)
        value = self._values[id(tensor)] = Value(operand, origins, tensor, shared)
        return value

    def _capture(self, tensor: torch.Tensor) -> Value:
        check_capture(tensor)
        nodes = self._nodes.get(id(tensor), [])
        if not nodes:
            self.plan.give_up("a captured tensor that is reached by no read that can be repeated")
        index = len(self.captures)
        self.captures.append(_Capture(tensor, nodes[0] if nodes else None))
        standin = torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)
        value = self.define(standin, Captured(index), tuple((index, dim) for dim in range(tensor.dim())), shared=True)
        self._keep.append(tensor)
        self._values[id(tensor)] = value
        return value

    def capture_of(self, tensor: torch.Tensor) -> _Capture | None:
        """The captured tensor that `tensor` is or stands for."""
        operand = self.value(tensor).operand
        return self.captures[operand.index] if isinstance(operand, Captured) else None

    def size(self, capture: _Capture, dim: int) -> NumberProxy:
        """The length of a captured tensor's dim, as a number that Python read."""
        key = id(capture.tensor), dim
        if key not in self._sizes:
            assert capture.node is not None
            node = self.plan.read(f"{capture.node.variable}.shape[{dim}]", f"{capture.node.name}.shape[{dim}]")
            self._sizes[key] = NumberProxy(self.plan, ("read", node), capture.tensor.shape[dim])
        return self._sizes[key]

    def fix(self, value: Value, dims: Sequence[int] | None = None) -> None:
        """The lengths of `value` (of `dims`) are compiled in."""
        origins = value.origins if dims is None else [value.origins[dim] for dim in dims]
        self._fixed.update(origin for origin in origins if origin is not None)

    # -- writing down -------------------------------------------------------------------------------------------------

    def emit(
        self,
        name: str,
        operands: Sequence[Operand],
        result: torch.Tensor,
        origins: tuple[Origin, ...] | None = None,
        shared: bool = False,
    ) -> torch.Tensor:
        """Writes down one operation, whose value `result` then is."""
        origins = (None,) * result.dim() if origins is None else origins
        written = self.note(name, operands, dtype_name(result), tuple(result.shape), origins)
        self.define(result, written, origins, shared)
        return result

    def close(self) -> None:
        """Lets go of the tensors: the trace's own cycles would keep them until the collector comes round."""
        for table in (self.captures, self._values, self._keep, self._nodes):
            table.clear()

    # -- running ------------------------------------------------------------------------------------------------------

    def run(self, mod: Callable[..., Any], names: tuple[str, ...], score_dtype: torch.dtype) -> Traced:
        """Traces one mod, whose arguments are `names`."""
        from attnc.capture.modes import DispatchMode, FunctionMode

        self._steps = []
        arguments = []
        for index, name in enumerate(names):
            standin = torch.zeros((), dtype=score_dtype if name == "score" else torch.int32, device="cpu")
            self.define(standin, Argument(index), ())
            arguments.append(standin)
        with DispatchMode(self), FunctionMode(self):
            result = mod(*arguments)
            operand = self._result(result, score_dtype if names is SCORE_ARGUMENTS else torch.bool, names)
        types = tuple(TensorType(DTYPES[score_dtype] if name == "score" else "int32") for name in names)
        return Traced(types, self._steps, operand)

    def _result(self, result: Any, dtype: torch.dtype, names: tuple[str, ...]) -> Operand:
        what = "score_mod" if names is SCORE_ARGUMENTS else "mask_mod"
        if type(result) is NumberProxy or isinstance(result, (bool, int, float)):
            result = torch.tensor(result, dtype=None if isinstance(result, bool) else dtype)
        if not isinstance(result, torch.Tensor):
            raise ModSignatureError(f"{what} returned {type(result).__name__}, not a tensor")
        value = self.value(result)
        if value.standin.dim():
            raise ModSignatureError(f"{what} returned a tensor of shape {list(value.standin.shape)}, not a scalar")
        if value.standin.dtype is not dtype:
            if dtype is torch.bool:
                raise ModSignatureError(
                    f"mask_mod returned {DTYPES.get(value.standin.dtype)}, not bool", remedy="compare: return x != 0"
                )
            value = self.value(self.cast(value, dtype))
        return value.operand

    def cast(self, value: Value, dtype: torch.dtype) -> torch.Tensor:
        """`value` converted to `dtype`."""
        self.fix(value)
        with torch._C.DisableTorchFunction():
            result = torch.zeros((), dtype=dtype, device="cpu").expand(value.standin.shape)
        flag = Literal.of(False)
        return self.emit("aten.to.dtype", (value.operand, dtype_literal(dtype), flag, flag, Literal.of(None)), result)


def trace(score_mod: object, mask_mod: object, score_dtype: torch.dtype) -> Trace:
    """Traces both mods (either may be None)."""
    from attnc.capture.environment import Environment

    with ExitStack() as stack:
        stack.enter_context(without_dispatch_modes())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if torch.is_autocast_enabled("cpu"):
            torch.set_autocast_enabled("cpu", False)
            stack.callback(torch.set_autocast_enabled, "cpu", True)
        tracer = Tracer()
        environment = Environment(tracer)
        stack.callback(tracer.close)
        stack.callback(environment.close)
        traced = []
        for name, mod, names in (("score_mod", score_mod, SCORE_ARGUMENTS), ("mask_mod", mask_mod, MASK_ARGUMENTS)):
            if not callable(mod) and mod is not None:
                raise no_callable(name, mod)
            node = tracer.plan.read(name, name)
            rebuilt = environment.wrap(mod, node)
            run = functools.partial(tracer.run, score_dtype=score_dtype)
            traced.append(None if mod is None else with_places(run, mod, rebuilt, names))
        environment.finish()
        return tracer.finish(*traced)
