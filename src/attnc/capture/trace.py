"""Tracing a mod: run it once on stand-ins and write down each ATen call.

The mod's own scalars and everything computed from them are real 0-d CPU tensors of zeros, so that torch itself decides every
dtype and shape; a captured tensor is stood in for by a zero expanded with stride 0 to its sizes. `modes.py` brings each call
here, `dispatch.py` writes it down. Nothing of this imports torch._dynamo, and grad mode is left as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from attnc.capture.locations import definition, user_location
from attnc.capture.numbers import Expression, NumberProxy, describe
from attnc.capture.reads import LazyCheck, Node, Plan, TensorCheck, stride_pattern
from attnc.capture.record import (
    MASK_ARGUMENTS,
    SCORE_ARGUMENTS,
    Argument,
    Captured,
    CaptureType,
    Function,
    ListOf,
    Literal,
    Number,
    NumberType,
    Op,
    Operand,
    Record,
    Result,
    TensorType,
)
from attnc.capture.suspend import without_dispatch_modes
from attnc.capture.tensors import DTYPES, check_capture, dtype_literal, dtype_name
from attnc.errors import ModSignatureError

# Where a dim of a value comes from: (capture, its dim), or None where its length is the code's own.
Origin = tuple[int, int] | None


class Value:
    """What a tensor means while a mod is traced."""

    __slots__ = ("operand", "origins", "shared", "standin")

    def __init__(self, operand: Operand, origins: tuple[Origin, ...], standin: torch.Tensor, shared: bool = False):
        self.operand = operand
        self.origins = origins
        self.standin = standin
        self.shared = shared  # it is a view, or has one: not to be written in place


class _Step:
    """An operation before its type is final: which lengths are fixed is known when all is traced."""

    __slots__ = ("dtype", "location", "name", "operands", "origins", "shape")

    def __init__(self, name: str, operands: tuple[Operand, ...], result: torch.Tensor, origins: tuple[Origin, ...]):
        self.name = name
        self.operands = operands
        self.dtype = dtype_name(result)
        self.shape = tuple(result.shape)
        self.origins = origins
        self.location = user_location()


class _Capture:
    __slots__ = ("exact_strides", "node", "pattern", "tensor")

    def __init__(self, tensor: torch.Tensor, node: Node | None):
        self.tensor = tensor
        self.node = node
        self.exact_strides = False
        self.pattern = stride_pattern(tensor.shape, tensor.stride())


class Tracer:
    """One trace of up to two mods, which share captures and numbers."""

    def __init__(self) -> None:
        self.plan = Plan()
        self.captures: list[_Capture] = []
        self.numbers: dict[Expression, NumberProxy] = {}
        self._number_index: dict[Expression, int] = {}
        self._values: dict[int, Value] = {}
        self._keep: list[torch.Tensor] = []  # ids stay unique while their tensors live
        self._nodes: dict[int, list[Node]] = {}
        self._fixed: set[tuple[int, int]] = set()
        self._steps: list[_Step] = []
        self._sizes: dict[tuple[int, int], NumberProxy] = {}

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
        self._steps.append(_Step(name, tuple(operands), result, origins))
        self.define(result, Result(len(self._steps) - 1), origins, shared)
        return result

    def number(self, proxy: NumberProxy) -> Number:
        """The run-time argument for a captured number (or for what the mod computed from numbers)."""
        expression = proxy._expression
        if expression[0] == "const":
            raise AssertionError("a constant is a literal")
        self.numbers.setdefault(expression, proxy)
        return Number(self._number_index.setdefault(expression, len(self._number_index)))

    def close(self) -> None:
        """Lets go of the tensors: the trace's own cycles would keep them until the collector comes round."""
        for table in (self.captures, self._values, self._keep, self._nodes):
            table.clear()

    # -- running ------------------------------------------------------------------------------------------------------

    def run(self, mod: Callable[..., Any], names: tuple[str, ...], score_dtype: torch.dtype) -> _Traced:
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
        return _Traced(types, self._steps, operand)

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

    def finish(self, score: _Traced | None, mask: _Traced | None) -> Trace:
        """The end of a trace."""
        order = _Order()
        score_function = self._function(score, order) if score is not None else None
        mask_function = self._function(mask, order) if mask is not None else None
        if score_function is not None and not score_function.ops and score_function.result == Argument(0):
            score_function = None
        captures = [self.captures[index] for index in order.captures]
        types = tuple(self._capture_type(index) for index in order.captures)
        proxies = list(self.numbers.values())
        numbers = [proxies[index] for index in order.numbers]
        number_types = tuple(NumberType(describe(n._expression, outermost=True), type(n._value).__name__) for n in numbers)
        record = Record(score_function, mask_function, types, number_types)
        check = None
        if self.plan.retrace is None:
            check = self._plan(captures, types, numbers)
        tensors, values = tuple(c.tensor for c in captures), tuple(n._value for n in numbers)
        return Trace(record, check, tensors, values, self.plan.retrace)

    def _plan(self, captures: list[_Capture], types: tuple[CaptureType, ...], numbers: list[NumberProxy]) -> LazyCheck:
        tensors = []
        for capture, type_ in zip(captures, types, strict=True):
            nodes = self._nodes[id(capture.tensor)]
            for other in nodes[1:]:
                self.plan.require(f"{other.variable} is {nodes[0].variable}")
            tensors.append((nodes[0], TensorCheck(capture.tensor, type_.strides, type_.type.shape, capture.exact_strides)))
        return self.plan.finish(tensors, [number._expression for number in numbers])

    def _capture_type(self, index: int) -> CaptureType:
        capture = self.captures[index]
        tensor = capture.tensor
        shape = tuple(size if (index, dim) in self._fixed else None for dim, size in enumerate(tensor.shape))
        name = capture.node.name if capture.node is not None else f"capture{index}"
        return CaptureType(name, TensorType(DTYPES[tensor.dtype], shape), capture.pattern)

    def _function(self, traced: _Traced, order: _Order) -> Function:
        """Drops what nothing uses, numbers operations, captures and numbers by first use, and fixes the types."""
        live: set[int] = set()
        stack = [traced.result]
        while stack:
            operand = stack.pop()
            if isinstance(operand, ListOf):
                stack.extend(operand.items)
            elif isinstance(operand, Result) and operand.op not in live:
                live.add(operand.op)
                stack.extend(traced.steps[operand.op].operands)
        positions = {old: new for new, old in enumerate(sorted(live))}

        def renumber(operand: Operand) -> Operand:
            match operand:
                case ListOf(items):
                    return ListOf(tuple(map(renumber, items)))
                case Result(op):
                    return Result(positions[op])
                case Captured(index):
                    return Captured(order.captures.setdefault(index, len(order.captures)))
                case Number(index):
                    return Number(order.numbers.setdefault(index, len(order.numbers)))
            return operand

        ops = []
        for old in sorted(live):
            step = traced.steps[old]
            pairs = zip(step.shape, step.origins, strict=True)
            shape = tuple(size if origin is None or origin in self._fixed else None for size, origin in pairs)
            operands = tuple(map(renumber, step.operands))
            ops.append(Op(step.name, operands, TensorType(step.dtype, shape), step.location))
        return Function(traced.types, tuple(ops), renumber(traced.result))


