"""All outputs say the same of the same part of an iteration, because they read one account of it.

Every share and time of a part that the first screen, the tables, the page, advice, health and the evidence for agents
state is collected from what these print, and compared by name.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from depth import first
from madeprograms import Program

from xsp import account
from xsp.advise import Needs, advisor, calls
from xsp.advise.advice import AdviceContext
from xsp.analyses.answers import Answers
from xsp.evidence import answers as evidence
from xsp.health import health
from xsp.ingest.load import load
from xsp.report.firstscreen import first_screen
from xsp.report.headline import headline
from xsp.report.html import screen_data
from xsp.schema import Level
from xsp.store.loop import BARE
from xsp.store.trace import Trace
from xsp.testing import spans, trace_of, with_loop

SHARED = Path(__file__).resolve().parents[3] / "shared"
SOURCE: dict[str, Any] = {}


class Statement(NamedTuple):
    """What an output says of a part of an iteration; None for a figure that it does not state."""

    output: str
    part: str
    ms: float | None
    percent: float | None
    digits: int = 12
    """Significant digits that the output prints."""


def statements(trace: Trace) -> Iterator[Statement]:
    """Yield what all outputs say of the parts of an iteration of the trace's kind, of the rank that stands for it."""
    accounted = account.of(trace)
    main = accounted.job
    assert main is not None
    answers, screen = Answers(trace), first_screen(trace)
    for side, lines in (("host", screen.host), (screen.device_name, screen.device)):
        name = "host" if side == "host" else "device"
        for line in lines:
            if line.name != "other":
                yield Statement("first screen", f"{name}: {line.name}", line.ms, line.percent)
    for side in screen_data(screen)["sides"]:
        name = "host" if side["name"] == "host" else "device"
        for part, ms, percent, _ in side["parts"]:
            if part != "other":
                yield Statement("page", f"{name}: {part}", ms, float(percent.split()[0]), 1)
    busiest = main.device
    for row in answers["account"].dicts():
        is_shown = row["side"] in (None, "host") or (busiest is not None and row["side"] == busiest.name)
        if (row["rank"], row["kind"]) == (main.rank, main.kind) and is_shown:
            side = {None: "", "host": "host: "}.get(row["side"], "device: ")
            yield Statement("account", side + row["part"], row["ms"], row["percent_of_iteration"])
    for row in answers["phases"].dicts():
        side = "" if row["phase"] == "iteration" else "host: "
        yield Statement("phases", side + row["phase"], row["ms"], row["percent_of_iteration"])
    for row in answers["loop"].dicts():
        if row["kind"] == trace.kind and row["scope"] == "program" and row["iteration_ms"] is not None:
            yield Statement("loop", "iteration", row["iteration_ms"], None)
            for column, part in (("data_ms", "waiting for data"), ("between_ms", "between steps")):
                if row[column]:
                    yield Statement("loop", f"host: {part}", row[column], 100 * row[column] / row["iteration_ms"])
    for label, value, _ in headline(answers, []):
        if label == "device busy":
            yield Statement("page", "device busy", None, float(value.split()[0]), 3)
    if busiest is not None and not accounted.forbids("busy"):
        yield Statement("account", "device busy", busiest.ms("busy"), main.percent(busiest.ms("busy")))
    for each in evidence.summary(trace, SOURCE)["statements"]:
        found = re.match(r"(host|device)[^:]*: (.*) takes ", each["says"]) if each["source"] == "account" else None
        if found and found[2] != "other":
            yield Statement("evidence", f"{found[1]}: {found[2]}", each["figures"]["ms"], each["figures"]["percent"])
    for each in evidence.time(trace, SOURCE)["statements"]:
        if each["source"] == "phases":
            part = each["says"].partition(" takes ")[0]
            yield Statement(
                "evidence, time", f"host: {part}", each["figures"]["ms"], each["figures"]["percent_of_iteration"]
            )
    for finding in health(trace):
        for percent, part in re.findall(r"(waiting for data|other work between steps) (\d+) %", finding.text):
            yield Statement("health", f"host: {percent.removeprefix('other work ')}", None, float(part), 0)


