"""Attention written out in plain linalg, for other compilers: products, softmax, and every rule about dead keys.

Before:

    %r = "iree_linalg_ext.attention"(%q, %k, %v, %scale, %init) ({ region })

After (score dims: batch, rows, keys):

    %s = linalg.generic ins(%q, %k) { mulf, addf }                 summed over the head dims, in f32 (f64 for f64)
    %x = linalg.generic ins(%s) { region of %s * %scale, its positions as linalg.index }
    %m = linalg.generic ins(%x) { maximumf }                       over the keys, from -inf
    %p = linalg.generic ins(%x, %m) { exp(%x - (%m == -inf ? 0 : %m)) }
    %l = linalg.generic ins(%p) { addf }
    %a = linalg.generic ins(%x, %p, %v) { %x == -inf ? 0 : %p * %v, addf }
    %r = linalg.generic ins(%a, %l) { %l == 0 ? 0 : %a / %l }

`online_attention` becomes the same without the last step, its initial values rescaled to the new maximum. This is no step on
the way to native code: `attnc opt --emit-iree` runs it on those operations that IREE 3.13 computes otherwise than they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from xdsl.dialects import tensor
from xdsl.dialects.builtin import (
    DYNAMIC_INDEX,
    AffineMapAttr,
    AnyFloat,
    Float64Type,
    IntegerType,
    ModuleOp,
    TensorType,
    f32,
    f64,
)
from xdsl.dialects.linalg import ops as linalg
from xdsl.dialects.linalg.attrs import IteratorTypeAttr
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.ir.affine import AffineConstantExpr, AffineDimExpr, AffineExpr, AffineMap
from xdsl.rewriter import InsertPoint, Rewriter

from attnc.analysis.roles import Dims, map_results
from attnc.dialects.building import Builder
from attnc.dialects.linalg_ext import AttentionLike, AttentionOp, IndexOp, OnlineAttentionOp, YieldOp
from attnc.target import Target

NAME = "attention-to-linalg"
IREE_HEAD_DIM = 128
"""IREE 3.13 computes head dims up to this rightly."""


def run(module: ModuleOp, target: Target) -> None:
    """Writes out every attention of the module."""
    for op in list(module.walk()):
        if isinstance(op, AttentionOp | OnlineAttentionOp):
            write_out(op)


def write_out_for_iree(module: ModuleOp) -> None:
    """Writes out those that IREE 3.13 computes otherwise."""
    for op in list(module.walk()):
        if isinstance(op, AttentionOp | OnlineAttentionOp) and not iree_is_right(op):
            write_out(op)


def iree_is_right(op: AttentionLike) -> bool:
    """Whether IREE 3.13's CPU code gives an attention's own meaning: no region, no mask, all sizes known, head dims of at most
    128, and the domain (batch…, rows, head dim, keys, columns) in that order, as in IREE's own tests."""
    if not isinstance(op, AttentionOp) or op.mask is not None or len(list(op.region.block.ops)) > 1:
        return False
    roles = op.roles
    if any(len(dims) != 1 for dims in (roles.m, roles.k1, roles.k2, roles.n)):
        return False
    order = (*roles.batch, *roles.m, *roles.k1, *roles.k2, *roles.n)
    if order != tuple(range(len(order))):
        return False
    wanted = (
        (*roles.batch, *roles.m, *roles.k1),
        (*roles.batch, *roles.k2, *roles.k1),
        (*roles.batch, *roles.k2, *roles.n),
        (),
        (*roles.batch, *roles.m, *roles.n),
    )
    if tuple(map_results(map_) for map_ in op.maps) != wanted:
        return False
    shapes = [cast(TensorType, operand.type).get_shape() for operand in (op.query, op.value)]
    return all(size >= 0 for shape in shapes for size in shape) and max(shape[-1] for shape in shapes) <= IREE_HEAD_DIM


def write_out(op: AttentionLike) -> None:
    """Replaces one attention."""
    block = Block()
    results = _WritingOut(op, Builder(block)).results()
    ops = list(block.ops)
    for each in ops:
        each.detach()
    Rewriter.insert_op(ops, InsertPoint.before(op))
    for old, new in zip(op.results, results, strict=True):
        new.name_hint = old.name_hint
        old.replace_all_uses_with(new)
    Rewriter.erase_op(op)


