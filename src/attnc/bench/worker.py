"""The process under measurement: runs one library, driven over a pipe by one JSON line an order, answered by one JSON line.

    {"do": "prepare", "key", "case"}     build inputs and call once     -> {"first": seconds} or {"unsupported": word}
    {"do": "check", "key", "file", "allow"}  the last result against a reference -> {"error", "bound"}
    {"do": "run", "key", "repeats"}      call again                     -> {"seconds": [...]}, or {"rates": [...]} of limits
    {"do": "drop", "key"}                forget what was prepared       -> {}
    {"do": "about"}                      -> {"versions", "missing"}
    {"do": "reference", "case", "file"}  compute and save a reference   -> {"live", "eager_error", "bound"}

An order that fails is answered by {"failed": text}. `python -m attnc.bench.worker NAME THREADS`; NAME is a peer, "limits" or
"reference".
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from attnc.bench.case import Case


class Worker:
    """Answers orders for the peer `name`."""

    def __init__(self, name: str, threads: int):
        self.name = name
        self.threads = threads
        self.prepared: dict[str, Any] = {}

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        from attnc.bench.peers import Unsupported

        handler: Callable[..., dict[str, Any]] = getattr(self, "do_" + order.pop("do"))
        try:
            return handler(**order)
        except Unsupported as error:
            return {"unsupported": str(error)}
        except Exception as error:
            traceback.print_exc()
            return {"failed": f"{type(error).__name__}: {error}"[:400]}

    def do_about(self) -> dict[str, Any]:
        from attnc.bench import peers

        word = peers.missing(self.name)
        return {"missing": word, "versions": "" if word else peers.versions(self.name)}

    def do_prepare(self, key: str, case: dict[str, Any]) -> dict[str, Any]:
        import torch

        from attnc.bench import limits, peers, problem, training

        made = Case(**case)
        if self.name == "limits":
            measure = limits.fma_peak(self.threads) if key == "fma" else limits.read_bandwidth(made.cache_bytes, self.threads)
            self.prepared[key] = measure
            return {"first": 0.0}
        with torch.inference_mode(not made.train):
            posed = training.make(made) if made.train else problem.make(made)
            begin = time.perf_counter()
            prepared = peers.load(self.name).prepare(posed, self.threads)
            returned = prepared.call()
            first = time.perf_counter() - begin
        self.prepared[key] = prepared, posed, returned
        return {"first": first}

    def do_check(self, key: str, file: str, allow: float) -> dict[str, Any]:
        import torch

        from attnc.bench import problem, training

        prepared, posed, returned = self.prepared[key]
        with torch.serialization.safe_globals([problem.Reference, training.Reference]):
            expected = torch.load(file)
        error_of = training.error_of if posed.case.train else problem.error_of
        error = error_of(prepared.result(returned), expected, posed)
        self.prepared[key] = prepared, posed, None
        return {"error": error, "bound": expected.bound * allow}

    def do_run(self, key: str, repeats: int) -> dict[str, Any]:
        import torch

        if self.name == "limits":
            return {"rates": [self.prepared[key]() for _ in range(repeats)]}
        prepared, posed, _ = self.prepared[key]
        call, seconds = prepared.call, []
        with torch.inference_mode(not posed.case.train):
            for _ in range(repeats):
                begin = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - begin)
        return {"seconds": seconds}

    def do_drop(self, key: str) -> dict[str, Any]:
        self.prepared.pop(key, None)
        return {}

    def do_reference(self, case: dict[str, Any], file: str) -> dict[str, Any]:
        import torch

        from attnc.bench import problem, training

        made = Case(**case)
        with torch.inference_mode(not made.train):
            expected = training.reference(training.make(made)) if made.train else problem.reference(problem.make(made))
        torch.save(expected, file)
        return {"live": expected.live, "eager_error": expected.eager_error, "bound": expected.bound}


def main() -> None:
    name, threads = sys.argv[1], int(sys.argv[2])
    # Libraries may print: the pipe is ours alone, their words go to the log.
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(threads)
    worker = Worker(name, threads)
    with torch.inference_mode():  # which cases that train leave
        for line in sys.stdin:
            pipe.write(json.dumps(worker.answer(json.loads(line))) + "\n")
            pipe.flush()


if __name__ == "__main__":
    main()
