"""The bench measures what it says: right references, checks that can fail, bounds judged rightly. No clock is judged."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attnc import flex_attention
from attnc.bench import case as cases
from attnc.bench import fresh, limits, pace, peers, plot, problem, report, run, session, suites, training
from attnc.bench.case import Case
from attnc.bench.driver import Peer, PeerFailed, Peers
from attnc.bench.peers import Prepared, Unsupported, attnc_flex
from attnc.bench.run import Options, Result, Timing
from attnc.bench.suites import Bound, Row
from attnc.bench.worker import Worker
from attnc.codegen.llvm.compile import to_assembly
from attnc.runtime import tuning_file
from attnc.runtime.tuning_file import TunedTile
from attnc.target import Target

TINY = Case(1, 2, 48, 16)
KINDS = [
    TINY,
    Case(2, 4, 40, 16, "bf16", keys=72, kv_heads=2),
    Case(1, 2, 40, 16, "f16", layout="bshd"),
    *(replace(TINY, mod=mod) for mod in cases.MODS[1:]),
    *(Case(1, 2, 49, 16, mask=mask, size=3) for mask in cases.MASKS[1:]),
]
QUICK = Options(threads=1, turns=3, budget=0.01)
X86 = Target("x86_64-unknown-linux-gnu", "znver3", "+avx2,+fma", 256, 16)
WIDE = replace(X86, cpu="skylake-avx512", features="+avx512f,+avx512vl,+avx512dq,+avx512bw", vector_bits=512, registers=32)


# -- cases and references -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_a_case_travels_as_json(case: Case):
    assert Case(**json.loads(json.dumps(case.to_json()))) == case


def test_the_same_case_gives_the_same_numbers():
    first, second = problem.make(TINY), problem.make(TINY)
    assert torch.equal(first.query, second.query) and torch.equal(first.value, second.value)


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_attnc_is_right_on_every_kind(case: Case):
    posed = problem.make(case)
    out = flex_attention(posed.query, posed.key, posed.value, posed.score_mod, enable_gqa=True, mask_mod=posed.mask_mod)
    expected = problem.reference(posed)
    assert problem.error_of(out, expected, posed) <= expected.bound


def test_the_reference_is_that_of_torch():
    posed = problem.make(Case(1, 4, 24, 16, "f64", kv_heads=2))
    theirs = torch.nn.functional.scaled_dot_product_attention(posed.query, posed.key, posed.value, enable_gqa=True)
    assert torch.allclose(problem.reference(posed).out, theirs, atol=1e-12)


@pytest.mark.parametrize("case", [case for case in KINDS if case.mask or case.mod == "alibi"], ids=str)
def test_a_dense_bias_says_what_the_mods_say(case: Case):
    posed = problem.make(case)
    bias = problem.dense_bias(posed)
    out = torch.nn.functional.scaled_dot_product_attention(posed.query, posed.key, posed.value, bias)
    expected = problem.reference(posed)
    assert problem.error_of(out, expected, posed) <= 4 * expected.bound


def test_live_pairs():
    assert problem.live_pairs(problem.make(Case(1, 1, 10, 8))) == 100
    assert problem.live_pairs(problem.make(Case(1, 1, 10, 8, mask="causal"))) == 55
    assert problem.live_pairs(problem.make(Case(1, 1, 10, 8, mask="window", size=1))) == 10
    assert problem.live_pairs(problem.make(Case(1, 1, 16, 8, mask="neighbourhood", size=1))) == 100


def test_a_sampled_reference_has_the_first_and_the_last_row(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(problem, "REFERENCE_WORK", 10 * 2 * 2 * 48 * 16)
    rows = problem.reference(problem.make(TINY)).rows.tolist()
    assert 5 < len(rows) <= 10 and rows[0] == 0 and rows[-1] == 47


# -- checks that can fail -----------------------------------------------------------------------------------------------
def _one_off(out: torch.Tensor) -> torch.Tensor:
    out = out.clone()
    out[0, 1, 7, 3] += 1e-4
    return out


FAULTS = {
    "one element": _one_off,
    "NaN": lambda out: out.index_fill(2, torch.tensor(3), math.nan),
    "another shape": lambda out: out[:, :, :-1],
    "heads exchanged": lambda out: out.flip(1),
    "rounded to bf16": lambda out: out.bfloat16().float(),
    "nothing": lambda out: None,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_result_is_found(fault: str):
    posed = problem.make(TINY)
    expected = problem.reference(posed)
    right = torch.nn.functional.scaled_dot_product_attention(posed.query, posed.key, posed.value)
    assert problem.error_of(right, expected, posed) <= expected.bound
    assert not problem.error_of(FAULTS[fault](right), expected, posed) <= run.PEER_ALLOWANCE * expected.bound


class LocalPeer(Peer):
    """A peer in this process, so that a test can replace its library."""

    def order(self, do: str, **what: object):
        self.worker = getattr(self, "worker", None) or Worker(self.name, self.threads)
        answer = self.worker.answer(json.loads(json.dumps({"do": do, **what})))
        if "failed" in answer:
            raise PeerFailed(answer["failed"])
        return answer


class LocalPeers:
    def __init__(self, directory: Path):
        self.directory = directory
        self._peers: dict[tuple[str, int], LocalPeer] = {}

    def get(self, name: str, threads: int) -> LocalPeer:
        return self._peers.setdefault((name, threads), LocalPeer(name, threads))


def _wrong(posed: problem.Problem, threads: int) -> Prepared:
    return Prepared(lambda: torch.zeros_like(posed.query))


def _unsupported(posed: problem.Problem, threads: int) -> Prepared:
    raise Unsupported("not for it")


def _broken(posed: problem.Problem, threads: int) -> Prepared:
    raise RuntimeError("it broke")


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch):
    """Replaces `prepare` of peers by name, or the packages that one needs."""
    real = peers.load

    def replace_peers(**files: object) -> None:
        def load(name: str):
            return files.get(name) or real(name)

        monkeypatch.setattr(peers, "load", load)

    return replace_peers


def run_locally(row: Row, directory: Path) -> Result:
    return run.run_row("test", row, LocalPeers(directory), QUICK, lambda text: None)  # type: ignore[arg-type]


def test_peers_that_cannot_are_named_and_not_timed(replaced, tmp_path: Path):
    replaced(
        flex=SimpleNamespace(PACKAGES=(), prepare=_wrong),
        openvino=SimpleNamespace(PACKAGES=("no-such-package",)),
        iree=SimpleNamespace(PACKAGES=(), prepare=_unsupported),
        onnxruntime=SimpleNamespace(PACKAGES=(), prepare=_broken),
    )
    row = Row("row", TINY, ("sdpa", "flex", "openvino", "iree", "onnxruntime"), (Bound("faster", "flex", 1.0),))
    result = run_locally(row, tmp_path)
    status = {name: timing.status for name, timing in result.timings.items()}
    assert status["attnc"] == status["sdpa"] == "ok"
    assert status["flex"].startswith("WRONG: off by")
    assert status["openvino"] == "no-such-package is not installed"
    assert status["iree"] == "not for it"
    assert status["onnxruntime"] == "FAILED: RuntimeError: it broke"
    assert [name for name, timing in result.timings.items() if timing.times] == ["attnc", "sdpa"]
    assert result.verdicts[0].met is None, "a bound against a wrong peer is neither met nor missed"


def test_attnc_is_checked_like_the_others(replaced, tmp_path: Path):
    replaced(attnc=SimpleNamespace(PACKAGES=(), prepare=_wrong))
    result = run_locally(Row("row", TINY, ("sdpa",), (Bound("faster", "sdpa", 1.0),)), tmp_path)
    assert result.timings["attnc"].status.startswith("WRONG") and not result.timings["attnc"].times
    assert session.Session({}, {}, QUICK, [result]).wrong


def test_companions_and_limits(tmp_path: Path):
    masked = replace(TINY, mask="causal")
    row = Row("row", masked, (), (Bound("slower", "own dense", 1.0, 0.5),), (("own dense", TINY, 0), ("1 thread", masked, 1)))
    result = run_locally(row, tmp_path)
    assert list(result.timings) == ["attnc", "own dense", "1 thread"]
    assert all(len(timing.times) == 3 for timing in result.timings.values())
    assert result.pairs == 48 * 49 // 2 and result.fma > 0 and result.read > 0
    assert result.verdicts[0].met is not None
    json.dumps(result.to_json())


# -- processes ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["sdpa", "flex", "onnxruntime", "openvino", "iree"])
def test_each_installed_peer_is_right(name: str, tmp_path: Path):
    case, file = Case(1, 2, 64, 32), str(tmp_path / "reference.pt")
    Worker("reference", 1).answer({"do": "reference", "case": case.to_json(), "file": file})
    peer = Peer(name, 1)
    try:
        about = peer.order("about")
        if about["missing"]:
            assert about["missing"] in peers.load(name).PACKAGES
            return
        assert peer.order("prepare", key="row", case=case.to_json())["first"] > 0
        check = peer.order("check", key="row", file=file, allow=run.PEER_ALLOWANCE)
        assert check["error"] <= check["bound"]
        assert len(peer.order("run", key="row", repeats=2)["seconds"]) == 2
    finally:
        peer.close()


def test_a_process_that_dies_is_a_failure_and_starts_again(monkeypatch: pytest.MonkeyPatch):
    peer = Peer("sdpa", 1)
    assert peer.order("about")["missing"] is None
    assert peer._process is not None
    peer._process.kill()
    with pytest.raises(PeerFailed, match="ended"):
        peer.order("about")
    assert peer.order("about")["missing"] is None
    with pytest.raises(PeerFailed, match="KeyError"):
        peer.order("run", key="never prepared", repeats=1)
    peer.close()


def test_what_was_tuned_is_measured(cache_directory: Path):
    tile = TunedTile(64, 64, 32, False, 48, 512)
    tuning_file.write(Target.host().machine, [tile])
    with Peers() as started:
        code = "from attnc.target import Target; print(Target.host().tuned)"
        environment = {**os.environ, **started.environment}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == repr((tile,))


def test_an_interrupted_run_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch):
    results = iter([made(attnc=1e-3)])

    def run_row(*_: object) -> Result:
        try:
            return next(results)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(session, "run_row", run_row)
    shown = []
    done = session.run(
        ["small", "decode"], QUICK, full=False, quick=True, only="", report=print, shown=lambda suite, rows: shown.append(suite)
    )
    assert done.interrupted and len(done.results) == 1 and shown == ["small"]
    assert any("INTERRUPTED" in line for line in report.summary(done))


def test_a_run_ends_in_time(monkeypatch: pytest.MonkeyPatch):
    """Rows get what is left in equal shares a contender; the last ones their three turns, and no second try."""
    now = [0.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: now[0])
    options = Options(threads=2)
    free = pace.Pace(None, ("small",), full=False, quick=False)
    assert free.options(free.rows["small"][0], options) == options
    kept = pace.Pace(120.0, ("small", "decode", "memory"), full=False, quick=False)
    rows = [*kept.rows["small"], *kept.rows["decode"]]
    first = kept.options(rows[0], options)
    assert pace.LEAST_SECONDS <= first.budget < options.budget
    wide = pace.Pace(6000.0, ("small", "decode", "memory"), full=False, quick=False)
    assert wide.options(rows[0], options) == options
    for row in rows[1:-1]:
        now[0] += 20
        later = kept.options(row, options)
    assert later.budget == pace.LEAST_SECONDS and not later.again


def test_first_calls_include_the_imports():
    """The measured process has imported no more of attnc than its package and the bench itself."""
    code = "import sys, attnc; before = set(sys.modules); import attnc.bench.fresh; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {name for name in done.stdout.split() if name.startswith("attnc.") and ".bench" not in name} == set()


def test_the_command(tmp_path: Path):
    arguments = ["bench", "--quick", "--suite", "small", "--rows", "one call", "--peers", "sdpa", "--threads", "1"]
    (tmp_path / "bench").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "attnc.cli", *arguments, "--json", "all.json", "--write-results"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ},
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "all.json").read_text())["rows"]
    assert row["title"] == "one call" and row["timings"]["attnc"]["median"] > 0 and row["timings"]["sdpa"]["status"] == "ok"
    page = (tmp_path / "bench" / "RESULTS.md").read_text()
    assert "## small" in page and "| one call<br>1×1×16×16 f32" in page
    assert "one call" in done.stdout


@pytest.mark.parametrize(
    "arguments, words",
    [(["--peers", "cudnn"], "no such peer"), (["--plot", "a.gif"], "does not end in"), (["--suite", "backward"], "backward")],
)
def test_misuse(arguments: list[str], words: str):
    done = subprocess.run([sys.executable, "-m", "attnc.cli", "bench", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


# -- limits -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("target, register, count", [(X86, "ymm", 12), (WIDE, "zmm", 24)], ids=["AVX2", "AVX-512"])
def test_the_peak_loop_stays_in_registers(target: Target, register: str, count: int):
    text, flops = limits.fma_text(target)
    multiply_adds = [line for line in to_assembly(text, target).splitlines() if "vfmadd" in line]
    assert len(multiply_adds) == count and flops == 2 * count * target.lanes(32)
    assert all(register in line and "(" not in line for line in multiply_adds)


def test_the_reading_loop_loads_whole_vectors():
    lines = to_assembly(limits.read_text(WIDE), WIDE).splitlines()
    assert sum("zmm" in line and "(" in line for line in lines) >= 8


def test_limits_are_numbers():
    target = Target.host()
    assert limits.fma_peak(1, target)() > 0
    for size in (4096, 300_000):
        assert limits.read_bandwidth(size, 2, target)() > 0


# -- rows, bounds, reports ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("suite", suites.TIMED)
def test_rows_are_well_formed(suite: str):
    rows = suites.rows_of(suite, full=True)
    assert len(suites.rows_of(suite)) <= len(rows)
    for row in rows:
        assert set(row.peers) <= set(peers.FILES) - {"attnc"}
        known = {*row.peers, *(label for label, _, _ in row.companions)}
        assert {bound.against for bound in row.bounds if bound.kind in ("faster", "slower")} <= known
    for row in suites.rows_of(suite, quick=True):
        assert row.case.queries <= 256 and row.case.keys <= 256 and not row.bounds


def made(**medians: float) -> Result:
    timings = {name: Timing(name, times=[median]) for name, median in medians.items()}
    return Result("prefill", "row", Case(1, 1, 1000, 64), timings, 1000 * 1000, 256.0, 30.0, False, False)


@pytest.mark.parametrize(
    "bound, value, met, reached",
    [
        (Bound("faster", "sdpa", 1.25, 1.6), 1.5, True, False),
        (Bound("faster", "sdpa", 1.6), 1.5, False, None),
        (Bound("best", "", 1.05), 1.2, True, None),
        (Bound("slower", "own dense", 1.25, 1.1), 2.0, False, False),
        (Bound("slower", "own dense", None, 2.5), 2.0, None, True),
        (Bound("peak", "", None, 0.5), 0.5, None, True),
        (Bound("seconds", "", 1e-3), 2e-3, False, None),
        (Bound("faster", "compiled", 2.5), math.nan, None, None),
    ],
)
def test_bounds(bound: Bound, value: float, met: bool | None, reached: bool | None):
    result = made(attnc=2e-3, sdpa=3e-3, iree=2.4e-3, **{"own dense": 1e-3})
    verdict = run.judge(bound, result, ["sdpa", "iree", "openvino"] if bound.kind != "best" else ["sdpa", "iree"])
    assert verdict.value == pytest.approx(value, nan_ok=True)
    assert (verdict.met, verdict.reached) == (met, reached)


def test_the_limit_of_decoding():
    case = Case(1, 32, 1, 128, "bf16", keys=8192, kv_heads=8)
    result = replace(made(attnc=1e-3), case=case, by_bytes=True)
    assert result.limit == pytest.approx(min(30.0, 0.6 * 256.0 * 2 / (2 * 4)))
    assert result.rate() == pytest.approx(2 * 8 * 8192 * 128 * 2 / 1e-3 / 1e9)


def test_reports(tmp_path: Path):
    result = made(attnc=2e-3, sdpa=3e-3)
    result.verdicts = [run.judge(Bound("faster", "sdpa", 1.6), result, ["sdpa"])]
    result.timings["flex"] = Timing("flex", "WRONG: off by 1")
    figure = fresh.Figure("memory", "row", "attnc", [3e6], must=1e6, unit="B")
    done = session.Session({"cpu": "this one"}, {"torch": "2"}, QUICK, [result], [figure])
    page = report.markdown(done, "attnc bench")
    for words in ("128 GF/s", "50 % of 256", "SDPA 1.50 ×", "MISSED", "WRONG: off by 1", "2.861 MiB", "this one"):
        assert words in page, words
    assert len(done.misses) == 2
    json.dumps(done.to_json())
    file = tmp_path / "roofline.svg"
    if plot.refusal(file) is None:
        plot.draw([result], file)
        assert "FMA peak" in file.read_text()
    else:
        assert "matplotlib" in (plot.refusal(file) or "")


@pytest.mark.parametrize("mod", ["", "alibi", "relative_bias"])
def test_gradients_of_training_are_checked(mod: str):
    posed = training.make(Case(1, 2, 40, 16, mod=mod, mask="causal", train=True))
    expected = training.reference(posed)
    prepared = attnc_flex.prepare(posed, 1)
    results = prepared.call()
    assert len(results) == (5 if mod else 4)
    assert training.error_of(results, expected, posed) <= expected.bound
    for place in range(len(results)):  # an error in any one of them is found
        wrong = [result.clone() for result in results]
        wrong[place].view(-1)[3 % wrong[place].numel()] += 1e-3
        assert training.error_of(tuple(wrong), expected, posed) > expected.bound
    assert training.error_of(results[0], expected, posed) == math.inf
