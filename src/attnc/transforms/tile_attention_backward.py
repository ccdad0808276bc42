"""The derivative of attention becomes a kernel: tasks of keys, each a loop over blocks of query rows.

Before (b, hkv, g, q, k, e, n):

    func.func @attention_backward(%query, …, %slopes, %out, %lse, %d_out, %d_lse) {
      …
      %d_query, %d_key, %d_value, %d_slopes = "attnc.attention_backward"(%q5, …, %slopes) {attnc.tile = {rows = 48, keys = 64}}
      return %d_query_4d, %d_key, %d_value, %d_slopes

After (m, k, e, n):

    tile.kernel @attention_backward(%query, …, %d_lse, %d_query, %d_key, %d_value, %d_slopes) roles […] {
      tile.grid (%b, %kv_head, %k0) to (…) step (1, 1, 64) {
        … the key and value tiles …
        %d_key_tile, %d_value_tile = tile.for %m0 = %c0 to %rows step 48 carry(…) {
          %class = tile.classify @classify(%b, %h0, %h1, %q0, %q1, %k0, %k1, …, %keys, %queries)
          %next:2 = tile.case %class empty { the carried values } full, partial {
            … the query head %h and position %q of each row; query, out, lse and their gradients' tiles …
            %d_query_part, %d_key_new, %d_value_new = "attnc.attention_backward"(…, %d_slopes, %d_key_old, %d_value_old)
              (regions on tiles: positions are read from the tile that holds them, captured tensors by tile.gather)
            tile.accumulate %d_query_part into %d_query[%b, %h, %q, %e] owners [2]
          }
        }
        tile.store %d_key_tile, …

Row r of a block is query `r / ratio` of head `h0 + r % ratio`: a task serves all query heads of its key/value head. The
gradients of key and value belong to one task each. That of the query, and those of scale and captured tensors, are sums of
many tasks: their buffers are zero before the call. The classifier learns of the end of the keys and of the queries: no block
beyond is FULL.
"""

from __future__ import annotations

from typing import cast

from xdsl.dialects.builtin import ArrayAttr, MemRefType, ModuleOp, StringAttr, TensorType
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute, Block, BlockArgument, Region, SSAValue
from xdsl.ir.affine import AffineConstantExpr, AffineDimExpr, AffineMap

from attnc.analysis.attention import match_attention
from attnc.analysis.buffers import argument_strings, memref_of
from attnc.dialects import tile
from attnc.dialects.attention_backward import AttentionBackwardOp
from attnc.dialects.building import INDEX, Builder, erase_dead
from attnc.errors import LoweringError
from attnc.target import Target
from attnc.transforms.tile_attention import Tiling
from attnc.transforms.tile_attention_region import Positions, tile_derivative, tile_region

NAME = "tile-attention-backward"

KEY_BLOCKS = 2
"""The grid's dimension of key blocks, beside 0 (batch) and 1 (key/value heads)."""


def run(module: ModuleOp, target: Target) -> None:
    """Makes a `tile.kernel` of every function that holds an attention_backward.

    Raises:
        LoweringError: it is none that a kernel can be made for.
    """
    for function in list(module.ops):
        if isinstance(function, FuncOp) and function.body.blocks:
            ops = [op for op in function.body.block.ops if isinstance(op, AttentionBackwardOp)]
            if len(ops) > 1:
                raise LoweringError(f"@{function.sym_name.data}: more than one attention in a function")
            if ops:
                kernel = _BackwardTiling(module, function, ops[0]).kernel()
                module.body.block.insert_op_before(kernel, function)
                module.body.block.erase_op(function)


