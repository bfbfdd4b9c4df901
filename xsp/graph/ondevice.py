"""Operators that torch takes on another device than the processor, for a step that is captured without the device.

A captured step runs on tensors without values, where torch takes the processor's operators. In a prediction these are
the same: layers are single operators. In training torch goes one step further down, and there devices differ. The
functions that a device names (`xsp.device.contract.Device.operators`) are replaced while the step runs, as torch
replaces them there, and updates of an optimizer are `_foreach_…` on all parameters at once.

A graph names those that it used in its settings (`substitutions`). Torch's own fake tensors of a device would choose by
themselves, but their backward pass needs the device's driver (torch 2.15: "hasPrimaryContext expects a valid device").
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from xsp.device import devices

FOREACH = "aten::_foreach_* for operators on each parameter"


class DeviceOperators(TorchFunctionMode):
    """A mode in which functions of torch take the operators of a device of a kind."""

    def __init__(self, kind: str) -> None:
        """Start with the functions of a kind, `cuda`; of a kind that is not known, none is replaced."""
        super().__init__()
        self._functions = devices.operators(kind)
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
