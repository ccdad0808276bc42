"""`attnc.lower` and `attnc.from_text`: the road of one call, to be read, edited and taken up again at any stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from attnc import programs
from attnc.errors import ArgumentsError, AttncError, LoweringError
from attnc.runtime import arrays
from attnc.runtime.abi import Argument, KernelRecord
from attnc.runtime.attention import Attention, Layout
from attnc.runtime.attention_backward import AttentionBackward
from attnc.runtime.launch import Kernel
from attnc.runtime.whole_imports import interrupts_as_such
from attnc.target import Target

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

    from attnc.pipeline import Code


@dataclass
class Defaults:
    """What a compiled callable takes where its caller gives nothing: the values of the call that was lowered."""

    scale: float | None = None
    captures: Sequence[Any] = ()
    numbers: Sequence[int | float] = ()
    block_lists: Sequence[Any] = ()


@dataclass(repr=False)
class Lowered:
    """A program at every stage.

    `stages` maps each stage's name, in order, to its MLIR text; the first is what was put in. Each of these texts, edited or
    not, is taken up by `from_text`. `llvm_ir` and `assembly` are the code, and `compile()` makes it callable.
    """

    stages: dict[str, str]
    defaults: Defaults = field(default_factory=Defaults)
    _module: ModuleOp | None = None

    def __repr__(self) -> str:
        names = list(self.stages)
        return f"Lowered({' → '.join(names if len(names) < 3 else [names[0], '…', names[-1]])})"

    @property
    def module(self) -> ModuleOp:
        """The module at its last stage (an xDSL object)."""
        if self._module is None:
            from attnc.mlir_text import parse_module

            self._module = parse_module(list(self.stages.values())[-1])
        return self._module

    @cached_property
    def code(self) -> Code:
        """LLVM text and the kernel's record."""
        from attnc import pipeline

        with refusing("this module cannot be emitted"):
            return pipeline.emit(self.module, Target.host())

    @property
    def llvm_ir(self) -> str:
        """The LLVM text that attnc emits: the kernel, then the leaf routines it calls, as two modules."""
        return "\n; leaf routines, an object of their own\n\n".join([self.code.llvm, *self.code.leaves])

    @cached_property
    def assembly(self) -> str:
        """The kernel's assembly for this machine (its leaf routines, common to many kernels, are left out)."""
        from attnc.codegen.llvm.compile import to_assembly

        return to_assembly(self.code.llvm, Target.host())

    def compile(self) -> CompiledAttention | CompiledBackward | CompiledKernel:
        """Compile (or find in the disk cache) what the last stage says: a `CompiledAttention` where the kernel's arguments have
        roles (a `CompiledBackward` if they are those of the gradients), else a `CompiledKernel`."""

        def compile_now() -> tuple[list[bytes], dict[str, Any]]:
            from attnc import pipeline

            return pipeline.to_objects(self.code, Target.host()), self.code.record

        def load(record: KernelRecord, objects: Sequence[bytes]) -> CompiledAttention | CompiledBackward | CompiledKernel:
            if record.indices("d_out"):
                backward = AttentionBackward(record, objects)
                backward.kernel.load()
                return CompiledBackward(backward, self.defaults)
            if any(argument.role for argument in record.arguments):
                attention = Attention(record, objects)
                attention.kernel.load()
                return CompiledAttention(attention, self.defaults, self._locate)
            kernel = Kernel(record, objects)
            kernel.load()
            return CompiledKernel(kernel, self._locate)

        return programs.cached(("text", list(self.stages.values())[-1]), compile_now, load)

    def _locate(self, words: Sequence[int | float]) -> AttncError:
        from attnc import pipeline

        return pipeline.locate(self.module, Target.host(), words)


