"""The frame of an emitted kernel: arguments, scratch, the loop over tasks; then `tile.grid`'s body through `rows.py`.

For `tile.kernel @NAME` two functions come out (see runtime/abi.py for what they are called with):

* `NAME.plan(args, result)`: how many tasks, how much shared memory and how many leading zero bytes of it, how many flops;
* `NAME.work(context)`: takes tasks from the context's counter until none is left. Any number of threads may run it at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects.builtin import Float32Type, IndexType, IntegerType, MemRefType, ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import Block

from attnc.codegen.llvm import leaves
from attnc.codegen.llvm.body import BodyEmitter
from attnc.codegen.llvm.classify import emit_function
from attnc.codegen.llvm.operations import RegionEmitter
from attnc.codegen.llvm.shared_sums import SharedSums, accumulations, loop_of, ordered_rounds
from attnc.codegen.llvm.staging import Staging
from attnc.codegen.llvm.storage import element_of
from attnc.codegen.llvm.text import Function
from attnc.codegen.llvm.values import (
    BLOCK,
    CONTEXT_ARGS,
    CONTEXT_SCRATCH,
    CONTEXT_SHARED,
    CONTEXT_SLOT,
    CONTEXT_STRIDE,
    CONTEXT_TASK,
    CONTEXT_TASKS,
    KERNEL,
    Buffer,
    Value,
    element_type,
    static_strides,
)
from attnc.dialects import tile
from attnc.errors import LoweringError
from attnc.target import Target

FLOPS_OF_A_LOAD = 24
"""So many floating-point operations take as long as reading one element and using it once."""

ROWS_WHILE_READING = 8
"""So many rows can be computed while a right-hand operand is read from memory."""


@dataclass
class Emitted:
    """LLVM text of one kernel and what the runtime must know of it: its own functions, the mathematical functions they call
    (by symbol), declarations, and the texts of its leaf routines, each an object of its own."""

    functions: list[str]
    definitions: dict[str, str]
    declarations: set[str]
    leaves: dict[str, str]
    thread_bytes: int


def load_arguments(region: RegionEmitter, args: str, block: Block) -> None:
    """Read a kernel's arguments from the array of 8-byte words into the region's values and buffers."""
    f, word = region.f, 0
    with f.at_entry():
        for argument in block.args:
            type_ = argument.type
            if isinstance(type_, MemRefType):
                rank = type_.get_num_dims()
                words = [f.load("ptr" if n == 0 else "i64", f.pointer(args, word + n, "i64"), 8) for n in range(2 * rank + 1)]
                word += 2 * rank + 1
                region.buffers[argument] = make_buffer(f, type_, words[0], words[1 : rank + 1], words[rank + 1 :], args)
            else:
                region.values[argument] = Value(type_, _scalar_argument(region, args, word, type_))
                word += 1
            region.depths[argument] = KERNEL


def make_buffer(f: Function, type_: MemRefType, pointer: str, sizes: list[str], strides: list[str], safe: str) -> Buffer:
    """A buffer with what its type says of sizes and strides made constant. One without elements points to `safe`, a word
    that may be read, with all strides 0: whatever is read there is not used."""
    fixed = static_strides(type_)
    empty = None
    for d, size in enumerate(type_.get_shape()):
        if size >= 0:
            sizes[d] = str(size)
        else:
            zero = f.emit(f"icmp eq i64 {sizes[d]}, 0")
            empty = zero if empty is None else f.emit(f"or i1 {empty}, {zero}")
        if fixed[d] is not None:
            strides[d] = str(fixed[d])
    if empty is not None:
        pointer = f.emit(f"select i1 {empty}, ptr {safe}, ptr {pointer}")
        strides = [stride if stride in ("0", "1") else f.emit(f"select i1 {empty}, i64 0, i64 {stride}") for stride in strides]
    return Buffer(type_, pointer, sizes, strides, [stride == 1 for stride in fixed])


def _scalar_argument(region: RegionEmitter, args: str, word: int, type_: object) -> str:
    f = region.f
    address = f.pointer(args, word, "i64")
    if isinstance(type_, IndexType):
        return f.load("i64", address, 8)
    if isinstance(type_, IntegerType):
        loaded = f.load("i64", address, 8)
        element = element_type(type_)
        return loaded if element == "i64" else f.emit(f"trunc i64 {loaded} to {element}")
    loaded = f.load("double", address, 8)
    if isinstance(type_, Float32Type):
        return f.emit(f"fptrunc double {loaded} to float")
    if element_type(type_) != "double":  # type: ignore[arg-type]
        raise LoweringError(f"a kernel argument of type {type_} cannot be passed")
    return loaded


class KernelEmitter:
    """Emits one `tile.kernel`."""

    def __init__(self, kernel: tile.KernelOp, module: ModuleOp, target: Target):
        self.kernel, self.module, self.target = kernel, module, target
        self.name = kernel.sym_name.data
        self.grid = next(op for op in kernel.body.block.ops if isinstance(op, tile.GridOp))
        self.element = self._accumulate_element()
        self.bits = 64 if self.element == "double" else 32
        self.width = target.lanes(self.bits)
        self.pack_sources: set[str] = set()
        self.more_leaves: dict[str, str] = {}
        self.uses_products = self.uses_pairs = False
        self.scratch_bytes = 0

    def _accumulate_element(self) -> str:
        """The one element type of the kernel's products; without products, that of what its loops carry, or float."""
        found: set[str] = set()
        carried: set[str] = set()
        for op in self.kernel.walk():
            if isinstance(op, tile.DotOp):
                found.add(element_type(element_of(op.result)))
            elif isinstance(op, tile.ForOp):
                carried |= {element_type(element_of(result)) for result in op.results}
        if len(found) > 1 or not found <= {"float", "double"}:
            raise LoweringError(f"the products of a kernel must all be in f32 or all in f64, not {sorted(found)}")
        if not found and carried == {"double"}:
            return "double"
        return found.pop() if found else "float"

    def row_dimension(self) -> tuple[int | None, int]:
        """The grid dimension that a task's rows run along, the one an `Rx1` iota counts from, and how many rows a task has."""
        block = self.grid.body.block
        for op in block.ops:
            if isinstance(op, tile.IotaOp) and op.offset in block.args:
                rows, _ = tile.shape_of(op.result)
                d = block.args.index(op.offset)
                if rows > 1 and self.grid.step_values[d] == rows:
                    return d, rows
        return None, 1

    def reserve(self, bytes_: int) -> int:
        """Room in each thread's scratch, 64-byte aligned: its offset."""
        offset = self.scratch_bytes
        self.scratch_bytes += -(-bytes_ // 64) * 64
        return offset

    # -- the functions ------------------------------------------------------------------------------------------------
    def emit(self) -> Emitted:

        work = Function(f"{self.name}.work", [("ptr", "context")])
        region = RegionEmitter(work, self.width, self.target)
        with work.at_entry():
            args, shared, base = (
                work.load("ptr", work.pointer("%context", word, "i64"), 8)
                for word in (CONTEXT_ARGS, CONTEXT_SHARED, CONTEXT_SCRATCH)
            )
            stride, tasks = (
                work.load("i64", work.pointer("%context", word, "i64"), 8) for word in (CONTEXT_STRIDE, CONTEXT_TASKS)
            )
        load_arguments(region, args, self.kernel.body.block)
        self.emit_kernel_scalars(region)
        with work.at_entry():
            slot = work.emit(f"atomicrmw add ptr {work.pointer('%context', CONTEXT_SLOT, 'i64')}, i64 1 monotonic, align 8")
            scratch = work.pointer(base, work.emit(f"mul i64 {slot}, {stride}"))
        body = BodyEmitter(self, region, scratch, shared)
        body.staging.layout(region, body.shared_sums.layout())
        pieces = body.shared_sums.pieces()
        with work.at_entry():
            real = work.sub(tasks, pieces)
        counter = work.pointer("%context", CONTEXT_TASK, "i64")
        head, task_block, done = work.new_block("next"), work.new_block("task"), work.new_block("done")
        work.branch(head)
        work.place(head)
        taken = work.emit(f"atomicrmw add ptr {counter}, i64 1 monotonic, align 8")
        work.branch_if(work.emit(f"icmp slt i64 {taken}, {tasks}"), task_block, done)
        work.place(task_block)
        if pieces != "0":
            grid_task, merge = work.new_block("grid"), work.new_block("merge")
            work.branch_if(work.emit(f"icmp slt i64 {taken}, {real}"), grid_task, merge)
            work.place(merge)
            body.shared_sums.merge(work.sub(taken, real), real)
            work.branch(head)
            work.place(grid_task)
        body.shared_sums.begin(*self._coordinates(region, taken, real), self.task_order())
        body.emit_task()
        body.shared_sums.end_task()
        work.branch(head)
        work.place(done)
        plan, wanted = self._plan()
        functions = [work.finish(), plan]
        definitions = region.functions
        for function in self.module.body.block.ops:
            if isinstance(function, FuncOp) and function.sym_name.data in body.called:
                definitions[function.sym_name.data] = emit_function(function, region, self.target)
        declarations = region.declarations | body.declarations | wanted
        return Emitted(functions, definitions, declarations, self._leaves(), self.scratch_bytes)

    def _leaves(self) -> dict[str, str]:
        """The leaf routines this kernel calls: all there are for its element types, so that other kernels share the object; and
        those that read operands in place."""
        if not self.uses_products and not self.pack_sources:
            return {}
        sources = sorted(self.pack_sources) or [self.element]
        if len(sources) > 1:
            raise LoweringError(f"the right-hand operands of a kernel must be of one element type, not {sources}")
        text = leaves.define(sources[0], self.element, self.target)[1]
        text = leaves.join([text, leaves.pairs(self.target)]) if self.uses_pairs else text
        return {"panels": text, **self.more_leaves}

    def emit_kernel_scalars(self, region: RegionEmitter) -> None:
        """Scalar operations outside the grid."""
        for op in self.kernel.body.block.ops:
            if isinstance(op, tile.GridOp | tile.YieldOp):
                continue
            with region.f.at_entry():
                region.emit(op)
            for result in op.results:
                region.depths[result] = KERNEL

    def task_order(self) -> list[int]:
        """The grid's dimensions, from the one that changes least as tasks are taken. Those in which tasks follow each other
        round by round come first, so that such tasks are far apart."""
        owners = {
            owner.value.data
            for ops in accumulations(self.grid).values()
            if ordered_rounds(ops)[0] is not None
            for op in ops
            for owner in op.owners
        }
        first = [d for d in range(len(self.grid.bounds)) if d in owners]
        if len(first) == len(self.grid.bounds):
            first = []
        return first + [d for d in range(len(self.grid.bounds)) if d not in first]

    def _coordinates(self, region: RegionEmitter, taken: str, tasks: str) -> tuple[list[str], list[str]]:
        """From a task's number to its place in the grid: in each dimension, how many steps in, and how many there are."""
        f = region.f
        if self.grid.descending is not None:
            taken = f.sub(f.sub(tasks, 1), taken)
        steps = self.grid.step_values
        counts = [self.count(region, n) for n in range(len(steps))]
        places = [""] * len(steps)
        first, *inner = self.task_order()
        for n in reversed(inner):
            places[n] = f.emit(f"urem i64 {taken}, {counts[n]}")
            taken = f.emit(f"udiv i64 {taken}, {counts[n]}")
        places[first] = taken
        for n, place in enumerate(places):
            argument = self.grid.body.block.args[n]
            position = place if steps[n] == 1 else f.mul(place, steps[n])
            region.values[argument] = Value(argument.type, position)
            region.depths[argument] = BLOCK
        return places, counts

    def count(self, region: RegionEmitter, n: int) -> str:
        """How many steps the grid takes in dimension n."""
        step = self.grid.step_values[n]
        with region.f.at_entry():
            bound = region.scalar(self.grid.bounds[n])
            return region.f.ceil_div(bound, step)

    def _plan(self) -> tuple[str, set[str]]:
        """The plan's text, and what it needs declared."""
        f = Function(f"{self.name}.plan", [("ptr", "args"), ("ptr", "result")])
        region = RegionEmitter(f, self.width, self.target)
        load_arguments(region, "%args", self.kernel.body.block)
        self.emit_kernel_scalars(region)
        sums = SharedSums(self, region)
        zero_bytes, all_bytes = Staging(self, region).layout(region, sums.layout())
        tasks = points = "1"
        for n in range(len(self.grid.bounds)):
            tasks = f.mul(tasks, self.count(region, n))
            points = f.mul(points, region.scalar(self.grid.bounds[n]))
        flops = "0"
        for op in self.kernel.walk():
            if isinstance(op, tile.DotOp):
                rows = self._rows_worth(region, op)
                flops = f.add(flops, f.mul(f.mul(points, rows), self._row_flops(region, op)))
        if flops == "0":
            flops = self._flops_of_loads(region)
        tasks = f.add(tasks, sums.pieces())
        for n, value in enumerate((tasks, all_bytes, zero_bytes, flops)):
            f.store("i64", value, f.pointer("%result", n, "i64"), 8)
        return f.finish(), region.declarations

    def _flops_of_loads(self, region: RegionEmitter) -> str:
        """What a kernel without products has to do: it reads, and a little with what was read."""
        f, (d, _) = region.f, self.row_dimension()
        rows, total = "1", "0"
        for n, bound in enumerate(self.grid.bounds):
            rows = f.mul(rows, region.scalar(bound) if n == d else self.count(region, n))
        for op in self.kernel.walk():
            if isinstance(op, tile.LoadOp):
                tall, columns = tile.shape_of(op.result)
                loop, elements = loop_of(op), f.mul(rows, columns * (1 if d is not None else tall))
                if isinstance(loop, tile.ForOp) and loop.upper in region.values:
                    elements = f.mul(elements, f.ceil_div(region.scalar(loop.upper), loop.step.value.data))
                total = f.add(total, f.mul(elements, FLOPS_OF_A_LOAD))
        return total

    def _rows_worth(self, region: RegionEmitter, dot: tile.DotOp) -> str:
        """How many rows' arithmetic takes as long as one row of this product. An operand that is not staged is read once for
        all rows, and memory takes its time however few they are."""
        d, _ = self.row_dimension()
        if isinstance(dot.rhs.owner, tile.StageOp) or d is None:
            return "1"
        rows = region.intrinsic("umax", "i64", False, [region.scalar(self.grid.bounds[d]), "1"])
        return region.intrinsic("umax", "i64", False, [region.f.emit(f"udiv i64 {ROWS_WHILE_READING}, {rows}"), "1"])

    def _row_flops(self, region: RegionEmitter, dot: tile.DotOp) -> str:
        """2 · columns · depth for one row of the task, times the rounds of the loop around it."""
        result_rows, columns = tile.shape_of(dot.result)
        rows, inner = tile.shape_of(dot.lhs)
        depth = rows if dot.transpose_lhs is not None else inner
        loop = loop_of(dot)
        work = -(-2 * result_rows * columns * depth // self.row_dimension()[1])
        if isinstance(loop, tile.ForOp):
            step = loop.step.value.data
            if loop.upper in region.values:
                return region.f.emit(f"udiv i64 {region.f.mul(region.scalar(loop.upper), work)}, {step}")
            if loop.lower in self.grid.body.block.args:  # a part of what a dimension of the grid counts already
                return str(-(-work // step))
        return str(work)
