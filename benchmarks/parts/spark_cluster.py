"""A Spark cluster on loopback with separate executor processes, and a comparison of the answers of two engines."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb

ENGINE = "local-cluster[2,1,1024]"
"""A master and two workers, each with one executor of one core and 1 GB."""


@contextmanager
def two_executors() -> Iterator[str]:
    """Yield the name of a cluster that the first `xsp.spark.load` starts; stop it and remove its logs at the end."""
    from pyspark.sql import SparkSession

    before = os.environ.get("SPARK_LOCAL_IP")
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    try:
        yield ENGINE
    finally:
        session = SparkSession.getActiveSession()
        if session is not None:
            logs = Path(sys.modules["pyspark"].__file__ or "").parent / "work" / session.sparkContext.applicationId
            session.stop()
            shutil.rmtree(logs, ignore_errors=True)
        if before is None:
            del os.environ["SPARK_LOCAL_IP"]
        else:
            os.environ["SPARK_LOCAL_IP"] = before


def differences(ours: duckdb.DuckDBPyRelation, theirs: duckdb.DuckDBPyRelation) -> list[tuple[Any, ...]]:
    """Return at most ten differences between two answers: columns, types, number of rows, cells.

    Floating-point numbers are compared to nine digits, since engines sum them in different orders.
    """
    heads = [(str(a), str(b)) for a, b in zip((ours.columns, ours.types), (theirs.columns, theirs.types), strict=True)]
    rows, others = ours.fetchall(), theirs.fetchall()
    found: list[tuple[Any, ...]] = [pair for pair in [*heads, (len(rows), len(others))] if pair[0] != pair[1]]
    for place, (row, other) in enumerate(zip(rows, others, strict=False)):
        found += [(place, name, a, b) for name, a, b in zip(ours.columns, row, other, strict=True) if not _same(a, b)]
    return found[:10]


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, float):
        return theirs is not None and math.isclose(ours, theirs, rel_tol=1e-9, abs_tol=1e-9)
    if isinstance(ours, str) and ours.startswith("{"):
        return bool(json.loads(ours) == json.loads(theirs))
    return bool(ours == theirs)
