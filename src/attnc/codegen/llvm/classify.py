"""`func.func` of scalar arithmetic (the classifier) as an internal LLVM function."""

from __future__ import annotations

from xdsl.dialects.builtin import MemRefType
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation

from attnc.codegen.llvm.operations import RegionEmitter
from attnc.codegen.llvm.text import Function
from attnc.codegen.llvm.values import Buffer, Value, element_type, static_strides, storage_type
from attnc.dialects import tile
from attnc.errors import LoweringError
from attnc.target import Target


def emit_function(function: FuncOp, outer: RegionEmitter, target: Target) -> str:
    """The text of `function`; what it needs of math functions and declarations is added to `outer`'s.

    A buffer argument is passed as its pointer, sizes and strides.
    """
    block = function.body.block
    arguments: list[tuple[str, str]] = []
    for n, argument in enumerate(block.args):
        if isinstance(argument.type, MemRefType):
            rank = argument.type.get_num_dims()
            arguments.append(("ptr", f"a{n}"))
            arguments += [("i64", f"a{n}.size{d}") for d in range(rank)]
            arguments += [("i64", f"a{n}.stride{d}") for d in range(rank)]
        else:
            arguments.append((element_type(argument.type), f"a{n}"))
    results = list(function.function_type.outputs)
    if len(results) != 1:
        raise LoweringError(f"@{function.sym_name.data}: a classifier returns one value")
    f = Function(function.sym_name.data, arguments, element_type(results[0]), "internal", "nounwind noinline")
    region = RegionEmitter(f, 1, target)
    region.functions, region.declarations, region.libm = outer.functions, outer.declarations, outer.libm
    for n, argument in enumerate(block.args):
        if isinstance(argument.type, MemRefType):
            rank = argument.type.get_num_dims()
            fixed = static_strides(argument.type)
            region.buffers[argument] = Buffer(
                argument.type,
                f"%a{n}",
                [f"%a{n}.size{d}" for d in range(rank)],
                [f"%a{n}.stride{d}" if fixed[d] is None else str(fixed[d]) for d in range(rank)],
                [stride == 1 for stride in fixed],
            )
        else:
            region.values[argument] = Value(argument.type, f"%a{n}")
    for op in block.ops:
        if op.name == "func.return":
            return f.finish(region.scalar(op.operands[0]))
        if isinstance(op, tile.RangeOp):
            _range(region, op)
        else:
            region.emit(op)
    raise LoweringError(f"@{function.sym_name.data} does not return")


def _range(region: RegionEmitter, op: Operation) -> None:
    """Least and greatest element of a box, by looking at each: a block of a captured vector is a few hundred elements."""
    assert isinstance(op, tile.RangeOp)
    f, buffer = region.f, region.buffers[op.buffer]
    stored = storage_type(buffer.element)
    element = element_type(buffer.element)
    if stored[0] != "i":
        raise LoweringError("tile.range: the buffer must hold integers or bools")
    least, greatest = str(2**63 - 1), str(-(2**63))
    bounds = []
    for d, (lower, upper) in enumerate(zip(op.lower, op.upper, strict=True)):
        first = region.intrinsic("smax", "i64", False, [region.scalar(lower), "0"])
        end = f.add(region.scalar(upper), 1)
        bounds.append((first, region.intrinsic("smin", "i64", False, [end, buffer.sizes[d]])))

    def nest(d: int, offset: str, carried: list[str]) -> list[str]:
        if d == len(bounds):
            value = f.load(stored, f.pointer(buffer.pointer, offset, stored))
            if element == "i1":
                value = f.emit(f"icmp ne i8 {value}, 0")
            if element != "i64":
                value = f.emit(f"{'zext' if element == 'i1' else 'sext'} {element} {value} to i64")
            return [
                region.intrinsic("smin", "i64", False, [carried[0], value]),
                region.intrinsic("smax", "i64", False, [carried[1], value]),
            ]

        def inside(position: str, values: list[str]) -> list[str]:
            here = f.add(offset, f.mul(position, buffer.strides[d]))
            return nest(d + 1, here, values)

        return f.loop(bounds[d][0], bounds[d][1], 1, inside, [("i64", carried[0]), ("i64", carried[1])], hint="range")

    minimum, maximum = nest(0, "0", [least, greatest])
    region.define(op.minimum, minimum, False)
    region.define(op.maximum, maximum, False)
