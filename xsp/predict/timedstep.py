"""The step of a model that was not run: its layers from timings of single calls, on the processor or on a device.

The time of a step is that of the whole step where it was timed (on a device), else the sum of its calls. Where the host
needs longer to issue the step than the device to do it, all layers take longer in proportion.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from xsp import bound as bounds
from xsp.bench.plan import Progress
from xsp.bench.timings import Timings
from xsp.bound import phases, planned, targets, totals
from xsp.bound.ladder import Bound, Rung
from xsp.errors import AnalysisError
from xsp.graph.node import Phase
from xsp.predict.recorded import RecordedStep
from xsp.predict.training import Layer, Work
from xsp.texts import ns_text

ORIGIN = "from timings of single calls"

MOST_SCALED = 1.02
"""Step ÷ sum of its calls, above which the difference is told."""


def is_model(source: str) -> bool:
    """Return whether a source is a model by name or a saved graph, and not a run or a trace."""
    if os.path.exists(source):
        return source.endswith((".json", ".json.gz")) and not planned.is_trace(source)
    return ":" in source and not planned.is_trace(source)


def of(
    source: str,
    *,
    device: str | None = None,
    timings: Timings | Path | None = None,
    fill: float | None = None,
    batch: int | None = None,
    progress: Progress = lambda name, done, total: None,
) -> RecordedStep:
    """Return the training step of a model on one rank.

    Args:
        source: name of a model as in `xsp.graph.of`, or the file of a saved graph of a training step.
        device: a device of this machine, or a product with timings in the folder; default: the processor.
        timings: open timings, or their folder.
        fill: seconds to spend on missing timings.
        batch: samples of a step; default: 1.
        progress: called while timings are taken.

    Raises:
        GraphError: there is no such model, or its step has no backward pass.
        DeviceError: there is no such device here.
        AnalysisError: too few calls are timed.
        UsageError: timings of a product are to be taken.
    """
    options: dict[str, Any] = {"train": True, "batch": batch or 1} if ":" in source else {}
    bound = bounds.of(
        source, device=device, timings=timings, fill=fill, progress=progress, check=phases.check, **options
    )
    return _step(bound, device, options.get("batch") or bound.graph.settings.get("batch"))


def _step(bound: Bound, device: str | None, samples: int | None) -> RecordedStep:
    """Return the step of a bound.

    Raises:
        AnalysisError: calls that take more than `1 - totals.MIN_COVERAGE` of its time are not timed.
    """
    as_run = bound.rungs[Rung.AS_RUN.value]
    if as_run.sequential is None or as_run.coverage.share is None or as_run.coverage.share < totals.MIN_COVERAGE:
        count = f"{as_run.coverage.nodes} of {as_run.coverage.of_nodes} calls are timed"
        count += f" ({bound.untimed_reason})" if bound.untimed_reason else ""
        count += f"; {bound.loss}" if bound.loss is not None else ""
        how = targets.how_to_time(bound.graph, device)
        raise AnalysisError(f"{bound.graph.name}: {count}: {how}")
    training = phases.of(bound)
    work_ns, unknown = as_run.sequential, []
    if training.holes:
        unknown.append(f"{training.holes} calls without a timing: they are left out")
    measured, replayed = bound.rungs[Rung.MEASURED.value], bound.rungs[Rung.REPLAYED.value]
    step_ns, half_ns = (measured.sequential, measured.half_ns) if measured.sequential else (work_ns, as_run.half_ns)
    machine = bound.settings.get("machine") or "this machine"
    sources = [f"layers, update: timings of single calls, {machine}"]
    if measured.sequential:
        sources.append("step: timed as a whole, waited for")
    else:
        sources.append("step: the sum of its calls")
    issue_ns = bound.settings.get("issue_ns")
    factor = step_ns / work_ns
    if factor > MOST_SCALED:
        cause = ""
        if issue_ns is not None and issue_ns > (replayed.sequential or work_ns):
            cause = f": the host needs {ns_text(issue_ns)} to issue it"
        unknown.append(
            f"when each layer ends: the step takes {ns_text(step_ns)} and its calls {ns_text(work_ns)}{cause}; all of "
            "them are taken to last longer in proportion"
        )
    if note := bound.settings.get("processor_note"):
        sources.append(str(note))
    unknown.append("what a loader takes: --loader states its parts")
    layers, update = _layers(training, factor)
    half_ns = half_ns or 0.0
    return RecordedStep(
        bound.graph.name, Work(layers, update), step_ns / 1e9,
        ((step_ns - half_ns) / 1e9, (step_ns + half_ns) / 1e9) if half_ns else None,
        1, float(samples) if samples else None, None, tuple(sources), tuple(unknown), origin=ORIGIN,
    )  # fmt: skip


def _layers(training: phases.Training, factor: float) -> tuple[tuple[Layer, ...], float]:
    """Return the layers in seconds with their gradients, and the seconds of the update."""
    layers = tuple(
        Layer(
            layer.module, factor * (layer.forward_ns or 0.0) / 1e9, factor * (layer.backward_ns or 0.0) / 1e9,
            (layer.parameter_bytes,) if layer.parameter_bytes else (),
        )
        for layer in training.layers
        if layer.forward_ns or layer.backward_ns or layer.parameter_bytes
    )  # fmt: skip
    update_ns = next((each.ns for each in training.phases if each.phase is Phase.OPTIMIZER), None)
    if update_ns is None:
        update_ns = sum(layer.update_ns or 0.0 for layer in training.layers)
    return layers, factor * update_ns / 1e9
