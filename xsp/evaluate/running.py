"""Run a manifest in this process: open the model, keep its outputs for the first samples, apply the load.

Order: open (timed), outputs of the first samples, warm-up, requests by the schedule; then, if requested, a trace in
separate steps and a bound. So latencies are those of unrecorded requests, and outputs do not depend on the load.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xsp import version
from xsp.bench import environment
from xsp.errors import ManifestError, UsageError
from xsp.evaluate import agents, contention, datasets, extras, labelled, pipeline, predictors, results, userfunctions
from xsp.evaluate import hardware as requested
from xsp.evaluate.agents import Facts, Options, Progress
from xsp.evaluate.generation import measuring as generation
from xsp.evaluate.generation import timing
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
    """An open model with its samples, and the steps before and after it."""

    predictor: Predictor
    handle: Any
    samples: datasets.Samples
    raw: Sequence[Any] | datasets.Samples
    """Samples for requests, without the steps."""

    preprocess: Callable[[Any], Any] | None
    """None if samples are already the model's inputs."""

    postprocess: Callable[[Any], Any] | None
    functions: Mapping[str, userfunctions.UserFunction]
    """Functions of the manifest in subprocesses, by side."""

    open_ns: int
    """Time that opening the model took."""

    def batch(self, start: int, count: int) -> Batch:
        """Return a batch of `count` samples, with the steps before the model applied."""
        rows = [self._row((start + offset) % len(self.raw)) for offset in range(count)]
        try:
            return {name: np.stack([row[name] for row in rows]) for name in self.handle.takes}
        except ValueError as error:
            raise ManifestError(f"model.inputs: samples have different shapes after their steps ({error})") from error

    def _row(self, number: int) -> Mapping[str, Array]:
        sample = self.raw[number]
        try:
            prepared = sample if self.preprocess is None else self.preprocess(sample)
        except ManifestError as error:
            raise ManifestError(f"{error}, in {self.samples.name(number)}") from error
        takes: Mapping[str, datasets.InputSpec] = self.handle.takes
        arrays: dict[str, Array]
        if isinstance(prepared, Mapping):
            arrays = dict(prepared)
        else:
            first_name, *other_names = takes
            arrays = {first_name: np.asarray(prepared)}
            for name in other_names:
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
        answer = predictors.answer(self.predictor, self.handle, batch)
        if self.postprocess is None or not answer.outputs:
            return answer
        output_batch = answer.outputs[0]
        if not output_batch.ndim:
            raise ManifestError("model.outputs: the first output is one number, which has no samples for the steps")
        rows = [self.postprocess(output) for output in output_batch]
        return Answer((np.stack(rows) if len({row.shape for row in rows}) == 1 else output_batch, *answer.outputs[1:]),
                      answer.took_ns)  # fmt: skip


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
    if reasons := objections(manifest, facts):
        raise ManifestError(f"{manifest.title} cannot be evaluated by {facts.name}: " + "; ".join(reasons))
    started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    measure = _evaluate_predictions if manifest.scenario.generation is None else _evaluate_generation
    with results.new_result(options.store, manifest.identity) as (staging, paths):
        measured = measure(manifest, folder, options, staging, progress)
        np.savez(staging / results.OUTPUTS, **measured.outputs)  # type: ignore[arg-type]
        content = {
            "name": manifest.title,
            "kind": manifest.scenario.kind,
            "started": started,
            "xsp": version.__version__,
            "transport": transport,
            "agent": results.plain_facts(facts),
            **measured.content,
        }
        results.write(staging, manifest, content, measured.parts)
    return paths[0]


@dataclass(frozen=True)
class _Evaluated:
    """What a result consists of, beside the facts of its agent."""

    outputs: dict[str, Array]
    parts: dict[int, Requests]
    """Requests by batch size."""

    content: dict[str, Any]


