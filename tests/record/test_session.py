"""Profiling a program from inside: what is recorded, and what must never happen to the program."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections import Counter
from pathlib import Path

import pytest
from depth import deep

torch = pytest.importorskip("torch")

import xsp  # noqa: E402
from xsp import cli, identity, rundir  # noqa: E402
from xsp.collector import Collector, Signal  # noqa: E402
from xsp.errors import LevelError, UsageError  # noqa: E402
from xsp.health import health  # noqa: E402
from xsp.levels import parse_levels  # noqa: E402
from xsp.record import blocks  # noqa: E402
from xsp.record.autostep import AutoStep  # noqa: E402
from xsp.record.evidence import TrainingEvidence  # noqa: E402
from xsp.record.schedule import Schedule  # noqa: E402
from xsp.schema import Level, Span  # noqa: E402

nn = torch.nn


class Twice(nn.Module):
    """Calls one module twice and another one recursively, in a block that the user named."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.again = nn.Linear(8, 8), Again()

    def forward(self, x):
        with xsp.span("inner"):
            x = self.a(self.a(x))
        return self.again(x, 2)


class Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.ReLU()

    def forward(self, x, times):
        return self(x, times - 1) if times else self.last(x)


def record(out: Path, step, repeats: int = 2, **options) -> xsp.Trace:
    with xsp.profile("test", out=out, **{"settle": 1, "samples": False, **options}) as prof:
        for _ in range(prof.schedule.steps_for(repeats)):
            with prof.step():
                step()
    return xsp.load(out)


def shown(trace: xsp.Trace, below: int = 40) -> list[str]:
    """Return the merged spans above a level, each as its chain of names from the step down."""
    rows = trace.sql(
        "SELECT span_id, parent_id, kind || ' ' || name FROM merged WHERE level < ? ORDER BY start_ns, level", [below]
    ).fetchall()
    names = {row[0]: (row[1], row[2]) for row in rows}

    def chain(span: str | None) -> list[str]:
        return [*chain(names[span][0]), names[span][1]] if span in names else []

    return [" > ".join(chain(row[0])) for row in rows]


@pytest.mark.slow
def test_every_rung_is_measured_as_often_as_the_schedule_says(tmp_path):
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    trace = record(tmp_path / "run", lambda: model(x), repeats=3)
    assert [(rung.level, rung.steps) for rung in trace.rungs] == [(20, 3), (30, 3), (40, 3), (70, 3)]
    assert trace.run["steps"] == {"seen": 30, "stored": 13, "lost": 0, "skipped": 0, "found": True}
    assert trace.run["finished"] is True


def test_modules_called_twice_recursion_and_named_blocks(tmp_path):
    model, x = Twice(), torch.randn(2, 8)

    def step():
        with xsp.span("both"):
            model(x)

    trace = record(tmp_path / "run", step, levels="M/L")
    top = "step test > user both > forward Twice > module Twice"
    assert sorted(shown(trace)) == sorted(
        [
            "step test",
            "step test > user both",
            "step test > user both > forward Twice",
            top,
            f"{top} > user inner",
            f"{top} > user inner > module a",
            f"{top} > user inner > module a",
            f"{top} > module again",
            f"{top} > module again > module again",
            f"{top} > module again > module again > module again",
            f"{top} > module again > module again > module again > module again.last",
        ]
    )
    assert trace.sql("SELECT count(DISTINCT key) FROM merged WHERE level < 40").fetchall() == [(11,)]
    assert trace.sql("SELECT count(*) FROM merged WHERE true_ns IS NULL").fetchall() == [(0,)]


@pytest.mark.slow
def test_training_has_its_passes_and_backward_ops_belong_to_the_layer_of_their_forward_op(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.randn(200, 8), batch_size=4)
    with xsp.profile("train", out=tmp_path / "run", settle=False) as prof:
        for batch in data:
            with prof.step():
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
    trace = xsp.load(tmp_path / "run")
    kinds = trace.sql("SELECT kind, count(*) FROM merged WHERE level = 20 GROUP BY kind ORDER BY kind").fetchall()
    assert kinds == [("backward", 1), ("data", 1), ("forward", 1), ("optimizer", 1), ("step", 1)]
    pairs = trace.sql(
        "SELECT o.name, l.name FROM merged o JOIN merged l ON l.span_id = o.parent_id WHERE o.parent_rule = 'sequence' "
        "AND o.name NOT LIKE '%TBackward%' ORDER BY o.start_ns"
    ).fetchall()
    frames = [(name.rpartition(" ")[2], layer) for name, layer in pairs if layer != "train"]
    assert frames == [("AddmmBackward0", "2"), ("ReluBackward0", "1"), ("AddmmBackward0", "0")]
    backward = dict(xsp.analyses.A2(trace).select("name, backward_ms").fetchall())
    assert all(backward[name] > 0 for name in "012")
    assert trace.sql("SELECT count(*) FROM merged WHERE parent_id IS NULL AND kind <> 'step'").fetchall() == [(0,)]


def test_models_in_other_threads_belong_to_the_step(tmp_path):
    first, second, x = nn.Linear(4, 4), nn.Sequential(nn.ReLU()), torch.randn(2, 4)

    def step():
        thread = threading.Thread(target=second, args=(x,))
        thread.start()
        thread.join()
        first(x)

    trace = record(tmp_path / "run", step, levels="M/L")
    assert "step test > forward Sequential > module Sequential > module 0" in shown(trace)
    assert "step test > forward Linear > module Linear" in shown(trace)


