"""What a source of samples is."""

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
    """Something that can be read again and again."""

    name: ClassVar[str] = ""

    interval_ns: ClassVar[int] = 50_000_000
    """How long there should be between two readings, if nothing faster is read beside it."""

    def open(self) -> str | None:
        """Get ready; return None, or the reason why nothing can be read here and what to install or do."""
        return None

    def read(self, seldom: bool) -> Iterator[Reading]:
        """Yield what is there now. What cannot be read is left out, never made up.

        Args:
            seldom: True about once a second: read also what is dear to read or hardly changes.
        """
        yield from ()

    def notes(self) -> Iterator[str]:
        """Yield sentences on what could not be read."""
        yield from ()

    def close(self) -> None:
        """Let go of what `open` took."""
