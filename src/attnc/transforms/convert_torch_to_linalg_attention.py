"""Attention of a torch function: `iree_linalg_ext.attention`, or `online_attention` where lse or max are asked for.

    %0 = torch.aten.scaled_dot_product_attention %q, %k, %v, %mask, 0.0, false, none, false : [B,H,Sq,E], …, [B,1,Sq,Sk] i1
=>
    %0 = "iree_linalg_ext.attention"(%q, %k, %v, %scale, %mask, %init) <{indexing_maps = [
      (b, h, q, k, e, n) -> (b, h, q, e), … -> (b, h, k, e), … -> (b, h, k, n), … -> (), … -> (b, 0, q, k), … -> (b, h, q, n)]}>

The domain is (batch dims…, q, k, e, n); a dim of size 1 that is wider in another operand is read at 0. Where query heads share
key/value heads, the last batch dim of query and result is two, (key/value head, group). `is_causal` compares positions in the
region. `torch.attnc_flex_attention` has the domain (b, hkv, g, q, k, e, n) and its mods in the region, as on the road of
`flex_attention` (convert_torch_to_linalg_ext_attention.py).
"""

from __future__ import annotations

import math as python_math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xdsl.dialects import func
from xdsl.dialects.builtin import IntegerAttr
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.ir.affine import AffineMap

from attnc.dialects.linalg_ext import AttentionOp, IndexOp, OnlineAttentionOp, YieldOp
from attnc.dialects.torch import FlexAttentionOp, VTensorType
from attnc.transforms.convert_torch_to_linalg_elementwise import converted
from attnc.transforms.convert_torch_to_linalg_ext_attention import AttentionRegion
from attnc.transforms.convert_torch_to_linalg_ext_region import f32, f64, i64
from attnc.transforms.convert_torch_to_linalg_ext_region import index as index_type
from attnc.transforms.convert_torch_to_linalg_ext_shapes import log_sum, normalised
from attnc.transforms.convert_torch_to_linalg_ext_table import Unsupported
from attnc.transforms.convert_torch_to_linalg_ext_values import CARRIED, Number, ScalarBuilder, is_float
from attnc.transforms.convert_torch_to_linalg_graph import ONE, Array, Graph, Size, dims_map

Types = Sequence[VTensorType]


@dataclass
class _Domain:
    """The dims of an attention's iteration domain: their sizes, and where rows, keys, head dim and value columns are."""

    batch: list[Size]
    rows: Size
    keys: Size
    inner: Size
    columns: Size

    @property
    def rank(self) -> int:
        return len(self.batch) + 4

    @property
    def q(self) -> int:
        return len(self.batch)

    def map(self, batch: Sequence[int | None], *dims: int | None) -> AffineMap:
        return dims_map(self.rank, [*batch, *dims])


def attend(
    graph: Graph,
    operands: tuple[Array, Array, Array],
    maps: list[AffineMap],
    domain: _Domain,
    scale: SSAValue,
    region: Region,
    mask: tuple[Array, AffineMap] | None,
    statistics: bool,
) -> list[Array]:
    """out, and, where `statistics` are asked for, lse and max, all over (batch…, rows)."""
    query, _, value = operands
    precision = _precision(query.dtype)
    batch = list(range(len(domain.batch)))
    out_map, row_map = domain.map(batch, domain.q, domain.q + 3), domain.map(batch, domain.q)
    out_dims, row_dims = [*domain.batch, domain.rows, domain.columns], [*domain.batch, domain.rows]
    q, k, v = (x.value for x in operands)
    maps = [*maps, AffineMap(domain.rank, 0, ())]
    masked = None if mask is None else mask[0].value
    if mask is not None:
        maps = [*maps, mask[1]]
    if not statistics:
        init = graph.empty(out_dims, CARRIED[value.dtype])
        op: Operation = AttentionOp(q, k, v, scale, init, [*maps, out_map], region, masked)
        return [graph.array(graph.add(op), value.dtype, out_dims, "attention")]
    acc0, sum0 = graph.filled(out_dims, precision, 0.0), graph.filled(row_dims, precision, 0.0)
    max0 = graph.filled(row_dims, precision, float("-inf"))
    op = OnlineAttentionOp(q, k, v, scale, acc0, max0, sum0, [*maps, out_map, row_map, row_map], region, masked)
    graph.add(op)
    acc, top, total = op.results
    acc.name_hint, top.name_hint, total.name_hint = "acc", "max", "sum"
    whole = AffineMap.identity(len(out_dims))
    rows = dims_map(len(out_dims), range(len(row_dims)))
    init = graph.empty(out_dims, CARRIED[value.dtype])
    out = graph.structured([acc, total], [whole, rows], init, whole, normalised(precision, CARRIED[value.dtype]))
    whole = AffineMap.identity(len(row_dims))
    lse = graph.structured([top, total], [whole, whole], graph.empty(row_dims, precision), whole, log_sum(precision, precision))
    return [
        graph.array(out, value.dtype, out_dims, "attention"),
        graph.array(lse, precision, row_dims, "lse"),
        graph.array(top, precision, row_dims),
    ]


