"""The libraries under measurement, one a file.

Each file has NAME (as rows and JSON name it), TITLE (as tables show it), PACKAGES (whose versions tell what was measured), and
`prepare(problem, threads)`, which returns a `Prepared` or raises `Unsupported` with a word on why the case is not for it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

FILES = {
    "attnc": "attnc_flex",
    "sdpa": "torch_sdpa",
    "flex": "torch_flex",
    "compiled": "torch_compiled_flex",
    "onnxruntime": "onnxruntime_attention",
    "openvino": "openvino_sdpa",
    "iree": "iree_linalg",
}
TITLES = {
    "attnc": "attnc",
    "sdpa": "SDPA",
    "flex": "flex eager",
    "compiled": "flex compiled",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "iree": "IREE",
    "eager": "eager",
}


class Unsupported(Exception):
    """The case is not for this peer, with a word on why."""


@dataclass
class Prepared:
    """Something to call again and again; `result` turns what it returned into a tensor [B, Hq, Sq, D]."""

    call: Callable[[], Any]
    result: Callable[[Any], Any] = lambda returned: returned


def load(name: str) -> ModuleType:
    """The module of a peer."""
    return importlib.import_module(f"{__name__}.{FILES[name]}")


def missing(name: str) -> str | None:
    """The first package that a peer needs and that is not installed."""
    for package in load(name).PACKAGES:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return package
    return None


def versions(name: str) -> str:
    """The versions of a peer's packages."""
    return ", ".join(f"{package} {importlib.metadata.version(package)}" for package in load(name).PACKAGES)
