"""The module of a model that is currently running. Imports torch: import it where it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.modules import module as module_hooks


class Modules:
    """The path of the running module, from global hooks: hooks on a single module could change its path.

    `torch.nn.TransformerEncoderLayer` takes its slow path if a module has its own hooks.
    """

    def __init__(self, on_register: Callable[[Any], None], describe: Callable[[Any], Any]) -> None:
        """Track no module yet.

        Args:
            on_register: called with each outermost module that appears.
            describe: makes a description of what a module returned; the result itself is not kept.
        """
        self.roots: list[Any] = []
        self._on_register = on_register
        self._describe = describe
        self._paths: dict[int, str] = {}
        self._owners: dict[int, str] = {}
        self._calls: dict[str, int] = {}
        self._stack: list[str] = []
        self.outputs: dict[str, Any] = {}
        """Path → what the first call of the module returned, described by `describe`."""

    @property
    def current(self) -> str:
        """Path of the innermost running module; empty outside of all modules."""
        return self._stack[-1] if self._stack else ""

    def owner(self, parameter: Any) -> str:
        """Return the path of the module that holds a parameter; empty if unknown."""
        return self._owners.get(id(parameter), "")

    def all(self) -> Iterator[tuple[str, Any]]:
        """Yield path and module of each module, in the order of their definition."""
        for root in self.roots:
            for module in root.modules():
                yield self._paths[id(module)], module

    def register(self, root: Any) -> None:
        """Name a module and its submodules by their paths."""
        prefix = f"{type(root).__name__}." if self.roots else ""
        self.roots.append(root)  # kept, so that no other object gets its id
        for path, module in root.named_modules():
            self._paths.setdefault(id(module), (prefix + path).rstrip("."))
            for parameter in module.parameters(recurse=False):
                self._owners.setdefault(id(parameter), (prefix + path).rstrip("."))
        self._on_register(root)

    @contextmanager
    def scope(self, path: str) -> Iterator[None]:
        """Attribute the calls in the body to a module."""
        self._stack.append(path)
        try:
            yield
        finally:
            self._stack.pop()

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Track the calls of modules by hooks."""
        handles = [
            module_hooks.register_module_forward_pre_hook(self._enter),
            module_hooks.register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: Any, args: Any) -> None:
        if id(module) not in self._paths:
            if self._stack:  # created while the model runs: it has no path
                self._stack.append(self._stack[-1])
                return
            self.register(module)
        path = self._paths[id(module)]
        occurrence = self._calls[path] = self._calls.get(path, 0) + 1
        self._stack.append(f"{path}#{occurrence}" if occurrence > 1 else path)

    def _leave(self, module: Any, args: Any, output: Any) -> None:
        if self._stack:
            path = self._stack.pop()
            if path == self._paths.get(id(module)):
                self.outputs[path] = self._describe(output)
