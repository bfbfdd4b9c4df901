"""Does the same evaluation give the same result with every agent, and is it distinguished from a changed one?

Ways: in this process, in a separate process, by an agent on Ray (if Ray is installed), and with the requests of
MLPerf's LoadGen (if it is installed). They take turns; the median latency and the outputs, bit for bit, are compared
with those of the first way.

Reproduce: results of unchanged manifests, each in a separate process, and results of manifests with one change. The
verdict should be `same` for the first and `different` for the second.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from parts import turns

from xsp.evaluate import agents, rayagents, reading, results, standings, transports
from xsp.evaluate.agents import Agent
from xsp.evaluate.load import loadgen
from xsp.evaluate.manifest import Manifest
from xsp.evaluate.quality.judging import Judgement, Verdict

COLUMNS = ("what", "found", "goal", "more")
MODELS = ("torchvision:squeezenet1_1", "torchvision:resnet18", "timm:mobilenetv3_small_100")
REQUESTS = 60
GOAL_DIFFERENCE = 0.05
"""Goal: maximum relative difference of the median latency between two ways."""

PAUSE_S = 3.0
"""Seconds before an evaluation for processes of the previous one to end; these made others twice as slow."""

GOAL_VERDICTS = 0.95
"""Goal: minimum share of right verdicts."""

STEPS = [
    {"decode": {"color_mode": "RGB"}},
    {"resize": {"size": 240}},
    {"crop": {"size": 224}},
    {"normalise": {"divide": 255, "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}},
    {"layout": {"to": "CHW"}},
]

Plain = dict[str, Any]


def plain(source: str, requests: int) -> Plain:
    """Return a manifest as plain data, in the form that a user writes."""
    return {
        "name": source.partition(":")[2],
        "model": {
            "name": source.partition(":")[2], "source": source, "seed": 0, "task": "image-classification",
            "inputs": [{"type": "image", "steps": copy.deepcopy(STEPS)}],
        },
        "software": {"threads": 1},
        "dataset": {"source": "synthetic:images", "samples": 8},
        "scenario": {"kind": "online", "requests": requests, "warmup": 5},
    }  # fmt: skip


def manifest(content: Mapping[str, Any]) -> Manifest:
    """Return a checked manifest."""
    return reading.of_plain(dict(content)).manifest


def show_nothing(label: str, completed: int, total: int) -> None:
    """Show no progress."""


def run_manifest(agent: Agent, content: Manifest, store: Path) -> results.Result:
    """Run a manifest by an agent, and return the result."""
    return results.read(agent.submit(content, Path(), agents.Options(store, trusted=True), show_nothing))


@contextmanager
def ways() -> Iterator[dict[str, tuple[Agent, str]]]:
    """Yield the agent that runs manifests, and the driver that issues their requests, by name of the way."""
    available: dict[str, tuple[Agent, str]] = {
        "in this process": (transports.local_agents("local")[0], "xsp"),
        "in its own process": (transports.local_agents("process")[0], "xsp"),
    }
    if loadgen.install_hint() is None:
        available["by LoadGen"] = (transports.local_agents("local")[0], "loadgen")
    else:
        turns.say("  LoadGen is not installed: left out")
    try:
        import ray
    except ImportError:
        turns.say("  Ray is not installed: left out")
        yield available
        return
    ray.init(
        num_cpus=2, namespace=rayagents.NAMESPACE, include_dashboard=False, log_to_driver=False,
        object_store_memory=100 << 20,
    )  # fmt: skip
    try:
        rayagents.start("bench", {}, Path(), trusted=True)
        available["by Ray"] = (rayagents.connected_agents()[0][0], "xsp")
        yield available
    finally:
        ray.shutdown()


def compare_ways(report: turns.Report, options: argparse.Namespace, store: Path) -> None:
    """Add rows that compare latencies and outputs of each way with those in this process."""
    draw = random.Random(options.seed)
    with ways() as agents_by_way:
        for source in MODELS[:1] if options.quick else MODELS:
            medians: dict[str, list[float]] = {name: [] for name in agents_by_way}
            digests: dict[str, set[str]] = {name: set() for name in agents_by_way}
            for turn in range(options.rounds + 1):
                for name in draw.sample(list(agents_by_way), k=len(agents_by_way)):
                    time.sleep(PAUSE_S)
                    agent, driver = agents_by_way[name]
                    content = plain(source, 10 if options.quick else REQUESTS)
                    content["scenario"]["driver"] = driver
                    result = run_manifest(agent, manifest(content), store)
                    digests[name].add(result.content["outputs"]["digest"])
                    if turn:  # the first round opens libraries and files
                        medians[name].append(turns.median([*result.requests().service_ns.tolist()]) / 1e6)
            base_way, *other_ways = agents_by_way
            for name in other_ways:
                pairs = zip(medians[name], medians[base_way], strict=True)
                ratio = turns.middle([a / b for a, b in pairs])
                is_equal = digests[name] == digests[base_way] and len(digests[base_way]) == 1
                is_met = abs(ratio.value - 1) <= GOAL_DIFFERENCE
                report.add(
                    [
                        f"{source.partition(':')[2]}, {name}", f"{ratio.text(3)} of the median in this process",
                        f"within {GOAL_DIFFERENCE:.0%}: {'met' if is_met else 'missed'}",
                        "outputs equal bit for bit" if is_equal else "outputs differ",
                    ],
                    medians_ms=medians[name], first_ms=medians[base_way], ratio=ratio, equal=is_equal,
                )  # fmt: skip


def _threads(content: Plain) -> None:
    content["software"]["threads"] = 2


def _precision(content: Plain) -> None:
    content["model"]["inputs"][0]["steps"] += [{"cast": {"to": "float16"}}, {"cast": {"to": "float32"}}]


def _resize(content: Plain) -> None:
    content["model"]["inputs"][0]["steps"][1]["resize"]["method"] = "nearest"


def _colours(content: Plain) -> None:
    content["model"]["inputs"][0]["steps"][0]["decode"]["color_mode"] = "BGR"


def _normalisation(content: Plain) -> None:
    content["model"]["inputs"][0]["steps"][3]["normalise"] = {"divide": 127.5, "mean": [1, 1, 1], "std": [1, 1, 1]}


def _batch(content: Plain) -> None:
    content["scenario"]["batch"] = 4


def _seed(content: Plain) -> None:
    content["model"]["seed"] = 1


CHANGES: Mapping[str, Callable[[Plain], None]] = {
    "threads": _threads, "precision of the input": _precision, "resize filter": _resize, "order of colours": _colours,
    "normalisation": _normalisation, "batch": _batch, "weights": _seed,
}  # fmt: skip
UNCHANGED = "unchanged"
VERSION = "version of PyTorch"
"""A change without another installed version: the stored result is edited to name another one."""


def compare_reproductions(report: turns.Report, options: argparse.Namespace, store: Path) -> None:
    """Add rows on how often `reproduce` gives the right verdict for unchanged and changed manifests."""
    judgements: dict[str, list[Judgement]] = {}
    for source in MODELS[:1] if options.quick else MODELS:
        content = plain(source, 10 if options.quick else 40)
        before = _runner(content, store)()
        for _ in range(options.rounds):
            judgements.setdefault(UNCHANGED, []).append(standings.reproduce(before, _runner(content, store), 5))
        for name, change in CHANGES.items():
            changed_content = copy.deepcopy(content)
            change(changed_content)
            judgements.setdefault(name, []).append(standings.reproduce(before, _runner(changed_content, store), 2))
        edited = _with_another_version(before)
        judgements.setdefault(VERSION, []).append(standings.reproduce(edited, _runner(content, store), 2))
    _add_verdicts(report, judgements)


def _runner(content: Plain, store: Path) -> Callable[[], results.Result]:
    """Return a function that runs a manifest in a separate process and returns the result."""
    agent, checked = transports.local_agents("process")[0], manifest(content)
    return lambda: run_manifest(agent, checked, store)


def _with_another_version(original: results.Result) -> results.Result:
    path = original.path / "result.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["agent"]["packages"] |= {"torch": "2.0.0"}
    path.write_text(json.dumps(content), encoding="utf-8")
    return results.read(original.path)


def _add_verdicts(report: turns.Report, judgements: Mapping[str, Sequence[Judgement]]) -> None:
    shares = {}
    for name, case_judgements in judgements.items():
        expected = Verdict.SAME if name == UNCHANGED else Verdict.DIFFERENT
        shares[name] = [judgement.verdict is expected for judgement in case_judgements]
        other_verdicts = sorted(
            {judgement.verdict.value for judgement in case_judgements if judgement.verdict is not expected}
        )
        by_outputs = sum(judgement.by("outputs") is Verdict.DIFFERENT for judgement in case_judgements)
        report.add(
            [
                f"reproduce, {name}", f"{expected.value} {sum(shares[name])} of {len(case_judgements)} times", "",
                "; ".join([f"outputs differ {by_outputs} times", *(f"also {verdict}" for verdict in other_verdicts)]),
            ],
            verdicts=[judgement.verdict.value for judgement in case_judgements], by_outputs=by_outputs,
        )  # fmt: skip
    all_changed = [is_right for name, outcomes in shares.items() if name != UNCHANGED for is_right in outcomes]
    for name, outcomes in ((UNCHANGED, shares[UNCHANGED]), ("changed", all_changed)):
        share = sum(outcomes) / len(outcomes)
        goal_text = "met" if share >= GOAL_VERDICTS else "missed"
        report.notes.append(
            f"{name}: correct in {share:.0%} of {len(outcomes)} (goal {GOAL_VERDICTS:.0%}: {goal_text})"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = turns.parse(turns.parser(__doc__, rounds=7), arguments)
    report = turns.Report("same_evaluation", "The same evaluation in other ways, repeated, and changed", COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        compare_ways(report, options, Path(folder))
        compare_reproductions(report, options, Path(folder))
    report.finish(options)


if __name__ == "__main__":
    main()
