"""`attn_implementation="attnc"` under torch.compile: one graph, the eager model's logits, the operator in the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch.fx import GraphModule
from transformers import CompileConfig

import attnc.torch_op
from transformers_models import MODELS, padding, tokens

CACHED = ("llama", "gemma3", "gpt_oss", "t5")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Backend:
    """Runs a graph as it is, and counts attention in it."""

    def __init__(self) -> None:
        self.graphs = 0
        self.attentions = 0

    def __deepcopy__(self, _: object) -> Backend:
        return self  # generate() copies its configuration

    def __call__(self, graph: GraphModule, _: list[Any]) -> Callable[..., Any]:
        self.graphs += 1
        self.attentions += sum(node.target is attnc.torch_op.attention for node in graph.graph.nodes)
        return graph


@pytest.mark.parametrize(
    ("name", "masked"),
    [("llama", True), ("llama", False), ("gemma3", True), ("gpt_oss", True), ("t5", True), ("modernbert", True)],
)
def test_logits(name: str, masked: bool):
    entry = MODELS[name]
    model = entry.make() if name != "gpt_oss" else entry.make(experts="grouped_mm")
    inputs: dict[str, Any] = entry.inputs()
    if not masked:
        del inputs["attention_mask"]
    if name in CACHED:
        inputs["use_cache"] = False  # a dynamic cache is no matter for a compiled graph, in transformers itself
    backend = Backend()
    with torch.no_grad():
        expected = model(**inputs).logits
        actual = torch.compile(model, backend=backend, fullgraph=True)(**inputs).logits
    assert backend.graphs == 1
    assert backend.attentions == (6 if name == "t5" else 2)
    assert torch.allclose(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_generate_with_a_static_cache(name: str):
    """The mask is made outside of the compiled decoding step; nothing is traced or compiled anew for a token."""
    model = MODELS[name].make()
    options: dict[str, Any] = {"attention_mask": padding("left"), "cache_implementation": "static", "do_sample": False}
    options |= {"max_new_tokens": 8, "min_new_tokens": 8}
    expected = model.generate(tokens(), **options)
    backend = Backend()
    config = CompileConfig(fullgraph=True, backend=backend, mode=None)  # type: ignore[arg-type]
    config._compile_all_devices = True  # type: ignore[assignment] - transformers compiles on other devices than CPUs by itself
    actual = model.generate(tokens(), **options, compile_config=config)
    assert actual.equal(expected)
    assert backend.graphs == 1 and backend.attentions == 2


def test_a_compiled_training_step():
    entry = MODELS["llama"]
    found = {}
    for implementation in ("attnc", "sdpa"):
        torch._dynamo.reset()
        model = entry.make(implementation)
        step = torch.compile(model, backend="aot_eager", fullgraph=True)
        step(tokens(), labels=tokens(), use_cache=False).loss.backward()
        found[implementation] = model.model.layers[0].self_attn.q_proj.weight.grad
    assert torch.allclose(found["attnc"], found["sdpa"], rtol=0, atol=1e-4 * float(found["sdpa"].abs().max()))
