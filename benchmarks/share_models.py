"""Do weights load faster from the machine's store than in other ways, and how much memory do they take?

For each model, processes take turns as in `xsp share measure`: `load_file` of safetensors, which maps the file,
`torch.load`, and `attach`, with the file in the page cache and the weights in the store. A pre-forked server, which
already has the weights and answers each request in a forked child, takes turns with children that attach. The memory of
processes is measured for every seventh model. Notes report the time of attaching to files of zeros, by bytes and by
tensors, without touching a page.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from parts import share_worker, steps, turns
from parts.share_worker import FORK

from xsp import processes
from xsp.bench.timings import Timings
from xsp.errors import ShareError
from xsp.share import client, estimate, measuring, savings
from xsp.share.loadworker import ATTACH, MMAP, PICKLE

PROCESSES = 8
MEMORY_EVERY = 7
"""Memory is measured for one in this many models, since it takes a minute."""

MIB = 1 << 20
LEAST_BYTES = 20e6
"""Minimum bytes of weights for the memory goal: the memory of a process varies by as much from start to start."""

FILES = ((500 * MIB, 1), (500 * MIB, 1_000), (8 * MIB, 1_000), (8 * MIB, 4_000))
"""Bytes and tensors of the files of zeros."""

MOST_ATTACH_MS, MOST_TENSOR_US, MOST_MEMORY, LEAST_GAIN, LEAST_RIGHT = 10.0, 5.0, 1.15, 2.0, 0.9
"""Goals: maximum milliseconds to attach to 500 MB, microseconds for each further tensor, and shared memory as a
multiple of the weights; minimum gain where loading is half of the time, and share of right predictions whether sharing
pays."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = steps.add_options(turns.parser(__doc__, rounds=6))
    parser.add_argument(
        "--cold", action="store_true", help="also weights that are neither in the store nor in the page cache"
    )
    options = turns.parse(parser, arguments)
    report = turns.Report(
        "share_models",
        f"Loading and first call by `attach`, compared with the other ways; memory of {PROCESSES} processes",
        ("model", "MB", "attach ms", "load ÷ attach: load_file", "torch.load", "loading, % of unshared",
         "with first call ÷ attach: load_file", "torch.load", "pre-forked", "shared copy ÷ weights",
         "memory, load_file ÷ attach"),
    )  # fmt: skip
    selection = steps.selected_models(options)
    stored = turns.stored_rows(options.out)
    deadline = steps.deadline(options)
    with report.until_interrupted():
        for number, text in enumerate(selection, 1):
            if not _is_complete(stored.get(text), options.cold) and time.monotonic() < deadline:
                turns.say(f"{number}/{len(selection)} {text}")
                with report.trying(text):
                    stored[text] = _measure_model(text, options, selection.index(text) % MEMORY_EVERY == 0)
                    turns.store_row(options.out, text, stored[text])
    measured_models = [text for text in selection if _is_complete(stored.get(text), False)]
    for text in measured_models:
        _add(report, text, stored[text])
    _conclude(report, [stored[text] for text in measured_models], len(selection))
    if report.is_complete:  # an interrupt is no time for further measurements
        report.notes += _decision_notes([stored[text] for text in measured_models])
        with tempfile.TemporaryDirectory(prefix="xsp-") as folder:
            report.notes += _attachment_notes(Path(folder), options)
    report.finish(options)


def _measure_model(text: str, options: argparse.Namespace, with_memory: bool) -> dict[str, Any]:
    """Return the milliseconds of each turn by way, and the bytes of memory."""
    process_count = measuring.CONCURRENT_PROCESSES if options.quick else PROCESSES
    measurement = measuring.measure(
        steps.spec_of(text),
        turns=options.rounds,
        seed=options.seed,
        states=(measuring.WARM, measuring.COLD) if options.cold else (measuring.WARM,),
        concurrent=process_count if with_memory else 0,
    )
    return {
        "bytes": measurement.nbytes,
        "tensors": measurement.tensors,
        "load_ms": _milliseconds(measurement, measuring.WARM, "load_ns"),
        "total_ms": _milliseconds(measurement, measuring.WARM, "total_ns"),
        "cold_ms": _milliseconds(measurement, measuring.COLD, "total_ns"),
        "memory": {way: list(values) for way, values in measurement.memory.items()},
        "forked_ms": _against_children(text, options),
    }


