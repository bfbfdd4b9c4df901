"""What the generator of many ranks' traces put in is what the analyses find."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from parts import rank_traces

import xsp
from xsp.analyses import ANALYSES
from xsp.health import health
from xsp.health.finding import Severity
from xsp.store.trace import Trace


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Eight ranks in two groups: rank 5 is slow, rank 2 left no file."""
    place = tmp_path_factory.mktemp("job")
    job = rank_traces.Job(ranks=8, steps=2, layers=3, stragglers={5: 1.5}, missing=(2,), seed=7)
    return place, rank_traces.write(place, job)


@pytest.fixture(scope="module")
def trace(made: tuple[Path, dict[str, Any]]) -> Trace:
    return xsp.load(made[0] / "traces")


def rows(trace: Trace, identity: str) -> list[dict[str, Any]]:
    result = ANALYSES[identity](trace)
    return [dict(zip(result.columns, row, strict=True)) for row in result.fetchall()]


def test_the_straggler_is_found(trace: Trace) -> None:
    worst, *others = rows(trace, "stragglers")
    assert worst["rank"] == 5
    assert worst["came_last"] == worst["last_for_certain"] == worst["collectives"]
    assert worst["others_waited_ms"] > 100 * max(entry["others_waited_ms"] for entry in others)


def test_clocks_are_brought_together_within_what_is_stated(trace: Trace, made: tuple[Path, dict[str, Any]]) -> None:
    skew = made[1]["skew_ns"]
    for entry in rows(trace, "stragglers"):
        true_us = (skew[str(entry["rank"])] - skew["0"]) / 1e3
        assert entry["clock_offset_us"] == pytest.approx(true_us, abs=max(entry["clock_uncertainty_us"], 3))
        assert entry["clock_uncertainty_us"] < 10


def test_every_collective_of_each_communicator_is_found_on_all_its_ranks(trace: Trace, made: Any) -> None:
    result = rows(trace, "collective-skew")
    assert {entry["communicator"]: entry["ranks"] for entry in result} == {"world": 7, "tensor_0": 3, "tensor_1": 4}
    assert {entry["collectives"] for entry in rows(trace, "stragglers")} == {made[1]["collectives_per_rank"]}
    assert {entry["last_rank"] for entry in result if entry["communicator"] != "tensor_0"} == {5}


def test_collectives_are_summed_by_communicator(trace: Trace) -> None:
    result = {(entry["collective"], entry["communicator"]): entry for entry in rows(trace, "communication")}
    assert {key: (entry["calls"], entry["group_size"]) for key, entry in result.items()} == {
        ("all_reduce", "world"): (6 * 7, 8),
        ("all_gather", "tensor_0"): (6 * 3, 4),
        ("all_gather", "tensor_1"): (6 * 4, 4),
    }
    assert result["all_reduce", "world"]["hidden_ms"] > 0
    assert result["all_gather", "tensor_0"]["hidden_ms"] == 0


def test_missing_ranks_are_named(trace: Trace) -> None:
    warnings = [finding.text for finding in health(trace) if finding.severity == Severity.WARNING]
    assert warnings == ["missing 1 of 8 ranks: 2"]


def test_the_same_seed_makes_the_same_job(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        rank_traces.write(tmp_path / name, rank_traces.Job(ranks=2, steps=1, layers=1, group=2, seed=seed))
    a, b, c = (gzip.decompress((tmp_path / name / "traces" / "rank-1.json.gz").read_bytes()) for name in "abc")
    assert a == b != c