@pytest.mark.slow
def test_an_exception_passes_through_and_the_steps_before_it_are_kept(tmp_path):
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with pytest.raises(KeyError, match="mine"), xsp.profile("x", out=tmp_path / "run", warmup=0, settle=False) as prof:  # noqa: PT012
        for number in range(8):
            with prof.step():
                model(x)
                if number == 7:
                    raise KeyError("mine")
    trace = xsp.load(tmp_path / "run")
    statuses = trace.sql("SELECT status FROM spans WHERE kind = 'step' ORDER BY step").fetchall()
    assert statuses == [("ok",)] * 7 + [("error:KeyError",)]
    assert any("KeyError" in finding.text for finding in health(trace))


@pytest.mark.slow
def test_a_run_whose_only_step_raised_is_merged_without_times(tmp_path):
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    options = {"levels": "M", "warmup": 0, "settle": False, "samples": False}
    with pytest.raises(KeyError), xsp.profile("x", out=tmp_path / "run", **options) as prof, prof.step():  # noqa: PT012
        model(x)
        raise KeyError("mine")
    assert (tmp_path / "run" / rundir.MERGED_FILE).is_file()
    trace = xsp.load(tmp_path / "run")
    assert not any("was not written" in note["text"] for note in trace.run["notes"])
    assert trace.rungs == []
    merged = trace.sql("SELECT kind, status, raw_ns, true_ns FROM merged ORDER BY kind").fetchall()
    assert merged == [("forward", "ok", None, None), ("step", "error:KeyError", None, None)]


@pytest.mark.slow
def test_a_step_that_is_never_closed_is_closed_with_the_block_and_does_not_count(tmp_path):
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with xsp.profile("x", out=tmp_path / "run", warmup=0, settle=False, levels="M") as prof:
        with prof.step():
            model(x)
        prof.step().__enter__()
        model(x)
    trace = xsp.load(tmp_path / "run")
    assert trace.sql("SELECT status FROM spans WHERE kind = 'step' ORDER BY step").fetchall() == [
        ("ok",),
        ("unclosed",),
    ]
    assert trace.rungs[0].steps == 1


@pytest.mark.slow
def test_the_callers_opentelemetry_span_is_the_parent_of_the_step(tmp_path):
    api = pytest.importorskip("opentelemetry.trace")
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    tracer = sdk.TracerProvider().get_tracer("service")
    contexts = []
    with xsp.profile("x", out=tmp_path / "run", warmup=0, settle=False, levels="M") as prof:
        for _ in range(3):
            with tracer.start_as_current_span("request") as request, prof.step():
                pass
            contexts.append(request.get_span_context())
    rows = xsp.load(tmp_path / "run").sql("SELECT trace_id, parent_id, parent_rule FROM spans ORDER BY step").fetchall()
    assert rows == [(api.format_trace_id(c.trace_id), api.format_span_id(c.span_id), "explicit") for c in contexts]


def test_results_and_random_state_are_the_same_with_and_without(tmp_path):
    def train(step_of):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(8 * 36, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(24):
            with step_of():
                optimizer.zero_grad()
                model(torch.randn(4, 3, 8, 8)).square().mean().backward()
                optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()], torch.get_rng_state()

    with xsp.profile("x", enabled=False) as off:
        plain, plain_state = train(off.step)
    with xsp.profile("x", out=tmp_path / "run") as prof:
        profiled, profiled_state = train(prof.step)
    assert all(torch.equal(a, b) for a, b in zip(plain, profiled, strict=True))
    assert torch.equal(plain_state, profiled_state)


@pytest.mark.slow
def test_a_compiled_model_is_neither_recompiled_nor_broken_and_is_said_to_be_opaque(tmp_path):
    counters = pytest.importorskip("torch._dynamo.utils").counters
    model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="eager")
    x = torch.randn(2, 4)
    counters.clear()
    trace = record(tmp_path / "run", lambda: model(x), levels="M/L")  # the first call compiles inside the block
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    (row,) = trace.sql("SELECT attributes FROM merged WHERE type = 'OptimizedModule'").fetchall()
    assert "torch.compile" in row[0]
    assert any("compiled" in note["text"] for note in trace.run["notes"])


@pytest.mark.slow
def test_a_collector_that_breaks_is_left_out_and_the_program_goes_on(tmp_path):
    class Broken(Collector):
        name = "broken"
        levels = (Level.LAYER,)

        def start(self, rung: Level, describe: bool) -> None:
            raise RuntimeError("no luck")

    class Counting(Collector):
        name = "counting"
        levels = (Level.LAYER,)

        def spans(self):
            return [Span(level=Level.LAYER, kind="module", name="x", collector=self.name)]

    trace = record(tmp_path / "run", lambda: None, levels="M/L", collectors=[Broken(), Counting()])
    assert trace.run["collectors"] == ["counting"]
    assert any("no luck" in note["text"] for note in trace.run["notes"])


