"""The score mods of the zoo, some with the mask they need. Each builder gives mods for any sizes."""

from __future__ import annotations

import torch
from torch.nn import functional

from zoo.entry import Entry, Generator, Mods, Sizes, enter, randint, randn

SCORES: dict[str, Entry] = {}


def slopes(heads: int) -> torch.Tensor:
    return torch.exp2(-8.0 * torch.arange(1, heads + 1) / heads)


@enter(SCORES)
def identity(s: Sizes, g: Generator) -> Mods:
    return Mods(score_mod=lambda score, b, h, q, k: score)


@enter(SCORES)
def times_two(s: Sizes, g: Generator) -> Mods:
    return Mods(score_mod=lambda score, b, h, q, k: score * 2)


@enter(SCORES)
def square(s: Sizes, g: Generator) -> Mods:
    return Mods(score_mod=lambda score, b, h, q, k: score * score)


@enter(SCORES)
def power(s: Sizes, g: Generator) -> Mods:
    return Mods(score_mod=lambda score, b, h, q, k: 0.1 * score**3 + score**2)


@enter(SCORES, queries=257, keys=257)
def alibi(s: Sizes, g: Generator) -> Mods:
    slope = slopes(s.heads)
    return Mods(score_mod=lambda score, b, h, q, k: score + slope[h] * (k - q))


@enter(SCORES, queries=257, keys=257)
def alibi_causal(s: Sizes, g: Generator) -> Mods:
    slope = slopes(s.heads)
    return Mods(lambda score, b, h, q, k: score + slope[h] * (k - q), lambda b, h, q, k: q >= k)


@enter(SCORES)
def alibi_computed(s: Sizes, g: Generator) -> Mods:
    heads = s.heads
    return Mods(score_mod=lambda score, b, h, q, k: score - torch.exp2(-((h + 1) * 8.0 / heads)) * (q - k).abs())


@enter(SCORES, queries=100, keys=129)
def relative_bias(s: Sizes, g: Generator) -> Mods:
    length = max(s.queries, s.keys)
    bias = randn(g, 2 * length + 1)
    return Mods(score_mod=lambda score, b, h, q, k: score + bias[q - k + length])


@enter(SCORES, queries=100, keys=129)
def relative_bias_wrapped(s: Sizes, g: Generator) -> Mods:
    """An index that is negative for half of the pairs, and then counts from the end."""
    bias = randn(g, 2 * max(s.queries, s.keys) + 1)
    return Mods(score_mod=lambda score, b, h, q, k: score + bias[q - k])


@enter(SCORES)
def relative_bias_buckets(s: Sizes, g: Generator) -> Mods:
    """T5: exact buckets near, logarithmic ones far, a table by bucket and head."""
    table = randn(g, 32, s.heads)

    def score_mod(score, b, h, q, k):
        distance = torch.clamp(q - k, min=0)
        far = 16 + (torch.log(distance.clamp(min=1).float() / 16) / 2.0794415 * 16).to(torch.int32)
        return score + table[torch.where(distance < 16, distance, far.clamp(max=31)), h]

    return Mods(score_mod=score_mod)


@enter(SCORES, queries=70, keys=129)
def bias_q_k(s: Sizes, g: Generator) -> Mods:
    bias = randn(g, s.queries, s.keys)
    return Mods(score_mod=lambda score, b, h, q, k: score + bias[q, k])


@enter(SCORES, queries=70, keys=129)
def bias_b_q_k(s: Sizes, g: Generator) -> Mods:
    bias = randn(g, s.batch, s.queries, s.keys)
    return Mods(score_mod=lambda score, b, h, q, k: score + bias[b, q, k])


@enter(SCORES, queries=70, keys=129)
def bias_b_h_q_k(s: Sizes, g: Generator) -> Mods:
    bias = randn(g, s.batch, s.heads, s.keys, s.queries).transpose(2, 3)
    return Mods(score_mod=lambda score, b, h, q, k: score + bias[b, h, q, k])


@enter(SCORES)
def bias_h(s: Sizes, g: Generator) -> Mods:
    bias = randn(g, s.heads)
    return Mods(score_mod=lambda score, b, h, q, k: score * bias[h])


@enter(SCORES)
def bias_b_then_h(s: Sizes, g: Generator) -> Mods:
    bias = randn(g, s.batch, s.heads)
    return Mods(score_mod=lambda score, b, h, q, k: score * bias[b][h])


@enter(SCORES)
def soft_cap(s: Sizes, g: Generator) -> Mods:
    cap = 5.0
    return Mods(score_mod=lambda score, b, h, q, k: cap * torch.tanh(score / cap))


@enter(SCORES)
def soft_cap_causal(s: Sizes, g: Generator) -> Mods:
    cap = 20
    return Mods(lambda score, b, h, q, k: torch.tanh(score / cap) * cap, lambda b, h, q, k: q >= k)


@enter(SCORES)
def sandwich(s: Sizes, g: Generator) -> Mods:
    """Sandwich position bias: a sum of cosines of the distance, weighted by a table of heads."""
    ratio = slopes(s.heads)
    frequencies = 10000.0 ** (-torch.arange(8, dtype=s.wide) / 8)

    def score_mod(score, b, h, q, k):
        return score + ratio[h] * (torch.cos((q - k) * frequencies).sum() - 8)

    return Mods(score_mod=score_mod)


