"""The link that was measured on this machine: its curves, what ranks take from each other, and what is refused."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from xsp.bench import transfers
from xsp.bench.environment import Environment
from xsp.bench.spec import Status, untimed
from xsp.bench.timings import Timings
from xsp.cli import main
from xsp.errors import UsageError
from xsp.predict import collectives, measured, prediction, scaling, text
from xsp.predict.collectives import LINKS, Algorithm, Link
from xsp.predict.recorded import RecordedStep
from xsp.predict.training import Job, Layer, Work

HERE = Environment({"cpu": "test", "cores": 2})
ALPHA, BETA = 1e-4, 1e-9
PRODUCT, COPY = 2e-4, 4e-3
LOST = 0.5
LATER = 2e-3
MB = 1_000_000


def reduces(size: float) -> float:
    return ALPHA + BETA * size


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Link:
    """Two ranks: products take 1.5 times as long, copies twice, and half of a collective beside computing is lost."""
    return measured.of(timed(tmp_path_factory.mktemp("timings"), HERE))


def timed(place: Path, here: Environment, families: Sequence[str] = transfers.PREDICTED[:4]) -> Timings:
    timings = Timings.open(place, here)
    made = []
    for spec in transfers.of_collectives(families, (2,)):
        name, given = transfers.arguments(spec)
        two, size = given["ranks"] == 2, given["bytes"]
        if name == "beside":
            alone = sorted((given["products"] * 1.5 * PRODUCT, reduces(size)))
            seconds = alone[1] + LOST * alone[0]
        elif name == "after":
            seconds = reduces(size) + LATER
        else:
            seconds = {
                "all_reduce": reduces(size), "together-product": PRODUCT * (1.5 if two else 1),
                "together-copy": COPY * (2 if two else 1),
            }[name]  # fmt: skip
        ns = 1e9 * seconds
        figures = {"trimmed_ns": ns, "low_ns": ns, "high_ns": ns, "least_ns": ns, "taken_ns": 1}
        made.append(dataclasses.replace(untimed(spec, Status.OK), **figures))  # type: ignore[arg-type]
    timings.add(made)
    return timings


def step(*gradients: int) -> Work:
    return Work(tuple(Layer(f"{each}", 0.01, 0.02, (each,)) for each in gradients), update=0.003)


def demo(work: Work, ranks: int = 1, page_faults: float = 0.0) -> RecordedStep:
    return RecordedStep("demo", work, 0.033, None, ranks, 8.0, None, (), (), page_faults=page_faults)


def test_the_table_tells_the_link_and_what_ranks_take_from_each_other(link: Link) -> None:
    assert link.alpha == pytest.approx(ALPHA, rel=1e-3)
    assert link.beta == pytest.approx(BETA, rel=1e-3)
    assert link.curves is not None
    shared = link.curves.sharing_at(2)
    assert shared.compute_factor == pytest.approx(1.5)
    assert shared.copy_factor == pytest.approx(2)
    assert shared.copy_per_byte == pytest.approx(2 * COPY / transfers.COPY_BYTES)
    assert shared.overlap_loss == pytest.approx(LOST, rel=0.01)
    assert link.curves.sharing_at(1).compute_factor == 1
    assert collectives.all_reduce_seconds(Algorithm.AUTO, link, 2, 5 * MB) == pytest.approx(reduces(5 * MB), rel=1e-3)


def test_a_step_of_one_bucket_is_slower_computing_copies_and_the_collective(link: Link) -> None:
    work = step(5 * MB)
    found = prediction.predict(scaling.work_on_shared_cores(demo(work), Job(2, link)), Job(2, link))
    copied = 2 * 5 * MB * 2 * COPY / transfers.COPY_BYTES
    assert found.step == pytest.approx(1.5 * 0.03 + copied + reduces(5 * MB) + 2 * 0.003, rel=1e-3)
    assert found.parts["cores for communication"] == pytest.approx(copied, rel=1e-3)
    assert sum(found.parts.values()) == pytest.approx(found.step)


def test_a_collective_beside_computing_costs_it_what_was_measured(link: Link) -> None:
    work = step(2 * MB, 2 * MB)  # the gradient that arrives first fills the first bucket
    found = prediction.predict(work, Job(2, link))
    copied = 2 * 4 * MB * 2 * COPY / transfers.COPY_BYTES
    assert found.step == pytest.approx(0.06 + copied + (1 + LOST) * reduces(2 * MB) + 0.003, rel=1e-3)


@pytest.mark.parametrize("ahead", [1e-4, 1e-3, 3e-3, 0.02])
def test_what_is_computed_beside_a_collective_and_the_collective_take_what_both_were_measured_to_take(
    link: Link, ahead: float
) -> None:
    """`Sharing.overlap_loss` is the loss in C + R → max + loss · min: a step of both takes that in either order."""
    work = Work((Layer("none", 0.01, ahead), Layer("all", 0.01, 0.02, (2 * MB,))))
    found = prediction.predict(work, Job(2, link))
    copied = 2 * 2 * MB * 2 * COPY / transfers.COPY_BYTES
    less, more = sorted((ahead, reduces(2 * MB)))
    assert found.step == pytest.approx(0.04 + copied + more + LOST * less, rel=1e-6)


def test_overlap_is_counted_from_the_first_launch_as_torch_does_and_is_not_what_is_hidden(link: Link) -> None:
    work = step(2 * MB, 2 * MB)
    found = prediction.predict(work, Job(2, link))
    copied = 2 * MB * 2 * COPY / transfers.COPY_BYTES
    reduced = reduces(2 * MB)
    inside = LOST * reduced + 0.02 + copied  # from the launch of the first bucket to the end of the backward pass
    assert found.overlap == pytest.approx(inside / (inside + reduced + 2 * copied), rel=1e-3)
    longer = 1 + LOST  # the first collective, for what is computed beside it
    assert found.hidden / found.communication == pytest.approx(longer / (longer + 1), rel=1e-3)
    assert prediction.predict(work, Job(2, link, overlap=False)).overlap == pytest.approx(0.0)
    assert prediction.predict(step(5 * MB), Job(2, link)).overlap == pytest.approx(0.0)
    assert prediction.predict(work, Job(1, link)).overlap is None


def test_the_first_collective_after_computing_takes_longer_once_in_a_step(tmp_path: Path, link: Link) -> None:
    later = measured.of(timed(tmp_path, HERE, transfers.PREDICTED))
    assert later.curves is not None
    for size in (1000, 64 * 1024, 5 * MB, 100 * MB):
        assert later.curves.sharing_at(2).seconds_after_computing(size) == pytest.approx(LATER)
    for work in (step(5 * MB), step(2 * MB, 2 * MB), step(2 * MB, 30 * MB, 30 * MB)):
        for overlap in (True, False):
            without, found = (prediction.predict(work, Job(2, each, overlap=overlap)).step for each in (link, later))
            assert found == pytest.approx(without + LATER)
    assert "The first one after computing takes 2 ms longer" in " ".join(later.curves.notes([2], 5 * MB))
    assert link.curves is not None
    assert "predicted too short" in " ".join(link.curves.notes([2], 5 * MB))


def test_the_mean_of_calibrations_counts_and_not_the_last_one(tmp_path: Path) -> None:
    found = measured.of(calibrated(tmp_path, [1.2, 1 / 1.2], [1.0, 1.0]))
    assert collectives.all_reduce_seconds(Algorithm.AUTO, found, 2, 5 * MB) == pytest.approx(reduces(5 * MB), rel=1e-3)


def test_one_rank_shares_nothing(link: Link) -> None:
    work = step(5 * MB)
    assert scaling.work_on_shared_cores(demo(work), Job(1, link)) == work
    assert prediction.predict(work, Job(1, link)).step == pytest.approx(0.033)


def test_a_faster_link_is_worth_what_its_curve_says(link: Link) -> None:
    work, job = step(5 * MB), Job(2, link)
    worth = {each.constant: each for each in prediction.worth(work, job)}
    assert worth["bandwidth of the link"].if_halved == pytest.approx(BETA * 5 * MB / 2, rel=1e-2)
    assert worth["latency of the link"].if_halved == pytest.approx(ALPHA / 2, rel=1e-2)


def test_ranks_that_were_not_measured_are_refused_and_the_factor_is_said(link: Link) -> None:
    found = demo(step(5 * MB))
    with pytest.raises(UsageError, match=r"all_reduce of 8 ranks was not measured here \(there are figures of 2 ranks"):
        scaling.of(found, Job(1, link), [2, 8])
    assert link.curves is not None
    notes = " ".join(link.curves.notes([1, 2], 1e12))
    assert "loopback is not a network" in notes
    assert "2 ranks at once: products take 1.50 times as long, copies 2.00" in notes
    assert "beyond the" in notes
    assert "3 ranks that compute at once was not measured" in " ".join(link.curves.notes([3], 0))


def test_a_step_of_ranks_that_shared_cores_already_is_no_slower_for_that(link: Link) -> None:
    two = demo(step(5 * MB), ranks=2)
    assert scaling.work_on_shared_cores(two, Job(2, link)) == two.work
    alone = scaling.work_on_shared_cores(two, Job(1, link))
    assert alone.layers[0].forward == pytest.approx(0.01 / 1.5)
    assert alone.update == pytest.approx(0.003 / 2)
    of_one = scaling.of(demo(step(5 * MB)), Job(1, link), [1, 2])
    assert scaling.of(two, Job(1, link), [2]).points[0].efficiency < of_one.points[0].efficiency / 0.7


def test_a_run_of_ranks_that_were_not_timed_here_is_predicted_and_not_checked(link: Link) -> None:
    found = scaling.of(demo(step(5 * MB), ranks=8), Job(1, link), [2])
    assert found.check is None
    assert text.as_json(found)["check"] is None
    assert "No check: the run has 8 ranks, and their time over this link is unknown" in flat(text.page(found))
    assert "all-reduce as timed here" in flat(text.page(found))


@pytest.mark.parametrize(("threads", "cores", "factor"), [(1, 2, 1.5), (2, 2, 2.0), (4, 2, 2.0), (2, 8, 1.5)])
def test_ranks_with_more_threads_than_were_timed_compute_as_slowly_as_their_cores_make_them(
    tmp_path: Path, threads: int, cores: int, factor: float
) -> None:
    found = measured.of(timed(tmp_path, Environment({"cpu": "test", "cores": cores})), threads)
    assert found.curves is not None
    assert found.curves.sharing_at(2).compute_factor == pytest.approx(factor)
    notes = " ".join(found.curves.notes([2], 0))
    assert (f"Cores are shared: 2 ranks of {threads} threads have 2" in notes) == (threads * 2 > cores)
    assert (f"xsp bench collectives --threads {threads}" in notes) == (threads > 1)


def test_a_run_of_another_processor_is_said_to_be(tmp_path: Path) -> None:
    timings = timed(tmp_path, HERE)
    for cpu, is_said in (("test", False), (None, False), ("other", True)):
        found = measured.of(timings, 1, cpu)
        assert found.curves is not None
        assert any("another processor, other" in each for each in found.curves.notes([2], 0)) == is_said


def test_ranks_with_cores_of_their_own_are_not_said_to_share_them(tmp_path: Path) -> None:
    found = measured.of(timed(tmp_path, Environment({"cpu": "test", "cores": 64})))
    assert found.curves is not None
    assert "share" not in " ".join(found.curves.notes([1, 2], 0)).lower()


def flat(shown: str) -> str:
    return " ".join(shown.split())


def test_an_empty_table_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="xsp bench collectives --ranks 2,4"):
        measured.of(Timings.open(tmp_path / "none", HERE))


def test_a_run_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(tmp_path / "no"), "--link", "measured", "--timings", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_quoted_links_name_their_sources() -> None:
    assert all("tuning.cc" in each.source and each.is_quoted for each in LINKS.values())


def test_reading_a_batch_is_told_by_the_curve_of_storage_that_the_disk_is_in(tmp_path: Path) -> None:
    timings = Timings.open(tmp_path, HERE)
    with pytest.raises(UsageError, match="bench transfers"):
        measured.read_time(timings, 5 * MB)
    per_byte = {"read-cached": 1e-10, "read-cold": 2e-9}
    for name, beta in per_byte.items():
        made = []
        for spec in transfers.of_transfers([name], (1,), "ext4"):
            ns = 1e9 * (1e-5 + beta * transfers.arguments(spec)[1]["bytes"])
            figures = {"trimmed_ns": ns, "low_ns": ns, "high_ns": ns, "least_ns": ns, "taken_ns": 1}
            made.append(dataclasses.replace(untimed(spec, Status.OK), **figures))  # type: ignore[arg-type]
        timings.add(made)
        took, told = measured.read_time(timings, 5 * MB)
        assert took == pytest.approx(1e-5 + beta * 5 * MB, rel=0.01)
        assert (name in told, "from memory" in told) == (True, name == "read-cached")


def test_more_ranks_than_cores_take_at_least_what_sharing_them_takes(tmp_path: Path) -> None:
    link = measured.of(timed(tmp_path, Environment({"cpu": "test", "cores": 1})))
    assert link.curves is not None
    assert (link.curves.sharing_at(2).compute_factor, link.curves.sharing_at(2).copy_factor) == pytest.approx((2, 2))
    assert any("Cores are shared: 2 ranks have 1" in each for each in link.curves.notes([2], 0))


# --- the uncertainty of the link --------------------------------------------------------------------------------------


def calibrated(place: Path, factors: list[float], computing: list[float], *, with_first: bool = True) -> Timings:
    """Return timings of calibrations, each with collectives and products that take a factor of their time.

    The first one has factors of 1, unless it is left out.
    """
    first = list(timed(place / "first", HERE))
    timings = Timings.open(place, HERE)
    if with_first:
        timings.add(first)
    for number, (factor, slowdown) in enumerate(zip(factors, computing, strict=True)):
        changed = []
        for timing in first:
            name, given = transfers.arguments(transfers.spec_of(timing))
            by = (
                factor
                if name == "all_reduce"
                else slowdown
                if name == "together-product" and given["ranks"] == 2
                else 1.0
            )
            scaled = {
                each: (getattr(timing, each) or 0) * by for each in ("trimmed_ns", "low_ns", "high_ns", "least_ns")
            }
            changed.append(dataclasses.replace(timing, taken_ns=2 + number, **scaled))  # type: ignore[arg-type]
        timings.add(changed)
    return Timings.open(place, HERE)


def interval(link: Link) -> tuple[float, float]:
    (point,) = scaling.of(demo(step(100 * MB, 100 * MB)), Job(1, link), [2]).points
    assert point.low is not None
    assert point.high is not None
    return point.low, point.high


def test_the_interval_of_one_calibration_is_the_assumed_one_and_repetitions_change_it(tmp_path: Path) -> None:
    once = measured.drift_of(timed(tmp_path / "once", HERE), 1)
    assert once.calibrations == 1
    assert once.collectives == pytest.approx(2.776 * measured.PRIOR_DRIFT, rel=1e-3)
    stable = measured.drift_of(calibrated(tmp_path / "stable", [1.0] * 8, [1.0] * 8), 1)
    assert (stable.calibrations, stable.collectives < 0.6 * once.collectives) == (9, True)
    unstable = measured.drift_of(calibrated(tmp_path / "not", [1.4, 1.0, 1.4], [1.0] * 3), 1)
    assert unstable.collectives > 1.5 * once.collectives
    assert unstable.computing < once.computing


@pytest.mark.slow
def test_processes_that_copy_at_other_speeds_widen_the_interval_of_the_whole_step(tmp_path: Path) -> None:
    link = measured.of(timed(tmp_path, HERE))
    assert link.curves is not None
    link = dataclasses.replace(link, curves=dataclasses.replace(link.curves, drift=measured.Drift(0.0, 0.2, 9)))
    work = Work((Layer("tiny", 0.01, 0.02, (4,)),), update=0.03)
    (point,) = scaling.of(demo(work), Job(1, link), [2]).points
    computing = 1.5 * 0.03 + 2 * 0.03
    assert point.high == pytest.approx(point.predicted.step + computing * math.expm1(0.2), rel=1e-3)
    assert point.low == pytest.approx(point.predicted.step + computing * math.expm1(-0.2), rel=1e-3)
    slower = calibrated(tmp_path / "copies", [1.0] * 4, [1.0] * 4)
    steady = measured.drift_of(slower, 1).computing
    changed = [
        dataclasses.replace(timing, taken_ns=20 + number, trimmed_ns=(timing.trimmed_ns or 0) * factor)
        for number, factor in enumerate((1.5, 1.0, 1.5))
        for timing in timed(tmp_path / f"{number}", HERE)
        if transfers.arguments(transfers.spec_of(timing))[0] == "together-copy"
    ]
    for timing in changed:
        slower.add([timing])
    assert measured.drift_of(Timings.open(tmp_path / "copies", HERE), 1).computing > 2 * steady


def test_the_interval_reaches_to_the_step_without_the_page_faults_of_the_recorded_process(link: Link) -> None:
    assert link.curves is not None
    calm = dataclasses.replace(link, curves=dataclasses.replace(link.curves, drift=measured.Drift(0.0, 0.0, 9)))
    work = step(5 * MB)
    (point,) = scaling.of(demo(work, page_faults=0.0066), Job(1, calm), [2]).points
    (without,) = scaling.of(demo(work.scaled(0.8, 0.8)), Job(1, calm), [2]).points
    assert point.low == pytest.approx(without.predicted.step, rel=1e-3)
    assert point.high == pytest.approx(point.predicted.step)


def test_calibrations_that_differ_have_intervals_that_contain_each_other(tmp_path: Path) -> None:
    low, high = (
        interval(measured.of(calibrated(tmp_path / name, [factor], [1.0], with_first=False)))
        for name, factor in (("low", 1.0), ("high", 1.18))
    )
    assert low[1] > high[0]


@pytest.mark.slow
def test_the_interval_holds_the_step_in_nine_of_ten_repetitions(tmp_path: Path) -> None:
    chance = random.Random(7)
    covered = 0
    for number in range(20):
        drawn = [[math.exp(chance.gauss(0, 0.06)) for _ in range(4)] for _ in range(2)]
        (*calibrations, collectives), (*slowdowns, computing) = drawn
        link = measured.of(calibrated(tmp_path / f"{number}", calibrations, slowdowns))
        truth = measured.of(calibrated(tmp_path / f"{number}-truth", [collectives], [computing], with_first=False))
        (actual,) = scaling.of(demo(step(100 * MB, 100 * MB)), Job(1, truth), [2]).points
        low, high = interval(link)
        covered += low <= actual.predicted.step <= high
    assert covered >= 18


def test_merged_parts_keep_earlier_calibrations(tmp_path: Path) -> None:
    timings = calibrated(tmp_path, [1.3, 1.0], [1.0, 1.0])
    before = measured.drift_of(timings, 1)
    timings.compact()
    assert measured.drift_of(Timings.open(tmp_path, HERE), 1) == before


def test_what_a_prediction_lacks_is_said_and_timed_first(tmp_path: Path) -> None:
    timings = timed(tmp_path, HERE, transfers.PREDICTED)
    assert measured.missing(transfers.curves(timings), [2]) == []
    (sentence,) = measured.missing(transfers.curves(timings), [2, 4])
    assert "of 4 ranks lacks all_reduce, together-product, together-copy, beside, after" in sentence
    assert "together-copy of one rank" in measured.missing([], [2])[0]
    asked = [transfers.arguments(spec)[0] for spec in transfers.of_collectives(list(transfers.OF_RANKS), (2, 3))]
    others = min(asked.index(name) for name in transfers.OF_RANKS if name not in transfers.PREDICTED)
    assert set(asked[:others]) == set(transfers.PREDICTED)
