"""The outside world of a mod that is NumPy code: `NumpyEnvironment`.

A captured array is stood in for by a `TracedArray`, a captured NumPy scalar by a number of the call. NumPy itself is stood in
for by a module whose dtypes convert traced values and whose makers of arrays give constants of the trace.
"""

from __future__ import annotations

import builtins
import types
from typing import Any

import numpy as np

from attnc.capture.code import PURE_MODULES
from attnc.capture.locations import refuse
from attnc.capture.numbers import NumberProxy, concrete
from attnc.capture.numpy_dtypes import NAMES
from attnc.capture.numpy_functions import array_of, holds_traced
from attnc.capture.numpy_trace import NumpyTracer
from attnc.capture.numpy_values import TracedArray
from attnc.capture.reads import Node
from attnc.capture.wrapping import ATOMS, CLASSES, KEYS, NOT_OWN, LoggedGlobals, Wrapping
from attnc.errors import RandomModError, UnsupportedTensorError

_FunctionOfArrays = type(np.sum)
_DRAW = "draw them before the call and capture the array"
_NUMBERS = (np.integer, np.floating)


class NumpyEnvironment(Wrapping):
    """The outside world of one trace of NumPy code."""

    atoms = ATOMS
    imports = PURE_MODULES | {"numpy"}
    classes = (*CLASSES, np.ndarray)
    keys = (*KEYS, np.dtype)
    tracer: NumpyTracer

    def own(self, value: Any, kind: type, node: Node) -> Any:
        plan, variable = self.plan, node.variable
        if kind is TracedArray:
            return value
        if isinstance(value, np.ndarray):
            plan.require(f"type({variable}) is {plan.constant(kind)}")
            return self.tracer.saw(value, node)
        if isinstance(value, np.generic):
            dtype = value.dtype
            if (isinstance(value, _NUMBERS) and dtype.name in NAMES) or dtype.name == "bfloat16":
                plan.require(f"type({variable}) is {plan.constant(kind)}")
                return self.tracer.strong(value, node)
            return self._equal(value, node)
        if isinstance(value, np.dtype):
            return self._equal(value, node)
        if isinstance(value, types.ModuleType) and (value.__name__ + ".").startswith("numpy."):
            return NumpyModule(self.tracer, self._same(value, node))
        if isinstance(value, type) and issubclass(value, np.generic):
            return standin_of(self.tracer, self._same(value, node))
        if isinstance(value, (np.ufunc, _FunctionOfArrays)) or _is_of_numpy(value):
            return standin_of(self.tracer, self._same(value, node))
        if _draws(value, kind):
            raise refuse(RandomModError, f"a mod uses {node.name}, which draws random numbers", _DRAW)
        if hasattr(kind, "__array__") or hasattr(kind, "__dlpack__"):
            remedy = "capture numpy.asarray(…) of it"
            if kind.__module__.partition(".")[0] == "torch":
                remedy = "capture tensor.numpy(), or call attnc.flex_attention"
            what = f"{kind.__module__}.{kind.__qualname__}"
            raise refuse(UnsupportedTensorError, f"a mod captures {node.name}, a {what}, not a NumPy array", remedy)
        return NOT_OWN

    def is_array(self, value: Any) -> bool:
        return isinstance(value, TracedArray)

    def is_computed(self, value: Any) -> bool:
        return isinstance(value, TracedArray) and value.array is None

    def _globals_of(self, function: types.FunctionType, node: Node) -> LoggedGlobals:
        """`import numpy` inside a mod, too, gives the module that stands for it."""
        world = super()._globals_of(function, node)

        def import_(name: str, *args: Any) -> Any:
            module = builtins.__import__(name, *args)
            return NumpyModule(self.tracer, module) if module.__name__.partition(".")[0] == "numpy" else module

        dict.__setitem__(world, "__builtins__", {**vars(builtins), "__import__": import_})
        return world


def _draws(value: Any, kind: type) -> bool:
    """Whether `value` draws random numbers, for NumPy or for Python."""
    if isinstance(value, types.ModuleType):
        return value.__name__ in ("random", "secrets")
    return kind.__module__.startswith("numpy.random") or kind.__module__ == "random"


def _is_of_numpy(value: Any) -> bool:
    """Whether `value` is a function of NumPy."""
    if not isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
        return False
    return (getattr(value, "__module__", None) or "").partition(".")[0] == "numpy"


