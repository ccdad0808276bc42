"""Runs a function of the linalg stage in NumPy: `linalg`, `tensor`, `arith`, `math` and the attention operations of any domain.

`run_function(module, "main", arguments)` takes and gives NumPy arrays (bf16 as float32) and Python numbers. A `linalg.generic`
runs its body once for each point of its reduction dims, in order, with all parallel dims as one array; attention is the dense
formula in f64, rounded to the result's type. With `exact` all floats are f64 and nothing is rounded. `tensor.empty` holds NaN
(integers: a minimum), so that what is never written shows. It is slow and plain: the judge of what passes make.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from xdsl.dialects import arith, func, linalg, scf, tensor
from xdsl.dialects.builtin import (
    DenseIntOrFPElementsAttr,
    DenseResourceAttr,
    FloatAttr,
    IntegerAttr,
    ModuleOp,
    TensorType,
)
from xdsl.ir import Attribute, Block, Operation, SSAValue
from xdsl.ir.affine import AffineConstantExpr, AffineDimExpr, AffineMap

from attnc.analysis.roles import map_results
from attnc.dialects.linalg_ext import AttentionOp, OnlineAttentionOp
from attnc.dialects.resources import resources_of
from region_interpreter import Fault, RegionInterpreter
from scalar_ops import as_type, numpy_type

_DYNAMIC = -(1 << 63)


def run_function(
    module: ModuleOp, name: str, arguments: Sequence[Any], exact: bool = False, faults: list[Fault] | None = None
) -> list[np.ndarray]:
    """The results of `func.func @name` on arrays and numbers. `faults` collects torch indices out of range; without it they
    are an assertion."""
    functions = {op.sym_name.data: op for op in module.ops if isinstance(op, func.FuncOp)}
    interpreter = LinalgInterpreter(functions, exact, resources=resources_of(module))
    results = interpreter.call(name, list(arguments))
    if faults is None:
        assert not interpreter.faults, f"indices out of range: {[fault.name for fault in interpreter.faults]}"
    else:
        faults += interpreter.faults
    return results


def to_numpy(value: Any) -> Any:
    """A torch tensor as the array that stands for it here; anything else as it is."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def _element(type_: Attribute) -> Attribute:
    return type_.element_type if isinstance(type_, TensorType) else type_


@dataclass
class _Body(RegionInterpreter):
    """A body or region, for many points at once: also `linalg.index`, `tensor.dim`."""

    def _run(self, op: Operation) -> None:
        match op:
            case linalg.IndexOp():
                self.values[op.result] = np.asarray(self.positions[op.dim.value.data], np.int64)
            case tensor.DimOp():
                self.values[op.result] = np.asarray(self.values[op.source].shape[int(self.values[op.index])], np.int64)
            case scf.IfOp():
                raise NotImplementedError("scf.if in a body")
            case _:
                super()._run(op)

    def run(self, block: Block) -> list[np.ndarray]:
        for op in block.ops:
            if op is block.last_op:
                return [self.values[operand] for operand in op.operands]
            self._run(op)
        raise AssertionError("the block has no terminator")


