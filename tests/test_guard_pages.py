"""No kernel touches a byte outside of its tensors: query, key, value and captures lie against pages that may not be touched.

A process that does touch one dies of it, and pytest with it.
"""

from __future__ import annotations

import ctypes
import mmap
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

import attnc
from oracle import Problem, check

PAGE = mmap.PAGESIZE
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
CAPTURES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)

libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(tensor: Tensor, at_end: bool) -> Tensor:
    """A copy with the same strides, that ends (or begins) where a page begins (or ends) that may not be touched."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    size = span * tensor.element_size()
    body = -(-size // PAGE) * PAGE
    memory = mmap.mmap(-1, body + 2 * PAGE)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    flat = torch.frombuffer(memory, dtype=torch.uint8, offset=PAGE + (body - size if at_end else 0), count=size)
    flat.fill_(0x7F)  # what lies between the elements is garbage
    result = flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    own = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
    result[own].copy_(tensor[own])
    for address in (first, first + PAGE + body):
        assert libc.mprotect(address, PAGE, 0) == 0
    return result


def strided(shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> Tensor:
    b, h, s, e = shape
    match kind:
        case "BSHD":
            return torch.randn(b, s, h, e).to(dtype).transpose(1, 2)
        case "BHDS":
            return torch.randn(b, h, e, s).to(dtype).transpose(2, 3)
        case "last stride 2":
            return torch.randn(b, h, s, 2 * e).to(dtype)[..., ::2]
        case "packed":
            return torch.randn(b, s, 3 * h * e).to(dtype)[:, :, h * e : 2 * h * e].view(b, s, h, e).transpose(1, 2)
        case "expanded":
            return torch.randn(b, 1, s, e).to(dtype).expand(shape)
        case _:
            return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("seed", range(32))
def test_nothing_outside_is_touched(seed: int):
    r = random.Random(seed)
    torch.manual_seed(seed)
    dtype = DTYPES[seed % 4]
    batch, kv_heads, group = r.choice([1, 2]), r.choice([1, 2]), r.choice([1, 1, 3])
    head_dim, value_dim = r.choice([1, 3, 8, 17, 64, 94]), r.choice([1, 13, 33, 64])
    queries, keys = r.choice([1, 2, 7, 16, 17, 65, 129]), r.choice([1, 3, 15, 17, 33, 65, 129, 257])

    def guard(tensor: Tensor) -> Tensor:
        return guarded(tensor, r.random() < 0.6)

    def input_(heads: int, length: int, width: int) -> Tensor:
        kind = r.choice(["dense", "BSHD", "BHDS", "last stride 2", "packed", "expanded"])
        return guard(strided((batch, heads, length, width), dtype, kind))

    query = input_(kv_heads * group, queries, head_dim)
    key, value = input_(kv_heads, keys, head_dim), input_(kv_heads, keys, value_dim)

    def capture(*shape: int) -> Tensor:
        return guard(torch.randint(0, 2, shape).to(r.choice(CAPTURES)))

    by_key, by_query, by_both = capture(keys), capture(queries), capture(queries, keys)
    relative, scalar, heads = capture(queries + keys), capture(), capture(kv_heads * group)
    table = guard(torch.randint(0, keys, (keys,)).to(r.choice([torch.int32, torch.int64])))
    score_mods: list[Callable | None] = [
        None,
        lambda s, b, h, q, k: s + by_key[k] + heads[h],
        lambda s, b, h, q, k: s + by_query[q] + by_both[q, k],
        lambda s, b, h, q, k: s + relative[q - k],
        lambda s, b, h, q, k: s + relative[k - q + queries] + scalar,
        lambda s, b, h, q, k: s + by_key[table[k]],
        lambda s, b, h, q, k: s + by_key[-k - 1],
        lambda s, b, h, q, k: s + by_key[keys - 1 - k],
    ]
    mask_mods: list[Callable | None] = [
        None,
        lambda b, h, q, k: q >= k,
        lambda b, h, q, k: by_key[k] > 0,
        lambda b, h, q, k: (by_both[q, k] != 0) | (k < 2),
        lambda b, h, q, k: table[k] <= q,
        lambda b, h, q, k: (relative[q - k] > 0) | (k < 3),
    ]
    problem = Problem(query, key, value, r.choice(score_mods), r.choice(mask_mods))
    out, aux = attnc.flex_attention(
        query,
        key,
        value,
        problem.score_mod,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True, max_scores=True),
        mask_mod=problem.mask_mod,
    )
    check(problem, out, aux.lse, aux.max_scores)
