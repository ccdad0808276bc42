"""What a NumPy mod computes with while it is traced: `TracedArray`, in the place of NumPy's scalars and arrays.

Operators and functions of NumPy come here by NumPy's own protocols (`__array_ufunc__`, `__array_function__`) and are written
down by `numpy_functions.py`. Whatever would need the data itself is refused by name.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from attnc.capture.locations import refuse
from attnc.capture.numbers import NumberProxy, concrete
from attnc.capture.numpy_dtypes import shown
from attnc.capture.record import Operand
from attnc.errors import DataDependentModError, InPlaceModError, UnsupportedModError

if TYPE_CHECKING:
    from attnc.capture.numpy_trace import NumpyTracer
    from attnc.capture.recorder import Origin

_TAKES_TORCH = "call attnc.flex_attention, whose mods are torch code"
_USE_WHERE = "np.where(condition, a, b) instead of `if`; & | ~ instead of `and` `or` `not`"
_READS = {
    "__bool__": ("its truth", f"{_USE_WHERE}; (a <= x) & (x < b) instead of a <= x < b; np.minimum instead of min"),
    "__int__": ("int(…)", "x.astype(np.int32) instead of int(x)"),
    "__float__": ("float(…)", "np.float32(x) instead of float(x), np.exp instead of math.exp"),
    "__complex__": ("complex(…)", "use real numbers"),
    "__index__": ("it as a Python index", "index a captured NumPy array: np.asarray(list), made outside of the mod"),
    "__array__": ("its data, by a function that is not NumPy's own", "use NumPy's functions and operators on it"),
    "__array_interface__": ("its data, by a function that is not NumPy's own", "use NumPy's functions and operators on it"),
    "__hash__": ("hash(…)", "index a captured NumPy array instead of a dict"),
    "__contains__": ("`in`", "np.any(row == value) instead of `value in row`"),
    "item": (".item()", "use the value itself"),
    "tolist": (".tolist()", "use the value itself"),
    "tobytes": (".tobytes()", "use the value itself"),
    "nonzero": (".nonzero()", "np.where(condition, a, b) with all three arguments"),
    "data": (".data", "use the value itself"),
    "ctypes": (".ctypes", "use the value itself"),
    "strides": (".strides", "use the value itself"),
    "flags": (".flags", "use the value itself"),
    "base": (".base", "use the value itself"),
    "__dlpack__": ("its memory", "use the value itself"),
    "__reduce_ex__": ("its data", "use the value itself"),
}


def _refused(name: str) -> DataDependentModError:
    what, remedy = _READS[name]
    return refuse(DataDependentModError, f"a mod reads the data of a traced value: {what}", remedy)


class TracedArray(NDArrayOperatorsMixin):
    """A scalar or array whose data is known when the kernel runs, not before.

    It is a number of the call (`number`: a captured NumPy scalar, or what was computed from such ones alone), a captured array
    (`array`), or the result of an operation of the record.
    """

    __slots__ = ("_operand", "_origins", "_shape", "_tracer", "array", "dtype", "number")

    def __init__(
        self,
        tracer: NumpyTracer,
        operand: Operand | None,
        dtype: np.dtype,
        shape: tuple[int, ...] = (),
        origins: tuple[Origin, ...] = (),
        number: NumberProxy | None = None,
        array: np.ndarray | None = None,
    ):
        self._tracer = tracer
        self._operand = operand
        self._shape = shape
        self._origins = origins
        self.dtype = dtype
        self.number = number
        self.array = array

    # -- NumPy's protocols --------------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return self._tracer.ufunc(ufunc, method, inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return self._tracer.function(function, args, kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        raise refuse(UnsupportedModError, f"a NumPy mod calls torch's {name}", f"write it in NumPy, or {_TAKES_TORCH}")

    def __getitem__(self, index: Any) -> Any:
        from attnc.capture.numpy_indexing import getitem

        return getitem(self._tracer, self, index)

    @property
    def __class__(self) -> type:
        # isinstance(value, np.ndarray), isinstance(value, np.floating) answer as for NumPy's own.
        return np.ndarray if self._shape or self.array is not None else self.dtype.type

    # -- what is known without data -----------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self._shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of the dims. Those of a captured array are captured numbers."""
        if self.array is not None:
            return tuple(self._tracer.size(self.array, dim) for dim in range(len(self._shape)))  # type: ignore[misc]
        self._tracer.fix(self)
        return self._shape

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.itemsize

    def __len__(self) -> int:
        if not self._shape:
            raise TypeError("len() of unsized object")
        return int(concrete(self.shape[0]))

    def __iter__(self):
        if not self._shape:
            raise TypeError("iteration over a 0-d array")
        return iter([self[place] for place in range(len(self))])

    def __repr__(self) -> str:
        if self.number is not None:
            return repr(self._value())
        return f"<traced {self.dtype.name}{list(self._shape) if self._shape else ''}>"

    def __format__(self, spec: str) -> str:
        return format(self._value(), spec) if self.number is not None else repr(self)

    # -- numbers ------------------------------------------------------------------------------------------------------

    def _known(self) -> NumberProxy | None:
        """The number, if it is one, or what a captured array without dims holds."""
        if self.number is None and self.array is not None and not self._shape:
            return self._tracer.content(self.array)
        return self.number

    def _value(self) -> Any:
        """The value of a number, which from now on is guarded."""
        known = self._known()
        assert known is not None
        kind = {"b": bool, "i": int, "u": int}.get(self.dtype.kind, float)
        known._plan.guard((f"{kind.__name__}({{}})", known._expression), kind(known._value))
        return known._value

    def __bool__(self) -> bool:
        return bool(self._value()) if self._known() is not None else self._no("__bool__")

    def __int__(self) -> int:
        return int(self._value()) if self._known() is not None else self._no("__int__")

    def __float__(self) -> float:
        return float(self._value()) if self._known() is not None else self._no("__float__")

    def __complex__(self) -> complex:
        return complex(self._value()) if self._known() is not None else self._no("__complex__")

    def __index__(self) -> int:
        return operator.index(self._value()) if self._known() is not None else self._no("__index__")

    def __hash__(self) -> int:
        return hash(self._value()) if self._known() is not None else self._no("__hash__")

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(self._value(), dtype=dtype) if self._known() is not None else self._no("__array__")

    def __contains__(self, value: Any) -> bool:
        return self._no("__contains__")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._no("__reduce_ex__")

    def item(self, *args: Any) -> Any:
        """The number as Python's own."""
        return self._value().item() if self._known() is not None else self._no("item")

    @staticmethod
    def _no(name: str) -> Any:
        raise _refused(name)

    def __round__(self, digits: int | None = None) -> Any:
        if digits is None:
            return round(self._value()) if self._known() is not None else self._no("__int__")
        return self._tracer.function(np.round, (self, digits), {})

    # -- writing ------------------------------------------------------------------------------------------------------

    def __setitem__(self, index: Any, value: Any) -> None:
        raise refuse(InPlaceModError, "a mod writes into an array", "compute the new value with np.where or np.stack")

    def _in_place(self, other: Any, function: Any) -> Any:
        if self.array is not None or self._shape:
            what = "a captured array" if self.array is not None else "an array"
            raise refuse(InPlaceModError, f"a mod writes to {what} in place", "x = x + y instead of x += y")
        return function(self, other)  # scalars do not change: the name is bound anew

    # -- methods ------------------------------------------------------------------------------------------------------

    def astype(self, dtype: Any, order: str = "K", casting: str = "unsafe", subok: bool = True, copy: bool = True) -> Any:
        """The value converted to `dtype`."""
        return self._tracer.cast(self, np.dtype(getattr(dtype, "dtype", dtype)))

    @property
    def T(self) -> Any:
        """The dims in reverse order."""
        return self._tracer.function(np.transpose, (self,), {})

    @property
    def real(self) -> Any:
        """The value itself."""
        return self

    def conjugate(self) -> Any:
        """The value itself."""
        return self

    conj = conjugate

    def __getattr__(self, name: str) -> Any:
        if name in _READS or name == "__array_struct__":
            if self._known() is not None and name.startswith("__"):
                raise AttributeError(name)
            raise _refused("__array_interface__" if name == "__array_struct__" else name)
        method = METHODS.get(name)
        if method is not None:
            return lambda *args, **kwargs: self._tracer.function(method, (self, *args), kwargs)
        if not name.startswith("__") and hasattr(np.ndarray, name):
            raise refuse(UnsupportedModError, f"a mod uses .{name} of an array", "docs/numpy.md lists what a mod may use")
        raise AttributeError(f"a traced {shown(self.dtype)} has no attribute {name!r}")


METHODS: dict[str, Any] = {
    name: getattr(np, name)
    for name in ("sum", "prod", "mean", "var", "std", "any", "all", "max", "min", "argmax", "argmin", "clip", "round", "dot")
    + ("take", "transpose", "reshape", "ravel", "squeeze", "copy", "swapaxes")
} | {"flatten": np.ravel}
"""Methods that are functions of NumPy, too."""


def _install() -> None:
    for name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "xor", "or"):
        function = getattr(operator, f"{name}_" if name in ("and", "or") else name)

        def in_place(self: TracedArray, other: Any, function: Any = function) -> Any:
            return self._in_place(other, function)

        setattr(TracedArray, f"__i{name}__", in_place)


_install()
