"""The command: opt, cache, doctor, demo; errors are one place and exit code 1, never a traceback."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attnc
from attnc import pipeline

KERNEL = (Path(__file__).parent / "tile" / "relu_row_sums.mlir").read_text()


def run(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "attnc.cli", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def lowered() -> attnc.Lowered:
    query = torch.ones(1, 2, 4, 16)
    return attnc.lower(query, query, query, mask_mod=lambda b, h, q, k: q >= k)


def test_opt_runs_passes_one_after_another(lowered: attnc.Lowered, tmp_path: Path):
    names = list(lowered.stages)
    source = tmp_path / "torch.mlir"
    source.write_text(lowered.stages["torch"])
    result = run("opt", str(source), "--passes", ",".join(names[1:3]))
    assert result.returncode == 0, result.stderr
    assert result.stdout == lowered.stages[names[2]]
    again = run("opt", "-", "-p", ",".join(names[3:]), "--print-ir-after-all", text=result.stdout)
    assert again.returncode == 0, again.stderr
    assert again.stdout == lowered.stages[names[-1]]
    assert [f"IR after {name}" in again.stderr for name in names[3:]] == [True] * len(names[3:])


def test_opt_without_passes_reads_verifies_and_prints(tmp_path: Path):
    output = tmp_path / "out.mlir"
    result = run("opt", "-o", str(output), text=KERNEL)
    assert result.returncode == 0, result.stderr
    assert "tile.kernel" in output.read_text()


def test_opt_lists_the_passes():
    assert run("opt", "--list").stdout.split() == list(pipeline.all_passes())


BAD = {
    "unknown operation": (KERNEL.replace("tile.reduce", "tile.redduce", 1), "is not registered"),
    "undefined value": (KERNEL.replace("%c0 = arith", "%c9 = arith", 1), ""),
    "does not verify": (KERNEL.replace("arith.constant 0 : index", "arith.constant 0.0 : f32", 1), ""),
    "cut off": (KERNEL[: len(KERNEL) // 2], ""),
    "no MLIR at all": ("what is this?", ""),
    "empty": ("", ""),
    "one percent": ("%", ""),
    "open string": ('builtin.module { "abc', ""),
    "control characters": ("builtin.module \x00\x01{}", ""),
}


@pytest.mark.parametrize("name", BAD)
def test_opt_on_bad_text(name: str, tmp_path: Path):
    text, words = BAD[name]
    source = tmp_path / "bad.mlir"
    source.write_text(text)
    result = run("opt", str(source), "--passes", "classify-blocks")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr and result.stdout == ""
    first, *rest = result.stderr.splitlines()
    file, line, column, level, message = first.split(":", 4)
    assert (file, level) == (str(source), " error") and words in message
    lines = text.split("\n")
    assert 1 <= int(line) <= len(lines) and 1 <= int(column) <= len(lines[int(line) - 1]) + 1
    if lines[int(line) - 1]:
        assert rest[0] == lines[int(line) - 1] and rest[1].strip() == "^" and rest[1].index("^") == int(column) - 1


def test_opt_names_the_place_of_a_verifiers_complaint():
    text = re.sub(r"(tile\.grid .*step \()\d+", r"\g<1>0", KERNEL, count=1)
    assert text != KERNEL
    result = run("opt", text=text)
    line = next(number for number, line in enumerate(text.split("\n"), 1) if "tile.grid" in line)
    assert result.returncode == 1 and result.stderr.startswith(f"<stdin>:{line}:")
    assert "tile.grid" in result.stderr


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("opt", "--passes", "classify-block"), "did you mean 'classify-blocks'"),
        (("opt", "/no/such/file.mlir"), "does not exist"),
        (("opt", "--passes"), "requires an argument"),
        (("no-such-command",), "No such command"),
    ],
)
def test_misuse(arguments: tuple[str, ...], words: str):
    result = run(*arguments, text=KERNEL)
    assert result.returncode in (1, 2)
    assert words in result.stderr and "Traceback" not in result.stderr


def test_a_pass_that_cannot_run_says_so(lowered: attnc.Lowered):
    result = run("opt", "--passes", "tile-attention", text=lowered.stages["torch"])
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert result.stderr.startswith("<stdin>: error: pass tile-attention needs a module at stage select-tile-sizes; ")
    again = run("opt", "--passes", "classify-blocks", text=lowered.stages["classify-blocks"])
    assert again.returncode == 1 and again.stdout == ""
    assert again.stderr.startswith("<stdin>: error: pass classify-blocks has been run")


def test_cache_ls_and_clear(cache_directory: Path):
    query = torch.ones(1, 1, 4, 16)
    empty = run("cache", "ls")
    assert empty.returncode == 0 and "0 entries" in empty.stdout
    program = "import torch, attnc; q = torch.ones(1, 1, 4, 16); attnc.flex_attention(q, q, q)"
    subprocess.run([sys.executable, "-c", program], check=True)
    listed = run("cache", "ls").stdout
    assert "attention(query" in listed.replace("\n", "") and str(cache_directory)[:20] in listed
    assert max(map(len, listed.splitlines()[:-1])) <= 80
    assert "shared routines" in listed and "hash" not in listed
    assert listed.splitlines()[-1].startswith("2 entries")
    limited = run("cache", "ls", "--limit", "1").stdout.splitlines()
    assert len(limited) == 3 and "1 more" in limited[1]
    cleared = run("cache", "clear")
    assert cleared.returncode == 0 and "removed" in cleared.stdout
    assert list(cache_directory.iterdir()) == []
    assert attnc.flex_attention(query, query, query).shape == query.shape


def test_doctor():
    result = run("doctor")
    assert result.returncode == 0, result.stderr
    for word in ("torch", "LLVM", "CPU", "threads", "disk cache", "ATTNC_CACHE_DIR"):
        assert word in result.stdout


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--heads", "6", "no multiple of 4"),
        ("--length", "0", "x>=1"),
        ("--head-dim", "-1", "x>=1"),
        ("--seconds", "-1", "x>=0"),
    ],
)
def test_sizes_that_the_demo_cannot_have(option, value, words):
    result = run("demo", option, value)
    assert result.returncode == 2 and option in result.stderr and words in result.stderr


def test_the_list_of_commands_fits_in_its_lines():
    text = run("--help").stdout
    assert "doctor" in text and "..." not in text.split("Commands:")[1]


def test_demo_at_small_sizes():
    result = run("demo", "--length", "96", "--heads", "4", "--head-dim", "16", "--seconds", "0")
    assert result.returncode == 0, result.stderr
    for name in ("dense", "ALiBi + causal", "soft cap", "packed documents"):
        assert name in result.stdout
