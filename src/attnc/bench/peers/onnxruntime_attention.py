"""ONNX Runtime's contrib operators: MultiHeadAttention for plain and causal attention, GroupQueryAttention for one new query
over a cache that it appends to in place. Inputs stand in the layout that each operator likes best."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch

from attnc.bench.peers import Prepared, Unsupported
from attnc.bench.problem import Problem

PACKAGES = ("onnxruntime", "onnx")
DTYPES = {"f32": np.float32, "f16": np.float16}


def prepare(problem: Problem, threads: int) -> Prepared:
    case = problem.case
    if case.mod or case.mask not in ("", "causal"):
        raise Unsupported("no such mod or mask")
    grouped = case.heads != case.kv_heads
    if case.dtype not in (("f32", "f16") if grouped else ("f32",)):
        raise Unsupported(f"no {case.dtype} kernel")
    if grouped and (case.queries != 1 or case.mask):
        raise Unsupported("grouped heads only for one new query")
    if case.queries == 1 and case.mask:
        raise Unsupported("no such mask")
    feeds, outputs, attributes = _grouped(problem) if grouped else _multi_head(problem)
    operator = "GroupQueryAttention" if grouped else "MultiHeadAttention"
    session = _session(operator, feeds, outputs, attributes, threads)
    out = _bind(session, feeds, outputs)

    def result(_: Any) -> torch.Tensor:
        packed = torch.from_numpy(out.numpy())
        return packed.view(case.batch, case.queries, case.heads, case.dim).transpose(1, 2)

    return Prepared(lambda: session[0].run_with_iobinding(session[1]), result)


def _packed(tensor: torch.Tensor) -> np.ndarray:
    """[B, H, S, D] as [B, S, H·D]."""
    return tensor.transpose(1, 2).reshape(tensor.shape[0], tensor.shape[2], -1).contiguous().numpy()


def _multi_head(problem: Problem):
    case = problem.case
    feeds = {"query": _packed(problem.query), "key": _packed(problem.key), "value": _packed(problem.value)}
    outputs = {"out": (feeds["query"].shape, DTYPES[case.dtype])}
    return feeds, outputs, {"num_heads": case.heads, "unidirectional": int(case.mask == "causal")}


def _grouped(problem: Problem):
    case = problem.case
    feeds = {
        "query": _packed(problem.query),
        "key": _packed(problem.key[:, :, -1:]),
        "value": _packed(problem.value[:, :, -1:]),
        # Both caches are as long as the result, and the result is written into them.
        "past_key": problem.key.contiguous().numpy(),
        "past_value": problem.value.contiguous().numpy(),
        "seqlens_k": np.full(case.batch, case.keys - 1, np.int32),
        "total_sequence_length": np.array(case.keys, np.int32),
    }
    dtype = DTYPES[case.dtype]
    cache = feeds["past_key"].shape
    outputs = {"out": (feeds["query"].shape, dtype), "present_key": (cache, dtype), "present_value": (cache, dtype)}
    return feeds, outputs, {"num_heads": case.heads, "kv_num_heads": case.kv_heads}


def _session(operator: str, feeds: dict[str, np.ndarray], outputs: dict[str, Any], attributes: dict[str, int], threads: int):
    helper: Any = importlib.import_module("onnx.helper")
    runtime: Any = importlib.import_module("onnxruntime")

    def info(name: str, shape: Any, dtype: Any) -> Any:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), list(shape))

    node = helper.make_node(operator, list(feeds), list(outputs), domain="com.microsoft", **attributes)
    graph = helper.make_graph(
        [node],
        operator,
        [info(name, array.shape, array.dtype) for name, array in feeds.items()],
        [info(name, shape, dtype) for name, (shape, dtype) in outputs.items()],
    )
    versions = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=versions, ir_version=9)
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # a spinning neighbour slows all others
    options.log_severity_level = 3
    session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session, session.io_binding()


def _bind(session: Any, feeds: dict[str, np.ndarray], outputs: dict[str, Any]) -> Any:
    """Bind inputs and outputs to memory that stays; a cache that goes in comes out in the same place. Returns the output."""
    runtime: Any = importlib.import_module("onnxruntime")
    values = {name: runtime.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    for name, value in values.items():
        session[1].bind_ortvalue_input(name, value)
    for name, (shape, dtype) in outputs.items():
        if name.startswith("present"):
            values[name] = values[name.replace("present", "past")]
        else:
            values[name] = runtime.OrtValue.ortvalue_from_shape_and_type(list(shape), dtype)
        session[1].bind_ortvalue_output(name, values[name])
    return values["out"]
