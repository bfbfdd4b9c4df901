"""Modules that are built without values of their parameters, for weights that come from elsewhere."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch


class _Emptying(threading.local):
    """How many blocks of `empty` this thread is in."""

    blocks = 0


_emptying = _Emptying()
_emptied: list[Callable[..., None]] = []
"""What `register_parameter` was before the first of all threads' blocks."""

_emptied_lock = threading.Lock()
_blocks = 0


def _register(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
    """Do as `torch.nn.Module.register_parameter`, without values where the thread is in a block of `empty`."""
    _emptied[0](self, name, param)
    kept = self._parameters[name]
    if _emptying.blocks and kept is not None and kept.device.type != "meta" and type(kept) is torch.nn.Parameter:
        self._parameters[name] = torch.nn.Parameter(kept.to("meta"), requires_grad=kept.requires_grad)


@contextlib.contextmanager
def empty() -> Iterator[None]:
    """Build modules without memory for their parameters, and with their buffers: what `attach` is to fill.

    Weights are neither allocated nor drawn at random, which takes longer than loading does for most models. It changes
    `torch.nn.Module.register_parameter` meanwhile, which does as before in other threads.
    """
    global _blocks
    with _emptied_lock:
        if not _blocks:
            _emptied[:] = [torch.nn.Module.register_parameter]
            torch.nn.Module.register_parameter = _register  # type: ignore[method-assign]
        _blocks += 1
    _emptying.blocks += 1
    try:
        yield
    finally:
        _emptying.blocks -= 1
        with _emptied_lock:
            _blocks -= 1
            if not _blocks:
                torch.nn.Module.register_parameter = _emptied[0]  # type: ignore[method-assign]
