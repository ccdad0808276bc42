"""Native code under conditions: other machines' vectors, other tile sizes, any number of threads, indices out of range; and the
`tile` stage, run by the interpreter, as a second oracle of the emitter."""

from __future__ import annotations

import itertools
import platform
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

import attnc
from attnc.errors import CaptureIndexError
from attnc.lowered import CompiledAttention
from attnc.target import Target
from needs import needs_isa
from oracle import Problem, check, oracle
from tile_interpreter import run as interpret
from zoo import ENTRIES, Sizes, problem

AUX = AuxRequest(lse=True, max_scores=True)


def arguments_of(p: Problem) -> dict:
    grouped = p.query.shape[1] != p.key.shape[1]
    return {
        "score_mod": p.score_mod,
        "mask_mod": p.mask_mod,
        "block_mask": p.block_mask,
        "scale": p.scale,
        "enable_gqa": grouped,
        "return_aux": AUX,
    }


def run(p: Problem):
    out, aux = attnc.flex_attention(p.query, p.key, p.value, **arguments_of(p))
    return out, aux.lse, aux.max_scores


# -- the tile stage by the interpreter ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENTRIES)
def test_the_tile_stage_means_the_same(name):
    """The whole zoo's kernels, interpreted."""
    sizes = ENTRIES[name].sizes.but(batch=1, heads=2, kv_heads=1, queries=50, keys=70, head_dim=8, value_dim=8)
    p = problem(name, sizes)
    lowered = attnc.lower(p.query, p.key, p.value, **arguments_of(p))
    results = [np.full(p.query.shape, np.nan, np.float32), *(np.full(p.query.shape[:3], np.nan, np.float32) for _ in range(2))]
    defaults = lowered.defaults
    buffers = [t.float().numpy() if t.dtype == torch.bfloat16 else t.numpy() for t in defaults.captures]
    inputs = [p.query.numpy(), p.key.numpy(), p.value.numpy(), defaults.scale, *buffers, *defaults.numbers]
    blocks = [np.broadcast_to(b.numpy(), (1, 2, *b.shape[2:])) for b in defaults.block_lists]
    interpret(lowered.module, *inputs, *blocks, *results, 2, shuffle=1)
    out, lse, top = (torch.from_numpy(array) for array in results)
    check(p, out, lse, top, name)


# -- machines -------------------------------------------------------------------------------------------------------------

HOST = Target.host()
MACHINES = {f"host-{bits}": replace(HOST, vector_bits=bits, registers=32 if bits == 512 else 16) for bits in (128, 256, 512)}
MACHINES["small-caches"] = replace(HOST, l1_bytes=16 * 1024, l2_bytes=64 * 1024)
HASWELL = "+sse4.1,+sse4.2,+avx,+avx2,+fma,+f16c"
WITH_ISA = []
if platform.machine() == "x86_64":
    MACHINES["x86-64"] = replace(HOST, cpu="x86-64", features="", vector_bits=128, registers=16)
    MACHINES["x86-64-wide"] = replace(HOST, cpu="x86-64", features="", vector_bits=512, registers=32)
    MACHINES["haswell"] = replace(HOST, cpu="haswell", features=HASWELL, vector_bits=256, registers=16)
    MACHINES["haswell-wide"] = replace(HOST, cpu="haswell", features=HASWELL, vector_bits=512, registers=32)
    MACHINES["skylake-avx512"] = replace(HOST, cpu="skylake-avx512", features="", vector_bits=512, registers=32)
    WITH_ISA = [("haswell", "avx2"), ("haswell-wide", "avx2"), ("skylake-avx512", "avx512bw")]

PROBLEMS = [
    ("alibi_causal", "f32"),
    ("packed_chained", "bf16"),
    ("soft_cap", "f64"),
    ("two_dtypes", "f16"),
    ("top_k_blocks", "f32"),
    ("nan_bias_masked", "f32"),
    ("trigonometric", "f32"),
]
CASES = [
    pytest.param(machine, *case, marks=[needs_isa(isa) for name, isa in WITH_ISA if name == machine])
    for machine in MACHINES
    for case in PROBLEMS
]


