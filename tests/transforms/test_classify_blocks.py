"""`classify-blocks`: what the classifier says of a block against what every pair of it says."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from mask_text import EMPTY, FULL, PARTIAL, Expression, Writer, classified, classify_region

RANDOM = np.random.default_rng(7)
DOCUMENTS = np.repeat(np.arange(10), [9, 3, 20, 1, 15, 8, 2, 30, 6, 34])[:128]
GLOBAL = np.zeros(128, bool)
GLOBAL[[0, 1, 70]] = True
LENGTHS = np.array([5, 40, 64])
SIZE = 128


def causal(w: Writer, b, h, q, k):
    return q >= k


def window(w: Writer, b, h, q, k):
    return (q >= k) & (q - k <= w.number(20))


def symmetric_window(w: Writer, b, h, q, k):
    return abs(q - k) <= w.number(20)


def prefix_lm(w: Writer, b, h, q, k):
    return (q >= k) | (k < w.number(37))


def document(w: Writer, b, h, q, k):
    doc = w.capture(DOCUMENTS)
    return doc[q] == doc[k]


def document_causal(w: Writer, b, h, q, k):
    return document(w, b, h, q, k) & causal(w, b, h, q, k)


def global_and_window(w: Writer, b, h, q, k):
    is_global = w.capture(GLOBAL)
    return is_global[q] | is_global[k] | (abs(q - k) <= 9)


def padded(w: Writer, b, h, q, k):
    return k < w.capture(LENGTHS)[b]


def left_padded(w: Writer, b, h, q, k):
    return (q + w.number(-3) >= k) & (k >= w.capture(LENGTHS)[b])


def dilated(w: Writer, b, h, q, k):
    return (q >= k) & (q - k < 48) & ((q - k) % 4 == 0)


def block_diffusion(w: Writer, b, h, q, k):
    half, block = w.number(64), w.number(16)
    clean_q, clean_k = q >= half, k >= half
    block_q = clean_q.where((q - half) // block, q // block)
    block_k = clean_k.where((k - half) // block, k // block)
    diagonal = (block_q == block_k) & (clean_q == clean_k)
    offset = (block_q > block_k) & clean_k & ~clean_q
    return diagonal | offset | ((block_q >= block_k) & clean_k & clean_q)


def by_batch(w: Writer, b, h, q, k):
    return (b == 0).where(q >= k, (b == 1).where(abs(q - k) <= 12, k < 30))


def by_head(w: Writer, b, h, q, k):
    return q - k <= h * 8


def neighbourhood(w: Writer, b, h, q, k):
    width = w.number(12)
    rows, columns = (q // width).clamp(2, 9), (q % width).clamp(2, 9)
    return (abs(rows - k // width) <= 2) & (abs(columns - k % width) <= 2)


def morton(w: Writer, b, h, q, k):
    def compact(x):
        x = x & 0x55555555
        x = (x | (x >> 1)) & 0x33333333
        x = (x | (x >> 2)) & 0x0F0F0F0F
        return (x | (x >> 4)) & 0x00FF00FF

    return (abs(compact(q >> 1) - compact(k >> 1)) <= 2) & (abs(compact(q) - compact(k)) <= 2)


def ring(w: Writer, b, h, q, k):
    """An index that wraps."""
    doc = w.capture(DOCUMENTS)
    return doc[q - 64] == doc[k]


def everything(w: Writer, b, h, q, k):
    return q >= 0


def nothing(w: Writer, b, h, q, k):
    return q < 0


EXACT = [causal, window, symmetric_window, prefix_lm, document, document_causal, padded, by_batch, everything, nothing]
ALL = [*EXACT, left_padded, global_and_window, dilated, block_diffusion, by_head, neighbourhood, morton, ring]


def blocks(queries: int, keys: int, rows: int, columns: int):
    for q0 in range(0, queries, rows):
        for k0 in range(0, keys, columns):
            yield q0, min(q0 + rows, queries) - 1, k0, min(k0 + columns, keys) - 1


@pytest.mark.parametrize("mask", EXACT)
def test_exact_masks(mask):
    """Where queries and keys are compared once, every block is told."""
    c = classified(mask, batch=3, heads=2, queries=SIZE, keys=SIZE)
    for batch in range(3):
        for block in blocks(128, 128, 16, 24):
            bounds = (batch, 0, 1, *block)
            if mask in (document, document_causal) and c.truth(*bounds) == EMPTY:
                c.check(*bounds)  # documents that interleave only by their numbers' ranges
            else:
                assert c.ask(*bounds) == c.truth(*bounds), bounds


@pytest.mark.parametrize("mask", ALL)
def test_sound_for_every_range(mask):
    c = classified(mask, batch=3, heads=3, queries=SIZE, keys=SIZE)
    random = np.random.default_rng(1)
    for _ in range(150):
        q0, q1 = sorted(random.integers(0, 128, 2))
        k0, k1 = sorted(random.integers(0, 128, 2))
        if random.random() < 0.6:
            q1, k1 = min(q1, q0 + random.integers(16)), min(k1, k0 + random.integers(16))
        h0, h1 = sorted(random.integers(0, 3, 2))
        c.check(int(random.integers(3)), h0, h1, q0, q1, k0, k1)


def found(mask, rows: int, columns: int) -> dict[int, float]:
    """For EMPTY and FULL, the fraction of such blocks that the classifier tells."""
    c = classified(mask, queries=SIZE, keys=SIZE)
    said = [(c.truth(0, 0, 0, *block), c.check(0, 0, 0, *block)) for block in blocks(128, 128, rows, columns)]
    return {
        class_: float(np.mean([answer == class_ for truth, answer in said if truth == class_]))
        for class_ in (EMPTY, FULL)
        if any(truth == class_ for truth, _ in said)
    }


def test_most_blocks_are_told():
    assert found(document, 16, 16) == {EMPTY: 1, FULL: 1}
    assert found(global_and_window, 16, 16) == {EMPTY: 1}
    assert found(dilated, 16, 16) == {EMPTY: 1}
    assert found(block_diffusion, 16, 16) == {EMPTY: 1, FULL: 1}
    assert found(by_head, 8, 8) == {EMPTY: 1, FULL: 1}
    assert found(morton, 16, 16)[EMPTY] > 0.7
    assert found(neighbourhood, 12, 12)[EMPTY] > 0.9
    assert found(ring, 16, 16)[EMPTY] > 0.9


def test_index_out_of_range_is_never_skipped():
    """A mask's read that is out of range must be found, though the pairs are masked anyway."""

    def mask(w: Writer, b, h, q, k):
        flags = w.capture(np.ones(100, bool))
        return flags[k] & (k < 50)

    c = classified(mask, queries=SIZE, keys=SIZE)
    assert c.ask(0, 0, 0, 0, 15, 48, 63) == PARTIAL
    assert c.ask(0, 0, 0, 0, 15, 64, 79) == EMPTY
    assert c.ask(0, 0, 0, 0, 15, 96, 111) == PARTIAL
    assert c.ask(0, 0, 0, 0, 15, 112, 127) == PARTIAL


