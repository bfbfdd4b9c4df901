"""How close are xsp's reconstructed step and layer times on a GPU to those without xsp?

Steps: models by name run their step, which waits for the device, in a loop: without xsp in one process, under `xsp run`
in another, in turns (`parts/pairs.py`); xsp's true time is compared with the program's own. Layers: in further steps of
this process, events are recorded around each call of a module directly inside the model, and compared with the time of
the kernels of that call in a profile. Before these steps the device is kept busy, so that the host runs ahead: without
it, events of a model whose host is slower than the device would measure the launches. What is left between kernels
(1 µs each) is in the time of the events.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from parts import gpu_workloads, pairs, turns
from parts.apart import Runner
from parts.pairs import Pair
from true_time import program_of

import xsp
from xsp.launch import models as measure
from xsp.models import Workload
from xsp.schema import Level

GOAL = 0.02
"""Goal: maximum relative error of the time of a layer."""

LEAST_NS = 100_000
"""Minimum time on the device for a layer to be compared: events and the gaps between kernels are microseconds."""

AHEAD_CYCLES = 100_000_000
"""Cycles of the device, about 50 ms, by which the host runs ahead."""

STEPS = 24
"""Steps of the profile that layers are taken from."""

COLUMNS = (
    "model", "pairs", "own ms", "xsp's true ms", "true / own", "goal", "covers", "processes differ %", "layers",
    "median error %", "largest error %", "layers within 2 %",
)  # fmt: skip
Layer = tuple[str, float, float]
"""Name of a layer, ns of its kernels in xsp's trace, ns between its events."""


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


def layers_of(workload: Workload, options: argparse.Namespace) -> list[Layer]:
    """Profile a workload, and time its layers by events."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        with xsp.profile("true_time", levels="M/L/G", out=out, seed=options.seed) as prof:
            for _ in range(STEPS):
                with prof.step():
                    workload.step()
        return _layers(xsp.load(out), layer_events(workload, options.rounds))


def _layers(trace: xsp.Trace, events: Sequence[float]) -> list[Layer]:
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
    parser = pairs.parser(__doc__)
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="names with settings, as in layer_overhead.py")
    parser.add_argument("--device", default=measure.default_device(), help="cuda or cuda:1 (default: cuda)")
    options = pairs.parse(parser, arguments)
    gpu_workloads.require_gpu()
    report = turns.Report("gpu_true_time", "xsp's true times on a GPU compared with those without xsp [95 %]", COLUMNS)
    options.models = options.models or (gpu_workloads.QUICK if options.quick else gpu_workloads.MODELS)
    programs = [program_of(text, options.seed, gpu_workloads.name_of) for text in options.models]
    measured = pairs.measure(pairs.selected(programs, options), options, report, Runner(device=options.device))
    with report.until_interrupted():
        layers = {workload.name: layers_of(workload, options) for workload in gpu_workloads.build_workloads(options)}
        for program, name in zip(programs, layers, strict=True):
            if program.name in measured:
                _add(report, name, measured[program.name], layers[name])
    report.notes += [
        *(pairs.within(measured, "true") if measured else ["No model was measured."]),
        "Layers are the direct children of the model that take 100 µs or more on the device.",
        gpu_workloads.device_line(),
    ]
    report.finish(options)


def _add(report: turns.Report, name: str, known: Sequence[Pair], layers: Sequence[Layer]) -> None:
    (kind,) = known[0].bare.kinds
    own = pairs.middle([pair.bare.own_s(kind) for pair in known])
    true = pairs.middle([stated[0] for pair in known if (stated := pair.stated(kind, "true")) is not None])
    ratio = pairs.ratios(known, kind, "true")
    errors = [abs(kernel_ns / event_ns - 1) for _, kernel_ns, event_ns in layers]
    within_goal = sum(error <= GOAL for error in errors)
    row = [
        name, str(len(known)), own.text(3, 1e3), true.text(3, 1e3), ratio.text(4), pairs.verdict(ratio, own.value),
        f"{sum(pair.covers(kind, 'true') for pair in known)} of {len(known)}",
        pairs.number(pairs.spread_percent(known, kind), 1), str(len(errors)),
        f"{100 * turns.median(errors):.2f}" if errors else "–", f"{100 * max(errors):.2f}" if errors else "–",
        f"{within_goal} of {len(errors)}",
    ]  # fmt: skip
    report.add(row, layers=layers, ratio=ratio, pairs=[pair.as_stored() for pair in known])


if __name__ == "__main__":
    main()
