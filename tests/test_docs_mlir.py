"""docs/mlir.md says what is so: its program runs, its MLIR is compiled, what it shows of a stage is printed."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from click.testing import CliRunner

import attnc
from attention_modules import close, exact
from attnc import pipeline
from attnc.cli import commands
from attnc.mlir_text import parse_module
from attnc.target import Target

PAGE = (Path(__file__).parent.parent / "docs" / "mlir.md").read_text()
BLOCKS = dict(re.findall(r"^```\w+ ([\w-]+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))


def test_the_program_runs():
    scope: dict = {}
    exec(compile(BLOCKS["compile"], "mlir.md", "exec"), scope)
    assert scope["program"].kernels == ("attention", "loop")
    wanted = scope["Block"]()(scope["x"], scope["gate"])
    assert (scope["out"] - wanted).abs().max() < 1e-5


def test_the_attention_is_compiled():
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(shape, np.float32) for shape in ((2, 64, 100), (2, 120, 64), (2, 120, 64))]
    text = BLOCKS["attention"]
    close(attnc.compile(text)(*inputs), exact(text, inputs)[0], "f32")


def test_the_stage_is_printed():
    module = parse_module(BLOCKS["attention"])
    for name in pipeline.GRAPH_STAGES[: pipeline.GRAPH_STAGES.index("outline-attention") + 1]:
        pipeline.run_pass(module, name, Target.host())
    printed = iter(line.strip() for line in str(module).splitlines())
    for line in BLOCKS["outline-attention"].splitlines():
        if line.strip() != "…":
            wanted = re.compile(".*".join(re.escape(part) for part in line.strip().split("…")))
            assert any(wanted.fullmatch(found) for found in printed), f"not printed, or not in this order: {line}"


def test_every_pass_is_in_the_table():
    assert tuple(re.findall(r"^\| ([a-z-]+) \|", PAGE, re.MULTILINE)[1:]) == pipeline.GRAPH_STAGES


def test_commands_have_the_options_that_are_shown():
    for command, options in (("opt", ("--emit-iree", "--list")), ("compile", ("--emit",)), ("run", ("--function", "--input"))):
        out = CliRunner().invoke(commands, [command, "--help"]).output
        assert all(option in out for option in options)


def test_links_exist():
    links = re.findall(r"\]\(([^)#\s]+)", PAGE)
    assert links and all((Path(__file__).parent.parent / "docs" / link).exists() for link in links)
