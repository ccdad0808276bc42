"""Removes from a torch function what has no part in its results, and brings torch-mlir's spellings to ours.

Before:

    torch.aten._assert_tensor_metadata %25, … : …                              # and 500 lines that make a BlockMask
    %31:2 = torch.operator "torch.aten.sort.stable"(%28, …) : …
    %o, %lse, %max = torch.hop_flex_attention %q, %k, %v, %scale, %true, %false {score_mod_fn = @sdpa_score0, …} : …
    %1 = torch.aten.mul.Scalar %lse, %ln2                                      # the op's lse is in log2 units

After:

    %o, %lse = "torch.attnc_flex_attention"(%q, %k, %v, %scale) {score_mod_fn = @sdpa_score0, …, return_lse}
    %lse_log2 = torch.aten.mul.Scalar %lse, %log2e
    %1 = torch.aten.mul.Scalar %lse_log2, %ln2

Assertions about sizes and dtypes go; every other operation of the dialect is pure, so what nobody uses goes as well.
A constant, a list or a size that is written down many times remains once. A `max` over a dim without its places is `amax`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from xdsl.dialects import func
from xdsl.dialects.builtin import ModuleOp, SymbolRefAttr
from xdsl.ir import Block, BlockArgument, Operation, SSAValue

from attnc.dialects.torch import (
    BindSymbolicShapeOp,
    ConstantBoolOp,
    ConstantFloatOp,
    FlexAttentionOp,
    FloatType,
    IntType,
    ListConstructOp,
    ListType,
    OperatorOp,
    VTensorType,
    aten_op,
    torch_op,
)
from attnc.errors import UnsupportedGraphError
from attnc.target import Target
from attnc.transforms.convert_torch_to_linalg_ext_mods import place_of

NAME = "simplify-torch"

_NUMBERS = ("torch.constant.", "torch.prim.ListConstruct")
_ASSERTIONS = (
    "torch.aten._assert",
    "torch.aten.sym_constrain_range",
    "torch.aten._functional_assert",
    "torch.aten._functional_sym_constrain_range",
    "torch.runtime.assert",
    "torch.assert",
    "torch.prim.RaiseException",
)


def run(module: ModuleOp, target: Target | None = None) -> None:
    """Simplifies every function of `module`, and removes private ones that nothing names."""
    functions = {op.sym_name.data: op for op in module.ops if isinstance(op, func.FuncOp)}
    for function in functions.values():
        for block in function.body.blocks:
            _spelt(block, functions)
            _merge_numbers(block)
            _remove_dead(block)
            for op in list(block.ops):
                if op.name in ("torch.aten.max.dim", "torch.aten.min.dim") and not op.results[1].uses:
                    _limit(op)
    named = set(_references(module))
    for name, function in functions.items():
        private = function.sym_visibility is not None and function.sym_visibility.data == "private"
        if private and name not in named:
            function.detach()
            function.erase()


def _spelt(block: Block, functions: dict[str, func.FuncOp]) -> None:
    for op in list(block.ops):
        if isinstance(op, OperatorOp):
            _replace(op, torch_op(op.operator.data.removeprefix("torch.")))
        elif op.name == "torch.hop_flex_attention":
            _flex(op, functions)


def _replace(op: OperatorOp, kind: type[Operation]) -> None:
    """`torch.operator "torch.aten.x"` as the operation `torch.aten.x`."""
    attributes = {key: value for key, value in op.attributes.items() if key != "name"}
    new = kind.create(operands=op.operands, result_types=[r.type for r in op.results], attributes=attributes)
    block = op.parent_block()
    assert block is not None
    block.insert_op_before(new, op)
    for old, result in zip(op.results, new.results, strict=True):
        old.replace_all_uses_with(result)
        result.name_hint = old.name_hint
    op.detach()
    op.erase()


def _limit(op: Operation) -> None:
    """max over a dim, of which nobody wants the places, as amax."""
    block = op.parent_block()
    assert block is not None
    source, dim, keepdim = op.operands
    dims = ListConstructOp.create(operands=[dim], result_types=[ListType(IntType())])
    kind = "amax" if op.name == "torch.aten.max.dim" else "amin"
    operands = [source, dims.results[0], keepdim]
    new = aten_op(kind).create(operands=operands, result_types=[op.results[0].type], attributes=dict(op.attributes))
    new.results[0].name_hint = op.results[0].name_hint
    block.insert_ops_before([dims, new], op)
    op.results[0].replace_all_uses_with(new.results[0])
    op.detach()
    op.erase()


def _flex(op: Operation, functions: dict[str, func.FuncOp]) -> None:
    query, key, value, scale, *rest = op.operands
    block = op.parent_block()
    assert block is not None
    added: list[Operation] = []
    if not isinstance(scale.type, FloatType):
        assert isinstance(query.type, VTensorType)
        added.append(ConstantFloatOp(1.0 / math.sqrt(query.type.shape[-1])))
        scale = added[0].results[0]
    mods = {}
    for kind, fixed in (("score", 5), ("mask", 4)):
        reference = op.attributes.get(f"{kind}_mod_fn")
        if isinstance(reference, SymbolRefAttr):
            mods[f"{kind}_mod"] = _checked(op, reference.root_reference.data, fixed, functions)
    if len(rest) > 2:
        raise UnsupportedGraphError(
            f"torch.hop_flex_attention has {len(op.operands)} operands; attnc knows six: query, key, value, scale, and whether "
            "lse and max are returned",
            **place_of(op),
        )
    used = [bool(result.uses) for result in op.results[1:3]]
    for asked, flag, name in zip(used, rest, ("lse", "max_scores")):
        if asked and isinstance(flag.owner, ConstantBoolOp) and not flag.owner.value.value.data:
            raise UnsupportedGraphError(f"{name} of torch.hop_flex_attention is used but not asked for", **place_of(op))
    new = FlexAttentionOp(query, key, value, scale, **mods, return_lse=used[0], return_max=used[1])
    if (loc := op.attributes.get("attnc.loc")) is not None:
        new.attributes["attnc.loc"] = loc
    added.append(new)
    outputs = iter(new.outputs)
    new_values: list[SSAValue] = [next(outputs)]
    log2e = ConstantFloatOp(math.log2(math.e))
    if any(used):
        added.append(log2e)
    for asked, old in zip(used, op.results[1:3]):
        if not asked:
            continue
        natural = next(outputs)
        scaled = aten_op("mul.Scalar").create(operands=[natural, log2e.result], result_types=[old.type])
        natural.name_hint, scaled.results[0].name_hint = "natural", old.name_hint
        added.append(scaled)
        old.replace_all_uses_with(scaled.results[0])
    new_values[0].name_hint = op.results[0].name_hint
    op.results[0].replace_all_uses_with(new_values[0])
    block.insert_ops_before(added, op)
    op.detach()
    op.erase()


def _checked(op: Operation, name: str, fixed: int, functions: dict[str, func.FuncOp]) -> str:
    """The mod's name, if it takes what the attention gives it."""
    if name not in functions:
        raise UnsupportedGraphError(f"torch.hop_flex_attention names @{name}, which the module does not hold", **place_of(op))
    taken = len(functions[name].body.block.args)
    if taken > fixed:
        raise UnsupportedGraphError(
            f"@{name} takes {taken} arguments, but torch.hop_flex_attention gives it {fixed}: the {taken - fixed} tensors "
            "that it captures were lost when the text was written",
            remedy="torch-mlir's importer drops captured tensors; give attnc.compile the ExportedProgram itself",
            **place_of(op),
        )
    return name


