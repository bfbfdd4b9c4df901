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
import json
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
EACH = 7
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
    made = steps.add_options(turns.parser(__doc__, rounds=6))
    made.add_argument(
        "--cold", action="store_true", help="also weights that are neither in the store nor in the page cache"
    )
    options = turns.parse(made, arguments)
    report = turns.Report(
        "share_models",
        f"Loading and first call by `attach`, compared with the other ways; memory of {PROCESSES} processes",
        ("model", "MB", "attach ms", "load ÷ attach: load_file", "torch.load", "loading, % of unshared",
         "with first call ÷ attach: load_file", "torch.load", "pre-forked", "shared copy ÷ weights",
         "memory, load_file ÷ attach"),
    )  # fmt: skip
    wanted = steps.chosen(options)
    kept = _kept(options.out)
    until = steps.until(options)
    with report.until_interrupted():
        for number, text in enumerate(wanted, 1):
            if not _has(kept.get(text), options.cold) and time.monotonic() < until:
                turns.say(f"{number}/{len(wanted)} {text}")
                with report.trying(text):
                    kept[text] = _measured(text, options, wanted.index(text) % EACH == 0)
                    _keep(options.out, text, kept[text])
    there = [text for text in wanted if _has(kept.get(text), False)]
    for text in there:
        _add(report, text, kept[text])
    _conclude(report, [kept[text] for text in there], len(wanted))
    if report.whole:  # an interrupt is no time for further measurements
        report.notes += _deciding([kept[text] for text in there])
        with tempfile.TemporaryDirectory(prefix="xsp-") as folder:
            report.notes += _attaching(Path(folder), options)
    report.finish(options)


def _measured(text: str, options: argparse.Namespace, with_memory: bool) -> dict[str, Any]:
    """Return the milliseconds of each turn by way, and the bytes of memory."""
    together = measuring.CONCURRENT_PROCESSES if options.quick else PROCESSES
    found = measuring.measure(
        steps.spec_of(text),
        turns=options.rounds,
        seed=options.seed,
        states=(measuring.WARM, measuring.COLD) if options.cold else (measuring.WARM,),
        concurrent=together if with_memory else 0,
    )
    return {
        "bytes": found.nbytes,
        "tensors": found.tensors,
        "load_ms": _of(found, measuring.WARM, "load_ns"),
        "total_ms": _of(found, measuring.WARM, "total_ns"),
        "cold_ms": _of(found, measuring.COLD, "total_ns"),
        "memory": {way: list(each) for way, each in found.memory.items()},
        "forked_ms": _against_children(text, options),
    }


