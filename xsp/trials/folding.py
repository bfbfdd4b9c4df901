"""The trial that folds batch norm in evaluation mode into the convolution or linear layer before it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from xsp.trials.trial import Trial

TOLERANCE = 1e-3
"""Maximum difference of results, as a share of the largest value; above it, another layer reads the folded output."""


class FoldBatchNorm(Trial):
    """Batch norm in evaluation mode, folded into the layer whose output is its input.

    The first call shows which layer that is: its result is the same tensor as the batch norm's input. Afterwards the
    module is called again with the same arguments; if the results differ, all changes are undone.
    """

    inference_only = True

    def __init__(self, value: str = "") -> None:
        super().__init__(value)
        self._hooks: list[Any] = []
        self._results: dict[int, tuple[Any, Any]] = {}
        self._pairs: dict[Any, Any] = {}
        self._calls: dict[Any, int] = {}

    def before(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """See `Trial`."""
        import torch

        if module.training:
            self.record_reason(f"{type(module).__name__}: in training mode, where batch norm cannot be folded")
            return
        for submodule in module.modules():
            if isinstance(submodule, torch.nn.modules.batchnorm._BatchNorm):
                self._hooks.append(submodule.register_forward_pre_hook(self._on_norm_input))
            elif isinstance(submodule, (torch.nn.modules.conv._ConvNd, torch.nn.Linear)):
                self._hooks.append(submodule.register_forward_hook(self._on_layer_result))

    def _on_layer_result(self, submodule: Any, args: Any, result: Any) -> None:
        import torch

        self._calls[submodule] = self._calls.get(submodule, 0) + 1
        if isinstance(result, torch.Tensor):  # a layer of a class of the program's own may return more
            self._results[id(result)] = submodule, weakref.ref(result)

    def _on_norm_input(self, norm: Any, args: Any) -> None:
        self._calls[norm] = self._calls.get(norm, 0) + 1
        value = args[0] if args else None  # the hook gets no keyword arguments
        layer, reference = self._results.get(id(value), (None, lambda: None))
        if value is not None and reference() is value:
            self._pairs[norm] = layer

    def after(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """See `Trial`."""
        import torch

        for hook in self._hooks:
            hook.remove()
        pairs = {
            norm: layer
            for norm, layer in self._pairs.items()
            if self._calls[norm] == self._calls[layer] == 1 and norm.track_running_stats and not norm.training
        }
        self._hooks, self._results, self._pairs, self._calls = [], {}, {}, {}
        if not pairs:
            if not self.reasons:
                self.record_reason(
                    f"{type(module).__name__}: no batch norm in evaluation mode directly follows a layer"
                )
            return
        undo_steps: list[Any] = []
        try:
            with torch.no_grad():
                expected = module(*args, **kwargs)
                _fold(torch, module, pairs, undo_steps)
                error = _difference(expected, module(*args, **kwargs))
        except Exception:
            for undo in reversed(undo_steps):
                undo()
            raise
        if undo_steps and error is not None and error <= TOLERANCE:
            self.record_change(f"{type(module).__name__}: {len(undo_steps)} batch norms folded")
            return
        for undo in reversed(undo_steps):
            undo()
        reason = "results cannot be compared" if error is None else f"results differed by {error:.1e}: fold undone"
        self.record_reason(
            f"{type(module).__name__}: {reason if undo_steps else 'none of its batch norms can be folded'}"
        )


def _fold(torch: Any, module: Any, pairs: Mapping[Any, Any], undo_steps: list[Any]) -> None:
    """Fold pairs, and append a function for each to `undo_steps` that undoes it."""
    from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

    locations = {
        submodule: (parent, name) for parent in module.modules() for name, submodule in parent.named_children()
    }
    for norm, layer in pairs.items():
        replacement = _without_norm(torch, norm)
        if replacement is None or norm not in locations:
            continue
        if isinstance(layer, torch.nn.Linear):
            fused = fuse_linear_bn_eval(layer, norm)
        else:
            fused = fuse_conv_bn_eval(layer, norm, transpose=getattr(layer, "transposed", False))
        parent, name = locations[norm]
        weight, bias = layer.weight, layer.bias

        def undo(
            layer: Any = layer, weight: Any = weight, bias: Any = bias, parent: Any = parent, name: str = name,
            norm: Any = norm,
        ) -> None:  # fmt: skip
            layer.weight, layer.bias = weight, bias
            setattr(parent, name, norm)

        undo_steps.append(undo)
        layer.weight, layer.bias = fused.weight, fused.bias
        setattr(parent, name, replacement)


def _without_norm(torch: Any, norm: Any) -> Any:
    """Return the replacement of a folded batch norm: an identity, or the activation inside a batch norm of timm."""
    if type(norm) in (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d):
        return torch.nn.Identity()
    if all(isinstance(getattr(norm, name, None), torch.nn.Module) for name in ("drop", "act")):
        return torch.nn.Sequential(norm.drop, norm.act).eval()
    return None


def _difference(expected: Any, actual: Any) -> float | None:
    """Return the largest difference of two results as a share of the largest value; None if they have no tensors."""
    from xsp.trials.outputs import tensors

    pairs = list(zip(tensors(expected), tensors(actual), strict=False))
    if not pairs:
        return None
    worst = 0.0
    for reference, result in pairs:
        scale = float(reference.abs().max()) if reference.numel() else 0.0
        difference = float((reference - result).abs().max()) / max(scale, 1e-30) if reference.numel() else 0.0
        worst = math.inf if math.isnan(difference) else max(worst, difference)
    return worst
