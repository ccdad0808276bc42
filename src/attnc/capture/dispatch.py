"""One ATen call of a mod: what it may be, how it is written down, and running it on stand-ins for dtype and shape.

Every argument of the schema is written down in order, defaults too. A Python number in the place of a tensor makes the `Scalar`
overload, as torch-mlir spells it; writing in place makes the functional operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attnc.capture import views
from attnc.capture.constants import LARGEST_CONSTANT, literal
from attnc.capture.locations import refuse
from attnc.capture.numbers import concrete
from attnc.capture.record import NONE, ListOf, Literal, Operand
from attnc.capture.symbolic import proxy_of
from attnc.capture.tensors import dtype_literal
from attnc.errors import DataDependentModError, InPlaceModError, RandomModError, UnsupportedModError, UnsupportedOpError

if TYPE_CHECKING:
    from attnc.capture.trace import Tracer

# Rows longer than this are whole captured tensors rather than gathered rows.
LARGEST_ROW = 1 << 20


class Parameter(NamedTuple):
    """One parameter of an ATen schema; `kind` is its type's text."""

    name: str
    kind: str
    default: Any
    keyword_only: bool


class Schema(NamedTuple):
    """What is asked of an ATen operation at each call, read once."""

    name: str  # "aten.add.Tensor"
    base: str  # "add"
    parameters: tuple[Parameter, ...]
    writes: bool
    refused: type[UnsupportedModError] | None


_SCHEMAS: dict[Any, Schema] = {}

_IDENTITIES = frozenset(
    {"detach", "alias", "lift", "lift_fresh", "lift_fresh_copy", "contiguous", "clone", "resolve_neg", "resolve_conj"}
)
_DATA_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_DATA = frozenset({"_local_scalar_dense", "is_nonzero", "equal", "item", "nonzero", "unique", "_unique2", "masked_select"})

# The overload that takes a Python number in the place of the second tensor.
_SCALAR_OVERLOADS = {
    f"aten.{name}.Tensor": f"aten.{name}.Scalar"
    for name in ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge", "remainder", "fmod", "bitwise_and")
    + ("bitwise_or", "bitwise_xor", "floor_divide", "xlogy")
} | {
    "aten.floor_divide.default": "aten.floor_divide.Scalar",
    "aten.div.Tensor_mode": "aten.div.Scalar_mode",
    "aten.bitwise_left_shift.Tensor": "aten.bitwise_left_shift.Tensor_Scalar",
    "aten.bitwise_right_shift.Tensor": "aten.bitwise_right_shift.Tensor_Scalar",
    "aten.pow.Tensor_Tensor": "aten.pow.Tensor_Scalar",
}
_COMMUTATIVE = frozenset({"add", "mul", "bitwise_and", "bitwise_or", "bitwise_xor", "eq", "ne"})
_DIVISIONS = frozenset({"floor_divide", "remainder", "fmod", "div", "floor_divide_", "remainder_", "fmod_", "div_"})

# Parameters of type Scalar whose value the operation's meaning depends on: never run-time numbers.
_VALUES = frozenset({("pow", "exponent"), ("add", "alpha"), ("sub", "alpha"), ("rsub", "alpha"), ("linalg_vector_norm", "ord")})
# Made of numbers alone and rarely met: written down as the constant that they are.
_CONSTANTS = frozenset({"eye", "linspace", "logspace", "tril_indices", "triu_indices"})
_FACTORIES = _CONSTANTS | {"arange", "zeros", "ones", "empty"}


def schema_of(func: Any) -> Schema:
    """The schema of an `OpOverload`."""
    schema = _SCHEMAS.get(func)
    if schema is None:
        raw = func._schema
        space, base = raw.name.split("::")
        tags = set(func.tags)
        refused: type[UnsupportedModError] | None = None
        if torch.Tag.nondeterministic_seeded in tags:
            refused = RandomModError
        elif base in _DATA or (base != "index" and not tags.isdisjoint(_DATA_TAGS)):
            refused = DataDependentModError
        elif space != "aten":
            refused = UnsupportedOpError
        parameters = tuple(Parameter(a.name, str(a.type), a.default_value, a.kwarg_only) for a in raw.arguments)
        name = f"{space}.{base}.{raw.overload_name or 'default'}"
        schema = _SCHEMAS[func] = Schema(name, base, parameters, raw.is_mutable, refused)
    return schema


