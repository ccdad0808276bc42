"""The self-attention of an image model, with the transposes and reshapes that stand around it: one kernel, nothing moved.

Query, key and value come out of projections as [2, 4096, 640] in f16. Ten heads of 64 are reshaped and transposed out of each,
the keys are transposed once more, the scale is an argument, and the output is transposed and reshaped back. The same program is
taken from PyTorch and from IREE's MLIR; either way one attention is left, which reads its operands where they lie and writes
its result where it belongs.

    python examples/transpose_fusion.py [--length 4096] [--repeats 5]
    python examples/transpose_fusion.py --quick    # short sequences, seconds
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import attnc
from attnc import graph_pipeline
from attnc.capture.exported import export_module, from_exported
from attnc.mlir_text import parse_module
from attnc.target import Target

BATCH, HEADS, LENGTH, HEAD_DIM = 2, 10, 4096, 64


class SelfAttention(torch.nn.Module):
    """What stands between an image model's projections."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: Tensor) -> Tensor:
        batch, length, width = query.shape
        query, key, value = (x.view(batch, length, HEADS, width // HEADS).transpose(1, 2) for x in (query, key, value))
        keys_transposed = key.transpose(-1, -2)
        weights = torch.softmax(query @ keys_transposed * scale, dim=-1)
        return (weights @ value).transpose(1, 2).reshape(batch, length, width)


def iree_text(length: int) -> str:
    """The same program for IREE's attention operation."""
    flat, split = f"tensor<2x{length}x640xf16>", f"tensor<2x{length}x10x64xf16>"
    heads, keys = f"tensor<2x10x{length}x64xf16>", f"tensor<2x10x64x{length}xf16>"

    def transposed(result: str, source: str, source_type: str, type_: str, order: str) -> str:
        return (
            f"  {result}_init = tensor.empty() : {type_}\n"
            f"  {result} = linalg.transpose ins({source} : {source_type}) outs({result}_init : {type_}) permutation = {order}\n"
        )

    body = ""
    for name in ("query", "key", "value"):
        body += (
            f"  %{name}_split = tensor.expand_shape %{name} [[0], [1], [2, 3]] output_shape [2, {length}, 10, 64] "
            f": {flat} into {split}\n"
        )
        body += transposed(f"%{name}_heads", f"%{name}_split", split, heads, "[0, 2, 1, 3]")
    body += transposed("%keys", "%key_heads", heads, keys, "[0, 1, 3, 2]")
    maps = ", ".join(
        f"affine_map<(b, h, m, k, e, n) -> ({dims})>" for dims in ("b, h, m, e", "b, h, e, k", "b, h, k, n", "", "b, h, m, n")
    )
    after = transposed("%rows", "%out", heads, split, "[0, 2, 1, 3]")
    return f"""func.func @main(%query: {flat}, %key: {flat}, %value: {flat}, %scale: f32) -> {flat} {{
{body}  %init = tensor.empty() : {heads}
  %out = iree_linalg_ext.attention {{indexing_maps = [{maps}]}}
    ins(%query_heads, %keys, %value_heads, %scale : {heads}, {keys}, {heads}, f32) outs(%init : {heads}) {{
    ^bb0(%score: f32):
      iree_linalg_ext.yield %score : f32
    }} -> {heads}
{after}  %result = tensor.collapse_shape %rows [[0], [1], [2, 3]] : {split} into {flat}
  return %result : {flat}
}}
"""


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def show(title: str, text: str) -> None:
    print(f"\n{title}\n{'-' * len(title)}\n{text.rstrip()}")


def fused(text: str) -> str:
    """The module after everything around attention was folded into it."""
    module = parse_module(text)
    for name in ("simplify-torch", "convert-torch-to-linalg", "generalize-linalg", "raise-attention", "fold-into-attention"):
        graph_pipeline.run_pass(module, name, Target.host())
    return str(module)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="128 positions, timed once")
    options = parser.parse_args()
    length, repeats = (128, 1) if options.quick else (options.length, options.repeats)

    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(BATCH, length, HEADS * HEAD_DIM, generator=generator).half() for _ in range(3)]
    scale = torch.tensor(HEAD_DIM**-0.5)
    model = SelfAttention()

    exported = from_exported(export_module(model, (*inputs, scale)))
    show("PyTorch's program, before", str(exported.module))
    show("and after: one attention, no transpose", fused(str(exported.module)))
    show("IREE's program, before", iree_text(length))
    show("and after", fused(iree_text(length)))

    from_torch = attnc.compile(model, (*inputs, scale))
    from_text = attnc.compile(iree_text(length))
    print(f"\nkernels: {', '.join(from_torch.kernels)} from PyTorch; {', '.join(from_text.kernels)} from MLIR")
    print(f"memory between kernels: {from_torch.temporary_bytes} and {from_text.temporary_bytes} bytes")

    query, key, value = (x.double().view(BATCH, length, HEADS, HEAD_DIM).transpose(1, 2) for x in inputs)
    right = torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(inputs[0].shape)
    for name, out in (
        ("attnc, from PyTorch", from_torch(*inputs, scale)),
        ("attnc, from MLIR", from_text(*inputs, float(scale))),
        ("eager", model(*inputs, scale)),
    ):
        print(f"largest error against f64: {(out.double() - right).abs().max().item():.1e}  {name}")

    # The same attention on operands that were transposed and made contiguous before, which nobody pays for here.
    q, k, v = (x.view(BATCH, length, HEADS, HEAD_DIM).transpose(1, 2).contiguous() for x in inputs)
    contenders: dict[str, Callable[[], object]] = {
        "attnc, from PyTorch": lambda: from_torch(*inputs, scale),
        "attnc, from MLIR": lambda: from_text(*inputs, float(scale)),
        "attnc on transposed inputs": lambda: attnc.flex_attention(q, k, v, scale=float(scale)),
        "torch SDPA": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=float(scale)),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    with torch.no_grad():
        for turn in range(repeats + 1):
            for name, call in contenders.items():
                taken = seconds(call)
                if turn:
                    times[name].append(taken)
    for name, taken in times.items():
        print(f"{statistics.median(taken) * 1e3:9.1f} ms  {name}")
    base = statistics.median(times["attnc on transposed inputs"])
    for name in ("attnc, from PyTorch", "attnc, from MLIR"):
        print(f"{statistics.median(times[name]) / base:9.3f} ×   {name}, against transposed inputs")


if __name__ == "__main__":
    main()
