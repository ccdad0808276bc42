"""`tile` is a language for blocks, not for one kernel: five that are no softmax attention, interpreted and compiled."""

from __future__ import annotations

import numpy as np
import pytest

import attnc
from attnc.lowered import CompiledAttention
from hand_written import KERNELS, SIZES, attention, attention_inputs, text, tolerance
from tile_interpreter import parse, run

CASES = [(name, *sizes) for name in KERNELS for sizes in SIZES]


def check(out, expected):
    np.testing.assert_allclose(out.astype(float), expected, rtol=0, atol=tolerance(out, expected))


@pytest.mark.parametrize("name", [*KERNELS, "attention_forward", "attention_backward"])
def test_text_is_stable(name):
    printed = str(parse(text(name)))
    assert str(parse(printed)) == printed


@pytest.mark.parametrize(("name", "rows", "columns"), CASES)
def test_interpreted(name, rows, columns):
    arguments, out, expected = KERNELS[name](np.random.default_rng(rows), rows, columns)
    run(text(name), *arguments, shuffle=columns)
    check(out, expected)


@pytest.fixture(scope="module")
def compiled():
    """Each kernel compiled once, at first use."""
    kernels = {}

    def kernel(name: str):
        if name not in kernels:
            kernels[name] = attnc.from_text(text(name)).compile()
        return kernels[name]

    return kernel


@pytest.mark.parametrize(("name", "rows", "columns"), CASES)
def test_compiled(name, rows, columns, compiled):
    arguments, out, expected = KERNELS[name](np.random.default_rng(rows), rows, columns)
    compiled(name)(*arguments)
    check(out, expected)


@pytest.mark.parametrize("name", KERNELS)
def test_compiled_on_strided_arrays(name, compiled):
    """The last stride is 1 by the kernels' types; all others are free."""
    arguments, out, expected = KERNELS[name](np.random.default_rng(3), 70, 90)
    wide = []
    for argument in arguments:
        if isinstance(argument, np.ndarray) and argument.ndim > 1:
            room = np.zeros((*(n + 3 for n in argument.shape[:-1]), argument.shape[-1] + 5), argument.dtype)
            view = room[tuple(slice(1, 1 + n) for n in argument.shape)]
            view[...] = argument
            wide.append(view)
            if argument is out:
                out = view
        else:
            wide.append(argument)
    compiled(name)(*wide)
    check(out, expected)


def run_compiled(attention_text, query, key, value, slopes):
    """(out, lse) of a kernel whose arguments have roles, by its public call."""
    function = attnc.from_text(attention_text).compile()
    assert isinstance(function, CompiledAttention)
    return function(query, key, value, 0.125, captures=[slopes])


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "queries", "keys"),
    [(1, 2, 2, 48, 128), (2, 2, 1, 131, 200), (1, 6, 2, 50, 257), (1, 1, 1, 1, 1), (2, 3, 3, 129, 129)],
)
def test_attention_forward_compiled(batch, heads, kv_heads, queries, keys):
    query, key, value, slopes = attention_inputs(np.random.default_rng(0), batch, heads, kv_heads, queries, keys)
    out, lse = run_compiled(text("attention_forward"), query, key, value, slopes)
    expected_out, expected_lse = attention(query, key, value, 0.125, slopes)
    np.testing.assert_allclose(out, expected_out, atol=2e-6, rtol=0)
    np.testing.assert_allclose(lse, expected_lse, atol=4e-6, rtol=0)


# Edits of a kernel's structure, and what must come of each. The interpreter says what is right.
EDITS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "without the rescale": (("%acc_rescaled = tile.map", "arith.mulf %o, %a : f32", "arith.addf %o, %zero : f32"),),
    "every block is EMPTY": (("func.func private @classify", "func.return %class : i32", "func.return %empty : i32"),),
    "every block is PARTIAL": (("func.func private @classify", "func.return %class : i32", "func.return %partial : i32"),),
    "another order of tasks": (("tile.grid", "step (1, 1, 48) descending {", "step (1, 1, 48) {"),),
    "wider tiles of rows": (),
    "minimum instead of maximum": (("%max_new = tile.map", "arith.maximumf %a, %c : f32", "arith.minimumf %a, %c : f32"),),
    # The classifier must agree with the mask: a backend may skip what it calls EMPTY, and ask it about parts of a block.
    "no causal mask": (
        ("func.func private @classify", "arith.cmpi slt, %q1, %k0 : index", "arith.cmpi sle, %keys, %k0 : index"),
        ("func.func private @classify", "arith.andi %all_causal, %inside : i1", "arith.andi %inside, %inside : i1"),
        ("%causal = arith.cmpi", "arith.andi %causal, %inside : i1", "arith.andi %inside, %inside : i1"),
    ),
    "twice the sum": (
        ("%sum_new = tile.map", "tile.yield %total", "%t = arith.addf %total, %s : f32\n            tile.yield %t"),
    ),
}


def edited(name: str) -> str:
    before = text("attention_forward")
    if name == "wider tiles of rows":
        return before.replace("48x", "60x").replace("step (1, 1, 48)", "step (1, 1, 60)").replace("constant 47", "constant 59")
    for anchor, old, new in EDITS[name]:
        at = before.index(old, before.index(anchor))
        before = before[:at] + new + before[at + len(old) :]
    return before


@pytest.mark.parametrize("name", EDITS)
def test_the_text_is_the_program(name):
    """An edit of the structure changes native code as it changes the interpreter."""
    query, key, value, slopes = attention_inputs(np.random.default_rng(4), 1, 2, 2, 150, 200)
    query *= 3
    changed = edited(name)
    wanted, wanted_lse = np.empty_like(query), np.empty(query.shape[:3], np.float32)
    run(changed, query, key, value, 0.125, slopes, wanted, wanted_lse, 1)
    out, lse = run_compiled(changed, query, key, value, slopes)
    same = {"every block is PARTIAL", "another order of tasks", "wider tiles of rows"}
    original, _ = attention(query, key, value, 0.125, slopes)
    assert np.allclose(wanted, original, atol=1e-5) == (name in same)
    np.testing.assert_allclose(out, wanted, atol=1e-5 * max(1.0, np.abs(wanted[np.isfinite(wanted)]).max()), rtol=0)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-5, rtol=0)
