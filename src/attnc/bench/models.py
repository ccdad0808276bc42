"""Whole models: a Llama of random weights under attnc, sdpa and eager attention, and how much of its time is attention.

One case is one fresh process, in which the implementations take turns on the same weights and the same cache. As a program it
measures in its own process and prints one JSON line:

    python -m attnc.bench.models KIND LENGTH DTYPE IMPLEMENTATIONS TURNS SECONDS

KIND is prefill (LENGTH tokens at once, an empty cache) or decode (one token, LENGTH in a dynamic cache).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from attnc.bench.fresh import PATIENCE_SECONDS, Figure, status

SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 32768,
}
TINY = SHAPE | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
IMPLEMENTATIONS = ("attnc", "sdpa", "eager")
TOLERANCE = {"f32": 1e-3, "bf16": 0.1}
"""Largest difference from sdpa's logits, as a share of the largest logit."""
LONGEST_EAGER = 4096
"""eager keeps all scores of a prefill: at 16,384 these are 17 GB a layer."""


class ModelCase(NamedTuple):
    """One measurement. `faster`: how many times faster than sdpa's attnc's attention has to be."""

    kind: str
    length: int
    dtype: str
    faster: float | None = None
    long: bool = False

    def __str__(self) -> str:
        where = f"{self.length} tokens" if self.kind == "prefill" else f"a token, cache {self.length}"
        return f"Llama {self.kind} {self.dtype}, {where}"


def cases() -> list[ModelCase]:
    """Prefills and decoding steps, in f32 and bf16."""
    found = []
    for dtype, decode in (("f32", 4.0), ("bf16", 10.0)):
        found += [ModelCase("prefill", 1024, dtype), ModelCase("prefill", 4096, dtype, 1.2)]
        found += [ModelCase("prefill", 16384, dtype, long=True)]
        found += [
            ModelCase("decode", length, dtype, decode if length == 8192 else None) for length in (1024, 4096, 8192, 16384)
        ]
    return found


def figures(
    threads: int,
    turns: int,
    budget: float,
    report: Callable[[str], None],
    *,
    full: bool = False,
    quick: bool = False,
    only: str = "",
    peers: Sequence[str] | None = None,
) -> list[Figure]:
    """What the suite `models` shows. Without transformers: one figure, that says so."""
    if importlib.util.find_spec("transformers") is None:
        return [Figure("models", "Llama", "attnc", status="transformers is not installed")]
    chosen = [case for case in cases() if (full or not case.long) and only in str(case)]
    if quick:
        chosen = [ModelCase("prefill", 64, "f32"), ModelCase("decode", 64, "bf16")]
    found = []
    for case in chosen:
        report(f"models: {case}")
        wanted = [name for name in IMPLEMENTATIONS if name == "attnc" or peers is None or name in peers]
        if case.kind == "prefill" and case.length > LONGEST_EAGER and "eager" in wanted:
            wanted.remove("eager")
        found += of_case(case, measured(case, wanted, threads, turns, budget, tiny=quick), wanted)
    return found


def of_case(case: ModelCase, answer: dict[str, Any] | str, names: Sequence[str]) -> list[Figure]:
    """Time of the whole model, time in attention, tokens per second and memory of each implementation."""
    if isinstance(answer, str):
        return [Figure("models", str(case), name, status=answer) for name in names]
    found = []
    for name in names:
        one = answer[name]
        tokens = case.length if case.kind == "prefill" else 1
        attention = Figure("models", f"{case}: attention", name, one["attention"])
        if name == "attnc" and case.faster is not None and "sdpa" in names:
            attention.must = statistics.median(answer["sdpa"]["attention"]) / case.faster
        found += [
            Figure("models", f"{case}: model", name, one["whole"]),
            attention,
            Figure("models", f"{case}: speed", name, [tokens / seconds for seconds in one["whole"]], unit="tokens/s"),
            Figure("models", f"{case}: peak memory", name, [one["bytes"]], unit="B"),
        ]
        if one["difference"] > TOLERANCE[case.dtype]:
            for figure in found[-4:]:
                figure.values, figure.status = [], f"WRONG: logits differ by {one['difference']:.2g} of the largest"
    return found


