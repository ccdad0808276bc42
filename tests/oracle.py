"""What attention means, computed densely and without haste: the judge of every numeric test.

    s = scale * q.k;  s = score_mod(s, b, h, q, k);  s = -inf where not mask_mod(b, h, q, k);  out = softmax(s) v

in f64 (for f64 inputs the products and the softmax in 80-bit floats). A mod is called by `torch.vmap` on scalars: its
operations have torch's promoted dtypes, and only arithmetic on the score is lifted to f64. `eager` is the same formula written
out in the inputs' dtype, as torch's own eager flex_attention does; `check` is the accuracy rule that ties the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

ScoreMod = Callable[..., Tensor]
MaskMod = Callable[..., Tensor]
CHUNK = 1 << 20  # scores held at a time


@dataclass(frozen=True)
class Problem:
    """The arguments of one call. Shapes: query [B, Hq, Sq, E], key [Bkv, Hkv, Skv, E], value [Bkv, Hkv, Skv, Ev]."""

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    block_mask: Any = None
    scale: float | None = None

    @property
    def scaling(self) -> float:
        return 1 / math.sqrt(self.query.shape[-1]) if self.scale is None else float(self.scale)


@dataclass(frozen=True)
class Result:
    """out [B, Hq, Sq, Ev], and lse and max_scores [B, Hq, Sq] in natural units."""

    out: Tensor
    lse: Tensor
    max_scores: Tensor


def oracle(problem: Problem) -> Result:
    """The result in f64: dead queries give out 0, lse -inf, max -inf; dead keys have no influence, whatever they hold."""
    return _attention(problem, _f64_rows if problem.query.dtype != torch.float64 else _extended_rows)


def eager(problem: Problem) -> Result:
    """The result in the inputs' own dtype, as torch's eager flex_attention computes it, with dead queries zeroed."""
    return _attention(problem, _eager_rows)


def check(problem: Problem, out: Tensor, lse: Tensor | None = None, max_scores: Tensor | None = None, name: str = "") -> None:
    """Raises AssertionError where a result breaks the accuracy rule

        err(attnc) <= 1.5 err(eager) + 4 eps(dtype) max(1, max|oracle|)

    over elements finite in the oracle; what is not finite there must be the same here.
    """
    exact, plain = oracle(problem), eager(problem)
    dtype = problem.query.dtype
    assert out.dtype == dtype, f"{name}: out is {out.dtype}, not {dtype}"
    statistics_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    compare(f"{name} out", out, exact.out, plain.out, dtype)
    for label, actual, wanted, simple in (
        ("lse", lse, exact.lse, plain.lse),
        ("max", max_scores, exact.max_scores, plain.max_scores),
    ):
        if actual is not None:
            assert actual.dtype == statistics_dtype, f"{name} {label} is {actual.dtype}, not {statistics_dtype}"
            compare(f"{name} {label}", actual, wanted, simple, statistics_dtype)


def compare(what: str, actual: Tensor, exact: Tensor, plain: Tensor, dtype: torch.dtype) -> None:
    """The rule for one tensor: `plain` is what eager torch gives."""
    assert actual.shape == exact.shape, f"{what}: shape {tuple(actual.shape)}, not {tuple(exact.shape)}"
    actual, plain = actual.detach().double(), plain.double()
    finite = exact.isfinite()
    same = torch.where(exact.isnan(), actual.isnan(), actual == exact) | finite
    assert same.all(), f"{what}: {int((~same).sum())} elements not as in the oracle, first at {_first(~same)}"
    broken = finite & ~actual.isfinite()
    assert not broken.any(), f"{what}: {int(broken.sum())} elements not finite, first at {_first(broken)}"
    if not finite.any():
        return
    error = torch.where(finite, (actual - exact).abs(), 0)
    eager_error = torch.where(finite & plain.isfinite(), (plain - exact).abs(), 0).max().item()
    largest = torch.where(finite, exact.abs(), 0).max().item()
    allowed = 1.5 * eager_error + 4 * torch.finfo(dtype).eps * max(1.0, largest)
    worst = error.max().item()
    place = _first(error == worst)
    assert worst <= allowed, (
        f"{what}: error {worst:.3g} at {place}, allowed {allowed:.3g} (eager {eager_error:.3g}, largest {largest:.3g})"
    )


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in mask.nonzero()[0])


# -- the formula, a few queries at a time -------------------------------------------------------------------------------


def _attention(problem: Problem, rows: Callable) -> Result:
    query = problem.query
    batch, heads, queries, _ = query.shape
    keys, value_dim = problem.value.shape[2:]
    statistics = torch.float64 if rows is not _eager_rows or query.dtype == torch.float64 else torch.float32
    result = Result(
        torch.zeros(batch, heads, queries, value_dim, dtype=query.dtype if rows is _eager_rows else torch.float64),
        torch.full((batch, heads, queries), -torch.inf, dtype=statistics),
        torch.full((batch, heads, queries), -torch.inf, dtype=statistics),
    )
    if keys == 0 or queries == 0:
        return result
    group = heads // problem.key.shape[1]
    head_of = torch.arange(heads) // group
    step = max(1, CHUNK // (heads * keys))
    with torch.no_grad():
        for b in range(batch):
            kv = b if problem.key.shape[0] > 1 else 0
            key, value = problem.key[kv][head_of], problem.value[kv][head_of]
            for start in range(0, queries, step):
                part = slice(start, min(start + step, queries))
                out, lse, top = rows(problem, query[b, :, part], key, value, b, part)
                result.out[b, :, part], result.lse[b, :, part], result.max_scores[b, :, part] = out, lse, top
    return result


def modified(problem: Problem, scores: Tensor, b: int, part: slice) -> Tensor:
    """The scores [H, q, k] after score_mod, and -inf where the mask is false."""
    heads, queries, keys = scores.shape
    grids = [torch.arange(n, dtype=torch.int32) for n in (heads, keys)]
    positions = torch.arange(part.start, part.start + queries, dtype=torch.int32)
    batch = torch.tensor(b, dtype=torch.int32)
    if problem.score_mod is not None:
        scores = _on_scalars(problem.score_mod, True)(scores, batch, grids[0], positions, grids[1]).to(scores.dtype)
    mask_mod = problem.mask_mod
    if problem.block_mask is not None and problem.block_mask.mask_mod is not None:
        mask_mod = problem.block_mask.mask_mod
    live = torch.ones(scores.shape, dtype=torch.bool)
    if mask_mod is not None:
        live = _on_scalars(mask_mod, False)(batch, grids[0], positions, grids[1]).broadcast_to(scores.shape)
    if problem.block_mask is not None:
        listed, full = block_classes(problem.block_mask)
        q_block, k_block = problem.block_mask.BLOCK_SIZE
        rows, columns = positions.long() // q_block, grids[1].long() // k_block
        listed, full = (_broadcast_batch(t, b, heads)[:, rows][:, :, columns] for t in (listed, full))
        live = full | (listed & live)
    return torch.where(live, scores, torch.tensor(-torch.inf, dtype=scores.dtype))


def _on_scalars(mod: Callable, scored: bool) -> Callable:
    """`mod` over [H, q, k], called by torch.vmap on scalars. b is the same for all. Mods in NumPy bring their own way."""
    if hasattr(mod, "over_grids"):
        return mod.over_grids  # type: ignore[attr-defined]

    def call(*arguments: Tensor) -> Tensor:
        with IndexByScalars():
            return mod(*arguments)

    first = (0,) if scored else ()
    by_key = torch.vmap(call, in_dims=(*first, None, None, None, 0))
    by_query = torch.vmap(by_key, in_dims=(*first, None, None, 0, None))
    return torch.vmap(by_query, in_dims=(*first, None, 0, None, None))


class IndexByScalars(TorchFunctionMode):
    """Makes `tensor[index tensors, ints, slices, ...]` one `aten.index`: by itself vmap would want the data of a 0-d index."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is not Tensor.__getitem__:
            return func(*args, **(kwargs or {}))
        tensor, indices = args
        indices = list(indices) if isinstance(indices, tuple) else [indices]
        if not any(isinstance(index, Tensor) for index in indices):
            return func(tensor, tuple(indices))
        if Ellipsis in [index for index in indices if not isinstance(index, Tensor)]:
            at = next(i for i, index in enumerate(indices) if index is Ellipsis)
            missing = tensor.dim() - sum(index is not None for index in indices) + 1
            indices[at : at + 1] = [slice(None)] * missing
        # Slices and new axes first: what is left indexes whole dimensions.
        tensor = func(tensor, tuple(slice(None) if isinstance(i, int | Tensor) else i for i in indices))
        whole = [torch.tensor(i) if isinstance(i, int) else i if isinstance(i, Tensor) else None for i in indices]
        return torch.ops.aten.index(tensor, whole)


