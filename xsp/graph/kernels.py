"""Result layouts of the processor's kernels, for operators that give other layouts without values.

Without values attention runs in its mathematical form, and a convolution returns a contiguous result. Calls are timed
on the processor, so the calls should be those that it makes, and get the strides that its kernels return.
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
    mask = options.pop("attn_mask", mask)
    dropout, causal = options.pop("dropout_p", dropout), options.pop("is_causal", causal)
    with _disable_current_modes():
        return torch.empty_like(query) if _is_fused(query, key, value, mask, dropout, causal, **options) else result


def differentiable_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    **options: Any
) -> Any:  # fmt: skip
    """Call the processor's fused attention on tensors without values, as the processor does if there are gradients.

    Without values PyTorch divides attention into products and a softmax as soon as there are gradients to compute.

    Returns:
        Its result; None if the tensors have values or no gradients, or the processor would use the mathematical form.
    """
    tensors = query, key, value
    if any(tensor.device.type != "meta" for tensor in tensors) or not any(tensor.requires_grad for tensor in tensors):
        return None
    with _disable_current_modes():
        if not _is_fused(*tensors, attn_mask, dropout_p, is_causal, **options):
            return None
    if attn_mask is not None and attn_mask.dtype is torch.bool:  # as the processor converts it
        hidden = torch.ops.aten.scalar_tensor(float("-inf"), dtype=query.dtype)
        attn_mask = torch.where(attn_mask, 0.0, hidden)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *tensors, dropout_p, is_causal, attn_mask=attn_mask, scale=options.get("scale")
    )[0]


def _is_fused(
    query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, scale: float | None = None,
    enable_gqa: bool = False,
) -> bool:  # fmt: skip
    """Return whether the processor would use the fused kernel; outside of modes."""
    try:
        q, k, v, m = (None if tensor is None else _on_cpu(tensor) for tensor in (query, key, value, mask))
        choice = torch._fused_sdp_choice(q, k, v, m, dropout, causal, scale=scale, enable_gqa=enable_gqa)  # type: ignore[arg-type]
    except Exception:  # the fused kernel refuses it: the mathematical form is used
        return False
    return bool(choice == FLASH)


def _on_cpu(tensor: Any) -> Any:
    """Return a tensor of the processor with the layout of a tensor's first sample; its memory is not written."""
    sample = tensor[:1] if tensor.dim() else tensor
    result = torch.empty_strided(sample.shape, sample.stride(), dtype=sample.dtype)
    return result.requires_grad_(tensor.requires_grad)
