"""Right-hand operands that are not staged: products of few rows read them where they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from xdsl.ir import SSAValue

from attnc.codegen.llvm.leaves_convert import stored_as
from attnc.codegen.llvm.leaves_in_place import accumulate_in_place, dot_in_place
from attnc.codegen.llvm.staging import Operand, Staging, source_type
from attnc.codegen.llvm.values import storage_type
from attnc.dialects import tile

if TYPE_CHECKING:
    from attnc.codegen.llvm.rows import RowEmitter


@dataclass
class InPlace:
    """An operand in memory: `valid` rows from `pointer` on, `stride` elements apart, each of contiguous elements of `source`.
    (`operand` and `key` are for who needs it packed all the same.)"""

    operand: Operand
    key: SSAValue
    pointer: str
    stride: str
    valid: str
    source: str


@dataclass
class Strips:
    """The present rows of a product's left operand and of its result: pointers, and strides in elements."""

    left: str
    out: str
    left_stride: int
    out_stride: int


def in_place(staging: Staging, dot: tile.DotOp, operand: Operand, key: SSAValue) -> InPlace | None:
    """The operand where it lies, if it is not staged, and its rows are contiguous, of whole vectors, and all there."""
    region, kernel = staging.region, staging.kernel
    buffer, d = region.buffers[operand.load.buffer], operand.column_dim
    if operand.lifetime != "none" or d is None or operand.row_dim is None or operand.column_offset is None:
        return None
    whole = buffer.sizes[d] == str(operand.columns) and region.scalar(operand.column_offset) == "0"
    if not (whole and buffer.unit[d] and operand.columns % kernel.width == 0) or operand.transposed != (dot.acc is None):
        return None
    offset, valid, stride = staging.corner(operand, str(operand.rows))
    pointer = region.f.pointer(buffer.pointer, offset, storage_type(buffer.element))
    return InPlace(operand, key, pointer, stride, valid, source_type(buffer))


def emit_in_place(rows: RowEmitter, dot: tile.DotOp, right: InPlace, strips: Strips, factor: str) -> None:
    """Write the product of a strip: onto its accumulator times `factor` where the right operand is not transposed."""
    f, kernel, region = rows.f, rows.body.kernel, rows.region
    inner, outer = rows.program.resolve(dot.lhs), dot.result
    # The loop's positions are the right operand's rows: of those, some may not matter, and some not be there.
    positions = outer if right.operand.transposed else inner
    first = rows.extents.start(positions)
    count = f.sub(rows.extents.extent(positions), first)
    left = region.intrinsic("smax", "i64", False, [f.sub(right.valid, first), "0"])
    valid = region.intrinsic("smin", "i64", False, [left, count])
    start = f.pointer(right.pointer, f.mul(first, right.stride), stored_as(right.source, kernel.target))
    moved_left, moved_out = strips.left, strips.out
    if right.operand.transposed:
        moved_out = f.pointer(moved_out, first, kernel.element)
    else:
        moved_left = f.pointer(moved_left, first, kernel.element)
    operands = (
        f"ptr {moved_left}, i64 {strips.left_stride}, ptr {start}, i64 {right.stride}, ptr {moved_out}, i64 {strips.out_stride}"
    )
    if right.operand.transposed:
        symbol, text = dot_in_place(right.source, kernel.element, right.operand.columns, kernel.target)
        call = f"{operands}, i64 {valid}, i64 {f.round_up(count, kernel.width)}, i64 {rows.count}"
    else:
        symbol, text = accumulate_in_place(right.source, kernel.element, right.operand.columns, kernel.target)
        call = f"{operands}, ptr {factor}, i64 {valid}, i64 {rows.count}"
    kernel.more_leaves[symbol] = text
    types = ", ".join(word.split(" ")[0] for word in call.split(", "))
    rows.body.declarations.add(f"declare void @{symbol}({types})")
    f.do(f"call void @{symbol}({call})")
