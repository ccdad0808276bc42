"""A `linalg.generic` as one native loop: elementwise operations, reductions, copies, of any number of operands.

The domain has parallel dimensions, then reduced ones; each operand is a pointer and a stride for every dimension, so layouts
cost nothing here (`runtime/graph_loops.py` orders and merges dimensions before). Vectors run along the innermost parallel
dimension, or, in a reduction whose results are combined by one associative operation, along the innermost reduced one.

    for each row (outer parallel dimensions), shared by the threads in tasks of about 16,000 elements
      for a chunk of the innermost dimension, a vector at a time
        load where the stride is 1, broadcast where it is 0, else gather
        the body
        store

The arguments' words: the sizes; for every operand (inputs, results, initial values) its address and strides; for tensors that
the body reads by `tensor.extract` address, sizes and strides; then scalars. Functions as `kernel.py` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from xdsl.dialects.builtin import Float64Type, IndexType
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute, SSAValue

from attnc.codegen.llvm.kernel import make_buffer
from attnc.codegen.llvm.loops_access import Operand
from attnc.codegen.llvm.loops_body import LoopBody, loop_body
from attnc.codegen.llvm.loops_combine import horizontal, neutral
from attnc.codegen.llvm.loops_region import LoopRegion
from attnc.codegen.llvm.text import Function, vector
from attnc.codegen.llvm.values import (
    BLOCK,
    CONTEXT_ARGS,
    CONTEXT_TASK,
    CONTEXT_TASKS,
    KERNEL,
    LANE,
    ROW,
    Buffer,
    Value,
    element_type,
)
from attnc.target import Target

TASK = 16384
"""Elements of a task, about."""
CHUNK, STRIDED_CHUNK = 8192, 16
"""Elements of the innermost dimension that a task takes at the most. Where lanes are strided in an operand, each brings a cache
line of its own, and the rows that follow want their neighbours: all of a chunk's lines should still be there."""


@dataclass
class Frame:
    """What `plan` and `work` read from the arguments."""

    sizes: list[str]
    operands: list[Operand]
    values: dict[SSAValue, Value] = field(default_factory=dict)
    buffers: dict[SSAValue, Buffer] = field(default_factory=dict)


def emit_loop(function: FuncOp, variant: dict[str, Any], target: Target) -> tuple[str, dict[str, Any]]:
    """(LLVM text, record) of the loop in `function` for one variant of it: how many dimensions there are, which one vectors
    run along, and what is known of the operands' strides along that one."""
    return _Loop(loop_body(function), variant, target).emit()


