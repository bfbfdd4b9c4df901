"""The step of a counter run, whose kernels Nsight Compute replays and assigns to layers by their NVTX ranges.

It is used only by `xsp run --counters`, in the run under ncu. The range is the describing step, between
`cudaProfilerStart` and `cudaProfilerStop`. Each call of a module is a range named after the module and the ordinal
of the call, which `xsp.counters.joining` reads. Nothing here is timed and no span is recorded.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from xsp.collector import Collector
from xsp.schema import Level


class ProfilerRange(Collector):
    """Marks around one step, and the layers in it, for a profiler outside of the process."""

    name = "profilerrange"
    levels = (Level.KERNEL,)

    def __init__(self) -> None:
        self._original: Any = None
        self._wrapper: Any = None
        self._ranges = ModuleRanges()
        self._is_on = False

    def available(self) -> str | None:
        """Return why there is nothing to replay, or None."""
        return None if torch.cuda.is_available() else "there is no CUDA device that torch can use"

    def open(self) -> None:
        """Wrap `Module.__call__` now: a compiled program must not encounter a new wrapper in the marked step."""
        self._original = nn.Module.__call__
        self._wrapper = _wrap(self._original, self._ranges)
        nn.Module.__call__ = self._wrapper  # type: ignore[method-assign]

    def close(self) -> None:
        """Remove the wrapper, unless it was wrapped in turn; then it stays inside, switched off."""
        self.stop()
        if nn.Module.__call__ is self._wrapper:
            nn.Module.__call__ = self._original  # type: ignore[method-assign]

    def start(self, rung: Level, describe: bool) -> None:
        """Begin the range if this is the describing step."""
        if describe:
            torch.cuda.synchronize()
            self._ranges.begin()
            torch.cuda.profiler.start()
            self._is_on = True

    def settle(self) -> None:
        """Wait for the step's kernels, which belong to the range."""
        if self._is_on:
            torch.cuda.synchronize()

    def stop(self) -> None:
        """End the range."""
        if self._is_on:
            self._is_on = False
            self._ranges.end()
            torch.cuda.profiler.stop()


class ModuleRanges:
    """NVTX ranges of the calls of modules, each on its thread."""

    def __init__(self) -> None:
        self.is_on = False
        self._names: dict[int, str] = {}
        self._calls: Counter[str] = Counter()
        self._threads = threading.local()

    def begin(self) -> None:
        """Mark calls from now on, counted from 0."""
        self._names.clear()
        self._calls.clear()
        self.is_on = True

    def end(self) -> None:
        """Stop marking calls; open ranges are closed when their calls return."""
        self.is_on = False

    def push(self, module: nn.Module) -> None:
        """Open the range of a call."""
        depth = getattr(self._threads, "depth", 0)
        if not depth:
            self._name_modules(module)
        self._threads.depth = depth + 1
        name = self._names.get(id(module), type(module).__name__)
        ordinal = self._calls[name]
        self._calls[name] += 1
        torch.cuda.nvtx.range_push(layer_range(ordinal, name))

    def pop(self) -> None:
        """Close the range of the innermost open call."""
        torch.cuda.nvtx.range_pop()
        self._threads.depth -= 1

    def _name_modules(self, root: nn.Module) -> None:
        """Name the modules inside an outermost one, as the layers of the timed steps are named."""
        if id(root) not in self._names:
            for name, module in root.named_modules():
                self._names.setdefault(id(module), name or type(module).__name__)


def layer_range(ordinal: int, name: str) -> str:
    """Return the name of a range: the same as `xsp.counters.joining.layer_range` expects."""
    return f"xsp.layer#{ordinal}#{name}"


def _wrap(original: Callable[..., Any], ranges: ModuleRanges) -> Callable[..., Any]:
    # checked first, so that Dynamo, which traces through the wrapper, sees nothing else of it
    is_tracing = torch.compiler.is_dynamo_compiling

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_tracing() or not ranges.is_on:
            return original(self, *args, **kwargs)
        ranges.push(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            ranges.pop()

    return __call__
