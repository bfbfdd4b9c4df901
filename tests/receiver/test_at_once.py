"""One client's disk is no other client's: nothing that waits for files holds what all need."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from depth import deep

import xsp
from xsp import rundir, table
from xsp.importers.otlp_json import parts_of
from xsp.receiver.journal import RunWriter

PATIENCE_S = 60


def request(run: str) -> Any:
    """Return the parts of a request with one span of a run."""

    def text(key: str, value: str) -> dict[str, Any]:
        return {"key": key, "value": {"stringValue": value}}

    span = {
        "traceId": run * 2, "spanId": run, "name": "step", "startTimeUnixNano": "1000", "endTimeUnixNano": "2000",
        "attributes": [text("xsp.kind", "step"), text("xsp.level", "MODEL"), {"key": "xsp.step",
                       "value": {"intValue": "0"}}],
    }  # fmt: skip
    resource = {"attributes": [text("xsp.run.id", run), text("xsp.run.name", f"run {run[:2]}")]}
    document = {"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": [span]}]}]}
    return list(parts_of(json.loads(json.dumps(document)), "test"))


@pytest.mark.parametrize("slow", ["write_columns", deep("write_run")])
def test_a_client_whose_files_are_synced_slowly_keeps_no_other_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    first, second = "ab" * 8, "cd" * 8
    owner: Any = table if slow == "write_columns" else rundir
    plain = getattr(owner, slow)
    begun, go_on = threading.Event(), threading.Event()

    def waits(*arguments: Any) -> Any:
        if any("run-ab" in str(each) for each in arguments) and not begun.is_set():
            begun.set()
            assert go_on.wait(PATIENCE_S)
        return plain(*arguments)

    monkeypatch.setattr(owner, slow, waits)
    receiving = RunWriter(tmp_path / "out", lambda line: None)
    slowly = threading.Thread(target=receiving.store, args=(request(first),))
    slowly.start()
    try:
        assert begun.wait(PATIENCE_S)
        assert receiving.store(request(second)).spans == 1
        receiving.tidy()
        assert slowly.is_alive()
    finally:
        go_on.set()
        slowly.join(PATIENCE_S)
    receiving.close()
    assert sorted(xsp.load(place).run.name for place in (tmp_path / "out").iterdir()) == ["run ab", "run cd"]


def test_requests_of_one_run_at_once_lose_nothing(tmp_path: Path) -> None:
    receiving = RunWriter(tmp_path / "out", lambda line: None)
    ids = [f"ab{number:014x}" for number in range(24)]

    def send(mine: list[str]) -> None:
        for identity in mine:
            (part,) = request("ab" * 8)
            (spoken,) = part.spans
            receiving.store([part._replace(spans=[spoken._replace(span_id=identity)])])
            receiving.tidy()

    senders = [threading.Thread(target=send, args=(ids[place::4],)) for place in range(4)]
    for each in senders:
        each.start()
    for each in senders:
        each.join(PATIENCE_S)
    receiving.close()
    (place,) = (tmp_path / "out").iterdir()
    found = xsp.load(place).sql("SELECT span_id FROM spans ORDER BY 1").fetchall()
    assert [identity for (identity,) in found] == ids


@pytest.mark.slow
def test_what_comes_again_is_counted_however_often_the_run_is_put_in_order_meanwhile(tmp_path: Path) -> None:
    for _ in range(3):  # begun again, as a receiver that goes on with what is there
        receiving = RunWriter(tmp_path, lambda line: None)
        for _ in range(2):
            receiving.store(request("ab" * 8))
            receiving.tidy(include_unfinished=True)
        receiving.close()
    (place,) = tmp_path.iterdir()
    assert xsp.load(place).run["received"]["doubled"] == 5
