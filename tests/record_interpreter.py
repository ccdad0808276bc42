"""Runs a trace record on given scalars, op by op, with torch's own operations: what the record says, said another way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attnc.capture.record import Argument, Captured, Function, ListOf, Literal, Number, Op, Operand, Result


def run_record(
    function: Function, arguments: Sequence[torch.Tensor], captures: Sequence[torch.Tensor], numbers: Sequence[int | float]
) -> torch.Tensor:
    """The value of a traced mod at `arguments`, the mod's own scalars."""
    results: list[torch.Tensor] = []

    def value(operand: Operand) -> Any:
        match operand:
            case Argument(index):
                return arguments[index]
            case Captured(index):
                return captures[index]
            case Number(index):
                return numbers[index]
            case Result(op):
                return results[op]
            case ListOf(items):
                return [value(item) for item in items]
            case Literal():
                return getattr(torch, operand.text) if operand.kind == "dtype" else operand.value

    for op in function.ops:
        result = _call(op, [value(operand) for operand in op.operands])
        assert str(result.dtype) == f"torch.{op.type.dtype}", op
        assert len(result.shape) == len(op.type.shape), op
        assert all(want in (None, size) for want, size in zip(op.type.shape, result.shape, strict=True)), op
        results.append(result)
    return value(function.result)


def _call(op: Op, values: list[Any]) -> torch.Tensor:
    if op.name == "attnc.literal":
        shape = [size or 0 for size in op.type.shape]
        return torch.tensor(values[0], dtype=getattr(torch, op.type.dtype)).reshape(shape)
    _, name, overload = op.name.split(".")
    if (name, overload) == ("index", "Tensor"):
        # torch takes a None for a dim that is not indexed; out-of-range indices are the caller's affair.
        return torch.ops.aten.index.Tensor(values[0], [i if i is None else i.long() for i in values[1]])
    if (name, overload) == ("to", "dtype"):
        return values[0].to(values[1])
    function = getattr(getattr(torch.ops.aten, name), overload)
    schema = function._schema.arguments
    positional = [v for v, parameter in zip(values, schema, strict=True) if not parameter.kwarg_only]
    named = {p.name: v for v, p in zip(values, schema, strict=True) if p.kwarg_only and v is not None}
    return function(*positional, **named)
