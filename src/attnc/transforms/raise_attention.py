"""softmax(Q·Kᵀ)·V, written out in linalg, becomes one attention.

Before:

    %s = linalg.generic {"parallel", "parallel", "reduction"} ins(%q, %k) { mulf, addf }       rows × keys
    %b = linalg.generic ins(%s, %mask) { %s * 0.125 + %mask }
    %m = linalg.generic {"parallel", "reduction"} ins(%b) { maximumf }
    %p = linalg.generic ins(%b, %m) { exp(%b - %m) }
    %l = linalg.generic {"parallel", "reduction"} ins(%p) { addf }
    %w = linalg.generic ins(%p, %l) { %p / %l }
    %o = linalg.generic {"parallel", "parallel", "reduction"} ins(%w, %v) { mulf, addf }

After:

    %o = "iree_linalg_ext.attention"(%q, %k, %v, %scale, %init) ({
    ^bb0(%score: f32):                        // %scale · Σ q·k, with %scale = 0.125
      %i = iree_linalg_ext.index 1, %j = iree_linalg_ext.index 2
      %bias = tensor.extract %mask[%i, %j]
      %x = arith.addf %score, %bias
      iree_linalg_ext.yield %x })

It is recognised by what it computes (`attnc.analysis.softmax`), through reshapes, transposes, broadcasts and casts between
the parts. Where the maximum or the sum has other uses (a log-sum-exp), an `online_attention` gives them. Where anything else
between the two products has other uses, or it is no attention, the IR stays as it was.

What is done to the weights after the softmax goes into the region (rows and keys set to 0), into the value (factors and
zeros of keys) or is done to the result (factors of rows, NaN that becomes 0, the share that sinks leave).

A row whose scores are all -inf is 0 here; written out, it is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

from xdsl.dialects.builtin import AnyFloat, ModuleOp, TensorType, f32, f64
from xdsl.dialects.func import FuncOp
from xdsl.dialects.linalg import ops as linalg
from xdsl.ir import Attribute, Block, Operation, OpResult, SSAValue

from attnc.analysis.axes import Atom, Axis, NoMatch, flat
from attnc.analysis.elements import CASTS, Apply, Element, Node, constant
from attnc.analysis.live_keys import every_row_keeps_a_key
from attnc.analysis.softmax import Attention, RowValue, Search, find
from attnc.dialects.building import Builder
from attnc.dialects.linalg_ext import AttentionOp, OnlineAttentionOp
from attnc.target import Target
from attnc.transforms import split_concatenations
from attnc.transforms.convert_attention_to_online_attention import convert
from attnc.transforms.raise_attention_building import (
    PURE,
    Domain,
    build_attention,
    clear,
    converted_tensor,
    elementwise_tensor,
    erase_unused,
    insert_before,
    row_tensor,
    sort,
)
from attnc.transforms.raise_attention_finish import finished
from attnc.transforms.raise_attention_region import RegionWriter, convert_float, is_scalar, nowhere

NAME = "raise-attention"


def run(module: ModuleOp, target: Target) -> None:
    """Raises every attention of every function of the module."""
    split_concatenations.run(module, target)
    for function in module.ops:
        if isinstance(function, FuncOp):
            for block in function.body.blocks:
                _raise_in(block)


def _raise_in(block: Block) -> None:
    merge_equal(block)
    for op in list(block.ops):
        if op.parent is block and isinstance(op, linalg.GenericOp) and _may_be_last(op):
            found = find(cast(OpResult, op.results[0]))
            if found is not None and _raise(*found):
                erase_unused(block)


def merge_equal(block: Block) -> None:
    """Operations on tensors that compute the same become one."""
    known: dict[tuple[object, ...], list[Operation]] = {}
    for op in list(block.ops):
        if not op.results or not op.name.startswith(PURE) or op.name.startswith("iree_linalg_ext."):
            continue
        properties = tuple(sorted(op.properties.items(), key=lambda item: item[0]))
        alike = known.setdefault((op.name, tuple(op.operands), properties, tuple(op.result_types)), [])
        for other in alike:
            pairs = zip(op.regions, other.regions, strict=True)
            if all(region.is_structurally_equivalent(twin) for region, twin in pairs):
                for result, twin in zip(op.results, other.results, strict=True):
                    result.replace_all_uses_with(twin)
                op.detach()
                op.erase()
                break
        else:
            alike.append(op)


def _may_be_last(op: linalg.GenericOp) -> bool:
    """Whether it sums products, or divides."""
    return len(op.results) == 1 and any(inner.name in ("arith.mulf", "arith.divf") for inner in op.body.block.ops)


def _raise(search: Search, found: Attention) -> bool:
    product, last = found.product.value.owner, found.out.owner
    assert isinstance(product, Operation)
    before = _computed_from(last)
    rows = {cast(Operation, row.element.value.owner): row for row in found.rows}
    for op in _dependents(product, {last, *rows}) - before:
        if isinstance(op, linalg.GenericOp) and len(op.results) == 1:
            try:
                row = search.row_value(found, op.results[0])
            except NoMatch:
                continue
            if row is not None:
                rows[op] = row
    between = _dependents(product, {last, *rows})
    if not between <= before.union(*(_computed_from(op) for op in rows)):
        return False  # something between the products is used elsewhere, and would be computed anyway
    asked = [row for op, row in rows.items() if op not in before or not _dependents(op, {last, *rows} - {op}) <= before]
    if asked and found.zeros.rows:
        return False  # which are dead in the attention, but not in the sums that are asked for
    scratch = Block()
    try:
        running = bool(asked) or found.zeros.nan or found.sink is not None
        raising = _Raising(found, Builder(scratch), between | set(rows), running)
        attention, domain, value = raising.write()
        if "attnc.loc" in last.attributes:
            attention.attributes["attnc.loc"] = last.attributes["attnc.loc"]
        values: dict[SSAValue, SSAValue] = {}
        result, online = attention.result, None
        if running:
            online = convert(attention)
            result = next(use.operation for use in online.acc_result.uses).results[0]
            if value is attention.result:
                value = result
            for row in asked:
                values[row.element.value] = _row_tensor(search, row, online, domain)
        if found.row_factors or found.zeros.nan or found.sink is not None:
            value = finished(found, result, online, domain, raising.dependent, raising.type)
    except NoMatch:
        clear(scratch)
        return False
    values[found.out] = value
    insert_before(scratch, last)
    for old, new in values.items():
        new.name_hint = old.name_hint
        old.replace_all_uses_with(new)
    if asked:
        assert last.parent is not None
        sort(last.parent)
    return True


def _row_tensor(search: Search, row: RowValue, online: OnlineAttentionOp, domain: Domain) -> SSAValue:
    """The maximum of the scores, or the sum of exp(score - shift), from what the running attention has."""
    type_ = cast(TensorType, row.element.value.type)
    if row.kind not in ("max", "sum"):
        raise NoMatch("a row's value that the running attention does not have")

    def compute(build: Builder, args: Sequence[SSAValue], _: object) -> SSAValue:
        value, top = args[0], args[-1]
        if row.kind == "sum" and row.shift != row.maxima[:1]:
            writer = RegionWriter(build, search.elements, nowhere, nowhere)
            for element in row.maxima:
                writer.known(element, top)
            exponent = top
            for term in row.shift:
                exponent = build.binary("subf", exponent, writer.write(term))
            value = build.binary("mulf", value, build.unary_math("exp", exponent))
        return convert_float(build, value, type_.element_type)

    axes = [flat(axis) for axis in row.element.axes]
    if row.kind == "max" and [atom for axis in axes for atom in axis] == domain.rows:
        if type_.element_type == cast(TensorType, online.max_result.type).element_type:
            return domain.result(online.max_result, axes, type_)
    sources = [online.max_result] if row.kind == "max" else [online.sum_result, online.max_result]
    return row_tensor(domain, [(source, domain.rows) for source in sources], row.element.axes, type_, compute)


def _dependents(op: Operation, stops: set[Operation]) -> set[Operation]:
    """`op` and what is computed from its results, without going on from `stops`, which are left out."""
    found: set[Operation] = {op} - stops
    waiting = [op]
    while waiting:
        for result in waiting.pop().results:
            for use in result.uses:
                user = use.operation
                while user.parent is not op.parent and (parent := user.parent_op()) is not None:
                    user = parent
                if user not in found and user not in stops:
                    found.add(user)
                    waiting.append(user)
    return found


def _computed_from(op: Operation) -> set[Operation]:
    """What `op` is computed from."""
    found: set[Operation] = set()
    waiting = [op]
    while waiting:
        for inner in waiting.pop().walk():
            for operand in inner.operands:
                owner = operand.owner
                if isinstance(owner, Operation) and owner.parent is op.parent and owner not in found:
                    found.add(owner)
                    waiting.append(owner)
    return found


class _Raising:
    """Writes one attention."""

    def __init__(self, found: Attention, build: Builder, dependent: set[Operation], running: bool):
        self.found = found
        self.running = running
        self.build = build
        self.elements = found.elements
        self.dependent = dependent
        element = cast(TensorType, found.product.value.type).element_type
        self.type: Attribute = f64 if element == f64 else f32
        self.least_is_dead = False
        self.dead = [*found.zeros.dead, *found.zeros.rows]

    def write(self) -> tuple[AttentionOp, Domain, SSAValue]:
        found = self.found
        operands = (found.query, found.key, found.value)
        if self.running:  # later folds would have to reshape maximum and sum as well
            operands = tuple(self.peeled(element) for element in operands)
            found.product = self.elements.at(found.product.value, found.product.axes)  # over the dims that were split
        score, factors = self.scaled_product()
        rows = [atom for axis in found.axes for atom in flat(axis)]
        self.least_is_dead = every_row_keeps_a_key(self.elements, found.scores, score, rows, flat(found.keys))
        trial = Block(arg_types=[self.type])  # splits the atoms that have to be, before the domain is made of them
        writer = self.writer(Builder(trial), lambda _: trial.args[0], lambda _: trial.args[0])
        try:
            writer.score(found.scores, score, trial.args[0], self.dead)
        finally:
            clear(trial)
        query, key, value = (self.widened(element) for element in operands)
        if found.weight_factors or found.zeros.values:
            value = self.multiplied(value)
        domain = Domain(self.build, query, key, value, found.axes)
        scale = self.scale(factors)

        def region(build: Builder, argument: SSAValue, position: Callable[[Atom], SSAValue]) -> SSAValue:
            return self.writer(build, position, domain.size).score(found.scores, score, argument, self.dead)

        out_type = cast(TensorType, found.out.type)
        attention, out = build_attention(domain, (query.value, key.value, value.value), scale, out_type, region)
        return attention, domain, out

    def peeled(self, element: Element) -> Element:
        """An operand before what lays it out: heads that are repeated are those that they were."""
        try:
            return self.elements.peel(element)
        except NoMatch:
            return element

    def widened(self, element: Element) -> Element:
        """An operand in the widest type of the three."""
        types = [cast(AnyFloat, operand.type) for operand in (self.found.query, self.found.key, self.found.value)]
        widest = max(types, key=lambda type_: type_.bitwidth)
        element = self.elements.at(element.value, element.axes)
        if cast(AnyFloat, element.type).bitwidth == widest.bitwidth:
            return element
        return converted_tensor(self.build, self.elements, element, widest)

    def multiplied(self, element: Element) -> Element:
        """The value times what the weights are multiplied by, and 0 where they are set to 0; in the layout of the tensor that
        it comes from."""
        before: Element | None = element
        while before is not None:
            if all(len(flat(axis)) <= 1 for axis in before.axes):
                element = before
            before = self.elements.peel_once(before)

        def compute(build: Builder, args: Sequence[SSAValue], read: Callable[[Element], SSAValue | None]) -> SSAValue:
            writer = RegionWriter(build, self.elements, nowhere, nowhere, read=read)
            value = convert_float(build, args[0], self.type)
            for factor in self.found.weight_factors:
                value = build.binary("mulf", value, convert_float(build, writer.write(factor), self.type))
            for condition, negated in self.found.zeros.values:
                zero = build.constant(0.0, self.type, "zero")
                value = build.select(writer.condition(condition, not negated), value, zero)
            return convert_float(build, value, element.type)

        return elementwise_tensor(self.build, self.elements, element, compute)

    def writer(self, build: Builder, position: Callable[[Atom], SSAValue], size: Callable[[Atom], SSAValue]) -> RegionWriter:
        keys = set(flat(self.found.keys))
        rows = {atom for axis in self.found.axes for atom in flat(axis)}

        def pairs(axes: Iterable[Axis]) -> bool:
            atoms = {atom for axis in axes for atom in flat(axis)}
            return bool(atoms & keys) and bool(atoms & rows)

        writer = RegionWriter(build, self.elements, position, size, lambda value: value.owner in self.dependent, pairs)
        writer.least_is_dead = self.least_is_dead
        return writer

    # -- the scale --------------------------------------------------------------------------------------------------------

    def scaled_product(self) -> tuple[Node, list[tuple[Node, bool]]]:
        """The node that is the product times scalars alone, and those scalars; True: it is divided by that one."""
        parents: dict[int, list[Apply]] = {}
        seen: set[int] = set()

        def visit(node: Node) -> None:
            node = self.elements.head(node)
            if id(node) in seen:
                return
            seen.add(id(node))
            if isinstance(node, Apply):
                for operand in node.operands:
                    head = self.elements.head(operand)
                    parents.setdefault(id(head), []).append(node)
                    visit(head)

        visit(self.found.scores)
        node: Node = self.found.product
        best, factors = node, [(factor, False) for factor in self.found.factors]
        while len(above := parents.get(id(node), [])) == 1:
            parent = above[0]
            if parent.op.name in CASTS:
                node = parent
                continue
            if parent.op.name not in ("arith.mulf", "arith.divf"):
                break
            place = 0 if self.elements.head(parent.operands[0]) is node else 1
            other = parent.operands[1 - place]
            if not self.is_scalar(other) or (place == 1 and parent.op.name == "arith.divf"):
                break
            factors.append((other, parent.op.name == "arith.divf"))
            best = node = parent
        return best, factors

    def is_scalar(self, node: Node) -> bool:
        """Whether a node is one number for all scores."""
        return is_scalar(self.elements, node) and not self.writer(self.build, nowhere, nowhere).on_scores(node)

    def scale(self, factors: list[tuple[Node, bool]]) -> SSAValue:
        """The product of the scalars, of the score's type."""
        number, value = 1.0, None
        for factor, divides in factors:
            known = constant(self.elements.bare(factor))
            if known is not None and not (divides and known == 0):
                number = number / known if divides else number * known
                continue
            writer = RegionWriter(self.build, self.elements, nowhere, nowhere)
            other = convert_float(self.build, writer.write(self.elements.head(factor)), self.type)
            one = self.build.constant(1.0, self.type)
            value = self.build.binary("divf" if divides else "mulf", one if value is None else value, other, "scale")
        if value is None:
            return self.build.constant(number, self.type, "scale")
        return value if number == 1.0 else self.build.binary("mulf", value, self.build.constant(number, self.type), "scale")
