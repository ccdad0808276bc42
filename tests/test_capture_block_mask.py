"""torch's BlockMask as block classes, and attnc's own, which builds nothing until asked."""

# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import gc
import pickle
import weakref

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from attnc.capture import block_mask as module
from attnc.capture.block_mask import FULL, NOT_LISTED, PARTIAL, BlockMask, and_masks, create_block_mask, read_block_mask
from attnc.errors import BlockMaskError, DeviceError, ModSignatureError, SlicedBlockMaskError


def causal(b, h, q, kv):
    return q >= kv


def by_head(b, h, q, kv):
    return (q >= kv) & (q - kv < 40 * (h + 1)) & (b < 2)


def dense(mask_mod, batch, heads, queries, keys):
    grid = torch.meshgrid(*map(torch.arange, (batch, heads, queries, keys)), indexing="ij")
    return mask_mod(*grid)


@pytest.mark.parametrize("block_size", [128, 64, (32, 128), (128, 16)])
@pytest.mark.parametrize(("queries", "keys"), [(256, 256), (200, 300), (1, 130), (130, 1)])
@pytest.mark.parametrize("separate_full_blocks", [True, False])
def test_classes_of_torchs_block_mask(block_size, queries, keys, separate_full_blocks):
    batch, heads = 3, 2
    built = torch_flex.create_block_mask(
        by_head, batch, heads, queries, keys, "cpu", block_size, separate_full_blocks=separate_full_blocks
    )
    mask_mod, classes, sizes = read_block_mask(built, batch, heads, queries, keys)
    assert mask_mod is by_head and sizes == built.BLOCK_SIZE
    rows, columns = -(-queries // sizes[0]), -(-keys // sizes[1])
    assert classes.shape == (batch, heads, rows, columns) and classes.dtype is torch.int8 and classes.is_contiguous()
    mask = dense(by_head, batch, heads, queries, keys)
    for row in range(rows):
        for column in range(columns):
            block = mask[:, :, row * sizes[0] : (row + 1) * sizes[0], column * sizes[1] : (column + 1) * sizes[1]]
            live = block.flatten(2).any(2)
            whole = block.flatten(2).sum(2) == sizes[0] * sizes[1]
            got = classes[:, :, row, column]
            assert torch.equal(got != NOT_LISTED, live)
            assert torch.equal(got == FULL, whole & separate_full_blocks)


def test_batch_and_heads_of_one_and_lists_without_them():
    built = torch_flex.create_block_mask(causal, None, None, 256, 256, "cpu")
    assert read_block_mask(built, 4, 8, 256, 256).classes.shape == (1, 1, 2, 2)
    lists = torch_flex.BlockMask.from_kv_blocks(
        torch.tensor([1, 2], dtype=torch.int32), torch.tensor([[0, 1], [0, 1]], dtype=torch.int32), compute_q_blocks=False
    )
    found = read_block_mask(lists, 4, 8, 256, 256)
    assert found.mask_mod is None
    assert found.classes.tolist() == [[[[PARTIAL, NOT_LISTED], [PARTIAL, PARTIAL]]]]


def test_lists_that_change_are_read_again():
    built = torch_flex.create_block_mask(causal, None, None, 256, 256, "cpu")
    first = read_block_mask(built, 1, 1, 256, 256).classes
    assert read_block_mask(built, 1, 1, 256, 256).classes is first
    built.kv_num_blocks.zero_()
    assert read_block_mask(built, 1, 1, 256, 256).classes.tolist() == [[[[0, 0], [2, 0]]]]
    built.full_kv_num_blocks = torch.zeros_like(built.full_kv_num_blocks)
    assert not read_block_mask(built, 1, 1, 256, 256).classes.any()


def test_no_block_mask_is_kept_alive():
    built = torch_flex.create_block_mask(causal, None, None, 256, 256, "cpu")
    read_block_mask(built, 1, 1, 256, 256)
    reference = weakref.ref(built)
    del built
    gc.collect()
    assert reference() is None and len(module._kept) == 0


def test_refusals():
    built = torch_flex.create_block_mask(causal, 2, 2, 256, 256, "cpu")
    with pytest.raises(SlicedBlockMaskError):
        read_block_mask(built[:, 0], 2, 1, 256, 256)
    for sizes in ((2, 2, 255, 256), (2, 2, 256, 300), (3, 2, 256, 256), (2, 4, 256, 256)):
        with pytest.raises(BlockMaskError):
            read_block_mask(built, *sizes)
        with pytest.raises(BlockMaskError):
            read_block_mask(create_block_mask(causal, 2, 2, 256, 256), *sizes)
    with pytest.raises(BlockMaskError):
        read_block_mask(torch.ones(2, 2), 2, 2, 256, 256)
    with pytest.raises(BlockMaskError, match="pass a mask function as mask_mod="):
        read_block_mask(causal, 2, 2, 256, 256)
    with pytest.raises(DeviceError):
        module.build_classes(*(torch.zeros(2, 2, device="meta"),) * 2, None, None, 1, 1)
    with pytest.raises(ModSignatureError):
        create_block_mask(torch.ones(3), 1, 1, 8, 8)


def test_no_mask_at_all():
    empty = torch_flex._create_empty_block_mask(torch.zeros(1, 1, 300, 8), torch.zeros(1, 1, 300, 8))
    found = read_block_mask(empty, 2, 4, 300, 300)
    assert found.mask_mod is None and found.classes.tolist() == [[[[PARTIAL]]]]


def test_own_block_mask_builds_nothing_until_asked(monkeypatch):
    built = []
    original = torch_flex.create_block_mask
    monkeypatch.setattr(torch_flex, "create_block_mask", lambda *a, **k: built.append(a) or original(*a, **k))
    mine = create_block_mask(by_head, 2, 2, 200, 300, BLOCK_SIZE=(32, 64))
    assert isinstance(mine, torch_flex.BlockMask)
    assert mine.shape == (2, 2, 200, 300) and mine.BLOCK_SIZE == (32, 64) and mine.seq_lengths == (200, 300)
    assert read_block_mask(mine, 2, 2, 200, 300) == (by_head, None, None)
    assert not built
    theirs = original(by_head, 2, 2, 200, 300, "cpu", (32, 64))
    for name in ("kv_num_blocks", "kv_indices", "full_kv_indices", "q_num_blocks"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name))
    assert len(built) == 1 and mine.is_lazy
    assert torch.equal(mine.to_dense(), theirs.to_dense()) and str(mine) == str(theirs)
    assert len(mine.as_tuple()) == len(theirs.as_tuple())
    assert mine.numel() == theirs.numel()
    with pytest.raises(SlicedBlockMaskError):
        read_block_mask(mine[0], 1, 2, 200, 300)


