"""The plan of reads: what a mod read while it was traced, as a function that checks it all again in a few microseconds.

Tracing rebuilds the mod so that every read of the outside world (closure cell, global, attribute, item, default, …) passes
through `wrapping.py`, which writes one line here for it, with what must hold for the trace to hold. The finished plan is
a plain Python function, for `lambda score, b, h, q, kv: score + bias[q - kv + window // 2]`

    def check(score_mod, mask_mod):
        v0 = score_mod
        if not (type(v0) is function and v0.__code__ is k0): return None
        v1 = v0.__closure__[0].cell_contents
        if not (isinstance(v1, k1)): return None
        v2 = v0.__closure__[1].cell_contents
        if not (type(v2) is int): return None
        if not (k2(v1)): return None
        return (v1,), ((v2 // (2)),)

so a repeated call gets the tensors and numbers of now, or None where the mod must be traced again. What cannot be
enumerated sets `retrace`, a reason: then the plan is never kept and each call traces.
"""

from __future__ import annotations

import keyword
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from attnc.capture.numbers import Expression, source

Check = Callable[[object, object], "tuple[tuple[Any, ...], tuple[int | float, ...]] | None"]


class Node(NamedTuple):
    """One read: the plan's variable that holds it and what the user's code calls it."""

    variable: str
    name: str


class Plan:
    """The reads of one trace, while they are made."""

    def __init__(self) -> None:
        self.retrace: str | None = None
        self._lines: list[str] = []
        self._count = 0
        self._constants: dict[int, tuple[str, object]] = {}
        self._named: dict[str, object] = {}
        self._guards: dict[Expression, object] = {}
        self.front: Any = None  # the tracer, where NumPy's functions of captured numbers are its matter

    def read(self, access: str, name: str) -> Node:
        """A read by the Python expression `access` over earlier variables."""
        node = Node(f"v{self._count}", name)
        self._count += 1
        self._lines.append(f"{node.variable} = {access}")
        return node

    def require(self, condition: str) -> None:
        """A condition, over earlier variables, under which the trace holds."""
        self._lines.append(f"if not ({condition}): return None")

    def constant(self, value: object) -> str:
        """The name of an object inside the plan. The plan keeps it alive, so only code, types and the like belong here."""
        name, _ = self._constants.setdefault(id(value), (f"k{len(self._constants)}", value))
        return name

    def named(self, name: str, value: object) -> str:
        """The same by a name that says what it is, where that name is free."""
        if not name.isidentifier() or self._named.setdefault(name, value) is not value:
            return self.constant(value)
        return name

    def guard(self, expression: Expression, answer: object) -> None:
        """A number's value (or a comparison's outcome) that Python looked at."""
        if expression[0] != "const":
            self._guards.setdefault(expression, answer)

    def give_up(self, reason: str) -> None:
        """Something was read that cannot be enumerated: trace at every call."""
        self.retrace = self.retrace or reason

    def finish(self, tensors: Sequence[tuple[Node, Callable[[Any], bool]]], numbers: Sequence[Expression]) -> LazyCheck:
        """The plan's function, which returns what `tensors` and `numbers` are at the time of the call."""
        for expression, answer in self._guards.items():
            text = source(expression)
            if isinstance(answer, bool):
                self.require(text if answer else f"not {text}")
            elif isinstance(answer, float):
                self.require(f"({text}).hex() == {answer.hex()!r}")
            else:
                self.require(f"{text} == {answer!r}")
        for node, check in tensors:
            self.require(f"{self.constant(check)}({node.variable})")
        values = "".join(f"{node.variable}, " for node, _ in tensors)
        evaluated = "".join(f"{source(number)}, " for number in numbers)
        constants = {**dict(self._constants.values()), **self._named}
        body = [*self._lines, f"return ({values}), ({evaluated})"]
        return LazyCheck("def check(score_mod, mask_mod):\n    " + "\n    ".join(body), constants)


class LazyCheck:
    """A plan's function, compiled when it is first called: most plans of a short run never are."""

    __slots__ = ("_constants", "_function", "text")

    def __init__(self, text: str, constants: dict[str, object]):
        self.text = text
        self._constants = constants
        self._function: Check | None = None

    def __call__(self, score_mod: object, mask_mod: object):
        function = self._function
        if function is None:
            scope: dict[str, Any] = {**_SCOPE, **self._constants}
            exec(compile(self.text, "<attnc plan of reads>", "exec"), scope)
            function = self._function = scope["check"]
        try:
            return function(score_mod, mask_mod)
        except Exception:
            return None  # a read that no longer exists: the trace will say what is wrong, if anything is


_SCOPE = {
    "function": types.FunctionType,
    "method": types.MethodType,
    "fromhex": float.fromhex,
}


def attribute(name: str, owner: str = "{}") -> str:
    """The access `owner.name`."""
    return f"{owner}.{name}" if name.isidentifier() and not keyword.iskeyword(name) else f"getattr({owner}, {name!r})"


def stride_pattern(sizes: Sequence[int], strides: Sequence[int]) -> str:
    """What of a captured tensor's strides is compiled in: "?x1" says that the last one is 1.

    The stride of a dim of size 1 means nothing: it counts as 1 in the last dim, as unknown elsewhere.
    """
    fields = []
    last = len(sizes) - 1
    for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        if size == 1:
            fields.append("1" if dim == last else "?")
        else:
            fields.append(str(stride) if stride in (0, 1) else "?")
    return "x".join(fields)
