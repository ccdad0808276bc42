"""The sizes of every value of a program, from those of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, TypeAlias

from attnc.errors import LoweringError, ShapeError
from attnc.runtime.graph_numbers import compute

Step: TypeAlias = "dict[str, Any]"
_SIZES = "pass inputs whose sizes fit together as the program says"


class Sizes:
    """Finds sizes step by step; `sizes` and `dtypes` are of tensors, `known` are numbers."""

    def __init__(self, program: dict[str, Any]):
        self.program = program
        self.steps: list[Step] = program["steps"]
        self.sizes: dict[int, tuple[int, ...]] = {}
        self.dtypes: dict[int, str] = {}
        self.known: dict[int, int | float] = {}

    def size(self, entry: int | str) -> int:
        """A size: a number, or "%n": value n."""
        if isinstance(entry, int):
            return entry
        value = self.known.get(int(entry[1:]))
        if value is None:
            raise LoweringError(
                "a tensor's size or offset depends on data", remedy="compute them from the inputs' shapes alone"
            )
        return int(value)

    def listed(self, entries: Sequence[int | str]) -> tuple[int, ...]:
        return tuple(self.size(entry) for entry in entries)

    def infer(self, step: Step) -> None:
        op, outs = step["op"], step["outs"]
        if op == "size":
            self.known[outs[0]] = self.sizes[step["ins"][0]][self.size(step["dim"])]
            return
        if op == "number":
            operands = [self.known.get(value) for value in step["ins"]]
            if all(value is not None for value in operands):
                self.known[outs[0]] = compute(step, operands)
            return
        if op == "extract":
            return
        if op == "call":
            sizes = self._call_sizes(step)
        else:
            sizes = [getattr(self, f"_sizes_{op}")(step)]
        for out, each, dtype in zip(outs, sizes, step["dtypes"], strict=True):
            if any(size < 0 for size in each):
                raise ShapeError(f"{self.where(step)}: a size is negative: {list(each)}", remedy=_SIZES)
            self.sizes[out], self.dtypes[out] = tuple(each), dtype

    def where(self, step: Step) -> str:
        return step.get("place") or step.get("what") or step["op"]

    def _sizes_empty(self, step: Step) -> tuple[int, ...]:
        return self.listed(step["sizes"])

    _sizes_constant = _sizes_empty

    def _sizes_transpose(self, step: Step) -> tuple[int, ...]:
        sizes = self.sizes[step["ins"][0]]
        return tuple(sizes[p] for p in step["permutation"])

    def _sizes_collapse(self, step: Step) -> tuple[int, ...]:
        sizes = self.sizes[step["ins"][0]]
        return tuple(prod(sizes[d] for d in group) for group in step["groups"])

    def _sizes_expand(self, step: Step) -> tuple[int, ...]:
        sizes, before = self.listed(step["sizes"]), self.sizes[step["ins"][0]]
        if step["groups"] is None or len(step["groups"]) != len(before):
            return sizes
        for size, group in zip(before, step["groups"], strict=True):
            if prod(sizes[d] for d in group) != size:
                wanted = " × ".join(str(sizes[d]) for d in group)
                raise ShapeError(f"{self.where(step)}: a dimension of {size} elements is split into {wanted}", remedy=_SIZES)
        return sizes

    def _sizes_broadcast(self, step: Step) -> tuple[int, ...]:
        sizes = list(self.sizes[step["ins"][0]])
        like = self.sizes[step["ins"][1]]
        added = step["dimensions"]
        kept = [size for d, size in enumerate(like) if d not in added]
        if kept != sizes:
            raise ShapeError(f"{self.where(step)}: {sizes} is broadcast to {list(like)}", remedy=_SIZES)
        return like

    def _sizes_slice(self, step: Step) -> tuple[int, ...]:
        sizes, whole = self.listed(step["sizes"]), self.sizes[step["ins"][0]]
        offsets, strides = self.listed(step["offsets"]), self.listed(step["strides"])
        for size, offset, stride, limit in zip(sizes, offsets, strides, whole, strict=True):
            if size and not (offset >= 0 and 0 <= offset + (size - 1) * stride < limit):
                raise ShapeError(f"{self.where(step)}: a slice reaches beyond its tensor of {list(whole)}", remedy=_SIZES)
        return tuple(size for d, size in enumerate(sizes) if d not in step["dropped"])

    def _sizes_insert(self, step: Step) -> tuple[int, ...]:
        source, whole = self.sizes[step["ins"][0]], self.sizes[step["ins"][1]]
        if self._sizes_slice({**step, "ins": [step["ins"][1]]}) != source:
            raise ShapeError(f"{self.where(step)}: {list(source)} is written to a slice of other sizes", remedy=_SIZES)
        return whole

    def _sizes_cast(self, step: Step) -> tuple[int, ...]:
        sizes = self.sizes[step["ins"][0]]
        if any(fixed >= 0 and fixed != size for fixed, size in zip(step["sizes"], sizes, strict=True)):
            wanted = ", ".join("?" if fixed < 0 else str(fixed) for fixed in step["sizes"])
            raise ShapeError(f"{self.where(step)}: a tensor of {list(sizes)} is taken as [{wanted}]", remedy=_SIZES)
        return sizes

    def _call_sizes(self, step: Step) -> list[tuple[int, ...]]:
        kernel = self.program["kernels"][step["kernel"]]
        if kernel["kind"] == "loop":
            return [self.sizes[value] for value in step["inits"]]
        query, key, value = (self.sizes[n] for n in step["ins"][:3])
        pairs = {
            "batch": (query[0], key[0], value[0]),
            "number of key heads": (key[1], value[1]),
            "number of keys": (key[2], value[2]),
            "head dim": (query[3], key[3]),
        }
        for what, sizes in pairs.items():
            if len(set(sizes)) > 1:
                raise ShapeError(
                    f"{self.where(step)}: the {what} of query, key and value differ: {', '.join(map(str, sizes))}",
                    remedy=f"query {list(query)}, key {list(key)}, value {list(value)} as (batch, heads, length, dim)",
                )
        if key[1] == 0 or query[1] % key[1]:
            if query[1] or key[1]:
                raise ShapeError(f"{self.where(step)}: {query[1]} query heads share {key[1]} key heads", remedy=_SIZES)
        rows = query[:3]
        return [(*rows, value[3]) if wide else rows for wide in kernel["wide"]]
