"""flex_attention's front end: what it accepts and refuses, layouts of results, aux outputs, autocast, what is compiled anew."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

import attnc
from attnc import errors, pipeline, programs
from attnc.checks import KERNEL_OPTIONS

flex_attention: Any = attnc.flex_attention  # called with wrong types on purpose
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


def qkv(
    batch: int = 1, heads: int = 2, queries: int = 17, keys: int = 21, head_dim: int = 16, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (batch, heads, keys, head_dim)
    return normal(batch, heads, queries, head_dim, dtype=dtype), normal(*shape, dtype=dtype), normal(*shape, dtype=dtype)


def dense(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None, mask: Tensor | None = None) -> Tensor:
    """The formula in f64."""
    ratio = query.shape[1] // key.shape[1]
    key, value = key.double().repeat_interleave(ratio, 1), value.double().repeat_interleave(ratio, 1)
    scores = query.double() @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ value


def close(actual: Tensor, expected: Tensor, tolerance: float = 5e-6) -> None:
    assert (actual.double() - expected).abs().max().item() <= tolerance


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def test_signature_is_torchs_and_one_keyword_more():
    ours = list(inspect.signature(attnc.flex_attention).parameters.values())
    theirs = list(inspect.signature(torch_flex.flex_attention).parameters.values())
    assert [(p.name, p.kind, p.default) for p in ours[:-1]] == [(p.name, p.kind, p.default) for p in theirs]
    assert (ours[-1].name, ours[-1].kind, ours[-1].default) == ("mask_mod", inspect.Parameter.KEYWORD_ONLY, None)


# -- refusals ---------------------------------------------------------------------------------------------------------

Q, K, V = qkv()
META = torch.empty(1, 2, 17, 16, device="meta")

REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no tensor": (
        lambda: flex_attention(Q.numpy(), K, V),
        errors.ArgumentsError,
        "query is a numpy.ndarray, not a torch tensor",
    ),
    "rank 3": (lambda: flex_attention(Q[0], K, V), errors.ShapeError, "query has 3"),
    "rank 5": (lambda: flex_attention(Q, K, V[None]), errors.ShapeError, "value has 5"),
    "rank 0": (lambda: flex_attention(torch.tensor(1.0), K, V), errors.ShapeError, "query has 0"),
    "head dims": (lambda: flex_attention(Q[..., :8], K, V), errors.ShapeError, "E=8 and E=16"),
    "head dim 0": (lambda: flex_attention(Q[..., :0], K[..., :0], V), errors.ShapeError, "E=0"),
    "lengths": (lambda: flex_attention(Q, K, V[:, :, 1:]), errors.ShapeError, "Skv=21 and 20"),
    "heads": (lambda: flex_attention(Q, K[:, :1], V[:, :1]), errors.ShapeError, "enable_gqa"),
    "key and value heads": (lambda: flex_attention(Q, K, V[:, :1], enable_gqa=True), errors.ShapeError, "2 and 1"),
    "ratio": (
        lambda: flex_attention(normal(1, 3, 17, 16), K, V, enable_gqa=True),
        errors.ShapeError,
        "no multiple",
    ),
    "batch": (lambda: flex_attention(normal(3, 2, 17, 16), *map(twice, (K, V))), errors.ShapeError, "3 and 2"),
    "dtypes differ": (lambda: flex_attention(Q, K.half(), V), errors.DtypeError, "float16"),
    "integers": (lambda: flex_attention(Q.int(), K.int(), V.int()), errors.DtypeError, "int32"),
    "complex": (lambda: flex_attention(*(t.to(torch.complex64) for t in (Q, K, V))), errors.DtypeError, "complex64"),
    "fp8": (lambda: flex_attention(*(t.to(torch.float8_e4m3fn) for t in (Q, K, V))), errors.DtypeError, "float8"),
    "devices": (lambda: flex_attention(Q, K.to("meta"), V), errors.DeviceError, "cpu, meta and cpu"),
    "sparse": (lambda: flex_attention(Q.to_sparse(), K, V), errors.UnsupportedTensorError, "query"),
    "nested": (lambda: flex_attention(nested(), K, V), errors.UnsupportedTensorError, "nested"),
    "quantised": (lambda: flex_attention(quantised(), K, V), errors.UnsupportedTensorError, "query"),
    "zero tensor": (
        lambda: flex_attention(torch._efficientzerotensor(1, 2, 17, 16), K, V),  # type: ignore[attr-defined]
        errors.UnsupportedTensorError,
        "zero tensor",
    ),
    "scale text": (lambda: flex_attention(Q, K, V, scale="big"), errors.DtypeError, "scale"),
    "scale vector": (lambda: flex_attention(Q, K, V, scale=torch.ones(1)), errors.DtypeError, "scale"),
    "scale meta": (lambda: flex_attention(Q, K, V, scale=torch.ones((), device="meta")), errors.DeviceError, "scale"),
    "option": (
        lambda: flex_attention(Q, K, V, kernel_options={"block_m": 1}),
        errors.KernelOptionsError,
        "did you mean 'BLOCK_M'",
    ),
    "options": (lambda: flex_attention(Q, K, V, kernel_options=[1]), errors.KernelOptionsError, "list"),
    "both aux": (
        lambda: flex_attention(Q, K, V, return_lse=True, return_aux=AuxRequest()),
        errors.ArgumentsError,
        "both",
    ),
    "aux": (lambda: flex_attention(Q, K, V, return_aux=3), errors.ArgumentsError, "AuxRequest"),
    "mod": (lambda: flex_attention(Q, K, V, 3), errors.ModSignatureError, "score_mod"),
    "block mask": (lambda: flex_attention(Q, K, V, block_mask=3), errors.BlockMaskError, "int"),
    "block mask lengths": (
        lambda: flex_attention(Q, K, V, block_mask=attnc.create_block_mask(causal, None, None, 16, 21)),
        errors.BlockMaskError,
        "16 queries",
    ),
    "capture on meta": (
        lambda: flex_attention(Q, K, V, captures(torch.ones(2, device="meta"))),
        errors.DeviceError,
        "meta",
    ),
    "forward mode": (lambda: dual(), errors.GradientNotImplementedError, "tangent"),
    "capture index": (lambda: flex_attention(Q, K, V, captures(torch.ones(1))), errors.CaptureIndexError, "h=1"),
}


def twice(tensor: Tensor) -> Tensor:
    return tensor.expand(2, -1, -1, -1)


def nested() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([Q[0], Q[0, :1]])


def quantised() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(Q, 0.1, 0, torch.qint8)


def captures(bias: Tensor) -> Callable[..., Any]:
    return lambda score, b, h, q, k: score + bias[h]


def dual() -> Any:
    with torch.autograd.forward_ad.dual_level():
        return flex_attention(torch.autograd.forward_ad.make_dual(Q, Q), K, V)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_with_a_remedy(name: str):
    call, kind, words = REFUSED[name]
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert words in str(caught.value) and "remedy" in str(caught.value)
    close(flex_attention(Q, K, V), dense(Q, K, V))  # and all is well afterwards


def test_cuda_tensors_are_refused_by_their_device():
    class Elsewhere(torch.Tensor):
        """A stand-in for a tensor on a GPU, which this machine may not have."""

        device = torch.device("cuda:0")  # type: ignore[assignment]

    tensor = Elsewhere(1, 2, 17, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnc.checks.PLAIN_KEYS", frozenset())
        with pytest.raises(errors.DeviceError, match="CPU only so far"):
            attnc.checks.plain_tensor("query", tensor)  # type: ignore[attr-defined]


def test_gradients_are_refused_only_where_they_would_be_lost():
    query = Q.clone().requires_grad_()
    mod = captures(torch.ones(2, requires_grad=True))
    with torch.no_grad():
        close(flex_attention(query, K, V, mod), dense(Q, K, V))
    with torch.inference_mode():
        out = flex_attention(query, K, V, mod)
        assert out.is_inference()
        close(out, dense(Q, K, V))
    close(flex_attention(query.detach(), K, V), dense(Q, K, V))


# -- what is accepted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_meta_in_meta_out(dtype: torch.dtype):
    query = torch.empty(2, 5, 4, 16, device="meta", dtype=dtype).transpose(1, 2)
    key, value = torch.empty(1, 4, 7, 16, device="meta", dtype=dtype), torch.empty(1, 4, 7, 8, device="meta", dtype=dtype)
    out, aux = flex_attention(query, key, value, return_aux=AuxRequest(lse=True, max_scores=True))
    assert out.device.type == "meta" and out.shape == (2, 4, 5, 8) and out.dtype == dtype
    assert out.stride() == (160, 8, 32, 1)
    statistics = torch.float64 if dtype is torch.float64 else torch.float32
    for statistic in (aux.lse, aux.max_scores):
        assert statistic.shape == (2, 4, 5) and statistic.dtype == statistics and statistic.device.type == "meta"


def test_fake_in_fake_out():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        out = flex_attention(*(torch.empty(1, 2, 4, 16) for _ in range(3)))
    assert isinstance(out, FakeTensor) and out.shape == (1, 2, 4, 16)


@pytest.mark.parametrize("shape", [(0, 2, 17), (1, 0, 17), (1, 2, 0)])
def test_nothing_in_nothing_out(shape: tuple[int, int, int]):
    query = normal(*shape, 16)
    key = normal(shape[0] or 1, shape[1], 5, 16)
    out, lse = flex_attention(query, key, key, return_lse=True)
    assert out.shape == query.shape and lse.shape == shape


def test_no_keys():
    key = normal(1, 2, 0, 16)
    out, aux = flex_attention(Q, key, key, return_aux=AuxRequest(lse=True, max_scores=True))
    assert (out == 0).all() and (aux.lse == -torch.inf).all() and (aux.max_scores == -torch.inf).all()


def test_return_types():
    assert isinstance(flex_attention(Q, K, V), Tensor)
    _, lse = flex_attention(Q, K, V, return_lse=True)
    assert lse.dtype == torch.float32 and lse.is_contiguous()
    _, aux = flex_attention(Q, K, V, return_aux=AuxRequest(max_scores=True))
    assert isinstance(aux, AuxOutput) and aux.lse is None
    assert aux.max_scores is not None and aux.max_scores.shape == (1, 2, 17)
    _, aux = flex_attention(Q, K, V, return_aux=AuxRequest())
    assert aux == (None, None)
    scores = (Q.double() @ K.double().transpose(-1, -2)) / 4
    close(lse, torch.logsumexp(scores, -1))


def test_layout_of_the_output_follows_the_query():
    query = normal(2, 17, 3, 16).transpose(1, 2)
    out = flex_attention(query, *(normal(1, 3, 5, 16) for _ in range(2)))
    assert out.stride() == query.stride()
    query = normal(2, 17, 3, 48).transpose(1, 2)[..., ::2]
    out = flex_attention(query, normal(1, 3, 5, 24), normal(1, 3, 5, 8))
    assert out.shape == (2, 3, 17, 8) and out.stride() == (408, 8, 24, 1)
    query = normal(16, 3, 17, 2).permute(3, 1, 2, 0)  # the last dim has the largest stride
    assert flex_attention(query, *(normal(1, 3, 5, 16) for _ in range(2))).stride()[-1] == 1


@pytest.mark.parametrize("batch", [2, 3])
def test_one_batch_of_keys_serves_all(batch: int):
    query = normal(batch, 2, 17, 16)
    close(flex_attention(query, K, V), dense(query, K, V))
    key = normal(batch, 2, 21, 16)
    close(flex_attention(query, key, V), dense(query, key, V.expand(batch, -1, -1, -1)))


@pytest.mark.parametrize("queries", [1, 5, 80])
def test_grouped_heads(queries: int):
    query = normal(1, 6, queries, 16)
    close(flex_attention(query, K, V, enable_gqa=True), dense(query, K, V))


def test_scale_is_a_run_time_number():
    flex_attention(Q, K, V)
    before = programs.compiled
    for scale in (0.5, 1, torch.tensor(0.25), torch.tensor(2.0, dtype=torch.float64), V.new_tensor(0.125).numpy()):
        close(flex_attention(Q, K, V, scale=scale), dense(Q, K, V, float(scale)), 2e-5)
    assert programs.compiled == before


def test_lengths_strides_heads_and_batch_compile_nothing():
    flex_attention(Q, K, V)
    flex_attention(*qkv(1, 1, 1, 300))  # few queries, many keys: a program of its own
    before = programs.compiled
    for queries, keys, heads, batch in ((3, 50, 1, 2), (100, 1, 4, 1), (1, 300, 3, 3)):
        query, key, value = qkv(batch, heads, queries, keys)
        close(flex_attention(query, key, value), dense(query, key, value))
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
        key = torch.cat([key, key], -2)[:, :, :keys]
        close(flex_attention(query, key, value), dense(query, key, value))
    assert programs.compiled == before


def test_kernel_options_of_torch_are_accepted():
    options = dict.fromkeys(torch_flex.FlexKernelOptions.__annotations__, 1)
    assert set(options) <= KERNEL_OPTIONS
    close(flex_attention(Q, K, V, kernel_options={**options, "fwd_BLOCK_M": 32, "bwd_BLOCK_M1": 32}), dense(Q, K, V))


def test_autocast_casts_as_torch_does():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flex_attention(Q, K.half(), V).dtype == torch.bfloat16
        assert flex_attention(Q.double(), K.double(), V.double()).dtype == torch.float64
    with torch.autocast("cpu", dtype=torch.float16):
        assert flex_attention(Q, K, V).dtype == torch.float16


def test_lazily_negated_tensors():
    negated = torch.complex(Q, Q).conj().imag
    assert negated.is_neg()
    close(flex_attention(negated, K, V), dense(-Q, K, V))


def test_subclasses_without_their_own_dispatch_and_parameters():
    class Sub(torch.Tensor):
        pass

    close(flex_attention(Q.as_subclass(Sub), K, V), dense(Q, K, V))
    close(flex_attention(torch.nn.Parameter(Q, requires_grad=False), K, V), dense(Q, K, V))


def test_default_device_and_dtype_of_torch_change_nothing():
    with torch.device("meta"):
        out = flex_attention(Q, K, V)
    assert out.device.type == "cpu"
    torch.set_default_dtype(torch.float64)
    try:
        assert flex_attention(Q, K, V).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_dispatch_modes_that_only_watch():
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        close(flex_attention(Q, K, V), dense(Q, K, V))


# -- masks ------------------------------------------------------------------------------------------------------------


def test_mask_mod_and_block_mask_together():
    def window(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q - k < 5

    index, keys = torch.arange(17)[:, None], torch.arange(21)
    expected = dense(Q, K, V, mask=(index >= keys) & (index - keys < 5))
    block_mask = torch_flex.create_block_mask(causal, None, None, 17, 21, device="cpu", BLOCK_SIZE=8)
    for mask in (block_mask, attnc.create_block_mask(causal, None, None, 17, 21)):
        close(flex_attention(Q, K, V, block_mask=mask, mask_mod=window), expected)


def test_block_mask_alone():
    index, keys = torch.arange(17)[:, None], torch.arange(21)
    expected = dense(Q, K, V, mask=index >= keys)
    block_mask = torch_flex.create_block_mask(causal, 1, 2, 17, 21, device="cpu", BLOCK_SIZE=(8, 4))
    close(flex_attention(Q, K, V, block_mask=block_mask), expected)
    with pytest.raises(errors.SlicedBlockMaskError):
        flex_attention(Q, K, V, block_mask=block_mask[:, :, :1])


# -- many threads, interrupts, processes ------------------------------------------------------------------------------


def test_eight_threads_compile_a_new_mod_once():
    programs.forget()
    offset = 0.734

    def mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * 1.75 + offset

    before, results, failures = programs.compiled, [], []

    def work() -> None:
        try:
            results.append(flex_attention(Q, K, V, mod))
        except Exception as error:
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    assert programs.compiled == before + 1
    assert all(torch.equal(result, results[0]) for result in results)


def test_interrupt_during_a_compile_leaves_everything_usable(monkeypatch: pytest.MonkeyPatch):
    from attnc import pipeline

    def mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * 0.731

    for stage in pipeline.STAGES:
        real = pipeline.run_pass

        def interrupted(module: Any, name: str, target: Any, stage: str = stage, real: Any = real) -> None:
            if name == stage:
                raise KeyboardInterrupt
            real(module, name, target)

        with monkeypatch.context() as patch:
            patch.setattr(pipeline, "run_pass", interrupted)
            with pytest.raises(KeyboardInterrupt):
                flex_attention(Q, K, V, mod)
    close(flex_attention(Q, K, V, mod), dense(Q, K, V, 0.731 / 4))


INTERRUPTS = """
import random, signal
import torch, attnc
chance = random.Random(0)
query = torch.randn(1, 2, 200, 16)
scores = query @ query.transpose(-1, -2) / 4

