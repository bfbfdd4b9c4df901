"""An evaluation that was made again is called the same, and one that was changed is called different."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xsp.evaluate import contention
from xsp.evaluate.quality.judging import Judgement, Outcome, RunContext, Verdict, judge, settle

DRAW = np.random.default_rng(0)
IMAGES = DRAW.integers(0, 256, (6, 3, 12, 12)).astype(np.float32)
FIRST = (DRAW.normal(size=(3 * 6 * 6, 64)) / 10).astype(np.float32)
LAST = (DRAW.normal(size=(64, 10)) / 8).astype(np.float32)
ENVIRONMENT = {"torch": "2.4.0", "threads": "2", "precision": "float32", "batch": "1", "cpu": "fast", "host": "one"}


def nearest(images: np.ndarray) -> np.ndarray:
    return images[:, :, ::2, ::2]


def mean(images: np.ndarray) -> np.ndarray:
    return images.reshape(len(images), 3, 6, 2, 6, 2).mean(axis=(3, 5), dtype=np.float32)


def outputs(
    resize: Callable[[np.ndarray], np.ndarray] = mean,
    order: slice = slice(None),
    scale: float = 1 / 128,
    precision: type = np.float32,
    summed: int = 1,
) -> np.ndarray:
    """Put images through a small network; `summed` parts are summed up one after the other, as threads do."""
    given = ((resize(IMAGES)[:, order] - 128) * np.float32(scale)).reshape(len(IMAGES), -1).astype(precision)
    hidden = sum(part @ weights for part, weights in zip(
        np.array_split(given, summed, 1), np.array_split(FIRST.astype(precision), summed), strict=True
    ))  # fmt: skip
    return np.asarray(np.maximum(hidden, 0) @ LAST.astype(precision)).astype(np.float32)


def latencies(seed: int, slower: float = 1.0, noise: float = 0.05, start: float = 0.03) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    level = 3e6 * slower * draw.normal(1, start)
    return [level * draw.lognormal(0, noise, 60)]


def outcome(seed: int = 0, environment: dict[str, str] | None = None, slower: float = 1.0, **changed) -> Outcome:
    return Outcome({"scores": outputs(**changed)}, {"1": latencies(seed, slower)}, environment or ENVIRONMENT)


BEFORE = outcome(10_000)

CHANGES: dict[str, Callable[[int], Outcome]] = {
    "resize filter": lambda seed: outcome(seed, resize=nearest),
    "channel order": lambda seed: outcome(seed, order=slice(None, None, -1)),
    "normalisation": lambda seed: outcome(seed, scale=1 / 127.5),
    "dtype, not told": lambda seed: outcome(seed, precision=np.float16),
    "dtype": lambda seed: outcome(seed, {**ENVIRONMENT, "precision": "bfloat16"}),
    "threads": lambda seed: outcome(seed, {**ENVIRONMENT, "threads": "1"}, summed=2),
    "threads, not told": lambda seed: outcome(seed, slower=1.7, summed=2),
    "library version": lambda seed: outcome(seed, {**ENVIRONMENT, "torch": "2.4.1"}),
    "batch": lambda seed: outcome(seed, {**ENVIRONMENT, "batch": "2"}),
}


def told(change: Callable[[int], Outcome], times: int = 40) -> list[Verdict]:
    found = []
    for course in range(times):
        seeds = iter(range(100 * course, 100 * course + 100))
        found.append(settle(BEFORE, lambda: change(next(seeds))).verdict)  # noqa: B023
    return found


@pytest.mark.slow
def test_unchanged_evaluations_are_the_same_in_95_of_100() -> None:
    found = told(outcome, 100)
    assert found.count(Verdict.SAME) >= 95
    assert Verdict.DIFFERENT not in found


@pytest.mark.parametrize("name", CHANGES)
def test_changed_evaluations_are_different_in_95_of_100(name: str) -> None:
    assert told(CHANGES[name]).count(Verdict.DIFFERENT) >= 38


def test_another_order_of_summation_alone_is_the_same() -> None:
    found = judge(BEFORE, outcome(1, summed=5))
    assert found.verdict is Verdict.SAME
    assert any("rounding" in each.text for each in found.reasons)


def test_the_reasons_name_what_differs_and_what_may() -> None:
    found = judge(BEFORE, outcome(1, {**ENVIRONMENT, "threads": "1", "host": "two"}))
    assert found.verdict is Verdict.DIFFERENT
    assert [each.text for each in found.decisive_reasons] == ["threads: 2, then 1"]
    assert any("differences in host do not count" in each.text for each in found.reasons)
    assert found.by("outputs") is Verdict.SAME


def test_what_is_missing_cannot_be_told() -> None:
    for lacking, subject in (
        (replace(BEFORE, outputs=None), "outputs"),
        (replace(BEFORE, environment={}), "environment"),
        (replace(BEFORE, environment={**ENVIRONMENT, "gpu": "x"}), "environment"),
        (replace(BEFORE, latencies_ns={}), "latency"),
        (replace(BEFORE, latencies_ns={"1": []}), "latency"),
        (replace(BEFORE, latencies_ns={"1": [np.array([3e6])]}), "latency"),
    ):
        found = judge(BEFORE, lacking)
        assert found.verdict is Verdict.CANNOT_TELL, subject
        assert found.by(subject) is Verdict.CANNOT_TELL


def of_outputs(one: np.ndarray, other: np.ndarray, precision: str = "") -> Judgement:
    return judge(
        replace(BEFORE, outputs={"x": one}, precision=precision), replace(BEFORE, outputs={"x": other})
    )  # fmt: skip


def test_outputs_of_other_shapes_types_and_holes_are_different() -> None:
    values = np.array([1.0, 2.0, np.nan], np.float32)
    assert of_outputs(values, values.copy()).verdict is Verdict.SAME
    assert of_outputs(values, np.array([1.0, 2.0, np.inf], np.float32)).verdict is Verdict.DIFFERENT
    assert of_outputs(values, values[:2]).verdict is Verdict.DIFFERENT
    assert of_outputs(values, values.astype(np.float64)).verdict is Verdict.DIFFERENT
    assert of_outputs(np.array([3, 1]), np.array([3, 2])).verdict is Verdict.DIFFERENT
    assert of_outputs(np.array([0.0]), np.array([-0.0])).verdict is Verdict.SAME
    assert of_outputs(np.array([1e308]), np.array([-1e308])).verdict is Verdict.DIFFERENT
    assert of_outputs(np.zeros(0), np.zeros(0)).verdict is Verdict.CANNOT_TELL


@pytest.mark.parametrize("scalar", [np.float32, lambda value: np.array(value, np.float32)], ids=["scalar", "array"])
def test_outputs_of_one_number_are_compared_as_others(scalar: Callable[[Any], Any]) -> None:
    one = scalar(1)
    assert of_outputs(one, scalar(np.nextafter(np.float32(1), np.float32(2)))).by("outputs") is Verdict.SAME
    assert of_outputs(one, scalar(1.5)).by("outputs") is Verdict.DIFFERENT


@pytest.mark.parametrize(
    "value",
    [np.zeros((4, 10)), np.full((4, 10), np.nan), np.tile(np.arange(10.0), (4, 1)), np.full((4, 1), 3)],
    ids=["zeros", "NaN", "one row for all samples", "one class for all samples"],
)
def test_outputs_that_are_constant_tell_nothing(value: np.ndarray) -> None:
    found = of_outputs(value, value.copy())
    assert found.verdict is Verdict.CANNOT_TELL
    assert "constant" in found.decisive_reasons[0].text
    assert of_outputs(value, value + 1 if not np.isnan(value).any() else np.zeros_like(value)).verdict is (
        Verdict.DIFFERENT
    )


def test_a_constant_beside_outputs_that_vary_takes_nothing_from_them() -> None:
    both = {"scores": outputs(), "mask": np.ones((6, 4))}
    before, after = (Outcome(dict(both), {"1": latencies(seed)}, ENVIRONMENT) for seed in (0, 1))
    assert judge(before, after).by("outputs") is Verdict.SAME
    one = Outcome({"scores": outputs()[:1]}, {"1": latencies(0)}, ENVIRONMENT)
    assert judge(one, one).by("outputs") is Verdict.SAME  # of one sample nobody knows


def test_a_difference_as_large_as_that_of_samples_is_no_rounding() -> None:
    draw = np.random.default_rng(0)
    level = np.tile(draw.normal(size=10), (8, 1)) * 100
    one, other = (level + 1e-5 * draw.normal(size=level.shape) for _ in range(2))
    hardly = of_outputs(one.astype(np.float32), other.astype(np.float32))
    assert hardly.verdict is Verdict.CANNOT_TELL
    assert "hardly depend on the input" in hardly.decisive_reasons[0].text


def test_rounding_is_that_of_the_precision() -> None:
    values = np.linspace(1, 2, 50, dtype=np.float32)
    assert of_outputs(values, values * np.float32(1.01)).verdict is Verdict.DIFFERENT
    assert of_outputs(values, values * np.float32(1.01), "bfloat16").verdict is Verdict.SAME
    assert of_outputs(values, values * np.float32(1.5), "bfloat16").verdict is Verdict.DIFFERENT


def test_a_disturbance_of_one_run_is_repeated_before_it_is_called_a_change() -> None:
    runs = iter([outcome(1, slower=1.6), *(outcome(seed) for seed in range(2, 9))])
    assert settle(BEFORE, lambda: next(runs)).verdict is not Verdict.DIFFERENT
    assert judge(BEFORE, outcome(1, slower=1.6)).by("latency") is Verdict.DIFFERENT


# --- latencies of two times ------------------------------------------------------------------------------------------


def at_a_time(
    draw: np.random.Generator, loads: tuple[float, ...], factor: float = 1.0, noted: bool = True, computes: bool = True
) -> Iterator[Outcome]:
    """Yield outcomes of one period of a machine: the first load is that of the first run; the last one stays.

    A period, each start and each request differ by chance. Under a load a request waits for a core for a share of its
    time that varies; what was noted is the greatest share that it may have been.
    """
    period = draw.normal(1, 0.03)
    for load in itertools.chain(loads, itertools.repeat(loads[-1])):
        alone = 3e6 * factor * period * draw.normal(1, 0.03) * draw.lognormal(0, 0.05, 60)
        waited = 1 + (load - 1) * draw.uniform(0.3, 1, 60)
        around = RunContext(
            load if noted else 1.0, float(np.median(alone)) * draw.normal(1, 0.03) if computes else None
        )
        yield Outcome(BEFORE.outputs, {"1": [alone * waited]}, ENVIRONMENT, contexts={"1": [around]})


QUIET, LOADED, DISTURBED = (1.0,), (2.5,), (1.9, 1.0)
TIMES = [
    (QUIET, QUIET), (LOADED, QUIET), (QUIET, LOADED), (LOADED, LOADED), (QUIET, DISTURBED),
    (QUIET, (1.0, 2.5, 1.2, 4.0)),
]  # fmt: skip


def verdicts(then: tuple[float, ...], now: tuple[float, ...], seed: int, factor: float = 1.0, **how: bool) -> Counter:
    found: Counter = Counter()
    for course in range(200):
        draw = np.random.default_rng([seed, course])
        before, again = next(at_a_time(draw, then, **how)), at_a_time(draw, now, factor, **how)
        found[settle(before, lambda again=again: next(again)).verdict] += 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("then", "now"), TIMES)
def test_an_unchanged_evaluation_is_the_same_whatever_else_the_machine_did(then: tuple, now: tuple) -> None:
    found = verdicts(then, now, 1)
    if then is now is LOADED:  # no run tells whether requests compute all the time: nobody can tell
        assert found[Verdict.DIFFERENT] <= 2
    else:
        assert found[Verdict.SAME] >= 190


@pytest.mark.slow
@pytest.mark.parametrize(("then", "now"), TIMES)
def test_without_processor_times_a_load_is_no_difference(then: tuple, now: tuple) -> None:
    found = verdicts(then, now, 2, computes=False)
    assert found[Verdict.DIFFERENT] <= 2
    assert found[Verdict.SAME] >= (190 if then is QUIET and now is not LOADED else 0)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.7, 0.55])
@pytest.mark.parametrize("computes", [True, False])
def test_a_change_on_a_quiet_machine_is_told_by_latency_alone(factor: float, computes: bool) -> None:
    assert verdicts(QUIET, QUIET, 3, factor, computes=computes)[Verdict.DIFFERENT] >= 190


@pytest.mark.slow
@pytest.mark.parametrize(("then", "now"), TIMES)
def test_a_change_under_load_is_never_called_the_same(then: tuple, now: tuple) -> None:
    assert verdicts(then, now, 4, 1.7)[Verdict.SAME] <= 10
    assert verdicts(then, now, 5, 6.0)[Verdict.DIFFERENT] >= (190 if then is QUIET else 0)


def test_repeats_of_now_do_not_tell_how_the_time_of_the_kept_run_was() -> None:
    """The kept run was 18 % slower by a load that nobody noted; each repeat is within 1 %."""
    draw = np.random.default_rng(6)
    fresh = [draw.lognormal(0, 0.01, 60) * 3e6 for _ in range(5)]
    kept = replace(BEFORE, latencies_ns={"1": [1.18 * fresh[0]]})
    assert judge(kept, replace(BEFORE, latencies_ns={"1": fresh})).by("latency") is not Verdict.DIFFERENT


def test_processor_time_says_nothing_of_what_waits_or_computes_on_several_cores() -> None:
    run = np.full(60, 3e6)
    for processor in (1e6, 6e6):
        kept = replace(BEFORE, latencies_ns={"1": [run]}, contexts={"1": [RunContext(1.0, processor)]})
        again = replace(BEFORE, latencies_ns={"1": [1.7 * run]}, contexts={"1": [RunContext(1.2, processor)]})
        assert judge(kept, again).by("latency") is Verdict.DIFFERENT
        again = replace(again, contexts={"1": [RunContext(2.0, processor)]})
        assert judge(kept, again).by("latency") is Verdict.CANNOT_TELL


# --- how much slower other work on the machine may have made requests -------------------------------------------------


def test_the_share_of_time_that_tasks_waited_for_cores_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pressure, stat = tmp_path / "pressure", tmp_path / "stat"
    now = iter([10.0, 14.0])
    monkeypatch.setattr(contention.time, "perf_counter", lambda: next(now))
    pressure.write_text("some avg10=1.00 avg60=2.00 avg300=3.00 total=1000000\nfull avg10=0 total=5\n")
    stat.write_text("cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 1 1\n")
    watch = contention.Watch(pressure, stat)
    pressure.write_text("some avg10=1.00 avg60=2.00 avg300=3.00 total=3000000\n")
    stat.write_text("cpu  150 0 100 830 0 0 0 20 0 0\n")
    assert watch.changes() == {"waited_for_cores": 0.5, "stolen": 0.2}
    assert contention.slowdown({"waited_for_cores": 0.5, "stolen": 0.2, "load": 9}, 2) == pytest.approx(2.5)


def test_what_cannot_be_read_is_unknown_and_the_load_average_stands_for_it(tmp_path: Path) -> None:
    (tmp_path / "odd").write_text("some\x00 total=x\n")
    found = contention.Watch(tmp_path / "odd", tmp_path / "none").changes()
    assert found == {"waited_for_cores": None, "stolen": None}
    assert contention.slowdown({**found, "load": 5.0}, 2) == pytest.approx(2.5)
    assert contention.slowdown({**found, "load": 0.4}, 2) == 1.0
    assert contention.slowdown({}, None) == 1.0
    assert contention.slowdown({"load": "much"}, "two") == 1.0
    assert contention.slowdown({"waited_for_cores": 1.0}, 2) == contention.MOST_SLOWDOWN
