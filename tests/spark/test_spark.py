"""The same SQL on Spark: on a cluster with executors of its own, the answers are DuckDB's."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import duckdb
import pytest
from parts.rank_traces import Job, write
from parts.spark_cluster import differences, two_executors

sqlglot = pytest.importorskip("sqlglot", reason="sqlglot is not installed (pip install 'xsp[spark]')")

import xsp  # noqa: E402
from xsp import spark, table  # noqa: E402
from xsp.analyses import ANALYSES  # noqa: E402
from xsp.errors import AnalysisError, PluginError, TraceError  # noqa: E402
from xsp.ingest.sources import import_into  # noqa: E402
from xsp.rundir import LOOP_FILE  # noqa: E402
from xsp.samples.nvml import MASK  # noqa: E402
from xsp.schema import LOOP_COLUMNS, Kind  # noqa: E402
from xsp.spark import dialect, session  # noqa: E402
from xsp.spark.trace import Queries  # noqa: E402
from xsp.store.trace import Trace  # noqa: E402

EVERYWHERE = [name for name, each in ANALYSES.items() if each.everywhere]
OF_RUNGS = ["A1", "account", "ledger"]
OF_ACCOUNT = {"phases", "phases-over-time", "health"}
"""Analyses of a trace with layers that read the account of an iteration, which compares level sets."""

OF_LOOP = ["loop", "mfu", "energy"]
FEW = ["stragglers", "steps", "critical-path-summary", "queues", "kernel-sequences"]
ALL = bool(os.environ.get("XSP_SPARK_ALL"))
"""All analyses take minutes on two cores; `XSP_SPARK_ALL=1` asks them all."""

REAL = "traces/kineto_nvidia/tracelens_h100_qwen1.5-0.5b.json.gz"
MISSING = [name for name, there in (("PySpark (pip install 'xsp[spark]')", find_spec("pyspark")),
                                    ("Java, which Spark runs on", shutil.which("java"))) if not there]  # fmt: skip
needs_spark = pytest.mark.skipif(bool(MISSING), reason=f"not here: {', '.join(MISSING)}")

SOON = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
SUBMITTED = (
    f"--driver-java-options '{SOON}' --conf 'spark.executor.extraJavaOptions={SOON}' "
    "--conf spark.sql.codegen.wholeStage=false --conf spark.sql.codegen.factoryMode=NO_CODEGEN "
    "--conf spark.sql.adaptive.enabled=false pyspark-shell"
)
"""Small queries once: Java and Spark compile nothing for a long run, which takes half the time."""


def imported(place: Path, *sources: str) -> Path:
    place.mkdir()
    import_into(place, list(sources))
    return place


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("job")
    write(place, Job(ranks=4, steps=2, layers=2, group=2, stragglers={1: 1.5}, seed=5))
    return imported(place / "run", str(place / "traces"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A master, two workers and two executors, each a process of its own, on loopback."""
    with pytest.MonkeyPatch.context() as patch, two_executors() as engine:
        patch.setenv("PYSPARK_SUBMIT_ARGS", SUBMITTED)
        yield engine


@pytest.fixture(scope="module")
def on_spark(run: Path, cluster: str) -> Trace:
    return spark.load(str(run), cluster)


@needs_spark
@pytest.mark.slow
@pytest.mark.parametrize("name", EVERYWHERE if ALL else FEW)
def test_answers_are_those_of_duckdb(name: str, run: Path, on_spark: Trace) -> None:
    ours = ANALYSES[name](xsp.load(run))
    assert len(ours) > 0 or name == "attention"  # the written job has none
    assert differences(ours, ANALYSES[name](on_spark)) == []


