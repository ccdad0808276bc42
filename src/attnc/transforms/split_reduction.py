"""Few queries, many keys: the loop over keys is parted into chunks, each a task of its own, and their results are merged.

Before, where a tiled attention has `attnc.chunk`:

    tile.kernel @attention(%query, %key, …, %out, %group) {
      tile.grid (%b, %hg, %m0) to (…) step (1, 1, 24) {
        %max, %sum, %acc = tile.for %k0 = %c0 to %keys step 128 carry(…) { … {attnc.chunk = 1024} }
        %r = tile.map … ; tile.store %r, %out[%b, %h, %q, %n]

After, two kernels with one list of arguments, to be run one after the other:

    tile.kernel @attention_split(%query, %key, …, %out, %group, %partial_acc, %partial_max, %partial_sum) {
      tile.grid (%b, %hg, %m0, %s0) to (…, %keys) step (1, 1, 24, 1024) {
        %chunk_end = min(%s0 + 1024, %keys), %chunk = %s0 / 1024
        %max, %sum, %acc = tile.for %k0 = %s0 to %chunk_end step 128 carry(…) { … {attnc.staging = "none", …} }
        tile.store %acc, %partial_acc[%b, %h, %q, %chunk, %n]
        tile.store %max, %partial_max[%b, %h, %q, %chunk] ; tile.store %sum, %partial_sum[…]

    tile.kernel @attention_merge(… the same) {
      tile.grid (%b, %hg, %m0) to (…) step (1, 1, 24) {
        %max, %sum, %acc = tile.for %chunk = %c0 to %chunks step 1 carry(…) {
          … load the partial results; max_new = max(%max_old, their maximum); both sums and both accumulators times
            exp2((own maximum - max_new) · log2 e), added
        }
        %r = tile.map … ; tile.store %r, %out[%b, %h, %q, %n]

Chunks are merged in their order, whoever computed them: the same bits for any number of threads. Maxima are in natural units.
`attnc.scratch` gives the shapes of the partial results, which the launcher allocates. Keys and values are read once, so
they are not staged. `attnc.max_beside_sum` says that nobody reads a row's maximum without its sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

from xdsl.dialects.builtin import DYNAMIC_INDEX, ArrayAttr, IntegerAttr, ModuleOp, StringAttr, TensorType, UnitAttr
from xdsl.ir import Block, BlockArgument, Operation, Region, SSAValue

from attnc.analysis.buffers import memref_of
from attnc.dialects import tile
from attnc.dialects.building import INDEX, Builder, erase_dead
from attnc.dialects.linalg_ext import OnlineAttentionOp
from attnc.errors import LoweringError
from attnc.target import Target
from attnc.transforms.tile_attention import CHUNK

NAME = "split-reduction"
STAGING = "attnc.staging"
MAX_BESIDE_SUM = "attnc.max_beside_sum"
PARTS = ("partial_acc", "partial_max", "partial_sum")


def run(module: ModuleOp, target: Target) -> None:
    """Parts every kernel with a tiled attention that has `attnc.chunk`.

    Raises:
        LoweringError: its loop is none over (max, sum, acc), or its results are not stored after it.
    """
    for kernel in [op for op in module.ops if isinstance(op, tile.KernelOp)]:
        chunks = [op.attributes[CHUNK] for op in kernel.walk() if isinstance(op, OnlineAttentionOp) and CHUNK in op.attributes]
        if chunks:
            size = cast(IntegerAttr, chunks[0]).value.data
            for half in (_split(kernel.clone(), size), _merge(kernel.clone(), size)):
                module.body.block.insert_op_before(half, kernel)
            module.body.block.erase_op(kernel)


class _Half:
    """A copy of the kernel on its way to be one of the two: what it consists of, and its new arguments."""

    def __init__(self, kernel: tile.KernelOp, name: str, chunk: int):
        self.kernel, self.chunk = kernel, chunk
        self.block = kernel.body.block
        self.grid = next(op for op in self.block.ops if isinstance(op, tile.GridOp))
        loops = [op for op in self.grid.body.block.ops if isinstance(op, tile.ForOp)]
        if len(loops) != 1 or len(loops[0].results) != 3:
            raise LoweringError(f"@{kernel.sym_name.data}: split-reduction needs one loop that carries max, sum and acc")
        self.loop = loops[0]
        self.max, self.sum, self.acc = self.loop.results
        self.roles = [role.data for role in kernel.roles or ()]
        self.out = self._store_of_out()
        kernel.attributes["sym_name"] = StringAttr(f"{kernel.sym_name.data}_{name}")
        self.parts = self._add_parts()

    def _store_of_out(self) -> tile.StoreOp:
        for op in self.grid.body.block.ops:
            if isinstance(op, tile.StoreOp) and isinstance(op.buffer, BlockArgument) and self.roles[op.buffer.index] == "out":
                return op
        raise LoweringError(f"@{self.kernel.sym_name.data}: split-reduction needs the store of the attention's output")

    def _add_parts(self) -> list[SSAValue]:
        """New arguments for the partial results, with the rule of their shapes."""
        element = cast(TensorType, self.acc.type).element_type
        columns = tile.shape_of(self.acc)[1]
        shape = ["query.0", "query.1", "query.2", f"key.2/{self.chunk}"]
        scratch = [""] * len(self.block.args)
        found: list[SSAValue] = []
        for role in PARTS:
            wide = role == "partial_acc"
            dims = [DYNAMIC_INDEX] * 4 + [columns] * wide
            type_ = memref_of(TensorType(element, dims), "x".join(["?"] * (len(dims) - 1) + ["1"]))
            argument = self.block.insert_arg(type_, len(self.block.args))
            argument.name_hint = role
            scratch.append(" ".join([*shape, *[str(columns)] * wide]))
            found.append(argument)
        self.kernel.attributes["roles"] = ArrayAttr([StringAttr(role) for role in (*self.roles, *PARTS)])
        names = self.kernel.attributes.get("attnc.names")
        if isinstance(names, ArrayAttr):
            self.kernel.attributes["attnc.names"] = ArrayAttr([*names.data, *(StringAttr(role) for role in PARTS)])
        self.kernel.attributes["attnc.scratch"] = ArrayAttr([StringAttr(rule) for rule in scratch])
        return found

    def places(self, chunk: SSAValue) -> tuple[list[SSAValue], list[SSAValue]]:
        """Where the present rows' partial results lie: indices of the accumulator, and of maximum and sum."""
        *row, column = self.out.indices
        return [*row, chunk, column], [*row, chunk]

    def finish(self) -> tile.KernelOp:
        """Without what neither grid nor prelude needs any more."""
        erase_dead(self.grid.body.block)
        erase_dead(self.block)
        return self.kernel


