"""A torch function on its way to linalg: what stands for its values, and short ways to append structured operations.

A tensor is an `Array`: its builtin tensor, torch's dtype, and the sizes of its dims as products of run-time sizes, so that a
view of `[B, S, H*D]` as `[B, S, H, D]` is seen to split one dim whatever B and S are. Python numbers are `Number`s, of which an
int may have a `Size`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from xdsl.dialects import arith, linalg, tensor
from xdsl.dialects.builtin import (
    DYNAMIC_INDEX,
    AffineMapAttr,
    ArrayAttr,
    DenseArrayBase,
    IntegerAttr,
    TensorType,
)
from xdsl.dialects.linalg import IteratorTypeAttr
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.ir.affine import AffineConstantExpr, AffineDimExpr, AffineExpr, AffineMap

from attnc.dialects.torch import si64
from attnc.transforms.convert_torch_to_linalg_ext_region import f32, f64, i64
from attnc.transforms.convert_torch_to_linalg_ext_region import index as index_type
from attnc.transforms.convert_torch_to_linalg_ext_table import Unsupported
from attnc.transforms.convert_torch_to_linalg_ext_values import CARRIED, Number, Scalar, ScalarBuilder


@dataclass(frozen=True)
class Size:
    """`coefficient * atoms[0] * atoms[1] * …`; an atom is the number of a run-time size in its graph."""

    coefficient: int
    atoms: tuple[int, ...] = ()

    @property
    def static(self) -> int | None:
        """The size, where it is known now."""
        return self.coefficient if not self.atoms or not self.coefficient else None

    def __mul__(self, other: Size) -> Size:
        return Size(self.coefficient * other.coefficient, tuple(sorted(self.atoms + other.atoms)))

    def divided(self, other: Size) -> Size | None:
        """The quotient where it is exact whatever the atoms are."""
        rest = list(self.atoms)
        for atom in other.atoms:
            if atom not in rest:
                return None
            rest.remove(atom)
        if other.coefficient == 0 or self.coefficient % other.coefficient:
            return None
        return Size(self.coefficient // other.coefficient, tuple(rest))


ONE = Size(1)


def product(sizes: Sequence[Size]) -> Size:
    return math.prod(sizes, start=ONE)


@dataclass(eq=False)
class Array:
    """A tensor. `constant`: every element has this value, and `value` need not be looked at."""

    value: SSAValue
    dtype: Attribute
    dims: tuple[Size, ...]
    constant: int | float | None = None

    @property
    def rank(self) -> int:
        return len(self.dims)


@dataclass(slots=True, eq=False)
class SizeNumber(Number):
    """A Python int that is computed from sizes."""

    size: Size = ONE


GraphValue: TypeAlias = "Array | Number | list | str | None"


@dataclass
class Graph:
    """The new function's block, and what stands for each value of the old one."""

    block: Block
    values: dict[SSAValue, GraphValue] = field(default_factory=dict)
    location: Attribute | None = None  # of the operation that is being converted

    def __post_init__(self) -> None:
        self.r = ScalarBuilder(self.block, lambda source, dim: self.index(self.dim(source, dim)))
        self._atoms: list[SSAValue] = []
        self._atom_of: dict[SSAValue, int] = {}
        self._dims: dict[SSAValue, tuple[Size, ...]] = {}

    # -- sizes --------------------------------------------------------------------------------------------------------

    def atom(self, value: SSAValue) -> Size:
        """A run-time `index` as a size."""
        known = self.r.literal(value)
        if known is not None:
            return Size(int(known))
        if value not in self._atom_of:
            self._atom_of[value] = len(self._atoms)
            self._atoms.append(value)
        return Size(1, (self._atom_of[value],))

    def index(self, size: Size) -> SSAValue:
        """A size as an `index` value."""
        result: SSAValue | None = None
        for atom in size.atoms if size.coefficient else ():
            result = self._atoms[atom] if result is None else self.r.multiply(result, self._atoms[atom])
        if result is None:
            return self.r.constant(index_type, size.coefficient)
        return self.r.multiply(result, self.r.constant(index_type, size.coefficient))

    def dim(self, source: SSAValue, dim: int) -> Size:
        """The size of a dim of a builtin tensor of this graph."""
        return self._dims[source][dim]

    def sum(self, sizes: Sequence[Size]) -> Size:
        """The sum of sizes."""
        if len({size.atoms for size in sizes}) == 1:
            return Size(sum(size.coefficient for size in sizes), sizes[0].atoms)
        total = self.index(sizes[0])
        for size in sizes[1:]:
            total = self.r.add(total, self.index(size))
        return self.atom(total)

    def size_of(self, number: object, what: str = "a size") -> Size:
        """A Python int as a size."""
        if isinstance(number, SizeNumber):
            return number.size
        if isinstance(number, Number) and number.constant is not None:
            return Size(int(number.constant))
        if isinstance(number, Number) and number.value is not None:
            return self.atom(self.r.index_of(self.r.convert(number, si64)))
        raise Unsupported(f"{what} must be a number")

    def number_of(self, size: Size) -> Number:
        """A size as a Python int."""
        if size.static is not None:
            return Number(si64, size.static)
        return SizeNumber(si64, None, self.r.cast(arith.IndexCastOp, self.index(size), i64), size)

    # -- tensors ------------------------------------------------------------------------------------------------------

    def array(self, value: SSAValue, dtype: Attribute, dims: Sequence[Size], hint: str | None = None) -> Array:
        self._dims[value] = tuple(dims)
        if hint is not None and value.name_hint is None:
            value.name_hint = hint
        return Array(value, dtype, tuple(dims))

    def type_of(self, element: Attribute, dims: Sequence[Size]) -> TensorType:
        return TensorType(element, [DYNAMIC_INDEX if size.static is None else size.static for size in dims])

    def add(self, op: Operation) -> SSAValue:
        """Appends an operation that stands for the torch operation at hand."""
        if self.location is not None:
            op.attributes["attnc.loc"] = self.location
        self.block.add_op(op)
        return op.results[0]

    def empty(self, dims: Sequence[Size], element: Attribute) -> SSAValue:
        dynamic = [self.index(size) for size in dims if size.static is None]
        return self.r.emit(tensor.EmptyOp, dynamic, self.type_of(element, dims))

    def filled(self, dims: Sequence[Size], element: Attribute, value: int | float | SSAValue) -> SSAValue:
        scalar = value if isinstance(value, SSAValue) else self.r.constant(element, value)
        op = linalg.FillOp([scalar], [self.empty(dims, element)])
        self.block.add_op(op)
        return op.results[0]

    def full(self, dtype: Attribute, dims: Sequence[Size], value: int | float) -> Array:
        """A tensor of one known value."""
        scalar = self.r.number(dtype, value)
        result = self.array(self.filled(dims, CARRIED[dtype], scalar), dtype, dims)
        result.constant = self.r.literal(scalar)
        return result

    def generic(
        self,
        inputs: Sequence[SSAValue],
        maps: Sequence[AffineMap],
        init: SSAValue,
        init_map: AffineMap,
        body: Callable[[ScalarBuilder, Sequence[SSAValue]], SSAValue],
        reductions: Sequence[int] = (),
    ) -> SSAValue:
        """A `linalg.generic` of one result. `body(r, elements)` gives what is yielded; the last element is the init's."""
        elements = [element_type(value) for value in (*inputs, init)]
        block = Block(arg_types=elements)
        for argument in block.args[:-1]:
            argument.name_hint = "in"
        block.args[-1].name_hint = "out"
        r = ScalarBuilder(block, self.r.size)
        block.add_op(linalg.YieldOp(body(r, block.args)))
        r.finish()
        return self.structured(inputs, maps, init, init_map, block, reductions)

    def structured(
        self,
        inputs: Sequence[SSAValue],
        maps: Sequence[AffineMap],
        init: SSAValue,
        init_map: AffineMap,
        body: Block,
        reductions: Sequence[int] = (),
    ) -> SSAValue:
        """A `linalg.generic` of a finished body."""
        kinds = [
            IteratorTypeAttr.reduction() if d in reductions else IteratorTypeAttr.parallel() for d in range(init_map.num_dims)
        ]
        attributes = [AffineMapAttr(map_) for map_ in (*maps, init_map)]
        return self.add(linalg.GenericOp(inputs, [init], Region(body), attributes, kinds, [init.type]))

    # -- reshapes -----------------------------------------------------------------------------------------------------

    def collapse(self, x: Array, groups: Sequence[Sequence[int]]) -> Array:
        """Merges neighbouring dims."""
        dims = [product([x.dims[d] for d in group]) for group in groups]
        op = tensor.CollapseShapeOp.create(
            operands=[x.value],
            properties={"reassociation": _reassociation(groups)},
            result_types=[self.type_of(CARRIED[x.dtype], dims)],
        )
        return self.array(self.add(op), x.dtype, dims)

    def expand(self, x: Array, groups: Sequence[Sequence[int]], dims: Sequence[Size]) -> Array:
        """Splits dims: dim i of `x` becomes the dims `groups[i]` of the result."""
        type_ = self.type_of(CARRIED[x.dtype], dims)
        op = tensor.ExpandShapeOp(
            x.value,
            [self.index(size) for size in dims if size.static is None],
            _reassociation(groups),
            DenseArrayBase.from_list(i64, list(type_.get_shape())),
            type_,
        )
        return self.array(self.add(op), x.dtype, dims)

    def cast_to(self, x: Array, type_: TensorType) -> SSAValue:
        """The tensor as one of another, equivalent type."""
        return x.value if x.value.type == type_ else self.add(tensor.CastOp(x.value, type_))


