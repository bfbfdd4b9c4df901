"""A trace whose spans are read by Spark, with the methods that analyses use.

Queries run on the cluster, and their results become tables of a DuckDB in this process: the result of an analysis is
small, however large its input. So code that prints or writes a result does not depend on where it was computed. Tables
that an analysis computes in Python are in that DuckDB, and are passed to Spark if a query needs both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import duckdb

from xsp import table
from xsp.errors import AnalysisError, TraceError
from xsp.run import Run
from xsp.rundir import MERGED_FILE, RUN_FILE, STEPS, job_of_ranks, parse_run
from xsp.schema import COLUMNS, MERGED_COLUMNS, SAMPLE_COLUMNS, Column
from xsp.spark import dialect
from xsp.spark.session import reason_of
from xsp.store.trace import Rung, Trace

TYPES = {"tinyint": "TINYINT", "smallint": "SMALLINT", "int": "INTEGER", "bigint": "BIGINT", "double": "DOUBLE",
         "float": "FLOAT", "string": "VARCHAR", "boolean": "BOOLEAN", "void": "INTEGER"}  # fmt: skip
"""Spark's types → DuckDB's names for them."""


OF_RUNGS = {"alike", "alike_spans"}
"""Tables that `xsp.store.merge` derives from the steps of a run, in addition to its spans."""

NO_RUNGS = "this asks what the rungs of a run say, which Spark does not compare; omit --engine"

NO_LOOP = "this asks the program's loop, which Spark does not read; omit --engine"

PARTS = "rank-*"
"""Path pattern of the runs of a job's ranks."""