def _split(kernel: tile.KernelOp, chunk: int) -> tile.KernelOp:
    """The kernel that reads the keys: a task for each chunk of them."""
    half = _Half(kernel, "split", chunk)
    grid, loop, body = half.grid, half.loop, half.grid.body.block
    for op in loop.walk():
        if isinstance(op, OnlineAttentionOp):
            del op.attributes[CHUNK]
            op.attributes[STAGING] = StringAttr("none")
            if tile.read_beside(half.max, half.sum):  # of the merged ones it is true, too, then
                op.attributes[MAX_BESIDE_SUM] = UnitAttr()
    start = body.insert_arg(INDEX, len(body.args))
    start.name_hint = "s0"
    keys = loop.upper

    before = Block()
    build = Builder(before)
    size = build.constant(chunk)
    end = build.binary("minui", build.binary("addi", start, size, "next_chunk"), keys, "chunk_end")
    number = build.binary("divui", start, size, "chunk")
    _move(before, body, loop)
    loop.operands[0], loop.operands[1] = start, end

    wide, narrow = half.places(number)
    _erase_after(loop)
    for value, buffer, indices in zip((half.acc, half.max, half.sum), half.parts, (wide, narrow, narrow), strict=True):
        body.add_op(tile.StoreOp(value, buffer, indices))
    body.add_op(tile.YieldOp.create())

    region = grid.detach_region(grid.body)
    new = tile.GridOp([*grid.bounds, keys], [*grid.step_values, chunk], region, grid.descending is not None)
    half.block.insert_op_before(new, grid)
    half.block.erase_op(grid)
    half.grid = new
    return half.finish()


