"""The masks of the zoo as NumPy code."""

from __future__ import annotations

import functools

import numpy as np
import torch

from zoo.entry import Generator, Sizes, randint
from zoo.masks import documents as tensor_of_documents
from zoo_numpy.entry import Build, NumpyMods, array, enter

MASKS: dict[str, Build] = {}


def causal_mod(b, h, q, k):
    return q >= k


def window_mod(b, h, q, k):
    return abs(q - k) <= 20


def documents(length: int, g: Generator) -> np.ndarray:
    return array(tensor_of_documents(length, g))


def and_masks(*masks):
    def mask_mod(b, h, q, k):
        return functools.reduce(np.logical_and, [mask(b, h, q, k) for mask in masks])

    return mask_mod


@enter(MASKS)
def causal(s: Sizes, g: Generator) -> NumpyMods:
    return NumpyMods(mask_mod=causal_mod)


@enter(MASKS)
def sliding_window(s: Sizes, g: Generator) -> NumpyMods:
    window = 37
    return NumpyMods(mask_mod=lambda b, h, q, k: (q >= k) & (q - k <= window))


@enter(MASKS)
def symmetric_window(s: Sizes, g: Generator) -> NumpyMods:
    return NumpyMods(mask_mod=window_mod)


@enter(MASKS)
def prefix_lm(s: Sizes, g: Generator) -> NumpyMods:
    prefix = 40
    return NumpyMods(mask_mod=lambda b, h, q, k: (k < prefix) | (q >= k))


@enter(MASKS)
def prefix_lm_by_batch(s: Sizes, g: Generator) -> NumpyMods:
    lengths = array(randint(g, max(s.keys, 1), s.batch, dtype=torch.int32))
    return NumpyMods(mask_mod=lambda b, h, q, k: (k < lengths[b]) | (q >= k))


@enter(MASKS)
def causal_left_padded(s: Sizes, g: Generator) -> NumpyMods:
    offset = s.keys - s.queries
    padding = array(randint(g, 30, s.batch))
    return NumpyMods(mask_mod=lambda b, h, q, k: (q + offset >= k) & (k >= padding[b]))


@enter(MASKS)
def causal_with_tensor_offset(s: Sizes, g: Generator) -> NumpyMods:
    offset = np.array(s.keys - s.queries)
    return NumpyMods(mask_mod=lambda b, h, q, k: q + offset >= k)


@enter(MASKS)
def document(s: Sizes, g: Generator) -> NumpyMods:
    numbers = documents(max(s.queries, s.keys), g)
    return NumpyMods(mask_mod=lambda b, h, q, k: numbers[q] == numbers[k])


@enter(MASKS)
def document_by_batch_causal(s: Sizes, g: Generator) -> NumpyMods:
    numbers = np.stack([documents(max(s.queries, s.keys), g) for _ in range(s.batch)])
    return NumpyMods(mask_mod=lambda b, h, q, k: (numbers[b, q] == numbers[b, k]) & (q >= k))


@enter(MASKS)
def packed_chained(s: Sizes, g: Generator) -> NumpyMods:
    numbers = documents(max(s.queries, s.keys), g)
    starts = np.searchsorted(numbers, np.arange(int(numbers.max()) + 1 if len(numbers) else 1))

    def mask_mod(b, h, q, k):
        same = numbers[q] == numbers[k]
        return same & (q - starts[numbers[q]] >= k - starts[numbers[k]]) & (q - starts[numbers[q]] < 24)

    return NumpyMods(mask_mod=mask_mod)


@enter(MASKS)
def shared_prefix(s: Sizes, g: Generator) -> NumpyMods:
    branch = array(randint(g, 6, max(s.queries, s.keys)))
    prefix_of = array(randint(g, 3, 6))
    length_of = array(randint(g, 50, 3))

    def mask_mod(b, h, q, k):
        length = length_of[prefix_of[branch[q]]]
        shared = (k < length) & (prefix_of[branch[k]] == prefix_of[branch[q]])
        own = (branch[q] == branch[k]) & (k >= length)
        return (shared | own) & (q >= k)

    return NumpyMods(mask_mod=mask_mod)


@enter(MASKS)
def dilated_window(s: Sizes, g: Generator) -> NumpyMods:
    window, dilation = 48, 4
    return NumpyMods(mask_mod=lambda b, h, q, k: (q >= k) & (q - k < window) & ((q - k) % dilation == 0))


