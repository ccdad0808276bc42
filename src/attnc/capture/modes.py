"""The two torch modes under which a mod is traced.

`FunctionMode` sees the user's own calls of torch: it turns indexing into `aten.index`, `select` and `slice`, puts stand-ins
for captured tensors and symbolic scalars for captured numbers, answers questions about shapes, and refuses by name whatever
reads data. `DispatchMode` sees the ATen calls that torch makes of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from attnc.capture import indexing
from attnc.capture.constants import constant_tensor
from attnc.capture.dispatch import dispatch
from attnc.capture.locations import refuse
from attnc.capture.numbers import NumberProxy, concrete
from attnc.capture.symbolic import symbolic
from attnc.errors import DataDependentModError, InPlaceModError, UnsupportedModError

if TYPE_CHECKING:
    from attnc.capture.trace import Tracer


class DispatchMode(TorchDispatchMode):
    """Brings each ATen call to the tracer."""

    def __init__(self, tracer: Tracer):
        super().__init__()
        self._tracer = tracer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # an ordinary mode's subclassing imports torch._dynamo, 2 s

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():
            return dispatch(self._tracer, func, args, kwargs or {})


_NO_NUMPY = "use torch operations instead of numpy ones; capture torch.from_numpy(array) instead of a NumPy array"
# Reads of data, by method name, with what to write instead.
_READS = {
    "item": "use the tensor itself, or tensor[index] to read an element",
    "tolist": "use the tensor itself, or tensor[index] to read an element",
    "numpy": "use torch operations on the tensor itself",
    "__array__": _NO_NUMPY,
    "__array_wrap__": _NO_NUMPY,
    "__dlpack__": "use torch operations on the tensor itself",
    "data_ptr": "use the tensor itself",
    "storage": "use the tensor itself",
    "untyped_storage": "use the tensor itself",
    "_typed_storage": "use the tensor itself",
    "__bool__": "torch.where(condition, a, b) instead of `if`; & | ~ instead of `and` `or` `not`; (a <= x) & (x < b) instead "
    "of a <= x < b; x.clamp(min=0) instead of max(x, 0)",
    "__float__": "use the tensor itself instead of float(tensor), torch.exp instead of math.exp",
    "__int__": "use tensor.to(torch.int32) instead of int(tensor)",
    "__complex__": "use the tensor itself",
    "__index__": "index a captured tensor, tensor[index], instead of a Python list",
    "__reduce_ex__": "use the tensor itself",
    "__deepcopy__": "use the tensor itself",
    "__contains__": "(row == value).any() instead of `value in row`",
    "is_nonzero": "torch.where(condition, a, b) instead of `if`",
    "equal": "(a == b).all() instead of torch.equal(a, b)",
    "allclose": "torch.isclose(a, b).all() instead of torch.allclose(a, b)",
    "nonzero": "torch.where(condition, a, b) with all three arguments",
    "masked_select": "torch.where(condition, a, b)",
}
_GETTERS = frozenset({"T", "mT", "H", "mH", "real"})
_FIXED_ANSWERS = frozenset(
    {"dtype", "device", "layout", "is_cpu", "is_cuda", "is_meta", "is_mps", "is_xpu", "is_sparse", "is_sparse_csr"}
    | {"is_quantized", "is_nested", "is_mkldnn", "itemsize", "names"}
)
_FIXED_METHODS = frozenset(
    {"dim", "ndimension", "is_floating_point", "is_complex", "is_signed", "element_size", "get_device", "is_tensor"}
    | {"can_cast", "promote_types", "result_type", "is_storage", "is_inference", "is_conj", "is_neg"}
)


class FunctionMode(TorchFunctionMode):
    """Sees each call of torch that the mod itself makes."""

    def __init__(self, tracer: Tracer):
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func, types, args=(), kwargs=None):
        tracer = self._tracer
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return _attribute(tracer, func, args)
        if name == "__getitem__":
            return indexing.getitem(tracer, args[0], args[1])
        if name in _ANSWERS and args and isinstance(args[0], torch.Tensor):
            return _ANSWERS[name](tracer, *args, **kwargs)
        if name in _READS:
            raise refuse(DataDependentModError, f"a mod reads a tensor's data: {_call(name)}", _READS[name])
        if name in ("__setitem__", "__set__", "__delete__"):
            raise refuse(InPlaceModError, "a mod writes into a tensor", "compute the new value with torch.where or torch.stack")
        if name in ("tensor", "as_tensor", "asarray") and args and not isinstance(args[0], torch.Tensor):
            return constant_tensor(tracer, func, args, kwargs)
        if name == "tensor":
            func = torch.as_tensor
        if name in ("__repr__", "__format__") and isinstance(args[0], torch.Tensor):
            standin = tracer.value(args[0]).standin
            return f"<traced {standin.dtype} {list(standin.shape)}>"
        if name in _FIXED_METHODS:
            return func(*_plain(tracer, args), **kwargs)
        return func(*_plain(tracer, args), **{key: _one(tracer, value) for key, value in kwargs.items()})


def _call(name: str) -> str:
    shown = {
        "__bool__": "bool(tensor)",
        "__float__": "float(tensor)",
        "__int__": "int(tensor)",
        "__complex__": "complex(tensor)",
    }
    shown |= {"__index__": "a tensor as a Python index", "__contains__": "`in`"}
    return shown.get(name, name if name.startswith("__") else f".{name}()")


def _plain(tracer: Tracer, values) -> list[Any]:
    return [_one(tracer, value) for value in values]


def _one(tracer: Tracer, value: Any) -> Any:
    """Stand-ins for captured tensors, symbolic scalars for captured numbers, also inside lists."""
    kind = type(value)
    if kind is NumberProxy:
        return symbolic(tracer, value)
    if kind in (int, float, bool, torch.dtype, str, type(None)):
        return value
    if isinstance(value, torch.Tensor):
        return tracer.value(value).standin
    if kind in (tuple, list):
        return kind(_plain(tracer, value))
    if kind is Sizes:
        return [concrete(size) for size in value]
    return value


class Sizes(tuple):
    """A captured tensor's shape, whose entries are captured numbers: to Python a tuple, to torch a list of plain ints."""

    __slots__ = ()

    def numel(self):
        """The number of elements."""
        return math.prod(self)


