"""The region of an attention whose domain is (b, hkv, g, q, k, …): both mods inlined, the mask last.

^bb0(%score: f32):
  %hkv = iree_linalg_ext.index 1,  %h = %hkv * %group + %g
  %modified = <score_mod(%score, b, h, q, k)>
  %mask = <mask_mod(b, h, q, k)>
  %masked = arith.select %mask, %modified, %minus_infinity : f32
  iree_linalg_ext.yield %masked
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from xdsl.dialects import arith, func, tensor
from xdsl.dialects.builtin import IntegerAttr, SymbolRefAttr
from xdsl.ir import Attribute, Block, Region, SSAValue

from attnc.dialects.linalg_ext import IndexOp, YieldOp
from attnc.dialects.torch import BoolType, FlexAttentionOp, FloatType, VTensorType, block_sizes, si32, si64
from attnc.errors import UnsupportedOpError
from attnc.transforms.convert_torch_to_linalg_ext_mods import captured, interpret
from attnc.transforms.convert_torch_to_linalg_ext_region import f32, f64, i1, i8, i64
from attnc.transforms.convert_torch_to_linalg_ext_region import index as index_type
from attnc.transforms.convert_torch_to_linalg_ext_shapes import hinted, shape_of
from attnc.transforms.convert_torch_to_linalg_ext_values import Number, Scalar, ScalarBuilder, Value

B, HKV, G, Q, K = range(5)


class AttentionRegion:
    """Builds regions in a function whose values `values` and `numbers` stand for the old ones.

    `size(tensor, dim)` gives a size of a tensor as an `index` from outside the region.
    """

    def __init__(
        self,
        functions: dict[str, func.FuncOp],
        names: Sequence[str],
        values: Mapping[SSAValue, SSAValue],
        numbers: Mapping[SSAValue, Number],
        size: Callable[[SSAValue, int], SSAValue],
    ):
        self.functions = functions
        self.names = names
        self.values = values
        self.numbers = numbers
        self.size = size

    def build(self, op: FlexAttentionOp, precision: Attribute, group: SSAValue | int) -> Region:
        """The region for scores of type `precision`; `group` is how many query heads share a key/value head."""
        block = Block(arg_types=[precision])
        score = block.args[0]
        score.name_hint = "score"
        r = ScalarBuilder(block, self.size)
        positions = Positions(r, r.constant(index_type, group) if isinstance(group, int) else group)
        modified = Scalar(score, precision)
        if op.score_mod_fn is not None:
            mod = self._mod(op.score_mod_fn)
            used = [argument.first_use is not None for argument in mod.body.block.args]
            fixed = [modified, *positions.scalars(used[1:5])]
            modified = interpret(r, mod, [*fixed, *self._operands(r, op.score_operands, used[5:])])
        result = hinted(r.convert(modified, precision), "modified")
        mask: SSAValue | None = None
        if op.mask_mod_fn is not None:
            r.checked = "all" if op.blocks is None else "listed"
            mod = self._mod(op.mask_mod_fn)
            used = [argument.first_use is not None for argument in mod.body.block.args]
            mask = r.truth(interpret(r, mod, [*positions.scalars(used[:4]), *self._operands(r, op.mask_operands, used[4:])]))
        if op.blocks is not None:
            mask = self._listed(r, op, positions, mask)
        if mask is not None:
            masked = r.select(hinted(mask, "mask"), result, r.constant(precision, float("-inf")))
            result = hinted(masked, "masked")
        block.add_op(YieldOp(result))
        r.finish()
        return Region(block)

    def _mod(self, reference: SymbolRefAttr) -> func.FuncOp:
        name = reference.root_reference.data
        if name not in self.functions:
            raise UnsupportedOpError(f"the attention names a mod @{name}, which the module does not hold")
        return self.functions[name]

    def _operands(self, r: ScalarBuilder, operands: Sequence[SSAValue], used: Sequence[bool]) -> list[Value]:
        result: list[Value] = []
        for operand, needed in zip(operands, used):
            if not needed:
                result.append(None)
            elif operand in self.numbers:
                result.append(self.numbers[operand])
            elif isinstance(operand.type, VTensorType):
                result.append(captured(r, self.values[operand], operand.type, self._name(operand)))
            else:
                dtype = {FloatType: f64, BoolType: i1}.get(type(operand.type), si64)
                result.append(Number(dtype, None, self.values[operand]))
        return result

    def _name(self, operand: SSAValue) -> str:
        position = getattr(operand, "index", -1)
        if 0 <= position < len(self.names):
            return self.names[position]
        return operand.name_hint or "captured tensor"

    def _listed(self, r: ScalarBuilder, op: FlexAttentionOp, positions: Positions, mask: SSAValue | None) -> SSAValue:
        """The mask of a BlockMask: the class of the pair's block, then, where it is partial, the user's mask."""
        assert op.blocks is not None and op.block_size is not None
        queries, keys = (r.constant(index_type, size) for size in block_sizes(op))
        row = r.integer(arith.DivUIOp, positions.index("q"), queries)
        column = r.integer(arith.DivUIOp, positions.index("k"), keys)
        blocks = self.values[op.blocks]
        outer = [  # B or H of 1 serves all
            r.constant(index_type, 0) if size == 1 else positions.index(name)
            for size, name in zip(shape_of(blocks)[:2], "bh", strict=True)
        ]
        class_ = r.emit(tensor.ExtractOp, (blocks, *outer, row, column), i8)
        class_.name_hint = "class"
        if mask is None:
            return r.compare("ne", class_, r.constant(i8, 0))
        full = hinted(r.compare("eq", class_, r.constant(i8, 2)), "full")
        partial = hinted(r.compare("eq", class_, r.constant(i8, 1)), "partial")
        return r.either(full, r.both(partial, mask))


class Positions:
    """The positions b, h, q, k of the region, each built when first asked for."""

    def __init__(self, r: ScalarBuilder, group: SSAValue):
        self._r = r
        self._group = group

    def _dim(self, dim: int, hint: str) -> SSAValue:
        value = self._r.emit(IndexOp, (), index_type, {"dim": IntegerAttr(dim, i64)})
        value.name_hint = hint
        return value

    def index(self, name: str) -> SSAValue:
        """A position as an `index`."""
        if name != "h":
            return self._dim({"b": B, "q": Q, "k": K}[name], name)
        product = self._r.multiply(self._dim(HKV, "hkv"), self._group)
        head = self._r.add(product, self._dim(G, "g"))
        head.name_hint = "h"
        return head

    def scalars(self, used: Sequence[bool]) -> list[Value]:
        """b, h, q, kv as a mod sees them: int32; None where the mod does not look."""
        result: list[Value] = []
        for name, needed in zip("bhqk", used):
            if not needed:
                result.append(None)
                continue
            value = self._r.from_index(self.index(name), si32)
            value.name_hint = f"{name}_i32"
            result.append(Scalar(value, si32))
        return result


def statistics(op: FlexAttentionOp) -> Attribute:
    """The type of scores, sums and maxima: f64 for f64 inputs, else f32."""
    return f64 if cast(VTensorType, op.query.type).dtype == f64 else f32