def _evaluate_predictions(
    manifest: Manifest, folder: Path, options: Options, staging: Path, progress: Progress
) -> _Evaluated:
    with _opened(manifest, folder, options, progress) as prepared:
        measurements = _measure(manifest, folder, prepared, progress)
        batch = prepared.batch(0, _inputs(manifest.scenario, manifest.scenario.sizes[0]))
        predictor, handle = prepared.predictor, prepared.handle
        extra_notes = extras.write(staging, manifest, folder, predictor, handle, batch, options, progress)
        explanation = constant(measurements.outputs)
        notes = [
            *getattr(handle, "notes", ()),
            *(note for function in prepared.functions.values() for note in function.notes()),
            *prepared.samples.notes,
            *([f"the outputs are constant, so comparing them is meaningless: {explanation}"] if explanation else []),
            *_search_notes(measurements.search_result),
            *measurements.notes,
            *extra_notes,
        ]
        content = {
            **_environment_content(measurements.circumstances),
            **_measured_content(prepared, measurements),
            "open_ms": prepared.open_ns / 1e6,
            "parts": [
                batch_figures(manifest.scenario, batch_size, requests, measurements.search_result)
                | measurements.used.get(batch_size, RequestUsage()).figures()
                for batch_size, requests in measurements.parts.items()
            ],
            "notes": notes,
        }
    return _Evaluated(measurements.outputs, measurements.parts, content)


def _evaluate_generation(
    manifest: Manifest, folder: Path, options: Options, staging: Path, progress: Progress
) -> _Evaluated:
    scenario = manifest.scenario
    with generation.opened(manifest, folder, options, progress) as generator:
        outputs = generator.alone(generation.MOST_OUTPUTS)
        watch = contention.Watch()
        generated = generator.load(schedule(scenario, 1), progress)
        circumstances = {**environment.circumstances(), **watch.changes()}
    generation.write_tokens(staging / generation.TOKENS, generated)
    requests = generated.requests
    wanted = {"trace": options.levels, "bound": options.needs_bound}
    content = {
        **_environment_content(circumstances),
        "samples": {"count": len(generator.prompts), "checksum": generator.prompts.checksum},
        "outputs": {"digest": results.digest(outputs), "samples": len(outputs)},
        "accuracy": None,
        "simulated": False,
        "open_ms": generator.open_ns / 1e6,
        "parts": [
            batch_figures(scenario, 1, requests, None) | {"generation": timing.figures(generated, scenario)}
        ],
        "notes": [
            *generator.notes,
            *(f"no {name}: for the steps that generate text see `xsp {command} MODEL --decode N`"
              for (name, is_wanted), command in zip(wanted.items(), ("profile", "bound"), strict=True) if is_wanted),
        ],
    }  # fmt: skip
    return _Evaluated(outputs, {1: requests}, content)


