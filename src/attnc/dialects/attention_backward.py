"""The derivative of attention as one operation: the `attnc` dialect.

`attnc.attention_backward` reads what the forward pass read, what it gave (`out`, `lse`) and the gradients of that (`d_out`,
`d_lse`), all through indexing maps over the forward's iteration domain. With p = exp(s - lse), the weights, and 0 where s =
-inf,

    d_value = pᵀ d_out        d_p = d_out valueᵀ        d_s = p (d_p - rowsum(d_out out) + d_lse)
    d_score = derivative(score, d_s)       d_query = scale d_score key      d_key = scale d_scoreᵀ query

Two regions say what the mods do to one score. `region` is the forward's own: score -> s. `derivative` gets (score, d_s, live),
live being s != -inf, and yields d_score; what it finds for captured tensors it adds to their gradients by `attnc.accumulate`.
Only what is asked for is a result: the names in `gradients` (of query, key, value, scale), then a gradient for each of
`captures`. Sums over many tasks (captured tensors, scale) are f64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from xdsl.dialects.builtin import (
    AffineMapAttr,
    AnyFloat,
    ArrayAttr,
    Float64Type,
    MemRefType,
    StringAttr,
    TensorType,
    i1,
)
from xdsl.ir import Attribute, Dialect, Region, SSAValue
from xdsl.ir.affine import AffineMap
from xdsl.irdl import (
    AttrSizedOperandSegments,
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    prop_def,
    region_def,
    traits_def,
    var_operand_def,
    var_result_def,
)
from xdsl.traits import IsTerminator
from xdsl.utils.exceptions import VerifyException

from attnc.analysis.roles import Roles, map_dims, map_results, roles_of
from attnc.dialects.linalg_ext import OverDomain, YieldOp

GRADIENTS = ("query", "key", "value", "scale")
"""The operands other than captured tensors that may have a gradient, in the order of the results."""


@irdl_op_definition
class DerivativeYieldOp(IRDLOperation):
    """Ends a derivative: the gradient of the score, or nothing where nobody asks for it."""

    name = "attnc.yield"
    values = var_operand_def()
    traits = traits_def(IsTerminator())

    def __init__(self, values: Sequence[SSAValue] = ()):
        super().__init__(operands=[values])


@irdl_op_definition
class AccumulateOp(IRDLOperation):
    """Adds a pair's share to the gradient of a captured tensor, at the (raw torch) index at which the pair read the tensor:
    a negative one counts from the end."""

    name = "attnc.accumulate"
    value = operand_def(AnyFloat)
    target = operand_def()
    indices = var_operand_def()

    def __init__(self, value: SSAValue, target: SSAValue, indices: Sequence[SSAValue]):
        super().__init__(operands=[value, target, indices])

    def verify_(self):
        type_ = self.target.type
        if not isinstance(type_, TensorType | MemRefType):
            raise VerifyException(f"attnc.accumulate: into {type_}, which is no tensor")
        if len(self.indices) != len(type_.get_shape()):
            raise VerifyException(f"attnc.accumulate: {len(self.indices)} indices into {type_}")


@irdl_op_definition
class AttentionBackwardOp(IRDLOperation, OverDomain):
    """The gradients of attention (see above).

    Operands: query, key, value, scale, out, lse, d_out, [d_lse], then the captured tensors whose gradients are wanted.
    `indexing_maps` has one map for each operand but the captures, then one for each of `gradients`. On tiles (inside a
    `tile.kernel`) two more operands, `carried`, are what is added to: the gradients of key and value as far as they are wanted,
    and captures are the buffers of their gradients, which have no results.
    """

    name = "attnc.attention_backward"
    query = operand_def(TensorType)
    key = operand_def(TensorType)
    value = operand_def(TensorType)
    scale = operand_def(AnyFloat)
    out = operand_def(TensorType)
    lse = operand_def(TensorType)
    d_out = operand_def(TensorType)
    d_lse = opt_operand_def(TensorType)
    captures = var_operand_def()
    carried = var_operand_def(TensorType)
    results_ = var_result_def(TensorType)
    indexing_maps = prop_def(ArrayAttr[AffineMapAttr])
    gradients = prop_def(ArrayAttr[StringAttr])
    region = region_def("single_block")
    derivative = region_def("single_block")
    irdl_options = (AttrSizedOperandSegments(as_property=True),)

    def __init__(
        self,
        operands: Sequence[SSAValue],
        d_lse: SSAValue | None,
        captures: Sequence[SSAValue],
        indexing_maps: Sequence[AffineMap],
        gradients: Sequence[str],
        result_types: Sequence[Attribute],
        region: Region,
        derivative: Region,
        carried: Sequence[SSAValue] = (),
    ):
        """`operands` are query, key, value, scale, out, lse and d_out."""
        super().__init__(
            operands=[*operands, [d_lse] if d_lse is not None else [], captures, carried],
            properties={
                "indexing_maps": ArrayAttr([AffineMapAttr(map_) for map_ in indexing_maps]),
                "gradients": ArrayAttr([StringAttr(name) for name in gradients]),
            },
            regions=[region, derivative],
            result_types=[list(result_types)],
        )

    @property
    def maps(self) -> tuple[AffineMap, ...]:
        return tuple(attribute.data for attribute in self.indexing_maps)

    @property
    def wanted(self) -> tuple[str, ...]:
        """Which of query, key, value and scale have a gradient among the results, in their order."""
        return tuple(name.data for name in self.gradients)

    @property
    def read(self) -> list[SSAValue]:
        """The operands that are read through indexing maps."""
        last = [] if self.d_lse is None else [self.d_lse]
        return [self.query, self.key, self.value, self.scale, self.out, self.lse, self.d_out, *last]

    @property
    def roles(self) -> Roles:
        """What each dimension of the domain is for."""
        dims = [map_dims(map_) for map_ in self.maps]
        return roles_of(dims[0], dims[1], dims[2], dims[4])

    def result_of(self, name: str) -> SSAValue | None:
        """The gradient of query, key, value or scale, if it is wanted."""
        return self.results[self.wanted.index(name)] if name in self.wanted else None

    def verify_(self):
        if list(self.wanted) != [name for name in GRADIENTS if name in self.wanted] or len(set(self.wanted)) != len(
            self.wanted
        ):
            raise self._refuse(f"gradients are some of {', '.join(GRADIENTS)}, in this order; got {', '.join(self.wanted)}")
        self._verify_maps()
        self._verify_roles()
        self._verify_regions()

    def _refuse(self, problem: str) -> VerifyException:
        return VerifyException(f"{self.name}: {problem}")

    @property
    def _on_tiles(self) -> bool:
        return any(isinstance(capture.type, MemRefType) for capture in self.captures) or bool(self.carried)

    def _verify_maps(self) -> None:
        read, maps = self.read, self.maps
        if len(maps) != len(read) + len(self.wanted):
            raise self._refuse(f"{len(read)} operands and {len(self.wanted)} gradients, but {len(maps)} indexing maps")
        if len({map_.num_dims for map_ in maps}) != 1:
            raise self._refuse("the indexing maps must all start from one iteration domain")
        sizes: dict[int | None, int] = {None: 1}
        results = list(self.results)[: len(self.wanted)]
        if len(results) != len(self.wanted):
            raise self._refuse(f"{len(self.wanted)} gradients, but {len(self.results)} results")
        for value, map_ in zip([*read, *results], maps, strict=True):
            try:
                picked = map_results(map_)
            except ValueError as error:
                raise self._refuse(str(error)) from None
            shape = value.type.get_shape() if isinstance(value.type, TensorType) else ()
            if len(shape) != len(picked):
                raise self._refuse(f"{value.type} has rank {len(shape)}, its indexing map {len(picked)} results")
            for dim, size in zip(picked, shape, strict=True):
                if size >= 0 and sizes.setdefault(dim, size) != size:
                    what = "a unit dimension" if dim is None else f"dimension d{dim}"
                    raise self._refuse(f"{what} is {sizes[dim]} in one place and {size} in another")
        rest = [result.type for result in list(self.results)[len(self.wanted) :]]
        if rest and len(rest) != len(self.captures):
            raise self._refuse(f"{len(self.captures)} captures, but {len(rest)} gradients of captures")
        if not rest and self.captures and not self._on_tiles:
            raise self._refuse("a gradient for each capture is missing")
        for capture, type_ in zip(self.captures, rest, strict=False):
            shape = list(cast(TensorType, capture.type).get_shape()) or [1]
            gradient = cast(TensorType, type_)
            if list(gradient.get_shape()) != shape or not isinstance(gradient.element_type, Float64Type):
                raise self._refuse(f"the gradient of a captured {capture.type} is {type_}, not of its shape in f64")

    def _verify_roles(self) -> None:
        dims = [map_dims(map_) for map_ in self.maps]
        roles = self.roles
        if not roles.k1 or not roles.k2:
            raise self._refuse("query and key must share a dimension to sum over, and key and value must share the keys")
        if dims[3]:
            raise self._refuse("the scale is a scalar: its map has no results")
        out = set(roles.batch + roles.m + roles.n)
        for what, position in (("out", 4), ("d_out", 6)):
            if set(dims[position]) != out:
                raise self._refuse(f"{what} must be over dimensions {sorted(out)} (batch, rows, value columns)")
        for what, position in (("lse", 5), ("d_lse", 7))[: 1 + (self.d_lse is not None)]:
            if set(dims[position]) != set(roles.row):
                raise self._refuse(f"{what} must be over dimensions {sorted(roles.row)} (batch, rows)")
        for name, found in zip(self.wanted, dims[len(self.read) :], strict=True):
            wanted = dims[GRADIENTS.index(name)]
            if found != wanted and not (name == "scale" and set(found) <= set(roles.row)):  # on tiles, a part for each row
                raise self._refuse(f"the gradient of {name} is over dimensions {list(found)}, {name} over {list(wanted)}")

    def _verify_regions(self) -> None:
        arguments = [argument.type for argument in self.region.block.args]
        if len(arguments) != 1 or not isinstance(arguments[0], AnyFloat):
            raise self._refuse("the region takes one argument, the score, of a float type")
        score = arguments[0]
        last = self.region.block.last_op
        if not isinstance(last, YieldOp) or last.value.type != score:
            raise self._refuse(f"the region must yield one {score}, by iree_linalg_ext.yield")
        block = self.derivative.block
        if [argument.type for argument in block.args] != [score, score, i1]:
            raise self._refuse(
                f"the derivative takes the score, the gradient of what it became, and whether it is live: "
                f"({score}, {score}, i1)"
            )
        last = block.last_op
        if not isinstance(last, DerivativeYieldOp) or [value.type for value in last.values] not in ([], [score]):
            raise self._refuse(f"the derivative must yield one {score} or nothing, by attnc.yield")
        if not last.values and {"query", "key", "scale"} & set(self.wanted):
            raise self._refuse("the gradients of query, key and scale need the score's, which the derivative does not yield")
        for op in block.walk():
            if isinstance(op, AccumulateOp) and op.target not in self.captures:
                raise self._refuse("attnc.accumulate into a tensor that is not among the captures")


AttncDialect = Dialect("attnc", [AttentionBackwardOp, AccumulateOp, DerivativeYieldOp])
