"""The trace record: what a score_mod and a mask_mod do, as plain hashable data.

A `Record` says everything that decides the compiled code of the mods and nothing else, so it is the key of every kernel
cache. It holds no tensor and no current number, imports neither torch nor xdsl, and prints as a small listing:

    score_mod(score: float32, b: int32, h: int32, q: int32, kv: int32)
      %0 = aten.index.Tensor(slopes, [h]) : float32[]
      ...

The user's file and line of each operation travel along for messages, but take no part in equality or hash.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

SCORE_ARGUMENTS = ("score", "b", "h", "q", "kv")
MASK_ARGUMENTS = ("b", "h", "q", "kv")


@dataclass(frozen=True, slots=True)
class TensorType:
    """dtype by torch's name (`"float32"`) and shape; a length of None is known only at run time."""

    dtype: str
    shape: tuple[int | None, ...] = ()

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join('?' if size is None else str(size) for size in self.shape)}]"


@dataclass(frozen=True, slots=True)
class Location:
    """A line of the user's code."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Argument:
    """The mod's own argument number `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class Captured:
    """The record's captured tensor number `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class Number:
    """The record's run-time number number `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class Result:
    """The value of operation number `op` of the same function."""

    op: int


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant. `kind` is int, float, bool, str, dtype or none; `text` is exact, so 1, 1.0, True and -0.0 all differ."""

    kind: str
    text: str = ""

    @classmethod
    def of(cls, value: object) -> Literal:
        """The literal of a Python int, float, bool, str or None."""
        if value is None:
            return NONE
        kind = type(value).__name__
        if kind not in ("int", "float", "bool", "str"):
            raise TypeError(f"no literal: {value!r}")
        return cls(kind, value.hex() if isinstance(value, float) else str(value))

    @property
    def value(self) -> int | float | bool | str | None:
        """The Python value; a dtype stays its name."""
        match self.kind:
            case "int":
                return int(self.text)
            case "float":
                return float.fromhex(self.text)
            case "bool":
                return self.text == "True"
            case "none":
                return None
        return self.text


NONE = Literal("none")


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list of operands: index tensors, dims, a shape."""

    items: tuple[Operand, ...]


Operand: TypeAlias = "Argument | Captured | Number | Result | Literal | ListOf"


@dataclass(frozen=True, slots=True)
class Op:
    """One ATen call: `name` with its overload (`"aten.add.Tensor"`), every argument of its schema in order, one result.

    `"attnc.literal"` is a constant tensor: its operand is the flat list of its elements.
    """

    name: str
    operands: tuple[Operand, ...]
    type: TensorType
    location: Location | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class CaptureType:
    """What of a captured tensor is known at compile time.

    `name` is what the user's code calls it; `type.shape` has lengths only for dims whose length the code depends on;
    `strides` has a field for each dim, "1" or "0" where that is the stride, else "?" (`"?x1"`).
    """

    name: str
    type: TensorType
    strides: str


@dataclass(frozen=True, slots=True)
class NumberType:
    """A Python number that is an argument of the kernel: `kind` is int or float."""

    name: str
    kind: str


@dataclass(frozen=True, slots=True)
class Function:
    """A traced mod: its argument types, operations in order, and what it returns (of score dtype, or bool for a mask)."""

    arguments: tuple[TensorType, ...]
    ops: tuple[Op, ...]
    result: Operand

    @property
    def captures(self) -> tuple[int, ...]:
        """The record's captures that this function reads, ascending."""
        return tuple(sorted({o.index for o in self._leaves() if isinstance(o, Captured)}))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The record's numbers that this function reads, ascending."""
        return tuple(sorted({o.index for o in self._leaves() if isinstance(o, Number)}))

    def _leaves(self):
        yield self.result
        for op in self.ops:
            stack = list(op.operands)
            while stack:
                operand = stack.pop()
                if isinstance(operand, ListOf):
                    stack.extend(operand.items)
                else:
                    yield operand


@dataclass(frozen=True, eq=False)
class Record:
    """Both mods, with the captures and numbers they share. A mod that changes nothing is None."""

    score: Function | None
    mask: Function | None
    captures: tuple[CaptureType, ...] = ()
    numbers: tuple[NumberType, ...] = ()
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self._key()))

    def _key(self) -> tuple:
        return self.score, self.mask, self.captures, self.numbers

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Record) and self._hash == other._hash and self._key() == other._key()

    def __str__(self) -> str:
        lines = []
        for name, function, names in (("score_mod", self.score, SCORE_ARGUMENTS), ("mask_mod", self.mask, MASK_ARGUMENTS)):
            if function is None:
                continue
            pairs = zip(names, function.arguments, strict=True)
            lines.append(f"{name}({', '.join(f'{n}: {t.dtype}' for n, t in pairs)})")
            for number, op in enumerate(function.ops):
                operands = ", ".join(self._text(o, names) for o in op.operands)
                lines.append(f"  %{number} = {op.name}({operands}) : {op.type}")
            lines.append(f"  return {self._text(function.result, names)}")
        lines += [f"capture {c.name}: {c.type}, strides {c.strides!r}" for c in self.captures]
        lines += [f"number {n.name}: {n.kind}" for n in self.numbers]
        return "\n".join(lines)

    def _text(self, operand: Operand, names: tuple[str, ...]) -> str:
        match operand:
            case Argument(index):
                return names[index]
            case Captured(index):
                return self.captures[index].name
            case Number(index):
                return self.numbers[index].name
            case Result(op):
                return f"%{op}"
            case ListOf(items):
                return f"[{', '.join(self._text(item, names) for item in items)}]"
            case Literal():
                return operand.text if operand.kind == "dtype" else repr(operand.value)
