"""Two runs side by side: input, question, answer; and two real ones, of which one has a slow layer."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

import xsp
from xsp import table
from xsp.cli import compare as cli_compare
from xsp.cli import main
from xsp.comparison import Comparison, causes, comparable, compare, rows
from xsp.comparison.align import align, common_subsequence
from xsp.comparison.conclusion import conclusion
from xsp.comparison.evidence import RUNS, STEPS
from xsp.comparison.series import RowTimes
from xsp.errors import AnalysisError, UsageError
from xsp.report.comparison import markdown
from xsp.schema import LOOP_COLUMNS, Span
from xsp.store import iterations
from xsp.store.trace import Trace
from xsp.testing import spans, trace_of

NOISE = (0, 3, -2, 1, -1, 2)


def run(text: str, conv: float = 100, repeats: int = 6, name: str = "hand", noise: Sequence[float] = NOISE) -> Trace:
    """Return a run of steps in which the layer `conv` takes about so many microseconds."""
    rows = []
    for step in range(repeats):
        end = 10 + conv + noise[step % len(noise)]
        rows += one_after_the_other(step, text.format(end=end, fc=end + 50, done=end + 60))
    return trace_of(rows, {"name": name})


def one_after_the_other(step: int, text: str) -> list[Span]:
    """Return the spans of a step that begins where no other one goes on, with launches of its own."""
    result = spans(text, step=step, rung=70, timed=True)
    later = step * (max(entry.start_ns + entry.dur_ns for entry in result) + 50_000)
    return [
        entry._replace(
            start_ns=entry.start_ns + later,
            correlation_id=None if entry.correlation_id is None else 1000 * step + entry.correlation_id,
        )
        for entry in result
    ]


NET = """
    step predict     0-{done}
    module net       5-{fc} type=Net
    module conv      10-{end} type=Conv2d
    op aten::conv2d  10-{end}
    module fc        {end}-{fc} type=Linear
