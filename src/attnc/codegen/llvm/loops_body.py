"""What a loop's function says: its one `linalg.generic`, its operands, and how results begin and are combined."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from xdsl.dialects import tensor
from xdsl.dialects.arith import ConstantOp
from xdsl.dialects.builtin import DenseArrayBase, IndexType, MemRefType, StridedLayoutAttr, TensorType, UnitAttr, i32
from xdsl.dialects.func import FuncOp
from xdsl.dialects.linalg import ops as linalg
from xdsl.ir import Attribute, Block, BlockArgument, Operation, SSAValue
from xdsl.rewriter import Rewriter

from attnc.analysis.loops import combiner_of, start_of
from attnc.dialects import tile
from attnc.errors import LoweringError


@dataclass
class Gathered:
    """A tensor that the body reads by `tensor.extract`."""

    value: SSAValue
    rank: int
    memref: MemRefType


@dataclass
class LoopBody:
    """A loop's body: arguments of `block` are the inputs' elements, then the results' so far, then positions (`indices`:
    the dimension each is of)."""

    block: Block
    yielded: list[SSAValue]
    inputs: list[Attribute]
    results: list[Attribute]
    starts: list[SSAValue | None]
    """For each result of a reduction the constant it begins with, or None where that is read from a tensor."""
    combiners: list[str]
    operands: list[Attribute] = field(default_factory=list)
    gathers: list[Gathered] = field(default_factory=list)
    numbers: list[SSAValue] = field(default_factory=list)
    indices: list[tuple[int, SSAValue]] = field(default_factory=list)

    @property
    def element_types(self) -> list[Attribute]:
        return [*self.operands, *(g.memref.element_type for g in self.gathers)]

    @property
    def cost(self) -> int:
        """Operations of one element, about."""
        return sum(20 if op.name.startswith("math.") else 1 for op in self.block.ops)


def loop_body(function: FuncOp) -> LoopBody:
    """The body of a loop's function, rewritten in place for the emitter. Raises `LoweringError` where it is no loop."""
    generics = [op for op in function.body.block.ops if isinstance(op, linalg.GenericOp)]
    if len(generics) != 1:
        raise LoweringError(f"@{function.sym_name.data}: a loop is one linalg.generic, not {len(generics)}")
    op = generics[0]
    block = op.body.block
    last = block.last_op
    assert last is not None
    reduces = any(iterator.data.value == "reduction" for iterator in op.iterator_types)
    inputs = [cast(TensorType, value.type).element_type for value in op.inputs]
    results = [cast(TensorType, value.type).element_type for value in op.outputs]
    starts: list[SSAValue | None] = []
    if reduces or any(argument.uses for argument in block.args[len(inputs) :]):
        starts = [start_of(value) for value in op.outputs]
    combiners = [combiner_of(block, len(inputs) + n) or "" for n in range(len(results))]
    body = LoopBody(block, list(last.operands), inputs, results, starts, combiners)
    body.operands = [*inputs, *results, *(t for t, start in zip(results, starts, strict=False) if start is None)]
    _replace_indices(body)
    for argument in function.body.block.args:
        uses = [use.operation for use in argument.uses]
        if not isinstance(argument.type, TensorType):
            body.numbers.append(argument)
        elif any(isinstance(user, tensor.ExtractOp) for user in uses):
            body.gathers.append(_gathered(argument))
    _replace_extracts(body)
    _hoist_constants(function, body)
    body.yielded = list(last.operands)  # what they were may have been replaced
    return body


def _replace_indices(body: LoopBody) -> None:
    for op in list(body.block.walk()):
        if isinstance(op, linalg.IndexOp):
            number = op.dim.value.data
            known = next((value for n, value in body.indices if n == number), None)
            if known is None:
                known = body.block.insert_arg(IndexType(), len(body.block.args))
                body.indices.append((number, known))
            op.result.replace_all_uses_with(known)
            Rewriter.erase_op(op)


def _gathered(argument: BlockArgument) -> Gathered:
    type_ = cast(TensorType, argument.type)
    rank = len(type_.shape)
    memref = MemRefType(type_.element_type, [-1] * rank, StridedLayoutAttr([None] * rank))
    return Gathered(argument, rank, memref)


def _replace_extracts(body: LoopBody) -> None:
    """Reads become gathers; those without `attnc.checked` are in range by the writer's word."""
    for op in list(body.block.walk()):
        if isinstance(op, tensor.ExtractOp):
            new = tile.GatherOp.create(
                operands=[op.tensor, *op.indices],
                attributes={"operandSegmentSizes": DenseArrayBase.from_list(i32, [1, len(op.indices), 0])},
                result_types=[op.result.type],
            )
            if "attnc.checked" not in op.attributes:
                new.attributes["proven"] = UnitAttr()
            Rewriter.replace_op(op, new)


def _hoist_constants(function: FuncOp, body: LoopBody) -> None:
    """Constants of the function itself go into the body, where the emitter meets them."""
    first = body.block.first_op
    for op in list(function.body.block.ops):
        if isinstance(op, ConstantOp) and not isinstance(op.result.type, TensorType):
            copy: Operation = op.clone()
            if first is None:
                body.block.add_op(copy)
            else:
                body.block.insert_op_before(copy, first)
            op.result.replace_uses_with_if(copy.results[0], lambda use: use.operation is not None)
            body.starts = [copy.results[0] if start is op.result else start for start in body.starts]