@enter(SCORES)
def head_offset(s: Sizes, g: Generator) -> Mods:
    return Mods(score_mod=lambda score, b, h, q, k: score + 2**h * 0.01 + torch.where(h % 2 == 0, q, k) * 0.02)


@enter(SCORES)
def trigonometric(s: Sizes, g: Generator) -> Mods:
    def score_mod(score, b, h, q, k):
        return torch.sin(score) + torch.cos(q.to(score.dtype) * 0.25) * torch.sin(k.to(score.dtype) * 0.125)

    return Mods(score_mod=score_mod)


def _positive_then(dead_key: float):
    """Positive scores for the first keys; the last twenty keys are `dead_key` times that."""

    def prepare(query, key, value):
        query, key = query.abs() + 0.25, key.abs() + 0.25
        key[:, :, -20:] *= dead_key
        return query, key, value

    return prepare


@enter(SCORES)
def reciprocal_masked(s: Sizes, g: Generator) -> Mods:
    keys = s.keys - 20
    return Mods(lambda score, b, h, q, k: 1 / score, lambda b, h, q, k: k < keys, prepare=_positive_then(0.0))


@enter(SCORES)
def log_masked(s: Sizes, g: Generator) -> Mods:
    keys = s.keys - 20
    return Mods(lambda score, b, h, q, k: torch.log(score), lambda b, h, q, k: k < keys, prepare=_positive_then(-1.0))


@enter(SCORES)
def nan_bias_masked(s: Sizes, g: Generator) -> Mods:
    bias = randn(g, s.queries, s.keys)
    dead = torch.rand(s.queries, s.keys, generator=g) < 0.3
    bias[dead] = torch.nan
    return Mods(lambda score, b, h, q, k: score + bias[q, k], lambda b, h, q, k: ~dead[q, k])


@enter(SCORES)
def minus_infinity_bias(s: Sizes, g: Generator) -> Mods:
    """A mask by the score mod alone: dead is dead, from whatever source."""
    bias = torch.where(torch.rand(s.queries, s.keys, generator=g) < 0.3, -torch.inf, 0.0)
    bias[::7] = -torch.inf
    return Mods(score_mod=lambda score, b, h, q, k: score + bias[q, k])


@enter(SCORES)
def graph_distance(s: Sizes, g: Generator) -> Mods:
    distance = randint(g, 9, s.batch, s.queries, s.keys, dtype=torch.int32)
    table = randn(g, 9, s.heads)
    return Mods(score_mod=lambda score, b, h, q, k: score + table[distance[b, q, k], h])


@enter(SCORES)
def latent_rotary(s: Sizes, g: Generator) -> Mods:
    query_rope = randn(g, s.batch, s.heads, s.queries, 16, dtype=s.wide)
    key_rope = randn(g, s.batch, s.keys, 16, dtype=s.wide)
    return Mods(score_mod=lambda score, b, h, q, k: score + torch.dot(query_rope[b, h, q], key_rope[b, k]) * 0.125)


@enter(SCORES)
def sigmoid_gate(s: Sizes, g: Generator) -> Mods:
    gate = randn(g, s.heads, s.queries, dtype=s.wide)
    return Mods(score_mod=lambda score, b, h, q, k: score * torch.sigmoid(gate[h, q]))


@enter(SCORES)
def silu_gate(s: Sizes, g: Generator) -> Mods:
    return Mods(score_mod=lambda score, b, h, q, k: functional.silu(score) + torch.nn.functional.relu(score))


@enter(SCORES)
def double_gather(s: Sizes, g: Generator) -> Mods:
    kinds = randint(g, 11, max(s.queries, s.keys))
    bias = randn(g, 11, 11)
    return Mods(score_mod=lambda score, b, h, q, k: score + bias[kinds[q], kinds[k]])


@enter(SCORES)
def euclidean(s: Sizes, g: Generator) -> Mods:
    points = randn(g, s.batch, max(s.queries, s.keys), 3, dtype=s.wide)

    def score_mod(score, b, h, q, k):
        difference = points[b, q] - points[b, k]
        return score - torch.sqrt((difference * difference).sum())

    return Mods(score_mod=score_mod)


@enter(SCORES)
def scalar_capture(s: Sizes, g: Generator) -> Mods:
    temperature = torch.tensor(0.7)
    return Mods(score_mod=lambda score, b, h, q, k: score * temperature)


@enter(SCORES)
def two_dtypes(s: Sizes, g: Generator) -> Mods:
    half, wide = randn(g, s.heads, dtype=torch.bfloat16), randn(g, s.keys, dtype=torch.float64)
    return Mods(score_mod=lambda score, b, h, q, k: score + (k - q) * half[h] * 0.125 + wide[k])


@enter(SCORES)
def half_and_integers(s: Sizes, g: Generator) -> Mods:
    half, small = randn(g, s.queries, dtype=torch.float16), randint(g, 5, s.keys, dtype=torch.int8)
    return Mods(score_mod=lambda score, b, h, q, k: score + half[q] * small[k])


@enter(SCORES)
def capture_twice(s: Sizes, g: Generator) -> Mods:
    bias = randn(g, max(s.queries, s.keys))
    return Mods(score_mod=lambda score, b, h, q, k: score + bias[q] * bias[k])


@enter(SCORES)
def unused_capture(s: Sizes, g: Generator) -> Mods:
    bias = randn(g, 3, 5)

    def score_mod(score, b, h, q, k):
        _ = bias
        return score + 0.5 * (q == k)

    return Mods(score_mod=score_mod)