"""


def verdicts(found: Comparison, section: str) -> dict[str, str]:
    return {row.name: row.verdict for row in found.section(section)}


@pytest.mark.slow
def test_the_layer_that_became_slower_is_named_and_its_container_is_not() -> None:
    result = compare(run(NET), run(NET, conv=150))
    assert result.step.verdict == "slower"
    assert verdicts(result, "layer") == {
        "net": "no evidence of change",
        "conv": "slower",
        "fc": "no evidence of change",
    }
    conv = result.section("layer")[1]
    assert (conv.aligned, conv.a_ms, conv.b_ms) == ("key", pytest.approx(0.1, rel=0.01), pytest.approx(0.15, rel=0.01))
    assert conv.change_percent == pytest.approx(50, abs=1)
    assert conv.low_percent is not None
    assert conv.high_percent is not None
    assert conv.low_percent < 50 < conv.high_percent
    assert verdicts(result, "operator") == {"aten::conv2d": "slower"}
    assert verdicts(compare(run(NET, conv=150), run(NET)), "layer")["conv"] == "faster"


def test_the_same_twice_is_no_evidence_of_change() -> None:
    result = compare(run(NET), run(NET, noise=(1, -2, 3, 0, 2, -1)))
    assert {row.verdict for row in result.rows if row.section != "phase"} == {"no evidence of change"}
    assert result.step.detectable_percent is not None
    assert 25 < result.step.detectable_percent < 30  # of one run a side, what two starts may differ by is in it


@pytest.mark.slow
def test_without_repeats_it_cannot_tell() -> None:
    result = compare(run(NET, repeats=1), run(NET, conv=150, repeats=1))
    assert result.step.verdict == "cannot tell (no repeats)"
    assert result.step.change_ms == pytest.approx(0.05)
    assert result.step.low_ms is None
    assert compare(run(NET, repeats=2), run(NET)).step.verdict == "cannot tell (too few repeats)"


def test_layers_that_came_went_and_were_renamed() -> None:
    other = NET.replace("module fc ", "module relu {fc}-{done} type=ReLU\n    module head ").replace("conv2d", "conv9")
    result = compare(run(NET), run(other))
    assert [(row.name, row.type, row.aligned, row.verdict) for row in result.section("layer")] == [
        ("net", "Net", "key", "no evidence of change"),
        ("conv", "Conv2d", "key", "no evidence of change"),
        ("fc → head", "Linear", "type", "no evidence of change"),
        ("relu", "ReLU", None, "only in B"),
    ]
    assert verdicts(result, "operator") == {"aten::conv2d": "only in A", "aten::conv9": "only in B"}


def test_what_differs_beside_the_times_comes_first() -> None:
    a, b = run(NET), run(NET, repeats=4)
    a.run |= {"machine": {"cores": 2, "packages": {"torch": "2.1"}}}
    b.run |= {"machine": {"cores": 8}}
    assert [tuple(entry) for entry in compare(a, b).differences] == [
        ("timed steps", "6", "4"),
        ("cores", "2", "8"),
        ("torch", "2.1", "not known"),
    ]


def test_training_and_prediction_are_not_judged_against_each_other() -> None:
    train = NET + "    backward backward {fc}-{done}\n"
    result = compare(run(NET), run(train))
    assert result.step.verdict == "cannot tell (the steps do different work)"
    assert verdicts(result, "call") == {"backward backward": "only in B"}


def test_what_has_nothing_in_common_or_holds_no_step_is_refused() -> None:
    with pytest.raises(AnalysisError, match="nothing to compare"):
        compare(run(NET), run("step x 0-{done}\nmodule a 10-{end} type=A\nop b 10-{end}"))
    with pytest.raises(AnalysisError, match="holds no step"):
        compare(run(NET), trace_of([]))


def test_device_work_is_compared_by_layer_and_by_name() -> None:
    text = """
        step predict             0-300
        module fc                10-60 type=Linear
        op aten::mm              20-50
        launch cudaLaunchKernel  25-30 correlation_id=1
        kernel gemm              60-{end} correlation_id=1
    """
    result = compare(run(text), run(text, conv=140))
    assert verdicts(result, "layer") == {"fc": "no evidence of change"}
    assert verdicts(result, "layer on device") == {"fc": "slower"}
    assert verdicts(result, "kernel") == {"gemm": "slower"}
    assert result.section("kernel")[0].a_calls == 1


# --- several runs a side ----------------------------------------------------------------------------------


def starts(*convs: float, text: str = NET) -> list[Trace]:
    """Return runs of one program, in which the layer `conv` takes a little more or less with each start."""
    return [run(text, conv=conv) for conv in convs]


@pytest.mark.slow
def test_a_difference_between_two_runs_is_not_one_between_programs() -> None:
    result = compare(run(NET), run(NET, conv=115))
    assert result.step.verdict == "slower here"
    assert verdicts(result, "layer")["conv"] == "slower here"
    assert not result.slower_by(5)
    assert verdicts(compare(run(NET, conv=115), run(NET)), "layer")["conv"] == "faster here"
    assert "cannot be separated" in " ".join(conclusion(result))


@pytest.mark.slow
def test_what_differs_between_runs_of_one_program_is_in_the_interval_of_several() -> None:
    a, b = starts(100, 115, 92), starts(112, 96, 104)
    assert {row.verdict for row in compare(a, b).rows} == {"no evidence of change"}
    assert compare(a[0], b[0]).step.verdict == "slower here"
    result = compare(starts(100, 103, 98), starts(149, 153, 150))
    assert result.step.verdict == "slower"
    assert verdicts(result, "layer") == {
        "net": "no evidence of change",
        "conv": "slower",
        "fc": "no evidence of change",
    }
    assert verdicts(result, "operator") == {"aten::conv2d": "slower"}
    conv = result.section("layer")[1]
    assert (conv.a_runs, conv.b_runs, conv.a_steps) == (3, 3, 18)
    assert conv.a_between_percent == pytest.approx(2.5, abs=0.2)
    assert conv.detectable_percent is not None
    assert 2 < conv.detectable_percent < 15


@pytest.mark.slow
def test_one_new_run_is_held_against_many_old_ones() -> None:
    old = starts(100, 103, 98, 101, 97)
    assert compare(old, run(NET, conv=103)).step.verdict == "no evidence of change"
    assert compare(old, run(NET, conv=140)).step.verdict == "slower"
    assert compare(old, [run(NET, conv=70)]).step.verdict == "faster"


@pytest.mark.slow
def test_a_layer_that_one_run_lacks_has_figures_of_the_others() -> None:
    without = NET.replace("    op aten::conv2d  10-{end}\n", "").replace("module fc ", "module head ")
    result = compare([*starts(100, 101), run(without)], starts(101, 102, 100))
    assert [(row.name, row.a_runs, row.b_runs) for row in result.section("layer")] == [
        ("net", 3, 3), ("conv", 3, 3), ("fc", 3, 3),
    ]  # fmt: skip
    assert [(row.name, row.a_runs) for row in result.section("operator")] == [("aten::conv2d", 2)]


@pytest.mark.slow
def test_runs_of_two_programs_on_one_side_are_refused_and_so_is_a_side_without_any() -> None:
    other = run("step x 0-{done}\nmodule a 10-{end} type=A\nop b 10-{end}")
    with pytest.raises(AnalysisError, match="a side takes runs of one program"):
        compare([run(NET), other], [run(NET), run(NET)])
    with pytest.raises(UsageError, match="each side needs a run"):
        compare([], run(NET))


@pytest.mark.slow
def test_what_differs_within_a_side_only_is_no_difference_between_the_sides() -> None:
    a, b = starts(100, 101), starts(100, 101)
    for side in (a, b):
        side[0].run |= {"machine": {"cores": 2}}
        side[1].run |= {"machine": {"cores": 4}}
    assert compare(a, b).differences == []
    b[1].run |= {"machine": {"cores": 8}}
    assert [tuple(entry) for entry in compare(a, b).differences] == [("cores", "2 | 4", "2 | 8")]


# --- bare steps -------------------------------------------------------------------------------------------


def with_loop(trace: Trace, dur_us: float, before_us: float = 20, steady: bool = True) -> Trace:
    """Return the run with a loop of bare steps that take about so long."""
    table.create(trace.con, "loop", LOOP_COLUMNS)
    trace.con.execute(
        f"INSERT INTO loop BY NAME SELECT 0 AS rank, k AS step, 1 AS steps, 0 AS kind, "
        f"10 AS rung, {steady} AS steady, k AS start_ns, 1e3 * ({dur_us} + k % 3) AS dur_ns, "
        f"CASE WHEN k > 0 THEN 1e3 * {before_us} END AS before_ns, 0 AS data_ns, 0 AS own_ns, "
        "'ok' AS status, 0 AS beside_ns FROM range(12) t(k)"
    )
    iterations.create_tables(trace.con)
    return trace


@pytest.mark.slow
def test_the_step_is_that_of_bare_steps_where_all_runs_tell_of_them() -> None:
    def sides(b_us: float) -> tuple[list[Trace], list[Trace]]:
        return [with_loop(run(NET), us) for us in (100, 102, 99)], [with_loop(run(NET), us) for us in (b_us, 101, 100)]

    result = compare(*sides(b_us=102))
    assert result.step.a_ms == pytest.approx(0.101, abs=0.002)
    assert result.step.verdict == "no evidence of change"
    a, b = sides(b_us=100)
    result = compare(a, [*b[1:], with_loop(run(NET), 99, steady=False)])
    assert result.step.a_ms == pytest.approx(0.101, abs=0.002)  # bare ones that followed a bare one: a short run's
    assert verdicts(result, "loop") == {"iteration": "no evidence of change"}
    result = compare(a, [*b[1:], run(NET)])
    assert result.step.a_ms == pytest.approx(0.1705)  # one run has no bare ones: of all those that were recorded
    assert result.section("loop") == []


@pytest.mark.slow
def test_what_stands_between_steps_is_compared_too() -> None:
    a = [with_loop(run(NET), us) for us in (100, 102, 99)]
    b = [with_loop(run(NET), us, before_us=400) for us in (101, 100, 99)]
    result = compare(a, b)
    assert result.step.verdict == "no evidence of change"
    assert verdicts(result, "loop") == {"iteration": "slower"}
    assert result.section("loop")[0].b_ms == pytest.approx(0.501, abs=0.003)


@pytest.mark.slow
def test_all_runs_are_compared_by_the_same_kind_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of two kinds takes most of the time may differ from run to run."""

    def two_kinds(place: str, kind: int | None = None, **_: object) -> Trace:
        heaviest = 1 if place == "a1" else 0
        trace = run(NET, name=place)
        trace.run |= {"kinds": [{"kind": 0, "name": "generator"}, {"kind": 1, "name": "critic"}]}
        trace.con.execute(f"UPDATE alike SET step_kind = {heaviest if kind is None else kind}")
        return trace

    monkeypatch.setattr("xsp.ingest.load.load", two_kinds)
    a, b = comparable.load(["a1", "a2"], ["b1", "b2"])
    assert [comparable.kind_name(trace) for trace in (*a, *b)] == ["critic"] * 4
    a, b = comparable.load(["a2", "a1"], ["b1"], kind=0)
    assert [comparable.kind_name(trace) for trace in (*a, *b)] == ["generator"] * 3


