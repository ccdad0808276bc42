"""IREE's `iree_linalg_ext` dialect, as much of it as attention needs.

An attention reads its operands through indexing maps over one iteration domain; what a dimension is for follows from the
maps (`attnc.analysis.roles`). The region gets one score, scaled and in natural units, and yields the score that enters the
softmax. `iree_linalg_ext.index` is a position in the whole domain. A mask operand acts after the region: integers kill
a score where they are 0, floats are added.

The generic form is printed, for it is the stable one; IREE's custom forms are read too. Both say whether there is a mask by the
number of operands alone.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self, cast

from xdsl.dialects.builtin import (
    AffineMapAttr,
    AnyFloat,
    ArrayAttr,
    DictionaryAttr,
    IndexType,
    IntegerAttr,
    IntegerType,
    TensorType,
    i64,
)
from xdsl.ir import Attribute, Dialect, Operation, Region, SSAValue
from xdsl.ir.affine import AffineMap
from xdsl.irdl import (
    IRDLOperation,
    Operand,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    opt_prop_def,
    prop_def,
    region_def,
    result_def,
    traits_def,
)
from xdsl.parser import Parser
from xdsl.traits import IsTerminator, Pure
from xdsl.utils.exceptions import VerifyException

from attnc.analysis.roles import Dims, Roles, map_dims, map_results, roles_of

_INDEX = IndexType()


class OverDomain:
    """An operation over an iteration domain, in whose regions `iree_linalg_ext.index` is a position."""

    @property
    def maps(self) -> tuple[AffineMap, ...]:
        """One indexing map an operand, in the operands' order."""
        raise NotImplementedError


@irdl_op_definition
class YieldOp(IRDLOperation):
    """Ends an attention's region: the score that enters the softmax."""

    name = "iree_linalg_ext.yield"
    value = operand_def()
    traits = traits_def(IsTerminator())

    def __init__(self, value: SSAValue | Operation):
        super().__init__(operands=[value])

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        value = parser.parse_unresolved_operand()
        parser.parse_punctuation(":")
        return cls(parser.resolve_operand(value, parser.parse_type()))


@irdl_op_definition
class IndexOp(IRDLOperation):
    """Where the region stands along dimension `dim` of the attention's whole iteration domain."""

    name = "iree_linalg_ext.index"
    dim = prop_def(IntegerAttr)
    result = result_def(_INDEX)
    traits = traits_def(Pure())

    def __init__(self, dim: int):
        super().__init__(properties={"dim": IntegerAttr(dim, i64)}, result_types=[_INDEX])

    @property
    def dimension(self) -> int:
        return self.dim.value.data

    def verify_(self):
        parent = self.parent_op()
        while parent is not None and not isinstance(parent, OverDomain):
            parent = parent.parent_op()
        if parent is None:
            raise VerifyException("iree_linalg_ext.index: stands in no attention's region")
        if not 0 <= self.dimension < parent.maps[0].num_dims:
            raise VerifyException(f"iree_linalg_ext.index: the domain has no dimension {self.dimension}")

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        dim = parser.parse_integer()
        parser.parse_punctuation(":")
        parser.parse_type()
        return cls(dim)


