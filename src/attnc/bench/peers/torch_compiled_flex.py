"""torch.compile(flex_attention): Inductor's C++ template, with its BlockMask built beforehand."""

from __future__ import annotations

import shutil

import torch
from torch.nn.attention.flex_attention import flex_attention

from attnc.bench.peers import Prepared, Unsupported
from attnc.bench.peers.torch_flex import block_mask_of
from attnc.bench.problem import Problem

PACKAGES = ("torch",)


def prepare(problem: Problem, threads: int) -> Prepared:
    if not any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++")):
        raise Unsupported("no C++ compiler")
    torch._dynamo.reset()  # one compile a row, of its own shapes
    query, key, value, score_mod = problem.query, problem.key, problem.value, problem.score_mod
    block_mask = block_mask_of(problem)
    grouped = problem.case.heads != problem.case.kv_heads
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return Prepared(lambda: compiled(query, key, value, score_mod, block_mask, enable_gqa=grouped))