def test_gathers_of_the_score_count_where_the_mask_keeps():
    region = """
    %bias = tensor.extract %bias_row[%k] {attnc.checked = "kept", attnc.name = "bias_row"} : tensor<?xf32>
    %biased = arith.addf %score, %bias : f32
    %mask = arith.cmpi slt, %k32, %q32 : i32
    %x = arith.select %mask, %biased, %minus_infinity : f32
    """
    c = classify_region(region, [("bias_row", "tensor<?xf32>", "capture")], [np.zeros(40, np.float32)], 1, 1, 128, 128)
    assert c.check(0, 0, 0, 0, 15, 16, 31) == EMPTY
    assert c.check(0, 0, 0, 0, 15, 64, 79) == EMPTY  # out of range, but nobody reads it
    assert c.check(0, 0, 0, 64, 79, 16, 31) == FULL
    assert c.check(0, 0, 0, 64, 79, 32, 47) == PARTIAL


def test_score_mods_that_write_minus_infinity():
    region = """
    %dead = arith.constant 0xFF800000 : f32
    %near = arith.cmpi slt, %q32, %k32 : i32
    %first = arith.select %near, %dead, %score : f32
    %far = arith.constant 100 : i32
    %mask = arith.cmpi slt, %k32, %far : i32
    %x = arith.select %mask, %first, %minus_infinity : f32
    """
    c = classify_region(region, [], [], 1, 1, 128, 128)
    assert c.check(0, 0, 0, 0, 15, 16, 31) == EMPTY
    assert c.check(0, 0, 0, 64, 79, 0, 15) == FULL
    assert c.ask(0, 0, 0, 64, 79, 64, 79) == FULL  # the mask drops nothing: the score mod's own -inf stay scores
    assert c.check(0, 0, 0, 64, 79, 100, 110) == EMPTY