@interrupts_as_such()
def lower(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: Any = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
    mask_mod: Callable[..., Any] | None = None,
    backward: bool = False,
) -> Lowered:
    """The program of `flex_attention` on the same arguments, at every stage; nothing is run.

    With `backward`, that of its gradients: of query, key, value, the scale if that is a tensor, and all captured floats.

    Raises what `flex_attention` raises before it runs.
    """
    from attnc import checks, flex, pipeline
    from attnc.capture.to_torch import to_torch

    checks.check_modes()
    call = flex.checked_call(
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux, mask_mod, True
    )
    needs: list[bool] = []
    if backward:
        needs = [True] * 3 + [hasattr(scale, "requires_grad")] + [tensor.is_floating_point() for tensor in call.captures]
    module = to_torch(call.record, call.signature, needs)
    stages = pipeline.stages_text(module, Target.host())
    defaults = Defaults(call.scale, call.captures, call.numbers, [] if call.blocks is None else [call.blocks])
    return Lowered(stages, defaults, module)


@interrupts_as_such()
def from_text(text: str, filename: str = "<text>") -> Lowered:
    """The program of MLIR text that any stage printed, edited or not, or that was written by hand; it is taken up at the stage
    that `attnc.stage` names. `.compile()` makes it callable, on query, key, value and `captures=[…]`: a text holds no tensors.

    Raises `IRSyntaxError` with the place where the text is no valid module, `LoweringError` where it cannot be lowered.
    """
    from attnc import pipeline
    from attnc.mlir_text import parse_module

    module = parse_module(text, filename)
    with refusing("this module cannot be lowered"):
        stages = pipeline.stages_text(module, Target.host())
    return Lowered(stages, _module=module)


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """What a pass stumbles over in a module that no pass before it has made is a `LoweringError` that names it."""
    try:
        with interrupts_as_such():
            yield
    except AttncError:
        raise
    except Exception as error:
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise LoweringError(f"{what} ({type(error).__name__}: {reason})") from error


def _described(arguments: Sequence[Argument]) -> str:
    return ", ".join(argument.describe() for argument in arguments)


class CompiledKernel:
    """A kernel whose arguments have no roles: call it on all of them in order, outputs included, which are written in place."""

    def __init__(self, kernel: Kernel, locate: Callable[[Sequence[int | float]], AttncError]):
        self._kernel = kernel
        self._locate = locate

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """What it takes."""
        return self._kernel.record.arguments

    def __repr__(self) -> str:
        return f"CompiledKernel({_described(self.arguments)})"

    def __call__(self, *arguments: Any) -> None:
        """Run on numpy arrays or CPU torch tensors and Python numbers. Raises `ArgumentsError`, `DtypeError`, `ShapeError`,
        `CaptureIndexError`."""
        words = arrays.argument_words(self._kernel.record, arguments)
        if self._kernel.launch(words, arguments):
            raise self._locate(words)


