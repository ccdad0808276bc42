"""OpenVINO's ScaledDotProductAttention on its CPU plugin, in the case's own precision."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from attnc.bench.peers import Prepared, Unsupported
from attnc.bench.problem import Problem

PACKAGES = ("openvino",)


def prepare(problem: Problem, threads: int) -> Prepared:
    case = problem.case
    if case.mod or case.mask not in ("", "causal"):
        raise Unsupported("no such mod or mask")
    if case.heads != case.kv_heads:
        raise Unsupported("no grouped heads")
    if case.layout != "bhsd":
        raise Unsupported("no permuted inputs")
    openvino: Any = importlib.import_module("openvino")
    operations: Any = importlib.import_module("openvino.opset13")
    element = {"f32": openvino.Type.f32, "f16": openvino.Type.f16, "bf16": openvino.Type.bf16}[case.dtype]
    tensors = [problem.query, problem.key, problem.value]
    inputs = [operations.parameter(list(tensor.shape), element) for tensor in tensors]
    attention = operations.scaled_dot_product_attention(*inputs, causal=case.mask == "causal")
    result = operations.result(attention)
    model = openvino.Model([result], inputs, "attention")
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": case.dtype,  # its own choice for f32 inputs may be bf16
        "ENABLE_CPU_PINNING": False,
    }
    request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
    kept = [_shared(openvino, tensor, element) for tensor in tensors]
    for index, tensor in enumerate(kept):
        request.set_input_tensor(index, tensor)

    def read(_: Any) -> torch.Tensor:
        out = request.get_output_tensor(0)
        if case.dtype == "bf16" and out.element_type == openvino.Type.bf16:
            return torch.frombuffer(bytearray(out.data.tobytes()), dtype=torch.bfloat16).view(*out.shape)
        return torch.from_numpy(out.data.copy())

    return Prepared(request.infer, read)


def _shared(openvino: Any, tensor: torch.Tensor, element: Any) -> Any:
    """A tensor of OpenVINO with the same numbers."""
    array = tensor.contiguous()
    if tensor.dtype is torch.bfloat16:
        filled = openvino.Tensor(element, list(tensor.shape))
        filled.data.view("uint16")[:] = array.view(torch.uint16).numpy()
        return filled
    return openvino.Tensor(array.numpy(), shared_memory=False)
