"""Programs as users write them, under `xsp run`: its steps are theirs, and its figures are held against their own."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import xsp
from xsp import account
from xsp.account import entries as names
from xsp.health import grade, health

PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True)
class Case:
    """A program, and which of its laps are steps of training."""

    command: str
    training: tuple[str, ...] = ()
    kinds: int = 1
    """Kinds of steps that are to be told apart, at least."""

    batch: int | None = None
    """Samples of a step of the kind that has the most steps; None where even a reader could argue."""

    needs: str | None = None
    learned: int = 0
    """Steps that may be counted otherwise at the start: what belongs to a step is learned from what is repeated."""


CASES = [
    Case("nanogpt.py", ("training",), 2, batch=8),
    Case("nanogpt.py --micro-batches 4 --eval-interval 0", ("training",), 1, batch=16),
    Case("hf_trainer.py --evaluate", ("training",), 2, batch=8, needs="accelerate"),
    Case("lightning_automatic.py", ("training",), 2, batch=16, needs="pytorch_lightning"),
    Case("lightning_automatic.py --micro-batches 2", ("training",), 2, batch=32, needs="pytorch_lightning"),
    Case("lightning_manual.py", ("discriminator", "generator"), 2, needs="pytorch_lightning"),
    Case("generate.py", (), 2, batch=1, needs="transformers"),
    Case("gan.py", ("discriminator", "generator"), 2),
    Case("gan.py --critics 3", ("discriminator", "generator"), 2),
    Case("siamese.py", ("training",), batch=32),
    Case("siamese.py --towers 3", ("training",), batch=32),
    Case("distillation.py", ("training",), batch=32, learned=3),
    Case("distillation.py --student-first", ("training",), batch=32),
    Case("byol.py", ("training",), batch=32),
    Case("two_optimizers.py", ("training",), batch=32, learned=3),
    Case("lbfgs.py", ("training",), batch=64),
    Case("amp.py", ("training",), batch=32),
    Case("data_bound.py", ("training",), batch=8),
    Case("data_bound.py --workers 2", ("training",), batch=8),
    Case("data_bound.py --inference", (), batch=8),
    Case("two_models.py", (), 2, batch=16),
    Case("in_turn.py layers", (), learned=80, batch=16),
    Case("in_turn.py experts", (), learned=40, batch=16),
    Case("epochs.py", ("training",), 2, batch=32),
    Case("rnn.py", ("training",), batch=8),
    Case("rnn.py --inference", (), batch=8),
    Case("early_break.py", ("training",), batch=16),
    Case("drift.py", tuple(f"quarter {number}" for number in range(4)), batch=32),
    Case("rl.py", ("training",), 2),
    Case("rl.py --rollout 130 --updates 1", ("training",), 2),
    Case("forgot_eval.py", (), batch=16),
    Case("checkpointing.py", ("training",), batch=16),
    Case("checkpointing.py --reentrant", ("training",), batch=16),
    Case("hooked_optimizer.py", ("training",), batch=16),
    Case("hooked_optimizer.py --one", ("training",), batch=16),
    Case("hooked_optimizer.py --micro-batches 3", ("training",), batch=48),
    Case("hooked_optimizer.py --one --micro-batches 2", ("training",), batch=32),
    Case("hooked_optimizer.py --losses 2", ("training",)),
    Case("hooked_optimizer.py --joint", ("training",), learned=2),
    Case("hooked_optimizer.py --adversarial", ("training", "other"), 2, batch=16),
    Case("hooked_optimizer.py --checkpoint other", ("training",), batch=16),
    Case("hooked_optimizer.py --checkpoint reentrant", ("training",), batch=16),
    Case("hooked_optimizer.py --dense", ("training",), batch=16, learned=3),
    Case("compiled.py", ("training",), batch=16, needs="g++"),
    Case("compiled.py --inference", (), batch=16, needs="g++"),
    Case("chatty.py --lines 5", ("training",), batch=32),
    Case("chatty.py --bar", ("training",), batch=32, needs="tqdm"),
    Case("short_steps.py", (), batch=4),
    Case("short_steps.py --train", ("training",), batch=4),
    Case("big_embedding.py", ("training",), batch=64),
    Case("large_activations.py", ("training",), batch=8),
]


@dataclass(frozen=True)
class Profiled:
    """A program that ran under xsp."""

    said: dict[str, Any]
    """By the program itself, in its last line."""

    trace: xsp.Trace
    code: int
    stdout: str
    stderr: str

    @property
    def kinds(self) -> list[dict[str, Any]]:
        return list(self.trace.run["kinds"])


def call(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, timeout=600)


def bare(command: str, folder: Path) -> dict[str, Any]:
    """Return what a program says of itself, without xsp."""
    program, *arguments = command.split()
    done = call([sys.executable, str(PROGRAMS / program), *arguments], folder)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def run(command: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    program, *arguments = command.split()
    own = [sys.executable, "-m", "xsp.cli", "run", "--out", str(folder / "run"), *options]
    return call([*own, str(PROGRAMS / program), *arguments], folder)


def profiled(command: str, folder: Path, *options: str) -> Profiled:
    done = run(command, folder, "--quiet", *options)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    return Profiled(said, xsp.load(folder / "run"), done.returncode, done.stdout, done.stderr)


def skip_without(needed: str | None) -> None:
    if needed == "g++" and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    if needed not in (None, "g++") and importlib.util.find_spec(str(needed)) is None:
        pytest.skip(f"{needed} is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.command)
def test_the_steps_of_an_ordinary_program_are_those_that_its_user_counts(case: Case, tmp_path: Path) -> None:
    skip_without(case.needs)
    found = profiled(case.command, tmp_path)
    laps = Counter[bool]()
    for name, lap in found.said["kinds"].items():
        laps[name in case.training] += lap["laps"]
    steps = Counter[bool]()
    for kind in found.kinds:
        steps[kind["training"]] += kind["steps"]
    # A model that is left in training mode is known not to be trained only once its calls have shown it; what a
    # `break` leaves after its last forward pass is no step of training, and may be one that did not end.
    slack = 2 if case.command.startswith("forgot_eval") else int(case.command.startswith("early_break"))
    assert steps[True] == pytest.approx(laps[True], abs=case.learned), found.kinds
    assert steps[False] == pytest.approx(laps[False], abs=slack + case.learned), found.kinds
    in_loop = found.trace.sql("SELECT sum(steps) FROM loop").fetchall()[0][0]
    assert in_loop == pytest.approx(sum(laps.values()), abs=slack + case.learned)
    assert len(found.kinds) >= case.kinds
    if case.batch is not None:
        most = max(found.kinds, key=lambda kind: kind["steps"])
        assert most["batch_size"] == case.batch, most
    recorded = {row[0] for row in found.trace.sql("SELECT DISTINCT kind FROM loop WHERE rung > 10").fetchall()}
    often = {kind["kind"] for kind in found.kinds if kind["steps"] >= 30}
    assert often <= recorded, "of a kind with many steps none was recorded"
    assert not found.stderr.count("Traceback"), found.stderr


@pytest.mark.parametrize("command", ["gan.py", "siamese.py", "epochs.py"])
def test_a_program_computes_the_same_under_xsp(command: str, tmp_path: Path) -> None:
    plain, found = bare(command, tmp_path), profiled(command, tmp_path)
    assert found.said["loss"] == plain["loss"]


@pytest.mark.parametrize("every", ["1", "2", "10"])
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_wait_for_data_belongs_to_the_step_that_uses_its_batch(every: str, workers: str, tmp_path: Path) -> None:
    found = profiled(f"data_bound.py --workers {workers}", tmp_path, "--every", every)
    (lap,) = found.said["kinds"].values()
    waits = [row[0] / 1e6 for row in found.trace.sql("SELECT data_ns FROM loop").fetchall()][1:]
    assert statistics.median(waits) == pytest.approx(lap["data_ms"], rel=0.5, abs=5)
    merged = found.trace.sql(
        "SELECT coalesce(sum(true_ns), 0) / 1e6 FROM merged WHERE kind = 'data' AND level = 20"
    ).fetchall()[0][0]
    # Waits of several steps added up would be longer than the longest wait, however busy the machine is.
    assert merged <= max(waits) * 1.01 + 0.1, waits
    if workers == "0":
        assert merged > 20


@pytest.mark.parametrize("options", ["", "--inference"])
def test_modules_that_a_loader_calls_are_part_of_the_wait(options: str, tmp_path: Path) -> None:
    found = profiled(f"data_bound.py --transform {options}", tmp_path)
    assert [kind["steps"] for kind in found.kinds] == [found.said["calls"]]
    host = account.of(found.trace).job.host
    assert not [entry.name for entry in host.entries if "Transform" in entry.name]
    lap = found.said["kinds"]["inference" if options else "training"]
    assert host.ms(names.DATA) == pytest.approx(lap["data_ms"], rel=0.3)
    assert found.trace.sql("SELECT count(*) FROM spans WHERE type = 'Transform'").fetchall() == [(0,)]


def test_a_loop_that_waits_for_its_data_is_said_to(tmp_path: Path) -> None:
    """The loader takes 80 ms and a step 1 ms, so that no load of the machine turns that around."""
    found = profiled("data_bound.py --load-ms 80 --iterations 80", tmp_path)
    assert any("data" in finding.text for finding in health(found.trace) if finding.severity != "good")
    assert grade(health(found.trace)).letter != "A"
    a1 = xsp.analyses.A1(found.trace).df()
    latency, rate = a1["latency_ms"][0], a1["loop_samples_per_s"][0]
    lap = found.said["kinds"]["training"]
    assert latency < lap["lap_ms"] / 2
    assert 0.5 * 8e3 / lap["lap_ms"] < rate < 8e3 / 80, "no loop is faster than its loader"


def test_a_program_of_several_kinds_has_figures_of_each(tmp_path: Path) -> None:
    profiled("two_models.py --iterations 400", tmp_path)
    latencies = []
    for kind in xsp.load(tmp_path / "run").run["kinds"]:
        trace = xsp.load(tmp_path / "run", kind=kind["kind"])
        assert trace.kind == kind["kind"]
        latencies.append(trace.sql("SELECT true_ns FROM merged WHERE level = 20 AND kind = 'step'").fetchall()[0][0])
    assert max(latencies) > 1.5 * min(latencies)


@pytest.mark.parametrize("how", ["overlap", "turns", "async", "models", "evaluation", "training", "inside"])
def test_calls_of_several_threads_are_all_counted_and_their_throughput_is_that_of_all(how: str, tmp_path: Path) -> None:
    found = profiled(f"threads.py {how}", tmp_path)
    steps = {kind["name"]: kind["steps"] for kind in found.kinds if "alone" not in kind["name"]}
    assert sorted(steps.values()) == sorted(found.said["calls"].values())
    rates = xsp.analyses.loop(found.trace).df().set_index("steps")["samples_per_s"]
    assert rates[160] == pytest.approx(8 * found.said["per_s"]["a"], rel=0.5)
    if how in ("overlap", "async"):
        assert rates[160] > 2.5 * 8 / found.said["call_s"], "four threads make calls at once, on however slow a machine"


@pytest.mark.parametrize("what", ["layers", "experts"])
def test_modules_that_are_called_in_turn_are_one_step(what: str, tmp_path: Path) -> None:
    found = profiled(f"in_turn.py {what}", tmp_path)
    most = max(found.kinds, key=lambda kind: kind["steps"])
    assert 74 <= most["steps"] <= 77, "three passes are single calls until the order is known"
    rows = xsp.analyses.loop(found.trace).df()
    row = rows[rows["kind"] == most["kind"]].iloc[0]
    assert row["recorded"] > 0
    assert row["percent_of_loop"] > 85
    assert row["iteration_ms"] == pytest.approx(found.said["kinds"]["iteration"]["lap_ms"], rel=0.4)
    assert found.trace.run.steps.found


@pytest.mark.parametrize("what", ["routed", "random"])
def test_where_modules_are_called_in_an_order_that_does_not_repeat_no_step_is_found(what: str, tmp_path: Path) -> None:
    found = profiled(f"in_turn.py {what}", tmp_path)
    assert not found.trace.run.steps.found
    assert any(
        "steps could not be found" in note["text"] and "--step" in note["text"] for note in found.trace.run.notes
    )


def test_a_program_that_becomes_slower_does_not_get_the_best_grade(tmp_path: Path) -> None:
    found = profiled("drift.py --iterations 900", tmp_path)
    assert grade(health(found.trace)).letter != "A"


@pytest.mark.parametrize("options", ["", "--train", "--train --by-hand"])
def test_short_steps_that_are_found_at_signals_are_counted_though_they_pass_unseen(
    options: str, tmp_path: Path
) -> None:
    found = profiled(f"short_steps.py --iterations 4000 {options}", tmp_path)
    assert sum(kind["steps"] for kind in found.kinds) == pytest.approx(4000, abs=6 if "--by-hand" in options else 0)
    ((most,),) = found.trace.sql("SELECT max(steps) FROM loop WHERE steady").fetchall()
    assert most > 1


def test_few_steps_without_an_optimizer_are_found(tmp_path: Path) -> None:
    found = profiled("short_steps.py --iterations 24 --train --by-hand", tmp_path)
    assert sum(kind["steps"] for kind in found.kinds) >= 18
    assert any("trains without a torch optimizer" in note["text"] for note in found.trace.run.notes)


@pytest.mark.slow
def test_a_short_program_has_a_step_of_each_level_down_to_operators(tmp_path: Path) -> None:
    found = profiled("short_steps.py --iterations 150 --train", tmp_path)
    rungs = {rung for (rung,) in found.trace.sql("SELECT DISTINCT rung FROM loop WHERE rung > 10").fetchall()}
    assert {20, 30, 40} <= rungs


def test_a_bare_step_at_the_end_of_an_iteration_is_a_step(tmp_path: Path) -> None:
    done = call([sys.executable, str(PROGRAMS / "bare_step.py"), "--out", str(tmp_path / "run")], tmp_path)
    assert done.returncode == 0, done.stderr
    trace = xsp.load(tmp_path / "run")
    assert sum(kind["steps"] for kind in trace.run["kinds"]) == pytest.approx(
        120, abs=2
    )  # the first is the third iteration
    assert all(kind["training"] for kind in trace.run["kinds"])


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--quiet",)])
@pytest.mark.parametrize("command", ["no_module.py", "in_children.py", "in_children.py --start fork"])
def test_an_empty_profile_says_at_its_end_why(command: str, options: tuple[str, ...], tmp_path: Path) -> None:
    done = run(command, tmp_path, *options)
    assert done.returncode == 0, done.stderr
    said = done.stderr.lower()
    assert "no step" in said
    assert ("process" if "children" in command else "--step") in said
    assert "Traceback" not in done.stderr


def test_a_profile_without_a_step_says_that_prof_step_was_not_called(tmp_path: Path) -> None:
    done = call([sys.executable, str(PROGRAMS / "bare_step.py"), "--never", "--out", str(tmp_path / "run")], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step()" in done.stderr


@pytest.mark.parametrize("micro", ["1", "3"])
def test_ranks_have_the_steps_of_their_optimizer(micro: str, tmp_path: Path) -> None:
    own = [sys.executable, "-m", "xsp.cli", "run", "--quiet", "--out", str(tmp_path / "run"), "torchrun"]
    program = [str(PROGRAMS / "ddp.py"), "--iterations", "60", "--micro-batches", micro]
    done = call([*own, "--nproc-per-node", "2", *program], tmp_path)
    assert done.returncode == 0, done.stderr
    trace = xsp.load(tmp_path / "run")
    steps = trace.sql("SELECT rank, sum(steps) FROM loop GROUP BY rank ORDER BY rank").fetchall()
    assert steps == [(0, 60), (1, 60)]
    assert {kind["batch_size"] for kind in trace.run["kinds"]} == {8 * int(micro)}
    assert all(kind["training"] for kind in trace.run["kinds"])


def test_skipped_optimizer_steps_of_a_scaler_are_steps_as_the_others(tmp_path: Path) -> None:
    found = profiled("amp.py --overflow", tmp_path)
    assert found.said["optimizer_steps"] < found.said["calls"]
    assert sum(kind["steps"] for kind in found.kinds) == found.said["calls"]
    most = max(found.kinds, key=lambda kind: kind["steps"])
    assert (most["training"], most["batch_size"]) == (True, 32)


def test_blocks_that_are_called_again_in_the_backward_pass_are_no_steps(tmp_path: Path) -> None:
    found = profiled("checkpointing.py --bare-blocks", tmp_path)
    assert sum(kind["steps"] for kind in found.kinds if kind["training"]) == 100
    assert sum(kind["steps"] for kind in found.kinds if not kind["training"]) == 0
