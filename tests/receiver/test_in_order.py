"""Spans that are put in order: what is there already stays, and a run without steps harms no other."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
from servicespans import of_service

import xsp
from xsp import rundir, semconv, table
from xsp.correlate.evidence import correlate
from xsp.errors import TraceError, UsageError
from xsp.importers.otlp import OtlpSpan, ScopeSpans
from xsp.ingest import received
from xsp.receiver import journal
from xsp.receiver.journal import RunWriter
from xsp.record.loop import LoggedStep, Loop, Status
from xsp.run import Otel
from xsp.schema import Level
from xsp.store import loop
from xsp.testing import spans

RUN = {"id": "ab" * 8, "name": "net", "end_ns": 2_000_000, "finished": True,
       "kinds": [{"kind": 0, "name": "net"}]}  # fmt: skip
OWN = Otel.of({"trace_id": "ab" * 16, "span_id": "cd" * 8})


def with_loop(run: Path, steps: int) -> Any:
    """Give a run directory a loop, and return an engine that holds it."""
    rows, con = Loop(), table.connect()
    for step in range(steps):
        start_ns = 10_000 * (step + 1)
        rows.add(LoggedStep(0, step, 1, 0, int(Level.APPLICATION), 1, start_ns, 9_000, 100, 0, 5, 8, Status.OK))
    loop.append(run, rows.take(), 0)
    loop.create_table(con, [run])
    return con


def waiting(run: Path) -> Path:
    """Write a run whose loop of 40 steps is in order, and of which a recorded step waits."""
    rundir.create(run)
    rundir.write_run(run, {**RUN, "finished": False, "received": {"requests": 2, "runs": [RUN]}})
    loop.write(with_loop(run, 40), run)
    text = "step s 0-100\nforward Net 10-90"
    rows = correlate(spans(text, trace_id="1".zfill(32), step=40, rung=int(Level.MODEL), timed=True))
    (run / rundir.INBOX).mkdir()
    con = table.connect()
    table.create(con, "waiting")
    table.insert(con, "waiting", rows)
    table.write_parquet(con, "waiting", run / rundir.INBOX / "000000000.parquet")
    return run


def test_a_run_with_spans_that_wait_loads_with_its_loop(tmp_path: Path) -> None:
    assert len(xsp.load(waiting(tmp_path / "run")).loop) == 40


def test_a_run_that_is_put_in_order_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, query_of = waiting(tmp_path), received._arrived_query

    def overtaken(*arguments: Any) -> str:
        query = query_of(*arguments)
        monkeypatch.undo()
        received.put_in_order(run, run)
        return query

    monkeypatch.setattr(received, "_arrived_query", overtaken)
    found = xsp.load(run).sql("SELECT count(*) FROM spans").fetchall()
    assert found == xsp.load(run).sql("SELECT count(*) FROM spans").fetchall() != [(0,)]
    assert not rundir.has_waiting_spans(run)


def test_of_a_run_with_spans_that_wait_a_kind_of_step_can_be_chosen(tmp_path: Path) -> None:
    run = waiting(tmp_path / "run")
    with pytest.raises(UsageError, match="no kind of step called 'prefill'; there are: 0 net"):
        xsp.load(run, kind="prefill")


def test_a_copy_that_a_file_manager_made_does_not_keep_a_receiver_from_starting(tmp_path: Path) -> None:
    arrived = waiting(tmp_path / "out" / "net") / rundir.INBOX / "000000000.parquet"
    arrived.with_name("000000000 2.parquet").write_bytes(arrived.read_bytes())
    said = list[str]()
    RunWriter(tmp_path / "out", said.append).close()
    assert said == [f"{tmp_path / 'out' / 'net'}: 1 steps, 2 spans"]


def test_traces_of_services_become_steps_after_a_restart_of_the_receiver_too(tmp_path: Path) -> None:
    late = OtlpSpan("1".zfill(32), "cd" * 8, "1".zfill(16), "query", 999_999, 1_000_000, {})  # the first of its name
    for session in (
        [*of_service(1), *of_service(2)],
        [*of_service(3), *of_service(4), ScopeSpans({}, "http", [late])],
    ):
        receiving = RunWriter(tmp_path / "out", lambda text: None)
        receiving.store(session)
        receiving.close()
    found = xsp.load(tmp_path / "out" / "services")
    steps = found.sql(
        "SELECT step, count(*), count(DISTINCT key), count(*) FILTER (kind = 'step') FROM spans GROUP BY 1 ORDER BY 1"
    )
    assert steps.fetchall() == [(0, 3, 3, 1), (1, 2, 2, 1), (2, 2, 2, 1), (3, 2, 2, 1)]
    assert len(found.run.notes) == 1


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), duckdb.IOException("No space left")])
def test_what_could_not_be_put_in_order_is_put_in_order_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    said = list[str]()
    receiving = RunWriter(tmp_path / "out", said.append)
    receiving.store(of_service(1))
    with monkeypatch.context() as patched:
        patched.setattr(journal, "put_in_order", fails)
        receiving.tidy(include_unfinished=True)
    receiving.close()
    assert "No space left; what arrived is kept in" in said[0]
    assert said[1:] == [f"{tmp_path / 'out' / 'services'}: 1 steps, 2 spans"]


def _of_run(con: Any) -> Iterator[ScopeSpans]:
    """Yield the run's own span and the spans of its loop, as a sender without steps sends them."""
    described = {"xsp.kind": "run", "xsp.level": "application", semconv.RUN: json.dumps(RUN)}
    own = OtlpSpan(OWN.trace_id, OWN.span_id, None, "run", 1, 2_000_000, described)
    parts = [
        OtlpSpan(each.trace_id, each.span_id, each.parent_id, each.name, each.start_ns, each.start_ns + each.dur_ns,
               {"xsp.kind": each.kind, "xsp.level": each.level, **json.loads(each.attributes or "")})
        for each in loop.spans(con, OWN)
    ]  # fmt: skip
    yield ScopeSpans({semconv.RUN_ID: RUN["id"], semconv.RUN_NAME: "net", semconv.RANK: 0}, "xsp", [own, *parts])


def test_a_run_that_recorded_no_step_arrives_with_its_loop_alone(tmp_path: Path) -> None:
    sender, said = tmp_path / "sender", list[str]()
    sender.mkdir()
    receiving = RunWriter(tmp_path / "out", said.append)
    assert receiving.store(_of_run(with_loop(sender, 40))).rejected == 0
    receiving.close()
    (place,) = (tmp_path / "out").iterdir()
    assert said == [f"{place}: 0 steps, 0 spans"]
    assert (place / rundir.LOOP_FILE).is_file()
    with pytest.raises(TraceError, match="holds no step"):
        xsp.load(place)
