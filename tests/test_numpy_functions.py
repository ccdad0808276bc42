"""NumPy's functions in mods: each record, run by torch's own operations, against the mod on NumPy's own scalars."""

from __future__ import annotations

import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from attnc.capture.numpy_capture import capture_numpy
from record_interpreter import run_record
from zoo_numpy import tensor

RNG = np.random.default_rng(2)
table = RNG.standard_normal(64).astype(np.float32)
square = RNG.standard_normal((8, 8)).astype(np.float32)
big = RNG.standard_normal((3, 4, 5, 6)).astype(np.float32)
whole = RNG.integers(0, 9, 9)
bfloats: Any = RNG.standard_normal(9).astype(ml_dtypes.bfloat16)
bytes_ = RNG.integers(0, 255, 9).astype(np.uint8)

SCORES = {
    "long constants": lambda s, b, h, q, k: s + np.arange(1000)[q + k] + np.zeros((99, 99))[q, k] + np.arange(90, -10, -1)[q],
    "dtype=": lambda s,b,h,q,k: s+np.add(s,q,dtype=np.float32)+np.multiply(q,k,dtype=np.int64),
    "isclose": lambda s,b,h,q,k: s*np.isclose(q*0.1,k*0.1),
    "nan_to_num": lambda s,b,h,q,k: np.nan_to_num(s/(q-k)*0)+s,
    "nan_to_num2": lambda s,b,h,q,k: np.nan_to_num(s/(q-k), nan=1., posinf=2., neginf=-2.),
    "neg pow": lambda s,b,h,q,k: s+ (-1)**q,
    "int pow 2 arr": lambda s,b,h,q,k: s+ np.power(q%3,k%4),
    "pow f": lambda s,b,h,q,k: s+ np.power(abs(s),q*0.1)+ abs(s)**0.5 + abs(s)**-1.5,
    "u8 ops": lambda s,b,h,q,k: (
        s+ bytes_[q]+ (bytes_[q]+200)*0.01 + (-bytes_[k])*0.01 + (bytes_[q]<<1)*.01 + (~bytes_[q])*.01
    ),
    "i8 wrap": lambda s,b,h,q,k: s+ (q.astype(np.int8)*np.int8(100))*0.01,
    "f->int": lambda s,b,h,q,k: s+ (s*10).astype(np.int32)*0.1 + s.astype(np.int8),
    "bool arith": lambda s,b,h,q,k: s+ (q>k)*3 + (q>k)*(k>2) + (q>k)*1.5 + ((q>k)+(k>2)),
    "bool sum": lambda s,b,h,q,k: s+ np.sum([q>k,k>2,h>0]),
    "mean of ints": lambda s,b,h,q,k: s+ np.mean([q,k,h]),
    "f16 sum": lambda s,b,h,q,k: s+ np.sum(square[h].astype(np.float16)) + square[h].astype(np.float16).mean(),
    "f16 dot": lambda s,b,h,q,k: s+ np.dot(square[h].astype(np.float16), square[q%8].astype(np.float16)),
    "int dot": lambda s,b,h,q,k: s+ np.dot(whole[:3],whole[3:6])*.1,
    "mixed dot": lambda s,b,h,q,k: s+ np.dot(whole[:3],table[3:6])*.1,
    "2d@1d": lambda s,b,h,q,k: s+ (square[:3] @ square[q%8])[h] + (square[q%8] @ square[:, :2])[b] ,
    "2d@2d": lambda s,b,h,q,k: s+ (square[:2] @ square[:, 1:4])[h,b]*q*.1,
    "shift": lambda s,b,h,q,k: s+ ((q<<40) + (q>>40) + (-q>>33) + (1<<k) + (1024>>k))*1e-3,
    "rows chain": lambda s,b,h,q,k: s+ square[whole[q%9]%8].max()*square[h].min() + (square[q%8]>square[k%8]).sum(),
    "axis tuple": lambda s,b,h,q,k: (
        s+ square[:3,:3].sum(axis=(0,1)) + square[:2].sum(axis=-1)[h]
        + square[:2].mean(axis=0, keepdims=True)[0,q%8]
    ),
    "argmax axis": lambda s,b,h,q,k: s+ square.argmax(axis=1)[q%8] + np.argmin(square[h]*s),
    "max keepdims": lambda s,b,h,q,k: s+ (square[h]-square[h].max(keepdims=True)).sum(),
    "softmax row": lambda s,b,h,q,k: s+ (np.exp(square[h]-square[h].max())/np.exp(square[h]-square[h].max()).sum())[q%8],
    "idx dims": lambda s,b,h,q,k: s+ square[h,:,None][q%8,0] + square[None,...,k%8][0,h],
    "idx mix": lambda s,b,h,q,k: (
        s+ big[b,:,[0,2]][1,h,3] + big[:,[0,1],q%5][h,1,k%6] + big[[0,1],:,:,k%6][h,3,2]
        + big[b,h][q%5][k%6]+big[b,...,2][h,1]+ big[1,h,::2,k%6].sum()
    ),
    "idx 2 arr": lambda s,b,h,q,k: s+ big[[[0],[1]],[0,2],h,k%6].sum(),
    "idx arr slice arr": lambda s,b,h,q,k: s+ big[[0,1],:,[1,2],k%6][h,b%4],
    "neg slices": lambda s,b,h,q,k: s+ table[-3:].sum()+table[5:1:-2][h]+table[10:2:3].sum()+ table[100:].sum(),
    "np.take axis": lambda s,b,h,q,k: s+ np.take(square, q%8, axis=1)[h] + np.take(square, k)+square.take(h,axis=0)[q%8],
    "transpose etc": lambda s,b,h,q,k: (
        s+ np.transpose(big,(3,1,0,2))[k%6,h,b,q%5]+ big.swapaxes(0,1)[h,b,0,0]
        + big.reshape(3,4,30)[b,h,q] + np.ravel(square)[q*7] + np.squeeze(square[None])[h,q%8]
        + np.expand_dims(square,1)[h,0,q%8]+np.flip(square,0)[h,k%8]+square.flatten()[k]
    ),
    "std ddof": lambda s,b,h,q,k: s+ np.std(square[q%8],ddof=1)+square[h].var(),
    "norm axis": lambda s,b,h,q,k: s+ np.linalg.norm(square[:3],axis=1)[h],
    "iter 2d": lambda s,b,h,q,k: s+ sum(r[q%8] for r in square[:2]),
    "cat traced": lambda s,b,h,q,k: s+ np.concatenate([square[h],square[q%8]])[k+3],
    "clip f16": lambda s,b,h,q,k: np.clip(s.astype(np.float16),-0.1,0.3)+ np.clip(q,1.5,3),
    "clip lo>hi": lambda s,b,h,q,k: np.clip(s,1,-1),
    "maxnan": lambda s,b,h,q,k: np.where(np.isnan(np.maximum(s,np.nan)),s,0)+np.fmin(s,np.nan),
    "where weak": lambda s,b,h,q,k: s+np.where(q>k,1,0)+np.where(q>k,True,False)+np.where(q,1.5,k),
    "float_power": lambda s,b,h,q,k: np.float_power(abs(s),2)+np.float_power(2,q)*0.01,
    "divmod f": lambda s,b,h,q,k: divmod(s,0.3)[0]+divmod(s,-0.3)[1],
    "fmod int": lambda s,b,h,q,k: s+np.fmod(q-k,3)+ (q-k)%-3 + (q-k)//-3,
    "heaviside sinc": lambda s,b,h,q,k: np.heaviside(q-k,0.5)+np.sinc(s)+np.logaddexp(s,q)+np.logaddexp2(s,k),
    "abs int min": lambda s,b,h,q,k: s+abs(np.int8(-128)+q.astype(np.int8)*0)*.01,
    "sign etc": lambda s,b,h,q,k: (
        s+np.sign(q-k)+np.sign(s)+np.positive(s)+np.negative(q)+np.rad2deg(s)*.01+np.degrees(s)*.01
        +np.deg2rad(s)+np.radians(s)
    ),
    "arc": lambda s,b,h,q,k: (
        np.arcsin(np.tanh(s))+np.arccos(np.tanh(s))+np.arctan(s)+np.arcsinh(s)+np.arccosh(1+abs(s))
        +np.arctanh(np.tanh(s)*.9)+np.sinh(s)+np.cosh(s)+np.tan(s)*.01+np.log10(abs(s)+1)+np.log2(abs(s)+1)
        +np.reciprocal(abs(s)+1)
    ),
    "int true div": lambda s,b,h,q,k: s+q/(k+1)+ 3/(q+1),
    "int round neg": lambda s,b,h,q,k: s+np.round(q,1)+np.round(s*100,-1)*.01,
    "nested np.where in list": lambda s,b,h,q,k: s+np.select([q>k,q==k],[s,2*s])+np.select([q>k],[k],default=0.5),
    "vecdot": lambda s,b,h,q,k: s+np.vecdot(square[h],square[q%8]),
    "bf16 chain": lambda s,b,h,q,k: (
        s+ (bfloats[q]-bfloats[k])*(bfloats[q]+1) + bfloats[q]*0.1+ -bfloats[k] + abs(bfloats[q])
        + (bfloats[q]>bfloats[k]) + bfloats[q]*q
    ),
    "bf16 fn": lambda s,b,h,q,k: (
        s+ np.tanh(bfloats[q]) + bfloats[q]//1 + bfloats[q]%1 + np.maximum(bfloats[q],bfloats[k])
        + np.sqrt(abs(bfloats[q])) + bfloats[q]**2
    ),
    "bf16 sum": lambda s,b,h,q,k: s+ bfloats[:4].sum() + bfloats[:4].max(),
    "bf16 cast": lambda s,b,h,q,k: s.astype(ml_dtypes.bfloat16)*2 + ml_dtypes.bfloat16(1.5),
    "bf16 where": lambda s,b,h,q,k: s + np.where(q>k, bfloats[q], 0) + np.where(q>k, bfloats[q], 0.5),
}  # fmt: skip
MASKS = {
    "np.any axis": lambda b, h, q, k: np.any(square > q, axis=1)[h] & np.all(square < 9, axis=0)[k % 8],
}
LIMITS = (2, 2, 9, 9)