def _shape(tracer: Tracer, tensor: torch.Tensor) -> tuple:
    value = tracer.value(tensor)
    sizes = value.standin.shape
    capture = tracer.capture_of(tensor)
    if capture is None or capture.node is None:
        tracer.fix(value)
        return sizes
    return Sizes(tracer.size(capture, dim) for dim in range(len(sizes)))


def _size(tracer: Tracer, tensor: torch.Tensor, dim: int | None = None):
    sizes = _shape(tracer, tensor)
    return sizes if dim is None else sizes[concrete(dim)]


def _stride(tracer: Tracer, tensor: torch.Tensor, dim: int | None = None):
    capture = tracer.capture_of(tensor)
    if capture is None:
        raise refuse(UnsupportedModError, "a mod reads the strides of a tensor that it computed", "use its shape")
    capture.exact_strides = True
    tracer.fix(tracer.value(tensor))
    strides = capture.tensor.stride()
    return strides if dim is None else strides[concrete(dim)]


def _is_contiguous(tracer: Tracer, tensor: torch.Tensor, **_) -> bool:
    capture = tracer.capture_of(tensor)
    if capture is None:
        return True
    capture.exact_strides = True
    tracer.fix(tracer.value(tensor))
    with torch._C.DisableTorchFunction():
        return capture.tensor.is_contiguous()


def _numel(tracer: Tracer, tensor: torch.Tensor):
    return math.prod(_shape(tracer, tensor))


_ANSWERS = {
    "size": _size,
    "stride": _stride,
    "is_contiguous": _is_contiguous,
    "numel": _numel,
    "nelement": _numel,
    "__len__": lambda tracer, tensor: concrete(_length(tracer, tensor)),
}


def _length(tracer: Tracer, tensor: torch.Tensor):
    sizes = _shape(tracer, tensor)
    if not sizes:
        raise TypeError("len() of a 0-d tensor")
    return sizes[0]


def _attribute(tracer: Tracer, func, args) -> Any:
    """`tensor.name`."""
    name = getattr(getattr(func, "__self__", None), "__name__", "")
    tensor = args[0]
    if name == "shape":
        return _shape(tracer, tensor)
    if name == "ndim":
        return tracer.value(tensor).standin.dim()
    if name in ("data", "detach"):
        return tracer.value(tensor).standin
    if name == "requires_grad":
        tracer.plan.give_up("a mod reads .requires_grad")
        capture = tracer.capture_of(tensor)
        with torch._C.DisableTorchFunction():
            return capture is not None and capture.tensor.requires_grad
    if name == "nbytes":
        return tracer.value(tensor).standin.itemsize * _numel(tracer, tensor)
    standin = tracer.value(tensor).standin
    if name in _GETTERS or name in _FIXED_ANSWERS:
        return func(standin, *args[1:])
    raise refuse(DataDependentModError, f"a mod reads .{name} of a tensor", "use the tensor's values, dtype and shape only")
