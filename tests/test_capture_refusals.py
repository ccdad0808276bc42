"""What a mod may not do is refused by name, at the user's line, with what to write instead; never baked in."""

# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import functools
import math
import traceback

import numpy
import pytest
import torch

import attnc
from attnc.capture.capture import capture
from attnc.errors import (
    AttncError,
    CaptureIndexError,
    DataDependentModError,
    DeviceError,
    InPlaceModError,
    ModSignatureError,
    RandomModError,
    UnsupportedModError,
    UnsupportedOpError,
    UnsupportedTensorError,
)

TABLE = torch.arange(32.0).reshape(4, 8)
LIST = [1.0, 2.0, 3.0]

READS = {
    "item": lambda score, b, h, q, kv: score + TABLE[q].sum().item(),
    "item of a capture": lambda score, b, h, q, kv: score + TABLE[0, 2].item(),
    "tolist": lambda score, b, h, q, kv: score + TABLE.tolist()[0][2],
    "numpy": lambda score, b, h, q, kv: score + TABLE.numpy()[0, 2],
    "numpy of an array function": lambda score, b, h, q, kv: score + float(numpy.asarray(TABLE)[0, 2]),
    "float": lambda score, b, h, q, kv: score + float(TABLE[0, 2]),
    "int": lambda score, b, h, q, kv: score + int(q),
    "bool": lambda score, b, h, q, kv: score if q > kv else score + 1,
    "and": lambda score, b, h, q, kv: torch.where(q > kv and q < 3, score, 0.0),
    "index of a list": lambda score, b, h, q, kv: score + LIST[h],
    "slice": lambda score, b, h, q, kv: score + TABLE[0, q:].sum(),
    "range": lambda score, b, h, q, kv: score + sum(range(q)),
    "bool index": lambda score, b, h, q, kv: score + TABLE[0][TABLE[0] > 2].sum(),
    "data_ptr": lambda score, b, h, q, kv: score + TABLE.data_ptr(),
    "storage": lambda score, b, h, q, kv: score + TABLE.untyped_storage()[0],
    "in": lambda score, b, h, q, kv: score if 3.0 in TABLE else score + 1,
    "equal": lambda score, b, h, q, kv: score if torch.equal(TABLE, TABLE) else score + 1,
    "allclose": lambda score, b, h, q, kv: score if torch.allclose(TABLE, TABLE) else score + 1,
    "nonzero": lambda score, b, h, q, kv: score + torch.nonzero(TABLE).sum(),
    "where of one": lambda score, b, h, q, kv: score + torch.where(TABLE > 1)[0].sum(),
    "tensor of tensors": lambda score, b, h, q, kv: score + torch.tensor([q, kv]).sum(),
    "max of Python": lambda score, b, h, q, kv: score + max(q, kv),
    "match": lambda score, b, h, q, kv: score + {True: 1, False: 2}[bool(h == 2)],
}


@pytest.mark.parametrize("name", READS)
def test_reads_of_data(name):
    with pytest.raises(DataDependentModError) as error:
        capture(READS[name])
    assert error.value.filename == __file__
    assert error.value.line == READS[name].__code__.co_firstlineno
    assert "remedy:" in str(error.value)


NUMPY_TABLE = numpy.zeros((4, 4), numpy.float32)


@pytest.mark.parametrize(
    ("mask_mod", "remedy"),
    [
        (lambda b, h, q, kv: 0 <= q - kv < 4, "(a <= x) & (x < b) instead of a <= x < b"),
        (lambda b, h, q, kv: max(q - kv, 0) > 4, "x.clamp(min=0) instead of max(x, 0)"),
        (lambda b, h, q, kv: NUMPY_TABLE[h, kv] > 0, "capture torch.from_numpy(array)"),
        (lambda b, h, q, kv: q > math.exp(kv), "torch.exp instead of math.exp"),
    ],
)
def test_a_read_says_what_to_write_instead(mask_mod, remedy):
    with pytest.raises(DataDependentModError) as error:
        capture(None, mask_mod)
    assert remedy in error.value.remedy


