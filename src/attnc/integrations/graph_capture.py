"""Mods captured where something traces or transforms the call: their tensors may be fake, functional or batched, their numbers
symbolic. The record is the same as for an eager call; what it captures are operands for `attnc::attention`.

`capture_functions` takes the user's Python functions (torch.func, make_fx, torch.export, modes), `capture_graphs` takes the
FX graphs that torch made of them (torch.compile, torch's own flex_attention).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter

from attnc.capture.environment import Environment
from attnc.capture.locations import no_callable
from attnc.capture.numbers import Expression, NumberProxy, source
from attnc.capture.reads import LazyCheck, Node
from attnc.capture.record import (
    MASK_ARGUMENTS,
    SCORE_ARGUMENTS,
    Captured,
    CaptureType,
    Function,
    Literal,
    Record,
    Result,
    TensorType,
)
from attnc.capture.suspend import without_dispatch_modes
from attnc.capture.trace import DTYPES, Tracer, Value
from attnc.errors import DataDependentModError, DeviceError, UnsupportedModError, UnsupportedTensorError


class Operands(NamedTuple):
    """A record, and the tensors and numbers (maybe symbolic) that it takes."""

    record: Record
    tensors: tuple[Tensor, ...]
    numbers: tuple[Any, ...]


def hint(number: Any) -> Any:
    """The number behind a symbolic one, as the trace sees it: no guard. Raises `UnsupportedModError` where there is none."""
    if not isinstance(number, (torch.SymInt, torch.SymFloat)):
        return number
    if not number.node.has_hint():
        raise UnsupportedModError(
            f"a mod captures {number}, a number without a value at the time of tracing",
            remedy="pass it to the mod as a 0-d tensor",
        )
    kind = int if isinstance(number, torch.SymInt) else float
    return kind(number.node.hint)


@contextmanager
def plain_torch() -> Iterator[None]:
    """No mode of torch is active inside, and no functorch transform: tracing a mod leaves no trace."""
    with ExitStack() as stack:
        if torch._C._functorch.peek_interpreter_stack() is not None:  # type: ignore[attr-defined]
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

            stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(without_dispatch_modes())
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PreDispatch)  # type: ignore[attr-defined]
        stack.enter_context(torch._C._ExcludeDispatchKeyGuard(keys))
        modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
        for mode in modes:  # called back in the reverse order: the innermost mode is pushed last
            stack.callback(torch._C._push_on_torch_function_stack, mode)
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if torch.is_autocast_enabled("cpu"):
            torch.set_autocast_enabled("cpu", False)
            stack.callback(torch.set_autocast_enabled, "cpu", True)
        yield


class _Capture:
    """A captured tensor that may be without memory, or of symbolic sizes. Its strides are left open until the operator runs."""

    __slots__ = ("exact_strides", "node", "pattern", "tensor")

    def __init__(self, tensor: Tensor, node: Node | None):
        self.tensor = tensor
        self.node = node
        self.exact_strides = False
        self.pattern = ""


class GraphTracer(Tracer):
    """A tracer whose captured tensors need only have sizes and a dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.expressions: list[Expression] = []
        self.symbolic = False  # whether a number is: then the trace's numbers of now are only hints

    def symbol(self, number: Any, node: Node) -> NumberProxy:
        """A number that may be symbolic, read as `node`."""
        self.symbolic = self.symbolic or isinstance(number, (torch.SymInt, torch.SymFloat))
        return NumberProxy(self.plan, ("read", node), hint(number))

    def size(self, capture: Any, dim: int) -> NumberProxy:
        node = self.plan.read(f"{capture.node.variable}.shape[{dim}]", f"{capture.node.name}.shape[{dim}]")
        return self.symbol(capture.tensor.shape[dim], node)

    def _capture(self, tensor: Tensor) -> Value:
        check_capture(tensor)
        nodes = self._nodes.get(id(tensor), [])
        if not nodes:
            self.plan.give_up("a captured tensor that is reached by no read that can be repeated")
        index = len(self.captures)
        self.captures.append(_Capture(tensor, nodes[0] if nodes else None))  # type: ignore[arg-type]
        with torch._C.DisableTorchFunction():
            standin = torch.zeros((), dtype=tensor.dtype, device="cpu").expand([hint(size) for size in tensor.shape])
        value = self.define(standin, Captured(index), tuple((index, dim) for dim in range(tensor.dim())), shared=True)
        self._keep.append(tensor)
        self._values[id(tensor)] = value
        return value

    def _capture_type(self, index: int) -> CaptureType:
        capture = self.captures[index]
        sizes = enumerate(capture.tensor.shape)
        shape = tuple(int(size) if (index, dim) in self._fixed else None for dim, size in sizes)  # int() guards a symbolic size
        name = capture.node.name if capture.node is not None else f"capture{index}"
        return CaptureType(name, TensorType(DTYPES[capture.tensor.dtype], shape), capture.pattern)

    def _plan(self, captures: list[Any], types: tuple[CaptureType, ...], numbers: list[NumberProxy]) -> LazyCheck:
        self.expressions = [number._expression for number in numbers]
        return super()._plan(captures, types, numbers)


