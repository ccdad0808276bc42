"""BlockMask: torch's, read into one small tensor of block classes, and attnc's own, which builds nothing until asked.

attnc finds empty and full blocks from the mask_mod itself, so its own `create_block_mask` keeps the mask_mod and the sizes.
torch's BlockMask says which blocks are computed; that is honoured as torch's compiled kernels do: blocks that are not listed
are skipped, listed ones apply the mask_mod, full ones do not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.attention import flex_attention as _torch_flex
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

from attnc.capture.locations import no_callable, reading
from attnc.errors import BlockMaskError, DeviceError, SlicedBlockMaskError

NOT_LISTED, PARTIAL, FULL = 0, 1, 2

_TorchBlockMask = _torch_flex.BlockMask
# A block size that says "one block, whatever the lengths": torch's BlockMask for no mask at all.
_UNBOUNDED = _torch_flex._LARGE_SPARSE_BLOCK_SIZE


class BlockMask(_TorchBlockMask):
    """A mask_mod with its sizes. The block lists (`kv_num_blocks`, …) are built by torch when one of them is first read;
    attnc itself uses the mask_mod alone, until a list is assigned."""

    def __init__(self, mask_mod: Callable[..., Any], shape: tuple[int, int, int, int], options: dict[str, Any]):
        self.mask_mod = mask_mod
        self.seq_lengths = shape[2:]
        block_size = options["BLOCK_SIZE"]
        self.BLOCK_SIZE = (block_size, block_size) if isinstance(block_size, int) else tuple(block_size)
        self._lazy = _Lazy(shape, options)

    @property
    def is_lazy(self) -> bool:
        """Whether the lists say nothing beyond the mask_mod."""
        return self.__dict__.get("_lazy") is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, Sq, Skv), which builds nothing."""
        lazy = self.__dict__.get("_lazy")
        return lazy.shape if lazy is not None else super().shape

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _LISTS and self.is_lazy:
            self._build()
            self.__dict__["_lazy"] = None
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        # Only asked for what is not there: before the lists are built, that is they.
        if name not in _LISTS or not self.is_lazy:
            raise AttributeError(f"'BlockMask' object has no attribute '{name}'")
        self._build()
        return self.__dict__[name]

    def _build(self) -> None:
        if "kv_num_blocks" in self.__dict__:
            return
        lazy = self.__dict__["_lazy"]
        built = _torch_flex.create_block_mask(self.mask_mod, *lazy.shape, **lazy.options)
        for name in _LISTS:
            self.__dict__[name] = getattr(built, name)

    def __reduce__(self):
        lazy = self.__dict__.get("_lazy")
        if lazy is None:
            return super().__reduce__()
        return BlockMask, (self.mask_mod, lazy.shape, lazy.options)


class _Lazy(NamedTuple):
    shape: tuple[int, int, int, int]
    options: dict[str, Any]


_LISTS = frozenset({*_TorchBlockMask._TENSOR_ATTRS, "dq_kv_order_spt"})


