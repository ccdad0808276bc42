"""Every class of errors: what it derives from, what it says, that it survives pickling."""

from __future__ import annotations

import inspect
import pickle

import pytest

from attnc import errors
from attnc.errors import AttncError, CaptureIndexError, IRSyntaxError, KernelOptionsError, UnknownPassError, nearest

CLASSES = [
    cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, AttncError) and cls is not AttncError
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class_has_a_remedy_and_a_docstring(cls: type[AttncError]):
    assert cls.default_remedy and cls.__doc__
    error = cls("what is wrong")
    assert "what is wrong" in str(error) and cls.default_remedy in str(error)
    assert "do this" in str(cls("what is wrong", remedy="do this"))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls and str(again) == str(error)


@pytest.mark.parametrize(
    "name, base",
    [
        ("ShapeError", ValueError),
        ("DtypeError", TypeError),
        ("GradientNotImplementedError", NotImplementedError),
        ("CaptureIndexError", IndexError),
        ("ModDivisionError", ZeroDivisionError),
        ("BlockMaskError", ValueError),
        ("SlicedBlockMaskError", RuntimeError),
        ("KernelOptionsError", ValueError),
        ("TorchMissingError", ImportError),
        ("UnsupportedModError", NotImplementedError),
    ],
)
def test_bases_are_those_that_torch_users_catch(name: str, base: type[Exception]):
    assert issubclass(getattr(errors, name), base)


def test_a_place_in_the_users_code_is_shown():
    line = inspect.getsourcelines(test_a_place_in_the_users_code_is_shown)[1]
    text = str(AttncError("no", filename=__file__, line=line))
    assert f'at "{__file__}", line {line}' in text
    assert "def test_a_place_in_the_users_code_is_shown" in text


def test_capture_index_error_names_everything():
    error = CaptureIndexError.at(tensor="bias", dim=1, size=8, index=-9, position=(0, 1, 2, 3))
    text = str(error)
    for part in ("'bias'", "dim 1", "size 8", "index -9", "b=0", "h=1", "q=2", "k=3"):
        assert part in text
    again = pickle.loads(pickle.dumps(error))
    assert (again.tensor, again.dim, again.size, again.index, again.position) == ("bias", 1, 8, -9, (0, 1, 2, 3))


def test_syntax_error_reads_as_mlir_opt_does():
    error = IRSyntaxError("expected a type", filename="a.mlir", line=3, column=5, source="  %a : foo", remedy="")
    assert str(error) == "a.mlir:3:5: error: expected a type\n  %a : foo\n    ^"


def test_nearest_names():
    assert nearest("block_m", ["BLOCK_M", "BLOCK_N"]) == "BLOCK_M"
    assert nearest("something else", ["BLOCK_M"]) is None
    assert "'num_stages'" in str(KernelOptionsError.unknown("num_stage", ["num_warps", "num_stages"]))
    assert "'classify-blocks'" in str(UnknownPassError.named("classify-block", ["classify-blocks", "tile-attention"]))
