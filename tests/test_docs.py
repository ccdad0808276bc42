"""The documents say what is so: the excerpts of docs/pipeline.md are lines of what is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
WALK = (DOCS / "pipeline.md").read_text()
BLOCKS = re.findall(r"^```(\w+)(?: ([\w-]+))?\n(.*?)^```", WALK, re.MULTILINE | re.DOTALL)
EXCERPTS = [(stage, text) for language, stage, text in BLOCKS if language == "mlir"]


@pytest.fixture(scope="module")
def lowered():
    source = next(text for language, _, text in BLOCKS if language == "python")
    scope: dict = {}
    exec(compile(source, "alibi.py", "exec"), scope)
    return scope["lowered"]


def pattern(line: str) -> re.Pattern[str]:
    """What a line of an excerpt stands for: numbers of more than one digit are the machine's, `…` is anything."""
    parts = re.split(r"(…|\d\d+)", line.strip())
    return re.compile("".join(".*" if part == "…" else r"\d+" if part[:1].isdigit() else re.escape(part) for part in parts))


@pytest.mark.parametrize(("stage", "excerpt"), EXCERPTS, ids=[f"{i}-{stage}" for i, (stage, _) in enumerate(EXCERPTS)])
def test_excerpts_are_printed(lowered, stage, excerpt):
    printed = iter(line.strip() for line in lowered.stages[stage].splitlines())
    for line in excerpt.splitlines():
        if line.strip() == "…":
            continue
        wanted = pattern(line)
        assert any(wanted.fullmatch(found) for found in printed), f"not printed, or not in this order: {line}"


def test_every_stage_is_walked_through(lowered):
    assert set(lowered.stages) == {stage for stage, _ in EXCERPTS}


def test_code_is_as_described(lowered):
    for name in ("@attention.plan", "@attention.work", "@attnc.softmax_exp2."):
        assert name in lowered.llvm_ir
    assert "attention.work:" in lowered.assembly
