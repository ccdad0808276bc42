"""Every mod of the zoo, captured and converted: its region, run in NumPy, gives the scores that torch gives."""

from __future__ import annotations

import io
import subprocess
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.printer import Printer

from attention_text import parse
from attnc.capture.block_mask import read_block_mask
from attnc.capture.capture import capture
from attnc.capture.to_torch import to_torch
from attnc.dialects.linalg_ext import AttentionOp, OnlineAttentionOp
from attnc.runtime.signature import Signature
from attnc.target import Target
from attnc.transforms import convert_torch_to_linalg_ext
from needs import needs_tool, tool
from random_mods import mask_mods, score_mods
from region_interpreter import Fault, run_region
from zoo import ENTRIES, Mods

TARGET = Target("x86_64-unknown-linux-gnu", "", "", 512, 32)


def converted(mods: Mods, precision: str = "f32", **options: Any) -> tuple[ModuleOp, list, list]:
    """The module after the pass, its captured tensors and its numbers. Its text reads back as the same text."""
    dtype = torch.float64 if precision == "f64" else torch.float32
    mask = mods.mask_mod if mods.block_mask is None else mods.block_mask.mask_mod
    found = capture(mods.score_mod, mask, score_dtype=dtype)
    module = to_torch(found.record, Signature(precision, 16, 16, **options))
    module = reread(module)
    convert_torch_to_linalg_ext.run(module, TARGET)
    module.verify()
    module = reread(module)
    return module, list(found.tensors), list(found.numbers)


def reread(module: ModuleOp) -> ModuleOp:
    """The module by way of its text. (A number at the end of a name may be lost on the first way.)"""
    module = parse(str(module))
    text = str(module)
    assert str(parse(text)) == text
    return module


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.float().numpy()
    return tensor.view(torch.int8).numpy() if tensor.dtype == torch.uint8 else tensor.numpy()


