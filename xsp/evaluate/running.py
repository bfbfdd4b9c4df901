"""Run a manifest in this process: open the model, keep its outputs for the first samples, apply the load.

Order: open (timed), outputs of the first samples, warm-up, requests by the schedule; then, if requested, a trace in
separate steps and a bound. So latencies are those of unrecorded requests, and outputs do not depend on the load.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from xsp import version
from xsp.bench import environment
from xsp.errors import ManifestError, UsageError, XspError
from xsp.evaluate import agents, contention, datasets, extras, labelled, pipeline, predictors, results, userfunctions
from xsp.evaluate.agents import Facts, Options, Progress
from xsp.evaluate.load import Clock, Requests, Schedule, VirtualClock, drive, latencies, loadgen, schedules, search
from xsp.evaluate.manifest import Manifest, Scenario
from xsp.evaluate.pipeline import Array
from xsp.evaluate.predictors import Answer, Batch, Predictor
from xsp.evaluate.quality.judging import constant

MOST_OUTPUTS = 32
"""Maximum number of samples whose outputs are kept."""

MOST_OUTPUT_BYTES = 64 << 20


@dataclass
class PreparedModel:
    """An open model with its steps before and after."""

    predictor: Predictor
    handle: Any
    samples: datasets.Samples
    raw: Sequence[Any] | datasets.Samples
    before: Callable[[Any], Any] | None
    """None if samples are already the model's inputs."""

    after: Callable[[Any], Any] | None

    def batch(self, first: int, count: int) -> Batch:
        """Return a batch of `count` samples, with the steps before the model applied."""
        rows = [self._row((first + offset) % len(self.raw)) for offset in range(count)]
        try:
            return {name: np.stack([row[name] for row in rows]) for name in self.handle.takes}
        except ValueError as error:
            raise ManifestError(f"model.inputs: samples have different shapes after their steps ({error})") from error

    def _row(self, number: int) -> Mapping[str, Array]:
        sample = self.raw[number]
        prepared = sample if self.before is None else self.before(sample)
        takes: Mapping[str, datasets.InputSpec] = self.handle.takes
        arrays: dict[str, Array]
        if isinstance(prepared, Mapping):
            arrays = dict(prepared)
        else:
            first, *remaining = takes
            arrays = {first: np.asarray(prepared)}
            for name in remaining:
                spec = takes[name]
                arrays[name] = np.zeros(spec.shape, spec.dtype) if spec.fixed is None else spec.fixed
        for name, spec in takes.items():
            if name not in arrays:
                raise ManifestError(f"model.preprocess: the model takes {name!r}, but it returns {', '.join(arrays)}")
            if arrays[name].ndim != len(spec.shape):
                shapes = f"a sample is {arrays[name].shape}, the model takes {spec.shape}"
                raise ManifestError(f"model.inputs: after the steps {shapes}")
        return arrays

    def predict(self, batch: Batch) -> Answer:
        """Return the model's answer, with the steps after the model applied."""
        answer = _predicted(self.predictor, self.handle, batch)
        if self.after is None or not answer.outputs:
            return answer
        first = answer.outputs[0]
        if not first.ndim:
            raise ManifestError("model.outputs: the first output is one number, which has no samples for the steps")
        rows = [self.after(output) for output in first]
        return Answer((np.stack(rows) if len({row.shape for row in rows}) == 1 else first, *answer.outputs[1:]),
                      answer.took_ns)  # fmt: skip


def _predicted(predictor: Predictor, handle: Any, batch: Batch) -> Answer:
    """Return the answer to one batch.

    Raises:
        ManifestError: the model raises an error, such as a model that was exported for another batch size.
    """
    try:
        return next(iter(predictor.predict(handle, [batch])))
    except XspError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        shapes = ", ".join(str(list(array.shape)) for array in batch.values())
        raise ManifestError(f"model: raises {type(error).__name__} on {shapes} ({reason})") from error