class _WritingOut:
    """Builds the operations for one attention."""

    def __init__(self, op: AttentionLike, build: Builder):
        self.op, self.build, self.roles = op, build, op.roles
        types = [cast(TensorType, operand.type).element_type for operand in (op.query, op.key, op.value)]
        self.element = f64 if f64 in (*types, op.region.block.args[0].type) else f32
        self.sizes: dict[int, int | SSAValue] = {}
        for dim, (operand, position) in enumerate(op.extents):
            size = cast(TensorType, operand.type).get_shape()[position]
            self.sizes[dim] = size if size >= 0 else build.add(tensor.DimOp(operand, build.constant(position)), "size")

    def results(self) -> list[SSAValue]:
        op, roles = self.op, self.roles
        score, row = roles.score, roles.row
        query, key, value = (self._operand(n) for n in range(3))
        zero = self.build.constant(0.0, self.element, "zero")
        lowest = self.build.constant(float("-inf"), self.element, "minus_infinity")
        products = self._loop([query, key], self._filled(score, zero), (score, roles.k1), self._multiply, "products")
        inputs = [products]
        if op.mask is not None:
            inputs.append(self._operand(4))
        scores = self._loop(inputs, self._empty(score), (score, ()), self._region, "scores")
        online = isinstance(op, OnlineAttentionOp)
        maximum = (op.max, map_results(op.maps[-2])) if online else self._filled(row, lowest)
        top = self._loop([scores], maximum, (row, roles.k2), lambda b, x, m: b.binary("maximumf", m, x), "max")
        weights = self._loop([scores, top], self._empty(score), (score, ()), self._exponential, "weights")
        out = tuple(d for d in map_results(op.maps[-len(op.inits)]) if d is not None)
        sum_start, acc_start = self._filled(row, zero), self._filled(out, zero)
        if online:
            sum_start = self._rescaled(op.sum, op.maps[-1], top)
            acc_start = self._rescaled(op.acc, op.maps[-3], top)
        total = self._loop([weights], sum_start, (row, roles.k2), lambda b, p, s: b.binary("addf", s, p), "sum")
        acc = self._loop([scores, weights, value], acc_start, (out, roles.k2), self._weigh, "acc")
        if online:
            return [acc[0], top[0], total[0]]
        type_ = cast(TensorType, op.inits[0].type)
        empty = (op.inits[0], map_results(op.maps[-1]))
        return [self._loop([acc, total], empty, (out, ()), self._normalise(type_.element_type), "out")[0]]

    # -- operands -----------------------------------------------------------------------------------------------------

    def _operand(self, position: int) -> tuple[SSAValue, tuple[int | None, ...]]:
        return self.op.operands[position], map_results(self.op.maps[position])

    def _empty(self, dims: Dims, element: Attribute | None = None) -> tuple[SSAValue, tuple[int | None, ...]]:
        sizes = [self.sizes[dim] for dim in dims]
        type_ = TensorType(element or self.element, [size if isinstance(size, int) else DYNAMIC_INDEX for size in sizes])
        return self.build.add(tensor.EmptyOp([s for s in sizes if not isinstance(s, int)], type_)), dims

    def _filled(self, dims: Dims, value: SSAValue) -> tuple[SSAValue, tuple[int | None, ...]]:
        empty, picked = self._empty(dims)
        return self.build.add(linalg.FillOp([value], [empty])), picked

    def _loop(
        self,
        inputs: Sequence[tuple[SSAValue, tuple[int | None, ...]]],
        init: tuple[SSAValue, tuple[int | None, ...]],
        dims: tuple[Dims, Dims],
        body: Callable[..., SSAValue],
        hint: str,
    ) -> tuple[SSAValue, tuple[int | None, ...]]:
        """A linalg.generic over the parallel and the reduced dims of `dims`."""
        order = (*dims[0], *dims[1])
        self.order = order
        operands = [*inputs, init]
        block = Block(arg_types=[cast(TensorType, value.type).element_type for value, _ in operands])
        inner = Builder(block)
        inner.insert(linalg.YieldOp(body(inner, *block.args)))
        maps = []
        for _, picked in operands:
            results: list[AffineExpr] = [
                AffineConstantExpr(0) if dim is None else AffineDimExpr(order.index(dim)) for dim in picked
            ]
            maps.append(AffineMapAttr(AffineMap(len(order), 0, tuple(results))))
        iterators = [IteratorTypeAttr.parallel()] * len(dims[0]) + [IteratorTypeAttr.reduction()] * len(dims[1])
        values = [value for value, _ in inputs]
        generic = linalg.GenericOp(values, [init[0]], Region(block), maps, iterators, [init[0].type])
        return self.build.add(generic, hint), init[1]

    def _wide(self, b: Builder, value: SSAValue) -> SSAValue:
        if value.type == self.element:
            return value
        narrows = isinstance(value.type, Float64Type)
        return b.cast("truncf" if narrows else "extf", value, self.element)

    # -- bodies -------------------------------------------------------------------------------------------------------

    def _multiply(self, b: Builder, x: SSAValue, y: SSAValue, total: SSAValue) -> SSAValue:
        return b.binary("addf", total, b.binary("mulf", self._wide(b, x), self._wide(b, y)))

    def _region(self, b: Builder, product: SSAValue, *rest: SSAValue) -> SSAValue:
        """The region on the scaled score, and the mask operand."""
        op = self.op
        source = op.region.block
        own = source.args[0].type
        score = b.binary("mulf", product, self._wide(b, op.scale), "natural")
        mapper: dict[SSAValue, SSAValue] = {source.args[0]: score if own == self.element else b.cast("truncf", score, own)}
        last = cast(YieldOp, source.last_op)
        for each in source.ops:
            if each is last:
                break
            if isinstance(each, IndexOp):
                mapper[each.result] = b.add(linalg.IndexOp(self.order.index(each.dimension)))
                continue
            copy = each.clone(mapper)
            for inner in list(copy.walk()):
                if isinstance(inner, IndexOp):
                    index = linalg.IndexOp(self.order.index(inner.dimension))
                    assert inner.parent is not None
                    inner.parent.insert_op_before(index, inner)
                    inner.result.replace_all_uses_with(index.result)
                    Rewriter.erase_op(inner)
            b.block.add_op(copy)
            for inner in [i for i in copy.walk() if isinstance(i, tensor.ExtractOp) and "attnc.checked" in i.attributes]:
                _wrap(inner)
        result = self._wide(b, mapper.get(last.value, last.value))
        if op.mask is None:
            return result
        mask = rest[0]
        if isinstance(mask.type, IntegerType):
            if mask.type.width.data != 1:
                mask = b.compare("ne", mask, b.constant(0, mask.type))
            return b.select(mask, result, b.constant(float("-inf"), self.element))
        return b.binary("addf", result, self._wide(b, mask))

    def _anchor(self, b: Builder, top: SSAValue) -> SSAValue:
        lowest = b.constant(float("-inf"), self.element)
        return b.select(b.compare_floats("oeq", top, lowest), b.constant(0.0, self.element), top)

    def _exponential(self, b: Builder, score: SSAValue, top: SSAValue, _: SSAValue) -> SSAValue:
        return b.unary_math("exp", b.binary("subf", score, self._anchor(b, self._wide(b, top))))

    def _weigh(self, b: Builder, score: SSAValue, weight: SSAValue, value: SSAValue, total: SSAValue) -> SSAValue:
        dead = b.compare_floats("oeq", score, b.constant(float("-inf"), self.element))
        product = b.binary("mulf", weight, self._wide(b, value))
        return b.binary("addf", total, b.select(dead, b.constant(0.0, self.element), product))

    def _normalise(self, type_: Attribute) -> Callable[..., SSAValue]:
        def body(b: Builder, acc: SSAValue, total: SSAValue, _: SSAValue) -> SSAValue:
            zero = b.constant(0.0, self.element)
            result = b.select(b.compare_floats("oeq", total, zero), zero, b.binary("divf", acc, total))
            if type_ == self.element:
                return result
            wider = cast(AnyFloat, type_).bitwidth > cast(AnyFloat, self.element).bitwidth
            return b.cast("extf" if wider else "truncf", result, type_)

        return body

    def _rescaled(
        self, init: SSAValue, map_: AffineMap, top: tuple[SSAValue, tuple[int | None, ...]]
    ) -> tuple[SSAValue, tuple[int | None, ...]]:
        """Initial values of accumulator or sum, relative to the new maximum."""
        op = cast(OnlineAttentionOp, self.op)
        picked = map_results(map_)
        dims = tuple(dim for dim in picked if dim is not None)

        def body(b: Builder, x: SSAValue, old: SSAValue, new: SSAValue, _: SSAValue) -> SSAValue:
            return b.binary("mulf", x, b.unary_math("exp", b.binary("subf", old, self._anchor(b, new))))

        inputs = [(init, picked), (op.max, map_results(op.maps[-2])), top]
        empty = (init, picked)
        return self._loop(inputs, empty, (dims, ()), body, "rescaled")


def _wrap(op: tensor.ExtractOp) -> None:
    """An index by torch's rules as one by MLIR's: negative ones count from the end."""
    block = Block()
    build = Builder(block)
    indices = []
    for d, index in enumerate(op.indices):
        size = build.add(tensor.DimOp(op.tensor, build.constant(d)))
        negative = build.compare("slt", index, build.constant(0))
        indices.append(build.select(negative, build.binary("addi", index, size), index))
    assert op.parent is not None
    ops: list[Operation] = list(block.ops)
    for each in ops:
        each.detach()
        op.parent.insert_op_before(each, op)
    op.operands = [op.tensor, *indices]
