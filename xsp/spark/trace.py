"""A trace whose spans are read by Spark, with the methods that analyses use.

Queries run on the cluster, and their results become tables of a DuckDB in this process: the result of an analysis is
small, however large its input. So code that prints or writes a result does not depend on where it was computed. Tables
that an analysis computes in Python are in that DuckDB, and are passed to Spark if a query needs both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import duckdb

from xsp import table
from xsp.errors import AnalysisError, TraceError
from xsp.run import Run
from xsp.rundir import LOOP_FILE, MERGED_FILE, RUN_FILE, STEPS, job_of_ranks, parse_run
from xsp.schema import COLUMNS, LOOP_COLUMNS, MERGED_COLUMNS, SAMPLE_COLUMNS, Column
from xsp.spark import dialect
from xsp.spark.session import reason_of
from xsp.store import iterations
from xsp.store.trace import Rung, Trace

TYPES = {"tinyint": "TINYINT", "smallint": "SMALLINT", "int": "INTEGER", "bigint": "BIGINT", "double": "DOUBLE",
         "float": "FLOAT", "string": "VARCHAR", "boolean": "BOOLEAN", "void": "INTEGER"}  # fmt: skip
"""Spark's types → DuckDB's names for them."""


RUNG_TABLES = {"alike", "alike_spans"}
"""Tables that `xsp.store.merge` derives from the steps of a run, in addition to its spans."""

NO_RUNGS = "this compares the level sets of a run, which Spark does not do; omit --engine"

LOOP_TABLES = {"loop", "bare_steps", "undisturbed"}
"""Tables of the program's loop."""

NO_LOOP = "this asks the program's loop, which Spark does not read; omit --engine"

RANK_PATTERN = "rank-*"
"""Path pattern of the runs of a job's ranks."""


class SparkTrace(Trace):
    """The views `spans`, `merged` and `samples` of a run directory on Spark."""

    def __init__(self, session: Any, path: str) -> None:
        """Read `run.json`, and create views of the Parquet files."""
        self._spark = session
        self._path = path
        self._temp_tables: set[str] = set()
        self._cached = {}
        self.path = None
        # `run.json`; for a job, with the content of its ranks' files, as in `xsp.rundir.read_job`
        (run,) = self._read_runs(f"{self._path}/{RUN_FILE}")
        if run.is_job:
            run = job_of_ranks(run, self._read_runs(f"{self._path}/{RANK_PATTERN}/{RUN_FILE}"))
        if not run.finished:
            raise TraceError(f"{self._path}: the run is not finished; `xsp analyze` without --engine reads it")
        self.run = run
        self.con: Any = Queries(session)
        part = f"{path}/{RANK_PATTERN}" if self.run.is_job else path
        self._create_view("spans", f"{part}/{STEPS}/*.parquet", COLUMNS)
        self._create_view("merged", f"{path}/{MERGED_FILE}", (*COLUMNS, *MERGED_COLUMNS))
        self._create_view("samples", f"{part}/samples/*.parquet", SAMPLE_COLUMNS, optional=True)
        if not self._exists(f"{part}/{LOOP_FILE}"):
            table.create(cast(Any, self.con), "loop", LOOP_COLUMNS)
            iterations.create_tables(cast(Any, self.con))

    @property
    def name(self) -> str:
        """The name of the run, else the last part of its path."""
        return self.run.name or self._path.rpartition("/")[2]

    @property
    def rungs(self) -> list[Rung]:  # type: ignore[override]
        """Unsupported: the cost of the levels of profiling is computed only from runs on one machine.

        Raises:
            AnalysisError: always.
        """
        raise AnalysisError(NO_RUNGS)

    def sql(self, query: str, params: Sequence[Any] | None = None) -> duckdb.DuckDBPyRelation:
        """Run a query in DuckDB's SQL on Spark."""
        result: duckdb.DuckDBPyRelation = self.con.execute(query, params)
        return result

    def create_temp_table(self, name: str, query: str, params: Sequence[Any] | None = None) -> None:
        """Create a table on the cluster, unless this trace has created it; it exists until the end of the session."""
        if not self.has_temp_table(name):
            self.con.create_table(name, query, params)
            self._temp_tables.add(name)

    def _read_runs(self, pattern: str) -> list[Run]:
        """Return the content of each `run.json`, by rank."""
        try:
            rows = self._spark.read.text(pattern, wholetext=True).collect()
            runs = [parse_run(row[0], pattern) for row in rows]
        except Exception as error:  # errors of Spark and Java, which depend on the URL's scheme
            raise TraceError(
                f"{pattern}: Spark reads no run there ({reason_of(error)}); import traces of other tools first: "
                "xsp import FOLDER -o RUN"
            ) from error
        return sorted(runs, key=lambda run: run.rank or 0)

    def _exists(self, files: str) -> bool:
        try:
            self._spark.read.parquet(files)
        except Exception:  # of Spark and Java, which depend on the URL's scheme
            return False
        return True

    def _create_view(self, name: str, files: str, columns: Sequence[Column], optional: bool = False) -> None:
        """Create a view of files with all columns; missing columns have their defaults."""
        try:
            frame = self._spark.read.parquet(files)
        except Exception as error:
            if not optional:
                raise TraceError(f"{files}: Spark reads no spans there ({reason_of(error)})") from error
            frame = self._spark.createDataFrame([], "none int")
        frame.createOrReplaceTempView(f"{name}_files")
        select_list = table.select_list(columns, frame.columns)
        view = dialect.translate(dialect.parse(f"SELECT {select_list} FROM {name}_files"))
        self._spark.sql(view).createOrReplaceTempView(name)


