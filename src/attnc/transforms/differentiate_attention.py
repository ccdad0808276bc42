"""Attention becomes its derivative: the gradients of a function's arguments that `attnc.gradients` names.

Before:

    func.func @attention(%query, %key, %value, %scale, %slopes) -> … attributes {attnc.gradients = array<i64: 0, 1, 2, 4>} {
      %out_5d = "iree_linalg_ext.attention"(%query_5d, %key, %value, %scale, %init) ({ ^bb0(%score): …; yield %masked })
      return %out

After:

    func.func @attention_backward(%query, %key, %value, %scale, %slopes, %out, %lse, %d_out, %d_lse) -> (…) {
      %d_query_5d, %d_key, %d_value, %d_slopes = "attnc.attention_backward"(
          %query_5d, %key, %value, %scale, %out_5d, %lse_5d, %d_out_5d, %d_lse_5d, %slopes) ({
        ^bb0(%score): …; yield %masked                                              // as it was
      }, {
        ^bb0(%score, %d_modified, %live): … "attnc.accumulate"(%d_slope, %slopes, %h); "attnc.yield"(%d_score)
      }) {gradients = ["query", "key", "value"]}
      return %d_query, %d_key, %d_value, %d_slopes

`lse` and `d_lse` are natural logarithms [B, Hq, Sq], in f64, and their gradient. Numbers, masks and captured integers have no
gradient. A captured tensor's gradient is f64 (and [1] for a 0-d one), as is that of the scale: both are sums over all pairs.
That of the query has the type of the scores, for it is a sum over blocks of keys; those of key and value have theirs.
"""

from __future__ import annotations

from typing import cast

from xdsl.dialects import tensor
from xdsl.dialects.builtin import (
    DYNAMIC_INDEX,
    AnyFloat,
    ArrayAttr,
    DenseArrayBase,
    FunctionType,
    ModuleOp,
    StringAttr,
    TensorType,
    f64,
)
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Attribute, BlockArgument, SSAValue
from xdsl.ir.affine import AffineConstantExpr, AffineDimExpr, AffineMap

from attnc.analysis.attention import BATCH, GROUP, HEAD_DIM, KEY, KV_HEAD, QUERY, VALUE_DIM
from attnc.analysis.buffers import argument_strings
from attnc.analysis.roles import map_dims
from attnc.dialects.attention_backward import GRADIENTS, AttentionBackwardOp
from attnc.dialects.building import erase_dead
from attnc.dialects.linalg_ext import AttentionOp, OnlineAttentionOp
from attnc.errors import LoweringError
from attnc.target import Target
from attnc.transforms.convert_torch_to_linalg_ext_shapes import collapse, expand
from attnc.transforms.differentiate_region import derivative_of

NAME = "differentiate-attention"
WANTED = "attnc.gradients"
"""Attribute of a function: which of its arguments (by number) want a gradient."""

_ROW = (BATCH, KV_HEAD, GROUP, QUERY)
_DIMS = ((*_ROW, HEAD_DIM), (BATCH, KV_HEAD, KEY, HEAD_DIM), (BATCH, KV_HEAD, KEY, VALUE_DIM), (), (*_ROW, VALUE_DIM))


def run(module: ModuleOp, target: Target) -> None:
    """Differentiates every function that has `attnc.gradients`.

    Raises:
        LoweringError: the function holds no attention that can be differentiated, or an operation without a derivative.
    """
    for function in list(module.ops):
        if isinstance(function, FuncOp) and WANTED in function.attributes:
            _Differentiation(function).run()