def evaluate(
    manifest: Manifest, folder: Path, options: Options, facts: Facts, progress: Progress, transport: str = "in-process"
) -> Path:
    """Run a manifest, and return the directory of its result.

    Args:
        manifest: what to evaluate.
        folder: base of relative paths in the manifest.
        options: where to store the result, and which optional parts to make.
        facts: facts of the agent that runs it.
        progress: see `Progress`.
        transport: how the manifest reached this process, for the result.

    Raises:
        ManifestError: it cannot be run; nothing was written.
    """
    facts = replace(facts, trusts=options.trusted)
    reasons = [*pipeline.problems(manifest), *agents.unmet_requirements(manifest, facts)] or _environment(manifest)
    if reasons:
        raise ManifestError(f"{manifest.title} cannot be evaluated by {facts.name}: " + "; ".join(reasons))
    started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    with (
        predictors.threads(manifest.software.threads),
        results.new_result(options.store, manifest.identity) as (staging, paths),
        userfunctions.of(manifest, folder) as functions,
    ):
        predictor = predictors.of(manifest, options.trusted)
        predictors.check_files(manifest, folder, options.trusted)
        progress("opening", 0, 1)
        begin = time.perf_counter_ns()
        handle = predictor.open(manifest, folder, options.levels)
        open_ns = time.perf_counter_ns() - begin
        try:
            served = _served(manifest, folder, options, predictor, handle, functions)
            outputs, first_answer = _outputs(manifest, served)
            accuracy = _accuracy(manifest, served, progress)
            simulated = first_answer.took_ns is not None
            watch = contention.Watch()
            parts, best, processor_ms = _parts(manifest, folder, served, simulated, progress)
            noted = {**environment.circumstances(), **watch.changes()}
            batch = served.batch(0, _inputs(manifest.scenario, manifest.scenario.sizes[0]))
            part_notes = extras.make(staging, manifest, folder, predictor, handle, batch, options, progress)
            function_notes = [note for function in functions.values() for note in function.notes()]
            notes = [
                *getattr(handle, "notes", ()),
                *function_notes,
                *_constant(outputs),
                *_of_search(best),
                *part_notes,
            ]
        finally:
            predictor.close(handle)
        np.savez(staging / results.OUTPUTS, **outputs)  # type: ignore[arg-type]
        snapshot = environment.current_environment()
        content = {
            "name": manifest.title,
            "kind": manifest.scenario.kind,
            "started": started,
            "xsp": version.__version__,
            "transport": transport,
            "agent": results.plain(facts),
            "environment": {"hash": snapshot.hash, "equal": dict(snapshot.properties), "noted": noted},
            "threads": predictors.threads_now(),
            "samples": {"count": len(served.samples), "checksum": served.samples.checksum},
            "outputs": {"digest": results.digest(outputs), "samples": min(len(served.raw), MOST_OUTPUTS)},
            "accuracy": accuracy,
            "simulated": simulated,
            "open_ms": open_ns / 1e6,
            "parts": [
                _figures(manifest.scenario, batch, requests, best) | {"processor_ms": processor_ms.get(batch)}
                for batch, requests in parts.items()
            ],
            "notes": notes,
        }
        results.write(staging, manifest, content, parts)
    return paths[0]


def _served(
    manifest: Manifest, folder: Path, options: Options, predictor: Predictor, handle: Any,
    functions: Mapping[str, Callable[[Any], Any]],
) -> PreparedModel:  # fmt: skip
    model = manifest.model
    steps = model.inputs[0].steps if model.inputs else []
    samples = datasets.of(manifest.dataset, handle.takes, folder, options.trusted)
    if steps and not samples.raw:
        raise ManifestError(
            "model.inputs: steps need samples from files: dataset.source synthetic:images, "
            "synthetic:classes, synthetic:text or folder:path"
        )
    before = functions.get("preprocess")
    if samples.raw and before is None:
        if not steps:
            raise ManifestError(
                f"model.inputs: samples of {manifest.dataset.source} need steps or a function model.preprocess "
                "to become inputs of the model"
            )
        before = pipeline.before(steps)
    output_steps = model.outputs[0].steps if model.outputs else []
    after = functions.get("postprocess") or (pipeline.after(output_steps) if output_steps else None)
    raw = [samples[number] for number in range(min(len(samples), _most_samples(manifest)))]
    return PreparedModel(predictor, handle, samples, raw, before, after)


