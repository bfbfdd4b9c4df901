"""Timings that were recorded on a GPU (`shared/gpu` beside the checkout) as a folder of timings of its environment."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import xsp
from xsp import bench
from xsp.bench import steps
from xsp.bench.environment import Environment
from xsp.bench.spec import CacheState, Spec, Status, Timing, untimed
from xsp.bench.timings import Timings
from xsp.graph.node import Graph

L2_BYTES = 60 << 20


def step_name(entry: dict[str, Any]) -> str:
    """Return the name of a step's files: `torchvision-resnet18-b64-train`."""
    return f"{entry['model'].replace(':', '-')}-b{entry['batch']}{'-train' if entry['train'] else ''}"


def read(folder: Path) -> dict[str, Any]:
    with gzip.open(folder / "isolated.json.gz") as file:
        found: dict[str, Any] = json.load(file)
    return found


def graph_of(folder: Path, entry: dict[str, Any]) -> Graph:
    return xsp.graph.load(folder / "graphs" / f"{step_name(entry)}.json.gz")


def environment_of(recorded: dict[str, Any]) -> Environment:
    device = {"kind": "cuda", "name": recorded["device"], "caches": [[2, L2_BYTES]]}
    return Environment({"device": device, **{name: recorded[name] for name in ("torch", "cuda", "cudnn")}})


def stored(folder: Path, timings: Path, only: str | None = None) -> Timings:
    """Write the recorded timings into a folder, with warm and with cold caches, and those of whole steps.

    Args:
        folder: the recorded ones.
        timings: the folder to write.
        only: name of the one step whose timings are written; by default those of all.
    """
    recorded = read(folder)
    found = Timings.open(timings, environment_of(recorded))
    for entry in (each for each in recorded["models"] if only in (None, step_name(each))):
        found.add(_of_step(entry, graph_of(folder, entry), found.environment))
    return found


def _of_step(entry: dict[str, Any], graph: Graph, environment: Environment) -> Iterator[Timing]:
    specs = {
        (spec.block.work_key, state): spec
        for state in (CacheState.WARM, CacheState.COLD)
        for spec, _ in bench.specs(graph, environment=environment, state=state)
    }
    for call in entry["calls"]:
        times = {"host_ns": call["issue_ms"] * 1e6, "cold_ns": call["cold_ms"] * 1e6}
        for state, name in ((CacheState.WARM, "warm_ms"), (CacheState.COLD, "cold_ms")):
            yield _timing(specs[call["work_key"], state], call[name] * 1e6, **times)
    waited, replayed = steps.specs(graph)
    yield _timing(waited, entry["eager"]["synced_ms"] * 1e6, host_ns=entry["eager"]["issue_ms"] * 1e6)
    if "graphed" in entry:
        yield _timing(replayed, entry["graphed"]["device_ms"] * 1e6)


def _timing(spec: Spec, ns: float, **others: float) -> Timing:
    return replace(
        untimed(spec), status=Status.OK, samples=3, trimmed_ns=ns, low_ns=ns, high_ns=ns, least_ns=ns, device_ns=ns,
        taken_ns=1, **others,  # type: ignore[arg-type]
    )  # fmt: skip
