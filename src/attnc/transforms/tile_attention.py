"""Attention becomes a kernel: tasks of query rows, each a loop over blocks of keys, with attention on tiles inside.

Before (b, hkv, g, q, k, e, n):

    func.func @attention(%query, %key, %value, %scale, %slopes) {
      …
      %acc, %max, %sum = "iree_linalg_ext.online_attention"(%q5, %key, %value, %scale, …) {attnc.tile = {rows = 96, keys = 256}}
      %r = linalg.generic ins(%acc, %sum) …
      return %r

After (m, k, e, n):

    tile.kernel @attention(%query, %key, %value, %scale, %slopes, %out, %group) roles […] {
      tile.grid (%b, %hg, %m0) to (…) step (1, 1, 96) {
        … the query head %h and position %q of each row, the query tile …
        %max, %sum, %acc = tile.for %k0 = %c0 to %keys step 256 carry(…) {
          %class = tile.classify @classify(%b, %h0, %h1, %q0, %q1, %k0, %k1, …, %keys)
          %next:3 = tile.case %class empty { the carried values } full, partial {
            … key and value tiles …
            %acc_new, %max_new, %sum_new = "iree_linalg_ext.online_attention"(…) ({
              region: a position is read from the tile that holds it, a captured tensor by tile.gather,
              and `select(mask and k < keys, score, -inf)` comes last
            })
          }
        }
        %r = tile.map … ; tile.store %r, %out[…]

Row r of a task is query `r / group` of head `h0 + r % group`: `group` query heads of one key/value head share a task.
A third tile size, `chunk`, is handed on to the tiled operation as `attnc.chunk`: split-reduction acts on it.
The classifier learns of the end of the keys: no block that reaches beyond it is FULL. Without one, that is all it says.
"""

from __future__ import annotations

from typing import cast

from xdsl.dialects import tensor
from xdsl.dialects.builtin import (
    AffineMapAttr,
    ArrayAttr,
    DenseArrayBase,
    DictionaryAttr,
    IntegerAttr,
    MemRefType,
    ModuleOp,
    StringAttr,
    SymbolRefAttr,
    TensorType,
)
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.dialects.linalg import ops as linalg
from xdsl.ir import Attribute, Block, BlockArgument, Operation, OpResult, Region, SSAValue
from xdsl.ir.affine import AffineConstantExpr, AffineDimExpr, AffineMap

from attnc.analysis.attention import Attention, is_unmasked, match_attention
from attnc.analysis.buffers import argument_strings, memref_of
from attnc.dialects import tile
from attnc.dialects.building import INDEX, Builder, erase_dead
from attnc.dialects.linalg_ext import OnlineAttentionOp
from attnc.errors import LoweringError
from attnc.target import Target
from attnc.transforms.select_tile_sizes import ATTRIBUTE as TILE_SIZES
from attnc.transforms.tile_attention_classifier import bound_classifier
from attnc.transforms.tile_attention_region import Positions, tile_region

NAME = "tile-attention"
CHUNK = "attnc.chunk"
RESULTS = "attnc.results"
"""On a function: the role of each of its results; where it is missing, they are found from the results' ranks."""
STRIDED_OUT = "attnc.strided_out"
"""On a function: its output's last dimension may have any stride."""


def run(module: ModuleOp, target: Target) -> None:
    """Makes a `tile.kernel` of every function that holds an online_attention.

    Raises:
        LoweringError: the attention is none that a kernel can be made for.
    """
    for function in list(module.ops):
        if isinstance(function, FuncOp) and function.body.blocks:
            ops = [op for op in function.body.block.ops if isinstance(op, OnlineAttentionOp)]
            if len(ops) > 1:
                raise LoweringError(f"@{function.sym_name.data}: more than one attention in a function")
            if ops:
                kernel = Tiling(module, match_attention(function, ops[0])).kernel()
                module.body.block.insert_op_before(kernel, function)
                module.body.block.erase_op(function)


