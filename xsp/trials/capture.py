"""The trial of calls that are captured on an accelerator and replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xsp.device import devices
from xsp.device.contract import Device
from xsp.trials.trial import Trial, require_on

MOST_FORMS = 8
"""Most forms of arguments for which a module's calls are captured; calls of others stay as they are."""

PLAIN = (bool, int, float, str, type(None))
"""Types of arguments beside tensors that a replayed call may have: they are part of the form."""


class Capture(Trial):
    """Outermost calls without gradients are captured on their device, and replayed for arguments of the same form."""

    inference_only = True

    def __init__(self, value: str = "") -> None:
        super().__init__(value)
        require_on("capture", value)

    def after(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """See `Trial`; the first call has loaded what is not allowed in a capture."""
        import torch

        name = type(module).__name__
        place = next((str(parameter.device) for parameter in module.parameters()), "")
        device = devices.of_tensor(place) if place else None
        if device is None or device.is_host:
            if place:  # others, such as a loss, follow a module that has parameters
                self.record_reason(f"{name}: its parameters are on {place}, which has no capture and replay")
        elif torch.is_grad_enabled() or module.training:
            why = "it is in training mode" if module.training else "it records gradients"
            self.record_reason(f"{name}: {why}, and a captured call is for inference: compile=reduce-overhead has both")
        else:
            replayed = _Replayed(module.forward, device)
            reason = replayed.add(args, kwargs)
            if reason:
                self.record_reason(f"{name}: {reason}")
                return
            module.forward = replayed
            self.record_change(f"{name}: captured, and replayed in calls whose arguments have the same form")


class _Replayed:
    """The forward method of a module that replays captured calls."""

    def __init__(self, forward: Callable[..., Any], device: Device) -> None:
        self._forward, self._device = forward, device
        self._calls: dict[Any, Callable[[Sequence[Any]], Any] | None] = {}

    def add(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Capture a call, and return why it cannot be; empty if it is."""
        form, leaves = _form(args, kwargs)
        if isinstance(form, str):
            return form
        try:
            self._calls[form] = _captured(self._forward, self._device, args, kwargs, leaves)
        except NotImplementedError as error:
            self._calls[form] = None
            return str(error)
        return ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch

        form, leaves = (None, []) if torch.is_grad_enabled() else _form(args, kwargs)
        if form is None or isinstance(form, str):
            return self._forward(*args, **kwargs)
        if form not in self._calls and len(self._calls) < MOST_FORMS:
            result = self._forward(*args, **kwargs)
            self.add(args, kwargs)
            return result
        call = self._calls.get(form)
        return self._forward(*args, **kwargs) if call is None else call(leaves)


def _form(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """Return what has to be equal for a call to be replayed, and its tensors; or why it cannot be."""
    import torch
    from torch.utils import _pytree

    leaves, structure = _pytree.tree_flatten((tuple(args), dict(kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    other = next((leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, *PLAIN))), None)
    if other is not None:
        return f"an argument is {type(other).__name__}, which a call may change", []
    facts = tuple(
        (leaf.shape, leaf.stride(), leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf)
        for leaf in leaves
    )
    return (str(structure), facts), tensors


def _captured(
    forward: Callable[..., Any], device: Device, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Any]
) -> Callable[[Sequence[Any]], Any]:
    """Return the replay of a call: it copies tensors to where the captured call reads them, and copies its results.

    Raises:
        NotImplementedError: the call cannot be captured.
    """
    import torch
    from torch.utils import _pytree

    with torch.inference_mode(False), torch.no_grad():
        kept = {id(tensor): tensor.clone() for tensor in given}
    read = [kept[id(tensor)] for tensor in given]
    own_args, own_kwargs = _pytree.tree_map_only(torch.Tensor, lambda tensor: kept[id(tensor)], (args, dict(kwargs)))
    results: list[Any] = []

    def call() -> None:
        results[:] = [forward(*own_args, **own_kwargs)]

    replay = device.capture(call)
    other = next((leaf for leaf in _pytree.tree_leaves(results) if not isinstance(leaf, (torch.Tensor, *PLAIN))), None)
    if other is not None:
        raise NotImplementedError(f"its result has a {type(other).__name__}, which the next call would change")

    def replayed(tensors: Sequence[Any]) -> Any:
        for target, source in zip(read, tensors, strict=True):
            target.copy_(source, non_blocking=True)
        replay()
        return _pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, results[0])

    return replayed