def _merge_numbers(block: Block) -> None:
    """Constants, sizes, sums of them and lists are written once."""
    known: dict[tuple, Operation] = {}
    for op in list(block.ops):
        if not (op.name.startswith(_NUMBERS) or (op.name.startswith("torch.aten.") and op.name.endswith(".int"))):
            continue
        if len(op.results) != 1 or isinstance(op.results[0].type, VTensorType):
            continue
        attributes = tuple(sorted((name, value) for name, value in op.attributes.items() if name != "attnc.loc"))
        first = known.setdefault((op.name, tuple(op.operands), attributes, op.results[0].type), op)
        if first is not op:
            op.results[0].replace_all_uses_with(first.results[0])


def _remove_dead(block: Block) -> None:
    for op in reversed(list(block.ops)):
        if isinstance(op, BindSymbolicShapeOp):
            dead = not isinstance(op.tensor, BlockArgument)
        elif op.name.startswith(_ASSERTIONS):
            dead = not any(result.uses for result in op.results)
        else:
            dead = bool(op.results) and op.name.startswith("torch.") and not any(result.uses for result in op.results)
        if dead:
            op.detach()
            op.erase()


def _references(module: ModuleOp) -> Iterator[str]:
    for op in module.walk():
        for attribute in (*op.attributes.values(), *op.properties.values()):
            if isinstance(attribute, SymbolRefAttr):
                yield attribute.root_reference.data
