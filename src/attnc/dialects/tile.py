"""The `tile` dialect: attention (or anything shaped like it) as blocks, without registers, layouts or threads.

A `tile.kernel` holds one `tile.grid`; a point of the grid is a task. Inside, values are

* scalars (`index`, `i32`, `f32`, ...), computed with `arith`,
* **tiles**, `tensor<RxCxT>` of static shape: `Rx1` is a value for each row, `1xC` one for each column,
* **buffers**, `memref<?x?x64xf32, strided<[?, ?, 1]>>`: the kernel's arguments, sized and strided at run time.

Every operation on a tile is *row-local*: row `r` of the result reads row `r` of its `R`-row operands. The two exceptions
are `tile.dot`, whose right-hand side is read whole, and `tile.accumulate`. A backend may therefore run a body on a few rows
at a time (the CPU's row strips) or on all at once (a GPU's program).

Element (r, c) of an operand of shape `Rx1` or `1xC` is its (r, 0) or (0, c): shapes broadcast as in NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

from xdsl.dialects.builtin import (
    ArrayAttr,
    DenseArrayBase,
    IndexType,
    IntegerAttr,
    IntegerType,
    MemRefType,
    StringAttr,
    SymbolRefAttr,
    TensorType,
    UnitAttr,
    i32,
    i64,
)
from xdsl.ir import Attribute, Block, Dialect, Operation, Region, SSAValue
from xdsl.irdl import (
    AttrSizedOperandSegments,
    IRDLOperation,
    attr_def,
    irdl_op_definition,
    operand_def,
    opt_attr_def,
    opt_operand_def,
    region_def,
    result_def,
    traits_def,
    var_operand_def,
    var_region_def,
    var_result_def,
)
from xdsl.parser import Parser
from xdsl.printer import Printer
from xdsl.traits import IsolatedFromAbove, IsTerminator, SymbolOpInterface
from xdsl.utils.exceptions import VerifyException

EMPTY, FULL, PARTIAL = 0, 1, 2
NONPOSITIVE = "attnc.nonpositive"
"""Unit attribute of a `math.exp2` whose operand is at most 0, or NaN: what softmax needs, at half the price."""
CLASS_NAMES = ("empty", "full", "partial")
_INDEX = IndexType()


def tile_type(rows: int, columns: int, element: Attribute) -> TensorType:
    """`tensor<rows x columns x element>`."""
    return TensorType(element, [rows, columns])


def read_beside(value: SSAValue, other: SSAValue) -> bool:
    """Whether every reader of `value` is a `tile.map` that reads `other`, too."""
    return all(isinstance(use.operation, MapOp) and other in use.operation.inputs for use in value.uses)


def shape_of(value: SSAValue) -> tuple[int, int]:
    """The (rows, columns) of a tile."""
    if not isinstance(value.type, TensorType):
        raise VerifyException(f"expected a tile, got {value.type}")
    rows, columns = value.type.get_shape()
    return rows, columns


def _check_tile(op: Operation, value: SSAValue, what: str) -> tuple[int, int]:
    type_ = value.type
    if not isinstance(type_, TensorType) or len(type_.get_shape()) != 2 or any(d < 1 for d in type_.get_shape()):
        raise VerifyException(f"{op.name}: {what} must be a tile, a static tensor<RxCxT>; got {type_}")
    return shape_of(value)


@irdl_op_definition
class YieldOp(IRDLOperation):
    """Ends a region and hands its values out."""

    name = "tile.yield"
    values = var_operand_def()
    traits = traits_def(IsTerminator())
    assembly_format = "attr-dict ($values^ `:` type($values))?"

    def __init__(self, values: Sequence[SSAValue | Operation] = ()):
        super().__init__(operands=[values])


@irdl_op_definition
class KernelOp(IRDLOperation):
    """A kernel: its block arguments are buffers, numbers and launch parameters.

    `roles`, one word an argument, ties the arguments to the public function's: query, key, value, scale, capture, number,
    blocks (the classes of a BlockMask), out, lse, max, or group (a launch parameter). Without roles the kernel is called with
    its arguments in order, outputs included.
    """

    name = "tile.kernel"
    sym_name = attr_def(StringAttr)
    roles = opt_attr_def(ArrayAttr[StringAttr])
    body = region_def("single_block")
    traits = traits_def(SymbolOpInterface(), IsolatedFromAbove())

    def __init__(self, name: str, body: Region, roles: Sequence[str] | None = None):
        attributes: dict[str, Attribute] = {"sym_name": StringAttr(name)}
        if roles is not None:
            attributes["roles"] = ArrayAttr([StringAttr(role) for role in roles])
        super().__init__(attributes=attributes, regions=[body])

    def verify_(self):
        if self.roles is not None and len(self.roles) != len(self.body.block.args):
            raise VerifyException(f"tile.kernel: {len(self.roles)} roles for {len(self.body.block.args)} arguments")
        grids = [op for op in self.body.block.ops if isinstance(op, GridOp)]
        if len(grids) != 1:
            raise VerifyException(f"tile.kernel: expected one tile.grid in the body, found {len(grids)}")

    def print(self, printer: Printer):
        printer.print_string(" ")
        printer.print_symbol_name(self.sym_name)
        printer.print_string("(")
        printer.print_list(self.body.block.args, printer.print_block_argument)
        printer.print_string(") ")
        if self.roles is not None:
            printer.print_string("roles ")
            printer.print_attribute(self.roles)
            printer.print_string(" ")
        extra = {k: v for k, v in self.attributes.items() if k not in ("sym_name", "roles")}
        if extra:
            printer.print_string("attributes")
            printer.print_op_attributes(extra)
            printer.print_string(" ")
        printer.print_region(self.body, print_entry_block_args=False)

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        name = parser.parse_symbol_name()
        args = parser.parse_comma_separated_list(parser.Delimiter.PAREN, parser.parse_argument)
        attributes: dict[str, Attribute] = {"sym_name": name}
        if parser.parse_optional_keyword("roles"):
            attributes["roles"] = parser.parse_attribute()
        if parser.parse_optional_keyword("attributes"):
            attributes |= parser.parse_optional_attr_dict()
        body = parser.parse_region(args)
        return cls.create(attributes=attributes, regions=[body])


@irdl_op_definition
class DimOp(IRDLOperation):
    """The size of a buffer along one dimension."""

    name = "tile.dim"
    buffer = operand_def(MemRefType)
    dimension = attr_def(IntegerAttr)
    result = result_def(_INDEX)

    def __init__(self, buffer: SSAValue, dimension: int):
        super().__init__(operands=[buffer], attributes={"dimension": IntegerAttr(dimension, i64)}, result_types=[_INDEX])

    def verify_(self):
        assert isinstance(self.buffer.type, MemRefType)
        if not 0 <= self.dimension.value.data < self.buffer.type.get_num_dims():
            raise VerifyException(f"tile.dim: {self.buffer.type} has no dimension {self.dimension.value.data}")

    def print(self, printer: Printer):
        printer.print_string(" ")
        printer.print_operand(self.buffer)
        printer.print_string(f", {self.dimension.value.data} : ")
        printer.print_attribute(self.buffer.type)

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        buffer = parser.parse_unresolved_operand()
        parser.parse_punctuation(",")
        dimension = parser.parse_integer()
        parser.parse_punctuation(":")
        return cls(parser.resolve_operand(buffer, parser.parse_type()), dimension)


def _print_zip(printer: Printer, names: Sequence[SSAValue], values: Sequence[SSAValue]) -> None:
    def pair(names_values: tuple[SSAValue, SSAValue]) -> None:
        printer.print_ssa_value(names_values[0])
        printer.print_string(" = ")
        printer.print_operand(names_values[1])

    printer.print_list(zip(names, values, strict=True), pair)


@irdl_op_definition
class GridOp(IRDLOperation):
    """All tasks of a kernel, independent of each other, in any order and on any thread.

    The block arguments run from 0 to `bounds` in steps of `steps`. `descending` asks that later tasks start first,
    where they are the heavy ones.
    """

    name = "tile.grid"
    bounds = var_operand_def(_INDEX)
    steps = attr_def(DenseArrayBase[IntegerType])
    descending = opt_attr_def(UnitAttr)
    body = region_def("single_block")

    @property
    def step_values(self) -> tuple[int, ...]:
        """The step in each dimension."""
        return tuple(self.steps.get_values())

    def __init__(self, bounds: Sequence[SSAValue | Operation], steps: Sequence[int], body: Region, descending: bool = False):
        attributes: dict[str, Attribute] = {"steps": DenseArrayBase.from_list(i64, list(steps))}
        if descending:
            attributes["descending"] = UnitAttr()
        super().__init__(operands=[bounds], attributes=attributes, regions=[body])

    def verify_(self):
        steps = self.step_values
        if not len(self.bounds) == len(steps) == len(self.body.block.args) or any(s < 1 for s in steps):
            raise VerifyException("tile.grid: one bound, one positive step and one block argument for each dimension")

    def print(self, printer: Printer):
        printer.print_string(" (")
        printer.print_list(self.body.block.args, printer.print_ssa_value)
        printer.print_string(") to (")
        printer.print_list(self.bounds, printer.print_operand)
        printer.print_string(") step (")
        printer.print_list(self.step_values, lambda step: printer.print_string(str(step)))
        printer.print_string(") ")
        if self.descending is not None:
            printer.print_string("descending ")
        printer.print_region(self.body, print_entry_block_args=False)

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        delimiter = parser.Delimiter.PAREN
        names = parser.parse_comma_separated_list(delimiter, lambda: parser.parse_argument(expect_type=False))
        parser.parse_keyword("to")
        bounds = parser.parse_comma_separated_list(delimiter, lambda: parser.parse_operand())
        parser.parse_keyword("step")
        steps = parser.parse_comma_separated_list(delimiter, lambda: parser.parse_integer())
        descending = parser.parse_optional_keyword("descending") is not None
        body = parser.parse_region([name.resolve(_INDEX) for name in names])
        return cls(bounds, steps, body, descending)


@irdl_op_definition
class ForOp(IRDLOperation):
    """A sequential loop over blocks of `step`, from `lower` to `upper`, carrying tiles.

    The last block may reach beyond `upper`; what lies there must be masked by the body, or read as zero by `tile.load`.
    """

    name = "tile.for"
    lower = operand_def(_INDEX)
    upper = operand_def(_INDEX)
    step = attr_def(IntegerAttr)
    inits = var_operand_def()
    results_ = var_result_def()
    body = region_def("single_block")

    def __init__(self, lower: SSAValue, upper: SSAValue, step: int, inits: Sequence[SSAValue], body: Region):
        super().__init__(
            operands=[lower, upper, inits],
            attributes={"step": IntegerAttr(step, i64)},
            result_types=[[init.type for init in inits]],
            regions=[body],
        )

    def verify_(self):
        carried = [arg.type for arg in self.body.block.args[1:]]
        if carried != [init.type for init in self.inits]:
            raise VerifyException("tile.for: block arguments must be the position and one for each carried value")
        last = self.body.block.last_op
        if not isinstance(last, YieldOp) or [value.type for value in last.values] != carried:
            raise VerifyException("tile.for: must end by yielding what it carries")
        if self.step.value.data < 1:
            raise VerifyException("tile.for: the step must be positive")

    def print(self, printer: Printer):
        position, *carried = self.body.block.args
        printer.print_string(" ")
        printer.print_ssa_value(position)
        printer.print_string(" = ")
        printer.print_operand(self.lower)
        printer.print_string(" to ")
        printer.print_operand(self.upper)
        printer.print_string(f" step {self.step.value.data} carry(")
        _print_zip(printer, carried, self.inits)
        printer.print_string(") -> (")
        printer.print_list([arg.type for arg in carried], printer.print_attribute)
        printer.print_string(") ")
        printer.print_region(self.body, print_entry_block_args=False)

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        position = parser.parse_argument(expect_type=False)
        parser.parse_punctuation("=")
        lower = parser.parse_operand()
        parser.parse_keyword("to")
        upper = parser.parse_operand()
        parser.parse_keyword("step")
        step = parser.parse_integer()
        parser.parse_keyword("carry")

        def pair():
            name = parser.parse_argument(expect_type=False)
            parser.parse_punctuation("=")
            return name, parser.parse_operand()

        pairs = parser.parse_comma_separated_list(parser.Delimiter.PAREN, pair)
        parser.parse_punctuation("->")
        types = parser.parse_comma_separated_list(parser.Delimiter.PAREN, parser.parse_type)
        args = [position.resolve(_INDEX)] + [name.resolve(type_) for (name, _), type_ in zip(pairs, types, strict=True)]
        return cls(lower, upper, step, [init for _, init in pairs], parser.parse_region(args))


@irdl_op_definition
class ClassifyOp(IRDLOperation):
    """What is known of a block: 0 EMPTY (every score is -inf), 1 FULL (no mask needed, all gathers in range), 2 PARTIAL.

    `classifier` names a `func.func` of scalar arithmetic. It must hold for every sub-range of what it is asked about: a backend
    may ask again for fewer rows or columns, and skip those that are EMPTY.
    """

    name = "tile.classify"
    classifier = attr_def(SymbolRefAttr)
    arguments = var_operand_def()
    result = result_def(i32)

    def __init__(self, classifier: str, arguments: Sequence[SSAValue | Operation]):
        super().__init__(operands=[arguments], attributes={"classifier": SymbolRefAttr(classifier)}, result_types=[i32])

    assembly_format = "$classifier `(` $arguments `)` attr-dict `:` type($arguments)"


@irdl_op_definition
class CaseOp(IRDLOperation):
    """Chooses a region by the class of a block. `labels[i]` are the classes that region `i` serves; each class once."""

    name = "tile.case"
    selector = operand_def(i32)
    labels = attr_def(ArrayAttr[ArrayAttr[StringAttr]])
    results_ = var_result_def()
    cases = var_region_def("single_block")

    def __init__(
        self,
        selector: SSAValue,
        result_types: Sequence[Attribute],
        cases: Sequence[tuple[Sequence[str], Region]],
    ):
        labels = ArrayAttr([ArrayAttr([StringAttr(label) for label in group]) for group, _ in cases])
        super().__init__(
            operands=[selector],
            attributes={"labels": labels},
            result_types=[list(result_types)],
            regions=[[region for _, region in cases]],
        )

    def region_for(self, label: str) -> Region:
        """The region that serves a class: "empty", "full" or "partial"."""
        for group, region in zip(self.labels, self.cases, strict=True):
            if label in {name.data for name in group}:
                return region
        raise KeyError(label)

    def verify_(self):
        labels = [name.data for group in self.labels for name in group]
        if sorted(labels) != sorted(CLASS_NAMES) or len(self.labels) != len(self.cases):
            raise VerifyException(f"tile.case: each of empty, full, partial exactly once; got {labels}")
        for region in self.cases:
            last = region.block.last_op
            if not isinstance(last, YieldOp) or [v.type for v in last.values] != [r.type for r in self.results_]:
                raise VerifyException("tile.case: every region must yield the results' types")

    def print(self, printer: Printer):
        printer.print_string(" ")
        printer.print_operand(self.selector)
        printer.print_string(" -> (")
        printer.print_list([result.type for result in self.results_], printer.print_attribute)
        printer.print_string(")")
        for group, region in zip(self.labels, self.cases, strict=True):
            printer.print_string(" " + ", ".join(name.data for name in group) + " ")
            printer.print_region(region, print_entry_block_args=False)

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        selector = parser.parse_operand()
        parser.parse_punctuation("->")
        types = parser.parse_comma_separated_list(parser.Delimiter.PAREN, parser.parse_type)
        cases: list[tuple[list[str], Region]] = []
        while (first := parser.parse_optional_keyword_in(CLASS_NAMES)) is not None:
            group = [first]
            while parser.parse_optional_punctuation(","):
                group.append(parser.parse_keyword_in(CLASS_NAMES))
            cases.append((group, parser.parse_region()))
        return cls(selector, types, cases)


@irdl_op_definition
class IotaOp(IRDLOperation):
    """`offset + i`, for each row (`Rx1`) or each column (`1xC`)."""

    name = "tile.iota"
    offset = operand_def(_INDEX)
    result = result_def(TensorType)
    assembly_format = "$offset attr-dict `:` type($result)"

    def __init__(self, offset: SSAValue, type_: TensorType):
        super().__init__(operands=[offset], result_types=[type_])

    def verify_(self):
        rows, columns = _check_tile(self, self.result, "the result")
        assert isinstance(self.result.type, TensorType)
        if (rows != 1 and columns != 1) or self.result.type.element_type != _INDEX:
            raise VerifyException(f"tile.iota: expected tensor<Rx1xindex> or tensor<1xCxindex>, got {self.result.type}")


@irdl_op_definition
class FillOp(IRDLOperation):
    """A tile with one value everywhere."""

    name = "tile.fill"
    value = operand_def()
    result = result_def(TensorType)
    assembly_format = "$value attr-dict `:` type($value) `->` type($result)"

    def __init__(self, value: SSAValue, type_: TensorType):
        super().__init__(operands=[value], result_types=[type_])

    def verify_(self):
        _check_tile(self, self.result, "the result")


def _verify_access(op: Operation, buffer: SSAValue, indices: Sequence[SSAValue]) -> tuple[int, int]:
    assert isinstance(buffer.type, MemRefType)
    if len(indices) != buffer.type.get_num_dims():
        raise VerifyException(f"{op.name}: {len(indices)} indices into {buffer.type}")
    rows = columns = 1
    for index in indices:
        if isinstance(index.type, IndexType):
            continue
        r, c = _check_tile(op, index, "an index that is not a scalar")
        rows, columns = max(rows, r), max(columns, c)
    return rows, columns


@irdl_op_definition
class LoadOp(IRDLOperation):
    """Element (r, c) is `buffer[indices(r, c)]`; 0 where an index is outside the buffer. Each index is a scalar or a tile."""

    name = "tile.load"
    buffer = operand_def(MemRefType)
    indices = var_operand_def()
    result = result_def(TensorType)
    assembly_format = "$buffer `[` $indices `]` attr-dict `:` type($buffer) `,` `[` type($indices) `]` `->` type($result)"

    def __init__(self, buffer: SSAValue, indices: Sequence[SSAValue], type_: TensorType):
        super().__init__(operands=[buffer, indices], result_types=[type_])

    def verify_(self):
        shape = _check_tile(self, self.result, "the result")
        if _verify_access(self, self.buffer, self.indices) != shape:
            raise VerifyException("tile.load: the indices' broadcast shape must be the result's")
        assert isinstance(self.buffer.type, MemRefType) and isinstance(self.result.type, TensorType)
        if self.buffer.type.element_type != self.result.type.element_type:
            raise VerifyException("tile.load: the element types of buffer and result differ")


@irdl_op_definition
class StoreOp(IRDLOperation):
    """`buffer[indices(r, c)] = tile(r, c)`, dropped where an index is outside the buffer."""

    name = "tile.store"
    tile = operand_def(TensorType)
    buffer = operand_def(MemRefType)
    indices = var_operand_def()
    assembly_format = (
        "$tile `,` $buffer `[` $indices `]` attr-dict `:` type($tile) `,` type($buffer) `,` `[` type($indices) `]`"
    )

    def __init__(self, tile: SSAValue, buffer: SSAValue, indices: Sequence[SSAValue]):
        super().__init__(operands=[tile, buffer, indices])

    def verify_(self):
        _check_tile(self, self.tile, "what is stored")
        _verify_access(self, self.buffer, self.indices)
        assert isinstance(self.buffer.type, MemRefType) and isinstance(self.tile.type, TensorType)
        if self.buffer.type.element_type != self.tile.type.element_type:
            raise VerifyException("tile.store: the element types of buffer and tile differ")


@irdl_op_definition
class AccumulateOp(IRDLOperation):
    """`buffer[indices(r, c)] += tile(r, c)`: a sum that several tasks share.

    `owners` are the grid dimensions in which tasks that add to the same element may differ: partial sums are kept apart by
    them and added in order, so that bits do not depend on threads. Tasks that differ in another dimension add to other
    elements. The element types may differ: the sum is kept in the buffer's (f32 tiles into an f64 sum). What lies outside the
    buffer is dropped; if `wrapped`, a negative index counts from the end, once.
    """

    name = "tile.accumulate"
    tile = operand_def(TensorType)
    buffer = operand_def(MemRefType)
    indices = var_operand_def()
    owners = attr_def(ArrayAttr[IntegerAttr])
    wrapped = opt_attr_def(UnitAttr)
    assembly_format = (
        "$tile `into` $buffer `[` $indices `]` `owners` $owners (`wrapped` $wrapped^)? attr-dict"
        " `:` type($tile) `,` type($buffer) `,` `[` type($indices) `]`"
    )

    def __init__(
        self, tile: SSAValue, buffer: SSAValue, indices: Sequence[SSAValue], owners: Sequence[int], wrapped: bool = False
    ):
        attributes: dict[str, Attribute] = {"owners": ArrayAttr([IntegerAttr(owner, i64) for owner in owners])}
        if wrapped:
            attributes["wrapped"] = UnitAttr()
        super().__init__(operands=[tile, buffer, indices], attributes=attributes)

    def verify_(self):
        _check_tile(self, self.tile, "what is added")
        _verify_access(self, self.buffer, self.indices)


@irdl_op_definition
class StageOp(IRDLOperation):
    """Puts a tile where the products read it best (CPU: packed panels; GPU: shared memory), converting its elements.

    `operand` is "lhs" or "rhs" (of a dot) and `lifetime` how long it serves: "block" (one iteration), "task", or "grid": every
    task that loads the same elements shares it.
    """

    name = "tile.stage"
    tile = operand_def(TensorType)
    operand_ = attr_def(StringAttr, attr_name="operand")
    lifetime = attr_def(StringAttr)
    result = result_def(TensorType)
    LIFETIMES: ClassVar = ("block", "task", "grid")

    def __init__(self, tile: SSAValue, operand: str, lifetime: str, type_: TensorType):
        super().__init__(
            operands=[tile],
            attributes={"operand": StringAttr(operand), "lifetime": StringAttr(lifetime)},
            result_types=[type_],
        )

    def verify_(self):
        if _check_tile(self, self.tile, "the operand") != _check_tile(self, self.result, "the result"):
            raise VerifyException("tile.stage: staging keeps the shape")
        if self.operand_.data not in ("lhs", "rhs") or self.lifetime.data not in self.LIFETIMES:
            raise VerifyException("tile.stage: operand is lhs or rhs, lifetime is block, task or grid")

    def print(self, printer: Printer):
        printer.print_string(" ")
        printer.print_operand(self.tile)
        printer.print_string(f" as {self.operand_.data} for {self.lifetime.data} : ")
        printer.print_attribute(self.tile.type)
        printer.print_string(" -> ")
        printer.print_attribute(self.result.type)

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        tile = parser.parse_operand()
        parser.parse_keyword("as")
        operand = parser.parse_identifier()
        parser.parse_keyword("for")
        lifetime = parser.parse_identifier()
        parser.parse_punctuation(":")
        parser.parse_type()
        parser.parse_punctuation("->")
        type_ = parser.parse_type()
        assert isinstance(type_, TensorType)
        return cls(tile, operand, lifetime, type_)


@irdl_op_definition
class DotOp(IRDLOperation):
    """`lhs @ rhs`, plus `acc` where given; `transpose_lhs` / `transpose_rhs` read an operand transposed.

    Where `live`, an `i1` tile of the left-hand side's shape, is false, that element takes no part, whatever it and the
    right-hand side hold: `0 * NaN` is 0 there. (With all of `live` true, and finite operands, it changes nothing.)
    """

    name = "tile.dot"
    lhs = operand_def(TensorType)
    rhs = operand_def(TensorType)
    acc = opt_operand_def(TensorType)
    live = opt_operand_def(TensorType)
    transpose_lhs = opt_attr_def(UnitAttr)
    transpose_rhs = opt_attr_def(UnitAttr)
    result = result_def(TensorType)
    irdl_options = (AttrSizedOperandSegments(as_property=False),)

    def __init__(
        self,
        lhs: SSAValue,
        rhs: SSAValue,
        type_: TensorType,
        acc: SSAValue | None = None,
        live: SSAValue | None = None,
        transpose_lhs: bool = False,
        transpose_rhs: bool = False,
    ):
        attributes: dict[str, Attribute] = {}
        if transpose_lhs:
            attributes["transpose_lhs"] = UnitAttr()
        if transpose_rhs:
            attributes["transpose_rhs"] = UnitAttr()
        super().__init__(
            operands=[lhs, rhs, [acc] if acc else [], [live] if live else []],
            attributes=attributes,
            result_types=[type_],
        )

    def verify_(self):
        m, k = _check_tile(self, self.lhs, "lhs")
        k2, n = _check_tile(self, self.rhs, "rhs")
        if self.transpose_lhs is not None:
            m, k = k, m
        if self.transpose_rhs is not None:
            k2, n = n, k2
        if k != k2 or _check_tile(self, self.result, "the result") != (m, n):
            raise VerifyException(f"tile.dot: {self.lhs.type} by {self.rhs.type} into {self.result.type} do not fit")
        if self.acc is not None and self.acc.type != self.result.type:
            raise VerifyException("tile.dot: acc and result must be of one type")
        if self.live is not None and shape_of(self.live) != shape_of(self.lhs):
            raise VerifyException("tile.dot: live must have the shape of lhs")

    def print(self, printer: Printer):
        printer.print_string(" transposed " if self.transpose_lhs is not None else " ")
        printer.print_operand(self.lhs)
        printer.print_string(" by transposed " if self.transpose_rhs is not None else " by ")
        printer.print_operand(self.rhs)
        for keyword, value in (("onto", self.acc), ("where", self.live)):
            if value is not None:
                printer.print_string(f" {keyword} ")
                printer.print_operand(value)
        printer.print_string(" : ")
        printer.print_attribute(self.lhs.type)
        printer.print_string(", ")
        printer.print_attribute(self.rhs.type)
        printer.print_string(" -> ")
        printer.print_attribute(self.result.type)

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        transpose_lhs = parser.parse_optional_keyword("transposed") is not None
        lhs = parser.parse_operand()
        parser.parse_keyword("by")
        transpose_rhs = parser.parse_optional_keyword("transposed") is not None
        rhs = parser.parse_operand()
        acc = parser.parse_operand() if parser.parse_optional_keyword("onto") else None
        live = parser.parse_operand() if parser.parse_optional_keyword("where") else None
        parser.parse_punctuation(":")
        parser.parse_type()
        parser.parse_punctuation(",")
        parser.parse_type()
        parser.parse_punctuation("->")
        type_ = parser.parse_type()
        assert isinstance(type_, TensorType)
        return cls(lhs, rhs, type_, acc, live, transpose_lhs, transpose_rhs)


@irdl_op_definition
class MapOp(IRDLOperation):
    """A scalar function of each element: `result(r, c) = body(inputs(r, c)...)`, inputs broadcast. The body may use scalars and
    buffers from outside; its operations are those of `arith` and `math`, `scf.for` over scalars, and `tile.gather`."""

    name = "tile.map"
    inputs = var_operand_def(TensorType)
    result = result_def(TensorType)
    body = region_def("single_block")

    def __init__(self, inputs: Sequence[SSAValue], type_: TensorType, body: Region | Block):
        super().__init__(
            operands=[inputs],
            result_types=[type_],
            regions=[Region(body) if isinstance(body, Block) else body],
        )

    def verify_(self):
        rows, columns = _check_tile(self, self.result, "the result")
        if len(self.body.block.args) != len(self.inputs):
            raise VerifyException("tile.map: one block argument for each input")
        for value, arg in zip(self.inputs, self.body.block.args, strict=True):
            r, c = _check_tile(self, value, "an input")
            assert isinstance(value.type, TensorType)
            if r not in (1, rows) or c not in (1, columns):
                raise VerifyException(f"tile.map: {value.type} does not broadcast to {self.result.type}")
            if arg.type != value.type.element_type:
                raise VerifyException(f"tile.map: block argument of type {arg.type} for an input of {value.type}")
        last = self.body.block.last_op
        assert isinstance(self.result.type, TensorType)
        if not isinstance(last, YieldOp) or [v.type for v in last.values] != [self.result.type.element_type]:
            raise VerifyException(f"tile.map: must yield one {self.result.type.element_type}")

    def print(self, printer: Printer):
        printer.print_string(" (")
        _print_zip(printer, self.body.block.args, self.inputs)
        printer.print_string(") -> ")
        printer.print_attribute(self.result.type)
        printer.print_string(" ")
        printer.print_region(self.body, print_entry_block_args=False)

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        def pair():
            name = parser.parse_argument(expect_type=False)
            parser.parse_punctuation("=")
            return name, parser.parse_operand()

        pairs = parser.parse_comma_separated_list(parser.Delimiter.PAREN, pair)
        parser.parse_punctuation("->")
        type_ = parser.parse_type()
        args = []
        for name, value in pairs:
            if not isinstance(value.type, TensorType):
                parser.raise_error(f"tile.map: input of type {value.type} is not a tile")
            args.append(name.resolve(value.type.element_type))
        assert isinstance(type_, TensorType)
        return cls([value for _, value in pairs], type_, parser.parse_region(args))


@irdl_op_definition
class ReduceOp(IRDLOperation):
    """The maximum or the sum of each row (`Rx1`). "max" is NaN where the row holds a NaN; "maxnum" passes over them (-inf if
    the row holds nothing else)."""

    name = "tile.reduce"
    kind = attr_def(StringAttr)
    tile = operand_def(TensorType)
    result = result_def(TensorType)

    def __init__(self, kind: str, tile: SSAValue):
        assert isinstance(tile.type, TensorType)
        rows, _ = shape_of(tile)
        super().__init__(
            operands=[tile],
            attributes={"kind": StringAttr(kind)},
            result_types=[tile_type(rows, 1, tile.type.element_type)],
        )

    def verify_(self):
        rows, _ = _check_tile(self, self.tile, "the operand")
        if self.kind.data not in ("max", "maxnum", "add") or shape_of(self.result) != (rows, 1):
            raise VerifyException("tile.reduce: kind is max, maxnum or add, and the result is Rx1")

    def print(self, printer: Printer):
        printer.print_string(f" {self.kind.data} ")
        printer.print_operand(self.tile)
        printer.print_string(" : ")
        printer.print_attribute(self.tile.type)

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        kind = parser.parse_identifier()
        tile = parser.parse_operand()
        parser.parse_punctuation(":")
        parser.parse_type()
        return cls(kind, tile)


@irdl_op_definition
class GatherOp(IRDLOperation):
    """Inside a map: one element of a captured buffer, indexed as torch indexes.

    A negative index wraps once. An index outside `[-size, size)` is a fault where `live` is true (everywhere inside the
    bounds of the attention, if there is no `live`): the call then raises IndexError and returns nothing. Where `live` is
    false the element read is unspecified but valid. `proven` says that all indices lie in range, so nothing is checked.
    `name` is what an error calls the buffer.
    """

    name = "tile.gather"
    buffer = operand_def(MemRefType)
    indices = var_operand_def()
    live = opt_operand_def(IntegerType(1))
    label = opt_attr_def(StringAttr, attr_name="name")
    proven = opt_attr_def(UnitAttr)
    result = result_def()
    irdl_options = (AttrSizedOperandSegments(as_property=False),)

    def __init__(
        self,
        buffer: SSAValue,
        indices: Sequence[SSAValue],
        live: SSAValue | None = None,
        label: str | None = None,
        proven: bool = False,
    ):
        assert isinstance(buffer.type, MemRefType)
        attributes: dict[str, Attribute] = {}
        if label is not None:
            attributes["name"] = StringAttr(label)
        if proven:
            attributes["proven"] = UnitAttr()
        super().__init__(
            operands=[buffer, indices, [live] if live else []],
            attributes=attributes,
            result_types=[buffer.type.element_type],
        )

    def verify_(self):
        assert isinstance(self.buffer.type, MemRefType)
        if len(self.indices) != self.buffer.type.get_num_dims():
            raise VerifyException(f"tile.gather: {len(self.indices)} indices into {self.buffer.type}")
        if any(not isinstance(index.type, IndexType) for index in self.indices):
            raise VerifyException("tile.gather: indices are of type index")

    def print(self, printer: Printer):
        printer.print_string(" ")
        printer.print_operand(self.buffer)
        printer.print_string("[")
        printer.print_list(self.indices, printer.print_operand)
        printer.print_string("]")
        if self.live is not None:
            printer.print_string(" where ")
            printer.print_operand(self.live)
        if self.proven is not None:
            printer.print_string(" proven")
        if self.label is not None:
            printer.print_string(" name ")
            printer.print_attribute(self.label)
        printer.print_string(" : ")
        printer.print_attribute(self.buffer.type)

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        buffer = parser.parse_operand()
        indices = parser.parse_comma_separated_list(parser.Delimiter.SQUARE, lambda: parser.parse_operand())
        live = parser.parse_operand() if parser.parse_optional_keyword("where") else None
        proven = parser.parse_optional_keyword("proven") is not None
        label = parser.parse_str_literal() if parser.parse_optional_keyword("name") else None
        parser.parse_punctuation(":")
        parser.parse_type()
        return cls(buffer, indices, live, label, proven)


@irdl_op_definition
class RangeOp(IRDLOperation):
    """Inside a classifier: the least and greatest element of `buffer[lower[0]..upper[0], ...]`, bounds inclusive.

    Bounds are clamped to the buffer; the buffer holds integers or bools (0, 1), the results are `i64`. An empty range gives
    (max i64, min i64)."""

    name = "tile.range"
    buffer = operand_def(MemRefType)
    lower = var_operand_def(_INDEX)
    upper = var_operand_def(_INDEX)
    minimum = result_def(i64)
    maximum = result_def(i64)
    irdl_options = (AttrSizedOperandSegments(as_property=False),)

    def __init__(self, buffer: SSAValue, lower: Sequence[SSAValue], upper: Sequence[SSAValue]):
        super().__init__(operands=[buffer, lower, upper], result_types=[i64, i64])

    def verify_(self):
        assert isinstance(self.buffer.type, MemRefType)
        if not len(self.lower) == len(self.upper) == self.buffer.type.get_num_dims():
            raise VerifyException("tile.range: a lower and an upper bound for each dimension of the buffer")

    def print(self, printer: Printer):
        printer.print_string(" ")
        printer.print_operand(self.buffer)
        printer.print_string("[")

        def bounds(pair: tuple[SSAValue, SSAValue]) -> None:
            printer.print_operand(pair[0])
            printer.print_string(" to ")
            printer.print_operand(pair[1])

        printer.print_list(zip(self.lower, self.upper, strict=True), bounds)
        printer.print_string("] : ")
        printer.print_attribute(self.buffer.type)

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        buffer = parser.parse_operand()

        def bounds():
            lower = parser.parse_operand()
            parser.parse_keyword("to")
            return lower, parser.parse_operand()

        pairs = parser.parse_comma_separated_list(parser.Delimiter.SQUARE, bounds)
        parser.parse_punctuation(":")
        parser.parse_type()
        return cls(buffer, [lower for lower, _ in pairs], [upper for _, upper in pairs])


Tile = Dialect(
    "tile",
    [
        YieldOp,
        KernelOp,
        DimOp,
        GridOp,
        ForOp,
        ClassifyOp,
        CaseOp,
        IotaOp,
        FillOp,
        LoadOp,
        StoreOp,
        AccumulateOp,
        StageOp,
        DotOp,
        MapOp,
        ReduceOp,
        GatherOp,
        RangeOp,
    ],
)