def _merge(kernel: tile.KernelOp, chunk: int) -> tile.KernelOp:
    """The kernel that puts the chunks' results together."""
    half = _Half(kernel, "merge", chunk)
    loop, body = half.loop, half.grid.body.block
    score = cast(TensorType, half.max.type).element_type

    prelude = Block()
    build = Builder(prelude)
    last = build.binary("addi", loop.upper, build.constant(chunk - 1), "last_chunk")
    chunks = build.binary("divui", last, build.constant(chunk), "chunks")
    numbers = {
        "zero": build.constant(0.0, score, "zero"),
        "minus_infinity": build.constant(-math.inf, score, "minus_infinity"),
        "log2e": build.constant(math.log2(math.e), score, "log2e"),
    }
    first = build.constant(0)
    _move(prelude, half.block, half.grid)

    block = Block(arg_types=[INDEX, *(result.type for result in loop.results)])
    for argument, hint in zip(block.args, ("chunk", "max_old", "sum_old", "acc_old"), strict=True):
        argument.name_hint = hint
    _merge_body(Builder(block), half, numbers)
    new = tile.ForOp(first, chunks, 1, list(loop.inits), Region(block))
    body.insert_op_before(new, loop)
    for old, result, hint in zip(loop.results, new.results, ("max", "sum", "acc"), strict=True):
        result.name_hint = hint
        old.replace_all_uses_with(result)
    body.erase_op(loop)
    return half.finish()


def _merge_body(build: Builder, half: _Half, numbers: dict[str, SSAValue]) -> None:
    """One chunk's results onto what is carried."""
    number, max_old, sum_old, acc_old = build.block.args
    row, wide = cast(TensorType, half.max.type), cast(TensorType, half.acc.type)
    wide_place, row_place = half.places(number)
    acc, max_, sum_ = (
        build.add(tile.LoadOp(buffer, indices, type_), hint)
        for buffer, indices, type_, hint in zip(
            half.parts, (wide_place, row_place, row_place), (wide, row, row), ("acc", "max", "sum"), strict=True
        )
    )
    zero, minus_infinity, log2e = (numbers[name] for name in ("zero", "minus_infinity", "log2e"))
    max_new = _map(build, row, "max_new", {"a": max_old, "c": max_}, lambda m, a, c: m.binary("maximumf", a, c, "m"))

    def anchor_of(m: Builder, value: SSAValue) -> SSAValue:
        return m.select(m.compare_floats("oeq", value, minus_infinity, "dead"), zero, value, "a")

    def power(m: Builder, value: SSAValue, base: SSAValue) -> SSAValue:
        exponent = m.binary("mulf", m.binary("subf", value, base, "difference"), log2e, "exponent")
        result = m.unary_math("exp2", exponent, "factor")
        cast(Operation, result.owner).attributes[tile.NONPOSITIVE] = UnitAttr()
        return result

    def total(m: Builder, old: SSAValue, keep: SSAValue, new: SSAValue, take: SSAValue) -> SSAValue:
        return m.binary("addf", m.binary("mulf", old, keep, "kept"), m.binary("mulf", new, take, "taken"), "total")

    anchor = _map(build, row, "anchor", {"m": max_new}, anchor_of)
    keep = _map(build, row, "keep", {"a": max_old, "m": anchor}, power)
    take = _map(build, row, "take", {"a": max_, "m": anchor}, power)
    sum_new = _map(build, row, "sum_new", {"l": sum_old, "k": keep, "c": sum_, "t": take}, total)
    acc_new = _map(build, wide, "acc_new", {"o": acc_old, "k": keep, "c": acc, "t": take}, total)
    build.insert(tile.YieldOp([max_new, sum_new, acc_new]))


def _map(build: Builder, type_: TensorType, hint: str, inputs: dict[str, SSAValue], body: Callable[..., SSAValue]) -> SSAValue:
    """A `tile.map` of `inputs`, whose keys name the elements that `body` gets."""
    block = Block(arg_types=[cast(TensorType, value.type).element_type for value in inputs.values()])
    for argument, name in zip(block.args, inputs, strict=True):
        argument.name_hint = name
    inner = Builder(block)
    inner.insert(tile.YieldOp.create(operands=[body(inner, *block.args)]))
    return build.add(tile.MapOp(list(inputs.values()), type_, Region(block)), hint)


def _move(source: Block, target: Block, before: Operation) -> None:
    for op in list(source.ops):
        op.detach()
        target.insert_op_before(op, before)


def _erase_after(op: Operation) -> None:
    """Erases all operations of the block that follow."""
    following: list[Operation] = []
    while op.next_op is not None:
        op = op.next_op
        following.append(op)
    for later in reversed(following):
        later.detach()
        later.erase(safe_erase=False)
