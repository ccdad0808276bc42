"""Every refusal attnc makes, one class a kind, each with its remedy.

All derive from `AttncError`; most also from the built-in exception a caller of torch would expect (`ValueError`, `TypeError`,
`IndexError`, …). `str(error)` is the message, then the user's own source line if one is known, then the remedy.
"""

from __future__ import annotations

import difflib
import linecache
from collections.abc import Iterable, Sequence
from typing import ClassVar


class AttncError(Exception):
    """The base of all errors of attnc.

    `message` says what is wrong; `remedy` what to do instead (each class has its own default); `filename` and `line` name the
    user's code (a mod's file, one-based line), shown with the source line itself.
    """

    default_remedy: ClassVar[str] = ""

    def __init__(self, message: str, *, remedy: str | None = None, filename: str | None = None, line: int | None = None):
        super().__init__(message)
        self.message = message
        self.remedy = self.default_remedy if remedy is None else remedy
        self.filename = filename
        self.line = line

    def __str__(self) -> str:
        parts = [self.message]
        if self.filename is not None and self.line is not None:
            parts.append(f'  at "{self.filename}", line {self.line}')
            if source := linecache.getline(self.filename, self.line).strip():
                parts.append(f"    {source}")
        if self.remedy:
            parts.append(f"  remedy: {self.remedy}")
        return "\n".join(parts)


# -- what a mod may not do --------------------------------------------------------------------------------------------


class UnsupportedModError(AttncError, NotImplementedError):
    """A score_mod or mask_mod that attnc cannot compile. Its file and line are named where known."""

    default_remedy = (
        "write the mod with elementwise torch operations, gathers from captured tensors and reductions of a gathered row; "
        "compute anything else before the call and capture the resulting tensor"
    )


class UnsupportedOpError(UnsupportedModError):
    """A mod calls an ATen operation that attnc does not know."""


class DataDependentModError(UnsupportedModError):
    """A mod reads a tensor's data in Python: `.item()`, `.numpy()`, `.tolist()`, `bool(tensor)`, `if tensor:` …"""

    default_remedy = (
        "keep the value a tensor: torch.where(condition, a, b) instead of `if`, tensor[index] instead of .item(); "
        "a plain number that is captured is read afresh at every call"
    )


class RandomModError(UnsupportedModError):
    """A mod draws random numbers."""

    default_remedy = "draw the random tensor before the call and capture it"


class InPlaceModError(UnsupportedModError):
    """A mod writes to a captured tensor."""

    default_remedy = "use the operation without the trailing underscore, and write captured tensors outside the mod"


class ModSignatureError(AttncError, TypeError):
    """A mod does not take its arguments, is no callable, or returns something that is no scalar of the right kind."""

    default_remedy = "score_mod(score, b, h, q_idx, kv_idx) -> score;  mask_mod(b, h, q_idx, kv_idx) -> bool"


class ModDivisionError(AttncError, ZeroDivisionError):
    """A mod divides an integer by zero with `//` or `%`."""

    default_remedy = "guard the divisor, e.g. torch.where(n == 0, 1, n), or make the captured number non-zero"


class CaptureIndexError(AttncError, IndexError):
    """A mod indexes a captured tensor out of range. No output is returned.

    `tensor` is its name in the mod, `dim` and `size` the dimension and its length, `index` the offending index and `position`
    the lowest (b, h, q, k) at which it happens.
    """

    default_remedy = "keep the index in [-size, size), e.g. with .clamp(0, size - 1); an index may wrap once, as in torch"

    tensor: str | None = None
    dim: int | None = None
    size: int | None = None
    index: int | None = None
    position: tuple[int, ...] | None = None

    @classmethod
    def at(cls, *, tensor: str, dim: int, size: int, index: int, position: Sequence[int]) -> CaptureIndexError:
        """The error for `tensor[…index…]` at `position` = (b, h, q, k)."""
        names = ("b", "h", "q", "k")
        place = ", ".join(f"{name}={value}" for name, value in zip(names, position, strict=False))
        error = cls(f"index {index} is out of range for dim {dim} of captured tensor '{tensor}' with size {size}, at {place}")
        error.tensor, error.dim, error.size, error.index, error.position = tensor, dim, size, index, tuple(position)
        return error


