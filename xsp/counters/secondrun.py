"""The rung of counters: a program runs again under Nsight Compute, and its counters are joined to the timed run.

Both runs use the same command. With `--counting` it opens its profile as usual, but with other collectors: those that
find the program's steps, and one that marks a step and its layers for ncu. Only the describing step matters, the
others run bare.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from xsp import atomic, plugins, rundir
from xsp.collector import Collector
from xsp.errors import CounterError, RunError

MARKER = "profilerrange"


def collectors() -> list[str | Collector]:
    """Return the collectors of the run under ncu."""
    return ["modules", "training", "dataloading", plugins.load("xsp.counting", MARKER)()]


def count(run: Path, command: Callable[[Path], list[str]]) -> dict[str, Any]:
    """Run a command under ncu, and join the counters of one step to a run.

    Args:
        run: the timed run's directory.
        command: the command that runs the program again with `--counting`, into the directory that it is called with.

    Returns:
        A summary of the join, see `xsp.counters.storing.attach`.

    Raises:
        CounterError: there are no counters; the run is unchanged except for the reason in `run.json`.
    """
    from xsp.counters import ncu, storing  # these import the table engine, which the run under ncu does not need

    with atomic.temporary_folder() as folder:
        second_run = Path(folder) / "run"
        try:
            return storing.attach(run, [ncu.collect(command(second_run), Path(folder))])
        except (CounterError, RunError) as error:
            reason = _reason_without_mark(second_run) or str(error).replace(f"{folder}/", "").replace(
                str(run), run.name
            )
    storing.note_absence(run, reason)
    raise CounterError(reason)


def _reason_without_mark(run: Path) -> str | None:
    """Return why the run under ncu marked no step, or None if the reason is elsewhere."""
    if not (run / rundir.RUN_FILE).is_file():
        return None
    content = rundir.read_run(run)
    if MARKER in content.absent:
        return content.absent[MARKER]
    if not rundir.segments(run):
        return f"the program ran no step after its warm-up of {content.warmup} steps: lower --warmup"
    return None
