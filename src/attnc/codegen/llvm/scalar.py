"""Scalar regions (the bodies of `tile.map`, classifiers, index arithmetic) as LLVM instructions, one lane or many.

A value of a region is as *deep* as what it depends on: the kernel's arguments, the block at hand, the row, or the lane (column).
Only lane values are vectors; all others are scalars, computed once at their depth and broadcast where lanes use them. An
integer lane value that grows by a constant step from lane to lane stays `base + step * lane` until an instruction needs the
vector: that is how a captured tensor indexed by the key becomes a load and not a gather.

    %d = arith.subi %k, %q            base = k0 - q (a scalar), step = 1
    %i = arith.index_cast %d          base and step again
    %x = tile.gather %bias[%h, %i]    one vector load, where [base, base + W) lies in range; else a gather
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

from xdsl.dialects.builtin import (
    BFloat16Type,
    DenseArrayBase,
    Float16Type,
    Float32Type,
    Float64Type,
    FloatAttr,
    IndexType,
    IntegerAttr,
    IntegerType,
    MemRefType,
    StridedLayoutAttr,
)
from xdsl.ir import Attribute, Block, Operation, SSAValue

from attnc.codegen.llvm import math as vector_math
from attnc.codegen.llvm.text import Function, float_constant, splat_constant, vector
from attnc.dialects import tile
from attnc.errors import LoweringError
from attnc.target import Target

KERNEL, BLOCK, ROW, LANE = range(4)
"""Depths: what a value depends on at the most."""


def element_type(type_: Attribute) -> str:
    """The LLVM type that holds a scalar. bf16 is carried as its 16 bits, index as i64."""
    if isinstance(type_, Float32Type):
        return "float"
    if isinstance(type_, Float64Type):
        return "double"
    if isinstance(type_, Float16Type):
        return "half"
    if isinstance(type_, BFloat16Type):
        return "i16"
    if isinstance(type_, IndexType):
        return "i64"
    if isinstance(type_, IntegerType):
        return f"i{type_.width.data}"
    raise LoweringError(f"a value of type {type_} cannot be emitted")


def storage_type(type_: Attribute) -> str:
    """The LLVM type of an element in memory: as `element_type`, but a bool is a byte."""
    element = element_type(type_)
    return "i8" if element == "i1" else element


def storage_bytes(type_: Attribute) -> int:
    """The size of an element in memory."""
    return {"float": 4, "double": 8, "half": 2}.get(storage_type(type_)) or int(storage_type(type_)[1:]) // 8


@dataclass
class Value:
    """A region's value: `text` is a scalar, or, if `lane`, a vector of the emitter's width.

    An integer lane value may have `base` (the scalar of the vector's first lane) and `step` instead of a text."""

    type: Attribute
    text: str | None
    lane: bool = False
    base: str | None = None
    step: int = 0
    constant: int | float | None = None
    narrow: Value | None = None
    """What an affine value was widened from: its lanes are the narrow lanes, extended (they may have wrapped around)."""

    @property
    def element(self) -> str:
        return element_type(self.type)


@dataclass
class Buffer:
    """A kernel argument in memory: pointer, sizes and strides in elements as scalars at the kernel's depth. `unit[d]`: the
    stride of dimension d is known to be 1."""

    type: MemRefType
    pointer: str
    sizes: list[str]
    strides: list[str]
    unit: list[bool] = field(default_factory=list)

    @property
    def element(self) -> Attribute:
        return self.type.element_type


def static_strides(type_: MemRefType) -> list[int | None]:
    """The strides that a memref's layout fixes; None where they are run-time values."""
    if isinstance(type_.layout, StridedLayoutAttr):
        return [getattr(stride, "data", None) for stride in type_.layout.strides]
    rank = type_.get_num_dims()
    return [None] * (rank - 1) + [1] * min(rank, 1)


_FLOAT_BINARY = {"arith.addf": "fadd", "arith.subf": "fsub", "arith.mulf": "fmul", "arith.divf": "fdiv"}
_INT_BINARY = {
    "arith.addi": "add",
    "arith.subi": "sub",
    "arith.muli": "mul",
    "arith.andi": "and",
    "arith.ori": "or",
    "arith.xori": "xor",
}
_INT_MINMAX = {"arith.minsi": "smin", "arith.maxsi": "smax", "arith.minui": "umin", "arith.maxui": "umax"}
_INT_PREDICATES = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")
_FLOAT_PREDICATES = (
    "false", "oeq", "ogt", "oge", "olt", "ole", "one", "ord", "ueq", "ugt", "uge", "ult", "ule", "une", "uno", "true",
)  # fmt: skip
_DIVISIONS = {
    "arith.floordivsi": "floordiv",
    "arith.divsi": "truncdiv",
    "arith.remsi": "truncrem",
}
_UNSIGNED_DIVISIONS = {"arith.divui": "udiv", "arith.remui": "urem"}
_SHIFTS = {"arith.shli": "shl", "arith.shrsi": "ashr", "arith.shrui": "lshr"}
_FLOAT_MINMAX = {
    "arith.maximumf": "maximum",
    "arith.minimumf": "minimum",
    "arith.maxnumf": "fmax",
    "arith.minnumf": "fmin",
}


def may_fault(op: Operation) -> bool:
    """Whether an operation of a map can find an index out of range or a zero divisor; such are never hoisted out of the rows."""
    if isinstance(op, tile.GatherOp):
        return op.proven is None and len(op.indices) > 0
    if op.name in _DIVISIONS:
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
    """Whether any lane so far wanted an element that is not there, or divided by zero: an i1 carried through loops, updated as code is
    written."""

    def __init__(self) -> None:
        self.text: str | None = None

    def note(self, e: RegionEmitter, outside: str, lane: bool, live: Value | None, cause: Cause) -> None:
        """`outside` is a fault where `live`."""
        del cause  # whoever wants to know runs the kernel's locator
        type_ = vector(e.width, "i1")
        if not lane:
            outside = e.f.splat(outside, e.width, "i1")
        if live is not None:
            outside = e.f.emit(f"and {type_} {outside}, {e.text(live, True)}")
        self.text = e.f.emit(f"or {type_} {self.text}, {outside}")


class RegionEmitter:
    """Writes the operations of scalar regions into a function; remembers every value it has seen.

    `width` is the number of lanes; `column` the i64 scalar of the lane loop's position, set while lanes are being written.
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
        self.column = "0"
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
            for result in op.results:
                self.depths[result] = depth
            for region in op.regions:
                for inner in region.walk():
                    for result in inner.results:
                        self.depths[result] = depth
                for nested in region.blocks:
                    for argument in nested.args:
                        self.depths[argument] = depth

    def emit_block(self, block: Block, depths: Iterable[int]) -> None:
        """Write the region's operations of the given depths, but not its terminator. Kernel-deep ones go to the entry."""
        wanted = set(depths)
        for op in block.ops:
            if not op.results:
                continue
            depth = self.depth(op.results[0])
            if depth not in wanted:
                continue
            if depth == KERNEL:
                if op.results[0] not in self.values:
                    with self.f.at_entry():
                        self.emit(op)
            else:
                self.emit(op)

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
        """base + step * (0, 1, 2, ...)."""
        element = value.element
        if value.narrow is not None:
            narrow = self.text(value.narrow, True)
            here, there = vector(self.width, value.narrow.element), vector(self.width, element)
            return self.f.emit(f"sext {here} {narrow} to {there}")
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
            converted = _extend_float(self, value.type, text, value.lane, element_type(to))
        else:
            converted = _truncate_float(self, value.element, text, value.lane, to)
        return Value(to, converted, value.lane)

    # -- operations ---------------------------------------------------------------------------------------------------
    def emit(self, op: Operation) -> None:
        """Write one operation."""
        handler = _HANDLERS.get(op.name) or (_math if op.name.startswith("math.") else None)
        if handler is None:
            raise LoweringError(f"operation '{op.name}' cannot be emitted inside a scalar region")
        handler(self, op)

    def define(self, result: SSAValue, text: str, lane: bool) -> None:
        self.values[result] = Value(result.type, text, lane)

    def operands(self, op: Operation) -> tuple[bool, list[str], str]:
        """(whether the operation is over lanes, the operands' texts, the LLVM type of operand 0)."""
        values = [self.values[operand] for operand in op.operands]
        lane = any(value.lane for value in values)
        texts = [self.text(value, lane) for value in values]
        return lane, texts, vector(self.width if lane else 1, values[0].element)


def _constant(e: RegionEmitter, op: Operation) -> None:
    attribute = op.properties["value"]
    type_ = op.results[0].type
    if isinstance(attribute, IntegerAttr):
        number: int | float = attribute.value.data
        text = str(number) if element_type(type_) != "i1" else ("true" if number else "false")
    elif isinstance(attribute, FloatAttr):
        number = attribute.value.data
        if isinstance(type_, BFloat16Type):
            import struct

            bits = (
                struct.unpack("<I", struct.pack("<f", number))[0] if abs(number) < 3.5e38 else (0x7F800000 | (number < 0) << 31)
            )
            text = str(bits >> 16)
        else:
            text = float_constant(number, element_type(type_))
    else:
        raise LoweringError(f"a constant of kind {attribute} cannot be emitted")
    e.values[op.results[0]] = Value(type_, text, False, constant=number)


def _float_binary(e: RegionEmitter, op: Operation) -> None:
    lane, (a, b), type_ = e.operands(op)
    flags = "nsz contract" if "nsz" in str(op.properties.get("fastmath", "")) else ""
    e.define(op.results[0], e.f.emit(f"{_FLOAT_BINARY[op.name]} {flags} {type_} {a}, {b}".replace("  ", " ")), lane)


def _int_binary(e: RegionEmitter, op: Operation) -> None:
    left, right = (e.values[operand] for operand in op.operands)
    if _affine(e, op, left, right):
        return
    lane, (a, b), type_ = e.operands(op)
    e.define(op.results[0], e.f.emit(f"{_INT_BINARY[op.name]} {type_} {a}, {b}"), lane)


def _affine(e: RegionEmitter, op: Operation, left: Value, right: Value) -> bool:
    """Keep sums, differences and constant multiples of affine lane values affine."""
    name, element = op.name, left.element
    if name not in ("arith.addi", "arith.subi", "arith.muli") or not (left.lane or right.lane) or element == "i1":
        return False
    if any(value.lane and value.base is None for value in (left, right)):
        return False
    first = left.base if left.lane else left.text
    second = right.base if right.lane else right.text
    if name == "arith.muli":
        scale = right.constant if left.lane else left.constant
        if not isinstance(scale, int) or (left.lane and right.lane) or abs(scale) > 1 << 20:
            return False
        step = (left.step if left.lane else right.step) * scale
    else:
        step = left.step + (right.step if name == "arith.addi" else -right.step)
    base = e.f.emit(f"{_INT_BINARY[name]} {element} {first}, {second}")
    e.values[op.results[0]] = Value(op.results[0].type, None, True, base=base, step=step)
    return True


def _int_minmax(e: RegionEmitter, op: Operation) -> None:
    lane, texts, _ = e.operands(op)
    e.define(op.results[0], e.intrinsic(_INT_MINMAX[op.name], e.values[op.operands[0]].element, lane, texts), lane)


def _float_minmax(e: RegionEmitter, op: Operation) -> None:
    lane, texts, _ = e.operands(op)
    e.define(op.results[0], e.call(_FLOAT_MINMAX[op.name], e.values[op.operands[0]].element, lane, texts), lane)


def _division(e: RegionEmitter, op: Operation) -> None:
    lane, texts, type_ = e.operands(op)
    divisor = e.values[op.operands[1]]
    element = divisor.element
    result = op.results[0]
    if isinstance(divisor.constant, int) and divisor.constant > 0:
        # LLVM turns a constant divisor into a multiplication.
        quotient = e.f.emit(f"sdiv {type_} {texts[0]}, {texts[1]}")
        remainder = e.f.emit(f"srem {type_} {texts[0]}, {texts[1]}")
        if op.name == "arith.remsi":
            e.define(result, remainder, lane)
            return
        if op.name == "arith.floordivsi":
            zero = splat_constant("0", e.width if lane else 1, element)
            below = e.f.emit(f"icmp slt {type_} {remainder}, {zero}")
            minus = e.f.emit(f"sext {vector(e.width if lane else 1, 'i1')} {below} to {type_}")
            quotient = e.f.emit(f"add {type_} {quotient}, {minus}")
        e.define(result, quotient, lane)
        return
    if e.fault is not None:
        zero = splat_constant("0", e.width if lane else 1, element)
        e.fault.note(e, e.f.emit(f"icmp eq {type_} {texts[1]}, {zero}"), lane, None, Cause(None))
    e.define(result, e.call(_DIVISIONS[op.name], element, lane, texts), lane)


def _unsigned_division(e: RegionEmitter, op: Operation) -> None:
    lane, (a, b), type_ = e.operands(op)
    divisor = e.values[op.operands[1]]
    if not isinstance(divisor.constant, int) or divisor.constant == 0:
        one = splat_constant("1", e.width if lane else 1, divisor.element)
        b = e.intrinsic("umax", divisor.element, lane, [b, one])
    e.define(op.results[0], e.f.emit(f"{_UNSIGNED_DIVISIONS[op.name]} {type_} {a}, {b}"), lane)


def _shift(e: RegionEmitter, op: Operation) -> None:
    """A shift by the width or more (undefined in LLVM) shifts everything out."""
    lane, (a, b), type_ = e.operands(op)
    amount = e.values[op.operands[1]]
    bits = int(amount.element[1:])
    if isinstance(amount.constant, int) and 0 <= amount.constant < bits:
        e.define(op.results[0], e.f.emit(f"{_SHIFTS[op.name]} {type_} {a}, {b}"), lane)
        return
    last = splat_constant(str(bits - 1), e.width if lane else 1, amount.element)
    clamped = e.intrinsic("umin", amount.element, lane, [b, last])
    shifted = e.f.emit(f"{_SHIFTS[op.name]} {type_} {a}, {clamped}")
    if op.name != "arith.shrsi":
        inside = e.f.emit(f"icmp ule {type_} {b}, {last}")
        zero = splat_constant("0", e.width if lane else 1, amount.element)
        condition = vector(e.width if lane else 1, "i1")
        shifted = e.f.emit(f"select {condition} {inside}, {type_} {shifted}, {type_} {zero}")
    e.define(op.results[0], shifted, lane)


def _compare_int(e: RegionEmitter, op: Operation) -> None:
    lane, (a, b), type_ = e.operands(op)
    predicate = _INT_PREDICATES[cast(IntegerAttr, op.properties["predicate"]).value.data]
    e.define(op.results[0], e.f.emit(f"icmp {predicate} {type_} {a}, {b}"), lane)


def _compare_float(e: RegionEmitter, op: Operation) -> None:
    lane, (a, b), type_ = e.operands(op)
    predicate = _FLOAT_PREDICATES[cast(IntegerAttr, op.properties["predicate"]).value.data]
    e.define(op.results[0], e.f.emit(f"fcmp {predicate} {type_} {a}, {b}"), lane)


def _select(e: RegionEmitter, op: Operation) -> None:
    condition, a, b = (e.values[operand] for operand in op.operands)
    lane = condition.lane or a.lane or b.lane
    width = e.width if lane else 1
    type_ = vector(width, a.element)
    chosen = e.f.emit(
        f"select {vector(width, 'i1')} {e.text(condition, lane)}, {type_} {e.text(a, lane)}, {type_} {e.text(b, lane)}"
    )
    e.define(op.results[0], chosen, lane)


def _negate(e: RegionEmitter, op: Operation) -> None:
    lane, (a,), type_ = e.operands(op)
    e.define(op.results[0], e.f.emit(f"fneg {type_} {a}"), lane)


def _cast(e: RegionEmitter, op: Operation) -> None:
    source, result = e.values[op.operands[0]], op.results[0]
    to = element_type(result.type)
    if source.lane and source.base is not None and _cast_affine(e, op, source):
        return
    lane = source.lane
    text = e.text(source, lane)
    width = e.width if lane else 1
    here, there = vector(width, source.element), vector(width, to)
    name = op.name
    if name == "arith.index_cast" or name == "arith.bitcast":
        if source.element == to:
            e.values[result] = Value(result.type, text, lane, source.base, source.step, source.constant)
            return
        if name == "arith.bitcast":
            instruction = "bitcast"
        else:
            instruction = "sext" if int(source.element[1:]) < int(to[1:]) else "trunc"
        if source.constant is not None and name == "arith.index_cast":
            e.values[result] = Value(result.type, source.text, False, constant=source.constant)
            return
        e.define(result, e.f.emit(f"{instruction} {here} {text} to {there}"), lane)
    elif name == "arith.extf":
        e.define(result, _extend_float(e, source.type, text, lane, to), lane)
    elif name == "arith.truncf":
        e.define(result, _truncate_float(e, source.element, text, lane, result.type), lane)
    elif name in ("arith.fptosi", "arith.fptoui"):
        element = source.element
        if not isinstance(source.type, Float32Type | Float64Type):
            text, element = _extend_float(e, source.type, text, lane, "float"), "float"
        if name == "arith.fptosi" and to in ("i8", "i16", "i32", "i64"):
            e.define(result, e.call(f"fptosi.{to}", element, lane, [text]), lane)
            return
        # Through i64, so that what does not fit is some value and never poison.
        wide = e.call("fptosi.i64", element, lane, [text])
        e.define(result, wide if to == "i64" else e.f.emit(f"trunc {vector(width, 'i64')} {wide} to {there}"), lane)
    elif name in ("arith.sitofp", "arith.uitofp"):
        instruction = "sitofp" if name == "arith.sitofp" else "uitofp"
        if isinstance(result.type, BFloat16Type):
            wide = e.f.emit(f"{instruction} {here} {text} to {vector(width, 'float')}")
            e.define(result, e.call("f32_to_bf16", "float", lane, [wide]), lane)
        else:
            e.define(result, e.f.emit(f"{instruction} {here} {text} to {there}"), lane)
    else:
        instruction = {"arith.extsi": "sext", "arith.extui": "zext", "arith.trunci": "trunc"}[name]
        e.define(result, e.f.emit(f"{instruction} {here} {text} to {there}"), lane)


def _cast_affine(e: RegionEmitter, op: Operation, source: Value) -> bool:
    """Integer casts of affine values cast the base. (A sum that overflows the narrow type is caught where the index is used: there
    the whole run of lanes must lie inside the narrow type and the buffer, or lanes are computed one by one.)"""
    to = element_type(op.results[0].type)
    if op.name not in ("arith.index_cast", "arith.extsi", "arith.trunci") or "i" != to[0] or to == "i1":
        return False
    bits_from, bits_to = int(source.element[1:]), int(to[1:])
    instruction = "sext" if bits_from < bits_to else "trunc"
    base = source.base if bits_from == bits_to else e.f.emit(f"{instruction} {source.element} {source.base} to {to}")
    narrow = source if bits_from < bits_to else None
    e.values[op.results[0]] = Value(op.results[0].type, None, True, base=base, step=source.step, narrow=narrow)
    return True


def _extend_float(e: RegionEmitter, type_: Attribute, text: str, lane: bool, to: str) -> str:
    width = e.width if lane else 1
    if isinstance(type_, BFloat16Type):
        text = e.call("bf16_to_f32", "i16", lane, [text])
    elif isinstance(type_, Float16Type) and not e.machine.halves:
        bits = e.f.emit(f"bitcast {vector(width, 'half')} {text} to {vector(width, 'i16')}")
        text = e.call("f16_to_f32", "i16", lane, [bits])
    else:
        return e.f.emit(f"fpext {vector(width, element_type(type_))} {text} to {vector(width, to)}")
    return text if to == "float" else e.f.emit(f"fpext {vector(width, 'float')} {text} to {vector(width, to)}")


def _truncate_float(e: RegionEmitter, element: str, text: str, lane: bool, to: Attribute) -> str:
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


def _math(e: RegionEmitter, op: Operation) -> None:
    lane, texts, _ = e.operands(op)
    element = e.values[op.operands[0]].element
    name = op.name.removeprefix("math.")
    if name == "exp2" and "attnc.nonpositive" in op.attributes and element == "float":
        name = "softmax_exp2"
    if name in ("absi",):
        e.define(op.results[0], e.intrinsic("abs", element, lane, texts, ", i1 false"), lane)
        return
    name = {"absf": "fabs", "fpowi": "powi"}.get(name, name)
    if name in ("fabs", "sqrt", "copysign", "fma"):
        e.define(op.results[0], e.intrinsic(name, element, lane, texts), lane)
        return
    e.define(op.results[0], e.call(name, element, lane, texts), lane)


def _for(e: RegionEmitter, op: Operation) -> None:
    """A loop over scalars (a reduced row of a capture); its carried values are vectors if anything in it is."""
    lower, upper, step, *inits = op.operands
    body = op.regions[0].block
    position, *carried = body.args
    lane = e.depth(op.results[0]) == LANE if op.results else False
    types = [vector(e.width if lane else 1, element_type(init.type)) for init in inits]
    fault_before = e.fault.text if e.fault is not None else None
    carries = [(type_, e.text(e.values[init], lane)) for type_, init in zip(types, inits, strict=True)]
    track_fault = fault_before is not None
    if track_fault:
        carries.append((vector(e.width if lane else 1, "i1"), cast(str, fault_before)))

    def inside(index: str, values: list[str]) -> list[str]:
        e.values[position] = Value(position.type, index)
        for argument, text in zip(carried, values, strict=False):
            e.values[argument] = Value(argument.type, text, lane)
        if track_fault and e.fault is not None:
            e.fault.text = values[-1]
        for inner in body.ops:
            if inner.name == "scf.yield":
                following = [e.text(e.values[value], lane) for value in inner.operands]
                return following + ([cast(str, e.fault.text)] if track_fault and e.fault is not None else [])
            e.emit(inner)
        raise LoweringError("scf.for without scf.yield")

    final = e.f.loop(e.scalar(lower), e.scalar(upper), e.scalar(step), inside, carries, hint="fold")
    if track_fault and e.fault is not None:
        e.fault.text = final[-1]
    for result, text in zip(op.results, final, strict=False):
        e.define(result, text, lane)


def _gather(e: RegionEmitter, op: Operation) -> None:
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
    e: RegionEmitter, op: tile.GatherOp, buffer: Buffer, d: int, index: Value, lane: bool, live: Value | None, checked: bool
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
    e: RegionEmitter, op: tile.GatherOp, buffer: Buffer, indices: Sequence[Value], lane: bool, live: Value | None, checked: bool
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
    e: RegionEmitter,
    op: tile.GatherOp,
    buffer: Buffer,
    indices: Sequence[Value],
    d: int,
    live: Value | None,
    checked: bool,
) -> None:
    """Neighbouring lanes want neighbouring elements: one load where the run [base, base ± W) lies inside, else the general way."""
    index = indices[d]
    base = cast(str, index.base)
    width = e.width
    if index.element != "i64":
        raise LoweringError("tile.gather: indices are of type index")
    last = e.f.add(base, index.step * (width - 1))
    low, high = (base, last) if index.step == 1 else (last, base)
    from_zero = e.f.emit(f"icmp sge i64 {low}, 0")
    # An index computed in 32 bits may have wrapped around; then it is not one run.
    limit = e.intrinsic("umin", "i64", False, [buffer.sizes[d], str(2**31 - 1)])
    to_end = e.f.emit(f"icmp slt i64 {high}, {limit}")
    inside = e.f.both(from_zero, to_end)
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
        keep = index.text, index.narrow.text if index.narrow is not None else None
        value = _gather_lanes(e, op, buffer, indices, True, live, checked)
        index.text = keep[0]
        if index.narrow is not None:
            index.narrow.text = keep[1]
        return [value] + ([cast(str, cast(Fault, e.fault).text)] if fault is not None else [])

    if live is not None:
        e.text(live, True)
    types = [vector(width, element_type(buffer.element))] + ([vector(width, "i1")] if fault is not None else [])
    joined = e.f.when(inside, run, lanes, types)
    if fault is not None and e.fault is not None:
        e.fault.text = joined[1]
    e.define(op.results[0], joined[0], True)