def arguments(generator: random.Random) -> list:
    return [np.int32(generator.randrange(limit)) for limit in LIMITS]


def check(mod, record, function, arrays, numbers, values) -> None:
    tensors = [torch.tensor(value) for value in values]
    numbers = [number.item() if isinstance(number, np.generic) else number for number in numbers]
    with np.errstate(all="ignore"):
        wanted = np.asarray(mod(*values))
    got = run_record(function, tensors, [tensor(array) for array in arrays], numbers).numpy()
    if function is record.mask:
        assert got == wanted
    else:
        np.testing.assert_allclose(got, wanted.astype(np.float32), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SCORES)
def test_score_mod(name):
    generator = random.Random(name)
    record, arrays, numbers = capture_numpy(SCORES[name], None, np.dtype(np.float32))
    for _ in range(20):
        values = [np.float32(generator.gauss(0, 1)), *arguments(generator)]
        check(SCORES[name], record, record.score, arrays, numbers, values)


@pytest.mark.parametrize("name", MASKS)
def test_mask_mod(name):
    generator = random.Random(name)
    record, arrays, numbers = capture_numpy(None, MASKS[name], np.dtype(np.float32))
    for _ in range(20):
        check(MASKS[name], record, record.mask, arrays, numbers, arguments(generator))
