"""Running a kernel's `work` on several threads: torch's own OpenMP team where torch is there, else a plain pool.

A kernel hands out its tasks by itself, so all that a team does is call `work(context)` on each of its threads; how many there
are, and whether some come late or never, changes no result.
"""

from __future__ import annotations

import ctypes
import os
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from attnc import knobs

Call = Callable[[int], None]
"""A native function `void f(void *)`, called through ctypes (which lets other Python threads run)."""

_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Team:
    """A way to run `work` on several threads. `run(address, call, context, n)` returns when all of them are done."""

    name = "direct"

    def run(self, address: int, call: Call, context: int, count: int, keep: object = None) -> None:
        """Call the function at `address` (`call` is the same one) on `count` threads. `keep` holds all memory it touches."""
        call(context)


class OpenMPTeam(Team):
    """torch's own OpenMP threads, by `GOMP_parallel` (libgomp has it, and LLVM's and Intel's runtimes too): 2 µs a call."""

    name = "openmp"

    def __init__(self, gomp_parallel):
        self._parallel = gomp_parallel

    def run(self, address: int, call: Call, context: int, count: int, keep: object = None) -> None:
        self._parallel(address, context, count, 0)


class PlainTeam(Team):
    """Our own threads, started at first need: without torch, and in a child process after a fork, where OpenMP hangs."""

    name = "plain"

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._started = 0
        self._lock = threading.Lock()

    def run(self, address: int, call: Call, context: int, count: int, keep: object = None) -> None:
        self._start(count - 1)
        # A Ctrl-C may end this function at any place: then each helper still holds the memory it works on.
        requests = [_Request(call, context, keep) for _ in range(count - 1)]
        for request in requests:
            self._requests.put(request)
        call(context)
        # All tasks are handed out now. Helpers that began must finish before the context may go; the others need not begin.
        interrupt = None
        for request in requests:
            while not request.cancel():
                try:
                    request.finished.acquire()
                    break
                except KeyboardInterrupt as error:
                    interrupt = error
        if interrupt is not None:
            raise interrupt

    def _start(self, count: int) -> None:
        while self._started < count:
            with self._lock:
                if self._started >= count:
                    return
                self._started += 1
                name = f"attnc-{self._started}"
            try:
                threading.Thread(target=_serve, args=(self._requests,), name=name, daemon=True).start()
            except RuntimeError:  # the system has no more threads, or the interpreter ends: those that run do the work
                return


class _Request:
    """One helper's part in a call: begun by a helper or cancelled by the caller, whoever takes `_claim` first."""

    __slots__ = ("_claim", "call", "context", "finished", "keep")

    def __init__(self, call: Call, context: int, keep: object):
        self.call, self.context, self.keep = call, context, keep
        self._claim = threading.Lock()
        self.finished = threading.Lock()
        self.finished.acquire()

    def cancel(self) -> bool:
        return self._claim.acquire(blocking=False)

    def serve(self) -> None:
        if self._claim.acquire(blocking=False):
            try:
                self.call(self.context)
            finally:
                self.finished.release()


def _serve(requests: queue.SimpleQueue[_Request]) -> None:
    while True:
        request = requests.get()
        request.serve()
        del request  # and with it the memory it holds


_forked = False
_plain = PlainTeam()
_openmp: OpenMPTeam | None = None
_searched = False


def team() -> Team:
    """The team of this process now."""
    if _forked:
        return _plain
    if _openmp is not None:
        return _openmp
    if not _searched and "torch" in sys.modules:
        return _find_openmp() or _plain
    return _plain


def thread_count() -> int:
    """How many threads a call uses: `ATTNC_THREADS`, else torch's number, else the number of CPUs this process may use."""
    count = knobs.threads()
    if count is not None:
        return count
    number = getattr(sys.modules.get("torch"), "get_num_threads", None)  # not there while torch is being imported
    if number is not None:
        return number()
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def as_call(address: int) -> Call:
    """The native function at `address` as a Python callable."""
    return _WORK(address)


def _find_openmp() -> OpenMPTeam | None:
    """The team of the OpenMP library that torch itself is linked to.

    A symbol looked up in libtorch_cpu's handle is searched in that library and what it depends on, so the answer is torch's own
    copy even where other copies are loaded beside it.
    """
    global _openmp, _searched
    torch = sys.modules.get("torch")
    file = getattr(torch, "__file__", None)
    if file is None or not hasattr(torch, "get_num_threads"):
        return None  # torch is being imported just now: ask again at the next call
    _searched = True
    loaded = getattr(os, "RTLD_NOLOAD", None)
    if loaded is None:
        return None
    for path in [Path(file).parent / "lib" / "libtorch_cpu.so", *_mapped_openmp()]:
        try:
            parallel = ctypes.CDLL(str(path), mode=loaded | os.RTLD_NOW).GOMP_parallel
        except (OSError, AttributeError):
            continue
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        _openmp = OpenMPTeam(parallel)
        return _openmp
    return None


def _mapped_openmp() -> list[Path]:
    """OpenMP libraries mapped into this process."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "omp" in line and ".so" in line}
    return [Path(path) for path in sorted(paths)]


def _after_fork_in_child() -> None:
    # An OpenMP runtime that has started threads hangs in a forked child; whether it had cannot be asked. Our own threads are
    # gone as well, so the child gets a fresh pool, for good.
    global _forked, _plain, _openmp
    _forked, _plain, _openmp = True, PlainTeam(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