class Queries:
    """A stand-in for a DuckDB connection that takes DuckDB's SQL and runs it on Spark."""

    def __init__(self, session: Any) -> None:
        self._spark = session
        self._local = table.connect()
        self._local.execute("SET python_scan_all_frames = true")  # rows to insert are arrays of a caller
        self._result_count = 0
        self._local_tables: set[str] = set()
        self._materialized: dict[str, str] = {}

    def execute(self, query: str, params: Sequence[Any] | None = None) -> duckdb.DuckDBPyRelation:
        """Return the rows of a query; CREATE, INSERT, COPY, SET and RESET are executed in this process.

        Raises:
            AnalysisError: the query cannot be translated, or Spark rejects it; the message has the reason.
        """
        statement = query.split(None, 1)[0].upper()
        if statement in ("CREATE", "INSERT", "COPY", "SET", "RESET"):
            self._local.execute(query, params)
            self._local_tables = {
                name for (name,) in self._local.execute("SELECT table_name FROM duckdb_tables()").fetchall()
            }
            return self._local.sql("SELECT 0 AS done")
        tree = dialect.parse(query)
        if dialect.tables(tree) <= self._local_tables:
            return self._local.sql(query, params=params)
        return self._collect(self._run_query(tree, params))

    def register(self, name: str, rows: Any) -> None:
        """Register rows under a name in this process, for INSERT."""
        self._local.register(name, rows)

    def unregister(self, name: str) -> None:
        """Remove a registered name."""
        self._local.unregister(name)

    def create_table(self, name: str, query: str, params: Sequence[Any] | None = None) -> None:
        """Create a table for later queries, on the cluster if the query reads any table there."""
        tree = dialect.parse(query)
        if dialect.tables(tree) <= self._local_tables:
            self._local.execute(f"CREATE OR REPLACE TEMP TABLE {name} AS {query}", params)
            self._local_tables.add(name)
        else:
            self._checkpoint(self._run_query(tree, params), name)

    def _run_query(self, tree: Any, params: Sequence[Any] | None) -> Any:
        if dialect.tables(tree) & RUNG_TABLES:
            raise AnalysisError(NO_RUNGS)
        if LOOP_TABLES & (dialect.tables(tree) - self._local_tables):
            raise AnalysisError(NO_LOOP)
        for name in dialect.tables(tree) & self._local_tables:
            self._copy_to_spark(name)
        for cte, query in dialect.materialized(tree):
            cte.set("this", dialect.parse(f"SELECT * FROM {self._materialize(query)}"))
        try:
            return self._spark.sql(dialect.translate(tree), args=list(params) if params else None)
        except AnalysisError:
            raise
        except Exception as error:
            raise AnalysisError(f"Spark does not take this query: {reason_of(error)}") from error

    def _materialize(self, query: str) -> str:
        """Return the view of a materialised query; identical queries share one view."""
        if query not in self._materialized:
            name = f"materialized_{len(self._materialized)}"
            try:
                frame = self._spark.sql(query)
            except Exception as error:
                raise AnalysisError(f"Spark does not take this query: {reason_of(error)}") from error
            self._checkpoint(frame, name)
            self._materialized[query] = name
        return self._materialized[query]

    @staticmethod
    def _checkpoint(frame: Any, name: str) -> None:
        """Compute a table on the cluster now, and create a view of it.

        A table that is merely cached appears in each later plan with its whole derivation, once for each mention; with
        a few such tables, plans grow to tens of thousands of nodes.
        """
        try:
            frame.localCheckpoint().createOrReplaceTempView(name)
        except Exception as error:
            raise AnalysisError(f"Spark could not answer: {reason_of(error)}") from error

    def _copy_to_spark(self, name: str) -> None:
        """Copy a table of this process to Spark."""
        rows = self._local.sql(f"SELECT * FROM {name}")
        spark_types = {duckdb_type: spark_type for spark_type, duckdb_type in TYPES.items() if spark_type != "void"}
        if unsupported := sorted({str(column_type) for column_type in rows.types} - spark_types.keys()):
            raise AnalysisError(f"Spark cannot hold columns of the type {', '.join(unsupported)}")
        schema = ", ".join(
            f"`{column}` {spark_types[str(column_type)]}"
            for column, column_type in zip(rows.columns, rows.types, strict=True)
        )
        self._spark.createDataFrame(rows.fetchall(), schema).createOrReplaceTempView(name)

    def _collect(self, frame: Any) -> duckdb.DuckDBPyRelation:
        """Fetch rows into a table of this process."""
        try:
            rows = frame.collect()
        except Exception as error:
            raise AnalysisError(f"Spark could not answer: {reason_of(error)}") from error
        self._result_count += 1
        name = f"result_{self._result_count}"
        columns = [
            Column('"' + field.name.replace('"', '""') + '"', _type(field.dataType.simpleString()), "")
            for field in frame.schema.fields
        ]
        table.create(self._local, name, columns)
        table.insert(self._local, name, [tuple(row) for row in rows], columns)
        return self._local.sql(f"SELECT * FROM {name}")


def _type(spark_type: str) -> str:
    """Return DuckDB's name of a Spark type; sums of integers are decimals in Spark."""
    if spark_type.startswith("array<"):
        return f"{_type(spark_type[6:-1])}[]"
    if spark_type.startswith("decimal("):
        return "DOUBLE" if not spark_type.endswith(",0)") else "HUGEINT"
    if spark_type not in TYPES:
        raise AnalysisError(f"Spark answers with a type that is no column here: {spark_type}")
    return TYPES[spark_type]
