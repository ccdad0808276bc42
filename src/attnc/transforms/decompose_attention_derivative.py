"""A derivative on tiles: maps over the pairs of a block, and sums into the gradients of captured tensors.

Before:

    "attnc.accumulate"(%share, %d_bias, %hi, %i)

After:

    %shares = tile.map (%s = %scores, %d = %d_modified, …) { … yield %share }
    %d_bias_index = tile.map (%qi = %q, …) { … yield %i, wrapped once }
    tile.accumulate %shares into %d_bias[%h, %d_bias_index] owners […]

Where no index is another from key to key, the shares of a row are summed before. An index that is a position is the tile that
holds it; another is computed in a map of its own, over rows, keys or pairs, as what it depends on. `owners` are the
dimensions of the grid (batch, key/value head, block of keys) in which tasks may meet in one element: all but those that an
index tells apart. An accumulate inside of a loop over a row is done for each turn: such loops are written out.
"""

from __future__ import annotations

import math as python_math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from xdsl.dialects import arith, scf, tensor
from xdsl.dialects.builtin import IndexType, TensorType
from xdsl.ir import Attribute, Block, BlockArgument, Operation, Region, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from attnc.analysis.attention import slice_of
from attnc.dialects import tile
from attnc.dialects.attention_backward import AccumulateOp, AttentionBackwardOp, DerivativeYieldOp
from attnc.dialects.building import INDEX, Builder, erase_dead
from attnc.dialects.linalg_ext import IndexOp
from attnc.errors import LoweringError
from attnc.transforms.decompose_attention_rests import RowSum
from attnc.transforms.differentiate_tape import length_of, yielded

TURNS = 4096
"""Turns of loops that are written out, at most."""
FEW = 6
"""With more sums than this, a map that reads captured tensors is not written twice, for full and for partial blocks."""


