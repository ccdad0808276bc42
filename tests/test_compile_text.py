"""attnc.compile of IREE's text: attention of any domain, and what stands around it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import attnc
from attention_modules import AttentionModule, close, exact

BATCHED = {"b": 2, "m": 37, "k": 53, "e": 16, "n": 24}
CAUSAL = "%c = arith.cmpi sge, %i_m, %i_k : index\n%x = arith.select %c, %s, %ninf : f32"


def check(module: AttentionModule, *captures: np.ndarray, factor: float = 12.0) -> np.ndarray:
    text = module.text()
    inputs = [*module.inputs(), *captures]
    result = attnc.compile(text)(*inputs)
    close(result, exact(text, inputs)[0], module.out_element or module.element, text, factor)
    return result


def iree_values(region: str = "") -> np.ndarray:
    sizes = {"b": 1, "m": 3, "k": 3, "e": 4, "n": 4}
    module = AttentionModule(sizes, "bme", "bke", "bkn", "bmn", region=region, scale=0.5)
    x = (np.arange(12, dtype=np.float32) / 10 + 0.1).reshape(1, 3, 4)
    return attnc.compile(module.text())(x, x, x)


def test_values_of_plain_attention():
    out = iree_values()
    assert np.allclose(out[0, :, 0], [0.5530, 0.6328, 0.7011], atol=1e-4)
    assert np.allclose(np.diff(out[0]), 0.1, atol=1e-6)


def test_values_of_causal_attention():
    assert np.allclose(iree_values(CAUSAL)[0, :, 0], [0.1, 0.3509, 0.7011], atol=1e-4)


ODD = {
    "rows last": ("bem", "bke", "bkn", "bmn"),
    "keys transposed": ("bme", "bek", "bkn", "bmn"),
    "values transposed": ("bme", "bke", "bnk", "bmn"),
    "out transposed": ("bme", "bke", "bkn", "bnm"),
    "batch inside": ("mbe", "kbe", "kbn", "mbn"),
    "all backwards": ("emb", "ekb", "nkb", "nmb"),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("region", ["", CAUSAL], ids=["plain", "causal"])
def test_orders_of_dims(name: str, region: str):
    check(AttentionModule(BATCHED, *ODD[name], region=region))


MANY = {
    "two k2": ("bme", "bkle", "bkln", "bmn"),
    "two k2 apart": ("bme", "kble", "lbnk", "bmn"),
    "two batch, two rows": ("abgme", "abke", "abkn", "abgmn"),
    "groups outside": ("gbme", "bke", "bkn", "bgmn"),
    "three batch dims": ("abcme", "abcke", "abckn", "abcmn"),
    "three rows": ("bgome", "bke", "bkn", "bgomn"),
    "two head dims": ("bmef", "bkfe", "bkn", "bmn"),
    "two value dims": ("bme", "bke", "bkno", "bomn"),
    "no batch": ("me", "ke", "kn", "mn"),
    "no rows": ("be", "bke", "bkn", "bn"),
    "no value columns": ("bme", "bke", "bk", "bm"),
    "keys shared by batches": ("bme", "ke", "bkn", "bmn"),
    "queries shared by batches": ("me", "bke", "bkn", "bmn"),
    "unit dims": ("b1me", "bke1", "1bkn", "bm1n"),
}
SIZES = {"a": 2, "b": 3, "c": 2, "g": 3, "o": 2, "m": 11, "k": 7, "l": 5, "e": 8, "f": 3, "n": 9}


def many(name: str, region: str = "", **more) -> AttentionModule:
    maps = MANY[name]
    sizes = {d: size for d, size in SIZES.items() if any(d in dims for dims in maps)}
    if name == "two value dims":
        sizes = {**sizes, "o": 2}
    return AttentionModule(sizes, *maps, region=region, **more)


@pytest.mark.parametrize("name", MANY)
def test_several_dims_of_a_role(name: str):
    check(many(name))


@pytest.mark.parametrize(
    "name", ["two k2", "two k2 apart", "two batch, two rows", "groups outside", "three rows", "three batch dims"]
)
def test_positions_in_every_dim(name: str):
    module = many(name)
    dims = [d for d in module.sizes if d not in "efn"]
    lines = ["%zero = arith.constant 0 : index"]
    total = "%zero"
    for n, d in enumerate(dims):
        lines += [f"%w{n} = arith.constant {n + 1} : index", f"%p{n} = arith.muli %i_{d}, %w{n} : index"]
        lines.append(f"%t{n} = arith.addi {total}, %p{n} : index")
        total = f"%t{n}"
    lines += [f"%t32 = arith.index_cast {total} : index to i32", "%tf = arith.sitofp %t32 : i32 to f32"]
    lines += ["%tenth = arith.constant 0.1 : f32", "%bias = arith.mulf %tf, %tenth : f32", "%x = arith.addf %s, %bias : f32"]
    check(many(name, "\n".join(lines)))


@pytest.mark.parametrize(
    ("element", "dims"), [("i1", "bmk"), ("i8", "kmb"), ("f32", "mk"), ("f16", "bmk"), ("i1", "k"), ("f32", "b1k")]
)
def test_mask_operands(element: str, dims: str):
    check(AttentionModule(BATCHED, "bme", "bke", "bkn", "bmn", mask=dims, mask_element=element))


def test_mask_over_one_of_two_k2_dims():
    for dims in ("bml", "bmk", "bmkl", "lmk"):
        check(many("two k2", mask=dims, mask_element="f32"))


@pytest.mark.parametrize("element", ["f64", "f32", "f16", "bf16"])
def test_element_types(element: str):
    region = "%c = arith.cmpi sge, %i_m, %i_k : index\n%x = arith.select %c, %s, %ninf : " + (
        "f64" if element == "f64" else "f32"
    )
    out = check(AttentionModule(BATCHED, "bem", "bke", "bkn", "mbn", element=element, region=region))
    assert out.dtype.name == {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}[element]


def test_output_of_another_type():
    check(AttentionModule(BATCHED, "bme", "bke", "bkn", "bmn", element="f16", out_element="f32"), factor=200)


def test_dynamic_sizes_compile_once_for_each_head_dim():
    from attnc import programs

    module = AttentionModule(BATCHED, "bme", "bke", "bkn", "bmn", dynamic="bmken", region=CAUSAL)
    compiled = attnc.compile(module.text())
    before = None
    for sizes in ({"b": 1, "m": 40, "k": 50}, {"b": 3, "m": 65, "k": 33}, {"b": 2, "m": 90, "k": 130}):
        module.sizes = {**BATCHED, **sizes}
        inputs = module.inputs()
        close(compiled(*inputs), exact(module.text(), inputs)[0], "f32")
        assert before in (None, programs.compiled)
        before = programs.compiled
    module.sizes = {**BATCHED, "e": 24, "n": 8}
    inputs = module.inputs()
    close(compiled(*inputs), exact(module.text(), inputs)[0], "f32")


def test_head_dims_above_128():
    check(AttentionModule({"b": 1, "m": 20, "k": 30, "e": 200, "n": 256}, "bme", "bke", "bkn", "bmn", scale=0.07))


def test_softcap_sees_natural_units():
    region = """%cap = arith.constant 0.5 : f32
        %d = arith.divf %s, %cap : f32
        %t = math.tanh %d : f32
        %x = arith.mulf %t, %cap : f32"""
    check(AttentionModule(BATCHED, "bme", "bke", "bkn", "bmn", region=region, scale=1.5))


def test_rows_without_live_keys_are_zero():
    region = "%o = arith.constant 20 : index\n%j = arith.addi %i_k, %o : index\n%c = arith.cmpi sge, %i_m, %j : index\n"
    out = check(AttentionModule(BATCHED, "bme", "bke", "bkn", "bmn", region=region + "%x = arith.select %c, %s, %ninf : f32"))
    assert (out[:, :20] == 0).all() and (out[:, 20:] != 0).all()


def test_captures_in_the_region():
    region = """%h = tensor.extract %slopes[%i_b] : tensor<2xf32>
        %t = tensor.extract %table[%i_m, %i_k] : tensor<37x53xf32>
        %y = arith.mulf %h, %t : f32
        %x = arith.addf %s, %y : f32"""
    captures = [("slopes", "tensor<2xf32>"), ("table", "tensor<37x53xf32>")]
    rng = np.random.default_rng(3)
    arrays = rng.standard_normal(2).astype(np.float32), rng.standard_normal((37, 53)).astype(np.float32)
    check(AttentionModule(BATCHED, "bme", "bke", "bkn", "bmn", region=region, captures=captures), *arrays)


def test_torch_tensors_give_torch_tensors_whatever_their_strides():
    module = AttentionModule(BATCHED, "bme", "bke", "bkn", "bmn")
    compiled = attnc.compile(module.text())
    inputs = [torch.from_numpy(array) for array in module.inputs()]
    out = compiled(*inputs)
    assert isinstance(out, torch.Tensor) and out.is_contiguous()
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    assert torch.allclose(out, compiled(*strided), atol=1e-6)
    expanded = compiled(inputs[0], inputs[1][:1].expand(2, -1, -1), inputs[2])
    wanted = torch.softmax(inputs[0] @ inputs[1][:1].mT * 0.25, -1) @ inputs[2]
    assert torch.allclose(expanded, wanted, atol=1e-6)


def test_arguments_are_refused_by_name():
    compiled = attnc.compile(AttentionModule(BATCHED, "bme", "bke", "bkn", "bmn").text())
    q, k, v = AttentionModule(BATCHED, "bme", "bke", "bkn", "bmn").inputs()
    with pytest.raises(attnc.AttncError, match=r"q: f32.*got float64"):
        compiled(q.astype(np.float64), k, v)
    with pytest.raises(attnc.AttncError, match=r"k: f32.*dim 1 has 52 elements, not 53"):
        compiled(q, k[:, :52], v)
    with pytest.raises(attnc.AttncError, match="takes 3 arguments, not 2"):
        compiled(q, k)
    with pytest.raises(attnc.AttncError, match=r"v: f32.*got 2 dimensions"):
        compiled(q, k, v[0])


@pytest.mark.parametrize("domain", ["kbmen", "bkmen", "enkmb"])
def test_keys_in_any_place_of_the_domain(domain: str):
    check(AttentionModule(BATCHED, "bme", "bke", "bkn", "bmn", region=CAUSAL, domain=list(domain)))


def test_the_text_of_every_stage_is_taken_up():
    from attnc import pipeline
    from attnc.mlir_text import parse_module
    from attnc.target import Target

    module = AttentionModule(BATCHED, "bem", "kbe", "bkn", "nbm", region=CAUSAL, mask="mk")
    text, inputs = module.text(), module.inputs()
    wanted = attnc.compile(text)(*inputs)
    current = parse_module(text)
    for name in pipeline.GRAPH_STAGES:
        pipeline.run_pass(current, name, Target.host())
        assert np.array_equal(attnc.compile(str(current))(*inputs), wanted), name


def test_a_transposed_consumer_of_causal_attention():
    text = AttentionModule(BATCHED, "bme", "bke", "bkn", "bmn", region=CAUSAL).text()
    before, after = "tensor<2x37x24xf32>", "tensor<24x2x37xf32>"
    init = f"%t = tensor.empty() : {after}\n"
    move = f"%y = linalg.transpose ins(%r : {before}) outs(%t : {after}) permutation = [2, 0, 1]\n"
    text = text.replace(f"return %r : {before}", f"{init}{move}return %y : {after}").replace(
        f"-> {before} {{\n", f"-> {after} {{\n", 1
    )
    inputs = AttentionModule(BATCHED, "bme", "bke", "bkn", "bmn").inputs()
    compiled = attnc.compile(text)
    close(compiled(*inputs), exact(text, inputs)[0], "f32")
    assert compiled.kernels == ("attention",) and compiled.temporary_bytes == 0


EXTRACT = """
func.func @main(%a: tensor<4xf32>, %i: index) -> f32 {
  %r = tensor.extract %a[%i] : tensor<4xf32>
  return %r : f32
}
"""


@pytest.mark.parametrize("index", [-1, 4, 10**9])
def test_the_host_function_reads_no_element_outside_of_a_tensor(index: int):
    program = attnc.compile(EXTRACT)
    assert program(np.arange(4, dtype=np.float32), 3) == 3
    with pytest.raises(attnc.errors.CaptureIndexError, match=f"index {index} is out of range for dim 0 with size 4"):
        program(np.arange(4, dtype=np.float32), index)


REMAINDER = """
func.func @main(%a: tensor<4xi32>, %b: tensor<4xi32>) -> tensor<4xi32> {
  %e = tensor.empty() : tensor<4xi32>
  %r = linalg.generic {indexing_maps = [affine_map<(i) -> (i)>, affine_map<(i) -> (i)>, affine_map<(i) -> (i)>],
      iterator_types = ["parallel"]} ins(%a, %b : tensor<4xi32>, tensor<4xi32>) outs(%e : tensor<4xi32>) {
    ^bb0(%x: i32, %y: i32, %z: i32):
      %s = arith.remsi %x, %y : i32
      linalg.yield %s : i32
  } -> tensor<4xi32>
  return %r : tensor<4xi32>
}
"""


def test_a_zero_divisor_in_a_loop_is_called_so():
    program = attnc.compile(REMAINDER)
    a, b = np.full(4, -(2**31), np.int32), np.array([-1, 3, 7, 2], np.int32)
    np.testing.assert_array_equal(program(a, b), [0, -2, -2, 0])
    with pytest.raises(attnc.errors.ModDivisionError, match="integer division by zero"):
        program(a, b * 0)


def test_what_cannot_be_compiled_says_so():
    called = """
func.func private @h(%a: tensor<4xf32>) -> tensor<4xf32> { return %a : tensor<4xf32> }
func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {
  %r = func.call @h(%a) : (tensor<4xf32>) -> tensor<4xf32>
  return %r : tensor<4xf32>
}
"""
    with pytest.raises(attnc.errors.LoweringError, match=r"func\.call of @h: calls are not compiled"):
        attnc.compile(called)
    for element in ("f8E4M3FN", "complex<f32>"):
        text = f"func.func @main(%a: tensor<3x{element}>) -> tensor<3x{element}> {{ return %a : tensor<3x{element}> }}"
        with pytest.raises(attnc.errors.LoweringError, match="argument a is a tensor of"):
            attnc.compile(text)