@pytest.mark.slow
def test_a_second_step_at_the_same_time_is_counted_not_recorded(tmp_path):
    with xsp.profile("x", out=tmp_path / "run", levels="M", warmup=0, settle=False) as prof:
        for _ in range(2):
            with prof.step(), prof.step():
                pass
    assert prof.steps_skipped == 2
    assert prof.steps_stored == 2


def test_outside_a_block_nothing_happens():
    prof = xsp.profile("x")
    with prof.step(), xsp.span("y"):
        pass
    assert prof.steps_stored == 0


def test_levels_in_a_list_are_refused_with_what_to_write(tmp_path):
    with pytest.raises(LevelError, match="write them as one text, levels='M/L'"):
        xsp.profile("x", out=tmp_path / "run", levels=["M", "L"])


@pytest.mark.parametrize("levels", ["L/M", "M/M", "M/X", "", "G", "model/op/layer"])
def test_levels_that_make_no_sense_are_refused_before_anything_is_written(tmp_path, levels):
    with pytest.raises(LevelError, match="write M, M/L or M/L/G"):
        xsp.profile("x", levels=levels, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_one_block_at_a_time(tmp_path):
    with (
        xsp.profile("outer", out=tmp_path / "a"),
        pytest.raises(UsageError, match="'outer' is active"),
        xsp.profile("inner", out=tmp_path / "b"),
    ):
        pass
    assert not (tmp_path / "b").exists()


def test_a_forked_child_does_not_record(tmp_path):
    with xsp.profile("x", out=tmp_path / "run", levels="M", warmup=0, settle=False) as prof:
        child = os.fork()
        if child == 0:
            with prof.step():
                pass
            os._exit(prof.steps_stored)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with prof.step():
            pass
    assert prof.steps_stored == 1


FORKS = """
    import os, sys
    import torch
    torch.set_num_threads(1)
    model, x = torch.nn.Linear(4, 4).eval(), torch.randn(2, 4)
    for _ in range(9):
        model(x)
    child = os.fork()
    for _ in range(200):
        model(x)
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    sys.exit(5)
"""


@pytest.mark.slow
def test_a_forked_child_that_goes_on_leaves_the_run_and_its_tables_to_the_parent(tmp_path):
    (tmp_path / "forks.py").write_text(textwrap.dedent(FORKS))
    command = [sys.executable, "-m", "xsp.cli", "run", "--levels", "M", "--every", "3", "--out", "run", "forks.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count("stored in")) == (5, 1), done.stderr
    assert xsp.load(tmp_path / "run").run["steps"]["seen"] == 209
    assert not (tmp_path / "run" / "progress.json").exists()


def test_what_a_forked_child_finds_is_no_step_and_what_it_left_open_never_ends(tmp_path):
    listeners = []

    def listener(session):
        listeners.append(AutoStep(session))
        return listeners[0]

    model, x = nn.Linear(8, 8).eval(), torch.randn(4, 8)
    options = {"levels": "M", "warmup": 0, "settle": False, "samples": False, "listener": listener}
    with xsp.profile("x", out=tmp_path / "run", **options) as prof:
        model(x)
        seen, open_step = prof._steps.step_count, prof.step()
        open_step.__enter__()
        child = os.fork()
        if child == 0:
            open_step.__exit__(None, None, None)
            for _ in range(9):
                model(x)
            os._exit(prof._steps.step_count - seen)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        open_step.__exit__(None, None, None)
    assert prof.steps_stored == 2


PROGRAM = """
    import os, signal, sys
    import torch, xsp
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    with xsp.profile("x", out=sys.argv[1], warmup=0, settle=False) as prof:
        for number in range(100):
            if number == 9:
                print(prof.steps_stored, flush=True)
                {end}
            with prof.step():
                model(x)
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        pytest.param("os._exit(7)", 7, marks=pytest.mark.slow),
        pytest.param("sys.exit(3)", 3, marks=pytest.mark.slow),
    ],
)
def test_a_program_that_ends_anyhow_leaves_every_stored_step_readable(tmp_path, end, code):
    program = textwrap.dedent(PROGRAM).format(end=end)
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    trace = xsp.load(tmp_path / "run")
    (steps,) = trace.sql("SELECT count(DISTINCT step) FROM spans").fetchall()[0]
    assert (done.returncode, int(done.stdout), steps) == (code, 9, 9)
    interrupted = any("was interrupted; 9 steps" in finding.text for finding in health(trace))
    assert interrupted == (code != 3)


@pytest.mark.slow
def test_what_may_not_load_in_the_measured_process_does_not(tmp_path):
    program = textwrap.dedent(PROGRAM).format(end="break") + textwrap.dedent("""
    heavy = {"duckdb", "pandas", "pyarrow", "polars", "rich", "opentelemetry.sdk"} & set(sys.modules)
    sys.exit(", ".join(heavy) or 0)
    """)
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "run")], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def unhurried(monkeypatch):
    """A block in which no rung is in a hurry to be measured: one step in twenty is recorded, from the first on."""
    monkeypatch.setattr(Schedule, "_is_first", False)
    return {"levels": "M", "warmup": 0, "every": 20, "spread": False, "collectors": [], "samples": False}


def test_a_program_goes_on_while_a_step_is_stored(tmp_path, unhurried):
    with xsp.profile("x", out=tmp_path / "run", **unhurried) as prof:
        for number in range(45):
            if number == 19:
                os.kill(prof._writer.process, signal.SIGSTOP)  # it stores nothing before it may go on
            with prof.step():
                pass
            if number == 30:
                assert (prof.steps_stored, prof.steps_lost) == (0, 0)
                os.kill(prof._writer.process, signal.SIGCONT)
    assert (prof.steps_stored, prof.steps_lost) == (2, 0)
    trace = xsp.load(tmp_path / "run")
    assert trace.sql("SELECT DISTINCT step FROM spans ORDER BY 1").fetchall() == [(19,), (39,)]
    beside = [step for (step,) in trace.sql("SELECT step FROM loop WHERE steady IS NULL ORDER BY step").fetchall()]
    assert beside[:11] == list(range(20, 31))
    assert not {*beside} & {*range(20), 38, 39}, "before a step is recorded one runs after the storing"


def test_a_step_that_a_dying_process_was_to_store_is_lost(tmp_path, unhurried):
    with xsp.profile("x", out=tmp_path / "run", **unhurried) as prof:
        for number in range(45):
            if number == 19:
                os.kill(prof._writer.process, signal.SIGSTOP)
            with prof.step():
                pass
            if number == 30:
                os.kill(prof._writer.process, signal.SIGKILL)
    assert (prof.steps_stored, prof.steps_lost) == (0, 2)
    assert any("2 steps were not stored" in note["text"] for note in rundir.read_run(tmp_path / "run").notes)


def test_a_step_that_is_being_stored_when_the_program_is_killed_is_stored(tmp_path):
    program = textwrap.dedent("""
    import os, signal, sys, xsp
    with xsp.profile("x", out=sys.argv[1], levels="M", warmup=0, every=40, collectors=[], samples=False) as prof:
        while not prof._steps.storing.is_underway:
            with prof.step():
                pass
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "run")])
    assert done.returncode == -signal.SIGKILL
    for _ in range(600):  # it outlives the program by what it still has to do
        if rundir.segments(tmp_path / "run"):
            break
        time.sleep(0.1)
    assert len(rundir.segments(tmp_path / "run")) == 1


