"""How much slower other work on the machine may have made requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from xsp.evaluate import contention


def test_the_share_of_time_that_tasks_waited_for_cores_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pressure, stat = tmp_path / "pressure", tmp_path / "stat"
    now = iter([10.0, 14.0])
    monkeypatch.setattr(contention.time, "perf_counter", lambda: next(now))
    pressure.write_text("some avg10=1.00 avg60=2.00 avg300=3.00 total=1000000\nfull avg10=0 total=5\n")
    stat.write_text("cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 1 1\n")
    watch = contention.Watch(pressure, stat)
    pressure.write_text("some avg10=1.00 avg60=2.00 avg300=3.00 total=3000000\n")
    stat.write_text("cpu  150 0 100 830 0 0 0 20 0 0\n")
    assert watch.changes() == {"waited_for_cores": 0.5, "stolen": 0.2}
    assert contention.slowdown({"waited_for_cores": 0.5, "stolen": 0.2, "load": 9}, 2) == pytest.approx(2.5)


def test_what_cannot_be_read_is_unknown_and_the_load_average_stands_for_it(tmp_path: Path) -> None:
    (tmp_path / "odd").write_text("some\x00 total=x\n")
    found = contention.Watch(tmp_path / "odd", tmp_path / "none").changes()
    assert found == {"waited_for_cores": None, "stolen": None}
    assert contention.slowdown({**found, "load": 5.0}, 2) == pytest.approx(2.5)
    assert contention.slowdown({**found, "load": 0.4}, 2) == 1.0
    assert contention.slowdown({}, None) == 1.0
    assert contention.slowdown({"load": "much"}, "two") == 1.0
    assert contention.slowdown({"waited_for_cores": 1.0}, 2) == contention.MOST_SLOWDOWN
