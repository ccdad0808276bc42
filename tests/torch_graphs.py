"""Exported torch programs through the passes up to linalg, run by the interpreter, against torch eager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from xdsl.dialects.builtin import ModuleOp

from attention_text import parse
from attnc.capture.exported import Exported, export_module, from_exported
from attnc.mlir_text import parse_module, print_module
from attnc.program_text import from_text
from attnc.transforms import convert_torch_to_linalg, simplify_torch
from linalg_interpreter import run_function, to_numpy


class Function(nn.Module):
    """A module of a plain function."""

    def __init__(self, function: Any):
        super().__init__()
        self.function = function

    def forward(self, *arguments: Any) -> Any:
        return self.function(*arguments)


def exported(model: Any, inputs: Sequence[Any], dynamic_shapes: Any = None) -> Exported:
    """The stage "torch" of a module or function; its text reads back as the same text."""
    module = model if isinstance(model, nn.Module) else Function(model)
    if dynamic_shapes is not None and not isinstance(model, nn.Module):
        dynamic_shapes = (tuple(dynamic_shapes),)
    program = export_module(module, inputs, dynamic_shapes)
    result = from_exported(program, from_text)
    result.module.verify()
    text = str(result.module)
    assert str(parse(text)) == text
    return result


def to_linalg(text: str) -> ModuleOp:
    """The linalg stage of a module's text; its own text reads back as the same text."""
    module = parse_module(text)
    simplify_torch.run(module)
    convert_torch_to_linalg.run(module)
    module.verify()
    printed = print_module(module)
    again = parse_module(printed)
    assert print_module(again) == printed
    left = {op.name for op in again.walk() if op.name.startswith("torch.")}
    assert not left, left
    return again


def interpreted(program: Exported, linalg: ModuleOp, inputs: Sequence[Any]) -> list[Any]:
    """The flat results of a call."""
    arguments = [to_numpy(x) for x in (*program.parameters.values(), *program.flatten(*inputs))]
    results = run_function(linalg, "forward", arguments)
    return [results[value] if kind == "result" else value for kind, value in program.results]


def check(
    model: Any, inputs: Sequence[Any], dynamic_shapes: Any = None, others: Sequence[Sequence[Any]] = (), tolerance: float = 4.0
) -> ModuleOp:
    """Compares with eager on `inputs` and, for programs with dynamic sizes, on `others`. Floats may differ by `tolerance` eps,
    relative to the largest value. Returns the linalg stage."""
    program = exported(model, inputs, dynamic_shapes)
    linalg = to_linalg(str(program.module))
    for call in (inputs, *others):
        with torch.no_grad():
            expected = pytree.tree_leaves(model(*call))
        found = interpreted(program, linalg, call)
        assert len(found) == len(expected)
        for result, wanted in zip(found, expected, strict=True):
            _compare(result, wanted, tolerance)
    return linalg


def _compare(result: Any, wanted: Any, tolerance: float) -> None:
    if not isinstance(wanted, Tensor):
        assert result == wanted
        return
    assert tuple(result.shape) == tuple(wanted.shape), (result.shape, wanted.shape)
    if not wanted.is_floating_point():
        expected = to_numpy(wanted)
        np.testing.assert_array_equal(result.view(np.uint8) if expected.dtype == np.uint8 else result, expected)
        return
    reference = wanted.double().numpy()
    finite = np.isfinite(reference)
    np.testing.assert_array_equal(np.where(finite, 0, reference), np.where(finite, 0, np.asarray(result, np.float64)))
    largest = max(1.0, float(np.abs(reference[finite]).max(initial=0)))
    np.testing.assert_allclose(
        np.where(finite, result, 0),
        np.where(finite, reference, 0),
        rtol=0,
        atol=tolerance * torch.finfo(wanted.dtype).eps * largest,
    )