def block_classes(block_mask: Any) -> tuple[Tensor, Tensor]:
    """Of a torch BlockMask: which blocks are listed as partial, and which as full, [B', H', Q blocks, K blocks]."""

    def dense(numbers: Tensor, indices: Tensor) -> Tensor:
        columns = max(indices.shape[-1], math.ceil(block_mask.seq_lengths[1] / block_mask.BLOCK_SIZE[1]))
        result = torch.zeros(*indices.shape[:-1], columns, dtype=torch.bool)
        listed = torch.arange(indices.shape[-1]) < numbers[..., None]
        place = listed.nonzero(as_tuple=True)
        result[(*place[:-1], indices[place].long())] = True
        return result

    partial = dense(block_mask.kv_num_blocks, block_mask.kv_indices)
    if block_mask.full_kv_num_blocks is None:
        return partial, torch.zeros_like(partial)
    return partial, dense(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)


def _broadcast_batch(classes: Tensor, b: int, heads: int) -> Tensor:
    chosen = classes[b if classes.shape[0] > 1 else 0]
    return chosen if chosen.shape[0] > 1 else chosen.expand(heads, -1, -1)


def _f64_rows(problem: Problem, query: Tensor, key: Tensor, value: Tensor, b: int, part: slice):
    scores = problem.scaling * (query.double() @ key.double().mT)
    scores = modified(problem, scores, b, part)
    top, weights, total = _softmax_parts(scores)
    out = _product(weights, value.double(), scores != -torch.inf) / torch.where(total == 0, 1, total)[..., None]
    return torch.where(total[..., None] == 0, 0, out), top + total.log(), top


