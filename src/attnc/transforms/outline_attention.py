"""Every attention becomes a call of a function of its own, in the form that kernels are made for.

Before (d0 batch, d1 keys, d2 rows, d3 head dim, d4 value dim):

    func.func @main(%q: tensor<2x64x100xf32>, …) {
      %r = "iree_linalg_ext.attention"(%q, %k, %v, %scale, %init)
        <{indexing_maps = [(d0, d3, d2), (d0, d1, d3), (d1, d0, d4), (), (d0, d2, d4)]}> ({ … index 1 … })

After:

    func.func private @attention_0(%query: tensor<?x?x?x64xf32>, %key: …, %value: …, %scale: f32) -> tensor<?x?x?x64xf32>
        attributes {attnc.roles = ["query", "key", "value", "scale"], attnc.strides = …} {
      … "iree_linalg_ext.attention" over (b, hkv, g, q, k, e, n) ({ … index 4 … })
    }
    func.func @main(…) {
      %query = linalg.transpose %q, tensor.expand_shape …        views: dimensions of the right roles in the right order
      %out = func.call @attention_0(%query, %key, %value, %scale)
      %r = … the inverse views of %out

Several dimensions of one role share a place where there are places enough (two batch dimensions, two of rows), else they are
merged, and a position in one of them is a quotient or a remainder of the merged one. What the region reads from outside
becomes an argument: tensors are captures, scalars are numbers. Elementwise operations on nothing but the results of an
online_attention go into its function; its initial values, where they are not the neutral ones, are merged after the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from xdsl.dialects import tensor
from xdsl.dialects.builtin import (
    DYNAMIC_INDEX,
    AffineMapAttr,
    ArrayAttr,
    Float64Type,
    FunctionType,
    ModuleOp,
    StringAttr,
    TensorType,
    f32,
    f64,
)
from xdsl.dialects.func import CallOp, FuncOp, ReturnOp
from xdsl.dialects.linalg import ops as linalg
from xdsl.dialects.linalg.attrs import IteratorTypeAttr
from xdsl.ir import Block, Operation, Region, SSAValue
from xdsl.ir.affine import AffineDimExpr, AffineMap
from xdsl.rewriter import InsertPoint, Rewriter

from attnc.analysis.roles import map_results
from attnc.dialects.building import Builder
from attnc.dialects.linalg_ext import AttentionLike, AttentionOp, OnlineAttentionOp
from attnc.errors import LoweringError
from attnc.target import Target
from attnc.transforms import tensor_views as views
from attnc.transforms.outline_attention_dims import Places, assign_places
from attnc.transforms.outline_attention_region import RegionCopy
from attnc.transforms.outline_attention_results import FunctionResult, absorbed_results, merge_initial_values

NAME = "outline-attention"
CANONICAL = ("b", "hkv", "g", "q", "k", "e", "n")


def run(module: ModuleOp, target: Target) -> None:
    """Rewrites every attention of the module's functions that are no such functions themselves.

    Raises:
        LoweringError: a region asks for its position in a dimension that is summed over in a product.
    """
    for function in list(module.ops):
        if not isinstance(function, FuncOp) or "attnc.roles" in function.attributes or not function.body.blocks:
            continue
        for op in list(function.walk()):
            if isinstance(op, AttentionOp | OnlineAttentionOp):
                if op.parent is not function.body.block:
                    raise LoweringError(f"{op.name} inside of a loop or a condition is not compiled")
                _Outlining(module, function, op).run()


def fresh_name(module: ModuleOp, stem: str) -> str:
    """A symbol that the module does not have yet."""
    names = {op.sym_name.data for op in module.ops if isinstance(op, FuncOp)}
    return next(name for n in range(len(names) + 1) if (name := f"{stem}_{n}") not in names)


class _Outlining:
    """Moves one attention into a function."""

    def __init__(self, module: ModuleOp, function: FuncOp, op: AttentionLike):
        self.module, self.caller, self.op = module, function, op
        self.block = Block()
        self.build = Builder(self.block)
        self.absorbed: list[Operation] = []
        self.results: list[FunctionResult] = []
        self.row_sizes: list[views.Size] = []
        self.places: Places = assign_places(op)
        self.sizes = self._domain_sizes()
        types = [cast(TensorType, operand.type).element_type for operand in (op.query, op.key, op.value)]
        self.score = f64 if f64 in (*types, op.region.block.args[0].type) else f32

    def run(self) -> None:
        op, places = self.op, self.places
        query = self._operand(op.query, 0, [places.b, places.heads, places.q, places.e])
        key = self._operand(op.key, 1, [places.b, places.hkv, places.k, places.e])
        value = self._operand(op.value, 2, [places.b, places.hkv, places.k, places.n])
        element = self._common_element(query, key, value)
        query, key, value = (self._converted(operand, element) for operand in (query, key, value))
        arguments = [self._dynamic(query), self._dynamic(key), self._dynamic(value), self._scalar(op.scale)]

        body = Block(arg_types=[argument.type for argument in arguments])
        for argument, hint in zip(body.args, ("query", "key", "value", "scale"), strict=True):
            argument.name_hint = hint
        inner = Builder(body)
        query5, group = self._expanded_query(inner, body.args[0], body.args[1])
        copy = RegionCopy(self, body, inner, group)
        mask = self._mask(copy) if op.mask is not None else None
        region = copy.region(mask)
        attention, results, inverse = self._attention(inner, query5, body, region)
        inner.insert(ReturnOp(*(self._collapsed(inner, result) for result in results)))

        arguments += copy.arguments
        name = fresh_name(self.module, "attention")
        result_types = [cast(ReturnOp, body.last_op).arguments[n].type for n in range(len(results))]
        function = FuncOp(
            name,
            FunctionType.from_lists([argument.type for argument in body.args], result_types),
            Region(body),
            visibility="private",
        )
        roles = ["query", "key", "value", "scale", *copy.roles]
        hints = [argument.name_hint or "" for argument in body.args]
        function.attributes["attnc.roles"] = _strings(roles)
        function.attributes["attnc.strides"] = _strings([_any_strides(argument.type) for argument in body.args])
        function.attributes["attnc.names"] = _strings(hints)
        function.attributes["attnc.results"] = _strings(self._result_roles(attention, results))
        self.module.body.block.insert_op_before(function, self.caller)
        call = self.build.insert(CallOp(name, arguments, result_types))
        if "attnc.loc" in op.attributes:
            call.attributes["attnc.loc"] = op.attributes["attnc.loc"]
        new = [
            self._original(result, dims, units, type_)
            for result, (dims, units, type_) in zip(call.results, inverse, strict=True)
        ]
        self._replace(new)

    # -- the domain ---------------------------------------------------------------------------------------------------

    def _domain_sizes(self) -> list[views.Size]:
        """The size of each dimension of the domain; a static one where any operand's type says it."""
        found: dict[int, views.Size] = {}
        for operand, map_ in zip(self.op.operands, self.op.maps, strict=True):
            for position, dim in enumerate(map_results(map_)):
                if dim is None:
                    continue
                size = cast(TensorType, operand.type).get_shape()[position]
                if size >= 0:
                    found[dim] = size
                elif dim not in found:
                    found[dim] = self.build.add(tensor.DimOp(operand, self.build.constant(position)), f"size{dim}")
        return [found[dim] for dim in range(len(found))]

    def merged_size(self, dims: tuple[int, ...]) -> views.Size:
        """The product of some dimensions' sizes."""
        size: views.Size = 1
        for dim in dims:
            other = self.sizes[dim]
            if isinstance(size, int) and isinstance(other, int):
                size *= other
            elif size == 1:
                size = other
            else:
                left, right = (self.build.constant(x) if isinstance(x, int) else x for x in (size, other))
                size = self.build.binary("muli", left, right, "merged")
        return size

    # -- operands -----------------------------------------------------------------------------------------------------

    def _operand(self, value: SSAValue, position: int, groups: list[tuple[int, ...]]) -> SSAValue:
        """An operand with one dimension for each group of the domain's dimensions."""
        build = self.build
        picked = map_results(self.op.maps[position])
        sizes = views.sizes_of(value, build)
        value = views.drop_units(build, value, [dim is None for dim in picked], sizes)
        dims = [dim for dim in picked if dim is not None]
        wanted = [dim for group in groups for dim in group]
        missing = [dim for dim in wanted if dim not in dims]
        here = [self._like(value, n, dim) for n, dim in enumerate(dims)]
        value = views.broadcast(build, value, [self.sizes[dim] for dim in missing], here)
        dims, here = [*missing, *dims], [*(self.sizes[dim] for dim in missing), *here]
        permutation = [dims.index(dim) for dim in wanted]
        value = views.transpose(build, value, permutation, here)
        return self._grouped(value, groups, [here[n] for n in permutation])

    def _like(self, value: SSAValue, position: int, dim: int) -> views.Size:
        """A size as the type of `value` has it: dynamic where that is, though it be known from elsewhere."""
        size = cast(TensorType, value.type).get_shape()[position]
        if size >= 0:
            return size
        known = self.sizes[dim]
        return self.build.constant(known) if isinstance(known, int) else known

    def _grouped(self, value: SSAValue, groups: list[tuple[int, ...]], sizes: list[views.Size]) -> SSAValue:
        filled = [group for group in groups if group]
        places, start = [], 0
        for group in filled:
            places.append(list(range(start, start + len(group))))
            start += len(group)
        value = views.collapse(self.build, value, places, sizes)
        units = [not group for group in groups]
        if not any(units):
            return value
        shape = iter(cast(TensorType, value.type).get_shape())
        merged: list[views.Size] = []
        for group in groups:
            size = next(shape) if group else 1
            if size < 0:
                known = self.merged_size(group)
                size = self.build.constant(known) if isinstance(known, int) else known
            merged.append(size)
        return views.add_units(self.build, value, units, merged)

    @staticmethod
    def _common_element(*operands: SSAValue):
        """The element type of a kernel's operands: the widest of theirs."""
        types = [cast(TensorType, operand.type).element_type for operand in operands]
        if len(set(types)) == 1:
            return types[0]
        return f64 if f64 in types else f32

    def _converted(self, value: SSAValue, element) -> SSAValue:
        """The operand in another element type: an elementwise operation of the caller."""
        type_ = cast(TensorType, value.type)
        if type_.element_type == element:
            return value
        block = Block(arg_types=[type_.element_type, element])
        inner = Builder(block)
        inner.insert(linalg.YieldOp(inner.cast("extf", block.args[0], element, "wide")))
        sizes = views.sizes_of(value, self.build)
        identity = AffineMapAttr(AffineMap.identity(len(sizes)))
        init = views.empty(self.build, sizes, element)
        iterators = [IteratorTypeAttr.parallel()] * len(sizes)
        op = linalg.GenericOp([value], [init], Region(block), [identity, identity], iterators, [init.type])
        return self.build.add(op, value.name_hint)

    def _dynamic(self, value: SSAValue) -> SSAValue:
        """With sizes that are not compiled in, but for the head dim."""
        type_ = cast(TensorType, value.type)
        shape = [DYNAMIC_INDEX] * 3 + [type_.get_shape()[3]]
        return views.cast_to(self.build, value, TensorType(type_.element_type, shape))

    def _scalar(self, value: SSAValue) -> SSAValue:
        """The scale in the type of the scores."""
        if value.type == self.score:
            return value
        narrows = isinstance(value.type, Float64Type)
        return self.build.cast("truncf" if narrows else "extf", value, self.score, "scale")

    def _mask(self, copy: RegionCopy) -> tuple[SSAValue, list[tuple[int, ...]]]:
        """The mask operand as a capture, and the domain's dimensions of each of its own."""
        op = self.op
        assert op.mask is not None
        picked = {dim for dim in map_results(op.maps[4]) if dim is not None}
        groups: list[tuple[int, ...]] = []
        for group in self.places.score_groups:
            if group and set(group) <= picked:
                groups.append(group)
            else:
                groups += [(dim,) for dim in group if dim in picked]
        value = self._operand(op.mask, 4, groups)
        return copy.capture(value, "mask"), groups

    # -- the function -------------------------------------------------------------------------------------------------

    def _expanded_query(self, inner: Builder, query: SSAValue, key: SSAValue) -> tuple[SSAValue, views.Size]:
        """The query with its heads as (hkv, g), and g's size."""
        c = [inner.constant(n) for n in range(3)]
        batch = inner.add(tensor.DimOp(query, c[0]), "batch")
        heads = inner.add(tensor.DimOp(query, c[1]), "heads")
        queries = inner.add(tensor.DimOp(query, c[2]), "queries")
        kv_heads = inner.add(tensor.DimOp(key, c[1]), "kv_heads")
        ratio = self.merged_size(self.places.g)
        group: views.Size = ratio if isinstance(ratio, int) else inner.binary("divui", heads, kv_heads, "group")
        type_ = cast(TensorType, query.type)
        last = type_.get_shape()[3]
        size: views.Size = last if last >= 0 else inner.add(tensor.DimOp(query, inner.constant(3)), "head_dim")
        self.row_sizes: list[views.Size] = [batch, kv_heads, group, queries]
        query5 = views.expand(inner, query, [[0], [1, 2], [3], [4]], [*self.row_sizes, size])
        query5.name_hint = "query_5d"
        return query5, group

    def _attention(self, inner: Builder, query5: SSAValue, body: Block, region: Region):
        """The attention over the canonical domain; the function's results; for each of the caller's values what it takes to
        get it from a result."""
        op, places = self.op, self.places
        _, key, value, scale = body.args[:4]
        last = cast(TensorType, value.type).get_shape()[3]
        columns: views.Size = last if last >= 0 else inner.add(tensor.DimOp(value, inner.constant(3)), "value_dim")
        maps = _canonical_maps()
        out_groups = [places.b, places.heads, places.q, places.n]
        if isinstance(op, AttentionOp):
            type_ = cast(TensorType, op.init.type)
            init = views.empty(inner, [*self.row_sizes, columns], type_.element_type, "init")
            new = AttentionOp(query5, key, value, scale, init, maps[:5], region)
            inner.insert(new, "out_5d")
            return new, *self._results(inner, new, out_groups)
        zero = inner.constant(0.0, self.score, "zero")
        lowest = inner.constant(float("-inf"), self.score, "minus_infinity")
        wide = views.empty(inner, [*self.row_sizes, columns], self.score, "acc_empty")
        narrow = views.empty(inner, self.row_sizes, self.score, "row_empty")
        inits = [
            inner.add(linalg.FillOp([scalar], [init]), hint)
            for scalar, init, hint in ((zero, wide, "acc0"), (lowest, narrow, "max0"), (zero, narrow, "sum0"))
        ]
        online = OnlineAttentionOp(query5, key, value, scale, inits[0], inits[1], inits[2], maps, region)
        inner.insert(online, "acc", "max", "sum")
        return online, *self._results(inner, online, out_groups)

    def _results(self, inner: Builder, attention: AttentionLike, out_groups: list[tuple[int, ...]]):
        self.results = absorbed_results(self, inner, attention)
        inverse = []
        for result in self.results:
            groups = out_groups if len(cast(TensorType, result.inside.type).shape) == 5 else out_groups[:3]
            inverse.append((groups, result.picked, cast(TensorType, result.outside.type)))
        return [result.inside for result in self.results], inverse

    def _collapsed(self, inner: Builder, result: SSAValue) -> SSAValue:
        shape = cast(TensorType, result.type).get_shape()
        groups = [[0], [1, 2], [3], [4]][: len(shape) - 1]
        return views.collapse(inner, result, groups, [*self.row_sizes, shape[-1]][: len(shape)])

    def _result_roles(self, attention: AttentionLike, results: Sequence[SSAValue]) -> list[str]:
        roles: list[str] = []
        for result in results:
            wide = len(cast(TensorType, result.type).shape) == 5
            role = "out" if wide else "max" if result in attention.results[1:2] else "lse"
            roles.append(role if role not in roles else f"{role}_{len(roles)}")
        return roles

    # -- results ------------------------------------------------------------------------------------------------------

    def _original(
        self, value: SSAValue, groups: list[tuple[int, ...]], picked: tuple[int | None, ...], type_: TensorType
    ) -> SSAValue:
        """A result of the function with the dimensions that the attention's own result has."""
        build = self.build
        shape = [self.merged_size(group) for group in groups]
        element = cast(TensorType, value.type).element_type
        value = views.cast_to(build, value, views.tensor_type(shape, element))
        value = views.drop_units(build, value, [not group for group in groups], shape)
        filled = [group for group in groups if group]
        dims = [dim for group in filled for dim in group]
        sizes = [self.sizes[dim] for dim in dims]
        places, start = [], 0
        for group in filled:
            places.append(list(range(start, start + len(group))))
            start += len(group)
        value = views.expand(build, value, places, sizes)
        wanted = [dim for dim in picked if dim is not None]
        permutation = [dims.index(dim) for dim in wanted]
        value = views.transpose(build, value, permutation, sizes)
        value = views.add_units(
            build, value, [dim is None for dim in picked], [1 if dim is None else self.sizes[dim] for dim in picked]
        )
        return views.cast_to(build, value, TensorType(element, type_.get_shape()))

    def _replace(self, new: list[SSAValue]) -> None:
        op = self.op
        replaced = [(result.outside, value) for result, value in zip(self.results, new, strict=True)]
        if isinstance(op, OnlineAttentionOp):
            replaced = merge_initial_values(self, op, replaced)
        ops = list(self.block.ops)
        for inner in ops:
            inner.detach()
        Rewriter.insert_op(ops, InsertPoint.before(op))
        for old, value in replaced:
            value.name_hint = old.name_hint or value.name_hint
            old.replace_all_uses_with(value)
        for dead in [*reversed(self.absorbed), op]:
            Rewriter.erase_op(dead)


def _canonical_maps() -> list[AffineMap]:
    b, hkv, g, q, k, e, n = (AffineDimExpr(dim) for dim in range(len(CANONICAL)))
    row = (b, hkv, g, q)
    results = [(*row, e), (b, hkv, k, e), (b, hkv, k, n), (), (*row, n), row, row]
    return [AffineMap(len(CANONICAL), 0, each) for each in results]


def _strings(values: list[str]) -> ArrayAttr:
    return ArrayAttr([StringAttr(value) for value in values])


def _any_strides(type_) -> str:
    return "x".join("?" * len(type_.shape)) if isinstance(type_, TensorType) else ""
