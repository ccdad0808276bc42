"""No text makes `attnc opt`, `compile` or `run` crash or trace back: mutations of a valid module's words, types and maps."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from attention_modules import AttentionModule

SIZES = {"b": 2, "m": 9, "k": 12, "e": 8, "n": 6}
REGION = """%c = arith.cmpi sge, %i_m, %i_k : index
        %t = math.tanh %s : f32
        %x = arith.select %c, %t, %ninf : f32"""
AROUND = """
    %e0 = tensor.empty() : tensor<2x6x9xf32>
    %t = linalg.transpose ins(%r : tensor<2x9x6xf32>) outs(%e0 : tensor<2x6x9xf32>) permutation = [0, 2, 1]
    %u = linalg.generic {indexing_maps = [affine_map<(a, b, c) -> (a, b, c)>, affine_map<(a, b, c) -> (a, b, c)>], iterator_types = ["parallel", "parallel", "parallel"]} ins(%t : tensor<2x6x9xf32>) outs(%e0 : tensor<2x6x9xf32>) {
    ^bb1(%p: f32, %o: f32):
      %j = linalg.index 1 : index
      %j32 = arith.index_cast %j : index to i32
      %jf = arith.sitofp %j32 : i32 to f32
      %y = arith.addf %p, %jf : f32
      linalg.yield %y : f32
    } -> tensor<2x6x9xf32>
    %w = tensor.collapse_shape %u [[0, 1], [2]] : tensor<2x6x9xf32> into tensor<12x9xf32>
    %z = tensor.extract_slice %w[1, 0] [10, 9] [1, 1] : tensor<12x9xf32> to tensor<10x9xf32>
    return %z : tensor<10x9xf32>"""  # noqa: E501 - IR is long
WORD = re.compile(r'%?[A-Za-z_][\w.]*|-?\d+(?:\.\d+)?|"[^"]*"|[^\s\w]')


def original() -> tuple[str, list[np.ndarray]]:
    module = AttentionModule(SIZES, "bme", "bke", "bkn", "bmn", mask="mk", region=REGION)
    text = module.text().replace("    return %r : tensor<2x9x6xf32>", AROUND.strip("\n"))
    return text.replace(") -> tensor<2x9x6xf32> {\n", ") -> tensor<10x9xf32> {\n", 1), module.inputs()


def mutated(text: str, chance: random.Random) -> str:
    """One to three changes: words dropped, doubled, exchanged, replaced by others of their kind; numbers, types, lines."""
    gentle = chance.random() < 0.5
    for _ in range(1 if gentle else chance.randint(1, 3)):
        words = list(WORD.finditer(text))
        kinds = ["number", "everywhere", "type", "map", "like"]
        kind = chance.choice(kinds if gentle else [*kinds, "drop", "double", "swap", "line", "cut"])
        word = chance.choice(words)
        a, b = word.span()
        if kind == "drop":
            text = text[:a] + text[b:]
        elif kind == "double":
            text = text[:b] + " " + text[a:b] + text[b:]
        elif kind == "swap":
            other = chance.choice(words)
            (a, b), (c, d) = sorted([word.span(), other.span()])
            text = text[:a] + text[c:d] + text[b:c] + text[a:b] + text[d:] if b <= c else text
        elif kind == "like":
            alike = [w for w in words if w[0][0] == word[0][0] or w[0][0].isalpha() == word[0][0].isalpha()]
            text = text[:a] + chance.choice(alike)[0] + text[b:]
        elif kind == "number":
            found = list(re.finditer(r"\d+", text))
            a, b = chance.choice(found).span()
            number = chance.choice(["0", "1", "2", "3", "7", "9", "4294967296", "99999999999999999999", "?"])
            text = text[:a] + number + text[b:]
        elif kind == "everywhere":
            number = chance.choice(["2", "9", "12", "8", "6", "f32", "sge", "parallel", "mulf", "addf"])
            other = chance.choice(["0", "1", "5", "?", "f16", "f64", "bf16", "reduction"])
            text = re.sub(rf"(?<![\w%]){number}(?=x|\b)", other, text)
        elif kind == "type":
            found = list(re.finditer(r"\b(?:x)?(f32|i1|index)\b", text))
            a, b = chance.choice(found).span(1)
            text = text[:a] + chance.choice(["f16", "f64", "bf16", "i8", "i64", "index", "f8E4M3FN", "i3", "none"]) + text[b:]
        elif kind == "line":
            lines = text.split("\n")
            i, j = chance.randrange(len(lines)), chance.randrange(len(lines))
            lines[i], lines[j] = lines[j], chance.choice([lines[i], lines[j], ""])
            text = "\n".join(lines)
        elif kind == "map":
            found = list(re.finditer(r"-> \(([^()]*)\)>", text))
            if found:
                a, b = chance.choice(found).span(1)
                dims = [chance.choice(["b", "m", "k", "e", "n", "0", "1", "b + m"]) for _ in range(chance.randint(0, 4))]
                text = text[:a] + ", ".join(dims) + text[b:]
        else:
            rest = "" if chance.random() < 0.2 else chance.choice(["\x00", "\t", '"', "\\"]) + text[b:]
            text = text[:a] + rest
    return text


@pytest.mark.parametrize("seed", range(2))
def test_mutated_modules_end_in_a_message(seed: int, tmp_path: Path):
    text, inputs = original()
    for n, array in enumerate(inputs):
        np.save(tmp_path / f"i{n}.npy", array)
    chance = random.Random(seed)
    (tmp_path / "a_valid.mlir").write_text(text)
    for n in range(60):
        (tmp_path / f"m{n:03}.mlir").write_text(mutated(text, chance), encoding="utf-8")
    begin = time.monotonic()
    command = [sys.executable, str(Path(__file__).parent / "fuzz_text.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    lines = done.stdout.strip().splitlines()
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-2000:]}"
    assert lines[0] == "a_valid.mlir 0 0 0 0" and len(lines) == 61, lines
    assert time.monotonic() - begin < 300
