"""The interface of a trial, and all trials by name.

```
threads=N            torch computes with N threads
interop=N            and runs up to N operators of compiled code at once
onednn=on            oneDNN is not switched off (onednn=off: it is)
tf32=on              matrix products and convolutions of a GPU in TF32
cudnn_benchmark=on   cuDNN chooses its algorithms by timing them
channels_last        weights and inputs of convolutions with the channels last
inference_mode       outermost calls record no gradients
autocast=bfloat16    outermost calls under autocast (or float16)
float32              models of another type in float32, and without autocast around them
fold_batch_norm      batch norm of evaluation is folded into the layer before it
sdpa                 attention by torch's scaled_dot_product_attention (transformers, timm)
sdpa=BACKEND         its back end: flash, efficient, math, cudnn
compile              torch.compile of outermost modules (compile=MODE for another mode)
capture              outermost calls in inference captured on a GPU, and replayed
fused_optimizer      torch's optimizers with one fused kernel
foreach              torch's optimizers over lists of parameters
num_workers=N        data loaders with N workers
pin_memory           data loaders pin what they load, and the host does not wait for its copy
malloc=keep          glibc keeps up to 1 GiB of free memory, and does not give it back to the system
```

Several trials are joined by `+`: `channels_last+threads=2`. Importing this module does not import torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from xsp.errors import UsageError, nearest


class Trial:
    """One change. `applied` has lines on what it changed, `reasons` has lines on why it did not change something."""

    changes_numbers = False
    """Whether results may differ by more than rounding."""

    inference_only = False

    def __init__(self, value: str = "") -> None:
        """Check the value after `=`.

        Raises:
            UsageError: the value is invalid.
        """
        self.value = value
        self.applied: dict[str, None] = {}
        self.reasons: dict[str, None] = {}

    def environment(self) -> Mapping[str, str]:
        """Return environment variables for the start of the process."""
        return {}

    def start(self) -> None:
        """Change settings of the process, before the program begins."""

    def before(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Change a module, before its first call as the outermost one."""

    def after(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Change a module, after its first call."""

    def already_applied(self, facts: Mapping[str, Any]) -> str | None:
        """Return why a program with these facts of its run without the trial needs no change, or None if it does."""
        return None

    def record_change(self, text: str) -> None:
        """Record a change."""
        self.applied[text] = None

    def record_reason(self, text: str) -> None:
        """Record why something was not changed."""
        self.reasons[text] = None


_CLASSES = {
    "threads": "settings:Threads",
    "interop": "settings:Interop",
    "onednn": "settings:OneDnn",
    "tf32": "settings:Tf32",
    "cudnn_benchmark": "settings:CudnnBenchmark",
    "channels_last": "calls:ChannelsLast",
    "inference_mode": "calls:InferenceMode",
    "autocast": "calls:Autocast",
    "float32": "calls:Float32",
    "sdpa": "calls:Sdpa",
    "compile": "calls:Compile",
    "capture": "capture:Capture",
    "pin_memory": "training:PinMemory",
    "fold_batch_norm": "folding:FoldBatchNorm",
    "fused_optimizer": "training:FusedOptimizer",
    "foreach": "training:Foreach",
    "num_workers": "training:Workers",
    "malloc": "settings:Malloc",
}
"""Name → module and class. The modules import torch only inside functions."""


def names() -> list[str]:
    """Return the names of all trials."""
    return sorted(_CLASSES)


def parse(text: str) -> list[Trial]:
    """Return the trials of a text such as `channels_last+threads=2`, in order.

    Raises:
        UsageError: there is no trial with this name, or its value is invalid.
    """
    return [_parse_one(part.strip()) for part in text.split("+")]


def _parse_one(text: str) -> Trial:
    name, _, value = text.partition("=")
    if name not in _CLASSES:
        raise UsageError(f"there is no trial {name!r}{nearest(name, _CLASSES) or '; there are ' + ', '.join(names())}")
    module, _, kind = _CLASSES[name].partition(":")
    trial: Trial = getattr(importlib.import_module(f"xsp.trials.{module}"), kind)(value)
    return trial


def parse_count(name: str, value: str) -> int:
    """Parse a number from 1 to 4096.

    Raises:
        UsageError: the value is not such a number.
    """
    if not value.isdecimal() or not 1 <= int(value) <= 4096:
        raise UsageError(f"{name}={value}: write a number from 1 on, {name}=2")
    return int(value)


def require_on(name: str, value: str) -> None:
    """Check that a value is empty or `on`.

    Raises:
        UsageError: it is another value.
    """
    if value not in ("", "on"):
        raise UsageError(f"{name}={value}: write {name}=on")