# --- what it concludes ------------------------------------------------------------------------------------

TRAINING = """
    step train              0-{done}
    data loader             0-{end}
    forward Net             {end}-{fc} phase=forward
    op aten::mm             {end}-{fc} phase=forward
    launch cudaLaunchKernel {end}-{fc} correlation_id=1
    kernel sgemm            {fc}-{done} correlation_id=1
"""
"""A step whose waiting for data takes so many microseconds."""


@pytest.mark.slow
def test_the_first_sentence_says_the_change_and_what_holds_it() -> None:
    message = conclusion(compare(run(TRAINING, conv=500), run(TRAINING, conv=5)))
    assert message[0].startswith("495 µs less a step (570 → 75.5 µs): waiting for data is gone (510 → 15.5 µs)")
    assert message[1].startswith("The step: B is faster than A, -86.")
    assert "Kernels and copies take about the same (10.0 → 10.0 µs a step)." in message
    assert any(entry.startswith("The device is idle ") for entry in message)
    back = conclusion(compare(run(TRAINING, conv=5), run(TRAINING, conv=500)))
    assert back[0].startswith("495 µs more a step (75.5 → 570 µs): waiting for data is new")


@pytest.mark.slow
def test_a_part_that_changed_for_certain_is_said_of_a_step_that_did_not() -> None:
    """Waiting is gone, and something else varies so much that the step as a whole is not certain."""
    text = TRAINING.replace("0-{done}\n    data", "0-{whole}\n    data")

    def varying(conv: float, others: Sequence[float]) -> Trace:
        rows = []
        for step, other in enumerate(others):
            end = 10 + conv
            times = {"end": end, "fc": end + 50, "done": end + 60, "whole": end + 60 + other}
            rows += one_after_the_other(step, text.format(**times))
        return trace_of(rows, {"name": "hand"})

    a, b = varying(400, [0, 10, -5, 5, 8, 3]), varying(5, [300, 310, 290, 305, 700, 900])
    result = compare(a, b)
    assert result.step.verdict == "no evidence of change"
    message = conclusion(result)
    assert "waiting for data is gone" in message[0]
    assert message[1].startswith("The step: no evidence of change as a whole")
    quiet = conclusion(compare(a, a))
    assert quiet[0].startswith("No evidence of change: a step takes about the same")


