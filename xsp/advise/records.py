"""Saved trials, which show how good advice has been on this machine: a folder with one small file per trial.

`XSP_TRIALS` names the folder; by default it is in the user's cache beside the timings. A file contains figures, names
of trials and questions, the machine and versions, but nothing of the program.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xsp import atomic, cached
from xsp.advise.experiment import TRIED, TrialResult
from xsp.errors import OutputError
from xsp.run import Machine
from xsp.version import __version__

VARIABLE = "XSP_TRIALS"
FORMAT = 1
MACHINE_KEYS = ("cpu", "cores")
"""Properties of a machine that have to be equal for a trial to count as one of this machine."""


def default_folder() -> Path:
    """Return the default folder for trials."""
    variable = os.environ.get(VARIABLE)
    return Path(variable).expanduser() if variable else cached.user_folder() / "trials"


@dataclass(frozen=True)
class History:
    """How good advice has been on a machine."""

    tried: int
    """Number of measured trials."""

    came_true: int
    """Number of measured trials after which the step was faster, as promised."""

    expected: int
    """Number of measured trials whose promise was an expectation and not an upper bound."""

    median_off_percent: float | None
    """Median error of these promises, in percent of the promise."""

    not_applicable: int
    failed: int
    rows: tuple[dict[str, Any], ...]
    """All trials of this machine as saved, the latest first."""

    damaged: int = 0
    elsewhere: int = 0
    """Number of trials of other machines, which do not count."""

    @property
    def line(self) -> str | None:
        """The history in one line; None where nothing was tried."""
        if not self.tried:
            return None
        text = f"{self.tried} pieces of advice were tried on this machine, {self.came_true} made the step faster"
        if self.median_off_percent is None:
            return text
        return f"{text}; median error {self.median_off_percent:.0f} % of the prediction over {self.expected}"


def save(result: TrialResult, machine: Machine, folder: Path | None = None) -> Path:
    """Save a trial, and return the path of its file.

    Raises:
        OutputError: the folder cannot be written.
    """
    directory = folder or default_folder()
    content = {
        "format": FORMAT,
        "xsp": __version__,
        "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {name: machine.get(name) for name in (*MACHINE_KEYS, "devices")},
        "versions": {name: version for name, version in machine.packages.items() if name in ("torch", "numpy")},
        "python": machine.python,
        **plain(result),
    }
    path = directory / f"{time.time_ns()}-{secrets.token_hex(4)}.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with atomic.replacing(path) as temporary:
            temporary.write_text(json.dumps(content), encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"{directory}: trials cannot be kept there ({error.strerror}); {VARIABLE} names another folder"
        ) from error
    return path


def plain(result: TrialResult) -> dict[str, Any]:
    """Return a trial as plain data, without its program."""
    return {
        "trial": result.trial,
        "question": result.advice.question,
        "outcome": result.outcome,
        "reason": result.reason,
        "promised_ms": asdict(result.advice.gain),
        "promised_percent": result.advice.of_step_percent,
        "at_most": result.advice.at_most,
        "before_ms": result.before_ms,
        "after_ms": result.after_ms,
        "real_ms": None if result.real_gain is None else asdict(result.real_gain),
        "real_percent": result.real_percent,
        "off_percent": result.off_percent,
        "came_true": result.came_true,
        "turns": result.turns,
        "applied": list(result.applied),
        "results": result.results,
        "results_error": result.error,
    }


def history(machine: Machine, folder: Path | None = None) -> History:
    """Return how good advice has been on a machine."""
    directory = folder or default_folder()
    rows, damaged, elsewhere = [], 0, 0
    key = _machine_key(machine.content)
    for path in sorted(directory.glob("[0-9]*.json"), reverse=True):
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
            is_same = _machine_key(row["machine"]) == key
            rows += [row] if is_same and row["outcome"] and row["trial"] else []
            elsewhere += not is_same
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            damaged += 1
    return _summarise(rows, damaged, elsewhere)


def _machine_key(content: Any) -> list[Any]:
    """Return the properties that distinguish one machine from another."""
    return [content.get(name) for name in MACHINE_KEYS]


def _summarise(rows: Sequence[dict[str, Any]], damaged: int, elsewhere: int) -> History:
    measured = [row for row in rows if row.get("outcome") == TRIED]
    errors = [float(row["off_percent"]) for row in measured if isinstance(row.get("off_percent"), (int, float))]
    outcomes = Counter(row.get("outcome") for row in rows)
    return History(
        tried=len(measured),
        came_true=sum(row.get("came_true") is True for row in measured),
        expected=len(errors),
        median_off_percent=statistics.median(errors) if errors else None,
        not_applicable=outcomes["not applicable"],
        failed=outcomes["failed"],
        rows=tuple(rows),
        damaged=damaged,
        elsewhere=elsewhere,
    )
