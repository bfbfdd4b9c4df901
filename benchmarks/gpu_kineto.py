"""Do CUPTI's records and Kineto's of the same step have the same kernels, with the same durations?

Both record the step in turns, several times each. Kernels are compared by device, stream order and name; durations
are compared by the medians over the turns, kernel by kernel, and by the sum of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from parts import gpu_workloads, turns
from parts.levels import Levels

from xsp.models import Workload
from xsp.schema import Kind, Level, Span

COLUMNS = (
    "model", "rounds", "kernels: cupti", "kernels: kineto", "same names", "same order", "sum: cupti / kineto",
    "kernel by kernel, median difference %", "90 % within %",
)  # fmt: skip


def kernels(spans: Sequence[Span]) -> list[Span]:
    """Return the kernels of a step, stream by stream, in order of start."""
    selected = [span for span in spans if span.kind == Kind.KERNEL]
    return sorted(selected, key=lambda span: (span.device or 0, span.stream or 0, span.start_ns))


def record_sources(workload: Workload, rounds: int) -> dict[str, list[list[Span]]]:
    """Record steps by both sources in turns; return the kernels of each step, by source."""
    names = {"cupti": ("modules", "torchops", "cupti"), "kineto": ("modules", "torchops")}
    steps: dict[str, list[list[Span]]] = {source: [] for source in names}
    for _ in range(rounds):
        for source, collectors in names.items():
            levels = Levels(*collectors, source=collectors[-1])
            steps[source].append(kernels(levels.record(workload.step, Level.KERNEL, warmup=1)))
    return steps


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = turns.parse(gpu_workloads.add_options(turns.parser(__doc__, rounds=5)), arguments)
    gpu_workloads.require_gpu()
    report = turns.Report("gpu_kineto", "Kernels in CUPTI's records and in Kineto [95 %]", COLUMNS)
    with report.until_interrupted():
        for workload in gpu_workloads.build_workloads(options):
            try:
                _add(report, workload.name, record_sources(workload, options.rounds))
            except LookupError as error:
                raise SystemExit(f"one of the two is not available here: {error}") from error
    report.notes += [gpu_workloads.device_line()]
    report.finish(options)


def _add(report: turns.Report, name: str, recordings: dict[str, list[list[Span]]]) -> None:
    cupti, kineto = recordings["cupti"], recordings["kineto"]
    names = [Counter(span.name for span in steps[0]) for steps in (cupti, kineto)]
    ordered = [[span.name for span in steps[0]] for steps in (cupti, kineto)]
    sums = list(zip((_sum(step) for step in cupti), (_sum(step) for step in kineto), strict=True))
    ratio = turns.bootstrap(sums, lambda rows: turns.median([a / b for a, b in rows if b]))
    differences = _duration_differences(cupti, kineto) if ordered[0] == ordered[1] else []
    missing = dict((names[0] - names[1]) + (names[1] - names[0]))
    names_text = "yes" if not missing else f"{len(missing)} differ"
    report.add(
        [
            name, str(len(cupti)), str(len(cupti[0])), str(len(kineto[0])), names_text,
            "yes" if ordered[0] == ordered[1] else "no", ratio.text(4),
            turns.middle(differences).text(2, 100) if differences else "–",
            f"{100 * sorted(map(abs, differences))[int(0.9 * len(differences))]:.2f}" if differences else "–",
        ],
        sums=sums, ratio=ratio, apart=differences, missing=missing,
    )  # fmt: skip


def _sum(step: Sequence[Span]) -> int:
    return sum(span.dur_ns for span in step)


def _duration_differences(cupti: Sequence[Sequence[Span]], kineto: Sequence[Sequence[Span]]) -> list[float]:
    """Return for each kernel the relative difference of the median durations; steps of another length are left out."""
    cupti_ns, kineto_ns = (_medians(steps) for steps in (cupti, kineto))
    return [a / b - 1 for a, b in zip(cupti_ns, kineto_ns, strict=True) if b]


def _medians(steps: Sequence[Sequence[Span]]) -> list[float]:
    comparable = [step for step in steps if len(step) == len(steps[0])]
    return [turns.median([span.dur_ns for span in column]) for column in zip(*comparable, strict=True)]


if __name__ == "__main__":
    main()