def _softmax_parts(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    top = scores.amax(dim=-1)
    weights = (scores - torch.where(top == -torch.inf, 0, top)[..., None]).exp()
    return top, weights, weights.sum(dim=-1)


def _product(weights: Tensor, value: Tensor, live: Tensor) -> Tensor:
    """`weights @ value`, in which a dead pair takes no part and a live one does what arithmetic says of NaN and inf."""
    if value.isfinite().all():
        return torch.where(live, weights, 0) @ value
    out = torch.where(live, weights, 0) @ torch.where(value.isfinite(), value, 0)

    def met(pairs: Tensor, what: Tensor) -> Tensor:
        return (pairs.double() @ what.double()) > 0

    up, down = met(live & (weights > 0), value == torch.inf), met(live & (weights > 0), value == -torch.inf)
    lost = met(live, value.isnan()) | met(live & (weights == 0), value.isinf()) | (up & down) | out.isnan()
    out = torch.where(up, torch.inf, torch.where(down, -torch.inf, out))
    return torch.where(lost, torch.nan, out)


def _extended_rows(problem: Problem, query: Tensor, key: Tensor, value: Tensor, b: int, part: slice):
    """Products and softmax in 80-bit floats; a mod sees, and gives, the nearest f64."""
    wide = [tensor.numpy().astype(np.longdouble) for tensor in (query, key, value)]
    natural = np.longdouble(problem.scaling) * (wide[0] @ wide[1].swapaxes(-1, -2))
    rounded = torch.from_numpy(natural.astype(np.float64))
    changed = modified(problem, rounded, b, part)
    # Where the mods left a score alone, its own 64 bits are kept.
    scores = np.where((changed == rounded).numpy(), natural, changed.numpy().astype(np.longdouble))
    with np.errstate(all="ignore"):
        top = scores.max(axis=-1)
        weights = np.exp(scores - np.where(top == -np.inf, 0, top)[..., None])
        total = weights.sum(axis=-1)
        lse = top + np.log(total)
        if np.isfinite(wide[2]).all():
            out = weights @ wide[2]
        else:
            live = torch.from_numpy(scores != -np.inf)
            out = _product(torch.from_numpy(weights.astype(np.float64)), value, live).numpy()
        out = np.where(total[..., None] == 0, 0, out / np.where(total == 0, 1, total)[..., None])
    return tuple(torch.from_numpy(array.astype(np.float64)) for array in (out, lse, top))


def _eager_rows(problem: Problem, query: Tensor, key: Tensor, value: Tensor, b: int, part: slice):
    working = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = (query.to(working) @ key.to(working).mT) * problem.scaling
    scores = modified(problem, scores, b, part)
    top = scores.amax(dim=-1)
    dead = top == -torch.inf
    weights = torch.where(dead[..., None], 0, scores.softmax(dim=-1))
    out = weights.to(query.dtype) @ value
    return torch.where(dead[..., None], 0, out), torch.where(dead, -torch.inf, scores.logsumexp(dim=-1)), top