def test_the_storing_process_dying_costs_steps_not_the_program(tmp_path):
    with xsp.profile("x", out=tmp_path / "run", levels="M", warmup=0, settle=False) as prof:
        for number in range(6):
            if number == 3:
                os.kill(prof._writer.process, signal.SIGKILL)
            with prof.step():
                pass
    assert (prof.steps_stored, prof.steps_lost) == (3, 3)
    assert xsp.load(tmp_path / "run").sql("SELECT count(*) FROM spans").fetchall() == [(3,)]


def test_the_schedule_settles_before_each_recorded_step():
    schedule = Schedule(parse_levels("M/L"))
    turns = [schedule.next() for _ in range(schedule.steps_for(1))]
    recorded = [place for place, turn in enumerate(turns) if turn.is_kept]
    assert all(turns[place - 1].rung is Level.APPLICATION for place in recorded)


def test_a_run_that_was_started_inside_a_trace_joins_it(tmp_path, monkeypatch):
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    monkeypatch.setenv("TRACEPARENT", f"00-{trace_id}-{span_id}-01")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with xsp.profile("job", out=tmp_path / "job", collectors=[], warmup=0) as prof:
        for _ in range(4):
            with prof.step():
                pass
    trace = xsp.load(tmp_path / "job" / "rank-0003")
    own = trace.run["otel"]
    assert (own["trace_id"], own["parent_id"]) == (trace_id, span_id)
    assert [trace.run[field] for field in ("rank", "local_rank", "world_size")] == [3, 1, 4]
    found = trace.con.execute("SELECT DISTINCT trace_id, parent_id, rank FROM spans").fetchall()
    assert found == [(trace_id, own["span_id"], 3)]


@pytest.mark.parametrize(
    "value",
    ["", "nonsense", f"00-{'0' * 32}-b7ad6b7169203331-01", "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"],
)
def test_what_is_no_traceparent_is_no_caller(value):
    assert identity.caller_in({"TRACEPARENT": value}) is None


def test_a_bare_call_of_step_at_the_end_of_each_iteration_works_as_torch_profilers_does(tmp_path):
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    with xsp.profile("marks", out=tmp_path / "run", levels="M", warmup=0, settle=1, samples=False) as prof:
        for _ in range(12):
            with xsp.span("inside"):
                model(x)
            prof.step()
    trace = xsp.load(tmp_path / "run")
    assert trace.run["steps"]["seen"] == 10, "the first two tell that calls are marks, and begin"
    assert shown(trace) == ["step marks", "step marks > user inside", "step marks > user inside > forward Linear"]
    assert any("without `with`" in note["text"] for note in trace.run["notes"])


