"""Writes the region of a mask from a Python function, and asks a classifier about it.

region, captures = mask_region(lambda b, h, q, k: (q >= k) & (doc[q] == doc[k]), …)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from xdsl.dialects import arith, func
from xdsl.dialects.builtin import DenseArrayBase, ModuleOp
from xdsl.ir import SSAValue

from attention_text import TARGET, attention_text, parse
from attnc.dialects.linalg_ext import OnlineAttentionOp
from attnc.transforms import classify_blocks, convert_attention_to_online_attention
from region_interpreter import run_region
from scalar_ops import evaluate
from tile_interpreter import Interpreter

EMPTY, FULL, PARTIAL = 0, 1, 2


@dataclass
class Writer:
    """Lines of IR, and the tensors and numbers they read."""

    lines: list[str] = field(default_factory=list)
    captures: list[tuple[str, str, str]] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    checked: str = "all"

    def emit(self, text: str, type_: str) -> Expression:
        name = f"%v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return Expression(self, name, type_)

    def constant(self, value: int, type_: str = "i32") -> Expression:
        if type_ == "i1":
            return self.emit(f"arith.constant {'true' if value else 'false'}", "i1")
        return self.emit(f"arith.constant {value} : {type_}", type_)

    def capture(self, values: np.ndarray) -> Capture:
        """A captured tensor of int32 or bool."""
        name = f"cap{len(self.captures)}"
        element = "i1" if values.dtype == bool else "i32"
        type_ = "tensor<" + "?x" * values.ndim + element + ">"
        self.captures.append((name, type_, "capture"))
        self.values.append(values if values.dtype == bool else values.astype(np.int32))
        return Capture(self, name, type_, element)

    def number(self, value: int) -> Expression:
        """A Python number that is an argument of the kernel."""
        name = f"num{len(self.captures)}"
        self.captures.append((name, "i64", "number"))
        self.values.append(np.int64(value))
        return self.emit(f"arith.trunci %{name} : i64 to i32", "i32")


@dataclass
class Capture:
    writer: Writer
    name: str
    type_: str
    element: str

    def __getitem__(self, indices: Any) -> Expression:
        indices = indices if isinstance(indices, tuple) else (indices,)
        cast = [self.writer.emit(f"arith.index_cast {index.name} : i32 to index", "index") for index in indices]
        attributes = f'{{attnc.checked = "{self.writer.checked}", attnc.name = "{self.name}"}}' if indices else ""
        text = f"tensor.extract %{self.name}[{', '.join(i.name for i in cast)}] {attributes} : {self.type_}"
        return self.writer.emit(text, self.element)


@dataclass(eq=False)
class Expression:
    writer: Writer
    name: str
    type_: str
    __hash__ = None  # type: ignore[assignment]

    def _other(self, other: Any) -> Expression:
        return other if isinstance(other, Expression) else self.writer.constant(other, self.type_)

    def binary(self, op: str, other: Any) -> Expression:
        other = self._other(other)
        return self.writer.emit(f"arith.{op} {self.name}, {other.name} : {self.type_}", self.type_)

    def compare(self, predicate: str, other: Any) -> Expression:
        other = self._other(other)
        return self.writer.emit(f"arith.cmpi {predicate}, {self.name}, {other.name} : {self.type_}", "i1")

    def __add__(self, other: Any) -> Expression:
        return self.binary("addi", other)

    def __sub__(self, other: Any) -> Expression:
        return self.binary("subi", other)

    def __mul__(self, other: Any) -> Expression:
        return self.binary("muli", other)

    def __floordiv__(self, other: Any) -> Expression:
        return self.binary("floordivsi", other)

    def __mod__(self, other: Any) -> Expression:
        other = self._other(other)
        return self - (self // other) * other

    def __and__(self, other: Any) -> Expression:
        return self.binary("andi", other)

    def __or__(self, other: Any) -> Expression:
        return self.binary("ori", other)

    def __xor__(self, other: Any) -> Expression:
        return self.binary("xori", other)

    def __rshift__(self, other: Any) -> Expression:
        return self.binary("shrsi", other)

    def __lshift__(self, other: Any) -> Expression:
        return self.binary("shli", other)

    def __invert__(self) -> Expression:
        return self.binary("xori", self.writer.constant(-1, self.type_))

    def __lt__(self, other: Any) -> Expression:
        return self.compare("slt", other)

    def __le__(self, other: Any) -> Expression:
        return self.compare("sle", other)

    def __gt__(self, other: Any) -> Expression:
        return self.compare("sgt", other)

    def __ge__(self, other: Any) -> Expression:
        return self.compare("sge", other)

    def __eq__(self, other: Any) -> Expression:  # type: ignore[override]
        return self.compare("eq", other)

    def __ne__(self, other: Any) -> Expression:  # type: ignore[override]
        return self.compare("ne", other)

    def __abs__(self) -> Expression:
        return self.writer.emit(f"math.absi {self.name} : {self.type_}", self.type_)

    def clamp(self, low: Any, high: Any) -> Expression:
        return self.binary("maxsi", low).binary("minsi", high)

    def where(self, yes: Any, no: Any) -> Expression:
        """`yes if self else no`."""
        yes = yes if isinstance(yes, Expression) else no._other(yes)
        no = yes._other(no)
        return self.writer.emit(f"arith.select {self.name}, {yes.name}, {no.name} : {yes.type_}", yes.type_)

    def as_int(self) -> Expression:
        return self.writer.emit(f"arith.extui {self.name} : i1 to i32", "i32")


Mask = Callable[..., Any]


@dataclass
class Classified:
    """A module with its classifier, and all that the mask makes of every pair: arrays over (b, h, q, k)."""

    module: ModuleOp
    live: np.ndarray
    wrong: np.ndarray  # a read that is checked there is out of range
    arguments: list[Any]

    def ask(self, b: int, h0: int, h1: int, q0: int, q1: int, k0: int, k1: int) -> int:
        """The class of a block, bounds inclusive."""
        interpreter = Interpreter(self.module, False, 0)
        block = interpreter.functions["classify"].body.block
        bounds = [np.int64(bound) for bound in (b, h0, h1, q0, q1, k0, k1)]
        with np.errstate(all="ignore"):
            (result,) = interpreter.block(block, dict(zip(block.args, [*bounds, *self.arguments], strict=True)))
        return int(result)

    def truth(self, b: int, h0: int, h1: int, q0: int, q1: int, k0: int, k1: int) -> int:
        """The class by looking at every pair; PARTIAL where something there is out of range."""
        box = (b, slice(h0, h1 + 1), slice(q0, q1 + 1), slice(k0, k1 + 1))
        live, wrong = self.live[box], self.wrong[box]
        if wrong.any():
            return PARTIAL
        return FULL if live.all() else PARTIAL if live.any() else EMPTY

    def check(self, *bounds: int) -> int:
        """Asks, and asserts that the answer holds."""
        said, true = self.ask(*bounds), self.truth(*bounds)
        assert said in (true, PARTIAL), f"{bounds}: said {said}, is {true}\n{self.module}"
        return said


def mask_region(mask: Mask, checked: str = "all") -> tuple[str, Writer]:
    """The region's text; `mask(w, b, h, q, k)` gets the writer first, to capture tensors and numbers with."""
    writer = Writer(checked=checked)
    b, h, q, k = (Expression(writer, f"%{name}32", "i32") for name in "bhqk")
    result = mask(writer, b, h, q, k)
    writer.lines.append(f"%x = arith.select {result.name}, %score, %minus_infinity : f32")
    return "\n".join(writer.lines), writer


