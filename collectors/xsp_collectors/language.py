"""The forward pass of a language model: OpenTelemetry's attributes for generative models (`gen_ai.*`), padding."""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

LEAST_COLUMNS = 8
"""Fewest columns of a tensor of whole numbers, rows × columns, that is taken for a batch of tokens."""

MOST_TOKENS = 1 << 22
"""Most tokens that are looked through for padding."""


def attributes(model: nn.Module, input_shapes: str | None) -> dict[str, Any]:
    """Return the attributes of a forward pass; empty if the model is not one that generates text.

    Args:
        model: the outermost module; if it is a wrapper with an attribute `module`, that module counts.
        input_shapes: shapes of the call's inputs as JSON; the first is the shape of the tokens.
    """
    inner = getattr(model, "module", model)
    if not _can_generate(inner):
        return {}
    config = getattr(inner, "config", None)
    shapes = json.loads(input_shapes) if input_shapes else []
    tokens = int(shapes[0][0]) * int(shapes[0][1]) if shapes and len(shapes[0]) == 2 else None
    return {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": str(getattr(config, "model_type", None) or type(inner).__name__),
        **({"gen_ai.usage.input_tokens": tokens} if tokens is not None else {}),
    }


def _can_generate(model: Any) -> bool:
    """Return the model's own answer; models of transformers have `can_generate`."""
    answer = False
    with contextlib.suppress(Exception):  # another library's method of that name
        answer = model.can_generate() is True
    return answer


def padding(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, int, int, int] | None:
    """Return how much of a batch of tokens is padding: the first argument of whole numbers, rows × columns.

    Padding is the value that ends all rows, else the one that begins all rows; one column of it may be a token, as the
    end of a text, and a batch that holds nothing else is an example. No operator runs for it, and nothing is copied
    from a device.

    Returns:
        Rows, columns, columns that any row uses, tokens of all rows without padding; None without such an argument in
        the host's memory.
    """
    with contextlib.suppress(Exception):  # as a tensor inside a functorch transform
        for value in _arguments(args, kwargs):
            is_plain = type(value) is Tensor and value.device.type == "cpu" and value.layout == torch.strided
            if not is_plain or value.dtype not in (torch.int64, torch.int32) or value.dim() != 2:
                continue
            rows, columns = value.shape
            if rows and columns >= LEAST_COLUMNS and rows * columns <= MOST_TOKENS:
                tokens = _in_memory(value)
                at_end, at_begin = _lengths(tokens), _lengths(tokens[:, ::-1])
                lengths = min((at_end, at_begin), key=lambda found: int(found.max()))
                used = int(lengths.max())
                is_padded = 0 < used < columns - 1
                return (rows, columns, used, int(lengths.sum())) if is_padded else (rows, columns, columns, tokens.size)
    return None


def _arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    for value in (*args, *kwargs.values()):
        yield from value.values() if isinstance(value, Mapping) else (value,)


def _in_memory(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor of rows × columns as an array of the same memory; `Tensor.numpy` would run operators.

    Raises:
        ValueError: the tensor has no memory, or less than its shape: its storage was freed, or never there.
    """
    (rows, columns), (row_step, step), size = tensor.shape, tensor.stride(), tensor.element_size()
    count = (rows - 1) * row_step + (columns - 1) * step + 1
    address = tensor.data_ptr()
    if not address or (tensor.storage_offset() + count) * size > tensor.untyped_storage().nbytes():
        raise ValueError("the tensor is not in memory")
    memory = (ctypes.c_char * (count * size)).from_address(address)
    values = np.frombuffer(memoryview(memory), np.int64 if tensor.dtype == torch.int64 else np.int32)
    return np.lib.stride_tricks.as_strided(values, (rows, columns), (row_step * size, step * size), writeable=False)


def _lengths(tokens: NDArray[Any]) -> NDArray[np.int64]:
    """Return the length of each row without the value that ends all rows; all columns if they end differently."""
    rows, columns = tokens.shape
    is_token = tokens != tokens[0, -1]
    if is_token[:, -1].any():
        return np.full(rows, columns)
    return np.where(is_token.any(axis=1), columns - is_token[:, ::-1].argmax(axis=1), 0)
