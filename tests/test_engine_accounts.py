"""The account of a request that an engine served in several steps: it adds up, and names what the time went to."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from engines import Told
from hypothesis import given, settings
from hypothesis import strategies as st

from xsp import clock, serving
from xsp.serving import PARTS, Engine, EngineStep, Part, RequestAccount, Requests
from xsp.store import requestrows

MS = 1_000_000
QUICK = settings(max_examples=150, deadline=None)


@pytest.fixture
def told() -> Iterator[Told]:
    log = Told()
    serving.attach(log)
    yield log
    serving.detach(log)
    log.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "xsp serves"]


def parts_of(account: RequestAccount) -> dict[str, int]:
    return {name: ns for name, ns in zip(PARTS, account.parts, strict=True) if ns}


# --- laws ---------------------------------------------------------------------------------------------------


@st.composite
def schedules(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """Draw what an engine does: arrivals, steps that serve any of the open requests, and ends, also inside steps."""
    now, statements, running, last_end = 0, [], [], 0
    count = draw(st.integers(1, 6))
    for _ in range(draw(st.integers(1, 25))):
        now += draw(st.integers(0, 1000))
        if count and draw(st.booleans()):
            count -= 1
            request = f"r{count}"
            running.append(request)
            statements.append(("arrive", (request, now, draw(st.sampled_from([None, 3, 40])))))
        served = draw(st.lists(st.sampled_from(running), unique=True)) if running else []
        start = max(now, last_end) + draw(st.integers(0, 50))
        end = start + draw(st.integers(0, 5000))
        parts = [
            Part(
                request,
                draw(st.sampled_from(["prefill", "decode"])),
                draw(st.integers(1, 600)),
                draw(st.sampled_from([None, 0, 1, 3])),
            )
            for request in served
        ]
        ends = draw(st.lists(st.sampled_from(running), unique=True, max_size=2)) if running else []
        finishes = [("finish", (request, draw(st.integers(start, end + 100)), "ok")) for request in ends]
        step = ("step", (EngineStep(start, end, parts, compiling_ns=draw(st.sampled_from([0, 0, 700]))),))
        statements += [*finishes, step] if draw(st.booleans()) else [step, *finishes]
        running = [request for request in running if request not in ends]
        now = last_end = end
    return statements


def accounts_of(statements: Sequence[tuple[str, Any]], **options: Any) -> tuple[list[RequestAccount], int]:
    requests = Requests(lambda text: None, **options)
    accounts: list[RequestAccount] = []
    now = 0
    for name, arguments in statements:
        accounts += getattr(requests, name)(*arguments) or []
        now = max([now, *(argument for argument in arguments if type(argument) is int)])
        if name == "step":
            now = max(now, arguments[0].end_ns)
    return accounts + requests.close(now), now


@QUICK
@given(schedules())
def test_the_parts_of_every_request_add_up_to_its_latency(statements: list[tuple[str, Any]]) -> None:
    accounts, _ = accounts_of(statements)
    assert len(accounts) == sum(name == "arrive" for name, _ in statements)
    for account in accounts:
        assert sum(account.parts) == account.latency_ns
        assert min(account.parts) >= 0
        if account.first_token_ns is not None:
            assert account.first_parts is not None
            assert sum(account.first_parts) == account.first_token_ns - account.arrival_ns
            assert all(first <= whole for first, whole in zip(account.first_parts, account.parts, strict=True))
            assert account.arrival_ns <= account.first_token_ns <= (account.last_token_ns or 0) <= account.end_ns


@pytest.mark.slow
@QUICK
@given(schedules())
def test_the_life_of_a_request_is_whole_but_for_the_host(statements: list[tuple[str, Any]]) -> None:
    for account in accounts_of(statements, keeps_segments=True)[0]:
        ends = [account.arrival_ns, *(segment.end_ns for segment in account.segments)]
        starts = [*(segment.start_ns for segment in account.segments), account.end_ns]
        gaps = [start - end for start, end in zip(starts, ends, strict=True)]
        assert min(gaps) >= 0
        inside = [s.end_ns - s.start_ns for s in account.segments if s.name == "decode"]
        assert sum(gaps) <= account.parts[serving.HOST]
        assert sum(gaps) == account.parts[serving.HOST] or inside  # host between steps of decoding is inside it


@pytest.mark.slow
@QUICK
@given(schedules())
def test_the_own_times_of_all_requests_of_a_step_add_up_to_the_step(statements: list[tuple[str, Any]]) -> None:
    accounts, _ = accounts_of([statement for statement in statements if statement[0] != "finish"])
    steps = [arguments[0] for name, arguments in statements if name == "step" and arguments[0].parts]
    own = sum(account.parts[serving.OWN_PREFILL] + account.parts[serving.OWN_DECODE] for account in accounts)
    work = sum(max(0, step.end_ns - step.start_ns - step.compiling_ns) for step in steps)
    assert abs(own - work) <= sum(len(step.parts) for step in steps)  # whole nanoseconds


# --- what is what -------------------------------------------------------------------------------------------


def run(*statements: tuple[Any, ...]) -> dict[Any, RequestAccount]:
    accounts, _ = accounts_of([(name, arguments) for name, *arguments in statements])
    return {account.request: account for account in accounts}


def step(start: int, end: int, *parts: tuple[Any, ...]) -> tuple[str, EngineStep]:
    return "step", EngineStep(start, end, [Part(*part) for part in parts])


def test_a_step_is_shared_by_tokens_and_a_long_neighbour_is_named() -> None:
    found = run(
        ("arrive", "a", 0), ("arrive", "long", 0),
        step(100, 200, ("a", "prefill", 10)),
        step(210, 1210, ("a", "decode", 1), ("long", "prefill", 999)),
        step(1220, 1320, ("a", "decode", 1), ("long", "decode", 1)),
        ("finish", "a", 1330, "ok"),
    )  # fmt: skip
    a = found["a"]
    assert parts_of(a) == {
        "queue": 100, "own_prefill": 100, "own_decode": 51, "others_prefill": 999, "others_decode": 50, "host": 30,
    }  # fmt: skip
    assert a.largest_prefill == ("long", 999)
    assert (a.first_token_ns, a.last_token_ns, a.output_tokens, a.prompt_tokens) == (200, 1320, 3, 10)
    assert found["long"].status == "unclosed"


def test_steps_without_a_request_that_has_begun_preempt_it() -> None:
    found = run(
        ("arrive", "a", 0), ("arrive", "b", 0),
        step(0, 10, ("a", "prefill", 5)),
        step(20, 30, ("b", "prefill", 5)),
        step(40, 50, ("a", "decode", 1)),
        ("finish", "a", 60, "cancelled"),
    )  # fmt: skip
    assert parts_of(found["a"]) == {"own_prefill": 10, "own_decode": 10, "preempted": 30, "host": 10}
    assert found["a"].status == "cancelled"


@pytest.mark.parametrize("prompt_tokens", [None, 30])
def test_a_prompt_in_chunks_has_its_token_with_the_last_one(prompt_tokens: int | None) -> None:
    found = run(
        ("arrive", "a", 0, prompt_tokens),
        *(step(start, start + 10, ("a", "prefill", 10)) for start in (0, 10, 20)),
        step(30, 40, ("a", "decode", 1)),
        ("finish", "a", 40, "ok"),
    )
    account = found["a"]
    assert (account.first_token_ns, account.output_tokens, account.prompt_tokens) == (30, 2, 30)


def test_a_prompt_that_is_computed_again_after_preemption_counts_once() -> None:
    found = run(
        ("arrive", "a", 0, 20),
        step(0, 10, ("a", "prefill", 20)),
        step(10, 20, ("a", "decode", 1)),
        step(20, 30, ("b", "decode", 1)),
        step(30, 40, ("a", "prefill", 12)),
        step(40, 50, ("a", "prefill", 10)),
        ("finish", "a", 50, "ok"),
    )
    account = found["a"]
    assert (account.first_token_ns, account.output_tokens, account.prompt_tokens) == (10, 3, 20)
    assert account.last_token_ns == 50


def test_a_request_that_ends_in_a_queue_waited_there() -> None:
    found = run(("arrive", "a", 0), step(10, 20, ("b", "decode", 1)), ("finish", "a", 90, "cancelled"))
    assert parts_of(found["a"]) == {"queue": 90}
    assert found["a"].first_token_ns is None


def test_an_end_inside_a_step_is_that_of_the_step() -> None:
    found = run(("arrive", "a", 0), ("finish", "a", 15, "cancelled"), step(10, 20, ("a", "prefill", 4)))
    assert (found["a"].end_ns, parts_of(found["a"])) == (20, {"queue": 10, "own_prefill": 10})


# --- what is stated wrongly ---------------------------------------------------------------------------------


def test_engines_of_a_program_have_their_own_ids(told: Told) -> None:
    one, two = Engine("one"), Engine("two")
    for engine in (one, two):
        engine.arrive("a")
        with engine.step([("a", "prefill", 5)]):
            pass
        engine.finish("a")
    told.drain()
    assert [account.status for account in told.accounts] == ["ok", "ok"]
    assert told.notes == []


def test_what_is_stated_wrongly_becomes_one_sentence_each_and_the_program_continues(told: Told) -> None:
    engine = Engine("mine")
    for request in ("twice", "again"):
        engine.arrive(request)
        engine.arrive(request)
    bad: list[Any] = [
        [],
        [("twice", "prefil", 3)],
        [("twice", "prefill", 0)],
        [("twice", "decode", 1)] * 2,
        [1],
        [([],)],
    ]
    for requests in bad:
        with engine.step(requests):
            pass
    engine.finish("nobody")
    with engine.step([("unannounced", "prefill", 3)]):
        pass
    engine.finish("unannounced")
    with engine.step([("unannounced", "decode", 1)]):
        pass
    told.close()
    texts = " | ".join(told.notes)
    for text in (
        "'twice' arrived again before it ended", "served no request: it is idle", "('prefil', 3, None) is not",
        "served twice in one step", "requests are not valid", "had neither arrived nor been served",
        "whose arrival was not stated", "'unannounced' after its end", "2 requests never ended ('twice', 'again')",
    ):  # fmt: skip
        assert texts.count(text) == 1, (text, told.notes)
    assert Counter(account.status for account in told.accounts) == {"ok": 1, "unclosed": 2}


def test_an_error_in_a_step_passes_and_is_the_steps_status(told: Told) -> None:
    engine = Engine("mine")
    with pytest.raises(KeyError), engine.step([("a", "prefill", 3)]):
        raise KeyError("mine")
    engine.finish("a", "error:KeyError")
    told.drain()
    assert [step.status for _, step in told.steps] == ["error:KeyError"]
    assert [account.status for account in told.accounts] == ["error:KeyError"]


def test_a_step_may_state_at_its_end_what_it_computed_or_not_take_place(told: Told) -> None:
    engine = Engine("mine")
    step = engine.step([("a", "prefill", 3, 1)])
    step.begin()
    step.end(parts=[("a", "prefill", 3, 4)])
    dropped = engine.step([("a", "decode", 1)])
    dropped.begin()
    dropped.drop()
    dropped.end()
    assert engine.running == 0
    engine.finish("a")
    told.drain()
    told.drain()
    assert len(told.steps) == 1
    assert [(account.output_tokens, account.steps) for account in told.accounts] == [(4, 1)]


def test_without_a_sink_nothing_is_kept() -> None:
    engine = Engine("mine")
    engine.arrive("a")
    with engine.step([("a", "prefill", 3)]):
        pass
    engine.finish("a")
    assert not engine._known
    assert not [thread for thread in threading.enumerate() if thread.name == "xsp serves"]


def test_requests_of_other_threads_arrive_while_the_engine_runs(told: Told) -> None:
    engine, ids = Engine("mine"), list(range(200))
    waiting: list[int] = []

    def send() -> None:
        for request in ids:
            engine.arrive(request, prompt_tokens=4)
            waiting.append(request)
            time.sleep(0.0002)

    sender = threading.Thread(target=send)
    sender.start()
    left, running = len(ids), []
    while left:
        new = [waiting.pop(0) for _ in range(min(len(waiting), 16 - len(running)))]
        with engine.step([*((r, "prefill", 4) for r in new), *((r, "decode", 1) for r, _ in running)]):
            time.sleep(0.0005)
        running = [(r, n + 1) for r, n in running] + [(r, 1) for r in new]
        for r, n in running:
            if n == 3:
                engine.finish(r)
                left -= 1
        running = [(r, n) for r, n in running if n < 3]
    sender.join()
    told.drain()
    assert len(told.accounts) == 200
    assert {account.output_tokens for account in told.accounts} == {3}
    for account in told.accounts:
        assert sum(account.parts) == account.latency_ns
        assert account.has_arrival


def test_compilation_in_a_step_is_a_part_of_its_own() -> None:
    offset_ns = clock.anchor().offset_ns
    start_ns = clock.monotonic_ns()
    compiled = [(start_ns + offset_ns + 20 * MS, start_ns + offset_ns + 50 * MS), (offset_ns, offset_ns + 10)]
    compiled.append((start_ns + offset_ns + 30 * MS, start_ns + offset_ns + 60 * MS))  # nested ones count once
    log, engine = Told(compilations=lambda: compiled), Engine("mine")
    log.put(engine, "arrive", "a", start_ns)
    log.put(engine, "step", EngineStep(start_ns, start_ns + 100 * MS, [Part("a", "prefill", 4)]))
    log.put(engine, "step", EngineStep(start_ns + 100 * MS, start_ns + 110 * MS, [Part("a", "decode", 1)]))
    log.put(engine, "finish", "a", start_ns + 110 * MS, "ok")
    log.close()
    [account] = log.accounts
    assert sum(account.parts) == account.latency_ns == 110 * MS
    assert account.parts[serving.COMPILING] == pytest.approx(40 * MS, rel=0.05)
    assert account.parts[serving.OWN_PREFILL] == pytest.approx(60 * MS, rel=0.05)
    assert account.parts[serving.OWN_DECODE] == 10 * MS


def test_rows_say_what_they_are(told: Told) -> None:
    engine = Engine("mine", model_name="llama")
    engine.arrive("a", prompt_tokens=4)
    with engine.step([("a", "prefill", 4)]):
        pass
    engine.finish("a")
    told.drain()
    [(number, one)], [account] = told.steps, told.accounts
    step_row, request_row = requestrows.step_row(engine, number, one, 5), requestrows.request_row(engine, account, 5)
    assert (step_row.kind, step_row.name, step_row.batch_size, step_row.start_ns) == (
        "step",
        "prefill",
        1,
        one.start_ns + 5,
    )
    assert json.loads(json.loads(step_row.attributes or "")["xsp.serving.parts"]) == [["a", "prefill", 4, None]]
    attributes = json.loads(request_row.attributes or "")
    assert request_row.kind == "request"
    assert attributes["gen_ai.usage.input_tokens"] == 4
    assert attributes["gen_ai.usage.output_tokens"] == 1
    assert sum(attributes[f"xsp.serving.{name}_ns"] for name in PARTS) == request_row.dur_ns
    assert clock.monotonic_ns() > account.end_ns
