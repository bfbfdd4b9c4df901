"""If some models are requested often and most rarely, is a store that holds half of them faster than no store?

Requests are drawn from a Pareto distribution (scale 1, shape 1) over the models, in random order; the store holds half
of the bytes of all active models. Clients, 1 to 10 at a time, answer the same requests by `load_file` of safetensors
and by `attach`, in turns: an answer consists of loading the weights into a module without values and one call. The 99th
percentiles (nearest rank) are compared model by model. Several clients share the cores, which affects both ways.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parts import share_worker, steps, turns

from xsp import processes
from xsp.share import client, measuring
from xsp.share.loadworker import ATTACH, MMAP

CLIENTS, ACTIVE = (1, 2, 4, 6, 8, 10), (0.2, 0.4, 0.6, 0.8, 1.0)
"""Numbers of concurrent clients, and shares of the models that are active."""

QUICK_CLIENTS, QUICK_ACTIVE = (1, 2), (1.0,)
REQUESTS, QUICK_REQUESTS = 20, 6
"""Number of requests of each client in a round, by each way."""

CAPACITY_SHARE, CAPACITY_FACTOR = 0.5, 1.05
"""Capacity of the store: a share of the active bytes, but at least a multiple of the largest model, so that it fits."""

PERCENTILE = 99


def main(arguments: Sequence[str] | None = None) -> None:
    options = turns.parse(steps.add_options(turns.parser(__doc__, rounds=3)), arguments)
    report = turns.Report(
        "share_load",
        "Requests of a Pareto workload by `attach` and by `load_file`: the store has room for half of the active bytes",
        ("models active", "clients", "requests", f"p{PERCENTILE} load_file ÷ attach", "median load_file ÷ attach",
         "hits %", "evictions", "no room %"),
    )  # fmt: skip
    selection = steps.selected_models(options)
    stored = turns.stored_rows(options.out)
    deadline = steps.deadline(options)
    counts, shares = (QUICK_CLIENTS, QUICK_ACTIVE) if options.quick else (CLIENTS, ACTIVE)
    cells = [(share, count) for share in shares for count in counts]
    with tempfile.TemporaryDirectory(prefix="xsp-") as folder, contextlib.ExitStack() as stack:
        folder_path, workers = Path(folder), list[processes.WorkerProcess]()
        sizes: list[int] = []
        names = {cell: f"{len(selection)} {cell[0]:g} {cell[1]} {options.rounds} {options.seed}" for cell in cells}
        has_failed = False
        with report.until_interrupted():
            for cell, name in names.items():
                if name in stored or has_failed or time.monotonic() > deadline:
                    continue
                label = f"{cell[0]:.0%} of {len(selection)} models, {cell[1]} clients"
                has_failed = True
                with report.trying(label):
                    sizes = sizes or _write_weights(selection, folder_path, options.seed)
                    while len(workers) < cell[1]:
                        workers.append(share_worker.start_worker())
                        stack.callback(workers[-1].end)
                    turns.say(label)
                    stored[name] = _measure_cell(selection, sizes, cell, workers[: cell[1]], folder_path, options)
                    turns.store_row(options.out, name, stored[name])
                    has_failed = False  # else a client may have ended, whom all further cells need
    for cell, name in names.items():
        if name in stored:
            _add(report, cell, len(selection), stored[name])
    _conclude(report)
    report.finish(options)


def _write_weights(selection: Sequence[str], folder: Path, seed: int) -> list[int]:
    """Write the weights of all models; return their bytes."""
    turns.say(f"writing the weights of {len(selection)} models")
    with contextlib.ExitStack() as stack:
        worker = share_worker.start_worker()
        stack.callback(worker.end)
        sizes = []
        for number, text in enumerate(selection):
            spec = steps.spec_of(text)
            worker.ask({"do": "prepare", "number": number, "folder": str(folder), "spec": spec, "seed": seed})
            sizes.append(share_worker.read_answer(worker)["nbytes"])
    return sizes


def draw_requests(models: Sequence[int], count: int, draw: random.Random) -> list[int]:
    """Return `count` requests for models, the first one most often: a Pareto variate of scale 1 and shape 1."""
    requests: list[int] = []
    while len(requests) < count:
        index = int(draw.paretovariate(1.0)) - 1
        if index < len(models):
            requests.append(models[index])
    return requests


def _measure_cell(
    selection: Sequence[str],
    sizes: Sequence[int],
    cell: tuple[float, int],
    workers: Sequence[processes.WorkerProcess],
    place: Path,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Return the nanoseconds of requests by way and model, and the hits, misses and evictions of the store."""
    share, count = cell
    order = random.Random(options.seed).sample(range(len(selection)), len(selection))
    active = order[: max(1, round(share * len(selection)))]
    capacity = int(
        max(
            CAPACITY_SHARE * sum(sizes[model] for model in active),
            CAPACITY_FACTOR * max(sizes[model] for model in active),
        )
    )
    requests = QUICK_REQUESTS if options.quick else REQUESTS
    draw = random.Random(f"{options.seed} {share:g} {count}")
    for worker in workers:
        for number in active:
            worker.ask({"do": "open", "number": number, "folder": str(place), "spec": steps.spec_of(selection[number])})
            share_worker.read_answer(worker)
    times_by_way: dict[str, dict[int, list[int]]] = {MMAP: {}, ATTACH: {}}
    hits: list[bool | None] = []
    with measuring.running_store(place / "s", capacity):
        for turn in range(options.rounds + 1):
            requests_by_client = [draw_requests(active, requests, draw) for _ in workers]
            for way in draw.sample((MMAP, ATTACH), 2):
                for answer, number in _round(workers, requests_by_client, way, place):
                    if turn:  # the first one fills the store and the page cache
                        times_by_way[way].setdefault(number, []).append(answer["ns"])
                        if way == ATTACH:
                            hits.append(answer["hit"])
        status = client.status(place / "s")
    return {
        "models": {
            way: {selection[number]: times for number, times in times_by_model.items()}
            for way, times_by_model in times_by_way.items()
        },
        "hits": hits.count(True),
        "misses": hits.count(False),
        "no_room": hits.count(None),
        "evictions": status["evictions"],
        "capacity": capacity,
        "active": len(active),
    }


