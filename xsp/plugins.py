"""Collectors, importers, exporters, analyses and commands by name, through entry points.

xsp's own plugins are loaded in the same way as those of third parties. A plugin that cannot be imported is listed
with the reason, and does not affect other plugins.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from xsp.collector import Collector, DeviceCollector
from xsp.errors import PluginError, nearest

if TYPE_CHECKING:
    import argparse
    from importlib.metadata import EntryPoint
    from pathlib import Path

COMMANDS = "xsp.commands"
REMARKS = "xsp.remarks"

PLUGIN_ERRORS = (Exception, SystemExit)
"""Exceptions of third-party code that do not end the measured program."""


@contextmanager
def importing(error: Callable[[str], Exception], message: str) -> Iterator[None]:
    """Import an optional library in the block.

    Args:
        error: class of the error if the library is missing.
        message: its text: what needs the library, and what to install; `{error}` is replaced by the original one.

    Raises:
        Exception: of that class: the library is missing.
    """
    try:
        yield
    except ImportError as missing:
        raise error(message.format(error=missing)) from missing


def names(group: str) -> list[str]:
    """Return the names of a group's plugins, sorted, without importing any of them."""
    return sorted({point.name for point in _entry_points(group)})


def origins(group: str) -> dict[str, str]:
    """Return where the plugins of a group are, `module:attribute` by name, without importing any of them."""
    return {point.name: point.value for point in sorted(_entry_points(group), key=lambda point: point.name)}


def load(group: str, name: str) -> Any:
    """Import one plugin.

    Args:
        group: `xsp.collectors`, `xsp.importers`, `xsp.exporters`, `xsp.analyses`, `xsp.questions`,
            `xsp.graph_questions`, `xsp.commands`, `xsp.remarks`, `xsp.runtimes`, `xsp.devices` or
            `xsp.senders`.
        name: its name in that group.

    Returns:
        The object that the entry point names.

    Raises:
        PluginError: no plugin has that name, or it cannot be imported; the message says why.
    """
    point = _entry_point(group, name)
    try:
        return point.load()
    except PLUGIN_ERRORS as error:  # a third party's module may raise anything when it is imported
        reason = f"{type(error).__name__}: {error}"
        raise PluginError(f"{group} plugin {name!r} ({point.value}) cannot be imported: {reason}") from error


class Sender(Protocol):
    """A sender of the steps of a run during the recording, in the process that stores the run."""

    def __init__(self, run: Path, target: str, policy: str) -> None:
        """Start sending a run, given its directory; raises as `check`."""

    @staticmethod
    def check(target: str, policy: str) -> None:
        """Check a target and a policy in advance.

        Raises:
            UsageError: the target or the policy is invalid.
            PluginError: a package is missing.
        """

    def stored(self, step: int) -> None:
        """Accept a step that is on disk now; return when the program may continue."""

    def finish(self) -> dict[str, Any]:
        """Send the remaining steps, and return the summary of the delivery for `run.json`."""

    def close(self) -> None:
        """Release all resources, whether the run was finished or not."""


def sender() -> type[Sender]:
    """Return the sender over OTLP, loaded by name: it reads runs, so its package depends on that of its callers.

    Raises:
        PluginError: it cannot be imported.
    """
    sender_class: type[Sender] = load("xsp.senders", "otlp")
    return sender_class


def collector(item: str | Collector) -> tuple[Collector, str | None]:
    """Return a collector, and the reason if it cannot work in this process, else None.

    Args:
        item: name of an entry point, or an instance.

    Raises:
        PluginError: it cannot be loaded or made, its methods raise, or it is not a collector; the message says why.
    """
    factory: Any = load("xsp.collectors", item) if isinstance(item, str) else lambda: item
    try:
        instance: Collector = factory()
        missing = [name for name in vars(Collector) if not name.startswith("_") and not hasattr(instance, name)]
        missing += [name for name in ("name", "levels") if not getattr(instance, name, None)]
        if isinstance(instance, DeviceCollector) and not hasattr(instance, "device_work"):
            missing.append("device_work")
        if missing:
            raise TypeError(
                f"has no {', '.join(dict.fromkeys(missing))}; a collector is a subclass of {Collector.__name__}"
            )
        min(instance.levels), str(instance.name)
        reason = instance.available()
    except PLUGIN_ERRORS as error:
        label = item if isinstance(item, str) else getattr(item, "name", type(item).__name__)
        raise PluginError(f"collector {label!r} cannot be used: {type(error).__name__}: {error}") from error
    return instance, None if reason is None else str(reason)


class Command(Protocol):
    """A module that implements a command; its docstring is the help of the command."""

    SUMMARY: str
    """Its line in the list of commands."""

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add its options."""

    def run(self, options: argparse.Namespace) -> int:
        """Run it, and return the exit code."""


def command(name: str) -> Command:
    """Return a command that an entry point names.

    Raises:
        PluginError: it cannot be imported, is not a command, or cannot add its options; the message says which and why.
    """
    from argparse import ArgumentParser  # not loaded in the measured program

    module: Command = load(COMMANDS, name)
    try:
        missing = [member for member in ("SUMMARY", "arguments", "run") if not hasattr(module, member)]
        if missing:
            raise TypeError(f"has no {', '.join(missing)}; docs/extend/plugins.md says what a command has")
        module.arguments(ArgumentParser())
    except PLUGIN_ERRORS as error:
        raise PluginError(f"command {name!r} cannot be used: {type(error).__name__}: {error}") from error
    return module


def remarks(trace: object) -> list[str]:
    """Return the remarks of plugins on the trace of a run that has just ended; a plugin that fails adds none."""
    texts = []
    for name in names(REMARKS):
        try:
            texts.append(load(REMARKS, name)(trace))
        except PLUGIN_ERRORS:
            continue  # `xsp doctor` reports why a plugin cannot be imported
    return [text for text in texts if isinstance(text, str) and text]


def _entry_points(group: str) -> Sequence[EntryPoint]:
    return _cached_entry_points(group, tuple((folder, _change_time_ns(folder)) for folder in sys.path))


@lru_cache(maxsize=16)
def _cached_entry_points(group: str, folders: tuple[tuple[str, int], ...]) -> Sequence[EntryPoint]:
    """Return the entry points of a group.

    They are read again after an installation: when `sys.path` or the change time of a directory in it differs.
    """
    return tuple(_all_entry_points(folders).select(group=group))


@lru_cache(maxsize=1)
def _all_entry_points(_: tuple[tuple[str, int], ...]) -> Any:
    """Return the entry points of all groups, as `entry_points()` does: each package lists its own in one file, which is
    read once for all groups."""
    from importlib.metadata import entry_points  # its import takes as long as a third of xsp

    return entry_points()


def _change_time_ns(folder: str) -> int:
    """Return the time of the last change of a directory, in nanoseconds; 0 if it does not exist."""
    try:
        return os.stat(folder or os.curdir).st_mtime_ns
    except (OSError, ValueError):
        return 0


def _entry_point(group: str, name: str) -> EntryPoint:
    for point in _entry_points(group):
        if point.name == name:
            return point
    listing = ", ".join(names(group)) or "none; is xsp installed? (pip install -e .)"
    raise PluginError(f"no {group} plugin is called {name!r}{nearest(name, names(group))}; there are: {listing}")
