"""Send recorded runs: a single run, or all runs in a directory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from xsp import rundir
from xsp.errors import DeliveryError, TraceError, UsageError
from xsp.exporters.contract import step_list
from xsp.otlp.delivery import TRACE_SPANS, Delivery, read_entries, steps_in
from xsp.otlp.endpoint import FROM_ENVIRONMENT, TRACES_PATH, OtlpEndpoint
from xsp.otlp.send import PATIENCE_S, STARTING_S, Counts, Exporter
from xsp.run import Run


@dataclass(frozen=True)
class Export:
    """The selection to send from a run, or from a directory of runs."""

    run: Path
    steps: tuple[int, ...] | None = None
    """Numbers of the steps; None for all."""

    timed: bool = False
    """Whether to send only timed steps."""

    resume: bool = False
    """Whether to send only steps that were not delivered before."""

    trace_spans: int = TRACE_SPANS
    patience_s: float | None = None
    """Seconds to retry a request; None for `PATIENCE_S`, or `STARTING_S` if nothing listens at the address."""


def export(selection: Export, endpoint: OtlpEndpoint, progress: Callable[[str, int, int], None]) -> Counts:
    """Send runs, and return the counts of the delivery.

    Args:
        selection: the selection to send.
        endpoint: the receiver or file.
        progress: is called with a description, the number of finished steps, and the number of all steps.

    Raises:
        TraceError: there is no run.
        UsageError: a requested step does not exist; `resume` with a file.
        DeliveryError: nothing could be delivered.
        OutputError: the file, or `delivery.json`, cannot be written.
    """
    if endpoint.is_file and selection.resume:
        raise UsageError(f"--resume: {endpoint.name} is written as a whole; omit it")
    patience_s, starting_s = (PATIENCE_S, STARTING_S) if selection.patience_s is None else (selection.patience_s, None)
    start_s, exporter = time.monotonic(), Exporter(endpoint, patience_s, starting_s=starting_s)
    complete = False
    try:
        with contextlib.ExitStack() as stack:
            runs = runs_in(selection.run)
            # raise UsageError if a requested step is in no run
            stored = {step for run in runs for step in steps_in(run)} if selection.steps is not None else set()
            missing = [step for step in selection.steps or () if step not in stored]
            if missing:
                raise UsageError(f"{selection.run}: step {missing[0]} was not stored; there are {step_list(stored)}")
            deliveries = [_open(stack, run, exporter, selection) for run in runs]
            work = [(delivery, delivery.select_segments(selection.steps, selection.timed)) for delivery in deliveries]
            _send_all(work, exporter, progress)
            _sum_up(work, exporter.counts)
        complete = True
    finally:
        exporter.close(complete)
    exporter.counts.seconds = time.monotonic() - start_s
    if not exporter.counts.spans and exporter.counts.left:
        raise DeliveryError("; ".join(exporter.counts.messages))
    return exporter.counts


def runs_in(path: Path) -> list[Path]:
    """Return the directories that contain a single run, in a run, a sweep, a run in parts, or a job of several ranks.

    Raises:
        TraceError: there is none.
    """
    ranks = rundir.rank_parts(path)
    content = rundir.read_run(path) if (path / rundir.RUN_FILE).is_file() or not ranks else Run.of({})
    parts = [path / part for part in content.parts]
    part_runs = [run for part in dict.fromkeys([*parts, *ranks]) for run in _runs_in_part(path, part)]
    own_runs = [path] if content.otel is not None or rundir.segments(path) else []
    if not own_runs and not part_runs:
        raise TraceError(f"{path}: holds no step that can be sent")
    return own_runs + part_runs


def _runs_in_part(path: Path, part: Path) -> list[Path]:
    if path.resolve() not in part.resolve().parents:
        raise TraceError(f"{path / rundir.RUN_FILE}: the part {part.name!r} lies outside the run directory")
    return runs_in(part) if (part / rundir.RUN_FILE).is_file() else []  # else the part could not be started


def _open(stack: contextlib.ExitStack, run: Path, exporter: Exporter, selection: Export) -> Delivery:
    delivery = Delivery(run, exporter, fresh=not selection.resume, trace_spans=selection.trace_spans)
    delivery.sends_requests = selection.steps is None and not selection.timed
    stack.callback(delivery.close)
    stack.callback(delivery.delivered.save)
    return delivery


def _send_all(
    work: list[tuple[Delivery, list[int]]], exporter: Exporter, progress: Callable[[str, int, int], None]
) -> None:
    """Send everything, or stop when the endpoint accepts nothing any more."""
    total, done = sum(len(steps) for _, steps in work), 0
    try:
        for delivery, steps in work:
            for step in steps:
                progress(f"to {exporter.endpoint.name}", done, total)
                try:
                    delivery.deliver_step(step)
                except TraceError as error:
                    exporter.counts.add_message(str(error))
                done += 1
            if delivery.is_run_pending():
                delivery.finish()
        progress(f"to {exporter.endpoint.name}", done, total)
    except DeliveryError as error:
        exporter.counts.add_message(str(error))


def _sum_up(work: list[tuple[Delivery, list[int]]], counts: Counts) -> None:
    """Count the undelivered steps, and write the state of the delivery into the run directories."""
    for delivery, steps in work:
        counts.left += sum(not delivery.is_delivered(step) for step in steps) + delivery.is_run_pending()
    for delivery, _ in work:
        delivery.record_result(list(counts.messages))


def endpoint_to_resume(path: Path) -> str:
    """Return the target of the only endpoint that a run was being sent to.

    Raises:
        UsageError: there is no such endpoint, or several.
        TraceError: there is no run.
    """
    names = sorted({name for run in runs_in(path) for name in read_entries(run)})
    if len(names) != 1:
        listing = ", ".join(names) or "none"
        raise UsageError(f"{path}: name the target with --to; deliveries were begun to: {listing}")
    is_reusable = names[0].startswith("grpc") or names[0].endswith(f"/{TRACES_PATH}")
    return names[0] if is_reusable else FROM_ENVIRONMENT
