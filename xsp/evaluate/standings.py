"""Results side by side: comparisons of several, rankings of a task, and whether a result could be reproduced."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xsp import comparison
from xsp.bench import environment
from xsp.errors import UsageError, XspError
from xsp.evaluate import agents, contention, pipeline, reading
from xsp.evaluate.manifest import Manifest
from xsp.evaluate.quality import choices, divergence
from xsp.evaluate.quality.judging import Judgement, Outcome, RunContext, constant, judge, settle
from xsp.evaluate.results import Result
from xsp.scrub import plain

MACHINE_FACTS = ("cpu", "machine", "cores", "memory_gib", "devices", "instructions", "caches", "nodes")
"""Facts of an environment that describe its hardware."""


LABEL_FIELDS = ("name", "description", "reference")


def outcome(result: Result) -> Outcome:
    """Return a result as input for `judge`: outputs, latencies by batch size, and circumstances."""
    latencies, contexts = {}, {}
    facts = result.content["environment"]
    slowdown = contention.slowdown(facts.get("noted", {}), facts["equal"].get("cores"))
    if result.content.get("simulated"):
        slowdown = 1.0
    for part in result.parts:
        requests = result.requests(part["batch"])
        # searches end at different rates, and queues amplify small differences: only service times are comparable
        waiting = "rate_low" in part or bool(part["open_loop"])
        name = f"batch {part['batch']}" + (", without waiting" if waiting else "")
        latencies[name] = [requests.service_ns if waiting else requests.latency_ns]
        processor = part.get("processor_ms")
        contexts[name] = [RunContext(slowdown, None if processor is None else 1e6 * processor)]
    return Outcome(
        result.outputs() or None,
        latencies,
        circumstances(result),
        str(result.manifest["model"].get("precision", "float32")),
        contexts,
    )


def circumstances(result: Result) -> dict[str, str]:
    """Return the fields of the manifest, the environment and the versions of packages, each as text.

    Omitted fields have their defaults; the manifest's name, description and reference are left out, as irrelevant.
    """
    agent = result.content["agent"]
    manifest = pipeline.canonical(reading.of_plain(result.manifest).manifest, with_defaults=True)
    fields = manifest.model_dump(mode="json", exclude=set(LABEL_FIELDS))
    return {
        **{f"manifest {name}": value for name, value in _flat(fields)},
        "threads": _text(result.content.get("threads")),
        **{name: _text(value) for name, value in result.content["environment"]["equal"].items()},
        **{name: str(version) for name, version in agent["packages"].items()},
        "python": str(agent["python"]),
        "samples": str(result.content["samples"]["checksum"]),
        "host": str(agent["host"]),
        "agent": str(agent["name"]),
        "xsp": str(result.content["xsp"]),
    }


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, child in value.items():
            yield from _flat(child, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list) and any(isinstance(element, Mapping) for element in value):
        for index, element in enumerate(value):
            yield from _flat(element, f"{path}[{index}]")
    else:
        yield path, _text(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def reproduce(before: Result, repeat: Callable[[], Result], most_repeats: int) -> Judgement:
    """Return whether repetitions of an evaluation give the same result.

    Args:
        before: the stored result.
        repeat: repeats the evaluation.
        most_repeats: maximum number of repetitions; only latencies need more than one.
    """
    return settle(outcome(before), lambda: outcome(repeat()), most_repeats)


# --- comparisons ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """A result compared with the first one."""

    before: Result
    after: Result
    differences: Mapping[str, tuple[str | None, str | None]]
    """Circumstances that differ, by name; None if one result does not have it."""

    divergences: Mapping[str, Mapping[str, float | str]]
    """By output that both have in the same shape: see `divergence.all_of`."""

    has_equal_outputs: bool
    constant_outputs: str
    """Why the outputs of both are constant, so that equality proves nothing; empty if they are not."""

    judgement: Judgement
    by_layer: comparison.Comparison | str | None
    """Comparison of the traces, or why they cannot be compared; None if one result has no trace."""


def compare(results: Sequence[Result]) -> list[Comparison]:
    """Return the comparison of each further result with the first.

    Raises:
        UsageError: there are fewer than two.
    """
    if len(results) < 2:
        raise UsageError("give two or more results to compare: `xsp evaluate list` lists them")
    return [_compare_pair(results[0], result) for result in results[1:]]


def _compare_pair(before: Result, after: Result) -> Comparison:
    facts_before, facts_after = circumstances(before), circumstances(after)
    differences = {
        name: (facts_before.get(name), facts_after.get(name))
        for name in dict.fromkeys([*facts_before, *facts_after])
        if facts_before.get(name) != facts_after.get(name)
    }
    outputs_before, outputs_after = before.outputs(), after.outputs()
    divergences: dict[str, Mapping[str, float | str]] = {}
    for name in outputs_before:
        if (
            name in outputs_after
            and outputs_before[name].shape == outputs_after[name].shape
            and outputs_before[name].dtype.kind == "f"
            and outputs_before[name].ndim
            and outputs_before[name].size
        ):
            rows = (
                outputs_before[name].reshape(len(outputs_before[name]), -1),
                outputs_after[name].reshape(len(outputs_after[name]), -1),
            )
            if constant({name: outputs_before[name]}) and constant({name: outputs_after[name]}):
                continue
            try:
                divergences[name] = divergence.all_of(*rows)
            except (XspError, ValueError):
                continue
    has_equal_outputs = before.content["outputs"]["digest"] == after.content["outputs"]["digest"]
    judgement = judge(outcome(before), outcome(after))
    explanation = constant(outputs_before) and constant(outputs_after)
    return Comparison(
        before,
        after,
        differences,
        divergences,
        has_equal_outputs,
        explanation,
        judgement,
        _compare_traces(before, after),
    )


def _compare_traces(before: Result, after: Result) -> comparison.Comparison | str | None:
    run_before, run_after = before.run, after.run
    if run_before is None or run_after is None:
        return None
    from xsp.comparison import comparable

    try:
        return comparison.compare(*comparable.load([run_before], [run_after]))
    except XspError as error:
        return str(error)


# --- the leaderboard --------------------------------------------------------------------------------------------------


MIN_SIZES = 3
"""Least number of batch sizes of a model about which a conclusion is drawn."""


@dataclass(frozen=True)
class Standing:
    """Results of one manifest, batch size, software and machine; the newest provides the figures."""

    newest: Result
    part: Mapping[str, Any]
    count: int
    software: str
    """Six digits of a hash of all versions: rows with other software have other digits."""

    machine: str


def software_of(result: Result) -> str:
    """Return six digits of a hash of the versions, libraries and variables of a result."""
    agent, equal_facts = result.content["agent"], result.content["environment"]["equal"]
    return _software_digits(equal_facts, agent["packages"], agent["python"], result.manifest.get("software", {}))


def _software_digits(equal_facts: Mapping[str, Any], packages: Any, python: str, software: Any) -> str:
    versions = {name: value for name, value in equal_facts.items() if name not in MACHINE_FACTS}
    return _digits([versions, packages, python, software])


def without_result(manifests: Sequence[Manifest], results: Sequence[Result]) -> list[Manifest]:
    """Return the manifests that have no result with this software on this machine."""
    equal_facts, facts = environment.current_environment().properties, agents.local_facts(devices=False)
    machine = _digits({name: equal_facts.get(name) for name in MACHINE_FACTS})
    existing = {(result.identity, software_of(result)) for result in results if machine_of(result) == machine}
    return [
        manifest
        for manifest in manifests
        if (
            manifest.identity,
            _software_digits(equal_facts, dict(facts.packages), facts.python, manifest.plain().get("software", {})),
        )
        not in existing
    ]


def machine_of(result: Result) -> str:
    """Return six digits of a hash of the hardware of a result."""
    equal_facts = result.content["environment"]["equal"]
    return _digits({name: equal_facts.get(name) for name in MACHINE_FACTS})


def _digits(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:6]


def leaderboard(results: Sequence[Result], task: str | None = None, by: str = "inputs_per_s") -> list[Standing]:
    """Return rows, best first: highest throughput, or lowest latency.

    Args:
        results: oldest first.
        task: task of the models; all if None.
        by: `inputs_per_s`, `p50_ms`, `p90_ms`, `p99_ms`; `rate`, the lower end of the highest rate, only for results
            of such a search; or `top1`, the share of correctly classified samples, only for results that have it.
    """
    column = "rate_low" if by == "rate" else by
    rows: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        if task is None or result.manifest["model"].get("task") == task:
            for part in result.parts:
                if (by == "rate" and "rate_low" not in part) or (by == "top1" and _top1(result) is None):
                    continue
                key = result.identity, part["batch"], software_of(result), machine_of(result)
                rows.setdefault(key, []).append(result)
    ranking = [
        Standing(
            group[-1], next(part for part in group[-1].parts if part["batch"] == batch), len(group), software, machine
        )
        for (_, batch, software, machine), group in rows.items()
    ]
    if by == "top1":
        return sorted(ranking, key=lambda row: (-(_top1(row.newest) or 0.0), row.newest.name, row.part["batch"]))
    sign = -1 if by in ("inputs_per_s", "rate") else 1
    return sorted(
        ranking, key=lambda row: (row.part[column] is None, sign * (row.part[column] or 0.0), row.newest.name)
    )


def conclusions(rows: Sequence[Standing], prices: Sequence[choices.Price] = ()) -> list[str]:
    """Return what the rows of a leaderboard say together, in lines of text.

    The lines are: the Pareto front; for models with at least three batch sizes, the best one and the one from which
    doubling no longer pays; rank correlations of accuracy; the cost of a million inputs on machines with a price.

    Args:
        rows: as listed; a row is named by its number, from 1.
        prices: prices by machine, as the leaderboard names machines.
    """
    figures = [
        {name: row.part[name] for name in ("inputs_per_s", "p99_ms")} | {"top1": _top1(row.newest)} for row in rows
    ]
    is_labelled = any(row["top1"] is not None for row in figures)
    lines = []
    if len(rows) > 1:
        front = choices.pareto(figures, ["inputs_per_s", *["top1"] * is_labelled], ["p99_ms"])
        names = "inputs/s, p99 and top-1" if is_labelled else "inputs/s and p99"
        lines.append(f"no other row is better in {names} together than {', '.join(str(index + 1) for index in front)}")
    by_model: dict[tuple[str, ...], dict[int, float]] = {}
    for row, values in zip(rows, figures, strict=True):
        if values["inputs_per_s"]:
            key = row.newest.manifest["model"]["name"], row.newest.identity, row.software, row.machine
            by_model.setdefault(key, {})[row.part["batch"]] = values["inputs_per_s"]
    for (name, *_), sizes in by_model.items():
        if len(sizes) >= MIN_SIZES:
            scaling = choices.scalability(sizes)
            lines.append(
                f"{plain(name)}: most inputs/s with batch {scaling.best_size}; beyond {scaling.plateau_size} doubling "
                f"gains at most {100 * choices.LEAST_GAIN:.0f} %"
            )
    correlations = choices.rank_correlations(figures, ["top1", "p99_ms", "inputs_per_s"])
    lines += [
        f"rank correlation of top-1 and {name}: {value:.2f}"
        for name, value in (("p99", correlations["top1", "p99_ms"]), ("inputs/s", correlations["top1", "inputs_per_s"]))
        if value is not None
    ]
    for number, (row, values) in enumerate(zip(rows, figures, strict=True), 1):
        rate = values["inputs_per_s"]
        if prices and rate and (cost := choices.cost_per_million(rate, row.machine, prices)) is not None:
            lines.append(f"{number}: a million inputs cost {cost.amount:.3g} {plain(cost.currency)} ({cost.date})")
    return lines


def _top1(result: Result) -> float | None:
    share: float | None = (result.accuracy or {}).get("top1")
    return share
