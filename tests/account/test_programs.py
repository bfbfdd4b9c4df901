"""The right first sentence for small programs of each kind: models, ranks, threads, precision, fusing."""

from __future__ import annotations

import random

import pytest

from xsp import account
from xsp.account import entries as names
from xsp.account.sentences import limit, lines
from xsp.advise import advisor
from xsp.advise.advice import Needs
from xsp.report import firstscreen
from xsp.schema import Level, Span
from xsp.store.loop import BARE
from xsp.store.trace import Trace
from xsp.testing import spans, trace_of, with_loop

IMPORTED = {"imported": {"sources": []}}


def closes(trace: Trace) -> account.Account:
    result = account.of(trace)
    assert result.violations == ()
    return result


def test_a_teacher_and_a_student_in_one_step_have_lines_of_their_own() -> None:
    trace = trace_of(
        spans(
            """
            step s           0-10000
            forward Teacher  0-6000
            forward Student  6000-8000
            forward Loss     8000-8100
            backward b       8100-9500
            optimizer SGD    9500-10000
            """
        ),
        IMPORTED,
    )
    main = closes(trace).main
    assert main is not None
    assert limit(account.of(trace)) == (
        "The largest part of an iteration is forward, 8.10 of 10.0 ms (81 %), 6.00 ms of it in Teacher."
    )
    assert main.host.ms("forward of Teacher") == pytest.approx(6.0)
    assert [line.name for line in lines(main, main.host)][:3] == [
        "forward of Teacher",
        "forward of Student",
        "backward",
    ]
    assert sum(line.ms for line in lines(main, main.host)) == pytest.approx(10.0)


def test_what_a_checkpoint_computes_again_in_the_backward_pass_is_part_of_that() -> None:
    """The largest part of an iteration was the forward pass, half of which ran in the backward pass."""
    trace = trace_of(
        spans(
            """
            step s           0-10000
            forward Net      0-3000
            backward b       3000-9500
            forward Layer    3500-6000
            optimizer SGD    9500-10000
            """
        ),
        IMPORTED,
    )
    main = closes(trace).main
    assert main is not None
    assert limit(account.of(trace)).startswith("The largest part of an iteration is backward, 6.50 of 10.0 ms (65 %)")
    assert main.host.ms("forward") == pytest.approx(3.0)


def test_a_model_and_a_small_loss_are_one_forward() -> None:
    trace = trace_of(spans("step s 0-1000\nforward Net 0-700\nforward Loss 700-730"), IMPORTED)
    main = closes(trace).main
    assert main is not None
    assert [line.name for line in lines(main, main.host)] == ["forward", "outside the phases"]


def test_an_operator_of_a_recording_that_took_far_longer_than_others_is_no_place() -> None:
    """The only recording of 150 steps was interrupted for 130 ms in one operator."""
    text = """
        step s                 0-150000 step=4
        forward Net            0-1000 step=4
        op aten::linear        0-1000 step=4
        backward b             1000-149000 step=4
        op NllLossBackward0    1100-140000 step=4
        op AddmmBackward0      140000-149000 step=4
    """
    phases = {"forward_ns": 1e6, "backward_ns": 4e6, "optimizer_ns": 0.0}
    rows = [
        {"step": step, "dur_ns": 5e6, "before_ns": 1e5, **phases, "rung": int(Level.OP) if step == 4 else BARE}
        for step in range(60)
    ]
    result = closes(with_loop(trace_of(spans(text)), rows))
    assert limit(result) == "The largest part of an iteration is backward, 4.00 of 5.10 ms (78 %)."


# --- ranks --------------------------------------------------------------------------------------------------------


