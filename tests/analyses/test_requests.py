"""Tables of requests that engines served: planted causes are named, and figures are those of the schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engines import MS, served, trace

import xsp
from xsp import analyses, serving
from xsp.account.requests import figures, goodput, reasons, token_gaps
from xsp.account.served import requests, steps
from xsp.account.serving import remedy, sentence
from xsp.cli import main
from xsp.errors import AnalysisError, TraceError
from xsp.health import health
from xsp.record import session
from xsp.report import html
from xsp.report.firstscreen import first_screen
from xsp.serving import PARTS, Engine
from xsp.store.trace import Trace
from xsp.testing import spans, trace_of


def named(found: Trace) -> dict[str, str]:
    return {key[2]: reason for key, reason in reasons(found).items()}


def test_each_request_has_what_its_latency_went_to_the_longest_first() -> None:
    found = trace(
        [
            *served(20),
            ("arrive", "late", 5000),
            ("step", 5060, 5070, ("late", "prefill", 5)),
            ("finish", "late", 5071, "ok"),
        ]
    )
    table = analyses.requests(found)
    columns = table.columns
    rows = [dict(zip(columns, row, strict=True)) for row in table.fetchall()]
    assert (rows[0]["request"], rows[0]["latency_ms"], rows[0]["queue_ms"], rows[0]["slow_by"]) == (
        "late",
        71,
        60,
        "queue",
    )
    for row in rows:
        assert sum(row[f"{name}_ms"] for name in PARTS) == pytest.approx(row["latency_ms"])
    assert (rows[1]["ttft_ms"], rows[1]["tpot_ms"], rows[1]["host_ms"]) == (11, 11.5, 4)


def test_a_long_neighbour_preemption_and_long_answers_are_told_apart() -> None:
    quiet = served(18)
    neighbour = [
        ("arrive", "hit", 5000, 5), ("arrive", "long", 5005, 2000),
        ("step", 5001, 5011, ("hit", "prefill", 5)),
        ("step", 5013, 5313, ("hit", "decode", 1), ("long", "prefill", 2000)),
        ("finish", "hit", 5314, "ok"),
        ("finish", "long", 5315, "cancelled"),
    ]  # fmt: skip
    assert named(trace([*quiet, *neighbour])) == {"hit": "prefill of long", "long": "its own tokens"}
    preempted = [
        ("arrive", "out", 5000, 5),
        ("step", 5001, 5011, ("out", "prefill", 5)), ("step", 5012, 5512, ("other", "decode", 1)),
        ("step", 5513, 5520, ("out", "decode", 1)), ("finish", "out", 5521, "ok"),
    ]  # fmt: skip
    assert named(trace([*quiet, ("arrive", "other", 4999), *preempted]))["out"] == "preempted"


def test_figures_are_those_of_the_schedule() -> None:
    found = trace(served(40))
    values = {each.name: each for each in figures(found)}
    assert values["time to first token p50"].value == 11
    assert values["latency p99"].value == 35
    assert values["time between tokens p50"].value in (11, 12)
    assert values["output tokens"].value == pytest.approx(120 / 3.935)
    assert values["time to first token p50"].observations == 40
    assert sorted(token_gaps(found)) == [11 * MS] * 40 + [12 * MS] * 40
    assert [row[0] for row in analyses.request_figures(found).fetchall()] == list(values)


def test_a_sentence_says_what_latencies_went_to_and_which_request_was_slowest() -> None:
    late = [("arrive", "late", 5000), ("step", 5965, 5970, ("late", "prefill", 5)), ("finish", "late", 5971, "ok")]
    found = trace([*served(20), *late])
    assert sentence(found) == (
        "Requests: 21 ended, median latency 35.0 ms, first token after 11.0 ms; of all latencies 59 % queue, "
        "36 % own tokens, 5 % host between steps. To shorten them: in 100 % of the time in which requests "
        "waited, no step ran: see what the engine's loop does then. Slowest: late, 971 ms (queue)."
    )
    assert sentence(found) in first_screen(found).kinds
    assert sentence(trace_of(spans("step s 0-9"))) == ""


def test_the_remedy_follows_from_what_engines_did_while_requests_waited() -> None:
    def batch(waiting: int, at_once: int) -> list[tuple[Any, ...]]:
        """Of requests that come together, some wait for the steps of the others."""
        names = [f"r{number}" for number in range(at_once + waiting)]
        statements: list[tuple[Any, ...]] = [("arrive", name, 0, 5) for name in names]
        for number, chosen in enumerate((names[:at_once], names[at_once:])):
            at = 1000 * number
            statements += [("step", at + 1, at + 500, *((name, "prefill", 5) for name in chosen))]
            statements += [("step", at + 501, at + 999, *((name, "decode", 1) for name in chosen))]
            statements += [("finish", name, at + 999, "ok") for name in chosen]
        return statements

    assert remedy(trace(batch(4, 4))).startswith("serve more than 4 requests at once")
    wider = [("step", 3000, 3001, *((f"x{number}", "decode", 1) for number in range(9)))]
    assert remedy(trace([*batch(4, 4), *wider])).startswith("admit requests earlier")
    assert remedy(trace(served(20))).startswith("schedule the next step"), "a ninth of the latency is the host's"


def test_the_remedy_for_prompts_of_others_is_to_read_them_in_chunks() -> None:
    statements = served(4)
    for number in range(4):
        at = 5000 + 1000 * number
        statements += [
            ("arrive", f"hit{number}", at, 5), ("step", at, at + 10, (f"hit{number}", "prefill", 5)),
            ("step", at + 10, at + 400, (f"hit{number}", "decode", 1), (f"long{number}", "prefill", 3000)),
            ("finish", f"hit{number}", at + 400, "ok"), ("finish", f"long{number}", at + 400, "cancelled"),
        ]  # fmt: skip
    assert remedy(trace(statements)).startswith("read prompts in chunks")


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    found = trace([*served(30), ("arrive", "gone", 4000), ("finish", "gone", 4001, "cancelled")])
    assert goodput(found).share.value == pytest.approx(30 / 31)
    assert goodput(found, ttft_ms=10.9).share.value == 0
    kept = goodput(found, ttft_ms=11, tpot_ms=12, latency_ms=35)
    assert kept.share.low < kept.share.value < kept.share.high
    assert kept.per_s == pytest.approx(30 / 4.001)


def test_goodput_with_a_limit_on_each_time_between_tokens() -> None:
    uneven = [("arrive", "even", 5000, 5), ("step", 5001, 5011, ("even", "prefill", 5)),
              ("step", 5013, 5053, ("even", "decode", 1)), ("finish", "even", 5054, "ok")]  # fmt: skip
    found = trace([*served(9), *uneven])
    assert goodput(found, itl_ms=12).share.value == pytest.approx(0.9)
    assert goodput(found, itl_ms=42).share.value == 1
    again = [("arrive", "even", 6000, 5), ("step", 6001, 6011, ("even", "prefill", 5)),
             ("step", 6012, 6022, ("even", "decode", 1)), ("finish", "even", 6023, "ok")]  # fmt: skip
    assert goodput(trace([*served(8), *uneven, *again]), itl_ms=12).share.value == pytest.approx(0.9)


def test_limits_on_the_command_line_are_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine, run = Engine("mine"), tmp_path / "run"
    with xsp.profile("served", out=run):
        for number in range(10):
            engine.arrive(number, prompt_tokens=2)
            with engine.step([(number, "prefill", 2)]):
                pass
            engine.finish(number)
        engine.arrive("gone")
        engine.finish("gone", "cancelled")
    capsys.readouterr()
    assert main(["analyze", str(run), "request-figures", "--format", "json", "--ttft", "60000", "--itl", "60000"]) == 0
    rows = {row["figure"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["requests within the limits"]["value"] == pytest.approx(100 * 10 / 11)
    assert rows["goodput"]["count"] == 11
    assert main(["analyze", str(run), "request-figures", "--format", "json", "--latency", "0.000001"]) == 0
    assert {row["figure"]: row["value"] for row in json.loads(capsys.readouterr().out)}["goodput"] == 0
    assert main(["analyze", str(run), "ops", "--ttft", "5"]) == 2
    assert "xsp analyze RUN request-figures --ttft 500" in capsys.readouterr().err
    for wrong in ("-1", "x", "nan"):
        with pytest.raises(SystemExit):
            main(["analyze", str(run), "request-figures", "--itl", wrong])
        assert "is no number of milliseconds above 0" in capsys.readouterr().err


def test_chunks_of_a_prompt_are_no_time_between_tokens() -> None:
    found = trace([
        ("arrive", "a", 0), ("step", 0, 10, ("a", "prefill", 10)), ("step", 10, 20, ("a", "prefill", 10)),
        ("step", 20, 35, ("a", "decode", 1)), ("finish", "a", 36, "ok"),
    ])  # fmt: skip
    assert token_gaps(found) == [15 * MS]
    assert requests(found)[0].ttft_ns == 20 * MS


def test_steps_have_their_kind_and_the_gap_before() -> None:
    found = trace([
        ("arrive", "a", 0), ("arrive", "b", 0), ("step", 1, 11, ("a", "prefill", 4)),
        ("step", 14, 20, ("a", "decode", 1), ("b", "prefill", 7)), ("step", 21, 25),
        ("step", 26, 30, ("b", "decode", 1)),
    ])  # fmt: skip
    table = analyses.engine_steps(found)
    rows = table.select("kind, ms, gap_ms, requests, prefill_tokens, decode_tokens").fetchall()
    assert rows == [
        ("prefill", 10, None, 1, 4, 0), ("mixed", 6, 3, 2, 7, 1), ("idle", 4, 1, 0, 0, 0), ("decode", 4, 1, 1, 0, 1)
    ]  # fmt: skip
    kinds = analyses.engine_kinds(found).select("kind, steps, round(percent_of_time), gap_ms, tokens_per_s").fetchall()
    assert kinds == [
        ("prefill", 1, 42, None, 400), ("mixed", 1, 25, 3, pytest.approx(8 / 0.006)), ("idle", 1, 17, 1, 0),
        ("decode", 1, 17, 1, 250),
    ]  # fmt: skip


def test_without_engines_the_tables_say_what_to_do() -> None:
    plain = trace_of(spans("step s 0-9"))
    for name in ("requests", "request-figures", "engine-steps", "engine-kinds"):
        with pytest.raises(AnalysisError, match=r"traced\.engine"):
            analyses.ANALYSES[name](plain)
    with pytest.raises(AnalysisError, match="no request of an engine that ended"):
        goodput(plain)


@pytest.mark.slow
def test_a_run_holds_the_requests_and_all_steps_of_its_engines(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    net, engine = torch.nn.Linear(8, 8).eval(), Engine("mine")
    with xsp.profile("served", out=tmp_path / "run", warmup=1) as prof:
        for number in range(60):
            engine.arrive(number, prompt_tokens=2)
            for phase in ("prefill", "decode"):
                with prof.step(), engine.step([(number, phase, 2 if phase == "prefill" else 1)]):
                    net(torch.ones(2, 8))
            engine.finish(number)
        engine.arrive("open")
    assert serving._sinks == []
    found = xsp.load(tmp_path / "run")
    assert len(steps(found)) == 120
    assert len(requests(found)) == 61
    assert {each.status for each in requests(found)} == {"ok", "unclosed"}
    for each in requests(found):
        assert sum(each.parts.values()) == each.latency_ns
    notes = json.dumps(json.loads((tmp_path / "run" / "run.json").read_text())["notes"])
    assert notes.count("1 request never ended ('open')") == 1
    assert not found.con.execute("SELECT 1 FROM spans WHERE collector = 'serving'").fetchall()
    found.con.close()
    with xsp.profile("served", out=tmp_path / "run", warmup=1, overwrite=True) as prof:
        for _ in range(8):
            with prof.step():
                net(torch.ones(2, 8))
    assert not requests(xsp.load(tmp_path / "run"))


@pytest.mark.parametrize(
    ("inside_s", "reason"), [(0.0, "was never entered"), (5.0, "child processes computed for 5 s")]
)
def test_child_processes_that_ended_before_the_block_are_no_reason_for_a_run_without_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside_s: float, reason: str
) -> None:
    children_s = [13.0]
    monkeypatch.setattr(session, "_children_s", lambda: children_s[0])
    with xsp.profile("idle", out=tmp_path / "run"):
        children_s[0] += inside_s
    assert reason in str(json.loads((tmp_path / "run" / "run.json").read_text())["empty"])


@pytest.mark.parametrize("kept", ["whole", "interrupted"])
def test_a_run_without_a_step_of_a_model_has_the_requests(tmp_path: Path, kept: str) -> None:
    engine, run = Engine("mine"), tmp_path / "run"
    with xsp.profile("served", out=run):
        for number in range(20):
            engine.arrive(number, prompt_tokens=2)
            with engine.step([(number, "prefill", 2)]):
                pass
            engine.finish(number)
    if kept == "interrupted":
        content = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({**content, "finished": False, "empty": None}))
    found = xsp.load(run)
    assert len(requests(found)) == len(steps(found)) == 20
    assert len(analyses.requests(found).fetchall()) == 20
    screen = first_screen(found)
    assert screen.kinds.startswith("Requests: 20 ended")
    if kept == "whole":
        assert screen.sentence == "Requests and steps of an engine are known, and no step of a model that it calls."
        [steps_finding] = [each for each in health(found) if each.subject == "steps"]
        assert "prof.step() was never entered" in steps_finding.text
    page = tmp_path / "page.html"
    html.write(found, page)
    assert page.stat().st_size


@pytest.mark.slow
def test_a_job_of_ranks_has_the_requests_of_those_without_a_step(tmp_path: Path) -> None:
    engine = Engine("mine")
    for rank in range(2):
        with xsp.profile("served", out=tmp_path / "job" / f"rank-{rank:04d}"):
            engine.arrive("only", prompt_tokens=2)
            with engine.step([("only", "prefill", 2)]):
                pass
            engine.finish("only")
    found = xsp.load(tmp_path / "job")
    assert len(requests(found)) == 2


def test_a_run_with_neither_steps_nor_requests_is_refused(tmp_path: Path) -> None:
    with xsp.profile("nothing", out=tmp_path / "run"):
        pass
    with pytest.raises(TraceError, match="the run holds no step"):
        xsp.load(tmp_path / "run")


@pytest.mark.slow
def test_compilation_is_named_in_a_run(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch._dynamo.reset()
    net, engine = torch.compile(torch.nn.Linear(8, 8).eval(), backend="eager", dynamic=False), Engine("mine")
    with xsp.profile("compiled", out=tmp_path / "run", warmup=1, every=10) as prof:
        for number in range(40):
            engine.arrive(number, prompt_tokens=2)
            with prof.step(), engine.step([(number, "prefill", 2)]):
                net(torch.ones(2 + (number == 20), 8))
            engine.finish(number)
    found = {each.request: each for each in requests(xsp.load(tmp_path / "run"))}
    for name in ("0", "20"):
        assert found[name].parts["compiling"] > 0.3 * found[name].latency_ns
    assert found["30"].parts["compiling"] == 0
