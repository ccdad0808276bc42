"""IREE: attention as three plain linalg operations, compiled by iree-compile for this CPU."""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch

from attnc.bench.peers import Prepared, Unsupported
from attnc.bench.problem import Problem

PACKAGES = ("iree-base-compiler", "iree-base-runtime")
LARGEST_SCORES = 600 << 20

TEXT = """
func.func @attention(%query: tensor<{b}x{q}x{d}xf32>, %key: tensor<{b}x{k}x{d}xf32>, %value: tensor<{b}x{k}x{d}xf32>)
    -> tensor<{b}x{q}x{d}xf32> {{
  %zero = arith.constant 0.0 : f32
  %scale = arith.constant {scale} : f32
  %scores = tensor.empty() : tensor<{b}x{q}x{k}xf32>
  %filled = linalg.fill ins(%zero : f32) outs(%scores : tensor<{b}x{q}x{k}xf32>) -> tensor<{b}x{q}x{k}xf32>
  %products = linalg.batch_matmul
    indexing_maps = [affine_map<(b, m, n, k) -> (b, m, k)>, affine_map<(b, m, n, k) -> (b, n, k)>,
                     affine_map<(b, m, n, k) -> (b, m, n)>]
    ins(%query, %key : tensor<{b}x{q}x{d}xf32>, tensor<{b}x{k}x{d}xf32>)
    outs(%filled : tensor<{b}x{q}x{k}xf32>) -> tensor<{b}x{q}x{k}xf32>
  %scaled = linalg.generic {{
      indexing_maps = [affine_map<(b, m, n) -> (b, m, n)>, affine_map<(b, m, n) -> (b, m, n)>],
      iterator_types = ["parallel", "parallel", "parallel"]}}
    ins(%products : tensor<{b}x{q}x{k}xf32>) outs(%scores : tensor<{b}x{q}x{k}xf32>) {{
  ^bb0(%score: f32, %unused: f32):
    %natural = arith.mulf %score, %scale : f32
    linalg.yield %natural : f32
  }} -> tensor<{b}x{q}x{k}xf32>
  %weights = linalg.softmax dimension(2) ins(%scaled : tensor<{b}x{q}x{k}xf32>) outs(%scores : tensor<{b}x{q}x{k}xf32>)
    -> tensor<{b}x{q}x{k}xf32>
  %empty = tensor.empty() : tensor<{b}x{q}x{d}xf32>
  %init = linalg.fill ins(%zero : f32) outs(%empty : tensor<{b}x{q}x{d}xf32>) -> tensor<{b}x{q}x{d}xf32>
  %out = linalg.batch_matmul ins(%weights, %value : tensor<{b}x{q}x{k}xf32>, tensor<{b}x{k}x{d}xf32>)
    outs(%init : tensor<{b}x{q}x{d}xf32>) -> tensor<{b}x{q}x{d}xf32>
  return %out : tensor<{b}x{q}x{d}xf32>
}}
"""


def prepare(problem: Problem, threads: int) -> Prepared:
    case = problem.case
    if case.mod or case.mask or case.dtype != "f32" or case.heads != case.kv_heads or case.layout != "bhsd":
        raise Unsupported("only plain f32 is written for it")
    if case.score_bytes > LARGEST_SCORES:
        raise Unsupported("all scores in memory")
    compiler: Any = importlib.import_module("iree.compiler")
    runtime: Any = importlib.import_module("iree.runtime")
    sizes = {"b": case.batch * case.heads, "q": case.queries, "k": case.keys, "d": case.dim}
    text = TEXT.format(**sizes, scale=repr(1 / math.sqrt(case.dim)))
    flags = ["--iree-llvmcpu-target-cpu=host", "--iree-opt-level=O3"]
    module = compiler.compile_str(text, target_backends=["llvm-cpu"], extra_args=flags)
    runtime.flags.parse_flags(f"--task_topology_max_group_count={threads}")
    config = runtime.Config("local-task")
    loaded = runtime.load_vm_module(runtime.VmModule.copy_buffer(config.vm_instance, module), config)
    arrays = [
        runtime.asdevicearray(config.device, tensor.flatten(0, 1).contiguous().numpy())
        for tensor in (problem.query, problem.key, problem.value)
    ]
    function = loaded["attention"]

    def read(out: Any) -> torch.Tensor:
        return torch.from_numpy(out.to_host().copy()).view(case.batch, case.heads, case.queries, case.dim)

    return Prepared(lambda: function(*arrays), read)
