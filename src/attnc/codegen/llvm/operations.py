"""The operations of scalar regions, one small function each, and the table that finds it by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

from xdsl.dialects.builtin import BFloat16Type, Float32Type, Float64Type, FloatAttr, IntegerAttr
from xdsl.ir import Block, Operation, SSAValue

from attnc.codegen.llvm.gather import gather
from attnc.codegen.llvm.scalar import DIVISIONS, UNSIGNED_DIVISIONS, Cause, RegionValues, extend_float, truncate_float
from attnc.codegen.llvm.text import float_constant, splat_constant, vector
from attnc.codegen.llvm.values import KERNEL, LANE, Value, element_type
from attnc.dialects import tile
from attnc.errors import LoweringError


class RegionEmitter(RegionValues):
    """Writes the operations of scalar regions into a function; remembers every value it has seen."""

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

    def emit(self, op: Operation) -> None:
        """Write one operation. Raises `LoweringError` for one that no scalar region may hold."""
        handler = _HANDLERS.get(op.name) or (_math if op.name.startswith("math.") else None)
        if handler is None:
            raise LoweringError(f"operation '{op.name}' cannot be emitted inside a scalar region")
        narrow = [operand for operand in op.operands if isinstance(operand.type, BFloat16Type)]
        if narrow and (op.name.startswith("math.") or op.name in _FLOAT_ARITHMETIC):
            self._emit_widened(op, narrow, handler)
        else:
            handler(self, op)

    def _emit_widened(self, op: Operation, narrow: list[SSAValue], handler: Handler) -> None:
        """Arithmetic on bf16: in f32, the result rounded."""
        known = {operand: self.values[operand] for operand in narrow}
        for operand, value in known.items():
            text = extend_float(self, value.type, self.text(value, value.lane), value.lane, "float")
            self.values[operand] = Value(Float32Type(), text, value.lane)
        handler(self, op)
        self.values.update(known)
        result = self.values[op.results[0]]
        if isinstance(result.type, BFloat16Type):
            result.text = truncate_float(self, "float", str(result.text), result.lane, result.type)


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
_SHIFTS = {"arith.shli": "shl", "arith.shrsi": "ashr", "arith.shrui": "lshr"}
_FLOAT_ARITHMETIC = (
    "arith.negf",
    "arith.cmpf",
    *_FLOAT_BINARY,
    "arith.maximumf",
    "arith.minimumf",
    "arith.maxnumf",
    "arith.minnumf",
)
_FLOAT_MINMAX = {
    "arith.maximumf": "maximum",
    "arith.minimumf": "minimum",
    "arith.maxnumf": "fmax",
    "arith.minnumf": "fmin",
}


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
    instruction = f"{_INT_BINARY[name]} {{}} {{}}, {{}}"
    base = e.f.emit(instruction.format(element, first, second))
    result = e.values[op.results[0]] = Value(op.results[0].type, None, True, base=base, step=step)
    if left.sources or right.sources:
        result.sources = left, right
        result.lanes = lambda texts: e.f.emit(instruction.format(vector(e.width, element), *texts))
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
    e.define(result, e.call(DIVISIONS[op.name], element, lane, texts), lane)


def _unsigned_division(e: RegionEmitter, op: Operation) -> None:
    lane, (a, b), type_ = e.operands(op)
    divisor = e.values[op.operands[1]]
    if not isinstance(divisor.constant, int) or divisor.constant == 0:
        zero, one = (splat_constant(number, e.width if lane else 1, divisor.element) for number in "01")
        if e.fault is not None and divisor.element == "i8":
            e.fault.note(e, e.f.emit(f"icmp eq {type_} {b}, {zero}"), lane, None, Cause(None))
        b = e.intrinsic("umax", divisor.element, lane, [b, one])
    e.define(op.results[0], e.f.emit(f"{UNSIGNED_DIVISIONS[op.name]} {type_} {a}, {b}"), lane)


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
            e.values[result] = Value(
                result.type, text, lane, source.base, source.step, source.constant, source.sources, source.lanes
            )
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
        e.define(result, extend_float(e, source.type, text, lane, to), lane)
    elif name == "arith.truncf":
        e.define(result, truncate_float(e, source.element, text, lane, result.type), lane)
    elif name in ("arith.fptosi", "arith.fptoui"):
        element = source.element
        if not isinstance(source.type, Float32Type | Float64Type):
            text, element = extend_float(e, source.type, text, lane, "float"), "float"
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
    """Integer casts of affine values cast the base. (A sum that overflows the narrow type is caught where the index is used:
    there the whole run of lanes must lie inside the narrow type and the buffer, or lanes are computed from what was cast.)"""
    to = element_type(op.results[0].type)
    if op.name not in ("arith.index_cast", "arith.extsi", "arith.trunci") or to[0] != "i" or to == "i1":
        return False
    bits_from, bits_to = int(source.element[1:]), int(to[1:])
    instruction = "sext" if bits_from < bits_to else "trunc"
    base = source.base if bits_from == bits_to else e.f.emit(f"{instruction} {source.element} {source.base} to {to}")
    result = e.values[op.results[0]] = Value(op.results[0].type, None, True, base=base, step=source.step)
    if bits_from == bits_to:
        result.sources, result.lanes = source.sources, source.lanes
    elif source.sources or bits_from < bits_to:
        here, there = vector(e.width, source.element), vector(e.width, to)
        result.sources = (source,)
        result.lanes = lambda texts: e.f.emit(f"{instruction} {here} {texts[0]} to {there}")
    return True


def _math(e: RegionEmitter, op: Operation) -> None:
    lane, texts, _ = e.operands(op)
    element = e.values[op.operands[0]].element
    name = op.name.removeprefix("math.")
    if name == "exp2" and tile.NONPOSITIVE in op.attributes and element == "float":
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
        carries.append((vector(e.width, "i1"), cast(str, fault_before)))
    # Lanes that are first computed in the loop are not at hand after it.
    pending = [origin for value in e.values.values() for origin in value.origins() if origin.text is None]

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
    for value in pending:
        value.text = None
    if track_fault and e.fault is not None:
        e.fault.text = final[-1]
    for result, text in zip(op.results, final, strict=False):
        e.define(result, text, lane)


def _dim(e: RegionEmitter, op: Operation) -> None:
    assert isinstance(op, tile.DimOp)
    e.define(op.results[0], e.buffers[op.buffer].sizes[op.dimension.value.data], False)


Handler = Callable[[RegionEmitter, Operation], None]
_HANDLERS: dict[str, Handler] = {
    "arith.constant": _constant,
    "arith.negf": _negate,
    "arith.cmpi": _compare_int,
    "arith.cmpf": _compare_float,
    "arith.select": _select,
    "scf.for": _for,
    "tile.gather": gather,
    "tile.dim": _dim,
    **dict.fromkeys(_FLOAT_BINARY, _float_binary),
    **dict.fromkeys(_INT_BINARY, _int_binary),
    **dict.fromkeys(_INT_MINMAX, _int_minmax),
    **dict.fromkeys(_FLOAT_MINMAX, _float_minmax),
    **dict.fromkeys(DIVISIONS, _division),
    **dict.fromkeys(UNSIGNED_DIVISIONS, _unsigned_division),
    **dict.fromkeys(_SHIFTS, _shift),
    **dict.fromkeys(
        (
            "arith.index_cast", "arith.bitcast", "arith.extf", "arith.truncf", "arith.fptosi", "arith.fptoui", "arith.sitofp",
            "arith.uitofp", "arith.extsi", "arith.extui", "arith.trunci",
        ),
        _cast,
    ),
}  # fmt: skip
