"""What a test needs of the machine: `pytestmark = needs_tool("iree-opt")` or `@needs_isa("avx512f")`, the only way to skip one.

What did not run for want of a tool or an instruction set is named at the end of the run (conftest.py); any other skip fails.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from pathlib import Path

import pytest

PREFIX = "needs "


def tool(name: str) -> str | None:
    """The path of a program: beside this Python interpreter, or else on PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(name)


def needs_tool(name: str) -> pytest.MarkDecorator:
    """Skips where the program `name` is not installed."""
    return pytest.mark.skipif(tool(name) is None, reason=f"{PREFIX}tool {name}")


def needs_isa(feature: str) -> pytest.MarkDecorator:
    """Skips where the CPU lacks `feature`, in LLVM's spelling: "avx2", "avx512f", "avx512bf16", "amx-bf16", ..."""
    return pytest.mark.skipif(not _features().get(feature, False), reason=f"{PREFIX}isa {feature}")


@functools.cache
def _features() -> dict[str, bool]:
    import llvmlite.binding as llvm

    return dict(llvm.get_host_cpu_features())
