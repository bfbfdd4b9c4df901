"""Operators that torch takes on another device than the processor, for a step that is captured without the device.

A captured step runs on tensors without values, where torch takes the processor's operators. In a prediction these are
the same: layers are single operators. In training torch goes one step further down, and there devices differ. These
functions are replaced while the step runs, as torch replaces them on a GPU (aten/src/ATen/native/Normalization.cpp,
Dropout.cpp and transformers/cuda/sdp_utils.cpp):

| function | on a GPU of NVIDIA | condition |
|---|---|---|
| batch norm | `cudnn_batch_norm` | training, with weight and bias, float16, bfloat16 or float32 |
| drop-out | `native_dropout` | training, probability between 0 and 1 |
| attention | `_scaled_dot_product_efficient_attention`, without a mask in 16 bit `…_flash_attention` | with gradients |
| update of an optimizer | `_foreach_…` on all parameters at once | |

A graph names those that it used in its settings (`substitutions`). Torch's own fake tensors of a device would choose by
themselves, but their backward pass needs the device's driver (torch 2.15: "hasPrimaryContext expects a valid device").
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

FOREACH = "aten::_foreach_* for operators on each parameter"
HALVES = (torch.float16, torch.bfloat16)


class DeviceOperators(TorchFunctionMode):
    """A mode in which functions of torch take the operators of a device of a kind."""

    def __init__(self, kind: str) -> None:
        """Start with the functions of a kind, `cuda`; of a kind that is not known, none is replaced."""
        super().__init__()
        self._functions = FUNCTIONS.get(kind, {})
        self._originals: dict[str, Any] = {}
        self.used: set[str] = set()
        """What was replaced: `aten::cudnn_batch_norm for aten::native_batch_norm`."""

    def __enter__(self) -> DeviceOperators:
        """Begin: torch's own functions, such as that of a multi-head attention, call the others past a mode."""
        for original in self._functions:
            name = original.__name__
            self._originals[name] = getattr(torch.nn.functional, name)
            setattr(torch.nn.functional, name, functools.partial(self._called, original))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """End; torch's functions are its own again."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for name, original in self._originals.items():
            setattr(torch.nn.functional, name, original)
        self._originals.clear()

    def _called(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        return self.__torch_function__(func, (), args, kwargs)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call what the device takes for a function, or the function."""
        substitute = self._functions.get(func)
        if substitute is not None and torch.is_grad_enabled():
            found = substitute(*args, **(kwargs or {}))
            if found is not None:
                note, result = found
                self.used.add(note)
                return result
        return func(*args, **(kwargs or {}))


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


_NVIDIA: Mapping[Any, Callable[..., tuple[str, Any] | None]] = {
    torch.nn.functional.batch_norm: _batch_norm,
    torch.nn.functional.dropout: _dropout,
    torch.nn.functional.scaled_dot_product_attention: _attention,
}

FUNCTIONS: Mapping[str, Mapping[Any, Callable[..., tuple[str, Any] | None]]] = {
    "cuda": _NVIDIA,
    # a trace of an MI300X has native_batch_norm; MIOpen has one of its own, whose conditions are not known here
    "hip": {function: found for function, found in _NVIDIA.items() if found is not _batch_norm},
}
"""Kind of a device → function of torch → what the device takes for it."""
