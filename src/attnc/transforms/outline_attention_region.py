"""The region of an attention over the canonical domain: positions in merged dimensions, outside values as arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from xdsl.dialects import tensor
from xdsl.dialects.arith import ConstantOp
from xdsl.dialects.builtin import (
    DYNAMIC_INDEX,
    AnyFloat,
    DenseIntOrFPElementsAttr,
    Float32Type,
    Float64Type,
    FloatAttr,
    IndexType,
    IntegerAttr,
    IntegerType,
    TensorType,
    f32,
    i32,
)
from xdsl.ir import Attribute, Block, BlockArgument, Operation, Region, SSAValue

from attnc.dialects.building import Builder
from attnc.dialects.linalg_ext import IndexOp, YieldOp
from attnc.errors import LoweringError
from attnc.transforms import tensor_views as views

if TYPE_CHECKING:
    from attnc.transforms.outline_attention import _Outlining

KEY = 4


class RegionCopy:
    """Copies the region into the function `body`, and gathers what else the function must be given: `arguments` are the
    caller's values for its further arguments, `roles` what they are."""

    def __init__(self, outlining: _Outlining, body: Block, inner: Builder, group: views.Size):
        self.outlining, self.body, self.inner, self.group = outlining, body, inner, group
        self.arguments: list[SSAValue] = []
        self.roles: list[str] = []
        self.known: dict[SSAValue, SSAValue] = {}
        ratio = outlining.merged_size(outlining.places.g)
        if not isinstance(ratio, int) and not isinstance(group, int):
            self.known[ratio] = group
        self.positions: dict[int, SSAValue] = {}

    # -- arguments ----------------------------------------------------------------------------------------------------

    def capture(self, value: SSAValue, hint: str | None = None) -> SSAValue:
        """A tensor as an argument, whatever its sizes."""
        if value not in self.known:
            type_ = cast(TensorType, value.type)
            passed = views.cast_to(
                self.outlining.build, value, TensorType(type_.element_type, [DYNAMIC_INDEX] * len(type_.shape))
            )
            self.known[value] = self._argument(passed, "capture", hint or value.name_hint)
        return self.known[value]

    def number(self, value: SSAValue) -> SSAValue:
        """A scalar as an argument, in a type that kernels take."""
        if value in self.known:
            return self.known[value]
        type_, build = value.type, self.outlining.build
        if isinstance(type_, IndexType | Float32Type | Float64Type) or (
            isinstance(type_, IntegerType) and type_.width.data in (32, 64)
        ):
            result = self._argument(value, "number", value.name_hint)
        elif isinstance(type_, IntegerType):
            wide = self._argument(build.cast("extui", value, i32), "number", value.name_hint)
            result = self.inner.cast("trunci", wide, type_)
        elif isinstance(type_, AnyFloat):
            wide = self._argument(build.cast("extf", value, f32), "number", value.name_hint)
            result = self.inner.cast("truncf", wide, type_)
        else:
            raise LoweringError(f"an attention's region reads a value of type {type_} from outside")
        self.known[value] = result
        return result

    def _argument(self, value: SSAValue, role: str, hint: str | None) -> BlockArgument:
        argument = self.body.insert_arg(value.type, len(self.body.args))
        argument.name_hint = hint
        self.arguments.append(value)
        self.roles.append(role)
        return argument

    def outer(self, value: SSAValue) -> SSAValue:
        """What the function has for a value from outside of the region."""
        if value in self.known:
            return self.known[value]
        owner = value.owner
        if isinstance(owner, ConstantOp) and not isinstance(owner.value, DenseIntOrFPElementsAttr):
            if isinstance(owner.value, IntegerAttr | FloatAttr):
                result = self.inner.add(owner.clone(), value.name_hint)
                self.known[value] = result
                return result
        return self.capture(value) if isinstance(value.type, TensorType) else self.number(value)

    # -- positions ----------------------------------------------------------------------------------------------------

    def position(self, build: Builder, dim: int) -> SSAValue:
        """Where the region stands along a dimension of the attention as it was."""
        if dim not in self.positions:
            self.positions[dim] = self._find_position(build, dim)
        return self.positions[dim]

    def _find_position(self, build: Builder, dim: int) -> SSAValue:
        outlining = self.outlining
        for place, group in enumerate(outlining.places.score_groups):
            if dim in group:
                at = group.index(dim)
                here = build.add(IndexOp(place), f"i{place}")
                after = outlining.merged_size(group[at + 1 :])
                if after != 1:
                    here = build.binary("divui", here, self._size(after), f"d{dim}")
                if at:
                    here = build.binary("remui", here, self._size(outlining.sizes[dim]), f"d{dim}")
                return here
        raise LoweringError(f"the region asks for its position in dimension {dim}, which is summed over in a product")

    def _size(self, size: views.Size) -> SSAValue:
        return self.inner.constant(size) if isinstance(size, int) else self.number(size)

    # -- the region ---------------------------------------------------------------------------------------------------

    def region(self, mask: tuple[SSAValue, list[tuple[int, ...]]] | None) -> Region:
        """The copy. It takes and yields a score in the type of the kernel, whatever type the original computes in."""
        source = self.outlining.op.region.block
        score, own = self.outlining.score, source.args[0].type
        block = Block(arg_types=[score])
        block.args[0].name_hint = "score"
        build = Builder(block)
        value: SSAValue = block.args[0]
        if own != score and len(list(source.ops)) > 1:
            value = build.cast("truncf", value, own, "score")
        mapper: dict[SSAValue, SSAValue] = {source.args[0]: value}
        last = source.last_op
        assert isinstance(last, YieldOp)
        for op in source.ops:
            if op is last:
                break
            if isinstance(op, IndexOp):
                mapper[op.result] = self.position(build, op.dimension)
            else:
                self._copy(op, mapper, build)
        result = mapper[last.value] if last.value in mapper else self.outer(last.value)
        if result.type != score:
            result = build.cast("extf", result, score, "wide")
        if mask is not None:
            result = self._masked(build, result, *mask)
        build.insert(YieldOp(result))
        return Region(block)

    def _copy(self, op: Operation, mapper: dict[SSAValue, SSAValue], build: Builder) -> None:
        inside: set[SSAValue] = set(op.results)
        for inner in op.walk():
            inside.update(inner.results)
            for region in inner.regions:
                for block in region.blocks:
                    inside.update(block.args)
            if isinstance(inner, IndexOp):
                mapper[inner.result] = self.position(build, inner.dimension)
        for inner in op.walk():
            for operand in inner.operands:
                if operand not in mapper and operand not in inside:
                    mapper[operand] = self.outer(operand)
        copy = op.clone(mapper)
        for old, new in zip(op.results, copy.results, strict=True):
            new.name_hint = old.name_hint
        for old, new in zip(list(op.walk()), list(copy.walk()), strict=True):
            if isinstance(old, IndexOp):
                new.results[0].replace_all_uses_with(mapper[old.result])
                new.detach()
                new.erase()
            if isinstance(new, tensor.ExtractOp) and "attnc.name" not in new.attributes:
                new.attributes.update(old.attributes)
        build.block.add_op(copy)

    def _masked(self, build: Builder, score: SSAValue, mask: SSAValue, groups: list[tuple[int, ...]]) -> SSAValue:
        """The mask operand's part: integers kill a score where they are 0, floats are added to it."""
        element = cast(TensorType, mask.type).element_type
        indices = []
        for group in groups:
            whole = next((n for n, dims in enumerate(self.outlining.places.score_groups) if dims == group), None)
            indices.append(build.add(IndexOp(whole), f"i{whole}") if whole is not None else self.position(build, group[0]))
        read: SSAValue = build.add(tensor.ExtractOp(mask, indices, element), "mask")
        if isinstance(element, IntegerType):
            if element.width.data != 1:
                read = build.compare("ne", read, self._constant(0, element), "kept")
            return build.select(read, score, self._constant(float("-inf"), score.type), "masked")
        if element != score.type:
            wider = cast(AnyFloat, element).bitwidth < cast(AnyFloat, score.type).bitwidth
            read = build.cast("extf" if wider else "truncf", read, score.type)
        return build.binary("addf", score, read, "biased")

    def _constant(self, value: float, type_: Attribute) -> SSAValue:
        return self.inner.constant(value, type_)
