"""The launcher, its threads and its scratch, on small kernels written by hand in LLVM text."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from attnc.errors import CompileError
from attnc.runtime import threads
from attnc.runtime.abi import Argument, KernelRecord
from attnc.runtime.arena import Arena, Block, size_class
from attnc.runtime.launch import Kernel

# out[i] = x[i] * scale, one task an element; it goes by way of the thread's scratch and counts in the zeroed shared memory.
SCALE = """
define void @scale.plan(ptr %args, ptr %result) {
  %size.p = getelementptr i64, ptr %args, i64 1
  %size = load i64, ptr %size.p
  store i64 %size, ptr %result
  %r1 = getelementptr i64, ptr %result, i64 1
  store i64 8, ptr %r1
  %r2 = getelementptr i64, ptr %result, i64 2
  store i64 8, ptr %r2
  %flops = mul i64 %size, FLOPS
  %r3 = getelementptr i64, ptr %result, i64 3
  store i64 %flops, ptr %r3
  ret void
}
define void @scale.work(ptr %context) {
entry:
  %args = load ptr, ptr %context
  %shared.p = getelementptr i64, ptr %context, i64 1
  %shared = load ptr, ptr %shared.p
  %scratch.p = getelementptr i64, ptr %context, i64 2
  %scratch.base = load ptr, ptr %scratch.p
  %bytes.p = getelementptr i64, ptr %context, i64 3
  %bytes = load i64, ptr %bytes.p
  %next.p = getelementptr i64, ptr %context, i64 4
  %slot.p = getelementptr i64, ptr %context, i64 5
  %tasks.p = getelementptr i64, ptr %context, i64 6
  %tasks = load i64, ptr %tasks.p
  %fault.p = getelementptr i64, ptr %context, i64 7
  %slot = atomicrmw add ptr %slot.p, i64 1 monotonic
  %offset = mul i64 %slot, %bytes
  %scratch = getelementptr i8, ptr %scratch.base, i64 %offset
  %x = load ptr, ptr %args
  %xs.p = getelementptr i64, ptr %args, i64 2
  %xs = load i64, ptr %xs.p
  %out.p = getelementptr i64, ptr %args, i64 3
  %out = load ptr, ptr %out.p
  %os.p = getelementptr i64, ptr %args, i64 5
  %os = load i64, ptr %os.p
  %scale.p = getelementptr i64, ptr %args, i64 6
  %scale = load double, ptr %scale.p
  br label %head
head:
  %task = atomicrmw add ptr %next.p, i64 1 monotonic
  %more = icmp slt i64 %task, %tasks
  br i1 %more, label %body, label %done
body:
  %xi = mul i64 %task, %xs
  %xp = getelementptr double, ptr %x, i64 %xi
  %value = load double, ptr %xp
  store double %value, ptr %scratch
  %again = load double, ptr %scratch
  %product = fmul double %again, %scale
  %oi = mul i64 %task, %os
  %op = getelementptr double, ptr %out, i64 %oi
  store double %product, ptr %op
  %ignored = atomicrmw add ptr %shared, i64 1 monotonic
  %bad = fcmp uno double %value, %value
  br i1 %bad, label %faulty, label %head
faulty:
  store i64 1, ptr %fault.p
  br label %head
done:
  ret void
}
"""


@functools.cache
def compile_text(text: str) -> bytes:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(opt=2, reloc="pic", codemodel="default")
    module = llvm.parse_assembly(text)
    module.verify()
    return machine.emit_object(module)


SCALE_RECORD = KernelRecord(
    "scale",
    (
        Argument("", "buffer", "x", "f64", 1, "?"),
        Argument("", "buffer", "out", "f64", 1, "?"),
        Argument("", "f64", "scale"),
    ),
    thread_bytes=8,
)


def scale_kernel(flops: int = 1) -> Kernel:
    return Kernel(SCALE_RECORD, [compile_text(SCALE.replace("FLOPS", str(flops)))])


def run_scale(kernel: Kernel, x: np.ndarray, scale: float) -> np.ndarray:
    out = np.full(x.shape, np.nan)
    words = [x.ctypes.data, x.size, x.strides[0] // 8, out.ctypes.data, out.size, out.strides[0] // 8, scale]
    fault = kernel.launch(words, (x, out))
    assert fault == int(np.isnan(x).any())
    return out


def test_launch_packs_strides_and_numbers():
    x = np.arange(40.0)[::2]
    np.testing.assert_array_equal(run_scale(scale_kernel(), x, 0.1), x * 0.1)


def test_no_tasks_runs_nothing():
    assert run_scale(scale_kernel(), np.empty(0), 2.0).shape == (0,)


def test_fault_word_is_returned_and_does_not_stick():
    kernel = scale_kernel()
    run_scale(kernel, np.array([1.0, np.nan]), 2.0)
    run_scale(kernel, np.array([1.0, 3.0]), 2.0)


@pytest.mark.parametrize("count", ["1", "2", "3", "7"])
def test_many_threads(monkeypatch: pytest.MonkeyPatch, count: str):
    monkeypatch.setenv("ATTNC_THREADS", count)
    x = np.arange(5000.0)
    np.testing.assert_array_equal(run_scale(scale_kernel(10_000), x, 3.0), x * 3.0)


def test_plain_team(monkeypatch: pytest.MonkeyPatch):
    plain = threads.PlainTeam()
    monkeypatch.setenv("ATTNC_THREADS", "4")
    monkeypatch.setattr(threads, "team", lambda: plain)
    kernel = scale_kernel(10_000)
    x = np.arange(5000.0)
    for _ in range(50):
        np.testing.assert_array_equal(run_scale(kernel, x, 3.0), x * 3.0)


def test_torch_serves_its_own_openmp():
    pytest.importorskip("torch")
    assert threads.team().name == "openmp"


def test_eight_python_threads_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ATTNC_THREADS", "2")
    kernel = scale_kernel(1000)
    failures = []

    def work(seed: int) -> None:
        x = np.arange(1000.0 + seed * 300) + seed
        for _ in range(30):
            if not np.array_equal(run_scale(kernel, x, seed + 1.0), x * (seed + 1.0)):
                failures.append(seed)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


FORK = """
import os, sys
sys.path.insert(0, {tests!r})
os.environ["ATTNC_THREADS"] = "2"
try:
    import torch
    torch.set_num_threads(2)
    torch.ones(300, 300) @ torch.ones(300, 300)
