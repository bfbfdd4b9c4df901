"""Analyses: pure functions from a trace to a small table. Analyses of XSP's Table I have its numbers, A1 … A15.

>>> import xsp                                                   # doctest: +SKIP
>>> trace = xsp.load("runs/demo")                                # doctest: +SKIP
>>> xsp.analyses.layer_information(trace).show()                 # doctest: +SKIP
>>> xsp.analyses.layer_information is xsp.analyses.A2            # doctest: +SKIP

Each analysis declares the levels that it needs, and raises an error with the reason if the trace lacks them. Tables are
DuckDB relations: `.df()` for pandas, `.pl()` for Polars, `.fetchall()` for tuples. Column names contain the units;
values that were not measured are null.

The decorator `analysis` registers an analysis. Plugins provide theirs through entry points `xsp.analyses`, which name
the function, or a module with several. Every analysis is an attribute of this package, under the name of its
function and under its name in `xsp analyze`: `xsp.analyses.kernel_classes` is `kernel-classes`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from xsp import plugins
from xsp.analyses.contract import ANALYSES, Analysis, Table, analysis, values
from xsp.analyses.model import Optimum, model_roofline, model_sweep, optimal_batch
from xsp.errors import PluginError

_SUBJECTS = (
    "account", "phases", "loop", "requests", "layer", "ops", "modules", "model", "kernel", "roofline",
    "utilisation", "ledger", "activity", "idle", "launches", "streams", "fusing", "counted", "communication",
    "critical", "memory", "samples", "energy",
)  # fmt: skip
"""The built-in modules, in the order in which their tables are shown."""


def _as_name(identity: str) -> str:
    """Return the Python identifier for a name of `xsp analyze` such as `kernel-classes`."""
    return identity.replace("-", "_")


def _sort_key(entry: Analysis) -> tuple[int, int]:
    """Return the sort key of an analysis: the place of its subject; numbered analyses together, plugins' last."""
    if entry.id[0] == "A" and entry.id[1:].isdigit():
        return _SUBJECTS.index("model"), int(entry.id[1:])
    package, _, subject = entry.function.__module__.rpartition(".")
    is_builtin = package == __name__ and subject in _SUBJECTS
    return _SUBJECTS.index(subject) if is_builtin else len(_SUBJECTS), 0


for _subject in _SUBJECTS:
    import_module(f"{__name__}.{_subject}")
for _plugin in plugins.names("xsp.analyses"):
    try:
        plugins.load("xsp.analyses", _plugin)
    except PluginError:
        pass  # `xsp doctor` reports why

_ordered = {entry.id: entry for entry in sorted(ANALYSES.values(), key=_sort_key)}
ANALYSES.clear()
ANALYSES.update(_ordered)

# Analyses under their names in `xsp analyze` and under their function names; they replace modules of the same name.
globals().update({_as_name(entry.id): entry for entry in ANALYSES.values()})
globals().update({entry.name: entry for entry in ANALYSES.values()})

if TYPE_CHECKING:
    from xsp.analyses.ledger import ledger as ledger
    from xsp.analyses.phases import phases as phases


def __getattr__(name: str) -> Analysis:
    for entry in ANALYSES.values():  # an analysis that was registered after this module was imported
        if name in (entry.name, _as_name(entry.id)):
            return entry
    raise AttributeError(f"there is no analysis {name!r}")


__all__ = [
    "ANALYSES", "Analysis", "Optimum", "Table", "analysis", "model_roofline", "model_sweep", "optimal_batch", "values",
    *sorted(entry.name for entry in ANALYSES.values()),
]  # fmt: skip
