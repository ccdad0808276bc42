"""Calls of NumPy that meet a traced value: ufuncs by their loops' dtypes, other functions by one handler each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.capture.locations import refuse
from attnc.capture.numbers import NumberProxy, concrete
from attnc.capture.numpy_dtypes import BOOL, FLOAT64, is_float, is_half
from attnc.capture.numpy_ufuncs import BUILDERS, broadcast, weak, whole
from attnc.capture.numpy_values import TracedArray
from attnc.errors import InPlaceModError, RandomModError, UnsupportedModError, UnsupportedOpError

if TYPE_CHECKING:
    from attnc.capture.numpy_trace import NumpyTracer

_LIST = "docs/numpy.md lists what a mod may use; compute anything else before the call and capture the array"


def call_ufunc(t: NumpyTracer, ufunc: np.ufunc, method: str, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A ufunc on operands of which one is traced, or a captured number."""
    name = f"np.{ufunc.__name__}"
    if kwargs.get("out") is not None:
        raise refuse(InPlaceModError, f"a mod calls {name} with out=", "use the value that it returns")
    if method == "reduce":
        return _reduce(t, ufunc, inputs, kwargs)
    if method != "__call__":
        raise refuse(UnsupportedOpError, f"a mod calls {name}.{method}", _LIST)
    if kwargs.get("where", True) is not True:
        raise refuse(UnsupportedOpError, f"a mod calls {name} with where=", "np.where(condition, a, b) around the call")
    values = []
    for value in inputs:
        lifted = t.lift(value)
        if lifted is None:
            if ufunc in (np.equal, np.not_equal) and (value is None or isinstance(value, str)):
                return ufunc is np.not_equal
            raise refuse(UnsupportedModError, f"a mod computes with {type(value).__name__} in {name}", "use numbers and arrays")
        values.append(lifted)
    signature = _signature(ufunc, kwargs)
    if not signature and all(not isinstance(v, TracedArray) or v.number is not None for v in values):
        return t.fold(ufunc, ufunc.__name__, values)
    builder = BUILDERS.get(ufunc)
    if builder is None:
        raise refuse(UnsupportedOpError, f"a mod calls {name}", _LIST)
    return builder(t, values, _loop(ufunc, values, signature))