def check_capture(tensor: Tensor) -> None:
    """Refuses captured tensors that cannot be operands: other layouts, devices and dtypes."""
    with torch._C.DisableTorchFunction():
        if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized:
            raise UnsupportedTensorError(f"a mod captures a tensor of layout {tensor.layout}")
        if tensor.device.type not in ("cpu", "meta"):
            raise DeviceError(f"a mod captures a tensor on {tensor.device}; attnc runs on the CPU only so far")
        if tensor.dtype not in DTYPES:
            raise UnsupportedTensorError(
                f"a mod captures a tensor of {tensor.dtype}", remedy="convert it to a real float, int or bool dtype"
            )


# -- Python functions -------------------------------------------------------------------------------------------------------
class _Environment(Environment):
    """Symbolic numbers, too, are captured numbers."""

    def wrap(self, value: Any, node: Node) -> Any:
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            assert isinstance(self.tracer, GraphTracer)
            return self.tracer.symbol(value, node)
        return super().wrap(value, node)


def capture_functions(score_mod: Any, mask_mod: Any, score_dtype: torch.dtype) -> Operands:
    """The record of two mods (either may be None), and what they capture now. Raises as `attnc.capture.capture.capture`
    does."""
    if score_mod is None and mask_mod is None:
        return Operands(Record(None, None), (), ())
    with plain_torch():
        tracer = GraphTracer()
        environment = _Environment(tracer)
        traced = []
        for name, mod, names in (("score_mod", score_mod, SCORE_ARGUMENTS), ("mask_mod", mask_mod, MASK_ARGUMENTS)):
            if not callable(mod) and mod is not None:
                raise no_callable(name, mod)
            rebuilt = environment.wrap(mod, tracer.plan.read(name, name))
            traced.append(None if mod is None else tracer.run(rebuilt, names, score_dtype))
        environment.finish()
        trace = tracer.finish(*traced)
        numbers: tuple[Any, ...] = trace.numbers
        if tracer.symbolic:
            # The plan of reads, run on the symbolic numbers, computes with them, and guards what Python asked of them.
            found = None if trace.check is None else trace.check(score_mod, mask_mod)
            if found is None:
                raise UnsupportedModError(
                    f"a mod captures a symbolic number in a way that cannot be followed ({trace.retraced or 'it changed'})",
                    remedy="capture the number itself (a closure variable or an attribute), or a 0-d tensor",
                )
            numbers = found[1]
    return Operands(trace.record, trace.tensors, numbers)


# -- FX graphs --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class GraphOperands:
    """A record of FX graphs. Its captured tensors are the operands of these places; its numbers are `expressions` of operands,
    of sizes (place, dim) and of constants, by variable."""

    record: Record
    captures: tuple[int, ...]
    expressions: tuple[Expression, ...]
    operands: dict[str, int]
    sizes: dict[str, tuple[int, int]]
    constants: dict[str, float]
    items: dict[str, tuple[int, Any]]
    """Numbers that a graph takes from a 0-d operand by `.item()`, as dynamo does with floats: place, and the symbolic
    number. The operand itself is handed on: of the symbolic number AOTAutograd would make a constant."""


