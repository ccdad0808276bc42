"""`attnc.numpy` where torch is not installed: in an environment that holds the core packages, ml_dtypes and pytest alone."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WANTED = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["numpy"], "pytest", "pytest-xdist", "hypothesis"]


def distributions(requirements: list[str]) -> dict[str, importlib.metadata.Distribution]:
    """The installed distributions that these requirements need, by name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(requirements)
    while waiting:
        requirement = waiting.pop()
        name = re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")  # type: ignore[index]
        if name in found or "extra ==" in requirement:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            assert ";" in requirement, name  # a requirement of other systems
            continue
        waiting += found[name].requires or []
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, str]:
    """The environment variables of a Python that finds attnc and, by links, these packages alone (with -S)."""
    place = tmp_path_factory.mktemp("packages")
    for distribution in distributions(WANTED).values():
        for file in distribution.files or []:
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (place / top).exists():
                (place / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())
    assert not (place / "torch").exists()
    path = os.pathsep.join([str(ROOT / "src"), str(place)])
    return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def python(alone: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-S", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=alone, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_torch_cannot_be_imported(alone):
    code = "import importlib.util as u; print([u.find_spec(name) is None for name in ('torch', 'numpy', 'ml_dtypes', 'xdsl')])"
    assert python(alone, "-c", code).strip() == "[True, False, False, False]"


def test_the_torch_front_end_says_what_is_missing(alone):
    code = "import attnc\ntry: attnc.flex_attention\nexcept attnc.errors.TorchMissingError as error: print(error)"
    assert "pip install 'attnc[torch]'" in python(alone, "-c", code)


def test_the_tests_of_numpy_pass(alone):
    files = ["tests/test_numpy.py", "tests/test_numpy_mods.py"]
    summary = python(alone, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files)
    assert re.search(r"\d{2,} passed", summary) and "skipped" not in summary


EXAMPLES = """
import contextlib, io, pathlib, re
text = pathlib.Path("docs/numpy.md").read_text()
code = "".join(re.findall(r"^```python\\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
scope = {}
with contextlib.redirect_stdout(io.StringIO()) as printed:
    exec(compile(code, "example.py", "exec"), scope)
shown = re.findall(r"(?:^    .*\\n)+", text.split("## Not by data")[1], re.MULTILINE)
expected = [line.strip() for block in shown for line in block.splitlines()]
got = [line.strip() for line in printed.getvalue().splitlines()]
missing = [line for line in got if line not in expected and '"example.py", line' not in line]
print(missing, scope["out"].shape == scope["query"].shape, len(got))
"""


def test_the_examples_of_the_documentation(alone):
    assert python(alone, "-c", EXAMPLES).strip() == "[] True 5"


def test_the_examples_of_the_readme(alone):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    for block in blocks:
        if "attnc.numpy" in block:
            python(alone, "-c", block)


CALL = """
import sys
import numpy as np
import attnc.numpy
loaded = [name for name in ("torch", "xdsl", "llvmlite") if name in sys.modules]
bias = np.ones(9, np.float32)
x = np.ones((1, 2, 9, 16), np.float32)
attnc.numpy.attention(x, x, x, lambda s, b, h, q, k: np.tanh(s) + bias[q - k], lambda b, h, q, k: q >= k)
print(loaded, [name for name in ("torch", "xdsl") if name in sys.modules])
"""


def test_torch_is_not_imported_where_it_is_installed_and_xdsl_only_to_compile(tmp_path):
    environment = {**os.environ, "ATTNC_CACHE_DIR": str(tmp_path)}
    outputs = [
        subprocess.run([sys.executable, "-c", CALL], capture_output=True, text=True, check=True, env=environment).stdout.strip()
        for _ in range(2)
    ]
    assert outputs == ["[] ['xdsl']", "[] []"]