def _environment_content(circumstances: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a result that describe the environment of this process."""
    snapshot = environment.current_environment()
    return {
        "environment": {"hash": snapshot.hash, "equal": dict(snapshot.properties), "noted": dict(circumstances)},
        "threads": predictors.thread_count(),
    }


def check(manifest: Manifest, folder: Path, options: Options, facts: Facts, progress: Progress) -> list[str]:
    """Do everything that precedes the load of an evaluation, without storing anything.

    That is: open the model and its functions, read the samples, apply the steps to each, and predict once for each of
    the samples whose outputs would be kept, and once for each batch size; or generate the text of the longest request.

    Args:
        manifest: what would be evaluated.
        folder: base of relative paths in the manifest.
        options: as for `evaluate`.
        facts: facts of the agent in this process.
        progress: see `Progress`.

    Returns:
        Notes on the samples, as sentences: what the manifest asks for and does not get.

    Raises:
        ManifestError: `evaluate` would refuse the manifest, with the reason.
    """
    if reasons := objections(manifest, replace(facts, trusts=options.trusted)):
        raise ManifestError("; ".join(reasons))
    if manifest.scenario.generation is not None:
        with generation.opened(manifest, folder, options, progress) as generator:
            generator.first()
        return []
    with _opened(manifest, folder, options, progress) as prepared:
        _outputs(prepared, progress)
        total = len(prepared.samples) if prepared.samples.labels else len(prepared.raw)
        every_sample = replace(prepared, raw=prepared.samples)
        for number in range(total):
            progress("checking samples", number, total)
            every_sample.batch(number, 1)
        for size in manifest.scenario.sizes:
            prepared.predict(prepared.batch(0, _inputs(manifest.scenario, size)))
        return list(prepared.samples.notes)


def objections(manifest: Manifest, facts: Facts) -> list[str]:
    """Return why this process does not evaluate a manifest, as sentences, as far as that is known without opening it.

    Args:
        manifest: what would be evaluated.
        facts: facts of the agent in this process.
    """
    return [*pipeline.problems(manifest), *agents.unmet_requirements(manifest, facts)] or [
        *_unmet_environment(manifest), *_unusable_schedules(manifest.scenario),
    ]  # fmt: skip


@contextlib.contextmanager
def _opened(manifest: Manifest, folder: Path, options: Options, progress: Progress) -> Iterator[PreparedModel]:
    """Open the model, its functions and its samples; they are closed with the block.

    Raises:
        ManifestError: one of them cannot be opened.
    """
    with predictors.threads(manifest.software.threads), userfunctions.of(manifest, folder) as functions:
        predictor = predictors.of(manifest, options.trusted)
        predictors.check_files(manifest, folder, options.trusted)
        progress("opening", 0, 1)
        begin = time.perf_counter_ns()
        handle = predictor.open(manifest, folder, options.levels)
        open_ns = time.perf_counter_ns() - begin
        try:
            yield _prepare(manifest, folder, options, predictor, handle, functions, open_ns)
        finally:
            predictor.close(handle)


class RequestUsage(NamedTuple):
    """What requests of a batch size used, beside their time; None where it is unknown."""

    processor_ms: float | None = None
    """Median over requests of the CPU time of all threads of this process; unknown for a simulator, for programs and
    functions in subprocesses, and for searches and cold starts."""

    joules_per_input: float | None = None
    """Energy of the device from the first request to the last, waiting included; unknown without a counter, and where
    requests take less than `LEAST_ENERGY_NS` together."""

    def figures(self) -> dict[str, float | None]:
        """Return the fields of a result."""
        return {"processor_ms": self.processor_ms, **_known(joules_per_input=self.joules_per_input)}


def _known(**figures: float | None) -> dict[str, float | None]:
    return {name: value for name, value in figures.items() if value is not None}


LEAST_ENERGY_NS = 1_000_000_000
"""Ten updates of the counter of an H200."""


@dataclass(frozen=True)
class _Measurements:
    """What was measured of an open model."""

    outputs: dict[str, Array]
    accuracy: dict[str, Any] | None
    is_simulated: bool
    parts: dict[int, Requests]
    """Requests by batch size."""

    search_result: search.SearchResult | None
    used: dict[int, RequestUsage]
    circumstances: dict[str, Any]
    notes: list[str]
    """What was to be measured and could not be, with the reasons."""


def _measure(manifest: Manifest, folder: Path, prepared: PreparedModel, progress: Progress) -> _Measurements:
    """Compute the first outputs and the accuracy, then apply the load."""
    outputs, first_answer = _outputs(prepared, progress)
    accuracy = _accuracy(manifest, prepared, progress)
    is_simulated = first_answer.took_ns is not None
    counter = requested.EnergyCounter(None if is_simulated else requested.device_of(manifest.hardware))
    watch = contention.Watch()
    parts, search_result, used = _measure_parts(manifest, folder, prepared, is_simulated, counter, progress)
    circumstances = {**environment.circumstances(), **watch.changes()}
    notes = [counter.note] if counter.note else []
    return _Measurements(outputs, accuracy, is_simulated, parts, search_result, used, circumstances, notes)


def _measured_content(prepared: PreparedModel, measurements: _Measurements) -> dict[str, Any]:
    """Return the fields of a result that describe its samples and outputs."""
    samples = prepared.samples
    return {
        "samples": {"count": len(samples), "checksum": samples.checksum},
        "outputs": {
            "digest": results.digest(measurements.outputs), "samples": min(len(prepared.raw), MOST_OUTPUTS),
        },
        "accuracy": measurements.accuracy,
        "simulated": measurements.is_simulated,
    }  # fmt: skip


def _prepare(
    manifest: Manifest, folder: Path, options: Options, predictor: Predictor, handle: Any,
    functions: Mapping[str, userfunctions.UserFunction], open_ns: int,
) -> PreparedModel:  # fmt: skip
    model = manifest.model
    steps = model.inputs[0].steps if model.inputs else []
    samples = datasets.of(manifest.dataset, handle.takes, folder, options.trusted)
    if steps and not samples.needs_steps:
        raise ManifestError(
            "model.inputs: steps need samples from files: dataset.source synthetic:images, "
            "synthetic:classes, synthetic:text or folder:path"
        )
    preprocess: Callable[[Any], Any] | None = functions.get("preprocess")
    if samples.needs_steps and preprocess is None:
        if not steps:
            raise ManifestError(
                f"model.inputs: samples of {manifest.dataset.source} need steps or a function model.preprocess "
                "to become inputs of the model"
            )
        preprocess = pipeline.preprocessor(steps, "model.inputs[0].steps")
    output_steps = model.outputs[0].steps if model.outputs else []
    postprocess = functions.get("postprocess") or (
        pipeline.postprocessor(output_steps, "model.outputs[0].steps") if output_steps else None
    )
    raw = [samples[number] for number in range(min(len(samples), _most_samples(manifest)))]
    return PreparedModel(predictor, handle, samples, raw, preprocess, postprocess, functions, open_ns)


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


def _outputs(prepared: PreparedModel, progress: Progress) -> tuple[dict[str, Array], Answer]:
    """Return the outputs for the first samples, one by one, up to a limit of bytes, and the first answer.

    Raises:
        ManifestError: the answers have different numbers of outputs.
    """
    answers: list[Answer] = []
    count = min(len(prepared.raw), MOST_OUTPUTS)
    for number in range(count):
        progress("outputs", number, count)
        answers.append(prepared.predict(prepared.batch(number, 1)))
    counts = sorted({len(answer.outputs) for answer in answers})
    if len(counts) > 1:
        raise ManifestError(f"model: the number of outputs differs between samples: {counts[0]} and {counts[-1]}")
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


def _accuracy(manifest: Manifest, prepared: PreparedModel, progress: Progress) -> dict[str, Any] | None:
    """Return the result of `labelled.of` for all samples; None if their classes are unknown."""
    samples = prepared.samples

    def first_output(number: int) -> Array:
        progress("accuracy", number, len(samples))
        outputs = prepared.predict(prepared.batch(number, 1)).outputs
        return outputs[0][0] if outputs and outputs[0].ndim else np.empty((0, 0))

    if not samples.labels:
        return None
    prepared = replace(prepared, raw=samples)
    return dict(labelled.of(manifest, samples.labels, samples.classes, first_output))


def _measure_parts(
    manifest: Manifest, folder: Path, served: PreparedModel, simulated: bool, counter: requested.EnergyCounter,
    progress: Progress,
) -> tuple[dict[int, Requests], search.SearchResult | None, dict[int, RequestUsage]]:  # fmt: skip
    """Return the requests of each batch size, the result of a search for the highest rate, and what requests used."""
    scenario = manifest.scenario
    if scenario.kind == "cold-start":
        return {scenario.batch: _measure_cold_starts(manifest, folder, served, progress)}, None, {}
    by_batch = {}
    used: dict[int, RequestUsage] = {}
    untimed = simulated or any((manifest.model.command, manifest.model.preprocess, manifest.model.postprocess))
    for batch in scenario.sizes:
        clock: Clock = VirtualClock() if simulated else Clock()
        cpu_ns: list[int] = []

        def serve(number: int, inputs: int, clock: Clock = clock, cpu_ns: list[int] = cpu_ns) -> None:
            begin = time.process_time_ns()
            answer = served.predict(served.batch(number * inputs, inputs))
            cpu_ns.append(time.process_time_ns() - begin)
            if isinstance(clock, VirtualClock):
                clock.advance(answer.took_ns or 0)

        for number in range(scenario.warmup):
            progress("warm-up", number, scenario.warmup)
            serve(number, _inputs(scenario, batch))
        if scenario.kind == "max-rate":
            best, by_batch[batch] = _search_rate(manifest.title, scenario, serve, clock, progress)
            return by_batch, best, used
        begin_joules, begin_ns = counter.joules(), time.perf_counter_ns()
        label = f"{manifest.title}, batch {batch}" if len(scenario.sizes) > 1 else manifest.title
        if scenario.driver == "loadgen":
            progress(f"{label}, by LoadGen", 0, scenario.requests)
            by_batch[batch] = loadgen.drive_loadgen(
                scenario.kind,
                serve,
                scenario.requests,
                scenario.rate,
                streams=scenario.streams,
                seed=scenario.seed,
                latency_ns=round(1e6 * scenario.latency_ms) if scenario.latency_ms else None,
                share=scenario.percentile / 100,
            ).requests
        else:
            by_batch[batch] = drive(
                schedule(scenario, batch), serve, clock=clock,
                progress=lambda done, of, label=label: progress(label, done, of),  # type: ignore[misc]
            )  # fmt: skip
        if not len(by_batch[batch]):
            raise ManifestError(f"{manifest.title}: no request ended ({by_batch[batch].stop_reason})")
        took_ns = time.perf_counter_ns() - begin_ns
        joules = counter.since(begin_joules) if took_ns >= LEAST_ENERGY_NS else None
        used[batch] = RequestUsage(
            None if untimed else float(np.median(cpu_ns[scenario.warmup :])) / 1e6,
            None if joules is None else joules / int(by_batch[batch].batch.sum()),
        )
    return by_batch, None, used


MOST_PROBES = 15


def _search_rate(
    title: str, scenario: Scenario, serve: Callable[[int, int], None], clock: Clock, progress: Progress
) -> tuple[search.SearchResult, Requests]:
    """Search for the highest rate, and return it with the requests at the lower end of its interval."""
    rates: dict[float, None] = {}

    def report(rate: float, runs: int) -> None:
        del runs
        rates[rate] = None
        progress(f"{title}, {rate:.3g} per second", len(rates) - 1, MOST_PROBES)

    try:
        result = search.drive_to_limit(
            serve, round(1e6 * (scenario.latency_ms or 0.0)), scenario.percentile / 100, requests=scenario.requests,
            batch=scenario.batch, clock=clock, seed=scenario.seed, most_probes=MOST_PROBES, on_run=report,
        )  # fmt: skip
    except UsageError as error:
        raise ManifestError(f"scenario: {error}") from error
    progress(title, MOST_PROBES, MOST_PROBES)
    return result


def _search_notes(result: search.SearchResult | None) -> list[str]:
    """Return notes on a search whose interval has an open end."""
    if result is None or (result.low is not None and result.high is not None):
        return []
    limit = f"{result.limit_ns / 1e6:g} ms at the {100 * result.share:g}th percentile"
    if result.low is None:
        fallback = f" a rate of {result.probes[0].rate:.3g}" if result.probes else " a closed loop"
        return [f"no rate met {limit}: {result.end_reason}; the requests are those of{fallback}"]
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
        "concurrent": lambda: schedules.online(requests),
        "replay": lambda: schedules.replay(scenario.times_s, batch),
    }
    if scenario.kind not in builders:
        raise ManifestError(f"scenario.kind: {scenario.kind} has no schedule; there are {', '.join(builders)}")
    try:
        return builders[scenario.kind]()
    except UsageError as error:
        raise ManifestError(f"scenario: {error}") from error


def _unusable_schedules(scenario: Scenario) -> list[str]:
    """Return the reasons why a load has no schedule, as sentences; empty if it has one, or needs none."""
    if scenario.kind in ("max-rate", "cold-start") or scenario.driver == "loadgen":
        return []
    try:
        for size in scenario.sizes:
            schedule(scenario, size)
    except ManifestError as error:
        return [str(error)]
    return []


def _measure_cold_starts(manifest: Manifest, folder: Path, prepared: PreparedModel, progress: Progress) -> Requests:
    """Reopen the model for each request: open and one prediction; a simulator reports the time of the prediction."""
    batch = prepared.batch(0, manifest.scenario.batch)
    times = []
    for number in range(manifest.scenario.requests):
        start_ns = time.perf_counter_ns()
        handle = prepared.predictor.open(manifest, folder, "")
        try:
            opened_ns = time.perf_counter_ns()
            took_ns = predictors.answer(prepared.predictor, handle, batch).took_ns
            times.append((start_ns, time.perf_counter_ns() if took_ns is None else opened_ns + took_ns))
        finally:
            prepared.predictor.close(handle)
        progress(manifest.title, number + 1, manifest.scenario.requests)
    starts, ends = (np.array(column, np.int64) for column in zip(*times, strict=True))
    sizes = np.full(len(starts), manifest.scenario.batch, np.int64)
    return Requests(starts, starts, starts, ends, sizes, is_open_loop=False, schedule_length=len(starts))


# --- the process ------------------------------------------------------------------------------------------------------


def _unmet_environment(manifest: Manifest) -> list[str]:
    """Return the manifest's requirements on this process that are not met: environment variables, and LoadGen."""
    missing: list[str] = []
    if manifest.scenario.driver == "loadgen":
        missing += filter(None, [loadgen.install_hint()])
        if manifest.model.command:
            missing.append("scenario.driver: LoadGen uses its own clock, and model.command may use another one")
    return missing + [
        f"the variable {name}={value} is required; a separate process can have it: --agents process"
        for name, value in manifest.software.environment.items()
        if os.environ.get(name) != value
    ]


# --- figures of a batch -----------------------------------------------------------------------------------------------
# Figures of a result as plain data: latencies in milliseconds, rates per second.


def batch_figures(
    scenario: Scenario, batch: int, requests: Requests, search_result: search.SearchResult | None
) -> dict[str, Any]:
    """Return the figures of a batch size.

    Args:
        scenario: the load.
        batch: inputs per request.
        requests: its requests.
        search_result: the search for the highest rate, if the scenario is one.
    """
    summary = latencies.summarise(requests, poisson=scenario.kind in ("poisson", "server", "max-rate"))
    percentiles = {f"p{100 * percentile.share:g}": percentile for percentile in summary.percentiles}
    interval = summary.trimmed_mean_interval_ns
    return {
        "batch": batch,
        "requests": summary.requests,
        "scheduled": requests.schedule_length,
        "inputs": summary.inputs,
        "open_loop": requests.is_open_loop,
        "stopped": summary.stop_reason,
        **{f"{name}_ms": percentile.value_ns / 1e6 for name, percentile in percentiles.items()},
        "intervals_ms": {
            name: [None if end is None else end / 1e6 for end in (percentile.low_ns, percentile.high_ns)]
            for name, percentile in percentiles.items()
        },
        "trimmed_mean_ms": summary.trimmed_mean_ns / 1e6,
        "trimmed_mean_interval_ms": None if interval is None else [end / 1e6 for end in interval.ends],
        "service_ms": summary.service_ns / 1e6,
        "inputs_per_s": summary.inputs_per_second,
        "utilisation": summary.utilisation,
        "late": summary.is_late,
        "little_ratio": None if summary.little is None else _finite(summary.little.ratio),
        "waiting_ms": summary.waiting_ns / 1e6,
        "expected_waiting_ms": None if summary.expected_waiting_ns is None else summary.expected_waiting_ns / 1e6,
        **({} if search_result is None else _search_figures(search_result)),
    }


def _search_figures(result: search.SearchResult) -> dict[str, Any]:
    """Return the highest rate: the interval, and each probed rate."""
    return {
        "rate_low": result.low,
        "rate_high": result.high,
        "rate_estimate": result.estimate,
        "rate_ended": result.end_reason,
        "probes": [
            {
                "rate": probe.rate, "held": probe.status.value, "runs": probe.runs, "requests": probe.requests,
                "percentile_ms": None if probe.value_ns is None else probe.value_ns / 1e6,
                "interval_ms": [None if end is None else end / 1e6 for end in (probe.low_ns, probe.high_ns)],
                "why": probe.reason,
            }
            for probe in result.probes
        ],
    }  # fmt: skip


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
