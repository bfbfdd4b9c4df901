"""Which measure of a model correlates with its latency: here by batch and threads, on published GPUs, in families?

Models are captured and measured once. The results are kept in `--out`: the graphs with their measures, `steps.jsonl`,
and `latencies.csv`, which `xsp graph OUT --against OUT/latencies.csv` reads.
"""

from __future__ import annotations

import csv
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parts import golden, steps, turns

from xsp import graph, models
from xsp.bound import correlate, correlatetext
from xsp.bound.latencies import Latency
from xsp.graph import corpus

BATCHES, THREADS = (1, 8), (1, 2)
MEASURES = ("parameters", "flops", "longest_path", "diameter", "bytes")


def main(arguments: Sequence[str] | None = None) -> None:
    made = steps.add_options(turns.parser(__doc__))
    made.add_argument("--batches", type=int, nargs="+", help="(default: 1 8, quick: 1)")
    made.add_argument("--threads", type=int, nargs="+", help="of torch (default: 1 2, quick: 1)")
    made.add_argument("--no-micro", action="store_true", help="without the families that vary one measure alone")
    made.add_argument("--golden", type=Path, help="benanza_totals.csv, published totals of layers on eight GPUs")
    options = turns.parse(made, arguments)
    batches = tuple(options.batches or (BATCHES[:1] if options.quick else BATCHES))
    threads = tuple(options.threads or (THREADS[:1] if options.quick else THREADS))
    wanted = [text for text in steps.chosen(options) if "," not in text]  # a corpus takes models without settings
    if options.quick and not options.models:
        wanted += ["torchvision:mobilenet_v3_small", "torchvision:shufflenet_v2_x0_5", "torchvision:alexnet"]
    micro = [] if options.no_micro else models.names("micro")[:: 12 if options.quick else 1]
    report = turns.Report(
        "measures_latency",
        f"Pearson's r of the logarithms of measures and latency, {len(wanted)} models, and on published GPUs",
        (
            "device", "models", *(correlate.MEASURES[each] for each in MEASURES), "path − FLOPs", "closer",
            "left out one by one",
        ),
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    measured: list[steps.Step] = []
    with tempfile.TemporaryDirectory() as folder:
        kept, until = steps.Kept(options.out or Path(folder)), steps.until(options)
        with report.until_interrupted():
            rows += corpus.collect([*wanted, *micro], kept.folder, progress=lambda what, *_: turns.say(f"  {what}"))
            for text in (*wanted, *micro):
                of = (batches[:1], threads[:1]) if text in micro else (batches, threads)
                with report.trying(text):
                    if time.monotonic() < until:
                        measured += [step for step, _ in steps.each([text], *of, kept, options)]
                        continue
                keys = [(text, batch, count) for batch in of[0] for count in of[1]]
                measured += [kept.steps[key] for key in keys if key in kept.steps]
        latencies = [Latency(each.model, each.ns, "", each.batch, each.threads) for each in measured]
        _write(kept.folder / "latencies.csv", latencies)
    found = correlate.groups(rows, latencies)
    notes, holes = correlate.omissions(rows, latencies, 1)
    for group in found:
        _add(report, group, "this machine, ")
    if options.golden is not None:
        turns.say("  published totals")
        published = [
            {"spec": name, **graph.of(place).measures()}
            for name in golden.MODELS
            if (place := golden.source(name)) is not None
        ]
        for group in correlate.groups(published, golden.totals(options.golden)):
            _add(report, group, "")
        report.notes.append(
            "Published: sums of layers, complete models alone, with our measures at batch 1 of graphs that do the "
            "published multiply-adds; of files of ONNX nodes are counted, of models by name operators."
        )
    for group in found:
        report.notes += [
            f"{group.title}: micro:{each.family} varies {correlate.MEASURES[each.measure]} {each.factor:.0f} times, "
            f"latency {each.least_ns / 1e6:.3g} → {each.most_ns / 1e6:.3g} ms, "
            f"exponent {correlatetext.coefficient_text(each.exponent)}."
            for each in group.slopes
        ]
    covered = len({each.model for each in measured})
    report.notes.append(f"Measured: {covered} of {len(wanted) + len(micro)} models, those of the families among them.")
    report.notes += [*notes, *holes]
    report.finish(options)


def _add(report: turns.Report, group: correlate.Group, where: str) -> None:
    of = {each.measure: each for each in group.correlations}
    if not of:
        if group.points:
            report.notes.append(f"{where}{group.title}: {group.reason}.")
        return
    difference = next((each for each in group.differences if each.coefficient == "pearson"), None)
    winner = None if difference is None else difference.winner
    error = None if group.regression is None else group.regression.mean_error_percent
    report.add(
        [
            f"{where}{group.title}",
            str(len(group.points)),
            *(correlatetext.coefficient_text(of[each].pearson) for each in MEASURES),
            "–" if difference is None else correlatetext.coefficient_text(difference.figure),
            "not decided" if winner is None else correlate.MEASURES[winner],
            "–" if error is None else turns.Figure(error.value, error.low or 0, error.high or 0).shown(0) + " %",
        ],
        group=correlate.as_json([group])[0],
    )


def _write(path: Path, latencies: Sequence[Latency]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["model", "latency_ns", "batch", "threads"])
        rows.writerows([each.model, each.ns, each.batch, each.threads] for each in latencies)


if __name__ == "__main__":
    main()
