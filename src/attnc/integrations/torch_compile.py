"""`torch.compile(model, backend="attnc")`: attention on attnc, the rest on Inductor (or eager, where no C++ compiler is).

One pass over the graph that dynamo made puts attnc's functions in the place of torch's flex_attention and
scaled_dot_product_attention; then the whole graph goes through AOTAutograd to Inductor, which sees `attnc::attention` as one
more operator.

    %out = scaled_dot_product_attention(%q, %k, %v, is_causal=True)       before
    %out = attnc.scaled_dot_product_attention(%q, %k, %v, is_causal=True)       after, AOTAutograd makes it
    torch.ops.attnc.attention

A node that attnc refuses stays torch's; `attnc.stats()` counts both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from attnc.errors import ArgumentsError, AttncError
from attnc.integrations import torch_flex, torch_gradients
from attnc.integrations.stats import BACKEND, count_left, count_taken
from attnc.scaled_dot_product import scaled_dot_product_attention

RESTS = ("inductor", "eager")
_FLEX = torch.ops.higher_order.flex_attention
_SDPA = (
    torch.nn.functional.scaled_dot_product_attention,
    torch._C._nn.scaled_dot_product_attention,  # type: ignore[attr-defined]
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)


def backend(
    module: GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None, **others: Any
) -> Callable[..., Any]:
    """The backend's entry point, called by torch.compile for each graph.

    `options={"rest": "inductor" | "eager"}` says what runs the rest of the graph; by default Inductor where a C++ compiler is
    found, else eager. Raises `ArgumentsError` for other options.
    """
    rest = _rest(options, others)
    take_over(module)
    if rest == "inductor":
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(module, list(inputs))  # type: ignore[return-value]
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager(module, list(inputs))


def _rest(options: dict[str, Any] | None, others: dict[str, Any]) -> str:
    given = dict(options or {})
    rest = given.pop("rest", None)
    if given or others:
        name = next(iter({**given, **others}))
        raise ArgumentsError(
            f'backend "attnc" has no option {name!r}', remedy='options={"rest": "inductor"} or {"rest": "eager"}'
        )
    if rest is None:
        return "inductor" if has_cpp_compiler() else "eager"
    if rest not in RESTS:
        raise ArgumentsError(f'backend "attnc": rest={rest!r}', remedy='options={"rest": "inductor"} or {"rest": "eager"}')
    return rest


@functools.cache
def has_cpp_compiler() -> bool:
    """Whether Inductor finds a C++ compiler for the CPU."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, OSError):
        return False
    return True


# -- gradients of torch's own flex_attention, for graphs that come here ----------------------------------------------------
torch_gradients.allow(lambda: torch_gradients.traced_for(backend))


# -- the pass ---------------------------------------------------------------------------------------------------------------
def take_over(module: GraphModule) -> None:
    """Replace torch's attention in a dynamo graph and its nested ones, in place."""
    for inner in module.modules():
        if not isinstance(inner, GraphModule):
            continue
        changed = False
        for node in list(inner.graph.nodes):
            if node.op == "call_function" and node.target is _FLEX:
                changed |= _replace(inner, node, "flex_attention", torch_flex.attention)
            elif node.op == "call_function" and node.target in _SDPA:
                changed |= _replace(inner, node, "scaled_dot_product_attention", scaled_dot_product_attention)
        if changed:
            inner.graph.lint()
            inner.recompile()


def _replace(module: GraphModule, node: Node, name: str, function: Callable[..., Any]) -> bool:
    """Let `node` call `function` in the place of what it calls, if attnc takes it; its results keep their strides."""
    try:
        reason = _reason_to_leave(node)
        if reason is None:
            ours = _on_examples(module, node, function)
    except AttncError as error:
        reason = f"{type(error).__name__}: {error.message}"
    if reason is not None:
        count_left(BACKEND, name, reason)
        return False
    theirs = node.meta["example_value"]
    node.target = function
    if isinstance(theirs, Tensor) and not _same_strides(ours, theirs):
        with module.graph.inserting_after(node):
            order = sorted(range(theirs.dim()), key=functools.cmp_to_key(lambda a, b: _larger_first(theirs.stride(), a, b)))
            restrided = module.graph.call_function(in_order, (node, order))
        restrided.meta["example_value"] = theirs
        node.replace_all_uses_with(restrided, delete_user_cb=lambda user: user is not restrided)
    count_taken(BACKEND, name)
    return True


def _reason_to_leave(node: Node) -> str | None:
    """Why a node stays torch's before attnc looks at it."""
    if any("example_value" not in argument.meta and argument.op != "get_attr" for argument in node.all_input_nodes):
        return "the graph does not say what its arguments are"
    examples = [argument.meta.get("example_value") for argument in node.all_input_nodes]
    tensors = [example for example in examples if isinstance(example, Tensor)]
    devices = {tensor.device.type for tensor in tensors}
    if devices != {"cpu"}:
        return f"it is on {', '.join(sorted(devices))}, and attnc runs on the CPU only so far"
    return None


def _on_examples(module: GraphModule, node: Node, function: Callable[..., Any]) -> Any:
    """What `function` makes of the node's fake arguments: raises what it refuses."""

    def example(argument: Node) -> Any:
        if argument.op == "get_attr" and "example_value" not in argument.meta:
            value = module
            for part in str(argument.target).split("."):
                value = getattr(value, part)
            return value
        return argument.meta["example_value"]

    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), example)  # type: ignore[misc]
    mode = next(value.fake_mode for value in args if isinstance(value, FakeTensor))  # dynamo's, not the one of the context
    with torch.no_grad(), mode:
        return function(*args, **kwargs)


def _same_strides(left: Tensor, right: Tensor) -> bool:
    return all(
        statically_known_true(mine == theirs) or statically_known_true(size == 1)
        for mine, theirs, size in zip(left.stride(), right.stride(), left.shape, strict=True)
    )


def _larger_first(strides: Sequence[Any], left: int, right: int) -> int:
    if statically_known_true(strides[left] == strides[right]):
        return left - right
    return -1 if strides[left] > strides[right] else 1


def in_order(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """`tensor`, dense in memory with its dims in the order given, outermost first."""
    back = [order.index(dim) for dim in range(len(order))]
    return tensor.permute(list(order)).contiguous().permute(back)
