"""A receiver ends soon, whatever is left to do, and the next one does it; requests that wait are written together."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest
from depth import deep
from servicespans import of_service

import xsp
from xsp import rundir, table
from xsp.receiver import journal
from xsp.receiver.journal import GroupCommit, RunWriter

PATIENCE_S = 60


def steps(place: Path) -> list[tuple[Any, ...]]:
    return (
        xsp.load(place)
        .sql("SELECT step, count(*), count(*) FILTER (kind = 'step') FROM spans GROUP BY 1 ORDER BY 1")
        .fetchall()
    )


def long_query(_: Path, __: Path, opened: Callable[[Any], None]) -> None:
    with table.connect() as con:
        opened(con)
        con.execute("SELECT sum(a.range * b.range) FROM range(10_000_000) a, range(10_000_000) b").fetchall()


def long_sleep(_: Path, __: Path, opened: Callable[[Any], None]) -> None:
    threading.Event().wait(PATIENCE_S / 20)
    raise OSError("it was cut off")


@pytest.mark.parametrize(("slow", "has_ended"), [(long_query, True), deep(long_sleep, False)])
def test_what_is_not_in_order_in_time_is_put_in_order_by_the_next_receiver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: Any, has_ended: bool
) -> None:
    said = list[str]()
    receiving = RunWriter(tmp_path / "out", said.append)
    for number in range(1, 5):
        receiving.store(of_service(number))
    with monkeypatch.context() as patched:
        patched.setattr(journal, "put_in_order", slow)
        begin_s = time.monotonic()
        assert receiving.close(0.1) is has_ended
        assert time.monotonic() - begin_s < PATIENCE_S / 2
    place = tmp_path / "out" / "services"
    if has_ended:
        assert said == [
            f"not in order yet: services; the next xsp serve --out {tmp_path / 'out'} does it, and xsp can load it as "
            "it is"
        ]
        with pytest.raises(xsp.errors.OutputError, match="is ending"):
            receiving.store(of_service(5))
        assert steps(place) == [(number, 2, 1) for number in range(4)]
        assert any((place / rundir.INBOX).iterdir())
        following = RunWriter(tmp_path / "out", said.append)
        following.tidy()
        assert said[-1] == f"{place}: 4 steps, 8 spans"
        assert not (place / rundir.INBOX).exists()
        following.close()


@pytest.mark.slow
def test_an_order_that_is_cut_off_between_two_files_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps of services are made of their traces: what an earlier attempt made is not taken as given."""
    receiving = RunWriter(tmp_path / "out", lambda _: None)
    for number in range(1, 5):
        receiving.store(of_service(number))
    plain, written = table.write_parquet, list[Path]()

    def fails(con: duckdb.DuckDBPyConnection, name: str, path: Path) -> None:
        if path.parent.name == rundir.STEPS and len(written) == 2:
            raise OSError("killed here")
        plain(con, name, path)
        written.append(path)

    with monkeypatch.context() as patched:
        patched.setattr(table, "write_parquet", fails)
        receiving.tidy(include_unfinished=True)
    assert len(written) == 2
    place = tmp_path / "out" / "services"
    expected = [(number, 2, 1) for number in range(4)]
    assert steps(place) == expected
    receiving.close()
    assert steps(place) == expected


def test_requests_that_wait_are_committed_together_and_an_error_is_that_of_its_own() -> None:
    begun, go_on = threading.Event(), threading.Event()
    committed = list[list[int]]()

    def commit(entries: list[int]) -> None:
        committed.append(entries)
        if entries == [0]:
            begun.set()
            assert go_on.wait(PATIENCE_S)
        if 13 in entries:
            raise ValueError("unlucky")

    group = GroupCommit(commit)
    errors = dict[int, Exception | None]()

    def add(number: int) -> None:
        try:
            group.add(number)
            errors[number] = None
        except ValueError as error:
            errors[number] = error

    threads = [threading.Thread(target=add, args=(number,)) for number in (0, 11, 12, 13)]
    threads[0].start()
    assert begun.wait(PATIENCE_S)
    for thread in threads[1:]:
        thread.start()
    deadline_s = time.monotonic() + PATIENCE_S
    while len(group._waiting) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    go_on.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [sorted(entries) for entries in committed][:2] == [[0], [11, 12, 13]]
    assert sorted(committed[2:]) == [[11], [12], [13]]
    assert [number for number, error in errors.items() if error is not None] == [13]


def test_too_many_spans_in_one_request_are_refused_and_nothing_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_SPANS", 3)
    receiving = RunWriter(tmp_path / "out", lambda _: None)
    with pytest.raises(journal.BodyTooLarge, match="more than 3 spans"):
        receiving.store([*of_service(1), *of_service(2)])
    assert receiving.store(of_service(1)).spans == 2
    receiving.close()


@pytest.mark.slow
def test_an_interrupt_ends_a_receiver_of_many_spans_within_seconds(tmp_path: Path) -> None:
    """Alone it takes below 5 s; 100,000 spans in traces of one need more than that to be put in order."""
    pytest.importorskip("opentelemetry.proto")
    from realparts import ServeProcess
    from test_serve import many

    receiver = ServeProcess(tmp_path / "received")
    try:
        for sender in range(20):
            assert receiver.post(many(5_000, sender)).status_code == 200
        begin_s = time.monotonic()
        printed = receiver.end(signal.SIGINT)
        assert time.monotonic() - begin_s < 15
        assert "100000 spans received" in printed
        place = tmp_path / "received" / "services"
        assert xsp.load(place).sql("SELECT count(*) FROM spans").fetchall() == [(100_000,)]
        if "not in order yet" not in printed:  # a fast machine
            return
        receiver.start_again()
        deadline_s = time.monotonic() + 10 * PATIENCE_S
        while (place / rundir.INBOX).exists() and time.monotonic() < deadline_s:
            time.sleep(0.2)
        assert not (place / rundir.INBOX).exists()
        receiver.end(signal.SIGINT)
        assert xsp.load(place).sql("SELECT count(*) FROM spans").fetchall() == [(100_000,)]
    finally:
        receiver.process.kill()
        receiver.process.communicate()