def interrupt(number, frame):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
interrupted = 0
for number in range(60):
    exec(f"def mod(score, b, h, q, k): return score * {number}.5 + h")
    try:
        signal.setitimer(signal.ITIMER_REAL, chance.random() * 0.2)
        attnc.flex_attention(query, query, query, mod)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if number % 10 == 9:
        expected = (scores * (number + 0.5)).softmax(-1) @ query
        assert torch.allclose(attnc.flex_attention(query, query, query, mod), expected, atol=1e-4)
print(interrupted)
"""


def test_interrupts_at_any_moment(cache_directory: Any):
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", INTERRUPTS], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= 3


OFTEN_INTERRUPTED = """
import os, signal, sys
import torch, attnc
query = torch.randn(1, 1, 8, 8)
class Module(torch.nn.Module):
    def forward(self, query):
        return torch.nn.functional.scaled_dot_product_attention(query, query, query)

exported = torch.export.export(Module(), (query,))
text = open(sys.argv[1]).read()
doors = {
    "flex_attention": lambda: attnc.flex_attention(query, query, query, lambda s, b, h, i, j: s.sigmoid()),
    "lower": lambda: attnc.lower(query, query, query),
    "from_text": lambda: attnc.from_text(text),
    "compile": lambda: attnc.compile(exported)(query),
}