class SparkTrace(Trace):
    """The views `spans`, `merged` and `samples` of a run directory on Spark."""

    def __init__(self, session: Any, place: str) -> None:
        """Read `run.json`, and create views of the Parquet files."""
        self._spark = session
        self._place = place
        self._made: set[str] = set()
        self.path = None
        self.run = self._read_job()
        self.con: Any = Queries(session)
        part = f"{place}/{PARTS}" if self.run.is_job else place
        self._show("spans", f"{part}/{STEPS}/*.parquet", COLUMNS)
        self._show("merged", f"{place}/{MERGED_FILE}", (*COLUMNS, *MERGED_COLUMNS))
        self._show("samples", f"{part}/samples/*.parquet", SAMPLE_COLUMNS, optional=True)

    @property
    def name(self) -> str:
        """The name of the run, else the last part of its path."""
        return self.run.name or self._place.rpartition("/")[2]

    @property
    def rungs(self) -> list[Rung]:  # type: ignore[override]
        """Unsupported: the cost of the levels of profiling is computed only from runs on one machine.

        Raises:
            AnalysisError: always.
        """
        raise AnalysisError(NO_RUNGS)

    def sql(self, query: str, params: Sequence[Any] | None = None) -> duckdb.DuckDBPyRelation:
        """Run a query in DuckDB's SQL on Spark."""
        answer: duckdb.DuckDBPyRelation = self.con.execute(query, params)
        return answer

    def create_temp_table(self, name: str, query: str, params: Sequence[Any] | None = None) -> None:
        """Create a table on the cluster, unless this trace has created it; it exists until the end of the session."""
        if not self.has_temp_table(name):
            self.con.keep(name, query, params)
            self._made.add(name)

    def _read_job(self) -> Run:
        """Return `run.json`; for a job, with the content of its ranks' files, as in `xsp.rundir.read_job`."""
        (run,) = self._read_runs(f"{self._place}/{RUN_FILE}")
        if run.is_job:
            run = job_of_ranks(run, self._read_runs(f"{self._place}/{PARTS}/{RUN_FILE}"))
        if not run.finished:
            raise TraceError(f"{self._place}: the run is not finished; `xsp analyze` without --engine reads it")
        return run

    def _read_runs(self, where: str) -> list[Run]:
        """Return the content of each `run.json`, by rank."""
        try:
            rows = self._spark.read.text(where, wholetext=True).collect()
            runs = [parse_run(row[0], where) for row in rows]
        except Exception as error:  # errors of Spark and Java, which depend on the URL's scheme
            raise TraceError(
                f"{where}: Spark reads no run there ({reason_of(error)}); import traces of other tools first: "
                "xsp import FOLDER -o RUN"
            ) from error
        return sorted(runs, key=lambda run: run.rank or 0)

    def _show(self, name: str, files: str, columns: Sequence[Column], optional: bool = False) -> None:
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
        self._here = table.connect()
        self._here.execute("SET python_scan_all_frames = true")  # rows to insert are arrays of a caller
        self._answers = 0
        self._own: set[str] = set()
        self._kept: dict[str, str] = {}

    def execute(self, query: str, params: Sequence[Any] | None = None) -> duckdb.DuckDBPyRelation:
        """Return the rows of a query; CREATE, INSERT, COPY, SET and RESET are executed in this process.

        Raises:
            AnalysisError: the query cannot be translated, or Spark rejects it; the message has the reason.
        """
        words = query.split(None, 1)[0].upper()
        if words in ("CREATE", "INSERT", "COPY", "SET", "RESET"):
            self._here.execute(query, params)
            self._own = {name for (name,) in self._here.execute("SELECT table_name FROM duckdb_tables()").fetchall()}
            return self._here.sql("SELECT 0 AS done")
        tree = dialect.parse(query)
        if dialect.tables(tree) <= self._own:
            return self._here.sql(query, params=params)
        return self._collected(self._asked(tree, params))

    def register(self, name: str, rows: Any) -> None:
        """Register rows under a name in this process, for INSERT."""
        self._here.register(name, rows)

    def unregister(self, name: str) -> None:
        """Remove a registered name."""
        self._here.unregister(name)

    def keep(self, name: str, query: str, params: Sequence[Any] | None = None) -> None:
        """Create a table for later queries, on the cluster if the query reads any table there."""
        tree = dialect.parse(query)
        if dialect.tables(tree) <= self._own:
            self._here.execute(f"CREATE OR REPLACE TEMP TABLE {name} AS {query}", params)
            self._own.add(name)
        else:
            self._computed(self._asked(tree, params), name)

    def _asked(self, tree: Any, params: Sequence[Any] | None) -> Any:
        if dialect.tables(tree) & OF_RUNGS:
            raise AnalysisError(NO_RUNGS)
        if "loop" in dialect.tables(tree):
            raise AnalysisError(NO_LOOP)
        for name in dialect.tables(tree) & self._own:
            self._hand_over(name)
        for cte, query in dialect.materialized(tree):
            cte.set("this", dialect.parse(f"SELECT * FROM {self._kept_as(query)}"))
        try:
            return self._spark.sql(dialect.translate(tree), args=list(params) if params else None)
        except AnalysisError:
            raise
        except Exception as error:
            raise AnalysisError(f"Spark does not take this query: {reason_of(error)}") from error

    def _kept_as(self, query: str) -> str:
        """Return the view of a materialised query; identical queries share one view."""
        if query not in self._kept:
            name = f"kept_{len(self._kept)}"
            try:
                frame = self._spark.sql(query)
            except Exception as error:
                raise AnalysisError(f"Spark does not take this query: {reason_of(error)}") from error
            self._computed(frame, name)
            self._kept[query] = name
        return self._kept[query]

    @staticmethod
    def _computed(frame: Any, name: str) -> None:
        """Compute a table on the cluster now, and create a view of it.

        A table that is merely cached appears in each later plan with its whole derivation, once for each mention; with
        a few such tables, plans grow to tens of thousands of nodes.
        """
        try:
            frame.localCheckpoint().createOrReplaceTempView(name)
        except Exception as error:
            raise AnalysisError(f"Spark could not answer: {reason_of(error)}") from error

    def _hand_over(self, name: str) -> None:
        """Copy a table of this process to Spark."""
        rows = self._here.sql(f"SELECT * FROM {name}")
        kinds = {ours: theirs for theirs, ours in TYPES.items() if theirs != "void"}
        if unsupported := sorted({str(kind) for kind in rows.types} - kinds.keys()):
            raise AnalysisError(f"Spark cannot hold columns of the type {', '.join(unsupported)}")
        schema = ", ".join(
            f"`{column}` {kinds[str(kind)]}" for column, kind in zip(rows.columns, rows.types, strict=True)
        )
        self._spark.createDataFrame(rows.fetchall(), schema).createOrReplaceTempView(name)

    def _collected(self, frame: Any) -> duckdb.DuckDBPyRelation:
        """Fetch rows into a table of this process."""
        try:
            rows = frame.collect()
        except Exception as error:
            raise AnalysisError(f"Spark could not answer: {reason_of(error)}") from error
        self._answers += 1
        name = f"answer_{self._answers}"
        columns = [
            Column(_quoted(field.name), _type(field.dataType.simpleString()), "") for field in frame.schema.fields
        ]
        table.create(self._here, name, columns)
        table.insert(self._here, name, [tuple(row) for row in rows], columns)
        return self._here.sql(f"SELECT * FROM {name}")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _type(theirs: str) -> str:
    """Return DuckDB's name of a Spark type; sums of integers are decimals in Spark."""
    if theirs.startswith("array<"):
        return f"{_type(theirs[6:-1])}[]"
    if theirs.startswith("decimal("):
        return "DOUBLE" if not theirs.endswith(",0)") else "HUGEINT"
    if theirs not in TYPES:
        raise AnalysisError(f"Spark answers with a type that is no column here: {theirs}")
    return TYPES[theirs]
