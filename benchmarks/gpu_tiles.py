"""How close to the rate of a copy are sums and prefix sums as products of 16×16 tiles, by the length of segments?

For each length from 2^4 to 2^24 the kernels of `tiles/kernels.py`, `torch.sum` and `torch.cumsum` take turns with a
copy of the same elements, timed by CUDA events. The figure is the rate of bytes read and written as a share of the
copy's; the fastest of several kernels counts. Results are compared with float64 first. Energy is not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from parts import gpu_workloads, turns

LENGTHS = tuple(1 << power for power in range(4, 25, 2))
ELEMENTS, QUICK_ELEMENTS = 1 << 26, 1 << 24
GOAL = 0.85
"""Goal: minimum share of the rate of a copy, at half of the lengths."""

MOST_ERROR = {"reduction": 2e-2, "scan": 2e-2}
"""Maximum error relative to the largest sum in float64: between two products values are rounded to float16."""

Timer = Callable[[Callable[[], object]], float]
"""A function that runs another one, and returns the seconds that it takes on the device."""


class Way(NamedTuple):
    """An implementation, and the minimum number of bytes that it has to move."""

    name: str
    run: Callable[[], Any]
    nbytes: int


def ways(length: int, values: Any) -> dict[str, list[Way]]:
    """Return the implementations of sums and prefix sums over segments of a length, and the copy, by kind."""
    import torch
    from tiles.kernels import FUNCTIONS

    count = len(values) // length
    lengths = torch.full((count,), length, dtype=torch.int64, device=values.device)
    rows = values.view(count, length)
    target = torch.empty_like(values)
    size = 2 * len(values)
    implementations: dict[str, list[Way]] = {"copy": [Way("copy", lambda: target.copy_(values), 2 * size)]}
    for kind, written_bytes in (("reduction", 4 * count), ("scan", 4 * len(values))):
        implementations[kind] = [
            Way(name, lambda name=name, function=function: function(name, values, lengths), size + written_bytes)  # type: ignore[misc]
            for name, function in FUNCTIONS.items()
            if name.startswith(kind) and not (name.endswith("16n") and count < 16)
        ]
    implementations["torch.sum"] = [Way("torch.sum", lambda: rows.sum(1, dtype=torch.float32), size + 4 * count)]
    implementations["torch.cumsum"] = [
        Way("torch.cumsum", lambda: rows.cumsum(1, dtype=torch.float32), size + 4 * len(values))
    ]
    return implementations


def error(kind: str, way: Way, length: int, values: Any) -> float:
    """Return the maximum error of a result against float64, relative to the largest value."""
    rows = values.double().view(-1, length)
    expected = rows.sum(1) if kind == "reduction" else rows.cumsum(1).view(-1)
    return float((way.run().double() - expected).abs().max() / expected.abs().max())


def shares(implementations: dict[str, list[Way]], timer: Timer, rounds: int) -> dict[str, tuple[str, float]]:
    """Return for each kind the fastest implementation and its share of the copy's rate, from medians over rounds."""
    times: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 1):
        for kind, kind_ways in implementations.items():
            for way in kind_ways:
                seconds = timer(way.run)
                if turn:
                    times.setdefault((kind, way.name), []).append(seconds)
    copying = implementations["copy"][0].nbytes / turns.median(times["copy", "copy"])
    best: dict[str, tuple[str, float]] = {}
    for kind, kind_ways in implementations.items():
        rates = [(way.nbytes / turns.median(times[kind, way.name]) / copying, way.name) for way in kind_ways]
        if rates and kind != "copy":
            share, name = max(rates)
            best[kind] = name, share
    return best


def by_events(run: Callable[[], object]) -> float:
    """Return the seconds between two CUDA events around a call."""
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def main(arguments: Sequence[str] | None = None) -> None:
    options = turns.parse(turns.parser(__doc__, rounds=20), arguments)
    gpu_workloads.require_gpu()
    import torch

    report = turns.Report(
        "gpu_tiles",
        "Rates of sums and prefix sums relative to a copy, by elements per segment",
        ("elements", "sums, fastest", "share", "torch.sum", "prefix sums, fastest", "share ", "torch.cumsum", "error"),
    )
    torch.manual_seed(options.seed)
    values = torch.rand(QUICK_ELEMENTS if options.quick else ELEMENTS, device="cuda").half() / 16
    reached = {"reduction": 0, "scan": 0}
    for length in LENGTHS:
        implementations = ways(length, values)
        errors = {}
        for kind in MOST_ERROR:
            for way in list(implementations[kind]):
                errors[way.name] = error(kind, way, length, values)
                if not errors[way.name] <= MOST_ERROR[kind]:  # segments too long for float16 between products
                    implementations[kind].remove(way)
        best = shares(implementations, by_events, options.rounds)
        none = ("none is correct", float("nan"))
        (added, share), (scanned, scan_share) = best.get("reduction", none), best.get("scan", none)
        reached["reduction"] += share >= GOAL
        reached["scan"] += scan_share >= GOAL
        report.add(
            [
                str(length), added, f"{share:.2f}", f"{best['torch.sum'][1]:.2f}", scanned, f"{scan_share:.2f}",
                f"{best['torch.cumsum'][1]:.2f}", f"{max(errors.values()):.1e}",
            ],
            errors=errors,
            best=best,
        )  # fmt: skip
    for kind, count in reached.items():
        verdict = "met" if 2 * count >= len(LENGTHS) else "missed"
        report.notes.append(
            f"Goal: {GOAL:.0%} of a copy in half of the lengths: {kind} in {count} of {len(LENGTHS)}, {verdict}."
        )
    report.notes.append(gpu_workloads.device_line())
    report.finish(options)


if __name__ == "__main__":
    main()