def regions_scores(
    module: ModuleOp, tensors: list, numbers: list, score: torch.Tensor, kv_heads: int, blocks: torch.Tensor | None = None
) -> tuple[np.ndarray, list[Fault]]:
    """What the converted region makes of `score` [B, H, Sq, Skv]."""
    (function,) = (op for op in module.ops if isinstance(op, FuncOp))
    (attention,) = (op for op in module.walk() if isinstance(op, AttentionOp | OnlineAttentionOp))
    batch, heads, queries, keys = score.shape
    outside: dict = dict(zip(function.body.block.args[4:], [*map(to_numpy, tensors), *map(np.asarray, numbers)]))
    if blocks is not None:
        outside[function.body.block.args[-1]] = blocks.expand(batch, heads, -1, -1).numpy()
    for op in function.body.block.ops:  # the sizes that the region uses
        for result in op.results:
            if result.name_hint == "group":
                outside[result] = np.asarray(heads // kv_heads, np.int64)
            elif op.name == "arith.constant":
                outside[result] = np.asarray(op.properties["value"].value.data)  # type: ignore[attr-defined]
            elif op.name == "tensor.dim" and op.operands[0] in outside:
                outside[result] = np.asarray(outside[op.operands[0]].shape[int(outside[op.operands[1]])])
    shape = (batch, kv_heads, heads // kv_heads, queries, keys)
    result, faults = run_region(attention, score.numpy().reshape(shape), shape, outside)
    return result.reshape(batch, heads, queries, keys), faults


def vmapped(mod: Any, *leading: torch.Tensor, sizes: tuple[int, int, int, int]) -> torch.Tensor:
    """A mod over all (b, h, q, kv); `leading` arguments have those four dims."""
    positions = [torch.arange(size, dtype=torch.int32) for size in sizes]
    for dim in reversed(range(4)):
        mod = torch.vmap(mod, in_dims=(*[0] * len(leading), *(0 if d == dim else None for d in range(4))))
    return mod(*leading, *positions).expand(sizes)


def expected(mods: Mods, score: torch.Tensor, blocks: torch.Tensor | None = None) -> torch.Tensor:
    result = score
    if mods.score_mod is not None:
        result = vmapped(mods.score_mod, score, sizes=score.shape).to(score.dtype)  # type: ignore[arg-type]
    mask_mod = mods.mask_mod if mods.block_mask is None else mods.block_mask.mask_mod
    mask = torch.ones(score.shape, dtype=torch.bool)
    if mask_mod is not None:
        mask = vmapped(mask_mod, sizes=score.shape)  # type: ignore[arg-type]
    if blocks is not None:
        assert mods.block_mask is not None
        rows, columns = mods.block_mask.BLOCK_SIZE
        class_ = blocks.repeat_interleave(rows, 2).repeat_interleave(columns, 3)[:, :, : score.shape[2], : score.shape[3]]
        mask = (class_ == 2) | ((class_ == 1) & mask)
    return torch.where(mask, result, -torch.inf)


def compare(result: np.ndarray, reference: torch.Tensor, close: float) -> None:
    wanted = reference.numpy()
    assert result.dtype == wanted.dtype
    np.testing.assert_array_equal(np.isneginf(result), np.isneginf(wanted))
    finite = np.isfinite(wanted)
    np.testing.assert_allclose(result[finite], wanted[finite], rtol=close, atol=close)
    np.testing.assert_array_equal(np.isnan(result), np.isnan(wanted))


@pytest.mark.parametrize("precision", ["f32", "f64"])
@pytest.mark.parametrize("name", ENTRIES)
def test_zoo(name: str, precision: str):
    entry = ENTRIES[name]
    sizes = entry.sizes
    mods = entry.mods()
    blocks, options = None, {}
    if mods.block_mask is not None:
        found = read_block_mask(mods.block_mask, sizes.batch, sizes.heads, sizes.queries, sizes.keys)
        blocks = found.classes
        options = {"block_size": found.block_size}
    module, tensors, numbers = converted(mods, precision, **options)
    dtype = torch.float64 if precision == "f64" else torch.float32
    shape = (sizes.batch, sizes.heads, sizes.queries, sizes.keys)
    score = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=dtype)
    result, faults = regions_scores(module, tensors, numbers, score, sizes.kv_heads, blocks)
    reference = expected(mods, score, blocks)
    compare(result, reference, 2e-5)
    dead = reference.numpy() == -np.inf
    for fault in faults:  # out of range where torch would clamp or not look: only on pairs that are not checked
        assert fault.checked == "kept", fault
        wrong = np.broadcast_to(fault.where, (shape[0], sizes.kv_heads, shape[1] // sizes.kv_heads, *shape[2:])).reshape(shape)
        assert not (wrong & ~dead).any(), fault.name


@settings(max_examples=40)
@given(score_mods(), mask_mods())
def test_random_mods(score_mod: Any, mask_mod: Any):
    mods = Mods(score_mod.function(), mask_mod.function())
    module, tensors, numbers = converted(mods)
    score = torch.randn(2, 2, 11, 13, generator=torch.Generator().manual_seed(5))
    result, faults = regions_scores(module, tensors, numbers, score, 1)
    compare(result, expected(mods, score), 1e-2)
    assert not faults


@needs_tool("iree-opt")
def test_iree_accepts_the_zoo():
    """IREE's parser and verifier take the generic text of every entry, plain and with lse and max."""
    modules = []
    for name, entry in ENTRIES.items():
        mods = entry.mods()
        options: dict = {}
        if mods.block_mask is not None:
            options["block_size"] = tuple(mods.block_mask.BLOCK_SIZE)
        for statistics in (False, True):
            module, _, _ = converted(mods, "bf16", return_lse=statistics, return_max=statistics, **options)
            text = io.StringIO()
            Printer(text, print_generic_format=True).print_op(module)
            modules.append((name, text.getvalue()))
    command = [tool("iree-opt"), "--allow-unregistered-dialect", "--split-input-file", "-o", "/dev/null", "-"]
    text = "\n// -----\n".join(text for _, text in modules)
    done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)  # type: ignore[arg-type]
    assert done.returncode == 0, done.stderr[:4000]
