"""MLPerf's LoadGen drives the same function; without it the error says what to install."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import pytest

from xsp.errors import UsageError, XspError
from xsp.evaluate.load import loadgen

here = pytest.mark.skipif(importlib.util.find_spec("mlperf_loadgen") is None, reason="needs mlcommons-loadgen")

SUMMARY = """================================================
MLPerf Results Summary
================================================
SUT name : PySUT
Scenario : SingleStream
90th percentile latency (ns) : 2130391
Result is : VALID
QPS w/ loadgen overhead         : 487.33
Min latency (ns)                : 2052110
target_latency (ns): 0
"""


def test_the_summary_is_read_by_its_own_names() -> None:
    found = loadgen.summary(SUMMARY)
    assert found["90th percentile latency (ns)"] == 2130391
    assert found["QPS w/ loadgen overhead"] == 487.33
    assert found["target_latency (ns)"] == 0
    assert "SUT name" not in found


@pytest.mark.skipif(importlib.util.find_spec("mlperf_loadgen") is not None, reason="mlcommons-loadgen is here")
def test_without_it_the_error_says_what_to_install() -> None:
    with pytest.raises(UsageError, match=r"pip install 'xsp\[loadgen\]'"):
        loadgen.drive_loadgen("online", lambda number, batch: None, 1)


@here
@pytest.mark.parametrize(
    ("kind", "more", "sizes"),
    [
        ("online", {}, {1}),
        ("multi-stream", {"streams": 4}, {4}),
        ("server", {"rate": 200.0, "latency_ns": 100_000_000}, {1}),
    ],
)
def test_it_issues_requests_of_each_scenario(kind: str, more: dict, sizes: set[int]) -> None:
    found = loadgen.drive_loadgen(kind, lambda number, batch: time.sleep(0.002), 30, **more)
    assert len(found.requests) >= 30
    assert set(found.requests.batch.tolist()) == sizes
    assert (found.requests.service_ns >= 2_000_000).all()
    assert found.figures["Min latency (ns)"] >= 2_000_000


@here
def test_offline_issues_all_inputs_in_one_request() -> None:
    found = loadgen.drive_loadgen("offline", lambda number, batch: time.sleep(0.002), 100)
    assert len(found.requests) == 1
    assert found.requests.batch[0] >= 100


@here
def test_an_error_of_the_model_ends_the_test_and_is_raised() -> None:
    def serve(number: int, batch: int) -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        loadgen.drive_loadgen("online", serve, 5)
    with pytest.raises(UsageError, match="no scenario 'burst'"):
        loadgen.drive_loadgen("burst", serve, 5)


def test_a_manifest_may_have_loadgen_issue_its_requests(tmp_path: Path) -> None:
    pytest.importorskip("pydantic")
    from evaluations import FACTS, show_nothing

    from xsp.evaluate import reading, results, running
    from xsp.evaluate.agents import Options

    model = {"name": "path", "source": "micro:path-3"}
    scenario = {"kind": "online", "requests": 20, "warmup": 2, "driver": "loadgen"}
    asked = reading.of_plain({"model": model, "dataset": {"samples": 4}, "scenario": scenario}).manifest
    if importlib.util.find_spec("mlperf_loadgen") is None:
        with pytest.raises(XspError, match=r"pip install 'xsp\[loadgen\]'"):
            running.evaluate(asked, tmp_path, Options(tmp_path / "store"), FACTS, show_nothing)
        return
    found = results.read(running.evaluate(asked, tmp_path, Options(tmp_path / "store"), FACTS, show_nothing))
    assert len(found.requests()) >= 20
    assert found.parts[0]["batch"] == 1


@pytest.mark.parametrize(
    ("scenario", "why"),
    [
        ({"kind": "poisson", "rate": 5.0}, "but not poisson"),
        ({"kind": "server", "rate": 5.0}, "needs latency_ms"),
        ({"kind": "online", "batch": 4}, "one input"),
    ],
)
def test_what_loadgen_has_not_is_refused(scenario: dict, why: str) -> None:
    pytest.importorskip("pydantic")
    from xsp.evaluate import reading

    with pytest.raises(XspError, match=why):
        reading.of_plain({"model": {"name": "m"}, "scenario": {**scenario, "driver": "loadgen"}})
