"""From a whole program and the sizes and strides of its inputs to a list of launches: made once for each layout, then replayed.

A program is JSON (`codegen/host.py` writes it): steps on numbered values. Tensors are views of buffers: transposes, reshapes,
broadcasts and slices only change sizes and strides here. Planning takes three passes over the steps:

1. the sizes of every value;
2. where each new tensor lies: straight in the result that it becomes by way of views, if it does, so that a permuted or
   reshaped output is written where it belongs; else in temporary memory, laid out as its first reshaping user wants it;
3. the launches, each with its words: what is known now, and which words are addresses or numbers of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

from attnc.errors import CaptureIndexError
from attnc.runtime.graph_sizes import Sizes, Step

ITEM_BYTES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "i64": 8, "index": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "i1": 1}
ALIGNMENT = 64


@dataclass(eq=False)
class Buffer:
    """Memory: an "argument", a "result", a "constant" (by number) or "temporary" (first and last launch that needs it)."""

    kind: str
    number: int = 0
    bytes: int = 0
    first: int = 0
    last: int = -1
    offset: int = 0


@dataclass(frozen=True)
class View:
    """A tensor: `offset` (elements) into a buffer, sizes, strides (elements)."""

    buffer: Buffer
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@dataclass
class Launch:
    """A kernel to be run on `words`; `addresses` are (place among them, buffer, bytes into it), `numbers` (place, value)."""

    kernel: Any
    words: list[int | float]
    addresses: list[tuple[int, Buffer, int]]
    numbers: list[tuple[int, int]]
    step: Step = field(default_factory=dict)


@dataclass
class Compute:
    """A number that is computed in each call: operation, its operands (value numbers) and their types."""

    out: int
    step: Step


@dataclass
class Read:
    """A number that is read from a tensor in each call."""

    out: int
    buffer: Buffer
    bytes: int
    dtype: str


@dataclass
class Plan:
    """What a call on inputs of one layout does. `results`: sizes and dtype of each; `temporary_bytes` of memory are needed."""

    actions: list[Launch | Compute | Read]
    results: list[tuple[tuple[int, ...], str]]
    temporary_bytes: int
    known: dict[int, int | float]


def dense_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides."""
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def merged(sizes: Sequence[int], strides: Sequence[int], groups: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """The strides of merged dimensions, or None where they do not follow each other in memory."""
    found = []
    for group in groups:
        dims = [d for d in group if sizes[d] != 1]
        for outer, inner in pairwise(dims):
            if strides[outer] != strides[inner] * sizes[inner]:
                return None
        found.append(strides[dims[-1]] if dims else 1)
    return tuple(found)


def split(sizes: Sequence[int], strides: Sequence[int], groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The strides of dimensions of `sizes` that each of `strides` is split into."""
    found = [0] * len(sizes)
    for stride, group in zip(strides, groups, strict=True):
        for d in reversed(group):
            found[d] = stride
            stride *= sizes[d]
    return tuple(found)


def _overlap(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> bool:
    return all(x < y + n and y < x + m for (x, m), (y, n) in zip(a, b, strict=True))


class Planner(Sizes):
    """Plans one layout. `inputs` are (sizes, strides) of each tensor argument, numbers or None for scalars; `kernel(n,
    variant)` finds the compiled kernel."""

    def __init__(self, program: dict[str, Any], inputs: Sequence[Any], find: Callable[[dict[str, Any], Any], Any]):
        super().__init__(program)
        self.find = find
        self.views: dict[int, View] = {}
        self.placed: dict[int, View] = {}
        self.actions: list[Launch | Compute | Read] = []
        self.temporaries: list[Buffer] = []
        self.kept: set[int] = set()
        self.producers: dict[int, Step] = {}
        self.users: dict[int, list[Step]] = {}
        for step in self.steps:
            for out in step["outs"]:
                self.producers[out] = step
            for value in step.get("ins", ()):
                self.users.setdefault(value, []).append(step)
        for number, (argument, given) in enumerate(zip(program["arguments"], inputs, strict=True)):
            if argument["kind"] != "buffer":
                if given is not None:
                    self.known[number] = given
                continue
            self.sizes[number], strides = tuple(given[0]), tuple(given[1])
            self.dtypes[number] = argument["dtype"]
            self.views[number] = View(Buffer("argument", number), 0, self.sizes[number], strides, argument["dtype"])

    def plan(self) -> Plan:
        for step in self.steps:
            self.infer(step)
        self._place_results()
        for step in self.steps:
            self._act(step)
        results = self._finish_results()
        return Plan(self.actions, results, self._lay_out(), self.known)

    # -- where tensors lie --------------------------------------------------------------------------------------------

    def _place_results(self) -> None:
        """New tensors that are results by way of views lie in them; others that are reshaped lie as that wants."""
        for number, value in enumerate(self.program["results"]):
            self.kept.add(value)
            sizes = self.sizes.get(value)
            if sizes is None or value in self.views:
                continue
            buffer = Buffer("result", number, prod(sizes) * ITEM_BYTES[self.dtypes[value]])
            self._place(value, View(buffer, 0, sizes, dense_strides(sizes), self.dtypes[value]))
        for step in self.steps:
            if step["op"] in ("call", "empty"):
                for out in step["outs"]:
                    if out not in self.placed:
                        self._place_for_reshape(out)

    def _place(self, value: int, view: View, collected: bool | None = None) -> bool:
        """Lets the new tensor that `value` is a view of lie where `value` then is `view`; whether that can be. `collected` is
        what `_is_collected` says of the insertions that follow."""
        step = self.producers.get(value)
        if step is None or value in self.placed:
            return False
        op = step["op"]
        if op == "call" or op == "empty":
            self.placed[value] = view
            return True
        if op not in ("transpose", "expand", "collapse", "cast", "insert"):
            return False
        source = step["ins"][1 if op == "insert" else 0]
        before = self._undone(step, view, self.sizes[source])
        if op == "insert" and collected is None:
            collected = self._is_collected(step)
        if before is None or not self._place(source, before, collected if op == "insert" else None):
            return False
        if op == "insert" and collected:
            self._place(step["ins"][0], self._sliced(step, view))
        return True

    def _is_collected(self, step: Step) -> bool:
        """Whether an insertion is one of several into an empty tensor, none over another: then each source may be computed
        where it belongs, in any order."""
        boxes = []
        while step["op"] == "insert":
            offsets, sizes = self.listed(step["offsets"]), self.listed(step["sizes"])
            if any(stride != 1 for stride in self.listed(step["strides"])):
                return False
            boxes.append(list(zip(offsets, sizes, strict=True)))
            if step["ins"][1] not in self.producers:
                return False
            step = self.producers[step["ins"][1]]
        if step["op"] != "empty":
            return False
        return not any(_overlap(a, b) for n, a in enumerate(boxes) for b in boxes[:n])

    @staticmethod
    def _undone(step: Step, view: View, sizes: tuple[int, ...]) -> View | None:
        """The layout of a view's source that makes the view lie as `view`."""
        strides: tuple[int, ...] | None
        if step["op"] == "transpose":
            moved = [0] * len(sizes)
            for d, p in enumerate(step["permutation"]):
                moved[p] = view.strides[d]
            strides = tuple(moved)
        elif step["op"] == "collapse":
            strides = split(sizes, view.strides, step["groups"])
        elif step["op"] == "expand":
            strides = merged(view.sizes, view.strides, step["groups"])
        else:
            strides = view.strides
        return None if strides is None else View(view.buffer, view.offset, sizes, strides, view.dtype)

    def _place_for_reshape(self, value: int) -> None:
        chain = self._reshaped(value)
        if chain is None:
            return
        sizes, dtype = self.sizes[chain], self.dtypes[value]
        buffer = self._temporary(prod(sizes) * ITEM_BYTES[dtype])
        self._place(chain, View(buffer, 0, sizes, dense_strides(sizes), dtype))

    def _reshaped(self, value: int, moved: bool = False) -> int | None:
        """What a new tensor is, in the end, where dimensions that were moved are merged."""
        for step in self.users.get(value, ()):
            if step["op"] not in ("transpose", "expand", "collapse", "cast") or step["ins"][0] != value:
                continue
            if step["op"] == "collapse" and moved:
                return step["outs"][0]
            found = self._reshaped(step["outs"][0], moved or step["op"] == "transpose")
            if found is not None:
                return found
        return None

    def _temporary(self, bytes_: int) -> Buffer:
        buffer = Buffer("temporary", bytes=bytes_, first=len(self.actions))
        self.temporaries.append(buffer)
        return buffer

    def _new(self, value: int) -> View:
        """The view of a new tensor: where it was placed, else dense in temporary memory."""
        view = self.placed.get(value)
        if view is None:
            sizes, dtype = self.sizes[value], self.dtypes[value]
            buffer = self._temporary(prod(sizes) * ITEM_BYTES[dtype])
            view = View(buffer, 0, sizes, dense_strides(sizes), dtype)
        if view.buffer.kind == "temporary" and view.buffer.last < 0:
            view.buffer.first = len(self.actions)
        return view

    def _use(self, view: View) -> View:
        view.buffer.last = max(view.buffer.last, len(self.actions))
        return view

    # -- launches -----------------------------------------------------------------------------------------------------

    def _act(self, step: Step) -> None:
        op, outs = step["op"], step["outs"]
        if op == "size" or (op == "number" and outs[0] in self.known):
            return
        if op == "number":
            self.actions.append(Compute(outs[0], step))
        elif op == "extract":
            view = self.views[step["ins"][0]]
            indices = [self.size(i) for i in step["indices"]]
            for dim, (index, size) in enumerate(zip(indices, view.sizes, strict=True)):
                if not 0 <= index < size:
                    raise CaptureIndexError(f"index {index} is out of range for dim {dim} with size {size}")
            at = sum(index * stride for index, stride in zip(indices, view.strides, strict=True))
            self._use(view)
            item = ITEM_BYTES[view.dtype]
            self.actions.append(Read(outs[0], view.buffer, (view.offset + at) * item, view.dtype))
        elif op == "call":
            self._call(step)
        elif op == "insert":
            self._insert(step)
        elif op == "empty":
            if outs[0] in self.placed or self.users.get(outs[0]):
                self.views[outs[0]] = self._new(outs[0])
        elif op == "constant":
            buffer = Buffer("constant", step["blob"])
            sizes = self.sizes[outs[0]]
            strides = (0,) * len(sizes) if step["splat"] else dense_strides(sizes)
            self.views[outs[0]] = View(buffer, 0, sizes, strides, step["dtypes"][0])
        else:
            self.views[outs[0]] = self._viewed(step, self.views[step["ins"][0]], self.sizes[outs[0]])

    def _viewed(self, step: Step, view: View, sizes: tuple[int, ...]) -> View:
        op = step["op"]
        if op == "transpose":
            return View(view.buffer, view.offset, sizes, tuple(view.strides[p] for p in step["permutation"]), view.dtype)
        if op == "cast":
            return view
        if op == "slice":
            return self._sliced(step, view)
        if op == "broadcast":
            kept = iter(view.strides)
            strides = tuple(0 if d in step["dimensions"] else next(kept) for d in range(len(sizes)))
            return View(view.buffer, view.offset, sizes, strides, view.dtype)
        groups = step["groups"]
        if op == "expand":
            strides = split(sizes, view.strides, groups) if view.sizes else (1,) * len(sizes)
            return View(view.buffer, view.offset, sizes, strides, view.dtype)
        strides = merged(view.sizes, view.strides, groups)
        if strides is None or prod(view.sizes) == 0:
            copy = self.dense_copy(view)
            return View(copy.buffer, 0, sizes, dense_strides(sizes), view.dtype)
        return View(view.buffer, view.offset, sizes, strides, view.dtype)

    def _sliced(self, step: Step, view: View) -> View:
        offsets, strides = self.listed(step["offsets"]), self.listed(step["strides"])
        sizes = self.listed(step["sizes"])
        offset = view.offset + sum(o * s for o, s in zip(offsets, view.strides, strict=True))
        kept = [d for d in range(len(sizes)) if d not in step["dropped"]]
        moved = tuple(view.strides[d] * strides[d] for d in kept)
        return View(view.buffer, offset, tuple(sizes[d] for d in kept), moved, view.dtype)

    def dense_copy(self, view: View) -> View:
        """A row-major copy of a view."""
        buffer = self._temporary(prod(view.sizes) * ITEM_BYTES[view.dtype])
        copy = View(buffer, 0, view.sizes, dense_strides(view.sizes), view.dtype)
        self.copy(view, copy)
        return copy

    def copy(self, source: View, target: View) -> None:
        """Launches a copy of one view into another of the same sizes."""
        if source == target or prod(source.sizes) == 0:
            return
        from attnc.runtime.graph_loops import copy_kernel, plan_loop

        plan_loop(self, copy_kernel(source.dtype, len(source.sizes)), [source], [target], {"op": "copy"})

    def launch(self, kernel: Any, words: Sequence[int | float | View | str], touched: Sequence[View], step: Step) -> None:
        """Adds a launch. A view among `words` is its address; "%n" is number n, known now or in the call."""
        values: list[int | float] = []
        addresses: list[tuple[int, Buffer, int]] = []
        numbers: list[tuple[int, int]] = []
        for word in words:
            if isinstance(word, View):
                addresses.append((len(values), word.buffer, word.offset * ITEM_BYTES[word.dtype]))
                values.append(0)
            elif isinstance(word, str):
                number = int(word[1:])
                if number in self.known:
                    values.append(self.known[number])
                else:
                    numbers.append((len(values), number))
                    values.append(0)
            else:
                values.append(word)
        for view in touched:
            self._use(view)
        self.actions.append(Launch(kernel, values, addresses, numbers, step))

    def _call(self, step: Step) -> None:
        from attnc.runtime.graph_attention import plan_attention
        from attnc.runtime.graph_loops import plan_loop

        kernel = self.program["kernels"][step["kernel"]]
        targets = [self._new(out) for out in step["outs"]]
        for out, view in zip(step["outs"], targets, strict=True):
            self.views[out] = view
        if kernel["kind"] == "attention":
            plan_attention(self, kernel, step, targets)
        else:
            operands = [self.views.get(value, f"%{value}") for value in step["ins"]]
            plan_loop(self, kernel, operands, targets, step)

    def _insert(self, step: Step) -> None:
        """A copy of the destination, unless nobody else needs it as it was, with a slice overwritten."""
        source, destination = step["ins"]
        out = step["outs"][0]
        view = self.views[destination]
        if not self._is_ours(destination):
            target = self._new(out)
            if self.producers.get(destination, {}).get("op") != "empty":
                self.copy(view, target)
            view = target
        self.copy(self.views[source], self._sliced(step, view))
        self.views[out] = view

    def _is_ours(self, value: int) -> bool:
        """Whether a tensor is new, and nobody but the step at hand needs it as it is."""
        while len(self.users.get(value, ())) <= 1 and value not in self.kept and value in self.producers:
            step = self.producers[value]
            if step["op"] in ("empty", "insert", "call"):
                return True
            if step["op"] != "cast":
                return False
            value = step["ins"][0]
        return False

    def _finish_results(self) -> list[tuple[tuple[int, ...], str]]:
        """Copies what is not yet in its result."""
        found: list[tuple[tuple[int, ...], str]] = []
        for number, value in enumerate(self.program["results"]):
            if value not in self.views:
                found.append(((), "i64"))  # a number: its place is not used
                continue
            view = self.views[value]
            dtype = view.dtype
            if (view.buffer.kind, view.buffer.number) != ("result", number):
                buffer = Buffer("result", number, prod(view.sizes) * ITEM_BYTES[dtype])
                self.copy(view, View(buffer, 0, view.sizes, dense_strides(view.sizes), dtype))
            found.append((view.sizes, dtype))
        return found

    def _lay_out(self) -> int:
        """Gives temporary buffers their places: memory of those that are no longer needed is used again. Returns the bytes."""
        end = 0
        live: list[Buffer] = []
        for buffer in sorted((b for b in self.temporaries if b.last >= 0), key=lambda b: b.first):
            live = [other for other in live if other.last >= buffer.first]
            size = -(-buffer.bytes // ALIGNMENT) * ALIGNMENT
            place = 0
            for other in sorted(live, key=lambda b: b.offset):
                if place + size <= other.offset:
                    break
                place = max(place, other.offset + -(-other.bytes // ALIGNMENT) * ALIGNMENT)
            buffer.offset = place
            live.append(buffer)
            end = max(end, place + size)
        return end
