"""What is done with a module once the program imports it, or at once if it has: methods are wrapped."""

from __future__ import annotations

import contextlib
import functools
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

from xsp.collector import Collector


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


class MethodWrapper(Collector):
    """A collector that wraps methods of a module's classes, once the program imports the module."""

    module: ClassVar[str]
    """Full name of the module."""

    def __init__(self) -> None:
        self._undo: Callable[[], None] | None = None
        self._wrapped: list[tuple[type, str, Any, Any]] = []
        self._notes: list[str] = []

    def open(self) -> None:
        """Wrap the methods, or do so when the module is imported."""
        self._undo = when_imported(self.module, self._wrap)

    def close(self) -> None:
        """Restore the methods that nobody else has replaced since; calls that still run end as they would have."""
        if self._undo is not None:
            self._undo()
        self._undo = None
        for owner, name, original, wrapper in reversed(self._wrapped):
            if owner.__dict__.get(name) is wrapper:
                setattr(owner, name, original)
        self._wrapped.clear()

    def notes(self) -> Iterator[str]:
        """Return why something is not recorded, if it is not."""
        notes, self._notes = self._notes, []
        yield from notes

    @abstractmethod
    def _wrap(self, module: ModuleType) -> None:
        """Replace the methods of the module, or note why they cannot be."""

    def _replace(self, owner: type, name: str, around: Callable[..., Any]) -> None:
        """Replace a method by a function that is given the call, and its arguments."""
        original = owner.__dict__[name]

        @functools.wraps(original)
        def wrapper(*arguments: Any, **options: Any) -> Any:
            return around(functools.partial(original, *arguments, **options), *arguments, **options)

        setattr(owner, name, wrapper)
        self._wrapped.append((owner, name, original, wrapper))
