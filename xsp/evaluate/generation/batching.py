"""A causal language model of transformers that continues several requests together, one token of each per step.

A request can begin and end at any step (continuous batching). Requests have caches of different lengths: shorter ones
are padded on the left, and an attention mask hides the padding. Tokens are the most probable ones (greedy decoding).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

from xsp import causal
from xsp.errors import ManifestError
from xsp.evaluate.load.requests import Times


class Sequences(Protocol):
    """Requests that a model continues together."""

    def begin(self, number: int, prompt: Times) -> int:
        """Read a request's prompt, and return its first generated token."""
        ...

    def step(self) -> dict[int, int]:
        """Generate one token of each request that has begun and not ended, and return them by request."""
        ...

    def end(self, numbers: Sequence[int]) -> None:
        """Drop requests."""
        ...


class CausalSequences:
    """Requests that a causal language model of transformers continues together."""

    def __init__(self, model: Any, device: str) -> None:
        """Use a model, which is on the device."""
        import torch

        self._torch, self._model, self._device = torch, model, device
        parameters = inspect.signature(model.forward).parameters
        self._has_positions = "position_ids" in parameters
        self._settings: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in parameters:
            self._settings["logits_to_keep"] = 1  # as `generate` does
        self._numbers: list[int] = []
        self._name = ""
        """Name of the argument that is the cache."""

        self._cache: Any = None
        self._mask: Any = None
        """Of each request (row), which places of the cache hold its tokens, and not padding."""

        self._last: Any = None
        """The last token of each request, in a column."""

    def begin(self, number: int, prompt: Times) -> int:
        """Read a request's prompt, and return its first generated token.

        Raises:
            ManifestError: the model keeps no cache, or requests have begun already and it cannot be joined with theirs.
        """
        torch = self._torch
        with torch.inference_mode():
            ids = torch.from_numpy(prompt).to(self._device)[None]
            mask = torch.ones_like(ids)
            output = self._model(input_ids=ids, attention_mask=mask, **self._positions(mask, len(prompt)),
                                 **self._settings)  # fmt: skip
            last = output.logits[:, -1:].argmax(-1)
            self._name, cache = causal.find_cache(self._model, output)
            if not self._name:
                raise ManifestError("model.source: not a causal language model: it keeps no cache of the tokens before")
            if self._numbers:
                self._join(cache, mask)
                self._last = torch.cat([self._last, last])
            else:
                self._cache, self._mask, self._last = cache, mask, last
            self._numbers.append(number)
            return int(last)

    def step(self) -> dict[int, int]:
        """Generate one token of each request that has begun and not ended, and return them by request."""
        torch = self._torch
        with torch.inference_mode():
            self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
            output = self._model(
                input_ids=self._last, attention_mask=self._mask, **{self._name: self._cache},
                **self._positions(self._mask, 1), **self._settings,
            )  # fmt: skip
            _, self._cache = causal.find_cache(self._model, output)
            self._last = output.logits[:, -1:].argmax(-1)
            return dict(zip(self._numbers, self._last.flatten().tolist(), strict=True))

    def end(self, numbers: Sequence[int]) -> None:
        """Drop requests, and the places of the cache that only they used."""
        kept = [row for row, number in enumerate(self._numbers) if number not in numbers]
        self._numbers = [self._numbers[row] for row in kept]
        if not kept:
            self._cache = self._mask = self._last = None
            return
        rows = self._torch.tensor(kept, device=self._device)
        mask = self._mask[rows]
        begin = int(mask.any(0).int().argmax())
        self._mask, self._last = mask[:, begin:], self._last[rows]
        for layer in self._layers(self._cache):
            layer.keys, layer.values = layer.keys[rows][:, :, begin:], layer.values[rows][:, :, begin:]

    def _positions(self, mask: Any, count: int) -> dict[str, Any]:
        """Return the positions of the last `count` tokens, counted without padding."""
        if not self._has_positions:
            return {}
        return {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)[:, -count:]}

    def _join(self, cache: Any, mask: Any) -> None:
        """Append a request's cache to that of the others; the shorter one is padded on the left."""
        length = max(self._mask.shape[1], mask.shape[1])

        def joined(first: Any, second: Any, axis: int) -> Any:
            """Return two tensors, padded to the length at the end of the axis, one below the other."""
            padded = [
                self._torch.nn.functional.pad(value, (0, 0) * (value.ndim - 1 - axis) + (length - value.shape[axis], 0))
                for value in (first, second)
            ]
            return self._torch.cat(padded)

        for layer, other in zip(self._layers(self._cache), self._layers(cache), strict=True):
            layer.keys, layer.values = joined(layer.keys, other.keys, 2), joined(layer.values, other.values, 2)
        self._mask = joined(self._mask, mask, 1)

    @staticmethod
    def _layers(cache: Any) -> list[Any]:
        """Return the layers of a cache, if each keeps keys and values of every token.

        Raises:
            ManifestError: one does not, such as a layer with a sliding window or a state.
        """
        layers = getattr(cache, "layers", None)
        kinds = {type(layer).__name__ for layer in layers or ()} or {type(cache).__name__}
        if layers is None or kinds != {"DynamicLayer"}:
            raise ManifestError(
                f"scenario.generation.slots: the caches of this model ({', '.join(sorted(kinds))}) do not keep the "
                "keys and values of every token, so its requests cannot be joined in a batch; give slots: 1"
            )
        return list(layers)