class CompiledAttention:
    """Attention, compiled: call it on torch tensors or numpy arrays."""

    def __init__(self, attention: Attention, defaults: Defaults, locate: Callable[[Sequence[int | float]], AttncError]):
        self._attention = attention
        self._defaults = defaults
        self._locate = locate

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """What the kernel takes, results and `group` included."""
        return self._attention.record.arguments

    def __repr__(self) -> str:
        return f"CompiledAttention({_described(self.arguments)})"

    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        scale: float | None = None,
        captures: Sequence[Any] = (),
        numbers: Sequence[int | float] = (),
        block_lists: Sequence[Any] = (),
    ) -> Any:
        """Run on query [B, Hq, Sq, E], key and value as `flex_attention` takes them, torch tensors or numpy arrays.

        scale None is the one it was lowered with, else 1/√E; empty `captures`, `numbers` and `block_lists` (one int8 array
        [B, H, query blocks, key blocks] of 0 not listed, 1 partial, 2 full; B and H may be 1) are those it was lowered with.
        Returns out, or a tuple of out, lse, max_scores as far as the program has them, as arrays of query's kind. Raises
        `ArgumentsError`, `DtypeError`, `ShapeError`, `CaptureIndexError`.
        """
        attention = self._attention
        record = attention.record
        captures = captures or self._defaults.captures
        numbers = numbers or self._defaults.numbers
        block_lists = block_lists or self._defaults.block_lists
        for what, given, wanted in (
            ("captures", captures, attention.captures),
            ("numbers", numbers, attention.numbers),
            ("block_lists", block_lists, attention.blocks),
        ):
            if len(given) != len(wanted):
                names = ", ".join(argument.describe() for argument in wanted)
                raise ArgumentsError(f"{what}: {len(given)} given, {len(wanted)} needed", remedy=f"pass {what}=[{names}]")
        buffers, inputs = [], []
        for argument, array in zip(record.arguments, (query, key, value), strict=False):
            array = arrays.fitting(argument, array)
            inputs.append(array)
            address, *rest = arrays.buffer_words(argument, array)
            buffers.append((address, tuple(rest[:4]), tuple(rest[4:])))
        layout = Layout(*(buffer[1:] for buffer in buffers))
        if scale is None:
            scale = self._defaults.scale if self._defaults.scale is not None else buffers[0][1][3] ** -0.5
        words: list[int | float] = []
        for buffer, rest in zip(buffers, (layout.query, layout.key, layout.value), strict=True):
            words += [buffer[0], *rest]
        words.append(arrays.scalar_word(record.arguments[record.indices("scale")[0]], scale))
        for argument, array in zip(attention.captures, captures, strict=True):
            words += arrays.buffer_words(argument, array)
        for argument, number in zip(attention.numbers, numbers, strict=True):
            words.append(arrays.scalar_word(argument, number))
        for argument, array in zip(attention.blocks, block_lists, strict=True):
            sizes = arrays.describe(array, argument)[2]
            words += arrays.buffer_words(argument, array, (*layout.lse_shape[:2], *sizes[-2:]))
        results = []
        for index in record.indices("out", "lse", "max"):
            argument = record.arguments[index]
            shape, strides = (layout.out_shape, layout.out_strides) if argument.role == "out" else (layout.lse_shape, None)
            result = arrays.empty_like(query, argument, shape, strides)
            words += arrays.buffer_words(argument, result)
            results.append(result)
        if attention.has_group:
            words.append(layout.group)
        if layout.without_rows:
            pass
        elif layout.without_keys:
            for role, result in zip(("out", "lse", "max"), results, strict=False):
                result[...] = 0.0 if role == "out" else -float("inf")
        elif attention.launch(words, (inputs, captures, block_lists, results)):
            raise self._locate(words)
        return results[0] if len(results) == 1 else tuple(results)


class CompiledBackward:
    """The gradients of attention, compiled: call it on torch tensors."""

    def __init__(self, backward: AttentionBackward, defaults: Defaults):
        self._backward = backward
        self._defaults = defaults

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """What the kernel takes, gradients included."""
        return self._backward.record.arguments

    def __repr__(self) -> str:
        return f"CompiledBackward({_described(self.arguments)})"

    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        out: Any,
        lse: Any,
        grad_out: Any,
        grad_lse: Any = None,
        scale: float | None = None,
        captures: Sequence[Any] = (),
        numbers: Sequence[int | float] = (),
        block_lists: Sequence[Any] = (),
    ) -> tuple[Any, ...]:
        """The gradients for which it was made, in the order query, key, value, scale, captures, given those of `out` and of the
        natural `lse`. The other arguments are those of `CompiledAttention`. Raises `ArgumentsError`, `CaptureIndexError`."""
        from attnc import backward

        program, defaults = self._backward, self._defaults
        captures, numbers = captures or defaults.captures, numbers or defaults.numbers
        block_lists = block_lists or defaults.block_lists
        if len(captures) != len(program.captures) or len(numbers) != len(program.numbers):
            names = ", ".join(argument.describe() for argument in (*program.captures, *program.numbers))
            raise ArgumentsError(f"{len(captures)} captures and {len(numbers)} numbers given", remedy=f"it takes {names}")
        number = defaults.scale if scale is None else scale
        if number is None:
            number = query.shape[3] ** -0.5
        blocks = None
        if program.blocks:
            if not block_lists:
                raise ArgumentsError("block_lists: 0 given, 1 needed")
            blocks = block_lists[0].expand(*query.shape[:2], -1, -1)
        found = backward.run(
            lambda: program,
            *(query, key, value, out, lse, grad_out, grad_lse, captures, numbers, blocks, number),
            program.wanted(),
        )
        return tuple(gradient for gradient in found if gradient is not None)
