"""attnc in all the ways torch has of running a function: one table of cells, each against the oracle."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attnc
import oracle
from attnc import programs
from needs import needs_tool
from torch_cells import KEYS, QUERIES, ROWS, Plain, Row, with_dtype

NAMES = list(ROWS)
OTHER_LENGTHS = ((50, 64), (21, 90))


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def correct(row: Row, inputs: tuple[Tensor, ...], out: Tensor, name: str = "", dtype: torch.dtype = torch.float32) -> None:
    oracle.check(with_dtype(row.problem(*inputs), dtype), out, name=name)


def lengths(row: Row) -> list[tuple[int, int]]:
    return [(QUERIES, KEYS)] if row.fixed_lengths else [(QUERIES, KEYS), *OTHER_LENGTHS]


@pytest.mark.parametrize("name", NAMES)
def test_eager(name: str):
    row = ROWS[name]()
    inputs = row.inputs()
    correct(row, inputs, row(*inputs))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=needs_tool("g++"))])
@pytest.mark.parametrize("name", NAMES)
def test_compiled_in_one_graph(name: str, backend: str):
    row = ROWS[name]()
    inputs = row.inputs()
    compiled = torch.compile(row, backend=backend, fullgraph=True)
    with torch.no_grad():
        correct(row, inputs, compiled(*inputs))


@pytest.mark.parametrize("name", NAMES)
def test_dynamic(name: str):
    row = ROWS[name]()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(row, backend=counter, fullgraph=True, dynamic=True)
    counts = []
    for place, (queries, keys) in enumerate(lengths(row)):
        inputs = row.inputs(queries, keys, place)
        correct(row, inputs, compiled(*inputs), f"{queries} x {keys}")
        counts.append((counter.frame_count, programs.compiled))
    assert len(set(counts)) == 1, f"another length made dynamo or attnc compile again: {counts}"


def export(row: Row, strict: bool) -> torch.export.ExportedProgram:
    shapes = None
    if not row.fixed_lengths:
        shapes = row.dims(torch.export.Dim("queries", max=4096), torch.export.Dim("keys", max=4096))
    return torch.export.export(row, row.inputs(), dynamic_shapes=shapes, strict=strict)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
@pytest.mark.parametrize("name", NAMES)
def test_exported(name: str, strict: bool):
    row = ROWS[name]()
    program = export(row, strict)
    assert [node.target for node in program.graph.nodes if "attnc" in str(node.target)] == [torch.ops.attnc.attention.default]
    for queries, keys in lengths(row):
        inputs = row.inputs(queries, keys, 1)
        correct(row, inputs, program.module()(*inputs), f"{queries} x {keys}")
        correct(row, inputs, program.run_decompositions().module()(*inputs), "decomposed")


class WithParameters(nn.Module):
    """As models are: what attention sees requires grad while grad mode is on."""

    def __init__(self):
        super().__init__()
        self.linear, self.bias = nn.Linear(16, 16), nn.Parameter(torch.randn(2))

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        query = self.linear(query)
        out = attnc.flex_attention(query, key, key, lambda s, b, h, q, k: s + self.bias[h])
        return out + attnc.scaled_dot_product_attention(query, key, key)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_a_model_with_parameters_is_exported_in_grad_mode(strict: bool):
    model = WithParameters().eval()
    inputs = Plain().inputs()[:2]
    module = torch.export.export(model, inputs, strict=strict).module()
    out, expected = module(*inputs), model(*inputs)
    assert torch.allclose(out, expected, atol=1e-5)
    names = [name for name, _ in model.named_parameters()]
    got = torch.autograd.grad(out.square().sum(), [module.get_parameter(name) for name in names])
    wanted = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    assert all(torch.allclose(mine, other, atol=1e-4) for mine, other in zip(got, wanted, strict=True))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[tuple[Tensor, ...], Tensor]]]:
    """Of each row, exported and saved here and run in another process: inputs and outputs."""
    directory: Path = tmp_path_factory.mktemp("exported")
    calls: dict[str, list[tuple[Tensor, ...]]] = {}
    for number, (name, kind) in enumerate(ROWS.items()):
        row = kind()
        calls[name] = [row.inputs(queries, keys, 2) for queries, keys in lengths(row)]
        torch.export.save(export(row, strict=bool(number % 2)), directory / f"{number}.pt2")
        torch.save(calls[name], directory / f"{number}.inputs")
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(here / "torch_cells.py"), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    outputs = [torch.load(directory / f"{number}.outputs") for number in range(len(NAMES))]
    return {name: list(zip(calls[name], outputs[number], strict=True)) for number, name in enumerate(NAMES)}


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded_in_another_process(name: str, loaded: dict[str, Any]):
    row = ROWS[name]()
    for inputs, out in loaded[name]:
        correct(row, inputs, out)


@pytest.mark.parametrize("name", NAMES)
def test_vmap(name: str):
    row = ROWS[name]()
    several = [row.inputs(seed=seed) for seed in range(3)]
    out = torch.vmap(row)(*(torch.stack(tensors) for tensors in zip(*several, strict=True)))
    for inputs, one in zip(several, out, strict=True):
        correct(row, inputs, one)


@pytest.mark.parametrize("name", NAMES)
def test_autocast(name: str):
    row = ROWS[name]()
    inputs = row.inputs()
    compiled = torch.compile(row, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for way in (row, compiled):
            correct(row, inputs, way(*inputs), dtype=torch.bfloat16)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("name", NAMES)
def test_checkpoint(name: str, reentrant: bool):
    row = ROWS[name]()
    inputs = row.inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is nothing to differentiate yet
        correct(row, inputs, checkpoint(row, *inputs, use_reentrant=reentrant))  # type: ignore[arg-type]
    if not reentrant:
        compiled = torch.compile(
            lambda *tensors: checkpoint(row, *tensors, use_reentrant=False), backend="aot_eager", fullgraph=True
        )
        correct(row, inputs, compiled(*inputs))


@pytest.mark.parametrize("name", NAMES)
def test_inference_mode(name: str):
    row = ROWS[name]()
    with torch.inference_mode():
        inputs = row.inputs()
        correct(row, inputs, row(*inputs))
        correct(row, inputs, torch.compile(row, backend="aot_eager", fullgraph=True)(*inputs))
