"""Tracing a mod that is NumPy code: run it once on `TracedArray`s and write down what is done to them, as ATen operations.

The record is the one that torch code of the same meaning gives, so both front ends share compiled kernels. NumPy decides every
dtype (`ufunc.resolve_dtypes`, `numpy.result_type`); where torch's promotion would differ, operands are converted first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from attnc.capture import numpy_functions, numpy_rows
from attnc.capture.locations import no_callable, refuse
from attnc.capture.numbers import NumberProxy, constant
from attnc.capture.numpy_arrays import ArrayCheck, element_strides
from attnc.capture.numpy_dtypes import (
    BOOL,
    INT32,
    check_array,
    literal_of,
    name_of,
    shown,
)
from attnc.capture.numpy_values import TracedArray
from attnc.capture.reads import Node, stride_pattern
from attnc.capture.record import (
    MASK_ARGUMENTS,
    NONE,
    SCORE_ARGUMENTS,
    Argument,
    Captured,
    CaptureType,
    ListOf,
    Literal,
    Operand,
    TensorType,
)
from attnc.capture.recorder import Origin, Recorder, Trace, Traced, with_places
from attnc.errors import ModSignatureError, UnsupportedModError

LARGEST_ROW = 1 << 20
"""Rows longer than this are whole captured arrays rather than gathered rows."""
LARGEST_CONSTANT = 64
"""Elements of an array that is made in a mod, element by element."""
HANDLERS = (numpy_functions, numpy_rows)
"""The modules whose import registers what becomes of NumPy's functions."""


class _Capture:
    __slots__ = ("exact_strides", "node", "pattern", "tensor")

    def __init__(self, array: np.ndarray, node: Node | None):
        self.tensor = array
        self.node = node
        self.exact_strides = False
        self.pattern = stride_pattern(array.shape, element_strides(array))


