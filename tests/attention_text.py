# ruff: noqa: E501 - IR is long
"""Modules at the stage `convert-torch-to-linalg-ext`, written from a region and a list of captures; what they mean, in NumPy."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.parser import Parser

from attnc.dialects.context import build_context
from attnc.target import Target

TARGET = Target("x86_64-unknown-linux-gnu", "", "", 512, 32)
DOMAIN = "(b, hkv, g, q, k, e, n)"

PRELUDE = """
%b = "iree_linalg_ext.index"() <{dim = 0 : i64}> : () -> index
%hkv = "iree_linalg_ext.index"() <{dim = 1 : i64}> : () -> index
%g = "iree_linalg_ext.index"() <{dim = 2 : i64}> : () -> index
%q = "iree_linalg_ext.index"() <{dim = 3 : i64}> : () -> index
%k = "iree_linalg_ext.index"() <{dim = 4 : i64}> : () -> index
%first_head = arith.muli %hkv, %group : index
%h = arith.addi %first_head, %g : index
%b32 = arith.index_cast %b : index to i32
%h32 = arith.index_cast %h : index to i32
%q32 = arith.index_cast %q : index to i32
%k32 = arith.index_cast %k : index to i32
"""

CAUSAL = """
%mask = arith.cmpi sge, %q32, %k32 : i32
%x = arith.select %mask, %score, %minus_infinity : f32
"""

ALIBI_CAUSAL = """
%slope = tensor.extract %slopes[%h] {attnc.checked = "kept", attnc.name = "slopes"} : tensor<?xf32>
%distance = arith.subi %k32, %q32 : i32
%distance_f = arith.sitofp %distance : i32 to f32
%bias = arith.mulf %slope, %distance_f : f32
%biased = arith.addf %score, %bias : f32
%mask = arith.cmpi sge, %q32, %k32 : i32
%x = arith.select %mask, %biased, %minus_infinity : f32
"""

IDENTITY = "%x = arith.addf %score, %no_bias : f32"


def parse(text: str) -> ModuleOp:
    """A verified module."""
    module = Parser(build_context(), text).parse_module()
    module.verify()
    return module


def attention_text(
    region: str,
    captures: Sequence[tuple[str, str, str]] = (),
    element: str = "f32",
    head_dim: int = 8,
    value_dim: int | None = None,
    outputs: Sequence[str] = ("out",),
) -> str:
    """`region` computes `%x`, or nothing at all; `captures` are (name, type, role)."""
    value_dim = value_dim or head_dim
    score = "f64" if element == "f64" else "f32"
    region = region if region.strip() else ""
    result = "%x" if region else "%score"
    arguments = [
        ("query", f"tensor<?x?x?x{head_dim}x{element}>", "query"),
        ("key", f"tensor<?x?x?x{head_dim}x{element}>", "key"),
        ("value", f"tensor<?x?x?x{value_dim}x{element}>", "value"),
        ("scale", score, "scale"),
        *captures,
    ]

    def strides(name: str, type_: str) -> str:
        if not type_.startswith("tensor"):
            return ""
        rank = type_.count("x", 0, type_.rindex("x") + 1)
        return "x".join(["?"] * (rank - 1) + ["1" if name in ("query", "key", "value") else "?"]) if rank else ""

    def listed(values: Sequence[str]) -> str:
        return "[" + ", ".join(f'"{value}"' for value in values) + "]"

    out_type = f"tensor<?x?x?x{value_dim}x{element}>"
    out5 = f"tensor<?x?x?x?x{value_dim}x{element}>"
    acc5 = f"tensor<?x?x?x?x{value_dim}x{score}>"
    row4, row3 = f"tensor<?x?x?x?x{score}>", f"tensor<?x?x?x{score}>"
    result_types = {"out": out_type, "lse": row3, "max": row3}
    maps = [f"affine_map<{DOMAIN} -> {results}>" for results in (
        "(b, hkv, g, q, e)", "(b, hkv, k, e)", "(b, hkv, k, n)", "()", "(b, hkv, g, q, n)", "(b, hkv, g, q)", "(b, hkv, g, q)"
    )]  # fmt: skip
    online = tuple(outputs) != ("out",)
    body = textwrap.indent((textwrap.dedent(PRELUDE) + textwrap.dedent(region)).strip(), "      ")
    q5 = f"tensor<?x?x?x?x{head_dim}x{element}>"
    operand_types = f"{q5}, {arguments[1][1]}, {arguments[2][1]}, {score}"
    if online:
        attention = f"""
    %acc_empty = tensor.empty(%batch, %kv_heads, %group, %queries) : {acc5}
    %row_empty = tensor.empty(%batch, %kv_heads, %group, %queries) : {row4}
    %acc0 = linalg.fill ins(%zero : {score}) outs(%acc_empty : {acc5}) -> {acc5}
    %max0 = linalg.fill ins(%minus_infinity : {score}) outs(%row_empty : {row4}) -> {row4}
    %sum0 = linalg.fill ins(%zero : {score}) outs(%row_empty : {row4}) -> {row4}
    %acc, %max, %sum = "iree_linalg_ext.online_attention"(%q5, %key, %value, %scale, %acc0, %max0, %sum0) <{{indexing_maps = [{", ".join(maps)}]}}> ({{
    ^bb0(%score: {score}):
{body}
      "iree_linalg_ext.yield"({result}) : ({score}) -> ()
    }}) : ({operand_types}, {acc5}, {row4}, {row4}) -> ({acc5}, {row4}, {row4})
    %result = linalg.generic {{indexing_maps = [affine_map<(b, h, g, q, n) -> (b, h, g, q, n)>, affine_map<(b, h, g, q, n) -> (b, h, g, q)>, affine_map<(b, h, g, q, n) -> (b, h, g, q, n)>], iterator_types = ["parallel", "parallel", "parallel", "parallel", "parallel"]}} ins(%acc, %sum : {acc5}, {row4}) outs(%init : {out5}) {{
    ^bb1(%a: {score}, %l: {score}, %o: {element}):
      %none = arith.cmpf oeq, %l, %zero : {score}
      %quotient = arith.divf %a, %l : {score}
      %normalised = arith.select %none, %zero, %quotient : {score}
      {"" if score == element else f"%rounded = arith.truncf %normalised : {score} to {element}"}
      linalg.yield {"%normalised" if score == element else "%rounded"} : {element}
    }} -> {out5}
    %lse_rows = linalg.generic {{indexing_maps = [affine_map<(b, h, g, q) -> (b, h, g, q)>, affine_map<(b, h, g, q) -> (b, h, g, q)>, affine_map<(b, h, g, q) -> (b, h, g, q)>], iterator_types = ["parallel", "parallel", "parallel", "parallel"]}} ins(%max, %sum : {row4}, {row4}) outs(%row_empty : {row4}) {{
    ^bb2(%m: {score}, %l: {score}, %o: {score}):
      %log = math.log %l : {score}
      %total = arith.addf %m, %log : {score}
      linalg.yield %total : {score}
    }} -> {row4}
    %lse = tensor.collapse_shape %lse_rows [[0], [1, 2], [3]] : {row4} into {row3}
    %max_scores = tensor.collapse_shape %max [[0], [1, 2], [3]] : {row4} into {row3}"""
    else:
        attention = f"""
    %result = "iree_linalg_ext.attention"(%q5, %key, %value, %scale, %init) <{{indexing_maps = [{", ".join(maps[:5])}]}}> ({{
    ^bb0(%score: {score}):
{body}
      "iree_linalg_ext.yield"({result}) : ({score}) -> ()
    }}) : ({operand_types}, {out5}) -> {out5}"""
    returned = {"out": "%out", "lse": "%lse", "max": "%max_scores"}
    return f"""builtin.module attributes {{attnc.stage = "convert-torch-to-linalg-ext"}} {{
  func.func @attention({", ".join(f"%{name}: {type_}" for name, type_, _ in arguments)}) -> ({", ".join(result_types[o] for o in outputs)}) attributes {{attnc.roles = {listed([role for *_, role in arguments])}, attnc.strides = {listed([strides(name, type_) for name, type_, _ in arguments])}, attnc.names = {listed([name for name, *_ in arguments])}}} {{
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %c2 = arith.constant 2 : index
    %batch = tensor.dim %query, %c0 : {arguments[0][1]}
    %heads = tensor.dim %query, %c1 : {arguments[0][1]}
    %queries = tensor.dim %query, %c2 : {arguments[0][1]}
    %kv_heads = tensor.dim %key, %c1 : {arguments[1][1]}
    %group = arith.divui %heads, %kv_heads : index
    %q5 = tensor.expand_shape %query [[0], [1, 2], [3], [4]] output_shape [%batch, %kv_heads, %group, %queries, {head_dim}] : {arguments[0][1]} into {q5}
    %init = tensor.empty(%batch, %kv_heads, %group, %queries) : {out5}
    %minus_infinity = arith.constant {"0xFFF0000000000000" if score == "f64" else "0xFF800000"} : {score}
    %zero = arith.constant 0.0 : {score}{attention}
    %out = tensor.collapse_shape %result [[0], [1, 2], [3], [4]] : {out5} into {out_type}
    func.return {", ".join(returned[o] for o in outputs)} : {", ".join(result_types[o] for o in outputs)}
  }}
}}
"""


def reference(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    scale: float,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(out, lse, max) in f64; the mods get arrays that broadcast to (B, Hq, Sq, Skv)."""
    query, key, value = (x.astype(np.float64) for x in (query, key, value))
    group = query.shape[1] // key.shape[1]
    key, value = (np.repeat(x, group, axis=1) for x in (key, value))
    b, h, q, k = np.ogrid[tuple(slice(n) for n in (*query.shape[:3], key.shape[2]))]
    with np.errstate(all="ignore"):
        scores = scale * (query @ key.swapaxes(-1, -2))
        if score_mod is not None:
            scores = score_mod(scores, b, h, q, k)
        if mask_mod is not None:
            scores = np.where(mask_mod(b, h, q, k), scores, -np.inf)
        top = scores.max(axis=-1, initial=-np.inf)
        weights = np.exp(scores - np.where(top == -np.inf, 0, top)[..., None])
        total = weights.sum(-1)
        live = weights[..., None] * np.where((scores > -np.inf)[..., None], value[:, :, None], 0)
        out = live.sum(axis=-2) / np.where(total == 0, 1, total)[..., None]
        return out, top + np.log(total), top
