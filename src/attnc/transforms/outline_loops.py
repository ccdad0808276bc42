"""Every linalg.generic that is left becomes a call of a function of its own: one native loop.

Before:

    %r = linalg.generic ins(%x, %y : tensor<8x?xf32>, …) outs(%init) { … %scale … tensor.extract %table[%i] … }

After:

    func.func private @loop_0(%x: tensor<?x?xf32>, %y: …, %table: …, %scale: f32, %init: tensor<?x?xf32>) -> tensor<?x?xf32> {
      %r = linalg.generic ins(%x, %y) outs(%init) { … }
      return %r
    }
    %r = func.call @loop_0(%x, %y, %table, %scale, %init)

Sizes are not compiled in. The last arguments are the results' initial tensors; only their sizes matter, and where a reduction
begins with what such a tensor holds, that tensor is an input besides. A matrix product that no attention has taken in is
refused.
"""

from __future__ import annotations

from typing import cast

from xdsl.dialects.arith import ConstantOp
from xdsl.dialects.builtin import DYNAMIC_INDEX, FunctionType, ModuleOp, StringAttr, TensorType
from xdsl.dialects.func import CallOp, FuncOp, ReturnOp
from xdsl.dialects.linalg import ops as linalg
from xdsl.dialects.linalg.attrs import IteratorType
from xdsl.ir import Block, Operation, Region, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from attnc.analysis.loops import is_parallel, is_product, start_of
from attnc.analysis.roles import map_results
from attnc.dialects.building import Builder, erase_dead
from attnc.errors import LoweringError
from attnc.target import Target
from attnc.transforms import tensor_views as views
from attnc.transforms.outline_attention import fresh_name

NAME = "outline-loops"


def run(module: ModuleOp, target: Target) -> None:
    """Rewrites every linalg.generic of the module's functions that are no kernels.

    Raises:
        LoweringError: a matrix product outside attention; an indexing map that is no projected permutation.
    """
    for function in list(module.ops):
        if not isinstance(function, FuncOp) or "attnc.roles" in function.attributes or not function.body.blocks:
            continue
        if "attnc.loop" in function.attributes:
            continue
        for op in list(function.body.block.ops):
            if isinstance(op, linalg.GenericOp):
                _outline(module, function, op)
        erase_dead(function.body.block)