def _precision(dtype: Attribute) -> Attribute:
    """The type of scores, sums and maxima."""
    return f64 if dtype == f64 else f32


# -- scaled_dot_product_attention -------------------------------------------------------------------------------------


def attention(
    graph: Graph, query: Array, key: Array, value: Array, mask: Array | None, causal: bool, scale: Any, grouped: bool, lse: bool
) -> list[Array]:
    """Attention of query [*, Sq, E], key [*, Sk, E], value [*, Sk, Ev]: out, and, if `lse`, lse and max."""
    key, value = converted(graph, key, query.dtype), converted(graph, value, query.dtype)
    if not is_float(query.dtype) or min(query.rank, key.rank, value.rank) < 2:
        raise Unsupported("attention of these ranks or dtypes")
    heads = query.rank - 3
    group = ONE
    if grouped and heads >= 0 and query.dims[heads] != key.dims[-3]:
        found = query.dims[heads].divided(key.dims[-3])
        if found is None:
            raise Unsupported("grouped heads whose number is only known at run time")
        group = found
        split = [*query.dims[:heads], key.dims[-3], group, *query.dims[heads + 1 :]]
        query = graph.expand(query, [*([d] for d in range(heads)), [heads, heads + 1], [heads + 2], [heads + 3]], split)
    batch = list(_batch(query.dims[:-2], key, value, group != ONE))
    domain = _Domain(batch, query.dims[-2], key.dims[-2], query.dims[-1], value.dims[-1])
    count, q = len(batch), domain.q

    def batch_of(x: Array, shared: bool = False) -> list[int | None]:
        """How an operand's batch dims lie in the domain; `shared`: it has none for the group."""
        dims = list(range(count - shared))[count - shared - (x.rank - 2) :]
        return [None if size == ONE and batch[d] != ONE else d for size, d in zip(x.dims[:-2], dims, strict=True)]

    shared = group != ONE
    maps = [
        domain.map(batch_of(query), q, q + 2),
        domain.map(batch_of(key, shared), q + 1, q + 2),
        domain.map(batch_of(value, shared), q + 1, q + 3),
    ]
    masked = None if mask is None else _mask(graph, mask, domain, batch, shared)
    region = _region(_precision(query.dtype), (q, q + 1) if causal else None)
    results = attend(graph, (query, key, value), maps, domain, _scale(graph, scale, query), region, masked, lse)
    if not shared:
        return results
    return [
        graph.collapse(x, [*([d] for d in range(heads)), [heads, heads + 1], *([d] for d in range(heads + 2, x.rank))])
        for x in results
    ]


def _batch(query: Sequence[Size], key: Array, value: Array, shared: bool) -> Sequence[Size]:
    """The batch dims: the widest of what the operands have."""
    dims = [*query]
    for x in (key, value):
        own = list(x.dims[:-2])
        if shared:
            own.append(ONE)
        dims = [ONE] * (len(own) - len(dims)) + dims
        for place, size in enumerate(own, len(dims) - len(own)):
            if dims[place] == ONE or (dims[place].static is None and size.static not in (None, 1)):
                dims[place] = size
    return dims


