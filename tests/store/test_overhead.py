"""Leveled steps → one true step: planted durations and planted costs must come out again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from xsp import stats
from xsp.health import health
from xsp.levels import parse_levels
from xsp.record.schedule import Schedule
from xsp.schema import Kind, Level, Span
from xsp.store.trace import Rung, Trace
from xsp.testing import LEVELS, spans, trace_of

US = 1_000
COST = {Level.MODEL: 0, Level.LAYER: 4 * US, Level.OP: 2 * US, Level.RUNTIME: 3 * US}
"""What recording one span of a level adds to whatever is around it."""


class Part(NamedTuple):
    """A piece of the program: what it takes by itself, and the pieces that it calls."""

    kind: Kind
    name: str
    own_us: int
    parts: tuple[Part, ...] = ()

    @property
    def true_ns(self) -> int:
        return self.own_us * US + sum(part.true_ns for part in self.parts)

    def all(self) -> Iterator[Part]:
        yield self
        for part in self.parts:
            yield from part.all()


def op(name: str, own: int, *parts: Part) -> Part:
    return Part(Kind.OP, name, own, parts)


def module(name: str, own: int, *parts: Part) -> Part:
    return Part(Kind.MODULE, name, own, parts)


A = module("net.a", 50, op("aten::linear", 20, op("aten::t", 5), op("aten::addmm", 300)))
B = module("net.b", 30, module("net.b.0", 10, op("aten::relu", 80)), module("net.b.1", 10, op("aten::add", 40)))
NET = Part(Kind.FORWARD, "Net", 0, (module("net", 100, A, B),))
STEP = Part(Kind.STEP, "s", 200, (NET,))


def run(part: Part, rung: int, slower: float = 1.0, start: int = 1_000, **columns: Any) -> tuple[list[Span], int]:
    """Execute a part with the levels down to `rung` recorded; return its spans and its end."""
    recorded = LEVELS[part.kind] <= rung
    now = start + round(part.own_us * US * slower)
    rows: list[Span] = []
    for inner in part.parts:
        inside, now = run(inner, rung, slower, now, **columns)
        rows += inside
        now += COST[LEVELS[inner.kind]] if LEVELS[inner.kind] <= rung else 0
    if recorded:
        known = {
            "level": LEVELS[part.kind],
            "kind": part.kind.value,
            "process": 1,
            "thread": 1,
            "rung": rung,
            **columns,
        }
        rows.append(Span(name=part.name, start_ns=start, dur_ns=now - start)._replace(**known))
    return rows, now


def leveled(levels: str, repeats: int, noise: float = 0.0, program: Part = STEP) -> list[Span]:
    """Execute steps in turns as a schedule has them, each slower or faster by chance and by drift."""
    schedule = Schedule(parse_levels(levels), warmup=0, settle=False)
    draw = random.Random(3)
    rows = []
    for step in range(schedule.steps_for(repeats)):
        turn = schedule.next()
        slower = 1 + 0.0005 * step * bool(noise) + draw.gauss(0, noise)
        rows += run(program, turn.rung, slower, step=step, timed=turn.timed)[0]
    return rows


def figures(trace: Trace, *columns: str) -> dict[str, Any]:
    rows = trace.sql(f"SELECT name, {', '.join(columns)} FROM merged").fetchall()
    return {row[0]: row[1] if len(columns) == 1 else row[1:] for row in rows}


def test_without_noise_the_planted_durations_come_out_exactly() -> None:
    trace = trace_of(leveled("M/L", repeats=3))
    assert figures(trace, "true_ns") == pytest.approx({part.name: part.true_ns for part in STEP.all()})
    layer, ops = trace.rungs[1:]
    assert (layer.spans, layer.cost_ns, ops.spans, ops.cost_ns) == (5, 4 * US, 5, 2 * US)


def test_what_the_spans_inside_explain_is_the_whole_difference_between_raw_and_true() -> None:
    trace = trace_of(leveled("M/L", repeats=3))
    found = figures(trace, "raw_ns", "true_ns", "explained_ns", "cause")
    for name, (raw, true, explained, _) in found.items():
        assert raw - true == pytest.approx(explained), name
    # net.b: 2 modules at its own rung and, deeper, 2 ops
    assert found["net.b"][2:] == (
        2 * 4 * US + 2 * 2 * US,
        "2 spans of layers at 4.00 µs + 2 spans of operators at 2.00 µs",
    )
    assert found["aten::relu"][2:] == (0.0, None)


def test_a_span_is_never_shorter_than_the_spans_inside_it() -> None:
    # 4 modules added 400 µs to the step, hardly any of it where they are: the average would leave net 110 µs
    deep = "step s 0-1400\nmodule net 0-410\nmodule net.a 0-130\nmodule net.b 140-270\nmodule net.c 280-410"
    rows = [*spans("step s 0-1000", step=0, rung=20), *spans(deep, step=1, rung=30)]
    found = figures(trace_of(rows), "raw_ns", "true_ns")
    assert found["net"] == (410 * US, 3 * 130 * US)


def test_the_interval_holds_the_true_time_where_the_spans_inside_hold_it_up() -> None:
    shallow = [spans("step s 0-1000", step=step, rung=20) for step in range(3)]
    deep = [spans("step s 0-1400\nop a 0-130\nop b 0-125\nop c 1-124", step=step, rung=40) for step in range(3, 6)]
    found = figures(
        trace_of([row for rows in (*shallow, *deep) for row in rows]), "true_lo_ns", "true_ns", "true_hi_ns"
    )
    assert found["a"] == (0, 123 * US, 123 * US)  # two ops inside at 133 µs each would leave less than nothing


def test_device_work_costs_the_step_nothing_and_does_not_dilute_the_cost_of_its_launches() -> None:
    launch = Part(Kind.LAUNCH, "cudaLaunchKernel", 5)
    rows = leveled("model/op/kernel", 3, program=Part(Kind.STEP, "s", 100, (op("a", 10, launch), op("b", 10, launch))))
    kernels = [
        row._replace(level=Level.KERNEL, kind="kernel", name="gemm", thread=None, device=0, stream=7)
        for row in rows
        if row.kind == Kind.LAUNCH
    ]
    trace = trace_of(rows + kernels)
    assert [(rung.spans, rung.cost_ns) for rung in trace.rungs] == [(1, 0), (2, 2 * US), (2, 3 * US)]
    raw, true, explained = figures(trace, "raw_ns", "true_ns", "explained_ns")["s"]
    assert (true, raw - true) == (130 * US, explained)


def test_with_noise_and_drift_the_planted_durations_lie_in_narrow_intervals() -> None:
    trace = trace_of(leveled("M/L", repeats=30, noise=0.004))
    drift = 1 + 0.0005 * 45
    covered = 0
    found = figures(trace, "true_ns", "true_lo_ns", "true_hi_ns")
    for part in STEP.all():
        true, low, high = found[part.name]
        assert true == pytest.approx(part.true_ns * drift, rel=0.02), part.name
        assert high - low < 0.03 * true + US
        covered += low <= part.true_ns * drift <= high
    assert covered >= 0.8 * len(found)


def test_steps_that_do_something_else_are_not_averaged_in_and_are_counted() -> None:
    rows = leveled("M/L", repeats=3)
    last = max(row.step or 0 for row in rows if row.rung == Level.OP)
    odd = Part(Kind.STEP, "s", 200, (NET._replace(parts=(module("net", 100, A, B, op("aten::extra", 999)),)),))
    rows = [row for row in rows if row.step != last] + run(odd, Level.OP, step=last, timed=True)[0]
    trace = trace_of(rows, {"name": "odd"})
    assert "aten::extra" not in figures(trace, "true_ns")
    texts = [finding.text for finding in health(trace) if finding.subject == "recording operators"]
    assert any(text.startswith("1 spans in 1 steps (0.999 ms) have no counterpart") for text in texts)


def test_a_step_of_another_kind_changes_no_figure() -> None:
    rows = leveled("M/L", repeats=5)
    other = Part(Kind.STEP, "s", 20, (NET, NET))
    extra = [row for step in (100, 101) for row in run(other, Level.OP, step=step, timed=True)[0]]
    assert figures(trace_of(rows + extra), "true_ns", "raw_ns") == figures(trace_of(rows), "true_ns", "raw_ns")


def test_steps_that_raised_do_not_count() -> None:
    rows = leveled("M/L", repeats=1)
    broken = [
        row._replace(step=90 + row.rung, dur_ns=row.dur_ns * 3, status="error:ValueError")
        for row in rows
        if row.timed and row.rung is not None
    ]
    found = trace_of(rows + broken)
    assert figures(found, "true_ns", "raw_ns") == figures(trace_of(rows), "true_ns", "raw_ns")
    assert [rung.steps for rung in found.rungs] == [1, 1, 1]


# --- the step that describes ------------------------------------------------------------------------------


def described(shapes: str) -> Trace:
    rows = [
        row._replace(input_shapes="[[8, 3]]") if row.kind == Kind.FORWARD else row
        for row in leveled("M/L", repeats=3)
        if row.timed
    ]
    for row in run(STEP, Level.OP, slower=9, step=77, timed=False)[0]:
        known: dict[str, Any] = {"input_shapes": shapes} if row.kind == Kind.FORWARD else {}
        known |= {"alloc_bytes": 64, "input_shapes": "[[8, 5]]"} if row.kind == Kind.MODULE else {}
        known |= {"flops": 99, "flops_source": "shapes"} if row.name == "aten::addmm" else {}
        rows.append(row._replace(**known))
    return trace_of(rows)


def test_shapes_and_operations_come_from_the_step_that_describes_and_times_do_not() -> None:
    trace = described(shapes="[[8, 3]]")
    found = figures(trace, "input_shapes", "flops", "true_ns", "raw_ns", "timed")
    assert found["net.a"][:2] == ("[[8, 5]]", None)
    assert found["aten::addmm"] == (None, 99, 300 * US, 300 * US, True)


def test_a_step_with_other_inputs_describes_nothing() -> None:
    found = figures(described(shapes="[[16, 3]]"), "input_shapes", "flops")
    assert (found["net.a"], found["aten::addmm"]) == ((None, None), (None, None))


def of_many_lengths(*lengths: int) -> Trace:
    """Return a trace whose timed steps have inputs of so many rows, and whose step that describes has 77."""
    rows = []
    for step, length in enumerate(lengths):
        shapes = f"[[{length}, 3]]"
        rows += [
            row._replace(input_shapes=shapes) if row.kind == Kind.FORWARD else row
            for row in run(STEP, Level.OP, step=step, timed=True)[0] + run(STEP, Level.MODEL, step=step, timed=True)[0]
        ]
    for row in run(STEP, Level.OP, slower=9, step=90, timed=False)[0]:
        known: dict[str, Any] = {"input_shapes": "[[77, 3]]"} if row.kind in (Kind.FORWARD, Kind.MODULE) else {}
        known |= {"flops": 99, "flops_source": "shapes"} if row.name == "aten::addmm" else {}
        rows.append(row._replace(**known))
    return trace_of(rows, {"name": "lengths"})


def test_where_inputs_differ_from_step_to_step_the_one_that_describes_has_all_shapes_and_health_says_so() -> None:
    trace = of_many_lengths(10, 20, 30)
    shapes = trace.sql("SELECT DISTINCT input_shapes FROM merged WHERE input_shapes IS NOT NULL").fetchall()
    assert shapes == [("[[77, 3]]",)]
    assert figures(trace, "flops")["aten::addmm"] == 99
    (text,) = [finding.text for finding in health(trace) if finding.subject == "shapes"]
    assert "3 different inputs of Net" in text
    assert text.endswith("with [[77, 3]]")


def test_where_all_steps_have_one_input_another_one_describes_nothing_and_nothing_is_said_to_vary() -> None:
    trace = of_many_lengths(10, 10, 10)
    shapes = trace.sql("SELECT DISTINCT input_shapes FROM merged WHERE input_shapes IS NOT NULL").fetchall()
    assert shapes == [("[[10, 3]]",)]
    assert figures(trace, "flops")["aten::addmm"] is None
    same = of_many_lengths(77, 77, 77)
    assert figures(same, "flops")["aten::addmm"] == 99
    assert [finding for finding in health(same) if finding.subject == "shapes"] == []


# --- which step the merged one is -------------------------------------------------------------------------


def test_the_merged_step_is_of_the_deepest_rung_the_commonest_structure_and_the_median_duration() -> None:
    odd = Part(Kind.STEP, "s", 200, (NET._replace(parts=(module("net", 100, A),)),))
    plan = [(STEP, Level.OP, 1.3), (odd, Level.OP, 1.1), (STEP, Level.OP, 1.1), (STEP, Level.OP, 1.2),
            (odd, Level.OP, 1.1), (STEP, Level.MODEL, 1.0)]  # fmt: skip
    rows = [
        row
        for step, (part, rung, slower) in enumerate(plan)
        for row in run(part, rung, slower, step=step, timed=True)[0]
    ]
    trace = trace_of(rows)
    assert trace.sql("SELECT DISTINCT step, rung FROM merged").fetchall() == [(3, Level.OP)]


def test_where_all_structures_are_equally_common_the_merged_step_is_that_of_the_median_duration() -> None:
    rows = [
        row
        for step, ms in enumerate((900, 100, 500, 300, 700))  # each step calls another layer, as data may have it
        for row in run(
            Part(Kind.STEP, "s", 1000, (NET._replace(parts=(module(f"net.{step}", ms, A),)),)),
            Level.OP, ms / 100, step=step, timed=True,
        )[0]
    ]  # fmt: skip
    for seed in range(5):
        random.Random(seed).shuffle(rows)
        assert trace_of(rows).sql("SELECT DISTINCT step FROM merged").fetchall() == [(2,)]


def test_a_run_at_one_deep_rung_averages_and_claims_no_true_time_below_the_model() -> None:
    rows = [row for step in range(4) for row in run(STEP, Level.OP, step=step, timed=True)[0]]
    found = figures(trace_of(rows), "steps", "raw_ns", "true_ns")
    assert found["net.b"] == (4, B.true_ns + 2 * 4 * US + 2 * 2 * US, None)
    assert found["s"][2] is None


def test_a_run_at_the_model_level_alone_is_true_as_it_is() -> None:
    rows = [row for step in range(4) for row in run(STEP, Level.MODEL, step=step, timed=True)[0]]
    assert figures(trace_of(rows), "true_ns", "raw_ns")["s"] == (STEP.true_ns, STEP.true_ns)


def test_without_a_timed_step_there_is_a_structure_and_no_time() -> None:
    trace = trace_of(run(STEP, Level.OP, step=0, timed=False)[0])
    assert trace.rungs == []
    assert set(figures(trace, "true_ns", "raw_ns").values()) == {(None, None)}
    assert len(trace.merged) == len(list(STEP.all()))


def test_without_any_step_the_merged_step_is_empty() -> None:
    assert len(trace_of([]).merged) == 0


def rung_of(added_us: float, low_us: float | None, high_us: float, calibrated_ns: float | None = 350.0) -> Rung:
    """Return a rung that adds 1,000 spans."""
    added = None if low_us is None else stats.Interval(low_us * US, added_us * US, high_us * US)
    return Rung(int(Level.OP), 5, 10_000.0 * US, added_us * US, added, 1_000, calibrated_ns)


def test_a_span_costs_what_the_steps_say_where_they_say_it_and_what_the_calibration_says_where_they_do_not() -> None:
    sure, noisy, once = rung_of(600, 590, 610), rung_of(2_559, 500, 8_000), rung_of(900, None, 0)
    assert sure.cost_ns == pytest.approx(600, rel=0.01)
    assert 350 < noisy.cost_ns < 550  # by the steps alone seven times the calibration
    assert once.cost_ns == pytest.approx(350)  # a single step has no interval
    assert (noisy.per_span_ns, once.per_span_ns) == (2_559, 900)
    for each in (sure, noisy, once):
        assert each.cost_interval.low <= each.cost_ns <= each.cost_interval.high
    assert noisy.cost_interval.high - noisy.cost_interval.low < 4 * 350
    assert rung_of(-5_000, -9_000, -1_000).cost_ns >= 0


def test_without_a_calibration_a_span_costs_what_the_steps_say() -> None:
    noisy = rung_of(2_559, 500, 8_000, calibrated_ns=None)
    assert noisy.cost_ns == 2_559
    assert noisy.cost_interval == stats.Interval(500, 2_559, 8_000)


def test_operators_keep_their_own_time_where_steps_were_disturbed() -> None:
    """Steps with operators took up to 3 ms more for something else: by the steps alone, nothing would be left of it."""
    extra_us, steps = iter((0, 3_000, 700)), []
    for row in leveled("M/L", repeats=3):
        more = next(extra_us, 0) * US if row.kind == Kind.STEP and row.rung == Level.OP and row.timed else 0
        steps.append(row._replace(dur_ns=(row.dur_ns or 0) + more))
    costs = {"costs": {"torchops": {"ns_per_span": 2.0 * US, "level": int(Level.OP), "rounds": 7}}}
    assert figures(trace_of(steps, costs), "true_ns")["aten::linear"] == pytest.approx(325 * US, abs=2 * US)
    assert figures(trace_of(steps), "true_ns")["aten::linear"] == 305 * US  # of the operators inside it
