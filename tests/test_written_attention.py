"""Attention as models write it out ends as one attention operation, with the numbers of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from xdsl.dialects import linalg
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.linalg.attrs import IteratorType

from attention_text import TARGET
from attnc.analysis.elements import is_layout
from attnc.transforms import fold_into_attention, generalize_linalg, raise_attention
from torch_graphs import exported, interpreted, to_linalg
from written_attention import FORMS, Form


def raised(module: ModuleOp) -> ModuleOp:
    for pass_ in (generalize_linalg, raise_attention, fold_into_attention):
        pass_.run(module, TARGET)
        module.verify()
    return module


def assert_one_attention(module: ModuleOp, elementwise: int) -> None:
    """One attention, no generic that sums or rearranges, and no more elementwise ones than allowed."""
    text = str(module)
    generics = [op for op in module.walk() if isinstance(op, linalg.GenericOp)]
    assert text.count("iree_linalg_ext.attention") + text.count("iree_linalg_ext.online_attention") == 1, text
    assert not any(kind.data == IteratorType.REDUCTION for op in generics for kind in op.iterator_types), text
    assert not any(is_layout(op) for op in generics), text
    assert len(generics) <= elementwise, text


def in_double(form: Form, inputs: tuple[Any, ...]) -> list[torch.Tensor]:
    """The form on f64 tensors, those that it makes included."""
    torch.set_default_dtype(torch.float64)
    try:
        wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
        return pytree.tree_leaves(form.function(*wide))
    finally:
        torch.set_default_dtype(torch.float32)


def error_of(found: Any, wanted: torch.Tensor) -> float:
    return float((torch.as_tensor(found).double() - wanted.double()).abs().max())


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_it_ends_as_one_attention(form: Form):
    inputs = form.inputs()
    program = exported(form.function, inputs)
    module = raised(to_linalg(str(program.module)))
    assert_one_attention(module, form.elementwise)
    eager = pytree.tree_leaves(form.function(*inputs))
    exact = in_double(form, inputs)
    for result, wanted, reference in zip(interpreted(program, module, inputs), eager, exact, strict=True):
        if error_of(wanted, reference) > 1e-2 or not reference.isfinite().all():
            reference = wanted  # its mask is another number in double precision
        limit = 1.5 * error_of(wanted, reference) + 4 * torch.finfo(wanted.dtype).eps * max(1.0, float(reference.abs().max()))
        assert error_of(result, reference) <= limit
