"""What a program keeps of a loop: its text, and which argument is read by which map."""

from __future__ import annotations

from typing import Any, cast

from xdsl.dialects import tensor
from xdsl.dialects.builtin import TensorType
from xdsl.dialects.func import FuncOp
from xdsl.dialects.linalg import ops as linalg
from xdsl.ir import BlockArgument, SSAValue

from attnc.analysis.loops import combiner_of, is_parallel, start_of
from attnc.analysis.roles import map_results
from attnc.codegen.host_text import module_text
from attnc.errors import LoweringError

STAGE = "outline-loops"


def loop_entry(function: FuncOp) -> dict[str, Any]:
    """The JSON of a loop.

    `ins` are [argument, map]: a map has the loop's dimension for each of the tensor's, or null. `starts` are [argument, result]
    where a reduction begins with a tensor; `gathers` and `numbers` arguments; `outs` the results' maps.
    """
    op = next((op for op in function.body.block.ops if isinstance(op, linalg.GenericOp)), None)
    if op is None:  # no loop of outline-loops: a function of the text itself
        raise LoweringError(
            f"func.call of @{function.sym_name.data}: calls are not compiled", remedy="mlir-opt --inline inlines it"
        )
    maps = [list(map_results(attribute.data)) for attribute in op.indexing_maps]
    inputs, results = len(op.inputs), len(op.outputs)
    parallel = is_parallel(op)
    body = op.body.block
    starts = []
    if not parallel:
        starts = [[_number(init), n] for n, init in enumerate(op.outputs) if start_of(init) is None]
    arguments = function.body.block.args
    gathers = [
        n for n, argument in enumerate(arguments) if any(isinstance(u.operation, tensor.ExtractOp) for u in argument.uses)
    ]
    return {
        "kind": "loop",
        "what": "an elementwise operation" if parallel else "a reduction",
        "text": module_text(function, "loop", STAGE),
        "ins": [[_number(value), map_] for value, map_ in zip(op.inputs, maps, strict=False)],
        "starts": starts,
        "gathers": gathers,
        "numbers": [n for n, argument in enumerate(arguments) if not isinstance(argument.type, TensorType)],
        "inits": results,
        "outs": maps[inputs:],
        "iterators": "".join("p" if i.data.value == "parallel" else "r" for i in op.iterator_types),
        "indexed": any(isinstance(inner, linalg.IndexOp) for inner in op.body.walk()),
        "combines": not parallel and all(combiner_of(body, inputs + n) for n in range(results)),
    }


def _number(value: SSAValue) -> int:
    return cast(BlockArgument, value).index