@pytest.mark.slow
def test_a_wait_for_data_belongs_to_the_step_that_uses_its_batch_alone(tmp_path):
    class Slow(torch.utils.data.Dataset):
        def __init__(self):
            self.took = []

        def __len__(self):
            return 48

        def __getitem__(self, place):
            begin = time.perf_counter_ns()
            time.sleep(0.02)
            self.took.append(time.perf_counter_ns() - begin)
            return torch.randn(8)

    model, data = nn.Linear(8, 8), Slow()
    with xsp.profile("data", out=tmp_path / "run", levels="M", every=8, samples=False) as prof:
        between, asked = [], time.perf_counter_ns()
        for batch in torch.utils.data.DataLoader(data, batch_size=1):
            between.append(time.perf_counter_ns() - asked)
            with prof.step():
                model(batch)
            asked = time.perf_counter_ns()
    trace = xsp.load(tmp_path / "run")
    waits = trace.sql("SELECT step, count(*) FROM spans WHERE kind = 'data' GROUP BY step").fetchall()
    assert len(waits) >= 3
    assert {count for _, count in waits} == {1}
    waited = [row[0] for row in trace.sql("SELECT data_ns FROM loop ORDER BY step").fetchall()]
    assert all(took <= wait <= whole for took, wait, whole in zip(data.took, waited, between, strict=True)), (
        "each step has its own wait and no other's"
    )
    found = xsp.analyses.program_loop(trace).fetchall()[0]
    assert found[7] > 5, "data_ms"


def test_a_second_interrupt_at_the_end_of_a_block_leaves_nothing_installed(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    before = nn.Module.__call__
    prof = xsp.profile("p", out=tmp_path / "run", levels="M", samples=False)
    with pytest.raises(KeyboardInterrupt), prof:
        monkeypatch.setattr(prof._steps.storing, "wait", interrupted)
    assert nn.Module.__call__ is before
    assert prof._writer.is_gone
    with (
        xsp.profile("next", out=tmp_path / "next", levels="M", warmup=0, settle=False, samples=False) as after,
        after.step(),
    ):
        pass
    assert after.steps_stored == 1


@pytest.mark.parametrize("where", ["begin", "end"])
def test_an_interrupt_around_a_step_does_not_keep_the_next_ones_from_being_recorded(tmp_path, monkeypatch, where):
    def interrupted():
        raise KeyboardInterrupt

    with xsp.profile("p", out=tmp_path / "run", levels="M", warmup=0, settle=False, samples=False) as prof:
        monkeypatch.setattr(prof._steps.between, where, interrupted)
        with pytest.raises(KeyboardInterrupt), prof.step():
            pass
        monkeypatch.undo()
        with prof.step():
            pass
        assert not prof._steps.lock.locked()
    assert prof.steps_stored >= 1


def test_waits_for_data_of_another_thread_are_no_waits_of_the_steps(tmp_path):
    with xsp.profile("p", out=tmp_path / "run", levels="M", collectors=[], samples=False) as prof:
        with prof.step():
            pass
        hear = prof._steps.listener(None)
        ahead = threading.Thread(target=hear, args=(Signal.DATA_END, 700))
        ahead.start()
        ahead.join()
        hear(Signal.DATA_END, 50)
        assert prof._steps.waited_ns == 50


def test_a_named_block_around_several_steps_belongs_to_none_of_them(tmp_path):
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    with xsp.profile("epochs", out=tmp_path / "run", levels="M", warmup=0, settle=1, samples=False) as prof:
        for _ in range(3):
            with xsp.span("epoch"):
                for _ in range(4):
                    with prof.step():
                        model(x)
    trace = xsp.load(tmp_path / "run")
    assert trace.sql("SELECT count(*) FROM spans WHERE name = 'epoch' AND kind = 'user'").fetchall() == [(3,)]
    assert trace.sql("SELECT count(*) FROM merged WHERE name = 'epoch'").fetchall() == [(0,)]


@pytest.mark.slow
def test_text_that_is_none_neither_ends_the_program_nor_keeps_a_step_from_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "caf\udce9.csv"])
    net = nn.Sequential()
    net.add_module("l\udce9", nn.Linear(2, 2))
    with xsp.profile("caf\udce9", out=tmp_path / "run", samples=False) as prof:
        for _ in range(prof.schedule.steps_for(repeats=1)):
            with prof.step(), xsp.span("caf\udce9.csv"):
                net(torch.ones(1, 2))
    trace = xsp.load(tmp_path / "run")
    assert trace.run["steps"]["lost"] == 0
    assert trace.sql("SELECT DISTINCT name FROM spans WHERE kind = 'user'").fetchall() == [("caf?.csv",)]
    named = "SELECT DISTINCT name FROM spans WHERE kind = 'module' AND type = 'Linear'"
    assert trace.sql(named).fetchall() == [("l?",)]


def test_of_blocks_around_one_step_each_those_of_recorded_steps_stay_for_the_end():
    kept, since_ns = blocks.Blocks(), 0
    for step in range(100):
        begins = 1000 * step + 1
        kept.ended_spans += [_block("inside", begins + 400, 100)]
        if step % 10 == 0:  # recorded
            assert {each.name for each in kept.take(since_ns)} <= {"inside", "iteration"}
        else:
            kept.drop(since_ns)
        since_ns = begins + 800
        kept.ended_spans += [_block("iteration", begins + 200, 700)]
    kept.ended_spans += [_block("epoch", 1, 99_990)]
    names = Counter(each.name for each in kept.take())
    assert names == {"iteration": 10 + 1, "epoch": 1}, "and the last one, after which no step came"


def _block(name: str, start_ns: int, dur_ns: int) -> Span:
    return Span(level=Level.APPLICATION, kind="user", name=name, start_ns=start_ns, dur_ns=dur_ns)


