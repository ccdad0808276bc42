"""The operator `attnc::attention`: its text, its fake results, who sees it, and that eager calls do not pay for it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

import attnc
from attnc import errors, programs, torch_op
from attnc.capture.capture import capture
from attnc.integrations.operator import out_strides
from attnc.program_text import Program, from_text, to_text
from attnc.runtime.attention import output_strides
from zoo import ENTRIES, problem

GENERATOR = torch.Generator().manual_seed(0)
TEXT = to_text(Program())


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


Q, K, V = normal(2, 2, 17, 16), normal(2, 2, 21, 16), normal(2, 2, 21, 16)
BIAS = normal(17, 21)


def bias_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + BIAS[q, k]


# -- the text -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ENTRIES)
def test_text_says_all_of_a_program(name: str):
    p = problem(name)
    program = Program(capture(p.score_mod, p.mask_mod).record, True, False, (64, 32), True)
    text = to_text(program)
    assert from_text(text) == program and to_text(from_text(text)) == text
    assert __file__.rpartition("/")[0] not in text, "the text holds a path of the user's"


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", TEXT[:-9], TEXT.replace('"attnc":1', '"attnc":99'), TEXT.replace("null", "3")],
)
def test_text_that_cannot_be_read(text: str):
    with pytest.raises(errors.ProgramTextError, match="remedy"):
        torch_op.attention(Q, K, V, [], None, None, None, [], text)


def test_operands_that_do_not_fit_the_program():
    bias_record = capture(bias_mod).record
    with_bias = to_text(Program(bias_record))
    reduced = capture(lambda s, b, h, q, k: s + (BIAS[q] * 2).sum()).record
    numbered = replace(Program(), record=capture(lambda s, b, h, q, k, n=1.5: s * n).record)
    cases: list[tuple[type[Exception], list[Tensor], Any, str]] = [
        (errors.ArgumentsError, [], None, with_bias),
        (errors.DtypeError, [BIAS.double()], None, with_bias),
        (errors.ShapeError, [BIAS[0]], None, with_bias),
        (errors.ShapeError, [BIAS[:, 1:]], None, to_text(Program(reduced))),
        (errors.ArgumentsError, [], None, to_text(numbered)),
        (errors.ArgumentsError, [], [1.0, 2.0], to_text(numbered)),
        (errors.CaptureIndexError, [BIAS[1:]], None, with_bias),
    ]
    for kind, captures, floats, text in cases:
        with pytest.raises(kind, match="remedy"):
            torch_op.attention(Q, K, V, captures, None, floats, None, [], text)
    with pytest.raises(errors.DtypeError, match="traced on float32"):
        torch_op.attention(Q.double(), K.double(), V.double(), [BIAS], None, None, None, [], with_bias)
    with pytest.raises(errors.ArgumentsError, match="block lists"):
        torch_op.attention(Q, K, V, [], None, None, None, [], to_text(Program(block_size=(8, 8))))


def test_one_text_serves_every_layout_and_dtype():
    text = to_text(Program(capture(bias_mod).record))
    expected = attnc.flex_attention(Q, K, V, bias_mod)
    for bias in (BIAS, BIAS.t().contiguous().t(), normal(1, 1).expand(17, 21), BIAS.repeat_interleave(2, 1)[:, ::2]):
        out = torch_op.attention(Q, K, V, [bias], None, None, None, [], text)[0]
        wanted = attnc.flex_attention(Q, K, V, lambda s, b, h, q, k, bias=bias: s + bias[q, k])
        assert (out - wanted).abs().max() < 1e-5
    half = torch_op.attention(Q.half(), K.half(), V.half(), [BIAS], None, None, None, [], text)[0]
    assert half.dtype == torch.float16 and (half - expected).abs().max() < 1e-2


# -- results ------------------------------------------------------------------------------------------------------------------
LAYOUTS = {
    "contiguous": normal(2, 3, 5, 16),
    "bshd": normal(2, 5, 3, 16).transpose(1, 2),
    "bhds": normal(2, 3, 16, 5).transpose(2, 3),
    "last dim of stride 2": normal(2, 3, 5, 32)[..., ::2],
    "expanded": normal(1, 3, 5, 16).expand(2, -1, -1, -1),
    "one query": normal(2, 1, 3, 16).transpose(1, 2),
    "nothing": normal(0, 3, 5, 16),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_results_are_as_the_real_ones(layout: str, dtype: torch.dtype):
    query, key = LAYOUTS[layout].to(dtype), normal(1, 3, 7, 16, dtype=dtype)
    value = normal(1, 3, 7, 8, dtype=dtype)
    for flags in ((False, False), (True, False), (True, True)):
        text = to_text(Program(return_lse=flags[0], return_max=flags[1]))
        real = torch_op.attention(query, key, value, [], None, None, None, [], text)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(tensor) for tensor in (query, key, value)]
            fake = torch_op.attention(*fakes, [], None, None, None, [], text)
        meta = torch_op.attention(*(tensor.to("meta") for tensor in (query, key, value)), [], None, None, None, [], text)
        for one, other, third in zip(real, fake, meta, strict=True):
            assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
            assert (one.shape, one.dtype) == (third.shape, third.dtype)


def test_strides_of_fake_results_follow_the_runtimes():
    for shape, strides in (((2, 3, 5, 8), (240, 16, 48, 1)), ((1, 1, 1, 4), (7, 7, 7, 7)), ((2, 3, 0, 4), (0, 4, 4, 1))):
        assert out_strides(shape, strides) == output_strides(shape, strides)


def test_opcheck():
    text = to_text(Program(capture(bias_mod).record, return_lse=True))
    tests = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static")
    torch.library.opcheck(torch_op.attention, (Q, K, V, [BIAS], None, None, None, [], text), test_utils=tests)


def test_fake_gradients_are_as_the_real_ones():
    text = to_text(Program(capture(bias_mod).record, return_lse=True))
    scale = torch.tensor(0.25)
    key, value = K.transpose(1, 2).contiguous().transpose(1, 2), V[:, :1].expand_as(V)
    out, lse, _ = torch_op.attention(Q, key, value, [BIAS], None, None, None, [], text, None, scale)
    arguments = (
        *(out, lse, Q, key, value, out, lse),
        *([BIAS], None, None, None, [], text),
        *([True, False, True, True, True], None, scale),
    )
    first, captures = torch_op.attention_backward(*arguments)[:4], torch_op.attention_backward(*arguments)[4]
    real = (*first, *captures)
    with FakeTensorMode() as mode:
        *first, captures = torch_op.attention_backward(*tree_map_only(Tensor, mode.from_tensor, arguments))
    fake = (*first, *captures)
    assert [grad.numel() for grad in real] == [Q.numel(), 0, V.numel(), 1, BIAS.numel()]
    assert [(g.shape, g.stride(), g.dtype) for g in fake] == [(g.shape, g.stride(), g.dtype) for g in real]


def test_a_gradient_has_no_gradient():
    query = Q.clone().requires_grad_()
    out = torch_op.attention(query, K, V, [BIAS], None, None, None, [], to_text(Program(capture(bias_mod).record)))[0]
    (grad,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    with pytest.raises(errors.GradientNotImplementedError, match="differentiated again"):
        grad.sum().backward()


# -- who sees it --------------------------------------------------------------------------------------------------------------
def test_profiler_shows_it():
    with torch.profiler.profile(record_shapes=True) as profile:
        attnc.flex_attention(Q, K, V, bias_mod)
        attnc.scaled_dot_product_attention(Q, K, V)
    events = [event for event in profile.events() or [] if event.name == "attnc::attention"]
    assert len(events) == 2 and events[0].input_shapes[0] == list(Q.shape)


def test_flops_are_counted():
    with FlopCounterMode(display=False) as counter:
        attnc.flex_attention(Q, K, V[..., :8], bias_mod)
    assert counter.get_total_flops() == 2 * 2 * 2 * 17 * 21 * (16 + 8)


def test_dispatch_modes_see_it():
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        out = attnc.flex_attention(Q, K, V, bias_mod, return_lse=True)[0]
    assert torch_op.attention in seen
    assert torch.equal(out, attnc.flex_attention(Q, K, V, bias_mod))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode: Any):
    def function(query: Tensor, key: Tensor, bias: Tensor) -> Tensor:
        offset = key.shape[2] - query.shape[2]
        return attnc.flex_attention(
            query, key, key, lambda s, b, h, q, k: s + bias[q, k] / bias.shape[1], mask_mod=lambda b, h, q, k: q + offset >= k
        )

    graph = make_fx(function, tracing_mode=mode)(Q, K, BIAS)
    assert any(node.target is torch_op.attention for node in graph.graph.nodes)
    assert (graph(Q, K, BIAS) - function(Q, K, BIAS)).abs().max() < 1e-6
    if mode == "symbolic":
        query, key, bias = normal(2, 2, 30, 16), normal(2, 2, 50, 16), normal(30, 50)
        before = programs.compiled
        out = graph(query, key, bias)
        assert programs.compiled == before
        assert (out - function(query, key, bias)).abs().max() < 1e-6


def test_functionalize():
    out = torch.func.functionalize(lambda q: attnc.flex_attention(q, K, V, bias_mod))(Q)
    assert torch.equal(out, attnc.flex_attention(Q, K, V, bias_mod))


def in_a_new_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "order", ["import attnc, sys; before = 'torch' in sys.modules; import torch", "import torch, attnc; before = False"]
)
def test_registered_whichever_is_imported_first(order: str):
    assert in_a_new_process(f"{order}; print(before, torch.ops.attnc.attention.default)") == "False attnc.attention.default"


EAGER = """
import sys, torch, attnc
from torch.nn.attention.bias import causal_lower_right
heavy = {"torch._dynamo", "torch._inductor"} & set(sys.modules)
x = torch.randn(1, 2, 20, 16)
attnc.flex_attention(x, x, x, lambda s, b, h, q, k: s * 2, mask_mod=lambda b, h, q, k: q >= k, return_lse=True)
attnc.scaled_dot_product_attention(x, x, x, x[0, :1, :, :1] > 0)
attnc.scaled_dot_product_attention(x, x, x, is_causal=True)
with attnc.sdpa():
    torch.nn.functional.scaled_dot_product_attention(x, x, x)
print(sorted({"torch._dynamo", "torch._inductor"} & set(sys.modules) - heavy))
"""


def test_eager_calls_import_no_dynamo():
    assert in_a_new_process(EAGER) == "[]"


def test_text_is_plain_json():
    assert json.loads(to_text(Program(capture(bias_mod).record)))["captures"][0][0] == "BIAS"
