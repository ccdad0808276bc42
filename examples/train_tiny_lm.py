"""Train a small character-level language model on the CPU, its attention with a learnable relative bias.

    python examples/train_tiny_lm.py                  # 300 steps, a sample, and the curve of the loss as train_tiny_lm.png
    python examples/train_tiny_lm.py --check          # beside it the same model on dense attention: the losses step for step

torch's own flex_attention refuses gradients on the CPU. Here score_mod reads a table of parameters, and each step updates it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from attnc import flex_attention

TEXT = Path(__file__).with_name("tiny_lm.txt")
CONTEXT, WIDTH, HEADS, LAYERS = 128, 64, 4, 2
TOLERANCE = 2e-3


class Attention(nn.Module):
    """Causal attention whose scores get `bias[head, distance]`, by attnc or written out with dense matrices."""

    def __init__(self, dense: bool):
        super().__init__()
        self.dense = dense
        self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.join = nn.Linear(WIDTH, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(HEADS, CONTEXT))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        out = self.dense_attention(query, key, value) if self.dense else self.fused_attention(query, key, value)
        return self.join(out.transpose(1, 2).flatten(2))

    def fused_attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        def relative_bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score + self.bias[h, q - k]

        return flex_attention(query, key, value, relative_bias, mask_mod=lambda b, h, q, k: q >= k)

    def dense_attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        position = torch.arange(query.shape[2])
        distance = position[:, None] - position
        scores = query @ key.mT / query.shape[-1] ** 0.5 + self.bias[:, distance.clamp(min=0)]
        return scores.masked_fill(distance < 0, -torch.inf).softmax(-1) @ value


class Model(nn.Module):
    """Characters in, logits of the next character out."""

    def __init__(self, characters: int, dense: bool):
        super().__init__()
        self.embed = nn.Embedding(characters, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.LayerNorm(WIDTH),
                    Attention(dense),
                    nn.LayerNorm(WIDTH),
                    nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)),
                ]
            )
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for norm, attention, second_norm, feed_forward in self.layers:  # type: ignore[misc]
            x = x + attention(norm(x))
            x = x + feed_forward(second_norm(x))
        return self.head(self.norm(x))


class Training:
    """A model, its optimiser, and the losses so far."""

    def __init__(self, characters: int, dense: bool, seed: int):
        torch.manual_seed(seed)
        self.model = Model(characters, dense)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.01)
        self.losses: list[float] = []

    def step(self, tokens: Tensor) -> float:
        """One step on [batch, CONTEXT + 1] characters; its loss."""
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        self.losses.append(loss.item())
        return loss.item()


@torch.no_grad()
def sample(model: nn.Module, characters: str, prompt: str, length: int) -> str:
    """`prompt`, continued by `length` characters."""
    tokens = [characters.index(character) for character in prompt]
    for _ in range(length):
        logits = model(torch.tensor(tokens[-CONTEXT:])[None])[0, -1]
        tokens.append(int(torch.multinomial((logits / 0.7).softmax(-1), 1)))
    return "".join(characters[token] for token in tokens)


def draw(losses: dict[str, list[float]], path: Path) -> None:
    """The curves of the losses as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (name, values), style in zip(losses.items(), ("-", "--"), strict=False):
        axes.plot(values, style, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy, nats a character")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="train the same model on dense attention, too, and compare")
    parser.add_argument("--plot", type=Path, default=Path("train_tiny_lm.png"), help="where the curve goes")
    options = parser.parse_args()

    text = TEXT.read_text()
    characters = "".join(sorted(set(text)))
    data = torch.tensor([characters.index(character) for character in text])
    generator = torch.Generator().manual_seed(options.seed)
    trainings = {"attnc": Training(len(characters), False, options.seed)}
    if options.check:
        trainings["dense"] = Training(len(characters), True, options.seed)

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    begin = time.perf_counter()
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=options.steps)
        for _ in range(options.steps):
            places = torch.randint(len(data) - CONTEXT - 1, (options.batch,), generator=generator)
            tokens = torch.stack([data[place : place + CONTEXT + 1] for place in places.tolist()])
            for training in trainings.values():
                training.step(tokens)
            loss = trainings["attnc"].losses[-1]
            progress.update(task, advance=1, description=f"loss {loss:.3f}")
    seconds = time.perf_counter() - begin

    losses = {name: training.losses for name, training in trainings.items()}
    draw(losses, options.plot)
    first, last = losses["attnc"][0], losses["attnc"][-1]
    print(f"{options.steps} steps in {seconds:.1f} s; loss {first:.3f} → {last:.3f}; curve in {options.plot}")
    print(sample(trainings["attnc"].model, characters, "The river ", 200))
    if options.check:
        worst = max(abs(ours - theirs) for ours, theirs in zip(losses["attnc"], losses["dense"], strict=True))
        verdict = "equal" if worst <= TOLERANCE else "DIFFERENT"
        print(
            f"--check: largest difference of a step's loss to dense attention {worst:.1e} (tolerance {TOLERANCE:g}): {verdict}"
        )
        return int(worst > TOLERANCE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
