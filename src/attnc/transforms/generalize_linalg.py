"""Named linalg operations become `linalg.generic`, so that what follows meets one form.

Before:

    %t = linalg.transpose ins(%k) outs(%e0) permutation = [0, 2, 1]
    %s = linalg.batch_matmul ins(%q, %t) outs(%zero)
    %p = linalg.softmax dimension(2) ins(%s) outs(%e1)

After:

    %t = linalg.generic {maps = [(a, b, c) -> (a, c, b), (a, b, c) -> (a, b, c)], parallel} ins(%k) outs(%e0) { yield %in }
    %s = linalg.generic {maps = [(b, i, j, k) -> (b, i, k), (b, k, j), (b, i, j)], k: reduction} ins(%q, %t) outs(%zero) { mulf, addf }
    %m = linalg.generic { maximumf over dimension 2, from -inf }
    %x = linalg.generic { exp(%s - %m) }
    %l = linalg.generic { addf over dimension 2, from 0 }
    %p = linalg.generic { %x / %l }

`linalg.fill` stays. Products widen what is narrower than their result, as linalg defines it.
"""  # noqa: E501 - IR is long

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from xdsl.dialects import tensor
from xdsl.dialects.builtin import AffineMapAttr, ModuleOp, TensorType
from xdsl.dialects.linalg import ops as linalg
from xdsl.dialects.linalg.abstract_ops import LinalgStructuredOperation
from xdsl.dialects.linalg.attrs import IteratorTypeAttr
from xdsl.ir import Block, Operation, Region, SSAValue
from xdsl.ir.affine import AffineDimExpr, AffineMap

from attnc.dialects.building import Builder
from attnc.dialects.linalg_named import MapOp, Product, SoftmaxOp, accumulated
from attnc.target import Target

NAME = "generalize-linalg"


def run(module: ModuleOp, target: Target) -> None:
    """Rewrites every named operation of the module but `linalg.fill`."""
    for op in list(module.walk()):
        if isinstance(op, linalg.GenericOp | linalg.FillOp) or not op.name.startswith("linalg."):
            continue
        build = Builder(Block())
        result = _generalized(op, build)
        if result is None:
            continue
        assert op.parent is not None
        for new in list(build.block.ops):
            new.detach()
            new.attributes |= {name: value for name, value in op.attributes.items() if name.startswith("attnc.")}
            op.parent.insert_op_before(new, op)
        result.name_hint = op.results[0].name_hint
        op.results[0].replace_all_uses_with(result)
        op.detach()
        op.erase()


def _generalized(op: Operation, build: Builder) -> SSAValue | None:
    if not op.results:
        return None  # on buffers
    if isinstance(op, linalg.BroadcastOp):
        rank = len(cast(TensorType, op.init.type).get_shape())
        new = op.dimensions.get_values()
        kept = tuple(AffineDimExpr(dim) for dim in range(rank) if dim not in new)
        return generic(build, [op.input], op.init, [AffineMap(rank, 0, kept)], lambda _, args: args[0])
    if isinstance(op, linalg.ReduceOp):
        rank = len(cast(TensorType, op.input.type).get_shape())
        reduced = tuple(op.dimensions.get_values())
        out = AffineMap(rank, 0, tuple(AffineDimExpr(dim) for dim in range(rank) if dim not in reduced))
        return _moved(build, [op.input], [op.init], [AffineMap.identity(rank), out], op.detach_region(op.region), reduced)
    if isinstance(op, MapOp):
        body = op.detach_region(op.body)
        if len(body.block.args) == len(op.inputs):
            body.block.insert_arg(cast(TensorType, op.init.type).element_type, len(op.inputs))
        rank = len(cast(TensorType, op.init.type).get_shape())
        maps = [AffineMap.identity(rank)] * (len(op.inputs) + 1)
        return _moved(build, op.inputs, [op.init], maps, body, ())
    if isinstance(op, SoftmaxOp):
        return _softmax(op, build)
    if isinstance(op, Product):
        return _product(op, build)
    if isinstance(op, LinalgStructuredOperation) and not op.name.startswith(("linalg.conv", "linalg.pooling", "linalg.quant")):
        new = linalg.GenericOp(
            op.inputs, op.outputs, op.detach_region(op.body), op.get_indexing_maps(), op.get_iterator_types(), op.res.types
        )
        return build.add(new)
    return None


def _product(op: Product, build: Builder) -> SSAValue:
    maps = [attribute.data for attribute in op.get_indexing_maps()]
    reduced = tuple(dim for dim, kind in enumerate(op.get_iterator_types()) if kind == IteratorTypeAttr.reduction())
    return generic(build, op.inputs, op.outputs[0], maps[:2], accumulated, reduced, maps[2])


def _softmax(op: SoftmaxOp, build: Builder) -> SSAValue:
    type_ = cast(TensorType, op.result.type)
    shape, dimension = type_.get_shape(), op.dimension.value.data
    rank = len(shape)
    kept = [dim for dim in range(rank) if dim != dimension]
    rows = AffineMap(rank, 0, tuple(AffineDimExpr(dim) for dim in kept))
    everything = AffineMap.identity(rank)

    def filled(start: float, hint: str) -> SSAValue:
        sizes = [build.add(tensor.DimOp(op.input, build.constant(dim)), "size") for dim in kept if shape[dim] < 0]
        empty = build.add(tensor.EmptyOp(sizes, TensorType(type_.element_type, [shape[dim] for dim in kept])))
        return build.add(linalg.FillOp([build.constant(start, type_.element_type)], [empty]), hint)

    def combining(name: str) -> Callable[[Builder, Sequence[SSAValue]], SSAValue]:
        return lambda block, args: block.binary(name, args[0], args[1])

    def weight(block: Builder, args: Sequence[SSAValue]) -> SSAValue:
        return block.unary_math("exp", block.binary("subf", args[0], args[1]))

    reduced = (dimension,)
    top = generic(build, [op.input], filled(float("-inf"), "lowest"), [everything], combining("maximumf"), reduced, rows)
    weights = generic(build, [op.input, top], op.output, [everything, rows], weight)
    total = generic(build, [weights], filled(0.0, "none"), [everything], combining("addf"), reduced, rows)
    return generic(build, [weights, total], op.output, [everything, rows], combining("divf"))


def generic(
    build: Builder,
    inputs: Sequence[SSAValue],
    init: SSAValue,
    maps: Sequence[AffineMap],
    body: Callable[[Builder, Sequence[SSAValue]], SSAValue],
    reduced: Sequence[int] = (),
    out: AffineMap | None = None,
) -> SSAValue:
    """Appends a `linalg.generic` whose `body(builder, elements)` gives what it yields; `out` is the identity by default."""
    elements = [value.type.element_type if isinstance(value.type, TensorType) else value.type for value in (*inputs, init)]
    block = Block(arg_types=elements)
    inner = Builder(block)
    inner.insert(linalg.YieldOp(body(inner, block.args)))
    out = out or AffineMap.identity(maps[0].num_dims)
    return _moved(build, inputs, [init], [*maps, out], Region(block), reduced)


def _moved(
    build: Builder,
    inputs: Sequence[SSAValue],
    outputs: Sequence[SSAValue],
    maps: Sequence[AffineMap],
    body: Region,
    reduced: Sequence[int],
) -> SSAValue:
    kinds = [
        IteratorTypeAttr.reduction() if dim in reduced else IteratorTypeAttr.parallel() for dim in range(maps[-1].num_dims)
    ]
    types = [output.type for output in outputs]
    return build.add(linalg.GenericOp(inputs, outputs, body, [AffineMapAttr(map_) for map_ in maps], kinds, types))