def _signature(ufunc: np.ufunc, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What of a call's keywords chooses the loop."""
    if kwargs.get("signature") is not None:
        return {"signature": kwargs["signature"]}
    if kwargs.get("dtype") is not None:
        return {"signature": (None,) * ufunc.nin + (np.dtype(kwargs["dtype"]),) * ufunc.nout}
    return {}


def weak_type(value: Any) -> Any:
    """What decides the promotion of an operand: its dtype, or of a Python number its type."""
    if isinstance(value, TracedArray):
        return value.dtype
    if type(value) is bool:
        return BOOL
    return type(value._value) if type(value) is NumberProxy else type(value)


def _loop(ufunc: np.ufunc, values: Sequence[Any], signature: dict[str, Any]) -> tuple[np.dtype, ...]:
    operands = (*map(weak_type, values), *[None] * ufunc.nout)
    return ufunc.resolve_dtypes(operands, **signature)


def common_dtype(values: Sequence[Any]) -> np.dtype:
    """NumPy's common dtype of traced values and (weak) Python numbers."""
    examples = {bool: np.bool_(False), int: 0, float: 0.0}
    kinds = [examples.get(kind, kind) for kind in map(weak_type, values)]
    return np.result_type(*kinds)


# -- other functions ------------------------------------------------------------------------------------------------------

Handler = Callable[..., Any]
HANDLERS: dict[Any, Handler] = {}


def handles(*functions: Any) -> Callable[[Handler], Handler]:
    """Registers the handler of functions of NumPy; it takes the tracer, then their arguments."""

    def register(handler: Handler) -> Handler:
        for function in functions:
            HANDLERS[function] = handler
        return handler

    return register


def call_function(t: NumpyTracer, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A function of NumPy other than a ufunc, one of whose operands is traced."""
    handler = HANDLERS.get(function)
    name = getattr(function, "__name__", str(function))
    module = getattr(function, "__module__", "numpy") or "numpy"
    if handler is None:
        if module.startswith("numpy.random"):
            raise refuse(RandomModError, f"a mod calls {module}.{name}")
        raise refuse(UnsupportedOpError, f"a mod calls {module.replace('numpy', 'np', 1)}.{name}", _LIST)
    if kwargs.get("out") is not None:
        raise refuse(InPlaceModError, f"a mod calls np.{name} with out=", "use the value that it returns")
    kwargs = {key: value for key, value in kwargs.items() if not (key == "out" or value is np._NoValue)}
    try:
        return handler(t, *args, **kwargs)
    except TypeError as error:
        if "unexpected keyword argument" in str(error) or "positional argument" in str(error):
            raise refuse(UnsupportedOpError, f"a mod calls np.{name} with arguments that are not served: {error}") from error
        raise


def operand(t: NumpyTracer, value: Any) -> Any:
    """An operand of a function: traced, or a Python number."""
    lifted = t.lift(value)
    if lifted is None:
        raise TypeError(f"a mod computes with {type(value).__name__}, which is no number and no array")
    return lifted


def array_of(t: NumpyTracer, items: Sequence[Any], dtype: np.dtype | None = None) -> Any:
    """`np.array([…])` of values some of which may be traced."""
    from attnc.capture.numpy_rows import stack

    if not holds_traced(items):
        return t.constant(np.asarray(_concrete_list(items), dtype))
    return stack(t, [array_of(t, item) if isinstance(item, (list, tuple)) else item for item in items], dtype=dtype)


def holds_traced(value: Any) -> bool:
    """Whether a value is traced, or a list that holds such."""
    if isinstance(value, (list, tuple)):
        return any(map(holds_traced, value))
    return isinstance(value, TracedArray)


def _concrete_list(value: Any) -> Any:
    return [_concrete_list(item) for item in value] if isinstance(value, (list, tuple)) else concrete(value)


@handles(np.where)
def where(t: NumpyTracer, condition: Any, *branches: Any) -> TracedArray:
    """`np.where(condition, a, b)`."""
    if len(branches) != 2:
        raise refuse(UnsupportedOpError, "a mod calls np.where with a condition alone", "np.where(condition, a, b)")
    a, b = (operand(t, branch) for branch in branches)
    dtype = common_dtype([a, b])
    test = t.cast(t.array(condition), BOOL)
    other = whole(t, b, dtype) if not isinstance(b, TracedArray) else b
    one = whole(t, a, dtype)
    other = t.cast(other, dtype)
    shape = broadcast(t, [test, one, other])
    return t.emit("aten.where.self", (test, one, other), dtype, shape)


@handles(np.select)
def select(t: NumpyTracer, conditions: Sequence[Any], choices: Sequence[Any], default: Any = 0) -> Any:
    """`np.select`: the first choice whose condition holds."""
    result = default
    for condition, choice in reversed(list(zip(conditions, choices, strict=True))):
        result = where(t, condition, choice, result)
    return result


@handles(np.clip)
def clip(t: NumpyTracer, x: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None) -> Any:
    """`np.clip`: minimum(maximum(x, low), high)."""
    low, high = (a_min if min is None else min), (a_max if max is None else max)
    x = t.array(x)
    bounds = [None if bound is None else operand(t, bound) for bound in (low, high)]
    dtype = common_dtype([x, *(bound for bound in bounds if bound is not None)])
    x = t.cast(x, dtype)
    if any(isinstance(bound, TracedArray) for bound in bounds) or is_half(dtype):
        for name, bound in zip(("maximum", "minimum"), bounds, strict=True):
            if bound is not None:
                x = t.emit(f"aten.{name}.default", (x, whole(t, bound, dtype)), dtype, broadcast(t, [x, bound]))
        return x
    limits = [None if bound is None else weak(t, bound, dtype) for bound in bounds]
    return t.emit("aten.clamp.default", (x, *limits), dtype, broadcast(t, [x]))


@handles(np.round, np.around)
def round_(t: NumpyTracer, x: Any, decimals: Any = 0) -> Any:
    """`np.round`: half to even."""
    x, decimals = t.array(x), concrete(decimals)
    if not is_float(x.dtype):
        if decimals < 0:
            raise refuse(UnsupportedOpError, "a mod rounds an int to tens", "(x + 5) // 10 * 10")
        return x
    shape = broadcast(t, [x])
    if decimals == 0:
        return t.emit("aten.round.default", (x,), x.dtype, shape)
    # As NumPy does: scaled, rounded, scaled back.
    scale = float(10 ** abs(decimals))
    there, back = (np.multiply, np.true_divide) if decimals > 0 else (np.true_divide, np.multiply)
    return back(np.rint(there(x, scale)), scale)


@handles(np.nan_to_num)
def nan_to_num(t: NumpyTracer, x: Any, copy: Any = True, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> Any:
    """`np.nan_to_num`."""
    x = t.array(x)
    if not is_float(x.dtype):
        return x
    values = [concrete(nan), concrete(posinf), concrete(neginf)]
    return t.emit("aten.nan_to_num.default", (x, *values), x.dtype, broadcast(t, [x]))


@handles(np.sinc)
def sinc(t: NumpyTracer, x: Any) -> Any:
    """`np.sinc`."""
    x = t.array(x)
    dtype = x.dtype if is_float(x.dtype) else FLOAT64
    return t.emit("aten.sinc.default", (t.cast(x, dtype),), dtype, broadcast(t, [x]))


@handles(np.isposinf, np.isneginf)
def _is_infinity(t: NumpyTracer, x: Any) -> Any:
    raise refuse(UnsupportedOpError, "a mod calls np.isposinf or np.isneginf", "x == np.inf, x == -np.inf")


@handles(np.isclose)
def isclose(t: NumpyTracer, a: Any, b: Any, rtol: Any = 1e-5, atol: Any = 1e-8, equal_nan: Any = False) -> Any:
    """`np.isclose`, of finite values and infinities."""
    near = (abs(a - b) <= atol + rtol * abs(b)) & np.isfinite(b) | (a == b)
    return near | (np.isnan(a) & np.isnan(b)) if concrete(equal_nan) else near


@handles(np.zeros_like, np.ones_like, np.full_like, np.empty_like)
def _like(t: NumpyTracer, x: Any, *args: Any, **kwargs: Any) -> Any:
    raise refuse(UnsupportedOpError, "a mod makes an array like a traced one", "a number: NumPy broadcasts it")


@handles(np.copy)
def copy(t: NumpyTracer, x: Any, order: Any = "K", subok: Any = False) -> Any:
    """The value itself: nothing is written in place."""
    return t.array(x)


@handles(np.isscalar)
def isscalar(t: NumpyTracer, x: Any) -> bool:
    """Whether it is one of NumPy's scalars."""
    return not isinstance(x, np.ndarray)


@handles(np.ndim)
def ndim(t: NumpyTracer, x: Any) -> int:
    """The number of dims."""
    return t.array(x).ndim


@handles(np.shape)
def shape_of(t: NumpyTracer, x: Any) -> tuple:
    """The lengths of the dims."""
    return t.array(x).shape


@handles(np.size)
def size_of(t: NumpyTracer, x: Any, axis: Any = None) -> Any:
    """The number of elements."""
    return t.array(x).size if axis is None else t.array(x).shape[concrete(axis)]


_REDUCTIONS = {
    np.add: np.sum,
    np.multiply: np.prod,
    np.maximum: np.max,
    np.minimum: np.min,
    np.logical_and: np.all,
    np.logical_or: np.any,
}


def _reduce(t: NumpyTracer, ufunc: np.ufunc, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    function = _REDUCTIONS.get(ufunc)
    if function is None:
        raise refuse(UnsupportedOpError, f"a mod calls np.{ufunc.__name__}.reduce", _LIST)
    axis = kwargs.get("axis", 0)
    return call_function(t, function, (inputs[0],), {"axis": axis, "keepdims": kwargs.get("keepdims", False)})