@pytest.fixture(scope="module")
def sampled(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real trace with layers and memory, to which readings of a device's clocks are added."""
    place = imported(tmp_path_factory.mktemp("real") / "run", str(shared / REAL))
    (place / "samples").mkdir()
    duckdb.sql(
        f"""
        COPY (
            SELECT start_ns + (i * dur_ns // 20)::BIGINT AS time_ns, rank, 0::INTEGER AS device, f.name, f.unit,
                   (value + i % 3)::DOUBLE AS value
            FROM '{place}/merged.parquet', range(20) t(i), (
                VALUES ('{MASK}', '1', 4), ('gpu.power', 'W', 300), ('gpu.memory.used', 'bytes', 1e9)
            ) f(name, unit, value) WHERE kind = '{Kind.STEP}'
        ) TO '{place}/samples/000000.parquet'
        """
    )
    return place


@needs_spark
@pytest.mark.slow
@pytest.mark.skipif(not ALL, reason="takes minutes: XSP_SPARK_ALL=1")
def test_a_real_trace_is_answered_as_by_duckdb(sampled: Path, cluster: str) -> None:
    ours, theirs = xsp.load(sampled), spark.load(str(sampled), cluster)
    asked = [
        each for name, each in ANALYSES.items() if name not in (*OF_RUNGS, *OF_LOOP) and each.refusal(ours) is None
    ]
    assert {"A14", "stages", "memory-steps", "samples-timeline", "throttling"} <= {each.id for each in asked}
    found, refused = {}, set()
    for each in asked:
        try:
            found[each.id] = differences(each(ours), each(theirs))
        except AnalysisError as error:
            assert "level sets of a run, which Spark does not do" in str(error)  # noqa: PT017
            refused.add(each.id)
    assert {name: rows for name, rows in found.items() if rows} == {}
    assert refused == OF_ACCOUNT


@needs_spark
@pytest.mark.slow
def test_executors_of_their_own_did_the_work(on_spark: Trace) -> None:
    status = on_spark._spark.sparkContext._jsc.sc().getExecutorMemoryStatus()  # type: ignore[attr-defined]
    assert status.size() == 1 + 2  # the driver is one of them


@needs_spark
@pytest.mark.slow
def test_what_does_not_carry_over_is_refused(run: Path, on_spark: Trace, cluster: str, tmp_path: Path) -> None:
    for name in OF_RUNGS:
        with pytest.raises(AnalysisError, match="level sets of a run, which Spark does not do"):
            ANALYSES[name](on_spark)
    with_loop = tmp_path / "with loop"
    shutil.copytree(run, with_loop)
    for rank in [each for each in sorted(with_loop.iterdir()) if each.name.startswith("rank-")] or [with_loop]:
        con = table.connect()
        table.create(con, "loop", LOOP_COLUMNS)
        table.write_parquet(con, "loop", rank / LOOP_FILE)
    looped = spark.load(str(with_loop), cluster)
    for name in OF_LOOP:
        with pytest.raises(AnalysisError, match="the program's loop, which Spark does not read"):
            ANALYSES[name](looped)
    with pytest.raises(TraceError, match="Spark reads no run there"):
        spark.load(str(run / "nowhere"), cluster)


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
        ("SELECT last(a ORDER BY b)", "SELECT MAX_BY(a, NAMED_STRUCT('f1', b))"),
        ("SELECT count(*) FILTER (WHERE a) OVER (ORDER BY b)",
         "SELECT COUNT(CASE WHEN a THEN 1 END) OVER (ORDER BY b NULLS LAST)"),
        ("SELECT quantile_cont(a, 0.9)", "SELECT PERCENTILE(a, CAST(0.9 AS DOUBLE))"),
        ("SELECT json_extract_string(a, ['$.b', '$.c'])[1], l[:3]",
         "SELECT ARRAY(GET_JSON_OBJECT(a, '$.b'), GET_JSON_OBJECT(a, '$.c'))[0], SLICE(l, 1, 3)"),
        ("WITH a AS MATERIALIZED (SELECT 1) FROM a", "WITH a AS (SELECT 1) SELECT * FROM a"),
    ],
)  # fmt: skip
def test_sql_is_carried_over(ours: str, theirs: str) -> None:
    assert carried(ours) == theirs


def test_answers_are_written_here(tmp_path: Path) -> None:
    con = Queries(None)
    con.execute("CREATE TABLE answer AS SELECT 1 AS a")
    table.write(con, con.execute("FROM answer"), tmp_path / "a.csv", "csv")  # type: ignore[arg-type]
    assert (tmp_path / "a.csv").read_text() == "a\n1\n"


def test_hashes_of_another_engine_are_not_taken_for_ours() -> None:
    with pytest.raises(AnalysisError, match=r"hash\(\): hash values of another engine are other values"):
        carried("SELECT bit_xor(hash(a)) FROM t")


def test_a_place_in_a_list_that_is_computed_is_refused() -> None:
    with pytest.raises(AnalysisError, match=r"does not carry over to Spark: l\[i \+ 1\]"):
        carried("SELECT l[i + 1]")


def test_without_pyspark_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    with pytest.raises(PluginError, match=r"pyspark.* is not installed; pip install 'xsp\[spark\]'"):
        session.start("spark")


@pytest.mark.skipif(find_spec("pyspark") is None, reason="PySpark is not installed (pip install 'xsp[spark]')")
def test_without_java_it_says_which_one_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nonexistent")
    with pytest.raises(PluginError, match="there is no Java; Spark 4 needs Java 17 or later"):
        session.start("spark")