def gloo(late_us: int, seed: int | None = None, slow_rank: int = 1, work_us: int = 4000) -> Trace:
    """Return two ranks whose host runs collectives: four steps, each with one all-reduce at the end of backward."""
    rows: list[Span] = []
    draw = random.Random(seed)
    noise = [[draw.randint(0, 200) if seed is not None else 0 for _ in range(2)] for _ in range(4)]
    start = 0
    for step in range(4):
        arrivals = [start + work_us + noise[step][rank] + (late_us if rank == slow_rank else 0) for rank in (0, 1)]
        end = max(arrivals) + 500
        for rank in (0, 1):
            forward_end = arrivals[rank] - 1000
            text = f"""
                step s                 {start}-{end + 100} step={step}
                forward Net            {start}-{forward_end} step={step}
                op aten::linear        {start + 10}-{forward_end - 10} step={step}
                backward b             {forward_end}-{end + 50} step={step}
                op AddmmBackward0      {forward_end + 10}-{arrivals[rank] - 10} step={step}
                call gloo:all_reduce   {arrivals[rank]}-{end} step={step} thread=9
            """
            own = spans(text, rank=rank, process=rank + 1)
            own[-1] = own[-1]._replace(
                attributes=f'{{"xsp.collective.name": "all_reduce", "xsp.collective.id": "g:{step}"}}'
            )
            rows += own
        start = end + 100
    return trace_of(rows, IMPORTED)


def test_waits_for_other_ranks_on_the_host_are_an_entry_and_the_late_rank_is_named_first() -> None:
    trace = gloo(6000)
    result = closes(trace)
    by_rank = {each.rank: each for each in result.ranks}
    assert by_rank[0].host.entries[0].part(names.OTHER_RANKS) == pytest.approx(6.0, rel=0.01)
    assert sum(top.part(names.OTHER_RANKS) for top in by_rank[1].host.entries) == pytest.approx(0.0, abs=1e-3)
    assert sum(top.part(names.TRANSFER) for top in by_rank[1].host.entries) == pytest.approx(0.5, rel=0.01)
    assert limit(result) == (
        "Rank 1 is late by 6.00 ms at the first all_reduce: 6.00 of 7.00 ms (86 %) of exposed communication on 2 ranks "
        "wait for it; its forward takes 6.00 ms longer than theirs."
    )
    shown = firstscreen.text(firstscreen.first_screen(trace, "a", ()), 80)
    assert "Rank 1 is late by 6.00 ms" in shown


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_by_chance_are_not_named() -> None:
    for seed in range(5):
        result = closes(gloo(0, seed))
        assert result.late_rank is None, seed
        assert limit(result).startswith("The largest part of an iteration is forward")


def test_communication_that_takes_long_without_a_late_rank_is_transfer() -> None:
    result = closes(gloo(0, work_us=1050))
    assert result.late_rank is None
    assert "transfer" in limit(result)
    assert limit(result).startswith("Ranks communicate while they compute nothing")


def test_collectives_that_the_program_calls_itself_are_neither_a_stall_nor_a_line_of_python() -> None:
    """Gradients averaged by hand: "operators on whole tensors in place of NumPy" for the time of all_reduce."""
    rows: list[Span] = []
    for step in range(4):
        start = 11_000 * step
        text = f"""
            step s                 {start}-{start + 10_900} step={step}
            forward Net            {start}-{start + 2000} step={step}
            op aten::linear        {start}-{start + 2000} step={step}
            backward b             {start + 2000}-{start + 3000} step={step}
            op AddmmBackward0      {start + 2000}-{start + 3000} step={step}
            optimizer SGD          {start + 10_000}-{start + 10_900} step={step}
            op aten::add_          {start + 10_000}-{start + 10_900} step={step}
            call gloo:all_reduce   {start + 3010}-{start + 9990} step={step} thread=9
        """
        for rank in (0, 1):
            own = spans(text, rank=rank, process=rank + 1)
            attributes = f'{{"xsp.collective.name": "all_reduce", "xsp.collective.id": "g:{step}"}}'
            rows += [*own[:-1], own[-1]._replace(attributes=attributes)]
    trace = trace_of(rows, IMPORTED)
    main = closes(trace).main
    assert main is not None
    assert sum(top.part(names.TRANSFER) for top in main.host.entries) == pytest.approx(6.98, rel=0.01)
    questions = {piece.question for piece in advisor.of(trace, max_needs=Needs.TRACE).advice}
    assert not questions & {"stall", "outside"}


