"""Trials of optimizers and of data loaders."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from xsp.device import devices
from xsp.trials.trial import Trial, parse_count, require_on


class _OptimizerSwitch(Trial):
    """A switch of torch's optimizers, set before the first step of each optimizer."""

    options: ClassVar[dict[str, bool | None]] = {}

    def start(self) -> None:
        """See `Trial`."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self.record_reason("no torch optimizer stepped")
        self._visited: set[int] = set()
        register_optimizer_step_pre_hook(self._set)

    def _set(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if id(optimizer) in self._visited:
            return
        self._visited.add(id(optimizer))
        self.reasons.pop("no torch optimizer stepped", None)
        name = type(optimizer).__name__
        switch = next(iter(self.options))
        groups = [group for group in optimizer.param_groups if switch in group]
        if not groups:
            self.record_reason(f"{name} has no option {switch}")
        elif all(group.get(switch) for group in groups):
            self.record_reason(f"{name} has {switch}=True already")
        elif switch == "fused" and any(group.get("differentiable") or group.get("capturable") for group in groups):
            self.record_reason(f"{name} cannot be fused with its other options")
        else:
            for group in groups:
                group.update({key: value for key, value in self.options.items() if key in group})
            if switch == "fused":
                optimizer._need_device_dtype_check_for_fused = True
            self.record_change(f"{name}: {switch}=True")


class FusedOptimizer(_OptimizerSwitch):
    """torch's optimizers with one fused kernel for all parameters."""

    options: ClassVar[dict[str, bool | None]] = {"fused": True, "foreach": False}


class Foreach(_OptimizerSwitch):
    """torch's optimizers with operators over lists of parameters."""

    options: ClassVar[dict[str, bool | None]] = {"foreach": True, "fused": None}


class _LoaderTrial(Trial):
    """A trial that sets an option of the data loaders that do not set it."""

    def set_option(self, name: str, value: Any, reason: str, change: str) -> None:
        """Set an option of all loaders that are made from now on.

        Args:
            name: the option.
            value: its value.
            reason: why nothing was changed, recorded until a loader is changed.
            change: what was changed, recorded then.
        """
        from torch.utils.data import DataLoader

        self.record_reason(reason)
        original = DataLoader.__init__
        signature = inspect.signature(original)

        @functools.wraps(original)
        def init(loader: Any, *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(loader, *args, **kwargs)
            if not bound.arguments.get(name):
                bound.arguments[name] = value
                self.reasons.clear()
                self.record_change(change)
            original(*bound.args, **bound.kwargs)

        DataLoader.__init__ = init  # type: ignore[method-assign, assignment]


class Workers(_LoaderTrial):
    """Data loaders without workers get a number of workers."""

    def __init__(self, value: str = "") -> None:
        super().__init__(value)
        self.workers = parse_count("num_workers", value)

    def start(self) -> None:
        """See `Trial`."""
        self.set_option(
            "num_workers", self.workers, "no data loader without workers was made",
            f"a data loader with {self.workers} workers",
        )  # fmt: skip


class PinMemory(_LoaderTrial):
    """Data loaders pin what they load, and pinned tensors are copied while the host goes on."""

    def __init__(self, value: str = "") -> None:
        super().__init__(value)
        require_on("pin_memory", value)

    def start(self) -> None:
        """See `Trial`."""
        import torch

        if not devices.accelerators():
            self.record_reason("there is no GPU to copy to")
            return
        self.set_option(
            "pin_memory", True, "no data loader without pinned memory was made",
            "a data loader with pinned memory, and copies for which the host does not wait",
        )  # fmt: skip
        methods = {device.torch_type for device in devices.accelerators()}  # such as `Tensor.cuda`
        for name in ("to", *(name for name in methods if callable(getattr(torch.Tensor, name, None)))):
            setattr(torch.Tensor, name, _without_waiting(getattr(torch.Tensor, name)))


def _without_waiting(copied: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that copies a tensor, with `non_blocking` for those in pinned memory."""

    @functools.wraps(copied)
    def method(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if tensor.device.type == "cpu" and "non_blocking" not in kwargs and len(args) < 2 and tensor.is_pinned():
            kwargs["non_blocking"] = True
        return copied(tensor, *args, **kwargs)

    return method