def classified(
    mask: Mask, batch: int = 1, heads: int = 1, queries: int = 64, keys: int = 64, checked: str = "all"
) -> Classified:
    """The classifier of a mask (all heads share one key/value head), and the mask itself for these sizes."""
    region, writer = mask_region(mask, checked)
    return classify_region(region, writer.captures, writer.values, batch, heads, queries, keys)


def classify_region(
    region: str, captures: list[tuple[str, str, str]], values: list[Any], batch: int, heads: int, queries: int, keys: int
) -> Classified:
    """The classifier of any region over those captures."""
    module = parse(attention_text(region, captures))
    convert_attention_to_online_attention.run(module, TARGET)
    classify_blocks.run(module, TARGET)
    module.verify()
    module = parse(str(module))
    (function,) = [op for op in module.ops if isinstance(op, func.FuncOp) and op.sym_name.data == "attention"]
    (op,) = [op for op in function.body.block.ops if isinstance(op, OnlineAttentionOp)]
    outside: dict[SSAValue, np.ndarray] = dict(zip(function.body.block.args[4:], map(np.asarray, values), strict=True))
    for inner in function.body.block.ops:
        if isinstance(inner, arith.ConstantOp):
            outside[inner.result] = evaluate(inner, [], False)
        elif inner.results and inner.results[0].name_hint == "group":
            outside[inner.results[0]] = np.asarray(heads, np.int64)
    sizes = (batch, 1, heads, queries, keys)
    with np.errstate(all="ignore"):
        scores, faults = run_region(op, np.asarray(0, np.float32), sizes, outside)
    live = scores[:, 0] > -np.inf
    wrong = np.zeros(sizes, bool)
    for fault in faults:
        wrong |= fault.where & (scores > -np.inf) if fault.checked == "kept" else fault.where
    indices = op.attributes["attnc.classifier_arguments"]
    assert isinstance(indices, DenseArrayBase)
    arguments = [values[int(n) - 4] for n in indices.get_values()]
    return Classified(module, live, wrong[:, 0], arguments)
