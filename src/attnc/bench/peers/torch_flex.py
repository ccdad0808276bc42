"""torch's flex_attention, eager: the dense formula with all scores in memory."""

from __future__ import annotations

from torch.nn.attention import flex_attention as flex

from attnc.bench.peers import Prepared, Unsupported
from attnc.bench.problem import Problem

PACKAGES = ("torch",)
LARGEST_SCORES = 600 << 20


def prepare(problem: Problem, threads: int) -> Prepared:
    case = problem.case
    if case.score_bytes > LARGEST_SCORES:
        raise Unsupported("all scores in memory")
    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True  # eager, without dynamo
    query, key, value, score_mod = problem.query, problem.key, problem.value, problem.score_mod
    block_mask = block_mask_of(problem)
    grouped = case.heads != case.kv_heads
    return Prepared(lambda: flex.flex_attention(query, key, value, score_mod, block_mask, enable_gqa=grouped))


def block_mask_of(problem: Problem):
    """The BlockMask of a case, built before anything is timed."""
    if problem.mask_mod is None:
        return None
    case = problem.case
    return flex.create_block_mask(problem.mask_mod, None, None, case.queries, case.keys, device="cpu")
