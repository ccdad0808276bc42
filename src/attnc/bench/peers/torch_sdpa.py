"""torch's scaled_dot_product_attention: plain and causal as it offers them; other masks and sums as a ready-made attn_mask."""

from __future__ import annotations

from torch.nn.functional import scaled_dot_product_attention

from attnc.bench import training
from attnc.bench.peers import Prepared, Unsupported
from attnc.bench.problem import Problem, dense_bias

PACKAGES = ("torch",)
LARGEST_MASK = 1 << 30


def prepare(problem: Problem, threads: int) -> Prepared:
    case = problem.case
    query, key, value = problem.query, problem.key, problem.value
    causal = case.mask == "causal" and not case.mod
    bias = None
    if not causal and (case.mask or case.mod):
        if case.queries * case.keys * (case.heads if case.mod else 1) * 4 > LARGEST_MASK:
            raise Unsupported("the mask would be too large")
        if case.train:
            raise Unsupported("its mask would have to be trained")
        try:
            bias = dense_bias(problem)
        except ValueError as error:
            raise Unsupported(str(error)) from None
    grouped = case.heads != case.kv_heads

    def call():
        return scaled_dot_product_attention(query, key, value, bias, is_causal=causal, enable_gqa=grouped)

    return training.trained(problem, call) if case.train else Prepared(call)