class Derivative:
    """The derivative of one tiled attention_backward; what it computes is appended by `build`."""

    def __init__(self, op: AttentionBackwardOp, build: Builder, scores: SSAValue, d_modified: SSAValue, live: SSAValue):
        self.op, self.build = op, build
        self.source = op.derivative.block
        self.score = self.source.args[0].type
        self.rows, self.columns = tile.shape_of(op.query)[0], tile.shape_of(op.key)[0]
        self.inputs = dict(zip(self.source.args, (scores, d_modified, live), strict=True))
        self.scores = scores
        self.index_tiles: dict[tuple[SSAValue, SSAValue, int], SSAValue] = {}
        kernel = op.parent_op()
        while kernel is not None and not isinstance(kernel, tile.KernelOp):
            kernel = kernel.parent_op()
        assert isinstance(kernel, tile.KernelOp)
        self.kernel = kernel
        self.grid = next(inner for inner in kernel.body.block.ops if isinstance(inner, tile.GridOp))
        self.sizes: dict[tuple[SSAValue, int], SSAValue] = {}
        self.row_sums: list[tuple[SSAValue, SSAValue, list[SSAValue], list[int]]] = []
        """Of sums over whole rows: the value, the gradient, its indices, and owners."""
        _write_out(self.source)

    # -- the gradient of the score ------------------------------------------------------------------------------------

    def d_score(self, factor: SSAValue | None, hint: str) -> SSAValue:
        """The gradient of each pair's natural score, times a factor."""
        last = self.source.last_op
        assert isinstance(last, DerivativeYieldOp)

        def scaled(m: Builder, d: SSAValue) -> SSAValue:
            return d if factor is None else m.binary("mulf", d, factor, "scaled")

        return self._map(last.values[0], (self.rows, self.columns), self.score, hint, scaled)

    # -- the gradients of captured tensors ----------------------------------------------------------------------------

    def accumulate(self) -> None:
        """Adds all shares to the gradients of captured tensors."""
        for op in list(self.source.ops):
            if isinstance(op, AccumulateOp):
                self._accumulate(op)

    def _accumulate(self, op: AccumulateOp) -> None:
        indices = [self._index(index, op.target, dim) for dim, index in enumerate(op.indices)]
        name = op.target.name_hint or "d_capture"
        shares = self._map(op.value, (self.rows, self.columns), self.score, f"{name}_pairs")
        shapes = [tile.shape_of(index) for index in indices if isinstance(index.type, TensorType)]
        told_apart = [self._tells_apart(index) for index in op.indices]
        owners = [dim for dim in range(3) if dim not in told_apart]
        if all(columns == 1 for _, columns in shapes):
            shares = self.build.add(tile.ReduceOp("add", shares), f"{name}_rows")
            self.row_sums.append((op.value, op.target, indices, owners))
        self.build.insert(tile.AccumulateOp(shares, op.target, indices, owners))

    def of_weights(self, weights: SSAValue) -> list[RowSum]:
        """The sums over whole rows, of weights in the place of the modified scores' gradients."""
        found = []
        with self.at(weights):
            for value, target, indices, owners in self.row_sums:
                name = f"{target.name_hint or 'd_capture'}_weights"
                pairs = self._map(value, (self.rows, self.columns), self.score, name)
                found.append(RowSum(self.build.add(tile.ReduceOp("add", pairs), f"{name}_rows"), target, indices, owners))
        return found

    @contextmanager
    def at(self, d_modified: SSAValue) -> Iterator[None]:
        """Other gradients of the modified scores, meanwhile."""
        argument = self.source.args[1]
        kept, self.inputs[argument] = self.inputs[argument], d_modified
        yield
        self.inputs[argument] = kept

    def _tells_apart(self, index: SSAValue) -> int | None:
        """The dimension of the grid whose tasks have different values of an index, if there is one."""
        batch, kv_head, _ = self.grid.body.block.args
        if index is batch:
            return 0
        if index is kv_head:
            return 1
        position = _position(index)
        if position is None:
            return None
        if tile.shape_of(position)[1] != 1:
            return 2
        # Of the two positions of a row, only the head is made from the key/value head.
        first = self.op.parent_block()
        assert first is not None
        owner = position.owner
        found = {operand for inner in owner.walk() for operand in inner.operands} if isinstance(owner, Operation) else set()
        return 1 if any(_made_from(value, kv_head) for value in found) else None

    def _index(self, index: SSAValue, target: SSAValue, dim: int) -> SSAValue:
        """A scalar or a tile of indices into a gradient, negative ones wrapped."""
        position = _position(index)
        if position is not None:
            return position
        owner = index.owner
        if isinstance(owner, arith.ConstantOp):
            number = cast(int, owner.value.value.data)  # pyright: ignore[reportAttributeAccessIssue]
            return self.build.constant(number) if number >= 0 else self._wrapped_constant(number, target, dim)
        if isinstance(owner, BlockArgument | Block) or owner.parent is not self.source:
            return index
        known = self.index_tiles.get((index, target, dim))
        if known is None:
            size = self._size(target, dim)

            def wrapped(m: Builder, i: SSAValue) -> SSAValue:
                return m.select(m.compare("slt", i, m.constant(0), "negative"), m.binary("addi", i, size, "from_end"), i, "i")

            shape = self._extent(index)
            hint = f"{target.name_hint or 'd_capture'}_index"
            known = self._map(index, shape, INDEX, hint, wrapped)
            self.index_tiles[(index, target, dim)] = known
        return known

    def _wrapped_constant(self, number: int, target: SSAValue, dim: int) -> SSAValue:
        return self.build.binary("addi", self.build.constant(number), self._size(target, dim), "from_end")

    def _size(self, buffer: SSAValue, dim: int) -> SSAValue:
        """A size of a buffer, computed at the head of the kernel."""
        if (buffer, dim) not in self.sizes:
            op = tile.DimOp(buffer, dim)
            op.result.name_hint = f"{buffer.name_hint or 'gradient'}_size"
            Rewriter.insert_op([op], InsertPoint.before(self.grid))
            self.sizes[buffer, dim] = op.result
        return self.sizes[buffer, dim]

    def _extent(self, value: SSAValue) -> tuple[int, int]:
        """The shape of a tile of that value: one row or column where it does not depend on the other."""
        rows = columns = 1
        for op in slice_of([value], self.source):
            for inner in op.walk():
                for operand in inner.operands:
                    if operand in self.inputs:
                        rows, columns = self.rows, self.columns
                if isinstance(inner, tensor.ExtractOp):
                    r, c = tile.shape_of(inner.tensor)
                    rows, columns = max(rows, r), max(columns, c)
        return (rows, columns) if (rows, columns) != (1, 1) else (self.rows, 1)

    # -- maps ---------------------------------------------------------------------------------------------------------

    def _map(
        self,
        value: SSAValue,
        shape: tuple[int, int],
        element: Attribute,
        hint: str,
        body: Callable[[Builder, SSAValue], SSAValue] | None = None,
    ) -> SSAValue:
        """A value of the derivative as a tile; `body` makes of it what is yielded."""
        needed = slice_of([value], self.source)
        gathers = any(isinstance(inner, tile.GatherOp) for op in needed for inner in op.walk())
        parent, region = self.op.parent_op(), self.op.parent_region()
        type_ = tile.tile_type(*shape, element)
        few = sum(isinstance(op, AccumulateOp) for op in self.source.ops) <= FEW
        if gathers and few and shape == (self.rows, self.columns) and isinstance(parent, tile.CaseOp):
            labels = next(
                [name.data for name in group] for group, case in zip(parent.labels, parent.cases, strict=True) if case is region
            )
            if "full" in labels and "partial" in labels:
                cases: list[tuple[list[str], Region]] = []
                for names, full in ((["empty", "full"], True), (["partial"], False)):
                    block = Block()
                    build = Builder(block)
                    build.insert(tile.YieldOp([self._one_map(build, value, needed, type_, hint, body, full)]))
                    cases.append((names, Region(block)))
                return self.build.add(tile.CaseOp(parent.selector, [type_], cases), hint)
        return self._one_map(self.build, value, needed, type_, hint, body, False)

    def _one_map(
        self,
        build: Builder,
        value: SSAValue,
        needed: set[Operation],
        type_: TensorType,
        hint: str,
        body: Callable[[Builder, SSAValue], SSAValue] | None,
        full: bool,
    ) -> SSAValue:
        block = Block()
        inputs: list[SSAValue] = []
        mapper: dict[SSAValue, SSAValue] = {}
        pairs = type_.get_shape() == (self.rows, self.columns)

        def read(tile_: SSAValue, hint: str | None) -> BlockArgument:
            if tile_ not in inputs:
                inputs.append(tile_)
                element = cast(TensorType, tile_.type).element_type
                block.insert_arg(element, len(block.args)).name_hint = hint
            return block.args[inputs.index(tile_)]

        m = Builder(block)
        for old, tile_ in self.inputs.items():
            if pairs:
                mapper[old] = read(tile_, old.name_hint)
        if pairs:
            score = self.source.args[0]
            mapper[score] = m.binary("mulf", mapper[score], self.op.scale, "natural")
        for op in self.source.ops:
            if op not in needed:
                continue
            if isinstance(op, tensor.ExtractOp):
                mapper[op.result] = read(op.tensor, op.result.name_hint)
            elif isinstance(op, IndexOp):
                continue
            else:
                copy = op.clone(mapper)
                block.add_op(copy)
                for inner in list(copy.walk()):
                    if isinstance(inner, tile.GatherOp) and inner.live is not None and (full or not pairs):
                        new = _proven(inner) if full else self._guarded(inner)
                        if inner is copy:
                            mapper[op.results[0]] = new.result
        result = mapper.get(value, value)
        if body is not None:
            result = body(m, result)
        m.insert(tile.YieldOp([result]))
        erase_dead(block)
        if not inputs:  # the same in the whole block: a map has at least one tile to run over
            read(build.add(tile.FillOp(build.constant(0), tile.tile_type(self.rows, 1, INDEX)), "rows"), None)
        used = [n for n, argument in enumerate(block.args) if argument.uses] or [0]
        for argument in reversed(block.args):
            if argument.index not in used:
                block.erase_arg(argument)
        return build.add(tile.MapOp([inputs[n] for n in used], type_, Region(block)), hint)

    def _guarded(self, gather: tile.GatherOp) -> tile.GatherOp:
        """A gather of a whole row or column, where no pair is at hand: it is read where it is in range, for where it is not,
        no pair is live."""
        block = gather.parent
        assert block is not None
        inner = Block()
        m = Builder(inner)
        inside: SSAValue | None = None
        for dim, index in enumerate(gather.indices):
            size = self._size(gather.buffer, dim)
            least = m.binary("subi", m.constant(0), size, "least")
            here = m.binary("andi", m.compare("sge", index, least), m.compare("slt", index, size), "here")
            inside = here if inside is None else m.binary("andi", inside, here, "inside")
        for op in list(inner.ops):
            op.detach()
            block.insert_op_before(op, gather)
        replacement = tile.GatherOp(gather.buffer, list(gather.indices), inside, gather.label.data if gather.label else None)
        Rewriter.replace_op(gather, replacement)
        return replacement


