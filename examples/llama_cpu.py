"""A Llama on the CPU: the same tokens from torch's sdpa and from attnc, and how fast each is.

    python examples/llama_cpu.py            # some minutes
    python examples/llama_cpu.py --quick    # a tiny model, seconds

The model has a Llama's shape (8 layers of 1024, 16 query heads, 4 key/value heads) and random weights: nothing is downloaded.
It generates from a batch with left padding, in f32 and bf16. Then the attention part of a step is measured alone, both
implementations turn by turn: decoding with 8192 tokens in the cache, and a prefill of 4096.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import attnc.integrations.transformers  # registers "attnc"

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16384,
}
TINY = SHAPE | {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


def make_model(shape: dict[str, int], dtype: torch.dtype) -> PreTrainedModel:
    """A Llama of random weights, in evaluation mode."""
    torch.manual_seed(0)
    config = LlamaConfig(**shape, initializer_range=0.05, pad_token_id=0)  # type: ignore[arg-type]
    return AutoModelForCausalLM.from_config(config, attn_implementation="attnc").to(dtype).eval()


def generate(model: PreTrainedModel, implementation: str, prompt: int, new: int) -> tuple[torch.Tensor, float]:
    """(tokens [2, prompt + new], seconds): greedy, the first sequence shorter by a third."""
    model.set_attn_implementation(implementation)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, model.config.vocab_size, (2, prompt), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, : prompt // 3] = 0
    begin = time.perf_counter()
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False)  # type: ignore[operator]
    return tokens, time.perf_counter() - begin


def same_tokens(first: torch.Tensor, second: torch.Tensor, prompt: int) -> int:
    """How many new tokens are the same in both sequences of the batch, from the first on."""
    same = (first == second).all(0)[prompt:].long()
    return int(same.cumprod(0).sum())


def attention_times(queries: int, keys: int, dtype: torch.dtype, turns: int) -> dict[str, float]:
    """Median seconds of one layer's attention under each implementation, as the model calls it."""
    module = SimpleNamespace(is_causal=True, num_key_value_groups=4)
    query = torch.randn(1, queries, 16, 64).to(dtype).transpose(1, 2)
    key, value = (torch.randn(1, 4, keys, 64).to(dtype) for _ in range(2))
    calls: dict[str, Callable[..., object]] = {
        "attnc": attnc.integrations.transformers.attention_forward,
        "sdpa": sdpa_attention_forward,
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            call(module, query, key, value, None, scaling=0.125)
            if turn:  # the first one compiles
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


@torch.inference_mode()
def main(quick: bool = False) -> None:
    """Print tokens' agreement, and speeds."""
    prompt, new = (40, 12) if quick else (512, 32)
    decode, prefill = (256, 128) if quick else (8192, 4096)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        model = make_model(TINY if quick else SHAPE, dtype)
        generate(model, "attnc", prompt, new)  # compiles
        ours, our_seconds = generate(model, "attnc", prompt, new)
        theirs, their_seconds = generate(model, "sdpa", prompt, new)
        same = same_tokens(ours, theirs, prompt)
        print(f"{name}: {same} of {new} new tokens are the same in both sequences")
        if dtype is torch.bfloat16:
            print("    (random weights: many tokens are nearly alike, and each implementation rounds at other places)")
        print(f"    generate    attnc {2 * new / our_seconds:7.1f} tokens/s   sdpa {2 * new / their_seconds:7.1f} tokens/s")
        # bf16 rounds at other places in each implementation: where two tokens are nearly alike, either may win.
        assert same == new or dtype is torch.bfloat16
        del model
        for what, queries, keys, turns in (("decode ", 1, decode, 30), ("prefill", prefill, prefill, 3)):
            times = attention_times(queries, keys, dtype, turns)
            print(
                f"    {what} {keys:5} attnc {1e3 * times['attnc']:8.3f} ms   sdpa {1e3 * times['sdpa']:8.3f} ms   "
                f"{times['sdpa'] / times['attnc']:.1f} times as fast (attention of a layer)"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    main(parser.parse_args().quick)