def _most_samples(manifest: Manifest) -> int:
    """Return the number of samples to prepare; requests beyond it start again with the first sample."""
    scenario = manifest.scenario
    requests = max(scenario.requests, scenario.warmup)
    if scenario.kind == "replay":
        requests = max(requests, len(scenario.times_s))
    elif scenario.kind == "max-rate":
        requests = max(requests, search.least_requests(scenario.percentile / 100))
    return max(MOST_OUTPUTS, requests * max(_inputs(scenario, size) for size in scenario.sizes))


def _inputs(scenario: Scenario, batch: int) -> int:
    """Return the number of inputs of a request."""
    return scenario.streams if scenario.kind == "multi-stream" else batch


def _outputs(manifest: Manifest, served: PreparedModel) -> tuple[dict[str, Array], Answer]:
    """Return the outputs for the first samples, one by one, up to a limit of bytes, and the first answer."""
    del manifest
    answers = [served.predict(served.batch(number, 1)) for number in range(min(len(served.raw), MOST_OUTPUTS))]
    arrays: dict[str, Array] = {}
    size = 0
    for index in range(len(answers[0].outputs)):
        rows = [answer.outputs[index] for answer in answers]
        size += sum(row.nbytes for row in rows)
        if size > MOST_OUTPUT_BYTES:
            break
        if len({row.shape for row in rows}) == 1:
            arrays[f"output{index}"] = np.stack(rows)
        else:
            arrays |= {f"output{index}-{number:04d}": row for number, row in enumerate(rows)}
    return arrays, answers[0]


def _accuracy(manifest: Manifest, served: PreparedModel, progress: Progress) -> dict[str, Any] | None:
    """Return the result of `labelled.of` for all samples; None if their classes are unknown."""
    samples = served.samples

    def answer(number: int) -> Array:
        progress("accuracy", number, len(samples))
        outputs = served.predict(served.batch(number, 1)).outputs
        return outputs[0][0] if outputs and outputs[0].ndim else np.empty((0, 0))

    if not samples.labels:
        return None
    served = replace(served, raw=samples)
    return dict(labelled.of(manifest, samples.labels, samples.classes, answer))


def _constant(outputs: Mapping[str, Array]) -> list[str]:
    explanation = constant(outputs)
    return [f"the outputs are constant, so comparing them is meaningless: {explanation}"] if explanation else []


def _parts(
    manifest: Manifest, folder: Path, served: PreparedModel, simulated: bool, progress: Progress
) -> tuple[dict[int, Requests], search.SearchResult | None, dict[int, float | None]]:
    """Return the requests of each batch size, the result of a search for the highest rate, and processor times.

    Processor time is the median over requests of the CPU time of all threads of this process, in milliseconds; None for
    a simulator, for programs and functions in subprocesses, and for searches and cold starts.
    """
    scenario = manifest.scenario
    if scenario.kind == "cold-start":
        return {scenario.batch: _cold(manifest, folder, served, progress)}, None, {}
    by_batch = {}
    processor_ms: dict[int, float | None] = {}
    untimed = simulated or any((manifest.model.command, manifest.model.preprocess, manifest.model.postprocess))
    for batch in scenario.sizes:
        clock: Clock = VirtualClock() if simulated else Clock()
        took: list[int] = []

        def serve(number: int, inputs: int, clock: Clock = clock, took: list[int] = took) -> None:
            begin = time.process_time_ns()
            answer = served.predict(served.batch(number * inputs, inputs))
            took.append(time.process_time_ns() - begin)
            if isinstance(clock, VirtualClock):
                clock.advance(answer.took_ns or 0)

        for number in range(scenario.warmup):
            serve(number, _inputs(scenario, batch))
        if scenario.kind == "max-rate":
            best, by_batch[batch] = _searched(manifest.title, scenario, serve, clock, progress)
            return by_batch, best, processor_ms
        label = f"{manifest.title}, batch {batch}" if len(scenario.sizes) > 1 else manifest.title
        if scenario.driver == "loadgen":
            progress(f"{label}, by LoadGen", 0, scenario.requests)
            by_batch[batch] = _by_loadgen(scenario, serve)
        else:
            by_batch[batch] = drive(
                schedule(scenario, batch), serve, clock=clock,
                progress=lambda done, of, label=label: progress(label, done, of),  # type: ignore[misc]
            )  # fmt: skip
        if not len(by_batch[batch]):
            raise ManifestError(f"{manifest.title}: no request ended ({by_batch[batch].stopped})")
        processor_ms[batch] = None if untimed else float(np.median(took[scenario.warmup :])) / 1e6
    return by_batch, None, processor_ms


