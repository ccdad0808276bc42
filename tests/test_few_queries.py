"""Few queries, many keys: the program that shares the keys of a head among tasks, against the oracle."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest

import attnc
from attnc import programs
from attnc.errors import CaptureIndexError
from attnc.lowered import CompiledAttention
from attnc.pipeline import STAGES
from attnc.runtime.attention import FEW_ROWS, LONE_HEADS, LONE_KEYS, LONE_ROWS, MANY_KEYS, few_queries
from oracle import Problem, check
from zoo import DTYPES, ENTRIES, LAYOUTS, Sizes, problem

CHUNK = 256
"""Small chunks, so that some hundred keys are several."""


@pytest.fixture(scope="module", autouse=True)
def small_chunks():
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ATTNC_TILE_CHUNK", str(CHUNK))
        programs.forget()
        yield
    programs.forget()


def run(p: Problem, name: str) -> None:
    """All results of a call, checked; it must be one for the program of few queries."""
    batch, heads, queries, _ = p.query.shape
    assert few_queries(batch, heads, p.key.shape[1], queries, p.key.shape[2])
    out, aux = call(p)
    check(p, out, aux.lse, aux.max_scores, name)


def call(p: Problem):
    return attnc.flex_attention(
        p.query,
        p.key,
        p.value,
        p.score_mod,
        p.block_mask,
        p.scale,
        p.query.shape[1] != p.key.shape[1],
        return_aux=AuxRequest(lse=True, max_scores=True),
        mask_mod=p.mask_mod,
    )


def test_sizes_alone_decide():
    assert few_queries(9, 8, 8, FEW_ROWS, MANY_KEYS) and few_queries(9, FEW_ROWS, 1, 1, MANY_KEYS)
    assert not few_queries(1, 8, 8, FEW_ROWS + 1, 10**6) and not few_queries(5, FEW_ROWS, 1, 2, 10**6)
    assert not few_queries(1, 8, 8, 1, MANY_KEYS - 1)
    assert few_queries(LONE_HEADS, 1, 1, LONE_ROWS, LONE_KEYS) and few_queries(1, LONE_ROWS, 1, 1, LONE_KEYS)
    assert not few_queries(1, 1, 1, LONE_ROWS + 1, 10**6) and not few_queries(1, LONE_ROWS, 1, 1, LONE_KEYS - 1)


# -- mods -----------------------------------------------------------------------------------------------------------------
_DTYPES = itertools.cycle(DTYPES)
_GROUPS = itertools.cycle([(4, 4, 3), (6, 2, 5), (8, 1, 2), (6, 1, 1)])
OWN_LENGTHS = ("sliding_tile_2d", "sliding_tile_3d", "neighbourhood_2d_tiled", "neighbourhood_2d_morton", "speculative_tree")
MODS = [(name, next(_DTYPES), *next(_GROUPS)) for name in ENTRIES if name not in OWN_LENGTHS]


@pytest.mark.parametrize(("name", "dtype", "heads", "kv_heads", "queries"), MODS)
def test_mod(name: str, dtype: str, heads: int, kv_heads: int, queries: int):
    sizes = ENTRIES[name].sizes.but(heads=heads, kv_heads=kv_heads, queries=queries, keys=2 * CHUNK + 61)
    run(problem(name, sizes, dtype=dtype, seed=heads), name)


# -- sizes ----------------------------------------------------------------------------------------------------------------
LENGTHS = (MANY_KEYS, 33, 127, CHUNK, CHUNK + 1, 1000, 5000)
RATIOS = [(1, 1), (1, 16), (3, 1), (3, 5), (6, 2), (7, 1), (8, 1), (8, 2), (16, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(64, 64), (17, 32), (80, 24)], ids=str)
def test_sizes(dims: tuple[int, int], dtype: str):
    """Rows of whole vectors, and others; each ratio with some of the lengths."""
    head_dim, value_dim = dims
    lengths = itertools.cycle(LENGTHS)
    for (ratio, queries), kv_heads in itertools.product(RATIOS, (1, 2)):
        sizes = Sizes(
            batch=1 + kv_heads % 2,
            heads=ratio * kv_heads,
            kv_heads=kv_heads,
            queries=queries,
            keys=next(lengths),
            head_dim=head_dim,
            value_dim=value_dim,
        )
        run(problem("causal_with_tensor_offset", sizes, dtype=dtype, seed=ratio), str(sizes))


@pytest.mark.parametrize("head_dim", [1, 96, 128, 256])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_head_dims(head_dim: int, dtype: str):
    for queries, ratio in ((1, 4), (3, 4), (16, 1)):
        sizes = Sizes(1, 2 * ratio, 2, queries, 3 * CHUNK - 5, head_dim, head_dim)
        run(problem("identity", sizes, dtype=dtype), str(sizes))


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_rows_of_a_lone_head(dtype: str):
    """More rows than one task has."""
    for heads, kv_heads, queries in ((32, 1, 2), (1, 1, 61), (14, 2, 3)):
        sizes = Sizes(2 // kv_heads, heads, kv_heads, queries, LONE_KEYS + 3, 64, 64)
        run(problem("causal_with_tensor_offset", sizes, dtype=dtype), str(sizes))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_layouts(layout: str, dtype: str):
    """Caches of all layouts, [B, S, H, D] among them; keys and values of one batch for all."""
    for ratio, kv_batch in ((4, None), (1, 1)):
        sizes = Sizes(2, 2 * ratio, 2, 3, 2 * CHUNK + 9, 64, 32, kv_batch)
        run(problem("alibi_causal", sizes, layout, dtype, seed=ratio), layout)


# -- what is masked -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
def test_dead_chunks_rows_and_keys(dtype: str):
    """Whole chunks and whole rows without a live key; garbage in what is dead leaks nowhere."""
    sizes = Sizes(2, 4, 2, 4, 5 * CHUNK + 3, 32, 32)
    plain = problem("identity", sizes, dtype=dtype)
    first, last = torch.tensor([CHUNK + 7, 3 * CHUNK + 40]), torch.tensor([2 * CHUNK - 9, 4 * CHUNK + 1])

    def mask(b, h, q, k):
        return (k >= first[b]) & (k <= last[b]) & ((q != 2) | (h == 1)) & (k % 3 != 0)

    p = Problem(plain.query, plain.key, plain.value, mask_mod=mask)
    for b in range(2):
        dead = torch.ones(sizes.keys, dtype=torch.bool)
        dead[int(first[b]) : int(last[b]) + 1] = False
        dead |= torch.arange(sizes.keys) % 3 == 0
        p.key[b, :, dead], p.value[b, :, dead] = torch.nan, torch.inf
    run(p, "dead")
    assert (call(p)[0][:, 0, 2] == 0).all()


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_nan_and_infinity_in_live_keys(dtype: str):
    p = problem("causal_with_tensor_offset", Sizes(3, 2, 2, 2, 3 * CHUNK, 32, 32), dtype=dtype)
    p.value[0, 0, 5, 3], p.value[0, 1, CHUNK + 1, 4], p.value[1, 0, 7, 7] = torch.inf, -torch.inf, torch.nan
    p.key[1, 1, 9, 0], p.query[2, 0, 1, 2] = torch.nan, torch.nan
    run(p, "live")
    # Where nobody asks for the maxima, rows learn of a NaN from their sums.
    out, aux = call(p)
    alone, lse = attnc.flex_attention(
        p.query, p.key, p.value, p.score_mod, enable_gqa=True, return_lse=True, mask_mod=p.mask_mod
    )
    assert "maxnum" in attnc.lower(p.query, p.key, p.value, p.score_mod, mask_mod=p.mask_mod).stages["decompose-attention"]
    assert torch.equal(alone.isnan(), out.isnan()) and torch.equal(lse.isnan(), aux.lse.isnan()) and lse.isnan().any()
    torch.testing.assert_close(alone, out, rtol=0, atol=1e-3 if dtype == "f16" else 1e-6, equal_nan=True)


def test_infinite_scores():
    """A score of +inf: its row is NaN, as the formula has it, and no other."""
    p = problem("identity", Sizes(1, 2, 2, 3, 2 * CHUNK, 32, 32))

    def score(s, b, h, q, k):
        return torch.where((k == CHUNK + 3) & (q == 1) & (h == 0), torch.inf, s)

    run(Problem(p.query, p.key, p.value, score), "infinite")


# -- faults ---------------------------------------------------------------------------------------------------------------
def test_the_first_fault_is_named():
    """In the order of (b, h, q, k): chunks of keys come after queries, whoever found what first."""
    p = problem("identity", Sizes(2, 4, 2, 3, 3 * CHUNK, 32, 32))
    table = torch.zeros(10)

    def mask(b, h, q, k):
        wrong = (b == 1) & (((h == 2) & (q == 1) & (k == 2 * CHUNK + 5)) | ((h == 2) & (q == 2) & (k == 3)) | (h == 3))
        return table[torch.where(wrong, 10 + q, 0)] == 0

    def score(s, b, h, q, k):
        return s + table[torch.where((k == 2) & (h == 3), -11, 0)]

    with pytest.raises(CaptureIndexError, match=rf"b=1, h=2, q=1, k={2 * CHUNK + 5}"):
        call(Problem(p.query, p.key, p.value, mask_mod=mask))
    with pytest.raises(CaptureIndexError, match="b=0, h=3, q=0, k=2"):
        call(Problem(p.query, p.key, p.value, score))
    compiled = attnc.lower(p.query, p.key, p.value, score, enable_gqa=True).compile()
    assert isinstance(compiled, CompiledAttention)
    with pytest.raises(CaptureIndexError, match="b=0, h=3, q=0, k=2"):
        compiled(p.query, p.key, p.value)


# -- the same bits, one program -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_bits_do_not_depend_on_threads(dtype: str, monkeypatch: pytest.MonkeyPatch):
    p = problem("alibi_causal", Sizes(2, 8, 2, 2, 20 * CHUNK + 7, 64, 64), dtype=dtype)
    results = []
    for threads in (1, 2, 3, 2):
        monkeypatch.setenv("ATTNC_THREADS", str(threads))
        out, aux = call(p)
        results.append((out, aux.lse, aux.max_scores))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_a_growing_cache_compiles_nothing():
    """One program more for few queries, and not a second: not for a length, a ratio of heads, a batch or a stride."""
    cache = torch.randn(2, 700, 2, 40).transpose(1, 2)
    attnc.flex_attention(torch.randn(2, 2, 30, 40), cache, cache)
    before = programs.compiled
    attnc.flex_attention(torch.randn(2, 2, 1, 40), cache[:, :, :MANY_KEYS], cache[:, :, :MANY_KEYS])
    assert programs.compiled == before + 1
    for length in (1, 31, *range(33, 700, 61)):
        for ratio, queries in ((1, 1), (4, 1), (2, 3)):
            query = torch.randn(2, 2 * ratio, queries, 40)
            keys = cache[:, :, :length]
            out = attnc.flex_attention(query, keys, keys.contiguous(), enable_gqa=True)
            assert out.isfinite().all()
    assert programs.compiled == before + 1


# -- the text is the program ----------------------------------------------------------------------------------------------
def test_every_stage_goes_on_to_the_same_bits():
    p = problem("alibi_causal", Sizes(1, 4, 2, 2, 2 * CHUNK + 5, 32, 32))
    lowered = attnc.lower(p.query, p.key, p.value, p.score_mod, mask_mod=p.mask_mod, enable_gqa=True, return_lse=True)
    compiled = lowered.compile()
    assert isinstance(compiled, CompiledAttention)
    kernels = compiled._attention.record.extra["kernels"]
    assert [kernel["name"] for kernel in kernels] == ["attention_split", "attention_merge"]
    assert "partial_acc" not in {argument.name for argument in compiled.arguments}
    out, aux = call(p)
    for stage in ("torch", *STAGES):
        again = attnc.from_text(lowered.stages[stage]).compile()
        assert isinstance(again, CompiledAttention)
        results = again(p.query, p.key, p.value, captures=lowered.defaults.captures, numbers=lowered.defaults.numbers)
        assert torch.equal(results[0], out) and torch.equal(results[1], aux.lse), stage


def test_code_of_both_kernels_is_one_text():
    p = problem("identity", Sizes(1, 2, 2, 1, 2 * CHUNK, 32, 32))
    lowered = attnc.lower(p.query, p.key, p.value)
    for kernel in ("attention_split", "attention_merge"):
        assert f"define void @{kernel}.work(" in lowered.code.llvm and f"{kernel}.work:" in lowered.assembly
    assert lowered.code.llvm.count("define internal") == len(
        {line for line in lowered.code.llvm.splitlines() if line.startswith("define internal")}
    )
    # Keys and values are read where they lie.
    assert "call void @attnc.dot_in_place.32.f32" in lowered.code.llvm
    assert "call void @attnc.accumulate_in_place.32.f32" in lowered.code.llvm


@pytest.mark.parametrize("bits", ["128", "256", "512"])
def test_vector_widths(bits: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ATTNC_VECTOR_BITS", bits)
    programs.forget()
    for dtype in ("f32", "bf16", "f64"):
        for queries, ratio in ((1, 3), (4, 4)):
            sizes = Sizes(1, 2 * ratio, 2, queries, 2 * CHUNK + 19, 64, 64)
            run(problem("causal_with_tensor_offset", sizes, dtype=dtype), f"{bits} {dtype}")
    programs.forget()
