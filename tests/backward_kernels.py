"""Variants of tests/tile/attention_backward.mlir: other element types and blocks, other captured tensors with gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hand_written import text

ROWS, KEYS, HEAD_DIM = 48, 96, 64
"""The blocks of the file."""
Bias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def sized(kernel: str, rows: int = ROWS, keys: int = KEYS, head_dim: int = HEAD_DIM) -> str:
    """The kernel with other blocks of rows and keys, and another head dim."""
    for old, new in (
        (f"{ROWS}x{KEYS}x", f"{rows}x{keys}x"),
        (f"{ROWS}x{HEAD_DIM}x", f"{rows}x{head_dim}x"),
        (f"{KEYS}x{HEAD_DIM}x", f"{keys}x{head_dim}x"),
        (f"{KEYS}x1x", f"{keys}x1x"),
        (f"1x{KEYS}x", f"1x{keys}x"),
        (f"tensor<1x{HEAD_DIM}x", f"tensor<1x{head_dim}x"),
        (f"{ROWS}x1x", f"{rows}x1x"),
        (f"?x{HEAD_DIM}x", f"?x{head_dim}x"),
        (f"step {ROWS} ", f"step {rows} "),
        (f"step (1, 1, {KEYS})", f"step (1, 1, {keys})"),
        (f"constant {ROWS - 1} ", f"constant {rows - 1} "),
        (f"constant {KEYS - 1} ", f"constant {keys - 1} "),
    ):
        kernel = kernel.replace(old, new.replace("x", "@@"))
    return kernel.replace("@@", "x")


def in_f64(kernel: str) -> str:
    """Everything in f64."""
    return (
        kernel.replace("f32", "f64").replace("0xFF800000", "0xFFF0000000000000").replace("1.44269504 ", "1.4426950408889634 ")
    )


def narrow(kernel: str, element: str) -> str:
    """Query, key, value, out and their gradients in `element` ("f16" or "bf16"); d_query as an f32 sum."""
    lines = []
    for line in kernel.split("\n"):
        word = line.strip().split(" ")[0]
        indent = line[: len(line) - len(line.lstrip())]
        if word == "tile.kernel":
            arguments = line.split("%")
            wide = ("scale", "slopes", "lse", "d_query", "d_slopes")
            line = "%".join(a if a.split(" ")[0] in wide else a.replace("xf32", f"x{element}") for a in arguments)
        elif "tile.dim" in line:
            line = line.replace("xf32", f"x{element}")
        elif word in ("%query_tile", "%d_out_tile", "%out_tile"):
            raw = line.replace("xf32", f"x{element}").replace(f"{word} =", f"{word}_raw =")
            body = f"%w = arith.extf %x : {element} to f32\n{indent}  tile.yield %w : f32"
            shape = f"tensor<{ROWS}x{HEAD_DIM}xf32>"
            line = f"{raw}\n{indent}{word} = tile.map (%x = {word}_raw) -> {shape} {{\n{indent}  {body}\n{indent}}}"
        elif word in ("%key_tile", "%value_tile"):
            line = line.replace("xf32", f"x{element}")
        elif word in ("%key_staged", "%value_staged"):
            line = line.replace("xf32", f"x{element}", 1)
        elif word == "%d_query_part":
            line = line.replace("%key_tile", "%key_staged")
        elif word == "tile.store":
            value = line.split(",")[0].split("%")[1]
            shape = f"tensor<{KEYS}x{HEAD_DIM}x{element}>"
            body = f"%n = arith.truncf %x : f32 to {element}\n{indent}  tile.yield %n : {element}"
            cut = f"{indent}%{value}_out = tile.map (%x = %{value}) -> {shape} {{\n{indent}  {body}\n{indent}}}\n"
            line = cut + line.replace("xf32", f"x{element}").replace(f"%{value},", f"%{value}_out,")
        lines.append(line)
    return "\n".join(lines)


@dataclass(frozen=True)
class Capture:
    """A captured tensor with a gradient.

    `shape(batch, heads, queries, keys)`; `bias(table, h, q, k)`: what is added to scores, for index tensors that broadcast;
    `index`: operations that give the indices of the gather from %hi, %qi, %ki, and their names; `accumulate`: what adds
    %d_modified to the gradient; `plus`: what is added to the gathered value.
    """

    shape: Callable[[int, int, int, int], tuple[int, ...]]
    bias: Bias
    index: tuple[str, ...]
    indices: str
    accumulate: tuple[str, ...]
    sum_type: str = "f64"
    plus: str = "%zero"


PAIRS = f"tensor<{ROWS}x{KEYS}xindex>"
PLACE = f"%place = tile.map (%hi = %h, %qi = %q, %ki = %k) -> {PAIRS} {{"
ADD = f"tile.accumulate %d_modified into %d_slopes[%place] owners [0, 1, 2] wrapped : tensor<{ROWS}x{KEYS}xf32>, SUM, [{PAIRS}]"
DIFFERENCE = (
    "%q_narrow = arith.index_cast %qi : index to i32",
    "%k_narrow = arith.index_cast %ki : index to i32",
    "%d_narrow = arith.subi %q_narrow, %k_narrow : i32",
    "%at = arith.index_cast %d_narrow : i32 to index",
)
SCRAMBLED = (
    "%c7 = arith.constant 7 : index",
    "%c13 = arith.constant 13 : index",
    "%times = arith.muli %qi, %c7 : index",
    "%plus = arith.addi %times, %ki : index",
    "%at = arith.remui %plus, %c13 : index",
)
ROW_SUM = f"%d_row = tile.reduce add %d_modified : tensor<{ROWS}x{KEYS}xf32>"
ROW = f"tensor<{ROWS}x1xf32>"

CAPTURES = {
    # Lanes run backwards through the table, some from its end.
    "relative": Capture(
        lambda b, h, q, k: (q + k,),
        lambda t, h, q, k: t[q - k],
        DIFFERENCE,
        "%at",
        (PLACE, *(f"  {op}" for op in DIFFERENCE), "  tile.yield %at : index", "}", ADD),
    ),
    "relative, 50 MB": Capture(
        lambda b, h, q, k: (6_000_000,),
        lambda t, h, q, k: t[q - k],
        DIFFERENCE,
        "%at",
        (PLACE, *(f"  {op}" for op in DIFFERENCE), "  tile.yield %at : index", "}", ADD),
    ),
    "scattered": Capture(
        lambda b, h, q, k: (13,),
        lambda t, h, q, k: t[(q * 7 + k) % 13],
        SCRAMBLED,
        "%at",
        (PLACE, *(f"  {op}" for op in SCRAMBLED), "  tile.yield %at : index", "}", ADD),
    ),
    "by query and key": Capture(
        lambda b, h, q, k: (q, k),
        lambda t, h, q, k: t[q, k],
        (),
        "%qi, %ki",
        (
            f"tile.accumulate %d_modified into %d_slopes[%q, %k] owners [0, 1] : tensor<{ROWS}x{KEYS}xf32>, SUM, "
            f"[tensor<{ROWS}x1xindex>, tensor<1x{KEYS}xindex>]",
        ),
        "f32",
    ),
    "by head, query and key": Capture(
        lambda b, h, q, k: (h, q, k),
        lambda t, h, q, k: t[h, q, k],
        (),
        "%hi, %qi, %ki",
        (
            f"tile.accumulate %d_modified into %d_slopes[%h, %q, %k] owners [0] : tensor<{ROWS}x{KEYS}xf32>, SUM, "
            f"[tensor<{ROWS}x1xindex>, tensor<{ROWS}x1xindex>, tensor<1x{KEYS}xindex>]",
        ),
        "f32",
    ),
    "by key": Capture(
        lambda b, h, q, k: (k,),
        lambda t, h, q, k: t[k],
        (),
        "%ki",
        (
            f"tile.accumulate %d_modified into %d_slopes[%k] owners [0, 1] : tensor<{ROWS}x{KEYS}xf32>, SUM, "
            f"[tensor<1x{KEYS}xindex>]",
        ),
    ),
    "by query": Capture(
        lambda b, h, q, k: (q,),
        lambda t, h, q, k: t[q],
        (),
        "%qi",
        (ROW_SUM, f"tile.accumulate %d_row into %d_slopes[%q] owners [0, 1, 2] : {ROW}, SUM, [tensor<{ROWS}x1xindex>]"),
    ),
    # Two sums into one buffer, that are not ordered alike.
    "by query, and by key": Capture(
        lambda b, h, q, k: (max(q, k),),
        lambda t, h, q, k: t[q] + t[k],
        ('%other = tile.gather %slopes[%ki] proven name "slopes" : memref<?xf32, strided<[1]>>',),
        "%qi",
        (
            ROW_SUM,
            f"tile.accumulate %d_row into %d_slopes[%q] owners [0, 1, 2] : {ROW}, SUM, [tensor<{ROWS}x1xindex>]",
            f"tile.accumulate %d_modified into %d_slopes[%k] owners [0, 1] : tensor<{ROWS}x{KEYS}xf32>, SUM, "
            f"[tensor<1x{KEYS}xindex>]",
        ),
        plus="%other",
    ),
    "scalar": Capture(
        lambda b, h, q, k: (),
        lambda t, h, q, k: t * (q + 1) / (k + 2),
        (),
        "",
        (
            f"%d_pairs = tile.map (%d = %d_modified, %qi = %q, %ki = %k) -> tensor<{ROWS}x{KEYS}xf32> {{",
            "  %c1 = arith.constant 1 : index",
            "  %c2 = arith.constant 2 : index",
            "  %q1_ = arith.addi %qi, %c1 : index",
            "  %k2_ = arith.addi %ki, %c2 : index",
            "  %q1i = arith.index_cast %q1_ : index to i32",
            "  %k2i = arith.index_cast %k2_ : index to i32",
            "  %q1f = arith.sitofp %q1i : i32 to f32",
            "  %k2f = arith.sitofp %k2i : i32 to f32",
            "  %r = arith.divf %q1f, %k2f : f32",
            "  %x = arith.mulf %d, %r : f32",
            "  tile.yield %x : f32",
            "}",
            f"%d_row = tile.reduce add %d_pairs : tensor<{ROWS}x{KEYS}xf32>",
            f"tile.accumulate %d_row into %d_slopes[] owners [0, 1, 2] : {ROW}, SUM, []",
        ),
    ),
}
SCALAR_FACTOR = """%c1 = arith.constant 1 : index
              %c2 = arith.constant 2 : index
              %q1_ = arith.addi %qi, %c1 : index
              %k2_ = arith.addi %ki, %c2 : index
              %q1i = arith.index_cast %q1_ : index to i32
              %k2i = arith.index_cast %k2_ : index to i32
              %q1f = arith.sitofp %q1i : i32 to f32
              %k2f = arith.sitofp %k2i : i32 to f32
              %ratio_f = arith.divf %q1f, %k2f : f32
              %bias = arith.mulf %slope, %ratio_f : f32"""


def with_capture(name: str) -> str:
    """The kernel with another captured tensor in the place of the slopes."""
    capture, kernel = CAPTURES[name], text("attention_backward")
    rank = len(capture.shape(1, 1, 1, 1))
    sizes = "?x" * rank
    strides = ", ".join(["?"] * (rank - 1) + ["1"] * min(rank, 1))
    layout = f", strided<[{strides}]>" if rank else ""
    table, sums = (f"memref<{sizes}{element}{layout}>" for element in ("f32", capture.sum_type))
    one = "memref<?xf32, strided<[1]>>"
    kernel = kernel.replace(f"%slopes : {one}", f"%slopes : {table}").replace(
        "%d_slopes : memref<?xf64, strided<[1]>>", f"%d_slopes : {sums}"
    )
    lines = []
    for line in kernel.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        if "tile.gather %slopes" in line:
            lines += [indent + op for op in capture.index]
            line = line.replace("%slopes[%hi]", f"%slopes[{capture.indices}]").replace(one, table)
        line = line.replace("%bias = arith.mulf %slope, %distance_f", f"%bias = arith.addf %slope, {capture.plus}")
        if name == "scalar":
            line = line.replace("%bias = arith.addf %slope, %zero : f32", SCALAR_FACTOR)
        lines.append(line)
    kernel = "\n".join(lines)
    start, end = kernel.index("          %d_slope_pairs ="), kernel.index("          %d_scores =")
    added = "".join(f"          {op}\n" for op in capture.accumulate).replace("SUM", sums)
    return kernel[:start] + added + kernel[end:]


def slopes_bias(slopes: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The bias of the file as it is."""
    return slopes[h] * (k - q)


