"""Runs a block of scalar operations in NumPy: an attention's region, for all its (b, h, q, k) at once.

Values are arrays that broadcast against each other. An `scf.for` runs in Python; `tensor.extract` reads by raw torch indices
where it has `attnc.checked`: negative ones wrap once, and where one is out of range is noted in `faults`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from xdsl.dialects import scf, tensor
from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Block, Operation, SSAValue

from attnc.dialects.linalg_ext import AttentionLike, IndexOp, YieldOp
from scalar_ops import as_type, evaluate


@dataclass
class Fault:
    """An index out of range: on which pairs the read is checked ("kept", "all", "listed"), what it reads, where it is wrong."""

    checked: str
    name: str
    where: np.ndarray


@dataclass
class RegionInterpreter:
    """`values` holds what the block takes from outside; tensors are arrays of their elements' NumPy types.

    With `exact`, floats are computed in f64 and not rounded.
    """

    values: dict[SSAValue, np.ndarray]
    positions: dict[int, np.ndarray] = field(default_factory=dict)
    exact: bool = False
    faults: list[Fault] = field(default_factory=list)

    def run(self, block: Block) -> list[np.ndarray]:
        """What the block's terminator takes."""
        for op in block.ops:
            if isinstance(op, scf.YieldOp | YieldOp) or op.name in ("func.return", "attnc.yield"):
                return [self.values[operand] for operand in op.operands]
            self._run(op)
        raise AssertionError("the block has no terminator")

    def _run(self, op: Operation) -> None:
        match op:
            case IndexOp():
                self.values[op.result] = np.asarray(self.positions[op.dimension], np.int64)
            case tensor.ExtractOp():
                self.values[op.result] = self._extract(op)
            case scf.ForOp():
                self._loop(op)
            case _:
                operands = [self.values[operand] for operand in op.operands]
                self.values[op.results[0]] = evaluate(op, operands, self.exact)

    def _loop(self, op: scf.ForOp) -> None:
        low, high, step = (int(self.values[bound]) for bound in (op.lb, op.ub, op.step))
        carried = [self.values[init] for init in op.iter_args]
        position, *arguments = op.body.block.args
        for number in range(low, high, step):
            self.values[position] = np.asarray(number, np.int64)
            self.values.update(zip(arguments, carried))
            carried = self.run(op.body.block)
        self.values.update(zip(op.results, carried))

    def _extract(self, op: tensor.ExtractOp) -> np.ndarray:
        source = self.values[op.tensor]
        checked = op.attributes.get("attnc.checked")
        indices = []
        wrong = np.asarray(False)
        for dim, operand in enumerate(op.indices):
            index = self.values[operand]
            size = source.shape[dim]
            if isinstance(checked, StringAttr):
                wrong = wrong | (index < -size) | (index >= size)
                index = np.where(index < 0, index + size, index)
                index = np.clip(index, 0, max(size - 1, 0))
            else:
                assert np.all((index >= 0) & (index < size)), f"{op}: an unchecked index is out of range"
            indices.append(index)
        if np.any(wrong):
            assert isinstance(checked, StringAttr)
            name = op.attributes["attnc.name"]
            assert isinstance(name, StringAttr)
            self.faults.append(Fault(checked.data, name.data, wrong))
        return as_type(source[tuple(np.broadcast_arrays(*indices))] if indices else source, op.result.type, self.exact)


def run_region(
    op: AttentionLike,
    score: np.ndarray,
    sizes: tuple[int, int, int, int, int],
    outside: dict[SSAValue, np.ndarray],
    exact: bool = False,
) -> tuple[np.ndarray, list[Fault]]:
    """The modified scores [B, Hkv, G, Sq, Skv] of an attention whose domain is (b, hkv, g, q, k, …), and the faults met.

    `sizes` are those five; `score` broadcasts against them; `outside` holds captured tensors and numbers.
    """
    positions = {dim: np.arange(size).reshape([-1 if d == dim else 1 for d in range(5)]) for dim, size in enumerate(sizes)}
    block = op.region.block
    interpreter = RegionInterpreter({**outside, block.args[0]: score}, positions, exact)
    (result,) = interpreter.run(block)
    return np.broadcast_to(result, sizes), interpreter.faults
