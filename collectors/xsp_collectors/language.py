"""OpenTelemetry's attributes for generative models (`gen_ai.*`) of a language model's forward pass."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from torch import nn


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
    tokens = _tokens(input_shapes)
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


def _tokens(input_shapes: str | None) -> int | None:
    shapes = json.loads(input_shapes) if input_shapes else []
    if not shapes or len(shapes[0]) != 2:
        return None
    batch, sequence = shapes[0]
    return int(batch) * int(sequence)
