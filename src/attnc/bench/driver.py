"""Processes driven turn by turn: A B A B …, medians, and each one's time beside the others held against its time alone."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnc.runtime import tuning_file
from attnc.runtime.cache import disk_cache

TURN_SECONDS = 0.03
"""How long a turn of short calls lasts."""
PAUSE_SECONDS = 0.003
"""Between turns, until the neighbour's idle threads have stopped spinning."""
PATIENCE_SECONDS = 600.0


class PeerFailed(Exception):
    """A process under measurement ended, hung, or could not do what it was told."""


class Peer:
    """A process that runs one library. Started at the first order, and again after its end."""

    def __init__(self, name: str, threads: int, environment: dict[str, str] | None = None):
        self.name = name
        self.threads = threads
        self._environment = {**os.environ, **(environment or {}), "OMP_NUM_THREADS": str(threads)}
        self._process: subprocess.Popen[str] | None = None
        self._log: Any = None

    def order(self, do: str, **what: Any) -> dict[str, Any]:
        """The answer to an order. Raises `PeerFailed`."""
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps({"do": do, **what}) + "\n")
            process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE_SECONDS)
        line = process.stdout.readline() if ready else ""
        if not line:
            words = self._last_words() if ready else f"no answer for {PATIENCE_SECONDS:.0f} s"
            self.kill()
            raise PeerFailed(f"the process ended: {words}" if ready else words)
        answer = json.loads(line)
        if "failed" in answer:
            raise PeerFailed(answer["failed"])
        return answer

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as the process
            command = [sys.executable, "-W", "ignore", "-m", "attnc.bench.worker", self.name, str(self.threads)]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=self._environment
            )
        return self._process

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return lines[-1][:300] if lines else "without a word"

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None:
            self._process.kill()
        self.close()

    def close(self) -> None:
        """Let the process end."""
        if self._process is not None:
            process, self._process = self._process, None
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
            process.wait()
            self._log.close()


class Peers:
    """The processes of a run, by name and number of threads; with their own empty caches of compiled code."""

    def __init__(self) -> None:
        self._peers: dict[tuple[str, int], Peer] = {}
        self._directory = tempfile.TemporaryDirectory(prefix="attnc-bench-")
        copy_tuning(self.directory / "attnc")

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self._peers.values():
            peer.close()
        self._directory.cleanup()

    @property
    def directory(self) -> Path:
        return Path(self._directory.name)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "ATTNC_CACHE_DIR": str(self.directory / "attnc"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.directory / "inductor"),
        }

    def get(self, name: str, threads: int) -> Peer:
        return self._peers.setdefault((name, threads), Peer(name, threads, self.environment))


def copy_tuning(cache: Path) -> None:
    """Give an empty cache the tile sizes that were stored for this machine: what is measured is what the user has."""
    disk = disk_cache()
    stored = disk.file(tuning_file.NAME) if disk is not None else None
    if stored is not None and stored.exists():
        cache.mkdir(mode=0o700, exist_ok=True)
        shutil.copyfile(stored, cache / tuning_file.NAME)


@dataclass
class Contender:
    """One of those that take turns: what is prepared under `key` in `peer`. `times` are medians of its turns: seconds, or rates
    where it is a limit."""

    label: str
    peer: Peer
    key: str
    alone: float = 0.0
    times: list[float] = field(default_factory=list)
    repeats: int = 1
    turns: int = 1

    def turn(self) -> float:
        answer = self.peer.order("run", key=self.key, repeats=self.repeats)
        return statistics.median(answer.get("seconds") or answer["rates"])

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def steady(self) -> bool:
        """Whether its time beside the others is within 5 % of its time alone."""
        return abs(self.median / self.alone - 1) <= 0.05


def interleave(
    contenders: Sequence[Contender], turns: int, budget: float, report: Callable[[str], None] = lambda text: None
) -> None:
    """Fill `alone` and `times` of each contender, which takes as many of the `turns` as `budget` seconds allow, at least 3."""
    for contender in contenders:
        report(f"{contender.label} alone")
        seconds = _timed_turn(contender)
        if seconds < budget / 3:
            seconds = _timed_turn(contender)
        contender.repeats = max(1, min(10_000, int(TURN_SECONDS / max(seconds, 1e-7))))
        length = max(seconds * contender.repeats, 1e-6)
        contender.turns = max(3, min(turns, int(budget / length)))
        contender.alone = statistics.median(contender.turn() for _ in range(max(2, contender.turns // 3)))
        contender.times = []
    report("turn by turn")
    for number in range(turns):
        for contender in contenders:
            # Those with fewer turns take them evenly spread over the whole time.
            if (number + 1) * contender.turns // turns > number * contender.turns // turns:
                time.sleep(PAUSE_SECONDS)
                contender.times.append(contender.turn())


def _timed_turn(contender: Contender) -> float:
    """Seconds of one call, as the contender itself sees them; those of the whole order where it answers with a rate."""
    begin = time.perf_counter()
    answer = contender.peer.order("run", key=contender.key, repeats=1)
    return answer["seconds"][0] if "seconds" in answer else time.perf_counter() - begin