def interrupt(number, frame):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
for name, door in doors.items():
    child = os.fork()
    if child:
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{name}: see above")
        continue
    interrupts, moment = 0, 0.004
    while True:
        try:
            signal.setitimer(signal.ITIMER_REAL, moment)
            door()
            signal.setitimer(signal.ITIMER_REAL, 0)
            break
        except KeyboardInterrupt:
            interrupts, moment = interrupts + 1, moment * 1.1
    print(name, interrupts, flush=True)
    os._exit(0)
"""


def test_the_first_imports_may_be_interrupted_again_and_again(cache_directory: Any, tmp_path: Any):
    text = tmp_path / "attention.mlir"
    text.write_text(attnc.lower(Q, K, V).stages["torch"])
    command = [sys.executable, "-W", "ignore", "-c", OFTEN_INTERRUPTED, str(text)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert [int(line.split()[-1]) >= 3 for line in result.stdout.splitlines()] == [True] * 4, result.stdout


class Interrupted:
    def __set_name__(self, owner: type, name: str) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_that_python_wraps_is_an_interrupt(cache_directory: Any, monkeypatch: pytest.MonkeyPatch):
    text = attnc.lower(Q, K, V).stages["torch"]

    def make_a_class(*_: Any) -> Any:
        return type("Class", (), {"field": Interrupted()})

    class Module(torch.nn.Module):
        def forward(self, query: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(query, query, query)

    for function in ("stages_text", "compile_attention", "pass_module"):
        monkeypatch.setattr(pipeline, function, make_a_class)
    doors: list[Callable[[], Any]] = [
        lambda: attnc.lower(Q, K, V),
        lambda: attnc.from_text(text),
        lambda: flex_attention(Q, K, V, lambda score, b, h, i, j: score * 3.0 - 17.0 * j),
        lambda: attnc.compile(Module(), (Q,)),
    ]
    for door in doors:
        with pytest.raises(KeyboardInterrupt):
            door()


IMPORTED_AGAIN = """
import importlib, pkgutil, sys
import torch, attnc, attnc.transforms, attnc.codegen.llvm
names = [
    f"{package.__name__}.{module.name}"
    for package in (attnc.transforms, attnc.codegen.llvm)
    for module in pkgutil.iter_modules(package.__path__)
]
for name in names:
    importlib.import_module(name)
