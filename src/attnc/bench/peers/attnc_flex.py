"""attnc through its public eager function."""

from __future__ import annotations

from attnc.bench import training
from attnc.bench.peers import Prepared
from attnc.bench.problem import Problem

PACKAGES = ("attnc",)


def prepare(problem: Problem, threads: int) -> Prepared:
    from attnc import flex_attention

    query, key, value = problem.query, problem.key, problem.value
    score_mod, mask_mod = problem.score_mod, problem.mask_mod
    grouped = problem.case.heads != problem.case.kv_heads

    def call():
        return flex_attention(query, key, value, score_mod, enable_gqa=grouped, mask_mod=mask_mod)

    return training.trained(problem, call) if problem.case.train else Prepared(call)