class _BackwardTiling(Tiling):
    """Builds the kernel of one function."""

    op: AttentionBackwardOp

    def __init__(self, module: ModuleOp, function: FuncOp, op: AttentionBackwardOp):
        super().__init__(module, match_attention(function, op))

    def kernel(self) -> tile.KernelOp:
        function, op = self.function, self.op
        strides = argument_strings(function, "attnc.strides", "")
        names = argument_strings(function, "attnc.names", "")
        roles = argument_strings(function, "attnc.roles", "capture")
        arguments = function.body.block.args
        block = Block(arg_types=[memref_of(argument.type, s) for argument, s in zip(arguments, strides, strict=True)])
        for old, new, name in zip(arguments, block.args, names, strict=True):
            new.name_hint = name if name.isidentifier() else old.name_hint
            self.values[old] = new
        self.given = dict(zip(roles, arguments, strict=True))
        self.buffers: dict[str, SSAValue] = {}
        self.gradients: dict[SSAValue, SSAValue] = {}
        own = list(op.results)
        for name, result in zip(op.wanted, own, strict=False):
            source = arguments[list(roles).index(name)].type if name != "scale" else result.type
            shape = TensorType(cast(TensorType, result.type).element_type, cast(TensorType, source).get_shape())
            self.buffers[name] = self._argument(block, _dense(shape), f"d_{name}")
            roles, names = [*roles, f"d_{name}"], [*names, f"d_{name}"]
        for capture, result in zip(op.captures, own[len(op.wanted) :], strict=True):
            hint = f"d_{self.values[capture].name_hint}"
            self.gradients[capture] = self._argument(block, _dense(cast(TensorType, result.type)), hint)
            roles, names = [*roles, "d_capture"], [*names, f"d_{names[cast(BlockArgument, capture).index]}"]
        self.prelude = Builder(block)
        self._tasks()
        self.prelude.insert(tile.YieldOp.create())
        kernel = tile.KernelOp(function.sym_name.data, Region(block), roles)
        kernel.attributes["attnc.names"] = ArrayAttr([StringAttr(name) for name in names])
        return kernel

    # -- the grid -----------------------------------------------------------------------------------------------------

    def _tasks(self) -> None:
        prelude, attention = self.prelude, self.attention
        self.c0, self.c1 = prelude.constant(0), prelude.constant(1)
        batch = self._size(attention.query, 0, "batch")
        heads = self._size(attention.query, 1, "heads")
        self.queries = self._size(attention.query, 2, "queries")
        kv_heads = self._size(attention.key, 1, "kv_heads")
        self.keys = self._size(attention.key, 2, "keys")
        self.ratio = prelude.binary("divui", heads, kv_heads, "ratio")
        if isinstance(attention.group, SSAValue):
            self.values.setdefault(attention.group, self.ratio)
        self.all_rows = prelude.binary("muli", self.queries, self.ratio, "rows")
        zero = prelude.constant(0.0, self.score, "zero")
        last_key, self.last_row = prelude.constant(self.columns - 1), prelude.constant(self.rows - 1)

        block = Block(arg_types=[INDEX, INDEX, INDEX])
        for argument, hint in zip(block.args, ("b", "kv_head", "k0"), strict=True):
            argument.name_hint = hint
        b, kv_head, k0 = block.args
        grid = Builder(block)
        h0 = grid.binary("muli", kv_head, self.ratio, "h0")
        h1 = grid.binary("subi", grid.binary("addi", h0, self.ratio, "h_end"), self.c1, "h1")
        k1 = grid.binary("addi", k0, last_key, "k1")
        e = grid.add(tile.IotaOp(self.c0, tile.tile_type(1, self.head_dim, INDEX)), "e")
        n = e
        if self.value_dim != self.head_dim:
            n = grid.add(tile.IotaOp(self.c0, tile.tile_type(1, self.value_dim, INDEX)), "n")
        self.e, self.n = e, n
        self.k = grid.add(tile.IotaOp(k0, tile.tile_type(1, self.columns, INDEX)), "k")
        k_row = grid.add(tile.IotaOp(k0, tile.tile_type(self.columns, 1, INDEX)), "k_row")
        key, value = (self.values[argument] for argument in (attention.key, attention.value))
        self.key_tile = self._load(grid, key, [b, kv_head, k_row, e], self.columns, self.head_dim, "key_tile")
        self.value_tile = self._load(grid, value, [b, kv_head, k_row, n], self.columns, self.value_dim, "value_tile")
        carried = [name for name in ("key", "value") if name in self.op.wanted]
        columns = {"key": (self.head_dim, e), "value": (self.value_dim, n)}
        inits = [
            grid.add(tile.FillOp(zero, tile.tile_type(self.columns, columns[name][0], self.score)), f"d_{name}0")
            for name in carried
        ]
        loop = self._rows_loop(grid, [b, kv_head, h0, h1, k0, k1], carried, inits)
        for name, result in zip(carried, loop.results, strict=True):
            buffer = self.buffers[name]
            stored = self._narrowed(grid, result, cast(MemRefType, buffer.type).element_type)
            grid.insert(tile.StoreOp(stored, buffer, [b, kv_head, k_row, columns[name][1]]))
        grid.insert(tile.YieldOp.create())
        erase_dead(block)
        prelude.insert(tile.GridOp([batch, kv_heads, self.keys], [1, 1, self.columns], Region(block)))

    @staticmethod
    def _narrowed(grid: Builder, result: SSAValue, element: Attribute) -> SSAValue:
        """A sum in the type of the buffer that it goes to."""
        type_ = cast(TensorType, result.type)
        if type_.element_type == element:
            return result
        block = Block(arg_types=[type_.element_type])
        build = Builder(block)
        narrow = build.cast("truncf", block.args[0], element)
        build.insert(tile.YieldOp([narrow]))
        rows, columns = type_.get_shape()
        return grid.add(tile.MapOp([result], tile.tile_type(rows, columns, element), Region(block)), result.name_hint)

    # -- the loop over rows -------------------------------------------------------------------------------------------

    def _rows_loop(self, grid: Builder, bounds: list[SSAValue], wanted: list[str], inits: list[SSAValue]) -> tile.ForOp:
        b, kv_head, h0, h1, k0, k1 = bounds
        block = Block(arg_types=[INDEX, *(init.type for init in inits)])
        m0, *carried = block.args
        m0.name_hint = "m0"
        for argument, name in zip(carried, wanted, strict=True):
            argument.name_hint = f"d_{name}_old"
        loop = Builder(block)
        m1 = loop.binary("addi", m0, self.last_row, "m1")
        q0 = loop.binary("divui", m0, self.ratio, "q0")
        q1 = loop.binary("divui", m1, self.ratio, "q1")
        name, extra = self._classifier(queries=True)
        arguments = [b, h0, h1, q0, q1, k0, k1, *extra, self.keys, self.queries]
        class_ = loop.add(tile.ClassifyOp(name, arguments), "class")
        skipped, taken = Block(), Block()
        skipped.add_op(tile.YieldOp(carried))
        results = self._block(Builder(taken), b, kv_head, h0, m0, list(carried))
        taken.add_op(tile.YieldOp(results))
        cases = [(["empty"], Region(skipped)), (["full", "partial"], Region(taken))]
        hints = [f"d_{name}_next" for name in wanted]
        next_ = loop.insert(tile.CaseOp(class_, [value.type for value in carried], cases), *hints)
        loop.insert(tile.YieldOp(next_.results))
        op = tile.ForOp(self.c0, self.all_rows, self.rows, inits, Region(block))
        return grid.insert(op, *(f"d_{name}_tile" for name in wanted))

    def _block(
        self, body: Builder, b: SSAValue, kv_head: SSAValue, h0: SSAValue, m0: SSAValue, carried: list[SSAValue]
    ) -> list[SSAValue]:
        """The body for one block of rows; returns what is carried on."""
        ratio = self.ratio
        row = body.add(tile.IotaOp(m0, tile.tile_type(self.rows, 1, INDEX)), "row")
        q = self._row_map(body, row, "q", lambda build, r: build.binary("divui", r, ratio, "i"))
        h = self._row_map(body, row, "h", lambda build, r: build.binary("addi", h0, build.binary("remui", r, ratio, "g"), "i"))
        positions = Positions(b, kv_head, h, q, ratio)
        given = {role: self.values[self.given[role]] for role in ("query", "out", "lse", "d_out", "d_lse")}

        def load(role: str, columns: int, last: list[SSAValue]) -> SSAValue:
            return self._load(body, given[role], [b, h, q, *last], self.rows, columns, f"{role}_tile")

        query, out, d_out = (
            load("query", self.head_dim, [self.e]),
            load("out", self.value_dim, [self.n]),
            load("d_out", self.value_dim, [self.n]),
        )
        lse, d_lse = load("lse", 1, []), load("d_lse", 1, [])
        op = self.op
        region = tile_region(self.attention, positions, self.k, self.keys, self.prelude, self.outer, self.queries)
        derivative = tile_derivative(
            self.attention, op.derivative.block, positions, self.k, self.prelude, self.outer, self.gradients
        )
        types = {
            "query": tile.tile_type(self.rows, self.head_dim, self.score),
            "key": tile.tile_type(self.columns, self.head_dim, self.score),
            "value": tile.tile_type(self.columns, self.value_dim, self.score),
            "scale": tile.tile_type(self.rows, 1, self.score),
        }
        tiled = AttentionBackwardOp(
            [query, self.key_tile, self.value_tile, self.outer(op.scale), out, lse, d_out],
            d_lse,
            list(self.gradients.values()),
            [*_tile_maps(), *(_GRADIENT_MAPS[name] for name in op.wanted)],
            op.wanted,
            [types[name] for name in op.wanted],
            region,
            derivative,
            carried,
        )
        body.insert(tiled, *(f"d_{name}_{'new' if name in ('key', 'value') else 'part'}" for name in op.wanted))
        found = dict(zip(op.wanted, tiled.results, strict=True))
        if "query" in found:
            body.insert(tile.AccumulateOp(found["query"], self.buffers["query"], [b, h, q, self.e], [KEY_BLOCKS]))
        if "scale" in found:
            body.insert(tile.AccumulateOp(found["scale"], self.buffers["scale"], [self.c0], [0, 1, KEY_BLOCKS]))
        return [found[name] for name in ("key", "value") if name in found]


def _dense(type_: TensorType) -> Attribute:
    return memref_of(type_, "x".join(["?"] * (len(type_.shape) - 1) + ["1"]))


_M, _K, _E, _N = (AffineDimExpr(dim) for dim in range(4))
_ROW = (_M, AffineConstantExpr(0))
_GRADIENT_MAPS = {
    name: AffineMap(4, 0, results)
    for name, results in (("query", (_M, _E)), ("key", (_K, _E)), ("value", (_K, _N)), ("scale", _ROW))
}


def _tile_maps() -> list[AffineMap]:
    """Over (m, k, e, n), of what is read: a row's numbers are tiles of one column."""
    everything = ((_M, _E), (_K, _E), (_K, _N), (), (_M, _N), _ROW, (_M, _N), _ROW)
    return [AffineMap(4, 0, results) for results in everything]
