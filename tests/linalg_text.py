"""Writes functions of the linalg stage as text: products by einsum, elementwise bodies, reshapes, transposes.

graph = LinalgText()
q, k, v = (graph.argument(name, (2, 4, 5, 8)) for name in "qkv")
s = graph.einsum("bhqe,bhke->bhqk", q, k)
graph.text(graph.einsum("bhqk,bhke->bhqe", graph.softmax(s), v))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Value:
    """An SSA value that is a tensor (sizes of -1 are dynamic), or a scalar (`shape` None)."""

    name: str
    shape: tuple[int, ...] | None
    element: str = "f32"

    @property
    def type(self) -> str:
        if self.shape is None:
            return self.element
        sizes = ("?" if size < 0 else str(size) for size in self.shape)
        return f"tensor<{'x'.join([*sizes, self.element])}>"


@dataclass
class LinalgText:
    """One function, `main`. Static shapes only, but for arguments that are not computed with by `einsum`."""

    arguments: list[Value] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    count: int = 0

    def argument(self, name: str, shape: Sequence[int] | None, element: str = "f32") -> Value:
        self.arguments.append(Value(f"%{name}", None if shape is None else tuple(shape), element))
        return self.arguments[-1]

    def new(self) -> str:
        self.count += 1
        return f"%t{self.count}"

    def text(self, *results: Value) -> str:
        arguments = ", ".join(f"{value.name}: {value.type}" for value in self.arguments)
        types = ", ".join(value.type for value in results)
        body = "\n    ".join([*self.lines, f"func.return {', '.join(value.name for value in results)} : {types}"])
        return f"builtin.module {{\n  func.func @main({arguments}) -> ({types}) {{\n    {body}\n  }}\n}}\n"

    def number(self, value: float | str, element: str = "f32") -> Value:
        name = self.new()
        if isinstance(value, float) and value in (float("inf"), float("-inf")):
            bits = {"f32": ("0x7F800000", "0xFF800000"), "f16": ("0x7C00", "0xFC00")}[element]
            value = bits[float(value) < 0]
        self.lines.append(f"{name} = arith.constant {value} : {element}")
        return Value(name, None, element)

    def empty(self, shape: Sequence[int], element: str = "f32") -> Value:
        value = Value(self.new(), tuple(shape), element)
        self.lines.append(f"{value.name} = tensor.empty() : {value.type}")
        return value

    def filled(self, shape: Sequence[int], value: float, element: str = "f32") -> Value:
        number, empty = self.number(value, element), self.empty(shape, element)
        result = Value(self.new(), empty.shape, element)
        self.lines.append(
            f"{result.name} = linalg.fill ins({number.name} : {element}) outs({empty.name} : {empty.type}) -> {empty.type}"
        )
        return result

    def generic(self, maps: str, inputs: Sequence[Value], init: Value, body: str, reduced: str = "") -> Value:
        """`maps` as for einsum, "ab,b->ab" ("1" is the position 0); `body` has %a0, %a1, … and %acc, and yields %r."""
        operands, out = maps.split("->")
        loops = "".join(dict.fromkeys(c for c in out + operands if c.isalpha()))
        names = ", ".join(loops)

        def map_(dims: str) -> str:
            return f"affine_map<({names}) -> ({', '.join('0' if dim == '1' else dim for dim in dims)})>"

        all_maps = [map_(dims) for dims in ([*operands.split(",")] if inputs else []) + [out]]
        kinds = ", ".join('"reduction"' if loop in reduced else '"parallel"' for loop in loops)
        ins = ""
        if inputs:
            ins = f"ins({', '.join(value.name for value in inputs)} : {', '.join(value.type for value in inputs)}) "
        parameters = [f"%a{place}: {value.element}" for place, value in enumerate(inputs)] + [f"%acc: {init.element}"]
        result = Value(self.new(), init.shape, init.element)
        self.lines.append(
            f"{result.name} = linalg.generic {{indexing_maps = [{', '.join(all_maps)}], iterator_types = [{kinds}]}} "
            f"{ins}outs({init.name} : {init.type}) {{\n    ^bb0({', '.join(parameters)}):\n      {body}\n"
            f"      linalg.yield %r : {init.element}\n    }} -> {init.type}"
        )
        return result

    def sizes(self, maps: str, inputs: Sequence[Value]) -> tuple[int, ...]:
        operands, out = maps.split("->")
        known = {"1": 1}
        for dims, value in zip(operands.split(","), inputs, strict=False):
            known |= dict(zip(dims, value.shape or (), strict=True))
        return tuple(known[dim] for dim in out)

    def einsum(self, maps: str, left: Value, right: Value, element: str = "f32") -> Value:
        operands, out = maps.split("->")
        reduced = "".join(set(operands) - set(out) - {",", "1"})
        shape = self.sizes(maps, [left, right])
        widened = [f"%e{place}" if value.element != element else f"%a{place}" for place, value in enumerate((left, right))]
        body = "".join(
            f"%e{place} = arith.extf %a{place} : {value.element} to {element}\n      "
            for place, value in enumerate((left, right))
            if value.element != element
        )
        body += f"%p = arith.mulf {widened[0]}, {widened[1]} : {element}\n      %r = arith.addf %acc, %p : {element}"
        return self.generic(maps, [left, right], self.filled(shape, 0.0, element), body, reduced)

    def elementwise(
        self, maps: str, inputs: Sequence[Value], body: str, element: str = "f32", shape: Sequence[int] = ()
    ) -> Value:
        return self.generic(maps, inputs, self.empty(shape or self.sizes(maps, inputs), element), body)

    def binary(self, op: str, maps: str, left: Value, right: Value) -> Value:
        return self.elementwise(maps, [left, right], f"%r = arith.{op} %a0, %a1 : {left.element}", left.element)

    def scaled(self, value: Value, factor: float | Value, op: str = "mulf") -> Value:
        number = factor if isinstance(factor, Value) else self.number(factor, value.element)
        dims = "abcdefgh"[: len(value.shape or ())]
        return self.elementwise(
            f"{dims}->{dims}", [value], f"%r = arith.{op} %a0, {number.name} : {value.element}", value.element
        )

    def cast(self, value: Value, element: str) -> Value:
        dims = "abcdefgh"[: len(value.shape or ())]
        op = "extf" if element in ("f32", "f64") else "truncf"
        return self.elementwise(f"{dims}->{dims}", [value], f"%r = arith.{op} %a0 : {value.element} to {element}", element)

    def reduce(self, op: str, maps: str, value: Value, start: float) -> Value:
        operand, out = maps.split("->")
        init = self.filled(self.sizes(maps, [value]), start, value.element)
        body = f"%r = arith.{op} %a0, %acc : {value.element}"
        return self.generic(maps, [value], init, body, "".join(set(operand) - set(out)))

    def softmax(self, value: Value) -> Value:
        """Over the last dim, as torch does it."""
        dims = "abcdefgh"[: len(value.shape or ())]
        rows = dims[:-1]
        top = self.reduce("maximumf", f"{dims}->{rows}", value, float("-inf"))
        body = f"%d = arith.subf %a0, %a1 : {value.element}\n      %r = math.exp %d : {value.element}"
        weights = self.elementwise(f"{dims},{rows}->{dims}", [value, top], body, value.element)
        total = self.reduce("addf", f"{dims}->{rows}", weights, 0.0)
        return self.binary("divf", f"{dims},{rows}->{dims}", weights, total)

    def transpose(self, value: Value, permutation: Sequence[int]) -> Value:
        result = Value("", tuple((value.shape or ())[dim] for dim in permutation), value.element)
        init = self.empty(result.shape or (), value.element)
        name = self.new()
        self.lines.append(
            f"{name} = linalg.transpose ins({value.name} : {value.type}) outs({init.name} : {init.type}) "
            f"permutation = [{', '.join(map(str, permutation))}]"
        )
        return Value(name, result.shape, value.element)

    def broadcast(self, value: Value, shape: Sequence[int], dimensions: Sequence[int]) -> Value:
        init = self.empty(shape, value.element)
        name = self.new()
        self.lines.append(
            f"{name} = linalg.broadcast ins({value.name} : {value.type}) outs({init.name} : {init.type}) "
            f"dimensions = [{', '.join(map(str, dimensions))}]"
        )
        return Value(name, tuple(shape), value.element)

    def collapse(self, value: Value, groups: Sequence[Sequence[int]]) -> Value:
        shape = []
        for group in groups:
            size = 1
            for dim in group:
                size *= (value.shape or ())[dim]
            shape.append(size)
        result = Value(self.new(), tuple(shape), value.element)
        self.lines.append(
            f"{result.name} = tensor.collapse_shape {value.name} {_groups(groups)} : {value.type} into {result.type}"
        )
        return result

    def expand(self, value: Value, groups: Sequence[Sequence[int]], shape: Sequence[int]) -> Value:
        result = Value(self.new(), tuple(shape), value.element)
        self.lines.append(
            f"{result.name} = tensor.expand_shape {value.name} {_groups(groups)} output_shape [{', '.join(map(str, shape))}] "
            f": {value.type} into {result.type}"
        )
        return result


def _groups(groups: Sequence[Sequence[int]]) -> str:
    return "[" + ", ".join("[" + ", ".join(f"{dim} : i64" for dim in group) + "]" for group in groups) + "]"
