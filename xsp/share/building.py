"""Modules built without parameter values, for weights that are loaded from elsewhere."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch


class _EmptyBlocks(threading.local):
    """Number of `empty` blocks that this thread is in."""

    blocks = 0


_thread_blocks = _EmptyBlocks()
_original_method: list[Callable[..., None]] = []
"""The original `register_parameter`, saved when the first thread enters a block."""

_replacement_lock = threading.Lock()
_blocks = 0


def _register(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
    """Call `torch.nn.Module.register_parameter`, and drop the values if this thread is in an `empty` block."""
    _original_method[0](self, name, param)
    parameter = self._parameters[name]
    if (
        _thread_blocks.blocks
        and parameter is not None
        and parameter.device.type != "meta"
        and type(parameter) is torch.nn.Parameter
    ):
        self._parameters[name] = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)


@contextlib.contextmanager
def empty() -> Iterator[None]:
    """Build modules without memory for their parameters, but with their buffers, for `attach` to fill.

    Weights are neither allocated nor initialised at random, which takes longer than loading for most models. Inside the
    block, `torch.nn.Module.register_parameter` is replaced; in other threads the replacement behaves like the original.
    """
    global _blocks
    with _replacement_lock:
        if not _blocks:
            _original_method[:] = [torch.nn.Module.register_parameter]
            torch.nn.Module.register_parameter = _register  # type: ignore[method-assign]
        _blocks += 1
    _thread_blocks.blocks += 1
    try:
        yield
    finally:
        _thread_blocks.blocks -= 1
        with _replacement_lock:
            _blocks -= 1
            if not _blocks:
                torch.nn.Module.register_parameter = _original_method[0]  # type: ignore[method-assign]
