"""Scalar regions (the bodies of `tile.map`, classifiers, index arithmetic) as LLVM instructions, one lane or many.

A value of a region is as *deep* as what it depends on: the kernel's arguments, the block at hand, the row, or the lane
(column). Only lane values are vectors; all others are scalars, computed once at their depth and broadcast where lanes use
them. An integer lane value that grows by a constant step from lane to lane stays `base + step * lane` until an instruction
needs the vector: that is how a captured tensor indexed by the key becomes a load and not a gather.

    %d = arith.subi %k, %q            base = k0 - q (a scalar), step = 1
    %i = arith.index_cast %d          base and step again
    %x = tile.gather %bias[%h, %i]    one vector load, where [base, base + W) lies in range; else a gather
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.dialects.builtin import BFloat16Type, Float16Type, IndexType, i8
from xdsl.ir import Attribute, Block, Operation, SSAValue

from attnc.codegen.llvm import math as vector_math
from attnc.codegen.llvm.text import Function, splat_constant, vector
from attnc.codegen.llvm.values import BLOCK, KERNEL, ROW, Buffer, Value, element_type, storage_bytes
from attnc.dialects import tile
from attnc.target import Target

DIVISIONS = {"arith.floordivsi": "floordiv", "arith.divsi": "truncdiv", "arith.remsi": "truncrem"}
"""Signed integer divisions and the functions of `math.py` that do them."""


UNSIGNED_DIVISIONS = {"arith.divui": "udiv", "arith.remui": "urem"}
"""Unsigned ones. Those of bytes are the user's; divisors of type index are sizes, and never 0 where anything is computed."""


def may_fault(op: Operation) -> bool:
    """Whether an operation of a map can find an index out of range or a zero divisor; such are never hoisted out of the
    rows."""
    if isinstance(op, tile.GatherOp):
        return op.proven is None and len(op.indices) > 0
    if op.name in DIVISIONS or (op.name in UNSIGNED_DIVISIONS and op.operands[0].type == i8):
        divisor = op.operands[1].owner
        return not (isinstance(divisor, Operation) and divisor.name == "arith.constant")
    return False


@dataclass
class Cause:
    """What may go wrong at one place: an index into dimension `dim` of a buffer, or (no buffer) a division by zero."""

    buffer: tile.GatherOp | None
    dim: int = 0
    index: str = "0"
    size: str = "0"


class Fault:
    """Whether any lane so far wanted an element that is not there, or divided by zero: an i1 carried through loops, updated
    as code is written."""

    def __init__(self) -> None:
        self.text: str | None = None

    def note(self, e: RegionValues, outside: str, lane: bool, live: Value | None, cause: Cause) -> None:
        """`outside` is a fault where `live`."""
        del cause  # whoever wants to know runs the kernel's locator
        type_ = vector(e.width, "i1")
        if not lane:
            outside = e.f.splat(outside, e.width, "i1")
        if live is not None:
            outside = e.f.emit(f"and {type_} {outside}, {e.text(live, True)}")
        self.text = e.f.emit(f"or {type_} {self.text}, {outside}")