def test_waits_for_other_ranks_on_devices_are_an_entry_of_exposed_communication() -> None:
    rows = []
    for rank, arrival in ((0, 100), (1, 1000)):
        text = f"""
            step s 0-1200
            launch cudaLaunchKernel 10-15 correlation_id=1
            kernel sgemm 20-{arrival - 10} correlation_id=1
            launch cudaLaunchKernel 40-45 correlation_id=2
            kernel ncclDevKernel_AllReduce_Sum_f32 {arrival}-1100 correlation_id=2
        """
        rows += spans(text, rank=rank, process=rank + 1)
    result = closes(trace_of(rows, IMPORTED))
    first, second = result.ranks
    assert first.devices[0].ms(names.OTHER_RANKS) == pytest.approx(0.9)
    assert first.devices[0].ms(names.TRANSFER) == pytest.approx(0.1)
    assert second.devices[0].ms(names.OTHER_RANKS) == 0
    assert limit(result).startswith("Rank 1 is late by 900 µs at the first all_reduce")


# --- threads ------------------------------------------------------------------------------------------------------


def test_time_in_which_another_thread_runs_steps_is_no_gap() -> None:
    rows = spans(
        """
        step s      0-1000
        forward Net 0-1000
        step s      3000-4000 step=1
        forward Net 3000-4000 step=1
        step s      5000-6000 step=2
        forward Net 5000-6000 step=2
        """
    )
    other = spans("step s 1200-2800 step=7\nforward Net 1200-2800 step=7", thread=2)
    main = closes(trace_of([*rows, *other], IMPORTED)).main
    assert main is not None
    assert main.host.ms(names.OTHER_THREADS) == pytest.approx(1.6 / 3)
    assert main.host.ms(names.BETWEEN) == pytest.approx((0.4 + 1.0) / 3)


@pytest.mark.parametrize(("threads", "promises"), [(1, True), (4, False)])
def test_time_in_which_no_thread_runs_a_step_may_be_waiting_for_work(threads: int, promises: bool) -> None:
    rows = [row for step in range(3) for row in spans("step s 0-10000\nforward Net 0-10000", step=step)]
    loop = [
        {
            "step": step,
            "start_ns": step * 5_000_000,
            "dur_ns": 10_000_000,
            "before_ns": 15_000_000,
            "beside_ns": 0 if threads == 1 else 1_000_000,
            "thread": 1 + step % threads,
            "rung": Level.MODEL if step < 3 else BARE,
        }
        for step in range(40)
    ]
    trace = with_loop(trace_of(rows), loop)
    main = closes(trace).main
    assert main is not None
    assert main.threads == threads
    pieces = [piece for piece in advisor.of(trace, max_needs=Needs.TRACE).advice if piece.question == "between"]
    assert [piece.gain_known for piece in pieces] == [promises]
    assert ("checkpoints" in pieces[0].do) == promises
    assert limit(account.of(trace)) == (
        "Most of an iteration passes between steps: 15.0 of 25.0 ms (60 %)."
        if threads == 1
        else "No thread runs a step in 15.0 of 25.0 ms (60 %) of an iteration."
    )


# --- kernels ------------------------------------------------------------------------------------------------------

H200 = {"machine": {"devices": ["NVIDIA H200"], "device_properties": [{"name": "NVIDIA H200", "compute": "9.0"}]}}
V100 = {"machine": {"devices": ["Tesla V100-SXM2-32GB"], "device_properties": [{"compute": "7.0"}]}}


def products(kernel: str, device: dict[str, object], host_us: int = 200) -> Trace:
    text = f"""
        step s               0-5000
        op aten::mm          10-20 dtype=float
        launch cudaLaunchKernel 12-15 correlation_id=1
        kernel {kernel}      20-4900 correlation_id=1
        sync cudaDeviceSynchronize {host_us}-4910
    """
    return trace_of(spans(text), {**IMPORTED, **device})