def _from_storage(e: RegionEmitter, type_: Attribute, loaded: str, lane: bool) -> str:
    """A bool is a byte in memory."""
    if element_type(type_) != "i1":
        return loaded
    width = e.width if lane else 1
    return e.f.emit(f"icmp ne {vector(width, 'i8')} {loaded}, {splat_constant('0', width, 'i8')}")


def _dim(e: RegionEmitter, op: Operation) -> None:
    assert isinstance(op, tile.DimOp)
    e.define(op.results[0], e.buffers[op.buffer].sizes[op.dimension.value.data], False)


_Handler = Callable[[RegionEmitter, Operation], None]
_HANDLERS: dict[str, _Handler] = {
    "arith.constant": _constant,
    "arith.negf": _negate,
    "arith.cmpi": _compare_int,
    "arith.cmpf": _compare_float,
    "arith.select": _select,
    "scf.for": _for,
    "tile.gather": _gather,
    "tile.dim": _dim,
    **dict.fromkeys(_FLOAT_BINARY, _float_binary),
    **dict.fromkeys(_INT_BINARY, _int_binary),
    **dict.fromkeys(_INT_MINMAX, _int_minmax),
    **dict.fromkeys(_FLOAT_MINMAX, _float_minmax),
    **dict.fromkeys(_DIVISIONS, _division),
    **dict.fromkeys(_UNSIGNED_DIVISIONS, _unsigned_division),
    **dict.fromkeys(_SHIFTS, _shift),
    **dict.fromkeys(
        (
            "arith.index_cast", "arith.bitcast", "arith.extf", "arith.truncf", "arith.fptosi", "arith.fptoui", "arith.sitofp",
            "arith.uitofp", "arith.extsi", "arith.extui", "arith.trunci",
        ),
        _cast,
    ),
}  # fmt: skip
