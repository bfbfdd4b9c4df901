"""The account adds up, and says of made programs what is known of them by construction."""

from __future__ import annotations

import os

import pytest
from depth import first
from madeprograms import Program

from xsp import account
from xsp.account import entries as names
from xsp.account.entries import Iterations
from xsp.schema import Kind
from xsp.testing import spans, trace_of, with_loop

TIMES, SEED = int(os.environ.get("XSP_FUZZ_TIMES", "25")), int(os.environ.get("XSP_FUZZ_SEED", "1"))


IMPORTED = {"imported": {"sources": []}}
"""A trace of another profiler: its steps follow each other."""


def main_of(text: str) -> Iterations:
    result = account.of(trace_of(spans(text), IMPORTED)).main
    assert result is not None
    return result


@pytest.mark.parametrize("seed", first(8, range(SEED, SEED + TIMES)))
def test_every_entry_of_a_made_program_equals_the_truth_and_all_add_up(seed: int) -> None:
    program = Program(seed).run()
    truth = program.truth
    result = account.of(trace_of(program.spans, IMPORTED))
    assert result.violations == (), seed
    main = result.main
    assert main is not None
    assert main.time.ms is not None
    iteration_ms, count = main.time.ms, truth.iterations
    assert main.count == count
    for side in (main.host, *main.devices):
        assert side.total_ms == pytest.approx(iteration_ms), (seed, side.name)
        assert all(entry.name != names.UNEXPLAINED for entry in side.entries), seed
    for phase, us in truth.phases.items():
        assert main.host.ms(phase) == pytest.approx(us / count / 1e3, abs=1e-6), (seed, phase)
    waiting = sum(entry.part(names.WAITING) for entry in main.host.entries)
    assert waiting == pytest.approx(truth.waiting / count / 1e3, abs=1e-6), seed
    assert {side.device for side in main.devices} == set(truth.busy)
    for side in main.devices:
        assert side.device is not None
        assert side.ms(names.BUSY) == pytest.approx(truth.busy[side.device] / count / 1e3, abs=1e-6), seed
        assert side.ms(names.COMPUTATION) == pytest.approx(truth.computing[side.device] / count / 1e3, abs=1e-6), seed
    if not truth.earlier:
        assert iteration_ms == pytest.approx(truth.wall / count / 1e3, abs=1e-6), seed
    assert iteration_ms <= truth.wall / count / 1e3 + 1e-6
    assert main.limit is not None
    assert max(main.limit.host_ms, main.limit.device_ms) <= iteration_ms * (1 + 1e-9)


def test_ranks_have_accounts_of_their_own() -> None:
    programs = [Program(seed, rank).run() for rank, seed in enumerate((3, 4, 5))]
    result = account.of(trace_of([span for program in programs for span in program.spans], IMPORTED))
    assert [each.rank for each in result.ranks] == [0, 1, 2]
    for each, program in zip(result.ranks, programs, strict=True):
        assert each.time.ms is not None
        assert each.time.ms <= program.truth.wall / program.truth.iterations / 1e3 + 1e-6
        assert each.count == program.truth.iterations


