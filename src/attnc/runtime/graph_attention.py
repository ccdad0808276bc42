"""An attention in a planned program: which variant of its kernel the layout at hand wants, and the kernel's words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnc.errors import ShapeError
from attnc.runtime.attention import LAST_POSITION, few_queries, group_of

if TYPE_CHECKING:
    from attnc.runtime.graph_plan import Planner, View


def plan_attention(planner: Planner, kernel: dict[str, Any], step: dict[str, Any], targets: list[View]) -> None:
    """Adds the launch of an attention. The variant says which strides are 1 or 0, the head dims where the text leaves them
    open, and whether the kernel is that of few queries."""
    views = {value: planner.views[value] for value in step["ins"] if value in planner.views}
    query, key, value = (views[n] for n in step["ins"][:3])
    batch, heads, queries, head_dim = query.sizes
    kv_heads, keys, value_dim = key.sizes[1], key.sizes[2], value.sizes[3]
    for what, size in (("batch", batch), ("heads", heads), ("queries", queries), ("keys", keys)):
        if size > LAST_POSITION:
            raise ShapeError(f"{what}={size} is beyond {LAST_POSITION}, the largest position that a region can see")
    if batch * heads * queries * value_dim == 0:
        return
    if head_dim == 0:
        raise ShapeError("the head dim of query and key is 0")
    wide = [target for target, is_wide in zip(targets, kernel["wide"], strict=True) if is_wide]
    few = "out" in kernel["roles"] and few_queries(batch, heads, kv_heads, queries, keys)
    strides = [_strides(views[n], n in step["ins"][:3]) if n in views else "" for n in step["ins"]]
    variant = {
        "strides": strides,
        "strided_out": value_dim > 1 and any(target.strides[3] != 1 for target in wide),
        "few_queries": few,
        "head_dims": [head_dim, value_dim],
    }
    words: list[Any] = []
    for n in step["ins"]:
        words += [views[n], *views[n].sizes, *views[n].strides] if n in views else [f"%{n}"]
    for target in targets:
        words += [target, *target.sizes, *target.strides]
    words.append(group_of(heads, kv_heads, queries))
    planner.launch(planner.find(kernel, variant), words, [*views.values(), *targets], step)


def _strides(view: View, is_operand: bool) -> str:
    """What of a view's strides is compiled in: that a dimension's is 1, or (of captures) 0."""
    fields = []
    last = len(view.sizes) - 1
    for d, (size, stride) in enumerate(zip(view.sizes, view.strides, strict=True)):
        if size == 1 and d == last and is_operand:
            fields.append("1")
        elif size > 1 and (stride == 1 or (stride == 0 and not is_operand)):
            fields.append(str(stride))
        else:
            fields.append("?")
    return "x".join(fields)
