"""The interface of sources of samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, NamedTuple


class Reading(NamedTuple):
    """One figure at one moment; the sampler adds the time and the rank."""

    name: str
    unit: str
    value: float
    device: int | None = None
    """CUDA's number of the device in the measured process; None for the host."""


class Source:
    """A source of readings that is read repeatedly."""

    name: ClassVar[str] = ""

    interval_ns: ClassVar[int] = 50_000_000
    """Nanoseconds between two readings, unless another source is read more often."""

    def open(self) -> str | None:
        """Prepare for reading; return None, or why nothing can be read here and what to install or do."""
        return None

    def read(self, include_slow: bool) -> Iterator[Reading]:
        """Yield the current readings. Values that cannot be read are left out, never made up.

        Args:
            include_slow: True about once a second: also read values that are expensive to read or hardly change.
        """
        yield from ()

    def notes(self) -> Iterator[str]:
        """Yield sentences on values that could not be read."""
        yield from ()

    def close(self) -> None:
        """Release the resources of `open`."""