def test_bounds_that_leave_their_type_say_nothing():
    def mask(w: Writer, b, h, q, k):
        return q * w.number(2**30) + 5 > k

    assert classified(mask).ask(0, 0, 0, 0, 1, 0, 3) == FULL
    assert classified(mask).ask(0, 0, 0, 0, 7, 0, 3) == PARTIAL


def test_a_divisor_that_may_be_zero_says_nothing():
    def mask(w: Writer, b, h, q, k):
        return k // w.capture(np.array([0, 3, 5]))[b] <= 2

    c = classified(mask, batch=3, queries=SIZE, keys=SIZE)
    assert [c.ask(b, 0, 0, 0, 15, 64, 79) for b in range(3)] == [PARTIAL, EMPTY, EMPTY]


def test_block_mask_lists():
    """Blocks of 32 queries by 16 keys: 0 not listed, 1 partial, 2 full."""
    lists = np.zeros((1, 2, 4, 8), np.int8)
    lists[0, :, 0, :4], lists[0, :, 1, 2:4], lists[0, 1, 2, 5] = 1, 2, 2
    region = """
    %c16 = arith.constant 16 : index
    %c32 = arith.constant 32 : index
    %one = arith.constant 1 : i8
    %two = arith.constant 2 : i8
    %qb = arith.divui %q, %c32 : index
    %kb = arith.divui %k, %c16 : index
    %class = tensor.extract %blocks[%b, %h, %qb, %kb] : tensor<?x?x?x?xi8>
    %full = arith.cmpi eq, %class, %two : i8
    %listed = arith.cmpi eq, %class, %one : i8
    %flag = tensor.extract %flags[%k] {attnc.checked = "listed", attnc.name = "flags"} : tensor<?xi1>
    %causal = arith.cmpi sge, %q32, %k32 : i32
    %user = arith.andi %causal, %flag : i1
    %partial = arith.andi %listed, %user : i1
    %mask = arith.ori %full, %partial : i1
    %x = arith.select %mask, %score, %minus_infinity : f32
    """
    captures = [("flags", "tensor<?xi1>", "capture"), ("blocks", "tensor<?x?x?x?xi8>", "blocks")]
    flags = np.ones(50, bool)  # too short for the last blocks of keys, and for the last listed one
    c = classify_region(region, captures, [flags, lists], 1, 2, 128, 128)
    assert c.ask(0, 0, 1, 0, 31, 64, 79) == EMPTY
    assert c.ask(0, 0, 1, 0, 31, 0, 15) == PARTIAL
    assert c.ask(0, 0, 1, 16, 31, 0, 15) == FULL
    assert c.ask(0, 0, 1, 0, 15, 16, 31) == EMPTY
    assert c.ask(0, 0, 1, 0, 15, 48, 63) == PARTIAL  # dead by the mask, but its read of `flags` is out of range
    assert c.ask(0, 0, 1, 32, 63, 32, 63) == FULL
    assert c.ask(0, 0, 1, 64, 95, 80, 95) == PARTIAL
    assert c.ask(0, 1, 1, 64, 95, 80, 95) == FULL
    assert c.ask(0, 0, 0, 64, 95, 80, 95) == EMPTY


def test_any_of_a_gathered_row():
    """`(rows[h] == k // 16).any()`, a loop over a row of known length."""
    rows = np.array([[0, 3, 5], [1, 1, 7]])
    region = """
    %c0_i = arith.constant 0 : index
    %c1_i = arith.constant 1 : index
    %c3_i = arith.constant 3 : index
    %false = arith.constant false
    %c16 = arith.constant 16 : i32
    %block = arith.floordivsi %k32, %c16 : i32
    %any = scf.for %i = %c0_i to %c3_i step %c1_i iter_args(%a = %false) -> (i1) {
      %row = tensor.extract %rows[%h, %i] {attnc.checked = "all", attnc.name = "rows"} : tensor<?x3xi32>
      %same = arith.cmpi eq, %row, %block : i32
      %or = arith.ori %a, %same : i1
      scf.yield %or : i1
    }
    %x = arith.select %any, %score, %minus_infinity : f32
    """
    c = classify_region(region, [("rows", "tensor<?x3xi32>", "capture")], [rows.astype(np.int32)], 1, 2, 64, 128)
    said = [c.check(0, h, h, 0, 15, k, k + 15) for h in range(2) for k in range(0, 128, 16)]
    assert EMPTY in said


