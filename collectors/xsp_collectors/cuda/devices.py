"""The devices that this process uses."""

from __future__ import annotations

import sys
from typing import Any


def wait() -> None:
    """Wait for the devices on which this process has a context; waiting for another one would create one."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return  # while a graph is captured nothing runs, and waiting would break the capture
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", lambda device: device == torch.cuda.current_device())
    for device in range(torch.cuda.device_count()):
        if has_context(device):
            torch.cuda.synchronize(device)
