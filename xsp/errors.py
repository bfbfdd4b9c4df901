"""What can go wrong, as one tree.

```
XspError
├── UsageError            a call, an option or a name that does not make sense
│   ├── LevelError        levels unknown, doubled or in the wrong order
│   └── ModelError        a model that does not exist or cannot be built
├── RunError              a run directory that cannot be written or read
│   ├── OutputError       it cannot be written: it exists, or is none of xsp's
│   │   └── UnwritableError   it could be, but the disk or another process does not let xsp now
│   └── TraceError        it cannot be read: empty, truncated, foreign, of a newer version
├── DeliveryError         spans that a receiver does not take
├── CounterError          hardware counters that cannot be had, with the reason
├── AnalysisError         an analysis that this trace cannot carry, with the reason
├── GraphError            a graph that cannot be captured, read or written, with the reason
├── ManifestError         a manifest that cannot be read or carried out, with the place and the reason
├── BenchError            timings that cannot be taken, read or written, with the reason
├── ShareError            weights that cannot be shared, or a store that does not answer, with the reason
├── ProgramError          a program that xsp started failed
└── PluginError           a plugin that is missing or broken
```

Only the command line turns these into exit codes. A message names what is wrong, where, and what to do
next. Nothing below `XspError` ever reaches the program that is being measured once its first step began:
from there on xsp counts what it lost and says so at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """Return how a message about an unknown name goes on: with the known ones that are like it, or with nothing."""
    from difflib import get_close_matches  # not in the measured program, where all names are right

    small = {each.lower(): each for each in known}
    close = [small[each] for each in get_close_matches(name.lower(), small, n=3, cutoff=0.5)]
    return f"; did you mean {' or '.join(close)}?" if close else ""


class XspError(Exception):
    """Root of everything that xsp raises on purpose."""


class UsageError(XspError):
    """A call, an option or a name that does not make sense."""


class LevelError(UsageError):
    """Levels that are unknown, doubled or in the wrong order."""


class ModelError(UsageError):
    """A model that does not exist or cannot be built."""


class RunError(XspError):
    """A run directory that cannot be written or read."""


class OutputError(RunError):
    """A run directory that cannot be written."""


class UnwritableError(OutputError):
    """The disk refuses, or another process is writing there: a program that is being measured goes on without xsp."""


class TraceError(RunError):
    """A run directory or a trace file that cannot be read."""


class DeliveryError(XspError):
    """Spans that a receiver does not take; they are still in the run directory."""


class CounterError(XspError):
    """Hardware counters that cannot be had; the message is the reason, and names no path."""


class AnalysisError(XspError):
    """An analysis that this trace cannot carry; the message is the reason."""


class GraphError(XspError):
    """A graph that cannot be captured, read or written; the message is the reason."""


class ManifestError(XspError):
    """A manifest that cannot be read, or not be carried out here; the message has its place and the reason."""


class BenchError(XspError):
    """Timings that cannot be taken, read or written; the message is the reason."""


class ShareError(XspError):
    """Weights that cannot be shared, or a store that cannot be reached; the message is the reason and what to do."""


class ProgramError(XspError):
    """A program that xsp started for a comparison failed; the message has its exit code and the end of its output."""


class PluginError(XspError):
    """A collector, importer, exporter, analysis or command that is missing or broken; the message says why."""