@pytest.mark.parametrize(("machine", "name", "dtype"), CASES)
def test_machines(machine, name, dtype, monkeypatch: pytest.MonkeyPatch):
    """Code for vectors of any width, which LLVM legalises where the CPU has none such."""
    monkeypatch.setattr(Target, "host", staticmethod(lambda: MACHINES[machine]))
    p = problem(name, ENTRIES[name].sizes.but(batch=1, heads=2, kv_heads=1, queries=137, keys=150), "bshd", dtype)
    function = attnc.lower(p.query, p.key, p.value, **arguments_of(p)).compile()
    assert isinstance(function, CompiledAttention)
    check(p, *function(p.query, p.key, p.value))


@pytest.mark.parametrize(("rows", "keys"), [("1", "16"), ("12", "512"), ("200", "64")])
def test_tile_sizes(rows, keys, monkeypatch: pytest.MonkeyPatch, cache_directory):
    monkeypatch.setenv("ATTNC_TILE_ROWS", rows)
    monkeypatch.setenv("ATTNC_TILE_KEYS", keys)
    p = problem("alibi_causal", Sizes(heads=4, kv_heads=2, queries=137, keys=150))
    function = attnc.lower(p.query, p.key, p.value, **arguments_of(p)).compile()
    assert isinstance(function, CompiledAttention)
    check(p, *function(p.query, p.key, p.value))


# -- threads --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def restored_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["identity", "alibi_causal", "document", "soft_cap", "block_mask_full_and_partial"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_same_bits_for_any_number_of_threads(name, dtype, restored_threads):
    """Run after run, too. The calls are heavy enough to be shared among threads."""
    p = problem(name, Sizes(batch=2, heads=6, kv_heads=2, queries=500, keys=900, head_dim=64, value_dim=64), dtype=dtype)
    results = []
    for threads in (1, 2, 3, 2):
        torch.set_num_threads(threads)
        results.append(run(p))
    for others in results[1:]:
        for first, other in zip(results[0], others):
            assert torch.equal(first.nan_to_num(7), other.nan_to_num(7))


def test_eight_python_threads_at_once():
    """Each meets its mods for the first time together with the others, then runs them again and again."""
    names = [
        "alibi_causal",
        "document",
        "soft_cap_causal",
        "sliding_window",
        "bias_q_k",
        "euclidean",
        "dilated_window",
        "square",
    ]
    problems = [problem(name, Sizes(queries=130, keys=130), seed=9) for name in names]
    together = threading.Barrier(8)

    def work(number: int):
        together.wait()
        order = problems[number:] + problems[:number]
        return {id(p): [run(p)[0] for _ in range(3)] for p in order}

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(8)))
    for p in problems:
        outputs = list(itertools.chain.from_iterable(result[id(p)] for result in results))
        check(p, outputs[0])
        assert all(torch.equal(outputs[0], other) for other in outputs)


# -- indices out of range ---------------------------------------------------------------------------------------------------

SHAPE = (2, 2, 45, 60)  # batch, heads, queries, keys


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    batch, heads, queries, keys = SHAPE
    return [torch.randn(batch, heads, length, 16, generator=generator) for length in (queries, keys, keys)]


def lowest(wrong) -> tuple[int, ...] | None:
    """The first (b, h, q, k), in that order, for which `wrong` holds."""
    return next((place for place in itertools.product(*map(range, SHAPE)) if wrong(*place)), None)


