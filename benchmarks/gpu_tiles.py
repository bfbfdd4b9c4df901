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
    found: dict[str, list[Way]] = {"copy": [Way("copy", lambda: target.copy_(values), 2 * size)]}
    for kind, written in (("reduction", 4 * count), ("scan", 4 * len(values))):
        found[kind] = [
            Way(name, lambda name=name, of=of: of(name, values, lengths), size + written)  # type: ignore[misc]
            for name, of in FUNCTIONS.items()
            if name.startswith(kind) and not (name.endswith("16n") and count < 16)
        ]
    found["torch.sum"] = [Way("torch.sum", lambda: rows.sum(1, dtype=torch.float32), size + 4 * count)]
    found["torch.cumsum"] = [Way("torch.cumsum", lambda: rows.cumsum(1, dtype=torch.float32), size + 4 * len(values))]
    return found


def error(kind: str, way: Way, length: int, values: Any) -> float:
    """Return the maximum error of a result against float64, relative to the largest value."""
    rows = values.double().view(-1, length)
    wanted = rows.sum(1) if kind == "reduction" else rows.cumsum(1).view(-1)
    return float((way.run().double() - wanted).abs().max() / wanted.abs().max())


def shares(found: dict[str, list[Way]], timer: Timer, rounds: int) -> dict[str, tuple[str, float]]:
    """Return for each kind the fastest implementation and its share of the copy's rate, from medians over rounds."""
    taken: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 1):
        for kind, those in found.items():
            for way in those:
                seconds = timer(way.run)
                if turn:
                    taken.setdefault((kind, way.name), []).append(seconds)
    copying = found["copy"][0].nbytes / turns.median(taken["copy", "copy"])
    best: dict[str, tuple[str, float]] = {}
    for kind, those in found.items():
        rates = [(way.nbytes / turns.median(taken[kind, way.name]) / copying, way.name) for way in those]
        if rates and kind != "copy":
            share, name = max(rates)
            best[kind] = name, share
    return best


def by_events(run: Callable[[], object]) -> float:
    """Return the seconds between two CUDA events around a call."""
    import torch

    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def main(arguments: Sequence[str] | None = None) -> None:
    options = turns.parse(turns.parser(__doc__, rounds=20), arguments)
    gpu_workloads.need_a_gpu()
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
        found = ways(length, values)
        errors = {}
        for kind in MOST_ERROR:
            for way in list(found[kind]):
                errors[way.name] = error(kind, way, length, values)
                if not errors[way.name] <= MOST_ERROR[kind]:  # segments too long for float16 between products
                    found[kind].remove(way)
        best = shares(found, by_events, options.rounds)
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
        met = "met" if 2 * count >= len(LENGTHS) else "missed"
        report.notes.append(
            f"Goal: {GOAL:.0%} of a copy in half of the lengths: {kind} in {count} of {len(LENGTHS)}, {met}."
        )
    report.notes.append(gpu_workloads.device_line())
    report.finish(options)


if __name__ == "__main__":
    main()
