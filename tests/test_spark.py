"""The same SQL on Spark: on a cluster with executors of its own, the answers are DuckDB's."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from parts.rank_traces import Job, write

pytest.importorskip("pyspark", reason="PySpark is not installed (pip install 'xsp[spark]')")
sqlglot = pytest.importorskip("sqlglot", reason="sqlglot is not installed (pip install 'xsp[spark]')")

import xsp  # noqa: E402
from xsp import spark  # noqa: E402
from xsp.analyses import ANALYSES  # noqa: E402
from xsp.errors import AnalysisError, PluginError, TraceError  # noqa: E402
from xsp.intake.importing import import_into  # noqa: E402
from xsp.spark import dialect, session  # noqa: E402
from xsp.trace import Trace  # noqa: E402

EVERYWHERE = [name for name, each in ANALYSES.items() if each.everywhere]
FEW = ["stragglers", "steps"]
ASKED = EVERYWHERE if os.environ.get("XSP_SPARK_ALL") else FEW
"""All of them take minutes on two cores; `XSP_SPARK_ALL=1` asks them all."""

needs_java = pytest.mark.skipif(shutil.which("java") is None, reason="there is no Java, which Spark runs on")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("job")
    write(place, Job(ranks=4, steps=2, layers=2, group=2, stragglers={1: 1.5}, seed=5))
    (place / "run").mkdir()
    import_into(place / "run", [str(place / "traces")])
    return place / "run"


@pytest.fixture(scope="module")
def on_spark(run: Path) -> Iterator[Trace]:
    """The job on a master, two workers and two executors, each a process of its own, on loopback."""
    before = os.environ.get("SPARK_LOCAL_IP")
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    trace = spark.load(str(run), "local-cluster[2,1,1024]")
    yield trace
    context = trace._spark.sparkContext  # type: ignore[attr-defined]
    logs = Path(sys.modules["pyspark"].__file__ or "").parent / "work" / context.applicationId
    trace._spark.stop()  # type: ignore[attr-defined]
    shutil.rmtree(logs, ignore_errors=True)
    if before is None:
        del os.environ["SPARK_LOCAL_IP"]
    else:
        os.environ["SPARK_LOCAL_IP"] = before


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, float):
        return theirs is not None and math.isclose(ours, theirs, rel_tol=1e-9, abs_tol=1e-9)
    if isinstance(ours, str) and ours.startswith("{"):
        return bool(json.loads(ours) == json.loads(theirs))
    return bool(ours == theirs)


@needs_java
@pytest.mark.slow
@pytest.mark.parametrize("name", ASKED)
def test_answers_are_those_of_duckdb(name: str, run: Path, on_spark: Trace) -> None:
    ours, theirs = ANALYSES[name](xsp.load(run)), ANALYSES[name](on_spark)
    assert (theirs.columns, theirs.types) == (ours.columns, ours.types)
    rows = list(zip(ours.fetchall(), theirs.fetchall(), strict=True))
    assert rows
    assert all(same(*pair) for row in rows for pair in zip(*row, strict=True))


@needs_java
@pytest.mark.slow
def test_executors_of_their_own_did_the_work(on_spark: Trace) -> None:
    status = on_spark._spark.sparkContext._jsc.sc().getExecutorMemoryStatus()  # type: ignore[attr-defined]
    assert status.size() == 1 + 2  # the driver is one of them


@needs_java
@pytest.mark.slow
def test_what_does_not_carry_over_is_refused(run: Path, on_spark: Trace) -> None:
    for name in ("A1", "ledger"):
        with pytest.raises(AnalysisError, match="rungs of a run say, which Spark does not compare"):
            ANALYSES[name](on_spark)
    with pytest.raises(TraceError, match="Spark reads no run there"):
        spark.load(str(run / "nowhere"), "local-cluster[2,1,1024]")


def carried(query: str) -> str:
    return dialect.translate(dialect.parse(query))


def test_the_latest_row_before_is_found_by_windows() -> None:
    assert carried("SELECT * FROM a ASOF LEFT JOIN b ON a.k = b.k AND b.t <= a.t") == (
        "SELECT * FROM a LEFT JOIN (SELECT *, LEAD(t) OVER (PARTITION BY k ORDER BY t NULLS LAST) AS asof_until FROM b)"
        " AS b ON (a.k = b.k AND b.t <= a.t) AND (b.asof_until IS NULL OR a.t < b.asof_until)"
    )


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("SELECT regexp_matches(n, 'a\\d', 'i')", "SELECT n RLIKE '(?i)a\\\\d'"),
        ("SELECT first(a ORDER BY b DESC)", "SELECT MIN_BY(a, NAMED_STRUCT('f1', -b))"),
        ("SELECT count(*) FILTER (WHERE a) OVER (ORDER BY b)",
         "SELECT COUNT(CASE WHEN a THEN 1 END) OVER (ORDER BY b NULLS LAST)"),
        ("SELECT quantile_cont(a, 0.9)", "SELECT PERCENTILE(a, CAST(0.9 AS DOUBLE))"),
        ("WITH a AS MATERIALIZED (SELECT 1) FROM a", "WITH a AS (SELECT 1) SELECT * FROM a"),
    ],
)  # fmt: skip
def test_sql_is_carried_over(ours: str, theirs: str) -> None:
    assert carried(ours) == theirs


def test_hashes_of_another_engine_are_not_taken_for_ours() -> None:
    with pytest.raises(AnalysisError, match=r"hash\(\): hash values of another engine are other values"):
        carried("SELECT bit_xor(hash(a)) FROM t")


def test_without_java_it_says_which_one_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nonexistent")
    with pytest.raises(PluginError, match="there is no Java; Spark 4 needs Java 17 or later"):
        session.start("spark")