def autograd(bias: Bias, query: Tensor, key: Tensor, value: Tensor, table: Tensor, d_out: Tensor, d_lse: Tensor | None = None):
    """(out, lse, dQ, dK, dV, dtable) of causal attention with `bias(table, h, q, k)`, by torch's autograd in f64."""
    leaves = [tensor.double().requires_grad_() for tensor in (query, key, value, table)]
    q_, k_, v_, t_ = leaves
    ratio = query.shape[1] // key.shape[1]
    k_, v_ = (t.repeat_interleave(ratio, dim=1) for t in (k_, v_))
    h = torch.arange(query.shape[1])[:, None, None]
    q, k = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])
    scores = (0.125 * q_ @ k_.mT + bias(t_, h, q, k)).masked_fill(q < k, -torch.inf)
    out, lse = scores.softmax(dim=-1) @ v_, scores.logsumexp(dim=-1)
    outputs, weights = ([out], [d_out.double()]) if d_lse is None else ([out, lse], [d_out.double(), d_lse.double()])
    gradients = torch.autograd.grad(outputs, leaves, weights)
    return tuple(t.detach() for t in (out, lse, *gradients))


def with_lse_gradient(kernel: str) -> str:
    """The kernel with one argument more at the end: the gradient of lse."""
    kernel = kernel.replace(
        "%d_slopes : memref<?xf64, strided<[1]>>)", "%d_slopes : memref<?xf64, strided<[1]>>, %d_lse : memref<?x?x?xf32>)"
    )
    load = (
        f"          %d_lse_tile = tile.load %d_lse[%b, %h, %q] : memref<?x?x?xf32>, "
        f"[index, tensor<{ROWS}x1xindex>, tensor<{ROWS}x1xindex>] -> {ROW}\n"
    )
    less = (
        f"          %delta = tile.map (%t = %delta_out, %l = %d_lse_tile) -> {ROW} {{\n"
        "            %x = arith.subf %t, %l : f32\n            tile.yield %x : f32\n          }\n"
    )
    at = kernel.index("          %delta = tile.reduce")
    end = kernel.index("\n", at) + 1
    reduce = kernel[at:end].replace("%delta =", "%delta_out =")
    return kernel[:at] + load + reduce + less + kernel[end:]
