"""flex_attention under torch.compile: a higher-order operator that dynamo traces and that leaves no trace of itself.

dynamo meets `flex_in_graph(query, key, value, score_mod, mask_mod, …)`, traces both mods as it does for torch's own
flex_attention, and then, in its place, writes the plain operator into the graph:

    out, lse, max_scores = torch.ops.attnc.attention(query, key, value, [captures], [numbers], [block lists], "{…}", scale)

A graph break is asked for where attnc refuses, so that the eager call raises its own error (with fullgraph=True the break's
message holds it). This module is imported by the call itself while dynamo traces it, never by eager use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables import higher_order_ops
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder, wrap_fx_proxy
from torch._dynamo.variables.higher_order_ops import (
    TorchHigherOrderOperatorVariable,
    discard_graph_changes,
    speculate_subgraph,
)
from torch._ops import HigherOrderOperator
from torch.fx.experimental.symbolic_shapes import DimDynamic

from attnc import torch_op
from attnc.capture.numbers import Expression
from attnc.errors import AttncError
from attnc.integrations.graph_capture import GraphOperands, capture_graphs, evaluate
from attnc.integrations.operator import split_numbers
from attnc.integrations.traced import call_operator
from attnc.program_text import Program, to_text


class FlexInGraph(HigherOrderOperator):
    """What dynamo traces. Really called only after a graph break in its place; then it captures the mods as an eager call
    does."""

    def __init__(self) -> None:
        super().__init__("attnc_flex_attention")

    def __call__(self, *arguments: Any) -> Any:
        """(query, key, value, score_mod, mask_mod, block_lists, block_size, mask_full_blocks, scale, scale_tensor, return_lse,
        return_max) -> (out, lse, max_scores)"""
        return call_operator(*arguments)


class FlexInGraphVariable(TorchHigherOrderOperatorVariable):
    """How dynamo traces a call of `flex_in_graph`."""

    _HOP_NAME = "attnc.flex_attention"

    def _call_function(self, tx: Any, args: Sequence[VariableTracker], kwargs: dict[str, VariableTracker]) -> VariableTracker:
        query, key, value, score_mod, mask_mod, lists, block_size, *flags, scale, scale_tensor, lse, maximum = [
            argument.realize() for argument in args
        ]
        mask_full_blocks = flags[0]
        double = query.as_proxy().node.meta["example_value"].dtype is torch.float64
        score_dtype = torch.float64 if double else torch.float32
        graphs: list[torch.fx.GraphModule | None] = []
        outer: list[list[torch.fx.Proxy]] = []
        names: list[str] = []
        for mod, scored in ((score_mod, True), (mask_mod, False)):
            if mod.is_constant_none():
                graphs.append(None)
                outer.append([])
                continue
            graph, lifted = self._trace(tx, query, mod, score_dtype if scored else None)
            graphs.append(graph)
            outer.append(list(lifted))
            names += [inner.node.name.strip("_").removeprefix("l_") for inner in lifted.values()]
        examples = [[proxy.node.meta["example_value"] for proxy in proxies] for proxies in outer]
        try:
            found = capture_graphs(graphs[0], examples[0], graphs[1], examples[1], score_dtype, names)
            operands = _Operands(tx, found, outer[0] + outer[1], examples[0] + examples[1])
        except AttncError as error:
            unimplemented(
                gb_type="attnc refuses a call of flex_attention",
                context=type(error).__name__,
                explanation=error.message,
                hints=[error.remedy],
                from_exc=error,
            )
        *split, places = split_numbers(found.record, operands.numbers, operands.values)
        size = block_size.as_python_constant()
        program = Program(
            found.record,
            lse.as_python_constant(),
            maximum.as_python_constant(),
            size and tuple(size),
            mask_full_blocks.as_python_constant(),
            places,
        )
        proxy = tx.output.create_proxy(
            "call_function",
            torch_op.attention,
            (
                query.as_proxy(),
                key.as_proxy(),
                value.as_proxy(),
                operands.tensors,
                *split,
                [item.as_proxy() for item in lists.items],  # type: ignore[attr-defined]
                to_text(program),
                *_scale(scale, scale_tensor),
            ),
            {},
        )
        return wrap_fx_proxy(tx=tx, proxy=proxy, example_value=None)

    def _trace(
        self, tx: Any, query: VariableTracker, mod: VariableTracker, score_dtype: torch.dtype | None
    ) -> tuple[torch.fx.GraphModule, dict[torch.fx.Proxy, torch.fx.Proxy]]:
        """A mod's graph, and what it captures: outer proxy → placeholder. Its arguments come first."""
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

        def scalar(dtype: torch.dtype) -> VariableTracker:
            empty, kind = VariableTracker.build(tx, []), VariableTracker.build(tx, dtype)
            return query.call_method(tx, "new_empty", [empty], {"dtype": kind})

        with discard_graph_changes(tx):
            scalars = [scalar(torch.int32) for _ in range(4)]
            if score_dtype is not None:
                scalars.insert(0, scalar(score_dtype))
        with TransformGetItemToIndex(), _symbolic_ints(tx):
            _, graph, lifted = speculate_subgraph(
                tx,
                mod,
                scalars,
                {},
                description=f"{self._HOP_NAME}: {'mask_mod' if score_dtype is None else 'score_mod'}",
                source_target=self.value,
                set_subgraph_inputs="flatten_manual",
            )
        return torch.fx.GraphModule(tx.output.nn_modules, graph), lifted