class _GraphTracer(GraphTracer):
    """Runs FX graphs. Their operands are known beforehand."""

    def __init__(self, operands: Sequence[Any], names: Sequence[str]) -> None:
        super().__init__()
        self.names = names
        self.places: dict[int, int] = {}  # capture -> operand
        self.variables: dict[str, int] = {}
        self.size_variables: dict[str, tuple[int, int]] = {}
        self.constants: dict[str, float] = {}
        self.items: dict[str, tuple[int, Any]] = {}
        self.arguments = [self._argument(place, operand) for place, operand in enumerate(operands)]

    def _argument(self, place: int, operand: Any) -> Any:
        if isinstance(operand, Tensor):
            self.saw(operand, self.plan.read(f"operand{place}", self.names[place]))
            self.places[len(self.captures)] = place
            return self._capture(operand).standin
        node = self.plan.read(f"operand{place}", self.names[place])
        self.variables[node.variable] = place
        value = hint(operand)
        return value if isinstance(value, bool) else NumberProxy(self.plan, ("read", node), value)

    def size(self, capture: Any, dim: int) -> NumberProxy:
        place = self.places[next(index for index, other in enumerate(self.captures) if other is capture)]
        node = self.plan.read(f"operand{place}.shape[{dim}]", f"{self.names[place]}.shape[{dim}]")
        self.size_variables[node.variable] = place, dim
        return NumberProxy(self.plan, ("read", node), hint(capture.tensor.shape[dim]))

    def constant(self, number: float) -> NumberProxy:
        """A float that the graph holds: it may have been a captured one, so it is no part of the record."""
        node = self.plan.read(repr(number), f"number{len(self.constants)}")
        self.constants[node.variable] = number
        return NumberProxy(self.plan, ("read", node), number)

    def item(self, standin: Tensor, symbol: Any) -> NumberProxy:
        """`operand.item()`, where the graph knows the number by `symbol`."""
        operand = self.value(standin).operand
        if not isinstance(operand, Captured):
            raise DataDependentModError(
                "a mod reads a tensor's data: .item()", remedy="use the tensor itself, or tensor[index] to read an element"
            )
        place = self.places[operand.index]
        node = self.plan.read(f"operand{place}.item()", self.names[place])
        self.items[node.variable] = place, symbol
        return NumberProxy(self.plan, ("read", node), hint(symbol))

    def _plan(self, captures: list[Any], types: tuple[CaptureType, ...], numbers: list[NumberProxy]) -> LazyCheck:
        self.expressions = [number._expression for number in numbers]
        self.used = [self.places[self.captures.index(capture)] for capture in captures]
        return LazyCheck("def check(score_mod, mask_mod): pass", {})


