"""Attention with mods becomes `iree_linalg_ext.attention`, both mods inlined into its region.

Before:

    func.func private @score_mod(%score, %b, %h, %q, %kv, %slopes: !torch.vtensor<[?],f32>) { … }
    func.func private @mask_mod(%b, %h, %q, %kv) { torch.aten.ge.Tensor %q, %kv }
    func.func @attention(%query: !torch.vtensor<[?,?,?,64],f32>, …, %scale: !torch.float, %slopes) {
      %out = "torch.attnc_flex_attention"(%query, %key, %value, %scale, %slopes) {score_mod_fn = @score_mod, …}

After:

    func.func @attention(%query: tensor<?x?x?x64xf32>, …, %scale: f32, %slopes: tensor<?xf32>) {
      %query_5d = tensor.expand_shape %query: [B, Hq, Sq, E] -> [B, Hkv, G, Sq, E]
      %out_5d = "iree_linalg_ext.attention"(%query_5d, %key, %value, %scale, %init) <{indexing_maps = […]}> ({
      ^bb0(%score: f32):
        %hkv = iree_linalg_ext.index 1,  %h = %hkv * %group + %g
        %slope = tensor.extract %slopes[%h] {attnc.checked = "kept", attnc.name = "slopes"}
        …
        %masked = arith.select %mask, %modified, %minus_infinity : f32
        iree_linalg_ext.yield %masked
      })
      %out = tensor.collapse_shape %out_5d: [B, Hkv, G, Sq, Ev] -> [B, Hq, Sq, Ev]

The iteration domain is (b, hkv, g, q, k, e, n). Where lse or max are asked it becomes `online_attention` at once, with the
division and `lse = max + log(sum)` in `linalg.generic`s behind it. `attnc.checked` says on which pairs a gather's indices, raw
torch indices, must be in range: "kept" by the mask, "all", or "listed" as partial by the BlockMask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from xdsl.dialects import arith, func, linalg, tensor
from xdsl.dialects.builtin import (
    DYNAMIC_INDEX,
    AffineMapAttr,
    ArrayAttr,
    FunctionType,
    ModuleOp,
    StringAttr,
    TensorType,
)
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.ir.affine import AffineDimExpr, AffineMap

from attnc.dialects.linalg_ext import AttentionOp, OnlineAttentionOp
from attnc.dialects.torch import (
    BoolType,
    ConstantBoolOp,
    ConstantFloatOp,
    ConstantIntOp,
    FlexAttentionOp,
    FloatType,
    IntType,
    VTensorType,
    si64,
)
from attnc.errors import UnsupportedOpError
from attnc.target import Target
from attnc.transforms.convert_torch_to_linalg_ext_attention import AttentionRegion, statistics
from attnc.transforms.convert_torch_to_linalg_ext_mods import tensor_type
from attnc.transforms.convert_torch_to_linalg_ext_region import RegionBuilder, f64, i1, i64
from attnc.transforms.convert_torch_to_linalg_ext_region import index as index_type
from attnc.transforms.convert_torch_to_linalg_ext_shapes import (
    appended,
    collapse,
    element_of,
    expand,
    generic,
    log_sum,
    normalised,
    shape_of,
)
from attnc.transforms.convert_torch_to_linalg_ext_values import Number

NAME = "convert-torch-to-linalg-ext"

_B, _HKV, _G, _Q, _K, _E, _N = range(7)
_DYNAMIC = DYNAMIC_INDEX


def _map(*dims: int) -> AffineMap:
    return AffineMap(7, 0, tuple(AffineDimExpr(dim) for dim in dims))


_ROW_DIMS = (_B, _HKV, _G, _Q)
_MAPS = ArrayAttr(
    AffineMapAttr(map_)
    for map_ in (_map(*_ROW_DIMS, _E), _map(_B, _HKV, _K, _E), _map(_B, _HKV, _K, _N), _map(), _map(*_ROW_DIMS, _N))
)
_ONLINE_MAPS = ArrayAttr([*_MAPS, AffineMapAttr(_map(*_ROW_DIMS)), AffineMapAttr(_map(*_ROW_DIMS))])


def run(module: ModuleOp, target: Target | None = None) -> None:
    """Converts every function that holds a `torch.attnc_flex_attention`, and removes the mods."""
    functions = {op.sym_name.data: op for op in module.ops if isinstance(op, func.FuncOp)}
    mods: set[str] = set()
    for function in functions.values():
        attentions = [op for op in function.body.ops if isinstance(op, FlexAttentionOp)] if function.body.blocks else []
        if attentions:
            _Function(function, functions).convert()
            for op in attentions:
                mods |= {mod.root_reference.data for mod in (op.score_mod_fn, op.mask_mod_fn) if mod is not None}
    for name in mods:
        functions[name].detach()
        functions[name].erase()


class _Function:
    """One function on its way."""

    def __init__(self, function: func.FuncOp, functions: dict[str, func.FuncOp]):
        self.function = function
        self.functions = functions
        self.names = _strings(function.attributes.get("attnc.names"))
        self.block = Block()
        self.build = RegionBuilder(self.block)
        # What stands for each value of the old function: of a number, its Python constant or its new argument.
        self.values: dict[SSAValue, SSAValue] = {}
        self.numbers: dict[SSAValue, Number] = {}

    def convert(self) -> None:
        old = self.function.body.block
        scales = {op.scale for op in old.ops if isinstance(op, FlexAttentionOp)}
        precision = next(statistics(op) for op in old.ops if isinstance(op, FlexAttentionOp))
        for position, argument in enumerate(old.args):
            type_ = precision if argument in scales else _argument_type(argument.type)
            new = self.block.insert_arg(type_, position)
            new.name_hint = argument.name_hint
            self.values[argument] = new
        returned: Sequence[SSAValue] = ()
        for op in list(old.ops):
            match op:
                case ConstantIntOp() | ConstantBoolOp():
                    self.numbers[op.result] = Number(si64, op.value.value.data)
                case ConstantFloatOp():
                    self.numbers[op.result] = Number(f64, op.value.value.data)
                    if op.result in scales:
                        self.values[op.result] = self.build.constant(precision, op.value.value.data)
                case FlexAttentionOp():
                    self._attention(op)
                case func.ReturnOp():
                    returned = [self.values[operand] for operand in op.operands]
                case _:
                    raise UnsupportedOpError(f"{op.name} beside the attention is not supported yet")
        self.block.add_op(func.ReturnOp(*returned))
        inputs = [argument.type for argument in self.block.args]
        self.function.properties["function_type"] = FunctionType.from_lists(inputs, [value.type for value in returned])
        body = self.function.detach_region(self.function.body)
        self.function.add_region(Region(self.block))
        body.drop_all_references()

    # -- the function around the region -------------------------------------------------------------------------------

    def size(self, source: SSAValue, dim: int) -> SSAValue:
        """The size of a tensor's dimension, as an `index`."""
        assert isinstance(source.type, TensorType)
        static = source.type.get_shape()[dim]
        if static >= 0:
            return self.build.constant(index_type, static)
        value = self.build.emit(tensor.DimOp, (source, self.build.constant(index_type, dim)), index_type)
        if value.name_hint is None and source.name_hint is not None:
            value.name_hint = f"{source.name_hint}_d{dim}"
        return value

    def _attention(self, op: FlexAttentionOp) -> None:
        query, key, value, scale = (self.values[operand] for operand in op.operands[:4])
        precision = statistics(op)
        head_dim, value_dim = shape_of(query)[3], shape_of(value)[3]
        batch, heads, queries, kv_heads = _named(
            self, (query, 0, "batch"), (query, 1, "heads"), (query, 2, "queries"), (key, 1, "kv_heads")
        )
        group = self.build.emit(arith.DivUIOp, (heads, kv_heads), index_type)
        group.name_hint = "group"
        rows = [batch, kv_heads, group, queries]
        query_5d = expand(self.block, query, [*rows, head_dim], "query_5d")
        element = element_of(query)
        out_sizes = [*rows, value_dim]
        region = AttentionRegion(self.functions, self.names, self.values, self.numbers, self.size).build(op, precision, group)
        operands = [query_5d, key, value, scale]
        wanted = [op.return_lse is not None, op.return_max is not None]
        if not any(wanted):
            init = self._empty(out_sizes, element, "init")
            attention: Operation = AttentionOp.create(
                operands=[*operands, init], properties={"indexing_maps": _MAPS}, regions=[region], result_types=[init.type]
            )
            results = [appended(self.block, attention, "out_5d")]
        else:
            lse = f64 if any(wanted) and cast(VTensorType, op.outputs[1].type).dtype == f64 else precision
            results = self._online(operands, region, (precision, lse), element, rows, value_dim, wanted)
        for old, new in zip(op.outputs, results, strict=True):
            name = old.name_hint or "out"
            self.values[old] = collapse(self.block, new, name)

    def _online(
        self,
        operands: list[SSAValue],
        region: Region,
        statistics: tuple[Attribute, Attribute],
        element: Attribute,
        rows: list[SSAValue],
        value_dim: int,
        wanted: list[bool],
    ) -> list[SSAValue]:
        precision, lse = statistics
        zero = self.build.constant(precision, 0.0)
        minus_infinity = self.build.constant(precision, float("-inf"))
        inits = [
            self._filled([*rows, value_dim], precision, zero, "acc_init"),
            self._filled(rows, precision, minus_infinity, "max_init"),
            self._filled(rows, precision, zero, "sum_init"),
        ]
        online = OnlineAttentionOp.create(
            operands=[*operands, *inits],
            properties={"indexing_maps": _ONLINE_MAPS},
            regions=[region],
            result_types=[init.type for init in inits],
        )
        self.block.add_op(online)
        acc, max_, sum_ = online.results
        acc.name_hint, max_.name_hint, sum_.name_hint = "acc", "max", "sum"
        out_init = self._empty([*rows, value_dim], element, "init")
        results = [generic(self.block, [acc, sum_], out_init, normalised(precision, element), "out_5d")]
        if wanted[0]:
            lse_init = self._empty(rows, lse, "lse_init")
            results.append(generic(self.block, [max_, sum_], lse_init, log_sum(precision, lse), "lse_5d"))
        if wanted[1]:
            results.append(max_)
        return results

    def _empty(self, sizes: Sequence[SSAValue | int], element: Attribute, hint: str) -> SSAValue:
        dynamic = [size for size in sizes if isinstance(size, SSAValue)]
        type_ = TensorType(element, [size if isinstance(size, int) else _DYNAMIC for size in sizes])
        return appended(self.block, tensor.EmptyOp(dynamic, type_), hint)

    def _filled(self, sizes: Sequence[SSAValue | int], element: Attribute, value: SSAValue, hint: str) -> SSAValue:
        empty = self._empty(sizes, element, f"{hint}_empty")
        return appended(self.block, linalg.FillOp([value], [empty]), hint)


# -- small builders -------------------------------------------------------------------------------------------------------


def _strings(attribute: Attribute | None) -> list[str]:
    return [entry.data for entry in cast(ArrayAttr[StringAttr], attribute)] if isinstance(attribute, ArrayAttr) else []


def _argument_type(type_: Attribute) -> Attribute:
    match type_:
        case VTensorType():
            return tensor_type(type_)
        case IntType():
            return i64
        case FloatType():
            return f64
        case BoolType():
            return i1
    raise UnsupportedOpError(f"an argument of type {type_}")


def _named(function: _Function, *wanted: tuple[SSAValue, int, str]) -> list[SSAValue]:
    result = []
    for source, dim, hint in wanted:
        value = function.size(source, dim)
        if shape_of(source)[dim] < 0:
            value.name_hint = hint
        result.append(value)
    return result
