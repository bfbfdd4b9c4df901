"""Findings that a reader of a trace's figures should know, and how far they limit trust in the figures."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Severity(str, enum.Enum):
    """How much a finding matters."""

    GOOD = "good"
    NOTE = "note"
    WARNING = "warning"

    def __str__(self) -> str:
        return self.value


class Finding(NamedTuple):
    """One thing that a reader of the figures should know."""

    severity: Severity
    subject: str
    text: str
    best_grade: str = "A"
    """The best grade that a trace with this finding can have."""
