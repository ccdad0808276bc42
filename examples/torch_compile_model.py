"""A small transformer that calls torch's own attention functions, compiled with attnc's backend; not a line of it knows attnc.

    python examples/torch_compile_model.py

One layer calls `flex_attention` (a sliding window with ALiBi), one `F.scaled_dot_product_attention`. The compiled model is
compared with the plain one at three lengths. The first call takes half a minute or more where Inductor finds a C++ compiler for
the rest of the model; after it, neither torch.compile nor attnc compiles anything anew.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attnc
from attnc import programs

HEADS, HEAD_DIM, WINDOW = 4, 16, 64
WIDTH = HEADS * HEAD_DIM


class Layer(nn.Module):
    """Attention and a small MLP."""

    def __init__(self, flex: bool):
        super().__init__()
        self.flex = flex
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.slopes = nn.Buffer(2.0 ** -torch.arange(1, HEADS + 1))

    def forward(self, x: Tensor, block_mask: object) -> Tensor:
        batch, length, _ = x.shape
        packed = self.qkv(self.before_attention(x)).view(batch, length, 3, HEADS, HEAD_DIM)
        query, key, value = (packed[:, :, part].transpose(1, 2) for part in range(3))
        slopes = self.slopes
        if self.flex:

            def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
                return score + slopes[h] * (kv_idx - q_idx)

            attended = flex_attention(query, key, value, score_mod=alibi, block_mask=block_mask)  # type: ignore[arg-type]
        else:
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        assert isinstance(attended, Tensor)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.before_mlp(x))


class Model(nn.Module):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(flex=True), Layer(flex=False)])

    def forward(self, x: Tensor, block_mask: object) -> Tensor:
        for layer in self.layers:
            x = layer(x, block_mask)
        return x


def window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Each query sees the last WINDOW keys."""
    return (q_idx >= kv_idx) & (q_idx - kv_idx < WINDOW)


def main(lengths: tuple[int, ...] = (200, 333, 512), rest: str | None = None) -> None:
    """Compare the compiled model with the plain one."""
    torch.manual_seed(0)
    model = Model().eval()
    compiled = torch.compile(model, backend="attnc", dynamic=True, options={"rest": rest} if rest else None)
    kernels = 0
    with torch.no_grad():
        for place, length in enumerate(lengths):
            x = torch.randn(2, length, WIDTH)
            block_mask = create_block_mask(window, None, None, length, length, device="cpu")
            actual, expected = compiled(x, block_mask), model(x, block_mask)
            error = (actual - expected).abs().max().item()
            anew = programs.compiled - kernels
            kernels = programs.compiled
            print(f"length {length:4}: largest difference {error:.2e}, kernels compiled by attnc: {anew}")
            assert error < 1e-4
            assert place == 0 or anew == 0
    print(attnc.stats())


if __name__ == "__main__":
    main()