def _reassociation(groups: Sequence[Sequence[int]]) -> ArrayAttr[ArrayAttr[IntegerAttr]]:
    return ArrayAttr(ArrayAttr(IntegerAttr(dim, i64) for dim in group) for group in groups)


def dims_map(rank: int, dims: Sequence[int | None]) -> AffineMap:
    """The map that picks `dims` of a domain; None is the constant 0."""
    expressions: list[AffineExpr] = [AffineConstantExpr(0) if dim is None else AffineDimExpr(dim) for dim in dims]
    return AffineMap(rank, 0, tuple(expressions))


def broadcast_map(x: Sequence[Size], result: Sequence[Size]) -> AffineMap:
    """How an operand of sizes `x` is read where it broadcasts to `result`: 0 along a dim of size 1 that is wider there."""
    first = len(result) - len(x)
    dims = [None if size == ONE and result[first + d] != ONE else first + d for d, size in enumerate(x)]
    return dims_map(len(result), dims)


def broadcast_sizes(shapes: Sequence[Sequence[Size]]) -> tuple[Size, ...]:
    """The sizes of what comes out where operands of these sizes meet. Sizes known only at run time are taken to agree, as
    torch.export guards that they do."""
    rank = max((len(shape) for shape in shapes), default=0)
    result = [ONE] * rank
    for shape in shapes:
        for d, size in enumerate(shape, rank - len(shape)):
            if result[d] == ONE or (result[d].static is None and size.static not in (None, 1)):
                result[d] = size
    return tuple(result)


def scalar_of(r: ScalarBuilder, x: Array, element: SSAValue | None) -> Scalar:
    """What a body sees of a tensor: its element, or its constant."""
    value = r.number(x.dtype, x.constant) if x.constant is not None else element
    assert value is not None
    return Scalar(value, x.dtype, of_tensor=x.rank > 0)


def element_type(value: SSAValue) -> Attribute:
    return value.type.element_type if isinstance(value.type, TensorType) else value.type


def computed_type(dtype: Attribute) -> Attribute:
    """The type in which sums of a float dtype are taken: f64 for f64, else f32."""
    return f64 if dtype == f64 else f32
