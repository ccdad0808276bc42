"""The body of a loop as vector code: `tensor.extract` reads other tensors, with torch's rules where it says so."""

from __future__ import annotations

from xdsl.ir import Operation

from attnc.codegen.llvm.gather import gather
from attnc.codegen.llvm.operations import RegionEmitter
from attnc.codegen.llvm.scalar import Cause, Fault, RegionValues
from attnc.codegen.llvm.text import Function, vector
from attnc.codegen.llvm.values import CONTEXT_FAULT, Value
from attnc.dialects import tile
from attnc.target import Target


class LoopRegion(RegionEmitter):
    """Writes a loop's body. `live` is the mask of the lanes that exist, None where all do."""

    def __init__(self, function: Function, width: int, target: Target):
        super().__init__(function, width, target)
        self.live: str | None = None

    def emit(self, op: Operation) -> None:
        if isinstance(op, tile.GatherOp):
            checked = op.proven is None
            self.fault = _ReportedFault(self) if checked else None
            gather(self, op)
            self.fault = None
        elif op.name.startswith(("arith.div", "arith.rem", "arith.floordiv")):
            self.fault = _ReportedFault(self)
            super().emit(op)
            self.fault = None
        else:
            super().emit(op)


class _ReportedFault(Fault):
    """Tells the launcher at once: such faults are rare, and what is written meanwhile is not returned."""

    def __init__(self, region: LoopRegion):
        super().__init__()
        self.live = region.live
        self.text = "false" if region.width == 1 else "zeroinitializer"

    def note(self, e: RegionValues, outside: str, lane: bool, live: Value | None, cause: Cause) -> None:
        del live, cause
        f, width = e.f, e.width
        if lane and width > 1:
            if self.live is not None:
                outside = f.emit(f"and {vector(width, 'i1')} {outside}, {self.live}")
            e.declarations.add(f"declare i1 @llvm.vector.reduce.or.v{width}i1(<{width} x i1>)")
            outside = f.emit(f"call i1 @llvm.vector.reduce.or.v{width}i1(<{width} x i1> {outside})")

        def tell() -> None:
            f.do(f"store atomic i64 1, ptr {f.pointer('%context', CONTEXT_FAULT, 'i64')} monotonic, align 8")

        f.when(outside, tell)
