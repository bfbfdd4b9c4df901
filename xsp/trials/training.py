"""Trials of optimizers and of data loaders."""

from __future__ import annotations

from typing import Any, ClassVar

from xsp.trials.trial import LoaderTrial, Trial, parse_count


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


class Workers(LoaderTrial):
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