def _mask(graph: Graph, mask: Array, domain: _Domain, batch: list[Size], shared: bool) -> tuple[Array, AffineMap]:
    """The mask as an operand: over any of the batch dims, rows and keys."""
    if shared and mask.rank > 2 and mask.dims[-3] != ONE:
        heads = mask.rank - 3
        split = [*mask.dims[:heads], *batch[-2:], *mask.dims[-2:]]
        mask = graph.expand(mask, [*([d] for d in range(heads)), [heads, heads + 1], [heads + 2], [heads + 3]], split)
    elif shared and mask.rank > 2:
        heads = mask.rank - 3
        split = [*mask.dims[:heads], ONE, ONE, *mask.dims[-2:]]
        mask = graph.expand(mask, [*([d] for d in range(heads)), [heads, heads + 1], [heads + 2], [heads + 3]], split)
    wide = [*batch, domain.rows, domain.keys]
    first = len(wide) - mask.rank
    dims = [None if size == ONE and wide[first + d] != ONE else first + d for d, size in enumerate(mask.dims)]
    return mask, dims_map(domain.rank, dims)


def _region(precision: Attribute, causal: tuple[int, int] | None) -> Region:
    block = Block(arg_types=[precision])
    block.args[0].name_hint = "score"
    result: SSAValue = block.args[0]
    if causal is not None:
        r = ScalarBuilder(block, lambda source, dim: source)
        row, column = (r.emit(IndexOp, (), index_type, {"dim": IntegerAttr(dim, i64)}) for dim in causal)
        row.name_hint, column.name_hint = "q", "k"
        result = r.select(r.compare("ge", row, column), result, r.constant(precision, float("-inf")))
    block.add_op(YieldOp(result))
    return Region(block)


def _scale(graph: Graph, scale: Any, query: Array) -> SSAValue:
    precision = _precision(query.dtype)
    if isinstance(scale, Number):
        return graph.r.convert(scale, precision)
    head_dim = query.dims[-1].static
    if head_dim is None:
        raise Unsupported("attention without a scale, of a head dim that is only known at run time")
    return graph.r.constant(precision, 1.0 / python_math.sqrt(head_dim))


def _number(value: Any, what: str, default: float = 0) -> float:
    if value is None:
        return default
    if isinstance(value, Number) and value.constant is not None:
        return value.constant
    raise Unsupported(f"{what} must be known while compiling")


def _without_dropout(dropout: Any) -> None:
    if _number(dropout, "dropout_p"):
        raise Unsupported("dropout; export the model in eval mode, or pass dropout_p=0.0")


def sdpa(
    graph: Graph,
    types: Types,
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
    dropout: Any = None,
    causal: Any = None,
    scale: Any = None,
    grouped: Any = None,
) -> list[Array | None]:
    """scaled_dot_product_attention"""
    _without_dropout(dropout)
    flags = bool(_number(causal, "is_causal")), scale, bool(_number(grouped, "enable_gqa"))
    return [*attention(graph, query, key, value, mask, *flags, lse=len(types) > 1)]


def sdpa_math(
    graph: Graph,
    types: Types,
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
    dropout: Any = None,
    causal: Any = None,
    dropout_mask: Any = None,
    scale: Any = None,
    grouped: Any = None,
) -> list[Array | None]:
    """_scaled_dot_product_attention_math: out alone; its attention weights are not to be had."""
    return [*sdpa(graph, types[:1], query, key, value, mask, dropout, causal, scale, grouped), None]


def sdpa_for_cpu(
    graph: Graph,
    types: Types,
    query: Array,
    key: Array,
    value: Array,
    dropout: Any = None,
    causal: Any = None,
    mask: Array | None = None,
    scale: Any = None,
) -> list[Array | None]:
    """_scaled_dot_product_flash_attention_for_cpu: out and lse"""
    return sdpa(graph, types, query, key, value, mask, dropout, causal, scale)[:2]