class UnsupportedGraphError(AttncError, NotImplementedError):
    """A function given to `attnc.compile` holds an operation that is not compiled, or in a way that is not."""

    default_remedy = (
        "attnc.compile takes attention with layout, elementwise, softmax and reduction operations around it; "
        "run the rest of the model outside of the compiled function"
    )


# -- what the inputs may not be ---------------------------------------------------------------------------------------


class ShapeError(AttncError, ValueError):
    """Ranks, head dims, head counts, lengths or batch sizes that do not fit together."""

    default_remedy = (
        "query is [B, Hq, Sq, E], key [B, Hkv, Skv, E], value [B, Hkv, Skv, Ev]; Hkv divides Hq, key/value B may be 1"
    )


class DtypeError(AttncError, TypeError):
    """A dtype (or a type of argument) that attention does not take."""

    default_remedy = "query, key and value share one dtype of float64, float32, float16, bfloat16"


class DeviceError(AttncError, ValueError):
    """Tensors on a device that attnc does not serve, or on several."""

    default_remedy = "attnc runs on CPU only so far: move query, key, value and everything the mods capture to the CPU"


class UnsupportedTensorError(AttncError, NotImplementedError):
    """A tensor that is no plain strided one: nested, sparse, quantised, DTensor, or another subclass without plain memory."""

    default_remedy = "convert query, key, value and captured tensors to plain dense tensors first"


class UnsupportedTransformError(AttncError, NotImplementedError):
    """A transform of torch (torch.func, a tracing mode) that attnc's operator has no rule for."""

    default_remedy = "call attnc outside of the transformed region (torch.compiler.disable around it helps)"


class ProgramTextError(AttncError, ValueError):
    """The operator `attnc::attention` got a program text that it cannot read: damaged, or of another version of attnc."""

    default_remedy = "export or compile the model anew with the attnc that is to run it"


class DropoutError(AttncError, NotImplementedError):
    """scaled_dot_product_attention is asked for dropout."""

    default_remedy = "pass dropout_p=0.0 (in a module: self.dropout if self.training else 0.0, and model.eval())"


class AttentionMaskError(AttncError, ValueError):
    """An attn_mask that does not fit: its shape, its dtype, or is_causal=True beside it."""

    default_remedy = "attn_mask is bool (True: may attend) or float (added to scores) and broadcasts to [B, Hq, Sq, Skv]"


class UnsupportedModelError(AttncError, NotImplementedError):
    """A model of transformers whose attention attnc cannot compute: it does not go through `AttentionInterface`, or asks for
    something that has no counterpart."""

    default_remedy = (
        "load it with attn_implementation='eager', or 'sdpa' where it has that; under `with attnc.sdpa():` its calls of "
        "F.scaled_dot_product_attention run on attnc"
    )


class AttentionWeightsError(AttncError, NotImplementedError):
    """A model is asked for its attention weights, which are never in memory."""

    default_remedy = "call model.set_attn_implementation('eager') for that, or leave output_attentions out"


class GradientNotImplementedError(AttncError, NotImplementedError):
    """A derivative that attnc does not have: a second one, or one in forward mode."""

    default_remedy = "use torch.autograd (reverse mode, first derivatives), or detach() the tensor"


class BlockMaskError(AttncError, ValueError):
    """A BlockMask that does not fit the call: other lengths, heads, batch or device, or one that was sliced."""

    default_remedy = "create the BlockMask for exactly these lengths, or pass mask_mod= instead, which needs no BlockMask"


class SlicedBlockMaskError(BlockMaskError, RuntimeError):
    """A BlockMask made by slicing another one has lost its mask_mod (torch raises RuntimeError here)."""

    default_remedy = "slice the mask_mod's captured tensors and offsets instead, and create the BlockMask anew"