@pytest.mark.slow
def test_on_a_device_classes_operators_causes_of_idling_and_launches_are_named() -> None:
    more = (
        TRAINING
        + """
    launch cudaLaunchKernel {fc}-{fc} correlation_id=2
    kernel ncclDevKernel_AllReduce {done}-{done2} correlation_id=2
    """
    )
    texts = TRAINING, more.replace("0-{done}\n", "0-{done2}\n", 1).replace("{done2}", "900")
    result = compare(run(texts[0]), run(texts[1]))
    message = " ".join(conclusion(result))
    assert "communication is new" in message
    assert "The host launches 2 times a step instead of 1." in message
    assert {row.name: row.verdict for row in result.section("kernel class")}["communication"] == "only in B"
    assert [row.name for row in result.section("operator on device")] == ["aten::mm"]
    assert result.section("launch")[0].b_calls == 2


@pytest.mark.slow
def test_of_several_runs_phases_are_tested_too() -> None:
    result = compare([run(TRAINING, conv=us) for us in (500, 505, 498)], [run(TRAINING, conv=us) for us in (5, 6, 4)])
    assert verdicts(result, "phase")["waiting for data"] == "faster"
    assert "waiting for data is gone" in conclusion(result)[0]


@pytest.mark.slow
def test_the_layer_that_changed_most_is_named_where_no_row_of_so_many_can_be_certain() -> None:
    a = [run(MANY, conv=us, repeats=2) for us in (100, 102, 99)]
    b = [run(MANY.replace("Conv2d", "Slow"), conv=us, repeats=2) for us in (900, 1000, 860)]
    result = compare(a, b)
    assert result.step.verdict == "slower"
    assert set(verdicts(result, "layer").values()) == {"no evidence of change"}
    message = "The layer that changed most, on the host: conv (Conv2d → Slow), "
    assert any(
        entry.startswith(message) and entry.endswith("more repeats to be certain.") for entry in conclusion(result)
    )
    assert not any("changed most" in entry for entry in conclusion(compare(a, a)))  # where the step did not change


