"""A loop of a planned program: elementwise operations or a reduction over a domain, each operand a pointer and a stride for
each dimension of the domain.

Dimensions of size 1 go, neighbours that lie behind each other in every operand become one, and the rest is ordered so that the
result's unit stride is innermost: whatever the shapes, few variants of a kernel are compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from attnc.errors import ShapeError

if TYPE_CHECKING:
    from attnc.runtime.graph_plan import Planner, View

SHORT = 8
"""A reduced dimension shorter than this is no place for lanes."""

_WORDS = {1: "i8", 2: "i16", 4: "i32", 8: "i64"}


@dataclass
class Dimension:
    """A dimension of the loop: its size, and the stride of every operand along it. `number` is what it was in the text."""

    number: int
    size: int
    strides: tuple[int, ...]


def copy_kernel(dtype: str, rank: int) -> dict[str, Any]:
    """The kernel that copies elements; it knows only how many bytes they are."""
    from attnc.runtime.graph_plan import ITEM_BYTES

    type_ = _WORDS[ITEM_BYTES[dtype]]
    tensor = f"tensor<?x{type_}>"
    text = (
        f'builtin.module attributes {{attnc.stage = "outline-loops"}} {{\n'
        f"  func.func private @loop(%x: {tensor}, %init: {tensor}) -> {tensor} {{\n"
        "    %r = linalg.generic {indexing_maps = [affine_map<(i) -> (i)>, affine_map<(i) -> (i)>], "
        f'iterator_types = ["parallel"]}} ins(%x : {tensor}) outs(%init : {tensor}) {{\n'
        f"    ^bb0(%a: {type_}, %b: {type_}):\n      linalg.yield %a : {type_}\n    }} -> {tensor}\n"
        f"    func.return %r : {tensor}\n  }}\n}}"
    )
    identity = list(range(rank))
    return {
        "kind": "loop",
        "what": "a copy",
        "text": text,
        "ins": [[0, identity]],
        "starts": [],
        "gathers": [],
        "numbers": [],
        "outs": [identity],
        "iterators": "p" * rank,
        "indexed": False,
        "combines": False,
    }


def plan_loop(
    planner: Planner, kernel: dict[str, Any], operands: Sequence[View | str], targets: Sequence[View], step: dict[str, Any]
) -> None:
    """Adds the launch of a loop on `operands` (views, or "%n" for numbers) that writes `targets`."""
    views: list[View] = []
    maps: list[list[int | None]] = []
    for number, map_ in kernel["ins"]:
        views.append(_view(operands[number]))
        maps.append(map_)
    for target, map_ in zip(targets, kernel["outs"], strict=True):
        views.append(target)
        maps.append(map_)
    for number, result in kernel["starts"]:
        views.append(_view(operands[number]))
        maps.append(kernel["outs"][result])
    sizes = _domain(kernel, step, views, maps)
    if prod(target_size for target in targets for target_size in target.sizes) == 0:
        return
    dimensions = []
    for number, size in enumerate(sizes):
        strides = tuple(_stride(view, map_, number) for view, map_ in zip(views, maps, strict=True))
        dimensions.append(Dimension(number, size, strides))
    iterators = kernel["iterators"]
    parallel = [d for d in dimensions if iterators[d.number] == "p"]
    reduction = [d for d in dimensions if iterators[d.number] == "r"]
    inputs, results = len(kernel["ins"]), len(targets)
    order = [*range(inputs, inputs + results), *range(inputs)]
    if not kernel["indexed"]:
        parallel = _merged(_ordered(_without_units(parallel), order))
        reduction = _merged(_ordered(_without_units(reduction), [*range(inputs)]))
    lanes = _lanes(kernel, parallel, reduction, inputs, results)
    inner = parallel if lanes == "parallel" else reduction
    if kernel["indexed"] and inner:
        _bring_inner(inner, order if lanes == "parallel" else [*range(inputs)])
    last = inner[-1].strides if inner else (0,) * len(views)
    variant = {
        "parallel": [d.number for d in parallel] if kernel["indexed"] else len(parallel),
        "reduction": [d.number for d in reduction] if kernel["indexed"] else len(reduction),
        "lanes": lanes,
        "strides": "".join(str(stride) if stride in (0, 1) else "?" for stride in last),
    }
    words: list[Any] = [d.size for d in (*parallel, *reduction)]
    for n, view in enumerate(views):
        words += [view, *(d.strides[n] for d in (*parallel, *reduction))]
    touched = list(views)
    for number in kernel["gathers"]:
        view = _view(operands[number])
        words += [view, *view.sizes, *view.strides]
        touched.append(view)
    words += [operands[number] for number in kernel["numbers"]]
    planner.launch(planner.find(kernel, variant), words, touched, step)


def _view(operand: View | str) -> View:
    assert not isinstance(operand, str)
    return operand


def _domain(
    kernel: dict[str, Any], step: dict[str, Any], views: Sequence[View], maps: Sequence[Sequence[int | None]]
) -> list[int]:
    """The size of each dimension. Raises `ShapeError` where operands disagree."""
    found: dict[int, int] = {}
    for view, map_ in zip(views, maps, strict=True):
        for size, dim in zip(view.sizes, map_, strict=True):
            if dim is None:
                if size != 1:
                    raise ShapeError(
                        f"{_where(kernel, step)}: a dimension of {size} elements is taken as one of 1", remedy=_FIT
                    )
            elif found.setdefault(dim, size) != size:
                raise ShapeError(f"{_where(kernel, step)}: tensors of {found[dim]} and {size} elements meet", remedy=_FIT)
    return [found[dim] for dim in range(len(kernel["iterators"]))]


_FIT = "pass inputs whose sizes fit together as the program says"


def _where(kernel: dict[str, Any], step: dict[str, Any]) -> str:
    return step.get("place") or kernel["what"]


def _stride(view: View, map_: Sequence[int | None], number: int) -> int:
    return sum(stride for stride, dim in zip(view.strides, map_, strict=True) if dim == number)


def _without_units(dimensions: list[Dimension]) -> list[Dimension]:
    return [d for d in dimensions if d.size != 1]


def _ordered(dimensions: list[Dimension], operands: Sequence[int]) -> list[Dimension]:
    """Outermost first: by the strides of the first operand that tells them apart."""
    return sorted(dimensions, key=lambda d: tuple(-d.strides[n] for n in operands))


def _merged(dimensions: list[Dimension]) -> list[Dimension]:
    found: list[Dimension] = []
    for inner in dimensions:
        outer = found[-1] if found else None
        if outer is not None and all(a == b * inner.size for a, b in zip(outer.strides, inner.strides, strict=True)):
            found[-1] = Dimension(inner.number, outer.size * inner.size, inner.strides)
        else:
            found.append(inner)
    return found


def _lanes(kernel: dict[str, Any], parallel: list[Dimension], reduction: list[Dimension], inputs: int, results: int) -> str:
    """Which dimensions' innermost one vectors run along."""
    if reduction and kernel["combines"]:
        read = [d for d in reduction if d.size >= SHORT and any(d.strides[n] == 1 for n in range(inputs))]
        along = [d for d in parallel if d.size >= SHORT and any(d.strides[n] == 1 for n in range(inputs))]
        if (read and not along) or not parallel:
            return "reduction" if prod(d.size for d in reduction) >= SHORT else ("parallel" if parallel else "none")
    return "parallel" if parallel else "none"


def _bring_inner(dimensions: list[Dimension], operands: Sequence[int]) -> None:
    """Moves the best dimension for vectors to the end; the others stay in their order."""
    best = max(
        range(len(dimensions)), key=lambda i: [dimensions[i].size > 1 and dimensions[i].strides[n] == 1 for n in operands]
    )
    dimensions.append(dimensions.pop(best))