class KernelOptionsError(AttncError, ValueError):
    """A key of kernel_options that torch does not know either."""

    default_remedy = "torch's own keys are accepted and have no effect; attnc chooses its sizes itself"

    @classmethod
    def unknown(cls, key: object, known: Iterable[str]) -> KernelOptionsError:
        """The error for the unknown `key`, which names the nearest of the `known` ones."""
        near = nearest(str(key), known)
        return cls(f"unknown key {key!r} in kernel_options" + (f"; did you mean {near!r}?" if near else ""))


class ArgumentsError(AttncError, TypeError):
    """A compiled kernel got arguments of another number, kind, rank or dtype than its record lists."""

    default_remedy = "the callable's `arguments` attribute lists what it takes, in order"


# -- IR ---------------------------------------------------------------------------------------------------------------


class IRError(AttncError, ValueError):
    """A module that is not valid: it does not parse, or an operation does not verify."""

    default_remedy = "see the marked place; docs/pipeline.md shows what each stage's text looks like"


class IRSyntaxError(IRError):
    """Text that does not parse. `str()` is `file:line:col: error: message`, the source line and a caret, as mlir-opt prints."""

    default_remedy = "text in another dialect's custom form can be printed by iree-opt --mlir-print-op-generic"

    def __init__(
        self,
        message: str,
        *,
        filename: str = "<text>",
        line: int = 1,
        column: int = 1,
        source: str = "",
        remedy: str | None = None,
    ):
        super().__init__(message, remedy=remedy)
        self.filename: str = filename
        self.line: int = line
        self.column = column
        self.source = source

    def __str__(self) -> str:
        parts = [f"{self.filename}:{self.line}:{self.column}: error: {self.message}"]
        if self.source:
            pad = "".join(c if c == "\t" else " " for c in self.source[: self.column - 1])
            parts += [self.source, pad + "^"]
        if self.remedy:
            parts.append(f"remedy: {self.remedy}")
        return "\n".join(parts)


class UnknownPassError(IRError):
    """A pass or stage name that does not exist."""

    default_remedy = "attnc opt --list prints the passes"

    @classmethod
    def named(cls, name: str, known: Iterable[str]) -> UnknownPassError:
        """The error for the unknown pass `name`, which names the nearest known one."""
        near = nearest(name, known)
        return cls(f"unknown pass {name!r}" + (f"; did you mean {near!r}?" if near else ""))


class PassOrderError(IRError):
    """A pass is asked to run on a module that is past it, or that passes before it have not seen."""

    default_remedy = "attnc opt --list prints the passes in their order; a module's stage is its attnc.stage"


class LoweringError(AttncError, NotImplementedError):
    """A valid module that a pass or the emitter cannot take further."""

    default_remedy = (
        "this form of attention is not compiled yet; print the stages with attnc.lower(…).stages to see what reached the pass"
    )


class CompileError(AttncError, RuntimeError):
    """LLVM refused or could not compile what attnc emitted, or an object could not be loaded. This is a fault of attnc."""

    default_remedy = "please report it with the module's text (ATTNC_DUMP_IR=DIRECTORY writes it)"


class KnobError(AttncError, ValueError):
    """An environment variable ATTNC_… with a value that cannot be used."""

    default_remedy = "unset it, or see attnc doctor for what each takes"


class TuningError(AttncError, RuntimeError):
    """Tile sizes cannot be searched for, or not be stored."""

    default_remedy = "set ATTNC_CACHE_DIR to a directory of your own, and leave ATTNC_CACHE on"


class TorchMissingError(AttncError, ImportError):
    """The call needs torch, which is not installed."""

    default_remedy = "pip install 'attnc[torch]'"


class TransformersMissingError(AttncError, ImportError):
    """The integration into transformers needs transformers, which is not installed."""

    default_remedy = "pip install 'attnc[transformers]'"


# -- warnings ---------------------------------------------------------------------------------------------------------


class AttncWarning(UserWarning):
    """The base of all warnings of attnc."""


class CacheWarning(AttncWarning):
    """The disk cache cannot be used (read-only, full, owned by another user): kernels are compiled anew in each process."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that is most like `name`, case aside; None where nothing is near."""
    by_fold = {item.casefold(): item for item in known}
    matches = difflib.get_close_matches(name.casefold(), by_fold, n=1, cutoff=0.5)
    return by_fold[matches[0]] if matches else None
