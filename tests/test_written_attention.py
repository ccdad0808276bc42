"""Attention as models write it out ends as one attention operation, with the numbers of torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention
from torch.utils import _pytree as pytree
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.linalg.attrs import IteratorType
from xdsl.dialects.linalg.ops import GenericOp

import attnc
from attention_text import TARGET
from attnc.analysis.elements import is_layout
from attnc.capture.exported import Exported
from attnc.transforms import fold_into_attention, generalize_linalg, raise_attention
from torch_graphs import exported, interpreted, to_linalg
from written_attention import (
    FORMS,
    OPEN_FORMS,
    B,
    E,
    Form,
    H,
    S,
    different,
    merged,
    normal,
    padding,
    projected,
    split,
)


def raised(module: ModuleOp) -> ModuleOp:
    for pass_ in (generalize_linalg, raise_attention, fold_into_attention):
        pass_.run(module, TARGET)
        module.verify()
    return module


def assert_one_attention(module: ModuleOp, elementwise: int) -> None:
    """One attention, no generic that sums or rearranges, and no more elementwise ones than allowed."""
    text = str(module)
    generics = [op for op in module.walk() if isinstance(op, GenericOp)]
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


def native(program: Exported, inputs: Sequence[Any]) -> list[Any]:
    """The flat results of the compiled program."""
    compiled = attnc.compile(str(program.module))
    assert compiled.kernels.count("attention") == 1
    results = compiled(*program.parameters.values(), *program.flatten(*inputs))
    results = results if isinstance(results, tuple | list) else (results,)
    return [results[value] if kind == "result" else value for kind, value in program.results]


def assert_accurate(found: Any, eager: torch.Tensor, exact: torch.Tensor) -> None:
    """As accurate as eager, but for a factor; `exact` is in f64."""
    if error_of(eager, exact) > 1e-2 or not exact.isfinite().all():
        exact = eager  # a mask of the least number is another number in f64
    limit = 1.5 * error_of(eager, exact) + 4 * torch.finfo(eager.dtype).eps * max(1.0, float(exact.abs().max()))
    assert error_of(found, exact) <= limit


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_it_ends_as_one_attention(form: Form):
    inputs = form.inputs()
    program = exported(form.function, inputs)
    assert_one_attention(raised(to_linalg(str(program.module))), form.elementwise)
    eager, exact = pytree.tree_leaves(form.function(*inputs)), in_double(form, inputs)
    for result, wanted, reference in zip(native(program, inputs), eager, exact, strict=True):
        assert_accurate(result, wanted, reference)


BATCH, LENGTH = Dim("batch", min=2, max=64), Dim("length", min=2, max=4096)
ROWS = {0: BATCH, 1: LENGTH}
OPEN = {
    "bert": (ROWS,) * 4,
    "clip_of_any_size": (ROWS,) * 3,
    "llama_of_any_size": ({0: BATCH, 2: LENGTH},) * 3,
    "gpt_oss_of_any_size": ({0: BATCH, 2: LENGTH},) * 3 + ({},),
    "vit_of_any_size": (ROWS,),
}


@pytest.mark.parametrize("form", OPEN_FORMS, ids=lambda form: form.name)
def test_open_sizes(form: Form):
    """Batch and lengths known at the call: the same one attention for all of them."""
    program = exported(form.function, form.inputs(), OPEN[form.name])
    module = raised(to_linalg(str(program.module)))
    assert_one_attention(module, form.elementwise)
    compiled = attnc.compile(str(program.module))
    for batch, length in ((2, 7), (3, 40)):
        inputs = tuple(resized(x, batch, length, OPEN[form.name][place]) for place, x in enumerate(form.inputs()))
        (found,) = interpreted(program, module, inputs)
        wanted = form.function(*inputs)
        exact = in_double(form, inputs)[0]
        assert_accurate(found, wanted, exact)
        assert_accurate(compiled(*program.parameters.values(), *inputs), wanted, exact)


def resized(x: torch.Tensor, batch: int, length: int, dims: dict[int, Any]) -> torch.Tensor:
    shape = [batch if dims.get(d) is BATCH else length if dims.get(d) is LENGTH else size for d, size in enumerate(x.shape)]
    x = x.repeat([-(-new // old) for new, old in zip(shape, x.shape, strict=True)])
    return x[tuple(slice(size) for size in shape)].clone()


def test_the_example_of_the_documentation_is_one_kernel():
    page = (Path(__file__).parent.parent / "docs" / "written_attention.md").read_text()
    scope: dict[str, Any] = {}
    exec(
        compile(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0], "written_attention.md", "exec"), scope
    )
    assert scope["compiled"].kernels == ("attention",)
    torch.testing.assert_close(scope["out"], scope["SelfAttention"]()(scope["packed"]), atol=1e-5, rtol=1e-5)


def causal_of_packed(q, k, v):
    return merged(functional.scaled_dot_product_attention(split(q), split(k), split(v), is_causal=True))


def grouped(q, k, v):
    return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).reshape(B, S, -1)


def repeated_and_masked(q, k, v, mask):
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    hidden = torch.zeros(B, 1, 1, S).masked_fill((mask == 0)[:, None, None, :], float("-inf"))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=hidden.expand(B, H, S, S))
    return out.transpose(1, 2).reshape(B, S, -1)


def boolean_mask(q, k, v, mask):
    kept = (mask != 0)[:, None, None, :] & torch.ones(S, S, dtype=torch.bool).tril()
    return merged(functional.scaled_dot_product_attention(split(q) * 2.0, split(k), split(v), attn_mask=kept, scale=0.1))


def flex(q, k, v):
    return merged(flex_attention(split(q), split(k), split(v), lambda s, b, h, i, j: s + (j - i) * 0.1))


GROUPED = (normal(B, H, S, E), *different(2, B, 2, S, E))


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (causal_of_packed, projected()),
        (grouped, GROUPED),
        (repeated_and_masked, (*GROUPED, padding())),
        (boolean_mask, (*projected(), padding())),
        (flex, projected()),
    ],
)
def test_what_stands_around_torchs_own_attention(function: Any, inputs: tuple[Any, ...]):
    """scaled_dot_product_attention and flex_attention take in their surroundings in the same way."""
    program = exported(function, inputs)
    module = raised(to_linalg(str(program.module)))
    assert_one_attention(module, 0)
    (found,) = interpreted(program, module, inputs)
    torch.testing.assert_close(torch.as_tensor(found), function(*inputs), atol=2e-6, rtol=1e-5)


def flex_with_lse(q, k, v):
    out, lse = flex_attention(split(q), split(k), split(v), return_lse=True)
    return merged(out), lse


def test_a_transposed_result_beside_its_log_sum_exp():
    """The division that ends the running attention writes the final layout."""
    inputs = projected()
    program = exported(flex_with_lse, inputs)
    module = raised(to_linalg(str(program.module)))
    generics = [op for op in module.walk() if isinstance(op, GenericOp)]
    assert not any(is_layout(op) for op in generics), module
    out, lse = flex_with_lse(*inputs)
    for found in (interpreted(program, module, inputs), native(program, inputs)):
        torch.testing.assert_close(torch.as_tensor(found[0]), out, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(torch.as_tensor(found[1]), lse, atol=2e-6, rtol=1e-5)


class ZeroWhereNan(torch.nn.Module):
    def forward(self, q, k, v):
        scores = (q @ k.mT * 0.3).masked_fill(~torch.ones(S, S, dtype=torch.bool).tril(), -torch.inf)
        return torch.nan_to_num(scores.softmax(-1)) @ v


def test_nan_to_num_after_the_softmax_with_nan_and_infinity_in_the_inputs():
    """What is no dead row but NaN for another reason is 0 as well; NaN in a live value is NaN."""
    q, k, v = (x.clone() for x in different(3, B, H, S, E))
    module = ZeroWhereNan()
    compiled = attnc.compile(module, (q, k, v))
    assert compiled.kernels == ("attention",)
    q[0, 0, 2, 1] = torch.nan
    k[0, 1, 4, 0] = torch.inf
    k[1, 1, 3] = -torch.inf
    v[1, 2, 0, 1] = torch.nan
    found, wanted = compiled(q, k, v), module(q, k, v)
    assert (found[0, 0, 2] == 0).all() and found[1, 2, 3, 1].isnan()
    torch.testing.assert_close(found, wanted, equal_nan=True, atol=2e-6, rtol=1e-5)