# -- random masks -----------------------------------------------------------------------------------------------------

NUMBERS = st.integers(-40, 40)


@st.composite
def integers(draw: st.DrawFn, depth: int):
    """A function (w, b, h, q, k) -> integer expression."""
    if depth == 0 or draw(st.integers(0, 5)) == 0:
        kind = draw(st.sampled_from(["b", "h", "q", "k", "q", "k", "constant", "number"]))
        value = draw(NUMBERS)
        if kind == "constant":
            return lambda w, b, h, q, k: w.constant(value)
        if kind == "number":
            return lambda w, b, h, q, k: w.number(value)
        return lambda w, b, h, q, k: {"b": b, "h": h, "q": q, "k": k}[kind]
    kind = draw(
        st.sampled_from(
            ["+", "-", "*", "//", "%", "rem", "div", "min", "max", "abs", "&", "|", "^", ">>", "<<", "where", "[]", "int"]
        )
    )
    x = draw(integers(depth - 1))
    y = draw(integers(depth - 1))
    divisor = draw(st.sampled_from([1, 2, 3, 7, 16, -3]))
    amount = draw(st.integers(0, 5))
    condition = draw(truths(depth - 1 if kind in ("where", "int") else 0))
    seed = draw(st.integers(0, 3))

    def build(w: Writer, b, h, q, k) -> Expression:
        at = (w, b, h, q, k)
        match kind:
            case "+" | "-" | "*" | "&" | "|" | "^":
                name = {"+": "addi", "-": "subi", "*": "muli", "&": "andi", "|": "ori", "^": "xori"}[kind]
                return x(*at).binary(name, y(*at))
            case "//":
                return x(*at) // divisor
            case "%":
                return x(*at) % divisor
            case "rem" | "div":
                return x(*at).binary({"rem": "remsi", "div": "divsi"}[kind], divisor)
            case "min" | "max":
                return x(*at).binary(kind + "si", y(*at))
            case "abs":
                return abs(x(*at))
            case ">>":
                return x(*at) >> amount
            case "<<":
                return x(*at) << amount
            case "where":
                return condition(*at).where(x(*at), y(*at))
            case "int":
                return condition(*at).as_int()
            case _:
                values = np.random.default_rng(seed).integers(-30, 30, 40).cumsum() if seed % 2 else np.arange(50) // 9
                return w.capture(values)[x(*at)]

    return build


@st.composite
def truths(draw: st.DrawFn, depth: int):
    """A function (w, b, h, q, k) -> condition."""
    if depth > 0 and draw(st.integers(0, 2)):
        kind = draw(st.sampled_from(["&", "|", "^", "~", "where", "==", "flags"]))
        x, y, z = draw(truths(depth - 1)), draw(truths(depth - 1)), draw(truths(depth - 1))
        i = draw(integers(depth - 1))

        def build(w: Writer, b, h, q, k) -> Expression:
            at = (w, b, h, q, k)
            match kind:
                case "&":
                    return x(*at) & y(*at)
                case "|":
                    return x(*at) | y(*at)
                case "^":
                    return x(*at) ^ y(*at)
                case "~":
                    return ~x(*at)
                case "==":
                    return x(*at) == y(*at)
                case "where":
                    return x(*at).where(y(*at), z(*at))
                case _:
                    return w.capture(np.arange(60) % 13 < 9)[i(*at)]

        return build
    predicate = draw(st.sampled_from(["eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge"]))
    x, y = draw(integers(depth)), draw(integers(depth))
    return lambda *at: x(*at).compare(predicate, y(*at))


@settings(max_examples=60)
@given(truths(3), st.data())
def test_random_masks(mask, data):
    c = classified(mask, batch=2, heads=2, queries=40, keys=48)
    for _ in range(12):
        q0, k0 = data.draw(st.integers(0, 39)), data.draw(st.integers(0, 47))
        q1, k1 = data.draw(st.integers(q0, min(39, q0 + 20))), data.draw(st.integers(k0, min(47, k0 + 20)))
        h0 = data.draw(st.integers(0, 1))
        c.check(data.draw(st.integers(0, 1)), h0, data.draw(st.integers(h0, 1)), q0, q1, k0, k1)
