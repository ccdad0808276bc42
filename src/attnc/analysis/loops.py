"""What a `linalg.generic` is as a loop: whether its results are combined by one associative operation, what they begin with."""

from __future__ import annotations

from xdsl.dialects.linalg import ops as linalg
from xdsl.ir import Block, Operation, SSAValue

COMBINERS = {
    *("arith.addf", "arith.mulf", "arith.maximumf", "arith.minimumf", "arith.maxnumf", "arith.minnumf"),
    *("arith.addi", "arith.muli", "arith.maxsi", "arith.minsi", "arith.maxui", "arith.minui"),
    *("arith.andi", "arith.ori", "arith.xori"),
}


def combiner_of(block: Block, position: int) -> str | None:
    """The operation that combines the result of argument `position` of a body with what an element gives, if it is one that
    may be regrouped: `yield combine(argument, something else)`."""
    argument = block.args[position]
    uses = list(argument.uses)
    last = block.last_op
    assert last is not None
    inputs = len(block.args) - len(last.operands)
    if position - inputs < 0 or len(uses) != 1:
        return None
    op = uses[0].operation
    if op.name not in COMBINERS or op.parent is not block or last.operands[position - inputs] is not op.results[0]:
        return None
    return op.name if len(list(op.results[0].uses)) == 1 else None


def start_of(value: SSAValue) -> SSAValue | None:
    """The scalar that a reduction begins with, where its initial tensor is filled with one."""
    owner = value.owner
    return owner.inputs[0] if isinstance(owner, linalg.FillOp) else None


def is_parallel(op: linalg.GenericOp) -> bool:
    """Whether no dimension is reduced."""
    return all(iterator.data.value == "parallel" for iterator in op.iterator_types)


def reads_result(op: linalg.GenericOp) -> bool:
    """Whether the body uses what the results hold before."""
    return any(argument.uses for argument in op.body.block.args[len(op.inputs) :])


def is_product(op: Operation) -> bool:
    """Whether it is a contraction: products of two inputs' elements are summed over a dimension, as a matrix product does."""
    if not isinstance(op, linalg.GenericOp) or is_parallel(op) or len(op.inputs) != 2:
        return False
    maps = [attribute.data for attribute in op.indexing_maps]
    reduced = {n for n, iterator in enumerate(op.iterator_types) if iterator.data.value == "reduction"}
    used = [map_.used_dims() for map_ in maps[:2]]
    shared = reduced & set(used[0]) & set(used[1])
    own = (set(used[0]) ^ set(used[1])) - reduced
    if not shared or not own:
        return False
    return any(inner.name in ("arith.mulf", "arith.muli") for inner in op.body.block.ops)
