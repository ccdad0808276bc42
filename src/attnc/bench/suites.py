"""The rows of each suite, and what is demanded of them. Unless said: batch 1, 8 heads, head dim 64, f32."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from attnc.bench.case import Case, shrunk

TORCH = ("sdpa",)
PLAIN = ("sdpa", "onnxruntime", "openvino")
WITH_COMPILERS = (*PLAIN, "compiled", "iree")
FLEX = ("compiled", "sdpa")


@dataclass(frozen=True)
class Bound:
    """A demand on attnc's median. `must` has to hold, `aim` is where it should go.

    faster: time of `against` (a peer or one of the row's own companions) / own time, at least
    best: the same against the fastest peer
    slower: own time / time of `against`, at most
    peak: share of the FMA peak, at least
    seconds: own time in seconds, at most
    read: share of min(read bandwidth, what 0.6 of the FMA peak lets through), at least
    """

    kind: Literal["faster", "best", "slower", "seconds", "peak", "read"]
    against: str = ""
    must: float | None = None
    aim: float | None = None


@dataclass(frozen=True)
class Row:
    """One line of a table. `companions` are attnc itself on other cases, (label, case, threads or 0 for the run's own)."""

    title: str
    case: Case
    peers: tuple[str, ...] = TORCH
    bounds: tuple[Bound, ...] = ()
    companions: tuple[tuple[str, Case, int], ...] = ()
    long: bool = False

    @property
    def by_bytes(self) -> bool:
        """Whether memory bandwidth is the limit that counts: few queries."""
        return self.case.queries <= 16 and self.case.keys > self.case.queries


def dense(queries: int, dim: int = 64, dtype: str = "f32", heads: int = 8, batch: int = 1, **more) -> Case:
    return Case(batch, heads, queries, dim, dtype, **more)


def prefill() -> list[Row]:
    main, wide = dense(4096), dense(2048, 128)
    must = (Bound("faster", "sdpa", 1.25), Bound("best", "", 1.05), Bound("peak", "", None, 0.80))
    must_wide = (Bound("faster", "sdpa", 1.10), Bound("best", "", 1.05), Bound("peak", "", None, 0.85))
    rows = [Row("prefill", main, (*PLAIN, "compiled"), must), Row("prefill", wide, WITH_COMPILERS, must_wide)]
    for base in (main, wide):
        for dtype in ("f16", "bf16"):
            half = (Bound("faster", "sdpa", 1.15), Bound("faster", "own f32", None, 0.95))
            case = dataclasses.replace(base, dtype=dtype)
            rows.append(Row("prefill", case, ("sdpa", "openvino"), half, (("own f32", base, 0),)))
    threads = (Bound("faster", "own, 1 thread", 1.8, 1.95),)
    rows.append(Row("2 threads / 1", dense(2048), TORCH, threads, (("own, 1 thread", dense(2048), 1),)))
    rows += [Row("head dim", dense(2048, 96), PLAIN), Row("head dim", dense(1024, 256), PLAIN)]
    rows += [Row("length", dense(length), PLAIN) for length in (512, 1024)]
    rows += [
        Row("length", dense(8192, heads=4), ("sdpa", "onnxruntime")),
        Row("length", dense(16384, heads=1), ("sdpa", "onnxruntime")),
        Row("length", dense(16384), TORCH, long=True),
        Row("one head", dense(4096, heads=1), PLAIN),
        Row("many heads", dense(512, heads=16, batch=16), PLAIN),
        Row("BSHD", dense(2048, layout="bshd"), ("sdpa", "onnxruntime")),
        Row("BSHD", dense(2048, 128, "bf16", layout="bshd")),
        Row("SDXL self", dense(4096, heads=10, batch=2), ("sdpa", "onnxruntime")),
        Row("SDXL self", dense(1024, heads=20, batch=2), PLAIN),
        Row("SDXL cross", dense(4096, heads=10, batch=2, keys=77), PLAIN),
        Row("SDXL cross", dense(1024, heads=20, batch=2, keys=77), PLAIN),
        Row("SDXL cross", dense(4096, heads=10, batch=2, keys=64), TORCH),
    ]
    return rows


def mods() -> list[Row]:
    base = dense(2048)
    bounds = (Bound("faster", "compiled", 2.5), Bound("slower", "own dense", 1.25, 1.1))
    rows = [
        Row(title, dataclasses.replace(base, mod=mod), ("compiled", "flex", "sdpa"), bounds, (("own dense", base, 0),))
        for title, mod in (("ALiBi", "alibi"), ("relative bias", "relative_bias"), ("soft cap", "soft_cap"))
    ]
    wide = dense(2048, 128, "bf16")
    own = (Bound("slower", "own dense", 1.25, 1.1),)
    rows += [
        Row("ALiBi", dataclasses.replace(wide, mod="alibi"), (), own, (("own dense", wide, 0),)),
        Row("soft cap", dataclasses.replace(wide, mod="soft_cap"), (), own, (("own dense", wide, 0),)),
        Row("ALiBi causal", dataclasses.replace(base, mod="alibi", mask="causal"), FLEX, (Bound("faster", "compiled", 2.5),)),
        Row("soft cap causal", dense(8192, 128, mod="soft_cap", mask="causal"), FLEX, long=True),
    ]
    return rows


def masks() -> list[Row]:
    long_base = dense(4096)
    window = dense(8192, mask="window", size=512)
    documents = dense(8192, mask="documents", size=16)
    own_dense = (("own dense", long_base, 0),)
    return [
        Row(
            "causal",
            dataclasses.replace(long_base, mask="causal"),
            (*PLAIN, "compiled"),
            (Bound("faster", "sdpa", 1.3), Bound("slower", "own dense", None, 0.53)),
            own_dense,
        ),
        Row(
            "sliding window",
            window,
            FLEX,
            (Bound("faster", "compiled", 4.0), Bound("slower", "own, half the length", None, 2.15)),
            (("own, half the length", dataclasses.replace(window, queries=4096, keys=4096), 0),),
        ),
        Row(
            "documents",
            documents,
            FLEX,
            # The live pairs of 16 documents against those of 8: what they cost should be in the same ratio.
            (Bound("faster", "compiled", 3.0), Bound("slower", "own, a pair's share of 8 documents", None, 1.15)),
            (("own, a pair's share of 8 documents", dataclasses.replace(documents, size=8), 0),),
        ),
        Row("prefix", dense(4096, mask="prefix", size=1024), FLEX, (), own_dense),
        Row("neighbourhood", dense(4096, mask="neighbourhood", size=6), FLEX, (), own_dense),
        Row("causal", dense(2048, 128, "bf16", mask="causal"), TORCH, (), (("own dense", dense(2048, 128, "bf16"), 0),)),
        Row("sliding window", dense(65536, mask="window", size=512), (), long=True),
    ]


def decode() -> list[Row]:
    def cached(keys: int, kv_heads: int = 8, dtype: str = "f32", queries: int = 1, batch: int = 1, heads: int = 32) -> Case:
        return Case(batch, heads, queries, 128, dtype, keys=keys, kv_heads=kv_heads)

    share = Bound("read", "", 0.75, 0.90)
    rows = [
        Row("decode", cached(8192), ("sdpa", "onnxruntime", "compiled"), (share, Bound("faster", "sdpa", 4.0))),
        Row("decode", cached(8192, dtype="bf16"), TORCH, (share, Bound("faster", "sdpa", 12.0))),
        Row("decode", cached(8192, dtype="f16"), ("sdpa", "onnxruntime"), (share,)),
    ]
    rows += [Row("decode", cached(8192, kv_heads), ("sdpa", "onnxruntime"), (share,)) for kv_heads in (32, 4, 1)]
    rows += [Row("decode", cached(keys), ("sdpa", "onnxruntime"), (share,)) for keys in (2048, 32768)]
    rows += [Row("decode", cached(131072, dtype="bf16"), TORCH, (share,))]
    rows += [Row("queries", cached(8192, queries=queries, dtype=d), TORCH) for queries, d in ((2, "f32"), (4, "bf16"))]
    rows += [Row("queries", cached(8192, queries=16, dtype=d), TORCH) for d in ("f32", "bf16")]
    rows += [
        Row("batch", cached(2048, batch=8), ("sdpa", "onnxruntime"), (share,)),
        Row("batch", cached(2048, batch=64, dtype="bf16"), TORCH, (share,)),
        Row("batch", cached(8192, batch=64), TORCH, (share,), long=True),
        Row("MHA D 64", Case(1, 8, 1, 64, keys=8192), PLAIN, (share,)),
        Row("decode", cached(131072), ("sdpa", "onnxruntime"), (share,), long=True),
    ]
    return rows


def small() -> list[Row]:
    bound = (Bound("faster", "sdpa", 0.98, 1.3),)
    shapes = ((1, 8, 32), (1, 12, 197), (4, 12, 512))
    rows = [Row("small", dense(length, heads=heads, batch=batch), (*PLAIN, "flex"), bound) for batch, heads, length in shapes]
    rows += [
        Row("one call", dense(16, 16, heads=1), (*PLAIN, "flex")),
        Row("small causal", dense(128, 16, heads=2, mask="causal"), ("sdpa", "flex")),
        Row("small ALiBi", dense(128, 16, heads=2, mod="alibi"), ("sdpa", "flex")),
        Row("small bf16", dense(197, dtype="bf16", heads=12), TORCH),
    ]
    return rows


def train() -> list[Row]:
    base = dense(2048, train=True)
    wide, causal = dataclasses.replace(base, dim=128), dataclasses.replace(base, mask="causal")
    peak = Bound("peak", "", None, 0.75)
    return [
        Row("train", base, TORCH, (Bound("faster", "sdpa", 1.3), peak)),
        Row("train", wide, TORCH, (Bound("faster", "sdpa", 1.1), peak)),
        Row("train causal", causal, TORCH, (Bound("faster", "sdpa", 1.5),)),
        Row(
            "train ALiBi",
            dataclasses.replace(base, mod="alibi"),
            (),
            (Bound("slower", "own dense", 1.4),),
            (("own dense", base, 0),),
        ),
        Row("train", dataclasses.replace(base, dtype="bf16"), TORCH, (Bound("faster", "sdpa", 1.1),)),
        Row("train relative bias", dataclasses.replace(base, mod="relative_bias"), (), (), (("own dense", base, 0),)),
        Row("train", dense(8192, heads=2, train=True), TORCH, long=True),
    ]


TIMED = {"prefill": prefill, "mods": mods, "masks": masks, "decode": decode, "small": small, "train": train}
SUITES = (*TIMED, "models", "compile", "memory")


def rows_of(suite: str, *, full: bool = False, quick: bool = False) -> list[Row]:
    """The rows of a timed suite: without the long ones unless `full`; `quick` shrinks them, and demands nothing."""
    rows = [row for row in TIMED[suite]() if full or not row.long]
    return [_shrunk(row, first=number == 0) for number, row in enumerate(rows[:4])] if quick else rows


def _shrunk(row: Row, first: bool) -> Row:
    companions = tuple((label, shrunk(case), threads) for label, case, threads in row.companions)
    peers = tuple(peer for peer in row.peers if first or peer != "compiled")  # its first call takes half a minute
    return dataclasses.replace(row, case=shrunk(row.case), peers=peers, bounds=(), companions=companions)
