"""Slow iterations, first ones and growth: named where they are there, and not on steady programs with drawn noise."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from depth import deep

from xsp import account
from xsp.account import entries as names
from xsp.account.course import growth_of
from xsp.account.sentences import remarks
from xsp.advise import advisor
from xsp.advise.advice import Needs
from xsp.health import health
from xsp.report import firstscreen
from xsp.schema import Level
from xsp.store.loop import BARE
from xsp.store.trace import Trace
from xsp.testing import spans, trace_of, with_loop

MS = 1_000_000
Draw = Callable[[random.Random], float]
NOISES: dict[str, Draw] = {
    "normal": lambda draw: max(0.5, draw.gauss(1, 0.05)),
    "lognormal": lambda draw: draw.lognormvariate(0, 0.25),
    "gamma": lambda draw: draw.gammavariate(4, 0.25),
    "exponential tail": lambda draw: 0.8 + draw.expovariate(5),
    "disturbed": lambda draw: draw.lognormvariate(0, 0.05) * (2.5 if draw.random() < 0.01 else 1),
}


def rows_of(
    times_ms: Sequence[float], before_ms: Sequence[float] | None = None, **columns: Sequence[Any]
) -> list[dict[str, Any]]:
    """Return the rows of a loop, in order of time, from times of steps and times before them."""
    rows, now_ns = [], 0.0
    for step, dur_ms in enumerate(times_ms):
        gap_ns = before_ms[step] * MS if before_ms is not None else 0.05 * MS
        row = {"step": step, "start_ns": round(now_ns + gap_ns), "dur_ns": dur_ms * MS, "before_ns": gap_ns}
        rows.append({**row, **{name: values[step] for name, values in columns.items()}})
        now_ns += gap_ns + dur_ms * MS
    return rows


def trace_with(rows: list[dict[str, Any]], recorded: str = "", run: dict[str, Any] | None = None) -> Trace:
    """Return a run with that loop; by default its step 4 was recorded at the level of models."""
    if not recorded:
        recorded = f"step s 0-{rows[4]['dur_ns'] / 1e3} step=4"
        rows[4]["rung"] = int(Level.MODEL)
    return with_loop(trace_of(spans(recorded), run), rows)


def texts(trace: Trace) -> list[str]:
    accounted = account.of(trace)
    assert accounted.violations == ()
    shown = firstscreen.text(firstscreen.first_screen(trace, "a", ()), 80)
    assert len(shown.splitlines()) <= firstscreen.MOST_LINES
    found = [remark.text for remark in remarks(accounted)]
    joined = " ".join(shown.split())
    assert all(text in joined for text in found[: firstscreen.MOST_REMARKS])
    return found


@pytest.mark.parametrize("noise", [noise if noise in ("lognormal", "disturbed") else deep(noise) for noise in NOISES])
@pytest.mark.parametrize("count", [deep(12), 40, deep(150), deep(600)])
def test_a_steady_program_gets_no_remark(noise: str, count: int) -> None:
    alarms = 0
    for seed in range(10):
        draw = random.Random(1000 * seed + count)
        times = [20 * NOISES[noise](draw) for _ in range(count)]
        before = [2 * NOISES[noise](draw) for _ in range(count)]
        trace = trace_with(rows_of(times, before))
        accounted = account.of(trace)
        assert accounted.main is not None
        alarms += len(remarks(accounted))
    assert alarms == 0, noise


def test_a_save_each_fifteenth_iteration_is_named_with_its_period_and_its_line() -> None:
    draw = random.Random(1)
    before = [234.0 if step and step % 15 == 0 else 0.1 for step in range(150)]
    line = {"file": "train.py", "line": 30, "calls": "save", "ns": 234 * MS, "gaps": 1}
    run = {"between": {"gaps": 12, "ns": 240 * MS, "lines": [line]}}
    trace = trace_with(rows_of([draw.gauss(21, 0.5) for _ in range(150)], before), run=run)
    (text,) = texts(trace)
    assert text.startswith("Each 15th iteration takes 255 ms instead of 21.")
    assert "between steps, in train.py:30, save: 14.3 of 35.2 ms (41 %) of the mean iteration." in text
    main = account.of(trace).main
    assert main is not None
    usual, slow = main.time.children
    assert (usual.ms or 0) + (slow.ms or 0) == pytest.approx(main.time.ms)
    assert firstscreen.first_screen(trace, "a", ()).sentences[0] == text
    pieces = advisor.of(trace, max_needs=Needs.TRACE).advice
    assert [piece.question for piece in pieces if "15th" in piece.what] == ["between"]


FAST, LONG = (
    """
    step s       {0}-{3}  step={4}
    forward Net  {0}-{1} step={4}
    module Net   {0}-{1} step={4}
    module enc   {0}-{2} step={4} type=Enc
    """.format(*(1000 * at for at in times), step)
    for step, times in ((7, (0, 5, 4.5, 6)), (17, (100, 205, 204, 206)))
)  # fmt: skip


def test_a_line_that_ran_in_sought_gaps_only_is_the_place_of_a_save_and_of_its_advice() -> None:
    before_ms = [20.0 if step % 10 == 9 else 0.1 for step in range(200)]
    line = {"file": "train.py", "line": 30, "calls": "torch.save", "ns": 80 * MS, "gaps": 4}
    usual = {"file": "train.py", "line": 31, "calls": "float", "ns": MS, "gaps": 12}
    run = {
        "between": {"gaps": 12, "ns": MS, "lines": [usual]},
        "lines": [{"kind": 0, "phase": "slow gaps", "gaps": 4, "ns": 80 * MS, "lines": [line]}],
    }
    trace = trace_with(rows_of([10.0] * 200, before_ms), run=run)
    assert texts(trace) == [
        "Each 10th iteration takes 30.0 ms instead of 10.1 ms, between steps, in train.py:30, torch.save: "
        "2.02 of 12.1 ms (17 %) of the mean iteration."
    ]
    (piece,) = advisor.of(trace, only=["between"]).advice
    assert "in a slow gap, mean of 4" in piece.why[-1]
    assert piece.do.startswith("write it less often")
    assert piece.gain.value == pytest.approx(2.02, abs=0.01)
    # less than that of other work between steps, which every iteration does
    rare = trace_with(rows_of([10.0] * 200, [ms if ms < 1 else 10.0 for ms in before_ms]), run=run)
    (piece,) = advisor.of(rare, only=["between"]).advice
    assert piece.gain.value == pytest.approx(1.0, abs=0.02)


def test_a_line_that_runs_in_some_steps_only_is_what_slow_ones_do_besides() -> None:
    draw = random.Random(3)
    times = [draw.gauss(404 if step % 6 == 5 else 47, 1) for step in range(240)]
    rare = {"file": "train.py", "line": 14, "calls": "torch.linalg.inv", "ns": 640 * MS, "gaps": 2}
    usual = {"file": "train.py", "line": 12, "calls": "loss.backward", "ns": 4000 * MS, "gaps": 12}
    small = {"file": "train.py", "line": 15, "calls": "print", "ns": MS, "gaps": 1}
    phase = {"kind": 0, "phase": "outside", "gaps": 12, "ns": 4641 * MS, "lines": [usual, rare, small]}
    trace = trace_with(rows_of(times), run={"lines": [phase]})
    (text,) = texts(trace)
    assert text.startswith("Each 6th iteration takes 404 ms instead of 47.")
    assert "in its step, in train.py:14, torch.linalg.inv: " in text
    (piece,) = advisor.of(trace, only=["uneven"]).advice
    assert piece.do == "train.py:14, torch.linalg.inv runs in them only: do it less often, or with less work"
    trace = trace_with(rows_of(times), run={"lines": [{**phase, "lines": [usual, small]}]})
    (text,) = texts(trace)
    assert "in its step: " in text
    (piece,) = advisor.of(trace, only=["uneven"]).advice
    assert piece.do.startswith("see what differs in its step: longer inputs")


def noise(times: Sequence[float]) -> list[str]:
    """Return what is said of the machine about steps of these times, of which twenty were recorded."""
    chosen = range(20, 40)
    rows = rows_of(times)
    for step in chosen:
        rows[step]["rung"] = int(Level.MODEL)
    recorded = (f"step s{step} {step * 10**5}-{step * 10**5 + 1000 * times[step]} step={step}" for step in chosen)
    return [each.text for each in health(trace_with(rows, "\n".join(recorded))) if each.subject == "noise"]


def test_other_programs_are_no_cause_of_what_the_program_does_in_each_fifth_step() -> None:
    draw = random.Random(4)
    assert noise([draw.gauss(90 if step % 5 == 0 else 30, 0.5) for step in range(200)]) == []
    (text,) = noise([draw.gauss(30, 0.5) * (3 if draw.random() < 0.2 else 1) for step in range(200)])
    assert text.endswith("did other programs use the machine?")


def test_a_slow_module_is_named_if_a_slow_iteration_was_recorded() -> None:
    draw = random.Random(2)
    times = [draw.gauss(106 if step % 12 == 5 else 6, 0.2) for step in range(144)]
    rungs = [30 if step in (7, 17) else BARE for step in range(144)]
    trace = trace_with(rows_of(times, rung=rungs), FAST + LONG)
    (text,) = texts(trace)
    assert text.startswith("Each 12th iteration takes 106 ms instead of 6.")
    assert "in forward, in enc (Enc): " in text
    (piece,) = [piece for piece in advisor.of(trace, max_needs=Needs.TRACE).advice if piece.question == "uneven"]
    assert piece.what.startswith("each 12th iteration takes 106 ms instead of 6.")
    assert piece.gain.value < 9


def test_slow_iterations_without_period_and_place_may_be_the_machines() -> None:
    draw = random.Random(5)
    slow = {17, 40, 58, 101, 131}
    times = [draw.gauss(300 if step in slow else 6, 0.2) for step in range(144)]
    trace = trace_with(rows_of(times, rung=[30 if step == 7 else BARE for step in range(144)]), FAST)
    (piece,) = [piece for piece in advisor.of(trace, max_needs=Needs.TRACE).advice if piece.question == "uneven"]
    assert piece.gain.value == pytest.approx(piece.gain.high / 2)
    assert piece.do.startswith("run it again on an otherwise idle machine")


@pytest.mark.parametrize(
    ("trains", "evaluations", "named"), [(True, 12, True), (True, 1, False), (None, 12, False), (False, 12, False)]
)
def test_steps_that_train_nothing_are_named_where_they_take_much_of_the_loop(
    trains: bool | None, evaluations: int, named: bool
) -> None:
    kinds = [kind for _ in range(12) for kind in (*[0] * 10, *[1] * evaluations)]
    times = [20.0 if kind == 0 else 10.0 for kind in kinds]
    own = [{"kind": 0, "name": "training Net 8×3", "training": trains}, {"kind": 1, "name": "Net 8×3"}]
    if trains is not None:
        own[1]["training"] = False
    trace = trace_with(rows_of(times, kind=kinds), run={"kinds": own})
    found = [text for text in texts(trace) if "train nothing" in text]
    assert bool(found) is named
    if named:
        share = 144 * 10.05 / (144 * 10.05 + 120 * 20.05)
        assert found[0].startswith(
            f"Steps that train nothing take {100 * share:.0f} % of the loop: 144 of Net 8×3, 10.1 ms each; if they "
        )


def test_a_program_that_mostly_evaluates_has_the_share_of_training_too() -> None:
    kinds = [kind for _ in range(6) for kind in (*[0] * 2, *[1] * 20)]
    own = [{"kind": 0, "name": "training Net", "training": True}, {"kind": 1, "name": "Net", "training": False}]
    rows = rows_of([10.0] * len(kinds), kind=kinds)
    found = texts(trace_with(rows, run={"kinds": own}))
    assert found[0].startswith(
        "Steps that train nothing take 91 % of the loop, training takes 9 % (12 steps, 10.1 ms each): 120 of Net, "
    )
    once = rows_of([10.0] * 30 + [500.0], kind=[0] * 30 + [1])
    assert not [text for text in texts(trace_with(once, run={"kinds": own})) if "train nothing" in text]


def test_slow_samples_at_random_are_waits_for_data() -> None:
    draw = random.Random(3)
    data = [draw.gauss(320, 20) if draw.random() < 0.04 else draw.uniform(0.1, 0.5) for _ in range(200)]
    trace = trace_with(
        rows_of([draw.gauss(20, 1) for _ in data], [ms + 0.1 for ms in data], data_ns=[ms * MS for ms in data])
    )
    (text,) = texts(trace)
    assert " of 200 iterations take 3" in text or " of 197 iterations take 3" in text
    assert "waiting for data: " in text


def test_compilation_and_warm_up_are_entries_of_the_program() -> None:
    draw = random.Random(4)
    times = [38_000.0, 300.0, *(draw.gauss(50, 1) for _ in range(60))]
    compiled = trace_of(
        span._replace(name="Torch-Compiled Region: 0/0") if span.name == "region" else span
        for span in spans("step s 0-50000 step=4\nuser region 10-40000 step=4")
    )
    rows = rows_of(times)
    rows[4]["rung"] = int(Level.MODEL)
    trace = with_loop(compiled, rows)
    (text,) = texts(trace)
    assert text.startswith("Compiling took 38.2 of 41.")
    accounted = account.of(trace)
    assert sum(entry.ms or 0 for entry in accounted.program) == pytest.approx(accounted.wall_ms)
    assert next(entry for entry in accounted.program if entry.name == names.COMPILING).ms == pytest.approx(
        38_200, rel=0.01
    )
    (text,) = texts(trace_with(rows_of([3000.0, 100.0, *times[2:]])))
    assert text.startswith("The first 2 iterations took 3.00 of 6.")


def test_growth_is_named_with_both_times() -> None:
    draw = random.Random(5)
    times = [20 * (1 + 0.5 * step / 200) * draw.lognormvariate(0, 0.1) for step in range(200)]
    (text,) = texts(trace_with(rows_of(times)))
    assert text.startswith("An iteration takes ")
    assert "% longer at the end than at the beginning: 2" in text
    assert text.endswith(", in the step.")


@pytest.mark.parametrize(
    ("own", "of_host", "cores", "named"),
    [
        ((1.0, 0.35), (1.2, 2.0), 2, False),  # other programs came
        ((1.0, 0.9), (1.2, 2.0), 2, True),  # they explain less than half of it
        ((1.0, 0.35), (1.2, 0.5), 2, True),  # it waits for something else: cores are free
        ((1.0, 1.0), (2.0, 2.0), 2, True),
        ((1.0, 0.35), (1.2, 2.0), None, True),
    ],
)
def test_a_growth_that_other_programs_explain_is_not_the_programs(
    own: tuple[float, float], of_host: tuple[float, float], cores: int | None, named: bool
) -> None:
    rows = rows_of([20 + 0.2 * step for step in range(150)])
    trace = trace_with(rows, run={"machine": {"cores": cores}} if cores else None)
    end_ns = rows[-1]["start_ns"] + rows[-1]["dur_ns"]
    for name, values in (("process.cpu.use", own), ("host.cpu.use", of_host)):
        for place in range(30):
            trace.con.execute(
                "INSERT INTO samples (time_ns, rank, name, unit, value) VALUES (?, 0, ?, 'cores', ?)",
                [rows[0]["start_ns"] + round(end_ns * (place + 0.5) / 30), name, values[place >= 15]],
            )
    assert bool([text for text in texts(trace) if "longer at the end" in text]) is named


@pytest.mark.parametrize("part", ["in the step", "in the wait for data", "between steps"])
def test_the_part_of_an_iteration_that_grows_is_named(part: str) -> None:
    steady, growing = [10e6] * 90, [10e6 + 0.2e6 * place for place in range(90)]
    names_of_parts = ("in the step", "in the wait for data", "between steps")
    parts = {name: growing if name == part else steady for name in names_of_parts}
    whole = [sum(times) for times in zip(*parts.values(), strict=True)]
    found = growth_of(whole, parts)
    assert found is not None
    assert found.where == part


def test_a_program_without_repeating_modules_has_no_iteration() -> None:
    run = {"steps": {"found": False}, "kinds": [{"kind": 0, "name": "gate"}]}
    trace = trace_with(rows_of([0.26] * 50), "step s 0-260", run)
    screen = firstscreen.first_screen(trace, "a")
    assert screen.sentence.startswith("Steps could not be found: ")
    assert "xsp run --step NAME" in screen.sentence
    assert screen.advice == ()
    assert screen.heading.endswith(": steps unknown")
    shown = firstscreen.text(screen, 80)
    assert "an iteration" not in shown.split("Steps could")[0]
    assert "where the time of the loop goes" in shown


@pytest.mark.parametrize("trains", [True, False])
def test_a_step_that_begins_a_training_is_no_kind_of_its_own(trains: bool) -> None:
    """The first step calls a model twice, and loads code for 3 s; a prefill is a kind of its own."""
    rows = rows_of([3000.0] + [20.0] * 100, kind=[0] + [1] * 100)
    kinds = [{"kind": kind, "name": f"kind {kind}", "training": trains, "steps": [1, 100][kind]} for kind in (0, 1)]
    trace = trace_with(rows, run={"kinds": kinds})
    accounted, text = account.of(trace), firstscreen.text(firstscreen.first_screen(trace, "a", ()), 80)
    assert accounted.violations == ()
    assert accounted.main is not None
    assert accounted.main.kind == 1
    about_kinds = [finding.text for finding in health(trace) if finding.subject == "kinds"]
    first = [entry for entry in accounted.program if entry.name == names.FIRST]
    if trains:
        assert accounted.main.share == 1
        assert "of the loop)" not in text
        assert "By kind of step" not in text
        assert "The first iteration took 3.00 of 5.01 s (60 %) of the program's loop" in " ".join(text.split())
        assert about_kinds == []
        assert [entry.ms for entry in first] == [pytest.approx(3000, rel=0.01)]
    else:
        assert accounted.main.share == pytest.approx(0.4, rel=0.01)
        assert "kind 1 (40 % of the loop)" in text
        assert (
            "By kind of step: kind 0: 1 × 3.00 s (60 % of the time); kind 1: 100 × 20.1 ms (40 % of the time)."
            in " ".join(text.split())
        )
        assert "steps of other kinds take 60 % of the loop's time: kind 0 (60 %)" in about_kinds[0]
        assert first == []


def test_the_figures_are_not_of_the_step_that_begins_a_training() -> None:
    rows = rows_of([3000.0] + [20.0] * 100, kind=[0] + [1] * 100)
    rows[0]["rung"] = rows[4]["rung"] = int(Level.MODEL)
    kinds = [{"kind": kind, "name": f"kind {kind}", "training": True} for kind in (0, 1)]
    recorded = "step s 0-3000000 step=0\nforward A 0-2900000 step=0\nstep s 0-20000 step=4\nforward B 0-9000 step=4"
    assert trace_with(rows, recorded, {"kinds": kinds}).kind == 1


def test_times_that_take_two_values_by_chance_are_no_growth() -> None:
    """As on a core that another program shares: medians of parts jump from one value to the other."""
    draw = random.Random(1)

    def two_values(count: int = 100) -> list[float]:
        return [draw.choice((42e6, 84e6)) * draw.uniform(0.95, 1.1) for _ in range(count)]

    found = [growth_of(two_values()) for _ in range(500)]
    assert sum(growth is not None for growth in found) <= 2  # 14 by medians alone
    assert growth_of([time_ns * (1 + place / 50) for place, time_ns in enumerate(two_values())]) is not None


def test_the_phase_of_slow_steps_is_known_although_none_was_recorded() -> None:
    rows = rows_of([30.0 if step % 10 == 9 else 10.0 for step in range(100)])
    for row in rows:
        row |= {"forward_ns": 3e6, "backward_ns": 5e6, "optimizer_ns": row["dur_ns"] - 9e6}
    assert "Each 10th iteration takes 30.1 ms instead of 10.1 ms, in the optimizer" in " ".join(texts(trace_with(rows)))


@pytest.mark.parametrize(
    ("phase", "where"),
    [
        ("forward", "in forward"),
        ("backward", "in backward"),
        ("optimizer", "in the optimizer"),
        (None, "in the step"),
    ],
)
def test_the_phase_of_steps_that_grows_is_named(phase: str | None, where: str) -> None:
    rows = rows_of([10.0 + 0.2 * step for step in range(90)])
    for row in rows:
        grown_ns = row["dur_ns"] - 10e6
        row |= {f"{name}_ns": 2e6 + (grown_ns if name == phase else 0) for name in ("forward", "backward", "optimizer")}
    (text,) = [text for text in texts(trace_with(rows)) if "longer at the end" in text]
    assert text.endswith(f", {where}.")


@pytest.mark.parametrize(("large_ms", "is_large"), [(20.0, True), (1.5, False)])
def test_a_kind_with_most_of_the_time_is_what_the_figures_are_of_although_its_only_recording_is_not_timed(
    large_ms: float, is_large: bool
) -> None:
    """A sweep over three models was shown by the one with 7 % of the time; the phases of the large one were known."""
    kinds = [0] * 20 + [1] * 40
    times = [large_ms if kind else 2.0 for kind in kinds]
    phases = {
        f"{name}_ns": [share * ms * MS for ms in times]
        for name, share in (("forward", 0.3), ("backward", 0.5), ("optimizer", 0.1))
    }
    rows = rows_of(times, kind=kinds, **phases)
    rows[4]["rung"], rows[30]["rung"] = int(Level.MODEL), int(Level.MODEL)
    small = "step s 0-2000 step=4\nforward Small 0-600 step=4"
    text = f"step s 0-{20 * large_ms * 1e3:.0f} step=30\nforward Large 0-{6 * large_ms * 1e3:.0f} step=30"
    recorded = [*spans(small), *(row._replace(timed=False, trace_id="b" * 32) for row in spans(text))]
    own = [{"kind": number, "name": name, "training": True} for number, name in enumerate(("small", "large"))]
    trace = with_loop(trace_of(recorded, {"kinds": own}), rows)
    main = account.of(trace).main
    assert main is not None
    assert main.name == ("large" if is_large else "small")
    assert not is_large or main.host.ms(names.BACKWARD) == pytest.approx(0.5 * large_ms, rel=0.01)
    assert account.of(trace).violations == ()