MANY = NET + "".join(f"    module act{n} {{fc}}-{{fc}} type=ReLU\n" for n in range(30))


def test_a_layer_of_another_type_in_the_same_place_is_one_row_of_memory() -> None:
    taken = NET + "    op aten::addmm   {end}-{fc}\n    alloc alloc      {fc}-{fc} alloc_bytes=1048576\n"
    other = taken.replace("type=Linear", "type=Factored")
    rows = [(row.name, row.type, row.a_mib, row.b_mib) for row in compare(run(taken), run(other)).section("memory")]
    assert ("fc", "Linear → Factored", 1.0, 1.0) in rows
    assert [name for name, *_ in rows].count("fc") == 1


def test_steps_that_do_different_work_are_not_explained() -> None:
    message = conclusion(compare(run(NET), run(NET + "    backward backward {fc}-{done}\n")))
    assert message[0] == "The step: cannot tell (the steps do different work)."


def test_whether_steps_do_the_same_work_is_not_read_from_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rows, "OTHER_WORK", "different work")
    a, b = run(NET), run(NET + "    backward backward {fc}-{done}\n")
    result = compare(a, b)
    assert (result.has_same_work, compare(a, a).has_same_work) == (False, True)
    assert conclusion(result)[0] == "The step: different work."
    assert not result.not_slower_by(1000)
    assert cli_compare._gate(result, 5.0, None) == 3
    assert "undecided whether the step is slower by 5 % or more: different work; A has" in capsys.readouterr().err


def test_times_are_said_in_a_unit_that_fits_and_as_all_that_was_recorded_where_no_step_is_told() -> None:
    assert (causes.both_ms(2, 1), causes.both_ms(0, 0.05), causes.both_ms(2, 0.05)) == (
        "2.00 → 1.00 ms", "0 → 50.0 µs", "2.00 ms → 50.0 µs",
    )  # fmt: skip
    a, b = run(NET.replace("predict", "window"), repeats=1), run(NET.replace("predict", "window"), conv=150, repeats=1)
    assert conclusion(compare(a, b))[0].startswith("50.0 µs more in all that was recorded (170 → 220 µs)")


