"""The general solver agrees with the closed forms of the papers, and does what must hold of any step."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from xsp.errors import UsageError
from xsp.predict import collectives, schedule, training
from xsp.predict.collectives import Algorithm, Link
from xsp.predict.prediction import EXPOSED, WAITING, predict, worth
from xsp.predict.schedule import Cause, Task
from xsp.predict.training import Input, Job, Layer, SlowRanks, Straggler, Work

INSTANCES = 1000


def close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-15)


def some_work(chance: random.Random, given: Input | None = None, most: int = 8) -> Work:
    layers = tuple(
        Layer(f"{number}", chance.uniform(0, 2), chance.uniform(0, 4), (chance.randint(1, 1000),))
        for number in range(chance.randint(1, most))
    )
    return Work(layers, chance.uniform(0, 1), 0.0, given or Input())


def some_link(chance: random.Random) -> Link:
    return Link("made", chance.uniform(0, 0.2), chance.uniform(0, 0.01), chance.choice((0.0, 0.002)))


def each_alone(work: Work) -> training.Buckets:
    return tuple((place,) for place in range(len(work.arrivals)))


def takes(job: Job, size: float) -> float:
    return collectives.all_reduce_seconds(job.algorithm, job.link, job.ranks, size)


def computing(work: Work) -> float:
    return sum(each.forward + each.backward for each in work.layers)


def exposed_by_recurrence(work: Work, job: Job) -> float:
    """Shi, Chu and Li: when the gradients of layer 1 have been communicated, after the end of its backward pass."""
    backward = list(itertools.accumulate(each.backward for each in reversed(work.layers)))
    end = 0.0
    for bucket in training.plan_of(work, job):
        end = max(end, backward[bucket[-1]]) + takes(job, sum(work.arrivals[index] for index in bucket))
    return max(0.0, end - backward[-1])


# --- closed forms ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_without_overlap_a_step_is_the_sum_of_its_parts() -> None:
    chance = random.Random(1)
    for _ in range(INSTANCES):
        given = Input(chance.uniform(0, 3), chance.uniform(0, 3), chance.uniform(0, 1))
        work = some_work(chance, given)
        job = Job(chance.randint(2, 64), some_link(chance), Algorithm.RING, overlap=False, plan=each_alone(work))
        sent = sum(takes(job, size) for size in work.arrivals)
        expected = given.read + given.decode + given.copy + computing(work) + sent + work.update
        found = predict(work, job)
        assert close(found.step, expected)
        assert close(sum(found.parts.values()), found.step)
        assert close(found.parts[EXPOSED], sent)


@pytest.mark.slow
def test_with_input_beside_it_a_step_is_the_longer_of_both() -> None:
    chance = random.Random(2)
    for _ in range(INSTANCES):
        given = Input(
            chance.uniform(0, 9), chance.uniform(0, 9), chance.uniform(0, 3), 1, prefetch_limit=1, copy_ahead=True
        )
        work = some_work(chance, given)
        job = Job(chance.randint(2, 64), some_link(chance), Algorithm.RING, overlap=False, plan=each_alone(work))
        sent = sum(takes(job, size) for size in work.arrivals)
        expected = max(given.read + given.decode + given.copy, computing(work) + sent + work.update)
        found = predict(work, job)
        assert close(found.step, expected)
        assert close(sum(found.parts.values()), found.step)


@pytest.mark.slow
def test_wait_free_back_propagation_is_the_recurrence_of_the_paper() -> None:
    chance = random.Random(3)
    for _ in range(INSTANCES):
        given = Input(
            chance.uniform(0, 9), chance.uniform(0, 9), chance.uniform(0, 3), 1, prefetch_limit=1, copy_ahead=True
        )
        work = some_work(chance, given)
        job = Job(chance.randint(2, 64), some_link(chance), Algorithm.RING, plan=each_alone(work))
        own = computing(work) + exposed_by_recurrence(work, job) + work.update
        assert close(predict(work, job).step, max(given.read + given.decode + given.copy, own))


def test_merged_gradients_are_that_recurrence_over_buckets() -> None:
    chance = random.Random(4)
    for _ in range(INSTANCES):
        work = some_work(chance)
        plan: list[list[int]] = []
        for place in range(len(work.arrivals)):
            plan[-1].append(place) if plan and chance.random() < 0.6 else plan.append([place])
        job = Job(chance.randint(2, 64), some_link(chance), Algorithm.RING, plan=tuple(map(tuple, plan)))
        assert close(predict(work, job).step, computing(work) + exposed_by_recurrence(work, job) + work.update)


def test_a_loader_with_workers_delivers_a_batch_in_the_share_of_one_or_at_the_speed_of_the_disk() -> None:
    chance = random.Random(6)
    for _ in range(200):
        read, decode, workers = chance.uniform(0, 4), chance.uniform(0, 20), chance.randint(1, 6)
        work = some_work(chance, Input(read, decode, 0.0, workers, prefetch_limit=1000, copy_ahead=True), 3)
        disk = chance.randint(1, 4)
        found = predict(work, Job(4, training.NO_LINK, ranks_per_disk=disk))
        expected = max(read * disk, (read * disk + decode) / workers, computing(work) + work.update)
        assert found.step == pytest.approx(expected, rel=0.02 if not found.is_steady else 1e-9)


def test_what_bounds_a_step_is_what_it_would_be_shorter_without() -> None:
    layers = (Layer("a", 1.0, 2.0, (1000,)),)
    slow_input = Work(layers, 0.1, 0.0, Input(0.1, 7.0, 0.1, 2))
    assert predict(slow_input, Job(2, Link("made", 0.0, 1e-6))).bound_by == "input"
    assert predict(Work(layers, 0.1), Job(2, Link("made", 0.0, 1e-6))).bound_by == "computation"
    assert predict(Work(layers, 0.1), Job(2, Link("made", 0.0, 1.0))).bound_by == "communication"


# --- what must hold of any step --------------------------------------------------------------------------------


def some_job(chance: random.Random, work: Work) -> Job:
    straggler = Straggler(chance.choice((1.0, 1.3)), chance.choice(list(SlowRanks)))
    return Job(
        chance.choice((1, 2, 3, 8, 64)), some_link(chance), chance.choice(list(Algorithm)), straggler=straggler,
        bucket=chance.choice((None, 1, 500, 2000)), overlap=chance.random() < 0.8,
        accumulate=chance.choice((1, 1, 2, 3)), sharded=chance.random() < 0.3,
    )  # fmt: skip


def some_input(chance: random.Random) -> Input:
    return Input(
        chance.uniform(0, 3), chance.uniform(0, 9), chance.uniform(0, 1), chance.randint(0, 4),
        copy_ahead=chance.random() < 0.5,
    )  # fmt: skip


@pytest.mark.slow
def test_parts_add_up_to_the_step_and_so_does_the_critical_path() -> None:
    chance = random.Random(7)
    for _ in range(150):
        work = some_work(chance, some_input(chance))
        found = predict(work, some_job(chance, work))
        assert found.is_steady
        assert sum(found.parts.values()) == pytest.approx(found.step, rel=1e-6)
        assert sum(found.path.values()) == pytest.approx(found.step, rel=1e-6)
        assert min(found.parts.values()) >= -1e-9


@pytest.mark.slow
def test_one_task_for_many_layers_takes_the_same_time() -> None:
    chance = random.Random(8)
    for _ in range(200):
        work = some_work(chance, some_input(chance))
        job = some_job(chance, work)
        coarse, fine = predict(work, job), predict(work, job, per_layer=True)
        assert close(coarse.step, fine.step)
        assert {part: pytest.approx(took, abs=1e-7) for part, took in coarse.parts.items()} == fine.parts


@pytest.mark.slow
def test_names_of_layers_and_the_unit_of_time_change_nothing() -> None:
    chance = random.Random(9)
    for _ in range(100):
        work = some_work(chance, some_input(chance))
        job = some_job(chance, work)
        other = replace(work, layers=tuple(replace(each, name=f"x{each.name}") for each in work.layers))
        assert predict(other, job).step == predict(work, job).step
        link = replace(job.link, alpha=job.link.alpha * 1024, beta=job.link.beta * 1024, gamma=job.link.gamma * 1024)
        slower = predict(work.scaled(1024, 1024, 1024), replace(job, link=link))
        assert close(slower.step, 1024 * predict(work, job).step)


@pytest.mark.slow
def test_more_work_a_slower_link_or_a_slower_rank_never_make_a_step_shorter() -> None:
    chance = random.Random(10)
    for _ in range(200):
        work = some_work(chance, some_input(chance))
        job = some_job(chance, work)
        now = predict(work, job).step * (1 - 1e-9)
        slower = chance.uniform(1, 2)
        assert predict(work.scaled(computing=slower), job).step >= now
        assert predict(work.scaled(update=slower), job).step >= now
        assert predict(work.scaled(loading=slower), job).step >= now
        assert predict(work, replace(job, link=replace(job.link, beta=job.link.beta * slower))).step >= now
        assert predict(work, replace(job, link=replace(job.link, alpha=job.link.alpha * slower))).step >= now
        dragged = replace(job.straggler, factor=job.straggler.factor * slower)
        assert predict(work, replace(job, straggler=dragged)).step >= now


@pytest.mark.slow
def test_what_a_constant_is_worth_is_never_more_than_all_of_the_step() -> None:
    chance = random.Random(11)
    for _ in range(30):
        work = some_work(chance, some_input(chance))
        job = some_job(chance, work)
        found = worth(work, job)
        assert [each.if_halved for each in found] == sorted((each.if_halved for each in found), reverse=True)
        assert all(0 <= each.if_halved <= predict(work, job).step for each in found)


# --- stragglers ------------------------------------------------------------------------------------------------

PLAIN = Work((Layer("a", 1.0, 2.0, (100,)), Layer("b", 1.0, 2.0, (100,))), 0.5)
SLOW_LINK = Link("made", 0.0, 0.001)


def of_two(straggler: Straggler, ranks: int = 2) -> training.Job:
    return Job(ranks, SLOW_LINK, Algorithm.RING, straggler=straggler)


def test_of_two_ranks_the_fast_one_waits_for_the_slow_one() -> None:
    alone = predict(PLAIN, of_two(Straggler()))
    found = predict(PLAIN, of_two(Straggler(1.5)))
    assert alone.parts[WAITING] == 0
    assert found.step == pytest.approx(alone.step + 0.5 * 6.5)  # all of its computation is longer by a half
    assert found.parts[WAITING] == pytest.approx(0.5 * 0.5 * 6.0 + 0.5 * 0.5 * 0.5)  # the mean of two ranks, one waits
    assert found.parts[EXPOSED] == pytest.approx(alone.parts[EXPOSED])


def test_slow_ranks_that_take_turns_cost_as_much_as_one_and_all_at_once_only_their_mean() -> None:
    alone, one, turns, together = (
        predict(PLAIN, of_two(straggler, 8)).step
        for straggler in (
            Straggler(),
            Straggler(1.5),
            Straggler(1.5, SlowRanks.TURNS),
            Straggler(1.5, SlowRanks.TOGETHER),
        )
    )
    assert alone < together < turns
    assert turns <= one * (1 + 1e-9)
    assert together == pytest.approx(alone + 0.5 * 6.5 / 8)
    assert predict(PLAIN, of_two(Straggler(1.5, SlowRanks.TOGETHER), 8)).parts[WAITING] == 0
    assert predict(PLAIN, of_two(Straggler(1.5, SlowRanks.TURNS), 8)).parts[WAITING] > 0


def test_a_rank_that_is_faster_than_the_others_waits_for_them() -> None:
    found = predict(PLAIN, of_two(Straggler(0.5), 8))
    assert found.step == pytest.approx(predict(PLAIN, of_two(Straggler(), 8)).step)


# --- hostile inputs --------------------------------------------------------------------------------------------

REFUSED: list[Callable[[], object]] = [
    lambda: Work(()),
    lambda: Work((Layer("a", -1.0, 0.0),)),
    lambda: Work((Layer("a", math.nan, 0.0),)),
    lambda: Work((Layer("a", 0.0, math.inf),)),
    lambda: Work((Layer("a", 0.0, 0.0, (-1,)),)),
    lambda: Work((Layer("a", 0.0, 0.0),), update=-1.0),
    lambda: Work((Layer("a", 0.0, 0.0),), input=Input(read=math.nan)),
    lambda: Work((Layer("a", 0.0, 0.0),), input=Input(workers=-1)),
    lambda: Work((Layer("a", 0.0, 0.0),), input=Input(workers=1, prefetch_limit=0)),
    lambda: Job(0),
    lambda: Job(-2),
    lambda: Job(10**12),
    lambda: Job(2, accumulate=0),
    lambda: Job(2, ranks_per_link=0),
    lambda: Straggler(0.0),
    lambda: Straggler(math.nan),
    lambda: Straggler(-1.0),
    lambda: Link("x", -1.0, 0.0),
    lambda: Link("x", 0.0, math.nan),
    lambda: Link("x", math.inf, 0.0),
    lambda: predict(PLAIN, Job(2, SLOW_LINK, bucket=0)),
    lambda: predict(PLAIN, Job(2, SLOW_LINK, plan=((1,), (0,)))),
    lambda: predict(PLAIN, Job(2, SLOW_LINK, plan=((0,),))),
    lambda: schedule.simulate([Task("a", Cause.OTHER, 1.0, (), (0,))]),
    lambda: schedule.simulate([Task("a", Cause.OTHER, 1.0, (), (1,)), Task("b", Cause.OTHER, 1.0, (), ())]),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_is_no_step_is_refused_with_the_reason(number: int) -> None:
    with pytest.raises(UsageError):
        REFUSED[number]()


def test_a_step_of_no_time_and_a_job_of_one_rank_are_steps_and_jobs() -> None:
    assert predict(Work((Layer("a", 0.0, 0.0),)), Job(1)).step == 0
    found = predict(PLAIN, Job(1, SLOW_LINK))
    assert found.step == 6.5
    assert found.communication == 0


def test_a_billion_ranks_take_no_longer_to_predict_than_two() -> None:
    for who in SlowRanks:
        found = predict(PLAIN, Job(10**9, SLOW_LINK, straggler=Straggler(1.3, who)))
        assert math.isfinite(found.step)
        assert len(found.schedule.tasks) < 100


def test_parameters_without_gradients_and_layers_without_parameters_are_no_obstacle() -> None:
    work = Work((Layer("a", 1.0, 1.0), Layer("b", 1.0, 1.0, (0, 0)), Layer("c", 1.0, 1.0)))
    assert predict(work, Job(8, SLOW_LINK)).step == pytest.approx(6.0)
    assert predict(Work((Layer("a", 1.0, 1.0),)), Job(8, SLOW_LINK)).step == pytest.approx(2.0)


def test_overlap_is_the_share_of_the_time_from_the_first_launch_that_lies_in_the_backward_pass() -> None:
    chance = random.Random(11)
    for _ in range(INSTANCES // 5):
        work, link = replace(some_work(chance), update=0.0), some_link(chance)
        plan = each_alone(work)
        slow = Straggler(chance.choice((1.0, 1.5)))
        found = predict(work, Job(2, link, Algorithm.RING, plan=plan, straggler=slow))
        takes = [collectives.all_reduce_seconds(Algorithm.RING, link, 2, size) for size in work.arrivals]
        factors = (1.0,) if slow.factor == 1.0 else (1.0, slow.factor)
        forward = sum(each.forward for each in work.layers)
        ready = {
            factor: [
                factor * (forward + each) for each in itertools.accumulate(each.backward for each in work.layers[::-1])
            ]
            for factor in factors
        }
        end = 0.0
        for launched, took in zip(zip(*ready.values(), strict=True), takes, strict=True):
            end = max(end, *launched) + took
        shares = [(those[-1] - those[0]) / (end - those[0]) for those in ready.values() if end > those[0]]
        if shares:
            assert found.overlap == pytest.approx(sum(shares) / len(shares), abs=1e-9)


def test_layers_without_gradients_before_the_first_bucket_is_full_or_after_the_last_belong_to_the_backward_pass() -> (
    None
):
    work = Work((Layer("frozen", 1, 3), Layer("one", 1, 2, (10,)), Layer("two", 1, 2, (10,)), Layer("loss", 1, 5)))
    job = Job(2, Link("made", 0.5, 0.0), Algorithm.RING, plan=((0,), (1,)))
    found = predict(work, job)  # launched after 7 of 12, back after the backward pass
    assert found.overlap == pytest.approx(1.0)
    assert predict(Work(work.layers[:1]), replace(job, plan=None)).overlap is None