@dataclass
class LinalgInterpreter:
    """Holds the module's functions; `call` runs one."""

    functions: dict[str, func.FuncOp]
    exact: bool = False
    resources: dict[str, bytes] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def call(self, name: str, arguments: list[Any]) -> list[np.ndarray]:
        """The results of a function."""
        block = self.functions[name].body.block
        assert len(block.args) == len(arguments), f"@{name} takes {len(block.args)} arguments, not {len(arguments)}"
        values: dict[SSAValue, np.ndarray] = {}
        for argument, value in zip(block.args, arguments, strict=True):
            values[argument] = self._typed(np.asarray(value), argument.type)
        for op in block.ops:
            if isinstance(op, func.ReturnOp):
                return [values[operand] for operand in op.operands]
            results = self._run(op, values)
            for result, value in zip(op.results, results, strict=True):
                values[result] = self._typed(value, result.type)
        raise AssertionError(f"@{name} has no return")

    def _typed(self, value: np.ndarray, type_: Attribute) -> np.ndarray:
        """Checks the shape and gives the element type."""
        if isinstance(type_, TensorType):
            shape = type_.get_shape()
            fits = len(shape) == value.ndim and all(s in (-1, _DYNAMIC, v) for s, v in zip(shape, value.shape, strict=True))
            assert fits, f"a value of shape {value.shape} for {type_}"
        if value.dtype == np.uint8:
            value = value.view(np.int8)
        return value if value.dtype == numpy_type(_element(type_), self.exact) else as_type(value, _element(type_), self.exact)

    def _run(self, op: Operation, values: dict[SSAValue, np.ndarray]) -> Sequence[np.ndarray]:
        operands = [values[operand] for operand in op.operands]
        match op:
            case func.CallOp():
                return self.call(op.callee.string_value(), operands)
            case linalg.GenericOp():
                maps = [attribute.data for attribute in op.indexing_maps]
                kinds = [attribute.data.value for attribute in op.iterator_types]
                return self.generic(op, maps, kinds, values)
            case AttentionOp() | OnlineAttentionOp():
                return self.attention(op, values)
            case arith.ConstantOp():
                return [self._constant(op.value, op.result.type)]
        if op.name in _NAMED:
            return _NAMED[op.name](self, op, operands, values)
        body = _Body(values, exact=self.exact)  # scalar arithmetic, loops, tensor.extract
        body._run(op)
        self.faults += body.faults
        return [values[result] for result in op.results]

    def _constant(self, value: Attribute, type_: Attribute) -> np.ndarray:
        if isinstance(value, IntegerAttr | FloatAttr):
            return as_type(value.value.data, type_, self.exact)
        assert isinstance(type_, TensorType)
        shape = type_.get_shape()
        if isinstance(value, DenseResourceAttr):
            return self._resource(self.resources[value.resource_handle.data], type_.element_type).reshape(shape)
        assert isinstance(value, DenseIntOrFPElementsAttr)
        elements = as_type(np.asarray(list(value.get_values())), type_.element_type, self.exact)
        return np.broadcast_to(elements.reshape(()) if elements.size == 1 else elements.reshape(shape), shape)

    def _resource(self, data: bytes, element: Attribute) -> np.ndarray:
        if str(element) == "bf16":
            return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        return as_type(np.frombuffer(data, numpy_type(element)), element, self.exact)

    # -- linalg.generic -----------------------------------------------------------------------------------------------

    def generic(
        self, op: Any, maps: Sequence[AffineMap], kinds: Sequence[str], values: dict[SSAValue, np.ndarray]
    ) -> list[np.ndarray]:
        """Any structured operation with a body over its operands' elements: inputs, then outputs."""
        operands = [values[operand] for operand in op.operands]
        block = op.regions[0].block
        inputs = len(operands) - len(op.results)

        def body(elements: list[np.ndarray], positions: dict[int, np.ndarray]) -> list[np.ndarray]:
            run = _Body({**values, **dict(zip(block.args, elements, strict=True))}, positions, self.exact)
            results = run.run(block)
            self.faults.extend(run.faults)
            return results

        return structured(operands, inputs, maps, kinds, body)

    # -- attention ----------------------------------------------------------------------------------------------------

    def attention(self, op: AttentionOp | OnlineAttentionOp, values: dict[SSAValue, np.ndarray]) -> list[np.ndarray]:
        """The dense formula in f64; a dead key has no influence, a row without a live key is 0 (SUM 0, max -inf)."""
        roles = op.roles
        rank = op.maps[0].num_dims
        letters = string.ascii_lowercase
        terms: list[str] = []
        arrays: list[np.ndarray] = []
        sizes: dict[int, int] = {}
        for operand, map_ in zip(op.operands, op.maps, strict=True):
            array, picked = values[operand], map_results(map_)
            keep = [d for d in picked if d is not None]
            if array.dtype.kind == "f":
                array = array.astype(np.float64)
            arrays.append(array.reshape([s for s, d in zip(array.shape, picked, strict=True) if d is not None]))
            terms.append("".join(letters[d] for d in keep))
            sizes |= zip(keep, arrays[-1].shape, strict=True)
        score_term = "".join(letters[d] for d in range(rank) if d in roles.score)
        with np.errstate(all="ignore"):
            score = np.einsum(f"{terms[0]},{terms[1]}->{score_term}", arrays[0], arrays[1]) * arrays[3]
            domain = [sizes[d] if d in roles.score else 1 for d in range(rank)]
            score = score.reshape(domain)
            argument = op.region.block.args[0]
            element = as_type(score, argument.type, self.exact)
            positions = {d: np.arange(sizes[d]).reshape([-1 if i == d else 1 for i in range(rank)]) for d in range(rank)}
            body = _Body({**values, argument: element}, positions, self.exact)
            score = np.broadcast_to(body.run(op.region.block)[0], domain).astype(np.float64)
            self.faults.extend(body.faults)
            if op.mask is not None:
                mask = _spread(arrays[4], terms[4], rank)
                score = np.where(mask == 0, -np.inf, score) if mask.dtype.kind != "f" else score + mask
            k2 = tuple(roles.k2)
            row_term = "".join(letters[d] for d in range(rank) if d in roles.row)
            inits = arrays[-len(op.inits) :]
            top = score.max(axis=k2, keepdims=True, initial=-np.inf)
            if isinstance(op, OnlineAttentionOp):
                old_top = _spread(inits[1], terms[-2], rank)
                top = np.maximum(top, old_top)
            anchor = np.where(np.isneginf(top), 0.0, top)
            weight = np.where(np.isneginf(score), 0.0, np.exp(score - anchor))
            out_dims = set(roles.batch + roles.m + roles.n)
            out_term = "".join(letters[d] for d in range(rank) if d in out_dims)
            acc = _weighted(weight, ~np.isneginf(score), arrays[2], score_term, terms[2], out_term)
            total = weight.sum(axis=k2, keepdims=True)
            out_shape = [sizes[d] if d in out_dims else 1 for d in range(rank)]
            acc = acc.reshape(out_shape)
            if not isinstance(op, OnlineAttentionOp):
                out = np.where(total == 0, 0.0, acc / total)
                return [self._placed(out, op, -1)]
            factor = np.where(np.isneginf(old_top), 0.0, np.exp(old_top - anchor))
            acc = acc + np.where(factor == 0, 0.0, _spread(inits[0], terms[-3], rank) * factor)
            total = total + np.where(factor == 0, 0.0, _spread(inits[2], terms[-1], rank) * factor)
            assert len(row_term) == len(roles.row)
            return [self._placed(value, op, position) for value, position in ((acc, -3), (top, -2), (total, -1))]

    def _placed(self, value: np.ndarray, op: AttentionOp | OnlineAttentionOp, position: int) -> np.ndarray:
        """From the domain's shape to that of an output's map."""
        picked = map_results(op.maps[position])
        dims = [d for d in picked if d is not None]
        rank = value.ndim
        moved = value.transpose([*dims, *(d for d in range(rank) if d not in dims)])
        shape = moved.shape[: len(dims)]
        sizes = iter(shape)
        return moved.reshape([1 if d is None else next(sizes) for d in picked])


