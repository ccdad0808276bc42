"""The classifier of a kernel learns where the keys end, and the queries where those do not bound the tasks."""

from __future__ import annotations

from xdsl.dialects.builtin import FunctionType, ModuleOp, i32
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, Region

from attnc.dialects.building import INDEX, Builder
from attnc.dialects.tile import EMPTY, FULL, PARTIAL

BOUNDS = ("b", "h0", "h1", "q0", "q1", "k0", "k1")


def bound_classifier(module: ModuleOp, function: FuncOp, name: str | None, unmasked: bool, queries: bool = False) -> str:
    """Adds a last argument `%keys` to the classifier, and returns its name. Where there is none, makes one: every block is
    FULL if the attention is `unmasked` (no mask, no gather to check), else PARTIAL. With `queries`, `%queries` follows, and
    of the rows the same holds.

    Before: `@classify(%b, …, %k1, …) { …; return %class }`. After:

        @classify(%b, …, %k1, …, %keys) {
          %k1_inside = min(%k1, %keys - 1)                       // what was said of %k1 is now said of this
          …
          return %k0 >= %keys ? EMPTY : %class is FULL and %k1 >= %keys ? PARTIAL : %class
    """
    if name is None:
        name = f"{function.sym_name.data}_classify" if _function(module, "classify") is not None else "classify"
        _add_constant(module, function, name, FULL if unmasked else PARTIAL)
    classifier = _function(module, name)
    assert classifier is not None
    _bound(classifier, "key", "keys")
    if queries:
        _bound(classifier, "query", "queries")
    return name


def _bound(classifier: FuncOp, one: str, all_: str) -> None:
    block = classifier.body.block
    keys = block.insert_arg(INDEX, len(block.args))
    keys.name_hint = all_
    first_bound = BOUNDS.index("k0" if one == "key" else "q0")
    k0, k1 = block.args[first_bound], block.args[first_bound + 1]
    head, tail = Block(), Block()
    build = Builder(head)
    last = build.binary("subi", keys, build.constant(1), f"last_{one}")
    inside = build.binary("minsi", k1, last, f"{k1.name_hint}_inside")
    k1.replace_uses_with_if(inside, lambda use: use.operation is not inside.owner)

    returned = block.last_op
    assert isinstance(returned, ReturnOp)
    class_ = returned.arguments[0]
    build = Builder(tail)
    empty, full, partial = (
        build.constant(value, i32, hint) for value, hint in ((EMPTY, "empty"), (FULL, "full"), (PARTIAL, "partial"))
    )
    reaches = build.compare("sge", k1, keys, "reaches_end")
    is_full = build.compare("eq", class_, full, "is_full")
    ragged = build.binary("andi", reaches, is_full, "ragged")
    masked = build.select(ragged, partial, class_, "bounded")
    beyond = build.compare("sge", k0, keys, "beyond")
    result = build.select(beyond, empty, masked, "class")
    first = block.first_op
    assert first is not None
    for op in list(head.ops):
        op.detach()
        block.insert_op_before(op, first)
    for op in list(tail.ops):
        op.detach()
        block.insert_op_before(op, returned)
    returned.operands[0] = result
    classifier.properties["function_type"] = FunctionType.from_lists([argument.type for argument in block.args], [i32])


def _function(module: ModuleOp, name: str) -> FuncOp | None:
    for op in module.ops:
        if isinstance(op, FuncOp) and op.sym_name.data == name:
            return op
    return None


def _add_constant(module: ModuleOp, function: FuncOp, name: str, class_: int) -> None:
    """A classifier that calls every block the same."""
    block = Block(arg_types=[INDEX] * len(BOUNDS))
    for argument, hint in zip(block.args, BOUNDS, strict=True):
        argument.name_hint = hint
    build = Builder(block)
    build.insert(ReturnOp(build.constant(class_, i32, "every")))
    type_ = FunctionType.from_lists([INDEX] * len(BOUNDS), [i32])
    module.body.block.insert_op_before(FuncOp(name, type_, Region(block), visibility="private"), function)