def sdpa_efficient(
    graph: Graph,
    types: Types,
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
    with_lse: Any = None,
    dropout: Any = None,
    causal: Any = None,
    *rest: Any,
) -> list[Array | None]:
    """_scaled_dot_product_efficient_attention (…_cudnn_…): out, lse, and nothing of the rest"""
    scale = next((value for value in rest if isinstance(value, Number) and value.dtype == f64), None)
    results = sdpa(graph, types, query, key, value, mask, dropout, causal, scale)[:2]
    return [*results, *[None] * (len(types) - len(results))]


def sdpa_flash(
    graph: Graph,
    types: Types,
    query: Array,
    key: Array,
    value: Array,
    dropout: Any = None,
    causal: Any = None,
    debug: Any = None,
    scale: Any = None,
) -> list[Array | None]:
    """_scaled_dot_product_flash_attention: out, lse, and nothing of the rest"""
    results = sdpa(graph, types, query, key, value, None, dropout, causal, scale)[:2]
    return [*results, *[None] * (len(types) - len(results))]


SDPA = {
    "scaled_dot_product_attention": sdpa,
    "_scaled_dot_product_attention_math": sdpa_math,
    "_scaled_dot_product_flash_attention_for_cpu": sdpa_for_cpu,
    "_scaled_dot_product_efficient_attention": sdpa_efficient,
    "_scaled_dot_product_cudnn_attention": sdpa_efficient,
    "_scaled_dot_product_flash_attention": sdpa_flash,
}


# -- flex_attention ---------------------------------------------------------------------------------------------------


def flex(graph: Graph, op: FlexAttentionOp, functions: dict[str, func.FuncOp], names: Sequence[str]) -> list[Array]:
    """`torch.attnc_flex_attention`: its results in their order."""
    query, key, value = (_array(graph.values[operand]) for operand in (op.query, op.key, op.value))
    precision = _precision(query.dtype)
    group = ONE if query.dims[1] == key.dims[1] else query.dims[1].divided(key.dims[1])
    if group is None:
        raise Unsupported("grouped heads whose number is only known at run time")
    split = [query.dims[0], key.dims[1], group, *query.dims[2:]]
    query = graph.expand(query, [[0], [1, 2], [3], [4]], split)
    batch = [_widest(query.dims[0], key.dims[0]), key.dims[1], group]
    domain = _Domain(batch, query.dims[3], key.dims[2], query.dims[4], value.dims[3])
    rows = domain.q

    def outer(x: Array) -> int | None:
        return None if x.dims[0] == ONE and batch[0] != ONE else 0

    maps = [
        domain.map([outer(query), 1, 2], rows, rows + 2),
        domain.map([outer(key), 1], rows + 1, rows + 2),
        domain.map([outer(value), 1], rows + 1, rows + 3),
    ]
    tensors: dict[SSAValue, SSAValue] = {}
    numbers: dict[SSAValue, Number] = {}
    for operand in op.operands[3:]:
        match graph.values[operand]:
            case Array() as x:
                tensors[operand] = x.value
            case Number() as number:
                numbers[operand] = number
            case _:
                raise Unsupported("a mod that captures something else than tensors and numbers")
    shared: SSAValue | int = group.static if group.static is not None else graph.index(group)
    region = AttentionRegion(functions, names, tensors, numbers, graph.r.size).build(op, precision, shared)
    scale = _scale(graph, graph.values[op.scale], query)
    wanted = [op.return_lse is not None, op.return_max is not None]
    results = attend(graph, (query, key, value), maps, domain, scale, region, None, any(wanted))
    results = [results[0], *(x for x, asked in zip(results[1:], wanted) if asked)]
    return [graph.collapse(x, [[0], [1, 2], *([d] for d in range(3, x.rank))]) for x in results]


def _widest(a: Size, b: Size) -> Size:
    return b if a == ONE else a


def _array(value: object) -> Array:
    assert isinstance(value, Array)
    return value