def _spread(array: np.ndarray, term: str, rank: int) -> np.ndarray:
    """An operand with the dims that `term` names, in the domain's shape (1 where it has none)."""
    positions = [string.ascii_lowercase.index(letter) for letter in term]
    order = sorted(range(len(positions)), key=positions.__getitem__)
    shape = [1] * rank
    for position, size in zip(positions, array.shape, strict=True):
        shape[position] = size
    return array.transpose(order).reshape(shape)


def _weighted(weight: np.ndarray, live: np.ndarray, value: np.ndarray, score: str, value_term: str, out: str) -> np.ndarray:
    """The sum of weight · value over what `out` lacks, dead keys left out whatever their value rows hold."""
    dims = [string.ascii_lowercase.index(letter) for letter in score]
    flat = [weight.shape[d] for d in dims]
    equation = f"{score},{value_term}->{out}"

    def total(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return np.einsum(equation, left.reshape(flat), right)

    result = total(weight, np.where(np.isfinite(value), value, 0.0))
    if np.isfinite(value).all():
        return result
    up, down = (total(live.astype(float), (value == infinity).astype(float)) > 0 for infinity in (np.inf, -np.inf))
    wrong = total(live.astype(float), np.isnan(value).astype(float)) > 0
    result = np.where(up, np.inf, np.where(down, -np.inf, result))
    return np.where(wrong | (up & down), np.nan, result)


def structured(
    operands: Sequence[np.ndarray],
    inputs: int,
    maps: Sequence[AffineMap],
    kinds: Sequence[str],
    body: Callable[[list[np.ndarray], dict[int, np.ndarray]], list[np.ndarray]],
) -> list[np.ndarray]:
    """`body(elements, positions)` over an iteration domain; elements and positions are arrays over the parallel dims."""
    rank = len(kinds)
    sizes: dict[int, int] = {}
    for array, map_ in zip(operands, maps, strict=True):
        for size, expression in zip(array.shape, map_.results, strict=True):
            if isinstance(expression, AffineDimExpr):
                known = sizes.setdefault(expression.position, size)
                assert known == size, f"d{expression.position} is {known} in one operand and {size} in another"
    parallel = [d for d in range(rank) if kinds[d] == "parallel"]
    reduced = [d for d in range(rank) if kinds[d] != "parallel"]
    shape = [sizes[d] for d in parallel]

    def along(dim: int) -> np.ndarray:
        return np.arange(sizes[dim]).reshape([-1 if d == dim else 1 for d in parallel])

    def indices(map_: AffineMap, point: dict[int, int]) -> tuple[Any, ...]:
        positions = [np.asarray(point[d]) if d in point else along(d) for d in range(rank)]
        return tuple(_affine(expression, positions) for expression in map_.results)

    outputs = [np.array(array) for array in operands[inputs:]]
    for numbers in itertools.product(*(range(sizes[d]) for d in reduced)):
        point = dict(zip(reduced, numbers, strict=True))
        positions = {d: np.asarray(point[d]) if d in point else along(d) for d in range(rank)}
        read = [*operands[:inputs], *outputs]
        elements = [
            array[tuple(np.broadcast_arrays(*indices(map_, point)))] if array.ndim else array
            for array, map_ in zip(read, maps, strict=True)
        ]
        for output, map_, value in zip(outputs, maps[inputs:], body(elements, positions), strict=True):
            if output.ndim:
                output[tuple(np.broadcast_arrays(*indices(map_, point), np.empty(shape))[:-1])] = np.broadcast_to(value, shape)
            else:
                output[...] = value
    return outputs


def _affine(expression: Any, dims: list[np.ndarray]) -> np.ndarray:
    if isinstance(expression, AffineDimExpr):
        return dims[expression.position]
    if isinstance(expression, AffineConstantExpr):
        return np.asarray(expression.value)
    return expression.eval(list(dims), [])


# -- operations of tensor, and named ones of linalg -------------------------------------------------------------------


def _attribute(op: Operation, name: str) -> Any:
    return op.properties[name] if name in op.properties else op.attributes[name]


def _ints(attribute: Any) -> list[int]:
    return [int(value) for value in attribute.get_values()]


def _empty(run: LinalgInterpreter, op: Any, operands: list[np.ndarray], values: Any) -> list[np.ndarray]:
    dynamic = iter(operands)
    type_ = cast(TensorType, op.results[0].type)
    shape = [size if size >= 0 else int(next(dynamic)) for size in type_.get_shape()]
    dtype: Any = np.dtype(numpy_type(type_.element_type, run.exact))
    return [np.full(shape, np.nan if dtype.kind == "f" else 0 if dtype.kind == "b" else np.iinfo(dtype).min, dtype)]


def _shape(op: Any, static: Sequence[int], dynamic: Sequence[np.ndarray]) -> list[int]:
    rest = iter(dynamic)
    return [int(next(rest)) if size == _DYNAMIC or size == -1 else size for size in static]


def _groups(op: Any) -> list[list[int]]:
    return [[dim.value.data for dim in group] for group in op.reassociation]


def _expand(run: LinalgInterpreter, op: Any, operands: list[np.ndarray], values: Any) -> list[np.ndarray]:
    shape = _shape(op, _ints(op.static_output_shape), operands[1:])
    groups = _groups(op)
    if groups:
        sizes = tuple(int(np.prod([shape[d] for d in group])) for group in groups)
        assert sizes == operands[0].shape, f"{sizes} does not split {operands[0].shape}: {op}"
    return [operands[0].reshape(shape)]


def _collapse(run: LinalgInterpreter, op: Any, operands: list[np.ndarray], values: Any) -> list[np.ndarray]:
    return [operands[0].reshape([int(np.prod([operands[0].shape[d] for d in group])) for group in _groups(op)])]


def _slices(op: Any, values: dict[SSAValue, np.ndarray]) -> tuple[tuple[slice, ...], list[int]]:
    def numbers(static: Any, dynamic: Sequence[SSAValue]) -> list[int]:
        return _shape(op, _ints(static), [values[value] for value in dynamic])

    offsets, sizes = numbers(op.static_offsets, op.offsets), numbers(op.static_sizes, op.sizes)
    strides = numbers(op.static_strides, op.strides)
    parts = []
    for offset, size, stride in zip(offsets, sizes, strides, strict=True):
        assert stride > 0 and offset >= 0 and size >= 0, f"{op}"
        parts.append(slice(offset, offset + (size - 1) * stride + 1 if size else offset, stride))
    return tuple(parts), sizes


def _extract_slice(run: LinalgInterpreter, op: Any, operands: list[np.ndarray], values: Any) -> list[np.ndarray]:
    parts, sizes = _slices(op, values)
    result = operands[0][parts]
    assert list(result.shape) == sizes, f"a slice beyond {operands[0].shape}: {op}"
    return [result.reshape(_reduced(result.shape, op.result.type))]


def _reduced(shape: Sequence[int], type_: TensorType) -> list[int]:
    """The shape of a slice whose unit dims the type may lack."""
    wanted = type_.get_shape()
    if len(wanted) == len(shape):
        return list(shape)
    kept: list[int] = []
    missing = len(shape) - len(wanted)
    for size in shape:
        following = wanted[len(kept)] if len(kept) < len(wanted) else None
        if size == 1 and missing and following != 1:
            missing -= 1
        else:
            kept.append(size)
    return kept


def _insert_slice(run: LinalgInterpreter, op: Any, operands: list[np.ndarray], values: Any) -> list[np.ndarray]:
    parts, sizes = _slices(op, values)
    result = np.array(operands[1])
    assert list(result[parts].shape) == sizes, f"a slice beyond {result.shape}: {op}"
    result[parts] = operands[0].reshape(sizes)
    return [result]


def _fill(run: LinalgInterpreter, op: Any, operands: list[np.ndarray], values: Any) -> list[np.ndarray]:
    return [np.full(operands[1].shape, operands[0], operands[1].dtype)]


def _transpose(run: LinalgInterpreter, op: Any, operands: list[np.ndarray], values: Any) -> list[np.ndarray]:
    return [operands[0].transpose(_ints(_attribute(op, "permutation")))]


def _broadcast(run: LinalgInterpreter, op: Any, operands: list[np.ndarray], values: Any) -> list[np.ndarray]:
    shape = operands[1].shape
    added = _ints(_attribute(op, "dimensions"))
    return [np.broadcast_to(operands[0].reshape([1 if d in added else shape[d] for d in range(len(shape))]), shape)]


def _reduce(run: LinalgInterpreter, op: Any, operands: list[np.ndarray], values: Any) -> list[np.ndarray]:
    rank = operands[0].ndim
    gone = _ints(_attribute(op, "dimensions"))
    inputs = len(operands) - len(op.results)
    whole = AffineMap.identity(rank)
    kept = AffineMap(rank, 0, tuple(AffineDimExpr(d) for d in range(rank) if d not in gone))
    kinds = ["reduction" if d in gone else "parallel" for d in range(rank)]
    return run.generic(op, [whole] * inputs + [kept] * len(op.results), kinds, values)


def _matmul(equation: str) -> Callable[..., list[np.ndarray]]:
    def build(run: LinalgInterpreter, op: Any, operands: list[np.ndarray], values: Any) -> list[np.ndarray]:
        terms = equation
        maps = op.properties.get("indexing_maps") or op.attributes.get("indexing_maps")
        if maps is not None:
            spelt = ["".join(string.ascii_lowercase[d] for d in map_results(map_.data) if d is not None) for map_ in maps]
            terms = f"{spelt[0]},{spelt[1]}->{spelt[2]}"
        left, right, out = (operand.astype(np.float64 if operand.dtype.kind == "f" else operand.dtype) for operand in operands)
        return [(np.einsum(terms, left, right) + out).astype(operands[2].dtype)]

    return build


def _softmax(run: LinalgInterpreter, op: Any, operands: list[np.ndarray], values: Any) -> list[np.ndarray]:
    dim = _attribute(op, "dimension").value.data
    x = operands[0].astype(np.float64)
    weight = np.exp(x - x.max(axis=dim, keepdims=True))
    return [(weight / weight.sum(axis=dim, keepdims=True)).astype(operands[1].dtype)]


def _concat(run: LinalgInterpreter, op: Any, operands: list[np.ndarray], values: Any) -> list[np.ndarray]:
    return [np.concatenate(operands, axis=_attribute(op, "dim").value.data)]


def _elementwise(function: Callable[..., Any]) -> Callable[..., list[np.ndarray]]:
    return lambda run, op, operands, values: [np.asarray(function(*operands[: len(operands) - len(op.results)]))]


_NAMED: dict[str, Callable[..., list[np.ndarray]]] = {
    "tensor.empty": _empty,
    "tensor.dim": lambda run, op, operands, values: [np.asarray(operands[0].shape[int(operands[1])], np.int64)],
    "tensor.cast": lambda run, op, operands, values: [operands[0]],
    "tensor.expand_shape": _expand,
    "tensor.collapse_shape": _collapse,
    "tensor.extract_slice": _extract_slice,
    "tensor.insert_slice": _insert_slice,
    "tensor.concat": _concat,
    "tensor.from_elements": lambda run, op, operands, values: [np.stack(operands).reshape(op.results[0].type.get_shape())],
    "tensor.splat": lambda run, op, operands, values: [np.full(op.results[0].type.get_shape(), operands[0])],
    "linalg.fill": _fill,
    "linalg.copy": _elementwise(lambda a: a),
    "linalg.transpose": _transpose,
    "linalg.broadcast": _broadcast,
    "linalg.reduce": _reduce,
    "linalg.matmul": _matmul("mk,kn->mn"),
    "linalg.batch_matmul": _matmul("bmk,bkn->bmn"),
    "linalg.softmax": _softmax,
    **{f"linalg.{name}": _elementwise(getattr(np, name)) for name in ("add", "exp", "log", "sqrt")},
    "linalg.sub": _elementwise(np.subtract),
    "linalg.mul": _elementwise(np.multiply),
    "linalg.max": _elementwise(np.maximum),
    "linalg.min": _elementwise(np.minimum),
    "linalg.select": _elementwise(np.where),
}
