"""What a trace has written down, whichever library the mods use: `Recorder`, the base of each front end's tracer.

A tracer runs a mod on stand-ins of its own and calls `note` for each operation. When both mods are through, `finish` drops what
nothing uses, numbers what is left by first use, and makes the record and the plan of reads of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from attnc.capture.locations import definition, user_location
from attnc.capture.numbers import Expression, NumberProxy, describe
from attnc.capture.reads import LazyCheck, Node, Plan
from attnc.capture.record import (
    MASK_ARGUMENTS,
    SCORE_ARGUMENTS,
    Argument,
    Captured,
    CaptureType,
    Function,
    ListOf,
    Number,
    NumberType,
    Op,
    Operand,
    Record,
    Result,
    TensorType,
)
from attnc.errors import ModSignatureError

# Where a dim of a value comes from: (capture, its dim), or None where its length is the code's own.
Origin = tuple[int, int] | None


class Step:
    """An operation before its type is final: which lengths are fixed is known when all is traced."""

    __slots__ = ("dtype", "location", "name", "operands", "origins", "shape")

    def __init__(
        self, name: str, operands: tuple[Operand, ...], dtype: str, shape: tuple[int, ...], origins: tuple[Origin, ...]
    ):
        self.name = name
        self.operands = operands
        self.dtype = dtype
        self.shape = shape
        self.origins = origins
        self.location = user_location()


class Traced:
    """A traced mod before unused steps are dropped."""

    __slots__ = ("result", "steps", "types")

    def __init__(self, types: tuple[TensorType, ...], steps: list[Step], result: Operand):
        self.types = types
        self.steps = steps
        self.result = result


class Order:
    """The final numbers of captures and numbers, by first use."""

    def __init__(self) -> None:
        self.captures: dict[int, int] = {}
        self.numbers: dict[int, int] = {}


class Trace(NamedTuple):
    """What a trace gives: the record, the plan (or why each call must trace), the tensors and numbers of now."""

    record: Record
    check: LazyCheck | None
    tensors: tuple[Any, ...]
    numbers: tuple[int | float, ...]
    retraced: str | None


class Recorder:
    """One trace of up to two mods, which share captures and numbers.

    A capture is an object with `tensor`, `node` (the read that reaches it, or None), `pattern` (of its strides) and
    `exact_strides`.
    """

    def __init__(self) -> None:
        self.plan = Plan()
        self.captures: list[Any] = []
        self.numbers: dict[Expression, NumberProxy] = {}
        self._number_index: dict[Expression, int] = {}
        self._nodes: dict[int, list[Node]] = {}  # by the id of a tensor: the reads that reach it
        self._fixed: set[tuple[int, int]] = set()
        self._steps: list[Step] = []

    # -- what a front end says ----------------------------------------------------------------------------------------

    def dtype_of(self, tensor: Any) -> str:
        """The name of a captured tensor's dtype."""
        raise NotImplementedError

    def check_of(self, capture: Any, type_: CaptureType) -> Callable[[Any], bool]:
        """Whether another tensor may take the place of a captured one."""
        raise NotImplementedError

    def kind_of(self, value: Any) -> str:
        """Whether a number is an int or a float."""
        return type(value).__name__

    # -- writing down -------------------------------------------------------------------------------------------------

    def note(
        self, name: str, operands: Sequence[Operand], dtype: str, shape: tuple[int, ...], origins: tuple[Origin, ...]
    ) -> Result:
        """Writes down one operation."""
        self._steps.append(Step(name, tuple(operands), dtype, shape, origins))
        return Result(len(self._steps) - 1)

    def number(self, proxy: NumberProxy) -> Number:
        """The run-time argument for a captured number (or for what the mod computed from numbers)."""
        expression = proxy._expression
        if expression[0] == "const":
            raise AssertionError("a constant is a literal")
        self.numbers.setdefault(expression, proxy)
        return Number(self._number_index.setdefault(expression, len(self._number_index)))

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish(self, score: Traced | None, mask: Traced | None) -> Trace:
        """The end of a trace."""
        order = Order()
        score_function = self._function(score, order) if score is not None else None
        mask_function = self._function(mask, order) if mask is not None else None
        if score_function is not None and not score_function.ops and score_function.result == Argument(0):
            score_function = None
        captures = [self.captures[index] for index in order.captures]
        types = tuple(self._capture_type(index) for index in order.captures)
        proxies = list(self.numbers.values())
        numbers = [proxies[index] for index in order.numbers]
        number_types = tuple(NumberType(describe(n._expression, outermost=True), self.kind_of(n._value)) for n in numbers)
        record = Record(score_function, mask_function, types, number_types)
        check = None
        if self.plan.retrace is None:
            check = self._plan(captures, types, numbers)
        tensors, values = tuple(c.tensor for c in captures), tuple(n._value for n in numbers)
        return Trace(record, check, tensors, values, self.plan.retrace)

    def _plan(self, captures: list[Any], types: tuple[CaptureType, ...], numbers: list[NumberProxy]) -> LazyCheck:
        tensors = []
        for capture, type_ in zip(captures, types, strict=True):
            nodes = self._nodes[id(capture.tensor)]
            for other in nodes[1:]:
                self.plan.require(f"{other.variable} is {nodes[0].variable}")
            tensors.append((nodes[0], self.check_of(capture, type_)))
        return self.plan.finish(tensors, [number._expression for number in numbers])

    def _capture_type(self, index: int) -> CaptureType:
        capture = self.captures[index]
        tensor = capture.tensor
        shape = tuple(size if (index, dim) in self._fixed else None for dim, size in enumerate(tensor.shape))
        name = capture.node.name if capture.node is not None else f"capture{index}"
        return CaptureType(name, TensorType(self.dtype_of(tensor), shape), capture.pattern)

    def _function(self, traced: Traced, order: Order) -> Function:
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


def with_places(run: Callable[[Any, tuple[str, ...]], Traced], mod: Any, rebuilt: Any, names: tuple[str, ...]) -> Traced:
    """`run(rebuilt, names)`, the trace of `mod`; a mod of other arguments, or with another result, is named with its place."""
    try:
        return run(rebuilt, names)
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
