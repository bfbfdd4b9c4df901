"""Calls a function with a module once the program imports it, or at once if it has."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, call: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call a function with a module, once it is imported; return what takes that back.

    Args:
        name: full name of the module.
        call: takes the module.
    """
    module = sys.modules.get(name)
    if module is not None:
        call(module)
        return lambda: None
    finder = _Finder(name, call)
    sys.meta_path.insert(0, finder)

    def undo() -> None:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)

    return undo


class _Finder(MetaPathFinder):
    """Calls a function once a module is imported."""

    def __init__(self, name: str, call: Callable[[ModuleType], None]) -> None:
        self._name, self._call = name, call

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of the module, with a loader that calls the function; None for any other module."""
        if name != self._name:
            return None
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None) if finder is not self else None
            spec: ModuleSpec | None = find_spec(name, path, target) if find_spec is not None else None
            if spec is not None and spec.loader is not None:
                with contextlib.suppress(AttributeError):  # a loader that cannot be changed
                    self._call_after(spec.loader)
                return spec
        return None

    def _call_after(self, loader: Any) -> None:
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            original(module)
            if self in sys.meta_path:
                self._call(module)

        loader.exec_module = exec_module
