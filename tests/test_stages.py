"""`attnc.lower` and `attnc.from_text`: the text of any stage is the program, as it was printed or edited."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import types
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest
from xdsl.printer import Printer

import attnc
from attnc import errors, pipeline
from attnc.errors import PassOrderError
from attnc.lowered import CompiledAttention
from attnc.mlir_text import parse_module
from attnc.target import Target
from needs import needs_tool, tool
from oracle import Problem, check, oracle
from zoo import ENTRIES, problem

STAGES = (pipeline.SOURCE, *pipeline.STAGES)
ATTENTION_STAGES = STAGES[1:3]


def arguments_of(p: Problem) -> dict:
    return {
        "score_mod": p.score_mod,
        "mask_mod": p.mask_mod,
        "block_mask": p.block_mask,
        "scale": p.scale,
        "enable_gqa": p.query.shape[1] != p.key.shape[1],
    }


def compiled(text: str) -> CompiledAttention:
    function = attnc.from_text(text).compile()
    assert isinstance(function, CompiledAttention)
    return function


def small(name: str, dtype: str = "f32") -> Problem:
    return problem(name, ENTRIES[name].sizes.but(queries=70, keys=90, batch=1, heads=2, kv_heads=1), dtype=dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("alibi_causal", "f32"),
        ("sliding_window", "bf16"),
        ("packed_chained", "f32"),
        ("soft_cap", "f64"),
        ("latent_rotary", "f32"),
        ("two_dtypes", "f16"),
        ("top_k_blocks", "f32"),
        ("block_mask_full_and_partial", "f32"),
    ],
)
def test_every_stage_is_the_same_program(name: str, dtype: str):
    p = small(name, dtype)
    lowered = attnc.lower(p.query, p.key, p.value, **arguments_of(p))
    assert tuple(lowered.stages) == STAGES
    wanted = attnc.flex_attention(p.query, p.key, p.value, **arguments_of(p))
    function = lowered.compile()
    assert isinstance(function, CompiledAttention)
    assert torch.equal(function(p.query, p.key, p.value), wanted)
    defaults = lowered.defaults
    for stage, text in lowered.stages.items():
        out = compiled(text)(p.query, p.key, p.value, defaults.scale, defaults.captures, defaults.numbers, defaults.block_lists)
        assert torch.equal(out, wanted), stage


def test_numpy_in_numpy_out():
    p = small("alibi_causal")
    lowered = attnc.lower(p.query, p.key, p.value, **arguments_of(p), return_aux=AuxRequest(lse=True, max_scores=True))
    function = lowered.compile()
    assert isinstance(function, CompiledAttention)
    results = function(p.query.numpy(), p.key.numpy(), p.value.numpy())
    assert all(isinstance(array, np.ndarray) for array in results)
    out, lse, top = (torch.from_numpy(array) for array in results)
    check(p, out, lse, top)


def bounded(score, b, h, q, k):
    return torch.tanh(score) * 3.5


def edit_constant(text: str) -> str:
    changed, count = re.subn(r"\b3\.50*(e\+00)?\b", "1.25", text)
    assert count, "the constant is not in the text"
    return changed


def edit_operation(text: str) -> str:
    assert "math.tanh" in text or "torch.aten.tanh" in text
    return text.replace("math.tanh", "math.sin").replace("torch.aten.tanh", "torch.aten.sin")


EDITS: dict[str, tuple[Callable[[str], str], Callable]] = {
    "constant": (edit_constant, lambda s, b, h, q, k: torch.tanh(s) * 1.25),
    "operation": (edit_operation, lambda s, b, h, q, k: torch.sin(s) * 3.5),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("stage", STAGES)
def test_an_edit_of_any_stage_changes_the_result(stage: str, edit: str):
    p = small("identity")
    lowered = attnc.lower(p.query, p.key, p.value, bounded, enable_gqa=True)
    change, meaning = EDITS[edit]
    out = compiled(change(lowered.stages[stage]))(p.query, p.key, p.value)
    check(Problem(p.query, p.key, p.value, meaning), out)
    assert (out - oracle(Problem(p.query, p.key, p.value, bounded)).out).abs().max() > 1e-2


def test_flex_attention_runs_the_pipeline(monkeypatch: pytest.MonkeyPatch, cache_directory):
    """A pass put into the road changes what flex_attention computes."""

    def run(module, target):
        from xdsl.dialects.arith import ConstantOp
        from xdsl.dialects.builtin import FloatAttr

        for op in module.walk():
            if isinstance(op, ConstantOp) and isinstance(op.value, FloatAttr) and op.value.value.data == 2.625:
                op.properties["value"] = FloatAttr(0.5, op.value.type)

    name = "halve-the-constant"
    module = types.ModuleType("attnc.transforms.halve_the_constant")
    module.__dict__.update(NAME=name, run=run)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    stages = list(pipeline.STAGES)
    stages.insert(1, name)
    monkeypatch.setattr(pipeline, "STAGES", tuple(stages))
    p = small("identity")
    out = attnc.flex_attention(p.query, p.key, p.value, lambda s, b, h, q, k: s * 2.625, enable_gqa=True)
    check(Problem(p.query, p.key, p.value, lambda s, b, h, q, k: s * 0.5), out)


@pytest.mark.parametrize("stage", STAGES)
def test_passes_run_in_their_order_alone(stage: str):
    p = small("alibi_causal")
    text = attnc.lower(p.query, p.key, p.value, **arguments_of(p)).stages[stage]
    place = STAGES.index(stage)
    for name in STAGES[1:]:
        module = parse_module(text)
        if name == STAGES[min(place + 1, len(STAGES) - 1)] != stage:
            pipeline.run_pass(module, name, Target.host())
            assert pipeline.stage_of(module) == name
            continue
        with pytest.raises(PassOrderError, match=f"pass {name} (needs a module at stage|has been run)"):
            pipeline.run_pass(module, name, Target.host())
        assert pipeline.stage_of(module) == stage


@pytest.mark.parametrize("stage", STAGES)
def test_a_module_that_does_not_say_its_stage_goes_on(stage: str):
    p = small("alibi_causal")
    lowered = attnc.lower(p.query, p.key, p.value, **arguments_of(p))
    text = lowered.stages[stage]
    stripped = re.sub(r" attributes \{attnc\.stage = \"[\w-]+\"\}", "", text)
    assert stripped != text
    if stage != STAGES[-1]:
        pipeline.run_pass(parse_module(stripped), STAGES[STAGES.index(stage) + 1], Target.host())
    wanted = attnc.flex_attention(p.query, p.key, p.value, **arguments_of(p))
    defaults = lowered.defaults
    assert torch.equal(compiled(stripped)(p.query, p.key, p.value, defaults.scale, defaults.captures), wanted)


def test_dumped_files_sort_by_stage(monkeypatch: pytest.MonkeyPatch, cache_directory, tmp_path):
    monkeypatch.setenv("ATTNC_DUMP_IR", str(tmp_path))
    p = small("identity")
    attnc.flex_attention(p.query, p.key, p.value, lambda s, b, h, q, k: s * 3.375, enable_gqa=True)
    names = sorted(file.name for file in tmp_path.glob("*.mlir"))
    assert names == [f"000-{place}-{stage}.mlir" for place, stage in enumerate(STAGES)]


def test_a_place_that_cannot_be_dumped_to_is_named(monkeypatch: pytest.MonkeyPatch, cache_directory, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ATTNC_DUMP_IR", str(tmp_path / "file"))
    p = small("identity")
    with pytest.raises(errors.KnobError, match="ATTNC_DUMP_IR"):
        attnc.flex_attention(p.query, p.key, p.value, lambda s, b, h, q, k: s * 3.625, enable_gqa=True)


def test_code_can_be_read():
    p = small("alibi_causal")
    lowered = attnc.lower(p.query, p.key, p.value, **arguments_of(p))
    assert "define" in lowered.llvm_ir
    assert ".text" in lowered.assembly
    assert "slope" in lowered.stages["torch"], "captures keep the names that the user gave them"


def generic(text: str) -> str:
    stream = io.StringIO()
    Printer(stream, print_generic_format=True).print_op(parse_module(text))
    return stream.getvalue()


@needs_tool("iree-opt")
def test_attention_stages_are_accepted_by_iree(tmp_path):
    """The generic text of both attention stages, for a part of the zoo, in one run of IREE's own parser and verifiers."""
    texts = []
    for name in list(ENTRIES)[::4]:
        p = problem(name)
        auxiliary = AuxRequest(lse=True) if len(texts) % 8 == 0 else None
        lowered = attnc.lower(p.query, p.key, p.value, **arguments_of(p), return_aux=auxiliary)
        texts += [f"// {name}\n" + generic(lowered.stages[stage]) for stage in ATTENTION_STAGES]
    file = tmp_path / "all.mlir"
    file.write_text("\n// -----\n".join(texts))
    program = tool("iree-opt")
    assert program is not None
    command = [program, "--split-input-file", "--allow-unregistered-dialect", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
