"""torch's own `F.scaled_dot_product_attention` on attnc, as long as `sdpa()` is on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

from attnc.checks import in_forward_mode, is_plain
from attnc.errors import AttncError
from attnc.integrations.stats import SDPA, count_left, count_taken
from attnc.integrations.switch import Enabled, Switch
from attnc.scaled_dot_product import scaled_dot_product_attention

FUNCTION = "scaled_dot_product_attention"


def sdpa() -> Enabled:
    """Let `torch.nn.functional.scaled_dot_product_attention` on CPU tensors run attnc.

        with attnc.sdpa():
            model(x)

        enabled = attnc.sdpa()      # or until enabled.close()

    It holds for the whole process, all threads included, while at least one such block or object is open; then torch's
    function is itself again. Gradients are attnc's, too. What attnc refuses (dropout, …) runs torch's own kernels, and
    `attnc.stats()` counts it with the reason. Under torch.func's vmap torch's own is used. Graphs that torch.compile has traced
    before stay as they are.
    """
    return _switch.on()


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Tensor:
    try:
        reason = reason_to_leave()
        if reason is None:
            out = scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            if counts(query):
                count_taken(SDPA, FUNCTION)
            return out
    except AttncError as error:
        reason = f"{type(error).__name__}: {error.message}"
    if counts(query):
        count_left(SDPA, FUNCTION, reason)
    return _operator._op_dk(
        DispatchKey.CompositeImplicitAutograd,  # torch's own body, which does not come back here
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )


def counts(query: Tensor) -> bool:
    """Whether this is a call, or the one time that a graph is written: torch.compile runs all else on fake tensors, too."""
    return is_plain(query) or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def reason_to_leave() -> str | None:
    """Why a call stays torch's before attnc looks at it."""
    return "forward-mode derivatives are open" if in_forward_mode() else None


_operator = torch.ops.aten.scaled_dot_product_attention.default
_library: torch.library.Library | None = None


def _install() -> None:
    global _library
    _library = torch.library.Library("aten", "IMPL")
    for key in ("CPU", "AutogradCPU"):
        _library.impl(FUNCTION, _attention, key)
    _operator._dispatch_cache.clear()  # torch's tracers remember which kernel they found


def _remove() -> None:
    global _library
    if _library is not None:
        _library._destroy()
        _library = None
        _operator._dispatch_cache.clear()


_switch = Switch("sdpa", _install, _remove)