def test_own_block_mask_whose_lists_are_assigned_is_read_as_torchs():
    mine = create_block_mask(causal, None, None, 256, 256)
    mine.kv_num_blocks = torch.zeros_like(mine.kv_num_blocks)
    assert read_block_mask(mine, 1, 1, 256, 256).classes.tolist() == [[[[0, 0], [2, 0]]]]


def test_own_block_mask_can_be_given_another_mask_mod():
    mine = create_block_mask(causal, None, None, 256, 256)
    mine.mask_mod = and_masks(causal, by_head)
    assert read_block_mask(mine, 1, 1, 256, 256).mask_mod is mine.mask_mod


def test_pickling():
    mine = pickle.loads(pickle.dumps(create_block_mask(causal, None, 4, 256, 256)))
    assert isinstance(mine, BlockMask) and mine.is_lazy and mine.shape == (1, 4, 256, 256)


@pytest.mark.parametrize("full", [False, True])
def test_lists_that_cannot_be_are_refused(full):
    def mask(num_blocks, indices):
        none = torch.zeros(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
        lists = (torch.tensor([[[num_blocks]]], dtype=torch.int32), torch.tensor([[[indices]]], dtype=torch.int32))
        given = (*none, *lists) if full else lists
        return torch_flex.BlockMask.from_kv_blocks(*given, BLOCK_SIZE=128, seq_lengths=(128, 256))

    assert read_block_mask(mask(2, [1, 0]), 1, 1, 128, 256).classes.all()
    with pytest.raises(BlockMaskError, match="counts 3 blocks in a row, its list of indices holds 2"):
        read_block_mask(mask(3, [1, 0]), 1, 1, 128, 256)
    with pytest.raises(BlockMaskError, match="negative block index"):
        read_block_mask(mask(2, [1, -1]), 1, 1, 128, 256)