class _AttentionBase(IRDLOperation, OverDomain, ABC):
    """What attention and online_attention have in common: reading, and the rules about maps, shapes and the region."""

    if TYPE_CHECKING:  # each op declares all its operands itself, for xdsl orders a subclass's before its base's
        query: Operand
        key: Operand
        value: Operand
        scale: Operand
        mask: Operand | None
    indexing_maps = prop_def(ArrayAttr[AffineMapAttr])
    decomposition_config = opt_prop_def(DictionaryAttr)
    region = region_def("single_block")

    @property
    def inits(self) -> Sequence[SSAValue]:
        """The outputs' initial values."""
        raise NotImplementedError

    @property
    def maps(self) -> tuple[AffineMap, ...]:
        """One indexing map an operand, in the operands' order."""
        return tuple(attribute.data for attribute in self.indexing_maps)

    @property
    def roles(self) -> Roles:
        """What each dimension of the domain is for."""
        dims = [map_dims(map_) for map_ in self.maps]
        return roles_of(dims[0], dims[1], dims[2], dims[-len(self.inits)])

    @property
    def extents(self) -> list[tuple[SSAValue, int]]:
        """For each dimension of the domain an operand, and its dimension, that has that size."""
        found: dict[int, tuple[SSAValue, int]] = {}
        for operand, map_ in zip(self.operands, self.maps, strict=True):
            for position, dim in enumerate(map_results(map_)):
                if dim is not None:
                    found.setdefault(dim, (operand, position))
        return [found[dim] for dim in range(len(found))]

    def verify_(self):
        dims = self._verify_maps()
        self._verify_shapes()
        self._verify_roles(dims)
        self._verify_region()

    def _refuse(self, problem: str) -> VerifyException:
        return VerifyException(f"{self.name}: {problem}")

    def _verify_maps(self) -> list[Dims]:
        maps = self.maps
        if len(maps) != len(self.operands):
            raise self._refuse(f"{len(self.operands)} operands, but {len(maps)} indexing maps")
        if len({map_.num_dims for map_ in maps}) != 1:
            raise self._refuse("the indexing maps must all start from one iteration domain")
        try:
            return [map_dims(map_) for map_ in maps]
        except ValueError as error:
            raise self._refuse(str(error)) from None

    def _verify_shapes(self) -> None:
        sizes: dict[int | None, int] = {None: 1}
        for position, (operand, map_) in enumerate(zip(self.operands, self.maps, strict=True)):
            picked = map_results(map_)
            shape = operand.type.get_shape() if isinstance(operand.type, TensorType) else ()
            if len(shape) != len(picked):
                raise self._refuse(f"operand {position} has rank {len(shape)}, its indexing map {len(picked)} results")
            for dim, size in zip(picked, shape, strict=True):
                if size >= 0 and sizes.setdefault(dim, size) != size:
                    what = "a unit dimension" if dim is None else f"dimension d{dim}"
                    raise self._refuse(f"{what} is {sizes[dim]} in one place and {size} in operand {position}")
        if [init.type for init in self.inits] != [result.type for result in self.results]:
            raise self._refuse("the results must have the types of the initial values")

    def _verify_roles(self, dims: list[Dims]) -> None:
        inits = len(self.inits)
        roles = roles_of(dims[0], dims[1], dims[2], dims[-inits])
        everywhere = {dim for part in (roles.score, roles.k1, roles.n) for dim in part}
        if everywhere != set(range(self.maps[0].num_dims)):
            unused = sorted(set(range(self.maps[0].num_dims)) - everywhere)
            raise self._refuse(f"dimensions {unused} of the domain belong to neither query, key nor value")
        if not roles.k1 or not roles.k2:
            raise self._refuse("query and key must share a dimension to sum over, and key and value must share the keys")
        if dims[3]:
            raise self._refuse("the scale is a scalar: its map has no results")
        out = set(roles.batch + roles.m + roles.n)
        if set(dims[-inits]) != out:
            raise self._refuse(f"the output must be over dimensions {sorted(out)} (batch, rows, value columns)")
        if any(set(row) != set(roles.row) for row in dims[len(dims) - inits + 1 :]):
            raise self._refuse(f"max and sum must be over dimensions {sorted(roles.row)} (batch, rows)")
        if self.mask is not None:
            if not set(dims[4]) <= set(roles.score):
                raise self._refuse(f"the mask may only be over dimensions {sorted(roles.score)} (batch, rows, keys)")
            element = cast(TensorType, self.mask.type).element_type
            if not isinstance(element, IntegerType | AnyFloat):
                raise self._refuse("the mask's elements are integers (0 kills a score) or floats (added to it)")

    def _verify_region(self) -> None:
        arguments = [argument.type for argument in self.region.block.args]
        if len(arguments) != 1 or not isinstance(arguments[0], AnyFloat):
            raise self._refuse("the region takes one argument, the score, of a float type")
        last = self.region.block.last_op
        if not isinstance(last, YieldOp) or last.value.type != arguments[0]:
            raise self._refuse(f"the region must yield one {arguments[0]}, by iree_linalg_ext.yield")

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        """IREE's custom form: `<indexing_maps = […]>`, `<{indexing_maps = […]}>` or `{indexing_maps = […]}`, then
        `ins(…) outs(…) region -> types`."""
        position = parser.pos
        attributes: dict[str, Attribute] = {}
        if parser.parse_optional_punctuation("<"):
            in_braces = parser.parse_optional_attr_dict()
            attributes |= in_braces
            while not in_braces:
                name = parser.parse_identifier()
                parser.parse_punctuation("=")
                attributes[name] = parser.parse_attribute()
                if not parser.parse_optional_punctuation(","):
                    break
            parser.parse_punctuation(">")
        attributes |= parser.parse_optional_attr_dict()
        properties = {name: attributes.pop(name) for name in ("indexing_maps", "decomposition_config") if name in attributes}
        if "indexing_maps" not in properties:
            parser.raise_error(f"{cls.name}: needs indexing_maps", position, parser.pos)
        operands = _parse_operands(parser, "ins") + _parse_operands(parser, "outs")
        region = parser.parse_region()
        results: list[Attribute] = []
        if parser.parse_optional_punctuation("->"):
            if (listed := parser.parse_optional_comma_separated_list(parser.Delimiter.PAREN, parser.parse_type)) is not None:
                results += listed
            else:
                results += parser.parse_comma_separated_list(parser.Delimiter.NONE, parser.parse_type)
        return cls.create(
            operands=operands, properties=properties, attributes=attributes, regions=[region], result_types=results
        )