@pytest.mark.parametrize("dims", [2, 3, 4])
def test_a_tensor_in_the_place_of_a_mod(dims):
    query, mask = torch.zeros(1, 1, 4, 8), torch.ones((4,) * dims, dtype=torch.bool)
    indices = ", ".join("bhqk"[4 - dims :])
    for arguments in ({"mask_mod": mask}, {"block_mask": mask}):
        with pytest.raises(attnc.AttncError, match=r"_mod is a Tensor, no callable|block_mask is a Tensor") as error:
            attnc.flex_attention(query, query, query, **arguments)
        assert error.value.remedy == f"read it in a function: mask_mod=lambda b, h, q, k: mask[{indices}]"
    with pytest.raises(ModSignatureError) as error:
        attnc.flex_attention(query, query, query, mask)
    assert error.value.remedy == f"read it in a function: score_mod=lambda score, b, h, q, k: score + bias[{indices}]"


RANDOM = {
    "rand": lambda score, b, h, q, kv: score + torch.rand(()),
    "dropout": lambda score, b, h, q, kv: torch.nn.functional.dropout(score, 0.5),
    "rand_like": lambda score, b, h, q, kv: score + torch.rand_like(score),
    "bernoulli": lambda score, b, h, q, kv: torch.bernoulli(score),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers(name):
    with pytest.raises(RandomModError):
        capture(RANDOM[name])


def _setitem(score, b, h, q, kv):
    TABLE[0, 0] = 3.0
    return score


def _add_in_place(score, b, h, q, kv):
    TABLE.add_(1)
    return score


def _through_a_view(score, b, h, q, kv):
    TABLE[0].zero_()
    return score


def _out(score, b, h, q, kv):
    return torch.add(score, 1, out=TABLE[0, 0])


def _row(score, b, h, q, kv):
    row = torch.zeros(4)
    row[2] = score
    return row.sum()


@pytest.mark.parametrize("mod", [_setitem, _add_in_place, _through_a_view, _out, _row])
def test_writes_in_place(mod):
    before = TABLE.clone()
    with pytest.raises(InPlaceModError):
        capture(mod)
    assert torch.equal(TABLE, before)


def test_writing_in_place_to_what_the_mod_computed_works():
    def mod(score, b, h, q, kv):
        x = score * 2
        y = x
        x += q
        y.mul_(3)
        return x.clamp_(max=50.0)

    assert [op.name for op in capture(mod).record.score.ops] == [
        *("aten.mul.Scalar", "aten.add.Tensor", "aten.mul.Scalar", "aten.clamp.default"),
    ]


def _written_list(score, b, h, q, kv):
    LIST.append(2.0)
    return score


def _stored(score, b, h, q, kv):
    HOLDER.value = q
    return score


class Holder:
    value = None


HOLDER = Holder()


@pytest.mark.parametrize("mod", [_written_list, _stored])
def test_other_side_effects(mod):
    with pytest.raises(UnsupportedModError):
        capture(mod)
    assert len(LIST) == 3 and HOLDER.value is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*quantized tensor creation")
def test_captured_tensors_that_are_not_plain():
    def make(tensor):
        return lambda score, b, h, q, kv: score + tensor[q]

    with pytest.raises(DeviceError):
        capture(make(torch.zeros(4, device="meta")))
    with pytest.raises(UnsupportedTensorError):
        capture(make(torch.zeros(4, 4).to_sparse()))
    with pytest.raises(UnsupportedTensorError, match="dequantize"):
        capture(make(torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8)))
    with pytest.raises(UnsupportedTensorError):
        capture(make(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])))
    with pytest.raises(UnsupportedTensorError):
        capture(make(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)))
    with pytest.raises(UnsupportedTensorError):
        capture(make(torch.zeros(4, dtype=torch.complex64)))
    with pytest.raises(UnsupportedTensorError):
        capture(make(torch.zeros(4, dtype=torch.float8_e4m3fn)))


def test_operations_with_several_results():
    with pytest.raises(UnsupportedOpError, match="sort"):
        capture(lambda score, b, h, q, kv: score + TABLE[q].sort().values[h])
    with pytest.raises(UnsupportedOpError, match="topk"):
        capture(lambda score, b, h, q, kv: score + TABLE[q].topk(2).values[h])


def test_a_whole_tensor_is_not_worked_on():
    big = torch.zeros(1).expand(4096, 4096)
    with pytest.raises(UnsupportedModError, match="whole captured tensor"):
        capture(lambda score, b, h, q, kv: score + (big * 2)[q, kv])
    capture(lambda score, b, h, q, kv: score + big.T[q, kv])