@pytest.mark.slow
def test_workers_of_the_data_loader_are_told_from_none_in_real_traces(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shared / "traces" / "kineto_nvidia"
    without, workers = (next(iter(folder.glob(f"*resnet50_workers{n}_*")), None) for n in (0, 4))
    if without is None or workers is None:
        pytest.skip("the traces with and without workers are not in shared/traces")
    assert main(["compare", str(without), str(workers), "--fail-if-slower", "5%", "--format", "json"]) != 1
    message = json.loads(capsys.readouterr().out)["conclusion"]
    assert " less a step (176 → 135 ms): waiting for data is gone (" in message[0]
    assert any("waiting for the data loader is gone" in entry for entry in message)
    assert main(["compare", str(workers), str(without), "--fail-if-slower", "5%", "--format", "json"]) == 3
    assert ": waiting for data is new (" in json.loads(capsys.readouterr().out)["conclusion"][0]


# --- the parts --------------------------------------------------------------------------------------------


def test_the_longest_common_subsequence() -> None:
    pairs = common_subsequence("abcbdab", "bdcaba")
    assert len(pairs) == 4
    assert all("abcbdab"[here] == "bdcaba"[there] for here, there in pairs)
    assert pairs == sorted(pairs)
    assert common_subsequence("", "abc") == []
    assert len(common_subsequence("x" * 3000, "x" * 2000)) == 2000


def test_layers_of_a_wrapped_model_are_aligned_by_type() -> None:
    def net(prefix: str) -> list[RowTimes]:
        return [
            RowTimes(None, f"{prefix}{place}", kind, [1.0]) for place, kind in enumerate(("conv", "bn", "relu", "conv"))
        ]

    assert [pair.evidence for pair in align(net("block."), net("module.block."))] == ["type"] * 4


def test_p_values_are_adjusted_for_being_many() -> None:
    assert STEPS.adjusted([0.01, None, 0.04, 0.03]) == [
        pytest.approx(0.03),
        None,
        pytest.approx(0.04),
        pytest.approx(0.04),
    ]


def test_a_difference_without_any_noise_is_certain() -> None:
    result = RUNS.evidence([5.0] * 3, [6.0] * 3)
    assert (result.p, result.low, result.high) == (0, 1, 1)
    assert RUNS.evidence([5.0] * 3, [5.0] * 3).p == 1


# --- real runs, from the command line ---------------------------------------------------------------------

MODEL = """
import time, torch

class Slow(torch.nn.Module):
    def forward(self, x):
        time.sleep({seconds})
        return torch.relu(x)

def net():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), Slow(), torch.nn.Linear(64, 64)), torch.ones(8, 64)
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of a model with a layer that sleeps for 2 ms, and for 30 ms, which no noise hides."""
    torch = pytest.importorskip("torch")
    place = tmp_path_factory.mktemp("real")
    for name, seconds in (("before", 0.002), ("after", 0.03)):
        names: dict[str, object] = {"__name__": "net"}
        exec(MODEL.format(seconds=seconds), names)
        build = names["net"]
        assert callable(build)
        model, batch = build()
        with xsp.profile("net", out=place / name, levels="M/L") as prof, torch.no_grad():
            for _ in range(150):
                with prof.step():
                    model(batch)
    return place


@pytest.mark.slow
def test_the_command_finds_the_layer_that_sleeps(real: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = str(real / "before"), str(real / "after")
    assert main(["compare", a, b, "--fail-if-slower", "20%", "--format", "json"]) == 1
    printed = capsys.readouterr()
    assert "the step is slower by" in printed.err
    rows = json.loads(printed.out)["rows"]
    slow = [row for row in rows if row["section"] == "layer" and row["verdict"] == "slower" and row["change_ms"] > 10]
    assert [(row["name"], row["type"]) for row in slow] == [("1", "Slow")]
    assert main(["compare", b, a, "--fail-if-slower", "20"]) == 0


@pytest.mark.slow
def test_the_command_takes_several_runs_a_side(real: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = str(real / "before"), str(real / "after")
    assert main(["compare", a, a, a, "--with", b, b, b, "--fail-if-slower", "20%", "--format", "json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert (printed["repeats"], printed["runs"]) == ("run", {"a": 3, "b": 3})
    assert printed["rows"][0]["verdict"] == "slower"


def test_which_runs_are_after_must_be_clear(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "a1", "a2", "b1"]) == 2
    assert "3 runs, and none marked as after the change" in capsys.readouterr().err
    assert main(["compare", "a1"]) == 2
    assert "xsp compare a1 --with RUN" in capsys.readouterr().err
    assert main(["compare", "runs/my run"]) == 2
    assert "xsp compare 'runs/my run' --with RUN" in capsys.readouterr().err


@pytest.mark.slow
def test_a_gate_says_where_the_runs_cannot_tell_and_the_code_can_be_chosen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of = {
        "a": run(NET),
        "b": run(NET, conv=115),
        "same": run(NET),
        "one": run(NET, repeats=1),
        "half": run(NET, conv=30),
    }
    monkeypatch.setattr("xsp.ingest.load.load", lambda place, **_: of[str(place)])
    for after, message in (("b", "+8.8 %"), ("same", "+0.0 %"), ("one", "no repeats")):
        assert main(["compare", "a", after, "--fail-if-slower", "5%"]) == 3
        output = capsys.readouterr().err
        assert "undecided" in output
        assert message in output
        assert "--turns" in output
        assert main(["compare", "a", after, "--fail-if-slower", "5%", "--if-cannot-tell", "0"]) == 0
        assert main(["compare", "a", after, "--fail-if-slower", "5%", "--if-cannot-tell", "1"]) == 1
        capsys.readouterr()
    assert main(["compare", "a", "same", "--fail-if-slower", "40%"]) == 0  # even two starts are not so far apart
    assert main(["compare", "a", "half", "--fail-if-slower", "5%"]) == 0  # it is faster
    assert capsys.readouterr().err == ""
    assert main(["compare", "a", "same", "--if-cannot-tell", "0"]) == 2
    assert "needs --fail-if-slower" in capsys.readouterr().err


@pytest.mark.slow
def test_a_gate_over_several_runs_passes_only_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    of = {f"a{k}": entry for k, entry in enumerate(starts(100, 101, 99, 100))}
    of |= {f"b{k}": entry for k, entry in enumerate(starts(101, 100, 99, 102))}
    of |= {f"c{k}": entry for k, entry in enumerate(starts(100, 140, 90, 120))}
    monkeypatch.setattr("xsp.ingest.load.load", lambda place, **_: of[str(place)])
    a, b, c = ([f"{letter}{k}" for k in range(4)] for letter in "abc")
    assert main(["compare", *a, "--with", *b, "--fail-if-slower", "5%"]) == 0
    assert main(["compare", *a, "--with", *c, "--fail-if-slower", "5%"]) == 3


# --- few steps --------------------------------------------------------------------------------------------


def test_a_few_steps_that_are_all_longer_are_told_though_they_vary() -> None:
    """Another device: 75 to 81 ms there, 82 to 166 here. Means and their errors alone find nothing."""
    a, b = [75.5, 76.9, 76.2, 76.7, 78.5, 81.1], [100.3, 122.1, 166.4, 82.0, 107.2, 166.3]
    result = STEPS.evidence(a, b)
    assert result.test == "ranks"
    assert result.p == pytest.approx(2 / math.comb(12, 6) / 0.8)
    assert result.low is not None
    assert 0 < result.low < result.change
    assert STEPS.verdict(result, result.p, 6) == "slower here"
    assert STEPS.verdict(STEPS.evidence(b, a), result.p, 6) == "faster here"


def test_two_disturbed_steps_of_twelve_do_not_hide_that_a_layer_is_faster() -> None:
    a = [8.7, 8.6, 8.9, 8.7, 8.8, 8.6, 8.7, 8.75, 8.65, 8.7, 9.1, 8.7]
    b = [0.44, 0.43, 0.45, 31.0, 0.44, 0.43, 0.46, 0.44, 28.0, 0.45, 0.44, 0.43]
    result = STEPS.evidence(a, b)
    assert STEPS.verdict(result, result.p, 12) == "faster"
    many = [1.0] * 200
    assert STEPS.verdict(result, STEPS.adjusted([result.p, *many])[0], 12) == "faster"
    three = STEPS.evidence(a, [20.0, *b[1:]])
    assert three.test == "ranks"
    assert STEPS.verdict(three, three.p, 12) in ("faster", "faster here")


def test_steps_of_which_some_are_shorter_and_some_longer_tell_nothing_of_the_step() -> None:
    result = STEPS.evidence([159.4, 149.0, 148.7, 151.7, 153.2, 155.7], [160.1, 121.9, 123.1, 117.8, 127.1, 206.5])
    assert STEPS.verdict(result, result.p, 6) == "no evidence of change"


def test_so_few_steps_that_ranks_cannot_tell_are_left_to_yuen_s_test() -> None:
    result = STEPS.evidence([1.0, 1.01, 0.99], [2.0, 2.01, 1.99])
    assert result.test == "Yuen's test"
    assert STEPS.verdict(result, result.p, 3) == "slower"


@pytest.mark.slow
def test_every_format_has_the_verdict(real: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = str(real / "before"), str(real / "after")
    assert main(["compare", a, b]) == 0
    printed = capsys.readouterr().out
    assert "excludes 0" in " ".join(printed.split())
    assert "The step: B is slower than A" in printed
    assert main(["compare", a, b, "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert rows[0]["section"] == "step"
    assert rows[0]["verdict"] == "slower"
    assert main(["compare", a, b, "--format", "markdown", "--out", str(tmp_path / "c.md")]) == 0
    assert "| 1 | Slow |" in (tmp_path / "c.md").read_text(encoding="utf-8")


def test_markdown_shows_names_as_they_are() -> None:
    net = NET.replace("module conv ", "module _conv_a<float*|2> ")
    assert r"| \_conv_a\<float\*\|2> | Conv2d |" in markdown(compare(run(net), run(net, conv=300)))


@pytest.mark.slow
def test_in_python_it_is_a_relation(real: Path) -> None:
    result = xsp.compare(xsp.load(real / "before"), xsp.load(real / "after"))
    assert result.relation("layer").filter("verdict = 'slower' AND change_ms > 10").select("name").fetchall() == [
        ("1",)
    ]


@pytest.mark.parametrize("percent", ["fast", "-1", "nan"])
def test_a_threshold_that_is_none_is_a_usage_error(percent: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "a", "b", f"--fail-if-slower={percent}"]) == 2
    assert "write a percentage" in capsys.readouterr().err
