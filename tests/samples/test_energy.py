"""The energy of a step from a counter that is updated far less often than steps end; counters and loops are made up."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import xsp
from xsp import table
from xsp.analyses import ANALYSES
from xsp.errors import AnalysisError
from xsp.samples.sampler import Sample
from xsp.schema import SAMPLE_COLUMNS, Level
from xsp.testing import spans, trace_of, with_loop

MS = 1_000_000
M = int(Level.MODEL)
KERNEL = "\n step s 0-100 step=0\n kernel k 10-90 step=0"


class Program:
    """A program of recorded steps with bare ones between them, and the power of its device over time."""

    def __init__(self, busy_w: float = 600.0, idle_w: float = 100.0) -> None:
        self.now, self.busy_w, self.idle_w = 0.0, busy_w, idle_w
        self.rows: list[dict[str, Any]] = []
        self.busy: list[tuple[float, float]] = []

    def recorded(self, before_ms: float = 0.0, dur_ms: float = 40.0, own_ms: float = 30.0) -> None:
        """Wait for the device, work for xsp, run a step; the device does nothing while xsp works."""
        self._row(M, before_ms + own_ms, dur_ms, before_ns=before_ms * 1e6, own_ns=own_ms * 1e6, steady=False)
        self.busy.append((self.now - dur_ms, self.now))

    def stretch(
        self, steps: int, device_ms: float = 30.0, host_ms: float = 30.0, kinds: Sequence[int] = (0,), **fields: Any
    ) -> None:
        """Run bare steps on the host, and then a recorded one, which waits for the device."""
        start = self.now
        for step in range(steps):
            self._row(
                10, 0.0, host_ms, **{"kind": kinds[step % len(kinds)], "samples": 8, "steady": step > 2, **fields}
            )
        end = start + steps * max(device_ms, host_ms)
        self.busy.append((start, end))
        self.recorded(before_ms=end - self.now)

    def _row(self, rung: int, before_ms: float, dur_ms: float, **fields: Any) -> None:
        self.now += before_ms
        at = {"step": len(self.rows), "rung": rung, "start_ns": round(self.now * MS), "dur_ns": dur_ms * MS}
        self.rows.append({**at, **fields})
        self.now += dur_ms

    def joules(self, at_ms: float) -> float:
        """Return what the device has used until then."""
        worked = sum(max(0.0, min(at_ms, end) - start) for start, end in self.busy)
        return (self.idle_w * at_ms + (self.busy_w - self.idle_w) * worked) / 1e3

    def readings(
        self, period_ms: float = 100.0, every_ms: float = 50.0, device: int = 0, phase_ms: float = 7.0
    ) -> list[Sample]:
        """Return readings, irregular as those of a thread, of a counter that is updated once in a period, in mJ."""
        draw, result, at = random.Random(device), [], 3.0
        while at < self.now:
            updated = (at - phase_ms) // period_ms * period_ms + phase_ms
            result.append(sample(at, "gpu.energy", round(self.joules(max(0.0, updated)), 3), "J", device))
            result.append(sample(at, "gpu.power", self.idle_w, "W", device))
            at += every_ms * draw.uniform(0.8, 1.2)
        return result

    def trace(self, samples: Sequence[Sample], run: dict[str, Any] | None = None) -> xsp.Trace:
        loop = with_loop(trace_of(spans(KERNEL), {"name": "s", **(run or {})}), self.rows)
        if samples:
            table.insert(loop.con, "samples", samples, SAMPLE_COLUMNS)
        return loop


def sample(at_ms: float, name: str, value: float, unit: str = "W", device: int | None = 0, rank: int = 0) -> Sample:
    return Sample(round(at_ms * MS), rank, device, name, unit, value)


def program(stretches: int = 8, steps: int = 20, **how: Any) -> Program:
    made = Program()
    made.recorded()
    for place in range(stretches):
        made.stretch(steps + place % 3, **how)
    return made


def rows(trace: xsp.Trace) -> list[dict[str, Any]]:
    result = ANALYSES["energy"](trace)
    return [dict(zip(result.columns, row, strict=True)) for row in result.fetchall()]


def refusal(trace: xsp.Trace) -> str:
    with pytest.raises(AnalysisError) as error:
        ANALYSES["energy"](trace)
    return str(error.value)


# --- figures ----------------------------------------------------------------------------------------------


def test_the_power_of_bare_steps_is_that_of_the_counter_and_not_that_of_the_whole_run() -> None:
    made = program()
    assert made.joules(made.now) / made.now * 1e3 < 590, "with the time in which xsp works"
    [row] = rows(made.trace([*made.readings(), sample(5, "gpu.power.limit", 700.0)]))
    assert row["watts"] == pytest.approx(600, rel=0.012)
    assert row["low_watts"] < 600 < row["high_watts"] < 1.04 * row["low_watts"]
    assert row["joules"] == pytest.approx(600 * 0.030, rel=0.012)
    assert row["low_joules"] < 18 < row["high_joules"]
    assert row["samples_per_joule"] == pytest.approx(8 / 18, rel=0.012)
    assert row["percent_of_limit"] == pytest.approx(100 * 6 / 7, rel=0.012)
    assert (row["scope"], row["kind"], row["device"], row["stretches"]) == ("program", 0, 0, 8)
    assert (row["lowest_watts"], row["throttled"], row["other_processes"]) == (100.0, None, None)
    assert row["update_ms"] == pytest.approx(100, rel=0.01)


def test_the_device_works_off_its_backlog_until_the_next_recorded_step() -> None:
    made = program(steps=15, host_ms=5.0)
    [row] = rows(made.trace(made.readings()))
    assert row["watts"] == pytest.approx(600, rel=0.012)
    assert row["joules"] == pytest.approx(18, rel=0.02)


@pytest.mark.parametrize(("period_ms", "every_ms"), [(20.0, 50.0), (100.0, 100.0), (100.0, 20.0), (250.0, 50.0)])
def test_counters_of_any_period_and_readings_of_any_interval_give_the_same_power(
    period_ms: float, every_ms: float
) -> None:
    made = program(stretches=10, steps=60)
    [row] = rows(made.trace(made.readings(period_ms, every_ms)))
    assert row["watts"] == pytest.approx(600, rel=0.02)
    assert row["low_watts"] <= 600 <= row["high_watts"]


def test_the_interval_contains_what_differs_between_stretches() -> None:
    made = program()
    made.busy = [(start, end - (place % 4 == 1) * 0.5 * (end - start)) for place, (start, end) in enumerate(made.busy)]
    [row] = rows(made.trace(made.readings()))
    assert row["high_watts"] - row["low_watts"] > 0.2 * row["watts"]


def test_several_devices_have_a_row_each_and_one_for_their_sum() -> None:
    made, other = program(), program()
    other.busy_w = 300.0
    total, first, second = rows(made.trace([*made.readings(), *other.readings(device=1, phase_ms=60.0)]))
    assert [entry["device"] for entry in (total, first, second)] == [None, 0, 1]
    assert second["watts"] == pytest.approx(300, rel=0.012)
    for column in ("watts", "joules", "low_watts", "high_watts"):
        assert total[column] == pytest.approx(first[column] + second[column])
    assert total["low_joules"] < total["joules"] < total["high_joules"]


def test_a_device_whose_counter_stands_still_has_no_row_and_no_sum() -> None:
    made = program()
    still = [sample(at, "gpu.energy", 0.0, "J", device=1) for at in range(0, 5000, 50)]
    assert [row["device"] for row in rows(made.trace([*made.readings(), *still]))] == [0]


def test_a_stretch_in_which_the_counter_goes_down_is_left_out() -> None:
    made = program()
    start, end = made.busy[7]
    reset = (start + end) / 2
    readings = [
        entry._replace(value=entry.value - made.joules(reset))
        if entry.name == "gpu.energy" and entry.time_ns > reset * MS
        else entry
        for entry in made.readings()
    ]  # fmt: skip
    [row] = rows(made.trace(readings))
    assert row["stretches"] == 7
    assert row["watts"] == pytest.approx(600, rel=0.01)


def test_slow_stretches_failed_steps_and_those_of_several_kinds_do_not_count() -> None:
    made = Program()
    made.recorded()
    made.stretch(10, device_ms=90.0, host_ms=90.0, steady=False)  # the program warms up
    for _ in range(6):
        made.stretch(20)
    made.stretch(20, kinds=(0, 1))
    made.stretch(20, status="error")
    by_kind = {row["kind"]: row for row in rows(made.trace(made.readings()))}
    assert by_kind[0]["stretches"] == 6
    assert (by_kind[1]["stretches"], by_kind[1]["watts"], by_kind[1]["joules"]) == (0, None, None)


def test_throttling_and_other_processes_count_only_while_the_figures_were_taken() -> None:
    made = program()
    start, end = made.busy[3]
    inside = (start + end) / 2
    masks = [sample(at, "gpu.clock.reasons", 0x0, "mask") for at in range(0, round(made.now), 50)]
    others = [sample(at, "gpu.processes.others", count) for at, count in ((1, 2.0), (20, 0.0), (made.now, 0.0))]
    quiet = [*made.readings(), *masks, *others]
    [row] = rows(made.trace(quiet))
    assert (row["throttled"], row["other_processes"]) == ("", 0)
    disturbed = [*quiet, sample(inside + 0.1, "gpu.clock.reasons", 0x4 | 0x40, "mask")]
    disturbed += [sample(inside, "gpu.processes.others", 3.0), sample(inside + 1, "gpu.processes.others", 0.0)]
    [row] = rows(made.trace(disturbed))
    assert (row["throttled"], row["other_processes"]) == ("power cap, too hot, hardware", 3)


def test_each_rank_has_its_own_steps_and_devices() -> None:
    one, two = program(), program()
    two.busy_w = 400.0
    samples = [*one.readings(), *(entry._replace(rank=1) for entry in two.readings())]
    one.rows += [{**row, "rank": 1} for row in two.rows]
    result = rows(one.trace(samples))
    assert [(row["scope"], round(row["watts"], -1)) for row in result] == [("rank 0", 600), ("rank 1", 400)]


# --- refusals ---------------------------------------------------------------------------------------------


def test_short_stretches_are_refused_with_what_to_do() -> None:
    made = program(steps=3)
    output = refusal(made.trace(made.readings()))
    assert output.startswith("energy (Energy of a step): the energy counter of device 0 changes every ")
    assert "0 of the 3 necessary bursts" in output
    assert "--budget" in output
    few = program(stretches=2)
    assert "2 of the 3 necessary bursts" in refusal(few.trace(few.readings()))


@pytest.mark.parametrize(
    ("run", "why"),
    [
        ({"samples": {"absent": {"nvml": "no driver"}}}, "no driver"),
        ({"samples": {"notes": ["device 0: gpu.energy cannot be read (Not Supported)"]}}, "(Not Supported)"),
        ({}, "nvidia-ml-py"),
    ],
)
def test_without_a_counter_the_reason_is_said(run: dict[str, Any], why: str) -> None:
    made = program()
    power = [entry for entry in made.readings() if entry.name != "gpu.energy"]
    output = refusal(made.trace(power, run))
    assert "energy counter was not sampled" in output
    assert why in output


def test_a_counter_that_stands_still_and_a_run_without_bare_steps_are_refused() -> None:
    made = program()
    still = [sample(at, "gpu.energy", 0.0, "J") for at in range(0, 5000, 50)]
    assert "did not change" in refusal(made.trace(still))
    every = Program()
    for _ in range(50):
        every.recorded()
    assert "time of an iteration is unknown" in refusal(every.trace(every.readings()))


def without_samples(_: Program) -> xsp.Trace:
    return trace_of(spans(KERNEL), {"name": "s", "imported": {"format": "chrome"}})


def with_samples(made: Program) -> xsp.Trace:
    trace = trace_of(spans(KERNEL), {"name": "s"})
    table.insert(trace.con, "samples", made.readings(), SAMPLE_COLUMNS)
    return trace


@pytest.mark.parametrize("of", [without_samples, with_samples])
def test_a_trace_without_a_loop_is_refused(of: Callable[[Program], xsp.Trace]) -> None:
    assert "only runs of `xsp run` and xsp.profile" in refusal(of(program()))
