"""How close are xsp's reconstructed step and layer times on a GPU to bare times by CUDA events?

Steps: bare steps, timed by the host's clock and by two CUDA events, take turns with the steps of a profile; xsp's
true time is compared with the host's bare median, and the events are shown beside it. Layers: in further bare steps,
events are recorded around each call of a module directly inside the model, and compared with the time of xsp's kernels
of that call. Before these steps the device is kept busy, so that the host runs ahead: without it, events of a model
whose host is slower than the device would measure the launches. What is left between kernels (1 µs each) is in the
time of the events.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

from parts import gpu_workloads, turns

import xsp
from xsp.models import Workload
from xsp.schema import Level

GOAL = 0.02
LEAST_NS = 100_000
"""Minimum time on the device for a layer to be compared: events and the gaps between kernels are microseconds."""

AHEAD_CYCLES = 100_000_000
"""Cycles of the device, about 50 ms, by which the host runs ahead."""

BARE = 2
COLUMNS = (
    "model", "rounds", "bare ms", "events ms", "xsp's true ms", "true / bare", "≤ 2 %", "layers", "median error %",
    "largest error %", "layers within 2 %",
)  # fmt: skip


class ModelTimes(NamedTuple):
    """Times of one model, in nanoseconds."""

    bare: list[int]
    events: list[float]
    true: turns.Figure
    layers: list[tuple[str, float, float]]
    """Name of a layer, time of its kernels in xsp's trace, time between its events."""


def by_events(step: Any) -> tuple[int, float]:
    """Run a step; return the host's nanoseconds, and the nanoseconds between the events before and after it."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_ns = perf_counter_ns()
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return perf_counter_ns() - start_ns, begin.elapsed_time(end) * 1e6


@contextlib.contextmanager
def events_around_children(pairs: list[Any]) -> Iterator[None]:
    """Record an event before and after each call of a module directly inside the outermost called module."""
    import torch
    from torch.nn.modules import module as torch_module

    depth = 0

    def before(module: Any, inputs: Any) -> None:
        nonlocal depth
        depth += 1
        if depth == 2:
            pairs.append([torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)])
            pairs[-1][0].record()

    def after(module: Any, inputs: Any, output: Any) -> None:
        nonlocal depth
        if depth == 2:
            pairs[-1][1].record()
        depth -= 1

    hooks = [
        torch_module.register_module_forward_pre_hook(before),
        torch_module.register_module_forward_hook(after),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def layer_events(workload: Workload, times: int) -> list[float]:
    """Return the median nanoseconds of each call directly inside the model, in call order."""
    import torch

    steps = []
    for _ in range(times):
        pairs: list[Any] = []
        with events_around_children(pairs):
            torch.cuda._sleep(AHEAD_CYCLES)
            workload.step()
        torch.cuda.synchronize()
        steps.append([begin.elapsed_time(end) * 1e6 for begin, end in pairs])
    return [turns.median(values) for values in zip(*steps, strict=True)]


def measure(workload: Workload, rounds: int, options: argparse.Namespace) -> ModelTimes:
    """Measure bare and profiled steps in turns, then time layers by events."""
    bare: list[tuple[int, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        with xsp.profile("true_time", levels="M/L/G", out=out, seed=options.seed) as prof:
            for number in range(rounds + 1):
                if number:
                    workload.step()
                    bare += [by_events(workload.step) for _ in range(BARE)]
                for _ in range(
                    prof.schedule.steps_for(number) - (prof.schedule.steps_for(number - 1) if number else 0)
                ):
                    with prof.step():
                        workload.step()
        trace = xsp.load(out)
        true = trace.sql("SELECT true_ns, true_lo_ns, true_hi_ns FROM merged WHERE kind = 'step'").fetchall()[0]
        host, events = zip(*bare, strict=True)
        layers = _layers(trace, layer_events(workload, max(3, rounds)))
        unknown = float("nan")  # of few steps there is no interval
        figure = turns.Figure(*(value if value is not None else unknown for value in true))
        return ModelTimes(list(host), list(events), figure, layers)


def _layers(trace: xsp.Trace, events: Sequence[float]) -> list[tuple[str, float, float]]:
    """Match xsp's calls directly inside the model with the calls that events were recorded around, by their order."""
    rows = trace.sql(
        f"""
        WITH RECURSIVE inside AS (
            SELECT trace_id, span_id AS call, span_id, name, start_ns AS begins FROM spans
            WHERE timed AND level = {int(Level.LAYER)} AND depth = 1 AND rung = {int(Level.KERNEL)}
            UNION ALL
            SELECT child.trace_id, call, child.span_id, inside.name, begins
            FROM spans child JOIN inside ON child.parent_id = inside.span_id AND child.trace_id = inside.trace_id
            WHERE child.phase IS DISTINCT FROM 'backward'
        ), hulls AS (
            SELECT inside.trace_id, call, inside.name, any_value(begins) AS begins,
                   sum(work.dur_ns) AS ns
            FROM inside LEFT JOIN spans work
                ON work.span_id = inside.span_id AND work.trace_id = inside.trace_id AND work.device IS NOT NULL
            GROUP BY ALL
        ), numbered AS (
            SELECT *, row_number() OVER (PARTITION BY trace_id ORDER BY begins) AS place FROM hulls
        )
        SELECT any_value(name), median(ns) FROM numbered GROUP BY place ORDER BY place
        """
    ).fetchall()
    if len(rows) != len(events):
        return []
    pairs = zip(rows, events, strict=True)
    return [(name, ns, event_ns) for (name, ns), event_ns in pairs if ns is not None and event_ns >= LEAST_NS]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = turns.parse(gpu_workloads.add_options(turns.parser(__doc__), seconds=4.0), arguments)
    gpu_workloads.require_gpu()
    report = turns.Report("gpu_true_time", "xsp's true times on a GPU compared with bare ones [95 %]", COLUMNS)
    for workload in gpu_workloads.build_workloads(options):
        times = measure(workload, gpu_workloads.rounds_of(workload, options, 6), options)
        report.add(
            _row(workload.name, times), bare=times.bare, events=times.events, true=times.true, layers=times.layers
        )
    report.notes += [
        "Layers are the direct children of the model that take 100 µs or more on the device.",
        gpu_workloads.device_line(),
    ]
    report.finish(options)


def _row(name: str, times: ModelTimes) -> list[str]:
    bare = turns.middle(times.bare)
    error = times.true.value / bare.value
    ratio = turns.Figure(error, times.true.lo / bare.value, times.true.hi / bare.value)
    errors = [abs(kernel_ns / event_ns - 1) for _, kernel_ns, event_ns in times.layers]
    within_goal = sum(layer_error <= GOAL for layer_error in errors)
    return [
        name, str(len(times.bare) // BARE), bare.text(3, 1e-6), turns.middle(times.events).text(3, 1e-6),
        times.true.text(3, 1e-6), ratio.text(4), "met" if abs(error - 1) <= GOAL else "missed", str(len(errors)),
        f"{100 * turns.median(errors):.2f}" if errors else "–", f"{100 * max(errors):.2f}" if errors else "–",
        f"{within_goal} of {len(errors)}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
