"""`tile.gather`: elements of a captured buffer, by torch's rules for indices.

A scalar index is a scalar load. Lanes that want neighbouring elements are a vector load, where the whole run lies inside the
buffer; else, and where lanes want scattered elements, every index is wrapped once, clamped into the buffer and gathered, so
that no lane ever reads outside. Where an index had to be clamped and the element counts, that is a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from xdsl.ir import Attribute, Operation

from attnc.codegen.llvm.scalar import Cause, Fault, RegionValues
from attnc.codegen.llvm.text import splat_constant, vector
from attnc.codegen.llvm.values import Buffer, Value, element_type, storage_type
from attnc.dialects import tile
from attnc.errors import LoweringError


def gather(e: RegionValues, op: Operation) -> None:
    """Write a `tile.gather`."""
    assert isinstance(op, tile.GatherOp)
    buffer = e.buffers[op.buffer]
    live = e.values[op.live] if op.live is not None else None
    indices = [e.values[index] for index in op.indices]
    checked = op.proven is None and e.fault is not None
    lane = any(index.lane for index in indices)
    moving = [d for d, index in enumerate(indices) if index.lane]
    if len(moving) == 1 and e.width > 1:
        d = moving[0]
        index = indices[d]
        if index.base is not None and index.step in (1, -1) and buffer.unit[d]:
            _gather_run(e, op, buffer, indices, d, live, checked)
            return
    e.define(op.results[0], _gather_lanes(e, op, buffer, indices, lane, live, checked), lane)


def _wrap(
    e: RegionValues, op: tile.GatherOp, buffer: Buffer, d: int, index: Value, lane: bool, live: Value | None, checked: bool
) -> str:
    """A torch index as an offset's index: wrapped once, clamped into the buffer, its faults noted."""
    width = e.width if lane else 1
    type_ = vector(width, "i64")
    text = e.text(index, lane)
    size = e.f.splat(buffer.sizes[d], width, "i64")
    zero, one = splat_constant("0", width, "i64"), splat_constant("1", width, "i64")
    if isinstance(index.constant, int) and index.constant >= 0:
        wrapped = text
    else:
        negative = e.f.emit(f"icmp slt {type_} {text}, {zero}")
        more = e.f.emit(f"add {type_} {text}, {size}")
        wrapped = e.f.emit(f"select {vector(width, 'i1')} {negative}, {type_} {more}, {type_} {text}")
    if checked and e.fault is not None:
        cause = Cause(op, d, text, buffer.sizes[d])
        e.fault.note(e, e.f.emit(f"icmp uge {type_} {wrapped}, {size}"), lane, live, cause)
    last = e.f.emit(f"sub {type_} {size}, {one}")
    clamped = e.intrinsic("umin", "i64", lane, [wrapped, last])
    # An empty dimension has no last element: the buffer's pointer then leads to a harmless word, and every index is 0.
    empty = e.f.emit(f"icmp eq {type_} {size}, {zero}")
    return e.f.emit(f"select {vector(width, 'i1')} {empty}, {type_} {zero}, {type_} {clamped}")


def _gather_lanes(
    e: RegionValues, op: tile.GatherOp, buffer: Buffer, indices: Sequence[Value], lane: bool, live: Value | None, checked: bool
) -> str:
    """The general gather: every index wrapped and clamped, so that no lane reads outside."""
    width = e.width if lane else 1
    scalar_offset, lane_offset = "0", None
    for d, index in enumerate(indices):
        position = _wrap(e, op, buffer, d, index, index.lane, live, checked)
        if index.lane:
            stride = e.f.splat(buffer.strides[d], width, "i64")
            product = position if buffer.unit[d] else e.f.emit(f"mul {vector(width, 'i64')} {position}, {stride}")
            lane_offset = product if lane_offset is None else e.f.emit(f"add {vector(width, 'i64')} {lane_offset}, {product}")
        else:
            product = position if buffer.unit[d] else e.f.mul(position, buffer.strides[d])
            scalar_offset = product if scalar_offset == "0" else e.f.add(scalar_offset, product)
    stored = storage_type(buffer.element)
    pointer = e.f.pointer(buffer.pointer, scalar_offset, stored)
    if lane_offset is None:
        return _from_storage(e, buffer.element, e.f.load(stored, pointer), False)
    type_ = vector(width, stored)
    pointers = e.f.emit(f"getelementptr {stored}, ptr {pointer}, {vector(width, 'i64')} {lane_offset}")
    if width == 1:
        return _from_storage(e, buffer.element, e.f.load(stored, pointers), True)
    mangled = {"float": "f32", "double": "f64", "half": "f16"}.get(stored, stored)
    name = f"llvm.masked.gather.v{width}{mangled}.v{width}p0"
    e.declarations.add(f"declare {type_} @{name}(<{width} x ptr>, i32, <{width} x i1>, {type_})")
    all_lanes = splat_constant("true", width, "i1")
    loaded = e.f.emit(f"call {type_} @{name}(<{width} x ptr> {pointers}, i32 1, <{width} x i1> {all_lanes}, {type_} poison)")
    return _from_storage(e, buffer.element, loaded, True)