def create_block_mask(
    mask_mod: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """torch's `create_block_mask`, in no time: keeps `mask_mod` and the sizes, builds lists only when they are read.

    `mask_mod(b, h, q_idx, kv_idx) -> bool`; B and H of None mean that the mask is the same for all. `BLOCK_SIZE` is one size or
    (queries, keys). `device` defaults to the CPU. Raises `ModSignatureError` for a mask_mod that cannot be called.
    """
    if not callable(mask_mod):
        raise no_callable("mask_mod", mask_mod)
    shape = (1 if B is None else B, 1 if H is None else H, Q_LEN, KV_LEN)
    options = {
        "device": "cpu" if device is None else device,
        "BLOCK_SIZE": BLOCK_SIZE,
        "separate_full_blocks": separate_full_blocks,
        "compute_dq_write_order": compute_dq_write_order,
        "dq_kv_order": dq_kv_order,
    }
    return BlockMask(mask_mod, shape, options)


class ReadBlockMask(NamedTuple):
    """What a call takes from a BlockMask.

    `mask_mod` is None where it masks nothing. `classes` is the int8 tensor [B', H', ceil(Sq / queries), ceil(Skv / keys)] of
    0 not listed, 1 partial, 2 full, contiguous, B' and H' maybe 1, for blocks of `block_size` (queries, keys); both are None
    where the mask_mod says all.
    """

    mask_mod: Callable[..., Any] | None
    classes: torch.Tensor | None
    block_size: tuple[int, int] | None


def no_block_mask(given: Any) -> BlockMaskError:
    """The error where a call's `block_mask` is something else."""
    remedy = "pass a mask function as mask_mod=" if callable(given) else reading("mask_mod", given)
    return BlockMaskError(f"block_mask is a {type(given).__name__}, not a BlockMask", remedy=remedy)


def read_block_mask(block_mask: Any, batch: int, heads: int, queries: int, keys: int) -> ReadBlockMask:
    """The mask_mod and the block classes of a BlockMask for attention of `batch`, `heads` (query heads) and these lengths.

    Raises `SlicedBlockMaskError`, `BlockMaskError` where lengths, batch or heads do not fit, `DeviceError`.
    """
    if not isinstance(block_mask, _TorchBlockMask):
        raise no_block_mask(block_mask)
    mask_mod = block_mask.mask_mod
    if mask_mod is _torch_flex._sliced_mask_mod_error:
        raise SlicedBlockMaskError("the BlockMask was sliced, and so lost its mask_mod")
    mask_mod = None if mask_mod is noop_mask else mask_mod
    if isinstance(block_mask, BlockMask) and block_mask.is_lazy:
        _check(block_mask.shape, batch, heads, queries, keys)
        return ReadBlockMask(mask_mod, None, None)
    # The number of entries grows from release to release: count from the end.
    *_, query_block, key_block, _ = block_mask.as_tuple()
    if not (query_block == key_block == _UNBOUNDED):
        shape = (*_leading(block_mask.kv_num_blocks), *block_mask.seq_lengths)
        _check(shape, batch, heads, queries, keys)
    classes = _classes(block_mask, -(-queries // query_block), -(-keys // key_block))
    return ReadBlockMask(mask_mod, classes, (query_block, key_block))


def _leading(num_blocks: torch.Tensor) -> tuple[int, int]:
    batch_and_heads = (1, 1, *num_blocks.shape[:-1])[-2:]
    return batch_and_heads[0], batch_and_heads[1]


def _check(shape: tuple[int, ...], batch: int, heads: int, queries: int, keys: int) -> None:
    if shape[2:] != (queries, keys):
        raise BlockMaskError(
            f"the BlockMask was made for {shape[2]} queries and {shape[3]} keys, the call has {queries} and {keys}"
        )
    if shape[0] not in (1, batch) or shape[1] not in (1, heads):
        raise BlockMaskError(
            f"the BlockMask was made for batch {shape[0]} and {shape[1]} heads, the call has {batch} and {heads}",
            remedy="create it with B=None, H=None (the same mask for all), or with the query's batch and heads",
        )


class _Kept(NamedTuple):
    versions: tuple
    sizes: tuple[int, int]
    classes: torch.Tensor


_kept: weakref.WeakKeyDictionary[Any, _Kept] = weakref.WeakKeyDictionary()


def _classes(block_mask: Any, rows: int, columns: int) -> torch.Tensor:
    """The class tensor, kept as long as the BlockMask and while its lists stay as they are."""
    lists = (
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
    )
    versions: tuple | None = None
    if not any(tensor is not None and tensor.is_inference() for tensor in lists):
        versions = tuple(None if tensor is None else (weakref.ref(tensor), tensor._version) for tensor in lists)
        kept = _kept.get(block_mask)
        if kept is not None and kept.sizes == (rows, columns) and _same(kept.versions, versions):
            return kept.classes
    classes = build_classes(*lists, rows, columns)
    if versions is not None:
        _kept[block_mask] = _Kept(versions, (rows, columns), classes)
    return classes


def _same(old: tuple, new: tuple) -> bool:
    """Whether these are the same tensors, unchanged. (Weak references of equal tensors compare element by element.)"""
    for before, now in zip(old, new, strict=True):
        if before is None or now is None:
            if before is not now:
                return False
        elif before[0]() is not now[0]() or before[1] != now[1]:
            return False
    return True


def build_classes(
    num_blocks: torch.Tensor,
    indices: torch.Tensor,
    full_num_blocks: torch.Tensor | None,
    full_indices: torch.Tensor | None,
    rows: int,
    columns: int,
) -> torch.Tensor:
    """Ordered lists of blocks as classes [B, H, rows, columns]: of each row of blocks, the first `num_blocks` of `indices`."""
    for tensor in (num_blocks, indices, full_num_blocks, full_indices):
        if tensor is not None and tensor.device.type != "cpu":
            raise DeviceError(f"the BlockMask's lists are on {tensor.device}; attnc runs on the CPU only so far")
    partial = _listed(num_blocks, indices, rows, columns)
    if full_num_blocks is None or full_indices is None:
        return partial
    full = _listed(full_num_blocks, full_indices, rows, columns)
    return torch.where(full != 0, torch.full_like(full, FULL), partial).contiguous()


def _listed(num_blocks: torch.Tensor, indices: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    while num_blocks.dim() < 3:
        num_blocks, indices = num_blocks[None], indices[None]
    if num_blocks.shape[-1] < rows:
        raise BlockMaskError(f"the BlockMask lists {num_blocks.shape[-1]} rows of blocks, the call has {rows}")
    num_blocks, indices = num_blocks[..., :rows, None], indices[..., :rows, :].long()
    if num_blocks.numel() and int(num_blocks.max()) > indices.shape[-1]:
        raise BlockMaskError(
            f"the BlockMask counts {int(num_blocks.max())} blocks in a row, its list of indices holds {indices.shape[-1]}"
        )
    listed = torch.arange(indices.shape[-1]) < num_blocks
    if bool((listed & ((indices < 0) | (indices >= columns))).any()):
        # Blocks beyond the keys hold nothing; a negative one is a mistake.
        if bool((listed & (indices < 0)).any()):
            raise BlockMaskError("the BlockMask lists a negative block index")
        listed = listed & (indices < columns)
    place = torch.where(listed, indices, columns)
    classes = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.int8)
    classes.scatter_(-1, place, PARTIAL)
    return classes[..., :columns].contiguous()


__all__ = ["BlockMask", "ReadBlockMask", "and_masks", "create_block_mask", "or_masks", "read_block_mask"]