class _Runner(Interpreter):
    def __init__(self, module: GraphModule, tracer: _GraphTracer):
        super().__init__(module)
        self.tracer = tracer
        self.extra_traceback = False

    def run_node(self, n: torch.fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        symbol = n.meta.get("example_value")
        if n.op == "call_method" and n.target == "item" and isinstance(symbol, torch.SymFloat):
            return self.tracer.item(args[0], symbol)
        if n.op in ("call_function", "call_method"):
            args, kwargs = torch.fx.node.map_aggregate((args, kwargs), self._number)  # type: ignore[misc]
        return getattr(self, n.op)(n.target, args, kwargs)

    def _number(self, value: Any) -> Any:
        return self.tracer.constant(value) if type(value) is float and math.isfinite(value) else value


def capture_graphs(
    score: GraphModule | None,
    score_operands: Sequence[Any],
    mask: GraphModule | None,
    mask_operands: Sequence[Any],
    score_dtype: torch.dtype,
    names: Sequence[str] = (),
) -> GraphOperands:
    """The record of a score graph (score, b, h, q, kv, *operands) and a mask graph (b, h, q, kv, *operands).

    Operands are tensors (fake ones too) and numbers (symbolic ones too); places count those of the score first, and so do their
    `names`. What the graphs ask of a symbolic number, and lengths that are compiled in, become guards.
    """
    operands = [*score_operands, *mask_operands]
    split = len(score_operands)
    with plain_torch():
        tracer = _GraphTracer(operands, names or [f"operand{place}" for place in range(len(operands))])
        arguments = tracer.arguments[:split], tracer.arguments[split:]
        traced = [
            None if graph is None else tracer.run(_function(graph, tracer, rest), names, score_dtype)
            for graph, rest, names in zip((score, mask), arguments, (SCORE_ARGUMENTS, MASK_ARGUMENTS), strict=True)
        ]
        record = tracer.finish(*traced).record
    if tracer.plan.retrace is not None:
        raise UnsupportedModError(f"a mod's graph cannot be followed: {tracer.plan.retrace}")
    found = GraphOperands(
        _simplified(record),
        tuple(tracer.used),
        tuple(tracer.expressions),
        tracer.variables,
        tracer.size_variables,
        tracer.constants,
        tracer.items,
    )
    symbols = {variable: symbol for variable, (_, symbol) in found.items.items()}
    for expression, answer in tracer.plan._guards.items():
        if not evaluate(expression, found, operands, symbols) == answer:  # of a symbolic number this is a guard
            raise AssertionError("a number has another value than its own hint")
    return found


def _function(graph: GraphModule, tracer: _GraphTracer, rest: Sequence[Any]) -> Callable[..., Any]:
    def call(*scalars: Tensor) -> Any:
        result = _Runner(graph, tracer).run(*scalars, *rest, enable_io_processing=False)
        return result[0] if isinstance(result, (tuple, list)) and len(result) == 1 else result

    return call


def _simplified(record: Record) -> Record:
    """Without a mask that is always true, as torch's stands where there is none."""
    mask = record.mask
    if mask is None or not _always_true(mask):
        return record
    return Record(record.score, None, record.captures, record.numbers)


def _always_true(mask: Function) -> bool:
    if isinstance(mask.result, Literal):
        return mask.result.value is True
    if not isinstance(mask.result, Result):
        return False
    op = mask.ops[mask.result.op]
    if op.name in ("aten.new_ones.default", "aten.ones.default", "aten.ones_like.default"):
        return True
    return op.name in ("aten.full.default", "aten.new_full.default") and Literal.of(True) in op.operands


def evaluate(
    expression: Expression, found: GraphOperands, operands: Sequence[Any], symbols: dict[str, Any] | None = None
) -> Any:
    """The value of a number's expression, for these operands: a 0-d f64 tensor where one of its parts is such (see `items`),
    else a number, maybe symbolic."""
    values: dict[str, Any] = {variable: operands[place] for variable, place in found.operands.items()}
    values |= {variable: operands[place].shape[dim] for variable, (place, dim) in found.sizes.items()}
    values |= {variable: operands[place] for variable, (place, _) in found.items.items()} | (symbols or {})
    values |= found.constants
    return eval(source(expression), {"fromhex": float.fromhex}, values)


def operands_of(found: GraphOperands, operands: Sequence[Any]) -> Operands:
    """The record's tensors and numbers among a call's operands."""
    record = found.record
    tensors = tuple(operands[place] for place in found.captures)
    numbers = tuple(evaluate(expression, found, operands) for expression in found.expressions)
    kinds = [float if type_.kind == "float" else int for type_ in record.numbers]
    plain = tuple(kind(n) if isinstance(n, (int, float)) else n for kind, n in zip(kinds, numbers, strict=True))
    return Operands(record, tensors, plain)


__all__ = [
    "GraphOperands",
    "Operands",
    "capture_functions",
    "capture_graphs",
    "evaluate",
    "hint",
    "operands_of",
    "plain_torch",
]
