"""The examples of whole programs run, at small sizes, and say what they are to show."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import attnc
from attnc import graph_pipeline
from attnc.mlir_text import parse_module
from attnc.target import Target

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def fusion() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "transpose_fusion.py"))


def run(name: str, *words: str) -> str:
    done = subprocess.run([sys.executable, str(EXAMPLES / name), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_no_transpose_is_left(fusion: dict[str, Any]):
    exported = fusion["from_exported"](
        fusion["export_module"](fusion["SelfAttention"](), (*[torch.zeros(2, 256, 640).half()] * 3, torch.tensor(0.125)))
    )
    for text in (str(exported.module), fusion["iree_text"](256)):
        assert len(re.findall(r"transpose|\bpermute\b", text)) >= 5
        after = fusion["fused"](text)
        assert after.count("iree_linalg_ext.attention") == 1
        assert "linalg.transpose" not in after and "linalg.generic" not in after
        module = graph_pipeline.lower_graph(parse_module(text), Target.host())
        assert str(module).count("func.call") == 1


def test_one_kernel_and_no_memory_besides(fusion: dict[str, Any]):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 256, 640, generator=generator).half() for _ in range(3)]
    model = fusion["SelfAttention"]()
    scale = torch.tensor(0.125)
    from_torch, from_text = attnc.compile(model, (*inputs, scale)), attnc.compile(fusion["iree_text"](256))
    assert from_torch.kernels == from_text.kernels == ("attention",)
    assert from_torch.temporary_bytes == from_text.temporary_bytes == 0
    right = model(*(x.double() for x in inputs), scale.double())
    allowed = 1.5 * (model(*inputs, scale).double() - right).abs().max() + 4 * 2**-10
    for out in (from_torch(*inputs, scale), from_text(*inputs, 0.125)):
        assert out.shape == (2, 256, 640) and out.is_contiguous()
        assert (out.double() - right).abs().max() <= allowed


def test_transpose_fusion_runs():
    out = run("transpose_fusion.py", "--quick")
    assert "kernels: attention from PyTorch; attention from MLIR" in out
    assert "memory between kernels: 0 and 0 bytes" in out


def test_from_iree_runs():
    out = run("from_iree.py")
    errors = [float(number) for number in re.findall(r"largest error (\S+)", out)]
    assert len(errors) == 5 and max(errors) < 1e-5
    assert out.count("kernels: attention\n") == 5 and "func.call @attention_0" in out