def dispatch(tracer: Tracer, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Writes down the call `func(*args, **kwargs)` and returns its stand-in."""
    schema = schema_of(func)
    if schema.refused is not None:
        raise refuse(schema.refused, f"a mod calls {schema.name}")
    if schema.writes:
        return _write(tracer, func, schema, args, kwargs)
    if schema.base in _IDENTITIES:
        return _identity(tracer, schema, args[0])
    return _record(tracer, func, schema, args, kwargs)


def _record(tracer: Tracer, func: Any, schema: Schema, args: tuple, kwargs: dict[str, Any]) -> Any:
    values = _bind(schema, args, kwargs)
    if schema.base == "dist":
        difference = dispatch(tracer, torch.ops.aten.sub.Tensor, (values[0], values[1]), {})
        return dispatch(tracer, torch.ops.aten.linalg_vector_norm.default, (difference, values[2]), {})
    special = views.HANDLERS.get(schema.name)
    if special is not None:
        return special(tracer, *values)
    for value in values:
        _fix(tracer, value)
    result = _run(tracer, func, schema, args, kwargs)
    if not isinstance(result, torch.Tensor):
        raise refuse(UnsupportedOpError, f"a mod calls {schema.name}, which has several results or none")
    if result.device.type != "cpu":
        raise refuse(UnsupportedModError, f"a mod makes a tensor on {result.device}", "attnc runs on the CPU only so far")
    if schema.base in _CONSTANTS and result.numel() <= LARGEST_CONSTANT:
        return literal(tracer, result)
    if schema.base == "_to_copy":
        return tracer.cast(tracer.value(values[0]), result.dtype)
    name, values = _scalar_overload(tracer, schema, values)
    operands = [_operand(tracer, schema, p, v) for p, v in zip(schema.parameters, values, strict=True)]
    shared = result._is_view()
    if shared:
        for value in values:
            if isinstance(value, torch.Tensor):
                tracer.value(value).shared = True
    return tracer.emit(name, operands, result, shared=shared)


def _bind(schema: Schema, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """The arguments in the schema's order, with defaults."""
    given = len(args)
    return [
        args[place] if place < given else kwargs.get(parameter.name, parameter.default)
        for place, parameter in enumerate(schema.parameters)
    ]


def _run(tracer: Tracer, func: Any, schema: Schema, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The call on stand-ins: its dtype and shape are torch's own."""
    plain = [_standin(tracer, arg) for arg in args]
    if schema.base in _DIVISIONS and len(plain) > 1:
        divisor = plain[1]
        if isinstance(divisor, torch.Tensor):
            plain[1] = torch.ones((), dtype=divisor.dtype, device="cpu").expand(divisor.shape)
        elif proxy_of(args[1]) is not None:
            plain[1] = divisor or type(divisor)(1)
    return func(*plain, **{name: _standin(tracer, value) for name, value in kwargs.items()})


def _standin(tracer: Tracer, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tracer.value(value).standin
    if isinstance(value, (list, tuple)):
        return [_standin(tracer, item) for item in value]
    proxy = proxy_of(value)
    return value if proxy is None else proxy._value


def _fix(tracer: Tracer, value: Any) -> None:
    """The lengths of a row that an operation works on are compiled in."""
    if isinstance(value, torch.Tensor):
        known = tracer.value(value)
        if known.origins:
            if known.standin.numel() > LARGEST_ROW:
                raise refuse(
                    UnsupportedModError,
                    f"a mod works on a whole captured tensor of {known.standin.numel()} elements",
                    "index the captured tensor first, or compute the whole tensor outside of the mod and capture that",
                )
            tracer.fix(known)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _fix(tracer, item)


def _scalar_overload(tracer: Tracer, schema: Schema, values: list[Any]) -> tuple[str, list[Any]]:
    """A number in a tensor's place: the Scalar overload, or an explicit scalar tensor where there is none."""
    tensors = [place for place, p in enumerate(schema.parameters) if p.kind == "Tensor"]
    numbers = [place for place in tensors if not isinstance(values[place], torch.Tensor)]
    if not numbers:
        return schema.name, values
    values = list(values)
    if numbers == [0] and schema.base in _COMMUTATIVE and tensors == [0, 1]:
        values[0], values[1] = values[1], values[0]
        numbers = [1]
    if numbers == [0] and schema.name == "aten.sub.Tensor":
        values[0], values[1] = values[1], values[0]
        return "aten.rsub.Scalar", values
    if numbers == [1] and schema.name in _SCALAR_OVERLOADS:
        return _SCALAR_OVERLOADS[schema.name], values
    others = [tracer.value(values[place]).standin for place in tensors if place not in numbers and place]
    for place in numbers:
        proxy = proxy_of(values[place])
        dtype = torch.result_type(others[-1], proxy._value if proxy is not None else values[place]) if others else None
        values[place] = scalar_tensor(tracer, values[place], dtype)
    return schema.name, values


def scalar_tensor(tracer: Tracer, number: Any, dtype: torch.dtype | None) -> torch.Tensor:
    """A number as a 0-d tensor."""
    proxy = proxy_of(number)
    if dtype is None:
        dtype = torch.tensor(number if proxy is None else proxy._value).dtype
    operand = Literal.of(number) if proxy is None else tracer.number(proxy)
    operands = (operand, dtype_literal(dtype), NONE, NONE, NONE)
    return tracer.emit("aten.scalar_tensor.default", operands, torch.zeros((), dtype=dtype, device="cpu"))


def _operand(tracer: Tracer, schema: Schema, parameter: Parameter, value: Any) -> Operand:
    if isinstance(value, torch.Tensor):
        return tracer.value(value).operand
    if isinstance(value, (list, tuple)):
        return ListOf(tuple(_operand(tracer, schema, parameter, item) for item in value))
    if isinstance(value, torch.dtype):
        return dtype_literal(value)
    proxy = proxy_of(value)
    if proxy is not None:
        scalar = "number" in parameter.kind or "Tensor" in parameter.kind
        if not scalar or (schema.base, parameter.name) in _VALUES or schema.base in _FACTORIES:
            return Literal.of(concrete(proxy))
        return tracer.number(proxy)
    if value is None or isinstance(value, (int, float, bool, str)):
        return Literal.of(value)
    if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
        return NONE
    raise refuse(UnsupportedOpError, f"a mod calls {schema.name} with {parameter.name}={value!r}")


def _identity(tracer: Tracer, schema: Schema, tensor: torch.Tensor) -> torch.Tensor:
    """What returns its operand: another tensor of the same meaning."""
    if (
        schema.base in ("lift", "lift_fresh", "lift_fresh_copy")
        and not tracer.is_known(tensor)
        and tensor.numel() <= LARGEST_CONSTANT
    ):
        return literal(tracer, tensor)
    value = tracer.value(tensor)
    copies = schema.base == "clone"
    value.shared = value.shared or not copies
    if schema.base == "detach" and value.standin.is_floating_point():  # not the same to who wants gradients
        detached = tracer.emit("aten.detach.default", (value.operand,), value.standin.view(value.standin.shape))
        tracer.value(detached).shared = True
        return detached
    result = (
        value.standin.clone() if copies and value.standin.numel() < LARGEST_ROW else value.standin.view(value.standin.shape)
    )
    tracer.define(result, value.operand, value.origins, shared=not copies)
    return result


def _write(tracer: Tracer, func: Any, schema: Schema, args: tuple, kwargs: dict[str, Any]) -> Any:
    """`a.add_(b)` on a tensor that the mod computed: the operation itself, whose value `a` then has."""
    target = args[0] if args else None
    outplace = schema.base.removesuffix("_")
    if not isinstance(target, torch.Tensor) or not schema.base.endswith("_") or "out" in kwargs:
        raise refuse(InPlaceModError, f"a mod writes in place: {schema.name}")
    value = tracer.value(target)
    if value.shared:
        what = "a captured tensor" if not tracer.is_computed(target) else "a tensor that has views"
        raise refuse(InPlaceModError, f"a mod writes to {what} in place: {schema.name}")
    functional = getattr(getattr(torch.ops.aten, outplace, None), func._overloadname, None)
    if functional is None:
        raise refuse(InPlaceModError, f"a mod writes in place: {schema.name}")
    result = _record(tracer, functional, schema_of(functional), args, kwargs)
    new = tracer.value(result)
    if torch.Tag.inplace_view in func.tags:
        # `squeeze_` and its like, which torch's own product of a vector and a matrix ends in.
        _run(tracer, func, schema, args, kwargs)
        value.operand, value.origins, value.shared = new.operand, new.origins, False
        return target
    if result.shape != value.standin.shape:
        raise RuntimeError(f"output with shape {list(value.standin.shape)} doesn't match the shape {list(result.shape)}")
    if result.dtype is not value.standin.dtype:
        if not torch.can_cast(result.dtype, value.standin.dtype):
            raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type {value.standin.dtype}")
        new = tracer.value(tracer.cast(new, value.standin.dtype))
    value.operand, value.origins = new.operand, new.origins
    return target