class NumpyModule(types.ModuleType):
    """NumPy, or a module of it, as a mod sees it."""

    def __init__(self, tracer: NumpyTracer, module: types.ModuleType):
        super().__init__(module.__name__)
        object.__getattribute__(self, "__dict__")["_attnc_state"] = tracer, module

    def __getattribute__(self, name: str) -> Any:
        tracer, module = object.__getattribute__(self, "__dict__")["_attnc_state"]
        value = getattr(module, name)
        if isinstance(value, types.ModuleType):
            if value.__name__ == "numpy.random":
                raise refuse(
                    RandomModError, "a mod draws random numbers: np.random", "draw them before the call and capture the array"
                )
            return NumpyModule(tracer, value)
        return standin_of(tracer, value)


def standin_of(tracer: NumpyTracer, value: Any) -> Any:
    """What a mod gets for an object of NumPy's."""
    if isinstance(value, type) and issubclass(value, np.generic):
        return Converter(tracer, value)
    if isinstance(value, np.ufunc):
        return Ufunc(tracer, value)
    if isinstance(value, _FunctionOfArrays) or _is_of_numpy(value):
        return Function(tracer, value)
    return value


class Converter:
    """A scalar type of NumPy: converts traced values when it is called, and is a dtype wherever one is taken."""

    __slots__ = ("_attnc_tracer", "dtype", "type")

    def __init__(self, tracer: NumpyTracer, kind: type):
        self._attnc_tracer = tracer
        self.type = kind
        try:
            self.dtype = np.dtype(kind)
        except TypeError:
            self.dtype = np.dtype(object)

    @property
    def __name__(self) -> str:
        return self.type.__name__

    def __call__(self, value: Any = 0, *args: Any) -> Any:
        if isinstance(value, TracedArray):
            return self._attnc_tracer.cast(value, self.dtype)
        if type(value) is NumberProxy:
            return self._attnc_tracer.fold(self.type, self.type.__name__, [value])
        return self.type(value, *args)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, self.type)

    def __subclasscheck__(self, kind: Any) -> bool:
        return issubclass(kind.type if isinstance(kind, Converter) else kind, self.type)

    def __eq__(self, other: object) -> bool:
        return self.dtype == (other.dtype if isinstance(other, Converter) else other)

    def __hash__(self) -> int:
        return hash(self.type)

    def __repr__(self) -> str:
        return repr(self.type)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.type, name)


class Ufunc:
    """A ufunc of NumPy, which takes lists of traced values, too."""

    __slots__ = ("_attnc_tracer", "ufunc")

    def __init__(self, tracer: NumpyTracer, ufunc: np.ufunc):
        self._attnc_tracer = tracer
        self.ufunc = ufunc

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.ufunc(*map(self._one, args), **{name: _plain(value) for name, value in kwargs.items()})

    def reduce(self, array: Any, *args: Any, **kwargs: Any) -> Any:
        """`ufunc.reduce`."""
        return self.ufunc.reduce(self._one(array), *args, **kwargs)

    def _one(self, value: Any) -> Any:
        return array_of(self._attnc_tracer, value) if isinstance(value, (list, tuple)) and holds_traced(value) else value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ufunc, name)


_MAKERS = frozenset({"array", "asarray", "ascontiguousarray", "asanyarray", "asfortranarray"})


class Function:
    """A function of NumPy. One that makes an array of known data makes a constant of the trace."""

    __slots__ = ("_attnc_tracer", "function")

    def __init__(self, tracer: NumpyTracer, function: Any):
        self._attnc_tracer = tracer
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tracer, function = self._attnc_tracer, self.function
        if any(map(holds_traced, args)) or any(map(holds_traced, kwargs.values())):
            if function.__name__ in _MAKERS:
                return self._array(*args, **kwargs)
            return tracer.function(function, args, kwargs)
        result = function(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})
        return tracer.constant(result) if type(result) is np.ndarray else result

    def _array(self, data: Any, dtype: Any = None, copy: Any = None, **kwargs: Any) -> Any:
        tracer = self._attnc_tracer
        wanted = None if dtype is None else np.dtype(dtype)
        if isinstance(data, (list, tuple)):
            return array_of(tracer, data, wanted)
        return data if wanted is None else tracer.cast(data, wanted)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)


def _plain(value: Any) -> Any:
    """An argument as NumPy itself takes it; a captured number in it becomes a value guard."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value
    if isinstance(value, Converter):
        return value.type
    if isinstance(value, Function):
        return value.function
    if isinstance(value, Ufunc):
        return value.ufunc
    return concrete(value)