class NumpyTracer(Recorder):
    """One trace of up to two mods of NumPy code."""

    def __init__(self) -> None:
        super().__init__()
        self.plan.front = self
        self._keep: list[np.ndarray] = []  # ids stay unique while their arrays live
        self._standins: dict[int, TracedArray] = {}
        self._captured: dict[int, int] = {}
        self._sizes: dict[tuple[int, int], NumberProxy] = {}
        self._scalars: dict[tuple, TracedArray] = {}  # captured NumPy scalars, and numbers computed from such

    def dtype_of(self, tensor: np.ndarray) -> str:
        return tensor.dtype.name

    def check_of(self, capture: _Capture, type_: CaptureType) -> ArrayCheck:
        return ArrayCheck(capture.tensor, type_.strides, type_.type.shape)

    def kind_of(self, value: Any) -> str:
        return "int" if isinstance(value, (int, np.integer)) else "float"

    # -- what values mean ---------------------------------------------------------------------------------------------

    def saw(self, array: np.ndarray, node: Node) -> TracedArray:
        """What stands for an array that the mod can reach by the read `node`."""
        self._nodes.setdefault(id(array), []).append(node)
        return self._standin(array)

    def _standin(self, array: np.ndarray) -> TracedArray:
        standin = self._standins.get(id(array))
        if standin is None:
            self._keep.append(array)
            standin = TracedArray(self, None, array.dtype, array.shape, (None,) * array.ndim, array=array)
            self._standins[id(array)] = standin
        return standin

    def content(self, array: np.ndarray) -> NumberProxy | None:
        """What a captured array without dims holds, as a number that Python reads."""
        nodes = self._nodes.get(id(array))
        if not nodes:
            return None
        value: Any = array[()]
        return NumberProxy(self.plan, ("{}[()]", ("read", nodes[0])), value)

    def field(self, array: np.ndarray, name: str) -> TracedArray:
        """A field of a captured structured array."""
        nodes = self._nodes.get(id(array))
        part = array[name]
        if not nodes:
            return self._standin(part)
        node = self.plan.read(f"{nodes[0].variable}[{name!r}]", f"{nodes[0].name}[{name!r}]")
        self.plan.require(f"type({node.variable}) is {self.plan.constant(type(part))}")
        return self.saw(part, node)

    def name_of(self, array: np.ndarray) -> str:
        """What the user's code calls a captured array."""
        nodes = self._nodes.get(id(array))
        return f"captured array '{nodes[0].name}'" if nodes else "an array"

    def operand(self, value: TracedArray) -> Operand:
        """`value` in the record; an array that is not known is captured."""
        if value._operand is None:
            if value.array is not None:
                value._operand = self._capture(value, value.array)
            else:
                assert value.number is not None
                return self._scalar_of(value.number, value.dtype)
        return value._operand

    def _capture(self, value: TracedArray, array: np.ndarray) -> Operand:
        check_array(array)
        nodes = self._nodes.get(id(array), [])
        if not nodes:
            self.plan.give_up("a captured array that is reached by no read that can be repeated")
        index = self._captured.setdefault(id(array), len(self.captures))
        if index == len(self.captures):
            self.captures.append(_Capture(array, nodes[0] if nodes else None))
        value._origins = tuple((index, dim) for dim in range(array.ndim))
        return Captured(index)

    def size(self, array: np.ndarray, dim: int) -> NumberProxy:
        """The length of a captured array's dim, as a number that Python read."""
        key = id(array), dim
        if key not in self._sizes:
            nodes = self._nodes.get(id(array))
            if not nodes:
                return array.shape[dim]  # type: ignore[return-value]
            node = self.plan.read(f"{nodes[0].variable}.shape[{dim}]", f"{nodes[0].name}.shape[{dim}]")
            self._sizes[key] = NumberProxy(self.plan, ("read", node), array.shape[dim])
        return self._sizes[key]

    def fix(self, value: TracedArray, dims: Sequence[int] | None = None) -> None:
        """The lengths of `value` (of `dims`) are compiled in."""
        if not value._shape:
            return
        self.operand(value)
        if dims is None and np.prod(value._shape, dtype=float) > LARGEST_ROW:
            raise refuse(
                UnsupportedModError,
                f"a mod works on a whole captured array of {np.prod(value._shape)} elements",
                "index the captured array first, or compute the whole array outside of the mod and capture that",
            )
        origins = value._origins if dims is None else [value._origins[dim] for dim in dims]
        self._fixed.update(origin for origin in origins if origin is not None)

    def lift(self, value: Any) -> TracedArray | NumberProxy | int | float | bool | None:
        """A value that a mod computes with: traced, or a (weak) Python number. None where it is neither."""
        kind = type(value)
        if kind is TracedArray or kind is NumberProxy or kind in (int, float, bool):
            return value
        if isinstance(value, np.generic):
            return self.constant(value)
        if isinstance(value, np.ndarray):
            if id(value) in self._nodes or value.size > LARGEST_CONSTANT:
                return self._standin(value)
            return self.constant(value)
        if isinstance(value, (list, tuple)):
            return numpy_functions.array_of(self, value)
        return None

    def array(self, value: Any) -> TracedArray:
        """A value as a traced one; Python numbers have NumPy's default dtypes."""
        lifted = self.lift(value)
        if isinstance(lifted, TracedArray):
            return lifted
        if lifted is None:
            raise TypeError(f"a mod computes with {type(value).__name__}, which is no number and no array")
        number = lifted._value if type(lifted) is NumberProxy else lifted
        return self.scalar(lifted, np.result_type(type(number)))

    # -- numbers ------------------------------------------------------------------------------------------------------

    def strong(self, value: np.generic, node: Node) -> TracedArray:
        """A captured NumPy scalar, read by `node`."""
        return TracedArray(self, None, value.dtype, number=NumberProxy(self.plan, ("read", node), value))  # type: ignore

    def fold(self, function: Callable, name: str, operands: Sequence[Any]) -> Any:
        """A function of numbers alone, computed anew at every call."""
        texts, expressions, values = [], [], []
        for operand in operands:
            number: Any = operand.number if type(operand) is TracedArray else operand
            if type(number) is NumberProxy:
                texts.append("{}")
                expressions.append(number._expression)
                values.append(number._value)
            elif type(number) in (int, float):
                texts.append("{}")
                expressions.append(constant(number))
                values.append(number)
            else:
                texts.append(self.plan.named(repr(number), number))
                values.append(number)
        with np.errstate(all="ignore"):
            result = function(*values)
        if not expressions or all(expression[0] == "const" for expression in expressions):
            return result
        template = f"{self.plan.named(f'np_{name}', function)}({', '.join(texts)})"
        if isinstance(result, tuple):
            return tuple(self._folded(f"{template}[{i}]", expressions, part) for i, part in enumerate(result))
        return self._folded(template, expressions, result)

    def _folded(self, template: str, expressions: list, value: Any) -> TracedArray:
        proxy = NumberProxy(self.plan, (template, *expressions), value)
        return TracedArray(self, None, value.dtype, number=proxy)

    def scalar(self, number: Any, dtype: np.dtype) -> TracedArray:
        """A Python number, or a captured one, as a value of `dtype`."""
        operand = self.number(number) if type(number) is NumberProxy else Literal.of(number)
        return self.emit("aten.scalar_tensor.default", (operand, literal_of(dtype), NONE, NONE, NONE), dtype)

    def _scalar_of(self, number: NumberProxy, dtype: np.dtype) -> Operand:
        if dtype == BOOL:
            number = NumberProxy(self.plan, ("int({})", number._expression), int(number._value))
        key = number._expression, dtype.name
        if key not in self._scalars:
            self._scalars[key] = self.scalar(number, dtype)
        return self.operand(self._scalars[key])

    def constant(self, value: Any) -> TracedArray:
        """A NumPy scalar, or an array of known data, as an operation without operands."""
        array = np.asarray(value)
        name_of(array.dtype)
        elements = _elements(array)
        if len(elements) > LARGEST_CONSTANT:
            return self._regular(array, elements)
        return self._emit("attnc.literal", (ListOf(tuple(map(Literal.of, elements))),), array.dtype, array.shape)

    def _regular(self, array: np.ndarray, elements: list) -> TracedArray:
        """A larger array of one value, or of ints at equal distances."""
        first, step = elements[0], elements[1] - elements[0]
        if not (array != array.flat[0]).any():
            operands = [list(array.shape), first, array.dtype, None, None, None]
            return self.emit("aten.full.default", operands, array.dtype, array.shape)
        if array.ndim == 1 and array.dtype.kind in "iu" and elements == list(range(first, elements[-1] + step, step or 1)):
            operands = [first, elements[-1] + step, step, array.dtype, None, None, None]
            return self.emit("aten.arange.start_step", operands, array.dtype, array.shape)
        raise refuse(
            UnsupportedModError,
            f"a mod makes a constant array of {array.size} elements",
            "make it once, outside of the mod, and capture it",
        )

    # -- writing down -------------------------------------------------------------------------------------------------

    def emit(self, name: str, operands: Sequence[Any], dtype: np.dtype, shape: tuple[int, ...] = ()) -> TracedArray:
        """Writes down one operation, of traced values, literals and Python numbers, and returns its value."""
        return self._emit(name, [self._operand_of(operand) for operand in operands], dtype, shape)

    def view(self, name: str, operands: Sequence[Any], dtype: np.dtype, shape: tuple[int, ...], origins: tuple) -> TracedArray:
        """The same for an operation that only chooses elements: where each dim comes from is kept."""
        return self._emit(name, [self._operand_of(operand) for operand in operands], dtype, shape, origins)

    def _emit(
        self,
        name: str,
        operands: Sequence[Operand],
        dtype: np.dtype,
        shape: tuple[int, ...],
        origins: tuple[Origin, ...] | None = None,
    ) -> TracedArray:
        origins = (None,) * len(shape) if origins is None else origins
        return TracedArray(self, self.note(name, operands, name_of(dtype), shape, origins), dtype, shape, origins)

    def _operand_of(self, value: Any) -> Operand:
        if isinstance(value, TracedArray):
            return self.operand(value)
        if type(value) is NumberProxy:
            return self.number(value)
        if isinstance(value, (list, tuple)):
            return ListOf(tuple(map(self._operand_of, value)))
        if value is None or isinstance(value, (bool, int, float, str)):
            return Literal.of(value)
        if isinstance(value, np.dtype):
            return literal_of(value)
        return value

    def cast(self, value: TracedArray, dtype: np.dtype) -> TracedArray:
        """`value` converted to `dtype`."""
        if value.dtype == dtype:
            return value
        if value.number is not None:
            return self.fold(dtype.type, dtype.type.__name__, [value])
        self.fix(value)
        name_of(value.dtype)
        return self.emit("aten.to.dtype", (value, literal_of(dtype), False, False, None), dtype, value._shape)

    # -- NumPy's calls ------------------------------------------------------------------------------------------------

    def ufunc(self, ufunc: np.ufunc, method: str, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A call of a ufunc that meets a traced value or a captured number."""
        return numpy_functions.call_ufunc(self, ufunc, method, inputs, kwargs)

    def function(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A call of another function of NumPy."""
        return numpy_functions.call_function(self, function, args, kwargs)

    # -- running ------------------------------------------------------------------------------------------------------

    def run(self, mod: Callable[..., Any], names: tuple[str, ...], score_dtype: np.dtype) -> Traced:
        """Traces one mod, whose arguments are `names`."""
        self._steps = []
        self._scalars.clear()
        dtypes = [score_dtype if name == "score" else INT32 for name in names]
        arguments = [TracedArray(self, Argument(index), dtype) for index, dtype in enumerate(dtypes)]
        operand = self._result(mod(*arguments), score_dtype if names is SCORE_ARGUMENTS else BOOL)
        return Traced(tuple(TensorType(dtype.name) for dtype in dtypes), self._steps, operand)

    def _result(self, result: Any, dtype: np.dtype) -> Operand:
        what = "mask_mod" if dtype == BOOL else "score_mod"
        lifted = None if isinstance(result, (list, tuple)) else self.lift(result)
        if lifted is None:
            raise ModSignatureError(f"{what} returned {type(result).__name__}, not a number")
        if not isinstance(lifted, TracedArray):
            if dtype == BOOL and type(lifted) is not bool:
                raise ModSignatureError("mask_mod returned a number, not a bool", remedy="compare: return x != 0")
            known = type(lifted) is not NumberProxy
            lifted = self.constant(np.asarray(lifted, dtype)) if known else self.scalar(lifted, dtype)
        if lifted._shape:
            raise ModSignatureError(f"{what} returned an array of shape {list(lifted._shape)}, not a scalar")
        if dtype == BOOL and lifted.dtype != BOOL:
            raise ModSignatureError(f"mask_mod returned {shown(lifted.dtype)}, not bool", remedy="compare: return x != 0")
        return self.operand(self.cast(lifted, dtype))

    def close(self) -> None:
        """Lets go of the arrays: the trace's own cycles would keep them until the collector comes round."""
        for table in (self.captures, self._standins, self._keep, self._nodes, self._scalars):
            table.clear()
        self.plan.front = None


def _elements(array: np.ndarray) -> list:
    """The elements of an array as Python's own numbers."""
    if array.dtype.name == "bfloat16":
        array = array.astype(np.float32)
    return array.ravel().tolist()


def trace(score_mod: object, mask_mod: object, score_dtype: np.dtype) -> Trace:
    """Traces both mods (either may be None)."""
    from attnc.capture.numpy_environment import NumpyEnvironment

    with ExitStack() as stack:
        tracer = NumpyTracer()
        environment = NumpyEnvironment(tracer)
        stack.callback(tracer.close)
        stack.callback(environment.close)
        traced = []
        for name, mod, names in (("score_mod", score_mod, SCORE_ARGUMENTS), ("mask_mod", mask_mod, MASK_ARGUMENTS)):
            if not callable(mod) and mod is not None:
                raise no_callable(name, mod)
            rebuilt = environment.wrap(mod, tracer.plan.read(name, name))
            run = functools.partial(tracer.run, score_dtype=score_dtype)
            traced.append(None if mod is None else with_places(run, mod, rebuilt, names))
        environment.finish()
        return tracer.finish(*traced)