def measured(
    case: ModelCase, names: Sequence[str], threads: int, turns: int, budget: float, tiny: bool = False
) -> dict[str, Any] | str:
    """What a fresh process measures; a word on why there is nothing, where it fails."""
    arguments = [case.kind, str(case.length), case.dtype, ",".join(names), str(turns), str(budget), *(["tiny"] if tiny else [])]
    command = [sys.executable, "-W", "ignore", "-m", "attnc.bench.models", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=PATIENCE_SECONDS)
    except subprocess.CalledProcessError as error:
        return f"FAILED: {(error.stderr.strip().splitlines() or ['without a word'])[-1]}"[:300]
    except subprocess.TimeoutExpired:
        return f"no answer for {PATIENCE_SECONDS:.0f} s"
    return json.loads(done.stdout.splitlines()[-1])


# -- in the measured process ------------------------------------------------------------------------------------------------
class AttentionTime:
    """Seconds spent in the attention functions of transformers, while it is open."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Count the calls of implementation `name`."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        from transformers.models.llama.modeling_llama import eager_attention_forward

        attention = ALL_ATTENTION_FUNCTIONS.get(name, eager_attention_forward)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            found = attention(*args, **kwargs)
            self.seconds += time.perf_counter() - begin
            return found

        ALL_ATTENTION_FUNCTIONS[name] = timed
        try:
            yield
        finally:
            del ALL_ATTENTION_FUNCTIONS[name]


def make_model(dtype: str, shape: dict[str, int] = SHAPE) -> Any:
    """The Llama, its weights random."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    import attnc.integrations.transformers  # noqa: F401 - registers "attnc"

    torch.manual_seed(0)
    config = LlamaConfig(**shape, initializer_range=0.05)  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_config(config, attn_implementation="attnc")
    return model.eval().to({"f32": torch.float32, "bf16": torch.bfloat16}[dtype])


def make_step(model: Any, kind: str, length: int) -> Callable[[], Any]:
    """A function that does one step and returns the last token's logits; the cache is afterwards as it was before."""
    import torch
    from transformers import DynamicCache

    config = model.config
    ids = torch.randint(config.vocab_size, (1, length if kind == "prefill" else 1))
    if kind == "prefill":
        return lambda: model(ids, logits_to_keep=1).logits
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        shape = 1, config.num_key_value_heads, length - 1, config.head_dim
        cache.update(torch.randn(shape).to(model.dtype), torch.randn(shape).to(model.dtype), layer)

    def step() -> Any:
        logits = model(ids, cache=cache).logits
        cache.crop(-1)
        return logits

    return step


def measure(
    kind: str, length: int, dtype: str, names: Sequence[str], turns: int, budget: float, shape: dict[str, int] = SHAPE
) -> dict[str, dict[str, Any]]:
    """Of each implementation: seconds of `whole` steps and of their `attention`, the `bytes` that a step adds to the peak of
    memory, and the logits' `difference` from sdpa's."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    model = make_model(dtype, shape)
    step = make_step(model, kind, length)
    answers: dict[str, dict[str, Any]] = {name: {"whole": [], "attention": []} for name in names}
    with torch.inference_mode():
        model.set_attn_implementation("sdpa")
        expected = step()
        seconds = 0.0
        for name in names:
            model.set_attn_implementation(name)
            step()  # compiles
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            before, begin = status("VmRSS"), time.perf_counter()
            logits = step()
            seconds += time.perf_counter() - begin
            answers[name]["bytes"] = max(0, status("VmHWM") - before)
            answers[name]["difference"] = float((logits - expected).abs().max() / expected.abs().max())
        for _ in range(max(3, min(turns, int(budget * len(names) / max(seconds, 1e-6))))):
            for name in names:
                model.set_attn_implementation(name)
                clock = AttentionTime()
                with clock.of(name):
                    begin = time.perf_counter()
                    step()
                    answers[name]["whole"].append(time.perf_counter() - begin)
                answers[name]["attention"].append(clock.seconds)
    return answers


if __name__ == "__main__":
    _kind, _length, _dtype, _names, _turns, _budget, *_tiny = sys.argv[1:]
    _shape = TINY if _tiny else SHAPE
    print(json.dumps(measure(_kind, int(_length), _dtype, _names.split(","), int(_turns), float(_budget), _shape)))