def _gather_run(
    e: RegionValues,
    op: tile.GatherOp,
    buffer: Buffer,
    indices: Sequence[Value],
    d: int,
    live: Value | None,
    checked: bool,
) -> None:
    """Neighbouring lanes want neighbouring elements: one load where the run [base, base ± W) lies inside, else the general
    way."""
    index = indices[d]
    base = cast(str, index.base)
    width = e.width
    if index.element != "i64":
        raise LoweringError("tile.gather: indices are of type index")
    last = e.f.add(base, index.step * (width - 1))
    low, high = (base, last) if index.step == 1 else (last, base)
    from_zero = e.f.emit(f"icmp sge i64 {low}, 0")
    to_end = e.f.emit(f"icmp ult i64 {high}, {buffer.sizes[d]}")
    inside = e.f.both(from_zero, to_end)
    for narrow in index.widened():
        inside = e.f.both(inside, is_run(e, narrow))
    offset = low
    for other, position in enumerate(indices):
        if other == d:
            continue
        wrapped = _wrap(e, op, buffer, other, position, False, live, checked)
        product = wrapped if buffer.unit[other] else e.f.mul(wrapped, buffer.strides[other])
        offset = e.f.add(offset, product)
    fault = e.fault.text if e.fault is not None else None
    stored = storage_type(buffer.element)
    type_ = vector(width, stored)

    def run() -> list[str]:
        loaded = e.f.load(type_, e.f.pointer(buffer.pointer, offset, stored))
        if index.step == -1:
            order = ", ".join(f"i32 {width - 1 - lane}" for lane in range(width))
            loaded = e.f.emit(f"shufflevector {type_} {loaded}, {type_} poison, <{width} x i32> <{order}>")
        value = _from_storage(e, buffer.element, loaded, True)
        return [value] + ([fault] if fault is not None else [])

    def lanes() -> list[str]:
        # Lanes are computed afresh here: this side may not define what the other side uses.
        origins = index.origins()
        texts = [origin.text for origin in origins]
        value = _gather_lanes(e, op, buffer, indices, True, live, checked)
        for origin, text in zip(origins, texts, strict=True):
            origin.text = text
        return [value] + ([cast(str, cast(Fault, e.fault).text)] if fault is not None else [])

    if live is not None:
        e.text(live, True)
    types = [vector(width, element_type(buffer.element))] + ([vector(width, "i1")] if fault is not None else [])
    joined = e.f.when(inside, run, lanes, types)
    if fault is not None and e.fault is not None:
        e.fault.text = joined[1]
    e.define(op.results[0], joined[0], True)


def is_run(e: RegionValues, value: Value) -> str:
    """Whether no lane of an affine value wraps around in its own type: whether its last lane is where the first one and the
    step say."""
    reach = value.step * (e.width - 1)
    if abs(reach) >= 1 << (value.bits - 1):
        return "false"
    wide = e.f.emit(f"sext {value.element} {value.base} to i64")
    last = e.f.add(wide, reach)
    wrapped = e.f.emit(f"trunc i64 {last} to {value.element}")
    return e.f.emit(f"icmp eq i64 {e.f.emit(f'sext {value.element} {wrapped} to i64')}, {last}")


def _from_storage(e: RegionValues, type_: Attribute, loaded: str, lane: bool) -> str:
    """A bool is a byte in memory."""
    if element_type(type_) != "i1":
        return loaded
    width = e.width if lane else 1
    return e.f.emit(f"icmp ne {vector(width, 'i8')} {loaded}, {splat_constant('0', width, 'i8')}")
