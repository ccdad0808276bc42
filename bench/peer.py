"""One process under measurement, driven over a pipe: reads a JSON line, does what it says, answers with a JSON line.

    {"prepare": [library, row]}   builds the inputs of a row and runs it once   -> {"seconds": first}
    {"run": repeats}              runs it                                       -> {"seconds": [...]}

Started as `python bench/peer.py first LIBRARY NUMBER` it instead times the first calls of a fresh process: each of NUMBER
different mods once, from the import of the library on, torch being imported already.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], Any]


def inputs(batch: int, heads: int, length: int, dim: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, heads, length, dim, generator=generator) for _ in range(3)]


def alibi(heads: int) -> Callable[..., torch.Tensor]:
    slopes = torch.exp2(-8.0 * torch.arange(1, heads + 1) / heads)
    return lambda score, b, h, q, k: score + slopes[h] * (k - q)


def soft_cap(score, b, h, q, k):
    return 20.0 * torch.tanh(score / 20.0)


def causal(b, h, q, k):
    return q >= k


def call(library: str, kind: str, shape: tuple[int, int, int, int]) -> Call:
    """What one run of a row is."""
    query, key, value = inputs(*shape)
    mods = {"alibi": alibi(shape[1]), "soft_cap": soft_cap}
    if library == "attnc":
        from attnc import flex_attention

        mask = causal if kind == "causal" else None
        return lambda: flex_attention(query, key, value, mods.get(kind), mask_mod=mask)
    if library == "sdpa":
        return lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=kind == "causal")
    assert library == "flex", library
    from torch.nn.attention import flex_attention as module

    module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True  # eager, without dynamo
    return lambda: module.flex_attention(query, key, value, mods.get(kind))


def first_calls(library: str, number: int) -> list[float]:
    """Seconds of the first calls: the first includes all lazy imports, the others are new mods in a warm process."""
    query, key, value = inputs(1, 8, 512, 64)
    bias = torch.randn(2048)
    new_mods: list[Callable[..., torch.Tensor]] = [
        alibi(8),
        soft_cap,
        lambda score, b, h, q, k: score + bias[q - k + 512],
        lambda score, b, h, q, k: torch.where((q - k).abs() < 64, score, score - 1.5),
        lambda score, b, h, q, k: score * torch.sigmoid(score) + 0.1 * torch.cos(q - k),
    ]
    seconds = []
    for mod in new_mods[:number]:
        start = time.perf_counter()
        if library == "attnc":
            from attnc import flex_attention

            flex_attention(query, key, value, mod, mask_mod=causal)
        else:
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            flex_attention(query, key, value, mod, block_mask=create_block_mask(causal, 1, 1, 512, 512, device="cpu"))
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    if sys.argv[1:2] == ["first"]:
        print(json.dumps(first_calls(sys.argv[2], int(sys.argv[3]))))
        return
    current: Call = lambda: None  # noqa: E731
    with torch.inference_mode():
        for line in sys.stdin:
            order = json.loads(line)
            start = time.perf_counter()
            if "prepare" in order:
                library, kind, shape = order["prepare"]
                current = call(library, kind, tuple(shape))
                current()
                answer: Any = time.perf_counter() - start
            else:
                answer = []
                for _ in range(order["run"]):
                    begin = time.perf_counter()
                    current()
                    answer.append(time.perf_counter() - begin)
            print(json.dumps({"seconds": answer}), flush=True)


if __name__ == "__main__":
    main()
