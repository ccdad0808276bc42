"""What needs fresh processes: seconds of first calls, and the peak of memory.

As a program it measures in its own process and prints one JSON line:

    python -m attnc.bench.fresh first PEER NUMBER    seconds of the first calls of NUMBER different mods, torch being imported
    python -m attnc.bench.fresh memory PEER LENGTH   extra bytes at the peak of one call, beyond inputs and outputs
    python -m attnc.bench.fresh train PEER LENGTH    the same of forward and backward, beyond the inputs alone
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnc.bench.case import Case
from attnc.bench.peers import TITLES

PATIENCE_SECONDS = 600.0
MEMORY_LENGTH = 65536
TRAIN_MEMORY_PART = 4  # training is measured at this part of the length


@dataclass
class Figure:
    """One number with its spread: seconds or bytes of `values`, held against `must` and `aim` (at most)."""

    suite: str
    title: str
    peer: str
    values: list[float] = field(default_factory=list)
    status: str = "ok"
    must: float | None = None
    aim: float | None = None
    unit: str = "s"

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def met(self) -> bool | None:
        return None if self.must is None or not self.values else self.median <= self.must

    @property
    def reached(self) -> bool | None:
        return None if self.aim is None or not self.values else self.median <= self.aim


def compile_time(threads: int, repeats: int, peers: tuple[str, ...] | None, report: Callable[[str], None]) -> list[Figure]:
    """First calls with an empty cache and with a warm one, and new mods in a running process; all with Python's bytecode at
    hand, as an installed package has it."""
    import compileall

    from attnc.bench.driver import copy_tuning  # here, so that the measured process has not imported it

    compileall.compile_dir(Path(__file__).parent.parent, quiet=2)

    cold = Figure("compile", "first call, empty cache", "attnc", must=0.9, aim=0.6)
    warm = Figure("compile", "first call, warm disk cache", "attnc", must=0.12, aim=0.08)
    further = Figure("compile", "new mod in a running process, empty cache", "attnc", must=0.2, aim=0.1)
    for number in range(repeats):
        report(f"first calls of attnc, {number + 1} of {repeats}")
        with tempfile.TemporaryDirectory() as cache:
            copy_tuning(Path(cache))
            environment = {"ATTNC_CACHE_DIR": cache}
            calls = _measured(cold, ["first", "attnc", str(len(NEW_MODS))], threads, environment)
            again = _measured(warm, ["first", "attnc", "1"], threads, environment)
            cold.values += calls[:1]
            further.values += calls[1:]
            warm.values += again
    further.status = cold.status
    others = [Figure("compile", "first call", name) for name in ("compiled", "flex") if peers is None or name in peers]
    for figure in others:
        report(f"first call of {TITLES[figure.peer]}")
        with tempfile.TemporaryDirectory() as cache:
            figure.values = _measured(figure, ["first", figure.peer, "1"], threads, {"TORCHINDUCTOR_CACHE_DIR": cache})
    return [cold, warm, further, *others]


def peak_memory(threads: int, length: int, peers: tuple[str, ...] | None, report: Callable[[str], None]) -> list[Figure]:
    """Extra bytes of one call at a great length, one head of dim 64; and of forward and backward at a quarter of it."""
    case = Case(1, 1, length, 64)
    train = Case(1, 1, length // TRAIN_MEMORY_PART, 64, train=True)
    bounds = {
        "memory": (case, 3 * case.cache_bytes + threads * (8 << 20)),
        "train": (train, 12 * train.cache_bytes // 2),  # 12 times the bytes of the query
    }
    figures = []
    for kind, (measured, bound) in bounds.items():
        for peer in ("attnc", *(("sdpa",) if peers is None or "sdpa" in peers else ())):
            figure = Figure("memory", str(measured), peer, must=bound if peer == "attnc" else None, unit="B")
            report(f"memory of {TITLES[peer]}, {measured}")
            figure.values = _measured(figure, [kind, peer, str(measured.queries)], threads, {})
            figures.append(figure)
    return figures


def _measured(figure: Figure, arguments: list[str], threads: int, environment: dict[str, str]) -> list[float]:
    """What a fresh process measures; nothing, and the figure's status tells why, where it fails."""
    command = [sys.executable, "-W", "ignore", "-m", "attnc.bench.fresh", *arguments]
    environment = {**os.environ, **environment, "OMP_NUM_THREADS": str(threads)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=PATIENCE_SECONDS)
    except subprocess.CalledProcessError as error:
        figure.status = f"FAILED: {(error.stderr.strip().splitlines() or ['without a word'])[-1]}"[:300]
    except subprocess.TimeoutExpired:
        figure.status = f"no answer for {PATIENCE_SECONDS:.0f} s"
    else:
        return json.loads(done.stdout.splitlines()[-1])
    return []


