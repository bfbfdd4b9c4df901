"""Trials of outermost modules: memory format, gradients, precision, attention, compilation.

A context around a call is implemented by two hooks of the module, which copies of the module also have, and which add
no cost to its inner modules.
"""

from __future__ import annotations

import copy
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from xsp.errors import UsageError
from xsp.trials.trial import Trial, require_on


class ChannelsLast(Trial):
    """Weights of convolutions, and inputs of four and five dimensions, with the channels last in memory."""

    def before(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """See `Trial`."""
        import torch

        changed_count = unchanged_count = 0
        for parameter in module.parameters():
            memory_format = _channels_last_format(torch, parameter)
            if (
                memory_format is None
                or min(parameter.shape[1], *parameter.shape[2:]) < 1
                or parameter.shape[2:].numel() == 1
            ):
                continue
            if parameter.is_contiguous(memory_format=memory_format):
                unchanged_count += 1
                continue
            with torch.no_grad():
                parameter.data = parameter.data.contiguous(memory_format=memory_format)
            changed_count += 1
        inputs = sum(_needs_channels_last(torch, tensor) for tensor in _tensors((args, dict(kwargs))))
        if not changed_count and not inputs:
            self.record_reason(
                f"{_name(module)}: channels-last already" if unchanged_count else f"{_name(module)}: no convolutions"
            )
            return
        if not changed_count and not unchanged_count:
            self.record_reason(f"{_name(module)}: no convolutions")
            return
        module.register_forward_pre_hook(
            lambda _module, positional, keywords: _to_channels_last(torch, (positional, keywords)), with_kwargs=True
        )
        self.record_change(f"{_name(module)}: {changed_count} weights and {inputs} inputs made channels-last")


class InferenceMode(Trial):
    """Outermost calls in inference mode, without recording gradients."""

    inference_only = True

    def before(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """See `Trial`."""
        import torch

        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            self.record_reason(f"{_name(module)}: gradients are off already")
            return
        wrap_forward(module, torch.inference_mode)
        self.record_change(f"{_name(module)}: called in inference mode")


class Autocast(Trial):
    """Outermost calls under autocast."""

    changes_numbers = True

    def __init__(self, value: str = "") -> None:
        super().__init__(value or "bfloat16")
        if self.value not in ("bfloat16", "float16"):
            raise UsageError(f"autocast={value}: write autocast=bfloat16 or autocast=float16")

    def before(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """See `Trial`."""
        import torch

        tensor = next(iter(_tensors((args, dict(kwargs)))), None)
        device = next((parameter.device.type for parameter in module.parameters()), None) or (
            "cpu" if tensor is None else tensor.device.type
        )
        if torch.is_autocast_enabled(device):
            self.record_reason(f"{_name(module)}: called under autocast already")
            return
        wrap_forward(module, lambda: torch.autocast(device, dtype=getattr(torch, self.value)))
        self.record_change(f"{_name(module)}: called under autocast of {self.value}")


class Float32(Trial):
    """Outermost modules compute in single precision, whatever their type; inputs and results keep their types."""

    changes_numbers = True

    def __init__(self, value: str = "") -> None:
        super().__init__(value)
        require_on("float32", value)

    def before(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """See `Trial`."""
        import torch

        first_tensor = next(iter([*module.parameters(), *_tensors((args, dict(kwargs)))]), None)
        device = "cpu" if first_tensor is None else first_tensor.device.type
        if torch.is_autocast_enabled(device):
            wrap_forward(module, lambda: torch.autocast(device, enabled=False))
            self.record_change(f"{_name(module)}: called without the autocast that is around it")
        tensors = [*module.parameters(), *module.buffers()]
        dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point() and tensor.dtype != torch.float32}
        if not dtypes:
            if not self.applied:
                self.record_reason(f"{_name(module)}: its weights are float32 already")
            return
        module.float()

        def convert_inputs(_module: Any, inputs: Any, keywords: Any) -> Any:
            return _convert(torch, inputs, dtypes, torch.float32), _convert(torch, keywords, dtypes, torch.float32)

        def convert_result(_module: Any, inputs: Any, result: Any) -> Any:
            return _convert(torch, result, {torch.float32}, next(iter(dtypes)))

        module.register_forward_pre_hook(convert_inputs, with_kwargs=True)
        if len(dtypes) == 1:
            module.register_forward_hook(convert_result)
        self.record_change(f"{_name(module)}: weights and inputs of {', '.join(sorted(map(str, dtypes)))} as float32")


_BACKENDS = {
    "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH", "cudnn": "CUDNN_ATTENTION",
}  # fmt: skip


class Sdpa(Trial):
    """Attention by torch's own function, if the library has a switch for it, or with one back end of that function."""

    def __init__(self, value: str = "") -> None:
        super().__init__(value)
        if value and value not in _BACKENDS:
            raise UsageError(
                f"sdpa={value}: write sdpa, or the back end: {', '.join(f'sdpa={backend}' for backend in _BACKENDS)}"
            )

    def before(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """See `Trial`."""
        if self.value:
            from torch.nn.attention import SDPBackend, sdpa_kernel

            backend = getattr(SDPBackend, _BACKENDS[self.value])
            wrap_forward(module, lambda: sdpa_kernel([backend]))
            self.record_change(f"{_name(module)}: called with the back end {self.value}")
            return
        switched_count = 0
        for submodule in module.modules():
            if getattr(submodule, "fused_attn", None) is False:  # timm
                submodule.fused_attn = True
                switched_count += 1
        if switched_count:
            self.record_change(
                f"{_name(module)}: {switched_count} attention layers switched to scaled_dot_product_attention"
            )
        self._switch_transformers(module)
        if not self.applied:
            self.record_reason(
                f"{_name(module)}: its attention has no switch, or is switched already; attention that its code "
                "computes itself can only be changed there"
            )

    def _switch_transformers(self, module: Any) -> None:
        """Switch models of transformers to scaled_dot_product_attention."""
        for submodule in module.modules():
            implementation = getattr(getattr(submodule, "config", None), "_attn_implementation", None)
            if implementation not in (None, "sdpa") and hasattr(submodule, "set_attn_implementation"):
                submodule.set_attn_implementation("sdpa")
                self.record_change(f"{type(submodule).__name__}: attention by sdpa instead of {implementation}")


class Compile(Trial):
    """`torch.compile` of outermost modules that have parameters."""

    def __init__(self, value: str = "") -> None:
        super().__init__(value)
        modes = ("", "default", "reduce-overhead", "max-autotune")
        if value not in modes:
            raise UsageError(f"compile={value}: write compile, or compile={', compile='.join(modes[2:])}")
        self._lock = threading.Lock()

    def before(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """See `Trial`."""
        import torch

        if isinstance(module, torch._dynamo.OptimizedModule) or getattr(module, "_compiled_call_impl", None):
            self.record_reason(f"{_name(module)}: compiled already")
            return
        first_parameter = next(iter(module.parameters()), None)
        if first_parameter is None:
            return  # for example a loss
        missing_compiler = _no_compiler(first_parameter.device.type)
        if missing_compiler:
            self.record_reason(missing_compiler)
            return
        module.compile(**({"mode": self.value} if self.value not in ("", "default") else {}))
        self.record_change(f"{_name(module)}: compiled")


def _no_compiler(device: str) -> str | None:
    """Return why nothing can be compiled for a device, or None if it can."""
    if device == "cpu":
        compiler = os.environ.get("CXX") or "g++"
        if not any(map(shutil.which, (compiler, "c++", "clang++"))):
            return "there is no C++ compiler, which torch.compile needs for the CPU: install g++"
        return None
    from importlib.util import find_spec

    return None if find_spec("triton") else f"triton is not installed, which torch.compile needs for {device}"


def wrap_forward(module: Any, context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Run the calls of a module inside a context manager, by means of hooks."""
    state = threading.local()

    def enter(_module: Any, inputs: Any) -> None:
        manager = context()
        manager.__enter__()
        state.stack = [*getattr(state, "stack", ()), manager]

    def leave(_module: Any, inputs: Any, result: Any) -> None:
        *state.stack, manager = state.stack
        manager.__exit__(None, None, None)

    module.register_forward_pre_hook(enter, prepend=True)
    module.register_forward_hook(leave, always_call=True)


def _channels_last_format(torch: Any, tensor: Any) -> Any:
    return {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())


def _needs_channels_last(torch: Any, tensor: Any) -> bool:
    memory_format = _channels_last_format(torch, tensor)
    return memory_format is not None and not tensor.is_contiguous(memory_format=memory_format)


def _to_channels_last(torch: Any, value: Any) -> Any:
    """Return arguments with their tensors in channels-last format."""
    if isinstance(value, torch.Tensor):
        return (
            value.contiguous(memory_format=_channels_last_format(torch, value))
            if _needs_channels_last(torch, value)
            else value
        )
    if isinstance(value, dict):
        return {name: _to_channels_last(torch, element) for name, element in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_to_channels_last(torch, element) for element in value)
    return value


def _convert(torch: Any, value: Any, dtypes: set[Any], target: Any) -> Any:
    """Return arguments or a result with the tensors of the types `dtypes` converted to `target`."""
    if isinstance(value, torch.Tensor):
        return value.to(target) if value.dtype in dtypes else value
    if isinstance(value, dict):
        result = copy.copy(value)  # a model's output may be an instance of its own dictionary class
        for name, element in value.items():
            result[name] = _convert(torch, element, dtypes, target)
        return result
    if type(value) in (list, tuple):
        return type(value)(_convert(torch, element, dtypes, target) for element in value)
    return value


def _tensors(value: Any) -> list[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for element in value for tensor in _tensors(element)] if isinstance(value, (list, tuple)) else []


def _name(module: Any) -> str:
    return type(module).__name__
