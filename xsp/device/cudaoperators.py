"""Operators that torch takes on GPUs of NVIDIA and AMD where the processor has others, for `Device.operators`.

They are chosen as torch chooses them (aten/src/ATen/native/Normalization.cpp, Dropout.cpp and
transformers/cuda/sdp_utils.cpp):

| function | on a GPU of NVIDIA | condition |
|---|---|---|
| batch norm | `cudnn_batch_norm` | training, with weight and bias, float16, bfloat16 or float32 |
| drop-out | `native_dropout` | training, probability between 0 and 1 |
| attention | `_scaled_dot_product_efficient_attention`, without a mask in 16 bit `…_flash_attention` | with gradients |
"""

from __future__ import annotations

from typing import Any

import torch

from xsp.device.contract import Substitutes

HALVES = (torch.float16, torch.bfloat16)


def _batch_norm(
    value: Any, mean: Any, variance: Any, weight: Any = None, bias: Any = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> tuple[str, Any] | None:  # fmt: skip
    kinds = (torch.float32, *HALVES)
    if not training or weight is None or bias is None or value.dtype not in kinds or value.dim() < 2:
        return None
    torch.nn.functional._verify_batch_size(value.size())  # type: ignore[attr-defined]  # which refuses a single value per channel
    result = torch.ops.aten.cudnn_batch_norm(value, weight, bias, mean, variance, True, momentum, eps)[0]
    return "aten::cudnn_batch_norm for aten::native_batch_norm", result


def _dropout(value: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> tuple[str, Any] | None:
    if not training or inplace or not 0 < p < 1 or not value.numel():
        return None
    return "aten::native_dropout for aten::bernoulli_", torch.native_dropout(value, p, True)[0]


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> tuple[str, Any] | None:  # fmt: skip
    is_known = query.dim() == 4 and not enable_gqa and query.dtype in (torch.float32, *HALVES)
    if not is_known or not any(tensor.requires_grad for tensor in (query, key, value)):
        return None
    aten = torch.ops.aten
    if query.dtype in HALVES and attn_mask is None:
        result = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)
        return "aten::_scaled_dot_product_flash_attention for attention of the processor", result[0]
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        limits = (torch.scalar_tensor(limit, dtype=query.dtype, device=query.device) for limit in (0.0, -torch.inf))
        attn_mask = torch.where(attn_mask, *limits)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:2], query.shape[2], key.shape[2])
    result = aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )
    return "aten::_scaled_dot_product_efficient_attention for attention of the processor", result[0]


NVIDIA: Substitutes = {
    torch.nn.functional.batch_norm: _batch_norm,
    torch.nn.functional.dropout: _dropout,
    torch.nn.functional.scaled_dot_product_attention: _attention,
}

# a trace of an MI300X has native_batch_norm; MIOpen has one of its own, whose conditions are not known here
AMD: Substitutes = {function: found for function, found in NVIDIA.items() if found is not _batch_norm}