class _Traced:
    """A traced mod before unused steps are dropped."""

    __slots__ = ("result", "steps", "types")

    def __init__(self, types: tuple[TensorType, ...], steps: list[_Step], result: Operand):
        self.types = types
        self.steps = steps
        self.result = result


class _Order:
    """The final numbers of captures and numbers, by first use."""

    def __init__(self) -> None:
        self.captures: dict[int, int] = {}
        self.numbers: dict[int, int] = {}


class Trace(NamedTuple):
    """What a trace gives: the record, the plan (or why each call must trace), the tensors and numbers of now."""

    record: Record
    check: LazyCheck | None
    tensors: tuple[torch.Tensor, ...]
    numbers: tuple[int | float, ...]
    retraced: str | None


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
                raise ModSignatureError(f"{name} is no callable but {type(mod).__name__}")
            node = tracer.plan.read(name, name)
            rebuilt = environment.wrap(mod, node)
            traced.append(None if mod is None else _run(tracer, mod, rebuilt, names, score_dtype))
        environment.finish()
        return tracer.finish(*traced)


def _run(tracer: Tracer, mod: Any, rebuilt: Any, names: tuple[str, ...], score_dtype: torch.dtype) -> _Traced:
    """The trace of `mod`, run as `rebuilt`; a mod of other arguments, or with another result, is named with its place."""
    try:
        return tracer.run(rebuilt, names, score_dtype)
    except ModSignatureError as error:
        if error.filename is None:
            vars(error).update(definition(mod))
        raise
    except TypeError as error:
        refusal = _arguments_error(mod, names)
        if refusal is None:
            raise
        raise refusal from error


def _arguments_error(mod: Any, names: tuple[str, ...]) -> ModSignatureError | None:
    """The error for a mod that cannot be called with `names`; None where it can, or where Python cannot say."""
    try:
        signature = inspect.signature(mod)
    except (TypeError, ValueError):
        return None
    if _takes(signature, len(names)):
        return None
    role, other, others = "score_mod", "mask_mod", MASK_ARGUMENTS
    if names is MASK_ARGUMENTS:
        role, other, others = "mask_mod", "score_mod", SCORE_ARGUMENTS
    name = getattr(mod, "__name__", "<lambda>")
    who = role if name in ("<lambda>", role) else f"{role} '{name}'"
    parameters = signature.parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    least, most = sum(p.default is p.empty for p in positional), len(positional)
    shown = ({"q": "q_idx", "kv": "kv_idx"}.get(argument, argument) for argument in names)
    wanted = f"{len(names)} ({', '.join(shown)})"
    if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        message = f"{who} has keyword arguments without a default; it is called with {wanted}"
    elif any(p.kind is p.VAR_POSITIONAL for p in parameters):
        message = f"{who} takes at least {least} arguments, not {wanted}"
    else:
        count = f"{most}" if least == most else f"{least} to {most}"
        message = f"{who} takes {count} argument{'' if count == '1' else 's'}, not {wanted}"
    like = {"mask_mod": "a mask", "score_mod": "a score mod"}[other]
    remedy = f"this looks like {like}: pass it as {other}=" if _takes(signature, len(others)) else None
    return ModSignatureError(message, remedy=remedy, **definition(mod))


def _takes(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True
