"""Whether a BlockMask in an exported graph says more than its mask function.

Where `create_block_mask(mask_mod, …)` is called inside of a module, torch writes into the graph how the lists are made: the
mask for all positions, summed over blocks.

    %mask = <mask_mod of aranges>                     # [B, H, Sq, Skv]
    %sum = sum(permute(view(pad(%mask))), [-2, -1])   # [B, H, blocks of queries, blocks of keys]
    %partial = (%sum > 0) & (%sum < size of a block),  %full = %sum == size of a block
    kv_num_blocks, kv_indices = %partial.sum(-1), %partial.argsort(…),  and the same of %full

If %mask is the very mask function that the attention applies, the lists say nothing beyond it, and need not be made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

_aten: Any = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.clone.default, _aten.to.dtype, _aten.contiguous.default)
_SAME_ORDER = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.unsqueeze.default)
_RANGES = (_aten.arange.default, _aten.arange.start, _aten.arange.start_step)
_SPELLINGS = {"__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor"}
_UNIFORM = ("new_ones.default", "new_zeros.default", "ones.default", "zeros.default")
_DIMS = "bhqk"
Labels = tuple[str | None, ...]


def uncopied(node: Any) -> Any:
    """What a node copies or casts."""
    while isinstance(node, fx.Node) and node.target in _COPIES:
        node = node.args[0]
    return node


def table_of(num: Any, indices: Any) -> fx.Node | None:
    """The dense table that both lists were made of: num = table.sum(-1), indices = table.argsort(descending, stable)."""
    total, order = uncopied(num), uncopied(indices)
    if order.target is getitem and order.args[1] == 1 and getattr(order.args[0], "target", None) == _aten.sort.stable:
        order = order.args[0]
    elif order.target != _aten.argsort.stable:
        return None
    descending = order.kwargs.get("descending", order.args[3] if len(order.args) > 3 else False)
    if total.target != _aten.sum.dim_IntList or list(total.args[1]) != [-1] or not descending:
        return None
    table = order.args[0]
    return table if isinstance(table, fx.Node) and table is total.args[0] else None


def is_redundant(lists: Sequence[Any], block_size: Sequence[int], mask_mod: fx.GraphModule) -> bool:
    """Whether `lists` (kv_num_blocks, kv_indices, and those of the full blocks) follow from `mask_mod`."""
    if any(not isinstance(entry, fx.Node) for entry in lists):
        return False
    tables = table_of(*lists[:2]), table_of(*lists[2:])
    if None in tables:
        return False
    both, all_ = (uncopied(table) for table in tables)
    whole = math.prod(block_size)
    if both.target not in (_aten.__and__.Tensor, _aten.bitwise_and.Tensor) or all_.target != _aten.eq.Scalar:
        return False
    some, less = both.args
    count = all_.args[0]
    if some.target != _aten.gt.Scalar or less.target != _aten.lt.Scalar:
        return False
    if some.args != (count, 0) or less.args != (count, whole) or all_.args != (count, whole):
        return False
    mask = _summed_over_blocks(count, block_size)
    output = next(node for node in mask_mod.graph.nodes if node.op == "output")
    (returned,) = output.args
    if isinstance(returned, tuple | list):
        (returned,) = returned
    placeholders = [node for node in mask_mod.graph.nodes if node.op == "placeholder"]
    if mask is None or len(placeholders) != 4 or mask.meta["val"].dim() != 4:
        return False
    return _same(mask, tuple(_DIMS), returned, dict(zip(placeholders, _DIMS, strict=True)))


def _summed_over_blocks(count: Any, block_size: Sequence[int]) -> fx.Node | None:
    """The mask [B, H, Sq, Skv] that `count` sums up for each block, padded with False."""
    if count.target != _aten.sum.dim_IntList or list(count.args[1]) != [-2, -1]:
        return None
    permuted = count.args[0]
    if permuted.target != _aten.permute.default or list(permuted.args[1]) != [0, 1, 2, 4, 3, 5]:
        return None
    viewed = permuted.args[0]
    if viewed.target != _aten.view.default or (viewed.args[1][3], viewed.args[1][5]) != tuple(block_size):
        return None
    mask = viewed.args[0]
    if mask.target in (_aten.pad.default, _aten.constant_pad_nd.default):
        sizes = mask.args[1]
        if len(sizes) != 4 or sizes[0] != 0 or sizes[2] != 0 or any(mask.args[2:]) or mask.kwargs:
            return None
        mask = mask.args[0]
    return mask


def _same(node: Any, labels: Labels, term: Any, positions: dict[fx.Node, str]) -> bool:
    """Whether `node`, whose dims are the positions `labels`, is `term` of the mask function's graph."""
    if not isinstance(node, fx.Node) or not isinstance(term, fx.Node):
        return type(node) is type(term) and node == term
    node, labels = _without_views(node, labels)
    if term in positions:
        # A dim of size 1 may stand for many heads or batches: then the lists say something of their own.
        return _is_range(node) and labels == (positions[term],)
    if _plain(node.target) != _plain(term.target) or node.op != "call_function" or len(node.args) != len(term.args):
        return False
    if _plain(node.target) in _UNIFORM:  # as and_masks begins with: the sizes do not matter
        return node.kwargs.get("dtype") == term.kwargs.get("dtype")
    if dict(node.kwargs) != dict(term.kwargs):
        return False
    for argument, wanted in zip(node.args, term.args, strict=True):
        rank = argument.meta["val"].dim() if isinstance(argument, fx.Node) else 0
        if not _same(argument, labels[len(labels) - rank :] if rank else (), wanted, positions):
            return False
    return True


def _plain(target: Any) -> str:
    """An operation's name, one for both that torch has for `&`, `|` and `^`."""
    name, _, overload = str(target).removeprefix("aten.").partition(".")
    return f"{_SPELLINGS.get(name, name)}.{overload}"


def _without_views(node: fx.Node, labels: Labels) -> tuple[fx.Node, Labels]:
    """Through views that add dims of size 1, and expansions along those: the node behind, and what its dims are."""
    while True:
        if node.target == _aten.expand.default:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            own = labels[len(labels) - source.meta["val"].dim() :]
            labels = tuple(None if size == "1" else label for size, label in zip(_sizes(source), own, strict=True))
        elif node.target in _SAME_ORDER:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            wide = [label for size, label in zip(_sizes(node), labels, strict=True) if size != "1"]
            if [s for s in _sizes(source) if s != "1"] != [s for s in _sizes(node) if s != "1"]:
                return node, labels
            rest = iter(wide)
            labels = tuple(None if size == "1" else next(rest) for size in _sizes(source))
        else:
            return node, labels
        node = source


def _sizes(node: fx.Node) -> list[str]:
    return [str(size) for size in node.meta["val"].shape]


def _is_range(node: fx.Node) -> bool:
    """0, 1, 2, …"""
    if node.target not in _RANGES:
        return False
    numbers = node.args
    start = numbers[0] if node.target != _aten.arange.default else 0
    step = numbers[2] if node.target == _aten.arange.start_step and len(numbers) > 2 else 1
    return bool(start == 0 and step == 1)