# size of the captured tensor, its index, and the mask
SCORE_GATHERS = {
    "beyond the end": (50, lambda b, h, q, k: k, None),
    "in range for kept pairs": (45, lambda b, h, q, k: k, lambda b, h, q, k: q >= k),
    "one beyond, kept": (44, lambda b, h, q, k: k, lambda b, h, q, k: q >= k),
    "negative, wrapped": (60, lambda b, h, q, k: k - 60, None),
    "too negative": (50, lambda b, h, q, k: k - 60, lambda b, h, q, k: k > 4),
    "only in the last head of the last batch": (45, lambda b, h, q, k: q + b * h, None),
    "by the difference": (30, lambda b, h, q, k: q - k, lambda b, h, q, k: (q - k) < 33),
    "never, no pair is kept": (1, lambda b, h, q, k: q + k + 5, lambda b, h, q, k: q < 0),
}


def wrong_index(size, index, mask, *place) -> bool:
    kept = mask is None or bool(mask(*place))
    return kept and not -size <= index(*place) < size


@pytest.mark.parametrize("name", SCORE_GATHERS)
def test_score_gathers_are_checked_on_kept_pairs(name):
    size, index, mask = SCORE_GATHERS[name]
    table = torch.linspace(-1, 1, size)
    query, key, value = inputs()

    def score_mod(score, b, h, q, k):
        return score + table[index(b, h, q, k)]

    place = lowest(lambda *place: wrong_index(size, index, mask, *place))
    if place is None:
        out = attnc.flex_attention(query, key, value, score_mod, mask_mod=mask)
        clamped = lambda s, b, h, q, k: s + table[index(b, h, q, k).clamp(-size, size - 1)]  # noqa: E731
        check(Problem(query, key, value, clamped, mask), out)
        return
    with pytest.raises(IndexError, match="table") as caught:
        attnc.flex_attention(query, key, value, score_mod, mask_mod=mask)
    error = caught.value
    assert isinstance(error, CaptureIndexError)
    assert (error.tensor, error.size, error.index, error.position) == ("table", size, index(*place), place)


def test_mask_gathers_are_checked_on_all_pairs():
    table = torch.ones(45, dtype=torch.bool)
    query, key, value = inputs()
    with pytest.raises(CaptureIndexError) as caught:
        attnc.flex_attention(query, key, value, mask_mod=lambda b, h, q, k: (q >= k) & table[k])
    assert (caught.value.index, caught.value.position) == (45, (0, 0, 0, 45))


def test_mask_gathers_under_a_block_mask_are_checked_in_partial_blocks():
    table = torch.ones(32, dtype=torch.bool)
    query, key, value = inputs()
    listed = torch.tensor([[[1, 1]]], dtype=torch.int32), torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32)
    full = torch.tensor([[[0, 1]]], dtype=torch.int32), torch.tensor([[[[1, 0], [1, 0]]]], dtype=torch.int32)

    def mask_mod(b, h, q, k):
        return table[k]

    mask = BlockMask.from_kv_blocks(*listed, *full, BLOCK_SIZE=32, mask_mod=mask_mod, seq_lengths=SHAPE[2:])
    out = attnc.flex_attention(query, key, value, block_mask=mask)  # keys of 32 and more are in a full block only
    live = lambda b, h, q, k: (k < 32) | (q >= 32)  # noqa: E731
    torch.testing.assert_close(out.double(), oracle(Problem(query, key, value, mask_mod=live)).out, atol=1e-5, rtol=0)
    listed[1].fill_(1)
    with pytest.raises(CaptureIndexError) as caught:
        attnc.flex_attention(query, key, value, block_mask=mask)
    assert (caught.value.index, caught.value.position) == (32, (0, 0, 0, 32))


def test_the_next_call_is_right_after_a_fault():
    table = torch.zeros(59)
    query, key, value = inputs()
    mod = lambda s, b, h, q, k: s + table[k]  # noqa: E731
    with pytest.raises(IndexError):
        attnc.flex_attention(query, key, value, mod)
    table = torch.zeros(60)
    check(Problem(query, key, value, mod), attnc.flex_attention(query, key, value, mod))
