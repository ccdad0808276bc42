"""A column that is joined to a tensor only to be reduced with it, and cut off again, is never joined.

Before:

    %c = tensor.insert_slice %scores, %sinks …                       n + 1 columns
    %e = linalg.generic ins(%c, %row) { exp(%c - %row) }
    %l = linalg.generic {"parallel", "reduction"} ins(%e) { addf }
    %p = linalg.generic ins(%e, %l) { %e / %l }
    %w = tensor.extract_slice %p[0, 0] [m, n]

After:

    %e = linalg.generic ins(%scores, %row) { exp(%scores - %row) }   n columns
    %f = linalg.generic ins(%sinks, %row) { exp(%sinks - %row) }     1 column
    %s = linalg.generic {"parallel", "reduction"} ins(%e) { addf }
    %l = linalg.generic ins(%f, %s) { addf }
    %w = linalg.generic ins(%e, %l) { %e / %l }

So attention with sinks, as models write it out, has scores that come from the product of query and key alone. What is done to
the joined tensor must be elementwise or a reduction over the joined dim, up to slices that take one of its two parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from xdsl.dialects import tensor
from xdsl.dialects.builtin import DYNAMIC_INDEX, AffineMapAttr, ModuleOp, TensorType
from xdsl.dialects.func import FuncOp
from xdsl.dialects.linalg import ops as linalg
from xdsl.dialects.linalg.attrs import IteratorType, IteratorTypeAttr
from xdsl.ir import Block, Operation, SSAValue
from xdsl.ir.affine import AffineConstantExpr, AffineDimExpr, AffineMap

from attnc.analysis.axes import size_key
from attnc.analysis.elements import has_simple_maps, maps_of, reduction_step
from attnc.dialects.building import Builder
from attnc.target import Target
from attnc.transforms.raise_attention_building import erase_unused, insert_before

NAME = "split-concatenations"


def run(module: ModuleOp, target: Target) -> None:
    """Splits every such concatenation of every function of the module."""
    for function in module.ops:
        if isinstance(function, FuncOp):
            for block in function.body.blocks:
                for op in list(block.ops):
                    if isinstance(op, tensor.InsertSliceOp) and op.parent is block and (joined := _joined(op)) is not None:
                        _split(joined)


@dataclass(frozen=True)
class _Joined:
    """A tensor that is `parts[0]`, then, along `dim`, the one column `parts[1]`."""

    value: SSAValue
    dim: int
    parts: tuple[SSAValue, SSAValue]


def _joined(last: tensor.InsertSliceOp) -> _Joined | None:
    first = last.dest.owner
    if not isinstance(first, tensor.InsertSliceOp) or not isinstance(first.dest.owner, tensor.EmptyOp):
        return None
    if first.result.type != last.result.type or len(list(first.result.uses)) != 1:
        return None
    if cast(TensorType, first.source.type).get_num_dims() != cast(TensorType, last.source.type).get_num_dims():
        return None
    if not all(set(op.static_strides.get_values()) == {1} for op in (first, last)):
        return None
    start = last.static_offsets.get_values()
    moved = [dim for dim, offset in enumerate(start) if offset != 0]
    if len(moved) != 1 or any(first.static_offsets.get_values()):
        return None
    dim = moved[0]
    n = _size(first.source, dim)
    if cast(TensorType, last.source.type).get_shape()[dim] != 1:
        return None
    if (size_key(last.offsets[0]) if start[dim] == DYNAMIC_INDEX else start[dim]) != n:
        return None
    for other in range(len(start)):
        sizes = {_size(value, other) for value in (first.dest, first.source, last.source)}
        if other != dim and len(sizes) != 1:
            return None
    return _Joined(last.result, dim, (first.source, last.source))


def _size(value: SSAValue, dim: int) -> object:
    return size_key((value, dim))


def _split(joined: _Joined) -> None:
    order = _users(joined)
    if order is None:
        return
    parts: dict[SSAValue, tuple[SSAValue, SSAValue]] = {joined.value: joined.parts}
    for op, loop in order:
        scratch = Block()
        build = Builder(scratch)
        if isinstance(op, tensor.ExtractSliceOp):
            part = parts[op.source][loop]
            if part.type != op.result.type:
                part = build.add(tensor.CastOp(part, op.result.type))
            new = part
        elif op.iterator_types.data[loop].data == IteratorType.PARALLEL:
            parts[op.results[0]] = (_elementwise(build, op, loop, parts, 0), _elementwise(build, op, loop, parts, 1))
            new = None
        else:
            new = _with_the_column(build, op, loop, parts)
        insert_before(scratch, op)
        if new is not None:
            op.results[0].replace_all_uses_with(new)
    block = joined.value.owner.parent if isinstance(joined.value.owner, Operation) else None
    assert block is not None
    erase_unused(block)


def _users(joined: _Joined) -> list[tuple[linalg.GenericOp | tensor.ExtractSliceOp, int]] | None:
    """What is computed from the joined tensor, in order, each with its loop over the joined dim, or for a slice the number of
    the part that it takes; None where anything else is done to it, or it is never cut."""
    block = joined.value.owner.parent if isinstance(joined.value.owner, Operation) else None
    if block is None:
        return None
    dims = {joined.value: joined.dim}
    found: list[tuple[linalg.GenericOp | tensor.ExtractSliceOp, int]] = []
    for op in block.ops:
        used = [value for inner in op.walk() for value in inner.operands if value in dims]
        if not used:
            continue
        if isinstance(op, tensor.ExtractSliceOp):
            part = _part_taken(op, joined, dims[used[0]])
            if part is None:
                return None
            found.append((op, part))
            continue
        loop = _loop_over(op, dims, len(used))
        if loop is None or not isinstance(op, linalg.GenericOp):
            return None
        found.append((op, loop))
        if op.iterator_types.data[loop].data == IteratorType.PARALLEL:
            dims[op.results[0]] = maps_of(op)[-1].index(loop)
    return found if any(isinstance(op, tensor.ExtractSliceOp) for op, _ in found) else None


def _part_taken(op: tensor.ExtractSliceOp, joined: _Joined, dim: int) -> int | None:
    source, result = op.source, op.result
    rank = cast(TensorType, source.type).get_num_dims()
    static = op.static_offsets.get_values()
    if cast(TensorType, result.type).get_num_dims() != rank or set(op.static_strides.get_values()) != {1}:
        return None
    if any(_size(result, other) != _size(source, other) or static[other] for other in range(rank) if other != dim):
        return None
    offset: object = static[dim]
    if offset == DYNAMIC_INDEX:
        dynamic = [place for place, value in enumerate(static) if value == DYNAMIC_INDEX]
        offset = size_key(op.offsets[dynamic.index(dim)])
    n = _size(joined.parts[0], joined.dim)
    for part, wanted in enumerate(((0, n), (n, 1))):
        if (offset, _size(result, dim)) == wanted:
            return part
    return None


def _loop_over(op: Operation, dims: dict[SSAValue, int], uses: int) -> int | None:
    """The loop of a generic that follows the joined dim; None where it is neither elementwise nor a reduction over it."""
    if not isinstance(op, linalg.GenericOp) or len(op.results) != 1 or not has_simple_maps(op):
        return None
    maps = maps_of(op)
    places = [place for place, operand in enumerate(op.inputs) if operand in dims]
    if len(places) != uses:  # it is read in the body, or written onto
        return None
    loops = {maps[place][dims[op.inputs[place]]] for place in places}
    loop = loops.pop()
    if loop is None or loops:
        return None
    if any(loop in maps[place] for place in range(len(op.inputs)) if place not in places):
        return None
    if any(maps[place].count(loop) != 1 for place in places):
        return None
    if any(isinstance(inner, linalg.IndexOp) and inner.dim.value.data == loop for inner in op.body.walk()):
        return None
    kinds = [kind.data for kind in op.iterator_types]
    out = maps[-1]
    if None in out or any(inner.regions for inner in op.body.block.ops):
        return None
    if kinds[loop] == IteratorType.PARALLEL:
        elementwise = IteratorType.REDUCTION not in kinds and loop in out and not op.body.block.args[-1].uses
        return loop if elementwise else None
    return loop if kinds.count(IteratorType.REDUCTION) == 1 and loop not in out and reduction_step(op) is not None else None


def _elementwise(
    build: Builder, op: linalg.GenericOp, loop: int, parts: dict[SSAValue, tuple[SSAValue, SSAValue]], part: int
) -> SSAValue:
    """The operation on one of the two parts."""
    maps = maps_of(op)
    inputs = [parts[operand][part] if operand in parts else operand for operand in op.inputs]
    whole = cast(TensorType, op.results[0].type)
    source, place = next(
        (new, maps[n].index(loop)) for n, (new, old) in enumerate(zip(inputs, op.inputs, strict=True)) if old in parts
    )
    dim = maps[-1].index(loop)
    shape = list(whole.get_shape())
    shape[dim] = cast(TensorType, source.type).get_shape()[place]
    sizes = []
    for n, size in enumerate(shape):
        if size == DYNAMIC_INDEX:
            of, at = (source, place) if n == dim else (op.outputs[0], n)
            sizes.append(build.add(tensor.DimOp(of, build.constant(at)), "size"))
    type_ = TensorType(whole.element_type, shape)
    init = build.add(tensor.EmptyOp(sizes, type_))
    return _generic(build, op, inputs, init)


def _with_the_column(
    build: Builder, op: linalg.GenericOp, loop: int, parts: dict[SSAValue, tuple[SSAValue, SSAValue]]
) -> SSAValue:
    """The reduction of the first part, and then one step more for the column."""
    inputs = [parts[operand][0] if operand in parts else operand for operand in op.inputs]
    reduced = _generic(build, op, inputs, op.outputs[0])
    columns = [parts[operand][1] if operand in parts else operand for operand in op.inputs]
    type_ = cast(TensorType, reduced.type)
    sizes = [
        build.add(tensor.DimOp(reduced, build.constant(n)), "size")
        for n, size in enumerate(type_.get_shape())
        if size == DYNAMIC_INDEX
    ]
    init = build.add(tensor.EmptyOp(sizes, type_))
    rank = len(op.iterator_types) - 1

    def without_the_loop(attribute: AffineMapAttr, dims: tuple[int | None, ...]) -> AffineMapAttr:
        results = [AffineConstantExpr(0) if dim is None or dim == loop else AffineDimExpr(dim - (dim > loop)) for dim in dims]
        return AffineMapAttr(AffineMap(rank, 0, tuple(results)))

    maps = [without_the_loop(*both) for both in zip(op.indexing_maps, maps_of(op), strict=True)]
    body = op.body.clone()
    body.block.insert_arg(type_.element_type, len(body.block.args))
    for inner in body.block.ops:
        if isinstance(inner, linalg.IndexOp) and inner.dim.value.data > loop:
            inner.properties["dim"] = type(inner.dim)(inner.dim.value.data - 1, inner.dim.type)
    kinds = [IteratorTypeAttr.parallel()] * rank
    new = linalg.GenericOp([*columns, reduced], [init], body, [*maps, maps[-1]], kinds, [type_])
    return build.insert(new, op.results[0].name_hint).results[0]


def _generic(build: Builder, op: linalg.GenericOp, inputs: list[SSAValue], init: SSAValue) -> SSAValue:
    new = linalg.GenericOp(inputs, [init], op.body.clone(), op.indexing_maps, op.iterator_types, [init.type])
    new.attributes |= op.attributes
    return build.insert(new, op.results[0].name_hint).results[0]
