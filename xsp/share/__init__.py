"""Shared weights: a store keeps one copy per machine in sealed shared memory, and processes attach to it.

```
file ──► weights ──► store (a process) ──► client ──► attach(module, source)
         checked     memfd, sealed, LRU    mapping    parameters are views of it
                        │ client                        ▲
                        ▼                               │
                     devicestore (a process) ──► devices: opens GPU memory of the devicestore process by CUDA IPC
```

`weights` reads safetensors files strictly and defines the layout of tensors in memory. `store` is the process that
keeps them on its `shelf`; `devicestore` is the process that keeps copies on a device; `serving` is the code that both
share. `wire` is the protocol. `client` and `devices` map the memory, without torch; on a device through
`xsp.device.sharing`. `modules` makes the parameters of a module views of that memory, and builds modules without
parameter values.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xsp.share.modules import Attachment, attach, detach, empty, put

__all__ = ["Attachment", "attach", "detach", "empty", "put"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'xsp.share' has no attribute {name!r}")
    return getattr(import_module("xsp.share.modules"), name)  # this imports torch, which the store does not need