except ImportError:
    pass
import numpy as np
from test_runtime import scale_kernel, run_scale
from attnc.runtime import threads
kernel = scale_kernel(10_000)
x = np.arange(5000.0)
run_scale(kernel, x, 2.0)
pid = os.fork()
if pid == 0:
    ok = np.array_equal(run_scale(kernel, x, 3.0), x * 3.0) and threads.team().name == "plain"
    inner = os.fork()
    if inner == 0:
        os._exit(0 if np.array_equal(run_scale(kernel, x, 5.0), x * 5.0) else 1)
    ok = ok and os.waitpid(inner, 0)[1] == 0
    os._exit(0 if ok else 1)
_, status = os.waitpid(pid, 0)
assert np.array_equal(run_scale(kernel, x, 4.0), x * 4.0)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_fork_after_use():
    program = textwrap.dedent(FORK.format(tests=os.path.dirname(__file__)))
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


FORK_WHILE_COMPILING = """
import os, sys, threading, time
import torch, attnc
q = torch.randn(1, 2, 64, 16)
attnc.flex_attention(q, q, q)
stop = False
def compile_on_and_on():
    number = 0
    while not stop:
        number += 1
        exec(f"def mod(s, b, h, i, j): return s * {number}.5 - {number}.25", globals())
        attnc.flex_attention(q, q, q, mod)
worker = threading.Thread(target=compile_on_and_on)
worker.start()
failures = 0
for number in range(6):
    time.sleep(0.05)
    pid = os.fork()
    if pid == 0:
        exec(f"def other(s, b, h, i, j): return s / {number + 2}.0 + h", globals())
        os._exit(0 if bool(torch.isfinite(attnc.flex_attention(q, q, q, other)).all()) else 1)
    end = time.time() + 60
    while time.time() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        time.sleep(0.01)
    else:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        status = 9
    failures += status != 0
stop = True
worker.join()
sys.exit(failures)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_fork_while_another_thread_compiles():
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", FORK_WHILE_COMPILING], timeout=400, check=False)
    assert result.returncode == 0


def test_damaged_object_is_a_named_error():
    data = compile_text(SCALE.replace("FLOPS", "1"))
    with pytest.raises(CompileError):
        Kernel(SCALE_RECORD, [b"garbage"]).load()
    with pytest.raises(CompileError):
        Kernel(KernelRecord("other", ()), [data]).load()


def test_runtime_imports_nothing_of_the_compiler():
    program = (
        "import sys, attnc.runtime.launch, attnc.runtime.cache, attnc.runtime.arrays; "
        "heavy = ('xdsl', 'torch', 'llvmlite', 'attnc.pipeline', 'attnc.capture', 'attnc.codegen'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_record_round_trip():
    data = SCALE_RECORD.to_json()
    assert KernelRecord.from_json(data) == SCALE_RECORD
    assert KernelRecord.from_json({**data, "stage": "tile"}).extra == {"stage": "tile"}
    for broken in ({}, {**data, "arguments": [{"role": "x", "kind": "?"}]}, {**data, "thread_bytes": "many"}, {"arguments": 3}):
        with pytest.raises(CompileError):
            KernelRecord.from_json(broken)


class TestArena:
    def test_blocks_are_used_again(self):
        arena = Arena(1 << 20)
        block = arena.take(10_000)
        assert block.address % 64 == 0 and block.size >= 10_000
        arena.give(block)
        assert arena.take(10_000) is block

    def test_idle_memory_is_bounded(self):
        arena = Arena(100_000)
        blocks = [arena.take(40_000) for _ in range(5)]
        for block in blocks:
            arena.give(block)
        assert arena.idle_bytes <= 100_000
        arena.give(Block(1 << 20))
        assert arena.idle_bytes <= 100_000
        arena.clear()
        assert arena.idle_bytes == 0

    def test_size_classes(self):
        for size in (0, 1, 4096, 4097, 100_000, 123_456_789):
            assert size <= size_class(size) <= max(4096, size * 1.3 + 4096)
            assert size_class(size_class(size)) == size_class(size)

    def test_too_much_is_a_memory_error(self):
        with pytest.raises(MemoryError):
            Arena().take(1 << 60)
