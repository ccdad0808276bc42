"""Chains of elementwise operations become one loop; those that only move or repeat elements become views.

Before:

    %a = linalg.generic ins(%x) { exp } ; %t = linalg.transpose %a ; %r = linalg.generic ins(%t, %y) { mul }

After:

    %r = linalg.generic ins(%x, %y) {indexing_maps = [(d0, d1) -> (d1, d0), …]} { exp, mul }

A producer goes into its consumer where that is its only user, and into all of them where it costs next to nothing. Consumers
may be reductions. What stands on tensors as arith and math operations becomes linalg.generic first, and so do linalg.copy and
linalg.reduce; a generic that yields an input as it is becomes linalg.transpose and linalg.broadcast.
"""

from __future__ import annotations

from typing import cast

from xdsl.dialects.arith import ConstantOp
from xdsl.dialects.builtin import AffineMapAttr, ArrayAttr, DenseArrayBase, ModuleOp, TensorType, i32, i64
from xdsl.dialects.func import FuncOp
from xdsl.dialects.linalg import ops as linalg
from xdsl.ir import Block, Operation, SSAValue
from xdsl.ir.affine import AffineConstantExpr, AffineDimExpr, AffineExpr, AffineMap
from xdsl.rewriter import InsertPoint, Rewriter

from attnc.analysis.loops import is_parallel, reads_result
from attnc.analysis.roles import map_results
from attnc.dialects.building import INDEX, Builder, erase_dead
from attnc.dialects.linalg_ext import AttentionOp, OnlineAttentionOp
from attnc.target import Target
from attnc.transforms import tensor_views as views
from attnc.transforms.elementwise_to_generic import to_generic

NAME = "fuse-elementwise"
CHEAP = 3
"""An elementwise operation of so many steps may be done once for each of its users."""


def run(module: ModuleOp, target: Target) -> None:
    """Fuses the loops of every function that is none of a kernel's."""
    for function in list(module.ops):
        if not isinstance(function, FuncOp) or "attnc.roles" in function.attributes or not function.body.blocks:
            continue
        for block in function.body.blocks:
            for op in list(block.ops):
                if not isinstance(op, linalg.FillOp):
                    to_generic(op)
            for op in list(block.ops):
                if isinstance(op, linalg.GenericOp):
                    _results_as_inputs(op)
            for op in list(block.ops):
                if isinstance(op, linalg.FillOp):  # whether it begins a reduction is known now
                    to_generic(op)
            for op in list(block.ops):
                if isinstance(op, linalg.GenericOp):
                    _as_view(op)
            for op in list(block.ops):
                if isinstance(op, linalg.GenericOp):
                    fuse_into(op)
            erase_dead(block)


def _results_as_inputs(op: linalg.GenericOp) -> None:
    """What an elementwise operation reads of its initial result is an input like others."""
    if not is_parallel(op) or not reads_result(op):
        return
    inputs = len(op.inputs)
    maps = list(op.indexing_maps)
    body = op.body.block
    added: list[SSAValue] = []
    new_maps = maps[:inputs]
    for n, init in enumerate(op.outputs):
        argument = body.args[inputs + len(added) + n]
        if argument.uses:
            place = inputs + len(added)
            new = body.insert_arg(argument.type, place)
            argument = body.args[inputs + len(added) + n + 1]
            argument.replace_all_uses_with(new)
            added.append(init)
            new_maps.append(maps[inputs + n])
    _rebuild(op, [*op.inputs, *added], list(op.outputs), [*new_maps, *maps[inputs:]])


def _rebuild(op: linalg.GenericOp, inputs: list[SSAValue], outputs: list[SSAValue], maps: list[AffineMapAttr]) -> None:
    """Other operands and maps for a generic whose body has been changed already."""
    op.operands = [*inputs, *outputs]
    op.properties["operandSegmentSizes"] = DenseArrayBase.from_list(i32, [len(inputs), len(outputs)])
    op.properties["indexing_maps"] = ArrayAttr(maps)


