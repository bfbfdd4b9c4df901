"""Collectors, importers and exporters by name, through entry points.

Our own plugins go through the same door as everybody else's. A plugin that cannot be imported is listed with
the reason and stops nobody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from xsp.errors import PluginError, nearest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def names(group: str) -> list[str]:
    """Return the names of a group's plugins, sorted, importing none of them."""
    return sorted({point.name for point in _entry_points(group)})


def load(group: str, name: str) -> Any:
    """Import one plugin.

    Args:
        group: `xsp.collectors`, `xsp.importers` or `xsp.exporters`.
        name: its name in that group.

    Returns:
        The object that the entry point names.

    Raises:
        PluginError: no plugin has that name, or it cannot be imported; the message says why.
    """
    point = _find(group, name)
    try:
        return point.load()
    except Exception as error:  # a third party's module may raise anything when it is imported
        reason = f"{type(error).__name__}: {error}"
        raise PluginError(f"{group} plugin {name!r} ({point.value}) cannot be imported: {reason}") from error


def _entry_points(group: str) -> Sequence[EntryPoint]:
    from importlib.metadata import entry_points  # as long to import as a third of xsp

    return tuple(entry_points(group=group))


def _find(group: str, name: str) -> EntryPoint:
    for point in _entry_points(group):
        if point.name == name:
            return point
    known = ", ".join(names(group)) or "none; is xsp installed? (pip install -e .)"
    raise PluginError(f"no {group} plugin is called {name!r}{nearest(name, names(group))}; there are: {known}")