def _round(
    workers: Sequence[processes.WorkerProcess], requests: Sequence[Sequence[int]], way: str, place: Path
) -> list[tuple[dict[str, Any], int]]:
    """Have all clients concurrently answer their requests, one after the other; return answers with their models."""
    for worker, numbers in zip(workers, requests, strict=True):
        for number in numbers:
            worker.ask({"do": "request", "number": number, "folder": str(place), "way": way})
    return [
        (share_worker.read_answer(worker), number)
        for worker, numbers in zip(workers, requests, strict=True)
        for number in numbers
    ]


def _nearest_rank(values: Sequence[float], percent: float) -> float:
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def _gain(row: dict[str, Any], percent: float) -> float | None:
    """Return the geometric mean over models of the time of `load_file` over that of `attach`, at a percentile."""
    ways = row["models"]
    gains = [
        _nearest_rank(ways[MMAP][text], percent) / _nearest_rank(ways[ATTACH][text], percent)
        for text in ways[MMAP]
        if text in ways[ATTACH]
    ]
    return statistics.geometric_mean(gains) if gains else None


def _add(report: turns.Report, cell: tuple[float, int], models: int, row: dict[str, Any]) -> None:
    count = row["hits"] + row["misses"] + row["no_room"]
    gains = [_gain(row, percent) for percent in (PERCENTILE, 50)]
    report.rows.append(
        [
            f"{row['active']} of {models}", str(cell[1]), str(count),
            *("–" if gain is None else f"{gain:.2f}" for gain in gains),
            f"{100 * row['hits'] / count:.0f}", str(row["evictions"]), f"{100 * row['no_room'] / count:.0f}",
        ]
    )  # fmt: skip
    report.data[f"{cell[0]:g} {cell[1]}"] = {**row, "gain": gains[0], "clients": cell[1]}


def _conclude(report: turns.Report) -> None:
    """Add notes on where the store gains most and least, and on models with few requests."""
    rows = [row for row in report.data.values() if row["gain"] is not None]
    if not report.data:
        report.notes.append("Nothing was measured.")
    if not rows:
        return
    best, worst = max(rows, key=lambda row: row["gain"]), min(rows, key=lambda row: row["gain"])
    for label, row in (("Best", best), ("Worst", worst)):
        report.notes.append(
            f"{label}: {row['gain']:.2f} times as fast at the {PERCENTILE}th percentile, geometric mean over models, "
            f"with {row['active']} models active and {row['clients']} clients."
        )
    fewest = min(len(times) for row in rows for times in row["models"][ATTACH].values())
    report.notes.append(
        f"The {PERCENTILE}th percentile of fewer than 100 requests is the longest one; the fewest for a model are "
        f"{fewest}."
    )


if __name__ == "__main__":
    main()
