"""The score mods of the zoo as NumPy code."""

from __future__ import annotations

import numpy as np
import torch

from zoo.entry import Generator, Sizes, randint, randn
from zoo.scores import slopes
from zoo_numpy.entry import Build, NumpyMods, array, enter

SCORES: dict[str, Build] = {}


@enter(SCORES)
def identity(s: Sizes, g: Generator) -> NumpyMods:
    return NumpyMods(score_mod=lambda score, b, h, q, k: score)


@enter(SCORES)
def times_two(s: Sizes, g: Generator) -> NumpyMods:
    return NumpyMods(score_mod=lambda score, b, h, q, k: score * 2)


@enter(SCORES)
def square(s: Sizes, g: Generator) -> NumpyMods:
    return NumpyMods(score_mod=lambda score, b, h, q, k: score * score)


@enter(SCORES)
def power(s: Sizes, g: Generator) -> NumpyMods:
    return NumpyMods(score_mod=lambda score, b, h, q, k: 0.1 * score**3 + np.square(score))


@enter(SCORES)
def alibi(s: Sizes, g: Generator) -> NumpyMods:
    slope = array(slopes(s.heads))
    return NumpyMods(score_mod=lambda score, b, h, q, k: score + slope[h] * (k - q))


@enter(SCORES)
def alibi_causal(s: Sizes, g: Generator) -> NumpyMods:
    slope = array(slopes(s.heads))
    return NumpyMods(lambda score, b, h, q, k: score + slope[h] * np.float32(k - q), lambda b, h, q, k: q >= k)


@enter(SCORES)
def alibi_computed(s: Sizes, g: Generator) -> NumpyMods:
    heads = s.heads
    return NumpyMods(score_mod=lambda score, b, h, q, k: score - np.exp2(-((h + 1) * 8.0 / heads)) * abs(q - k))


@enter(SCORES)
def relative_bias(s: Sizes, g: Generator) -> NumpyMods:
    length = max(s.queries, s.keys)
    bias = array(randn(g, 2 * length + 1))
    return NumpyMods(score_mod=lambda score, b, h, q, k: score + bias[q - k + length])


@enter(SCORES)
def relative_bias_wrapped(s: Sizes, g: Generator) -> NumpyMods:
    bias = array(randn(g, 2 * max(s.queries, s.keys) + 1))
    return NumpyMods(score_mod=lambda score, b, h, q, k: score + bias[q - k])


@enter(SCORES)
def relative_bias_buckets(s: Sizes, g: Generator) -> NumpyMods:
    table = array(randn(g, 32, s.heads))

    def score_mod(score, b, h, q, k):
        distance = np.maximum(q - k, 0)
        far = 16 + (np.log(np.maximum(distance, 1).astype(np.float32) / 16) / 2.0794415 * 16).astype(np.int32)
        return score + table[np.where(distance < 16, distance, np.minimum(far, 31)), h]

    return NumpyMods(score_mod=score_mod)


@enter(SCORES)
def bias_q_k(s: Sizes, g: Generator) -> NumpyMods:
    bias = array(randn(g, s.queries, s.keys))
    return NumpyMods(score_mod=lambda score, b, h, q, k: score + bias[q, k])


@enter(SCORES)
def bias_b_q_k(s: Sizes, g: Generator) -> NumpyMods:
    bias = array(randn(g, s.batch, s.queries, s.keys))
    return NumpyMods(score_mod=lambda score, b, h, q, k: score + bias[b, q, k])


@enter(SCORES)
def bias_b_h_q_k(s: Sizes, g: Generator) -> NumpyMods:
    bias = array(randn(g, s.batch, s.heads, s.keys, s.queries).transpose(2, 3))
    return NumpyMods(score_mod=lambda score, b, h, q, k: score + bias[b, h, q, k])


@enter(SCORES)
def bias_h(s: Sizes, g: Generator) -> NumpyMods:
    bias = array(randn(g, s.heads))
    return NumpyMods(score_mod=lambda score, b, h, q, k: score * bias[h])


@enter(SCORES)
def bias_b_then_h(s: Sizes, g: Generator) -> NumpyMods:
    bias = array(randn(g, s.batch, s.heads))
    return NumpyMods(score_mod=lambda score, b, h, q, k: score * bias[b][h])


@enter(SCORES)
def soft_cap(s: Sizes, g: Generator) -> NumpyMods:
    cap = 5.0
    return NumpyMods(score_mod=lambda score, b, h, q, k: cap * np.tanh(score / cap))


@enter(SCORES)
def soft_cap_causal(s: Sizes, g: Generator) -> NumpyMods:
    cap = 20
    return NumpyMods(lambda score, b, h, q, k: np.tanh(score / cap) * cap, lambda b, h, q, k: q >= k)


@enter(SCORES)
def sandwich(s: Sizes, g: Generator) -> NumpyMods:
    ratio = array(slopes(s.heads))
    frequencies = array(10000.0 ** (-torch.arange(8, dtype=s.wide) / 8))

    def score_mod(score, b, h, q, k):
        return score + ratio[h] * (np.cos((q - k) * frequencies).sum() - 8)

    return NumpyMods(score_mod=score_mod, by_scalars=True)


@enter(SCORES)
def head_offset(s: Sizes, g: Generator) -> NumpyMods:
    return NumpyMods(score_mod=lambda score, b, h, q, k: score + 2**h * 0.01 + np.where(h % 2 == 0, q, k) * 0.02)


