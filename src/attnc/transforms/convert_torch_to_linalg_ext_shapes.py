"""What stands around the attention's region: reshapes, and the small `linalg.generic`s that finish an online attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from xdsl.dialects import arith, linalg, math, tensor
from xdsl.dialects.builtin import DYNAMIC_INDEX, AffineMapAttr, ArrayAttr, DenseArrayBase, IntegerAttr, TensorType
from xdsl.dialects.linalg import IteratorTypeAttr
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.ir.affine import AffineDimExpr, AffineMap

from attnc.transforms.convert_torch_to_linalg_ext_region import RegionBuilder, i64


def shape_of(value: SSAValue) -> tuple[int, ...]:
    return cast(TensorType, value.type).get_shape()


def element_of(value: SSAValue) -> Attribute:
    return cast(TensorType, value.type).element_type


def hinted(value: SSAValue, hint: str) -> SSAValue:
    """`value`, named unless it has a name."""
    if value.name_hint is None:
        value.name_hint = hint
    return value


def appended(block: Block, op: Operation, hint: str) -> SSAValue:
    block.add_op(op)
    op.results[0].name_hint = hint
    return op.results[0]


def reassociation(*groups: Sequence[int]) -> ArrayAttr[ArrayAttr[IntegerAttr]]:
    return ArrayAttr(ArrayAttr(IntegerAttr(dim, i64) for dim in group) for group in groups)


def expand(block: Block, value: SSAValue, sizes: Sequence[SSAValue | int], hint: str) -> SSAValue:
    """`value` with its dim 1 as two; `sizes` are those of the result."""
    static = [size if isinstance(size, int) else DYNAMIC_INDEX for size in sizes]
    op = tensor.ExpandShapeOp(
        value,
        [size for size in sizes if isinstance(size, SSAValue)],
        reassociation([0], [1, 2], *([dim] for dim in range(3, len(sizes)))),
        DenseArrayBase.from_list(i64, static),
        TensorType(element_of(value), [size if isinstance(size, int) else DYNAMIC_INDEX for size in sizes]),
    )
    return appended(block, op, hint)


def collapse(block: Block, value: SSAValue, hint: str) -> SSAValue:
    batch, _, _, *rest = shape_of(value)
    groups = [[0], [1, 2], *([dim + 3] for dim in range(len(rest)))]
    op = tensor.CollapseShapeOp.create(
        operands=[value],
        properties={"reassociation": reassociation(*groups)},
        result_types=[TensorType(element_of(value), [batch, DYNAMIC_INDEX, *rest])],
    )
    return appended(block, op, hint)


def generic(block: Block, inputs: Sequence[SSAValue], init: SSAValue, body: Block, hint: str) -> SSAValue:
    """An elementwise `linalg.generic` over the shape of `init`; inputs of lower rank lack its last dims."""
    rank = len(shape_of(init))
    maps = [AffineMapAttr(AffineMap(rank, 0, tuple(map(AffineDimExpr, range(len(shape_of(v))))))) for v in (*inputs, init)]
    parallel = [IteratorTypeAttr.parallel()] * rank
    return appended(block, linalg.GenericOp(inputs, [init], Region(body), maps, parallel, [init.type]), hint)


def normalised(precision: Attribute, element: Attribute) -> Block:
    """`acc / sum`, 0 for a row without a live key, rounded to the result's type."""
    block = Block(arg_types=[precision, precision, element])
    acc, sum_, _ = block.args
    acc.name_hint, sum_.name_hint = "acc", "sum"
    r = RegionBuilder(block)
    zero = r.constant(precision, 0.0)
    none = r.compare("eq", sum_, zero)
    result = r.select(none, zero, r.divide(acc, sum_))
    if element != precision:
        result = r.cast(arith.TruncFOp, result, element)
    block.add_op(linalg.YieldOp(result))
    return block


def log_sum(precision: Attribute, element: Attribute) -> Block:
    """`max + log(sum)`, which is -inf for a row without a live key, computed in the result's type."""
    block = Block(arg_types=[precision, precision, element])
    max_, sum_, _ = block.args
    max_.name_hint, sum_.name_hint = "max", "sum"
    r = RegionBuilder(block)
    wide = [value if element == precision else r.cast(arith.ExtFOp, value, element) for value in (max_, sum_)]
    block.add_op(linalg.YieldOp(r.add(wide[0], r.math(math.LogOp, wide[1]))))
    return block
