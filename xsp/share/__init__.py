"""Shared weights: a store keeps one copy per machine in sealed shared memory, and processes attach to it.

```
file ──► weights ──► store (a process) ──► client ──► attach(module, source)
         checked     memfd, sealed, LRU    mapping    parameters are views of it
```

`weights` reads safetensors strictly, and has the layout of tensors in memory; `store` is the process that keeps them
on its `shelf`; `wire` is the protocol; `client` maps the shared memory, without torch; `modules` makes the parameters
of a module views of it.
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
    return getattr(import_module("xsp.share.modules"), name)  # it loads torch, which the store does without