@enter(SCORES)
def trigonometric(s: Sizes, g: Generator) -> NumpyMods:
    def score_mod(score, b, h, q, k):
        return np.sin(score) + np.cos(q.astype(score.dtype) * 0.25) * np.sin(k.astype(score.dtype) * 0.125)

    return NumpyMods(score_mod=score_mod)


@enter(SCORES)
def reciprocal_masked(s: Sizes, g: Generator) -> NumpyMods:
    keys = s.keys - 20
    return NumpyMods(lambda score, b, h, q, k: 1 / score, lambda b, h, q, k: k < keys)


@enter(SCORES)
def log_masked(s: Sizes, g: Generator) -> NumpyMods:
    keys = s.keys - 20
    return NumpyMods(lambda score, b, h, q, k: np.log(score), lambda b, h, q, k: k < keys)


@enter(SCORES)
def nan_bias_masked(s: Sizes, g: Generator) -> NumpyMods:
    bias = array(randn(g, s.queries, s.keys))
    dead = array(torch.rand(s.queries, s.keys, generator=g) < 0.3)
    bias[dead] = np.nan
    return NumpyMods(lambda score, b, h, q, k: score + bias[q, k], lambda b, h, q, k: ~dead[q, k])


@enter(SCORES)
def minus_infinity_bias(s: Sizes, g: Generator) -> NumpyMods:
    bias = array(torch.where(torch.rand(s.queries, s.keys, generator=g) < 0.3, -torch.inf, 0.0))
    bias[::7] = -np.inf
    return NumpyMods(score_mod=lambda score, b, h, q, k: score + bias[q, k])


@enter(SCORES)
def graph_distance(s: Sizes, g: Generator) -> NumpyMods:
    distance = array(randint(g, 9, s.batch, s.queries, s.keys, dtype=torch.int32))
    table = array(randn(g, 9, s.heads))
    return NumpyMods(score_mod=lambda score, b, h, q, k: score + table[distance[b, q, k], h])


@enter(SCORES)
def latent_rotary(s: Sizes, g: Generator) -> NumpyMods:
    query_rope = array(randn(g, s.batch, s.heads, s.queries, 16, dtype=s.wide))
    key_rope = array(randn(g, s.batch, s.keys, 16, dtype=s.wide))

    def score_mod(score, b, h, q, k):
        return score + np.dot(query_rope[b, h, q], key_rope[b, k]) * 0.125

    return NumpyMods(score_mod=score_mod, by_scalars=True)


@enter(SCORES)
def sigmoid_gate(s: Sizes, g: Generator) -> NumpyMods:
    gate = array(randn(g, s.heads, s.queries, dtype=s.wide))
    return NumpyMods(score_mod=lambda score, b, h, q, k: score * (1 / (1 + np.exp(-gate[h, q]))))


@enter(SCORES)
def silu_gate(s: Sizes, g: Generator) -> NumpyMods:
    return NumpyMods(score_mod=lambda score, b, h, q, k: score / (1 + np.exp(-score)) + np.maximum(score, 0))


@enter(SCORES)
def double_gather(s: Sizes, g: Generator) -> NumpyMods:
    kinds = array(randint(g, 11, max(s.queries, s.keys)))
    bias = array(randn(g, 11, 11))
    return NumpyMods(score_mod=lambda score, b, h, q, k: score + bias[kinds[q], kinds[k]])


@enter(SCORES)
def euclidean(s: Sizes, g: Generator) -> NumpyMods:
    points = array(randn(g, s.batch, max(s.queries, s.keys), 3, dtype=s.wide))
    return NumpyMods(
        score_mod=lambda score, b, h, q, k: score - np.linalg.norm(points[b, q] - points[b, k]),
        by_scalars=True,
    )


@enter(SCORES)
def scalar_capture(s: Sizes, g: Generator) -> NumpyMods:
    temperature = np.array(0.7)
    return NumpyMods(score_mod=lambda score, b, h, q, k: score * temperature)


@enter(SCORES)
def two_dtypes(s: Sizes, g: Generator) -> NumpyMods:
    half, wide = array(randn(g, s.heads, dtype=torch.bfloat16)), array(randn(g, s.keys, dtype=torch.float64))
    return NumpyMods(score_mod=lambda score, b, h, q, k: score + (k - q) * half[h] * 0.125 + wide[k])


@enter(SCORES)
def half_and_integers(s: Sizes, g: Generator) -> NumpyMods:
    half, small = array(randn(g, s.queries, dtype=torch.float16)), array(randint(g, 5, s.keys, dtype=torch.int8))
    return NumpyMods(score_mod=lambda score, b, h, q, k: score + half[q] * small[k])


@enter(SCORES)
def capture_twice(s: Sizes, g: Generator) -> NumpyMods:
    bias = array(randn(g, max(s.queries, s.keys)))
    return NumpyMods(score_mod=lambda score, b, h, q, k: score + bias[q] * bias[k])


@enter(SCORES)
def unused_capture(s: Sizes, g: Generator) -> NumpyMods:
    bias = array(randn(g, 3, 5))

    def score_mod(score, b, h, q, k):
        _ = bias
        return score + 0.5 * (q == k)

    return NumpyMods(score_mod=score_mod)