class _Differentiation:
    """One function on its way."""

    def __init__(self, function: FuncOp):
        self.function = function
        self.block = function.body.block
        ops = [op for op in self.block.ops if isinstance(op, AttentionOp | OnlineAttentionOp)]
        if len(ops) != 1:
            raise LoweringError(f"@{function.sym_name.data}: {len(ops)} attentions in a function to differentiate, not 1")
        self.op = ops[0]
        wanted = function.attributes[WANTED]
        assert isinstance(wanted, DenseArrayBase)
        self.wanted = [int(number) for number in wanted.get_values()]
        if self.op.mask is not None or [map_dims(map_) for map_ in self.op.maps[:5]] != list(_DIMS):
            raise LoweringError(f"{self.op.name}: no derivative for this iteration domain: {self.op.indexing_maps}")
        if not isinstance(self.op.query.owner, tensor.ExpandShapeOp):
            raise LoweringError(f"{self.op.name}: the query must be an argument with its heads expanded to (hkv, g)")
        self.query_5d = self.op.query.owner

    def run(self) -> None:
        function, op = self.function, self.op
        score = cast(AnyFloat, op.region.block.args[0].type)
        arguments = list(self.block.args)
        roles = argument_strings(function, "attnc.roles", "capture")
        names = [roles[number] for number in self.wanted if roles[number] in GRADIENTS]
        captures = [arguments[number] for number in self.wanted if roles[number] == "capture"]
        derivative = derivative_of(op.region.block, bool({"query", "key", "scale"} & set(names)), captures)

        # What follows the attention belongs to the forward pass, as do its initial values.
        while (last := self.block.last_op) is not None and last is not op:
            last.detach()
            last.erase(safe_erase=False)
        op.detach()
        element = cast(TensorType, op.query.type).element_type
        columns = cast(TensorType, op.value.type).get_shape()[-1]
        whole, row = [DYNAMIC_INDEX] * 3 + [columns], [DYNAMIC_INDEX] * 3
        out, lse, d_out, d_lse = (
            self._argument(TensorType(type_, shape), name)
            for name, type_, shape in (
                ("out", element, whole),
                ("lse", f64, row),
                ("d_out", element, whole),
                ("d_lse", score, row),
            )
        )
        rows = self._row_sizes()
        out_5d, d_out_5d = (expand(self.block, value, [*rows, columns], f"{value.name_hint}_5d") for value in (out, d_out))
        lse_5d, d_lse_5d = (expand(self.block, value, rows, f"{value.name_hint}_5d") for value in (lse, d_lse))

        maps = [_map(dims) for dims in (*_DIMS, _ROW, _DIMS[4], _ROW)]
        one = AffineMap(7, 0, (AffineConstantExpr(0),))
        maps += [one if name == "scale" else _map(_DIMS[GRADIENTS.index(name)]) for name in names]
        types: dict[str, Attribute] = {
            "query": TensorType(score, cast(TensorType, op.query.type).get_shape()),
            "key": op.key.type,
            "value": op.value.type,
            "scale": TensorType(f64, [1]),
        }
        results = [types[name] for name in names]
        results += [TensorType(f64, cast(TensorType, capture.type).get_shape() or [1]) for capture in captures]
        region = op.detach_region(op.region)
        backward = AttentionBackwardOp(
            [op.query, op.key, op.value, op.scale, out_5d, lse_5d, d_out_5d],
            d_lse_5d,
            captures,
            maps,
            names,
            results,
            region,
            derivative,
        )
        self.block.add_op(backward)
        op.drop_all_references()
        hints = [f"d_{name}" for name in names] + [f"d_{capture.name_hint or 'capture'}" for capture in captures]
        for result, hint in zip(backward.results, hints, strict=True):
            result.name_hint = hint
        self._return(backward, names)
        erase_dead(self.block)

    def _argument(self, type_: TensorType, name: str) -> BlockArgument:
        """A new last argument."""
        argument = self.block.insert_arg(type_, len(self.block.args))
        argument.name_hint = name
        return argument

    def _row_sizes(self) -> list[SSAValue | int]:
        """The sizes (b, hkv, g, q), as the query's expand_shape has them."""
        dynamic = iter(self.query_5d.dynamic_output_shape)
        sizes = [next(dynamic) if size < 0 else int(size) for size in self.query_5d.static_output_shape.get_values()]
        return sizes[:4]

    def _return(self, backward: AttentionBackwardOp, names: list[str]) -> None:
        function = self.function
        returned: list[SSAValue] = list(backward.results)
        if "query" in names:
            returned[0] = collapse(self.block, returned[0], "d_query_4d")
        self.block.add_op(ReturnOp(*returned))
        function.properties["sym_name"] = StringAttr(f"{function.sym_name.data}_backward")
        inputs = [argument.type for argument in self.block.args]
        function.properties["function_type"] = FunctionType.from_lists(inputs, [value.type for value in returned])
        del function.attributes[WANTED]
        added = {
            "attnc.roles": ("out", "lse", "d_out", "d_lse"),
            "attnc.names": ("out", "lse", "d_out", "d_lse"),
            "attnc.strides": ("?x?x?x1", "?x?x1", "?x?x?x1", "?x?x?"),
        }
        for attribute, strings in added.items():
            known = function.attributes.get(attribute)
            if isinstance(known, ArrayAttr):
                function.attributes[attribute] = ArrayAttr([*known, *(StringAttr(string) for string in strings)])


def _map(dims: tuple[int, ...]) -> AffineMap:
    return AffineMap(7, 0, tuple(AffineDimExpr(dim) for dim in dims))
