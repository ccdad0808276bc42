"""Edited text of the torch dialect either compiles as far as linalg, or ends in one of attnc's errors: never in a traceback."""

from __future__ import annotations

import random
import re

import pytest

from attnc import pipeline
from attnc.errors import AttncError
from attnc.mlir_text import parse_module, print_module
from attnc.target import Target
from test_convert_torch_to_linalg_attention import Raw, normal, raw_text

OPERATIONS = (
    *(
        "add.Tensor",
        "softmax.int",
        "slice.Tensor",
        "cat",
        "matmul",
        "view",
        "sum.dim_IntList",
        "index.Tensor",
        "arange",
        "full",
    ),
    *("scaled_dot_product_attention", "einsum", "split.Tensor", "expand", "where.self", "layer_norm", "pad", "gather", "item"),
)
NAME = re.compile(r"%[\w.\-]+")


@pytest.fixture(scope="module")
def text() -> str:
    module = parse_module(raw_text(Raw(), (normal(2, 9, 32), normal(2, 2, 10, 8), normal(2, 2, 10, 8))))
    pipeline.run_pass(module, "simplify-torch", Target.host())
    module.attributes.pop(pipeline.ATTRIBUTE)
    return print_module(module).partition("{-#")[0]


def mutated(text: str, chance: random.Random) -> str:
    """One or two lines of `text`, wrong in some way."""
    lines = text.splitlines()
    for _ in range(chance.choice([1, 2])):
        number = chance.randrange(1, len(lines) - 1)
        line = lines[number]
        match chance.randrange(7):
            case 0:
                del lines[number]
                continue
            case 1:
                line = re.sub(r"\b\d+\b", chance.choice(["0", "1", "-1", "7", "1000000000"]), line, count=1)
            case 2:
                line = line.replace("f32", chance.choice(["f16", "si64", "i1", "f64"]), 1)
            case 3:
                line = line.replace("[", chance.choice(["[1,", "[?,", "[]["]), 1)
            case 4 if NAME.search(line):
                line = line.replace(chance.choice(NAME.findall(line)), chance.choice(NAME.findall(text)), 1)
            case 5:
                line = re.sub(r"torch\.aten\.[\w.]+", f"torch.aten.{chance.choice(OPERATIONS)}", line, count=1)
            case _:
                line = line.replace(
                    "!torch.int", chance.choice(["!torch.float", "!torch.none", "!torch.bool", "!torch.str"]), 1
                )
        lines[number] = line
    return "\n".join(lines)


def test_edited_text_ends_in_an_error_of_ours_or_compiles(text: str):
    chance = random.Random(0)
    outcomes = {"compiled": 0, "refused": 0}
    for _ in range(150):
        try:
            module = parse_module(mutated(text, chance))
            for name in ("simplify-torch", "convert-torch-to-linalg"):
                pipeline.run_pass(module, name, Target.host())
            outcomes["compiled"] += 1
        except AttncError as error:
            assert str(error)
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 5, outcomes