def first_piece(trace: Trace) -> tuple[str, str, float]:
    pieces = [piece for piece in advisor.of(trace, max_needs=Needs.TRACE).advice if piece.gain_known]
    return (pieces[0].what, pieces[0].do, pieces[0].gain.value) if pieces else ("", "", 0.0)


@pytest.mark.parametrize("kernel", ["cutlass_80_simt_sgemm_256x128_8x4_nt_align1", "ampere_sgemm_128x64_tn"])
def test_products_in_float32_are_advised_tf32_where_the_device_has_it(kernel: str) -> None:
    what, do, gain_ms = first_piece(products(kernel, H200))
    assert what.endswith("without tensor cores: float32 without TF32")
    assert 'torch.set_float32_matmul_precision("high")' in do
    trace = products(kernel, H200)
    main = account.of(trace).main
    assert main is not None
    assert gain_ms <= main.bound_ms("device", 1e9)
    assert 'set_float32_matmul_precision("high")' in firstscreen.text(firstscreen.first_screen(trace, "a"), 80)
    assert "TF32" not in " ".join(first_piece(products(kernel, V100))[:2])


def test_products_on_tensor_cores_are_not() -> None:
    assert "TF32" not in first_piece(products("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32", H200))[0]


def chain(sizes: int, us: float) -> Trace:
    """Return three elementwise kernels of tensors with so many bytes, after each other on a stream."""
    text = "step s 0-1000\n"
    for number in range(3):
        at = 100 + number * us
        text += f"op aten::mul {number * 10}-{number * 10 + 8} key=k{number} dram_read_bytes={sizes} "
        text += f"dram_write_bytes={sizes}\nlaunch cudaLaunchKernel {number * 10 + 1}-{number * 10 + 4} "
        text += f"correlation_id={number + 1}\nkernel vectorized_elementwise_kernel {at}-{at + us} "
        text += f"correlation_id={number + 1}\n"
    return trace_of(spans(text), {**IMPORTED, **H200})


def saved_ms(trace: Trace) -> float:
    from xsp.analyses import ANALYSES

    return sum(row[0] or 0.0 for row in ANALYSES["fusible"](trace).select("saved_ms").fetchall())


def test_what_fusing_saves_is_the_time_of_the_chain_without_the_bytes_that_it_must_still_move() -> None:
    # 240 MB read and 240 MB written at 4.8 TB/s take 100 µs
    assert saved_ms(chain(240_000_000, 200)) == pytest.approx(0.6 - 0.1)
    assert saved_ms(chain(240_000_000, 40)) == pytest.approx(0.12 - 0.1)
    assert saved_ms(chain(240_000_000, 20)) == 0  # they are faster than the device: figures of shapes are wrong
    assert saved_ms(chain(8, 20)) == pytest.approx(0.06 - 0.001)  # no kernel takes less than a microsecond


def test_copies_before_a_step_that_take_most_of_it_are_named() -> None:
    rows = spans(
        """
        op aten::to             0-29000
        launch cudaMemcpyAsync  100-28500 correlation_id=1
        sync cudaStreamSynchronize 28500-28800
        copy pageable           200-28700 correlation_id=1
        step s                  30000-50000
        forward Net             30000-36000
        launch cudaLaunchKernel 30500-30510 correlation_id=2
        kernel sgemm            30520-49000 correlation_id=2
        """
    )
    rows = [row._replace(name="Memcpy HtoD (Pageable -> Device)") if row.name == "pageable" else row for row in rows]
    trace = trace_of(rows, IMPORTED)
    assert limit(closes(trace)) == (
        "The device limits: the device works 47.0 of 50.0 ms (94 %), 28.5 of 50.0 ms (57 %) of it copies that no "
        "computation hides, Memcpy HtoD (Pageable -> Device)."
    )
    what, do, _ = first_piece(trace)
    assert "Memcpy HtoD (Pageable -> Device)" in what
    assert do.startswith("pin_memory=True and non_blocking=True")
