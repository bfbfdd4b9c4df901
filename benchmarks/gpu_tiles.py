"""How close to the rate of a copy are sums and prefix sums as products of 16×16 tiles, by the length of segments?

For each length from 2^4 to 2^24 the kernels of `tiles/kernels.py`, `torch.sum` and `torch.cumsum` take turns with a
copy of the same elements, timed by the device's clock while the host is ahead of it. What is known of the lengths is
computed before. The figure is the rate of bytes read and written as a share of the copy's, and the copy's as a share of
the device's peak; the fastest of several kernels counts. Results are compared with float64 first. Energy is per call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from parts import gpu_workloads, turns

from xsp.device import devices, energy
from xsp.device.ceilings import Ceiling
from xsp.device.contract import Device

LENGTHS = tuple(1 << power for power in range(4, 25, 2))
ELEMENTS, QUICK_ELEMENTS = 1 << 26, 1 << 24
GOAL = 0.85
"""Goal: minimum share of the rate of a copy, at half of the lengths."""

MOST_ERROR = {"reduction": 2e-2, "scan": 2e-2}
"""Maximum error relative to the largest sum in float64: between two products values are rounded to float16."""

Timer = Callable[[Callable[[], object]], float]
"""A function that runs another one, and returns the seconds that it takes on the device."""

Implementations = Callable[[int, Any], "dict[str, list[Way]]"]


class Way(NamedTuple):
    """An implementation, and the minimum number of bytes that it has to move."""

    name: str
    run: Callable[[], Any]
    nbytes: int


def ways(length: int, values: Any) -> dict[str, list[Way]]:
    """Return the implementations of sums and prefix sums over segments of a length, and the copy, by kind."""
    import torch
    from tiles.kernels import FUNCTIONS, Segments

    count = len(values) // length
    segments = Segments(torch.full((count,), length, dtype=torch.int64, device=values.device))
    assert segments.parts.parts.count  # the host waits for them here, and not where calls are timed
    rows = values.view(count, length)
    target = torch.empty_like(values)
    size = 2 * len(values)
    implementations: dict[str, list[Way]] = {"copy": [Way("copy", lambda: target.copy_(values), 2 * size)]}
    for kind, written_bytes in (("reduction", 4 * count), ("scan", 4 * len(values))):
        implementations[kind] = [
            Way(name, lambda name=name, function=function: function(name, values, segments), size + written_bytes)  # type: ignore[misc]
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


class DeviceTimer:
    """A timer by the device's clock. Caches are as the call before left them: each call moves more than they hold."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.waits = False
        """Whether the device waited for the host within a call, so that its time is not that of kernels alone."""

    def __call__(self, run: Callable[[], object]) -> float:
        elapsed = self._device.timed(run, [()])
        self.waits |= elapsed.waits
        return elapsed.ns / 1e9


def measure(
    device: Device, elements: int, rounds: int, report: turns.Report, implementations_of: Implementations = ways
) -> dict[str, int]:
    """Add a row for each length to a report, and return at how many lengths each kind reaches the goal."""
    import torch

    values = torch.rand(elements, device=device.torch_name, generator=device.generator(0)).half() / 16
    reached, timer, ceiling = {"reduction": 0, "scan": 0}, DeviceTimer(device), device.ceiling()
    for length in (length for length in LENGTHS if length <= elements):
        implementations = implementations_of(length, values)
        errors = {}
        for kind in MOST_ERROR:
            for way in list(implementations[kind]):
                errors[way.name] = error(kind, way, length, values)
                if not errors[way.name] <= MOST_ERROR[kind]:  # segments too long for float16 between products
                    implementations[kind].remove(way)
        best = shares(implementations, timer, rounds)
        none = ("none is correct", float("nan"))
        (added, share), (scanned, scan_share) = best.get("reduction", none), best.get("scan", none)
        reached["reduction"] += share >= GOAL
        reached["scan"] += scan_share >= GOAL
        (copy,) = implementations["copy"]
        copy_rate = copy.nbytes / timer(copy.run)
        of_peak = copy_rate / ceiling.bytes_per_s if isinstance(ceiling, Ceiling) else float("nan")
        report.add(
            [
                str(length), added, f"{share:.2f}", f"{best['torch.sum'][1]:.2f}", scanned, f"{scan_share:.2f}",
                f"{best['torch.cumsum'][1]:.2f}", f"{max(errors.values(), default=float('nan')):.1e}", f"{of_peak:.2f}",
            ],
            errors=errors,
            best=best,
            copy_bytes_per_s=copy_rate,
        )  # fmt: skip
    joules = _joules(device, implementations)
    if joules:
        report.notes.append(f"Energy per call, at {length} elements: {joules}.")
    if timer.waits:
        report.notes.append("The device waited for the host within calls, whose times are no kernels' alone.")
    return reached


def _joules(device: Device, implementations: dict[str, list[Way]]) -> str:
    """Return the energy of one call of each kind in words; empty without a counter."""
    figures = []
    for kind, kind_ways in implementations.items():
        for way in kind_ways[:1]:

            def repeat(calls: int, way: Way = way) -> object:
                return device.waited(lambda: [way.run() for _ in range(calls)])

            joules = energy.joules_per_call(device, repeat)
            figures += [] if joules is None else [f"{kind} ({way.name}) {1e3 * joules:.3g} mJ"]
    return ", ".join(figures)


def main(arguments: Sequence[str] | None = None) -> None:
    argument_parser = turns.parser(__doc__, rounds=20)
    argument_parser.add_argument("--device", default="cuda:0", help="identifier (default: cuda:0)")
    options = turns.parse(argument_parser, arguments)
    gpu_workloads.require_device(options.device)
    report = turns.Report(
        "gpu_tiles",
        "Rates of sums and prefix sums relative to a copy, by elements per segment",
        (
            "elements", "sums, fastest", "share", "torch.sum", "prefix sums, fastest", "share ", "torch.cumsum",
            "error", "copy of peak",
        ),
    )  # fmt: skip
    device = devices.of(options.device)
    with report.until_interrupted():
        elements = QUICK_ELEMENTS if options.quick else ELEMENTS
        for kind, count in measure(device, elements, options.rounds, report).items():
            verdict = "met" if 2 * count >= len(LENGTHS) else "missed"
            report.notes.append(
                f"Goal: {GOAL:.0%} of a copy in half of the lengths: {kind} in {count} of {len(LENGTHS)}, {verdict}."
            )
    report.notes.append(gpu_workloads.device_line(options.device))
    report.finish(options)


if __name__ == "__main__":
    main()
