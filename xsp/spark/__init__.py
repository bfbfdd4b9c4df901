"""The analyses on Spark, over the Parquet files of a run: for jobs of more ranks than one machine should read.

An analysis is SQL; `dialect` writes DuckDB's SQL as Spark's, `session` finds or starts a cluster, `trace` has the
methods of `xsp.store.trace.Trace` that analyses use. See docs/use/ranks.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xsp.spark.session import start

if TYPE_CHECKING:
    from xsp.store.trace import Trace


def load(place: str, engine: str) -> Trace:
    """Return the trace of a run directory as a Spark cluster reads it.

    Args:
        place: a path or a URL (`s3a://…`, `hdfs://…`), handed to Spark as it is; a cluster of several machines must
            reach it from all of them. Traces of other tools are imported first.
        engine: `spark`, or a master URL of Spark's: `spark://host:7077`, `yarn`, `local-cluster[2,1,1024]` …

    Raises:
        TraceError: there is no run that is finished.
        PluginError, AnalysisError: see `xsp.spark.session.start`.
    """
    session = start(engine)
    from xsp.spark.trace import SparkTrace  # its packages are there, or `start` had said so

    return SparkTrace(session, place.rstrip("/"))
