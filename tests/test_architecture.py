"""The house stands as it was drawn: imports run one way, the public package is light, files stay readable."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
FILES = sorted((SOURCE / "attnc").rglob("*.py"))

# From the ground up: a module imports from its own line and those above it (by itself, or its package's name).
LAYERS: list[set[str]] = [
    {"errors", "knobs"},
    {"runtime"},
    {"dialects", "mlir_text"},
    {"analysis"},
    {"capture", "transforms", "codegen"},
    {"pipeline"},
    {"graph_pipeline"},
    {
        "flex",
        "layouts",
        "integrations",
        "program_text",
        "programs",
        "checks",
        "lowered",
        "backward",
        "numpy",
        "scaled_dot_product",
        "torch_op",
        "tuning",
    },
    {"compile_program"},
    {"bench"},  # measures everything else, so it may import it
    {"cli"},
]
# Records and arithmetic that know nothing of the compiler: free to all of it.
PLAIN = {"attnc.target", "attnc.analysis.roles"}
GROUND = {"errors", "knobs", "runtime"}
SIBLINGS = {"capture", "transforms", "codegen"}

# Files may be longer than this only for a reason.
LINES = 450
LONG = {
    "dialects/tile.py": "one dialect, one file",
    "dialects/torch.py": "one dialect, one file",
}


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def imports(path: Path, *, inner: bool = True) -> Iterator[str]:
    """The modules of attnc that a file imports, but for the sake of types; `inner`: those inside functions too."""

    def visit(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not inner:
            return
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else node.module
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    yield from (name for name in visit(ast.parse(path.read_text())) if name.split(".")[0] == "attnc")


def part_of(module: str) -> str:
    """ "codegen" of "attnc.codegen.llvm.text"; "" of the package itself."""
    return (module.split(".") + [""])[1]


def layer_of(module: str) -> int:
    layers = [i for i, names in enumerate(LAYERS) if part_of(module) in names]
    assert layers, f"{module} stands in no layer of tests/test_architecture.py: say where it belongs"
    return layers[0]


@pytest.mark.parametrize("module", [name for name in MODULES if name != "attnc"])
def test_imports_run_one_way(module: str):
    for imported in imports(MODULES[module]):
        if imported in PLAIN:
            assert part_of(module) not in {"errors", "knobs", "runtime"}, f"{module} imports {imported}"
            continue
        if module in PLAIN:
            assert part_of(imported) in GROUND, f"{module} is free to all, so it may not import {imported}"
            continue
        if imported == "attnc":  # the package itself: only its version
            continue
        assert layer_of(imported) <= layer_of(module), f"{module} imports {imported}, which stands above it"
        if part_of(module) in SIBLINGS and part_of(imported) in SIBLINGS:
            assert part_of(module) == part_of(imported), f"{module} imports its neighbour {imported}"
        if part_of(module) in GROUND:
            assert part_of(imported) in GROUND, f"{module} is the ground and imports {imported}"


def test_no_circles():
    graph = {name: set(imports(path, inner=False)) - {name, "attnc"} for name, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, with the circle


def test_runtime_needs_neither_torch_nor_xdsl():
    """Nothing of the runtime imports xdsl; torch only inside functions."""
    for path in FILES:
        if part_of(module_of(path)) not in {"runtime", "errors", "knobs"}:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "xdsl" for name in names), path


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE / "attnc")))
def test_files_stay_readable(path: Path):
    name = str(path.relative_to(SOURCE / "attnc"))
    count = len(path.read_text().splitlines())
    assert count <= LINES or name in LONG, f"{name} has {count} lines: split it, or give a reason in LONG"


def in_a_new_process(code: str, **environment: str) -> str:

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_attnc_is_light():
    heavy = "{'torch', 'xdsl', 'llvmlite', 'numpy', 'click', 'rich'} & set(sys.modules)"
    assert in_a_new_process(f"import attnc, sys; print({heavy})") == "set()"


def test_public_names():
    names = ["flex_attention", "lower", "from_text", "create_block_mask", "BlockMask", "and_masks", "or_masks"]
    assert in_a_new_process(f"import attnc; print([n for n in {names} if not hasattr(attnc, n)])") == "[]"


CALL = """
import sys, torch
from attnc import flex_attention
slopes = torch.rand(2)
x = torch.randn(1, 2, 40, 16)
flex_attention(x, x, x, lambda s, b, h, q, k: s + slopes[h] * (k - q), mask_mod=lambda b, h, q, k: q >= k)
print(sorted(name for name in ('torch._dynamo', 'torch._inductor', 'xdsl') if name in sys.modules))
"""


def test_a_call_imports_no_dynamo_and_a_cached_one_no_compiler(tmp_path: Path):
    first, second = (in_a_new_process(CALL, ATTNC_CACHE_DIR=str(tmp_path / "cache")) for _ in range(2))
    assert first == "['xdsl']"
    assert second == "[]"