def _outline(module: ModuleOp, caller: FuncOp, op: linalg.GenericOp) -> None:
    _check(op)
    before, inside = Block(), Block()
    build, inner = Builder(before), Builder(inside)
    known: dict[SSAValue, SSAValue] = {}
    arguments: list[SSAValue] = []

    def argument(value: SSAValue) -> SSAValue:
        if value not in known:
            passed = value
            if isinstance(value.type, TensorType):
                passed = views.cast_to(build, value, _dynamic(value.type))
            arguments.append(passed)
            known[value] = inside.insert_arg(passed.type, len(inside.args))
            known[value].name_hint = value.name_hint
        return known[value]

    inputs = [argument(value) for value in op.inputs]
    local = {value for each in op.body.walk() for value in each.results} | {
        value for each in (op, *op.body.walk()) for region in each.regions for block in region.blocks for value in block.args
    }
    for each in op.body.walk():
        for operand in each.operands:
            if operand in local or operand in known:
                continue
            owner = operand.owner
            if isinstance(owner, ConstantOp) and not isinstance(operand.type, TensorType):
                known[operand] = inner.add(owner.clone(), operand.name_hint)
            else:
                argument(operand)
    starts: list[SSAValue] = []
    for init in op.outputs:
        start = start_of(init) if not is_parallel(op) else None
        if start is not None and isinstance(start.owner, ConstantOp):
            known.setdefault(start, inner.add(start.owner.clone(), start.name_hint))
        elif start is not None:
            argument(start)
        elif not is_parallel(op):
            argument(init)
    for init in op.outputs:
        start = start_of(init) if not is_parallel(op) else None
        shape = cast(linalg.FillOp, init.owner).outputs[0] if start is not None else init
        passed = views.cast_to(build, shape, _dynamic(cast(TensorType, shape.type)))
        arguments.append(passed)
        new = inside.insert_arg(passed.type, len(inside.args))
        new.name_hint = "init"
        if start is not None:
            starts.append(inner.add(linalg.FillOp([known[start]], [new]), "start"))
        else:
            starts.append(new if is_parallel(op) else known[init])
    region = op.body
    copy = Region()
    region.clone_into(copy, value_mapper=dict(known))
    types = [_dynamic(cast(TensorType, init.type)) for init in op.outputs]
    generic = linalg.GenericOp(inputs, starts, copy, op.indexing_maps, op.iterator_types, types)
    inner.insert(generic)
    inner.insert(ReturnOp(*generic.results))
    name = fresh_name(module, "loop")
    signature = FunctionType.from_lists([value.type for value in inside.args], types)
    function = FuncOp(name, signature, Region(inside), visibility="private")
    function.attributes["attnc.loop"] = StringAttr("elementwise" if is_parallel(op) else "reduction")
    module.body.block.insert_op_before(function, caller)
    call = build.insert(CallOp(name, arguments, types))
    if "attnc.loc" in op.attributes:
        call.attributes["attnc.loc"] = op.attributes["attnc.loc"]
    results = [views.cast_to(build, new, cast(TensorType, old.type)) for old, new in zip(op.results, call.results, strict=True)]
    ops = list(before.ops)
    for each in ops:
        each.detach()
    Rewriter.insert_op(ops, InsertPoint.before(op))
    for old, new in zip(op.results, results, strict=True):
        new.name_hint = old.name_hint or new.name_hint
        old.replace_all_uses_with(new)
    Rewriter.erase_op(op)


def _dynamic(type_: TensorType) -> TensorType:
    return TensorType(type_.element_type, [DYNAMIC_INDEX] * len(type_.shape))


def _why(product: linalg.GenericOp) -> str:
    """Why no attention takes this product in, from what is done to it."""
    exponential = False
    seen: set[Operation] = set()
    waiting: list[Operation] = [product]
    while waiting:
        for result in waiting.pop().results:
            for user in {use.operation for use in result.uses} - seen:
                seen.add(user)
                if isinstance(user, linalg.GenericOp) and is_product(user):
                    continue
                exponential |= any(inner.name in ("math.exp", "linalg.softmax") for inner in user.walk())
                waiting.append(user)
    products = [user for user in seen if isinstance(user, linalg.GenericOp) and is_product(user)]
    summed = any(
        kind.data == IteratorType.REDUCTION
        for user in seen - {*products}
        if isinstance(user, linalg.GenericOp)
        for kind in user.iterator_types
    )
    if not exponential or not summed:
        return "no softmax follows it, as between query · key and the product with value"
    if not products:
        return "the softmax that follows it is not multiplied by a value"
    return (
        "a softmax follows it, but its scores or weights are used elsewhere as well, are summed over other dims than the keys, "
        "or are changed in a way that attention does not have (docs/written_attention.md)"
    )


def _check(op: linalg.GenericOp) -> None:
    place = op.attributes.get("attnc.loc")
    where = f" at {place.data}" if isinstance(place, StringAttr) else ""
    if is_product(op):
        raise LoweringError(
            f"a matrix product outside of attention (linalg.generic){where} is not compiled: {_why(op)}",
            remedy="compile the attention by itself: softmax(q @ kᵀ) @ v, with projections before and after left to torch",
        )
    for attribute in op.indexing_maps:
        try:
            map_results(attribute.data)
        except ValueError as error:
            raise LoweringError(
                f"linalg.generic{where}: {error}", remedy="use projected permutations as indexing maps"
            ) from None
    for map_ in [attribute.data for attribute in op.indexing_maps][len(op.inputs) :]:
        if None in map_results(map_):
            raise LoweringError(f"linalg.generic{where}: a result's map has a constant", remedy="drop the unit dimension")