def _as_view(op: linalg.GenericOp) -> None:
    """Replaces a generic that yields an input as it is by a transpose and a broadcast of that input."""
    body = op.body.block
    last = body.last_op
    if not is_parallel(op) or len(op.results) != 1 or last is None or body.first_op is not last:
        return
    yielded = last.operands[0]
    if yielded.owner is not body or cast(int, yielded.index) >= len(op.inputs):  # pyright: ignore
        return
    n = cast(int, yielded.index)  # pyright: ignore
    maps = [attribute.data for attribute in op.indexing_maps]
    try:
        source, result = map_results(maps[n]), map_results(maps[-1])
    except ValueError:
        return
    if None in source or None in result:
        return
    value = op.inputs[n]
    block = Block()
    build = Builder(block)
    sizes = views.sizes_of(value, build)
    kept = [dim for dim in result if dim in source]
    if sorted(kept, key=source.index) and len(kept) != len(source):
        return
    value = views.transpose(build, value, [source.index(dim) for dim in kept], sizes)
    added = [position for position, dim in enumerate(result) if dim not in source]
    if added:
        init = op.outputs[0]
        value = build.add(linalg.BroadcastOp(value, init, DenseArrayBase.from_list(i64, added)))
    value = views.cast_to(build, value, cast(TensorType, op.results[0].type))
    Rewriter.insert_op(_take(block), InsertPoint.before(op))
    op.results[0].replace_all_uses_with(value)
    Rewriter.erase_op(op)


def _take(block: Block) -> list[Operation]:
    ops = list(block.ops)
    for op in ops:
        op.detach()
    return ops


# -- fusion ---------------------------------------------------------------------------------------------------------------


def fuse_into(op: linalg.GenericOp) -> None:
    """Takes producers into `op` until none is left that may go there. Its body and operands change, its results do not."""
    position = 0
    while position < len(op.inputs):
        if _through_view(op, position) or _fuse(op, position):
            position = 0
        else:
            position += 1
    _merge_equal_inputs(op)


def _through_view(op: linalg.GenericOp, position: int) -> bool:
    """Reads the source of a transpose or broadcast in its place."""
    value = op.inputs[position]
    owner = value.owner
    if not isinstance(owner, linalg.TransposeOp | linalg.BroadcastOp):
        return False
    source = owner.inputs[0] if isinstance(owner, linalg.TransposeOp) else owner.input
    if not _leads_to_loop(source):
        return False
    maps = list(op.indexing_maps)
    results = list(maps[position].data.results)
    if isinstance(owner, linalg.TransposeOp):
        moved: list[AffineExpr] = list(results)
        for d, p in enumerate(owner.permutation.get_values()):
            moved[int(p)] = results[d]
    else:
        added = {int(d) for d in owner.dimensions.get_values()}
        moved = [result for d, result in enumerate(results) if d not in added]
        if not _still_bounded(op, position, maps, moved):
            return False
    maps[position] = AffineMapAttr(AffineMap(maps[position].data.num_dims, 0, tuple(moved)))
    _rebuild(op, [*op.inputs[:position], source, *op.inputs[position + 1 :]], list(op.outputs), maps)
    return True


def _leads_to_loop(value: SSAValue) -> bool:
    """Whether behind views of this kind there is a loop to fuse."""
    owner = value.owner
    if isinstance(owner, linalg.TransposeOp):
        return _leads_to_loop(owner.inputs[0])
    if isinstance(owner, linalg.BroadcastOp):
        return _leads_to_loop(owner.input)
    return isinstance(owner, linalg.GenericOp) and is_parallel(owner)


def _still_bounded(op: linalg.GenericOp, position: int, maps: list[AffineMapAttr], moved: list[AffineExpr]) -> bool:
    """Whether every dimension of the domain still has an operand that tells its size."""
    known = {e.position for e in moved if isinstance(e, AffineDimExpr)}
    for n, map_ in enumerate(maps):
        if n != position:
            known |= set(map_.data.used_dims())
    return known == set(range(len(op.iterator_types)))


