"""`attnc demo`: a handful of mods at real sizes, their errors and times beside torch's."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from attnc.errors import TorchMissingError


@dataclass
class Case:
    """One line of the table. `bias` gives SDPA's attn_mask for [B, H, Sq, Skv] positions, where SDPA can express the mod."""

    name: str
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    causal: bool = False
    sdpa: bool = True
    dtype: str = "float32"
    kv_heads: int | None = None


@dataclass
class Row:
    """What was measured: errors are the largest absolute difference from f64, times are seconds."""

    case: Case
    error: float
    torch_error: float
    first: float
    time: float
    eager: float
    sdpa: float | None


def _multiple_of_4(context: click.Context, parameter: click.Parameter, heads: int) -> int:
    if heads % 4:
        raise click.BadParameter(f"{heads} is no multiple of 4: one row shares a key/value head among 4 query heads")
    return heads


@click.command()
@click.option("--length", type=click.IntRange(min=1), default=2048, show_default=True, help="Queries and keys.")
@click.option(
    "--heads",
    type=click.IntRange(min=4),
    default=8,
    callback=_multiple_of_4,
    show_default=True,
    help="Query heads (a multiple of 4).",
)
@click.option("--head-dim", type=click.IntRange(min=1), default=64, show_default=True, help="Elements of a head.")
@click.option("--seconds", type=click.FloatRange(min=0), default=0.5, show_default=True, help="How long each one is timed.")
def demo(length: int, heads: int, head_dim: int, seconds: float) -> None:
    """Compile and run a handful of mods, and compare them with f64 and with torch."""
    try:
        import torch
    except ImportError as error:
        raise TorchMissingError("the demo compares with torch, which is not installed") from error
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    cases = make_cases(length, heads)
    console.print(
        f"attnc beside torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"query, key, value [1, {heads}, {length}, {head_dim}]",
        highlight=False,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows = []
    with Progress(*columns, console=console, transient=True) as progress, torch.no_grad():
        task = progress.add_task("", total=len(cases) * 4)

        def step(case: Case, what: str) -> None:
            progress.update(task, description=f"{case.name}: {what}", advance=1 if what != "compile" else 0)

        for case in cases:
            rows.append(measure(case, length, heads, head_dim, seconds, lambda what, case=case: step(case, what)))
            progress.update(task, advance=1)
    console.print(table_of(rows))
    console.print(
        "error: largest absolute difference from the same formula in f64. "
        "first: capture, compile (or load from disk) and run; in the first row also the import of the compiler's modules, "
        "once a process. eager: torch's flex_attention as it runs without torch.compile. SDPA: torch's "
        "scaled_dot_product_attention with the mask or bias as a tensor; — where it cannot say the same.",
        style="dim",
        highlight=False,
    )


def make_cases(length: int, heads: int) -> list[Case]:
    """The mods, as a user writes them."""
    import torch

    slopes = torch.exp2(-8.0 * torch.arange(1, heads + 1) / heads)
    documents = torch.arange(length, dtype=torch.int32) // max(length // 5, 1)
    bias = torch.randn(2 * length, generator=torch.Generator().manual_seed(1))
    window = max(length // 8, 1)

    def causal(b, h, q, k):
        return q >= k

    def alibi(score, b, h, q, k):
        return score + slopes[h] * (k - q)

    def soft_cap(score, b, h, q, k):
        return 20.0 * torch.tanh(score / 20.0)

    def relative_bias(score, b, h, q, k):
        return score + bias[q - k + length]

    def sliding_window(b, h, q, k):
        return (q >= k) & (q - k < window)

    def packed_documents(b, h, q, k):
        return (documents[q] == documents[k]) & (q >= k)

    return [
        Case("dense"),
        Case("causal", mask_mod=causal, causal=True),
        Case("ALiBi + causal", alibi, causal),
        Case("soft cap", soft_cap, sdpa=False),
        Case("relative bias", relative_bias),
        Case(f"sliding window {window}", mask_mod=sliding_window),
        Case("packed documents", mask_mod=packed_documents),
        Case("causal, GQA 4, bfloat16", mask_mod=causal, causal=True, dtype="bfloat16", kv_heads=max(heads // 4, 1)),
    ]


def measure(case: Case, length: int, heads: int, head_dim: int, seconds: float, step: Callable[[str], None]) -> Row:
    """Run one case by attnc, torch's flex_attention and SDPA."""
    import torch
    from torch.nn.attention import flex_attention as torch_flex

    import attnc

    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, case.dtype)
    kv_heads = case.kv_heads or heads
    query, key, value = (
        torch.randn(1, count, length, head_dim, generator=generator).to(dtype) for count in (heads, kv_heads, kv_heads)
    )
    grouped = kv_heads != heads
    step("compile")
    options = {"score_mod": case.score_mod, "mask_mod": case.mask_mod, "enable_gqa": grouped}
    begin = time.perf_counter()
    out = attnc.flex_attention(query, key, value, **options)
    first = time.perf_counter() - begin
    own = median_time(lambda: attnc.flex_attention(query, key, value, **options), seconds)
    step("f64")
    expected = reference(query, key, value, case)
    step("torch eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mask = None
        if case.mask_mod is not None:
            mask = torch_flex.create_block_mask(case.mask_mod, 1, heads, length, length, device="cpu")

        def run_eager():
            return torch_flex.flex_attention(query, key, value, case.score_mod, mask, enable_gqa=grouped)

        eager_out = run_eager()
        eager = median_time(run_eager, seconds)
    step("SDPA")
    sdpa = None
    if case.sdpa:
        keywords: dict[str, Any] = {"is_causal": case.causal, "enable_gqa": grouped}
        if not case.causal and (case.score_mod or case.mask_mod):
            keywords = {"attn_mask": dense_bias(case, heads, length).to(dtype), "enable_gqa": grouped}
        attention = torch.nn.functional.scaled_dot_product_attention
        sdpa = median_time(lambda: attention(query, key, value, **keywords), seconds)

    def error(result) -> float:
        return (result.double() - expected).abs().max().item()

    return Row(case, error(out), error(eager_out), first, own, eager, sdpa)


def reference(query, key, value, case: Case):
    """The formula in f64, head by head."""
    import torch

    length, heads = query.shape[2], query.shape[1]
    ratio = heads // key.shape[1]
    out = torch.empty(1, heads, length, value.shape[3], dtype=torch.float64)
    for head in range(heads):
        scores = query[0, head].double() @ key[0, head // ratio].double().T * query.shape[3] ** -0.5
        positions = _positions(head, length)
        if case.score_mod is not None:
            scores = case.score_mod(scores, *positions).double()
        if case.mask_mod is not None:
            scores = scores.masked_fill(~case.mask_mod(*positions), -torch.inf)
        out[0, head] = torch.softmax(scores, -1) @ value[0, head // ratio].double()
    return out


def dense_bias(case: Case, heads: int, length: int):
    """What SDPA is given as attn_mask: [1, H, Sq, Skv], or [1, 1, Sq, Skv] where heads do not differ."""
    import torch

    rows = []
    for head in range(heads if case.score_mod is not None else 1):
        positions = _positions(head, length)
        bias = torch.zeros(length, length)
        if case.score_mod is not None:
            bias = case.score_mod(bias, *positions)
        if case.mask_mod is not None:
            bias = bias.masked_fill(~case.mask_mod(*positions), -torch.inf)
        rows.append(bias)
    return torch.stack(rows)[None]


def _positions(head: int, length: int):
    import torch

    index = torch.arange(length, dtype=torch.int32)
    return torch.tensor(0, dtype=torch.int32), torch.tensor(head, dtype=torch.int32), index[:, None], index[None, :]


def median_time(call: Callable[[], Any], seconds: float) -> float:
    """The median time of a call, of at least three."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def table_of(rows: list[Row]):
    """The rows as a table to print."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("mod", no_wrap=True)
    for name in ("error", "torch's", "first", "attnc", "eager", "SDPA", "eager / attnc", "SDPA / attnc"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.case.name,
            f"{row.error:.1e}",
            f"{row.torch_error:.1e}",
            f"{row.first * 1e3:.0f} ms",
            f"{row.time * 1e3:.1f} ms",
            f"{row.eager * 1e3:.1f} ms",
            "—" if row.sdpa is None else f"{row.sdpa * 1e3:.1f} ms",
            f"{row.eager / row.time:.1f}×",
            "—" if row.sdpa is None else f"{row.sdpa / row.time:.1f}×",
        )
    return table