def _proven(gather: tile.GatherOp) -> tile.GatherOp:
    label = gather.label.data if gather.label is not None else None
    replacement = tile.GatherOp(gather.buffer, list(gather.indices), None, label, proven=True)
    Rewriter.replace_op(gather, replacement)
    return replacement


def _position(index: SSAValue) -> SSAValue | None:
    """The tile of positions that an index is read from."""
    owner = index.owner
    return owner.tensor if isinstance(owner, tensor.ExtractOp) else None


def _made_from(value: SSAValue, scalar: SSAValue) -> bool:
    """Whether index arithmetic on scalars makes `value` from `scalar`."""
    if value is scalar:
        return True
    owner = value.owner
    return (
        isinstance(owner, Operation) and owner.name.startswith("arith.") and any(_made_from(o, scalar) for o in owner.operands)
    )


# -- loops that accumulate ------------------------------------------------------------------------------------------------


def _write_out(block: Block) -> None:
    """Writes out, turn by turn, each loop of a derivative in which something is accumulated."""
    while True:
        loops = [op for op in block.ops if isinstance(op, scf.ForOp) and _accumulates(op)]
        if not loops:
            return
        for loop in loops:
            _write_out_loop(loop)


def _accumulates(loop: scf.ForOp) -> bool:
    return any(isinstance(inner, AccumulateOp) for inner in loop.body.block.walk())


def _turns(loop: scf.ForOp) -> int:
    """Turns of a loop and of those in it that accumulate."""
    return length_of(loop) * python_math.prod(
        _turns(op) for op in loop.body.block.ops if isinstance(op, scf.ForOp) and _accumulates(op)
    )


def _write_out_loop(loop: scf.ForOp) -> None:
    if _turns(loop) > TURNS:
        raise LoweringError(f"a row of {_turns(loop)} elements of a captured tensor is too long for its gradient")
    block = loop.parent
    assert block is not None
    carried = list(loop.iter_args)
    body = loop.body.block
    last = body.last_op
    for turn in range(length_of(loop)):
        number = arith.ConstantOp.from_int_and_width(turn, IndexType())
        block.insert_op_before(number, loop)
        mapper: dict[SSAValue, SSAValue] = {body.args[0]: number.result, **dict(zip(body.args[1:], carried, strict=True))}
        for op in body.ops:
            if op is not last:
                block.insert_op_before(op.clone(mapper), loop)
        carried = [mapper.get(value, value) for value in yielded(body)]
    for result, value in zip(loop.results, carried, strict=True):
        result.replace_all_uses_with(value)
    Rewriter.erase_op(loop)