@contextmanager
def _symbolic_ints(tx: Any) -> Iterator[None]:
    """Ints that a mod captures are symbolic at once, not only after their first change: they are run-time arguments of the
    kernel anyway, so a change recompiles nothing. (In an export all captured numbers are constants.)"""
    if tx.output.export or torch.compiler.is_exporting() or torch._dynamo.config.specialize_int:
        yield
        return
    wrap_literal, wrap_symint = VariableBuilder.wrap_literal, VariableBuilder.wrap_symint

    def literal(self: VariableBuilder, value: object) -> VariableTracker:
        if type(value) is int and -(1 << 63) <= value < 1 << 63:
            return symint(self, value)
        return wrap_literal(self, value)

    def symint(self: VariableBuilder, value: int, dynamism: Any = None, context: Any = None) -> VariableTracker:
        return wrap_symint(self, value, dynamism or DimDynamic.DYNAMIC, context)

    VariableBuilder.wrap_literal = literal  # type: ignore[method-assign]
    VariableBuilder.wrap_symint = symint  # type: ignore[method-assign]
    try:
        yield
    finally:
        VariableBuilder.wrap_literal = wrap_literal  # type: ignore[method-assign]
        VariableBuilder.wrap_symint = wrap_symint  # type: ignore[method-assign]


def _scale(scale: VariableTracker, scale_tensor: VariableTracker) -> tuple[Any, Any]:
    """scale and scale_tensor. A float that changes is `tensor.item()` in dynamo's graph: the tensor is passed, for
    AOTAutograd would make a constant of the number."""
    number = scale.as_proxy()
    if isinstance(number, torch.fx.Proxy) and number.node.op == "call_method" and number.node.target == "item":
        (tensor,) = number.node.args
        assert isinstance(tensor, torch.fx.Node)
        return None, torch.fx.Proxy(tensor, number.tracer)
    return number, scale_tensor.as_proxy()


class _Operands:
    """The record's operands as proxies of the graph that dynamo writes."""

    def __init__(self, tx: Any, found: GraphOperands, proxies: Sequence[torch.fx.Proxy], examples: Sequence[Any]):
        self.tx, self.found, self.proxies, self.examples = tx, found, proxies, examples
        self.tensors = [proxies[place] for place in found.captures]
        self.values = [evaluate(expression, found, examples) for expression in found.expressions]
        self.numbers = [self._number(expression) for expression in found.expressions]

    def _number(self, expression: Expression) -> Any:
        """A number's expression over proxies; its example value is that over the symbolic numbers."""
        value = evaluate(expression, self.found, self.examples)
        if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.Tensor)):
            return value
        if expression[0] == "read":
            variable = expression[1].variable
            if variable in self.found.operands:
                return self.proxies[self.found.operands[variable]]
            if variable in self.found.items:
                return self.proxies[self.found.items[variable][0]]
            place, dim = self.found.sizes[variable]
            proxy = self.tx.output.create_proxy("call_method", "size", (self.proxies[place], dim), {})
        else:
            names = {f"x{i}": self._number(part) for i, part in enumerate(expression[1:])}
            proxy = eval(expression[0].format(*names), {}, names)
        proxy.node.meta["example_value"] = value
        return proxy


flex_in_graph = FlexInGraph()
higher_order_ops._hop_name_to_variable_class[flex_in_graph.__name__] = FlexInGraphVariable
