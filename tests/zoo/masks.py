"""The masks of the zoo. Each builder gives a mask_mod (or a BlockMask) for any sizes."""

from __future__ import annotations

import functools

import torch
from torch.nn.attention.flex_attention import BlockMask, and_masks, or_masks

from zoo.entry import Entry, Generator, Mods, Sizes, enter, randint

MASKS: dict[str, Entry] = {}


def causal_mod(b, h, q, k):
    return q >= k


def window_mod(b, h, q, k):
    return (q - k).abs() <= 20


@enter(MASKS)
def causal(s: Sizes, g: Generator) -> Mods:
    return Mods(mask_mod=causal_mod)


@enter(MASKS, queries=257, keys=257)
def sliding_window(s: Sizes, g: Generator) -> Mods:
    window = 37
    return Mods(mask_mod=lambda b, h, q, k: (q >= k) & (q - k <= window))


@enter(MASKS)
def symmetric_window(s: Sizes, g: Generator) -> Mods:
    return Mods(mask_mod=window_mod)


@enter(MASKS)
def prefix_lm(s: Sizes, g: Generator) -> Mods:
    prefix = 40
    return Mods(mask_mod=lambda b, h, q, k: (k < prefix) | (q >= k))


@enter(MASKS)
def prefix_lm_by_batch(s: Sizes, g: Generator) -> Mods:
    lengths = randint(g, max(s.keys, 1), s.batch, dtype=torch.int32)
    return Mods(mask_mod=lambda b, h, q, k: (k < lengths[b]) | (q >= k))


@enter(MASKS, queries=65, keys=129)
def causal_left_padded(s: Sizes, g: Generator) -> Mods:
    offset = s.keys - s.queries
    padding = randint(g, 30, s.batch)
    return Mods(mask_mod=lambda b, h, q, k: (q + offset >= k) & (k >= padding[b]))


@enter(MASKS, queries=65, keys=200)
def causal_with_tensor_offset(s: Sizes, g: Generator) -> Mods:
    offset = torch.tensor(s.keys - s.queries)
    return Mods(mask_mod=lambda b, h, q, k: q + offset >= k)


def documents(length: int, g: Generator) -> torch.Tensor:
    """Document numbers of a packed sequence, rising: [length], int32."""
    ends = (torch.rand(length, generator=g) < 0.04).int()
    return torch.cumsum(ends, 0).int()


@enter(MASKS, queries=255, keys=255)
def document(s: Sizes, g: Generator) -> Mods:
    numbers = documents(max(s.queries, s.keys), g)
    return Mods(mask_mod=lambda b, h, q, k: numbers[q] == numbers[k])


@enter(MASKS)
def document_by_batch_causal(s: Sizes, g: Generator) -> Mods:
    numbers = torch.stack([documents(max(s.queries, s.keys), g) for _ in range(s.batch)])
    return Mods(mask_mod=lambda b, h, q, k: (numbers[b, q] == numbers[b, k]) & (q >= k))


@enter(MASKS, queries=200, keys=200)
def packed_chained(s: Sizes, g: Generator) -> Mods:
    numbers = documents(max(s.queries, s.keys), g)
    starts = torch.searchsorted(numbers, torch.arange(int(numbers.max()) + 1 if len(numbers) else 1, dtype=torch.int32))

    def mask_mod(b, h, q, k):
        same = numbers[q] == numbers[k]
        return same & (q - starts[numbers[q]] >= k - starts[numbers[k]]) & (q - starts[numbers[q]] < 24)

    return Mods(mask_mod=mask_mod)


@enter(MASKS, queries=150, keys=190)
def shared_prefix(s: Sizes, g: Generator) -> Mods:
    """Several continuations of prefixes that they share: each token's branch, each branch's prefix, each prefix's length."""
    branch = randint(g, 6, max(s.queries, s.keys))
    prefix_of = randint(g, 3, 6)
    length_of = randint(g, 50, 3)

    def mask_mod(b, h, q, k):
        length = length_of[prefix_of[branch[q]]]
        shared = (k < length) & (prefix_of[branch[k]] == prefix_of[branch[q]])
        own = (branch[q] == branch[k]) & (k >= length)
        return (shared | own) & (q >= k)

    return Mods(mask_mod=mask_mod)


