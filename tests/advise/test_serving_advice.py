"""Advice on engines: each planted flaw is named with its bound, and a sound engine gets none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from engines import MS, served, trace

from xsp import analyses
from xsp.account.served import requests
from xsp.account.serving import Flaw, flaws, lives, remedy, sentence
from xsp.advise import advisor, text
from xsp.advise.advice import Advice
from xsp.report.firstscreen import first_screen
from xsp.schema import Kind, Level, Span
from xsp.store.trace import Trace
from xsp.testing import spans, trace_of


def pieces(found: Trace) -> list[Advice]:
    return list(advisor.of(found, only=["serving"]).advice)


def the(found: Trace, name: str) -> Flaw:
    [flaw] = [flaw for flaw in flaws(found) if flaw.name == name]
    return flaw


def sound(count: int = 12) -> list[tuple[Any, ...]]:
    """Return requests of four users whose steps follow at once, with six tokens each."""
    statements: list[tuple[Any, ...]] = []
    for number in range(count):
        at, names = 1000 * number, [f"r{4 * number + user}" for user in range(4)]
        statements += [("arrive", name, at, 8) for name in names]
        statements += [("step", at, at + 60, *((name, "prefill", 8) for name in names))]
        statements += [
            ("step", at + 60 + 40 * place, at + 99 + 40 * place, *((name, "decode", 1) for name in names))
            for place in range(5)
        ]
        statements += [("finish", name, at + 260, "ok") for name in names]
    return statements


def test_a_sound_engine_gets_no_advice_and_a_trace_without_requests_no_question() -> None:
    found = trace(sound())
    assert flaws(found) == []
    report = advisor.of(found, only=["serving"])
    assert report.answered == ("serving",)
    plain = advisor.of(trace_of(spans("step s 0-9")), only=["serving"])
    assert plain.answered == ()
    assert not plain.unanswered


def test_the_gain_is_a_share_of_the_mean_request_and_at_most_its_part() -> None:
    found = trace([*sound(2), ("arrive", "late", 5000, 5), ("step", 8000, 8100, ("late", "prefill", 5)),
                   ("finish", "late", 8100, "ok")])  # fmt: skip
    [piece] = pieces(found)
    assert (piece.of, piece.at_most) == ("a request", True)
    assert piece.gain.value == pytest.approx(3000 / 9)
    assert piece.of_step_percent == pytest.approx(100 * 3000 / (3100 + 8 * 260))
    page = text.page(advisor.of(found, only=["serving"]))
    assert "58 % of a request" in page.replace("\n", " ")
    assert not [each for each in first_screen(found).advice if each.of], "its sentence on requests has the remedy"
    assert piece.do in first_screen(found).kinds


def batch(most: int, step_ms: int, extra_ms: int) -> list[tuple[Any, ...]]:
    """Return an engine that serves at most so many of 16 requests at once; a step takes longer with more of them."""
    statements: list[tuple[Any, ...]] = [("arrive", f"r{number}", 0, 5) for number in range(16)]
    at, waiting, running = 1, list(range(16)), {}
    while waiting or running:
        while waiting and len(running) < most:
            number = waiting.pop(0)
            running[number] = 4 + number % 5
        end = at + step_ms + extra_ms * len(running)
        parts = [(f"r{number}", "decode", 1) for number in running]
        statements.append(("step", at, end, *parts))
        for number in list(running):
            running[number] -= 1
            if not running[number]:
                del running[number]
                statements.append(("finish", f"r{number}", end, "ok"))
        at = end
    return statements


def test_a_small_batch_is_named_and_another_engine_where_larger_batches_gain_nothing() -> None:
    light = the(trace(batch(4, 20, 1)), "queue")
    assert light.do.startswith("serve more than 4 requests at once")
    assert "a decode step takes 20.0 ms, and 1.00 ms for each request" in light.why[1]
    assert "71 % faster" in light.why[1]  # 2 × 24 ÷ 28
    heavy = the(trace(batch(4, 0, 20)), "queue")
    assert heavy.do.startswith("serve with another engine, or a faster model: more than 4 requests at once gain little")


def stalled(kind: str) -> list[tuple[Any, ...]]:
    """Return requests whose decoding waits for a long prompt, in their steps or between them."""
    statements = sound(3)
    for number in range(3):
        at, name, long = 5000 + 1000 * number, f"hit{number}", f"long{number}"
        statements += [("arrive", name, at, 5), ("arrive", long, at + 50, 3000),
                       ("step", at, at + 40, (name, "prefill", 5)),
                       ("step", at + 40, at + 80, (name, "decode", 1))]  # fmt: skip
        long_part = (long, "prefill", 3000)
        if kind == "mixed":
            statements += [("step", at + 80, at + 520, (name, "decode", 1), long_part)]
        else:
            statements += [("step", at + 80, at + 520, long_part), ("step", at + 520, at + 560, (name, "decode", 1))]
        statements += [("finish", name, at + 560, "ok"), ("finish", long, at + 560, "cancelled")]
    return statements


@pytest.mark.parametrize(("kind", "longer"), [("mixed", 401), ("prompts alone", 440)])
def test_prompts_that_stall_decoding_are_named_whether_they_share_steps_or_run_between_them(
    kind: str, longer: int
) -> None:
    found = trace(stalled(kind))
    flaw = the(found, "stalled")
    assert flaw.mean_ns == pytest.approx(3 * longer * MS / 15)
    assert flaw.do.startswith("read prompts in chunks")
    assert "with 256 tokens of prompts a step takes about twice as long" in flaw.do
    assert "3 times a request waited for a step with prompts of 3,000 tokens" in flaw.why[0]
    assert not [each for each in flaws(found) if each.name == "left out"], "nothing was left out: the cache is not full"


def test_a_full_cache_is_named_with_what_is_read_again() -> None:
    statements = sound(3)
    for number in range(3):
        at, out, other = 5000 + 1000 * number, f"out{number}", f"in{number}"
        statements += [("arrive", out, at, 20), ("arrive", other, at, 20),
                       ("step", at, at + 40, (out, "prefill", 20), (other, "prefill", 20)),
                       ("step", at + 40, at + 80, (out, "decode", 1), (other, "decode", 1))]  # fmt: skip
        statements += [("step", at + 80 + 40 * n, at + 120 + 40 * n, (other, "decode", 1)) for n in range(5)]
        statements += [("finish", other, at + 280, "ok"), ("step", at + 280, at + 330, (out, "prefill", 21)),
                       ("step", at + 330, at + 370, (out, "decode", 1)), ("finish", out, at + 370, "ok")]  # fmt: skip
    flaw = the(trace(statements), "left out")
    assert flaw.do.startswith("give the cache more memory")
    assert flaw.mean_ns == pytest.approx(3 * (200 + 50) * MS / 18)
    assert flaw.why == (
        "3 times other steps ran between two steps of a request, 200 ms each", "63 tokens were read again after that",
    )  # fmt: skip


def test_requests_that_end_with_their_batch_are_named() -> None:
    statements: list[tuple[Any, ...]] = []
    for number in range(6):
        at, short, long = 1000 * number, f"short{number}", f"long{number}"
        statements += [("arrive", name, at, 5) for name in (short, long)]
        statements += [("step", at, at + 40, (short, "prefill", 5), (long, "prefill", 5))]
        statements += [("step", at + 40 * n, at + 40 * n + 40, (long, "decode", 1)) for n in range(1, 10)]
        statements += [("finish", name, at + 400, "ok") for name in (short, long)]
    found = trace(statements)
    flaw = the(found, "late")
    assert flaw.mean_ns == pytest.approx(360 / 2 * MS)
    assert "continuous batching" in remedy(found)
    assert flaw.why == ("6 of 12 requests, 360 ms in the median",)


def test_time_between_steps_is_bounded_by_the_steps_that_it_could_run_beside() -> None:
    statements: list[tuple[Any, ...]] = []
    for number in range(4):
        at, name = 1000 * number, f"r{number}"
        statements += [("arrive", name, at, 5), ("step", at, at + 10, (name, "prefill", 5)),
                       *(("step", at + 40 * n, at + 10 + 40 * n, (name, "decode", 1)) for n in range(1, 6)),
                       ("finish", name, at + 210, "ok")]  # fmt: skip
    flaw = the(trace(statements), "host")
    assert flaw.mean_ns == pytest.approx(5 * 10 * MS), "of 150 ms between steps of 10 ms"
    assert flaw.why == ("30.0 ms between two steps in the median, beside 10.0 ms for a step",)


def calls(shapes: Sequence[tuple[int, int, str]]) -> list[Span]:
    return [
        Span(level=Level.MODEL, kind=Kind.FORWARD.value, name="Llama", start_ns=start * MS, dur_ns=dur * MS, step=0,
             span_id=f"{1000 + start:016x}", input_shapes=shape)
        for start, dur, shape in shapes
    ]  # fmt: skip


def test_padding_is_known_from_the_shapes_of_recorded_calls() -> None:
    padded = calls(
        [(1, 50, "[[4, 32], [4, 32]]"), (61, 30, "[[4, 1]]"), (1001, 50, "[[4, 32]]"), (5050, 20, "[[9, 9]]")]
    )
    flaw = the(trace(sound(), padded), "padding")
    assert flaw.what == "75 % of the tokens that prefill steps compute are padding"
    assert flaw.mean_ns == pytest.approx(0.75 * 60 * MS)
    assert flaw.why == ("256 tokens in 2 recorded prefill steps, 64 of them of requests",)
    packed = calls([(1, 50, "[[1, 32]]"), (61, 30, "[[4, 1]]"), (1001, 50, '"?"')])
    assert flaws(trace(sound(), packed)) == []


def test_what_recording_adds_is_known_from_steps_alike() -> None:
    statements: list[tuple[Any, ...]] = []
    for number in range(6):
        at, name, longer = 1000 * number, f"r{number}", 50 if number == 4 else 0
        statements += [("arrive", name, at, 5), ("step", at, at + 40, (name, "prefill", 5)),
                       ("step", at + 41, at + 81 + longer, (name, "decode", 1)),
                       ("step", at + 82 + 2 * longer, at + 122 + 2 * longer, (name, "decode", 1)),
                       ("finish", name, at + 123 + 2 * longer, "ok")]  # fmt: skip
    mine = spans("step s 0-9")[0]._replace(start_ns=4042 * MS, dur_ns=88 * MS, span_id="f" * 16)
    found = trace(statements, [mine], step=None)
    added = {each.request: each.recording_ns / MS for each in requests(found)}
    assert added == {**{f"r{number}": 0 for number in range(6)}, "r4": 100}
    table = analyses.requests(found).select("request, recording_ms").fetchall()
    assert dict(table)["r4"] == 100
    assert analyses.engine_steps(found).filter("recorded").select("number, recording_ms").fetchall() == [(13, 50)]
    assert "What recorded steps took longer, about 12 %, is left out." in sentence(found)
    assert [row[1] for row in analyses.request_figures(found).fetchall() if row[0] == "recording, mean"] == [
        pytest.approx(100 / 6)
    ]
    assert not any(each.recording_ns for each in requests(trace(sound(), step=None)))


def test_a_life_is_whole_and_has_no_gap() -> None:
    found = trace(stalled("mixed"))
    for request, life in lives(found, 100):
        assert life[0].start_ns == request.start_ns
        assert life[-1].end_ns == request.start_ns + request.latency_ns
        assert all(a.end_ns == b.start_ns for a, b in pairwise(life))
    [hit] = [life for request, life in lives(found, 100) if request.request == "hit0"]
    assert [(part.name, part.steps, part.tokens) for part in hit] == [
        ("prefill", 1, 5), ("decode", 2, 2), ("waiting", 0, 0)
    ]  # fmt: skip
    assert len(lives(found, 3)) == 3


def test_an_id_that_comes_again_is_another_request() -> None:
    statements: list[tuple[Any, ...]] = []
    for number in range(4):
        at = 1000 * number
        statements += [("arrive", "same", at, 5), ("step", at, at + 40, ("same", "prefill", 5))]
        statements += [("step", at + 40, at + 80, ("same", "decode", 1)), ("finish", "same", at + 80, "ok")]
    assert flaws(trace(statements)) == []


@pytest.mark.slow
def test_thousands_of_requests_take_no_quadratic_time() -> None:
    assert remedy(trace(served(3000))).startswith("schedule the next step")


FLAWS = Path(__file__).parents[2] / "benchmarks" / "flaws"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [("engine_static_batches", "continuous batching"), ("engine_text_decoded_again", "between steps")],
)
def test_planted_flaws_of_real_engines_are_named_first(tmp_path: Path, name: str, words: str) -> None:
    pytest.importorskip("transformers")
    for mended in ((), ("--mended",)):
        run = tmp_path / f"run{len(mended)}"
        command = [sys.executable, "-m", "xsp.cli", "run", "-q", "-o", str(run), str(FLAWS / f"{name}.py"), *mended]
        subprocess.run(command, check=True, timeout=300, cwd=FLAWS, env={**_environment(), "STEPS": "40"})
        found = advisor.of(str(run), only=["serving"], max_needs=advisor.Needs.TRACE).advice
        if mended:
            assert not [piece for piece in found if words in f"{piece.what} {piece.do}"]
        else:
            assert words in f"{found[0].what} {found[0].do}"


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "OMP_NUM_THREADS": "1"}
