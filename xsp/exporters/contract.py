"""The interface of exporters: an exporter is a function of a trace, a path and a choice that writes a file.

An entry point in `xsp.exporters` names it, and `xsp export --format NAME` calls it. The file appears atomically
(`atomic_file`), memory does not grow with the trace, and differences between the file and the recording are counted.
"""

from __future__ import annotations

import contextlib
import enum
import gzip
import io
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol, cast

from xsp import atomic
from xsp.errors import OutputError, UsageError
from xsp.store.trace import Trace

GROUP = "xsp.exporters"

_FAST = 3


class Weight(str, enum.Enum):
    """The time that determines the width of a frame in a flame graph."""

    HOST = "host"  # time of the host's threads
    DEVICE = "device"  # time of the devices' kernels and copies

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Choice:
    """The part of a trace to write."""

    steps: tuple[int, ...] | None = None
    """Numbers of the steps; None for the default of the format."""

    weight: Weight = Weight.HOST
    rows: str = "spans"
    """The table to write, for formats that write one: `spans`, `merged`, or another table of the trace's engine."""


@dataclass
class Written:
    """The content of a written file."""

    spans: int = 0
    changed: Counter[str] = field(default_factory=Counter)
    """Number of spans that differ from the recording, by difference."""

    def sentences(self) -> list[str]:
        """Return the changes as sentences, the most frequent first."""
        return [f"{count:,} spans {difference}" for difference, count in self.changed.most_common() if count]


class Exporter(Protocol):
    """A function that writes a file."""

    def __call__(self, trace: Trace, path: Path, choice: Choice) -> Written:
        """Write the chosen part of a trace to a file.

        Raises:
            OutputError: the file cannot be written.
            UsageError: the choice is invalid for this trace.
        """
        ...


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[IO[str]]:
    """Open a temporary file that is renamed to `path` when it is complete; `.gz` is compressed.

    Raises:
        OutputError: the file cannot be written; an existing file is unchanged.
    """
    try:
        with atomic.replacing(path) as temporary, open(temporary, "wb") as file, _text(file, path) as text:
            yield text
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror or error}); choose another file") from error


@contextlib.contextmanager
def _text(file: IO[bytes], path: Path) -> Iterator[IO[str]]:
    if path.suffix == ".gz":
        compressed = gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=_FAST, mtime=0)
        stream = io.TextIOWrapper(cast("IO[bytes]", compressed), encoding="utf-8", errors="replace", newline="\n")
        with compressed, stream as text:
            yield text
    else:
        text = io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline="\n")
        yield text
        text.flush()
        text.detach()


def check_steps(trace: Trace, steps: tuple[int, ...] | None) -> None:
    """Check that the trace contains all chosen steps.

    Raises:
        UsageError: a step is missing.
    """
    if steps is None:
        return
    available = {step for (step,) in trace.sql("SELECT DISTINCT step FROM spans WHERE step IS NOT NULL").fetchall()}
    missing = [step for step in steps if step not in available]
    if missing:
        raise UsageError(f"{trace.name}: there is no step {missing[0]}; there are {step_list(available)}")


def step_list(steps: Collection[int]) -> str:
    """Return the numbers of steps as text for a message, at most the first 20."""
    return ", ".join(map(str, sorted(steps)[:20])) + (", …" if len(steps) > 20 else "") or "none"
