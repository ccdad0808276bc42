"""attnc.compile of exported programs, modules and torch-mlir's text: native results against eager."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.functional import scaled_dot_product_attention

import attnc
from attnc.cli import commands
from attnc.errors import ArgumentsError, AttncError, LoweringError
from test_convert_torch_to_linalg_attention import Flex, Raw, heads, normal, raw_text
from torch_graphs import Function

LENGTH = Dim("length", min=3, max=200)


class Block(nn.Module):
    """Attention as a model has it: packed input, rotary embedding, grouped heads, a mask, an output gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(normal(64))
        self.register_buffer("cos", normal(200, 8))

    def forward(self, packed: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = packed.shape
        query, key, value = packed.split([64, 16, 16], -1)
        query = query.view(batch, length, 8, 8).transpose(1, 2)
        key, value = (x.view(batch, length, 2, 8).transpose(1, 2) for x in (key, value))
        cos = self.cos[:length]  # type: ignore[index]
        query, key = (x * cos + torch.cat([-x[..., 4:], x[..., :4]], -1) for x in (query, key))
        out = scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
        return out.transpose(1, 2).reshape(batch, length, -1) * torch.sigmoid(self.gate)


def block_inputs(length: int) -> tuple[Tensor, Tensor]:
    mask = torch.rand(2, 1, length, length) > 0.3
    mask[..., 0] = True
    return normal(2, length, 96), mask


def test_a_module_with_open_lengths_on_tensors_and_arrays():
    model = Block().eval()
    compiled = attnc.compile(model, block_inputs(11), dynamic_shapes=({1: LENGTH}, {2: LENGTH, 3: LENGTH}))
    assert compiled.kernels.count("attention") == 1
    for length in (11, 37, 3):
        inputs = block_inputs(length)
        with torch.no_grad():
            expected = model(*inputs)
        torch.testing.assert_close(compiled(*inputs), expected, atol=2e-5, rtol=0)
        arrays = compiled(*(x.numpy() for x in inputs))
        assert isinstance(arrays, np.ndarray)
        np.testing.assert_array_equal(arrays, compiled(*inputs).numpy())


def test_parameters_are_seen_as_they_are_now():
    model = Block().eval()
    inputs = block_inputs(7)
    compiled: Any = attnc.compile(model, inputs)
    before = compiled(*inputs)
    with torch.no_grad():
        compiled.parameters["p_gate"].fill_(-200.0)
    assert compiled(*inputs).abs().max() == 0 and before.abs().max() > 0


class Nested(nn.Module):
    """Nested arguments and results, a number and a flag among them."""

    def forward(self, tensors: dict[str, Tensor], factor: float, flag: bool) -> dict[str, Any]:
        x, y = tensors["x"], tensors["y"]
        return {"both": (x + y * factor, [x.shape[0], flag]), "bytes": (x > 0).to(torch.uint8) + 250}


def test_arguments_and_results_are_nested_as_they_were():
    tensors = {"x": normal(3, 4), "y": normal(4)}
    compiled = attnc.compile(Nested(), (tensors, 2.0, True))
    result = compiled(tensors, 2.0, True)
    torch.testing.assert_close(result["both"][0], tensors["x"] + tensors["y"] * 2)
    assert result["both"][1] == [3, True]
    assert torch.equal(result["bytes"], (tensors["x"] > 0).to(torch.uint8) + 250)
    with pytest.raises(ArgumentsError, match="exported for True"):
        compiled(tensors, 2.0, False)
    with pytest.raises(ArgumentsError, match="nested otherwise") as raised:
        compiled(tensors["x"], 2.0, True)
    assert "exported: (_, _, _)\n  remedy: it was exported for ({'x': _, 'y': _}, _, _)" in str(raised.value)
    with pytest.raises(ArgumentsError, match="takes 3 arguments by position, not 2") as raised:
        compiled(tensors, 2.0)
    assert "TreeSpec" not in str(raised.value)


@pytest.mark.parametrize("lse", [False, True])
def test_flex_attention(lse: bool):
    model, inputs = Flex(lse=lse), heads(kv_heads=2)
    result, expected = attnc.compile(model, inputs)(*inputs), model(*inputs)
    torch.testing.assert_close(result, expected, atol=2e-5, rtol=0)


def test_text_of_torch_mlir():
    model = Raw()
    inputs = (normal(2, 9, 32), normal(2, 2, 10, 8), normal(2, 2, 10, 8))
    compiled = attnc.compile(raw_text(model, inputs))
    assert compiled.kernels.count("attention") == 1
    for result, expected in zip(compiled(*inputs), model(*inputs), strict=True):
        torch.testing.assert_close(result, expected, atol=2e-5, rtol=0)


def test_reads_by_index_are_checked():
    x, positions = normal(2, 5), torch.tensor([0, 4, -5])
    compiled = attnc.compile(Function(lambda x, i: x[:, i]), (x, positions))
    assert torch.equal(compiled(x, positions), x[:, positions])
    with pytest.raises(IndexError, match="out of range"):
        compiled(x, torch.tensor([0, 5, 1]))


def test_the_command_line_reads_pt2(tmp_path: Path):
    path = tmp_path / "block.pt2"
    torch.export.save(torch.export.export(Block().eval(), block_inputs(7)), path)
    for command in (["compile", str(path)], ["opt", str(path), "-p", "simplify-torch"]):
        done = CliRunner().invoke(commands, command)
        assert done.exit_code == 0, done.output
        assert "func.func @forward" in done.output
    done = CliRunner().invoke(commands, ["run", str(path)])
    assert done.exit_code == 1 and "0 inputs given" in done.output


def test_the_page_says_what_is_so(tmp_path: Path):
    page = (Path(__file__).parent.parent / "docs" / "programs.md").read_text()
    source = tmp_path / "programs.py"  # a file, so that errors can show its lines
    source.write_text("\n".join(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)))
    runpy.run_path(str(source))


EXPORTED_FIRST = """
import torch
import attnc
from torch import nn


class Attention(nn.Module):
    def forward(self, q):
        return attnc.flex_attention(q, q, q, lambda s, b, h, i, j: s + (j - i) * 0.5)


q = torch.randn(1, 2, 5, 8)
torch.export.export(Attention(), (q,))  # the first to import what attention needs
distance = torch.arange(5) - torch.arange(5)[:, None]
torch.testing.assert_close(Attention()(q), (q @ q.mT / 8**0.5 + distance * 0.5).softmax(-1) @ q)
"""


def test_an_eager_call_after_an_export():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", EXPORTED_FIRST], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "model, inputs, message",
    [
        (nn.Linear(4, 4), (normal(3, 4),), "matri"),
        (Function(lambda x: x.sort().values), (normal(3),), "aten.sort"),
        (Function(lambda x: x.add_(1)), (normal(3),), "writes to"),
    ],
)
def test_what_is_refused(model: nn.Module, inputs: Any, message: str):
    with pytest.raises((AttncError, LoweringError), match=message) as caught:
        attnc.compile(model, inputs)
    assert caught.value.remedy


def test_a_module_needs_inputs():
    with pytest.raises(ArgumentsError, match="example inputs"):
        attnc.compile(nn.Linear(4, 4))
