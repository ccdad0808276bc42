"""Which columns of a tile matter: all, or those that are left of a block of positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from xdsl.ir import SSAValue

from attnc.codegen.llvm.program import Program, columns_of, is_tile
from attnc.dialects import tile


@dataclass
class Columns:
    """A block of `count` positions from `position` on, as columns of tiles, of which only [start, stop) (two i64) matter;
    `of_strip(first row, rows)` writes down which of these matter to a strip."""

    position: SSAValue
    count: int
    start: str
    stop: str
    of_strip: Callable[[str, str], tuple[str, str]] | None = None


class Extents:
    """Column ranges in one program: where a tile's columns are the positions of `block`, only some of them matter."""

    def __init__(self, program: Program, block: Columns | None):
        self.program, self.block = program, block
        self.limited: dict[SSAValue, bool] = {}

    def is_limited(self, value: SSAValue) -> bool:
        """Whether a tile's columns are the positions of the block, so that those beyond its end may be left out."""
        value = self.program.resolve(value)
        if self.block is None or columns_of(value) == 1:
            return False
        if value not in self.limited:
            self.limited[value] = self._find_limited(value)
        return self.limited[value]

    def _find_limited(self, value: SSAValue) -> bool:
        source = value.owner
        if isinstance(source, tile.IotaOp):
            return self._counts_positions(source, columns_of(value))
        if isinstance(source, tile.DotOp) and source.transpose_rhs is not None:
            load = self.program.resolve(source.rhs).owner
            if isinstance(load, tile.StageOp):
                load = self.program.resolve(load.tile).owner
            if isinstance(load, tile.LoadOp):
                for index in load.indices:
                    iota = self.program.resolve(index).owner
                    if isinstance(iota, tile.IotaOp) and tile.shape_of(iota.result)[0] > 1:
                        return self._counts_positions(iota, columns_of(value))
            return False
        if isinstance(source, tile.MapOp):
            return any(self.is_limited(operand) for operand in source.inputs)
        if isinstance(source, tile.StageOp):
            return self.is_limited(source.tile)
        if isinstance(source, tile.LoadOp):
            return any(is_tile(index) and self.is_limited(index) for index in source.indices)
        return False

    def start(self, value: SSAValue) -> str:
        """The first column of a tile that matters, a multiple of every panel's width."""
        return self.block.start if self.block is not None and self.is_limited(value) else "0"

    def extent(self, value: SSAValue) -> str:
        """How many columns of a tile there are: the end of those that matter."""
        return self.block.stop if self.block is not None and self.is_limited(value) else str(columns_of(value))

    def _counts_positions(self, iota: tile.IotaOp, columns: int) -> bool:
        assert self.block is not None
        return iota.offset is self.block.position and columns == self.block.count