def check(trace: Trace) -> int:
    """Compare all statements by part, and return the number of those that at least two outputs make."""
    by_part: dict[str, list[Statement]] = defaultdict(list)
    for each in statements(trace):
        by_part[each.part].append(each)
    compared = 0
    for said in by_part.values():
        exact = [each for each in said if each.digits == 12]
        for one in said:
            for other in exact:
                compared += one.output != other.output
                if one.ms is not None and other.ms is not None:
                    assert one.ms == pytest.approx(other.ms, rel=1e-9), (one, other)
                if one.percent is not None and other.percent is not None:
                    is_rounded = one.digits < 12
                    slack = {"abs": 0.51, "rel": 0.01} if is_rounded else {"rel": 1e-9}
                    assert one.percent == pytest.approx(other.percent, **slack), (one, other)
    total = sum(
        each.percent or 0.0 for each in statements(trace) if each.output == "phases" and each.part != "iteration"
    )
    assert total == pytest.approx(100, abs=0.1), "the phases add up to the iteration"
    check_advice(trace)
    return compared


def check_advice(trace: Trace) -> None:
    """No advice promises more than the entry that it shrinks, and its document is about the same iteration."""
    main = account.of(trace).job
    assert main is not None
    result = advisor.of(trace, max_needs=Needs.TRACE)
    if result.step is not None:
        assert result.step.ms.value == pytest.approx(main.time.ms)
    for piece in result.advice:
        entry = main.host[piece.entry] if piece.entry is not None else None
        if entry is not None and entry.ms is not None:
            assert piece.gain.value <= entry.ms * (1 + 1e-9), piece
            assert piece.of_step_percent <= (main.percent(entry.ms) or 0.0) + 1e-6, piece


def phases_of_calls(trace: Trace) -> dict[str, float]:
    """Return the milliseconds of each phase in the tree of calls from which gains are computed."""
    result: dict[str, float] = defaultdict(float)
    for root in calls.roots(AdviceContext(trace), with_device=True):
        pending = [root] if root.kind == "step" else []
        while pending:
            call = pending.pop()
            if call.kind in ("forward", "backward", "optimizer"):
                result[call.kind] += call.ns / 1e6
            else:
                pending += call.children
    return result


@pytest.mark.parametrize("deep", [0.5, 2.0])
def test_calls_from_which_gains_are_computed_take_what_the_account_states(deep: float) -> None:
    """Steps recorded with operators have a forward pass of another length than those recorded with models only."""
    shallow, whole = (
        "step s 0-10000\nforward N 0-4000\nbackward N 4000-9000",
        ("step s 0-10000\nforward N 0-{0}\nmodule n 0-{0}\nop aten::mm 0-{0}\nbackward N {0}-9000"),
    )
    rows = [span for step in (20, 40, 60) for span in spans(shallow, step=step)]
    rows += [span for step in (30, 50, 70) for span in spans(whole.format(4000 * deep), step=step)]
    rungs = {step: Level.OP if step % 20 else Level.MODEL for step in range(20, 80, 10)}
    loop = [{"step": step, "dur_ns": 10e6, "rung": rungs.get(step, BARE)} for step in range(100)]
    trace = with_loop(trace_of(rows), loop)
    main = account.of(trace).main
    assert main is not None
    found = phases_of_calls(trace)
    assert set(found) == {"forward", "backward"}
    for phase, ms in found.items():
        assert ms == pytest.approx(main.host.ms(phase), rel=1e-6)


@pytest.mark.parametrize("seed", first(1, range(8)))
def test_all_outputs_agree_on_a_made_trace(seed: int) -> None:
    program = Program(seed).run()
    assert check(trace_of(program.spans, {"imported": {"sources": []}})) > 10


@pytest.mark.parametrize("seed", first(1, range(8)))
def test_all_outputs_agree_on_a_run_with_iterations_that_were_not_recorded(seed: int) -> None:
    draw = random.Random(seed)
    program = Program(seed).run()
    step_ns = 1e3 * program.truth.wall / program.truth.iterations
    rows = [
        {"step": 100 + number, "start_ns": int(2e9 * number), "dur_ns": step_ns * draw.uniform(0.7, 1.0),
         "before_ns": step_ns * draw.uniform(0.2, 0.6), "data_ns": step_ns * draw.choice((0.0, 0.1, 0.3))}
        for number in range(30)
    ]  # fmt: skip
    assert check(with_loop(trace_of(program.spans), rows)) > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    "reports/traces/h100_timesformer.json.gz",
    "traces/kineto_nvidia/tracelens_h100_qwen1.5-0.5b.json.gz",
    "traces/kineto_nvidia/kineto_sample_resnet50_workers0_1623143089861.json.gz",
    "traces/kineto_nvidia/hta_a100_alexnet_critical_path.json.gz",
])  # fmt: skip
def test_all_outputs_agree_on_a_sample_trace(name: str) -> None:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"needs the sample trace {name} in shared/")
    assert check(load(path)) > 10