def test_blocks_may_be_named_by_numbers_and_paths(tmp_path):
    class Mute:
        def __str__(self):
            raise KeyError("mine")

    with xsp.profile("p", out=tmp_path / "run", levels="M", warmup=0, settle=False, samples=False) as prof:
        for name in (7, Path("a/b"), Mute()):
            with prof.step(), xsp.span(name):
                pass
    trace = xsp.load(tmp_path / "run")
    assert trace.run["steps"]["lost"] == 0
    named = "SELECT name FROM spans WHERE kind = 'user' ORDER BY name"
    assert trace.sql(named).fetchall() == [("7",), ("Mute",), ("a/b",)]
    assert trace.sql("SELECT count(*) FROM spans WHERE kind = 'step'").fetchall() == [(3,)]


def test_a_batch_size_may_be_of_numpy_or_a_tensor_and_what_is_no_number_is_noted(tmp_path):
    numpy = pytest.importorskip("numpy")
    options = {"levels": "M", "warmup": 0, "settle": False, "samples": False, "batch_size": numpy.int64(16)}
    with xsp.profile("p", out=tmp_path / "run", **options) as prof:
        for samples in (numpy.int32(8), torch.tensor(4), None, 2.5, "3", -1):
            with prof.step(batch_size=samples):
                pass
    trace = xsp.load(tmp_path / "run")
    assert trace.run["finished"] is True
    sizes = "SELECT batch_size FROM spans WHERE kind = 'step' ORDER BY step"
    assert trace.sql(sizes).fetchall() == [(8,), (4,), (16,), (16,), (16,), (16,)]
    assert sum("got no whole number" in note["text"] for note in trace.run["notes"]) == 1


def test_a_result_of_the_programs_own_class_may_raise_anything():
    class Result(dict):
        __getattr__ = dict.__getitem__  # as in many programs: KeyError, not AttributeError

    TrainingEvidence().on_call(3, Result(loss=torch.ones(1, requires_grad=True).sum()))


@pytest.mark.slow
def test_models_of_nested_tensors_and_traced_ones_run_as_they_do_without(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3)).eval()
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    inputs = [torch.nested.nested_tensor(parts), torch.nested.nested_tensor(parts, layout=torch.jagged)]
    expected = [[each.tolist() for each in model(given).unbind()] for given in inputs]
    found = []
    options = {"warmup": 0, "settle": False, "samples": False, "listener": AutoStep}
    with warnings.catch_warnings(record=True) as warned, xsp.profile("p", out=tmp_path / "run", **options) as prof:
        warnings.simplefilter("always")
        for _ in range(6):
            found.append([[each.tolist() for each in model(given).unbind()] for given in inputs])
        traced = torch.jit.trace(model, parts[0])
    assert found == [expected] * 6
    assert traced(parts[1]).tolist() == model(parts[1]).tolist()
    assert not [each for each in warned if issubclass(each.category, torch.jit.TracerWarning)]
    assert (prof.steps_lost, prof.steps_stored > 9) == (0, True)
    trace = xsp.load(tmp_path / "run")
    assert trace.run["finished"] is True
    assert {note["source"] for note in trace.run["notes"]} <= {"onednn"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_path_that_is_no_text_holds_a_run_as_others_do(tmp_path, capsys):
    run = tmp_path / "d\udce9" / "r\udce9un"
    with xsp.profile("p", out=run) as prof:
        for _ in range(prof.schedule.steps_for(repeats=1)):
            with prof.step():
                nn.Linear(2, 2)(torch.ones(1, 2))
    assert capsys.readouterr().err == ""
    assert xsp.load(run).run.steps.lost == 0
    copied = tmp_path / "m\udce9.parquet"
    copied.write_bytes((run / "merged.parquet").read_bytes())
    before = len(os.listdir("/proc/self/fd"))
    for place in (run, copied):
        assert xsp.load(place).sql("SELECT count(*) > 0 FROM spans WHERE kind = 'forward'").fetchall() == [(True,)]
        assert cli.main(["analyze", str(place), "A2", "--format", "parquet", "--out", str(tmp_path / "t\udce9")]) == 0
        assert cli.main(["report", str(place), "--out", str(tmp_path / "p\udce9.html")]) == 0
        assert cli.main(["export", str(place), "--format", "chrome", "--out", str(tmp_path / "c\udce9.json")]) == 0
    assert cli.main(["export", str(run), "--to", str(tmp_path / "o\udce9.jsonl")]) == 0
    assert cli.main(["import", str(tmp_path / "c\udce9.json"), "--out", str(tmp_path / "i\udce9")]) == 0
    assert cli.main(["compare", str(run), str(run)]) == 0
    assert len(os.listdir("/proc/self/fd")) < before + 20


@pytest.mark.slow
def test_names_of_threads_hosts_services_and_types_may_be_no_text(tmp_path, monkeypatch):
    monkeypatch.setattr(threading.current_thread(), "name", "t\udce9")
    monkeypatch.setattr(socket, "gethostname", lambda: "h\udce9")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "s\udce9")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "a=\udce9,service.namespace=n\udce9")
    monkeypatch.setattr(nn.Linear, "__module__", "m\udce9")
    with xsp.profile("p", out=tmp_path / "run", samples=False) as prof:
        for _ in range(prof.schedule.steps_for(repeats=1)):
            with prof.step():
                nn.Sequential(nn.Linear(2, 2))(torch.ones(1, 2))
    assert xsp.load(tmp_path / "run").run.steps.lost == 0
    assert cli.main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "o.jsonl"), "--service", "s\udce9"]) == 0
    assert cli.main(["report", str(tmp_path / "run")]) == 0


