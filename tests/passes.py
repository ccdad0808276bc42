"""Runs passes on text, one after the other, and checks each result."""

from __future__ import annotations

import importlib

from xdsl.dialects.builtin import ModuleOp

from attention_text import TARGET, parse
from attnc.pipeline import STAGES
from attnc.target import Target


def run_passes(text: str, *names: str, target: Target = TARGET) -> ModuleOp:
    """The module after those passes. After each it verifies, and its text reads back as the same text."""
    module = parse(text)
    for name in names:
        importlib.import_module("attnc.transforms." + name.replace("-", "_")).run(module, target)
        module.verify()
        printed = str(module)
        assert str(parse(printed)) == printed
        module = parse(printed)
    return module


def passes_until(last: str) -> tuple[str, ...]:
    """The passes after convert-torch-to-linalg-ext, up to `last`."""
    return STAGES[1 : STAGES.index(last) + 1]