def _fuse(op: linalg.GenericOp, position: int) -> bool:
    """Takes the producer of an input into the body, if that may be."""
    value = op.inputs[position]
    producer = value.owner
    if not isinstance(producer, linalg.GenericOp) or producer.parent is not op.parent or not may_fuse(producer):
        return False
    users = {use.operation for use in value.uses}
    if users != {op} and not (is_cheap(producer) and all(isinstance(u, linalg.GenericOp | linalg.TransposeOp) for u in users)):
        return False
    if any(isinstance(user, AttentionOp | OnlineAttentionOp) for user in users):
        return False
    own = list(op.indexing_maps)
    reads = own[position].data
    out = map_results(producer.indexing_maps.data[-1].data)
    try:
        map_results(reads)
    except ValueError:
        return False
    at: dict[int, AffineExpr] = {}
    for dim, result in zip(out, reads.results, strict=True):
        assert dim is not None
        at[dim] = result
    new_maps = []
    for attribute in producer.indexing_maps.data[: len(producer.inputs)]:
        results = [at[e.position] if isinstance(e, AffineDimExpr) else e for e in attribute.data.results]
        new_maps.append(AffineMapAttr(AffineMap(reads.num_dims, 0, tuple(results))))
    rest = [*own[:position], *new_maps, *own[position + 1 :]]
    known = {dim for attribute in rest for dim in attribute.data.used_dims()}
    if known != set(range(reads.num_dims)):
        return False
    _inline(op, position, producer, at)
    _rebuild(op, [*op.inputs[:position], *producer.inputs, *op.inputs[position + 1 :]], list(op.outputs), rest)
    return True


def may_fuse(producer: linalg.GenericOp) -> bool:
    """Whether it is elementwise, of one result that has a dimension for each of its domain."""
    if not is_parallel(producer) or reads_result(producer) or len(producer.results) != 1:
        return False
    try:
        maps = [map_results(attribute.data) for attribute in producer.indexing_maps]
    except ValueError:
        return False
    return sorted(cast(list[int], [-1 if d is None else d for d in maps[-1]])) == list(range(len(producer.iterator_types)))


def is_cheap(producer: linalg.GenericOp) -> bool:
    """Whether doing it again costs less than reading its result."""
    ops = list(producer.body.block.walk())
    slow = any(op.name.startswith(("math.", "arith.div", "arith.rem", "scf.", "tensor.")) for op in ops)
    return not slow and (len(ops) <= CHEAP + 1 or not producer.inputs) and len(producer.inputs) <= 1


def _inline(op: linalg.GenericOp, position: int, producer: linalg.GenericOp, at: dict[int, AffineExpr]) -> None:
    """The producer's body before that of `op`, its result instead of argument `position`, its inputs as arguments there."""
    body, source = op.body.block, producer.body.block
    old = body.args[position]
    mapper: dict[SSAValue, SSAValue] = {}
    for n, argument in enumerate(source.args[: len(producer.inputs)]):
        new = body.insert_arg(argument.type, position + n)
        new.name_hint = argument.name_hint
        mapper[argument] = new
    first = body.first_op
    last = source.last_op
    assert first is not None and last is not None
    for each in source.ops:
        if each is last:
            break
        if isinstance(each, linalg.IndexOp):
            expression = at[each.dim.value.data]
            new_op = _index(expression)
            body.insert_op_before(new_op, first)
            mapper[each.result] = new_op.results[0]
            continue
        copy = each.clone(mapper)
        for inner in list(copy.walk()):
            if isinstance(inner, linalg.IndexOp):
                replacement = _index(at[inner.dim.value.data])
                assert inner.parent is not None
                inner.parent.insert_op_before(replacement, inner)
                inner.result.replace_all_uses_with(replacement.results[0])
                Rewriter.erase_op(inner)
        for before, after in zip(each.results, copy.results, strict=True):
            after.name_hint = before.name_hint
        body.insert_op_before(copy, first)
    result = last.operands[0]
    old.replace_all_uses_with(mapper.get(result, result))
    body.erase_arg(old)


def _index(expression: AffineExpr) -> Operation:
    if isinstance(expression, AffineDimExpr):
        return linalg.IndexOp(expression.position)
    value = expression.value if isinstance(expression, AffineConstantExpr) else 0
    return ConstantOp.from_int_and_width(value, INDEX)


def _merge_equal_inputs(op: linalg.GenericOp) -> None:
    """An input that is read twice by the same map is one."""
    seen: dict[tuple[SSAValue, AffineMap], int] = {}
    maps = list(op.indexing_maps)
    inputs = list(op.inputs)
    body = op.body.block
    n = 0
    while n < len(inputs):
        key = (inputs[n], maps[n].data)
        if key in seen:
            body.args[n].replace_all_uses_with(body.args[seen[key]])
            body.erase_arg(body.args[n])
            del inputs[n], maps[n]
        else:
            seen[key] = n
            n += 1
    if len(inputs) != len(op.inputs):
        _rebuild(op, inputs, list(op.outputs), maps)