class Tiling:
    """Builds the kernel of one function."""

    def __init__(self, module: ModuleOp, attention: Attention):
        self.module = module
        self.attention = attention
        self.function = attention.function
        self.op = cast(OnlineAttentionOp, attention.op)
        sizes = self.op.attributes.get(TILE_SIZES)
        if not isinstance(sizes, DictionaryAttr):
            raise LoweringError(f"{self.op.name} has no {TILE_SIZES}: run select-tile-sizes first")
        self.rows, self.columns = (cast(IntegerAttr, sizes.data[name]).value.data for name in ("rows", "keys"))
        self.chunk = sizes.data.get("chunk")
        self.head_dim = cast(TensorType, attention.query.type).get_shape()[-1]
        self.value_dim = cast(TensorType, attention.value.type).get_shape()[-1]
        if self.head_dim < 1 or self.value_dim < 1:
            raise LoweringError("the head dims of query and value must be static", remedy="specialise the text to their sizes")
        self.score = self.op.region.block.args[0].type
        self.unit_out = STRIDED_OUT not in self.function.attributes
        self.values: dict[SSAValue, SSAValue] = {}

    def kernel(self) -> tile.KernelOp:
        function = self.function
        types = argument_strings(function, "attnc.strides", "")
        names = argument_strings(function, "attnc.names", "")
        roles = argument_strings(function, "attnc.roles", "capture")
        arguments = function.body.block.args
        block = Block(arg_types=[memref_of(argument.type, s) for argument, s in zip(arguments, types, strict=True)])
        for old, new, name in zip(arguments, block.args, names, strict=True):
            new.name_hint = name if name.isidentifier() else old.name_hint
            self.values[old] = new
        outputs = self._outputs()
        self.buffers: dict[str, SSAValue] = {}
        for role, value in outputs:
            shape = cast(TensorType, value.type)
            unit = "1" if self.unit_out or len(shape.shape) < 4 else "?"
            strides = "x".join(["?"] * (len(shape.shape) - 1) + [unit])
            self.buffers[role] = self._argument(block, memref_of(shape, strides), role)
        group = self._argument(block, INDEX, "group")
        self.prelude = Builder(block)
        self._grid(outputs, group)
        self.prelude.insert(tile.YieldOp.create())
        roles = [*roles, *(role for role, _ in outputs), "group"]
        kernel = tile.KernelOp(function.sym_name.data, Region(block), roles)
        kernel.attributes["attnc.names"] = ArrayAttr(
            [
                StringAttr(argument.name_hint or name)
                for argument, name in zip(block.args, [*names, "", "", "", ""], strict=False)
            ]
        )
        return kernel

    @staticmethod
    def _argument(block: Block, type_: Attribute, hint: str) -> BlockArgument:
        argument = block.insert_arg(type_, len(block.args))
        argument.name_hint = hint
        return argument

    def _outputs(self) -> list[tuple[str, SSAValue]]:
        """(role, returned value): the one of full rank is out; of the others, max is the attention's own maximum."""
        last = self.function.body.block.last_op
        assert isinstance(last, ReturnOp)
        named = self.function.attributes.get(RESULTS)
        if isinstance(named, ArrayAttr):
            return [(cast(StringAttr, role).data, value) for role, value in zip(named, last.arguments, strict=True)]
        found: list[tuple[str, SSAValue]] = []
        for value in last.arguments:
            source = value
            while isinstance(source.owner, tensor.CollapseShapeOp):
                source = source.owner.src
            if len(cast(TensorType, source.type).shape) == 5:
                role = "out"
            else:
                role = "max" if self._reads(source) == {self.op.max_result} else "lse"
            found.append((role, value))
        return found

    def _reads(self, value: SSAValue) -> set[SSAValue]:
        """Which of the attention's results a value is computed from."""
        if value.owner is self.op:
            return {value}
        operands = value.owner.operands if isinstance(value.owner, Operation) else ()
        return set[SSAValue]().union(*(self._reads(operand) for operand in operands))

    def outer(self, value: SSAValue) -> SSAValue:
        """The kernel's value for a scalar of the function, computed before the grid."""
        if (known := self.values.get(value)) is not None:
            return known
        owner = value.owner
        if isinstance(owner, tensor.DimOp):
            new = self._dim(owner)
        elif isinstance(owner, Operation) and owner.name.startswith(("arith.", "math.")) and not owner.regions:
            for operand in owner.operands:
                self.outer(operand)
            new = self.prelude.add(owner.clone(self.values), value.name_hint)
        else:
            raise LoweringError(
                f"the attention's region uses a value of {getattr(owner, 'name', 'a block')}, which is no scalar"
            )
        self.values[value] = new
        return new

    def _dim(self, op: tensor.DimOp) -> SSAValue:
        source, position = op.source, op.index.owner
        buffer = self.values.get(source)
        if buffer is None or not isinstance(buffer.type, MemRefType) or not hasattr(position, "value"):
            raise LoweringError("tensor.dim of anything but an argument")
        return self.prelude.add(tile.DimOp(buffer, cast(IntegerAttr, position.value).value.data), op.result.name_hint)  # pyright: ignore

    # -- the grid -----------------------------------------------------------------------------------------------------

    def _size(self, argument: BlockArgument, dimension: int, hint: str) -> SSAValue:
        """A size; the function's own value for it where it has one."""
        for use in argument.uses:
            op = use.operation
            if isinstance(op, tensor.DimOp) and getattr(op.index.owner, "value", None) == IntegerAttr(dimension, INDEX):
                value = self.outer(op.result)
                value.name_hint = hint
                return value
        return self.prelude.add(tile.DimOp(self.values[argument], dimension), hint)

    def _grid(self, outputs: list[tuple[str, SSAValue]], group: SSAValue) -> None:
        prelude = self.prelude
        query, key, value = (
            self.values[argument] for argument in (self.attention.query, self.attention.key, self.attention.value)
        )
        self.c0, self.c1 = prelude.constant(0), prelude.constant(1)
        batch = self._size(self.attention.query, 0, "batch")
        heads = self._size(self.attention.query, 1, "heads")
        self.queries = self._size(self.attention.query, 2, "queries")
        kv_heads = self._size(self.attention.key, 1, "kv_heads")
        self.keys = self._size(self.attention.key, 2, "keys")
        ratio = prelude.binary("divui", heads, kv_heads, "ratio")
        if isinstance(self.attention.group, SSAValue):
            self.values.setdefault(self.attention.group, ratio)
        groups = prelude.binary("divui", heads, group, "groups")
        rows = prelude.binary("muli", self.queries, group, "rows")
        last_row = prelude.binary("subi", rows, self.c1, "last_row")
        zero = prelude.constant(0.0, self.score, "zero")
        minus_infinity = prelude.constant(float("-inf"), self.score, "minus_infinity")
        last_in_task = prelude.constant(self.rows - 1)
        self.last_in_block = prelude.constant(self.columns - 1)

        block = Block(arg_types=[INDEX, INDEX, INDEX])
        for argument, hint in zip(block.args, ("b", "hg", "m0"), strict=True):
            argument.name_hint = hint
        b, hg, m0 = block.args
        grid = Builder(block)
        h0 = grid.binary("muli", hg, group, "h0")
        kv_head = grid.binary("divui", h0, ratio, "kv_head")
        row = grid.add(tile.IotaOp(m0, tile.tile_type(self.rows, 1, INDEX)), "row")
        q = self._row_map(grid, row, "q", lambda build, r: build.binary("divui", r, group, "i"))
        h = self._row_map(grid, row, "h", lambda build, r: build.binary("addi", h0, build.binary("remui", r, group, "g"), "i"))
        e = grid.add(tile.IotaOp(self.c0, tile.tile_type(1, self.head_dim, INDEX)), "e")
        n = e
        if self.value_dim != self.head_dim:
            n = grid.add(tile.IotaOp(self.c0, tile.tile_type(1, self.value_dim, INDEX)), "n")
        query_tile = self._load(grid, query, [b, h, q, e], self.rows, self.head_dim, "query_tile")
        row_type = tile.tile_type(self.rows, 1, self.score)
        acc_type = tile.tile_type(self.rows, self.value_dim, self.score)
        max0 = grid.add(tile.FillOp(minus_infinity, row_type), "max0")
        sum0 = grid.add(tile.FillOp(zero, row_type), "sum0")
        acc0 = grid.add(tile.FillOp(zero, acc_type), "acc0")
        block_end = grid.binary("addi", m0, last_in_task, "block_end")
        m1 = grid.binary("minui", block_end, last_row, "m1")
        q0 = grid.binary("divui", m0, group, "q0")
        q1 = grid.binary("divui", m1, group, "q1")
        h_end = grid.binary("addi", h0, group, "h_end")
        h1 = grid.binary("subi", h_end, self.c1, "h1")

        self.positions = Positions(b, kv_head, h, q, ratio)
        loop = self._loop(grid, [b, h0, h1, q0, q1], [max0, sum0, acc0], query_tile, (key, value), (e, n))
        self.tiles: dict[SSAValue, SSAValue] = dict(
            zip([self.op.max_result, self.op.sum_result, self.op.acc_result], loop.results, strict=True)
        )
        for role, result in outputs:
            tile_ = self._finalise(grid, result)
            indices = [b, h, q, n] if len(cast(TensorType, result.type).shape) == 4 else [b, h, q]
            grid.insert(tile.StoreOp(tile_, self.buffers[role], indices))
        grid.insert(tile.YieldOp.create())
        erase_dead(block)
        heavy_last = "attnc.classifier" in self.op.attributes
        prelude.insert(tile.GridOp([batch, groups, rows], [1, 1, self.rows], Region(block), descending=heavy_last))

    @staticmethod
    def _row_map(grid: Builder, row: SSAValue, hint: str, body) -> SSAValue:
        block = Block(arg_types=[INDEX])
        block.args[0].name_hint = "r"
        build = Builder(block)
        build.insert(tile.YieldOp.create(operands=[body(build, block.args[0])]))
        return grid.add(tile.MapOp([row], cast(TensorType, row.type), Region(block)), hint)

    def _load(self, build: Builder, buffer: SSAValue, indices: list[SSAValue], rows: int, columns: int, hint: str) -> SSAValue:
        element = cast(MemRefType, buffer.type).element_type
        return build.add(tile.LoadOp(buffer, indices, tile.tile_type(rows, columns, element)), hint)

    # -- the loop over keys -------------------------------------------------------------------------------------------

    def _loop(
        self,
        grid: Builder,
        bounds: list[SSAValue],
        inits: list[SSAValue],
        query_tile: SSAValue,
        buffers: tuple[SSAValue, SSAValue],
        columns: tuple[SSAValue, SSAValue],
    ) -> tile.ForOp:
        block = Block(arg_types=[INDEX, *(init.type for init in inits)])
        k0, *carried = block.args
        for argument, hint in zip(block.args, ("k0", "max_old", "sum_old", "acc_old"), strict=True):
            argument.name_hint = hint
        loop = Builder(block)
        k1 = loop.binary("addi", k0, self.last_in_block, "k1")
        name, extra = self._classifier()
        class_ = loop.add(tile.ClassifyOp(name, [*bounds, k0, k1, *extra, self.keys]), "class")

        skipped, taken = Block(), Block()
        skipped.add_op(tile.YieldOp(carried))
        body = Builder(taken)
        b, kv_head = self.positions.batch, self.positions.kv_head
        k_row = body.add(tile.IotaOp(k0, tile.tile_type(self.columns, 1, INDEX)), "k_row")
        key_tile = self._load(body, buffers[0], [b, kv_head, k_row, columns[0]], self.columns, self.head_dim, "key_tile")
        value_tile = self._load(body, buffers[1], [b, kv_head, k_row, columns[1]], self.columns, self.value_dim, "value_tile")
        k = body.add(tile.IotaOp(k0, tile.tile_type(1, self.columns, INDEX)), "k")
        max_old, sum_old, acc_old = carried
        region = tile_region(self.attention, self.positions, k, self.keys, self.prelude, self.outer)
        online = OnlineAttentionOp.create(
            operands=[query_tile, key_tile, value_tile, self.outer(self.op.scale), acc_old, max_old, sum_old],
            properties={"indexing_maps": ArrayAttr([AffineMapAttr(map_) for map_ in _tile_maps()])},
            result_types=[acc_old.type, max_old.type, sum_old.type],
            regions=[region],
        )
        if self.chunk is not None:
            online.attributes[CHUNK] = self.chunk
        body.insert(online, "acc_new", "max_new", "sum_new")
        acc, max_, sum_ = online.results
        body.insert(tile.YieldOp([max_, sum_, acc]))
        cases = [(["empty"], Region(skipped)), (["full", "partial"], Region(taken))]
        next_ = loop.insert(tile.CaseOp(class_, [value.type for value in carried], cases), "max_next", "sum_next", "acc_next")
        loop.insert(tile.YieldOp(next_.results))
        op = tile.ForOp(self.c0, self.keys, self.columns, inits, Region(block))
        return grid.insert(op, "max", "sum", "acc")

    def _classifier(self, queries: bool = False) -> tuple[str, list[SSAValue]]:
        attribute = self.op.attributes.get("attnc.classifier")
        name = attribute.root_reference.data if isinstance(attribute, SymbolRefAttr) else None
        name = bound_classifier(self.module, self.function, name, is_unmasked(self.op), queries)
        arguments = self.op.attributes.get("attnc.classifier_arguments")
        if not isinstance(arguments, DenseArrayBase):
            return name, []
        return name, [self.values[self.function.body.block.args[int(n)]] for n in arguments.get_values()]

    # -- after the loop -----------------------------------------------------------------------------------------------

    def _finalise(self, grid: Builder, value: SSAValue) -> SSAValue:
        """The tile of a tensor that is computed, element by element, from the attention's results."""
        if (known := self.tiles.get(value)) is not None:
            return known
        owner = value.owner
        if isinstance(owner, tensor.CollapseShapeOp):
            result = self._finalise(grid, owner.src)
        elif isinstance(owner, linalg.FillOp):
            result = grid.add(tile.FillOp(self.outer(owner.operands[0]), self._tile_type(value)), value.name_hint)
        elif isinstance(owner, linalg.GenericOp):
            result = self._finalise_generic(grid, owner, value)
        else:
            raise LoweringError(
                f"what is returned is computed by {getattr(owner, 'name', 'a block')}: no kernel for that so far"
            )
        self.tiles[value] = result
        return result

    def _tile_type(self, value: SSAValue) -> TensorType:
        type_ = cast(TensorType, value.type)
        return tile.tile_type(self.rows, self.value_dim if len(type_.shape) == 5 else 1, type_.element_type)

    def _finalise_generic(self, grid: Builder, op: linalg.GenericOp, value: SSAValue) -> SSAValue:
        rank = len(cast(TensorType, value.type).shape)
        rows = AffineMap(rank, 0, tuple(AffineDimExpr(dim) for dim in range(4)))
        allowed = (AffineMap.identity(rank), rows)
        maps = [attribute.data for attribute in op.indexing_maps]
        parallel = all(type_.data.value == "parallel" for type_ in op.iterator_types)
        if not parallel or any(map_ not in allowed for map_ in maps):
            raise LoweringError("linalg.generic after attention: only elementwise ones over (b, hkv, g, q[, n]) so far")
        inputs = [self._finalise(grid, operand) for operand in op.inputs]
        body = op.body.block
        block = Block(arg_types=[cast(TensorType, input_.type).element_type for input_ in inputs])
        mapper: dict[SSAValue, SSAValue] = dict(self.values)
        for old, new in zip(body.args, block.args, strict=False):
            new.name_hint = old.name_hint
            mapper[old] = new
        last = body.last_op
        assert isinstance(last, linalg.YieldOp)
        for inner in body.ops:
            if inner is not last:
                for operand in inner.operands:
                    if operand not in mapper:
                        mapper[operand] = self.outer(operand)
                block.add_op(inner.clone(mapper))
        yielded = last.operands[cast(OpResult, value).index]
        if yielded not in mapper:
            mapper[yielded] = self.outer(yielded)
        block.add_op(tile.YieldOp([mapper[yielded]]))
        erase_dead(block)
        return grid.add(tile.MapOp(inputs, self._tile_type(value), Region(block)), value.name_hint)


def _tile_maps() -> list[AffineMap]:
    """Over (m, k, e, n): a row's maximum and sum are tiles of one column."""
    m, k, e, n = (AffineDimExpr(dim) for dim in range(4))
    row = (m, AffineConstantExpr(0))
    return [AffineMap(4, 0, results) for results in ((m, e), (k, e), (k, n), (), (m, n), row, row)]
