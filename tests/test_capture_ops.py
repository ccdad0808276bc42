"""What a user would write of torch in a mod: each expression is captured, and its record gives what torch gives."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from attnc.capture.capture import capture
from record_interpreter import run_record

row = torch.linspace(-2, 2, 6)
table = torch.arange(48.0).reshape(8, 6) / 7
cube = torch.arange(96).reshape(8, 4, 3)
flags = torch.arange(8) % 3 == 0
halves = torch.linspace(-3, 3, 8).to(torch.bfloat16)
longs = torch.tensor([3, 1, 4, 1, 5, 2, 6, 0])
bytes_ = torch.arange(8, dtype=torch.uint8)
n, m, f = 3, 5, 0.75

EXPRESSIONS = """
score + 1 | 1 + score | score - 2.5 | 2 - score | n - score | score * n | n * q | f * q | 1 / score | n / (q + 1) | score / n
-score | +score | abs(score) | score.abs() | q // n | q // 2 | n // (q + 1) | 17 // (kv + 1) | q % n | q % 3 | 17 % (kv + 1) | -q % n
score % 0.7 | torch.fmod(score, 0.7) | torch.remainder(q, kv + 1) | torch.fmod(q - 5, kv + 1) | torch.div(q, n, rounding_mode="floor")
torch.div(q, kv + 1, rounding_mode="trunc") | torch.floor_divide(q, kv + 1) | torch.true_divide(q, kv + 1) | q / (kv + 1)
score ** 2 | score ** n | score.abs() ** 0.5 | 2 ** score | torch.pow(2.0, q) | torch.square(score) | q ** 2 | score ** score.abs()
q << 2 | q >> 1 | q << n | q & 3 | q.__or__(4) | q ^ kv | ~q | 6 & q | n & q | torch.bitwise_and(q, n) | torch.bitwise_left_shift(q, kv)
q > kv | q >= n | n > q | 3 < q | q == kv | q != n | q == 3 | score == score | (q > kv) & (kv > 1) | (q > kv).__or__(h == 2) | ~(q > kv)
(q > kv) ^ (h == 1) | torch.logical_and(q, kv) | torch.logical_not(q) | torch.logical_or(q > 1, h) | torch.logical_xor(q, h)
torch.where(q > kv, score, 0.0) | torch.where(q > kv, score, 0) | torch.where(q > kv, n, 0) | torch.where(q > kv, f, score) | torch.where(q > n, 1, score)
torch.where(q > kv, score, float("-inf")) | torch.where(q > kv, q, kv) | torch.where(q > kv, True, False) | torch.where(q > kv, 1.5, 2)
score.masked_fill(q > kv, -1e9) | score.masked_fill(q > kv, n) | torch.clamp(score, -0.5, 0.5) | score.clamp(min=f) | q.clamp(0, n) | q.clamp(max=2)
torch.clamp(q, min=kv) | torch.minimum(q, kv) | torch.maximum(score, torch.tensor(0.25)) | torch.max(q, kv) | torch.min(score, score * 2)
torch.fmax(score, score * 2) | score.exp() | torch.exp2(score) | torch.expm1(score) | score.abs().log() | torch.log2(score.abs()) | torch.log1p(score.abs())
torch.log10(score.abs()) | torch.sqrt(score.abs()) | torch.rsqrt(score.abs()) | torch.reciprocal(score) | score.sin() | score.cos() | torch.tan(score)
torch.asin(score / 4) | torch.acos(score / 4) | torch.atan(score) | torch.atan2(score, q + 1) | torch.sinh(score) | torch.cosh(score) | torch.tanh(score)
torch.asinh(score) | torch.acosh(score.abs() + 1) | torch.atanh(score / 4) | torch.erf(score) | torch.erfc(score) | torch.sigmoid(score) | torch.logit(score.sigmoid())
F.relu(score) | F.silu(score) | F.gelu(score) | F.gelu(score, approximate="tanh") | F.softplus(score) | F.elu(score) | F.leaky_relu(score, 0.1) | F.hardtanh(score)
F.relu6(score) | F.mish(score) | F.logsigmoid(score) | F.hardswish(score) | F.hardsigmoid(score) | F.tanhshrink(score) | F.softsign(score) | F.celu(score) | F.selu(score)
torch.floor(score) | torch.ceil(score) | torch.round(score) | torch.trunc(score) | torch.frac(score) | torch.sign(score) | torch.sgn(score) | torch.signbit(score)
torch.copysign(score, q - 5) | torch.hypot(score, q) | torch.lerp(score, q.float(), 0.3) | torch.addcmul(score, score, score, value=0.5) | torch.isnan(score)
torch.isinf(score) | torch.isfinite(score) | torch.nan_to_num(score) | torch.isclose(score, score) | torch.xlogy(q, kv + 1) | torch.heaviside(score, score) | torch.rad2deg(score)
score.float() | score.double() | score.half() | score.bfloat16() * q | score.to(torch.int64) | q.long() | q.float() | q.to(torch.int8) | q.to(torch.uint8) | q.bool()
score.type(torch.float64) | score.to(q.dtype) | q.type_as(score) | score.to(torch.float32) | score.clone() | score.detach() | score.contiguous() | score.data
q.new_ones(()) | q.new_zeros((), dtype=torch.bool) | q.new_full((), f, dtype=torch.float32) | q.new_tensor(3) | torch.zeros_like(score) | torch.ones_like(q) | torch.full_like(score, n)
torch.full((), n) | torch.full((), f) | torch.zeros(()) | torch.ones((), dtype=torch.bool) | torch.tensor(n) | torch.tensor(f) | torch.tensor(True) | torch.scalar_tensor(f) | torch.empty_like(score) * 0
table[q, h] | table[q][h] | table[q % 8, -1] | table[-1][h] | table[..., h][q] | table[:, h][q] | table[2, h] | table[n, h] | cube[q, h, 2] | cube[q][h][b] | cube[q, :, b][h]
table.T[h, q] | table.t()[h][q] | table.transpose(0, 1)[h, q] | cube.permute(2, 0, 1)[b, q, h] | cube[None, q, h, b][0] | table[q, None, h][0] | halves[q] * (q - kv) | longs[longs[q]] | bytes_[q] + bytes_[kv]
flags[q] | flags[q] & flags[kv] | longs[q] * score | halves[q] + longs[kv] | halves[q] * f | halves[q] + n | bytes_[q] - 3 | longs[q] / n | table[longs[q], h] | torch.index_select(row, 0, h)[0]
F.embedding(q, table)[h] | table.select(0, 1)[h] | table[1:3][h % 2, h] | row[1:][h] | row[::2][h % 2] | row[h:h + 1] if False else row[h] | table.unbind(0)[2][h] | row.split(2)[1][b] | row.chunk(3)[0][b]
table[q].sum() | table[q].mean() | table[q].prod() | table[q].amax() | table[q].amin() | table[q].max() | table[q].min() | table[q].dot(table[kv]) | table[q] @ table[kv] | (table[q] * table[kv]).sum(-1)
(table[q] > 1).any() | (table[q] > 1).all() | torch.any(table[q] == h) | (longs == q).any() | table[q].sum(dim=0) | table[q].max(dim=0).values | table[q].max(0)[0] | table[q].argmax() | table[q].argmin(dim=0)
torch.linalg.norm(table[q] - table[kv]) | (table[q] - table[kv]).norm() | torch.linalg.vector_norm(table[q], ord=1) | (table[q] - table[kv]).pow(2).sum().sqrt() | torch.dist(table[q], table[kv]) | torch.einsum("d,d->", table[q], table[kv])
table[q].softmax(0)[h] | table[q].logsumexp(0) | torch.logsumexp(table[q], dim=0) | table[q].var() | table[q].std() | table[q].cumsum(0)[h] | F.normalize(table[q], dim=0)[h] | F.cosine_similarity(table[q], table[kv], dim=0)
row.exp()[h] | (row * 2)[h] | row.flip(0)[h] | row[torch.arange(4)][h] | row[torch.arange(3) + b].sum() | table[q, torch.arange(3)].sum() | table[q][torch.tensor([0, 2])].sum() | cube[q, :, torch.arange(3)].sum() | cube[q, :, :].sum()
torch.stack([score, score * 2]).sum() | torch.stack([q, kv, h]).max() | torch.cat([table[q], table[kv]]).sum() | table[q].view(2, 3)[1, b] | table[q].reshape(3, 2).sum(1)[b] | table[q].unsqueeze(0).expand(2, 6)[b, h] | cube[q].sum((0, 1))
row[[0, 2]].sum() | row[None, h][0] | torch.arange(6)[h] | torch.arange(n)[b] | torch.linspace(0, 1, 5)[h] | torch.tensor([1, 2, 4, 8])[h] | torch.tensor([[1.0, 2.0], [3.0, 4.0]])[b, b] | torch.eye(3)[b, b] | torch.zeros(4)[h]
table.shape[0] - q | q % table.size(1) | score * table.numel() | score / len(table) | score * table.dim() | score + table.shape[-1] ** 2 | row.shape[0] // 2 + q | score * cube.shape[1] * n
q.max(kv) | score.mul(2).add(1) | score.sub(q, alpha=2) | torch.add(score, q, alpha=n) | torch.rsub(q, 3) | score.neg().relu() | torch.sum(table[q] * 2) | torch.inner(table[q], table[kv]) | torch.dot(row, row) | torch.vdot(row, row) | row.sum() * score
sum([score, q, kv]) | max(n, m) * score | min(f, 2) + score | round(f) + score | int(f * 4) + q | float(n) * q | divmod(n, 2)[0] + q | abs(-n) + q | -n + q | (n + m) * f + q | n ** 2 + q | n * m - q // (n * m) | n % 2 + q | n / 2 + q | n // 2 + q
torch.gather(row, 0, h.long().unsqueeze(0))[0] | torch.take(table, q.long()) | row.index_select(0, h.view(1)).squeeze() | row.roll(1)[h] | torch.count_nonzero(table[q])
"""  # noqa: E501
F = functional
ARGUMENTS = [torch.tensor(0.7), *(torch.tensor(position, dtype=torch.int32) for position in (1, 2, 6, 4))]
CASES = sorted({piece for line in EXPRESSIONS.strip().splitlines() for piece in line.split(" | ")})


@pytest.mark.parametrize("text", CASES)
def test_expression(text):
    mod = eval(f"lambda score, b, h, q, kv: {text}", globals())
    found = capture(lambda score, b, h, q, kv: mod(score, b, h, q, kv) + score * 0)
    assert found.retraced is None, found.retraced
    expected = (torch.as_tensor(mod(*ARGUMENTS)) + ARGUMENTS[0] * 0).float()
    assert found.record.score is not None
    got = run_record(found.record.score, ARGUMENTS, found.tensors, found.numbers)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
