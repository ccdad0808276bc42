"""Captured Python numbers as run-time arguments.

While a mod is traced, each captured int and float is a `NumberProxy`. Arithmetic on it is recorded as an expression that
later calls evaluate anew; reaching torch, it becomes an operand. What Python itself must know of it (a comparison, a
length, an exponent, its text) is answered from the current value, and the answer becomes a guard of the plan of reads.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from attnc.capture.reads import Plan

# ("read", node) | ("const", type name, text) | (template, operand, ...)
Expression: TypeAlias = tuple


def constant(value: int | float) -> Expression:
    return "const", type(value).__name__, value.hex() if isinstance(value, float) else str(value)


def source(expression: Expression) -> str:
    """The expression as Python source over the plan's variables."""
    kind = expression[0]
    if kind == "read":
        return expression[1].variable
    if kind == "const":
        return f"fromhex({expression[2]!r})" if expression[1] == "float" else f"({expression[2]})"
    return kind.format(*map(source, expression[1:]))


def describe(expression: Expression, outermost: bool = False) -> str:
    """The expression as the user would write it, for names and messages."""
    kind = expression[0]
    if kind == "read":
        return expression[1].name
    if kind == "const":
        return str(float.fromhex(expression[2])) if expression[1] == "float" else expression[2]
    text = kind.format(*map(describe, expression[1:]))
    return text[1:-1] if outermost and text.startswith("(") else text


class NumberProxy:
    """A captured number: `value` now, and the `expression` that yields it at every call."""

    __slots__ = ("_expression", "_plan", "_value")

    def __init__(self, plan: Plan, expression: Expression, value: int | float):
        self._plan = plan
        self._expression = expression
        self._value = value

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        # Only reached outside the tracer's own function mode: there the number is just its value.
        return func(*map(concrete, args), **{name: concrete(value) for name, value in (kwargs or {}).items()})

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if self._plan.front is not None:
            return self._plan.front.ufunc(ufunc, method, inputs, kwargs)
        return getattr(ufunc, method)(*map(concrete, inputs), **kwargs)

    @property
    def __class__(self):
        # isinstance(number, int) holds, as it does for the user's own number.
        return type(self._value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(concrete(self), name)

    def __repr__(self) -> str:
        return repr(concrete(self))

    def __str__(self) -> str:
        return str(concrete(self))

    def __format__(self, spec: str) -> str:
        return format(concrete(self), spec)

    def __hash__(self) -> int:
        return hash(concrete(self))

    def __index__(self) -> int:
        return operator.index(concrete(self))

    def __int__(self) -> int:
        return int(concrete(self))

    def __float__(self) -> float:
        return float(concrete(self))

    def __complex__(self) -> complex:
        return complex(concrete(self))

    def __array__(self, dtype=None, copy=None):
        import numpy

        return numpy.array(concrete(self), dtype=dtype)

    def __trunc__(self) -> int:
        return math.trunc(concrete(self))

    def __bool__(self) -> bool:
        return _ask("bool({})", self)

    def __round__(self, digits=None):
        return _compute("round({})", round, self) if digits is None else round(concrete(self), digits)

    def __floor__(self):
        return math.floor(concrete(self))

    def __ceil__(self):
        return math.ceil(concrete(self))

    def __pow__(self, exponent, modulus=None):
        if modulus is not None or not _is_number(exponent):
            return NotImplemented
        exponent = concrete(exponent)
        result = self._value**exponent
        if type(result) not in (int, float) or (type(exponent) is int and exponent < 0):
            return concrete(self) ** exponent
        return NumberProxy(self._plan, ("({} ** {})", self._expression, constant(exponent)), result)

    def __rpow__(self, base):
        return base ** concrete(self) if _is_number(base) else NotImplemented

    def __divmod__(self, other):
        return (self // other, self % other) if _is_number(other) else NotImplemented

    def __rdivmod__(self, other):
        return (other // self, other % self) if _is_number(other) else NotImplemented


def _is_number(value: object) -> bool:
    return type(value) in (int, float, bool, NumberProxy)


def _parts(value: object) -> tuple[Expression, int | float]:
    if type(value) is NumberProxy:
        return value._expression, value._value
    assert isinstance(value, (int, float))
    number = int(value) if isinstance(value, bool) else value
    return constant(number), number


def concrete(value: Any) -> Any:
    """The value behind a number proxy, which from now on is guarded; anything else as it is."""
    if type(value) is not NumberProxy:
        return value
    value._plan.guard(value._expression, value._value)
    return value._value


def current(value: Any) -> Any:
    """The value behind a number proxy without a guard: for what leaves no trace in the record."""
    return value._value if type(value) is NumberProxy else value


def _compute(template: str, function, *operands):
    plan = next(o._plan for o in operands if type(o) is NumberProxy)
    parts = [_parts(o) for o in operands]
    result = function(*(value for _, value in parts))
    return NumberProxy(plan, (template, *(expression for expression, _ in parts)), result)


def _ask(template: str, *operands) -> bool:
    plan = next(o._plan for o in operands if type(o) is NumberProxy)
    parts = [_parts(o) for o in operands]
    expression = (template, *(expression for expression, _ in parts))
    answer = eval(template.format(*(f"x{i}" for i in range(len(parts)))), {f"x{i}": v for i, (_, v) in enumerate(parts)})
    plan.guard(expression, answer)
    return answer


def _install() -> None:
    binary = {
        "add": "({} + {})",
        "sub": "({} - {})",
        "mul": "({} * {})",
        "truediv": "({} / {})",
        "floordiv": "({} // {})",
        "mod": "({} % {})",
        "and": "({} & {})",
        "or": "({} | {})",
        "xor": "({} ^ {})",
        "lshift": "({} << {})",
        "rshift": "({} >> {})",
    }
    for name, template in binary.items():
        function = getattr(operator, f"{name}_" if name in ("and", "or") else name)

        def forward(self, other, template=template, function=function):
            return _compute(template, function, self, other) if _is_number(other) else NotImplemented

        def reflected(self, other, template=template, function=function):
            return _compute(template, function, other, self) if _is_number(other) else NotImplemented

        setattr(NumberProxy, f"__{name}__", forward)
        setattr(NumberProxy, f"__r{name}__", reflected)
    for name, template in {"neg": "(-{})", "pos": "(+{})", "abs": "abs({})", "invert": "(~{})"}.items():

        def unary(self, template=template, name=name):
            function = getattr(operator, name)
            return _compute(template, function, self)

        setattr(NumberProxy, f"__{name}__", unary)
    for name, sign in {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}.items():

        def compare(self, other, template=f"({{}} {sign} {{}})"):
            return _ask(template, self, other) if _is_number(other) else NotImplemented

        setattr(NumberProxy, f"__{name}__", compare)


_install()
