"""What can be collected on this machine, what not, and why."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import NamedTuple

from xsp import device, plugins
from xsp.errors import PluginError

_HINTS = {"torch": "pip install 'xsp[torch]'"}


class Finding(NamedTuple):
    """One collector."""

    name: str
    levels: str
    reason: str | None
    """Why it cannot work here, and what to do; None if it can."""


def machine() -> Iterator[tuple[str, str]]:
    """Yield what kind of machine this is, as pairs of a word and a value."""
    try:
        importlib.import_module("torch")  # to ask it for its devices
    except ImportError:
        pass
    found = device.describe()
    yield "cpu", f"{found['cpu']}, {found['cores']} cores"
    yield "devices", ", ".join(found.get("devices") or []) or "no GPU that torch can use"
    yield "python", str(found["python"])
    yield from found["packages"].items()


def collectors() -> Iterator[Finding]:
    """Yield every collector that is installed, with the reason why it cannot work here, if so."""
    for name in plugins.names("xsp.collectors"):
        try:
            collector = plugins.load("xsp.collectors", name)()
            levels = ", ".join(level.name.lower() for level in collector.levels)
            yield Finding(name, levels, collector.available())
        except PluginError as error:
            missing = error.__cause__.name if isinstance(error.__cause__, ImportError) else None
            hint = _HINTS.get((missing or "").partition(".")[0])
            yield Finding(name, "", f"{error.__cause__}; {hint}" if hint else str(error))


def other_plugins() -> Iterator[str]:
    """Yield a sentence for each importer or exporter that cannot be loaded."""
    for group in ("xsp.importers", "xsp.exporters"):
        for name in plugins.names(group):
            try:
                plugins.load(group, name)
            except PluginError as error:
                yield str(error)
