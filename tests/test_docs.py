"""The documents say what is so: the excerpts of docs/pipeline.md are what is printed, and README's first example runs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import attnc
from needs import needs_isa

DOCS = Path(__file__).parent.parent / "docs"
WALK = (DOCS / "pipeline.md").read_text()
BLOCKS = re.findall(r"^```(\w+)(?: ([\w-]+))?\n(.*?)^```", WALK, re.MULTILINE | re.DOTALL)
README = (DOCS.parent / "README.md").read_text()
EXCERPTS = [(stage, text) for language, stage, text in BLOCKS if language == "mlir"]


@pytest.fixture(scope="module")
def lowered():
    source = next(text for language, _, text in BLOCKS if language == "python")
    scope: dict = {}
    exec(compile(source, "alibi.py", "exec"), scope)
    return scope["lowered"], attnc.lower(
        *(scope[name] for name in ("query", "key", "value", "alibi")), mask_mod=scope["causal"], backward=True
    )


def pattern(line: str) -> re.Pattern[str]:
    """What a line of an excerpt stands for: numbers of more than one digit are the machine's, `…` is anything."""
    parts = re.split(r"(…|\d\d+)", line.strip())
    return re.compile("".join(".*" if part == "…" else r"\d+" if part[:1].isdigit() else re.escape(part) for part in parts))


@pytest.mark.parametrize(("stage", "excerpt"), EXCERPTS, ids=[f"{i}-{stage}" for i, (stage, _) in enumerate(EXCERPTS)])
def test_excerpts_are_printed(lowered, stage, excerpt):
    forward, backward = lowered
    printed = iter(line.strip() for line in {**backward.stages, **forward.stages}[stage].splitlines())
    for line in excerpt.splitlines():
        if line.strip() == "…":
            continue
        wanted = pattern(line)
        assert any(wanted.fullmatch(found) for found in printed), f"not printed, or not in this order: {line}"


def test_every_stage_is_walked_through(lowered):
    forward, backward = lowered
    shown = {stage for stage, _ in EXCERPTS}
    assert set(forward.stages) <= shown and shown <= {*forward.stages, *backward.stages}


def test_code_is_as_described(lowered):
    for name in ("@attention.plan", "@attention.work", "@attnc.softmax_exp2."):
        assert name in lowered[0].llvm_ir
    assert "attention.work:" in lowered[0].assembly


def code_blocks(language: str) -> list[str]:
    found = [text for kind, _, text in BLOCKS if kind == language]
    assert found, f"docs/pipeline.md shows no {language}"
    return found


def test_llvm_excerpts_are_emitted(lowered):
    emitted = iter(lowered[0].llvm_ir.splitlines())
    for line in "".join(code_blocks("llvm")).splitlines():
        # The width of a vector and the name that carries it are the machine's.
        wanted = re.compile(re.sub(r"(?<=<)\d+(?= x)|(?<=\\\.v)\d+", r"\\d+", re.escape(line).replace("\\ ", " ")))
        assert any(wanted.fullmatch(found) for found in emitted), f"not emitted, or not in this order: {line}"


def opcodes(assembly: str) -> list[str]:
    """The opcodes of assembly text, one a line; labels, directives and comments are none."""
    return re.findall(r"^\s+([a-z]\w*)", assembly, re.MULTILINE)


@needs_isa("avx512f")
def test_assembly_excerpts_are_emitted(lowered):
    emitted = " ".join(opcodes(lowered[0].assembly))
    for block in code_blocks("asm"):
        assert f" {' '.join(opcodes(block))} " in f" {emitted} ", "these opcodes do not follow each other"


README_BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def run(source: str) -> dict:
    scope: dict = {}
    exec(compile(source, "README.md", "exec"), scope)
    return scope


def test_the_three_ways_in_of_the_readme_run():
    of_torch, of_transformers, of_numpy = map(run, README_BLOCKS)
    assert of_torch["out"].shape == of_torch["query"].shape
    assert torch.isfinite(of_torch["out"]).all() and of_torch["slopes"].grad.abs().sum() > 0
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        logits = of_transformers["model"](tokens).logits
        of_transformers["model"].set_attn_implementation("sdpa")
        torch.testing.assert_close(logits, of_transformers["model"](tokens).logits)
    assert of_numpy["out"].shape == of_numpy["query"].shape and np.isfinite(of_numpy["out"]).all()


def test_links_of_the_readme_exist():
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (DOCS.parent / link).exists()] == []


def test_the_example_of_training_gives_gradients():
    source = re.findall(r"^```python\n(.*?)^```", (DOCS / "training.md").read_text(), re.MULTILINE | re.DOTALL)[0]
    scope: dict = {}
    exec(compile(source, "training.md", "exec"), scope)
    for name in ("query", "key", "value", "bias"):
        gradient = scope[name].grad
        assert gradient is not None and torch.isfinite(gradient).all() and gradient.abs().sum() > 0


def test_what_is_moved_to_attnc_gives_the_same():
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "moving.md").read_text(), re.MULTILINE | re.DOTALL)
    scope: dict = {}
    exec(blocks[0], scope)
    assert len(blocks) == 8
    for block in blocks[1:]:
        exec(block, scope)
        assert torch.allclose(scope.pop("ours"), scope.pop("theirs"), rtol=1e-4, atol=2e-5), block