def _by_loadgen(scenario: Scenario, serve: Callable[[int, int], None]) -> Requests:
    """Return the requests that MLPerf's LoadGen issued."""
    return loadgen.drive(
        scenario.kind, serve, scenario.requests, scenario.rate, streams=scenario.streams, seed=scenario.seed,
        latency_ns=round(1e6 * scenario.latency_ms) if scenario.latency_ms else None, share=scenario.percentile / 100,
    ).requests  # fmt: skip


MOST_PROBES = 15


def _searched(
    title: str, scenario: Scenario, serve: Callable[[int, int], None], clock: Clock, progress: Progress
) -> tuple[search.SearchResult, Requests]:
    """Search for the highest rate, and return it with the requests at the lower end of its interval."""
    rates: dict[float, None] = {}

    def probed(rate: float, runs: int) -> None:
        del runs
        rates[rate] = None
        progress(f"{title}, {rate:.3g} per second", len(rates) - 1, MOST_PROBES)

    try:
        best = search.drive_to_limit(
            serve, round(1e6 * (scenario.latency_ms or 0.0)), scenario.percentile / 100, requests=scenario.requests,
            batch=scenario.batch, clock=clock, seed=scenario.seed, most_probes=MOST_PROBES, probed=probed,
        )  # fmt: skip
    except UsageError as error:
        raise ManifestError(f"scenario: {error}") from error
    progress(title, MOST_PROBES, MOST_PROBES)
    return best


def _of_search(result: search.SearchResult | None) -> list[str]:
    """Return notes on a search whose interval has an open end."""
    if result is None or (result.low is not None and result.high is not None):
        return []
    limit = f"{result.limit_ns / 1e6:g} ms at the {100 * result.share:g}th percentile"
    if result.low is None:
        fallback = f" a rate of {result.probes[0].rate:.3g}" if result.probes else " a closed loop"
        return [f"no rate met {limit}: {result.why}; the requests are those of{fallback}"]
    return [f"{limit} met at each tried rate, up to {max(probe.rate for probe in result.probes):.3g} per second"]


def schedule(scenario: Scenario, batch: int) -> Schedule:
    """Return the schedule of a scenario.

    Raises:
        ManifestError: the scenario has no schedule, or one that is too long.
    """
    requests, rate = scenario.requests, scenario.rate or 0.0
    builders: dict[str, Callable[[], Schedule]] = {
        "online": lambda: schedules.batched(requests, batch) if batch > 1 else schedules.online(requests),
        "batched": lambda: schedules.batched(requests, batch),
        "offline": lambda: schedules.offline(requests * batch, batch),
        "poisson": lambda: schedules.poisson(rate, requests, scenario.seed, batch),
        "burst": lambda: schedules.burst(rate, requests, scenario.together, scenario.seed, batch),
        "constant": lambda: schedules.constant(rate, requests, batch),
        "server": lambda: schedules.server(rate, requests, scenario.seed),
        "multi-stream": lambda: schedules.multi_stream(requests, scenario.streams),
        "replay": lambda: schedules.replay(scenario.times_s, batch),
    }
    if scenario.kind not in builders:
        raise ManifestError(f"scenario.kind: {scenario.kind} has no schedule; there are {', '.join(builders)}")
    try:
        return builders[scenario.kind]()
    except UsageError as error:
        raise ManifestError(f"scenario: {error}") from error


