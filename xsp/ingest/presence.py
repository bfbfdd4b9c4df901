"""What `run.json` says, held against what is in the directory: files that were deleted or not copied are missing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from xsp import rundir
from xsp.run import MISSING, Run
from xsp.store import loop

MAX_NAMED = 5
"""Maximum number of missing files that are named."""


def with_presence_notes(run: Run, run_dir: Path, segments: Sequence[Path]) -> Run:
    """Return a run with a note of source `MISSING` on everything that it states and that is not there.

    Args:
        run: a run, or a program of several runs, such as a job of ranks.
        run_dir: its directory.
        segments: the segments that are there.
    """
    if run.is_job:
        texts = [
            f"{part}: {text}"
            for part, rank in zip(run.parts, run.ranks, strict=False)
            for text in _differences(rank, run_dir / part, rundir.segments(run_dir / part))
        ]
        texts += [
            f"{part}: the run of this part is missing"
            for part in run.parts
            if not os.path.lexists(run_dir / part / rundir.RUN_FILE)
        ]
    else:
        texts = [*_differences(run, run_dir, segments)]
    return run.with_notes(MISSING, texts)


def has_all_segments(run: Run) -> bool:
    """Return whether no note says that steps are missing, so that figures stored with the run describe its steps."""
    return not any(note.source == MISSING for note in run.notes)


def _differences(run: Run, run_dir: Path, segments: Sequence[Path]) -> Iterator[str]:
    """Yield a sentence for each difference; text that a run of a later version would not understand is no reason."""
    present = {f"{file.parent.name}/{file.name}" for file in segments}
    if run.received is None and run.imported is None and run.steps is not None and run.steps.stored is not None:
        # each step of a recorded run has a segment; the count grows while the run goes on, and is written at its end
        count, stored = len(segments), run.steps.stored
        if count < stored:
            yield (
                f"{stored - count} of {stored} stored steps are missing: their files are not in {rundir.STEPS}/; "
                f"all figures are those of the other {count}"
            )
        elif count > stored and run.finished:
            yield f"{rundir.STEPS}/ has {count} steps, {count - stored} more than the run stored: of another run?"
    listed = [
        name for name in run.checksums if name not in present and ("\0" in name or not os.path.lexists(run_dir / name))
    ]
    if listed:
        more = f" and {len(listed) - MAX_NAMED} more" if len(listed) > MAX_NAMED else ""
        yield (
            f"{len(listed)} of {len(run.checksums)} listed tables are missing: {', '.join(listed[:MAX_NAMED])}{more}; "
            "their spans are in no figure"
        )
    if run.parts or run.received is not None or run.imported is not None:
        return
    has_loop = any(os.path.lexists(run_dir / name) for name in (rundir.LOOP_FILE, *loop.ROW_FILES))
    if run.finished and run.steps is not None and run.steps.seen and not has_loop:
        yield f"{rundir.LOOP_FILE} is missing: the times of the {run.steps.seen} steps that ran, recorded or not"
    if run.finished and run.samples is not None and run.samples.readings and not rundir.portions(run_dir):
        yield f"{rundir.SAMPLES}/ is missing or empty: {run.samples.readings} readings of devices and machine"
