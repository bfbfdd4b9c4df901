"""Results of outermost calls, stored by two programs and compared: the difference that a trial makes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xsp import inside

CALLS = 3
"""Number of calls of each outermost module whose results are kept."""

MODULES = 8
MOST_BYTES = 256 << 20
MOST_VALUES = 1 << 15
"""Maximum number of values of a tensor that are kept, evenly spaced."""

ROUNDING = {"torch.float64": 1e-9, "torch.float32": 1e-4, "torch.float16": 1e-2, "torch.bfloat16": 3e-2}
"""Type of the result without the trial → difference explained by rounding, as a share of the largest value."""


class Outputs:
    """Results of the first calls of outermost modules."""

    def __init__(self) -> None:
        self._results: dict[str, list[dict[str, Any]]] = {}
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._modules = 0  # counted: the dictionary forgets modules that a program makes for one step

    def keep(self, module: Any, result: Any) -> None:
        """Keep the result of a call if it is one of the first."""
        name = self._names.get(module)
        if name is None:
            self._modules += 1
            name = self._names[module] = f"{type(module).__name__} {self._modules}"
        if self._modules > MODULES:
            return
        calls = self._results.setdefault(name, [])
        if len(calls) >= CALLS:
            return
        calls.append({"tensors": [_plain(tensor) for tensor in tensors(result, exact=True)]})

    def content(self) -> dict[str, Any]:
        """Return the results as plain data."""
        return dict(self._results)


def tensors(value: Any, exact: bool = False) -> list[Any]:
    """Return the floating-point tensors of a result in order, as float64 unless `exact`."""
    import torch

    if isinstance(value, torch.Tensor):
        plain = value.detach()
        return [plain if exact else plain.double()] if plain.is_floating_point() and not plain.is_sparse else []
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for element in value for tensor in tensors(element, exact)]
    return []


def _plain(tensor: Any) -> dict[str, Any]:
    import torch

    flat = tensor.reshape(-1)
    step = max(1, math.ceil(flat.numel() / MOST_VALUES))
    with torch.no_grad():
        values = flat[::step].double().cpu()
    return {"type": str(tensor.dtype), "shape": list(tensor.shape), "values": values.tolist()}


def error(baseline: Path, changed: Path) -> tuple[float | None, bool, str]:
    """Compare the results of two processes.

    Args:
        baseline: report of the process without the trial.
        changed: report of the process with it.

    Returns:
        The largest difference of a result as a share of its largest value, None if nothing can be compared; whether
        rounding explains it; and the reason why nothing can be compared.
    """
    outputs = [inside.read_json(path.parent, path, MOST_BYTES).get("outputs") or {} for path in (baseline, changed)]
    if not outputs[0] or not outputs[1]:
        return None, False, "no outermost module returned a tensor"
    if outputs[0].keys() != outputs[1].keys():
        return None, False, "the two runs called different modules"
    worst, is_rounding, pairs = 0.0, True, 0
    for name, calls in outputs[0].items():
        for before, after in zip(calls, outputs[1][name], strict=False):
            for reference, result in zip(before["tensors"], after["tensors"], strict=False):
                if reference["shape"] != result["shape"]:
                    return None, False, f"{name} returned different shapes"
                difference = _difference(reference["values"], result["values"])
                pairs += 1
                worst = max(worst, difference)
                is_rounding = is_rounding and difference <= ROUNDING.get(reference["type"], 1e-2)
    return (worst, is_rounding, "") if pairs else (None, False, "no outermost module returned a floating-point tensor")


def _difference(a: list[float], b: list[float]) -> float:
    scale = max((abs(number) for number in a if math.isfinite(number)), default=0.0)
    worst = 0.0
    for left, right in zip(a, b, strict=True):
        if left == right or (math.isnan(left) and math.isnan(right)):
            continue
        if not (math.isfinite(left) and math.isfinite(right)):
            return math.inf
        worst = max(worst, abs(left - right) / max(scale, 1e-30))
    return worst
