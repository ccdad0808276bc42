"""Attention modules by chance: attnc's native code, the dense formula, and IREE on what attnc writes out for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import attnc
from attention_modules import AttentionModule, close, exact, judge, modules
from attnc.graph_pipeline import for_iree
from attnc.mlir_text import parse_module
from needs import needs_tool, tool

SETTINGS = settings(deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck])  # pyright: ignore[reportArgumentType]


@given(modules())
@settings(SETTINGS, max_examples=20)
def test_native_code_is_right(module: AttentionModule):
    text = module.text()
    inputs = module.inputs()
    judge(text, inputs, attnc.compile(text)(*inputs), module.out_element or module.element)


FLAGS = ("--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu", "--iree-llvmcpu-target-cpu=host")


def run_tool(name: str, *words: str, directory: Path) -> None:
    done = subprocess.run([str(tool(name)), *words], cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]


def run_iree(text: str, inputs: list[np.ndarray], directory: Path) -> np.ndarray:
    """The module by iree-compile and iree-run-module."""
    module = parse_module(text)
    for_iree(module)
    (directory / "m.mlir").write_text(str(module))
    run_tool("iree-compile", "m.mlir", *FLAGS, "-o", "m.vmfb", directory=directory)
    words = []
    for n, array in enumerate(inputs):
        np.save(directory / f"i{n}.npy", array)
        words.append(f"--input=@i{n}.npy")
    run = ["--module=m.vmfb", "--device=local-sync", "--function=main", *words, "--output=@o.npy"]
    run_tool("iree-run-module", *run, directory=directory)
    return np.load(directory / "o.npy")


@needs_tool("iree-compile")
@needs_tool("iree-run-module")
def test_iree_agrees_on_what_is_written_for_it(tmp_path: Path):
    @given(modules(simple=True))
    @settings(SETTINGS, max_examples=5)
    def agree(module: AttentionModule):
        text, inputs = module.text(), module.inputs()
        close(run_iree(text, inputs, tmp_path), exact(text, inputs)[0], module.element, text, factor=40)

    agree()


@needs_tool("iree-compile")
@needs_tool("iree-run-module")
@pytest.mark.parametrize("element", ["f32", "f16"])
def test_iree_and_attnc_on_an_operation_that_iree_gets_right(element: str, tmp_path: Path):
    sizes = {"b": 2, "m": 33, "e": 16, "k": 50, "n": 24}
    module = AttentionModule(sizes, "bme", "bke", "bkn", "bmn", element=element)
    text, inputs = module.text(), module.inputs()
    assert "iree_linalg_ext.attention" in str(parse_module(text))
    judge(text, inputs, attnc.compile(text)(*inputs), element)
    close(run_iree(text, inputs, tmp_path), attnc.compile(text)(*inputs), element, factor=40)