# In the measured process.
def _alibi(torch: Any) -> Callable[..., Any]:
    slopes = torch.exp2(-torch.arange(1.0, 9.0))
    return lambda score, b, h, q, k: score + slopes[h] * (k - q)


def _bias(torch: Any) -> Callable[..., Any]:
    bias = torch.randn(2048)
    return lambda score, b, h, q, k: score + bias[q - k + 512]


NEW_MODS: tuple[Callable[[Any], Callable[..., Any]], ...] = (
    _alibi,
    lambda torch: lambda score, b, h, q, k: 20.0 * torch.tanh(score / 20.0),
    _bias,
    lambda torch: lambda score, b, h, q, k: torch.where((q - k).abs() < 64, score, score - 1.5),
    lambda torch: lambda score, b, h, q, k: score * torch.sigmoid(score) + 0.1 * torch.cos(q - k),
)


def _causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def first_calls(peer: str, number: int) -> list[float]:
    """Seconds of the first calls: the first includes all lazy imports, the others are new mods in a running process."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    query, key, value = (torch.randn(1, 8, 512, 64) for _ in range(3))
    torch.softmax(query @ key.transpose(2, 3), -1)  # torch's own threads run
    seconds = []
    for make in NEW_MODS[:number]:
        mod = make(torch)
        begin = time.perf_counter()
        if peer == "attnc":
            from attnc import flex_attention

            flex_attention(query, key, value, mod, mask_mod=_causal)
        else:
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            run = torch.compile(flex_attention, dynamic=False) if peer == "compiled" else flex_attention
            run(query, key, value, mod, create_block_mask(_causal, None, None, 512, 512, device="cpu"))
        seconds.append(time.perf_counter() - begin)
    return seconds


def extra_memory(peer: str, length: int) -> list[float]:
    """Bytes by which one call raises the peak of this process, less its output; what it compiles was compiled before."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    query, key, value = (torch.randn(1, 1, length, 64) for _ in range(3))
    attention: Callable[..., Any]
    if peer == "attnc":
        from attnc import flex_attention as attention
    else:
        from torch.nn.functional import scaled_dot_product_attention as attention
    short = [tensor[:, :, : min(512, length // 2)] for tensor in (query, key, value)]
    attention(*short)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    out = attention(query, key, value)
    return [max(0.0, float(status("VmHWM") - before - out.numel() * out.element_size()))]


def extra_training_memory(peer: str, length: int) -> list[float]:
    """Bytes by which forward and backward raise the peak of this process, gradients included."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    query, key, value = (torch.randn(1, 1, length, 64, requires_grad=True) for _ in range(3))
    grad_out = torch.randn(1, 1, length, 64)
    attention: Callable[..., Any]
    if peer == "attnc":
        from attnc import flex_attention as attention
    else:
        from torch.nn.functional import scaled_dot_product_attention as attention

    def step(rows: int) -> Any:
        leaves = [tensor[:, :, :rows] for tensor in (query, key, value)]
        return torch.autograd.grad(attention(*leaves), leaves, grad_out[:, :, :rows])

    step(min(512, length // 2))
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    _grads = step(length)
    return [max(0.0, float(status("VmHWM") - before))]


def status(name: str) -> int:
    """A figure of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


if __name__ == "__main__":
    measure = {"first": first_calls, "memory": extra_memory, "train": extra_training_memory}[sys.argv[1]]
    print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
