"""ATen matrix products, as `linalg.generic`s that contract.

    %2 = torch.aten.bmm %a, %b : [b,m,k], [b,k,n] -> [b,m,n]
=>
    %2 = linalg.generic … ["parallel", "parallel", "parallel", "reduction"] { extf, extf, mulf, addf } then truncf

Half types are multiplied and summed in f32. Only products that become attention are compiled further.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any

from xdsl.ir import Attribute, SSAValue
from xdsl.ir.affine import AffineMap

from attnc.dialects.torch import VTensorType
from attnc.transforms.convert_torch_to_linalg_elementwise import converted, elementwise
from attnc.transforms.convert_torch_to_linalg_ext_table import Unsupported
from attnc.transforms.convert_torch_to_linalg_ext_values import (
    CARRIED,
    Number,
    Scalar,
    ScalarBuilder,
    is_float,
)
from attnc.transforms.convert_torch_to_linalg_graph import (
    ONE,
    Array,
    Graph,
    computed_type,
    dims_map,
)

Types = Sequence[VTensorType]


def contracted(graph: Graph, left: Array, right: Array, terms: tuple[str, str, str], dtype: Attribute) -> Array:
    """The sum of products, as einsum writes it: `("bmk", "bkn", "bmn")`; a letter's dim of size 1 may meet a wider one."""
    sizes: dict[str, Any] = {}
    for x, term in ((left, terms[0]), (right, terms[1])):
        for letter, size in zip(term, x.dims, strict=True):
            if letter not in sizes or sizes[letter] == ONE or (sizes[letter].static is None and size.static not in (None, 1)):
                sizes[letter] = size
    letters = [*terms[2], *(letter for letter in sizes if letter not in terms[2])]
    rank = len(letters)

    def map_of(x: Array, term: str) -> AffineMap:
        return dims_map(
            rank,
            [
                None if size == ONE and sizes[letter] != ONE else letters.index(letter)
                for letter, size in zip(term, x.dims, strict=True)
            ],
        )

    carried = computed_type(dtype) if is_float(dtype) else dtype
    dims = [sizes[letter] for letter in terms[2]]
    init = graph.filled(dims, CARRIED[carried], graph.r.number(carried, 0))

    def body(r: ScalarBuilder, elements: Sequence[SSAValue]) -> SSAValue:
        a, b = (r.convert_value(value, x.dtype, carried) for value, x in zip(elements, (left, right)))
        return r.add(elements[-1], r.multiply(a, b))

    maps = [map_of(left, terms[0]), map_of(right, terms[1])]
    init_map = dims_map(rank, list(range(len(terms[2]))))
    value = graph.generic([left.value, right.value], maps, init, init_map, body, list(range(len(terms[2]), rank)))
    return converted(graph, graph.array(value, carried, dims), dtype)


def matmul(graph: Graph, types: Types, left: Array, right: Array) -> Array:
    """mm, bmm, matmul, dot, mv: as torch.matmul takes its operands, batch dims broadcast."""
    if not left.rank or not right.rank:
        raise Unsupported("a product of a 0-d tensor")
    batch = string.ascii_uppercase
    a, b = max(left.rank - 2, 0), max(right.rank - 2, 0)
    rows, columns = ("m" if left.rank > 1 else ""), ("n" if right.rank > 1 else "")
    wide = max(a, b)
    first, second = batch[wide - a : wide], batch[wide - b : wide]
    second_term = second + ("k" + columns)
    return contracted(graph, left, right, (first + rows + "k", second_term, batch[:wide] + rows + columns), types[0].dtype)


def addmm(graph: Graph, types: Types, own: Array, left: Array, right: Array, beta: Any = None, alpha: Any = None) -> Array:
    """addmm, baddbmm, addmv: beta * own + alpha * (left @ right)"""
    dtype = types[0].dtype
    carried = computed_type(dtype) if is_float(dtype) else dtype
    result = matmul(graph, [VTensorType(types[0].shape, carried)], left, right)
    skipped = isinstance(beta, Number) and beta.constant == 0

    def body(r: ScalarBuilder, target: Attribute, total: Scalar, *rest: Scalar) -> SSAValue:
        value = r.extended(total.value)
        if alpha is not None:
            value = r.multiply(value, r.convert(alpha, carried))
        if rest:
            mine = r.convert(rest[0], carried)
            value = r.add(mine if beta is None else r.multiply(mine, r.convert(beta, carried)), value)
        return r.rounded(value, target)

    return elementwise(graph, body, dtype, [result] if skipped else [result, own])


def linear(graph: Graph, types: Types, x: Array, weight: Array, bias: Array | None = None) -> Array:
    batch = string.ascii_uppercase[: x.rank - 1]
    dtype = types[0].dtype
    if bias is None:
        return contracted(graph, x, weight, (batch + "k", "nk", batch + "n"), dtype)
    carried = computed_type(dtype) if is_float(dtype) else dtype
    result = contracted(graph, x, weight, (batch + "k", "nk", batch + "n"), carried)

    def body(r: ScalarBuilder, target: Attribute, total: Scalar, shift: Scalar) -> SSAValue:
        return r.rounded(r.add(total.value, r.convert(shift, carried)), target)

    return elementwise(graph, body, dtype, [result, bias])


def einsum(graph: Graph, types: Types, equation: str, operands: Any, *rest: Any) -> Array:
    """einsum of two tensors, without repeated letters in an operand."""
    text = equation.replace(" ", "")
    inputs, arrow, out = text.partition("->")
    parts = inputs.split(",")
    if len(parts) != 2 or len(operands) != 2:
        raise Unsupported("an einsum of other than two tensors")
    spread = max((x.rank - len(part.replace("...", "")) for part, x in zip(parts, operands) if "..." in part), default=0)
    spare = list("0123456789")[:spread]
    terms = []
    for part, x in zip(parts, operands, strict=True):
        own = x.rank - len(part.replace("...", ""))
        terms.append(part.replace("...", "".join(spare[spread - own :])))
    if not arrow:
        counts = {letter: (terms[0] + terms[1]).count(letter) for letter in terms[0] + terms[1]}
        out = "".join(spare) + "".join(sorted(x for x, count in counts.items() if count == 1 and x not in spare))
    out = out.replace("...", "".join(spare))
    if any(len(set(term)) != len(term) for term in (*terms, out)):
        raise Unsupported("an einsum with a diagonal")
    return contracted(graph, operands[0], operands[1], (terms[0], terms[1], out), types[0].dtype)


_NAMES: dict[Callable[..., Any], str] = {
    matmul: "mm bmm matmul dot mv",
    addmm: "addmm baddbmm addmv",
    linear: "linear",
    einsum: "einsum",
}
PRODUCTS: dict[str, Callable[..., Any]] = {name: build for build, names in _NAMES.items() for name in names.split()}
