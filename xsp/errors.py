"""The errors of xsp, as one tree.

```
XspError
├── UsageError            a call, an option or a name that does not make sense
│   ├── LevelError        levels unknown, doubled or in the wrong order
│   ├── ModelError        a model that does not exist or cannot be built
│   │   └── PhaseError    a model without steps that read or generate tokens
│   └── LibraryError      a library that is not installed, with how to install it
├── RunError              a run directory that cannot be written or read
│   ├── OutputError       it cannot be written: it exists, or is not a run of xsp
│   │   └── UnwritableError   the disk or another process prevents writing at the moment
│   └── TraceError        it cannot be read: empty, truncated, foreign, of a newer version
├── DeliveryError         spans that a receiver does not accept
├── CounterError          hardware counters that cannot be read, with the reason
├── AnalysisError         an analysis that this trace lacks the data for, with the reason
├── GraphError            a graph that cannot be captured, read or written, with the reason
├── ManifestError         a manifest that cannot be read or executed, with the place and the reason
├── DeviceError           a device that is not here, busy or lost, with the reason
├── BenchError            timings that cannot be taken, read or written, with the reason
├── ShareError            weights that cannot be shared, or a store that does not answer, with the reason
├── ProgramError          a program that xsp started failed
└── PluginError           a plugin that is missing or broken
```

Only the command line turns these into exit codes. A message says what is wrong, where, and what to do
next. After the first step has begun, no `XspError` reaches the measured program: xsp counts what it lost
and reports it at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: a suggestion of similar known names, or an empty text."""
    from difflib import get_close_matches  # not loaded in the measured program, where all names are valid

    by_lowercase = {candidate.lower(): candidate for candidate in names}
    matches = [by_lowercase[match] for match in get_close_matches(name.lower(), by_lowercase, n=3, cutoff=0.5)]
    return f"; did you mean {' or '.join(matches)}?" if matches else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the name of its type if it has no message: `AssertionError`."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of an error's message without its full stop; the name of its type if it is empty."""
    return (str(error).strip().split("\n")[0].split(". ")[0] or type(error).__name__).rstrip(".")


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it was raised from, outermost first, each once: they may form a circle."""
    visited: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in visited:
        visited.add(id(current))
        yield current
        current = current.__cause__


class XspError(Exception):
    """Base of all errors that xsp raises on purpose."""


class UsageError(XspError):
    """A call, an option or a name that does not make sense."""


class LevelError(UsageError):
    """Levels that are unknown, doubled or in the wrong order."""


class ModelError(UsageError):
    """A model that does not exist or cannot be built."""


class PhaseError(ModelError):
    """A model that has no steps that read or generate tokens."""


class LibraryError(UsageError):
    """A library that is not installed; the message says how to install it."""


class RunError(XspError):
    """A run directory that cannot be written or read."""


class OutputError(RunError):
    """A run directory that cannot be written."""


class UnwritableError(OutputError):
    """A write that the disk or another process prevents; a measured program continues without xsp."""


class TraceError(RunError):
    """A run directory or a trace file that cannot be read."""


class DeliveryError(XspError):
    """Spans that a receiver does not accept; they are still in the run directory."""


class CounterError(XspError):
    """Hardware counters that cannot be read; the message is the reason, and contains no path."""


class AnalysisError(XspError):
    """An analysis that this trace lacks the data for; the message is the reason."""


class GraphError(XspError):
    """A graph that cannot be captured, read or written; the message is the reason."""


class ManifestError(XspError):
    """A manifest that cannot be read or executed here; the message has the place and the reason."""


class DeviceError(XspError):
    """A device that is not here, cannot be used now, or was lost; the message is the reason."""


class BenchError(XspError):
    """Timings that cannot be taken, read or written; the message is the reason."""


class ShareError(XspError):
    """Weights that cannot be shared, or a store that cannot be reached; the message is the reason and what to do."""


class ProgramError(XspError):
    """A program that xsp started for a comparison failed; the message has its exit code and the end of its output."""


class PluginError(XspError):
    """A collector, importer, exporter, analysis or command that is missing or broken; the message says why."""