@enter(MASKS)
def dilated_window(s: Sizes, g: Generator) -> Mods:
    window, dilation = 48, 4
    return Mods(mask_mod=lambda b, h, q, k: (q >= k) & (q - k < window) & ((q - k) % dilation == 0))


@enter(MASKS)
def dilated_by_head(s: Sizes, g: Generator) -> Mods:
    return Mods(mask_mod=lambda b, h, q, k: ((q - k).abs() // (h + 1) < 12) & ((q - k) % (h + 1) == 0))


@enter(MASKS, queries=257, keys=257)
def global_tokens(s: Sizes, g: Generator) -> Mods:
    is_global = torch.rand(max(s.queries, s.keys), generator=g) < 0.05
    return Mods(mask_mod=lambda b, h, q, k: (is_global[q] | is_global[k] | ((q - k).abs() <= 16)) & (q >= k))


@enter(MASKS, queries=77, keys=160)
def vision_cross(s: Sizes, g: Generator) -> Mods:
    """Each row of text sees its images, of 32 patches each."""
    patches = 32
    sees = torch.rand(s.batch, max(s.queries, 1), s.keys // patches + 1, generator=g) < 0.5
    return Mods(mask_mod=lambda b, h, q, k: sees[b, q][k // patches])


@enter(MASKS, queries=160, keys=160)
def block_diffusion(s: Sizes, g: Generator) -> Mods:
    """A noised copy before a clean one: each noised block sees itself and the clean blocks before it."""
    half, block = max(s.queries // 2, 1), 16

    def mask_mod(b, h, q, k):
        clean_q, clean_k = q >= half, k >= half
        block_q = torch.where(clean_q, (q - half) // block, q // block)
        block_k = torch.where(clean_k, (k - half) // block, k // block)
        diagonal = (block_q == block_k) & (clean_q == clean_k)
        offset = (block_q > block_k) & clean_k & ~clean_q
        block_causal = (block_q >= block_k) & clean_k & clean_q
        return diagonal | offset | block_causal

    return Mods(mask_mod=mask_mod)


@enter(MASKS, queries=144, keys=144)
def neighbourhood_2d(s: Sizes, g: Generator) -> Mods:
    width, kernel = 12, 5

    def mask_mod(b, h, q, k):
        q_x, q_y, k_x, k_y = q // width, q % width, k // width, k % width
        centre_x = q_x.clamp(kernel // 2, width - 1 - kernel // 2)
        centre_y = q_y.clamp(kernel // 2, width - 1 - kernel // 2)
        return ((centre_x - k_x).abs() <= kernel // 2) & ((centre_y - k_y).abs() <= kernel // 2)

    return Mods(mask_mod=mask_mod)


@enter(MASKS, queries=256, keys=256)
def neighbourhood_2d_tiled(s: Sizes, g: Generator) -> Mods:
    """The same on a picture stored as tiles of 4 x 4."""
    width, tile, kernel = 16, 4, 7

    def place(i):
        number, inside = i // (tile * tile), i % (tile * tile)
        x = number // (width // tile) * tile + inside // tile
        y = number % (width // tile) * tile + inside % tile
        return x, y

    def mask_mod(b, h, q, k):
        (q_x, q_y), (k_x, k_y) = place(q), place(k)
        centre_x = torch.clamp(q_x, kernel // 2, width - 1 - kernel // 2)
        centre_y = torch.clamp(q_y, kernel // 2, width - 1 - kernel // 2)
        return (torch.abs(centre_x - k_x) <= kernel // 2) & (torch.abs(centre_y - k_y) <= kernel // 2)

    return Mods(mask_mod=mask_mod)


@enter(MASKS, queries=256, keys=256)
def neighbourhood_2d_morton(s: Sizes, g: Generator) -> Mods:
    """The same on a picture in Morton order: the bits of x and y interleaved."""
    width, kernel = 16, 5

    def compact(x):
        x = x & 0x55555555
        x = (x | (x >> 1)) & 0x33333333
        x = (x | (x >> 2)) & 0x0F0F0F0F
        x = (x | (x >> 4)) & 0x00FF00FF
        return (x | (x >> 8)) & 0x0000FFFF

    def mask_mod(b, h, q, k):
        q_x, q_y, k_x, k_y = compact(q >> 1), compact(q), compact(k >> 1), compact(k)
        centre_x = q_x.clamp(kernel // 2, width - 1 - kernel // 2)
        centre_y = q_y.clamp(kernel // 2, width - 1 - kernel // 2)
        return ((centre_x - k_x).abs() <= kernel // 2) & ((centre_y - k_y).abs() <= kernel // 2)

    return Mods(mask_mod=mask_mod)


@enter(MASKS, queries=256, keys=256)
def sliding_tile_2d(s: Sizes, g: Generator) -> Mods:
    """Tiles of 4 x 4 on a picture of 16 x 16; a query sees the tiles in a window around its own, clamped to the picture."""
    width, tile, window = 16, 4, 3
    tiles = width // tile

    def place(i):
        x, y = i // width, i % width
        return x // tile, y // tile

    def mask_mod(b, h, q, k):
        (q_x, q_y), (k_x, k_y) = place(q), place(k)
        centre_x = torch.clamp(q_x, window // 2, tiles - 1 - window // 2)
        centre_y = torch.clamp(q_y, window // 2, tiles - 1 - window // 2)
        return (torch.abs(centre_x - k_x) <= window // 2) & (torch.abs(centre_y - k_y) <= window // 2)

    return Mods(mask_mod=mask_mod)


@enter(MASKS, queries=288, keys=288, heads=2, kv_heads=2)
def sliding_tile_3d(s: Sizes, g: Generator) -> Mods:
    """The same on a film of 8 x 6 x 6, in tiles of 2 x 2 x 2, after a few tokens of text that all see."""
    shape, tile, window, text = (8, 6, 6), (2, 2, 2), (3, 3, 1), 5
    canvas = tuple(n // t for n, t in zip(shape, tile))

    def place(i):
        i = torch.clamp(i - text, min=0)
        t, rest = i // (shape[1] * shape[2]), i % (shape[1] * shape[2])
        return t // tile[0], rest // shape[2] // tile[1], rest % shape[2] // tile[2]

    def mask_mod(b, h, q, k):
        inside = (q < text) | (k < text)
        near = None
        for q_at, k_at, size, length in zip(place(q), place(k), window, canvas):
            centre = q_at.clamp(size // 2, length - 1 - size // 2)
            close = (centre - k_at).abs() <= size // 2
            near = close if near is None else near & close
        return inside | near

    return Mods(mask_mod=mask_mod)


@enter(MASKS, queries=24, keys=129)
def speculative_tree(s: Sizes, g: Generator) -> Mods:
    """The last `queries` keys are a tree of drafts: each sees what came before the tree, and its ancestors."""
    past = max(s.keys - s.queries, 0)
    size = max(s.queries, s.keys)
    parents = [int(torch.randint(0, i, (1,), generator=g)) if i else -1 for i in range(size)]
    ancestors = torch.eye(size, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            ancestors[node] |= ancestors[parent]

    def mask_mod(b, h, q, k):
        return (k < past) | ancestors[q, torch.clamp(k - past, min=0)]

    return Mods(mask_mod=mask_mod)


@enter(MASKS, queries=256, keys=256)
def top_k_blocks(s: Sizes, g: Generator) -> Mods:
    """For each (b, h) and block of queries, the three blocks of keys that were chosen."""
    block = 32
    chosen = randint(g, s.keys // block + 1, s.batch, s.heads, s.queries // block + 1, 3)
    return Mods(mask_mod=lambda b, h, q, k: (chosen[b, h, q // block] == k // block).any())


@enter(MASKS)
def and_of_masks(s: Sizes, g: Generator) -> Mods:
    numbers = documents(max(s.queries, s.keys), g)
    return Mods(mask_mod=and_masks(causal_mod, window_mod, lambda b, h, q, k: numbers[q] == numbers[k]))


@enter(MASKS)
def or_of_masks(s: Sizes, g: Generator) -> Mods:
    is_global = torch.rand(s.keys + 1, generator=g) < 0.05
    either = or_masks(lambda b, h, q, k: is_global[k], and_masks(causal_mod, window_mod))
    return Mods(mask_mod=and_masks(either, lambda b, h, q, k: k != 3))


@enter(MASKS, batch=3)
def different_by_batch(s: Sizes, g: Generator) -> Mods:
    def mask_mod(b, h, q, k):
        return torch.where(b == 0, q >= k, torch.where(b == 1, (q - k).abs() < 10, k % 3 == 0))

    return Mods(mask_mod=mask_mod)


@enter(MASKS)
def partial_function(s: Sizes, g: Generator) -> Mods:
    def windowed(window, b, h, q, k, *, strict):
        near = (q - k).abs() < window
        return near & (q > k) if strict else near

    return Mods(mask_mod=functools.partial(windowed, 15, strict=False))


class Padding(torch.nn.Module):
    """A mask as a module, with a buffer."""

    lengths: torch.Tensor

    def __init__(self, lengths: torch.Tensor):
        super().__init__()
        self.register_buffer("lengths", lengths)

    def forward(self, b, h, q, k):
        return k < self.lengths[b]


@enter(MASKS)
def key_lengths_in_a_module(s: Sizes, g: Generator) -> Mods:
    return Mods(mask_mod=Padding(randint(g, s.keys + 1, s.batch)))


@enter(MASKS)
def some_rows_empty(s: Sizes, g: Generator) -> Mods:
    return Mods(mask_mod=lambda b, h, q, k: (q >= k + 7) & (q % 5 != 0))


@enter(MASKS)
def all_rows_empty(s: Sizes, g: Generator) -> Mods:
    return Mods(mask_mod=lambda b, h, q, k: (q < 0) & (k >= 0))


def block_lists(s: Sizes, g: Generator, batch: int, heads: int, q_block: int, k_block: int, full: bool):
    """Random lists: (numbers, indices) of partial blocks and, disjoint from them, of full ones (or None, None)."""
    rows, columns = max(-(-s.queries // q_block), 1), max(-(-s.keys // k_block), 1)
    draw = torch.rand(batch, heads, rows, columns, generator=g)
    result = []
    for listed in (draw < 0.5, (draw > 0.75) if full else None):
        if listed is None:
            result += [None, None]
            continue
        order = torch.argsort(listed.int(), dim=-1, descending=True, stable=True)
        result += [listed.sum(dim=-1).int(), order.int()]
    return result


@enter(MASKS, queries=257, keys=200)
def block_list_only(s: Sizes, g: Generator) -> Mods:
    lists = block_lists(s, g, 1, s.heads, 64, 64, full=False)
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=64, mask_mod=None, seq_lengths=(s.queries, s.keys))
    return Mods(block_mask=mask)


@enter(MASKS, queries=200, keys=257)
def block_mask_full_and_partial(s: Sizes, g: Generator) -> Mods:
    lists = block_lists(s, g, s.batch, 1, 32, 64, full=True)
    shape = (s.queries, s.keys)
    return Mods(block_mask=BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=(32, 64), mask_mod=causal_mod, seq_lengths=shape))


@enter(MASKS, queries=130, keys=130)
def block_mask_with_capture(s: Sizes, g: Generator) -> Mods:
    numbers = documents(max(s.queries, s.keys), g)
    lists = block_lists(s, g, s.batch, s.heads, 16, 16, full=True)
    mod = lambda b, h, q, k: numbers[q] == numbers[k]  # noqa: E731
    shape = (s.queries, s.keys)
    return Mods(block_mask=BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=16, mask_mod=mod, seq_lengths=shape))
