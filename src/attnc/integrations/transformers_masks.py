"""The mask side of `attn_implementation="attnc"`: the mask function of a model as a BlockMask that is never built.

transformers describes a mask by a function of positions (`mask_function`), the lengths and offsets of queries and keys, and a
padding mask [B, S]. sdpa makes a tensor [B, 1, Sq, Skv] of it. Here it stays a function, which the kernel evaluates:

    allowed(b, h, q, kv) = mask_function(b, h, q + q_offset, kv + kv_offset) and padding[b, kv]

The offsets are captured numbers and the padding a captured tensor, so that a token more compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function
from transformers.utils.import_utils import is_tracing

from attnc.capture.block_mask import BlockMask, _check
from attnc.capture.capture import Captured, capture
from attnc.errors import UnsupportedModelError

_OPTIONS = {"device": "cpu", "BLOCK_SIZE": 128}


class ModelMask(BlockMask):
    """A mask of a model: `mask_mod` and `shape` = (B, 1, Sq, Skv), and what was captured of it, for the layers share it.

    It is a BlockMask because models and caches hand on tensors and BlockMasks, and nothing else. Reading it as a tensor raises
    `UnsupportedModelError`.
    """

    ndim = 4

    def __init__(self, mask_mod: Callable[..., Any], shape: tuple[int, int, int, int]):
        super().__init__(mask_mod, shape, _OPTIONS)
        self._captured: dict[Any, Captured] = {}

    def check(self, query: Tensor, key: Tensor) -> None:
        """Raises `BlockMaskError` unless it was made for attention of these."""
        _check(self.shape, query.shape[0], query.shape[1], query.shape[2], key.shape[2])

    def captured(self, softcap: float | None, score_mod: Callable[..., Any] | None, score_dtype: torch.dtype) -> Captured:
        """The record, tensors and numbers of this mask under `score_mod`, which follows from `softcap`. Mask functions of
        transformers never change once they are made, so the first layer captures for all."""
        found = self._captured.get((softcap, score_dtype))
        if found is None:
            found = capture(score_mod, self.mask_mod, score_dtype=score_dtype)
            self._captured[softcap, score_dtype] = found
        return found

    def dim(self) -> int:
        """4, as of the tensor that it stands for."""
        return self.ndim

    def _as_tensor(self, *_: Any) -> Any:
        raise UnsupportedModelError(
            "the model computes with its attention mask, which is a function here and no tensor",
            remedy="load it with attn_implementation='sdpa' or 'eager'; under `with attnc.sdpa():` its calls of "
            "F.scaled_dot_product_attention run on attnc",
        )

    def __getitem__(self, index: Any) -> Any:
        return self._as_tensor()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __and__ = __or__ = __invert__ = _as_tensor

    def __reduce__(self):
        return (ModelMask, (self.mask_mod, self.shape)) if self.is_lazy else super().__reduce__()


def model_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_: Any,
) -> ModelMask | None:
    """What `AttentionMaskInterface` calls for "attnc", with the arguments of transformers' `sdpa_mask`.

    Arguments:
        batch_size, q_length, kv_length: of the attention that is to be masked.
        q_offset, kv_offset: positions of its first query and key in the sequence (q_offset maybe a 0-d tensor).
        mask_function: (b, h, q, kv) -> bool, in positions of the sequence.
        attention_mask: bool [B, S], False where the sequence is padded; keys beyond S count as padded.
        local_size: the window or chunk of a local mask.
        allow_is_causal_skip, allow_is_bidirectional_skip: whether None may stand for this mask: the attention module then
            knows by itself whether it is causal.

    Returns a `ModelMask` of shape (B, 1, Sq, Skv), or None. Nothing of the size Sq × Skv is made.
    """
    padding = attention_mask
    if is_tracing(q_offset if padding is None else padding):
        return _traced_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            padding,
            local_size,
            allow_is_causal_skip,
            allow_is_bidirectional_skip,
        )
    # A static cache counts in this very tensor, and does so before its layer attends: take the number of now.
    q_offset = int(q_offset)
    if padding is not None:
        causal = allow_is_causal_skip or mask_function is causal_mask_function
        last = q_offset + q_length if causal else kv_offset + kv_length
        if padding.shape[-1] >= last and bool(padding.all()):
            padding = None
    whole = local_size is None or kv_length < local_size
    if padding is None and whole:
        if allow_is_bidirectional_skip:
            return None
        if allow_is_causal_skip:
            # One query attends to all keys then, several ones from the upper left corner on.
            if q_offset + 1 >= kv_offset + kv_length if q_length == 1 else q_offset == kv_offset:
                return None
    mask_mod = mask_function
    if q_offset or kv_offset:
        mask_mod = _moved(mask_mod, q_offset, kv_offset)
    if padding is not None:
        mask_mod = _padded(mask_mod, _padding_of(padding, batch_size, kv_length, kv_offset))
    return ModelMask(mask_mod, (batch_size, 1, q_length, kv_length))


def _traced_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: Callable[..., Any],
    padding: Tensor | None,
    local_size: int | None,
    allow_is_causal_skip: bool,
    allow_is_bidirectional_skip: bool,
) -> ModelMask | None:
    """The same where the values of tensors are not known: a graph is written."""
    if padding is None and (local_size is None or kv_length < local_size):
        if allow_is_bidirectional_skip:
            return None
        if allow_is_causal_skip and not isinstance(q_offset, Tensor) and q_length == kv_length:
            return None
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.clone()  # the cache goes on counting in it, before its layer attends
    mask_mod = _moved(mask_function, q_offset, kv_offset)
    if padding is not None:
        mask_mod = _padded(mask_mod, _padding_of(padding, batch_size, kv_length, kv_offset))
    return ModelMask(mask_mod, (batch_size, 1, q_length, kv_length))


def _padding_of(padding: Tensor, batch: int, length: int, offset: int) -> Tensor:
    """The padding of these keys: bool [batch, length]."""
    if (missing := offset + length - padding.shape[-1]) > 0:
        padding = torch.nn.functional.pad(padding, (0, missing))
    return padding[:, offset : offset + length].expand(batch, -1)


def _moved(mask_function: Callable[..., Any], q_offset: int | Tensor, kv_offset: int) -> Callable[..., Any]:
    def mask_mod(b, h, q_idx, kv_idx):
        return mask_function(b, h, q_idx + q_offset, kv_idx + kv_offset)

    return mask_mod


def _padded(mask_function: Callable[..., Any], padding: Tensor) -> Callable[..., Any]:
    def mask_mod(b, h, q_idx, kv_idx):
        return mask_function(b, h, q_idx, kv_idx) & padding[b, kv_idx]

    return mask_mod
