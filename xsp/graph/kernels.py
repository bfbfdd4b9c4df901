"""Result layouts of the processor's kernels, for operators that give other layouts without values.

Without values attention runs in its mathematical form, and a convolution returns a contiguous result. Calls are timed
on the processor, so the calls after these operators should get the strides that its kernels return.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.utils._python_dispatch import _disable_current_modes

CONVOLUTIONS = frozenset(
    f"aten::{name}" for name in ("conv2d", "conv3d", "convolution", "conv_transpose2d", "conv_transpose3d")
)

FLASH = 1
"""PyTorch's number of the fused kernel of attention."""


def convolution(result: Any, data: Any, weight: Any) -> Any:
    """Return the result of a convolution: its channels are last if those of its input or of its weight are.

    The kernels of oneDNN and PyTorch's own do the same, except for 64-bit numbers.
    """
    if result.dim() not in (4, 5) or torch.float64 in (data.dtype, weight.dtype):
        return result
    layout = torch.channels_last if result.dim() == 4 else torch.channels_last_3d
    if layout not in (suggest_memory_format(data), suggest_memory_format(weight)):
        return result
    with _disable_current_modes():
        return torch.empty_like(result, memory_format=layout)


def attention(
    result: Any, query: Any, key: Any, value: Any, mask: Any = None, dropout: float = 0.0, causal: bool = False,
    **options: Any
) -> Any:  # fmt: skip
    """Return the result of attention, laid out as its query if the processor would use the fused kernel."""
    mask = options.get("attn_mask", mask)
    dropout, causal = options.get("dropout_p", dropout), options.get("is_causal", causal)
    scale, grouped = options.get("scale"), bool(options.get("enable_gqa"))
    try:
        with _disable_current_modes():
            substitutes: list[Any] = [
                None if tensor is None else _on_cpu(tensor) for tensor in (query, key, value, mask)
            ]
            q, k, v, m = substitutes
            if torch._fused_sdp_choice(q, k, v, m, dropout, causal, scale=scale, enable_gqa=grouped) != FLASH:
                return result
            return torch.empty_like(query)
    except Exception:  # the fused kernel refuses it: the mathematical form is used
        return result


def _on_cpu(tensor: Any) -> Any:
    """Return a tensor of the processor with the layout of a tensor's first sample; its memory is not written."""
    sample = tensor[:1] if tensor.dim() else tensor
    return torch.empty_strided(sample.shape, sample.stride(), dtype=sample.dtype)
