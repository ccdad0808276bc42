"""From torch-mlir's text to native code: a model with torch's flex_attention, exported by torch-mlir, compiled by attnc.

    python examples/from_torch_mlir.py

`torch_mlir.fx.export_and_import(…, output_type="raw")` writes the model down in the torch dialect: flex_attention as
`torch.hop_flex_attention`, its score and mask functions as private functions, and the several hundred operations that make a
BlockMask, which nothing uses. The length is left open. attnc removes what has no part in the results, brings the functions into
the region of one attention operation, and compiles; what stands around it becomes views and a loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attnc
from attnc import pipeline
from attnc.mlir_text import parse_module
from attnc.target import Target

HEADS, KV_HEADS, HEAD_DIM, WINDOW = 8, 2, 32, 128
WIDTH = HEADS * HEAD_DIM


def softcap_and_distance(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Scores kept within (-20, 20), less for keys that are far away."""
    return torch.tanh(score / 20) * 20 + (kv_idx - q_idx) * 0.01


def sliding_window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < WINDOW)


class Attention(nn.Module):
    """Grouped heads, score and mask functions, lse, a scale of each output channel."""

    def __init__(self, masked: bool = True):
        super().__init__()
        self.masked = masked
        self.register_buffer("channel_scale", torch.rand(WIDTH))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, _ = query.shape
        heads = query.view(batch, length, HEADS, HEAD_DIM).transpose(1, 2)
        keys = key.view(batch, -1, KV_HEADS, HEAD_DIM).transpose(1, 2)
        values = value.view(batch, -1, KV_HEADS, HEAD_DIM).transpose(1, 2)
        blocks = create_block_mask(sliding_window, None, None, length, length, device="cpu") if self.masked else None
        out, lse = flex_attention(  # type: ignore[misc]
            heads, keys, values, softcap_and_distance, blocks, enable_gqa=True, return_lse=True
        )
        return out.transpose(1, 2).reshape(batch, length, WIDTH) * self.channel_scale, lse  # type: ignore[operator]


def inputs(length: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, length, WIDTH), torch.randn(2, length, 2 * 32), torch.randn(2, length, 2 * 32)


def milliseconds(function: Callable[..., Any], *arguments: Any) -> float:
    """The best of five calls."""
    function(*arguments)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        function(*arguments)
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def shown(title: str, text: str, lines: int = 28) -> None:
    """The first lines of an IR."""
    every = text.splitlines()
    print(f"\n--- {title}: {len(every)} lines ---")
    print("\n".join(line if len(line) < 160 else line[:157] + "…" for line in every[:lines]))
    if len(every) > lines:
        print(f"… {len(every) - lines} more")


def compare(model: nn.Module, text: str, lengths: tuple[int, ...]) -> None:
    """Errors and times of the compiled text against the model itself."""
    compiled = attnc.compile(text)
    print(f"\n{compiled}\nkernels: {', '.join(compiled.kernels)}")
    for length in lengths:
        arguments = inputs(length)
        with torch.no_grad():
            expected = model(*arguments)
        errors = [(a - b).abs().max().item() for a, b in zip(compiled(*arguments), expected, strict=True)]
        assert max(errors) < 1e-4, errors
        eager = milliseconds(model, *arguments)
        native = milliseconds(compiled, *arguments)
        print(
            f"length {length:5}: error of out {errors[0]:.1e}, of lse {errors[1]:.1e}; "
            f"attnc {native:.2f} ms, torch eager {eager:.2f} ms"
        )


def main() -> None:
    from torch_mlir import fx  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    model = Attention().eval()
    text = str(fx.export_and_import(model, *inputs(300), output_type="raw"))
    shown("what torch-mlir wrote", text)
    module = parse_module(text)
    for name in ("simplify-torch", "convert-torch-to-linalg"):
        pipeline.run_pass(module, name, Target.host())
        module.attributes.pop("attnc.resources", None)  # the weights' bytes, in hexadecimal
        shown(f"after {name}", str(module), 60)
    compare(model, text, (300,))

    # Any length from one text: torch cannot leave open the length of a BlockMask made inside, so without one.
    unmasked = Attention(masked=False).eval()
    length = Dim("length", min=2, max=4096)
    shapes = {name: {1: length} for name in ("query", "key", "value")}
    open_text = str(fx.export_and_import(unmasked, *inputs(300), output_type="raw", dynamic_shapes=shapes))
    compare(unmasked, open_text, (300, 17, 1024))


if __name__ == "__main__":
    main()
