"""Analyses: pure functions from a trace to a small table. Those of XSP's Table I have its numbers, A1 … A15.

>>> import xsp                                                   # doctest: +SKIP
>>> trace = xsp.load("runs/demo")                                # doctest: +SKIP
>>> xsp.analyses.layer_information(trace).show()                 # doctest: +SKIP
>>> xsp.analyses.layer_information is xsp.analyses.A2            # doctest: +SKIP

Each states which levels it needs and refuses, with the reason, where the trace does not hold them. Tables
are DuckDB relations: `.df()` for pandas, `.pl()` for Polars, `.fetchall()` for tuples. Units stand in the
names of the columns; what was not measured is null.

An analysis registers itself with the decorator `analysis`; those of others are found by entry points `xsp.analyses`,
which name the function, or a module with several. They stand here by the names of their functions, and by what
`xsp analyze` calls them: `xsp.analyses.kernel_classes` is `kernel-classes`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from xsp import plugins
from xsp.analyses.contract import ANALYSES, Analysis, Table, analysis, values
from xsp.analyses.model import Optimum, model_roofline, model_sweep, optimal_batch
from xsp.errors import PluginError

_SUBJECTS = (
    "phases", "loop", "layer", "ops", "modules", "model", "kernel", "roofline", "utilisation", "ledger",
    "activity", "idle", "launches", "streams", "fusing", "counted", "communication", "ranks", "critical", "memory",
    "samples",
)  # fmt: skip
"""The modules of ours, in the order in which their tables are shown."""


def _is_number(identity: str) -> bool:
    return identity[0] == "A" and identity[1:].isdigit()


def _as_name(identity: str) -> str:
    """Return how Python has what `xsp analyze` calls `kernel-classes`."""
    return identity.replace("-", "_")


def _place(each: Analysis) -> tuple[int, int]:
    """Return where an analysis is shown: by its subject, the numbered ones together, those of others last."""
    if _is_number(each.id):
        return _SUBJECTS.index("model"), int(each.id[1:])
    package, _, subject = each.function.__module__.rpartition(".")
    ours = package == __name__ and subject in _SUBJECTS
    return _SUBJECTS.index(subject) if ours else len(_SUBJECTS), 0


for _subject in _SUBJECTS:
    import_module(f"{__name__}.{_subject}")
for _plugin in plugins.names("xsp.analyses"):
    try:
        plugins.load("xsp.analyses", _plugin)
    except PluginError:
        pass  # `xsp doctor` says why

_ordered = {each.id: each for each in sorted(ANALYSES.values(), key=_place)}
ANALYSES.clear()
ANALYSES.update(_ordered)

# By what `xsp analyze` calls them and by the names of their functions, in the place of modules of the same name.
globals().update({_as_name(each.id): each for each in ANALYSES.values()})
globals().update({each.name: each for each in ANALYSES.values()})

if TYPE_CHECKING:
    from xsp.analyses.ledger import ledger as ledger
    from xsp.analyses.phases import phases as phases


def __getattr__(name: str) -> Analysis:
    for each in ANALYSES.values():  # one that was made since
        if name in (each.name, _as_name(each.id)):
            return each
    raise AttributeError(f"there is no analysis {name!r}")


__all__ = [
    "ANALYSES", "Analysis", "Optimum", "Table", "analysis", "model_roofline", "model_sweep", "optimal_batch", "values",
    *sorted(each.name for each in ANALYSES.values()),
]  # fmt: skip
