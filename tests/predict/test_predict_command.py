"""`xsp predict`: the step of a run or of another profiler's trace, on other numbers of ranks."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import exit_code
from depth import deep

import xsp
from xsp import sections
from xsp.account import pagefaults
from xsp.cli import main
from xsp.cli.predict import loader
from xsp.errors import AnalysisError, UsageError
from xsp.predict import collectives, devicestep, fromruns, gradients, hoststep, prediction, recorded, scaling, text
from xsp.predict.collectives import Algorithm
from xsp.predict.training import Job, SlowRanks, Straggler
from xsp.testing import spans, trace_of

LINK = collectives.link("10us,20GB/s")
US = 1e-6


# --- a trace of one rank of eight, made by hand -------------------------------------------------------------------

FORWARD_US, BACKWARD_US, GAP_US, COPY_US, UPDATE_US = 3000.0, (800.0, 1200.0, 400.0, 600.0), 20.0, 300.0, 500.0
ELEMENTS = (100_000, 2_000_000, 1_500_000, 500_000)
ALONE_US = 700.0
"""The last all-reduce as recorded, all of it after the backward pass."""

STEP_US = COPY_US + GAP_US + FORWARD_US + sum(BACKWARD_US) + 4 * GAP_US + ALONE_US + UPDATE_US


def kineto(
    path: Path, *, sizes: bool = True, steps: int = 3, exchange_us: float = 0.0, lacks: Sequence[tuple[int, int]] = ()
) -> Path:
    """Write a trace whose truth is known: each kernel waits 20 us for its launch, all-reduces run beside the next.

    Args:
        path: of the file.
        sizes: whether collectives tell their elements.
        steps: how many.
        exchange_us: of an all-to-all between the passes, with nothing beside it.
        lacks: steps and numbers of the all-reduces that the file lacks.
    """
    rows: list[dict[str, Any]] = []
    call = 0

    def put(cat: str, name: str, at: float, dur: float, tid: int, **args: Any) -> None:
        rows.append({"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": at, "dur": dur, "args": args})

    def work(name: str, at: float, dur: float, op: str, stream: int = 7, tid: int = 1, **told: Any) -> None:
        nonlocal call
        call += 1
        backward = {"Sequence number": call, "Fwd thread id": 1} if tid == 2 else {}
        put("cpu_op", op, at - 9, 8, tid, **{"External id": call}, **backward)
        put("cuda_runtime", "cudaLaunchKernel", at - 7, 3, tid, correlation=call, **{"External id": call})
        kind = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        put(kind, name, at, dur, stream, device=0, stream=stream, correlation=call, **told)

    at = 1000.0
    for step in range(steps):
        begin = at
        work("Memcpy HtoD (Pinned -> Device)", at, COPY_US, "aten::copy_")
        at += COPY_US + GAP_US
        work("ampere_sgemm_128x64_nn", at, FORWARD_US, "aten::mm")
        at += FORWARD_US
        if exchange_us:
            told = {"Collective name": "all_to_all", "Group size": 8, "dtype": "Float"}
            told |= {"In msg nelems": 1000, "Out msg nelems": 1000}
            work("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage)", at, exchange_us, "nccl:all_to_all", 20, **told)
            at += exchange_us
        for number, (took, elements) in enumerate(zip(BACKWARD_US, ELEMENTS, strict=True)):
            work("ampere_sgemm_128x64_nt", at + GAP_US, took, "MmBackward0", tid=2)
            at += GAP_US + took
            told = {"Collective name": "allreduce", "Group size": 8, "dtype": "Float"}
            if sizes:
                told |= {"In msg nelems": elements, "Out msg nelems": elements}
            lasts = ALONE_US if elements == ELEMENTS[-1] else 300.0
            if (step, number) in lacks:
                continue
            work("ncclDevKernel_AllReduce_Sum_f32_RING_LL", at, lasts, "nccl:all_reduce", 20, 2, **told)
        at += ALONE_US
        put("user_annotation", "Optimizer.step#SGD.step", at - 9, 12, 1)
        work("multi_tensor_apply_kernel", at, UPDATE_US, "aten::_foreach_add_")
        at += UPDATE_US
        put("user_annotation", f"ProfilerStep#{step}", begin - 10, at - begin, 1)
    content = {
        "schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}], "traceEvents": rows,
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8},
        "baseTimeNanoseconds": 1_790_000_000_000_000_000,
    }  # fmt: skip
    with gzip.open(path, "wt") as file:
        json.dump(content, file)
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kineto(tmp_path_factory.mktemp("made") / "rank0.pt.trace.json.gz")


@functools.cache
def of_file(path: Path) -> recorded.RecordedStep:
    """Return the step of a trace, which several tests ask about."""
    return recorded.of(xsp.load(path))


def test_a_trace_of_one_rank_of_eight_tells_its_step_without_its_collectives(trace: Path) -> None:
    found = of_file(trace)
    assert found.ranks == 8
    assert found.work.arrivals == tuple(4 * each for each in ELEMENTS)
    assert found.plan == ((0,), (1,), (2,), (3,))
    assert found.step == pytest.approx(STEP_US * US, rel=0.02)
    assert [each.backward for each in reversed(found.work.layers)] == pytest.approx(
        [(GAP_US + took) * US for took in BACKWARD_US]
    )
    assert sum(each.forward for each in found.work.layers) == pytest.approx((FORWARD_US + GAP_US) * US)
    assert found.work.update == pytest.approx(UPDATE_US * US)
    assert found.work.input.copy == pytest.approx(COPY_US * US)
    assert found.samples is None
    assert "number of samples of a step" in found.unknown


def test_on_64_ranks_it_takes_what_the_recurrence_says_and_the_straggler_is_what_others_wait_for(trace: Path) -> None:
    found = of_file(trace)
    for factor in (1.0, 1.3):
        job = Job(64, LINK, Algorithm.RING, plan=found.plan, straggler=Straggler(factor))
        takes = [collectives.all_reduce_seconds(Algorithm.RING, LINK, 64, 4 * each) for each in ELEMENTS]
        ready = list(itertools.accumulate((GAP_US + took) * US * factor for took in BACKWARD_US))
        end = 0.0
        for at, took in zip(ready, takes, strict=True):
            end = max(end, at) + took
        truth = COPY_US * US + (FORWARD_US + GAP_US + UPDATE_US) * US * factor + end
        point = scaling.of(found, job, [64]).points[0].predicted
        assert point.step == pytest.approx(truth + found.work.other * factor, rel=1e-6)
        assert point.step == pytest.approx(truth, rel=0.02)
        if factor == 1.0:
            assert point.parts[prediction.EXPOSED] == pytest.approx(end - ready[-1])
            assert point.parts[prediction.WAITING] == 0

    fast = Job(64, collectives.link("0,1e-14"), Algorithm.RING, plan=found.plan, straggler=Straggler(1.3))
    slower = 0.3 * ((FORWARD_US + GAP_US + UPDATE_US + sum(BACKWARD_US) + 4 * GAP_US) * US)
    waited = scaling.of(found, fast, [64]).points[0].predicted.parts[prediction.WAITING]
    assert waited == pytest.approx(slower * 63 / 64, rel=0.02)


def test_a_trace_that_does_not_tell_its_gradients_needs_them(tmp_path: Path) -> None:
    loaded = xsp.load(kineto(tmp_path / "rank0.pt.trace.json.gz", sizes=False, steps=1))
    with pytest.raises(AnalysisError, match="--gradients"):
        recorded.of(loaded)
    found = recorded.of(loaded, 16_400_000)
    assert sum(found.work.arrivals) == pytest.approx(16_400_000, abs=20)
    assert any("divided into" in each for each in found.unknown)


@pytest.mark.slow
def test_a_step_is_put_together_again_from_its_own_collectives(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = of_file(trace)
    assert found.collective_seconds == pytest.approx([300 * US] * 3 + [ALONE_US * US])
    assert found.exposed_reductions == pytest.approx(ALONE_US * US)
    answer = scaling.of(found, Job(link=LINK, plan=found.plan), [1, 2])
    assert answer.replay is not None
    assert answer.replay.step == pytest.approx(STEP_US * US, rel=0.01)
    assert answer.replay.parts[prediction.EXPOSED] == pytest.approx(ALONE_US * US, rel=0.02)
    assert main(["predict", str(trace), "--ranks", "8", "--link", "10us,1GB/s"]) == 0
    assert "with each all-reduce as long as in the run" in " ".join(capsys.readouterr().out.split())
    assert main(["predict", str(trace), "--ranks", "8", "--link", "10us,1GB/s", "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)["rebuilt"]
    assert told["predicted_s"] == pytest.approx(answer.replay.step)
    assert told["recorded_exposed_s"] == pytest.approx(ALONE_US * US)


def test_durations_of_collectives_belong_to_a_plan_of_buckets() -> None:
    with pytest.raises(UsageError, match="need a plan of buckets"):
        Job(2, LINK, collective_seconds=(0.1,))
    with pytest.raises(UsageError, match="need a plan of buckets"):
        Job(2, LINK, plan=((0,), (1,)), collective_seconds=(0.1,))
    with pytest.raises(UsageError, match="an all-reduce"):
        Job(2, LINK, plan=((0,),), collective_seconds=(-0.1,))


@pytest.mark.slow
def test_collectives_that_are_no_sums_stay_as_recorded(tmp_path: Path) -> None:
    plain = recorded.of(xsp.load(kineto(tmp_path / "plain.pt.trace.json.gz")))
    found = recorded.of(xsp.load(kineto(tmp_path / "exchange.pt.trace.json.gz", exchange_us=400.0)))
    assert found.step == pytest.approx(plain.step + 400 * US, rel=1e-3)
    assert found.work.other == pytest.approx(plain.work.other + 400 * US, rel=0.02)
    assert any("3 of all_to_all): the 0.4 ms of a step" in each for each in found.unknown)
    steps = [scaling.of(each, Job(8, LINK, plan=each.plan), [8]).points[0].predicted.step for each in (plain, found)]
    assert steps[1] - steps[0] == pytest.approx(400 * US, rel=0.02)


@pytest.mark.slow
def test_steps_that_sent_different_sums_are_said_to(tmp_path: Path) -> None:
    lacks = [(0, 0), (1, 1), (2, 2)]
    found = recorded.of(xsp.load(kineto(tmp_path / "lacks.pt.trace.json.gz", lacks=lacks)))
    assert any("3 steps sent 3 different sets, of 8.4 to 16 MB" in each for each in found.unknown)
    most = recorded.of(xsp.load(kineto(tmp_path / "most.pt.trace.json.gz", lacks=lacks[:1])))
    assert not any("different sets" in each for each in most.unknown)
    assert len(most.work.arrivals) == len(ELEMENTS)


def test_what_a_module_does_around_others_keeps_its_place_in_the_backward_pass_of_a_device() -> None:
    def work(phase: str, layer: str | None, order: int | None, took: float, step: int = 0) -> devicestep._Work:
        return devicestep._Work(step, phase, layer, order, 0, took)

    forward = [work("forward", "model", 0, 1.0), work("forward", "conv", 1, 2.0), work("forward", "head", 2, 3.0)]
    once = [
        *forward, work("backward", "model", 0, 8.0), work("backward", "model", 0, 8.0),
        work("backward", "head", 2, 4.0), work("backward", None, None, 1.0),
        work("backward", "conv", 1, 2.0), work("backward", "model", 0, 4.0),
    ]  # fmt: skip
    # The second step lacks the head, whose place the first one tells; times are means.
    twice = [each._replace(step=1) for each in once if each.layer != "head"]
    found = devicestep._layers_by_module([*once, *twice], 2)
    assert [(each.name, each.backward) for each in reversed(found)] == [
        ("model", 16.0), ("head", 2.0), ("no module", 1.0), ("conv", 2.0), ("model", 4.0),
    ]  # fmt: skip
    assert {each.name: each.forward for each in reversed(found)} == {
        "model": 1.0, "conv": 2.0, "head": 1.5, "no module": 0.0,
    }  # fmt: skip


def test_one_step_has_no_interval_and_neither_has_its_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = kineto(tmp_path / "rank0.pt.trace.json.gz", steps=1)
    assert main(["predict", str(path), "--ranks", "2", "--link", "nvlink4", "--format", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["recorded"]["low_s"] is None
    assert said["ranks"][0]["high_s"] is None
    assert any("interval" in each for each in said["unknown"])


def test_the_command_shows_what_it_rests_on_in_80_columns(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(trace), "--ranks", "2,8,64,1024", "--link", "nvlink4", "--straggler", "1.3:turns"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) < 80
    for words in ("quoted", "What to buy", "Check: for the 8 ranks", "Nothing was measured", "exposed", "1,024"):
        assert words in shown


def test_the_command_writes_json(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(trace), "--ranks", "1,8", "--link", "5us,10GB/s", "--format", "json", "--sharded"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [each["ranks"] for each in said["ranks"]] == [1, 8]
    for each in said["ranks"]:
        assert sum(each["parts_s"].values()) == pytest.approx(each["step_s"], rel=1e-6)
    assert said["ranks"][0]["communication_s"] == 0
    assert not said["link"]["quoted"]


@pytest.mark.parametrize(
    "options",
    [
        ["--ranks", "0"], ["--ranks", "-1"], ["--ranks", "2,x"], ["--ranks", ""], ["--ranks", "99999999999"],
        ["--ranks", "2"], ["--ranks", "2", "--link", "nvlink"], ["--bucket", "0"], ["--bucket", "-1MiB"],
        ["--straggler", "nan"], ["--straggler", "0"], ["--straggler", "1.3:some"], ["--loader", "5,5,5"],
        ["--loader", "5ms,5ms"], ["--loader", "5MB,5MB,2"], ["--loader", "0MB,5ms,2"],
        ["--what-if", ""], ["--what-if", "ranks=4"], ["--what-if", "bucket"], ["--what-if", "bucket=x"],
        ["--what-if", "sharded=1"], ["--what-if", "link=nvlink"], ["--what-if", "algorithm=best"],
        ["--what-if", "bucket=1MiB bucket=2MiB"], ["--compute", "0"], ["--compress", "-1"], ["--kind", "1"],
        ["--batch", "8"], ["--accumulate", "0"], ["--gradients", "inf"], ["--gradients", "100MB"],
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_in_one_line(
    trace: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*options, *([] if "--link" in options or options == ["--ranks", "2"] else ["--link", "nvlink4"])]
    assert exit_code("predict", str(trace), *options) != 0
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("mu", ["\N{MICRO SIGN}", "\N{GREEK SMALL LETTER MU}"])
def test_microseconds_of_a_loader_have_either_mu(mu: str) -> None:
    assert loader(f"500{mu}s,40ms,8") == (pytest.approx(5e-4), pytest.approx(0.04), 8)


# --- a run of ours ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch = pytest.importorskip("torch")
    place = tmp_path_factory.mktemp("runs") / "train"
    embedding, head = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50, bias=False)
    head.weight = embedding.weight
    model = torch.nn.Sequential(embedding, torch.nn.Linear(16, 16), torch.nn.ReLU(), head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with xsp.profile("train", out=place, levels="M/L", batch_size=4, samples=False) as profile:
        for _ in range(12):
            with profile.step():
                optimizer.zero_grad()
                model(torch.arange(4)).sum().backward()
                optimizer.step()
    return place


def test_a_run_tells_the_gradients_of_its_modules_and_those_that_modules_share_once(run: Path) -> None:
    found = recorded.of(xsp.load(run))
    assert sum(found.work.arrivals) == 4 * (50 * 16 + 16 * 16 + 16)
    assert found.work.arrivals[-1] == 4 * 50 * 16  # the embedding's arrives last, and the head has none of its own
    assert found.ranks == 1
    assert found.samples == 4
    alone = scaling.of(found, Job(link=LINK), [1, 2])
    for each in alone.points:
        assert each.low is not None
        assert each.high is not None
        assert each.low <= each.predicted.step <= each.high
    assert alone.check.step == pytest.approx(found.step, rel=1e-6)
    assert alone.points[1].predicted.step >= alone.points[0].predicted.step
    assert alone.points[0].samples_per_s == pytest.approx(4 / found.step)


def test_the_time_of_page_faults_is_said_as_other_processes_may_have_none(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "page faults" not in " ".join(recorded.of(xsp.load(run)).unknown)
    loop_of = recorded.loop_of

    def with_faults(trace: xsp.Trace) -> Any:
        loop = loop_of(trace)
        assert loop is not None
        return loop._replace(faults=4e9, system_ns=(loop.mean_ns or 0) / 4)

    monkeypatch.setattr(recorded, "loop_of", with_faults)
    step = recorded.of(xsp.load(run))
    threads = pagefaults.threads(xsp.load(run).run.machine)
    assert step.page_faults == pytest.approx(step.step / 4 / threads**0.5)
    assert any(text.startswith("how many page faults ranks have: ") for text in step.unknown)


@pytest.mark.slow
def test_a_run_that_accumulates_gradients_sends_them_in_the_last_backward_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with xsp.profile("train", out=tmp_path / "run", levels="M/L", batch_size=12, samples=False) as profile:
        for _ in range(12):
            with profile.step():
                for _ in range(3):
                    model(torch.ones(4, 16)).sum().backward()
                optimizer.step()
    found = recorded.of(xsp.load(tmp_path / "run"))
    assert found.accumulated_batches == 3
    assert found.samples == 4
    assert len(found.work.arrivals) == 2
    assert any("no_sync" in each for each in found.sources)
    assert main(["predict", str(tmp_path / "run"), "--ranks", "1,8", "--link", "ethernet-10g", "--format", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ranks"][0]["step_s"] == pytest.approx(found.step, rel=1e-6)
    one = sum(each.forward + each.backward for each in found.work.layers)
    assert 3 * one + found.work.update + 3 * found.work.other == pytest.approx(found.step, rel=1e-6)


@pytest.mark.slow
def test_buckets_of_a_trace_keep_their_sizes_where_modules_are_known_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "_modules", lambda trace, idle: [("model", 4000, 4000, 4000, True, 0)])
    monkeypatch.setattr(gradients, "_idle_models", lambda trace: ([], 0))
    found = recorded.of(xsp.load(kineto(tmp_path / "sizes.pt.trace.json.gz")))
    assert found.work.arrivals == tuple(4 * each for each in ELEMENTS)
    assert found.plan is not None
    pieces = recorded.of(xsp.load(kineto(tmp_path / "none.pt.trace.json.gz", sizes=False)))
    assert sum(pieces.work.arrivals) == pytest.approx(4000, abs=devicestep.PIECES)
    assert any("spread over the backward pass" in each for each in pieces.sources)


@pytest.mark.slow
def test_an_optimizer_that_has_gradients_computed_again_accumulates_no_batches(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 4))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    values = torch.randn(256, 64)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(values).square().mean()
        loss.backward()
        return loss

    with xsp.profile("lbfgs", out=tmp_path / "run", levels="M/L", batch_size=256, samples=False) as profile:
        for _ in range(12):
            with profile.step():
                optimizer.step(closure)
    found = recorded.of(xsp.load(tmp_path / "run"))
    assert found.accumulated_batches == 1
    assert found.samples == 256
    assert sum(found.work.arrivals) == 4 * (64 * 64 + 64 + 64 * 4 + 4)
    assert any("the optimizer computes them" in each for each in found.unknown)
    assert not any("accumulates" in each for each in found.sources)


def test_collectives_that_nobody_could_number_are_no_part_of_the_backward_pass_either() -> None:
    written = """
        step train           0-1000
        forward Net          10-200
        backward backward    200-800
        op MmBackward0       210-400 phase=backward
        call gloo:all_reduce 380-750 thread=2
        call gloo:recv       760-790 thread=2
        optimizer SGD        810-900
    """
    for given in (written, written.replace("thread=2", 'thread=2 attributes={"xsp.collective.name":"allreduce"}', 1)):
        made = trace_of(spans(given))
        assert hoststep._collective_wait(made) == pytest.approx(350e-6)
        (only,) = hoststep._lanes(made)["communication"]
        assert only == pytest.approx((370e-6, 740e-6))


@pytest.mark.parametrize(("also", "waited_us"), [("", 6000), ("call gloo:all_gather 13000-15500 thread=4", 7500)])
def test_a_gap_between_operators_beside_a_collective_that_goes_on_is_no_wait(also: str, waited_us: float) -> None:
    """Only the time after the last operator of a layer is one, and that of a collective that ends in a gap."""
    made = trace_of(
        spans(f"""
        step train 0-40000
        forward Net 10-9000
        module Net 20-8900
        op aten::relu 100-4000 sequence_nr=6
        op aten::mm 4100-8000 sequence_nr=7
        backward backward 10000-30000
        op MmBackward0 10100-14000 sequence_nr=7 forward_thread=1 thread=2 phase=backward
        op ReluBackward0 16000-20000 sequence_nr=6 forward_thread=1 thread=2 phase=backward
        call gloo:all_reduce 12000-26000 thread=3
        op aten::copy_ 26000-27000 thread=2 phase=backward
        {also}
        """)
    )
    assert hoststep._collective_wait(made) == pytest.approx(waited_us * US)


def test_passes_within_an_optimizers_step_are_no_batches_of_it() -> None:
    def batch(at: int) -> str:
        return f"forward Net {at}-{at + 90}\nmodule Net {at}-{at + 89}\nbackward backward {at + 100}-{at + 190}"

    accumulated = f"step train 0-1000\n{batch(10)}\n{batch(210)}\noptimizer SGD 500-990"
    again = f"step train 0-1000\noptimizer LBFGS 5-990\n{batch(10)}\n{batch(210)}"
    last = f"step train 0-1000\n{batch(10)}\noptimizer SGD 205-990\n{batch(210)}"  # as in Lightning
    assert [hoststep.batch_count(trace_of(spans(each))) for each in (accumulated, again, last)] == [2, 1, 2]
    assert [hoststep.closure_count(trace_of(spans(each))) for each in (accumulated, again, last)] == [0, 2, 1]


@pytest.mark.slow
def test_backward_work_of_a_module_around_others_is_where_it_was_recorded(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Block(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (torch.nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))

        def forward(self, given: Any) -> Any:
            return torch.sigmoid(given + self.second(torch.relu(self.first(given))))

    class Losing(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.block, self.head = torch.nn.Conv2d(3, 8, 3), Block(), torch.nn.Linear(8, 5000)

        def forward(self, given: Any, labels: Any) -> Any:
            scores = self.head(self.block(self.stem(given)).mean((2, 3)))
            return torch.nn.functional.cross_entropy(scores, labels)

    model = Losing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with xsp.profile("train", out=tmp_path / "run", levels="M/L/G", batch_size=8, samples=False) as profile:
        for _ in range(12):
            with profile.step():
                optimizer.zero_grad()
                model(torch.ones(8, 3, 18, 18), torch.arange(8)).backward()
                optimizer.step()
    found = recorded.of(xsp.load(tmp_path / "run"))
    order = [each.name for each in reversed(found.work.layers) if each.backward]
    parts = {name.split(".")[-1] for name in order}
    assert {"stem", "head", "first", "second"} <= parts
    assert order[0] not in {each.name for each in found.work.layers if each.gradients}  # the loss, in the model itself
    assert order[-1].endswith("stem")
    block = next(name for name in order if name.endswith("block"))
    places = [place for place, name in enumerate(order) if name == block]
    second = next(place for place, name in enumerate(order) if name.endswith("second"))
    first = next(place for place, name in enumerate(order) if name.endswith("first"))
    assert places[0] < second < places[1] < first
    assert found.work.arrivals[-1] == 4 * (8 * 3 * 9 + 8)
    assert len([each for each in found.work.layers if each.gradients]) == 4
    point = scaling.of(found, Job(link=collectives.link("100us,1GB/s")), [2]).points[0].predicted
    assert point.parts[prediction.EXPOSED] > 100e-6  # the last bucket has nothing beside it


def test_a_batch_of_twice_the_size_takes_twice_the_computation(run: Path) -> None:
    found = recorded.of(xsp.load(run))
    twice = found.of_batch(8)
    assert twice.samples == 8
    assert sum(each.forward for each in twice.work.layers) == pytest.approx(
        2 * sum(each.forward for each in found.work.layers)
    )
    assert twice.work.update == found.work.update
    assert any("as if the time per sample were constant" in each for each in twice.unknown)


def test_the_report_gets_a_section_with_the_recorded_step_beside_the_predicted_one(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(run), "--ranks", "2,8", "--link", "ethernet-10g", "--loader", "1ms,9ms,2"]) == 0
    assert "could" not in capsys.readouterr().err
    section = sections.read(run).sections[text.SECTION]
    charts = [part for part in section.parts if isinstance(part, sections.Chart)]
    assert [each.kind for each in charts] == ["lines", "stacked", "grid", "grid"]
    assert {"forward", "backward", "communication"} <= {each.name for each in charts[-1].series}


def test_parameters_that_are_frozen_have_no_gradients(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)
    )
    for each in (*model[0].parameters(), model[2].bias):  # a module whole, another one in part
        each.requires_grad_(False)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    with xsp.profile("train", out=tmp_path / "run", levels="M/L", batch_size=4, samples=False) as profile:
        for _ in range(12):
            with profile.step():
                model(torch.ones(4, 16)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    found = recorded.of(xsp.load(tmp_path / "run"))
    assert sum(found.work.arrivals) == 4 * (64 * 64 + 64 * 4 + 4)
    frozen, whole = 4 * (16 * 64 + 64 + 64) / 1e6, 4 * (16 * 64 + 64 + 64 * 64 + 64 + 64 * 4 + 4) / 1e6
    assert any(f"{frozen:.4g} of {whole:.4g} MB of parameters are frozen" in each for each in found.sources)
    assert not any("frozen" in each for each in found.unknown)
    for sharded in (False, True):
        answer = scaling.of(found, Job(link=LINK, sharded=sharded), [2])
        assert any("gathering them is not included" in each for each in text.as_json(answer)["notes"]) == sharded


@pytest.mark.slow
def test_models_whose_modules_have_equal_names_have_gradients_of_their_own(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    first, second = (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, size)) for size in (8, 2))
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    with xsp.profile("train", out=tmp_path / "run", levels="M/L", batch_size=4, samples=False) as profile:
        for _ in range(12):
            with profile.step():
                second(first(torch.ones(4, 8))).sum().backward()
                optimizer.step()
    found = recorded.of(xsp.load(tmp_path / "run"))
    assert sum(found.work.arrivals) == 4 * (3 * (8 * 8 + 8) + 8 * 2 + 2)
    assert not any("share are counted twice" in each for each in found.unknown)


@pytest.mark.slow
def test_a_model_without_a_backward_pass_in_the_step_has_no_gradients(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    generator, critic = (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, size)) for size in (8, 2))
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    with xsp.profile("train", out=tmp_path / "run", batch_size=4, samples=False) as profile:
        for _ in range(40):
            with profile.step():
                optimizer.zero_grad()
                critic(generator(torch.ones(4, 8)).detach()).sum().backward()
                optimizer.step()
    found = recorded.of(xsp.load(tmp_path / "run"))
    assert sum(found.work.arrivals) == 4 * (8 * 8 + 8 + 8 * 2 + 2)
    assert any("of models that have no backward pass in this step" in each for each in found.sources)


@pytest.mark.slow
def test_of_a_program_that_evaluates_most_of_its_time_the_steps_that_train_are_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with xsp.profile("train", out=tmp_path / "run", levels="M/L", samples=False) as profile:
        for _ in range(12):
            with profile.step():
                model.train()
                model(torch.ones(4, 64)).sum().backward()
                optimizer.step()
            with profile.step(), torch.no_grad():
                model.eval()
                for _ in range(20):
                    model(torch.ones(2000, 64))
    assert main(["predict", str(tmp_path / "run"), "--ranks", "2", "--link", "nvlink4", "--format", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["recorded"]["gradient_bytes"] == 4 * (64 * 64 + 64 + 64 * 4 + 4)
    assert any(each.startswith("kind of step: ") and "--kind selects another" in each for each in said["from"])
    assert fromruns.row(tmp_path / "run")["step_s"] == said["recorded"]["step_s"]
    kinds = xsp.load(tmp_path / "run").run.kinds
    other = next(each.kind for each in kinds if not each.training)
    assert main(["predict", str(tmp_path / "run"), "--ranks", "1", "--kind", str(other)]) != 0
    assert "no training step" in capsys.readouterr().err


@pytest.mark.slow
def test_sets_of_changes_are_held_against_the_job_that_was_asked_for(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = ["link=ethernet-10g", "compress=2", "compute=0.5  straggler=1.5", "sharded", "accumulate=4", "bucket=1GiB"]
    words = ["predict", str(trace), "--ranks", "2,8", "--link", "10us,1GB/s", "--algorithm", "ring"]
    asked = [word for each in sets for word in ("--what-if", each)]
    assert main([*words, *asked, "--format", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    base = said["ranks"][-1]
    found = {each["change"]: each for each in said["what_if"]}
    assert list(found) == [" ".join(each.split()) for each in sets]
    for name, options in {
        "link=ethernet-10g": ["--link", "ethernet-10g"], "compress=2": ["--compress", "2"], "sharded": ["--sharded"],
        "compute=0.5 straggler=1.5": ["--compute", "0.5", "--straggler", "1.5"], "accumulate=4": ["--accumulate", "4"],
        "bucket=1GiB": ["--bucket", "1GiB"],
    }.items():  # fmt: skip
        assert main([*words, *options, "--format", "json"]) == 0
        alone = json.loads(capsys.readouterr().out)["ranks"][-1]["step_s"]
        assert found[name]["step_s"] == pytest.approx(alone, rel=1e-9)
        batches = 4 if name == "accumulate=4" else 1
        assert found[name]["faster"] == pytest.approx(batches * base["step_s"] / alone - 1)
    assert main([*words, *asked]) == 0
    shown = capsys.readouterr().out
    assert "what if" in shown
    assert "compute=0.5 straggler=1.5" in shown
    assert max(map(len, shown.splitlines())) < 80


def test_gradients_that_are_compressed_travel_in_fewer_bytes_and_parameters_do_not(trace: Path) -> None:
    found = of_file(trace)
    link = collectives.link("0us,1GB/s")
    whole, half = (
        scaling.of(found, Job(link=link, algorithm=Algorithm.RING, plan=found.plan, compress=each), [8]).points[0]
        for each in (1.0, 2.0)
    )
    assert half.predicted.communication == pytest.approx(whole.predicted.communication / 2)
    whole, half = (
        scaling.of(found, Job(link=link, plan=found.plan, compress=each, sharded=True), [8]).points[0]
        for each in (1.0, 2.0)
    )
    # gathered twice, reduced once
    assert half.predicted.communication == pytest.approx(whole.predicted.communication * 5 / 6)


def test_buckets_of_a_run_that_a_smaller_size_does_not_divide_are_said(trace: Path) -> None:
    found = of_file(trace)
    for size, said in ((1 << 20, True), (1 << 30, False)):
        notes = text.as_json(scaling.of(found, Job(2, LINK, bucket=size), [2]))["notes"]
        assert any("a smaller --bucket does not divide them" in each for each in notes) == said


def test_work_that_takes_half_as_long_is_scaled_and_said(trace: Path) -> None:
    found = of_file(trace)
    half = found.computing(0.5)
    assert half.work.update == found.work.update / 2
    assert half.work.input == found.work.input
    assert any("0.5 times as long" in each for each in half.unknown)
    assert found.computing(1.0) == found


def test_a_loader_that_is_stated_is_no_longer_unknown(trace: Path) -> None:
    found = of_file(trace)
    waited = dataclasses.replace(found, unknown=(recorded.LOADER_UNKNOWN, "another"))
    stated = waited.with_loader(0.001, 0.002, 4, "reading: as told")
    assert stated.unknown == ("another",)
    assert (stated.work.input.read, stated.work.input.decode, stated.work.input.workers) == (0.001, 0.002, 4)
    assert "reading: as told" in stated.sources


def test_a_batch_of_another_size_is_not_said_to_be_the_recorded_one(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(run), "--ranks", "1,2", "--link", "nvlink4", "--batch", "8"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "4 samples per rank" in shown
    assert "batches of 8 samples" in shown


@pytest.mark.slow
def test_a_trace_of_several_ranks_needs_no_link_for_one_and_is_not_checked_without(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(trace), "--ranks", "1"]) == 0
    assert "No check: the run has 8 ranks, and their time over no link is unknown" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_run_without_a_backward_pass_is_refused_with_what_to_record(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(4, 4)
    with xsp.profile("predicts", out=tmp_path / "run", levels="M/L", samples=False) as profile:
        for _ in range(6):
            with profile.step(), torch.no_grad():
                model(torch.ones(1, 4))
    with pytest.raises(AnalysisError, match="--train"):
        recorded.of(xsp.load(tmp_path / "run"))


def test_slow_ranks_are_told_apart_on_the_command_line() -> None:
    from xsp.cli.predict import straggler

    assert straggler("1.3") == (1.3, SlowRanks.ONE)
    assert straggler("2:together") == (2.0, SlowRanks.TOGETHER)
    with pytest.raises(UsageError):
        Straggler(float("inf"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "kineto_nvidia/hta_a100_nccl_metadata_rank0of2.json.gz",
        deep("kineto_amd/tracelens_mi300x_resnet_ddp_rank0of8.json.gz"),
    ],
)
def test_real_traces_of_one_rank_are_predicted_and_add_up(shared: Path, name: str) -> None:
    found = of_file(shared / "traces" / name)
    point = scaling.of(found, Job(link=LINK, plan=found.plan), [found.ranks]).points[0]
    assert found.plan is not None
    assert sum(point.predicted.parts.values()) == pytest.approx(point.predicted.step, rel=1e-6)
    assert point.predicted.step <= 1.05 * found.step  # over a fast link, without waiting for others


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "kineto_nvidia/hta_a100_nccl_metadata_rank0of2.json.gz",
        deep("kineto_amd/tracelens_mi300x_resnet_ddp_rank0of8.json.gz"),
        deep("multi_rank/hta_sampled_rank-0.json.gz"),
        deep("multi_rank/hta_sampled_rank-1.json.gz"),
        "multi_rank",
    ],
)
def test_steps_of_real_jobs_of_several_devices_are_within_a_tenth_when_put_together_from_their_parts(
    shared: Path, name: str
) -> None:
    found = of_file(shared / "traces" / name)
    rebuilt = scaling.of(found, Job(link=LINK, plan=found.plan), [1]).replay
    assert rebuilt is not None
    assert rebuilt.step == pytest.approx(found.step, rel=0.1)