def _parse_operands(parser: Parser, keyword: str) -> list[SSAValue]:
    parser.parse_keyword(keyword)
    with parser.in_parens():
        position = parser.pos
        names = parser.parse_comma_separated_list(parser.Delimiter.NONE, parser.parse_unresolved_operand)
        parser.parse_punctuation(":")
        types = parser.parse_comma_separated_list(parser.Delimiter.NONE, parser.parse_type)
        return list(parser.resolve_operands(names, types, position))


def _maps(maps: Sequence[AffineMap] | ArrayAttr[AffineMapAttr]) -> ArrayAttr[AffineMapAttr]:
    return maps if isinstance(maps, ArrayAttr) else ArrayAttr([AffineMapAttr(map_) for map_ in maps])


@irdl_op_definition
class AttentionOp(_AttentionBase):
    """`softmax(region(scale · query · keyᵀ)) · value`, normalised.

    Operands: query, key, value, scale, [mask], init; six operands mean a mask, five none. `indexing_maps` has a map for each.
    The result has the type of `init`, whose contents are ignored.
    """

    name = "iree_linalg_ext.attention"
    query = operand_def(TensorType)
    key = operand_def(TensorType)
    value = operand_def(TensorType)
    scale = operand_def(AnyFloat)
    mask = opt_operand_def(TensorType)
    init = operand_def(TensorType)
    result = result_def(TensorType)

    def __init__(
        self,
        query: SSAValue,
        key: SSAValue,
        value: SSAValue,
        scale: SSAValue,
        init: SSAValue,
        indexing_maps: Sequence[AffineMap] | ArrayAttr[AffineMapAttr],
        region: Region,
        mask: SSAValue | None = None,
    ):
        super().__init__(
            operands=[query, key, value, scale, [mask] if mask else [], init],
            properties={"indexing_maps": _maps(indexing_maps)},
            regions=[region],
            result_types=[init.type],
        )

    @property
    def inits(self) -> Sequence[SSAValue]:
        return (self.init,)


@irdl_op_definition
class OnlineAttentionOp(_AttentionBase):
    """Attention as a running sum: `acc` is the weighted sum of value rows, not yet divided by `sum`, relative to `max`.

    Operands: query, key, value, scale, [mask], acc, max, sum; eight operands mean a mask, seven none. The results continue the
    initial values: for `max` in natural units, `acc' = acc·exp(max − max') + Σ exp(s − max')·value`, `sum'` likewise.
    """

    name = "iree_linalg_ext.online_attention"
    query = operand_def(TensorType)
    key = operand_def(TensorType)
    value = operand_def(TensorType)
    scale = operand_def(AnyFloat)
    mask = opt_operand_def(TensorType)
    acc = operand_def(TensorType)
    max = operand_def(TensorType)
    sum = operand_def(TensorType)
    acc_result = result_def(TensorType)
    max_result = result_def(TensorType)
    sum_result = result_def(TensorType)

    def __init__(
        self,
        query: SSAValue,
        key: SSAValue,
        value: SSAValue,
        scale: SSAValue,
        acc: SSAValue,
        max: SSAValue,
        sum: SSAValue,
        indexing_maps: Sequence[AffineMap] | ArrayAttr[AffineMapAttr],
        region: Region,
        mask: SSAValue | None = None,
    ):
        super().__init__(
            operands=[query, key, value, scale, [mask] if mask else [], acc, max, sum],
            properties={"indexing_maps": _maps(indexing_maps)},
            regions=[region],
            result_types=[acc.type, max.type, sum.type],
        )

    @property
    def inits(self) -> Sequence[SSAValue]:
        return (self.acc, self.max, self.sum)


AttentionLike = AttentionOp | OnlineAttentionOp

LinalgExt = Dialect("iree_linalg_ext", [AttentionOp, OnlineAttentionOp, IndexOp, YieldOp])
