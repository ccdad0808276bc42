"""What rounding leaves of a row's gradients is taken out of the sums that it would be multiplied in.

The gradients of a row's modified scores add up to that of its lse, for weights add up to 1. Computed ones do so only but for
roundings, above all those of `d_weights`, and a sum over the row of their products with something large (a distance from
query to key) has that rest times its mean. So, in the kernel, for each sum over whole rows that goes to a captured tensor or to
the scale

    %share = tile.reduce add (the map of the sum, of %weights in the place of %d_modified)
    tile.accumulate %share into %row_share[%b, %h, %q] owners [2]

and once

    %rest = tile.reduce add %d_modified ;   tile.accumulate %rest into %row_rest[%b, %h, %q] owners [2]

Another kernel, run after it on the same arguments, takes their products out:

    tile.kernel @attention_backward_rests(…, %row_rest, %row_share) {
      tile.grid (%b, %kv_head, %k0) to (…, 1) step (1, 1, 1) {
        tile.for %m0 = %c0 to %rows step 48 {
          … %h, %q, %d_lse_tile and the indices, as in the kernel …
          %taken_out = tile.map … -(%row_rest - %d_lse) · %row_share, 0 where the share is 0
          tile.accumulate %taken_out into %d_slopes[%h] owners […]

The row buffers (role `row_sum`, f64, [B, Hq, Sq]) are zero before the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from xdsl.dialects.builtin import DYNAMIC_INDEX, ArrayAttr, StringAttr, TensorType, f64
from xdsl.ir import Block, BlockArgument, Operation, SSAValue

from attnc.analysis.buffers import memref_of
from attnc.dialects import tile
from attnc.dialects.building import Builder, erase_dead
from attnc.transforms.decompose_attention import map_tile

ROLE = "row_sum"
MOST = 4
"""With more sums than this, whose maps would all be written twice, rests stay where they are."""


@dataclass(frozen=True)
class RowSum:
    """A sum over whole rows: what it is of the weights [rows, 1], and where it goes."""

    share: SSAValue
    buffer: SSAValue
    indices: Sequence[SSAValue]
    owners: Sequence[int]


class Rests:
    """The row buffers of a kernel whose derivative has `sums`."""

    def __init__(self, kernel: tile.KernelOp, lse: SSAValue, d_lse: SSAValue | None, sums: Sequence[RowSum]):
        load = lse.owner
        assert isinstance(load, tile.LoadOp)
        self.kernel, self.lse, self.d_lse, self.sums = kernel, lse, d_lse, sums
        self.row = list(load.indices)
        self.rest = self._argument("row_rest")
        self.shares = [self._argument("row_share") for _ in sums]

    def _argument(self, name: str) -> BlockArgument:
        """A new last argument."""
        kernel, block = self.kernel, self.kernel.body.block
        type_ = memref_of(TensorType(f64, [DYNAMIC_INDEX] * 3), "?x?x1")
        argument = block.insert_arg(type_, len(block.args))
        argument.name_hint = name
        assert kernel.roles is not None
        kernel.attributes["roles"] = ArrayAttr([*kernel.roles, StringAttr(ROLE)])
        names = kernel.attributes.get("attnc.names")
        if isinstance(names, ArrayAttr):
            kernel.attributes["attnc.names"] = ArrayAttr([*names, StringAttr(name)])
        return argument

    def keep(self, build: Builder, d_modified: SSAValue) -> None:
        """Sums up, in the kernel, what the other one reads."""
        rest = build.add(tile.ReduceOp("add", d_modified), "rest")
        build.insert(tile.AccumulateOp(rest, self.rest, self.row, [2]))
        for sum_, buffer in zip(self.sums, self.shares, strict=True):
            build.insert(tile.AccumulateOp(sum_.share, buffer, self.row, [2]))

    def add_kernel(self) -> None:
        """Puts the other kernel behind the decomposed one."""
        made: dict[SSAValue, SSAValue] = {}
        kernel = self.kernel.clone(made)
        kernel.attributes["sym_name"] = StringAttr(f"{kernel.sym_name.data}_rests")
        block = kernel.body.block
        grid = next(op for op in block.ops if isinstance(op, tile.GridOp))
        loop = next(op for op in grid.body.block.ops if isinstance(op, tile.ForOp))
        body = loop.body.block
        case = next(op for op in body.ops if isinstance(op, tile.CaseOp))
        taken = case.cases[-1].block
        for op in list(taken.ops):
            if isinstance(op, tile.AccumulateOp | tile.YieldOp):
                _erase(op)
        self._take_out(Builder(taken), made)
        for op in list(taken.ops):
            op.detach()
            body.insert_op_before(op, case)
        assert body.last_op is not None
        _erase(body.last_op)
        _erase(case)
        body.add_op(tile.YieldOp.create())
        erase_dead(body)
        while len(body.args) > 1:
            body.erase_arg(body.args[-1])
        while grid.body.block.last_op is not loop:
            assert grid.body.block.last_op is not None
            _erase(grid.body.block.last_op)
        grid.body.block.add_op(tile.ForOp(loop.lower, loop.upper, loop.step.value.data, [], loop.detach_region(loop.body)))
        grid.body.block.add_op(tile.YieldOp.create())
        _erase(loop)
        erase_dead(grid.body.block)
        before = Block()
        one = Builder(before).constant(1)
        for op in list(before.ops):
            op.detach()
            block.insert_op_before(op, grid)
        bounds = [*list(grid.bounds)[:2], one]
        block.insert_op_before(tile.GridOp(bounds, [1, 1, 1], grid.detach_region(grid.body)), grid)
        _erase(grid)
        erase_dead(block)
        module = self.kernel.parent_block()
        assert module is not None
        module.insert_op_after(kernel, self.kernel)

    def _take_out(self, build: Builder, made: dict[SSAValue, SSAValue]) -> None:
        row = [made[index] for index in self.row]
        wide = tile.tile_type(tile.shape_of(self.lse)[0], 1, f64)
        rest = build.add(tile.LoadOp(made[self.rest], row, wide), "rest")
        for sum_, buffer in zip(self.sums, self.shares, strict=True):
            type_ = cast(TensorType, sum_.share.type)
            score = type_.element_type
            inputs = {"r": rest, "w": build.add(tile.LoadOp(made[buffer], row, wide), "share")}
            if self.d_lse is not None:
                inputs["g"] = made[self.d_lse]

            def product(m: Builder, r: SSAValue, w: SSAValue, g: SSAValue | None = None) -> SSAValue:
                if g is not None:
                    r = m.binary("subf", r, g if score == f64 else m.cast("extf", g, f64, "wide"), "rest")  # noqa: B023
                zero = m.constant(0.0, f64, "zero")
                nothing = m.compare_floats("oeq", w, zero, "nothing")
                found = m.select(nothing, zero, m.binary("mulf", m.binary("subf", zero, r, "minus"), w, "product"), "found")
                return found if score == f64 else m.cast("truncf", found, score, "narrow")  # noqa: B023

            out = map_tile(build, type_, "taken_out", inputs, product)
            indices = [made[index] for index in sum_.indices]
            build.insert(tile.AccumulateOp(out, made[sum_.buffer], indices, sum_.owners))


def _erase(op: Operation) -> None:
    op.detach()
    op.erase(safe_erase=False)
