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
    parser = steps.add_options(turns.parser(__doc__))
    parser.add_argument("--batches", type=int, nargs="+", help="(default: 1 8, quick: 1)")
    parser.add_argument("--threads", type=int, nargs="+", help="of torch (default: 1 2, quick: 1)")
    parser.add_argument("--no-micro", action="store_true", help="without the families that vary one measure alone")
    parser.add_argument("--golden", type=Path, help="benanza_totals.csv, published totals of layers on eight GPUs")
    options = turns.parse(parser, arguments)
    batches = tuple(options.batches or (BATCHES[:1] if options.quick else BATCHES))
    threads = tuple(options.threads or (THREADS[:1] if options.quick else THREADS))
    selection = [
        text for text in steps.selected_models(options) if "," not in text
    ]  # a corpus takes models without settings
    if options.quick and not options.models:
        selection += ["torchvision:mobilenet_v3_small", "torchvision:shufflenet_v2_x0_5", "torchvision:alexnet"]
    micro = [] if options.no_micro else models.names("micro")[:: 12 if options.quick else 1]
    report = turns.Report(
        "measures_latency",
        f"Pearson's r of the logarithms of measures and latency, {len(selection)} models, and on published GPUs",
        (
            "device", "models", *(correlate.MEASURES[measure] for measure in MEASURES), "path − FLOPs", "closer",
            "left out one by one",
        ),
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    measured_steps: list[steps.Step] = []
    with tempfile.TemporaryDirectory() as folder:
        stored, deadline = steps.StoredSteps(options.out or Path(folder)), steps.deadline(options)
        with report.until_interrupted():
            rows += corpus.collect(
                [*selection, *micro], stored.folder, progress=lambda label, *_: turns.say(f"  {label}")
            )
            for text in (*selection, *micro):
                settings = (batches[:1], threads[:1]) if text in micro else (batches, threads)
                with report.trying(text):
                    if time.monotonic() < deadline:
                        measured_steps += [step for step, _ in steps.measure_steps([text], *settings, stored, options)]
                        continue
                keys = [(text, batch, count) for batch in settings[0] for count in settings[1]]
                measured_steps += [stored.steps[key] for key in keys if key in stored.steps]
        latencies = [
            Latency(measured_step.model, measured_step.ns, "", measured_step.batch, measured_step.threads)
            for measured_step in measured_steps
        ]
        _write(stored.folder / "latencies.csv", latencies)
    groups = correlate.groups(rows, latencies)
    notes, holes = correlate.omissions(rows, latencies, 1)
    for group in groups:
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
    for group in groups:
        report.notes += [
            f"{group.title}: micro:{slope.family} varies {correlate.MEASURES[slope.measure]} {slope.factor:.0f} times, "
            f"latency {slope.least_ns / 1e6:.3g} → {slope.most_ns / 1e6:.3g} ms, "
            f"exponent {correlatetext.coefficient_text(slope.exponent)}."
            for slope in group.slopes
        ]
    covered = len({slope.model for slope in measured_steps})
    report.notes.append(
        f"Measured: {covered} of {len(selection) + len(micro)} models, those of the families among them."
    )
    report.notes += [*notes, *holes]
    report.finish(options)


def _add(report: turns.Report, group: correlate.LatencyGroup, prefix: str) -> None:
    correlations = {correlation.measure: correlation for correlation in group.correlations}
    if not correlations:
        if group.points:
            report.notes.append(f"{prefix}{group.title}: {group.reason}.")
        return
    difference = next((candidate for candidate in group.differences if candidate.coefficient == "pearson"), None)
    winner = None if difference is None else difference.winner
    error = None if group.regression is None else group.regression.mean_error_percent
    report.add(
        [
            f"{prefix}{group.title}",
            str(len(group.points)),
            *(correlatetext.coefficient_text(correlations[measure].pearson) for measure in MEASURES),
            "–" if difference is None else correlatetext.coefficient_text(difference.figure),
            "not decided" if winner is None else correlate.MEASURES[winner],
            "–" if error is None else turns.Figure(error.value, error.low or 0, error.high or 0).text(0) + " %",
        ],
        group=correlate.as_json([group])[0],
    )


def _write(path: Path, latencies: Sequence[Latency]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["model", "latency_ns", "batch", "threads"])
        rows.writerows([latency.model, latency.ns, latency.batch, latency.threads] for latency in latencies)


if __name__ == "__main__":
    main()
