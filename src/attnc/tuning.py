"""The search for tile sizes that are faster on this machine than those of the model (`attnc bench --tune`).

    best = tuning.tune(tuning.ShapeClass(head_dim=64, value_dim=64))     # None: the model's own are as good
    tuning.store([best])

Each candidate is compiled and timed on one thread, turn by turn with the others; the slow ones drop out round by round, and the
best one must then beat the model's in a duel. What is stored becomes part of the target record (`attnc.target`): kernels
compiled from then on use it, knobs still override it, and it depends on no thread count.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from attnc import knobs
from attnc.analysis.machine import few_query_tile_sizes, register_tile, tile_sizes
from attnc.errors import DtypeError, TuningError
from attnc.runtime import tuning_file
from attnc.runtime.tuning_file import TunedTile
from attnc.target import Target

ROUNDS = 7
KEPT_WITHIN = 1.1
"""After each round, candidates slower than the best by more than this drop out."""
WORTHWHILE = 0.97
"""Other sizes than the model's must take at most this share of its time."""
ROWS, KEYS, CHUNKS = (48, 96, 144, 192), (64, 128, 256, 512), (4, 8, 16)

Measure = Callable[[TunedTile], float]
Report = Callable[[str], None]


@dataclass(frozen=True)
class ShapeClass:
    """What tile sizes depend on: head dims, dtype (`f64`, `f32`, `f16`, `bf16`: the last three are computed in f32 and share
    their sizes), and whether queries are few."""

    head_dim: int
    value_dim: int
    dtype: str = "f32"
    few_queries: bool = False

    @property
    def element_bits(self) -> int:
        return 64 if self.dtype == "f64" else 32


def candidates(target: Target, shape: ShapeClass) -> list[TunedTile]:
    """The sizes to try, those of the model first."""
    plain = replace(target, tuned=())
    bits = shape.element_bits
    strip, _ = register_tile(target, bits)
    sizes = plain, shape.head_dim, shape.value_dim, bits

    def tile(rows: int, keys: int, chunk: int = 0) -> TunedTile:
        return TunedTile(shape.head_dim, shape.value_dim, bits, shape.few_queries, rows, keys, chunk)

    if shape.few_queries:
        rows, keys, chunk = few_query_tile_sizes(*sizes)
        others = [tile(rows, k, k * blocks) for k in KEYS for blocks in CHUNKS]
        return list(dict.fromkeys([tile(rows, keys, chunk), *others]))
    others = [tile(strip * max(1, round(rows / strip)), keys) for rows in ROWS for keys in KEYS]
    return list(dict.fromkeys([tile(*tile_sizes(*sizes)), *others]))


def search(
    tiles: Sequence[TunedTile], measure: Measure, rounds: int = ROUNDS, report: Report | None = None
) -> TunedTile | None:
    """The fastest of `tiles` by the median of `measure` (seconds), or None if the first one, the model's, is as good.

    Round by round, so that a slow moment of the machine meets all; the first one always stays in.
    """
    first = tiles[0]
    times: dict[TunedTile, list[float]] = {tile: [] for tile in tiles}
    running = list(tiles)
    for _ in range(rounds):
        for tile in running:
            times[tile].append(measure(tile))
        median = {tile: statistics.median(times[tile]) for tile in running}
        limit = KEPT_WITHIN * min(median.values())
        running = [tile for tile in running if tile is first or median[tile] <= limit]
    median = {tile: statistics.median(times[tile]) for tile in running}
    best = min(running, key=lambda tile: median[tile])
    if report is not None:
        for tile, taken in times.items():
            note = " (the model's)" if tile is first else ""
            chunk = f" chunk {tile.chunk}" if tile.chunk else ""
            report(f"rows {tile.rows:4} keys {tile.keys:4}{chunk}: {1e3 * statistics.median(taken):8.3f} ms{note}")
    return best if best is not first and _is_faster(best, first, measure, rounds) else None


def _is_faster(tile: TunedTile, first: TunedTile, measure: Measure, rounds: int) -> bool:
    """A duel of the two: `tile` must win by median and by its best time, for the least of many noisy times is often luck."""
    pairs = [(measure(tile), measure(first)) for _ in range(2 * rounds + 1)]
    mine, others = zip(*pairs, strict=True)
    return all(of(mine) <= WORTHWHILE * of(others) for of in (statistics.median, min))


def tune(shape: ShapeClass, rounds: int = ROUNDS, report: Report | None = None) -> TunedTile | None:
    """Search on this machine, in this process: about ten seconds. None where the model's sizes are as good.

    Raises `TuningError` where a knob fixes the sizes, `TorchMissingError` without torch.
    """
    for knob in (knobs.tile_rows, knobs.tile_keys, knobs.tile_chunk):
        if knob() is not None:
            raise TuningError(f"{knob.name} fixes a tile size", remedy=f"unset {knob.name}")
    target = Target.host()
    with _one_thread():
        trial = Trial(target, shape)
        return search(candidates(target, shape), trial.measure, rounds, report)


def store(tiles: Sequence[TunedTile]) -> str:
    """Keep `tiles` for this machine, beside what is stored for other shapes; the file's path. Raises `TuningError`."""
    machine = Target.host().machine
    kept = {tile.shape: tile for tile in (*tuning_file.read(machine), *tiles)}
    return str(tuning_file.write(machine, list(kept.values())))


def forget() -> None:
    """Drop all that is stored for this machine. Raises `TuningError`."""
    tuning_file.write(Target.host().machine, ())


class Trial:
    """Attention without a mod on random inputs of one class of shapes, compiled with the sizes it is asked for."""

    def __init__(self, target: Target, shape: ShapeClass):
        import torch

        dtypes = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
        if shape.dtype not in dtypes:
            raise DtypeError(f"there is no attention in {shape.dtype!r}")
        self.target = target
        self.compiled: dict[TunedTile, Callable[[], object]] = {}
        generator = torch.Generator().manual_seed(0)

        def random(heads: int, length: int, columns: int) -> torch.Tensor:
            return torch.randn(1, heads, length, columns, generator=generator).to(dtypes[shape.dtype])

        queries, keys, heads = (1, 8192, 8) if shape.few_queries else (768, 2048, 2)
        self.query = random(heads, queries, shape.head_dim)
        self.key, self.value = random(2, keys, shape.head_dim), random(2, keys, shape.value_dim)

    def measure(self, tile: TunedTile) -> float:
        """Seconds of one call; the first call of a program is made before, and not counted."""
        run = self.compiled.get(tile)
        if run is None:
            run = self.compiled[tile] = self._compile(tile)
            run()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def _compile(self, tile: TunedTile) -> Callable[[], object]:
        from attnc import flex, pipeline
        from attnc.capture.to_torch import to_torch
        from attnc.lowered import CompiledAttention, Defaults
        from attnc.runtime.abi import KernelRecord
        from attnc.runtime.attention import Attention

        call = flex.checked_call(self.query, self.key, self.value, None, None, None, True, False, None, None, None)
        module = to_torch(call.record, call.signature)
        objects, record = pipeline.compile_module(module, replace(self.target, tuned=(tile,)))
        attention = Attention(KernelRecord.from_json(record), objects)

        def locate(_: object) -> Exception:
            raise AssertionError("attention without a mod indexes nothing")

        compiled = CompiledAttention(attention, Defaults(call.scale), locate)  # type: ignore[arg-type]
        return lambda: compiled(self.query, self.key, self.value)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = os.environ.get(knobs.threads.name)
    os.environ[knobs.threads.name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[knobs.threads.name]
        else:
            os.environ[knobs.threads.name] = before
