"""How many CUPTI records are decoded per second? Records are fabricated: no GPU is needed.

A kernel produces a record of its own and a record of the runtime call that launched it. cupti-python creates an object
for each record before the record can be read; creating and freeing these objects is the minimum cost of all
processing. These take turns: this minimum (`floor`), copying the objects into tuples as the callback does (`callback`),
and the conversion of tuples into spans after the step (`spans`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any

from parts import turns

from xsp_collectors.cuda.activities import Activity, Records

COLUMNS = ("what", "ns a record [95 %]", "records a second", "of the floor")


def kernel_class(cupti: Any) -> type:
    """Return the class of kernel records; its name ends in a number that increases with CUPTI's version."""
    names = [name for name in dir(cupti) if name.startswith("ActivityKernel") and name[14:].isdigit()]
    return getattr(cupti, max(names, key=lambda name: int(name[14:])))  # type: ignore[no-any-return]


def fabricate(cupti: Any, kernels: int) -> list[Any]:
    """Return the records of `kernels` kernels and of their launches."""
    kind = kernel_class(cupti)
    records = []
    for number in range(kernels):
        kernel, call = kind(), cupti.ActivityAPI()
        kernel.name = "relu"  # records that are not from CUPTI hold arbitrary bytes
        kernel.kind, call.kind = int(Activity.CONCURRENT_KERNEL), int(Activity.RUNTIME)
        kernel.start, kernel.end = 1_000 * number + 1, 1_000 * number + 900
        call.start, call.end = 1_000 * number, 1_000 * number + 500
        kernel.correlation_id = call.correlation_id = number + 1
        records += [call, kernel]
    return records


def floor(cupti: Any, kernels: int) -> Callable[[], object]:
    """Return a function that creates the objects of records, and frees them."""
    kind, call = kernel_class(cupti), cupti.ActivityAPI

    def run() -> None:
        records = []
        for _ in range(kernels):
            records.append(call())
            records.append(kind())

    return run


def measure(cupti: Any, kernels: int, rounds: int) -> dict[str, list[float]]:
    """Return the nanoseconds per record in each round, by kind of work."""
    from xsp_collectors.cuda.cupti import CuptiActivities

    fabricated = fabricate(cupti, kernels)
    times: dict[str, list[float]] = {"floor": [], "callback": [], "spans": []}
    for number in range(rounds + 1):
        records = Records()
        collector = CuptiActivities()
        collector._records = records
        steps: dict[str, Callable[[], object]] = {
            "floor": floor(cupti, kernels),
            "callback": lambda records=records: records.complete(fabricated),
            "spans": lambda collector=collector: sum(1 for _ in collector.spans()),
        }
        for name, step in steps.items():
            begin = perf_counter_ns()
            step()
            elapsed_ns = perf_counter_ns() - begin
            if number:  # the first round is not counted
                times[name].append(elapsed_ns / (2 * kernels))
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = turns.parse(turns.parser(__doc__, rounds=15), arguments)
    try:
        from cupti import cupti
    except ImportError as error:
        turns.skip(f"this needs cupti-python ({error}); pip install 'xsp[cuda]'")
    kernels = 2_000 if options.quick else 50_000
    times = measure(cupti, kernels, options.rounds)
    report = turns.Report("cupti_decode", f"Decoding {2 * kernels:,} records of CUPTI", COLUMNS)
    for name, values in times.items():
        cost, rate = turns.middle(values), turns.middle([1e9 / value for value in values])
        against = turns.middle([a / b for a, b in zip(values, times["floor"], strict=True)])
        report.add([name, cost.text(0), rate.text(0), against.text(2)], ns=cost, rate=rate, rounds=values)
    report.notes += [
        "`callback` runs on a thread of CUPTI and holds the GIL at the flush after a step; `spans` runs after it.",
        f"Records are of the class {kernel_class(cupti).__name__}.",
    ]
    report.finish(options)


if __name__ == "__main__":
    main()
