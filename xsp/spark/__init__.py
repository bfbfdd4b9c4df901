"""Analyses on Spark over the Parquet files of a run, for jobs with too many ranks for one machine.

An analysis is SQL; `dialect` translates DuckDB's SQL to Spark's, `session` finds or starts a cluster, `trace` has the
methods of `xsp.store.trace.Trace` that analyses use. See docs/use/ranks.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xsp.spark.session import start

if TYPE_CHECKING:
    from xsp.store.trace import Trace


def load(path: str, engine: str) -> Trace:
    """Return the trace of a run directory, read by a Spark cluster.

    Args:
        path: a path or a URL (`s3a://…`, `hdfs://…`), passed to Spark unchanged; a cluster of several machines must
            reach it from all of them. Traces of other tools must be imported first.
        engine: `spark`, or a Spark master URL: `spark://host:7077`, `yarn`, `local-cluster[2,1,1024]` …

    Raises:
        TraceError: there is no finished run.
        PluginError, AnalysisError: see `xsp.spark.session.start`.
    """
    session = start(engine)
    from xsp.spark.trace import SparkTrace  # its packages are installed, else `start` would have raised an error

    return SparkTrace(session, path.rstrip("/"))
