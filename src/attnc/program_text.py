"""A program as text: what the operator `attnc::attention` carries in a graph, so that the graph needs nothing of this process.

The text is JSON: the trace record of the mods, which results are asked, and how a BlockMask's lists are read. What follows from
the tensors of a call (dtype, head dims, strides) is not in it, so one text serves every layout; it is compiled, or found in the
caches, when the operator first runs on such tensors. Nor are the places in the user's files.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from attnc.capture.record import (
    Argument,
    Captured,
    CaptureType,
    Function,
    ListOf,
    Literal,
    Number,
    NumberType,
    Op,
    Operand,
    Record,
    Result,
    TensorType,
)
from attnc.errors import ProgramTextError

VERSION = 1
KEPT = 512
NOTHING = Record(None, None)


@dataclass(frozen=True)
class Program:
    """What a call computes, its tensors aside.

    `tensor_numbers` are the places of numbers that come as 0-d f64 tensors. `record`: both mods; `return_lse`, `return_max`:
    which statistics are asked; `wide_lse`: lse is f64, for a backward pass; `block_size`: (queries, keys) where a BlockMask's
    lists are passed, else None; `mask_full_blocks`: whether the mask_mod applies in its full blocks, too.
    """

    record: Record = NOTHING
    return_lse: bool = False
    return_max: bool = False
    block_size: tuple[int, int] | None = None
    mask_full_blocks: bool = False
    tensor_numbers: tuple[int, ...] = ()
    wide_lse: bool = False


def to_text(program: Program) -> str:
    """The program as one line of JSON."""
    record = program.record
    data = {
        "attnc": VERSION,
        "score_mod": _function(record.score),
        "mask_mod": _function(record.mask),
        "captures": [[c.name, c.type.dtype, c.type.shape, c.strides] for c in record.captures],
        "numbers": [[n.name, n.kind] for n in record.numbers],
        "lse": program.return_lse,
        "max": program.return_max,
        "block_size": program.block_size,
        "mask_full_blocks": program.mask_full_blocks,
        "tensor_numbers": program.tensor_numbers,
    }
    if program.wide_lse:
        data["wide_lse"] = True
    return json.dumps(data, separators=(",", ":"))


@functools.lru_cache(maxsize=KEPT)
def from_text(text: str) -> Program:
    """The program of a text. Raises `ProgramTextError` where it is none, or one of another version."""
    try:
        data = json.loads(text)
        version = data["attnc"]
    except (ValueError, TypeError, KeyError) as error:
        raise ProgramTextError(f"no program text: {text[:80]!r}") from error
    if version != VERSION:
        raise ProgramTextError(f"the program text is of version {version}, this attnc reads version {VERSION}")
    try:
        captures = tuple(CaptureType(name, _type(dtype, shape), strides) for name, dtype, shape, strides in data["captures"])
        numbers = tuple(NumberType(name, kind) for name, kind in data["numbers"])
        record = Record(_read_function(data["score_mod"]), _read_function(data["mask_mod"]), captures, numbers)
        block_size = data["block_size"]
        return Program(
            record,
            bool(data["lse"]),
            bool(data["max"]),
            None if block_size is None else (int(block_size[0]), int(block_size[1])),
            bool(data["mask_full_blocks"]),
            tuple(map(int, data["tensor_numbers"])),
            bool(data.get("wide_lse", False)),
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ProgramTextError(f"damaged program text: {error!r}") from error


@functools.lru_cache(maxsize=KEPT)
def with_strides(record: Record, strides: tuple[str, ...]) -> Record:
    """The record for captured tensors of other stride patterns than those it was traced with."""
    if all(capture.strides == pattern for capture, pattern in zip(record.captures, strides, strict=True)):
        return record
    captures = tuple(replace(c, strides=pattern) for c, pattern in zip(record.captures, strides, strict=True))
    return Record(record.score, record.mask, captures, record.numbers)


# -- functions, operations, operands ----------------------------------------------------------------------------------------
def _function(function: Function | None) -> Any:
    if function is None:
        return None
    return {
        "arguments": [[type_.dtype, type_.shape] for type_ in function.arguments],
        "ops": [_op(op) for op in function.ops],
        "result": _operand(function.result),
    }


def _op(op: Op) -> list[Any]:
    return [op.name, [_operand(operand) for operand in op.operands], op.type.dtype, op.type.shape]


def _operand(operand: Operand) -> Any:
    match operand:
        case Argument(index):
            return ["argument", index]
        case Captured(index):
            return ["capture", index]
        case Number(index):
            return ["number", index]
        case Result(op):
            return ["result", op]
        case ListOf(items):
            return ["list", *map(_operand, items)]
        case Literal():
            return ["literal", operand.kind, operand.text]
    raise AssertionError(operand)


def _read_function(data: Any) -> Function | None:
    if data is None:
        return None
    arguments = tuple(_type(dtype, shape) for dtype, shape in data["arguments"])
    ops = tuple(
        Op(str(name), tuple(map(_read_operand, operands)), _type(dtype, shape)) for name, operands, dtype, shape in data["ops"]
    )
    return Function(arguments, ops, _read_operand(data["result"]))


def _read_operand(data: Sequence[Any]) -> Operand:
    kind, *rest = data
    if kind == "list":
        return ListOf(tuple(map(_read_operand, rest)))
    if kind == "literal":
        literal = Literal(str(rest[0]), str(rest[1]))
        _ = literal.value  # a text that does not fit its kind raises now
        return literal
    return {"argument": Argument, "capture": Captured, "number": Number, "result": Result}[kind](int(rest[0]))


def _type(dtype: str, shape: Sequence[int | None]) -> TensorType:
    return TensorType(str(dtype), tuple(None if size is None else int(size) for size in shape))