def _cold(manifest: Manifest, folder: Path, served: PreparedModel, progress: Progress) -> Requests:
    """Reopen the model for each request, which is open and one prediction; a simulator reports the latter's time."""
    batch = served.batch(0, manifest.scenario.batch)
    times = []
    for number in range(manifest.scenario.requests):
        start = time.perf_counter_ns()
        handle = served.predictor.open(manifest, folder, "")
        try:
            opened = time.perf_counter_ns()
            took_ns = _predicted(served.predictor, handle, batch).took_ns
            times.append((start, time.perf_counter_ns() if took_ns is None else opened + took_ns))
        finally:
            served.predictor.close(handle)
        progress(manifest.title, number + 1, manifest.scenario.requests)
    starts, ends = (np.array(column, np.int64) for column in zip(*times, strict=True))
    sizes = np.full(len(starts), manifest.scenario.batch, np.int64)
    return Requests(starts, starts, starts, ends, sizes, open_loop=False, scheduled=len(starts))


def _figures(scenario: Scenario, batch: int, requests: Requests, best: search.SearchResult | None) -> dict[str, Any]:
    """Return the figures of a batch size as plain data: latencies in milliseconds, rates per second."""
    summary = latencies.summarise(requests, poisson=scenario.kind in ("poisson", "server", "max-rate"))
    percentiles = {f"p{100 * percentile.share:g}": percentile for percentile in summary.percentiles}
    interval = summary.trimmed_mean_interval_ns
    return {
        "batch": batch,
        "requests": summary.requests,
        "scheduled": requests.scheduled,
        "inputs": summary.inputs,
        "open_loop": requests.open_loop,
        "stopped": summary.stopped,
        **{f"{name}_ms": percentile.value_ns / 1e6 for name, percentile in percentiles.items()},
        "intervals_ms": {
            name: [None if end is None else end / 1e6 for end in (percentile.low_ns, percentile.high_ns)]
            for name, percentile in percentiles.items()
        },
        "trimmed_mean_ms": summary.trimmed_mean_ns / 1e6,
        "trimmed_mean_interval_ms": None if interval is None else [end / 1e6 for end in tuple(interval)[:2]],
        "service_ms": summary.service_ns / 1e6,
        "inputs_per_s": summary.inputs_per_second,
        "utilisation": summary.utilisation,
        "late": summary.late,
        "little_ratio": None if summary.little is None else _finite(summary.little.ratio),
        "waiting_ms": summary.waiting_ns / 1e6,
        "expected_waiting_ms": None if summary.expected_waiting_ns is None else summary.expected_waiting_ns / 1e6,
        **({} if best is None else _best(best)),
    }


def _best(result: search.SearchResult) -> dict[str, Any]:
    """Return the highest rate as plain data: the interval, and each probed rate."""
    return {
        "rate_low": result.low,
        "rate_high": result.high,
        "rate_estimate": result.estimate,
        "rate_ended": result.why,
        "probes": [
            {
                "rate": probe.rate, "held": probe.held.value, "runs": probe.runs, "requests": probe.requests,
                "percentile_ms": None if probe.value_ns is None else probe.value_ns / 1e6,
                "interval_ms": [None if end is None else end / 1e6 for end in (probe.low_ns, probe.high_ns)],
                "why": probe.why,
            }
            for probe in result.probes
        ],
    }  # fmt: skip


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


# --- the process ------------------------------------------------------------------------------------------------------


def _environment(manifest: Manifest) -> list[str]:
    """Return the manifest's requirements on this process that are not met: environment variables, and LoadGen."""
    missing: list[str] = []
    if manifest.scenario.driver == "loadgen":
        missing += filter(None, [loadgen.missing()])
        if manifest.model.command:
            missing.append("scenario.driver: LoadGen uses its own clock, and model.command may use another one")
    return missing + [
        f"the variable {name}={value} is required; a separate process can have it: --agents process"
        for name, value in manifest.software.environment.items()
        if os.environ.get(name) != value
    ]
