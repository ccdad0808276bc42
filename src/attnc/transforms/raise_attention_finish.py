"""What is done to single rows of an attention's result, because it was done to their weights.

    out · factor                                 weights times a factor of their row
    sum != sum ? 0 : out                         weights that were NaN, made 0
    out · S / (S + x)                            weights divided by S + x, where S is the sum of exp(score - shift)

with one elementwise operation, which reads the running attention's sum and maximum where it needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from xdsl.dialects.builtin import TensorType
from xdsl.ir import Attribute, Operation, SSAValue

from attnc.analysis.axes import flat
from attnc.analysis.elements import Element
from attnc.analysis.softmax import Attention
from attnc.analysis.softmax_sink import Sink
from attnc.dialects.building import Builder
from attnc.dialects.linalg_ext import OnlineAttentionOp
from attnc.transforms.raise_attention_building import Domain, row_tensor
from attnc.transforms.raise_attention_region import RegionWriter, convert_float, nowhere


def finished(
    found: Attention,
    result: SSAValue,
    online: OnlineAttentionOp | None,
    domain: Domain,
    dependent: set[Operation],
    type_: Attribute,
) -> SSAValue:
    """A tensor like the attention's own `out`; computed in `type_`, from no operation of `dependent`. Raises NoMatch."""
    sources = [(result, [atom for axis in domain.axes[3] for atom in flat(axis)])]
    if online is not None:
        sources += [(online.sum_result, domain.rows), (online.max_result, domain.rows)]
    wanted = cast(TensorType, found.out.type)

    def compute(build: Builder, args: Sequence[SSAValue], read: Callable[[Element], SSAValue | None]) -> SSAValue:
        writer = RegionWriter(build, found.elements, nowhere, nowhere, lambda value: value.owner in dependent, read=read)
        value = convert_float(build, args[0], type_)
        for factor in found.row_factors:
            value = build.binary("mulf", value, convert_float(build, writer.write(factor), type_))
        if found.sink is not None:
            value = _shared(build, writer, found.sink, value, args[1], args[2])
        if found.zeros.nan:
            lost = build.compare_floats("uno", args[1], args[1], "lost")
            value = build.select(lost, build.constant(0.0, type_, "zero"), value)
        return convert_float(build, value, wanted.element_type)

    return row_tensor(domain, sources, [flat(axis) for axis in found.axes], wanted, compute, "out")


def _shared(build: Builder, writer: RegionWriter, sink: Sink, value: SSAValue, total: SSAValue, top: SSAValue) -> SSAValue:
    """The value times S / (S + x); 0 in a row without keys."""

    def less(terms: Sequence[object]) -> SSAValue:
        exponent = top
        for term in reversed(terms):  # the innermost first, as they were subtracted
            exponent = build.binary("subf", exponent, convert_float(build, writer.write(term), top.type))  # pyright: ignore
        return exponent

    def known(element: Element, row: SSAValue) -> None:
        writer.known(element, row)
        writer.known(writer.elements.at(element.value, element.axes), row)  # over dims that were split since

    for element in sink.maxima:
        known(element, top)
    for element, terms in sink.lessened:
        known(element, less(terms))
    own = build.binary("mulf", total, build.unary_math("exp", less(sink.shift)), "own")
    other = convert_float(build, writer.write(sink.term), own.type)
    share = build.binary("divf", own, build.binary("addf", own, other), "share")
    zero = build.constant(0.0, value.type, "zero")
    none = build.compare_floats("oeq", total, zero, "none")
    return build.select(none, zero, build.binary("mulf", value, share))
