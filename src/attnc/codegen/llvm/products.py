"""`tile.dot` on a strip: a call of a leaf routine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdsl.dialects.builtin import BFloat16Type

from attnc.codegen.llvm import leaves_pairs
from attnc.codegen.llvm.in_place import InPlace, Strips, emit_in_place
from attnc.codegen.llvm.leaves_transposed import dot_transposed, dot_transposed_careful
from attnc.codegen.llvm.staging import Panels, right_operand
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
            sizes = f"i64 {panel_count}, i64 {rows.count}, i64 {depth}, i64 {_all_columns(rows, dot)}"
            f.do(f"call void @{leaf.dot_rows}({operands(right)}, {sizes})")
        else:
            sizes = f"i64 {depth}, i64 {rows.count}, i64 {panel_count}"
            f.do(f"call void @{leaf.dot_accumulate}({operands(right)}, ptr {factor}, {sizes})")

    def careful() -> None:
        assert dot.live is not None
        panels = right if isinstance(right, Panels) else body.staging.panels(right.operand, right.key)
        live = rows.live(dot)
        alive = f"ptr {f.pointer(_strip_of(f, live, rows.start), skipped, live.element)}, i64 {live.stride}"
        if dot.acc is None:
            f.do(f"call void @{leaf.dot_rows}({operands(panels)}, i64 {panel_count}, i64 {rows.count}, i64 0, i64 {columns})")
        sizes = f"i64 {depth}, i64 {rows.count}, i64 {panel_count}"
        f.do(f"call void @{leaf.dot_accumulate_careful}({operands(panels)}, ptr {factor}, {sizes}, {alive})")

    if dot.live is None:
        fast()
    elif dot.acc is None:
        # Nothing is added to, so it can be done again on the spot.
        fast()
        result = f"ptr {f.pointer(_strip_of(f, out, rows.start), first, out.element)}, i64 {out.stride}"
        finite = f.emit(f"call i32 @{leaf.finite}({result}, i64 {rows.count}, i64 {columns})")
        f.when(f.emit(f"icmp eq i32 {finite}, 0"), careful)
    else:
        f.when(body.careful, careful, fast)


def emit_sum(rows: RowEmitter, dot: tile.DotOp) -> None:
    """Write a product whose left operand is read transposed, over all rows at hand, onto a tile that the loop carries."""
    body, f, program = rows.body, rows.f, rows.program
    target, element = body.kernel.target, body.kernel.element
    left, right = (rows.storage(program.resolve(operand)) for operand in (dot.lhs, dot.rhs))
    for operand, storage in ((dot.lhs, left), (dot.rhs, right)):
        if element_type(storage.type) != element or not storage.task:
            raise LoweringError(f"tile.dot: {operand.type} cannot be summed over its rows in {element_of(dot.result)}")
    assert dot.acc is not None
    out = rows.storages[dot.result] = rows.storage(program.resolve(dot.acc))
    columns = program.resolve(dot.lhs)
    first = rows.extents.start(columns)
    count = f.sub(rows.extents.extent(columns), first)
    panels = -(-tile.shape_of(dot.result)[1] // body.panel)
    to = f.pointer(out.pointer, f.mul(first, out.stride), element)
    operands = (
        f"ptr {f.pointer(left.pointer, first, element)}, i64 {left.stride}, ptr {right.pointer}, i64 {right.stride}, "
        f"ptr {to}, i64 {out.stride}, i64 {body.row_count}, i64 {count}, i64 {panels}"
    )

    def call(leaf: tuple[str, str], arguments: str) -> None:
        symbol, text = leaf
        body.kernel.more_leaves[symbol] = text
        body.declarations.add(f"declare void @{symbol}({', '.join(word.split(' ')[0] for word in arguments.split(', '))})")
        f.do(f"call void @{symbol}({arguments})")

    def careful() -> None:
        live = rows.placement.live(dot)
        alive = f"ptr {f.pointer(live.pointer, first, live.element)}, i64 {live.stride}"
        call(dot_transposed_careful(element, target), f"{operands}, {alive}")

    if dot.live is None:
        call(dot_transposed(element, target), operands)
    else:
        f.when(body.careful, careful, lambda: call(dot_transposed(element, target), operands))


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


def _all_columns(rows: RowEmitter, dot: tile.DotOp) -> str:
    """How many columns the product would have without blocks."""
    operand, _ = right_operand(dot, rows.program.resolve)
    if operand.transposed and operand.row_dim is not None:
        return rows.region.buffers[operand.load.buffer].sizes[operand.row_dim]
    return str(operand.rows if operand.transposed else operand.columns)


def _strip_of(f: Function, storage: Storage, start: str) -> str:
    """The address of the strip's first row."""
    if not storage.task:
        return storage.pointer
    return f.pointer(storage.pointer, f.mul(start, storage.stride), storage.element)