class RegionValues:
    """The values of scalar regions, as they are written into a function, and how to write what operations need.

    `width` is the number of lanes.
    """

    def __init__(self, function: Function, width: int, target: Target):
        self.f = function
        self.width = width
        self.machine = vector_math.Machine.of(target.triple, target.features)
        self.values: dict[SSAValue, Value] = {}
        self.buffers: dict[SSAValue, Buffer] = {}
        self.depths: dict[SSAValue, int] = {}
        self.functions: dict[str, str] = {}
        self.libm: set[str] = set()
        self.declarations: set[str] = set()
        self.fault: Fault | None = None

    # -- depths -------------------------------------------------------------------------------------------------------
    def depth(self, value: SSAValue) -> int:
        """How deep a value is; constants and anything unknown are the kernel's."""
        return self.depths.get(value, KERNEL)

    def assign_depths(self, block: Block) -> None:
        """Work out the depth of every value in a region whose arguments' depths are known."""
        for op in block.ops:
            depth = max((self.depth(operand) for operand in op.operands), default=KERNEL)
            for inner in op.walk():
                depth = max([depth, *(self.depth(operand) for operand in inner.operands)])
                if may_fault(inner):
                    depth = max(depth, ROW)
            if op.regions:
                depth = max(depth, BLOCK)  # the function's entry has no room for loops
            for result in op.results:
                self.depths[result] = depth
            for region in op.regions:
                for inner in region.walk():
                    for result in inner.results:
                        self.depths[result] = depth
                for nested in region.blocks:
                    for argument in nested.args:
                        self.depths[argument] = depth

    # -- values -------------------------------------------------------------------------------------------------------
    def scalar(self, value: SSAValue) -> str:
        """The text of a value that is not a lane value."""
        known = self.values[value]
        assert not known.lane and known.text is not None
        return known.text

    def text(self, value: Value, lane: bool) -> str:
        """The text of a value, as a vector if `lane`."""
        if not lane:
            assert not value.lane and value.text is not None
            return value.text
        if value.lane:
            if value.text is None:
                value.text = self._materialise(value)
            return value.text
        assert value.text is not None
        if value.constant is not None:
            return splat_constant(value.text, self.width, value.element)
        return self.f.splat(value.text, self.width, value.element)

    def _materialise(self, value: Value) -> str:
        """base + step * (0, 1, 2, ...), or what its sources make of it."""
        if value.lanes is not None:
            return value.lanes([self.text(source, True) for source in value.sources])
        element = value.element
        base = self.f.splat(value.base or "0", self.width, element)
        if self.width == 1:
            return base
        steps = "<" + ", ".join(f"{element} {value.step * lane}" for lane in range(self.width)) + ">"
        return self.f.emit(f"add {vector(self.width, element)} {base}, {steps}")

    def call(self, name: str, element: str, lane: bool, arguments: Sequence[str]) -> str:
        """Call a vector function of `math.py`, defined in this module on first use."""
        width = self.width if lane else 1
        symbol, text = vector_math.define(name, element, width, self.machine)
        self.functions.setdefault(symbol, text)
        self.declarations.update(vector_math.declarations(name, element, width, self.machine))
        self.libm.update(vector_math.libm_symbols(name, element))
        type_ = vector(width, element)
        result = vector(width, vector_math.signature(name, element)[1])
        return self.f.emit(f"call {result} {symbol}({', '.join(f'{type_} {a}' for a in arguments)})")

    def intrinsic(self, name: str, element: str, lane: bool, arguments: Sequence[str], extra: str = "") -> str:
        """Call an LLVM intrinsic that is overloaded on one type."""
        width = self.width if lane else 1
        type_ = vector(width, element)
        mangled = {"float": "f32", "double": "f64", "half": "f16"}.get(element, element)
        full = f"llvm.{name}." + (mangled if width == 1 else f"v{width}{mangled}")
        self.declarations.add(f"declare {type_} @{full}({', '.join([type_] * len(arguments))}{', i1' if extra else ''})")
        return self.f.emit(f"call {type_} @{full}({', '.join(f'{type_} {a}' for a in arguments)}{extra})")

    def lanes_below(self, column: str, extent: str) -> str:
        """Which lanes, the first being at `column`, lie before `extent`."""
        lanes = self.text(Value(IndexType(), None, True, base=column, step=1), True)
        return self.f.emit(f"icmp slt {vector(self.width, 'i64')} {lanes}, {self.f.splat(extent, self.width, 'i64')}")

    def mask_tail(self, text: str, type_: Attribute, column: str, extent: str, otherwise: str) -> str:
        """A vector with `otherwise` in the lanes from `extent` on."""
        vector_type = vector(self.width, element_type(type_))
        inside = self.lanes_below(column, extent)
        return self.f.emit(f"select {vector(self.width, 'i1')} {inside}, {vector_type} {text}, {vector_type} {otherwise}")

    def convert_float(self, value: Value, to: Attribute) -> Value:
        """A float value in another float type."""
        text = self.text(value, value.lane)
        wider = storage_bytes(to) > storage_bytes(value.type)
        if wider:
            converted = extend_float(self, value.type, text, value.lane, element_type(to))
        else:
            converted = truncate_float(self, value.element, text, value.lane, to)
        return Value(to, converted, value.lane)

    def define(self, result: SSAValue, text: str, lane: bool) -> None:
        self.values[result] = Value(result.type, text, lane)

    def operands(self, op: Operation) -> tuple[bool, list[str], str]:
        """(whether the operation is over lanes, the operands' texts, the LLVM type of operand 0)."""
        values = [self.values[operand] for operand in op.operands]
        lane = any(value.lane for value in values)
        texts = [self.text(value, lane) for value in values]
        return lane, texts, vector(self.width if lane else 1, values[0].element)


def extend_float(e: RegionValues, type_: Attribute, text: str, lane: bool, to: str) -> str:
    """A float of `type_` as `to`, "float" or "double"."""
    width = e.width if lane else 1
    if isinstance(type_, BFloat16Type):
        text = e.call("bf16_to_f32", "i16", lane, [text])
    elif isinstance(type_, Float16Type) and not e.machine.halves:
        bits = e.f.emit(f"bitcast {vector(width, 'half')} {text} to {vector(width, 'i16')}")
        text = e.call("f16_to_f32", "i16", lane, [bits])
    else:
        return e.f.emit(f"fpext {vector(width, element_type(type_))} {text} to {vector(width, to)}")
    return text if to == "float" else e.f.emit(f"fpext {vector(width, 'float')} {text} to {vector(width, to)}")


def truncate_float(e: RegionValues, element: str, text: str, lane: bool, to: Attribute) -> str:
    """A float of LLVM type `element` in a narrower type, rounded to nearest even."""
    width = e.width if lane else 1
    halves = isinstance(to, BFloat16Type) or (isinstance(to, Float16Type) and not e.machine.halves)
    if not halves:
        return e.f.emit(f"fptrunc {vector(width, element)} {text} to {vector(width, element_type(to))}")
    if element == "double":
        text = e.f.emit(f"fptrunc {vector(width, 'double')} {text} to {vector(width, 'float')}")
    if isinstance(to, BFloat16Type):
        return e.call("f32_to_bf16", "float", lane, [text])
    bits = e.call("f32_to_f16", "float", lane, [text])
    return e.f.emit(f"bitcast {vector(width, 'i16')} {bits} to {vector(width, 'half')}")
