"""Sizes that torch.export left open, as torch-mlir writes them.

%s0 = torch.symbolic_int "s0" {min_val = 3, max_val = 100} : !torch.int
torch.bind_symbolic_shape %x, [%s0], affine_map<()[s0] -> (2, s0, 64)> : !torch.vtensor<[2,?,64],f32>
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from xdsl.dialects.builtin import AffineMapAttr
from xdsl.ir import Block, SSAValue
from xdsl.ir.affine import AffineConstantExpr, AffineExpr, AffineMap, AffineSymExpr

from attnc.dialects.torch import BindSymbolicShapeOp, SymbolicIntOp

_LARGEST = (1 << 63) - 1


def bind_shapes(block: Block, arguments: Sequence[tuple[SSAValue, Any]], ranges: Mapping[Any, Any]) -> None:
    """Appends the symbols of the arguments' sizes, and which argument has which."""
    symbols: dict[str, SymbolicIntOp] = {}
    shapes: list[tuple[SSAValue, list[str], list[AffineExpr]]] = []
    for argument, value in arguments:
        if not isinstance(value, Tensor):
            continue
        names: list[str] = []
        expressions: list[AffineExpr] = []
        for size in value.shape:
            expression = _affine(
                sympy.sympify(size.node.expr) if isinstance(size, torch.SymInt) else sympy.Integer(size), names
            )
            if expression is None:
                break
            expressions.append(expression)
        if names and len(expressions) == value.dim():
            shapes.append((argument, names, expressions))
    for _, names, _ in shapes:
        for name in names:
            if name not in symbols:
                low, high = _range(name, ranges)
                symbols[name] = SymbolicIntOp(name, low, high)
                symbols[name].result.name_hint = name
                block.add_op(symbols[name])
    for argument, names, expressions in shapes:
        map_ = AffineMap(0, len(names), tuple(expressions))
        block.add_op(BindSymbolicShapeOp(argument, [symbols[name].result for name in names], AffineMapAttr(map_)))


def _range(name: str, ranges: Mapping[Any, Any]) -> tuple[int, int]:
    for symbol, bounds in ranges.items():
        if str(symbol) == name:
            return _bounded(bounds.lower), _bounded(bounds.upper)
    return 0, _LARGEST


def _bounded(bound: Any) -> int:
    try:
        return max(min(int(bound), _LARGEST), 0)
    except (OverflowError, TypeError, ValueError):
        return _LARGEST


def _affine(expression: Any, names: list[str]) -> AffineExpr | None:
    """The expression over the symbols `names`, which it extends; None where it is no sum of products with constants."""
    if expression.is_Integer:
        return AffineConstantExpr(int(expression))
    if expression.is_Symbol:
        if str(expression) not in names:
            names.append(str(expression))
        return AffineSymExpr(names.index(str(expression)))
    if not (expression.is_Add or expression.is_Mul):
        return None
    parts = [_affine(part, names) for part in expression.args]
    if any(part is None for part in parts):
        return None
    result, *rest = [part for part in parts if part is not None]
    for part in rest:
        if expression.is_Mul and not (isinstance(result, AffineConstantExpr) or isinstance(part, AffineConstantExpr)):
            return None  # a product of two symbols is not affine
        result = result + part if expression.is_Add else result * part
    return result
