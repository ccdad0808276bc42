"""attnc.compile of MLIR with linalg around attention: online_attention, reductions, slices, constants, scalars, refusals."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from xdsl.printer import Printer

import attnc
from attention_modules import AttentionModule, close, exact
from attnc import errors, pipeline
from attnc.cli import commands
from attnc.mlir_text import parse_module
from attnc.target import Target
from needs import needs_tool, tool

RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((2, n, 16), np.float32) for n in (21, 30, 30))
MAPS = {
    "q": "affine_map<(b, m, k, e, n) -> (b, m, e)>",
    "k": "affine_map<(b, m, k, e, n) -> (b, k, e)>",
    "v": "affine_map<(b, m, k, e, n) -> (b, k, n)>",
    "s": "affine_map<(b, m, k, e, n) -> ()>",
    "o": "affine_map<(b, m, k, e, n) -> (b, m, n)>",
    "r": "affine_map<(b, m, k, e, n) -> (b, m)>",
}
ARGUMENTS = "%q: tensor<2x21x16xf32>, %k: tensor<2x30x16xf32>, %v: tensor<2x30x16xf32>"
TYPES = "tensor<2x21x16xf32>, tensor<2x30x16xf32>, tensor<2x30x16xf32>, f32"
OUT, ROW = "tensor<2x21x16xf32>", "tensor<2x21xf32>"


def online(inits: str, after: str, arguments: str, results: str) -> str:
    maps = ", ".join(MAPS[name] for name in "qkvsorr")
    return f"""func.func @main({arguments}) -> {results} {{
  %scale = arith.constant 0.25 : f32
  %zero = arith.constant 0.0 : f32
  %ninf = arith.constant 0xFF800000 : f32
  %e0 = tensor.empty() : {OUT}
  %e1 = tensor.empty() : {ROW}
{inits}
  %acc, %max, %sum = "iree_linalg_ext.online_attention"(%q, %k, %v, %scale, %a0, %m0, %s0) <{{indexing_maps = [{maps}]}}> ({{
  ^bb0(%s: f32):
    %i = "iree_linalg_ext.index"() <{{dim = 1 : i64}}> : () -> index
    %j = "iree_linalg_ext.index"() <{{dim = 2 : i64}}> : () -> index
    %c = arith.cmpi sge, %i, %j : index
    %x = arith.select %c, %s, %ninf : f32
    "iree_linalg_ext.yield"(%x) : (f32) -> ()
  }}) : ({TYPES}, {OUT}, {ROW}, {ROW}) -> ({OUT}, {ROW}, {ROW})
{after}
}}
"""


FRESH = f"""  %a0 = linalg.fill ins(%zero : f32) outs(%e0 : {OUT}) -> {OUT}
  %m0 = linalg.fill ins(%ninf : f32) outs(%e1 : {ROW}) -> {ROW}
  %s0 = linalg.fill ins(%zero : f32) outs(%e1 : {ROW}) -> {ROW}"""
SAME = "affine_map<(a, b) -> (a, b)>"
LSE = f"""  %lse = linalg.generic {{indexing_maps = [{SAME}, {SAME}, {SAME}],
      iterator_types = ["parallel", "parallel"]}} ins(%max, %sum : {ROW}, {ROW}) outs(%e1 : {ROW}) {{
  ^bb1(%m: f32, %l: f32, %o: f32):
    %log = math.log %l : f32
    %y = arith.addf %m, %log : f32
    linalg.yield %y : f32
  }} -> {ROW}"""


def check(text: str, inputs: Sequence[np.ndarray], element: str = "f32") -> list[np.ndarray]:
    results = attnc.compile(text)(*inputs)
    results = list(results) if isinstance(results, tuple) else [results]
    for n, (result, wanted) in enumerate(zip(results, exact(text, inputs), strict=True)):
        close(result, wanted, element, f"result {n} of {text}", factor=40)
    return results


def test_raw_results_of_online_attention():
    after = f"  return %acc, %max, %sum : {OUT}, {ROW}, {ROW}"
    check(online(FRESH, after, ARGUMENTS, f"({OUT}, {ROW}, {ROW})"), (Q, K, V))


def test_log_sum_exp_is_computed_with_attention():
    text = online(FRESH, f"{LSE}\n  return %lse, %acc : {ROW}, {OUT}", ARGUMENTS, f"({ROW}, {OUT})")
    check(text, (Q, K, V))
    assert attnc.compile(text).kernels == ("attention",)


def test_initial_values_are_continued():
    arguments = f"{ARGUMENTS}, %a0: {OUT}, %m0: {ROW}, %s0: {ROW}"
    text = online("", f"  return %acc, %max, %sum : {OUT}, {ROW}, {ROW}", arguments, f"({OUT}, {ROW}, {ROW})")
    fresh = (np.zeros((2, 21, 16), np.float32), np.full((2, 21), -np.inf, np.float32), np.zeros((2, 21), np.float32))
    some = (
        RNG.standard_normal((2, 21, 16), np.float32),
        RNG.standard_normal((2, 21), np.float32),
        RNG.random((2, 21), np.float32),
    )
    for inits in (fresh, some):
        check(text, (Q, K, V, *inits))


def test_the_least_number_as_initial_maximum():
    """As IREE writes it: what it multiplies with is 0 all the same."""
    least = FRESH.replace("ins(%ninf : f32)", "ins(%least : f32)")
    least = "  %least = arith.constant -3.40282347E+38 : f32\n" + least
    check(online(least, f"  return %acc, %sum : {OUT}, {ROW}", ARGUMENTS, f"({OUT}, {ROW})"), (Q, K, V))


REDUCTIONS = {
    "sum": ("0.0", "arith.addf %p, %o : f32"),
    "product": ("1.0", "arith.mulf %p, %o : f32"),
    "maximum": ("0xFF800000", "arith.maximumf %p, %o : f32"),
    "minimum": ("0x7F800000", "arith.minimumf %o, %p : f32"),
    "neither": ("0.0", "arith.divf %p, %p : f32"),
}


@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize("dims", ["ab", "bc", "ac", "abc", "b"])
def test_reductions(kind: str, dims: str):
    start, combine = REDUCTIONS[kind]
    kept = [d for d in "abc" if d not in dims]
    sizes = {"a": 3, "b": 37, "c": 5}
    type_ = f"tensor<{''.join(f'{sizes[d]}x' for d in kept)}f32>"
    iterators = ", ".join('"reduction"' if d in dims else '"parallel"' for d in "abc")
    text = f"""func.func @main(%x: tensor<3x37x5xf32>) -> {type_} {{
  %start = arith.constant {start} : f32
  %e = tensor.empty() : {type_}
  %f = linalg.fill ins(%start : f32) outs(%e : {type_}) -> {type_}
  %r = linalg.generic {{indexing_maps = [affine_map<(a, b, c) -> (a, b, c)>, affine_map<(a, b, c) -> ({", ".join(kept)})>],
      iterator_types = [{iterators}]}} ins(%x : tensor<3x37x5xf32>) outs(%f : {type_}) {{
  ^bb0(%p: f32, %o: f32):
    %y = {combine}
    linalg.yield %y : f32
  }} -> {type_}
  return %r : {type_}
}}"""
    check(text, [np.abs(RNG.standard_normal((3, 37, 5), np.float32)) + 0.5])


def test_two_results_of_one_reduction():
    """The largest element and where it is: nothing that lanes could combine."""
    text = """func.func @main(%x: tensor<4x33xf32>) -> (tensor<4xf32>, tensor<4xi32>) {
  %low = arith.constant 0xFF800000 : f32
  %none = arith.constant -1 : i32
  %e = tensor.empty() : tensor<4xf32>
  %f = tensor.empty() : tensor<4xi32>
  %m = linalg.fill ins(%low : f32) outs(%e : tensor<4xf32>) -> tensor<4xf32>
  %a = linalg.fill ins(%none : i32) outs(%f : tensor<4xi32>) -> tensor<4xi32>
  %r:2 = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i)>, affine_map<(i, j) -> (i)>],
      iterator_types = ["parallel", "reduction"]} ins(%x : tensor<4x33xf32>) outs(%m, %a : tensor<4xf32>, tensor<4xi32>) {
  ^bb0(%p: f32, %best: f32, %at: i32):
    %j = linalg.index 1 : index
    %here = arith.index_cast %j : index to i32
    %more = arith.cmpf ogt, %p, %best : f32
    %y = arith.select %more, %p, %best : f32
    %z = arith.select %more, %here, %at : i32
    linalg.yield %y, %z : f32, i32
  } -> (tensor<4xf32>, tensor<4xi32>)
  return %r#0, %r#1 : tensor<4xf32>, tensor<4xi32>
}"""
    x = RNG.standard_normal((4, 33), np.float32)
    top, place = attnc.compile(text)(x)
    assert np.array_equal(top, x.max(1)) and np.array_equal(place, x.argmax(1))


def test_slices_gathers_constants_and_scalars():
    text = """func.func @main(%x: tensor<6x?xf16>, %table: tensor<?xf32>, %i: tensor<6xi64>, %s: f16, %n: index) -> (tensor<6x?xf32>, index) {
  %c1 = arith.constant 1 : index
  %c2 = arith.constant 2 : index
  %w = arith.constant dense<[[1.0], [2.0], [3.0], [4.0], [5.0], [6.0]]> : tensor<6x1xf32>
  %size = tensor.dim %x, %c1 : tensor<6x?xf16>
  %half = arith.divui %size, %c2 : index
  %wide = arith.extf %s : f16 to f32
  %part = tensor.extract_slice %x[0, %n] [6, %half] [1, 1] : tensor<6x?xf16> to tensor<6x?xf16>
  %e = tensor.empty(%half) : tensor<6x?xf32>
  %r = linalg.generic {indexing_maps = [affine_map<(a, b) -> (a, b)>, affine_map<(a, b) -> (a, 0)>, affine_map<(a, b) -> (a)>, affine_map<(a, b) -> (a, b)>],
      iterator_types = ["parallel", "parallel"]} ins(%part, %w, %i : tensor<6x?xf16>, tensor<6x1xf32>, tensor<6xi64>) outs(%e : tensor<6x?xf32>) {
  ^bb0(%p: f16, %q: f32, %at: i64, %o: f32):
    %1 = arith.extf %p : f16 to f32
    %2 = arith.mulf %1, %q : f32
    %row = arith.index_cast %at : i64 to index
    %3 = tensor.extract %table[%row] {attnc.checked = "all", attnc.name = "table"} : tensor<?xf32>
    %4 = arith.mulf %3, %wide : f32
    %5 = arith.addf %2, %4 : f32
    linalg.yield %5 : f32
  } -> tensor<6x?xf32>
  return %r, %half : tensor<6x?xf32>, index
}"""  # noqa: E501 - IR is long
    program = attnc.compile(text)
    x, table = RNG.standard_normal((6, 40)).astype(np.float16), RNG.standard_normal(9).astype(np.float32)
    rows = np.array([0, 8, -1, -9, 3, 4])
    out, half = program(x, table, rows, 0.1, 3)
    wanted = x[:, 3:23].astype(np.float64) * np.arange(1, 7)[:, None] + table[rows][:, None] * float(np.float16(0.1))
    assert half == 20
    close(out, wanted, "f32")
    with pytest.raises(errors.AttncError, match="out of range"):
        program(x, table, np.array([0, 9, 0, 0, 0, 0]), 0.1, 3)
    with pytest.raises(errors.ShapeError, match="slice reaches beyond"):
        program(x, table, rows, 0.1, 21)


def test_inputs_are_never_written_and_results_are_new():
    text = """func.func @main(%x: tensor<4x5xf32>, %y: tensor<2x5xf32>) -> (tensor<4x5xf32>, tensor<4x5xf32>, tensor<5x4xf32>) {
  %r = tensor.insert_slice %y into %x[1, 0] [2, 5] [1, 1] : tensor<2x5xf32> into tensor<4x5xf32>
  %e = tensor.empty() : tensor<5x4xf32>
  %t = linalg.transpose ins(%r : tensor<4x5xf32>) outs(%e : tensor<5x4xf32>) permutation = [1, 0]
  return %x, %r, %t : tensor<4x5xf32>, tensor<4x5xf32>, tensor<5x4xf32>
}"""
    x, y = RNG.standard_normal((4, 5), np.float32), RNG.standard_normal((2, 5), np.float32)
    before = x.copy()
    same, changed, transposed = attnc.compile(text)(x, y)
    assert np.array_equal(x, before) and np.array_equal(same, x) and not np.shares_memory(same, x)
    wanted = np.concatenate([x[:1], y, x[3:]])
    assert np.array_equal(changed, wanted) and np.array_equal(transposed, wanted.T)
    assert np.array_equal(attnc.compile(text)(x[::-1], y[:, ::-1])[0], x[::-1])


def test_a_product_outside_attention_is_refused_by_place():
    text = """func.func @main(%x: tensor<4x5xf32>, %y: tensor<5x6xf32>, %e: tensor<4x6xf32>) -> tensor<4x6xf32> {
  %r = linalg.matmul {attnc.loc = "model.py:12"} ins(%x, %y : tensor<4x5xf32>, tensor<5x6xf32>) outs(%e : tensor<4x6xf32>) -> tensor<4x6xf32>
  return %r : tensor<4x6xf32>
}"""  # noqa: E501 - IR is long
    with pytest.raises(errors.LoweringError, match="matrix product"):
        attnc.compile(text)


def test_which_of_several_functions():
    one = "func.func @a(%x: tensor<3xf32>) -> tensor<3xf32> {\n return %x : tensor<3xf32>\n}\n"
    two = one + one.replace("@a", "@b")
    with pytest.raises(errors.LoweringError, match="several public functions: @a, @b"):
        attnc.compile(two)
    x = np.ones(3, np.float32)
    assert np.array_equal(attnc.compile(two, function="b")(x), x)
    assert np.array_equal(attnc.compile(two, function="@a")(x), x)
    with pytest.raises(errors.LoweringError, match=r"no public function @c\n.*name one that it has: @a, @b"):
        attnc.compile(two, function="c")


# -- the command ----------------------------------------------------------------------------------------------------------


def command(*words: str) -> str:
    result = CliRunner().invoke(commands, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_run_in_the_manner_of_iree_run_module(tmp_path: Path):
    sizes = {"b": 1, "m": 3, "k": 3, "e": 4, "n": 4}
    (tmp_path / "m.mlir").write_text(AttentionModule(sizes, "bme", "bke", "bkn", "bmn", scale=0.5).text())
    x = (np.arange(12, dtype=np.float32) / 10 + 0.1).reshape(1, 3, 4)
    np.save(tmp_path / "x.npy", x)
    written = "1x3x4xf32=" + ",".join(f"{value:.1f}" for value in x.ravel())
    out = command(
        "run", str(tmp_path / "m.mlir"), "--function", "main", f"--input=@{tmp_path / 'x.npy'}", *[f"--input={written}"] * 2
    )
    assert out.startswith("result[0]: hal.buffer_view\n1x3x4xf32=[[0.55298")
    words = [f"--input=@{tmp_path / 'x.npy'}"] * 3
    assert command("run", str(tmp_path / "m.mlir"), *words, f"--output=@{tmp_path / 'o.npy'}") == ""
    assert np.allclose(np.load(tmp_path / "o.npy")[0, :, 0], [0.5530, 0.6328, 0.7011], atol=1e-4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--input=1x3x4xf32"], "1 input given, 3 needed"),
        (["--input=1x3x4xf32", "--input=1x3x4xf64", "--input=1x3x4xf32"], "k: f32"),
        (["--input=1x3x4xf32", "--input=1x3x5xf32", "--input=1x3x4xf32"], "dim 2 has 5 elements, not 4"),
        (["--input=@none.npy", "--input=1x3x4xf32", "--input=1x3x4xf32"], "none.npy"),
        (["--input=1x3x4xf32=1,2", "--input=1x3x4xf32", "--input=1x3x4xf32"], "2 values for 12 elements"),
        (["--input=1x3x4xi8=300", "--input=1x3x4xf32", "--input=1x3x4xf32"], "300 is outside of [-128, 127]"),
        (["--input=1x3x4xui8=-1", "--input=1x3x4xf32", "--input=1x3x4xf32"], "-1 is outside of [0, 255]"),
        (["--input=1x3x4xi1=2", "--input=1x3x4xf32", "--input=1x3x4xf32"], "2 is outside of [0, 1]"),
        (["--input=1x3x4xf32"] * 3 + ["--output=-"] * 2, "2 outputs given for 1 result\n"),
        (["--input=what", "--input=1x3x4xf32", "--input=1x3x4xf32"], "not understood"),
    ],
)
def test_run_says_what_is_wrong(words: list[str], said: str, tmp_path: Path):
    sizes = {"b": 1, "m": 3, "k": 3, "e": 4, "n": 4}
    (tmp_path / "m.mlir").write_text(AttentionModule(sizes, "bme", "bke", "bkn", "bmn").text())
    result = CliRunner().invoke(commands, ["run", str(tmp_path / "m.mlir"), *words])
    assert result.exit_code == 1 and said in result.output and "Traceback" not in result.output


def test_compile_prints_every_level(tmp_path: Path):
    file = tmp_path / "m.mlir"
    file.write_text(online(FRESH, f"{LSE}\n  return %lse : {ROW}", ARGUMENTS, ROW))
    assert "func.call @attention_0" in command("compile", str(file))
    assert "define void @attention.work(ptr %context)" in command("compile", str(file), "--emit", "llvm")
    assert re.search(r"^attention\.work:", command("compile", str(file), "--emit", "asm"), re.MULTILINE)


def test_compile_reads_exported_files(tmp_path: Path):
    import torch

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    torch.export.save(torch.export.export(Model(), (torch.zeros(1, 2, 20, 16),)), tmp_path / "m.pt2")
    assert "func.call @attention_0" in command("compile", str(tmp_path / "m.pt2"))
    (tmp_path / "bad.pt2").write_text("no such thing")
    result = CliRunner().invoke(commands, ["compile", str(tmp_path / "bad.pt2")])
    assert result.exit_code == 1 and "no exported program" in result.output


@needs_tool("iree-opt")
def test_what_every_pass_prints_verifies_in_iree_and_is_read_again(tmp_path: Path):
    module = parse_module(online(FRESH, f"{LSE}\n  return %lse, %acc : {ROW}, {OUT}", ARGUMENTS, f"({ROW}, {OUT})"))
    for name in (*pipeline.GRAPH_STAGES, "attention-to-linalg"):
        pipeline.run_pass(module, name, Target.host())
        text = str(module)
        assert str(parse_module(text)) == text, name
        with (tmp_path / f"{name}.mlir").open("w") as stream:
            Printer(stream, print_generic_format=True).print_op(module)
        done = subprocess.run(
            [str(tool("iree-opt")), str(tmp_path / f"{name}.mlir")], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{name}: {done.stderr[:2000]}"


def test_what_is_inserted_last_stands():
    """Sources are computed where they belong only where that changes nothing."""
    text = """func.func @main(%x: tensor<2x5xf32>, %y: tensor<4x5xf32>) -> (tensor<4x5xf32>, tensor<4x5xf32>) {
  %e = tensor.empty() : tensor<4x5xf32>
  %e2 = tensor.empty() : tensor<2x5xf32>
  %b = math.exp %x : tensor<2x5xf32>
  %a = math.absf %x : tensor<2x5xf32>
  %r0 = tensor.insert_slice %a into %e[0, 0] [2, 5] [1, 1] : tensor<2x5xf32> into tensor<4x5xf32>
  %r1 = tensor.insert_slice %b into %r0[1, 0] [2, 5] [1, 1] : tensor<2x5xf32> into tensor<4x5xf32>
  %r2 = tensor.insert_slice %a into %r1[2, 0] [2, 5] [1, 1] : tensor<2x5xf32> into tensor<4x5xf32>
  %c = math.exp %y : tensor<4x5xf32>
  %s = tensor.insert_slice %b into %c[1, 0] [2, 5] [1, 1] : tensor<2x5xf32> into tensor<4x5xf32>
  return %r2, %s : tensor<4x5xf32>, tensor<4x5xf32>
}"""
    x, y = RNG.standard_normal((2, 5), np.float32), RNG.standard_normal((4, 5), np.float32)
    first, second = attnc.compile(text)(x, y)
    a, b, c = np.abs(x), np.exp(x), np.exp(y)
    assert np.allclose(first, np.stack([a[0], b[0], a[0], a[1]]), atol=1e-6)
    assert np.allclose(second, np.stack([c[0], b[0], b[1], c[3]]), atol=1e-6)


def test_what_a_result_held_before_counts():
    """A generic without reduced dimensions that reads its initial value, which is filled."""
    text = """func.func @main(%x: tensor<f32>) -> tensor<f32> {
  %e = tensor.empty() : tensor<f32>
  %half = arith.constant 0.5 : f32
  %f = linalg.fill ins(%half : f32) outs(%e : tensor<f32>) -> tensor<f32>
  %r = linalg.generic {indexing_maps = [affine_map<() -> ()>, affine_map<() -> ()>], iterator_types = []}
      ins(%x : tensor<f32>) outs(%f : tensor<f32>) {
  ^bb0(%a: f32, %o: f32):
    %y = arith.addf %a, %o : f32
    linalg.yield %y : f32
  } -> tensor<f32>
  return %r : tensor<f32>
}"""
    assert attnc.compile(text)(np.ones((), np.float32)) == 1.5