class _Loop:
    """Writes one loop."""

    def __init__(self, body: LoopBody, variant: dict[str, Any], target: Target):
        self.body, self.target = body, target
        parallel, reduction = variant["parallel"], variant["reduction"]
        self.numbers = [*parallel, *reduction] if isinstance(parallel, list) else None
        self.parallel = len(parallel) if isinstance(parallel, list) else parallel
        self.reduction = len(reduction) if isinstance(reduction, list) else reduction
        self.lanes = variant["lanes"]
        self.strides: str = variant["strides"]
        wide = any(isinstance(type_, Float64Type) for type_ in body.element_types)
        self.width = 1 if self.lanes == "none" else target.lanes(64 if wide else 32)
        self.inputs, self.results = len(body.inputs), len(body.results)
        self.chunk = STRIDED_CHUNK if "?" in self.strides else CHUNK

    def emit(self) -> tuple[str, dict[str, Any]]:
        work, region = self._work()
        texts = [work, self._plan(), *region.functions.values()]
        defined = set(region.functions)
        declarations = sorted(d for d in region.declarations if "@" + d.split("@")[1].split("(")[0] not in defined)
        arguments = [{"role": "word", "kind": kind, "name": ""} for kind in self._kinds()]
        record = {"name": "loop", "thread_bytes": 0, "arguments": arguments}
        return "\n\n".join([*texts, *declarations]) + "\n", record

    # -- arguments ----------------------------------------------------------------------------------------------------

    def _kinds(self) -> list[str]:
        rank = self.parallel + self.reduction
        kinds = ["i64"] * rank
        kinds += ["i64"] * ((1 + rank) * len(self.body.operands))
        for gather in self.body.gathers:
            kinds += ["i64"] * (1 + 2 * gather.rank)
        return kinds + ["f64" if element_type(n.type) in ("float", "double") else "i64" for n in self.body.numbers]

    def _frame(self, f: Function, args: str) -> Frame:
        word = 0

        def take(type_: str) -> str:
            nonlocal word
            word += 1
            return f.load(type_, f.pointer(args, word - 1, "i64"), 8)

        with f.at_entry():
            rank = self.parallel + self.reduction
            sizes = [take("i64") for _ in range(rank)]
            operands = []
            for n, type_ in enumerate(self.body.operands):
                pointer = take("ptr")
                strides = [take("i64") for _ in range(rank)]
                known = self.strides[n]
                inner = self._inner()
                if inner is not None and known != "?":
                    strides[inner] = known
                operands.append(Operand(type_, pointer, strides))
            frame = Frame(sizes, operands)
            for gather in self.body.gathers:
                pointer = take("ptr")
                shape = [take("i64") for _ in range(gather.rank)]
                steps = [take("i64") for _ in range(gather.rank)]
                frame.buffers[gather.value] = make_buffer(f, gather.memref, pointer, shape, steps, args)
            for number in self.body.numbers:
                frame.values[number] = Value(number.type, self._number(f, take, number.type))
        return frame

    @staticmethod
    def _number(f: Function, take: Callable[[str], str], type_: Attribute) -> str:
        element = element_type(type_)
        if element == "double":
            return take("double")
        if element == "float":
            return f.emit(f"fptrunc double {take('double')} to float")
        return take("i64") if element == "i64" else f.emit(f"trunc i64 {take('i64')} to {element}")

    def _inner(self) -> int | None:
        """The dimension that vectors run along."""
        if self.lanes == "parallel":
            return self.parallel - 1
        return self.parallel + self.reduction - 1 if self.lanes == "reduction" else None

    # -- tasks --------------------------------------------------------------------------------------------------------

    def _shape(self, f: Function, frame: Frame) -> tuple[str, str, str, str, str]:
        """(rows, rows of a task, elements of the row, chunks of it, elements of the reduced dimensions)."""
        outer = self.parallel - 1 if self.lanes == "parallel" else self.parallel
        rows, reduced = "1", "1"
        for size in frame.sizes[:outer]:
            rows = f.mul(rows, size)
        for size in frame.sizes[self.parallel :]:
            reduced = f.mul(reduced, size)
        row, chunks, work = "1", "1", reduced
        if self.lanes == "parallel":
            row = frame.sizes[self.parallel - 1]
            chunks = f.ceil_div(row, self.chunk)
            work = f.mul(self._least(f, row, str(self.chunk)), reduced)
        work = f.emit(f"call i64 @llvm.umax.i64(i64 {work}, i64 1)")
        in_task = f.emit(f"udiv i64 {TASK}, {work}") if work != "1" else str(TASK)
        in_task = f.emit(f"call i64 @llvm.umax.i64(i64 {in_task}, i64 1)")
        return rows, in_task, row, chunks, reduced

    @staticmethod
    def _least(f: Function, a: str, b: str) -> str:
        return f.emit(f"call i64 @llvm.umin.i64(i64 {a}, i64 {b})")

    def _plan(self) -> str:
        f = Function("loop.plan", [("ptr", "args"), ("ptr", "result")])
        frame = self._frame(f, "%args")
        rows, in_task, row, chunks, reduced = self._shape(f, frame)
        blocks = f.emit(f"udiv i64 {f.add(rows, f.sub(in_task, 1))}, {in_task}")
        elements = f.mul(f.mul(rows, row), f.emit(f"call i64 @llvm.umax.i64(i64 {reduced}, i64 1)"))
        cost = 4 + len(self.body.operands) * 2 + 2 * self.body.cost
        for n, value in enumerate((f.mul(blocks, chunks), "0", "0", f.mul(elements, cost))):
            f.store("i64", value, f.pointer("%result", n, "i64"), 8)
        return f.finish()

    def _work(self) -> tuple[str, LoopRegion]:
        f = Function("loop.work", [("ptr", "context")])
        region = LoopRegion(f, self.width, self.target)
        region.declarations |= {"declare i64 @llvm.umax.i64(i64, i64)", "declare i64 @llvm.umin.i64(i64, i64)"}
        with f.at_entry():
            args = f.load("ptr", f.pointer("%context", CONTEXT_ARGS, "i64"), 8)
            tasks = f.load("i64", f.pointer("%context", CONTEXT_TASKS, "i64"), 8)
        frame = self._frame(f, args)
        region.values.update(frame.values)
        region.buffers.update(frame.buffers)
        with f.at_entry():
            rows, in_task, row, chunks, _ = self._shape(f, frame)
        self._depths(region)
        region.emit_block(self.body.block, (KERNEL, BLOCK))
        counter = f.pointer("%context", CONTEXT_TASK, "i64")
        head, task, done = f.new_block("next"), f.new_block("task"), f.new_block("done")
        f.branch(head)
        f.place(head)
        taken = f.emit(f"atomicrmw add ptr {counter}, i64 1 monotonic, align 8")
        f.branch_if(f.emit(f"icmp slt i64 {taken}, {tasks}"), task, done)
        f.place(task)
        start, end = "0", row
        if self.lanes == "parallel":
            start = f.mul(f.emit(f"urem i64 {taken}, {chunks}"), self.chunk)
            end = self._least(f, f.add(start, self.chunk), row)
            taken = f.emit(f"udiv i64 {taken}, {chunks}")
        first = f.mul(taken, in_task)
        last = self._least(f, f.add(first, in_task), rows)
        f.loop(first, last, 1, lambda r, _: self._row(region, frame, r, start, end), hint="row")
        f.branch(head)
        f.place(done)
        return f.finish(), region

    def _depths(self, region: LoopRegion) -> None:
        """Which of the body's arguments vary from lane to lane: the others are computed once a row."""
        body = self.body
        for n, argument in enumerate(body.block.args[: self.inputs]):
            reduced = bool(self.body.starts)
            region.depths[argument] = ROW if self.strides[n] == "0" and not reduced and self.lanes != "none" else LANE
        for argument in body.block.args[self.inputs : self.inputs + self.results]:
            region.depths[argument] = LANE
        for number, value in body.indices:
            inner = self._inner()
            at = self._place(number)
            region.depths[value] = LANE if at == inner or at >= self.parallel or self.lanes == "none" else ROW
        region.assign_depths(body.block)

    def _place(self, number: int) -> int:
        """Where dimension `number` of the text stands in the loop nest."""
        return self.numbers.index(number) if self.numbers is not None else number

    # -- a row --------------------------------------------------------------------------------------------------------

    def _row(self, region: LoopRegion, frame: Frame, row: str, start: str, end: str) -> None:
        f = region.f
        outer = self.parallel - 1 if self.lanes == "parallel" else self.parallel
        at: dict[int, str] = {}
        rest = row
        for d in reversed(range(outer)):
            at[d] = rest if d == 0 else f.emit(f"urem i64 {rest}, {frame.sizes[d]}")
            rest = f.emit(f"udiv i64 {rest}, {frame.sizes[d]}") if d else rest
        rows = [operand.moved(f, at) for operand in frame.operands]
        self._indices(region, at)
        if not self.body.starts:
            self._elementwise(region, rows, at, start, end)
        elif self.lanes == "reduction":
            self._reduced_lanes(region, frame, rows, at)
        else:
            self._reduced_rows(region, frame, rows, at, start, end)

    def _indices(self, region: LoopRegion, at: dict[int, str], lane: tuple[int, str] | None = None) -> None:
        """Gives `linalg.index` its values."""
        for number, value in self.body.indices:
            place = self._place(number)
            if lane is not None and place == lane[0] and self.width > 1:
                region.values[value] = Value(IndexType(), None, True, base=lane[1], step=1)
            elif lane is not None and place == lane[0]:
                region.values[value] = Value(IndexType(), lane[1])
            elif place in at:
                region.values[value] = Value(IndexType(), at[place])

    def _load(self, region: LoopRegion, rows: Sequence[Operand], j: str | None, live: str | None, depth: int) -> None:
        """Loads the inputs of a depth."""
        inner = self._inner()
        for n, argument in enumerate(self.body.block.args[: self.inputs]):
            if region.depths[argument] == depth:
                region.values[argument] = rows[n].load(region, inner, j, live)

    def _body(self, region: LoopRegion, depths: Sequence[int]) -> list[Value]:
        region.emit_block(self.body.block, depths)
        return [region.values[value] for value in self.body.yielded] if LANE in depths else []

    def _vectors(self, region: LoopRegion, start: str, end: str, inside: Callable[[str, str | None], None]) -> None:
        """`inside(j, live)` for each vector from `start` to `end`; `live` is the mask of the last, ragged one."""
        f = region.f
        if self.width == 1:
            f.loop(start, end, 1, lambda j, _: inside(j, None), hint="lane")
            return
        whole = f.add(start, f.emit(f"and i64 {f.sub(end, start)}, {-self.width}"))
        f.loop(start, whole, self.width, lambda j, _: inside(j, None), hint="lane")
        ragged = f.emit(f"icmp slt i64 {whole}, {end}")
        f.when(ragged, lambda: inside(whole, region.lanes_below(whole, end)))

    def _elementwise(self, region: LoopRegion, rows: Sequence[Operand], at: dict[int, str], start: str, end: str) -> None:
        inner = self._inner()
        self._load(region, rows, None, None, ROW)
        region.live = None
        region.emit_block(self.body.block, (ROW,))

        def inside(j: str, live: str | None) -> None:
            region.live = live
            self._indices(region, at, (inner, j) if inner is not None else None)
            self._load(region, rows, j, live, LANE)
            for n, value in enumerate(self._body(region, (LANE,))):
                rows[self.inputs + n].store(region, inner, j, live, value)

        if self.lanes == "none":
            inside("0", None)
        else:
            self._vectors(region, start, end, inside)

    # -- reductions ---------------------------------------------------------------------------------------------------

    def _starts(self, region: LoopRegion, rows: Sequence[Operand], j: str | None, live: str | None) -> list[Value]:
        """The results' initial values."""
        values: list[Value] = []
        tensors = iter(range(self.inputs + self.results, len(rows)))
        for start in self.body.starts:
            if start is None:
                values.append(rows[next(tensors)].load(region, self._inner() if j is not None else None, j, live))
            else:
                values.append(region.values[start])
        return values

    def _nest(
        self,
        region: LoopRegion,
        frame: Frame,
        rows: Sequence[Operand],
        dims: Sequence[int],
        at: dict[int, str],
        carried: Sequence[tuple[str, str]],
        inside: Callable[[Sequence[Operand], dict[int, str], list[str]], Sequence[str]],
    ) -> list[str]:
        """Loops over the dimensions `dims`, outermost first, that carry values."""
        if not dims:
            return list(inside(rows, at, [text for _, text in carried]))
        d, *rest = dims

        def body(i: str, values: list[str]) -> list[str]:
            here = [operand.moved(region.f, {d: i}) for operand in rows[: self.inputs]]
            here += rows[self.inputs :]
            now = [(type_, value) for (type_, _), value in zip(carried, values, strict=True)]
            return self._nest(region, frame, here, rest, {**at, d: i}, now, inside)

        return region.f.loop("0", frame.sizes[d], 1, body, carried, hint="sum")

    def _types(self, width: int) -> list[str]:
        return [vector(width, element_type(type_)) for type_ in self.body.results]

    def _reduced_rows(
        self, region: LoopRegion, frame: Frame, rows: Sequence[Operand], at: dict[int, str], start: str, end: str
    ) -> None:
        """Each lane reduces by itself, elements in their order."""
        inner = self._inner()
        dims = range(self.parallel, self.parallel + self.reduction)

        def column(j: str, live: str | None) -> None:
            region.live = live
            lane = self.lanes == "parallel"
            starts = [region.text(value, lane) for value in self._starts(region, rows, j if lane else None, live)]

            def element(here: Sequence[Operand], place: dict[int, str], values: list[str]) -> list[str]:
                self._indices(region, place, (inner, j) if inner is not None else None)
                self._load(region, here, j if lane else None, live, ROW)
                self._load(region, here, j if lane else None, live, LANE)
                self._accumulators(region, values, lane)
                following = self._body(region, (ROW, LANE))
                return [region.text(value, lane) for value in following]

            carried = list(zip(self._types(self.width if lane else 1), starts, strict=True))
            final = self._nest(region, frame, rows, list(dims), at, carried, element)
            for n, text in enumerate(final):
                value = Value(self.body.results[n], text, lane)
                rows[self.inputs + n].store(region, inner, j, live, value)

        if self.lanes == "none":
            column("0", None)
        else:
            self._vectors(region, start, end, column)

    def _accumulators(self, region: LoopRegion, values: Sequence[str], lane: bool) -> None:
        arguments = self.body.block.args[self.inputs : self.inputs + self.results]
        for argument, text, type_ in zip(arguments, values, self.body.results, strict=True):
            region.values[argument] = Value(type_, text, lane)

    def _reduced_lanes(self, region: LoopRegion, frame: Frame, rows: Sequence[Operand], at: dict[int, str]) -> None:
        """Lanes share the innermost reduced dimension; what they found is combined after it."""
        f, width = region.f, self.width
        inner = self._inner()
        assert inner is not None
        size = frame.sizes[inner]
        types = self._types(width)
        carried = [
            (type_, neutral(kind, element, width))
            for type_, kind, element in zip(types, self.body.combiners, self.body.results, strict=True)
        ]

        def element(here: Sequence[Operand], place: dict[int, str], values: list[str]) -> list[str]:
            def step(j: str, live: str | None, now: Sequence[str]) -> list[str]:
                region.live = live
                self._indices(region, place, (inner, j))
                self._load(region, here, j, live, ROW)
                self._load(region, here, j, live, LANE)
                self._accumulators(region, now, True)
                following = [region.text(value, True) for value in self._body(region, (ROW, LANE))]
                if live is None:
                    return following
                mask = vector(width, "i1")
                return [
                    f.emit(f"select {mask} {live}, {type_} {new}, {type_} {old}")
                    for type_, new, old in zip(types, following, now, strict=True)
                ]

            now = list(zip(types, values, strict=True))
            whole = f.emit(f"and i64 {size}, {-width}")
            found = f.loop("0", whole, width, lambda j, v: step(j, None, v), now, hint="lane")
            ragged = f.emit(f"icmp slt i64 {whole}, {size}")
            return f.when(ragged, lambda: step(whole, region.lanes_below(whole, size), found), lambda: found, types)

        dims = list(range(self.parallel, inner))
        final = self._nest(region, frame, rows, dims, at, carried, element)
        starts = self._starts(region, rows, None, None)
        for n, (text, start) in enumerate(zip(final, starts, strict=True)):
            value = horizontal(region, self.body.combiners[n], self.body.results[n], text, start)
            rows[self.inputs + n].store(region, None, None, None, value)