@enter(MASKS)
def dilated_by_head(s: Sizes, g: Generator) -> NumpyMods:
    return NumpyMods(mask_mod=lambda b, h, q, k: (abs(q - k) // (h + 1) < 12) & (np.mod(q - k, h + 1) == 0))


@enter(MASKS)
def global_tokens(s: Sizes, g: Generator) -> NumpyMods:
    is_global = array(torch.rand(max(s.queries, s.keys), generator=g) < 0.05)
    return NumpyMods(mask_mod=lambda b, h, q, k: (is_global[q] | is_global[k] | (np.abs(q - k) <= 16)) & (q >= k))


@enter(MASKS)
def vision_cross(s: Sizes, g: Generator) -> NumpyMods:
    patches = 32
    sees = array(torch.rand(s.batch, max(s.queries, 1), s.keys // patches + 1, generator=g) < 0.5)
    return NumpyMods(mask_mod=lambda b, h, q, k: sees[b, q][k // patches], by_scalars=True)


@enter(MASKS)
def block_diffusion(s: Sizes, g: Generator) -> NumpyMods:
    half, block = max(s.queries // 2, 1), 16

    def mask_mod(b, h, q, k):
        clean_q, clean_k = q >= half, k >= half
        block_q = np.where(clean_q, (q - half) // block, q // block)
        block_k = np.where(clean_k, (k - half) // block, k // block)
        diagonal = (block_q == block_k) & (clean_q == clean_k)
        offset = (block_q > block_k) & clean_k & ~clean_q
        block_causal = (block_q >= block_k) & clean_k & clean_q
        return diagonal | offset | block_causal

    return NumpyMods(mask_mod=mask_mod)


@enter(MASKS)
def neighbourhood_2d(s: Sizes, g: Generator) -> NumpyMods:
    width, kernel = 12, 5

    def mask_mod(b, h, q, k):
        (q_x, q_y), (k_x, k_y) = divmod(q, width), divmod(k, width)
        centre_x = q_x.clip(kernel // 2, width - 1 - kernel // 2)
        centre_y = q_y.clip(kernel // 2, width - 1 - kernel // 2)
        return (abs(centre_x - k_x) <= kernel // 2) & (abs(centre_y - k_y) <= kernel // 2)

    return NumpyMods(mask_mod=mask_mod)


@enter(MASKS)
def neighbourhood_2d_tiled(s: Sizes, g: Generator) -> NumpyMods:
    width, tile, kernel = 16, 4, 7

    def place(i):
        number, inside = i // (tile * tile), i % (tile * tile)
        x = number // (width // tile) * tile + inside // tile
        y = number % (width // tile) * tile + inside % tile
        return x, y

    def mask_mod(b, h, q, k):
        (q_x, q_y), (k_x, k_y) = place(q), place(k)
        centre_x = np.clip(q_x, kernel // 2, width - 1 - kernel // 2)
        centre_y = np.clip(q_y, kernel // 2, width - 1 - kernel // 2)
        return (np.abs(centre_x - k_x) <= kernel // 2) & (np.abs(centre_y - k_y) <= kernel // 2)

    return NumpyMods(mask_mod=mask_mod)


@enter(MASKS)
def neighbourhood_2d_morton(s: Sizes, g: Generator) -> NumpyMods:
    width, kernel = 16, 5

    def compact(x):
        x = x & 0x55555555
        x = (x | (x >> 1)) & 0x33333333
        x = (x | (x >> 2)) & 0x0F0F0F0F
        x = (x | (x >> 4)) & 0x00FF00FF
        return (x | (x >> 8)) & 0x0000FFFF

    def mask_mod(b, h, q, k):
        q_x, q_y, k_x, k_y = compact(q >> 1), compact(q), compact(k >> 1), compact(k)
        centre_x = q_x.clip(kernel // 2, width - 1 - kernel // 2)
        centre_y = q_y.clip(kernel // 2, width - 1 - kernel // 2)
        return (abs(centre_x - k_x) <= kernel // 2) & (abs(centre_y - k_y) <= kernel // 2)

    return NumpyMods(mask_mod=mask_mod)


@enter(MASKS)
def sliding_tile_2d(s: Sizes, g: Generator) -> NumpyMods:
    width, tile, window = 16, 4, 3
    tiles = width // tile

    def place(i):
        x, y = i // width, i % width
        return x // tile, y // tile

    def mask_mod(b, h, q, k):
        (q_x, q_y), (k_x, k_y) = place(q), place(k)
        centre_x = np.clip(q_x, window // 2, tiles - 1 - window // 2)
        centre_y = np.clip(q_y, window // 2, tiles - 1 - window // 2)
        return (np.abs(centre_x - k_x) <= window // 2) & (np.abs(centre_y - k_y) <= window // 2)

    return NumpyMods(mask_mod=mask_mod)


@enter(MASKS)
def sliding_tile_3d(s: Sizes, g: Generator) -> NumpyMods:
    shape, tile, window, text = (8, 6, 6), (2, 2, 2), (3, 3, 1), 5
    canvas = tuple(n // t for n, t in zip(shape, tile))

    def place(i):
        i = np.clip(i - text, 0, None)
        t, rest = i // (shape[1] * shape[2]), i % (shape[1] * shape[2])
        return t // tile[0], rest // shape[2] // tile[1], rest % shape[2] // tile[2]

    def mask_mod(b, h, q, k):
        inside = (q < text) | (k < text)
        near = None
        for q_at, k_at, size, length in zip(place(q), place(k), window, canvas):
            centre = q_at.clip(size // 2, length - 1 - size // 2)
            close = abs(centre - k_at) <= size // 2
            near = close if near is None else near & close
        return inside | near

    return NumpyMods(mask_mod=mask_mod)


@enter(MASKS)
def speculative_tree(s: Sizes, g: Generator) -> NumpyMods:
    past = max(s.keys - s.queries, 0)
    size = max(s.queries, s.keys)
    parents = [int(torch.randint(0, i, (1,), generator=g)) if i else -1 for i in range(size)]
    ancestors = np.eye(size, dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            ancestors[node] |= ancestors[parent]

    def mask_mod(b, h, q, k):
        return (k < past) | ancestors[q, np.clip(k - past, 0, None)]

    return NumpyMods(mask_mod=mask_mod)


@enter(MASKS)
def top_k_blocks(s: Sizes, g: Generator) -> NumpyMods:
    block = 32
    chosen = array(randint(g, s.keys // block + 1, s.batch, s.heads, s.queries // block + 1, 3))
    return NumpyMods(mask_mod=lambda b, h, q, k: (chosen[b, h, q // block] == k // block).any(), by_scalars=True)


@enter(MASKS)
def and_of_masks(s: Sizes, g: Generator) -> NumpyMods:
    numbers = documents(max(s.queries, s.keys), g)
    return NumpyMods(mask_mod=and_masks(causal_mod, window_mod, lambda b, h, q, k: numbers[q] == numbers[k]))


@enter(MASKS)
def or_of_masks(s: Sizes, g: Generator) -> NumpyMods:
    is_global = array(torch.rand(s.keys + 1, generator=g) < 0.05)

    def mask_mod(b, h, q, k):
        either = np.logical_or(is_global[k], and_masks(causal_mod, window_mod)(b, h, q, k))
        return either & (k != 3)

    return NumpyMods(mask_mod=mask_mod)


@enter(MASKS)
def different_by_batch(s: Sizes, g: Generator) -> NumpyMods:
    def mask_mod(b, h, q, k):
        return np.where(b == 0, q >= k, np.where(b == 1, abs(q - k) < 10, k % 3 == 0))

    return NumpyMods(mask_mod=mask_mod)


@enter(MASKS)
def partial_function(s: Sizes, g: Generator) -> NumpyMods:
    def windowed(window, b, h, q, k, *, strict):
        near = abs(q - k) < window
        return near & (q > k) if strict else near

    return NumpyMods(mask_mod=functools.partial(windowed, 15, strict=False))


class Padding:
    """A mask as an object, with an array."""

    def __init__(self, lengths: np.ndarray):
        self.lengths = lengths

    def __call__(self, b, h, q, k):
        return k < self.lengths[b]


@enter(MASKS)
def key_lengths_in_a_module(s: Sizes, g: Generator) -> NumpyMods:
    return NumpyMods(mask_mod=Padding(array(randint(g, s.keys + 1, s.batch))))


@enter(MASKS)
def some_rows_empty(s: Sizes, g: Generator) -> NumpyMods:
    return NumpyMods(mask_mod=lambda b, h, q, k: (q >= k + 7) & (q % 5 != 0))


@enter(MASKS)
def all_rows_empty(s: Sizes, g: Generator) -> NumpyMods:
    return NumpyMods(mask_mod=lambda b, h, q, k: (q < 0) & (k >= 0))