def _against_children(text: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the milliseconds to the answer of children that attach, and of children of a pre-forked server."""
    spec, draw = steps.spec_of(text), random.Random(options.seed)
    took: dict[str, list[float]] = {ATTACH: [], FORK: []}
    with tempfile.TemporaryDirectory(prefix="xsp-") as folder:
        asked = {"number": 0, "folder": folder, "spec": spec, "seed": options.seed}
        with _worker() as worker, _worker() as server:
            worker.ask({"do": "prepare", **asked})
            nbytes = share_worker.answer_of(worker)["nbytes"]
            those = {ATTACH: worker, FORK: server}
            for way, each in those.items():
                each.ask({"do": "open", "way": way, **asked})
                share_worker.answer_of(each)
            with measuring.running_store(Path(folder) / "s", 2 * nbytes + (64 << 20)):
                client.attach(Path(folder) / "0.safetensors", Path(folder) / "s")
                for _ in range(options.rounds):
                    for way in draw.sample((ATTACH, FORK), 2):
                        those[way].ask({"do": "request", "child": True, "way": way, **asked})
                        took[way].append(share_worker.answer_of(those[way])["ns"] / 1e6)
    return took


@contextlib.contextmanager
def _worker() -> Iterator[processes.WorkerProcess]:
    worker = share_worker.started()
    try:
        yield worker
    finally:
        worker.end()


def _of(found: measuring.Measurement, state: str, what: str) -> dict[str, list[float]]:
    """Return the milliseconds of the turns in a state, by way."""
    return {way: [ns / 1e6 for ns in getattr(each, what)] for (way, at), each in found.times.items() if at == state}


def _has(row: dict[str, Any] | None, cold: bool) -> bool:
    return row is not None and "forked_ms" in row and (not cold or bool(row["cold_ms"]))


def _kept(out: Path | None) -> dict[str, Any]:
    """Return the results of earlier calls, by model."""
    kept: dict[str, Any] = {}
    if out is not None and out.is_file():
        for line in out.read_text(encoding="utf-8").splitlines():
            try:
                kept.update(json.loads(line))
            except (ValueError, TypeError):
                continue  # the line was cut off when a run was interrupted
    return kept


def _keep(out: Path | None, text: str, row: dict[str, Any]) -> None:
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({text: row}) + "\n")


def _times(row: dict[str, Any], what: str, way: str) -> turns.Figure:
    """Return the ratio of a way's time to that of `attach`, from the pairs of turns."""
    pairs = list(zip(row[what][way], row[what][ATTACH], strict=True))
    return turns.bootstrap(pairs, lambda rows: statistics.median(a / b for a, b in rows))


def _loading(row: dict[str, Any]) -> float:
    """Return the share of loading in the time of the faster unshared way."""
    way = min((MMAP, PICKLE), key=lambda each: statistics.median(row["total_ms"][each]))
    return statistics.median(row["load_ms"][way]) / statistics.median(row["total_ms"][way])


def _copy(row: dict[str, Any]) -> float | None:
    """Return the bytes that processes with `attach` share, store included, as a multiple of the weights."""
    if ATTACH not in row["memory"]:
        return None
    memory = measuring.Memory(*row["memory"][ATTACH])
    return (memory.one - memory.each) / row["bytes"]


def _add(report: turns.Report, text: str, row: dict[str, Any]) -> None:
    copy = _copy(row)
    memory = {way: measuring.Memory(*each).of(PROCESSES) for way, each in row["memory"].items()}
    report.add(
        [
            text, f"{row['bytes'] / 1e6:.1f}", turns.middle(row["load_ms"][ATTACH]).shown(2),
            _times(row, "load_ms", MMAP).shown(2), _times(row, "load_ms", PICKLE).shown(2),
            f"{100 * _loading(row):.0f}",
            _times(row, "total_ms", MMAP).shown(2), _times(row, "total_ms", PICKLE).shown(2),
            _times(row, "forked_ms", FORK).shown(2),
            "–" if copy is None else f"{copy:.2f}",
            "–" if MMAP not in memory else f"{memory[MMAP] / memory[ATTACH]:.2f}",
        ],
        **row,
    )  # fmt: skip


def _conclude(report: turns.Report, rows: Sequence[dict[str, Any]], wanted: int) -> None:
    """Add notes on all models together."""
    if not rows:
        report.notes.append(f"None of {wanted} models was measured.")
        return
    gains = {
        way: [(row, _times(row, "total_ms", way).value) for row in rows] for way in (MMAP, PICKLE)
    }  # fmt: skip
    for way, each in gains.items():
        values = [value for _, value in each]
        report.notes.append(
            f"Loading and first call, {way} ÷ attach, {len(rows)} of {wanted} models: geometric mean "
            f"{statistics.geometric_mean(values):.2f}, least {min(values):.2f}, most {max(values):.2f}."
        )
    forked = [_times(row, "forked_ms", FORK).value for row in rows]
    report.notes.append(
        "First answer of a child of a pre-forked server ÷ that of an attaching process: geometric mean "
        f"{statistics.geometric_mean(forked):.2f}, least {min(forked):.2f}, most {max(forked):.2f}; such a server "
        "has its weights in private memory."
    )
    best = [min(gains[MMAP][place][1], gains[PICKLE][place][1]) for place in range(len(rows))]
    long = [value for row, value in zip(rows, best, strict=True) if _loading(row) >= 0.5]
    gain = statistics.geometric_mean(long) if long else None
    report.notes.append(
        f"Goal: {LEAST_GAIN} times as fast as the best unshared way, if loading is at least half of its time: "
        + ("no such model." if gain is None else f"{gain:.2f} of {len(long)} models, {_met(gain >= LEAST_GAIN)}.")
    )
    copies = [copy for row in rows if row["bytes"] >= LEAST_BYTES and (copy := _copy(row)) is not None]
    if copies:
        report.notes.append(
            f"Goal: shared memory of the processes at most {MOST_MEMORY} times the weights, for models of "
            f"{LEAST_BYTES / 1e6:.0f} MB or more: at most {max(copies):.2f}, {_met(max(copies) <= MOST_MEMORY)} "
            f"(from 1 and {PROCESSES} processes, with --quick {measuring.CONCURRENT_PROCESSES}, by proportional "
            "set size)."
        )


def _deciding(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a note on how often `xsp share estimate` predicts rightly whether sharing pays, over ways and states.

    The turns decide what is right, if the interval of their ratio is above or below a gain of `paying.MATTERS`. Since
    calls are not predicted, the predicted gain in loading has to be that share of the measured loading and first call.
    """
    if not rows:
        return []
    try:
        shapes = estimate.curves(Timings.open(None))
    except ShareError:
        families = ",".join(estimate.REQUIRED_FAMILIES)
        return [f"Decisions are not judged: run xsp bench transfers --families {families} --threads 1, then again."]
    turns.say("cost per tensor, for the decisions")
    known = estimate.Constants(estimate.costs(), shapes, estimate.digest_ns())
    right = decided = asked = 0
    wrong: dict[str, int] = {}
    for row in rows:
        for each in estimate.estimate_savings(row["bytes"], row["tensors"], known):
            taken = row["total_ms"] if each.state == measuring.WARM else row["cold_ms"]
            if not taken:
                continue
            asked += 1
            ratio = _times({"total_ms": taken}, "total_ms", each.way)
            gains, loses = ratio.lo > 1 + savings.LEAST_GAIN, ratio.hi < 1 + savings.LEAST_GAIN
            if not gains and not loses:
                continue
            decided += 1
            unshared = statistics.median(taken[each.way]) * 1e6
            is_right = (each.saved_ns >= savings.LEAST_GAIN * unshared) == gains
            right += is_right
            if not is_right:
                wrong[f"{each.way}, {each.state}"] = wrong.get(f"{each.way}, {each.state}", 0) + 1
    if not decided:
        return [f"Decisions are not judged: the turns decide none of {asked} pairs."]
    where = "".join(f"; wrong over {way}: {count}" for way, count in sorted(wrong.items()))
    return [
        f"Goal: whether sharing pays is predicted correctly for {LEAST_RIGHT:.0%} of models, ways and states: "
        f"{100 * right / decided:.0f} % of {decided}, {_met(right >= LEAST_RIGHT * decided)} (of {asked}; the "
        f"turns of the others do not show whether 5 % are gained{where})."
    ]


def _attaching(folder: Path, options: argparse.Namespace) -> list[str]:
    """Return notes on the time to attach to files of zeros: no page is touched, and each time the mapping is new."""
    import numpy as np
    from safetensors.numpy import save_file

    from xsp.share import modules

    found = {}
    with measuring.running_store(folder / "s", 2 << 30):
        for nbytes, count in FILES[2:] if options.quick else FILES:
            path = folder / f"{nbytes}-{count}.safetensors"
            save_file({f"t{number}": np.zeros(nbytes // count, np.uint8) for number in range(count)}, path)
            client.attach(path, folder / "s")
            path.stat()
            took = []
            for _ in range(20):
                begin = time.perf_counter_ns()
                held = client.attach(path, folder / "s")
                views = [modules.view_of(held, each) for each in held.tensors]
                took.append((time.perf_counter_ns() - begin) / 1e6)
                del held, views
            found[nbytes, count] = turns.middle(took)
    said = [
        f"Attaching to {nbytes / MIB:,.0f} MiB in {count:,} tensors takes {each.shown(3)} ms."
        for (nbytes, count), each in found.items()
    ]
    small, many = found[FILES[2]], found[FILES[3]]
    slope = 1e3 * (many.value - small.value) / (FILES[3][1] - FILES[2][1])
    said.append(f"Goal: each tensor adds at most {MOST_TENSOR_US} µs: {slope:.2f}, {_met(slope <= MOST_TENSOR_US)}.")
    if FILES[0] in found:
        whole = found[FILES[0]].value
        said.append(
            f"Goal: 500 MiB in one tensor at most {MOST_ATTACH_MS} ms: {whole:.2f}, {_met(whole <= MOST_ATTACH_MS)}."
        )
    return said


def _met(is_met: bool) -> str:
    return "met" if is_met else "missed"


if __name__ == "__main__":
    main()
