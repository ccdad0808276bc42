"""Indexing, views, making, joining and reductions of small tensors against torch: the converted scalar code run in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from xdsl.dialects import func, scf
from xdsl.dialects.builtin import IndexType
from xdsl.ir import Block, SSAValue

from attnc.errors import UnsupportedOpError
from attnc.transforms.convert_torch_to_linalg_ext_mods import captured, interpret, tensor_type
from attnc.transforms.convert_torch_to_linalg_ext_values import CARRIED, Scalar, ScalarBuilder, Value
from region_interpreter import RegionInterpreter
from torch_mods import dtype_of, trace

f64, f32, f16, bf16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
i64, i32, i8, u8, b1 = torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool


def at(tensor: Tensor, *indices: Tensor | None) -> Tensor:
    """`tensor[indices]` as an aten.index, also by 0-d tensors, which Python would turn into numbers."""
    return torch.ops.aten.index.Tensor(tensor, list(indices))


def table(*shape: int, dtype: torch.dtype = f32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == b1:
        return torch.rand(shape, generator=generator) < 0.4
    if not dtype.is_floating_point:
        return torch.randint(0 if dtype == u8 else -9, 10, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=f64).to(dtype)


def to_numpy(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == bf16:
        return tensor.float().numpy()
    return tensor.view(torch.int8).numpy() if tensor.dtype == torch.uint8 else tensor.numpy()


def build(function: Callable, captures: Sequence[Tensor], positions: Sequence[Tensor], dynamic: Sequence[int] = ()) -> Block:
    """The scalar code of `function(*captures, *positions)`: the captures as tensor arguments, the positions as scalars."""
    samples = [*captures, *(position.flatten()[0] for position in positions)]
    names = [f"x{n}" for n in range(len(samples))]
    wrapper = eval(f"lambda {', '.join(names)}: function({', '.join(names)})", {"function": function})
    mod = trace(wrapper, samples, dynamic=dynamic)
    types = list(mod.function_type.inputs)[: len(captures)]
    block = Block(arg_types=[*map(tensor_type, types), *(CARRIED[dtype_of(p.dtype)] for p in positions)])  # type: ignore[arg-type]
    r = ScalarBuilder(
        block, lambda source, dim: sizes.setdefault((source, dim), block.insert_arg(IndexType(), len(block.args)))
    )
    sizes: dict = {}
    arguments: list[Value] = [
        captured(r, argument, type_, f"c{n}")  # type: ignore[arg-type]
        for n, (argument, type_) in enumerate(zip(block.args, types))
    ]
    arguments += [Scalar(a, dtype_of(p.dtype)) for a, p in zip(block.args[len(captures) :], positions)]
    block.add_op(func.ReturnOp(interpret(r, mod, arguments).value))
    r.finish()
    build.sizes = sizes  # type: ignore[attr-defined]
    return block


def check(function: Callable, *captures: Tensor, n: int = 0, close: float = 1e-5, dynamic: Sequence[int] = ()) -> Block:
    """`function(*captures, *positions)` for all positions below `n` (one scalar), or without positions if `n` is 0."""
    positions = [torch.arange(-n, n, dtype=i32)] if n else []
    block = build(function, captures, positions, dynamic)
    values: dict[SSAValue, np.ndarray] = {a: to_numpy(t) for a, t in zip(block.args, [*captures, *positions])}
    values |= {v: np.asarray(values[source].shape[dim]) for (source, dim), v in build.sizes.items()}  # type: ignore[attr-defined]
    interpreter = RegionInterpreter(values)
    (result,) = interpreter.run(block)
    assert not interpreter.faults
    expected = torch.stack([function(*captures, p) for p in positions[0]]) if n else function(*captures)
    reference = to_numpy(expected)
    assert result.dtype == reference.dtype
    result = np.broadcast_to(result, reference.shape)
    if expected.dtype.is_floating_point:
        close = {f16: 2e-3, bf16: 1.6e-2}.get(expected.dtype, close)
        np.testing.assert_allclose(result, reference, rtol=close, atol=close)
    else:
        np.testing.assert_array_equal(result, reference)
    return block


def loops(block: Block) -> int:
    return sum(isinstance(op, scf.ForOp) for op in block.walk())


INDEXING: dict[str, Callable] = {
    "row and column": lambda t, i: at(t, i, i),
    "row": lambda t, i: at(t, i)[2],
    "column": lambda t, i: at(t, None, i)[1],
    "select": lambda t, i: at(t[3], i),
    "select last": lambda t, i: at(t[-1], i),
    "select column": lambda t, i: at(t.select(1, -2), i),
    "slice": lambda t, i: at(t[:, 1:5], i)[1],
    "strided slice": lambda t, i: at(t[::2], i // 2)[1],
    "row of slice": lambda t, i: at(t[:6], i)[3:][2],
    "transpose": lambda t, i: at(t.t(), i)[0],
    "permuted": lambda t, i: at(t.permute(1, 0), i, i),
    "unsqueezed": lambda t, i: at(t.unsqueeze(1), i)[0, 4],
    "squeezed": lambda t, i: at(t.unsqueeze(0).squeeze(0), i)[4],
    "flattened": lambda t, i: at(t.flatten(), i + 7),
    "viewed": lambda t, i: at(t.view(3, 2, 2, 3), i // 2, i // 3, i // 3)[1],
    "reshaped row": lambda t, i: at(at(t, i).reshape(2, 3), i // 3)[2],
    "expanded": lambda t, i: at(at(t, i).expand(6, 6), i)[3],
    "flipped": lambda t, i: at(t.flip(0, 1), i, i),
    "linspace": lambda t, i: at(torch.linspace(-1, 2, 6), i) * 2,
    "eye": lambda t, i: at(torch.eye(6), i, i // 2),
    "tril": lambda t, i: at(torch.tril(t, 1), i, i // 2),
    "triu": lambda t, i: at(torch.triu(t, -1), i // 3, i),
    "rolled": lambda t, i: at(torch.roll(t, (2, -1), (0, 1)), i, i),
    "rolled flat": lambda t, i: at(torch.roll(t, 7), i, i),
    "rolled flat backwards": lambda t, i: at(t.roll(-3), i, i // 2),
    "diagonal": lambda t, i: at(t.diagonal(), i),
    "diagonal above": lambda t, i: at(t.diagonal(2), i // 2),
    "diagonal below": lambda t, i: at(torch.diagonal(t, -1, 1, 0), i // 2),
    "index tensor": lambda t, i: at(t, torch.arange(4) + i // 3, None)[1, 2],
    "two index tensors": lambda t, i: at(t, torch.arange(2)[:, None] + i // 3, torch.arange(3))[1, 2],
    "index around": lambda t, i: at(t.view(3, 2, 6), i // 2, None, i)[1],
    "index select": lambda t, i: torch.index_select(t, 0, torch.arange(3) + i % 3)[1, 2],
    "gather": lambda t, i: torch.gather(at(t, i), 0, torch.arange(4))[3],
    "take along": lambda t, i: torch.take_along_dim(at(t, i), torch.arange(4), 0)[3],
    "embedding": lambda t, i: F.embedding(i.abs() // 2, t)[3],
    "double gather": lambda t, i: at(t, (at(t, i)[0] > 0).long())[1],
    "computed": lambda t, i: at(t * 2 + t[0], i)[1],
    "stacked": lambda t, i: at(torch.stack([t[0], t[1] * 2, t[2]]), i // 2)[1],
    "stacked scalars": lambda t, i: at(torch.stack([t[0, 0], t[1, 1], t[2, 2]]), i // 2),
    "stacked columns": lambda t, i: torch.stack([at(t, i), at(t, i) * 2], 1)[2, 1],
    "concatenated": lambda t, i: at(torch.cat([t[:2], t[4:], t[1:3] * 2]), i)[1],
    "concatenated columns": lambda t, i: at(torch.cat([at(t, i)[:2], at(t, i)[3:]]), i // 2),
    "arange": lambda t, i: at(torch.arange(6) * 3, i),
    "arange step": lambda t, i: at(torch.arange(1, 13, 2), i),
    "arange float": lambda t, i: at(torch.arange(0.5, 6.5, 1.0), i),
    "zeros": lambda t, i: at(torch.zeros(6, dtype=i32) + i, i),
    "ones like": lambda t, i: at(torch.ones_like(t[0]), i),
    "full": lambda t, i: at(torch.full((6,), 2.5), i) + at(torch.full_like(t[0], 3), i) + t.new_full((6,), 1.5)[2],
    "constant": lambda t, i: at(torch.tensor([1.0, -2.0, 3.5, 7.0, 8.0, 9.0]), i),
    "constant ints": lambda t, i: at(torch.tensor([[1, -2], [3, 7]]), i // 3, i // 3),
    "scalar constant": lambda t, i: torch.tensor(2.5) * i,
}


@pytest.mark.parametrize("name", INDEXING)
def test_indexing(name: str):
    check(INDEXING[name], table(6, 6), n=6)


REDUCTIONS: dict[str, Callable] = {
    "sum": lambda t, i: at(t, i).sum(),
    "sum of a dim": lambda t, i: at(t.sum(1), i),
    "sum keeping": lambda t, i: at(t.sum(0, keepdim=True), None, i)[0],
    "sum of both": lambda t, i: t.sum((0, 1)) + i,
    "mean": lambda t, i: at(t, i).mean(),
    "mean of a dim": lambda t, i: at(t.mean(0), i),
    "prod": lambda t, i: at(t, i).prod(),
    "prod of a dim": lambda t, i: at(t.prod(0), i),
    "amax": lambda t, i: at(t, i).amax(0),
    "amin": lambda t, i: at(t, i).amin(0),
    "max": lambda t, i: at(t, i).max() + t.max(0).values[1],
    "min": lambda t, i: at(t, i).min() + t.min(1)[0][2],
    "dot": lambda t, i: torch.dot(at(t, i), t[2]),
    "mv": lambda t, i: at(torch.mv(t, at(t, i)), i),
    "vector matrix": lambda t, i: at(at(t, i) @ t, i),
    "mm": lambda t, i: at(t @ t.t(), i, i),
    "bmm": lambda t, i: at(torch.bmm(t.view(3, 2, 6), t.view(3, 6, 2)), i // 2, i // 3, i // 3),
    "linear": lambda t, i: at(F.linear(at(t, i)[None], t, t[1]), None, i)[0],
    "addmv": lambda t, i: at(torch.addmv(t[0], t, at(t, i), beta=0.5, alpha=2), i),
    "small network": lambda t, i: F.linear(torch.relu(F.linear(at(t, i), t, t[2])), t[:1], t[0, :1]).squeeze(0),
    "distance": lambda t, i: (at(t, i)[:3] - t[1, 3:]).square().sum().sqrt(),
    "norm": lambda t, i: torch.linalg.vector_norm(at(t, i)) + at(t, i).norm() + t.norm(dim=1)[2],
    "norm 1": lambda t, i: torch.linalg.vector_norm(at(t, i), ord=1),
    "norm 3": lambda t, i: torch.linalg.vector_norm(at(t, i), ord=3),
    "norm 0": lambda t, i: torch.linalg.vector_norm((at(t, i) > 0).float(), ord=0),
    "norm inf": lambda t, i: torch.linalg.vector_norm(at(t, i), ord=float("inf")),
    "logsumexp": lambda t, i: torch.logsumexp(at(t, i), 0) + torch.logsumexp(t, 1)[2],
    "var": lambda t, i: at(t, i).var() + t.var(1)[2],
    "std": lambda t, i: at(t, i).std(unbiased=False),
    "norm -inf": lambda t, i: torch.linalg.vector_norm(at(t, i), ord=float("-inf")),
    "softmax": lambda t, i: at(torch.softmax(at(t, i), 0), i),
    "weighted softmax": lambda t, i: (torch.softmax(at(t, i), 0) * t[1]).sum(),
    "log softmax": lambda t, i: at(torch.log_softmax(t, 1), i, i),
    "any": lambda t, i: (at(t, i) > 1).any(),
    "any of a dim": lambda t, i: at((t > 1).any(1), i),
    "all": lambda t, i: (at(t, i) < 1).all(),
    "count": lambda t, i: torch.count_nonzero(at(t, i) > 0),
    "argmax": lambda t, i: at(t, i).argmax(),
    "argmin of a dim": lambda t, i: at(t.argmin(0), i),
    "argmax keeping": lambda t, i: at(t.argmax(1, keepdim=True), i)[0],
    "where argmax": lambda t, i: at(t.max(1).indices, i),
    "sum to f64": lambda t, i: at(t, i).sum(dtype=f64),
    "sum of computed": lambda t, i: (at(t, i) * t[0] + i).exp().sum(),
    "nested": lambda t, i: (t * at(t, i)).sum(1).amax(0),
}


SQUARE = {"mm", "vector matrix", "mv", "linear", "addmv", "small network"}


@pytest.mark.parametrize("size", (3, 6))
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str, size: int):
    if size == 3 and name in ("bmm", "distance"):
        size = 6
    block = check(REDUCTIONS[name], table(6, 6)[:, :size] if name not in SQUARE else table(6, 6), n=3)
    if size == 3 and name == "sum":
        assert loops(block) == 0, "a short row is written out"
    if size == 6 and name == "sum":
        assert loops(block) == 1


@pytest.mark.parametrize("dtype", (f64, f16, bf16, i64, i32, i8, u8, b1), ids=str)
def test_reductions_of_other_dtypes(dtype: torch.dtype):
    data = table(6, 6, dtype=dtype)
    check(lambda t, i: at(t, i).sum(), data, n=6)
    check(lambda t, i: at(t, i).any(), data, n=6)
    check(lambda t, i: at(t, i).all(), data, n=6)
    check(lambda t, i: at(t, i).amax(0), data, n=6)
    check(lambda t, i: at(t, i).amin(0), data, n=6)
    if dtype != b1:
        check(lambda t, i: at(t, i).prod(), data, n=6, close=1e-12)
        check(lambda t, i: at(t, i).argmax(), data, n=6)
        if dtype != u8:
            check(lambda t, i: torch.dot(at(t, i), t[1]), data, n=6, close=1e-6)


def test_reductions_meet_nan():
    data = table(6, 6)
    data[2, 3], data[4, 0], data[4, 5] = float("nan"), float("nan"), float("inf")
    for name in ("amax", "amin", "argmax", "argmin of a dim", "sum", "softmax", "logsumexp", "var"):
        check(REDUCTIONS[name], data, n=6)


def test_sizes_known_at_run_time():
    data = table(6, 5)
    check(lambda t, i: at(t, i, i), data, n=5, dynamic=[0])
    check(lambda t, i: at(t, None, i)[-1], data, n=5, dynamic=[0])
    check(lambda t, i: at(t[2:], i // 3)[1], data, n=6, dynamic=[])
    check(lambda t, i: at(t.t(), i)[-1], data, n=5, dynamic=[0])
    check(lambda t, i: at(t.flip(0), i)[2], data, n=6, dynamic=[0])
    check(lambda t, i: at(t.unsqueeze(1), i)[0, 2], data, n=6, dynamic=[0])
    check(lambda t, i: at(t.unsqueeze(0).view(6, 5), i)[2], data, n=6, dynamic=[])


def test_index_out_of_a_slice_is_a_fault():
    """An index beyond a slice is out of range, even where the sliced tensor has an element there."""
    data, position = table(6), torch.arange(0, 6, dtype=i32)
    block = build(lambda t, i: at(t[:4], i), [data], [position])
    interpreter = RegionInterpreter({block.args[0]: data.numpy(), block.args[1]: position.numpy()})
    interpreter.run(block)
    (fault,) = interpreter.faults
    assert (fault.checked, fault.name) == ("kept", "c0")
    np.testing.assert_array_equal(fault.where, position.numpy() >= 4)


def test_a_row_that_does_not_depend_on_the_loop_is_read_before_it():
    block = check(lambda t, i: (t[0] * at(t, i, i) + 1).sum(), table(6, 6), n=6)
    (loop,) = (op for op in block.ops if isinstance(op, scf.ForOp))
    assert [op.name for op in loop.body.block.ops] == [
        "tensor.extract",
        "arith.mulf",
        "arith.addf",
        "arith.addf",
        "scf.yield",
    ]


def test_loops_stand_side_by_side_where_they_can():
    block = check(REDUCTIONS["weighted softmax"], table(6, 6), n=6)
    assert sum(isinstance(op, scf.ForOp) for op in block.ops) == loops(block) == 3


REFUSED: dict[str, tuple[Callable, str]] = {
    "cumsum": (lambda t, i: t.cumsum(0)[1, 1], "does not know"),
    "sort": (lambda t, i: t.sort(0).values[1, 1], "does not know"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str):
    function, words = REFUSED[name]
    with pytest.raises((UnsupportedOpError, RuntimeError), match=words):
        build(function, [table(6, 6)], [torch.arange(3, dtype=i32)])


def test_reduction_of_unknown_length_is_refused():
    with pytest.raises(UnsupportedOpError, match=r"aten\.sum.* only known at run time"):
        build(lambda t, i: at(t, i).sum(), [table(6, 6)], [torch.arange(3, dtype=i32)], dynamic=[0])