def test_results():
    with pytest.raises(ModSignatureError, match="not bool"):
        capture(None, lambda b, h, q, kv: q - kv)
    with pytest.raises(ModSignatureError, match="shape"):
        capture(lambda score, b, h, q, kv: TABLE[q])
    with pytest.raises(ModSignatureError, match="NoneType"):
        capture(lambda score, b, h, q, kv: None)
    with pytest.raises(ModSignatureError, match="no callable"):
        capture(3)
    capture(lambda score, b, h, q, kv: 0.0, lambda b, h, q, kv: True)


def _four(b, h, q, kv):
    return q >= kv


def _five(score, b, h, q, kv):
    return score


@pytest.mark.parametrize(
    ("score_mod", "mask_mod", "message", "remedy", "mod"),
    [
        (
            _four,
            None,
            "score_mod '_four' takes 4 arguments, not 5 (score, b, h, q_idx, kv_idx)",
            "this looks like a mask: pass it as mask_mod=",
            _four,
        ),
        (
            None,
            _five,
            "mask_mod '_five' takes 5 arguments, not 4 (b, h, q_idx, kv_idx)",
            "this looks like a score mod: pass it as score_mod=",
            _five,
        ),
        (lambda *, x: x, None, "score_mod has keyword arguments", "score_mod(score, b, h", None),
        (None, functools.partial(_five, 1, 2), "mask_mod takes 3 arguments, not 4", "score_mod(score, b, h", _five),
        (None, lambda q, kv=3: q, "mask_mod takes 1 to 2 arguments, not 4", "score_mod(score, b, h", None),
    ],
)
def test_another_number_of_arguments(score_mod, mask_mod, message, remedy, mod):
    with pytest.raises(ModSignatureError) as error:
        capture(score_mod, mask_mod)
    assert error.value.message.startswith(message)
    assert error.value.remedy.startswith(remedy)
    assert error.value.filename == __file__
    if mod is not None:
        assert error.value.line == mod.__code__.co_firstlineno


def test_a_type_error_within_a_mod_is_its_own():
    def mod(score, b, h, q, kv):
        return _four(score)

    with pytest.raises(TypeError, match="missing 3 required") as error:
        capture(mod)
    assert not isinstance(error.value, AttncError)


def test_a_wrong_result_names_the_mods_place():
    def nothing(score, b, h, q, kv):
        pass

    with pytest.raises(ModSignatureError, match="NoneType") as error:
        capture(nothing)
    assert (error.value.filename, error.value.line) == (__file__, nothing.__code__.co_firstlineno)


SLOPES = torch.ones(4)
INDICES = {
    "beyond": (
        lambda score, b, h, q, kv: score + SLOPES[7],
        CaptureIndexError,
        "index 7 is out of range for dim 0",
    ),
    "too many": (lambda score, b, h, q, kv: score + SLOPES[q, kv], CaptureIndexError, "2 indices of a tensor of 1 dims"),
    "float": (lambda score, b, h, q, kv: score + SLOPES[1.5], UnsupportedModError, "with a float"),
    "float tensor": (lambda score, b, h, q, kv: score + SLOPES[score], UnsupportedModError, "with a tensor of torch.float32"),
    "string": (lambda score, b, h, q, kv: score + SLOPES["a"], UnsupportedModError, "with a str"),
    "dim": (lambda score, b, h, q, kv: score + TABLE.transpose(0, 2)[q, kv], CaptureIndexError, "dim 2 of a tensor of 2 dims"),
}


@pytest.mark.parametrize("name", INDICES)
def test_indices_that_cannot_be(name):
    mod, kind, message = INDICES[name]
    with pytest.raises(kind, match=message) as error:
        capture(mod)
    assert (error.value.filename, error.value.line) == (__file__, mod.__code__.co_firstlineno)


def test_a_mods_own_exception_keeps_its_traceback():
    def helper(x):
        raise KeyError("mine")

    def mod(score, b, h, q, kv):
        return helper(q)

    with pytest.raises(KeyError, match="mine") as error:
        capture(mod)
    frames = traceback.extract_tb(error.value.__traceback__)
    assert [frame.name for frame in frames if frame.filename == __file__][-2:] == ["mod", "helper"]
    with pytest.raises(IndexError):
        capture(lambda score, b, h, q, kv: score + TABLE[q, kv, h])
    with pytest.raises(TypeError):
        capture(lambda score, b, h, q: score)


def test_printing_reads_nothing(capsys):
    def mod(score, b, h, q, kv):
        print(q, f"{score}", repr(TABLE))
        return score + 1

    capture(mod)
    assert "traced" in capsys.readouterr().out