@pytest.mark.slow
def test_lost_records_forbid_what_rests_on_them() -> None:
    for seed in range(10, 20):
        program = Program(seed).run()
        kernels = [span for span in program.spans if span.kind == Kind.KERNEL and span.correlation_id is not None]
        lost = {id(span) for span in kernels[: len(kernels) // 3]}
        if len(lost) < 2:
            continue
        result = account.of(trace_of(span for span in program.spans if id(span) not in lost))
        assert result.forbids("busy"), seed
        assert "launches have no device work in the trace" in result.doubts[0].text


TWO_STEPS = """
    step train              0-1000
    launch cudaLaunchKernel 600-605 correlation_id=1
    kernel sgemm            610-1400 correlation_id=1
    step train              1010-2000 step=1
    launch cudaLaunchKernel 1500-1505 correlation_id=2 step=1
    kernel sgemm            1510-2300 correlation_id=2 step=1
"""


def test_work_belongs_to_the_iteration_that_launched_it_and_the_window_is_the_iteration() -> None:
    main = main_of(TWO_STEPS)
    assert main.time.ms == pytest.approx(1.15)  # from the first step's start to the end of its last work
    (device,) = main.devices
    assert device.ms(names.BUSY) == pytest.approx(0.79)
    assert device.ms(names.IDLE) == pytest.approx(0.36)
    assert device.ms(names.BEFORE_FIRST) == pytest.approx((0.61 + 0.11) / 2)
    assert main.host.ms(names.DRAINING) == pytest.approx(0.15)


def test_work_launched_before_the_recording_belongs_to_no_iteration() -> None:
    late = TWO_STEPS.replace("610-1400", "950-1740").replace("1510-2300", "1740-2530")
    main = main_of(f"kernel sgemm 0-950 correlation_id=99\n{late}")
    (device,) = main.devices
    assert main.time.ms == pytest.approx(1.0)  # the host's; it did not wait for the work of others
    assert device.ms(names.BUSY) == pytest.approx(0.79)
    assert device.ms(names.EARLIER) == pytest.approx((0.95 - 0.53) / 2)
    assert main.earlier is not None


def test_an_asynchronous_step_is_limited_by_its_device() -> None:
    main = main_of(
        "step decode 0-240\n"
        + "\n".join(f"launch cudaLaunchKernel {n}-{n + 2} correlation_id={n}" for n in range(10, 230, 10))
        + "\n"
        + "\n".join(f"kernel sgemm {20 + n * 5}-{68 + n * 5} correlation_id={n}" for n in range(10, 230, 10))
    )
    assert main.limit is not None
    assert main.limit.side == "device"
    assert main.time.ms == pytest.approx(1.168)
    assert main.limit.host_ms == pytest.approx(0.24)


def test_a_gain_is_bounded_by_what_the_other_side_leaves() -> None:
    main = main_of(TWO_STEPS)
    assert main.limit is not None
    assert main.bound_ms("device", 0.5) <= main.time.ms - main.limit.host_ms + 1e-9  # type: ignore[operator]
    assert main.bound_ms("device", 0.1) == pytest.approx(0.1)
    assert main.bound_ms("host", 10.0) == pytest.approx(main.time.ms - main.limit.device_ms)  # type: ignore[operator]


def test_waiting_for_data_is_the_cause_of_idle_time_and_beats_operators_that_make_the_batch() -> None:
    main = main_of(
        """
        data enumerate(DataLoader) 0-500
        op aten::stack             100-400
        step train                 500-900
        op aten::mm                520-560
        launch cudaLaunchKernel    530-535 correlation_id=1
        kernel sgemm               540-600 correlation_id=1
        """
    )
    assert main.host.ms(names.DATA) == pytest.approx(0.5)
    assert main.devices[0].ms(names.HOST_DATA) == pytest.approx(0.5)


def test_the_time_after_a_read_is_idle_because_the_host_had_waited() -> None:
    main = main_of(
        """
        step train              0-1000
        launch cudaLaunchKernel 10-15 correlation_id=1
        kernel sgemm            20-500 correlation_id=1
        sync cudaStreamSynchronize 100-505
        launch cudaLaunchKernel 600-605 correlation_id=2
        kernel sgemm            610-990 correlation_id=2
        """
    )
    assert main.devices[0].ms(names.DRAINED) == pytest.approx(0.11)
    assert main.devices[0].ms(names.HOST_LATE) == 0


def test_the_iteration_of_a_run_comes_from_steps_that_were_not_recorded() -> None:
    text = """
        step train      0-1000 rung=20
        forward Net     100-500 rung=20
        backward loss   500-900 rung=20
    """
    loop = [
        {"step": number, "dur_ns": 500_000.0, "before_ns": 100_000.0, "data_ns": 40_000.0} for number in range(1, 9)
    ]
    recorded = {"step": 0, "rung": 20, "steady": False, "dur_ns": 1e6}
    main = account.of(with_loop(trace_of(spans(text)), [recorded, *loop])).main
    assert main is not None
    assert main.time.ms == pytest.approx(0.6)
    assert main.host.ms(names.FORWARD) == pytest.approx(0.2)
    assert main.host.ms(names.BETWEEN) == pytest.approx(0.06)
    assert main.host.ms(names.DATA) == pytest.approx(0.04)
    assert main.host.total_ms == pytest.approx(0.6)


def test_slow_iterations_weigh_as_much_as_they_occur() -> None:
    usual = "step train {0}-{1} rung=20 step={2}\nforward Net {0}-{3} rung=20 step={2}\n"
    text = usual.format(0, 1000, 0, 500) + usual.format(2000, 12000, 1, 11500) + usual.format(13000, 14000, 2, 13500)
    bare = [{"step": n, "dur_ns": 1e7 if n % 10 == 0 else 1e6} for n in range(10, 50)]
    recorded = [{"step": n, "rung": 20, "steady": False, "dur_ns": ns} for n, ns in ((0, 1e6), (1, 1e7), (2, 1e6))]
    main = account.of(with_loop(trace_of(spans(text)), [*recorded, *bare])).main
    assert main is not None
    # 0.1 slow ones with 9.5 of 10 ms in forward, 0.9 usual ones with 0.5 of 1 ms
    assert main.time.ms == pytest.approx(1.9)
    assert main.host.ms(names.FORWARD) == pytest.approx(1.4, rel=0.05)  # recorded ones count among all, too


def test_an_iteration_without_an_undisturbed_step_is_unknown_and_not_zero() -> None:
    loop = [{"step": 0, "rung": 20, "steady": False, "dur_ns": 1e6}]
    main = account.of(with_loop(trace_of(spans("step train 0-1000 rung=20\nforward Net 100-500 rung=20")), loop)).main
    assert main is not None
    assert main.time.source.startswith("recorded")
    assert main.host[names.BETWEEN] is None or not main.host.ms(names.BETWEEN)


def test_a_trace_without_steps_is_one_window() -> None:
    main = main_of("op aten::mm 0-400 thread=1\nop aten::mm 500-1000 thread=1\nop aten::add 100-200 thread=2")
    assert (main.unit, main.time.ms) == ("window", pytest.approx(1.0))


def test_time_between_steps_that_was_never_measured_is_no_part() -> None:
    loop = [{"step": number, "dur_ns": 1e6, "before_ns": None} for number in range(10)]
    main = account.of(with_loop(trace_of(spans("step train 0-1000 rung=20\nforward Net 100-500 rung=20")), loop)).main
    assert main is not None
    assert main.host[names.BETWEEN] is None


def test_operators_are_not_joined_over_a_wait_for_data() -> None:
    main = main_of("step s 0-1000\ndata loader 0-400\nop aten::stack 50-350\nop aten::mm 500-700")
    assert main.host.ms(names.DATA) == pytest.approx(0.4)
    assert main.host.ms(names.FORWARD) == pytest.approx(0.2)