def _against_children(text: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the milliseconds to the answer of children that attach, and of children of a pre-forked server."""
    spec, draw = steps.spec_of(text), random.Random(options.seed)
    times: dict[str, list[float]] = {ATTACH: [], FORK: []}
    with tempfile.TemporaryDirectory(prefix="xsp-") as folder:
        request = {"number": 0, "folder": folder, "spec": spec, "seed": options.seed}
        with _worker() as worker, _worker() as server:
            worker.ask({"do": "prepare", **request})
            nbytes = share_worker.read_answer(worker)["nbytes"]
            workers = {ATTACH: worker, FORK: server}
            for way, process in workers.items():
                process.ask({"do": "open", "way": way, **request})
                share_worker.read_answer(process)
            with measuring.running_store(Path(folder) / "s", 2 * nbytes + (64 << 20)):
                client.attach(Path(folder) / "0.safetensors", Path(folder) / "s")
                for _ in range(options.rounds):
                    for way in draw.sample((ATTACH, FORK), 2):
                        workers[way].ask({"do": "request", "child": True, "way": way, **request})
                        times[way].append(share_worker.read_answer(workers[way])["ns"] / 1e6)
    return times


@contextlib.contextmanager
def _worker() -> Iterator[processes.WorkerProcess]:
    worker = share_worker.start_worker()
    try:
        yield worker
    finally:
        worker.end()


def _milliseconds(measurement: measuring.Measurement, state: str, field: str) -> dict[str, list[float]]:
    """Return the milliseconds of the turns in a state, by way."""
    return {
        way: [ns / 1e6 for ns in getattr(turn_times, field)]
        for (way, turn_state), turn_times in measurement.times.items()
        if turn_state == state
    }


def _is_complete(row: dict[str, Any] | None, cold: bool) -> bool:
    return row is not None and "forked_ms" in row and (not cold or bool(row["cold_ms"]))


def _time_ratio(row: dict[str, Any], field: str, way: str) -> turns.Figure:
    """Return the ratio of a way's time to that of `attach`, from the pairs of turns."""
    pairs = list(zip(row[field][way], row[field][ATTACH], strict=True))
    return turns.bootstrap(pairs, lambda rows: statistics.median(a / b for a, b in rows))


def _loading_share(row: dict[str, Any]) -> float:
    """Return the share of loading in the time of the faster unshared way."""
    way = min((MMAP, PICKLE), key=lambda candidate: statistics.median(row["total_ms"][candidate]))
    return statistics.median(row["load_ms"][way]) / statistics.median(row["total_ms"][way])


def _shared_copies(row: dict[str, Any]) -> float | None:
    """Return the bytes that processes with `attach` share, store included, as a multiple of the weights."""
    if ATTACH not in row["memory"]:
        return None
    memory = measuring.ProcessMemory(*row["memory"][ATTACH])
    return (memory.single_bytes - memory.further_bytes) / row["bytes"]


def _add(report: turns.Report, text: str, row: dict[str, Any]) -> None:
    copy = _shared_copies(row)
    memory = {way: measuring.ProcessMemory(*values).of(PROCESSES) for way, values in row["memory"].items()}
    report.add(
        [
            text, f"{row['bytes'] / 1e6:.1f}", turns.middle(row["load_ms"][ATTACH]).text(2),
            _time_ratio(row, "load_ms", MMAP).text(2), _time_ratio(row, "load_ms", PICKLE).text(2),
            f"{100 * _loading_share(row):.0f}",
            _time_ratio(row, "total_ms", MMAP).text(2), _time_ratio(row, "total_ms", PICKLE).text(2),
            _time_ratio(row, "forked_ms", FORK).text(2),
            "–" if copy is None else f"{copy:.2f}",
            "–" if MMAP not in memory else f"{memory[MMAP] / memory[ATTACH]:.2f}",
        ],
        **row,
    )  # fmt: skip


def _conclude(report: turns.Report, rows: Sequence[dict[str, Any]], model_count: int) -> None:
    """Add notes on all models together."""
    if not rows:
        report.notes.append(f"None of {model_count} models was measured.")
        return
    gains = {
        way: [(row, _time_ratio(row, "total_ms", way).value) for row in rows] for way in (MMAP, PICKLE)
    }  # fmt: skip
    for way, pairs in gains.items():
        values = [value for _, value in pairs]
        report.notes.append(
            f"Loading and first call, {way} ÷ attach, {len(rows)} of {model_count} models: geometric mean "
            f"{statistics.geometric_mean(values):.2f}, least {min(values):.2f}, most {max(values):.2f}."
        )
    forked = [_time_ratio(row, "forked_ms", FORK).value for row in rows]
    report.notes.append(
        "First answer of a child of a pre-forked server ÷ that of an attaching process: geometric mean "
        f"{statistics.geometric_mean(forked):.2f}, least {min(forked):.2f}, most {max(forked):.2f}; such a server "
        "has its weights in private memory."
    )
    best = [min(gains[MMAP][place][1], gains[PICKLE][place][1]) for place in range(len(rows))]
    loading_bound = [value for row, value in zip(rows, best, strict=True) if _loading_share(row) >= 0.5]
    gain = statistics.geometric_mean(loading_bound) if loading_bound else None
    report.notes.append(
        f"Goal: {LEAST_GAIN} times as fast as the best unshared way, if loading is at least half of its time: "
        + (
            "no such model."
            if gain is None
            else f"{gain:.2f} of {len(loading_bound)} models, {_met_text(gain >= LEAST_GAIN)}."
        )
    )
    copies = [copy for row in rows if row["bytes"] >= LEAST_BYTES and (copy := _shared_copies(row)) is not None]
    if copies:
        report.notes.append(
            f"Goal: shared memory of the processes at most {MOST_MEMORY} times the weights, for models of "
            f"{LEAST_BYTES / 1e6:.0f} MB or more: at most {max(copies):.2f}, {_met_text(max(copies) <= MOST_MEMORY)} "
            f"(from 1 and {PROCESSES} processes, with --quick {measuring.CONCURRENT_PROCESSES}, by proportional set "
            "size)."
        )


def _decision_notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a note on how often `xsp share estimate` predicts rightly whether sharing pays, over ways and states.

    The turns decide what is right, if the interval of their ratio is above or below a gain of `savings.LEAST_GAIN`.
    Calls are not predicted, so the predicted gain in loading has to be that share of measured loading and first call.
    """
    if not rows:
        return []
    try:
        shapes = estimate.curves(Timings.open(None))
    except ShareError:
        families = ",".join(estimate.REQUIRED_FAMILIES)
        return [f"Decisions are not judged: run xsp bench transfers --families {families} --threads 1, then again."]
    turns.say("cost per tensor, for the decisions")
    constants = estimate.Constants(estimate.costs(), shapes, estimate.digest_ns())
    correct = decided = pair_count = 0
    wrong_counts: dict[str, int] = {}
    for row in rows:
        for estimated in estimate.estimate_savings(row["bytes"], row["tensors"], constants):
            times_by_way = row["total_ms"] if estimated.state == measuring.WARM else row["cold_ms"]
            if not times_by_way:
                continue
            pair_count += 1
            ratio = _time_ratio({"total_ms": times_by_way}, "total_ms", estimated.way)
            is_gain, is_loss = ratio.lo > 1 + savings.LEAST_GAIN, ratio.hi < 1 + savings.LEAST_GAIN
            if not is_gain and not is_loss:
                continue
            decided += 1
            unshared = statistics.median(times_by_way[estimated.way]) * 1e6
            is_right = (estimated.saved_ns >= savings.LEAST_GAIN * unshared) == is_gain
            correct += is_right
            if not is_right:
                wrong_counts[f"{estimated.way}, {estimated.state}"] = (
                    wrong_counts.get(f"{estimated.way}, {estimated.state}", 0) + 1
                )
    if not decided:
        return [f"Decisions are not judged: the turns decide none of {pair_count} pairs."]
    wrong_text = "".join(f"; wrong over {way}: {count}" for way, count in sorted(wrong_counts.items()))
    return [
        f"Goal: whether sharing pays is predicted correctly for {LEAST_RIGHT:.0%} of models, ways and states: "
        f"{100 * correct / decided:.0f} % of {decided}, {_met_text(correct >= LEAST_RIGHT * decided)} "
        f"(of {pair_count}; "
        f"the turns of the others do not show whether 5 % are gained{wrong_text})."
    ]


def _attachment_notes(folder: Path, options: argparse.Namespace) -> list[str]:
    """Return notes on the time to attach to files of zeros: no page is touched, and each time the mapping is new."""
    import numpy as np
    from safetensors.numpy import save_file

    from xsp.share import modules

    figures = {}
    with measuring.running_store(folder / "s", 2 << 30):
        for nbytes, count in FILES[2:] if options.quick else FILES:
            path = folder / f"{nbytes}-{count}.safetensors"
            save_file({f"t{number}": np.zeros(nbytes // count, np.uint8) for number in range(count)}, path)
            client.attach(path, folder / "s")
            path.stat()
            times = []
            for _ in range(20):
                begin = time.perf_counter_ns()
                attachment = client.attach(path, folder / "s")
                views = [modules.view_of(attachment, tensor) for tensor in attachment.tensors]
                times.append((time.perf_counter_ns() - begin) / 1e6)
                del attachment, views
            figures[nbytes, count] = turns.middle(times)
    sentences = [
        f"Attaching to {nbytes / MIB:,.0f} MiB in {count:,} tensors takes {figure.text(3)} ms."
        for (nbytes, count), figure in figures.items()
    ]
    base, large = figures[FILES[2]], figures[FILES[3]]
    slope = 1e3 * (large.value - base.value) / (FILES[3][1] - FILES[2][1])
    sentences.append(
        f"Goal: each tensor adds at most {MOST_TENSOR_US} µs: {slope:.2f}, {_met_text(slope <= MOST_TENSOR_US)}."
    )
    if FILES[0] in figures:
        single_ms = figures[FILES[0]].value
        sentences.append(
            f"Goal: 500 MiB in one tensor at most {MOST_ATTACH_MS} ms: {single_ms:.2f}, "
            f"{_met_text(single_ms <= MOST_ATTACH_MS)}."
        )
    return sentences


def _met_text(is_met: bool) -> str:
    return "met" if is_met else "missed"


if __name__ == "__main__":
    main()