def left_out(tmp_path, **wrong):
    """Return the run of a program with a collector that is wrong in a way, beside one that is right."""
    fitting = Span(level=Level.LAYER, kind="module", name="x", start_ns=time.perf_counter_ns(), collector="wrong")

    class Wrong(Collector):
        name = "wrong"
        levels = (Level.LAYER,)

        def spans(self):
            return [fitting._replace(**wrong)]

    trace = record(tmp_path / "run", lambda: nn.Linear(2, 2)(torch.ones(1, 2)), collectors=[Wrong(), "modules"])
    assert trace.run["collectors"] == ["modules"]
    assert trace.run["steps"]["lost"] == 0
    assert trace.sql("SELECT count(*) > 0 FROM spans WHERE kind = 'module'").fetchall() == [(True,)]
    assert trace.sql("SELECT sum(steps) FROM loop").fetchall() == [(trace.run["steps"]["seen"],)]
    return trace.run


@pytest.mark.parametrize(
    "wrong",
    [
        {"thread": "one"}, deep({"start_ns": "now"}), deep({"name": None}), deep({"flops": object()}),
        deep({"stream": 1 << 70}), deep({"dur_ns": 0.5}),
    ],
    ids=["thread", "start_ns", "name", "flops", "stream", "dur_ns"],
)  # fmt: skip
def test_a_collector_whose_spans_hold_what_no_column_does_loses_its_rows_and_no_step(tmp_path, wrong):
    run = left_out(tmp_path, **wrong)
    assert [note["text"] for note in run["notes"] if note["source"] == "wrong" and "left out" in note["text"]]


def test_a_search_for_cycles_does_not_go_through_the_spans_that_are_taken(tmp_path):
    class Many(Collector):
        name = "many"
        levels = (Level.LAYER,)

        def spans(self):
            assert not gc.isenabled()
            return [Span(level=Level.LAYER, kind="module", name="x", collector=self.name)]

    trace = record(tmp_path / "run", lambda: None, levels="M/L", collectors=[Many()])
    assert trace.run["collectors"] == ["many"]
    assert gc.isenabled()


@pytest.mark.parametrize("seen", [[1], deep("spans"), None, deep(5)])
def test_a_collector_that_hands_over_no_spans_is_left_out(tmp_path, seen):
    class Wrong(Collector):
        name = "wrong"
        levels = (Level.LAYER,)

        def spans(self):
            return seen

    trace = record(tmp_path / "run", lambda: None, levels="M/L", collectors=[Wrong()])
    assert trace.run["steps"]["lost"] == 0
    assert "left out" in str(trace.run["notes"])


PLUGINS = {
    "raises_made": "class Made:\n    def __init__(self): raise RuntimeError('no luck')",
    "raises_asked": "from xsp.collector import Collector, Level\nclass Made(Collector):\n    name, levels = 'x', "
    "(Level.LAYER,)\n    def available(self): raise RuntimeError('no luck')",
    "no_levels": "from xsp.collector import Collector\nclass Made(Collector):\n    name = 'x'",
    "exits_imported": "import sys\nsys.exit('no luck')",
    "exits_asked": "from xsp.collector import Collector, Level\nclass Made(Collector):\n    name, levels = 'x', "
    "(Level.LAYER,)\n    def spans(self): raise SystemExit('no luck')",
    "none": "class Made:\n    pass",
}


