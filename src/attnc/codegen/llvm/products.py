"""`tile.dot` on a strip: a call of a leaf routine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdsl.dialects.builtin import BFloat16Type

from attnc.codegen.llvm import leaves_pairs
from attnc.codegen.llvm.in_place import InPlace, Strips, emit_in_place
from attnc.codegen.llvm.staging import Panels
from attnc.codegen.llvm.storage import Storage, element_of
from attnc.codegen.llvm.text import Function
from attnc.codegen.llvm.values import element_type
from attnc.dialects import tile
from attnc.errors import LoweringError

if TYPE_CHECKING:
    from attnc.codegen.llvm.rows import RowEmitter


def emit_dot(rows: RowEmitter, dot: tile.DotOp, right: Panels | InPlace) -> None:
    """Write a product of the present strip: onto its accumulator, scaled on the way if the program absorbed a scaling; with the
    careful product as the other way where it has a `where`."""
    body, f, program = rows.body, rows.f, rows.program
    leaf = body.leaf_symbols()
    left = rows.storage(program.resolve(dot.lhs))
    if isinstance(left.type, BFloat16Type) and isinstance(right, Panels):
        _emit_pairs(rows, dot, right, left)
        return
    if element_type(left.type) != body.kernel.element:
        raise LoweringError(f"tile.dot: the left operand is of {left.type}, the product of {element_of(dot.result)}")
    if dot.live is not None and dot.acc is None:
        raise LoweringError("tile.dot with `where` needs an accumulator (`onto`)")
    inner, outer = program.resolve(dot.lhs), dot.result
    skipped, depth = rows.extents.start(inner), f.sub(rows.extents.extent(inner), rows.extents.start(inner))
    first, columns = rows.extents.start(outer), f.sub(rows.extents.extent(outer), rows.extents.start(outer))
    panel_count = f.ceil_div(columns, body.panel)
    out, copied = rows.placement.accumulator(dot)
    if copied is not None:
        rows.copy_rows([(copied, out)])
    factor = "null"
    if dot in program.absorbed:
        factor = _strip_of(f, rows.storage(program.absorbed[dot][1]), rows.start)
    element = body.kernel.element

    def operands(panels: Panels) -> str:
        """Left, right and result. A panel holds `body.panel` columns of the right operand, row after row."""
        corner = f.pointer(panels.pointer, f.mul(skipped, body.panel), element)
        if first != "0":
            panel = f.emit(f"udiv i64 {first}, {body.panel}")
            corner = f.pointer(corner, f.mul(panel, panels.stride), element)
        return (
            f"ptr {f.pointer(_strip_of(f, left, rows.start), skipped, left.element)}, i64 {left.stride}, ptr {corner}, "
            f"i64 {panels.stride}, ptr {f.pointer(_strip_of(f, out, rows.start), first, out.element)}, i64 {out.stride}"
        )

    def fast() -> None:
        if isinstance(right, InPlace):
            ends = _strip_of(f, left, rows.start), _strip_of(f, out, rows.start)
            emit_in_place(rows, dot, right, Strips(*ends, left.stride, out.stride), factor)
        elif dot.acc is None:
            f.do(f"call void @{leaf.dot_rows}({operands(right)}, i64 {panel_count}, i64 {rows.count}, i64 {depth})")
        else:
            sizes = f"i64 {depth}, i64 {rows.count}, i64 {panel_count}"
            f.do(f"call void @{leaf.dot_accumulate}({operands(right)}, ptr {factor}, {sizes})")

    def careful() -> None:
        assert dot.live is not None
        panels = right if isinstance(right, Panels) else body.staging.panels(right.operand, right.key)
        live = rows.storage(program.resolve(dot.live))
        alive = f"ptr {f.pointer(live.pointer, skipped, live.element)}, i64 {live.stride}"
        sizes = f"i64 {depth}, i64 {rows.count}, i64 {panel_count}"
        f.do(f"call void @{leaf.dot_accumulate_careful}({operands(panels)}, ptr {factor}, {sizes}, {alive})")

    if dot.live is None:
        fast()
    else:
        f.when(body.careful, careful, fast)


def _emit_pairs(rows: RowEmitter, dot: tile.DotOp, panels: Panels, left: Storage) -> None:
    """A product of two bf16 operands: words of two, by the leaf of their own."""
    body, f, program = rows.body, rows.f, rows.program
    if dot.acc is not None or not isinstance(element_of(dot.rhs), BFloat16Type) or left.stride % 2:
        raise LoweringError("tile.dot of bf16 needs both operands in bf16 and no accumulator")
    inner, outer = program.resolve(dot.lhs), dot.result
    depth = f.ceil_div(rows.extents.extent(inner), 2)
    first, columns = rows.extents.start(outer), f.sub(rows.extents.extent(outer), rows.extents.start(outer))
    out, _ = rows.placement.accumulator(dot)
    right = panels.pointer
    if first != "0":
        right = f.pointer(right, f.mul(f.emit(f"udiv i64 {first}, {body.panel}"), panels.stride), "i32")
    symbol, _ = leaves_pairs.symbols(body.kernel.target)
    body.kernel.uses_pairs = True
    body.declarations.add(f"declare void @{symbol}(ptr, i64, ptr, i64, ptr, i64, i64, i64, i64)")
    f.do(
        f"call void @{symbol}(ptr {_strip_of(f, left, rows.start)}, i64 {left.stride // 2}, ptr {right}, i64 {panels.stride}, "
        f"ptr {f.pointer(_strip_of(f, out, rows.start), first, out.element)}, i64 {out.stride}, "
        f"i64 {f.ceil_div(columns, body.panel)}, i64 {rows.count}, i64 {depth})"
    )


def _strip_of(f: Function, storage: Storage, start: str) -> str:
    """The address of the strip's first row."""
    if not storage.task:
        return storage.pointer
    return f.pointer(storage.pointer, f.mul(start, storage.stride), storage.element)