for name in names:  # an interrupted import leaves no module behind, but whatever it had registered elsewhere
    package, _, module = name.rpartition(".")
    del sys.modules[name]
    delattr(sys.modules[package], module)
    importlib.import_module(name)
query = torch.randn(1, 1, 8, 8)
out = attnc.flex_attention(query, query, query, lambda s, b, h, i, j: s.sigmoid())
expected = (query @ query.transpose(-1, -2) / 8**0.5).sigmoid().softmax(-1) @ query
assert torch.allclose(out, expected, atol=1e-5)
"""


def test_modules_of_the_compiler_can_be_imported_again(cache_directory: Any):
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", IMPORTED_AGAIN], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


IMPORTS = """
import sys
import attnc
assert not [name for name in ("torch", "xdsl", "numpy", "llvmlite") if name in sys.modules], "import attnc is heavy"
assert dir(attnc) == sorted(attnc.__all__)
import torch
q = torch.ones(1, 1, 4, 8)
bias = torch.ones(8)
mods = dict(score_mod=lambda s, b, h, i, j: s + bias[i - j], mask_mod=lambda b, h, i, j: i >= j)
attnc.flex_attention(q, q, q, **mods)
attnc.flex_attention(q, q, q, block_mask=attnc.create_block_mask(mods["mask_mod"], None, None, 4, 4), return_lse=True)
print(sorted(name for name in ("torch._dynamo", "torch._inductor", "sympy", "xdsl") if name in sys.modules))
"""


def test_a_warm_process_imports_neither_dynamo_nor_xdsl(cache_directory: Any):
    for expected in ("['xdsl']", "[]"):
        result = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip() == expected


def test_under_torch_compile_the_graph_is_left():
    def function(query: Tensor) -> Tensor:
        return flex_attention(query + 1, K, V, mask_mod=causal) * 2

    compiled = torch.compile(function, backend="eager")
    assert torch.equal(compiled(Q), function(Q))


FIRST_USES = {
    "torch.export": "torch.export.export(Module(), (q, q, q))",
    "torch.compile": "torch.compile(Module(), backend='eager')(q, q, q)",
    "vmap": "torch.func.vmap(Module())(q[None], q[None], q[None])",
    "grad": "torch.func.grad(lambda q: Module()(q, q, q).sum())(q)",
    "make_fx": "torch.fx.experimental.proxy_tensor.make_fx(Module(), tracing_mode='symbolic')(q, q, q)",
    "default device": "with torch.device('meta'): Module()(q, q, q)",
    "inference mode": "with torch.inference_mode(): Module()(q, q, q)",
    "autocast": "with torch.autocast('cpu'): Module()(q, q, q)",
}
FIRST_USE = """
import torch, torch.fx.experimental.proxy_tensor, attnc
class Module(torch.nn.Module):
    def forward(self, query, key, value):
        return attnc.flex_attention(query, key, value, lambda s, b, h, q, k: s * 1.5)
q = torch.randn(2, 2, 5, 8)
{}
expected = (q @ q.mT / 8**0.5 * 1.5).softmax(-1) @ q
assert torch.allclose(Module()(q, q, q), expected, atol=1e-5)
leaf = q.clone().requires_grad_()
Module()(leaf, q, q).sum().backward()
assert torch.isfinite(leaf.grad).all()
assert torch.allclose(attnc.scaled_dot_product_attention(q, q, q), (q @ q.mT / 8**0.5).softmax(-1) @ q, atol=1e-5)
"""


@pytest.mark.parametrize("use", FIRST_USES)
def test_where_attnc_is_first_used_does_not_matter(use: str):
    source = FIRST_USE.format(FIRST_USES[use])
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", source], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