@pytest.mark.slow
def test_no_broken_plugin_ends_a_program_that_is_profiled(tmp_path):
    site = tmp_path / "site"
    (site / "broken-1.dist-info").mkdir(parents=True)
    (site / "broken-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    points = ["[xsp.collectors]", *(f"{name} = {name}_plugin:Made" for name in PLUGINS)]
    points += ["[xsp.importers]", "raises = raises_plugin:Made"]
    (site / "broken-1.dist-info" / "entry_points.txt").write_text("\n".join(points))
    for name, text in PLUGINS.items():
        (site / f"{name}_plugin.py").write_text(text)
    importer = (
        "class Made:\n    name = 'raises'\n    def read(self, source): return None\n"
        "    def recognises(self, head, source): raise RuntimeError('no luck')\n"
    )
    (site / "raises_plugin.py").write_text(importer)
    (tmp_path / "train.py").write_text(
        "import torch\nmodel = torch.nn.Linear(2, 2)\nfor _ in range(60): model(torch.ones(1, 2))\nprint('done')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "xsp.cli", "run", "--quiet", "--out", "run", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    run = xsp.load(tmp_path / "run").run
    assert "modules" in run["collectors"]
    said = {**run["absent"], **{note["source"]: note["text"] for note in run["notes"]}}
    assert set(PLUGINS) - {"exits_asked"} <= said.keys()
    assert "no luck" in str([note for note in run["notes"] if note["source"] == "x"])
    doctor = subprocess.run(
        [sys.executable, "-m", "xsp.cli", "doctor"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in doctor.stderr
    assert "no luck" in doctor.stdout
    (tmp_path / "strange.bin").write_bytes(b"strange")
    loaded = subprocess.run(
        [sys.executable, "-m", "xsp.cli", "import", "strange.bin", "-o", "x"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "importer 'raises' cannot be used: RuntimeError: no luck" in loaded.stderr


def test_a_program_whose_few_steps_settled_is_told_so(tmp_path, capsys):
    with xsp.profile("p", out=tmp_path / "run", warmup=0, samples=False) as prof, prof.step():
        pass
    assert "1 ran, so short that all of them passed before one could be recorded" in capsys.readouterr().err


@pytest.mark.parametrize(("enabled", "said"), [(True, 1), (False, 0)])
def test_a_block_that_was_not_entered_says_so_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], enabled: bool, said: int
) -> None:
    prof = xsp.profile("forgotten", out=tmp_path / "run", enabled=enabled)
    for _ in range(3):
        with prof.step():
            pass
    assert capsys.readouterr().err.count("'forgotten' was not entered; write `with xsp.profile") == said
    assert not (tmp_path / "run").exists()


class Interrupted(Collector):
    """Raises a signal once, where it is told to, and has a span of each step."""

    name, levels = "interrupted", (Level.MODEL,)

    def __init__(self, where: str) -> None:
        self.where, self.is_armed, self.on = where, False, False
        self._seen: list[Span] = []
        self._began_ns = self._steps = 0

    def _reach(self, place: str) -> None:
        if self.is_armed and place == self.where:
            self.is_armed = False
            signal.raise_signal(signal.SIGUSR1)
            for _ in range(1000):  # the handler runs between two of its turns at the latest
                pass

    def start(self, rung: Level, describe: bool) -> None:
        self._reach("start")
        self.on, self._began_ns = True, time.perf_counter_ns()

    def settle(self) -> None:
        self._reach("settle")

    def stop(self) -> None:
        self._reach("stop")
        if self.on:
            span = Span(level=Level.MODEL, kind="forward", name=f"work {self._steps}", start_ns=self._began_ns,
                        dur_ns=1, collector=self.name)  # fmt: skip
            self._seen.append(span)
            self._steps += 1
        self.on = False

    def spans(self) -> list[Span]:
        self._reach("spans")
        seen, self._seen = self._seen, []
        return seen


@pytest.fixture
def alarmed():
    """Handlers of two signals that raise, as those of a program with a time limit do."""

    def raise_it(*_):
        raise TimeoutError("the batch took too long")

    numbers = (signal.SIGUSR1, signal.SIGALRM)
    before = [signal.signal(number, raise_it) for number in numbers]
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("where", ["start", deep("settle"), deep("stop"), "spans"])
def test_what_a_signal_handler_raises_in_xsp_reaches_the_program_and_costs_one_step(tmp_path, alarmed, where):
    collector = Interrupted(where)
    with xsp.profile(
        "p", out=tmp_path / "run", levels="M", warmup=0, settle=False, samples=False, collectors=[collector]
    ) as prof:
        with prof.step():
            pass
        collector.is_armed = where == "start"
        with pytest.raises(TimeoutError, match="took too long"), prof.step():
            collector.is_armed = True
        assert not collector.on
        with prof.step():
            pass
    trace = xsp.load(tmp_path / "run")
    assert (prof.steps_stored, prof.steps_lost) == (2, int(where != "start"))
    assert trace.run.collectors == ("interrupted",), "it is not at fault"
    assert trace.sql("SELECT count(*) FROM spans WHERE kind = 'forward' GROUP BY step").fetchall() == [(1,), (1,)]
    told = [note["text"] for note in trace.run["notes"]]
    assert any("TimeoutError came while a step was stored" in text for text in told) == (where != "start")


def test_an_alarm_while_a_step_is_stored_reaches_the_program_and_the_next_step_is_stored(tmp_path, alarmed):
    with xsp.profile(
        "p", out=tmp_path / "run", levels="M", warmup=0, settle=False, samples=False, collectors=[]
    ) as prof:
        with prof.step():
            pass
        os.kill(prof._writer.process, signal.SIGSTOP)
        try:
            with pytest.raises(TimeoutError, match="took too long"), prof.step():
                signal.setitimer(signal.ITIMER_REAL, 0.3)
        finally:
            os.kill(prof._writer.process, signal.SIGCONT)
        assert not prof._writer.is_gone, "the program ran out of time, not the process that stores"
        with prof.step():
            pass
    assert (prof.steps_stored, prof.steps_lost, prof._writer.failure) == (2, 1, None)


def test_work_beside_the_finish_runs_once_and_its_failure_costs_nothing(tmp_path):
    calls = []

    def work(ended_ns):
        assert 0 < ended_ns < time.perf_counter_ns()
        calls.append(threading.current_thread())
        raise RuntimeError("lost")

    for steps in (0, 3):
        prof = xsp.profile("beside", levels="M", out=tmp_path / str(steps), warmup=0)
        prof.while_finishing = work
        with prof:
            for _ in range(steps):
                with prof.step():
                    pass
    assert len(calls) == 1, "a run without steps has no screen"
    assert calls[0] is not threading.current_thread()
    assert not calls[0].is_alive()
    assert xsp.load(tmp_path / "3").run.finished
